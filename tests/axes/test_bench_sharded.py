"""`axes bench sharded` in two gloo processes."""

import json
import re
from pathlib import Path

import pytest

from axes.bench.several import launch
from axes.bench.sharded import Row


def test_a_row_in_words() -> None:
    text = Row("muon", "50M", 2.0, 2.2, 1.5, 1e-6, 4, 100.0).text()
    assert "x 1.10" in text and "apart 1.0e-06" in text and "4 messages, 100.0 MB sent" in text


@pytest.mark.slow
def test_two_processes_beside_one(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--rule", "muon", "--suite", "64x64", "--unchecked", "--traces", str(tmp_path / "seen")]
    launch("axes.bench.sharded", 2, options)
    for name in ("one", "several"):
        assert json.loads((tmp_path / "seen" / f"muon-64x64-{name}.json").read_text())["traceEvents"]
    shown = capfd.readouterr()
    assert re.search(r"muon +64x64 .* apart 0\.0e\+00 +2 messages, 0\.5 MB sent", shown.out)
    assert re.search(r"^0/1 after \d+ s: muon of 64x64", shown.err, re.M) and "1/1 after" in shown.err
