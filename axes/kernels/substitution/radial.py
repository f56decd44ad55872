"""Serial passes on Hopper, in Gluon, of responses that are a number times an error, which the error's length tells.

u_t = c_t e_t with e_t = x_t - v_t and c_t = c(|e_t|^2), so that rows meet in lengths alone. In a block with first state
X, errors of its keys there, E_t = X k_t - v_t, and a_ts what u_s gives to x_t,
    e_t = E_t + sum_{s < t} a_ts c_s e_s = sum_j T_tj E_j
and |e_t|^2 is told by the inner products of the E: one product over rows a block. What is serial are numbers of
16 x 16: of every later token i, T_i, D_ij = <e_i, E_j> and |e_i|^2 as far as it has heard the tokens before,
    T_i += a_it c_t T_t,   D_i += a_it c_t D_t,   |e_i|^2 += 2 a_it c_t <e_i, e_t> + (a_it c_t |e_t|)^2.
Then e is a product again. Every warp makes the same numbers, two rows of them a thread, and no token waits for a
barrier; the state waits in shared memory meanwhile.
Backwards w_t = a_t g_t + b_t (e_t . g_t) e_t is linear in what is asked of outputs and the next states, y_t:
    g = y + sum_{s > t} a_st w_s = M y + Q z e,   M = (1 - A diag(a))^-1,   Q = M A         (A_ts = a_st, s > t)
    z = diag(b) (1 - H)^-1 h,   h_t = sum_j M_tj <e_t, y_j>,   H_ts = Q_ts b_s <e_t, e_s>
with M, Q and (1 - H)^-1 of all blocks made at once (`settled`): a block is a product over rows, two of
16 x 16 with numbers, and w.
A length of which less than 2^-20 is left of what it was added up from is taken for that much: float32 and the products
of E in two parts of 16 bits do not tell it better.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
# (tuples grow in loops that are unrolled)
from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.gluon import barrier, copies_end, copies_wait, copy, gl, gluon, mma_v2
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, load_tile, slot_rows, unit_rows
from axes.kernels.substitution.hopper import (
    _SLIM,
    _WIDE,
    _before,
    _by_state,
    _by_tokens,
    _count,
    _fetch,
    _fetch_pairs,
    _is_row,
    _kept,
    _out,
    _place,
    _put_state,
    _room,
    _square,
)
from axes.kernels.substitution.passes import _column
from axes.kernels.substitution.response import bends, stride, tolls  # replaced

_SIZES = ["T", "N", "H"]
LEAST = gl.constexpr(2.0**-20)


@gluon.constexpr_function
def _index(kinds):
    """Which input is the row."""
    return kinds.index("r")


@gluon.jit
def _half(pointers, pair, first, rows, head, H, J: gl.constexpr, KINDS: gl.constexpr, N: gl.constexpr):
    """|k|^2 and inputs of eight tokens, (8, 1), whether they are there among them."""
    token = J * 8 + gl.arange(0, 8, gl.SliceLayout(1, N))[:, None]
    there = token < rows
    made = (there, gl.load(pair + 17 * token, mask=there, other=0.0))
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            made = made + (made[1],)
        else:
            at = pointers[i] + first * H + head + token * H
            made = made + (gl.load(at, mask=there, other=0.0).to(gl.float32),)
    return made


@gluon.jit
def _strides(n2, half, KINDS: gl.constexpr):
    """c of eight tokens."""
    C: gl.constexpr = _count(KINDS)
    made = stride(
        n2, half[1], half[2], half[2 + 1 % C], half[2 + 2 % C], half[2 + 3 % C], half[2 + 4 % C], half[2 + 5 % C],
        half[2 + 6 % C], half[2 + 7 % C],
    )  # fmt: skip
    return gl.where(half[0], made, 0.0)


@gluon.jit
def _shares(pair, t: gl.constexpr, J: gl.constexpr, N: gl.constexpr):
    """What eight tokens hear of token t, (8, 1)."""
    row = J * 8 + gl.arange(0, 8, gl.SliceLayout(1, N))[:, None]
    made = pair.slice(t, 1).slice(J * 8, 8, 1).permute((1, 0)).load(N)
    return gl.where(row > t, made, 0.0)


@gluon.jit
def _met_by(by, errors):
    """<e_i, e_t> of eight tokens, (8, 1)."""
    return gl.sum(by * errors, 1)[:, None]


@gluon.jit
def _told(by, own, length, whole, made, errors, met, c, n2, a):
    """(T, D, |e|^2, and what it was added up from) of eight tokens that hear a c of a token, whose own T and D these
    are."""
    by_c = a * c
    more = by_c * by_c * n2
    near = 2.0 * by_c * met
    return by + by_c * made, own + by_c * errors, length + (near + more), whole + (gl.abs(near) + more)


@gluon.jit
def _numbers_of(gram, pair, halves, KINDS: gl.constexpr, N: gl.constexpr):
    """(c, T less the identity) of a block, each of eight tokens and eight, from inner products of errors. What does not
    wait for c is exchanged between threads ahead of it: exchanges keep their order."""
    row = gl.arange(0, 8, gl.SliceLayout(1, N))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, N))[None, :]
    none = gl.zeros([8, 16], gl.int32, N)
    one = gl.zeros([8, 1], gl.int32, N)
    ds, d1 = gram.slice(0, 8).load(N), gram.slice(8, 8).load(N)
    ts, t1 = gl.where(row == column, 1.0, 0.0), gl.where(row + 8 == column, 1.0, 0.0)
    ns, n1 = gl.sum(ts * ds, 1)[:, None], gl.sum(t1 * d1, 1)[:, None]
    ws, w1 = ns, n1
    cs, c1 = ns * 0.0, ns * 0.0
    for t in gl.static_range(8):
        errors, made, n2 = gl.gather(ds, none + t, 0), gl.gather(ts, none + t, 0), gl.gather(ns, one + t, 0)
        met1 = _met_by(t1, errors)
        if t < 7:
            met = _met_by(ts, errors)
        c = _strides(gl.maximum(ns, ws * LEAST), halves[0], KINDS)
        cs = gl.where(row == t, c, cs)
        c = gl.gather(c, one + t, 0)
        if t < 7:
            ts, ds, ns, ws = _told(ts, ds, ns, ws, made, errors, met, c, n2, _shares(pair, t, 0, N))
        t1, d1, n1, w1 = _told(t1, d1, n1, w1, made, errors, met1, c, n2, _shares(pair, t, 1, N))
    for t in gl.static_range(8):
        if t < 7:
            errors, made, n2 = gl.gather(d1, none + t, 0), gl.gather(t1, none + t, 0), gl.gather(n1, one + t, 0)
            met1 = _met_by(t1, errors)
        c = _strides(gl.maximum(n1, w1 * LEAST), halves[1], KINDS)
        c1 = gl.where(row == t, c, c1)
        if t < 7:
            c = gl.gather(c, one + t, 0)
            t1, d1, n1, w1 = _told(t1, d1, n1, w1, made, errors, met1, c, n2, _shares(pair, t + 8, 1, N))
    ts, t1 = gl.where(row == column, 0.0, ts), gl.where(row + 8 == column, 0.0, t1)
    return cs, c1, ts, t1


@gluon.jit
def _halved(x, DTYPE: gl.constexpr):
    """x in two parts."""
    high = x.to(DTYPE)
    return high, (x - high.to(gl.float32)).to(DTYPE)


@gluon.jit
def _inner(a, b, c, d, none, W: gl.constexpr):
    """(16, 16), sums over rows of (a + b)_i (c + d)_j, each (rows, 16): a warp its own rows, then all."""
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, U, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, U, 2)
    a = gl.convert_layout(a.reshape([W, 16, 16]).permute([0, 2, 1]), A)
    b = gl.convert_layout(b.reshape([W, 16, 16]).permute([0, 2, 1]), A)
    c = gl.convert_layout(c.reshape([W, 16, 16]), B)
    d = gl.convert_layout(d.reshape([W, 16, 16]), B)
    made = mma_v2(b, d, none)
    made = mma_v2(a, d, made)
    made = mma_v2(b, c, made)
    made = mma_v2(a, c, made)
    return gl.sum(made, 0)


@gluon.jit
def _by_halves(high, low, by_high, by_low, acc, U: gl.constexpr):
    """(rows, 16) += (high + low) (rows, j) times what stands as (i, j) in shared memory, in two parts."""
    B: gl.constexpr = gl.DotOperandLayout(1, U, 2)
    one, two = by_high.permute((1, 0)).load(B), by_low.permute((1, 0)).load(B)
    acc = mma_v2(high, two, acc)
    acc = mma_v2(low, one, acc)
    return mma_v2(high, one, acc)


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def forward(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, products, start, o, seen, states, final, offsets, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr, STARTED: gl.constexpr,
    GATED: gl.constexpr, RECORD: gl.constexpr, KINDS: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """o, the final state, what keys read, the first state of every chunk (RECORD)."""
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, U, 2)
    U3: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [W, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [V // 8, 256 // V], [1, W], [0, 1])
    DTYPE: gl.constexpr = k.dtype.element_ty
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    values = pointers[_index(KINDS)]
    pid = gl.program_id(0).to(gl.int64)
    head = pid % H
    unit = pid // H
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    vs = _room(values, V, 8, STAGES)
    pairs = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 16], _SLIM)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 16], _SLIM)
    square: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    squares = gl.allocate_shared_memory(DTYPE, [16, 16], square)
    highs = gl.allocate_shared_memory(DTYPE, [16, 16], square)
    lows = gl.allocate_shared_memory(DTYPE, [16, 16], square)
    gram = gl.allocate_shared_memory(gl.float32, [16, 16], _SLIM)
    parked = gl.allocate_shared_memory(gl.float32, [V, K], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    factors = gl.allocate_shared_memory(gl.float32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    v = gl.arange(0, V, gl.SliceLayout(1, U))
    d = gl.arange(0, K, gl.SliceLayout(0, U))
    token = gl.arange(0, 16, gl.SliceLayout(0, U))[None, :]
    out_row = gl.arange(0, V, gl.SliceLayout(1, OUT))[:, None]
    out_token = gl.arange(0, 16, gl.SliceLayout(0, OUT))[None, :]
    none = gl.zeros([V, 16], gl.float32, U)
    nothing = gl.zeros([V, K], gl.float32, U)
    no_sums = gl.zeros([W, 16, 16], gl.float32, U3)
    state = nothing
    if STARTED:
        state = gl.load(start + (unit * H + head) * (V * K) + v[:, None] * K + d[None, :])
    blocks = ((end - first + 16 - 1) // 16).to(gl.int32)
    rows = gl.minimum(end - first, 16).to(gl.int32)
    far = first
    for i in gl.static_range(STAGES - 1):
        more = gl.maximum(gl.minimum(end - far, 16), 0).to(gl.int32)
        near = products + _place(slot, i, head, H, C) * 576
        _fetch(ks.index(i), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(i), q, far, more, head, H, 0, K, K, W)
        _fetch(vs.index(i), values, far, more, head, H, 0, V, V, W)
        _fetch_pairs(pairs.index(i), lines.index(i), near, gl.minimum(more, 1), W)
        copies_end()
        far += 16
    near = products + _place(slot, 0, head, H, C) * 576
    halves = (
        _half(pointers, near, first, rows, head, H, 0, KINDS, NUMBERS),
        _half(pointers, near, first, rows, head, H, 1, KINDS, NUMBERS),
    )
    for n in range(0, blocks):
        half = n % STAGES
        rows = gl.minimum(end - first, 16).to(gl.int32)
        place = (slot + n // (C // 16)) * H + head
        if RECORD:  # noqa: SIM102 (a constant around a test)
            if n % (C // 16) == 0:
                _put_state(states, state, place, v, d, V, K)
        copies_wait(STAGES - 2)
        barrier()
        # what later blocks need is on its way while this one is gone through
        more = gl.maximum(gl.minimum(end - far, 16), 0).to(gl.int32)
        other = (n + STAGES - 1) % STAGES
        near = products + _place(slot, n + STAGES - 1, head, H, C) * 576
        _fetch(ks.index(other), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(other), q, far, more, head, H, 0, K, K, W)
        _fetch(vs.index(other), values, far, more, head, H, 0, V, V, W)
        _fetch_pairs(pairs.index(other), lines.index(other), near, gl.minimum(more, 1), W)
        copies_end()
        far += 16
        pair, line = pairs.index(half), lines.index(half)
        left = gl.convert_layout(state.to(DTYPE), A)
        y = _by_state(left, ks.index(half), none, U)
        out = _by_state(left, qs.index(half), none, U)
        _square(squares, pair, True, DTYPE, W)
        if GATED:
            y = y * line.slice(1, 1).load(U)
            out = out * line.slice(0, 1).load(U)
        wanted = vs.index(half).permute((1, 0)).load(U).to(gl.float32)
        high, low = _halved(y - wanted, DTYPE)
        gram.store(_inner(high, low, high, low, no_sums, W))
        parked.store(state)  # registers are too few for it and what tokens exchange
        barrier()
        c0, c1, t0, t1 = _numbers_of(gram, pair, halves, KINDS, NUMBERS)
        high0, low0 = _halved(t0, DTYPE)
        high1, low1 = _halved(t1, DTYPE)
        highs.slice(0, 8).store(high0)
        highs.slice(8, 8).store(high1)
        lows.slice(0, 8).store(low0)
        lows.slice(8, 8).store(low1)
        factors.slice(0, 8).store(c0)
        factors.slice(8, 8).store(c1)
        barrier()
        e = _by_halves(gl.convert_layout(high, A), gl.convert_layout(low, A), highs, lows, y - wanted, U)
        if RECORD:
            place_of = (first * H + head) * V + token * (H * V) + v[:, None]
            gl.store(seen + place_of, e + wanted, mask=(token < rows) & (v[:, None] >= 0))
        later = first + 16
        more = gl.maximum(gl.minimum(end - later, 16), 0).to(gl.int32)
        near = products + _place(slot, n + 1, head, H, C) * 576
        next_halves = (
            _half(pointers, near, later, more, head, H, 0, KINDS, NUMBERS),
            _half(pointers, near, later, more, head, H, 1, KINDS, NUMBERS),
        )
        u = e * factors.permute((1, 0)).load(U)
        out = _by_tokens(u.to(DTYPE), squares, out, U)
        if GATED:
            u = u * line.slice(2, 1).load(U)
        wide = gl.convert_layout(out.to(o.dtype.element_ty), OUT)
        gl.store(o + ((first + out_token) * H + head) * V + out_row, wide, mask=(out_token < rows) & (out_row >= 0))
        written = _by_tokens(u.to(DTYPE), ks.index(half), nothing, U)
        state = parked.load(U)
        if GATED:
            kept = _column(line.slice(0, 1).load(U), token, 15)
            state = state * kept[:, None]
        state = state + written
        first = later
        halves = next_halves
    copies_wait(0)
    _put_state(final, state, unit * H + head, v, d, V, K)


@triton.jit
def _solved(made, by, row, column):
    """(1 - by)^-1 made, by strictly upper."""
    for i in range(16):
        t = 15 - i
        one = tl.sum(tl.where(row == t, made, 0.0), 0)[None, :]
        made += tl.sum(tl.where(column == t, by, 0.0), 1)[:, None] * one
    return made


@triton.jit
def _given(pointers, at, there, k2, KINDS: tl.constexpr):
    made = ()
    for i in tl.static_range(len(KINDS)):
        if KINDS[i] == "r":
            made = made + (k2,)
        else:
            made = made + (tl.load(pointers[i] + at, mask=there, other=0.0).to(tl.float32),)
    return made


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def settled(
    p0, p1, p2, p3, p4, p5, p6, p7, products, seen, settles, squares, offsets, units, T, N, H,
    V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """M, Q, (1 - H)^-1, a, b and c of every block, (slots, H, C / 16, 51, 16), and |e|^2: what u are asked for is
    linear in what the rest of the sequence asks."""
    COUNT: tl.constexpr = len(KINDS)
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    pid = tl.program_id(0).to(tl.int64)
    block = pid % (C // 16)
    head = pid // (C // 16) % H
    slot = pid // (C // 16) // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    first += block * 16
    rows = tl.minimum(end - first, 16)
    if rows > 0:
        i = tl.arange(0, 16)
        row, column = i[:, None], i[None, :]
        v = tl.arange(0, V)
        values = pointers[_index(KINDS)]
        e = load_tile(seen, first, rows, v, head, H, V, 16)
        wanted = load_tile(values, first, rows, v, head, H, V, 16)
        e -= wanted.to(tl.float32)
        high = e.to(wanted.dtype)
        low = (e - high.to(tl.float32)).to(wanted.dtype)
        met = tl.dot(high, tl.trans(low))
        met = tl.dot(high, tl.trans(high), met + tl.trans(met))
        n2 = tl.sum(e * e, 1)[:, None]
        there = row < rows
        k2 = tl.load(products + pid * 576 + 17 * row)
        given = _given(pointers, (first + row) * H + head, there, k2, KINDS)
        a, b = bends(
            n2, k2, given[0], given[1 % COUNT], given[2 % COUNT], given[3 % COUNT], given[4 % COUNT],
            given[5 % COUNT], given[6 % COUNT], given[7 % COUNT],
        )  # fmt: skip
        a, b = tl.where(there, a, 0.0), tl.where(there, b, 0.0)
        c = stride(
            n2, k2, given[0], given[1 % COUNT], given[2 % COUNT], given[3 % COUNT], given[4 % COUNT],
            given[5 % COUNT], given[6 % COUNT], given[7 % COUNT],
        )  # fmt: skip
        tl.store(squares + (first + row) * H + head, n2, mask=there)
        late = column > row
        by_keys = tl.where(late, tl.load(products + pid * 576 + row * 16 + column), 0.0)
        one = tl.where(row == column, 1.0, 0.0)
        made = _solved(one, by_keys * tl.trans(a), row, column)
        turned = tl.dot(made, by_keys, input_precision="ieee")
        by_length = _solved(one, turned * tl.trans(b) * met, row, column)
        to = settles + pid * 816 + row * 16 + column
        tl.store(to, made)
        tl.store(to + 256, turned)
        tl.store(to + 512, by_length)
        line = settles + pid * 816 + 768 + row
        tl.store(line, a)
        tl.store(line + 16, b)
        tl.store(line + 32, tl.where(there, c, 0.0))


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def paid(
    p0, p1, p2, p3, p4, p5, p6, p7, d0, d1, d2, d3, d4, d5, d6, d7, products, squares, met, dk2, offsets, units,
    T, N, H,
    C: tl.constexpr, PACKED: tl.constexpr, KINDS: tl.constexpr,
):  # fmt: skip
    """Derivatives in inputs that are numbers and in |k|^2, of |e|^2 and e . g."""
    COUNT: tl.constexpr = len(KINDS)
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    grads = (d0, d1, d2, d3, d4, d5, d6, d7)
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    slot = pid // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    i = tl.arange(0, C)
    there = first + i < end
    at = (first + i) * H + head
    n2 = tl.load(squares + at, mask=there, other=0.0)
    z = tl.load(met + at, mask=there, other=0.0)
    k2 = tl.load(products + (pid * (C // 16) + i // 16) * 576 + 17 * (i % 16), mask=there, other=0.0)
    given = _given(pointers, at, there, k2, KINDS)
    made = tolls(
        n2, z, k2, given[0], given[1 % COUNT], given[2 % COUNT], given[3 % COUNT], given[4 % COUNT], given[5 % COUNT],
        given[6 % COUNT], given[7 % COUNT],
    )  # fmt: skip
    tl.store(dk2 + at, made[0], mask=there)
    for j in tl.static_range(COUNT):
        if KINDS[j] != "r":
            tl.store(grads[j] + at, made[1 + _before(KINDS, j, "n")].to(grads[j].dtype.element_ty), mask=there)


@gluon.jit
def _fetch_settled(tile, line, ptr, some, W: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [W, 1], [1, 0])
    column = gl.arange(0, 16, gl.SliceLayout(0, layout))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    copy(tile, ptr + row[:, None] * 16 + column[None, :], (row < 48)[:, None] & (column < some * 16)[None, :])
    row = gl.arange(0, 4, gl.SliceLayout(1, layout))
    copy(line, ptr + 768 + row[:, None] * 16 + column[None, :], (row < 3)[:, None] & (column < some * 16)[None, :])


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def reverse(
    q, k, values, dvalues, products, settles, seen, do, dfinal, dlast, written_u, written_w, met, dstates, dstart,
    offsets, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr, GATED: gl.constexpr,
    LAST: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """u, w, e . g and derivatives in values, in the last state of every chunk and in the first of all."""
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, U, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, U, 2)
    U3: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    NUMBERS: gl.constexpr = gl.SliceLayout(0, U3)
    DTYPE: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0).to(gl.int64)
    head = pid % H
    unit = pid // H
    begin, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(begin, unit, N, C, PACKED)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    pairs = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 16], _SLIM)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 16], _SLIM)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES, 64, 16], _SLIM)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 16], _SLIM)
    shows = _room(do, V, 8, STAGES)
    xs = _room(seen, V, 8, STAGES)
    vs = _room(values, V, 8, STAGES)
    square: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    squares = gl.allocate_shared_memory(DTYPE, [16, 16], square)
    by_b = gl.allocate_shared_memory(DTYPE, [16, 16], square)
    by_e = gl.allocate_shared_memory(DTYPE, [16, 16], square)
    rooms = gl.allocate_shared_memory(DTYPE, [3, 16, V], _kept(16, 8))
    turns = gl.allocate_shared_memory(gl.float32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    v = gl.arange(0, V, gl.SliceLayout(1, U))
    d = gl.arange(0, K, gl.SliceLayout(0, U))
    row = v[:, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, U))[None, :]
    later_token = gl.arange(0, 16, gl.SliceLayout(1, NUMBERS))[:, None]
    none = gl.zeros([V, 16], gl.float32, U)
    nothing = gl.zeros([V, K], gl.float32, U)
    no_sums = gl.zeros([W, 16, 16], gl.float32, U3)
    state = gl.load(dfinal + (unit * H + head) * (V * K) + row * K + d[None, :])
    blocks = ((end - begin + 16 - 1) // 16).to(gl.int32)
    n = gl.maximum(blocks - 1, 0)
    first = begin + n * 16
    far = first
    for i in gl.static_range(STAGES - 1):
        more = gl.where(n >= i, gl.minimum(end - far, 16), 0).to(gl.int32)
        some, near = gl.minimum(more, 1), _place(slot, gl.maximum(n - i, 0), head, H, C)
        _fetch(ks.index(i), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(i), q, far, more, head, H, 0, K, K, W)
        _fetch(shows.index(i), do, far, more, head, H, 0, V, V, W)
        _fetch(xs.index(i), seen, far, more, head, H, 0, V, V, W)
        _fetch(vs.index(i), values, far, more, head, H, 0, V, V, W)
        _fetch_pairs(pairs.index(i), lines.index(i), products + near * 576, some, W)
        _fetch_settled(numbers.index(i), factors.index(i), settles + near * 816, some, W)
        copies_end()
        far -= 16
    rows = gl.minimum(end - first, 16).to(gl.int32)
    near = _place(slot, n, head, H, C)
    own = gl.load(products + near * 576 + 256 + 17 * token, mask=token < rows, other=0.0)
    if LAST:
        last = gl.load(dlast + (unit * H + head) * V + row)
        heard = gl.load(products + near * 576 + (rows - 1) * 16 + token, mask=token < rows - 1, other=0.0)
    for step in range(0, blocks):
        n = blocks - 1 - step
        half = step % STAGES
        rows = gl.minimum(end - first, 16).to(gl.int32)
        place = (slot + n // (C // 16)) * H + head
        if (step == 0) | (n % (C // 16) == C // 16 - 1):
            _put_state(dstates, state, place, v, d, V, K)
        copies_wait(STAGES - 2)
        barrier()
        m = n - (STAGES - 1)
        more = gl.where(m >= 0, 16, 0)
        some, near = gl.minimum(more, 1), _place(slot, gl.maximum(m, 0), head, H, C)
        other = (step + STAGES - 1) % STAGES
        _fetch(ks.index(other), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(other), q, far, more, head, H, 0, K, K, W)
        _fetch(shows.index(other), do, far, more, head, H, 0, V, V, W)
        _fetch(xs.index(other), seen, far, more, head, H, 0, V, V, W)
        _fetch(vs.index(other), values, far, more, head, H, 0, V, V, W)
        _fetch_pairs(pairs.index(other), lines.index(other), products + near * 576, some, W)
        _fetch_settled(numbers.index(other), factors.index(other), settles + near * 816, some, W)
        copies_end()
        far -= 16
        earlier = first - 16
        more = gl.minimum(n, 1) * 16
        near = _place(slot, gl.maximum(n - 1, 0), head, H, C)
        next_own = gl.load(products + near * 576 + 256 + 17 * token, mask=token < more, other=0.0)
        pair, line, number = pairs.index(half), lines.index(half), numbers.index(half)
        _square(squares, pair, False, DTYPE, W)
        by_b.store(number.slice(0, 16).load(NUMBERS).to(DTYPE))
        by_e.store(number.slice(16, 16).load(NUMBERS).to(DTYPE))
        left = gl.convert_layout(state.to(DTYPE), A)
        y = _by_state(left, ks.index(half), none, U)
        if GATED:
            y = y * line.slice(2, 1).load(U)
        barrier()
        a = shows.index(half).permute((1, 0)).load(A).to(DTYPE)
        y = mma_v2(a, squares.load(B), y)
        y += own * shows.index(half).permute((1, 0)).load(U).to(gl.float32)
        if LAST:  # noqa: SIM102 (a constant around a test)
            if step == 0:
                y += last * heard
        e = xs.index(half).permute((1, 0)).load(U) - vs.index(half).permute((1, 0)).load(U).to(gl.float32)
        high, low = _halved(e, DTYPE)
        y_high, y_low = _halved(y, DTYPE)
        rooms.index(0).permute((1, 0)).store((e * factors.index(half).slice(2, 1).load(U)).to(DTYPE))
        heard_of = _inner(y_high, y_low, high, low, no_sums, W)
        heard_of = gl.sum(heard_of * number.slice(0, 16).permute((1, 0)).load(NUMBERS), 0)
        turn = gl.sum(number.slice(32, 16).load(NUMBERS) * heard_of[None, :], 1)[:, None]
        turns.store(turn)
        gl.store(met + (first + later_token) * H + head, turn, mask=later_token < rows)
        barrier()
        e = e * (turns.permute((1, 0)).load(U) * factors.index(half).slice(1, 1).load(U))
        high, low = _halved(e, DTYPE)
        right = by_b.permute((1, 0)).load(B)
        asks = mma_v2(gl.convert_layout(y_low, A), right, none)
        asks = mma_v2(gl.convert_layout(y_high, A), right, asks)
        right = by_e.permute((1, 0)).load(B)
        asks = mma_v2(gl.convert_layout(low, A), right, asks)
        asks = mma_v2(gl.convert_layout(high, A), right, asks)
        w = asks * factors.index(half).slice(0, 1).load(U) + e
        rooms.index(1).permute((1, 0)).store((-w).to(DTYPE))
        if LAST:
            w = gl.where((first + token == end - 1) & (row >= 0), w + last, w)
        rooms.index(2).permute((1, 0)).store(w.to(DTYPE))
        if GATED:
            a = (a.to(gl.float32) * line.slice(0, 1).load(A)).to(DTYPE)
            w = w * line.slice(1, 1).load(U)
        written = mma_v2(a, qs.index(half).load(B), nothing)
        written = _by_tokens(w.to(DTYPE), ks.index(half), written, U)
        if GATED:
            kept = _column(line.slice(0, 1).load(U), token, 15)
            state = state * kept[:, None]
        state = state + written
        barrier()
        _out(written_u, rooms.index(0), first, rows, head, H, 0, V, V, W)
        _out(dvalues, rooms.index(1), first, rows, head, H, 0, V, V, W)
        _out(written_w, rooms.index(2), first, rows, head, H, 0, V, V, W)
        first = earlier
        own = next_own
    copies_wait(0)
    _put_state(dstart, state, unit * H + head, v, d, V, K)


__all__ = ["forward", "paid", "reverse", "settled"]
