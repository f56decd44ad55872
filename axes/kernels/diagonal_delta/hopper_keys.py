"""The passes of `diagonal_delta` on Hopper where the key is the reader, from q, k and the logs themselves, in Gluon.

In the letters of `diagonal_delta`, a = k, chunks of C = 64 tokens, states S (V x K) and values kept transposed:
    _invert, every chunk at once:  M = (I + beta strict(A Y_0^T))^-1,  A = k e^R,  Y_0 = k e^-G
    _chain, serial over chunks, a warpgroup that makes A, Y = k e^(G_last - G) and Q = q e^G, and P = lower(Q Y_0^T),
    ahead of one or two that own 64 values each:
    "o"       u^T = [beta (V - A S^T)]^T M^T     o^T = S Q^T + u^T P^T     S' = S e^G_last + u^T Y
    "states"  S and u of every chunk into memory, and the totals G_last
    "dv"      last chunk first: r^T = [do^T P + dS' Y^T] M     dv = beta r     dS = dS' e^G_last + do^T Q - dv^T A
Scaled vectors never reach memory: they take the place of q, of k and, but in "o", that of the logs. There the logs of a
chunk come ahead of all else, so that memory is busy while both stages are worked on. M and P of chunks in which a
channel falls by more than e^-MILD are made by `pairs.prepare_closed`, before the chain.
"""

from __future__ import annotations

from torch import Tensor

from axes.kernels.common.bulk import aligned, matrix_tiles, token_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.warpgroup import add, arrive, floored, left_layout, product_layout, published, retire, times
from axes.kernels.scalar.hopper_inverse import inverse

_C = gl.constexpr(64)  # tokens of a chunk, values of a warpgroup, channels that are scaled at a time
_BITS = gl.constexpr(1.4426950408889634)  # log2 e

# ---- pieces ----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _own():
    """Layout of 64 x 64 numbers that are scaled: a thread has rows of two channels, so that it sums them itself."""
    return gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])


@gluon.jit
def _sums(gate):
    """Of 64 channels of a chunk the logs, floored, their sums until every token, and those of the whole chunk: of two,
    for `gl.exp2`."""
    own: gl.constexpr = _own()
    row = gl.arange(0, _C, layout=gl.SliceLayout(1, own))[:, None]
    log = floored(gate.load(own).to(gl.float32)) * _BITS
    run = gl.associative_scan(log, 0, add)
    return log, run, gl.sum(gl.where(row == _C - 1, run, 0.0), 0)


@gluon.jit
def _room(gates, DTYPE: gl.constexpr, K: gl.constexpr):
    """Where the logs of a chunk lay, the first (C, K) numbers of 16 bits."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return reinterpret(gates, DTYPE, [gates.dtype.primitive_bitwidth // 16, _C, K], layout).index(0)


@gluon.jit
def _writer(writers, gates, stage, DTYPE: gl.constexpr, K: gl.constexpr, ROOM: gl.constexpr, MODE: gl.constexpr):
    """Y of a chunk, (C, K): a tile of its own, or where its logs lay."""
    if MODE == "o":
        tile = writers.index(stage).reshape([_C, K])
    else:
        tile = _room(gates.index(stage * ROOM), DTYPE, K)
    return tile


@gluon.jit
def _least(falls, matrix, PARTS: gl.constexpr):
    """The least total of a chunk's channels."""
    least = gl.load(falls + matrix.to(gl.int64) * PARTS)
    for part in gl.static_range(1, PARTS):
        least = gl.minimum(least, gl.load(falls + matrix.to(gl.int64) * PARTS + part))
    return least


# ---- every chunk at once ---------------------------------------------------------------------------------------------


