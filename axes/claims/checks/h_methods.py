"""Group H, methods: Adam, Shampoo, Muon, Lion and natural gradient as printed; what p parameters hold."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.calculus import curvature, gradient, half_square
from axes.claims.tools.descent import DECAY, LR, fed, model_trained, moves, rule, sgd, shampoo, squared_error, trained
from axes.claims.tools.fits import exponent
from axes.claims.tools.float64 import arange, eye, full, ones, zeros
from axes.claims.tools.matrices import column, cosine, polar, rank, relative, spread, symmetric_power
from axes.claims.tools.recurrence import recurrence
from axes.claims.tools.tuples import RLS, layer_tuple, walked, whitened_sum
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given
from axes.core.geometry import Spectral
from axes.core.monoids import Decay
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import Adam, ExactNaturalGradient, Lion, Muon, Shampoo


@check
def H19(draw: Draw) -> Findings:
    n, lr, b1, b2, eps = 100, 1e-2, 0.9, 0.99, 1e-8
    start, stream = draw.normal(3, 4), draw.normal(n, 3, 4)
    ours, theirs = (
        fed(lambda w, kind=kind: kind([w], lr=lr, betas=(b1, b2), eps=eps), start, stream)  # type: ignore[misc]
        for kind in (Adam, torch.optim.Adam)
    )
    power = arange(n)
    lag = (power[:, None] - power).clamp_min(0)
    mask = (power[:, None] >= power).double()
    m = torch.einsum("nj,jik->nik", mask * b1**lag, stream) * (1 - b1)
    v = torch.einsum("nj,jik->nik", mask * b2**lag, stream.square()) * (1 - b2)
    debias = [(1 - b ** (power + 1))[:, None, None] for b in (b1, b2)]
    read = start - lr * (m / debias[0] / ((v / debias[1]).sqrt() + eps)).cumsum(0)
    update, rates = Adam.declare((b1, b2), eps).normal(), {"lr": full(lr, n), "weight_decay": zeros(n)}
    state = reference.run(update, {"g": stream, **rates}, weights=(start,))[1]
    (held,) = state.via
    first, second = held.theta, held.stats[0].theta  # type: ignore[union-attr]
    a, b, both = (
        fed(lambda w: Adam([w], lr=lr), zeros(3, 4), x)[-1] for x in (stream, stream.flip(0), stream + stream.flip(0))
    )
    moments, sums = torch.stack((first[0], second[0])), torch.stack((-m[-1], v[-1]))
    yield agree("100 steps against torch.optim.Adam", ours, theirs, 1e-12)
    yield agree("100 steps against a read of two unrolled linear recurrences", ours, read, 1e-11)
    yield agree("buffers against unrolled sums", moments, sums, 1e-12)
    yield agree("states, less 3", len(state.theta) + len(first) + len(second), 3, 0)
    yield differ("the update is linear in the gradients: distance from superposition", a + b, both, 1e-2)


@check
def H20(draw: Draw) -> Findings:
    d_v, d, n = 3, 4, 600_000
    e, x = draw.normal(d_v), draw.normal(d)
    signal = {"g": torch.outer(e, x)[None], "lr": ones(1), "weight_decay": zeros(1)}
    state = reference.run(Adam.declare((0.0, 0.5), 0.0).normal(), signal)[1]
    second = state.via[0].stats[0].theta[0] / 0.5  # type: ignore[union-attr]
    w, inputs = draw.normal(d_v, d), draw.normal(n, d)
    error = inputs @ w.T
    joint = error.square().T @ inputs.square() / n
    ratio = joint / torch.outer(error.square().mean(0), inputs.square().mean(0))
    over = ratio / (1 + 2 * w.square() / w.square().sum(-1, keepdim=True))
    sizes, off = [100, 1000, 10_000], []
    for size in sizes:
        a, b = draw.normal(20, size, d_v).square(), draw.normal(20, size, d).square()
        parts = a.mean(1)[:, :, None] * b.mean(1)[:, None, :]
        off.append(float((a.mT @ b / size - parts).square().mean().sqrt()))
    yield agree("one example: second moment against e_i^2 x_j^2", second, torch.outer(e.square(), x.square()), 1e-12)
    yield within("e independent of x: exponent of n in the error", exponent(sizes, off), -0.6, -0.4)
    yield within("e = W x: ratio over 1 + 2 W_ij^2/|W_i|^2, smallest", over.min(), 0.975, 1.003)
    yield within("e = W x: ratio over 1 + 2 W_ij^2/|W_i|^2, largest", over.max(), 0.997, 1.025)
    yield within("e = W x: largest ratio", ratio.max(), 1.45, 3.1)


def _ratio_spread(a: Tensor, b: Tensor) -> Tensor:
    """How far a is from a multiple of b, entry by entry: the spread of the logarithm of |a / b|."""
    return spread((a / b).abs().log())


@check
def H21(draw: Draw) -> Findings:
    def vector(n: int) -> Tensor:
        return draw.uniform(n, low=0.3, high=1.5) * torch.sign(draw.normal(n))

    es, xs = [vector(3) for _ in range(2)], [vector(4) for _ in range(2)]
    one, two = (torch.outer(e, x) for e, x in zip(es, xs, strict=True))

    def adam(gradients: list[Tensor], memory: float) -> Tensor:
        return -moves(lambda w: Adam([w], lr=1.0, betas=(0.0, memory), eps=0.0), zeros(3, 4), gradients)[-1]

    def diagonal(gradients: list[Tensor], power: float) -> Tensor:
        """Shampoo's last step with the diagonals of its statistics."""
        squares = torch.stack(gradients).square().sum(0)
        return squares.sum(1, keepdim=True) ** -power * gradients[-1] * squares.sum(0) ** -power

    scaled, plain = es[0].norm() * xs[0].norm() * diagonal([one], 0.5), adam([one], 0.0)
    quarter = _ratio_spread(diagonal([one], 0.25), plain)
    batch = _ratio_spread(diagonal([one + two], 0.5), adam([one + two], 0.0))
    kept = _ratio_spread(diagonal([one, two], 0.5), adam([one, two], 0.5))
    yield agree("rank one: |e||x| diagonal Shampoo against Adam's step", scaled, plain, 1e-12)
    yield agree("rank one: the same with a second moment that averages", scaled, adam([one], 0.9), 1e-12)
    yield breaks("exponents 1/4: spread of the logarithm of the ratio", quarter, 0.1)
    yield breaks("rank two: spread", batch, 0.005)
    yield breaks("two steps, second moments kept: spread", kept, 0.005)


