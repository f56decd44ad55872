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


def chunk_length(dtype: torch.dtype) -> int:
    """Tokens of a chunk."""
    return 32 if dtype == torch.float32 else 64


class Setting(NamedTuple):
    """Most keys and values in a block, warps, pipeline stages."""

    keys: int
    values: int
    warps: int
    stages: int


# Of each kernel: for up to 128 keys, for more, and for float32 of up to 128 keys and more. 16 bit: values go by 64
# whatever V is. Seen on an H200 with Triton 3.6 (ptxas 12.8): a reverse pass compiled for 32 values, 4 warps and 1
# stage faults with an illegal access, and some kernel for 16 values did; 64 has passed. The delta rule's gradients with
# 2 stages overwrite tiles that products in flight still read.
SETTINGS = {
    "prepare": (Setting(128, 64, 2, 1), Setting(128, 64, 2, 1), Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
    "scan": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1), Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
    "reverse": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1), Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
    "delta gradients": (Setting(128, 64, 8, 1), Setting(128, 64, 8, 1), Setting(64, 32, 8, 1), Setting(64, 32, 8, 1)),
    "mix": (Setting(128, 64, 4, 3), Setting(256, 64, 8, 1), Setting(128, 32, 4, 1), Setting(256, 32, 8, 1)),
    "ends": (Setting(128, 64, 4, 3), Setting(128, 64, 4, 3), Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
    "chunks": (Setting(128, 64, 4, 1), Setting(128, 64, 4, 1), Setting(128, 32, 4, 1), Setting(128, 32, 4, 1)),
}


def settings(kernel: str, dtype: torch.dtype, d_k: int, d_v: int, more: bool = False) -> dict[str, int]:
    """Blocks, warps and pipeline stages of a kernel: a function of the dtype, K, V and whether a chunk reads more than
    usual: erase keys with rule "delta", gates or strengths with "write"."""
    full = dtype == torch.float32
    keys, values, warps, stages = SETTINGS[kernel][2 * full + (d_k > 128)]
    least = TILE if full else 64
    keys, values = (max(least, min(x, power_of_2(d))) for x, d in ((keys, d_k), (values, d_v)))
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


def segments_of(batch: int, length: int, heads: int, d_v: int, dtype: torch.dtype, delta: bool) -> int:
    """Segments of every entry: enough to give each processor a serial program with 16 chunks or more of it, and with
    rule "write", whose maps cost little, two programs with 8 chunks or more."""
    programs = max(1, batch * heads * cdiv(d_v, 32 if dtype == torch.float32 else 64))
    chunks = cdiv(length, chunk_length(dtype))
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
