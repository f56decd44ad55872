"""Group F across axes: depth, data, mini-batches as frozen chunks, and sums over a hierarchy of states."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from axes.claims.base import Draw, Finding, Verdict, breaks, claim, gap, holds, untestable
from axes.claims.group_a_tools import gradient, layer_tuple, randomised, squared_error, trained
from axes.claims.group_f_delta import delta_chunk
from axes.claims.group_f_tools import DELTA, LINEAR, block_rank, by_chunks, causal, recurrent, states
from axes.claims.sources import BLOG, SLIDES
from axes.core.algorithms import Anchor, Step
from axes.core.memory import Matrix
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import HyperConnections, Residual
from axes.depth.base import DepthMixer
from axes.optim import SGD
from axes.sequence.ttt import TTTLinear

_DUALITY = "Duality: recurrent and attention views"


# ---- depth -------------------------------------------------------------------------------------------------------


def _through(mixers: list[DepthMixer], hidden: Tensor, maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Streams entering, streams leaving, and the outputs (L, ..., d) of the sublayers tanh(x W)."""
    first = mixers[0].expand(hidden)
    assert isinstance(first, Tensor)
    streams, outputs = first, []
    for mixer, w in zip(mixers, maps, strict=True):
        x, coefficients = mixer.read(streams)
        y = torch.tanh(x @ w)
        outputs.append(y)
        written = mixer.write(streams, y, coefficients)
        assert isinstance(written, Tensor)
        streams = written
    return first, streams.detach(), torch.stack(outputs).detach()


@claim(
    "F18",
    "A recurrence along depth and attention along depth are the same map.",
    Verdict.EXACT,
    BLOG(f"{_DUALITY}; Exact vs. structural analogy"),
    "axes.depth.Residual, axes.depth.HyperConnections",
    derivation="Unrolled, the residual stream is x_0 plus the sum of all outputs: a causal mixer of ones over depth. "
    "With mixing R_l it is (R_L ... R_1) X_0 + sum_l (R_L ... R_{l+1}) post_l f_l^T, for given outputs f_l, which "
    "depend on the streams.",
)
def F18(draw: Draw) -> tuple[Finding, ...]:
    layers, n, d = 6, 3, 5
    hidden, maps = draw.normal(2, 3, d), draw.normal(layers, d, d) / math.sqrt(d)
    plain: list[DepthMixer] = [Residual(d, i) for i in range(layers)]
    reached = [_through(plain[:i], hidden, maps[:i])[1][..., 0, :] for i in range(1, layers + 1)]
    outputs = _through(plain, hidden, maps)[2]
    summed = hidden + torch.tensordot(causal(layers), outputs, 1)
    mixed = [randomised(HyperConnections(d, i, n, dtype=torch.float64), draw) for i in range(layers)]
    first, last, given = _through(list(mixed), hidden, maps)
    carried = torch.eye(n, dtype=torch.float64)
    total = torch.zeros_like(first)
    for mixer, y in zip(reversed(mixed), given.flip(0), strict=True):
        post, mix = mixer.post.detach(), mixer.rates["mix"].detach()
        total = total + (carried @ post)[:, None] * y[..., None, :]
        carried = carried @ mix
    return (
        holds("residual streams after each layer", gap(torch.stack(reached), summed), 1e-11),
        holds("hyper-connections", gap(last, carried @ first + total), 1e-11),
        breaks("share of the mixer that is not the residual's", gap(last, first + given.sum(0)[..., None, :]), 0.01),
    )


# ---- data --------------------------------------------------------------------------------------------------------


