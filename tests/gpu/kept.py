"""A pytest plugin: what passed on a GPU is kept, and a run goes on where the last one was cut off.

    python -m pytest -q -n 12 -p tests.gpu.kept --kept runs/gpu --minutes 9 tests/gpu

The folder has a line for every test that ended (outcomes.jsonl: name, outcome, seconds, the error's text), written at
once: a run that is cut off has said what it saw. A run leaves out what passed before, and starts nothing behind its
minutes. An empty folder, or another one, runs everything. With `--gpus 0,1,2` each process sees one of these, and
tests of several GPUs skip themselves.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

_END = "AXES_TESTS_END"  # seconds since the epoch, for the processes of xdist too
_OVER = "the minutes are over"
# A kernel that reads what is not its own takes the GPU from its process, a recording that fails torch's random numbers.
_LOSES = ("CUDA error", "outside graph capture", "during CUDA graph capture")
_lost: list[str] = []  # tests that this process has lost its GPU by
_PASSED = "passed before.txt"  # as the run found it: all processes of xdist collect the same tests


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kept")
    group.addoption("--kept", type=Path, help="folder of outcomes")
    group.addoption("--minutes", type=float, help="no test starts behind them")
    group.addoption("--gpus", help="to spread the processes of xdist over, as 0,1,2")


def pytest_configure(config: pytest.Config) -> None:
    folder, minutes = config.getoption("--kept"), config.getoption("--minutes")
    if folder is None:
        raise pytest.UsageError("kept: name the folder of outcomes: --kept FOLDER")
    if hasattr(config, "workerinput"):
        if gpus := config.getoption("--gpus"):  # CUDA reads it at its first call
            gpus, number = gpus.split(","), int(config.workerinput["workerid"].removeprefix("gw"))
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _PASSED).write_text("\n".join(sorted(_passed(folder))))
    os.environ[_END] = str(time.time() + 60 * minutes if minutes else float("inf"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    before = set((config.getoption("--kept") / _PASSED).read_text().split("\n"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _lost and hasattr(item.config, "workerinput"):
        os._exit(1)  # xdist says so of this test, and starts another process
    if time.time() > float(os.environ[_END]):
        pytest.skip(_OVER)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and any(word in str(report.longrepr) for word in _LOSES):
        _lost.append(report.nodeid)


class Outcomes:
    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.read_text().endswith("\n"):
            with path.open("a") as file:  # its last line was cut off
                file.write("\n")
        self.not_started = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        if report.skipped and _OVER in str(report.longrepr):
            self.not_started += 1
            return
        line: dict[str, object] = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
        }
        if report.outcome != "passed":
            line["text"] = str(report.longrepr)[-2000:]
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.not_started:
            terminalreporter.write_line(f"{self.not_started} tests were not started: {_OVER}; run the same line again")


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("--kept") / "outcomes.jsonl"))


def _passed(folder: Path) -> set[str]:
    last: dict[str, str] = {}
    try:
        lines = (folder / "outcomes.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return set()
    for line in lines:
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off while it was written
        last[said["test"]] = said["outcome"]
    return {test for test, outcome in last.items() if outcome == "passed"}
