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
from axes.kernels.substitution.response import ask, beside  # replaced

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
    """Of (rows, 16 tokens): a thread has a row, of those that products leave to its warp, or a warp has them all."""
    if mixes:
        return gl.BlockedLayout([bv // 32, 16], [32, 1], [1, w], [0, 1])
    return gl.BlockedLayout([1, 16], [bv // w, 32 * w // bv], [w, 1], [0, 1])


@gluon.constexpr_function
def _of_one(bv, w, mixes):
    """Of (rows, 1), where `_of_tokens` has them."""
    if mixes:
        return gl.BlockedLayout([bv // 32, 1], [32, 1], [1, w], [0, 1])
    return gl.BlockedLayout([1, 1], [bv // w, 32 * w // bv], [w, 1], [0, 1])


@gluon.jit
def _room(ptr, S: gl.constexpr, PHASES: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for S columns of so many blocks of tokens: of 8 phases for products, of one to be read by tokens.
    """
    kind: gl.constexpr = ptr.dtype.element_ty
    return gl.allocate_shared_memory(kind, [STAGES, 16, S], _kept(kind.primitive_bitwidth, PHASES))


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
def _out(ptr, tile, first, rows, head, H, part, D: gl.constexpr, S: gl.constexpr, W: gl.constexpr):
    """S of the D columns of 16 tokens, from shared memory."""
    bits: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = _by_copies(S, bits, W)
    token = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    d = part + gl.arange(0, S, gl.SliceLayout(0, layout))[None, :]
    gl.store(ptr + (first * H + head) * D + token * (H * D) + d, tile.load(layout), mask=(token < rows) & (d < D))


@gluon.jit
def _put_state(ptr, state, index, v, d, V: gl.constexpr, K: gl.constexpr):
    gl.store(ptr + index * (V * K) + v[:, None] * K + d[None, :], state.to(ptr.dtype.element_ty))


@gluon.jit
def _place(slot, n, head, H, C: gl.constexpr):
    """Where block n of a unit stands among all."""
    return ((slot + n // (C // 16)) * H + head) * (C // 16) + n % (C // 16)


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def forward(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, products, start, o, seen, states, final, offsets, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, PACKED: gl.constexpr,
    STARTED: gl.constexpr, GATED: gl.constexpr, RECORD: gl.constexpr, KINDS: gl.constexpr, MIXES: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
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
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    pairs = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 16], _SLIM)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 16], _SLIM)
    squares = gl.allocate_shared_memory(DTYPE, [16, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    tiles = ()
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            tiles = tiles + (_room(pointers[i], BV, 1, STAGES),)
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
    far = first
    for stage in gl.static_range(STAGES - 1):
        more = gl.maximum(gl.minimum(end - far, 16), 0).to(gl.int32)
        near = products + _place(slot, stage, head, H, C) * 576
        _fetch(ks.index(stage), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(stage), q, far, more, head, H, 0, K, K, W)
        for i in gl.static_range(_count(KINDS)):
            if _is_row(KINDS, i):
                _fetch(tiles[_before(KINDS, i, "r")].index(stage), pointers[i], far, more, head, H, part, V, BV, W)
        _fetch_pairs(pairs.index(stage), lines.index(stage), near, gl.minimum(more, 1), W)
        copies_end()
        far += 16
    numbers = _numbers(pointers, first, rows, head, H, KINDS, R)
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
        for i in gl.static_range(_count(KINDS)):
            if _is_row(KINDS, i):
                _fetch(tiles[_before(KINDS, i, "r")].index(other), pointers[i], far, more, head, H, part, V, BV, W)
        _fetch_pairs(pairs.index(other), lines.index(other), near, gl.minimum(more, 1), W)
        copies_end()
        far += 16
        later = first + 16
        more = gl.maximum(gl.minimum(end - later, 16), 0).to(gl.int32)
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
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, d0, d1, d2, d3, d4, d5, d6, d7, products, seen, do, dfinal, dlast, asked,
    written_u, written_w, lengths, dstates, dstart, offsets, tokens, T, N, H,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, PACKED: gl.constexpr,
    GATED: gl.constexpr, LAST: gl.constexpr, KINDS: gl.constexpr, MIXES: gl.constexpr, BESIDE: gl.constexpr,
    LENGTH: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """What every u is asked for, and derivatives in the last state of every chunk and in the first of all; BESIDE: u, w
    and derivatives in inputs for what u are asked for, and what 16 rows each give to those in |k|^2."""
    PARTS: gl.constexpr = V // BV
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    R: gl.constexpr = _of_tokens(BV, W, MIXES)
    C1: gl.constexpr = _of_one(BV, W, MIXES)
    DTYPE: gl.constexpr = k.dtype.element_ty
    pointers = (p0, p1, p2, p3, p4, p5, p6, p7)
    grads = (d0, d1, d2, d3, d4, d5, d6, d7)
    COUNT: gl.constexpr = _count(KINDS)
    pid = gl.program_id(0).to(gl.int64)
    part = (pid % PARTS).to(gl.int32) * BV
    head = pid // PARTS % H
    unit = pid // PARTS // H
    begin, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(begin, unit, N, C, PACKED)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, 16, K], _WIDE)
    pairs = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 16], _SLIM)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 16], _SLIM)
    dos = _room(do, BV, 1, STAGES)
    shows = _room(do, BV, 8, STAGES)
    xs = _room(seen, BV, 1, STAGES)
    squares = gl.allocate_shared_memory(DTYPE, [16, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    tiles = ()
    for i in gl.static_range(_count(KINDS)):
        if _is_row(KINDS, i):
            tiles = tiles + (_room(pointers[i], BV, 1, STAGES),)
    if BESIDE:
        WARPS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
        warp = gl.arange(0, W, gl.SliceLayout(1, WARPS))[:, None]
        warp_token = gl.arange(0, 16, gl.SliceLayout(0, WARPS))[None, :]
        rooms = gl.allocate_shared_memory(DTYPE, [2, 16, BV], _kept(16, 8))
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
    n = gl.maximum(blocks - 1, 0)
    first = begin + n * 16
    far = first
    for stage in gl.static_range(STAGES - 1):
        more = gl.where(n >= stage, gl.minimum(end - far, 16), 0).to(gl.int32)
        near = products + _place(slot, gl.maximum(n - stage, 0), head, H, C) * 576
        _fetch(ks.index(stage), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(stage), q, far, more, head, H, 0, K, K, W)
        _fetch(dos.index(stage), do, far, more, head, H, part, V, BV, W)
        _fetch(shows.index(stage), do, far, more, head, H, part, V, BV, W)
        _fetch(xs.index(stage), seen, far, more, head, H, part, V, BV, W)
        for i in gl.static_range(_count(KINDS)):
            if _is_row(KINDS, i):
                _fetch(tiles[_before(KINDS, i, "r")].index(stage), pointers[i], far, more, head, H, part, V, BV, W)
        _fetch_pairs(pairs.index(stage), lines.index(stage), near, gl.minimum(more, 1), W)
        copies_end()
        far -= 16
    rows = gl.minimum(end - first, 16).to(gl.int32)
    near = products + _place(slot, n, head, H, C) * 576
    numbers = _numbers(pointers, first, rows, head, H, KINDS, R)
    if BESIDE:
        of_token = gl.arange(0, 16, gl.SliceLayout(0, U))[None, :]
        near_lengths = gl.load(near + 17 * of_token, mask=of_token < rows, other=0.0)
        if LAST:
            own_last = gl.load(dlast + (unit * H + head) * V + v[:, None])
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
        other = (step + STAGES - 1) % STAGES
        near = products + _place(slot, gl.maximum(m, 0), head, H, C) * 576
        _fetch(ks.index(other), k, far, more, head, H, 0, K, K, W)
        _fetch(qs.index(other), q, far, more, head, H, 0, K, K, W)
        _fetch(dos.index(other), do, far, more, head, H, part, V, BV, W)
        _fetch(shows.index(other), do, far, more, head, H, part, V, BV, W)
        _fetch(xs.index(other), seen, far, more, head, H, part, V, BV, W)
        for i in gl.static_range(_count(KINDS)):
            if _is_row(KINDS, i):
                _fetch(tiles[_before(KINDS, i, "r")].index(other), pointers[i], far, more, head, H, part, V, BV, W)
        _fetch_pairs(pairs.index(other), lines.index(other), near, gl.minimum(more, 1), W)
        copies_end()
        far -= 16
        earlier = first - 16
        more = gl.minimum(n, 1) * 16
        near = products + _place(slot, gl.maximum(n - 1, 0), head, H, C) * 576
        if BESIDE:
            next_lengths = gl.load(near + 17 * of_token, mask=of_token < more, other=0.0)
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
        asks = y
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
            if BESIDE:
                asks = gl.where(token == t, gl.convert_layout(gl.sum(now, 1), gl.SliceLayout(1, R))[:, None], asks)
            else:
                gl.store(asked + ((first + t) * H + head) * V + row, now, mask=there)
            w_t = gl.convert_layout(gl.sum(made, 1), gl.SliceLayout(1, R))[:, None]
            w = gl.where(token == t, w_t, w)
            if t > 0:
                y += w_t * near_row
        if BESIDE:
            rows_of = v[:, None]
            column = gl.arange(0, 16, gl.SliceLayout(0, U))[None, :]
            there = (column < rows) & (rows_of < V)
            these = ()
            for i in gl.static_range(COUNT):
                these = these + (tiles[i].index(half).permute((1, 0)).load(U).to(gl.float32),)
            parts = beside(
                x.permute((1, 0)).load(U), near_lengths, gl.convert_layout(asks, U), these[0], these[1 % COUNT],
                these[2 % COUNT], these[3 % COUNT], these[4 % COUNT], these[5 % COUNT], these[6 % COUNT],
                these[7 % COUNT],
            )  # fmt: skip
            place_of = (first * H + head) * V + column * (H * V) + rows_of
            for i in gl.static_range(COUNT):
                gl.store(grads[i] + place_of, parts[2 + i].to(grads[i].dtype.element_ty), mask=there)
            if LENGTH:
                of_warps = gl.sum(gl.where(there, parts[2 + COUNT], 0.0).reshape([W, BV // W, 16]), 1)
                to = lengths + (part // BV * W + warp).to(gl.int64) * tokens + (first + warp_token) * H + head
                gl.store(to, gl.convert_layout(of_warps, WARPS), mask=(warp_token < rows) & (warp >= 0))
            turned = parts[1]
            if LAST:
                turned = gl.where(column + first == end - 1, turned + own_last, turned)
            rooms.index(0).permute((1, 0)).store(gl.where(there, parts[0], 0.0).to(DTYPE))
            rooms.index(1).permute((1, 0)).store(gl.where(there, turned, 0.0).to(DTYPE))
        if GATED:
            a = (a.to(gl.float32) * line.slice(0, 1).load(gl.DotOperandLayout(0, U, 2))).to(DTYPE)
            w = w * line.slice(1, 1).load(R)
        written = mma_v2(a, qs.index(half).load(gl.DotOperandLayout(1, U, 2)), nothing)
        written = _by_tokens(w.to(DTYPE), ks.index(half), written, U)
        if GATED:
            kept = _column(line.slice(0, 1).load(U), gl.arange(0, 16, gl.SliceLayout(0, U))[None, :], 15)
            state = state * kept[:, None]
        state = state + written
        if BESIDE:
            barrier()
            _out(written_u, rooms.index(0), first, rows, head, H, part, V, BV, W)
            _out(written_w, rooms.index(1), first, rows, head, H, part, V, BV, W)
            near_lengths = next_lengths
        first = earlier
        numbers = next_numbers
    copies_wait(0)
    _put_state(dstart, state, unit * H + head, v, d, V, K)


__all__ = ["forward", "reverse"]
