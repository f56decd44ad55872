"""Rows that turn in pairs under one gate for both, a complex number each: z_t = e^(g_t + i a_t) z_{t-1} + k_t v_t.

Row j < V/2 of a state of one key entry is the real part of mode j, row j + V/2 its imaginary one; o_t = q_t z_t.
Backwards, from do and D = dz_t (pairs as vectors, R the turn by a):
    D += q do     dv = k D     dq = <do, z>     dk = <D, v>     dg = <D, e^g R z_{t-1}>     da = their cross product
    dz_{t-1} = e^g R^T D
One pass over memory each way, where turning values, a scan and turning back are three and two sums of angles more; no
angle is added to another, so that none loses digits. As in `kernels`, a thread has a mode of C tokens in registers, and
states before chunks are kept for the way back. Gates and angles that all tokens share (S5, the LRU) are read once, and
their gradients added up where they are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common.launch import Kernel
from axes.kernels.common.layout import (
    Layout,
    check_chain,
    check_like,
    contiguous,
    extent,
    interpreted,
    layout,
    nothing_read,
    on_device,
)
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.tiles import first_slot, unit_rows
from axes.kernels.entries.kernels import _numbers, _put, _rows, _wide

CHUNK, CHUNK_BACK, _MODES = 8, 8, 32  # tokens that a thread holds forward and backward; modes of a program: one warp
AHEAD, AHEAD_BACK = True, True

# ---- kernels: a unit, a head and a block of modes --------------------------------------------------------------------


@triton.jit
def _turn(angle, FAST: tl.constexpr):
    """Cosine and sine: of the angle less whole turns, by the processor's own functions, off by 2^-20."""
    if FAST:
        turns = tl.floor(angle * 0.15915494309189535 + 0.5)
        angle = tl.fma(turns, -6.28125, angle)
        angle = tl.fma(turns, -1.9353071795e-3, angle)
        c = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        s = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    else:
        c, s = tl.cos(angle), tl.sin(angle)
    return c, s


@triton.jit
def _factors(gates, angles, FAST: tl.constexpr, C: tl.constexpr):
    """Real and imaginary parts of e^(g + i a) of C tokens."""
    real, imaginary = (), ()
    for i in tl.static_range(C):
        c, s = _turn(angles[i], FAST)
        kept = tl.exp2(gates[i] * 1.4426950408889634)
        real = real + (kept * c,)  # type: ignore[assignment]
        imaginary = imaginary + (kept * s,)  # type: ignore[assignment]
    return real, imaginary


