"""A matrix for every token times a vector for every token, with few and long operations of a CPU.

Legend: ... batch, T tokens, m x n a leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor

from axes.linalg.formulas import followed


@final
@dataclass(frozen=True, eq=False)
class Each:
    """A leaf (..., T, m, n), every token's own: multiplies columns (..., T, n, 1)."""

    leaf: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        return times(self.leaf, x[..., 0])[..., None]

    @property
    def mT(self) -> Each:
        return Each(self.leaf.mT)


def times(w: Tensor, x: Tensor) -> Tensor:
    """W x of W (..., m, n) and x (..., n)."""
    if followed():
        return (x[..., None, :] @ w.mT)[..., 0, :]
    return cast(Tensor, _Times.apply(w, x))


@final
class _Times(torch.autograd.Function):
    """By rows, x^T W^T: BLAS takes three to five times as long for a batch of columns, and for outer products as long
    again as an element-wise product does."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return (x[..., None, :] @ w.mT)[..., 0, :]

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor | None]:
        w, x = ctx.saved_tensors
        by_w = by_x = None
        if ctx.needs_input_grad[0]:
            by_w = (given[..., None] * x[..., None, :]).sum_to_size(w.shape)
        if ctx.needs_input_grad[1]:
            by_x = (given[..., None, :] @ w)[..., 0, :].sum_to_size(x.shape)
        return by_w, by_x


__all__ = ["Each", "times"]
