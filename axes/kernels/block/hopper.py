"""The serial passes of `block` on Hopper, in Gluon: two states that mix.

In the letters of `axes.kernels.block.chain`, states and values are kept transposed, X_a (V x K) and (V, C) tiles, so
that numbers of tokens scale columns:
    u^T = [V^T - sum_a c[a] (X_a K^T)] M^T      o^T = sum_a z[a] (X_a Q^T) + u^T S^T
    X'_b = sum_a P^C[a, b] X_a + (Y^C[b] u^T) K
and last chunk first, from do and dX':
    r^T = [do^T S + sum_b Y^C[b] (dX'_b K^T)] M      dX_a = sum_b P^C[a, b] dX'_b + (z[a] do^T) Q - (c[a] r^T) K
A program owns a head; one or two warpgroups own 64 of its values each and never talk; one warp feeds them. Both states
in float32 are half of a warpgroup's registers, so products read their rounded form from shared memory, from where bulk
copies take it where every chunk's states are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.kernels.common.bulk import aligned, matrix_tiles, number_tiles, token_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
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
from axes.kernels.common.versions import hopper_refusal
from axes.kernels.common.warpgroup import arrive, left_layout, product_layout, published, retire, times

_C = gl.constexpr(64)  # tokens of a chunk, values of a warpgroup
_STAGES = gl.constexpr(2)


@gluon.jit
def _feed(
    sources, stages, bars, N, H, GROUP, WIDE: gl.constexpr, RECORD: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """One warp: a chunk's tiles and numbers into the next stage that is free."""
    query_tiles, key_tiles, value_tiles, solve_tiles, score_tiles, number_rows = sources
    queries, keys, values, inverses, scores, numbers = stages
    filled, freed = bars
    K: gl.constexpr = key_tiles.block_shape[2]
    WIDTH: gl.constexpr = 2 * _C * K  # bytes of a tile of vectors, of values, of a square, of numbers
    VALUES: gl.constexpr = 2 * WIDE * _C * _C
    SQUARE: gl.constexpr = 2 * _C * _C
    NUMBERS: gl.constexpr = 4 * 8 * _C
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    column = h // GROUP * K
    for step in range(N):
        n = N - 1 - step if BACK else step
        slot = (b * N + n) * H + h
        stage = step % _STAGES
        bar = filled.index(stage)
        mbarrier.wait(freed.index(stage), (step // _STAGES & 1) ^ 1)
        if RECORD:
            mbarrier.expect(bar, WIDTH + VALUES + SQUARE + NUMBERS)
        else:
            mbarrier.expect(bar, 2 * WIDTH + VALUES + 2 * SQUARE + NUMBERS)
        async_load(key_tiles, [b, n * _C, column], bar, keys.index(stage))
        for half in gl.static_range(2):
            async_load(number_rows, [slot * (8 * _C) + half * (4 * _C)], bar, numbers.index(2 * stage + half))
        for w in gl.static_range(WIDE):
            async_load(value_tiles, [b, n * _C, (h * WIDE + w) * _C], bar, values.index(stage * WIDE + w))
        if not RECORD:
            async_load(score_tiles, [slot * _C, 0], bar, scores.index(stage))
        async_load(solve_tiles, [slot * _C, 0], bar, inverses.index(stage))
        if not RECORD:
            async_load(query_tiles, [b, n * _C, column], bar, queries.index(stage))


@gluon.jit
def _rows(numbers, place):
    """Four rows of a chunk's numbers."""
    return reinterpret(numbers.index(place), gl.float32, [4, _C], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _total(totals, slot):
    """P^C of a chunk."""
    at = totals + slot.to(gl.int64) * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def _advance(
    W: gl.constexpr, tiles, totals, start, final, N, H,
    WIDE: gl.constexpr, STARTED: gl.constexpr, RECORD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 values of both states of one head through time."""
    targets, outs, held, stages, bars = tiles
    out_tiles, state_tiles = targets
    queries, keys, values, inverses, scores, numbers = stages
    filled, freed = bars
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    square: gl.constexpr = product_layout(_C)
    wide: gl.constexpr = product_layout(K)
    left: gl.constexpr = left_layout(_C)
    across: gl.constexpr = gl.SliceLayout(0, square)
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = bh.to(gl.int64) * (2 * WIDE * _C * K) + e[:, None] * (2 * K) + d[None, :]
    if STARTED:
        x0 = gl.load(start + place)
        x1 = gl.load(start + place + K)
    else:
        x0 = gl.zeros([_C, K], gl.float32, wide)
        x1 = gl.zeros([_C, K], gl.float32, wide)
    out = outs.index(W)
    old0 = held.index(2 * W)
    old1 = held.index(2 * W + 1)
    p00, p01, p10, p11 = _total(totals, b * N * H + h)
    for n in range(N):
        stage = n % _STAGES
        slot = (b * N + n) * H + h
        if RECORD:
            store_wait(1)  # stores leave in order: the last chunk's states, then what it wrote
        old0.store(x0.to(DTYPE))
        old1.store(x1.to(DTYPE))
        published()
        if RECORD:
            async_store(state_tiles, [(slot * 2 * WIDE + W) * _C, 0], old0)
            async_store(state_tiles, [((slot * 2 + 1) * WIDE + W) * _C, 0], old1)
        mixed = p00 * x0 + p10 * x1
        x1 = p01 * x0 + p11 * x1
        x0 = mixed
        p00, p01, p10, p11 = _total(totals, (b * N + gl.minimum(n + 1, N - 1)) * H + h)
        mbarrier.wait(filled.index(stage), n // _STAGES & 1)
        key = keys.index(stage).reshape([_C, K])
        seen0 = times(old0, key.permute((1, 0)), _C)
        seen1 = times(old1, key.permute((1, 0)), _C)
        ends = _rows(numbers, 2 * stage + 1)
        seen0, seen1 = warpgroup_mma_wait(0, [seen0, seen1])
        seen0 = ends.index(0).load(across)[None, :] * seen0 + ends.index(1).load(across)[None, :] * seen1
        missing = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0)).load(square).to(gl.float32) - seen0
        u = times(gl.convert_layout(missing.to(DTYPE), left), inverses.index(stage).permute((1, 0)), _C)
        if RECORD:
            u = warpgroup_mma_wait(0, [u])
        else:
            query = queries.index(stage).reshape([_C, K]).permute((1, 0))
            read = times(old0, query, _C)
            u = warpgroup_mma_wait(1, [u])
        rounded = u.to(DTYPE)
        into0 = gl.convert_layout((ends.index(2).load(across)[None, :] * u).to(DTYPE), left)
        into1 = gl.convert_layout((ends.index(3).load(across)[None, :] * u).to(DTYPE), left)
        x0 = warpgroup_mma(into0, key, x0, is_async=True)
        x1 = warpgroup_mma(into1, key, x1, is_async=True)
        if RECORD:
            x0, x1 = warpgroup_mma_wait(0, [x0, x1])
        else:
            prefix = _rows(numbers, 2 * stage)
            read = warpgroup_mma_wait(2, [read])
            read *= prefix.index(0).load(across)[None, :]
            given = gl.convert_layout(rounded, left)
            read = warpgroup_mma(given, scores.index(stage).permute((1, 0)), read, is_async=True)
            x0, x1, read = warpgroup_mma_wait(0, [x0, x1, read])
            more = times(old1, query, _C)  # now that there are registers for it
            scale = prefix.index(2).load(across)[None, :]
            more = warpgroup_mma_wait(0, [more])
            rounded = (read + scale * more).to(DTYPE)
        fence_async_shared()
        arrive(freed.index(stage))
        if RECORD:
            store_wait(2)
        else:
            store_wait(0)
        out.reshape([_C, _C]).permute((1, 0)).store(rounded)
        fence_async_shared()
        async_store(out_tiles, [b, n * _C, (h * WIDE + W) * _C], out)
    if not RECORD:
        gl.store(final + place, x0)
        gl.store(final + place + K, x1)
    store_wait(0)


@gluon.jit
def _retreat(W: gl.constexpr, tiles, totals, dfinal, dstart, N, H, WIDE: gl.constexpr):
    """One warpgroup: what 64 values of both states of one head owe to the chunks after, last chunk first."""
    targets, outs, held, stages, bars = tiles
    out_tiles, state_tiles = targets
    queries, keys, values, inverses, scores, numbers = stages
    filled, freed = bars
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    square: gl.constexpr = product_layout(_C)
    wide: gl.constexpr = product_layout(K)
    left: gl.constexpr = left_layout(_C)
    across: gl.constexpr = gl.SliceLayout(0, square)
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = bh.to(gl.int64) * (2 * WIDE * _C * K) + e[:, None] * (2 * K) + d[None, :]
    g0 = gl.load(dfinal + place)
    g1 = gl.load(dfinal + place + K)
    out = outs.index(W)
    later0 = held.index(2 * W)
    later1 = held.index(2 * W + 1)
    p00, p01, p10, p11 = _total(totals, (b * N + N - 1) * H + h)
    for step in range(N):
        n = N - 1 - step
        stage = step % _STAGES
        slot = (b * N + n) * H + h
        store_wait(1)  # stores leave in order: the last chunk's states, then its r
        later0.store(g0.to(DTYPE))
        later1.store(g1.to(DTYPE))
        published()
        async_store(state_tiles, [(slot * 2 * WIDE + W) * _C, 0], later0)
        async_store(state_tiles, [((slot * 2 + 1) * WIDE + W) * _C, 0], later1)
        mixed = p00 * g0 + p01 * g1
        g1 = p10 * g0 + p11 * g1
        g0 = mixed
        p00, p01, p10, p11 = _total(totals, (b * N + gl.maximum(n - 1, 0)) * H + h)
        mbarrier.wait(filled.index(stage), step // _STAGES & 1)
        key = keys.index(stage).reshape([_C, K])
        query = queries.index(stage).reshape([_C, K])
        owed = times(later0, key.permute((1, 0)), _C)
        more = times(later1, key.permute((1, 0)), _C)
        prefix = _rows(numbers, 2 * stage)
        ends = _rows(numbers, 2 * stage + 1)
        owed, more = warpgroup_mma_wait(0, [owed, more])
        owed = ends.index(2).load(across)[None, :] * owed + ends.index(3).load(across)[None, :] * more
        dout = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0))
        owed = warpgroup_mma(dout, scores.index(stage), owed, is_async=True)
        owed = warpgroup_mma_wait(0, [owed])
        r = times(gl.convert_layout(owed.to(DTYPE), left), inverses.index(stage), _C)
        plain = dout.load(left)
        read = gl.convert_layout(plain, square).to(gl.float32) * prefix.index(0).load(across)[None, :]
        g0 = warpgroup_mma(gl.convert_layout(read.to(DTYPE), left), query, g0, is_async=True)
        read = gl.convert_layout(plain, square).to(gl.float32) * prefix.index(2).load(across)[None, :]
        g1 = warpgroup_mma(gl.convert_layout(read.to(DTYPE), left), query, g1, is_async=True)
        r = warpgroup_mma_wait(2, [r])
        rounded = r.to(DTYPE)
        back0 = gl.convert_layout((-ends.index(0).load(across)[None, :] * r).to(DTYPE), left)
        back1 = gl.convert_layout((-ends.index(1).load(across)[None, :] * r).to(DTYPE), left)
        g0, g1 = warpgroup_mma_wait(0, [g0, g1])
        g0 = warpgroup_mma(back0, key, g0, is_async=True)
        g1 = warpgroup_mma(back1, key, g1, is_async=True)
        store_wait(2)
        out.reshape([_C, _C]).permute((1, 0)).store(rounded)
        fence_async_shared()
        async_store(out_tiles, [b, n * _C, (h * WIDE + W) * _C], out)
        g0, g1 = warpgroup_mma_wait(0, [g0, g1])
        fence_async_shared()
        arrive(freed.index(stage))
    gl.store(dstart + place, g0)
    gl.store(dstart + place + K, g1)
    store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["N", "H", "GROUP"])
def _walk(
    query_tiles, key_tiles, value_tiles, solve_tiles, score_tiles, number_rows, out_tiles, state_tiles,
    totals, start, final, N, H, GROUP,
    ADVANCE: gl.constexpr, STARTED: gl.constexpr, RECORD: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """One head of one sequence: o and the last states; with RECORD X and u of every chunk; with BACK dX' and r."""
    K: gl.constexpr = key_tiles.block_shape[2]
    WIDE: gl.constexpr = K // _C
    DTYPE: gl.constexpr = key_tiles.dtype
    keys = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, _C, K], key_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [_STAGES * WIDE, 1, _C, _C], value_tiles.layout)
    inverses = gl.allocate_shared_memory(DTYPE, [_STAGES, _C, _C], solve_tiles.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * _STAGES, 4 * _C], number_rows.layout)
    held = gl.allocate_shared_memory(DTYPE, [2 * WIDE, _C, K], solve_tiles.layout)
    outs = gl.allocate_shared_memory(DTYPE, [WIDE, 1, _C, _C], out_tiles.layout)
    if RECORD:
        queries = keys
        scores = inverses
    else:
        queries = gl.allocate_shared_memory(DTYPE, [_STAGES, 1, _C, K], query_tiles.layout)
        scores = gl.allocate_shared_memory(DTYPE, [_STAGES, _C, _C], score_tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=WIDE)
    sources = (query_tiles, key_tiles, value_tiles, solve_tiles, score_tiles, number_rows)
    targets = (out_tiles, state_tiles)
    stages = (queries, keys, values, inverses, scores, numbers)
    bars = (filled, freed)
    tiles = (targets, outs, held, stages, bars)
    if BACK:
        if WIDE == 2:
            gl.warp_specialize(
                [
                    (_retreat, (0, tiles, totals, start, final, N, H, WIDE)),
                    (_retreat, (1, tiles, totals, start, final, N, H, WIDE)),
                    (_feed, (sources, stages, bars, N, H, GROUP, WIDE, RECORD, BACK)),
                ],
                [4, 1],
                [ADVANCE, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_retreat, (0, tiles, totals, start, final, N, H, WIDE)),
                    (_feed, (sources, stages, bars, N, H, GROUP, WIDE, RECORD, BACK)),
                ],
                [1],
                [24],
            )
    else:
        if WIDE == 2:
            gl.warp_specialize(
                [
                    (_advance, (0, tiles, totals, start, final, N, H, WIDE, STARTED, RECORD)),
                    (_advance, (1, tiles, totals, start, final, N, H, WIDE, STARTED, RECORD)),
                    (_feed, (sources, stages, bars, N, H, GROUP, WIDE, RECORD, BACK)),
                ],
                [4, 1],
                [ADVANCE, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_advance, (0, tiles, totals, start, final, N, H, WIDE, STARTED, RECORD)),
                    (_feed, (sources, stages, bars, N, H, GROUP, WIDE, RECORD, BACK)),
                ],
                [1],
                [24],
            )
    retire(filled)
    retire(freed)