@triton.jit
def _same(x, C: tl.constexpr):
    """C times x."""
    out = ()
    for _ in tl.static_range(C):
        out = out + (x,)  # type: ignore[assignment]
    return out


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def forward(
    q, k, v, gate, angle, state, saved, o, offsets, T, N, H, HV, HALF, BLOCKS,
    BR: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, SAVE: tl.constexpr, PACKED: tl.constexpr,
    AHEAD: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """o, and the last state in the place of the first, `state` (units, HV, 2, HALF); with SAVE those before chunks."""
    program = tl.program_id(0)
    unit, head, block = program // BLOCKS // HV, program // BLOCKS % HV, program % BLOCKS
    source = head // (HV // H)
    start, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(start, unit, N, C, PACKED)
    r = block * BR + tl.arange(0, BR)
    own = state + (unit.to(tl.int64) * HV + head) * 2 * HALF + r
    x = tl.load(own, mask=r < HALF, other=0.0)
    y = tl.load(own + HALF, mask=r < HALF, other=0.0)
    if SHARED:
        mine = head * HALF + r
        one = tl.load(gate + mine, mask=r < HALF, other=0.0), tl.load(angle + mine, mask=r < HALF, other=0.0)
        real, imaginary = _factors((one[0],), (one[1],), FAST, 1)
        real, imaginary = _same(real[0], C), _same(imaginary[0], C)
    # rows of values are of twice as many heads
    vx = _rows(v, start, end, 2 * HV, 2 * head, r, HALF, AHEAD, C)
    vy = _rows(v, start, end, 2 * HV, 2 * head + 1, r, HALF, AHEAD, C)
    gates = _rows(gate, start, end, HV, head, r, HALF, AHEAD and not SHARED, C)
    angles = _rows(angle, start, end, HV, head, r, HALF, AHEAD and not SHARED, C)
    for first in range(start, end, C):
        at = first + C if AHEAD else first
        next_x = _rows(v, at, end, 2 * HV, 2 * head, r, HALF, True, C)
        next_y = _rows(v, at, end, 2 * HV, 2 * head + 1, r, HALF, True, C)
        next_gates = _rows(gate, at, end, HV, head, r, HALF, not SHARED, C)
        next_angles = _rows(angle, at, end, HV, head, r, HALF, not SHARED, C)
        if not AHEAD:
            vx, vy, gates, angles = next_x, next_y, next_gates, next_angles
        if not SHARED:
            real, imaginary = _factors(_wide(gates, C), _wide(angles, C), FAST, C)
        if SAVE:
            kept = saved + (slot.to(tl.int64) * HV + head) * 2 * HALF + r
            tl.store(kept, x, mask=r < HALF)
            tl.store(kept + HALF, y, mask=r < HALF)
        keys = _numbers(k, first, end, H, source, 0, 1, C)
        queries = _numbers(q, first, end, H, source, 0, 1, C)
        out_x, out_y = (), ()
        for i in tl.static_range(C):
            moved = real[i] * x - imaginary[i] * y + keys[i] * vx[i].to(tl.float32)
            turned = imaginary[i] * x + real[i] * y + keys[i] * vy[i].to(tl.float32)
            x = tl.where(first + i < end, moved, x)  # a gate past the end is open, but shared ones are not
            y = tl.where(first + i < end, turned, y)
            out_x = out_x + (queries[i] * x,)  # type: ignore[assignment]
            out_y = out_y + (queries[i] * y,)  # type: ignore[assignment]
        _put(o, out_x, first, end, 2 * HV, 2 * head, r, HALF, C)
        _put(o, out_y, first, end, 2 * HV, 2 * head + 1, r, HALF, C)
        slot += 1
        if AHEAD:
            vx, vy, gates, angles = next_x, next_y, next_gates, next_angles
    tl.store(own, x, mask=r < HALF)
    tl.store(own + HALF, y, mask=r < HALF)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def backward(
    q, k, v, gate, angle, saved, do, carry, dq, dk, dv, dgate, dangle, offsets, T, N, H, HV, HALF, BLOCKS,
    BR: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr,
    AHEAD: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients. carry (units, HV, 2, HALF): of the last state, and at the end of the first; dq and dk (tokens, HV,
    BLOCKS): a block's part; SHARED: dgate and dangle (units, HV, HALF)."""
    program = tl.program_id(0)
    unit, head, block = program // BLOCKS // HV, program // BLOCKS % HV, program % BLOCKS
    source = head // (HV // H)
    start, end = unit_rows(offsets, unit, T, PACKED)
    base = first_slot(start, unit, N, C, PACKED)
    r = block * BR + tl.arange(0, BR)
    own = carry + (unit.to(tl.int64) * HV + head) * 2 * HALF + r
    dx = tl.load(own, mask=r < HALF, other=0.0)
    dy = tl.load(own + HALF, mask=r < HALF, other=0.0)
    by_gate = tl.zeros([BR], dtype=tl.float32)
    by_angle = tl.zeros([BR], dtype=tl.float32)
    if SHARED:
        mine = head * HALF + r
        one = tl.load(gate + mine, mask=r < HALF, other=0.0), tl.load(angle + mine, mask=r < HALF, other=0.0)
        real, imaginary = _factors((one[0],), (one[1],), FAST, 1)
        real, imaginary = _same(real[0], C), _same(imaginary[0], C)
    chunks = tl.cdiv(end - start, C)
    at = start + (chunks - 1) * C
    vx = _rows(v, at, end, 2 * HV, 2 * head, r, HALF, AHEAD, C)
    vy = _rows(v, at, end, 2 * HV, 2 * head + 1, r, HALF, AHEAD, C)
    hx = _rows(do, at, end, 2 * HV, 2 * head, r, HALF, AHEAD, C)
    hy = _rows(do, at, end, 2 * HV, 2 * head + 1, r, HALF, AHEAD, C)
    gates = _rows(gate, at, end, HV, head, r, HALF, AHEAD and not SHARED, C)
    angles = _rows(angle, at, end, HV, head, r, HALF, AHEAD and not SHARED, C)
    for n in range(chunks):
        chunk = chunks - 1 - n
        first = start + chunk * C
        at = tl.maximum(first - C, start) if AHEAD else first  # before the first chunk nobody looks
        next_vx = _rows(v, at, end, 2 * HV, 2 * head, r, HALF, True, C)
        next_vy = _rows(v, at, end, 2 * HV, 2 * head + 1, r, HALF, True, C)
        next_hx = _rows(do, at, end, 2 * HV, 2 * head, r, HALF, True, C)
        next_hy = _rows(do, at, end, 2 * HV, 2 * head + 1, r, HALF, True, C)
        next_gates = _rows(gate, at, end, HV, head, r, HALF, not SHARED, C)
        next_angles = _rows(angle, at, end, HV, head, r, HALF, not SHARED, C)
        if not AHEAD:
            vx, vy, hx, hy, gates, angles = next_vx, next_vy, next_hx, next_hy, next_gates, next_angles
        kept = saved + ((base + chunk).to(tl.int64) * HV + head) * 2 * HALF + r
        x = tl.load(kept, mask=r < HALF, other=0.0)
        y = tl.load(kept + HALF, mask=r < HALF, other=0.0)
        keys = _numbers(k, first, end, H, source, 0, 1, C)
        queries = _numbers(q, first, end, H, source, 0, 1, C)
        if not SHARED:
            real, imaginary = _factors(_wide(gates, C), _wide(angles, C), FAST, C)
        xs, ys = (x,), (y,)
        for i in tl.static_range(C):
            moved = real[i] * x - imaginary[i] * y + keys[i] * vx[i].to(tl.float32)
            y = imaginary[i] * x + real[i] * y + keys[i] * vy[i].to(tl.float32)
            x = moved
            xs = xs + (x,)  # type: ignore[assignment]
            ys = ys + (y,)  # type: ignore[assignment]
        to_x, to_y, to_gate, to_angle = (), (), (), ()
        for i in tl.static_range(C - 1, -1, -1):
            token = first + i
            here = token < end
            ox, oy = hx[i].to(tl.float32), hy[i].to(tl.float32)
            dx += queries[i] * ox
            dy += queries[i] * oy
            if KEYS:
                there = (token * HV + head) * BLOCKS + block
                tl.store(dq + there, tl.sum(ox * xs[i + 1] + oy * ys[i + 1], 0), mask=here)
                tl.store(dk + there, tl.sum(dx * vx[i].to(tl.float32) + dy * vy[i].to(tl.float32), 0), mask=here)
            to_x = (keys[i] * dx,) + to_x  # type: ignore[assignment]
            to_y = (keys[i] * dy,) + to_y  # type: ignore[assignment]
            rx = real[i] * xs[i] - imaginary[i] * ys[i]
            ry = imaginary[i] * xs[i] + real[i] * ys[i]
            if SHARED:
                by_gate += tl.where(here, dx * rx + dy * ry, 0.0)
                by_angle += tl.where(here, dy * rx - dx * ry, 0.0)
            else:
                to_gate = (dx * rx + dy * ry,) + to_gate  # type: ignore[assignment]
                to_angle = (dy * rx - dx * ry,) + to_angle  # type: ignore[assignment]
            before = real[i] * dx + imaginary[i] * dy
            dy = tl.where(here, real[i] * dy - imaginary[i] * dx, dy)
            dx = tl.where(here, before, dx)
        _put(dv, to_x, first, end, 2 * HV, 2 * head, r, HALF, C)
        _put(dv, to_y, first, end, 2 * HV, 2 * head + 1, r, HALF, C)
        if not SHARED:
            _put(dgate, to_gate, first, end, HV, head, r, HALF, C)
            _put(dangle, to_angle, first, end, HV, head, r, HALF, C)
        if AHEAD:
            vx, vy, hx, hy, gates, angles = next_vx, next_vy, next_hx, next_hy, next_gates, next_angles
    tl.store(own, dx, mask=r < HALF)
    tl.store(own + HALF, dy, mask=r < HALF)
    if SHARED:
        total = (unit.to(tl.int64) * HV + head) * HALF + r
        tl.store(dgate + total, by_gate, mask=r < HALF)
        tl.store(dangle + total, by_angle, mask=r < HALF)


# ---- launches --------------------------------------------------------------------------------------------------------


def _common(
    v: Tensor, k: Tensor, gate: Tensor, cu: Tensor | None, chunk: int
) -> tuple[Layout, tuple[int, ...], int, dict[str, Any]]:
    """The layout, the kernels' last numbers, the number of programs and constants."""
    cut, half = layout(v.shape[0], v.shape[1], chunk, cu), v.shape[3] // 2
    blocks = cdiv(half, _MODES)
    sizes = (cut.length, cut.chunks, k.shape[2], v.shape[2], half, blocks)
    fast = v.dtype != torch.float32 and not interpreted()
    constants = dict(BR=_MODES, C=chunk, SHARED=gate.ndim == 2, PACKED=cu is not None, FAST=fast, num_warps=1)
    return cut, sizes, cut.units * v.shape[2] * blocks, constants


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, angle: Tensor, start: Tensor | None, cu_seqlens: Tensor | None,
    keys: bool, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    chunk = CHUNK_BACK if record else CHUNK
    cut, sizes, programs, constants = _common(v, k, gate, cu_seqlens, chunk)
    o, shape = torch.empty_like(v), (cut.units, *v.shape[2:])
    state = v.new_zeros(shape, dtype=torch.float32) if start is None else start.clone()
    saved = v.new_empty(cut.slots, *v.shape[2:], dtype=torch.float32) if record else state
    with on_device(v):
        forward[(programs,)](
            q, k, v, gate, angle, state, saved, o, v if cut.offsets is None else cut.offsets, *sizes, SAVE=record,
            AHEAD=AHEAD, **constants,
        )  # fmt: skip
    return o, state, [saved] if record else []


def _shapes(q, k, v, gate, angle, start, cu_seqlens, keys, record):
    units, slots = extent(v.shape[0], v.shape[1], CHUNK_BACK, cu_seqlens)
    kept = [v.new_empty(slots, *v.shape[2:], dtype=torch.float32)] if record else []
    return torch.empty_like(v), v.new_empty(units, *v.shape[2:], dtype=torch.float32), kept


def _backward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, angle: Tensor, start: Tensor | None, cu_seqlens: Tensor | None,
    keys: bool, kept: list[Tensor], do: Tensor, dfinal: Tensor,
) -> list[Tensor]:  # fmt: skip
    cut, sizes, programs, constants = _common(v, k, gate, cu_seqlens, CHUNK_BACK)
    (b, t, h, _), hv, carry, dv = k.shape, v.shape[2], dfinal.clone(), torch.empty_like(v)
    each = (cut.units,) if gate.ndim == 2 else ()
    dgate, dangle = (x.new_empty(*each, *x.shape) for x in (gate, angle))
    dq, dk = (v.new_empty(b, t, hv, sizes[-1], dtype=torch.float32) if keys else v for _ in range(2))
    with on_device(v):
        backward[(programs,)](
            q, k, v, gate, angle, kept[0], do, carry, dq, dk, dv, dgate, dangle,
            v if cut.offsets is None else cut.offsets, *sizes, KEYS=keys, AHEAD=AHEAD_BACK, **constants,
        )  # fmt: skip
    if keys:
        dq, dk = (x.view(b, t, h, -1).sum(3, keepdim=True).to(q.dtype) for x in (dq, dk))
    else:
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    if each:
        dgate, dangle = dgate.sum(0), dangle.sum(0)
    return [dq, dk, dv, dgate, dangle, carry]


_chain = Differentiable("modes", _forward, _backward, _shapes, gradients=6)


def modes_chain(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, angle: Tensor, initial_state: Tensor | None = None, *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Modes z_t = e^(gate_t + i angle_t) z_{t-1} + k_t v_t, read as q_t z_t, the exact recurrence.

    q, k (B, T, H, 1) and v (B, T, HV, V) in one dtype (bf16, fp16, fp32), HV a multiple of H, V even: real rows, then
    imaginary ones; gate (logs) and angle (B, T, HV, V/2), or (HV, V/2) where all tokens share them; initial_state
    (U, HV, V, 1) or None for zero, U = B or the number of sequences that cu_seqlens packs in one batch entry. Returns o
    (B, T, HV, V) in v's dtype and the last state (U, HV, V, 1) in float32. All inputs receive gradients, once; q and k
    none where neither asks. Raises ShapeError for other shapes, dtypes or devices.
    """
    who = "modes_chain"
    units = check_chain(who, q, k, v, cu_seqlens, initial_state, {}, widest_values=None)
    if k.shape[3] != 1 or v.shape[3] % 2 or gate.ndim != angle.ndim:
        given = f"{k.shape[3]} of keys, {v.shape[3]} of values, {tuple(gate.shape)} and {tuple(angle.shape)}"
        raise ShapeError(f"{who}: keys have one entry, values an even number, gates and angles one shape, not {given}")
    lead = () if gate.ndim == 2 else v.shape[:2]
    for name, x in (("gate", gate), ("angle", angle)):
        check_like(who, name, x, (*lead, v.shape[2], v.shape[3] // 2), q.device)
    if v.numel() == 0:
        return nothing_read(v, (units, *v.shape[2:], 1), initial_state)
    keys = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    start = None if initial_state is None else initial_state.float().squeeze(-1)
    o, final = _chain(*contiguous(q, k, v, gate.float(), angle.float(), start), cu_seqlens, keys)
    return o, final.unsqueeze(-1)


__all__ = ["modes_chain"]
