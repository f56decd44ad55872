"""`axes bench optim` and `optim-training`: checked rows, runs that continue, and what the tables say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import nn

from axes import optim as optimizers
from axes.bench import (
    optim,
    optim_contenders,
    optim_report,
    optim_tasks,
    optim_training,
    optim_training_report,
    turns,
)
from axes.bench.optim_contenders import (
    RULES,
    Contender,
    OptimizerRule,
    Parameters,
    Place,
    Suite,
    contenders,
    find_rules,
)
from axes.cli import main
from axes.core.declared import leaves
from axes.errors import AxesError

CPU = torch.device("cpu")
TINY = Suite("64x64", ((12, 8), (8, 8), (8, 12), (8,)), ("adamw", "muon"))
PLAN = optim.Plan(rules=("sgd",), suites=("64x64",), device="cpu")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axes.bench.timing._SECONDS", 0.0)
    monkeypatch.setattr(optim_contenders, "SUITES", (TINY,))


def command(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(line.split())
    return capsys.readouterr().out


def test_turns_say_ours_over_the_fastest_peer_and_scheduled_over_constant(capsys: pytest.CaptureFixture[str]) -> None:
    shown = command("bench turns --rule sgd --rule muon --suite 64x64 --device cpu --seconds 0", capsys).splitlines()
    assert len(shown) == len({line[:45] for line in shown}) and all(" ms  wall " in line for line in shown)
    ours = [line for line in shown if " axes " in line]
    assert len(ours) == 7 and sum(" of axes" in line for line in ours) == 5 and all(" of torch" in x for x in ours[:3])


def test_ratios_of_turns() -> None:
    rows = (turns.Row("s", "r", "axes", 2.0, 3.0), turns.Row("s", "r", "axes scheduled", 3.0, 3.0))
    beside = turns.Beside("s", "r", "peer", (*rows, turns.Row("s", "r", "peer", 4.0, 2.0)))
    assert beside.over("axes", "peer") == 0.5 and beside.over("axes", "peer", wall=True) == 1.5
    assert beside.over("axes scheduled", "axes") == 1.5 and beside.over("axes fused", "axes") is None
    assert "1.50 (wall 1.00) of axes" in beside.text().splitlines()[1]


# ---- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_contender_steps_as_its_convention_says(rule: OptimizerRule) -> None:
    for contender in contenders(rule, Place(CPU, torch.float32)):
        row = optim._row(TINY.for_rule(rule), rule, contender, optim.Plan(device="cpu"), CPU, 1e10)
        assert not row.refused, row
        assert row.eager is not None and row.eager > 0 and row.launches is not None and row.launches > 0
        assert row.error is None or row.error <= rule.bound


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_scheduled_contender_moves_every_number_of_every_step(rule: OptimizerRule) -> None:
    (contender,) = contenders(rule, Place(CPU, torch.float32), ("axes scheduled",))
    parameters = optim.Problem(TINY.for_rule(rule), torch.float32, CPU, 0).parameters
    optimizer: Any = contender.make(parameters)
    seen = []
    for _ in range(3):
        optimizer.step()
        seen.append([x for g in optimizer.param_groups for n, v in g.items() if n != "params" for x in leaves(v)])
    moved = [a for a, b, c in zip(*seen, strict=True) if isinstance(a, float) and len({a, b, c}) == 3]
    held = [a for a, b, c in zip(*seen, strict=True) if isinstance(a, float) and a == b == c]
    assert moved and all(x in (0.0, 1.0, math.inf) for x in held), (moved, held)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.matrices], ids=lambda r: r.name)
def test_stored_forms_of_bfloat16_parameters_take_part(rule: OptimizerRule) -> None:
    found = {}
    for contender in contenders(rule, Place(CPU, torch.bfloat16)):
        plan = optim.Plan(device="cpu", dtype="bfloat16")
        if contender.name.startswith("axes"):
            found[contender.name] = optim._row(TINY, rule, contender, plan, CPU, 1e10)
    assert not any(row.refused for row in found.values()), found
    if rule.name in ("asgd", "mars", "prodigy", "lars", "lamb", "adafactor"):  # exact weights already, or mixes entries
        assert not any("master" in name for name in found)
        return
    small, large = found["axes 24-bit master, 8-bit moments"], found["axes 32-bit master"]
    assert small.state is not None and large.state is not None and small.state < large.state


def test_the_command_writes_a_table_a_page_a_file_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = command(f"bench optim --rule adamw --rule sgd --suite 64x64 --device cpu --out {tmp_path}", capsys)
    assert "torch fused" in shown and "/ ours" in shown and "copies at" in shown
    rows = json.loads((tmp_path / "optim.json").read_text())["rows"]
    assert {"axes", "torch loop", "torch foreach", "torch fused", "pytorch_optimizer"} <= {r["who"] for r in rows}
    assert "| torch fused |" in (tmp_path / "optim.md").read_text()
    assert (tmp_path / "optim.png").read_bytes()[:4] == b"\x89PNG"


def test_bytes_are_counted_once() -> None:
    (rule,) = find_rules(("adamw",))
    torch_fused = next(c for c in contenders(rule, Place(CPU, torch.float32)) if c.name == "torch fused")
    square = Suite("64x64", ((40, 50),), ())
    row = optim._row(square, rule, torch_fused, optim.Plan(device="cpu"), CPU, ceiling=1e9)
    # gradient in, parameter and two moments in and out, and a count of steps in and out
    assert row.moved == 28 * 2000 + 2 * 4
    assert row.state == pytest.approx(8 + 4 / 2000)
    assert row.share == pytest.approx(row.moved / 1e9 / (row.eager * 1e-3))  # type: ignore[operator]


def test_state_is_counted_however_it_is_nested() -> None:
    w = nn.Parameter(torch.zeros(3))
    holder = torch.optim.SGD([w], lr=0.1)
    holder.state[w] = {"a": torch.zeros(2), "b": [torch.zeros(1), (torch.zeros(1).double(),)], "c": {"d": w}, "e": 3}
    assert optim_contenders.state_bytes(holder) == 8 + 4 + 8 + 12


def test_operators_are_counted() -> None:
    x = torch.ones(3)
    assert optim.launches(lambda: x.add(1).mul(2), CPU) == 2


def contender(make: Any, exact: Any = None) -> Contender:
    def right(parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return Contender("other", make, exact or right)


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, who: Contender) -> optim.Row:
    monkeypatch.setattr(optim, "contenders", lambda *_: [who])
    (row,) = optim.rows(optim.measure(PLAN, tmp_path))
    return row


def test_wrong_steps_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = measured(monkeypatch, tmp_path, contender(lambda ps: torch.optim.SGD(ps, lr=0.1001, momentum=0.9)))
    assert row.eager is None and "off by 1.0e-03 > 1.0e-04" in row.refused


def test_steps_that_are_not_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = measured(monkeypatch, tmp_path, contender(lambda ps: torch.optim.SGD(ps, lr=math.nan, momentum=0.9)))
    assert row.eager is None and "off by nan" in row.refused


def test_one_that_raises_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(parameters: Parameters) -> torch.optim.Optimizer:
        raise RuntimeError("not on this machine\nsecond line")

    assert measured(monkeypatch, tmp_path, contender(breaks)).refused == "RuntimeError: not on this machine"


@pytest.mark.parametrize(("lr", "says"), [(0.1, ""), (-0.1, "does not descend")])
def test_random_steps_must_descend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lr: float, says: str) -> None:
    def make(parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=abs(lr), maximize=lr < 0)

    row = measured(monkeypatch, tmp_path, Contender("other", make, None))
    assert says in row.refused and bool(row.refused) == bool(says)
    assert (row.eager is None) == bool(says) and (bool(says) or "random" in row.note)


def test_a_stopped_run_continues_with_the_missing_rows(tmp_path: Path) -> None:
    def stop(what: str, done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optim.measure(PLAN, tmp_path, stop)
    first = json.loads((tmp_path / optim.FILE).read_text())["rows"]
    results = optim.measure(PLAN, tmp_path)
    assert len(first) == 2 and results["rows"][:2] == first and len(results["rows"]) > 2
    again: list[str] = []
    optim.measure(PLAN, tmp_path, lambda what, *_: again.append(what))
    assert again == ["done"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--suite 1T", "unknown suite '1T'; known: 64x64"),
        ("--rule nonsense", "unknown rule"),
        ("--who nobody", "unknown contender nobody; known: axes"),
        ("--dtype int8", "float32"),
        ("--device tpu9", "cpu or cuda"),
    ],
)
def test_bad_flags_are_explained(flags: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "optim", "--device", "cpu", "--suite", "64x64", *flags.split(), "--out", str(tmp_path)])
    error = " ".join(capsys.readouterr().err.split())
    assert says in error and "Traceback" not in error


def test_ratios_are_of_the_fastest_of_each_side() -> None:
    rows = [
        optim.Row("64x64", "adamw", "f", "axes", eager=3.0),
        optim.Row("64x64", "adamw", "f", "axes fused", eager=9.0, graph=2.0),
        optim.Row("64x64", "adamw", "f", "torch fused", eager=5.0),
        optim.Row("64x64", "adamw", "f", "torch loop", refused="wrong"),
        optim.Row("64x64", "muon", "f", "torch loop", eager=1.0),
    ]
    assert optim.ratios(rows) == {("64x64", "adamw", "f"): ("torch fused", 2.5)}
    where = {"device": "d", "torch": "t", "threads": 1}
    results = {"where": where, "ceilings": {}, "rows": [vars(r) for r in reversed(rows)]}
    assert optim_report.table(results).row_count == 5
    assert "torch fused / ours 2.50x" in optim_report.markdown(results)


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "found", "tried"), [(1.0, 1.0, 3), (9.0, 10.0, 5), (0.03, 0.0316, 6), (1e9, 316.0, 7)]
)
def test_the_sweep_follows_the_loss_beyond_its_grid(best: float, found: float, tried: int) -> None:
    seen: list[float] = []

    def loss(rate: float) -> float:
        seen.append(rate)
        return abs(math.log(rate / best))

    assert optim_training.sweep(loss, centre=1.0, count=3) == found
    assert len(seen) == len(set(seen)) == tried


def test_breakdowns_are_never_the_best_rate() -> None:
    assert optim_training.sweep(lambda rate: rate if rate < 1.5 else math.inf, 1.0, 3) == 0.00316


def test_intervals_are_students() -> None:
    values = [1.0, 1.5, 1.1, 1.3]
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    mean, half = optim_training_report.interval(values)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert optim_training_report.interval([1.0, math.inf])[1] == math.inf


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits of another kind, so that scikit-learn is not needed."""
    torch.manual_seed(0)
    prototypes = torch.rand(10, 64)
    labels = torch.arange(200) % 10
    drawn = prototypes[labels] + 0.3 * torch.rand(200, 64)
    monkeypatch.setattr(optim_tasks, "has_digits", lambda: True)
    monkeypatch.setattr(optim_tasks, "_images", lambda: (drawn[:150], labels[:150], drawn[150:], labels[150:]))


