"""Products of matrices that a CPU stores by columns, as residual streams are seen: results stored alike.

Rows of a few entries would be written with steps between them, and everything that follows would read them so.
"""

from __future__ import annotations

from torch import Tensor


def by_columns(x: Tensor) -> bool:
    """Whether matrices (..., m, n) are tall, and stored by columns on a CPU."""
    return x.is_cpu and x.stride(-2) == 1 and x.stride(-1) >= x.shape[-2] > x.shape[-1] > 1


def product(x: Tensor, b: Tensor) -> Tensor:
    """x b of (..., m, n) and (..., n, k)."""
    return (b.mT @ x.mT).mT if by_columns(x) else x @ b


def product_of_vector(x: Tensor, v: Tensor) -> Tensor:
    """x v of (..., m, n) and (..., n)."""
    return (v[..., None, :] @ x.mT)[..., 0, :] if by_columns(x) else (x @ v[..., None])[..., 0]


def outer(column: Tensor, row: Tensor) -> Tensor:
    """column row^T of (..., m) and (..., n), the same bits however they are stored."""
    if column.is_cpu and 1 < row.shape[-1] < column.shape[-1] // 4:
        return (row[..., :, None] * column[..., None, :]).mT
    return column[..., :, None] * row[..., None, :]


__all__ = ["by_columns", "outer", "product", "product_of_vector"]
