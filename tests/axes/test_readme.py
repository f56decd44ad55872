"""The README's and the documentation's examples run, and the rendered pages are current."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from axes import catalogue

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_readme_example_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_readme_has_its_four_examples() -> None:
    assert len(EXAMPLES) == 4


def test_tables_fit_a_terminal() -> None:
    """All but the list of names, which is rendered."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    figures = lines[: lines.index("## What is in it")]
    assert [line for line in figures if line.startswith("|") and len(line) > 80] == []


def test_figures_are_those_of_the_benchmarks() -> None:
    """README and docs/benchmarks.md quote docs/kernels.md and docs/optimizers.md; the first is rounded."""
    texts = {n: (ROOT / n).read_text(encoding="utf-8") for n in ("README.md", *_QUOTED)}
    for name in ("README.md", "docs/benchmarks.md"):
        for layer in ("Gated DeltaNet", "DeltaNet", "GLA", "FoX"):
            (ours, theirs), source = _cells(texts[name], layer), texts["docs/kernels.md"]
            row = next(x for x in source.splitlines() if x.startswith(f"| {layer.replace(' ', '')}") and theirs in x)
            assert all(figure in row for figure in (*ours.split(" / "), theirs)), (name, layer)
    for rule in ("AdamW", "Lion", "Muon"):
        (ours, theirs), (exact, other) = (_cells(texts[n], rule) for n in ("README.md", "docs/benchmarks.md"))
        assert ours == f"{float(exact):.2f}" and theirs.split(",")[0] == f"{float(other):.2f}", rule
        wanted = (f"| 302M float32 | {rule.lower()} | axes |", "|  |  | axes fused |")
        rows = [x for x in texts["docs/optimizers.md"].splitlines() if exact in x or other in x]
        assert any(row.startswith(wanted) for row in rows) and len(rows) >= 2, rule


_QUOTED = ("docs/benchmarks.md", "docs/kernels.md", "docs/optimizers.md")


def _cells(text: str, name: str) -> tuple[str, str]:
    row = next(x for x in text.splitlines() if re.match(rf"\| {name} +\|", x))
    ours, theirs = (cell.strip() for cell in row.split("|")[2:4])
    return ours, theirs


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_taxonomy_is_current() -> None:
    page = (ROOT / "docs" / "taxonomy.md").read_text(encoding="utf-8")
    assert page == catalogue.taxonomy(), "docs/taxonomy.md is stale: run `python -m axes.catalogue`"


def test_readme_block_is_current() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page == catalogue.with_block(page), "the README's table is stale: run `python -m axes.catalogue`"
