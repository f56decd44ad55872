"""What paired runs say: an interval, an exact p, and a verdict by margin.

Arm and control see the same batches with the same seeds, so that differences of a seed are what is compared. With d of
n seeds, positive where the arm is better:

    interval    percentile bootstrap of mean d, 95 %
    p           exact sign flips, two-sided: 2^(1-n) at least, so that six seeds cannot go below 0.031
    verdict     helps if the interval is above +margin, hurts if below -margin, equivalent if inside, else undecided

Holm's correction is over the primary comparisons of a report. Verdicts follow the interval and the margin, not p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from axes.errors import AxesError

Verdict = Literal["helps", "hurts", "equivalent", "undecided"]
FEWEST = 3  # seeds: an interval of two numbers says nothing
_RESAMPLES, _LEVEL = 10_000, 0.95


class Compared(NamedTuple):
    """Paired differences of an arm and its control, arm less control, positive where the arm is better."""

    seeds: int
    effect: float
    low: float
    high: float
    p: float
    verdict: Verdict


def compare(
    arm: Sequence[float], control: Sequence[float], margin: float, higher_is_better: bool = True, seed: int = 0
) -> Compared:
    """An arm beside its control: one number a seed, in the same order of seeds.

    margin: differences up to it do not matter.  seed: of the bootstrap.
    Raises AxesError for unequal or fewer than three seeds, a margin that is not positive, numbers that are not finite.
    """
    a, c = (np.asarray(x, dtype=np.float64) for x in (arm, control))
    if a.ndim != 1 or a.shape != c.shape:
        raise AxesError(f"compare: one number a seed of arm and control, the same seeds; got {a.shape} and {c.shape}")
    if len(a) < FEWEST:
        raise AxesError(f"compare: at least {FEWEST} seeds make an interval, got {len(a)}: run more")
    if not margin > 0:
        raise AxesError(f"compare: margin is a positive difference that does not matter, got {margin}")
    d = a - c if higher_is_better else c - a
    if not np.isfinite(d).all():
        raise AxesError(f"compare: runs that are not finite cannot be averaged: arm {arm}, control {control}")
    low, high = _interval(d, seed)
    return Compared(len(d), float(d.mean()), low, high, _sign_flips(d), verdict(low, high, margin))


def verdict(low: float, high: float, margin: float) -> Verdict:
    """By an interval and a margin alone."""
    if low > margin:
        return "helps"
    if high < -margin:
        return "hurts"
    return "equivalent" if -margin < low and high < margin else "undecided"


def _interval(d: np.ndarray, seed: int) -> tuple[float, float]:
    drawn = np.random.default_rng(seed).choice(d, (_RESAMPLES, len(d)))
    low, high = np.quantile(drawn.mean(1), ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return float(low), float(high)


def _sign_flips(d: np.ndarray) -> float:
    if not d.any():
        return 1.0
    from scipy import stats  # takes most of a second

    found = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    return float(found.pvalue)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p of several comparisons, corrected so that any wrong rejection among them keeps its rate."""
    out, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        out[name] = largest
    return {name: out[name] for name in p}
