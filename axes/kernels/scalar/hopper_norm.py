"""The state's column of a value that is the number one, n, carried beside the chain of `hopper_write` by those who make
its scores: of outputs that are means (`axes.kernels.scalar.mean`)."""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.gluon import gl, gluon, warpgroup_mma
from axes.kernels.common.warpgroup import ROWS


@triton.jit
def parted(strength):
    """Sign and digits of a strength, from 1 to 2 in size, and its power of two, 0 of a zero."""
    bits = strength.to(tl.int32, bitcast=True)
    digits = ((bits & -2139095041) | 0x3F800000).to(tl.float32, bitcast=True)
    return digits, (bits & 0x7F800000).to(tl.float32, bitcast=True)


@gluon.constexpr_function
def _narrow():
    """Layout of products with eight columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])


# Weights have two 16-bit parts, what they round to and what that leaves, and n is the sum of what each makes: columns 0
# and 1, and once more 2 and 3, since of n as an operand the same two parts are taken, one of each pair of columns.


@gluon.jit
def first_norm(norms, A: gl.constexpr):
    """n (A,) in the columns of a product."""
    layout: gl.constexpr = _narrow()
    d = gl.arange(0, A, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    n = gl.load(norms[0] + gl.program_id(0) * A + d)
    return gl.where((column == 0) | (column == 2), n[:, None], 0.0)


@gluon.jit
def last_norm(norm, norms, A: gl.constexpr):
    layout: gl.constexpr = _narrow()
    d = gl.arange(0, A, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(norms[1] + gl.program_id(0) * A + d, gl.sum(gl.where(column < 2, norm, 0.0), 1))


@gluon.jit
def put_norm(norm, tile):
    """n as an operand; `published` has to follow."""
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, _narrow()))[None, :]
    high = norm.to(tile.dtype)
    low = norm - high.to(gl.float32)
    tile.permute((1, 0)).store(gl.where(column < 2, high.to(gl.float32), gl.where(column < 4, low, 0.0)).to(tile.dtype))


@gluon.jit
def put_weights(number, tile, KIND: gl.constexpr):
    """What a chunk's keys weigh in n behind it, as an operand; `published` has to follow."""
    GATED: gl.constexpr = KIND[1]
    WEIGHTED: gl.constexpr = KIND[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    across: gl.constexpr = gl.SliceLayout(0, layout)
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))[:, None]
    if GATED:
        weight = number.index(1).load(across)
        if WEIGHTED:
            weight = weight * number.index(3).load(across)
    elif WEIGHTED:
        weight = number.index(3).load(across)
    else:
        weight = gl.full([ROWS], 1.0, gl.float32, across)
    high = weight.to(tile.dtype).to(gl.float32)
    part = gl.where((row & 1) == 0, high[None, :], (weight - high)[None, :])
    tile.store(gl.where(row < 4, part, 0.0).to(tile.dtype))


@gluon.jit
def find_in(x, tile):
    """What queries find in n, started: its sum over columns."""
    zero = gl.zeros([ROWS, 8], gl.float32, _narrow())
    return warpgroup_mma(x, tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def add_keys(norm, y, tile, number, GATED: gl.constexpr):
    """n behind a chunk, started."""
    if GATED:
        norm = norm * number.index(0).slice(ROWS - 1, 1).load(gl.SliceLayout(0, _narrow()))[None, :]
    return warpgroup_mma(y.permute((1, 0)), tile.permute((1, 0)), norm, is_async=True)
