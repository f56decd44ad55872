"""The scalar chain with rule "write" on Hopper: the mathematics of `scalar_write.mix`, products of whole warpgroups.

out = reach (x X) + ((x y^T) * D) z and X' = e^G_last X + y^T (weight z), chunks of C = 64 tokens, one serial kernel for
each of o, dq, dv, dk. Everything is kept transposed, (columns of z) x tokens and (columns of z) x (columns of x): the
left operand of each product is then in registers, what a product left or what was loaded, and the right one a tile as
it came from memory. A program owns a head of a unit; each of one or two warpgroups owns 64 columns of z and they never
talk; another makes the scores ahead of them; one warp feeds them all and one carries off what they made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.bulk import matrix_tiles, number_tiles, token_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
    barrier,
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
from axes.kernels.common.tiles import floored, reciprocal
from axes.kernels.common.versions import hopper_refusal
from axes.kernels.common.warpgroup import add, arrive, left_layout, product_layout, published, retire, segment, times
from axes.kernels.scalar.hopper_norm import (
    add_keys,
    find_in,
    first_norm,
    last_norm,
    parted,
    put_norm,
    put_weights,
)
from axes.kernels.scalar.tiles import chunk_span, load_line

WIDEST = 128  # rows of a state, and its columns
_C = gl.constexpr(64)  # tokens of a chunk, columns of z of a warpgroup
# Rows of a chunk's numbers: e^G, e^(G_last - G), G log2 e, beta; of means backwards as many more: 1 / c, dm, and beta's
# sign with its digits, from 1 to 2 in size, and its power of two.
_NUMBERS = gl.constexpr(4)  # that one copy brings


# ---- numbers of tokens ---------------------------------------------------------------------------------------------


@triton.jit
def put_numbers(at, beta, g, first, rows, head, HV, C: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr):
    """The first four rows of what scales the tiles of one chunk of one head."""
    if GATED:
        log = floored(load_line(g, first, rows, head, HV, C))
        run, total = tl.cumsum(log, 0), tl.sum(log, 0)
        tl.store(at, tl.exp(run))
        tl.store(at + C, tl.exp(total - run))
        tl.store(at + 2 * C, run * 1.4426950408889634)
    if WEIGHTED:
        tl.store(at + 3 * C, load_line(beta, first, rows, head, HV, C))


@Kernel
@triton.jit(do_not_specialize=["T", "S", "L", "N", "HV"])
def _numbers(beta, g, numbers, T, S, L, N, HV, C: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr):
    """What scales the tiles of one chunk of one head."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, rows, index = chunk_span(None, None, pid, T, S, L, N, HV, C, False)
    put_numbers(
        numbers + index * (4 * C) + tl.arange(0, C), beta, g, first, rows, head, HV, C, GATED, WEIGHTED
    )


# ---- pieces --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _summed(role, gated, weighted, mean):
    """Whether a role's output meets a tensor of its own, in sums over columns: for dg and dbeta."""
    return (gated and role in ("dq", "dk")) or (weighted and role == ("dk" if mean else "dv"))


@gluon.constexpr_function
def _parts(role, mean):
    """Copies of a chunk's numbers."""
    return 2 if mean and role != "o" else 1


