"""Group F, linear attention and masks: parallel and chunk forms with scalar gates, their cost, and semiseparability."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds, within
from axes.claims.tools.chunks import block_rank, by_chunks, decay_mask, furthest, mixing_matrix, passed_on
from axes.claims.tools.float64 import ones, tensor, zeros
from axes.claims.tools.tuples import (
    DELTA,
    GATED,
    GLA,
    LINEAR,
    LONGHORN,
    MAMBA2,
    PREV,
    RLS,
    SOFTMAX,
    layer_tuple,
    recurrent,
)
from axes.routes import dispatch
from axes.testing.checks import example


def _tokens(draw: Draw, n: int, d_k: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw.normal(n, d_k), draw.normal(n, d_k) / math.sqrt(d_k), draw.normal(n, d_v)


@check
def F01(draw: Draw) -> Findings:
    n, d_k, d_v = draw.integer(20, 50), draw.integer(1, 8), draw.integer(1, 8)
    (q, k, v), start, update = _tokens(draw, n, d_k, d_v), draw.normal(d_v, d_k), layer_tuple(LINEAR)
    parallel, before = (q @ k.mT).tril() @ v, (q @ k.mT).tril(-1) @ v
    layer, started = recurrent(update, q, k, v)[0], recurrent(update, q, k, v, start)[0]
    yield agree("from an empty state", layer, parallel, 1e-12)
    yield agree("from S_0", started, parallel + q @ start.mT, 1e-12)
    yield differ("a mask without its diagonal", layer, before, 0.01)


@check
def F02(draw: Draw) -> Findings:
    n, d = 32, 8
    q, k, v = draw.normal(n, d), draw.normal(n, d), draw.normal(n, d)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = q @ k.mT / math.sqrt(d)
    product = scores * torch.ones_like(scores).masked_fill(future, -torch.inf)
    printed = torch.softmax(product, -1) @ v
    layer, unnormalised = (
        recurrent(layer_tuple(SOFTMAX), q, k, v)[0],
        recurrent(layer_tuple(LINEAR), q / math.sqrt(d), k, v)[0],
    )
    fused = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    added = torch.softmax(scores + torch.zeros_like(scores).masked_fill(future, -torch.inf), -1) @ v
    linear = (scores * torch.ones_like(scores).masked_fill(future, 0.0)) @ v
    yield breaks("share of masked scores that become +inf", product[future].isposinf().double().mean(), 0.25)
    yield breaks("share of outputs that are NaN", printed.isnan().any(-1).double().mean(), 0.5)
    yield agree("list memory against torch's causal attention", layer, fused, 1e-12)
    yield agree("list memory against the added mask", layer, added, 1e-12)
    yield agree("linear attention against the mask of ones and zeros", unnormalised, linear, 1e-12)


@check
def F03(draw: Draw) -> Findings:
    n, d_k, d_v = 40, draw.integer(1, 8), draw.integer(1, 8)
    (q, k, v), dt, update = _tokens(draw, n, d_k, d_v), draw.uniform(n, high=2.0), layer_tuple(MAMBA2)
    for name, gamma in (("gates in (0, 1)", draw.uniform(n)), ("closed gates", draw.uniform(n))):
        if name == "closed gates":
            gamma[7], gamma[23], gamma[24] = 0.0, 0.0, 1e-300
        parallel = ((q @ k.mT) * decay_mask(gamma)) @ (dt[:, None] * v)
        rates = {"decay": gamma.log(), "dt": dt}
        chunks = by_chunks(update, 16, q, k, v, zeros(d_v, d_k), **rates)[0]
        yield agree(f"{name}, token by token", recurrent(update, q, k, v, **rates)[0], parallel, 1e-11)
        yield agree(f"{name}, by chunks", chunks, parallel, 1e-11)


def _decayed_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: what it sees of the state before it, what it sees of itself, and the state after it."""
    total, mask = gamma.cumprod(0), decay_mask(gamma)
    out = total[:, None] * (q @ state.mT) + ((q @ k.mT) * mask) @ v
    return out, total[-1] * state + (mask[-1][:, None] * v).mT @ k


@check
def F04(draw: Draw) -> Findings:
    n, d_k, d_v = 37, 5, 4
    (q, k, v), start, gamma = _tokens(draw, n, d_k, d_v), draw.normal(d_v, d_k), draw.uniform(n, low=0.3)
    rates = {"decay": gamma.log(), "dt": torch.ones_like(gamma)}
    update, plain = layer_tuple(MAMBA2), layer_tuple(LINEAR)
    wanted = recurrent(update, q, k, v, start, **rates)
    for size in (1, 3, 8, 32, n):
        scanned = by_chunks(update, size, q, k, v, start, **rates)
        formula = passed_on(_decayed_chunk, size, start, q, k, v, gamma)
        yield holds(f"chunked scan, C = {size}", furthest(scanned, wanted), 1e-11)
        yield holds(f"formula, C = {size}", furthest(formula, wanted), 1e-11)
    ungated = by_chunks(plain, n, q, k, v, 0 * start)[0]
    yield agree("C = L without gates is the parallel form", ungated, (q @ k.mT).tril() @ v, 1e-12)


