"""Kernels of a memory of two layers whose hidden units all stand on chip: the passes of `passes` that are serial.

A warp owns some hidden units, and its part of W1 (D, units) and W2 (units, D) in registers, in float32, from block to
block: products have a leading axis of warps, and only what is summed over hidden units leaves a warp. What a filter
holds does not fit beside them, and stands in memory. The mathematics is that of `passes`.

Products of three axes, or of 16 rows, are never a warpgroup's (wgmma), which the assembler of Triton 3.6 (ptxas 12.9)
breaks: they read beyond shared memory, where the same text through ptxas 13 is right.
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
def _all(x, W: tl.constexpr):
    """A tile for every warp."""
    return tl.broadcast_to(x[None, :, :], (W, x.shape[0], x.shape[1]))


@triton.jit
def _turn(x):
    return tl.trans(x, 0, 2, 1)


@triton.jit
def _dot(x, y, P: tl.constexpr):
    return tl.dot(x, y, input_precision=P)


@triton.jit
def _flat(x):
    """Hidden units of all warps side by side, (n, F)."""
    return tl.reshape(tl.trans(x, 1, 0, 2), (x.shape[1], x.shape[0] * x.shape[2]))


@triton.jit
def _over_units(x, y, P: tl.constexpr):
    """Sums over hidden units of x (W, 16, FW) and y (W, n, FW), (16, n): one product of 16 rows, whose operands pass
    through shared memory in 16 bits, where a sum over warps would pass as often in 32."""
    return tl.dot(_flat(x), tl.trans(_flat(y)), input_precision=P)


@triton.jit
def _rows(ptr, at, there, d, D: tl.constexpr):
    """Tokens of a tensor (tokens H, D) as rows (16, BD)."""
    return tl.load(ptr + at[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _columns(ptr, at, there, d, D: tl.constexpr):
    return tl.load(ptr + at[None, :] * D + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)


@triton.jit
def _put_rows(ptr, tile, at, there, d, D: tl.constexpr):
    place = ptr + at[:, None] * D + d[None, :]
    tl.store(place, tile.to(ptr.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])


@triton.jit
def _put_units(ptr, tile, f, token, F: tl.constexpr):
    """Hidden units of a block's tokens, (W, 16, FW), in a matrix (16, F)."""
    place, tile = ptr + token[None, :, None] * F + f[:, None, :], tile.to(ptr.dtype.element_ty)
    if f.shape[0] * f.shape[1] == F:
        tl.store(place, tile)
    else:
        tl.store(place, tile, mask=(f < F)[:, None, :] & (token < 16)[None, :, None])


@triton.jit
def _units(ptr, f, token, F: tl.constexpr):
    place = ptr + token[None, :, None] * F + f[:, None, :]
    if f.shape[0] * f.shape[1] == F:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(f < F)[:, None, :] & (token < 16)[None, :, None], other=0.0)
    return tile


@triton.jit
def _block(ptr, token, d, D: tl.constexpr):
    return tl.load(ptr + token[:, None] * D + d[None, :], mask=(d < D)[None, :] & (token < 16)[:, None], other=0.0)


@triton.jit
def _put_block(ptr, tile, token, d, D: tl.constexpr):
    place = ptr + token[:, None] * D + d[None, :]
    tl.store(place, tile.to(ptr.dtype.element_ty), mask=(d < D)[None, :] & (token < 16)[:, None])


@triton.jit
def _put_columns(ptr, tile, at, there, d, D: tl.constexpr):
    place = ptr + at[None, :] * D + d[:, None]
    tl.store(place, tile.to(ptr.dtype.element_ty), mask=there[None, :] & (d < D)[:, None])


@triton.jit
def _units_of(W: tl.constexpr, FW: tl.constexpr):
    return tl.arange(0, W)[:, None] * FW + tl.arange(0, FW)[None, :]


