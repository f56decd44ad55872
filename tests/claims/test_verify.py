"""`axes verify`: how findings merge, what an error becomes, processes, Ctrl-C, and the command around it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import axes as axes_package
from axes.claims import command
from axes.claims.base import Claim, Draw, Finding, Result, Verdict, breaks, holds, within
from axes.claims.register import counts, find, groups
from axes.claims.verify import verify, verify_one
from axes.cli import main
from axes.errors import UnknownName
from axes.optim import SGD

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


def claim(check: Callable[[Draw], tuple[Finding, ...]], verdict: Verdict = Verdict.EXACT) -> Claim:
    """A01 with another check."""
    return dataclasses.replace(find(["A01"])[0], verdict=verdict, conditions="some", check=check)


# --- the register


# exact, under conditions, approximate, statistical, false, not testable
EXPECTED = {
    "A": (18, 10, 0, 0, 12, 2),
    "B": (10, 7, 0, 1, 5, 1),
    "C": (8, 4, 0, 4, 8, 1),
    "D": (8, 7, 0, 0, 8, 1),
    "E": (3, 0, 1, 5, 4, 1),
    "F": (15, 2, 0, 1, 8, 1),
    "G": (4, 3, 1, 1, 3, 1),
    "H": (9, 6, 2, 3, 10, 2),
    "I": (6, 5, 1, 0, 1, 1),
    "J": (5, 4, 0, 0, 0, 1),
    "K": (0, 0, 0, 0, 0, 3),
}
# A claim whose verdict here is not the one of the first, hand-written check of it: id -> (there, here, reason).
DIFFERENCES: dict[str, tuple[Verdict, Verdict, str]] = {
    "C25": (Verdict.UNTESTABLE, Verdict.FALSE, "LUCID is a tuple now, and what it divides by is a triangle"),
}


@pytest.mark.parametrize("group", groups())
def test_counts_per_verdict(group: str) -> None:
    expected = dict(zip(Verdict, EXPECTED[group], strict=True))
    for id, (there, here, reason) in DIFFERENCES.items():
        assert find([id])[0].verdict is here and reason
        if id[0] == group:
            expected[there] -= 1
            expected[here] += 1
    assert counts(find())[group] == expected


def test_228_claims_with_contiguous_ids() -> None:
    assert sum(sum(row) for row in EXPECTED.values()) == len(find()) == 228
    for group, row in EXPECTED.items():
        assert [c.id for c in find([group])] == [f"{group}{i:02d}" for i in range(1, sum(row) + 1)]


def test_find_keeps_the_order_of_the_register() -> None:
    assert [c.id for c in find(["k", "b02", "B01", "B02"])] == ["B01", "B02", "K01", "K02", "K03"]
    assert [c.group for c in find()] == sorted(c.group for c in find())


@pytest.mark.parametrize(
    "name, near", [("A43", "A42"), ("A1", "mean A"), ("B00", "mean B"), ("nothing", "known: A, B, ")]
)
def test_unknown_claim_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownName, match=near):
        find(["A01", name])


# --- findings over several draws


def test_of_several_draws_the_worst_is_kept() -> None:
    def check(draw: Draw) -> tuple[Finding, ...]:
        s = draw.seed
        return (
            holds("identity", [1e-12, 3e-11, 2e-12][s]),
            breaks("statement", [0.5, 0.9, 0.4][s], margin=0.1),
            within("constant", [0.5, 0.6, 0.05][s], 0.0, 1.0),
            holds("only once fails", [1e-3, 0.0, 1e-2][s]),
            holds("not a number", [0.0, math.nan, 0.0][s]),
        )

    result = verify_one(claim(check), 3)
    measured = {f.what: f.measured for f in result.findings}
    assert math.isnan(measured.pop("not a number"))
    assert measured == {"identity": 3e-11, "statement": 0.4, "constant": 0.05, "only once fails": 1e-2}
    assert [f.ok for f in result.findings] == [True, True, True, False, False]
    assert not result.ok and result.worst is result.findings[3]


def test_same_words_in_two_roles_are_two_findings() -> None:
    result = verify_one(claim(lambda draw: (holds("x", 0.0), breaks("x", 1.0, 0.5)), Verdict.CONDITIONAL), 2)
    assert [f.role for f in result.findings] == ["holds", "breaks"] and result.ok


@pytest.mark.parametrize(
    "verdict, findings, ok",
    [
        (Verdict.EXACT, (holds("x", 0.0),), True),
        (Verdict.EXACT, (holds("x", math.inf),), False),
        (Verdict.EXACT, (within("x", 0.5, 0, 1),), False),
        (Verdict.EXACT, (), False),
        (Verdict.CONDITIONAL, (holds("x", 0.0),), False),
        (Verdict.CONDITIONAL, (holds("x", 0.0), breaks("y", 1.0, 0.5)), True),
        (Verdict.CONDITIONAL, (holds("x", 0.0), breaks("y", 0.4, 0.5)), False),
        (Verdict.STATISTICAL, (within("x", 1.1, 0, 1),), False),
    ],
)
def test_a_verdict_needs_its_kinds_of_findings(verdict: Verdict, findings: tuple[Finding, ...], ok: bool) -> None:
    assert verify_one(claim(lambda draw: findings, verdict)).ok is ok


def test_an_error_in_a_check_is_a_red_result() -> None:
    def check(draw: Draw) -> tuple[Finding, ...]:
        if draw.seed == 1:
            raise RuntimeError("a singular matrix")
        return (holds("x", 0.0),)

    failing, sound = verify([claim(check), find(["A02"])[0]], 2, workers=1)
    assert not failing.ok and "a singular matrix" in failing.error
    assert [f.what for f in failing.findings] == ["x"]  # what was found before it
    assert sound.ok and sound.claim.id == "A02"


def test_draws_repeat_and_differ() -> None:
    assert torch.equal(Draw(3).normal(4), Draw(3).normal(4))
    assert not torch.equal(Draw(3).normal(4), Draw(4).normal(4))


# --- processes

NAMES = ("A01", "A05", "B01", "B11", "C01", "J01", "K01")


def test_parallel_is_serial() -> None:
    claims = find(NAMES)
    seen: list[Result] = []
    parallel, serial = verify(claims, 1, workers=2, progress=seen.append), verify(claims, 1, workers=1)
    assert [r.claim.id for r in parallel] == list(NAMES)
    assert sorted(r.claim.id for r in seen) == sorted(NAMES)
    for r, s in zip(parallel, serial, strict=True):
        assert (r.claim, r.error, r.ok, s.ok) == (s.claim, s.error, True, True)
        assert [(f.role, f.what) for f in r.findings] == [(f.role, f.what) for f in s.findings]
        # sums of another process may round otherwise, where its memory is aligned otherwise
        assert [f.measured for f in r.findings] == pytest.approx([f.measured for f in s.findings], rel=1e-9, abs=1e-12)


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(axes_package.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
}


# what a shell starts in the background ignores Ctrl-C, and so do its children
_HEARS_INTERRUPTS = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


def _processes_of(group: int) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat=,args="], capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [" ".join(row) for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def interrupted(code: str, whole_group: bool) -> tuple[int, str, list[str]]:
    """Exit status, stderr and processes left of a program that is interrupted once it prints `now`."""
    program = subprocess.Popen(
        [sys.executable, "-c", _HEARS_INTERRUPTS + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        for line in program.stdout:
            if line.strip() == "now":
                break
        if whole_group:
            os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        else:
            program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
        for _ in range(50):  # Python's own resource tracker leaves a moment after the program
            left = _processes_of(program.pid)
            if not left:
                break
            time.sleep(0.2)
        return program.returncode, errors, left
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        for pipe in (program.stdout, program.stderr):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize("whole_group", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_stops_the_processes(whole_group: bool) -> None:
    code = """
        from axes.claims import command, verify
        from axes.cli import main

        def say(claims, console, seeds, workers):
            return verify.verify(claims, seeds, workers, lambda result: print("now", flush=True))

        command._with_progress = say
        main(["verify", "K01", "E09", "E10", "--seeds", "10000"])
    """
    status, errors, left = interrupted(code, whole_group)
    assert status == 130
    assert errors.splitlines() == ["stopped"]
    assert not left


def test_a_check_that_kills_its_process_is_a_red_result(tmp_path: Path) -> None:
    code = """
        import os
        from axes.claims import verify

        def dies(name, seeds):
            os._exit(9) if name == "A02" else None
            return (), 0.0, ""

        verify._by_id = dies  # workers import this program again

        if __name__ == "__main__":
            from axes.claims import register
            for result in verify.verify(register.find(["A01", "A02"]), 1, workers=2):
                print(result.claim.id, result.ok, result.error)
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "A02 False the process that ran the check died" in done.stdout


