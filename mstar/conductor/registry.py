"""Which adapter names are served, and as which generation.

Pure. Inside ranks an adapter is a *generation*: the client's name plus a mark that is never used again, so that slots, KV and prefix
keys have one identity. The client's name is only a pointer to the newest generation; a replace loads the new one, moves the pointer,
then unloads the old.

Nothing here costs more with more names registered, but for `adapters()` and an insertion into the sorted list of names (a memmove).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mstar.errors import AdapterError, ModelNotFound

MAX_NAME_LENGTH = 256


@dataclass(frozen=True)
class Adapter:
    """One served generation."""

    name: str  # the client's
    generation: str  # inside ranks
    path: str  # resolved folder
    root: str  # as it was given
    digest: str
    created: int
    has_something: bool = True
    pinned: bool = False
    chat_template: str | None = None  # the folder's own


class Registry:
    """Served names of one front."""

    def __init__(self, base: str, front_epoch: str, capacity: int) -> None:
        self.base = base
        self._front_epoch = front_epoch
        self._capacity = capacity
        self._adapters: dict[str, Adapter] = {}
        self._names: list[str] = []  # sorted
        self._claims: Counter[str] = Counter()  # names of loads under way
        self.on_change: Callable[[str], None] = lambda name: None  # called with the name after every put and pop
        self._drawn = 0

    def __len__(self) -> int:
        return len(self._adapters)

    def draw_generation(self, name: str) -> str:
        """A generation of `name` that was never used before."""
        self._drawn += 1
        return f"{name}@{self._front_epoch}.{self._drawn}"

    def check_name(self, name: str) -> None:
        """Raises AdapterError for a name that no adapter may have."""
        if not name or name != name.strip() or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise AdapterError(
                f"lora_name {name[:60]!r} cannot be served; give 1 to {MAX_NAME_LENGTH} printable characters without spaces at the ends",
                code="adapter_name_invalid",
            )
        if name == self.base:
            raise AdapterError(f"lora_name {name!r} is the served base model's name", code="adapter_name_reserved")
        if name in self._adapters or name in self._claims:
            return
        loading = sum(1 for claimed in self._claims if claimed not in self._adapters)
        if len(self._adapters) + loading >= self._capacity:
            raise AdapterError(
                f"{len(self._adapters)} adapters are served{f' and {loading} are loading' if loading else ''}, "
                f"max_registered_loras allows {self._capacity}; unload one first",
                code="adapter_limit_reached",
            )

    @contextmanager
    def claimed(self, name: str) -> Iterator[None]:
        """Check `name` and count it against the limit while it loads. Raises AdapterError as `check_name` does."""
        self.check_name(name)
        self._claims[name] += 1
        try:
            yield
        finally:
            self._claims[name] -= 1
            if not self._claims[name]:
                del self._claims[name]

    def get(self, name: str) -> Adapter | None:
        """The generation that `name` points to."""
        return self._adapters.get(name)

    def put(self, adapter: Adapter) -> Adapter | None:
        """Point its name to `adapter`; returns the generation it pointed to before."""
        before = self._adapters.get(adapter.name)
        if before is None:
            insort(self._names, adapter.name)
        self._adapters[adapter.name] = adapter
        self.on_change(adapter.name)
        return before

    def pop(self, name: str) -> Adapter | None:
        """Stop serving `name`."""
        popped = self._adapters.pop(name, None)
        if popped is not None:
            del self._names[bisect_left(self._names, name)]
            self.on_change(name)
        return popped

    def resolve(self, model: str) -> Adapter | None:
        """The adapter that a `model` field addresses; None is the base. Whole names first, then `<base>:<adapter>`.

        Raises ModelNotFound: an unknown or blank name is never answered by the base.
        """
        if model == self.base:
            return None
        adapter = self._adapters.get(model)
        if adapter is None and model.startswith(self.base + ":"):
            adapter = self._adapters.get(model[len(self.base) + 1 :])
        if adapter is None:
            raise ModelNotFound(model, "GET /v1/models lists what is served.")
        return adapter

    @staticmethod
    def client_name(generation: str) -> str:
        """The client's name of a generation seen inside ranks."""
        return generation.rpartition("@")[0]

    def adapters(self) -> list[Adapter]:
        """All served adapters by name."""
        return [self._adapters[name] for name in self._names]

    def page(self, after: str | None, limit: int | None) -> tuple[list[Adapter], bool]:
        """At most `limit` adapters by name, from behind the name `after`, and whether more follow."""
        start = 0 if after is None else bisect_right(self._names, after)
        stop = len(self._names) if limit is None else min(start + limit, len(self._names))
        return [self._adapters[name] for name in self._names[start:stop]], stop < len(self._names)
