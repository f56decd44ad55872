"""The serial pass of the way back of a memory of two layers 64 x 256 on Hopper, in Gluon: `held.reverse` and what
`held.reads_back` leaves to it, in one.

Units are rows: a warp owns some hidden units, of which W1^T and W2, (units, D), and their derivatives E stand in its
registers. What is (units, tokens) is made there, from left operands that are in registers already and right ones, of
tokens, which all warps share. Sums over units are products (tokens, D) of which a warp owns columns: operands pass
through shared memory, in the dtype of products, and no partial sum does. Everything that knows neither W nor E is made
before (`around.before`) and behind (`around.behind`), parallel in blocks.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
from __future__ import annotations

import triton  # noqa: F401  # in the text of a response
import triton.language as tl  # noqa: F401

from axes.kernels.common.gluon import barrier, copies_end, copies_wait, copy, gl, gluon, mma_v2
from axes.kernels.common.launch import Kernel
from axes.kernels.network.functions import bent_of, gelu_of, normal_of
from axes.kernels.substitution.response import ask, inputs  # replaced

_D = gl.constexpr(64)
_F = gl.constexpr(256)
_WIDER = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # of float32


@gluon.jit
def _fetch(tile, ptr, R: gl.constexpr, S: gl.constexpr, W: gl.constexpr):
    """A matrix (R, S) of 16 bits into shared memory, 16 bytes a thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // S, S // 8], [W, 1], [1, 0])
    row = gl.arange(0, R, gl.SliceLayout(1, layout))
    column = gl.arange(0, S, gl.SliceLayout(0, layout))
    copy(tile, ptr + row[:, None] * S + column[None, :])
    copies_end()


@gluon.jit
def _fetch_pairs(tile, ptr, W: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [W, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))
    column = gl.arange(0, 16, gl.SliceLayout(0, layout))
    copy(tile, ptr + row[:, None] * 16 + column[None, :])
    copies_end()


@gluon.jit
def _tokens(tiles, pairs, n, pack, squares, place, N: gl.constexpr, W: gl.constexpr):
    """Of block n, into the half of every tile that is its."""
    for i in gl.static_range(N):
        _fetch(tiles[i].index(n % 2), pack + (place * N + i) * (16 * _D), 16, _D, W)
    for i in gl.static_range(2):
        _fetch_pairs(pairs[i].index(n % 2), squares + (place * 2 + i) * 256, W)


@gluon.jit
def _by_units(a, b, acc, U: gl.constexpr):
    """(units, n) += a (units, m) in registers, b (m, n) in shared memory."""
    return mma_v2(a, b.load(gl.DotOperandLayout(1, U, 2)), acc)


@gluon.jit
def _left(x, U: gl.constexpr):
    """What products left, or shared memory has, as a left operand."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, U, 2))


@gluon.jit
def _over_units(x, y, N: gl.constexpr, V: gl.constexpr):
    """(tokens, n), of x (units, tokens) and y (units, n), both in shared memory. Of halves, since products that are
    added wait for each other."""
    zero = gl.zeros([16, N], gl.float32, V)
    first = _product(x.slice(0, _F // 2), y.slice(0, _F // 2), zero, V)
    return first + _product(x.slice(_F // 2, _F // 2), y.slice(_F // 2, _F // 2), zero, V)


@gluon.jit
def _product(x, y, zero, V: gl.constexpr):
    return mma_v2(x.permute((1, 0)).load(gl.DotOperandLayout(0, V, 2)), y.load(gl.DotOperandLayout(1, V, 2)), zero)


@gluon.jit
def _normal(z):
    """`functions.normal` by instructions that leave out numbers below 2^-126."""
    power, by = -0.7213475204444817 * z * z, 1.0 + 0.2316418882635141 * gl.abs(z)
    e = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], gl.float32, True, 1)
    t = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [by], gl.float32, True, 1)
    return normal_of(z, e, t)


@gluon.jit
def _gelu(z):
    return gelu_of(z, _normal(z))


@gluon.jit
def _place(token, d, S: gl.constexpr):
    return token[:, None] * S + d[None, :]


@gluon.jit
def _put_room(ptr, x, W: gl.constexpr):
    """What the products of a block see of a state, (units, D) in 16 bits."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    row = gl.arange(0, _F, gl.SliceLayout(1, layout))
    column = gl.arange(0, _D, gl.SliceLayout(0, layout))
    gl.store(ptr + row[:, None] * _D + column[None, :], gl.convert_layout(x, layout))


