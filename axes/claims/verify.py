"""Running claims: every draw of every check, in parallel processes, with a result per claim whatever happens."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection

import torch

from axes.claims.base import Claim, Draw, Finding, Result

Progress = Callable[[Result], None]


def verify_one(claim: Claim, seeds: int | None = None) -> Result:
    """All draws of one claim. An exception is a result too: the claim then is not verified."""
    return Result(claim, *_measure(claim, seeds))


def verify(
    claims: Sequence[Claim], seeds: int | None = None, workers: int = 2, progress: Progress | None = None
) -> list[Result]:
    """Verify claims, in their order.

    seeds: draws per claim instead of each claim's own number.  workers: processes, which look the claims up in the
    register; 1 runs here, whatever the claims are.  progress: called with each result as it arrives.
    """
    arriving = _here(claims, seeds) if workers <= 1 or len(claims) <= 1 else _in_processes(claims, seeds, workers)
    results: dict[str, Result] = {}
    for result in arriving:
        results[result.claim.id] = result
        if progress is not None:
            progress(result)
    return [results[c.id] for c in claims]


def _here(claims: Sequence[Claim], seeds: int | None) -> Iterator[Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        for c in claims:
            yield verify_one(c, seeds)
    finally:
        torch.set_num_threads(threads)


def _in_processes(claims: Sequence[Claim], seeds: int | None, workers: int) -> Iterator[Result]:
    """One pipe per worker and no shared queue: a worker that dies or is stopped can leave nobody waiting for a lock."""
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    waiting = deque(claims)
    busy: dict[Connection, Claim] = {}
    processes: list[multiprocessing.process.BaseProcess] = []

    def start() -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, seeds), daemon=True)
        with _interrupts_ignored():  # inherited: Ctrl-C is this process's to handle
            process.start()
        theirs.close()
        processes.append(process)
        return ours

    def feed(worker: Connection) -> None:
        if waiting:
            busy[worker] = waiting.popleft()
            worker.send(busy[worker].id)
        else:
            worker.close()  # its end of file: the worker leaves

    try:
        for _ in range(min(workers, len(claims))):
            feed(start())
        while busy:
            for ready in connection.wait(list(busy)):
                assert isinstance(ready, Connection)
                claim = busy.pop(ready)
                try:
                    measured: _Measured = ready.recv()
                except EOFError:
                    ready.close()
                    yield Result(claim, (), 0.0, "the process that ran the check died (out of memory, say)")
                    if waiting:
                        feed(start())
                else:
                    feed(ready)
                    yield Result(claim, *measured)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for worker in busy:
            worker.close()


def _serve(pipe: Connection, seeds: int | None) -> None:
    """A worker: ids in, measurements out, until the other end is closed."""
    while True:
        try:
            pipe.send(_by_id(pipe.recv(), seeds))
        except (EOFError, OSError):
            return


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody set handlers
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


_Measured = tuple[tuple[Finding, ...], float, str]


def _by_id(name: str, seeds: int | None) -> _Measured:
    # a claim does not travel between processes, since its check bears the name of the claim; its id does
    from axes.claims.register import find

    torch.set_num_threads(1)
    return _measure(find([name])[0], seeds)


def _measure(claim: Claim, seeds: int | None) -> _Measured:
    start = time.perf_counter()
    findings: list[Finding] = []
    error = ""
    if claim.check is not None:
        try:
            for seed in range(claim.seeds if seeds is None else seeds):
                findings += claim.check(Draw(seed))
        except Exception:
            error = traceback.format_exc(limit=-2)
    return _merge(findings), time.perf_counter() - start, error


def _merge(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding per statement: over the draws, the one furthest from passing."""
    worst: dict[tuple[str, str], Finding] = {}
    for f in findings:
        kept = worst.setdefault((f.role, f.what), f)
        if (f.ok, _slack(f)) < (kept.ok, _slack(kept)):
            worst[f.role, f.what] = f
    return tuple(worst.values())


def _slack(f: Finding) -> float:
    above, below = f.measured - f.low, f.high - f.measured
    return below if f.role == "holds" else above if f.role == "breaks" else min(above, below)