def _shampoo(gradients: list[Tensor], power: float) -> Tensor:
    """Steps of Shampoo with summed statistics and without momentum."""
    return -moves(shampoo(power, betas=(0.0, 1.0), eps=1e-13), torch.zeros_like(gradients[0]), gradients)


@check
def H22(draw: Draw) -> Findings:
    d = 4
    g = draw.conditioned(d, d, low=0.5, high=2.0)
    inverse, scale = torch.linalg.pinv(g).T, 2.0 ** -arange(d)
    stream = [g, *(scale[:, None] * draw.normal(19, d, d) * scale)]  # rows and columns of unequal size
    quarter, half = _shampoo(stream, 0.25), _shampoo(stream, 0.5)
    default = Shampoo([{"params": [nn.Parameter(g)], "rule": "shampoo"}]).param_groups[0]["exponent"]
    yield differ("printed exponents, one gradient: distance to the published update", half[0], quarter[0], 0.05)
    yield breaks("20 gradients: 1 - cosine of the two updates", 1 - cosine(quarter[-1], half[-1]), 2e-3)
    yield agree("exponent 1/4, one gradient, against the polar factor", quarter[0], polar(g), 1e-10)
    yield agree("exponent 1/2, one gradient, against the transposed pseudo-inverse", half[0], inverse, 1e-10)
    yield agree("Shampoo's default exponent, less 1/4", default, 0.25, 0)


@check
def H23(draw: Draw) -> Findings:
    d_v, d, count = 3, 4, 8
    es, xs = draw.normal(count, d_v), draw.normal(count, d)
    es, xs = (y * 2.0 ** -arange(y.shape[1]) for y in (es, xs))  # unequal sizes
    # all pairs: independence holds exactly, not only on average
    every = [torch.outer(e, x) for e in es for x in xs]
    paired = [torch.outer(e, x) for e, x in zip(es, xs, strict=True)] * 4

    def whitened(gradients: list[Tensor]) -> Tensor:
        """The last gradient times the inverse root of the full second moment, where that is not zero."""
        columns = torch.stack([column(g) for g in gradients])
        values, basis = torch.linalg.eigh(columns.T @ columns)
        kept = values > 1e-9 * values[-1]
        scale = torch.where(kept, values, torch.ones_like(values)) ** -0.5 * kept
        return (basis @ (scale * (basis.T @ columns[-1]))).reshape(d, d_v).T

    def scaled(gradients: list[Tensor]) -> Tensor:
        """sqrt(tr L) times Shampoo's last step with exponent 1/2."""
        return torch.stack(gradients).square().sum().sqrt() * _shampoo(gradients, 0.5)[-1]

    exact, correlated = whitened(every), whitened(paired)
    quarter = _shampoo(every, 0.25)[-1]
    left, right = (torch.stack([f(g) for g in every]).sum(0) for f in (lambda g: g @ g.T, lambda g: g.T @ g))
    moment = torch.stack([torch.outer(column(g), column(g)) for g in every]).sum(0)
    form = torch.kron(symmetric_power(right, 0.5), symmetric_power(left, 0.5))
    fitted = form * ((moment * form).sum() / form.square().sum())
    product = gap(moment, torch.kron(right, left) / left.trace()) / float(moment.abs().max())
    misfit = "exponent 1/4: best scaled fit of R^{1/2} x L^{1/2} to the second moment, relative error"
    yield holds("second moment against R x L / tr L", product, 1e-12)
    yield agree("full whitening against sqrt(tr L) times Shampoo's step, exponent 1/2", scaled(every), exact, 1e-9)
    yield breaks(misfit, relative(fitted, moment), 0.1)
    yield breaks("exponent 1/4: 1 - cosine of the step with full whitening", 1 - cosine(quarter, exact), 1e-3)
    yield breaks("dependent e and x: relative distance", relative(scaled(paired), correlated), 0.05)


