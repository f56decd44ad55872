"""A walk over the tokens of a tile of sequences, device side; `axes.kernels.recurrent.chain` has the formulas.

A program has BM sequences and one head: its matrices, a tile for each pre-activation, and its state are on chip from
the first token to the last. Sequences of a tile may differ in length: one that has ended keeps its state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.recurrent.cells import back, walk


@triton.jit
def _rows(offsets, sequence, B, T, PACKED: tl.constexpr):
    """First row and length of every sequence of a tile; none has tokens beyond B."""
    if PACKED:
        first = tl.load(offsets + sequence, mask=sequence < B, other=0).to(tl.int64)
        length = tl.load(offsets + sequence + 1, mask=sequence < B, other=0).to(tl.int64) - first
    else:
        first = sequence.to(tl.int64) * T
        length = tl.where(sequence < B, T, 0).to(tl.int64)
    return first, length


@triton.jit
def _matrix(w, head, g, V, G: tl.constexpr, BV: tl.constexpr, TURNED: tl.constexpr, THERE: tl.constexpr):
    """W of a pre-activation (in, out), or turned."""
    i = tl.arange(0, BV)
    if TURNED:
        place = w + ((head * V + i[None, :]) * G + g) * V + i[:, None]
    else:
        place = w + ((head * V + i[:, None]) * G + g) * V + i[None, :]
    return tl.load(place, mask=(i[:, None] < V) & (i[None, :] < V) & THERE, other=0.0)


@triton.jit
def _line(b, head, g, V, c, G: tl.constexpr, THERE: tl.constexpr):
    return tl.load(b + (head * G + g) * V + c, mask=(c < V) & THERE, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _of(x, row, g, V, c, mask, G: tl.constexpr, THERE: tl.constexpr):
    """A pre-activation of every sequence's token."""
    return tl.load(x + (row * G + g) * V + c, mask=mask & THERE, other=0.0).to(tl.float32)


