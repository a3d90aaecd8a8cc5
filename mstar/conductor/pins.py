"""Pinned adapters: each pin is a request without tokens that holds its adapter's slot until it is removed.

Pure. The slot table knows nothing else about pins. At most `max_loras - 1`, so that one slot always turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mstar.conductor.registry import Adapter
from mstar.errors import AdapterError
from mstar.wire.front_rank import Ingest


class Pins:
    """Which generations are pinned, and by which request."""

    def __init__(self, front_epoch: str, max_loras: int) -> None:
        self._front_epoch = front_epoch
        self._max_pins = max_loras - 1
        self._rid_of: dict[str, str] = {}  # generation -> rid
        self._num_promised = 0
        self._drawn = 0

    def check_room(self) -> None:
        """Raises AdapterError where one more pin would leave no slot that turns."""
        if len(self._rid_of) + self._num_promised >= self._max_pins:
            raise AdapterError(
                f"{len(self._rid_of) + self._num_promised} adapters are pinned; max_loras {self._max_pins + 1} allows {self._max_pins}, "
                "so that one slot is left for the others",
                code="adapter_pin_limit",
                status=409,
            )

    @contextmanager
    def promised(self, wanted: bool) -> Iterator[None]:  # noqa: FBT001 - the one thing that is asked
        """Keep room for one more pin while its adapter loads, if `wanted`. Raises AdapterError where there is none."""
        if wanted:
            self.check_room()
        self._num_promised += wanted
        try:
            yield
        finally:
            self._num_promised -= wanted

    def is_pinned(self, generation: str) -> bool:
        """Whether `generation` is pinned."""
        return generation in self._rid_of

    def pin(self, adapter: Adapter) -> Ingest | None:
        """The request that pins `adapter`; None where it is pinned already. Raises AdapterError where there is no room."""
        if adapter.generation in self._rid_of:
            return None
        self.check_room()
        self._drawn += 1
        self._rid_of[adapter.generation] = f"{self._front_epoch}-pin{self._drawn}"
        return self.ingest(adapter)

    def ingest(self, adapter: Adapter) -> Ingest:
        """The same request again, for ranks that started anew."""
        return Ingest(self._rid_of[adapter.generation], (), None, adapter=adapter.generation, cache_key=bytes.fromhex(adapter.digest))

    def unpin(self, generation: str) -> str | None:
        """The request to end; None where `generation` is not pinned."""
        return self._rid_of.pop(generation, None)

    def failed(self, rid: str) -> str | None:
        """A pin's request failed: it is no pin any more. Returns its generation; None where `rid` is no pin."""
        for generation, pin in self._rid_of.items():
            if pin == rid:
                del self._rid_of[generation]
                return generation
        return None

    def generations(self) -> list[str]:
        """What is pinned."""
        return list(self._rid_of)
