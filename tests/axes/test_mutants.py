"""The tool that plants faults: what it plants, and that its lists fit the tree."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path

import pytest

from tests import mutants, planted
from tests.gpu import faults as gpu
from tests.mutants import EQUIVALENT, TESTS, Changed, Fault, Found, faults, patch, report, shown
from tests.planted import forked

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
def f(a, b, *, flag=True):
    """A docstring with 1 < 2."""
    if a < 0 and flag:
        raise ValueError(f"{a - 1}")
    total: int = a * b
    total += 3
    return g(a, -b) if total else not b
'''


def test_every_kind_of_fault_is_planted_once_where_it_can_be() -> None:
    found = faults("f.py", SOURCE)
    assert sorted((f.kind, f.line) for f, _ in found) == [
        ("arguments", 8), ("comparison", 4), ("condition", 4), ("condition", 8), ("constant", 2), ("constant", 4),
        ("constant", 7), ("dropped", 5), ("dropped", 7), ("operator", 4), ("sign", 8), ("sign", 8),
    ]  # fmt: skip
    for _, source in found:
        assert source != SOURCE and ast.dump(ast.parse(source)) != ast.dump(ast.parse(SOURCE))


def test_a_fault_is_shown_to_tests_of_a_tree_which_is_as_before(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_part.py").write_text(
        "import sys; sys.path.insert(0, '.')\nfrom part import double\ndef test_double():\n    assert double(0) == 0\n"
        "def test_more():\n    assert double(3) == 6\n"
    )
    outcomes = {}
    for fault, source in faults("part.py", (tmp_path / "part.py").read_text()):
        for test in ("test_double", "test_more"):
            found = shown(tmp_path, fault, source, [f"test_part.py::{test}"], 30)
            outcomes[fault.kind, test] = found.outcome
    assert outcomes == {
        ("operator", "test_double"): "seen",  # by division through zero
        ("operator", "test_more"): "seen",
        ("constant", "test_double"): "survived",
        ("constant", "test_more"): "seen",
    }
    assert "2 * x" in (tmp_path / "part.py").read_text()


def test_the_report_counts_what_is_equivalent_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EQUIVALENT, ("f.py", "a | b"), "the same set")
    rows = [
        Found(Fault("f.py", n, "operator", was, "x"), outcome, "", 0.0)
        for n, (was, outcome) in enumerate((("a", "seen"), ("b", "slow"), ("a | b", "survived"), ("c", "survived")))
    ]
    text = report([*rows, Found(Fault("f.py", 9, "sign", "d", "x"), "not run", "", 0.0)])
    assert "| `f.py` | 4 | 2 | 1 | 1 |" in text and "66.7%" in text
    assert r"`a \| b`" in text and "the same set" in text and "**open**" in text


def test_parts_have_tests() -> None:
    for part in TESTS:
        assert (ROOT / part).exists() and len(mutants.tests_for(part + "/x.py")) > 4, part


def test_faults_that_nobody_saw_once_fit_their_sources() -> None:
    for file, was, now in mutants.NAMED:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert source.count(was) == 1, (file, was)
        ast.parse(source.replace(was, now))


def test_functions_of_a_file_get_the_code_of_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "changing.py"
    before = (
        "import functools\nLEAST = 2\nclass A:\n    def f(self, x):\n        return x + 1\n"
        "def outer(n):\n    def inner(x):\n        return x < n\n    return inner\n"
        "@functools.wraps(outer)\ndef g(x):\n    return x * 2\nkept = outer(3)\n"
    )
    path.write_text(before)
    monkeypatch.syspath_prepend(tmp_path)
    import changing  # type: ignore[import-not-found]

    after = before.replace("x + 1", "x - 1").replace("x < n", "x <= n").replace("x * 2", "x / 2")
    assert patch(Changed(str(path), before, after))
    assert changing.A().f(3) == 2 and changing.kept(3) and changing.outer(4)(4) and changing.g(3) == 1.5
    assert not patch(Changed(str(path), before, before.replace("LEAST = 2", "LEAST = 3")))


def test_faults_of_kernels_fit_their_sources_and_name_tests_that_are_there() -> None:
    assert len(gpu.FAULTS) == len(set(gpu.FAULTS)) >= 40
    tests = {t.partition("[")[0] for fault in gpu.FAULTS for t in fault.tests}
    there = {
        f"tests/gpu/{path.name}::{node.name}"
        for path in (ROOT / "tests" / "gpu").glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert tests <= there, tests - there
    for fault in gpu.FAULTS:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        assert source.count(fault.was) == 1, fault
        assert fault.was.count("\n") == fault.now.count("\n"), fault  # kernels below would be compiled again
        ast.parse(source.replace(fault.was, fault.now))


@pytest.mark.slow  # three sessions of pytest in processes of their own; the test below runs one
def test_faults_run_side_by_side_after_their_tests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "root"
    tree.mkdir()
    (tree / "part.py").write_text("def double(x):\n    return 2 * x\ndef triple(x):\n    return 3 * x\n")
    (tree / "test_part.py").write_text(
        "import sys; sys.path.insert(0, '.')\nfrom part import double, triple\ndef test_double():\n"
        "    assert double(3) == 6\ndef test_triple():\n    assert triple(0) == 0\ndef test_wrong():\n    assert 0\n"
    )
    monkeypatch.setattr(planted, "ROOT", tree)
    faults = [
        gpu.Fault("part.py", was, now, (f"test_part.py::test_{test}",))
        for was, now, test in (("2 * x", "2 + x", "double"), ("3 * x", "2 * x", "triple"), ("2 * x", "x", "wrong"))
    ]
    known: list[list[str]] = []
    found = gpu.run(faults, 2, 2.0, 60.0, lambda found: known.append([f.outcome for f in found]))
    assert {f.fault.now: f.outcome.partition(":")[0] for f in found} == {
        "2 + x": "seen", "2 * x": "survived", "x": "not shown",
    }  # fmt: skip
    assert known[-1] == [f.outcome for f in found] and len(known) >= len(faults)
    text = gpu.report(found)
    assert "1 of 2 faults" in text and "| `part.py` | `3 * x` | `2 * x` | survived |" in text
    (none,) = gpu.run(faults[:1], 1, 2.0, 0.0, lambda found: None)
    assert none.outcome == "not shown: no time was left"
    assert forked(lambda: time.sleep(60), 0.1) is None and forked(lambda: os._exit(3), 60) == "ended"


def test_rows_of_two_samples_are_those_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "f.py").write_text("def f(a):\n    # moved down\n    if a < 3:\n        return a + 1\n    return a\n")

    def row(line: int, kind: str, was: str, now: str, outcome: str) -> dict[str, object]:
        fault = {"file": "f.py", "line": line, "kind": kind, "was": was, "now": now}
        return {**fault, "outcome": outcome, "by": outcome, "seconds": 1.0}

    named = row(1, "named", "a", "b", "seen")
    first = [
        named, row(2, "comparison", "a < 3", "(a <= 3)", "survived"), row(3, "operator", "a * 2", "(a / 2)", "seen"),
    ]  # fmt: skip
    second = [
        row(9, "comparison", "a < 3", "(a <= 3)", "seen"), row(3, "constant", "3", "(4)", "survived"),
        row(4, "operator", "a + 1", "(a - 1)", "not run"),
    ]  # fmt: skip
    found = mutants.merged(first, second)
    assert [(r["line"], r["kind"], r["outcome"]) for r in found] == [
        (1, "named", "seen"), (3, "comparison", "seen"), (3, "constant", "survived"),
    ]  # fmt: skip
    assert [r["outcome"] for r in mutants.merged(second, first[1:])] == ["seen", "survived", "not run"]
    (tmp_path / "f.py").write_text("def f(a):\n    a = 1 + a\n    b = 1\n    return a + b\n")
    moved = [row(3, "constant", "1", "(2)", "survived")]
    monkeypatch.setitem(EQUIVALENT, ("f.py", "1"), ("a = 1 + a", "whatever"))
    assert [[r["line"] for r in mutants.merged(*some)] for some in ((moved, ()), ((), moved))] == [[2], [3]]


def test_what_is_near_a_file_saw_others_of_its_faults_or_says_its_names() -> None:
    tests = [f"t/test_a.py::test_{n}" for n in ("one[1]", "one[2]", "two", "drift")] + ["t/test_b.py::test_of_Drift[x]"]
    tests += ["t/test_c.py::test_other"]
    found = mutants.near(tests, "axes/drift.py", "class Drift:\n    pass\n", ["t/test_a.py::test_one[7]"])
    assert found[0].startswith("t/test_a.py::test_one[") and set(found[1:3]) == {tests[3], tests[4]}
    assert found[3] == tests[2] and found[4].startswith("t/test_a.py::test_one[") and len(found) == 5


@pytest.mark.slow  # a session of pytest in a process of its own; one of the tests above runs one, too
def test_what_nobody_has_imported_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()  # a tree has one
    (tmp_path / "late.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_late.py").write_text(
        "import subprocess, sys\ndef test_double():\n"
        "    program = 'from late import double; assert double(3) == 6'\n"
        "    assert subprocess.run([sys.executable, '-c', program], cwd='.').returncode == 0\n"
        "def test_never():\n    raise ValueError\n"
    )
    before = Path.cwd()
    try:
        server = mutants._Server(tmp_path, ["test_late.py"])
    finally:
        os.chdir(before)
    fault, source = next(x for x in faults("late.py", (tmp_path / "late.py").read_text()) if x[0].kind == "constant")
    assert server.show(tmp_path, fault, source, ["test_late.py::test_double"], 60) == "test_late.py::test_double"
    whole = (tmp_path / "late.py").read_text()
    assert server.show(tmp_path, fault, whole + "#", ["test_late.py::test_double"], 60) == ""
    asked = ["test_late.py::test_double", "test_late.py::test_never"]
    assert server.show(tmp_path, fault, whole + "#", asked, 60, 0.0) == ""  # none is begun when patience is at its end
    server.close()
