"""What is not finite stays behind its token in attention too: blocks of queries that it spoilt are read again.

A tile of pairs that the diagonal crosses is multiplied whole, and a weight of zero times a value that is no number is
none either: queries ahead of that value get a NaN. Scores are selected, so that a key reaches nobody ahead of it. One
more launch looks at the last output of every block of queries; all of a block have met the same tiles, so that it is
not finite in the columns in which any of them is. Such a block is read again with zeros in the place of values that are
not finite, and what no query of them sees replaces what was lost: everything else stays bit for bit. From a block on
whose last query sees such a value in every column nothing is left to be saved, and no block is read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.attention.flash import absorb, masses, scores, tile
from axes.kernels.common import layout, tiles
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import in_place
from axes.kernels.common.sizes import power_of_2
from axes.kernels.contain import first_bad, mend

_LOOK = 16  # blocks at once


@Kernel
@triton.jit(do_not_specialize=["T", "old", "window", "stay", "m_b", "m_t", "m_h"])
def _again(
    q, k, v, high, low, o, offsets, scale, T, old, window, stay, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, m_b, m_t, m_h, o_b, o_t, o_h,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LOOK: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one sequence. WINDOW: a query sees its last `window` pairs and the first `stay`."""
    pid = tl.program_id(0)
    unit, head = pid // H, pid % H
    first, last = tiles.unit_rows(offsets, unit, T, PACKED)
    length = (last - first).to(tl.int32)
    pairs, end = first + unit * old, length + old
    if PACKED:
        q += first * q_t + head * q_h
        k += pairs * k_t + head // GROUP * k_h
        v += pairs * v_t + head // GROUP * v_h
        o += first * o_t + head * o_h
        high += pairs * m_t + head // GROUP * m_h
        low += pairs * m_t + head // GROUP * m_h
    else:
        batch = unit.to(tl.int64)
        q += batch * q_b + head * q_h
        k += batch * k_b + head // GROUP * k_h
        v += batch * v_b + head // GROUP * v_h
        o += batch * o_b + head * o_h
        high += batch * m_b + head // GROUP * m_h
        low += batch * m_b + head // GROUP * m_h
    keys, values = tl.arange(0, BK), tl.arange(0, BV)
    bad, blocks = first_bad(o, o_t, values, 0, length, V, BM, LOOK)
    while bad < blocks:
        begin = bad * BM
        i = begin + tl.arange(0, BM)
        query = tile(q, i, q_t, length, keys, K, BK, False)
        own_high, own_low = i.to(tl.float32), i.to(tl.float32)
        if MASS:
            own_high, own_low = masses(high, low, i + old, m_t, end, 0.0)
        most = tl.full([BM], float("-inf"), tl.float32)
        weight = tl.zeros([BM], tl.float32)
        out = tl.zeros([BM, BV], tl.float32)
        lost = tl.zeros([BM, BV], tl.float32)
        for from_ in range(0, tl.minimum(begin + BM + old, end), BN):
            j = from_ + tl.arange(0, BN)
            s, key, value = scores(
                query, k, v, high, low, 0.0, own_high, own_low, i, j, k_t, v_t, m_t, end, scale, old,
                keys, values, K, V, BK, BV, MASS, False, PRECISION,
            )  # fmt: skip
            sees = (j[None, :] <= i[:, None] + old) & (j < end)[None, :]
            if WINDOW:
                sees &= (j[None, :] > i[:, None] + old - window) | (j < stay)[None, :]
                s = tl.where(sees, s, float("-inf"))
            whole = tl.abs(value.to(tl.float32)) < float("inf")
            most, weight, out = absorb(s, tl.where(whole, value, 0.0).to(value.dtype), most, weight, out, PRECISION)
            lost = tl.dot(
                sees.to(value.dtype), tl.where(whole, 0.0, 1.0).to(value.dtype), lost,
                input_precision=PRECISION,
            )  # fmt: skip
        out = tl.where(lost > 0.0, float("nan"), out / weight[:, None])
        gone = bad * 0  # whether every column is lost for good
        if not WINDOW:
            all_lost = tl.min(tl.where(values[None, :] < V, lost, 1.0), 1)
            gone = tl.max(tl.where((i < length) & (all_lost > 0.0), 1, 0), 0)
        mend(o, out, i.to(tl.int64)[:, None] * o_t + values[None, :], (i < length)[:, None] & (values < V)[None, :])
        bad, blocks = first_bad(o, o_t, values, bad + 1 + gone * blocks, length, V, BM, LOOK)


