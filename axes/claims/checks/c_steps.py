"""Group C, steps: the regularised leader, steepest descent in a norm, whitening, cautious steps, spectral bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, holds, within
from axes.claims.tools.calculus import box_oracle, gradient, half_square, quadratic_minimiser
from axes.claims.tools.descent import (
    LR,
    Loss,
    Make,
    alignment,
    directed,
    fed,
    model_trained,
    moves,
    parameter,
    rule,
    shampoo,
    squared_error,
)
from axes.claims.tools.float64 import eye, full, tensor, zeros
from axes.claims.tools.matrices import beyond, nuclear, relative
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import DELTA, LINEAR, layer_tuple, ridge_path, walked
from axes.core.algorithms import Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Cautious, Context, Euclidean, Geometry, Lq, Spectral, Whiten
from axes.core.monoids import Identity
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import SGD, Adam, ExactNaturalGradient, Lion, NaturalGradient, optimizer


def _leader(loss: Loss, shape: Sequence[int], eta: float) -> Tensor:
    """The minimiser of a loss, at most quadratic, + |S|^2/(2 eta)."""
    return quadratic_minimiser(lambda x: loss(x) + half_square(x) / eta, *shape)


@check
def C10(draw: Draw) -> Findings:
    n, d_v, d, eta = 8, 3, 4, 0.4
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    additive = walked(layer_tuple(LINEAR), k=k, v=eta * v)
    delta = walked(layer_tuple(DELTA), k=k, v=v, beta=full(eta, n))

    def leaders(loss: Callable[[Tensor, Tensor], Loss]) -> Tensor:
        return torch.stack([_leader(loss(k[:t], v[:t]), (d_v, d), eta) for t in range(1, n + 1)])

    def follow(state: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The leader of the tangents so far, and their summed slope."""
        s, slope = state
        slope = slope + gradient(squared_error(x, y), s)
        return _leader(lambda w: (slope * w).sum(), (d_v, d), eta), slope

    tangents = recurrence(follow, (zeros(d_v, d), zeros(d_v, d)), k, v)
    yield agree("linear losses against additive writes, every prefix", leaders(alignment), additive, 1e-11)
    yield agree("tangents at the iterates against the delta rule", tangents, delta, 1e-11)
    whole = ridge_path(k, v, 1 / eta)
    yield agree("squared errors against recursive least squares", leaders(squared_error), whole, 1e-11)


def _max_norm_step(g: Tensor, eta: float) -> Tensor:
    """argmin of <g, Delta> + |Delta|_max^2 / (2 eta): a linear program for the direction, a parabola for the length."""
    direction = box_oracle(g, 1.0)
    return -eta * (g * direction).sum() * direction


@check
def C11(draw: Draw) -> Findings:
    m, n, eta = 3, 4, 0.3
    g, start = draw.normal(m, n), draw.normal(m, n)

    def move(make: Make, times: float = 1.0) -> Tensor:
        return moves(make, start, [times * g])[0]

    lion: Make = lambda p: Lion([p], lr=eta, betas=(0.0, 0.0))  # noqa: E731
    adam: Make = lambda p: Adam([p], lr=eta, betas=(0.0, 0.0), eps=0.0)  # noqa: E731
    muon: Make = partial(rule, directed(Spectral("polar")), lr=eta)

    def value(x: Tensor, norm: Tensor) -> Tensor:
        return (g * x).sum() + norm**2 / (2 * eta)

    size, taxicab = nuclear(g), g.abs().sum()
    steepest, signed = size * move(muon), taxicab * move(lion)
    best = value(steepest, torch.linalg.matrix_norm(steepest, 2))
    others = [steepest + s * draw.normal(m, n) for s in np.geomspace(1e-4, 1, 200)]
    gain = best - torch.stack([value(x, torch.linalg.matrix_norm(x, 2)) for x in others])
    frozen = draw.uniform(m, n, low=0.2, high=3.0)
    metric = Whiten((StateUpdate(Linear("square")),), "diagonal", 0.5, 0.0)
    whitened = metric.primal(-eta * g, Context(stats=(frozen,)))
    mahalanobis = quadratic_minimiser(lambda x: (g * x).sum() + (frozen.sqrt() * x * x).sum() / (2 * eta), m, n)
    largest = value(signed, signed.abs().max())
    yield agree("max norm: |g|_1 times Lion's step against a linear program", signed, _max_norm_step(g, eta), 1e-11)
    yield agree("max norm: value against - eta |g|_1^2 / 2", largest, -eta * taxicab**2 / 2, 1e-10)
    yield agree("spectral: value against - eta |G|_nuc^2 / 2", best, -eta * size**2 / 2, 1e-10)
    yield holds("spectral: gain of 200 perturbations over it", beyond(gain), 0.0)
    yield agree("Mahalanobis: whitening with a frozen metric against the minimiser", whitened, mahalanobis, 1e-10)
    yield agree("Adam without memory against the sign", move(adam), -eta * g.sign(), 1e-12)
    yield differ("Lion: twice the gradient, less twice the step", move(lion, 2), 2 * move(lion), 0.2)
    yield differ("Muon: twice the gradient, less twice the step", move(muon, 2), 2 * move(muon), 0.02)
    yield differ("Adam, live second moment: the same", move(adam, 2), 2 * move(adam), 0.2)


