"""Imports point downwards only: the layers of docs/architecture.md, read from the import statements."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first; a name is a module axes/<name>.py or a package axes.<name>. A module imports rows above its own. Within
# a tuple it may also import the names on its left; the names in a set are peers and do not know each other.
# `axes` is the root, axes/__init__.py: what stands above it in this table must not need it.
LAYERS: tuple[tuple[str, ...] | set[str], ...] = (
    ("errors", "declared", "rates", "solve"),
    ("kernels",),
    ("elementwise", "accumulate", "symmetric", "newton_schulz", "matrix_roots", "blockwise"),
    ("costs", "bregman", "mixing", "spectral", "preconditioners", "geometry", "monoids", "algorithms", "memory"),
    ("legality",),
    ("state_update",),
    ("reference", "packed"),
    ("derived",),
    ("scan", "gram", "cascade", "attention"),
    ("kernel_terms",),
    ("dispatch",),
    ("strategies", "checks"),
    {"optim", "sequence", "depth"},
    ("catalogue",),
    ("axes",),
    ("models", "tasks"),
    ("experiments", "claims", "bench"),
    ("cli",),
    ("__main__",),
)
# The tuple is recursive: what carries StateUpdates, or judges them, may name their type under `if TYPE_CHECKING`.
TYPE_ONLY = {"state_update": {"geometry", "algorithms", "legality"}}
# Beyond the declared dependencies: what comes with torch on a GPU or with the test extra, and who may import it.
OPTIONAL = {"triton": {"kernels"}, "hypothesis": {"strategies"}}


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    place = {name: (depth, row) for depth, row in enumerate(LAYERS) for name in row}
    (above, row), (below, _) = place[importer], place[imported]
    if above != below:
        return below < above
    return isinstance(row, tuple) and row.index(imported) < row.index(importer)


def declared_dependencies() -> set[str]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].replace("-", "_") for requirement in declared}


def sources() -> Iterator[tuple[Path, str]]:
    """Every file of the package once, with its name in the table."""
    for path in sorted((ROOT / "axes").rglob("*.py")):
        inside = path.relative_to(ROOT / "axes")
        if inside.parts[0] not in ("optim", "sequence", "depth"):  # links: read below, under their real path
            yield path, "axes" if inside.name == "__init__.py" and len(inside.parts) == 1 else inside.parts[0]
    for family in ("optim", "sequence", "depth"):
        for path in sorted((ROOT / family).rglob("*.py")):
            yield path, family


def type_only_lines(tree: ast.AST) -> set[int]:
    """Lines that stand under `if TYPE_CHECKING:` and never run."""
    return {
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
        if isinstance(inner, ast.stmt)
    }


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import statement, wherever it stands: lazy and type-only ones count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module == "axes":
                # `from axes import costs` names a module, `from axes import StateUpdate` needs the root itself
                known = {name for row in LAYERS for name in row}
                for alias in node.names:
                    yield node.lineno, f"axes.{alias.name}" if alias.name in known else "axes"
            else:
                yield node.lineno, node.module or ""


def violations(importer: str, source: str) -> list[str]:
    """What a module of the table must not import, in words."""
    known = {name for row in LAYERS for name in row}
    if importer not in known:
        return [f"{importer} has no place among the layers: put it in LAYERS, below everything that imports it"]
    found = []
    tree = ast.parse(source)
    for line, dotted in imported_modules(tree):
        head, _, rest = dotted.partition(".")
        if dotted.startswith("."):
            found.append(f"line {line}: relative import; write `from axes.... import ...`")
        elif head == "axes":
            target = rest.partition(".")[0] or "axes"
            if target not in known:
                found.append(f"line {line}: axes.{target} has no place among the layers: put it in LAYERS")
            elif target == importer == "axes":
                found.append(f"line {line}: the root imports itself")
            elif importer in TYPE_ONLY.get(target, ()) and line in type_only_lines(tree):
                continue
            elif not may_import(importer, target):
                found.append(f"line {line}: {importer} may not import {dotted}: imports point downwards only")
        elif head in OPTIONAL:
            if importer not in OPTIONAL[head]:
                found.append(f"line {line}: only {', '.join(OPTIONAL[head])} may import {head}")
        elif head not in sys.stdlib_module_names and head not in declared_dependencies():
            found.append(f"line {line}: {head} is not a dependency declared in pyproject.toml")
    return found


FILES = [(path.relative_to(ROOT).as_posix(), importer) for path, importer in sources()]


@pytest.mark.parametrize(("path", "importer"), FILES, ids=[path for path, _ in FILES])
def test_imports_point_downwards(path: str, importer: str) -> None:
    found = violations(importer.removesuffix(".py"), (ROOT / path).read_text())
    assert not found, f"{path}:\n  " + "\n  ".join(found)


def test_every_name_has_one_place() -> None:
    names = [name for row in LAYERS for name in row]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("importer", "statement", "complaint"),
    [
        ("costs", "from axes.state_update import StateUpdate", "downwards"),
        ("costs", "def f():\n    import axes.geometry", "downwards"),
        ("algorithms", "from axes.state_update import StateUpdate", "downwards"),
        ("algorithms", "if TYPE_CHECKING:\n    pass\nelse:\n    import axes.state_update", "downwards"),
        ("algorithms", "if TYPE_CHECKING:\n    from axes.dispatch import select", "downwards"),
        ("costs", "if TYPE_CHECKING:\n    from axes.state_update import StateUpdate", "downwards"),
        ("reference", "from axes.scan import scan", "downwards"),
        ("reference", "from axes.kernel_terms import run", "downwards"),
        ("reference", "from axes import dispatch", "downwards"),
        ("state_update", "from axes.derived import chain", "downwards"),
        ("optim", "from axes.sequence.base import Layer", "downwards"),
        ("depth", "from axes import optim", "downwards"),
        ("sequence", "from axes import StateUpdate", "downwards"),
        ("dispatch", "import axes", "downwards"),
        ("axes", "from axes.cli import main", "downwards"),
        ("axes", "import axes", "itself"),
        ("catalogue", "from axes.models import lm", "downwards"),
        ("costs", "from .rates import Per", "relative"),
        ("costs", "from axes.newcomer import x", "no place"),
        ("newcomer", "", "no place"),
        ("sequence", "import einops", "not a dependency"),
        ("scan", "import triton.language as tl", "only kernels"),
    ],
)
def test_a_planted_violation_is_found(importer: str, statement: str, complaint: str) -> None:
    found = violations(importer, statement)
    assert len(found) == 1 and complaint in found[0], found


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("geometry", "import math\nimport torch\nfrom axes.rates import Per\nfrom axes.costs import Cost"),
        ("monoids", "from axes.geometry import Geometry"),
        ("optim", "from axes.optim.base import Adapter\nfrom axes import costs"),
        ("algorithms", "if TYPE_CHECKING:\n    from axes.state_update import StateUpdate"),
        ("kernels", "import triton"),
        ("catalogue", "from axes import depth, optim, sequence"),
        ("cli", "import typer\nfrom rich.table import Table\nimport axes"),
    ],
)
def test_legal_imports_pass(importer: str, statement: str) -> None:
    assert violations(importer, statement) == []
