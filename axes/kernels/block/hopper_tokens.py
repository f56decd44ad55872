"""The gradients of q, k and of what carries states, on Hopper: `kernels.gradients` with all it reads under way at once.

One program for 64 keys of one chunk of one head; two of them share a processor. In the letters of
`axes.kernels.block.chain`, with R and E the gradients of Q K^T and K K^T:
    dq = R k + sum_a z[a] (do X_a)      dk = R^T q + (E + E^T) k + sum_a Y^C[a] (u dX'_a) - c[a] (r X_a)
    dz[a] = q . (do X_a)                dc[a] = -k . (r X_a)      dY^C[a] = k . (u dX'_a)      dP^C[a, b] = <X_a, dX'_b>
Three tiles of states are there at a time: the second X takes the place of R and E, the second dX' that of the first.
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

_C = gl.constexpr(64)  # tokens of a chunk, keys of a program


@gluon.jit
def _square(tiles, like, V: gl.constexpr, PLACE: gl.constexpr):
    """A (C, C) tile in the place of the second of two (V, C) tiles: its first C rows, or those after them."""
    return reinterpret(tiles, tiles.dtype, [tiles.shape[0] * V // _C, _C, _C], like.layout).index(V // _C + PLACE)


@gluon.jit
def _inner(x, y, layout: gl.constexpr):
    """The sum of all products of two tiles in shared memory, a part of the rows at a time."""
    V: gl.constexpr = x.shape[0]
    total = gl.zeros([16, _C], gl.float32, layout)
    barrier()  # or its loads begin before what comes before is done with its registers
    for row in gl.static_range(0, V, 16):
        total += x.slice(row, 16).load(layout).to(gl.float32) * y.slice(row, 16).load(layout).to(gl.float32)
    return gl.sum(gl.sum(total, 1), 0)


@Kernel
@gluon.jit(do_not_specialize=["N", "H"])
def _tokens(
    q_tiles, k_tiles, do_tiles, u_tiles, r_tiles, read_tiles, erase_tiles, state_tiles, grad_tiles, dq_tiles, dk_tiles,
    carries, dcarries, dtotals, N, H,
    K: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys of one chunk, those of numbers in one part a block of keys."""
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
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    douts = gl.allocate_shared_memory(DTYPE, [1, _C, V], do_tiles.layout)
    wrotes = gl.allocate_shared_memory(DTYPE, [1, _C, V], u_tiles.layout)
    owed = gl.allocate_shared_memory(DTYPE, [1, _C, V], r_tiles.layout)
    states = gl.allocate_shared_memory(DTYPE, [2 if V > _C else 3, V, _C], state_tiles.layout)
    grads = gl.allocate_shared_memory(DTYPE, [V, _C], grad_tiles.layout)
    queries = gl.allocate_shared_memory(DTYPE, [1, _C, _C], q_tiles.layout)
    keys = gl.allocate_shared_memory(DTYPE, [1, _C, _C], k_tiles.layout)
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    starts = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(own, count=1)
    mbarrier.init(given.index(0), count=1)
    mbarrier.init(given.index(1), count=1)
    mbarrier.init(starts, count=1)
    published()
    column = h * K + part * _C
    row = matrix * 2 * V
    mbarrier.expect(own, 8 * _C * _C)
    reads, erases = _square(states, read_tiles, V, 0), _square(states, erase_tiles, V, 1)
    async_load(read_tiles, [matrix * _C, 0], own, reads)
    async_load(erase_tiles, [matrix * _C, 0], own, erases)
    async_load(q_tiles, [b, n * _C, column], own, queries)
    async_load(k_tiles, [b, n * _C, column], own, keys)
    first = given.index(0)
    mbarrier.expect(first, 6 * _C * V + 4 * V * _C)
    async_load(do_tiles, [b, n * _C, h * V], first, douts)
    async_load(state_tiles, [row, part * _C], first, states.index(0))
    async_load(r_tiles, [b, n * _C, h * V], first, owed)
    async_load(u_tiles, [b, n * _C, h * V], first, wrotes)
    async_load(grad_tiles, [row, part * _C], first, grads)

    token = gl.arange(0, _C, layout=down)
    numbers = carries + matrix.to(gl.int64) * (8 * _C) + token
    again = part * (gl.num_programs(0) // PARTS) + matrix
    dsmall = dcarries + again.to(gl.int64) * (6 * _C) + token
    dtotal = dtotals + again.to(gl.int64) * 4
    key_tile = keys.reshape([_C, _C])
    query_tile = queries.reshape([_C, _C])
    dout, wrote, owe = douts.reshape([_C, V]), wrotes.reshape([_C, V]), owed.reshape([_C, V])

    mbarrier.wait(own, 0)
    dquery = times(reads, key_tile, _C)
    dkey = times(reads.permute((1, 0)), query_tile, _C)
    dkey = warpgroup_mma(erases, key_tile, dkey, is_async=True)
    dkey = warpgroup_mma(erases.permute((1, 0)), key_tile, dkey, is_async=True)
    dquery, dkey = warpgroup_mma_wait(0, [dquery, dkey])
    published()
    mbarrier.expect(starts, 2 * V * _C)
    async_load(state_tiles, [row + V, part * _C], starts, states.index(1))
    for a in range(2):  # a loop, so that its products share registers
        mbarrier.wait(given.index(a), 0)
        read = times(dout, states.index(a), _C)
        erased = times(owe, states.index(a), _C)
        into = times(wrote, grads, _C)
        read, erased, into = warpgroup_mma_wait(0, [read, erased, into])
        gl.store(dsmall + a * _C, gl.sum(query_tile.load(layout).to(gl.float32) * read, 1))
        dquery += gl.load(numbers + 2 * a * _C)[:, None] * read
        key = key_tile.load(layout).to(gl.float32)
        gl.store(dsmall + (2 + a) * _C, -gl.sum(key * erased, 1))
        dkey -= gl.load(numbers + (4 + a) * _C)[:, None] * erased
        gl.store(dsmall + (4 + a) * _C, gl.sum(key * into, 1))
        dkey += gl.load(numbers + (6 + a) * _C)[:, None] * into
        mbarrier.wait(starts, 0)
        gl.store(dtotal + a, _inner(states.index(0), grads, flat))
        gl.store(dtotal + 2 + a, _inner(states.index(1), grads, flat))
        if a == 0:
            published()
            mbarrier.expect(given.index(1), 2 * V * _C)
            async_load(grad_tiles, [row + V, part * _C], given.index(1), grads)
    query_tile.store(dquery.to(DTYPE))
    key_tile.store(dkey.to(DTYPE))
    published()
    async_store(dq_tiles, [b, n * _C, column], queries)
    async_store(dk_tiles, [b, n * _C, column], keys)
    store_wait(0)
    retire(own)
    retire(given)
    retire(starts)


def tokens_backward(
    q: Tensor, k: Tensor, carries: Tensor, do: Tensor, written: Tensor, dwritten: Tensor, states: Tensor,
    dstates: Tensor, reads: Tensor, erases: Tensor, dq: Tensor, dk: Tensor, dcarries: Tensor, dtotals: Tensor,
) -> None:  # fmt: skip
    """`kernels.gradients` of dense tokens that erase and that `hopper.fits`, as many value heads as key heads; dcarries
    and dtotals have a part for every 64 keys."""
    (b, t, h, d_k), d_v = q.shape, do.shape[3]
    n = cdiv(t, 64)
    _tokens[(b * n * h * (d_k // 64),)](
        token_tiles(q, 64), token_tiles(k, 64), token_tiles(do, d_v), token_tiles(written, d_v),
        token_tiles(dwritten, d_v), matrix_tiles(reads), matrix_tiles(erases), matrix_tiles(states, d_v, 64),
        matrix_tiles(dstates, d_v, 64), token_tiles(dq, 64), token_tiles(dk, 64), carries, dcarries, dtotals,
        n, h, K=d_k, num_warps=4,
    )  # fmt: skip
