"""Group A, the regularised cost: Bregman divergences, implicit steps and mirror descent."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss, kl_div

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.calculus import gradient, half_square, minimiser, negative_entropy
from axes.claims.tools.descent import squared_error
from axes.claims.tools.float64 import eye, full, ones, tensor
from axes.claims.tools.matrices import beyond, centred, nuclear
from axes.claims.tools.tuples import DELTA, GATED, LINEAR, LONGHORN, layer_tuple, one_output, one_step, walked
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.chain import chain
from axes.core.costs import Cost, CrossEntropy, Given, Huber, Linear, Lp, SquaredError
from axes.core.derived import feedback
from axes.core.geometry import Bounded, Entropic, Euclidean, Geometry, Lq, Spectral, Whiten
from axes.core.geometry.bregman import Context
from axes.core.memory import MLP
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.predicted import FrankWolfeDelta, RLSNet

_RATE = Step(Per("eta"))
_ON_SIMPLEX = (lambda x: x.sum() - 1,)
_Cost = Callable[[Tensor], Tensor]


def longhorn(start: Tensor, k: Tensor, v: Tensor, eta: float) -> Tensor:
    """One token of Longhorn with the same plasticity in every row."""
    return one_step(layer_tuple(LONGHORN), start, k=k, v=v, beta=torch.full_like(v, eta))


def _binary(w: Tensor) -> Tensor:
    return -(torch.special.entr(w) + torch.special.entr(1 - w)).sum()


def _half_norm(p: float) -> _Cost:
    return lambda w: w.abs().pow(p).sum().pow(2 / p) / 2


def _mirror_cost(h: _Cost, start: Tensor, g: Tensor, eta: float) -> _Cost:
    """x -> <g, x> + D_h(x, start) / eta, by the definition of the divergence."""
    slope = gradient(h, start)
    return lambda x: (g * x).sum() + (h(x) - h(start) - (slope * (x - start)).sum()) / eta


@check
def A18(draw: Draw) -> Findings:
    n, shape = 40, (3, 4)
    cases: tuple[tuple[str, Geometry, _Cost], ...] = (
        ("Euclidean", Euclidean(), half_square),
        ("entropic, rows", Entropic("row"), negative_entropy),
        ("entropic, whole", Entropic("whole"), negative_entropy),
        ("binary entropy", Bounded(), _binary),
        ("4/3-norm", Lq(4.0), _half_norm(4 / 3)),
        ("3-norm", Lq(1.5), _half_norm(3.0)),
    )
    for name, h, value in cases:
        a, b, c = (h.primal(draw.normal(n, *shape)) for _ in range(3))
        d = h.divergence(a, b)
        by_hand = torch.stack(
            [value(x) - value(y) - (gradient(value, y) * (x - y)).sum() for x, y in zip(a, b, strict=True)]
        )
        bridge = ((h.subgradient(b) - h.subgradient(c)) * (a - b)).sum((-2, -1))
        yield agree(f"{name}: against autograd's definition", d, by_hand, 1e-10)
        yield holds(f"{name}: at equal points", h.divergence(a, a).abs().max(), 1e-12)
        yield agree(f"{name}: three-point identity", h.divergence(a, c), d + h.divergence(b, c) + bridge, 1e-10)
        yield breaks(f"{name}: least divergence of {n} pairs", d.min(), 1e-6)
        if name.startswith("entropic"):
            kl = kl_div(b.log(), a, reduction="none").sum((-2, -1))
            yield agree(f"{name}: against Kullback-Leibler", d, kl, 1e-11)
            yield differ(f"{name}: asymmetry", d, h.divergence(b, a), 0.1)
    corner, inside = tensor([[0.0, 0.3, 0.7]]), full(1 / 3, 1, 3)
    kl = kl_div(inside.log(), corner, reduction="sum")
    yield agree("entropic: on the boundary", Entropic("row").divergence(corner, inside), kl, 1e-12)


@check
def A19(draw: Draw) -> Findings:
    w, other = draw.normal(20, 3, 5), draw.normal(20, 3, 5)
    apart = torch.stack([(a - b).pow(2).sum() / 2 for a, b in zip(w, other, strict=True)])
    yield agree("against half the squared distance", Euclidean().divergence(w, other), apart, 1e-12)


@check
def A20(draw: Draw) -> Findings:
    w, k, v = draw.normal(3, 4), draw.unit(4), draw.normal(3)
    costs: tuple[tuple[str, Cost, Tensor, _Cost], ...] = (
        ("squared error", SquaredError(), v, squared_error(k, v)),
        ("Huber", Huber(0.7), v, lambda x: huber_loss(x @ k, v, reduction="sum", delta=0.7)),
        ("cubic", Lp(3.0), v, lambda x: (x @ k - v).abs().pow(3).sum()),
        ("cross-entropy", CrossEntropy(), v.softmax(0), lambda x: cross_entropy(x @ k, v.softmax(0))),
    )
    for name, cost, target, loss in costs:
        update = StateUpdate(cost, algorithm=Step(Per("eta"), at="new"))
        for eta in (0.1, 1.0, 10.0):
            new = one_step(update, w, k=k, v=target, eta=tensor(eta))
            residual = new - w + eta * gradient(loss, new)
            yield holds(f"{name}: implicit equation", residual.abs().max() / max(1.0, eta), 1e-10)
            if eta == 1.0:
                solved = minimiser(lambda x, f=loss: f(x) + half_square(x - w), w)  # type: ignore[misc]
                yield agree(f"{name}: against a solver", new, solved, 1e-6)


def _derived(update: StateUpdate) -> bool:
    """Whether the tuple's parts say that a step is affine in the stored state."""
    return feedback(update) != "nonlinear" and all(f.parts().h.is_identity for f in update.filters())