def test_training_continues_and_reports(tmp_path: Path, images: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "bench optim-training --task digits --steps 10 --rates 2 --seeds 2 --points 2"
    names = [f"--who={name}" for name in ("axes adamw", "torch adamw", "axes muon", "torch muon + adamw")]
    line = [*arguments.split(), *names, "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        main(line)
    shown = capsys.readouterr().out
    assert "axes muon" in shown and "±" in shown and "%" in shown
    assert "| axes muon |" in (tmp_path / "optim-training.md").read_text()
    assert (tmp_path / "optim-training.png").read_bytes()[:4] == b"\x89PNG"
    results = json.loads((tmp_path / optim_training.FILE).read_text())
    found = {s.who: s for s in optim_training_report.summaries(results)}
    ours, theirs = found["axes adamw"], found["torch adamw"]
    assert ours.lr == theirs.lr and ours.loss == pytest.approx(theirs.loss, rel=1e-4)
    assert [len(run.curve) for run in ours.runs] == [3, 3] and ours.runs[0].curve[0][0] == 0
    assert ours.loss[0] < ours.runs[0].curve[0][1]
    assert found["axes muon"].runs[0].state == pytest.approx(found["torch muon + adamw"].runs[0].state, rel=0.02)
    # nothing is trained twice
    before = len(results["rows"])
    with pytest.raises(SystemExit, match="0"):
        main(line)
    assert len(json.loads((tmp_path / optim_training.FILE).read_text())["rows"]) == before
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*line, "--steps", "21"])
    assert "another length" in capsys.readouterr().err


