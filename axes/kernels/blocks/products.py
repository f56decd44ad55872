"""Products of one input with several matrices: some side by side in one result, all in one function to differentiate.

Matrices of one result are copied below each other in the computing dtype, one copy that is the cast too. The gradient
of the input adds up in the products' own output instead of passes of its own; those of float32 matrices leave 16-bit
products on a GPU as they were added up, in float32, which no pass then has to cast them to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

Piece = tuple[int, int, int]  # which matrix, its first row, how many rows
_FEW, _SMALL = 256, 512  # rows of x that cost less than a copy of the matrices; rows of a matrix that cost no copy


def _stacked(parts: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """Matrices (n_i, D) below each other in `rows` rows at least; those of padding are zero."""
    first = parts[0]
    if len(parts) == 1 and rows <= first.shape[0]:
        return first.to(dtype)
    sizes = [x.shape[0] for x in parts]
    padding = max(rows - sum(sizes), 0)
    whole = first.new_empty(sum(sizes) + padding, first.shape[1], dtype=dtype)
    places = whole.split([*sizes, padding] if padding else sizes)
    torch._foreach_copy_(places[: len(parts)], list(parts))
    if padding:
        places[-1].zero_()
    return whole


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a module does what its weights say and nothing else: they may stand beside others in one product."""
    return type(module) is kind and not module._forward_hooks and not module._forward_pre_hooks


def _rows(weight: Tensor, first: int, count: int) -> Tensor:
    return weight if count == weight.shape[0] else weight.narrow(0, first, count)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: Sequence[Sequence[Piece]], rows: Sequence[int], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        whole = [
            _stacked([_rows(weights[i], first, count) for i, first, count in group], total, x.dtype)
            for group, total in zip(groups, rows, strict=True)
        ]
        ctx.groups, ctx.dtypes = groups, [w.dtype for w in weights]
        ctx.save_for_backward(x, *whole)
        ctx.set_materialize_grads(False)
        return tuple(linear(x, w) for w in whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *whole = ctx.saved_tensors
        rows, dx, wanted = x.reshape(-1, x.shape[-1]), None, ctx.needs_input_grad[3:]
        pieces: list[list[tuple[int, Tensor]]] = [[] for _ in wanted]
        for grad, weight, group in zip(grads, whole, ctx.groups, strict=True):
            if grad is None:
                for i, first, count in group:
                    pieces[i].append((first, rows.new_zeros(count, rows.shape[1])))
                continue
            dy = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if any(wanted[i] for i, _, _ in group):
                at, dwhole = 0, _of_matrices(dy, rows, {ctx.dtypes[i] for i, _, _ in group})
                for i, first, count in group:
                    pieces[i].append((first, dwhole[at : at + count]))
                    at += count
        dweights = [_joined(p).to(d) if w else None for p, w, d in zip(pieces, wanted, ctx.dtypes, strict=True)]
        return None if dx is None else dx.view(x.shape), None, None, *dweights


def _of_matrices(dy: Tensor, x: Tensor, dtypes: set[torch.dtype]) -> Tensor:
    """dy^T x for matrices of these dtypes: in float32 where that is theirs and a product of 16 bits can leave so."""
    if dy.is_cuda and dy.dtype.itemsize == 2 and dtypes == {torch.float32} and not torch.compiler.is_compiling():
        return torch.mm(dy.mT, x, out_dtype=torch.float32)
    return dy.mT @ x


def _joined(pieces: list[tuple[int, Tensor]]) -> Tensor:
    """The gradient of a matrix from those of its rows; rows that were taken twice add up."""
    made: dict[int, Tensor] = {}
    for first, piece in pieces:
        made[first] = made[first] + piece if first in made else piece
    parts = [made[first] for first in sorted(made)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def products(
    x: Tensor, weights: Sequence[Tensor], groups: Sequence[Sequence[Piece]], rows: Sequence[int]
) -> tuple[Tensor, ...]:
    """x (..., D) times every group's rows of the weights, side by side: (..., n) for each group.

    groups: pieces of the weights, which together hold all rows of every weight.  rows: of each group at least; columns
    past the last piece are zero.  Weights are taken in x's dtype.  All receive gradients, once.
    """
    few = not torch.is_grad_enabled() and x.numel() <= _FEW * x.shape[-1] and not torch.compiler.is_compiling()
    if few and all(w.dtype == x.dtype for w in weights):
        parts = ([_rows(weights[i], first, count) for i, first, count in group] for group in groups)
        return tuple(_apart(x, own, total) for own, total in zip(parts, rows, strict=True))
    made: tuple[Tensor, ...] = _Products.apply(x, groups, rows, *weights)
    return made


def _apart(x: Tensor, parts: Sequence[Tensor], rows: int) -> Tensor:
    """One group for a few tokens, whose product costs what reading the matrices costs: large ones are not copied, each
    product is written to its columns; small ones stand together, one after another."""
    if len(parts) == 1 and rows <= parts[0].shape[0]:
        return linear(x, parts[0])
    tokens = x.reshape(-1, x.shape[-1])
    made = x.new_empty(tokens.shape[0], max(rows, sum(w.shape[0] for w in parts)))
    at, small = 0, []
    for w in parts:
        if w.shape[0] < _SMALL:
            small.append(w)
            continue
        at = _written(tokens, small, at, made)
        small = []
        torch.mm(tokens, w.mT, out=made[:, at : at + w.shape[0]])
        at += w.shape[0]
    _written(tokens, small, at, made, made.shape[1] - at)
    return made.view(*x.shape[:-1], -1)


def _written(tokens: Tensor, parts: Sequence[Tensor], at: int, made: Tensor, columns: int = 0) -> int:
    """The product with small matrices in its columns from `at` on, in `columns` of them at least; where they end."""
    end = at + max(columns, sum(w.shape[0] for w in parts))
    if end > at and parts:
        torch.mm(tokens, _stacked(parts, end - at, tokens.dtype).mT, out=made[:, at:end])
    elif end > at:
        made[:, at:end].zero_()
    return end
