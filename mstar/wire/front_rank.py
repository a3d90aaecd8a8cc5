"""Messages between the front and the ranks. One ordered channel per rank; see docs/architecture.md for who acts on what."""

from __future__ import annotations

import msgspec

from mstar.types import SamplingParams, TokenLogprobs

# front → every rank


class Ingest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ingest"):
    """Open a request. `output` are tokens sent before, where it resumes; `sampling` None is a pin."""

    rid: str
    prompt: tuple[int, ...]
    sampling: SamplingParams | None
    output: tuple[int, ...] = ()
    adapter: str | None = None  # the generation's name inside ranks
    cache_key: bytes = b""  # the weights' digest


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load"):
    """Serve an adapter. `verify` reads and checks it first; without, the front has checked it and nothing is read until named."""

    load_id: int
    name: str
    path: str
    digest: str
    verify: bool
    has_something: bool


class Unload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unload"):
    """Stop serving a generation to new requests."""

    name: str


class AskStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask_status"):
    """Send a `Status` now."""

    token: int


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """End the process with exit status 0, after the step under way."""


# front → leader only


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="abort"):
    """The client went away, or the front saw a stop string: becomes a Remove."""

    rid: str


ToRank = Ingest | Load | Unload | AskStatus | Stop | Abort


# every rank → front


class LoadResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="load_result"):
    """How a Load went on this rank; empty `code` is success."""

    load_id: int
    code: str = ""
    message: str = ""
    status: int = 400


class SlotStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One device slot: the adapter generation a request would find there, and the requests that hold it."""

    slot: int
    adapter: str | None
    holders: int


class Stats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stats"):
    """Where a rank stands; about once a second, and at once as the answer to AskStatus (`token` > 0)."""

    tp_rank: int
    token: int
    last_seq: int
    slots: tuple[SlotStatus, ...]
    host_adapters: tuple[str, ...]
    kv_used: int
    kv_cached: int
    kv_free: int
    num_requests: int
    running: int
    waiting: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    num_steps: int
    num_agreements: int
    num_installs: int
    num_evictions: int
    num_reads: int
    num_read_failures: int
    num_preemptions: int
    longest_admit_s: float
    blocked_on_reads_s: float
    dropped_frames: int
    fingerprint: str


# leader → front


class TokenOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One token of one request. `position` counts its output tokens from 0; a stop token ends the request and is not shown."""

    rid: str
    position: int
    token_id: int
    finish_reason: str | None = None  # "stop" or "length"
    is_stop_token: bool = False
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tokens"):
    """What one step gave, all requests together."""

    seq: int
    tokens: tuple[TokenOut, ...]


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failed"):
    """A request ended without its tokens: its adapter could not be read on every rank, or its logits are not numbers."""

    rid: str
    message: str
    code: str
    status: int


class Began(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="began"):
    """A step begins with these requests; sent where they are others than in the step before."""

    seq: int
    rids: tuple[str, ...]


ToFront = LoadResult | Stats | Tokens | Failed | Began


# handshake, outside the numbered channel


class RankReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rank_ready"):
    """A rank can serve; repeated until it gets a Welcome. `secret` is known to the processes of one supervisor alone."""

    tp_rank: int
    tp_size: int
    pid: int
    num_kv_pages: int
    max_model_len: int
    weights_bytes: int
    slots_bytes: int
    backend: str
    secret: str = ""


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """The front counts this rank in: both directions now start at seq 1 under `epoch`. `tp_rank` says whom it means."""

    tp_rank: int
    epoch: str


Hello = RankReady | Welcome


def rank_identity(tp_rank: int, instance_epoch: str) -> bytes:
    """The routing identity of a rank's socket at the front; nobody can take its place without knowing the epoch."""
    return f"rank-{tp_rank}-{instance_epoch}".encode()
