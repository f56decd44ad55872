"""`leave`: from what the recurrence read to the input of the last product in one launch, and back in one.

    s = y + c v                                the skip: numbers c of every channel, if there are
    n = s rsqrt(mean s^2 + eps) w              RMS norm of D numbers, if there are weights w (D)
    u = n activation(g)                        if there is a gate g; with `after` the gate comes first, n = norm(s a(g))

Rows are D numbers side by side in memory: a head of a token, or with a skip or `after` all heads of a token. Backwards,
with x = s rsqrt(..) and m the gradient of x,
    ds = rsqrt(..) (m - x mean(m x)),   dw = sum dn x,   dg = du n activation'(g),   dv = c ds,   dc = sum ds v:
a program adds up dw and dc over its rows, and the sums of programs are added in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.blocks.functions import activate, slope
from axes.kernels.blocks.plan import ACTIVATIONS, LARGEST, LONGEST, WARPS
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import power_of_2

_ENTRIES = 8  # of a row in a thread: 16 bytes of a 16-bit number
_PROGRAMS = 132 * 32  # at most


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _inverse_norm(y, D: tl.constexpr, EPS: tl.constexpr):
    return tl.rsqrt(tl.sum(y * y, 1) / D + EPS)[:, None]


@triton.jit
def _columns(ptr, column, D: tl.constexpr):
    """A number of every column, the same in every row."""
    return tl.load(ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@Kernel
@triton.jit(do_not_specialize=["rows", "steps"])
def _leave(
    y, gate, weight, skip, v, u, rows, steps,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, DP)
    first = tl.program_id(0).to(tl.int64) * steps * BR
    if weight is not None:
        w = _columns(weight, column, D)
    if skip is not None:
        c = _columns(skip, column, D)
    for n in range(steps):
        row = first + n * BR + tl.arange(0, BR)
        held = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(y + at, mask=held, other=0.0).to(tl.float32)
        if skip is not None:
            x += c * tl.load(v + at, mask=held, other=0.0).to(tl.float32)
        if gate is not None:
            a = activate(tl.load(gate + at, mask=held, other=0.0).to(tl.float32), ACT)
        if AFTER:
            x *= a
        if weight is not None:
            x *= _inverse_norm(x, D, EPS) * w
        if gate is not None and not AFTER:
            x *= a
        tl.store(u + at, x.to(u.dtype.element_ty), mask=held)


@Kernel
@triton.jit(do_not_specialize=["rows", "steps"])
def _leave_backward(
    y, gate, weight, skip, v, du, dy, dgate, dv, sums, rows, steps,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr, AFTER: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """sums (programs, SUMS): of dw and then dc."""
    column = tl.arange(0, DP)
    first = tl.program_id(0).to(tl.int64) * steps * BR
    if weight is not None:
        w = _columns(weight, column, D)
        dw = tl.zeros([BR, DP], dtype=tl.float32)
    if skip is not None:
        c = _columns(skip, column, D)
        dc = tl.zeros([BR, DP], dtype=tl.float32)
    for n in range(steps):
        row = first + n * BR + tl.arange(0, BR)
        held = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        s = tl.load(y + at, mask=held, other=0.0).to(tl.float32)
        d = tl.load(du + at, mask=held, other=0.0).to(tl.float32)
        if skip is not None:
            value = tl.load(v + at, mask=held, other=0.0).to(tl.float32)
            s += c * value
        if gate is not None:
            g = tl.load(gate + at, mask=held, other=0.0).to(tl.float32)
            a = activate(g, ACT)
        x = s
        if AFTER:
            x *= a
        if weight is not None:
            r = _inverse_norm(x, D, EPS)
            x *= r
        if gate is not None and not AFTER:
            dg = d * x
            if weight is not None:
                dg *= w
            tl.store(dgate + at, (dg * slope(g, ACT)).to(dgate.dtype.element_ty), mask=held)
            d *= a
        if weight is not None:
            dw += d * x
            d *= w
            d = r * (d - x * (tl.sum(d * x, 1) / D)[:, None])
        if AFTER:
            tl.store(dgate + at, (d * s * slope(g, ACT)).to(dgate.dtype.element_ty), mask=held)
            d *= a
        if skip is not None:
            dc += d * value
            tl.store(dv + at, (d * c).to(dv.dtype.element_ty), mask=held)
        tl.store(dy + at, d.to(dy.dtype.element_ty), mask=held)
    sums += tl.program_id(0) * SUMS + column
    if weight is not None:
        tl.store(sums, tl.sum(dw, 0), mask=column < D)
    if skip is not None:
        tl.store(sums + (SUMS - D), tl.sum(dc, 0), mask=column < D)


# ---- launches --------------------------------------------------------------------------------------------------------


def _cut(y: Tensor, whole: bool) -> tuple[int, int, int, int, int, int]:
    """Width of a row, its power of two, rows at once, programs, how often each takes rows, warps."""
    d = y.shape[-1] * (y.shape[-2] if whole else 1)
    side = power_of_2(d)
    warps = WARPS if side <= 1024 else 8
    together = max(1, 32 * warps * _ENTRIES // side)
    tiles = -(-(y.numel() // d) // together)
    steps = -(-tiles // _PROGRAMS)
    return d, side, together, -(-tiles // steps), steps, warps


def _forward(
    y: Tensor, gate: Tensor | None, weight: Tensor | None, skip: Tensor | None, v: Tensor | None,
    activation: str, eps: float, after: bool, record: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    d, side, together, programs, steps, warps = _cut(y, after or skip is not None)
    u = y.new_empty(*y.shape[:-2], y.shape[-2] * y.shape[-1])
    with on_device(y):
        _leave[(programs,)](
            y, gate, weight, skip, v, u, y.numel() // d, steps,
            D=d, DP=side, BR=together, ACT=ACTIVATIONS.index(activation), EPS=eps, AFTER=after, num_warps=warps,
        )  # fmt: skip
    return u, []


def _backward(
    y: Tensor, gate: Tensor | None, weight: Tensor | None, skip: Tensor | None, v: Tensor | None,
    activation: str, eps: float, after: bool, kept: list[Tensor], du: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of y, gate, weight, skip and v, empty where there is none."""
    d, side, together, programs, steps, warps = _cut(y, after or skip is not None)
    dy, dgate, dv = torch.empty_like(y), _like(gate, y), _like(v, y)
    numbers = d * ((weight is not None) + (skip is not None))
    sums = y.new_empty(programs, numbers, dtype=torch.float32)
    with on_device(y):
        _leave_backward[(programs,)](
            y, gate, weight, skip, v, du, dy, dgate, dv, sums, y.numel() // d, steps,
            D=d, DP=side, BR=together, ACT=ACTIVATIONS.index(activation), EPS=eps, AFTER=after, SUMS=numbers,
            num_warps=warps,
        )  # fmt: skip
    total = sums.sum(0)
    dweight = _like(None, y) if weight is None else total[:d].to(weight.dtype, copy=True)
    dskip = _like(None, y) if skip is None else total[numbers - d :].to(skip.dtype, copy=True)
    return [dy, dgate, dweight, dskip, dv]


