"""First states of all chunks on Hopper, and what each token writes: the chain of `hopper` once more, read by nobody.

    z = V - e^G (K X^T)        w = W z        X' = e^G_last X + (b e^(G_last - G) w)^T K
X (V x K) of every chunk is rounded and stored as it is multiplied, w before its strength b. Transposed as in `hopper`:
one or two warpgroups own 64 values each, one warp feeds them, one more makes the numbers of a chunk's tokens ahead of
them, and leaves G, b and G less the log of b's digits for the gradients.
"""

from __future__ import annotations

from torch import Tensor

from axes.kernels.common.bulk import aligned, matrix_tiles, token_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.warpgroup import (
    add,
    apart,
    arrive,
    floored,
    left_layout,
    product_layout,
    retire,
    segment,
    times,
)

_C = gl.constexpr(64)  # tokens of a chunk, values of a warpgroup
_NUMBERS = gl.constexpr(4)  # of a token: e^G, b e^(G_last - G), and of two strengths c / b
_SIZES = ["T", "S", "L", "N", "H"]  # one kernel for all of them


@gluon.jit
def _feed(tiles, stages, filled, freed, S, L, N, H, WIDE: gl.constexpr):
    """One warp: a chunk's tiles into the next free stage."""
    k_tiles, v_tiles, w_tiles = tiles
    keys, values, inverses, numbers = stages
    K: gl.constexpr = k_tiles.block_shape[2]
    STAGES: gl.constexpr = keys.shape[0]
    BYTES: gl.constexpr = 2 * (_C * K + _C * _C + WIDE * _C * _C)
    bh = gl.program_id(0)
    h = bh % H
    b, first = segment(bh // H, S, L)
    for n in range(N):
        stage = n % STAGES
        bar = filled.index(stage)
        here = first + n * _C
        mbarrier.wait(freed.index(stage), (n // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        async_load(k_tiles, [b, here, h * K], bar, keys.index(stage))
        for w in gl.static_range(WIDE):
            async_load(v_tiles, [b, here, (h * WIDE + w) * _C], bar, values.index(stage * WIDE + w))
        async_load(w_tiles, [(bh * N + n) * _C, 0], bar, inverses.index(stage))


@gluon.jit
def _count(
    beta, write, g, rows, stages, counted, freed, T, S, L, N, H,
    GATED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """One warp: the numbers of a chunk's tokens, and of the gradients' table."""
    keys, values, inverses, numbers = stages
    STAGES: gl.constexpr = keys.shape[0]
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    i = gl.arange(0, _C, layout=line)
    bh = gl.program_id(0)
    h = bh % H
    b, first = segment(bh // H, S, L)
    for n in range(N):
        stage = n % STAGES
        token = first + n * _C + i
        at = (b.to(gl.int64) * T + token) * H + h
        strength = gl.load(beta + at, mask=token < T, other=0.0)
        if TWO:
            strength = apart(strength)
            ratio = gl.load(write + at, mask=token < T, other=0.0) / strength
        if GATED:
            log = floored(gl.load(g + at, mask=token < T, other=0.0))
            run = gl.associative_scan(log, 0, add)
            total = gl.sum(log, 0)
        else:
            run = gl.zeros([_C], gl.float32, line)
            total = 0.0
        digits = (strength.to(gl.int32, bitcast=True) & 0x7FFFFF | 0x3F800000).to(gl.float32, bitcast=True)
        table = rows + (bh.to(gl.int64) * N + n) * (3 * _C) + i
        gl.store(table, run)
        gl.store(table + _C, strength)
        gl.store(table + 2 * _C, run - gl.log(digits))
        mbarrier.wait(freed.index(stage), (n // STAGES & 1) ^ 1)
        number = numbers.index(stage)
        number.slice(0 * _C, _C).store(gl.exp(run))
        number.slice(1 * _C, _C).store(strength * gl.exp(total - run))
        if TWO:
            number.slice(2 * _C, _C).store(ratio)
        arrive(counted.index(stage))


@gluon.jit
def _walk(
    W: gl.constexpr, x_tiles, written_tiles, olds, outs, stages, bars, start, S, L, N, H,
    WIDE: gl.constexpr, STARTED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 values of one head through time."""
    keys, values, inverses, numbers = stages
    filled, counted, freed = bars
    STAGES: gl.constexpr = keys.shape[0]
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    square: gl.constexpr = product_layout(_C)
    across: gl.constexpr = gl.SliceLayout(0, square)
    wide: gl.constexpr = product_layout(K)
    left: gl.constexpr = left_layout(_C)
    bh = gl.program_id(0)
    h = bh % H
    b, first = segment(bh // H, S, L)
    if STARTED:
        e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
        d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
        state = gl.load(start + bh.to(gl.int64) * (WIDE * _C * K) + e[:, None] * K + d[None, :])
    else:
        state = gl.zeros([_C, K], gl.float32, wide)
    for n in range(N):
        stage = n % STAGES
        half = state.to(DTYPE)
        old = gl.convert_layout(half, left)
        mbarrier.wait(filled.index(stage), n // STAGES & 1)
        key = keys.index(stage).reshape([_C, K])
        number = numbers.index(stage)
        known = times(old, key.permute((1, 0)), _C)
        store_wait(1)  # what was written last may still be leaving
        olds.index(W).store(half)
        fence_async_shared()
        async_store(x_tiles, [((bh * N + n) * WIDE + W) * _C, 0], olds.index(W))
        value = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0)).load(square).to(gl.float32)
        mbarrier.wait(counted.index(stage), n // STAGES & 1)
        reach = number.slice(0 * _C, _C).load(across)[None, :]
        total = number.slice(_C - 1, 1).load(gl.SliceLayout(0, wide))[None, :]
        if TWO:
            value = number.slice(2 * _C, _C).load(across)[None, :] * value
        known = warpgroup_mma_wait(0, [known])
        missing = gl.convert_layout((value - reach * known).to(DTYPE), left)
        w = warpgroup_mma_wait(0, [times(missing, inverses.index(stage).permute((1, 0)), _C)])
        kept = gl.convert_layout((number.slice(1 * _C, _C).load(across)[None, :] * w).to(DTYPE), left)
        state = warpgroup_mma(kept, key, state * total, is_async=True)
        store_wait(1)
        outs.index(W).reshape([_C, _C]).permute((1, 0)).store(w.to(DTYPE))
        fence_async_shared()
        async_store(written_tiles, [b, first + n * _C, (h * WIDE + W) * _C], outs.index(W))
        state = warpgroup_mma_wait(0, [state])
        mbarrier.arrive(freed.index(stage), count=1)
    store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def _states(
    k_tiles, v_tiles, w_tiles, x_tiles, written_tiles, beta, write, g, start, rows, T, S, L, N, H,
    STAGES: gl.constexpr, WALK: gl.constexpr, COUNT: gl.constexpr,
    GATED: gl.constexpr, STARTED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """X and w of all chunks of one head of one unit."""
    K: gl.constexpr = k_tiles.block_shape[2]
    WIDE: gl.constexpr = K // _C
    DTYPE: gl.constexpr = k_tiles.dtype
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, K], k_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, 1, _C, _C], v_tiles.layout)
    inverses = gl.allocate_shared_memory(DTYPE, [STAGES, _C, _C], w_tiles.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES, _NUMBERS * _C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    olds = gl.allocate_shared_memory(DTYPE, [WIDE, _C, K], x_tiles.layout)
    outs = gl.allocate_shared_memory(DTYPE, [WIDE, 1, _C, _C], written_tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    counted = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(counted.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=WIDE)
    tiles = (k_tiles, v_tiles, w_tiles)
    stages = (keys, values, inverses, numbers)
    bars = (filled, counted, freed)
    if WIDE == 2:
        gl.warp_specialize(
            [
                (_walk, (0, x_tiles, written_tiles, olds, outs, stages, bars, start, S, L, N, H, WIDE, STARTED, TWO)),
                (_walk, (1, x_tiles, written_tiles, olds, outs, stages, bars, start, S, L, N, H, WIDE, STARTED, TWO)),
                (_count, (beta, write, g, rows, stages, counted, freed, T, S, L, N, H, GATED, TWO)),
                (_feed, (tiles, stages, filled, freed, S, L, N, H, WIDE)),
            ],
            [4, 1, 1],
            [WALK, COUNT, COUNT],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (0, x_tiles, written_tiles, olds, outs, stages, bars, start, S, L, N, H, WIDE, STARTED, TWO)),
                (_count, (beta, write, g, rows, stages, counted, freed, T, S, L, N, H, GATED, TWO)),
                (_feed, (tiles, stages, filled, freed, S, L, N, H, WIDE)),
            ],
            [1, 1],
            [COUNT, COUNT],
        )
    retire(filled)
    retire(counted)
    retire(freed)


# By width: stages, registers a thread at launch, the same for all warpgroups, and of warpgroups once they part ways.
_LAUNCH = {
    128: {"STAGES": 4, "WALK": 216, "COUNT": 40, "maxnreg": 168},
    64: {"STAGES": 3, "WALK": 216, "COUNT": 40, "maxnreg": 128},  # one WALK: it gets what is left
}


def states(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, write: Tensor | None, start: Tensor | None, w: Tensor,
    written: Tensor, segments: int, length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """X of every chunk (units, H, N, D, D) in k's dtype, and numbers of its tokens (units, H, N, 3, 64): G, strengths,
    G less the log of their digits. written (B, T, H, D) receives w. Arguments are those of `hopper_backward.backward`.
    """
    b, t, h, d = k.shape
    units, _, n = w.shape[:3]
    x = k.new_empty(units, h, n, d, d)
    rows = beta.new_empty(units, h, n, 3, 64)
    _states[(units * h,)](
        token_tiles(k, d), token_tiles(v, 64), matrix_tiles(w), matrix_tiles(x, 64), token_tiles(written, 64),
        beta, beta if write is None else write, beta if g is None else g, beta if start is None else aligned(start),
        rows, t, segments, length, n, h,
        GATED=g is not None, STARTED=start is not None, TWO=write is not None, num_warps=4, **_LAUNCH[d],
    )  # fmt: skip
    return x, rows


__all__ = ["states"]
