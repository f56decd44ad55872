"""Group A, constraint sets: Muon, Frank-Wolfe, trust regions, and what makes a state forget."""

from __future__ import annotations

import math

import torch
from scipy import optimize
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import (
    fed,
    gradient,
    layer_tuple,
    minimiser,
    one_output,
    one_step,
    squared_error,
    trained,
)
from axes.claims.sources import BLOG
from axes.core.algorithms import Step
from axes.core.costs import Given, SquaredError
from axes.core.geometry import Entropic, Euclidean, Geometry, SignBall, Spectral, Sphere
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.optim import SGD, Lion, Muon
from axes.sequence.predicted import FrankWolfeDelta

_DUAL = "Constrained dual (Frank-Wolfe)"
# Newton-Schulz with a contracting polynomial, long enough to be the polar factor to rounding
_EXACT_POLAR = {"ns_steps": 40, "ns_coefficients": (1.875, -1.25, 0.375), "precision": "input", "scale": None}


def muon(weight: nn.Parameter, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Muon:
    """Muon with an exact polar factor on one matrix."""
    group = [{"params": [weight], "rule": "muon"}]
    return Muon(group, lr=lr, momentum=momentum, nesterov=False, weight_decay=weight_decay, **_EXACT_POLAR)  # type: ignore[arg-type]


def polar(y: Tensor) -> Tensor:
    """U V^T by a singular value decomposition."""
    u, _, vh = torch.linalg.svd(y, full_matrices=False)
    return u @ vh


@claim(
    "A29",
    "Muon is mirror descent with the polar link: its weights stay on the Stiefel manifold.",
    Verdict.FALSE,
    BLOG("General case (mirror descent); Retention, normalization, row 3"),
    "axes.optim.Muon",
    correction="Muon adds polar(m) to the weights: the polar factor acts on the update, as the steepest direction in "
    "the spectral norm. Mirror descent with that link is W = polar(W - eta g)",
    kind="MATH",
    derivation="W - eta polar(m) moves every singular direction of m by eta and leaves W unconstrained. From an "
    "orthogonal W the two steps differ at first order in eta: one drops the part of g that is normal to the manifold, "
    "the other its size.",
)
def A29(draw: Draw) -> tuple[Finding, ...]:
    n, m, steps, eta = 5, 4, 100, 0.05
    start, target = draw.orthogonal(n)[:, :m], 2 * draw.normal(n, m)
    eye = torch.eye(m, dtype=torch.float64)
    weight = nn.Parameter(start.clone())
    path = trained(muon(weight, eta, 0.9), weight, [lambda w: (w - target).square().sum() / 2] * steps)
    projected, w = StateUpdate(Given(), Spectral("polar"), algorithm=Step(eta, lazy=False)), start
    for _ in range(steps):
        w = one_output(projected, w, g=w - target)
    g = draw.normal(n, m)
    weight = nn.Parameter(start.clone())
    one = fed(muon(weight, eta), weight, [g])[0]
    findings = []
    for small in (1e-2, 1e-3):
        weight = nn.Parameter(start.clone())
        muon_step = fed(muon(weight, small), weight, [g])[0]
        step = StateUpdate(Given(), Spectral("polar"), algorithm=Step(small, lazy=False))
        findings.append(
            breaks("one step: difference over eta", gap(muon_step, one_output(step, start, g=g)) / small, 0.1)
        )
    direction = (start - one) / eta
    others = draw.normal(200, n, m)
    others = others / torch.linalg.matrix_norm(others, 2)[:, None, None]
    return (
        breaks("Muon after 100 steps: |W^T W - I|", gap(path[-1].mT @ path[-1], eye), 0.3),
        *findings,
        holds("projected descent after 100 steps: |W^T W - I|", gap(w.mT @ w, eye), 1e-11),
        holds(
            "singular values of Muon's step over eta, less one",
            gap(torch.linalg.svdvals(direction), torch.ones(m).double()),
            1e-9,
        ),
        holds("Muon's direction against the polar factor", gap(direction, polar(g)), 1e-9),
        holds(
            "its slope against the nuclear norm, the dual norm",
            ((direction * g).sum() - torch.linalg.svdvals(g).sum()).abs(),
            1e-9,
        ),
        holds(
            "excess of 200 other directions",
            ((others * g).sum((-2, -1)).max() - (direction * g).sum()).clamp_min(0.0),
            0.0,
        ),
    )


@claim(
    "A30",
    "By Lagrangian duality the regularised cost minimises l over a fixed set whose radius is dual to 1/eta.",
    Verdict.FALSE,
    BLOG(_DUAL),
    "axes.StateUpdate, axes.optim.SGD",
    correction="the divergence is centred at W_{t-1}: its dual is the trust region D_h(W, W_{t-1}) <= rho around the "
    "old state. The ball at zero is dual to weight decay",
    kind="MATH",
    derivation="Equal gradients at the optimum: grad l(W_t) = -(W_t - W_{t-1})/eta is normal to the ball around "
    "W_{t-1}, and not to the ball around 0. With weight decay grad l = -lambda W, which is.",
)
def A30(draw: Draw) -> tuple[Finding, ...]:
    w, k, v, eta = draw.normal(2, 3), draw.unit(3), draw.uniform(2, low=-1.0, high=0.5), 1.0
    w = w + torch.outer(2 - w @ k, k)  # the old prediction is 2, away from the target
    loss = squared_error(k, v)
    rate = torch.tensor(eta, dtype=torch.float64)
    new = one_step(StateUpdate(SquaredError(), algorithm=Step(Per("eta"), at="new")), w, k=k, v=v, eta=rate)
    near, size = (new - w).square().sum(), new.square().sum()
    region = minimiser(loss, w + 0.1, positive=[lambda x: near - (x - w).square().sum()])
    ball = minimiser(loss, 0.5 * new, positive=[lambda x: size - x.square().sum()])
    decay = 1.0
    weight = nn.Parameter(w.clone())
    ridge = trained(SGD([weight], lr=0.5, momentum=0.0, weight_decay=decay), weight, [loss] * 60)[-1]
    radius = ridge.square().sum()
    shrunk = minimiser(loss, 0.5 * ridge, positive=[lambda x: radius - x.square().sum()])
    return (
        breaks("best cost in the ball at 0 of radius |W_t|, below l(W_t)", loss(new) - loss(ball), 0.1),
        holds("implicit step against the trust region of radius |W_t - W_{t-1}|", gap(new, region), 1e-5),
        holds("weight decay's fixed point against the ball at 0", gap(ridge, shrunk), 1e-5),
    )


def _nuclear(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x).sum()


@claim(
    "A31",
    "Frank-Wolfe iterates are convex combinations that stay in C, and the linear oracle returns boundary points.",
    Verdict.EXACT,
    BLOG(_DUAL),
    "axes.sequence.predicted.FrankWolfeDelta, axes.optim.Muon, axes.optim.Lion",
    derivation="(1 - gamma) W + gamma s with W, s in a convex C. Decay 1/R with step gamma R makes Muon walk in the "
    "spectral ball of radius R, Lion in the max-norm ball. At zero gradient the oracle returns 0, a point of C that "
    "is not on the boundary.",
)
def A31(draw: Draw) -> tuple[Finding, ...]:
    radius, steps = 3.0, 60
    gamma = draw.uniform(steps)
    start = draw.normal(3, 4)
    start = start / _nuclear(start) * radius
    k, v = draw.normal(steps, 4), draw.normal(steps, 3)
    w, worst, directions = start, 0.0, []
    for t in range(steps):
        before = w
        w = one_step(FrankWolfeDelta.update, w, k=k[t], v=v[t], decay=torch.log1p(-gamma[t]), beta=radius * gamma[t])
        worst = max(worst, float(_nuclear(w)) / radius - 1)
        directions.append((w - (1 - gamma[t]) * before) / (gamma[t] * radius))
    edge = torch.stack([_nuclear(s) for s in directions])
    still = one_step(
        FrankWolfeDelta.update, w, k=k[0], v=w @ k[0], decay=torch.log1p(-gamma[0]), beta=radius * gamma[0]
    )

    def walk(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
        path = []
        for t in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = float(gamma[t]) * radius
            path.append(fed(optimizer, weight, [draw.normal(3, 4)])[0])
        return torch.stack(path)

    first = nn.Parameter(polar(draw.normal(3, 4)) * radius)
    spectral = torch.linalg.matrix_norm(walk(muon(first, 1.0, 0.5, 1 / radius), first), 2)
    second = nn.Parameter(draw.uniform(3, 4, low=-radius, high=radius))
    largest = walk(Lion([second], lr=1.0, weight_decay=1 / radius), second).abs()
    return (
        holds("nuclear ball: largest excess over R, relative", max(worst, 0.0), 1e-12),
        holds("nuclear ball: distance of the oracle's points from the boundary", (edge - 1).abs().max(), 1e-9),
        holds("spectral ball, by Muon with decay 1/R: excess", (spectral.max() / radius - 1).clamp_min(0.0), 1e-9),
        holds("max-norm ball, by Lion with decay 1/R: excess", (largest.max() / radius - 1).clamp_min(0.0), 1e-12),
        holds("at zero error: nuclear norm over R", max(float(_nuclear(still)) / radius - 1, 0.0), 1e-12),
    )


@claim(
    "A32",
    "The linear oracle and grad h* both map a dual vector to a feasible point.",
    Verdict.EXACT,
    BLOG(_DUAL),
    "axes.geometry.SignBall, axes.geometry.Sphere, axes.geometry.Spectral",
    derivation="For h the indicator of C, h* is the support function max <theta, W>, and where its maximiser is "
    "unique that is its gradient: argmin <g, W> = grad h*(-g).",
)
def A32(draw: Draw) -> tuple[Finding, ...]:
    cases: tuple[tuple[str, Geometry, object], ...] = (
        ("max norm", SignBall(), lambda x: x.abs().sum()),
        ("Frobenius norm", Sphere("whole"), lambda x: x.square().sum().sqrt()),
        ("spectral norm", Spectral("polar"), _nuclear),
    )
    g = draw.normal(4, 3)
    findings = []
    for name, h, support in cases:
        oracle = h.primal(-g)
        findings += [
            holds(f"{name}: against the gradient of the support function", gap(oracle, gradient(support, -g)), 1e-9),  # type: ignore[arg-type]
            holds(f"{name}: -<g, W> against the dual norm", (-(oracle * g).sum() - support(-g)).abs(), 1e-10),  # type: ignore[operator]
        ]
    solved = optimize.linprog(g.flatten().numpy(), bounds=(-1, 1)).x
    vertex = torch.from_numpy(solved.copy()).reshape(g.shape)
    disc = minimiser(lambda x: (g * x).sum(), -0.1 * g, positive=[lambda x: 1 - x.square().sum()])
    return (
        *findings,
        holds("max norm: against a linear program", gap(SignBall().primal(-g), vertex), 1e-9),
        holds("Frobenius norm: against a solver", gap(Sphere("whole").primal(-g), disc), 1e-5),
    )


@claim(
    "A33",
    "argmin over C of l + D_h/eta contains mirror descent and Frank-Wolfe.",
    Verdict.FALSE,
    BLOG(_DUAL + ", the most general formulation"),
    "axes.StateUpdate",
    correction="a Frank-Wolfe step is the argmin of <grad l, W> over the shrunken set (1 - gamma) W_{t-1} + gamma C; "
    "the printed form reaches it for gamma = 1 only, as eta grows",
    kind="MATH",
    derivation="With l linearised and Euclidean h the argmin is the projection of W - eta g on C, for every eta. As "
    "eta grows it tends to the oracle's vertex s, never to (1 - gamma) W + gamma s.",
)
def A33(draw: Draw) -> tuple[Finding, ...]:
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
    centre, reach = (1 - gamma) * w, (gamma * radius) ** 2
    solved = minimiser(
        lambda x: (g * x).sum(), centre - 0.1 * g, positive=[lambda x: reach - (x - centre).square().sum()]
    )
    inside = draw.normal(300, 2, 3)
    inside = centre + gamma * radius * inside / inside.norm(dim=(-2, -1), keepdim=True)
    ball = minimiser(
        lambda x: (g * x).sum() + (x - w).square().sum() / 2, w, positive=[lambda x: radius**2 - x.square().sum()]
    )
    return (
        breaks("nearest projected mirror step, over all eta", distance, 0.05),
        holds("projected gradient against a solver of the printed form", gap(projected(1.0), ball), 1e-5),
        holds("against the argmin over the shrunken set, by a solver", gap(step, solved), 1e-5),
        holds(
            "how far 300 points of that set go below",
            ((g * step).sum() - (inside * g).sum((-2, -1)).min()).clamp_min(0.0),
            1e-12,
        ),
        holds("gamma = 1 against the printed form at eta = 1e9", gap(frank_wolfe(1.0 - 1e-12), projected(1e9)), 1e-7),
    )


@claim(
    "A34",
    "h decides how a state forgets: |W|^2 / 2 gives a scalar forget gate.",
    Verdict.FALSE,
    BLOG("Retention, normalization, and the generating function h"),
    "axes.sequence.UnnormalisedLinearAttention, axes.optim.SGD, axes.sequence.MemoraMatrix",
    correction="D_h(W, W_{t-1}) alone keeps everything. A gate needs another term: lambda |W|^2 / 2 gives 1 - eta "
    "lambda by an explicit step and 1/(1 + eta lambda) exactly; a divergence from the uniform state gives an exponent "
    "on W_{t-1}",
    kind="MATH",
    derivation="The divergence is zero at W_{t-1}, so without a cost W_t = W_{t-1} for every h. In the dual, two "
    "divergences with weights 1/eta and 1/a average their centres: theta = alpha theta_{t-1} + (1 - alpha) theta_0, "
    "alpha = (1/eta)/(1/eta + 1/a).",
)
def A34(draw: Draw) -> tuple[Finding, ...]:
    w, k, v, eta = draw.normal(2, 3), draw.unit(3), draw.normal(2), float(draw.uniform(low=0.2, high=1.0))
    weight_decay = float(draw.uniform(low=0.2, high=1.0))
    x = eta * weight_decay

    def aligned(s: Tensor) -> Tensor:
        return -(v * (s @ k)).sum()

    update = layer_tuple("linear-attention-unnormalised")
    alone = minimiser(lambda s: aligned(s) + (s - w).square().sum() / 2, w)
    kept = jacobian(lambda s: one_step(update, s, k=k, v=v), w)
    assert isinstance(kept, Tensor)
    entropic = one_output(StateUpdate(Given(), Entropic("row")), w.log_softmax(-1), g=torch.zeros_like(w))
    exact = minimiser(
        lambda s: aligned(s) + weight_decay / 2 * s.square().sum() + (s - w).square().sum() / (2 * eta), w
    )
    gate, rate = 1 / (1 + x), eta / (1 + x)
    gated = StateUpdate(update.cost, Euclidean(), Scalar(gate), Step(rate))
    weight = nn.Parameter(w.clone())
    explicit = trained(SGD([weight], lr=eta, momentum=0.0, weight_decay=weight_decay), weight, [aligned])[0]

    # two divergences, one of them from the uniform state
    memora = layer_tuple("memora-matrix")
    log_w, mass, pull = w.log_softmax(-1), math.sqrt(w.shape[-1]), float(draw.uniform(low=0.5, high=3.0))
    alpha = (1 / eta) / (1 / eta + 1 / pull)
    step = 1 / (1 / eta + 1 / pull)
    signal = {
        "k": k,
        "v": v,
        "decay": torch.full((2,), math.log(alpha), dtype=w.dtype),
        "eta": torch.full((2,), step, dtype=w.dtype),
    }
    new, before = one_output(memora, log_w, **signal), mass * log_w.exp()

    def objective(s: Tensor) -> Tensor:
        g = gradient(squared_error(k, v), before)
        divergence = (s * (s / before).log()).sum() / eta + (s * (s / (mass / w.shape[-1])).log()).sum() / pull
        return (g * s).sum() + divergence

    slope = gradient(objective, new)
    explicit_gate, implicit_gate = 1 - x, gate
    return (
        breaks("retention of h alone less the gate 1/(1 + eta lambda)", 1 - gate, 0.03),
        breaks("the argmin with h alone against the gated step", gap(alone, gate * w + torch.outer(v, k)), 0.005),
        holds("h alone: a solver against linear attention", gap(alone, one_step(update, w, k=k, v=v)), 1e-6),
        holds("h alone: derivative of the step less the identity", gap(kept.reshape(6, 6), torch.eye(6).double()), 0.0),
        holds("entropic h alone: W_{t-1} without a gradient", gap(entropic, w.softmax(-1)), 1e-12),
        holds(
            "decay, exactly: a solver against the gate 1/(1 + eta lambda)",
            gap(one_step(gated, w, k=k, v=v), exact),
            1e-6,
        ),
        holds(
            "decay, explicitly: SGD against the gate 1 - eta lambda",
            gap(explicit, (1 - x) * w + eta * torch.outer(v, k)),
            1e-12,
        ),
        holds(
            "the two gates differ by x^2/(1 + x), x = eta lambda",
            abs(implicit_gate - explicit_gate - x * x / (1 + x)),
            1e-12,
        ),
        holds(
            "Memora with exponent alpha: stationarity", gap(slope, slope.mean(-1, keepdim=True).expand_as(slope)), 1e-9
        ),
    )
