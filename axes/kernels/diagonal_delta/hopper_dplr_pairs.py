"""What dplr makes of a chunk before its state is known, on Hopper: `pairs.prepare` with MATRICES and TWO, and `solve`.

One program for one chunk of one head, 64 channels after the other; all tokens are under way at once, and two programs
share a processor. A tile that was read makes room for the scaled vectors that are made of it, pairs for their inverse.
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
from axes.kernels.common.warpgroup import floored, product_layout, published, retire
from axes.kernels.diagonal.hopper import _power
from axes.kernels.diagonal.hopper_keys import square, sum_until
from axes.kernels.diagonal_delta.hopper_dplr import columns
from axes.kernels.scalar.hopper_inverse import inverse

_C = gl.constexpr(64)  # tokens of a chunk, channels at a time


@Kernel
@gluon.jit(do_not_specialize=["T", "N", "H"])
def _prepare(
    q_tiles, a_tiles, y_tiles, z_tiles, up_tiles, read_tiles, kept_tiles, kept2_tiles, p_tiles, p2_tiles, m2_tiles,
    m_tiles, g, totals, falls, T, N, H,
    K: gl.constexpr, BOUND: gl.constexpr,
):  # fmt: skip
    """Totals and scaled vectors of a chunk, and its pair matrices if no channel falls by more than BOUND."""
    PARTS: gl.constexpr = K // _C
    DTYPE: gl.constexpr = q_tiles.dtype
    pid = gl.program_id(0)
    h = pid % H
    slot = pid // H
    b, n = slot // N, slot % N
    layout: gl.constexpr = product_layout(_C)
    across: gl.constexpr = gl.SliceLayout(0, layout)
    queries = gl.allocate_shared_memory(DTYPE, [PARTS, 1, _C, _C], q_tiles.layout)
    readers = gl.allocate_shared_memory(DTYPE, [PARTS, 1, _C, _C], a_tiles.layout)
    writers = gl.allocate_shared_memory(DTYPE, [PARTS, 1, _C, _C], y_tiles.layout)
    writers2 = gl.allocate_shared_memory(DTYPE, [PARTS, 1, _C, _C], z_tiles.layout)
    fades = gl.allocate_shared_memory(DTYPE, [_C, _C], p_tiles.layout)
    fades2 = gl.allocate_shared_memory(DTYPE, [_C, _C], p_tiles.layout)
    triangle = gl.allocate_shared_memory(gl.bfloat16, [_C, _C], p_tiles.layout)
    high = gl.allocate_shared_memory(gl.bfloat16, [_C, _C], p_tiles.layout)
    low = gl.allocate_shared_memory(gl.bfloat16, [_C, _C], p_tiles.layout)
    given = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS):
        mbarrier.init(given.index(part), count=1)
    published()
    for part in gl.static_range(PARTS):
        bar = given.index(part)
        column = h * K + part * _C
        mbarrier.expect(bar, 8 * _C * _C)
        async_load(q_tiles, [b, n * _C, column], bar, queries.index(part))
        async_load(a_tiles, [b, n * _C, column], bar, readers.index(part))
        async_load(y_tiles, [b, n * _C, column], bar, writers.index(part))
        async_load(z_tiles, [b, n * _C, column], bar, writers2.index(part))
    i = gl.arange(0, _C, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, _C, layout=across)[None, :]
    here = n * _C + i < T
    place = ((b * T + n * _C + i).to(gl.int64) * H + h) * K + j
    triangle.store(gl.where(i >= j, 1.0, 0.0).to(gl.bfloat16))
    scores = gl.zeros([_C, _C], gl.float32, layout)
    lower = gl.zeros([_C, _C], gl.float32, layout)
    scores2 = gl.zeros([_C, _C], gl.float32, layout)
    lower2 = gl.zeros([_C, _C], gl.float32, layout)
    lowest = 0.0
    for part in gl.static_range(PARTS):
        log = floored(gl.load(g + place + part * _C, mask=here, other=0.0).to(gl.float32))
        total = columns(log)
        line = pid.to(gl.int64) * K + part * _C + gl.arange(0, _C, layout=across)
        gl.store(totals + line, total)
        fall = gl.min(total, 0)
        gl.store(falls + pid.to(gl.int64) * PARTS + part, fall)
        lowest = gl.minimum(lowest, fall)
        run = sum_until(triangle, log, high, low)
        mbarrier.wait(given.index(part), 0)
        tile = readers.index(part).reshape([_C, _C])
        tile.store((tile.load(layout).to(gl.float32) * _power(run - log)).to(DTYPE))
        tile = queries.index(part).reshape([_C, _C])
        tile.store((tile.load(layout).to(gl.float32) * _power(run)).to(DTYPE))
        tile = writers.index(part).reshape([_C, _C])
        x = tile.load(layout).to(gl.float32)
        fades.store((x * _power(-run)).to(DTYPE))
        tile.store((x * _power(total[None, :] - run)).to(DTYPE))
        tile = writers2.index(part).reshape([_C, _C])
        x = tile.load(layout).to(gl.float32)
        fades2.store((x * _power(-run)).to(DTYPE))
        tile.store((x * _power(total[None, :] - run)).to(DTYPE))
        published()
        column = h * K + part * _C
        async_store(read_tiles, [b, n * _C, column], readers.index(part))
        async_store(up_tiles, [b, n * _C, column], queries.index(part))
        async_store(kept_tiles, [b, n * _C, column], writers.index(part))
        async_store(kept2_tiles, [b, n * _C, column], writers2.index(part))
        up = queries.index(part).reshape([_C, _C])
        read = readers.index(part).reshape([_C, _C])
        scores = warpgroup_mma(up, fades.permute((1, 0)), scores, is_async=True)
        lower = warpgroup_mma(read, fades.permute((1, 0)), lower, is_async=True)
        scores2 = warpgroup_mma(up, fades2.permute((1, 0)), scores2, is_async=True)
        lower2 = warpgroup_mma(read, fades2.permute((1, 0)), lower2, is_async=True)
        scores, lower, scores2, lower2 = warpgroup_mma_wait(0, [scores, lower, scores2, lower2])
        barrier()
    if lowest >= -BOUND:
        third = square(high, DTYPE, _C)
        fades.store(gl.where(i >= j, scores, 0.0).to(DTYPE))
        fades2.store(gl.where(i >= j, scores2, 0.0).to(DTYPE))
        third.store(gl.where(i > j, lower2, 0.0).to(DTYPE))
        published()
        async_store(p_tiles, [pid * _C, 0], fades)
        async_store(p2_tiles, [pid * _C, 0], fades2)
        async_store(m2_tiles, [pid * _C, 0], third)
        store_wait(0)  # what they lie in makes room
        barrier()
        solved = inverse(gl.where(i > j, -lower, 0.0))
        out = gl.allocate_shared_memory(DTYPE, [_C, _C], m_tiles.layout, solved.to(DTYPE))
        published()
        async_store(m_tiles, [pid * _C, 0], out)
    store_wait(0)
    retire(given)


def dplr_prepare(
    q: Tensor, k: Tensor, g: Tensor, a: Tensor, b: Tensor, scaled: list[Tensor], totals: Tensor, falls: Tensor,
    matrices: list[Tensor], bound: float,
) -> None:  # fmt: skip
    """Totals, scaled vectors, and of mild chunks M, P, A_ak and P_k: `pairs.prepare` and `solve` of dense tokens that
    `hopper_diagonal_delta.fits`, as many value heads as key heads."""
    n, t, h, d = q.shape
    m, p, m2, p2 = matrices
    chunks = cdiv(t, 64)
    _prepare[(n * chunks * h,)](
        *(token_tiles(x, 64) for x in (q, a, b, k)), *(token_tiles(x, 64) for x in scaled),
        *(matrix_tiles(x) for x in (p, p2, m2, m)), aligned(g), totals, falls, t, chunks, h,
        K=d, BOUND=bound, num_warps=4,
    )  # fmt: skip
