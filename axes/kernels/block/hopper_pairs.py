"""What pairs of tokens get, dQ and dD and the gradients of Q K^T and K K^T, on Hopper: `kernels.pairs` with all tokens
that it reads under way at once. One program for one chunk of one head; two of them share a processor."""

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
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.warpgroup import product_layout, published, retire, times

_C = gl.constexpr(64)  # tokens of a chunk


@Kernel
@gluon.jit(do_not_specialize=["T", "N", "H", "GROUP"])
def _pairs(
    q_tiles, k_tiles, do_tiles, u_tiles, r_tiles, read_tiles, erase_tiles, erase, recurrence, dpairs, T, N, H, GROUP,
):  # fmt: skip
    """Of one chunk."""
    K: gl.constexpr = q_tiles.block_shape[2]
    V: gl.constexpr = do_tiles.block_shape[2]
    DTYPE: gl.constexpr = q_tiles.dtype
    pid = gl.program_id(0)
    h = pid % H
    slot = pid // H
    b, n = slot // N, slot % N
    layout: gl.constexpr = product_layout(_C)
    douts = gl.allocate_shared_memory(DTYPE, [1, _C, V], do_tiles.layout)
    wrotes = gl.allocate_shared_memory(DTYPE, [1, _C, V], u_tiles.layout)
    owed = gl.allocate_shared_memory(DTYPE, [1, _C, V], r_tiles.layout)
    queries = gl.allocate_shared_memory(DTYPE, [1, _C, K], q_tiles.layout)
    keys = gl.allocate_shared_memory(DTYPE, [1, _C, K], k_tiles.layout)
    outs = gl.allocate_shared_memory(DTYPE, [2, _C, _C], read_tiles.layout)
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(given.index(0), count=1)
    mbarrier.init(given.index(1), count=1)
    published()
    bar = given.index(0)
    mbarrier.expect(bar, 4 * _C * (K + V))
    async_load(do_tiles, [b, n * _C, h * V], bar, douts)
    async_load(u_tiles, [b, n * _C, h * V], bar, wrotes)
    async_load(q_tiles, [b, n * _C, h // GROUP * K], bar, queries)
    async_load(k_tiles, [b, n * _C, h // GROUP * K], bar, keys)
    bar = given.index(1)
    mbarrier.expect(bar, 2 * _C * V)
    async_load(r_tiles, [b, n * _C, h * V], bar, owed)
    t = gl.arange(0, _C, layout=gl.SliceLayout(1, layout))
    i = t[:, None]
    j = gl.arange(0, _C, layout=gl.SliceLayout(0, layout))[None, :]
    place = pid.to(gl.int64) * (2 * _C * _C) + i * _C + j
    key = keys.reshape([_C, K])
    wrote = wrotes.reshape([_C, V]).permute((1, 0))
    weight = gl.load(recurrence + place)
    mbarrier.wait(given.index(0), 0)
    scores = times(douts.reshape([_C, V]), wrote, _C)
    near = times(queries.reshape([_C, K]), key.permute((1, 0)), _C)
    scores, near = warpgroup_mma_wait(0, [scores, near])
    outs.index(0).store((scores * weight).to(DTYPE))
    gl.store(dpairs + place, gl.where(i >= j, scores * near, 0.0))
    barrier()
    number = ((b * T + n * _C + t).to(gl.int64) * H + h) * 2
    here = n * _C + t < T
    e0 = gl.load(erase + number, mask=here, other=0.0)
    e1 = gl.load(erase + number + 1, mask=here, other=0.0)
    weight = e0[:, None] * gl.load(recurrence + place - _C, mask=i > j, other=0.0)
    weight += e1[:, None] * gl.load(recurrence + place + (_C - 1) * _C, mask=i > j, other=0.0)
    mbarrier.wait(given.index(1), 0)
    scores = times(owed.reshape([_C, V]), wrote, _C)
    near = times(key, key.permute((1, 0)), _C)
    scores, near = warpgroup_mma_wait(0, [scores, near])
    outs.index(1).store((-scores * weight).to(DTYPE))
    gl.store(dpairs + place + _C * _C, gl.where(i > j, -scores * near, 0.0))
    published()
    async_store(read_tiles, [pid * _C, 0], outs.index(0))
    async_store(erase_tiles, [pid * _C, 0], outs.index(1))
    store_wait(0)
    retire(given)


def pairs_backward(
    q: Tensor, k: Tensor, erase: Tensor, recurrence: Tensor, do: Tensor, written: Tensor, dwritten: Tensor,
    dpairs: Tensor, reads: Tensor, erases: Tensor,
) -> None:  # fmt: skip
    """`kernels.pairs` of dense tokens that erase and that `hopper.fits`, whose arguments these are."""
    (b, t, h, d_k), (hv, d_v) = q.shape, do.shape[2:]
    n = cdiv(t, 64)
    _pairs[(b * n * hv,)](
        token_tiles(q, d_k), token_tiles(k, d_k), token_tiles(do, d_v), token_tiles(written, d_v),
        token_tiles(dwritten, d_v), matrix_tiles(reads), matrix_tiles(erases), aligned(erase), recurrence, dpairs,
        t, n, hv, hv // h, num_warps=4,
    )  # fmt: skip
