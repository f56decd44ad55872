"""Programs with kernels in Triton's interpreter. It is chosen when Triton is imported: each runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def interpret(program: str) -> None:
    """Run a program whose assertions must hold; what it says is shown where they do not."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", _MASKS_STAY_BOOLEAN + _POWERS + program],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
