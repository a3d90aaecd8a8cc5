"""Reading what a model is from its config.json."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mstar.errors import ConfigError
from mstar.models.arch import arch_from_config, load_arch
from tests.unit.models.tiny import FAMILIES, make_model

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def read(generation=None, **changes):
    return arch_from_config({**SMOLLM2, **changes}, generation or {}, where="config.json")


def test_the_demo_models_config_reads_as_it_is():
    arch = read()
    assert (arch.family, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.num_layers) == ("llama", 9, 3, 64, 30)
    assert arch.tie_word_embeddings and not arch.qkv_bias and not arch.qk_norm
    assert dict(arch.rope) == {"rope_type": "default", "rope_theta": 100000}
    assert arch.windows == (None,) * 30 and arch.dtype == "bfloat16" and arch.eos_token_ids == (2,)


def test_both_spellings_of_rope_read_alike():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}
    old = read(rope_theta=500000.0, rope_scaling={"type": "llama3", **scaling})
    new = read(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})
    assert dict(old.rope) == dict(new.rope)


def test_end_of_sequence_ids_come_from_both_files_each_once():
    assert read({"eos_token_id": [7, 9]}, eos_token_id=7).eos_token_ids == (7, 9)
    assert read({"eos_token_id": 5}, eos_token_id=[7]).eos_token_ids == (5, 7)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_qwen_windows_start_at_max_window_layers_and_only_when_switched_on():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 16, "max_window_layers": 1}
    assert read(**qwen).windows == (None, None, None)
    assert read(**qwen, use_sliding_window=True).windows == (None, 16, 16)
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    assert read(**qwen, use_sliding_window=True, layer_types=layer_types).windows == (16, None, None)


def test_where_the_file_is_silent_the_familys_own_default_holds():
    silent = {key: value for key, value in SMOLLM2.items() if key not in ("num_key_value_heads", "eos_token_id")}
    mistral = arch_from_config({**silent, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16}, {}, where="config.json")
    assert (mistral.windows[0], mistral.num_kv_heads, mistral.eos_token_ids) == (4096, 8, (2,))
    assert read(architectures=["MistralForCausalLM"], sliding_window=None).windows == (None,) * 30
    assert arch_from_config(silent, {}, where="config.json").num_kv_heads == 9
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_reads_as_what_it_means(family, tmp_path):
    config = make_model(family, tmp_path).config
    arch = load_arch(tmp_path)
    assert arch.head_dim == getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert arch.tie_word_embeddings == config.tie_word_embeddings
    assert arch.rope["rope_type"] == config.rope_parameters["rope_type"]
    assert arch.rope["rope_theta"] == config.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is .*MambaForCausalLM.*; allowed: one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_size": "576"}, "hidden_size is '576'; allowed: a whole number of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "rope_type is 'su'; allowed: one of default"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters.factor is None"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; allowed: one of float32"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; allowed: a divisor of num_attention_heads = 9"),
        ({"head_dim": 63}, "head_dim is 63; allowed: an even number"),
    ],
)
def test_what_cannot_be_served_is_refused_naming_field_value_and_what_is_allowed(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("config.json: ")


def test_a_missing_folder_or_file_is_one_readable_line(tmp_path):
    with pytest.raises(ConfigError, match=r"model is '.*nowhere', which is not a folder"):
        load_arch(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        load_arch(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_arch(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="must hold a JSON object, found list"):
        load_arch(tmp_path)


def test_reading_an_architecture_imports_no_torch():
    code = "import sys, mstar.models.arch, mstar.models.lora_targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
