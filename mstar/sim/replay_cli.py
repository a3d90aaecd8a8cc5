"""`mstar replay FILE`: what a recorded instance decided, and why a request waited.

Own process. Exit codes: 0 every step was decided as recorded; 1 one was not; 2 the file or the question makes no sense.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mstar.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Written by `mstar serve --record FILE`.")],
    step: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show step N: rows, slots, KV pages, who waits for what.")] = None,
    request: Annotated[
        str | None, typer.Option(metavar="RID", help="Show one request's life: waits and why, its slot, which weights it read.")
    ] = None,
    session: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Which start of the instance, from 1. Default: the last that has the step or request."),
    ] = None,
) -> None:
    """Make a recording's decisions again, without a model, and show them.

    Example: mstar replay run.rec --request 3f2a-17
    """
    try:
        raise typer.Exit(_replay(file, step, request, session))
    except ConfigError as error:
        typer.echo(f"mstar replay: {error}", err=True)
        raise typer.Exit(2) from None


def _replay(file: Path, wanted_step: int | None, rid: str | None, wanted_session: int | None) -> int:
    from rich.console import Console

    from mstar.engine.lockstep.record import read_records
    from mstar.sim.replay import sessions
    from mstar.sim.replay_text import RequestStory, step_lines

    table = _table()
    shown: list[str] = []
    first_difference = ""
    for number, (session, steps) in enumerate(sessions(read_records(file)), start=1):
        looks = wanted_session in (None, number)
        story = RequestStory(rid) if rid is not None and looks else None
        counts = {"steps": 0, "agreements": 0, "installs": 0, "refused": 0}
        for view in steps:
            counts["steps"] += 1
            counts["agreements"] += len(view.agreements)
            counts["installs"] += sum(1 for was, now in zip(view.before, view.after, strict=True) if was.weights_of != now.weights_of)
            counts["refused"] += view.refused
            if not view.as_recorded and not first_difference:
                first_difference = f"start {number}, step {view.step.seq}: the recorded fingerprint is another"
            if looks and view.step.seq == wanted_step:
                shown = [f"start {number}", *step_lines(view, session.header)]
            if story is not None:
                story.step(view, session)
        if story is not None and (lines := story.finish(session)):
            shown = [f"start {number}, request {rid}", *lines]
        slots = " + ".join(f"{node.max_loras} {node.node}" for node in session.header.nodes) or "none"
        tail = "" if session.unfinished is None else f"step {session.unfinished.seq} was sent, its end is not recorded"
        table.add_row(
            str(number), session.header.started, str(session.header.tp_size), slots, str(session.header.num_pages),
            *map(str, counts.values()), str(len(session.requests)), tail,
        )  # fmt: skip
    console = Console()
    if wanted_step is None and rid is None:
        console.print(table)
    elif not shown:
        what = f"step {wanted_step}" if rid is None else f"request {rid!r}"
        raise ConfigError(f"{file} has no {what}{'' if wanted_session is None else f' in start {wanted_session}'}")
    for line in shown:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if first_difference:
        console.print(f"not decided as recorded: {first_difference}", style="bold red", markup=False)
        return 1
    if wanted_step is None and rid is None:
        console.print("every step was decided as recorded", style="green")
    return 0


def _table() -> Table:
    from rich.table import Table

    table = Table("start", "at", "ranks", "slots", "KV pages", "steps", "agreements", "installs", "refused", "open at the end", "")
    for column in table.columns[2:10]:
        column.justify = "right"
    return table
