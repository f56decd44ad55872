"""Decays of one number a channel in a chunk, device side: cumulative logs, decayed pair products and their gradients.

A pair of tokens i >= j in a chunk meets as P_ij = sum_c x_ic y_jc exp(R_ic - G_jc), with G the inclusive cumulative log
gate of every channel and R the reader's: G, or with EARLY the exclusive E (a reader before its own gate). Splitting the
exponential between x and y lets a matrix product form P; it must not overflow for any gates. With X = G - G_middle:
    flat:  |X| <= bound everywhere       P = (x e^X) (y e^-X)^T                     one product
    else:  late rows of a block read early ones through the middle, P = (x e^-|X|) (y e^-|X|)^T for those pairs, both
           exponents <= 0, and each half is a block of its own                      one product a halving
Blocks start as the chunk and end, at the latest, as single rows, so that the form is exact for any gates and costs one
exponential a number when they are mild. bfloat16 and float32 lose nothing to e^X: the rounding is relative.
X is never a difference of cumulative sums: it is a product of a matrix of 0, 1, -1 with the logs, which are split into
bfloat16 summands, so that closed gates (-100 a token) do not eat the digits of open ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common.layout import interpreted
from axes.kernels.common.tiles import WHOLE, complement, floored, load_tile
from axes.kernels.scalar.sizes import form


def exponents(q: Tensor, g: Tensor) -> dict[str, int | float]:
    """PARTS of the logs g and the BOUND of a flat block's exponents for tokens of q's dtype: kernel constants."""
    kind = form(q.dtype, q.shape[3])
    bound = 3.0 if q.dtype == torch.float16 else 40.0  # float16 has few exponents, the others 2^127
    if kind == "pieces":
        bound = 20.0  # the least of three pieces is 2^-24 of a number, and bfloat16 ends at 2^-133
    if kind == "ieee" or interpreted():  # the interpreter multiplies bit patterns of bfloat16
        return {"PARTS": 0, "BOUND": bound}
    return {"PARTS": 3 if kind == "pieces" else 1 if g.dtype == torch.bfloat16 else 2, "BOUND": bound}


def sums(parts: float) -> int:
    """Summands for sums of gradients over tokens, beside logs in so many PARTS."""
    return 2 if parts == 1 else int(parts)


# ---- logs and their sums ---------------------------------------------------------------------------------------------


@triton.jit
def load_logs(g, first, rows, columns, head, H, D: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr = WHOLE):
    """`load_tile` of log gates: float32, floored at -100."""
    return floored(load_tile(g, first, rows, columns, head, H, D, C, KEPT).to(tl.float32))


@triton.jit
def _rounded(x):
    """x to eight bits, as float32: a half rounds away from zero. Conversions would be slower than these integers.

    They carry the NaN that a GPU computes, all ones, over into -0.
    """
    return ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _short(x):
    """bfloat16 of what `_rounded` gave, exactly."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def split(log, PARTS: tl.constexpr):
    """bfloat16 summands of a float32 tile: 1 holds bfloat16 logs, 2 leave a relative error of 2^-18, 3 none.

    PARTS = 0 leaves float32, for products that are IEEE (float32 tokens with many keys, the interpreter).
    """
    if PARTS == 0:
        high, middle, low = log, log, log
    else:
        kept = tl.where(log == log, _rounded(log), log)  # a NaN stays one
        rest = _rounded(log - kept)
        high, middle, low = _short(kept), _short(rest), _short(_rounded(log - kept - rest))
    return high, middle, low


@triton.jit
def power(x):
    """e^x in two instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def written(keys, log, AVERAGE: tl.constexpr):
    """Keys as they are written; AVERAGE: each entry by what its gate forgets."""
    if AVERAGE:
        keys = (keys * complement(log)).to(keys.dtype)
    return keys


@triton.jit
def add_up(which, high, middle, low, PARTS: tl.constexpr):
    """which (C, C) times the tile that was split: sums over tokens, float32. which holds 0, 1 and -1."""
    if PARTS == 0:
        out = tl.dot(which.to(tl.float32), high, input_precision="ieee")
    else:
        chosen = which.to(tl.bfloat16)
        if PARTS >= 3:  # the least first: the matrix units cut off what their sum does not hold
            out = tl.dot(chosen, high, tl.dot(chosen, middle, tl.dot(chosen, low)))
        else:
            out = tl.dot(chosen, high)
            if PARTS == 2:
                out = tl.dot(chosen, middle, out)
    return out


@triton.jit
def until(high, middle, low, C: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr):
    """G_i, the logs of tokens 0..i; with EARLY E_i, those of 0..i-1."""
    i = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    if EARLY:
        which = t < i
    else:
        which = t <= i
    return add_up(which, high, middle, low, PARTS)


@triton.jit
def after(high, middle, low, C: tl.constexpr, PARTS: tl.constexpr):
    """G_last - G_i, the logs of the tokens after i."""
    i = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    return add_up(t > i, high, middle, low, PARTS)


@triton.jit
def from_middle(high, middle, low, size, C: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr):
    """R_i - G at the last row of the early half of i's block of `size` rows: <= 0 in the late half, >= 0 before."""
    i = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    centre = i // size * size + tl.maximum(size // 2, 1) - 1
    if EARLY:
        which = tl.where((t > centre) & (t < i), 1.0, 0.0) - tl.where((t >= i) & (t <= centre), 1.0, 0.0)
    else:
        which = tl.where((t > centre) & (t <= i), 1.0, 0.0) - tl.where((t > i) & (t <= centre), 1.0, 0.0)
    return add_up(which, high, middle, low, PARTS)


