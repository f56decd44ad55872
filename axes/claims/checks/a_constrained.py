"""Group A, constraint sets: Muon, Frank-Wolfe, trust regions, and what makes a state forget."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.calculus import box_oracle, derivative, gradient, half_square, minimiser
from axes.claims.tools.descent import Make, alignment, fed, moves, sgd, squared_error, trained
from axes.claims.tools.float64 import eye, full, ones
from axes.claims.tools.matrices import beyond, centred, nuclear, polar
from axes.claims.tools.tuples import LINEAR, layer_tuple, one_output, one_step, walked
from axes.core.algorithms import Step
from axes.core.costs import Given, SquaredError
from axes.core.geometry import Entropic, Euclidean, Geometry, SignBall, Spectral, Sphere
from axes.core.monoids import Scalar
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import Lion, Muon
from axes.sequence.predicted import FrankWolfeDelta

# Newton-Schulz with a contracting polynomial, long enough to be the polar factor to rounding
_EXACT_POLAR = {"ns_steps": 40, "ns_coefficients": (1.875, -1.25, 0.375), "precision": "input", "scale": None}


def muon(weight: nn.Parameter, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Muon:
    """Muon with an exact polar factor on one matrix."""
    group = [{"params": [weight], "rule": "muon"}]
    return Muon(group, lr=lr, momentum=momentum, nesterov=False, weight_decay=weight_decay, **_EXACT_POLAR)  # type: ignore[arg-type]


def _ball(centre: Tensor | float, squared_radius: Tensor | float) -> tuple[Callable[[Tensor], Tensor], ...]:
    """What must not be negative for a point of a ball."""
    return (lambda x: squared_radius - (x - centre).square().sum(),)


def _projected(start: Tensor, g: Tensor, eta: float) -> Tensor:
    """One step of projected descent onto the matrices with orthonormal columns."""
    return one_output(StateUpdate(Given(), Spectral("polar"), algorithm=Step(eta, lazy=False)), start, g=g)


@check
def A29(draw: Draw) -> Findings:
    n, m, steps, eta = 5, 4, 100, 0.05
    start, target = draw.orthogonal(n)[:, :m], 2 * draw.normal(n, m)
    last = trained(partial(muon, lr=eta, momentum=0.9), start, [lambda w: half_square(w - target)] * steps)[-1]
    w = start
    for _ in range(steps):
        w = _projected(w, w - target, eta)
    g = draw.normal(n, m)
    direction = -moves(partial(muon, lr=eta), start, [g])[0] / eta
    slope = (direction * g).sum()
    others = draw.normal(200, n, m)
    others = others / torch.linalg.matrix_norm(others, 2)[:, None, None]
    yield differ("Muon after 100 steps: |W^T W - I|", last.mT @ last, eye(m), 0.3)
    for small in (1e-2, 1e-3):
        stepped = fed(partial(muon, lr=small), start, [g])[0]
        yield breaks("one step: difference over eta", gap(stepped, _projected(start, g, small)) / small, 0.1)
    yield agree("projected descent after 100 steps: |W^T W - I|", w.mT @ w, eye(m), 1e-11)
    yield agree("singular values of Muon's step over eta, less one", torch.linalg.svdvals(direction), ones(m), 1e-9)
    yield agree("Muon's direction against the polar factor", direction, polar(g), 1e-9)
    yield agree("its slope against the nuclear norm, the dual norm", slope, nuclear(g), 1e-9)
    yield holds("excess of 200 other directions", beyond((others * g).sum((-2, -1)), slope), 0.0)


@check
def A30(draw: Draw) -> Findings:
    w, k, v, eta = draw.normal(2, 3), draw.unit(3), draw.uniform(2, low=-1.0, high=0.5), 1.0
    w = w + torch.outer(2 - w @ k, k)  # the old prediction is 2, away from the target
    loss = squared_error(k, v)
    new = one_step(StateUpdate(SquaredError(), algorithm=Step(eta, at="new")), w, k=k, v=v)
    region = minimiser(loss, w + 0.1, positive=_ball(w, (new - w).square().sum()))
    ball = minimiser(loss, 0.5 * new, positive=_ball(0.0, new.square().sum()))
    ridge = trained(partial(sgd, lr=0.5, weight_decay=1.0), w, [loss] * 60)[-1]
    shrunk = minimiser(loss, 0.5 * ridge, positive=_ball(0.0, ridge.square().sum()))
    yield breaks("best cost in the ball at 0 of radius |W_t|, below l(W_t)", loss(new) - loss(ball), 0.1)
    yield agree("implicit step against the trust region of radius |W_t - W_{t-1}|", new, region, 1e-5)
    yield agree("weight decay's fixed point against the ball at 0", ridge, shrunk, 1e-5)


@check
def A31(draw: Draw) -> Findings:
    radius, steps = 3.0, 60
    gamma = draw.uniform(steps)
    start = draw.normal(3, 4)
    start = start / nuclear(start) * radius
    k, v = draw.normal(steps, 4), draw.normal(steps, 3)
    rates = {"decay": torch.log1p(-gamma), "beta": radius * gamma}
    path = walked(FrankWolfeDelta.update, start, k=k, v=v, **rates)
    before, share = torch.cat((start[None], path[:-1])), gamma[:, None, None]
    oracle = (path - (1 - share) * before) / (share * radius)
    known = {"k": k[0], "v": path[-1] @ k[0], **{name: x[0] for name, x in rates.items()}}
    still = one_step(FrankWolfeDelta.update, path[-1], **known)

    def walk(make: Make, first: Tensor) -> Tensor:
        return fed(make, first, [draw.normal(3, 4) for _ in range(steps)], lr=(radius * gamma).tolist())

    orthogonal = walk(partial(muon, lr=1.0, momentum=0.5, weight_decay=1 / radius), polar(draw.normal(3, 4)) * radius)
    inside = draw.uniform(3, 4, low=-radius, high=radius)
    signed = walk(lambda w: Lion([w], lr=1.0, weight_decay=1 / radius), inside)
    spectral = torch.linalg.matrix_norm(orthogonal, 2)
    yield holds("nuclear ball: largest excess over R, relative", beyond(nuclear(path) / radius, 1), 1e-12)
    yield holds("nuclear ball: distance of the oracle's points from the boundary", nuclear(oracle) - 1, 1e-9)
    yield holds("spectral ball, by Muon with decay 1/R: excess", beyond(spectral / radius, 1), 1e-9)
    yield holds("max-norm ball, by Lion with decay 1/R: excess", beyond(signed.abs() / radius, 1), 1e-12)
    yield holds("at zero error: nuclear norm over R", beyond(nuclear(still) / radius, 1), 1e-12)


@check
def A32(draw: Draw) -> Findings:
    cases: tuple[tuple[str, Geometry, Callable[[Tensor], Tensor]], ...] = (
        ("max norm", SignBall(), lambda x: x.abs().sum()),
        ("Frobenius norm", Sphere("whole"), lambda x: x.square().sum().sqrt()),
        ("spectral norm", Spectral("polar"), nuclear),
    )
    g = draw.normal(4, 3)
    for name, h, support in cases:
        oracle = h.primal(-g)
        yield agree(f"{name}: against the gradient of the support function", oracle, gradient(support, -g), 1e-9)
        yield agree(f"{name}: -<g, W> against the dual norm", -(oracle * g).sum(), support(-g), 1e-10)
    disc = minimiser(lambda x: (g * x).sum(), -0.1 * g, positive=_ball(0.0, 1.0))
    yield agree("max norm: against a linear program", SignBall().primal(-g), box_oracle(g, 1.0), 1e-9)
    yield agree("Frobenius norm: against a solver", Sphere("whole").primal(-g), disc, 1e-5)


@check
def A33(draw: Draw) -> Findings:
    radius, gamma = 2.0, 0.3
    g = draw.normal(2, 3)
    w = draw.normal(2, 3)
    w = w - g * (w * g).sum() / g.square().sum()
    w = w / w.norm()  # inside the ball and across the gradient

    def frank_wolfe(share: float) -> Tensor:
        rule = StateUpdate(Given(), OnUpdate(Sphere("whole")), Scalar(1 - share), Step(radius * share))
        return one_output(rule, w, g=g)

    def projected(eta: float) -> Tensor:
        moved = w - eta * g
        return moved * min(1.0, radius / float(moved.norm()))

    step = frank_wolfe(gamma)
    distance = min(gap(projected(10**x), step) for x in torch.linspace(-3, 4, 400).tolist())
    centre = (1 - gamma) * w
    shrunken = _ball(centre, (gamma * radius) ** 2)
    solved = minimiser(lambda x: (g * x).sum(), centre - 0.1 * g, positive=shrunken)
    inside = draw.normal(300, 2, 3)
    inside = centre + gamma * radius * inside / inside.norm(dim=(-2, -1), keepdim=True)
    ball = minimiser(lambda x: (g * x).sum() + half_square(x - w), w, positive=_ball(0.0, radius**2))
    below = (g * step).sum() - (inside * g).sum((-2, -1))
    yield breaks("nearest projected mirror step, over all eta", distance, 0.05)
    yield agree("projected gradient against a solver of the printed form", projected(1.0), ball, 1e-5)
    yield agree("against the argmin over the shrunken set, by a solver", step, solved, 1e-5)
    yield holds("how far 300 points of that set go below", beyond(below), 1e-12)
    yield agree("gamma = 1 against the printed form at eta = 1e9", frank_wolfe(1.0 - 1e-12), projected(1e9), 1e-7)


@check
def A34(draw: Draw) -> Findings:
    w, k, v, eta = draw.normal(2, 3), draw.unit(3), draw.normal(2), float(draw.uniform(low=0.2, high=1.0))
    weight_decay = float(draw.uniform(low=0.2, high=1.0))
    x, aligned, update = eta * weight_decay, alignment(k, v), layer_tuple(LINEAR)
    alone = minimiser(lambda s: aligned(s) + half_square(s - w), w)
    kept = derivative(lambda s: one_step(update, s, k=k, v=v), w)
    entropic = one_output(StateUpdate(Given(), Entropic("row")), w.log_softmax(-1), g=torch.zeros_like(w))
    exact = minimiser(lambda s: aligned(s) + weight_decay * half_square(s) + half_square(s - w) / eta, w)
    gate = 1 / (1 + x)
    gated = one_step(StateUpdate(update.cost, Euclidean(), Scalar(gate), Step(eta * gate)), w, k=k, v=v)
    explicit = trained(partial(sgd, lr=eta, weight_decay=weight_decay), w, [aligned])[0]
    write = torch.outer(v, k)

    # two divergences, one of them from the uniform state
    log_w, mass, pull = w.log_softmax(-1), math.sqrt(w.shape[-1]), float(draw.uniform(low=0.5, high=3.0))
    step = 1 / (1 / eta + 1 / pull)
    rates = {"decay": full(math.log(step / eta), 2), "eta": full(step, 2)}
    new, before = one_output(layer_tuple("memora-matrix"), log_w, k=k, v=v, **rates), mass * log_w.exp()

    def objective(s: Tensor) -> Tensor:
        g = gradient(squared_error(k, v), before)
        divergence = (s * (s / before).log()).sum() / eta + (s * (s / (mass / w.shape[-1])).log()).sum() / pull
        return (g * s).sum() + divergence

    yield breaks("retention of h alone less the gate 1/(1 + eta lambda)", 1 - gate, 0.03)
    yield differ("the argmin with h alone against the gated step", alone, gate * w + write, 0.005)
    yield agree("h alone: a solver against linear attention", alone, one_step(update, w, k=k, v=v), 1e-6)
    yield agree("h alone: derivative of the step less the identity", kept, eye(6), 0.0)
    yield agree("entropic h alone: W_{t-1} without a gradient", entropic, w.softmax(-1), 1e-12)
    yield agree("decay, exactly: a solver against the gate 1/(1 + eta lambda)", gated, exact, 1e-6)
    yield agree("decay, explicitly: SGD against the gate 1 - eta lambda", explicit, (1 - x) * w + eta * write, 1e-12)
    yield agree("the two gates differ by x^2/(1 + x), x = eta lambda", gate - (1 - x), x * x / (1 + x), 1e-12)
    yield holds("Memora with exponent alpha: stationarity", centred(gradient(objective, new), (-1,)), 1e-9)