@gluon.jit
def _filtered(
    x1, x2, z1, z2, h, p, felt, k, numbers, ends, place, rooms3, rooms4, ROOMS: gl.constexpr, DTYPE: gl.constexpr,
    W: gl.constexpr, U: gl.constexpr,
):  # fmt: skip
    """The state with what a filter held at the start of the block, which moves to its end in shared memory."""
    token = gl.arange(0, 16, gl.SliceLayout(0, U))
    e_end = gl.load(numbers + place * 64 + 48 + token)
    b_end, e_first = gl.load(ends + place * 4 + 1), gl.load(ends + place * 4 + 2)
    held = z1.load(U)
    if ROOMS:
        _put_room(rooms3 + place * (_D * _F), held.to(DTYPE), W)
    x1 += b_end * held
    z1.store(_by_units(h, felt, e_first * held, U))
    held = z2.load(U)
    if ROOMS:
        _put_room(rooms4 + place * (_D * _F), held.to(DTYPE), W)
    x2 += b_end * held
    z2.store(_by_units(_left((p * e_end[None, :]).to(DTYPE), U), k, e_first * held, U))
    return x1, x2


@Kernel
@gluon.jit(do_not_specialize=["first", "last"])
def again(
    pack, numbers, kept, ends, w1, w2, m1, m2, rooms1, rooms2, rooms3, rooms4, first, last,
    W: gl.constexpr, GATED: gl.constexpr, FILTER: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """States at the start of blocks `first` to `last`, from that of the first, where what is written is known."""
    pid = gl.program_id(0).to(gl.int64)
    programs = gl.num_programs(0).to(gl.int64)
    DTYPE: gl.constexpr = pack.dtype.element_ty
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    ks = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    us = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    writes = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    f = gl.arange(0, _F, gl.SliceLayout(1, U))
    d = gl.arange(0, _D, gl.SliceLayout(0, U))
    token = gl.arange(0, 16, gl.SliceLayout(0, U))
    at1 = pid * (_D * _F) + d[None, :] * _F + f[:, None]
    at2 = pid * (_D * _F) + f[:, None] * _D + d[None, :]
    x1 = gl.load(w1 + at1)
    x2 = gl.load(w2 + at2)
    if FILTER:
        felt = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
        z1 = gl.allocate_shared_memory(gl.float32, [_F, _D], _WIDER, gl.load(m1 + at1))
        z2 = gl.allocate_shared_memory(gl.float32, [_F, _D], _WIDER, gl.load(m2 + at2))
        _fetch(felt.index(first % 2), pack + pid * (N * 16 * _D) + 6 * 16 * _D, 16, _D, W)
    none = gl.zeros([_F, 16], gl.float32, U)
    source = pack + pid * (N * 16 * _D)
    _fetch(ks.index(first % 2), source, 16, _D, W)
    _fetch(us.index(first % 2), source + 2 * 16 * _D, 16, _D, W)
    _fetch(writes.index(first % 2), source + 3 * 16 * _D, 16, _D, W)
    for n in range(first, last):
        place = pid + (n - first) * programs
        k, u, write = ks.index(n % 2), us.index(n % 2), writes.index(n % 2)
        c_end = gl.load(numbers + place * 64 + 16 + token)
        copies_wait(0)
        barrier()
        if n + 1 < last:
            source = pack + (place + programs) * (N * 16 * _D)
            _fetch(ks.index((n + 1) % 2), source, 16, _D, W)
            _fetch(us.index((n + 1) % 2), source + 2 * 16 * _D, 16, _D, W)
            _fetch(writes.index((n + 1) % 2), source + 3 * 16 * _D, 16, _D, W)
            if FILTER:
                _fetch(felt.index((n + 1) % 2), source + 6 * 16 * _D, 16, _D, W)
        y2 = x2.to(DTYPE)
        _put_room(rooms2 + place * (_D * _F), y2, W)
        h, slope = _gelu(_by_units(_left(y2, U), k.permute((1, 0)), none, U))
        y1 = x1.to(DTYPE)
        _put_room(rooms1 + place * (_D * _F), y1, W)
        p = _by_units(_left(y1, U), u.permute((1, 0)), none, U) * slope
        hb = _left(h.to(DTYPE), U)
        if GATED:
            x1 = x1 * gl.load(kept + place * _D + d)[None, :]
            x2 = x2 * gl.load(ends + place * 4)
        if FILTER:
            x1, x2 = _filtered(
                x1, x2, z1, z2, hb, p, felt.index(n % 2), k, numbers, ends, place, rooms3, rooms4, True, DTYPE, W, U
            )
        x1 = _by_units(hb, write, x1, U)
        x2 = _by_units(_left((p * c_end[None, :]).to(DTYPE), U), k, x2, U)


@gluon.jit
def _read(
    hs, ms, g1, zb, numbers, reads, met, place, unit, n, T, H, head, FILTER: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """What the queries of a block read of W1 m, and H^T m."""
    row = gl.arange(0, 16, gl.SliceLayout(1, V))
    column = gl.arange(0, _D, gl.SliceLayout(0, V))
    other = gl.arange(0, 16, gl.SliceLayout(0, V))
    read = _over_units(ms, g1, _D, V)
    if FILTER:
        read = read * gl.load(numbers + place * 64 + row)[:, None]
        read += _over_units(ms, zb, _D, V) * gl.load(numbers + place * 64 + 32 + row)[:, None]
    dots = _over_units(ms, hs, 16, V)
    gl.store(reads + place * (16 * _D) + _place(row, column, _D), read)
    at = (unit * T + n * 16 + row) * H + head
    gl.store(met + _place(at, other, 16), dots, mask=(row < T - n * 16)[:, None])


@Kernel
@gluon.jit(do_not_specialize=["T", "H", "first", "last"])
def onward(
    p0, p1, p2, p3, p4, p5, p6, p7, pack, squares, numbers, kept, ends, factor, w1, w2, m1, m2, last1, last2, last3,
    last4, before1, before2, seen, reads, met, T, H, first, last,
    W: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, FILTER: gl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last` from the state of the first: the state after them, and that before the last block; of
    tokens, W1 h, W1 m and H^T m."""
    pid = gl.program_id(0).to(gl.int64)
    programs = gl.num_programs(0).to(gl.int64)
    head, unit = pid % H, pid // H
    DTYPE: gl.constexpr = pack.dtype.element_ty
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    V: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    K: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, W], [0, 1])
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    slim: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    HALVES: gl.constexpr = 1 if FILTER else 2  # a block's queries read behind the next one's keys, where there is room
    g1s = gl.allocate_shared_memory(DTYPE, [HALVES, _F, _D], wide)
    hs = gl.allocate_shared_memory(DTYPE, [HALVES, _F, 16], slim)
    ms = gl.allocate_shared_memory(DTYPE, [HALVES, _F, 16], slim)
    us = gl.allocate_shared_memory(DTYPE, [16, _D], wide)
    writes = gl.allocate_shared_memory(DTYPE, [16, _D], wide)
    ks = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    qs = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    alike = gl.allocate_shared_memory(DTYPE, [2, 16, 16], slim)
    f = gl.arange(0, _F, gl.SliceLayout(1, U))
    d = gl.arange(0, _D, gl.SliceLayout(0, U))
    token = gl.arange(0, 16, gl.SliceLayout(0, U))
    dk = gl.arange(0, _D, gl.SliceLayout(1, K))
    tk = gl.arange(0, 16, gl.SliceLayout(0, K))
    at1 = pid * (_D * _F) + d[None, :] * _F + f[:, None]
    at2 = pid * (_D * _F) + f[:, None] * _D + d[None, :]
    inside = dk[:, None] < _D
    blocks = (T + 15) // 16
    x1 = gl.load(w1 + at1)
    x2 = gl.load(w2 + at2)
    none = gl.zeros([_F, 16], gl.float32, U)
    zb = g1s.index(0)
    if FILTER:
        felt = gl.allocate_shared_memory(DTYPE, [16, _D], wide)
        held = gl.load(m1 + at1)
        zb = gl.allocate_shared_memory(DTYPE, [_F, _D], wide, held.to(DTYPE))
        z1 = gl.allocate_shared_memory(gl.float32, [_F, _D], _WIDER, held)
        z2 = gl.allocate_shared_memory(gl.float32, [_F, _D], _WIDER, gl.load(m2 + at2))
    _fetch(ks.index(first % 2), pack + pid * (2 * 16 * _D), 16, _D, W)
    _fetch(qs.index(first % 2), pack + pid * (2 * 16 * _D) + 16 * _D, 16, _D, W)
    _fetch_pairs(alike.index(first % 2), squares + pid * 256, W)
    for n in range(first, last):
        place = pid + (n - first) * programs
        g1, h_own, m_own = g1s.index(n % HALVES), hs.index(n % HALVES), ms.index(n % HALVES)
        k, q, kq = ks.index(n % 2), qs.index(n % 2), alike.index(n % 2)
        a_t = gl.load(numbers + place * 64 + token)
        c_end = gl.load(numbers + place * 64 + 16 + token)
        at = (unit * T + n * 16 + tk) * H + head
        there = tk < T - n * 16
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], dk[:, None], _D, there[None, :], inside)
        if ROWS:
            by = gl.load(factor + place * (16 * _D) + tk[None, :] * _D + dk[:, None])
        else:
            by = gl.load(numbers + place * 64 + 16 + tk)[None, :]
        if n == blocks - 1:
            gl.store(before1 + at1, x1)
            gl.store(before2 + at2, x2)
        copies_wait(0)
        barrier()
        if n + 1 < last:
            source = pack + (place + programs) * (2 * 16 * _D)
            _fetch(ks.index((n + 1) % 2), source, 16, _D, W)
            _fetch(qs.index((n + 1) % 2), source + 16 * _D, 16, _D, W)
            _fetch_pairs(alike.index((n + 1) % 2), squares + (place + programs) * 256, W)
        y1 = x1.to(DTYPE)
        g1.store(y1)
        a2 = _left(x2.to(DTYPE), U)
        h, slope = _gelu(_by_units(a2, k.permute((1, 0)), none, U))
        hb = h.to(DTYPE)
        h_own.store(hb)
        heard = _by_units(a2, q.permute((1, 0)), none, U) * a_t[None, :]
        if FILTER:
            b_t = gl.load(numbers + place * 64 + 32 + token)
            heard += _by_units(_left(z2.load(U).to(DTYPE), U), q.permute((1, 0)), none, U) * b_t[None, :]
        barrier()
        y = gl.convert_layout(gl.permute(_over_units(h_own, g1, _D, V), (1, 0)), K)
        if HALVES == 2 and n > first:
            i = (n - 1) % HALVES
            _read(
                hs.index(i), ms.index(i), g1s.index(i), zb, numbers, reads, met, place - programs, unit, n - 1, T, H,
                head, FILTER, V,
            )  # fmt: skip
        gl.store(seen + at[None, :] * _D + dk[:, None], y, mask=there[None, :])
        u = gl.where(there[None, :], ask(y, gl.sum(y * 0.0, 0)[None, :], y, given, inside, False), 0.0)
        us.permute((1, 0)).store(u.to(DTYPE))
        writes.permute((1, 0)).store((u * by).to(DTYPE))
        if FILTER:
            felt.permute((1, 0)).store((u * gl.load(numbers + place * 64 + 48 + tk)[None, :]).to(DTYPE))
        barrier()
        p = _by_units(g1.load(gl.DotOperandLayout(0, U, 2)), us.permute((1, 0)), none, U) * slope
        m, _ = _gelu(_by_units(_left(p.to(DTYPE), U), kq.permute((1, 0)), heard, U))
        m_own.store(m.to(DTYPE))
        if GATED:
            x1 = x1 * gl.load(kept + place * _D + d)[None, :]
            x2 = x2 * gl.load(ends + place * 4)
        if FILTER:
            x1, x2 = _filtered(
                x1, x2, z1, z2, _left(hb, U), p, felt, k, numbers, ends, place, seen, seen, False, DTYPE, W, U
            )  # fmt: skip
        x1 = _by_units(_left(hb, U), writes, x1, U)
        x2 = _by_units(_left((p * c_end[None, :]).to(DTYPE), U), k, x2, U)
        if FILTER:
            barrier()
            _read(h_own, m_own, g1, zb, numbers, reads, met, place, unit, n, T, H, head, FILTER, V)
            barrier()
            zb.store(z1.load(U).to(DTYPE))
    if HALVES == 2:
        i, end = (last - 1) % HALVES, pid + (last - 1 - first) * programs
        barrier()
        _read(
            hs.index(i), ms.index(i), g1s.index(i), zb, numbers, reads, met, end, unit, last - 1, T, H, head, FILTER, V
        )  # fmt: skip
    gl.store(last1 + at1, x1)
    gl.store(last2 + at2, x2)
    if FILTER:
        gl.store(last3 + at1, z1.load(U))
        gl.store(last4 + at2, z2.load(U))


@Kernel
@gluon.jit(do_not_specialize=["T", "H", "first", "last"])
def walk(
    p0, p1, p2, p3, p4, p5, p6, p7, seen, pack, squares, numbers, kept, ends, base, factor, rooms1, rooms2, rooms3,
    rooms4, before1, before2, dw1, dw2, dm1, dm2, asked, reads, throughs, queries, keys, later, dpairs, lefts, reads2,
    aboves, queries2, keys2, T, H, first, last,
    W: gl.constexpr, GATED: gl.constexpr, FILTER: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Blocks from `last` - 1 to `first`: derivatives in W move, in their place, from the state after them to that
    before. Of tokens: what u is asked for, and sums over units that `around.behind` makes the rest of."""
    pid = gl.program_id(0).to(gl.int64)
    programs = gl.num_programs(0).to(gl.int64)
    head, unit = pid % H, pid // H
    DTYPE: gl.constexpr = pack.dtype.element_ty
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    V: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    K: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, W], [0, 1])
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    slim: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    y1 = gl.allocate_shared_memory(DTYPE, [_F, _D], wide)
    y2 = gl.allocate_shared_memory(DTYPE, [_F, _D], wide)
    g1 = gl.allocate_shared_memory(DTYPE, [_F, _D], wide)
    g2 = gl.allocate_shared_memory(DTYPE, [_F, _D], wide)
    hs = gl.allocate_shared_memory(DTYPE, [_F, 16], slim)
    ps = gl.allocate_shared_memory(DTYPE, [_F, 16], slim)
    ms = gl.allocate_shared_memory(DTYPE, [_F, 16], slim)
    dns = gl.allocate_shared_memory(DTYPE, [_F, 16], slim)
    changes = gl.allocate_shared_memory(DTYPE, [_F, 16], slim)
    dzs = gl.allocate_shared_memory(DTYPE, [_F, 16], slim)
    dys = gl.allocate_shared_memory(DTYPE, [16, _D], wide)
    ks = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    qs = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    us = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    writes = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    lates = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
    tiles = (ks, qs, us, writes, lates)
    if FILTER:
        lates2 = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
        felts = gl.allocate_shared_memory(DTYPE, [2, 16, _D], wide)
        tiles = (ks, qs, us, writes, lates, lates2, felts)
    alike = gl.allocate_shared_memory(DTYPE, [2, 16, 16], slim)
    both = gl.allocate_shared_memory(DTYPE, [2, 16, 16], slim)
    pairs = (alike, both)
    f = gl.arange(0, _F, gl.SliceLayout(1, U))
    d = gl.arange(0, _D, gl.SliceLayout(0, U))
    token = gl.arange(0, 16, gl.SliceLayout(0, U))
    row = gl.arange(0, 16, gl.SliceLayout(1, V))
    column = gl.arange(0, _D, gl.SliceLayout(0, V))
    other = gl.arange(0, 16, gl.SliceLayout(0, V))
    dk = gl.arange(0, _D, gl.SliceLayout(1, K))
    tk = gl.arange(0, 16, gl.SliceLayout(0, K))
    at1 = pid * (_D * _F) + d[None, :] * _F + f[:, None]
    at2 = pid * (_D * _F) + f[:, None] * _D + d[None, :]
    inside = dk[:, None] < _D
    blocks = (T + 15) // 16
    e1 = gl.load(dw1 + at1)
    e2 = gl.load(dw2 + at2)
    place = pid + (last - 1 - first) * programs
    _fetch(y1, rooms1 + place * (_D * _F), _F, _D, W)
    _fetch(y2, rooms2 + place * (_D * _F), _F, _D, W)
    if FILTER:
        _fetch(g1, rooms3 + place * (_D * _F), _F, _D, W)
        _fetch(g2, rooms4 + place * (_D * _F), _F, _D, W)
    _tokens(tiles, pairs, last - 1, pack, squares, place, N, W)
    for back in range(first, last):
        n = first + last - 1 - back
        place = pid + (n - first) * programs
        k, q, u, late = ks.index(n % 2), qs.index(n % 2), us.index(n % 2), lates.index(n % 2)
        kq, uo = alike.index(n % 2), both.index(n % 2)  # pairs [t, s] of queries with keys, of do with u
        a_t = gl.load(numbers + place * 64 + token)
        c_end = gl.load(numbers + place * 64 + 16 + token)
        copies_wait(0)
        barrier()
        if n > first:
            _tokens(tiles, pairs, n - 1, pack, squares, place - programs, N, W)
        # what queries read
        none = gl.zeros([_F, 16], gl.float32, U)
        kb = k.permute((1, 0))
        a2 = y2.load(gl.DotOperandLayout(0, U, 2))
        z = _by_units(a2, kb, none, U)
        h, slope, bend = bent_of(z, _normal(z))
        plain = _by_units(a2, q.permute((1, 0)), none, U)
        a1 = y1.load(gl.DotOperandLayout(0, U, 2))
        fell = _by_units(a1, u.permute((1, 0)), none, U)
        dm = _by_units(a1, late.permute((1, 0)), none, U)
        hb, pb = h.to(DTYPE), (fell * slope).to(DTYPE)
        slope, bend = slope.to(DTYPE), (fell * bend).to(DTYPE)
        hs.store(hb)
        ps.store(pb)
        heard = plain * a_t[None, :]
        if FILTER:
            late2, felt = lates2.index(n % 2), felts.index(n % 2)
            b_t, e_end = gl.load(numbers + place * 64 + 32 + token), gl.load(numbers + place * 64 + 48 + token)
            b_end, e_first = gl.load(ends + place * 4 + 1), gl.load(ends + place * 4 + 2)
            held = g2.load(gl.DotOperandLayout(0, U, 2))
            heard += _by_units(held, q.permute((1, 0)), none, U) * b_t[None, :]
            dm = _by_units(g1.load(gl.DotOperandLayout(0, U, 2)), late2.permute((1, 0)), dm, U)
        m, slope_m = _gelu(_by_units(_left(pb, U), kq.permute((1, 0)), heard, U))
        ms.store(m.to(DTYPE))
        dm = _by_units(_left(hb, U), uo.permute((1, 0)), dm, U)
        dnb = (dm * slope_m).to(DTYPE)
        dns.store(dnb)
        tile = place * (16 * _D) + _place(row, column, _D)
        if FILTER:
            barrier()
            gl.store(queries2 + tile, _over_units(dns, g2, _D, V))
            gl.store(reads2 + tile, _over_units(ms, g1, _D, V))
            held = g2.load(U).to(gl.float32)
            of_b, of_e = gl.sum(e2 * held, 0), gl.sum(gl.load(dm2 + at2) * held, 0)
            held = g1.load(U).to(gl.float32)
            of_b += gl.sum(e1 * held, 0)
            of_e += gl.sum(gl.load(dm1 + at2) * held, 0)
            gl.store(lefts + place * 128 + 65, gl.sum(of_b, 0))
            gl.store(lefts + place * 128 + 66, gl.sum(of_e, 0))
            barrier()
        # what the state after the block is asked for
        gb = e2.to(DTYPE)
        g2.store(gb)
        ahead = _by_units(_left(gb, U), kb, none, U)
        dp = _by_units(_left(dnb, U), kq, ahead * c_end[None, :], U)
        if FILTER:
            gb = _left(gl.load(dm2 + at2).to(DTYPE), U)
            dp += _by_units(gb, kb, none, U) * e_end[None, :]
        changes.store((dp * slope.to(gl.float32)).to(DTYPE))
        dz = dp * bend.to(gl.float32)
        gb = e1.to(DTYPE)
        g1.store(gb)
        if FILTER:  # whose own derivative takes the place of E
            dh = _by_units(_left(gb, U), writes.index(n % 2).permute((1, 0)), none, U)
            gb = _left(gl.load(dm1 + at2).to(DTYPE), U)
            dh = _by_units(gb, felt.permute((1, 0)), dh, U)
        of_base, of_factor = gl.load(base + tile), gl.load(factor + tile)
        barrier()
        through = _over_units(hs, g1, _D, V)
        du = _over_units(changes, y1, _D, V) + of_base + through * of_factor
        at = (unit * T + n * 16 + tk) * H + head
        there = tk < T - n * 16
        y = gl.load(seen + at[None, :] * _D + dk[:, None], mask=there[None, :], other=0.0)
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], dk[:, None], _D, there[None, :], inside)
        gl.store(throughs + tile, through)
        gl.store(queries + tile, _over_units(dns, y2, _D, V))
        gl.store(keys + tile, _over_units(ps, g2, _D, V))
        if GATED:
            gl.store(reads + tile, _over_units(ms, y1, _D, V))
        of_pairs = _over_units(dns, ps, 16, V)
        gl.store(dpairs + place * 256 + _place(row, other, 16), of_pairs)
        if FILTER:
            barrier()
            g2.store(gl.load(dm2 + at2).to(DTYPE))
            g1.store(gl.load(dm1 + at2).to(DTYPE))
            barrier()
            above = _over_units(hs, g1, _D, V)
            gl.store(aboves + tile, above)
            gl.store(keys2 + tile, _over_units(ps, g2, _D, V))
            du += above * gl.load(numbers + place * 64 + 48 + row)[:, None]
        du = gl.convert_layout(gl.permute(du, (1, 0)), K)
        gl.store(asked + at[None, :] * _D + dk[:, None], du, mask=there[None, :])
        dy = gl.where(there[None, :], ask(y, gl.sum(y * 0.0, 0)[None, :], du, given, inside, True), 0.0)
        dys.permute((1, 0)).store(dy.to(DTYPE))
        barrier()
        if FILTER:
            if n > first:
                to = (place - programs) * (_D * _F)
                _fetch(g1, rooms3 + to, _F, _D, W)
                _fetch(g2, rooms4 + to, _F, _D, W)
        else:
            dh = _by_units(g1.load(gl.DotOperandLayout(0, U, 2)), writes.index(n % 2).permute((1, 0)), none, U)
        dh = _by_units(ms.load(gl.DotOperandLayout(0, U, 2)), uo, dh, U)
        dh = _by_units(y1.load(gl.DotOperandLayout(0, U, 2)), dys.permute((1, 0)), dh, U)
        dzb = (dz + dh * slope.to(gl.float32)).to(DTYPE)
        dzs.store(dzb)
        if GATED:
            of1 = gl.sum(e1 * y1.load(U).to(gl.float32), 0)
            of2 = gl.sum(gl.sum(e2 * y2.load(U).to(gl.float32), 1), 0)
            gl.store(lefts + place * 128 + d, of1)
            gl.store(lefts + place * 128 + 64, of2)
        barrier()
        if n > first:
            _fetch(y1, rooms1 + (place - programs) * (_D * _F), _F, _D, W)
        gl.store(later + tile, _over_units(dzs, y2, _D, V))
        if FILTER:  # before E moves
            held = _by_units(ms.load(gl.DotOperandLayout(0, U, 2)), late2, e_first * gl.load(dm1 + at2) + b_end * e1, U)
            gl.store(dm1 + at2, held)
            gb = _left((dns.load(U).to(gl.float32) * b_t[None, :]).to(DTYPE), U)
            gl.store(dm2 + at2, _by_units(gb, q, e_first * gl.load(dm2 + at2) + b_end * e2, U))
        if GATED:
            e1 = e1 * gl.load(kept + place * _D + d)[None, :]
            e2 = e2 * gl.load(ends + place * 4)
        barrier()
        if n > first:
            _fetch(y2, rooms2 + (place - programs) * (_D * _F), _F, _D, W)
        if n == blocks - 1:  # whose first state is the anchor that is shown
            e1 += gl.load(before1 + at1)
            e2 += gl.load(before2 + at2)
        e1 = _by_units(hs.load(gl.DotOperandLayout(0, U, 2)), dys, e1, U)
        e1 = _by_units(ms.load(gl.DotOperandLayout(0, U, 2)), late, e1, U)
        e1 = _by_units(changes.load(gl.DotOperandLayout(0, U, 2)), u, e1, U)
        e2 = _by_units(_left(dzb, U), k, e2, U)
        dn = dns.load(gl.DotOperandLayout(0, U, 2))
        if GATED:
            dn = _left((dns.load(U).to(gl.float32) * a_t[None, :]).to(DTYPE), U)
        e2 = _by_units(dn, q, e2, U)
    gl.store(dw1 + at1, e1)
    gl.store(dw2 + at2, e2)
