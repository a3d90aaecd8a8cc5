"""What a request and a step are: the typed structs that travel on the wire and are read by the engine as they are.

Leaf module: no torch, no sockets. Frozen, tagged where they stand in a union, unknown fields refused.
"""

from __future__ import annotations

import msgspec

# Leaf names of the modules that adapters may adapt: the seven projections of a layer; head and embedding where a server takes them.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD, EMBEDDING = "lm_head", "embed_tokens"


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one sequence's tokens are chosen. Validated by the API before it is made; ranks trust it.

    A draw at output position p is a function of the gathered logits and (`seed`, p) alone, so every rank draws alike.
    """

    max_tokens: int
    seed: int  # 0 … 2**63-1, set by the front where the client gave none
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # alternatives shown per output token; 0 shows the chosen one alone
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    ignore_eos: bool = False
    min_tokens: int = 0  # stop tokens are not sampled before so many output tokens
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence ids


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability (natural log of the softmax of the raw logits) and its rank, 1 the best."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen (or given) token first, then the best alternatives in falling order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request's part in a step: `num_tokens` tokens from position `start` of prompt + output."""

    rid: str
    start: int
    num_tokens: int


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step"):
    """One forward over a mixed batch, exactly as the leader chose it; a follower recomputes none of this."""

    seq: int  # gapless from 1 in each epoch, counted over steps alone
    rows: tuple[Row, ...]
    preempted: tuple[str, ...] = ()  # rids that give up their KV pages before this step's admit
    bucket: int = 0  # padded number of tokens of the captured graph; 0 runs eagerly
    fingerprint_seq: int = 0  # the step whose admit `fingerprint` describes; 0 is none
    fingerprint: bytes = b""


class Remove(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="remove"):
    """The end of a request on every rank, landing after the admit of `after_tp_seq` and before the next admit."""

    rid: str
    after_tp_seq: int
