"""Kernels of a memory y = W1 gelu(W2 x) whose gradients are those at the first state of a block of 16 tokens.

With z = W2 k, h = gelu(z), u = rho(W1 h) (of `response`: minus the gradient in W1 h, gates and rates apart) and
p = gelu'(z) * (W1^T u), all of the block's first state and known at once, the states of its tokens are
    W2_t = a_t W2 + b_t M2 + sum_{s <= t} c_ts p_s k_s^T,    W1_t = a_t W1 + b_t M1 + sum_{s <= t} c_ts u_s h_s^T
with numbers a, b and c of gates and rates, M what a filter holds (FILTER), which is e0 M + sum_s e_s p_s k_s^T at the
end. ROWS: a_t and c_ts of W1 are of its rows, e^{G_t} and e^{G_t - G_s} r_s, G the sums of the logs g of the block.
What queries read,
    n = a W2 q + b M2 q + P (c * K Q^T),   m = gelu(n),   o = a W1 m + b M1 m + U (c * H^T m),
never forms a state. Matrices are (rows, keys) and stand in memory in float32, a tile of hidden units on chip at a time.

Backwards, with E and N the derivatives in the last W and M,
    dm = a W1^T do + b M1^T do + H (c * U^T do),   dn = gelu'(n) dm,   dp = dn (c * K Q^T)^T + c_last E2 K + e N2 K,
    du = do (c * H^T m)^T + c_last E1 H + e N1 H + W1 (gelu'(z) dp),
and dy = rho'(y)^T du is what W1 and h are asked for. `states` and `reverse` are serial in blocks; `reads` and
`reads_back` of what is read are not, given the first state of every block: rooms of a segment of blocks hold these in
the dtype of products, and beside them what `reads_back` leaves for `reverse`.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import floored
from axes.kernels.network.functions import bent, gelu, line
from axes.kernels.substitution.response import ask, inputs  # replaced

_OPEN = ["T", "H", "first", "last"]


@triton.jit
def _ask(x, y, given, inside, BACK: tl.constexpr):
    """u of the tokens of a block (BD, 16), or what their x is asked for by y (BACK)."""
    return ask(x, tl.sum(x * 0.0, 0)[None, :], y, given, inside, BACK)


@triton.jit
def _load(ptr, row, column, R: tl.constexpr, S: tl.constexpr):
    """A tile of a matrix (R, S)."""
    inside = (row < R)[:, None] & (column < S)[None, :]
    return tl.load(ptr + row[:, None] * S + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store(ptr, tile, row, column, R: tl.constexpr, S: tl.constexpr):
    inside = (row < R)[:, None] & (column < S)[None, :]
    tl.store(ptr + row[:, None] * S + column[None, :], tile, mask=inside)


@triton.jit
def _get(ptr, at, there, d, D: tl.constexpr):
    """Tokens of a tensor (tokens H, D) as columns (BD, 16)."""
    return tl.load(ptr + at[None, :] * D + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)


@triton.jit
def _put(ptr, tile, at, there, d, D: tl.constexpr):
    place = ptr + at[None, :] * D + d[:, None]
    tl.store(place, tile.to(ptr.dtype.element_ty), mask=there[None, :] & (d < D)[:, None])


@triton.jit
def _pairs(ptr, at, there, token):
    """Of a tensor (tokens H, 16) the tile [s, t] of a block, whose rows there are those of t."""
    return tl.load(ptr + at[None, :] * 16 + token[:, None], mask=there[None, :], other=0.0)


@triton.jit
def _logs(g, at, there, d, D: tl.constexpr):
    """Sums of a block's logs of rows (BD, 16)."""
    return tl.cumsum(floored(_get(g, at, there, d, D).to(tl.float32)), 1)


@triton.jit
def _column(x, token, t):
    return tl.sum(tl.where(token[None, :] == t, x, 0.0), 1)


@triton.jit
def _row(x, token, t):
    return tl.sum(tl.where(token[:, None] == t, x, 0.0), 0)


