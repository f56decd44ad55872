"""Products that are symmetric, C = alpha A B^T + beta D + gamma E + delta I, from the lower triangle, in Triton.

A Gram matrix, the square of a symmetric matrix and the product of two polynomials in one matrix are symmetric: a tile
below the diagonal is computed once and stored twice. That is 36 of 64 tiles at a side of 1024. Tiles arrive by
descriptors, so rows and columns past the edge read as zero and are not written; matrices are a batch. On Hopper the
same is written for its processors (`hopper_symmetric`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.versions import gluon_refusal

if _GLUON := gluon_refusal() is None:  # on an unknown Triton this module raises, and the portable kernel runs
    from axes.kernels.products import hopper_symmetric

_TILE, _DEPTH = 128, 64  # sides of a tile of C, and of the slices of A and B that a step multiplies
_WARPS, _STAGES = 4, 3  # two programs a processor: one stores while the other multiplies
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
    a, b, d, e, c, factors, K, tiles, alpha, beta, gamma, delta,
    TERMS: tl.constexpr, COLUMNS: tl.constexpr, FACTORS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix of the batch. COLUMNS: A and B are stored by columns, (K, m) in memory."""
    pid = tl.program_id(0)
    batch = pid // tiles
    i, j = _corner(pid % tiles)
    row, col = i * TILE, j * TILE
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in tl.range(0, K, DEPTH):
        if COLUMNS:
            left = a.load([batch, k, row]).reshape(DEPTH, TILE).T
            right = b.load([batch, k, col]).reshape(DEPTH, TILE)
        else:
            left = a.load([batch, row, k]).reshape(TILE, DEPTH)
            right = b.load([batch, col, k]).reshape(TILE, DEPTH).T
        total = tl.dot(left, right, total)
    if FACTORS:
        alpha *= tl.load(factors + 2 * batch)
        beta *= tl.load(factors + 2 * batch + 1)
    total *= alpha
    if TERMS > 0:
        term = beta * d.load([batch, row, col]).reshape(TILE, TILE).to(tl.float32)
        total += tl.where(beta == 0.0, 0.0, term)
    if TERMS > 1:
        total += gamma * e.load([batch, row, col]).reshape(TILE, TILE).to(tl.float32)
    if i == j:
        at = tl.arange(0, TILE)
        out = tl.where(at[:, None] == at[None, :], total + delta, total).to(c.dtype)
        out = tl.where(at[:, None] >= at[None, :], out, out.T)
        c.store([batch, row, col], out.reshape(1, TILE, TILE))
    else:
        out = total.to(c.dtype)
        c.store([batch, row, col], out.reshape(1, TILE, TILE))
        c.store([batch, col, row], out.T.reshape(1, TILE, TILE))


def symmetric_product(
    a: Tensor,
    b: Tensor | None = None,
    *,
    alpha: float = 1.0,
    terms: Sequence[tuple[float, Tensor]] = (),
    diagonal: float = 0.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """C = alpha A B^T + beta D + gamma E + delta I (N, m, m), where all of it is symmetric but for rounding.

    a, b (N, m, k), both bfloat16 or float16 and stored by rows or both by columns (as `.mT` of a contiguous tensor
    is), or float32 by rows on Hopper, rounded to 11 bits; b None for a. terms: at most two pairs (number, (N, m, m)),
    read on and below the diagonal. diagonal: delta. factors (N, 2): float32, of alpha and beta in each matrix; a D
    whose beta is 0 does not count, whatever it is.
    out: where C goes, contiguous and neither a nor b, but a term if need be; else it is made, in `dtype` or that of a.
    m and k are multiples of 8. Sums are float32; C is exactly symmetric and the same at every run.
    Raises ShapeError for shapes, dtypes, layouts and devices that do not fit.
    """
    _check(a, b, terms, out, factors)
    n, m, k = a.shape
    c = a.new_empty(n, m, m, dtype=dtype or a.dtype) if out is None else out
    if not n or not m:
        return c
    if _GLUON and hopper_symmetric.fits(a):
        with layout.on_device(a):
            hopper_symmetric.launch(a, b, c, alpha, terms, diagonal, factors)
        return c
    columns = a.stride(-1) != 1
    slices = [1, _DEPTH, _TILE] if columns else [1, _TILE, _DEPTH]
    square = [1, _TILE, _TILE]
    left = TensorDescriptor.from_tensor(a.mT if columns else a, slices)
    right = left if b is None else TensorDescriptor.from_tensor(b.mT if columns else b, slices)
    to = TensorDescriptor.from_tensor(c, square)
    first, second = ([TensorDescriptor.from_tensor(x, square) for _, x in terms] + [to, to])[:2]
    beta, gamma = ([x for x, _ in terms] + [0.0, 0.0])[:2]
    side = cdiv(m, _TILE)
    tiles = side * (side + 1) // 2
    with layout.on_device(a):
        _symmetric[(n * tiles,)](
            left, right, first, second, to, c if factors is None else factors, k, tiles,
            float(alpha), float(beta), float(gamma), float(diagonal), TERMS=len(terms), COLUMNS=columns,
            FACTORS=factors is not None, TILE=_TILE, DEPTH=_DEPTH, num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
    return c


def _check(
    a: Tensor, b: Tensor | None, terms: Sequence[tuple[float, Tensor]], out: Tensor | None, factors: Tensor | None
) -> None:
    who, other = "symmetric_product", a if b is None else b
    if a.ndim != 3 or other.shape != a.shape:
        raise ShapeError(f"{who}: a and b are (N, m, k) alike, not {tuple(a.shape)} and {tuple(other.shape)}")
    if a.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"{who}: the Triton kernel needs a CUDA device, not {a.device}: torch.baddbmm runs anywhere")
    known = a.dtype in TYPES or layout.interpreted() or _GLUON and hopper_symmetric.fits(a)
    if not known or other.dtype != a.dtype:
        raise ShapeError(
            f"{who}: a and b share one of bf16 and fp16, or float32 by rows on Hopper, not {a.dtype} and {other.dtype}"
        )
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
    if factors is not None and (
        tuple(factors.shape) != (a.shape[0], 2)
        or factors.dtype != torch.float32
        or not factors.is_contiguous()
        or factors.device != a.device
    ):
        raise ShapeError(
            f"{who}: factors are float32, contiguous, ({a.shape[0]}, 2), beside a, not {factors.dtype} of shape "
            f"{tuple(factors.shape)} on {factors.device}"
        )
    if out is not None and out.data_ptr() in (a.data_ptr(), other.data_ptr()):
        raise ShapeError(f"{who}: out must not be an input: other programs still read it")
