"""Group C, steps: the regularised leader, steepest descent in a norm, Frank-Wolfe, Muon, Lion, whitening."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import linalg, optimize
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

from axes import dispatch, reference
from axes.algorithms import Momentum, Step
from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.group_a_tools import fed, gradient, layer_tuple, one_step, squared_error, trained
from axes.claims.group_c_writes import eye, ridge_weights
from axes.claims.sources import BLOG
from axes.costs import Given, Linear, SquaredError
from axes.derived import structure
from axes.geometry import Cautious, Context, Euclidean, Geometry, Lq, Spectral, Whiten
from axes.monoids import Decay, Identity, Scalar
from axes.optim import SGD, Adam, ExactNaturalGradient, Lion, Muon, NaturalGradient, Shampoo, optimizer
from axes.rates import Per
from axes.state_update import OnUpdate, StateUpdate

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
    return any(f.parts()[1].matrix for f in update.filters()) or update.parts()[1].matrix


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
    "C14",
    "For a rank-one gradient the linear minimisation oracle over a spectral or nuclear ball is R e^ k^^T.",
    Verdict.CONDITIONAL,
    BLOG("Frank-Wolfe, the oracle"),
    "axes.geometry.Spectral, axes.sequence.FrankWolfeDelta",
    conditions="over the nuclear ball; over the spectral ball for the minimiser of least norm (the pseudo-polar "
    "factor, computed to convergence)",
    derivation="With g = -e k^T, <g, S> over the nuclear ball is least at R e^ k^^T alone. Over the spectral ball "
    "anything of norm R on the complements may be added: the value -R |e| |k| stays. A full SVD adds an arbitrary "
    "completion; five steps of the Newton-Schulz quintic miss the singular value one.",
)
def C14(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, radius = 5, 6, 1.5
    e, k = draw.normal(d_v), draw.normal(d)
    g = -torch.outer(e, k)
    point = radius * torch.outer(e, k) / (e.norm() * k.norm())
    zero, one = torch.zeros(d_v, d, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    layer = one_step(
        layer_tuple("frank-wolfe-delta"),
        zero,
        k=k,
        v=e,
        decay=torch.tensor(-math.inf, dtype=torch.float64),
        beta=radius * one,
    )
    u, s, vh = np.linalg.svd(-g.numpy())
    nuclear = torch.from_numpy(radius * np.outer(u[:, 0], vh[0]))
    full = torch.from_numpy(radius * u @ vh[:d_v])
    polar = radius * Spectral("polar").primal(-g)
    cubic = radius * Spectral("newton-schulz", steps=12, coefficients=(1.5, -0.5, 0.0)).primal(-g)
    quintic = torch.linalg.svdvals(Spectral("newton-schulz").primal(-g))[0]
    recalled = one_step(
        layer_tuple("frank-wolfe-delta"), point, k=k, v=point @ k, decay=torch.log(one / 2), beta=radius / 2 * one
    )
    return (
        holds("nuclear ball: top singular pair against the rank-one point", gap(nuclear, point), 1e-11),
        holds("the layer with gamma = 1 against it", gap(layer, point), 1e-11),
        holds("spectral ball: pseudo-polar factor against it", gap(polar, point), 1e-11),
        holds("spectral ball: cubic Newton-Schulz", gap(cubic, point), 1e-9),
        holds(
            "values of both points against -R |e| |k|",
            max(abs(float((g * x).sum()) + radius * float(e.norm() * k.norm())) for x in (point, full)),
            1e-10,
        ),
        holds("no error: nothing is written", gap(recalled, point / 2), 1e-12),
        breaks("full SVD: distance from the rank-one point", (full - point).norm() / radius, 1.9),
        breaks("five quintic steps: |singular value - 1|", (quintic - 1).abs(), 0.02),
    )


@claim(
    "C15",
    "The Frank-Wolfe delta rule S <- (1 - gamma) S + gamma R e^ k^^T is error-corrective, normalised and forgets by a "
    "scalar.",
    Verdict.EXACT,
    BLOG("Frank-Wolfe delta rule"),
    "axes.sequence.FrankWolfeDelta, axes.optim.SGD, axes.StateUpdate",
    derivation="The gradient of |v - S k|/|k| is -e^ k^^T: the rule is gradient descent with decoupled decay on the "
    "error that is not squared, with step gamma R and decay 1/R, and Muon's step with the exact pseudo-polar factor "
    "and no momentum. A convex combination of points of norm R stays in the nuclear ball.",
)
def C15(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, radius, gamma = 60, 3, 5, 2.0, 0.05
    k, v = draw.normal(n, d), draw.normal(n, d_v)
    w0 = draw.normal(d_v, d) / 10
    v[20] = 0.0
    k[20] = 0.0  # an empty datum: e = 0
    rates = {
        "decay": torch.full((n,), math.log1p(-gamma), dtype=torch.float64),
        "beta": torch.full((n,), gamma * radius, dtype=torch.float64),
    }
    layer = reference.run(layer_tuple("frank-wolfe-delta"), {"k": k, "v": v, **rates}, weights=(w0,))[0]
    batched = {name: x[None] for name, x in {"k": k, "v": v, "q": k, **rates}.items()}
    fast = dispatch.run(layer_tuple("frank-wolfe-delta"), batched, time=1, weights=(w0[None],))[1].theta[0][0]

    def unsquared(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        if not x.any():
            return lambda w: 0 * w.sum()
        return lambda w: torch.linalg.vector_norm(y - w @ x) / x.norm()

    first, second = parameter(w0), parameter(w0)
    descent = SGD([first], lr=gamma * radius, momentum=0.0, weight_decay=1 / radius, decoupled=True)
    muon = rule(directed(Spectral("polar")), second, lr=gamma * radius, weight_decay=1 / radius)
    path = trained(descent, first, [unsquared(x, y) for x, y in zip(k, v, strict=True)])
    polar = trained(muon, second, [squared_error(x, y) for x, y in zip(k, v, strict=True)])
    return (
        holds("layer against SGD with decoupled decay on |v - S k|/|k|", gap(layer, path), 1e-11),
        holds("layer against Muon with the pseudo-polar factor, no momentum", gap(layer, polar), 1e-10),
        holds("the layer's dispatched route, last state", gap(fast, path[-1]), 1e-11),
        holds("nuclear norm beyond R", (torch.linalg.matrix_norm(layer, "nuc").max() - radius).clamp_min(0), 1e-10),
        holds("a datum without error only decays", gap(layer[20], (1 - gamma) * layer[19]), 1e-12),
    )


@claim(
    "C16",
    "The online Frank-Wolfe update solves the constrained least-squares problem.",
    Verdict.STATISTICAL,
    BLOG("Frank-Wolfe delta rule"),
    "axes.StateUpdate, axes.sequence.FrankWolfeDelta",
    derivation="The oracle is not linear: E LMO(g) is not LMO(E g), and one datum at a time settles above the optimum "
    "however small gamma. Averaging gradients over a longer horizon before the oracle (Muon) closes the gap; the full "
    "batch converges as 2 L D^2/(t + 2).",
    seeds=2,
)
def C16(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d, radius, chains, steps, gamma = 12, 2, 3, 1.0, 24, 700, 0.01
    keys, truth = draw.normal(n, d), draw.normal(d_v, d)
    truth = 2.5 * radius * truth / torch.linalg.matrix_norm(truth, 2)
    values = keys @ truth.mT + draw.normal(n, d_v)

    def loss(w: Tensor) -> Tensor:
        return (values - keys @ w.mT).square().sum((-2, -1)) / (2 * n)

    smooth = float(torch.linalg.matrix_norm(keys, 2) ** 2 / n)
    best = torch.zeros(d_v, d, dtype=torch.float64)
    for _ in range(800):  # projected gradient descent: singular values are clipped
        u, s, vh = torch.linalg.svd(best - gradient(loss, best) / smooth, full_matrices=False)
        best = (u * s.clamp_max(radius)) @ vh
    optimum = float(loss(best))

    order = torch.randint(n, (steps, chains), generator=draw.generator)
    signal = {
        "k": keys[order],
        "v": values[order],
        "decay": torch.full((steps, chains), math.log1p(-gamma), dtype=torch.float64),
        "beta": torch.full((steps, chains), gamma * radius, dtype=torch.float64),
    }
    excess = []
    for beta in (0.0, 0.9, 0.99):
        via = (Momentum(beta, "ema"),) if beta else ()
        update = StateUpdate(SquaredError(), OnUpdate(Spectral("polar")), Scalar("decay"), Step(Per("beta"), via=via))
        if not beta:  # of rank one: the catalogue's layer, without a spectrum
            update = layer_tuple("frank-wolfe-delta")
        with torch.no_grad():
            path = reference.run(update, signal)[0]
        excess.append(float(loss(path[steps // 2 :]).mean()) - optimum)

    weight = parameter(best * 0)
    batch = rule(directed(Spectral("polar")), weight, lr=1.0, weight_decay=1 / radius)
    worst = 0.0
    for t in range(200):
        for group in batch.param_groups:
            group["lr"] = 2 / (t + 2) * radius
        weight.grad = gradient(loss, weight.detach())
        batch.step()
        bound = 2 * smooth * (2 * radius) ** 2 * min(d_v, d) / (t + 3)
        worst = max(worst, (float(loss(weight.detach())) - optimum) / bound)
    return (
        within("excess loss of single data, relative to the optimum", excess[0] / optimum, 0.01, 3.0),
        within("excess with an average of horizon 10 over that without", excess[1] / excess[0], 0.0, 0.95),
        within("excess with horizon 100 over that with 10", excess[2] / excess[1], 0.0, 0.95),
        within("full batch: excess over 2 L D^2/(t + 2), largest of 200 steps", worst, -1e-6, 1.0),
    )


@claim(
    "C17",
    "Frank-Wolfe retains by a scalar, while mirror descent inherits structure from the cost: rank one in DeltaNet, "
    "diagonal in Mamba.",
    Verdict.FALSE,
    BLOG("Frank-Wolfe delta rule"),
    "axes.sequence.FrankWolfeDelta, axes.sequence.GLA, axes.sequence.UnnormalisedLinearAttention",
    correction="a diagonal gate is a penalty <S, S Diag(1 - a)>/2 added to the alignment cost, whose own gradient "
    "does not see S; counted as in DeltaNet, with the feedback of the write, the Frank-Wolfe rule's Jacobian is not "
    "scalar either",
    kind="MATH",
    derivation="d(e^ k^^T) = -(I - e^ e^^T) dS k k^^T/|e|, so that the Jacobian is (1 - gamma) I - gamma R/(|e||k|) "
    "(I - e^ e^^T) x k k^T, of rank d_v - 1 beside the scalar.",
)
def C17(draw: Draw) -> tuple[Finding, ...]:
    d_v, d, radius, gamma = 3, 4, 2.0, 0.2
    s, k, v = draw.normal(d_v, d), draw.normal(d), draw.normal(d_v)
    one = torch.ones((), dtype=torch.float64)
    update = layer_tuple("frank-wolfe-delta")
    j = jacobian(lambda x: one_step(update, x, k=k, v=v, decay=torch.log1p(-gamma * one), beta=gamma * radius * one), s)
    assert isinstance(j, Tensor)
    rest = j.reshape(d_v * d, d_v * d) - (1 - gamma) * eye(d_v * d)
    e = v - s @ k
    unit = e / e.norm()
    formula = (
        -gamma * radius / (e.norm() * k.norm()) * torch.kron(eye(d_v) - torch.outer(unit, unit), torch.outer(k, k))
    )
    a = draw.uniform(d, low=0.2, high=0.9)
    gla = one_step(layer_tuple("gla"), s, k=k, v=v, decay=a.log())

    def descended(loss: Callable[[Tensor], Tensor]) -> Tensor:
        weight = parameter(s)
        return trained(SGD([weight], lr=1.0, momentum=0.0), weight, [loss])[0]

    penalised = descended(lambda w: -(v * (w @ k)).sum() + (w * w * (1 - a)).sum() / 2)
    plain = descended(lambda w: -(v * (w @ k)).sum())
    return (
        breaks("norm of the Frank-Wolfe rule's Jacobian less the scalar", rest.norm(), 0.01),
        breaks("a step on the alignment cost alone against GLA's", gap(plain, gla), 0.05),
        breaks(
            "derived transition of the alignment cost alone is the identity (1: yes)",
            float(structure(layer_tuple("linear-attention-unnormalised")) == "identity"),
            1.0,
        ),
        holds("a step on the penalised alignment cost against GLA's", gap(penalised, gla), 1e-12),
        holds("Jacobian less the scalar against its formula", gap(rest, formula), 1e-9),
        holds("its rank less d_v - 1", float(torch.linalg.matrix_rank(rest, rtol=1e-9)) - (d_v - 1), 0.0),
    )


@claim(
    "C18",
    "Lion and Muon with weight decay lambda are stochastic Frank-Wolfe on a ball of radius 1/lambda.",
    Verdict.EXACT,
    BLOG("Frank-Wolfe, Lion and Muon"),
    "axes.optim.Lion, axes.StateUpdate",
    derivation="(1 - lambda eta) W - eta sign(c) = (1 - gamma) W + gamma s with gamma = lambda eta and s = "
    "-sign(c)/lambda, the minimiser of <c, s> over |s|_max <= 1/lambda; the spectral ball and the polar factor alike. "
    "Outside of the ball the excess shrinks by 1 - gamma a step.",
)
def C18(draw: Draw) -> tuple[Finding, ...]:
    m, n, steps, eta, lam = 3, 4, 6, 0.1, 2.0
    gamma, grads, w = lam * eta, draw.normal(steps, m, n), draw.normal(m, n)
    b1, b2, beta = 0.9, 0.99, 0.8
    first, second = parameter(w), parameter(w)
    lion = fed(Lion([first], lr=eta, betas=(b1, b2), weight_decay=lam), first, list(grads))
    muon = fed(rule(directed(Spectral("polar"), beta), second, lr=eta, weight_decay=lam), second, list(grads))
    box, ball, slow, average = w, w, torch.zeros_like(w), torch.zeros_like(w)
    errors = []
    for t, g in enumerate(grads):
        c, slow, average = b1 * slow + (1 - b1) * g, b2 * slow + (1 - b2) * g, beta * average + (1 - beta) * g
        program = optimize.linprog(c.flatten().numpy(), bounds=[(-1 / lam, 1 / lam)] * (m * n))
        box = box + gamma * (torch.from_numpy(program.x).reshape(m, n) - box)
        ball = ball + gamma * (-torch.from_numpy(linalg.polar(average.numpy())[0]) / lam - ball)
        errors.append((gap(lion[t], box), gap(muon[t], ball)))
    far = parameter(20 * w)
    path = fed(Lion([far], lr=eta, betas=(b1, b2), weight_decay=lam), far, list(draw.normal(60, m, n)))
    excess = path.abs().amax((-2, -1)) - 1 / lam
    allowed = (20 * w.abs().max() - 1 / lam) * (1 - gamma) ** torch.arange(1, 61).double()
    held = parameter(w)
    settled = fed(Lion([held], lr=eta, weight_decay=lam), held, [grads[0]] * 150)[-1]
    free = parameter(w)
    unconstrained = fed(Lion([free], lr=eta, betas=(b1, b2)), free, [grads[0]])[0]
    return (
        holds("Lion against Frank-Wolfe with a linear program over the box", max(a for a, _ in errors), 1e-11),
        holds("Muon (exact polar factor) against Frank-Wolfe on the spectral ball", max(b for _, b in errors), 1e-11),
        holds("excess over the radius beyond its bound", (excess - allowed).max().clamp_min(0), 1e-10),
        holds("under a constant gradient W tends to a corner of the box", gap(settled, -grads[0].sign() / lam), 1e-9),
        holds("without decay: W - eta sign", gap(unconstrained, w - eta * grads[0].sign()), 1e-12),
    )


@claim(
    "C19",
    "Muon's weights stay in a spectral ball of radius 1/lambda.",
    Verdict.CONDITIONAL,
    BLOG("Frank-Wolfe, Lion and Muon"),
    "axes.optim.Muon, axes.StateUpdate",
    conditions="the polar factor is exact, and the radius is a/lambda with a the shape factor of the update, which "
    "the decay does not carry",
    derivation="The update is multiplied by a = sqrt(max(1, m/n)) or 0.2 sqrt(max(m, n)), the decay is not: the fixed "
    "point of a constant gradient is -a polar/lambda. Five quintic steps in bfloat16 leave singular values between "
    "0.68 and 1.2.",
)
def C19(draw: Draw) -> tuple[Finding, ...]:
    lam, eta, steps = 0.5, 1.0, 40
    findings = []
    for (m, n), scale in itertools.product(((32, 8), (8, 32)), ("original", "match_rms_adamw")):
        factor = math.sqrt(max(1, m / n)) if scale == "original" else 0.2 * math.sqrt(max(m, n))
        g = draw.normal(m, n)
        grads = [g] * steps
        exact, ours = parameter(torch.zeros_like(g)), parameter(torch.zeros_like(g))
        theirs = parameter(torch.zeros_like(g))
        fed(rule(directed(Spectral("polar", scale=scale)), exact, lr=eta, weight_decay=lam), exact, grads)  # type: ignore[arg-type]
        fed(Muon([{"params": [ours], "rule": "muon"}], lr=eta, weight_decay=lam, scale=scale), ours, grads)  # type: ignore[arg-type]
        fed(torch.optim.Muon([theirs], lr=eta, weight_decay=lam, adjust_lr_fn=scale), theirs, grads)
        values, seen = torch.linalg.svdvals(exact.detach()), torch.linalg.svdvals(theirs.detach())
        findings += [
            holds("exact polar factor: singular values lambda/a - 1", (values * lam / factor - 1).abs().max(), 1e-9),
            holds("axes' Muon against torch's, relative", gap(ours, theirs) / float(theirs.detach().abs().max()), 1e-5),
            holds(
                "torch's Muon: distance of singular values lambda/a from 1", (seen * lam / factor - 1).abs().max(), 0.36
            ),
            breaks("torch's Muon: the same, as a failure of exactness", (seen * lam / factor - 1).abs().max(), 0.03),
        ]
        if factor != 1.0:
            findings.append(
                breaks(
                    "exact polar factor, radius without a: singular values lambda - 1",
                    (values * lam - 1).abs().max(),
                    0.1,
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
    seeds=2,
)
def C21(draw: Draw) -> tuple[Finding, ...]:
    modes = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    target = (draw.orthogonal(4), modes, draw.orthogonal(4))
    w1, w2 = 1e-3 * draw.normal(4, 4), 1e-3 * draw.normal(4, 4)
    if torch.linalg.det(target[0] @ target[2] @ w1 @ w2) < 0:
        w1 = w1 * torch.tensor([[-1.0], [1.0], [1.0], [1.0]], dtype=torch.float64)
    start = (w1, w2)
    descent = hitting_times(lambda p: SGD(p, lr=0.05, momentum=0.0), target, start, 1200)
    adam = hitting_times(lambda p: Adam(p, lr=0.005), target, start, 1200)
    groups = directed(Spectral("polar"))
    muon = hitting_times(lambda p: optimizer(groups)([{"params": p, "rule": "matrix"}], lr=0.02), target, start, 600)

    def order(times: list[int]) -> float:
        return float(np.sign(np.diff(times)).mean())

    return (
        within("gradient descent: mean sign of successive differences of hitting times", order(descent), 1.0, 1.0),
        within("Muon: mean sign of successive differences", order(muon), -1.0, -1.0),
        within("gradient descent: time of the weakest mode over the strongest", descent[3] / descent[0], 4.0, 20.0),
        within("Adam: time of the weakest mode over the strongest", adam[3] / adam[0], 1.1, 16.0),
        within("Muon: time of the weakest mode over the strongest", muon[3] / muon[0], 0.15, 0.75),
    )
