"""Device side of the Hopper kernels, in Gluon: a warpgroup's products of 64 rows, and how warps meet.

Chunks have 64 tokens and a warpgroup's product 64 rows. A warp that copies, a warpgroup that multiplies and one that
writes meet at barriers in shared memory: one thread arrives for all of its warps, after all of them are done.
"""

from __future__ import annotations

import triton.language as tl

from axes.kernels.common.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
)

_ALL = gl.constexpr(tl.PropagateNan.ALL)
ROWS = gl.constexpr(64)  # of a warpgroup's product


# ---- products --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def product_layout(n):
    """Layout of a 64 x n product of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def left_layout(n):
    """Layout of a left operand in registers: what a product leaves, rounded to 16 bit, is one without moving."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(n), k_width=2)


@gluon.jit
def times(a, b, N: gl.constexpr):
    """a (64, .) times b (., N), started: wait for it before it is read. b lies in shared memory."""
    zero = gl.zeros([ROWS, N], gl.float32, product_layout(N))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def floored(log):
    """`tiles.floored`: a log gate held from below, a NaN stays one."""
    return gl.maximum(log, -100.0, propagate_nan=_ALL)


@gluon.jit
def apart(strength):
    """`tiles.apart`: a strength held away from zero, by which others are divided."""
    return gl.where(gl.abs(strength) < 5.9604644775390625e-08, 5.9604644775390625e-08, strength)


# ---- meetings --------------------------------------------------------------------------------------------------------


@gluon.jit
def published():
    """From here on every warp, the matrix unit and copies see the tiles that these warps wrote."""
    fence_async_shared()
    barrier()


@gluon.jit
def arrive(bar):
    """All threads of these warps are done with what the barrier guards."""
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def retire(bar):
    """The end of a barrier, or of a stack of them, after which other data may lie where it was.

    Without it the compiler gives the memory of a barrier away after its last use, and at once if it has none. What the
    processor keeps of the barrier is then written into that data: rarely, and where programs share the device.
    """
    if bar.rank == 1:
        mbarrier.invalidate(bar)
    else:
        STAGES: gl.constexpr = bar.shape[0]
        for stage in gl.static_range(STAGES):
            mbarrier.invalidate(bar.index(stage))


# ---- small things ----------------------------------------------------------------------------------------------------


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b


@gluon.jit
def segment(unit, S, L):
    """Of a unit, one of S segments of L tokens: its batch entry and its first token there."""
    entry = unit // S
    return entry, (unit - entry * S) * L
