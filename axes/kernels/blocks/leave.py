"""`leave`: from what the recurrence read to the input of the last product in one launch, and back in one.

    n = y rsqrt(mean y^2 + eps) w          RMS norm of a head's D numbers, if there are weights w (D)
    u = n activation(g)                    if there is a gate g

Rows are heads of tokens, one after another in memory. Backwards, with x = y rsqrt(..) and m = du activation(g) w,
    dg = du n activation'(g),   dw = sum du activation(g) x,   dy = rsqrt(..) (m - x mean(m x)):
a program adds up dw over its rows, and the sums of programs are added in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.blocks.functions import activate, slope
from axes.kernels.blocks.plan import ACTIVATIONS, LARGEST, WARPS
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import on_device

_ENTRIES = 8  # of a row in a thread: 16 bytes of a 16-bit number
_PROGRAMS = 132 * 32  # at most


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _inverse_norm(y, D: tl.constexpr, EPS: tl.constexpr):
    return tl.rsqrt(tl.sum(y * y, 1) / D + EPS)[:, None]


@Kernel
@triton.jit(do_not_specialize=["rows", "steps"])
def _leave(
    y, gate, weight, u, rows, steps,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, DP)
    first = tl.program_id(0).to(tl.int64) * steps * BR
    if weight is not None:
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    for n in range(steps):
        row = first + n * BR + tl.arange(0, BR)
        held = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(y + at, mask=held, other=0.0).to(tl.float32)
        if weight is not None:
            x *= _inverse_norm(x, D, EPS) * w
        if gate is not None:
            x *= activate(tl.load(gate + at, mask=held, other=0.0).to(tl.float32), ACT)
        tl.store(u + at, x.to(u.dtype.element_ty), mask=held)


@Kernel
@triton.jit(do_not_specialize=["rows", "steps"])
def _leave_backward(
    y, gate, weight, du, dy, dgate, sums, rows, steps,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, DP)
    first = tl.program_id(0).to(tl.int64) * steps * BR
    if weight is not None:
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        total = tl.zeros([BR, DP], dtype=tl.float32)
    for n in range(steps):
        row = first + n * BR + tl.arange(0, BR)
        held = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(y + at, mask=held, other=0.0).to(tl.float32)
        d = tl.load(du + at, mask=held, other=0.0).to(tl.float32)
        if weight is not None:
            r = _inverse_norm(x, D, EPS)
            x *= r
        if gate is not None:
            g = tl.load(gate + at, mask=held, other=0.0).to(tl.float32)
            dg = d * x * slope(g, ACT)
            if weight is not None:
                dg *= w
            tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=held)
            d *= activate(g, ACT)
        if weight is not None:
            total += d * x
            d *= w
            d = r * (d - x * (tl.sum(d * x, 1) / D)[:, None])
        tl.store(dy + at, d.to(dy.dtype.element_ty), mask=held)
    if weight is not None:
        tl.store(sums + tl.program_id(0) * D + column, tl.sum(total, 0), mask=column < D)


# ---- launches --------------------------------------------------------------------------------------------------------


def _cut(y: Tensor) -> tuple[int, int, int, int, int]:
    """Width, its power of two, rows at once, programs, and how often each takes rows."""
    d = y.shape[-1]
    side = 1 << (d - 1).bit_length()
    together = max(1, 32 * WARPS * _ENTRIES // side)
    tiles = -(-(y.numel() // d) // together)
    steps = -(-tiles // _PROGRAMS)
    return d, side, together, -(-tiles // steps), steps


def _forward(y: Tensor, gate: Tensor | None, weight: Tensor | None, activation: str, eps: float) -> Tensor:
    d, side, together, programs, steps = _cut(y)
    u = y.new_empty(*y.shape[:-2], y.shape[-2] * d)
    with on_device(y):
        _leave[(programs,)](
            y, gate, weight, u, y.numel() // d, steps,
            D=d, DP=side, BR=together, ACT=ACTIVATIONS.index(activation), EPS=eps, num_warps=WARPS,
        )  # fmt: skip
    return u


def _backward(
    y: Tensor, gate: Tensor | None, weight: Tensor | None, du: Tensor, activation: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y, gate and weight, empty where there is none."""
    d, side, together, programs, steps = _cut(y)
    dy, none = torch.empty_like(y), y.new_empty(0)
    dgate = none if gate is None else torch.empty_like(gate)
    sums = none if weight is None else y.new_empty(programs, d, dtype=torch.float32)
    with on_device(y):
        _leave_backward[(programs,)](
            y, gate, weight, du, dy, dgate, sums, y.numel() // d, steps,
            D=d, DP=side, BR=together, ACT=ACTIVATIONS.index(activation), EPS=eps, num_warps=WARPS,
        )  # fmt: skip
    return dy, none.clone() if gate is None else dgate, none if weight is None else sums.sum(0).to(weight.dtype)


# ---- operators -------------------------------------------------------------------------------------------------------

_operator = torch.library.custom_op("axes::leave", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("axes::leave_backward", _backward, mutates_args=())


@_operator.register_fake
def _(y, gate, weight, activation, eps):
    return y.new_empty(*y.shape[:-2], y.shape[-2] * y.shape[-1])


@_backward_operator.register_fake
def _(y, gate, weight, du, activation, eps):
    return torch.empty_like(y), *(y.new_empty(0) if x is None else torch.empty_like(x) for x in (gate, weight))


def _save(ctx, inputs, output) -> None:
    *tensors, activation, eps = inputs
    ctx.options = (activation, eps)
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, du, backward=_backward_operator):
    y, gate, weight = ctx.saved_tensors
    dy, dgate, dweight = backward(y, gate, weight, du.contiguous(), *ctx.options)
    return dy, None if gate is None else dgate, None if weight is None else dweight, None, None


_operator.register_autograd(_differentiate, setup_context=_save)


class _Eager(torch.autograd.Function):
    """The operator without its dispatch."""

    @staticmethod
    def forward(*inputs):
        return _forward(*inputs)

    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx, du):
        return _differentiate(ctx, du, _backward)


def leave(
    y: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, *, activation: str = "silu", eps: float = 1e-5
) -> Tensor:
    """(B, T, H, D) to (B, T, H D) in the same dtype: RMS norm of every head with weights (D), times activation(gate).

    gate: (B, T, H D) in y's dtype, or None.  weight: or None for no norm.  All receive gradients, once.
    Raises ShapeError on what does not fit.
    """
    who = "leave"
    if y.ndim != 4 or 0 in y.shape or y.shape[-1] > LARGEST:
        raise ShapeError(f"{who}: y is (B, T, H, D), not empty, D up to {LARGEST}, not {tuple(y.shape)}")
    flat = (*y.shape[:2], y.shape[2] * y.shape[3])
    if gate is not None and (gate.shape != flat or gate.dtype != y.dtype):
        raise ShapeError(f"{who}: the gate is {y.dtype} {flat}, not {gate.dtype} {tuple(gate.shape)}")
    if weight is not None and weight.shape != y.shape[-1:]:
        raise ShapeError(f"{who}: weights are {(y.shape[-1],)}, not {tuple(weight.shape)}")
    if gate is None and weight is None:
        return y.flatten(-2)
    inputs = (y.contiguous(), None if gate is None else gate.contiguous(), weight, activation, eps)
    if torch.compiler.is_compiling() or type(y) is not Tensor:
        return _operator(*inputs)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return _Eager.apply(*inputs)
    return _forward(*inputs)
