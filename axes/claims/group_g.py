"""Group G, the depth axis: stream mixing as retention, Sinkhorn and Cayley links, what deep products keep and lose."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import linalg, optimize
from torch import Tensor

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable, within
from axes.claims.sources import BLOG
from axes.core import reference
from axes.core.costs import Alignment
from axes.core.geometry import Birkhoff, Cayley, Entropic, Euclidean
from axes.core.memory import List
from axes.core.monoids import GeneralLinear
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import MHC, HyperConnections, JPmHC, Residual

_DEPTH, _TAXONOMY = "The depth axis", "The depth axis, taxonomy"
_CAYLEY = Cayley(scale=1.0)


def _layers(update: StateUpdate, mix: Tensor, post: Tensor, y: Tensor, start: Tensor) -> Tensor:
    """The streams (n, d) after every layer: the state of the tuple is their transpose."""
    signal = {"k": post, "v": y, "mix": mix}
    return reference.run(update, signal, weights=(start.mT,))[0].mT


@claim(
    "G01",
    "Hyper-connections X <- A X + b f^T generalise the residual stream: one stream with A = b = 1 is x + f.",
    Verdict.EXACT,
    BLOG(_TAXONOMY),
    "axes.depth.HyperConnections",
    derivation="Unrolled, X_L = A_L ... A_1 X_0 + sum_l A_L ... A_{l+1} b_l f_l^T; with one stream and ones it "
    "telescopes.",
)
def G01(draw: Draw) -> tuple[Finding, ...]:
    layers, n, d = 6, 4, 5
    mix, post, y, start = (
        draw.normal(layers, n, n) / 2,
        draw.normal(layers, n),
        draw.normal(layers, d),
        draw.normal(n, d),
    )
    last = _layers(HyperConnections.update, mix, post, y, start)[-1]
    unrolled, product = torch.zeros(n, d, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    for a, b, f in zip(mix.flip(0), post.flip(0), y.flip(0), strict=True):
        unrolled, product = unrolled + product @ torch.outer(b, f), product @ a
    one = torch.ones(layers, 1, dtype=torch.float64)
    stream = _layers(HyperConnections.update, one[..., None], one, y, start[:1])
    residual = reference.run(Residual.update, {"k": one, "v": y}, weights=(start[:1].mT,))[0].mT
    return (
        holds("streams against the unrolled sum", gap(last, unrolled + product @ start), 1e-11),
        holds("one stream against x + sum of f", gap(stream[-1, 0], start[0] + y.sum(0)), 1e-12),
        holds("one stream against the residual's tuple", gap(stream, residual), 0.0),
    )


@claim(
    "G02",
    "On the flattened state the mixing is the same n x n block for every feature: vec(A X) = (I kron A) vec X.",
    Verdict.CONDITIONAL,
    BLOG(_DEPTH + ", hyper-connections as heads"),
    "axes.depth.HyperConnections",
    conditions="one block shared by all features, a state that grows to n d; heads split a state and have a block each",
    derivation="Column j of A X is A times column j of X. Blocks that differ by feature are no A X.",
)
def G02(draw: Draw) -> tuple[Finding, ...]:
    n, d = 3, 4
    a, x = draw.normal(n, n), draw.normal(n, d)
    zero = {"post": torch.zeros(1, n, dtype=torch.float64), "y": torch.zeros(1, d, dtype=torch.float64)}
    mixed = _layers(HyperConnections.update, a[None], zero["post"], zero["y"], x)[-1]
    whole = torch.kron(torch.eye(d, dtype=torch.float64), a)
    own = torch.block_diag(*draw.normal(d, n, n))
    per_head = (own @ x.mT.flatten()).reshape(d, n).mT
    best = torch.linalg.lstsq(x.mT, per_head.mT).solution.mT @ x
    return (
        holds("vec(A X) against (I kron A) vec X", gap(mixed.mT.flatten(), whole @ x.mT.flatten()), 1e-13),
        breaks("blocks that differ by feature: distance to the nearest A X", gap(per_head, best), 1e-2),
    )


@claim(
    "G03",
    "Sinkhorn's mixing matrix is the entropic projection of exp(logits) on the doubly stochastic matrices.",
    Verdict.EXACT,
    BLOG(_DEPTH + ", Sinkhorn mixing"),
    "axes.geometry.Birkhoff (the link of axes.depth.MHC)",
    derivation="The minimiser of KL(B | e^X) over unit row and column sums has log B - X = u 1^T + 1 v^T; alternating "
    "normalisation changes log B by exactly such terms.",
    figure="sinkhorn",
)
def G03(draw: Draw) -> tuple[Finding, ...]:
    n = 5
    x = draw.normal(n, n)
    link = MHC.update.parts().monoid.link  # type: ignore[attr-defined]
    assert isinstance(link, Birkhoff)
    b = Birkhoff(500).primal(x)
    slack = b.log() - x
    centred = slack - slack.mean(0, keepdim=True) - slack.mean(1, keepdim=True) + slack.mean()
    start = torch.full((n * n,), 1 / n, dtype=torch.float64).numpy()
    logits = x.flatten().numpy()
    rows = torch.cat((torch.kron(torch.eye(n), torch.ones(1, n)), torch.kron(torch.ones(1, n), torch.eye(n)))).numpy()

    solved = optimize.minimize(
        lambda w: float((w * (np.log(w) - logits) - w).sum()),
        start,
        jac=lambda w: np.log(w) - logits,
        method="SLSQP",
        bounds=[(1e-9, None)] * (n * n),
        constraints={"type": "eq", "fun": lambda w: rows[:-1] @ w - 1, "jac": lambda w: rows[:-1]},
        options={"maxiter": 500, "ftol": 1e-14},
    ).x
    ones = torch.ones(n, dtype=torch.float64)
    return (
        holds("optimality: log B - X beyond row and column terms", centred.abs().max(), 1e-10),
        holds("row and column sums against 1", max(gap(b.sum(0), ones), gap(b.sum(1), ones)), 1e-10),
        holds("against a constrained solver", gap(b, torch.from_numpy(solved).reshape(n, n)), 1e-4),
        holds(
            "mHC's link reaches it in its own iterations", gap(link.primal(x / 4), Birkhoff(500).primal(x / 4)), 1e-6
        ),
    )


@claim(
    "G04",
    "A finite number of Sinkhorn iterations approaches the doubly stochastic limit B by the factor sigma_2(B)^2 each.",
    Verdict.APPROXIMATE,
    BLOG(_DEPTH + ", Sinkhorn mixing"),
    "axes.geometry.Birkhoff",
    derivation="Linearised at B, one pair of normalisations multiplies the column error by B^T B on the mean-free "
    "space. "
    "Rows are normalised last and are exact.",
    figure="sinkhorn",
)
def G04(draw: Draw) -> tuple[Finding, ...]:
    x = draw.normal(5, 5)
    ones = torch.ones(5, dtype=torch.float64)
    limit = Birkhoff(2000).primal(x)
    rate = float(torch.linalg.svdvals(limit)[1]) ** 2
    errors = [float((Birkhoff(k).primal(x).sum(0) - ones).norm()) for k in range(1, 40)]
    late = [b / a for a, b in zip(errors, errors[1:], strict=False) if b > 1e-11]
    return (
        within("contraction per iteration over sigma_2^2", late[-1] / rate if late else math.nan, 0.9, 1.1),
        within(
            "row sums less 1 after three iterations", float((Birkhoff(3).primal(x).sum(1) - 1).abs().max()), 0.0, 1e-14
        ),
    )


@claim(
    "G05",
    "Half an iteration of Sinkhorn is the softmax of every row: the same entropy that normalises attention.",
    Verdict.EXACT,
    BLOG(_DEPTH + ", Sinkhorn mixing"),
    "axes.geometry.Birkhoff, axes.geometry.Entropic",
    derivation="Normalising the rows of exp(X) is the softmax. Where the columns of exp(X) already have equal sums, "
    "one "
    "iteration is that half alone.",
)
def G05(draw: Draw) -> tuple[Finding, ...]:
    x = draw.normal(4, 4)
    level = x - x.logsumexp(0, keepdim=True)  # the column half done: the row half is left
    return (
        holds(
            "one iteration after level columns against softmax",
            gap(Birkhoff(1).primal(x), torch.softmax(level, -1)),
            1e-14,
        ),
        holds(
            "entropic geometry of rows against exp over its sum",
            gap(Entropic("row").primal(x), x.exp() / x.exp().sum(-1, keepdim=True)),
            1e-14,
        ),
    )


def _mixers(draw: Draw, layers: int, n: int = 4) -> Tensor:
    return Birkhoff(200).primal(draw.normal(layers, n, n))


@claim(
    "G06",
    "All eigenvalues of a doubly stochastic mixing matrix are below one in modulus.",
    Verdict.FALSE,
    BLOG(_DEPTH + ", spectral stalling"),
    "axes.geometry.Birkhoff",
    kind="MATH",
    correction="The largest is always exactly 1, on the mean of the streams; those below it contract the differences, "
    "unless the matrix is a permutation, whose eigenvalues all have modulus 1.",
    derivation="B 1 = 1. For positive entries Perron and Frobenius put every other eigenvalue strictly inside the "
    "circle.",
)
def G06(draw: Draw) -> tuple[Finding, ...]:
    b = _mixers(draw, 8)
    moduli = torch.linalg.eigvals(b).abs().sort(-1, descending=True).values
    swap = torch.eye(4, dtype=torch.float64)[torch.tensor([1, 2, 3, 0])]
    return (
        breaks("largest modulus", float(moduli[:, 0].min()), 1 - 1e-9),
        breaks("smallest modulus of a permutation", float(torch.linalg.eigvals(swap).abs().min()), 1 - 1e-12),
        holds("largest modulus against 1", gap(moduli[:, 0], torch.ones(8).double()), 1e-10),
        holds("second modulus beyond 1 (positive entries)", max(float(moduli[:, 1].max()) - 1 + 1e-6, 0.0), 0.0),
        holds("spectral norm against 1", gap(torch.linalg.matrix_norm(b, 2), torch.ones(8).double()), 1e-9),
    )


@claim(
    "G07",
    "Deep products of doubly stochastic mixers forget the differences between streams geometrically; orthogonal ones "
    "keep "
    "them, a scalar gate loses them slowly.",
    Verdict.STATISTICAL,
    BLOG(_DEPTH + ", spectral stalling"),
    "axes.depth.MHC, axes.depth.JPmHC",
    derivation="The product tends to the mean, 1 1^T / n, at the rate of the product of second singular values.",
    seeds=5,
    figure="gain",
)
def G07(draw: Draw) -> tuple[Finding, ...]:
    layers, n = 40, 4
    zero, none = torch.zeros(layers, n, dtype=torch.float64), torch.zeros(layers, 3, dtype=torch.float64)
    start = torch.eye(n, 3, dtype=torch.float64)
    start = start - start.mean(0)
    link = lambda h: StateUpdate(Alignment(), monoid=GeneralLinear(Per("mix", "mix", "real"), h))  # noqa: E731
    logits = draw.normal(layers, n, n)
    birkhoff = _layers(link(Birkhoff(100)), logits, zero, none, start)
    turning = _layers(link(Cayley()), logits, zero, none, start)
    size = torch.linalg.matrix_norm(birkhoff, 2)
    slope = float((size[9].log() - size[0].log()) / 9)
    mean_free = float(size[-1])
    spread = torch.linalg.svdvals(turning[-1]) - torch.linalg.svdvals(start)
    return (
        within("log of the differences per layer, doubly stochastic", slope, -3.0, -0.3),
        within("differences after 40 layers, doubly stochastic", mean_free, 0.0, 1e-8),
        within("change of singular values after 40 layers, orthogonal", float(spread.abs().max()), 0.0, 1e-12),
        within("a scalar gate of 0.9 after 40 layers", 0.9**40, 0.0147, 0.0149),
    )


@claim(
    "G08",
    "Cayley mixing reaches every orthogonal matrix.",
    Verdict.FALSE,
    BLOG(_TAXONOMY + ", JPmHC"),
    "axes.geometry.Cayley (the link of axes.depth.JPmHC)",
    kind="OVER",
    correction="It reaches the rotations without eigenvalue -1, a dense set of SO(n); reflections and half turns are "
    "outside.",
    derivation="Eigenvalues of a skew A are i mu, those of the image (1 - i mu) / (1 + i mu): conjugate pairs, never "
    "-1.",
)
def G08(draw: Draw) -> tuple[Finding, ...]:
    r = _CAYLEY.primal(draw.normal(200, 4, 4))
    mirror = torch.diag(torch.tensor([-1.0, 1, 1, 1], dtype=torch.float64))
    nearest = torch.linalg.matrix_norm(r - mirror).min()
    gate = JPmHC.update.parts().monoid
    assert isinstance(gate, GeneralLinear) and isinstance(gate.link, Cayley)
    eigenvalues = torch.linalg.eigvals(_CAYLEY.primal(draw.normal(200, 4, 4)))
    # every rotation without eigenvalue -1 is reached: its own Cayley transform is skew
    target = torch.linalg.matrix_exp(0.7 * (lambda s: s - s.mT)(draw.normal(4, 4)))
    eye = torch.eye(4, dtype=torch.float64)
    skew = torch.linalg.solve(eye + target, eye - target)
    return (
        breaks("distance of 200 draws to a reflection", float(nearest), 1.0),
        breaks("distance of eigenvalues to -1", float((eigenvalues + 1).abs().min()), 1e-9),
        holds("determinant against 1", gap(torch.linalg.det(r), torch.ones(200).double()), 1e-10),
        holds("a rotation without eigenvalue -1 is reached", gap(_CAYLEY.primal(-skew), target), 1e-8),
    )


@claim(
    "G09",
    "Cayley mixing is the Euclidean projection on the orthogonal matrices, as Muon's polar factor is.",
    Verdict.FALSE,
    BLOG(_DEPTH + ", orthogonal mixing"),
    "axes.geometry.Cayley, axes.geometry.Spectral",
    kind="MATH",
    correction="It is a retraction: it agrees with the polar factor to second order near the identity and is farther "
    "away "
    "elsewhere. The polar factor is the projection.",
    derivation="With I + A the polar factor is exp of the skew part up to third order, and so is Cayley's map of it; "
    "far "
    "from the identity the nearest orthogonal matrix is U V^T, which depends on the symmetric part too.",
)
def G09(draw: Draw) -> tuple[Finding, ...]:
    from axes.core.geometry import Spectral

    x = draw.normal(4, 4) * 2
    polar = torch.from_numpy(linalg.polar(x.numpy())[0])
    nearest = float(torch.linalg.matrix_norm(x - polar))
    retracted = min(float(torch.linalg.matrix_norm(x - _CAYLEY.primal(s * x))) for s in (1.0, -1.0))
    skew = x - x.mT
    eye = torch.eye(4, dtype=torch.float64)
    # scale 1: A = -(H - H^T) / 2, and (I - A/2)-form: H = eps K / 2 moves I by eps K to first order
    errors = [
        float(
            torch.linalg.matrix_norm(
                _CAYLEY.primal(e * skew / 2) - torch.from_numpy(linalg.polar((eye + e * skew).numpy())[0])
            )
        )
        for e in (1e-2, 1e-3)
    ]
    order = math.log10(errors[0] / errors[1])
    return (
        breaks("how much farther than the projection", retracted - nearest, 0.05),
        holds("pseudo-polar geometry against scipy", gap(Spectral("polar").primal(x), polar), 1e-10),
        within("order of agreement at the identity", order, 2.9, 3.1),
    )


@claim(
    "G10",
    "Orthogonal mixing is an isometry of the streams at any depth.",
    Verdict.EXACT,
    BLOG(_DEPTH + ", dynamical isometry"),
    "axes.depth.JPmHC",
    derivation="Products of orthogonal matrices are orthogonal. This is about the mixing at fixed coefficients, not "
    "about "
    "the sublayers.",
    figure="gain",
)
def G10(draw: Draw) -> tuple[Finding, ...]:
    layers, n = 40, 4
    gate = JPmHC.update.parts().monoid
    assert isinstance(gate, GeneralLinear)
    update = StateUpdate(Alignment(), monoid=gate)
    zero, none = torch.zeros(layers, n, dtype=torch.float64), torch.zeros(layers, n, dtype=torch.float64)
    out = _layers(update, 5 * draw.normal(layers, n, n), zero, none, torch.eye(n, dtype=torch.float64))
    return (
        holds(
            "singular values of 40 layers against 1", gap(torch.linalg.svdvals(out[-1]), torch.ones(n).double()), 1e-12
        ),
    )


@claim(
    "G11",
    "A residual matrix M <- A M + v k^T is the sequence axis' update.",
    Verdict.CONDITIONAL,
    BLOG(_DEPTH + ", residual matrix transformers"),
    "axes.core.state_update.StateUpdate with axes.monoids.GeneralLinear",
    conditions="after transposing the state: retention acts from the left there, so key and value change places",
    derivation="(A M + v k^T)^T = M^T A^T + k v^T.",
)
def G11(draw: Draw) -> tuple[Finding, ...]:
    layers, p, q = 5, 3, 4
    a, v, k, start = draw.normal(layers, p, p) / 2, draw.normal(layers, p), draw.normal(layers, q), draw.normal(p, q)
    update = StateUpdate(Alignment(), Euclidean(), GeneralLinear(Per("mix", "mix", "real")))
    m = start
    for one, value, key in zip(a, v, k, strict=True):
        m = one @ m + torch.outer(value, key)
    swapped = reference.run(update, {"k": v, "v": k, "mix": a}, weights=(start.mT,))[0][-1].mT
    square = draw.normal(layers, p)
    literal = reference.run(update, {"k": square, "v": v, "mix": a}, weights=(start[:, :p],))[0][-1]
    left = start[:, :p]
    for one, value, key in zip(a, v, square, strict=True):
        left = one @ left + torch.outer(value, key)
    return (
        holds("transposed state with key and value exchanged", gap(swapped, m), 1e-13),
        breaks("without the exchange (square state), distance", gap(literal, left), 1e-2),
    )


@claim(
    "G12",
    "Attention over the layers' outputs replaces the residual sum.",
    Verdict.CONDITIONAL,
    BLOG(_DEPTH + ", attention residuals"),
    "axes.memory.List with axes.geometry.Entropic",
    conditions="up to the factor 1/L: its weights lie on the simplex, and its memory is the list of all outputs",
    derivation="A zero query scores all outputs alike, so the read is their mean; the residual stream is their sum.",
)
def G12(draw: Draw) -> tuple[Finding, ...]:
    layers, d = 6, 5
    outputs, keys = draw.normal(layers, d), draw.normal(layers, d)
    update = StateUpdate(Alignment(), Entropic(), memory=List())
    still = {"k": keys, "v": outputs, "q": torch.zeros(layers, d, dtype=torch.float64)}
    read, state = reference.run(update, still)
    one = torch.ones(layers, 1, dtype=torch.float64)
    stream = reference.run(Residual.update, {"k": one, "v": outputs})[0][-1, :, 0]
    asked = reference.run(update, {**still, "q": 3 * draw.normal(layers, d)})[0]
    return (
        holds("zero query against the residual sum over L", gap(read[-1], stream / layers), 1e-14),
        holds("stored outputs against L", abs(state.theta[1].shape[-2] - layers), 0.0),
        breaks("zero query against the residual sum itself", gap(read[-1], stream), 1e-1),
        breaks("another query against the mean", gap(asked[-1], stream / layers), 1e-2),
    )


G13 = untestable(
    "G13",
    "Depth has no cost per step of its own, forgetting is harmful there, and positions need shared weights.",
    BLOG(_DEPTH),
    "definitions and advice; the part about forgetting that can be measured is G07",
)

CLAIMS = (G01, G02, G03, G04, G05, G06, G07, G08, G09, G10, G11, G12, G13)
