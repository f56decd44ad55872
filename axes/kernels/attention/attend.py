"""`attend`: causal softmax attention with masses on a GPU, its launches and its operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels import contain
from axes.kernels.attention import flash
from axes.kernels.attention.contain import contain as read_again
from axes.kernels.attention.masses import split
from axes.kernels.common import layout, versions
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import power_of_2


def settings(kernel: str, dtype: torch.dtype, width: int) -> dict[str, int]:
    """Queries and pairs of a tile, warps and pipeline stages: a function of the dtype and the wider of K and V."""
    if dtype == torch.float32:
        side = 32 if width <= 128 else 16
        return {"BM": side, "BN": side, "num_warps": 4, "num_stages": 1}
    m, n, warps, stages = _HALF[kernel][(width > 64) + (width > 128)]
    return {"BM": m, "BN": n, "num_warps": warps, "num_stages": stages}


# 16 bit, widths up to 64, 128 and 256
_HALF = {
    "forward": ((128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
    "queries": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 1)),
    "pairs": ((64, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 1)),
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None = None, *, scale: float, cu_seqlens: Tensor | None = None
) -> Tensor:
    """o_t = sum_i p_ti v_i with p_t = softmax over i <= n + t of scale q_t . k_i + mass_i.

    q (B, T, H, K), k (B, S, G, K), v (B, S, G, V) in one of bf16, fp16, fp32, with adjacent features; H a multiple of
    G: query head h reads the pairs of head h // (H / G). K, V from 1 to 256. S = n + T: n pairs that every token sees
    come first. mass (B, S, G), taken in float64; may be -inf, except at a token's own pair.
    cu_seqlens (U + 1,) int32 or int64 with B = 1: offsets 0, ..., T of U packed sequences; each stands in k, v and mass
    behind n pairs of its own, S = U n + T. Returns o (B, T, H, V); q, k, v and mass receive gradients, once.
    Raises ShapeError on what does not fit.
    """
    who = "attend"
    _check(who, q, k, v)
    b, t, h = q.shape[:3]
    layout.check_packing(who, b, cu_seqlens, q.device)
    layout.check_like(who, "mass", mass, tuple(k.shape[:3]), q.device)
    units = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    earlier = k.shape[1] - t
    old = earlier // units  # divmod is not traced
    if old < 0 or old * units != earlier:
        raise ShapeError(f"{who}: {t} tokens of {units} sequences do not go with {k.shape[1]} pairs")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mass = None if mass is None else mass.double()
    out: Tensor = _attend(q, k, v, mass, cu_seqlens, scale, old)[0]
    return out


def _check(who: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ShapeError(f"{who}: q, k, v are (B, T, H, D), not {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ShapeError(
            f"{who}: k is (B, S, G, K) and v (B, S, G, V) to q (B, T, H, K) = {tuple(q.shape)}, "
            f"not {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ShapeError(f"{who}: query heads are a multiple of the pairs' heads, not {q.shape[2]} of {k.shape[2]}")
    if not 1 <= k.shape[3] <= layout.LARGEST or not 1 <= v.shape[3] <= layout.LARGEST:
        raise ShapeError(f"{who}: K and V are from 1 to {layout.LARGEST}, not {k.shape[3]} and {v.shape[3]}")
    if q.dtype not in layout.DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ShapeError(f"{who}: q, k, v share one of bf16, fp16, fp32, not {q.dtype}, {k.dtype}, {v.dtype}")
    if q.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"{who}: the Triton kernels need a CUDA device, not {q.device}")


# ---- launches --------------------------------------------------------------------------------------------------------


def _run(kernel: Any, name: str, tensors: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, high: Tensor,
         mass: Tensor | None, cu: Tensor | None, scale: float, old: int) -> None:  # fmt: skip
    """One launch; `pairs` owns blocks of pairs, the others of queries."""
    chosen = settings(name, q.dtype, max(k.shape[3], v.shape[3]))
    by_pairs = name == "pairs"
    own, side = (k, chosen["BN"]) if by_pairs else (q, chosen["BM"])
    if cu is not None and by_pairs:
        cu = cu + old * torch.arange(cu.shape[0], device=cu.device, dtype=cu.dtype)
    cut = layout.layout(own.shape[0], own.shape[1], side, cu)
    none = high if mass is None else mass
    least = 16
    with layout.on_device(q):
        kernel[(cut.slots * own.shape[2],)](
            *tensors, none if cut.offsets is None else cut.offsets,
            none if cut.units_of_slots is None else cut.units_of_slots, scale, cut.length, cut.chunks, cut.slots,
            q.shape[0] * q.shape[1], old, q.shape[2], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *((0, 0, 0) if mass is None else high.stride()), GROUP=q.shape[2] // k.shape[2], K=k.shape[3],
            V=v.shape[3], BK=max(least, power_of_2(k.shape[3])),
            BV=max(least, power_of_2(v.shape[3])), MASS=mass is not None, PACKED=cut.packed,
            PRECISION=layout.precision(q), **chosen,
        )  # fmt: skip


def _on_hopper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if versions.hopper_refusal(q.device) is not None:
        return False
    from axes.kernels.attention import hopper

    return hopper.fits(q, k, v)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None, cu: Tensor | None, scale: float, old: int, record: bool
) -> tuple[Tensor, list[Tensor]]:
    """o, and log2 of the sum of every query's weights (H, B T)."""
    o, (lse,) = _shapes(q, k, v, mass, cu, scale, old, True)
    high, low = split(mass, q)
    if cu is None and _on_hopper(q, k, v):
        from axes.kernels.attention import hopper

        hopper.attend(q, k, v, None if mass is None else (high, low), o, lse, scale)
    else:
        _run(flash.forward, "forward", (q, k, v, high, low, o, lse), q, k, v, high, mass, cu, scale, old)
    if contain.PICKED:
        parts = (None, None) if mass is None else (high, low)
        read_again(o, q, k, v, parts[0], parts[1], cu, scale, old)
    return o, [lse] if record else []


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None, cu: Tensor | None, scale: float, old: int, record: bool
) -> tuple[Tensor, list[Tensor]]:
    b, t, h = q.shape[:3]
    lse = [q.new_empty(h, b * t, dtype=torch.float32)] if record else []
    return q.new_empty(b, t, h, v.shape[3]), lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, mass: Tensor | None, cu: Tensor | None, scale: float, old: int,
    kept: list[Tensor], do: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and mass (empty where there is none)."""
    o, lse = kept
    if cu is None and _on_hopper(q, k, v):
        from axes.kernels.attention import hopper_backward

        dq, dk, dv, dm = hopper_backward.attend(q, k, v, None if mass is None else split(mass, q), o, lse, do, scale)
        return [dq, dk, dv, dm.double()]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dots = torch.empty_like(lse)
    high, low = split(mass, q)
    sums, dm = (dots, dots) if mass is None else (torch.empty_like(lse), q.new_empty(k.shape[:3], dtype=torch.float32))
    rest = (q, k, v, high, mass, cu, scale, old)
    _run(flash.queries, "queries", (q, k, v, high, low, o, do, lse, dq, dots, sums), *rest)
    _run(flash.pairs, "pairs", (q, k, v, high, low, do, lse, dots, sums, dk, dv, dm), *rest)
    return [dq, dk, dv, dm.double()]


_attend = Differentiable("attend", _forward, _backward, _shapes, gradients=4, reads=1)