@check
def C12(draw: Draw) -> Findings:
    eta, w, g = 0.5, draw.normal(3, 4), draw.normal(3, 4)
    h = Lq(1.5)  # the dual exponent of the 3-norm

    def step(at: Geometry | OnUpdate, start: Tensor) -> Tensor:
        return fed(partial(rule, StateUpdate(Given(), at, Identity(), Step(LR)), lr=eta), start, [g])[0]

    def dual(x: Tensor) -> Tensor:
        """grad h, by autograd."""
        return gradient(lambda z: torch.linalg.vector_norm(z, 3) ** 2 / 2, x)

    mirrored, move = step(h, w), step(OnUpdate(h), w) - w
    positive = draw.positive_definite(4)
    quadratic = Whiten((StateUpdate(Linear("right")),), "right", 1.0, 0.0)
    context = Context(stats=(positive,))
    there = quadratic.primal(w @ positive - eta * g, context)
    solved = quadratic_minimiser(lambda x: eta * (g * x).sum() + ((x @ positive) * x).sum() / 2, 3, 4)
    yield differ("mirror step against steepest step, p = 3", mirrored, w + move, 0.02)
    yield agree("the same from W = 0", step(h, 0 * w), step(OnUpdate(h), 0 * w), 1e-12)
    yield agree("mirror step: grad h(W') - grad h(W) + eta g by autograd", dual(mirrored), dual(w) - eta * g, 1e-11)
    yield agree("steepest step: grad h(move) + eta g by autograd", dual(move), -eta * g, 1e-11)
    yield agree("Mahalanobis: mirror step against steepest step", there, w + quadratic.primal(-eta * g, context), 1e-10)
    yield agree("Mahalanobis: the move against a solver", there - w, solved, 1e-9)


def _linear_step(
    make: Callable[[nn.Linear], torch.optim.Optimizer], w: Tensor, x: Tensor, y: Tensor, scale: float = 1.0
) -> Tensor:
    """What one step of an optimizer does to a linear model on the mean of scale |W x - y|^2 / 2."""
    return model_trained(make, w, [(x, y)], lambda out, y: scale * half_square(out - y) / len(x))[0] - w


_STEPS: dict[str, Callable[[nn.Linear], torch.optim.Optimizer]] = {
    "exact natural gradient": lambda m: ExactNaturalGradient(m, lr=1.0, damping=1e-14),
    "Kronecker natural gradient": lambda m: NaturalGradient(
        [{"params": [m.weight], "rule": "natural-gradient"}], model=m, lr=1.0, beta=0.0, damping=1e-28, momentum=0.0
    ),
    "Shampoo, exponent 1/4": lambda m: shampoo(0.25, betas=(0.0, 1.0), eps=1e-14)(m.weight),
    "Shampoo, exponent 1/2": lambda m: shampoo(0.5, betas=(0.0, 1.0), eps=1e-14)(m.weight),
    "Adam": lambda m: Adam(m, lr=1.0, betas=(0.0, 0.0), eps=0.0),
    "Muon": lambda m: rule(directed(Spectral("polar")), m.weight, lr=1.0),
    "empirical Fisher": lambda m: ExactNaturalGradient(m, lr=1.0, damping=1e-14, likelihood="empirical"),
}


@check
def C13(draw: Draw) -> Findings:
    n, m, d = 24, 3, 4
    x, y, w = draw.normal(n, d), draw.normal(n, m), draw.normal(m, d)
    a = eye(d) + 0.5 * draw.conditioned(d, d, low=0.2, high=1.0)
    back = torch.linalg.inv(a)
    for name, make in _STEPS.items():
        if name != "empirical Fisher":
            defect = relative(_linear_step(make, w @ back, x @ a.mT, y) @ a, _linear_step(make, w, x, y))
            label = f"{name}: dependence of the move on the coordinates of the inputs"
            yield holds(label, defect, 1e-9) if "natural" in name else breaks(label, defect, 0.01)
    for name, expected in (("empirical Fisher", 0.1), ("Shampoo, exponent 1/4", 1.0), ("Adam", 1.0), ("Muon", 1.0)):
        one, ten = (_linear_step(_STEPS[name], w, x, y, s) for s in (1.0, 10.0))
        yield agree(f"{name}: move for ten times the loss, less {expected:g} times the move", ten, expected * one, 1e-8)


