"""`headrace bench`: what Headrace costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="What Headrace costs on this machine, beside others.", no_args_is_help=True)

# Fewer are too few for a percentile to mean something.
_ROUNDS_TO_JUDGE = 5


@app.callback()
def _bench() -> None:
    """Keeps `proxy` a command of its own name while it is the only one."""


@app.command()
def proxy(
    rounds: Annotated[
        int, typer.Option(min=1, help="How many times each stack has its turn; at least 5 to judge.")
    ] = 5,
    requests: Annotated[
        int, typer.Option(min=32, help="Requests of a turn; starlette + httpx gets a tenth of them.")
    ] = 4000,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures there too.")] = None,
) -> None:
    """Measure pass-through beside nginx, HAProxy and starlette + httpx, as CPU time per request."""
    # Imported by the command that measures, so that the others answer at once.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gateway.tools.bench import proxy as bench
    from gateway.tools.bench.processes import Broken
    from gateway.tools.bench.stacks import missing
    from gateway.tools.report import table, write

    if (line := missing()) is not None:
        typer.echo(line, err=True)
        raise typer.Exit(1)
    busy = bench.load_average()
    progress = Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=Console(stderr=True),
    )  # fmt: skip
    try:
        with progress:
            task = progress.add_task("starting", total=bench.turns(rounds))
            done = iter(range(bench.turns(rounds)))
            made = bench.measure(
                rounds, requests, lambda text: progress.update(task, completed=next(done), description=text)
            )
            progress.update(task, completed=bench.turns(rounds), description="done")
    except Broken as broken:
        typer.echo(str(broken), err=True)
        raise typer.Exit(1) from None
    if json is not None:
        write(json, made)
    # Wider than a narrow terminal: a column of figures that is cut says nothing.
    console = Console()
    console = Console(width=max(console.width, 120))
    for case, against in bench.CASES.items():
        shown = [record for record in made if record.case.endswith(f"-{case}")]
        console.print(table(shown, bench.ROWS, f"{case} (in brackets: of {against}'s)"))
    if rounds >= _ROUNDS_TO_JUDGE:
        for line in bench.verdicts(made):
            console.print(line)
    else:
        console.print(f"fewer than {_ROUNDS_TO_JUDGE} rounds: no verdict")
    console.print(f"{rounds} rounds; before: {busy}; after: {bench.load_average()}")
