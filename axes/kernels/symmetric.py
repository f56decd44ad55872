"""Products that are symmetric, C = alpha A B^T + beta D + gamma E + delta I, from the lower triangle, in Triton.

A Gram matrix, the square of a symmetric matrix and the product of two polynomials in one matrix are symmetric: a tile
below the diagonal is computed once and stored twice. That is 36 of 64 tiles at a side of 1024. Tiles arrive by
descriptors, so rows and columns past the edge read as zero and are not written; matrices are a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from axes.errors import ShapeError
from axes.kernels import layout
from axes.kernels.launch import Kernel

_SIDE, _DEPTH = 128, 64  # columns of a tile of C, and of the slices of A and B that a step multiplies


class _Launch(NamedTuple):
    """rows: of a tile, in sides. Two small programs a processor: one stores while the other multiplies."""

    rows: int
    warps: int
    stages: int


_SMALL = _Launch(1, 4, 3)
_LARGE = _Launch(2, 8, 3)  # reads a quarter less for every product, and computes a tenth more
_MANY = 1056  # large tiles from which those are faster: eight for every processor
TYPES = (torch.bfloat16, torch.float16)
MULTIPLE = 8  # of the sides: descriptors want rows of whole 16 bytes


@triton.jit
def _corner(t):
    """(i, j), i >= j, of the t-th tile of a lower triangle counted by rows."""
    i = ((tl.sqrt_rn(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@Kernel
@triton.jit
def _symmetric(
    a, b, d, e, c, turned, flat, K, m, tiles, alpha, beta, gamma, delta,
    TERMS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix of the batch, ROWS sides high. COLUMNS: A and B are stored by columns, (K, m) in memory.
    c, turned, flat: the same memory in tiles, in tiles of the other orientation, and as it is."""
    HIGH: tl.constexpr = ROWS * SIDE
    pid = tl.program_id(0)
    batch = pid // tiles
    place = pid % tiles
    i, j = _corner(place // ROWS)
    row, col = i * HIGH, (j * ROWS + place % ROWS) * SIDE
    total = tl.zeros((HIGH, SIDE), tl.float32)
    for k in tl.range(0, K, DEPTH):
        if COLUMNS:
            left = a.load([batch, k, row]).reshape(DEPTH, HIGH).T
            right = b.load([batch, k, col]).reshape(DEPTH, SIDE)
        else:
            left = a.load([batch, row, k]).reshape(HIGH, DEPTH)
            right = b.load([batch, col, k]).reshape(SIDE, DEPTH).T
        total = tl.dot(left, right, total)
    total *= alpha
    if TERMS > 0:
        total += beta * d.load([batch, row, col]).reshape(HIGH, SIDE).to(tl.float32)
    if TERMS > 1:
        total += gamma * e.load([batch, row, col]).reshape(HIGH, SIDE).to(tl.float32)
    if i > j:
        out = total.to(c.dtype)
        c.store([batch, row, col], out.reshape(1, HIGH, SIDE))
        turned.store([batch, col, row], out.T.reshape(1, SIDE, HIGH))
    else:
        x, y = row + tl.arange(0, HIGH)[:, None], col + tl.arange(0, SIDE)[None, :]
        out = tl.where(x == y, total + delta, total).to(c.dtype)
        if ROWS == 1:
            out = tl.where(x >= y, out, out.T)
            c.store([batch, row, col], out.reshape(1, HIGH, SIDE))
        else:
            at = flat + batch.to(tl.int64) * m * m
            lower = (x >= y) & (x < m)
            tl.store(at + x * m + y, out, mask=lower)
            tl.store(at + y.T * m + x.T, out.T, mask=lower.T)


def symmetric_product(
    a: Tensor,
    b: Tensor | None = None,
    *,
    alpha: float = 1.0,
    terms: Sequence[tuple[float, Tensor]] = (),
    diagonal: float = 0.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """C = alpha A B^T + beta D + gamma E + delta I (N, m, m), with an A B^T that is symmetric but for rounding.

    a, b (N, m, k), both bfloat16 or float16 and stored by rows or both by columns (as `.mT` of a contiguous tensor
    is); b None for a. terms: at most two pairs (number, symmetric (N, m, m)). diagonal: delta.
    out: where C goes, contiguous and neither a nor b; else it is made, in `dtype` or that of a. m and k are multiples
    of 8. Sums are float32; C is exactly symmetric and the same at every run.
    Raises ShapeError for shapes, dtypes, layouts and devices that do not fit.
    """
    _check(a, b, terms, out)
    n, m, k = a.shape
    c = a.new_empty(n, m, m, dtype=dtype or a.dtype) if out is None else out
    if not n or not m:
        return c
    side = triton.cdiv(m, _SIDE)
    how = _LARGE if n * _tiles(side, _LARGE.rows) >= _MANY else _SMALL
    high, columns = how.rows * _SIDE, a.stride(-1) != 1
    left = _slices(a, high)
    right = left if b is None and high == _SIDE else _slices(a if b is None else b, _SIDE)
    to, turned = (TensorDescriptor.from_tensor(c, tile) for tile in ([1, high, _SIDE], [1, _SIDE, high]))
    first, second = ([TensorDescriptor.from_tensor(x, [1, high, _SIDE]) for _, x in terms] + [to, to])[:2]
    beta, gamma = ([x for x, _ in terms] + [0.0, 0.0])[:2]
    tiles = _tiles(side, how.rows)
    with layout.on_device(a):
        _symmetric[(n * tiles,)](
            left, right, first, second, to, turned, c, k, m, tiles,
            float(alpha), float(beta), float(gamma), float(diagonal),
            TERMS=len(terms), COLUMNS=columns, ROWS=how.rows, SIDE=_SIDE, DEPTH=_DEPTH, num_warps=how.warps,
            num_stages=how.stages,
        )  # fmt: skip
    return c


def _tiles(side: int, rows: int) -> int:
    """Tiles that hold the lower triangle of side x side, `rows` high."""
    rungs = triton.cdiv(side, rows)
    return rows * rungs * (rungs + 1) // 2


def _slices(x: Tensor, high: int) -> TensorDescriptor:
    """Slices of `high` rows of x (N, m, k), in the order in which it is stored."""
    if x.stride(-1) != 1:
        return TensorDescriptor.from_tensor(x.mT, [1, _DEPTH, high])
    return TensorDescriptor.from_tensor(x, [1, high, _DEPTH])


def _check(a: Tensor, b: Tensor | None, terms: Sequence[tuple[float, Tensor]], out: Tensor | None) -> None:
    who, other = "symmetric_product", a if b is None else b
    if a.ndim != 3 or other.shape != a.shape:
        raise ShapeError(f"{who}: a and b are (N, m, k) alike, not {tuple(a.shape)} and {tuple(other.shape)}")
    if a.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"{who}: the Triton kernel needs a CUDA device, not {a.device}: torch.baddbmm runs anywhere")
    if (a.dtype not in TYPES and not layout.interpreted()) or other.dtype != a.dtype:
        raise ShapeError(f"{who}: a and b share one of bf16 and fp16, not {a.dtype} and {other.dtype}")
    if a.shape[1] % MULTIPLE or a.shape[2] % MULTIPLE:
        raise ShapeError(f"{who}: m and k must be multiples of {MULTIPLE}, got {tuple(a.shape[1:])}: use torch.baddbmm")
    by = 1 if a.stride(-1) == 1 else 2
    for name, x in (("a", a), ("b", other)):
        y = x if by == 1 else x.mT
        if y.stride(-1) != 1 or y.stride(-2) % MULTIPLE or y.stride(0) % MULTIPLE or x.data_ptr() % 16:
            raise ShapeError(
                f"{who}: {name} must be stored by rows or by columns like the other, on whole 16 bytes, "
                f"not with strides {x.stride()}"
            )
    square = (a.shape[0], a.shape[1], a.shape[1])
    if len(terms) > 2:
        raise ShapeError(f"{who}: at most two terms, got {len(terms)}")
    squares = [(f"term {i}", x) for i, (_, x) in enumerate(terms)] + ([] if out is None else [("out", out)])
    for name, y in squares:
        if tuple(y.shape) != square or not y.is_contiguous() or y.device != a.device or y.data_ptr() % 16:
            raise ShapeError(f"{who}: {name} is contiguous, of shape {square}, beside a, not {tuple(y.shape)}")
    if out is not None and out.data_ptr() in (a.data_ptr(), other.data_ptr()):
        raise ShapeError(f"{who}: out must not be an input: other programs still read it")
