"""Queries and keys turned together by the same angles (RoPE): one pass over both, in float32, forward and back."""

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


_turned = Differentiable("turn", _forward, _backward, _shapes, gradients=2, twice=True)


def turn(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, T, H, d), k (B, T, G, d) of one dtype, turned by angles (T, d/2) or (B, T, d/2), which get no gradient."""
    angle = angle.contiguous()
    to_q, to_k = _turned(q, k, torch.cos(angle), torch.sin(angle), 1.0)
    return to_q, to_k
