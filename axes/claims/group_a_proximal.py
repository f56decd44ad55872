"""Group A, the regularised cost: Bregman divergences, implicit steps and mirror descent."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import gradient, layer_tuple, minimiser, one_output, one_step, squared_error
from axes.claims.sources import BLOG
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

_COST, _EUCLIDEAN, _MIRROR = "The regularized cost", "Euclidean case", "General case (mirror descent)"
_RATE = Step(Per("eta"))


def longhorn(start: Tensor, k: Tensor, v: Tensor, eta: float) -> Tensor:
    """One token of Longhorn with the same plasticity in every row."""
    return one_step(layer_tuple("longhorn"), start, k=k, v=v, beta=torch.full_like(v, eta))


def _entropy(w: Tensor) -> Tensor:
    return torch.special.entr(w).sum() * -1


def _half_square(w: Tensor) -> Tensor:
    return w.square().sum() / 2


def _binary(w: Tensor) -> Tensor:
    return -(torch.special.entr(w) + torch.special.entr(1 - w)).sum()


def _half_norm(p: float) -> object:
    return lambda w: w.abs().pow(p).sum().pow(2 / p) / 2


@claim(
    "A18",
    "D_h(W, W') = h(W) - h(W') - <grad h(W'), W - W'> is a divergence: never negative, and zero only where W = W'.",
    Verdict.EXACT,
    BLOG(_COST),
    "axes.geometry.Entropic, axes.geometry.Bounded, axes.geometry.Lq, axes.geometry.Euclidean",
    derivation="A strictly convex h lies above its tangents. For sum W log W on a simplex D is the Kullback-Leibler "
    "divergence. It is not symmetric, and D(a, c) = D(a, b) + D(b, c) + <grad h(b) - grad h(c), a - b>.",
)
def A18(draw: Draw) -> tuple[Finding, ...]:
    n, shape = 40, (3, 4)
    cases: tuple[tuple[str, Geometry, object], ...] = (
        ("Euclidean", Euclidean(), _half_square),
        ("entropic, rows", Entropic("row"), _entropy),
        ("entropic, whole", Entropic("whole"), _entropy),
        ("binary entropy", Bounded(), _binary),
        ("4/3-norm", Lq(4.0), _half_norm(4 / 3)),
        ("3-norm", Lq(1.5), _half_norm(3.0)),
    )
    findings = []
    for name, h, value in cases:
        a, b, c = (h.primal(draw.normal(n, *shape)) for _ in range(3))
        d = h.divergence(a, b)
        slope = torch.stack([gradient(value, x) for x in b])  # type: ignore[arg-type]
        parts = [value(x) - value(y) for x, y in zip(a, b, strict=True)]  # type: ignore[operator]
        by_hand = torch.stack(parts) - (slope * (a - b)).sum((-2, -1))
        bridge = ((h.subgradient(b) - h.subgradient(c)) * (a - b)).sum((-2, -1))
        findings += [
            holds(f"{name}: against autograd's definition", gap(d, by_hand), 1e-10),
            holds(f"{name}: at equal points", h.divergence(a, a).abs().max(), 1e-12),
            holds(f"{name}: three-point identity", gap(h.divergence(a, c), d + h.divergence(b, c) + bridge), 1e-10),
            breaks(f"{name}: least divergence of {n} pairs", d.min(), 1e-6),
        ]
        if name.startswith("entropic"):
            kl = kl_div(b.log(), a, reduction="none").sum((-2, -1))
            findings.append(holds(f"{name}: against Kullback-Leibler", gap(d, kl), 1e-11))
            findings.append(breaks(f"{name}: asymmetry", gap(d, h.divergence(b, a)), 0.1))
    corner = torch.tensor([[0.0, 0.3, 0.7]], dtype=torch.float64)
    inside = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    at_edge = float(Entropic("row").divergence(corner, inside)) - float(kl_div(inside.log(), corner, reduction="sum"))
    return (*findings, holds("entropic: on the boundary", abs(at_edge), 1e-12))


@claim(
    "A19",
    "For h = |W|^2 / 2 the divergence is |W - W'|^2 / 2.",
    Verdict.EXACT,
    BLOG(_EUCLIDEAN),
    "axes.geometry.Euclidean",
    derivation="|W|^2 / 2 - |W'|^2 / 2 - <W', W - W'> completes the square.",
)
def A19(draw: Draw) -> tuple[Finding, ...]:
    w, other = draw.normal(20, 3, 5), draw.normal(20, 3, 5)
    apart = torch.stack([(a - b).pow(2).sum() / 2 for a, b in zip(w, other, strict=True)])
    return (holds("against half the squared distance", gap(Euclidean().divergence(w, other), apart), 1e-12),)


@claim(
    "A20",
    "Minimising l(W) + |W - W_{t-1}|^2 / (2 eta) gives the implicit step W_t = W_{t-1} - eta grad l(W_t).",
    Verdict.EXACT,
    BLOG(_EUCLIDEAN),
    "axes.StateUpdate",
    derivation="Stationarity of the regularised cost of a differentiable l; for convex l the stationary point is the "
    "minimiser.",
)
def A20(draw: Draw) -> tuple[Finding, ...]:
    w, k, v = draw.normal(3, 4), draw.unit(4), draw.normal(3)
    costs: tuple[tuple[str, Cost, Tensor, object], ...] = (
        ("squared error", SquaredError(), v, squared_error(k, v)),
        ("Huber", Huber(0.7), v, lambda x: torch.nn.functional.huber_loss(x @ k, v, reduction="sum", delta=0.7)),
        ("cubic", Lp(3.0), v, lambda x: (x @ k - v).abs().pow(3).sum()),
        (
            "cross-entropy",
            CrossEntropy(),
            v.softmax(0),
            lambda x: torch.nn.functional.cross_entropy(x @ k, v.softmax(0)),
        ),
    )
    findings = []
    for name, cost, target, loss in costs:
        update = StateUpdate(cost, algorithm=Step(Per("eta"), at="new"))
        for eta in (0.1, 1.0, 10.0):
            new = one_step(update, w, k=k, v=target, eta=torch.tensor(eta, dtype=torch.float64))
            residual = new - w + eta * gradient(loss, new)  # type: ignore[arg-type]
            findings.append(holds(f"{name}: implicit equation", residual.abs().max() / max(1.0, eta), 1e-10))
            if eta == 1.0:
                solved = minimiser(lambda x, f=loss: f(x) + (x - w).square().sum() / 2, w)  # type: ignore[misc]
                findings.append(holds(f"{name}: against a solver", gap(new, solved), 1e-6))
    return tuple(findings)


def _derived(update: StateUpdate) -> bool:
    """Whether the tuple's parts say that a step is affine in the stored state."""
    return feedback(update) != "nonlinear" and all(f.parts().h.is_identity for f in update.filters())


