"""The gradients of tokens in mild chunks of dplr on Hopper: `gradients` with OPEN and TWO.

One program for 64 channels of one chunk of one head; two of them share a processor. In the letters of
`axes.kernels.diagonal_delta.chain`, y = b writes u and z = k writes V, w = y e^-G and x = z e^-G, all (C, 64) tiles:
    dP = lower(do u^T)      dA = strict(r u^T)      dP_k = lower(do V^T)      dA_k = strict(r V^T)
    dq = e^G (do X + dP w + dP_k x)                  da = e^E (r X + dA w + dA_k x)
    dy = e^-G (e^G_last u dX' + dP^T (q e^G) + dA^T (a e^E))      dz = e^-G (e^G_last V dX' + dP_k^T .. + dA_k^T ..)
What is read of values and states comes first, with the logs, and q, a, y and z where values were.
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
from axes.kernels.diagonal.hopper import _power
from axes.kernels.diagonal.hopper_keys import square, sum_until

_C = gl.constexpr(64)  # tokens of a chunk, channels of a program


@gluon.jit
def columns(x):
    """Sums over tokens, one half of the columns after the other: that takes half the memory."""
    left, right = gl.split(gl.permute(gl.reshape(x, [_C, 2, _C // 2]), (0, 2, 1)))
    both = gl.join(gl.sum(left, 0), gl.sum(right, 0))
    return gl.convert_layout(gl.reshape(gl.permute(both, (1, 0)), [_C]), gl.SliceLayout(0, product_layout(_C)))


@gluon.jit
def _again(x):
    """x, of which the compiler does not know that it is: what is made of it is made anew, not kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _half(tile, tiles, PLACE: gl.constexpr):
    """Tokens of 64 numbers in the first or second half of a tile of tokens of 128."""
    return reinterpret(tile, tile.dtype, [2, 1, _C, _C], tiles.layout).index(PLACE)


