"""Rotations from logits, one launch each way: R = (I + A)^-1 (I - A), A = scale / 2 (Z^T - Z), n x n.

centred: A = C A C with C = I - 1 1^T / n, so that R and R^T keep the all-ones vector. R = 2 S - I, S = (I + A)^-1 by
elimination in its place: the symmetric part of I + A, and so of all that is left after a step, is no less than I, so
that every pivot is at least one and none is looked for. What that loses where logits are large, one step of Newton's
gives back: S + S (I - (I + A) S). The backward needs S = (R + I) / 2 alone:

    dA = -2 S^T dR S^T,       dZ = scale / 2 (dA^T - dA)

Of up to four rows a thread has a matrix.
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
from axes.kernels.streams.small import FEW, _entries, _kept, _less, _place, _sums, launch

# ---- a tile of matrices ----------------------------------------------------------------------------------------------


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


# ---- a matrix a thread -----------------------------------------------------------------------------------------------


@triton.jit
def _turned(a, N: tl.constexpr):
    made = ()
    for e in tl.static_range(N * N):
        made = made + (a[e % N * N + e // N],)  # type: ignore[assignment]
    return made


@triton.jit
def _scaled(a, scale, N: tl.constexpr):
    made = ()
    for e in tl.static_range(N * N):
        made = made + (scale * a[e],)  # type: ignore[assignment]
    return made


@triton.jit
def _plus(a, b, scale, N: tl.constexpr):
    """a + scale b."""
    made = ()
    for e in tl.static_range(N * N):
        made = made + (a[e] + scale * b[e],)  # type: ignore[assignment]
    return made


@triton.jit
def _plus_one(a, one, N: tl.constexpr):
    """a with so many times I."""
    made = ()
    for e in tl.static_range(N * N):
        made = made + (a[e] + one if e // N == e % N else a[e],)  # type: ignore[assignment]
    return made


@triton.jit
def _product(a, b, scale, N: tl.constexpr):
    """scale a b."""
    made = ()
    for e in tl.static_range(N * N):
        total = a[e // N * N] * b[e % N]
        for k in tl.static_range(1, N):
            total += a[e // N * N + k] * b[k * N + e % N]
        made = made + (scale * total,)  # type: ignore[assignment]
    return made


@triton.jit
def _means(a, N: tl.constexpr, AXIS: tl.constexpr):
    sums, made = _sums(a, N, AXIS), ()
    for k in tl.static_range(N):
        made = made + (sums[k] / N,)  # type: ignore[assignment]
    return made


@triton.jit
def _few_centred(a, N: tl.constexpr, CENTRED: tl.constexpr):
    if CENTRED:
        a = _less(a, _means(a, N, 0), N, 0)
        a = _less(a, _means(a, N, 1), N, 1)
    return a


@triton.jit
def _inverse(s, N: tl.constexpr):
    """By elimination in its place, pivots in their order."""
    for k in tl.static_range(N):
        pivot, made = 1.0 / s[k * N + k], ()
        for e in tl.static_range(N * N):
            if e == k * N + k:
                entry = pivot
            elif e // N == k:
                entry = s[e] * pivot
            elif e % N == k:
                entry = -s[e] * pivot
            else:
                entry = s[e] - s[e // N * N + k] * (s[k * N + e % N] * pivot)
            made = made + (entry,)  # type: ignore[assignment]
        s = made
    return s


@Kernel
@triton.jit(do_not_specialize=["matrices"])
def _few_rotate(logits, out, matrices, half, CENTRED: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    matrix, there = _place(matrices, ROWS)
    z = _entries(logits, matrix, there, N)
    a = _scaled(_plus(_turned(z, N), z, -1.0, N), half, N)
    given = _plus_one(_few_centred(a, N, CENTRED), 1.0, N)
    s = _inverse(given, N)
    rest = _plus_one(_product(given, s, -1.0, N), 1.0, N)
    s = _plus(s, _product(s, rest, 1.0, N), 1.0, N)
    _kept(out, _plus_one(_scaled(s, 2.0, N), -1.0, N), matrix, there, N)


@Kernel
@triton.jit(do_not_specialize=["matrices"])
def _few_rotate_backward(
    rotation, dout, dlogits, matrices, half, CENTRED: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr
):
    matrix, there = _place(matrices, ROWS)
    s = _turned(_plus_one(_entries(rotation, matrix, there, N), 1.0, N), N)  # 2 S^T
    da = _product(_product(s, _entries(dout, matrix, there, N), 1.0, N), s, 0.5, N)  # -dA
    da = _few_centred(da, N, CENTRED)
    _kept(dlogits, _scaled(_plus(da, _turned(da, N), -1.0, N), half, N), matrix, there, N)


# ---- launches --------------------------------------------------------------------------------------------------------


def _launch(few: Kernel, any_: Kernel, like: Tensor, *given: Tensor, scale: float, centred: bool) -> None:
    """few: of few rows."""
    matrices, n = like.shape[:2]
    if not matrices:
        return
    with layout.on_device(like):
        if n <= FEW:
            launch(few, matrices, *given, half=scale / 2, CENTRED=centred, N=n)
            return
        side = power_of_2(n)
        rows = min(_ENTRIES // side**2, power_of_2(matrices))
        any_[(cdiv(matrices, rows),)](
            *given, matrices, scale / 2, n, CENTRED=centred, ROWS=rows, N=side, num_warps=_WARPS
        )  # fmt: skip


def _run(logits: Tensor, scale: float, centred: bool, record: bool) -> tuple[Tensor, list[Tensor]]:
    out = torch.empty_like(logits)
    _launch(_few_rotate, _rotate, logits, logits, out, scale=scale, centred=centred)
    return out, []


def _differentiate(logits: Tensor, scale: float, centred: bool, kept: list[Tensor], dout: Tensor) -> list[Tensor]:
    (rotation,), dlogits = kept, torch.empty_like(logits)
    _launch(_few_rotate_backward, _rotate_backward, logits, rotation, dout, dlogits, scale=scale, centred=centred)
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
