"""Programs with kernels in Triton's interpreter. It is chosen when Triton is imported: each runs in its own process."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

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


_SECONDS = 300


class _Server:
    """A process that has imported what all programs need, and forks itself for each."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parents[1]
        path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreter"],
            cwd=root, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, program: str) -> tuple[int, str]:
        """Its exit status and what it said."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()
        status, said = json.loads(self.process.stdout.readline())
        return status, said


_server = cache(_Server)  # one for every test process, with which it ends


def interpret(program: str) -> None:
    """Run a program whose assertions must hold; what it says is shown where they do not."""
    status, said = _server().run(program)
    assert status == 0, said


def serve() -> None:
    """Answer programs, one a line, until there are no more."""
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    import axes.optim
    import axes.sequence  # noqa: F401
    from tests import quicker

    for patch in (_MASKS_STAY_BOOLEAN, _POWERS):
        exec(patch, {})
    quicker.patch()
    exec(os.environ.get("INTERPRETER_FIRST", ""), {})  # what a tool wants of every program
    gc.freeze()  # what is imported is no garbage of any program, and looking at it would copy its memory
    for line in sys.stdin:
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                _become(json.loads(line), said.fileno())
            _, status = os.waitpid(child, 0)
            said.seek(0)
            print(json.dumps((status, said.read().decode(errors="replace"))), flush=True)


def _become(program: str, says: int) -> NoReturn:
    """The process of a program, which is its main module."""
    for stream in (1, 2):
        os.dup2(says, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.alarm(_SECONDS)
    sys.modules["__main__"] = main = ModuleType("__main__")
    status = 1
    try:
        exec(compile(program, "<string>", "exec"), main.__dict__)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