@claim(
    "A21",
    "The explicit Euclidean step has the form W A_t + write(v_t, k_t).",
    Verdict.CONDITIONAL,
    BLOG(_EUCLIDEAN),
    "axes.sequence.DeltaNet, axes.sequence.TitansMatrix, axes.core.derived.feedback",
    conditions="the gradient is affine in W: alignment or squared error on a linear memory, with any momentum, gate "
    "or proximal shrinkage; not robust, cubic or logistic costs, not normalised directions, entropic links or deep "
    "memories",
    derivation="A map f is affine iff f(2 a - b) = 2 f(a) - f(b). Alignment has A = I, squared error A = I - eta k "
    "k^T. Filters and gates are linear; a clip, a power, a softmax or a norm of the gradient is not.",
)
def A21(draw: Draw) -> tuple[Finding, ...]:
    d, n = 4, 3
    k, v = draw.unit(n, d), 2 * draw.normal(n, d)
    signal: dict[str, Tensor | float] = {"k": k, "v": v, "target": v}
    for name in ("beta", "theta", "eta"):
        signal[name] = torch.full((n,), 0.5, dtype=torch.float64)
    signal["decay"] = signal["momentum"] = torch.full((n,), -0.2, dtype=torch.float64)
    rows = signal | {"beta": torch.full((n, d), 0.5, dtype=torch.float64)}
    starts = draw.normal(d, d), draw.normal(d, d)

    def defect(update: StateUpdate, data: dict[str, Tensor | float]) -> float:
        def run(*leaves: Tensor) -> tuple[Tensor, ...]:
            return reference.run(update, data, weights=leaves)[1].theta

        if update.parts().memory == MLP(1):
            a, b = ((x, y) for x, y in zip((starts[0], draw.normal(d, d)), (starts[1], draw.normal(d, d)), strict=True))
        else:
            a, b = (starts[0],), (starts[1],)  # type: ignore[assignment]
        between = run(*(2 * x - y for x, y in zip(a, b, strict=True)))
        return max(gap(z, 2 * x - y) for x, y, z in zip(run(*a), run(*b), between, strict=True))

    names = ("linear-attention-unnormalised", "delta-net", "gated-delta-net", "longhorn", "titans-matrix")
    affine = [(name, layer_tuple(name), rows if name == "longhorn" else signal) for name in names]
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
    return (
        *(holds(f"{name}: affine defect", defect(u, s), 1e-11) for name, u, s in affine),
        *(breaks(f"{name}: affine defect", defect(u, s), 1e-4) for name, u, s in curved),
        holds("affine tuples from which another feedback is derived", sum(not _derived(u) for _, u, _ in affine), 0.0),
        holds("other tuples from which affine feedback is derived", sum(_derived(u) for _, u, _ in curved), 0.0),
    )


