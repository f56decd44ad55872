"""Sums with a product that are symmetric, keep C + rate A B^T, by a kernel that computes one triangle, or in strips.

For matrices of which a strip fills a GPU that is five eighths of the work, or three quarters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.linalg.matrix_roots import (
    Precision,
    add_product,
    column_blocks,
    halved,
    rounded_by_kernel,
    symmetric_product,
)
from axes.linalg.symmetric import by_kernel

Weight = float | Tensor
_LEAST = 1 << 21  # entries of a square as wide as a strip, over the whole batch, that fill a GPU


def outer_mean(x: Tensor, precision: Precision = "input") -> Tensor:
    """X^T X / m of (..., m, n), in its dtype."""
    m, n = x.shape[-2:]
    if halved(x, precision):
        return symmetric_product(x.mT * m**-0.5, None, precision)
    rows = x.reshape(-1, m, n).to(torch.promote_types(x.dtype, torch.float32))
    return symmetric_sum(None, rows.mT, rate=1 / m, precision=precision).reshape(*x.shape[:-2], n, n).to(x.dtype)


def symmetric_sum(
    start: Tensor | None,
    a: Tensor,
    b: Tensor | None = None,
    keep: Weight = 1.0,
    rate: Weight = 1.0,
    precision: Precision = "input",
    exact: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """keep C + rate A B^T (N, n, n) of A and B (N, n, k), where it is symmetric but for rounding.

    start: C, None for 0. b: None for A. keep, rate: numbers, or (N, 1, 1), a number for each matrix; a C whose number
    is 0 does not count, whatever its entries are. precision: of the product. exact: the result is symmetric in all
    bits. out: where it goes, C itself if it may be overwritten; else a new tensor.
    """
    if rounded_by_kernel(a, precision) and a.dtype == (a if start is None else start).dtype:
        return _by_kernel(start, a, b, keep, rate, out)
    if precision == "bfloat16x3" or (b is None and halved(a.mT, precision)):
        return _added(start, symmetric_product(a, b, precision), keep, rate, exact, out)
    b = a if b is None else b
    count, n = len(a), a.shape[-2]
    if isinstance(rate, Tensor):
        a, rate = rate * a, 1.0
    read = 0.0 if start is None else 1.0 if isinstance(keep, Tensor) else keep
    derived = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (start, a, b))
    total = a.new_empty(count, n, n) if out is None else out
    for first, end in column_blocks(n, 1 if derived else _strips(count, n)):
        strip = total[:, :end, first:end]
        if start is not None and (isinstance(keep, Tensor) or start is not total):
            known = start[:, :end, first:end]
            strip.copy_(_kept(known, keep) if isinstance(keep, Tensor) else known)
        add_product(strip, a[:, :end], b[:, first:end].mT, read, rate, precision)
        if exact:
            corner = strip[:, first:]
            corner.copy_((corner + corner.mT) * 0.5)
        if first:
            total[:, first:end, :first].copy_(strip[:, :first].mT)
    return total


def _by_kernel(
    start: Tensor | None, a: Tensor, b: Tensor | None, keep: Weight, rate: Weight, out: Tensor | None
) -> Tensor:
    """The sum in one pass, exactly symmetric, from what is on and below the diagonal."""
    factors = None
    if isinstance(keep, Tensor) or isinstance(rate, Tensor):
        factors = a.new_empty(len(a), 2, dtype=torch.float32)
        for column, x in zip(factors.unbind(-1), (rate, keep), strict=True):
            column.copy_(x[:, 0, 0]) if isinstance(x, Tensor) else column.fill_(x)
        keep = rate = 1.0
    terms = [] if start is None else [(keep, start.contiguous())]
    return by_kernel(a, b, alpha=rate, terms=terms, factors=factors, out=out)


def _added(start: Tensor | None, whole: Tensor, keep: Weight, rate: Weight, exact: bool, out: Tensor | None) -> Tensor:
    """The sum, given the product."""
    total = rate * whole
    if start is not None:
        total += _kept(start, keep)
    if exact:
        total = (total + total.mT) * 0.5
    return total if out is None else out.copy_(total)


def _kept(start: Tensor, keep: Weight) -> Tensor:
    """keep C, 0 where that number is 0."""
    return torch.where(keep == 0, 0.0, keep * start) if isinstance(keep, Tensor) else keep * start


def _strips(count: int, n: int) -> int:
    """Into how many strips of columns (count, n, n) is cut."""
    return next((strips for strips in (4, 2) if count * n * n // strips**2 >= _LEAST), 1)
