"""The walk of a cell whose state is a matrix, device side; `axes.kernels.recurrent.matrix` has the formulas."""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.recurrent.cells import tanh


@triton.jit
def _span(offsets, unit, T, PACKED: tl.constexpr, C: tl.constexpr):
    """First row and length of a sequence, and the first of its chunks among all."""
    if PACKED:
        first = tl.load(offsets + unit).to(tl.int64)
        length = tl.load(offsets + unit + 1).to(tl.int64) - first
        slot = first // C + unit
    else:
        first, length = unit.to(tl.int64) * T, T.to(tl.int64)
        slot = unit.to(tl.int64) * tl.cdiv(T, C)
    return first, length, slot


@triton.jit
def _vector(x, row, n, mask, N):
    return tl.load(x + row * N + n, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _candidate(h, w, key, value, PRECISION: tl.constexpr):
    return tanh(tl.dot(h.to(w.dtype), w, input_precision=PRECISION) + key[:, None] * value[None, :])


@Kernel
@triton.jit(do_not_specialize=["T"])
def forward(
    q, k, v, g, w, start, out, last, saved, offsets, T, H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SAVE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    unit, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, slot = _span(offsets, unit, T, PACKED, C)
    i, c = tl.arange(0, BK), tl.arange(0, BV)
    there, place = (i < K)[:, None] & (c < V)[None, :], c[None, :] * K + i[:, None]
    h = tl.load(start + (unit.to(tl.int64) * H + head) * V * K + place, mask=there, other=0.0)
    square = (c < V)[:, None] & (c < V)[None, :]
    matrix = tl.load(w + head * V * V + c[:, None] * V + c[None, :], mask=square, other=0.0)
    for t in range(length):
        if SAVE:
            tl.store(saved + ((slot + t // C) * H + head) * V * K + place, h, mask=there & (t % C == 0))
        row = (first + t) * H + head
        f = tl.exp(tl.load(g + row))
        z = _candidate(h, matrix, _vector(k, row, i, i < K, K), _vector(v, row, c, c < V, V), PRECISION)
        h = z + f * (h - z)
        shown = tl.sum(_vector(q, row, i, i < K, K)[:, None] * h, 0)
        tl.store(out + row * V + c, shown.to(out.dtype.element_ty), mask=c < V)
    tl.store(last + (unit.to(tl.int64) * H + head) * V * K + place, h, mask=there)


@Kernel
@triton.jit(do_not_specialize=["T"])
def backward(
    q, k, v, g, w, saved, room, do, dlast, dq, dk, dv, dg, dw, dstart, offsets, T, H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    unit, head = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, slot = _span(offsets, unit, T, PACKED, C)
    i, c = tl.arange(0, BK), tl.arange(0, BV)
    there, place = (i < K)[:, None] & (c < V)[None, :], c[None, :] * K + i[:, None]
    state = (unit.to(tl.int64) * H + head) * V * K
    d = tl.load(dlast + state + place, mask=there, other=0.0)
    square = (c < V)[:, None] & (c < V)[None, :]
    whole = c[:, None] * V + c[None, :]
    matrix = tl.load(w + head * V * V + whole, mask=square, other=0.0)
    turned = tl.load(w + head * V * V + c[None, :] * V + c[:, None], mask=square, other=0.0)
    of_matrix = tl.zeros((BV, BV), dtype=tl.float32)
    chunks = tl.cdiv(length, C)
    for n in range(chunks):
        chunk = chunks - 1 - n
        begin = chunk * C
        count = tl.minimum(C, length - begin)
        h = tl.load(saved + ((slot + chunk) * H + head) * V * K + place, mask=there, other=0.0)
        for t in range(count):
            tl.store(room + ((unit.to(tl.int64) * C + t) * H + head) * V * K + place, h, mask=there)
            row = (first + begin + t) * H + head
            f = tl.exp(tl.load(g + row))
            z = _candidate(h, matrix, _vector(k, row, i, i < K, K), _vector(v, row, c, c < V, V), PRECISION)
            h = z + f * (h - z)
        tl.debug_barrier()  # what is read below has been written
        for m in range(count):
            t = count - 1 - m
            row = (first + begin + t) * H + head
            h = tl.load(room + ((unit.to(tl.int64) * C + t) * H + head) * V * K + place, mask=there, other=0.0)
            f = tl.exp(tl.load(g + row))
            query, key = _vector(q, row, i, i < K, K), _vector(k, row, i, i < K, K)
            value, heard = _vector(v, row, c, c < V, V), _vector(do, row, c, c < V, V)
            z = _candidate(h, matrix, key, value, PRECISION)
            d += query[:, None] * heard[None, :]
            asked = tl.sum((z + f * (h - z)) * heard[None, :], 1)
            tl.store(dq + row * K + i, asked.to(dq.dtype.element_ty), mask=i < K)
            tl.store(dg + row, f * tl.sum(tl.sum(d * (h - z), 1), 0))
            p = d * (1.0 - f) * (1.0 - z * z)
            tl.store(dk + row * K + i, tl.sum(p * value[None, :], 1).to(dk.dtype.element_ty), mask=i < K)
            tl.store(dv + row * V + c, tl.sum(p * key[:, None], 0).to(dv.dtype.element_ty), mask=c < V)
            short = p.to(matrix.dtype)
            of_matrix += tl.dot(tl.trans(h.to(matrix.dtype)), short, input_precision=PRECISION)
            d = f * d + tl.dot(short, turned, input_precision=PRECISION)
        tl.debug_barrier()  # the room is written again
    tl.store(dw + (unit * H + head) * V * V + whole, of_matrix, mask=square)
    tl.store(dstart + state + place, d, mask=there)
