"""Levels of a chain that erases nothing, device side: sums of stretches, outputs, gradients.

Tokens (tokens, H or HV, D), weights w (tokens, HV, W), logs to the base 2: runs (tokens, HV) inside of a chunk, edges
(units, N + 1, HV) in float64 at the chunks' first tokens. A left sibling is a stretch of 2^j chunks, an even one of its
size, that has another behind it; there are N - 1 of them, (units, HV, N - 1, K, V), those of 2^j chunks from number
N - ceil(N / 2^j) on. The mathematics is in `axes.kernels.levels.chain`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import load_line, load_tile, store_line, store_tile
from axes.kernels.scalar.tiles import later_sum

_SIZES = ["T", "N", "depth", "units", "H", "HV"]


@triton.jit
def edge(edges, unit, n, head, N, HV):
    """The log of all gates before chunk n."""
    return tl.load(edges + (unit * (N + 1) + n) * HV + head)


@triton.jit
def left_of(n, j, N):
    """The left sibling of 2^j chunks in whose pair chunk n is."""
    return N - ((N + (1 << j) - 1) >> j) + (n >> (j + 1))


@triton.jit
def column(w, first, rows, head, level, HV, W: tl.constexpr, C: tl.constexpr):
    """The weights of one level."""
    token = tl.arange(0, C)
    return tl.load(w + ((first + token) * HV + head) * W + level, mask=token < rows, other=0.0)


@triton.jit
def store_column(w, line, first, rows, head, level, HV, W: tl.constexpr, C: tl.constexpr):
    """Write what `column` would read."""
    token = tl.arange(0, C)
    tl.store(w + ((first + token) * HV + head) * W + level, line, mask=token < rows)


@triton.jit
def strong(values, beta, first, rows, head, HV, C: tl.constexpr, STRONG: tl.constexpr):
    """Values as they are written."""
    if STRONG:
        values = (load_line(beta, first, rows, head, HV, C)[:, None] * values).to(values.dtype)
    return values


@triton.jit
def logs(runs, first, rows, head, HV, C: tl.constexpr):
    """Logs of a chunk's gates so far; behind its last token they stay, so that nothing grows there."""
    token = tl.minimum(tl.arange(0, C), rows - 1)
    return tl.load(runs + first * HV + head + token * HV)


@triton.jit
def fading(run, i, j):
    """What is left of token j at token i, of one chunk."""
    return tl.exp2(tl.where(i >= j, run[:, None] - run[None, :], float("-inf")))


@triton.jit
def weighed(w, first, rows, head, i, j, HV, W: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr):
    """The weight that token i has for token j, of one chunk."""
    apart = i ^ j
    each = tl.broadcast_to(column(w, first, rows, head, 0, HV, W, C)[:, None], [C, C])
    for level in tl.static_range(1, LOW):
        each = tl.where(apart >= (1 << (level - 1)), column(w, first, rows, head, level, HV, W, C)[:, None], each)
    return each