@triton.jit
def _dot(x, y, PRECISION: tl.constexpr):
    """A product that is no warpgroup's (wgmma), which has rows in sixty-fours: those of tokens are the rows. The
    assembler of Triton 3.6 (ptxas 12.9) breaks those: `reverse` read beyond shared memory, and is right by ptxas 13."""
    if x.shape[0] % 64 == 0:
        made = tl.trans(tl.dot(tl.trans(y), tl.trans(x), input_precision=PRECISION))
    else:
        made = tl.dot(x, y, input_precision=PRECISION)
    return made


@triton.jit
def _times(u, dots, c, sums, rate, token, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr):
    """sum_s c_ts u_s dots_st of every token t, (BD, 16)."""
    if ROWS:
        made = tl.zeros_like(u)
        for s in range(16):
            kept = tl.where((token >= s)[None, :], sums - _column(sums, token, s)[:, None], float("-inf"))
            made += tl.exp(kept) * _column(u * rate, token, s)[:, None] * _row(dots, token, s)[None, :]
    else:
        made = _dot(u.to(DTYPE), (c * dots).to(DTYPE), PRECISION)
    return made


@triton.jit
def _ends(a, b, c, e0, e, end, at_end, token, there, GATED: tl.constexpr, FILTER: tl.constexpr):
    """a, b and c of a block's last token, and e0 and e of the block."""
    c_end = tl.load(c + end * 16 + token, mask=there, other=0.0)[None, :]
    a_end, b_end, e_first, e_end = 1.0, 0.0, 0.0, c_end
    if GATED:
        a_end = tl.load(a + end)
    if FILTER:
        b_end = tl.load(b + end)
        e_first = tl.load(e0 + at_end)
        e_end = tl.load(e + at_end * 16 + token)[None, :]
    return a_end, b_end, c_end, e_first, e_end


@triton.jit
def _units(ptr, f, token, F: tl.constexpr):
    """Hidden units of a block's tokens, (BF, 16)."""
    return tl.load(ptr + f[:, None] * 16 + token[None, :], mask=(f < F)[:, None], other=0.0)


@triton.jit
def _put_units(ptr, tile, f, token, F: tl.constexpr):
    tl.store(ptr + f[:, None] * 16 + token[None, :], tile.to(ptr.dtype.element_ty), mask=(f < F)[:, None])


@triton.jit
def _block(ptr, d, token, D: tl.constexpr):
    """Of a tensor (.., D, 16) the tile (BD, 16) of a block."""
    return tl.load(ptr + d[:, None] * 16 + token[None, :], mask=(d < D)[:, None], other=0.0)


