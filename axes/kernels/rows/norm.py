"""A residual stream that is added to and read through RMSNorm, in one pass over it forward and one backward.

    h' = h + y        x = w * h' * r,   r = (mean(h'^2) + eps)^(-1/2)
    g = w * dx        dh = dh' + r * (g - h' r mean(g * h' r))        dy = dh        dw = sum_n dx_n * h'_n r_n
h' has h's dtype and x the one that is asked for, so that a float32 stream is read once for 16-bit products. dw is added
up by programs that take every P-th block of rows, and then over the programs: the same bits at every run. Where the
stream begins nothing is added: h' = h is only read, and its gradient is dh, what goes on and what is normalised in one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.rows.places import entries, of_program

WIDEST = 8192  # a row is in the registers of one program
_ENTRIES = 2048  # of rows that a program takes at a time
_PROGRAMS = 132 * 16  # of a backward, at most: two waves of them, so that the last one costs little


@Kernel
@triton.jit(do_not_specialize=["N"])
def _add_norm(h, y, weight, after, x, scale, N, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y: None where nothing is added; nothing is stored in `after` then."""
    row, col = of_program(ROWS), tl.arange(0, BLOCK)
    held, at, inside = entries(row, N, D, BLOCK)
    total = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        total += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        kept = total.to(after.dtype.element_ty)
        tl.store(after + at, kept, mask=inside)
        total = kept.to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(total * total, 1) / D + eps)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(scale + row, r, mask=held)
    tl.store(x + at, (total * r[:, None] * w[None, :]).to(x.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["N", "programs"])
def _add_norm_backward(
    after, scale, weight, dafter, dx, dh, dy, dw, N, programs,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PASSED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """PASSED: h' has a gradient of its own. APART: y's dtype is another one than h's."""
    program, col = tl.program_id(0), tl.arange(0, BLOCK)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), programs):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        held, at, inside = entries(row, N, D, BLOCK)
        r = tl.load(scale + row, mask=held, other=0.0)[:, None]
        unit = tl.load(after + at, mask=inside, other=0.0).to(tl.float32) * r
        given = tl.load(dx + at, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(given * unit, 0)
        g = given * w[None, :]
        d = r * (g - unit * (tl.sum(g * unit, 1) / D)[:, None])
        if PASSED:
            d += tl.load(dafter + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dh + at, d.to(dh.dtype.element_ty), mask=inside)
        if APART:
            tl.store(dy + at, d.to(dy.dtype.element_ty), mask=inside)
    tl.store(dw + program * D + col, sums, mask=col < D)


def _tiles(width: int) -> dict[str, int]:
    block = power_of_2(width)
    return {"D": width, "ROWS": max(1, _ENTRIES // block), "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
        h, y = h.contiguous(), None if y is None else y.contiguous()
        after, x = h if y is None else torch.empty_like(h), torch.empty_like(h, dtype=dtype)
        tiles = _tiles(h.shape[-1])
        n = h.numel() // h.shape[-1]
        scale = h.new_empty(n, dtype=torch.float32)
        with layout.on_device(h):
            _add_norm[(cdiv(n, tiles["ROWS"]),)](h, y, weight, after, x, scale, n, eps, **tiles)
        ctx.save_for_backward(after, scale, weight)
        ctx.dtype = None if y is None else y.dtype
        ctx.set_materialize_grads(False)
        return h.view_as(h) if y is None else after, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dafter: Tensor | None, dx: Tensor | None) -> Any:
        after, scale, weight = ctx.saved_tensors
        if dx is None:
            dy = None if dafter is None or ctx.dtype is None else dafter.to(ctx.dtype)
            return dafter, dy, None, None, None
        apart, n, tiles = ctx.dtype not in (None, after.dtype), scale.numel(), _tiles(after.shape[-1])
        dh = torch.empty_like(after)
        dy = torch.empty_like(after, dtype=ctx.dtype) if apart else dh
        programs = min(_PROGRAMS, cdiv(n, tiles["ROWS"]))
        dw = scale.new_empty(programs, after.shape[-1])
        passed = after if dafter is None else dafter.contiguous()
        with layout.on_device(after):
            _add_norm_backward[(programs,)](
                after, scale, weight, passed, dx.contiguous(), dh, dy, dw, n, programs,
                **tiles, PASSED=dafter is not None, APART=apart,
            )  # fmt: skip
        return dh, None if ctx.dtype is None else dy, dw.sum(0).to(weight.dtype), None, None


def add_norm(h: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """h + y (..., D) in h's dtype, and its RMSNorm with a weight (D) in `dtype`; all three receive gradients, once.

    y: None where a stream begins, for h itself and its norm. D is at most `WIDEST`. Raises ShapeError for shapes that
    do not fit and for devices that no kernel runs on.
    """
    added = h.shape if y is None else y.shape
    if h.shape != added or h.ndim < 1 or weight.shape != h.shape[-1:] or not 0 < h.shape[-1] <= WIDEST:
        got = f"{tuple(h.shape)}, {tuple(added)} and {tuple(weight.shape)}"
        raise ShapeError(f"add_norm: h and y are (..., D) and the weight (D), D at most {WIDEST}, not {got}")
    if h.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"add_norm: the Triton kernel needs a CUDA device, not {h.device}")
    after, x = _AddNorm.apply(h, y, weight, eps, dtype)
    return after, x


__all__ = ["WIDEST", "add_norm"]
