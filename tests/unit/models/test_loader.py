"""Loading: what is read, from which files, and what is said when it is not there."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar.distributed.comm import CommGroup
from mstar.distributed.shards import even_cuts, plan_heads
from mstar.errors import ConfigError
from mstar.models import loader
from mstar.models.arch import load_arch
from mstar.models.loader import load_decoder
from tests.unit.models.tiny import make_engine, make_model, some_tokens


@pytest.fixture
def folder(tmp_path):
    make_model("smollm2", tmp_path)
    return tmp_path


def load(folder, comm=None, max_model_len=64):
    return load_decoder(folder, load_arch(folder), comm or CommGroup.single(), torch.float32, "cpu", max_model_len, None, None)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_an_index_over_several_files_loads_like_one_file(folder):
    tokens = some_tokens(9, seed=1)
    (expected,) = make_engine(folder).step([("a", tokens)])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (got,) = make_engine(folder).step([("a", tokens)])
    assert torch.equal(got, expected)


class RecordingFile:
    """A safetensors handle that notes how many rows and columns of each tensor are read."""

    def __init__(self, handle, read):
        self.handle, self.read = handle, read

    def __enter__(self):
        self.handle.__enter__()
        return self

    def __exit__(self, *error):
        return self.handle.__exit__(*error)

    def keys(self):
        return self.handle.keys()

    def get_slice(self, name):
        return RecordingSlice(name, self.handle.get_slice(name), self.read)


class RecordingSlice:
    def __init__(self, name, view, read):
        self.name, self.view, self.read = name, view, read

    def get_shape(self):
        return self.view.get_shape()

    def __getitem__(self, index):
        tensor = self.view[index]
        self.read[self.name] = tuple(tensor.shape)
        return tensor


@pytest.mark.parametrize("tp_rank", range(4))
def test_a_rank_reads_its_own_slices_of_the_files_and_no_more(folder, tp_rank, monkeypatch):
    read = {}
    opener = loader.safe_open
    monkeypatch.setattr(loader, "safe_open", lambda *args, **kwargs: RecordingFile(opener(*args, **kwargs), read))
    load(folder, CommGroup(tp_rank, 4))
    arch, plan = load_arch(folder), plan_heads(9, 3, 4)
    q, kv = ((stop - start) * arch.head_dim for start, stop in (plan.q_ranges[tp_rank], plan.kv_ranges[tp_rank]))
    mlp, vocab = (stop - start for start, stop in (even_cuts(total, 4)[tp_rank] for total in (arch.intermediate_size, arch.vocab_size)))
    hidden = arch.hidden_size
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    expected = {f"model.layers.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    assert read == {**expected, "model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_shape_that_the_config_does_not_describe_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[7\]; config\.json asks for \[144\]"):
        load(folder)


def test_missing_and_broken_files_are_one_readable_line(folder):
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot read .*index\.json"):
        load(folder)


@pytest.mark.parametrize(("family", "limit"), [("llama-dynamic", 256), ("llama-longrope", 128)])
def test_a_scaling_that_changes_with_length_is_served_up_to_where_it_stands_still(family, limit, tmp_path):
    make_model(family, tmp_path)
    load(tmp_path, max_model_len=limit)
    with pytest.raises(ConfigError, match=f"max_model_len is {limit + 1}; .* up to {limit} positions"):
        load(tmp_path, max_model_len=limit + 1)