@claim(
    "A22",
    "Longhorn's step S + eta/(1 + eta |k|^2) (v - S k) k^T minimises |v - S k|^2 / 2 + |S - S_{t-1}|^2 / (2 eta).",
    Verdict.EXACT,
    BLOG(_EUCLIDEAN + "; table of instances, Longhorn"),
    "axes.sequence.Longhorn",
    derivation="The minimiser moves along e k^T; its length solves a scalar equation, s = eta (1 - s |k|^2). The "
    "layer that was trained keeps only the diagonal of the transition (longhorn-diagonal) and is another rule.",
)
def A22(draw: Draw) -> tuple[Finding, ...]:
    w, k, v = draw.normal(3, 4), draw.normal(4), draw.normal(3)
    findings = []
    for eta in (1e-3, 1.0, float(10 ** draw.uniform(low=-3.0, high=3.0)), 1e3):
        new, shrunk = longhorn(w, k, v, eta), eta / (1 + eta * float(k @ k))

        def regularised(x: Tensor, eta: float = eta) -> Tensor:
            return eta * squared_error(k, v)(x) + (x - w).square().sum() / 2

        findings += [
            holds("closed form", gap(new, w + shrunk * torch.outer(v - w @ k, k)), 1e-11),
            holds(
                "gradient of the regularised cost, over 1 + eta", gradient(regularised, new).norm() / (1 + eta), 1e-11
            ),
        ]
    still = longhorn(w, torch.zeros_like(k), v, 1.0)
    entries = one_step(layer_tuple("longhorn-diagonal"), w, k=k, v=v, beta=torch.ones_like(v))
    return (
        *findings,
        holds("no write at k = 0", gap(still, w), 0.0),
        breaks("the diagonal approximation", gap(entries, longhorn(w, k, v, 1.0)), 1e-3),
    )


