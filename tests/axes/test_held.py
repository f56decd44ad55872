"""Statistics whose value, a root or a basis, is held: when it is computed, what it sees, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from axes.core import derived
from axes.core.algorithms import Anchor, Held, Step
from axes.core.costs import Alignment, Given, Linear
from axes.core.geometry import Eigenbasis, InverseRoot, Kronecker, RotatedWhiten, Whiten
from axes.core.monoids import Scalar, Zero
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.testing.checks import error

ROOT = InverseRoot(0.25, eps=0.1)


def statistic(at: Any, of: Any = "left", h: Any = ROOT, keep: float = 0.9) -> StateUpdate:
    return StateUpdate(Linear(of), h, Scalar(keep), Step(0.1, at=at))


def values(update: StateUpdate, gradients: Tensor) -> list[Tensor]:
    """What a reader sees at every datum."""
    driven = gradients @ gradients.mT
    state, seen = update.init({"g": driven[0]}), []
    for x in driven:
        state, out = update.step(state, {"g": x}, drive=(x,))
        assert torch.equal(out.weights[0], update.output(state, {}).weights[0])
        seen.append(out.weights[0])
    return seen


def gradients(count: int = 12) -> Tensor:
    return torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("datum", ["included", "excluded"])
def test_when_a_value_is_computed(every: int, datum: Any) -> None:
    """Included: at data 1, 1 + every, ... with the datum. Excluded: the value as it stood before those data's next."""
    fresh = values(statistic("prev"), gradients())
    held = values(statistic(Held(every, datum)), gradients())
    for t, value in enumerate(held):  # t data came before this one
        last = t - t % every if datum == "included" else max(t - 1, 0) // every * every
        torch.testing.assert_close(value, fresh[last], rtol=0, atol=1e-14)


def test_bias_correction_is_of_the_time_of_the_refresh() -> None:
    step = {"rate": 0.1, "debias": True}
    fresh = values(StateUpdate(Linear("left"), ROOT, Scalar(0.9), Step(**step)), gradients())
    held = values(StateUpdate(Linear("left"), ROOT, Scalar(0.9), Step(**step, at=Held(4))), gradients())
    for t, value in enumerate(held):
        torch.testing.assert_close(value, fresh[t - t % 4], rtol=0, atol=1e-14)


def test_a_basis_continues_from_the_last_one() -> None:
    """Written out: orthogonal iteration from the eigenvectors of the first statistic."""
    g, every = gradients(), 3
    held = values(statistic(Held(every), h=Eigenbasis("power-qr", "householder")), g)
    total = torch.zeros(3, 3, dtype=torch.float64)
    basis = total
    for t, x in enumerate(g):
        total = 0.9 * total + 0.1 * x @ x.T
        if t == 0:
            basis = torch.linalg.eigh(total).eigenvectors
        elif t % every == 0:
            norm = float(total.norm())
            moved = total @ basis + 1e-6 * norm * basis
            order = (basis * (total @ basis)).sum(0).argsort(descending=True)
            basis = torch.empty_like(basis).index_copy(1, order, torch.linalg.qr(moved[:, order]).Q)
        assert float((held[t].T @ basis).abs().sub(torch.eye(3)).abs().max()) < 1e-9  # up to signs


def test_what_is_not_finite_is_not_taken() -> None:
    update = statistic(Held(2))
    driven = gradients(8) @ gradients(8).mT
    driven[3] = torch.nan  # and the sum stays so
    state, seen = update.init({"g": driven[0]}), []
    for x in driven:
        state, out = update.step(state, {"g": x}, drive=(x,))
        seen.append(out.weights[0])
    assert bool(seen[2].isfinite().all()) and all(torch.equal(x, seen[2]) for x in seen[3:])
    assert not torch.equal(seen[2], seen[1]) and float(state.anchor[1]) == 2.0


def test_before_the_first_good_value_there_is_none() -> None:
    update = statistic(Held(2))
    bad = torch.full((3, 3), torch.nan, dtype=torch.float64)
    state, out = update.step(update.init({"g": bad}), {"g": bad}, drive=(bad,))
    assert torch.equal(out.weights[0], torch.zeros(3, 3, dtype=torch.float64)) and float(state.anchor[1]) == 1.0


