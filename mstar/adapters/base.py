"""What adapters are checked against: the shapes of the base model, taken from its Hugging Face `config.json`.

Pure data; the same object in the CLI, the front and every rank. Shapes are global, never a rank's shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mstar.errors import ConfigError
from mstar.types import EMBEDDING, HEAD

Shape = tuple[int, int]  # (in_features, out_features)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Hugging Face's defaults where config.json leaves a key away.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_HEAD_DIM = {"qwen3": 128}

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)


@dataclass(frozen=True)
class BaseShapes:
    """The base's linears. `leaves` maps a path below a layer (`self_attn.q_proj`) to (in_features, out_features).

    `biases` are the leaves with a bias. Head and embedding have leaves of their own, `lm_head` and `embed_tokens`; the embedding is a
    linear from the vocabulary.
    """

    leaves: Mapping[str, Shape]
    num_layers: int
    vocab_size: int
    hidden_size: int
    head_dim: int
    tied_head: bool
    name: str | None = None
    biases: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return hash((*self.leaves.items(), self.num_layers, self.vocab_size, self.name))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str | None = None) -> BaseShapes:
        """Read a `config.json` of the Llama line. `name` is only compared, for a warning. Raises ConfigError."""
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type is {model_type!r}, but adapters are served for {', '.join(MODEL_TYPES)}")
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", _DEFAULT_KV_HEADS.get(model_type, heads), if_null=heads)
        head_dim = _size(config, "head_dim", _DEFAULT_HEAD_DIM.get(model_type, hidden // heads), if_null=hidden // heads)
        width = _size(config, "intermediate_size")
        leaves: dict[str, Shape] = {
            "self_attn.q_proj": (hidden, heads * head_dim),
            "self_attn.k_proj": (hidden, kv_heads * head_dim),
            "self_attn.v_proj": (hidden, kv_heads * head_dim),
            "self_attn.o_proj": (heads * head_dim, hidden),
            "mlp.gate_proj": (hidden, width),
            "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }
        return cls(
            leaves=MappingProxyType(leaves),
            num_layers=_size(config, "num_hidden_layers"),
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            head_dim=head_dim,
            tied_head=bool(config.get("tie_word_embeddings", False)),
            name=name or config.get("_name_or_path") or None,
            biases=_biases(config, model_type),
        )

    def module(self, path: str) -> Shape | None:
        """(in_features, out_features) of `model.layers.3.self_attn.q_proj`, `lm_head` or `model.embed_tokens`; None if there is none."""
        if path in (HEAD, f"model.{EMBEDDING}"):
            return self.features(path.removeprefix("model."))
        start, _, rest = path.partition("model.layers.")
        index, _, leaf = rest.partition(".")
        if start or not (index.isascii() and index.isdigit()) or str(int(index[:9])) != index or int(index) >= self.num_layers:
            return None
        return self.leaves.get(leaf)

    def features(self, leaf: str) -> Shape:
        """(in_features, out_features) of a projection, `lm_head` or `embed_tokens`. Raises KeyError for another name."""
        if leaf == HEAD:
            return self.hidden_size, self.vocab_size
        return (self.vocab_size, self.hidden_size) if leaf == EMBEDDING else self.leaves[leaf]

    def parts(self, leaf: str) -> tuple[str, ...]:
        """The projections that `leaf` stands for: itself, or those of a fused name; empty for a name this base does not have."""
        return FUSED.get(leaf, (leaf,) if leaf in self.leaves or leaf in (HEAD, EMBEDDING) else ())

    def weight_name(self, layer: int, leaf: str) -> str:
        """The name in the base's files of the weight that `leaf` has; a tied head has the embedding's."""
        if leaf == EMBEDDING or (leaf == HEAD and self.tied_head):
            return f"model.{EMBEDDING}.weight"
        return f"{HEAD}.weight" if leaf == HEAD else f"model.layers.{layer}.{leaf}.weight"


def _biases(config: Mapping[str, Any], model_type: str) -> frozenset[str]:
    """The leaves with a bias: what each family reads from its config."""
    has_all = model_type in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    found = {f"self_attn.{name}_proj" for name in "qkv" if has_all or model_type == "qwen2"} | ({"self_attn.o_proj"} if has_all else set())
    if model_type == "llama" and config.get("mlp_bias", False):
        found |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    return frozenset(found)


def _size(config: Mapping[str, Any], key: str, default: int | None = None, *, if_null: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        value = if_null
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json of the base: {key} is {value!r}, but it must be an integer of at least 1")
    return value
