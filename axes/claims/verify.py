"""Running claims: every draw of every check, in parallel processes, with a result per claim whatever happens."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from axes.claims.base import Claim, Draw, Finding, Result
from axes.tasks.workers import Died, side_by_side

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
    by_id = {c.id: c for c in claims}
    for name, measured in side_by_side(partial(_by_id, seeds=seeds), deque(by_id), workers):
        if isinstance(measured, Died):
            measured = ((), 0.0, "the process that ran the check died (out of memory, say)")
        yield Result(by_id[name], *measured)


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
