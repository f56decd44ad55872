"""Compiling kernels for sm_90 without a GPU: what each launch of a host function costs in registers, spills and memory.

with hopper() as launches:
    gated_delta_rule(q, k, v, beta)          # CPU tensors: nothing runs, every launch is compiled
launches[0].registers, launches[0].spills, launches[0].wgmma
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from axes.kernels.common.launch import Kernel
from tests.barriers import not_ended
from tests.in_flight import overwritten


@dataclass(frozen=True)
class Launch:
    """One compiled launch. spills: bytes of stack a thread; shared: bytes a program; wgmma: Hopper's products.

    overwritten: operands that copies overwrite while products read them (tests.in_flight), a fault of the compiler.
    barriers: those that are never invalidated (tests.barriers).
    binary: what was compiled, as a hash.
    """

    kernel: str
    constants: dict[str, Any]
    registers: int
    spills: int
    shared: int
    wgmma: int
    mma: int
    overwritten: Sequence[str]
    barriers: Sequence[str]
    binary: str


class NoDevice:
    """Stands for a Hopper GPU where none is: enough of a driver for Triton to compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def hopper() -> Iterator[list[Launch]]:
    """Within the block Triton launches compile for sm_90 and do nothing; outputs keep what `empty` left in them."""
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del grid, warmup
        kernel = run(self, *args, grid=None, warmup=True, **kwargs)
        launches.append(_read(self.fn.__name__, kernel, kwargs))
        return kernel

    device = NoDevice()
    previous = driver._active  # asking for `active` would look for a GPU
    driver.set_active(device)  # type: ignore[arg-type]
    try:
        every = patch.object(Kernel, "__getitem__", lambda self, grid: partial(self.by_triton, grid))  # not once alone
        unchecked = patch("axes.kernels.common.layout.interpreted", lambda: True)
        with patch.object(JITFunction, "run", compile_only), unchecked, every:
            yield launches
    finally:
        driver._active = previous


def _read(name: str, kernel: Any, kwargs: dict[str, Any]) -> Launch:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage.stdout).group(1)) for word in ("REG", "STACK"))  # type: ignore[union-attr]
    ptx = kernel.asm["ptx"]
    constants = {n: x for n, x in kwargs.items() if isinstance(x, int | str | bool)}
    return Launch(
        name, constants, registers, stack, kernel.metadata.shared,
        len(re.findall(r"wgmma\.mma_async", ptx)), len(re.findall(r"\bmma\.sync", ptx)),
        tuple(overwritten(kernel.asm["ttgir"])), tuple(not_ended(kernel.asm["ttgir"])), kernel.hash,
    )  # fmt: skip


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