@gluon.jit
def _span(T, S, L, N, HV):
    """Of the unit and head of a program: batch entry, head, first token and number of chunks."""
    pid = gl.program_id(0)
    b, first = segment(pid // HV, S, L)
    return b, pid % HV, first, (gl.minimum(L, T - first) + _C - 1) // _C


@gluon.jit
def _number(numbers, stage):
    """A chunk's numbers as (rows, tokens)."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(numbers.index(stage), gl.float32, [_NUMBERS, _C], flat)


# ---- the warps -----------------------------------------------------------------------------------------------------


@gluon.jit
def _feed(tiles, stages, filled, freed, sizes, WIDE: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """One warp: a chunk's tiles into the next free stage."""
    ROLE: gl.constexpr = KIND[0]
    GATED: gl.constexpr = KIND[1]
    WEIGHTED: gl.constexpr = KIND[2]
    MEAN: gl.constexpr = KIND[3]
    x_tiles, y_tiles, z_tiles, own_tiles, before_tiles, number_rows = tiles
    xs, ys, zs, owns, befores, numbers = stages
    T, S, L, N, HV = sizes
    KEYED: gl.constexpr = ROLE == "o" or ROLE == "dv"  # x and y are keys
    REVERSE: gl.constexpr = ROLE == "dv" or ROLE == "dk"
    OWN: gl.constexpr = _summed(ROLE, GATED, WEIGHTED, MEAN)
    BEFORE: gl.constexpr = GATED and ROLE == "dk"
    PARTS: gl.constexpr = _parts(ROLE, MEAN)
    SCALED: gl.constexpr = GATED or WEIGHTED or (MEAN and ROLE != "o")
    STAGES: gl.constexpr = xs.shape[0]
    A: gl.constexpr = x_tiles.block_shape[2]
    TILES: gl.constexpr = 2 * A * _C + (2 if OWN else 1) * WIDE * _C * _C + (WIDE * _C * A if BEFORE else 0)
    BYTES: gl.constexpr = 2 * TILES + (4 * PARTS * _NUMBERS * _C if SCALED else 0)
    b, h, first, chunks = _span(T, S, L, N, HV)
    if KEYED:
        outer = h // GROUP
        inner = h
    else:
        outer = h
        inner = h // GROUP
    mine = inner  # the head of own: of v for "dv", of q and k for the others
    slot = gl.program_id(0) * N
    for count in range(chunks):
        n = count
        if REVERSE:
            n = chunks - 1 - count
        stage = count % STAGES
        bar = filled.index(stage)
        token = first + n * _C
        mbarrier.wait(freed.index(stage), (count // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        async_load(x_tiles, [b, token, outer * A], bar, xs.index(stage))
        async_load(y_tiles, [b, token, outer * A], bar, ys.index(stage))
        if SCALED:
            for part in gl.static_range(PARTS):
                at = ((slot + n) * PARTS + part) * (_NUMBERS * _C)
                async_load(number_rows, [at], bar, numbers.index(stage * PARTS + part))
        for w in gl.static_range(WIDE):
            to = zs.index(stage * WIDE + w)
            async_load(z_tiles, [b, token, (inner * WIDE + w) * _C], bar, to)
        for w in gl.static_range(WIDE):
            if BEFORE:
                to = befores.index(stage * WIDE + w)
                async_load(before_tiles, [((slot + n) * WIDE + w) * _C, 0], bar, to)
            if OWN:
                to = owns.index(stage * WIDE + w)
                async_load(own_tiles, [b, token, (mine * WIDE + w) * _C], bar, to)


@gluon.jit
def _score(squares, sums, small, stages, bars, norms, sizes, KIND: gl.constexpr):
    """One warpgroup: (x y^T) * D of a chunk, ahead of those who read it; of a mean's outputs also 1 / c, to `sums`."""
    ROLE: gl.constexpr = KIND[0]
    GATED: gl.constexpr = KIND[1]
    WEIGHTED: gl.constexpr = KIND[2]
    MEAN: gl.constexpr = KIND[3]
    xs, ys, zs, owns, befores, numbers = stages
    filled, freed, scored, used, kept, left, done, sent = bars
    T, S, L, N, HV = sizes
    KEYED: gl.constexpr = ROLE == "o" or ROLE == "dv"  # x and y are keys
    REVERSE: gl.constexpr = ROLE == "dv" or ROLE == "dk"
    STAGES: gl.constexpr = xs.shape[0]
    BUFFERS: gl.constexpr = squares.shape[0]
    PARTS: gl.constexpr = _parts(ROLE, MEAN)
    A: gl.constexpr = xs.shape[3]
    DTYPE: gl.constexpr = xs.dtype
    across: gl.constexpr = gl.SliceLayout(0, product_layout(_C))
    down: gl.constexpr = gl.SliceLayout(1, product_layout(_C))
    i = gl.arange(0, _C, layout=down)[:, None]
    j = gl.arange(0, _C, layout=across)[None, :]
    b, h, first, chunks = _span(T, S, L, N, HV)
    if MEAN and ROLE == "o":
        norm_tile, weight_tile = small
        norm = first_norm(norms, A)
        put_norm(norm, norm_tile)
    for count in range(chunks):
        stage = count % STAGES
        buffer = count % BUFFERS
        mbarrier.wait(filled.index(stage), count // STAGES & 1)
        x = xs.index(stage).reshape([_C, A])
        y = ys.index(stage).reshape([_C, A])
        scores = times(x, y.permute((1, 0)), _C)
        if REVERSE:
            keep = i <= j
        else:
            keep = i >= j
        if MEAN and ROLE == "o":
            put_weights(_number(numbers, stage * PARTS), weight_tile, KIND)
            published()
            found = find_in(x, norm_tile)
            norm = add_keys(norm, y, weight_tile, _number(numbers, stage * PARTS), GATED)
        if GATED:
            run = _number(numbers, stage * PARTS).index(2)
            span = run.load(down)[:, None] - run.load(across)[None, :]
            if REVERSE:
                span = -span
            fall = gl.exp2(gl.where(keep, span, float("-inf")))
        scores = warpgroup_mma_wait(2 if MEAN and ROLE == "o" else 0, [scores])
        if MEAN and ROLE != "o":  # what outputs are asked for is asked of what is read and of its mass
            more = _number(numbers, stage * PARTS + 1)
            over = more.index(0)
            heard = more.index(1)
            if ROLE == "dq":
                scores = scores * over.load(down)[:, None] + heard.load(down)[:, None]
            elif ROLE == "dk":
                scores = scores * over.load(across)[None, :] + heard.load(across)[None, :]
            else:
                scores = scores * over.load(across)[None, :]
        if GATED:
            scores = scores * fall
        else:
            scores = gl.where(keep, scores, 0.0)
        if WEIGHTED and not REVERSE:
            scores = scores * _number(numbers, stage * PARTS).index(3).load(across)[None, :]
        if WEIGHTED and REVERSE and not KEYED:  # rounded as in "dq": a token's own pair must cancel in its gate
            digits = _number(numbers, stage * PARTS + 1).index(2) if MEAN else _number(numbers, stage * PARTS).index(3)
            scores = scores * digits.load(down)[:, None]
        if MEAN and ROLE == "o":
            mass = gl.sum(gl.where(keep, scores, 0.0), 1)
            found, norm = warpgroup_mma_wait(0, [found, norm])
            found = gl.convert_layout(gl.sum(found, 1), down)
            if GATED:
                found = found * _number(numbers, stage * PARTS).index(0).load(down)
            mass += found
            token = first + count * _C + gl.arange(0, _C, layout=down)
            gl.store(norms[3] + (b.to(gl.int64) * T + token) * HV + h, mass, mask=token < T)
        arrive(freed.index(stage))
        mbarrier.wait(used.index(buffer), (count // BUFFERS & 1) ^ 1)
        if MEAN and ROLE == "o":
            sums.index(buffer).store(reciprocal(mass, KIND[4]))
        squares.index(buffer).store(scores.to(DTYPE))
        fence_async_shared()
        arrive(scored.index(buffer))
        if MEAN and ROLE == "o":
            put_norm(norm, norm_tile)
    if MEAN and ROLE == "o":
        last_norm(norm, norms, A)


@gluon.jit
def _advance(
    P: gl.constexpr, squares, outs, olds, sums, stages, bars, ends, norms, sizes,
    WIDE: gl.constexpr, STARTED: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 columns of z of one head through time."""
    ROLE: gl.constexpr = KIND[0]
    GATED: gl.constexpr = KIND[1]
    WEIGHTED: gl.constexpr = KIND[2]
    MEAN: gl.constexpr = KIND[3]
    xs, ys, zs, owns, befores, numbers = stages
    filled, freed, scored, used, kept, left, done, sent = bars
    T, S, L, N, HV = sizes
    KEYED: gl.constexpr = ROLE == "o" or ROLE == "dv"  # x and y are keys
    REVERSE: gl.constexpr = ROLE == "dv" or ROLE == "dk"
    OWN: gl.constexpr = _summed(ROLE, GATED, WEIGHTED, MEAN)
    BEFORE: gl.constexpr = GATED and ROLE == "dk"
    RECORD: gl.constexpr = GATED and ROLE == "dq"
    STAGES: gl.constexpr = xs.shape[0]
    BUFFERS: gl.constexpr = squares.shape[0]
    PARTS: gl.constexpr = _parts(ROLE, MEAN)
    A: gl.constexpr = xs.shape[3]
    DTYPE: gl.constexpr = xs.dtype
    square: gl.constexpr = product_layout(_C)
    wide: gl.constexpr = product_layout(A)
    tokens: gl.constexpr = gl.SliceLayout(0, square)
    operand: gl.constexpr = left_layout(_C)
    b, h, first, chunks = _span(T, S, L, N, HV)
    e = P * _C + gl.arange(0, _C, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, A, layout=gl.SliceLayout(0, wide))
    place = gl.program_id(0).to(gl.int64) * (WIDE * _C * A)
    if KEYED:
        place += e[:, None] * A + d[None, :]
    else:
        place += d[None, :] * (WIDE * _C) + e[:, None]
    start, final = ends
    if STARTED:
        state = gl.load(start + place)
    else:
        state = gl.zeros([_C, A], gl.float32, wide)
    out = outs.index(P).reshape([_C, _C]).permute((1, 0))
    if MEAN and not KEYED:  # the state's column of a value that is the number one
        inner_d: gl.constexpr = gl.SliceLayout(1, square)
        column = P * _C + gl.arange(0, _C, layout=inner_d)
        norm = gl.load(norms[0] + gl.program_id(0) * (WIDE * _C) + column)
    for count in range(chunks):
        stage = count % STAGES
        buffer = count % BUFFERS
        number = _number(numbers, stage * PARTS)
        if PARTS == 2:
            more = _number(numbers, stage * PARTS + 1)
        half = state.to(DTYPE)
        if MEAN and not KEYED:
            n = chunks - 1 - count if REVERSE else count
            there = norms[2] + ((gl.program_id(0) * N + n) * WIDE + P) * _C + gl.arange(0, _C, layout=inner_d)
            if RECORD:
                gl.store(there, norm)
            elif BEFORE:
                earlier = gl.load(there)
        old = gl.convert_layout(half, operand)
        mbarrier.wait(filled.index(stage), count // STAGES & 1)
        x = xs.index(stage).reshape([_C, A])
        y = ys.index(stage).reshape([_C, A])
        result = times(old, x.permute((1, 0)), _C)
        if RECORD:
            mbarrier.wait(left, (count & 1) ^ 1)
            olds.index(P).store(half)
            fence_async_shared()
            arrive(kept)
        z = zs.index(stage * WIDE + P).reshape([_C, _C]).permute((1, 0)).load(square)
        written = z
        if GATED:
            if REVERSE:
                weight = number.index(0).load(tokens)
            else:
                weight = number.index(1).load(tokens)
                if WEIGHTED:
                    weight = weight * number.index(3).load(tokens)
        elif WEIGHTED and not REVERSE:
            weight = number.index(3).load(tokens)
        if MEAN and REVERSE:
            over = more.index(0).load(tokens)
            if GATED:
                heard = weight * more.index(1).load(tokens)
                weight = weight * over
            else:
                heard = more.index(1).load(tokens)
                weight = over
        if GATED or (WEIGHTED and not REVERSE) or (MEAN and REVERSE):
            scaled = z.to(gl.float32) * weight[None, :]
            written = scaled.to(DTYPE)
        if MEAN and not KEYED:
            held = norm
            if REVERSE:
                norm = gl.sum(z.to(gl.float32) * heard[None, :], 1)
            elif GATED or WEIGHTED:
                norm = gl.sum(scaled, 1)
            else:
                norm = gl.sum(z.to(gl.float32), 1)
        if GATED:
            total = number.index(0).slice(_C - 1, 1).load(gl.SliceLayout(0, wide))[None, :]
            if BEFORE:
                last = gl.sum(befores.index(stage * WIDE + P).load(wide).to(gl.float32) * state * total, 1)
            state = state * total
        if MEAN and not KEYED:
            if GATED:
                faded = held * number.index(0).slice(_C - 1, 1).load(inner_d)
                norm += faded
            else:
                norm += held
        state = warpgroup_mma(gl.convert_layout(written, operand), y, state, is_async=True)
        given = gl.convert_layout(z, operand)
        if BEFORE:
            own = owns.index(stage * WIDE + P).reshape([_C, _C]).permute((1, 0)).load(square)
        if GATED:
            if REVERSE:
                reach = number.index(1).load(tokens)
                if WEIGHTED and not KEYED:
                    reach = reach * (more.index(2) if MEAN else number.index(3)).load(tokens)
            else:
                reach = number.index(0).load(tokens)
            result = warpgroup_mma_wait(1, [result])
            if MEAN and ROLE == "dq":
                result = result * (reach * more.index(0).load(tokens))[None, :]
                result += held[:, None] * (reach * more.index(1).load(tokens))[None, :]
            elif MEAN and ROLE == "dk":
                result = (result + held[:, None]) * reach[None, :]
            else:
                result = result * reach[None, :]
            if BEFORE:
                if MEAN and WEIGHTED:
                    inner = gl.sum(own.to(gl.float32) * result * more.index(3).load(tokens)[None, :], 1)
                else:
                    inner = gl.sum(own.to(gl.float32) * result, 1)
                if MEAN:
                    inner += earlier * faded
                last += gl.convert_layout(inner, gl.SliceLayout(1, wide))
        elif MEAN and ROLE == "dq":
            result = warpgroup_mma_wait(1, [result]) * more.index(0).load(tokens)[None, :]
            result += held[:, None] * more.index(1).load(tokens)[None, :]
        elif MEAN and ROLE == "dk":
            result = warpgroup_mma_wait(1, [result]) + held[:, None]
            if WEIGHTED:
                result = result * more.index(2).load(tokens)[None, :]
        elif WEIGHTED and REVERSE and not KEYED:
            result = warpgroup_mma_wait(1, [result]) * number.index(3).load(tokens)[None, :]
        mbarrier.wait(scored.index(buffer), count // BUFFERS & 1)
        result = warpgroup_mma(given, squares.index(buffer).permute((1, 0)), result, is_async=True)
        state, result = warpgroup_mma_wait(0, [state, result])
        if OWN and not BEFORE:
            own = owns.index(stage * WIDE + P).reshape([_C, _C]).permute((1, 0)).load(square)
        if WEIGHTED and REVERSE and KEYED:
            strength = number.index(3).load(tokens)
        elif MEAN and WEIGHTED and REVERSE:
            strength = more.index(3).load(tokens)
        if MEAN and ROLE == "o":
            result = result * sums.index(buffer).load(tokens)[None, :]
        barrier()
        mbarrier.arrive(freed.index(stage), count=1)
        mbarrier.arrive(used.index(buffer), count=1)
        if OWN:
            line = gl.sum(own.to(gl.float32) * result, 0)
        if WEIGHTED and REVERSE and (KEYED or MEAN):
            result = result * strength[None, :]
        mbarrier.wait(sent, (count & 1) ^ 1)
        if OWN:
            sums.index(2 * P).store(line)
        if BEFORE:
            sums.index(2 * P + 1).store(last)
        out.store(result.to(DTYPE))
        fence_async_shared()
        arrive(done)
    if KEYED:
        gl.store(final + place, state)
    if MEAN and not KEYED:
        gl.store(norms[1] + gl.program_id(0) * (WIDE * _C) + column, norm)


@gluon.jit
def _carry(
    out_tiles, trace_tiles, outs, olds, sums, bars, g, dots, line, norms, sizes,
    WIDE: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One warp: what the warpgroups made into memory, and the sums over their columns."""
    ROLE: gl.constexpr = KIND[0]
    GATED: gl.constexpr = KIND[1]
    WEIGHTED: gl.constexpr = KIND[2]
    MEAN: gl.constexpr = KIND[3]
    filled, freed, scored, used, kept, left, done, sent = bars
    T, S, L, N, HV = sizes
    REVERSE: gl.constexpr = ROLE == "dv" or ROLE == "dk"
    OWN: gl.constexpr = _summed(ROLE, GATED, WEIGHTED, MEAN)
    BEFORE: gl.constexpr = GATED and ROLE == "dk"
    RECORD: gl.constexpr = GATED and ROLE == "dq"
    flat: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    b, h, first, chunks = _span(T, S, L, N, HV)
    slot = gl.program_id(0) * N
    for count in range(chunks):
        n = count
        if REVERSE:
            n = chunks - 1 - count
        token = first + n * _C + gl.arange(0, _C, flat)
        there = (b.to(gl.int64) * T + token) * HV + h
        if BEFORE:
            log = gl.load(g + there, mask=token < T, other=0.0)
            gain = gl.load(dots + there, mask=token < T, other=0.0)
        if MEAN and WEIGHTED and ROLE == "dk":
            digits, power = parted(gl.load(norms[4] + there, mask=token < T, other=0.0))
        if RECORD:
            mbarrier.wait(kept, count & 1)
            for w in gl.static_range(WIDE):
                async_store(trace_tiles, [((slot + n) * WIDE + w) * _C, 0], olds.index(w))
        mbarrier.wait(done, count & 1)
        for w in gl.static_range(WIDE):
            at = [b, first + n * _C, (h * WIDE + w) * _C]
            async_store(out_tiles, at, outs.index(w))
        if RECORD:
            store_wait(WIDE)
            arrive(left)
        if OWN:
            total = sums.index(0).load(flat)
            if WIDE == 2:
                total += sums.index(2).load(flat)
            if MEAN and WEIGHTED and ROLE == "dk":
                gl.store(norms[5] + there, total / digits, mask=token < T)
                total = total * power
            if BEFORE:
                last = sums.index(1).load(flat)
                if WIDE == 2:
                    last += sums.index(3).load(flat)
                total = gl.associative_scan(gain - total, 0, add, reverse=True) + gl.sum(last, 0)
                total = gl.where(log > -100.0, total, 0.0)
            if GATED or not MEAN:
                gl.store(line + there, total, mask=token < T)
        store_wait(0)
        arrive(sent)


@Kernel
@gluon.jit(do_not_specialize=["T", "S", "L", "N", "HV"])
def _mix(
    x_tiles, y_tiles, z_tiles, own_tiles, trace_tiles, number_rows, out_tiles, start, final, g, dots, line,
    norm, norm_end, norm_trace, mass, beta, dbeta, T, S, L, N, HV,
    GROUP: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, ADVANCE: gl.constexpr,
    SCORE: gl.constexpr, STARTED: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """out of one head of one unit. KIND: role, whether gated, whether weighted, whether outputs are means, a floor."""
    ROLE: gl.constexpr = KIND[0]
    GATED: gl.constexpr = KIND[1]
    WEIGHTED: gl.constexpr = KIND[2]
    MEAN: gl.constexpr = KIND[3]
    A: gl.constexpr = x_tiles.block_shape[2]
    OWN: gl.constexpr = _summed(ROLE, GATED, WEIGHTED, MEAN)
    BEFORE: gl.constexpr = GATED and ROLE == "dk"
    RECORD: gl.constexpr = GATED and ROLE == "dq"
    DTYPE: gl.constexpr = x_tiles.dtype
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, A], x_tiles.layout)
    ys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, _C, A], y_tiles.layout)
    zs = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, 1, _C, _C], z_tiles.layout)
    owns = zs
    befores = zs
    olds = zs
    if OWN:
        owns = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, 1, _C, _C], own_tiles.layout)
    if BEFORE:
        befores = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, _C, A], trace_tiles.layout)
    if RECORD:
        olds = gl.allocate_shared_memory(DTYPE, [WIDE, _C, A], trace_tiles.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES * _parts(ROLE, MEAN), _NUMBERS * _C], number_rows.layout)
    squares_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    squares = gl.allocate_shared_memory(DTYPE, [BUFFERS, _C, _C], squares_layout)
    small = ()
    if MEAN and ROLE == "o":
        of_norm = gl.allocate_shared_memory(DTYPE, [8, A], squares_layout)
        small = (of_norm, gl.allocate_shared_memory(DTYPE, [8, _C], squares_layout))  # type: ignore[assignment]
    outs = gl.allocate_shared_memory(DTYPE, [WIDE, 1, _C, _C], out_tiles.layout)
    sums = gl.allocate_shared_memory(gl.float32, [2 * WIDE, _C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    kept = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # old states are in their tiles
    left = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # and have left
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # outputs and sums are in their tiles
    sent = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # and have left
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=WIDE + 1)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(scored.index(buffer), count=1)
        mbarrier.init(used.index(buffer), count=WIDE)
    mbarrier.init(kept, count=WIDE)
    mbarrier.init(left, count=1)
    mbarrier.init(done, count=WIDE)
    mbarrier.init(sent, count=1)
    published()
    tiles = (x_tiles, y_tiles, z_tiles, own_tiles, trace_tiles, number_rows)
    stages = (xs, ys, zs, owns, befores, numbers)
    bars = (filled, freed, scored, used, kept, left, done, sent)
    sizes = (T, S, L, N, HV)
    ends = (start, final)
    norms = (norm, norm_end, norm_trace, mass, beta, dbeta)
    if WIDE == 2:
        gl.warp_specialize(
            [
                (_advance, (0, squares, outs, olds, sums, stages, bars, ends, norms, sizes, WIDE, STARTED, KIND)),
                (_advance, (1, squares, outs, olds, sums, stages, bars, ends, norms, sizes, WIDE, STARTED, KIND)),
                (_score, (squares, sums, small, stages, bars, norms, sizes, KIND)),
                (_feed, (tiles, stages, filled, freed, sizes, WIDE, GROUP, KIND)),
                (_carry, (out_tiles, trace_tiles, outs, olds, sums, bars, g, dots, line, norms, sizes, WIDE, KIND)),
            ],
            [4, 4, 1, 1],
            [ADVANCE, SCORE, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_advance, (0, squares, outs, olds, sums, stages, bars, ends, norms, sizes, WIDE, STARTED, KIND)),
                (_score, (squares, sums, small, stages, bars, norms, sizes, KIND)),
                (_feed, (tiles, stages, filled, freed, sizes, WIDE, GROUP, KIND)),
                (_carry, (out_tiles, trace_tiles, outs, olds, sums, bars, g, dots, line, norms, sizes, WIDE, KIND)),
            ],
            [4, 1, 1],
            [SCORE, 24, 24],
        )
    retire(filled)
    retire(freed)
    retire(scored)
    retire(used)
    retire(kept)
    retire(left)
    retire(done)
    retire(sent)


