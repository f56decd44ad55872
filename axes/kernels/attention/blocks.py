"""Keys and queries inside a block of C tokens whose maps A_t = I + a_t b_t^T carry every earlier key: k <- k A_t.

With X = (I - L)^-1, L the strictly lower part of a b^T, the maps up to a token are sums of b_s and of rows of X a:
    G = strictly upper (k a^T)    P = G X^T                 what a key picks up after its own token
    S = lower (q b^T)             k' = k + P b              at the block's end
    scores = lower (q k^T + S P^T)    q' = q + S X a        from the block's start
    A_1 ... A_C = I + (X a)^T b = I + W
A block's results stand by head, (B H, N, C, BD), zero where there is no token or feature: nobody masks them again.
Backward, from those of scores, q', k' and W, everything up to X again (dL = X^T dX X^T).
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.inverse import invert
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import load_tile, store_tile


@triton.jit
def square(SIDE: tl.constexpr):
    """Offsets of a contiguous square."""
    return tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]


@triton.jit
def strip(C: tl.constexpr, BD: tl.constexpr):
    """Offsets of a contiguous (C, BD)."""
    return tl.arange(0, C)[:, None] * BD + tl.arange(0, BD)[None, :]


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def solve(
    a, b, lowers, solved, T, N, H,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    SIDE: tl.constexpr, LANES: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X of one block, by way of -L in float32. Apart, since compilers take more than linear time for a long kernel."""
    pid = tl.program_id(0).to(tl.int64)
    n, line = pid % N, pid // N
    batch, head = line // H, line % H
    first, rows, columns = batch * T + n * C, (T - n * C).to(tl.int32), tl.arange(0, BD)
    left = load_tile(a, first, rows, columns, head, H, D, C)
    right = load_tile(b, first, rows, columns, head, H, D, C)
    row, col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    lowers += pid * C * C
    lower = tl.where(row > col, -tl.dot(left, tl.trans(right), input_precision=PRECISION), 0.0)
    tl.store(lowers + square(C), lower)
    tl.debug_barrier()
    invert(lowers, solved + pid * C * C, C, SIDE, LANES, MERGE)


