"""Kernels compiled for sm_90 by a Triton of choice, in a process of its own: `Compiler(version).launches(case)`.

`python -m tests.compiler 3.6.0 3.9.0` writes what these make of every case into the table beside this file, which the
tests hold the kernels to (all versions without arguments). kernels_asked.json says what they were asked: of a case
whose text, types and constants are those of the table, the table stands, and nothing is compiled. Names of cases after
the versions write these alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from axes.kernels.common.versions import TRITONS
from tests.hopper import Asked, Launch
from tests.tritons import OWN, ROOT, folder

TABLE = Path(__file__).with_name("kernels_compiled.json")
ASKED = Path(__file__).with_name("kernels_asked.json")
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

    def _answer(self, question: str, case: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{question}\t{case}\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if isinstance(answer, str):
            raise AssertionError(f"Triton {self.version}, {case}:\n{answer}")
        return answer

    def launches(self, case: str) -> list[Launch]:
        """What a case of `tests.kernel_cases` launches, compiled: seconds each."""
        return [Launch(**row) for row in self._answer("launches", case)]

    def requests(self, case: str) -> list[list[Asked]]:
        """What it asks of the compiler, one list for every size: nothing is compiled."""
        return [[Asked(**row) for row in launches] for launches in self._answer("requests", case)]


compiler = cache(Compiler)  # one for every version and test process; it ends with the process that reads its answers


def serve() -> None:
    """Answer questions, one a line, until there are no more."""
    import traceback

    answers, sys.stdout = sys.stdout, sys.stderr
    from tests.kernel_cases import launches, requests

    for line in sys.stdin:
        question, case = line.rstrip("\n").split("\t")
        try:
            answer: Any
            if question == "launches":
                answer = [asdict(launch) for launch in launches(case)]
            else:
                answer = [[asdict(x) for x in size] for size in requests(case)]
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


def unchanged(version: str, case: str, rows: list[dict[str, Any]]) -> bool:
    """Whether this version would be asked what the rows of the table were made of."""
    made_of = asked().get(case, {}).get(version)
    return made_of is not None and made_of == _digest(version, case, rows)


def asked() -> dict[str, dict[str, str]]:
    """By case and version, the digest of what the table was made of."""
    found: dict[str, dict[str, str]] = json.loads(ASKED.read_text()) if ASKED.exists() else {}
    return found


def _digest(version: str, case: str, rows: list[dict[str, Any]]) -> str:
    """Of what is asked, and of the rows themselves, so that a number that was changed by hand is not believed."""
    (requests,) = compiler(version).requests(case)
    text = json.dumps([[asdict(x) for x in requests], [(x["kernel"], x.get(version)) for x in rows]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(versions: list[str], only: list[str]) -> None:
    """What changed is compiled, the rest is as it was."""
    from tests.kernel_cases import CASES

    before = table() if TABLE.exists() else {}
    made_of = asked()
    cases, digests = [], []
    for case in CASES:
        rows = before.get(case, [])
        for version in versions:
            if only and case not in only or unchanged(version, case, rows):
                continue
            made = compiler(version).launches(case)
            faults = [x for x in made if x.overwritten or x.barriers]
            assert not faults, f"Triton {version} breaks {case}: {faults}"
            if [x["kernel"] for x in rows] != [x.kernel for x in made]:
                rows = [{"kernel": x.kernel} for x in made]
            rows = [{**old, version: list(row(launch))} for old, launch in zip(rows, made, strict=True)]
            made_of.setdefault(case, {})[version] = _digest(version, case, rows)
            print(version, case, file=sys.stderr)
        ordered = [{name: x[name] for name in ("kernel", *TRITONS) if name in x} for x in rows]
        cases.append(f"{json.dumps(case)}: [\n" + ",\n".join(f"  {json.dumps(x)}" for x in ordered) + "\n]")
        digest = made_of.get(case, {})
        digests.append(f"{json.dumps(case)}: {json.dumps({x: digest[x] for x in TRITONS if x in digest})}")
    TABLE.write_text("{\n" + ",\n".join(cases) + "\n}\n")
    ASKED.write_text("{\n" + ",\n".join(digests) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        given = sys.argv[1:]
        write([x for x in given if x in TRITONS] or list(TRITONS), [x for x in given if x not in TRITONS])
