"""A run by several processes is the run of one: windows and tokens shared out, stopped, resumed, sharded anew."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from axes.errors import AxesError
from axes.tasks import processes
from axes.tasks.configuration import Configuration
from axes.tasks.corpus import from_files
from axes.tasks.language_modelling import resume, run, start
from axes.tasks.run_folder import RunFolder
from axes.tasks.sample import load_model

SMALL = dict(
    optimizer="adamw", layers=1, width=16, heads=2, streams=2, context=16, batch=4, steps=4, eval_every=2, save_every=2,
    validation_windows=5, text_limit=20_000, dtype="float64", device="cpu",
)  # fmt: skip


_save = torch.save


def full(*given: Any, **more: Any) -> None:
    """A disk on which nothing has room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def work(folder: Path, cases: list[dict[str, Any]]) -> None:
    """What a process of torchrun does: runs one after another, each stopped and resumed as it is said."""
    torch.set_num_threads(1)
    with processes.leaving(), processes.joined():
        for case in cases:
            if "refuses" in case:
                refuses(folder, case["refuses"], int(os.environ["RANK"]))
                continue
            place = RunFolder(folder / case["name"])
            if "settings" in case:
                configuration = Configuration(**case["settings"])
                shared = processes.Processes(configuration.torch_device(), configuration.sequence_parallel)
                if case.get("full"):
                    torch.save = full
                try:
                    training = start(configuration, place, case.get("overwrite", False), shared)
                except AxesError as error:
                    (folder / "refused").write_text(str(error))
                    continue
                finally:
                    torch.save = _save
            else:
                training = resume(place, processes=processes.Processes(torch.device("cpu"), case.get("segments", 1)))
            run(training, place, stop=lambda t=training, c=case: t.position >= c.get("until", 99))
            if "dies" in case and training.processes is not None and training.processes.rank == 1:
                os._exit(0)


def refuses(folder: Path, what: str, rank: int) -> None:
    """What one process finds and another does not is said by both."""
    file = folder / f"{rank}.txt"
    file.write_text("the same on both " * 100 + ("" if what == "missing" else str(rank)))
    if what == "missing" and rank:
        file.unlink()
    def text() -> Any:
        return from_files([file])

    def same(made: Any) -> dict[str, Any]:
        return {"seed": 0, "text": made.provenance.sha256}

    try:
        processes.agreed(text, same)
    except AxesError as error:
        (folder / f"{what}-{rank}").write_text(str(error))
    assert processes.agreed(lambda: rank, lambda made: {"name": "one"}) == rank  # nobody waits for anybody


def torchrun(folder: Path, cases: list[dict[str, Any]], world: int) -> list[str]:
    """What the processes said on stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-W", "ignore", __file__, str(folder), json.dumps(cases)]
    running = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        env = {**os.environ, **place, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        running.append(subprocess.Popen(command, env={**env, "AXES_TIMEOUT": "60"}, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=240)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    return [text for process, text in zip(running, said, strict=True) if process.returncode]


def measured(folder: RunFolder) -> list[dict[str, Any]]:
    return [{n: x for n, x in r.items() if n not in ("seconds", "tokens_per_second")} for r in folder.read_metrics()]


def near(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert [r.keys() for r in one] == [r.keys() for r in other]
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=1e-9)


_ENDS = """
import atexit, sys, time, threading
from axes.tasks.processes import leaving

class Last:
    def __del__(self):
        print("taken apart")

kept = Last()
atexit.register(print, "asked for")
with leaving():
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
    sys.exit(3)
"""


@pytest.mark.parametrize("launched", [True, False])
def test_a_process_of_several_ends_without_taking_the_interpreter_apart(launched: bool) -> None:
    """Threads of gloo, of which torch keeps some, abort a process whose interpreter goes while they need it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"RANK": "0", "WORLD_SIZE": "2"} if launched else {}
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", _ENDS], env=env, capture_output=True, text=True)
    assert ended.returncode == 3 and not ended.stderr
    assert ended.stdout.splitlines() == ["a thread", "asked for", *(() if launched else ("taken apart",))]


