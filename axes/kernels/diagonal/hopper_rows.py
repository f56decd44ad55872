"""What a chain with gates on rows reads of its mild chunks on Hopper: the part of `hopper_keys` that makes dq.

One program for 64 rows of one chunk of one head, two on a processor. In the letters of `rows`, with w = v e^-G, or
v (1 - e^g) e^-G where AVERAGE, all (C, 64) tiles in one layout:
    P = lower(q k^T)      o = e^G (q S + P w)
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
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.warpgroup import product_layout, published, retire, times
from axes.kernels.diagonal.hopper import _power, complement
from axes.kernels.diagonal.hopper_keys import square, sum_until

_C = gl.constexpr(64)  # tokens of a chunk, rows of a program


@Kernel
@gluon.jit(do_not_specialize=["N", "H"])
def _rows(
    v_tiles, k_tiles, q_tiles, g_tiles, state_tiles, o_tiles, totals, N, H,
    R: gl.constexpr, MILD: gl.constexpr, AVERAGE: gl.constexpr,
):  # fmt: skip
    """o of 64 of R rows of one mild chunk; nothing of another."""
    PARTS: gl.constexpr = R // _C
    D: gl.constexpr = k_tiles.block_shape[2]
    DTYPE: gl.constexpr = v_tiles.dtype
    pid = gl.program_id(0)
    part = pid % PARTS
    h = pid // PARTS % H
    slot = pid // (PARTS * H)
    b, n = slot // N, slot % N
    matrix = slot * H + h
    layout: gl.constexpr = product_layout(_C)
    queries = gl.allocate_shared_memory(DTYPE, [1, _C, D], q_tiles.layout)
    keys = gl.allocate_shared_memory(DTYPE, [1, _C, D], k_tiles.layout)
    states = gl.allocate_shared_memory(DTYPE, [D, _C], state_tiles.layout)
    gates = gl.allocate_shared_memory(g_tiles.dtype, [1, _C, _C], g_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [1, _C, _C], v_tiles.layout)
    rest: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    low = gl.allocate_shared_memory(gl.bfloat16, [_C, _C], rest)
    tokens = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tokens, count=1)
    mbarrier.init(ends, count=1)
    mbarrier.init(own, count=1)
    published()
    column = h * R + part * _C
    mbarrier.expect(tokens, 4 * _C * D)
    async_load(q_tiles, [b, n * _C, h * D], tokens, queries)
    async_load(k_tiles, [b, n * _C, h * D], tokens, keys)
    mbarrier.expect(ends, 2 * D * _C)
    async_load(state_tiles, [matrix * D, part * _C], ends, states)
    mbarrier.expect(own, _C * _C * (2 + g_tiles.dtype.primitive_bitwidth // 8))
    async_load(g_tiles, [b, n * _C, column], own, gates)
    async_load(v_tiles, [b, n * _C, column], own, values)
    whole: gl.constexpr = gl.BlockedLayout([R // 32], [32], [4], [0])
    least = gl.min(gl.load(totals + matrix.to(gl.int64) * R + gl.arange(0, R, layout=whole)), 0)
    if least >= -MILD:
        i = gl.arange(0, _C, layout=gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, _C, layout=gl.SliceLayout(0, layout))[None, :]
        query = queries.reshape([_C, D])
        key = keys.reshape([_C, D])
        mbarrier.wait(tokens, 0)
        pairs = times(query, key.permute((1, 0)), _C)
        mbarrier.wait(ends, 0)
        out = times(query, states, _C)
        pairs, out = warpgroup_mma_wait(0, [pairs, out])
        barrier()
        # what was read by these products makes room
        scores = square(keys, DTYPE, D)
        triangle = square(queries, gl.bfloat16, D)
        high = square(states, gl.bfloat16, D)
        scores.store(gl.where(i >= j, pairs, 0.0).to(DTYPE))
        triangle.store(gl.where(i >= j, 1.0, 0.0).to(gl.bfloat16))
        mbarrier.wait(own, 0)
        log = gates.reshape([_C, _C]).load(layout).to(gl.float32)  # none at the floor: that chunk would not be mild
        run = sum_until(triangle, log, high, low)
        barrier()
        value = values.reshape([_C, _C]).load(layout).to(gl.float32)
        if AVERAGE:
            value = value * complement(log)
        writer = square(states, DTYPE, D)
        writer.store((value * _power(-run)).to(DTYPE))
        published()
        out = warpgroup_mma_wait(0, [warpgroup_mma(scores, writer, out, is_async=True)])
        values.reshape([_C, _C]).store((out * _power(run)).to(DTYPE))
        published()
        async_store(o_tiles, [b, n * _C, column], values)
        store_wait(0)
    else:  # nothing may arrive after the end
        mbarrier.wait(own, 0)
        mbarrier.wait(tokens, 0)
        mbarrier.wait(ends, 0)
    retire(tokens)
    retire(ends)
    retire(own)


def read(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, totals: Tensor, o: Tensor, mild: float, average: bool
) -> None:
    """Write o (B, T, H, R) of the mild chunks, of values v like it and of keys k (B, T, H, D) that
    `hopper_write.fits`; states (B N, H, D, R) and totals as `hopper_diagonal.states` makes them."""
    (b, t, h, rows), d = v.shape, k.shape[3]
    n = cdiv(t, 64)
    _rows[(b * n * h * (rows // 64),)](
        token_tiles(v, 64), token_tiles(k, d), token_tiles(q, d), token_tiles(g, 64), matrix_tiles(states, d, 64),
        token_tiles(o, 64), totals, n, h, R=rows, MILD=mild, AVERAGE=average, num_warps=4,
    )  # fmt: skip
