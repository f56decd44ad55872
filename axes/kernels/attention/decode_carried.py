"""`carry_one`: one query a sequence over stored keys that its token carries on, k <- k (I + a b^T), in one pass.

    k'_i = k_i + (k_i . a) b  (i < n),   k'_n = k_n,   o = sum_i softmax_i(scale q . k'_i + m_i) v_i

A program goes through some pairs of one head; a second pass merges, as in `decode`. Keys are float32, since rounding
at every token would add up. Backwards torch's products, of scores that are made again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.attention.decode import merged, shares
from axes.kernels.attention.flash import tile
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import power_of_2

_LOG2E = tl.constexpr(1.4426950408889634)
_SIDE, _WARPS, _STAGES = 32, 4, 1  # pairs at a time; of loads ahead


@Kernel
@triton.jit(do_not_specialize=["S", "span", "heads"])
def _carry(
    q, k, new, v, a, b, mass, carried, out, most, weight, scale, S, span, heads, H,
    q_b, q_h, k_b, k_h, k_t, n_b, n_h, v_b, v_h, v_t, a_b, a_h, b_b, b_h, c_b, c_h, c_t,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, MASS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`span` of a head's S pairs, the last of which is the token's own."""
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)  # of all batch entries
    part = pid // heads
    x, y = head // H, head % H
    d, e = tl.arange(0, BK), tl.arange(0, BV)
    k += x * k_b + y * k_h
    v += x * v_b + y * v_h
    carried += x * c_b + y * c_h
    here = d < K
    query = tl.load(q + x * q_b + y * q_h + d, mask=here, other=0.0).to(tl.float32) * (scale * _LOG2E)
    own = tl.load(new + x * n_b + y * n_h + d, mask=here, other=0.0).to(tl.float32)
    picks = tl.load(a + x * a_b + y * a_h + d, mask=here, other=0.0).to(tl.float32)
    adds = tl.load(b + x * b_b + y * b_h + d, mask=here, other=0.0).to(tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    found = tl.zeros([BV], tl.float32)
    end = tl.minimum((part + 1) * span, S)
    for at in tl.range(part * span, end, BN, num_stages=STAGES):
        j = at + tl.arange(0, BN)
        key = tile(k, j, k_t, S - 1, d, K, BK, False).to(tl.float32)
        value = tile(v, j, v_t, end, e, V, BV, False).to(tl.float32)
        key += tl.sum(key * picks[None, :], 1)[:, None] * adds[None, :]
        key = tl.where((j == S - 1)[:, None], own[None, :], key)
        place = j.to(tl.int64)[:, None] * c_t + d[None, :]
        tl.store(carried + place, key.to(carried.dtype.element_ty), mask=(j < end)[:, None] & here[None, :])
        s = tl.sum(key * query[None, :], 1)
        if MASS:
            s += tl.load(mass + head * S + j, mask=j < end, other=0.0) * _LOG2E
        s = tl.where(j < end, s, float("-inf"))
        larger = tl.maximum(top, tl.max(s, 0))
        safe = tl.where(larger == float("-inf"), 0.0, larger)  # so far all pairs are without mass
        shrink, p = tl.exp2(top - safe), tl.exp2(s - safe)
        total = total * shrink + tl.sum(p, 0)
        found = found * shrink + tl.sum(p[:, None] * value, 0)
        top = larger
    number = part.to(tl.int64) * heads + head
    tl.store(most + number + tl.arange(0, 1), top)
    tl.store(weight + number + tl.arange(0, 1), total)
    tl.store(out + number * V + e, found, mask=e < V)


def _launch(
    q: Tensor, k: Tensor, new: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, scale: float,
    carried: Tensor,
) -> Tensor:  # fmt: skip
    q, k, new, v, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, new, v, a, b))
    (batch, h, s, d_v), d_k = v.shape, q.shape[-1]
    parts, span = shares(s, batch * h, _SIDE)
    out, most, weight = (q.new_empty(parts, batch * h, *n, dtype=torch.float32) for n in ((d_v,), (), ()))
    with layout.on_device(q):
        _carry[(parts * batch * h,)](
            q, k, new, v, a, b, most if mass is None else mass, carried, out, most, weight, scale, s, span, batch * h,
            h, *q.stride()[:2], *k.stride()[:3], *new.stride()[:2], *v.stride()[:3], *a.stride()[:2], *b.stride()[:2],
            *carried.stride()[:3], K=d_k, V=d_v, BK=max(16, power_of_2(d_k)), BV=max(16, power_of_2(d_v)), BN=_SIDE,
            MASS=mass is not None, STAGES=_STAGES, num_warps=_WARPS,
        )  # fmt: skip
    return merged(out, most, weight, v.new_empty(batch, h, 1, d_v))


