"""Plans, folders and runs: what is stopped goes on, what is done is not done again, what does not fit is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from axes.errors import AxesError, UnknownName
from axes.files import write_json
from axes.transfer import folder as folders
from axes.transfer import training, trials
from axes.transfer.capture import Again, Captured, require_capture
from axes.transfer.experiments import CALIBRATIONS, EXPERIMENTS, TASKS
from axes.transfer.folder import ResultsFolder, put_together
from axes.transfer.named import find
from axes.transfer.plan import QUICK, Plan, planned
from axes.transfer.results import compile_folder, without_times
from axes.transfer.running import RunsFailed, run
from axes.transfer.systems import System
from axes.transfer.training import Crowded, Job, Run, train

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"transfer_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small, recorded = _load("small"), _load("recorded")


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trials, "_small", small.small)
    trials.trials.cache_clear()
    yield
    trials.trials.cache_clear()


def test_what_was_stopped_goes_on(tmp_path: Path, quickly: None) -> None:
    """Stopped, and then killed -9: the file that comes of it is that of an unbroken run, apart from times."""
    plan = planned(("D4",), form="quick")  # as killed.py has it
    whole = run(plan, tmp_path / "whole")
    assert len(whole["runs"]) == plan.runs_in_all() and all("effect" in e["compared"][0] for e in whole["experiments"])

    def stopping(what: str, done: int, of: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "broken", watch=stopping)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "broken" / "runs").glob("*.json")}
    assert len(kept) == 7
    partial = json.loads((tmp_path / "broken" / "transfer.json").read_text())
    assert any("missing" in c for e in partial["experiments"] for c in e["compared"])

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, str(HERE / "killed.py"), str(tmp_path / "broken")]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for said in process.stdout:
            if int(said.split()[-2]) >= 12:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "broken" / "runs").glob("[!.]*.json"))) >= 12

    trained: list[str] = []
    resumed = run(plan, tmp_path / "broken", watch=lambda what, done, of: trained.append(what))
    assert len([x for x in trained if x]) <= plan.runs_in_all() - 12  # nothing twice
    for name, content in kept.items():
        assert (tmp_path / "broken" / "runs" / name).read_bytes() == content
    assert without_times(resumed) == without_times(whole)
    assert not list((tmp_path / "broken").rglob(".*.json"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of another plan's begin, without runs."""
    path = tmp_path_factory.mktemp("filled") / "out"
    folder = ResultsFolder(path)
    with folder.held():
        folder.begin(planned(("D4",), form="quick"))
    return path


