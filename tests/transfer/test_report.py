"""What is said of results: verdicts where they may be believed, pages that are current, a command that explains."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from axes.cli import main
from axes.core.algorithms import Step
from axes.core.costs import SquaredError
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, UnknownName
from axes.optim import SGD
from axes.sequence import GatedDeltaNet
from axes.transfer import page, report, words
from axes.transfer.findings import FINDINGS, found
from axes.transfer.folder import described_plan
from axes.transfer.named import NAMED
from axes.transfer.own import own, tuple_of
from axes.transfer.plan import Plan, planned
from axes.transfer.results import compiled
from axes.transfer.training import Run

DOCS = Path(__file__).resolve().parents[2] / "docs"
VALUES = {"S1": (0.9, 0.5), "L2": (2.3, 2.2), "D3": (0.80, 0.80), "D5": (0.7, 0.71)}


def results(parity: tuple[float, float] = (1.0, 0.7), form: str = "whole", upto: int = 6) -> dict[str, Any]:
    """What a plan with these values of arms and controls says; seeds differ by little."""
    plan = described_plan(planned(tuple(VALUES), form=form, seeds=6), "axes transfer run")
    runs: dict[str, Run] = {}

    def put(systems: list[str], task: str, values: tuple[float, float]) -> None:
        for system, value in zip(systems, values, strict=True):
            for seed in range(upto + 1):
                off = 0.001 * seed * (value != values[0])
                times = {"seconds": 1.0, "step_ms": 2.0}
                curve = ((1, 3.0), (2, value))
                run = Run(task, system, 1e-3, seed, value + off, {}, curve, 10, 20, 3.0, 4, None, times)
                runs.setdefault(run.key, run)

    known = plan["calibrations"]
    put(known["parity"]["systems"], known["parity"]["task"], parity)
    put([known["null"]["systems"][0]], known["null"]["task"], parity[:1] * 1)  # type: ignore[arg-type]
    if "recall" in known:
        put(known["recall"]["systems"], known["recall"]["task"], (0.99, 0.01))
    for name, e in plan["experiments"].items():
        for task in e["tasks"]:
            put(e["systems"], task, VALUES[name])
    return compiled(plan, runs)


def verdicts(found: dict[str, Any]) -> dict[str, str | None]:
    return {e["id"]: e["compared"][0]["verdict"] for e in found["experiments"]}


def test_verdicts_follow_intervals_where_calibrations_hold() -> None:
    found = results()
    assert all(c["holds"] for c in found["calibrations"]) and found["verdicts"] == ""
    assert verdicts(found) == {
        "S1": "helps",
        "L2": "hurts",
        "D3": "equivalent",
        "D5": "equivalent",
    }  # bits: less is better
    (s1,) = (e["compared"][0] for e in found["experiments"] if e["id"] == "S1")
    assert (
        s1["effect"] == pytest.approx(0.4, abs=0.01)
        and s1["p"] == 2 / 64
        and s1["holm"] == pytest.approx(4 / 32, abs=0.04)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"parity": (0.7, 0.7)}, "calibration parity did not"), ({"form": "quick"}, "a quick run"),
        ({"upto": 4}, "yet: calibration parity, recall, null"),
    ],
)  # fmt: skip
def test_no_verdict_without_what_is_known(given: dict[str, Any], said: str) -> None:
    found = results(**given)
    assert said in found["verdicts"] and not any(c.get("verdict") for e in found["experiments"] for c in e["compared"])
    text, html = report.markdown(found), page.page(found)
    assert "it helps" not in text and 'class="v helps"' not in html and said.split()[-1] in text
    if "upto" in given:
        assert "4 runs to go" in text and "4 runs to go" in html


def test_names_of_tasks_are_not_cut_in_a_narrow_terminal() -> None:
    found = results()
    found["experiments"][0]["compared"][0]["task"] = "multi-query-recall"
    console = Console(width=100, record=True, file=io.StringIO())
    _, table = report.tables(found)
    console.print(table)
    cells = [line.split("│")[2].strip() for line in console.export_text().splitlines() if line.startswith("│")]
    assert "multi-query-recall" in "".join(cells)
    assert words.left(1) == "1 run to go" and words.left(2) == "2 runs to go"


def test_a_page_that_needs_nothing_else() -> None:
    found = results()
    html = page.page(found)
    assert html.count("data:image/png;base64,") == 2 and "http" not in re.sub(r"base64,[^\"]*", "", html)
    assert 'class="v helps"' in html and 'class="v hurts"' in html and html == page.page(json.loads(json.dumps(found)))
    (s1,) = (e for e in found["experiments"] if e["id"] == "S1")
    section = page._section(s1, found)
    assert section.count("<mark>") == 2 and "<mark>Euclidean()</mark>" in section
    text = report.markdown(found)
    assert "| **h** |" in text and "The whole interval is above the margin: it helps." in text


def _came_out(**verdicts: tuple[str, float, float]) -> dict[str, Any]:
    """Results of one comparison an experiment: its verdict, what its arm and its control measured."""
    sides = {
        name: {"verdict": said, "arm": {"values": {"1": arm}}, "control": {"values": {"1": control}}}
        for name, (said, arm, control) in verdicts.items()
    }
    return {"experiments": [{"id": name, "compared": [c]} for name, c in sides.items()]}


def test_findings_are_said_where_results_bear_them_out() -> None:
    gates = {"G5": ("helps", 0.5, 0.0), "G6": ("hurts", 0.0, 1.0), "G7": ("helps", 1.0, 0.0)}
    assert [text.split()[0] for text in found(_came_out(**gates))] == ["What"]
    for name, other in (("G6", ("undecided", 0.0, 1.0)), ("G6", ("hurts", 0.5, 1.0)), ("G7", ("helps", 1.0, 0.9))):
        assert not list(found(_came_out(**{**gates, name: other})))
    assert not list(found(_came_out(G6=gates["G6"], G7=gates["G7"])))
    known = {e.id for e in NAMED}
    for finding in FINDINGS:
        assert finding.rests.keys() <= known and {name for name, _ in finding.little} <= finding.rests.keys()


def _first(found: dict[str, Any], name: str) -> dict[str, Any]:
    compared: dict[str, Any] = next(e for e in found["experiments"] if e["id"] == name)["compared"][0]
    return compared


def test_what_a_reader_must_know_stands_beside_a_verdict() -> None:
    """Runs that broke down, what help costs, tasks that nobody learned, what is not finished, sizes that differ."""
    found = results()
    s1, l2, d3, d5 = (_first(found, name) for name in ("S1", "L2", "D3", "D5"))
    s1["control"]["broke"], s1["arm"]["flops"], s1["arm"]["parameters"] = 2, 3 * s1["control"]["flops"], 12
    for side in ("arm", "control"):
        d3[side]["values"] = dict.fromkeys(d3[side]["values"], 0.05)
        l2[side]["by"] = {"position": {"16": 2.5}, "loss by position": {"16": 1.5}}
    d5["missing"] = 6
    del d5["effect"]
    system, task = s1["control"]["system"], s1["task"]
    (row, *_) = (r for r in found["runs"] if (r["system"], r["task"]) == (system, task))
    row["broke"], row["note"] = 7, "it broke down: no factors"
    found["date"] = "2026-01-02; 2026-01-03"
    (e,) = (e for e in found["experiments"] if e["id"] == "L2")
    e["said"] = "it forgets less (Somebody 2026)"
    text, html = report.markdown(found), page.page(found)
    for said in (
        "Helps: S1 (does the metric of recursive least squares help tokens recall?) on multi-query-recall (+0.400; "
        "2 of 6 runs of the control broke down; 3.0 times the FLOPs)",
        "Says nothing, since neither side learned the task: D3 on digits",
        "Not finished: D5 on digits (6 runs to go)",
        "2 of 6 runs of the control broke down (it broke down: no factors).",
        "bits a byte by position, arm / control: 16: 2.500 / 2.500",
        "loss by position, in nats, arm / control: 16: 1.500 / 1.500",
        "Parameters agree within 1 % but for S1 (20 %), tokens exactly.",
        "so that more than a tuple may differ",
    ):  # fmt: skip
        assert said.replace("+0.400", f"{s1['effect']:+.3f}") in text and said.split("(")[0] in html, said
    assert "| it forgets less (Somebody 2026) | 2.30" in text and '<td data-column="published">it forgets less' in html
    assert "- dates:\n  - `2026-01-02`\n  - `2026-01-03`" in text and "<dd>2026-01-03</dd>" in html
    assert words.notes(found) == ["the control of S1 on multi-query-recall: it broke down: no factors (1 run)"]
    plain = report.markdown(results())
    assert "What is published" not in plain and "Parameters agree within 1 %, tokens exactly" in plain


def test_experiments_stand_in_the_order_of_the_list() -> None:
    """Whichever command has added them to a folder; one's own come last."""
    mine = own(SGD.declare(momentum=0.9), "sequence", "gated-delta-net-prev", name="mine")
    plan = described_plan(Plan((mine, *planned(("P1", "L2", "S1")).experiments)))
    assert [e["id"] for e in compiled(plan, {})["experiments"]] == ["S1", "L2", "P1", "mine"]


