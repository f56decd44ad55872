"""Group F, linear attention and masks: parallel and chunk forms with scalar gates, their cost, and semiseparability."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, within
from axes.claims.group_a_tools import layer_tuple
from axes.claims.group_f_tools import (
    DELTA,
    LINEAR,
    MAMBA2,
    SOFTMAX,
    block_rank,
    by_chunks,
    causal,
    decay_mask,
    mixing_matrix,
    passed_on,
    recurrent,
)
from axes.claims.sources import BLOG, SLIDES
from axes.routes import dispatch
from axes.testing.checks import example

_DUALITY = "Duality: recurrent and attention views"


def _tokens(draw: Draw, n: int, d_k: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw.normal(n, d_k), draw.normal(n, d_k) / math.sqrt(d_k), draw.normal(n, d_v)


@claim(
    "F01",
    "Linear attention by its recurrence is (Q K^T * M) V, M lower triangular of ones with its diagonal.",
    Verdict.EXACT,
    SLIDES("Equivalent View: Matrix-Valued Hidden States"),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="S_t q_t = sum_{i<=t} v_i (k_i . q_t) when token t is read after it was written. A start S_0 adds "
    "Q S_0^T. Reading before the write would leave out the diagonal.",
)
def F01(draw: Draw) -> tuple[Finding, ...]:
    n, d_k, d_v = draw.integer(20, 50), draw.integer(1, 8), draw.integer(1, 8)
    (q, k, v), start, update = _tokens(draw, n, d_k, d_v), draw.normal(d_v, d_k), layer_tuple(LINEAR)
    parallel = ((q @ k.mT) * causal(n)) @ v
    before = ((q @ k.mT) * causal(n).tril(-1)) @ v
    return (
        holds("from an empty state", gap(recurrent(update, q, k, v)[0], parallel), 1e-12),
        holds("from S_0", gap(recurrent(update, q, k, v, start)[0], parallel + q @ start.mT), 1e-12),
        breaks("a mask without its diagonal", gap(recurrent(update, q, k, v)[0], before), 0.01),
    )


@claim(
    "F02",
    "Causal softmax attention is softmax(Q K^T * M) V with M in {1, -inf}.",
    Verdict.FALSE,
    SLIDES("Attention: parallel training, causal mask"),
    "axes.sequence.SoftmaxAttention, axes.sequence.UnnormalisedLinearAttention",
    correction="softmax(Q K^T / tau + M) V with M in {0, -inf}; the multiplicative mask {1, 0} belongs to linear "
    "attention",
    kind="NOTN",
    derivation="A negative score times -inf is +inf, which softmax turns into NaN: only rows whose masked scores are "
    "all positive survive. Added, -inf removes a pair whatever its score.",
)
def F02(draw: Draw) -> tuple[Finding, ...]:
    n, d = 32, 8
    q, k, v = draw.normal(n, d), draw.normal(n, d), draw.normal(n, d)
    future = causal(n).bool().logical_not()
    scores = q @ k.mT / math.sqrt(d)
    product = scores * torch.ones_like(scores).masked_fill(future, -torch.inf)
    printed = torch.softmax(product, -1) @ v
    layer = recurrent(layer_tuple(SOFTMAX), q, k, v)[0]
    fused = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    added = torch.softmax(scores + torch.zeros_like(scores).masked_fill(future, -torch.inf), -1) @ v
    linear = (scores * torch.ones_like(scores).masked_fill(future, 0.0)) @ v
    return (
        breaks("share of masked scores that become +inf", product[future].isposinf().double().mean(), 0.25),
        breaks("share of outputs that are NaN", printed.isnan().any(-1).double().mean(), 0.5),
        holds("list memory against torch's causal attention", gap(layer, fused), 1e-12),
        holds("list memory against the added mask", gap(layer, added), 1e-12),
        holds(
            "linear attention against the mask of ones and zeros",
            gap(recurrent(layer_tuple(LINEAR), q, k / math.sqrt(d), v)[0], linear),
            1e-12,
        ),
    )


@claim(
    "F03",
    "With scalar gates gamma_t linear attention is (Q K^T * D) V, D_ij = gamma_{j+1} ... gamma_i.",
    Verdict.EXACT,
    SLIDES("The parallel form for linear attention with decay"),
    "axes.sequence.Mamba2, axes.routes.scan.chunked",
    derivation="Pair j is multiplied by every gate after its write, and numbers commute with everything. A gate of "
    "zero is the log -inf: everything before it is gone, on both sides.",
)
def F03(draw: Draw) -> tuple[Finding, ...]:
    n, d_k, d_v = 40, draw.integer(1, 8), draw.integer(1, 8)
    (q, k, v), dt, update = _tokens(draw, n, d_k, d_v), draw.uniform(n, high=2.0), layer_tuple(MAMBA2)
    findings = []
    for name, gamma in (("gates in (0, 1)", draw.uniform(n)), ("closed gates", draw.uniform(n))):
        if name == "closed gates":
            gamma[7], gamma[23], gamma[24] = 0.0, 0.0, 1e-300
        parallel = ((q @ k.mT) * decay_mask(gamma)) @ (dt[:, None] * v)
        rates = {"decay": gamma.log(), "dt": dt}
        chunks = by_chunks(update, 16, q, k, v, torch.zeros(d_v, d_k, dtype=q.dtype), **rates)[0]
        findings += [
            holds(f"{name}, token by token", gap(recurrent(update, q, k, v, **rates)[0], parallel), 1e-11),
            holds(f"{name}, by chunks", gap(chunks, parallel), 1e-11),
        ]
    return tuple(findings)


def _decayed_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: what it sees of the state before it, what it sees of itself, and the state after it."""
    total, mask = gamma.cumprod(0), decay_mask(gamma)
    out = total[:, None] * (q @ state.mT) + ((q @ k.mT) * mask) @ v
    return out, total[-1] * state + (mask[-1][:, None] * v).mT @ k


