"""Rows in processes of their own: they compile side by side, then each is measured alone when its turn comes.

What measures a row is a generator: it yields once, when nothing is left to compile, and returns the row. A process that
dies, or is late, costs its own row and no other.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import TypeVar, final

from axes.tasks.workers import interrupts_ignored

Row = TypeVar("Row")
Steps = Generator[None, None, Row]
Piece = tuple[Row, Callable[[Row], Steps[Row]]]


def finished(steps: Steps[Row]) -> Row:
    """The row, measured in this process."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: Row = end.value
            return made


def in_turn(
    work: Sequence[Piece[Row]], at_once: int, patience: float, watch: Callable[[int], None] = lambda index: None
) -> Iterator[tuple[Row, Row | str]]:
    """(empty row, measured row), or in place of the latter why there is none; as they are measured, in this order.

    work: functions of modules, or partials of them.  at_once: processes that compile side by side; so many rows are
    measured before the next ones start.  patience: seconds that they may compile, and then that each may be measured.
    watch: told which one is begun.
    """
    for begin in range(0, len(work), at_once):
        some = work[begin : begin + at_once]
        crew = [_Process(piece) for piece in some]
        try:
            watch(begin)
            waiting, end = {p.pipe: p for p in crew}, time.monotonic() + patience
            while waiting and (left := end - time.monotonic()) > 0:
                for pipe in connection.wait(list(waiting), left):
                    assert isinstance(pipe, Connection)
                    waiting.pop(pipe).heard()
            for process in waiting.values():  # what still compiles would disturb the others
                process.end(f"it still compiled after {patience:g} s")
            for index, (process, (row, _)) in enumerate(zip(crew, some, strict=True), begin):
                watch(index)
                yield row, process.measured(patience)
                process.end("")
        finally:
            for process in crew:
                process.end("")


@final
class _Process:
    """One row's."""

    def __init__(self, piece: Piece[Row]) -> None:
        context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *piece), daemon=True)
        with interrupts_ignored():
            self.process.start()
        theirs.close()
        self.failed = ""
        self.ended = False

    def heard(self) -> None:
        """It is ready, or its process has died."""
        try:
            self.pipe.recv()
        except EOFError:
            self.process.join()
            self.failed = f"its process ended with {self.process.exitcode} before it was measured"

    def measured(self, patience: float) -> Row | str:
        if self.failed:
            return self.failed
        try:
            self.pipe.send(None)
            if not self.pipe.poll(patience):
                return f"it was not measured within {patience:g} s"
            row: Row = self.pipe.recv()
            return row
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with {self.process.exitcode} while it was measured"

    def end(self, why: str) -> None:
        self.failed = self.failed or why
        if not self.ended:
            self.ended = True
            self.process.terminate()
            self.process.join(5)
            self.process.kill()
            self.process.join()
            self.pipe.close()


def _serve(pipe: Connection, row: Row, measure: Callable[[Row], Steps[Row]]) -> None:
    steps = measure(row)
    try:
        try:
            next(steps)
        except StopIteration as end:  # nothing to compile: refused, say
            pipe.send(None)
            pipe.recv()
            pipe.send(end.value)
            return
        pipe.send(None)
        pipe.recv()
        pipe.send(finished(steps))
    except (EOFError, OSError):
        return