@check
def H27(draw: Draw) -> Findings:
    c, d, damping = 5, 6, 0.05
    x = draw.normal(1, d)
    target, start = torch.tensor([draw.integer(0, c - 1)]), draw.normal(c, d)

    def loss(w: Tensor) -> Tensor:
        return cross_entropy(x @ w.T, target)

    fisher, g = curvature(loss, start), gradient(loss, start).flatten()  # of a linear model: the Fisher matrix
    categorical = partial(ExactNaturalGradient, lr=1.0, damping=damping, likelihood="categorical")
    moved = (start - model_trained(categorical, start, [(x, target)], cross_entropy)[0]).flatten()
    wanted = torch.linalg.solve(fisher + damping * eye(c * d), g)
    n, d_v, ridge = 20, 2, 0.1
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    natural = partial(ExactNaturalGradient, lr=1.0, damping=ridge / n)
    stepped = model_trained(natural, zeros(d_v, d), [(k, v)], lambda out, y: half_square(out - y) / n)[0]
    layer = walked(layer_tuple(RLS), k=k, v=v, decay=zeros(n), beta=ones(n))[-1]
    gaussian = curvature(squared_error(k[0], v[0]), zeros(d_v, d))
    yield agree("softmax, one example: rank of F, less C - 1", rank(fisher), c - 1, 0)
    yield agree("Gaussian, one example: rank of F, less d_v", rank(gaussian), d_v, 0)
    yield agree("damped step against (F + damping)^{-1} g", moved, wanted, 1e-9)
    yield agree("accumulated Gaussian F, one step from zero, against the least-squares layer", stepped, layer, 1e-9)
    yield breaks("undamped: directions of 30 that F does not see", c * d - rank(fisher), 20)
    yield breaks("undamped: condition number of F", torch.linalg.cond(fisher), 1e10)


@check
def H28(draw: Draw) -> Findings:
    n, d_v, d = 4, 3, 7
    sigma = draw.uniform(n, low=0.7, high=1.0)
    k, v = draw.orthogonal(n) @ torch.diag(sigma) @ draw.orthogonal(d)[:n], draw.normal(n, d_v)
    pseudo = (torch.linalg.pinv(k) @ v).T
    top = float(sigma.max()) ** 2

    def descend(rate: float, start: Tensor) -> Tensor:
        return trained(partial(sgd, lr=rate / top), start, [squared_error(k, v)] * 60)[-1]

    zero, start = zeros(d_v, d), draw.normal(d_v, d)
    moved, null = descend(1.0, start), start - start @ torch.linalg.pinv(k) @ k
    elsewhere = "another start: descent against the pseudo-inverse and the start's part outside the keys"
    yield agree("descent from zero", descend(1.0, zero), pseudo, 1e-8)
    yield agree("ridge of 1e-7", whitened_sum(k, v, 1.0, 1e-7), pseudo, 1e-5)
    yield agree(elsewhere, moved, pseudo + null, 1e-8)
    yield differ("another start", moved, pseudo, 0.05)
    yield differ("rate 2.2/sigma_max^2", descend(2.2, zero), pseudo, 10.0)
    yield differ("ridge of 0.3", whitened_sum(k, v, 1.0, 0.3), pseudo, 0.02)


