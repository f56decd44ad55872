"""Group D, gates as biases: scalar decay and attention logits, the distance between positions, diagonal gates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, holds
from axes.claims.tools.float64 import eye, ones, tensor
from axes.claims.tools.matrices import beyond
from axes.claims.tools.positions import (
    NOTHING,
    additive,
    carried,
    causal,
    chain_gaps,
    distance,
    refused,
    softmax_rows,
    sums,
    weights,
)
from axes.claims.tools.tuples import DELTA, GATED, GLA, MAMBA2, REFLECTIVE, layer_tuple
from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.derived import structure
from axes.core.geometry import Birkhoff
from axes.core.monoids import GeneralLinear, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.sequence.charts import Constant

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


@check
def D01(draw: Draw) -> Findings:
    q, k, logits = _attended(draw)
    g = draw.uniform(20, low=0.05, high=1.0).log()
    attended = weights(layer_tuple("fox"), q=q, k=k, forget=g)
    edged = g.clone()
    edged[4], edged[9], edged[10] = 0.0, NOTHING, 0.0
    cut = weights(layer_tuple("fox"), q=q, k=k, forget=edged)
    linear = weights(layer_tuple(MAMBA2), q=q, k=k, decay=g, dt=torch.ones_like(g))
    product = causal(q @ k.mT * sums(g).exp())
    yield agree("FoX against decayed accumulators of exp(q . k)", attended, accumulated(logits.exp(), g), 1e-12)
    yield agree("FoX against a softmax with the bias", attended, softmax_rows(logits + sums(g)), 1e-12)
    yield agree("gates 0 and 1 against accumulators", cut, accumulated(logits.exp(), edged), 1e-12)
    yield holds("what a zero gate leaves of earlier tokens", cut[9:, :9], 0.0)
    yield agree("linear attention: (q . k) P", linear, product, 1e-12)
    yield differ("linear attention against q . k + log P", linear, causal(q @ k.mT + sums(g)), 1.0)


@check
def D02(draw: Draw) -> Findings:
    q, k, logits = _attended(draw)
    g = draw.uniform(20, low=0.3, high=0.95).log()
    d = -sums(g)
    attended = weights(layer_tuple("fox"), q=q, k=k, forget=g)
    blind = weights(layer_tuple("fox"), q=torch.zeros_like(q), k=k, forget=g)[-1]
    losing, lost = _share(softmax_rows(d)[-1].diff() < 0), _share(blind.diff() <= 0)
    yield differ("weights with + d", attended, softmax_rows(logits + d), 0.3)
    yield breaks("q = 0 with + d: share of steps towards the present that lose weight", losing, 0.999)
    yield agree("weights with - d", attended, softmax_rows(logits - d), 1e-12)
    yield holds("q = 0: share of steps towards the present at which FoX loses weight", lost, 0.0)


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


@check
def D03(draw: Draw) -> Findings:
    length = 14
    a = draw.uniform(length, low=0.05, high=1.0)
    keys = draw.normal(length, 3)
    p = weights(layer_tuple("fox"), q=torch.zeros_like(keys), k=keys, forget=a.log())
    past = torch.ones(length, length, dtype=torch.bool).tril()
    measured = torch.where(past, (p.diagonal()[:, None] / p).log(), 0.0).mT  # [j, t], from the layer's own weights
    product = torch.stack([torch.stack([a[j + 1 : t + 1].prod() for t in range(length)]) for j in range(length)])
    above = distance(carried(additive(Scalar(Per("a", domain="real"))), k=keys, a=torch.tensor(1.2).double()))
    yield agree("distance read off FoX against -log of the product", measured, -product.log().triu(), 1e-12)
    yield holds("chain rule", chain_gaps(measured), 1e-12)
    yield holds("how far below zero", beyond(-measured), 1e-14)
    yield holds("d(t, t)", measured.diagonal(), 0.0)
    yield breaks("asymmetry: no map of the monoid leads back", refused(1 / float(a[1])), 1.0)
    yield breaks("gates of 1.2: how far below zero", -above.min(), math.log(1.2))


@check
def D04(draw: Draw) -> Findings:
    n, length = 4, 10
    k, one = draw.unit(length, n), ones(length)
    g = draw.uniform(length, n, low=0.3, high=1.0).log()
    delta, mix = layer_tuple(DELTA), Per("mix", "mix", "real")
    logits = draw.normal(length, n, n)
    general = draw.normal(length, n, n) / math.sqrt(n)
    dplr = carried(layer_tuple("rwkv7"), k=k, decay=g, a=0.3 * draw.normal(length, n), b=0.5 * draw.normal(length, n))
    diagonal = carried(layer_tuple(GLA), k=k, decay=g)
    equal = {
        "scalar": carried(layer_tuple(MAMBA2), k=k, decay=g[:, 0], dt=one),
        "rotation": carried(additive(Rotation(Per("angle", "pair", "real"))), k=k, angle=draw.normal(length, n // 2)),
        "reflection": carried(layer_tuple(REFLECTIVE), k=k, beta=2 * one),
        "doubly stochastic": carried(additive(GeneralLinear(mix, Birkhoff(100))), k=k, mix=logits),
    }
    larger = {
        "diagonal": diagonal,
        "projections": carried(delta, k=k, beta=one),
        "generalised Householder, 1/2": carried(delta, k=k, beta=0.5 * one),
        "scalar times Householder": carried(layer_tuple(GATED), k=k, beta=one, decay=g[:, 0]),
        "diagonal plus low rank": dplr,
        "general linear": carried(additive(GeneralLinear(mix)), k=k, mix=general),
    }
    channels = -diagonal.diagonal(dim1=-2, dim2=-1).log()  # one distance per channel
    for name, maps in equal.items():
        tolerance = 1e-8 if name == "doubly stochastic" else 1e-11  # Sinkhorn's sums are one up to its iterations
        yield holds(f"{name}: chain rule", chain_gaps(distance(maps)), tolerance)
    for name, maps in larger.items():
        gaps = chain_gaps(distance(maps))
        yield breaks(f"{name}: chain rule", gaps.max(), 0.02)
        yield holds(f"{name}: how far below the reverse triangle inequality", beyond(-gaps), 1e-10)
    free, per_channel = distance(larger["general linear"]), [chain_gaps(channels[..., c]) for c in range(n)]
    yield breaks("general linear: how far the distance falls below zero", -free.min(), 0.1)
    yield holds("diagonal, channel by channel: chain rule", torch.stack(per_channel), 1e-11)


@check
def D05(draw: Draw) -> Findings:
    n, length = 6, 9
    k, one = draw.unit(length, n), ones(length)
    angle = draw.uniform(length, n // 2, low=0.2, high=1.5)
    mix = draw.normal(length, n, n)
    maps = {
        "rotations": carried(additive(Rotation(Per("angle", "pair", "real"))), k=k, angle=angle),
        "reflections": carried(layer_tuple(REFLECTIVE), k=k, beta=2 * one),
        "doubly stochastic": carried(additive(GeneralLinear(Per("mix", "mix", "real"), Birkhoff(100))), k=k, mix=mix),
    }
    j, t = torch.combinations(torch.arange(length + 1), 2).unbind(-1)
    for name, p in maps.items():
        d = distance(p)[j, t]
        yield breaks(f"{name}: share of pairs of positions at distance zero", _share(d.abs() < 1e-8), 1.0)
        yield breaks(f"{name}: least |P - I| of two positions", (p[j, t] - eye(n)).norm(dim=(-2, -1)).min(), 0.02)
        yield holds(f"{name}: distance", d, 1e-8)
    projected = carried(layer_tuple(DELTA), k=k, beta=one)
    near = distance(projected)[j, t][t - j < n]
    orthonormal = carried(layer_tuple(DELTA), k=draw.orthogonal(n), beta=ones(n))
    q = draw.normal(length, n)
    read = weights(layer_tuple(DELTA), q=q, k=k, beta=one)
    scores = torch.einsum("jd,jtde,te->tj", k, projected[1:, 1:], q)
    yield breaks("delta rule: share of near pairs at distance zero", _share(near.abs() < 1e-12), 1.0)
    yield holds("delta rule, t - j < d_k: distance", near, 1e-12)
    yield holds("d_k orthonormal projections leave", orthonormal[0, -1], 1e-12)
    yield agree("weights of DeltaNet against k_j . P q_t", read, causal(scores), 1e-11)


@check
def D06(draw: Draw) -> Findings:
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
    published = tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])
    decays = tensor([1 - 2.0 ** (-5 - i) for i in range(heads)])
    mask = torch.where(ages >= 0, (blind / blind.diagonal()[:, None]).log(), 0.0)
    yield agree("ALiBi against decayed accumulators", attended, accumulated(logits.exp(), bias), 1e-12)
    yield agree("ALiBi against a softmax with -m (t - j)", attended, softmax_rows(logits - published[h] * ages), 1e-12)
    yield agree("q = 0: log weights against (t - j) log gamma", mask, causal(slopes[h] * ages), 1e-12)
    yield agree("ALiBi's slopes", -slopes, published, 1e-15)
    yield agree("RetNet's decays", retention.exp(), decays, 1e-15)
    yield differ("without the exponential: decay against the additive form", still, causal(logits + mask), 1.0)
    yield differ("without the normaliser: decayed exp(q . k)", attended, causal((logits + mask).exp()), 0.1)
    yield breaks("another slope: least ratio of the two published ones", (slopes / retention).min(), 10.0)
    yield differ("another slope: log weights with RetNet's constants", mask, causal(gamma[:, None] * ages), 0.05)
    yield differ("with RetNet's rotation: against decay alone", rotated, still, 0.1)


@check
def D07(draw: Draw) -> Findings:
    length, d = 20, 4
    k, g = draw.uniform(length, d, low=0.3), draw.uniform(length, d, low=0.2).log()
    one, other = (draw.uniform(length, d, low=0.05) ** 2 for _ in range(2))

    def factors(name: str, q: Tensor, **rates: Tensor) -> Tensor:
        return causal(weights(layer_tuple(name), q=q, k=k, **rates) / (q @ k.mT))

    gla = [factors(GLA, q, decay=g) for q in (one, other)]
    ssd = [factors(MAMBA2, q, decay=g[:, 0], dt=ones(length)) for q in (one, other)]
    fox = weights(layer_tuple("fox"), q=torch.zeros_like(k), k=k, forget=g[:, 0])
    apart = (gla[0] - gla[1]).abs() / (gla[0] + gla[1]).clamp_min(1e-300)
    derived = [structure(layer_tuple(n)) for n in (MAMBA2, GLA, "fox")]
    mistaken = float(derived != ["scalar", "diagonal", "scalar"])
    yield breaks("how many of the three are derived not to be diagonal", sum(s != "diagonal" for s in derived), 2.0)
    yield breaks("GLA: relative difference of the factors for two queries", apart.max(), 0.2)
    yield agree("Mamba-2: difference of the factors for two queries", ssd[0], ssd[1], 1e-12)
    yield agree("Mamba-2's factors against FoX's weights at q = 0", ssd[0], fox / fox.diagonal()[:, None], 1e-12)
    yield holds("derived: Mamba-2 and FoX scalar, GLA diagonal", mistaken, 0.0)


@check
def D08(draw: Draw) -> Findings:
    length, d = 16, 4
    q, k = draw.uniform(length, d, low=0.05) ** 2, draw.uniform(length, d, low=0.3)
    g = draw.uniform(length, d, low=0.2).log()
    gla = layer_tuple(GLA)
    maps = carried(gla, k=k, decay=g)
    steps = maps[torch.arange(length), torch.arange(1, length + 1)]
    score = weights(gla, q=q, k=k, decay=g)
    b = g.cumsum(0).exp()
    drift = torch.stack([sums(g[:, c]) for c in range(d)], -1)
    channels = [weights(gla, q=eye(d)[c].expand(length, d), k=k, decay=g)[-1] / k[:, c] for c in range(d)]
    bias = torch.stack(channels, -1).log()
    long = 300
    hard, keys, queries = draw.uniform(long, d, low=-6.0, high=-2.0), draw.normal(long, d), draw.normal(long, d)
    read = weights(gla, q=queries, k=keys, decay=hard)
    recent = torch.stack([(queries[t] * keys[t - 1] * hard[t].exp()).sum() for t in range(1, long)])
    yield breaks("the gate as a bias: spread of its logarithm over queries", (bias.amax(-1) - bias.amin(-1)).max(), 0.5)
    yield differ("the additive form q . k - d", score, causal(q @ k.mT - distance(maps)[1:, 1:].mT), 0.5)
    yield agree("diagonal gates commute", steps[0] @ steps[1], steps[1] @ steps[0], 1e-15)
    yield holds("they contract: excess of their norms over one", beyond(-distance(steps)), 1e-15)
    yield agree("GLA against (Q * b)(K / b)^T", score, causal((q * b) @ (k / b).mT), 1e-11)
    yield agree("channel by channel the logs add", bias, drift[-1], 1e-11)
    yield agree("300 tokens, where 1 / b overflows: weights of the last pair but one", read.diagonal(-1), recent, 1e-12)
