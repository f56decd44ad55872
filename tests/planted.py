"""What the tools that plant faults share: copies of the tree, tests run in a copy by a forked process, and what failed.

A process that has imported torch is forked for every fault, so that a fault costs its tests and not imports.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_LEFT = (".git", ".venv*", ".cache", ".*_cache", ".hypothesis", "__pycache__", "runs", "build", "*.so")


def copied(to: Path) -> Path:
    """A copy of the tree, without what tools made in it."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT))
    return to


class Raised(NamedTuple):
    """What a function in another process has raised."""

    text: str


class Child:
    """A function in a process of its own. answer: what it returned, `Raised`, None if it took longer, "ended" if it
    died."""

    def __init__(self, work: Callable[[], Any], seconds: float) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "answer"
        self.begun, self._end = time.monotonic(), time.monotonic() + seconds
        self.answer: Any = None
        self._pid = os.fork()
        if self._pid == 0:
            self._work(work)

    def _work(self, work: Callable[[], Any]) -> None:
        os.setsid()
        said = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        status = 1
        try:
            sys.dont_write_bytecode = True
            self._path.write_bytes(pickle.dumps((True, work())))
            status = 0
        except BaseException:
            self._path.write_bytes(pickle.dumps((False, traceback.format_exc())))
        finally:
            sys.stdout.flush()
            os._exit(status)

    def done(self) -> bool:
        """Whether there is an answer; a process that takes longer is killed."""
        if os.waitpid(self._pid, os.WNOHANG) != (0, 0):
            fine, made = pickle.loads(self._path.read_bytes()) if self._path.exists() else (True, "ended")
            self.answer = made if fine else Raised(made)
        elif time.monotonic() < self._end:
            return False
        else:
            self.kill()
        self._folder.cleanup()
        return True

    def kill(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def forked(work: Callable[[], Any], seconds: float) -> Any:
    """What a function returns in a process of its own, or None if it takes longer or "ended" if the process died."""
    child = Child(work, seconds)
    while not child.done():
        time.sleep(0.02)
    return child.answer


class First:
    """A pytest plugin: the first test that failed, and what it said."""

    name = ""
    said = ""
    ran = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call" and not report.skipped
        if report.failed and not self.name:
            self.name = report.nodeid
            self.said = _crash(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} cannot be collected"
            self.said = _crash(report)


def _crash(report: Any) -> str:
    where = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if where is None else where.message
    return " ".join(text.split())[:200]


def tests_of(tree: Path, tests: Sequence[str], plugin: Any, *flags: str) -> int:
    """pytest's exit status for tests of a tree, in this process, which has imported nothing of this package."""
    import pytest

    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("axes", "tests")]:
        if name not in (__name__, "tests.mutants", "tests.gpu.faults"):  # whose objects go from process to process
            del sys.modules[name]
    given = ["-q", "--assert=plain", "-p", "no:xdist", "-p", "no:benchmark", "-p", "no:cacheprovider", *flags, *tests]
    return int(pytest.main(given, plugins=[plugin]))
