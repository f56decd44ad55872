"""Group C, Frank-Wolfe: the oracle over a ball, the Frank-Wolfe delta rule, Lion and Muon with weight decay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.calculus import box_oracle, derivative, gradient
from axes.claims.tools.descent import Loss, Make, alignment, directed, fed, rule, sgd, squared_errors, trained
from axes.claims.tools.float64 import arange, eye, full, tensor, zeros
from axes.claims.tools.matrices import beyond, nuclear, polar, rank
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import GLA, LINEAR, dispatched, layer_tuple, one_step, walked
from axes.core.algorithms import Momentum, Step
from axes.core.costs import SquaredError
from axes.core.derived import structure
from axes.core.geometry import Spectral
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import Lion, Muon

FRANK_WOLFE = layer_tuple("frank-wolfe-delta")


@check
def C14(draw: Draw) -> Findings:
    d_v, d, radius = 5, 6, 1.5
    e, k = draw.normal(d_v), draw.normal(d)
    g = -torch.outer(e, k)
    point = radius * torch.outer(e, k) / (e.norm() * k.norm())
    layer = one_step(FRANK_WOLFE, zeros(d_v, d), k=k, v=e, decay=tensor(-math.inf), beta=tensor(radius))
    u, _, vh = np.linalg.svd(-g.numpy())
    top = torch.from_numpy(radius * np.outer(u[:, 0], vh[0]))
    completed = torch.from_numpy(radius * u @ vh[:d_v])
    values = torch.stack([(g * x).sum() for x in (point, completed)])
    polar = radius * Spectral("polar").primal(-g)
    cubic = radius * Spectral("newton-schulz", steps=12, coefficients=(1.5, -0.5, 0.0)).primal(-g)
    quintic = torch.linalg.svdvals(Spectral("newton-schulz").primal(-g))[0]
    recalled = one_step(FRANK_WOLFE, point, k=k, v=point @ k, decay=tensor(math.log(0.5)), beta=tensor(radius / 2))
    yield agree("nuclear ball: top singular pair against the rank-one point", top, point, 1e-11)
    yield agree("the layer with gamma = 1 against it", layer, point, 1e-11)
    yield agree("spectral ball: pseudo-polar factor against it", polar, point, 1e-11)
    yield agree("spectral ball: cubic Newton-Schulz", cubic, point, 1e-9)
    yield holds("values of both points against -R |e| |k|", values + radius * e.norm() * k.norm(), 1e-10)
    yield agree("no error: nothing is written", recalled, point / 2, 1e-12)
    yield breaks("full SVD: distance from the rank-one point", (completed - point).norm() / radius, 1.9)
    yield differ("five quintic steps: |singular value - 1|", quintic, 1, 0.02)


@check
def C15(draw: Draw) -> Findings:
    n, d_v, d, radius, gamma = 60, 3, 5, 2.0, 0.05
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    w0 = draw.normal(d_v, d) / 10
    v[20] = 0.0
    k[20] = 0.0  # an empty datum: e = 0
    rates = {"decay": full(math.log1p(-gamma), n), "beta": full(gamma * radius, n)}
    layer = walked(FRANK_WOLFE, w0, k=k, v=v, **rates)
    fast = dispatched(FRANK_WOLFE, w0, k=k, v=v, **rates)[1]

    def unsquared(x: Tensor, y: Tensor) -> Loss:
        if not x.any():
            return lambda w: 0 * w.sum()
        return lambda w: torch.linalg.vector_norm(y - w @ x) / x.norm()

    steps = {"lr": gamma * radius, "weight_decay": 1 / radius}
    path = trained(partial(sgd, decoupled=True, **steps), w0, map(unsquared, k, v))
    polar = trained(partial(rule, directed(Spectral("polar")), **steps), w0, squared_errors(k, v))
    yield agree("layer against SGD with decoupled decay on |v - S k|/|k|", layer, path, 1e-11)
    yield agree("layer against Muon with the pseudo-polar factor, no momentum", layer, polar, 1e-10)
    yield agree("the layer's dispatched route, last state", fast, path[-1], 1e-11)
    yield holds("nuclear norm beyond R", beyond(nuclear(layer), radius), 1e-10)
    yield agree("a datum without error only decays", layer[20], (1 - gamma) * layer[19], 1e-12)


@check
def C16(draw: Draw) -> Findings:
    n, d_v, d, radius, chains, steps, gamma = 12, 2, 3, 1.0, 24, 700, 0.01
    keys, truth = draw.normal(n, d), draw.normal(d_v, d)
    truth = 2.5 * radius * truth / torch.linalg.matrix_norm(truth, 2)
    values = keys @ truth.mT + draw.normal(n, d_v)

    def loss(w: Tensor) -> Tensor:
        return (values - keys @ w.mT).square().sum((-2, -1)) / (2 * n)

    smooth = float(torch.linalg.matrix_norm(keys, 2) ** 2 / n)
    best = zeros(d_v, d)
    for _ in range(800):  # projected gradient descent: singular values are clipped
        u, s, vh = torch.linalg.svd(best - gradient(loss, best) / smooth, full_matrices=False)
        best = (u * s.clamp_max(radius)) @ vh
    optimum = float(loss(best))

    order = torch.randint(n, (steps, chains), generator=draw.generator)
    signal = {
        "k": keys[order],
        "v": values[order],
        "decay": full(math.log1p(-gamma), steps, chains),
        "beta": full(gamma * radius, steps, chains),
    }

    def averaged(beta: float) -> StateUpdate:
        step = Step(Per("beta"), via=(Momentum(beta, "ema"),))
        return StateUpdate(SquaredError(), OnUpdate(Spectral("polar")), Scalar("decay"), step)

    def excess(update: StateUpdate) -> float:
        with torch.no_grad():
            return float(loss(walked(update, **signal)[steps // 2 :]).mean()) - optimum

    one, ten, hundred = excess(FRANK_WOLFE), excess(averaged(0.9)), excess(averaged(0.99))
    muon = partial(rule, directed(Spectral("polar")), lr=1.0, weight_decay=1 / radius)
    path = trained(muon, zeros(d_v, d), [loss] * 200, lr=[2 / (t + 2) * radius for t in range(200)])
    bound = 2 * smooth * (2 * radius) ** 2 * min(d_v, d) / arange(3, 203)
    worst = ((loss(path) - optimum) / bound).max().clamp_min(0)
    yield within("excess loss of single data, relative to the optimum", one / optimum, 0.01, 3.0)
    yield within("excess with an average of horizon 10 over that without", ten / one, 0.0, 0.95)
    yield within("excess with horizon 100 over that with 10", hundred / ten, 0.0, 0.95)
    yield within("full batch: excess over 2 L D^2/(t + 2), largest of 200 steps", worst, -1e-6, 1.0)


@check
def C17(draw: Draw) -> Findings:
    d_v, d, radius, gamma = 3, 4, 2.0, 0.2
    s, k, v = draw.normal(d_v, d), draw.normal(d), draw.normal(d_v)
    rates = {"decay": tensor(math.log1p(-gamma)), "beta": tensor(gamma * radius)}
    rest = derivative(lambda x: one_step(FRANK_WOLFE, x, k=k, v=v, **rates), s) - (1 - gamma) * eye(d_v * d)
    e = v - s @ k
    unit = e / e.norm()
    across = torch.kron(eye(d_v) - torch.outer(unit, unit), torch.outer(k, k))
    a = draw.uniform(d, low=0.2, high=0.9)
    gla = one_step(layer_tuple(GLA), s, k=k, v=v, decay=a.log())
    aligned, untouched = alignment(k, v), float(structure(layer_tuple(LINEAR)) == "identity")
    plain, penalised = (
        trained(sgd, s, [loss])[0] for loss in (aligned, lambda w: aligned(w) + (w * w * (1 - a)).sum() / 2)
    )
    yield breaks("norm of the Frank-Wolfe rule's Jacobian less the scalar", rest.norm(), 0.01)
    yield differ("a step on the alignment cost alone against GLA's", plain, gla, 0.05)
    yield breaks("derived transition of the alignment cost alone is the identity (1: yes)", untouched, 1.0)
    yield agree("a step on the penalised alignment cost against GLA's", penalised, gla, 1e-12)
    formula = -gamma * radius / (e.norm() * k.norm()) * across
    yield agree("Jacobian less the scalar against its formula", rest, formula, 1e-9)
    yield agree("its rank less d_v - 1", rank(rest), d_v - 1, 0.0)


@check
def C18(draw: Draw) -> Findings:
    m, n, steps, eta, lam = 3, 4, 6, 0.1, 2.0
    gamma, grads, w = lam * eta, draw.normal(steps, m, n), draw.normal(m, n)
    b1, b2, beta = 0.9, 0.99, 0.8

    def lion(start: Tensor, stream: Iterable[Tensor], decay: float = lam) -> Tensor:
        return fed(lambda p: Lion([p], lr=eta, betas=(b1, b2), weight_decay=decay), start, stream)

    def in_box(state: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
        """A Frank-Wolfe step by a linear program over the box; then the slow average takes the gradient in."""
        x, slow = state
        return x + gamma * (box_oracle(b1 * slow + (1 - b1) * g, 1 / lam) - x), b2 * slow + (1 - b2) * g

    def in_ball(state: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
        x, average = state[0], beta * state[1] + (1 - beta) * g
        return x + gamma * (-polar(average) / lam - x), average

    start = (w, torch.zeros_like(w))
    muon = fed(partial(rule, directed(Spectral("polar"), beta), lr=eta, weight_decay=lam), w, grads)
    excess = lion(20 * w, draw.normal(60, m, n)).abs().amax((-2, -1)) - 1 / lam
    allowed = (20 * w.abs().max() - 1 / lam) * (1 - gamma) ** arange(1, 61)
    settled, unconstrained = lion(w, [grads[0]] * 150)[-1], lion(w, [grads[0]], decay=0.0)[0]
    against_box = recurrence(in_box, start, grads)
    against_ball = recurrence(in_ball, start, grads)
    yield agree("Lion against Frank-Wolfe with a linear program over the box", lion(w, grads), against_box, 1e-11)
    yield agree("Muon (exact polar factor) against Frank-Wolfe on the spectral ball", muon, against_ball, 1e-11)
    yield holds("excess over the radius beyond its bound", beyond(excess - allowed), 1e-10)
    yield agree("under a constant gradient W tends to a corner of the box", settled, -grads[0].sign() / lam, 1e-9)
    yield agree("without decay: W - eta sign", unconstrained, w - eta * grads[0].sign(), 1e-12)


@check
def C19(draw: Draw) -> Findings:
    lam, eta, steps = 0.5, 1.0, 40
    for (m, n), scale in itertools.product(((32, 8), (8, 32)), ("original", "match_rms_adamw")):
        factor = math.sqrt(max(1, m / n)) if scale == "original" else 0.2 * math.sqrt(max(m, n))
        g = draw.normal(m, n)
        rates = {"lr": eta, "weight_decay": lam}
        rules: tuple[Make, ...] = (
            partial(rule, directed(Spectral("polar", scale=scale)), **rates),  # type: ignore[arg-type]
            lambda w, a=scale, r=rates: Muon([{"params": [w], "rule": "muon"}], scale=a, form="direct", **r),  # type: ignore[misc]
            lambda w, a=scale, r=rates: torch.optim.Muon([w], adjust_lr_fn=a, **r),  # type: ignore[misc]
        )
        exact, ours, theirs = (fed(make, torch.zeros_like(g), [g] * steps)[-1] for make in rules)
        values, seen = torch.linalg.svdvals(exact) * lam, torch.linalg.svdvals(theirs) * lam / factor - 1
        yield holds("exact polar factor: singular values lambda/a - 1", values / factor - 1, 1e-9)
        yield holds("axes' Muon against torch's, relative", gap(ours, theirs) / float(theirs.abs().max()), 1e-5)
        yield holds("torch's Muon: distance of singular values lambda/a from 1", seen, 0.35)
        yield breaks("torch's Muon: the same, as a failure of exactness", seen, 0.03)
        if factor != 1.0:
            yield breaks("exact polar factor, radius without a: singular values lambda - 1", values - 1, 0.1)
