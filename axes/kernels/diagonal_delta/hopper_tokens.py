"""The gradients of tokens in mild chunks of the delta rule under a gate per channel on Hopper, a = k.

One program for 64 channels of one chunk of one head, and for as many of its values in dbeta; all that it reads is under
way before it computes, but q, which comes where those values were. Two of them share a processor: each may take 115,712
bytes. In the letters of `diagonal_delta`, with a = k, w = k e^-G, all (C, 64) tiles in one layout:
    dP = lower(do u^T)      dA = strict(r u^T)
    dq = e^G (do X + dP w)                  da = -beta e^R (r X + dA w)         dbeta = r . v - k . e^R (r X + dA w)
    dk = da + e^(G_last - G) (u dX') + e^-G (dP^T (q e^G) - dA^T (beta k e^R))
Sums over tokens are products of a triangle of ones with two 16-bit summands, as in `channels`.
"""

from __future__ import annotations

from torch import Tensor

from axes.kernels.common.bulk import aligned, matrix_tiles, token_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
    barrier,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.warpgroup import product_layout, published, retire, times
from axes.kernels.diagonal.hopper import _power
from axes.kernels.diagonal.hopper_keys import square, sum_until
from axes.kernels.diagonal_delta.hopper_dplr import columns

_C = gl.constexpr(64)  # tokens of a chunk, channels of a program