@pytest.mark.slow
def test_processes_train_as_one(tmp_path: Path) -> None:
    alone = RunFolder(tmp_path / "alone")
    run(start(Configuration(**SMALL), alone), alone)  # type: ignore[arg-type]
    parts = {**SMALL, "accumulate": 2}
    cases: list[dict[str, Any]] = [
        {"name": "data", "settings": SMALL},
        {"name": "parts", "settings": parts},
        {"name": "tokens", "settings": {**SMALL, "sequence_parallel": 2}},
        {"name": "stopped", "settings": SMALL, "until": 3},
        {"name": "stopped"},
        {"name": "fewer", "settings": SMALL, "until": 2},
    ]
    assert not torchrun(tmp_path, cases, 2)
    for name in ("data", "parts", "tokens", "stopped"):
        near(measured(RunFolder(tmp_path / name)), measured(alone))
    assert measured(RunFolder(tmp_path / "stopped")) == measured(RunFolder(tmp_path / "data"))  # bit for bit
    assert not torchrun(tmp_path, [{"name": "fewer"}], 1)
    near(measured(RunFolder(tmp_path / "fewer")), measured(alone))
    one, two = (load_model(RunFolder(tmp_path / name)) for name in ("alone", "data"))
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, n=name: f"{n}: {m}")
    with pytest.raises(AxesError, match="continue it under torchrun"):
        resume(RunFolder(tmp_path / "data"))
    said = torchrun(tmp_path, [{"name": "alone"}], 2)
    assert len(said) == 2 and all("saved by one process: continue it without torchrun" in text for text in said)
    said = torchrun(tmp_path, [{"name": "lost", "settings": SMALL, "until": 1, "dies": True}, {"name": "lost"}], 2)
    assert len(said) == 1 and "another process" in said[0]


@pytest.mark.slow
def test_a_run_that_processes_overwrite_stands_until_theirs_is_saved(tmp_path: Path) -> None:
    """Of one process, and of several; what comes in its place has a checkpoint of the other kind."""
    short = {**SMALL, "steps": 1, "eval_every": 0, "save_every": 0}
    alone, kept = RunFolder(tmp_path / "alone"), RunFolder(tmp_path / "kept")
    run(start(Configuration(**short), alone), alone)  # type: ignore[arg-type]
    shutil.copytree(alone.path, kept.path)
    before = {file.name: file.read_bytes() for file in kept.path.iterdir()}
    new = {"settings": {**short, "seed": 1}, "overwrite": True}
    assert not torchrun(tmp_path, [{**new, "name": "kept", "full": True}, {**new, "name": "alone"}], 1)
    assert "No space left" in (tmp_path / "refused").read_text()
    assert {n: (kept.path / n).read_bytes() for n in before} == before
    assert not alone.checkpoint.exists() and alone.read_checkpoint()["configuration"]["seed"] == 1
    start(Configuration(**short), alone, overwrite=True)  # type: ignore[arg-type]
    assert alone.checkpoint.exists() and not list(alone.path.glob("*checkpoint-*"))


def test_what_one_process_does_not_find_or_finds_otherwise_is_said_by_all(tmp_path: Path) -> None:
    assert torchrun(tmp_path, [{"refuses": "missing"}, {"refuses": "other"}], world=2) == []
    for rank in (0, 1):
        assert (tmp_path / f"missing-{rank}").read_text() == f"process 1: {tmp_path / '1.txt'} does not exist"
        said = (tmp_path / f"other-{rank}").read_text()
        assert said.startswith("process 1 has another text than process 0, ") and "the same files" in said


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(AxesError, match="accumulate must be a divisor of batch"):
        Configuration(batch=4, accumulate=3)
    configuration = Configuration(**{**SMALL, "sequence_parallel": 2})  # type: ignore[arg-type]
    with pytest.raises(AxesError, match="torchrun --nproc-per-node 2"):
        start(configuration, RunFolder("nowhere"))
    assert not Path("nowhere").exists()


if __name__ == "__main__":
    work(Path(sys.argv[1]), json.loads(sys.argv[2]))
