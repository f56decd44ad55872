"""Group D, gates and expressiveness: outer-product gates, products of Householder maps, state tracking, RWKV-7."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable
from axes.claims.group_a_tools import layer_tuple
from axes.claims.group_d_tools import additive, causal, effective_keys, eye, one_map, unit_rows, weights
from axes.claims.sources import BLOG, SLIDES
from axes.core import reference
from axes.core.derived import structure
from axes.core.monoids import DPLR, Diagonal, GeneralLinear, Hadamard, Householder, Product
from axes.core.rates import Per
from axes.routes import dispatch

_DECAY = "Linear attention with more fine-grained decay"
_EXPRESSIVE = "DeltaNet's expressiveness"


def _run(update_monoid: Product, **signal: Tensor) -> Tensor:
    return dispatch.run(additive(update_monoid), {n: x[None] for n, x in signal.items()}, time=1)[0][0]


@claim(
    "D17",
    "A gate G_t = beta_t alpha_t^T on the entries of the state has a parallel form of matrix products.",
    Verdict.EXACT,
    SLIDES(_DECAY),
    "axes.monoids.Diagonal, axes.monoids.Product",
    derivation="The gates of a channel multiply up to b_t c_t^T with b, c cumulative products. What pair s contributes "
    "is (b_t / b_s) v_s times (c_t / c_s) k_s: O = B * [((Q * C)(K / C)^T under the mask)(V / B)]. Long sequences need "
    "the quotients as differences of logs.",
)
def D17(draw: Draw) -> tuple[Finding, ...]:
    gates = Product((Diagonal("alpha"), Diagonal("beta", side="row")))
    d_k, d_v = 5, 4

    def signal(length: int, low: float, high: float) -> dict[str, Tensor]:
        return {
            "q": draw.normal(length, d_k),
            "k": draw.normal(length, d_k),
            "v": draw.normal(length, d_v),
            "alpha": draw.uniform(length, d_k, low=low, high=high),
            "beta": draw.uniform(length, d_v, low=low, high=high),
        }

    s = signal(24, -0.4, 0.0)
    c, b = s["alpha"].exp().cumprod(0), s["beta"].exp().cumprod(0)
    products = b * (causal((s["q"] * c) @ (s["k"] / c).mT) @ (s["v"] / b))
    summed = torch.zeros(24, d_v, dtype=torch.float64)
    for t in range(24):
        for i in range(t + 1):
            kept = s["k"][i] * s["alpha"][i + 1 : t + 1].sum(0).exp()
            summed[t] += s["v"][i] * s["beta"][i + 1 : t + 1].sum(0).exp() * (kept @ s["q"][t])
    out = _run(gates, **s)
    long = signal(150, -9.0, -4.0)  # 1 / c overflows long before the end
    direct = reference.run(additive(gates), long)[0]
    overflow = (1 / long["alpha"].exp().cumprod(0)).isinf().double().max()
    return (
        holds("against the products of matrices", gap(out, products), 1e-11),
        holds("against the sum over pairs", gap(out, summed), 1e-11),
        holds("150 tokens by chunks in logs against the recurrence", gap(_run(gates, **long), direct), 1e-11),
        breaks("150 tokens: the quotients overflow", overflow, 1.0),
    )


@claim(
    "D18",
    "Mamba-1's gate exp(Delta_i A_in) is not an outer product.",
    Verdict.EXACT,
    SLIDES(_DECAY + ", Mamba-1"),
    "axes.monoids.Hadamard",
    derivation="Its logarithm is an outer product if the rows of A agree; the exponential of entries is not, since "
    "G_11 G_22 = G_12 G_21 would need (Delta_1 - Delta_2)(a_1 - a_2) = 0. With one number per row (Mamba-2) it is one.",
)
def D18(draw: Draw) -> tuple[Finding, ...]:
    n, m = 6, 5
    delta = torch.linspace(0.1, 2.0, n, dtype=torch.float64) * draw.uniform(n, low=0.9, high=1.1)
    row = -torch.arange(1, m + 1, dtype=torch.float64) * draw.uniform(1, low=0.8, high=1.2)

    def gate(a: Tensor) -> Tensor:
        """What one datum without a value leaves of a state of ones."""
        update, logs = additive(Hadamard("decay")), delta[:, None] * a
        datum = {"k": draw.normal(m), "v": torch.zeros(n, dtype=torch.float64), "decay": logs}
        return update.step(update.init(datum, (torch.ones(n, m, dtype=torch.float64),)), datum)[0].theta[0]

    alike, free = gate(row.expand(n, m)), gate(-draw.uniform(n, m, low=0.5, high=5.0))
    scalar = gate(row[0].expand(n, m))
    second = [torch.linalg.svdvals(x)[:2] for x in (alike, free, scalar, alike.log())]
    ratios = [float(x[1] / x[0]) for x in second]
    return (
        holds("gate against torch's exponential", gap(alike, torch.special.expm1(delta[:, None] * row) + 1), 1e-14),
        holds("rank below two, rows of A alike: 0 or 1", float(torch.linalg.matrix_rank(alike) < 2), 0.0),
        holds("rank below two, A free: 0 or 1", float(torch.linalg.matrix_rank(free) < 2), 0.0),
        breaks("second over first singular value, rows of A alike", ratios[0], 0.02),
        breaks("second over first singular value, A free", ratios[1], 0.02),
        holds("one number per row: the same ratio", ratios[2], 1e-14),
        holds("rows alike: the same ratio of the log gates", ratios[3], 1e-14),
    )


def reflections(q: Tensor) -> list[tuple[Tensor, Tensor]]:
    """At most n pairs (w, beta) of reflections whose product is an orthogonal q (n, n)."""
    n, rest, found = q.shape[0], q.clone(), []
    for i in range(n):
        w = rest[:, i] - eye(n)[i]
        if float(w.norm()) < 1e-7:
            continue
        w = w / w.norm()
        rest = rest - 2 * torch.outer(w, w @ rest)
        found.append((w, torch.tensor(2.0, dtype=torch.float64)))
    return found


def product_of(name: str, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The product of maps I - beta k k^T as a layer forms it from the identity."""
    k, beta = torch.stack([f[0] for f in factors]), torch.stack([f[1] for f in factors])
    start = eye(k.shape[-1])
    signal = {"k": k[None], "q": k[None], "v": torch.zeros_like(k)[None], "beta": beta[None]}
    return dispatch.run(layer_tuple(name), signal, time=1, weights=(start[None],))[1].theta[0][0]


