"""The README's and the documentation's examples run, and the rendered pages are current."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_taxonomy_is_current() -> None:
    page = (ROOT / "docs" / "taxonomy.md").read_text(encoding="utf-8")
    assert page == catalogue.taxonomy(), "docs/taxonomy.md is stale: run `python -m axes.catalogue`"


def test_readme_block_is_current() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page == catalogue.with_block(page), "the README's table is stale: run `python -m axes.catalogue`"
