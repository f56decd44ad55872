"""Rates that are formulas of the number of the datum: as values, and what they come to."""

from __future__ import annotations

import math

import pytest
import torch

from axes.core import reference
from axes.core.algorithms import Mix, Read, Step, Sum
from axes.core.costs import Alignment, Given, Linear
from axes.core.memory import Matrix
from axes.core.monoids import Scalar
from axes.core.rates import (
    SEEN,
    Complement,
    Count,
    Formula,
    Per,
    counted,
    log,
    maximum,
    minimum,
    named,
    rate_shape,
    resolve,
    where,
)
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError
from axes.testing import checks

T = Count()
FORMULAS = (
    (1.0 - T**-0.8, lambda t: 1 - t**-0.8),
    (Per("lr") / (1.0 + 1e-2 * (T - 1)) ** 0.75, lambda t: 0.3 / (1 + 1e-2 * (t - 1)) ** 0.75),
    (where(T > 2, minimum(1.0, T**-0.5), maximum(-1.0, T - 2.5)), lambda t: t**-0.5 if t > 2 else (-1.0, -0.5)[t - 1]),
    (log(T) / log(0.5) + Per("lr") * 0.0, lambda t: -math.log2(t)),
    (2.0 - (-0.5) ** (T + T) * 0.99**T, lambda t: 2 - (-0.5) ** (2 * t) * 0.99**t),
    (1.0 - (1.0 - (1.0 - T)) / (2.0 / (4.0 / T)), lambda t: 1 - t / (t / 2)),
)


@pytest.mark.parametrize(("formula", "value"), FORMULAS, ids=lambda x: repr(x) if isinstance(x, Formula) else "")
def test_a_formula_is_printed_as_it_is_written_and_is_a_number(formula: Formula, value: object) -> None:
    again = eval(repr(formula), dict(checks.NAMES))
    assert again == formula and hash(again) == hash(formula) and repr(again) == repr(formula)
    assert counted(formula)
    for seen in range(4):
        expected = value(seen + 1)  # type: ignore[operator]
        for x in (torch.tensor(seen), torch.tensor(float(seen), dtype=torch.float64), seen):
            assert float(resolve(formula, {"lr": 0.3, SEEN: x})) == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_a_complement_is_one_less_the_gate() -> None:
    rate = Complement(Per("decay", "key", "unit"))
    assert [per.name for per in named(rate)] == ["decay"] and rate_shape(rate) == "key" and not counted(rate)
    assert eval(repr(rate), dict(checks.NAMES)) == rate
    log = torch.tensor([0.0, -1e-9, -0.3, -1e3], dtype=torch.float64)
    expected = torch.tensor([0.0, 1e-9, 1 - math.exp(-0.3), 1.0], dtype=torch.float64)
    torch.testing.assert_close(resolve(rate, {"decay": log}), expected, rtol=1e-9, atol=0)
    assert resolve(rate, {"decay": -0.3}) == pytest.approx(1 - math.exp(-0.3), rel=1e-14)
    with pytest.raises(IllegalUpdate, match="unit gate"):
        Complement(Per("beta"))
    with pytest.raises(IllegalUpdate, match="stands in no formula"):
        1.0 - Complement(Per("decay", "scalar", "unit"))


def test_it_asks_its_axis_for_the_rates_that_it_is_made_of() -> None:
    formula = maximum(Per("lr") * T, Per("other") + Per("lr"))
    assert [per.name for per in named(formula)] == ["lr", "other", "lr"]
    branch = StateUpdate(Linear(), monoid=Scalar(0.5))
    update = StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                Sum((branch, branch), (Per("a") * 1.0, 0.5)),
                StateUpdate(Linear(), algorithm=Step(read=Read(Per("b") / T, 1.0))),
            ),
        ),
    )
    assert [per.name for per in update.demands()] == ["a", "b"]


@pytest.mark.parametrize(
    ("operation", "inputs", "message"),
    [
        ("mean", (1.0, T), "'mean' is not one of"),
        ("+", (1.0,), "takes 2 inputs, got 1"),
        ("+", (1.0, "lr"), "must be a number or Variable"),
        ("*", (1.0, Per("beta", "row")), "must be a scalar rate"),
        ("*", (1.0, Per("decay", domain="unit")), "must be a scalar rate"),
        ("where", (T, 1.0, 0.0), "a comparison is the first input of where"),
        ("+", (T > 2, 1.0), "a comparison is the first input of where"),
    ],
)
def test_what_is_no_formula_is_refused(operation: str, inputs: tuple[object, ...], message: str) -> None:
    with pytest.raises(IllegalUpdate, match=message):
        Formula(operation, inputs)  # type: ignore[arg-type]


def test_the_number_of_a_datum_is_that_of_the_whole_update_and_survives_a_split() -> None:
    """Inside of filters too: W_t = sum_i v_i k_i^T / i, read behind a filter that divides by the number once more."""
    inner = StateUpdate(Linear(), monoid=Scalar(0.0), algorithm=Step(1.0 / T))
    update = StateUpdate(Alignment(), algorithm=Step(1.0 / T, via=(inner,)), memory=Matrix())
    draw = torch.Generator().manual_seed(0)
    signal = {n: torch.randn(2, 6, 3, generator=draw, dtype=torch.float64) for n in ("q", "k", "v")}
    out, _ = reference.run(update, signal, time=1)
    weights = torch.arange(1, 7, dtype=torch.float64)[:, None] ** -2.0
    scores = torch.tril(signal["q"] @ signal["k"].mT)
    torch.testing.assert_close(out, scores @ (weights * signal["v"]), rtol=1e-13, atol=1e-13)
    first, state = reference.run(update, {n: x[:, :2] for n, x in signal.items()}, time=1)
    second, _ = reference.run(update, {n: x[:, 2:] for n, x in signal.items()}, state, time=1)
    assert torch.equal(torch.cat((first, second), 1), out)


def test_no_route_takes_them_and_says_why() -> None:
    import axes

    for update in (
        StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(Per("beta") / T)),
        StateUpdate(Alignment(), monoid=Scalar(1.0 - 1.0 / T)),
    ):
        chosen = axes.select(update)
        assert chosen.route == "interpreter" and "worked out datum by datum" in chosen.reason


def test_a_signal_without_a_count_is_refused() -> None:
    with pytest.raises(ShapeError, match="number of the datum"):
        resolve(T, {})


def test_a_constant_share_of_an_average_lies_inside() -> None:
    with pytest.raises(IllegalUpdate, match="Mix: weight"):
        Mix(1.5)
    assert Mix(1.0 / T).weight == 1.0 / T


def test_a_bound_is_the_number_on_whichever_side_it_stands() -> None:
    x = torch.tensor([0.2, 0.8])
    for bound in (minimum(Per("a"), 0.5), minimum(0.5, Per("a"))):
        assert torch.equal(resolve(bound, {"a": x}), torch.tensor([0.2, 0.5]))
    for bound in (maximum(Per("a"), 0.5), maximum(0.5, Per("a"))):
        assert torch.equal(resolve(bound, {"a": x}), torch.tensor([0.5, 0.8]))