@claim(
    "F04",
    "The chunk form is exact for every chunk size: one token is the recurrence, all tokens are the parallel form.",
    Verdict.EXACT,
    SLIDES("Chunkwise parallel form"),
    "axes.routes.scan.chunked, axes.sequence.Mamba2",
    derivation="S_c is a sufficient statistic of everything before the chunk: the output splits into decay * (Q S_c^T) "
    "and the parallel form within, for any split of the sequence.",
)
def F04(draw: Draw) -> tuple[Finding, ...]:
    n, d_k, d_v = 37, 5, 4
    (q, k, v), start, gamma = _tokens(draw, n, d_k, d_v), draw.normal(d_v, d_k), draw.uniform(n, low=0.3)
    rates = {"decay": gamma.log(), "dt": torch.ones_like(gamma)}
    update, plain = layer_tuple(MAMBA2), layer_tuple(LINEAR)
    wanted, last = recurrent(update, q, k, v, start, **rates)
    findings = []
    for size in (1, 3, 8, 32, n):
        out, end = by_chunks(update, size, q, k, v, start, **rates)
        formula, state = passed_on(_decayed_chunk, size, start, q, k, v, gamma)
        findings += [
            holds(f"chunked scan, C = {size}", max(gap(out, wanted), gap(end, last)), 1e-11),
            holds(f"formula, C = {size}", max(gap(formula, wanted), gap(state, last)), 1e-11),
        ]
    parallel = ((q @ k.mT) * causal(n)) @ v
    nothing = torch.zeros_like(start)
    return (
        *findings,
        holds(
            "C = L without gates is the parallel form", gap(by_chunks(plain, n, q, k, v, nothing)[0], parallel), 1e-12
        ),
    )