@check
def C20(draw: Draw) -> Findings:
    steps, shape, beta = 60, (3, 5), 0.9
    grads = draw.normal(steps, *shape)
    size = shape[0] * shape[1]

    def steps_of(h: Geometry, momentum: float) -> Tensor:
        return -moves(partial(rule, directed(h, momentum), lr=1.0), zeros(*shape), grads)

    m = recurrence(lambda m, g: beta * m + (1 - beta) * g, zeros(*shape), grads)
    kept = torch.where(m * grads > 0, m, 0.0)
    count = (m * grads > 0).double().sum((-2, -1), keepdim=True)
    counted, mean = steps_of(Cautious(Euclidean()), beta), steps_of(Cautious(Euclidean(), "mean"), beta)
    masked = mean * (mean != 0).double().mean((-2, -1), keepdim=True).clamp_min(1e-3)
    lacking = (m * grads).sum((-2, -1)).clamp_min(0) - (masked * grads).sum((-2, -1))
    yield agree("rescaled by numel/(kept + 1)", counted, kept * size / (count + 1), 1e-11)
    yield agree("rescaled by numel/kept", mean, kept / (count / size).clamp_min(1e-3), 1e-11)
    yield holds("max(0, <u, g>) less <masked u, g>", beyond(lacking), 1e-12)
    yield agree("no momentum: nothing is masked", steps_of(Cautious(Euclidean(), "mean"), 0.0), grads, 1e-11)


def hitting_times(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    target: tuple[Tensor, Tensor, Tensor],
    start: tuple[Tensor, Tensor],
    limit: int,
) -> list[int]:
    """The steps after which each mode of W2 W1 has reached half of its target U Diag(s) V^T; squared error."""
    (u, modes, vh), (w1, w2) = target, (parameter(x) for x in start)
    stepper, times = make([w1, w2]), [limit] * len(modes)
    for t in range(1, limit):
        with torch.no_grad():
            error = w2 @ w1 - (u * modes) @ vh
            w1.grad, w2.grad = w2.mT @ error, error @ w1.mT
            reached = torch.diagonal(u.mT @ w2 @ w1 @ vh.mT) >= modes / 2
        times = [min(old, t) if hit else old for old, hit in zip(times, reached.tolist(), strict=True)]
        if max(times) < limit:
            break
        stepper.step()
    return times


_POLAR = optimizer(directed(Spectral("polar")))
_RACERS: dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], int]] = {
    "gradient descent": (lambda ws: SGD(ws, lr=0.05, momentum=0.0), 1200),
    "Adam": (lambda ws: Adam(ws, lr=0.005), 1200),
    "Muon": (lambda ws: _POLAR([{"params": ws, "rule": "matrix"}], lr=0.02), 600),
}


@check
def C21(draw: Draw) -> Findings:
    modes = tensor([4.0, 2.0, 1.0, 0.5])
    times: dict[str, list[list[int]]] = {name: [] for name in _RACERS}
    for _ in range(3):
        target = (draw.orthogonal(4), modes, draw.orthogonal(4))
        w1, w2 = 1e-3 * draw.normal(4, 4), 1e-3 * draw.normal(4, 4)
        if torch.linalg.det(target[0] @ target[2] @ w1 @ w2) < 0:
            w1 = w1 * tensor([[-1.0], [1.0], [1.0], [1.0]])
        for name, (make, limit) in _RACERS.items():
            times[name].append(hitting_times(make, target, (w1, w2), limit))
    order = {name: float(np.median([np.sign(np.diff(t)).mean() for t in ts])) for name, ts in times.items()}
    ratio = {name: float(np.median([t[3] / t[0] for t in ts])) for name, ts in times.items()}
    signs, last = "mean sign of successive differences of hitting times", "time of the weakest mode over the strongest"
    yield within(f"gradient descent: {signs}", order["gradient descent"], 1.0, 1.0)
    yield within(f"Muon: {signs}", order["Muon"], -1.0, -1.0)
    yield within(f"gradient descent: {last}", ratio["gradient descent"], 4.0, 20.0)
    yield within(f"Adam: {last}", ratio["Adam"], 1.1, 16.0)
    yield within(f"Muon: {last}", ratio["Muon"], 0.15, 0.75)
