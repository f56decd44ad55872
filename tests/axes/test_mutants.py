"""The tool that plants faults: what it plants, and that its lists fit the tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gpu.faults import FAULTS
from tests.mutants import CANDIDATES, EQUIVALENT, Fault, Found, faults, report, shown

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


def test_candidates_are_there() -> None:
    for file, tests in CANDIDATES.items():
        assert (ROOT / file).exists(), file
        for test in tests.split():
            assert (ROOT / "tests" / test).exists(), (file, test)


def test_forty_faults_of_kernels_fit_their_sources() -> None:
    assert len(FAULTS) == len(set(FAULTS)) == 40
    for fault in FAULTS:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        assert source.count(fault.was) == 1, fault
        ast.parse(source.replace(fault.was, fault.now))
        assert (ROOT / "tests" / "gpu" / fault.tests).exists(), fault
