"""What a tensor's key means: which module of the base, and which kind of tensor.

    [base_model.model.] <module's name where it was trained> . <suffix>

The middle is the name that PEFT matched its patterns against, so it is kept as it stands; what module of the served base it
is, is read from its end. Nothing is cut by a fixed number of segments: a prefix is taken off only where it is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

MAX_KEY = 512
PEFT_PREFIX = "base_model.model."


class Kind(Enum):
    """Kinds of tensors in a PEFT file."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    BASE_COPY = "base_layer"
    MAGNITUDE = "lora_magnitude_vector"
    BIAS = "base_layer.bias"  # the module's own bias, trained: where PEFT keeps and reads it
    OTHER_BIAS = "bias"  # a bias of A or B, or one that PEFT's reader passes over
    MODULES_TO_SAVE = "modules_to_save"
    TRAINABLE_TOKENS = "trainable_tokens"
    UNKNOWN = "unknown"


LORA_KINDS = frozenset({Kind.LORA_A, Kind.LORA_B, Kind.EMBEDDING_A, Kind.EMBEDDING_B})

_SUFFIXES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (Kind.LORA_A, re.compile(r"\.lora_A(\.default)?\.weight\Z")),
    (Kind.LORA_B, re.compile(r"\.lora_B(\.default)?\.weight\Z")),
    (Kind.EMBEDDING_A, re.compile(r"\.lora_embedding_A(\.default)?\Z")),
    (Kind.EMBEDDING_B, re.compile(r"\.lora_embedding_B(\.default)?\Z")),
    (Kind.MAGNITUDE, re.compile(r"\.lora_magnitude_vector(\.default)?(\.weight)?\Z")),
    (Kind.TRAINABLE_TOKENS, re.compile(r"\.(token_adapter\.)?trainable_tokens_(delta|original)(\.default)?\Z")),
    (Kind.MODULES_TO_SAVE, re.compile(r"\.(modules_to_save|original_module)\..*\Z")),
    (Kind.BIAS, re.compile(r"\.base_layer\.bias\Z")),
    (Kind.OTHER_BIAS, re.compile(r"(\.lora_[AB](\.default)?)?\.bias\Z")),
    (Kind.BASE_COPY, re.compile(r"\.base_layer\.weight\Z")),
)

_PREFIX = r"(?:model\.|language_model\.|language_model\.model\.|model\.language_model\.)?"
_LAYER = re.compile(_PREFIX + r"layers\.(0|[1-9][0-9]{0,5})\.((?:self_attn|mlp)\.[a-z_]+)")
_EMBEDDING = re.compile(_PREFIX + r"embed_tokens")
_HEAD = re.compile(r"(?:model\.|language_model\.)?lm_head")


@dataclass(frozen=True)
class ParsedKey:
    """One key, taken apart. `layer` and `leaf` are set for a module of a layer; `module` is its path in the served base, if any."""

    key: str
    kind: Kind
    trained_name: str
    module: str | None = None
    layer: int | None = None
    leaf: str | None = None


def parse_key(key: str) -> ParsedKey:
    """Take `key` apart. A key whose ending or module means nothing here has the kind UNKNOWN."""
    unknown = ParsedKey(key, Kind.UNKNOWN, "")
    if len(key) > MAX_KEY or not key.isascii():
        return unknown
    rest = key.removeprefix(PEFT_PREFIX)
    for kind, suffix in _SUFFIXES:
        if match := suffix.search(rest):
            return _with_module(key, kind, rest[: match.start()])
    # PEFT saves embeddings and head whole, without `base_layer`, when it is asked to or believes them resized.
    name = rest.removesuffix(".weight")
    if name != rest and (_EMBEDDING.fullmatch(name) or _HEAD.fullmatch(name)):
        return _with_module(key, Kind.BASE_COPY, name)
    return unknown


def _with_module(key: str, kind: Kind, name: str) -> ParsedKey:
    if match := _LAYER.fullmatch(name):
        layer, leaf = int(match[1]), match[2]
        return ParsedKey(key, kind, name, f"model.layers.{layer}.{leaf}", layer, leaf)
    if _EMBEDDING.fullmatch(name):
        return ParsedKey(key, kind, name, "model.embed_tokens")
    if _HEAD.fullmatch(name):
        return ParsedKey(key, kind, name, "lm_head")
    return ParsedKey(key, kind, name)
