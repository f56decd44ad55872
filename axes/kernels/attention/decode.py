"""`attend_one`: one query a sequence over all its pairs, read once. Programs share the pairs, a second pass merges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.attention.flash import absorb, tile
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv, power_of_2

_LOG2E = tl.constexpr(1.4426950408889634)
_PROGRAMS = 264  # two for each processor of an H100; a constant, so that sums have the same bits on every GPU
_MOST, _LEAST = 64, 128  # parts of a list; pairs that a part is worth


@Kernel
@triton.jit(do_not_specialize=["S", "span", "heads"])
def _part(
    q, k, v, mass, out, most, weight, scale, S, span, heads, G, q_b, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries of a group over `span` of their pairs: weighted values, the largest score, the sum of weights."""
    pid = tl.program_id(0)
    shared = (pid % (heads // GROUP)).to(tl.int64)  # of all batch entries
    part = pid // (heads // GROUP)
    member, keys, values = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    q += shared // G * q_b + shared % G * GROUP * q_h
    k += shared // G * k_b + shared % G * k_h
    v += shared // G * v_b + shared % G * v_h
    query = tile(q, member, q_h, GROUP, keys, K, BK, False)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    found = tl.zeros([BM, BV], tl.float32)
    end = tl.minimum((part + 1) * span, S)
    for at in tl.range(part * span, end, BN):
        j = at + tl.arange(0, BN)
        key = tile(k, j, k_t, end, keys, K, BK, False)
        value = tile(v, j, v_t, end, values, V, BV, False)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2E)
        if MASS:
            s += tl.load(mass + shared * S + j, mask=j < end, other=0.0)[None, :] * _LOG2E
        s = tl.where((j < end)[None, :], s, float("-inf"))
        top, total, found = absorb(s, value, top, total, found, PRECISION)
    number = part.to(tl.int64) * heads + shared * GROUP + member
    here = member < GROUP
    tl.store(most + number, top, mask=here)
    tl.store(weight + number, total, mask=here)
    tl.store(out + number[:, None] * V + values[None, :], found, mask=here[:, None] & (values < V)[None, :])


@Kernel
@triton.jit(do_not_specialize=["parts", "heads"])
def _merge(out, most, weight, o, parts, heads, V: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr):
    """All parts of one query, in their order."""
    head = tl.program_id(0).to(tl.int64)
    part, values = tl.arange(0, PARTS), tl.arange(0, BV)
    number = part * heads + head
    top = tl.load(most + number, mask=part < parts, other=float("-inf"))
    share = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(share * tl.load(weight + number, mask=part < parts, other=0.0), 0)
    here = (part < parts)[:, None] & (values < V)[None, :]
    found = tl.load(out + number[:, None] * V + values[None, :], mask=here, other=0.0)
    tl.store(o + head * V + values, tl.sum(share[:, None] * found, 0) / total, mask=values < V)


def shares(pairs: int, heads: int, side: int) -> tuple[int, int]:
    """In how many parts programs go through the pairs of every head, and how many pairs a part has."""
    parts = max(1, min(_MOST, _PROGRAMS // max(1, heads), cdiv(pairs, _LEAST)))
    span = cdiv(cdiv(pairs, parts), side) * side
    return cdiv(pairs, span), span


def merged(out: Tensor, most: Tensor, weight: Tensor, o: Tensor) -> Tensor:
    """o, one query of every head, from parts (parts, heads, V) and their largest scores and weights (parts, heads)."""
    parts, heads, width = out.shape
    with layout.on_device(o):
        _merge[(heads,)](
            out, most, weight, o, parts, heads, V=width, BV=max(16, power_of_2(width)), PARTS=_MOST, num_warps=4
        )
    return o


def _launch(q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None, scale: float) -> Tensor:
    (b, _, h, d_k), (_, s, g, d_v) = q.shape, v.shape
    width = max(d_k, d_v)
    side = 32 if q.dtype == torch.float32 or width > 128 else 64
    parts, span = shares(s, b * g, side)
    o = q.new_empty(b, 1, h, d_v)
    out = q.new_empty(parts, b * h, d_v, dtype=torch.float32)
    most, weight = (q.new_empty(parts, b * h, dtype=torch.float32) for _ in range(2))
    wide = max(16, power_of_2(d_v))
    with layout.on_device(q):
        _part[(parts * b * g,)](
            q, k, v, most if mass is None else mass, out, most, weight, scale, s, span, b * h, g, q.stride(0),
            q.stride(2), *k.stride()[:3], *v.stride()[:3], GROUP=h // g, K=d_k, V=d_v,
            BK=max(16, power_of_2(d_k)), BV=wide, BM=max(16, power_of_2(h // g)), BN=side,
            MASS=mass is not None, PRECISION=layout.precision(q), num_warps=4, num_stages=2,
        )  # fmt: skip
    return merged(out, most, weight, o)


@torch.library.custom_op("axes::attend_one", mutates_args=())
def _operator(q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None, scale: float) -> Tensor:
    return _launch(q, k, v, mass, scale)


@_operator.register_fake
def _(q, k, v, mass, scale):
    return q.new_empty(*q.shape[:3], v.shape[3])


def attend_one(q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None, scale: float) -> Tensor:
    """As `attend` for T = 1, with what does not fit refused there. mass (B, G, S), relative to something near the last
    pair's: in float32. q, k and v have adjacent features; nothing receives gradients."""
    mass = None if mass is None else mass.float().contiguous()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return (_operator if torch.compiler.is_compiling() else _launch)(q, k, v, mass, scale)
