"""Runs of tests that are cut off: what passed is not run again, what failed is, and what did not start is said."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
def test_right(): pass
def test_wrong(): assert {right}
"""


def _run(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.kept", "test_some.py"]
    done = subprocess.run(
        [*command, *options], cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS.format(right=False))
    kept = "--kept", str(tmp_path / "kept")
    assert "2 tests were not started: the minutes are over" in _run(tmp_path, *kept, "--minutes", "-1")
    assert "1 failed, 1 passed" in _run(tmp_path, *kept)
    outcomes = tmp_path / "kept" / "outcomes.jsonl"
    right, wrong = (json.loads(line) for line in outcomes.read_text().splitlines())
    assert right["outcome"] == "passed" and wrong["outcome"] == "failed" and "assert False" in wrong["text"]
    outcomes.write_text(outcomes.read_text() + '{"test": "cut o')
    file.write_text(TESTS.format(right=True))
    assert "1 passed, 1 deselected" in _run(tmp_path, *kept)
    assert "2 deselected" in _run(tmp_path, *kept)
    assert "name the folder of outcomes" in _run(tmp_path)