# --- the command


def test_table_counts_and_status(axes: Axes) -> None:
    status, output, errors = axes("verify", "A01", "b01", "K01", "--seeds", 1, "--workers", 1)
    assert (status, errors) == (0, "")
    for word in ("A01", "B01", "K01", "Widrow-Hoff", "exact", "not testable", "≤ 1e-12", "holds"):
        assert word in output
    assert "2 of 2 testable claims hold their verdict" in output


def test_formulas_reach_the_table_unchanged(axes: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = dataclasses.replace(find(["A01"])[0], statement="rows [red] and x[i] in [0, 1] \\[b]")
    monkeypatch.setattr(command, "find", lambda names: (stated,))
    said = axes("verify", "A01", "--seeds", 1)[1]  # in a narrow column
    assert all(word in said for word in stated.statement.split())


def test_a_planted_fault_fails_the_command(axes: Axes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true = SGD.step

    def ascent(self: torch.optim.Optimizer, closure: Callable[[], float]) -> object:
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = -p.grad
        return true(self)

    monkeypatch.setattr(SGD, "step", ascent)
    file = tmp_path / "findings.json"
    status, output, errors = axes("verify", "A01", "A09", "--seeds", 1, "--workers", 1, "--json", file)
    assert (status, errors) == (1, "")
    assert "A01 does not hold its verdict (exact)" in output and "NOT SGD against the rule" in output
    verified = {row["id"]: row["verified"] for row in json.loads(file.read_text())["claims"]}
    assert verified == {"A01": False, "A09": True}


def test_json_is_valid_and_complete(axes: Axes, tmp_path: Path) -> None:
    file = tmp_path / "findings.json"
    assert axes("verify", "K", "J01", "B11", "--seeds", 1, "--workers", 1, "--json", file)[0] == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    read = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    assert set(read["environment"]) == {"torch", "python"}
    rows = {row["id"]: row for row in read["claims"]}
    assert list(rows) == ["B11", "J01", "K01", "K02", "K03"]
    for id, row in rows.items():
        (c,) = find([id])
        assert (row["statement"], row["verdict"], row["source"]) == (c.statement, c.verdict.value, str(c.source))
        assert (row["conditions"], row["correction"], row["instance"]) == (c.conditions, c.correction, c.instance)
        assert row["verified"] == (c.check is not None) or c.verdict is Verdict.UNTESTABLE
        assert bool(row["findings"]) == (c.check is not None)
        assert all(set(f) == {"role", "what", "measured", "low", "high", "ok"} for f in row["findings"])
    assert not list(tmp_path.glob("*.part"))


def test_html_and_docs_are_written(axes: Axes, tmp_path: Path) -> None:
    html, docs = tmp_path / "claims.html", tmp_path / "claims.md"
    assert axes("verify", "A01", "--seeds", 1, "--html", html)[0] == 0
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert axes("verify", "--docs", docs) == (0, f"written: {docs}\n", "")
    assert docs.read_text(encoding="utf-8").startswith("# Claims")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["A43"], "unknown claim 'A43': did you mean A42"),
        (["A01", "zebra"], "unknown claim 'ZEBRA': known: A, B"),
        (["A01", "--seeds", "0"], "--seeds must be from 1 to 100,000, got 0"),
        (["A01", "--json", "no/such/folder/f"], "the folder no/such/folder does not exist"),
        (["A01", "--html", "."], "cannot write .: it is a folder"),
        (["A01", "--docs", "claims.md"], "give it alone"),
        (["--docs", "claims.md", "--seeds", "2"], "give it alone"),
        (["--docs", "no/such/folder/f"], "the folder no/such/folder does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    axes: Axes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "verify", None)  # said before any check runs
    status, output, errors = axes("verify", *arguments)
    assert (status, output) == (1, "")
    assert errors.startswith("error: ") and words in errors and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, words",
    [(["--seeds", "few"], "'--seeds'"), (["--workers", "0"], "'--workers'"), (["--bogus"], "No such option: --bogus")],
)
def test_flags_that_do_not_parse(axes: Axes, arguments: list[str], words: str) -> None:
    status, output, errors = axes("verify", "A01", *arguments)
    assert (status, output) == (2, "")
    assert words in errors and "Traceback" not in errors


def test_explain_prints_derivation_and_numbers(axes: Axes) -> None:
    status, output, errors = axes("explain", "a01")
    (c,) = find(["A01"])
    assert (status, errors) == (0, "")
    together = " ".join(output.split())
    for text in (c.statement, c.derivation, str(c.source), c.instance, "exact", "holds SGD against the rule: "):
        assert " ".join(text.split()) in together
    assert max(map(len, output.splitlines())) <= 100


def test_explain_says_why_a_claim_is_not_testable(axes: Axes) -> None:
    status, output, _ = axes("explain", "K01")
    assert status == 0 and find(["K01"])[0].reason in " ".join(output.split())


def test_explain_unknown_claim(axes: Axes) -> None:
    status, output, errors = axes("explain", "A99")
    assert (status, output) == (1, "")
    assert errors.startswith("error: unknown claim 'A99': did you mean A") and errors.count("\n") == 1
