"""Bad input: one clear sentence, a non-zero exit status, no traceback, and nothing lost."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest
import torch

import axes
from axes import catalogue, optim
from axes.cli import main
from axes.errors import AxesError, UnknownName
from axes.sequence import GatedDeltaNet
from axes.tasks.configuration import Configuration, configuration_from_dict
from axes.tasks.language_modelling import resume, run, start
from axes.tasks.run_folder import RunFolder

SMALL = {"layers": 1, "width": 32, "heads": 2, "context": 24, "batch": 2, "warmup": 2, "validation-windows": 4}
SIZES = ["--device", "cpu", *(word for name, value in SMALL.items() for word in (f"--{name}", str(value)))]
Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must fail: the one line it writes to stderr."""

    def invoke(*arguments: object, status: int = 1) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        _, errors = capfd.readouterr()
        assert exit_.value.code == status
        assert "Traceback" not in errors
        if status == 1:
            assert errors.startswith("error: ")
            assert errors.count("\n") == 1
        return errors

    return invoke


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("words are made of letters, and lines of words. " * 100)
    return path


@pytest.fixture
def finished(tmp_path: Path, text: Path) -> RunFolder:
    """A small run of three steps."""
    folder = RunFolder(tmp_path / "run")
    run(start(small(text), folder), folder)
    return folder


def small(text: Path, **changes: Any) -> Configuration:
    settings: dict[str, Any] = {
        "sequence": "softmax-attention",
        "optimizer": "adamw",
        "depth": "residual",
        "layers": 1,
        "width": 32,
        "heads": 2,
        "context": 24,
        "batch": 2,
        "steps": 3,
        "save_every": 1,
        "validation_windows": 2,
        "device": "cpu",
        "text": (str(text),),
    }
    return Configuration(**{**settings, **changes})


@pytest.mark.parametrize(
    ("flag", "given", "nearest"),
    [
        ("--sequence", "gated-deltanet", "gated-delta-net"),
        ("--optimizer", "moun", "muon"),
        ("--depth", "mch", "mhc"),
        ("--dtype", "flaot32", "float32"),
        ("--schedule", "cosin", "cosine"),
        ("--device", "cdua", "cuda"),
    ],
)
def test_unknown_names_offer_the_nearest(refused: Refused, tmp_path: Path, flag: str, given: str, nearest: str) -> None:
    message = refused("train", *SIZES, flag, given, "--out", tmp_path / "run")
    assert repr(given) in message
    assert nearest in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "meant"), [("adamW", "adamw"), ("GatedDeltaNet", "gated-delta-net"), ("rms_prop", "rmsprop")]
)
def test_another_spelling_is_the_name_that_it_means(given: str, meant: str) -> None:
    with pytest.raises(UnknownName) as refused:
        catalogue.get(given)
    assert str(refused.value) == f"unknown instance {given!r}: did you mean {meant}?"


@pytest.mark.parametrize(("module", "name"), [(optim, "Adamw"), (axes, "StateUpdates")])
def test_python_knows_where_to_look_for_the_nearest(module: ModuleType, name: str) -> None:
    """An AttributeError that says whose attribute is missing is printed with what Python finds there."""
    with pytest.raises(AttributeError) as refused:
        getattr(module, name)
    assert refused.value.name == name and refused.value.obj is module


def test_an_implementation_is_asked_for_by_its_name_when_a_layer_is_built() -> None:
    with pytest.raises(AxesError, match="implementation 'cuda' is not one of reference, torch, triton"):
        GatedDeltaNet(8, implementation="cuda")  # type: ignore[arg-type]


