"""Symmetric products on Hopper: the mathematics of `symmetric`, products of whole warpgroups, in Gluon.

A program goes through tiles of the lower triangles, two programs to a processor. One warp brings slices of A and B, and
after them the tiles of D and E, into a ring of shared memory, ahead of the warpgroup that multiplies; the last place of
a tile in the ring is where the tile is put together, and a third warp carries it off to both sides of the diagonal.
float32 matrices are rounded to 11 bits, as tensor cores take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from axes.kernels.common.bulk import batch_tiles
from axes.kernels.common.gluon import (
    async_load,
    async_store,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv
from axes.kernels.common.versions import hopper_refusal
from axes.kernels.common.warpgroup import arrive, published, retire

_TILE = gl.constexpr(128)  # sides of a tile of C
_SLICE = gl.constexpr(128)  # bytes of a row of a slice
_STAGES = gl.constexpr(3)
_PROGRAMS = 2  # a processor: one puts a tile together while the other multiplies
_REGISTERS = 128  # a thread at launch; the warps that copy keep 24 and the warpgroup gets the rest


# ---- pieces --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _layout(bits):
    """Of a tile of C in one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 256 // bits])


@gluon.constexpr_function
def _places(terms, direct):
    """In the ring, for each tile beyond its slices."""
    return 0 if direct else max(terms, 1)


@gluon.jit
def _tile(index, tiles):
    """Matrix, first row and first column of a tile, rows >= columns, counted by rows of a lower triangle."""
    t = index % tiles
    i = ((gl.sqrt_rn(8.0 * t.to(gl.float32) + 1.0) - 1.0) * 0.5).to(gl.int32)
    if i * (i + 1) // 2 > t:
        i = i - 1
    if (i + 1) * (i + 2) // 2 <= t:
        i = i + 1
    return index // tiles, i * _TILE, (t - i * (i + 1) // 2) * _TILE


@gluon.jit
def _term(squares, stage, DTYPE: gl.constexpr):
    """A place in the ring as a tile."""
    return reinterpret(squares.index(stage), DTYPE, [1, _TILE, _TILE], squares.layout).reshape([_TILE, _TILE])


# ---- the warps -----------------------------------------------------------------------------------------------------


