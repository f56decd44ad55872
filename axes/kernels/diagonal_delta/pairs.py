"""What is made of a chunk before its state is known: scaled vectors, pair matrices and the inverse, device side.

Tokens are (tokens, H, D); scaled vectors (tokens, HV, K); chunk matrices (slots, HV, C, C); totals (slots, HV, K);
states of chunks (slots, HV, V, K), public ones (U, HV, V, K). y is the writer of u (k, or b with TWO), z the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.inverse import invert
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import load_line, load_tile, slot_rows, store_tile
from axes.kernels.diagonal.channels import after, from_middle, halves, largest, load_logs, met, power, split, until

LENGTHS = ["T", "N", "HV"]  # one compilation for all of them

# ---- pieces --------------------------------------------------------------------------------------------------------


@triton.jit
def decays(
    high, middle, low, size,
    C: tl.constexpr, LATE: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Factors of q, of the reader a (before its gate unless LATE) and of writers at blocks of `size` rows; flatness.

    As channels.factors, for two readers. A reader before its gate has no pairs in a block of one row.
    """
    x = from_middle(high, middle, low, size, C, False, PARTS)
    if LATE:
        flat = (largest(x) <= BOUND).to(tl.int32) != 0  # the interpreter keeps a comparison of floats a float
        query = halves(x, flat, 1.0)
        reader = query
    else:
        e = tl.where(size > 1, from_middle(high, middle, low, size, C, True, PARTS), 0.0)
        flat = (tl.maximum(largest(x), largest(e)) <= BOUND).to(tl.int32) != 0
        query = halves(x, flat, 1.0)
        reader = halves(e, flat, 1.0)
    return query, reader, halves(x, flat, -1.0), flat


@triton.jit
def least_total(falls, block, K: tl.constexpr, BK: tl.constexpr):
    """The least total of a chunk's channels."""
    parts: tl.constexpr = (K + BK - 1) // BK
    lowest = tl.load(falls + block * parts)
    for part in tl.static_range(1, parts):
        lowest = tl.minimum(lowest, tl.load(falls + block * parts + part))
    return lowest


