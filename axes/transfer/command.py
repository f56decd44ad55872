"""`axes transfer`: the experiments as pairs of tuples."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from axes.transfer import experiments

app = typer.Typer(name="transfer", help="A method known on one axis, tried on another.", no_args_is_help=True)


@app.command(name="list")
def list_(
    names: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="As S1; all if none.")] = None,
) -> None:
    """Every experiment: what is asked, the tuple of the arm, and what its control has in the place of what moved."""
    console = Console()
    table = Table("id", "on", "question", "from", "what moved: control -> arm", show_lines=True)
    for e in experiments.find(tuple(names or ())):
        table.add_row(e.id, e.axis, e.question, e.source, "\n".join(map(str, e.moved)))
    (console if console.is_terminal else Console(width=160)).print(table)