@check
def A21(draw: Draw) -> Findings:
    d, n = 4, 3
    k, v = draw.unit(n, d), 2 * draw.normal(n, d)
    half, decay = full(0.5, n), full(-0.2, n)
    signal = {"k": k, "v": v, "target": v, "beta": half, "theta": half, "eta": half, "decay": decay, "momentum": decay}
    rows = signal | {"beta": full(0.5, n, d)}
    first, second = draw.normal(d, d), draw.normal(d, d)

    def defect(update: StateUpdate, data: dict[str, Tensor]) -> float:
        def run(*leaves: Tensor) -> tuple[Tensor, ...]:
            return reference.run(update, data, weights=leaves)[1].theta

        deep = update.parts().memory == MLP(1)
        a, b = ((first, second), (draw.normal(d, d), draw.normal(d, d))) if deep else ((first,), (second,))
        between = run(*(2 * x - y for x, y in zip(a, b, strict=True)))
        return max(gap(z, 2 * x - y) for x, y, z in zip(run(*a), run(*b), between, strict=True))

    names = (LINEAR, DELTA, GATED, LONGHORN, "titans-matrix")
    affine = [(name, layer_tuple(name), rows if name == LONGHORN else signal) for name in names]
    affine.append(("recursive least squares", RLSNet.update, signal))
    affine.append(("momentum", StateUpdate(SquaredError(), algorithm=Step(0.5, via=(Momentum(0.9, "sum"),))), signal))
    simplex = {**signal, "v": v.softmax(-1)}
    curved = (
        ("Huber", StateUpdate(Huber(0.5), algorithm=_RATE), signal),
        ("cubic", StateUpdate(Lp(3.0), algorithm=_RATE), signal),
        ("cross-entropy", StateUpdate(CrossEntropy(), algorithm=_RATE), simplex),
        ("normalised direction", FrankWolfeDelta.update, signal),
        ("entropic link", StateUpdate(SquaredError(), Entropic("row"), algorithm=_RATE), signal),
        ("two-layer memory", StateUpdate(SquaredError(), algorithm=_RATE, memory=MLP(1)), signal),
    )
    for name, u, s in affine:
        yield holds(f"{name}: affine defect", defect(u, s), 1e-11)
    for name, u, s in curved:
        yield breaks(f"{name}: affine defect", defect(u, s), 1e-4)
    yield holds("affine tuples from which another feedback is derived", sum(not _derived(u) for _, u, _ in affine), 0.0)
    yield holds("other tuples from which affine feedback is derived", sum(_derived(u) for _, u, _ in curved), 0.0)