@gluon.jit
def _feed(
    sources, slices, squares, filled, freed, K, tiles, total,
    TERMS: gl.constexpr, COLUMNS: gl.constexpr, SAME: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """One warp: slices and terms into the ring."""
    left, right, first, second = sources
    DEPTH: gl.constexpr = 8 * _SLICE // slices.dtype.primitive_bitwidth
    count = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, row, col = _tile(index, tiles)
        alike = SAME and row == col  # the slices of A and B are the same
        for k in range(0, K, DEPTH):
            stage = count % _STAGES
            bar = filled.index(stage)
            mbarrier.wait(freed.index(stage), (count // _STAGES & 1) ^ 1)
            if alike:
                mbarrier.expect(bar, _TILE * _SLICE)
            else:
                mbarrier.expect(bar, 2 * _TILE * _SLICE)
            if COLUMNS:
                async_load(left, [batch, k, row], bar, slices.index(2 * stage))
                async_load(right, [batch, k, col], bar, slices.index(2 * stage + 1), not alike)
            else:
                async_load(left, [batch, row, k], bar, slices.index(2 * stage))
                async_load(right, [batch, col, k], bar, slices.index(2 * stage + 1), not alike)
            count += 1
        for place in gl.static_range(_places(TERMS, DIRECT)):
            stage = count % _STAGES
            bar = filled.index(stage)
            mbarrier.wait(freed.index(stage), (count // _STAGES & 1) ^ 1)
            if place < TERMS:
                mbarrier.expect(bar, 2 * _TILE * _TILE)
                if place == 0:
                    async_load(first, [batch, row, col], bar, squares.index(stage))
                else:
                    async_load(second, [batch, row, col], bar, squares.index(stage))
            else:
                mbarrier.arrive(bar, count=1)
            count += 1


@gluon.jit
def _multiply(
    slices, squares, bars, first, second, to, factors, m, K, tiles, total, numbers,
    TERMS: gl.constexpr, COLUMNS: gl.constexpr, SAME: gl.constexpr, DIRECT: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the products and sums of a tile."""
    filled, freed, done, left = bars
    DEPTH: gl.constexpr = 8 * _SLICE // slices.dtype.primitive_bitwidth
    BITS: gl.constexpr = slices.dtype.primitive_bitwidth
    layout: gl.constexpr = _layout(BITS)
    i = gl.arange(0, _TILE, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, _TILE, gl.SliceLayout(0, layout))[None, :]
    count = 0
    turned = 0  # tiles that left to both sides
    made = 0  # times that a tile was put together
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, row, col = _tile(index, tiles)
        other = gl.where(SAME and row == col, 0, 1)
        alpha, beta, gamma, delta = numbers
        if FACTORS:
            alpha *= gl.load(factors + 2 * batch)
            beta *= gl.load(factors + 2 * batch + 1)
        sums = gl.zeros([_TILE, _TILE], gl.float32, layout)
        for k in range(0, K, DEPTH):
            stage = count % _STAGES
            mbarrier.wait(filled.index(stage), count // _STAGES & 1)
            if COLUMNS:
                a = slices.index(2 * stage).reshape([DEPTH, _TILE]).permute((1, 0))
                b = slices.index(2 * stage + other).reshape([DEPTH, _TILE])
            else:
                a = slices.index(2 * stage).reshape([_TILE, DEPTH])
                b = slices.index(2 * stage + other).reshape([_TILE, DEPTH]).permute((1, 0))
            sums = warpgroup_mma(a, b, sums, is_async=True)
            sums = warpgroup_mma_wait(1, [sums])
            if k > 0:
                arrive(freed.index((count - 1) % _STAGES))
            count += 1
        sums = warpgroup_mma_wait(0, [sums]) * alpha
        arrive(freed.index((count - 1) % _STAGES))
        if DIRECT:
            x = row + i
            y = col + j
            base = batch.to(gl.int64) * m * m
            at = base + x.to(gl.int64) * m + y
            lower = (x >= y) & (x < m)
            if TERMS > 0:
                sums += beta * gl.load(first + at, mask=lower & (beta != 0.0), other=0.0).to(gl.float32)
            if TERMS > 1:
                sums += gamma * gl.load(second + at, mask=lower, other=0.0).to(gl.float32)
            out = gl.where(x == y, sums + delta, sums).to(to.dtype.element_ty)
            gl.store(to + at, out, mask=lower)
            gl.store(to + (base + y.to(gl.int64) * m + x), out, mask=lower & (x > y))
        else:
            if TERMS > 0:
                stage = count % _STAGES
                mbarrier.wait(filled.index(stage), count // _STAGES & 1)
                term = beta * _term(squares, stage, first.dtype).load(layout).to(gl.float32)
                sums += gl.where(beta == 0.0, 0.0, term)
            if TERMS > 1:
                fence_async_shared()  # the copy that comes next writes where this tile was read
                arrive(freed.index(count % _STAGES))
                count += 1
                stage = count % _STAGES
                mbarrier.wait(filled.index(stage), count // _STAGES & 1)
                sums += gamma * _term(squares, stage, second.dtype).load(layout).to(gl.float32)
            stage = count % _STAGES
            if TERMS == 0:
                mbarrier.wait(filled.index(stage), count // _STAGES & 1)
            count += 1
            tile = _term(squares, stage, squares.dtype)
            barrier()
            if row == col:
                out = gl.where(i == j, sums + delta, sums).to(squares.dtype)
                tile.store(out)
                barrier()
                out = gl.where(i >= j, out, tile.permute((1, 0)).load(layout))
                barrier()
                tile.store(out)
            else:
                out = sums.to(squares.dtype)
                tile.store(out)
                fence_async_shared()
                arrive(done.index(made % 2))
                made += 1
                mbarrier.wait(left, turned & 1)
                turned += 1
                tile.permute((1, 0)).store(out)
            fence_async_shared()
            arrive(done.index(made % 2))
            made += 1


@gluon.jit
def _carry(to, squares, bars, K, tiles, total, TERMS: gl.constexpr, DIRECT: gl.constexpr, DEPTH: gl.constexpr):
    """One warp: tiles out of the ring, to both sides of the diagonal."""
    filled, freed, done, left = bars
    count = -1
    sent = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        if not DIRECT:
            batch, row, col = _tile(index, tiles)
            count += (K + DEPTH - 1) // DEPTH + _places(TERMS, DIRECT)
            stage = count % _STAGES
            mbarrier.wait(done.index(sent % 2), sent // 2 & 1)
            sent += 1
            async_store(to, [batch, row, col], squares.index(stage))
            store_wait(0)
            if row != col:
                arrive(left)
                mbarrier.wait(done.index(sent % 2), sent // 2 & 1)
                sent += 1
                async_store(to, [batch, col, row], squares.index(stage))
                store_wait(0)
            arrive(freed.index(stage))


@Kernel
@gluon.jit(do_not_specialize=["m", "K", "tiles", "total"])
def _symmetric(
    left, right, first, second, to, factors, m, K, tiles, total, alpha, beta, gamma, delta,
    TERMS: gl.constexpr, COLUMNS: gl.constexpr, SAME: gl.constexpr, DIRECT: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """Tiles of C, to where it goes. DIRECT: C, D and E are addresses, not tiles for bulk copies."""
    DTYPE: gl.constexpr = left.dtype
    DEPTH: gl.constexpr = 8 * _SLICE // DTYPE.primitive_bitwidth
    HIGH: gl.constexpr = DEPTH if COLUMNS else _TILE
    WIDTH: gl.constexpr = _TILE if COLUMNS else DEPTH
    slices = gl.allocate_shared_memory(DTYPE, [2 * _STAGES, 1, HIGH, WIDTH], left.layout)
    squares = slices
    if not DIRECT:
        squares = reinterpret(slices, to.dtype, [_STAGES, 1, _TILE, _TILE], to.layout)
    filled = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    # a tile is together: two, as the next one may be before it was seen
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # and has left to one side
    for stage in gl.static_range(_STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=1)
    for place in gl.static_range(2):
        mbarrier.init(done.index(place), count=1)
    mbarrier.init(turn, count=1)
    published()
    sources = (left, right, first, second)
    bars = (filled, freed, done, turn)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    slices, squares, bars, first, second, to, factors, m, K, tiles, total,
                    (alpha, beta, gamma, delta), TERMS, COLUMNS, SAME, DIRECT, FACTORS,
                ),
            ),
            (_feed, (sources, slices, squares, filled, freed, K, tiles, total, TERMS, COLUMNS, SAME, DIRECT)),
            (_carry, (to, squares, bars, K, tiles, total, TERMS, DIRECT, DEPTH)),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
    retire(filled)
    retire(freed)
    retire(done)
    retire(turn)


# ---- launches ------------------------------------------------------------------------------------------------------


def fits(a: Tensor) -> bool:
    """Whether `launch` multiplies a: 16 bits, or float32 by rows, not empty, on a Hopper processor."""
    if not a.shape[-1]:
        return False
    if a.dtype not in (torch.bfloat16, torch.float16) and not (a.dtype == torch.float32 and a.stride(-1) == 1):
        return False
    return hopper_refusal(a.device) is None


@lru_cache
def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def launch(
    a: Tensor,
    b: Tensor | None,
    c: Tensor,
    alpha: float,
    terms: Sequence[tuple[float, Tensor]],
    diagonal: float,
    factors: Tensor | None,
) -> None:
    """C, given as `symmetric.symmetric_product` has checked it."""
    n, m, k = a.shape
    columns = a.stride(-1) != 1
    depth = _SLICE.value // a.element_size()
    slices = (depth, _TILE.value) if columns else (_TILE.value, depth)
    left, right = (batch_tiles(x.mT if columns else x, *slices) for x in (a, a if b is None else b))
    first, second = ([x for _, x in terms] + [c, c])[:2]
    beta, gamma = ([x for x, _ in terms] + [0.0, 0.0])[:2]
    direct = any(x.element_size() != 2 for x in (a, c, first, second))
    places = (first, second, c) if direct else (batch_tiles(x, _TILE.value, _TILE.value) for x in (first, second, c))
    side = cdiv(m, _TILE.value)
    tiles = side * (side + 1) // 2
    programs = min(n * tiles, _PROGRAMS * _processors(a.device))
    _symmetric[(programs,)](
        left, right, *places, c if factors is None else factors, m, k, tiles, n * tiles,
        float(alpha), float(beta), float(gamma), float(diagonal), TERMS=len(terms), COLUMNS=columns,
        SAME=b is None or b is a, DIRECT=direct, FACTORS=factors is not None, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
