"""The serial passes of substitution on Hopper, in Gluon: `passes.forward` and `reverse` where no gate is by rows.

A thread has all 16 tokens of its rows while one token after another is taken, so that what u_t gives to later tokens is
a product of its own numbers. Where rows do not meet these are the rows of a head, one a thread; where they do, a warp
has all rows, and every warp makes the same: a sum over rows is then one of a warp, and no token waits for a barrier.
Products stand as they do in `passes`. What a block needs is copied to shared memory while the one before is gone
through.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
# (tuples grow in loops that are unrolled)
from __future__ import annotations

import triton  # noqa: F401  # in the text of a response
import triton.language as tl  # noqa: F401

from axes.kernels.common.gluon import barrier, copies_end, copies_wait, copy, gl, gluon, mma_v2
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, unit_rows
from axes.kernels.substitution.passes import _column
from axes.kernels.substitution.response import ask  # replaced

_SIZES = ["T", "N", "H"]
_WIDE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # of 16 bits
_SLIM = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))  # of 16 columns


@gluon.constexpr_function
def _count(kinds):
    """Inputs of a token: "r" for each that is a row, "n" for a number."""
    return len(kinds)


@gluon.constexpr_function
def _is_row(kinds, i):
    return kinds[i] == "r"


@gluon.constexpr_function
def _before(kinds, i, kind):
    """How many of this kind stand before input i."""
    return kinds[:i].count(kind)


@gluon.constexpr_function
def _kept(bits, phases):
    return gl.SwizzledSharedLayout(128 // bits, 1, phases, [1, 0])


@gluon.constexpr_function
def _by_copies(d, bits, w):
    """Of a tile (16, d): 16 bytes a thread."""
    size = 128 // bits
    across = min(32, d // size)
    return gl.BlockedLayout([1, size], [32 // across, across], [w, 1], [1, 0])


@gluon.constexpr_function
def _of_tokens(bv, w, mixes):
    """Of (rows, 16 tokens): a thread has a row, or a warp has them all."""
    if mixes:
        return gl.BlockedLayout([bv // 32, 16], [32, 1], [1, w], [0, 1])
    return gl.BlockedLayout([1, 16], [32, 1], [w, 1], [0, 1])


@gluon.constexpr_function
def _of_one(bv, w, mixes):
    """Of (rows, 1), where `_of_tokens` has them."""
    if mixes:
        return gl.BlockedLayout([bv // 32, 1], [32, 1], [1, w], [0, 1])
    return gl.BlockedLayout([1, 1], [32, 1], [w, 1], [0, 1])


@gluon.jit
def _room(ptr, S: gl.constexpr, PHASES: gl.constexpr):
    """Shared memory for S columns of two blocks of tokens: of 8 phases for products, of one to be read by tokens."""
    kind: gl.constexpr = ptr.dtype.element_ty
    return gl.allocate_shared_memory(kind, [2, 16, S], _kept(kind.primitive_bitwidth, PHASES))


@gluon.jit
def _fetch(tile, ptr, first, rows, head, H, part, D: gl.constexpr, S: gl.constexpr, W: gl.constexpr):
    """S of the D columns of 16 tokens, into shared memory; those from `rows` on are zero."""
    bits: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = _by_copies(S, bits, W)
    token = gl.arange(0, 16, gl.SliceLayout(1, layout))
    d = part + gl.arange(0, S, gl.SliceLayout(0, layout))
    base = ptr + (first * H + head) * D
    there = (token < rows)[:, None] & (d < D)[None, :]
    copy(tile, base + (token * (H * D))[:, None] + d[None, :], there)


@gluon.jit
def _fetch_pairs(pair, line, ptr, some, W: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [W, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, layout))
    four = gl.arange(0, 4, gl.SliceLayout(1, layout))
    column = gl.arange(0, 16, gl.SliceLayout(0, layout))
    copy(pair, ptr + row[:, None] * 16 + column[None, :], (row >= 0)[:, None] & (column < some * 16)[None, :])
    copy(line, ptr + 512 + four[:, None] * 16 + column[None, :], (four >= 0)[:, None] & (column < some * 16)[None, :])


@gluon.jit
def _numbers(pointers, first, rows, head, H, KINDS: gl.constexpr, R: gl.constexpr):
    """Inputs of a block that are numbers, (1, 16)."""
    token = gl.arange(0, 16, gl.SliceLayout(0, R))[None, :]
    made = ()
    for i in gl.static_range(_count(KINDS)):
        if not _is_row(KINDS, i):
            at = pointers[i] + first * H + head + token * H
            made = made + (gl.load(at, mask=token < rows, other=0.0).to(gl.float32),)
    return made


@gluon.jit
def _one(tile, t: gl.constexpr, C1: gl.constexpr):
    """Of token t, (rows, 1), from a tile of tokens in shared memory."""
    return tile.slice(t, 1).permute((1, 0)).load(C1).to(gl.float32)


@gluon.jit
def _number(row, token, t: gl.constexpr, R: gl.constexpr, C1: gl.constexpr):
    """Of token t, (1, 1), from (1, 16)."""
    return gl.convert_layout(_column(row, token, t), gl.SliceLayout(1, C1))[:, None]


@gluon.jit
def _given(tiles, numbers, half, token, t: gl.constexpr, KINDS: gl.constexpr, R: gl.constexpr, C1: gl.constexpr):
    """Inputs of token t."""
    made = ()
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            made = made + (_one(tiles[_before(KINDS, i, "r")].index(half), t, C1),)
        else:
            made = made + (_number(numbers[_before(KINDS, i, "n")], token, t, R, C1),)
    return made


@gluon.jit
def _square(tile, pair, LOWER: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr):
    """What queries read of pairs, as a right operand in shared memory: of tokens no later (LOWER), or later."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [W, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    of = pair.slice(16, 16).load(layout)
    if LOWER:
        of = gl.where(row <= column, of, 0.0)
    else:
        of = gl.where(row > column, of, 0.0)
    tile.store(of.to(DTYPE))


