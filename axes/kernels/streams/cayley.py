"""Rotations from logits, one launch each way: R = (I + A)^-1 (I - A), A = scale / 2 (Z^T - Z), n x n.

centred: A = C A C with C = I - 1 1^T / n, so that R and R^T keep the all-ones vector. R = 2 S - I, S = (I + A)^-1 by
elimination in its place: the symmetric part of I + A, and so of all that is left after a step, is no less than I, so
that every pivot is at least one and none is looked for. What that loses where logits are large, one step of Newton's
gives back: S + S (I - (I + A) S). The backward needs S = (R + I) / 2 alone:

    dA = -2 S^T dR S^T,       dZ = scale / 2 (dA^T - dA)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.streams import LARGEST
from axes.kernels.streams.sinkhorn import _ENTRIES, _WARPS, _places


@triton.jit
def _centre(a, inside, n, CENTRED: tl.constexpr):
    """Less the means of columns and of rows."""
    if CENTRED:
        a = tl.where(inside, a - tl.sum(a, 1, keep_dims=True) / n, 0.0)
        a = tl.where(inside, a - tl.sum(a, 2, keep_dims=True) / n, 0.0)
    return a


@triton.jit
def _row(a, i, k):
    return tl.sum(tl.where(i == k, a, 0.0), 1, keep_dims=True)


@triton.jit
def _column(a, j, k):
    return tl.sum(tl.where(j == k, a, 0.0), 2, keep_dims=True)


@Kernel
@triton.jit(do_not_specialize=["matrices"])
def _rotate(logits, out, matrices, half, n, CENTRED: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    first = matrix * n * n
    z = tl.load(logits + first + i * n + j, mask=inside, other=0.0).to(tl.float32)
    turned = tl.load(logits + first + j * n + i, mask=inside, other=0.0).to(tl.float32)
    one = tl.where(i == j, 1.0, 0.0)
    given = one + _centre((turned - z) * half, inside, n, CENTRED)
    s = given
    for k in range(n):
        row, column = _row(s, i, k), _column(s, j, k)
        pivot = 1.0 / _column(row, j, k)
        others = tl.where(j == k, -column * pivot, s - column * (row * pivot))
        s = tl.where(i == k, tl.where(j == k, pivot, row * pivot), others)
    rest = one + tl.zeros([ROWS, N, N], tl.float32)
    for k in range(n):
        rest -= _column(given, j, k) * _row(s, i, k)
    made = s
    for k in range(n):
        made += _column(s, j, k) * _row(rest, i, k)
    tl.store(out + first + i * n + j, 2.0 * made - one, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["matrices"])
def _rotate_backward(
    rotation, dout, dlogits, matrices, half, n, CENTRED: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr
):
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    first = matrix * n * n
    left = tl.zeros([ROWS, N, N], tl.float32)  # 2 S^T dR
    for k in range(n):
        s = tl.load(rotation + first + k * n + i, mask=rows, other=0.0) + tl.where(i == k, 1.0, 0.0)
        left += s * tl.load(dout + first + k * n + j, mask=columns, other=0.0)
    da = tl.zeros([ROWS, N, N], tl.float32)  # -dA
    for k in range(n):
        s = tl.load(rotation + first + j * n + k, mask=columns, other=0.0) + tl.where(j == k, 1.0, 0.0)
        da += _column(left, j, k) * (0.5 * s)
    da = _centre(tl.where(inside, da, 0.0), inside, n, CENTRED)
    tl.store(dlogits + first + i * n + j, half * (da - tl.permute(da, 0, 2, 1)), mask=inside)


def _launch(kernel: Kernel, like: Tensor, *given: Tensor, scale: float, centred: bool) -> None:
    matrices, n = like.shape[:2]
    side = power_of_2(n)
    rows = min(_ENTRIES // side**2, power_of_2(max(matrices, 1)))
    if matrices:
        with layout.on_device(like):
            kernel[(cdiv(matrices, rows),)](
                *given, matrices, scale / 2, n, CENTRED=centred, ROWS=rows, N=side, num_warps=_WARPS
            )


def _run(logits: Tensor, scale: float, centred: bool, record: bool) -> tuple[Tensor, list[Tensor]]:
    out = torch.empty_like(logits)
    _launch(_rotate, logits, logits, out, scale=scale, centred=centred)
    return out, []


def _differentiate(logits: Tensor, scale: float, centred: bool, kept: list[Tensor], dout: Tensor) -> list[Tensor]:
    (rotation,), dlogits = kept, torch.empty_like(logits)
    _launch(_rotate_backward, logits, rotation, dout, dlogits, scale=scale, centred=centred)
    return [dlogits]


_cayley = Differentiable(
    "cayley", _run, _differentiate, lambda logits, scale, centred, record: (torch.empty_like(logits), []),
    gradients=1, reads=1,
)  # fmt: skip


def cayley(logits: Tensor, scale: float, centred: bool = False) -> Tensor:
    """Rotations (..., n, n) in float32 of logits; centred: of the complement of the all-ones vector.

    Raises ShapeError for other shapes, n above 16, and devices that no kernel runs on.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not 1 <= logits.shape[-1] <= LARGEST:
        raise ShapeError(f"cayley: logits are (..., n, n) with n from 1 to {LARGEST}, not {tuple(logits.shape)}")
    if not logits.is_floating_point() or logits.dtype == torch.float64:
        raise ShapeError(f"cayley: logits of up to 32 bits, not {logits.dtype}")
    if logits.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"cayley: the Triton kernel needs a CUDA device, not {logits.device}")
    (out,) = _cayley(logits.to(torch.float32).reshape(-1, *logits.shape[-2:]).contiguous(), float(scale), centred)
    made: Tensor = out.view(logits.shape)
    return made
