"""Group J, predicted combinations: the systems that the taxonomy leaves open, by the definitions this package gives."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, holds, within
from axes.claims.tools.calculus import gradient, half_square
from axes.claims.tools.descent import LR, Make, fed, rule, sgd, squared_errors, trained
from axes.claims.tools.float64 import eye, full, ones, zeros
from axes.claims.tools.matrices import beyond, least_squares, nuclear, relative, symmetric_power
from axes.claims.tools.recurrence import recurrence, textbook_least_squares
from axes.claims.tools.tuples import one_step, walked, whitened_sum
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, Given, Linear, SquaredError
from axes.core.geometry import Entropic, Euclidean, Spectral, Whiten
from axes.core.monoids import Decay, Identity, Monoid, Product, Rotation, Scalar
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import ReflectiveMomentum, RotationalMomentum, SignedEG
from axes.sequence import AdamNet, FrankWolfeDelta, RLSNet, ShampooNet


def _pairs(draw: Draw, length: int = 12) -> tuple[Tensor, Tensor]:
    """Keys of width five, values of width four."""
    return draw.normal(length, 5), draw.normal(length, 4)


@check
def J01(draw: Draw) -> Findings:
    t, delta = 12, 0.1
    keys, values = _pairs(draw)
    decay, beta = -draw.uniform(t, high=0.4), draw.uniform(t, low=0.3)
    w = walked(RLSNet.update, k=keys, v=values, decay=decay, beta=beta)[-1]
    # what is left of each token's weight at the end
    root = (beta * torch.exp(decay.flip(0).cumsum(0).flip(0) - decay)).sqrt()[:, None]
    solved = least_squares(root * keys, root * values, delta)
    kept = walked(RLSNet.update, k=keys, v=values, decay=zeros(t), beta=ones(t))[-1]
    recursive = textbook_least_squares(keys, values, delta)[-1]
    k, v = draw.unit(5) * 0.6, draw.normal(4)
    start = draw.normal(4, 5)
    step, frozen = 1 / (1 - 0.36 + float(k @ k)), start + torch.outer(v - start @ k, k)
    moved = one_step(StateUpdate(SquaredError(), algorithm=Step(step)), start, k=k, v=v)
    yield agree("state against the weighted ridge solution", w, solved, 1e-9)
    yield agree("state against the recursion with gain P k / (1 + k P k)", kept, recursive, 1e-8)
    yield agree("frozen P with a + |k|^2 = 1 against the delta rule", moved, frozen, 1e-12)


@check
def J02(draw: Draw) -> Findings:
    keys, values = _pairs(draw)
    polar = Spectral("polar")
    on_state = StateUpdate(Alignment(), polar, Identity(), Step(lazy=False))
    last, loud = (walked(on_state, k=keys, v=x)[-1] for x in (values, 4 * values))
    eta, weight = 0.2, 0.5
    start = draw.normal(4, 5) * 0.1

    def on_update(*via: Momentum) -> Tensor:
        update = StateUpdate(SquaredError(), OnUpdate(polar), Decay(weight), Step(eta, via=via))
        return walked(update, start, k=keys, v=values)

    def rank_one(e: Tensor, k: Tensor) -> Tensor:
        return torch.outer(e / e.norm(), k / k.norm())

    def frank_wolfe(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (1 - weight * eta) * w + eta * rank_one(v - w @ k, k)

    muon, with_momentum = on_update(), on_update(Momentum(0.9, "ema"))
    closed = recurrence(frank_wolfe, start, keys, values)
    decomposed = torch.linalg.svd(torch.outer(values[0], keys[0]), full_matrices=False)
    completed, oracle = decomposed.U @ decomposed.Vh, rank_one(values[0], keys[0])
    yield agree("state: S S^T against I", last @ last.mT, eye(4), 1e-11)
    yield agree("update: against the Frank-Wolfe delta rule", muon, closed, 1e-11)
    yield holds("update: spectral norm beyond 1/weight", beyond(torch.linalg.matrix_norm(closed, 2), 1 / weight), 1e-10)
    yield agree("state: singular values of louder values against 1", torch.linalg.svdvals(loud), ones(4), 1e-11)
    yield differ("with momentum, distance to the Frank-Wolfe delta rule", with_momentum, muon, 1e-2)
    yield differ("full polar factor of a rank-one gradient, distance to e^ k^^T", completed, oracle, 1e-1)


@check
def J03(draw: Draw) -> Findings:
    t, eps = 16, 0.1
    k, v = _pairs(draw, t)

    def layer(values: Tensor) -> Tensor:
        return walked(ShampooNet.update, k=k, v=values, decay=zeros(t), beta=ones(t))[-1]

    def correlations(values: Tensor, gate: float = 1.0) -> Tensor:
        """Singular values without damping, the statistic of the values gated."""
        statistics = (StateUpdate(Linear("value"), monoid=Scalar(gate)), StateUpdate(Linear("key")))
        update = StateUpdate(Alignment(), Whiten(statistics, "kronecker", 0.5, eps=0.0))
        return torch.linalg.svdvals(walked(update, k=k, v=values)[-1])

    left, right = (symmetric_power(x.T @ x + eps * eye(x.shape[1]), -0.5) for x in (v, k))
    noiseless = k @ draw.normal(4, 5).T
    damped = torch.linalg.svdvals(layer(noiseless))[-1]
    forgetting = correlations(v, 0.5)[0] - correlations(v)[0]
    yield agree("against two eigendecompositions", layer(v), left @ (v.T @ k) @ right, 1e-9)
    yield holds("largest singular value beyond 1", beyond(torch.linalg.svdvals(layer(v)), 1), 1e-12)
    yield agree("noiseless linear data: singular values against 1", correlations(noiseless), ones(4), 1e-8)
    yield agree("powers (0, 1) against least squares", whitened_sum(k, v, 1.0), least_squares(k, v), 1e-9)
    yield breaks("with damping, distance of noiseless singular values to 1", 1 - damped, 1e-4)
    yield breaks("statistics that forget faster than the state: largest singular value beyond 1", forgetting, 1e-3)


@check
def J04(draw: Draw) -> Findings:
    t = 100
    k, v = _pairs(draw, t)
    _, h, monoid, step, _ = AdamNet.update.parts()
    here = StateUpdate(SquaredError(), h, monoid, Step(step.rate, at="prev", via=step.via))
    path = walked(here, k=k, v=v, decay=zeros(t), beta=full(0.05, t))
    adam = trained(
        lambda w: torch.optim.Adam([w], lr=0.05, betas=(0.9, 0.95), eps=1e-4), zeros(4, 5), squared_errors(k, v)
    )
    yield agree("100 steps against torch.optim.Adam", path, adam, 1e-11)


@check
def J05(draw: Draw) -> Findings:
    t, radius = 12, 2.0
    keys, values = _pairs(draw, t)
    gamma = draw.uniform(t, low=0.05, high=0.6)
    path = walked(FrankWolfeDelta.update, k=keys, v=values, decay=torch.log1p(-gamma), beta=radius * gamma)

    def descend(w: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return (1 - g) * w - g * radius * gradient(lambda x: (v - x @ k).norm() / k.norm(), w)

    expected = recurrence(descend, zeros(4, 5), keys, values, gamma)
    known = {"k": keys[0], "v": zeros(4), "decay": torch.log1p(-gamma[0]), "beta": gamma[0]}
    silent = one_step(FrankWolfeDelta.update, zeros(4, 5), **known)
    yield agree("against descent on |v - S k| / |k| with decay", path, expected, 1e-12)
    yield holds("nuclear norm beyond the radius", beyond(nuclear(expected), radius), 1e-10)
    yield holds("write where the error is zero", silent, 0.0)


@check
def J06(draw: Draw) -> Findings:
    beta, angle, lr, n = 0.8, 0.3, 0.1, 25
    start, stream = draw.normal(3, 6), draw.normal(n, 3, 6)
    make: Make = lambda w: RotationalMomentum(  # noqa: E731
        [{"params": [w], "rule": "rotational"}], lr=lr, momentum=beta, angle=angle
    )
    turn = beta * complex(math.cos(angle), math.sin(angle))

    def complexed(x: Tensor) -> Tensor:
        return torch.complex(*x.chunk(2, -1))

    def printed(state: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
        m = turn * state[1] + (1 - beta) * complexed(g)
        return state[0] - lr * m, m

    path, first = complexed(fed(make, start, stream)), complexed(start)
    unrolled = recurrence(printed, (first, torch.zeros_like(first)), stream)
    frequencies = torch.linspace(0.01, 1.0, 400, dtype=torch.float64)
    response = (1 - beta) / (1 - turn * torch.exp(-1j * frequencies)).abs()
    target = draw.normal(3, 6)
    turned = StateUpdate(Given(), Euclidean(), Product((Scalar(1.0), Rotation(angle, uniform=True))), Step(LR))
    bowl = [lambda w: half_square(w - target)] * 800
    reached, off = trained(make, start, bowl)[-1], trained(partial(rule, turned, lr=lr), start, bowl)[-1]
    yield agree("against complex momentum", path, unrolled, 1e-12)
    yield agree("distance to the minimiser", reached, target, 1e-9)
    yield within("frequency of the largest response", frequencies[response.argmax()], angle - 0.01, angle + 0.01)
    yield breaks("rotation on the weights: relative distance to the minimiser", relative(off, target), 0.3)


@check
def J07(draw: Draw) -> Findings:
    start, stream, eta = torch.softmax(draw.normal(3, 5), -1), draw.normal(20, 3, 5), 0.2

    def mirrored(monoid: Monoid) -> Tensor:
        return fed(partial(rule, StateUpdate(Given(), Entropic("row"), monoid, Step(LR)), lr=eta), start, stream)

    def multiplied(alpha: float) -> Tensor:
        def step(w: Tensor, g: Tensor) -> Tensor:
            w = w**alpha * torch.exp(-eta * g)
            return w / w.sum(-1, keepdim=True)

        return recurrence(step, start, stream)

    path, pulled = mirrored(Identity()), mirrored(Scalar(0.7))
    signed = draw.normal(3, 5)
    two = fed(lambda x: SignedEG([x], lr=eta, scale=1.0), signed, stream)
    total = eta * stream.cumsum(0)
    halves = torch.exp(torch.asinh(signed) - total) / 2 - torch.exp(total - torch.asinh(signed)) / 2
    yield agree("alpha = 1 against exponentiated gradient", path, multiplied(1.0), 1e-12)
    yield agree("alpha < 1 against its multiplicative form", pulled, multiplied(0.7), 1e-12)
    yield agree("row sums against 1", path.sum(-1), ones(20, 3), 1e-12)
    yield agree("signed weights against two multiplicative halves", two, halves, 1e-10)


@check
def J08(draw: Draw) -> Findings:
    weight, distance, start = 0.4, draw.uniform(15, low=0.01, high=0.5), draw.normal(3, 4)
    rates = -torch.expm1(-distance) / weight
    decayed = partial(sgd, weight_decay=weight, decoupled=True)
    left = fed(decayed, start, [torch.zeros_like(start)] * 15, lr=rates.tolist())[-1]
    back, kept = -torch.log1p(-weight * rates), start * torch.exp(-distance.sum())
    yield agree("weights left after the schedule against e^{-sum D}", left, kept, 1e-12)
    yield agree("distance recovered from the schedule", back, distance, 1e-12)


@check
def J09(draw: Draw) -> Findings:
    beta, lr, n = 0.8, 0.1, 20
    start, stream = draw.normal(3, 5), draw.normal(n, 3, 5)
    path = fed(
        lambda w: ReflectiveMomentum([{"params": [w], "rule": "reflective"}], lr=lr, momentum=beta), start, stream
    )
    zero = torch.zeros_like(start)

    def split(state: tuple[Tensor, ...], g: Tensor, normal: Tensor) -> tuple[Tensor, ...]:
        """Momentum across the mirror's normal and negative momentum along it."""
        w, across, along = state
        part = torch.outer(g @ normal, normal)
        across, along = beta * across + (1 - beta) * (g - part), -beta * along + (1 - beta) * part
        return w - lr * (across + along), across, along

    def reflected(state: tuple[Tensor, ...], g: Tensor, normal: Tensor) -> tuple[Tensor, ...]:
        w, m = state
        m = beta * (m - 2 * torch.outer(m @ normal, normal)) + (1 - beta) * g
        return w - lr * m, m

    normals = draw.unit(n, 5)
    apart = recurrence(split, (start, zero, zero), stream, full(5**-0.5, n, 5))
    turning = recurrence(reflected, (start, zero), stream, normals)
    turning_apart = recurrence(split, (start, zero, zero), stream, normals)
    yield agree("constant normal: against the two momenta", path, apart, 1e-12)
    yield differ("changing normal: distance to the two momenta", turning, turning_apart, 1e-2)
