"""Compiling kernels for sm_90 without a GPU: what each launch of a host function costs in registers, spills and memory.

with hopper() as launches:
    gated_delta_rule(q, k, v, beta)          # CPU tensors: nothing runs, every launch is compiled
launches[0].registers, launches[0].spills, launches[0].wgmma

`asked()` in the place of `hopper()` compiles nothing: it says what the compiler would be asked for.
"""

from __future__ import annotations

import hashlib
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
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction

from axes.kernels.common.launch import Kernel
from tests.barriers import not_ended
from tests.in_flight import overwritten


@dataclass(frozen=True)
class Launch:
    """One compiled launch. spills: bytes of stack a thread; shared: bytes a program; wgmma: Hopper's products.

    overwritten: operands that copies overwrite while products read them (tests.in_flight), a fault of the compiler.
    barriers: those that are never invalidated (tests.barriers).
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


@dataclass(frozen=True)
class Asked:
    """One launch as the compiler is asked for it.

    digest: of the text of the kernel and of all that it calls, types, constants and options. Where that is the same, so
    is the binary of the same Triton. Where the text stands in its file does not count.
    """

    kernel: str
    digest: str


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
def hopper(only: str | None = None) -> Iterator[list[Launch]]:
    """Within the block Triton launches, or those of one kernel, compile for sm_90 and do nothing; outputs keep what
    `empty` left in them."""
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del grid, warmup
        if only is not None and self.fn.__name__ != only:
            return None
        kernel = run(self, *args, grid=None, warmup=True, **kwargs)
        launches.append(_read(self.fn.__name__, kernel, kwargs))
        return kernel

    with _without_a_device(), patch.object(JITFunction, "run", compile_only):
        yield launches


@contextmanager
def asked() -> Iterator[list[Asked]]:
    """Within the block Triton launches neither compile nor do anything."""
    found: list[Asked] = []
    run = JITFunction.run

    def ask_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        compiled, *_ = self.device_caches[0]  # of which nobody would be asked again
        held = dict(compiled)
        compiled.clear()
        run(self, *args, grid=None, warmup=True, **kwargs)
        compiled.update(held)

    def note(self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, warmup: Any):  # type: ignore[no-untyped-def]
        del key, device, warmup
        text = f"{self.ASTSource(self, signature, constants, attrs).hash()} {options.hash()}"
        found.append(Asked(self.fn.__name__, hashlib.sha256(text.encode()).hexdigest()))

    asks = patch.object(JITFunction, "run", ask_only)
    with _without_a_device(), asks, patch.object(JITFunction, "_do_compile", note):
        yield found


_NOWHERE = property(lambda _: 0, lambda self, line: self.__dict__.update(starting_line_number=line))
_update_hash = DependenciesFinder._update_hash


def _callee_first(self: DependenciesFinder, callee: JITCallable) -> None:
    """Triton takes a callee's constants before it has read the callee: hashes would depend on what was read first."""
    assert callee.cache_key
    _update_hash(self, callee)


@contextmanager
def _without_a_device() -> Iterator[None]:
    device = NoDevice()
    previous = driver._active  # asking for `active` would look for a GPU
    driver.set_active(device)  # type: ignore[arg-type]
    try:
        with (
            patch.object(Kernel, "__getitem__", lambda self, grid: partial(self.by_triton, grid)),  # not once alone
            patch("axes.kernels.common.layout.interpreted", lambda: True),
            patch("axes.kernels.common.layout.pieces", lambda: "bf16x6"),
            patch.object(JITCallable, "starting_line_number", _NOWHERE, create=True),
            patch.object(DependenciesFinder, "_update_hash", _callee_first),
        ):
            yield
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
        tuple(overwritten(kernel.asm["ttgir"])), tuple(not_ended(kernel.asm["ttgir"])),
    )  # fmt: skip


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