def test_a_correction_that_can_reject_nothing_is_said() -> None:
    said = [line for line in words.summary(results()) if "Holm" in line]
    assert said and "p is at least 0.031, so that over 4 experiments" in said[0]
    assert not words._uncorrected({**results(), "seeds": 12})


def test_the_page_in_the_docs_is_of_its_results_file() -> None:
    """docs/transfer.md: `axes.transfer.report.markdown` of docs/transfer.json."""
    kept = json.loads((DOCS / "transfer.json").read_text())
    assert (DOCS / "transfer.md").read_text() == report.markdown(kept)


OWN = StateUpdate(SquaredError(), algorithm=Step(Per("beta"), at="gated"), monoid=GatedDeltaNet.update.monoid)


def test_ones_own_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ungated = StateUpdate(SquaredError(), algorithm=Step(Per("beta")))
    experiment = own(ungated, "sequence", "gated-delta-net", name="ungated")
    assert experiment.control == GatedDeltaNet.update and [d.path for d in experiment.moved] == [
        "monoid",
        "algorithm.at",
    ]
    assert experiment.block == GatedDeltaNet.block and experiment.tasks == ("multi-query-recall",)
    planned((), experiment, form="quick").require_equal_sizes()
    with pytest.raises(AxesError, match="nothing moved"):
        own(OWN, "sequence", "gated-delta-net")
    with pytest.raises(UnknownName, match="did you mean parity"):
        own(ungated, "sequence", "gated-delta-net", ("party",))
    (tmp_path / "transfer_mine.py").write_text("from axes.optim import SGD\nMINE = SGD.declare()\nOTHER = 1\n")
    (tmp_path / "transfer_wrong.py").write_text("A = 1\nX = StateUpdat()\n")
    (tmp_path / "transfer_odd.py").write_text("X = (\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(tuple_of("transfer_mine:MINE"), StateUpdate)
    for spec, said in (
        ("transfer_mine", "takes module:tuple"), ("transfer_mine:MIN", "did you mean MINE"),
        ("transfer_mine:OTHER", "is a int, not a StateUpdate"), ("no_such_module:X", "cannot import"),
        ("transfer_wrong:X", r"importing transfer_wrong raises NameError: .*transfer_wrong\.py, line 2"),
        ("transfer_odd:X", r"importing transfer_odd raises SyntaxError: .*transfer_odd\.py, line 1"),
    ):  # fmt: skip
        with pytest.raises(AxesError, match=said):
            tuple_of(spec)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run S11", "unknown experiment 'S11': did you mean S1"), ("run S1 --task recal", "unknown task 'recal'"),
        ("run D1 --task parity", "--task parity is not for data"), ("run S1 --seeds 2", "--seeds must be from 3"),
        ("run S1 --device tpu", "unknown device"), ("run S1 --device cuda:7", "torch sees"),
        ("run S1 --against gla", "give both"), ("run --update a:b", "--against NAME"),
        ("run S1 --capture graph", "CUDA graphs"), ("run S1 --workers 0", "--workers must be"),
        ("report nowhere", "nowhere is no folder"), ("report .", ". holds no plan.json"),
        ("run S4 --quick --out letter", "letter is a file, and results are a folder"),
        ("report letter", "letter is no folder"), ("report nowhere --docs no/where.md", "does not exist"),
        ("run --update axes.sequence.rwkv7:RWKV7 --against sgd --axis data", "not a StateUpdate"),
    ],
)  # fmt: skip
def test_what_is_said_at_the_command_line(
    line: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        main(["transfer", *line.split()])
    assert (tmp_path / "letter").read_text() == "mine"
    shown = " ".join(capsys.readouterr().err.split())
    assert stopped.value.code == 1 and shown.startswith("error: ") and said in shown, shown


def test_a_tuple_without_a_meaning_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "transfer_titans.py").write_text("from axes import catalogue\nT = catalogue.get('titans').update\n")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.chdir(tmp_path)
        main(["transfer", "run", "--update", "transfer_titans:T", "--axis", "depth", "--against", "residual"])
    assert "has no meaning on the axis depth" in " ".join(capsys.readouterr().err.split())