@Kernel
@triton.jit(do_not_specialize=["B", "T"])
def forward(
    x, w, b, h0, y0, e0, out, last_h, last_y, last_e, us, hs, ys, es, offsets, B, T, H, V,
    G: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, CELL: tl.constexpr, SAVE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and the last h, y and what is carried. SAVE: u, and h, y and what is carried before every token."""
    tile, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, c = tile * BM + tl.arange(0, BM), tl.arange(0, BV)
    first, length = _rows(offsets, sequence, B, T, PACKED)
    held = (sequence.to(tl.int64) * H + head)[:, None] * V + c[None, :]
    there = (sequence < B)[:, None] & (c < V)[None, :]
    h = tl.load(h0 + held, mask=there, other=0.0)
    y = tl.load(y0 + held, mask=there, other=0.0)
    e = tl.load(e0 + held, mask=there, other=0.0)
    w0, w1 = _matrix(w, head, 0, V, G, BV, False, True), _matrix(w, head, 1, V, G, BV, False, True)
    w2, w3 = _matrix(w, head, 2, V, G, BV, False, True), _matrix(w, head, 3, V, G, BV, False, G == 4)
    b0, b1 = _line(b, head, 0, V, c, G, True), _line(b, head, 1, V, c, G, True)
    b2, b3 = _line(b, head, 2, V, c, G, True), _line(b, head, 3, V, c, G, G == 4)
    for t in range(tl.max(length, 0)):
        now = there & (t < length)[:, None]
        row = ((first + t) * H + head)[:, None]
        place = row * V + c[None, :]
        x0, x1 = _of(x, row, 0, V, c[None, :], now, G, True), _of(x, row, 1, V, c[None, :], now, G, True)
        x2, x3 = _of(x, row, 2, V, c[None, :], now, G, True), _of(x, row, 3, V, c[None, :], now, G, G == 4)
        short = h.to(w0.dtype)
        u0 = tl.dot(short, w0, input_precision=PRECISION) + b0
        u1 = tl.dot(short, w1, input_precision=PRECISION) + b1
        u2 = tl.dot(short, w2, input_precision=PRECISION) + b2
        u3 = u2
        if G == 4:
            u3 = tl.dot(short, w3, input_precision=PRECISION) + b3
        if SAVE:
            tl.store(hs + place, h.to(hs.dtype.element_ty), mask=now)
            tl.store(ys + place, y, mask=now)
            tl.store(es + place, e, mask=now & (G == 4))
            tl.store(us + (row * G + 0) * V + c[None, :], u0.to(us.dtype.element_ty), mask=now)
            tl.store(us + (row * G + 1) * V + c[None, :], u1.to(us.dtype.element_ty), mask=now)
            tl.store(us + (row * G + 2) * V + c[None, :], u2.to(us.dtype.element_ty), mask=now)
            tl.store(us + (row * G + 3) * V + c[None, :], u3.to(us.dtype.element_ty), mask=now & (G == 4))
        shown, after, carried = walk(x0, x1, x2, x3, u0, u1, u2, u3, y, e, CELL)
        tl.store(out + place, shown.to(out.dtype.element_ty), mask=now)
        h, y, e = tl.where(now, shown, h), tl.where(now, after, y), tl.where(now, carried, e)
    tl.store(last_h + held, h, mask=there)
    tl.store(last_y + held, y, mask=there)
    tl.store(last_e + held, e, mask=there)


@Kernel
@triton.jit(do_not_specialize=["B", "T"])
def backward(
    x, w, us, ys, es, dout, dh_last, dy_last, de_last, dx, du, dh0, dy0, de0, offsets, B, T, H, V,
    G: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, CELL: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of x, of u and of what was there before the first token."""
    tile, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, c = tile * BM + tl.arange(0, BM), tl.arange(0, BV)
    first, length = _rows(offsets, sequence, B, T, PACKED)
    held = (sequence.to(tl.int64) * H + head)[:, None] * V + c[None, :]
    there = (sequence < B)[:, None] & (c < V)[None, :]
    dh = tl.load(dh_last + held, mask=there, other=0.0)
    dy = tl.load(dy_last + held, mask=there, other=0.0)
    de = tl.load(de_last + held, mask=there, other=0.0)
    w0, w1 = _matrix(w, head, 0, V, G, BV, True, True), _matrix(w, head, 1, V, G, BV, True, True)
    w2, w3 = _matrix(w, head, 2, V, G, BV, True, True), _matrix(w, head, 3, V, G, BV, True, G == 4)
    longest = tl.max(length, 0)
    for n in range(longest):
        t = longest - 1 - n
        now = there & (t < length)[:, None]
        row = ((first + t) * H + head)[:, None]
        place = row * V + c[None, :]
        x0, x1 = _of(x, row, 0, V, c[None, :], now, G, True), _of(x, row, 1, V, c[None, :], now, G, True)
        x2, x3 = _of(x, row, 2, V, c[None, :], now, G, True), _of(x, row, 3, V, c[None, :], now, G, G == 4)
        u0, u1 = _of(us, row, 0, V, c[None, :], now, G, True), _of(us, row, 1, V, c[None, :], now, G, True)
        u2, u3 = _of(us, row, 2, V, c[None, :], now, G, True), _of(us, row, 3, V, c[None, :], now, G, G == 4)
        y = tl.load(ys + place, mask=now, other=0.0)
        e = tl.load(es + place, mask=now & (G == 4), other=0.0)
        d = tl.load(dout + place, mask=now, other=0.0).to(tl.float32) + dh
        dx0, dx1, dx2, dx3, du2, before, out = back(x0, x1, x2, x3, u0, u1, u2, u3, y, e, d, dy, de, CELL)
        tl.store(dx + (row * G + 0) * V + c[None, :], dx0.to(dx.dtype.element_ty), mask=now)
        tl.store(dx + (row * G + 1) * V + c[None, :], dx1.to(dx.dtype.element_ty), mask=now)
        tl.store(dx + (row * G + 2) * V + c[None, :], dx2.to(dx.dtype.element_ty), mask=now)
        tl.store(dx + (row * G + 3) * V + c[None, :], dx3.to(dx.dtype.element_ty), mask=now & (G == 4))
        if CELL == "gru":  # of which u alone is multiplied by r
            tl.store(du + place, du2.to(du.dtype.element_ty), mask=now)
        back_h = tl.dot(dx0.to(w0.dtype), w0, input_precision=PRECISION)
        back_h += tl.dot(dx1.to(w0.dtype), w1, input_precision=PRECISION)
        back_h += tl.dot(du2.to(w0.dtype), w2, input_precision=PRECISION)
        if G == 4:
            back_h += tl.dot(dx3.to(w0.dtype), w3, input_precision=PRECISION)
        dh, dy, de = tl.where(now, back_h, dh), tl.where(now, before, dy), tl.where(now, out, de)
    tl.store(dh0 + held, dh, mask=there)
    tl.store(dy0 + held, dy, mask=there)
    tl.store(de0 + held, de, mask=there)