def _forward(
    q: Tensor, k: Tensor, new: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, into: Tensor | None,
    scale: float, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    carried = k.new_empty(*k.shape[:2], v.shape[2], k.shape[3]) if into is None else into
    mass = None if mass is None else mass.float().contiguous()
    return _launch(q, k, new, v, a, b, mass, scale, carried), carried, []


def _shapes(
    q: Tensor, k: Tensor, new: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, into: Tensor | None,
    scale: float, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    return v.new_empty(*v.shape[:2], 1, v.shape[3]), k.new_empty(*k.shape[:2], v.shape[2], k.shape[3]), []


def _backward(
    q: Tensor, k: Tensor, new: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, into: Tensor | None,
    scale: float, kept: list[Tensor], dout: Tensor, dcarried: Tensor,
) -> list[Tensor | None]:  # fmt: skip
    query, own, values, picks, adds, dy = (x.to(k.dtype) for x in (q, new, v, a, b, dout))
    seen = k @ picks.mT
    keys = torch.cat((k + seen @ adds, own), -2)
    scores = scale * query @ keys.mT
    scores = scores if mass is None else scores + mass.to(k.dtype)[..., None, :]
    p = torch.softmax(scores, -1)
    dp = dy @ values.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    dkeys = dcarried + scale * ds.mT @ query
    back = dkeys[..., :-1, :]
    dseen = back @ adds.mT
    grads: list[Any] = [scale * ds @ keys, back + dseen @ picks, dkeys[..., -1:, :], p.mT @ dy, dseen.mT @ k]
    grads += [seen.mT @ back, None if mass is None else ds[..., 0, :]]
    given = (q, k, new, v, a, b, mass)
    return [g if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, given, strict=True)]


_once = Differentiable("carry_one", _forward, _backward, _shapes, gradients=7, twice=True)


def carry_one(
    q: Tensor, k: Tensor, new: Tensor, v: Tensor, a: Tensor, b: Tensor, mass: Tensor | None, *, scale: float,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o (B, H, 1, V) in v's dtype, and the keys (B, H, n + 1, K) after the token in that of k.

    q, new, a, b (B, H, 1, K), k (B, H, n, K) the keys before it, v (B, H, n + 1, V) values with its own; mass
    (B, H, n + 1), relative to something near the last pair's. into (B, H, n + 1, K) receives the keys, if given, and
    then nothing receives gradients. K and V from 1 to 256.
    """
    who = "carry_one"
    layout.check_tokens(who, q.transpose(1, 2), new.transpose(1, 2), v[..., -1:, :].transpose(1, 2))
    if v.shape[1] != q.shape[1] or q.shape[2] != 1:
        raise ShapeError(f"{who}: q is one token with the heads of v, {v.shape[1]}, not {tuple(q.shape)}")
    pairs = v.shape[2]
    layout.check_like(who, "k", k, (*q.shape[:2], pairs - 1, q.shape[3]), q.device)
    for name, x in (("a", a), ("b", b)):
        layout.check_like(who, name, x, tuple(q.shape), q.device)
    layout.check_like(who, "mass", mass, tuple(v.shape[:3]), q.device)
    layout.check_like(who, "into", into, (*q.shape[:2], pairs, q.shape[3]), q.device)
    out, carried = _once(q, k, new, v, a, b, mass, into, scale)
    return out, carried
