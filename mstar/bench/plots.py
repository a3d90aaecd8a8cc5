"""Pictures of results, as PNG. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mstar.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_throughput(series: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Output tokens/s of each server (label → number of adapters in words → tokens/s) as bars side by side."""
    places = list(dict.fromkeys(place for values in series.values() for place in values))
    width = 0.8 / len(series)

    def draw(axes: Axes) -> None:
        for index, (label, values) in enumerate(series.items()):
            at = [place + (index - (len(series) - 1) / 2) * width for place in range(len(places))]
            drawn = axes.bar(at, [values.get(place, 0.0) for place in places], width, label=label)
            axes.bar_label(drawn, fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(places)), places)
        axes.set_ylabel("output tokens/s at 8 requests in flight")

    _save(draw, path)


def plot_gaps(series: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Gaps between the tokens of running streams in ms over the seconds that cold adapters come in, a colour for each server."""

    def draw(axes: Axes) -> None:
        for label, gaps in series.items():
            axes.scatter([at for at, _ in gaps], [1e3 * length for _, length in gaps], s=3, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("seconds after the first cold adapter was asked for")
        axes.set_ylabel("gap between two tokens, ms")

    _save(draw, path)


def _save(draw: Callable[[Axes], None], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'mstar[plot]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.legend()
    figure.savefig(path, dpi=120)