@Kernel
@triton.jit(do_not_specialize=["T", "H"])
def _again_carried(
    q, k, v, a, b, high, low, o, scale, T, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, LOOK: tl.constexpr,
    MASS: tl.constexpr,
):  # fmt: skip
    """The same where every token carries stored keys on: k_j A_{j+1} .. A_i q_i, by a walk back over the tokens with
    the queries of a block, q <- A_j q, which so meet no later token than their own."""
    pid = tl.program_id(0)
    batch, head = (pid // H).to(tl.int64), pid % H
    keys, values = tl.arange(0, BK), tl.arange(0, BV)
    head_of_o = o + (batch * T * H + head) * V
    bad, blocks = first_bad(head_of_o, H * V, values, 0, T, V, BM, LOOK)
    while bad < blocks:
        i = bad * BM + tl.arange(0, BM)
        line = (batch * T + i) * H + head
        there = (i < T)[:, None] & (keys < K)[None, :]
        query = tl.load(q + line[:, None] * K + keys[None, :], mask=there, other=0.0).to(tl.float32)
        own_high, own_low = i.to(tl.float32) * 0.0, i.to(tl.float32) * 0.0
        if MASS:
            own_high = tl.load(high + line, mask=i < T, other=0.0)
            own_low = tl.load(low + line, mask=i < T, other=0.0)
        most = tl.full([BM], float("-inf"), tl.float32)
        weight = tl.zeros([BM], tl.float32)
        out = tl.zeros([BM, BV], tl.float32)
        gone = bad * 0
        end = tl.minimum((bad + 1) * BM, T)
        for back in range(0, end):
            j = end - 1 - back
            from_ = (batch * T + j) * H + head
            key = tl.load(k + from_ * K + keys, mask=keys < K, other=0.0).to(tl.float32)
            value = tl.load(v + from_ * V + values, mask=values < V, other=0.0).to(tl.float32)
            left = tl.load(a + from_ * K + keys, mask=keys < K, other=0.0).to(tl.float32)
            right = tl.load(b + from_ * K + keys, mask=keys < K, other=0.0).to(tl.float32)
            s = tl.sum(query * key[None, :], 1) * scale
            if MASS:
                s += (tl.load(high + from_) - own_high) + (tl.load(low + from_) - own_low)
            sees = j <= i
            new = tl.maximum(most, tl.where(sees, s, float("-inf")))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.where(sees, tl.exp(s - safe), 0.0)
            shrink = tl.exp(most - safe)
            weight = weight * shrink + p
            out = out * shrink[:, None] + tl.where(sees[:, None], p[:, None] * value[None, :], 0.0)
            most = new
            moved = query + tl.sum(query * right[None, :], 1)[:, None] * left[None, :]
            query = tl.where(sees[:, None], moved, query)
            known = tl.abs(key) + tl.abs(left) + tl.abs(right)  # all later queries are carried through it
            lost = tl.min((known < float("inf")).to(tl.int32), 0) == 0
            lost |= tl.max(((tl.abs(value) < float("inf")) & (values < V)).to(tl.int32), 0) == 0
            gone = tl.maximum(gone, lost.to(tl.int32))
        out = out / weight[:, None]
        mend(o, out, line[:, None] * V + values[None, :], (i < T)[:, None] & (values < V)[None, :])
        bad, blocks = first_bad(head_of_o, H * V, values, bad + 1 + gone * blocks, T, V, BM, LOOK)


def settings(dtype: torch.dtype, width: int) -> dict[str, int]:
    """Queries of a block, the fewest that any kernel of such values takes together, and pairs of a tile."""
    if dtype == torch.float32:
        side = 32 if width <= 128 else 16
        return {"BM": side, "BN": side, "num_warps": 4, "num_stages": 1}
    return {"BM": 64, "BN": 32, "num_warps": 4 if width <= 128 else 8, "num_stages": 1}


def _contain(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, high: Tensor | None, low: Tensor | None, offsets: Tensor | None,
    scale: float, old: int, window: int | None, stay: int,
) -> None:  # fmt: skip
    chosen = settings(q.dtype, max(k.shape[3], v.shape[3]))
    units, h = q.shape[0] if offsets is None else offsets.shape[0] - 1, q.shape[2]
    none = high is None or low is None
    parts = (q, q, (0, 0, 0)) if high is None or low is None else (high, low, high.stride())
    with layout.on_device(q):
        _again[(units * h,)](
            q, k, v, *parts[:2], o, q if offsets is None else offsets, scale, q.shape[1], old, window or 0, stay, h,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *parts[2], *o.stride()[:3],
            GROUP=h // k.shape[2], K=k.shape[3], V=v.shape[3], BK=max(16, power_of_2(k.shape[3])),
            BV=max(16, power_of_2(v.shape[3])), LOOK=_LOOK, MASS=not none, PACKED=offsets is not None,
            WINDOW=window is not None, PRECISION=layout.precision(q), **chosen,
        )  # fmt: skip


_operator = in_place("attention_again", _contain, ("o",))


def contain(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, high: Tensor | None, low: Tensor | None, offsets: Tensor | None,
    scale: float, old: int, window: int | None = None, stay: int = 0,
) -> None:  # fmt: skip
    """Read again, into o, what a kernel lost of queries to values that they do not see.

    o and q (B, T, H, .), k and v (B, S, G, .), masses in two parts (B, S, G) or None, any strides but the last, which
    is 1; offsets and old as `attend` has them; a query sees its last `window` pairs and the first `stay`, or all.
    """
    _operator(o, q, k, v, high, low, offsets, scale, old, window, stay)


def contain_carried(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, high: Tensor | None, low: Tensor | None,
    scale: float, block: int,
) -> None:  # fmt: skip
    """`contain` where tokens carry keys on: contiguous tensors, (B, T, H, .), masses (B, T, H) or None, and the queries
    that a kernel takes together at least."""
    batch, length, h, d_k = q.shape
    none = high is None or low is None
    with layout.on_device(q):
        _again_carried[(batch * h,)](
            q, k, v, a, b, q if none else high, q if none else low, o, scale, length, h, K=d_k, V=v.shape[3],
            BK=max(16, power_of_2(d_k)), BV=max(16, power_of_2(v.shape[3])), BM=block, LOOK=_LOOK, MASS=not none,
            num_warps=8, num_stages=1,
        )  # fmt: skip


__all__ = ["contain", "contain_carried"]
