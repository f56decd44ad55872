"""What carries a token of a chunk to another, products of 2 x 2 blocks, and the gradients of it: device side.

Per chunk slot and value head: recurrence (2, C, C) holds Y_s^t[j] as (j, t, s); carries (8, C) holds P^t (rows 0 to
3), c (4, 5) and Y^C (6, 7); totals (4) is P^C. The mathematics is in `axes.kernels.block.chain`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import load_line, slot_rows, store_line

AHEAD = tl.constexpr(8)  # tokens whose numbers are under way at a time
BEHIND = tl.constexpr(4)  # and of the adjoint, which has more of them


@triton.jit
def _map(block, at, here):
    """A token's M, or none of it after the last token."""
    m00 = tl.load(block + at * 4, mask=here, other=1.0)
    m01 = tl.load(block + at * 4 + 1, mask=here, other=0.0)
    m10 = tl.load(block + at * 4 + 2, mask=here, other=0.0)
    m11 = tl.load(block + at * 4 + 3, mask=here, other=1.0)
    return (m00, m01, m10, m11)


@triton.jit
def _two(ptr, at, here):
    """A token's w or e."""
    return (tl.load(ptr + at * 2, mask=here, other=0.0), tl.load(ptr + at * 2 + 1, mask=here, other=0.0))


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def recurrence(
    block, write, erase, recurrence, carries, totals, offsets, units, T, N,
    HV: tl.constexpr, C: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Y and P of one chunk. Tokens after the last one of a unit neither carry nor write: M = I, w = e = 0."""
    pid = tl.program_id(0).to(tl.int64)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    s = tl.arange(0, C)
    y0 = tl.zeros([C], dtype=tl.float32)
    y1 = tl.zeros([C], dtype=tl.float32)
    p00, p01, p10, p11 = 1.0, 0.0, 0.0, 1.0
    out = recurrence + pid * 2 * C * C + s
    small = carries + pid * 8 * C
    for left in range(0, C, AHEAD):
        maps, writes, erases = (), (), ()
        for r in tl.static_range(AHEAD):  # read before anything is written: nothing waits for memory in turn
            at = (first + left + r) * HV + pid % HV
            here = first + left + r < end
            maps = maps + _map(block, at, here)
            writes = writes + _two(write, at, here)
            if ERASE:
                erases = erases + _two(erase, at, here)
        for r in tl.static_range(AHEAD):
            t = left + r
            m00, m01, m10, m11 = maps[4 * r], maps[4 * r + 1], maps[4 * r + 2], maps[4 * r + 3]  # type: ignore[var-annotated]
            if ERASE:
                e0, e1 = erases[2 * r], erases[2 * r + 1]  # type: ignore[var-annotated]
                tl.store(small + 4 * C + t, p00 * e0 + p01 * e1)
                tl.store(small + 5 * C + t, p10 * e0 + p11 * e1)
            next0 = y0 * m00 + y1 * m10
            next1 = y0 * m01 + y1 * m11
            y0 = tl.where(s == t, writes[2 * r], next0)
            y1 = tl.where(s == t, writes[2 * r + 1], next1)
            q00 = p00 * m00 + p01 * m10
            q01 = p00 * m01 + p01 * m11
            q10 = p10 * m00 + p11 * m10
            q11 = p10 * m01 + p11 * m11
            p00, p01, p10, p11 = q00, q01, q10, q11
            tl.store(out + t * C, y0)
            tl.store(out + C * C + t * C, y1)
            tl.store(small + t, p00)
            tl.store(small + C + t, p01)
            tl.store(small + 2 * C + t, p10)
            tl.store(small + 3 * C + t, p11)
    tl.store(small + 6 * C + s, y0)
    tl.store(small + 7 * C + s, y1)
    tl.store(totals + pid * 4, p00)
    tl.store(totals + pid * 4 + 1, p01)
    tl.store(totals + pid * 4 + 2, p10)
    tl.store(totals + pid * 4 + 3, p11)


@triton.jit
def read_pairs(recurrence, C: tl.constexpr):
    """Q_ts: what a token reads of an earlier one or of itself; zero above the diagonal, as the recurrence left it."""
    return tl.load(recurrence + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def erase_pairs(recurrence, erase, first, rows, hv, HV, C: tl.constexpr):
    """D_ts = Y_s^{t-1} . e_t, strictly lower."""
    t = tl.arange(0, C)[:, None]
    before = recurrence + (t - 1) * C + tl.arange(0, C)[None, :]
    e0 = load_line(erase, first, rows, 2 * hv, 2 * HV, C)
    e1 = load_line(erase, first, rows, 2 * hv + 1, 2 * HV, C)
    y0 = tl.load(before, mask=t > tl.arange(0, C)[None, :], other=0.0)
    y1 = tl.load(before + C * C, mask=t > tl.arange(0, C)[None, :], other=0.0)
    return e0[:, None] * y0 + e1[:, None] * y1


@triton.jit
def _parts(ptr, stride, PARTS: tl.constexpr):
    """The sum of what the blocks of keys gave, in order."""
    total = tl.load(ptr)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * stride)
    return total


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def adjoint(
    block, erase, recurrence, carries, dpairs, dcarries, dtotals, dblock, dwrite, derase, offsets, units, T, N,
    HV: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, ERASE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The recurrence backwards from a chunk's last token: with gY^t and gP^t the gradients of Y^t and P^t,

    dw_t = gY_t^t,  dM_t = sum_{s<t} Y_s^{t-1} gY_s^t + P^{t-1}^T gP^t,  gY^{t-1} = gY^t M_t^T + dD_t. e_t + dQ_{t-1}.
    """
    pid = tl.program_id(0).to(tl.int64)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    s = tl.arange(0, C)
    chunks = tl.num_programs(0).to(tl.int64)
    far = chunks * 6 * C
    small = carries + pid * 8 * C
    dsmall = dcarries + pid * 6 * C
    y = recurrence + pid * 2 * C * C + s
    pairs = dpairs + pid * 2 * C * C + s
    gy0 = _parts(dsmall + 4 * C + s, far, PARTS)
    gy1 = _parts(dsmall + 5 * C + s, far, PARTS)
    gp00 = _parts(dtotals + pid * 4, chunks * 4, PARTS)
    gp01 = _parts(dtotals + pid * 4 + 1, chunks * 4, PARTS)
    gp10 = _parts(dtotals + pid * 4 + 2, chunks * 4, PARTS)
    gp11 = _parts(dtotals + pid * 4 + 3, chunks * 4, PARTS)
    dw0 = tl.zeros([C], dtype=tl.float32)
    dw1 = tl.zeros([C], dtype=tl.float32)
    for back in range(0, C, BEHIND):
        maps, erases, prefixes, rows, given = (), (), (), (), ()
        for r in tl.static_range(BEHIND):
            t = C - 1 - back - r
            at = (first + t) * HV + pid % HV
            here = first + t < end
            maps = maps + _map(block, at, here)
            p00 = tl.load(small + t - 1, mask=t > 0, other=1.0)  # P^{t-1}
            p01 = tl.load(small + C + t - 1, mask=t > 0, other=0.0)
            p10 = tl.load(small + 2 * C + t - 1, mask=t > 0, other=0.0)
            p11 = tl.load(small + 3 * C + t - 1, mask=t > 0, other=1.0)
            prefixes = prefixes + (p00, p01, p10, p11)  # type: ignore[assignment]
            y0 = tl.load(y + (t - 1) * C, mask=s < t, other=0.0)  # Y^{t-1}
            y1 = tl.load(y + C * C + (t - 1) * C, mask=s < t, other=0.0)
            rows = rows + (y0, y1, tl.load(pairs + t * C))  # type: ignore[assignment]
            given = given + (_parts(dsmall + t, far, PARTS), _parts(dsmall + C + t, far, PARTS))  # type: ignore[assignment]
            if ERASE:
                erases = erases + _two(erase, at, here)
                dc0 = _parts(dsmall + 2 * C + t, far, PARTS)
                dc1 = _parts(dsmall + 3 * C + t, far, PARTS)
                erases = erases + (dc0, dc1, tl.load(pairs + C * C + t * C))
        for r in tl.static_range(BEHIND):
            t = C - 1 - back - r
            at = (first + t) * HV + pid % HV
            here = first + t < end
            m00, m01, m10, m11 = maps[4 * r], maps[4 * r + 1], maps[4 * r + 2], maps[4 * r + 3]  # type: ignore[var-annotated]
            p00, p01, p10, p11 = prefixes[4 * r], prefixes[4 * r + 1], prefixes[4 * r + 2], prefixes[4 * r + 3]
            y0, y1 = rows[3 * r], rows[3 * r + 1]
            gy0 += rows[3 * r + 2]
            gp00 += given[2 * r]
            gp10 += given[2 * r + 1]
            dw0 = tl.where(s == t, gy0, dw0)
            dw1 = tl.where(s == t, gy1, dw1)
            gy0 = tl.where(s < t, gy0, 0.0)
            gy1 = tl.where(s < t, gy1, 0.0)
            tl.store(dblock + at * 4, tl.sum(y0 * gy0, 0) + p00 * gp00 + p10 * gp10, mask=here)
            tl.store(dblock + at * 4 + 1, tl.sum(y0 * gy1, 0) + p00 * gp01 + p10 * gp11, mask=here)
            tl.store(dblock + at * 4 + 2, tl.sum(y1 * gy0, 0) + p01 * gp00 + p11 * gp10, mask=here)
            tl.store(dblock + at * 4 + 3, tl.sum(y1 * gy1, 0) + p01 * gp01 + p11 * gp11, mask=here)
            before0 = gy0 * m00 + gy1 * m01
            gy1 = gy0 * m10 + gy1 * m11
            gy0 = before0
            before00 = gp00 * m00 + gp01 * m01
            before10 = gp10 * m00 + gp11 * m01
            gp01 = gp00 * m10 + gp01 * m11
            gp11 = gp10 * m10 + gp11 * m11
            gp00 = before00
            gp10 = before10
            if ERASE:
                e0, e1, dc0, dc1, dd = (
                    erases[5 * r], erases[5 * r + 1], erases[5 * r + 2], erases[5 * r + 3], erases[5 * r + 4]  # type: ignore[var-annotated]
                )  # fmt: skip
                tl.store(derase + at * 2, tl.sum(dd * y0, 0) + dc0 * p00 + dc1 * p10, mask=here)
                tl.store(derase + at * 2 + 1, tl.sum(dd * y1, 0) + dc0 * p01 + dc1 * p11, mask=here)
                gy0 += dd * e0
                gy1 += dd * e1
                gp00 += dc0 * e0
                gp01 += dc0 * e1
                gp10 += dc1 * e0
                gp11 += dc1 * e1
    rows = (end - first).to(tl.int32)
    store_line(dwrite, dw0, first, rows, 2 * (pid % HV), 2 * HV, C)
    store_line(dwrite, dw1, first, rows, 2 * (pid % HV) + 1, 2 * HV, C)
