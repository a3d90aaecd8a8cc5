"""Two small fakes inside a simulated rank: a page table that can refuse, and strings that hash as another process's would."""

from __future__ import annotations

from collections.abc import Callable

from mstar.engine.resources.base import StepContext
from mstar.engine.resources.kv.resource import KvResource, KvSpec
from mstar.errors import CapacityError
from mstar.types import Step


class SaltedStr(str):
    """A string that hashes differently on each rank, as strings do in real processes."""

    _hash: int

    def __new__(cls, text: str, salt: int) -> SaltedStr:
        """`text` as the rank of `salt` knows it."""
        made = super().__new__(cls, text)
        made._hash = hash((text, salt))
        return made

    def __hash__(self) -> int:
        """Not `str`'s."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """As `str`."""
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented


class ProbedKv(KvResource):
    """The page table, last resource of a step: shows the oracle the step as the admits left it, and refuses it where that was drawn."""

    def __init__(self, spec: KvSpec, *, decides: bool, refuses: Callable[[int], bool]) -> None:
        super().__init__(spec, decides=decides)
        self._refuses = refuses
        self.ctx: StepContext | None = None

    def admit(self, step: Step, ctx: StepContext) -> None:
        """Raises CapacityError in a refused step, having given back what it took."""
        self.ctx = ctx
        super().admit(step, ctx)
        if self._refuses(step.seq):
            self.rollback_admit(step, ctx)
            raise CapacityError(f"step {step.seq} is refused")
