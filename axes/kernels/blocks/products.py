"""Products of one input with several matrices: some side by side in one result, all in one function to differentiate.

Matrices of one result are copied below each other in the computing dtype, one copy that is the cast too. The gradient
of the input adds up in the products' own output instead of passes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def _stacked(weights: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """Matrices (n_i, D) below each other in `rows` rows; those of padding are zero."""
    first = weights[0]
    if len(weights) == 1 and rows <= first.shape[0]:
        return first.to(dtype)
    sizes = [w.shape[0] for w in weights]
    whole = first.new_empty(rows, first.shape[1], dtype=dtype)
    parts = whole.split([*sizes, rows - sum(sizes)] if sum(sizes) < rows else sizes)
    torch._foreach_copy_(parts[: len(weights)], list(weights))
    if len(parts) > len(weights):
        parts[-1].zero_()
    return whole


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], rows: tuple[int, ...], *weights: Tensor) -> Any:
        whole, at = [], 0
        for count, total in zip(counts, rows, strict=True):
            whole.append(_stacked(weights[at : at + count], total, x.dtype))
            at += count
        ctx.counts, ctx.like = counts, [(w.shape[0], w.dtype) for w in weights]
        ctx.save_for_backward(x, *whole)
        ctx.set_materialize_grads(False)
        return tuple(linear(x, w) for w in whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *whole = ctx.saved_tensors
        rows, dx, dweights = x.reshape(-1, x.shape[-1]), None, []
        wanted, at = ctx.needs_input_grad[3:], 0
        for grad, weight, count in zip(grads, whole, ctx.counts, strict=True):
            like, at = list(zip(ctx.like, wanted, strict=True))[at : at + count], at + count
            if grad is None:
                dweights += [None] * count
                continue
            dy = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if not any(needed for _, needed in like):
                dweights += [None] * count
                continue
            whole_gradient, first = dy.mT @ rows, 0
            for (size, dtype), needed in like:
                dweights.append(whole_gradient[first : first + size].to(dtype) if needed else None)
                first += size
        return None if dx is None else dx.view(x.shape), None, None, *dweights


def products(x: Tensor, groups: Sequence[Sequence[Tensor]], rows: Sequence[int]) -> tuple[Tensor, ...]:
    """x (..., D) times every group's matrices (n_i, D) side by side: (..., rows) for each group.

    rows: at least those that the matrices have (0: just those); columns past the last matrix are zero. The matrices are
    taken in x's dtype. All receive gradients, once.
    """
    weights = [w for group in groups for w in group]
    made: tuple[Tensor, ...] = _Products.apply(x, tuple(len(g) for g in groups), tuple(rows), *weights)
    return made