def _fit(draw: Draw, n: int, d: int, hidden: int, d_v: int, steps: int) -> float:
    """Relative error of a two-layer tanh network after damped natural-gradient steps on n random pairs."""
    model = nn.Sequential(nn.Linear(d, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, d_v, bias=False)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(draw.normal(*p.shape) / math.sqrt(p.shape[1]))
    x, y, damping = draw.normal(n, d), draw.normal(n, d_v), 1e-2
    rule = ExactNaturalGradient(model, lr=1.0, damping=damping)
    before, kept = float("inf"), [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        rule.zero_grad()
        loss = (model(x) - y).square().sum() / (2 * n)
        value = float(loss.detach())
        if value > before:  # undo, and trust the quadratic model less
            damping = min(damping * 8, 1e2)
            with torch.no_grad():
                for p, w in zip(model.parameters(), kept, strict=True):
                    p.copy_(w)
            rule.zero_grad()
            loss = (model(x) - y).square().sum() / (2 * n)
        else:
            before, damping = value, max(damping / 3, 1e-13)
        if before < 1e-20:
            break
        kept = [p.detach().clone() for p in model.parameters()]
        rule.param_groups[0]["damping"] = damping
        loss.backward()
        rule.step()
    return math.sqrt(2 * n * before / float(y.square().sum()))


@check
def H29(draw: Draw) -> Findings:
    d, hidden, d_v = 7, 10, 3
    bound = (d * hidden + hidden * d_v) / d_v
    below = min(_fit(draw, round(0.75 * bound), d, hidden, d_v, 150) for _ in range(2))
    above = min(_fit(draw, round(1.25 * bound), d, hidden, d_v, 60) for _ in range(2))
    yield within("relative error at 0.75 p/d_v", below, 0.0, 1e-8)
    yield within("relative error at 1.25 p/d_v", above, 1e-4, 1.0)


def _exact_muon(kind: Any) -> StateUpdate:
    return StateUpdate(Given(), OnUpdate(Spectral("polar")), Decay(DECAY), Step(LR, via=(Momentum(0.9, kind),)))


@check
def H30(draw: Draw) -> Findings:
    lr, start, stream = 0.1, draw.normal(6, 3), list(draw.normal(12, 6, 3))
    averaged, summed = (fed(partial(rule, _exact_muon(kind), lr=lr), start, stream) for kind in ("ema", "sum"))

    def printed(state: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
        m = 0.9 * state[1] + 0.1 * g
        return state[0] - lr * polar(m), m

    path = recurrence(printed, (start, torch.zeros_like(start)), stream)
    plain = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "scale": None, "precision": "input"}

    def ours(**options: Any) -> Tensor:
        return fed(lambda p: Muon([{"params": [p], "rule": "muon"}], lr=lr, **{**plain, **options}), start, stream)

    single, few = start.float(), [g.float() for g in stream]
    theirs = fed(lambda p: torch.optim.Muon([p], lr=lr), single, few)
    matched = fed(
        lambda p: Muon([{"params": [p], "rule": "muon"}], lr=lr, scale="original", weight_decay=0.1), single, few
    )
    newton, converged = ours(), ours(ns_steps=40, ns_coefficients=(1.875, -1.25, 0.375))
    settings = "Muon with torch's settings against torch.optim.Muon, to the rounding of bfloat16"
    yield agree("exact Muon against the printed update", averaged, path, 1e-11)
    yield agree("summed against averaged momentum", summed, averaged, 1e-11)
    yield agree("Muon with a convergent Newton-Schulz iteration against the printed update", converged, path, 1e-6)
    yield agree(settings, matched, theirs, 5e-3)
    yield breaks("five Newton-Schulz steps: relative distance", relative(newton - start, path - start), 0.02)
    yield differ("Nesterov", ours(nesterov=True), newton, 0.01)
    yield differ("rate scaled by the shape", ours(scale="original"), newton, 0.02)
    yield differ("weight decay 0.1", ours(weight_decay=0.1), newton, 0.01)


@check
def H31(draw: Draw) -> Findings:
    b1, b2, lr, lam = 0.9, 0.99, 0.05, 0.3
    start, stream = draw.normal(3, 4), list(draw.normal(30, 3, 4))

    def lion(decay: float) -> Tensor:
        return fed(lambda w: Lion([w], lr=lr, betas=(b1, b2), weight_decay=decay), start, stream)

    def published(state: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
        w, m = state
        return w - lr * (torch.sign(b1 * m + (1 - b1) * g) + lam * w), b2 * m + (1 - b2) * g

    path = recurrence(published, (start, torch.zeros_like(start)), stream)
    yield agree("30 steps against the published order of operations", lion(lam), path, 1e-13)
    yield differ("without the decay", lion(lam), lion(0.0), 0.05)