@triton.jit
def chunk(T, units, H, HV, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr):
    """Of a program for every block of values, head, unit and chunk: which block, its columns, head, unit, chunk, the
    head of keys, the chunk's first token, and how many there are."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    part = pid % PARTS
    e = part.to(tl.int32) * BV + tl.arange(0, BV)
    head = pid // PARTS % HV
    unit = pid // (PARTS * HV) % units
    n = (pid // (PARTS * HV * units)).to(tl.int32)
    return part, e, head, unit, n, head // (HV // H), unit * T + n * C, tl.minimum(T - n * C, C)


@triton.jit
def scored(q, k, w, runs, first, rows, key, head, H, HV, K: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
           BK: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Queries, keys and logs of a chunk, and what its tokens read of each other."""
    d = tl.arange(0, BK)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    queries = load_tile(q, first, rows, d, key, H, K, C)
    keys = load_tile(k, first, rows, d, key, H, K, C)
    run = logs(runs, first, rows, head, HV, C)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores *= fading(run, i, j) * weighed(w, first, rows, head, i, j, HV, W, C, LOW)
    return queries, keys, run, scores


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def sums(
    x, y, by, runs, edges, out, T, N, depth, units, H, HV,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, STRONG: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_t x_t y_t^T of stretches. OF "left": of left siblings, x = k, y = v with strengths, faded to their ends;
    "right": of their siblings, x = q, y = do with weights, faded from their starts; "last": of the stretches that the
    last token tells apart, faded to it, (units, HV, W, V, K) in float32."""
    pid = tl.program_id(0).to(tl.int64)
    K_PARTS: tl.constexpr = (K + BK - 1) // BK
    V_PARTS: tl.constexpr = (V + BV - 1) // BV
    d = (pid % K_PARTS).to(tl.int32) * BK + tl.arange(0, BK)
    e = (pid // K_PARTS % V_PARTS).to(tl.int32) * BV + tl.arange(0, BV)
    pid = pid // (K_PARTS * V_PARTS)
    head = pid % HV
    unit = pid // HV % units
    key = head // (HV // H)
    place = (pid // (HV * units)).to(tl.int32)
    level = 0
    after, until = 0, T  # tokens that count
    if OF == "last":
        index = place
        token = T - 1
        level = index
        if level == 0:
            after, until = token, T
        else:
            after = token >> level << level
            until = tl.where((token >> (level - 1)) & 1 == 1, after + (1 << (level - 1)), after)
        begin, end = after // C, (until + C - 1) // C
        end = tl.where(until > after, end, begin)
        edge_at = edge(edges, unit, N, head, N, HV)
    else:
        index = N - 2 - place  # long ones first
        for j in range(1, depth):
            level = tl.where(index >= N - ((N + (1 << j) - 1) >> j), j, level)
        begin = (index - (N - ((N + (1 << level) - 1) >> level))) << (level + 1)
        end = begin + (1 << level)
        if OF == "right":
            begin = end
            end = tl.minimum(begin + (1 << level), N)
            edge_at = edge(edges, unit, begin, head, N, HV)
        else:
            edge_at = edge(edges, unit, end, head, N, HV)
    state = tl.zeros([BK, BV], dtype=tl.float32)
    token = tl.arange(0, C)
    for n in range(begin, end):
        first = unit * T + n * C
        rows = tl.minimum(T - n * C, C)
        keys = load_tile(x, first, rows, d, key, H, K, C)
        values = load_tile(y, first, rows, e, head, HV, V, C)
        run = logs(runs, first, rows, head, HV, C)
        here = (edge_at - edge(edges, unit, n, head, N, HV)).to(tl.float32)
        if OF == "right":
            factor = tl.exp2(run - here) * column(by, first, rows, head, LOW + level, HV, W, C)
        else:
            factor = tl.exp2(here - run)
            if STRONG:
                factor *= load_line(by, first, rows, head, HV, C)
        if OF == "last":
            factor = tl.where((n * C + token >= after) & (n * C + token < until), factor, 0.0)
        state += tl.dot(tl.trans(keys), (factor[:, None] * values).to(keys.dtype), input_precision=PRECISION)
    within = (d < K)[:, None] & (e < V)[None, :]
    if OF == "last":
        at = ((unit * HV + head) * W + index) * (K * V) + e[None, :] * K + d[:, None]
    else:
        at = ((unit * HV + head) * (N - 1) + index) * (K * V) + d[:, None] * V + e[None, :]
    tl.store(out + at, state.to(out.dtype.element_ty), mask=within)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def outputs(
    q, k, v, beta, w, runs, edges, left, o, T, N, depth, units, H, HV,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, STRONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk, one head, one block of values: what its own tokens give, and every left sibling before it."""
    part, e, head, unit, n, key, first, rows = chunk(T, units, H, HV, V, C, BV)
    queries, keys, run, scores = scored(q, k, w, runs, first, rows, key, head, H, HV, K, W, C, BK, LOW, PRECISION)
    d = tl.arange(0, BK)
    values = strong(load_tile(v, first, rows, e, head, HV, V, C), beta, first, rows, head, HV, C, STRONG)
    out = tl.dot(scores.to(values.dtype), values, input_precision=PRECISION)
    within = (d < K)[:, None] & (e < V)[None, :]
    here = edge(edges, unit, n, head, N, HV)
    for height in range(depth):
        if (n >> height) & 1:
            at = ((unit * HV + head) * (N - 1) + left_of(n, height, N)) * (K * V) + d[:, None] * V + e[None, :]
            state = tl.load(left + at, mask=within, other=0.0)
            passed = (here - edge(edges, unit, n >> height << height, head, N, HV)).to(tl.float32)
            factor = tl.exp2(run + passed) * column(w, first, rows, head, LOW + height, HV, W, C)
            out += factor[:, None] * tl.dot(queries, state, input_precision=PRECISION)
    store_tile(o, out, first, rows, e, head, HV, V, C)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def gradients_of_keys(
    q, k, v, beta, w, runs, edges, left, right, do, dq, dk, dw, dlog, T, N, depth, units, H, HV,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, STRONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: dq and dk by value head, dw, and q . dq - k . dk, which the log of a token's decay has."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % HV
    unit = pid // HV % units
    n = (pid // (HV * units)).to(tl.int32)
    key = head // (HV // H)
    first = unit * T + n * C
    rows = tl.minimum(T - n * C, C)
    d = tl.arange(0, BK)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    queries = load_tile(q, first, rows, d, key, H, K, C)
    keys = load_tile(k, first, rows, d, key, H, K, C)
    run = logs(runs, first, rows, head, HV, C)
    dscores = tl.zeros([C, C], dtype=tl.float32)
    for at in range(0, V, BV):
        e = at + tl.arange(0, BV)
        values = strong(load_tile(v, first, rows, e, head, HV, V, C), beta, first, rows, head, HV, C, STRONG)
        dout = load_tile(do, first, rows, e, head, HV, V, C)
        dscores += tl.dot(dout, tl.trans(values), input_precision=PRECISION)
    dscores *= fading(run, i, j)
    shown = dscores * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    apart = i ^ j
    for level in tl.static_range(LOW):
        if level == 0:
            mine = apart == 0
        else:
            mine = (apart >= (1 << (level - 1))) & (apart < (1 << level))
        store_column(dw, tl.sum(tl.where(mine, shown, 0.0), 1), first, rows, head, level, HV, W, C)
    dscores = (dscores * weighed(w, first, rows, head, i, j, HV, W, C, LOW)).to(keys.dtype)
    dquery = tl.dot(dscores, keys, input_precision=PRECISION)
    dkey = tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)
    here = edge(edges, unit, n, head, N, HV)
    for height in range(depth):
        stretch = n >> height
        reads = (stretch & 1) == 1
        if reads | ((stretch + 1 << height) < N):
            node = ((unit * HV + head) * (N - 1) + left_of(n, height, N)) * (K * V)
            share = tl.zeros([C, BK], dtype=tl.float32)
            for at in range(0, V, BV):
                e = at + tl.arange(0, BV)
                block = d[:, None] * V + e[None, :]
                within = (d < K)[:, None] & (e < V)[None, :]
                if reads:
                    state = tl.load(left + node + block, mask=within, other=0.0)
                    tile = load_tile(do, first, rows, e, head, HV, V, C)
                else:
                    state = tl.load(right + node + block, mask=within, other=0.0)
                    tile = load_tile(v, first, rows, e, head, HV, V, C)
                    tile = strong(tile, beta, first, rows, head, HV, C, STRONG)
                share += tl.dot(tile, tl.trans(state), input_precision=PRECISION)
            if reads:
                passed = (here - edge(edges, unit, stretch << height, head, N, HV)).to(tl.float32)
                share *= tl.exp2(run + passed)[:, None]
                store_column(dw, tl.sum(queries * share, 1), first, rows, head, LOW + height, HV, W, C)
                dquery += column(w, first, rows, head, LOW + height, HV, W, C)[:, None] * share
            else:
                until = (edge(edges, unit, stretch + 1 << height, head, N, HV) - here).to(tl.float32)
                dkey += tl.exp2(until - run)[:, None] * share
    store_tile(dq, dquery, first, rows, d, head, HV, K, C)
    store_tile(dk, dkey, first, rows, d, head, HV, K, C)
    store_line(dlog, tl.sum(queries * dquery - keys * dkey, 1), first, rows, head, HV, C)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def gradients_of_values(
    q, k, v, beta, w, runs, edges, right, do, dv, dbeta, T, N, depth, units, H, HV,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, STRONG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk, one head, one block of values: dv, and the block's part of dbeta (parts, tokens, HV)."""
    part, e, head, unit, n, key, first, rows = chunk(T, units, H, HV, V, C, BV)
    queries, keys, run, scores = scored(q, k, w, runs, first, rows, key, head, H, HV, K, W, C, BK, LOW, PRECISION)
    d = tl.arange(0, BK)
    dout = load_tile(do, first, rows, e, head, HV, V, C)
    grad = tl.dot(tl.trans(scores.to(dout.dtype)), dout, input_precision=PRECISION)
    within = (d < K)[:, None] & (e < V)[None, :]
    here = edge(edges, unit, n, head, N, HV)
    for height in range(depth):
        stretch = n >> height
        if ((stretch & 1) == 0) & ((stretch + 1 << height) < N):
            at = ((unit * HV + head) * (N - 1) + left_of(n, height, N)) * (K * V) + d[:, None] * V + e[None, :]
            state = tl.load(right + at, mask=within, other=0.0)
            until = (edge(edges, unit, stretch + 1 << height, head, N, HV) - here).to(tl.float32)
            grad += tl.exp2(until - run)[:, None] * tl.dot(keys, state, input_precision=PRECISION)
    if STRONG:
        values = load_tile(v, first, rows, e, head, HV, V, C).to(tl.float32)
        store_line(dbeta + part * units * T * HV, tl.sum(values * grad, 1), first, rows, head, HV, C)
        grad *= load_line(beta, first, rows, head, HV, C)[:, None]
    store_tile(dv, grad, first, rows, e, head, HV, V, C)


@triton.jit
def _place(pid, T, N, HV, C: tl.constexpr):
    """Of a program for every unit, head and chunk, in the order of the matrices of chunks: head, first row, rows."""
    n = (pid % N).to(tl.int32)
    unit = pid // (N * HV)
    return pid // N % HV, unit * T + n * C, tl.minimum(T - n * C, C)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "HV"])
def inside(
    v, p, m, w, o, T, N, HV,
    V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What tokens of a chain that erases read of their own chunk: (P M * weights) v."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, rows = _place(pid, T, N, HV, C)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    square = pid * (C * C) + i * C + j
    table = tl.dot(tl.load(p + square), tl.load(m + square), input_precision=PRECISION)
    table = (table * weighed(w, first, rows, head, i, j, HV, W, C, LOW)).to(p.dtype.element_ty)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        out = tl.dot(table, load_tile(v, first, rows, e, head, HV, V, C), input_precision=PRECISION)
        store_tile(o, out, first, rows, e, head, HV, V, C)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def inside_gradients(
    q, k, a, v, p, m, w, runs, g, do, dq, dk, da, dv, dw, dg, T, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of `inside`; those of q, k and a by value head. With R = P M and E = do v^T * weights:
    dP = E M^T, and what is inverted to M has -R^T dP."""
    pid = tl.program_id(0).to(tl.int64)
    head, first, rows = _place(pid, T, N, HV, C)
    key = head // (HV // H)
    kind = p.dtype.element_ty
    d = tl.arange(0, BK)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    square = pid * (C * C) + i * C + j
    solve = tl.load(m + square)
    plain = tl.dot(tl.load(p + square), solve, input_precision=PRECISION)
    weights = weighed(w, first, rows, head, i, j, HV, W, C, LOW)
    table = (plain * weights).to(kind)
    dtable = tl.zeros([C, C], dtype=tl.float32)
    for left in range(0, V, BV):
        e = left + tl.arange(0, BV)
        dout = load_tile(do, first, rows, e, head, HV, V, C).to(kind)
        dtable += tl.dot(dout, tl.trans(load_tile(v, first, rows, e, head, HV, V, C)), input_precision=PRECISION)
        store_tile(dv, tl.dot(tl.trans(table), dout, input_precision=PRECISION), first, rows, e, head, HV, V, C)
    apart, shown = i ^ j, plain * dtable
    for level in tl.static_range(LOW):
        if level == 0:
            mine = apart == 0
        else:
            mine = (apart >= (1 << (level - 1))) & (apart < (1 << level))
        line = tl.sum(tl.where(mine & (i >= j), shown, 0.0), 1)
        store_column(dw, line, first, rows, head, level, HV, W, C)
    dplain = tl.where(i >= j, dtable * weights, 0.0).to(kind)
    dscores = tl.dot(dplain, tl.trans(solve), input_precision=PRECISION)
    run = logs(runs, first, rows, head, HV, C) * 1.4426950408889634
    gone = fading(run, i, j)
    dlower = -tl.dot(tl.trans(plain.to(kind)), tl.where(i >= j, dscores, 0.0).to(kind), input_precision=PRECISION)
    dlower = tl.where(i > j, dlower * gone, 0.0).to(kind)
    dscores = (dscores * gone).to(kind)
    queries = load_tile(q, first, rows, d, key, H, K, C)
    keys = load_tile(k, first, rows, d, key, H, K, C)
    erase = load_tile(a, first, rows, d, key, H, K, C)
    dquery = tl.dot(dscores, keys, input_precision=PRECISION)
    derase = tl.dot(dlower, keys, input_precision=PRECISION)
    dkey = tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)
    dkey += tl.dot(tl.trans(dlower), erase, input_precision=PRECISION)
    store_tile(dq, dquery, first, rows, d, head, HV, K, C)
    store_tile(da, derase, first, rows, d, head, HV, K, C)
    store_tile(dk, dkey, first, rows, d, head, HV, K, C)
    dlog = later_sum(tl.sum(queries * dquery + erase * derase - keys * dkey, 1), C, True)
    alive = load_line(g, first, rows, head, HV, C) > -100.0
    store_line(dg, tl.where(alive, dlog, 0.0), first, rows, head, HV, C)
