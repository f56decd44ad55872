"""(I + L)^-1 of a strictly lower 64 x 64 L by one warpgroup, in Gluon: the form on Hopper of `common.inverse`.

Forward substitution in blocks of 16, then blocks of twice the side from products to 16 bits. Block diagonal matrices
with blocks of a side s are kept stacked: (C, s), row i the i-th row of its own block.
"""

from __future__ import annotations

from axes.kernels.common.gluon import fence_async_shared, gl, gluon, reinterpret, warpgroup_mma, warpgroup_mma_wait
from axes.kernels.common.warpgroup import left_layout, product_layout, times

_C = gl.constexpr(64)  # tokens of a chunk: the side of the matrix
_TILE = gl.constexpr(16)  # rows of a diagonal block inverted by substitution


@gluon.jit
def inverse(lower):
    """(I + lower)^-1, lower and result in the layout of a product."""
    x = _substitute(lower)
    x = _double(lower, x, 16)
    return _double(lower, x, 32)


@gluon.jit
def _parts(x, SIDE: gl.constexpr):
    """The even column blocks of (C, C): columns 0..15 and 32..47 by 16; columns 0..31, twice, by 32."""
    x = gl.reshape(x, [_C, _C // (2 * SIDE), 2, SIDE])
    even, _ = gl.split(gl.permute(x, (0, 1, 3, 2)))
    if SIDE == 32:
        first = gl.reshape(even, [_C, SIDE])
        second = first
    else:
        first, second = gl.split(gl.permute(even, (0, 2, 1)))
    return first, second


@gluon.jit
def _halves(x):
    """float32 as a sum of two bfloat16, to 16 bits. The first is cut, not rounded: one instruction."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def _share(x, SIDE: gl.constexpr):
    """(C, SIDE) float32 into shared memory, in halves."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_C, SIDE], gl.bfloat16)
    high, low = _halves(x)
    high = gl.allocate_shared_memory(gl.bfloat16, [_C, SIDE], layout, high)
    low = gl.allocate_shared_memory(gl.bfloat16, [_C, SIDE], layout, low)
    fence_async_shared()
    return high, low


@gluon.jit
def _exact(a, b_high, b_low, SIDE: gl.constexpr):
    """a b to 16 bits, a (C, SIDE) in registers, b (SIDE, SIDE) in halves: three products, started."""
    a_high, a_low = _halves(gl.convert_layout(a, left_layout(SIDE)))
    out = times(a_high, b_low, SIDE)
    out = warpgroup_mma(a_low, b_high, out, is_async=True)
    return warpgroup_mma(a_high, b_high, out, is_async=True)


@gluon.jit
def _substitute(lower):
    """Inverses of the 16 x 16 diagonal blocks of I + lower, stacked. A thread owns a column of one block."""
    B: gl.constexpr = _C // _TILE
    own: gl.constexpr = gl.BlockedLayout([1, _TILE, 1], [2, 1, 16], [4, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    i = gl.arange(0, _C, layout=gl.SliceLayout(1, product_layout(_C)))[:, None]
    j = gl.arange(0, _C, layout=gl.SliceLayout(0, product_layout(_C)))[None, :]
    blocks = gl.where(i // _TILE == j // _TILE, lower, -0.0)
    blocks = gl.sum(gl.reshape(blocks, [_C, B, _TILE]), axis=1)
    columns = gl.allocate_shared_memory(gl.float32, [_TILE, _C], flat, gl.permute(blocks, (1, 0)))
    columns = reinterpret(columns, gl.float32, [_TILE, B, _TILE], flat)
    row = gl.arange(0, _TILE, layout=gl.SliceLayout(0, gl.SliceLayout(2, own)))[None, :, None]
    col = gl.arange(0, _TILE, layout=gl.SliceLayout(0, gl.SliceLayout(1, own)))[None, None, :]
    x = gl.where(row == col, 1.0, 0.0) + gl.zeros([B, _TILE, _TILE], gl.float32, own)
    for n in gl.static_range(_TILE - 1):
        column = columns.index(n).load(gl.SliceLayout(2, own))
        line = gl.sum(gl.where(row == n, x, -0.0), axis=1)  # -0.0: the sum of one number is that number, and free
        x = x - column[:, :, None] * line[:, None, :]
    return gl.convert_layout(gl.reshape(x, [_C, _TILE]), product_layout(_TILE))


@gluon.jit
def _double(lower, x, SIDE: gl.constexpr):
    """Stacked inverses of diagonal blocks of side SIDE to those of twice the side: the new quarter is -X2 L21 X1.

    Products are of all rows; only those of the second block of each pair mean something.
    """
    half: gl.constexpr = _C // 2
    row = gl.arange(0, _C, layout=gl.SliceLayout(1, product_layout(SIDE)))[:, None]
    first, second = _parts(lower, SIDE)
    high, low = _share(x, SIDE)
    inner = _exact(first, high.slice(0, SIDE), low.slice(0, SIDE), SIDE)
    if SIDE == 16:
        other = _exact(second, high.slice(half, SIDE), low.slice(half, SIDE), SIDE)
        inner, other = warpgroup_mma_wait(0, [inner, other])
        inner = gl.where(row < half, inner, other)
    else:
        inner = warpgroup_mma_wait(0, [inner])
    high, low = _share(inner, SIDE)
    cross = _exact(x, high.slice(SIDE, SIDE), low.slice(SIDE, SIDE), SIDE)
    if SIDE == 16:
        other = _exact(x, high.slice(half + SIDE, SIDE), low.slice(half + SIDE, SIDE), SIDE)
        cross, other = warpgroup_mma_wait(0, [cross, other])
        cross = gl.where(row < half, cross, other)
    else:
        cross = warpgroup_mma_wait(0, [cross])
    odd = row // SIDE % 2 == 1
    both = gl.join(gl.where(odd, -cross, x), gl.where(odd, x, 0.0))
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 2, 1)), [_C, 2 * SIDE]), product_layout(2 * SIDE))
