"""Inverse roots and orthonormal columns made of matrix products, for batches of matrices of one size.

A decomposition goes through a matrix column by column; a product fills a processor. What a product keeps of its inputs
is `precision`, and no result is trusted that did not converge: it is NaN, which whoever holds a root or a basis sees.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.kernels.common import versions
from axes.linalg import symmetric
from axes.linalg.accumulate import no_kernel, outer_sum

Precision = Literal["input", "bfloat16x3", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("input", "bfloat16x3", "tf32")
# Rounding relative to the norm of a matrix reaches this share of it: smaller eigenvalues have lost their sign.
LEAST_DAMPING: dict[Precision, float] = {"input": 1e-7, "bfloat16x3": 1e-4, "tf32": 1e-2}
# An iteration of the coupled recurrence lowers no eigenvalue below this share of the largest (in A^{1/p}).
_KEPT = 0.7
_BLOCK = 256  # triangular matrices up to this size are inverted by the library: more than 8 at once, it has one kernel
_ALONE = 1024  # matrices beyond this size are factored one by one, on streams of their own
_WHOLE = 1024  # triangles up to this size are multiplied as full matrices
_PARTS = 4  # else by so many blocks of columns, which leaves out 3/8 of the work
_UNIT: dict[Precision, float] = {"input": 0.0, "bfloat16x3": 2.0**-16, "tf32": 2.0**-10}  # rounding of a product
_MARGIN: dict[Precision, float] = {"input": 1e-4, "bfloat16x3": 1e-3, "tf32": 1e-2}  # of a computed norm
_TOLERANCE: dict[Precision, float] = {"input": 1e-6, "bfloat16x3": 1e-4, "tf32": 1e-3}  # of a root
_DELTA: dict[Precision, float] = {"input": 1e-6, "bfloat16x3": 1e-5, "tf32": 1e-3}


# ---- products --------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, precision: Precision = "input") -> Tensor:
    """a b of (..., m, k) and (..., k, n), in their dtype.

    precision: "input" is torch's own product; "bfloat16x3" splits both into two bfloat16 numbers and adds the three
    larger products in float32, which keeps 16 bits of each entry; "tf32" keeps 11.
    """
    if precision == "input":
        return a @ b
    if precision == "tf32":
        return _tf32(a.float(), b.float()).to(a.dtype)
    # one product of three times the length, so that the sum stays in the accumulator
    return _wide_product(_thirds(a, -1, (0, 0, 1)), _thirds(b, -2, (0, 1, 0))).to(a.dtype)


def symmetric_product(a: Tensor, b: Tensor | None = None, precision: Precision = "input") -> Tensor:
    """a b^T of (..., m, k) where it is symmetric: b is a (None), or both are symmetric and commute.

    Where a kernel computes every pair of entries once, half the work of `product`; see there for precision.
    """
    other = a if b is None else b
    if precision == "input" and b is None:
        return outer_sum(a.mT).to(a.dtype)
    if rounded_by_kernel(a, precision):
        one, two = (x.reshape(-1, *x.shape[-2:]) for x in (a, other))
        whole = symmetric.by_kernel(one, None if b is None else two)
        return whole.reshape(*a.shape[:-2], *whole.shape[-2:])
    if precision != "bfloat16x3":
        return product(a, other.mT, precision)
    rows = a.stride(-1) == 1  # else its transpose is stored by rows, and so are its halves
    left, right = (
        _thirds(x, -1, order) if rows else _thirds(x.mT, -2, order).mT
        for x, order in ((a, (0, 0, 1)), (other, (0, 1, 0)))
    )
    batch = a.shape[:-2]
    one, two = ((x.flatten(0, -3) if batch else x[None]) for x in (left, right))
    if symmetric.no_kernel(one) is not None:
        return _wide_product(left, right.mT).to(a.dtype)
    whole = symmetric.product(one, two, dtype=torch.float32)
    return whole.reshape(*batch, *whole.shape[-2:]).to(a.dtype)


def rounded_by_kernel(a: Tensor, precision: Precision) -> bool:
    """Whether a kernel computes one triangle of A A^T, A (..., m, k), from float32 rounded to 11 bits."""
    if precision != "tf32":
        return False
    return symmetric.no_kernel(a[None] if a.ndim == 2 else a.flatten(0, -3), rounded=True) is None


def halved(x: Tensor, precision: Precision) -> bool:
    """Whether X^T X (..., m, n) is best left whole: a kernel computes one half of it, or every part would make halves
    of its own factors."""
    if precision == "tf32":
        return rounded_by_kernel(x.mT, precision)
    return precision == "bfloat16x3" or no_kernel(x) is None


def column_blocks(n: int, count: int) -> list[tuple[int, int]]:
    """n columns in blocks (first, end)."""
    ends = [n * i // count for i in range(count + 1)]
    return list(zip(ends, ends[1:], strict=False))


def largest_entry(matrix: Tensor) -> Tensor:
    """max |A| (..., 1, 1), not a number where an entry is none, without a copy of A."""
    if matrix.is_cuda:  # one pass; on a CPU this norm takes eight times as long
        return torch.linalg.vector_norm(matrix, math.inf, dim=(-2, -1), keepdim=True)
    return torch.maximum(matrix.amax((-2, -1), keepdim=True), -matrix.amin((-2, -1), keepdim=True))


def _thirds(x: Tensor, dim: int, order: tuple[int, int, int]) -> Tensor:
    """The high (0) and low (1) bfloat16 halves of x, one after another along a dimension in this order."""
    x = x.float()
    if versions.refusal(x.device) is None and not (x.requires_grad and torch.is_grad_enabled()):
        from axes.kernels.products import halves  # triton is imported on first use

        flat = halves.thirds(x.flatten(0, -3) if x.ndim > 2 else x[None], dim, order)
        return flat.unflatten(0, x.shape[:-2]) if x.ndim > 2 else flat[0]
    high = x.bfloat16()
    parts = (high, (x - high).bfloat16())
    return torch.cat([parts[i] for i in order], dim)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of 16-bit matrices in float32."""
    if a.device.type != "cuda":
        return a.float() @ b.float()
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if not batch:
        return torch.mm(a, b, out_dtype=torch.float32)
    a, b = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    return torch.bmm(a, b, out_dtype=torch.float32).unflatten(0, batch)


