"""Group C, steps: the regularised leader, steepest descent in a norm, whitening, cautious steps, spectral bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn
from torch.autograd.functional import hessian

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.group_a_tools import fed, gradient, layer_tuple, squared_error
from axes.claims.group_c_writes import eye, ridge_weights
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Cautious, Context, Euclidean, Geometry, Lq, Spectral, Whiten
from axes.core.monoids import Decay, Identity
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import SGD, Adam, ExactNaturalGradient, Lion, NaturalGradient, Shampoo, optimizer

_NORMS = "Algorithms, steepest descent under a norm"
LR, DECAY = Per("lr"), Per("weight_decay")


def directed(h: Geometry, beta: float = 0.0) -> StateUpdate:
    """The data-axis tuple W = (1 - lr wd) W + lr h(m), m an average of -g (the drive itself if beta is 0)."""
    via = (Momentum(beta, "ema"),) if beta else ()
    return StateUpdate(Given(), OnUpdate(h), Decay(DECAY), Step(LR, via=via))


def rule(update: StateUpdate, weight: Tensor, **rates: Any) -> torch.optim.Optimizer:
    """The optimizer of a tuple for one matrix."""
    return optimizer(update)([{"params": [weight], "rule": "matrix"}] if _matrix(update) else [weight], **rates)


def _matrix(update: StateUpdate) -> bool:
    return any(f.parts().h.matrix for f in update.filters()) or update.parts().h.matrix


def parameter(w: Tensor) -> nn.Parameter:
    return nn.Parameter(w.clone())


def quadratic_minimiser(value: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Tensor:
    """argmin of a quadratic function, by autograd's Hessian and gradient at zero."""
    zero = torch.zeros(*shape, dtype=torch.float64)
    h = hessian(value, zero)
    assert isinstance(h, Tensor)
    return -torch.linalg.solve(h.reshape(zero.numel(), -1), gradient(value, zero).flatten()).reshape(*shape)