@Kernel
@gluon.jit(do_not_specialize=["T", "N", "H"])
def _tokens(
    q_tiles, a_tiles, y_tiles, z_tiles, do_tiles, u_tiles, r_tiles, v_tiles, state_tiles, grad_tiles,
    g_tiles, dq_tiles, da_tiles, dy_tiles, dz_tiles, dg_tiles, totals, T, N, H,
    K: gl.constexpr, MILD: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 channels of one mild chunk; nothing of another."""
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
    across: gl.constexpr = gl.SliceLayout(0, layout)
    douts = gl.allocate_shared_memory(DTYPE, [1, _C, V], do_tiles.layout)
    wrotes = gl.allocate_shared_memory(DTYPE, [1, _C, V], u_tiles.layout)
    owed = gl.allocate_shared_memory(DTYPE, [1, _C, V], r_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [1, _C, V], v_tiles.layout)
    states = gl.allocate_shared_memory(DTYPE, [V, _C], state_tiles.layout)
    grads = gl.allocate_shared_memory(DTYPE, [V, _C], grad_tiles.layout)
    gates = gl.allocate_shared_memory(g_tiles.dtype, [1, _C, _C], g_tiles.layout)
    if V == _C:
        more = gl.allocate_shared_memory(DTYPE, [6, _C, _C], state_tiles.layout)
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    logged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(given, count=1)
    mbarrier.init(ends, count=1)
    mbarrier.init(own, count=1)
    mbarrier.init(logged, count=1)
    published()
    column = h * K + part * _C
    mbarrier.expect(given, 8 * _C * V)
    async_load(do_tiles, [b, n * _C, h * V], given, douts)
    async_load(u_tiles, [b, n * _C, h * V], given, wrotes)
    async_load(r_tiles, [b, n * _C, h * V], given, owed)
    async_load(v_tiles, [b, n * _C, h * V], given, values)
    mbarrier.expect(ends, 4 * V * _C)
    async_load(state_tiles, [matrix * V, part * _C], ends, states)
    async_load(grad_tiles, [matrix * V, part * _C], ends, grads)
    mbarrier.expect(logged, g_tiles.dtype.primitive_bitwidth // 8 * _C * _C)
    async_load(g_tiles, [b, n * _C, column], logged, gates)
    whole: gl.constexpr = gl.BlockedLayout([K // 32], [32], [4], [0])
    least = gl.min(gl.load(totals + matrix.to(gl.int64) * K + gl.arange(0, K, layout=whole)), 0)
    mild = least >= -MILD
    mbarrier.wait(given, 0)
    mbarrier.wait(ends, 0)
    mbarrier.wait(logged, 0)
    if mild:
        i = gl.arange(0, _C, layout=gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, _C, layout=across)[None, :]
        dout, wrote = douts.reshape([_C, V]), wrotes.reshape([_C, V])
        owe, value = owed.reshape([_C, V]), values.reshape([_C, V])
        scores = times(dout, wrote.permute((1, 0)), _C)
        lower = times(owe, wrote.permute((1, 0)), _C)
        scores, lower = warpgroup_mma_wait(0, [scores, lower])
        inside = gl.where(i >= j, scores, 0.0).to(DTYPE)
        strict = gl.where(i > j, lower, 0.0).to(DTYPE)
        scores = times(dout, value.permute((1, 0)), _C)
        lower = times(owe, value.permute((1, 0)), _C)
        both = times(states.permute((1, 0)), grads, _C)  # its diagonal: sum_v X dX'
        scores, lower, both = warpgroup_mma_wait(0, [scores, lower, both])
        inside2 = gl.where(i >= j, scores, 0.0).to(DTYPE)
        strict2 = gl.where(i > j, lower, 0.0).to(DTYPE)
        last = columns(gl.where(i == j, both, 0.0))
        dquery = times(dout, states, _C)
        dread = times(owe, states, _C)
        dquery, dread = warpgroup_mma_wait(0, [dquery, dread])
        published()
        # what was read by these products makes room, and no copy begins beside one
        if V == _C:
            queries, readers, writers, writers2 = douts, owed, wrotes, values
            insides, stricts, insides2, stricts2 = more.index(0), more.index(1), more.index(2), more.index(3)
            high, low, fades, fades2 = states, grads, more.index(4), more.index(5)
        else:
            queries, readers = _half(states, q_tiles, 0), _half(states, q_tiles, 1)
            writers, writers2 = _half(wrotes, q_tiles, 0), _half(wrotes, q_tiles, 1)
            insides, stricts = square(owed, DTYPE, V), square(owed, DTYPE, V, 1)
            insides2, stricts2 = square(douts, DTYPE, V), square(douts, DTYPE, V, 1)
            high, low = square(values, DTYPE, V), square(values, DTYPE, V, 1)
            fades, fades2 = square(grads, DTYPE, V), square(grads, DTYPE, V, 1)
        mbarrier.expect(own, 8 * _C * _C)
        async_load(q_tiles, [b, n * _C, column], own, queries)
        async_load(a_tiles, [b, n * _C, column], own, readers)
        insides.store(inside)
        stricts.store(strict)
        insides2.store(inside2)
        stricts2.store(strict2)
        moved = times(wrote, grads, _C)
        moved2 = times(value, grads, _C)
        moved, moved2 = warpgroup_mma_wait(0, [moved, moved2])
        published()
        async_load(y_tiles, [b, n * _C, column], own, writers)
        async_load(z_tiles, [b, n * _C, column], own, writers2)
        ones = square(fades2, gl.bfloat16, _C)  # until the last writers come, and behind them again
        # none at the floor: that chunk would not be mild
        log = gates.reshape([_C, _C]).load(layout).to(gl.float32)
        ones.store(gl.where(i >= j, 1.0, 0.0).to(gl.bfloat16))
        run = sum_until(ones, log, square(high, gl.bfloat16, _C), square(low, gl.bfloat16, _C))
        barrier()
        end = _power(gl.load(totals + matrix.to(gl.int64) * K + part * _C + gl.arange(0, _C, layout=across)))
        last *= end
        mbarrier.wait(own, 0)
        up = high
        read = low
        up.store((queries.reshape([_C, _C]).load(layout).to(gl.float32) * _power(run)).to(DTYPE))
        read.store((readers.reshape([_C, _C]).load(layout).to(gl.float32) * _power(run - log)).to(DTYPE))
        barrier()
        fade = _power(-run)
        faded = writers.reshape([_C, _C]).load(layout).to(gl.float32) * fade
        fades.store(faded.to(DTYPE))
        late = faded * moved
        faded = writers2.reshape([_C, _C]).load(layout).to(gl.float32) * fade
        fades2.store(faded.to(DTYPE))
        late += faded * moved2
        last += end * columns(late)
        published()
        dquery = warpgroup_mma(insides, fades, dquery, is_async=True)
        dquery = warpgroup_mma(insides2, fades2, dquery, is_async=True)
        dread = warpgroup_mma(stricts, fades, dread, is_async=True)
        dread = warpgroup_mma(stricts2, fades2, dread, is_async=True)
        dquery, dread = warpgroup_mma_wait(0, [dquery, dread])
        run = _again(run)
        dquery *= _power(run)
        dread *= _power(run - gates.reshape([_C, _C]).load(layout).to(gl.float32))
        change = queries.reshape([_C, _C]).load(layout).to(gl.float32) * dquery
        before = readers.reshape([_C, _C]).load(layout).to(gl.float32) * dread
        change += before
        queries.reshape([_C, _C]).store(dquery.to(DTYPE))
        readers.reshape([_C, _C]).store(dread.to(DTYPE))
        moved *= end[None, :]
        moved2 *= end[None, :]
        moved = warpgroup_mma(insides.permute((1, 0)), up, moved, is_async=True)
        moved = warpgroup_mma(stricts.permute((1, 0)), read, moved, is_async=True)
        moved2 = warpgroup_mma(insides2.permute((1, 0)), up, moved2, is_async=True)
        moved2 = warpgroup_mma(stricts2.permute((1, 0)), read, moved2, is_async=True)
        moved, moved2 = warpgroup_mma_wait(0, [moved, moved2])
        barrier()
        ones.store(gl.where(i >= j, 1.0, 0.0).to(gl.bfloat16))
        fade = _power(-_again(run))
        moved *= fade
        moved2 *= fade
        change -= writers.reshape([_C, _C]).load(layout).to(gl.float32) * moved
        change -= writers2.reshape([_C, _C]).load(layout).to(gl.float32) * moved2
        writers.reshape([_C, _C]).store(moved.to(DTYPE))
        writers2.reshape([_C, _C]).store(moved2.to(DTYPE))
        # of all tokens from this one on; its own reader came before its gate
        onwards = sum_until(ones.permute((1, 0)), change, square(high, gl.bfloat16, _C), square(low, gl.bfloat16, _C))
        gates.reshape([_C, _C]).store((onwards + last[None, :] - before).to(g_tiles.dtype))
        published()
        async_store(dq_tiles, [b, n * _C, column], queries)
        async_store(da_tiles, [b, n * _C, column], readers)
        async_store(dy_tiles, [b, n * _C, column], writers)
        async_store(dz_tiles, [b, n * _C, column], writers2)
        async_store(dg_tiles, [b, n * _C, column], gates)
        store_wait(0)
    retire(given)
    retire(ends)
    retire(own)
    retire(logged)


def dplr_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, totals: Tensor, do: Tensor, states: Tensor,
    dstates: Tensor, written: Tensor, dwritten: Tensor, dq: Tensor, dk: Tensor, da: Tensor, db: Tensor, dg: Tensor,
    mild: float,
) -> None:  # fmt: skip
    """Write dq, dk, da, db (as q) and dg (as g) of the mild chunks of dense tokens that `hopper_diagonal_delta.fits`,
    as many value heads as key heads; the rest as `diagonal_delta` makes them."""
    (n, t, h, d_k), d_v = q.shape, v.shape[3]
    chunks = cdiv(t, 64)
    _tokens[(n * chunks * h * (d_k // 64),)](
        token_tiles(q, 64), token_tiles(a, 64), token_tiles(b, 64), token_tiles(k, 64), token_tiles(do, d_v),
        token_tiles(written, d_v), token_tiles(dwritten, d_v), token_tiles(v, d_v), matrix_tiles(states, d_v, 64),
        matrix_tiles(dstates, d_v, 64), token_tiles(g, 64), token_tiles(dq, 64), token_tiles(da, 64),
        token_tiles(db, 64), token_tiles(dk, 64), token_tiles(dg, 64), totals, t, chunks, h,
        K=d_k, MILD=mild, num_warps=4,
    )  # fmt: skip
