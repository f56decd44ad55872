"""A launch that was looked up runs the binary that Triton would have run."""

from __future__ import annotations

import itertools
import sys
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
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from axes.kernels.launch import Kernel
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


def test_what_a_binary_depends_on_is_looked_at() -> None:
    odd: Tensor = torch.zeros(40)[1:]  # not on 16 bytes
    tensors = (torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16), odd)
    given: tuple[tuple[Any, ...], ...] = (
        tensors, (tensors[0], None, odd), tensors[:2], (1, 7, 16, 2**40), (1, 7, 16), (0.5, 2.0), (2, 3),
        ("once", "twice"),
    )  # fmt: skip
    calls = [[x[0] for x in given]]  # and those that differ from it in one or two arguments
    for a, b in itertools.combinations(range(len(given)), 2):
        for x, y in itertools.product(given[a], given[b]):
            calls.append([x if i == a else y if i == b else first for i, first in enumerate(calls[0])])
    ran: list[str] = []
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=None, warmup=True, **kwargs)
        ran.append(kernel.hash)
        return kernel

    def ready(self: CompiledKernel, grid: Any) -> Any:
        assert len(grid) >= 3
        return lambda *args: ran.append(self.hash)

    kernel, before = Kernel(_add), driver._active
    driver.set_active(NoDevice())  # type: ignore[arg-type]
    try:
        with patch.object(JITFunction, "run", compiled), patch.object(CompiledKernel, "__getitem__", ready):
            for warps, (*first, wide, kind) in itertools.chain(
                itertools.product((4,), calls), itertools.product((8, 4), calls[:5])
            ):
                kernel[(5,)](*first, WIDE=wide, KIND=kind, num_warps=warps)
                _add[(5,)](*first, WIDE=wide, KIND=kind, num_warps=warps)
                mine, tritons = ran[-2:]
                assert mine == tritons, (first, wide, kind, warps)
    finally:
        driver._active = before
    assert len(set(ran)) > 20
