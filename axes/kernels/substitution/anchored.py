"""Serial passes of anchored substitution with gates by rows, on Hopper, in Gluon: inputs are rows that do not meet.

A program owns rows of a state, and every warp of it 16: x of a block's 16 tokens is known at once, so that a block is
three products and nothing waits for another warp. Rows' gates, rates and values stand beside the products where these
leave them, and the derivatives in them are made there. With G the sums of a row's logs over a block, A_t what gates
leave of token t at the block's end, e^{G_last - G_t}, D the derivative in the block's last state, a_t = do_t / A_t,
    x = X K^T,   u = rho(x),   o = e^G (X Q^T + (e^-G u) P),   X' = e^{G_last} X + (A u) K          (P_st = q_t . k_s)
    g = A (D K^T + a P^T),   w = J^T g,   D' = e^{G_last} (D + a Q) + w K
A gate is asked for sum_{i >= t} (do_i o_i - u_i g_i) + <X', D>, and <X', D> of a block is that of the next one with the
same sum and that of w x: a state is read once a chunk. For the products of a chunk, which `chunks.together` makes,
`reverse` leaves do, u and w with what gates make of them up to the chunk's end or from there on. So the sums of logs of
a chunk are no less than `LEAST`; a program that meets another says so, and `passes` makes that head again.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
# (tuples grow in loops that are unrolled)
from __future__ import annotations

import triton  # noqa: F401  # in the text of a response
import triton.language as tl  # noqa: F401

from axes.kernels.common.gluon import barrier, copies_end, copies_wait, copy, gl, gluon, mma_v2
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, floored, unit_rows
from axes.kernels.substitution.hopper import (
    _WIDE,
    _by_copies,
    _by_state,
    _by_tokens,
    _fetch,
    _kept,
    _out,
    _put_state,
)
from axes.kernels.substitution.passes import _column, wanted
from axes.kernels.substitution.response import ask, beside  # replaced

_SIZES = ["T", "N", "H"]
LEAST = gl.constexpr(-40.0)


@gluon.constexpr_function
def _phases(s, bits):
    """Of tiles whose rows are S numbers: eight, or as many pieces of 16 bytes as there are."""
    return min(8, s * bits // 128)


@gluon.jit
def _ring(ptr, S: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for S columns of so many blocks of tokens, read by rows of a state."""
    kind: gl.constexpr = ptr.dtype.element_ty
    bits: gl.constexpr = kind.primitive_bitwidth
    return gl.allocate_shared_memory(kind, [STAGES, 16, S], _kept(bits, _phases(S, bits)))


@gluon.jit
def _rows(tile, L: gl.constexpr):
    """(rows, 16 tokens), in float32."""
    return tile.permute((1, 0)).load(L).to(gl.float32)


@gluon.jit
def _triangle(DTYPE: gl.constexpr, UPPER: gl.constexpr, U: gl.constexpr):
    """Ones as a right operand: sums up to a token (UPPER), or from it on."""
    B: gl.constexpr = gl.DotOperandLayout(1, U, 2)
    of = gl.arange(0, 16, gl.SliceLayout(1, B))[:, None]
    at = gl.arange(0, 16, gl.SliceLayout(0, B))[None, :]
    if UPPER:
        keep = of <= at
    else:
        keep = of >= at
    return gl.where(keep, 1.0, 0.0).to(DTYPE)


@gluon.jit
def _summed(x, ones, none, DTYPE: gl.constexpr, U: gl.constexpr):
    """Products of x (rows, 16) in two parts of 16 bits with ones and zeros."""
    A: gl.constexpr = gl.DotOperandLayout(0, U, 2)
    high = x.to(DTYPE)
    low = (x - high.to(gl.float32)).to(DTYPE)
    made = mma_v2(gl.convert_layout(low, A), ones, none)
    return mma_v2(gl.convert_layout(high, A), ones, made)


