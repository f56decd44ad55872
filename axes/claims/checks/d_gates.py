"""Group D, gates and expressiveness: outer-product gates, products of Householder maps, state tracking, RWKV-7."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.float64 import arange, eye, ones, tensor, zeros
from axes.claims.tools.matrices import beyond, rank, unit_rows
from axes.claims.tools.positions import additive, causal, effective_keys, weights
from axes.claims.tools.tuples import (
    DELTA,
    GLA,
    MAMBA2,
    REFLECTIVE,
    dispatched,
    layer_tuple,
    one_step,
    transition,
    walked,
)
from axes.core.derived import structure
from axes.core.monoids import DPLR, Diagonal, GeneralLinear, Householder, Product
from axes.core.rates import Per


@check
def D17(draw: Draw) -> Findings:
    gates = additive(Product((Diagonal("alpha"), Diagonal("beta", side="row"))))
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
    summed = zeros(24, d_v)
    for t in range(24):
        for i in range(t + 1):
            kept = s["k"][i] * s["alpha"][i + 1 : t + 1].sum(0).exp()
            summed[t] += s["v"][i] * s["beta"][i + 1 : t + 1].sum(0).exp() * (kept @ s["q"][t])
    out = dispatched(gates, **s)[0]
    long = signal(150, -9.0, -4.0)  # 1 / c overflows long before the end
    by_chunks, direct = dispatched(gates, **long)[0], walked(gates, **long)
    overflow = (1 / long["alpha"].exp().cumprod(0)).isinf().double().max()
    yield agree("against the products of matrices", out, products, 1e-11)
    yield agree("against the sum over pairs", out, summed, 1e-11)
    yield agree("150 tokens by chunks in logs against the recurrence", by_chunks, direct, 1e-11)
    yield breaks("150 tokens: the quotients overflow", overflow, 1.0)


@check
def D18(draw: Draw) -> Findings:
    n, m = 6, 5
    delta = torch.linspace(0.1, 2.0, n, dtype=torch.float64) * draw.uniform(n, low=0.9, high=1.1)
    row = -arange(1, m + 1) * draw.uniform(1, low=0.8, high=1.2)

    def gate(a: Tensor) -> Tensor:
        """What one datum without a value leaves of a state of ones."""
        return one_step(layer_tuple("mamba"), ones(n, m), k=draw.normal(m), v=zeros(n), A=a, dt=delta)

    def second(x: Tensor) -> float:
        values = torch.linalg.svdvals(x)
        return float(values[1] / values[0])

    alike, free = gate(row.expand(n, m)), gate(-draw.uniform(n, m, low=0.5, high=5.0))
    scalar = gate(row[0].expand(n, m))
    yield agree("gate against torch's exponential", alike, torch.special.expm1(delta[:, None] * row) + 1, 1e-14)
    yield holds("rank below two, rows of A alike: 0 or 1", float(rank(alike) < 2), 0.0)
    yield holds("rank below two, A free: 0 or 1", float(rank(free) < 2), 0.0)
    yield breaks("second over first singular value, rows of A alike", second(alike), 0.02)
    yield breaks("second over first singular value, A free", second(free), 0.02)
    yield holds("one number per row: the same ratio", second(scalar), 1e-14)
    yield holds("rows alike: the same ratio of the log gates", second(alike.log()), 1e-14)


def reflections(q: Tensor) -> list[tuple[Tensor, Tensor]]:
    """At most n pairs (w, beta) of reflections whose product is an orthogonal q (n, n)."""
    n, rest, found = q.shape[0], q.clone(), []
    for i in range(n):
        w = rest[:, i] - eye(n)[i]
        if float(w.norm()) < 1e-7:
            continue
        w = w / w.norm()
        rest = rest - 2 * torch.outer(w, w @ rest)
        found.append((w, tensor(2.0)))
    return found


def product_of(name: str, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The product of maps I - beta k k^T as a layer forms it from the identity."""
    k, beta = (torch.stack(parts) for parts in zip(*factors, strict=True))
    return dispatched(layer_tuple(name), eye(k.shape[-1]), k=k, v=torch.zeros_like(k), beta=beta)[1]


@check
def D19(draw: Draw) -> Findings:
    n = draw.integer(2, 6)
    for name, top in (("norm below one", 0.9), ("norm one", 1.0)):
        sigma = draw.uniform(n) * top
        sigma[0] = top
        u, v = draw.orthogonal(n), draw.orthogonal(n)
        wanted = u * sigma @ v.mT
        scalings = [(eye(n)[i], 1 - sigma[i]) for i in range(n)]
        factors = [*reflections(u), *scalings, *reflections(v.mT.contiguous())]
        spectrum = torch.stack([1 - f[1] * (f[0] @ f[0]) for f in factors])
        yield agree(f"{name}: product that the layer forms", product_of(REFLECTIVE, factors), wanted, 1e-12)
        yield holds(f"{name}: factors beyond 3 n", beyond(len(factors), 3 * n), 0.0)
        yield holds(f"{name}: eigenvalues outside of [-1, 1]", beyond(spectrum.abs(), 1), 1e-14)


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