def test_members_of_a_batch_fail_alone() -> None:
    g = gradients(2) @ gradients(2).mT
    g[1] = torch.nan
    update = statistic(Held(2))
    state, out = update.step(update.init({"g": g}), {"g": g}, drive=(g,))
    assert state.anchor[1].flatten().tolist() == [0.0, 1.0]
    alone = update.step(update.init({"g": g[0]}), {"g": g[0]}, drive=(g[0],))[1]
    assert error(out.weights[0][0], alone.weights[0]) < 1e-14


def test_held_roots_are_whitening_by_another_name() -> None:
    """Held for one datum, Kronecker with roots is Whiten(kind="kronecker")."""
    g = gradients()
    stats = tuple(statistic("prev", of, h=StateUpdate(Linear()).h) for of in ("left", "right"))
    held = tuple(statistic(Held(1), of) for of in ("left", "right"))
    paths = []
    for h in (Whiten(stats, "kronecker", 0.25, 0.1), Kronecker(held)):
        update = StateUpdate(Given(), algorithm=Step(0.1, via=(StateUpdate(Linear(), h, Zero()),)))
        state = update.init({"g": g[0]}, (g[0],))
        for x in g:
            state, _ = update.step(state, {"g": x})
        paths.append(state.theta[0])
    torch.testing.assert_close(*paths, rtol=0, atol=1e-13)


def test_a_held_statistic_has_no_cascade() -> None:
    root = InverseRoot(0.5, 0.1)
    sides = (("value", "prev"), ("key", Held(4)))
    stats = tuple(StateUpdate(Linear(of), root, Scalar(0.9), Step(at=at)) for of, at in sides)  # type: ignore[arg-type]
    reason = derived.no_cascade(StateUpdate(Alignment(), Kronecker(stats)))
    assert reason is None or "held" in reason
    via = (StateUpdate(Linear(), Kronecker(stats)),)
    assert "refreshed" in str(derived.no_cascade(StateUpdate(Alignment(), algorithm=Step(via=via))))


REFUSED: dict[str, Any] = {
    "every must be at least 1": lambda: Held(0),
    "is not included or excluded": lambda: Held(2, "both"),  # type: ignore[arg-type]
    "is for statistics: the gradient": lambda: StateUpdate(Given(), algorithm=Step(0.1, at=Held(2))),
    "Euclidean h makes nothing of it": lambda: StateUpdate(Linear("left"), algorithm=Step(at=Held(2))),
    "has no effect on a cost that is linear": lambda: statistic(Anchor(2)),
    "continues from the last basis": lambda: statistic("prev", h=Eigenbasis("power-qr")),
    "accumulate onto the InverseRoot": lambda: StateUpdate(Linear("left"), ROOT, algorithm=Step(lazy=False)),
    "h of a statistic of rows or columns": lambda: StateUpdate(Given(), ROOT),
    "InverseRoot is the h of": lambda: StateUpdate(Linear("square"), ROOT),
    "passes every datum on": lambda: StateUpdate(
        Given(),
        algorithm=Step(
            via=(StateUpdate(Linear(), Whiten((StateUpdate(Linear("square")),)), algorithm=Step(at=Held(2))),)
        ),
    ),
    "statistics with h=InverseRoot": lambda: StateUpdate(
        Linear(), Kronecker((StateUpdate(Linear("left")), StateUpdate(Linear("right"))))
    ),
    "statistics with h=Eigenbasis": lambda: StateUpdate(
        Linear(), RotatedWhiten((statistic("prev"), statistic("prev", "right"), StateUpdate(Linear("eigen-square"))))
    ),
    "takes a statistic of the columns here": lambda: StateUpdate(
        Linear(), Kronecker((statistic("prev"), statistic("prev")))
    ),
    "takes 2 statistics": lambda: Kronecker((statistic("prev"),)),
    "takes 3 statistics": lambda: RotatedWhiten((statistic("prev"),)),
    "is no matrix product": lambda: Linear("square", "tf32"),
    "precision 'half' is not one of": lambda: Linear("left", "half"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_refused(message: str) -> None:
    with pytest.raises(IllegalUpdate, match=message):
        REFUSED[message]()