@claim(
    "D19",
    "Products of generalised Householder maps with beta |k|^2 up to 2 represent every matrix of spectral norm at most "
    "one.",
    Verdict.EXACT,
    SLIDES(_EXPRESSIVE),
    "axes.sequence.DeltaNetReflective",
    derivation="A = U Sigma V^T: an orthogonal matrix is a product of at most n reflections, and Sigma is the product "
    "of n maps I - (1 - sigma_i) e_i e_i^T. At most 3n factors, for norm one as well.",
)
def D19(draw: Draw) -> tuple[Finding, ...]:
    n = draw.integer(2, 6)
    findings: list[Finding] = []
    for name, top in (("norm below one", 0.9), ("norm one", 1.0)):
        sigma = draw.uniform(n) * top
        sigma[0] = top
        u, v = draw.orthogonal(n), draw.orthogonal(n)
        wanted = u * sigma @ v.mT
        scalings = [(eye(n)[i], 1 - sigma[i]) for i in range(n)]
        factors = [*reflections(u), *scalings, *reflections(v.mT.contiguous())]
        spectrum = torch.stack([1 - f[1] * (f[0] @ f[0]) for f in factors])
        findings += [
            holds(
                f"{name}: product that the layer forms", gap(product_of("delta-net-reflective", factors), wanted), 1e-12
            ),
            holds(f"{name}: factors beyond 3 n", max(0.0, len(factors) - 3.0 * n), 0.0),
            holds(f"{name}: eigenvalues outside of [-1, 1]", (spectrum.abs() - 1).clamp_min(0).max(), 1e-14),
        ]
    return tuple(findings)


