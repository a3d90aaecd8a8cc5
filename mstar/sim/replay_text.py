"""What a replayed step and one request's life look like as text. Only words; what happened comes from replay.py."""

from __future__ import annotations

from collections.abc import Iterator

from mstar.engine.lockstep.record import Header, Ingested
from mstar.sim.replay import Replay, SlotView, StepView

_WORDS = {"read": "its adapter's read, or the followers' copies", "turn": "its turn: an earlier one was passed as often as it may be"}


def step_lines(view: StepView, header: Header) -> Iterator[str]:
    """Everything about one step."""
    step = view.step
    yield f"step {step.seq}: {len(step.rows)} rows, {sum(row.num_tokens for row in step.rows)} tokens"
    for row in step.rows:
        got = f", sampled {view.ran.sampled[row.rid]}" if row.rid in view.ran.sampled else ""
        failed = f", failed: {view.ran.failed[row.rid]}" if row.rid in view.ran.failed else ""
        yield (
            f"  row {row.rid}: positions {row.start} to {row.start + row.num_tokens - 1}{got}{failed}"
            if row.num_tokens
            else (f"  row {row.rid}: no tokens{failed}")
        )
    if step.preempted:
        yield f"  preempted before it: {', '.join(step.preempted)}"
    for agreed in view.agreements:
        words = ", ".join(("ready", "in flight", "failed")[status] for status in agreed.result)
        yield f"  agreement ({agreed.node}): {words}"
    if view.refused:
        yield "  refused by every rank; its admits were rolled back"
    yield "slots after its admit:"
    yield from slot_lines(view.after, view.before)
    used = header.num_pages - view.num_free_pages
    yield f"KV pages after it: {used} used, {view.num_cached_pages} cached, {view.num_free_pages - view.num_cached_pages} blank"
    for rid, pages in view.pages.items():
        yield f"  {rid}: {len(pages)} pages {list(pages)}"
    if view.waits:
        yield "waiting:"
        for rid, why in view.waits.items():
            yield f"  {rid} for {reason(why, view, header)}"
    verdict = "as recorded" if view.as_recorded else f"DIFFERS: recorded {view.ran.fingerprint.hex()}"
    yield f"fingerprint {view.fingerprint.hex()} {verdict}"


def slot_lines(slots: tuple[SlotView, ...], before: tuple[SlotView, ...] = ()) -> Iterator[str]:
    """One line a slot; marks what an admit installed."""
    earlier = {(slot.node, slot.slot): slot for slot in before}
    for slot in slots:
        was = earlier.get((slot.node, slot.slot), slot)
        change = f"   installed now, over {was.weights_of or 'nothing'}" if was.weights_of != slot.weights_of else ""
        weights, holders = slot.weights_of or "(never used)", ", ".join(slot.holders) or "nobody"
        yield f"  {slot.node} {slot.slot}: {weights}, held by {holders}, last used at admit {slot.last_used}{change}"


def reason(why: str, view: StepView, header: Header) -> str:
    """A wait in words, from the tables as the choice saw them."""
    if why == "slot":
        held = [f"{slot.weights_of} by {', '.join(slot.holders)}" for slot in view.before if slot.holders]
        return f"a slot; held: {'; '.join(held) or 'none, but promised to rows of this step'}"
    if why == "pages":
        return f"KV pages; {view.num_free_pages} of {header.num_pages} are free"
    if why == "full":
        return f"room in the step; it has {len(view.step.rows)} rows, {sum(row.num_tokens for row in view.step.rows)} tokens"
    return _WORDS.get(why, why)


class RequestStory:
    """Collects one request's life, step by step, as lines."""

    def __init__(self, rid: str) -> None:
        self._rid = rid
        self._lines: list[str] = []
        self._ingested: Ingested | None = None
        self._span: tuple[str, int, int] | None = None  # what goes on since which step, up to which
        self._num_sampled = 0

    def step(self, view: StepView, replay: Replay) -> None:
        """Look at one step."""
        seq = view.step.seq
        if self._ingested is None and self._rid in replay.requests:
            self._ingested = replay.requests[self._rid]
            on = f"on {self._ingested.adapter}" if self._ingested.adapter else "on the base"
            self._lines.append(f"ingested before step {seq}, {on}, {len(self._ingested.prompt)} prompt tokens")
        if self._rid in view.step.preempted:
            self._say(f"step {seq}: preempted, gave its pages up")
        row = next((row for row in view.step.rows if row.rid == self._rid), None)
        if row is None:
            if self._rid in view.waits:
                self._go_on(f"waited for {reason(view.waits[self._rid], view, replay.header)}", seq)
            return
        self._slots(view)
        if row.num_tokens:
            kind = "prefill" if self._ingested is not None and row.start < len(self._ingested.prompt) else "decode"
            self._go_on(kind, seq)
        self._num_sampled += self._rid in view.ran.sampled
        if self._rid in view.ran.failed:
            self._say(f"step {seq}: failed, {view.ran.failed[self._rid]}")

    def finish(self, replay: Replay) -> list[str]:
        """All lines; empty where the request was never seen."""
        self._close()
        if self._ingested is not None:
            state = "still open at the end" if self._rid in replay.requests else "removed"
            self._lines.append(f"{state}; {self._num_sampled} tokens sampled")
        return self._lines

    def _slots(self, view: StepView) -> None:
        before = {(slot.node, slot.slot): slot for slot in view.before}
        for slot in view.after:
            was = before[slot.node, slot.slot]
            if self._rid in slot.holders and self._rid not in was.holders:
                how = "which was resident" if was.weights_of == slot.weights_of else f"installed now, over {was.weights_of or 'nothing'}"
                self._say(f"step {view.step.seq}: took {slot.node} slot {slot.slot}, weights of {slot.weights_of}, {how}")

    def _go_on(self, what: str, seq: int) -> None:
        if self._span is not None and self._span[0] == what:
            self._span = (what, self._span[1], seq)
        else:
            self._close()
            self._span = (what, seq, seq)

    def _say(self, line: str) -> None:
        self._close()
        self._lines.append(line)

    def _close(self) -> None:
        if self._span is not None:
            what, first, last = self._span
            self._lines.append(f"{f'step {first}' if first == last else f'steps {first} to {last}'}: {what}")
        self._span = None
