"""A walk over the tokens of a tile of sequences, device side; `axes.kernels.recurrent.chain` has the formulas.

A program has BM sequences and one head: its matrices, a tile for each pre-activation, and its state are on chip from
the first token to the last. Sequences of a tile may differ in length: one that has ended keeps its state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.recurrent.cells import slopes, through, walk


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
def _matrices(w, head, V, G: tl.constexpr, BV: tl.constexpr, TURNED: tl.constexpr):
    """W of up to four pre-activations."""
    w0, w1 = _matrix(w, head, 0, V, G, BV, TURNED, True), _matrix(w, head, 1, V, G, BV, TURNED, True)
    w2, w3 = _matrix(w, head, 2, V, G, BV, TURNED, True), _matrix(w, head, 3, V, G, BV, TURNED, G == 4)
    return w0, w1, w2, w3


@triton.jit
def _of(x, row, g, V, c, mask, G: tl.constexpr, THERE: tl.constexpr):
    return tl.load(x + (row * G + g) * V + c, mask=mask & THERE, other=0.0).to(tl.float32)


@triton.jit
def _activations(x, row, V, c, mask, G: tl.constexpr):
    """Up to four pre-activations of every sequence's token."""
    x0, x1 = _of(x, row, 0, V, c, mask, G, True), _of(x, row, 1, V, c, mask, G, True)
    x2, x3 = _of(x, row, 2, V, c, mask, G, True), _of(x, row, 3, V, c, mask, G, G == 4)
    return x0, x1, x2, x3


@triton.jit
def _given(ys, es, dout, place, mask, G: tl.constexpr):
    """The state, what was carried and the outputs' gradient of every sequence's token."""
    y = tl.load(ys + place, mask=mask, other=0.0)
    e = tl.load(es + place, mask=mask & (G == 4), other=0.0)
    return y, e, tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _keep(to, x0, x1, x2, x3, row, V, c, mask, G: tl.constexpr):
    place = to + row * G * V + c
    tl.store(place, x0.to(to.dtype.element_ty), mask=mask)
    tl.store(place + V, x1.to(to.dtype.element_ty), mask=mask)
    tl.store(place + 2 * V, x2.to(to.dtype.element_ty), mask=mask)
    tl.store(place + 3 * V, x3.to(to.dtype.element_ty), mask=mask & (G == 4))


@triton.jit
def _held(h, y, e, held, there):
    """What goes from token to token, of every sequence."""
    h = tl.load(h + held, mask=there, other=0.0)
    return h, tl.load(y + held, mask=there, other=0.0), tl.load(e + held, mask=there, other=0.0)


@triton.jit
def _hold(to_h, to_y, to_e, h, y, e, held, there):
    tl.store(to_h + held, h, mask=there)
    tl.store(to_y + held, y, mask=there)
    tl.store(to_e + held, e, mask=there)


@triton.jit
def _tile(offsets, B, T, H, V, BM: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr):
    """A program's head, rows and lengths of its sequences, channels, where their states stand, and which do."""
    tile, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, c = tile * BM + tl.arange(0, BM), tl.arange(0, BV)
    first, length = _rows(offsets, sequence, B, T, PACKED)
    held = (sequence.to(tl.int64) * H + head)[:, None] * V + c[None, :]
    return head, first, length, c, held, (sequence < B)[:, None] & (c < V)[None, :]


@triton.jit
def _token(t, first, length, head, c, there, H, V):
    """Row and place of token t of every sequence, and which have one."""
    row = ((first + t) * H + head)[:, None]
    return row, row * V + c[None, :], there & (t < length)[:, None]


