"""How far a measurement is, said on stderr: a bar on a terminal, else lines of a log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from axes.bench.results import Watch

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """As the function that measurements tell how far they are."""
    if not console.is_terminal:
        yield Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def watch(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield watch


class Lines:
    """A line every few seconds at most. Of several processes of one measurement the first says it, in lines on a
    terminal too, where a bar would be theirs and `torchrun`'s together."""

    def __init__(self) -> None:
        self.begun, self.last = time.monotonic(), -math.inf

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self.last >= _SECONDS_BETWEEN_LINES or done == of:
            self.last = now
            typer.echo(f"{done}/{of} after {now - self.begun:.0f} s: {what}", err=True)


__all__ = ["Lines", "watching"]
