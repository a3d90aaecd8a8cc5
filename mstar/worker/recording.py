"""What the leader records where `record` is set: everything that its decisions follow from. Step thread.

`mstar replay FILE` makes the decisions again without a model and shows the tables at any step.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from mstar.config import ServeConfig
from mstar.engine.lockstep.record import Header, Ingested, NodeHeader, Recorder, Served, Unserved
from mstar.engine.runner import StepOutcome
from mstar.engine.scheduler import NODE, Scheduler
from mstar.types import Remove, Step
from mstar.wire.front_rank import Ingest, Load
from mstar.worker.build import Rank


class LeaderRecord:
    """One leader's recording; every call is a no-op where nothing is recorded."""

    def __init__(self, rank: Rank) -> None:
        self._recorder = _open(rank.config, rank) if rank.config.record is not None else None
        if self._recorder is not None:
            recorder = self._recorder
            rank.agreement.on_result = lambda result: recorder.agreed(NODE, result)

    def served(self, load: Load, *, has_something: bool) -> None:
        """New requests may name a generation."""
        if self._recorder is not None:
            self._recorder.note(Served(load.name, (NODE,) if has_something else (), load.path, load.digest))

    def unserved(self, name: str) -> None:
        """No new requests on it."""
        if self._recorder is not None:
            self._recorder.note(Unserved(name))

    def ingested(self, message: Ingest) -> None:
        """A request was opened."""
        if self._recorder is not None:
            self._recorder.note(Ingested(message.rid, message.prompt, message.output, message.sampling, message.adapter, message.cache_key))

    def sent(self, message: Step | Remove) -> None:
        """A broadcast."""
        if self._recorder is not None:
            self._recorder.note(message)

    def close(self) -> None:
        """Nothing more comes."""
        if self._recorder is not None:
            self._recorder.close()

    def ran(self, outcome: StepOutcome, scheduler: Scheduler) -> None:
        """A step ended."""
        if self._recorder is not None:
            failed = {rid: error.code for rid, error in outcome.failed.items()}
            self._recorder.ran(outcome.step.seq, outcome.fingerprint, outcome.sampled, failed, scheduler.queue.waits())


def _open(config: ServeConfig, rank: Rank) -> Recorder:
    nodes = (NodeHeader(NODE, config.max_loras),) if rank.pool is not None else ()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    kv = rank.kv.spec
    header = Header(nodes, kv.num_pages, kv.block_size, kv.enable_prefix_caching, config.tensor_parallel_size, started)
    return Recorder(Path(str(config.record)), header)
