"""What is before and behind the serial passes of `hopper`, parallel in blocks: all that knows neither W nor derivatives
in it, and what is made of sums over hidden units. The mathematics is that of `passes`, the tiles are `held`'s.
"""

# mypy: disable-error-code="assignment, var-annotated, index, misc"
from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import floored
from axes.kernels.network.functions import line
from axes.kernels.network.held import _block, _columns, _dot, _kept, _last, _pairs, _put_block, _put_rows, _rows
from axes.kernels.substitution.response import ask, inputs  # replaced

_OPEN = ["T", "H", "U", "first"]


@triton.jit
def _ask(x, y, given, inside, BACK: tl.constexpr):
    """u of the tokens of a block (BD, 16), or what their x is asked for by y (BACK)."""
    return ask(x, tl.sum(x * 0.0, 0)[None, :], y, given, inside, BACK)


@triton.jit
def _numbers_of_filter(b, e0, e, numbers, ends, place, n, head, H, at, end, there, token):
    """b and the last e of a block's tokens, the last b and what is left of a filter."""
    tl.store(numbers + place * 64 + 32 + token, tl.load(b + at, mask=there, other=0.0))
    tl.store(numbers + place * 64 + 48 + token, tl.load(e + (n * H + head) * 16 + token))
    tl.store(ends + place * 4 + 1, tl.load(b + end))
    tl.store(ends + place * 4 + 2, tl.load(e0 + n * H + head))