def flops(length: int, d: int, size: int) -> int:
    """Operations of the matrix products in the chunked scan of linear attention, as torch counts them."""
    q, k, v = (zeros(length, d) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        by_chunks(layer_tuple(LINEAR), size, q, k, v, zeros(d, d))
    return int(counter.get_total_flops())


def _products(length: int, d: int, size: int) -> tuple[int, int]:
    """Operations of the textbook chunk form: across chunks (read and write the state), and inside them."""
    x, state = torch.zeros(length // size, size, d), torch.zeros(length // size, d, d)
    with FlopCounterMode(display=False) as across:
        _ = x @ state.mT, x.mT @ x
    with FlopCounterMode(display=False) as inside:
        _ = (x @ x.mT) @ x
    return int(across.get_total_flops()), int(inside.get_total_flops())


@check
def F05(draw: Draw) -> Findings:
    length, d = 256, 2 ** draw.integer(3, 5)
    sizes = (1, 16, 64, 256)
    formula = tensor([4 * length * d * d + 4 * length * size * d for size in sizes])
    scanned = tensor([flops(length, d, size) for size in sizes])
    textbook = tensor([sum(_products(length, d, size)) for size in sizes])
    yield agree("chunked scan of the package: operations off the formula", scanned, formula, 0.0)
    yield agree("textbook products: operations off the formula", textbook, formula, 0.0)


@check
def F06(draw: Draw) -> Findings:
    length, d = 256, 2 ** draw.integer(4, 5)
    sizes = [1, 4, 16, d, 2 * d, 256] if d != 16 else [1, 4, 16, 32, 256]
    counted = [flops(length, d, size) for size in sizes]
    rises = [b - a for a, b in pairwise(counted)]
    across, inside = _products(length, d, d)
    yield breaks("operations at C = d over those at C = 1, less one", counted[sizes.index(d)] / counted[0] - 1, 0.5)
    yield holds("chunk sizes at which operations do not rise", sum(r <= 0 for r in rises), 0.0)
    yield holds("place of the minimum among the sizes (0: C = 1)", counted.index(min(counted)), 0.0)
    yield agree("work inside less work across chunks at C = d", inside, across, 0.0)


@check
def F15(draw: Draw) -> Findings:
    n, d = 48, draw.integer(2, 4)
    q, k = draw.normal(n, d), draw.unit(n, d)
    one, gates, beta = ones(n, 1), draw.uniform(n, low=0.8), draw.uniform(n, low=0.1, high=0.5)
    found = {
        "causal mask": (mixing_matrix(LINEAR, one, one), 1),
        "linear attention": (mixing_matrix(LINEAR, q, k), d),
        "scalar gates": (mixing_matrix(MAMBA2, q, k, decay=gates.log(), dt=one[:, 0]), d),
        "DeltaNet": (mixing_matrix(DELTA, q, k, beta=beta), d),
    }
    for name, (m, r) in found.items():
        yield agree(f"{name}: |rank - d_k|", block_rank(m), r, 0.0)
    yield holds("nothing above the diagonal", found["DeltaNet"][0].triu(1), 0.0)


@check
def F16(draw: Draw) -> Findings:
    n = 64
    for d, low in ((1, 6), (2, 20), (3, 28), (6, 31)):
        q, k = draw.normal(n, d), math.sqrt(d) * draw.normal(n, d)  # logits q . k, without a temperature
        found = block_rank(mixing_matrix(SOFTMAX, q, k))
        yield within(f"rank below the diagonal, d = {d}", found, low, n / 2)
        if d > 1:
            yield within(f"rank over 2 d, d = {d}", found / (2 * d), 1 + 1e-9, n / 2)
    q, k = draw.normal(n, 6), draw.normal(n, 6)
    yield within("linear attention, d = 6", block_rank(mixing_matrix(LINEAR, q, k)), 6, 6)


_MIXERS = (
    *(LINEAR, "retnet", MAMBA2, GLA, "rwkv7", DELTA, GATED, PREV, LONGHORN, "longhorn-diagonal"),
    *("titans-matrix", RLS, "linear-attention", SOFTMAX, "alibi", "fox", "path"),
)
_NOT_MIXERS = (
    *("frank-wolfe-delta", "memora-matrix", "yaad-matrix", "moneta-matrix"),
    *("muon-net", "adam-net", "shampoo-net", "ttt-linear", "lattice-dec"),
)


def _defect(name: str, draw: Draw) -> float:
    """|Y(V + V') - Y(V) - Y(V') + Y(0)| over |Y(V + V')|, largest entries: zero if values enter affinely."""
    update = layer_tuple(name)
    signal = example(update, batch=(1,), length=6, seed=draw.seed)
    shape = signal["v"].shape  # type: ignore[union-attr]
    first, second = 3 * draw.normal(*shape), 3 * draw.normal(*shape)
    a, b, both, none = (dispatch.run(update, {**signal, "v": x})[0] for x in (first, second, first + second, 0 * first))
    return gap(both - a - b, -none) / float(both.abs().max())


@check
def F17(draw: Draw) -> Findings:
    for name in _NOT_MIXERS:
        yield breaks(f"superposition defect of {name}", _defect(name, draw), 1e-3)
    for name in _MIXERS:
        yield holds(f"superposition defect of {name}", _defect(name, draw), 1e-9)