def test_a_folder_of_another_version_or_plan(filled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = ResultsFolder(filled)
    folder.begin(planned(("L1",), form="quick"))  # more experiments are welcome
    assert set(folder.plan()["experiments"]) == {"D4", "L1"}
    plan = folder.plan()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d(; \d{4}-\d\d-\d\d)?", plan["date"])  # midnight may lie between
    del plan["date"]  # as earlier versions wrote it
    write_json(filled / "plan.json", plan)
    folder.begin(planned(("D4",), form="quick"))
    assert folder.plan()["date"].split("; ")[0] == "unknown"
    with pytest.raises(AxesError, match="another number of seeds, 3, not 4"):
        folder.begin(planned(("D4",), form="quick", seeds=4))
    with pytest.raises(AxesError, match="another form, quick, not whole"):
        folder.begin(planned(("D4",), seeds=3))
    other = replace(find(("D4",))[0], margin=0.5)
    with pytest.raises(AxesError, match="another plan, in which D4"):
        folder.begin(Plan((other,), "quick", 3))
    monkeypatch.setattr(folders, "version", lambda: "0.0.1")
    with pytest.raises(AxesError, match="another version"):
        folder.begin(planned(("D4",), form="quick"))
    with pytest.raises(AxesError, match="holds no results"):
        ResultsFolder(tmp_path).plan()


def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(AxesError, match="did not write"):
        run(planned(("D4",), form="quick"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    killed = tmp_path / "killed"  # while its plan was written
    killed.mkdir()
    (killed / ".plan.123.json").write_text("{")
    with ResultsFolder(killed).held():
        pass


def test_one_writer(filled: Path) -> None:
    folder = ResultsFolder(filled)
    with folder.held(), pytest.raises(AxesError, match="written by another process"), ResultsFolder(filled).held():
        pass
    (filled / "runs" / "broken.json").write_text("{")
    with pytest.raises(AxesError, match="broken.json is not a run"):
        folder.runs()
    (filled / "runs" / "broken.json").unlink()


def test_every_pair_has_parameters_within_a_hundredth() -> None:
    for plan in (planned(form="quick", tasks=()), planned()):
        chosen = replace(plan, experiments=tuple(e for e in plan.experiments if "digits" not in plan.tasks_of(e)))
        chosen.require_equal_sizes()
    assert {e.id for e in planned(form="quick").experiments} == set(QUICK)
    for form in trials.FORMS:
        assert {t for tasks in TASKS.values() for t in tasks} == set(trials.trials(form))
    for e in EXPERIMENTS:
        assert set(e.tasks) <= set(TASKS[e.axis])


def test_unequal_parameters_are_refused() -> None:
    wide = replace(find(("L5",))[0], arm=find(("L5",))[0].arm)
    plan = planned((), wide, form="quick", tasks=("deep-narrow",))
    trial = trials.trials("quick")["deep-narrow"]
    narrow = {**trials.trials("quick"), "deep-narrow": replace(trial, width=8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("axes.transfer.plan.trials", lambda form: narrow)
        with pytest.raises(AxesError, match="more than 1 % apart"):
            plan.require_equal_sizes()


def _run(job: Job, value: float) -> Run:
    return Run(job.task, job.system.key, job.lr, job.seed, value, {}, (), 1, 1, 1.0, 1, None, {})


def test_the_grid_grows_where_its_best_point_is_an_end() -> None:
    plan, done = planned(("D4",)), dict[str, Run]()
    best = 0.01 * 10.0**-1.0
    for _ in range(20):
        jobs = [job for job in plan.wanted(done) if job.task == "flipped-labels" and job.seed == 0]
        if not jobs:
            break
        done |= {job.key: _run(job, -abs(job.lr - best)) for job in jobs}
    rates = {run.lr for run in done.values()}
    assert min(rates) < best and len(rates) == 5
    system = find(("D4",))[0].systems[0]
    assert plan.swept(system, "flipped-labels", done)[0] == pytest.approx(best)
    assert not plan.at_an_end(system, "flipped-labels", done)


def test_the_same_system_is_trained_once() -> None:
    plan = planned(("L1", "L2", "L5"), form="quick")
    assert len(plan.trained()) == 4 + 3  # one control; parity's two systems and one of them again
    job = next(plan.wanted({}))
    assert job.seed == 0 and not job.system.draw
    keys = {s.key for s, _ in plan.trained()}
    assert len(keys) == 7


def test_batches_are_those_of_the_seed(quickly: None) -> None:
    for one in trials.trials("quick").values():
        if one.name == "digits":
            continue
        a, b, c = one.batch_of(1, 0), one.batch_of(1, 0), one.batch_of(2, 0)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and not torch.equal(a[0], c[0])
        assert one.one()[0].shape[0] == 1 and one.seen >= one.batch


def _jobs() -> list[Job]:
    seen: dict[tuple[System, str], Job] = {}
    for e in EXPERIMENTS:
        for system in e.systems:
            task = next((t for t in reversed(e.tasks) if t != "digits"), "text")
            seen[system, task] = Job(system, task, "quick", 1e-3, 1)
    for c in CALIBRATIONS:
        seen[c.arm, c.task] = Job(c.arm, c.task, "quick", 1e-3, 1)
    return list(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("job", _jobs(), ids=lambda job: f"{job.task}-{job.system.key}")
def test_every_system_trains(job: Job, quickly: None) -> None:
    found = train(job)
    assert found.broke is None and found.flops > 0 and found.state > 0 and found.parameters > 0
    assert found.key == job.key and len(found.curve) == 4
    assert folders.run_of(json.loads(json.dumps(found.as_dict()))) == found


def test_a_run_that_breaks_down_knows_nothing(quickly: None) -> None:
    found = train(Job(find(("D4",))[0].systems[1], "flipped-labels", "quick", 1e30, 1))
    assert found.broke is not None and found.value == 0.0
    text = train(Job(find(("D1",))[0].systems[1], "text", "quick", 1e30, 1))
    assert text.broke is not None and text.value == 8.0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Quick trials of seven steps, whose graphs are recorded here."""
    few = tuple(replace(one, steps=7) for one in small.small())
    monkeypatch.setattr(trials, "_small", lambda: few)
    monkeypatch.setattr(training, "CudaGraph", lambda device: recorded.Recorded())
    monkeypatch.setattr(training, "_SPAN", 3)
    monkeypatch.setattr("axes.transfer.running.require_capture", lambda capture, device: None)
    trials.trials.cache_clear()
    yield
    trials.trials.cache_clear()


_NO_GRAPHS = {"S1"}  # a Cholesky factor is looked at before it is used


@pytest.mark.slow
@pytest.mark.parametrize("job", _jobs(), ids=lambda job: f"{job.task}-{job.system.key}")
def test_a_replayed_step_is_the_step(job: Job, graphs: None) -> None:
    """A recording that asks Python nothing takes the steps of the trial; where there can be none, it is said."""
    plain, replayed = train(job), train(replace(job, capture="graph"))
    assert len(replayed.curve) == len(plain.curve) == 7
    if whole := not any(job.system in find((name,))[0].systems[:1] for name in _NO_GRAPHS):
        assert replayed.note == ""
    assert replayed.times["graph"] == float(whole) or "reads back" in replayed.note
    near = {a: pytest.approx(b, rel=1e-4, abs=1e-4) for a, b in plain.curve}
    loose = any(job.system in find((name,))[0].systems for name in ("L3", "S4"))  # roots of squares that are zero
    assert dict(replayed.curve) == (near if not loose else {a: pytest.approx(b, rel=0.05) for a, b in plain.curve})


def test_graphs_in_a_folder(graphs: None, tmp_path: Path) -> None:
    """Three runs of a system in turn leave what one after another leave."""
    plans = [planned(("D4",), form="quick", capture=way) for way in ("none", "graph")]
    assert {len(g) for g in plans[0].groups(plans[0].wanted({}), 1)} == {1}
    assert {len(g) for g in plans[1].groups(plans[1].wanted({}), 1)} == {3}
    plain, replayed = (run(plan, tmp_path / plan.capture) for plan in plans)
    values = [{(r["task"], r["system"], r["seed"], r["lr"]): r["value"] for r in x["runs"]} for x in (plain, replayed)]
    assert values[1] == pytest.approx(values[0], abs=1e-4)
    assert {r["times"]["graph"] for r in replayed["runs"]} == {1.0}


@given(counts=st.lists(st.integers(1, 8), max_size=6), workers=st.integers(1, 16))
@example(counts=[3], workers=12)
@example(counts=[3, 3, 3], workers=4)
@example(counts=[6, 6], workers=4)
def test_no_worker_is_idle_while_another_has_several_runs(counts: list[int], workers: int) -> None:
    plan = planned(("D4",), form="quick", capture="graph")
    systems = [replace(plan.trained()[0][0], draw=i) for i in range(len(counts))]
    jobs = [Job(s, "digits", "quick", 0.1, i) for s, n in zip(systems, counts, strict=True) for i in range(n)]
    groups = plan.groups(jobs, workers)
    assert list(itertools.chain.from_iterable(groups)) == jobs  # each once, in the order of the plan
    assert all(len({job.system for job in group}) == 1 and len(group) <= 3 for group in groups)
    widest = max(map(len, groups), default=1)
    assert widest == 1 or len(groups) % workers == 0  # every round is full
    assert -(-len(groups) // workers) == -(-sum(-(-n // 3) for n in counts) // workers)  # and none more than need be
    plain = replace(plan, capture="none")
    assert plain.groups(jobs, workers) == [(job,) for job in jobs]


def test_runs_that_are_left_are_spread_over_workers() -> None:
    """The sweeps of one experiment beside the calibrations, and then the seeds of one arm."""
    plan = planned(("S3",), form="small", capture="graph")
    sweeps = list(plan.wanted({}))
    assert [len(plan.groups(sweeps, workers)) for workers in (1, 4, 12, 64)] == [8, 8, 12, 24]
    seeds = [replace(sweeps[0], seed=seed) for seed in plan.measured]
    spread = {2: [3, 3], 4: [2, 2, 1, 1], 5: [2, 1, 1, 1, 1], 12: [1] * 6}
    assert {workers: [*map(len, plan.groups(seeds, workers))] for workers in spread} == spread


@pytest.mark.slow  # above, what two workers have begun one goes on with; graphs replay in a folder there
def test_what_is_found_does_not_depend_on_workers(
    graphs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped with one number of workers and taken up with another; here no processes, which would not know graphs."""
    plan, seen = planned(("D4",), form="quick", capture="graph"), list[int]()

    def here(work: Any, waiting: Any, workers: int, until: Any) -> Iterator[Any]:
        while waiting:
            group = waiting.popleft()
            seen.append(len(group))
            yield group, work(group)

    monkeypatch.setattr("axes.transfer.running.side_by_side", here)
    whole = run(plan, tmp_path / "one")

    def stopping(what: str, done: int, of: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "many", workers=64, watch=stopping)
    many = run(plan, tmp_path / "many", workers=5)
    assert seen[:7] == [1] * 7 and max(seen) > 1
    assert without_times(many) == without_times(whole)


def test_what_the_host_says_stays_as_it_was_recorded() -> None:
    """The recording itself is tried: as on a GPU, Python is asked no more, and nothing is read back."""
    asked, rates = itertools.count(), torch.ones(6)
    take = Captured(lambda x: x.sum() + next(asked), torch.ones(()), rates, recorded.Recorded())
    take.load([torch.arange(6.0)[:, None]])
    for _ in rates:
        take.take()
    assert take.losses.tolist() == [0.0, 2.0, 4.0, 6.0, 7.0, 8.0]
    take = Captured(lambda x: x * float(x), torch.ones(()), rates, recorded.Recorded())
    take.load([torch.arange(6.0)])
    with pytest.raises(RuntimeError, match="reads back"):
        for _ in rates:
            take.take()


def test_batches_that_do_not_fit() -> None:
    rates = torch.ones(4)
    take = Captured(lambda x: x.sum(), torch.ones(()), rates, Again())
    take.load([torch.ones(2, 3)])
    with pytest.raises(AxesError, match="at most"):
        take.load([torch.ones(3, 3)])


def test_what_fails_keeps_nothing_else_from_running(
    quickly: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = planned(("D4",), form="quick")
    lost = plan.trained()[0][0].key

    def failing(jobs: tuple[Job, ...]) -> list[Run]:
        if jobs[0].system.key == lost:
            raise ValueError("a spoilt layer")
        return training.train_together(jobs)

    monkeypatch.setattr("axes.transfer.running.train_together", failing)
    with pytest.raises(RunsFailed, match="a spoilt layer") as found:
        run(plan, tmp_path / "out")
    assert len(found.value.failed) == 3 and "effect" in found.value.results["experiments"][0]["compared"][0]
    assert not any(r["system"] == lost for r in found.value.results["runs"])


def test_what_comes_first_in_the_plan_is_finished_first(quickly: None, tmp_path: Path) -> None:
    """Seeds of a system follow its sweep; what is not done at the limit is given up, and taken up again."""
    plan, said = planned(("D4", "L1"), form="quick"), list[str]()
    run(plan, tmp_path / "out", watch=lambda what, done, of: said.append(what))
    order = [next(i for i, (s, task) in enumerate(plan.trained()) if f"{task}-{s.key}-" in x) for x in said if x]
    assert order == sorted(order)
    none = run(plan, tmp_path / "late", until=time.monotonic() - 1)
    assert none["runs"] == [] and all("missing" in c for c in none["calibrations"])
    late = run(plan, tmp_path / "late", workers=2, until=time.monotonic() + 0.2)
    assert len(late["runs"]) < plan.runs_in_all()


def test_captures_that_cannot_be() -> None:
    with pytest.raises(AxesError, match="CUDA graphs, and the device is cpu"):
        require_capture("graph", torch.device("cpu"))
    with pytest.raises(UnknownName, match="did you mean graph"):
        require_capture("graf", torch.device("cuda"))


def test_too_little_memory_names_the_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quickly: None) -> None:
    monkeypatch.setattr("axes.tasks.machine.memory", lambda device: 1000)
    with pytest.raises(AxesError, match=r"the arm of parity: parity-.*need at least .* GB"):
        run(planned(("D4",), form="quick"), tmp_path / "out")


def test_what_lacks_memory_beside_others_is_tried_once_more_alone(
    quickly: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, asked = planned(("D4",), form="quick"), list[str]()

    def crowded(jobs: tuple[Job, ...], times: int) -> list[Run]:
        asked.append(jobs[0].key)
        if jobs[0].lr == 0.01 and asked.count(jobs[0].key) <= times:
            raise Crowded(f"{jobs[0].key} needs more memory")
        return training.train_together(jobs)

    monkeypatch.setattr("axes.transfer.running.train_together", partial(crowded, times=1))
    found = run(plan, tmp_path / "out")
    assert len(found["runs"]) == plan.runs_in_all() and "effect" in found["experiments"][0]["compared"][0]
    asked.clear()
    monkeypatch.setattr("axes.transfer.running.train_together", partial(crowded, times=2))
    with pytest.raises(RunsFailed, match="needs more memory"):
        run(plan, tmp_path / "never")
    assert max(map(asked.count, asked)) == 2
    run(plan, tmp_path / "never")  # nothing is lost
    assert len(ResultsFolder(tmp_path / "never").runs()) == plan.runs_in_all()


@pytest.mark.parametrize("capture", ["none", "graph"])
def test_a_decomposition_that_fails_is_a_run_that_broke(
    quickly: None, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    """With the step and the reason; so is one that fails on what is held out."""
    system, what = CALIBRATIONS[0].arm, type(trials.trial("parity-late", "quick"))
    job, loss, taken = Job(system, "parity-late", "quick", 1e-3, 1), what.loss, itertools.count(1)
    monkeypatch.setattr(training, "CudaGraph", lambda device: Again())

    def failing(self: Any, model: Any, *batch: torch.Tensor) -> torch.Tensor:
        found = loss(self, model, *batch)
        if next(taken) % 3 == 0:
            torch.linalg.cholesky(torch.full_like(found.detach(), -1.0).reshape(1, 1))
        return found

    train(job)  # what is counted once is counted
    monkeypatch.setattr(what, "loss", failing)
    if capture == "graph":
        next(taken), next(taken), next(taken)  # the second time is no other
    broken = train(replace(job, capture=capture))
    assert broken.broke is not None and broken.value == 0.0
    assert broken.note.startswith("it broke down: linalg.cholesky")
    monkeypatch.setattr(what, "loss", loss)
    monkeypatch.setattr(what, "held_out", lambda self, model, device: torch.linalg.cholesky(-torch.ones(1, 1)))
    assert train(job).broke == trials.trial("parity-late", "quick").steps


def _pretended(plan: Plan, path: Path, lr: float = 0.1) -> ResultsFolder:
    """A folder of a plan with a run a seed, none of which anybody trained."""
    folder = ResultsFolder(path)
    with folder.held():
        folder.begin(plan)
        for system, task in plan.trained():
            for seed in (0, *plan.measured):
                value = (seed + int(system.key, 16) % 7) / 10
                folder.keep(Run(task, system.key, lr, seed, value, {}, (), 1, 1, 1.0, 1, None, {"step_ms": 1.0}))
    return folder


def test_folders_are_put_together(tmp_path: Path) -> None:
    """As one folder that was never apart; what does not fit is refused, and nothing is written."""
    plans = [planned((name,), form="quick") for name in ("D4", "L1")]
    sources = [_pretended(plan, tmp_path / name) for plan, name in zip(plans, ("first", "second"), strict=True)]
    put_together(sources, out := ResultsFolder(tmp_path / "out"))
    whole = _pretended(planned(("D4", "L1"), form="quick"), tmp_path / "whole")
    assert compile_folder(out) == compile_folder(whole)
    with pytest.raises(AxesError, match="out is not empty"):
        put_together(sources, out)
    with pytest.raises(AxesError, match="first is given twice"):
        put_together([*sources, ResultsFolder(tmp_path / "second" / ".." / "first")], ResultsFolder(tmp_path / "twice"))
    (tmp_path / "letter").write_text("mine")
    with pytest.raises(AxesError, match="letter is a file"):
        put_together(sources, ResultsFolder(tmp_path / "letter"))
    for name, other in {
        "version": "0.0.1", "form": "small", "seeds": 4, "device": "cuda", "torch": "1.0", "hardware": "another",
    }.items():  # fmt: skip
        changed = ResultsFolder(tmp_path / name)
        shutil.copytree(sources[1].path, changed.path)
        (changed.path / "plan.json").write_text(json.dumps({**sources[1].plan(), name: other}))
        with pytest.raises(AxesError, match=f"{name} does not go with .*first: it holds runs of another"):
            put_together([sources[0], changed], ResultsFolder(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()


def test_a_system_on_a_trial_comes_from_one_folder(quickly: None, tmp_path: Path) -> None:
    """Two sweeps that chose two rates are not mixed: the folder that has more of its runs has all of them."""
    plan = planned(("D4",), form="quick")
    (task,), systems = plan.tasks_of(plan.experiments[0]), [s.key for s in plan.experiments[0].systems]
    sources = [ResultsFolder(tmp_path / name) for name in ("first", "second")]
    for source, lr, many in zip(sources, (0.1, 0.2), ((2, 3), (3, 3)), strict=True):
        with source.held():
            source.begin(plan)
            for system, n in zip(systems, many, strict=True):
                for seed in range(1, n + 1):
                    source.keep(Run(task, system, lr, seed, lr, {}, (), 1, 1, 1.0, 1, None, {"step_ms": 1.0}))
    put_together(sources, out := ResultsFolder(tmp_path / "out"))
    rates = {system: {r.lr for r in out.runs().values() if r.system == system} for system in systems}
    assert rates == {systems[0]: {0.2}, systems[1]: {0.1}} and len(out.runs()) == 6
