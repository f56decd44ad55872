"""The place of a response in the text of `passes`: the delta rule u = r (v - x), as a program would be generated.

`axes.programs.rows` writes functions of these names for any response; `chain` puts their text in the place of an import
of this module, and `ask` behind it. Inputs of a token are rows (tokens, H, V) or numbers (tokens, H).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inputs(p0, p1, p2, p3, p4, p5, p6, p7, at, v, V, there, inside):
    """The inputs of one token, row `at` of (tokens H)."""
    return (
        tl.load(p0 + at * V + v, mask=inside & there, other=0.0).to(tl.float32),
        tl.load(p1 + at, mask=there, other=0.0).to(tl.float32),
    )


@triton.jit
def respond(x, k2, i0, i1, i2, i3, i4, i5, i6, i7, inside):
    """u of one token, from what its key of length sqrt(k2) reads."""
    return i1 * (i0 - x)


@triton.jit
def turned(x, k2, g, i0, i1, i2, i3, i4, i5, i6, i7, inside):
    """The derivative in x of <u, g>."""
    return -i1 * g


@triton.jit
def pull(
    x, k2, g, p0, p1, p2, p3, p4, p5, p6, p7, d0, d1, d2, d3, d4, d5, d6, d7, at, v, V: tl.constexpr, there, inside
):
    """(u, derivative in x, in k2) of a tile of tokens `at` (C,); those in inputs are stored."""
    i0 = tl.load(p0 + at[:, None] * V + v[None, :], mask=inside & there[:, None], other=0.0).to(tl.float32)
    i1 = tl.load(p1 + at, mask=there, other=0.0).to(tl.float32)[:, None]
    u = i1 * (i0 - x)
    tl.store(d0 + at[:, None] * V + v[None, :], (i1 * g).to(d0.dtype.element_ty), mask=inside & there[:, None])
    tl.store(d1 + at, tl.sum(tl.where(inside, g * (i0 - x), 0.0), 1), mask=there)
    return u, -i1 * g, k2 * 0.0


@triton.jit
def beside(x, k2, g, i0, i1, i2, i3, i4, i5, i6, i7):
    """(u, derivatives in x and in every input, what they give to that in k2), entry by entry: where inputs are rows
    that do not meet, as i1 would have to be."""
    return i1 * (i0 - x), -i1 * g, i1 * g, g * (i0 - x), x * 0.0


@triton.jit
def stride(n2, k2, i0, i1, i2, i3, i4, i5, i6, i7):
    """c of u = c (x - v), of an error of squared length n2: where a response is such a number times an error."""
    return n2 * 0.0 - i1


@triton.jit
def bends(n2, k2, i0, i1, i2, i3, i4, i5, i6, i7):
    """(a, b) of w = a g + b (e . g) e, the derivative in x of <u, g>."""
    return n2 * 0.0 - i1, n2 * 0.0


@triton.jit
def tolls(n2, z, k2, i0, i1, i2, i3, i4, i5, i6, i7):
    """Derivatives of <u, g> in k2 and in every input that is a number, of z = e . g."""
    return n2 * 0.0, n2 * 0.0 - z


# ---- of any response -------------------------------------------------------------------------------------------------


@triton.jit
def ask(x, k2, y, given, inside, BACK: tl.constexpr):
    """u of the tokens of a block, (BV, 16), or what their x is asked for by y (BACK). One token after another asks for
    all of them, since a tile stays where products leave it: of others than its own, compilers leave out what they can.
    """
    COUNT: tl.constexpr = len(given)
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
    return tl.broadcast_to(made, x.shape)
