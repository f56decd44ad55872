"""Kernels of S_t = e^{g_t} S_{t-1} + u_t k_t^T with u_t = rho_t(x_t), x_t what k_t reads; o_t = S_t q_t.

Gates g act on the whole state (GATE 1) or on rows (2), S' is S_{t-1} (READS 0), e^{g_t} S_{t-1} (1) or the state before
the block of 16 tokens that t stands in (2: anchored). In a block with first state X (V x K), rows of which never meet
but in rho:
    y = X k_t,  for s < t: y = e^{g_s} y + (k_s . k_t) u_s,  then u_t = rho_t(y), or of e^{g_t} y
one token after another, where products leave them: a row lies in four threads, and columns go round these. Products
join blocks. Backwards with D, the derivative in the block's last state, J_t the slopes of rho and w_t = J_t^T g_t what
x_t is asked for:
    y = D k_t,  for s from the last to t + 1: y = e^{g_s} (y + (q_s . k_t) do_s) + (k_s . k_t) w_s
    g_t = y + (q_t . k_t) do_t,  w_t = J_t^T g_t   (e^{g_s} also on w_s where gates come first; none of w if anchored)
`forward` and `reverse` are serial in blocks; `slopes` goes through tokens, `meetings`, `closings` and `gradients` go
through chunks of C tokens, with
    C_ts = sum_v do_tv e^{G_tv - G_sv} u_sv (s <= t),   W_ts = sum_v w_tv e^{R_tv - G_sv} u_sv (s < t)
    dq = C K + (e^G do) X,   dk = C^T Q + (W + W^T) K + (e^R w) X + (e^{G_last - G} u) dX'
where R is G as x has seen it. A gate's derivative is a sum over later tokens of its chunk, without a token's own pair,
    dg_t = sum_{i >= t} (do_i o_i - u_i g_i) + sum of w_i x_i that come through t + <X', dX'>.
With gates by rows, e^G and e^-G stand beside the vectors of a block or chunk whose gates are mild. Where they are not,
pairs of tokens in different halves of a block of tokens meet at the border between them, so that both exponents are
sums of gates, at most zero, and serial passes apply gates one by one.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
# (tuples grow in loops that Triton unrolls)
from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import (
    decay,
    first_slot,
    floored,
    load_line,
    load_tile,
    slot_rows,
    store_tile,
    unit_rows,
)
from axes.kernels.contain import first_bad
from axes.kernels.substitution.response import ask, inputs, pull  # replaced

_SIZES = ["T", "N", "H"]


@triton.jit
def _unit_end(offsets, unit, T, PACKED: tl.constexpr):
    first, end = unit_rows(offsets, unit, T, PACKED)
    return end


@triton.jit
def wanted(harsh, unit, head, H, SPLIT: tl.constexpr):
    """Whether a head is one that faster passes could not make: all are, where there were none (SPLIT 0)."""
    if SPLIT == 0:
        made = True
    else:
        found = tl.load(harsh + (unit * H + head) * SPLIT)
        for i in tl.static_range(1, SPLIT):
            found += tl.load(harsh + (unit * H + head) * SPLIT + i)
        made = found > 0
    return made


@triton.jit
def _load_state(ptr, index, v, d, V: tl.constexpr, K: tl.constexpr):
    inside = (v < V)[:, None] & (d < K)[None, :]
    return tl.load(ptr + index * (V * K) + v[:, None] * K + d[None, :], mask=inside, other=0.0)


@triton.jit
def _store_state(ptr, state, index, v, d, V: tl.constexpr, K: tl.constexpr):
    inside = (v < V)[:, None] & (d < K)[None, :]
    tl.store(ptr + index * (V * K) + v[:, None] * K + d[None, :], state.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _column(tile, token, t):
    """Column t of a tile (rows, 16) of float32, bit for bit: whole numbers are added, all but one of them zero, which
    compilers leave out within a thread."""
    bits = tl.where(token == t, tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def _join(state, u, k, PRECISION: tl.constexpr):
    """state + u k, u (BV, 16): `tiles.accumulate` of what stands by rows."""
    return tl.fma(tl.dot(u.to(k.dtype), k, input_precision=PRECISION), 1.0, state)


@triton.jit
def _logs_of_rows(g, at, v, there, inside, V: tl.constexpr):
    """Log gates of the rows of a block, (BV, 16)."""
    return floored(tl.load(g + at * V + v, mask=inside & there, other=0.0).to(tl.float32))


@triton.jit
def _run(logs, line, EXACT: tl.constexpr):
    """Cumulative sums along rows (BV, 16), as `_sums`."""
    keep = line[:, None] <= line[None, :]
    if EXACT:
        made = tl.dot(logs, tl.where(keep, 1.0, 0.0), input_precision="ieee")
    else:
        high = logs.to(tl.float16)
        ones = tl.where(keep, 1.0, 0.0).to(tl.float16)
        made = tl.dot((logs - high.to(tl.float32)).to(tl.float16), ones, tl.dot(high, ones))
    return made


@triton.jit
def _is_mild(least, kind: tl.constexpr):
    """Whether e^-G may stand beside a vector in the operands' dtype, where G is no less than this."""
    if kind == tl.float16:
        mild = least >= -2.5
    else:
        mild = least >= -40.0
    return mild


