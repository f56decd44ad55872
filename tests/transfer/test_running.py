"""Plans, folders and runs: what is stopped goes on, what is done is not done again, what does not fit is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from axes.errors import AxesError, UnknownName
from axes.transfer import folder as folders
from axes.transfer import running, training, trials
from axes.transfer.capture import Again, Captured, require_capture
from axes.transfer.experiments import CALIBRATIONS, EXPERIMENTS, TASKS, find
from axes.transfer.folder import ResultsFolder
from axes.transfer.plan import QUICK, Plan, planned
from axes.transfer.results import without_times
from axes.transfer.running import RunsFailed, run
from axes.transfer.systems import System
from axes.transfer.training import Job, Run, train

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
    plan = planned(("L1",), form="quick")
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
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(AxesError, match="did not write"):
        ResultsFolder(tmp_path).begin(planned(("D4",), form="quick"))
    with pytest.raises(AxesError, match="holds no results"):
        ResultsFolder(tmp_path).plan()


def test_folders_of_several_gpus_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, whole = (ResultsFolder(tmp_path / name) for name in ("one", "two", "whole"))
    runs = [Run("digits", "abc", 1e-3, seed, 0.5, {}, ((1, 2.0),), 1, 1, 1.0, 1, None, {}) for seed in range(3)]
    for folder, of, kept in ((one, ("D4",), runs[:2]), (two, ("L1", "D4"), runs[1:])):
        with folder.held():
            folder.begin(planned(of, form="quick"), f"axes transfer run {' '.join(of)}")
            for each in kept:
                folder.keep(each)
    said = subprocess.run(
        [sys.executable, "-m", "axes", "transfer", "merge", *map(str, (whole, one, two))],
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0 and f"{one}: 2 runs\n{two}: 1 runs" in said.stdout, said
    assert whole.runs() == {each.key: each for each in runs}
    assert list(whole.plan()["experiments"]) == ["D4", "L1"]
    assert whole.plan()["command"] == "axes transfer run D4; axes transfer run L1 D4"
    other = ResultsFolder(tmp_path / "other")
    with other.held():
        other.begin(planned(("D4",), form="quick", seeds=4))
    with pytest.raises(AxesError, match="another number of seeds, 3, not 4"):
        whole.take(other)
    assert whole.runs() == {each.key: each for each in runs}


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


def test_a_matrix_without_factors_is_a_run_that_broke_down(monkeypatch: pytest.MonkeyPatch, quickly: None) -> None:
    steps = iter(range(100))

    def lost(self: object, model: object, *batch: object) -> torch.Tensor:
        if next(steps) == 3:
            raise torch.linalg.LinAlgError("linalg.eigh: (Batch element 7): it did not converge\nmore")
        return torch.ones((), requires_grad=True) * 2

    monkeypatch.setattr(trials.Regression, "loss", lost)
    found = train(Job(find(("D4",))[0].systems[1], "flipped-labels", "quick", 1e-3, 1))
    assert found.broke == 4 and found.value == 0.0
    assert found.note == "its step 4: linalg.eigh: (Batch element 7): it did not converge"


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


_NO_GRAPHS = {"S1", "S6"}  # a Cholesky factor is looked at before it is used


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
    assert {len(g) for g in plans[0].groups(plans[0].wanted({}))} == {1}
    assert {len(g) for g in plans[1].groups(plans[1].wanted({}))} == {3}
    plain, replayed = (run(plan, tmp_path / plan.capture) for plan in plans)
    values = [{(r["task"], r["system"], r["seed"], r["lr"]): r["value"] for r in x["runs"]} for x in (plain, replayed)]
    assert values[1] == pytest.approx(values[0], abs=1e-4)
    assert {r["times"]["graph"] for r in replayed["runs"]} == {1.0}


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


def test_what_lacked_memory_beside_others_is_run_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quickly: None
) -> None:
    plan, asked = planned(("D4",), form="quick"), list[str]()

    def crowded(work: object, waiting: list[tuple[Job, ...]], workers: int, until: float | None) -> Iterator[object]:
        while waiting:
            group = waiting.popleft()  # type: ignore[attr-defined]
            asked.extend(job.key for job in group)
            yield group, running.Crowded("no room") if "lr0.003" in group[0].key else running._work(group)

    monkeypatch.setattr(running, "side_by_side", crowded)
    found = run(plan, tmp_path / "out", workers=2)
    kept = {folders.run_of(row).key for row in found["runs"]}
    assert len(kept) == plan.runs_in_all() > len(kept & set(asked)) > 0  # a crowded sweep holds up its seeds
    assert any("lr0.003" in key for key in asked)


def test_graphs_that_do_not_fit_together_are_replayed_one_after_another(
    monkeypatch: pytest.MonkeyPatch, graphs: None
) -> None:
    replayed, groups = training._replayed, list[int]()

    def one_fits(jobs: tuple[Job, ...]) -> dict[str, Run]:
        groups.append(len(jobs))
        if len(jobs) > 1:
            raise training.TooLittleMemory("no room")
        return replayed(jobs)

    monkeypatch.setattr(training, "_replayed", one_fits)
    jobs = [replace(_jobs()[0], capture="graph", seed=seed) for seed in (1, 2)]
    assert [one.key for one in training.train_together(jobs)] == [job.key for job in jobs] and groups == [2, 1, 1]


def test_too_little_memory_names_the_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quickly: None) -> None:
    monkeypatch.setattr("axes.tasks.machine.memory", lambda device: 1000)
    with pytest.raises(AxesError, match=r"parity-.*need at least .* GB"):
        run(planned(("D4",), form="quick"), tmp_path / "out")
