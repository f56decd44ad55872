"""The chain with one decay a channel and rule "write" on Hopper: the serial passes of `diagonal`, each in one kernel.

Of a chunk of C = 64 tokens with first state S (V x K) and cumulative log gates G, a warpgroup makes, ahead of the
others, r = q e^G and m = k e^(G_last - G), and one or two warpgroups own 64 values each, transposed throughout:
    "o"       o = S r^T + v^T P^T,  P = lower(r w^T),  w = k e^-G       S' = S Diag(e^G_last) + v^T m
    "states"  S of every chunk into memory
    "dv"      dv = dS' m^T + do^T P, dS' of every chunk into memory     dS = dS' Diag(e^G_last) + do^T r
    "ends"    only the last state; "dends" only the gradient of the first
Averaged, k (1 - e^g) stands for k, where k is scaled anyway.
With a bonus, tokens are read before their own gate and write: r = q e^(G - g), lower is strict, and P's diagonal is
<bonus * k, q>. "o" needs no states in memory. A chunk in which a channel decays by more than e^-MILD has no w: its P is
left zero, and `diagonal` adds what its pairs are to o. G and G_last - G are sums and differences in float32: within
2^-12 where every token is closed (-100, the floor), and exactly 0 for the last one.
Few heads: an entry's chunks are cut into segments, units with first states of their own. A segment's map of states is
S -> S Diag(e^(sum of its logs)) + its "ends" from zero; `_merge` carries states over the segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.bulk import matrix_tiles, token_tiles
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
from axes.kernels.common.warpgroup import add, arrive, floored, left_layout, product_layout, published, retire, times

_C = gl.constexpr(64)  # tokens of a chunk, values of a warpgroup, channels that are scaled at a time


@gluon.jit
def _power(x):
    """e^x in two instructions."""
    return gl.exp2(x * 1.4426950408889634)


@gluon.jit
def complement(log):
    """`tiles.complement`: 1 - e^log of log <= 0."""
    near = -log * (1.0 + log * (0.5 + log * (0.16666667 + log * 0.041666667)))
    return gl.where(log > -0.0625, near, 1.0 - _power(log))


@gluon.jit
def _span(sizes):
    """Of the unit and head of a program: batch entry, head, first chunk in the entry and number of chunks."""
    T, N, S, L, HV = sizes
    pid = gl.program_id(0)
    unit = pid // HV
    b = unit // S
    first = (unit - b * S) * L
    return b, pid % HV, first, gl.minimum(L, N - first)


@gluon.jit
def _place(count, first, chunks, REVERSE: gl.constexpr):
    """The chunk that comes as number `count`."""
    n = first + count
    if REVERSE:
        n = first + chunks - 1 - count
    return n


@gluon.jit
def _feed(tiles, stages, filled, freed, sizes, GROUP: gl.constexpr, WIDE: gl.constexpr, MODE: gl.constexpr):
    """One warp: a chunk's tiles into the next free stage."""
    reader_tiles, writer_tiles, g_tiles, v_tiles, p_tiles, state_tiles, o_tiles = tiles
    readers, writers, gates, values, squares = stages
    T, N, S, L, HV = sizes
    OUT: gl.constexpr = MODE == "o" or MODE == "dv"
    REVERSE: gl.constexpr = MODE == "dv" or MODE == "dends"
    STAGES: gl.constexpr = writers.shape[0]
    K: gl.constexpr = writer_tiles.block_shape[2]
    TOKENS: gl.constexpr = (2 if OUT else 1) * K + WIDE * _C + (_C if MODE == "dv" else 0)
    BYTES: gl.constexpr = 2 * _C * TOKENS + g_tiles.dtype.primitive_bitwidth // 8 * _C * K
    b, h, first, chunks = _span(sizes)
    for count in range(chunks):
        n = _place(count, first, chunks, REVERSE)
        stage = count % STAGES
        bar = filled.index(stage)
        mbarrier.wait(freed.index(stage), (count // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        async_load(g_tiles, [b, n * _C, h * K], bar, gates.index(stage))
        async_load(writer_tiles, [b, n * _C, h // GROUP * K], bar, writers.index(stage))
        if OUT:
            async_load(reader_tiles, [b, n * _C, h // GROUP * K], bar, readers.index(stage))
        for w in gl.static_range(WIDE):
            to = values.index(stage * WIDE + w)
            async_load(v_tiles, [b, n * _C, (h * WIDE + w) * _C], bar, to)
        if MODE == "dv":
            async_load(p_tiles, [((b * N + n) * HV + h) * _C, 0], bar, squares.index(stage))


@gluon.jit
def _scale(
    given, stages, fades, falls, bars, sizes,
    WIDE: gl.constexpr, STRONG: gl.constexpr, AVERAGE: gl.constexpr, BONUS: gl.constexpr, MILD: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: r and m in the place of q and k, beta v in that of v, and P, ahead of those who read them."""
    beta, bonus, totals = given
    readers, writers, gates, values, squares = stages
    filled, freed, scored, kept, left, done, sent = bars
    T, N, S, L, HV = sizes
    OUT: gl.constexpr = MODE == "o" or MODE == "dv"
    REVERSE: gl.constexpr = MODE == "dv" or MODE == "dends"
    STAGES: gl.constexpr = writers.shape[0]
    K: gl.constexpr = writers.shape[3]
    DTYPE: gl.constexpr = writers.dtype
    own: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(0, own)
    i = gl.arange(0, _C, layout=gl.SliceLayout(1, product_layout(_C)))[:, None]
    j = gl.arange(0, _C, layout=gl.SliceLayout(0, product_layout(_C)))[None, :]
    row = gl.arange(0, _C, layout=gl.SliceLayout(1, own))
    b, h, first, chunks = _span(sizes)
    for count in range(chunks):
        n = _place(count, first, chunks, REVERSE)
        stage = count % STAGES
        if STRONG:
            token = n * _C + row
            strength = gl.load(beta + (b.to(gl.int64) * T + token) * HV + h, mask=token < T, other=0.0)[:, None]
        mbarrier.wait(filled.index(stage), count // STAGES & 1)
        reader = readers.index(stage).reshape([_C, K])
        writer = writers.index(stage).reshape([_C, K])
        gate = gates.index(stage).reshape([_C, K])
        least = 0.0
        own_read = gl.zeros([_C], gl.float32, gl.SliceLayout(1, own))
        for part in gl.static_range(K // _C):
            log = floored(gate.slice(part * _C, _C, dim=1).load(own).to(gl.float32))
            run = gl.associative_scan(log, 0, add)
            total = gl.sum(gl.where((row == _C - 1)[:, None], run, 0.0), 0)
            falls.index(stage).slice(part * _C, _C).store(_power(total))
            ahead = total[None, :] - run
            read = run
            if BONUS:
                read = run - log
            if REVERSE:
                reach, rest = ahead, read
            else:
                reach, rest = read, ahead
            column = part * _C + gl.arange(0, _C, layout=line)
            tile = writer.slice(part * _C, _C, dim=1)
            x = tile.load(own).to(gl.float32)
            if AVERAGE and not REVERSE:
                x = x * complement(log)
            tile.store((x * _power(rest)).to(DTYPE))
            if MODE == "o":
                least = gl.minimum(least, gl.min(total, 0))
                fade = _power(gl.minimum(-run, MILD))  # held where w is not used
                fades.slice(part * _C, _C, dim=1).store((x * fade).to(DTYPE))
            if OUT:
                tile = reader.slice(part * _C, _C, dim=1)
                y = tile.load(own).to(gl.float32)
                if AVERAGE and REVERSE:
                    y = y * complement(log)
                tile.store((y * _power(reach)).to(DTYPE))
                if BONUS and MODE == "o":
                    own_read += gl.sum(x * y * gl.load(bonus + h * K + column)[None, :], 1)
            if not REVERSE:
                gl.store(totals + ((b * N + n).to(gl.int64) * HV + h) * K + column, total)
        if STRONG:
            for w in gl.static_range(WIDE):
                tile = values.index(stage * WIDE + w).reshape([_C, _C])
                tile.store((tile.load(own).to(gl.float32) * strength).to(DTYPE))
        published()
        if MODE == "o":
            scores = warpgroup_mma_wait(0, [times(reader, fades.permute((1, 0)), _C)])
            if BONUS:
                self = gl.convert_layout(own_read, gl.SliceLayout(1, product_layout(_C)))[:, None]
                scores = gl.where(i == j, self, scores)
            squares.index(stage).store(gl.where((i >= j) & (least >= -MILD), scores, 0.0).to(DTYPE))
            published()
        mbarrier.arrive(scored.index(stage), count=1)


@gluon.jit
def _advance(
    P: gl.constexpr, outs, olds, falls, stages, bars, start, final, sizes,
    WIDE: gl.constexpr, STARTED: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 values of one head through time."""
    readers, writers, gates, values, squares = stages
    filled, freed, scored, kept, left, done, sent = bars
    OUT: gl.constexpr = MODE == "o" or MODE == "dv"
    TRACE: gl.constexpr = MODE == "states" or MODE == "dv"
    STAGES: gl.constexpr = writers.shape[0]
    K: gl.constexpr = writers.shape[3]
    DTYPE: gl.constexpr = writers.dtype
    wide: gl.constexpr = product_layout(K)
    b, h, first, chunks = _span(sizes)
    e = P * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    place = gl.program_id(0).to(gl.int64) * (WIDE * _C * K) + e[:, None] * K + d[None, :]
    if STARTED:
        state = gl.load(start + place)
    else:
        state = gl.zeros([_C, K], gl.float32, wide)
    out = outs.index(P).reshape([_C, _C]).permute((1, 0))
    for count in range(chunks):
        stage = count % STAGES
        half = state.to(DTYPE)
        if TRACE:
            mbarrier.wait(left, (count & 1) ^ 1)
            olds.index(P).store(half)
            fence_async_shared()
            arrive(kept)
        mbarrier.wait(filled.index(stage), count // STAGES & 1)
        mbarrier.wait(scored.index(stage), count // STAGES & 1)
        value = values.index(stage * WIDE + P).reshape([_C, _C]).permute((1, 0))
        if OUT:
            reader = readers.index(stage).reshape([_C, K])
            if MODE == "o":
                scores = squares.index(stage).permute((1, 0))
            else:
                scores = squares.index(stage)
            result = times(gl.convert_layout(half, left_layout(_C)), reader.permute((1, 0)), _C)
            result = warpgroup_mma(value, scores, result, is_async=True)
        state = state * falls.index(stage).load(gl.SliceLayout(0, wide))[None, :]
        state = warpgroup_mma(value, writers.index(stage).reshape([_C, K]), state, is_async=True)
        if OUT:
            result = warpgroup_mma_wait(1, [result])
            mbarrier.wait(sent, (count & 1) ^ 1)
            out.store(result.to(DTYPE))
            fence_async_shared()
            arrive(done)
        state = warpgroup_mma_wait(0, [state])
        arrive(freed.index(stage))
    gl.store(final + place, state)


@gluon.jit
def _carry(
    tiles, outs, olds, squares, bars, sizes, STAGES: gl.constexpr, WIDE: gl.constexpr, KEEP: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """One warp: what the warpgroups made into memory."""
    reader_tiles, writer_tiles, g_tiles, v_tiles, p_tiles, state_tiles, o_tiles = tiles
    filled, freed, scored, kept, left, done, sent = bars
    T, N, S, L, HV = sizes
    OUT: gl.constexpr = MODE == "o" or MODE == "dv"
    TRACE: gl.constexpr = MODE == "states" or MODE == "dv"
    b, h, first, chunks = _span(sizes)
    for count in range(chunks):
        n = _place(count, first, chunks, MODE == "dv")
        stage = count % STAGES
        matrix = (b * N + n) * HV + h
        if KEEP:
            mbarrier.wait(scored.index(stage), count // STAGES & 1)
            async_store(p_tiles, [matrix * _C, 0], squares.index(stage))
        if TRACE:
            mbarrier.wait(kept, count & 1)
            for w in gl.static_range(WIDE):
                async_store(state_tiles, [(matrix * WIDE + w) * _C, 0], olds.index(w))
        if OUT:
            mbarrier.wait(done, count & 1)
            for w in gl.static_range(WIDE):
                async_store(o_tiles, [b, n * _C, (h * WIDE + w) * _C], outs.index(w))
        if OUT and TRACE:
            store_wait(WIDE)
            arrive(left)
        if OUT or TRACE:
            store_wait(0)
        if KEEP:
            arrive(freed.index(stage))
        if OUT:
            arrive(sent)
        elif TRACE:
            arrive(left)


@Kernel
@gluon.jit(do_not_specialize=["T", "N", "S", "L", "HV"])
def _chain(
    reader_tiles, writer_tiles, g_tiles, v_tiles, p_tiles, state_tiles, o_tiles, beta, bonus, totals, start, final,
    T, N, S, L, HV,
    GROUP: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, ADVANCE: gl.constexpr, SCALE: gl.constexpr,
    STARTED: gl.constexpr, STRONG: gl.constexpr, AVERAGE: gl.constexpr, BONUS: gl.constexpr, KEEP: gl.constexpr,
    MILD: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One pass over the chunks of one head of one unit."""
    OUT: gl.constexpr = MODE == "o" or MODE == "dv"
    TRACE: gl.constexpr = MODE == "states" or MODE == "dv"
    K: gl.constexpr = writer_tiles.block_shape[2]
    DTYPE: gl.constexpr = writer_tiles.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    writers = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, K], writer_tiles.layout)
    gates = gl.allocate_shared_memory(g_tiles.dtype, [STAGES, 1, _C, K], g_tiles.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, 1, _C, _C], v_tiles.layout)
    falls = gl.allocate_shared_memory(gl.float32, [STAGES, K], flat)
    readers = writers
    squares = writers
    outs = values
    fades = writers
    olds = writers
    if OUT:
        readers = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, K], reader_tiles.layout)
        squares = gl.allocate_shared_memory(DTYPE, [STAGES, _C, _C], p_tiles.layout)
        outs = gl.allocate_shared_memory(DTYPE, [WIDE, 1, _C, _C], o_tiles.layout)
    if MODE == "o":
        fades = gl.allocate_shared_memory(DTYPE, [_C, K], p_tiles.layout)
    if TRACE:
        olds = gl.allocate_shared_memory(DTYPE, [WIDE, _C, K], state_tiles.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kept = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # old states are in their tiles
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # and have left
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # outputs are in their tiles
    sent = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # and have left
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=WIDE + KEEP)
        mbarrier.init(scored.index(stage), count=1)
    mbarrier.init(kept, count=WIDE)
    mbarrier.init(left, count=1)
    mbarrier.init(done, count=WIDE)
    mbarrier.init(sent, count=1)
    published()
    tiles = (reader_tiles, writer_tiles, g_tiles, v_tiles, p_tiles, state_tiles, o_tiles)
    stages = (readers, writers, gates, values, squares)
    bars = (filled, freed, scored, kept, left, done, sent)
    sizes = (T, N, S, L, HV)
    given = (beta, bonus, totals)
    if WIDE == 2:
        gl.warp_specialize(
            [
                (_advance, (0, outs, olds, falls, stages, bars, start, final, sizes, WIDE, STARTED, MODE)),
                (_advance, (1, outs, olds, falls, stages, bars, start, final, sizes, WIDE, STARTED, MODE)),
                (_scale, (given, stages, fades, falls, bars, sizes, WIDE, STRONG, AVERAGE, BONUS, MILD, MODE)),
                (_feed, (tiles, stages, filled, freed, sizes, GROUP, WIDE, MODE)),
                (_carry, (tiles, outs, olds, squares, bars, sizes, STAGES, WIDE, KEEP, MODE)),
            ],
            [4, 4, 1, 1],
            [ADVANCE, SCALE, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_advance, (0, outs, olds, falls, stages, bars, start, final, sizes, WIDE, STARTED, MODE)),
                (_scale, (given, stages, fades, falls, bars, sizes, WIDE, STRONG, AVERAGE, BONUS, MILD, MODE)),
                (_feed, (tiles, stages, filled, freed, sizes, GROUP, WIDE, MODE)),
                (_carry, (tiles, outs, olds, squares, bars, sizes, STAGES, WIDE, KEEP, MODE)),
            ],
            [4, 1, 1],
            [SCALE, 24, 24],
        )
    retire(filled)
    retire(freed)
    retire(scored)
    retire(kept)
    retire(left)
    retire(done)
    retire(sent)


@Kernel
@triton.jit(do_not_specialize=["N", "S", "L", "HV"])
def _merge(
    constants, totals, starts, N, S, L, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """States before the segments of an entry, one after another, in float32: X <- X Diag(e^(sum of logs)) + constant.

    starts holds the first state of the first segment (REVERSE: the gradient of the last segment's last state) and
    receives the others.
    """
    PARTS: tl.constexpr = V // BV
    pid = tl.program_id(0).to(tl.int64)
    head = pid // PARTS % HV
    entry = pid // PARTS // HV
    d = tl.arange(0, K)
    tile = ((pid % PARTS) * BV + tl.arange(0, BV))[:, None] * K + d[None, :]
    place = S - 1 if REVERSE else 0
    step = -1 if REVERSE else 1
    state = tl.load(starts + ((entry * S + place) * HV + head) * (V * K) + tile)
    for _ in range(S - 1):
        run = tl.zeros([K], dtype=tl.float32)
        last = tl.minimum((place + 1) * L, N)
        for first in range(place * L, last, ROWS):
            n = first + tl.arange(0, ROWS)
            at = totals + ((entry * N + n) * HV + head)[:, None] * K + d[None, :]
            run += tl.sum(tl.load(at, mask=(n < last)[:, None], other=0.0), 0)
        state = state * tl.exp(run)[None, :] + tl.load(constants + ((entry * S + place) * HV + head) * (V * K) + tile)
        place += step
        tl.store(starts + ((entry * S + place) * HV + head) * (V * K) + tile, state)


# ---- launches ------------------------------------------------------------------------------------------------------

# Registers a thread at launch and those of the warpgroups once they part ways.
_LAUNCH = {"STAGES": 2, "ADVANCE": 176, "SCALE": 136, "maxnreg": 128, "num_warps": 4}
_PROCESSORS = 132  # of an H100 or H200: what the choice of segments fills


def segments_of(heads: int, chunks: int) -> int:
    """Segments of an entry of that many chunks, `heads` in the batch: one more pass pays from three on."""
    most = min(_PROCESSORS // max(1, heads), chunks // 8)
    return most if most >= 3 else 1


class _Pass(NamedTuple):
    """What every pass of a chain is given, and its cut: S segments of L chunks make an entry."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor | None
    bonus: Tensor | None
    average: bool
    hv: int
    d_v: int
    N: int
    S: int
    L: int

    def state(self) -> Tensor:
        """Float32 (units, HV, V, K)."""
        return self.q.new_empty(self.q.shape[0] * self.S, self.hv, self.d_v, self.q.shape[3], dtype=torch.float32)

    def states(self) -> Tensor:
        """(B N, HV, V, K) in the tokens' dtype."""
        return self.q.new_empty(self.q.shape[0] * self.N, self.hv, self.d_v, self.q.shape[3])

    def run(
        self, mode: str, v: Tensor, start: Tensor | None, final: Tensor, totals: Tensor, out: Tensor | None = None,
        scores: Tensor | None = None, states: Tensor | None = None, mild: float = 0.0,
    ) -> None:  # fmt: skip
        """One pass over v (or do) into what is given."""
        (b, t, h, d_k), hv = self.q.shape, self.hv
        out = v if out is None else out  # stands for what is not there, and is not touched
        reverse = mode in ("dv", "dends")
        reader, writer = (self.k, self.q) if reverse else (self.q, self.k)
        beta = None if reverse else self.beta
        _chain[(b * self.S * hv,)](
            token_tiles(reader, d_k), token_tiles(writer, d_k), token_tiles(self.g, d_k), token_tiles(v, 64),
            matrix_tiles(out if scores is None else scores, 64, 64, 64),
            matrix_tiles(out if states is None else states, 64, d_k, d_k),
            token_tiles(out, 64), *(final if x is None else x for x in (beta, self.bonus, totals, start)), final,
            t, self.N, self.S, self.L, hv,
            GROUP=hv // h, WIDE=self.d_v // 64, STARTED=start is not None, STRONG=beta is not None,
            AVERAGE=self.average, BONUS=self.bonus is not None, KEEP=mode == "o" and scores is not None, MILD=mild,
            MODE=mode, **_LAUNCH,
        )  # fmt: skip

    def edges(self, mode: str, v: Tensor, edge: Tensor | None, totals: Tensor) -> Tensor | None:
        """First states of all units ("dends": gradients of their last ones), from the edge of each entry inwards."""
        if self.S == 1:
            return edge
        reverse = mode == "dends"
        constants, starts = self.state(), self.state()
        self.run(mode, v, None, constants, totals)
        at = starts.view(-1, self.S, *starts.shape[1:])[:, self.S - 1 if reverse else 0]
        if edge is None:
            at.zero_()
        else:
            at.copy_(edge)
        _merge[(self.q.shape[0] * self.hv * (self.d_v // 16),)](
            constants, totals, starts, self.N, self.S, self.L, self.hv,
            K=self.q.shape[3], V=self.d_v, BV=16, ROWS=16, REVERSE=reverse, num_warps=4,
        )  # fmt: skip
        return starts

    def edge(self, finals: Tensor, place: int) -> Tensor:
        """Of an entry's segments the first's or last's (B, HV, V, K)."""
        return finals if self.S == 1 else finals.view(-1, self.S, *finals.shape[1:])[:, place].contiguous()


def _passes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, bonus: Tensor | None, average: bool,
    segments: int | None,
) -> tuple[_Pass, Tensor]:  # fmt: skip
    """Also room for totals of the logs of chunks, (B N, HV, K)."""
    n = cdiv(q.shape[1], 64)
    hv = v.shape[2]
    segments = segments_of(q.shape[0] * hv, n) if segments is None else segments
    length = cdiv(n, segments)
    made = _Pass(q, k, g, beta, bonus, average, hv, v.shape[3], n, cdiv(n, length), length)
    return made, q.new_empty(q.shape[0] * n, hv, q.shape[3], dtype=torch.float32)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, start: Tensor | None, mild: float, keep: bool,
    bonus: Tensor | None = None, average: bool = False, segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o and P without the pairs of chunks that are not mild, the final state, and totals of the logs: (B N, HV, K)."""
    x, totals = _passes(q, k, v, g, beta, bonus, average, segments)
    o, final, scores = torch.empty_like(v), x.state(), q.new_empty(totals.shape[0] * keep, x.hv, 64, 64)
    starts = x.edges("ends", v, start, totals)
    x.run("o", v, starts, final, totals, o, scores if keep else None, mild=mild)
    return o, x.edge(final, -1), scores, totals


def states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, start: Tensor | None, average: bool = False,
    segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """First states of chunks (B N, HV, V, K) in the tokens' dtype, the last (B, HV, V, K), and totals."""
    x, totals = _passes(q, k, v, g, beta, None, average, segments)
    made, final = x.states(), x.state()
    x.run("states", v, x.edges("ends", v, start, totals), final, totals, states=made)
    return made, x.edge(final, -1), totals


def values_backward(
    q: Tensor, k: Tensor, g: Tensor, do: Tensor, dfinal: Tensor, scores: Tensor, totals: Tensor,
    bonus: Tensor | None = None, average: bool = False, segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dv of strengths one, gradients of the states after chunks (B N, HV, V, K), and of the first one."""
    x, _ = _passes(q, k, do, g, None, bonus, average, segments)
    dv, made, dstarts = torch.empty_like(do), x.states(), x.state()
    x.run("dv", do, x.edges("dends", do, dfinal, totals), dstarts, totals, dv, scores, made)
    return dv, made, x.edge(dstarts, 0)
