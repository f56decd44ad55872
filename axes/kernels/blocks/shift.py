"""`mixed_products`: products of tokens that are mixed with the token before, each with coefficients of its own.

    x_i,t = x_t + m_i (x_{t-1} - x_t),     y_i = x_i W_i^T          before its sequence a token is in the tail

One read of x makes all n mixtures, and they are made again for the backward: nothing but the arguments is kept. With
g_i = dy_i W_i the gradient of x_i,
    dx_t = sum_i (1 - m_i) g_i,t + m_i g_i,t+1,     dm_i = sum_t g_i,t (x_{t-1} - x_t),     dtail = sum_i m_i g_i,first:
a program adds up dm over its chunk, and the sums of programs are added in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from axes.errors import ShapeError
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import check_packing, layout, on_device
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.tiles import slot_rows, unit_rows

_BYTES, _COLUMNS, _WARPS = 64, 128, 4  # of a column of a program's tile; of its rows


# ---- kernels: slots of rows times blocks of columns ------------------------------------------------------------------


@triton.jit
def _tile(first, end, D: tl.constexpr, BLOCKS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """A program's rows and columns, which of them there are, and where."""
    row = first + tl.arange(0, BR).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    return row, column, (row < end)[:, None] & (column < D)[None, :], row[:, None] * D + column[None, :]


@triton.jit
def _change(x, tail, row, begin, unit, column, here, D: tl.constexpr):
    """Tokens, and those before them less themselves."""
    at = row[:, None] * D + column[None, :]
    now = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    before = tl.load(x + at - D, mask=here & (row > begin)[:, None], other=0.0).to(tl.float32)
    if tail is not None:
        first = here & (row == begin)[:, None]
        before += tl.load(tail + unit * D + column[None, :] + tl.zeros_like(at), mask=first, other=0.0).to(tl.float32)
    return now, before - now


