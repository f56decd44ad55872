"""Kernels of a memory y = W1 gelu(W2 x) whose gradients are those at the first state of a block of 16 tokens.

With z = W2 k, h = gelu(z), u = rho(W1 h) (of `response`: minus the gradient in W1 h, gates and rates apart) and
p = gelu'(z) * (W1^T u), all of the block's first state and known at once, the states of its tokens are
    W2_t = a_t W2 + b_t M2 + sum_{s <= t} c_ts p_s k_s^T,    W1_t = a_t W1 + b_t M1 + sum_{s <= t} c_ts u_s h_s^T
with numbers a, b and c of gates and rates, M what a filter holds (FILTER), which is e0 M + sum_s e_s p_s k_s^T at the
end. ROWS: a_t and c_ts of W1 are of its rows, e^{G_t} and e^{G_t - G_s} r_s, G the sums of the logs g of the block.
What queries read,
    n = a W2 q + b M2 q + P (c * K Q^T),   m = gelu(n),   o = a W1 m + b M1 m + U (c * H^T m),
never forms a state. Matrices are (rows, keys) and stand in memory in float32, a tile of hidden units on chip at a time.

Backwards, with E and N the derivatives in the last W and M, and D do: hidden units are gone through twice, first for
all that comes from behind, so that what u is asked for is known,
    dm = a W1^T do + b M1^T do + H (c * U^T do),   dn = gelu'(n) dm,   dp = dn (c * K Q^T)^T + c_last E2 K + e N2 K,
    du = do (c * H^T m)^T + c_last E1 H + e N1 H + W1 (gelu'(z) dp),
and then for dy = rho'(y)^T du, which is what W1 and h are asked for. States of a block come from `states`.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import floored
from axes.kernels.substitution.response import inputs, respond, turned  # replaced

_OPEN = ["T", "H", "first", "last"]


@triton.jit
def _ask(x, y, given, inside, BACK: tl.constexpr):
    """u of the tokens of a block (BD, 16), or what their x is asked for by y (BACK)."""
    COUNT: tl.constexpr = len(given)
    k2 = tl.sum(x * 0.0, 0)[None, :]
    if BACK:
        made = turned(
            x, k2, y, given[0], given[1 % COUNT], given[2 % COUNT], given[3 % COUNT], given[4 % COUNT],
            given[5 % COUNT], given[6 % COUNT], given[7 % COUNT], inside,
        )  # fmt: skip
    else:
        made = respond(
            x, k2, given[0], given[1 % COUNT], given[2 % COUNT], given[3 % COUNT], given[4 % COUNT],
            given[5 % COUNT], given[6 % COUNT], given[7 % COUNT], inside,
        )  # fmt: skip
    return made


@triton.jit
def _normal(z):
    """The distribution and the density of a normal number."""
    return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476), tl.exp(-0.5 * z * z) * 0.3989422804014327


@triton.jit
def _gelu(z):
    below, density = _normal(z)
    return z * below, below + z * density


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
def _line(ptr, at, there, GATED: tl.constexpr):
    """a of the tokens of a block; 1 where nothing is forgotten."""
    if GATED:
        made = tl.load(ptr + at, mask=there, other=0.0)
    else:
        made = tl.where(there, 1.0, 0.0)
    return made


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
def _times(u, dots, c, sums, rate, token, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr):
    """sum_s c_ts u_s dots_st of every token t, (BD, 16)."""
    if ROWS:
        made = tl.zeros_like(u)
        for s in range(16):
            kept = tl.where((token >= s)[None, :], sums - _column(sums, token, s)[:, None], float("-inf"))
            made += tl.exp(kept) * _column(u * rate, token, s)[:, None] * _row(dots, token, s)[None, :]
    else:
        made = tl.dot(u.to(DTYPE), (c * dots).to(DTYPE), input_precision=PRECISION)
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


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def forward(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, e0, e, g, r,
    from1, from2, held1, held2, into1, into2, kept1, kept2, o, seen, met, T, H, first, last, room,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, FILTER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last` of every sequence and head, from states `from` (and `held` of the filter) into `into`
    (and `kept`), which move on by `room` numbers a block.

    READ: what queries read of W1 m, and what backwards wants, W1 h and H^T m; else W1 h is known, and states alone are
    made."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit = pid % H, pid // H
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = tl.arange(0, BF)
    inside = (d < D)[:, None]
    base = pid * (D * F)
    for n in range(first, last):
        rows = tl.minimum(T - n * 16, 16)
        there = token < rows
        at = (unit * T + n * 16 + token) * H + head
        to = base + (n - first) * room
        w1, w2, m1, m2 = into1 + to - room, into2 + to - room, kept1 + to - room, kept2 + to - room
        if n == first:
            w1, w2, m1, m2 = from1 + base, from2 + base, held1 + base, held2 + base
        kt = _get(k, at, there, d, D)
        kb = tl.trans(kt)
        if READ:
            y = tl.zeros([BD, 16], tl.float32)
            for i in range(0, F, BF):
                z = tl.dot(_load(w2, i + f, d, F, D).to(DTYPE), kt, input_precision=PRECISION)
                h, _ = _gelu(z)
                y += tl.dot(_load(w1, d, i + f, D, F).to(DTYPE), h.to(DTYPE), input_precision=PRECISION)
            _put(seen, y, at, there, d, D)
        else:
            y = _get(seen, at, there, d, D)
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
        else:
            sums, rate = u, u
        ub = u.to(DTYPE)
        if READ:
            qt = _get(q, at, there, d, D)
            c_st, a_t, b_t = _pairs(c, at, there, token), _line(a, at, there, GATED), _line(b, at, there, FILTER)
            pairs = (tl.dot(kb, qt, input_precision=PRECISION) * c_st).to(DTYPE)
            read, more = tl.zeros([BD, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
            dots = tl.zeros([16, 16], tl.float32)
        for i in range(0, F, BF):
            x2, x1 = _load(w2, i + f, d, F, D), _load(w1, d, i + f, D, F)
            y2, y1 = x2.to(DTYPE), x1.to(DTYPE)
            h, slope = _gelu(tl.dot(y2, kt, input_precision=PRECISION))
            hb = tl.trans(h.to(DTYPE))
            p = tl.dot(tl.trans(y1), ub, input_precision=PRECISION) * slope
            if FILTER:
                z2, z1 = _load(m2, i + f, d, F, D), _load(m1, d, i + f, D, F)
            if READ:
                asked = tl.dot(y2, qt, input_precision=PRECISION) * a_t[None, :]
                if FILTER:
                    asked += tl.dot(z2.to(DTYPE), qt, input_precision=PRECISION) * b_t[None, :]
                asked += tl.dot(p.to(DTYPE), pairs, input_precision=PRECISION)
                m, _ = _gelu(asked)
                mb = m.to(DTYPE)
                read += tl.dot(y1, mb, input_precision=PRECISION)
                dots += tl.dot(hb, mb, input_precision=PRECISION)
                if FILTER:
                    more += tl.dot(z1.to(DTYPE), mb, input_precision=PRECISION)
            now2 = a_end * x2 + tl.dot((p * c_end).to(DTYPE), kb, input_precision=PRECISION)
            now1 = tl.dot(write.to(DTYPE), hb, input_precision=PRECISION)
            if ROWS:
                now1 += tl.exp(left) * x1
            else:
                now1 += a_end * x1
            if FILTER:
                now2 += b_end * z2
                now1 += b_end * z1
                held = e_first * z2 + tl.dot((p * e_end).to(DTYPE), kb, input_precision=PRECISION)
                _store(kept2 + to, held, i + f, d, F, D)
                held = e_first * z1 + tl.dot((u * e_end).to(DTYPE), hb, input_precision=PRECISION)
                _store(kept1 + to, held, d, i + f, D, F)
            _store(into2 + to, now2, i + f, d, F, D)
            _store(into1 + to, now1, d, i + f, D, F)
        if READ:
            if ROWS:
                read *= tl.exp(sums)
            else:
                read *= a_t[None, :]
            if FILTER:
                read += more * b_t[None, :]
            read += _times(u, dots, c_st, sums, rate, token, DTYPE, PRECISION, ROWS)
            _put(o, read, at, there, d, D)
            tl.store(met + at[None, :] * 16 + token[:, None], dots, mask=there[None, :])
        tl.debug_barrier()  # what is written here is read in the next turn


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def backward(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, e0, e, g, r,
    from1, from2, held1, held2, rooms1, rooms2, rooms3, rooms4, seen, met, do, dbefore1, dbefore2,
    dw1, dw2, dm1, dm2, dh, dz, asked, dq, dk, da, db, dc, de0, de, dg, dr, T, H, first, last, room,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr, FILTER: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks from `last` - 1 to `first`: derivatives in dw (and dm) move from the state after them to that before.

    States are `from` and `held`, and of later blocks `rooms`; asked: what u is asked for; dh, dz: (heads, F, 16) of
    this program's own."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit = pid % H, pid // H
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = tl.arange(0, BF)
    inside = (d < D)[:, None]
    base, own = pid * (D * F), pid * (F * 16)
    blocks = tl.cdiv(T, 16)
    for back in range(first, last):
        n = first + last - 1 - back
        rows = tl.minimum(T - n * 16, 16)
        there = token < rows
        at = (unit * T + n * 16 + token) * H + head
        to = base + (n - first - 1) * room
        w1, w2, m1, m2 = rooms1 + to, rooms2 + to, rooms3 + to, rooms4 + to
        if n == first:
            w1, w2, m1, m2 = from1 + base, from2 + base, held1 + base, held2 + base
        kt, qt = _get(k, at, there, d, D), _get(q, at, there, d, D)
        kb, qb = tl.trans(kt), tl.trans(qt)
        y = _get(seen, at, there, d, D)
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
        u = tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0)
        ub = u.to(DTYPE)
        end = (unit * T + n * 16 + rows - 1) * H + head
        at_end = (unit * blocks + n) * H + head
        a_end, b_end, c_end, e_first, e_end = _ends(a, b, c, e0, e, end, at_end, token, there, GATED, FILTER)
        c_st, a_t, b_t = _pairs(c, at, there, token), _line(a, at, there, GATED), _line(b, at, there, FILTER)
        dots = _pairs(met, at, there, token)
        got = _get(do, at, there, d, D)
        gb = got.to(DTYPE)
        write, late = u * c_end, (got * a_t[None, :]).to(DTYPE)
        if ROWS:
            sums, rate = _logs(g, at, there, d, D), _get(r, at, there, d, D).to(tl.float32)
            left = _column(sums, token, 15)[:, None]
            write = u * rate * tl.exp(left - sums)
            late = (got * tl.exp(sums)).to(DTYPE)
            ddots, du = tl.zeros([16, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
            dsums = tl.zeros([BD, 16], tl.float32)
            for s in range(16):
                kept = tl.where((token >= s)[None, :], sums - _column(sums, token, s)[:, None], float("-inf"))
                kept = tl.exp(kept) * got
                ones = _column(u * rate, token, s)
                ddots = tl.where((token == s)[:, None], tl.sum(kept * ones[:, None], 0)[None, :], ddots)
                kept *= _row(dots, token, s)[None, :]
                mine = tl.sum(kept, 1)
                du = tl.where((token == s)[None, :], mine[:, None], du)
                dsums += kept * ones[:, None] - tl.where((token == s)[None, :], (mine * ones)[:, None], 0.0)
            dwrite = du  # of u times its rates
            du = tl.zeros([BD, 16], tl.float32)
            dc_st = tl.zeros([16, 16], tl.float32)
        else:
            ddots = tl.dot(tl.trans(ub), gb, input_precision=PRECISION)
            dc_st = dots * ddots
            ddots *= c_st
            du = tl.dot(gb, tl.trans((c_st * dots).to(DTYPE)), input_precision=PRECISION)
        wb = write.to(DTYPE)
        both = ddots.to(DTYPE)
        alike = tl.dot(kb, qt, input_precision=PRECISION)
        pairs = (alike * c_st).to(DTYPE)
        dpairs = tl.zeros([16, 16], tl.float32)
        dqt, dkt = tl.zeros([BD, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
        through, held = tl.zeros([BD, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
        read, more = tl.zeros([BD, 16], tl.float32), tl.zeros([BD, 16], tl.float32)
        da_t, db_t = tl.zeros([16], tl.float32), tl.zeros([16], tl.float32)
        dc_end, de_end = tl.zeros([16], tl.float32), tl.zeros([16], tl.float32)
        da_end, db_end, de_first = 0.0, 0.0, 0.0
        left_rows = tl.zeros([BD], tl.float32)
        for i in range(0, F, BF):
            x2, x1 = _load(w2, i + f, d, F, D), _load(w1, d, i + f, D, F)
            y2, y1 = x2.to(DTYPE), x1.to(DTYPE)
            e2, e1 = _load(dw2 + base, i + f, d, F, D), _load(dw1 + base, d, i + f, D, F)
            g2, g1 = e2.to(DTYPE), e1.to(DTYPE)
            z = tl.dot(y2, kt, input_precision=PRECISION)
            h, slope = _gelu(z)
            _, density = _normal(z)
            hb = h.to(DTYPE)
            fell = tl.dot(tl.trans(y1), ub, input_precision=PRECISION)
            p = fell * slope
            pb = p.to(DTYPE)
            reads = tl.dot(y2, qt, input_precision=PRECISION)
            n_t = reads * a_t[None, :] + tl.dot(pb, pairs, input_precision=PRECISION)
            if FILTER:
                z2, z1 = _load(m2, i + f, d, F, D), _load(m1, d, i + f, D, F)
                held_t = tl.dot(z2.to(DTYPE), qt, input_precision=PRECISION)
                n_t += held_t * b_t[None, :]
            m, slope_m = _gelu(n_t)
            mb = m.to(DTYPE)
            # what is read
            dm_t = tl.dot(hb, both, input_precision=PRECISION) + tl.dot(tl.trans(y1), late, input_precision=PRECISION)
            if GATED or ROWS:
                read += tl.dot(y1, mb, input_precision=PRECISION)
            if FILTER:
                later = (got * b_t[None, :]).to(DTYPE)
                dm_t += tl.dot(tl.trans(z1.to(DTYPE)), later, input_precision=PRECISION)
                more += tl.dot(z1.to(DTYPE), mb, input_precision=PRECISION)
            dn = dm_t * slope_m
            dnb, dna = dn.to(DTYPE), (dn * a_t[None, :]).to(DTYPE)
            dh_s = tl.dot(mb, tl.trans(both), input_precision=PRECISION)
            dqt += tl.dot(tl.trans(y2), dna, input_precision=PRECISION)
            if GATED:
                da_t += tl.sum(dn * reads, 0)
            if FILTER:
                dnm = (dn * b_t[None, :]).to(DTYPE)
                dqt += tl.dot(tl.trans(z2.to(DTYPE)), dnm, input_precision=PRECISION)
                db_t += tl.sum(dn * held_t, 0)
            dp = tl.dot(dnb, tl.trans(pairs), input_precision=PRECISION)
            dpairs += tl.dot(tl.trans(pb), dnb, input_precision=PRECISION)
            # what is left behind
            ahead = tl.dot(g2, kt, input_precision=PRECISION)
            dp += ahead * c_end
            dc_end += tl.sum(p * ahead, 0)
            dkt += tl.dot(tl.trans(g2), (p * c_end).to(DTYPE), input_precision=PRECISION)
            through += tl.dot(g1, hb, input_precision=PRECISION)
            dh_s += tl.dot(tl.trans(g1), wb, input_precision=PRECISION)
            now2 = a_end * e2 + tl.dot(dna, qb, input_precision=PRECISION)
            now1 = tl.dot(late, tl.trans(mb), input_precision=PRECISION)
            if ROWS:
                now1 += tl.exp(left) * e1
                left_rows += tl.sum(e1 * x1, 1)
                da_end += tl.sum(tl.sum(e2 * x2, 1), 0)
            else:
                now1 += a_end * e1
                if GATED:
                    da_end += tl.sum(tl.sum(e2 * x2, 1), 0) + tl.sum(tl.sum(e1 * x1, 1), 0)
            if FILTER:
                k2, k1 = _load(dm2 + base, i + f, d, F, D), _load(dm1 + base, d, i + f, D, F)
                t2, t1 = k2.to(DTYPE), k1.to(DTYPE)
                ahead = tl.dot(t2, kt, input_precision=PRECISION)
                dp += ahead * e_end
                de_end += tl.sum(p * ahead, 0)
                dkt += tl.dot(tl.trans(t2), (p * e_end).to(DTYPE), input_precision=PRECISION)
                held += tl.dot(t1, hb, input_precision=PRECISION)
                dh_s += tl.dot(tl.trans(t1), (u * e_end).to(DTYPE), input_precision=PRECISION)
                db_end += tl.sum(tl.sum(e2 * z2, 1), 0) + tl.sum(tl.sum(e1 * z1, 1), 0)
                de_first += tl.sum(tl.sum(k2 * z2, 1), 0) + tl.sum(tl.sum(k1 * z1, 1), 0)
                k2 = e_first * k2 + b_end * e2 + tl.dot(dnm, qb, input_precision=PRECISION)
                k1 = e_first * k1 + b_end * e1 + tl.dot(later, tl.trans(mb), input_precision=PRECISION)
                _store(dm2 + base, k2, i + f, d, F, D)
                _store(dm1 + base, k1, d, i + f, D, F)
            # gelu' (z) W1^T u
            slopes = (dp * slope).to(DTYPE)
            du += tl.dot(y1, slopes, input_precision=PRECISION)
            now1 += tl.dot(ub, tl.trans(slopes), input_precision=PRECISION)
            dz_s = dp * fell * density * (2.0 - z * z)
            place = own + (i + f)[:, None] * 16 + token[None, :]
            tl.store(dh + place, dh_s, mask=(i + f < F)[:, None])
            tl.store(dz + place, dz_s, mask=(i + f < F)[:, None])
            _store(dw2 + base, now2, i + f, d, F, D)
            _store(dw1 + base, now1, d, i + f, D, F)
        if ROWS:
            stays = tl.exp(left - sums)
            dwrite_end = through * stays
            dlog = through * write
            dsums += got * tl.exp(sums) * read - dlog
            through_end = tl.sum(dlog, 1)[:, None] + tl.exp(left) * left_rows[:, None]
            dsums += tl.where((token == 15)[None, :], through_end, 0.0)
            _put(dr, (dwrite + dwrite_end) * u, at, there, d, D)
            # of sums over the tokens before
            logs = _get(g, at, there, d, D).to(tl.float32)
            dlogs = tl.cumsum(dsums, 1, reverse=True)
            _put(dg, tl.where(logs < -100.0, 0.0, dlogs), at, there, d, D)
            du += (dwrite + dwrite_end) * rate
        else:
            du += through * c_end
            dc_end += tl.sum(u * through, 0)
        if FILTER:
            du += held * e_end
            de_end += tl.sum(u * held, 0)
            db_t += tl.sum(got * more, 0)
            tl.store(db + at, db_t + tl.where(token == rows - 1, db_end, 0.0), mask=there)
            tl.store(de0 + at_end, de_first)
            tl.store(de + at_end * 16 + token, de_end)
        if GATED:
            if not ROWS:
                da_t += tl.sum(got * read, 0)
            tl.store(da + at, da_t + tl.where(token == rows - 1, da_end, 0.0), mask=there)
        dc_st += dpairs * alike + tl.where(token[None, :] == rows - 1, dc_end[:, None], 0.0)
        tl.store(dc + at[None, :] * 16 + token[:, None], dc_st, mask=there[None, :])
        dpb = (dpairs * c_st).to(DTYPE)
        dqt += tl.dot(kt, dpb, input_precision=PRECISION)
        dkt += tl.dot(qt, tl.trans(dpb), input_precision=PRECISION)
        _put(asked, du, at, there, d, D)
        dy = tl.where(inside & there[None, :], _ask(y, du, given, inside, True), 0.0).to(DTYPE)
        tl.debug_barrier()
        for i in range(0, F, BF):
            y2, y1 = _load(w2, i + f, d, F, D).to(DTYPE), _load(w1, d, i + f, D, F).to(DTYPE)
            z = tl.dot(y2, kt, input_precision=PRECISION)
            h, slope = _gelu(z)
            place = own + (i + f)[:, None] * 16 + token[None, :]
            dh_s = tl.load(dh + place, mask=(i + f < F)[:, None], other=0.0)
            dz_s = tl.load(dz + place, mask=(i + f < F)[:, None], other=0.0)
            dh_s += tl.dot(tl.trans(y1), dy, input_precision=PRECISION)
            dzb = (dz_s + dh_s * slope).to(DTYPE)
            dkt += tl.dot(tl.trans(y2), dzb, input_precision=PRECISION)
            now1 = tl.dot(dy, tl.trans(h.to(DTYPE)), input_precision=PRECISION) + _load(dw1 + base, d, i + f, D, F)
            now2 = tl.dot(dzb, kb, input_precision=PRECISION) + _load(dw2 + base, i + f, d, F, D)
            if n == blocks - 1:  # whose first state is the anchor that is shown
                now1 += _load(dbefore1 + base, d, i + f, D, F)
                now2 += _load(dbefore2 + base, i + f, d, F, D)
            _store(dw1 + base, now1, d, i + f, D, F)
            _store(dw2 + base, now2, i + f, d, F, D)
        _put(dq, dqt, at, there, d, D)
        _put(dk, dkt, at, there, d, D)
        tl.debug_barrier()  # what is written here is read in the next turn
