"""Processes of a bench: they end together, with a sentence, and leave this process as it was."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from axes.bench.several import launch
from axes.cli import main
from axes.errors import AxesError

DIES = """
import os, signal, time
from axes.bench.several import met, process
from axes.errors import AxesError

def main(how: str) -> None:
    with met() as (rank, device):
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise AxesError("this process lacks something")
        time.sleep(600)  # as one that waits for a message

if __name__ == "__main__":
    process(main)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "one_that_dies.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "one_that_dies"


@pytest.mark.parametrize(
    ("how", "says"), [("killed", "process 1 of the 2 of this bench was ended by SIGKILL"), ("refused", "ended with 1")]
)
def test_one_that_dies_ends_all(module: str, how: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads, begun = os.environ.get("OMP_NUM_THREADS"), time.monotonic()
    with pytest.raises(AxesError, match=says):
        launch(module, 2, [how])
    assert time.monotonic() - begun < 300
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert os.environ.get("OMP_NUM_THREADS") == threads
    said = capfd.readouterr().err
    assert "Traceback" not in said and ("this process lacks something" in said) == (how == "refused")


def test_wrong_options_are_sentences(capfd: pytest.CaptureFixture[str]) -> None:
    for options, says in ((["--processes", "0"], "must be at least 1, got 0"), (["--layer", "no-layer"], "no-layer")):
        with pytest.raises(SystemExit) as end:
            main(["bench", "segments", *options])
        said = capfd.readouterr().err
        assert end.value.code == 1 and says in said and "Traceback" not in said
