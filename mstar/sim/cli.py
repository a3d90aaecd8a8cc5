"""`mstar simulate`: how many slots does a workload need? The server's own decisions, without a GPU or a model.

Own process. Exit codes: 0 planned; 1 ranks decided differently (`--check`); 2 an option makes no sense.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mstar.errors import ConfigError

if TYPE_CHECKING:
    from mstar.sim.planner import PlanSpec
    from mstar.sim.workload import WorkloadSpec

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

_LOAD, _INSTANCE, _TIMES, _OUTPUT = "Workload", "Instance", "Times", "Output"


@app.command()
def simulate(
    *,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters that are served.", rich_help_panel=_LOAD)] = 100,
    popularity: Annotated[
        str,
        typer.Option(metavar="uniform|zipf:S|FILE", help="How often each is asked for; FILE has a request a line.", rich_help_panel=_LOAD),
    ] = "zipf:1.0",
    requests: Annotated[int, typer.Option(min=1, help="Requests in all (of a trace: at most).", rich_help_panel=_LOAD)] = 20_000,
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests a second (Poisson).", rich_help_panel=_LOAD)] = 5.0,
    base_share: Annotated[float, typer.Option(min=0, max=1, help="Share of requests on the base model.", rich_help_panel=_LOAD)] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean length of prompts.", rich_help_panel=_LOAD)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean length of answers.", rich_help_panel=_LOAD)] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Fixes every draw.", rich_help_panel=_LOAD)] = 0,
    slots: Annotated[
        list[int] | None, typer.Option(min=1, help="max_loras; repeat it to compare. Default: 4, 8, 16, 32.", rich_help_panel=_INSTANCE)
    ] = None,
    host_tier: Annotated[
        int | None, typer.Option(min=1, help="max_cpu_loras. Default: twice the slots.", rich_help_panel=_INSTANCE)
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.", rich_help_panel=_INSTANCE)] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most rows in a step.", rich_help_panel=_INSTANCE)] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a step.", rich_help_panel=_INSTANCE)] = 512,
    max_passes: Annotated[int, typer.Option(min=0, help="How often one that waits may be overtaken.", rich_help_panel=_INSTANCE)] = 16,
    max_waiting_requests: Annotated[int, typer.Option(min=1, help="More waiting are refused.", rich_help_panel=_INSTANCE)] = 1024,
    step_ms: Annotated[float, typer.Option(min=0.001, help="A step's time without tokens.", rich_help_panel=_TIMES)] = 15.0,
    token_us: Annotated[float, typer.Option(min=0, help="A step's time for each of its tokens.", rich_help_panel=_TIMES)] = 50.0,
    install_ms: Annotated[float, typer.Option(min=0, help="Copying an adapter into a slot.", rich_help_panel=_TIMES)] = 2.0,
    agreement_ms: Annotated[float, typer.Option(min=0, help="One load agreement among ranks.", rich_help_panel=_TIMES)] = 0.5,
    read_ms: Annotated[float, typer.Option(min=0.001, help="Median time to read an adapter.", rich_help_panel=_TIMES)] = 100.0,
    read_p99_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="Its 99th percentile (log-normal). Default: four times the median.", rich_help_panel=_TIMES),
    ] = None,
    hint_wait_ms: Annotated[
        float, typer.Option(min=0, help="How long the leader waits for followers' copies (--check).", rich_help_panel=_TIMES)
    ] = 2000.0,
    check: Annotated[
        bool, typer.Option("--check", help="Run every rank with reads of its own, and see that all decide alike.", rich_help_panel=_OUTPUT)
    ] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write options and figures.", rich_help_panel=_OUTPUT)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw waits and hit rate.", rich_help_panel=_OUTPUT)] = None,
) -> None:
    """Plan an instance: slot hit rate, waits, evictions and fairness of a workload, before GPUs are rented.

    Example: mstar simulate --adapters 2000 --popularity zipf:1.1 --rate 8 --slots 8 --slots 16 --slots 32
    """
    from mstar.sim.planner import PlanSpec
    from mstar.sim.workload import WorkloadSpec

    workload = WorkloadSpec(requests, adapters, popularity, rate, base_share, prompt_tokens, output_tokens, seed)
    try:
        specs = [
            PlanSpec(
                slots=count,
                host_tier=_host_tier(host_tier, count),
                ranks=ranks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=_batched_tokens(max_num_batched_tokens, max_num_seqs),
                max_passes=max_passes,
                max_waiting=max_waiting_requests,
                step_s=step_ms / 1e3,
                token_s=token_us / 1e6,
                install_s=install_ms / 1e3,
                agree_s=agreement_ms / 1e3,
                read_s=read_ms / 1e3,
                read_p99_s=_read_p99(read_ms, read_p99_ms) / 1e3,
                hint_wait_s=hint_wait_ms / 1e3,
                seed=seed,
                check=check,
            )
            for count in slots or (4, 8, 16, 32)
        ]
        raise typer.Exit(_plan(workload, specs, json, plot))
    except ConfigError as error:
        typer.echo(f"mstar simulate: {error}", err=True)
        raise typer.Exit(2) from None


def _plan(workload_spec: WorkloadSpec, specs: Sequence[PlanSpec], json: Path | None, plot: Path | None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mstar.sim.plan_report import Planned, check_plot, hints, plan_table, write_json, write_plot
    from mstar.sim.planner import Planner
    from mstar.sim.workload import make_workload
    from mstar.sim.world import Violation

    if plot is not None:
        check_plot(plot)
    workload = make_workload(workload_spec)
    console = Console()
    runs: list[Planned] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        for spec in specs:
            task = progress.add_task(f"{spec.slots} slots", total=len(workload))
            planner = Planner(spec, workload, lambda done, task=task: progress.update(task, completed=done))  # type: ignore[misc]
            try:
                runs.append(Planned(spec, planner.run()))
            except Violation as found:
                typer.echo(f"mstar simulate: ranks decided differently: {found}", err=True)
                return 1
            progress.update(task, completed=len(workload))
    console.print(plan_table(runs))
    for hint in hints(runs):
        console.print(hint, style="yellow", markup=False, highlight=False)
    if specs[0].check:
        admits = sum(run.tally.num_admits for run in runs)
        console.print(f"all {specs[0].ranks} ranks decided alike in {admits:,} admits", style="green", highlight=False)
    if json is not None:
        write_json(json, workload_spec, runs)
    if plot is not None:
        write_plot(plot, runs)
    return 0


def _host_tier(host_tier: int | None, slots: int) -> int:
    if host_tier is not None and host_tier < slots:
        raise ConfigError(f"--host-tier is {host_tier}, but it must hold at least as many adapters as there are slots, {slots}")
    return host_tier if host_tier is not None else 2 * slots


def _read_p99(read_ms: float, read_p99_ms: float | None) -> float:
    if read_p99_ms is not None and read_p99_ms < read_ms:
        raise ConfigError(f"--read-p99-ms is {read_p99_ms:g}, less than the median --read-ms {read_ms:g}")
    return read_p99_ms if read_p99_ms is not None else 4 * read_ms


def _batched_tokens(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(f"--max-num-batched-tokens is {max_num_batched_tokens}, but each of {max_num_seqs} rows needs one")
    return max_num_batched_tokens
