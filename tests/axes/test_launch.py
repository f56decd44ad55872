"""A launch that was looked up runs the binary that Triton would have run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import triton
import triton.language as tl
from triton.compiler.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from axes.kernels.common.bulk import matrix_tiles, number_tiles
from axes.kernels.common.launch import Kernel
from tests.hopper import NoDevice


@triton.jit(do_not_specialize=["free"])
def _add(x, y, z, free, bound, factor, WIDE: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, 16) + bound + free
    value = tl.load(x + at) * factor
    if y is not None:
        value += tl.load(y + at)
    if KIND == "twice":
        value *= WIDE
    tl.store(z + at, value.to(z.dtype.element_ty))


@triton.jit
def _tile(tiles, z):
    tl.store(z + tl.arange(0, 16), tl.sum(tiles.load([0, 0]).to(tl.float32), 0))


@gluon.jit
def _layout(tiles, z):
    SIDES: gl.constexpr = tiles.block_shape[0] * tiles.layout.swizzle_byte_width
    gl.store(z, SIDES)


def same_binaries(plain: Any, calls: Iterable[tuple[list[Any], dict[str, Any]]]) -> int:
    """Launch by `Kernel` and by Triton, compare what ran, and return how many binaries there were."""
    ran: list[str] = []
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=None, warmup=True, **kwargs)
        ran.append(kernel.hash)
        return kernel

    def ready(self: CompiledKernel, grid: Any) -> Any:
        assert len(grid) >= 3
        return lambda *args: ran.append(self.hash)

    kernel, before = Kernel(plain), driver._active
    driver.set_active(NoDevice())  # type: ignore[arg-type]
    try:
        with patch.object(JITFunction, "run", compiled), patch.object(CompiledKernel, "__getitem__", ready):
            for arguments, given in calls:
                kernel[(5,)](*arguments, **given)
                plain[(5,)](*arguments, **given)
                assert ran[-1] == ran[-2], (arguments, given)
    finally:
        driver._active = before
    return len(set(ran))


def test_what_a_binary_depends_on_is_looked_at() -> None:
    odd: Tensor = torch.zeros(40)[1:]  # not on 16 bytes
    tensors = (torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16), odd)
    given: tuple[tuple[Any, ...], ...] = (
        tensors, (tensors[0], None, odd), tensors[:2], (1, 7, 16, 2**40), (1, 7, 16), (0.5, 2.0), (2, 3),
        ("once", "twice"), (4, 8),
    )  # fmt: skip
    calls = [[x[0] for x in given]]  # and those that differ from it in one or two arguments
    for a, b in itertools.combinations(range(len(given)), 2):
        for x, y in itertools.product(given[a], given[b]):
            calls.append([x if i == a else y if i == b else first for i, first in enumerate(calls[0])])
    launches = [(first, {"WIDE": wide, "KIND": kind, "num_warps": n}) for *first, wide, kind, n in calls]
    plain, constants = calls[0][:-3], {"WIDE": 2, "KIND": "once"}
    for options in ({"num_warps": 4, "num_stages": 2}, {"num_stages": 4, "num_warps": 2}):  # by name, not by place
        launches.append((plain, {**constants, **options}))
    assert same_binaries(_add, launches) > 20


@triton.jit
def _members(tensors, others, z, COLUMNS: tl.constexpr):
    for i in tl.static_range(len(tensors)):
        value = tl.load(tensors[i] + tl.arange(0, 16)).to(tl.float32)
        if others[i] is not None:
            value += tl.load(others[i])
        tl.store(z + COLUMNS[i] + tl.arange(0, 16), value)


def test_members_of_tuples_are_looked_at() -> None:
    z, x, y = torch.zeros(64), torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16)
    odd = x[1:]
    given = [((x, x), (None, x)), ((x, y), (None, x)), ((x, odd), (None, x)), ((x, x), (x, x)), ((x,), (None,))]
    launches = [([*tensors, z], {"COLUMNS": columns}) for tensors in given for columns in ((0, 16), (16, 0))]
    assert same_binaries(_members, [*launches, *launches]) == 10


def test_tiles_of_descriptors_are_looked_at() -> None:
    z = torch.zeros(64)
    for kind, square in ((torch.float16, [16, 16]), (torch.float32, [16, 16])):
        x = torch.zeros(64, 64, dtype=kind)
        tiles = [TensorDescriptor.from_tensor(y, t) for y in (x, x[:32]) for t in (square, [32, 16])]
        assert same_binaries(_tile, (([d, z], {}) for d in (*tiles, *tiles))) == 2
    x = torch.zeros(3, 64, 64, dtype=torch.float16)
    made = [matrix_tiles(x), matrix_tiles(x[:1]), matrix_tiles(x, 32), number_tiles(z), matrix_tiles(x.bfloat16())]
    assert same_binaries(_layout, (([d, z], {}) for d in (*made, *made))) == 4
