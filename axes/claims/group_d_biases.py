"""Group D, gates as biases: scalar decay and attention logits, the distance between positions, diagonal gates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds
from axes.claims.group_a_tools import layer_tuple
from axes.claims.group_d_tools import (
    NOTHING,
    additive,
    carried,
    causal,
    chain_gaps,
    distance,
    eye,
    softmax_rows,
    sums,
    weights,
)
from axes.claims.sources import BLOG
from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.derived import structure
from axes.core.geometry import Birkhoff
from axes.core.monoids import GeneralLinear, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.routes import dispatch
from axes.sequence.charts import Constant

_SECTION = "Retention and forgetting"
_TABLE = _SECTION + ", table of transition monoids"
_NORMALISED = StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(debias=True))


def accumulated(kernel: Tensor, log_gates: Tensor) -> Tensor:
    """Weights (T, T) of a decaying numerator over a decaying denominator, kernel (T, T) with the query in front.

    The kernel has no finite feature map, so that every query keeps its own memory with keys of width one.
    """
    length = kernel.shape[0]
    keys = kernel[..., None]  # (query, token, 1)
    signal = {"k": keys, "q": torch.ones_like(keys), "decay": log_gates.expand(length, length)}
    values = eye(length).expand(length, length, length)
    out = dispatch.run(_NORMALISED, {**signal, "v": values}, time=1)[0]
    return out[torch.arange(length), torch.arange(length)]


def _attended(draw: Draw, length: int = 20, d: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and their scaled logits."""
    q, k = draw.normal(length, d), draw.normal(length, d)
    return q, k, q @ k.mT / math.sqrt(d)


@claim(
    "D01",
    "A scalar forget gate is an additive bias on attention logits: softmax(q_t . k_j + sum_{j<s<=t} log a_s).",
    Verdict.EXACT,
    BLOG(_SECTION),
    "axes.sequence.FoX, axes.sequence.Mamba2",
    derivation="Numerator and denominator of the kernel exp(q . k) decay by the same a_s; exp(q_t . k_j) P = "
    "exp(q_t . k_j + log P). Without the exponential the gate multiplies the score: (q . k) P is no additive logit.",
)
def D01(draw: Draw) -> tuple[Finding, ...]:
    q, k, logits = _attended(draw)
    g = draw.uniform(20, low=0.05, high=1.0).log()
    attended = weights(layer_tuple("fox"), q=q, k=k, forget=g)
    edged = g.clone()
    edged[4], edged[9], edged[10] = 0.0, NOTHING, 0.0
    cut = weights(layer_tuple("fox"), q=q, k=k, forget=edged)
    linear = weights(layer_tuple("mamba2"), q=q, k=k, decay=g, dt=torch.ones_like(g))
    product = causal(q @ k.mT * sums(g).exp())
    return (
        holds("FoX against decayed accumulators of exp(q . k)", gap(attended, accumulated(logits.exp(), g)), 1e-12),
        holds("FoX against a softmax with the bias", gap(attended, softmax_rows(logits + sums(g))), 1e-12),
        holds("gates 0 and 1 against accumulators", gap(cut, accumulated(logits.exp(), edged)), 1e-12),
        holds("what a zero gate leaves of earlier tokens", cut[9:, :9].abs().max(), 0.0),
        holds("linear attention: (q . k) P", gap(linear, product), 1e-12),
        breaks("linear attention against q . k + log P", gap(linear, causal(q @ k.mT + sums(g))), 1.0),
    )


@claim(
    "D02",
    "With d = -log |P| the logit of attention with a forget gate is q_t . k_j + d(j, t).",
    Verdict.FALSE,
    BLOG(_SECTION + ", additive form"),
    "axes.sequence.FoX",
    correction="the distance is subtracted: q_t . k_j - d(j, t)",
    kind="NOTN",
    derivation="d >= 0 grows with the age of a pair. A gate forgets, so that old pairs must lose weight.",
)
def D02(draw: Draw) -> tuple[Finding, ...]:
    q, k, logits = _attended(draw)
    g = draw.uniform(20, low=0.3, high=0.95).log()
    d = -sums(g)
    attended = weights(layer_tuple("fox"), q=q, k=k, forget=g)
    blind = weights(layer_tuple("fox"), q=torch.zeros_like(q), k=k, forget=g)[-1]
    printed = softmax_rows(d)[-1]
    return (
        breaks("weights with + d", gap(attended, softmax_rows(logits + d)), 0.3),
        breaks(
            "q = 0 with + d: share of steps towards the present that lose weight", _share(printed.diff() < 0), 0.999
        ),
        holds("weights with - d", gap(attended, softmax_rows(logits - d)), 1e-12),
        holds("q = 0: share of steps towards the present at which FoX loses weight", _share(blind.diff() <= 0), 0.0),
    )


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