@triton.jit
def _of_block(T, H, U, first):
    """The program of a block: its number, its unit, head and block, its tokens and which there are, where these stand,
    and where the last one does."""
    pid = tl.program_id(0).to(tl.int64)
    head, unit, n = pid % H, pid // H % U, first + pid // (H * U)
    token = tl.arange(0, 16)
    rows = tl.minimum(T - n * 16, 16)
    at = (unit * T + n * 16 + token) * H + head
    return pid, unit, head, n, token, token < rows, token == rows - 1, at, (unit * T + n * 16 + rows - 1) * H + head


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def early(
    q, k, a, b, c, e0, e, g, r, pack, squares, numbers, kept, ends, factor, T, H, U, first,
    D: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, FILTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a block, before `onward`: k and q, their pairs, a and the last c, and of rows what is kept and written."""
    pid, unit, head, n, token, there, ending, at, end = _of_block(T, H, U, first)
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, D)
    kt, qt = _rows(k, at, there, d, D), _rows(q, at, there, d, D)
    _put_block(pack + pid * (32 * D), kt, token, d, D)
    _put_block(pack + pid * (32 * D) + 16 * D, qt, token, d, D)
    pairs = _dot(qt, tl.trans(kt), PRECISION) * _pairs(c, at, there, token)
    tl.store(squares + pid * 256 + token[:, None] * 16 + token[None, :], pairs.to(DTYPE))
    tl.store(numbers + pid * 64 + token, line(a, at, there, GATED))
    tl.store(numbers + pid * 64 + 16 + token, tl.load(c + end * 16 + token, mask=there, other=0.0))
    if GATED:
        a_end = tl.load(a + end)
        tl.store(ends + pid * 4, a_end)
    if FILTER:
        _numbers_of_filter(b, e0, e, numbers, ends, pid, unit * tl.cdiv(T, 16) + n, head, H, at, end, there, token)
    if ROWS:
        sums = tl.cumsum(floored(_rows(g, at, there, d, D).to(tl.float32)), 0)
        left = _last(sums, token)
        closed = tl.exp(left[None, :] - sums) * _rows(r, at, there, d, D).to(tl.float32)
        _put_block(factor + pid * (16 * D), closed, token, d, D)
        tl.store(kept + pid * D + d, tl.exp(left))
    elif GATED:
        tl.store(kept + pid * D + d, tl.zeros([D], tl.float32) + a_end)


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def late(
    p0, p1, p2, p3, p4, p5, p6, p7, a, c, g, r, seen, reads, met, o, T, H, U, first,
    D: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, FILTER: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries of a block read, of W1 m and H^T m."""
    pid, unit, head, n, token, there, ending, at, end = _of_block(T, H, U, first)
    d = tl.arange(0, D)
    inside = (d < D)[:, None]
    y = _columns(seen, at, there, d, D)
    given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
    u = tl.trans(tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0))
    dots, read = _pairs(met, at, there, token), _block(reads + pid * (16 * D), token, d, D)
    if ROWS:
        sums = tl.cumsum(floored(_rows(g, at, there, d, D).to(tl.float32)), 0)
        ones = u * _rows(r, at, there, d, D).to(tl.float32)
        read = read * tl.exp(sums)
        read += tl.sum(_kept(sums, token) * dots[:, :, None] * ones[None, :, :], 1)
    else:
        pairs = (_pairs(c, at, there, token) * dots).to(DTYPE)
        if not FILTER:
            read = read * line(a, at, there, GATED)[:, None]
        read += _dot(pairs, u.to(DTYPE), PRECISION)
    _put_rows(o, read, at, there, d, D)


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def before(
    q, k, p0, p1, p2, p3, p4, p5, p6, p7, a, b, c, e0, e, g, r, seen, met, do, pack, squares, numbers, kept, ends, base,
    factor, dwrites, dlogs, T, H, U, first,
    D: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, FILTER: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a block: k, q, u, what is written at its end of u, do with what its queries keep; pairs of keys with queries
    and of u with do; a and the last c; what is kept of the state's rows; and of what u is asked for, a part that is
    known, and by how much the part by its state counts."""
    pid, unit, head, n, token, there, ending, at, end = _of_block(T, H, U, first)
    DTYPE: tl.constexpr = k.dtype.element_ty
    d = tl.arange(0, D)
    inside = (d < D)[:, None]
    block, pair = pid * (D * 16), pid * 512 + token[:, None] * 16 + token[None, :]
    kt, qt = _rows(k, at, there, d, D), _rows(q, at, there, d, D)
    y = _columns(seen, at, there, d, D)
    given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
    u = tl.trans(tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0))
    c_ts, a_t = _pairs(c, at, there, token), line(a, at, there, GATED)
    c_end, a_end = tl.load(c + end * 16 + token, mask=there, other=0.0), 1.0
    if GATED:
        a_end = tl.load(a + end)
    dots, got = _pairs(met, at, there, token), _rows(do, at, there, d, D)
    if ROWS:
        sums = tl.cumsum(floored(_rows(g, at, there, d, D).to(tl.float32)), 0)
        left = _last(sums, token)
        rate, closed = _rows(r, at, there, d, D).to(tl.float32), tl.exp(left[None, :] - sums)
        ones, late = u * rate, got * tl.exp(sums)
        write = ones * closed
        scaled = _kept(sums, token) * got[:, None, :]
        both = tl.sum(scaled * ones[None, :, :], 2)
        scaled *= dots[:, :, None]
        dwrite = tl.sum(scaled, 0)
        _put_block(dwrites + block, dwrite, token, d, D)
        _put_block(dlogs + block, tl.sum(scaled * ones[None, :, :], 1) - dwrite * ones, token, d, D)
        asked, by = dwrite * rate, closed * rate
        tl.store(kept + pid * D + d, tl.exp(left))
    else:
        late, write = got * a_t[:, None], u * c_end[:, None]
        both = _dot(got.to(DTYPE), tl.trans(u.to(DTYPE)), PRECISION) * c_ts
        asked = _dot(tl.trans((c_ts * dots).to(DTYPE)), got.to(DTYPE), PRECISION)
        by = tl.zeros_like(u) + c_end[:, None]
        if GATED:
            tl.store(kept + pid * D + d, tl.zeros([D], tl.float32) + a_end)
    if GATED:
        tl.store(ends + pid * 4, a_end)
    _put_block(base + block, asked, token, d, D)
    _put_block(factor + block, by, token, d, D)
    tl.store(numbers + pid * 64 + token, a_t)
    tl.store(numbers + pid * 64 + 16 + token, c_end)
    tl.store(squares + pair, (_dot(qt, tl.trans(kt), PRECISION) * c_ts).to(DTYPE))
    tl.store(squares + pair + 256, both.to(DTYPE))
    _put_block(pack + block * N, kt, token, d, D)
    _put_block(pack + block * N + 16 * D, qt, token, d, D)
    _put_block(pack + block * N + 32 * D, u, token, d, D)
    _put_block(pack + block * N + 48 * D, write, token, d, D)
    _put_block(pack + block * N + 64 * D, late, token, d, D)
    if FILTER:
        at_end = (unit * tl.cdiv(T, 16) + n) * H + head
        b_t, e_end = tl.load(b + at, mask=there, other=0.0), tl.load(e + at_end * 16 + token)
        _put_block(pack + block * N + 80 * D, got * b_t[:, None], token, d, D)
        _put_block(pack + block * N + 96 * D, u * e_end[:, None], token, d, D)
        _numbers_of_filter(b, e0, e, numbers, ends, pid, unit * tl.cdiv(T, 16) + n, head, H, at, end, there, token)


@Kernel
@triton.jit(do_not_specialize=_OPEN)
def behind(
    p0, p1, p2, p3, p4, p5, p6, p7, a, c, g, r, seen, met, do, pack, numbers, dwrites, dlogs, reads, throughs, queries,
    keys, later, dpairs, lefts, reads2, aboves, queries2, keys2, dq, dk, da, db, dc, de0, de, dg, dr, T, H, U, first,
    D: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, FILTER: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a block: dq, dk, and what gates and rates are asked for."""
    pid, unit, head, n, token, there, ending, at, end = _of_block(T, H, U, first)
    DTYPE: tl.constexpr = pack.dtype.element_ty
    d = tl.arange(0, D)
    inside = (d < D)[:, None]
    block = pid * (D * 16)
    kt, qt = _block(pack + block * N, token, d, D), _block(pack + block * N + 16 * D, token, d, D)
    y = _columns(seen, at, there, d, D)
    given = inputs(p0, p1, p2, p3, p4, p5, p6, p7, at[None, :], d[:, None], D, there[None, :], inside)
    u = tl.trans(tl.where(inside & there[None, :], _ask(y, y, given, inside, False), 0.0))
    c_ts, a_t = _pairs(c, at, there, token), line(a, at, there, GATED)
    c_end = tl.load(numbers + pid * 64 + 16 + token)
    dots, got = _pairs(met, at, there, token), _rows(do, at, there, d, D)
    of_pairs = tl.load(dpairs + pid * 256 + token[:, None] * 16 + token[None, :])
    of_query, of_key = _block(queries + block, token, d, D), _block(keys + block, token, d, D)
    through = _block(throughs + block, token, d, D)
    pairs = (of_pairs * c_ts).to(DTYPE)
    asking = of_query * a_t[:, None] + _dot(pairs, kt, PRECISION)
    made = of_key * c_end[:, None] + _block(later + block, token, d, D)
    if FILTER:
        at_end = (unit * tl.cdiv(T, 16) + n) * H + head
        b_t, e_end = tl.load(numbers + pid * 64 + 32 + token), tl.load(numbers + pid * 64 + 48 + token)
        by_query, by_key = _block(queries2 + block, token, d, D), _block(keys2 + block, token, d, D)
        asking += by_query * b_t[:, None]
        made += by_key * e_end[:, None]
        db_t = tl.sum(qt.to(tl.float32) * by_query + got * _block(reads2 + block, token, d, D), 1)
        db_t += tl.where(ending, tl.load(lefts + pid * 128 + 65), 0.0)
        tl.store(db + at, db_t, mask=there)
        tl.store(de0 + at_end, tl.load(lefts + pid * 128 + 66))
        de_end = tl.sum(kt.to(tl.float32) * by_key + u * _block(aboves + block, token, d, D), 1)
        tl.store(de + at_end * 16 + token, de_end)
    _put_rows(dq, asking, at, there, d, D)
    _put_rows(dk, made + _dot(tl.trans(pairs), qt, PRECISION), at, there, d, D)
    dc_ts = of_pairs * _dot(qt, tl.trans(kt), PRECISION)
    dc_end = tl.sum(kt.to(tl.float32) * of_key, 1)
    if GATED:
        read, of_rows = _block(reads + block, token, d, D), tl.load(lefts + pid * 128 + d)
        da_t = tl.sum(qt.to(tl.float32) * of_query, 1)
        da_end = tl.load(lefts + pid * 128 + 64)
        if not ROWS:
            da_t += tl.sum(got * read, 1)
            da_end += tl.sum(of_rows, 0)
        tl.store(da + at, da_t + tl.where(ending, da_end, 0.0), mask=there)
    if ROWS:
        logs, rate = _rows(g, at, there, d, D).to(tl.float32), _rows(r, at, there, d, D).to(tl.float32)
        sums = tl.cumsum(floored(logs), 0)
        left = _last(sums, token)
        closed = tl.exp(left[None, :] - sums)
        dlog = through * u * rate * closed
        dsums = _block(dlogs + block, token, d, D) + got * tl.exp(sums) * read - dlog
        ends = tl.sum(dlog, 0) + tl.exp(left) * of_rows
        dsums += tl.where((token == 15)[:, None], ends[None, :], 0.0)
        _put_rows(dr, (_block(dwrites + block, token, d, D) + through * closed) * u, at, there, d, D)
        _put_rows(dg, tl.where(logs < -100.0, 0.0, tl.cumsum(dsums, 0, reverse=True)), at, there, d, D)
    else:
        dc_ts += dots * _dot(got.to(DTYPE), tl.trans(u.to(DTYPE)), PRECISION)
        dc_end += tl.sum(u * through, 1)
    # the last token's row takes what the state at the end of the block was asked for by each token
    turned = tl.sum(tl.where(token[:, None] == token[None, :], dc_end[:, None], 0.0), 0)
    dc_ts += tl.where(ending[:, None], turned[None, :], 0.0)
    tl.store(dc + at[:, None] * 16 + token[None, :], dc_ts, mask=there[:, None])