def add_product(
    total: Tensor, a: Tensor, b: Tensor, keep: float, rate: float, precision: Precision = "input"
) -> Tensor:
    """keep * total + rate * a b in the place of `total` (N, m, n), which is not read for keep 0; returns it.

    One pass over `total`, inside the product, but for "bfloat16x3" and float64 with "tf32"; see `product`.
    """
    if precision == "bfloat16x3" or (precision == "tf32" and total.dtype != torch.float32):
        term = product(a, b, precision)
        if keep == 0:
            return total.copy_(term if rate == 1 else rate * term)
        return (total if keep == 1 else total.mul_(keep)).add_(term, alpha=rate)
    if precision == "input":
        return total.baddbmm_(a, b, beta=keep, alpha=rate)
    if total.device.type != "cuda":
        a, b = _rounded(a), _rounded(b)
    with _tf32_allowed(total.device):
        return total.baddbmm_(a, b, beta=keep, alpha=rate)


def _tf32(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices rounded to 11 bits, added in float32."""
    if a.device.type != "cuda":
        return _rounded(a) @ _rounded(b)
    with _tf32_allowed(a.device):
        return a @ b


@contextmanager
def _tf32_allowed(device: torch.device) -> Iterator[None]:
    """Float32 products on a GPU round their factors to 11 bits."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    name, on = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    setattr(matmul, name, on)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def _rounded(x: Tensor) -> Tensor:
    """float32 to 11 bits, to nearest even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


# ---- inverse roots ---------------------------------------------------------------------------------------------------


def largest(matrix: Tensor, precision: Precision = "input") -> Tensor:
    """|A|_8 = (sum l_i^8)^{1/8} (..., 1, 1) of symmetric A: from its largest eigenvalue up to n^{1/8} times that."""
    unit, top = _scaled(matrix)
    size = torch.linalg.matrix_norm(unit, keepdim=True)
    size = torch.where(size == 0, 1.0, size)
    square = unit / size
    for _ in range(2):
        square = symmetric_product(square, square, precision)
    return top * size * torch.linalg.matrix_norm(square, keepdim=True) ** 0.25


def _scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A / m and m = max |A| (..., 1, 1), 1 for A = 0: squares of entries neither overflow nor vanish."""
    top = largest_entry(matrix)
    top = torch.where(top == 0, 1.0, top)
    return matrix / top, top


class Newton(NamedTuple):
    """The coefficients (a, b) of every iteration; the relative error of any root before the last, and after it."""

    steps: tuple[tuple[float, float], ...]
    before: float
    error: float


@functools.lru_cache(maxsize=256)
def newton_schedule(order: int, low: float, tolerance: float) -> Newton:
    """Coefficients for eigenvalues in [low, 1], until all are within `tolerance` of the root.

    With s = x^{1/order} an iteration is s -> s (a - b s^order). Its values at both ends of the interval are made equal
    and as far below 1 as its maximum is above, the best polynomial of its degree; but the upper end keeps 0.7 of the
    maximum, since an eigenvalue that becomes small there has lost its digits to the large ones.
    """
    lower, upper = low ** (1 / order), 1.0
    least = _least_ratio(order)
    steps: list[tuple[float, float]] = []
    before = error = 1.0
    while error > tolerance and len(steps) < 100:
        gap = upper - lower
        ends = (upper ** (order + 1) - lower ** (order + 1)) / gap if gap > 1e-9 else (order + 1) * upper**order
        ratio = max(ends, least * upper**order)
        top = min((ratio / (order + 1)) ** (1 / order), upper)
        highest = top * (ratio - top**order)
        lowest = min(x * (ratio - x**order) for x in (lower, upper))
        # away from convergence the maximum goes to 1, the top of the next interval
        b = 2 / (highest + lowest) if lowest > highest / 2 else 1 / highest
        steps.append((b * ratio, b))
        lower, upper = b * lowest, b * highest
        before, error = error, max(1 - lower, upper - 1)
    return Newton(tuple(steps), before, error)


def _least_ratio(order: int) -> float:
    """a / b for which x (a/b - x^order) at 1 is _KEPT of its maximum on [0, 1]."""
    low, high = 1.0, float(order + 1)
    for _ in range(60):
        ratio = (low + high) / 2
        top = (ratio / (order + 1)) ** (1 / order)
        low, high = (ratio, high) if ratio - 1 < _KEPT * top * (ratio - top**order) else (low, ratio)
    return high


def newton_inverse_root(
    matrix: Tensor, order: int, damping: float, eps: float = 0.0, precision: Precision = "input"
) -> Tensor:
    """(A + (eps + damping |A|) I)^{-1/order} of symmetric semi-definite A (..., n, n) by coupled Newton iterations.

        T = a I - b M,  X <- X T,  M <- T^order M,   X_0 = c^{-1/order} I,  M_0 = (A + ...) / c

    |A| is `largest`, so that damping bounds the eigenvalues of M_0 from below: the interval they lie in is known
    beforehand, and with it the coefficients and how many iterations there are. NaN where M did not come as close
    to I as it must (A is not finite, or not semi-definite to rounding); 0 where A and eps are 0.

    Source: Guo and Higham 2006 (coupled Newton iteration). Differs: minimax coefficients instead of ((p+1)/p, 1/p).

    Raises:
        AxesError: order below 1, or damping below LEAST_DAMPING[precision].
    """
    if order < 1:
        raise AxesError(f"newton_inverse_root: order must be at least 1, got {order}")
    if damping < LEAST_DAMPING[precision]:
        raise AxesError(
            f"newton_inverse_root: with precision {precision!r} damping must be at least {LEAST_DAMPING[precision]:g}, "
            f"got {damping}"
        )
    tolerance = 1e-12 if matrix.dtype == torch.float64 and precision == "input" else _TOLERANCE[precision]
    schedule = newton_schedule(order, damping / (1 + damping), tolerance)
    bound = largest(matrix, precision)
    shift = eps + damping * bound
    bound = (1 + _MARGIN[precision]) * bound + shift
    empty = bound == 0
    scale = torch.where(empty, 1.0, bound)
    m = matrix / scale
    m.diagonal(dim1=-2, dim2=-1).add_((shift / scale)[..., 0])
    x: Tensor | None = None
    distance = torch.zeros_like(scale)
    for i, (a, b) in enumerate(schedule.steps):
        t = -b * m
        t.diagonal(dim1=-2, dim2=-1).add_(a)
        x = t if x is None else symmetric_product(x, t, precision)
        if i + 1 < len(schedule.steps):
            m = symmetric_product(_power(t, order, precision), m, precision)
            m = (m + m.mT).mul_(0.5)
        if i + 2 == len(schedule.steps):
            rest = m.clone()
            rest.diagonal(dim1=-2, dim2=-1).sub_(1)
            distance = torch.linalg.matrix_norm(rest, keepdim=True)
    assert x is not None
    expected = 1.5 * math.sqrt(matrix.shape[-1]) * ((1 + schedule.before) ** order - 1)
    size = torch.where(distance < 1 + expected, scale ** (-1 / order), torch.nan)
    return x * torch.where(empty, 0.0, size)


def _power(x: Tensor, exponent: int, precision: Precision) -> Tensor:
    """x^exponent by squaring."""
    if exponent == 1:
        return x
    half = _power(x, exponent // 2, precision)
    square = symmetric_product(half, half, precision)
    return symmetric_product(square, x, precision) if exponent % 2 else square


# ---- eigenvectors ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("axes::decomposed", mutates_args=())
def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        values, vectors = (x.to(matrix.device) for x in torch.linalg.eigh(matrix.cpu()))
    return values, vectors


@_decomposed.register_fake
def _(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


@_decomposed.register_vmap
def _(info: Any, dims: tuple[int | None, ...], matrix: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    (dim,) = dims
    assert dim is not None
    return decomposed(matrix.movedim(dim, 0)), (0, 0)


def decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, rising, and eigenvectors of finite symmetric A (..., n, n), as torch.linalg.eigh has them.

    A GPU's solver of batches gives some matrices up that are ordinary ones to LAPACK: such a batch goes there. An
    operator, so that what is compiled, or written down to be followed, asks LAPACK too.
    """
    values, vectors = _decomposed(matrix) if matrix.is_cuda else torch.linalg.eigh(matrix)
    return values, vectors


def eigenvectors(matrix: Tensor) -> Tensor:
    """Orthonormal eigenvectors of symmetric semi-definite A (..., n, n) as columns, by rising eigenvalues.

    Rounding alone would decide which basis of a null space they are: there they are those of diag(1, ..., n) on it, so
    that an A that differs in its last bits has nearly the same. Eigenvalues of at most 8 units of rounding of the
    largest count as 0. Of a zero of a Gram matrix rounding leaves up to 4 (n = 8 to 2048, any rank), while the smallest
    eigenvalue of a square Gaussian's is some 20 at n = 512: bounds that grow with n take many of its directions away.
    """
    values, vectors = decomposed(matrix)
    n = matrix.shape[-1]
    empty = values <= 8 * torch.finfo(matrix.dtype).eps * values[..., -1:].abs()
    if not bool((empty.sum(-1) > 1).any()):
        return vectors
    steps = torch.arange(1, n + 1, dtype=matrix.dtype, device=matrix.device) / n
    both = empty[..., :, None] & empty[..., None, :]
    inside = torch.where(both, vectors.mT @ (steps[:, None] * vectors), 0.0)
    others = torch.where(empty, 0.0, 1 + steps)  # above the spectrum of diag(1, ..., n) / n, in their order
    return vectors @ decomposed(inside + torch.diag_embed(others))[1]


# ---- orthonormal columns ---------------------------------------------------------------------------------------------


def inverse_cholesky(matrix: Tensor, precision: Precision = "input") -> Tensor:
    """K with K A K^T = I, lower triangular: the inverse of the Cholesky factor L of A (..., n, n).

    Only the upper triangle of A is read. Diagonal blocks of L are inverted together, and then pairs of neighbours until
    one is left: [[L_11, 0], [L_21, L_22]]^{-1} = [[K_11, 0], [-K_22 L_21 K_11, K_22]].

    precision: of the products of pairs. NaN where A is not positive definite.
    """
    n = matrix.shape[-1]
    flat = matrix.reshape(-1, n, n)
    count = 1 << max(0, (n - 1).bit_length() - _BLOCK.bit_length() + 1)  # blocks of at most _BLOCK, a power of two
    side = -(-n // count)
    if count * side > n:
        whole = torch.eye(count * side, dtype=matrix.dtype, device=matrix.device).repeat(len(flat), 1, 1)
        whole[:, :n, :n] = flat
        flat = whole
    factor, failed = _cholesky(flat)
    eye = torch.eye(side, dtype=matrix.dtype, device=matrix.device)
    inverse = torch.zeros_like(flat, memory_format=torch.contiguous_format)
    blocks = _diagonal_blocks(inverse, side)
    blocks.copy_(torch.linalg.solve_triangular(_diagonal_blocks(factor, side).contiguous(), eye, upper=False))
    missing = torch.where(failed == 0, 0.0, torch.nan).to(matrix.dtype)
    inverse.diagonal(dim1=-2, dim2=-1).add_(missing[:, None])
    while side < flat.shape[-1]:
        pairs = _diagonal_blocks(factor, 2 * side), _diagonal_blocks(inverse, 2 * side)
        fewer = 0 if pairs[0].shape[0] < pairs[0].shape[1] else 1  # one product for all of the other dimension
        inner: Precision = precision if side >= _BLOCK else "input"
        for known, found in zip(*(x.unbind(fewer) for x in pairs), strict=True):
            turned = product(known[:, side:, :side], found[:, :side, :side], inner)
            add_product(found[:, side:, :side], found[:, side:, side:], turned, 0.0, -1.0, inner)
        side = 2 * side
    return inverse[:, :n, :n].reshape(matrix.shape)


def _diagonal_blocks(matrices: Tensor, side: int) -> Tensor:
    """The diagonal blocks (N, count, side, side) of (N, count * side, count * side), as a view."""
    return matrices.unfold(1, side, side).unfold(2, side, side).diagonal(dim1=1, dim2=2).permute(0, 3, 1, 2)


def _cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Lower Cholesky factors of (N, n, n), of which the upper triangles are read, and (N,) 0 where there is one."""
    columns = matrices.mT  # what the library reads and writes is stored by columns
    if not (matrices.is_cuda and matrices.shape[-1] > _ALONE):
        factors, failed = torch.linalg.cholesky_ex(columns)
        return factors, failed
    factors = torch.empty_like(matrices, memory_format=torch.contiguous_format).mT
    failed = torch.empty(len(matrices), dtype=torch.int32, device=matrices.device)
    now = torch.cuda.current_stream(matrices.device)  # large ones side by side are faster than the library's batch
    streams = [torch.cuda.Stream(matrices.device) for _ in range(min(4, len(matrices)))]
    for stream in streams:
        stream.wait_stream(now)
    for i, matrix in enumerate(columns.unbind()):
        with torch.cuda.stream(streams[i % len(streams)]):
            torch.linalg.cholesky_ex(matrix, out=(factors[i], failed[i]))
    for stream in streams:
        now.wait_stream(stream)
    return factors, failed


def orthonormal(
    x: Tensor, method: Literal["cholesky", "householder"] = "cholesky", precision: Precision = "input"
) -> Tensor:
    """Q of X = Q R for (..., m, n), m >= n, of full rank; R has a positive diagonal.

    "householder" is torch.linalg.qr. "cholesky" takes R from X^T X = R^T R and X <- X R^{-1}, always on columns of unit
    length (which changes R alone) and with a shift that keeps rounding from making the sum indefinite, until
    X^T X = I + N with a small N, at most three times; N is then removed to second order by X <- X (I - U), U its upper
    half. NaN where the columns are too dependent for that: X of unit columns may have a condition number of some 1e5
    with precision "input", 1e4 with "bfloat16x3", 1e2 with "tf32". Whether N is small is read back from the device.

    Source: Fukaya, Kannan, Nakatsukasa, Yamamoto and Yanagisawa 2020 (shifted CholeskyQR3). Differs:
    unit columns, a smaller shift in every pass, and a last pass without a factorisation.
    """
    if method == "householder":
        q, r = torch.linalg.qr(x)
        return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    n = shape[-1]
    shift = 8 * _UNIT[precision] + 4 * math.sqrt(n) * torch.finfo(x.dtype).eps
    close = min(0.1, 4 * math.sqrt(shift))  # in the Frobenius norm, of which the last pass leaves about the square
    cuts = _cuts(n, precision)
    for remaining in (3, 2, 1, 0):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        gram = _upper_gram(x, cuts, precision)
        gram.diagonal(dim1=-2, dim2=-1).sub_(1)
        rest = _symmetric_norm(gram, cuts)
        if not remaining or bool(((rest < close) | rest.isnan()).all()):  # what is not a number does not become one
            break
        gram.diagonal(dim1=-2, dim2=-1).add_(1 + shift)
        x = _times_upper(x, inverse_cholesky(gram, precision).mT, cuts, precision)
    # a wrong diagonal makes every column of the result wrong
    gram.diagonal(dim1=-2, dim2=-1).mul_(torch.where(rest < 0.3, 0.5, torch.nan)[..., 0])
    out = x.clone()
    for first, end in cuts:
        gram[:, first:end, first:end].triu_()
        add_product(out[..., first:end], x[..., :end], gram[:, :end, first:end], 1.0, -1.0, precision)
    return out.reshape(shape)


def _cuts(n: int, precision: Precision) -> list[tuple[int, int]]:
    """Blocks of columns (first, end) in which a product with a triangle is computed."""
    whole = n <= _WHOLE or precision == "bfloat16x3"  # every product of halves makes the halves of its factors
    return column_blocks(n, 1 if whole else _PARTS)


def _times_upper(x: Tensor, upper: Tensor, cuts: list[tuple[int, int]], precision: Precision) -> Tensor:
    """x times upper triangular matrices."""
    if len(cuts) == 1:
        return product(x, upper, precision)
    out = torch.empty_like(x)
    for first, end in cuts:
        add_product(out[..., first:end], x[..., :end], upper[:, :end, first:end], 0.0, 1.0, precision)
    return out


def _upper_gram(x: Tensor, cuts: list[tuple[int, int]], precision: Precision) -> Tensor:
    """X^T X of (N, m, n), at least its blocks on and above the diagonal."""
    if len(cuts) == 1 or precision == "input" or halved(x, precision):
        return symmetric_product(x.mT, None, precision)
    gram = x.new_empty(len(x), x.shape[-1], x.shape[-1])
    for first, end in cuts:
        add_product(gram[:, :end, first:end], x[..., :end].mT, x[..., first:end], 0.0, 1.0, precision)
    return gram


def _symmetric_norm(matrices: Tensor, cuts: list[tuple[int, int]]) -> Tensor:
    """The Frobenius norms (N, 1, 1) of symmetric matrices, of which the blocks on and above the diagonal are read."""
    if len(cuts) == 1:
        return torch.linalg.matrix_norm(matrices, keepdim=True)
    squares = [
        torch.linalg.matrix_norm(matrices[:, rows, first:end], keepdim=True).square()
        for first, end in cuts
        for rows in (slice(0, first), slice(0, end))  # what is above the diagonal counts twice
    ]
    return torch.stack(squares).sum(0).sqrt()


def power_step(
    matrix: Tensor,
    basis: Tensor,
    method: Literal["cholesky", "householder"] = "cholesky",
    precision: Precision = "input",
) -> Tensor:
    """One step of orthogonal iteration towards the eigenvectors of symmetric A (..., n, n) from an orthonormal basis.

    Q' R = (A + delta I) Q with the columns of Q by falling Rayleigh quotients q^T A q, and back in their places: a
    column stays beside what was measured along it. delta moves no eigenvector and keeps the columns independent where A
    is singular; it is the Frobenius norm of A times 1e-6, 1e-5 with precision "bfloat16x3", 1e-3 with "tf32". By
    "cholesky" the basis of an A that is not finite is NaN.

    Source: Vyas et al. 2024, algorithm 4. Differs: delta; the columns keep their places, where the authors' code sorts
    the second moment along with them.
    """
    matrix, _ = _scaled(matrix)
    moved = product(matrix, basis, precision)
    order = (basis * moved).sum(-2).argsort(dim=-1, descending=True, stable=True)
    norm = torch.linalg.matrix_norm(matrix, keepdim=True)
    moved = torch.addcmul(moved, torch.where(norm == 0, 1.0, norm), basis, value=_DELTA[precision])
    there = order[..., None, :].expand_as(moved)
    back = order.argsort(-1)[..., None, :].expand_as(moved)
    return orthonormal(moved.gather(-1, there), method, precision).gather(-1, back)
