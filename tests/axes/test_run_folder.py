"""Run folders and their files: one writer, nothing lost, nothing of others touched."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from axes.errors import AxesError
from axes.files import replacing, write_text
from axes.tasks import machine, run_folder
from axes.tasks.configuration import Configuration
from axes.tasks.interruption import stop_requested
from axes.tasks.language_modelling import resume, run, start
from axes.tasks.run_folder import RunFolder
from axes.tasks.sample import load_model

HOLD = "import sys, time; from axes.tasks.run_folder import RunFolder; f = RunFolder(sys.argv[1]); f.hold(); print('held', flush=True); time.sleep(60)"  # noqa: E501


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 80)
    return str(path)


def small(text: str, **changes: Any) -> Configuration:
    settings: dict[str, Any] = {
        "sequence": "softmax-attention", "optimizer": "adamw", "depth": "residual", "layers": 1, "width": 16,
        "heads": 2, "context": 16, "batch": 2, "steps": 4, "warmup": 1, "validation_windows": 2,
        "eval_every": 2, "save_every": 2, "text": (text,), "device": "cpu",
    }  # fmt: skip
    return Configuration(**{**settings, **changes})


@pytest.fixture
def finished(text: str, tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    run(start(small(text), folder), folder)
    return folder


def contents(folder: RunFolder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.path.iterdir() if not file.name.startswith(".")}


# ---- one writer --------------------------------------------------------------------------------------------------


def test_one_process_writes_and_a_dead_one_does_not_count(finished: RunFolder, text: str) -> None:
    before = contents(finished)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(finished.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for call in (lambda f: resume(f), lambda f: start(small(text), f, overwrite=True)):
            with pytest.raises(AxesError, match=rf"is being written by process {other.pid} on .* since 20"):
                call(RunFolder(finished.path))
        assert contents(finished) == before
    finally:
        other.kill()
        other.communicate()
    assert (finished.path / ".holder.json").exists()
    folder = RunFolder(finished.path)
    assert run(resume(folder), folder).finished
    assert not (finished.path / ".holder.json").exists()


def test_what_a_dead_writer_left_is_removed(finished: RunFolder) -> None:
    for name in (".checkpoint.99999.pt", ".metrics.1.jsonl"):
        (finished.path / name).write_text("half")
    (finished.path / ".checkpoint.notes.pt").write_text("mine")
    resume(RunFolder(finished.path))
    hidden = {file.name for file in finished.path.iterdir() if file.name.startswith(".")}
    assert hidden == {".lock", ".holder.json", ".checkpoint.notes.pt"}


# ---- overwriting ---------------------------------------------------------------------------------------------------


def test_only_runs_are_overwritten(text: str, tmp_path: Path) -> None:
    for name, content in {"model": '{"model_type": "gpt2"}', "damaged": "{", "list": "[1]"}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(content)
        with pytest.raises(AxesError, match="not a run folder: it will not be overwritten"):
            start(small(text), RunFolder(folder), overwrite=True)
        assert [f.name for f in folder.iterdir()] == ["config.json"] and (folder / "config.json").read_text() == content


def test_the_old_run_stands_until_the_new_one_is_saved(
    finished: RunFolder, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(finished)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(AxesError, match="No space left"):
        start(small(text, seed=1), RunFolder(finished.path), overwrite=True)
    assert contents(finished) == before
    monkeypatch.undo()
    folder = RunFolder(finished.path)
    assert start(small(text, seed=1), folder, overwrite=True).position == 0
    assert folder.read_metrics() == [] and not folder.curve.exists()
    assert folder.read_checkpoint()["configuration"]["seed"] == 1


def test_checkpoints_of_several_processes_take_the_place_of_one_and_the_other_way(finished: RunFolder) -> None:
    """The old ones go when the new ones are there, and not before."""

    def begin(shards: bool, fails: bool) -> None:
        with finished.beginning(overwrite=True) as new:
            new.write_config({"configuration": {}})
            place = new.path / "checkpoint-00000000"
            if shards:
                place.mkdir()
            (place / "numbers.pt" if shards else new.checkpoint).write_text("new")
            if fails:
                raise AxesError("no room")

    whole = {"config.json", "metrics.jsonl", "tuples.json"}
    for shards in (True, False):
        before = sorted(file.name for file in finished.path.iterdir() if file.name != ".lock")
        with pytest.raises(AxesError, match="no room"):
            begin(shards, fails=True)
        assert sorted(f.name for f in finished.path.iterdir() if f.name not in (".lock", ".holder.json")) == before
        begin(shards, fails=False)
        found = {file.name for file in finished.path.iterdir() if not file.name.startswith(".")}
        assert found == whole | {"checkpoint-00000000" if shards else "checkpoint.pt"}
        finished.release()


class Killed(BaseException):
    """A signal that leaves no time."""


@pytest.mark.parametrize("after", range(5))
def test_killed_between_two_files(finished: RunFolder, text: str, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    count, proper = iter(range(100)), os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(source).parent.name == ".ready" and next(count) == after:
            raise Killed
        proper(source, target)

    monkeypatch.setattr(run_folder.os, "replace", killed)
    folder = RunFolder(finished.path)
    if after < 4:  # as many files as a new run has
        with pytest.raises(Killed):
            start(small(text, seed=2), folder, overwrite=True)
    else:
        start(small(text, seed=2), folder, overwrite=True)
    monkeypatch.undo()
    folder.release()
    again = RunFolder(finished.path)
    assert again.read_config()["configuration"]["seed"] == 2
    assert run(resume(again), again).finished


def test_killed_before_the_first_save(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / ".new").mkdir(parents=True)
    (folder.path / ".new" / "config.json").write_text("{}")
    (folder.path / ".lock").touch()
    with pytest.raises(AxesError, match="ended before its first save: begin it again without --resume"):
        resume(folder)
    assert run(start(small(text), folder), folder).finished
    assert not (folder.path / ".new").exists()


# ---- stopping ------------------------------------------------------------------------------------------------------


class Fails:
    """An observer whose reader goes away after the third step."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def began(self, *given: object) -> None: ...

    def prepares(self, *given: object) -> None: ...

    def evaluated(self, *given: object) -> None: ...

    def stepped(self, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            self.fail()


def _gone(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "pipe"), OSError(errno.EIO, "terminal"), SystemExit(1)])
def test_nobody_reads_any_more(text: str, tmp_path: Path, error: BaseException) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(type(error)):
        run(start(small(text, steps=20, save_every=0), folder), folder, Fails(_gone(error)))
    assert folder.read_checkpoint()["position"] == 3 and folder.curve.exists()