@check
def D20(draw: Draw) -> Findings:
    turn = tensor([[0.0, -1.0], [1.0, 0.0]])
    d, n = 4, 5
    k, beta = draw.unit(n, d), draw.uniform(n)
    drawn = product_of(DELTA, list(zip(k, beta, strict=True)))
    narrow = product_of(DELTA, nearest_product(draw, turn, 12, 1.0, 8))
    wide = product_of(REFLECTIVE, nearest_product(draw, turn, 12, 2.0, 4))
    mirrors = [tensor([math.cos(x), math.sin(x)]) for x in (math.pi / 4, 0.0)]
    mirrored = product_of(REFLECTIVE, [(m, tensor(2.0)) for m in mirrors])
    found = (narrow - turn).square().sum()
    # the least singular value to the d-th power is at most the determinant, hence at most 1 - max beta
    stretch = beyond(torch.linalg.svdvals(drawn)[-1] ** d, 1 - beta.max())
    yield agree("determinant against prod (1 - beta)", torch.linalg.det(drawn), (1 - beta).prod(), 1e-13)
    yield holds("how far the least stretch exceeds (1 - max beta)^(1/d)", stretch, 1e-12)
    yield holds("best of 12 factors in [0, 1]: how far below squared distance 1", beyond(1 - found), 0.0)
    yield breaks("best of 12 factors in [0, 1]: squared distance", found, 1.0)
    yield holds("best of 12 factors in [0, 2]: squared distance", (wide - turn).square().sum(), 1e-6)
    yield agree("two reflections against the quarter turn", mirrored, turn, 1e-14)


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


@check
def D21(draw: Draw) -> Findings:
    bits = tensor(list(itertools.product((0.0, 1.0), repeat=12))).mT  # (time, strings)
    unit = ones(*bits.shape, 1)
    signal = {"k": unit, "q": unit, "v": 0 * unit, "beta": 2 * bits}
    parity = walked(layer_tuple(REFLECTIVE), ones(bits.shape[1], 1, 1), **signal)[..., 0]
    counted = 1 - 2 * (bits.cumsum(0) % 2)  # every prefix: all strings of up to 12 bits
    wrong, most, single = 0.0, 0, 0
    for p in itertools.permutations(range(4)):
        target = eye(4)[:, list(p)]  # column i is e_{p(i)}
        swaps = [(c[0], x) for c in _cycles(p) for x in reversed(c[1:])]
        steps = [(eye(4)[i] - eye(4)[j], tensor(1.0)) for i, j in swaps]
        wrong = max(wrong, gap(product_of(REFLECTIVE, steps) if steps else eye(4), target))
        most, single = max(most, len(steps)), single + int(rank(target - eye(4)) <= 1)
    yield agree("parity of all strings of up to 12 bits", parity, counted, 0.0)
    yield holds("all 24 permutations of 4 symbols", wrong, 0.0)
    yield holds("reflections used beyond 3", beyond(most, 3), 0.0)
    yield agree("permutations within one map: the identity and 6 swaps", single, 7.0, 0.0)


@check
def D22(draw: Draw) -> Findings:
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
    free = transition(layer_tuple("rwkv7"), k=k[0], decay=g[0], a=draw.unit(d), b=draw.unit(d))
    rest = (free - torch.diag(g[0].exp())) / g[0].exp()[:, None]  # D^-1 (A - D)
    dense = additive(Product((GeneralLinear(Per("mix", "mix", "real")), Householder(Per("beta")))))
    yield agree("product against RWKV-7 with tied vectors", weights(both, q=q, k=k, **rates), rwkv, 1e-11)
    yield agree("the other order against its own low rank", other, mirrored, 1e-11)
    yield differ("the other order against RWKV-7", other, rwkv, 0.05)
    yield differ("free vectors: D^-1 (A - D) is not symmetric", rest, rest.mT, 0.05)
    yield breaks("a dense first part: the derived structure is dense", float(structure(dense) == "dense"), 1.0)
    yield holds("diagonal first part: derived to be diagonal plus low rank", float(structure(both) != "dplr"), 0.0)


@check
def D23(draw: Draw) -> Findings:
    length, d = 8, 12
    k = draw.unit(length, d)
    g = draw.uniform(length, d, low=0.3).log()
    erased = effective_keys(layer_tuple(DELTA), k=k, beta=ones(length))
    channels = effective_keys(layer_tuple(GLA), k=k, decay=g)
    faded = effective_keys(layer_tuple(MAMBA2), k=k, decay=g[:, 0], dt=ones(length))
    kept = torch.stack([k[j] * g[j + 1 :].exp().prod(0) for j in range(length)])
    others = unit_rows(erased[:-1])
    cosines = (unit_rows(faded) * unit_rows(k)).sum(-1)
    yield holds("DeltaNet: stored keys times the last key", erased[:-1] @ k[-1], 1e-12)
    yield agree("diagonal gate: stored keys against rescaled channels", channels, kept, 1e-12)
    yield differ("DeltaNet: largest cosine of two stored keys", others @ others.mT, eye(length - 1), 0.02)
    yield breaks("Mamba-2: least cosine of a stored key and its raw one", cosines.min(), 1 - 1e-12)