@claim(
    "D03",
    "For scalar gates in (0, 1] the distance -log P is non-negative, zero from t to t, additive along a chain, and "
    "asymmetric.",
    Verdict.EXACT,
    BLOG(_SECTION + ", properties of the distance"),
    "axes.sequence.FoX",
    derivation="d(j, t) is a sum of the terms -log a_s >= 0 over j < s <= t: sums over adjoining ranges add up. The "
    "way back would need gates 1/a_s, whose distance is -d. A gate above one makes the distance negative.",
)
def D03(draw: Draw) -> tuple[Finding, ...]:
    length = 14
    a = draw.uniform(length, low=0.05, high=1.0)
    keys = draw.normal(length, 3)
    p = weights(layer_tuple("fox"), q=torch.zeros_like(keys), k=keys, forget=a.log())
    past = torch.ones(length, length, dtype=torch.bool).tril()
    measured = torch.where(past, (p.diagonal()[:, None] / p).log(), 0.0).mT  # [j, t], from the layer's own weights
    product = torch.stack([torch.stack([a[j + 1 : t + 1].prod() for t in range(length)]) for j in range(length)])
    above = distance(carried(additive(Scalar(Per("a", domain="real"))), k=keys, a=torch.tensor(1.2).double()))
    return (
        holds("distance read off FoX against -log of the product", gap(measured, -product.log().triu()), 1e-12),
        holds("chain rule", chain_gaps(measured).abs().max(), 1e-12),
        holds("how far below zero", (-measured).clamp_min(0).max(), 1e-14),
        holds("d(t, t)", measured.diagonal().abs().max(), 0.0),
        breaks("asymmetry: no map of the monoid leads back", _refused(1 / float(a[1])), 1.0),
        breaks("gates of 1.2: how far below zero", -above.min(), math.log(1.2)),
    )


def _refused(gate: float) -> float:
    try:
        Scalar(gate)
    except IllegalUpdate:
        return 1.0
    return 0.0


