"""The command line: every command, what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from axes import catalogue
from axes.cli import main
from axes.tasks.run_folder import RunFolder

SMALL = {"layers": 1, "width": 32, "heads": 2, "context": 24, "batch": 2, "warmup": 2, "validation-windows": 4}
SIZES = ["--device", "cpu", *(word for name, value in SMALL.items() for word in (f"--{name}", str(value)))]
Axes = Callable[..., tuple[int, str, str]]


@pytest.fixture
def axes(capfd: pytest.CaptureFixture[str]) -> Axes:
    """Run a command in this process: exit status, stdout, stderr."""

    def invoke(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        output, errors = capfd.readouterr()
        return int(exit_.value.code or 0), output, errors

    return invoke


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("words are made of letters, and lines of words. " * 100)
    return path


def test_help_fits_a_terminal() -> None:
    """Of every command, on one of 80 columns."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from axes.cli import app

    def commands(of: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        yield path
        for name, inner in getattr(of, "commands", {}).items():
            yield from commands(inner, (*path, name))

    for path in commands(get_command(app)):
        said = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}, terminal_width=80)
        assert said.exit_code == 0 and "Usage" in said.output, path
        assert max(map(len, said.output.splitlines())) <= 80, path


def test_dtypes_are_explained_and_a_wrong_one_is_told_those_that_are(
    axes: Axes, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, said, _ = axes("train", "--help")
    assert "bfloat16-streams keeps the residual streams in it too" in " ".join(said.replace("│", " ").split())
    code, _, said = axes("train", *SIZES, "--text", text, "--out", tmp_path / "run", "--dtype", "bfloat16-stream")
    assert code == 1 and "did you mean bfloat16-streams" in said
    code, _, said = axes("train", *SIZES, "--text", text, "--out", tmp_path / "run", "--dtype", "int8")
    assert code == 1 and "known: bfloat16, bfloat16-pure, bfloat16-streams, float32, float64" in said
    assert not (tmp_path / "run").exists()


def test_train_and_sample(axes: Axes, tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    status, output, errors = axes("train", *SIZES, "--steps", 6, "--text", text, "--out", run, "--eval-every", 3)
    assert (status, errors) == (0, "")
    assert "step 3/6" in output
    assert "validation" in output
    table = output[output.index("sequence x optimizer") :].splitlines()
    assert "unigram" in table[0] and max(map(len, table[:-1])) <= 80
    assert str(run) in output
    status, output, errors = axes("sample", run, "--prompt", "words", "--tokens", 20, "--greedy")
    assert (status, errors) == (0, "")
    assert output.startswith("words")
    assert axes("sample", run, "--prompt", "words", "--tokens", 20, "--greedy")[1] == output
    assert axes("sample", run, "--tokens", 40, "--seed", 1)[1] != axes("sample", run, "--tokens", 40, "--seed", 2)[1]


def test_text_takes_several_paths(axes: Axes, tmp_path: Path, text: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("something else entirely, with other words. " * 60)
    run = tmp_path / "run"
    status, _, errors = axes("train", *SIZES, "--text", text, other, "--steps", 1, "--out", run)
    assert (status, errors) == (0, "")
    config = RunFolder(run).read_config()
    assert config["configuration"]["text"] == [str(text), str(other)]
    assert config["corpus"]["documents"] == 2


def test_default_run_folder_and_embedded_corpus(axes: Axes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("train", *SIZES, "--steps", 1, "--sequence", "softmax-attention", "--optimizer", "adamw")
    assert axes(*arguments, "--depth", "residual", "--text-limit", 200_000)[0] == 0
    run = tmp_path / "runs" / "softmax-attention-adamw-residual"
    assert "standard library" in RunFolder(run).read_config()["corpus"]["source"]


def test_resume_continues_and_refuses_other_settings(axes: Axes, tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    assert axes("train", *SIZES, "--steps", 3, "--text", text, "--out", run)[0] == 0
    status, output, _ = axes("train", "--resume", run)
    assert status == 0
    assert f"continuing {run} at step 3" in output
    status, _, errors = axes("train", "--resume", run, "--steps", 10, "--weight-decay", 0.1)
    assert status == 1
    assert "leave out --weight-decay" in errors
    status, output, _ = axes("train", "--resume", run, "--steps", 5)
    assert status == 0 and "step 5/5" in output
    status, _, errors = axes("train", "--resume", run, "--steps", 4)
    assert status == 1 and "has taken 5 steps" in errors


def test_a_folder_with_a_run_is_not_overwritten_unasked(axes: Axes, tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", *SIZES, "--steps", 1, "--text", text, "--out", run)
    assert axes(*arguments)[0] == 0
    before = (run / "checkpoint.pt").read_bytes()
    status, _, errors = axes(*arguments)
    assert status == 1
    assert "--resume" in errors and "--overwrite" in errors
    assert (run / "checkpoint.pt").read_bytes() == before
    assert axes(*arguments, "--overwrite")[0] == 0


def test_list(axes: Axes) -> None:
    status, output, _ = axes("list")
    assert status == 0
    assert all(entry.name in output for entry in catalogue.entries())
    _, output, _ = axes("list", "--axis", "depth")
    assert "mhc" in output and "gated-delta-net" not in output
    _, output, _ = axes("list", "--axis", "data", "--json")
    rows = json.loads(output)
    assert {"muon", "adamw"} <= {row["name"] for row in rows}
    assert all(row["axis"] == "data" for row in rows)


def test_explain_and_cite(axes: Axes) -> None:
    status, output, _ = axes("explain", "gated-delta-net")
    assert status == 0
    assert "StateUpdate(" in output
    for words in (("muon", "stacks by torch on cpu"), ("mhc", "chain by torch on cpu"), ("adamw", "entrywise by")):
        assert words[1] in axes("explain", words[0])[1]
    status, output, _ = axes("explain", "titans", "--device", "cuda:sm_80", "--dtype", "bfloat16")
    assert status == 0 and "cascade by triton on cuda (sm_80), bfloat16" in output
    status, output, _ = axes("explain", "muon", "--axis", "sequence")
    assert status == 0 and output.startswith("* cost       [Given() -> SquaredError()]")
    status, output, _ = axes("cite", "gated-delta-net")
    assert status == 0
    assert output.lstrip().startswith("@")


def test_no_command_prints_help(axes: Axes) -> None:
    status, output, errors = axes()
    assert status in (0, 2)
    assert "train" in output + errors
    assert "Traceback" not in output + errors


def test_ctrl_c_saves_and_says_how_to_continue(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    arguments = ["train", *SIZES, "--steps", "100000", "--eval-every", "0", "--text", str(text), "--out", str(run)]
    code = f"from axes.cli import main; main({arguments!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not RunFolder(run).read_metrics() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert f"axes train --resume {run}" in output
    assert "Traceback" not in errors
    position = RunFolder(run).read_checkpoint()["position"]
    assert position >= 1
    assert [record["step"] for record in RunFolder(run).read_metrics()] == list(range(1, position + 1))


def test_the_command_line_loads_no_plotting_library() -> None:
    code = "import sys, axes.cli; sys.exit('matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