@claim(
    "A23",
    "Longhorn becomes the normalised delta rule as eta grows, and the delta rule itself for unit keys.",
    Verdict.EXACT,
    BLOG(_EUCLIDEAN),
    "axes.sequence.Longhorn, axes.sequence.DeltaNet",
    derivation="eta/(1 + eta |k|^2) -> 1/|k|^2. For |k| = 1 the distance from the full step e k^T is exactly |e|/(1 + "
    "eta).",
)
def A23(draw: Draw) -> tuple[Finding, ...]:
    w, k, v, one = draw.normal(3, 4), draw.unit(4), draw.normal(3), torch.ones((), dtype=torch.float64)
    full = one_step(layer_tuple("delta-net"), w, k=k, v=v, beta=one)
    findings = []
    for eta in (1.0, 10.0, 1e4):
        ratio = (longhorn(w, k, v, eta) - full).norm() * (1 + eta) / (v - w @ k).norm()
        findings.append(holds("unit key: distance over |e|/(1 + eta), less one", abs(float(ratio) - 1), 1e-8))
    long = draw.uniform(low=1.5, high=3.0) * k
    limit = longhorn(w, long, v, 1e12)
    normalised = one_step(layer_tuple("delta-net"), w, k=long, v=v, beta=1 / long.square().sum())
    plain = one_step(layer_tuple("delta-net"), w, k=long, v=v, beta=one)
    return (
        *findings,
        holds("longer key, eta = 1e12: against e k^T / |k|^2", gap(limit, normalised), 1e-9),
        breaks("longer key: against e k^T", gap(limit, plain), 0.01),
    )


@claim(
    "A24",
    "DeltaNet and Longhorn are the explicit and the exact step on one cost.",
    Verdict.EXACT,
    BLOG("Costs and update equations, two approximation levels of the same cost"),
    "axes.sequence.Longhorn, axes.sequence.DeltaNet",
    derivation="More than that: Longhorn with eta is DeltaNet with beta = eta/(1 + eta |k|^2), a chart that keeps "
    "beta |k|^2 in [0, 1): the transition's eigenvalues are 1 and 1/(1 + eta |k|^2) > 0 for every key.",
)
def A24(draw: Draw) -> tuple[Finding, ...]:
    n, d_v, d_k = 40, 3, draw.integer(2, 6)
    k, v, eta = draw.normal(n, d_k), draw.normal(n, d_v), 10 ** draw.uniform(n, low=-2.0, high=3.0)
    rows = {"k": k, "v": v, "beta": eta[:, None].expand(n, d_v)}
    exact = reference.run(layer_tuple("longhorn"), rows)[0]
    beta = eta / (1 + eta * k.square().sum(-1))
    explicit = reference.run(layer_tuple("delta-net"), {"k": k, "v": v, "beta": beta})[0]
    spectrum = torch.linalg.eigvals(chain(layer_tuple("longhorn"), rows).transition()).real
    return (
        holds("40 states", gap(exact, explicit), 1e-11),
        holds("largest eigenvalue of a transition less one", (spectrum.max() - 1).abs(), 1e-12),
        holds("least eigenvalue below zero", (-spectrum.min()).clamp_min(0.0), 0.0),
        holds(
            "least eigenvalue against 1/(1 + eta |k|^2)",
            (spectrum.min() - (1 - beta * k.square().sum(-1)).min()).abs(),
            1e-9,
        ),
    )