@claim(
    "D04",
    "The distance -log |P| of every transition monoid obeys the chain rule d(j, t) = d(j, s) + d(s, t).",
    Verdict.FALSE,
    BLOG(_SECTION + ", properties of the distance"),
    "axes.sequence.GLA, axes.sequence.DeltaNet, axes.sequence.RWKV7, axes.core.monoids",
    correction="d(j, t) >= d(j, s) + d(s, t), the reverse triangle inequality; equality if the norm is multiplicative "
    "on the monoid (scalars, isometries), or channel by channel for diagonal gates",
    kind="MATH",
    derivation="|A B| <= |A| |B| for an operator norm. Equality needs that the direction which survives A best also "
    "survives B best. A matrix without constraint may even have norm above one, and a negative distance.",
)
def D04(draw: Draw) -> tuple[Finding, ...]:
    n, length = 4, 10
    k, ones = draw.unit(length, n), torch.ones(length, dtype=torch.float64)
    g = draw.uniform(length, n, low=0.3, high=1.0).log()
    delta, mix = layer_tuple("delta-net"), Per("mix", "mix", "real")
    logits = draw.normal(length, n, n)
    general = draw.normal(length, n, n) / math.sqrt(n)
    dplr = carried(layer_tuple("rwkv7"), k=k, decay=g, a=0.3 * draw.normal(length, n), b=0.5 * draw.normal(length, n))
    diagonal = carried(layer_tuple("gla"), k=k, decay=g)
    equal = {
        "scalar": carried(layer_tuple("mamba2"), k=k, decay=g[:, 0], dt=ones),
        "rotation": carried(additive(Rotation(Per("angle", "pair", "real"))), k=k, angle=draw.normal(length, n // 2)),
        "reflection": carried(layer_tuple("delta-net-reflective"), k=k, beta=2 * ones),
        "doubly stochastic": carried(additive(GeneralLinear(mix, Birkhoff(100))), k=k, mix=logits),
    }
    larger = {
        "diagonal": diagonal,
        "projections": carried(delta, k=k, beta=ones),
        "generalised Householder, 1/2": carried(delta, k=k, beta=0.5 * ones),
        "scalar times Householder": carried(layer_tuple("gated-delta-net"), k=k, beta=ones, decay=g[:, 0]),
        "diagonal plus low rank": dplr,
        "general linear": carried(additive(GeneralLinear(mix)), k=k, mix=general),
    }
    channels = -diagonal.diagonal(dim1=-2, dim2=-1).log()  # one distance per channel
    findings: list[Finding] = []
    for name, maps in equal.items():
        tolerance = 1e-8 if name == "doubly stochastic" else 1e-11  # Sinkhorn's sums are one up to its iterations
        findings.append(holds(f"{name}: chain rule", chain_gaps(distance(maps)).abs().max(), tolerance))
    for name, maps in larger.items():
        gaps = chain_gaps(distance(maps))
        findings += [
            breaks(f"{name}: chain rule", gaps.max(), 0.02),
            holds(f"{name}: how far below the reverse triangle inequality", (-gaps).clamp_min(0).max(), 1e-10),
        ]
    per_channel = torch.stack([chain_gaps(channels[..., c]).abs().max() for c in range(n)])
    return (
        *findings,
        breaks("general linear: how far the distance falls below zero", -distance(larger["general linear"]).min(), 0.1),
        holds("diagonal, channel by channel: chain rule", per_channel.max(), 1e-11),
    )


@claim(
    "D05",
    "The distance -log |P| tells positions apart for every monoid of the table.",
    Verdict.FALSE,
    BLOG(_TABLE),
    "axes.sequence.DeltaNet, axes.sequence.DeltaNetReflective, axes.monoids.Rotation, axes.monoids.GeneralLinear",
    correction="the distance is zero for isometries and doubly stochastic maps, and for the delta rule up to t - j = "
    "d_k - 1; the map itself, as in k_j . P q_t, carries the position",
    kind="MATH",
    derivation="Isometries have norm one, and so have doubly stochastic matrices (they keep the vector of ones). Fewer "
    "than d_k keys leave a direction that no projection touches; d_k orthonormal ones leave nothing and d is infinite.",
)
def D05(draw: Draw) -> tuple[Finding, ...]:
    n, length = 6, 9
    k, ones = draw.unit(length, n), torch.ones(length, dtype=torch.float64)
    angle = draw.uniform(length, n // 2, low=0.2, high=1.5)
    mix = draw.normal(length, n, n)
    maps = {
        "rotations": carried(additive(Rotation(Per("angle", "pair", "real"))), k=k, angle=angle),
        "reflections": carried(layer_tuple("delta-net-reflective"), k=k, beta=2 * ones),
        "doubly stochastic": carried(additive(GeneralLinear(Per("mix", "mix", "real"), Birkhoff(100))), k=k, mix=mix),
    }
    j, t = torch.combinations(torch.arange(length + 1), 2).unbind(-1)
    findings: list[Finding] = []
    for name, p in maps.items():
        d = distance(p)[j, t]
        findings += [
            breaks(f"{name}: share of pairs of positions at distance zero", _share(d.abs() < 1e-8), 1.0),
            breaks(f"{name}: least |P - I| of two positions", (p[j, t] - eye(n)).norm(dim=(-2, -1)).min(), 0.02),
            holds(f"{name}: distance", d.abs().max(), 1e-8),
        ]
    projected = carried(layer_tuple("delta-net"), k=k, beta=ones)
    near = distance(projected)[j, t][t - j < n]
    orthonormal = carried(layer_tuple("delta-net"), k=draw.orthogonal(n), beta=torch.ones(n, dtype=torch.float64))
    q = draw.normal(length, n)
    read = weights(layer_tuple("delta-net"), q=q, k=k, beta=ones)
    scores = torch.einsum("jd,jtde,te->tj", k, projected[1:, 1:], q)
    return (
        *findings,
        breaks("delta rule: share of near pairs at distance zero", _share(near.abs() < 1e-12), 1.0),
        holds("delta rule, t - j < d_k: distance", near.abs().max(), 1e-12),
        holds("d_k orthonormal projections leave", orthonormal[0, -1].abs().max(), 1e-12),
        holds("weights of DeltaNet against k_j . P q_t", gap(read, causal(scores)), 1e-11),
    )


@claim(
    "D06",
    "A constant scalar decay, as in RetNet, is ALiBi.",
    Verdict.CONDITIONAL,
    BLOG(_TABLE + ", scalars"),
    "axes.sequence.ALiBi, axes.sequence.RetNet",
    conditions="the decayed kernel is exp(q . k) and normalised, gamma = exp(-m) with the same slope m, and no "
    "rotation acts besides",
    derivation="exp(q . k) gamma^(t-j) = exp(q . k - m (t - j)). The published constants differ: log gamma = log(1 - "
    "2^(-5-h)) against -2^(-8h/H), and the layer as published also rotates its keys and has no exponential.",
)
def D06(draw: Draw) -> tuple[Finding, ...]:
    heads, length = 8, 20
    slopes = Constant(learned=False, spacing="alibi").initial((heads,))
    retention = Constant(learned=False, spacing="retention").initial((heads,))
    h = draw.integer(0, heads - 1)
    q, k, logits = _attended(draw)
    bias, gamma = slopes[h].expand(length), retention[h].expand(length)
    ages = torch.arange(length)[:, None] - torch.arange(length)
    attended = weights(layer_tuple("alibi"), q=q, k=k, decay=bias)
    blind = weights(layer_tuple("alibi"), q=torch.zeros_like(q), k=k, decay=bias)
    still = weights(additive(Scalar("decay")), q=q, k=k, decay=bias)
    rotated = weights(layer_tuple("retnet"), q=q, k=k, decay=bias)
    published = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)], dtype=torch.float64)
    decays = torch.tensor([1 - 2.0 ** (-5 - i) for i in range(heads)], dtype=torch.float64)
    mask = torch.where(ages >= 0, (blind / blind.diagonal()[:, None]).log(), 0.0)
    return (
        holds("ALiBi against decayed accumulators", gap(attended, accumulated(logits.exp(), bias)), 1e-12),
        holds(
            "ALiBi against a softmax with -m (t - j)", gap(attended, softmax_rows(logits - published[h] * ages)), 1e-12
        ),
        holds("q = 0: log weights against (t - j) log gamma", gap(mask, causal(slopes[h] * ages)), 1e-12),
        holds("ALiBi's slopes", gap(-slopes, published), 1e-15),
        holds("RetNet's decays", gap(retention.exp(), decays), 1e-15),
        breaks("without the exponential: decay against the additive form", gap(still, causal(logits + mask)), 1.0),
        breaks("without the normaliser: decayed exp(q . k)", gap(attended, causal((logits + mask).exp())), 0.1),
        breaks("another slope: least ratio of the two published ones", (slopes / retention).min(), 10.0),
        breaks(
            "another slope: log weights with RetNet's constants",
            gap(mask, causal(gamma[:, None] * ages)),
            0.05,
        ),
        breaks("with RetNet's rotation: against decay alone", gap(rotated, still), 0.1),
    )


