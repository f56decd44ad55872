"""`axes bench`: what is shown was checked, a stopped run continues, files say what the table says."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from axes.bench import (
    apart,
    check,
    decode,
    figures,
    floors,
    layers,
    layers_report,
    nonlinear,
    peers,
    report,
    rows,
    sequence,
    training,
    training_models,
    training_report,
)
from axes.bench.rules import RULES, SequenceRule, Shape, Signal, find
from axes.cli import main
from axes.errors import AxesError

SMALL = "1,40,2,8"
PLAN = sequence.Plan(rules=("gated delta",), shapes=(SMALL,), dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axes.bench.timing._SECONDS", 0.01)


def command(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(line.split())
    return capsys.readouterr().out


def test_the_command_writes_a_table_a_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = command(f"bench sequence --rule delta --shape {SMALL} --device cpu --out {tmp_path}", capsys)
    assert "chunked torch" in shown and "token loop" in shown and "peer / ours" in shown
    results = json.loads((tmp_path / "sequence.json").read_text())
    assert {r["who"] for r in results["rows"]} == {"chunked torch", "token loop"}
    assert all(r["forward"] > 0 and r["both"] > r["forward"] / 10 and r["error"] < 1e-4 for r in results["rows"])
    assert (tmp_path / "sequence.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_is_computed_alike_by_both_torch_routes(rule: SequenceRule) -> None:
    signal = rule.signal(Shape.parse(SMALL), torch.float32, torch.device("cpu"))
    for contender in peers.contenders(rule, torch.device("cpu")):
        verdict = check.check(rule, contender.run, signal, backward=True)
        bound = 1e-5 if rule.fla is not None else 2e-4  # what is nonlinear has gradients that are worse conditioned
        assert verdict.right and verdict.error < bound, (contender.name, verdict)


def test_a_wrong_output_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (rule,) = find(("gated delta",))

    def off(signal: Signal) -> tuple[Tensor, Tensor]:
        out, final = rule.ours("torch")(signal)
        return 1.001 * out, final

    monkeypatch.setattr(sequence, "contenders", lambda *_: [peers.Contender("fla", off)])
    (row,) = sequence.rows(sequence.measure(PLAN, tmp_path))
    assert row.forward is None and "is off by" in row.refused


def test_a_wrong_gradient_leaves_the_forward_figure_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (rule,) = find(("gated delta",))

    def off(signal: Signal) -> tuple[Tensor, Tensor]:
        out, final = rule.ours("torch")({**signal, "v": 1.1 * signal["v"] - 0.1 * signal["v"].detach()})
        return out, final

    monkeypatch.setattr(sequence, "contenders", lambda *_: [peers.Contender("fla", off)])
    (row,) = sequence.rows(sequence.measure(PLAN, tmp_path))
    assert row.forward is not None and row.both is None and row.note.startswith("no backward: dv")


def test_one_that_raises_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(signal: Signal) -> tuple[Tensor, Tensor]:
        raise RuntimeError("not on this GPU\nsecond line")

    monkeypatch.setattr(sequence, "contenders", lambda *_: [peers.Contender("fla", breaks)])
    (row,) = sequence.rows(sequence.measure(PLAN, tmp_path))
    assert row.refused == "RuntimeError: not on this GPU"


def test_a_stopped_run_continues_with_the_missing_rows(tmp_path: Path) -> None:
    seen: list[str] = []

    def stop(what: str, done: int, of: int) -> None:
        seen.append(what)
        if done == 1 and len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sequence.measure(PLAN, tmp_path, stop)
    first = json.loads((tmp_path / sequence.FILE).read_text())["rows"]
    results = sequence.measure(PLAN, tmp_path)
    assert len(first) == 1 and results["rows"][0] == first[0] and len(results["rows"]) == 2
    again: list[str] = []
    sequence.measure(PLAN, tmp_path, lambda what, *_: again.append(what))
    assert again == ["done"]


def test_a_broken_or_foreign_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / sequence.FILE).write_text("{")
    with pytest.raises(AxesError, match="not a results file"):
        sequence.measure(PLAN, tmp_path)
    (tmp_path / sequence.FILE).write_text(json.dumps({"where": {"device": "x"}, "ceilings": None, "rows": []}))
    with pytest.raises(AxesError, match="another machine"):
        sequence.measure(PLAN, tmp_path)
    assert len(sequence.measure(PLAN, tmp_path, fresh=True)["rows"]) == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    (
        ("--shape 1,2,3", "four numbers"),
        ("--shape 1,0,2,8", "at least 1"),
        ("--rule nonsense", "unknown rule"),
        ("--dtype int8", "float32"),
        ("--device tpu9", "cpu or cuda"),
    ),
)
def test_bad_flags_are_explained(flags: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "sequence", *flags.split(), "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("command", "options", "first"),
    [
        ("training", "--layers 1 --width 8 --heads 2 --vocabulary 9 --batch 1 --tokens 8 --steps 1 --who axes", "axes"),
        ("turns", "--rule sgd --suite small --who torch --seconds 0.01", "small · sgd"),
        ("nonlinear", "--rule longhorn --shape 1,8,1,4 --turns 1", "longhorn"),
    ],
)
def test_without_a_terminal_lines_say_how_far_it_is(
    command: str, options: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [] if command == "nonlinear" else ["--device", "cpu"]
    with pytest.raises(SystemExit):
        main(["bench", command, *options.split(), *where, *(["--out", str(tmp_path)] * (command == "training"))])
    said = capsys.readouterr()
    lines = re.findall(r"^(\d)/1 after \d+ s: (.+)$", said.err, re.M)
    assert lines == [("0", first), ("1", "done")] and "after" not in said.out


def test_more_runs_than_anybody_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "optim-training", "--seeds", "9223372036854775807", "--out", str(tmp_path)])
    assert "--seeds must be at most 10,000" in capsys.readouterr().err


def test_floors_count_each_byte_once() -> None:
    (rule,) = find(("linear attention",))
    a = rule.account(Shape(8, 4096, 16, 128), torch.bfloat16)
    assert a.forward_bytes == 4 * 8 * 4096 * 16 * 128 * 2  # q, k, v in, o out
    limits = floors.Ceilings(4.27e12, 680e12)
    assert limits.milliseconds(a.forward_bytes, 0) == pytest.approx(0.126, rel=0.01)  # performance.md


def test_one_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = command(f"bench decode --shape 2,1,2,8 --device cpu --out {tmp_path}", capsys)
    assert "interpreter" in shown
    found = json.loads((tmp_path / decode.FILE).read_text())
    assert len(found) == len(RULES) and all(s["error"] < 1e-5 and s["eager"] > 0 for s in found)
    command(f"bench decode --rule delta --shape 2,1,2,8 --device cpu --state bfloat16 --out {tmp_path}", capsys)
    (row,) = json.loads((tmp_path / decode.FILE).read_text())
    assert row["held"] == "bfloat16" and 1e-4 < row["error"] < 0.1 and row["megabytes"] == 4 * 2 * 2 * 64 / 1e6


def test_training_says_who_could_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench training --layers 1 --width 16 --heads 2 --batch 1 --tokens 20 --steps 1 --vocabulary 50 --device cpu"
    line += " --depth mhc --streams 2"
    shown = command(f"{line} --out {tmp_path}", capsys)
    assert "flash-linear-attention is not installed" in shown
    found = {t["who"]: t for t in json.loads((tmp_path / training.FILE).read_text())["rows"]}
    assert found["axes"]["tokens_per_second"] > 0 and found["fla"]["tokens_per_second"] is None
    near = math.log(50)  # of a model that knows nothing yet
    assert all(abs(found[w]["loss"] - near) < 1 for w in ("axes", "axes, softmax attention", "torch, flash SDPA"))
    assert found["axes, mhc"]["tokens_per_second"] > 0 and abs(found["axes, mhc"]["loss"] - near) < 1


def test_a_table_too_wide_for_a_terminal_is_paragraphs(capsys: pytest.CaptureFixture[str]) -> None:
    """No figure is cut, and no reason; where there is room a table is one."""
    row = layers.Row(
        "gated-delta-net", "8,4096,2048,16", "bfloat16", "axes", 123.45, 678.91, 23.45, 78.91, 5_123_456_789, 123_456,
        234_567, 1.25, 2.75, 43.2, 7, 0.0012, "gradient of beta", "not [all] of it",
    )  # fmt: skip
    wanted = "123.45 / 678.91", "123.45 / 432.10", "5,123", "123,456 (234,567 by the block)", "gradient of beta"
    rows = [vars(row), {**vars(row), "who": "fla", "both": 432.1}]
    table = layers_report.table({"where": {"device": "d", "torch": "t"}, "rows": rows})
    for width in (80, 300):
        figures.show(table, Console(width=width))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width and "\N{HORIZONTAL ELLIPSIS}" not in text
        said = " ".join(text.split())
        assert not [x for x in wanted if x not in said]
        assert said.count("not [all] of it" if width == 80 else "43.2") == 2


def test_trainings_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """With every figure at its widest, names that go on in the next line, and reasons below."""
    names = [f"{who}{c}" for who in (*training.WHO, "axes, block-attention-residuals") for c in ("", ", compiled")]
    rows = [training.Throughput(who, 1234567.8, 12345.67, 141_234_567_890, 0.4567, 1234.5, 10.8249) for who in names]
    rows.append(training.Throughput("fla", refused=" ".join(["its kernels do not compile here"] * 4)))
    Console(width=200).print(training_report.table(training_models.Size(), rows))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and text.count("1,234,568") == len(names)
    assert " ".join(text.split()).endswith("fla: " + rows[-1].refused)


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", torch.float32), ("bfloat16-streams", torch.bfloat16)])
def test_training_keeps_streams_in_a_dtype(dtype: str, kept: torch.dtype) -> None:
    size = training_models.Size(layers=1, width=16, heads=2, vocabulary=9, batch=1, tokens=8, steps=1, dtype=dtype)
    device = torch.device("cpu")
    for name, depths in (("axes", ()), ("axes, mhc", ("mhc",)), ("torch, flash SDPA", ())):
        run = training._Training(name, depths, False, size, device)
        norms = [m for n, m in run.model.named_modules() if n.split(".")[-2:-1] == ["norms"]]
        seen: set[torch.dtype] = set()
        for norm in norms:
            norm.register_forward_pre_hook(lambda _, given, seen=seen: seen.add(given[0].dtype))
        assert run.step().isfinite() and norms and seen == {kept}


def test_training_refuses_other_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["bench", "training", "--dtype", "float16", "--device", "cpu", "--out", str(tmp_path)])
    assert "--dtype is one of bfloat16, bfloat16-streams, not 'float16'" in capsys.readouterr().err


def test_training_counts_products_of_weights() -> None:
    size = training_models.Size(layers=2, width=16, heads=2, vocabulary=50, batch=3, tokens=7)
    model = training_models.Torch(size)
    weights = 2 * (4 * 16 * 16 + 3 * 16 * 48) + 50 * 16
    assert training_models.products(model, size) == 6 * weights * 3 * 7


def test_ratios_are_of_the_fastest_peer() -> None:
    rows = [
        sequence.Row("r", SMALL, "f", "axes", forward=1.0, both=2.0),
        sequence.Row("r", SMALL, "f", "fla", forward=3.0),
        sequence.Row("r", SMALL, "f", "flash SDPA", forward=0.1, both=0.1),
    ]
    assert sequence.ratios(rows) == {("r", SMALL, "f"): (3.0, None)}
    table = report.table({"where": {"device": "d", "torch": "t"}, "rows": [vars(r) for r in rows]})
    assert table.row_count == 3


def test_whole_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    who = (layers.OURS, layers.PRODUCTS, layers.SDPA, layers.FLA)
    named = " ".join(f"--layer {name}" for name in ("gated-delta-net", "softmax-attention"))
    given = [word for name in who for word in ("--who", name)]
    with pytest.raises(SystemExit, match="0"):
        main([*f"bench layers {named} --size 2,20,16,2 --device cpu --out {tmp_path}".split(), *given])
    assert "gated-delta-net" in capsys.readouterr().out
    found = layers_report.rows(json.loads((tmp_path / "layers.json").read_text()))
    assert [(r.layer, r.who) for r in found] == [
        (name, n) for name in ("gated-delta-net", "softmax-attention") for n in who
        if n != layers.SDPA or name == "softmax-attention"
    ]  # fmt: skip
    for row in found:
        if row.refused:
            assert row.who == layers.FLA
        else:
            assert row.forward and row.both and row.saved and (row.error or 0) < 1e-4
    assert (tmp_path / "layers.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(layers, "_error", lambda *_: (1.0, "x"))
    plan = layers.Plan(("gla",), layers.Size(1, 8, 16, 2), "float32", "cpu", (layers.OURS,))
    (row,) = layers_report.rows(layers.measure(plan, tmp_path / "wrong"))
    assert row.forward is None and row.refused == "x is off by 1.0e+00"
    for bad, message in (("1,2,3", "four numbers"), ("1,8,15,2", "multiple of H")):
        with pytest.raises(AxesError, match=message):
            layers.Size.parse(bad)


def test_rows_apart_are_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--row gla:axes --row nothing:axes --apart 2 --size 1,8,16,2 --device cpu"
    shown = command(f"bench layers {given} --out {tmp_path}", capsys)
    found = layers_report.rows(json.loads((tmp_path / layers.FILE).read_text()))
    assert [(r.layer, r.who) for r in found] == [("gla", "axes"), ("nothing", "axes")]
    assert found[0].forward and found[0].first and not found[0].refused and "gla" in shown
    assert "nothing" in found[1].refused
    with pytest.raises(SystemExit):
        main(["bench", "layers", "--row", "gla", "--device", "cpu"])
    assert "such as gla:fla" in capsys.readouterr().err


def test_training_ahead_of_its_turn() -> None:
    """One block compiles; the row is of the whole model, without the seconds of its first step."""
    size = training_models.Size(layers=2, width=16, heads=2, vocabulary=16, batch=1, tokens=8, steps=1)
    options = dict(depths=(), compile_it=False, size=size, device=torch.device("cpu"), rate=None, configurations=2)
    steps = training._train(training.Throughput("axes"), name="axes", ahead=True, **options)  # type: ignore[arg-type]
    assert next(steps) is None
    row = apart.finished(steps)
    assert row.tokens_per_second and row.first is None and row.loss


def _steps(row: str) -> apart.Steps[str]:
    if row == "dies":
        os._exit(3)
    if row == "late":
        time.sleep(100)
    yield
    if row == "dies later":
        os._exit(4)
    return f"{row} {os.getpid()}"


def test_a_process_that_dies_or_is_late_costs_its_own_row() -> None:
    rows = ("dies", "dies later", "one")
    found = dict(apart.in_turn([(row, _steps) for row in rows], 3, 300))
    assert list(found) == list(rows)
    assert "ended with 3 before" in found["dies"] and "ended with 4 while" in found["dies later"]
    assert found["one"].startswith("one ") and found["one"] != f"one {os.getpid()}"
    assert list(apart.in_turn([("late", _steps)], 1, 0.5)) == [("late", "it still compiled after 0.5 s")]


def test_a_tuner_tries_few_of_its_configurations() -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    configurations = list(range(7))
    tuner = object.__new__(autotuner.Autotuner)
    tuner.configs, tuner.early_config_prune, tuner.perf_model, tuner.cache = configurations, None, None, {"key": 1}
    assert tuner.prune_configs({}) == configurations
    with peers.tuned(3):
        assert tuner.prune_configs({}) == [0, 2, 4] and callable(tuner.do_bench)
        tuned = []
        tuner.check_disk_cache("key", [], lambda: tuned.append(True))
        assert tuned
    with peers.tuned(9):
        assert tuner.prune_configs({}) == configurations
    peers.tune_again()
    assert not tuner.cache and tuner.prune_configs({}) == configurations


def test_the_page_of_rows_is_its_data(tmp_path: Path) -> None:
    """Every row of the page is an instance with a curve that falls; figures of a GPU are those of a bench's file."""
    root = Path(__file__).resolve().parents[2] / "docs"
    data = json.loads((root / "rows.json").read_text(encoding="utf-8"))
    page = (root / "rows.md").read_text(encoding="utf-8")
    assert rows.with_tables(page, data) == page, "docs/rows.md: run python -m axes.bench.rows"
    for row in data["rows"]:
        curve = data["curves"][row["name"]]
        assert len(curve) == rows.SIZES["steps"] and curve[-1] < 0.8 * curve[0], row["name"]
    where = {"device": "a GPU", "torch": "0"}
    ours = sequence.Row("delta", "1,2,3,4", "float32", peers.OURS, forward=1.0, both=3.0, error=1e-3, worst="dq")
    theirs = replace(ours, who=peers.FLA, forward=2.0, both=4.0)
    measured = [
        {"where": where, "ceilings": {}, "rows": [asdict(row)]} for row in (replace(ours, both=9.0), theirs, ours)
    ]
    times = functools.reduce(rows.with_times, measured, data["times"])
    assert len(times) == len(data["times"]) + 1
    shown = rows.tables({**data, "times": times})
    assert "| delta | 1,2,3,4 | 1.00 / 3.00 |  /  | 2.00 / 4.00 | 0.50 / 0.75 | 1.0e-03 dq |" in shown
    with pytest.raises(AxesError, match="markers"):
        rows.with_tables("no markers", data)


def test_nonlinear_memories_beside_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each rule that is asked for, with its route; shares that do not divide the tokens are refused."""
    shown = command("bench nonlinear --rule rls --rule memora --shape 1,8,2,4 --share 2 --turns 1", capsys)
    head, _, *rows = shown.splitlines()
    assert head.startswith("| rule | route | ms |") and len(rows) == 2
    for line, start in zip(rows, ("| rls | solve |", "| memora | cascade |"), strict=True):
        taken, interpreter, factor = (float(x) for x in line.split("|")[3:6])
        assert line.startswith(start) and taken > 0 and interpreter > 0 and factor > 0
    names = [rule.name for rule in nonlinear.nonlinear()]
    some = {"longhorn", "longhorn diagonal", "lattice decoding", "rls", "shampoo, ten steps", "muon state"}
    assert some <= set(names) and "delta" not in names
    with pytest.raises(SystemExit):
        main(["bench", "nonlinear", "--rule", "rls", "--shape", "1,8,2,4", "--share", "3"])
