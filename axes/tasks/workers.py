"""Work side by side in processes, with something said of every piece whatever happens to the process that had it.

One pipe a worker and no shared queue: a worker that dies or is stopped can leave nobody waiting for a lock. Workers end
when their pipe does, so that none outlives the process that started it, however that ended.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, final


@final
class Died:
    """Stands for what a process that died would have sent."""


class Last(NamedTuple):
    """What `work` returns where its process should do nothing after it: another one goes on."""

    done: Any


def side_by_side(
    work: Callable[[Any], Any], waiting: deque[Any], workers: int, until: float | None = None
) -> Iterator[tuple[Any, Any]]:
    """(piece, work(piece)) as they are done; Died in the place of the latter if the process died.

    work: a function of a module, which a process can import; what it raises ends its process.  waiting: may be added to
    while this goes on.  workers: processes at most.  until: of `time.monotonic`; what is not done then is given up.
    """
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    busy: dict[Connection, Any] = {}
    idle: list[Connection] = []
    processes: list[multiprocessing.process.BaseProcess] = []

    def start() -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        with interrupts_ignored():  # inherited: Ctrl-C is this process's to handle
            process.start()
        theirs.close()
        processes.append(process)
        return ours

    def feed() -> None:
        while waiting and (idle or len(busy) < workers):
            worker = idle.pop() if idle else start()
            busy[worker] = waiting.popleft()
            worker.send(busy[worker])

    try:
        feed()
        while busy:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not (done_with := connection.wait(list(busy), left)):
                return
            for ready in done_with:
                assert isinstance(ready, Connection)
                piece = busy.pop(ready)
                try:
                    done = ready.recv()
                except EOFError:
                    ready.close()
                    done = Died()
                else:
                    if isinstance(done, Last):
                        done = done.done
                        ready.close()
                    else:
                        idle.append(ready)
                yield piece, done
            feed()
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for worker in (*busy, *idle):
            worker.close()


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """A worker: pieces in, what became of them out, until the other end is closed."""
    while True:
        try:
            pipe.send(done := work(pipe.recv()))
        except (EOFError, OSError):
            return
        if isinstance(done, Last):
            return


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """For a process that is started within the block, which inherits it: Ctrl-C is this process's to handle."""
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody set handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
