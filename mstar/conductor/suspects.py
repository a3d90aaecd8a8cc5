"""Which request keeps crashing the instance.

Pure. Requests in the last step before a crash are suspects, and those that ranks were told of and that had no token since: a rank may die
before it can say that they are in the next one. A suspect whose token comes after the restart is cleared. After a second crash with a
common suspect, those in both crashes resume one at a time, each until its next token; one that crashes the instance again while nobody
else that the ranks know is unproven is the culprit and ends. All others go on.

    crash 1: {a, b, c}     crash 2: {a, b, d}, no token of a, b between     common: {a, b}
    test a alone (with everybody who is no suspect) ─► token: cleared ─► test b ─► crash: b is the culprit

So nobody ends for fewer than three crashes: two may be somebody's kill -9. And nobody ends for what another one in the step may have
done: where others had no token since the restart either, everybody resumes one at a time, and the next crash shows who it is.
"""

from __future__ import annotations

from collections.abc import Collection


class Suspects:
    """What is known about crashes so far."""

    def __init__(self) -> None:
        self._last_step: frozenset[str] = frozenset()
        self._opened: frozenset[str] = frozenset()  # since the start of the instance
        self._suspected: frozenset[str] = frozenset()  # in the last step before a crash, no token since
        self._queue: list[str] = []  # to be tested one at a time, the first is under test

    def opened(self, rid: str) -> None:
        """The ranks are told of this request."""
        self._opened |= {rid}

    def began(self, rids: Collection[str]) -> None:
        """A step begins with these requests."""
        self._last_step = frozenset(rids)

    def crashed(self, live: Collection[str], proven: Collection[str] = ()) -> str | None:
        """The instance crashed; `live` requests are to be resumed (those that may be told to ranks), of which `proven` had a token since.

        Returns the culprit, if this crash shows one.
        """
        unproven = (self._last_step | self._opened) & frozenset(live) - frozenset(proven)
        inside = self._last_step & frozenset(live) | unproven
        self._last_step = self._opened = frozenset()
        if not inside:
            return None  # it died before it had anything to do, of nobody here: what is known stays known
        if unproven and self._queue[:1] == list(unproven):
            culprit = self._queue.pop(0)
            self._suspected -= {culprit}
            return culprit
        known = frozenset(self._queue)
        suspected = frozenset(live) if known & inside else self._suspected & inside
        self._queue += sorted(suspected - known)
        self._suspected |= inside
        return None

    def let_in(self, rid: str, *, is_new: bool) -> bool:
        """Whether `rid` may be ingested now: the suspect under test may, those that wait for their test may not.

        While there are any, one that no rank was ever told of waits behind them: beside the one under test it would share the blame.
        """
        if is_new and self._queue and rid not in self._queue:
            self._queue.append(rid)
        return rid not in self._queue[1:]

    def cleared(self, rid: str) -> str | None:
        """`rid` got a token or ended. Returns the next request to test, if one waited for this."""
        self._suspected -= {rid}
        if rid not in self._queue:
            return None
        was_under_test = self._queue[0] == rid
        self._queue.remove(rid)
        return self._queue[0] if was_under_test and self._queue else None