def test_a_closed_terminal_saves(text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with stop_requested() as stop:
        training = start(small(text, steps=20, save_every=0), folder)
        summary = run(training, folder, Fails(lambda: os.kill(os.getpid(), signal.SIGHUP)), stop)
    assert (summary.finished, summary.steps, folder.read_checkpoint()["position"]) == (False, 3, 3)


# ---- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_is_extended(text: str, tmp_path: Path, schedule: str) -> None:
    short, whole = RunFolder(tmp_path / "short"), RunFolder(tmp_path / "whole")
    run(start(small(text, schedule=schedule), short), short)
    assert run(resume(short, steps=8), short).finished
    run(start(small(text, schedule=schedule, steps=8), whole), whole)
    rates = [[r["lr"] for r in folder.read_metrics() if "lr" in r] for folder in (short, whole)]
    assert rates[0][4:] == rates[1][4:]  # those of the longer run from there on
    if schedule == "constant":
        a, b = (folder.read_checkpoint()["model"] for folder in (short, whole))
        assert all(torch.equal(a[name], b[name]) for name in b)
    assert short.read_config()["configuration"]["steps"] == 8
    with pytest.raises(AxesError, match="has taken 8 steps"):
        resume(short, steps=7)


@pytest.mark.parametrize(
    "line",
    [
        b"{\"step\": 2, \"lo", b"[1, 2]", b"null", b"7", b"\xff\xfe", b"{}", b"{\"loss\": 3.0}", b"{\"step\": \"2\"}",
        b"{\"step\": true}", b"{\"step\": 2, \"bits_per_byte\": \"x\"}", b"{\"step\": 2, \"bits_per_byte\": null}",
        b"{\"step\": 2.5}", b"{\"step\": -1}", b"{\"step\": 2, \"loss\": NaN}", b"9" * 5000, b"[" * 5000, b"",
        b"{\"step\": 2, \"seconds\": 1" + b"0" * 400 + b"}", b"\0" * 100,
    ],
)  # fmt: skip
def test_a_broken_line_of_the_log_loses_that_line(finished: RunFolder, line: bytes) -> None:
    whole, lines = finished.read_metrics(), finished.metrics.read_bytes().splitlines()
    finished.metrics.write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    assert finished.read_metrics() == whole
    assert run(resume(finished), finished).finished
    finished.metrics.write_bytes(b"\n".join([*lines[:2], line]))
    assert finished.read_metrics() == whole[:2]


def test_a_log_without_a_time_is_summed_up(finished: RunFolder) -> None:
    lines = [{**record, **({"seconds": 0} if "seconds" in record else {})} for record in finished.read_metrics()]
    finished.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(resume(finished), finished).tokens_per_second == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "it is nested too deep"),
        ('{"format": "axes-run", "version": 1, "n": ' + "9" * 5000 + "}", "one of its numbers has thousands of digits"),
    ],
)
def test_a_config_that_python_cannot_read(finished: RunFolder, content: str, reason: str) -> None:
    """The reason is the file's, and none of Python's limits."""
    finished.config.write_text(content)
    with pytest.raises(AxesError) as refused:
        resume(finished)
    assert str(refused.value) == f"{finished.config} is damaged: {reason}"