@Kernel
@gluon.jit(do_not_specialize=["tokens", "T", "N", "H"])
def _tokens(
    q_tiles, k_tiles, v_tiles, g_tiles, do_tiles, u_tiles, r_tiles, state_tiles, grad_tiles, dq_tiles, dk_tiles,
    dg_tiles, beta, totals, dbeta, tokens, T, N, H,
    K: gl.constexpr, LATE: gl.constexpr, MILD: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 channels of one mild chunk; nothing of another. dbeta in one part a block of channels."""
    PARTS: gl.constexpr = K // _C
    V: gl.constexpr = do_tiles.block_shape[2]
    DTYPE: gl.constexpr = q_tiles.dtype
    pid = gl.program_id(0)
    part = pid % PARTS
    h = pid // PARTS % H
    slot = pid // (PARTS * H)
    b, n = slot // N, slot % N
    matrix = slot * H + h
    layout: gl.constexpr = product_layout(_C)
    down: gl.constexpr = gl.SliceLayout(1, layout)
    across: gl.constexpr = gl.SliceLayout(0, layout)
    douts = gl.allocate_shared_memory(DTYPE, [1, _C, V], do_tiles.layout)
    wrotes = gl.allocate_shared_memory(DTYPE, [1, _C, V], u_tiles.layout)
    owed = gl.allocate_shared_memory(DTYPE, [1, _C, V], r_tiles.layout)
    states = gl.allocate_shared_memory(DTYPE, [V, _C], state_tiles.layout)
    grads = gl.allocate_shared_memory(DTYPE, [V, _C], grad_tiles.layout)
    queries = gl.allocate_shared_memory(DTYPE, [1, _C, _C], q_tiles.layout)
    keys = gl.allocate_shared_memory(DTYPE, [1, _C, _C], k_tiles.layout)
    gates = gl.allocate_shared_memory(g_tiles.dtype, [1, _C, _C], g_tiles.layout)
    if V == _C:
        other = gl.allocate_shared_memory(DTYPE, [_C, _C], state_tiles.layout)
    else:
        other = square(wrotes, DTYPE, V, 1)
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(given, count=1)
    mbarrier.init(ends, count=1)
    mbarrier.init(own, count=1)
    mbarrier.init(asked, count=1)
    published()
    column = h * K + part * _C
    mbarrier.expect(given, 6 * _C * V + 2 * _C * _C)
    async_load(do_tiles, [b, n * _C, h * V], given, douts)
    async_load(u_tiles, [b, n * _C, h * V], given, wrotes)
    async_load(r_tiles, [b, n * _C, h * V], given, owed)
    async_load(v_tiles, [b, n * _C, h * V + part * _C], given, queries)  # as many values as channels, until q comes
    mbarrier.expect(ends, 4 * V * _C)
    async_load(state_tiles, [matrix * V, part * _C], ends, states)
    async_load(grad_tiles, [matrix * V, part * _C], ends, grads)
    mbarrier.expect(own, (2 + g_tiles.dtype.primitive_bitwidth // 8) * _C * _C)
    async_load(g_tiles, [b, n * _C, column], own, gates)
    async_load(k_tiles, [b, n * _C, column], own, keys)
    whole: gl.constexpr = gl.BlockedLayout([K // 32], [32], [4], [0])
    least = gl.min(gl.load(totals + matrix.to(gl.int64) * K + gl.arange(0, K, layout=whole)), 0)
    if least >= -MILD:
        token = n * _C + gl.arange(0, _C, layout=down)
        row = (b * T + token).to(gl.int64) * H + h
        column_j = gl.arange(0, _C, layout=across)
        here = token < T
        strength = -gl.load(beta + row, mask=here, other=0.0)
        total = gl.load(totals + matrix.to(gl.int64) * K + part * _C + column_j)
        i = gl.arange(0, _C, layout=down)[:, None]
        j = column_j[None, :]
        dout = douts.reshape([_C, V])
        wrote = wrotes.reshape([_C, V])
        owe = owed.reshape([_C, V])
        mbarrier.wait(given, 0)
        scores = times(dout, wrote.permute((1, 0)), _C)
        lower = times(owe, wrote.permute((1, 0)), _C)
        value = queries.reshape([_C, _C]).load(layout).to(gl.float32)
        push = gl.sum(square(owed, DTYPE, V, part).load(layout).to(gl.float32) * value, 1)
        scores, lower = warpgroup_mma_wait(0, [scores, lower])  # no copy begins beside a product
        barrier()
        mbarrier.expect(asked, 2 * _C * _C)
        async_load(q_tiles, [b, n * _C, column], asked, queries)
        mbarrier.wait(ends, 0)
        both = times(states.permute((1, 0)), grads, _C)  # its diagonal: sum_v X dX'
        inside = gl.where(i >= j, scores, 0.0).to(DTYPE)
        strict = gl.where(i > j, lower, 0.0).to(DTYPE)
        dquery = times(dout, states, _C)
        dread = times(owe, states, _C)
        moved = times(wrote, grads, _C)
        both = warpgroup_mma_wait(3, [both])
        last = _power(total) * columns(gl.where(i == j, both, 0.0))
        dquery, dread, moved = warpgroup_mma_wait(0, [dquery, dread, moved])
        barrier()
        # what was read by these products makes room
        insides = square(douts, DTYPE, V)
        stricts = square(owed, DTYPE, V)
        triangle = square(wrotes, gl.bfloat16, V)
        high = square(states, gl.bfloat16, V)
        low = square(grads, gl.bfloat16, V)
        insides.store(inside)
        stricts.store(strict)
        triangle.store(gl.where(i >= j, 1.0, 0.0).to(gl.bfloat16))
        mbarrier.wait(own, 0)
        # none at the floor: that chunk would not be mild
        log = gates.reshape([_C, _C]).load(layout).to(gl.float32)
        run = sum_until(triangle, log, high, low)
        barrier()
        grow, fade = _power(run), _power(-run)
        if LATE:
            gain = grow
        else:
            gain = _power(run - log)
        reader = square(states, DTYPE, V)
        writer = square(grads, DTYPE, V)
        mbarrier.wait(asked, 0)
        reader.store((queries.reshape([_C, _C]).load(layout).to(gl.float32) * grow).to(DTYPE))
        key = keys.reshape([_C, _C]).load(layout).to(gl.float32)
        writer.store((key * fade).to(DTYPE))
        other.store((strength[:, None] * key * gain).to(DTYPE))
        published()
        dquery = warpgroup_mma(insides, writer, dquery, is_async=True)
        dread = warpgroup_mma(stricts, writer, dread, is_async=True)
        dkey = times(insides.permute((1, 0)), reader, _C)
        dkey = warpgroup_mma(stricts.permute((1, 0)), other, dkey, is_async=True)
        moved = fade * _power(total)[None, :] * moved
        dquery, dread, dkey = warpgroup_mma_wait(0, [dquery, dread, dkey])
        barrier()
        dquery = grow * dquery
        dread = gain * dread
        key = keys.reshape([_C, _C]).load(layout).to(gl.float32)
        push -= gl.sum(key * dread, 1)
        dread = strength[:, None] * dread
        dkey = fade * dkey
        keys.reshape([_C, _C]).store((dkey + moved + dread).to(DTYPE))
        before = key * dread
        change = before - key * dkey
        query = queries.reshape([_C, _C]).load(layout).to(gl.float32)
        queries.reshape([_C, _C]).store(dquery.to(DTYPE))
        change += query * dquery
        late = key * moved
        last += columns(late)
        change -= late
        dlog = sum_until(triangle.permute((1, 0)), change, high, low) + last[None, :]  # of all tokens from this one on
        if not LATE:  # its own reader came before it
            dlog -= before
        gates.reshape([_C, _C]).store(dlog.to(g_tiles.dtype))
        gl.store(dbeta + part * tokens.to(gl.int64) * H + row, push, mask=here)
        published()
        async_store(dq_tiles, [b, n * _C, column], queries)
        async_store(dk_tiles, [b, n * _C, column], keys)
        async_store(dg_tiles, [b, n * _C, column], gates)
        store_wait(0)
    else:  # nothing may arrive after the end
        mbarrier.wait(own, 0)
        mbarrier.wait(given, 0)
        mbarrier.wait(ends, 0)
    retire(given)
    retire(ends)
    retire(own)
    retire(asked)


def tokens_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, totals: Tensor, do: Tensor, states: Tensor,
    dstates: Tensor, written: Tensor, dwritten: Tensor, dq: Tensor, dk: Tensor, dbeta: Tensor, dg: Tensor,
    late: bool, mild: float,
) -> None:  # fmt: skip
    """Write dq, dk (as q), dg (as g) and dbeta (K / 64, B, T, H) of the mild chunks of dense tokens that
    `hopper_diagonal_delta.fits`, as many value heads as key heads; the rest as `diagonal_delta` makes them."""
    (b, t, h, d_k), d_v = q.shape, v.shape[3]
    n = cdiv(t, 64)
    _tokens[(b * n * h * (d_k // 64),)](
        token_tiles(q, 64), token_tiles(k, 64), token_tiles(v, 64), token_tiles(g, 64), token_tiles(do, d_v),
        token_tiles(written, d_v), token_tiles(dwritten, d_v), matrix_tiles(states, d_v, 64),
        matrix_tiles(dstates, d_v, 64), token_tiles(dq, 64), token_tiles(dk, 64), token_tiles(dg, 64), aligned(beta),
        totals, dbeta, b * t, t, n, h, K=d_k, LATE=late, MILD=mild, num_warps=4,
    )  # fmt: skip
