"""Parts that a user writes get the fast path that they declare: on the data axis, along sequences and in depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch
from torch import Tensor

import axes
from axes import optim
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, Cost, Curvature, Given, Residual, SquaredError
from axes.core.geometry import Context, Geometry
from axes.core.geometry.bregman import NO_CONTEXT
from axes.core.monoids import Decay, Element, GeneralLinear, Householder, Kind, Monoid
from axes.core.rates import Per, Rate, Signal, resolve
from axes.core.state_update import OnUpdate, StateUpdate
from axes.depth import mixer
from axes.routes import dispatch, kernel_terms
from axes.testing import checks
from axes.testing.declarations import check_declarations


class _Cubic(Geometry):
    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta + theta**3


@final
@dataclass(frozen=True, repr=False)
class Declared(_Cubic):
    """theta + theta^3, which says that it acts entry by entry."""

    entrywise = True


@final
@dataclass(frozen=True, repr=False)
class Silent(_Cubic):
    """The same, which does not say so."""


@final
@dataclass(frozen=True, repr=False)
class Lying(Geometry):
    """Says that it acts entry by entry, and takes the mean away."""

    entrywise = True

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta - theta.mean((-2, -1), keepdim=True)


@final
@dataclass(frozen=True, repr=False)
class Tanh(Geometry):
    """W = tanh(theta): a link of mixing logits."""

    entrywise = True
    invertible = True

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        return theta.tanh()

    def dual(self, w: Tensor) -> Tensor:
        return w.clamp(-1 + 1e-9, 1 - 1e-9).atanh()


@final
@dataclass(frozen=True, repr=False)
class HalfErase(Monoid):
    """I - (beta / 2) k k^T; says that its strength is beta where it is told to."""

    lies: bool
    kind = "low rank"
    rank_one = True
    along = "k"

    @property
    def strength(self) -> Rate | None:  # type: ignore[override]
        return Per("beta") if self.lies else None

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        k, beta = signal["k"], resolve(Per("beta"), signal)
        assert isinstance(k, Tensor) and isinstance(beta, Tensor)
        return Element(left=(-beta[..., None] / 2 * k)[..., None], right=k[..., None])

    def rates(self) -> tuple[Rate, ...]:
        return (Per("beta"),)

    def signals(self) -> frozenset[str]:
        return frozenset(("k",))

    def neutral(self) -> dict[str, float | Geometry]:
        return {"beta": 0.0}


@final
@dataclass(frozen=True, repr=False)
class HalfGate(Monoid):
    """A = Diag(a)^(1/2), a a gate for every key entry."""

    gate: Per
    kind: ClassVar[Kind] = "diagonal"

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        g = resolve(self.gate, signal)
        assert isinstance(g, Tensor)
        return Element(gate=g / 2)

    def rates(self) -> tuple[Rate, ...]:
        return (self.gate,)


@final
@dataclass(frozen=True, repr=False)
class Leak(Monoid):
    """A = I / (1 + a)."""

    a: Per
    kind: ClassVar[Kind] = "scalar"

    def element(self, signal: Signal, rate: Tensor | float, like: Tensor) -> Element:
        a = resolve(self.a, signal)
        return Element(scale=1 / (1 + a))

    def rates(self) -> tuple[Rate, ...]:
        return (self.a,)

    def neutral(self) -> dict[str, float | Geometry]:
        return {self.a.name: 0.0}


@final
@dataclass(frozen=True, repr=False)
class Times(Cost):
    """l = weight |p - v|^2 / 2. drives: what it says of itself."""

    weight: float = 1.0
    drives: Residual | None = None
    curvature: ClassVar[Curvature] = "affine"

    def gradient(self, prediction: Tensor, target: Tensor, signal: Signal | None = None) -> Tensor:
        return self.weight * (prediction - target)


# ---- the data axis ---------------------------------------------------------------------------------------------------


def rule(h: Geometry) -> StateUpdate:
    return StateUpdate(Given(), OnUpdate(h), Decay(Per("weight_decay")), Step(Per("lr"), via=(Momentum(0.5, "ema"),)))


def stepped(update: StateUpdate, **options: object) -> tuple[Tensor, optim.Optimizer]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    optimizer = axes.optim.optimizer(update)([p], lr=0.1, weight_decay=0.01, **options)
    for t in range(3):
        p.grad = torch.cos(torch.arange(12.0).reshape(3, 4) + t)
        optimizer.step()
    return p.detach(), optimizer


def test_a_declared_geometry_steps_as_one_program() -> None:
    p, optimizer = stepped(rule(Declared()))
    assert axes.select(optimizer)[:2] == ("entrywise", "torch")
    assert axes.select(optimizer, device="cuda")[:2] == ("entrywise", "triton")
    assert axes.select(rule(Declared())).route == "entrywise"
    q, slow = stepped(rule(Declared()), foreach=False)
    assert axes.select(slow).route == "interpreter"
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    by_hand, m = torch.linspace(-1, 1, 12).reshape(3, 4), torch.zeros(3, 4)
    for t in range(3):
        m = 0.5 * m - 0.5 * torch.cos(torch.arange(12.0).reshape(3, 4) + t)
        by_hand = (1 - 0.1 * 0.01) * by_hand + 0.1 * (m + m**3)
    torch.testing.assert_close(p, by_hand, rtol=0, atol=1e-6)
    check_declarations(rule(Declared()))


def test_what_is_not_declared_steps_over_stacks() -> None:
    p, optimizer = stepped(rule(Silent()))
    choice = axes.select(optimizer)
    assert choice[:2] == ("stacks", "torch") and "mixes entries: Silent" in axes.explain(optimizer)
    torch.testing.assert_close(p, stepped(rule(Declared()))[0], rtol=0, atol=1e-6)


def test_a_false_declaration_is_found() -> None:
    """The program is traced, not believed; and the common suite says so."""
    p, optimizer = stepped(rule(Lying()))
    choice = axes.select(optimizer)
    assert choice.route == "stacks" and "is no program" in axes.explain(optimizer)
    torch.testing.assert_close(p, stepped(rule(Lying()), foreach=False)[0])
    with pytest.raises(AssertionError, match="acts entry by entry, and mixes them"):
        check_declarations(rule(Lying()))


def test_a_strength_that_a_map_has_not_is_found() -> None:
    def update(lies: bool) -> StateUpdate:
        return StateUpdate(Alignment(), monoid=HalfErase(lies), algorithm=Step(Per("write")))

    check_declarations(update(False))
    check_declarations(StateUpdate(Alignment(), monoid=Householder(Per("beta"), "k")))
    with pytest.raises(AssertionError, match="has not the strength that it says"):
        check_declarations(update(True))
    assert kernel_terms.family(update(False)) == "scalar"
    same_as_interpreted(update(False))


# ---- sequences -------------------------------------------------------------------------------------------------------


def same_as_interpreted(update: StateUpdate) -> None:
    signal = {n: x for n, x in checks.example(update, length=19).items() if isinstance(x, Tensor)}
    assert checks.error(dispatch.run(update, signal), reference.run(update, signal, time=1)) < 1e-9


def test_a_monoid_by_its_structure_is_a_chain() -> None:
    update = StateUpdate(SquaredError(), monoid=HalfGate(Per("wide", "key", "unit")), algorithm=Step(Per("beta")))
    assert axes.select(update).route == "chain" and kernel_terms.family(update) == "diagonal"
    same_as_interpreted(update)
    check_declarations(update)


@pytest.mark.parametrize(
    ("cost", "route"), [(Times(1.0, "error"), "chain"), (Times(1.0), "interpreter"), (Times(2.0), "interpreter")]
)
def test_a_cost_that_is_driven_by_the_error_is_a_chain(cost: Times, route: str) -> None:
    update = StateUpdate(cost, algorithm=Step(Per("beta")))
    assert axes.select(update).route == route
    same_as_interpreted(update)
    check_declarations(update)


def test_a_cost_that_is_driven_otherwise_than_it_says_is_found() -> None:
    with pytest.raises(AssertionError, match="not driven by the error"):
        check_declarations(StateUpdate(Times(2.0, "error")))


# ---- depth -----------------------------------------------------------------------------------------------------------


def kept(update: StateUpdate) -> Tensor:
    """What the first write of a mixer leaves of two streams, without what it adds: (2, 2)."""
    m = mixer(update)(2, 0, 2, dtype=torch.float64)
    streams = torch.eye(2, dtype=torch.float64)[None]
    _, coefficients = m.read(streams)
    with torch.no_grad():
        return m.write(streams, torch.zeros(1, 2, dtype=torch.float64), coefficients)[0]


def test_rates_of_a_monoid_start_where_it_is_neutral() -> None:
    """A rate that is not named there starts at one, and half of the streams is gone."""
    eye = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(kept(StateUpdate(Alignment(), monoid=Leak(Per("a")))), eye, rtol=0, atol=1e-3)

    @final
    @dataclass(frozen=True, repr=False)
    class Mute(Monoid):
        a: Per
        kind: ClassVar[Kind] = "scalar"
        element, rates = Leak.element, Leak.rates

    torch.testing.assert_close(kept(StateUpdate(Alignment(), monoid=Mute(Per("a")))), eye / 2)


def test_logits_start_where_their_link_gives_the_identity() -> None:
    update = StateUpdate(Alignment(), monoid=GeneralLinear(Per("mix", "mix", "real"), Tanh()))
    torch.testing.assert_close(kept(update), torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-5)