# ---- launches ------------------------------------------------------------------------------------------------------

# By the columns of x and of z: registers a thread at launch and those of the warpgroups once they part ways; a single
# warpgroup that advances gets what is left. Of the small ones two programs share a processor.
_WIDE, _SMALL = {"ADVANCE": 208, "SCORE": 72, "maxnreg": 128}, {"ADVANCE": 136, "SCORE": 80, "maxnreg": 80}
_REGISTERS = {(128, 128): _WIDE, (128, 64): _WIDE, (64, 128): _WIDE, (64, 64): _SMALL}
# Of those that also carry n beside the scores, a mean's forward.
_MEAN = _WIDE | {"ADVANCE": 192, "SCORE": 112}
_REGISTERS_MEAN = {(128, 128): _MEAN, (128, 64): _MEAN, (64, 128): _MEAN, (64, 64): _SMALL}


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether `mix` may be called: 16 bit, K and V of 64 or 128, on a Hopper processor."""
    if q.dtype not in (torch.bfloat16, torch.float16) or 0 in q.shape or 0 in v.shape:
        return False
    if q.shape[-1] not in (64, 128) or v.shape[-1] not in (64, 128):
        return False
    return hopper_refusal(q.device) is None


def numbers(beta: Tensor | None, g: Tensor | None, like: Tensor, S: int, L: int, N: int) -> Tensor:
    """Numbers (B S, HV, N, 4, 64) of the chunks of tokens like (B, T, HV, .): see `_NUMBERS`."""
    b, t, hv = like.shape[:3]
    made = like.new_empty((b * S, hv, N, 4, 64) if beta is not None or g is not None else (256,), dtype=torch.float32)
    if beta is not None or g is not None:
        _numbers[(b * S * hv * N,)](
            beta, g, made, t, S, L, N, hv, C=64, GATED=g is not None, WEIGHTED=beta is not None, num_warps=2
        )
    return made


class Norms(NamedTuple):
    """Of outputs that are means: n (B, HV, K) where a pass begins and ends, before every chunk (B, HV, N, K), masses
    (B, T, HV), and the floor of divisors."""

    first: Tensor | None = None
    last: Tensor | None = None
    trace: Tensor | None = None
    mass: Tensor | None = None
    floor: float = 0.0


def mix(
    role: str, x: Tensor, y: Tensor, z: Tensor, beta: Tensor | None, g: Tensor | None, made: Tensor, out: Tensor,
    start: Tensor | None, final: Tensor | None = None, own: Tensor | None = None, trace: Tensor | None = None,
    dots: Tensor | None = None, dbeta: Tensor | None = None, dg: Tensor | None = None, *, cut: tuple[int, int, int],
    norms: Norms | None = None,
) -> None:  # fmt: skip
    """`scalar_write.mix` for tokens that `fits`: made comes from `numbers`, cut = (S, L, N), out is written.

    "dq" writes the first states of chunks to trace and q . dq to dots, "dk" reads both and writes dg, "dv" writes
    dbeta. own is read only where there is one of these to write. norms: outputs are means, whose numbers are those of
    `axes.kernels.scalar.mean`, and "dk" writes dbeta.
    """
    b, t, hv, w = out.shape
    s, length, n = cut
    a = x.shape[3]
    mean, floor = norms is not None, 0.0 if norms is None else norms.floor
    line = {"o": None, "dq": dots, "dv": None if mean else dbeta, "dk": dbeta if mean and dg is None else dg}[role]
    stages, buffers = (3, 2) if line is None else (2, 1)  # what shared memory holds
    held = out if trace is None else trace  # a tensor that is not there is stood for by another, and not touched
    own = z if line is None or own is None else own
    _mix[(b * s * hv,)](
        token_tiles(x, a), token_tiles(y, a), token_tiles(z, 64), token_tiles(own, 64), matrix_tiles(held, 64, a, a),
        number_tiles(made),
        token_tiles(out, 64), *(made if y is None else y for y in (start, final, g, dots, line)),
        *(made if y is None else y for y in (*(norms or Norms())[:4], beta, dbeta)), t, s, length, n, hv,
        GROUP=hv // (x if role in ("o", "dv") else z).shape[2], WIDE=w // 64, STAGES=stages, BUFFERS=buffers,
        STARTED=start is not None, KIND=(role, g is not None, beta is not None, mean, floor),
        num_warps=4, **(_REGISTERS_MEAN if mean and role == "o" else _REGISTERS)[a, w],
    )  # fmt: skip
