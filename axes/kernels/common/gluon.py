"""Gluon under one name for every Triton of `versions.TRITONS`: the only place that knows how they differ.

Importing it on another Triton raises, with the versions it knows; whoever chooses a kernel asks
`versions.hopper_refusal` first.
"""

from __future__ import annotations

from axes.errors import AxesError
from axes.kernels.common import versions

if (_reason := versions.gluon_refusal()) is not None:
    raise AxesError(f"a kernel for Hopper was asked for by name: {_reason}")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_tile = gl.shared_memory_descriptor
# new name if hasattr(since that version) else old name
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # 3.7
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # 3.8
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # 3.8
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared  # 3.9
reinterpret = _tile.reinterpret if hasattr(_tile, "reinterpret") else _tile._reinterpret  # 3.9
store_wait = tma.store_wait
copies_end, copies_wait = async_copy.commit_group, async_copy.wait_group

__all__ = [
    "TensorDescriptor",
    "async_load",
    "async_store",
    "barrier",
    "copies_end",
    "copies_wait",
    "copy",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
