"""Text of C as functions: compiled once a process by the machine's C compiler, for the processor that is here.

$CC, gcc or clang, as Triton takes them. What is compiled is not kept on a disk: it is loaded and its file goes. No
option gives up what is not a number, or the order in which a sum is written, but for loops that say so themselves.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from axes.errors import AxesError

_OPTIONS = (
    "-std=gnu11", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared",
)  # fmt: skip


@functools.cache
def compiler() -> str | None:
    """The C compiler of this machine."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, ("gcc", "clang") if named is None else (named,))), None)


@functools.cache
def no_compiler() -> str | None:
    """Why no text of C is compiled and loaded here, or None if it is: found out with a function, once."""
    if not sys.platform.startswith("linux"):
        return f"text of C is compiled on Linux, and this is {sys.platform}"
    if compiler() is None:
        return "there is no C compiler: install gcc or clang, or name one in $CC"
    try:
        _loaded("#include <math.h>\n#include <stdlib.h>\n#include <string.h>\nint nothing(void) { return 0; }\n")
    except (AxesError, OSError) as error:  # no headers, or a folder for what is temporary that runs nothing
        return f"C is not compiled and loaded here: {error}"
    return None


def followed() -> bool:
    """Whether somebody follows torch's operations, a compiler or a dispatch mode, and would not see a loop."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


@functools.cache
def library(text: str, *options: str) -> ctypes.CDLL:
    """Text of C, loaded. options: of the compiler, besides the usual ones. Raises AxesError with what it says."""
    reason = no_compiler()
    if reason is not None:
        raise AxesError(f"a loop of C was asked for: {reason}")
    return _loaded(text, *options)


def _loaded(text: str, *options: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="axes-") as folder:
        source, made = Path(folder, "walk.c"), Path(folder, "walk.so")
        source.write_text(text)
        command = [str(compiler()), *_OPTIONS, *options, str(source), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise AxesError(f"{compiler()} does not compile a loop of C: {done.stderr.strip()[:2000]}")
        return ctypes.CDLL(str(made))


@final
class Kernel:
    """A function of a text, launched as kernels of Triton are: `kernel[grid](*tensors_and_numbers, **numbers)`.

    The programs of the grid are shared out among torch's threads.
    """

    def __init__(self, text: str, name: str) -> None:
        self.function = library(text)[name]
        self.function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
        self.function.restype = ctypes.c_int

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return functools.partial(self._launch, grid[0])

    def _launch(self, programs: int, *given: Any, **constants: int) -> None:
        pointers = [x.data_ptr() for x in given if isinstance(x, Tensor)]
        values = [int(x) for x in (*(x for x in given if not isinstance(x, Tensor)), *constants.values())]
        tensors = (ctypes.c_void_p * len(pointers))(*pointers)
        numbers = (ctypes.c_long * len(values))(*values)
        threads = max(1, min(torch.get_num_threads(), programs))
        cuts = [programs * i // threads for i in range(threads + 1)]
        if threads == 1:
            failed = [self.function(tensors, numbers, 0, programs)]
        else:
            with ThreadPoolExecutor(threads) as pool:  # ctypes lets other threads run
                failed = list(pool.map(lambda i: self.function(tensors, numbers, cuts[i], cuts[i + 1]), range(threads)))
        if any(failed):
            raise AxesError("a loop of C has no memory for the state of a head")


__all__ = ["Kernel", "compiler", "followed", "library", "no_compiler"]