@claim(
    "D07",
    "Mamba-2 and GLA have diagonal transitions, and FoX is their positional encoding.",
    Verdict.FALSE,
    BLOG(_TABLE + ", diagonal matrices"),
    "axes.sequence.Mamba2, axes.sequence.GLA, axes.sequence.FoX",
    correction="constant scalar: RetNet and ALiBi; data-dependent scalar: Mamba-2 and FoX; diagonal: GLA, which has no "
    "counterpart by an additive bias",
    kind="LABEL",
    derivation="The gates of Mamba-2 and FoX are one number per head and token, so that a pair's weight is its score "
    "times a factor that no query sees. GLA's factor sum_c q_c k_c P_c / sum_c q_c k_c depends on the query.",
)
def D07(draw: Draw) -> tuple[Finding, ...]:
    length, d = 20, 4
    k, g = draw.uniform(length, d, low=0.3), draw.uniform(length, d, low=0.2).log()
    one, other = (draw.uniform(length, d, low=0.05) ** 2 for _ in range(2))

    def factors(name: str, q: Tensor, **rates: Tensor) -> Tensor:
        return causal(weights(layer_tuple(name), q=q, k=k, **rates) / (q @ k.mT))

    gla = [factors("gla", q, decay=g) for q in (one, other)]
    ssd = [factors("mamba2", q, decay=g[:, 0], dt=torch.ones(length, dtype=torch.float64)) for q in (one, other)]
    fox = weights(layer_tuple("fox"), q=torch.zeros_like(k), k=k, forget=g[:, 0])
    differ = (gla[0] - gla[1]).abs() / (gla[0] + gla[1]).clamp_min(1e-300)
    labelled = [structure(layer_tuple(n)) for n in ("mamba2", "gla", "fox")]
    return (
        breaks("how many of the three are derived not to be diagonal", sum(s != "diagonal" for s in labelled), 2.0),
        breaks("GLA: relative difference of the factors for two queries", differ.max(), 0.2),
        holds("Mamba-2: difference of the factors for two queries", gap(*ssd), 1e-12),
        holds("Mamba-2's factors against FoX's weights at q = 0", gap(ssd[0], fox / fox.diagonal()[:, None]), 1e-12),
        holds(
            "derived: Mamba-2 and FoX scalar, GLA diagonal", float(labelled != ["scalar", "diagonal", "scalar"]), 0.0
        ),
    )


