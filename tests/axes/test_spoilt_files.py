"""Run folders whose files were spoilt and command lines of random words: a sentence, or what was there before.

A few seeds each in `make test`, thousands in `make test-all`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from axes.cli import main
from axes.errors import AxesError
from axes.tasks.configuration import Configuration
from axes.tasks.language_modelling import resume, run, start
from axes.tasks.run_folder import RunFolder
from axes.tasks.sample import load_model

# an entropy of 1e300 leaves a curve no room
pytestmark = pytest.mark.filterwarnings("ignore:constrained_layout not applied")
FEW, MANY = 15, 1000
SMALL: dict[str, Any] = {
    "sequence": "softmax-attention", "optimizer": "adamw", "depth": "residual", "layers": 1, "width": 16, "heads": 2,
    "context": 16, "batch": 2, "steps": 2, "warmup": 1, "validation_windows": 2, "device": "cpu",
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**62, 2**63, 10**30, 0.5, -0.5, 1e300, float("nan"), float("inf"),
    "", "x", "cpu", "../..", [], {}, [1], {"a": 1}, [[[]]],
)  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and its text."""
    place = tmp_path_factory.mktemp("kept")
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    folder = RunFolder(place / "run")
    run(start(Configuration(**SMALL, text=(str(place / "text.txt"),)), folder), folder)
    return place


# ---- ways to spoil a folder ------------------------------------------------------------------------------------------


def _bytes(path: Path, draw: random.Random) -> None:
    """Some bits turned, a part cut out or put in twice, or the end missing."""
    content = bytearray(path.read_bytes())
    how, at = draw.randrange(4), draw.randrange(len(content))
    if how == 0:
        for _ in range(draw.choice((1, 1, 8))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == 1:
        del content[at : at + draw.choice((1, 30, 3000))]
    elif how == 2:
        content[at:at] = content[max(0, at - draw.choice((1, 30, 3000))) : at]
    else:
        del content[at:]
    path.write_bytes(bytes(content))


def _fields(path: Path, draw: random.Random) -> None:
    """Another value at some place of a JSON file, or none, or one more."""
    whole = json.loads(path.read_text())
    inner = whole
    while (parts := [x for x in inner.values() if isinstance(x, dict) and x]) and draw.random() < 0.7:
        inner = draw.choice(parts)
    name = draw.choice([*inner, "another"])
    if draw.random() < 0.2 and name in inner:
        del inner[name]
    else:
        inner[name] = draw.choice(VALUES)
    path.write_text(json.dumps(whole))


def _log(path: Path, draw: random.Random) -> None:
    lines = path.read_text().splitlines()
    n = draw.randrange(len(lines))
    record = {**json.loads(lines[n]), draw.choice(("step", "loss", "bits_per_byte", "z")): draw.choice(VALUES)}
    lines[n] = draw.choice((json.dumps(record), lines[n][: draw.randrange(len(lines[n]) + 1)], lines[0], "[" * 10_000))
    path.write_text("\n".join(lines) + draw.choice(("", "\n", "\n\n")))


SPOILT: dict[str, tuple[str, Callable[[Path, random.Random], None]]] = {
    "config": ("config.json", _fields), "config's bytes": ("config.json", _bytes),
    "checkpoint": ("checkpoint.pt", _bytes), "log": ("metrics.jsonl", _log), "log's bytes": ("metrics.jsonl", _bytes),
}  # fmt: skip


def _drawn(seed: int) -> AbstractContextManager[Any]:
    """A curve takes most of the time of a short run, and is drawn in one of ten."""
    return nullcontext() if seed % 10 == 0 else patch.object(RunFolder, "draw")


def _one(what: str, seed: int, kept: Path, place: Path) -> None:
    """Refused by AxesError, or read and continued; the log, whose broken lines go, is never a reason to refuse."""
    draw, run_path = random.Random(f"{what} {seed}"), place / f"{seed}"
    shutil.copytree(kept / "run", run_path)
    name, spoil = SPOILT[what]
    spoil(run_path / name, draw)
    folder = RunFolder(run_path)
    try:
        load_model(folder)
        if seed % 4 == 0:  # reading is what is spoilt; a step is the longest part
            with nullcontext() if name == "metrics.jsonl" else _drawn(seed):
                assert run(resume(folder), folder).finished
        else:
            folder.read_metrics()
    except AxesError as error:
        assert name != "metrics.jsonl" and "\n" not in str(error), f"{what} {seed}: {error}"
    finally:
        folder.release()
        shutil.rmtree(run_path)


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_file_is_refused_or_read(what: str, kept: Path, tmp_path: Path) -> None:
    for seed in range(FEW):
        _one(what, seed, kept, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("what", SPOILT)
def test_many_spoilt_files(what: str, kept: Path, tmp_path: Path) -> None:
    for seed in range(FEW, MANY):
        _one(what, seed, kept, tmp_path)


# ---- command lines ---------------------------------------------------------------------------------------------------

NUMBERS = ("--layers", "--width", "--heads", "--streams", "--recompute", "--context", "--batch", "--accumulate",
           "--lr", "--warmup", "--weight-decay", "--clip", "--seed", "--threads", "--text-limit", "--vocabulary",
           "--eval-every", "--save-every", "--validation-windows")  # fmt: skip
NAMES = ("--sequence", "--optimizer", "--depth", "--schedule", "--device", "--dtype", "--tokens", "--no-such-flag")
WORDS = ("-1", "0", "1", "2", "3", "1e3", "0.5", "nan", "inf", "-inf", "1e400", str(2**62), str(2**63), "9" * 40,
         "0x10", "", "x", "\u0661", "residual", "cpu", "mhc", "muon", "float64", "-", "--", "=", "~",
         "/dev/null")  # fmt: skip


def _line(seed: int, kept: Path, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A legal line of one step with up to three flags of random words."""
    draw = random.Random(f"line {seed}")
    sizes = [w for n, x in SMALL.items() for w in (f"--{n.replace('_', '-')}", str(1 if n == "steps" else x))]
    words = ["train", "--text", str(kept / "text.txt"), "--out", str(place / f"{seed}"), *sizes]
    for _ in range(draw.randint(1, 3)):
        flag = draw.choice(NAMES) if draw.random() < 0.3 else draw.choice(NUMBERS)
        words += [flag, draw.choice(WORDS)] if draw.random() < 0.95 else [flag]
    status: Any = 0
    try:
        with _drawn(seed):
            main(words)
    except SystemExit as error:
        status = error.code
    said = capfd.readouterr().err
    assert status in (0, None, 1, 2) and "Traceback" not in said, (words, said)
    if status == 1:
        assert said.strip().splitlines()[-1].startswith("error: "), (words, said)


def test_command_lines_of_random_words(kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(FEW):
        _line(seed, kept, tmp_path, capfd)


@pytest.mark.slow
def test_many_command_lines(kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(FEW, MANY):
        _line(seed, kept, tmp_path, capfd)