@claim(
    "A25",
    "Linearising l at W_{t-1} gives W_t = grad h*(grad h(W_{t-1}) - eta grad l(W_{t-1})).",
    Verdict.EXACT,
    BLOG(_MIRROR),
    "axes.geometry.Entropic, axes.geometry.Bounded, axes.geometry.Lq, axes.geometry.Whiten",
    derivation="Stationarity of <g, W> + D_h(W, W_{t-1})/eta: g + (grad h(W_t) - grad h(W_{t-1}))/eta is normal to "
    "the constraint set; for masses that are fixed, a constant on each slice.",
)
def A25(draw: Draw) -> tuple[Finding, ...]:
    k, v, eta = draw.normal(3), draw.normal(2), float(draw.uniform(low=0.1, high=1.0))
    rate = torch.tensor(eta, dtype=torch.float64)
    cases: tuple[tuple[str, Geometry, object, tuple[int, ...] | None], ...] = (
        ("entropic, rows", Entropic("row"), _entropy, (-1,)),
        ("entropic, columns", Entropic("column"), _entropy, (-2,)),
        ("entropic, whole", Entropic("whole"), _entropy, (-2, -1)),
        ("binary entropy", Bounded(), _binary, None),
        ("4/3-norm", Lq(4.0), _half_norm(4 / 3), None),
        ("Euclidean", Euclidean(), _half_square, None),
    )
    findings = []
    for name, h, value, slices in cases:
        start = h.primal(draw.normal(2, 3))
        g = gradient(squared_error(k, v), start)
        new = one_output(StateUpdate(SquaredError(), h, algorithm=_RATE), h.dual(start), k=k, v=v, eta=rate)
        residual = g + (gradient(value, new) - gradient(value, start)) / eta  # type: ignore[arg-type]
        if slices is not None:
            residual = residual - residual.mean(slices, keepdim=True)
        findings.append(holds(f"{name}: stationarity", residual.abs().max(), 1e-9))
        if name == "entropic, whole":
            slope = gradient(_entropy, start)

            def cost(x: Tensor, g: Tensor = g, start: Tensor = start, slope: Tensor = slope) -> Tensor:
                return (g * x).sum() + (_entropy(x) - _entropy(start) - (slope * (x - start)).sum()) / eta

            solved = minimiser(cost, start, equal=[lambda x: x.sum() - 1], lower=1e-12)
            findings.append(holds(f"{name}: against a solver", gap(new, solved), 1e-5))
    metric = draw.positive_definite(3)
    start, g = draw.normal(2, 3), draw.normal(2, 3)
    whiten = Whiten((StateUpdate(Linear("key")),), kind="right", power=1.0, eps=0.0)
    new = whiten.primal(start @ metric - eta * g, Context(stats=(metric,)))
    findings.append(
        holds("quadratic metric: W - eta g H^-1", gap(new, start - eta * torch.linalg.solve(metric, g.mT).mT), 1e-9)
    )
    return tuple(findings)


@claim(
    "A26",
    "The link is the identity for Euclidean h and softmax for entropic h.",
    Verdict.CONDITIONAL,
    BLOG(_MIRROR),
    "axes.geometry.Entropic, axes.geometry.Euclidean",
    conditions="entropic h is restricted to the simplex; on the positive orthant its link is exp(theta - 1)",
    derivation="grad (sum W log W) = log W + 1. Without a constraint theta = log W + 1; with sum W = 1 the multiplier "
    "normalises, and h* is log-sum-exp (up to a constant), whose gradient is softmax.",
)
def A26(draw: Draw) -> tuple[Finding, ...]:
    theta = draw.normal(1, 4)
    theta = theta - theta.logsumexp(-1) + 2  # exp(theta - 1) sums to e

    def conjugate(x: Tensor) -> Tensor:
        return _entropy(x) - (theta * x).sum()

    link, uniform = Entropic("row").primal(theta), torch.full_like(theta, 0.25)
    on_simplex = minimiser(conjugate, uniform, equal=[lambda x: x.sum() - 1], lower=1e-12)
    on_orthant = minimiser(conjugate, uniform, lower=1e-12)
    by_duality = gradient(lambda x: torch.logsumexp(x, -1).sum(), theta)
    by_square = minimiser(lambda x: _half_square(x) - (theta * x).sum(), uniform)
    return (
        holds("Euclidean: against a solver", gap(Euclidean().primal(theta), by_square), 1e-7),
        holds("simplex: against a solver", gap(link, on_simplex), 1e-5),
        holds("simplex: against the gradient of log-sum-exp", gap(link, by_duality), 1e-12),
        holds("orthant: a solver against exp(theta - 1)", gap(on_orthant, (theta - 1).exp()), 1e-5),
        breaks("orthant: a solver against softmax", gap(on_orthant, link), 0.1),
    )


