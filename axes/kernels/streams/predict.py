"""What tokens predict of their streams: products with phi and moments, and the entries and pre that are made of them.

    entries = a * f(u s) + b,   u = X^ phi^T,   s = (mean X^2 + eps)^-1/2,   pre = chart(entries),   k = chart'(entries)

in the terms of `axes.kernels.streams.look`. u and the moments are sums over columns, parts of which are written down
and added in one order. Beside streams of bfloat16 the terms of phi are made ahead and are one product, which reads a
tile of the streams once from shared memory, where a product for each would read it once for each.

Of the gradients of phi, a and b programs over tokens write parts, which one launch adds in their order (`summed`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.streams.mix import _of_lanes

TERMS = 2  # of bfloat16 that phi is taken in beside streams of bfloat16
_BLOCK = 1024  # of what is split, or added
_LINES = 8192  # numbers in lines of parts that a program adds at a time
_ROW = 4096  # of a row less its mean
_MANY = 8  # warps of these


@triton.jit
def _activated(x, TANH: tl.constexpr):
    """f(x), and its derivative."""
    if TANH:
        y = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
        return y, 1.0 - y * y
    else:
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _scale(c, N: tl.constexpr, C: tl.constexpr, SCALES: tl.constexpr):
    """Which number of a is an entry's: its own, or of fewer one of n entries each, the last of all others."""
    if SCALES == C:
        return c
    else:
        return tl.minimum(c // N, SCALES - 1)


@triton.jit
def _added(parts, at, inside, count, step):
    """Parts of a sum, in their order."""
    total = tl.zeros(inside.shape, tl.float32)
    for _ in tl.range(count, loop_unroll_factor=4):
        total += tl.load(parts + at, mask=inside, other=0.0)
        parts += step
    return total


@Kernel
@triton.jit(do_not_specialize=["numbers"])
def _split(phi, few, numbers, width, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    """The TERMS of few bits of every row of phi, one behind the other."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, row = at < numbers, at // width
    left = tl.load(phi + at, mask=inside, other=0.0)
    for k in tl.static_range(TERMS):
        term = left.to(few.dtype.element_ty)
        tl.store(few + ((TERMS - 1) * row + k) * width + at, term, mask=inside)
        left -= term.to(tl.float32)


@Kernel
@triton.jit(do_not_specialize=["rows", "span"])
def _project(
    x, phi, products, moments, rows, width, span,
    C: tl.constexpr, SIDE: tl.constexpr, CENTRED: tl.constexpr, TERMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a tile of rows and `span` tiles of columns: products (parts, rows, C), moments (parts, 2, rows). phi: (C,
    TERMS, W), terms of the streams' own dtype where there are several."""
    tiles = tl.cdiv(width, COLUMNS)
    parts = tl.cdiv(tiles, span)
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, c, line = row < rows, tl.arange(0, SIDE), tl.arange(0, TERMS * SIDE)
    LANE: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # numbers that a thread loads at a time
    total = tl.zeros([ROWS, TERMS * SIDE], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS // LANE], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS // LANE], tl.float32)
    for tile in tl.range(part * span, tl.minimum(part * span + span, tiles), num_stages=STAGES):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        has = column < width
        v = tl.load(x + (row * width)[:, None] + column[None, :], mask=there[:, None] & has[None, :], other=0.0)
        known = (line < TERMS * C)[:, None] & has[None, :]
        f = tl.trans(tl.load(phi + (line * width)[:, None] + column[None, :], mask=known, other=0.0))
        total = tl.fma(tl.dot(v.to(f.dtype), f, input_precision="tf32x3"), 1.0, total)  # that unit's sums truncate
        wide = v.to(tl.float32)
        squares += _of_lanes(wide * wide, ROWS, COLUMNS, LANE)
        if CENTRED:
            sums += _of_lanes(wide, ROWS, COLUMNS, LANE)
    if TERMS > 1:
        total = tl.sum(tl.reshape(total, [ROWS, SIDE, TERMS]), 2)
    at = part.to(tl.int64) * rows
    tl.store(products + ((at + row) * C)[:, None] + c[None, :], total, mask=there[:, None] & (c < C)[None, :])
    tl.store(moments + 2 * at + row, tl.sum(squares, 1), mask=there)
    if CENTRED:
        tl.store(moments + 2 * at + rows + row, tl.sum(sums, 1), mask=there)


@triton.jit
def _rows(tokens, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Of a program: its group, its tokens, which of them there are, and their rows of entries."""
    group = tl.program_id(0) % GROUPS
    token = (tl.program_id(0) // GROUPS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return group, token, token < tokens, token * GROUPS + group


@triton.jit
def _softmaxes(products, a, b, unit, row, there, first, parts, step, BESIDE: tl.constexpr, ALONG: tl.constexpr,
               N: tl.constexpr, C: tl.constexpr, ACROSS: tl.constexpr, SCALES: tl.constexpr,
               TANH: tl.constexpr):  # fmt: skip
    """Sums of n softmaxes of n entries each, ALONG apart, those of one softmax BESIDE those of the next."""
    j = tl.arange(0, ACROSS)
    has = there[:, None] & (j < N)[None, :]
    total = tl.zeros([there.shape[0], ACROSS], tl.float32)
    for i in range(N):
        at = first + i * BESIDE + j * ALONG
        z = _added(products, (row * C)[:, None] + at[None, :], has, parts, step) * unit[:, None]
        z, steep = _activated(z, TANH)
        scale = tl.load(a + _scale(at, N, C, SCALES), mask=j < N, other=0.0)
        z = scale[None, :] * z + tl.load(b + at, mask=j < N, other=0.0)[None, :]
        z = tl.where((j < N)[None, :], z, float("-inf"))
        z = tl.exp(z - tl.max(z, 1, keep_dims=True))
        total += z / tl.sum(z, 1, keep_dims=True)
    return total, j, has


@Kernel
@triton.jit(do_not_specialize=["tokens", "parts"])
def _chart(
    products, moments, a, b, pre, k, rest, raw, units, means, tokens, width, parts, eps, floor,
    N: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, SCALES: tl.constexpr,
    BEHIND: tl.constexpr, ACROSS: tl.constexpr, CHART: tl.constexpr, TANH: tl.constexpr, CENTRED: tl.constexpr,
    KEEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Parts of sums become pre, k and the entries behind those that k is made of, if it is; raw, units and means are
    kept for the backward."""
    group, token, there, row = _rows(tokens, GROUPS, ROWS)
    rows, c = tokens.to(tl.int64) * GROUPS, tl.arange(0, SIDE)
    inside = there[:, None] & (c < C)[None, :]
    square = _added(moments, row, there, parts, 2 * rows) / width
    if CENTRED:
        mean = _added(moments, rows + row, there, parts, 2 * rows) / width
        square = tl.maximum(square - mean * mean, 0.0)
    unit = tl.rsqrt(square + eps)
    r = _added(products, (row * C)[:, None] + c[None, :], inside, parts, rows * C) * unit[:, None]
    scale = tl.load(a + _scale(c, N, C, SCALES), mask=c < C, other=0.0)
    shift = tl.load(b + group * C + c, mask=c < C, other=0.0)
    f, slope = _activated(r, TANH)
    entry = scale[None, :] * f + shift[None, :]
    tl.store(rest + (row * (C - BEHIND))[:, None] + (c - BEHIND)[None, :], entry, mask=inside & (c >= BEHIND)[None, :])
    if KEEP:
        tl.store(raw + (row * C)[:, None] + c[None, :], r, mask=inside)
        tl.store(units + row, unit, mask=there)
        if CENTRED:
            tl.store(means + row, mean, mask=there)
    if CHART == "first":
        tl.store(pre + row[:, None] + c[None, :], entry, mask=inside & (c < 1)[None, :])
    elif CHART == "sigmoid":
        share, at = 1.0 / (1.0 + tl.exp(-entry)), (row * N)[:, None] + c[None, :]
        tl.store(pre + at, share + floor, mask=inside & (c < N)[None, :])
        if BEHIND:
            tl.store(k + at - N, 2.0 * share, mask=inside & ((c >= N) & (c < BEHIND))[None, :])
    else:
        total, j, has = _softmaxes(
            products, a, b, unit, row, there, 0, parts, rows * C, N, 1, N, C, ACROSS, SCALES, TANH
        )
        tl.store(pre + (row * N)[:, None] + j[None, :], total / N, mask=has)
        if BEHIND:
            total, j, has = _softmaxes(
                products, a, b, unit, row, there, N * N, parts, rows * C, 1, N, N, C, ACROSS, SCALES, TANH
            )
            tl.store(k + (row * N)[:, None] + j[None, :], total, mask=has)


@triton.jit
def _columns(parts, first, step, count, c, C: tl.constexpr, SIDE: tl.constexpr, LINES: tl.constexpr):
    """Sums over so many lines of parts, each so many behind the one before."""
    line, total = tl.arange(0, LINES), tl.zeros([LINES, SIDE], tl.float32)
    for begin in range(0, count, LINES):
        at = ((first + (begin + line) * step) * C)[:, None] + c[None, :]
        total += tl.load(parts + at, mask=(begin + line < count)[:, None] & (c < C)[None, :], other=0.0)
    return tl.sum(total, 0)


@Kernel
@triton.jit(do_not_specialize=["splits", "tiles"])
def _sum_parts(
    dphi, da, db, phi_to, a_to, b_to, numbers, splits, tiles,
    N: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, SCALES: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts added: the first program those of da, one for each group those of db, the others a block of dphi each."""
    program, c = tl.program_id(0), tl.arange(0, SIDE)
    if program == 0:
        total = _columns(da, 0, 1, tiles * GROUPS, c, C, SIDE, LINES)
        if SCALES == C:
            tl.store(a_to + c, total, mask=c < C)
        else:
            for k in range(SCALES):
                tl.store(a_to + k, tl.sum(tl.where((c < C) & (_scale(c, N, C, SCALES) == k), total, 0.0), 0))
    elif program <= GROUPS:
        total = _columns(db, program - 1, GROUPS, tiles, c, C, SIDE, LINES)
        tl.store(b_to + (program - 1) * C + c, total, mask=c < C)
    else:
        at = (program - 1 - GROUPS) * BLOCK + tl.arange(0, BLOCK)
        tl.store(phi_to + at, _added(dphi, at, at < numbers, splits, numbers.to(tl.int64)), mask=at < numbers)


@Kernel
@triton.jit
def _centre(x, out, width, BLOCK: tl.constexpr):
    """A row less its mean."""
    place, total = tl.program_id(0).to(tl.int64) * width, tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x + place + at, mask=at < width, other=0.0)
    mean = tl.sum(total, 0) / width
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out + place + at, tl.load(x + place + at, mask=at < width, other=0.0) - mean, mask=at < width)


def split(x: Tensor, phi: Tensor) -> Tensor:
    """phi (C, W) in the terms (C, TERMS, W) that it is multiplied in with streams x of bfloat16."""
    few = x.new_empty(phi.shape[0], TERMS, phi.shape[1])
    with layout.on_device(x):
        _split[(cdiv(phi.numel(), _BLOCK),)](phi, few, phi.numel(), phi.shape[1], TERMS=TERMS, BLOCK=_BLOCK)
    return few


def centred(x: Tensor) -> Tensor:
    """Rows (C, W) of float32 less their means; its own adjoint."""
    made = torch.empty_like(x)
    with layout.on_device(x):
        _centre[(len(x),)](x, made, x.shape[1], BLOCK=min(_ROW, power_of_2(x.shape[1])), num_warps=_MANY)
    return made


def summed(shape: Shape, phi: Tensor, a: Tensor, b: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Gradients of phi, a and b of their parts over tokens: (s, C, W), (t, C) and (t, C), t those of all groups."""
    found, numbers = [torch.empty_like(t) for t in (phi, a, b)], phi.numel()
    with layout.on_device(phi):
        _sum_parts[(cdiv(numbers, _BLOCK) + 1 + shape.groups,)](
            *parts, *found, numbers, len(parts[0]), len(parts[1]) // shape.groups, **shape.constants(),
            LINES=max(1, _LINES // shape.side), BLOCK=_BLOCK, num_warps=_MANY,
        )  # fmt: skip
    return found


class Shape(NamedTuple):
    """Sizes of a call. groups: rows of entries of a token; width: what is projected; rows: of a tile of (tokens, C)."""

    tokens: int
    n: int
    d: int
    groups: int
    width: int
    entries: int
    side: int
    rows: int
    scales: int

    @classmethod
    def of(cls, x: Tensor, a: Tensor, b: Tensor) -> Shape:
        tokens, n, d = x.shape
        groups, entries = b.shape
        side = max(16, power_of_2(entries))
        return cls(tokens, n, d, groups, n * d // groups, entries, side, 1024 // side, len(a))

    @property
    def tiles(self) -> int:
        return self.groups * cdiv(self.tokens, self.rows)

    def constants(self) -> dict[str, int]:
        return {"N": self.n, "GROUPS": self.groups, "C": self.entries, "SIDE": self.side, "SCALES": self.scales}