@Kernel
@triton.jit(do_not_specialize=["T", "N", "ROWS"])
def _shift(
    x, mix, tail, out, offsets, units, T, N, ROWS,
    D: tl.constexpr, MIXED: tl.constexpr, BLOCKS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """mix (n, D), out (n, ROWS, D)."""
    unit, first, end = slot_rows(offsets, units, tl.program_id(0) // BLOCKS, T, N, BR, PACKED)
    begin, _ = unit_rows(offsets, unit, T, PACKED)
    row, column, here, at = _tile(first, end, D, BLOCKS, BR, BD)
    now, change = _change(x, tail, row, begin, unit, column, here, D)
    for i in tl.static_range(MIXED):
        m = tl.load(mix + i * D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        tl.store(out + i * tl.cast(ROWS, tl.int64) * D + at, (now + m * change).to(out.dtype.element_ty), mask=here)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "ROWS"])
def _shift_backward(
    x, mix, tail, grad, dx, dtail, sums, offsets, units, T, N, ROWS,
    D: tl.constexpr, MIXED: tl.constexpr, BLOCKS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """grad (n, ROWS, D).  sums (slots, n, D): of dm over the tokens of a slot, in float32."""
    slot = tl.program_id(0) // BLOCKS
    unit, first, end = slot_rows(offsets, units, slot, T, N, BR, PACKED)
    begin, last = unit_rows(offsets, unit, T, PACKED)
    row, column, here, at = _tile(first, end, D, BLOCKS, BR, BD)
    _, change = _change(x, tail, row, begin, unit, column, here, D)
    later = here & (row + 1 < last)[:, None]
    d = tl.zeros([BR, BD], dtype=tl.float32)
    dbefore = tl.zeros([BD], dtype=tl.float32)
    sums += slot.to(tl.int64) * MIXED * D + column
    for i in tl.static_range(MIXED):
        m = tl.load(mix + i * D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        own = grad + i * tl.cast(ROWS, tl.int64) * D
        g = tl.load(own + at, mask=here, other=0.0).to(tl.float32)
        d += g - m * g + m * tl.load(own + at + D, mask=later, other=0.0).to(tl.float32)
        tl.store(sums + i * D, tl.sum(g * change, 0), mask=column < D)
        if dtail is not None:
            dbefore += tl.sum(tl.where((row == begin)[:, None], m * g, 0.0), 0)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=here)
    if dtail is not None:
        starts = (column < D) & (first == begin)
        tl.store(dtail + unit * D + column, dbefore.to(dtail.dtype.element_ty), mask=starts)


# ---- launches --------------------------------------------------------------------------------------------------------


def _forward(x: Tensor, mix: Tensor, tail: Tensor | None, cu: Tensor | None) -> Tensor:
    """(n, B, T, D)."""
    b, t, d = x.shape
    cut, blocks = layout(b, t, _BYTES // x.itemsize, cu), cdiv(d, _COLUMNS)
    out = x.new_empty(mix.shape[0], *x.shape)
    with on_device(x):
        _shift[(cut.slots * blocks,)](
            x, mix, tail, out, cut.offsets, cut.units_of_slots, t, cut.chunks, b * t,
            D=d, MIXED=mix.shape[0], BLOCKS=blocks, BR=cut.chunk, BD=_COLUMNS, PACKED=cut.packed, num_warps=_WARPS,
        )  # fmt: skip
    return out


def _backward(x: Tensor, mix: Tensor, tail: Tensor | None, cu: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Gradients of x, mix, and of the tail if there is one."""
    b, t, d = x.shape
    cut, blocks = layout(b, t, _BYTES // x.itemsize, cu), cdiv(d, _COLUMNS)
    dx, dtail = torch.empty_like(x), None if tail is None else torch.zeros_like(tail)  # empty sequences have no slot
    # the slots of packed sequences are more than there are chunks
    sums = (x.new_zeros if cut.packed else x.new_empty)(cut.slots, *mix.shape, dtype=torch.float32)
    with on_device(x):
        _shift_backward[(cut.slots * blocks,)](
            x, mix, tail, grad, dx, dtail, sums, cut.offsets, cut.units_of_slots, t, cut.chunks, b * t,
            D=d, MIXED=mix.shape[0], BLOCKS=blocks, BR=cut.chunk, BD=_COLUMNS, PACKED=cut.packed, num_warps=_WARPS,
        )  # fmt: skip
    return [dx, sums.sum(0).to(mix.dtype), *([] if dtail is None else [dtail])]


_shifted = torch.library.custom_op("axes::shift", _forward, mutates_args=())
_shifted.register_fake(lambda x, mix, tail, cu: x.new_empty(mix.shape[0], *x.shape))
_shifted_backward = torch.library.custom_op("axes::shift_backward", _backward, mutates_args=())
_shifted_backward.register_fake(
    lambda x, mix, tail, cu, grad: [torch.empty_like(y) for y in (x, mix, tail) if y is not None]
)


class _MixedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mix: Tensor, tail: Tensor | None, cu: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        taken = [w.to(x.dtype) for w in weights]
        ctx.dtypes = [w.dtype for w in weights]
        ctx.save_for_backward(x, mix, tail, cu, *taken)
        mixed = (_shifted if torch.compiler.is_compiling() else _forward)(x, mix, tail, cu)
        return tuple(linear(mixed[i], w) for i, w in enumerate(taken))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, mix, tail, cu, *weights = ctx.saved_tensors
        compiling = torch.compiler.is_compiling()
        rows = [g.reshape(-1, g.shape[-1]) for g in grads]
        mixed = (_shifted if compiling else _forward)(x, mix, tail, cu).flatten(1, 2)
        dweights = [(g.mT @ mixed[i]).to(d) for i, (g, d) in enumerate(zip(rows, ctx.dtypes, strict=True))]
        if compiling:
            grad = torch.stack([g @ w for g, w in zip(rows, weights, strict=True)])
        else:
            grad = mixed  # whose room is free now
            for i, (g, w) in enumerate(zip(rows, weights, strict=True)):
                torch.mm(g, w, out=grad[i])
        dx, dmix, *dtail = (_shifted_backward if compiling else _backward)(x, mix, tail, cu, grad.view(-1, *x.shape))
        return dx, dmix, dtail[0] if dtail else None, None, *dweights


def mixed_products(
    x: Tensor, mix: Tensor, weights: Sequence[Tensor], tail: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, ...]:
    """x (B, T, D), mixed by mix (n, D), times each of n weights (columns, D), in x's dtype: n times (B, T, columns).

    tail (units, 1, D): the token before every sequence, zero if there is none.  cu_seqlens: offsets 0, ..., T of packed
    sequences, B = 1.  x, mix, tail and weights receive gradients, once.  Raises ShapeError on what does not fit.
    """
    who = "mixed_products"
    if x.ndim != 3 or 0 in x.shape:
        raise ShapeError(f"{who}: x is (B, T, D) and not empty, not {tuple(x.shape)}")
    check_packing(who, x.shape[0], cu_seqlens, x.device)
    d, units = x.shape[-1], x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if mix.shape != (len(weights), d) or any(w.ndim != 2 or w.shape[1] != d for w in weights):
        got = f"{tuple(mix.shape)} and {[tuple(w.shape) for w in weights]}"
        raise ShapeError(f"{who}: mix is (n, {d}) and weights n times (columns, {d}), not {got}")
    if tail is not None and tail.shape != (units, 1, d):
        raise ShapeError(f"{who}: the tail is {(units, 1, d)}, not {tuple(tail.shape)}")
    tail = None if tail is None else tail.contiguous()
    made: tuple[Tensor, ...] = _MixedProducts.apply(x.contiguous(), mix.contiguous(), tail, cu_seqlens, *weights)
    return made
