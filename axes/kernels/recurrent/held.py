"""The walk with matrices in registers, in Gluon: `kernels.forward` and what of `kernels.backward` waits for a token.

A warp owns 16 channels of a head: its rows of every W are left operands of products that stand in its registers over
all tokens, and tiles are (channels, sequences), 8 sequences a product. A thread has two rows of a tile, 8 apart: rows
are channels in an order (`_channel`) by which these are neighbours in memory, and one number of 32 bits. Of a token h
alone, backwards the gradients of u, pass through shared memory, by turns through two rooms: one barrier a token. What
the next token reads from memory is asked for before this one's products. Backwards nothing is left that only a token's
own numbers make: `slopes.slopes` has made it, for all tokens at once.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
from __future__ import annotations

from axes.kernels.common.gluon import barrier, gl, gluon, mma_v2
from axes.kernels.common.launch import Kernel
from axes.kernels.recurrent.cells import through, walk
from axes.kernels.recurrent.words import apart, apart_first, one, other, two, word


@gluon.jit
def _channel(row):
    """Of rows r and r + 8 of a product, channels 2 r and 2 r + 1 of its 16."""
    return row // 16 * 16 + row % 8 * 2 + row // 8 % 2


@gluon.jit
def _opened(pairs, DTYPE: gl.constexpr, W: gl.constexpr, U: gl.constexpr):
    """Rows (V, n) of pairs of channels (V / 2, n): no number changes its thread."""
    both = gl.join(one(pairs, DTYPE), other(pairs, DTYPE))
    apart = gl.permute(gl.reshape(both, [W, 8, pairs.shape[1], 2]), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(apart, [pairs.shape[0] * 2, pairs.shape[1]]), U, assert_trivial=True)


@gluon.jit
def _closed(rows, DTYPE: gl.constexpr, W: gl.constexpr, P: gl.constexpr):
    """And back, of numbers in float32."""
    apart = gl.permute(gl.reshape(rows, [W, 2, 8, rows.shape[1]]), (0, 2, 3, 1))
    first, second = gl.split(gl.reshape(apart, [rows.shape[0] // 2, rows.shape[1], 2]))
    return gl.convert_layout(two(first, second, DTYPE), P, assert_trivial=True)


@gluon.jit
def _matrix(w, head, g, V: gl.constexpr, G: gl.constexpr, W: gl.constexpr, U: gl.constexpr, TURNED: gl.constexpr):
    """W of a pre-activation as a left operand (out, in); turned (in, out)."""
    near: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [W, 1], [1, 0])
    far: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [1, W], [0, 1])
    own: gl.constexpr = near if TURNED else far
    i = _channel(gl.arange(0, V, gl.SliceLayout(1, own)))
    j = _channel(gl.arange(0, V, gl.SliceLayout(0, own)))
    if TURNED:
        place = ((head * V + i[:, None]) * G + g) * V + j[None, :]
    else:
        place = ((head * V + j[None, :]) * G + g) * V + i[:, None]
    return gl.convert_layout(gl.load(w + place), gl.DotOperandLayout(0, U, 2))


@gluon.jit
def _matrices(w, head, V: gl.constexpr, G: gl.constexpr, W: gl.constexpr, U: gl.constexpr, TURNED: gl.constexpr):
    w0 = _matrix(w, head, 0, V, G, W, U, TURNED)
    w1 = _matrix(w, head, 1, V, G, W, U, TURNED)
    w2 = _matrix(w, head, 2, V, G, W, U, TURNED)
    w3 = w2
    if G == 4:
        w3 = _matrix(w, head, 3, V, G, W, U, TURNED)
    return w0, w1, w2, w3


@gluon.jit
def _line(b, head, g, c, V: gl.constexpr, G: gl.constexpr):
    return gl.load(b + (head * G + g) * V + c).to(gl.float32)


@gluon.jit
def _rows(offsets, sequence, B, T, PACKED: gl.constexpr):
    """First row and length of every sequence of a tile; none has tokens beyond B."""
    if PACKED:
        first = gl.load(offsets + sequence, mask=sequence < B, other=0).to(gl.int64)
        length = gl.load(offsets + sequence + 1, mask=sequence < B, other=0).to(gl.int64) - first
    else:
        first = sequence.to(gl.int64) * T
        length = gl.where(sequence < B, T, 0).to(gl.int64)
    return first, length


@gluon.jit
def _raw(x, mask, V: gl.constexpr, G: gl.constexpr):
    """Up to four pre-activations of every sequence's token, as they are."""
    x0 = gl.load(x, mask=mask, other=0)
    x1 = gl.load(x + V // 2, mask=mask, other=0)
    x2 = gl.load(x + V, mask=mask, other=0)
    x3 = x2
    if G == 4:
        x3 = gl.load(x + 3 * V // 2, mask=mask, other=0)
    return x0, x1, x2, x3


@gluon.jit
def _before(
    x0, x1, x2, x3, b0, b1, b2, b3, CELL: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr, U: gl.constexpr
):  # fmt: skip
    """Pre-activations but for W h. Of what r multiplies x alone."""
    p0 = _opened(x0, DTYPE, W, U).to(gl.float32) + b0[:, None]
    p1 = _opened(x1, DTYPE, W, U).to(gl.float32) + b1[:, None]
    p2 = _opened(x2, DTYPE, W, U).to(gl.float32)
    p3 = p2
    if CELL != "gru":
        p2 += b2[:, None]
        p3 = _opened(x3, DTYPE, W, U).to(gl.float32) + b3[:, None]
    return p0, p1, p2, p3


@gluon.jit
def _product(w, tile, acc, U: gl.constexpr):
    return mma_v2(w, tile.load(gl.DotOperandLayout(1, U, 2)), acc)


@gluon.jit
def _token(
    room, w0, w1, w2, w3, p0, p1, p2, p3, none, b2, h, y, e, there, told, place, wide, out, hs, ys, es,
    G: gl.constexpr, CELL: gl.constexpr, SAVE: gl.constexpr, ALL: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr,
    U: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """One token of every sequence: h, y and what is carried. ALL: there is one, or nobody asks what is made."""
    short = _closed(h, DTYPE, W, P)
    room.store(_opened(short, DTYPE, W, U))
    if SAVE:
        gl.store(hs + place, short, mask=told)
        if G == 4:
            gl.store(ys + place, _closed(y, DTYPE, W, P), mask=told)
            gl.store(es + wide, e, mask=there)
    barrier()
    p0 = _product(w0, room, p0, U)
    p1 = _product(w1, room, p1, U)
    u2 = p2
    if CELL == "gru":
        u2 = _product(w2, room, none + b2[:, None], U)
    else:
        p2 = _product(w2, room, p2, U)
    if G == 4:
        p3 = _product(w3, room, p3, U)
    shown, after, carried = walk(p0, p1, p2, p3, u2, y, e, CELL, True)
    gl.store(out + place, _closed(shown, DTYPE, W, P), mask=told)
    if ALL:
        h, y, e = shown, after, carried
    else:
        h, y, e = gl.where(there, shown, h), gl.where(there, after, y), gl.where(there, carried, e)
    return h, y, e


@Kernel
@gluon.jit(do_not_specialize=["B", "T", "H"])
def forward(
    x, w, b, h0, y0, e0, out, last_h, last_y, last_e, hs, ys, es, offsets, B, T, H,
    V: gl.constexpr, G: gl.constexpr, BM: gl.constexpr, W: gl.constexpr, CELL: gl.constexpr, SAVE: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """out and the last h, y and what is carried. SAVE: h, as W met it, and but for GRU y and what is carried, before
    every token. x, out, hs and ys are pairs of channels."""
    DTYPE: gl.constexpr = w.dtype.element_ty
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    P: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [W, 1], [1, 0])
    slim: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])  # a row is 16 bytes
    even = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    odd = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    head = gl.program_id(0) % H
    sequence = gl.program_id(0) // H * BM + gl.arange(0, BM, gl.SliceLayout(0, U))
    c = _channel(gl.arange(0, V, gl.SliceLayout(1, U)))
    first, length = _rows(offsets, sequence, B, T, PACKED)
    all_there = (c < V)[:, None] & (sequence < B)[None, :]
    held = (sequence.to(gl.int64) * H + head)[None, :] * V + c[:, None]
    h = gl.load(h0 + held, mask=all_there, other=0.0)
    y = gl.load(y0 + held, mask=all_there, other=0.0)
    e = gl.load(e0 + held, mask=all_there, other=0.0)
    w0, w1, w2, w3 = _matrices(w, head, V, G, W, U, False)
    none = gl.zeros([V, BM], gl.float32, U)
    b0 = _line(b, head, 0, c, V, G)
    b1 = _line(b, head, 1, c, V, G)
    b2 = _line(b, head, 2, c, V, G)
    b3 = b2
    if G == 4:
        b3 = _line(b, head, 3, c, V, G)
    step = H.to(gl.int64) * V
    wide = ((first * H + head) * V)[None, :] + c[:, None]
    pair = gl.arange(0, V // 2, gl.SliceLayout(1, P))
    its_first, its_length = _rows(
        offsets, gl.program_id(0) // H * BM + gl.arange(0, BM, gl.SliceLayout(0, P)), B, T, PACKED
    )
    row, its_length = ((its_first * H + head) * (V // 2))[None, :], its_length[None, :]
    place = row + pair[:, None]
    given = x + row * G + pair[:, None]
    inside = (pair < V)[:, None]
    told = inside & (its_length > 0)
    x0, x1, x2, x3 = _raw(given, told, V, G)
    for n in range((gl.max(length, 0).to(gl.int32) + 1) // 2):
        p0, p1, p2, p3 = _before(x0, x1, x2, x3, b0, b1, b2, b3, CELL, DTYPE, W, U)
        later = inside & (its_length > 2 * n + 1)
        given += G * step // 2
        x0, x1, x2, x3 = _raw(given, later, V, G)
        h, y, e = _token(
            even, w0, w1, w2, w3, p0, p1, p2, p3, none, b2, h, y, e, all_there & (length > 2 * n)[None, :], told,
            place, wide, out, hs, ys, es, G, CELL, SAVE, not PACKED, DTYPE, W, U, P,
        )  # fmt: skip
        p0, p1, p2, p3 = _before(x0, x1, x2, x3, b0, b1, b2, b3, CELL, DTYPE, W, U)
        told = inside & (its_length > 2 * n + 2)
        given += G * step // 2
        x0, x1, x2, x3 = _raw(given, told, V, G)
        h, y, e = _token(
            odd, w0, w1, w2, w3, p0, p1, p2, p3, none, b2, h, y, e, all_there & (length > 2 * n + 1)[None, :], later,
            place + step // 2, wide + step, out, hs, ys, es, G, CELL, SAVE, False, DTYPE, W, U, P,
        )  # fmt: skip
        place += step
        wide += 2 * step
    gl.store(last_h + held, h, mask=all_there)
    gl.store(last_y + held, y, mask=all_there)
    gl.store(last_e + held, e, mask=all_there)


@gluon.jit
def _back(
    r0, r1, r2, r3, w0, w1, w2, w3, own, rest, dh, dy, de, now, to, none,
    DTYPE: gl.constexpr, G: gl.constexpr, CELL: gl.constexpr, ALL: gl.constexpr, U: gl.constexpr,
):  # fmt: skip
    """One token of every sequence, backwards: gradients of h, y and what was carried before it."""
    a0, a1, a2, a3 = apart(own, DTYPE)
    rate, dout, shows = apart_first(rest, DTYPE)
    d0, d1, d2, d3, before, carried = through(a0, a1, a2, a3, rate, shows, dout + dh, dy, de, CELL)
    s0, s1, s2, s3 = d0.to(DTYPE), d1.to(DTYPE), d2.to(DTYPE), d3.to(DTYPE)
    r0.store(s0)
    r1.store(s1)
    r2.store(s3 if G == 3 else s2)
    if G == 4:
        r3.store(s3)
    gl.store(to, word(s0, s1, s2, s3), mask=now)
    barrier()
    heard = _product(w0, r0, none, U) + _product(w1, r1, none, U) + _product(w2, r2, none, U)
    if G == 4:
        heard += _product(w3, r3, none, U)
    if ALL:
        dh, dy, de = heard, before, carried
    else:
        dh, dy, de = gl.where(now, heard, dh), gl.where(now, before, dy), gl.where(now, carried, de)
    return dh, dy, de


@Kernel
@gluon.jit(do_not_specialize=["B", "T", "H"])
def backward(
    w, words, dh_last, dy_last, de_last, asked, dh0, dy0, de0, offsets, B, T, H,
    V: gl.constexpr, G: gl.constexpr, BM: gl.constexpr, W: gl.constexpr, CELL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Of every token the gradients that `through` gives, four in a word, and those of what was before the first."""
    DTYPE: gl.constexpr = w.dtype.element_ty
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    slim: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])  # a row is 16 bytes
    even0 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    even1 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    even2 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    even3 = even2
    odd0 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    odd1 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    odd2 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    odd3 = odd2
    if G == 4:
        even3 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
        odd3 = gl.allocate_shared_memory(DTYPE, [V, BM], slim)
    head = gl.program_id(0) % H
    sequence = gl.program_id(0) // H * BM + gl.arange(0, BM, gl.SliceLayout(0, U))
    c = _channel(gl.arange(0, V, gl.SliceLayout(1, U)))
    first, length = _rows(offsets, sequence, B, T, PACKED)
    there = (c < V)[:, None] & (sequence < B)[None, :]
    held = (sequence.to(gl.int64) * H + head)[None, :] * V + c[:, None]
    dh = gl.load(dh_last + held, mask=there, other=0.0)
    dy = gl.load(dy_last + held, mask=there, other=0.0)
    de = gl.load(de_last + held, mask=there, other=0.0)
    w0, w1, w2, w3 = _matrices(w, head, V, G, W, U, True)
    none = gl.zeros([V, BM], gl.float32, U)
    longest = gl.max(length, 0).to(gl.int32)
    step = H.to(gl.int64) * V
    row = (first + longest - 1) * H + head
    to = asked + (row * V)[None, :] + c[:, None]
    given = words + (row * (2 * V))[None, :] + c[:, None]
    now = there & (length >= longest)[None, :] & (longest > 0)
    own = gl.load(given, mask=now, other=0)
    rest = gl.load(given + V, mask=now, other=0)
    for n in range((longest + 1) // 2):
        t = longest - 1 - 2 * n
        later = there & (length >= t)[None, :] & (t > 0)
        given -= 2 * step
        next_own = gl.load(given, mask=later, other=0)
        next_rest = gl.load(given + V, mask=later, other=0)
        dh, dy, de = _back(
            even0, even1, even2, even3, w0, w1, w2, w3, own, rest, dh, dy, de, now, to, none,
            DTYPE, G, CELL, not PACKED, U,
        )  # fmt: skip
        now = there & (length >= t - 1)[None, :] & (t > 1)
        given -= 2 * step
        own = gl.load(given, mask=now, other=0)
        rest = gl.load(given + V, mask=now, other=0)
        dh, dy, de = _back(
            odd0, odd1, odd2, odd3, w0, w1, w2, w3, next_own, next_rest, dh, dy, de, later, to - step, none,
            DTYPE, G, CELL, False, U,
        )  # fmt: skip
        to -= 2 * step
    gl.store(dh0 + held, dh, mask=there)
    gl.store(dy0 + held, dy, mask=there)
    gl.store(de0 + held, de, mask=there)