def _like(x: Tensor | None, y: Tensor) -> Tensor:
    return y.new_empty(0) if x is None else torch.empty_like(x)


def _shapes(
    y: Tensor, gate: Tensor | None, weight: Tensor | None, skip: Tensor | None, v: Tensor | None,
    activation: str, eps: float, after: bool, record: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    return y.new_empty(*y.shape[:-2], y.shape[-2] * y.shape[-1]), []


_leaving = Differentiable("leave", _forward, _backward, _shapes, gradients=5)


def leave(
    y: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, skip: Tensor | None = None,
    v: Tensor | None = None, *, activation: str = "silu", eps: float = 1e-5, after: bool = False,
) -> Tensor:  # fmt: skip
    """(B, T, H, D) to (B, T, H D) in the same dtype: a skip, an RMS norm and a gate, what of them there is.

    gate: (B, T, H D) in y's dtype, its activation multiplies.  weight: of the norm, (D) for every head's own; with
    `after`, (H D): of all heads together behind the gate.  skip: (H D), times v (B, T, H, D) is added first.
    All tensors receive gradients, once.  Raises ShapeError on what does not fit.
    """
    who = "leave"
    if y.ndim != 4 or 0 in y.shape or y.shape[-1] > LARGEST:
        raise ShapeError(f"{who}: y is (B, T, H, D), not empty, D up to {LARGEST}, not {tuple(y.shape)}")
    channels, whole = y.shape[2] * y.shape[3], after or skip is not None
    if whole and channels > LONGEST:
        raise ShapeError(f"{who}: H D is up to {LONGEST} where a row is all heads, not {channels}")
    if gate is not None and (gate.shape != (*y.shape[:2], channels) or gate.dtype != y.dtype):
        wanted = f"{y.dtype} {(*y.shape[:2], channels)}"
        raise ShapeError(f"{who}: the gate is {wanted}, not {gate.dtype} {tuple(gate.shape)}")
    row = channels if whole else y.shape[-1]
    if weight is not None and weight.shape != (row,):
        raise ShapeError(f"{who}: weights are {(row,)}, not {tuple(weight.shape)}")
    if (skip is None) != (v is None) or skip is not None and skip.shape != (channels,):
        got = "one of them" if skip is None or v is None else f"{tuple(skip.shape)}"
        raise ShapeError(f"{who}: a skip is {(channels,)} numbers and v, not {got}")
    if v is not None and (v.shape != y.shape or v.dtype != y.dtype):
        raise ShapeError(f"{who}: v is {y.dtype} {tuple(y.shape)}, not {v.dtype} {tuple(v.shape)}")
    if after and (gate is None or weight is None):
        raise ShapeError(f"{who}: a norm behind the gate needs both")
    if gate is None and weight is None and skip is None:
        return y.flatten(-2)
    tensors = [None if x is None else x.contiguous() for x in (y, gate, weight, skip, v)]
    made: Tensor = _leaving(*tensors, activation, eps, after)[0]
    return made