def nearest_product(draw: Draw, target: Tensor, factors: int, top: float, restarts: int) -> list[tuple[Tensor, Tensor]]:
    """The product of plane maps I - beta k k^T, beta in [0, top], closest to a target, by L-BFGS from many starts."""
    angles = (math.pi * draw.uniform(restarts, factors)).requires_grad_()
    raw = draw.normal(restarts, factors).requires_grad_()
    search = torch.optim.LBFGS(
        [angles, raw], max_iter=150, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def distances() -> Tensor:
        k = torch.stack((angles.cos(), angles.sin()), -1)
        maps = eye(2) - (top * torch.sigmoid(raw))[..., None, None] * k[..., :, None] * k[..., None, :]
        p = maps[:, 0]
        for i in range(1, factors):
            p = p @ maps[:, i]
        return (p - target).square().sum((-2, -1))

    def closure() -> Tensor:
        search.zero_grad()
        loss = distances().sum()
        loss.backward()
        return loss

    search.step(closure)
    best = int(distances().argmin())
    with torch.no_grad():
        k = torch.stack((angles[best].cos(), angles[best].sin()), -1)
        return list(zip(k, top * torch.sigmoid(raw[best]), strict=True))


@claim(
    "D20",
    "Without negative eigenvalues, beta |k|^2 in [0, 1], products of such maps miss isometries: a quarter turn among "
    "them.",
    Verdict.EXACT,
    SLIDES(_EXPRESSIVE + ", negative eigenvalues"),
    "axes.sequence.DeltaNet, axes.sequence.DeltaNetReflective",
    derivation="det = prod (1 - beta_s |k_s|^2) lies in [0, 1] and is one only if every beta is zero: the only "
    "isometry is the identity. The best products approach a quarter turn in one direction and erase the other, at "
    "squared distance one; two reflections make the turn exactly.",
    seeds=2,
)
def D20(draw: Draw) -> tuple[Finding, ...]:
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    d, n = 4, 5
    k, beta = draw.unit(n, d), draw.uniform(n)
    drawn = product_of("delta-net", list(zip(k, beta, strict=True)))
    narrow = product_of("delta-net", nearest_product(draw, turn, 12, 1.0, 8))
    wide = product_of("delta-net-reflective", nearest_product(draw, turn, 12, 2.0, 4))
    half, two = math.pi / 4, torch.tensor(2.0, dtype=torch.float64)
    mirrors = [torch.tensor([math.cos(x), math.sin(x)], dtype=torch.float64) for x in (half, 0.0)]
    mirrored = product_of("delta-net-reflective", [(m, two) for m in mirrors])
    found = (narrow - turn).square().sum()
    singular = torch.linalg.svdvals(drawn)
    return (
        holds("determinant against prod (1 - beta)", (torch.linalg.det(drawn) - (1 - beta).prod()).abs(), 1e-13),
        holds("how far the least stretch exceeds (1 - max beta)^(1/d)", _excess(singular[-1], beta, d), 1e-12),
        holds("best of 12 factors in [0, 1]: how far below squared distance 1", (1 - found).clamp_min(0), 0.0),
        breaks("best of 12 factors in [0, 1]: squared distance", found, 1.0),
        holds("best of 12 factors in [0, 2]: squared distance", (wide - turn).square().sum(), 1e-6),
        holds("two reflections against the quarter turn", gap(mirrored, turn), 1e-14),
    )


def _excess(least: Tensor, beta: Tensor, d: int) -> Tensor:
    """The least singular value to the d-th power is at most the determinant, hence at most 1 - max beta."""
    return (least**d - (1 - beta.max())).clamp_min(0)


def _cycles(p: tuple[int, ...]) -> list[list[int]]:
    seen: set[int] = set()
    out = []
    for i in range(len(p)):
        cycle = []
        while i not in seen:
            seen.add(i)
            cycle.append(i)
            i = p[i]
        if len(cycle) > 1:
            out.append(cycle)
    return out


@claim(
    "D21",
    "Reflections track states: one per token counts parity, and n - 1 of them reach every permutation of n symbols.",
    Verdict.EXACT,
    SLIDES("State tracking performance; DeltaProduct"),
    "axes.sequence.DeltaNetReflective",
    derivation="S (I - 2 x e e^T) changes the sign along e if the bit x is one. The reflection by e_i - e_j swaps two "
    "symbols, a cycle of m symbols takes m - 1 swaps, and one generalised Householder map differs from I by rank one: "
    "it reaches the swaps only.",
    seeds=1,
)
def D21(draw: Draw) -> tuple[Finding, ...]:
    bits = torch.tensor(list(itertools.product((0.0, 1.0), repeat=12)), dtype=torch.float64)
    unit = torch.ones(*bits.shape, 1, dtype=torch.float64)
    signal = {"k": unit, "q": unit, "v": 0 * unit, "beta": 2 * bits}
    start = torch.ones(len(bits), 1, 1, dtype=torch.float64)
    parity = reference.run(layer_tuple("delta-net-reflective"), signal, time=1, weights=(start,))[0][..., 0]
    counted = 1 - 2 * (bits.cumsum(-1) % 2)  # every prefix: all strings of up to 12 bits
    wrong, most, single = 0.0, 0, 0
    for p in itertools.permutations(range(4)):
        target = eye(4)[:, list(p)]  # column i is e_{p(i)}
        swaps = [(c[0], x) for c in _cycles(p) for x in reversed(c[1:])]
        steps = [(eye(4)[i] - eye(4)[j], torch.tensor(1.0, dtype=torch.float64)) for i, j in swaps]
        wrong = max(wrong, gap(product_of("delta-net-reflective", steps) if steps else eye(4), target))
        most, single = max(most, len(steps)), single + int(torch.linalg.matrix_rank(target - eye(4)) <= 1)
    return (
        holds("parity of all strings of up to 12 bits", gap(parity, counted), 0.0),
        holds("all 24 permutations of 4 symbols", wrong, 0.0),
        holds("reflections used beyond 3", max(0.0, most - 3.0), 0.0),
        holds("permutations within one map: the identity and 6 swaps", abs(single - 7.0), 0.0),
    )


@claim(
    "D22",
    "RWKV-7's transition is a diagonal times a Householder map, and diagonal plus low rank.",
    Verdict.CONDITIONAL,
    BLOG("Taxonomy, RWKV-7"),
    "axes.sequence.RWKV7",
    conditions="the diagonal acts first and the low-rank part is tied to it, a = -beta D k and b = k; diagonal plus "
    "low rank is the larger set; its first part is diagonal, not any matrix",
    derivation="D (I - beta k k^T) = D - (beta D k) k^T. The other order has -beta k (D k)^T, and D^-1 (A - D) is "
    "symmetric only if a is parallel to D b. With a dense matrix in D's place no diagonal algebra is left for chunks.",
)
def D22(draw: Draw) -> tuple[Finding, ...]:
    length, d = 12, 5
    q, k, w = draw.normal(length, d), draw.normal(length, d), draw.unit(length, d)
    g, beta = draw.uniform(length, d, low=0.3).log(), draw.uniform(length, low=0.3, high=1.5)
    tied = -beta[:, None] * g.exp() * w
    rwkv = weights(layer_tuple("rwkv7"), q=q, k=k, decay=g, a=tied, b=w)
    both = additive(Product((Diagonal("decay"), Householder(Per("beta")))))
    swapped = additive(Product((Householder(Per("beta")), Diagonal("decay"))))
    rates = {"decay": g, "beta": beta, "w": w}
    other = weights(swapped, q=q, k=k, **rates)
    mirrored = weights(additive(DPLR("decay")), q=q, k=k, decay=g, a=-beta[:, None] * w, b=g.exp() * w)
    free = one_map(layer_tuple("rwkv7"), k=k[0], decay=g[0], a=draw.unit(d), b=draw.unit(d))
    rest = (free - torch.diag(g[0].exp())) / g[0].exp()[:, None]  # D^-1 (A - D)
    dense = Product((GeneralLinear(Per("mix", "mix", "real")), Householder(Per("beta"))))
    return (
        holds("product against RWKV-7 with tied vectors", gap(weights(both, q=q, k=k, **rates), rwkv), 1e-11),
        holds("the other order against its own low rank", gap(other, mirrored), 1e-11),
        breaks("the other order against RWKV-7", gap(other, rwkv), 0.05),
        breaks("free vectors: D^-1 (A - D) is not symmetric", gap(rest, rest.mT), 0.05),
        breaks("a dense first part: the derived structure is dense", float(structure(additive(dense)) == "dense"), 1.0),
        holds("diagonal first part: derived to be diagonal plus low rank", float(structure(both) != "dplr"), 0.0),
    )


@claim(
    "D23",
    "Data-dependent gates reshape the geometry of the keys: DeltaNet orthogonalises, Mamba attenuates dimensions.",
    Verdict.CONDITIONAL,
    BLOG("Retention and forgetting, data-independent and data-dependent transitions"),
    "axes.sequence.DeltaNet, axes.sequence.GLA, axes.sequence.Mamba2",
    conditions="orthogonal to the last key only, not to one another; single dimensions only for a gate per channel, "
    "which Mamba-2 has not",
    derivation="k~_j = A_N ... A_{j+1} k_j. A projection makes everything orthogonal to its own key and the next one "
    "undoes part of it; a diagonal gate multiplies every channel by its own product, a scalar one all by the same.",
)
def D23(draw: Draw) -> tuple[Finding, ...]:
    length, d = 8, 12
    k, ones = draw.unit(length, d), torch.ones(length, dtype=torch.float64)
    g = draw.uniform(length, d, low=0.3).log()
    erased = effective_keys(layer_tuple("delta-net"), k=k, beta=ones)
    channels = effective_keys(layer_tuple("gla"), k=k, decay=g)
    faded = effective_keys(layer_tuple("mamba2"), k=k, decay=g[:, 0], dt=ones)
    kept = torch.stack([k[j] * g[j + 1 :].exp().prod(0) for j in range(length)])
    others = unit_rows(erased[:-1])
    cosines = (unit_rows(faded) * unit_rows(k)).sum(-1)
    return (
        holds("DeltaNet: stored keys times the last key", (erased[:-1] @ k[-1]).abs().max(), 1e-12),
        holds("diagonal gate: stored keys against rescaled channels", gap(channels, kept), 1e-12),
        breaks("DeltaNet: largest cosine of two stored keys", (others @ others.mT - eye(length - 1)).abs().max(), 0.02),
        breaks("Mamba-2: least cosine of a stored key and its raw one", cosines.min(), 1 - 1e-12),
    )


D24 = untestable(
    "D24",
    "Transformers and diagonal state space models stay within TC0, products of general matrices do not.",
    SLIDES("Transformers and SSMs in TC0; " + _EXPRESSIVE),
    "asymptotic circuit complexity, conditional on unproved separations; D20 and D21 are what is left at finite size",
)
