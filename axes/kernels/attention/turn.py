"""Queries and keys turned together by the same angles (RoPE): one pass over both, in float32, forward and back.

`turn_rows` turns one tensor by angles that are trained: y = R(s a) x, dx = R(-s a) dy, and of every pair
da = s (y_0 dy_1 - y_1 dy_0) = s (x_0 dx_1 - x_1 dx_0), by the side that is not rounded: sums of many of these cancel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2

_ROWS = 32


@Kernel
@triton.jit(do_not_specialize=["T"])
def _turn(
    q, k, cos, sin, to_q, to_k, T, H, G, q_b, q_t, q_h, k_b, k_t, k_h, sign,
    HALF: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Pairs (x_j, x_{j + d/2}) of a head of q, or of k behind q's heads. OWN: every batch entry has its own angles."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BD)
    here = (rows < T)[:, None] & (columns < HALF)[None, :]
    at = rows.to(tl.int64)[:, None] * HALF + columns[None, :]
    if OWN:
        at += batch * T * HALF
    c, s = tl.load(cos + at, mask=here, other=0.0), tl.load(sin + at, mask=here, other=0.0) * sign
    if head < H:
        source = q + batch * q_b + rows.to(tl.int64)[:, None] * q_t + head * q_h + columns[None, :]
        target = to_q + ((batch * T + rows)[:, None] * H + head) * (2 * HALF) + columns[None, :]
    else:
        source = k + batch * k_b + rows.to(tl.int64)[:, None] * k_t + (head - H) * k_h + columns[None, :]
        target = to_k + ((batch * T + rows)[:, None] * G + (head - H)) * (2 * HALF) + columns[None, :]
    x = tl.load(source, mask=here, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=here, other=0.0).to(tl.float32)
    kind = to_q.dtype.element_ty
    tl.store(target, (x * c - y * s).to(kind), mask=here)
    tl.store(target + HALF, (x * s + y * c).to(kind), mask=here)


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    (b, t, h, d), g = q.shape, k.shape[2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    to_q, to_k = q.new_empty(q.shape), k.new_empty(k.shape)  # contiguous, whatever the strides of what is turned
    if q.numel() + k.numel():
        with layout.on_device(q):
            _turn[(cdiv(t, _ROWS), h + g, b)](
                q, k, cos, sin, to_q, to_k, t, h, g, *q.stride()[:3], *k.stride()[:3], sign, HALF=d // 2,
                BD=power_of_2(d // 2), BT=_ROWS, OWN=cos.ndim == 3, num_warps=4,
            )  # fmt: skip
    return to_q, to_k


def _forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return *_launch(q, k, cos, sin, sign), []


def _backward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float, kept: list[Tensor], dq: Tensor, dk: Tensor
) -> list[Tensor]:
    """Turned back, which is differentiable as the turn is."""
    return list(_turned(dq, dk, cos, sin, -sign))


def _shapes(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return q.new_empty(q.shape), k.new_empty(k.shape), []


def _rows(x: Tensor, cos: Tensor, sin: Tensor, sign: float, dtype: torch.dtype) -> Tensor:
    """Rows (..., d) by the kernel of tokens of one head, written in this dtype."""
    made, half = torch.empty_like(x, dtype=dtype), cos.shape[-1]
    if x.numel():
        count = x.numel() // (2 * half)
        with layout.on_device(x):
            _turn[(cdiv(count, _ROWS), 1, 1)](
                x, x, cos, sin, made, made, count, 1, 0, 0, 2 * half, 0, 0, 2 * half, 0, sign, HALF=half,
                BD=power_of_2(half), BT=_ROWS, OWN=False, num_warps=4,
            )  # fmt: skip
    return made


def _rows_forward(
    x: Tensor, angle: Tensor, cos: Tensor, sin: Tensor, sign: float, dtype: torch.dtype, record: bool
) -> tuple[Tensor, list[Tensor]]:
    return _rows(x, cos, sin, sign, dtype), []


def _rows_backward(
    x: Tensor, angle: Tensor, cos: Tensor, sin: Tensor, sign: float, dtype: torch.dtype, kept: list[Tensor], dy: Tensor
) -> list[Tensor]:
    (y,) = kept
    dx = _rows(dy, cos, sin, -sign, x.dtype)
    held, heard = (x, dx) if x.dtype == torch.float32 else (y, dy)
    (a, b), (da, db) = held.chunk(2, -1), heard.chunk(2, -1)
    plus, minus = ((a, db), (b, da)) if sign > 0 else ((b, da), (a, db))
    return [dx, torch.mul(*plus, out=torch.empty_like(angle)).addcmul_(*minus, value=-1.0)]


def _rows_shapes(
    x: Tensor, angle: Tensor, cos: Tensor, sin: Tensor, sign: float, dtype: torch.dtype, record: bool
) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x, dtype=dtype), []


_turned_rows = Differentiable("turn_rows", _rows_forward, _rows_backward, _rows_shapes, gradients=2, reads=1)


def turn_rows(x: Tensor, angle: Tensor, cos: Tensor, sin: Tensor, sign: float, dtype: torch.dtype) -> Tensor:
    """x (..., d), turned by sign (1 or -1) times float32 angles (..., d/2) of given cosines and sines; as dtype.

    x and the angles receive gradients, once; cosines and sines none.
    """
    made: Tensor = _turned_rows(x.contiguous(), angle.contiguous(), cos.contiguous(), sin.contiguous(), sign, dtype)[0]
    return made


_turned = Differentiable("turn", _forward, _backward, _shapes, gradients=2, twice=True)


def turn(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, T, H, d), k (B, T, G, d) of one dtype, turned by angles (T, d/2) or (B, T, d/2), which get no gradient."""
    angle = angle.contiguous()
    to_q, to_k = _turned(q, k, torch.cos(angle), torch.sin(angle), 1.0)
    return to_q, to_k