@gluon.jit
def _met(left, right, none, TURN: gl.constexpr, DTYPE: gl.constexpr, U: gl.constexpr):
    """Products of a block's tokens, left_i . right_j, both in shared memory, as a right operand: of later queries with
    earlier keys, (queries, keys); TURN: as (keys, queries), of products that stand as (queries, keys)."""
    a = left.load(gl.DotOperandLayout(0, U, 2))
    made = mma_v2(a, right.permute((1, 0)).load(gl.DotOperandLayout(1, U, 2)), none)
    i = gl.arange(0, 16, gl.SliceLayout(1, U))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, U))[None, :]
    made = gl.where((i >= j) if TURN else (i <= j), made, 0.0).to(DTYPE)
    return gl.convert_layout(made.permute((1, 0)), gl.DotOperandLayout(1, U, 2))


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def forward(
    q, k, g, p0, p1, p2, p3, p4, p5, p6, p7, start, o, seen, states, final, before, harsh, offsets, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, PACKED: gl.constexpr,
    STARTED: gl.constexpr, RECORD: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """o, the final state and that before the last block, what keys read and the first state of every chunk (RECORD);
    whether gates are harsh."""
    PARTS: gl.constexpr = V // BV
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, U, 2)
    DTYPE: gl.constexpr = k.dtype.element_ty
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    pid = gl.program_id(0).to(gl.int64)
    part = (pid % PARTS).to(gl.int32) * BV
    head = pid // PARTS % H
    unit = pid // PARTS // H
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    gs = _ring(g, BV, STAGES)
    outs = _ring(o, BV, 2)
    tiles = ()
    for i in gl.static_range(COUNT):
        tiles = tiles + (_ring(pointers[i], BV, STAGES),)
    v = part + gl.arange(0, BV, gl.SliceLayout(1, U))
    d = gl.arange(0, K, gl.SliceLayout(0, U))
    row = v[:, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, U))[None, :]
    none = gl.zeros([BV, 16], gl.float32, U)
    square = gl.zeros([16, 16], gl.float32, U)
    nothing = gl.zeros([BV, K], gl.float32, U)
    ones = _triangle(gl.float16, True, U)
    state = nothing
    if STARTED:
        state = gl.load(start + (unit * H + head) * (V * K) + row * K + d[None, :])
    blocks = ((end - first + 16 - 1) // 16).to(gl.int32)
    far = first
    for i in gl.static_range(STAGES - 1):
        rows = gl.maximum(gl.minimum(end - far, 16), 0).to(gl.int32)
        _fetch(ks.index(i), k, far, rows, head, H, 0, K, K, W)
        _fetch(qs.index(i), q, far, rows, head, H, 0, K, K, W)
        _fetch(gs.index(i), g, far, rows, head, H, part, V, BV, W)
        for j in gl.static_range(COUNT):
            _fetch(tiles[j].index(i), pointers[j], far, rows, head, H, part, V, BV, W)
        copies_end()
        far += 16
    chunk = gl.sum(none, 1)
    bad = (chunk < 0.0).to(gl.int32)
    for n in range(0, blocks):
        half = n % STAGES
        rows = gl.minimum(end - first, 16).to(gl.int32)
        place = (slot + n // (C // 16)) * H + head
        copies_wait(STAGES - 2)
        barrier()
        more = gl.maximum(gl.minimum(end - far, 16), 0).to(gl.int32)
        other = (n + STAGES - 1) % STAGES
        _fetch(ks.index(other), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(other), q, far, more, head, H, 0, K, K, W)
        _fetch(gs.index(other), g, far, more, head, H, part, V, BV, W)
        for j in gl.static_range(COUNT):
            _fetch(tiles[j].index(other), pointers[j], far, more, head, H, part, V, BV, W)
        copies_end()
        far += 16
        if n > 0:  # of the block before, which every warp has left behind
            _out(o, outs.index((n + 1) % 2), first - 16, 16, head, H, part, V, BV, W)
        if RECORD:  # noqa: SIM102 (a constant around a test)
            if n % (C // 16) == 0:
                _put_state(states, state, place, v, d, V, K)
        if n == blocks - 1:
            _put_state(before, state, unit * H + head, v, d, V, K)
        left = gl.convert_layout(state.to(DTYPE), A)
        x = _by_state(left, ks.index(half), none, U)
        out = _by_state(left, qs.index(half), none, U)
        logs = floored(_rows(gs.index(half), U))
        run = _summed(logs, ones, none, gl.float16, U)
        total = _column(run, token, 15)
        chunk = gl.where(n % (C // 16) == 0, total, chunk + total)
        bad = gl.where(chunk >= LEAST, bad, 1)
        given = ()
        for j in gl.static_range(COUNT):
            given = given + (_rows(tiles[j].index(half), U),)
        there = (token < rows) & (row >= 0)
        u = gl.where(there, ask(x, none, x, given, row >= 0, False), 0.0) * gl.exp(-run)
        if RECORD:
            gl.store(seen + (first * H + head) * V + token * (H * V) + row, x, mask=there)
        u = gl.convert_layout(u.to(DTYPE), A)
        pairs = _met(qs.index(half), ks.index(half), square, True, DTYPE, U)
        out = gl.exp(run) * mma_v2(u, pairs, out)
        outs.index(n % 2).permute((1, 0)).store(out.to(o.dtype.element_ty))
        written = mma_v2(u, ks.index(half).load(gl.DotOperandLayout(1, U, 2)), nothing)
        state = (state + written) * gl.exp(total)[:, None]
        first += 16
    copies_wait(0)
    barrier()
    if blocks > 0:
        rows = (end - first + 16).to(gl.int32)
        _out(o, outs.index((blocks + 1) % 2), first - 16, rows, head, H, part, V, BV, W)
    if blocks == 0:
        _put_state(before, state, unit * H + head, v, d, V, K)
    _put_state(final, state, unit * H + head, v, d, V, K)
    gl.store(harsh + pid, gl.max(bad, 0))


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def reverse(
    q, k, g, p0, p1, p2, p3, p4, p5, p6, p7, d0, d1, d2, d3, d4, d5, d6, d7, seen, o, do, states, before, final,
    dfinal, dbefore, dg, shown, written, turns, dstates, kept, early, dstart, harsh, offsets, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, PACKED: gl.constexpr,
    COUNT: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Derivatives in gates, in inputs, in the last state of every chunk and in the first of all; do, u and w as their
    chunk's end sees them, what gates leave of its first state (kept), and dbefore as the unit's end would see it
    (early). SPLIT: parts of a head in `harsh`."""
    PARTS: gl.constexpr = V // BV
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, U, 2)
    DTYPE: gl.constexpr = k.dtype.element_ty
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    grads = (d0, d1, d2, d3, d4, d5, d6, d7)
    pid = gl.program_id(0).to(gl.int64)
    part = (pid % PARTS).to(gl.int32) * BV
    head = pid // PARTS % H
    unit = pid // PARTS // H
    begin, end = unit_rows(offsets, unit, T, PACKED)
    if wanted(harsh, unit, head, H, SPLIT):
        end = begin
    slot = first_slot(begin, unit, N, C, PACKED)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    gs, xs = _ring(g, BV, STAGES), _ring(seen, BV, STAGES)
    os, dos = _ring(o, BV, STAGES), _ring(do, BV, STAGES)
    firsts = gl.allocate_shared_memory(DTYPE, [BV, K], _WIDE)
    tiles = ()
    for i in gl.static_range(COUNT):
        tiles = tiles + (_ring(pointers[i], BV, STAGES),)
    rooms = gl.allocate_shared_memory(DTYPE, [6, 16, BV], _kept(16, _phases(BV, 16)))
    v = part + gl.arange(0, BV, gl.SliceLayout(1, U))
    d = gl.arange(0, K, gl.SliceLayout(0, U))
    row = v[:, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, U))[None, :]
    none = gl.zeros([BV, 16], gl.float32, U)
    square = gl.zeros([16, 16], gl.float32, U)
    nothing = gl.zeros([BV, K], gl.float32, U)
    ones, tail = _triangle(gl.float16, True, U), _triangle(DTYPE, False, U)
    at = (unit * H + head) * (V * K) + row * K + d[None, :]
    state = gl.load(dfinal + at)
    through = gl.sum(state * gl.load(final + at), 1)
    blocks = ((end - begin + 16 - 1) // 16).to(gl.int32)
    asks = gl.load(dbefore + at)
    if blocks == 0:
        state += asks
    extra = gl.sum(asks * gl.load(before + at), 1)
    n = blocks - 1
    first = begin + n * 16
    far = first
    for i in gl.static_range(STAGES - 1):
        rows = gl.where(far >= begin, gl.minimum(end - far, 16), 0).to(gl.int32)
        _fetch(ks.index(i), k, far, rows, head, H, 0, K, K, W)
        _fetch(qs.index(i), q, far, rows, head, H, 0, K, K, W)
        _fetch(gs.index(i), g, far, rows, head, H, part, V, BV, W)
        _fetch(xs.index(i), seen, far, rows, head, H, part, V, BV, W)
        _fetch(os.index(i), o, far, rows, head, H, part, V, BV, W)
        _fetch(dos.index(i), do, far, rows, head, H, part, V, BV, W)
        for j in gl.static_range(COUNT):
            _fetch(tiles[j].index(i), pointers[j], far, rows, head, H, part, V, BV, W)
        if i > 0:  # noqa: SIM102 (a constant around a test)
            if (n >= i) & ((n - i) % (C // 16) == C // 16 - 1):
                _fetch_state(firsts, states, (slot + (n - i) // (C // 16) + 1) * H + head, part, V, K, BV, W)
        copies_end()
        far -= 16
    later = gl.sum(none, 1)
    for step in range(0, blocks):
        n = blocks - 1 - step
        half = step % STAGES
        rows = gl.minimum(end - first, 16).to(gl.int32)
        place = (slot + n // (C // 16)) * H + head
        copies_wait(STAGES - 2)
        barrier()
        if (step == 0) | (n % (C // 16) == C // 16 - 1):
            _put_state(dstates, state, place, v, d, V, K)
            later = gl.sum(none, 1)
            if step > 0:
                through = gl.sum(state * firsts.load(U).to(gl.float32), 1)
        if step > 0:
            last = gl.minimum(end - first - 16, 16).to(gl.int32)
            _out(shown, rooms.index(step % 2), first + 16, last, head, H, part, V, BV, W)
            _out(written, rooms.index(2 + step % 2), first + 16, last, head, H, part, V, BV, W)
            _out(turns, rooms.index(4 + step % 2), first + 16, last, head, H, part, V, BV, W)
        more = gl.where(far >= begin, gl.minimum(end - far, 16), 0).to(gl.int32)
        other = (step + STAGES - 1) % STAGES
        _fetch(ks.index(other), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(other), q, far, more, head, H, 0, K, K, W)
        _fetch(gs.index(other), g, far, more, head, H, part, V, BV, W)
        _fetch(xs.index(other), seen, far, more, head, H, part, V, BV, W)
        _fetch(os.index(other), o, far, more, head, H, part, V, BV, W)
        _fetch(dos.index(other), do, far, more, head, H, part, V, BV, W)
        for j in gl.static_range(COUNT):
            _fetch(tiles[j].index(other), pointers[j], far, more, head, H, part, V, BV, W)
        m = n - (STAGES - 1)
        if (m >= 0) & (m % (C // 16) == C // 16 - 1):
            _fetch_state(firsts, states, (slot + m // (C // 16) + 1) * H + head, part, V, K, BV, W)
        copies_end()
        far -= 16
        logs = floored(_rows(gs.index(half), U))
        run = _summed(logs, ones, none, gl.float16, U)
        total = _column(run, token, 15)
        rest = gl.exp(total[:, None] - run)
        show = _rows(dos.index(half), U)
        a = show * gl.exp(run - total[:, None])
        y = _by_state(gl.convert_layout(state.to(DTYPE), A), ks.index(half), none, U)
        pairs = _met(ks.index(half), qs.index(half), square, False, DTYPE, U)
        y = mma_v2(gl.convert_layout(a.to(DTYPE), A), pairs, y)
        y = y * rest
        given = ()
        for j in gl.static_range(COUNT):
            given = given + (_rows(tiles[j].index(half), U),)
        x = _rows(xs.index(half), U)
        there = (token < rows) & (row >= 0)
        made = beside(
            x, none, y, given[0], given[1 % COUNT], given[2 % COUNT], given[3 % COUNT], given[4 % COUNT],
            given[5 % COUNT], given[6 % COUNT], given[7 % COUNT],
        )  # fmt: skip
        u = gl.where(there, made[0], 0.0)
        w = gl.where(there, made[1], 0.0)
        place_of = (first * H + head) * V + token * (H * V) + row
        for j in gl.static_range(COUNT):
            gl.store(grads[j] + place_of, made[2 + j].to(grads[j].dtype.element_ty), mask=there)
        change = show * _rows(os.index(half), U) - u * y
        gl.store(dg + place_of, _summed(change, tail, none, DTYPE, U) + through[:, None], mask=there)
        through += gl.sum(change + w * x, 1)
        u = u * rest
        w = w * gl.exp(-total)[:, None]
        # beside the chunk's end
        back = gl.exp(-later)[:, None]
        rooms.index((step + 1) % 2).permute((1, 0)).store((a * back).to(DTYPE))
        rooms.index(2 + (step + 1) % 2).permute((1, 0)).store((u * gl.exp(later)[:, None]).to(DTYPE))
        rooms.index(4 + (step + 1) % 2).permute((1, 0)).store((w * back).to(DTYPE))
        later += total
        if n % (C // 16) == 0:
            gl.store(kept + place * V + v, gl.exp(later))
        made_of = _by_tokens(a.to(DTYPE), qs.index(half), nothing, U)
        made_of = _by_tokens(w.to(DTYPE), ks.index(half), made_of, U)
        state = (state + made_of) * gl.exp(total)[:, None]
        if step == 0:
            asks = gl.load(dbefore + at)
            state += asks
            through += extra
            gl.store(early + at, (asks * gl.exp(-total)[:, None]).to(DTYPE))
        first -= 16
    copies_wait(0)
    barrier()
    if blocks > 0:
        rows = gl.minimum(end - begin, 16).to(gl.int32)
        _out(shown, rooms.index(blocks % 2), begin, rows, head, H, part, V, BV, W)
        _out(written, rooms.index(2 + blocks % 2), begin, rows, head, H, part, V, BV, W)
        _out(turns, rooms.index(4 + blocks % 2), begin, rows, head, H, part, V, BV, W)
    _put_state(dstart, state, unit * H + head, v, d, V, K)


@gluon.jit
def _fetch_state(tile, states, index, part, V: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, W: gl.constexpr):
    """Rows of a chunk's first state, into shared memory."""
    layout: gl.constexpr = _by_copies(K, 16, W)
    v = part + gl.arange(0, BV, gl.SliceLayout(1, layout))
    d = gl.arange(0, K, gl.SliceLayout(0, layout))
    base = states + index * (V * K)
    copy(tile, base + (v * K)[:, None] + d[None, :], (v < V)[:, None] & (d < K)[None, :])


__all__ = ["LEAST", "forward", "reverse"]
