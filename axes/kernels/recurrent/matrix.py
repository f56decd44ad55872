"""Cells of matrices in Triton: Z = tanh(W^T S + v k^T), S' = f S + (1 - f) Z, o = S' q; forward and backward.

A program has one sequence and head: W and S, a tile (keys, channels), stay on chip. Forward keeps the states before
chunks of C tokens where gradients are asked for; backward makes those of a chunk again, into a room of its own, and
walks it in reverse with D = dS', P = D (1 - f) (1 - Z^2):
    dq = S' do    dv = P^T k    dk = P v    df = sum D (S - Z)    dW += S P    dS = f D + P W^T
Sums are in float32 and one order; those of W over sequences by torch. No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.layout import check_chain, check_like, contiguous, nothing_read, on_device, precision
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.recurrent import matrix_kernels as kernels
from axes.kernels.recurrent.sizes import MATRIX_CELLS

_CHUNK = 16
_WIDEST = MATRIX_CELLS["m2rnn"].widest


def _constants(q: Tensor, v: Tensor, cu: Tensor | None) -> dict[str, Any]:
    keys, values = (max(16, power_of_2(x.shape[-1])) for x in (q, v))
    return dict(
        BK=keys, BV=values, C=_CHUNK, PACKED=cu is not None, PRECISION=precision(q),
        num_warps=8 if keys * values == 64 * 64 else 4, num_stages=1,
    )  # fmt: skip


def _sizes(q: Tensor, v: Tensor, cu: Tensor | None) -> tuple[tuple[int, int, int, int], int, int]:
    """The kernels' numbers, sequences, and chunks of all of them at most."""
    batch, length, heads, d_k = q.shape
    units = batch if cu is None else cu.shape[0] - 1
    slots = units * cdiv(length, _CHUNK) if cu is None else length // _CHUNK + units
    return (length, heads, d_k, v.shape[3]), units, slots


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor, start: Tensor, cu_seqlens: Tensor | None, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    sizes, units, _ = _sizes(q, v, cu_seqlens)
    out, last, kept = _shapes(q, k, v, g, w, start, cu_seqlens, record)
    with on_device(q):
        kernels.forward[(units * q.shape[2],)](
            q, k, v, g, w, start, out, last, kept[0] if kept else last, q if cu_seqlens is None else cu_seqlens, *sizes,
            SAVE=record, **_constants(q, v, cu_seqlens),
        )  # fmt: skip
    return out, last, kept


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor, start: Tensor, cu_seqlens: Tensor | None, record: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    slots = _sizes(q, v, cu_seqlens)[2]
    return torch.empty_like(v), torch.empty_like(start), [start.new_empty(slots, *start.shape[1:])] * record


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor, start: Tensor, cu_seqlens: Tensor | None,
    kept: list[Tensor], do: Tensor, dlast: Tensor,
) -> list[Tensor]:  # fmt: skip
    sizes, units, _ = _sizes(q, v, cu_seqlens)
    dq, dk, dv, dg, dstart = (torch.empty_like(x) for x in (q, k, v, g, start))
    dw = start.new_empty(units, *w.shape)
    room = start.new_empty(units, _CHUNK, *start.shape[1:])
    with on_device(q):
        kernels.backward[(units * q.shape[2],)](
            q, k, v, g, w, kept[0], room, do, dlast, dq, dk, dv, dg, dw, dstart,
            q if cu_seqlens is None else cu_seqlens, *sizes, **_constants(q, v, cu_seqlens),
        )  # fmt: skip
    return [dq, dk, dv, dg, dw.sum(0).to(w.dtype), dstart]


_chain = Differentiable("matrix_cell", _forward, _backward, _shapes, gradients=6)


def matrix_chain(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, weight: Tensor, state: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The cell over all tokens: outputs (B, T, H, V) in the dtype of v, and the last state.

    q, k (B, T, H, K) and v (B, T, H, V) in one of bf16, fp16, fp32, K and V up to 64; decay (B, T, H), logs of f;
    weight (H, V, V), read in the dtype of q; state (U, H, V, K), U = B or the number of sequences that cu_seqlens
    (U + 1,) packs in one batch entry. All but cu_seqlens receive gradients, once. Raises ShapeError for what does not
    fit.
    """
    who = "matrix_chain"
    check_chain(who, q, k, v, cu_seqlens, state, {"decay": (decay, ())})
    heads, d_v = v.shape[2:]
    if q.shape[2] != heads or max(d_v, q.shape[3]) > _WIDEST:
        sizes = f"{q.shape[2]} and {heads}, {q.shape[3]} and {d_v}"
        raise ShapeError(f"{who}: as many heads of keys as of values, both up to {_WIDEST} wide, not {sizes}")
    check_like(who, "weight", weight, (heads, d_v, d_v), q.device)
    if q.numel() == 0:
        return nothing_read(v, tuple(state.shape), state)
    given = contiguous(q, k, v, decay.float(), weight.to(q.dtype), state.float())
    offsets = None if cu_seqlens is None else cu_seqlens.to(torch.int32)
    out, last = _chain(*given, offsets)
    return out, last


__all__ = ["matrix_chain"]