@triton.jit
def _put_block(ptr, tile, d, token, D: tl.constexpr):
    tl.store(ptr + d[:, None] * 16 + token[None, :], tile, mask=(d < D)[:, None])


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def states(
    k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, e0, e, g, r,
    w1, w2, m1, m2, rooms1, rooms2, rooms3, rooms4, seen, T, H, first, last,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, FILTER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last` of every sequence and head: W and M, float32, move on in their place, and stand in rooms
    as they were at the start of every block. KNOWN: W1 h is (`seen`), else it is found here."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit = pid % H, pid // H
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = tl.arange(0, BF)
    inside = (d < D)[:, None]
    base = pid * (D * F)
    room = tl.num_programs(0).to(tl.int64) * (D * F)
    for n in range(first, last):
        rows = tl.minimum(T - n * 16, 16)
        there = token < rows
        at = (unit * T + n * 16 + token) * H + head
        to = base + (n - first) * room
        kt = _get(k, at, there, d, D)
        kb = tl.trans(kt)
        if KNOWN:
            y = _get(seen, at, there, d, D)
        else:
            y = tl.zeros([BD, 16], tl.float32)
            for i in range(0, F, BF):
                z = _dot(_load(w2 + base, i + f, d, F, D).to(DTYPE), kt, PRECISION)
                h, _ = gelu(z)
                y += _dot(_load(w1 + base, d, i + f, D, F).to(DTYPE), h.to(DTYPE), PRECISION)
            _put(seen, y, at, there, d, D)
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
        u = tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0)
        end = (unit * T + n * 16 + rows - 1) * H + head
        at_end = (unit * tl.cdiv(T, 16) + n) * H + head
        a_end, b_end, c_end, e_first, e_end = _ends(a, b, c, e0, e, end, at_end, token, there, GATED, FILTER)
        write = u * c_end
        if ROWS:
            sums, rate = _logs(g, at, there, d, D), _get(r, at, there, d, D).to(tl.float32)
            left = _column(sums, token, 15)[:, None]
            write = u * rate * tl.exp(left - sums)
        ub, wb = u.to(DTYPE), write.to(DTYPE)
        for i in range(0, F, BF):
            x2, x1 = _load(w2 + base, i + f, d, F, D), _load(w1 + base, d, i + f, D, F)
            y2, y1 = x2.to(DTYPE), x1.to(DTYPE)
            _store(rooms2 + to, y2, i + f, d, F, D)
            _store(rooms1 + to, y1, d, i + f, D, F)
            h, slope = gelu(_dot(y2, kt, PRECISION))
            hb = tl.trans(h.to(DTYPE))
            p = _dot(tl.trans(y1), ub, PRECISION) * slope
            now2 = a_end * x2 + _dot((p * c_end).to(DTYPE), kb, PRECISION)
            now1 = _dot(wb, hb, PRECISION)
            if ROWS:
                now1 += tl.exp(left) * x1
            else:
                now1 += a_end * x1
            if FILTER:
                z2, z1 = _load(m2 + base, i + f, d, F, D), _load(m1 + base, d, i + f, D, F)
                _store(rooms4 + to, z2.to(DTYPE), i + f, d, F, D)
                _store(rooms3 + to, z1.to(DTYPE), d, i + f, D, F)
                now2 += b_end * z2
                now1 += b_end * z1
                z2 = e_first * z2 + _dot((p * e_end).to(DTYPE), kb, PRECISION)
                z1 = e_first * z1 + _dot((u * e_end).to(DTYPE), hb, PRECISION)
                _store(m2 + base, z2, i + f, d, F, D)
                _store(m1 + base, z1, d, i + f, D, F)
            _store(w2 + base, now2, i + f, d, F, D)
            _store(w1 + base, now1, d, i + f, D, F)
        tl.debug_barrier()  # what is written here is read in the next turn


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def reads(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, g, r, rooms1, rooms2, rooms3, rooms4, seen, o, met, T, H, U, first,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, FILTER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries of a block read of W1 m, and H^T m, which backwards wants."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit, n = pid % H, pid // H % U, first + pid // (H * U)
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = tl.arange(0, BF)
    inside = (d < D)[:, None]
    to = pid * (D * F)
    there = token < T - n * 16
    at = (unit * T + n * 16 + token) * H + head
    kt, qt = _get(k, at, there, d, D), _get(q, at, there, d, D)
    y = _get(seen, at, there, d, D)
    given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
    u = tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0)
    ub = u.to(DTYPE)
    c_st, a_t, b_t = _pairs(c, at, there, token), line(a, at, there, GATED), line(b, at, there, FILTER)
    pairs = (_dot(tl.trans(kt), qt, PRECISION) * c_st).to(DTYPE)
    read, more = tl.zeros([BD, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
    dots = tl.zeros([16, 16], tl.float32)
    for i in range(0, F, BF):
        y2, y1 = _load(rooms2 + to, i + f, d, F, D), _load(rooms1 + to, d, i + f, D, F)
        h, slope = gelu(_dot(y2, kt, PRECISION))
        p = _dot(tl.trans(y1), ub, PRECISION) * slope
        asked = _dot(y2, qt, PRECISION) * a_t[None, :]
        if FILTER:
            z2, z1 = _load(rooms4 + to, i + f, d, F, D), _load(rooms3 + to, d, i + f, D, F)
            asked += _dot(z2, qt, PRECISION) * b_t[None, :]
        asked += _dot(p.to(DTYPE), pairs, PRECISION)
        m, _ = gelu(asked)
        mb = m.to(DTYPE)
        read += _dot(y1, mb, PRECISION)
        dots += _dot(tl.trans(h.to(DTYPE)), mb, PRECISION)
        if FILTER:
            more += _dot(z1, mb, PRECISION)
    sums, rate = u, u
    if ROWS:
        sums, rate = _logs(g, at, there, d, D), _get(r, at, there, d, D).to(tl.float32)
        read *= tl.exp(sums)
    else:
        read *= a_t[None, :]
    if FILTER:
        read += more * b_t[None, :]
    read += _times(u, dots, c_st, sums, rate, token, DTYPE, PRECISION, ROWS)
    _put(o, read, at, there, d, D)
    tl.store(met + at[None, :] * 16 + token[:, None], dots, mask=there[None, :])


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def reads_back(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, g, r, rooms1, rooms2, rooms3, rooms4, seen, met, do,
    ms, dns, dps, dhs, dus, dks, dwrites, dlogs, dq, da, db, dc, T, H, U, first,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, FILTER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Derivatives of what the queries of a block read: dq, those in a, b and c, and for `reverse` m, dn, and the parts
    in p, h, u, k (ROWS: and in u with its rates and in sums of logs)."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit, n = pid % H, pid // H % U, first + pid // (H * U)
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = tl.arange(0, BF)
    inside = (d < D)[:, None]
    to, units, block = pid * (D * F), pid * (F * 16), pid * (D * 16)
    there = token < T - n * 16
    at = (unit * T + n * 16 + token) * H + head
    kt, qt = _get(k, at, there, d, D), _get(q, at, there, d, D)
    y = _get(seen, at, there, d, D)
    given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
    u = tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0)
    ub = u.to(DTYPE)
    c_st, a_t, b_t = _pairs(c, at, there, token), line(a, at, there, GATED), line(b, at, there, FILTER)
    dots, got = _pairs(met, at, there, token), _get(do, at, there, d, D)
    if ROWS:
        sums, rate = _logs(g, at, there, d, D), _get(r, at, there, d, D).to(tl.float32)
        late = (got * tl.exp(sums)).to(DTYPE)
        ddots, dwrite = tl.zeros([16, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
        dsums, dc_st = tl.zeros([BD, 16], tl.float32), tl.zeros([16, 16], tl.float32)
        for s in range(16):
            kept = tl.where((token >= s)[None, :], sums - _column(sums, token, s)[:, None], float("-inf"))
            kept = tl.exp(kept) * got
            ones = _column(u * rate, token, s)
            ddots = tl.where((token == s)[:, None], tl.sum(kept * ones[:, None], 0)[None, :], ddots)
            kept *= _row(dots, token, s)[None, :]
            mine = tl.sum(kept, 1)
            dwrite = tl.where((token == s)[None, :], mine[:, None], dwrite)
            dsums += kept * ones[:, None] - tl.where((token == s)[None, :], (mine * ones)[:, None], 0.0)
        _put_block(dwrites + block, dwrite, d, token, D)
        _put_block(dus + block, dwrite * 0.0, d, token, D)
    else:
        gb, late = got.to(DTYPE), (got * a_t[None, :]).to(DTYPE)
        ddots = _dot(tl.trans(ub), gb, PRECISION)
        dc_st = dots * ddots
        ddots *= c_st
        _put_block(dus + block, _dot(gb, tl.trans((c_st * dots).to(DTYPE)), PRECISION), d, token, D)
    both = ddots.to(DTYPE)
    alike = _dot(tl.trans(kt), qt, PRECISION)
    pairs = (alike * c_st).to(DTYPE)
    dpairs = tl.zeros([16, 16], tl.float32)
    read, more = tl.zeros([BD, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
    dqt = tl.zeros([BD, 16], tl.float32)
    da_t, db_t = tl.zeros([16], tl.float32), tl.zeros([16], tl.float32)
    for i in range(0, F, BF):
        y2, y1 = _load(rooms2 + to, i + f, d, F, D), _load(rooms1 + to, d, i + f, D, F)
        h, slope = gelu(_dot(y2, kt, PRECISION))
        hb = h.to(DTYPE)
        pb = (_dot(tl.trans(y1), ub, PRECISION) * slope).to(DTYPE)
        plain = _dot(y2, qt, PRECISION)
        asked = plain * a_t[None, :] + _dot(pb, pairs, PRECISION)
        if FILTER:
            z2, z1 = _load(rooms4 + to, i + f, d, F, D), _load(rooms3 + to, d, i + f, D, F)
            held = _dot(z2, qt, PRECISION)
            asked += held * b_t[None, :]
        m, slope_m = gelu(asked)
        mb = m.to(DTYPE)
        _put_units(ms + units, mb, i + f, token, F)
        dm = _dot(hb, both, PRECISION) + _dot(tl.trans(y1), late, PRECISION)
        if GATED or ROWS:
            read += _dot(y1, mb, PRECISION)
        if FILTER:
            dm += _dot(tl.trans(z1), (got * b_t[None, :]).to(DTYPE), PRECISION)
            more += _dot(z1, mb, PRECISION)
        dn = dm * slope_m
        dnb = dn.to(DTYPE)
        _put_units(dns + units, dnb, i + f, token, F)
        _put_units(dhs + units, _dot(mb, tl.trans(both), PRECISION), i + f, token, F)
        _put_units(dps + units, _dot(dnb, tl.trans(pairs), PRECISION), i + f, token, F)
        dpairs += _dot(tl.trans(pb), dnb, PRECISION)
        dqt += _dot(tl.trans(y2), (dn * a_t[None, :]).to(DTYPE), PRECISION)
        if GATED:
            da_t += tl.sum(dn * plain, 0)
        if FILTER:
            dqt += _dot(tl.trans(z2), (dn * b_t[None, :]).to(DTYPE), PRECISION)
            db_t += tl.sum(dn * held, 0)
    if ROWS:
        _put_block(dlogs + block, dsums + got * tl.exp(sums) * read, d, token, D)
    elif GATED:
        da_t += tl.sum(got * read, 0)
    if GATED:
        tl.store(da + at, da_t, mask=there)
    if FILTER:
        tl.store(db + at, db_t + tl.sum(got * more, 0), mask=there)
    tl.store(dc + at[None, :] * 16 + token[:, None], dc_st + dpairs * alike, mask=there[None, :])
    dpb = (dpairs * c_st).to(DTYPE)
    _put(dq, dqt + _dot(kt, dpb, PRECISION), at, there, d, D)
    _put_block(dks + block, _dot(qt, tl.trans(dpb), PRECISION), d, token, D)


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def reverse(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, e0, e, g, r, rooms1, rooms2, rooms3, rooms4, seen, do,
    before1, before2, ms, dns, dps, dhs, dzs, dus, dks, dwrites, dlogs, dw1, dw2, dm1, dm2, asked, dk, da, db, dc,
    de0, de, dg, dr, T, H, first, last,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, FILTER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks from `last` - 1 to `first`: derivatives in W and M move, in their place, from the state after them to that
    before. asked: what u is asked for; before: of the last block's first W, which is shown."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit = pid % H, pid // H
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = tl.arange(0, BF)
    inside = (d < D)[:, None]
    base = pid * (D * F)
    blocks = tl.cdiv(T, 16)
    for back in range(first, last):
        n = first + last - 1 - back
        rows = tl.minimum(T - n * 16, 16)
        there = token < rows
        at = (unit * T + n * 16 + token) * H + head
        place = pid + (n - first) * tl.num_programs(0).to(tl.int64)
        to, units, block = place * (D * F), place * (F * 16), place * (D * 16)
        kt = _get(k, at, there, d, D)
        y = _get(seen, at, there, d, D)
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
        u = tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0)
        ub = u.to(DTYPE)
        end = (unit * T + n * 16 + rows - 1) * H + head
        at_end = (unit * blocks + n) * H + head
        a_end, b_end, c_end, e_first, e_end = _ends(a, b, c, e0, e, end, at_end, token, there, GATED, FILTER)
        write = u * c_end
        if ROWS:
            sums, rate = _logs(g, at, there, d, D), _get(r, at, there, d, D).to(tl.float32)
            left = _column(sums, token, 15)[:, None]
            write = u * rate * tl.exp(left - sums)
        wb = write.to(DTYPE)
        dkt, du = _block(dks + block, d, token, D), _block(dus + block, d, token, D)
        through, held = tl.zeros([BD, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
        dc_end, de_end = tl.zeros([16], tl.float32), tl.zeros([16], tl.float32)
        da_end, db_end, de_first = 0.0, 0.0, 0.0
        left_rows = tl.zeros([BD], tl.float32)
        for i in range(0, F, BF):
            y2, y1 = _load(rooms2 + to, i + f, d, F, D), _load(rooms1 + to, d, i + f, D, F)
            e2, e1 = _load(dw2 + base, i + f, d, F, D), _load(dw1 + base, d, i + f, D, F)
            g2, g1 = e2.to(DTYPE), e1.to(DTYPE)
            if ROWS:
                left_rows += tl.sum(e1 * y1.to(tl.float32), 1)
            if GATED:
                da_end += tl.sum(tl.sum(e2 * y2.to(tl.float32), 1), 0)
                if not ROWS:
                    da_end += tl.sum(tl.sum(e1 * y1.to(tl.float32), 1), 0)
            h, slope, bend = bent(_dot(y2, kt, PRECISION))
            hb = h.to(DTYPE)
            fell = _dot(tl.trans(y1), ub, PRECISION)
            p = fell * slope
            ahead = _dot(g2, kt, PRECISION)
            dp = _units(dps + units, i + f, token, F) + ahead * c_end
            dc_end += tl.sum(p * ahead, 0)
            dkt += _dot(tl.trans(g2), (p * c_end).to(DTYPE), PRECISION)
            through += _dot(g1, hb, PRECISION)
            dh = _units(dhs + units, i + f, token, F) + _dot(tl.trans(g1), wb, PRECISION)
            if FILTER:
                z2 = _load(rooms4 + to, i + f, d, F, D).to(tl.float32)
                z1 = _load(rooms3 + to, d, i + f, D, F).to(tl.float32)
                k2, k1 = _load(dm2 + base, i + f, d, F, D), _load(dm1 + base, d, i + f, D, F)
                db_end += tl.sum(tl.sum(e2 * z2, 1), 0) + tl.sum(tl.sum(e1 * z1, 1), 0)
                de_first += tl.sum(tl.sum(k2 * z2, 1), 0) + tl.sum(tl.sum(k1 * z1, 1), 0)
                t2, t1 = k2.to(DTYPE), k1.to(DTYPE)
                ahead = _dot(t2, kt, PRECISION)
                dp += ahead * e_end
                de_end += tl.sum(p * ahead, 0)
                dkt += _dot(tl.trans(t2), (p * e_end).to(DTYPE), PRECISION)
                held += _dot(t1, hb, PRECISION)
                dh += _dot(tl.trans(t1), (u * e_end).to(DTYPE), PRECISION)
            slopes = (dp * slope).to(DTYPE)
            du += _dot(y1, slopes, PRECISION)
            _put_units(dps + units, slopes, i + f, token, F)
            _put_units(dhs + units, dh, i + f, token, F)
            _put_units(dzs + units, dp * fell * bend, i + f, token, F)
        if ROWS:
            dwrite = _block(dwrites + block, d, token, D) + through * tl.exp(left - sums)
            dlog = through * write
            dsums = _block(dlogs + block, d, token, D) - dlog
            through_end = tl.sum(dlog, 1)[:, None] + tl.exp(left) * left_rows[:, None]
            dsums += tl.where((token == 15)[None, :], through_end, 0.0)
            _put(dr, dwrite * u, at, there, d, D)
            logs = _get(g, at, there, d, D).to(tl.float32)
            _put(dg, tl.where(logs < -100.0, 0.0, tl.cumsum(dsums, 1, reverse=True)), at, there, d, D)
            du += dwrite * rate
        else:
            du += through * c_end
            dc_end += tl.sum(u * through, 0)
        if FILTER:
            du += held * e_end
            de_end += tl.sum(u * held, 0)
            tl.store(db + end, tl.load(db + end) + db_end)
            tl.store(de0 + at_end, de_first)
            tl.store(de + at_end * 16 + token, de_end)
        if GATED:
            tl.store(da + end, tl.load(da + end) + da_end)
        row = dc + end * 16 + token
        tl.store(row, tl.load(row) + dc_end)
        _put(asked, du, at, there, d, D)
        dy = tl.where(inside & there[None, :], _ask(y, du, given, inside, True), 0.0).to(DTYPE)
        qt, got = _get(q, at, there, d, D), _get(do, at, there, d, D)
        a_t, b_t = line(a, at, there, GATED), line(b, at, there, FILTER)
        late = (got * a_t[None, :]).to(DTYPE)
        if ROWS:
            late = (got * tl.exp(sums)).to(DTYPE)
        qb, kb = tl.trans(qt), tl.trans(kt)
        tl.debug_barrier()
        for i in range(0, F, BF):
            y2, y1 = _load(rooms2 + to, i + f, d, F, D), _load(rooms1 + to, d, i + f, D, F)
            h, slope, _ = bent(_dot(y2, kt, PRECISION))
            hb = tl.trans(h.to(DTYPE))
            dh = _units(dhs + units, i + f, token, F) + _dot(tl.trans(y1), dy, PRECISION)
            dz = (_units(dzs + units, i + f, token, F) + dh * slope).to(DTYPE)
            dkt += _dot(tl.trans(y2), dz, PRECISION)
            mb, slopes = tl.trans(_units(ms + units, i + f, token, F)), _units(dps + units, i + f, token, F).to(DTYPE)
            dn = _units(dns + units, i + f, token, F).to(tl.float32)
            e2, e1 = _load(dw2 + base, i + f, d, F, D), _load(dw1 + base, d, i + f, D, F)
            now2 = _dot(dz, kb, PRECISION)
            now2 += _dot((dn * a_t[None, :]).to(DTYPE), qb, PRECISION)
            now1 = _dot(dy, hb, PRECISION)
            now1 += _dot(late, mb, PRECISION)
            now1 += _dot(ub, tl.trans(slopes), PRECISION)
            if FILTER:
                k2 = e_first * _load(dm2 + base, i + f, d, F, D) + b_end * e2
                k1 = e_first * _load(dm1 + base, d, i + f, D, F) + b_end * e1
                k2 += _dot((dn * b_t[None, :]).to(DTYPE), qb, PRECISION)
                k1 += _dot((got * b_t[None, :]).to(DTYPE), mb, PRECISION)
                _store(dm2 + base, k2, i + f, d, F, D)
                _store(dm1 + base, k1, d, i + f, D, F)
            now2 += a_end * e2
            if ROWS:
                now1 += tl.exp(left) * e1
            else:
                now1 += a_end * e1
            if n == blocks - 1:  # whose first state is the anchor that is shown
                now1 += _load(before1 + base, d, i + f, D, F)
                now2 += _load(before2 + base, i + f, d, F, D)
            _store(dw1 + base, now1, d, i + f, D, F)
            _store(dw2 + base, now2, i + f, d, F, D)
        _put(dk, dkt, at, there, d, D)
        tl.debug_barrier()  # what is written here is read in the next turn
