"""Group H: every claim holds its verdict, faults planted in optimizers and parts turn checks red, the figure draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from axes.claims.figures.data import FIGURES, regimes
from axes.claims.register import find
from axes.core.costs import CrossEntropy
from axes.core.geometry import spectral
from axes.core.monoids import Decay
from axes.core.rates import Signal


def test_the_figure_of_a_claim_exists_and_crosses_one_at_the_critical_size() -> None:
    assert {c.figure for c in find(["H"]) if c.figure} == {f.name for f in FIGURES}
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
    id: str, fault: Callable[[pytest.MonkeyPatch], None], red: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert red(id)
