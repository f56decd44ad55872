"""Statistics that keep one number a row or a column, and the links that read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axes import optim
from axes.core.algorithms import Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Context, NormedWhiten, RankOneWhiten, Whiten
from axes.core.monoids import Diagonal, Scalar, Zero
from axes.core.rates import Count
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError

ROWS, COLUMNS = (StateUpdate(Linear(of), monoid=Scalar(0.5)) for of in ("row-square", "column-square"))


def test_the_state_is_a_column_and_a_row() -> None:
    u = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    for update, expected in ((ROWS, torch.tensor([[5 / 3], [50 / 3]])), (COLUMNS, torch.tensor([[4.5, 8.5, 14.5]]))):
        driven = update.parts().cost.drive(u)
        torch.testing.assert_close(driven, expected.double())
        state = update.init({"g": driven})
        state, _ = update.step(state, {}, drive=(driven,))
        state, out = update.step(state, {}, drive=(driven,))
        torch.testing.assert_close(out.weights[0], 1.5 * driven)


@pytest.mark.parametrize("guard", ["added", "floor"])
def test_a_second_moment_of_rank_one_is_whitened_as_entry_by_entry(guard: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    r, c = (torch.rand(n, dtype=torch.float64, generator=generator) + 0.1 for n in (4, 5))
    theta, v = torch.randn(4, 5, dtype=torch.float64, generator=generator), r[:, None] * c
    means = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
    found = RankOneWhiten((ROWS, COLUMNS), 1e-30, guard).primal(theta, Context(stats=means))
    torch.testing.assert_close(found, theta / v.sqrt(), rtol=1e-13, atol=0)
    v = v[:1]  # any second moment of one row has rank one
    found = RankOneWhiten((ROWS, COLUMNS), 1e-30, guard).primal(theta[:1], Context(stats=(v.mean(-1, True), v)))
    torch.testing.assert_close(found, theta[:1] / v.sqrt(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("guard", ["added", "floor"])
def test_the_guards_hold_at_zero_and_at_tiny_numbers_in_float32(guard: Any) -> None:
    h = RankOneWhiten((ROWS, COLUMNS), 1e-30, guard)
    for size in (0.0, 1e-30, 1e-12):
        theta = torch.full((3, 4), size)
        square = theta.square()
        out = h.primal(theta, Context(stats=(square.mean(-1, keepdim=True), square.mean(-2, keepdim=True))))
        assert bool(out.isfinite().all())
        if size == 1e-12:
            torch.testing.assert_close(out, torch.ones(3, 4), rtol=1e-3, atol=0)


def test_what_cannot_act_is_refused() -> None:
    square, left = (StateUpdate(Linear(of), monoid=Scalar(0.5)) for of in ("square", "left"))  # type: ignore[arg-type]
    halved = StateUpdate(Linear("square"), monoid=Scalar(0.5), algorithm=Step(0.5))
    for make, message in (
        (lambda: RankOneWhiten((COLUMNS, ROWS)), "takes a statistic of row-square"),
        (lambda: RankOneWhiten((ROWS,)), "two statistics"),
        (lambda: RankOneWhiten((ROWS, COLUMNS), 0.0), "eps must be positive"),
        (lambda: RankOneWhiten((ROWS, COLUMNS), guard="none"), "guard 'none'"),  # type: ignore[arg-type]
        (lambda: NormedWhiten((left,)), "takes a statistic of row-square or column-square or square"),
        (lambda: NormedWhiten((square, square)), "one statistic"),
        (lambda: NormedWhiten((square,), rms=0.0), "rms must be positive"),
        (lambda: NormedWhiten((halved,)), "factors of v cancel"),
        (lambda: StateUpdate(Linear(), Whiten((ROWS,))), "takes a statistic of the entries"),
        (
            lambda: StateUpdate(
                Linear(),
                RankOneWhiten((StateUpdate(Linear("row-square"), monoid=Diagonal("gate")), COLUMNS)),
            ),
            "one number for a row or column",
        ),
    ):
        with pytest.raises(IllegalUpdate, match=message):
            make()
    with pytest.raises(ShapeError, match=r"must be \(3, 1\) here, got \(3, 4\)"):
        RankOneWhiten((ROWS, COLUMNS)).primal(torch.ones(3, 4), Context(stats=(torch.ones(3, 4), torch.ones(1, 4))))


def test_normuon_keeps_one_number_a_row() -> None:
    p = nn.Parameter(torch.ones(32, 64))
    optimizer = optim.NorMuon([{"params": [p], "rule": "normuon"}])
    p.grad = torch.randn(32, 64)
    optimizer.step()
    shapes = sorted(tuple(x.shape) for x in optimizer.state[p].values() if x.ndim)
    assert shapes == [(32, 1), (32, 64)]
    both = StateUpdate(Linear(), RankOneWhiten((ROWS, COLUMNS)), Zero())
    rule = optim.optimizer(StateUpdate(Given(), algorithm=Step(0.1, via=(both,))))
    whitened = rule([nn.Parameter(torch.ones(32, 64))])
    assert sum(x.numel() for x in next(iter(whitened.state.values())).values() if x.ndim) == 96


def test_an_average_that_is_whole_from_the_start_has_nothing_to_correct() -> None:
    new = Count() ** -0.8
    for step, message in ((Step(new, debias=True), "sum to 1"), (Step(new, start="first"), "starts at its first")):
        with pytest.raises(IllegalUpdate, match=message):
            StateUpdate(Linear("row-square"), monoid=Scalar(1.0 - new), algorithm=step)
    StateUpdate(Linear("row-square"), monoid=Scalar(1.0 - 0.9 * new), algorithm=Step(new, debias=True))