@gluon.jit
def _by_state(state, tile, zero, U: gl.constexpr):
    """(rows, 16), what the tokens of a tile read."""
    return mma_v2(state, tile.permute((1, 0)).load(gl.DotOperandLayout(1, U, 2)), zero)


@gluon.jit
def _by_tokens(left, tile, acc, U: gl.constexpr):
    """(rows, n) += left (rows, tokens) in registers, a tile of tokens in shared memory."""
    a = gl.convert_layout(left, gl.DotOperandLayout(0, U, 2))
    return mma_v2(a, tile.load(gl.DotOperandLayout(1, U, 2)), acc)


@gluon.jit
def _put_state(ptr, state, index, v, d, V: gl.constexpr, K: gl.constexpr):
    gl.store(ptr + index * (V * K) + v[:, None] * K + d[None, :], state.to(ptr.dtype.element_ty))


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def forward(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, products, start, o, seen, states, final, offsets, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, PACKED: gl.constexpr,
    STARTED: gl.constexpr, GATED: gl.constexpr, RECORD: gl.constexpr, KINDS: gl.constexpr, MIXES: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """o, the final state, what keys read, the first state of every chunk (RECORD)."""
    PARTS: gl.constexpr = V // BV
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    R: gl.constexpr = _of_tokens(BV, W, MIXES)
    C1: gl.constexpr = _of_one(BV, W, MIXES)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [BV // 8, 256 // BV], [1, W], [0, 1])
    DTYPE: gl.constexpr = k.dtype.element_ty
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    pid = gl.program_id(0).to(gl.int64)
    part = (pid % PARTS).to(gl.int32) * BV
    head = pid // PARTS % H
    unit = pid // PARTS // H
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    ks = gl.allocate_shared_memory(DTYPE, [2, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [2, 16, K], _WIDE)
    pairs = gl.allocate_shared_memory(gl.float32, [2, 32, 16], _SLIM)
    lines = gl.allocate_shared_memory(gl.float32, [2, 4, 16], _SLIM)
    squares = gl.allocate_shared_memory(DTYPE, [16, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    tiles = ()
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            tiles = tiles + (_room(pointers[i], BV, 1),)
    v = part + gl.arange(0, BV, gl.SliceLayout(1, U))
    d = gl.arange(0, K, gl.SliceLayout(0, U))
    token = gl.arange(0, 16, gl.SliceLayout(0, R))[None, :]
    row = part + gl.arange(0, BV, gl.SliceLayout(1, C1))[:, None]
    inside = row >= 0
    out_row = part + gl.arange(0, BV, gl.SliceLayout(1, OUT))[:, None]
    out_token = gl.arange(0, 16, gl.SliceLayout(0, OUT))[None, :]
    none = gl.zeros([BV, 16], gl.float32, U)
    nothing = gl.zeros([BV, K], gl.float32, U)
    state = nothing
    if STARTED:
        state = gl.load(start + (unit * H + head) * (V * K) + v[:, None] * K + d[None, :])
    blocks = ((end - first + 16 - 1) // 16).to(gl.int32)
    rows = gl.minimum(end - first, 16).to(gl.int32)
    some = gl.minimum(blocks, 1)
    _fetch(ks.index(0), k, first, rows, head, H, 0, K, K, W)
    _fetch(qs.index(0), q, first, rows, head, H, 0, K, K, W)
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            _fetch(tiles[_before(KINDS, i, "r")].index(0), pointers[i], first, rows, head, H, part, V, BV, W)
    _fetch_pairs(pairs.index(0), lines.index(0), products + (slot * H + head) * (C // 16) * 576, some, W)
    copies_end()
    numbers = _numbers(pointers, first, rows, head, H, KINDS, R)
    for n in range(0, blocks):
        half = n % 2
        rows = gl.minimum(end - first, 16).to(gl.int32)
        place = (slot + n // (C // 16)) * H + head
        if RECORD:  # noqa: SIM102 (a constant around a test)
            if n % (C // 16) == 0:
                _put_state(states, state, place, v, d, V, K)
        copies_wait(0)
        barrier()
        # what the next block needs is on its way while this one is gone through
        later = first + 16
        more = gl.maximum(gl.minimum(end - later, 16), 0).to(gl.int32)
        some = gl.minimum(more, 1)
        other = (n + 1) % 2
        _fetch(ks.index(other), k, later, more, head, H, 0, K, K, W)
        _fetch(qs.index(other), q, later, more, head, H, 0, K, K, W)
        for i in gl.static_range(_count(KINDS)):
            if _is_row(KINDS, i):
                _fetch(tiles[_before(KINDS, i, "r")].index(other), pointers[i], later, more, head, H, part, V, BV, W)
        near = products + (((slot + (n + 1) // (C // 16)) * H + head) * (C // 16) + (n + 1) % (C // 16)) * 576
        _fetch_pairs(pairs.index(other), lines.index(other), near, some, W)
        copies_end()
        next_numbers = _numbers(pointers, later, more, head, H, KINDS, R)
        pair, line = pairs.index(half), lines.index(half)
        left = gl.convert_layout(state.to(DTYPE), gl.DotOperandLayout(0, U, 2))
        y = _by_state(left, ks.index(half), none, U)
        out = _by_state(left, qs.index(half), none, U)
        _square(squares, pair, True, DTYPE, W)
        if GATED:
            y = y * line.slice(1, 1).load(U)
            out = out * line.slice(0, 1).load(U)
            rest = line.slice(2, 1).load(R)
        x = gl.convert_layout(y, R)
        u = x
        for t in gl.static_range(16):
            near_row = pair.slice(t, 1).load(R)
            k2 = _number(near_row, token, t, R, C1)
            now = gl.convert_layout(_column(x, token, t), gl.SliceLayout(1, C1))[:, None]
            given = _given(tiles, numbers, half, token, t, KINDS, R, C1)
            there = row * 0 + t < rows
            made = gl.where(there, ask(now, k2, now, given, inside, False), 0.0)
            if RECORD:
                gl.store(seen + ((first + t) * H + head) * V + row, now, mask=there)
            u_t = gl.convert_layout(gl.sum(made, 1), gl.SliceLayout(1, R))[:, None]
            u = gl.where(token == t, u_t, u)
            if t < 15:
                x += u_t * near_row
        barrier()
        out = _by_tokens(u.to(DTYPE), squares, out, U)
        if GATED:
            u = u * rest
        wide = gl.convert_layout(out.to(o.dtype.element_ty), OUT)
        gl.store(o + ((first + out_token) * H + head) * V + out_row, wide, mask=(out_token < rows) & (out_row >= 0))
        written = _by_tokens(u.to(DTYPE), ks.index(half), nothing, U)
        if GATED:
            kept = _column(line.slice(0, 1).load(U), gl.arange(0, 16, gl.SliceLayout(0, U))[None, :], 15)
            state = state * kept[:, None]
        state = state + written
        first = later
        numbers = next_numbers
    copies_wait(0)
    _put_state(final, state, unit * H + head, v, d, V, K)


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def reverse(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, products, seen, do, dfinal, dlast, asked, dstates, dstart, offsets, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, PACKED: gl.constexpr,
    GATED: gl.constexpr, LAST: gl.constexpr, KINDS: gl.constexpr, MIXES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """What every u is asked for, and derivatives in the last state of every chunk and in the first of all."""
    PARTS: gl.constexpr = V // BV
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    R: gl.constexpr = _of_tokens(BV, W, MIXES)
    C1: gl.constexpr = _of_one(BV, W, MIXES)
    DTYPE: gl.constexpr = k.dtype.element_ty
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    pid = gl.program_id(0).to(gl.int64)
    part = (pid % PARTS).to(gl.int32) * BV
    head = pid // PARTS % H
    unit = pid // PARTS // H
    begin, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(begin, unit, N, C, PACKED)
    ks = gl.allocate_shared_memory(DTYPE, [2, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [2, 16, K], _WIDE)
    pairs = gl.allocate_shared_memory(gl.float32, [2, 32, 16], _SLIM)
    lines = gl.allocate_shared_memory(gl.float32, [2, 4, 16], _SLIM)
    dos = _room(do, BV, 1)
    shows = _room(do, BV, 8)
    xs = _room(seen, BV, 1)
    squares = gl.allocate_shared_memory(DTYPE, [16, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    tiles = ()
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            tiles = tiles + (_room(pointers[i], BV, 1),)
    v = part + gl.arange(0, BV, gl.SliceLayout(1, U))
    d = gl.arange(0, K, gl.SliceLayout(0, U))
    token = gl.arange(0, 16, gl.SliceLayout(0, R))[None, :]
    row = part + gl.arange(0, BV, gl.SliceLayout(1, C1))[:, None]
    inside = row >= 0
    none = gl.zeros([BV, 16], gl.float32, U)
    nothing = gl.zeros([BV, K], gl.float32, U)
    state = gl.load(dfinal + (unit * H + head) * (V * K) + v[:, None] * K + d[None, :])
    if LAST:
        last = gl.load(dlast + (unit * H + head) * V + row)
    blocks = ((end - begin + 16 - 1) // 16).to(gl.int32)
    some = gl.minimum(blocks, 1)
    n = gl.maximum(blocks - 1, 0)
    first = begin + n * 16
    rows = gl.minimum(end - first, 16).to(gl.int32)
    half = n % 2
    _fetch(ks.index(half), k, first, rows, head, H, 0, K, K, W)
    _fetch(qs.index(half), q, first, rows, head, H, 0, K, K, W)
    _fetch(dos.index(half), do, first, rows, head, H, part, V, BV, W)
    _fetch(shows.index(half), do, first, rows, head, H, part, V, BV, W)
    _fetch(xs.index(half), seen, first, rows, head, H, part, V, BV, W)
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            _fetch(tiles[_before(KINDS, i, "r")].index(half), pointers[i], first, rows, head, H, part, V, BV, W)
    near = products + (((slot + n // (C // 16)) * H + head) * (C // 16) + n % (C // 16)) * 576
    _fetch_pairs(pairs.index(half), lines.index(half), near, some, W)
    copies_end()
    numbers = _numbers(pointers, first, rows, head, H, KINDS, R)
    for step in range(0, blocks):
        n = blocks - 1 - step
        half = n % 2
        rows = gl.minimum(end - first, 16).to(gl.int32)
        place = (slot + n // (C // 16)) * H + head
        if (step == 0) | (n % (C // 16) == C // 16 - 1):
            _put_state(dstates, state, place, v, d, V, K)
        copies_wait(0)
        barrier()
        earlier = first - 16
        some = gl.minimum(n, 1)
        more = some * 16
        other = (n + 1) % 2
        _fetch(ks.index(other), k, earlier, more, head, H, 0, K, K, W)
        _fetch(qs.index(other), q, earlier, more, head, H, 0, K, K, W)
        _fetch(dos.index(other), do, earlier, more, head, H, part, V, BV, W)
        _fetch(shows.index(other), do, earlier, more, head, H, part, V, BV, W)
        _fetch(xs.index(other), seen, earlier, more, head, H, part, V, BV, W)
        for i in gl.static_range(_count(KINDS)):
            if _is_row(KINDS, i):
                _fetch(tiles[_before(KINDS, i, "r")].index(other), pointers[i], earlier, more, head, H, part, V, BV, W)
        before = gl.maximum(n - 1, 0)
        near = products + (((slot + before // (C // 16)) * H + head) * (C // 16) + before % (C // 16)) * 576
        _fetch_pairs(pairs.index(other), lines.index(other), near, some, W)
        copies_end()
        next_numbers = _numbers(pointers, earlier, more, head, H, KINDS, R)
        pair, line = pairs.index(half), lines.index(half)
        shown, x = dos.index(half), xs.index(half)
        _square(squares, pair, False, DTYPE, W)
        left = gl.convert_layout(state.to(DTYPE), gl.DotOperandLayout(0, U, 2))
        y = _by_state(left, ks.index(half), none, U)
        if GATED:
            y = y * line.slice(2, 1).load(U)
        barrier()
        a = shows.index(half).permute((1, 0)).load(gl.DotOperandLayout(0, U, 2)).to(DTYPE)
        y = mma_v2(a, squares.load(gl.DotOperandLayout(1, U, 2)), y)
        y = gl.convert_layout(y, R)
        w = y
        for t in gl.static_range(15, -1, -1):
            near_row = pair.slice(t, 1).load(R)
            k2 = _number(near_row, token, t, R, C1)
            own = _number(pair.slice(16 + t, 1).load(R), token, t, R, C1)
            show = _one(shown, t, C1)
            now = gl.convert_layout(_column(y, token, t), gl.SliceLayout(1, C1))[:, None] + own * show
            given = _given(tiles, numbers, half, token, t, KINDS, R, C1)
            there = row * 0 + t < rows
            made = gl.where(there, ask(_one(x, t, C1), k2, now, given, inside, True), 0.0)
            if LAST:
                made = gl.where(row * 0 + t + first == end - 1, made + last, made)
            gl.store(asked + ((first + t) * H + head) * V + row, now, mask=there)
            w_t = gl.convert_layout(gl.sum(made, 1), gl.SliceLayout(1, R))[:, None]
            w = gl.where(token == t, w_t, w)
            if t > 0:
                y += w_t * near_row
        if GATED:
            a = (a.to(gl.float32) * line.slice(0, 1).load(gl.DotOperandLayout(0, U, 2))).to(DTYPE)
            w = w * line.slice(1, 1).load(R)
        written = mma_v2(a, qs.index(half).load(gl.DotOperandLayout(1, U, 2)), nothing)
        written = _by_tokens(w.to(DTYPE), ks.index(half), written, U)
        if GATED:
            kept = _column(line.slice(0, 1).load(U), gl.arange(0, 16, gl.SliceLayout(0, U))[None, :], 15)
            state = state * kept[:, None]
        state = state + written
        first = earlier
        numbers = next_numbers
    copies_wait(0)
    _put_state(dstart, state, unit * H + head, v, d, V, K)


__all__ = ["forward", "reverse"]
