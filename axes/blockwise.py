"""Sums with a product that are symmetric, C + rate A B, in strips: what lies below the diagonal is a copy from above.

For matrices of which a strip fills a GPU that is five eighths of the work, or three quarters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.matrix_roots import Precision, add_product, column_blocks, halved, symmetric_product

_LEAST = 1 << 21  # entries of a square as wide as a strip, over the whole batch, that fill a GPU


def outer_mean(x: Tensor, precision: Precision = "input") -> Tensor:
    """X^T X / m of (..., m, n), in its dtype."""
    m, n = x.shape[-2:]
    if halved(x, precision):
        return symmetric_product(x.mT * m**-0.5, None, precision)
    rows = x.reshape(-1, m, n).to(torch.promote_types(x.dtype, torch.float32))
    return symmetric_sum(None, rows.mT, rows, 1 / m, precision).reshape(*x.shape[:-2], n, n).to(x.dtype)


def symmetric_sum(
    start: Tensor | None,
    a: Tensor,
    b: Tensor,
    rate: float,
    precision: Precision = "input",
    keep: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """C + rate A B (N, n, n) of A (N, n, k) and B (N, k, n), a new tensor, where it is symmetric but for rounding.

    start: C, None for 0. keep: (N, 1, 1), whether C counts; where not it is 0, whatever its entries are. exact: the
    result is symmetric in all bits. precision: of the product.
    """
    derived = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (start, a, b))
    count, n = len(a), a.shape[-2]
    strips = 1 if derived or precision == "bfloat16x3" else _strips(count, n)  # each would make halves of its own
    kept = 0.0 if start is None else 1.0
    if strips == 1:
        if start is None:
            total = a.new_empty(count, n, n)
        else:
            total = start.clone() if keep is None else torch.where(keep, start, 0.0)
        if not exact:
            return add_product(total, a, b, kept, rate, precision)
        half = add_product(total, a, b, kept / 2, rate / 2, precision)
        return half + half.mT
    total = a.new_empty(count, n, n)
    for first, end in column_blocks(n, strips):
        strip = total[:, :end, first:end]
        if start is not None:
            known = start[:, :end, first:end]
            if keep is None:
                strip.copy_(known)
            else:
                torch.where(keep, known, start.new_zeros(()), out=strip)
        add_product(strip, a[:, :end], b[:, :, first:end], kept, rate, precision)
        total[:, first:end, :first].copy_(strip[:, :first].mT)
        if exact:
            corner = strip[:, first:]
            torch.mul(corner + corner.mT, 0.5, out=corner)
    return total


def _strips(count: int, n: int) -> int:
    """Into how many strips of columns (count, n, n) is cut."""
    return next((strips for strips in (4, 2) if count * n * n // strips**2 >= _LEAST), 1)