def _pairs(draw: Draw, n: int, d: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw.normal(d_v, d), draw.unit(n, d), draw.normal(n, d_v)


def _sequential(start: Tensor, k: Tensor, v: Tensor, rate: float, kind: type[torch.optim.Optimizer] = SGD) -> Tensor:
    """The weights after one step on every example in turn."""
    weight = nn.Parameter(start.clone())
    losses = [squared_error(x, y) for x, y in zip(k, v, strict=True)]
    return trained(kind([weight], lr=rate, momentum=0.0), weight, losses)[-1]  # type: ignore[call-arg]


def _batched(start: Tensor, k: Tensor, v: Tensor, rate: float) -> Tensor:
    """The weights after one step on the sum over all examples."""
    weight = nn.Parameter(start.clone())
    return trained(SGD([weight], lr=rate, momentum=0.0), weight, [lambda w: (v - k @ w.mT).square().sum() / 2])[-1]


@claim(
    "F19",
    "On the data axis the duality of online steps and a parallel form is an analogy of structure, not an identity.",
    Verdict.FALSE,
    BLOG(f"{_DUALITY}; Exact vs. structural analogy"),
    "axes.optim.SGD, axes.routes.scan.chunked, axes.sequence.DeltaNet",
    correction="exact for a linear layer with squared error (the UT form of B examples is B sequential steps, beta the "
    "learning rate) and for alignment; structural where errors are not affine in the weights",
    kind="OVER",
    derivation="SGD on |y - W x|^2 / 2 is the delta rule with k = x, v = y: its triangular system gives all errors of "
    "B sequential steps at once. Under a cost with a nonlinear residual the system is not linear.",
)
def F19(draw: Draw) -> tuple[Finding, ...]:
    n, rate = 16, 0.3
    start, k, v = _pairs(draw, n, 6, 4)
    beta = torch.full((n,), rate, dtype=k.dtype)
    parallel = delta_chunk(start, k, k, v, beta)[1]
    scanned = by_chunks(layer_tuple(DELTA), n, k, k, v, start, beta=beta)[1]
    ours, torchs = _sequential(start, k, v, rate), _sequential(start, k, v, rate, torch.optim.SGD)
    weight = nn.Parameter(start.clone())
    aligned = [lambda w, x=x, y=y: -(y * (w @ x)).sum() for x, y in zip(k, v, strict=True)]
    additive = trained(SGD([weight], lr=rate, momentum=0.0), weight, aligned)[-1]
    robust = nn.Parameter(start.clone())
    clipped = [lambda w, x=x, y=y: huber_loss(w @ x, y, reduction="sum", delta=0.3) for x, y in zip(k, v, strict=True)]
    bounded = trained(SGD([robust], lr=rate, momentum=0.0), robust, clipped)[-1]
    return (
        breaks(
            "decimal digits in which parallel and sequential weights agree",
            -math.log10(gap(parallel, ours) + 1e-17),
            10,
        ),
        holds("UT form against torch.optim.SGD", gap(parallel, torchs), 1e-10),
        holds("UT form against axes.optim.SGD", gap(parallel, ours), 1e-10),
        holds("chunked scan of the layer against axes.optim.SGD", gap(scanned, ours), 1e-10),
        holds("alignment: one product against sequential steps", gap(additive, start + rate * v.mT @ k), 1e-12),
        breaks("Huber's cost: UT form against sequential steps", gap(parallel, bounded), 0.01),
    )


@claim(
    "F20",
    "A mini-batch is to data what a chunk is to a sequence.",
    Verdict.FALSE,
    BLOG(_DUALITY),
    "axes.optim.SGD, axes.routes.scan.chunked, axes.Anchor",
    correction="a chunk computes the sequential steps exactly; a mini-batch takes all gradients at its start, which is "
    "the frozen chunk of test-time training and off by O(eta^2). They agree only where gradients do not see the state",
    kind="MATH",
    derivation="A later error of the chunk has seen the earlier writes: the first missing term is eta^2 sum_{i<j} "
    "(k_i . k_j) e_i k_j^T. Alignment has no error to correct.",
)
def F20(draw: Draw) -> tuple[Finding, ...]:
    n, d = 16, 8
    start, k, v = _pairs(draw, n, d, d)
    nothing = torch.zeros_like(start)

    def off(rate: float, size: int = n) -> float:
        beta = torch.full((size,), rate, dtype=k.dtype)
        chunk = by_chunks(layer_tuple(DELTA), size, k[:size], k[:size], v[:size], start, beta=beta)[1]
        return float((_batched(start, k[:size], v[:size], rate) - chunk).norm())

    rates = (0.0125, 0.00625)
    order = math.log2(off(rates[0]) / off(rates[1]))
    beta = torch.full((n,), 0.1, dtype=k.dtype)
    chunk = by_chunks(layer_tuple(DELTA), n, k, k, v, start, beta=beta)[1]
    frozen = StateUpdate(layer_tuple(DELTA).cost, algorithm=Step(Per("beta"), at=Anchor(n)))
    anchored = states(frozen, k, v, start, beta=beta)[-1]
    aligned = nn.Parameter(nothing.clone())
    one = trained(SGD([aligned], lr=0.1, momentum=0.0), aligned, [lambda w: -(v * (k @ w.mT)).sum()])[-1]
    additive = by_chunks(layer_tuple(LINEAR), n, k, k, 0.1 * v, nothing)[1]
    return (
        breaks("mini-batch against the chunk of 16 at eta = 0.1", gap(_batched(start, k, v, 0.1), chunk), 0.01),
        holds("chunk against sequential steps", gap(_sequential(start, k, v, 0.1), chunk), 1e-11),
        holds("mini-batch against a frozen chunk of the layer", gap(_batched(start, k, v, 0.1), anchored), 1e-12),
        holds("|order of the difference in eta - 2|", abs(order - 2), 0.1),
        holds("a batch of one", off(0.1, 1), 1e-12),
        holds("alignment: mini-batch against chunk", gap(one, additive), 1e-12),
    )


@claim(
    "F26",
    "Test-time training runs a linear recurrence inside a chunk, with gradients at the chunk's start.",
    Verdict.EXACT,
    SLIDES("Mini-batch Gradient Descent"),
    "axes.Anchor, axes.sequence.TTTLinear, axes.sequence.DeltaNet",
    derivation="S_i = S_{i-1} - eta grad l_i(S_chunk): the drives of a chunk of b tokens are known before it runs. b = "
    "1 is the delta rule; b = N from zero leaves the errors at v, which is eta times linear attention. So b is a "
    "parameter of the model, not of its execution.",
)
def F26(draw: Draw) -> tuple[Finding, ...]:
    n, d, d_v = 16, 6, 4
    q, (start, k, v), eta = draw.normal(n, d), _pairs(draw, n, d, d_v), draw.uniform(n, low=0.2, high=1.0)
    nothing = torch.zeros_like(start)

    def tuple_of(b: int) -> StateUpdate:
        return dataclasses.replace(TTTLinear.update, algorithm=Step(Per("eta"), at=Anchor(b)), memory=Matrix())

    findings = []
    for b in (1, 4, 5, n):
        s, anchor, path = start, start, []
        for t in range(n):
            anchor = s if t % b == 0 else anchor
            s = s - eta[t] * gradient(squared_error(k[t], v[t]), anchor)
            path.append(s @ q[t])
        out = recurrent(tuple_of(b), q, k, v, start, eta=eta)[0]
        findings.append(holds(f"b = {b} against autograd", gap(out, torch.stack(path)), 1e-12))
    delta = recurrent(layer_tuple(DELTA), q, k, v, start, beta=eta)[0]
    linear = recurrent(layer_tuple(LINEAR), q, k, eta[:, None] * v)[0]
    four = recurrent(tuple_of(4), q, k, v, start, eta=eta)[0]
    return (
        *findings,
        holds("b = 1 is DeltaNet", gap(recurrent(tuple_of(1), q, k, v, start, eta=eta)[0], delta), 1e-12),
        holds(
            "b = N from zero is eta times linear attention",
            gap(recurrent(tuple_of(n), q, k, v, nothing, eta=eta)[0], linear),
            1e-12,
        ),
        breaks("b = 4 against DeltaNet, relative", (four - delta).norm() / delta.norm(), 0.02),
    )


# ---- a hierarchy of states -----------------------------------------------------------------------------------------


def buckets(t: int) -> list[tuple[int, int, int]]:
    """(level, first, end) of the parts of [0, t]: the token itself at level 0, then the binary digits of t."""
    parts, end = [(0, t, t + 1)], t
    while end:
        size = end & -end
        parts.append((size.bit_length(), end - size, end))
        end -= size
    return parts


def _levels(n: int) -> int:
    return n.bit_length() + 1


def _hierarchy(weights: Tensor) -> Tensor:
    """The mask M_ij = lambda_i^(level of the part of [0, i] that holds j)."""
    n = len(weights)
    mask = torch.zeros(n, n, dtype=weights.dtype)
    for t in range(n):
        for level, first, end in buckets(t):
            mask[t, first:end] = weights[t, level]
    return mask


def _states(k: Tensor, v: Tensor, t: int) -> list[tuple[int, Tensor]]:
    """The state of each part of [0, t]: linear attention run over that part alone."""
    update = layer_tuple(LINEAR)
    return [(level, states(update, k[a:b], v[a:b])[-1]) for level, a, b in buckets(t)]


def _row_times(q: Tensor, s: Tensor) -> Tensor:
    """q^T S where it exists; an empty tensor where the sizes do not fit."""
    return q @ s if q.shape[0] == s.shape[0] else q.new_zeros(0)


@claim(
    "F21",
    "Log-linear attention reads o_t = sum_l lambda_t^(l) q_t^T S_t^(l).",
    Verdict.FALSE,
    BLOG("Capacity and the SNR: log-linear attention"),
    "axes.sequence.UnnormalisedLinearAttention",
    correction="o_t = sum_l lambda_t^(l) S_t^(l) q_t with S (d_v, d_k)",
    kind="NOTN",
    derivation="q lives in key space and S maps keys to values: q^T S contracts q with the value side, which exists "
    "only for d_v = d_k and then is another number. Against the masked parallel form the other order is exact.",
)
def F21(draw: Draw) -> tuple[Finding, ...]:
    n, d = 12, 5
    findings = []
    for d_v, name in ((3, "d_v = 3, d_k = 5"), (d, "d_v = d_k")):
        q, k, v, weights = draw.normal(n, d), draw.unit(n, d), draw.normal(n, d_v), draw.uniform(n, _levels(n), low=0.3)
        wanted = ((q @ k.mT) * _hierarchy(weights)) @ v
        held = [_states(k, v, t) for t in range(n)]
        read = torch.stack([sum((weights[t, i] * (s @ q[t]) for i, s in held[t]), 0 * v[0]) for t in range(n)])
        rows = [[weights[t, i] * _row_times(q[t], s) for i, s in held[t]] for t in range(n)]
        printed = torch.stack([torch.stack(row).sum(0) for row in rows])
        findings += [
            holds(f"S q, {name}", gap(read, wanted), 1e-11),
            breaks(f"q^T S, {name}", gap(printed, wanted), 0.05),
        ]
    return tuple(findings)


@claim(
    "F22",
    "With equal weights of all levels log-linear attention is linear attention.",
    Verdict.CONDITIONAL,
    BLOG("Capacity and the SNR: log-linear attention"),
    "axes.sequence.UnnormalisedLinearAttention",
    conditions="all weights are one; a common constant c gives c times linear attention",
    derivation="The states of the parts add up to the state of the whole prefix, so a common factor comes out of the "
    "sum.",
)
def F22(draw: Draw) -> tuple[Finding, ...]:
    n, d, d_v, c = 20, 5, 3, 0.4
    q, k, v = draw.normal(n, d), draw.unit(n, d), draw.normal(n, d_v)
    linear = recurrent(layer_tuple(LINEAR), q, k, v)[0]

    def read(weights: Tensor) -> Tensor:
        return torch.stack([sum((weights[t, i] * (s @ q[t]) for i, s in _states(k, v, t)), 0 * v[0]) for t in range(n)])

    ones = torch.ones(n, _levels(n), dtype=q.dtype)
    constant, varied = read(c * ones), read(draw.uniform(n, _levels(n)))
    return (
        holds("weights one", gap(read(ones), linear), 1e-11),
        holds("weights c: c times linear attention", gap(constant, c * linear), 1e-11),
        breaks("weights c: linear attention itself", gap(constant, linear), 0.1),
        breaks("weights that differ by level", gap(varied, linear), 0.1),
    )


@claim(
    "F23",
    "A prefix [0, t] splits into O(log t) parts, one per level of a Fenwick tree.",
    Verdict.EXACT,
    BLOG("Capacity and the SNR: log-linear attention"),
    "axes.sequence.UnnormalisedLinearAttention",
    derivation="The token itself, then one block per binary digit of t, the lowest first: a partition with one part a "
    "level, at most floor(log2(t + 1)) + 1 of them. Later rows only merge the parts of [0, i), so the block of "
    "the mask below and left of i has as many distinct columns as i has binary ones.",
)
def F23(draw: Draw) -> tuple[Finding, ...]:
    wrong = crowded = repeated = 0
    for t in range(1024):
        parts = buckets(t)
        covered = sorted(i for _, a, b in parts for i in range(a, b))
        wrong += covered != list(range(t + 1))
        crowded += len(parts) > int(math.log2(t + 1)) + 1
        repeated += len({level for level, _, _ in parts}) != len(parts)
    n, t = 64, draw.integer(20, 60)
    mask = _hierarchy(draw.uniform(n, _levels(n), low=0.1))
    k, v = draw.unit(n, 4), draw.normal(n, 3)
    total = torch.stack([s for _, s in _states(k, v, t)]).sum(0)
    return (
        holds("prefixes that are not partitioned", float(wrong), 0.0),
        holds("prefixes with more parts than floor(log2(t + 1)) + 1", float(crowded), 0.0),
        holds("prefixes with two parts of one level", float(repeated), 0.0),
        holds("rank of a block of the mask above log2 n", float(max(block_rank(mask) - int(math.log2(n)), 0)), 0.0),
        holds("states of the parts add up", gap(total, states(layer_tuple(LINEAR), k[: t + 1], v[: t + 1])[-1]), 1e-12),
    )


F27 = untestable(
    "F27",
    "Attention keeps everything and pays O(T d) for a query; a state loses something and pays O(d^2).",
    BLOG(_DUALITY),
    "the operation counts follow from the definitions, and lossless is part of the definition of a list",
)