@triton.jit
def _one_by_one(
    x, sight, back, k2, given, pair, line, token, inside, there,
    SCALED: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """(what keys read, u), (BV, 16), of a block whose first state the keys read as x. SCALED: x stands for sight x, and
    u for back u among later tokens."""
    if ANCHORED:
        reads = x
        u = tl.where(inside & there, ask(x, k2, x, given, inside, False), 0.0)
    else:
        reads = tl.zeros_like(x)
        u = tl.zeros_like(x)
        for t in tl.static_range(16):
            now = x
            if SCALED:
                now = x * sight
            made = tl.where(inside & there, ask(now, k2, now, given, inside, False), 0.0)
            reads = tl.where(token == t, now, reads)
            u = tl.where(token == t, made, u)
            if t < 15:
                if SCALED:
                    made = made * back
                x += _column(made, token, t)[:, None] * tl.load(pair + (t * 16 + line))[None, :]
    return reads, u


@triton.jit
def _pairs_of(products, place, n, line, there, C: tl.constexpr):
    """(where the pairs of a block are, |k|^2 of its tokens, what its queries read of them in both halves): loaded a
    block ahead. |k|^2 is in every line of memory that the other pairs are in, which so are near from then on."""
    pair = products + (place * (C // 16) + n % (C // 16)) * 576
    k2 = tl.load(pair + 17 * line, mask=there, other=0.0)
    of = tl.load(pair + (256 + line[:, None] * 16 + line[None, :]), mask=there, other=0.0)
    return pair, k2, of


@triton.jit
def _of_pairs(u, of, line, token, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """What queries read of u (BV, 16)."""
    of = tl.where(line[:, None] <= token, of, 0.0).to(KIND)
    return tl.dot(u.to(KIND), of, input_precision=PRECISION)


@triton.jit
def _of_later(shown, of, line, token, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """What tokens are asked for by the queries of later ones."""
    of = tl.where(line[:, None] > token, of, 0.0).to(KIND)
    return tl.dot(shown.to(KIND), of, input_precision=PRECISION)


@triton.jit
def _back_one_by_one(
    y, mine, last, sight, back, x, k2, given, pair, line, token, inside, there,
    SCALED: tl.constexpr, ANCHORED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """(what u are asked for, what x are), (BV, 16), of a block whose last derivative and do ask for y, but for the
    tokens' own part `mine`. SCALED: y stands for back y, and w for sight w among earlier tokens."""
    if ANCHORED:
        if SCALED:
            y = y * back
        asks = y + mine
        w = tl.where(inside & there, ask(x, k2, asks, given, inside, True), 0.0)
        if LAST:
            w += last
    else:
        asks = tl.zeros_like(y)
        w = tl.zeros_like(y)
        for t in tl.static_range(15, -1, -1):
            now = y
            if SCALED:
                now = y * back
            now += mine
            asks = tl.where(token == t, now, asks)
            made = tl.where(inside & there, ask(x, k2, now, given, inside, True), 0.0)
            if LAST:
                made += last
            w = tl.where(token == t, made, w)
            if t > 0:
                if SCALED:
                    made = made * sight
                y += _column(made, token, t)[:, None] * tl.load(pair + (t * 16 + line))[None, :]
    return asks, w


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def pairs(
    q, k, g, out, offsets, units, harsh, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, GATE: tl.constexpr, READS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What stands between the tokens of every block, (slots, H, C / 16, 36, 16): k_t . k_s and q_t . k_s, t the later
    one, in both halves, with what a gate of the state leaves of s at t; then what it leaves of the first state after t
    and where t reads, and of t at the block's end; of gates by rows, the smallest sum of logs over the block. |k_t|^2
    is on the diagonal of the first, whatever the gate."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % (C // 16)
    head = pid // (C // 16) % H
    slot = pid // (C // 16) // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    first += block * 16
    rows = tl.minimum(end - first, 16)
    if (rows > 0) & wanted(harsh, unit, head, H, SPLIT):
        d = tl.arange(0, BK)
        keys = load_tile(k, first, rows, d, head, H, K, 16)
        queries = load_tile(q, first, rows, d, head, H, K, 16)
        i = tl.arange(0, 16)
        late, soon = i[:, None], i[None, :]
        by_keys = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        by_queries = tl.where(late >= soon, tl.dot(queries, tl.trans(keys), input_precision=PRECISION), 0.0)
        at = out + pid * 576
        if GATE == 1:
            log = floored(load_line(g, first, rows, head, H, 16))
            run = tl.cumsum(log, 0)
            if READS == 0:
                sight = tl.sum(tl.where(soon < late, log[None, :], 0.0), 1)
            elif READS == 1:
                sight = run
            else:
                sight = run * 0.0
            rest = tl.sum(tl.where(soon > late, log[None, :], 0.0), 1)
            tl.store(at + 512 + i, tl.exp(run))
            tl.store(at + 528 + i, tl.exp(sight))
            tl.store(at + 544 + i, tl.exp(rest))
            own = tl.where(late == soon, by_keys, 0.0)
            by_keys = tl.where(late > soon, by_keys * decay(sight[:, None], run[None, :], late > soon), 0.0)
            by_keys += tl.trans(by_keys) + own
            by_queries = by_queries * decay(run[:, None], run[None, :], late >= soon)
        if GATE == 2:
            logs = floored(load_tile(g, first, rows, tl.arange(0, BV), head, H, V, 16).to(tl.float32))
            tl.store(at + 560, tl.min(tl.sum(logs, 0), 0))
        by_queries += tl.trans(tl.where(late > soon, by_queries, 0.0))
        tl.store(at + late * 16 + soon, by_keys)
        tl.store(at + 256 + late * 16 + soon, by_queries)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def forward(
    q, k, g, p0, p1, p2, p3, p4, p5, p6, p7, products, start, o, seen, states, final, before, offsets, harsh, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, STARTED: tl.constexpr, GATE: tl.constexpr, READS: tl.constexpr, RECORD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o, the final state, what keys read, the first state of every chunk (RECORD) and of the last block (anchored)."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    v = (pid % PARTS).to(tl.int32) * BV + tl.arange(0, BV)
    head = pid // PARTS % H
    unit = pid // PARTS // H
    if SPLIT > 0:  # noqa: SIM102 (a constant around a test)
        if not wanted(harsh, unit, head, H, SPLIT):
            return
    row = v[:, None]
    inside = row < V
    d = tl.arange(0, BK)
    line = tl.arange(0, 16)
    token = line[None, :]
    first, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(first, unit, N, C, PACKED)
    state = tl.zeros([BV, BK], dtype=tl.float32)
    if STARTED:
        state += _load_state(start, unit * H + head, v, d, V, K)
    blocks = ((end - first + 16 - 1) // 16).to(tl.int32)
    rows = tl.minimum(end - first, 16)
    there = token < rows
    at = (first + token) * H + head
    keys = load_tile(k, first, rows, d, head, H, K, 16)
    queries = load_tile(q, first, rows, d, head, H, K, 16)
    if GATE < 2:
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at, row, V, there, inside)
    pair, lengths, of = _pairs_of(products, slot * H + head, 0, line, blocks > 0, C)
    for n in range(0, blocks):
        rows = tl.minimum(end - first, 16)
        there = token < rows
        at = (first + token) * H + head
        if GATE == 2:  # registers are too few for those of two blocks
            given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at, row, V, there, inside)
            logs = _logs_of_rows(g, at, row, there, inside, V)
        place = (slot + n // (C // 16)) * H + head
        if RECORD:  # noqa: SIM102 (a constant around a test)
            if n % (C // 16) == 0:
                _store_state(states, state, place, v, d, V, K)
        if READS == 2:  # noqa: SIM102 (a constant around a test)
            if n == blocks - 1:
                _store_state(before, state, unit * H + head, v, d, V, K)
        k2 = lengths[None, :]
        rounded = state.to(keys.dtype)
        x = tl.dot(rounded, tl.trans(keys), input_precision=PRECISION)
        out = tl.dot(rounded, tl.trans(queries), input_precision=PRECISION)
        if GATE == 1:
            x = x * tl.load(pair + 528 + line)[None, :]
            out = out * tl.load(pair + 512 + line)[None, :]
        # what the next block needs is on its way while this one is gone through
        later = first + 16
        more = tl.maximum(tl.minimum(end - later, 16), 0)
        at_next = (later + token) * H + head
        place_next = (slot + (n + 1) // (C // 16)) * H + head
        next_pair, next_lengths, next_of = _pairs_of(products, place_next, n + 1, line, more > 0, C)
        x = tl.where(k2 < 0.0, 0.0, x)  # never: the length is read, whatever the response makes of it
        next_keys = load_tile(k, later, more, d, head, H, K, 16)
        next_queries = load_tile(q, later, more, d, head, H, K, 16)
        if GATE < 2:
            next_given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at_next, row, V, token < more, inside)
        if GATE == 2:
            if _is_mild(tl.load(pair + 560), keys.dtype):
                run = _run(logs, line, keys.dtype == tl.float32)
                scale = tl.exp(run)
                back = tl.exp(-run)
                sight = scale
                if READS == 0:
                    sight = tl.exp(run - logs)
                reads, u = _one_by_one(
                    x, sight, back, k2, given, pair, line, token, inside, there, True, READS == 2
                )  # fmt: skip
                u = u * back
                out = scale * (out + _of_pairs(u, of, line, token, keys.dtype, PRECISION))
                left = _column(scale, token, 15)
                u = u * left[:, None]
            else:
                gates = tl.exp(logs)
                written = tl.zeros([BV, 16], dtype=tl.float32)
                scaled = tl.zeros([BV, 16], dtype=tl.float32)
                left = tl.sum(scaled, 1) + 1.0
                if READS == 2:
                    reads = x
                    u = tl.where(inside & there, ask(x, k2, x, given, inside, False), 0.0)
                else:
                    reads = tl.zeros([BV, 16], dtype=tl.float32)
                    u = tl.zeros([BV, 16], dtype=tl.float32)
                for t in range(0, 16):  # few registers, since few blocks come here
                    if READS != 2:
                        now = x
                        if READS == 1:
                            now = x * gates
                        made = tl.where(inside & there, ask(now, k2, now, given, inside, False), 0.0)
                        reads = tl.where(token == t, now, reads)
                        u = tl.where(token == t, made, u)
                    one = _column(u, token, t)[:, None]
                    gate = _column(gates, token, t)
                    out = out * gate[:, None] + one * tl.load(pair + (256 + t * 16 + line))[None, :]
                    written = tl.where(token == t, out, written)
                    scaled = tl.where(token == t, u, scaled * gate[:, None])
                    left = left * gate
                    if READS != 2:
                        x = x * gate[:, None] + one * tl.load(pair + (t * 16 + line))[None, :]
                out = written
                u = scaled
            state = _join(state * left[:, None], u, keys, PRECISION)
        else:
            reads, u = _one_by_one(x, x, x, k2, given, pair, line, token, inside, there, False, READS == 2)
            out += _of_pairs(u, of, line, token, keys.dtype, PRECISION)
            if GATE == 1:
                u = u * tl.load(pair + 544 + line)[None, :]
                state = state * tl.load(pair + (512 + 15))
            state = _join(state, u, keys, PRECISION)
        tl.store(o + at * V + row, out.to(o.dtype.element_ty), mask=inside & there)
        if RECORD:
            tl.store(seen + at * V + row, reads, mask=inside & there)
        first = later
        pair, lengths, of = next_pair, next_lengths, next_of
        keys = next_keys
        queries = next_queries
        if GATE < 2:
            given = next_given
    _store_state(final, state, unit * H + head, v, d, V, K)
    if READS == 2:  # noqa: SIM102 (a constant around a test)
        if blocks == 0:
            _store_state(before, state, unit * H + head, v, d, V, K)


@Kernel
@triton.jit(do_not_specialize=["T", "H"])
def again(
    q, k, g, p0, p1, p2, p3, p4, p5, p6, p7, start, o, final, offsets, T, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    STARTED: tl.constexpr, GATE: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """o and the final state by the recurrence itself, from the first chunk on whose last output is not finite: a token
    that is not reaches earlier ones of its block (`axes.kernels.contain`). Rows that meet are those of one program."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    v = pid % PARTS * BV + tl.arange(0, BV)
    head = pid // PARTS % H
    unit = (pid // PARTS // H).to(tl.int64)
    first, end = unit_rows(offsets, unit, T, PACKED)
    length = (end - first).to(tl.int32)
    bad, chunks = first_bad(o + (first * H + head) * V, H * V, v, 0, length, V, C, 16)
    if bad < chunks:
        d = tl.arange(0, BK)
        row = v[:, None]
        inside = row < V
        there = tl.full([1, 1], True, tl.int1)
        state = tl.zeros([BV, BK], dtype=tl.float32)
        if STARTED:
            state += _load_state(start, unit * H + head, v, d, V, K)
        held = state
        for t in range(0, length):
            at = (first + t) * H + head
            key = tl.load(k + at * K + d, mask=d < K, other=0.0).to(tl.float32)
            query = tl.load(q + at * K + d, mask=d < K, other=0.0).to(tl.float32)
            if READS == 2:
                held = tl.where(t % 16 == 0, state, held)
            else:
                held = state
            if GATE == 1:
                state = state * tl.exp(floored(tl.load(g + at).to(tl.float32)))
            if GATE == 2:
                state = state * tl.exp(floored(tl.load(g + at * V + row, mask=inside, other=0.0).to(tl.float32)))
            if READS == 1:
                held = state
            x = tl.sum(held * key[None, :], 1)[:, None]
            k2 = tl.sum(key * key, 0) + tl.zeros([1, 1], dtype=tl.float32)
            given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at + tl.zeros([1, 1], tl.int64), row, V, there, inside)
            u = tl.where(inside, ask(x, k2, x, given, inside, False), 0.0)
            state += u * key[None, :]
            out = tl.sum(state * query[None, :], 1)
            tl.store(o + at * V + v, out.to(o.dtype.element_ty), mask=(v < V) & (t >= bad * C))
        _store_state(final, state, unit * H + head, v, d, V, K)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def reverse(
    q, k, g, p0, p1, p2, p3, p4, p5, p6, p7, products, seen, do, dfinal, dbefore, dlast, asked, dstates, dstart,
    offsets, harsh, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, GATE: tl.constexpr, READS: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """g_t, what every u is asked for, and derivatives in the last state of every chunk and in the first of all."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    v = (pid % PARTS).to(tl.int32) * BV + tl.arange(0, BV)
    head = pid // PARTS % H
    unit = pid // PARTS // H
    if SPLIT > 0:  # noqa: SIM102 (a constant around a test)
        if not wanted(harsh, unit, head, H, SPLIT):
            return
    row = v[:, None]
    inside = row < V
    d = tl.arange(0, BK)
    line = tl.arange(0, 16)
    token = line[None, :]
    start, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(start, unit, N, C, PACKED)
    state = _load_state(dfinal, unit * H + head, v, d, V, K)
    blocks = ((end - start + 16 - 1) // 16).to(tl.int32)
    if READS == 2:  # noqa: SIM102 (a constant around a test)
        if blocks == 0:
            state += _load_state(dbefore, unit * H + head, v, d, V, K)
    first = start + (blocks - 1) * 16
    rows = tl.minimum(end - first, 16)
    there = (token < rows) & (blocks > 0)
    at = (first + token) * H + head
    keys = load_tile(k, first, tl.where(blocks > 0, rows, 0), d, head, H, K, 16)
    queries = load_tile(q, first, tl.where(blocks > 0, rows, 0), d, head, H, K, 16)
    if GATE < 2:
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at, row, V, there, inside)
        shown = tl.load(do + at * V + row, mask=inside & there, other=0.0)
        x = tl.load(seen + at * V + row, mask=inside & there, other=0.0)
    place = (slot + (blocks - 1) // (C // 16)) * H + head
    pair, lengths, of = _pairs_of(products, place, blocks - 1, line, blocks > 0, C)
    for i in range(0, blocks):
        n = blocks - 1 - i
        rows = tl.minimum(end - first, 16)
        there = token < rows
        at = (first + token) * H + head
        if GATE == 2:
            given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at, row, V, there, inside)
            logs = _logs_of_rows(g, at, row, there, inside, V)
            shown = tl.load(do + at * V + row, mask=inside & there, other=0.0)
            x = tl.load(seen + at * V + row, mask=inside & there, other=0.0)
        place = (slot + n // (C // 16)) * H + head
        if (i == 0) | (n % (C // 16) == C // 16 - 1):
            _store_state(dstates, state, place, v, d, V, K)
        k2 = lengths[None, :]
        own = tl.load(pair + (256 + 17 * line))[None, :]
        y = tl.dot(state.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        if GATE == 1:
            y = y * tl.load(pair + 544 + line)[None, :]
        earlier = first - 16
        more = tl.where(n > 0, 16, 0)
        at_next = (earlier + token) * H + head
        place_next = (slot + (n - 1) // (C // 16)) * H + head
        next_pair, next_lengths, next_of = _pairs_of(products, place_next, n - 1, line, n > 0, C)
        y = tl.where(k2 < 0.0, 0.0, y)  # never: as in `forward`
        next_keys = load_tile(k, earlier, more, d, head, H, K, 16)
        next_queries = load_tile(q, earlier, more, d, head, H, K, 16)
        if GATE < 2:
            next_given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at_next, row, V, token < more, inside)
            next_shown = tl.load(do + at_next * V + row, mask=inside & (token < more), other=0.0)
            next_x = tl.load(seen + at_next * V + row, mask=inside & (token < more), other=0.0)
        outs = shown.to(tl.float32)
        mine = own * outs
        last = mine
        if LAST:
            closes = (first + token == end - 1) & inside
            last = tl.load(dlast + (unit * H + head) * V + row + token * 0, mask=closes, other=0.0)
        if GATE < 2:
            y += _of_later(outs, of, line, token, keys.dtype, PRECISION)
            asks, w = _back_one_by_one(
                y, mine, last, y, y, x, k2, given, pair, line, token, inside, there, False, READS == 2, LAST
            )  # fmt: skip
            if GATE == 1:
                outs = outs * tl.load(pair + 512 + line)[None, :]
                w = w * tl.load(pair + 528 + line)[None, :]
                state = state * tl.load(pair + (512 + 15))
        else:
            if _is_mild(tl.load(pair + 560), keys.dtype):
                run = _run(logs, line, keys.dtype == tl.float32)
                scale = tl.exp(run)
                sight = scale
                if READS == 0:
                    sight = tl.exp(run - logs)
                kept = _column(scale, token, 15)
                outs = outs * scale
                y = y * kept[:, None] + _of_later(outs, of, line, token, keys.dtype, PRECISION)
                asks, w = _back_one_by_one(
                    y, mine, last, sight, tl.exp(-run), x, k2, given, pair, line, token, inside, there, True,
                    READS == 2, LAST,
                )  # fmt: skip
                if READS != 2:
                    w = w * sight
            else:
                gates = tl.exp(logs)
                asks = tl.zeros([BV, 16], dtype=tl.float32)
                w = tl.zeros([BV, 16], dtype=tl.float32)
                left = tl.zeros([BV, 16], dtype=tl.float32)
                turns = tl.zeros([BV, 16], dtype=tl.float32)
                kept = tl.sum(left, 1) + 1.0
                for r in range(0, 16):
                    t = 15 - r
                    now = y + mine
                    asks = tl.where(token == t, now, asks)
                    gate = _column(gates, token, t)
                    y += _column(outs, token, t)[:, None] * tl.load(pair + (256 + t * 16 + line))[None, :]
                    left = tl.where(token == t, outs, left) * gate[:, None]
                    if READS != 2:
                        made = tl.where(inside & there, ask(x, k2, now, given, inside, True), 0.0)
                        if LAST:
                            made += last
                        w = tl.where(token == t, made, w)
                        more_of = _column(w, token, t)[:, None] * tl.load(pair + (t * 16 + line))[None, :]
                        if READS == 0:
                            turns = tl.where(token == t, w, turns * gate[:, None])
                            y = y * gate[:, None] + more_of
                        else:
                            turns = tl.where(token == t, w, turns) * gate[:, None]
                            y = (y + more_of) * gate[:, None]
                    else:
                        y = y * gate[:, None]
                    kept = kept * gate
                outs = left
                if READS == 2:
                    w = tl.where(inside & there, ask(x, k2, asks, given, inside, True), 0.0)
                    if LAST:
                        w += last
                else:
                    w = turns
            state = state * kept[:, None]
        tl.store(asked + at * V + row, asks, mask=inside & there)
        state = _join(state, outs, queries, PRECISION)
        state = _join(state, w, keys, PRECISION)
        if READS == 2:  # noqa: SIM102 (a constant around a test)
            if i == 0:
                state += _load_state(dbefore, unit * H + head, v, d, V, K)
        first = earlier
        pair, lengths, of = next_pair, next_lengths, next_of
        keys = next_keys
        queries = next_queries
        if GATE < 2:
            given = next_given
            shown = next_shown
            x = next_x
    _store_state(dstart, state, unit * H + head, v, d, V, K)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def slopes(
    p0, p1, p2, p3, p4, p5, p6, p7, d0, d1, d2, d3, d4, d5, d6, d7, products, seen, asked, dlast, written, turns, dk2,
    offsets, units, harsh, T, N, H,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """u, w and the derivatives in inputs of every block of tokens."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % (C // 16)
    head = pid // (C // 16) % H
    slot = pid // (C // 16) // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    stop = _unit_end(offsets, unit, T, PACKED)
    first += block * 16
    rows = tl.minimum(end - first, 16)
    if (rows > 0) & wanted(harsh, unit, head, H, SPLIT):
        v = tl.arange(0, BV)
        token = tl.arange(0, 16)
        there = token < rows
        inside = (v < V)[None, :] & there[:, None]
        at = (first + token) * H + head
        x = load_tile(seen, first, rows, v, head, H, V, 16)
        y = load_tile(asked, first, rows, v, head, H, V, 16)
        k2 = tl.load(products + pid * 576 + token * 17)[:, None]
        u, w, dk = pull(
            x, k2, y, p0, p1, p2, p3, p4, p5, p6, p7, d0, d1, d2, d3, d4, d5, d6, d7, at, v, V, there,
            (v < V)[None, :],
        )  # fmt: skip
        w = tl.where(inside, w, 0.0)
        if LAST:
            last = tl.load(dlast + (unit * H + head) * V + v, mask=v < V, other=0.0)
            w += tl.where((first + token == stop - 1)[:, None], last[None, :], 0.0)
        store_tile(written, tl.where(inside, u, 0.0), first, rows, v, head, H, V, 16)
        store_tile(turns, w, first, rows, v, head, H, V, 16)
        tl.store(dk2 + at[:, None], tl.broadcast_to(dk, [16, 1]), mask=there[:, None])


@triton.jit
def _sums(keep, logs, SUMS: tl.constexpr):
    """Sums over tokens of logs (C, n), of those that `keep` (C, C) says. Logs are in [-100, 0]: in two parts of fp16
    they have 22 bits, and a product of these with ones and zeros is exact."""
    if SUMS == "ieee":
        made = tl.dot(tl.where(keep, 1.0, 0.0), logs, input_precision="ieee")
    else:
        high = logs.to(tl.float16)
        ones = tl.where(keep, 1.0, 0.0).to(tl.float16)
        made = tl.dot(ones, (logs - high.to(tl.float32)).to(tl.float16), tl.dot(ones, high))
    return made


@triton.jit
def _halves(log, half, C: tl.constexpr, SUMS: tl.constexpr):
    """Pairs of tokens in different halves of 2 half tokens meet where the upper one begins: what gates leave of a token
    on its way there, and the sum of their logs; whether it is in an upper half, where that begins, which pairs meet."""
    i = tl.arange(0, C)
    late, soon = i[:, None], i[None, :]
    upper = late // half % 2 == 1
    border = late // half * half
    met = (late // (2 * half) == soon // (2 * half)) & (late // half > soon // half)
    between = (upper & (soon >= border) & (soon <= late)) | (
        (late // half % 2 == 0) & (soon > late) & (soon < border + half)
    )
    exponent = _sums(between, log, SUMS)
    return tl.exp(exponent), exponent, upper, border, met


@triton.jit
def _in_blocks(x, C: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr):
    """Cumulative sums (C, BV) that begin anew with every block of 16 tokens."""
    return tl.reshape(tl.cumsum(tl.reshape(x, [C // 16, 16, BV]), 1, reverse=REVERSE), [C, BV])


@triton.jit
def _rows_of_gates(
    g, first, rows, v, head, H,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Log gates (C, BV): of rows, or that of the whole state in every row."""
    if GATE == 2:
        log = load_tile(g, first, rows, v, head, H, V, C).to(tl.float32)
    else:
        log = tl.broadcast_to(load_line(g, first, rows, head, H, C)[:, None], [C, BV])
    return floored(log)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def meetings(
    g, do, written, turns, out, offsets, units, harsh, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, GATE: tl.constexpr, READS: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """C_ts and W_ts + W_st of a chunk, (slots, H, 2, C, C). SUMS: how logs are added."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    slot = pid // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    if (rows > 0) & wanted(harsh, unit, head, H, SPLIT):
        i = tl.arange(0, C)
        late, soon = i[:, None], i[None, :]
        if READS == 2:
            reads = late // 16 > soon // 16
        else:
            reads = late > soon
        by_out = tl.zeros([C, C], dtype=tl.float32)
        by_read = tl.zeros([C, C], dtype=tl.float32)
        kind = written.dtype.element_ty
        for at in range(0, V, BV):
            v = at + tl.arange(0, BV)
            shown = load_tile(do, first, rows, v, head, H, V, C)
            u = load_tile(written, first, rows, v, head, H, V, C)
            w = load_tile(turns, first, rows, v, head, H, V, C)
            if GATE < 2:
                by_out += tl.dot(shown, tl.trans(u), input_precision=PRECISION)
                by_read += tl.dot(w, tl.trans(u), input_precision=PRECISION)
            else:
                log = floored(load_tile(g, first, rows, v, head, H, V, C).to(tl.float32))
                own_pair = tl.sum(shown.to(tl.float32) * u.to(tl.float32), 1)
                by_out += tl.where(late == soon, own_pair[:, None], 0.0)
                if _is_mild(tl.min(tl.sum(log, 0), 0), kind):
                    run = _sums(late >= soon, log, SUMS)
                    near = (u.to(tl.float32) * tl.exp(-run)).to(kind)
                    high = (shown.to(tl.float32) * tl.exp(run)).to(kind)
                    product = tl.dot(high, tl.trans(near), input_precision=PRECISION)
                    by_out += tl.where(late > soon, product, 0.0)
                    if READS == 0:
                        run -= log
                    if READS == 2:
                        run = _sums(soon < late // 16 * 16, log, SUMS)
                    back = (w.to(tl.float32) * tl.exp(run)).to(kind)
                    by_read += tl.where(reads, tl.dot(back, tl.trans(near), input_precision=PRECISION), 0.0)
                else:
                    half = C // 2
                    while half > 0:
                        factor, exponent, upper, border, met = _halves(log, half, C, SUMS)
                        low = tl.where(upper, 0.0, u.to(tl.float32) * factor).to(kind)
                        high = tl.where(upper, shown.to(tl.float32) * factor, 0.0).to(kind)
                        by_out += tl.where(met, tl.dot(high, tl.trans(low), input_precision=PRECISION), 0.0)
                        if READS == 0:
                            factor = tl.exp(tl.minimum(exponent - log, 0.0))
                        if READS == 2:
                            between = upper & (soon >= border) & (soon < late // 16 * 16)
                            factor = tl.exp(_sums(between, log, SUMS))
                        back = tl.where(upper, w.to(tl.float32) * factor, 0.0).to(kind)
                        product = tl.dot(back, tl.trans(low), input_precision=PRECISION)
                        by_read += tl.where(met & reads, product, 0.0)
                        half = half // 2
        if GATE == 1:
            line = floored(load_line(g, first, rows, head, H, C))
            run = tl.cumsum(line, 0)
            sight = _sight(line, run, C, READS)
            by_out = by_out * decay(run[:, None], run[None, :], late >= soon)
            by_read = by_read * decay(sight[:, None], run[None, :], reads)
        elif GATE == 0:
            by_out = tl.where(late >= soon, by_out, 0.0)
            by_read = tl.where(reads, by_read, 0.0)
        to = out + pid * (2 * C * C) + late * C + soon
        tl.store(to, by_out.to(kind))
        tl.store(to + C * C, (by_read + tl.trans(by_read)).to(kind))


@triton.jit
def _sight(line, run, C: tl.constexpr, READS: tl.constexpr):
    """Sums of the logs of a chunk's gates as far as its tokens have seen them."""
    i = tl.arange(0, C)
    if READS == 0:
        sight = run - line
    elif READS == 1:
        sight = run
    else:
        sight = tl.sum(tl.where(i[None, :] < i[:, None] // 16 * 16, line[None, :], 0.0), 1)
    return sight


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def closings(
    q, k, g, do, written, turns, seen, asked, states, dstates, final, before, dbefore, dg,
    offsets, units, harsh, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, GATE: tl.constexpr, READS: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Derivatives in the gates of a chunk."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    slot = pid // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    if (rows > 0) & wanted(harsh, unit, head, H, SPLIT):
        d = tl.arange(0, BK)
        i = tl.arange(0, C)
        late, soon = i[:, None], i[None, :]
        kind = written.dtype.element_ty
        queries = load_tile(q, first, rows, d, head, H, K, C)
        keys = load_tile(k, first, rows, d, head, H, K, C)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        own = tl.sum(tl.where(late == soon, scores, 0.0), 1)[:, None]
        if GATE == 1:
            line = floored(load_line(g, first, rows, head, H, C))
            run = tl.cumsum(line, 0)
            inner = tl.where(late > soon, scores * decay(run[:, None], run[None, :], late >= soon), 0.0).to(kind)
            grad_gate = tl.zeros([C], dtype=tl.float32)
        else:
            inner = tl.where(late > soon, scores, 0.0).to(kind)
        for at in range(0, V, BV):
            v = at + tl.arange(0, BV)
            # what the chunk's last state is asked for, beside it
            if first + rows < _unit_end(offsets, unit, T, PACKED):
                last = _load_state(states, (slot + 1) * H + head, v, d, V, K).to(tl.float32)
            else:
                last = _load_state(final, unit * H + head, v, d, V, K)
            dstate = _load_state(dstates, slot * H + head, v, d, V, K).to(tl.float32)
            through_end = tl.sum(last * dstate, 1)[None, :]
            state = _load_state(states, slot * H + head, v, d, V, K)
            x = tl.dot(queries, tl.trans(state), input_precision=PRECISION)
            u = load_tile(written, first, rows, v, head, H, V, C)
            if GATE == 1:
                x = x * tl.exp(run)[:, None] + tl.dot(inner, u, input_precision=PRECISION)
            else:
                log = floored(load_tile(g, first, rows, v, head, H, V, C).to(tl.float32))
                logs = _sums(late >= soon, log, SUMS)
                if _is_mild(tl.min(tl.sum(log, 0), 0), kind):
                    near = (u.to(tl.float32) * tl.exp(-logs)).to(kind)
                    x = tl.exp(logs) * (x + tl.dot(inner, near, input_precision=PRECISION))
                else:
                    x = x * tl.exp(logs)
                    half = C // 2
                    while half > 0:
                        factor, exponent, upper, border, met = _halves(log, half, C, SUMS)
                        low = tl.where(upper, 0.0, u.to(tl.float32) * factor).to(kind)
                        x += factor * tl.dot(tl.where(met, inner, 0.0).to(kind), low, input_precision=PRECISION)
                        half = half // 2
            # x is what queries read, less the token's own pair
            show = load_tile(do, first, rows, v, head, H, V, C).to(tl.float32)
            y = load_tile(asked, first, rows, v, head, H, V, C) - own * show
            change = show * x - u.to(tl.float32) * y
            through = load_tile(turns, first, rows, v, head, H, V, C).to(tl.float32)
            through *= load_tile(seen, first, rows, v, head, H, V, C)
            if READS == 1:
                change += through
            total = tl.cumsum(change, 0, reverse=True)
            if READS == 0:
                total += tl.cumsum(through, 0, reverse=True) - through
            if READS == 2:
                total += tl.cumsum(through, 0, reverse=True) - _in_blocks(through, C, BV, True)
            total += through_end
            if READS == 2:  # noqa: SIM102 (a constant around a test)
                if end == _unit_end(offsets, unit, T, PACKED):
                    anchor = _load_state(before, unit * H + head, v, d, V, K)
                    asks = _load_state(dbefore, unit * H + head, v, d, V, K)
                    total += tl.where(late < (rows - 1) // 16 * 16, tl.sum(anchor * asks, 1)[None, :], 0.0)
            if GATE == 2:
                store_tile(dg, total, first, rows, v, head, H, V, C)
            else:
                grad_gate += tl.sum(tl.where((v < V)[None, :], total, 0.0), 1)
        if GATE == 1:
            tl.store(dg + (first + i) * H + head, grad_gate, mask=i < rows)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def gradients(
    q, k, g, do, written, turns, states, dstates, dbefore, met, dk2, dq, dk, offsets, units, harsh, T, N, H,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, GATE: tl.constexpr, READS: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """dq and dk of a chunk, BD columns of them in a program."""
    PARTS: tl.constexpr = BK // BD
    part = tl.program_id(0) % PARTS
    pid = (tl.program_id(0) // PARTS).to(tl.int64)
    head = pid % H
    slot = pid // H
    unit, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    rows = (end - first).to(tl.int32)
    if (rows > 0) & wanted(harsh, unit, head, H, SPLIT):
        d = part * BD + tl.arange(0, BD)
        i = tl.arange(0, C)
        kind = written.dtype.element_ty
        grad_q = tl.zeros([C, BD], dtype=tl.float32)
        grad_k = tl.zeros([C, BD], dtype=tl.float32)
        for at in range(0, V, BV):
            v = at + tl.arange(0, BV)
            shown = load_tile(do, first, rows, v, head, H, V, C)
            u = load_tile(written, first, rows, v, head, H, V, C)
            w = load_tile(turns, first, rows, v, head, H, V, C)
            if GATE > 0:
                log = _rows_of_gates(g, first, rows, v, head, H, V, C, BV, GATE)
                run = tl.cumsum(log, 0)
                shown = (shown.to(tl.float32) * tl.exp(run)).to(kind)
                if READS == 0:
                    sight = run - log
                elif READS == 1:
                    sight = run
                else:
                    sight = run - _in_blocks(log, C, BV, False)
                w = (w.to(tl.float32) * tl.exp(tl.minimum(sight, 0.0))).to(kind)
            if READS == 2:  # noqa: SIM102 (a constant around a test)
                if end == _unit_end(offsets, unit, T, PACKED):
                    block = (rows - 1) // 16 * 16
                    early = tl.where((i < block)[:, None], u.to(tl.float32), 0.0)
                    if GATE > 0:
                        rest = (i[None, :] > i[:, None]) & (i[None, :] < block)
                        early = early * tl.exp(_sums(rest, log, SUMS))
                    asks = _load_state(dbefore, unit * H + head, v, d, V, K).to(kind)
                    grad_k = tl.dot(early.to(kind), asks, grad_k, input_precision=PRECISION)
            if GATE > 0:
                after = tl.minimum(tl.sum(log, 0)[None, :] - run, 0.0)
                u = (u.to(tl.float32) * tl.exp(after)).to(kind)
            state = _load_state(states, slot * H + head, v, d, V, K)
            grad_q = tl.dot(shown, state, grad_q, input_precision=PRECISION)
            grad_k = tl.dot(w, state, grad_k, input_precision=PRECISION)
            dstate = _load_state(dstates, slot * H + head, v, d, V, K)
            grad_k = tl.dot(u, dstate, grad_k, input_precision=PRECISION)
        keys = load_tile(k, first, rows, d, head, H, K, C)
        queries = load_tile(q, first, rows, d, head, H, K, C)
        at = met + pid * (2 * C * C) + i[:, None] * C + i[None, :]
        by_out = tl.load(at)
        both = tl.load(at + C * C)
        grad_q = tl.dot(by_out, keys, grad_q, input_precision=PRECISION)
        grad_k = tl.dot(tl.trans(by_out), queries, grad_k, input_precision=PRECISION)
        grad_k = tl.dot(both, keys, grad_k, input_precision=PRECISION)
        length = tl.load(dk2 + (first + i) * H + head, mask=i < rows, other=0.0)
        grad_k += 2.0 * length[:, None] * keys.to(tl.float32)
        store_tile(dq, grad_q, first, rows, d, head, H, K, C)
        store_tile(dk, grad_k, first, rows, d, head, H, K, C)


# ---- what queries read, where that is more than a product -----------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["rows"])
def read(
    x, p0, p1, p2, p3, p4, p5, p6, p7, out, rows, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """The response of rows x (rows, V)."""
    v = tl.arange(0, BV)[:, None]
    at = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[None, :]
    there, inside = at < rows, v < V
    given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at, v, V, there, inside)
    seen = tl.load(x + at * V + v, mask=inside & there, other=0.0)
    made = ask(seen, tl.sum(seen * 0.0, 0)[None, :], seen, given, inside, False)
    tl.store(out + at * V + v, made.to(out.dtype.element_ty), mask=inside & there)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def read_back(
    x, do, p0, p1, p2, p3, p4, p5, p6, p7, dx, d0, d1, d2, d3, d4, d5, d6, d7, rows,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Derivatives in x and in inputs."""
    v = tl.arange(0, BV)
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there, inside = at < rows, (v < V)[None, :]
    whole = inside & there[:, None]
    place = at[:, None] * V + v[None, :]
    seen = tl.load(x + place, mask=whole, other=0.0)
    asked = tl.load(do + place, mask=whole, other=0.0).to(tl.float32)
    _, w, _ = pull(
        seen, tl.sum(seen * 0.0, 1)[:, None], asked, p0, p1, p2, p3, p4, p5, p6, p7, d0, d1, d2, d3, d4, d5, d6, d7, at,
        v, V, there, inside,
    )  # fmt: skip
    tl.store(dx + place, w, mask=whole)