def _leaders(k: Tensor, v: Tensor, tangent: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Minimisers of linear losses, of tangents with this summed slope, and of squared errors, each + |S|^2/(2 eta)."""

    def floor(x: Tensor) -> Tensor:
        return x.square().sum() / (2 * eta)

    return (
        quadratic_minimiser(lambda x: floor(x) - (v * (k @ x.mT)).sum(), tangent.shape),
        quadratic_minimiser(lambda x: floor(x) + (tangent * x).sum(), tangent.shape),
        quadratic_minimiser(lambda x: floor(x) + (v - k @ x.mT).square().sum() / 2, tangent.shape),
    )


@claim(
    "C10",
    "Follow the regularised leader with |S|^2/(2 eta) covers additive writes, the delta rule and the batch solution.",
    Verdict.EXACT,
    BLOG("How to write, FTRL"),
    "axes.sequence.UnnormalisedLinearAttention, axes.sequence.DeltaNet, axes.sequence.RLSNet",
    derivation="Linear losses: the leader is eta V^T K. Squared errors replaced by their tangents at the iterates: "
    "every leader is the last one minus eta times the newest gradient. Squared errors themselves: ridge with weight "
    "1/eta, recursively.",
)
def C10(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, eta = 8, 3, 4, 0.4
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    losses = [squared_error(x, y) for x, y in zip(k, v, strict=True)]
    beta = torch.full((n,), eta, dtype=torch.float64)
    additive = reference.run(layer_tuple("linear-attention-unnormalised"), {"k": k, "v": eta * v})[0]
    delta = reference.run(layer_tuple("delta-net"), {"k": k, "v": v, "beta": beta})[0]
    full = ridge_weights(k, v, 1 / eta)
    tangents: list[Tensor] = []
    s, errors = torch.zeros(d_v, d, dtype=torch.float64), []
    for t in range(n):
        tangents.append(gradient(losses[t], s))
        leaders = _leaders(k[: t + 1], v[: t + 1], torch.stack(tangents).sum(0), eta)
        s = leaders[1]
        errors.append([gap(a, b[t]) for a, b in zip(leaders, (additive, delta, full), strict=True)])
    worst = np.array(errors).max(0)
    return (
        holds("linear losses against additive writes, every prefix", float(worst[0]), 1e-11),
        holds("tangents at the iterates against the delta rule", float(worst[1]), 1e-11),
        holds("squared errors against recursive least squares", float(worst[2]), 1e-11),
    )


def _proximal(g: Tensor, eta: float, norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Delta -> <g, Delta> + |Delta|^2 / (2 eta)."""
    return lambda x: (g * x).sum() + norm(x) ** 2 / (2 * eta)


def _max_norm_step(g: Tensor, eta: float) -> Tensor:
    """argmin of <g, Delta> + |Delta|_max^2 / (2 eta): a linear program for the direction, a parabola for the length."""
    program = optimize.linprog(g.flatten().numpy(), bounds=[(-1.0, 1.0)] * g.numel())
    direction = torch.from_numpy(program.x).reshape(g.shape)
    return -eta * (g * direction).sum() * direction


@claim(
    "C11",
    "Adam, Lion and Muon are steepest descent in a diagonal Mahalanobis norm, the max norm and the spectral norm.",
    Verdict.CONDITIONAL,
    BLOG("Algorithms, after Bernstein and Newhouse"),
    "axes.optim.Lion, axes.optim.Adam, axes.geometry.Spectral",
    conditions="the step of Lion and Muon is multiplied by the dual norm of the direction, and Adam's second moment "
    "is frozen; without momentum",
    derivation="argmin <g, D> + |D|^2/(2 eta) = -eta |g|_* dual(g), with value -eta |g|_*^2/2. Lion and Muon drop "
    "|g|_*: they are linear minimisation oracles. Twice the gradient must give twice the step; with a second moment "
    "that follows g it does not, and without memory Adam is sign descent.",
)
def C11(draw: Draw) -> tuple[Finding, ...]:
    m, n, eta = 3, 4, 0.3
    g, w = draw.normal(m, n), draw.normal(m, n)
    zero = torch.zeros_like(w)

    def move(make: Callable[[nn.Parameter], torch.optim.Optimizer], grad: Tensor) -> Tensor:
        weight = parameter(zero)
        return fed(make(weight), weight, [grad])[0]

    def lion(p: nn.Parameter) -> torch.optim.Optimizer:
        return Lion([p], lr=eta, betas=(0.0, 0.0))

    def muon(p: nn.Parameter) -> torch.optim.Optimizer:
        return rule(directed(Spectral("polar")), p, lr=eta)

    def adam(p: nn.Parameter) -> torch.optim.Optimizer:
        return Adam([p], lr=eta, betas=(0.0, 0.0), eps=0.0)

    def spectral(x: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(x, 2)

    def largest(x: Tensor) -> Tensor:
        return x.abs().max()

    nuclear, taxicab = torch.linalg.matrix_norm(g, "nuc"), g.abs().sum()
    steepest, signed = nuclear * move(muon, g), taxicab * move(lion, g)
    best = _proximal(g, eta, spectral)(steepest)
    others = min(
        float(_proximal(g, eta, spectral)(steepest + s * draw.normal(m, n))) for s in np.geomspace(1e-4, 1, 200)
    )
    frozen = draw.uniform(m, n, low=0.2, high=3.0)
    metric = Whiten((StateUpdate(Linear("square")),), "diagonal", 0.5, 0.0)
    whitened = metric.primal(-eta * g, Context(stats=(frozen,)))
    mahalanobis = quadratic_minimiser(lambda x: (g * x).sum() + (frozen.sqrt() * x * x).sum() / (2 * eta), (m, n))
    return (
        holds("max norm: |g|_1 times Lion's step against a linear program", gap(signed, _max_norm_step(g, eta)), 1e-11),
        holds(
            "max norm: value against - eta |g|_1^2 / 2",
            (_proximal(g, eta, largest)(signed) + eta * taxicab**2 / 2).abs(),
            1e-10,
        ),
        holds("spectral: value against - eta |G|_nuc^2 / 2", (best + eta * nuclear**2 / 2).abs(), 1e-10),
        holds("spectral: gain of 200 perturbations over it", max(0.0, float(best) - others), 0.0),
        holds("Mahalanobis: whitening with a frozen metric against the minimiser", gap(whitened, mahalanobis), 1e-10),
        holds("Adam without memory against the sign", gap(move(adam, g), -eta * g.sign()), 1e-12),
        breaks("Lion: twice the gradient, less twice the step", gap(move(lion, 2 * g), 2 * move(lion, g)), 0.2),
        breaks("Muon: twice the gradient, less twice the step", gap(move(muon, 2 * g), 2 * move(muon, g)), 0.02),
        breaks("Adam, live second moment: the same", gap(move(adam, 2 * g), 2 * move(adam, g)), 0.2),
    )


@claim(
    "C12",
    "Steepest descent in a norm is mirror descent with the generating function h of that norm.",
    Verdict.FALSE,
    BLOG(_NORMS),
    "axes.geometry.Lq, axes.StateUpdate",
    correction="steepest descent applies the link to the update, W + grad h*(-eta g), mirror descent to the state; "
    "they agree for quadratic h, and at W = 0",
    kind="MATH",
    derivation="With h = |W|_3^2/2 the mirror step grad h*(grad h(W) - eta g) depends on W beyond a shift, since grad "
    "h* is not additive. Steepest descent is the divergence of the update from zero, D_h(W - W', 0): h on the update, "
    "not on the state.",
)
def C12(draw: Draw) -> tuple[Finding, ...]:
    eta, w, g = 0.5, draw.normal(3, 4), draw.normal(3, 4)
    h = Lq(1.5)  # the dual exponent of the 3-norm

    def step(update: StateUpdate, start: Tensor) -> Tensor:
        weight = parameter(start)
        return fed(rule(update, weight, lr=eta), weight, [g])[0]

    mirror = StateUpdate(Given(), h, Identity(), Step(LR))
    steepest = StateUpdate(Given(), OnUpdate(h), Identity(), Step(LR))
    move = step(steepest, w) - w

    def half_square(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 3) ** 2 / 2

    mirrored = step(mirror, w)
    positive = draw.positive_definite(4)
    quadratic = Whiten((StateUpdate(Linear("right")),), "right", 1.0, 0.0)
    context = Context(stats=(positive,))
    there = quadratic.primal(w @ positive - eta * g, context)
    return (
        breaks("mirror step against steepest step, p = 3", gap(mirrored, w + move), 0.02),
        holds("the same from W = 0", gap(step(mirror, 0 * w), step(steepest, 0 * w)), 1e-12),
        holds(
            "mirror step: grad h(W') - grad h(W) + eta g by autograd",
            gap(gradient(half_square, mirrored), gradient(half_square, w) - eta * g),
            1e-11,
        ),
        holds("steepest step: grad h(move) + eta g by autograd", gap(gradient(half_square, move), -eta * g), 1e-11),
        holds(
            "Mahalanobis: mirror step against steepest step", gap(there, w + quadratic.primal(-eta * g, context)), 1e-10
        ),
        holds(
            "Mahalanobis: the move against a solver",
            gap(there - w, quadratic_minimiser(lambda x: eta * (g * x).sum() + ((x @ positive) * x).sum() / 2, (3, 4))),
            1e-9,
        ),
    )


def _linear_step(
    make: Callable[[nn.Linear], torch.optim.Optimizer], w: Tensor, x: Tensor, y: Tensor, scale: float = 1.0
) -> Tensor:
    """What one step of an optimizer does to a linear model on the mean of scale |W x - y|^2 / 2."""
    model = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(w)
    rule_ = make(model)
    (scale * (model(x) - y).square().sum() / (2 * len(x))).backward()
    rule_.step()
    return model.weight.detach() - w


_STEPS: dict[str, Callable[[nn.Linear], torch.optim.Optimizer]] = {
    "exact natural gradient": lambda m: ExactNaturalGradient(m, lr=1.0, damping=1e-14),
    "Kronecker natural gradient": lambda m: NaturalGradient(
        [{"params": [m.weight], "rule": "natural-gradient"}], model=m, lr=1.0, beta=0.0, damping=1e-28, momentum=0.0
    ),
    "Shampoo, exponent 1/4": lambda m: Shampoo(
        [{"params": [m.weight], "rule": "shampoo"}], lr=1.0, betas=(0.0, 1.0), exponent=0.25, eps=1e-14
    ),
    "Shampoo, exponent 1/2": lambda m: Shampoo(
        [{"params": [m.weight], "rule": "shampoo"}], lr=1.0, betas=(0.0, 1.0), exponent=0.5, eps=1e-14
    ),
    "Adam": lambda m: Adam(m, lr=1.0, betas=(0.0, 0.0), eps=0.0),
    "Muon": lambda m: rule(directed(Spectral("polar")), m.weight, lr=1.0),
    "empirical Fisher": lambda m: ExactNaturalGradient(m, lr=1.0, damping=1e-14, likelihood="empirical"),
}


@claim(
    "C13",
    "Shampoo, SOAP and PSGD-Kron are Newton methods, like natural gradient.",
    Verdict.FALSE,
    BLOG("The data axis, table of optimizers"),
    "axes.optim.Shampoo, axes.optim.Adam, axes.optim.ExactNaturalGradient, axes.optim.NaturalGradient",
    correction="they whiten the gradient by a power -1/2 of its own second moment; Newton and natural gradient divide "
    "by a curvature (power -1), do not depend on the coordinates of the inputs, and shrink when the loss of every "
    "example grows",
    kind="LABEL",
    derivation="With inputs A x the gradient becomes G A^T and the weights W A^{-1}. G R^{-1} with R = E x x^T "
    "follows: the moves agree. Square roots of R, or of G G^T and G^T G, do not transform this way. A loss times c "
    "multiplies the empirical Fisher by c^2, its inverse step by 1/c; whitening cancels c.",
)
def C13(draw: Draw) -> tuple[Finding, ...]:
    n, m, d = 24, 3, 4
    x, y, w = draw.normal(n, d), draw.normal(n, m), draw.normal(m, d)
    a = eye(d) + 0.5 * draw.orthogonal(d) @ torch.diag(draw.uniform(d, low=0.2, high=1.0)) @ draw.orthogonal(d)
    back = torch.linalg.inv(a)
    findings = []
    for name in (
        "exact natural gradient",
        "Kronecker natural gradient",
        "Shampoo, exponent 1/4",
        "Shampoo, exponent 1/2",
        "Adam",
        "Muon",
    ):
        here = _linear_step(_STEPS[name], w, x, y)
        there = _linear_step(_STEPS[name], w @ back, x @ a.mT, y) @ a
        defect = float((there - here).norm() / here.norm())
        label = f"{name}: dependence of the move on the coordinates of the inputs"
        findings.append(holds(label, defect, 1e-9) if "natural" in name else breaks(label, defect, 0.01))
    for name, expected in (("empirical Fisher", 0.1), ("Shampoo, exponent 1/4", 1.0), ("Adam", 1.0), ("Muon", 1.0)):
        few = slice(0, n)
        one, ten = (_linear_step(_STEPS[name], w, x[few], y[few], s) for s in (1.0, 10.0))
        findings.append(
            holds(
                f"{name}: move for ten times the loss, less {expected:g} times the move", gap(ten, expected * one), 1e-8
            )
        )
    return tuple(findings)


@claim(
    "C20",
    "Cautious optimizers keep the entries of a direction that agree in sign with the gradient.",
    Verdict.EXACT,
    BLOG("Cautious optimizers"),
    "axes.geometry.Cautious",
    derivation="The masked u^ has <u^, g> = sum of the positive u_i g_i, at least max(0, <u, g>). A direction c g "
    "with c > 0 loses nothing. The published step also rescales by numel/(kept + 1), or by numel/kept.",
)
def C20(draw: Draw) -> tuple[Finding, ...]:
    steps, shape, beta = 60, (3, 5), 0.9
    grads = draw.normal(steps, *shape)
    size = shape[0] * shape[1]

    def moves(h: Geometry, momentum: float) -> Tensor:
        weight = parameter(torch.zeros(*shape, dtype=torch.float64))
        path = fed(rule(directed(h, momentum), weight, lr=1.0), weight, list(grads))
        return -torch.diff(path, dim=0, prepend=torch.zeros(1, *shape, dtype=torch.float64))

    m, expected, scaled, short = np.zeros(shape), [], [], []
    for g in grads.numpy():
        m = beta * m + (1 - beta) * g
        kept = np.where(m * g > 0, m, 0.0)
        count = int((m * g > 0).sum())
        expected.append(kept * size / (count + 1))
        scaled.append(kept / max(count / size, 1e-3))
        short.append(max(0.0, float((m * g).sum())))
    counted, mean = moves(Cautious(Euclidean()), beta), moves(Cautious(Euclidean(), "mean"), beta)
    kept_share = (mean != 0).double().mean((-2, -1), keepdim=True)
    masked = mean * kept_share.clamp_min(1e-3)
    lacking = torch.tensor(short, dtype=torch.float64) - (masked * grads).sum((-2, -1))
    return (
        holds("rescaled by numel/(kept + 1)", gap(counted, torch.from_numpy(np.stack(expected))), 1e-11),
        holds("rescaled by numel/kept", gap(mean, torch.from_numpy(np.stack(scaled))), 1e-11),
        holds("max(0, <u, g>) less <masked u, g>", lacking.max().clamp_min(0), 1e-12),
        holds("no momentum: nothing is masked", gap(moves(Cautious(Euclidean(), "mean"), 0.0), grads), 1e-11),
    )


def hitting_times(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    target: tuple[Tensor, Tensor, Tensor],
    start: tuple[Tensor, Tensor],
    limit: int,
) -> list[int]:
    """The steps after which each mode of W2 W1 has reached half of its target U Diag(s) V^T; squared error."""
    (u, modes, vh), (w1, w2) = target, (parameter(x) for x in start)
    rule_, times = make([w1, w2]), [limit] * len(modes)
    for t in range(1, limit):
        with torch.no_grad():
            error = w2 @ w1 - (u * modes) @ vh
            w1.grad, w2.grad = w2.mT @ error, error @ w1.mT
            reached = torch.diagonal(u.mT @ w2 @ w1 @ vh.mT) >= modes / 2
        times = [min(old, t) if hit else old for old, hit in zip(times, reached.tolist(), strict=True)]
        if max(times) < limit:
            break
        rule_.step()
    return times


def _descent(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.0)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Adam(parameters, lr=0.005)


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizer(directed(Spectral("polar")))([{"params": parameters, "rule": "matrix"}], lr=0.02)


@claim(
    "C21",
    "Muon removes the bias towards large spectral modes that gradient descent and Adam have.",
    Verdict.STATISTICAL,
    BLOG("Optimizers and simplicity bias"),
    "axes.optim.SGD, axes.optim.Adam, axes.StateUpdate",
    derivation="In a two-layer linear network a mode of strength s grows as exp(eta s t) under gradient descent: "
    "strong modes come first. With the polar factor every mode grows by eta a step, so that weak ones, which have "
    "less far to go, come first: the order is reversed, not only evened out (for a start of the target's orientation, "
    "det W2 W1 of the same sign; else one mode has to pass through zero). Adam, in a basis that is not the target's, "
    "lies between.",
)
def C21(draw: Draw) -> tuple[Finding, ...]:
    modes = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    times: dict[str, list[list[int]]] = {"gradient descent": [], "Adam": [], "Muon": []}
    for _ in range(3):
        target = (draw.orthogonal(4), modes, draw.orthogonal(4))
        w1, w2 = 1e-3 * draw.normal(4, 4), 1e-3 * draw.normal(4, 4)
        if torch.linalg.det(target[0] @ target[2] @ w1 @ w2) < 0:
            w1 = w1 * torch.tensor([[-1.0], [1.0], [1.0], [1.0]], dtype=torch.float64)
        times["gradient descent"].append(hitting_times(_descent, target, (w1, w2), 1200))
        times["Adam"].append(hitting_times(_adam, target, (w1, w2), 1200))
        times["Muon"].append(hitting_times(_muon, target, (w1, w2), 600))
    order = {name: float(np.median([np.sign(np.diff(t)).mean() for t in ts])) for name, ts in times.items()}
    ratio = {name: float(np.median([t[3] / t[0] for t in ts])) for name, ts in times.items()}
    signs, last = "mean sign of successive differences of hitting times", "time of the weakest mode over the strongest"
    return (
        within(f"gradient descent: {signs}", order["gradient descent"], 1.0, 1.0),
        within(f"Muon: {signs}", order["Muon"], -1.0, -1.0),
        within(f"gradient descent: {last}", ratio["gradient descent"], 4.0, 20.0),
        within(f"Adam: {last}", ratio["Adam"], 1.1, 16.0),
        within(f"Muon: {last}", ratio["Muon"], 0.15, 0.75),
    )
