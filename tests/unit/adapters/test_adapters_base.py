"""Shapes from `config.json` are those of the model that transformers builds from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_folders import BASE, CONFIG
from transformers import AutoConfig, AutoModelForCausalLM

from mstar.adapters import BaseShapes
from mstar.errors import ConfigError

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "num_key_value_heads": 2},
        {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 32},
        {"model_type": "llama", "num_key_value_heads": 2, "head_dim": None, "tie_word_embeddings": True},
        {"model_type": "mistral", "num_attention_heads": 8},
        {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": None},
        {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
        {"model_type": "qwen3", "num_key_value_heads": 2},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    ],
)
def test_shapes_are_those_of_transformers(config: dict[str, Any]) -> None:
    config = {**SMALL, **config}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    base = BaseShapes.from_config(config)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.in_features, module.out_features)
        elif isinstance(module, torch.nn.Embedding):
            found[name] = (module.num_embeddings, module.embedding_dim)
    assert {name: base.module(name) for name in found} == found
    assert len(found) == 2 + 7 * base.num_layers
    assert base.tied_head == config.get("tie_word_embeddings", False)
    assert base.module(f"model.layers.{base.num_layers}.self_attn.q_proj") is None


@pytest.mark.parametrize(
    "path", ["", "model", "model.norm", "model.layers.0", "model.layers.-1.self_attn.q_proj", "model.layers.00.self_attn.q_proj",
             "model.layers.².self_attn.q_proj", "xmodel.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj", "model.layers."]
)  # fmt: skip
def test_there_is_no_other_module(path: str) -> None:
    assert BASE.module(path) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "None"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "128"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
    ],
)
def test_another_config_is_refused_with_the_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BaseShapes.from_config({**CONFIG, **change})