@check
def A22(draw: Draw) -> Findings:
    w, k, v = draw.normal(3, 4), draw.normal(4), draw.normal(3)
    for eta in (1e-3, 1.0, float(10 ** draw.uniform(low=-3.0, high=3.0)), 1e3):
        new, shrunk = longhorn(w, k, v, eta), eta / (1 + eta * float(k @ k))

        slope = gradient(lambda x, eta=eta: eta * squared_error(k, v)(x) + half_square(x - w), new)  # type: ignore[misc]
        yield agree("closed form", new, w + shrunk * torch.outer(v - w @ k, k), 1e-11)
        yield holds("gradient of the regularised cost, over 1 + eta", slope.norm() / (1 + eta), 1e-11)
    entries = one_step(layer_tuple("longhorn-diagonal"), w, k=k, v=v, beta=torch.ones_like(v))
    yield agree("no write at k = 0", longhorn(w, torch.zeros_like(k), v, 1.0), w, 0.0)
    yield differ("the diagonal approximation", entries, longhorn(w, k, v, 1.0), 1e-3)


@check
def A23(draw: Draw) -> Findings:
    w, k, v, delta = draw.normal(3, 4), draw.unit(4), draw.normal(3), layer_tuple(DELTA)
    whole = one_step(delta, w, k=k, v=v, beta=ones())
    for eta in (1.0, 10.0, 1e4):
        ratio = (longhorn(w, k, v, eta) - whole).norm() * (1 + eta) / (v - w @ k).norm()
        yield agree("unit key: distance over |e|/(1 + eta), less one", ratio, 1, 1e-8)
    long = draw.uniform(low=1.5, high=3.0) * k
    limit = longhorn(w, long, v, 1e12)
    normalised = one_step(delta, w, k=long, v=v, beta=1 / long.square().sum())
    plain = one_step(delta, w, k=long, v=v, beta=ones())
    yield agree("longer key, eta = 1e12: against e k^T / |k|^2", limit, normalised, 1e-9)
    yield differ("longer key: against e k^T", limit, plain, 0.01)


@check
def A24(draw: Draw) -> Findings:
    n, d_v, d_k = 40, 3, draw.integer(2, 6)
    k, v, eta = draw.normal(n, d_k), draw.normal(n, d_v), 10 ** draw.uniform(n, low=-2.0, high=3.0)
    rows = {"k": k, "v": v, "beta": eta[:, None].expand(n, d_v)}
    sizes = k.square().sum(-1)
    beta = eta / (1 + eta * sizes)
    exact, explicit = walked(layer_tuple(LONGHORN), **rows), walked(layer_tuple(DELTA), k=k, v=v, beta=beta)
    spectrum = torch.linalg.eigvals(chain(layer_tuple(LONGHORN), rows).transition()).real
    yield agree("40 states", exact, explicit, 1e-11)
    yield agree("largest eigenvalue of a transition less one", spectrum.max(), 1, 1e-12)
    yield holds("least eigenvalue below zero", beyond(-spectrum), 0.0)
    yield agree("least eigenvalue against 1/(1 + eta |k|^2)", spectrum.min(), (1 - beta * sizes).min(), 1e-9)


@check
def A25(draw: Draw) -> Findings:
    k, v, eta = draw.normal(3), draw.normal(2), float(draw.uniform(low=0.1, high=1.0))
    cases: tuple[tuple[str, Geometry, _Cost, tuple[int, ...] | None], ...] = (
        ("entropic, rows", Entropic("row"), negative_entropy, (-1,)),
        ("entropic, columns", Entropic("column"), negative_entropy, (-2,)),
        ("entropic, whole", Entropic("whole"), negative_entropy, (-2, -1)),
        ("binary entropy", Bounded(), _binary, None),
        ("4/3-norm", Lq(4.0), _half_norm(4 / 3), None),
        ("Euclidean", Euclidean(), half_square, None),
    )
    for name, h, value, slices in cases:
        start = h.primal(draw.normal(2, 3))
        g = gradient(squared_error(k, v), start)
        new = one_output(StateUpdate(SquaredError(), h, algorithm=_RATE), h.dual(start), k=k, v=v, eta=tensor(eta))
        residual = g + (gradient(value, new) - gradient(value, start)) / eta
        yield holds(f"{name}: stationarity", residual if slices is None else centred(residual, slices), 1e-9)
        if name == "entropic, whole":
            solved = minimiser(_mirror_cost(value, start, g, eta), start, equal=_ON_SIMPLEX, lower=1e-12)
            yield agree(f"{name}: against a solver", new, solved, 1e-5)
    metric = draw.positive_definite(3)
    start, g = draw.normal(2, 3), draw.normal(2, 3)
    whiten = Whiten((StateUpdate(Linear("key")),), kind="right", power=1.0, eps=0.0)
    new = whiten.primal(start @ metric - eta * g, Context(stats=(metric,)))
    yield agree("quadratic metric: W - eta g H^-1", new, start - eta * torch.linalg.solve(metric, g.mT).mT, 1e-9)