@Kernel
@triton.jit(do_not_specialize=["B", "T"])
def forward(
    x, w, b, h0, y0, e0, out, last_h, last_y, last_e, us, hs, ys, es, offsets, B, T, H, V,
    G: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, CELL: tl.constexpr, SAVE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and the last h, y and what is carried. SAVE: u, and h, y and what is carried before every token."""
    head, first, length, c, held, there = _tile(offsets, B, T, H, V, BM, BV, PACKED)
    h, y, e = _held(h0, y0, e0, held, there)
    w0, w1, w2, w3 = _matrices(w, head, V, G, BV, False)
    b0, b1 = _line(b, head, 0, V, c, G, True), _line(b, head, 1, V, c, G, True)
    b2, b3 = _line(b, head, 2, V, c, G, True), _line(b, head, 3, V, c, G, G == 4)
    row, place, now = _token(0, first, length, head, c, there, H, V)
    x0, x1, x2, x3 = _activations(x, row, V, c[None, :], now, G)
    for t in range(tl.max(length, 0)):
        # nothing of the next token's x waits for this one's state
        next_row, next_place, later = _token(t + 1, first, length, head, c, there, H, V)
        next0, next1, next2, next3 = _activations(x, next_row, V, c[None, :], later, G)
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
            _keep(us, u0, u1, u2, u3, row, V, c[None, :], now, G)
        p2 = x2 if CELL == "gru" else x2 + u2
        shown, after, carried = walk(x0 + u0, x1 + u1, p2, x3 + u3, u2, y, e, CELL)
        tl.store(out + place, shown.to(out.dtype.element_ty), mask=now)
        h, y, e = tl.where(now, shown, h), tl.where(now, after, y), tl.where(now, carried, e)
        row, place, now = next_row, next_place, later
        x0, x1, x2, x3 = next0, next1, next2, next3
    _hold(last_h, last_y, last_e, h, y, e, held, there)


@Kernel
@triton.jit(do_not_specialize=["B", "T"])
def backward(
    x, w, us, ys, es, dout, dh_last, dy_last, de_last, dx, du, dh0, dy0, de0, offsets, B, T, H, V,
    G: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, CELL: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of x, of u and of what was there before the first token."""
    head, first, length, c, held, there = _tile(offsets, B, T, H, V, BM, BV, PACKED)
    dh, dy, de = _held(dh_last, dy_last, de_last, held, there)
    w0, w1, w2, w3 = _matrices(w, head, V, G, BV, True)
    longest = tl.max(length, 0)
    row, place, now = _token(longest - 1, first, length, head, c, there & (longest > 0), H, V)
    x0, x1, x2, x3 = _activations(x, row, V, c[None, :], now, G)
    u0, u1, u2, u3 = _activations(us, row, V, c[None, :], now, G)
    y, e, d = _given(ys, es, dout, place, now, G)
    for n in range(longest):
        t = longest - 1 - n
        earlier = there & (t > 0)
        next_row, next_place, later = _token(t - 1, first, length, head, c, earlier, H, V)
        nx0, nx1, nx2, nx3 = _activations(x, next_row, V, c[None, :], later, G)
        nu0, nu1, nu2, nu3 = _activations(us, next_row, V, c[None, :], later, G)
        ny, ne, nd = _given(ys, es, dout, next_place, later, G)
        d += dh
        p2 = x2 if CELL == "gru" else x2 + u2
        a0, a1, a2, a3, rate, shows = slopes(x0 + u0, x1 + u1, p2, x3 + u3, u2, y, e, CELL)
        dx0, dx1, dx2, dx3, before, out = through(a0, a1, a2, a3, rate, shows, d, dy, de, CELL)
        du2 = dx3 if CELL == "gru" else dx2
        _keep(dx, dx0, dx1, dx2, dx3, row, V, c[None, :], now, G)
        if CELL == "gru":  # of which u alone is multiplied by r
            tl.store(du + place, du2.to(du.dtype.element_ty), mask=now)
        back_h = tl.dot(dx0.to(w0.dtype), w0, input_precision=PRECISION)
        back_h += tl.dot(dx1.to(w0.dtype), w1, input_precision=PRECISION)
        back_h += tl.dot(du2.to(w0.dtype), w2, input_precision=PRECISION)
        if G == 4:
            back_h += tl.dot(dx3.to(w0.dtype), w3, input_precision=PRECISION)
        dh, dy, de = tl.where(now, back_h, dh), tl.where(now, before, dy), tl.where(now, out, de)
        row, place, now = next_row, next_place, later
        x0, x1, x2, x3 = nx0, nx1, nx2, nx3
        u0, u1, u2, u3 = nu0, nu1, nu2, nu3
        y, e, d = ny, ne, nd
    _hold(dh0, dy0, de0, dh, dy, de, held, there)
