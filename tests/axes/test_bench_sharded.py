"""`axes bench sharded` in two gloo processes."""

import re

import pytest

from axes.bench.sharded import Row, launch


def test_a_row_in_words() -> None:
    text = Row("muon", "50M", 2.0, 2.2, 1.5, 1e-6, 4, 100.0).text()
    assert "x 1.10" in text and "apart 1.0e-06" in text and "4 messages, 100.0 MB sent" in text


@pytest.mark.slow
def test_two_processes_beside_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, ["--rule", "muon", "--suite", "64x64", "--unchecked"]) == 0
    said = re.search(r"muon +64x64 .* apart 0\.0e\+00 +2 messages, 0\.5 MB sent", capfd.readouterr().out)
    assert said is not None
