"""What is written may be the larger of two: theta = max(A theta, rate u), entry by entry, on every axis."""

from __future__ import annotations

import pytest
import torch

import axes
from axes.core import reference
from axes.core.algorithms import Read, Step
from axes.core.costs import Alignment, Given, Linear, SquaredError
from axes.core.geometry import Euclidean, Whiten
from axes.core.memory import List
from axes.core.monoids import Scalar, Zero
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate


def signal(length: int = 7) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    rows = {n: torch.randn(2, length, 4, generator=draw, dtype=torch.float64) for n in ("q", "k", "v")}
    return {**rows, "decay": -torch.rand(2, length, generator=draw, dtype=torch.float64)}


def test_on_tokens_it_is_a_max_pooling_of_decayed_outer_products() -> None:
    """Entry by entry the largest of e^(g_s+1 + .. + g_t) v_s k_s^T over s <= t, and of the empty memory."""
    data = signal()
    pooled = StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(0.5, write="max"))
    out, _ = reference.run(pooled, data, time=1)
    total = data["decay"].cumsum(1)
    for t in range(7):
        kept = torch.exp(total[:, t : t + 1] - total[:, : t + 1])[..., None, None]
        written = 0.5 * data["v"][:, : t + 1, :, None] * data["k"][:, : t + 1, None, :]
        state = (kept * written).amax(1).clamp_min(0)
        torch.testing.assert_close(out[:, t], (state @ data["q"][:, t, :, None])[..., 0], rtol=1e-13, atol=1e-13)


def test_its_maps_compose_as_those_of_a_semiring_do() -> None:
    """x -> max(a x, b) after x -> max(c x, d) is x -> max(a c x, max(a d, b)), gates >= 0: what a scan needs."""
    draw = torch.Generator().manual_seed(0)
    a, c = torch.rand(2, 50, generator=draw, dtype=torch.float64)
    b, d, x = torch.randn(3, 50, generator=draw, dtype=torch.float64)
    one_by_one = torch.maximum(a * torch.maximum(c * x, d), b)
    torch.testing.assert_close(torch.maximum(a * c * x, torch.maximum(a * d, b)), one_by_one)


def test_routes_that_add_refuse_it() -> None:
    largest = StateUpdate(Linear(), algorithm=Step(write="max"))
    for update in (
        StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(write="max")),
        StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(via=(largest,))),
    ):
        chosen = axes.select(update)
        assert chosen.route == "interpreter" and "keeps the larger" in chosen.reason


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((SquaredError(), Euclidean(), Scalar("decay"), Step(Per("beta"), at="new", write="max")), "is explicit"),
        ((Given(), Euclidean(), Zero(), Step(0.1, write="max")), "keeps nothing"),
        ((Given(), Euclidean(), Scalar(0.5), Step(0.1, write="max", read=Read(0.5, 0.5))), "read at the new state"),
        ((Alignment(), Euclidean(), Scalar("decay"), Step(write="max"), List()), "pairs have no larger one"),
        ((Linear(), Euclidean(), Scalar(0.5), Step(0.5, debias=True, write="max")), "response of a maximum"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_where_it_cannot_act_it_is_refused(parts: tuple[object, ...], message: str) -> None:
    with pytest.raises(IllegalUpdate, match=message):
        StateUpdate(*parts)  # type: ignore[arg-type]


EMA = {"monoid": Scalar(0.9), "algorithm": Step(0.1)}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StateUpdate(Linear(), Whiten((StateUpdate(Linear("square", raw=True), **EMA),)), Zero()), "no filter"),
        (
            lambda: StateUpdate(
                Linear(), Whiten((StateUpdate(Linear("unit"), h=Whiten((StateUpdate(Linear("square")),))),))
            ),
            "one number",
        ),
        (
            lambda: StateUpdate(Given(), Whiten((StateUpdate(Linear("square"), algorithm=Step(read=Read(1.0, 0.0))),))),
            "a function of the state",
        ),
        (lambda: StateUpdate(Given(), Whiten((StateUpdate(Linear("white-square")),))), "makes on a filter"),
        (lambda: StateUpdate(Linear(), algorithm=Step(debias=True, start=0.5), monoid=Scalar(0.5)), "has no bias"),
        (lambda: StateUpdate(Given(), algorithm=Step(0.1, start=0.5)), "starts at the weights"),
        (lambda: Linear("drive", offset=0.1), "added to a square or a magnitude"),
        (lambda: Linear("white-square", raw=True), "leave raw at False"),
        (lambda: Step(start=-0.5), "a number > 0"),
        (lambda: Whiten((StateUpdate(Linear("square")),), power=-0.5), "negative with eps_inside"),
        (lambda: Whiten((StateUpdate(Linear("square")),), eps=0.0, eps_inside=True), "no effect at eps 0"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_statistics_and_starts_that_cannot_act_are_refused(build: object, message: str) -> None:
    with pytest.raises(IllegalUpdate, match=message):
        build()  # type: ignore[operator]
