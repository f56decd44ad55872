"""The gated delta rule forward on Hopper: the mathematics of `scalar_delta`, products of whole warpgroups, in Gluon.

Chunks of C = 64 tokens, first state S (V x K), cumulative log gates G, D_ij = e^(G_i - G_j) for i >= j:
    prepare, every chunk at once:  W = (I + strict(K K^T * D) diag(beta))^-1,  e^G,  e^(G_last - G)
    chain, serial over chunks:     P = lower(Q K^T * D),  z = V - e^G (K S^T),  u = beta (W z),
                                   o = e^G (Q S^T) + P u,  S' = e^G_last S + (e^(G_last - G) u)^T K
W z is what each token writes before its strength: beta W = M beta with the M of `scalar_delta`.
The chain keeps values transposed, (V, C) tiles: the left operand of each product is then the result of the one
before, which a warpgroup has in registers, and the right one a tile of the inputs as it came. A program owns a head;
one or two warpgroups own 64 of its values each and never talk; one more makes P ahead of them, one warp feeds them all.
A unit is a batch entry, or one of its segments of whole chunks: a row of tiles further down in the same tensors. Sizes
are arguments, never constants: one binary for every number of heads.
Two strengths, c of writes and beta of erases: V is multiplied by c / beta, beta held away from zero, so that c V is
written.
Queries, P and o may be there for the last of n tokens alone: tiles of 64 / n rows, columns of the products above.
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
from axes.kernels.common.warpgroup import add, apart, floored, left_layout, product_layout, retire, segment, times
from axes.kernels.scalar.hopper_inverse import inverse

_C = gl.constexpr(64)  # tokens of a chunk, values of a warpgroup, rows of a warpgroup's product
# rows of a chunk's per-token numbers: e^G, beta, e^(G_last - G), G log2 e; the third is c / beta where there are two
# strengths, and where not every token is read e^G and, from `_READ` on, G log2 e of those that are
_NUMBERS = gl.constexpr(4)
_READ = gl.constexpr(32)
_SIZES = ["T", "S", "L", "N", "H"]  # one kernel for all of them


# ---- every chunk at once -----------------------------------------------------------------------------------------


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def _prepare(
    k_tiles, w_tiles, beta, write, g, numbers, runs, bounds, T, S, L, N, H,
    GATED: gl.constexpr, CUT: gl.constexpr, TWO: gl.constexpr, EVERY: gl.constexpr,
):  # fmt: skip
    """W and the per-token numbers of one chunk of one head; CUT: G as it is and the log of a bound on how far the
    chunk's map stretches a state, for the maps of segments."""
    K: gl.constexpr = k_tiles.block_shape[2]
    DTYPE: gl.constexpr = k_tiles.dtype
    pid = gl.program_id(0)
    n, uh = pid % N, pid // N
    h = uh % H
    b, first = segment(uh // H, S, L)
    first += n * _C
    late: gl.constexpr = gl.SliceLayout(1, product_layout(_C))
    early: gl.constexpr = gl.SliceLayout(0, product_layout(_C))
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])

    keys = gl.allocate_shared_memory(DTYPE, [1, _C, K], k_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, _C * K * 2)
    async_load(k_tiles, [b, first, h * K], ready, keys)

    token = first + gl.arange(0, _C, layout=line)
    at = (b.to(gl.int64) * T + token) * H + h
    strength = gl.load(beta + at, mask=token < T, other=0.0)
    if TWO:
        strength = apart(strength)
    if GATED:
        log = floored(gl.load(g + at, mask=token < T, other=0.0))
        run = gl.associative_scan(log, 0, add)
        total = gl.sum(log, 0)
    else:
        run = gl.zeros([_C], gl.float32, line)
        total = 0.0
    to = numbers + pid.to(gl.int64) * (_NUMBERS * _C) + gl.arange(0, _C, layout=line)
    gl.store(to, gl.exp(run))
    gl.store(to + _C, strength)
    if TWO:
        gl.store(to + 2 * _C, gl.load(write + at, mask=token < T, other=0.0) / strength)
    elif EVERY == 1:
        gl.store(to + 2 * _C, gl.exp(total - run))
    if CUT and GATED:
        gl.store(runs + at, run, mask=token < T)
    run = run * 1.4426950408889634  # log2 e
    gl.store(to + 3 * _C, run)
    if EVERY > 1:
        i = gl.arange(0, _C, layout=line)
        read = numbers + pid.to(gl.int64) * (_NUMBERS * _C) + 2 * _C + i // EVERY
        gl.store(read, gl.exp2(run), mask=i % EVERY == EVERY - 1)
        gl.store(read + _READ, run, mask=i % EVERY == EVERY - 1)

    i = gl.arange(0, _C, layout=late)[:, None]
    j = gl.arange(0, _C, layout=early)[None, :]
    span = gl.convert_layout(run, late)[:, None] - gl.convert_layout(run, early)[None, :]
    decay = gl.exp2(gl.where(i > j, span, float("-inf"))) * gl.convert_layout(strength, early)[None, :]
    mbarrier.wait(ready, 0)
    retire(ready)
    keys = keys.reshape([_C, K])
    lower = warpgroup_mma_wait(0, [times(keys, keys.permute((1, 0)), _C)])
    if CUT and GATED:
        square = gl.sum(gl.where(i == j, lower, 0.0), axis=1) * gl.convert_layout(strength, late)
        gl.store(bounds + pid, total + gl.sum(gl.log(gl.maximum(square - 1.0, 1.0)), 0))
    x = inverse(decay * lower)
    out = gl.allocate_shared_memory(DTYPE, [_C, _C], w_tiles.layout, x.to(DTYPE))
    fence_async_shared()
    async_store(w_tiles, [pid * _C, 0], out)
    store_wait(0)


