"""The LoRA spec of a model: the fused targets and every rank's cut of them."""

from __future__ import annotations

import pytest

from mstar.errors import ConfigError
from mstar.models.lora_targets import lora_spec
from tests.unit.models.test_arch import read


def spec(tp_size):
    return lora_spec(read(), tp_size, max_loras=2, max_lora_rank=16, max_cpu_loras=4, adapters={"a": "/tmp/a"})


def test_the_targets_are_the_decoders_four_linears_over_all_seven_projections():
    targets = {target.name: ([part.module for part in target.parts], target.row_parallel) for target in spec(1).targets}
    assert targets == {
        "qkv_proj": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], False),
        "o_proj": (["self_attn.o_proj"], True),
        "gate_up_proj": (["mlp.gate_proj", "mlp.up_proj"], False),
        "down_proj": (["mlp.down_proj"], True),
    }
    assert spec(1).adapters == {"a": "/tmp/a"} and spec(1).num_layers == 30


def test_cuts_follow_the_head_plan_where_ranks_share_kv_heads():
    four = spec(4)
    q, k, _ = four.target("qkv_proj").parts
    assert q.out_ranges == ((0, 192), (192, 320), (320, 448), (448, 576)) and q.in_ranges == ((0, 576),) * 4
    assert k.out_ranges == ((0, 64), (64, 128), (64, 192), (128, 192))
    assert four.target("qkv_proj").out_sizes(2) == (128, 128, 128)
    (o,) = four.target("o_proj").parts
    assert o.in_ranges == q.out_ranges and o.out_ranges == ((0, 576),) * 4
    (down,) = four.target("down_proj").parts
    assert down.in_ranges == four.target("gate_up_proj").parts[0].out_ranges == ((0, 384), (384, 768), (768, 1152), (1152, 1536))


def test_more_ranks_than_query_heads_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 10"):
        spec(10)
