"""Group H, methods: Adam, Shampoo, Muon, Lion and natural gradient as printed; what p parameters hold."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import linalg
from torch import Tensor, nn

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable, within
from axes.claims.group_a_tools import layer_tuple
from axes.claims.group_h_tools import handed, rank
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, Given, Linear
from axes.core.geometry import Spectral, Whiten
from axes.core.monoids import Decay
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import SGD, Adam, ExactNaturalGradient, Lion, Muon, Shampoo, optimizer

_TABLE = "Table of optimizers"
_SHAMPOO = "The data axis, Adam and Shampoo"


@claim(
    "H19",
    "Adam keeps several linear recurrences, and its update reads them nonlinearly.",
    Verdict.EXACT,
    BLOG("The data axis, Adam"),
    "axes.optim.Adam",
    derivation="m and v are averages of g and g^2, each linear in its drive; W moves by m/(sqrt(v) + eps) of the "
    "corrected two. Three states: W, m, v.",
)
def H19(draw: Draw) -> tuple[Finding, ...]:
    n, lr, b1, b2, eps = 100, 1e-2, 0.9, 0.99, 1e-8
    start, stream = draw.normal(3, 4), draw.normal(n, 3, 4)
    weight = nn.Parameter(start.clone())
    adam = Adam([weight], lr=lr, betas=(b1, b2), eps=eps)
    ours = []
    for g in stream:
        weight.grad = g.clone()
        adam.step()
        ours.append(weight.detach().clone())
    theirs = handed(lambda w: torch.optim.Adam([w], lr=lr, betas=(b1, b2), eps=eps), start, list(stream))
    power = torch.arange(n, dtype=torch.float64)
    lag = (power[:, None] - power).clamp_min(0)
    mask = (power[:, None] >= power).double()
    m = torch.einsum("nj,jik->nik", mask * b1**lag, stream) * (1 - b1)
    v = torch.einsum("nj,jik->nik", mask * b2**lag, stream.square()) * (1 - b2)
    debias = [(1 - b ** (power + 1))[:, None, None] for b in (b1, b2)]
    read = start - lr * (m / debias[0] / ((v / debias[1]).sqrt() + eps)).cumsum(0)
    update = Adam.declare((b1, b2), eps).normal()
    state = update.init({"g": stream[0], "lr": lr, "weight_decay": 0.0}, (start,))
    for g in stream:
        state, _ = update.step(state, {"g": g, "lr": lr, "weight_decay": 0.0})
    (held,) = state.via
    moments = (held.theta[0], held.stats[0].theta[0])  # type: ignore[union-attr]
    inner = held.stats  # type: ignore[union-attr]
    states = len(state.theta) + len(held.theta) + len(inner[0].theta)  # type: ignore[union-attr]
    a, b = (
        handed(lambda w: Adam([w], lr=lr), torch.zeros(3, 4, dtype=torch.float64), list(x))[-1]
        for x in (stream, stream.flip(0))
    )
    both = handed(lambda w: Adam([w], lr=lr), torch.zeros(3, 4, dtype=torch.float64), list(stream + stream.flip(0)))[-1]
    return (
        holds("100 steps against torch.optim.Adam", gap(torch.stack(ours), theirs), 1e-12),
        holds("100 steps against a read of two unrolled linear recurrences", gap(torch.stack(ours), read), 1e-11),
        holds("buffers against unrolled sums", max(gap(moments[0], -m[-1]), gap(moments[1], v[-1])), 1e-12),
        holds("states, less 3", abs(states - 3), 0),
        breaks("the update is linear in the gradients: distance from superposition", gap(a + b, both), 1e-2),
    )


@claim(
    "H20",
    "Adam's second moment factorises: E[e_i^2 x_j^2] = E[e_i^2] E[x_j^2].",
    Verdict.APPROXIMATE,
    BLOG(_SHAMPOO),
    "axes.optim.Adam",
    derivation="For one example it is e_i^2 x_j^2. In expectation it needs e_i^2 and x_j^2 uncorrelated; with e = W x "
    "and "
    "Gaussian x the ratio is 1 + 2 W_ij^2/|W_i|^2, so it fails for a linear model's own error.",
)
def H20(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, n = 3, 4, 600_000
    e, x = draw.normal(d_v), draw.normal(d)
    single = Adam.declare((0.0, 0.5), 0.0).normal()
    signal: dict[str, Tensor | float] = {"g": torch.outer(e, x), "lr": 1.0, "weight_decay": 0.0}
    state, _ = single.step(single.init(signal, (torch.zeros(d_v, d, dtype=torch.float64),)), signal)
    second = state.via[0].stats[0].theta[0] / 0.5  # type: ignore[union-attr]
    w, inputs = draw.normal(d_v, d), draw.normal(n, d)
    error = inputs @ w.T
    joint = error.square().T @ inputs.square() / n
    ratio = joint / torch.outer(error.square().mean(0), inputs.square().mean(0))
    predicted = 1 + 2 * w.square() / w.square().sum(-1, keepdim=True)
    sizes, off = [100, 1000, 10_000], []
    for size in sizes:
        a, b = draw.normal(20, size, d_v).square(), draw.normal(20, size, d).square()
        parts = a.mean(1)[:, :, None] * b.mean(1)[:, None, :]
        off.append(float((a.mT @ b / size - parts).square().mean().sqrt()))
    return (
        holds(
            "one example: second moment against e_i^2 x_j^2", gap(second, torch.outer(e.square(), x.square())), 1e-12
        ),
        within(
            "e independent of x: exponent of n in the error",
            float(np.polyfit(np.log(sizes), np.log(off), 1)[0]),
            -0.6,
            -0.4,
        ),
        within("e = W x: ratio over 1 + 2 W_ij^2/|W_i|^2, smallest", float((ratio / predicted).min()), 0.975, 1.003),
        within("e = W x: ratio over 1 + 2 W_ij^2/|W_i|^2, largest", float((ratio / predicted).max()), 0.997, 1.025),
        within("e = W x: largest ratio", float(ratio.max()), 1.45, 3.1),
    )


def _ratio_spread(a: Tensor, b: Tensor) -> float:
    """How far a is from a multiple of b, entry by entry: the spread of the logarithm of |a / b|."""
    ratio = (a / b).abs().log()
    return float(ratio.max() - ratio.min())


@claim(
    "H21",
    "Adam is diagonal Shampoo.",
    Verdict.CONDITIONAL,
    BLOG(_SHAMPOO),
    "axes.optim.Adam",
    conditions="a gradient of rank one, one step without memory of earlier ones, and exponents 1/2",
    derivation="For g = e x^T the diagonals of g g^T and g^T g are |x|^2 e_i^2 and |e|^2 x_j^2, so exponents 1/2 leave "
    "sign(g)/(|e||x|). Sums over examples or steps, and exponents 1/4, leave sizes of entries behind.",
)
def H21(draw: Draw) -> tuple[Finding, ...]:
    def vector(n: int) -> Tensor:
        return draw.uniform(n, low=0.3, high=1.5) * torch.sign(draw.normal(n))

    es, xs = [vector(3) for _ in range(2)], [vector(4) for _ in range(2)]
    one, two = (torch.outer(e, x) for e, x in zip(es, xs, strict=True))
    zero = torch.zeros(3, 4, dtype=torch.float64)

    def adam(gradients: list[Tensor], memory: float) -> Tensor:
        path = torch.cat(
            (zero[None], handed(lambda w: Adam([w], lr=1.0, betas=(0.0, memory), eps=0.0), zero, gradients))
        )
        return path[-2] - path[-1]

    def shampoo(gradients: list[Tensor], power: float) -> Tensor:
        left = sum(((g @ g.T).diagonal() for g in gradients), torch.zeros(()))
        right = sum(((g.T @ g).diagonal() for g in gradients), torch.zeros(()))
        return left[:, None] ** -power * gradients[-1] * right**-power

    scale = float(es[0].norm() * xs[0].norm())
    return (
        holds(
            "rank one: |e||x| diagonal Shampoo against Adam's step",
            gap(scale * shampoo([one], 0.5), adam([one], 0.0)),
            1e-12,
        ),
        holds(
            "rank one: the same with a second moment that averages",
            gap(scale * shampoo([one], 0.5), adam([one], 0.9)),
            1e-12,
        ),
        breaks(
            "exponents 1/4: spread of the logarithm of the ratio",
            _ratio_spread(shampoo([one], 0.25), adam([one], 0.0)),
            0.1,
        ),
        breaks("rank two: spread", _ratio_spread(shampoo([one + two], 0.5), adam([one + two], 0.0)), 0.005),
        breaks(
            "two steps, second moments kept: spread",
            _ratio_spread(shampoo([one, two], 0.5), adam([one, two], 0.5)),
            0.005,
        ),
    )


def _shampoo(gradients: list[Tensor], exponent: float) -> Tensor:
    """Steps of Shampoo with summed statistics and without momentum."""
    start = torch.zeros_like(gradients[0])

    def make(w: nn.Parameter) -> Shampoo:
        return Shampoo([{"params": [w], "rule": "shampoo"}], lr=1.0, betas=(0.0, 1.0), exponent=exponent, eps=1e-13)

    return -torch.diff(torch.cat((start[None], handed(make, start, gradients))), dim=0)


@claim(
    "H22",
    "Shampoo preconditions by L^{-1/2} g R^{-1/2}.",
    Verdict.FALSE,
    BLOG(_SHAMPOO),
    "axes.optim.Shampoo",
    correction="the published exponents are -1/4 each: one gradient then gives its polar factor, with -1/2 its "
    "transposed pseudo-inverse. -1/2 is a variant with a justification of its own",
    kind="NOTN",
    derivation="With G = U S V^T, L^{-p} G R^{-p} = U S^{1 - 4p} V^T.",
)
def H22(draw: Draw) -> tuple[Finding, ...]:
    d = 4
    g = draw.orthogonal(d) @ torch.diag(draw.uniform(d, low=0.5, high=2.0)) @ draw.orthogonal(d)
    polar = torch.from_numpy(linalg.polar(g.numpy())[0])
    scale = 2.0 ** -torch.arange(d, dtype=torch.float64)
    stream = [g, *(scale[:, None] * draw.normal(19, d, d) * scale)]  # rows and columns of unequal size
    quarter, half = _shampoo(stream, 0.25), _shampoo(stream, 0.5)
    cosine = float((quarter[-1] * half[-1]).sum() / quarter[-1].norm() / half[-1].norm())
    return (
        breaks("printed exponents, one gradient: distance to the published update", gap(half[0], quarter[0]), 0.05),
        breaks("20 gradients: 1 - cosine of the two updates", 1 - cosine, 2e-3),
        holds("exponent 1/4, one gradient, against the polar factor", gap(quarter[0], polar), 1e-10),
        holds(
            "exponent 1/2, one gradient, against the transposed pseudo-inverse",
            gap(half[0], torch.linalg.pinv(g).T),
            1e-10,
        ),
        holds(
            "Shampoo's default exponent, less 1/4",
            abs(Shampoo([{"params": [nn.Parameter(g)], "rule": "shampoo"}]).param_groups[0]["exponent"] - 0.25),
            0,
        ),
    )


@claim(
    "H23",
    "Shampoo's exponent -1/2 is the Kronecker form of whitening by the full second moment.",
    Verdict.CONDITIONAL,
    BLOG(_SHAMPOO),
    "axes.optim.Shampoo",
    conditions="output gradients independent of inputs, and exponents 1/2",
    derivation="For g = e x^T with e and x independent, the second moment of vec g (columns stacked) is R x L / tr L, "
    "so "
    "its inverse square root gives sqrt(tr L) L^{-1/2} g R^{-1/2}.",
)
def H23(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, count = 3, 4, 8
    es, xs = draw.normal(count, d_v), draw.normal(count, d)
    es, xs = (y * 2.0 ** -torch.arange(y.shape[1], dtype=torch.float64) for y in (es, xs))  # unequal sizes
    # all pairs: independence holds exactly, not only on average
    every = [torch.outer(e, x) for e in es for x in xs]
    paired = [torch.outer(e, x) for e, x in zip(es, xs, strict=True)] * 4

    def full(gradients: list[Tensor]) -> Tensor:
        columns = torch.stack([g.T.flatten() for g in gradients])
        values, basis = torch.linalg.eigh(columns.T @ columns)
        kept = values > 1e-9 * values[-1]
        scale = torch.where(kept, values, torch.ones_like(values)) ** -0.5 * kept
        return (basis @ (scale * (basis.T @ columns[-1]))).reshape(d, d_v).T

    def sized(gradients: list[Tensor], exponent: float) -> tuple[Tensor, float]:
        return _shampoo(gradients, exponent)[-1], math.sqrt(sum(float((g @ g.T).trace()) for g in gradients))

    half, size = sized(every, 0.5)
    quarter, _ = sized(every, 0.25)
    tied, tied_size = sized(paired, 0.5)
    exact, correlated = full(every), full(paired)
    left, right = (sum((f(g) for g in every), torch.zeros(())) for f in (lambda g: g @ g.T, lambda g: g.T @ g))
    moment = sum((torch.outer(g.T.flatten(), g.T.flatten()) for g in every), torch.zeros(()))

    def root(a: Tensor) -> Tensor:
        values, basis = torch.linalg.eigh(a)
        return (basis * values.clamp_min(0).sqrt()) @ basis.T

    quarter_form = torch.kron(root(right), root(left))
    fitted = quarter_form * ((moment * quarter_form).sum() / quarter_form.square().sum())
    return (
        holds(
            "second moment against R x L / tr L",
            gap(moment, torch.kron(right, left) / left.trace()) / float(moment.abs().max()),
            1e-12,
        ),
        holds("full whitening against sqrt(tr L) times Shampoo's step, exponent 1/2", gap(size * half, exact), 1e-9),
        breaks(
            "exponent 1/4: best scaled fit of R^{1/2} x L^{1/2} to the second moment, relative error",
            float((moment - fitted).norm() / moment.norm()),
            0.1,
        ),
        breaks(
            "exponent 1/4: 1 - cosine of the step with full whitening",
            1 - float((quarter * exact).sum() / quarter.norm() / exact.norm()),
            1e-3,
        ),
        breaks(
            "dependent e and x: relative distance",
            float((tied_size * tied - correlated).norm() / correlated.norm()),
            0.05,
        ),
    )


@claim(
    "H27",
    "Natural gradient is W - eta F^{-1} g.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", natural gradient"),
    "axes.optim.ExactNaturalGradient, axes.sequence.RLSNet",
    conditions="F damped, pseudo-inverted or accumulated: the Fisher matrix of one example is singular",
    derivation="One example of a linear softmax model has F = (Diag(p) - p p^T) x x x^T of rank C - 1; of a Gaussian "
    "one "
    "I x k k^T. A Gaussian F summed over the data with damping makes one step recursive least squares.",
)
def H27(draw: Draw) -> tuple[Finding, ...]:
    c, d, damping = 5, 6, 0.05
    model, x = nn.Linear(d, c, bias=False, dtype=torch.float64), draw.normal(1, d)
    target = torch.tensor([draw.integer(0, c - 1)])
    with torch.no_grad():
        model.weight.copy_(draw.normal(c, d))
    start = model.weight.detach().clone()

    def loss(w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ w.reshape(c, d).T, target)

    fisher = torch.autograd.functional.hessian(loss, start.flatten())  # of a linear model: the Fisher matrix
    g = torch.autograd.functional.jacobian(loss, start.flatten())
    rule = ExactNaturalGradient(model, lr=1.0, damping=damping, likelihood="categorical")
    torch.nn.functional.cross_entropy(model(x), target).backward()
    rule.step()
    moved = (start - model.weight.detach()).flatten()
    n, d_v, ridge = 20, 2, 0.1
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    line = nn.Linear(d, d_v, bias=False, dtype=torch.float64)
    nn.init.zeros_(line.weight)
    natural = ExactNaturalGradient(line, lr=1.0, damping=ridge / n)
    ((line(k) - v).square().sum() / (2 * n)).backward()
    natural.step()
    layer = reference.run(
        layer_tuple("rls-net"),
        {"k": k, "v": v, "decay": torch.zeros(n, dtype=torch.float64), "beta": torch.ones(n, dtype=torch.float64)},
    )[0][-1]
    gaussian = torch.autograd.functional.hessian(
        lambda w: (k[0] @ w.reshape(d_v, d).T - v[0]).square().sum() / 2, torch.zeros(d_v * d, dtype=torch.float64)
    )
    eye = torch.eye(c * d, dtype=torch.float64)
    return (
        holds("softmax, one example: rank of F, less C - 1", abs(rank(fisher) - (c - 1)), 0),
        holds("Gaussian, one example: rank of F, less d_v", abs(rank(gaussian) - d_v), 0),
        holds(
            "damped step against (F + damping)^{-1} g", gap(moved, torch.linalg.solve(fisher + damping * eye, g)), 1e-9
        ),
        holds(
            "accumulated Gaussian F, one step from zero, against the least-squares layer", gap(line.weight, layer), 1e-9
        ),
        breaks("undamped: directions of 30 that F does not see", c * d - rank(fisher), 20),
        breaks("undamped: condition number of F", float(torch.linalg.cond(fisher)), 1e10),
    )


@claim(
    "H28",
    "The batch optimum, reached by gradient descent or by follow-the-regularised-leader, is the pseudo-inverse.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", batch optimum"),
    "axes.optim.SGD, axes.StateUpdate",
    conditions="descent from zero with a rate below 2/sigma_max^2; the ridge of the leader going to zero",
    derivation="From zero, descent stays in the span of the keys and contracts there by 1 - eta sigma^2. The ridge "
    "solution differs from the pseudo-inverse by lambda/(sigma^2 + lambda) per direction.",
)
def H28(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d = 4, 3, 7
    sigma = draw.uniform(n, low=0.7, high=1.0)
    k, v = draw.orthogonal(n) @ torch.diag(sigma) @ draw.orthogonal(d)[:n], draw.normal(n, d_v)
    pseudo = (torch.linalg.pinv(k) @ v).T
    top = float(sigma.max()) ** 2

    def descend(rate: float, start: Tensor, steps: int = 60) -> Tensor:
        weight = nn.Parameter(start.clone())
        sgd = SGD([weight], lr=rate / top, momentum=0.0)
        for _ in range(steps):
            sgd.zero_grad()
            ((k @ weight.T - v).square().sum() / 2).backward()
            sgd.step()
        return weight.detach()

    def leader(ridge: float) -> Tensor:
        update = StateUpdate(Alignment(), Whiten((StateUpdate(Linear("key")),), "right", 1.0, eps=ridge))
        return reference.run(update, {"k": k, "v": v})[0][-1]

    zero, start = torch.zeros(d_v, d, dtype=torch.float64), draw.normal(d_v, d)
    null = start - start @ torch.linalg.pinv(k) @ k
    return (
        holds("descent from zero", gap(descend(1.0, zero), pseudo), 1e-8),
        holds("ridge of 1e-7", gap(leader(1e-7), pseudo), 1e-5),
        holds(
            "another start: descent against the pseudo-inverse and the start's part outside the keys",
            gap(descend(1.0, start), pseudo + null),
            1e-8,
        ),
        breaks("another start", gap(descend(1.0, start), pseudo), 0.05),
        breaks("rate 2.2/sigma_max^2", gap(descend(2.2, zero), pseudo), 10.0),
        breaks("ridge of 0.3", gap(leader(0.3), pseudo), 0.02),
    )


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


@claim(
    "H29",
    "An MLP of p parameters stores about p/d_v pairs.",
    Verdict.STATISTICAL,
    BLOG("Capacity, deep memories"),
    "axes.optim.ExactNaturalGradient",
    derivation="Interpolation of N pairs is N d_v equations in p unknowns. Networks fitted to random pairs reach zero "
    "error at three quarters of p/d_v and not at five quarters. For a matrix p/d_v = d_k.",
    seeds=2,
)
def H29(draw: Draw) -> tuple[Finding, ...]:
    d, hidden, d_v = 7, 10, 3
    bound = (d * hidden + hidden * d_v) / d_v
    below = min(_fit(draw, round(0.75 * bound), d, hidden, d_v, 150) for _ in range(2))
    above = min(_fit(draw, round(1.25 * bound), d, hidden, d_v, 60) for _ in range(2))
    return (
        within("relative error at 0.75 p/d_v", below, 0.0, 1e-8),
        within("relative error at 1.25 p/d_v", above, 1e-4, 1.0),
    )


def _matrix_rule(make: Any, weight: nn.Parameter, **rates: float) -> torch.optim.Optimizer:
    rule: torch.optim.Optimizer = make([{"params": [weight], "rule": "matrix"}], **rates)
    return rule


def _exact_muon(kind: Any) -> StateUpdate:
    return StateUpdate(
        Given(), OnUpdate(Spectral("polar")), Decay(Per("weight_decay")), Step(Per("lr"), via=(Momentum(0.9, kind),))
    )


@claim(
    "H30",
    "Muon averages gradients into m and steps by the polar factor, W - eta polar(m).",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", Muon"),
    "axes.optim.Muon, axes.optim.optimizer of an exact Muon tuple",
    conditions="exact polar factor, no Nesterov step, no weight decay, no scale by the shape",
    derivation="polar(c m) = polar(m), so averaging and summing momentum are the same. torch.optim.Muon has five "
    "Newton-Schulz steps in bfloat16, Nesterov, a rate scaled by the shape and a decay of 0.1.",
)
def H30(draw: Draw) -> tuple[Finding, ...]:
    lr, start, stream = 0.1, draw.normal(6, 3), list(draw.normal(12, 6, 3))
    muon, m, w, printed = {}, torch.zeros_like(start), start, []
    for kind in ("ema", "sum"):
        make = optimizer(_exact_muon(kind))
        muon[kind] = handed(partial(_matrix_rule, make, lr=lr), start, stream)
    for g in stream:
        m = 0.9 * m + 0.1 * g
        w = w - lr * torch.from_numpy(linalg.polar(m.numpy())[0])
        printed.append(w)
    path = torch.stack(printed)

    def ours(**options: Any) -> Tensor:
        plain = {
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": 0.0,
            "scale": None,
            "precision": "input",
            **options,
        }
        return handed(lambda p: Muon([{"params": [p], "rule": "muon"}], lr=lr, **plain), start, stream)

    single, few = start.float(), [g.float() for g in stream]
    matched = handed(
        lambda p: Muon([{"params": [p], "rule": "muon"}], lr=lr, scale="original", weight_decay=0.1), single, few
    )
    theirs = handed(lambda p: torch.optim.Muon([p], lr=lr), single, few)
    newton = ours()
    size = float((path - start).norm())
    converged = ours(ns_steps=40, ns_coefficients=(1.875, -1.25, 0.375))
    return (
        holds("exact Muon against the printed update", gap(muon["ema"], path), 1e-11),
        holds("summed against averaged momentum", gap(muon["sum"], muon["ema"]), 1e-11),
        holds("Muon with a convergent Newton-Schulz iteration against the printed update", gap(converged, path), 1e-6),
        holds(
            "Muon with torch's settings against torch.optim.Muon, to the rounding of bfloat16",
            gap(matched, theirs),
            5e-3,
        ),
        breaks("five Newton-Schulz steps: relative distance", float((newton - path).norm()) / size, 0.02),
        breaks("Nesterov", gap(ours(nesterov=True), newton), 0.01),
        breaks("rate scaled by the shape", gap(ours(scale="original"), newton), 0.02),
        breaks("weight decay 0.1", gap(ours(weight_decay=0.1), newton), 0.01),
    )


@claim(
    "H31",
    "Lion steps by the sign of an interpolation of momentum and gradient, with decoupled decay.",
    Verdict.EXACT,
    BLOG(_TABLE + ", Lion"),
    "axes.optim.Lion",
    derivation="c = b1 m + (1 - b1) g, W = W - eta (sign(c) + lambda W), then m = b2 m + (1 - b2) g: the step sees the "
    "old momentum.",
)
def H31(draw: Draw) -> tuple[Finding, ...]:
    b1, b2, lr, lam = 0.9, 0.99, 0.05, 0.3
    start, stream = draw.normal(3, 4), list(draw.normal(30, 3, 4))
    lion = handed(lambda w: Lion([w], lr=lr, betas=(b1, b2), weight_decay=lam), start, stream)

    def published(late: bool) -> Tensor:
        w, m, path = start.clone(), torch.zeros_like(start), []
        for g in stream:
            if late:  # momentum first: not Lion
                m = b2 * m + (1 - b2) * g
            w = w - lr * (torch.sign(b1 * m + (1 - b1) * g) + lam * w)
            if not late:
                m = b2 * m + (1 - b2) * g
            path.append(w)
        return torch.stack(path)

    coupled = handed(lambda w: Lion([w], lr=lr, betas=(b1, b2)), start, stream)
    return (
        holds("30 steps against the published order of operations", gap(lion, published(False)), 1e-13),
        breaks("without the decay", gap(lion, coupled), 0.05),
    )


H32 = untestable(
    "H32",
    "A batch size near the critical one corresponds to a chunk near d; dense mixtures of experts are multi-head on the "
    "data axis; feature learning means that keys evolve; the output projection mixes.",
    BLOG("The data axis; Open questions"),
    "correspondences of structure without an equation",
)