@Kernel
@gluon.jit(do_not_specialize=["T", "N", "H"])
def _invert(k_tiles, g_tiles, m_tiles, beta, falls, T, N, H, LATE: gl.constexpr, MILD: gl.constexpr):
    """M of one chunk of one head if it is mild, and the least totals of its blocks of channels."""
    K: gl.constexpr = k_tiles.block_shape[2]
    DTYPE: gl.constexpr = k_tiles.dtype
    matrix = gl.program_id(0)
    h, slot = matrix % H, matrix // H
    b, n = slot // N, slot % N
    keys = gl.allocate_shared_memory(DTYPE, [1, _C, K], k_tiles.layout)
    gates = gl.allocate_shared_memory(g_tiles.dtype, [1, _C, K], g_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    published()
    mbarrier.expect(ready, (2 + g_tiles.dtype.primitive_bitwidth // 8) * _C * K)
    async_load(g_tiles, [b, n * _C, h * K], ready, gates)
    async_load(k_tiles, [b, n * _C, h * K], ready, keys)
    i = gl.arange(0, _C, layout=gl.SliceLayout(1, product_layout(_C)))
    j = gl.arange(0, _C, layout=gl.SliceLayout(0, product_layout(_C)))
    token = n * _C + i
    strength = gl.load(beta + (b * T + token).to(gl.int64) * H + h, mask=token < T, other=0.0)
    mbarrier.wait(ready, 0)
    retire(ready)
    key = keys.reshape([_C, K])
    faded = _room(gates, DTYPE, K)
    least = 0.0
    for part in gl.static_range(K // _C):
        log, run, total = _sums(gates.reshape([_C, K]).slice(part * _C, _C, dim=1))
        fall = gl.min(total, 0) / _BITS
        gl.store(falls + matrix.to(gl.int64) * (K // _C) + part, fall)
        least = gl.minimum(least, fall)
        if LATE:
            gain = gl.exp2(run)
        else:
            gain = gl.exp2(run - log)
        tile = key.slice(part * _C, _C, dim=1)
        x = tile.load(_own()).to(gl.float32)
        tile.store((x * gain).to(DTYPE))
        barrier()
        faded.slice(part * _C, _C, dim=1).store((x * gl.exp2(gl.minimum(-run, MILD * _BITS))).to(DTYPE))
    if least >= -MILD:
        published()
        lower = warpgroup_mma_wait(0, [times(key, faded.permute((1, 0)), _C)])
        solved = inverse(gl.where(i[:, None] > j[None, :], strength[:, None] * lower, 0.0))
        out = gl.allocate_shared_memory(DTYPE, [_C, _C], m_tiles.layout, solved.to(DTYPE))
        fence_async_shared()
        async_store(m_tiles, [matrix * _C, 0], out)
        store_wait(0)


# ---- serial over chunks ----------------------------------------------------------------------------------------------


@gluon.jit
def _feed(tiles, stages, bars, sizes, WIDE: gl.constexpr, ROOM: gl.constexpr, MODE: gl.constexpr):
    """One warp: a chunk's tiles into the next free stage."""
    q_tiles, k_tiles, g_tiles, v_tiles, m_tiles, p_tiles, out_tiles, dv_tiles, state_tiles = tiles
    queries, keys, writers, gates, values, inverses, squares = stages
    filled, freed, scaled, paired, logged, read, kept, left, done, sent = bars
    T, N, H = sizes
    STAGES: gl.constexpr = keys.shape[0]
    K: gl.constexpr = k_tiles.block_shape[2]
    VECTORS: gl.constexpr = (1 if MODE == "states" else 2) * K + WIDE * _C
    SQUARES: gl.constexpr = 2 * _C if MODE == "dv" else _C
    LOGS: gl.constexpr = g_tiles.dtype.primitive_bitwidth // 8 * _C * K
    BYTES: gl.constexpr = 2 * _C * (VECTORS + SQUARES) + (0 if MODE == "o" else LOGS)
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    for count in range(N):
        n = N - 1 - count if MODE == "dv" else count
        stage = count % STAGES
        bar = filled.index(stage)
        row = ((b * N + n) * H + h) * _C
        if MODE == "o":  # one chunk's logs ahead of the rest: who scales gives their place back first
            for part in gl.static_range(K // _C):
                mbarrier.wait(read.index(part), (count & 1) ^ 1)
                mbarrier.expect(logged.index(part), LOGS * _C // K)
                async_load(g_tiles, [b, n * _C, h * K + part * _C], logged.index(part), gates.index(part))
        mbarrier.wait(freed.index(stage), (count // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        if MODE != "o":
            async_load(g_tiles, [b, n * _C, h * K], bar, gates.index(stage * ROOM))
        async_load(k_tiles, [b, n * _C, h * K], bar, keys.index(stage))
        if MODE != "states":
            async_load(q_tiles, [b, n * _C, h * K], bar, queries.index(stage))
        for w in gl.static_range(WIDE):
            to = values.index(stage * WIDE + w)
            async_load(v_tiles, [b, n * _C, (h * WIDE + w) * _C], bar, to)
        async_load(m_tiles, [row, 0], bar, inverses.index(stage))
        if MODE == "dv":
            async_load(p_tiles, [row, 0], bar, squares.index(stage))


@gluon.jit
def _scale(
    numbers, stages, spots, bars, sizes,
    ROOM: gl.constexpr, LATE: gl.constexpr, MILD: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: A in the place of k, Y in its own, Q in that of q, and P, ahead of who reads them."""
    queries, keys, writers, gates, values, inverses, squares = stages
    filled, freed, scaled, paired, logged, read, kept, left, done, sent = bars
    p, beta, totals, falls = numbers
    strengths, faders, faded = spots
    T, N, H = sizes
    STAGES: gl.constexpr = keys.shape[0]
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    own: gl.constexpr = _own()
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, _C, layout=gl.SliceLayout(1, product_layout(_C)))[:, None]
    j = gl.arange(0, _C, layout=gl.SliceLayout(0, product_layout(_C)))[None, :]
    column = gl.arange(0, _C, layout=gl.SliceLayout(0, own))
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    for count in range(N):
        n = N - 1 - count if MODE == "dv" else count
        stage = count % STAGES
        matrix = (b * N + n) * H + h
        token = n * _C + gl.arange(0, _C, layout=line)
        strength = gl.load(beta + (b * T + token).to(gl.int64) * H + h, mask=token < T, other=0.0)
        least = 0.0
        if MODE == "o":
            least = _least(falls, matrix, K // _C)
        if MODE != "o":
            mbarrier.wait(filled.index(stage), count // STAGES & 1)
            strengths.index(stage).store(strength)
        key = keys.index(stage).reshape([_C, K])
        query = queries.index(stage).reshape([_C, K])
        writer = _writer(writers, gates, stage, DTYPE, K, ROOM, MODE)
        for part in gl.static_range(K // _C):
            if MODE == "o":
                mbarrier.wait(logged.index(part), count & 1)
                log, run, total = _sums(gates.index(part).reshape([_C, _C]))
                arrive(read.index(part))
                if part == 0:
                    mbarrier.wait(filled.index(stage), count // STAGES & 1)
                    strengths.index(stage).store(strength)
            else:
                log, run, total = _sums(gates.index(stage * ROOM).reshape([_C, K]).slice(part * _C, _C, dim=1))
            end = gl.exp2(total)
            faders.index(stage).slice(part * _C, _C).store(end)
            if MODE == "states":
                gl.store(totals + matrix.to(gl.int64) * K + part * _C + column, total / _BITS)
                gl.store(falls + matrix.to(gl.int64) * (K // _C) + part, gl.min(total, 0) / _BITS)
            tile = key.slice(part * _C, _C, dim=1)
            x = tile.load(own).to(gl.float32)
            to = writer.slice(part * _C, _C, dim=1)
            if MODE != "o":
                barrier()  # everybody has read these logs
                to.store((x * gl.exp2(total[None, :] - run)).to(DTYPE))
            elif least >= -MILD:
                fade = x * gl.exp2(-run)
                faded.slice(part * _C, _C, dim=1).store(fade.to(DTYPE))
                to.store((fade * end[None, :]).to(DTYPE))
            else:
                to.store((x * gl.exp2(total[None, :] - run)).to(DTYPE))
            grow = gl.exp2(run)
            if LATE:
                tile.store((x * grow).to(DTYPE))
            else:
                tile.store((x * gl.exp2(run - log)).to(DTYPE))
            if MODE != "states":
                tile = query.slice(part * _C, _C, dim=1)
                tile.store((tile.load(own).to(gl.float32) * grow).to(DTYPE))
        published()
        mbarrier.arrive(scaled.index(stage), count=1)
        if MODE == "o":
            if least >= -MILD:
                scores = warpgroup_mma_wait(0, [times(query, faded.permute((1, 0)), _C)])
                scores = gl.where(i >= j, scores, 0.0).to(DTYPE)
            else:
                scores = gl.load(p + matrix.to(gl.int64) * (_C * _C) + i * _C + j)
            squares.index(stage).store(scores)
            published()
            mbarrier.arrive(paired.index(stage), count=1)


@gluon.jit
def _advance(
    W: gl.constexpr, outs, olds, spots, stages, bars, ends, sizes,
    WIDE: gl.constexpr, ROOM: gl.constexpr, STARTED: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """64 values of one head through time."""
    queries, keys, writers, gates, values, inverses, squares = stages
    filled, freed, scaled, paired, logged, read, kept, left, done, sent = bars
    strengths, faders, faded = spots
    start, final = ends
    T, N, H = sizes
    STAGES: gl.constexpr = keys.shape[0]
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    square: gl.constexpr = product_layout(_C)
    wide: gl.constexpr = product_layout(K)
    operand: gl.constexpr = left_layout(_C)
    e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = gl.program_id(0).to(gl.int64) * (WIDE * _C * K) + e[:, None] * K + d[None, :]
    if STARTED:
        state = gl.load(start + place)
    else:
        state = gl.zeros([_C, K], gl.float32, wide)
    out = outs.index(W).reshape([_C, _C]).permute((1, 0))
    for count in range(N):
        stage = count % STAGES
        half = state.to(DTYPE)
        old = gl.convert_layout(half, operand)
        if MODE == "states":
            mbarrier.wait(left, (count & 1) ^ 1)
            olds.index(W).store(half)
            fence_async_shared()
            arrive(kept)
        mbarrier.wait(filled.index(stage), count // STAGES & 1)
        mbarrier.wait(scaled.index(stage), count // STAGES & 1)
        seen = times(old, keys.index(stage).reshape([_C, K]).permute((1, 0)), _C)
        seen = warpgroup_mma_wait(0, [seen])
        wanted = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0)).load(square).to(gl.float32)
        strength = strengths.index(stage).load(gl.SliceLayout(0, square))[None, :]
        missing = gl.convert_layout((strength * (wanted - seen)).to(DTYPE), operand)
        u = times(missing, inverses.index(stage).permute((1, 0)), _C)
        u = warpgroup_mma_wait(0, [u])
        rounded = u.to(DTYPE)
        given = gl.convert_layout(rounded, operand)
        writer = _writer(writers, gates, stage, DTYPE, K, ROOM, MODE)
        total = faders.index(stage).load(gl.SliceLayout(0, wide))[None, :]
        # the state first: the next chunk waits for it. Outputs no sooner: beside u they leave too few registers, and
        # then the compiler waits for every product of this kernel before it begins the next
        state = warpgroup_mma(given, writer, state * total, is_async=True)
        if MODE == "o":
            out_of = times(old, queries.index(stage).reshape([_C, K]).permute((1, 0)), _C)
            mbarrier.wait(paired.index(stage), count // STAGES & 1)
            out_of = warpgroup_mma(given, squares.index(stage).permute((1, 0)), out_of, is_async=True)
            state, out_of = warpgroup_mma_wait(0, [state, out_of])
            rounded = out_of.to(DTYPE)
        else:
            state = warpgroup_mma_wait(0, [state])
        arrive(freed.index(stage))
        mbarrier.wait(sent, (count & 1) ^ 1)
        out.store(rounded)
        fence_async_shared()
        arrive(done)
    if MODE == "o":
        gl.store(final + place, state)


@gluon.jit
def _retreat(
    W: gl.constexpr, olds, spots, stages, bars, ends, sizes, WIDE: gl.constexpr, ROOM: gl.constexpr
):  # fmt: skip
    """What 64 values of one head owe to the chunks after, last chunk first."""
    queries, keys, writers, gates, values, inverses, squares = stages
    filled, freed, scaled, paired, logged, read, kept, left, done, sent = bars
    strengths, faders, faded = spots
    dfinal, dstart = ends
    T, N, H = sizes
    STAGES: gl.constexpr = keys.shape[0]
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    square: gl.constexpr = product_layout(_C)
    wide: gl.constexpr = product_layout(K)
    operand: gl.constexpr = left_layout(_C)
    e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = gl.program_id(0).to(gl.int64) * (WIDE * _C * K) + e[:, None] * K + d[None, :]
    grad = gl.load(dfinal + place)
    for count in range(N):
        stage = count % STAGES
        half = grad.to(DTYPE)
        after = gl.convert_layout(half, operand)
        mbarrier.wait(left, (count & 1) ^ 1)
        olds.index(W).store(half)
        fence_async_shared()
        arrive(kept)
        mbarrier.wait(filled.index(stage), count // STAGES & 1)
        mbarrier.wait(scaled.index(stage), count // STAGES & 1)
        own = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0))
        dout = own.load(operand)
        grad *= faders.index(stage).load(gl.SliceLayout(0, wide))[None, :]
        du = times(after, _room(gates.index(stage * ROOM), DTYPE, K).permute((1, 0)), _C)
        du = warpgroup_mma(dout, squares.index(stage), du, is_async=True)
        grad = warpgroup_mma(dout, queries.index(stage).reshape([_C, K]), grad, is_async=True)
        strength = strengths.index(stage).load(gl.SliceLayout(0, square))[None, :]
        du = warpgroup_mma_wait(1, [du])
        r = times(gl.convert_layout(du.to(DTYPE), operand), inverses.index(stage), _C)
        r, grad = warpgroup_mma_wait(0, [r, grad])
        dvalue = strength * r
        back = gl.convert_layout((-dvalue).to(DTYPE), operand)
        grad = warpgroup_mma(back, keys.index(stage).reshape([_C, K]), grad, is_async=True)
        barrier()  # everybody has read do: r takes its place
        own.store(r.to(DTYPE))
        spare = _spare(gates, stage, W, DTYPE, WIDE, ROOM)
        spare.reshape([_C, _C]).permute((1, 0)).store(dvalue.to(DTYPE))
        fence_async_shared()
        arrive(done)
        grad = warpgroup_mma_wait(0, [grad])
        arrive(freed.index(stage))
    gl.store(dstart + place, grad)


@gluon.jit
def _go(
    W: gl.constexpr, outs, olds, spots, stages, bars, ends, sizes,
    WIDE: gl.constexpr, ROOM: gl.constexpr, STARTED: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One warpgroup of those that own values."""
    if MODE == "dv":
        _retreat(W, olds, spots, stages, bars, ends, sizes, WIDE, ROOM)
    else:
        _advance(W, outs, olds, spots, stages, bars, ends, sizes, WIDE, ROOM, STARTED, MODE)


@gluon.jit
def _spare(gates, stage, W: gl.constexpr, DTYPE: gl.constexpr, WIDE: gl.constexpr, ROOM: gl.constexpr):
    """(1, C, C) behind Y, where the logs or nothing lay."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    if ROOM == 2:
        tile = reinterpret(gates.index(2 * stage + 1), DTYPE, [WIDE, 1, _C, _C], layout).index(W)
    else:
        tile = reinterpret(gates.index(stage), DTYPE, [2 * WIDE, 1, _C, _C], layout).index(WIDE + W)
    return tile


@gluon.jit
def _carry(
    tiles, outs, olds, stages, bars, sizes,
    WIDE: gl.constexpr, ROOM: gl.constexpr, KEEP: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One warp: what the warpgroups made into memory."""
    q_tiles, k_tiles, g_tiles, v_tiles, m_tiles, p_tiles, out_tiles, dv_tiles, state_tiles = tiles
    queries, keys, writers, gates, values, inverses, squares = stages
    filled, freed, scaled, paired, logged, read, kept, left, done, sent = bars
    T, N, H = sizes
    STAGES: gl.constexpr = keys.shape[0]
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    for count in range(N):
        n = N - 1 - count if MODE == "dv" else count
        stage = count % STAGES
        matrix = (b * N + n) * H + h
        if KEEP:
            mbarrier.wait(paired.index(stage), count // STAGES & 1)
            async_store(p_tiles, [matrix * _C, 0], squares.index(stage))
        if MODE != "o":
            mbarrier.wait(kept, count & 1)
            for w in gl.static_range(WIDE):
                async_store(state_tiles, [(matrix * WIDE + w) * _C, 0], olds.index(w))
        mbarrier.wait(done, count & 1)
        for w in gl.static_range(WIDE):
            column = (h * WIDE + w) * _C
            if MODE == "dv":
                async_store(out_tiles, [b, n * _C, column], values.index(stage * WIDE + w))
                spare = _spare(gates, stage, w, keys.dtype, WIDE, ROOM)
                async_store(dv_tiles, [b, n * _C, column], spare)
            else:
                async_store(out_tiles, [b, n * _C, column], outs.index(w))
        if MODE != "o":
            store_wait(2 * WIDE if MODE == "dv" else WIDE)
            arrive(left)
        store_wait(0)
        if KEEP or MODE == "dv":
            arrive(freed.index(stage))
        if MODE != "dv":
            arrive(sent)


@Kernel
@gluon.jit(do_not_specialize=["T", "N", "H"])
def _chain(
    q_tiles, k_tiles, g_tiles, v_tiles, m_tiles, p_tiles, out_tiles, dv_tiles, state_tiles,
    p, beta, totals, falls, start, final, T, N, H,
    ADVANCE: gl.constexpr, SCALE: gl.constexpr, STARTED: gl.constexpr, KEEP: gl.constexpr, LATE: gl.constexpr,
    MILD: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One pass over the chunks of one head of one sequence."""
    STAGES: gl.constexpr = 2
    K: gl.constexpr = k_tiles.block_shape[2]
    WIDE: gl.constexpr = K // _C
    DTYPE: gl.constexpr = k_tiles.dtype
    ROOM: gl.constexpr = 2 if MODE == "dv" and g_tiles.dtype.primitive_bitwidth == 16 else 1
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, K], k_tiles.layout)
    if MODE == "o":
        gates = gl.allocate_shared_memory(g_tiles.dtype, [WIDE, 1, _C, _C], g_tiles.layout)
        writers = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, K], k_tiles.layout)
    else:
        gates = gl.allocate_shared_memory(g_tiles.dtype, [STAGES * ROOM, 1, _C, K], g_tiles.layout)
        writers = keys
    values = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, 1, _C, _C], v_tiles.layout)
    inverses = gl.allocate_shared_memory(DTYPE, [STAGES, _C, _C], m_tiles.layout)
    faders = gl.allocate_shared_memory(gl.float32, [STAGES, K], flat)
    strengths = gl.allocate_shared_memory(gl.float32, [STAGES, _C], flat)
    queries = keys
    squares = inverses
    faded = inverses
    outs = values
    olds = inverses
    if MODE != "states":
        queries = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, K], q_tiles.layout)
        squares = gl.allocate_shared_memory(DTYPE, [STAGES, _C, _C], p_tiles.layout)
    if MODE == "o":
        faded = gl.allocate_shared_memory(DTYPE, [_C, K], p_tiles.layout)
    else:
        olds = gl.allocate_shared_memory(DTYPE, [WIDE, _C, K], state_tiles.layout)
    if MODE != "dv":
        outs = gl.allocate_shared_memory(DTYPE, [WIDE, 1, _C, _C], out_tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scaled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # A, Y and Q are there
    paired = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # P is there
    logged = gl.allocate_shared_memory(gl.int64, [WIDE, 1], mbarrier.MBarrierLayout())  # logs are there
    read = gl.allocate_shared_memory(gl.int64, [WIDE, 1], mbarrier.MBarrierLayout())  # and have been read
    kept = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # states are in their tiles
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # and have left
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # outputs are in their tiles
    sent = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # and have left
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=WIDE + 1 if KEEP or MODE == "dv" else WIDE)
        mbarrier.init(scaled.index(stage), count=1)
        mbarrier.init(paired.index(stage), count=1)
    for part in gl.static_range(WIDE):
        mbarrier.init(logged.index(part), count=1)
        mbarrier.init(read.index(part), count=1)
    mbarrier.init(kept, count=WIDE)
    mbarrier.init(left, count=1)
    mbarrier.init(done, count=WIDE)
    mbarrier.init(sent, count=1)
    published()
    tiles = (q_tiles, k_tiles, g_tiles, v_tiles, m_tiles, p_tiles, out_tiles, dv_tiles, state_tiles)
    numbers = (p, beta, totals, falls)
    stages = (queries, keys, writers, gates, values, inverses, squares)
    spots = (strengths, faders, faded)
    bars = (filled, freed, scaled, paired, logged, read, kept, left, done, sent)
    ends = (start, final)
    sizes = (T, N, H)
    if WIDE == 2:
        gl.warp_specialize(
            [
                (_go, (0, outs, olds, spots, stages, bars, ends, sizes, WIDE, ROOM, STARTED, MODE)),
                (_go, (1, outs, olds, spots, stages, bars, ends, sizes, WIDE, ROOM, STARTED, MODE)),
                (_scale, (numbers, stages, spots, bars, sizes, ROOM, LATE, MILD, MODE)),
                (_feed, (tiles, stages, bars, sizes, WIDE, ROOM, MODE)),
                (_carry, (tiles, outs, olds, stages, bars, sizes, WIDE, ROOM, KEEP, MODE)),
            ],
            [4, 4, 1, 1],
            [ADVANCE, SCALE, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_go, (0, outs, olds, spots, stages, bars, ends, sizes, WIDE, ROOM, STARTED, MODE)),
                (_scale, (numbers, stages, spots, bars, sizes, ROOM, LATE, MILD, MODE)),
                (_feed, (tiles, stages, bars, sizes, WIDE, ROOM, MODE)),
                (_carry, (tiles, outs, olds, stages, bars, sizes, WIDE, ROOM, KEEP, MODE)),
            ],
            [4, 1, 1],
            [SCALE, 24, 24],
        )
    retire(filled)
    retire(freed)
    retire(scaled)
    retire(paired)
    retire(logged)
    retire(read)
    retire(kept)
    retire(left)
    retire(done)
    retire(sent)


# ---- launches --------------------------------------------------------------------------------------------------------

# By mode the registers a thread of the warpgroups once they part ways; at launch all have the same.
_REGISTERS = {
    "o": {"ADVANCE": 176, "SCALE": 136},
    "states": {"ADVANCE": 176, "SCALE": 136},
    "dv": {"ADVANCE": 200, "SCALE": 88},
}


def inverses(k: Tensor, g: Tensor, beta: Tensor, m: Tensor, falls: Tensor, late: bool, mild: float) -> None:
    """M (slots, H, 64, 64) of the mild chunks and falls (slots, H, K / 64): the least totals of blocks of channels."""
    b, t, h, d = k.shape
    n = cdiv(t, 64)
    _invert[(b * n * h,)](
        token_tiles(k, d), token_tiles(g, d), matrix_tiles(m), aligned(beta), falls, t, n, h,
        LATE=late, MILD=mild, num_warps=4,
    )  # fmt: skip


def chain(
    mode: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, matrices: list[Tensor], falls: Tensor,
    start: Tensor | None, final: Tensor, out: Tensor, late: bool, mild: float, keep: bool = False,
    totals: Tensor | None = None, dv: Tensor | None = None, states: Tensor | None = None,
) -> None:  # fmt: skip
    """One pass over dense sequences that `hopper.fits`, as many value heads as key heads.

    q, k (B, T, H, K), v and out (B, T, H, V), g like k, beta (B, T, H), matrices M and P (slots, H, 64, 64), falls as
    above, totals (slots, H, K), start and final (B, H, V, K) float32, states (slots, H, V, K). "o": o into `out`, with
    `keep` P of mild chunks; "states": u into `out`, X into `states`, totals and falls; "dv": v is do, start is dfinal,
    final receives dstart, `out` r, `states` dX'.
    """
    b, t, h, d = k.shape
    m, p = matrices
    _chain[(b * h,)](
        token_tiles(q, d), token_tiles(k, d), token_tiles(g, 64 if mode == "o" else d), token_tiles(v, 64),
        matrix_tiles(m), matrix_tiles(p),
        token_tiles(out, 64), token_tiles(out if dv is None else dv, 64),
        matrix_tiles(m) if states is None else matrix_tiles(states, 64), p, aligned(beta),
        falls if totals is None else totals, falls, final if start is None else aligned(start), final,
        t, cdiv(t, 64), h, STARTED=start is not None, KEEP=keep, LATE=late, MILD=mild, MODE=mode,
        maxnreg=128, num_warps=4, **_REGISTERS[mode],
    )  # fmt: skip
