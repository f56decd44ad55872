"""Kernels compiled for sm_90 by a Triton of choice, in a process of its own: `Compiler(version).launches(case)`.

`python -m tests.compiler 3.6.0 3.9.0` writes what these make of every case into the table beside this file, which the
tests hold the kernels to (all versions without arguments).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from axes.kernels.common.versions import TRITONS
from tests.hopper import Launch
from tests.tritons import OWN, ROOT, folder

TABLE = Path(__file__).with_name("kernels_compiled.json")
_CHECKS = ("error", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Compiler:
    """A process that compiles with one Triton: that of the environment, or one of `tests.tritons`."""

    def __init__(self, version: str) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        if version != OWN:
            paths.insert(0, str(folder(version)))
        self.version = version
        self.process = subprocess.Popen(
            [sys.executable, *[f"-W{check}" for check in _CHECKS], "-m", "tests.compiler", "serve"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def runs(self, case: str) -> list[list[Launch]]:
        """The launches of a case of `tests.kernel_cases`, one list for every size."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if isinstance(answer, str):
            raise AssertionError(f"Triton {self.version}, {case}:\n{answer}")
        return [[Launch(**row) for row in launches] for launches in answer]

    def launches(self, case: str) -> list[Launch]:
        (found,) = self.runs(case)
        return found


compiler = cache(Compiler)  # one for every version and test process; it ends with the process that reads its answers


def serve() -> None:
    """Answer cases, one a line, until there are no more."""
    import traceback

    answers, sys.stdout = sys.stdout, sys.stderr
    from tests.kernel_cases import runs

    for line in sys.stdin:
        try:
            answer: Any = [[asdict(launch) for launch in launches] for launches in runs(line.strip())]
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


# ---- the table -------------------------------------------------------------------------------------------------------

Row = tuple[int, int, int, int]  # registers a thread, bytes of stack, bytes of shared memory, products of warpgroups


def row(launch: Launch) -> Row:
    return launch.registers, launch.spills, launch.shared, launch.wgmma


def table() -> dict[str, list[dict[str, Any]]]:
    """By case, the launches in order: the name of the kernel, and by version of Triton what it made of it."""
    found: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text())
    return found


def write(versions: list[str]) -> None:
    from tests.kernel_cases import CASES

    before = table() if TABLE.exists() else {}
    cases = []
    for case in CASES:
        made = {version: compiler(version).launches(case) for version in versions}
        first = made[versions[0]]
        rows = before.get(case, [])
        old = rows if [x["kernel"] for x in rows] == [x.kernel for x in first] else [{} for _ in first]
        lines = []
        for i, launch in enumerate(first):
            now = {**old[i], **{version: row(launches[i]) for version, launches in made.items()}}
            ordered = {"kernel": launch.kernel, **{version: now[version] for version in TRITONS if version in now}}
            lines.append("  " + json.dumps(ordered))
        cases.append(f"{json.dumps(case)}: [\n" + ",\n".join(lines) + "\n]")
        print(case, file=sys.stderr)
    TABLE.write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        write(sys.argv[1:] or list(TRITONS))