def test_unknown_names_elsewhere(refused: Refused) -> None:
    assert "did you mean gated-delta-net" in refused("explain", "gated-deltanet")
    assert "torch knows no device 'gpu'" in refused("explain", "muon", "--device", "gpu")
    assert "did you mean float64 or float32" in refused("explain", "muon", "--dtype", "float8")
    assert "a claim runs nowhere" in refused("explain", "A01", "--device", "cpu")
    assert "a claim runs nowhere" in refused("explain", "A01", "--axis", "data")
    assert "did you mean sequence" in refused("explain", "muon", "--axis", "sequense")
    assert "muon" in refused("cite", "moun")
    assert "did you mean sequence" in refused("list", "--axis", "sequences")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "-3"], "steps must be at least 1, got -3"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--context", "0"], "context must be at least 1, got 0"),
        (["--layers", "0"], "layers must be at least 1, got 0"),
        (["--heads", "3"], "heads must divide width: 3 heads do not divide a width of 32"),
        (["--streams", "0"], "streams must be at least 1, got 0"),
        (["--lr", "-0.1"], "lr must be a positive number, got -0.1"),
        (["--lr", "nan"], "lr must be a positive number, got nan"),
        (["--weight-decay", "-1"], "weight-decay must be 0 or a positive number, got -1.0"),
        (["--clip", "inf"], "clip must be 0 (no clipping) or a positive number, got inf"),
        (["--warmup", "-1"], "warmup must be 0 or more, got -1"),
        (["--seed", "-1"], "seed must be 0 or more, got -1"),
        (["--eval-every", "-1"], "eval-every must be 0 or more, got -1"),
        (["--device", "meta"], "device 'meta' is not supported"),
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--text-limit", "-5"], "text-limit must be 0 or more, got -5"),
    ],
)
def test_bad_values_of_flags(refused: Refused, tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in refused("train", *SIZES, *arguments, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [["train", "--steps", "many"], ["train", "--no-such-flag"], ["no-such-command"], ["sample"], ["train", "stray"]],
)
def test_malformed_command_lines(refused: Refused, arguments: list[str]) -> None:
    refused(*arguments, status=2)


def test_missing_empty_binary_and_short_text(refused: Refused, tmp_path: Path) -> None:
    def message(*paths: Path) -> str:
        return refused("train", *SIZES, "--out", tmp_path / "run", "--text", *paths)

    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\0\0\0")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"\0\0")
    assert "nowhere.txt does not exist" in message(tmp_path / "nowhere.txt")
    assert "empty.txt is empty" in message(tmp_path / "empty.txt")
    assert "blank.txt is empty" in message(tmp_path / "blank.txt")
    assert "image.png looks binary (a NUL byte at offset 6)" in message(tmp_path / "image.png")
    assert "folder holds no text file" in message(tmp_path / "folder")
    assert "too short" in message(tmp_path / "short.txt")
    assert not (tmp_path / "run").exists()


def test_resume_and_sample_of_a_missing_run(refused: Refused, tmp_path: Path) -> None:
    assert "there is no run folder" in refused("train", "--resume", tmp_path / "nowhere")
    assert "there is no run folder" in refused("sample", tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    assert "it has no config.json" in refused("train", "--resume", tmp_path / "other")


def test_foreign_folder_is_never_overwritten(refused: Refused, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    arguments = ("train", *SIZES, "--text", text, "--out", out)
    assert "is not empty" in refused(*arguments)
    assert "not a run folder" in refused(*arguments, "--overwrite")
    assert (out / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    assert "a run needs a folder" in refused("train", *SIZES, "--text", text, "--out", tmp_path / "file")


def test_overwrite_leaves_files_that_are_not_of_the_run(finished: RunFolder, text: Path) -> None:
    (finished.path / "notes.txt").write_text("mine")
    start(small(text), finished, overwrite=True)
    assert (finished.path / "notes.txt").read_text() == "mine"
    assert finished.read_checkpoint()["position"] == 0


class Payload:
    """Pickles to a call that would create a file when loaded carelessly."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed-by-pickle",))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def _zero_the_beginning(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes(64) + content[64:])


def _flip_a_bit_of_a_tensor(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncate, "is damaged"),
        (_zero_the_beginning, "is damaged"),
        (_flip_a_bit_of_a_tensor, "is damaged: the checksum"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_text("not a checkpoint"), "is damaged"),
        (lambda path: path.unlink(), "has no checkpoint.pt"),
        (lambda path: torch.save({"weights": torch.zeros(3)}, path), "was not written by this program"),
        (lambda path: torch.save([1, 2, 3], path), "was not written by this program"),
        (lambda path: torch.save({"a": Payload()}, path), "does not hold plain tensors"),
        (lambda path: torch.save({"format": "axes-run", "version": 99}, path), "format version 99"),
        (lambda path: torch.save({"format": "axes-run", "version": 1}, path), "another configuration"),
    ],
    ids=[
        "truncated",
        "beginning",
        "bit",
        "empty",
        "text",
        "missing",
        "foreign",
        "list",
        "executable",
        "version",
        "bare",
    ],
)
def test_corrupt_and_foreign_checkpoints(
    refused: Refused, finished: RunFolder, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    monkeypatch.chdir(finished.path.parent)
    spoil(finished.checkpoint)
    assert message in refused("train", "--resume", finished)
    refused("sample", finished)
    assert not Path("executed-by-pickle").exists()


def test_checkpoint_of_another_run(refused: Refused, finished: RunFolder, tmp_path: Path, text: Path) -> None:
    other = RunFolder(tmp_path / "other")
    start(small(text, width=64), other)
    shutil.copy(other.checkpoint, finished.checkpoint)
    assert "belongs to another configuration" in refused("train", "--resume", finished)
    assert "does not fit" in refused("sample", finished)


def test_text_that_changed_since(refused: Refused, finished: RunFolder, text: Path) -> None:
    text.write_text(text.read_text() + "one more sentence.")
    assert "trained on another text" in refused("train", "--resume", finished)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is damaged"),
        ("[]", "was not written by this program"),
        ('{"format": "axes-run", "version": 1}', "holds no configuration"),
        ('{"format": "axes-run", "version": 1, "configuration": {"wdith": 3}}', "wdith"),
        ('{"format": "axes-run", "version": 1, "configuration": {"width": "wide"}}', "width must be int, got 'wide'"),
        ('{"format": "axes-run", "version": 1, "configuration": {"text": 3}}', "text must be a list of paths"),
    ],
)
def test_damaged_configuration(refused: Refused, finished: RunFolder, content: str, message: str) -> None:
    finished.config.write_text(content)
    assert message in refused("train", "--resume", finished)


def test_configuration_survives_a_round_trip(text: Path) -> None:
    configuration = small(text, lr=0.1, compile=True)
    assert configuration_from_dict(json.loads(json.dumps(configuration.as_dict()))) == configuration


class FullDisk:
    """A file that takes some bytes and then finds the disk full."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self.file, self.room = file, room

    def write(self, content: Any) -> int:
        self.room -= len(memoryview(content).cast("B"))
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 10_000])
def test_full_disk_keeps_the_old_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    folder = RunFolder(tmp_path / "run")
    training = start(small(text, steps=4), folder)
    run(training, folder, stop=lambda: training.position >= 2)
    before = folder.checkpoint.read_bytes()
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda payload, file: save(payload, FullDisk(file, room)))
    with pytest.raises(AxesError, match=r"could not write .*checkpoint\.pt: No space left on device; the previous one"):
        run(training, folder)
    assert folder.checkpoint.read_bytes() == before
    assert [file.name for file in folder.path.iterdir() if file.name.startswith(".")] == [".lock"]
    monkeypatch.undo()
    again = resume(folder)
    assert again.position == 2
    assert run(again, folder).finished


def test_full_disk_on_the_command_line(
    refused: Refused, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    message = refused("train", *SIZES, "--steps", 1, "--text", text, "--out", tmp_path / "run")
    assert "No space left on device" in message


def test_folder_that_cannot_be_written(refused: Refused, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused("train", *SIZES, "--text", text, "--out", tmp_path / "file" / "run")


def test_failing_compiler_is_one_sentence(
    refused: Refused, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})

    def compiled(*arguments: Any) -> None:
        raise failure("no C++ compiler\nand a long trace of the compiler")

    monkeypatch.setattr(torch, "compile", lambda network: compiled)
    message = refused("train", *SIZES, "--compile", "--text", text, "--out", tmp_path / "run")
    assert message == "error: torch.compile failed: no C++ compiler; leave out --compile\n"


def test_diverging_run_stops_with_a_sentence(refused: Refused, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--sequence", "softmax-attention", "--optimizer", "sgd", "--depth", "residual", "--clip", 0)
    message = refused(
        "train", *SIZES, *arguments, "--lr", 1e30, "--warmup", 0, "--steps", 20, "--text", text, "--out", out
    )
    assert "is not finite" in message
    assert "the last checkpoint is kept" in message
    assert all(torch.isfinite(value).all() for value in RunFolder(out).read_checkpoint()["model"].values())


def test_sample_refuses_bad_values(refused: Refused, finished: RunFolder) -> None:
    assert "tokens must be 0 or more, got -1" in refused("sample", finished, "--tokens", "-1")
    assert "temperature must be 0 (greedy) or a positive number" in refused("sample", finished, "--temperature", "-1")
    assert "device" in refused("sample", finished, "--device", "gpu")
    for seed in (str(2**63), "9" * 20):
        assert "seed must be less than 2**63" in refused("sample", finished, "--seed", seed)


def test_an_error_does_not_stand_behind_the_prompt(finished: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    """What is written of a text ends its line before the sentence; where nothing is, there is no empty line."""
    state = finished.read_checkpoint()
    state["model"] = {name: x * math.nan for name, x in state["model"].items()}
    finished.write_checkpoint(state)
    for prompt, written in (("words ", "words \n"), ("a line\n", "a line\n"), ("", "")):
        capfd.readouterr()
        with pytest.raises(SystemExit):
            main(["sample", str(finished), "--prompt", prompt])
        output, errors = capfd.readouterr()
        assert output == written and errors.startswith("error: the model's outputs are not finite")


def test_weight_decay_that_an_optimizer_lacks_is_said(text: Path) -> None:
    from axes.tasks.training import make_optimizer

    class Undecayed(torch.optim.SGD):
        def __init__(self, model: torch.nn.Module, lr: float) -> None:
            super().__init__(model.parameters(), lr=lr)

    with pytest.MonkeyPatch.context() as patch:
        from types import SimpleNamespace

        from axes import catalogue

        configuration = small(text, weight_decay=0.1)
        patch.setattr(catalogue, "get", lambda name, axis=None: SimpleNamespace(cls=Undecayed))
        with pytest.raises(AxesError, match="has no weight decay: leave --weight-decay out"):
            make_optimizer(configuration, torch.nn.Linear(2, 2))


def test_more_than_the_machine_has(refused: Refused, tmp_path: Path) -> None:
    assert "threads must be at most" in refused("train", "--threads", 100_000, "--out", tmp_path / "run")
    assert "GB" in refused("train", "--width", 1_000_000, "--heads", 1000, "--out", tmp_path / "run")
    assert "--steps must be at least 1" in refused("bench", "training", "--steps", 0, "--out", tmp_path / "run")
    assert "GB" in refused("bench", "training", "--width", 96 * 10**4, "--device", "cpu", "--out", tmp_path / "run")
    assert "--seeds must be from 1" in refused("verify", "A01", "--seeds", 2**63 - 1)
    assert not (tmp_path / "run").exists()
