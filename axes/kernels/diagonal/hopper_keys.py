"""dq, dk and dg of the mild chunks of `diagonal` on Hopper: `diagonal._key` without DEEP, every product a warpgroup's.

One program for 64 channels of one chunk of one head; all that it reads is under way before it computes, and two of them
share a processor. In the letters of `diagonal`, with r = q e^G and w = k e^-G, or k (1 - e^g) for k where AVERAGE, all
(C, 64) tiles in one layout:
    dP = lower(do v^T)      dq = e^G (do S + dP w)      m = e^(G_last - G) (v dS')      dk = m + e^-G (dP^T r)
Sums over tokens are products of a triangle of ones with two 16-bit summands, as in `channels`.
"""

from __future__ import annotations

from torch import Tensor

from axes.kernels.common.bulk import matrix_tiles, token_tiles
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
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.warpgroup import product_layout, published, retire, times
from axes.kernels.diagonal.hopper import _power, complement

_C = gl.constexpr(64)  # tokens of a chunk, channels of a program


@gluon.jit
def square(tile, DTYPE: gl.constexpr, V: gl.constexpr, PLACE: gl.constexpr = 0):
    """A square (C, C) of 16 bits in the place of a tile of C V numbers: where its first C C lie, or the second."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return reinterpret(tile, DTYPE, [V // _C, _C, _C], layout).index(PLACE)


@gluon.jit
def sum_until(triangle, x, high, low):
    """Sums of x (C, C) over tokens 0..i, as products of bfloat16: x is taken to 16 bits and more."""
    first = x.to(gl.bfloat16)
    high.store(first)
    low.store((x - first.to(gl.float32)).to(gl.bfloat16))
    published()
    out = times(triangle, high, _C)
    return warpgroup_mma_wait(0, [warpgroup_mma(triangle, low, out, is_async=True)])


@Kernel
@gluon.jit(do_not_specialize=["N", "H"])
def _keys(
    q_tiles, k_tiles, v_tiles, do_tiles, g_tiles, state_tiles, grad_tiles, dq_tiles, dk_tiles, dg_tiles, totals, bonus,
    dbonus, N, H,
    K: gl.constexpr, MILD: gl.constexpr, AVERAGE: gl.constexpr, BONUS: gl.constexpr,
):  # fmt: skip
    """dq, dk and dg of 64 channels of one mild chunk; nothing of another. AVERAGE and BONUS exclude each other."""
    PARTS: gl.constexpr = K // _C
    V: gl.constexpr = v_tiles.block_shape[2]
    DTYPE: gl.constexpr = q_tiles.dtype
    LOGS: gl.constexpr = g_tiles.dtype
    pid = gl.program_id(0)
    part = pid % PARTS
    h = pid // PARTS % H
    slot = pid // (PARTS * H)
    b, n = slot // N, slot % N
    matrix = slot * H + h
    layout: gl.constexpr = product_layout(_C)
    across: gl.constexpr = gl.SliceLayout(0, layout)
    douts = gl.allocate_shared_memory(DTYPE, [1, _C, V], do_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [1, _C, V], v_tiles.layout)
    states = gl.allocate_shared_memory(DTYPE, [V, _C], state_tiles.layout)
    grads = gl.allocate_shared_memory(DTYPE, [V, _C], grad_tiles.layout)
    gates = gl.allocate_shared_memory(LOGS, [1, _C, _C], g_tiles.layout)
    queries = gl.allocate_shared_memory(DTYPE, [1, _C, _C], q_tiles.layout)
    keys = gl.allocate_shared_memory(DTYPE, [1, _C, _C], k_tiles.layout)
    tokens = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tokens, count=1)
    mbarrier.init(ends, count=1)
    mbarrier.init(own, count=1)
    published()
    column = h * K + part * _C
    mbarrier.expect(tokens, 4 * _C * V)
    async_load(do_tiles, [b, n * _C, h * V], tokens, douts)
    async_load(v_tiles, [b, n * _C, h * V], tokens, values)
    mbarrier.expect(ends, 4 * V * _C)
    async_load(state_tiles, [matrix * V, part * _C], ends, states)
    async_load(grad_tiles, [matrix * V, part * _C], ends, grads)
    mbarrier.expect(own, _C * _C * (4 + LOGS.primitive_bitwidth // 8))
    async_load(g_tiles, [b, n * _C, column], own, gates)
    async_load(q_tiles, [b, n * _C, column], own, queries)
    async_load(k_tiles, [b, n * _C, column], own, keys)
    whole: gl.constexpr = gl.BlockedLayout([K // 32], [32], [4], [0])
    least = gl.min(gl.load(totals + matrix.to(gl.int64) * K + gl.arange(0, K, layout=whole)), 0)
    if least >= -MILD:
        i = gl.arange(0, _C, layout=gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, _C, layout=across)[None, :]
        total = gl.load(totals + matrix.to(gl.int64) * K + part * _C + gl.arange(0, _C, layout=across))
        dout = douts.reshape([_C, V])
        value = values.reshape([_C, V])
        mbarrier.wait(tokens, 0)
        dp = times(dout, value.permute((1, 0)), _C)
        mbarrier.wait(ends, 0)
        both = times(states.permute((1, 0)), grads, _C)  # its diagonal: sum_v S dS'
        dp = warpgroup_mma_wait(1, [dp])
        if BONUS:
            kept = gl.where(i > j, dp, 0.0).to(DTYPE)
            down = gl.sum(gl.where(i == j, dp, 0.0), 1)[:, None]  # of the bonus' own reads
        else:
            kept = gl.where(i >= j, dp, 0.0).to(DTYPE)
        dquery = times(dout, states, _C)
        moved = times(value, grads, _C)
        both = warpgroup_mma_wait(2, [both])
        last = _power(total) * gl.sum(gl.where(i == j, both, 0.0), 0)
        dquery, moved = warpgroup_mma_wait(0, [dquery, moved])
        barrier()
        # what was read by these products makes room
        scores = square(values, DTYPE, V)
        triangle = square(douts, gl.bfloat16, V)
        high = square(states, gl.bfloat16, V)
        low = square(grads, gl.bfloat16, V)
        scores.store(kept)
        triangle.store(gl.where(i >= j, 1.0, 0.0).to(gl.bfloat16))
        mbarrier.wait(own, 0)
        log = gates.reshape([_C, _C]).load(layout).to(gl.float32)  # none at the floor: that chunk would not be mild
        run = sum_until(triangle, log, high, low)
        barrier()
        grow, fade = _power(run), _power(-run)
        if BONUS:
            grow = _power(run - log)
        reader = square(states, DTYPE, V)
        writer = square(grads, DTYPE, V)
        reader.store((queries.reshape([_C, _C]).load(layout).to(gl.float32) * grow).to(DTYPE))
        key = keys.reshape([_C, _C]).load(layout).to(gl.float32)
        if AVERAGE:
            key = key * complement(log)
        writer.store((key * fade).to(DTYPE))
        published()
        dquery = warpgroup_mma(scores, writer, dquery, is_async=True)
        dkey = times(scores.permute((1, 0)), reader, _C)
        moved = fade * _power(total)[None, :] * moved
        dquery, dkey = warpgroup_mma_wait(0, [dquery, dkey])
        barrier()
        dquery = grow * dquery
        dkey = fade * dkey
        # sums from a token on are those of the chunk less those before it
        plain = keys.reshape([_C, _C]).load(layout).to(gl.float32)
        key = plain
        if AVERAGE:
            forgotten = complement(gates.reshape([_C, _C]).load(layout).to(gl.float32))
            key = plain * forgotten
        if BONUS:
            weight = gl.load(bonus + h * K + part * _C + gl.arange(0, _C, layout=across))[None, :]
            query = queries.reshape([_C, _C]).load(layout).to(gl.float32)
            keys.reshape([_C, _C]).store((dkey + moved + down * weight * query).to(DTYPE))
            queries.reshape([_C, _C]).store((dquery + down * weight * key).to(DTYPE))
            place = matrix.to(gl.int64) * K + part * _C + gl.arange(0, _C, layout=across)
            gl.store(dbonus + place, gl.sum(down * query * key, 0))
            asked = query * dquery
            change = asked - key * dkey
            moved = key * moved
            last += gl.sum(change, 0)
            change -= moved
            dlog = change - sum_until(triangle, change, high, low) + last[None, :]
            dlog -= asked  # a query's own gate comes after it
        else:
            written = dkey + moved
            if AVERAGE:  # what the gate hears of what it writes waits in its place
                gates.reshape([_C, _C]).store((written * plain * (1.0 - forgotten)).to(LOGS))
                written = written * forgotten
            keys.reshape([_C, _C]).store(written.to(DTYPE))
            change = -key * dkey
            moved = key * moved
            query = queries.reshape([_C, _C]).load(layout).to(gl.float32)
            queries.reshape([_C, _C]).store(dquery.to(DTYPE))
            change += query * dquery
            last += gl.sum(change, 0)
            change -= moved
            dlog = change - sum_until(triangle, change, high, low) + last[None, :]
        if AVERAGE:
            dlog -= gates.reshape([_C, _C]).load(layout).to(gl.float32)
        gates.reshape([_C, _C]).store(dlog.to(LOGS))
        published()
        async_store(dq_tiles, [b, n * _C, column], queries)
        async_store(dk_tiles, [b, n * _C, column], keys)
        async_store(dg_tiles, [b, n * _C, column], gates)
        store_wait(0)
    else:  # nothing may arrive after the end
        mbarrier.wait(own, 0)
        mbarrier.wait(tokens, 0)
        mbarrier.wait(ends, 0)
    retire(tokens)
    retire(ends)
    retire(own)


def keys_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, totals: Tensor, do: Tensor, states: Tensor, dstates: Tensor,
    dq: Tensor, dk: Tensor, dg: Tensor, mild: float, bonus: Tensor | None = None, dbonus: Tensor | None = None,
    average: bool = False,
) -> None:  # fmt: skip
    """Write dq, dk (as q) and dg (as g) of the mild chunks of tokens that `hopper_write.fits`, as many value heads as
    key heads, strengths one; totals, states and dstates as `hopper_diagonal` makes them."""
    (b, t, h, d_k), d_v = q.shape, v.shape[3]
    n = cdiv(t, 64)
    _keys[(b * n * h * (d_k // 64),)](
        token_tiles(q, 64), token_tiles(k, 64), token_tiles(v, d_v), token_tiles(do, d_v), token_tiles(g, 64),
        matrix_tiles(states, d_v, 64), matrix_tiles(dstates, d_v, 64), token_tiles(dq, 64), token_tiles(dk, 64),
        token_tiles(dg, 64), totals, totals if bonus is None else bonus, totals if dbonus is None else dbonus, n, h,
        K=d_k, MILD=mild, AVERAGE=average, BONUS=bonus is not None, num_warps=4,
    )  # fmt: skip
