"""Group F across axes: depth, data, mini-batches as frozen chunks, and sums over a hierarchy of states."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from axes.claims.base import Draw, Findings, agree, breaks, check, differ, gap, holds
from axes.claims.tools.calculus import gradient
from axes.claims.tools.chunks import block_rank, by_chunks, delta_chunk
from axes.claims.tools.descent import (
    alignment,
    alignments,
    randomised,
    sgd,
    squared_error,
    squared_errors,
    torch_sgd,
    trained,
)
from axes.claims.tools.float64 import eye, full, ones
from axes.claims.tools.matrices import beyond, relative
from axes.claims.tools.tuples import DELTA, LINEAR, dispatched, layer_tuple, recurrent, walked
from axes.core.algorithms import Anchor, Step
from axes.core.memory import Matrix
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import HyperConnections, Residual
from axes.depth.base import DepthMixer
from axes.sequence.ttt import TTTLinear

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


@check
def F18(draw: Draw) -> Findings:
    layers, n, d = 6, 3, 5
    hidden, maps = draw.normal(2, 3, d), draw.normal(layers, d, d) / math.sqrt(d)
    plain: list[DepthMixer] = [Residual(d, i) for i in range(layers)]
    reached = [_through(plain[:i], hidden, maps[:i])[1][..., 0, :] for i in range(1, layers + 1)]
    outputs = _through(plain, hidden, maps)[2]
    summed = hidden + outputs.cumsum(0)
    mixed = [randomised(HyperConnections(d, i, n, dtype=torch.float64), draw) for i in range(layers)]
    first, last, given = _through(list(mixed), hidden, maps)
    carried = eye(n)
    total = torch.zeros_like(first)
    for mixer, y in zip(reversed(mixed), given.flip(0), strict=True):
        post, mix = mixer.post.detach(), mixer.rates["mix"].detach()
        total = total + (carried @ post)[:, None] * y[..., None, :]
        carried = carried @ mix
    yield agree("residual streams after each layer", torch.stack(reached), summed, 1e-11)
    yield agree("hyper-connections", last, carried @ first + total, 1e-11)
    yield differ("share of the mixer that is not the residual's", last, first + given.sum(0)[..., None, :], 0.01)


# ---- data --------------------------------------------------------------------------------------------------------


def _pairs(draw: Draw, n: int, d: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw.normal(d_v, d), draw.unit(n, d), draw.normal(n, d_v)


def _batched(start: Tensor, k: Tensor, v: Tensor, rate: float) -> Tensor:
    """The weights after one step on the sum over all examples."""
    return trained(partial(sgd, lr=rate), start, [squared_error(k, v)])[-1]


@check
def F19(draw: Draw) -> Findings:
    n, rate = 16, 0.3
    start, k, v = _pairs(draw, n, 6, 4)
    beta = full(rate, n)
    parallel = delta_chunk(start, k, k, v, beta)[1]
    scanned = by_chunks(layer_tuple(DELTA), n, k, k, v, start, beta=beta)[1]
    ours, torchs = (trained(partial(make, lr=rate), start, squared_errors(k, v))[-1] for make in (sgd, torch_sgd))
    additive = trained(partial(sgd, lr=rate), start, alignments(k, v))[-1]
    clipped = [lambda w, x=x, y=y: huber_loss(w @ x, y, reduction="sum", delta=0.3) for x, y in zip(k, v, strict=True)]
    bounded = trained(partial(sgd, lr=rate), start, clipped)[-1]
    digits = -math.log10(gap(parallel, ours) + 1e-17)
    yield breaks("decimal digits in which parallel and sequential weights agree", digits, 10)
    yield agree("UT form against torch.optim.SGD", parallel, torchs, 1e-10)
    yield agree("UT form against axes.optim.SGD", parallel, ours, 1e-10)
    yield agree("chunked scan of the layer against axes.optim.SGD", scanned, ours, 1e-10)
    yield agree("alignment: one product against sequential steps", additive, start + rate * v.mT @ k, 1e-12)
    yield differ("Huber's cost: UT form against sequential steps", parallel, bounded, 0.01)


@check
def F20(draw: Draw) -> Findings:
    n, d = 16, 8
    start, k, v = _pairs(draw, n, d, d)
    nothing = torch.zeros_like(start)

    def chunked(rate: float, size: int = n) -> Tensor:
        return by_chunks(layer_tuple(DELTA), size, k[:size], k[:size], v[:size], start, beta=full(rate, size))[1]

    def off(rate: float, size: int = n) -> float:
        return float((_batched(start, k[:size], v[:size], rate) - chunked(rate, size)).norm())

    batch, chunk = _batched(start, k, v, 0.1), chunked(0.1)
    sequential = trained(partial(sgd, lr=0.1), start, squared_errors(k, v))[-1]
    frozen = StateUpdate(layer_tuple(DELTA).cost, algorithm=Step(Per("beta"), at=Anchor(n)))
    anchored = walked(frozen, start, k=k, v=v, beta=full(0.1, n))[-1]
    one = trained(partial(sgd, lr=0.1), nothing, [alignment(k, v)])[-1]
    additive = by_chunks(layer_tuple(LINEAR), n, k, k, 0.1 * v, nothing)[1]
    yield differ("mini-batch against the chunk of 16 at eta = 0.1", batch, chunk, 0.01)
    yield agree("chunk against sequential steps", sequential, chunk, 1e-11)
    yield agree("mini-batch against a frozen chunk of the layer", batch, anchored, 1e-12)
    yield agree("|order of the difference in eta - 2|", math.log2(off(0.0125) / off(0.00625)), 2, 0.1)
    yield holds("a batch of one", off(0.1, 1), 1e-12)
    yield agree("alignment: mini-batch against chunk", one, additive, 1e-12)


@check
def F26(draw: Draw) -> Findings:
    n, d, d_v = 16, 6, 4
    q, (start, k, v), eta = draw.normal(n, d), _pairs(draw, n, d, d_v), draw.uniform(n, low=0.2, high=1.0)

    def by_layer(b: int, first: Tensor = start) -> Tensor:
        update = dataclasses.replace(TTTLinear.update, algorithm=Step(Per("eta"), at=Anchor(b)), memory=Matrix())
        return recurrent(update, q, k, v, first, eta=eta)[0]

    for b in (1, 4, 5, n):
        s, anchor, path = start, start, []
        for t in range(n):
            anchor = s if t % b == 0 else anchor
            s = s - eta[t] * gradient(squared_error(k[t], v[t]), anchor)
            path.append(s @ q[t])
        yield agree(f"b = {b} against autograd", by_layer(b), torch.stack(path), 1e-12)
    delta = recurrent(layer_tuple(DELTA), q, k, v, start, beta=eta)[0]
    linear = recurrent(layer_tuple(LINEAR), q, k, eta[:, None] * v)[0]
    yield agree("b = 1 is DeltaNet", by_layer(1), delta, 1e-12)
    yield agree("b = N from zero is eta times linear attention", by_layer(n, 0 * start), linear, 1e-12)
    yield breaks("b = 4 against DeltaNet, relative", relative(by_layer(4), delta), 0.02)


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
    return [(level, walked(update, k=k[a:b], v=v[a:b])[-1]) for level, a, b in buckets(t)]


def _read(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """sum_l lambda_t^(l) S_t^(l) q_t for every t."""
    return torch.stack(
        [
            sum((w[i] * (s @ x) for i, s in _states(k, v, t)), 0 * v[0])
            for t, (w, x) in enumerate(zip(weights, q, strict=True))
        ]
    )


def _by_levels(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """The same by the tuple whose memory has levels, without gates, along its route."""
    update = layer_tuple("log-linear-mamba2")
    one = ones(len(q))
    level = torch.nn.functional.pad(weights, (0, 16 - weights.shape[-1]))
    return dispatched(update, q=q, k=k, v=v, level=level, decay=0 * one, dt=one)[0]


def _row_times(q: Tensor, s: Tensor) -> Tensor:
    """q^T S where it exists; an empty tensor where the sizes do not fit."""
    return q @ s if q.shape[0] == s.shape[0] else q.new_zeros(0)


@check
def F21(draw: Draw) -> Findings:
    n, d = 12, 5
    for d_v, name in ((3, "d_v = 3, d_k = 5"), (d, "d_v = d_k")):
        q, k, v, weights = draw.normal(n, d), draw.unit(n, d), draw.normal(n, d_v), draw.uniform(n, _levels(n), low=0.3)
        wanted = ((q @ k.mT) * _hierarchy(weights)) @ v
        rows = [[weights[t, i] * _row_times(q[t], s) for i, s in _states(k, v, t)] for t in range(n)]
        printed = torch.stack([torch.stack(row).sum(0) for row in rows])
        yield agree(f"S q, {name}", _read(q, k, v, weights), wanted, 1e-11)
        yield agree(f"S q of levels as a memory, {name}", _by_levels(q, k, v, weights), wanted, 1e-11)
        yield differ(f"q^T S, {name}", printed, wanted, 0.05)


@check
def F22(draw: Draw) -> Findings:
    n, d, d_v, c = 20, 5, 3, 0.4
    q, k, v = draw.normal(n, d), draw.unit(n, d), draw.normal(n, d_v)
    linear = recurrent(layer_tuple(LINEAR), q, k, v)[0]

    one = ones(n, _levels(n))
    constant, varied = _read(q, k, v, c * one), _read(q, k, v, draw.uniform(n, _levels(n)))
    yield agree("weights one", _read(q, k, v, one), linear, 1e-11)
    yield agree("weights one, levels as a memory", _by_levels(q, k, v, one), linear, 1e-11)
    yield agree("weights c: c times linear attention", constant, c * linear, 1e-11)
    yield differ("weights c: linear attention itself", constant, linear, 0.1)
    yield differ("weights that differ by level", varied, linear, 0.1)


@check
def F23(draw: Draw) -> Findings:
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
    prefix = walked(layer_tuple(LINEAR), k=k[: t + 1], v=v[: t + 1])[-1]
    yield holds("prefixes that are not partitioned", wrong, 0.0)
    yield holds("prefixes with more parts than floor(log2(t + 1)) + 1", crowded, 0.0)
    yield holds("prefixes with two parts of one level", repeated, 0.0)
    yield holds("rank of a block of the mask above log2 n", beyond(block_rank(mask), int(math.log2(n))), 0.0)
    yield agree("states of the parts add up", total, prefix, 1e-12)