@triton.jit
def _get1(ptr, f, d, D: tl.constexpr, F: tl.constexpr):
    """Of W1 (D, F) the tile (W, BD, FW)."""
    place = ptr + d[None, :, None] * F + f[:, None, :]
    if d.shape[0] == D and f.shape[0] * f.shape[1] == F:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(d < D)[None, :, None] & (f < F)[:, None, :], other=0.0)
    return tile


@triton.jit
def _put1(ptr, tile, f, d, D: tl.constexpr, F: tl.constexpr):
    place = ptr + d[None, :, None] * F + f[:, None, :]
    if d.shape[0] == D and f.shape[0] * f.shape[1] == F:
        tl.store(place, tile)
    else:
        tl.store(place, tile, mask=(d < D)[None, :, None] & (f < F)[:, None, :])


@triton.jit
def _get2(ptr, f, d, D: tl.constexpr, F: tl.constexpr):
    """Of W2 (F, D) the tile (W, FW, BD)."""
    place = ptr + f[:, :, None] * D + d[None, None, :]
    if d.shape[0] == D and f.shape[0] * f.shape[1] == F:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(f < F)[:, :, None] & (d < D)[None, None, :], other=0.0)
    return tile


@triton.jit
def _put2(ptr, tile, f, d, D: tl.constexpr, F: tl.constexpr):
    place = ptr + f[:, :, None] * D + d[None, None, :]
    if d.shape[0] == D and f.shape[0] * f.shape[1] == F:
        tl.store(place, tile)
    else:
        tl.store(place, tile, mask=(f < F)[:, :, None] & (d < D)[None, None, :])


@triton.jit
def _last(x, token):
    return tl.sum(tl.where(token[:, None] == 15, x, 0.0), 0)


