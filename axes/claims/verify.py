"""Running claims: every draw of every check, in parallel processes, with a result per claim whatever happens."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from axes.claims.base import Claim, Draw, Finding, Result

Progress = Callable[[Result], None]


def verify_one(claim: Claim, seeds: int | None = None) -> Result:
    """All draws of one claim. An exception is a result too: the claim then is not verified."""
    start = time.perf_counter()
    findings: list[Finding] = []
    if claim.check is None:
        return Result(claim, ())
    try:
        for seed in range(claim.seeds if seeds is None else seeds):
            findings += claim.check(Draw(seed))
    except Exception:
        return Result(claim, _merge(findings), time.perf_counter() - start, traceback.format_exc(limit=-2))
    return Result(claim, _merge(findings), time.perf_counter() - start)


def _merge(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding per statement: over the draws, the one furthest from passing."""
    worst: dict[tuple[str, str], Finding] = {}
    for f in findings:
        kept = worst.setdefault((f.role, f.what), f)
        if kept.ok and (not f.ok or _slack(f) < _slack(kept)):
            worst[(f.role, f.what)] = f
    return tuple(worst.values())


def _slack(f: Finding) -> float:
    return (
        min(f.high - f.measured, f.measured - f.low)
        if f.role == "within"
        else f.high - f.measured
        if f.role == "holds"
        else f.measured - f.low
    )


def _by_id(name: str, seeds: int | None) -> Result:
    from axes.claims.register import find

    torch.set_num_threads(1)
    return verify_one(find([name])[0], seeds)


def verify(
    claims: Sequence[Claim], seeds: int | None = None, workers: int = 2, progress: Progress | None = None
) -> list[Result]:
    """Verify claims, in their order.

    seeds: draws per claim instead of each claim's own number.  workers: processes; 1 runs here.
    progress: called with each result as it arrives.
    """
    results: dict[str, Result] = {}
    if workers <= 1 or len(claims) == 1:
        for c in claims:
            results[c.id] = verify_one(c, seeds)
            if progress is not None:
                progress(results[c.id])
        return [results[c.id] for c in claims]
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = [pool.submit(_by_id, c.id, seeds) for c in claims]
        try:
            for done in as_completed(waiting):
                result = done.result()
                results[result.claim.id] = result
                if progress is not None:
                    progress(result)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[c.id] for c in claims]