def test_a_value_that_is_nested_deep_is_not_repeated(finished: RunFolder) -> None:
    for name in ("width", "text"):
        config = json.loads(finished.config.read_text())
        config["configuration"][name] = "value"
        deep = "[" * 500 + "]" * 500
        (finished.path / "config.json").write_text(json.dumps(config).replace('"value"', deep))
        with pytest.raises(AxesError, match=f"{name} must be") as refused:
            resume(finished)
        assert len(str(refused.value)) < 200 + len(str(finished.config))


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [("width", 10**30, "width must be less than 2"), ("layers", 10**25, "layers must be less"),
     ("batch", 2**63, "batch"),
     ("layers", 10**12, "belongs to another|does not fit"), ("width", 10**9, "belongs to another|does not fit")],
)  # fmt: skip
def test_a_config_of_sizes_that_nobody_has(finished: RunFolder, name: str, size: int, says: str) -> None:
    """Neither continued nor sampled: what the checkpoint holds is less than any model of these sizes."""
    config = json.loads(finished.config.read_text())
    config["configuration"][name] = size
    finished.config.write_text(json.dumps(config))
    for read in (resume, load_model):
        with pytest.raises(AxesError, match=says):
            read(RunFolder(finished.path))


def test_a_run_of_a_larger_machine_is_read(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda device: 1000)
    assert load_model(RunFolder(finished.path)) is not None
    with pytest.raises(AxesError, match="need at least .* GB"):
        resume(RunFolder(finished.path))


# ---- files ---------------------------------------------------------------------------------------------------------


def test_what_is_renamed_has_reached_the_disk_and_so_does_its_name(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole run: what stands under a temporary name is flushed before it gets its own, the folder behind it."""
    flushed: list[int] = []  # inodes, in order
    waiting: dict[int, Path] = {}  # folders with new names that are not flushed yet

    def watched(true: Callable[..., None]) -> Callable[..., None]:
        def move(source: Any, target: Any, **more: Any) -> None:
            assert os.stat(source).st_ino in flushed, source
            true(source, target, **more)
            folder = Path(target).parent
            waiting[folder.stat().st_ino] = folder

        return move

    fsync = os.fsync

    def flush(handle: int) -> None:
        fsync(handle)
        flushed.append(os.fstat(handle).st_ino)
        waiting.pop(flushed[-1], None)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(os, "fsync", flush)
    folder = RunFolder(tmp_path / "run")
    run(start(small(text), folder), folder)
    assert len(flushed) > 6 and not waiting, waiting


def test_links_lead_where_they_led_and_devices_stay(tmp_path: Path) -> None:
    target, link, beside = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "link.json.part"
    target.write_text("old")
    beside.write_text("mine")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and beside.read_text() == "mine"
    write_text(Path("/dev/null"), "nothing")
    assert Path("/dev/null").is_char_device()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["link.json", "link.json.part", "target.json"]
    ours, theirs = os.pipe()
    write_text(Path(f"/dev/fd/{theirs}"), "piped")  # as /dev/stdout, a link to what has no name
    assert os.read(ours, 10) == b"piped"
    os.close(ours)
    os.close(theirs)


def test_a_link_that_leads_to_itself_is_said(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(AxesError, match=r"could not write .*one.json: Too many levels"):
        write_text(one, "new")
    assert one.is_symlink() and other.is_symlink()


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_text(path, json.dumps([1]))
    message = r"could not write .*rows.json: No space left.*the previous one is intact"
    with pytest.raises(AxesError, match=message), replacing(path) as temporary:
        temporary.write_text("[")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_text() == "[1]" and list(tmp_path.iterdir()) == [path]
