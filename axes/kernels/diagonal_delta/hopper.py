"""The serial passes of `diagonal_delta` on Hopper, in Gluon: reading rules under a gate per channel.

With the scaled vectors of `_prepare`, A = a e^R, Y = y e^(G_last - G), Q = q e^G, and with M and P, a chunk of C = 64
tokens needs no gate but e^G_last. States and values are kept transposed, S (V x K) and (V, C) tiles:
    u^T = [beta (V - A S^T)]^T M^T       o^T = S Q^T + u^T P^T       S' = S e^G_last + u^T Y
and last chunk first, from do and dS':
    r^T = [do^T P + dS' Y^T] M           dv = beta r                 dS = dS' e^G_last + do^T Q - dv^T A
dplr has a second writer z and a second pair of matrices, for V, and no beta: V^T M2^T, V^T P2^T and V^T Z are added in
the first line, dv^T = dS' Z^T + do^T P2 + r^T M2 and dS has r^T A. The left operand of each product is the result of
the one before, which a warpgroup has in registers, and the right one a tile of the inputs as it came. A program owns a
head; one or two warpgroups own 64 of its values each and never talk; one warp feeds them.
"""

from __future__ import annotations

import torch
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
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.versions import hopper_refusal
from axes.kernels.common.warpgroup import left_layout, product_layout, retire, times

_C = gl.constexpr(64)  # tokens of a chunk, values of a warpgroup