@check
def A26(draw: Draw) -> Findings:
    theta = draw.normal(1, 4)
    theta = theta - theta.logsumexp(-1) + 2  # exp(theta - 1) sums to e

    def conjugate(x: Tensor) -> Tensor:
        return negative_entropy(x) - (theta * x).sum()

    link, uniform = Entropic("row").primal(theta), torch.full_like(theta, 0.25)
    on_simplex = minimiser(conjugate, uniform, equal=_ON_SIMPLEX, lower=1e-12)
    on_orthant = minimiser(conjugate, uniform, lower=1e-12)
    by_duality = gradient(lambda x: torch.logsumexp(x, -1).sum(), theta)
    by_square = minimiser(lambda x: half_square(x) - (theta * x).sum(), uniform)
    yield agree("Euclidean: against a solver", Euclidean().primal(theta), by_square, 1e-7)
    yield agree("simplex: against a solver", link, on_simplex, 1e-5)
    yield agree("simplex: against the gradient of log-sum-exp", link, by_duality, 1e-12)
    yield agree("orthant: a solver against exp(theta - 1)", on_orthant, (theta - 1).exp(), 1e-5)
    yield differ("orthant: a solver against softmax", on_orthant, link, 0.1)


@check
def A27(draw: Draw) -> Findings:
    start, g, eta = Entropic("row").primal(draw.normal(1, 4)), draw.normal(1, 4), 1.0
    g = g + (start.log() - eta * g).logsumexp(-1) - math.log(2.0)  # w exp(-eta g) sums to 2
    cost = _mirror_cost(negative_entropy, start, g, eta)
    y = 2 * draw.normal(4, 2)

    def stepped(h: Geometry, theta: Tensor, slope: Tensor) -> Tensor:
        return one_output(StateUpdate(Given(), h, algorithm=Step(eta)), theta, g=slope)

    mirror = stepped(Entropic("row"), start.log(), g)
    polar, plain = (stepped(h, torch.zeros_like(y), -y) for h in (Spectral("polar"), Euclidean()))

    def from_y(x: Tensor) -> Tensor:
        return half_square(x) - (y * x).sum()

    orthonormal = [lambda x, i=i: (x.mT @ x - eye(2))[i] for i in ((0, 0), (0, 1), (1, 1))]
    isometric = minimiser(from_y, polar + 0.1 * draw.normal(4, 2), equal=orthonormal)
    free, on_simplex = minimiser(cost, start, lower=1e-12), minimiser(cost, start, equal=_ON_SIMPLEX, lower=1e-12)
    unconstrained = minimiser(from_y, polar)
    yield differ("entropic, no constraint: the solver against the mirror step", free, mirror, 0.1)
    yield differ("polar, no constraint: the solver against the link", unconstrained, polar, 0.05)
    yield agree("entropic on the simplex", on_simplex, mirror, 1e-5)
    yield agree("polar on orthonormal columns", isometric, polar, 1e-5)
    yield agree("Euclidean without a set", unconstrained, plain, 1e-6)


@check
def A28(draw: Draw) -> Findings:
    m, r = 5, draw.integer(1, 4)
    y, h = draw.normal(m, r), Spectral("polar")
    polar = h.primal(y)
    others = torch.linalg.qr(draw.normal(200, m, r))[0]
    w0, g, eta = draw.orthogonal(m)[:, :r], draw.normal(m, r), 0.3
    new = one_output(StateUpdate(Given(), h, algorithm=Step(eta, lazy=False)), w0, g=g)
    slope = gradient(lambda x: (g * x).sum() + half_square(x - w0) / eta, new)
    tangent = slope - new @ (new.mT @ slope + slope.mT @ new) / 2
    excess = beyond((others * y).sum((-2, -1)), nuclear(y))
    yield agree("against the gradient of the nuclear norm", polar, gradient(nuclear, y), 1e-9)
    yield agree("<polar(Y), Y> against the nuclear norm", (polar * y).sum(), nuclear(y), 1e-11)
    yield agree("orthonormal columns", polar.mT @ polar, eye(r), 1e-12)
    yield holds("how far 200 other isometries exceed it", excess, 1e-12)
    yield holds("projected step: Riemannian gradient of its objective", tangent.norm(), 1e-11)
