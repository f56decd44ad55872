"""Group E: every claim on a few draws, faults planted in the memories, and the data of the figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate

from axes.claims.figures import capacity
from axes.claims.register import find
from axes.claims.tools.capacity import log_moment, softmax_snr_law
from axes.core import costs
from axes.core.geometry import Entropic
from axes.core.memory import List
from axes.routes import dispatch

Red = Callable[..., bool]  # the fixture


def test_sign_of_the_alignment_cost(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.Alignment, "gradient", lambda self, prediction, target, signal=None: target)
    assert red("E01")


def test_values_written_at_the_next_key(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    true = dispatch.chain
    late = lambda u, s: dataclasses.replace(true(u, s), value=s["v"].roll(1, -2))  # noqa: E731
    monkeypatch.setattr(dispatch, "chain", late)
    assert red("E01", "E03", "E13")


def test_temperature_ignored(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(List, "temperature", lambda self, d_k: 1.0)
    assert red("E04", "E06", "E13")


def test_temperature_inverted(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(List, "temperature", lambda self, d_k: 1 / self.scale)
    assert red("E04", "E10")


def test_attention_without_normaliser(red: Red, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entropic, "primal", lambda self, theta, context=None: (theta / 2).softmax(-1))
    assert red("E04", "E10")


@pytest.mark.parametrize("d", [4, 16, 64])
def test_moment_is_the_integral_over_the_sphere(d: int) -> None:
    def density(x: float) -> float:
        return (1 - x * x) ** ((d - 3) / 2)

    total = integrate.quad(density, -1, 1)[0]
    for slope in (0.1, 2.0 / math.sqrt(d), 1.0):
        mean = integrate.quad(lambda x, a=slope: math.exp(a * d * (x - 1)) * density(x), -1, 1)[0] / total
        assert log_moment(d, slope) == pytest.approx(math.log(mean), rel=1e-6)


def test_snr_law_meets_the_uniform_limit_and_the_mean_field() -> None:
    flat = softmax_snr_law(np.array([65.0]), 32, np.array(1e9))[0]
    assert flat * 65 == pytest.approx(1, rel=0.05)
    many = softmax_snr_law(np.array([1e5]), 16, np.array(4.0))[0]
    assert math.log(many * 1e5) == pytest.approx(-log_moment(16, 0.5), abs=0.1)


def test_figures_show_theory_next_to_measurement() -> None:
    for curve in capacity.capacity_against_load(d=16, lists=8):
        law = np.exp(np.interp(np.log(curve.x), np.log(curve.theory_x), np.log(curve.theory)))
        settled = curve.x >= 1.0
        assert np.abs(np.log(curve.measured / law))[settled].max() < 0.35, curve.label
    for curve in capacity.snr_against_temperature(d=16, counts=(65,), draws=15):
        law = np.exp(np.interp(np.log(curve.x), np.log(curve.theory_x), np.log(curve.theory)))
        assert np.abs(np.log(curve.measured / law))[curve.x > 4].max() < 0.5, curve.label


def test_figures_are_those_that_claims_name() -> None:
    named = {c.figure for c in find(["E"]) if c.figure}
    assert named == {f.name for f in capacity.FIGURES}
