"""Where mixers end: what is refused by name, rates and their free parameters, zeros, reads of other streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment
from axes.core.monoids import Diagonal, Hadamard, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import (
    AttentionResiduals,
    Coefficients,
    DeepDelta,
    FracConnections,
    HyperConnections,
    mixer,
)
from axes.depth import kernels as by_products
from axes.depth.base import _read
from axes.depth.choice import choose, plans
from axes.depth.static import _value, raw
from axes.depth.wired import _same
from axes.errors import ShapeError
from axes.routes.choice import Target

D = 6


def test_channels_that_turn_in_pairs_are_even() -> None:
    factory = mixer(StateUpdate(Alignment(), monoid=Rotation(Per("angle", "row-pair", "real"))))
    for width in (3, 5, 9):
        with pytest.raises(ShapeError, match=f"rotates pairs of channels: d must be even, got {width}"):
            factory(width, 0, 3)
    assert all(factory(width, 0, 3).rates["angle"].numel() == width // 2 for width in (2, 4, 6, 8))


@pytest.mark.parametrize(("domain", "values"), [("unit", (1e-3, 0.2, 0.5, 0.97)), ("positive", (0.01, 1.0, 7.0)),
                                                ("real", (-3.0, 0.0, 2.0))])  # fmt: skip
def test_a_free_parameter_stands_for_its_value(domain: Any, values: tuple[float, ...]) -> None:
    for value in values:
        made = _value(torch.tensor(raw(value, domain), dtype=torch.float64), Per("x", "scalar", domain))
        assert float(made.exp() if domain == "unit" else made) == pytest.approx(value, rel=1e-9)
    if domain != "real":  # a step can leave the ends
        assert all(abs(raw(end, domain)) < 100 for end in (0.0, 1.0))


def test_nothing_written_along_a_direction_is_nothing() -> None:
    mixed = DeepDelta(D, 0, 2)
    x = torch.randn(2, 3, D)
    _, coefficients = mixed.read(mixed.expand(x))
    written = mixed.written(torch.zeros_like(x), coefficients)["v"]
    assert isinstance(written, torch.Tensor) and not written.any()
    long = mixed.written(1e3 * x, coefficients)["v"]
    assert isinstance(long, torch.Tensor)
    torch.testing.assert_close(long.square().sum(-1), torch.ones(2, 3))


def test_a_read_hands_on_the_streams_that_it_was_of() -> None:
    kept, other, handed = (torch.zeros(2, 3, D) for _ in range(3))
    assert _read(kept, Coefficients(torch.zeros(2), {}, (kept, handed))) is handed
    assert _read(kept, Coefficients(torch.zeros(2), {}, (other, handed))) is kept
    assert _read(kept, Coefficients(torch.zeros(2), {})) is kept


def test_rates_that_differ_in_one_stream_have_no_products() -> None:
    for monoid in (Diagonal("a", "row"), Hadamard("a"), Rotation(Per("angle", "row-pair", "real"))):
        reason = by_products.no_form(StateUpdate(Alignment(), monoid=monoid))
        assert reason == "entries of one stream are kept or written at different rates", monoid
    row = StateUpdate(Alignment(), algorithm=Step(rate=Per("eta", "row")))
    assert by_products.no_form(row) == "entries of one stream are kept or written at different rates"
    for plain in (StateUpdate(Alignment()), StateUpdate(Alignment(), monoid=Scalar("a"))):
        assert by_products.no_form(plain) is None


def test_why_products_do_not_run_is_said() -> None:
    cpu, plain, scaled = torch.device("cpu"), StateUpdate(Alignment()), StateUpdate(Alignment(), monoid=Scalar("a"))
    assert "(no kernel: it is added)" in choose(plain, cpu, torch.float32, adds="it is added").reason
    assert "it is added" not in choose(scaled, cpu, torch.float32, adds="it is added").reason
    heavy = StateUpdate(Alignment(), algorithm=Step(via=(Momentum(0.5, "ema"),)))
    for update, own, reason in (
        (plain, None, None),
        (plain, "of its own", "of its own"),
        (heavy, None, "the state is more than the streams"),
        (heavy, "of its own", "of its own"),
    ):
        (plan,) = plans(update, Target(cpu), torch.float32, own=own)
        assert plan.routes["chain"] == reason


@pytest.mark.parametrize("cls", [HyperConnections, FracConnections])
def test_a_mixer_is_made_as_its_reset_makes_it(cls: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        options: dict[str, Any] = {"fractions": 2} if cls is FracConnections else {"streams": 2, "learned_reduce": True}
        made, other = cls(D, 1, **options), cls(D, 1, **options)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(torch.nan)
    other.reset_parameters()
    for name, p in made.named_parameters():
        assert torch.equal(p, other.get_parameter(name)), name


def test_a_state_of_too_few_dimensions_is_anothers() -> None:
    heavy = mixer(StateUpdate(Alignment(), algorithm=Step(via=(Momentum(0.5, "ema"),))))(D, 0, 2)
    for made, fewest in ((heavy, 2), (AttentionResiduals(D, 0), 1)):
        state = made.expand(torch.randn(2, 3, D))
        for n in range(fewest):
            with pytest.raises(ShapeError, match="streams must be the State that expand returned, and its theta is"):
                made.read(state.but(theta=(torch.zeros((D,) * n), *state.theta[1:])))


def test_arguments_are_the_same_if_they_are_equal_or_left_out() -> None:
    tensor = torch.ones(2)
    assert _same(None, 0.5) and _same(0.5, 0.5) and _same("mean", "mean") and _same(tensor, tensor)
    assert not _same(0.5, 0.25) and not _same("mean", "sum") and not _same(tensor, torch.ones(2)) and not _same(1, None)
