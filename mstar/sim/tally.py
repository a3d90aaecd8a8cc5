"""What a planned run counts, and the figures that come of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np


def percentile(values: array[float], share: float) -> float | None:
    """The smallest value that `share` percent of all are at or below; None of none."""
    return float(np.percentile(np.frombuffer(values), share, method="inverted_cdf")) if values else None


def _seconds() -> array[float]:
    return array("d")


@dataclass
class Tally:
    """Counts of one run. Waits are seconds from arrival to the step that admits."""

    num_requests: int
    num_refused: int = 0  # the queue was full (429)
    num_ended: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_steps_with_collective: int = 0
    num_collectives: int = 0
    num_admits: int = 0  # that had a newcomer
    num_installs: int = 0
    num_evictions: int = 0
    num_reads: int = 0
    num_stalls: int = 0
    longest_stall_s: float = 0.0
    longest_pass_over: int = 0
    elapsed_s: float = 0.0
    busy_s: float = 0.0
    reading_s: float = 0.0
    slot_seconds: float = 0.0
    row_seconds: float = 0.0
    waits_hit: array[float] = field(default_factory=_seconds)
    waits_miss: array[float] = field(default_factory=_seconds)
    waits_base: array[float] = field(default_factory=_seconds)
    first_tokens: array[float] = field(default_factory=_seconds)

    def admitted(self, wait_s: float, hit: bool | None) -> None:  # noqa: FBT001 - three kinds of rows
        """A request was admitted: its adapter lay in a slot (`hit`), did not, or it has none (None)."""
        waits = self.waits_base if hit is None else self.waits_hit if hit else self.waits_miss
        waits.append(wait_s)

    def installed(self, num_installs: int, num_evictions: int, num_collectives: int, stall_s: float) -> None:
        """An admit had misses. `stall_s`: running rows waited for a follower's copy."""
        self.num_installs += num_installs
        self.num_evictions += num_evictions
        self.num_collectives += num_collectives
        self.num_steps_with_collective += num_collectives > 0
        self.num_stalls += stall_s > 0
        self.longest_stall_s = max(self.longest_stall_s, stall_s)

    def stepped(self, num_steps: int, seconds: float, num_held: int, num_rows: int) -> None:
        """So many steps ran with so many slots held and rows in the batch."""
        self.num_steps += num_steps
        self.busy_s += seconds
        self.slot_seconds += seconds * num_held
        self.row_seconds += seconds * num_rows

    def first_token(self, seconds: float) -> None:
        """A request got its first token so long after it arrived."""
        self.first_tokens.append(seconds)

    def ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request got its last token."""
        self.num_ended += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens

    def finish(self, elapsed_s: float, longest_pass_over: int, num_reads: int, reading_s: float) -> None:
        """The run is over; the leader's reader read for `reading_s`."""
        self.reading_s = reading_s
        self.elapsed_s = elapsed_s
        self.longest_pass_over = longest_pass_over
        self.num_reads = num_reads

    def figures(self) -> dict[str, float | int | None]:
        """All figures by name; times in seconds, shares from 0 to 1, None where nothing happened."""
        adapter_rows = len(self.waits_hit) + len(self.waits_miss)
        waits = self.waits_hit + self.waits_miss + self.waits_base
        return {
            "requests": self.num_requests,
            "finished": self.num_ended,
            "refused": self.num_refused,
            "slot_hit_rate": len(self.waits_hit) / adapter_rows if adapter_rows else None,
            "installs": self.num_installs,
            "evictions": self.num_evictions,
            "reads": self.num_reads,
            "wait_p50_s": percentile(waits, 50),
            "wait_p99_s": percentile(waits, 99),
            "wait_max_s": max(waits, default=None),
            "wait_hit_p50_s": percentile(self.waits_hit, 50),
            "wait_hit_p99_s": percentile(self.waits_hit, 99),
            "wait_miss_p50_s": percentile(self.waits_miss, 50),
            "wait_miss_p99_s": percentile(self.waits_miss, 99),
            "wait_base_p99_s": percentile(self.waits_base, 99),
            "first_token_p50_s": percentile(self.first_tokens, 50),
            "first_token_p99_s": percentile(self.first_tokens, 99),
            "longest_pass_over": self.longest_pass_over,
            "steps": self.num_steps,
            "steps_with_collective": self.num_steps_with_collective,
            "steps_with_collective_share": self.num_steps_with_collective / self.num_steps if self.num_steps else None,
            "collectives": self.num_collectives,
            "stalls": self.num_stalls,
            "longest_stall_s": self.longest_stall_s,
            "slots_held_mean": self.slot_seconds / self.busy_s if self.busy_s else None,
            "rows_mean": self.row_seconds / self.busy_s if self.busy_s else None,
            "reader_busy_share": self.reading_s / self.elapsed_s if self.elapsed_s else None,
            "busy_share": self.busy_s / self.elapsed_s if self.elapsed_s else None,
            "output_tokens_per_s": self.num_output_tokens / self.elapsed_s if self.elapsed_s else None,
            "simulated_s": self.elapsed_s,
        }
