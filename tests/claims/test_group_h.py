"""Group H: every claim holds its verdict, faults planted in optimizers and parts turn checks red, the figure draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axes import spectral
from axes.claims.base import Claim, Draw, Result, Verdict
from axes.claims.figures_data import FIGURES, regimes
from axes.claims.group_h import CLAIMS
from axes.claims.verify import verify_one
from axes.costs import CrossEntropy
from axes.monoids import Decay
from axes.rates import Signal

TESTABLE = [c for c in CLAIMS if c.check is not None]
SLOW = ("H06", "H29")  # fixed inputs; a fit
FAST = [c for c in TESTABLE if c.id not in SLOW]


@pytest.mark.parametrize("claim", FAST, ids=lambda c: c.id)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=2)
def test_claim_holds(claim: Claim, seed: int) -> None:
    assert claim.check is not None
    result = Result(claim, claim.check(Draw(seed)))
    assert result.ok, [str(f) for f in result.findings if not f.ok]


@pytest.mark.parametrize("claim", [c for c in TESTABLE if c not in FAST], ids=lambda c: c.id)
def test_long_claim_holds(claim: Claim) -> None:
    result = verify_one(claim, 1)
    assert result.ok, (result.error, [str(f) for f in result.findings])


def test_the_group_is_complete() -> None:
    assert [c.id for c in CLAIMS] == [f"H{n:02}" for n in range(1, 33)]
    assert Counter(c.verdict for c in CLAIMS) == {
        Verdict.EXACT: 9,
        Verdict.CONDITIONAL: 6,
        Verdict.APPROXIMATE: 2,
        Verdict.STATISTICAL: 3,
        Verdict.FALSE: 10,
        Verdict.UNTESTABLE: 2,
    }


def test_the_figure_of_a_claim_exists_and_crosses_one_at_the_critical_size() -> None:
    assert {c.figure for c in CLAIMS if c.figure} == {f.name for f in FIGURES}
    for regime in regimes(n=500, batches=100):
        slope = regime.measured * regime.critical / regime.sizes
        assert slope.sub(1).abs().max() < 0.5, regime.label
    start, natural, late, natural_late = (r.critical for r in regimes(n=500, batches=2))
    assert natural > start and natural_late < late


def _no_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(spectral.Whiten, "_diagonal", lambda self, theta, v: theta / (v + self.eps))


def _decay_without_rate(patch: pytest.MonkeyPatch) -> None:
    element = Decay.element

    def whole(self: Decay, signal: Signal, rate: torch.Tensor | float, like: torch.Tensor) -> object:
        return element(self, signal, 1.0, like)

    patch.setattr(Decay, "element", whole)


def _labels_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CrossEntropy, "gradient", lambda self, prediction, target, signal=None: prediction.softmax(-1))


@pytest.mark.parametrize(
    ("id", "fault"),
    [
        ("H11", _no_root),
        ("H19", _no_root),
        ("H21", _no_root),
        ("H04", _decay_without_rate),
        ("H07", _decay_without_rate),
        ("H31", _decay_without_rate),
        ("H16", _labels_forgotten),
    ],
)
def test_planted_fault_turns_the_check_red(
    id: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    (claim,) = [c for c in CLAIMS if c.id == id]
    assert not verify_one(claim, 1).ok
