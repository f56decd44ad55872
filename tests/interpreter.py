"""Programs with kernels in Triton's interpreter. It is chosen when Triton is imported: each runs in its own process."""

from __future__ import annotations

import importlib
import os
import pkgutil
from contextlib import suppress
from functools import cache

from tests.forked import Server, serve

# A comparison of scalars is boolean, but made a tensor it takes the type of what was compared, and 3.9 wants boolean
# masks: `mask=inside & (row >= 0)` is right in Triton and refused by its interpreter.
_MASKS_STAY_BOOLEAN = """
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
_splat = InterpreterBuilder.create_splat
def _boolean_splat(self, type, x):
    tensor = _splat(self, type, x)
    return TensorHandle(tensor.data.astype(bool), tensor.dtype) if x.data.dtype == bool else tensor
InterpreterBuilder.create_splat = _boolean_splat
"""
# The interpreter has no libdevice: a power of positive numbers by what it has.
_POWERS = """
import triton.language as tl
from triton.language.extra import libdevice
libdevice.pow = lambda a, b: tl.exp(tl.log(a) * b)
"""
# It multiplies the bits of bfloat16 numbers as integers: their values are those bits in the upper half of a float32.
_PRODUCTS = """
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
_dot = InterpreterBuilder.create_dot
def _wide(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
def _dot_of_values(self, a, b, *given):
    return _dot(self, _wide(a), _wide(b), *given)
InterpreterBuilder.create_dot = _dot_of_values
"""


@cache
def server() -> Server:
    """One for every test process."""
    return Server("tests.interpreter", {"TRITON_INTERPRET": "1"})


def interpret(program: str) -> None:
    """Run a program whose assertions must hold; what it says is shown where they do not."""
    ((status, said),) = server().run(program)
    assert status == 0, said


def _prepare() -> None:
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    import axes.optim
    import axes.sequence  # noqa: F401
    from tests import quicker

    for patch in (_MASKS_STAY_BOOLEAN, _POWERS, _PRODUCTS):
        exec(patch, {})
    quicker.patch()
    exec(os.environ.get("INTERPRETER_FIRST", ""), {})  # what a tool wants of every program
    _read_kernels()


def _read_kernels() -> None:
    """Import every kernel, and make of it what is interpreted, once for all programs."""
    from triton.runtime.interpreter import InterpretedFunction

    import axes.kernels

    for module in pkgutil.walk_packages(axes.kernels.__path__, "axes.kernels."):
        with suppress(ImportError):  # which a program that needs it says
            for x in [*vars(importlib.import_module(module.name)).values()]:
                if isinstance(x, InterpretedFunction):
                    x.rewrite()


if __name__ == "__main__":
    serve(_prepare)
