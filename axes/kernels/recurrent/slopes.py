"""What the walk back multiplies gradients by, of all tokens at once, device side: `cells.slopes`."""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.recurrent import cells
from axes.kernels.recurrent.words import word, word_first


@triton.jit
def _of(x, g, V: tl.constexpr, mask, G: tl.constexpr):
    return tl.load(x + g * V, mask=mask & (g < G), other=0.0).to(tl.float32)


@Kernel
@triton.jit(do_not_specialize=["N"])
def slopes(
    x, us, b, hs, ys, es, dout, words, N, H,
    V: tl.constexpr, G: tl.constexpr, BR: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """x (N, H, G, V), us (H, N, G, V) of W h alone, the rest (N, H, V); words (N, H, 2, V)."""
    token, head = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None], tl.program_id(1)
    c = tl.arange(0, V)[None, :]
    mask = (token < N) & (c < V)
    row = token * H + head
    mine, its = x + row * (G * V) + c, us + (head.to(tl.int64) * N + token) * (G * V) + c
    line = b + head * (G * V) + c
    there = c < V
    x0, x1 = _of(mine, 0, V, mask, G), _of(mine, 1, V, mask, G)
    x2, x3 = _of(mine, 2, V, mask, G), _of(mine, 3, V, mask, G)
    u0 = _of(its, 0, V, mask, G) + _of(line, 0, V, there, G)
    u1 = _of(its, 1, V, mask, G) + _of(line, 1, V, there, G)
    u2 = _of(its, 2, V, mask, G) + _of(line, 2, V, there, G)
    u3 = _of(its, 3, V, mask, G) + _of(line, 3, V, there, G)
    place = row * V + c
    y = tl.load((hs if G == 3 else ys) + place, mask=mask, other=0.0).to(tl.float32)
    e = tl.load(es + place, mask=mask & (G == 4), other=0.0)
    heard = tl.load(dout + place, mask=mask, other=0.0)
    p2 = x2 if CELL == "gru" else x2 + u2
    a0, a1, a2, a3, rate, shows = cells.slopes(x0 + u0, x1 + u1, p2, x3 + u3, u2, y, e, CELL)
    kind = dout.dtype.element_ty
    to = words + row * (2 * V) + c
    tl.store(to, word(a0.to(kind), a1.to(kind), a2.to(kind), a3.to(kind)), mask=mask)
    tl.store(to + V, word_first(rate, heard, shows.to(kind)), mask=mask)
