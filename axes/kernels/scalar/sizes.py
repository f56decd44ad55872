"""The sizes that the scalar chain runs in: tokens of a chunk, blocks of a kernel, and the cut of tokens into units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, final

import torch
from torch import Tensor

from axes.kernels.common import layout as host
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.tiles import TILE

PROCESSORS = 132  # of an H100 or H200: what the choice of segments fills


# ---- launch settings -------------------------------------------------------------------------------------------------


PIECES = 128  # most keys of chains whose float32 is multiplied in pieces; beyond them masses whose features cancel meet


def form(dtype: torch.dtype, d_k: int) -> str:
    """What the products of a chain with K keys are made of: "halves" are 16 bit, float32 goes in "pieces" of bfloat16
    on the matrix units, or, with many keys, is multiplied as it is, "ieee"."""
    if dtype != torch.float32:
        return "halves"
    return "pieces" if d_k <= PIECES else "ieee"


def products(dtype: torch.dtype, d_k: int) -> str:
    """The precision that a chain's kernels give their products."""
    return {"halves": "tf32", "pieces": host.pieces(), "ieee": "ieee"}[form(dtype, d_k)]


def chunk_length(dtype: torch.dtype, d_k: int) -> int:
    """Tokens of a chunk. Three pieces of every tile in use are in registers: chunks are short."""
    return {"halves": 64, "pieces": 16, "ieee": 32}[form(dtype, d_k)]


class Setting(NamedTuple):
    """Most keys and values in a block, warps, pipeline stages."""

    keys: int
    values: int
    warps: int
    stages: int


# By form, of each kernel: for up to so many keys, and for more. A reader of rule "write" has values in their place.
# Products of 64 rows or more are those of warpgroups: their columns are values by 64, whatever V is. Seen on an H200
# with Triton 3.6 (ptxas 12.8): a reverse pass of 16 bit compiled for 32 values, 4 warps and 1 stage faults with an
# illegal access, and some kernel for 16 values did; 64 has passed. The delta rule's gradients with 2 stages overwrite
# tiles that products in flight still read. Pieces: a state of 128 keys is held by 8 warps, 4 spill more; products of
# 16 x 16 are one warp's.
WIDTHS = {"halves": (128,), "pieces": (64, 128), "ieee": (128,)}
SETTINGS: dict[str, dict[str, tuple[Setting, ...]]] = {
    "halves": {
        "prepare": (Setting(128, 64, 2, 1), Setting(128, 64, 2, 1)),
        "scan": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1)),
        "reverse": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1)),
        "delta gradients": (Setting(128, 64, 8, 1), Setting(128, 64, 8, 1)),
        "mix": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1)),
        "ends": (Setting(128, 64, 4, 3), Setting(128, 64, 4, 3)),
        "chunks": (Setting(128, 64, 4, 1), Setting(128, 64, 4, 1)),
    },
    "pieces": {
        "prepare": (Setting(32, 16, 1, 1), Setting(32, 16, 1, 1)),
        "scan": (Setting(64, 64, 4, 1), Setting(128, 64, 8, 1)),
        "reverse": (Setting(64, 64, 4, 1), Setting(128, 64, 8, 1)),
        "delta gradients": (Setting(64, 16, 4, 1), Setting(64, 16, 4, 1)),
        "mix": (Setting(64, 64, 4, 1), Setting(128, 64, 8, 1), Setting(256, 64, 8, 1)),
        "ends": (Setting(64, 64, 4, 1), Setting(128, 64, 4, 1)),
        "chunks": (Setting(64, 64, 4, 1), Setting(128, 64, 4, 1)),
    },
    "ieee": {
        "prepare": (Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
        "scan": (Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
        "reverse": (Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
        "delta gradients": (Setting(64, 32, 8, 1), Setting(64, 32, 8, 1)),
        "mix": (Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
        "ends": (Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
        "chunks": (Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
    },
}


def _setting(kernel: str, form: str, d_k: int) -> Setting:
    return SETTINGS[form][kernel][sum(d_k > width for width in WIDTHS[form])]


def settings(kernel: str, form: str, d_k: int, d_v: int, more: bool = False) -> dict[str, int]:
    """Blocks, warps and pipeline stages of a kernel: a function of the chain's form, K, V and whether a chunk reads
    more than usual: erase keys with rule "delta", gates or strengths with "write"."""
    keys, values, warps, stages = _setting(kernel, form, d_k)
    least = 64 if form == "halves" else TILE
    keys = max(least, min(keys, power_of_2(d_k)))
    if form != "pieces" or keys < 64:
        values = max(least, min(values, power_of_2(d_v)))
    if more:
        stages = min(stages, 2)  # for want of shared memory and registers
    return {"BK": keys, "BV": values, "num_warps": warps, "num_stages": stages}


# ---- the cut into units ----------------------------------------------------------------------------------------------


def plain_segments_of(programs: int, chunks: int) -> int:
    """Segments of every entry for the Hopper kernels, a program for each processor at most: the least time, with what
    an H200 takes in microseconds: 2.7 for a chunk, 1.7 for its map, 2 to merge a segment, 10 for more launches."""
    numbers = isinstance(programs, int) and isinstance(chunks, int)  # torch.compile asks with symbols, unhashable
    return _quickest(programs, chunks) if numbers else _quickest.__wrapped__(programs, chunks)


@lru_cache(maxsize=1024)
def _quickest(programs: int, chunks: int) -> int:
    def cost(s: int) -> float:
        return 2.7 * chunks if s == 1 else 4.4 * cdiv(chunks, s) + 2 * s + 10

    return min(range(1, max(1, min(PROCESSORS // max(1, programs), chunks)) + 1), key=cost)


def segments_of(batch: int, length: int, heads: int, d_k: int, d_v: int, dtype: torch.dtype, delta: bool) -> int:
    """Segments of every entry: enough to give each processor a serial program with 16 chunks or more of it, and with
    rule "write", whose maps cost little, two programs with 8 chunks or more."""
    values = _setting("scan", form(dtype, d_k), d_k).values
    programs = max(1, batch * heads * cdiv(d_v, values))
    chunks = cdiv(length, chunk_length(dtype, d_k))
    most, least = (PROCESSORS, 16) if delta else (2 * PROCESSORS, 8)
    return max(1, min(most // programs, chunks // least))


@final
@dataclass(frozen=True)
class Cut:
    """Units, chunks and their slots. S segments of L tokens make an entry of T tokens; packed: S = 1."""

    T: int
    S: int
    L: int
    N: int
    units: int
    slots: int
    chunk: int
    offsets: Tensor | None = None
    units_of_slots: Tensor | None = None


def cut(batch: int, length: int, chunk: int, segments: int, cu_seqlens: Tensor | None) -> Cut:
    """The cut of (batch, length) tokens; segments are whole chunks but for the last: fewer may be made than asked."""
    if cu_seqlens is not None:
        made = host.layout(batch, length, chunk, cu_seqlens)
        return Cut(length, 1, length, made.chunks, made.units, made.slots, chunk, made.offsets, made.units_of_slots)
    if segments == 1:
        n = cdiv(length, chunk)
        return Cut(length, 1, length, n, batch, batch * n, chunk)
    n = cdiv(cdiv(length, chunk), segments)
    s = cdiv(length, n * chunk)
    return Cut(length, s, n * chunk, n, batch * s, batch * s * n, chunk)