@triton.jit
def some_closed(
    falls, chunks, TIMES: tl.constexpr, LOOK: tl.constexpr, BOUND: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    """Whether one of the LOOK chunks pid, pid + programs, .. has closed gates, each of them TIMES in a row.

    Mostly none has, and programs of one chunk each, which end at once, take longer than all of these looks.
    """
    parts: tl.constexpr = (K + BK - 1) // BK
    block = (tl.program_id(0).to(tl.int64) + tl.arange(0, LOOK) * tl.num_programs(0)) // TIMES
    least = tl.load(falls + block * parts, mask=block < chunks, other=0.0)
    for part in tl.static_range(1, parts):
        least = tl.minimum(least, tl.load(falls + block * parts + part, mask=block < chunks, other=0.0))
    return tl.max((least >= -BOUND).to(tl.int32) ^ 1, 0) != 0


@triton.jit
def _store_pairs(
    lowers, p, m2, p2, lower, scores, lower2, scores2, beta, first, count, head, block, HV,
    C: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Write a chunk's pair matrices, P with its diagonal, and what `solve` inverts."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    at = block * C * C + (i * C + j)
    tl.store(p + at, tl.where(i >= j, scores, 0.0).to(p.dtype.element_ty))
    if TWO:
        tl.store(p2 + at, tl.where(i >= j, scores2, 0.0).to(p.dtype.element_ty))
        tl.store(m2 + at, tl.where(i > j, lower2, 0.0).to(p.dtype.element_ty))
        lower = -lower
    else:
        lower *= load_line(beta, first, count, head, HV, C)[:, None]
    tl.store(lowers + at, tl.where(i > j, lower, 0.0))


# ---- kernels -------------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=[*LENGTHS, "H"])
def prepare(
    q, a, y, z, beta, g, lowers, p, m2, p2, qs, as_, ys, zs, totals, falls, offsets, units, T, N, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, MATRICES: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Totals and scaled vectors of a chunk, with MATRICES its pair matrices if no channel falls by more than BOUND.

    exp(R_i - G_j) is exp(R_i) exp(-G_j) there. Without MATRICES a program has one block of channels.
    """
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = 1 if MATRICES else (K + BK - 1) // BK
    begin = (pid % parts).to(tl.int32) * BK
    pid = pid // parts
    slot, head = pid // HV, pid % HV
    _, first, end = slot_rows(offsets, units, slot, T, N, C, PACKED)
    if first >= end:
        return
    source = head // (HV // H)
    count = (end - first).to(tl.int32)
    lower = tl.zeros([C, C], dtype=tl.float32)
    scores = tl.zeros([C, C], dtype=tl.float32)
    lower2 = tl.zeros([C, C], dtype=tl.float32)
    scores2 = tl.zeros([C, C], dtype=tl.float32)
    lowest = tl.full([], 0.0, tl.float32)
    for left in range(begin, K if MATRICES else begin + BK, BK):
        d = left + tl.arange(0, BK)
        log = load_logs(g, first, count, d, head, HV, K, C)
        query = load_tile(q, first, count, d, source, H, K, C)
        writer = load_tile(y, first, count, d, source, H, K, C)
        reader = writer if SHARED else load_tile(a, first, count, d, source, H, K, C)
        if TWO:
            value = load_tile(z, first, count, d, source, H, K, C)
        kind = query.dtype
        high, middle, low = split(log, PARTS)
        total = tl.sum(log, 0)
        tl.store(totals + pid * K + d, total, mask=d < K)
        fall = tl.min(total, 0)
        tl.store(falls + pid * ((K + BK - 1) // BK) + left // BK, fall)
        lowest = tl.minimum(lowest, fall)
        run = until(high, middle, low, C, False, PARTS)
        reach = power(run)
        up = (query * reach).to(kind)
        store_tile(qs, up, first, count, d, head, HV, K, C)
        if not LATE:
            reach = power(until(high, middle, low, C, True, PARTS))
        read = (reader * reach).to(kind)
        store_tile(as_, read, first, count, d, head, HV, K, C)
        if PARTS == 0 or PARTS == 3:
            kept = power(after(high, middle, low, C, PARTS))
        else:  # closed gates cost digits that 16 bits do not have
            kept = power(total[None, :] - run)
        store_tile(ys, writer * kept, first, count, d, head, HV, K, C)
        if TWO:
            store_tile(zs, value * kept, first, count, d, head, HV, K, C)
        if MATRICES:
            loss = power(-run)
            down = tl.trans((writer * loss).to(kind))
            scores += tl.dot(up, down, input_precision=PRECISION)
            lower += tl.dot(read, down, input_precision=PRECISION)
            if TWO:
                down = tl.trans((value * loss).to(kind))
                scores2 += tl.dot(up, down, input_precision=PRECISION)
                lower2 += tl.dot(read, down, input_precision=PRECISION)
    if MATRICES:  # noqa: SIM102 (a constant around a test)
        if lowest >= -BOUND:
            _store_pairs(lowers, p, m2, p2, lower, scores, lower2, scores2, beta, first, count, head, pid, HV, C, TWO)


@triton.jit
def _closed_pairs(
    q, a, y, z, beta, g, lowers, p, m2, p2, pid, first, count, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr,
    PARTS: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The pair matrices of one chunk whatever its gates are."""
    head = pid % HV
    source = head // (HV // H)
    lower = tl.zeros([C, C], dtype=tl.float32)
    scores = tl.zeros([C, C], dtype=tl.float32)
    lower2 = tl.zeros([C, C], dtype=tl.float32)
    scores2 = tl.zeros([C, C], dtype=tl.float32)
    for left in range(0, K, BK):
        d = left + tl.arange(0, BK)
        high, middle, low = split(load_logs(g, first, count, d, head, HV, K, C), PARTS)
        query = load_tile(q, first, count, d, source, H, K, C)
        writer = load_tile(y, first, count, d, source, H, K, C)
        reader = writer if SHARED else load_tile(a, first, count, d, source, H, K, C)
        if TWO:
            value = load_tile(z, first, count, d, source, H, K, C)
        kind = query.dtype
        size = tl.full([], C, tl.int32)
        while size > 0:
            rise, gain, loss, flat = decays(high, middle, low, size, C, LATE, PARTS, FLAT)
            up = (query * rise).to(kind)
            read = (reader * gain).to(kind)
            down = tl.trans((writer * loss).to(kind))
            pair = met(size, flat, C, False)
            scores += tl.where(pair, tl.dot(up, down, input_precision=PRECISION), 0.0)
            lower += tl.where(pair, tl.dot(read, down, input_precision=PRECISION), 0.0)
            if TWO:
                down = tl.trans((value * loss).to(kind))
                scores2 += tl.where(pair, tl.dot(up, down, input_precision=PRECISION), 0.0)
                lower2 += tl.where(pair, tl.dot(read, down, input_precision=PRECISION), 0.0)
            size = tl.where(flat, 0, size // 2)
    _store_pairs(lowers, p, m2, p2, lower, scores, lower2, scores2, beta, first, count, head, pid, HV, C, TWO)


@Kernel
@triton.jit(do_not_specialize=[*LENGTHS, "H", "chunks"])
def prepare_closed(
    q, a, y, z, beta, g, lowers, p, m2, p2, falls, offsets, units, T, N, H, HV, chunks,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LOOK: tl.constexpr,
    TWO: tl.constexpr, LATE: tl.constexpr, SHARED: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, BOUND: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The pair matrices of chunks that `prepare` leaves, those with closed gates, LOOK of all chunks a program."""
    if some_closed(falls, chunks, 1, LOOK, BOUND, K, BK):
        for turn in tl.range(LOOK, disable_licm=True):  # what is the same in every turn would be held, and spill
            pid = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
            if pid < chunks:
                _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
                if first < end:
                    mild = least_total(falls, pid, K, BK) >= -BOUND
                    if not mild:
                        _closed_pairs(
                            q, a, y, z, beta, g, lowers, p, m2, p2, pid, first, (end - first).to(tl.int32), H, HV,
                            K, C, BK, TWO, LATE, SHARED, PARTS, FLAT, PRECISION,
                        )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=LENGTHS)
def solve(
    lowers, m, falls, offsets, units, T, N, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, CLOSED: tl.constexpr,
    SIDE: tl.constexpr, LANES: tl.constexpr, MERGE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """m = (I + lower)^-1 of every chunk, by one warp each: it owns all columns of its matrix. CLOSED, where it is not
    zero: of chunks in which a channel falls by more."""
    pid = tl.program_id(0).to(tl.int64)
    _, first, end = slot_rows(offsets, units, pid // HV, T, N, C, PACKED)
    if first >= end:
        return
    if CLOSED > 0:  # noqa: SIM102 (a constant around a test)
        if least_total(falls, pid, K, BK) >= -CLOSED:
            return
    invert(lowers + pid * C * C, m + pid * C * C, C, SIDE, LANES, MERGE)