# ---- decayed pairs ---------------------------------------------------------------------------------------------------


@triton.jit
def largest(x):
    """The largest absolute value of a tile."""
    return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit
def halves(x, flat, SIGN: tl.constexpr):
    """exp of SIGN x in a flat block, else of -|x|."""
    return power(tl.where(flat, SIGN * x, -tl.abs(x)))


@triton.jit
def met(size, flat, C: tl.constexpr, STRICT: tl.constexpr):
    """Pairs (i, j) that blocks of `size` rows settle: all i >= j (or >) of a flat one, else late rows with early."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    same = i // size == j // size
    half = tl.maximum(size // 2, 1)
    keep = tl.where(flat, same, same & (i // half != j // half))
    if STRICT:
        keep = keep & (i > j)
    else:
        keep = keep & (i >= j)
    return keep


@triton.jit
def factors(high, middle, low, size, C: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr, BOUND: tl.constexpr):
    """What readers and writers are multiplied by at blocks of `size` rows, and whether those are flat.

    Share it among products of the same gates: `while size > 0: r, w, flat = factors(...); keep = met(...);
    p += where(keep, (x r) (y w)^T, 0); size = tl.where(flat, 0, size // 2)` from size = C.
    """
    x = from_middle(high, middle, low, size, C, False, PARTS)
    if EARLY:
        e = from_middle(high, middle, low, size, C, True, PARTS)
        flat = tl.maximum(largest(x), largest(e)) <= BOUND
        reader = halves(e, flat, 1.0)
    else:
        flat = largest(x) <= BOUND
        reader = halves(x, flat, 1.0)
    return reader, halves(x, flat, -1.0), flat


@triton.jit
def pairs(
    x, y, high, middle, low,
    C: tl.constexpr, STRICT: tl.constexpr, EARLY: tl.constexpr,
    PARTS: tl.constexpr, BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P_ij = sum_c x_ic y_jc exp(R_ic - G_jc) for i >= j (i > j if STRICT), else 0: (C, C) float32 of (C, BK) tiles.

    EARLY goes with STRICT: nobody reads its own write before its own gate.
    """
    out = tl.zeros([C, C], dtype=tl.float32)
    size = tl.full([], C, tl.int32)
    while size > 0:
        reader, writer, flat = factors(high, middle, low, size, C, EARLY, PARTS, BOUND)
        left = (x * reader).to(x.dtype)
        right = (y * writer).to(y.dtype)
        product = tl.dot(left, tl.trans(right), input_precision=PRECISION)
        out += tl.where(met(size, flat, C, STRICT), product, 0.0)
        size = tl.where(flat, 0, size // 2)
    return out


@triton.jit
def pairs_backward(
    x, y, dp, high, middle, low,
    C: tl.constexpr, STRICT: tl.constexpr, EARLY: tl.constexpr,
    PARTS: tl.constexpr, BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients (dx, dy) of `pairs`, float32, from dp (C, C) float32, whose upper part is not read.

    The gates': dG_ic = x dx - y dy, summed over all products (for EARLY readers x dx belongs to E_i = G_{i-1}).
    """
    dx = tl.zeros(x.shape, dtype=tl.float32)
    dy = tl.zeros(y.shape, dtype=tl.float32)
    size = tl.full([], C, tl.int32)
    while size > 0:
        reader, writer, flat = factors(high, middle, low, size, C, EARLY, PARTS, BOUND)
        kept = tl.where(met(size, flat, C, STRICT), dp, 0.0).to(x.dtype)
        dx += reader * tl.dot(kept, (y * writer).to(y.dtype), input_precision=PRECISION)
        dy += writer * tl.dot(tl.trans(kept), (x * reader).to(x.dtype), input_precision=PRECISION)
        size = tl.where(flat, 0, size // 2)
    return dx, dy
