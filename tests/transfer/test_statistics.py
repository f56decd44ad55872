"""Intervals, exact p and verdicts, against definitions that are written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axes.errors import AxesError
from axes.transfer.statistics import compare, holm, verdict

DIFFERENCES = st.lists(st.integers(-50, 50).map(lambda n: n / 16), min_size=3, max_size=7)


@given(DIFFERENCES)
@settings(max_examples=40)
def test_p_counts_sign_flips(d: list[float]) -> None:
    found = compare(d, [0.0] * len(d), margin=1.0)
    flips = [abs(np.mean(np.multiply(d, s))) for s in itertools.product((1, -1), repeat=len(d))]
    assert found.p == pytest.approx(np.mean([x >= abs(np.mean(d)) - 1e-12 for x in flips]))
    assert found.effect == pytest.approx(np.mean(d)) and found.low <= found.effect + 1e-12 <= found.high + 2e-12


@given(DIFFERENCES, st.floats(0.1, 2.0))
@settings(max_examples=40)
def test_arm_and_control_are_alike(d: list[float], margin: float) -> None:
    there, back = compare(d, [0.0] * len(d), margin), compare([0.0] * len(d), d, margin)
    lower = compare(d, [0.0] * len(d), margin, higher_is_better=False)
    mirrored = {"helps": "hurts", "hurts": "helps"}
    assert back == lower and back.effect == -there.effect and back.p == there.p
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1.0)
    if there.verdict in mirrored and min(abs(there.low), abs(there.high)) > margin + 1.0:
        assert back.verdict == mirrored[there.verdict]


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    """Percentile bootstraps of few seeds are a little short: of 95 % at least 80 % with 8 seeds."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(0.3, 1.0, (200, 8))
    held = [c.low <= 0.3 <= c.high for c in (compare(d, np.zeros(8), 1.0) for d in drawn)]
    assert 0.80 < np.mean(held) <= 0.97


def test_six_seeds_cannot_go_below_a_thirtieth() -> None:
    found = compare([1.0, 1.1, 0.9, 1.2, 1.0, 0.8], [0.0] * 6, margin=0.02)
    assert found.p == 2 / 64 and found.verdict == "helps"
    assert compare([0.0] * 6, [0.0] * 6, 0.02)[1:] == (0.0, 0.0, 0.0, 1.0, "equivalent")


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.03, 0.2, "helps"), (-0.2, -0.03, "hurts"), (-0.01, 0.015, "equivalent"), (0.01, 0.2, "undecided"),
        (-0.2, 0.2, "undecided"), (0.001, 0.019, "equivalent"),
    ],
)  # fmt: skip
def test_verdicts(low: float, high: float, said: str) -> None:
    assert verdict(low, high, 0.02) == said


def test_holm() -> None:
    """The example of Holm's paper in numbers: 0.01, 0.04, 0.03 of three are 0.03, 0.06, 0.06."""
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0} and holm({}) == {}


@pytest.mark.parametrize(
    ("arm", "control", "margin", "said"),
    [
        ([1, 2, 3], [1, 2], 0.1, "the same seeds"), ([1, 2], [1, 2], 0.1, "at least 3 seeds"),
        ([1, 2, 3], [1, 2, 3], 0.0, "positive difference"), ([1, 2, float("nan")], [1, 2, 3], 0.1, "not finite"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared(arm: list[float], control: list[float], margin: float, said: str) -> None:
    with pytest.raises(AxesError, match=said):
        compare(arm, control, margin)