def test_every_trainer_learns_and_a_rate_too_large_breaks_down(images: None) -> None:
    (task,) = optim_tasks.find_tasks(("digits",))
    plan = optim_training.Plan(steps=12, points=2)
    for who in optim_training.trainers():
        run = optim_training.train(task, who, who.centre, 1, plan, CPU)
        assert run.loss < 0.99 * run.curve[0][1], who.name
        assert run == optim_training._run_of(json.loads(json.dumps(vars(run))))
    sgd = next(t for t in optim_training.trainers() if t.name == "axes sgd")
    broken = optim_training.train(task, sgd, 1e30, 1, plan, CPU)
    assert broken.loss == math.inf and broken.accuracy is None


def test_the_language_model_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.tensor(list(b"words are made of letters, and lines are made of words. " * 40), dtype=torch.uint8)
    corpus = type("Text", (), {"train": text, "validation": text})()
    monkeypatch.setattr(optim_tasks, "_corpus", lambda: corpus)
    (task,) = optim_tasks.find_tasks(("language-model",))
    adamw = next(t for t in optim_training.trainers() if t.name == "axes adamw")
    run = optim_training.train(task, adamw, 0.01, 1, optim_training.Plan(steps=10, points=1), CPU)
    assert run.accuracy is None and run.loss < 5.0 < 7.9 < run.curve[0][1] < 8.1  # bits per byte of 256 values
    again = optim_training.train(task, adamw, 0.01, 1, optim_training.Plan(steps=10, points=1), CPU)
    assert run.loss == again.loss