@claim(
    "D08",
    "Commutative contractive monoids, diagonal gates among them, act as additive biases on the logits.",
    Verdict.FALSE,
    BLOG(_SECTION + ", additive and multiplicative forms"),
    "axes.sequence.GLA",
    correction="additive for gates of one dimension; diagonal gates add in the log domain channel by channel, sum_c "
    "q_c k_c exp(-d_c(j, t)), which is (Q * b)(K / b)^T under the causal mask",
    kind="MATH",
    derivation="A bias multiplies exp(score) by a factor of (j, t) alone. A diagonal gate weighs the channels of the "
    "score, so that the factor depends on the query.",
)
def D08(draw: Draw) -> tuple[Finding, ...]:
    length, d = 16, 4
    q, k = draw.uniform(length, d, low=0.05) ** 2, draw.uniform(length, d, low=0.3)
    g = draw.uniform(length, d, low=0.2).log()
    gla = layer_tuple("gla")
    maps = carried(gla, k=k, decay=g)
    steps = maps[torch.arange(length), torch.arange(1, length + 1)]
    score = weights(gla, q=q, k=k, decay=g)
    b = g.cumsum(0).exp()
    drift = torch.stack([sums(g[:, c]) for c in range(d)], -1)
    channels = [weights(gla, q=eye(d)[c].expand(length, d), k=k, decay=g)[-1] / k[:, c] for c in range(d)]
    bias = torch.stack(channels, -1).log()
    spread = (bias.amax(-1) - bias.amin(-1)).max()
    long = 300
    hard, keys, queries = draw.uniform(long, d, low=-6.0, high=-2.0), draw.normal(long, d), draw.normal(long, d)
    read = weights(gla, q=queries, k=keys, decay=hard)
    recent = torch.stack([(queries[t] * keys[t - 1] * hard[t].exp()).sum() for t in range(1, long)])
    return (
        breaks("the gate as a bias: spread of its logarithm over queries", spread, 0.5),
        breaks("the additive form q . k - d", gap(score, causal(q @ k.mT - distance(maps)[1:, 1:].mT)), 0.5),
        holds("diagonal gates commute", gap(steps[0] @ steps[1], steps[1] @ steps[0]), 1e-15),
        holds("they contract: excess of their norms over one", (-distance(steps)).clamp_min(0).max(), 1e-15),
        holds("GLA against (Q * b)(K / b)^T", gap(score, causal((q * b) @ (k / b).mT)), 1e-11),
        holds("channel by channel the logs add", gap(bias, drift[-1]), 1e-11),
        holds(
            "300 tokens, where 1 / b overflows: weights of the last pair but one", gap(read.diagonal(-1), recent), 1e-12
        ),
    )