@claim(
    "A27",
    "Mirror descent is the case without constraints, C = all matrices.",
    Verdict.FALSE,
    BLOG("Constrained dual (Frank-Wolfe)"),
    "axes.geometry.Entropic, axes.geometry.Spectral, axes.geometry.Euclidean",
    correction="softmax and polar links belong to h plus the indicator of a set, the simplex or the orthogonal "
    "matrices; only Euclidean and other quadratic h need no set",
    kind="MATH",
    derivation="Dropping the set turns softmax into w exp(-eta g), whose sum is not one, and the polar factor into "
    "the matrix itself: the argmin over all matrices of |W|^2 / 2 - <Y, W> is Y.",
)
def A27(draw: Draw) -> tuple[Finding, ...]:
    start, g, eta = Entropic("row").primal(draw.normal(1, 4)), draw.normal(1, 4), 1.0
    g = g + (start.log() - eta * g).logsumexp(-1) - math.log(2.0)  # w exp(-eta g) sums to 2
    slope = gradient(_entropy, start)

    def cost(x: Tensor) -> Tensor:
        return (g * x).sum() + (_entropy(x) - _entropy(start) - (slope * (x - start)).sum()) / eta

    tuple_ = StateUpdate(Given(), Entropic("row"), algorithm=Step(eta))
    mirror = one_output(tuple_, Entropic("row").dual(start), g=g)
    free = minimiser(cost, start, lower=1e-12)
    y = 2 * draw.normal(4, 2)
    polar = one_output(StateUpdate(Given(), Spectral("polar"), algorithm=Step(eta)), torch.zeros_like(y), g=-y)

    def from_y(x: Tensor) -> Tensor:
        return _half_square(x) - (y * x).sum()

    eye = torch.eye(2, dtype=torch.float64)
    orthonormal = [lambda x, i=i: (x.mT @ x - eye)[i] for i in ((0, 0), (0, 1), (1, 1))]
    isometric = minimiser(from_y, polar + 0.1 * draw.normal(4, 2), equal=orthonormal)
    plain = one_output(StateUpdate(Given(), Euclidean(), algorithm=Step(eta)), torch.zeros_like(y), g=-y)
    return (
        breaks("entropic, no constraint: the solver against the mirror step", gap(free, mirror), 0.1),
        breaks("polar, no constraint: the solver against the link", gap(minimiser(from_y, polar), polar), 0.05),
        holds(
            "entropic on the simplex",
            gap(minimiser(cost, start, equal=[lambda x: x.sum() - 1], lower=1e-12), mirror),
            1e-5,
        ),
        holds("polar on orthonormal columns", gap(isometric, polar), 1e-5),
        holds("Euclidean without a set", gap(minimiser(from_y, polar), plain), 1e-6),
    )


@claim(
    "A28",
    "The polar factor is the link of |W|^2 / 2 on matrices with orthonormal columns.",
    Verdict.EXACT,
    BLOG(_MIRROR),
    "axes.geometry.Spectral",
    derivation="On that set |W|^2 = r, so that h*(Y) = max <Y, W> - r/2 = |Y|_nuclear - r/2, attained at U V^T, which "
    "is the gradient for Y of full column rank.",
)
def A28(draw: Draw) -> tuple[Finding, ...]:
    m, r = 5, draw.integer(1, 4)
    y, h = draw.normal(m, r), Spectral("polar")
    polar, eye = h.primal(y), torch.eye(r, dtype=torch.float64)
    nuclear = torch.linalg.svdvals(y).sum()
    others = torch.linalg.qr(draw.normal(200, m, r))[0]
    w0, g, eta = draw.orthogonal(m)[:, :r], draw.normal(m, r), 0.3
    new = one_output(StateUpdate(Given(), h, algorithm=Step(eta, lazy=False)), w0, g=g)
    slope = gradient(lambda x: (g * x).sum() + (x - w0).square().sum() / (2 * eta), new)
    tangent = slope - new @ (new.mT @ slope + slope.mT @ new) / 2
    return (
        holds(
            "against the gradient of the nuclear norm",
            gap(polar, gradient(lambda x: torch.linalg.svdvals(x).sum(), y)),
            1e-9,
        ),
        holds("<polar(Y), Y> against the nuclear norm", ((polar * y).sum() - nuclear).abs(), 1e-11),
        holds("orthonormal columns", gap(polar.mT @ polar, eye), 1e-12),
        holds(
            "how far 200 other isometries exceed it", ((others * y).sum((-2, -1)).max() - nuclear).clamp_min(0.0), 1e-12
        ),
        holds("projected step: Riemannian gradient of its objective", tangent.norm(), 1e-11),
    )