# ---- serial over chunks ------------------------------------------------------------------------------------------


@gluon.jit
def _feed(tiles, stages, filled, freed, S, L, N, H, WIDE: gl.constexpr):
    """One warp: a chunk's tiles into the next free stage."""
    k_tiles, q_tiles, w_tiles, v_tiles, number_rows = tiles
    keys, queries, inverses, values, numbers = stages
    K: gl.constexpr = k_tiles.block_shape[2]
    STAGES: gl.constexpr = keys.shape[0]
    READS: gl.constexpr = queries.shape[2]
    BYTES: gl.constexpr = 2 * ((_C + READS) * K + _C * _C + WIDE * _C * _C) + 4 * _NUMBERS * _C
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
        async_load(number_rows, [(bh * N + n) * (_NUMBERS * _C)], bar, numbers.index(stage))
        for w in gl.static_range(WIDE):
            to = values.index(stage * WIDE + w)
            async_load(v_tiles, [b, here, (h * WIDE + w) * _C], bar, to)
        async_load(q_tiles, [b, here // (_C // READS), h * K], bar, queries.index(stage))
        async_load(w_tiles, [(bh * N + n) * _C, 0], bar, inverses.index(stage))


@gluon.jit
def _score(p_tiles, squares, stages, bars, N, RECORD: gl.constexpr):
    """One warpgroup: P of a chunk, one chunk or two ahead of those who read it."""
    keys, queries, inverses, values, numbers = stages
    filled, freed, scored, used = bars
    STAGES: gl.constexpr = keys.shape[0]
    BUFFERS: gl.constexpr = squares.shape[0]
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    READS: gl.constexpr = queries.shape[2]
    EVERY: gl.constexpr = _C // READS
    HALF: gl.constexpr = min(READS, _C // 2)  # reads at a time: registers are for those who carry the state
    late: gl.constexpr = gl.SliceLayout(0, product_layout(HALF))
    early: gl.constexpr = gl.SliceLayout(1, product_layout(HALF))
    j = gl.arange(0, _C, layout=early)[:, None]
    bh = gl.program_id(0)
    for n in range(N):
        stage = n % STAGES
        buffer = n % BUFFERS
        square = squares.index(buffer)
        mbarrier.wait(filled.index(stage), n // STAGES & 1)
        mbarrier.wait(used.index(buffer), (n // BUFFERS & 1) ^ 1)
        if RECORD:
            store_wait(BUFFERS - 1)
        key = keys.index(stage).reshape([_C, K])
        query = queries.index(stage).reshape([READS, K])
        number = reinterpret(numbers.index(stage), gl.float32, [_NUMBERS, _C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        if EVERY == 1:
            runs = number.index(3)
        else:
            runs = number.index(2).slice(_READ, READS)
        for part in gl.static_range(READS // HALF):
            i = (part * HALF + gl.arange(0, HALF, layout=late)[None, :]) * EVERY + EVERY - 1
            product = times(key, query.slice(part * HALF, HALF).permute((1, 0)), HALF)
            span = runs.slice(part * HALF, HALF).load(late)[None, :] - number.index(3).load(early)[:, None]
            decay = gl.exp2(gl.where(i >= j, span, float("-inf")))
            product = warpgroup_mma_wait(0, [product])
            square.slice(part * HALF, HALF).permute((1, 0)).store((product * decay).to(DTYPE))
        fence_async_shared()
        mbarrier.arrive(freed.index(stage), count=1)
        mbarrier.arrive(scored.index(buffer), count=1)
        if RECORD:
            async_store(p_tiles, [(bh * N + n) * READS, 0], square)
    if RECORD:
        store_wait(0)


@gluon.jit
def _advance(
    W: gl.constexpr, o_tiles, outs, squares, stages, bars, start, final, S, L, N, H,
    WIDE: gl.constexpr, STARTED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 values of one head through time."""
    keys, queries, inverses, values, numbers = stages
    filled, freed, scored, used = bars
    BUFFERS: gl.constexpr = squares.shape[0]
    STAGES: gl.constexpr = keys.shape[0]
    K: gl.constexpr = keys.shape[3]
    DTYPE: gl.constexpr = keys.dtype
    READS: gl.constexpr = queries.shape[2]
    EVERY: gl.constexpr = _C // READS
    square: gl.constexpr = product_layout(_C)
    reading: gl.constexpr = gl.SliceLayout(0, product_layout(READS))
    wide: gl.constexpr = product_layout(K)
    left: gl.constexpr = left_layout(_C)
    bh = gl.program_id(0)
    h = bh % H
    b, first = segment(bh // H, S, L)
    e = W * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = bh.to(gl.int64) * (WIDE * _C * K) + e[:, None] * K + d[None, :]
    if STARTED:
        state = gl.load(start + place)
    else:
        state = gl.zeros([_C, K], gl.float32, wide)
    out = outs.index(W)
    for n in range(N):
        stage = n % STAGES
        old = gl.convert_layout(state.to(DTYPE), left)
        mbarrier.wait(filled.index(stage), n // STAGES & 1)
        key = keys.index(stage).reshape([_C, K])
        query = queries.index(stage).reshape([READS, K])
        number = reinterpret(numbers.index(stage), gl.float32, [_NUMBERS, _C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # what is missing, then what each token writes, its read of the old state meanwhile
        known = times(old, key.permute((1, 0)), _C)
        value = values.index(stage * WIDE + W).reshape([_C, _C]).permute((1, 0)).load(square).to(gl.float32)
        reach = number.index(0).load(gl.SliceLayout(0, square))[None, :]
        total = number.index(0).slice(_C - 1, 1).load(gl.SliceLayout(0, wide))[None, :]
        if TWO:
            value = number.index(2).load(gl.SliceLayout(0, square))[None, :] * value
        known = warpgroup_mma_wait(0, [known])
        missing = gl.convert_layout((value - reach * known).to(DTYPE), left)
        u = times(missing, inverses.index(stage).permute((1, 0)), _C)
        read = times(old, query.permute((1, 0)), READS)
        u = warpgroup_mma_wait(1, [u])
        u = number.index(1).load(gl.SliceLayout(0, square))[None, :] * u
        # the state first: the next chunk waits for it
        if TWO or EVERY > 1:  # its row has other numbers
            last = number.index(3).slice(_C - 1, 1).load(gl.SliceLayout(0, square))
            rest = gl.exp2(last - number.index(3).load(gl.SliceLayout(0, square)))[None, :]
        else:
            rest = number.index(2).load(gl.SliceLayout(0, square))[None, :]
        kept = gl.convert_layout((rest * u).to(DTYPE), left)
        state = warpgroup_mma(kept, key, state * total, is_async=True)
        given = gl.convert_layout(u.to(DTYPE), left)
        buffer = n % BUFFERS
        mbarrier.wait(scored.index(buffer), n // BUFFERS & 1)
        read = warpgroup_mma_wait(1, [read])
        if EVERY == 1:
            read *= reach
        else:
            read *= number.index(2).slice(0, READS).load(reading)[None, :]
        read = warpgroup_mma(given, squares.index(buffer).permute((1, 0)), read, is_async=True)
        state, read = warpgroup_mma_wait(0, [state, read])
        fence_async_shared()
        mbarrier.arrive(freed.index(stage), count=1)
        mbarrier.arrive(used.index(buffer), count=1)
        store_wait(0)
        out.reshape([READS, _C]).permute((1, 0)).store(read.to(DTYPE))
        fence_async_shared()
        async_store(o_tiles, [b, (first + n * _C) // EVERY, (h * WIDE + W) * _C], out)
    gl.store(final + place, state)
    store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=_SIZES)
def _chain(
    q_tiles, k_tiles, v_tiles, w_tiles, p_tiles, number_rows, o_tiles, start, final, S, L, N, H,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, ADVANCE: gl.constexpr, SCORE: gl.constexpr,
    STARTED: gl.constexpr, RECORD: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """o and the final state of one head of one unit."""
    K: gl.constexpr = k_tiles.block_shape[2]
    WIDE: gl.constexpr = K // _C
    DTYPE: gl.constexpr = k_tiles.dtype
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, K], k_tiles.layout)
    READS: gl.constexpr = q_tiles.block_shape[1]
    queries = gl.allocate_shared_memory(DTYPE, [STAGES, 1, READS, K], q_tiles.layout)
    inverses = gl.allocate_shared_memory(DTYPE, [STAGES, _C, _C], w_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, 1, _C, _C], v_tiles.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES, _NUMBERS * _C], number_rows.layout)
    squares = gl.allocate_shared_memory(DTYPE, [BUFFERS, READS, _C], p_tiles.layout)
    outs = gl.allocate_shared_memory(DTYPE, [WIDE, 1, READS, _C], o_tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=WIDE + 1)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(scored.index(buffer), count=1)
        mbarrier.init(used.index(buffer), count=WIDE)
    tiles = (k_tiles, q_tiles, w_tiles, v_tiles, number_rows)
    stages = (keys, queries, inverses, values, numbers)
    bars = (filled, freed, scored, used)
    if WIDE == 2:
        gl.warp_specialize(
            [
                (_advance, (0, o_tiles, outs, squares, stages, bars, start, final, S, L, N, H, WIDE, STARTED, TWO)),
                (_advance, (1, o_tiles, outs, squares, stages, bars, start, final, S, L, N, H, WIDE, STARTED, TWO)),
                (_score, (p_tiles, squares, stages, bars, N, RECORD)),
                (_feed, (tiles, stages, filled, freed, S, L, N, H, WIDE)),
            ],
            [4, 4, 1],
            [ADVANCE, SCORE, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_advance, (0, o_tiles, outs, squares, stages, bars, start, final, S, L, N, H, WIDE, STARTED, TWO)),
                (_score, (p_tiles, squares, stages, bars, N, RECORD)),
                (_feed, (tiles, stages, filled, freed, S, L, N, H, WIDE)),
            ],
            [4, 1],
            [SCORE, 24],
        )
    retire(filled)
    retire(freed)
    retire(scored)
    retire(used)


# ---- launches ----------------------------------------------------------------------------------------------------

# By width: the chain's stages and buffers of P, registers a thread at launch (the same for all warpgroups, so that as
# many programs as shared memory allows share a processor) and those of its warpgroups once they part ways.
_LAUNCH = {
    128: {"STAGES": 3, "BUFFERS": 2, "ADVANCE": 216, "SCORE": 56, "maxnreg": 128},
    64: {"STAGES": 2, "BUFFERS": 2, "ADVANCE": 168, "SCORE": 48, "maxnreg": 80},  # one ADVANCE: it gets what is left
}


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether forward and backward may be called: 16 bit, K = V in {64, 128}, as many heads, on a Hopper processor."""
    plain = q.dtype in (torch.bfloat16, torch.float16) and v.dtype == q.dtype and q.ndim == 4 and v.shape == q.shape
    if not plain or q.shape[-1] not in _LAUNCH or 0 in q.shape:
        return False
    return hopper_refusal(q.device) is None


def prepare(
    k: Tensor, beta: Tensor, g: Tensor | None, segments: int = 1, length: int | None = None,
    runs: Tensor | None = None, bounds: Tensor | None = None, write: Tensor | None = None, every: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """W (units, H, N, 64, 64) and the per-token numbers of every chunk, from k (B, T, H, D), beta and g (B, T, H).

    An entry's T tokens are `segments` units of `length` tokens, a multiple of 64 where there is more than one; the last
    may be shorter. runs (B, T, H) and bounds (units * H * N), both or neither, receive cumulative gates and the logs of
    bounds on how far chunks' maps stretch a state. write: strengths of writes; beta is then of erases alone. every: of
    so many tokens the last is read.
    """
    b, t, h, d = k.shape
    beta = aligned(beta)
    length = t if length is None else length
    n = cdiv(length, 64)
    w = k.new_empty(b * segments, h, n, 64, 64)
    numbers = beta.new_empty(b * segments, h, n, 4, 64)
    _prepare[(b * segments * h * n,)](
        token_tiles(k, d), matrix_tiles(w), beta, beta if write is None else aligned(write),
        aligned(beta if g is None else g), numbers, runs, bounds,
        t, segments, length, n, h, GATED=g is not None, CUT=runs is not None, TWO=write is not None, EVERY=every,
        num_warps=4,
    )  # fmt: skip
    return w, numbers


def chain(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, numbers: Tensor, start: Tensor | None,
    segments: int = 1, length: int | None = None, record: bool = True, two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final states of all units, and P of every chunk, (units, H, N, 64, 64): empty without `record`.

    S_t = e^g_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t. q, k, v (B, T, H, D) that `fits`, or
    q and o of T / n tokens, each the last of n, and P (units, H, N, 64 / n, 64); w and numbers from `prepare` with the
    same units and n, and `two` strengths or one; start and final (units, H, D, D) float32, rows are values; all
    contiguous. Raises nothing: whoever calls it has checked.
    """
    b, t, h, d = k.shape
    units, _, n = w.shape[:3]
    rows = 64 * q.shape[1] // t
    length = t if length is None else length
    o, final = torch.empty_like(q), q.new_empty(units, h, d, d, dtype=torch.float32)
    p = w.new_empty(units, h, n, rows, 64) if record else w.new_empty(0)
    _chain[(units * h,)](
        token_tiles(q, d, rows), token_tiles(k, d), token_tiles(v, 64), matrix_tiles(w),
        matrix_tiles(p if record else w, rows), number_tiles(numbers), token_tiles(o, 64, rows),
        final if start is None else aligned(start), final,
        segments, length, n, h,
        STARTED=start is not None, RECORD=record, TWO=two, num_warps=4, **_LAUNCH[d],
    )  # fmt: skip
    return o, final, p