def flops(length: int, d: int, size: int) -> int:
    """Operations of the matrix products in the chunked scan of linear attention, as torch counts them."""
    q, k, v = (torch.zeros(length, d, dtype=torch.float64) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        by_chunks(layer_tuple(LINEAR), size, q, k, v, torch.zeros(d, d, dtype=torch.float64))
    return int(counter.get_total_flops())


def _products(length: int, d: int, size: int) -> tuple[int, int]:
    """Operations of the textbook chunk form: across chunks (read and write the state), and inside them."""
    x, state = torch.zeros(length // size, size, d), torch.zeros(length // size, d, d)
    with FlopCounterMode(display=False) as across:
        _ = x @ state.mT, x.mT @ x
    with FlopCounterMode(display=False) as inside:
        _ = (x @ x.mT) @ x
    return int(across.get_total_flops()), int(inside.get_total_flops())


@claim(
    "F05",
    "The chunk form costs O(C d^2) for the state and O(C^2 d + C d^2) for the output of a chunk: O(L d^2 + L C d).",
    Verdict.EXACT,
    SLIDES("Chunkwise parallel form, computational complexity"),
    "axes.routes.scan.chunked",
    derivation="With two operations per multiply-add a chunk pays 2 C d^2 to read the state, 2 C d^2 to write it, "
    "2 C^2 d for the scores and 2 C^2 d to apply them: L/C of them make 4 L d^2 + 4 L C d. Torch counts exactly that.",
)
def F05(draw: Draw) -> tuple[Finding, ...]:
    length, d = 256, 2 ** draw.integer(3, 5)
    off, textbook = [], []
    for size in (1, 16, 64, 256):
        formula = 4 * length * d * d + 4 * length * size * d
        off.append(abs(flops(length, d, size) - formula))
        textbook.append(abs(sum(_products(length, d, size)) - formula))
    return (
        holds("chunked scan of the package: operations off the formula", float(max(off)), 0.0),
        holds("textbook products: operations off the formula", float(max(textbook)), 0.0),
    )


@claim(
    "F06",
    "The best chunk size matches the memory's capacity, C* ~ d.",
    Verdict.FALSE,
    BLOG(f"{_DUALITY}; Critical batch size = memory capacity"),
    "axes.routes.scan.chunked",
    correction="4 L d^2 + 4 L C d grows with C, so operations are fewest at C = 1; C = d is where the work inside "
    "chunks equals the work across them. Sizes of 64 to 256 come from hardware",
    kind="MATH",
    derivation="The work across chunks does not depend on C and the work inside grows linearly: there is no interior "
    "minimum. Equating the two terms gives C = d.",
)
def F06(draw: Draw) -> tuple[Finding, ...]:
    length, d = 256, 2 ** draw.integer(4, 5)
    sizes = [1, 4, 16, d, 2 * d, 256] if d != 16 else [1, 4, 16, 32, 256]
    counted = [flops(length, d, size) for size in sizes]
    rises = [b - a for a, b in pairwise(counted)]
    across, inside = _products(length, d, d)
    return (
        breaks("operations at C = d over those at C = 1, less one", counted[sizes.index(d)] / counted[0] - 1, 0.5),
        holds("chunk sizes at which operations do not rise", float(sum(r <= 0 for r in rises)), 0.0),
        holds("place of the minimum among the sizes (0: C = 1)", float(counted.index(min(counted))), 0.0),
        holds("work inside less work across chunks at C = d", float(abs(inside - across)), 0.0),
    )


@claim(
    "F15",
    "The input-output map of a linear recurrence is semiseparable.",
    Verdict.EXACT,
    BLOG(_DUALITY),
    "axes.sequence.UnnormalisedLinearAttention, axes.sequence.Mamba2, axes.sequence.DeltaNet",
    derivation="Everything a later token knows of earlier ones went through S q, d_k numbers per value channel: a "
    "block below the diagonal factors through R^d_k, and random keys reach that rank. With d_k = 1 and ones it is the "
    "causal mask itself.",
)
def F15(draw: Draw) -> tuple[Finding, ...]:
    n, d = 48, draw.integer(2, 4)
    q, k = draw.normal(n, d), draw.unit(n, d)
    one, gates, beta = torch.ones(n, 1, dtype=q.dtype), draw.uniform(n, low=0.8), draw.uniform(n, low=0.1, high=0.5)
    found = {
        "causal mask": (mixing_matrix(LINEAR, one, one), 1),
        "linear attention": (mixing_matrix(LINEAR, q, k), d),
        "scalar gates": (mixing_matrix(MAMBA2, q, k, decay=gates.log(), dt=one[:, 0]), d),
        "DeltaNet": (mixing_matrix(DELTA, q, k, beta=beta), d),
    }
    mixer = found["DeltaNet"][0]
    return (
        *(holds(f"{name}: |rank - d_k|", float(abs(block_rank(m) - r)), 0.0) for name, (m, r) in found.items()),
        holds("nothing above the diagonal", mixer.triu(1).abs().max(), 0.0),
    )


@claim(
    "F16",
    "State space duality fails for softmax attention: its mixer has blocks of high rank.",
    Verdict.STATISTICAL,
    BLOG("Where the analogy breaks: nonlinearity complicates transfer"),
    "axes.sequence.SoftmaxAttention, axes.sequence.UnnormalisedLinearAttention",
    derivation="exp(q . k) has all powers of q . k: its features do not fit into R^d. Over 64 tokens of Gaussian "
    "queries and keys the numerical rank at 1e-9 reaches half the length, all that a block has.",
    seeds=10,
)
def F16(draw: Draw) -> tuple[Finding, ...]:
    n, findings = 64, []
    for d, low in ((1, 6), (2, 20), (3, 28), (6, 31)):
        q, k = draw.normal(n, d), math.sqrt(d) * draw.normal(n, d)  # logits q . k, without a temperature
        rank = block_rank(mixing_matrix(SOFTMAX, q, k))
        findings.append(within(f"rank below the diagonal, d = {d}", float(rank), low, n / 2))
        if d > 1:
            findings.append(within(f"rank over 2 d, d = {d}", rank / (2 * d), 1 + 1e-9, n / 2))
    q, k = draw.normal(n, 6), draw.normal(n, 6)
    return (*findings, within("linear attention, d = 6", float(block_rank(mixing_matrix(LINEAR, q, k))), 6, 6))


_MIXERS = (
    *(LINEAR, "retnet", MAMBA2, "gla", "rwkv7", DELTA, "gated-delta-net", "gated-delta-net-prev", "longhorn"),
    *("longhorn-diagonal", "titans-matrix", "rls-net", "linear-attention", SOFTMAX, "alibi", "fox", "path"),
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
    a, b, both, none = (
        dispatch.run(update, {**signal, "v": x})[0] for x in (first, second, first + second, torch.zeros_like(first))
    )
    return gap(both - a - b, -none) / float(both.abs().max())


@claim(
    "F17",
    "Every sequence model is a matrix mixer, Y = M X with a structured M.",
    Verdict.FALSE,
    BLOG(_DUALITY),
    "axes.catalogue (26 sequence layers), axes.sequence.FrankWolfeDelta, axes.sequence.MemoraMatrix",
    correction="updates affine in (S, v) are (alignment, squared error, implicit steps, momentum, gates), and so is "
    "softmax attention, whose M depends on Q and K alone",
    kind="OVER",
    derivation="Y = M V means superposition in the values at fixed queries, keys and gates. A step whose length or "
    "direction depends on the size of the error (normalised, clipped, softmax or polar) does not superpose.",
)
def F17(draw: Draw) -> tuple[Finding, ...]:
    return (
        *(breaks(f"superposition defect of {name}", _defect(name, draw), 1e-3) for name in _NOT_MIXERS),
        *(holds(f"superposition defect of {name}", _defect(name, draw), 1e-9) for name in _MIXERS),
    )