@gluon.jit
def _feed(
    sources, stages, bars, T, N, H, WIDE: gl.constexpr, TWO: gl.constexpr, RECORD: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """One warp: a chunk's tiles and numbers, those that are read first and those that are read last, each into the next
    stage of theirs that is free."""
    reader_tiles, writer_tiles, writer2_tiles, query_tiles, value_tiles, squares, beta, totals = sources
    solve_tiles, pair_tiles, solve2_tiles, pair2_tiles = squares
    readers, writers, writers2, queries, values, inverses, scores, inverses2, scores2, strengths, faders = stages
    first_filled, first_freed, last_filled, last_freed = bars
    K: gl.constexpr = reader_tiles.block_shape[2]
    FIRST: gl.constexpr = values.shape[0] // WIDE
    LAST: gl.constexpr = faders.shape[0]
    WIDTH: gl.constexpr = 2 * _C * K  # bytes of a tile of vectors, of values, of a square
    VALUES: gl.constexpr = 2 * WIDE * _C * _C
    SQUARE: gl.constexpr = 2 * _C * _C
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    i = gl.arange(0, _C, layout=line)
    d = gl.arange(0, K, layout=line)
    for step in range(N):
        n = N - 1 - step if BACK else step
        here = n * _C
        slot = (b * N + n) * H + h
        row = slot * _C
        if not TWO:
            strength = gl.load(beta + (b * T + here + i).to(gl.int64) * H + h, mask=here + i < T, other=0.0)
        fade = gl.exp(gl.load(totals + slot.to(gl.int64) * K + d))

        stage = step % FIRST
        bar = first_filled.index(stage)
        mbarrier.wait(first_freed.index(stage), (step // FIRST & 1) ^ 1)
        if not TWO:
            strengths.index(stage).store(strength)
        if BACK:
            mbarrier.expect(bar, WIDTH + VALUES + 2 * SQUARE)
            async_load(writer_tiles, [b, here, h * K], bar, writers.index(stage))
        else:
            if TWO:
                mbarrier.expect(bar, WIDTH + VALUES + 2 * SQUARE)
            else:
                mbarrier.expect(bar, WIDTH + VALUES + SQUARE)
            async_load(reader_tiles, [b, here, h * K], bar, readers.index(stage))
        for w in gl.static_range(WIDE):
            to = values.index(stage * WIDE + w)
            async_load(value_tiles, [b, here, (h * WIDE + w) * _C], bar, to)
        async_load(solve_tiles, [row, 0], bar, inverses.index(stage))
        if BACK:
            async_load(pair_tiles, [row, 0], bar, scores.index(stage))
        elif TWO:
            async_load(solve2_tiles, [row, 0], bar, inverses2.index(stage))

        stage = step % LAST
        bar = last_filled.index(stage)
        mbarrier.wait(last_freed.index(stage), (step // LAST & 1) ^ 1)
        faders.index(stage).store(fade)
        if BACK:
            if TWO:
                mbarrier.expect(bar, 3 * WIDTH + 2 * SQUARE)
                async_load(writer2_tiles, [b, here, h * K], bar, writers2.index(stage))
                async_load(pair2_tiles, [row, 0], bar, scores2.index(stage))
                async_load(solve2_tiles, [row, 0], bar, inverses2.index(stage))
            else:
                mbarrier.expect(bar, 2 * WIDTH)
            async_load(query_tiles, [b, here, h * K], bar, queries.index(stage))
            async_load(reader_tiles, [b, here, h * K], bar, readers.index(stage))
        else:
            if RECORD:
                if TWO:
                    mbarrier.expect(bar, 2 * WIDTH)
                else:
                    mbarrier.expect(bar, WIDTH)
            else:
                if TWO:
                    mbarrier.expect(bar, 3 * WIDTH + 2 * SQUARE)
                else:
                    mbarrier.expect(bar, 2 * WIDTH + SQUARE)
                async_load(query_tiles, [b, here, h * K], bar, queries.index(stage))
            async_load(writer_tiles, [b, here, h * K], bar, writers.index(stage))
            if TWO:
                async_load(writer2_tiles, [b, here, h * K], bar, writers2.index(stage))
            if not RECORD:
                async_load(pair_tiles, [row, 0], bar, scores.index(stage))
                if TWO:
                    async_load(pair2_tiles, [row, 0], bar, scores2.index(stage))


@gluon.jit
def _advance(
    W: gl.constexpr, targets, outs, held, stages, bars, start, final, N, H,
    WIDE: gl.constexpr, TWO: gl.constexpr, STARTED: gl.constexpr, RECORD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 values of one head through time."""
    out_tiles, _, state_tiles = targets
    readers, writers, writers2, queries, values, inverses, scores, inverses2, scores2, strengths, faders = stages
    first_filled, first_freed, last_filled, last_freed = bars
    FIRST: gl.constexpr = values.shape[0] // WIDE
    LAST: gl.constexpr = faders.shape[0]
    K: gl.constexpr = readers.shape[3]
    DTYPE: gl.constexpr = readers.dtype
    square: gl.constexpr = product_layout(_C)
    wide: gl.constexpr = product_layout(K)
    left: gl.constexpr = left_layout(_C)
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = bh.to(gl.int64) * (WIDE * _C * K) + e[:, None] * K + d[None, :]
    if STARTED:
        state = gl.load(start + place)
    else:
        state = gl.zeros([_C, K], gl.float32, wide)
    out = outs.index(W)
    for n in range(N):
        stage = n % FIRST
        later = n % LAST
        rounded = state.to(DTYPE)
        old = gl.convert_layout(rounded, left)
        if RECORD:
            store_wait(1)  # stores leave in order: the last chunk's state, then what it wrote
            held.index(W).store(rounded)
            fence_async_shared()
            async_store(state_tiles, [(((b * N + n) * H + h) * WIDE + W) * _C, 0], held.index(W))
        mbarrier.wait(first_filled.index(stage), n // FIRST & 1)
        seen = times(old, readers.index(stage).reshape([_C, K]).permute((1, 0)), _C)
        value = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0))
        if TWO:
            known = value.load(left)
            seen = warpgroup_mma(known, inverses2.index(stage).permute((1, 0)), seen, is_async=True)
            missing = warpgroup_mma_wait(0, [seen])
        else:
            wanted = value.load(square).to(gl.float32)
            strength = strengths.index(stage).load(gl.SliceLayout(0, square))[None, :]
            seen = warpgroup_mma_wait(0, [seen])
            missing = strength * (wanted - seen)
        missing = gl.convert_layout(missing.to(DTYPE), left)
        u = times(missing, inverses.index(stage).permute((1, 0)), _C)
        mbarrier.wait(last_filled.index(later), n // LAST & 1)
        total = faders.index(later).load(gl.SliceLayout(0, wide))[None, :]
        if RECORD:
            u = warpgroup_mma_wait(0, [u])
        else:
            read = times(old, queries.index(later).reshape([_C, K]).permute((1, 0)), _C)
            u = warpgroup_mma_wait(1, [u])
        fence_async_shared()
        mbarrier.arrive(first_freed.index(stage), count=1)
        rounded = u.to(DTYPE)
        given = gl.convert_layout(rounded, left)
        # the state first: the next chunk waits for it
        state = warpgroup_mma(given, writers.index(later).reshape([_C, K]), state * total, is_async=True)
        if TWO:
            state = warpgroup_mma(known, writers2.index(later).reshape([_C, K]), state, is_async=True)
        if RECORD:
            state = warpgroup_mma_wait(0, [state])
        else:
            read = warpgroup_mma(given, scores.index(later).permute((1, 0)), read, is_async=True)
            if TWO:
                read = warpgroup_mma(known, scores2.index(later).permute((1, 0)), read, is_async=True)
            state, read = warpgroup_mma_wait(0, [state, read])
            rounded = read.to(DTYPE)
        fence_async_shared()
        mbarrier.arrive(last_freed.index(later), count=1)
        if RECORD:
            store_wait(1)
        else:
            store_wait(0)
        out.reshape([_C, _C]).permute((1, 0)).store(rounded)
        fence_async_shared()
        async_store(out_tiles, [b, n * _C, (h * WIDE + W) * _C], out)
    if not RECORD:
        gl.store(final + place, state)
    store_wait(0)


@gluon.jit
def _retreat(
    W: gl.constexpr, targets, outs, held, stages, bars, dfinal, dstart, N, H, WIDE: gl.constexpr, TWO: gl.constexpr
):
    """One warpgroup: what 64 values of one head owe to the chunks after, last chunk first."""
    r_tiles, dv_tiles, state_tiles = targets
    readers, writers, writers2, queries, values, inverses, scores, inverses2, scores2, strengths, faders = stages
    first_filled, first_freed, last_filled, last_freed = bars
    FIRST: gl.constexpr = values.shape[0] // WIDE
    LAST: gl.constexpr = faders.shape[0]
    K: gl.constexpr = readers.shape[3]
    DTYPE: gl.constexpr = readers.dtype
    square: gl.constexpr = product_layout(_C)
    wide: gl.constexpr = product_layout(K)
    left: gl.constexpr = left_layout(_C)
    bh = gl.program_id(0)
    h, b = bh % H, bh // H
    e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = bh.to(gl.int64) * (WIDE * _C * K) + e[:, None] * K + d[None, :]
    grad = gl.load(dfinal + place)
    r_out = outs.index(2 * W)
    dv_out = outs.index(2 * W + 1)
    for step in range(N):
        n = N - 1 - step
        stage = step % FIRST
        later = step % LAST
        rounded = grad.to(DTYPE)
        after = gl.convert_layout(rounded, left)
        store_wait(2)  # stores leave in order: a chunk's state, r, dv
        held.index(W).store(rounded)
        fence_async_shared()
        async_store(state_tiles, [(((b * N + n) * H + h) * WIDE + W) * _C, 0], held.index(W))
        mbarrier.wait(first_filled.index(stage), step // FIRST & 1)
        dout = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0)).load(left)
        du = times(after, writers.index(stage).reshape([_C, K]).permute((1, 0)), _C)
        du = warpgroup_mma(dout, scores.index(stage), du, is_async=True)
        if not TWO:
            strength = strengths.index(stage).load(gl.SliceLayout(0, square))[None, :]
        mbarrier.wait(last_filled.index(later), step // LAST & 1)
        total = faders.index(later).load(gl.SliceLayout(0, wide))[None, :]
        grad = warpgroup_mma(dout, queries.index(later).reshape([_C, K]), grad * total, is_async=True)
        if TWO:
            dvalue = times(after, writers2.index(later).reshape([_C, K]).permute((1, 0)), _C)
            dvalue = warpgroup_mma(dout, scores2.index(later), dvalue, is_async=True)
            du = warpgroup_mma_wait(3, [du])
        else:
            du = warpgroup_mma_wait(1, [du])
        r = times(gl.convert_layout(du.to(DTYPE), left), inverses.index(stage), _C)
        if TWO:
            r, grad, dvalue = warpgroup_mma_wait(0, [r, grad, dvalue])
            back = gl.convert_layout(r.to(DTYPE), left)
            dvalue = warpgroup_mma(back, inverses2.index(later), dvalue, is_async=True)
        else:
            r, grad = warpgroup_mma_wait(0, [r, grad])
            dvalue = strength * r
            back = gl.convert_layout((-dvalue).to(DTYPE), left)
        fence_async_shared()
        mbarrier.arrive(first_freed.index(stage), count=1)
        grad = warpgroup_mma(back, readers.index(later).reshape([_C, K]), grad, is_async=True)
        store_wait(1)
        r_out.reshape([_C, _C]).permute((1, 0)).store(r.to(DTYPE))
        if TWO:
            dvalue = warpgroup_mma_wait(1, [dvalue])
        dv_out.reshape([_C, _C]).permute((1, 0)).store(dvalue.to(DTYPE))
        fence_async_shared()
        async_store(r_tiles, [b, n * _C, (h * WIDE + W) * _C], r_out)
        async_store(dv_tiles, [b, n * _C, (h * WIDE + W) * _C], dv_out)
        grad = warpgroup_mma_wait(0, [grad])
        fence_async_shared()
        mbarrier.arrive(last_freed.index(later), count=1)
    gl.store(dstart + place, grad)
    store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["T", "N", "H"])
def _walk(
    reader_tiles, writer_tiles, writer2_tiles, query_tiles, value_tiles, solve_tiles, pair_tiles, solve2_tiles,
    pair2_tiles, out_tiles, dv_tiles, state_tiles, beta, totals, start, final, T, N, H,
    LAST: gl.constexpr, ADVANCE: gl.constexpr,
    TWO: gl.constexpr, STARTED: gl.constexpr, RECORD: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """One head of one sequence: o and the last state; with RECORD X and u of every chunk; with BACK dX', r and dv."""
    FIRST: gl.constexpr = 2
    K: gl.constexpr = reader_tiles.block_shape[2]
    WIDE: gl.constexpr = K // _C
    DTYPE: gl.constexpr = reader_tiles.dtype
    OUTS: gl.constexpr = 2 * WIDE if BACK else WIDE
    READERS: gl.constexpr = LAST if BACK else FIRST
    WRITERS: gl.constexpr = FIRST if BACK else LAST
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    readers = gl.allocate_shared_memory(DTYPE, [READERS, 1, _C, K], reader_tiles.layout)
    writers = gl.allocate_shared_memory(DTYPE, [WRITERS, 1, _C, K], writer_tiles.layout)
    inverses = gl.allocate_shared_memory(DTYPE, [FIRST, _C, _C], solve_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [FIRST * WIDE, 1, _C, _C], value_tiles.layout)
    strengths = gl.allocate_shared_memory(gl.float32, [FIRST, _C], flat)
    faders = gl.allocate_shared_memory(gl.float32, [LAST, K], flat)
    outs = gl.allocate_shared_memory(DTYPE, [OUTS, 1, _C, _C], out_tiles.layout)
    if RECORD:
        queries = readers
        scores = inverses
    else:
        queries = gl.allocate_shared_memory(DTYPE, [LAST, 1, _C, K], query_tiles.layout)
        scores = gl.allocate_shared_memory(DTYPE, [WRITERS, _C, _C], pair_tiles.layout)
    if TWO:
        writers2 = gl.allocate_shared_memory(DTYPE, [LAST, 1, _C, K], writer2_tiles.layout)
        inverses2 = gl.allocate_shared_memory(DTYPE, [READERS, _C, _C], solve2_tiles.layout)
        if RECORD:
            scores2 = inverses2
        else:
            scores2 = gl.allocate_shared_memory(DTYPE, [LAST, _C, _C], pair2_tiles.layout)
    else:
        writers2 = writers
        inverses2 = inverses
        scores2 = scores
    if RECORD or BACK:
        held = gl.allocate_shared_memory(DTYPE, [WIDE, _C, K], state_tiles.layout)
    else:
        held = outs
    first_filled = gl.allocate_shared_memory(gl.int64, [FIRST, 1], mbarrier.MBarrierLayout())
    first_freed = gl.allocate_shared_memory(gl.int64, [FIRST, 1], mbarrier.MBarrierLayout())
    last_filled = gl.allocate_shared_memory(gl.int64, [LAST, 1], mbarrier.MBarrierLayout())
    last_freed = gl.allocate_shared_memory(gl.int64, [LAST, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(FIRST):
        mbarrier.init(first_filled.index(stage), count=1)
        mbarrier.init(first_freed.index(stage), count=WIDE)
    for stage in gl.static_range(LAST):
        mbarrier.init(last_filled.index(stage), count=1)
        mbarrier.init(last_freed.index(stage), count=WIDE)
    squares = (solve_tiles, pair_tiles, solve2_tiles, pair2_tiles)
    sources = (reader_tiles, writer_tiles, writer2_tiles, query_tiles, value_tiles, squares, beta, totals)
    targets = (out_tiles, dv_tiles, state_tiles)
    stages = (readers, writers, writers2, queries, values, inverses, scores, inverses2, scores2, strengths, faders)
    bars = (first_filled, first_freed, last_filled, last_freed)
    if BACK:
        if WIDE == 2:
            gl.warp_specialize(
                [
                    (_retreat, (0, targets, outs, held, stages, bars, start, final, N, H, WIDE, TWO)),
                    (_retreat, (1, targets, outs, held, stages, bars, start, final, N, H, WIDE, TWO)),
                    (_feed, (sources, stages, bars, T, N, H, WIDE, TWO, RECORD, BACK)),
                ],
                [4, 1],
                [ADVANCE, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_retreat, (0, targets, outs, held, stages, bars, start, final, N, H, WIDE, TWO)),
                    (_feed, (sources, stages, bars, T, N, H, WIDE, TWO, RECORD, BACK)),
                ],
                [1],
                [24],
            )
    else:
        if WIDE == 2:
            gl.warp_specialize(
                [
                    (_advance, (0, targets, outs, held, stages, bars, start, final, N, H, WIDE, TWO, STARTED, RECORD)),
                    (_advance, (1, targets, outs, held, stages, bars, start, final, N, H, WIDE, TWO, STARTED, RECORD)),
                    (_feed, (sources, stages, bars, T, N, H, WIDE, TWO, RECORD, BACK)),
                ],
                [4, 1],
                [ADVANCE, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_advance, (0, targets, outs, held, stages, bars, start, final, N, H, WIDE, TWO, STARTED, RECORD)),
                    (_feed, (sources, stages, bars, T, N, H, WIDE, TWO, RECORD, BACK)),
                ],
                [1],
                [24],
            )
    retire(first_filled)
    retire(first_freed)
    retire(last_filled)
    retire(last_freed)


# ---- launches ------------------------------------------------------------------------------------------------------

# By width: registers a thread at launch, the same for all warpgroups, and those of the second that carries a state.
_LAUNCH = {128: {"ADVANCE": 240, "maxnreg": 168}, 64: {"ADVANCE": 240, "maxnreg": 128}}


def fits(reader: Tensor, v: Tensor) -> bool:
    """Whether the passes may be called: 16 bit, K = V in {64, 128}, dense, tokens there, on a Hopper processor."""
    plain = v.dtype in (torch.bfloat16, torch.float16) and reader.shape[3] == v.shape[3] and v.shape[3] in _LAUNCH
    if not plain or 0 in v.shape:
        return False
    return hopper_refusal(v.device) is None


def walk(
    scaled: list[Tensor], v: Tensor, beta: Tensor | None, matrices: list[Tensor], totals: Tensor,
    start: Tensor | None, final: Tensor, out: Tensor, dv: Tensor | None = None, states: Tensor | None = None,
    record: bool = False,
) -> None:  # fmt: skip
    """One of three passes over dense sequences, in place of the portable kernels, whose arguments these are.

    scaled: Q, A, Y, Z (B, T, H, K); matrices: M and P (slots, H, 64, 64), and the second M and P of dplr, which has no
    beta (B, T, H). v and out (B, T, H, V), totals (slots, H, K), start and final (B, H, V, K) float32, states
    (slots, H, V, K). Forward: o into `out`. With `record`: u into `out`, X into `states`. With dv: v is do, start is
    dfinal, final receives dstart, `out` r, `states` dX'.
    """
    b, t, h, d = v.shape
    n, two = cdiv(t, 64), beta is None
    qs, as_, ys, zs = (token_tiles(x, d) for x in scaled)
    squares = [matrix_tiles(x) for x in matrices * (1 if two else 2)]
    _walk[(b * h,)](
        as_, ys, zs, qs, token_tiles(v, 64), *squares, token_tiles(out, 64), token_tiles(out if dv is None else dv, 64),
        squares[0] if states is None else matrix_tiles(states, 64), totals if beta is None else aligned(beta), totals,
        final if start is None else aligned(start), final, t, n, h, LAST=1 if two and not record else 2, TWO=two,
        STARTED=start is not None, RECORD=record, BACK=dv is not None, num_warps=4, **_LAUNCH[d],
    )  # fmt: skip