def test_the_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_tasks, "has_digits", lambda: False)
    optim_tasks._images.cache_clear()
    with pytest.raises(AxesError, match="needs scikit-learn"):
        optim_tasks.find_tasks(("digits",))
    assert [task.name for task in optim_tasks.find_tasks()] == ["language-model"]
    with pytest.raises(AxesError, match="unknown task 'x'"):
        optim_tasks.find_tasks(("x",))
    with pytest.raises(AxesError, match="unknown optimizer x; known: axes sgd"):
        optim_training.trainers(("x",))


def test_the_digits_of_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    optim_tasks._images.cache_clear()
    images, labels, held, held_labels = optim_tasks._images()
    assert (images.shape, held.shape) == ((1438, 64), (359, 64))
    assert float(images.max()) == 1.0 and set(labels.tolist()) == set(held_labels.tolist()) == set(range(10))


@pytest.mark.parametrize(("setting", "value"), [("steps", 1), ("rates", 0), ("seeds", 1), ("points", 0)])
def test_bad_numbers_are_explained(tmp_path: Path, setting: str, value: int) -> None:
    with pytest.raises(AxesError, match=f"--{setting} must be at least"):
        optim_training.measure(optim_training.Plan(**{setting: value}), tmp_path)


def test_the_names_here_are_the_optimizers_own() -> None:
    assert {t.name.removeprefix("axes ") for t in optim_training.trainers() if t.name.startswith("axes")} <= {
        cls.name for cls in optimizers.ALL
    }