@triton.jit
def _inside(q, k, a, b, x, C: tl.constexpr, PRECISION: tl.constexpr):
    """P, S and X a, in the operands' dtype."""
    kind = q.dtype
    row, col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    g = tl.where(row < col, tl.dot(k, tl.trans(a), input_precision=PRECISION), 0.0).to(kind)
    p = tl.dot(g, tl.trans(x), input_precision=PRECISION).to(kind)
    s = tl.where(row >= col, tl.dot(q, tl.trans(b), input_precision=PRECISION), 0.0).to(kind)
    return p, s, tl.dot(x, a, input_precision=PRECISION).to(kind)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def enter(
    q, k, a, b, solved, begun, ended, scores, maps, T, N, H,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q', k', scores and W of one block."""
    pid = tl.program_id(0).to(tl.int64)
    n, line = pid % N, pid // N
    batch, head = line // H, line % H
    first, rows, columns = batch * T + n * C, (T - n * C).to(tl.int32), tl.arange(0, BD)
    query = load_tile(q, first, rows, columns, head, H, D, C)
    key = load_tile(k, first, rows, columns, head, H, D, C)
    left = load_tile(a, first, rows, columns, head, H, D, C)
    right = load_tile(b, first, rows, columns, head, H, D, C)
    x = tl.load(solved + pid * C * C + square(C))
    p, s, xa = _inside(query, key, left, right, x, C, PRECISION)
    at = strip(C, BD)
    kind = begun.dtype.element_ty
    begin = tl.dot(s, xa, query.to(tl.float32), input_precision=PRECISION)
    tl.store(begun + pid * C * BD + at, begin.to(kind))
    last = tl.dot(p, right, key.to(tl.float32), input_precision=PRECISION)
    tl.store(ended + pid * C * BD + at, last.to(kind))
    pairs = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    pairs = tl.dot(s, tl.trans(p), pairs, input_precision=PRECISION)
    tl.store(scores + pid * C * C + square(C), pairs)  # where -L was
    whole = tl.dot(tl.trans(xa), right, input_precision=PRECISION)
    tl.store(maps + pid * BD * BD + square(BD), whole.to(kind))


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def leave(
    q, k, a, b, solved, dbegun, dended, dscores, dmaps, dq, dk, da, db, T, N, H,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block's q, k, a and b."""
    pid = tl.program_id(0).to(tl.int64)
    n, line = pid % N, pid // N
    batch, head = line // H, line % H
    first, rows, columns = batch * T + n * C, (T - n * C).to(tl.int32), tl.arange(0, BD)
    query = load_tile(q, first, rows, columns, head, H, D, C)
    key = load_tile(k, first, rows, columns, head, H, D, C)
    left = load_tile(a, first, rows, columns, head, H, D, C)
    right = load_tile(b, first, rows, columns, head, H, D, C)
    kind = query.dtype
    x = tl.load(solved + pid * C * C + square(C))
    p, s, xa = _inside(query, key, left, right, x, C, PRECISION)
    row, col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at = strip(C, BD)
    dfirst = tl.load(dbegun + pid * C * BD + at)
    dlast = tl.load(dended + pid * C * BD + at)
    down = tl.load(dscores + pid * C * C + square(C)).to(kind)
    whole = tl.load(dmaps + pid * BD * BD + square(BD))

    ds = tl.dot(dfirst, tl.trans(xa), input_precision=PRECISION)
    ds = tl.where(row >= col, tl.dot(down, p, ds, input_precision=PRECISION), 0.0).to(kind)
    dquery = tl.dot(down, key, dfirst.to(tl.float32), input_precision=PRECISION)
    dquery = tl.dot(ds, right, dquery, input_precision=PRECISION)
    store_tile(dq, dquery, first, rows, columns, head, H, D, C)

    dp = tl.dot(dlast, tl.trans(right), input_precision=PRECISION)
    dp = tl.dot(tl.trans(down), s, dp, input_precision=PRECISION).to(kind)
    dpx = tl.dot(dp, x, input_precision=PRECISION)
    dg = tl.where(row < col, dpx, 0.0).to(kind)
    dkey = tl.dot(tl.trans(down), query, dlast.to(tl.float32), input_precision=PRECISION)
    dkey = tl.dot(dg, left, dkey, input_precision=PRECISION)
    store_tile(dk, dkey, first, rows, columns, head, H, D, C)

    dxa = tl.dot(right, tl.trans(whole), input_precision=PRECISION)
    dxa = tl.dot(tl.trans(s), dfirst, dxa, input_precision=PRECISION).to(kind)
    unsolved = tl.dot(tl.trans(x), dxa, input_precision=PRECISION)
    dl = tl.dot(unsolved.to(kind), tl.trans(xa), input_precision=PRECISION)
    dl = tl.dot(tl.trans(dpx.to(kind)), p, dl, input_precision=PRECISION)
    dl = tl.where(row > col, dl, 0.0).to(kind)
    dleft = tl.dot(tl.trans(dg), key, unsolved, input_precision=PRECISION)
    dleft = tl.dot(dl, right, dleft, input_precision=PRECISION)
    store_tile(da, dleft, first, rows, columns, head, H, D, C)

    dright = tl.dot(xa, whole, input_precision=PRECISION)
    dright = tl.dot(tl.trans(p), dlast, dright, input_precision=PRECISION)
    dright = tl.dot(tl.trans(ds), query, dright, input_precision=PRECISION)
    dright = tl.dot(tl.trans(dl), left, dright, input_precision=PRECISION)
    store_tile(db, dright, first, rows, columns, head, H, D, C)
