"""The backward of the gated delta rule on Hopper: behind the states of all chunks (`hopper_states`) a pass backward for
the gradients.

In a chunk of 64 tokens with first state X (V x K), strengths b, cumulative log gates G, D_ij = exp(G_i - G_j), i >= j:
    L = strict(K K^T * D)      W = (I + L b)^-1      P = lower(Q K^T * D)
    w = W (V - e^G (K X^T))    u = b w               X' = e^G_last X + (e^(G_last - G) u)^T K
and backwards, from do and dX':
    du = P^T do + e^(G_last - G) (K dX'^T)           s = W^T (b du)
    dX = e^G_last dX' + (e^G do)^T Q - (e^G s)^T K
    A = (do w^T) * D           E = strict((s w^T) * D)
    dq = e^G (do X) + (A b) K                        dv = s
    Y = e^(G_last - G) (w dX') + A^T Q - E^T K       db = k . Y
    dk = b Y - (E b) K - e^G (s X)
    dg_t = sum_(i >= t) (q_i . dq_i + k_i . dk_i - 2 b_i db_i) + <X', dX'>
A gradient of a token is complete within its chunk, so one program per head walks the chunks from the last with dX in
registers and writes every gradient once: no atomics, one order of sums. W has b on its columns: no division.
Rounding: what cancels in dg cancels in rounded numbers too. b = p m, p a power of two, |m| in [1, 2): p k is exact in
16 bit (b k is not: with near-parallel keys its rounding was most of dg's error), m goes with the columns of A and E and
the rows of Y, rounded once for both sides of every pair of tokens (A m (p k) in dq, (p k) . (A m)^T Q in dg),
db = k . (m Y) / m, and <X', dX'> is e^G_last <X, dX'> plus what the chunk wrote.
Memory: X of every chunk; w lies in dv until s takes its place.

Two strengths (Comba), c of writes and b of erases, are the same with c / b V in the place of V, b held away from zero:
    dv = c / b s        dc = v . s / b        db = k . (-(E b) K - e^G (s X)) / b
All that an erase's key receives has the factor b, s has it too: nothing cancels before b is divided out, which k . dk
less k . b Y would.

Where of n tokens the last alone is read, q, do, dq and the rows of P and A are there for 64 / n tokens of a chunk, too
few rows for a warpgroup's product: A and dq are made transposed,
    A^T = (w do^T) * D^T        dq^T = X^T (e^G do)^T + K^T (A b)^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.kernels.common.bulk import aligned, matrix_tiles, token_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
    barrier,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.warpgroup import add, apart, published, retire, segment
from axes.kernels.scalar import hopper_states

_SIZES = ["T", "S", "L", "N", "H"]  # one kernel for all of them


# ---- gradients -----------------------------------------------------------------------------------------------------


@gluon.jit
def _fetch(source, at, bar, tile, wanted):
    """Start a copy into a tile; the barrier counts its bytes."""
    async_load(source, at, bar, reinterpret(tile, source.dtype, source.block_type.shape, source.layout), pred=wanted)


@gluon.jit
def _send(target, at, tile):
    """Start a copy out of a tile."""
    async_store(target, at, reinterpret(tile, target.dtype, target.block_type.shape, target.layout))


@gluon.jit
def _dv_tile(solve2, D: gl.constexpr):
    """(C, D) numbers where W is, or W and P."""
    C: gl.constexpr = solve2.shape[1]
    if D == C:
        return solve2.index(0)
    else:
        return reinterpret(solve2, solve2.dtype, [C, D], solve2.layout)


@gluon.jit
def _scale(strength):
    """m of strengths p m: 1 <= m < 2, p a power of two, negative or zero as the strength is."""
    return ((strength.to(gl.int32, bitcast=True) & 0x7FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _power(strength):
    """p of strengths p m."""
    return (strength.to(gl.int32, bitcast=True) & -0x800000).to(gl.float32, bitcast=True)


@gluon.jit
def _own(x, C: gl.constexpr, D: gl.constexpr):
    """Sums of a (C, D) product over the columns that a thread holds: (C, D / 64, 4), no exchange between threads."""
    return gl.sum(gl.sum(gl.reshape(x, [C, D // 64, 8, 4, 2]), 4), 2)


@gluon.jit
def _barrier():
    """A barrier for one arrival, or for the bytes of copies."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def _copies(
    q, k, v, w, do, x, m, p, dq_out, dk_out, dv_out,
    keys2, douts2, queries1, wrote1, state1, solve2, scores1, chain1, strong1,
    near, solve, middle, valued, late, solved, taken, sent, done, S, L, N, H, TWO: gl.constexpr,
):  # fmt: skip
    """One warp: every copy between memory and tiles, in the order in which the products need and free them."""
    C: gl.constexpr = keys2.shape[1]
    D: gl.constexpr = keys2.shape[2]
    TILE: gl.constexpr = C * D * 2
    READS: gl.constexpr = queries1.shape[1]
    EVERY: gl.constexpr = C // READS
    bh = gl.program_id(0)
    b, first = segment(bh // H, S, L)
    column = (bh % H) * D
    for step in range(-1, N):
        n = N - 1 - step
        slot = bh * N + n
        turn = step & 1
        more = n > 0
        now = first + n * C
        ahead = now - C
        mbarrier.expect(near.index(1 - turn), TILE + TILE // EVERY, pred=more)
        _fetch(k, [b, ahead, column], near.index(1 - turn), keys2.index(1 - turn), more)
        _fetch(do, [b, ahead // EVERY, column], near.index(1 - turn), douts2.index(1 - turn), more)
        mbarrier.wait(solved, turn, pred=step >= 0)
        if TWO:
            if step >= 0:
                _send(dv_out, [b, now, column], _dv_tile(solve2, D))
            store_wait(0)  # W and P come where it stands
        elif step >= 0:
            _send(dv_out, [b, now, column], chain1.index(0))
        mbarrier.expect(solve, (C + READS) * C * 2, pred=more)
        _fetch(m, [(slot - 1) * C, 0], solve, solve2.index(0), more)
        _fetch(p, [(slot - 1) * READS, 0], solve, scores1.index(scores1.shape[0] - 1), more)
        store_wait(0)
        mbarrier.arrive(sent, count=1, pred=step >= 0)
        mbarrier.wait(taken, turn, pred=step >= 0)
        mbarrier.expect(middle, TILE, pred=more)
        _fetch(w, [b, ahead, column], middle, wrote1.index(0), more)
        mbarrier.wait(done, turn, pred=step >= 0)
        if step >= 0:
            _send(dq_out, [b, now // EVERY, column], douts2.index(turn))
            _send(dk_out, [b, now, column], keys2.index(turn))
        if TWO:
            mbarrier.expect(valued, TILE, pred=more)
            _fetch(v, [b, ahead, column], valued, strong1.index(0), more)
        mbarrier.expect(late, TILE // EVERY + D * D * 2, pred=more)
        _fetch(q, [b, ahead // EVERY, column], late, queries1.index(0), more)
        _fetch(x, [(slot - 1) * D, 0], late, state1.index(0), more)
        store_wait(0)


@gluon.jit
def _sums(
    sums, asked, done, counted, beta, g, dbeta, dg, dwrite, T, S, L, N, H,
    GATED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """One warp: the gradients of strengths and gates, from sums over keys that the products' warps left."""
    C: gl.constexpr = sums.shape[1]
    PARTS: gl.constexpr = sums.shape[2]
    READS: gl.constexpr = asked.shape[0]
    EVERY: gl.constexpr = C // READS
    each: gl.constexpr = gl.BlockedLayout([1, EVERY], [32, 1], [1, 1], [1, 0])
    pair: gl.constexpr = gl.BlockedLayout([2, PARTS], [32, 1], [1, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    bh = gl.program_id(0)
    b, first = segment(bh // H, S, L)
    h = bh % H
    for step in range(N):
        token = first + (N - 1 - step) * C + gl.arange(0, C, line)
        there = (b * T + token).to(gl.int64) * H + h
        log = gl.load(g + there, mask=token < T, other=0.0)
        mbarrier.wait(done, step & 1)
        dstrength = gl.convert_layout(gl.sum(sums.index(0).load(pair), 1), line)
        strength = gl.load(beta + there, mask=token < T, other=1.0)
        if TWO:  # of the erase alone: k . what its key receives, in which every number has the factor b
            strength = apart(strength)
            dstrength = dstrength / strength
            by_value = gl.convert_layout(gl.sum(sums.index(3).load(pair), 1), line)
            gl.store(dwrite + there, by_value / strength, mask=token < T)
        else:
            dstrength /= _scale(strength)
        gl.store(dbeta + there, dstrength, mask=token < T)
        if GATED:
            change = gl.convert_layout(gl.sum(sums.index(1).load(pair), 1), line)
            if EVERY > 1:
                by_read = asked.load(gl.SliceLayout(1, each))[:, None]
                last = gl.arange(0, EVERY, gl.SliceLayout(0, each))[None, :] == EVERY - 1
                by_read = gl.where(last, by_read, 0.0)
                change += gl.convert_layout(gl.reshape(by_read, [C]), line)
            dlog = gl.associative_scan(change, 0, add, reverse=True)
            dlog += gl.sum(gl.sum(sums.index(2).load(pair), 1), 0)
            gl.store(dg + there, gl.where(log > -100.0, dlog, 0.0), mask=token < T)
        barrier()
        mbarrier.arrive(counted, count=1)


@gluon.jit
def _products(
    keys2, douts2, queries1, wrote1, state1, solve2, scores1, chain1, later1, strong1, reads1, erases1,
    near, solve, middle, valued, late, solved, taken, sent, done,
    sums, asked, counted, rows, dfinal, dstart, write, T, S, L, N, H,
    GATED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """Every product. In registers: dX, in float32. Tiles are rewritten in place once their last reader is done.

    Up to four products are under way while the elementwise work of earlier ones is done; each is waited for by count.
    """
    C: gl.constexpr = keys2.shape[1]
    D: gl.constexpr = keys2.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = WARPS // 4
    half: gl.constexpr = keys2.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, D // ACROSS, 16])  # (C, D)
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, C // ACROSS, 16])  # (C, C)
    full: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # (D, D)
    READS: gl.constexpr = queries1.shape[1]
    EVERY: gl.constexpr = C // READS
    reading: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, READS // ACROSS, 16])  # (C, READS)
    tall: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, READS, 16])  # (D, READS)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])  # (READS, D)
    down: gl.constexpr = gl.SliceLayout(1, wide)
    bh = gl.program_id(0)
    b, first = segment(bh // H, S, L)
    block = gl.arange(0, D, gl.SliceLayout(1, full))[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, full))[None, :]
    public = bh.to(gl.int64) * (D * D)
    grad = gl.load(dfinal + public + block)
    later1.index(0).store(grad.to(half))
    published()
    i = gl.arange(0, C, gl.SliceLayout(1, square))
    j = gl.arange(0, C, gl.SliceLayout(0, square))
    for step in range(N):
        n = N - 1 - step
        # a zero that the compiler cannot see: addresses of tiles stay out of registers between chunks
        zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)
        side = (step & 1) + zero
        turn = step & 1
        keys = keys2.index(side)
        douts = douts2.index(side)
        queries = queries1.index(zero)
        wrote = wrote1.index(zero)
        state = state1.index(zero)
        inverse = solve2.index(zero)
        scores = scores1.index(scores1.shape[0] - 1 + zero)
        later = later1.index(zero)
        strong = strong1.index(zero)
        chain = chain1.index(zero)
        reads = reads1.index(zero)
        erases = erases1.index(zero)
        zero_wide = gl.zeros([C, D], gl.float32, wide)
        zero_square = gl.zeros([C, C], gl.float32, square)
        slot = bh * N + n
        table = rows + slot.to(gl.int64) * (3 * C)
        run = gl.load(table + gl.arange(0, C, down))
        strength = gl.load(table + C + gl.arange(0, C, down))
        run_i = gl.load(table + i)
        run_j = gl.load(table + 2 * C + j)  # without log m: the decays below are m times decays
        total = gl.load(table + C - 1)
        if EVERY > 1:
            before = gl.arange(0, C, gl.SliceLayout(1, reading))
            at = gl.arange(0, READS, gl.SliceLayout(0, reading)) * EVERY + (EVERY - 1)
            span = gl.load(table + at)[None, :] - gl.load(table + 2 * C + before)[:, None]
            fade = gl.exp(gl.where(at[None, :] >= before[:, None], span, float("-inf")))
            reads_at = gl.arange(0, READS, gl.SliceLayout(1, flat)) * EVERY + (EVERY - 1)
            read_reach = gl.exp(gl.load(table + reads_at))

        # b du; do w^T
        mbarrier.wait(near.index(side), (step >> 1) & 1)
        du = warpgroup_mma(keys, later.permute((1, 0)), zero_wide, use_acc=False, is_async=True)
        mbarrier.wait(solve, turn)
        direct = warpgroup_mma(scores.permute((1, 0)), douts, zero_wide, use_acc=False, is_async=True)
        mbarrier.wait(middle, turn)
        if EVERY == 1:
            a = warpgroup_mma(douts, wrote.permute((1, 0)), zero_square, use_acc=False, is_async=True)
        else:
            zero_reading = gl.zeros([C, READS], gl.float32, reading)
            a = warpgroup_mma(wrote, douts.permute((1, 0)), zero_reading, use_acc=False, is_async=True)
        reach = gl.exp(run)
        tail = gl.exp(total - run)
        power = _power(strength)
        if not TWO:  # else the values are there
            strong.store((power[:, None] * keys.load(wide).to(gl.float32)).to(half))
        du, direct = warpgroup_mma_wait(1, deps=[du, direct])
        du = strength[:, None] * (tail[:, None] * du + direct)
        mark = _scale(strength) * tail
        chain.store(du.to(half))
        published()

        # s; w dX'; A
        s = warpgroup_mma(inverse.permute((1, 0)), chain, zero_wide, use_acc=False, is_async=True)
        decay = gl.exp(gl.where(i[:, None] >= j[None, :], run_i[:, None] - run_j[None, :], float("-inf")))
        a = warpgroup_mma_wait(1, deps=[a])
        if EVERY == 1:
            reads.store((a * decay).to(half))
            dout = (reach[:, None] * douts.load(wide).to(gl.float32)).to(half)
        else:
            reads.permute((1, 0)).store((a * fade).to(half))
            dout = (read_reach[:, None] * douts.load(flat).to(gl.float32)).to(half)
        if TWO:
            token = gl.arange(0, C, down) + (n * C + first)
            place = (b * T + token).to(gl.int64) * H + bh % H
            ratio = gl.load(write + place, mask=token < T, other=0.0) / strength  # which is `apart`
        s = warpgroup_mma_wait(0, deps=[s])
        if TWO:
            mbarrier.wait(valued, turn)
            dwrite = _own(strong.load(wide).to(gl.float32) * s, C, D)
        y = warpgroup_mma(wrote, later, zero_wide, use_acc=False, is_async=True)
        barrier()
        if TWO:  # dv where W and P were, p k where v was
            _dv_tile(solve2, D).store((ratio[:, None] * s).to(half))
            strong.store((power[:, None] * keys.load(wide).to(gl.float32)).to(half))
        douts.store(dout)
        chain.store(s.to(half))
        published()
        s = (-reach[:, None] * s).to(half)
        mbarrier.arrive(solved, count=1)

        # E; m Y without E, dX without s; what the chunk wrote meets dX'
        e = warpgroup_mma(chain, wrote.permute((1, 0)), zero_square, use_acc=False, is_async=True)
        y = warpgroup_mma_wait(1, deps=[y])
        y = mark[:, None] * y
        if GATED:
            passed = _own(strong.load(wide).to(gl.float32) * y, C, D)
        mbarrier.wait(late, turn)
        y = warpgroup_mma(reads.permute((1, 0)), queries, y, is_async=True)
        if GATED:
            grad = grad * gl.exp(total)
        grad = warpgroup_mma(douts.permute((1, 0)), queries, grad, is_async=True)
        e = warpgroup_mma_wait(2, deps=[e])
        erases.store(gl.where(i[:, None] > j[None, :], -e * decay, 0.0).to(half))
        mbarrier.wait(sent, turn)
        barrier()
        chain.store(s)
        published()
        mbarrier.arrive(taken, count=1)

        # the rest of m Y and of dX; m db, and -(p k + p k as it was stored) . m Y for dg
        y = warpgroup_mma(erases.permute((1, 0)), keys, y, is_async=True)
        grad = warpgroup_mma(chain.permute((1, 0)), keys, grad, is_async=True)
        y = warpgroup_mma_wait(1, deps=[y])
        key = keys.load(wide).to(gl.float32)
        dstrength = _own(key * y, C, D)
        change = dstrength
        if GATED:
            change = -_own((power[:, None] * key + strong.load(wide).to(gl.float32)) * y, C, D)
        y = power[:, None] * y

        # dq, dk; <X, dX'>; dX is the next dX'
        if EVERY == 1:
            dq = warpgroup_mma(douts, state, zero_wide, use_acc=False, is_async=True)
            dq = warpgroup_mma(reads, strong, dq, is_async=True)
        else:
            zero_tall = gl.zeros([D, READS], gl.float32, tall)
            dq = warpgroup_mma(state.permute((1, 0)), douts.permute((1, 0)), zero_tall, use_acc=False, is_async=True)
            dq = warpgroup_mma(strong.permute((1, 0)), reads.permute((1, 0)), dq, is_async=True)
        if TWO:  # what comes from erases by itself: it is as small as their strengths
            dk = warpgroup_mma(erases, strong, zero_wide, use_acc=False, is_async=True)
        else:
            dk = warpgroup_mma(erases, strong, y, is_async=True)
        dk = warpgroup_mma(chain, state, dk, is_async=True)
        if GATED:
            for part in gl.static_range(D // C):
                before = state.slice(part * C, C).load(wide).to(gl.float32)
                passed += gl.exp(total) * _own(before * later.slice(part * C, C).load(wide).to(gl.float32), C, D)
            barrier()
        grad = warpgroup_mma_wait(4, deps=[grad])
        later.store(grad.to(half))
        dq = warpgroup_mma_wait(2, deps=[dq])
        if GATED:
            if EVERY == 1:
                change += _own(queries.load(wide).to(gl.float32) * dq, C, D)
            else:
                by_read = gl.sum(queries.permute((1, 0)).load(tall).to(gl.float32) * dq, 0)
        dk = warpgroup_mma_wait(0, deps=[dk])
        if TWO:
            dstrength = _own(keys.load(wide).to(gl.float32) * dk, C, D)
            dk += y
        if GATED:
            change += _own(keys.load(wide).to(gl.float32) * dk, C, D)
        mbarrier.wait(counted, 1 - turn, pred=step > 0)
        barrier()
        sums.index(0).store(gl.sum(dstrength, 2))
        if TWO:
            sums.index(3).store(gl.sum(dwrite, 2))
        if GATED:
            sums.index(1).store(gl.sum(change, 2))
            sums.index(2).store(gl.sum(passed, 2))
            if EVERY > 1:
                asked.store(by_read)
        if EVERY == 1:
            douts.store(dq.to(half))
        else:
            douts.permute((1, 0)).store(dq.to(half))
        keys.store(dk.to(half))
        published()
        mbarrier.arrive(done, count=1)
    gl.store(dstart + public + block, grad)


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def _gradients(
    q, k, v, w, do, x, m, p, dq_out, dk_out, dv_out,
    rows, beta, g, dfinal, dstart, dbeta, dg, write, dwrite, T, S, L, N, H,
    D: gl.constexpr, GATED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """All gradients of one head of a unit, chunks from the last: warps that multiply, one that sums, one that copies.

    Copies have a warp of their own also because ptxas 12.8 mixes up the uniform registers of an elected thread's copies
    with those of matrix products in the same code.
    """
    C: gl.constexpr = 64
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    keys2 = gl.allocate_shared_memory(q.dtype, [2, C, D], swizzled)  # k, then dk
    READS: gl.constexpr = q.block_shape[1]
    douts2 = gl.allocate_shared_memory(q.dtype, [2, READS, D], swizzled)  # do, then e^G do, then dq
    queries1 = gl.allocate_shared_memory(q.dtype, [1, READS, D], swizzled)
    wrote1 = gl.allocate_shared_memory(q.dtype, [1, C, D], swizzled)
    state1 = gl.allocate_shared_memory(q.dtype, [1, D, D], swizzled)
    solve2 = gl.allocate_shared_memory(q.dtype, [1 + (READS == C), C, C], swizzled)  # W, P, then dv of two strengths
    if READS == C:
        scores1 = solve2
    else:
        scores1 = gl.allocate_shared_memory(q.dtype, [1, READS, C], swizzled)
    chain1 = gl.allocate_shared_memory(q.dtype, [1, C, D], swizzled)  # b du, then s, then -e^G s
    later1 = gl.allocate_shared_memory(q.dtype, [1, D, D], swizzled)  # dX'
    strong1 = gl.allocate_shared_memory(q.dtype, [1, C, D], swizzled)  # v of two strengths, then p k
    reads1 = gl.allocate_shared_memory(q.dtype, [1, READS, C], swizzled)  # A m
    erases1 = gl.allocate_shared_memory(q.dtype, [1, C, C], swizzled)  # -E m
    near = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # k, do are there
    mbarrier.init(near.index(0), count=1)
    mbarrier.init(near.index(1), count=1)
    solve = _barrier()  # W, P are there
    middle = _barrier()  # w is there
    valued = _barrier()  # v is there
    late = _barrier()  # q, X are there
    solved = _barrier()  # W, P are free and s is in its tile
    sent = _barrier()  # s has left, or dv
    taken = _barrier()  # w is free
    done = _barrier()  # q, X are free and dq, dk are in their tiles
    counted = _barrier()  # the sums are free
    sums = gl.allocate_shared_memory(gl.float32, [3 + TWO, C, D // 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    asked = gl.allocate_shared_memory(gl.float32, [READS], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # q . dq of reads
    published()
    gl.warp_specialize(
        [
            (_products, (
                keys2, douts2, queries1, wrote1, state1, solve2, scores1, chain1, later1, strong1, reads1, erases1,
                near, solve, middle, valued, late, solved, taken, sent, done,
                sums, asked, counted, rows, dfinal, dstart, write, T, S, L, N, H, GATED, TWO,
            )),
            (_sums, (sums, asked, done, counted, beta, g, dbeta, dg, dwrite, T, S, L, N, H, GATED, TWO)),
            (_copies, (
                q, k, v, w, do, x, m, p, dq_out, dk_out, dv_out,
                keys2, douts2, queries1, wrote1, state1, solve2, scores1, chain1, strong1,
                near, solve, middle, valued, late, solved, taken, sent, done, S, L, N, H, TWO,
            )),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
    retire(near)
    retire(solve)
    retire(middle)
    retire(valued)
    retire(late)
    retire(solved)
    retire(sent)
    retire(taken)
    retire(done)
    retire(counted)


# ---- host ----------------------------------------------------------------------------------------------------------


_WARPS = {64: 4, 128: 8}  # that multiply, by width


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, start: Tensor | None,
    m: Tensor, p: Tensor, do: Tensor, dfinal: Tensor, segments: int = 1, length: int | None = None,
    write: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients (dq, dk, dv, dbeta, dg, dstart, dwrite) of the gated delta rule from those of its outputs.

    q, k, v, do (B, T, H, D) in bf16 or fp16, D 64 or 128; beta, g (B, T, H) float32, g log gates or None (dg is then
    empty); start (units, H, D, D) float32 or None; m = W and p = P (units, H, N, 64, 64) as the forward saved them;
    dfinal (units, H, D, D) float32. q and do may be of T / n tokens, each the last of n, and P of 64 / n rows. write:
    strengths of writes, like beta, which is then of erases alone; or None, and dwrite is. All contiguous. Units are
    batch entries, or their `segments` of `length` tokens.
    """
    b, t, h, d = k.shape
    units, _, n = m.shape[:3]
    reads = p.shape[3]
    sizes = (t, segments, t if length is None else length, n, h)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dbeta, dstart = torch.empty_like(beta), torch.empty_like(dfinal)
    gated = g is not None
    dg = torch.empty_like(beta) if gated else beta.new_empty(0)
    k, v, beta, dfinal = aligned(k), aligned(v), aligned(beta), aligned(dfinal)
    gate, strong = beta if g is None else aligned(g), beta if write is None else aligned(write)
    dwrite = None if write is None else torch.empty_like(beta)
    written = dv  # w of a chunk is read before that chunk's dv is written
    states, rows = hopper_states.states(
        k, v, beta, None if g is None else gate, None if write is None else strong, start, m, written, *sizes[1:3]
    )
    _gradients[(units * h,)](
        token_tiles(q, d, reads), token_tiles(k, d), token_tiles(v, d), token_tiles(written, d),
        token_tiles(do, d, reads), matrix_tiles(states), matrix_tiles(m), matrix_tiles(p),
        token_tiles(dq, d, reads), token_tiles(dk, d), token_tiles(dv, d),
        rows, beta, gate, dfinal, dstart, dbeta, dg, strong, beta if dwrite is None else dwrite, *sizes,
        D=d, GATED=gated, TWO=write is not None, num_warps=_WARPS[d],
    )  # fmt: skip
    return dq, dk, dv, dbeta, dg, dstart, dwrite