@triton.jit
def _pairs(ptr, at, there, token):
    """Of a tensor (tokens H, 16) the rows [t, s] of a block."""
    return tl.load(ptr + at[:, None] * 16 + token[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _kept(sums, token):
    """Of rows, what is left at token t of token s, [t, s, d]."""
    late = sums[:, None, :] - sums[None, :, :]
    return tl.exp(tl.where((token[:, None] >= token[None, :])[:, :, None], late, float("-inf")))


@triton.jit
def _by_halves(dots, x, sums, token, DTYPE: tl.constexpr, P: tl.constexpr):
    """sum_s e^{G_t - G_s} x_s dots[t, s] over tokens s up to t, (16, BD): a product for halves of 8, 4, 2 and 1 tokens,
    through G between them, so that no exponent is positive."""
    same = token[:, None] == token[None, :]
    made = tl.sum(tl.where(same, dots, 0.0), 1)[:, None] * x
    for level in tl.static_range(4):
        half = token // (1 << level)
        late = half % 2 == 1
        end = tl.where(late, half, half + 1) * (1 << level) - 1  # the last token of the first half
        between = tl.gather(sums, tl.broadcast_to(end[:, None], sums.shape), 0)
        first = tl.exp(tl.where(late[:, None], float("-inf"), between - sums)) * x
        after = tl.exp(tl.where(late[:, None], sums - between, float("-inf")))
        pairs = tl.where(late[:, None] & (half[:, None] - 1 == half[None, :]), dots, 0.0)
        made += after * tl.dot(pairs.to(DTYPE), first.to(DTYPE), input_precision=P)
    return made


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def states(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, e0, e, g, r, w1, w2, m1, m2, o, seen, met, last1, last2, before1,
    before2, starts1, starts2, starts3, starts4, rooms1, rooms2, rooms3, rooms4, T, H, first, last,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, FW: tl.constexpr, W: tl.constexpr, FILTER: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr, RECORD: tl.constexpr, SEGMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last` of every sequence and head: what queries read, the last states and those before the last
    block; RECORD: states where segments begin, and H^T m. AGAIN: W1 h is known, and the states at the start of blocks
    are what is asked for."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit = pid % H, pid // H
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = _units_of(W, FW)
    inside = (d < D)[:, None]
    base = pid * (D * F)
    room = tl.num_programs(0).to(tl.int64) * (D * F)
    x1 = _get1(w1 + base, f, d, D, F)
    x2 = _get2(w2 + base, f, d, D, F)
    for n in tl.range(first, last, disable_licm=True):
        rows = tl.minimum(T - n * 16, 16)
        there = token < rows
        at = (unit * T + n * 16 + token) * H + head
        kt = _rows(k, at, there, d, D)
        k3 = _all(kt, W)
        y1, y2 = x1.to(DTYPE), x2.to(DTYPE)
        if AGAIN:
            to = base + (n - first) * room
            _put1(rooms1 + to, y1, f, d, D, F)
            _put2(rooms2 + to, y2, f, d, D, F)
            if FILTER:
                _put1(rooms3 + to, _get1(m1 + base, f, d, D, F).to(DTYPE), f, d, D, F)
                _put2(rooms4 + to, _get2(m2 + base, f, d, D, F).to(DTYPE), f, d, D, F)
        else:
            if RECORD and n % SEGMENT == 0:
                to = base + n // SEGMENT * room
                _put1(starts1 + to, x1, f, d, D, F)
                _put2(starts2 + to, x2, f, d, D, F)
                if FILTER:
                    _put1(starts3 + to, _get1(m1 + base, f, d, D, F), f, d, D, F)
                    _put2(starts4 + to, _get2(m2 + base, f, d, D, F), f, d, D, F)
            if n == last - 1:
                _put1(before1 + base, x1, f, d, D, F)
                _put2(before2 + base, x2, f, d, D, F)
        h, slope = gelu(_dot(k3, _turn(y2), PRECISION))
        hb = h.to(DTYPE)
        if AGAIN:
            y = _columns(seen, at, there, d, D)
        else:
            y = tl.trans(_over_units(hb, y1, PRECISION))
            if RECORD:
                _put_columns(seen, y, at, there, d, D)
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
        u = tl.trans(tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0))
        end = (unit * T + n * 16 + rows - 1) * H + head
        c_end, a_end = tl.load(c + end * 16 + token, mask=there, other=0.0), 1.0
        if GATED:
            a_end = tl.load(a + end)
        write = u * c_end[:, None]
        if ROWS:
            rate = _rows(r, at, there, d, D).to(tl.float32)
            sums = tl.cumsum(floored(_rows(g, at, there, d, D).to(tl.float32)), 0)
            left = _last(sums, token)
            write = u * rate * tl.exp(left[None, :] - sums)
        ub = u.to(DTYPE)
        p = _dot(_all(ub, W), y1, PRECISION) * slope
        if not AGAIN:
            qt = _rows(q, at, there, d, D)
            a_t = line(a, at, there, GATED)
            c_ts = _pairs(c, at, there, token)
            pairs = _dot(qt, tl.trans(kt), PRECISION) * c_ts
            asked = _dot(_all(qt, W), _turn(y2), PRECISION) * a_t[None, :, None]
            asked += _dot(_all(pairs.to(DTYPE), W), p.to(DTYPE), PRECISION)
            if FILTER:
                b_t = tl.load(b + at, mask=there, other=0.0)
                z2 = _get2(m2 + base, f, d, D, F).to(DTYPE)
                asked += _dot(_all(qt, W), _turn(z2), PRECISION) * b_t[None, :, None]
            m, _ = gelu(asked)
            mb = m.to(DTYPE)
            read = _over_units(mb, y1, PRECISION)
            dots = _over_units(mb, hb, PRECISION)
            if ROWS:
                read = read * tl.exp(sums) + _by_halves(dots, u * rate, sums, token, DTYPE, PRECISION)
            else:
                read = read * a_t[:, None] + _dot((c_ts * dots).to(DTYPE), ub, PRECISION)
            if FILTER:
                more = _over_units(mb, _get1(m1 + base, f, d, D, F).to(DTYPE), PRECISION)
                read += more * b_t[:, None]
            _put_rows(o, read, at, there, d, D)
            if RECORD:
                tl.store(met + at[:, None] * 16 + token[None, :], dots, mask=there[:, None])
        if ROWS:
            x1 = tl.exp(left)[None, :, None] * x1
        else:
            x1 = a_end * x1
        x2 = a_end * x2
        if FILTER:
            b_end, e_first = tl.load(b + end), tl.load(e0 + (unit * tl.cdiv(T, 16) + n) * H + head)
            e_end = tl.load(e + ((unit * tl.cdiv(T, 16) + n) * H + head) * 16 + token)
            z1 = _get1(m1 + base, f, d, D, F)
            x1 += b_end * z1
            z1 = e_first * z1 + _dot(_turn(_all((u * e_end[:, None]).to(DTYPE), W)), hb, PRECISION)
            z2 = _get2(m2 + base, f, d, D, F)
            x2 += b_end * z2
            z2 = e_first * z2 + _dot(_turn((p * e_end[None, :, None]).to(DTYPE)), k3, PRECISION)
            tl.debug_barrier()  # all of a tile is read where others write it
            _put1(m1 + base, z1, f, d, D, F)
            _put2(m2 + base, z2, f, d, D, F)
            tl.debug_barrier()
        x1 += _dot(_turn(_all(write.to(DTYPE), W)), hb, PRECISION)
        x2 += _dot(_turn((p * c_end[None, :, None]).to(DTYPE)), k3, PRECISION)
    if not AGAIN:
        _put1(last1 + base, x1, f, d, D, F)
        _put2(last2 + base, x2, f, d, D, F)


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def reads_back(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, g, r, rooms1, rooms2, rooms3, rooms4, seen, met, do, hs, slopes,
    bends, ps, ms, dns, alikes, boths, dus, dks, dwrites, dlogs, dq, da, db, dc, T, H, U, first,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, FW: tl.constexpr, W: tl.constexpr, FILTER: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Derivatives of what the queries of a block read: dq, those in a, b and c, and for `reverse` m, dn, the pairs that
    lead from them to h and p, and the parts in u and k (ROWS: in u with its rates and in sums of logs); beside them h,
    p and slopes of gelu, which a serial pass had better find than make."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit, n = pid % H, pid // H % U, first + pid // (H * U)
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = _units_of(W, FW)
    inside = (d < D)[:, None]
    to, units, block = pid * (D * F), pid * (F * 16), pid * (D * 16)
    there = token < T - n * 16
    at = (unit * T + n * 16 + token) * H + head
    kt, qt = _rows(k, at, there, d, D), _rows(q, at, there, d, D)
    y = _columns(seen, at, there, d, D)
    given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
    u = tl.trans(tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0))
    ub = u.to(DTYPE)
    c_ts, a_t = _pairs(c, at, there, token), line(a, at, there, GATED)
    dots, got = _pairs(met, at, there, token), _rows(do, at, there, d, D)
    if ROWS:
        sums = tl.cumsum(floored(_rows(g, at, there, d, D).to(tl.float32)), 0)
        ones = u * _rows(r, at, there, d, D).to(tl.float32)
        late = (got * tl.exp(sums)).to(DTYPE)
        kept = _kept(sums, token) * got[:, None, :]
        both = tl.sum(kept * ones[None, :, :], 2)
        kept *= dots[:, :, None]
        dwrite = tl.sum(kept, 0)
        dsums = tl.sum(kept * ones[None, :, :], 1) - dwrite * ones
        _put_block(dwrites + block, dwrite, token, d, D)
        dc_ts = both * 0.0
    else:
        gb, late = got.to(DTYPE), (got * a_t[:, None]).to(DTYPE)
        both = _dot(gb, tl.trans(ub), PRECISION)
        dc_ts = dots * both
        both *= c_ts
        _put_block(dus + block, _dot(tl.trans((c_ts * dots).to(DTYPE)), gb, PRECISION), token, d, D)
    alike = _dot(qt, tl.trans(kt), PRECISION)
    pairs = (alike * c_ts).to(DTYPE)
    bothb = both.to(DTYPE)
    square = pid * 256 + token[:, None] * 16 + token[None, :]
    tl.store(alikes + square, pairs)
    tl.store(boths + square, bothb)
    y1 = _get1(rooms1 + to, f, d, D, F)
    y2 = _get2(rooms2 + to, f, d, D, F)
    h, slope, bend = bent(_dot(_all(kt, W), _turn(y2), PRECISION))
    hb = h.to(DTYPE)
    fell = _dot(_all(ub, W), y1, PRECISION)
    pb = (fell * slope).to(DTYPE)
    _put_units(hs + units, hb, f, token, F)
    _put_units(slopes + units, slope, f, token, F)
    _put_units(bends + units, fell * bend, f, token, F)
    _put_units(ps + units, pb, f, token, F)
    plain = _dot(_all(qt, W), _turn(y2), PRECISION)
    heard = plain * a_t[None, :, None] + _dot(_all(pairs, W), pb, PRECISION)
    if FILTER:
        b_t = tl.load(b + at, mask=there, other=0.0)
        z1, z2 = _get1(rooms3 + to, f, d, D, F), _get2(rooms4 + to, f, d, D, F)
        of_filter = _dot(_all(qt, W), _turn(z2), PRECISION)
        heard += of_filter * b_t[None, :, None]
    m, slope_m = gelu(heard)
    mb = m.to(DTYPE)
    _put_units(ms + units, mb, f, token, F)
    dm = _dot(_all(bothb, W), hb, PRECISION) + _dot(_all(late, W), y1, PRECISION)
    if FILTER:
        dm += _dot(_all((got * b_t[:, None]).to(DTYPE), W), z1, PRECISION)
    dn = dm * slope_m
    dnb = dn.to(DTYPE)
    _put_units(dns + units, dnb, f, token, F)
    dpairs = _over_units(dnb, pb, PRECISION)
    dqt = _over_units((dn * a_t[None, :, None]).to(DTYPE), _turn(y2), PRECISION)
    if FILTER:
        dqt += _over_units((dn * b_t[None, :, None]).to(DTYPE), _turn(z2), PRECISION)
        more = _over_units(mb, z1, PRECISION)
        db_t = tl.sum(tl.sum(dn * of_filter, 2), 0) + tl.sum(got * more, 1)
        tl.store(db + at, db_t, mask=there)
    if GATED or ROWS:
        read = _over_units(mb, y1, PRECISION)
    if GATED:
        da_t = tl.sum(tl.sum(dn * plain, 2), 0)
        if not ROWS:
            da_t += tl.sum(got * read, 1)
        tl.store(da + at, da_t, mask=there)
    if ROWS:
        _put_block(dlogs + block, dsums + got * tl.exp(sums) * read, token, d, D)
    tl.store(dc + at[:, None] * 16 + token[None, :], dc_ts + dpairs * alike, mask=there[:, None])
    dpb = (dpairs * c_ts).to(DTYPE)
    _put_rows(dq, dqt + _dot(dpb, kt, PRECISION), at, there, d, D)
    _put_block(dks + block, _dot(tl.trans(dpb), qt, PRECISION), token, d, D)


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def reverse(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, e0, e, g, r, rooms1, rooms2, rooms3, rooms4, seen, do, before1,
    before2, hs, slopes, bends, ps, ms, dns, alikes, boths, dus, dks, dwrites, dlogs, dw1, dw2, dm1, dm2, asked, dk, da,
    db, dc, de0, de, dg, dr, T, H, first, last,
    D: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, FW: tl.constexpr, W: tl.constexpr, FILTER: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks from `last` - 1 to `first`: derivatives in W move, in their place, from the state after them to that
    before. asked: what u is asked for; before: of the last block's first W, which is shown."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit = pid % H, pid // H
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, BD)
    token = tl.arange(0, 16)
    f = _units_of(W, FW)
    inside = (d < D)[:, None]
    base = pid * (D * F)
    blocks = tl.cdiv(T, 16)
    e1 = _get1(dw1 + base, f, d, D, F)
    e2 = _get2(dw2 + base, f, d, D, F)
    for back in tl.range(first, last, disable_licm=True):
        n = first + last - 1 - back
        rows = tl.minimum(T - n * 16, 16)
        there = token < rows
        at = (unit * T + n * 16 + token) * H + head
        place = pid + (n - first) * tl.num_programs(0).to(tl.int64)
        to, units, block = place * (D * F), place * (F * 16), place * (D * 16)
        square = place * 256 + token[:, None] * 16 + token[None, :]
        kt, qt = _rows(k, at, there, d, D), _rows(q, at, there, d, D)
        y = _columns(seen, at, there, d, D)
        given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
        u = tl.trans(tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0))
        ub = u.to(DTYPE)
        end = (unit * T + n * 16 + rows - 1) * H + head
        c_end, a_end = tl.load(c + end * 16 + token, mask=there, other=0.0), 1.0
        if GATED:
            a_end = tl.load(a + end)
        write = u * c_end[:, None]
        if ROWS:
            rate = _rows(r, at, there, d, D).to(tl.float32)
            sums = tl.cumsum(floored(_rows(g, at, there, d, D).to(tl.float32)), 0)
            left = _last(sums, token)
            closed = tl.exp(left[None, :] - sums)
            write = u * rate * closed
        if GATED or ROWS:
            of_rows = tl.sum(tl.sum(e1 * _get1(rooms1 + to, f, d, D, F).to(tl.float32), 2), 0)
        if GATED:
            da_end = tl.sum(e2 * _get2(rooms2 + to, f, d, D, F).to(tl.float32))
            if not ROWS:
                da_end += tl.sum(of_rows)
            tl.store(da + end, tl.load(da + end) + da_end)
        g1, g2 = e1.to(DTYPE), e2.to(DTYPE)
        k3 = _all(kt, W)
        p = _units(ps + units, f, token, F).to(tl.float32)
        ahead = _dot(k3, _turn(g2), PRECISION)
        dc_end = tl.sum(tl.sum(p * ahead, 2), 0)
        dkt = _over_units((p * c_end[None, :, None]).to(DTYPE), _turn(g2), PRECISION)
        dkt += _block(dks + block, token, d, D)
        dp = _dot(_turn(_all(tl.load(alikes + square), W)), _units(dns + units, f, token, F), PRECISION)
        dp += ahead * c_end[None, :, None]
        if FILTER:
            at_end = (unit * blocks + n) * H + head
            b_end, e_first = tl.load(b + end), tl.load(e0 + at_end)
            e_end = tl.load(e + at_end * 16 + token)
            z2, k2 = _get2(rooms4 + to, f, d, D, F).to(tl.float32), _get2(dm2 + base, f, d, D, F)
            db_end, de_first = tl.sum(e2 * z2), tl.sum(k2 * z2)
            t2 = k2.to(DTYPE)
            ahead = _dot(k3, _turn(t2), PRECISION)
            dp += ahead * e_end[None, :, None]
            de_end = tl.sum(tl.sum(p * ahead, 2), 0)
            dkt += _over_units((p * e_end[None, :, None]).to(DTYPE), _turn(t2), PRECISION)
        change = (dp * _units(slopes + units, f, token, F).to(tl.float32)).to(DTYPE)
        dz = dp * _units(bends + units, f, token, F).to(tl.float32)
        through = _over_units(_units(hs + units, f, token, F), g1, PRECISION)
        dh = _dot(_all(write.to(DTYPE), W), g1, PRECISION)
        dh += _dot(_turn(_all(tl.load(boths + square), W)), _units(ms + units, f, token, F), PRECISION)
        if FILTER:
            z1, k1 = _get1(rooms3 + to, f, d, D, F).to(tl.float32), _get1(dm1 + base, f, d, D, F)
            tl.store(db + end, tl.load(db + end) + db_end + tl.sum(e1 * z1))
            tl.store(de0 + at_end, de_first + tl.sum(k1 * z1))
            t1 = k1.to(DTYPE)
            dh += _dot(_all((u * e_end[:, None]).to(DTYPE), W), t1, PRECISION)
            above = _over_units(_units(hs + units, f, token, F), t1, PRECISION)
            tl.store(de + at_end * 16 + token, de_end + tl.sum(u * above, 1))
        y1 = _get1(rooms1 + to, f, d, D, F)
        du = _over_units(change, y1, PRECISION)
        if ROWS:
            dwrite = _block(dwrites + block, token, d, D) + through * closed
            dlog = through * write
            ends = tl.sum(dlog, 0) + tl.exp(left) * of_rows
            dsums = _block(dlogs + block, token, d, D) - dlog
            dsums += tl.where((token == 15)[:, None], ends[None, :], 0.0)
            _put_rows(dr, dwrite * u, at, there, d, D)
            logs = _rows(g, at, there, d, D).to(tl.float32)
            _put_rows(dg, tl.where(logs < -100.0, 0.0, tl.cumsum(dsums, 0, reverse=True)), at, there, d, D)
            du += dwrite * rate
        else:
            du += _block(dus + block, token, d, D) + through * c_end[:, None]
            dc_end += tl.sum(u * through, 1)
        if FILTER:
            du += above * e_end[:, None]
        row = dc + end * 16 + token
        tl.store(row, tl.load(row) + dc_end)
        dut = tl.trans(du)
        _put_columns(asked, dut, at, there, d, D)
        dy = tl.where(inside & there[None, :], _ask(y, dut, given, inside, True), 0.0)
        dyb = tl.trans(dy).to(DTYPE)
        got, a_t = _rows(do, at, there, d, D), line(a, at, there, GATED)
        b_t = line(b, at, there, FILTER)
        if ROWS:
            late = (got * tl.exp(sums)).to(DTYPE)
        else:
            late = (got * a_t[:, None]).to(DTYPE)
        dh += _dot(_all(dyb, W), y1, PRECISION)
        dzb = (dz + dh * _units(slopes + units, f, token, F).to(tl.float32)).to(DTYPE)
        dkt += _over_units(dzb, _turn(_get2(rooms2 + to, f, d, D, F)), PRECISION)
        _put_rows(dk, dkt, at, there, d, D)
        if FILTER:
            got_b, dn_b = (got * b_t[:, None]).to(DTYPE), _units(dns + units, f, token, F).to(tl.float32)
            k1 = e_first * _get1(dm1 + base, f, d, D, F) + b_end * e1
            k1 += _dot(_turn(_all(got_b, W)), _units(ms + units, f, token, F), PRECISION)
            k2 = e_first * _get2(dm2 + base, f, d, D, F) + b_end * e2
            k2 += _dot(_turn((dn_b * b_t[None, :, None]).to(DTYPE)), _all(qt, W), PRECISION)
            tl.debug_barrier()  # all of a tile is read where others write it
            _put1(dm1 + base, k1, f, d, D, F)
            _put2(dm2 + base, k2, f, d, D, F)
            tl.debug_barrier()
        if ROWS:
            e1 = tl.exp(left)[None, :, None] * e1
        else:
            e1 = a_end * e1
        e2 = a_end * e2
        if n == blocks - 1:  # whose first state is the anchor that is shown
            e1 += _get1(before1 + base, f, d, D, F)
            e2 += _get2(before2 + base, f, d, D, F)
        e1 += _dot(_turn(_all(dyb, W)), _units(hs + units, f, token, F), PRECISION)
        e1 += _dot(_turn(_all(late, W)), _units(ms + units, f, token, F), PRECISION)
        e1 += _dot(_turn(_all(ub, W)), change, PRECISION)
        e2 += _dot(_turn(dzb), k3, PRECISION)
        dn = _units(dns + units, f, token, F).to(tl.float32) * a_t[None, :, None]
        e2 += _dot(_turn(dn.to(DTYPE)), _all(qt, W), PRECISION)
    _put1(dw1 + base, e1, f, d, D, F)
    _put2(dw2 + base, e2, f, d, D, F)
