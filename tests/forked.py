"""Programs in processes of their own which do not import afresh: forks of one that has imported what they need."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_SECONDS = 300  # for every program
_ROOT = Path(__file__).resolve().parents[1]


class Server:
    """A process, `python -m MODULE`, that calls `serve`; it ends with the one that reads its answers."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.close)

    def close(self) -> None:
        """It has no more lines to read, and ends."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def run(self, *programs: str) -> list[tuple[int, str]]:
        """Of all, side by side, the status of exit and what they said."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(programs) + "\n")
        self.process.stdin.flush()
        return [(status, said) for status, said in json.loads(self.process.stdout.readline())]


def serve(prepare: Callable[[], None]) -> None:
    """Import what all programs need, then answer lists of them, one a line, until there are no more."""
    prepare()
    gc.freeze()  # what is imported is no garbage of any program, and looking at it would copy its memory
    for line in sys.stdin:
        print(json.dumps(_side_by_side(json.loads(line))), flush=True)


def _side_by_side(programs: list[str]) -> list[tuple[int, str]]:
    with ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in programs]
        children = []
        for program, file in zip(programs, files, strict=True):
            child = os.fork()
            if child == 0:
                _become(program, file.fileno())
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        for file in files:
            file.seek(0)
        said = [file.read().decode(errors="replace") for file in files]
    return list(zip(statuses, said, strict=True))


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