# ---- launches ------------------------------------------------------------------------------------------------------

# By width: registers a thread at launch, the same for all warpgroups, and those of the second that carries states.
_LAUNCH = {128: {"ADVANCE": 240, "maxnreg": 168}, 64: {"ADVANCE": 240, "maxnreg": 168}}


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether the passes may be called: 16 bit, K = V in {64, 128}, tokens there, on a Hopper processor. Sequences are
    dense."""
    plain = v.dtype in (torch.bfloat16, torch.float16) and q.shape[3] == v.shape[3] and v.shape[3] in _LAUNCH
    if not plain or 0 in v.shape:
        return False
    return hopper_refusal(v.device) is None


def walk(
    q: Tensor, k: Tensor, v: Tensor, carries: Tensor, totals: Tensor, m: Tensor, scores: Tensor,
    start: Tensor | None, final: Tensor, out: Tensor, states: Tensor | None = None, back: bool = False,
) -> None:  # fmt: skip
    """One of three passes over dense sequences that erase, in place of the portable kernels, whose arguments these are.

    Forward: o into `out`. With `states`: u into `out`, X into `states` (slots, 2, V, K). With `back` too: v is do,
    start is dfinal, final receives dstart, `out` r, `states` dX'.
    """
    (b, t, h, d), hv = q.shape, v.shape[2]
    squares = matrix_tiles(m), matrix_tiles(scores)
    _walk[(b * hv,)](
        token_tiles(q, d), token_tiles(k, d), token_tiles(v, 64), *squares, number_tiles(carries), token_tiles(out, 64),
        squares[0] if states is None else matrix_tiles(states, 64), totals, final if start is None else aligned(start),
        final, cdiv(t, 64), hv, hv // h, STARTED=start is not None, RECORD=states is not None and not back, BACK=back,
        num_warps=4, **_LAUNCH[d],
    )  # fmt: skip
