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

# Lowest first; a name is a module axes/<name>.py or a room, the package axes.<name>. A module imports rows above its
# own; the names of one row are peers and do not know each other. `axes` is the root, axes/__init__.py: what stands
# above it in this table must not need it. The row before it holds the short names of parts that user code imports.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "errors",
        "files",
        "state_dicts",
        "kernels",
        "linalg",
        "programs",
        "core",
        "routes",
        "testing",
        "optim sequence depth",
        "catalogue",
        "moves symbols",
        "answers",
        "costs geometry monoids algorithms memory dispatch",
        "axes",
        "models parallel",
        "tasks",
        "claims bench transfer integrations",
        "cli",
        "__main__",
    )
)
# Within a room: the modules that stand in an order, lowest first. A module may import those on its left.
ROOMS: dict[str, tuple[str, ...]] = {
    "linalg": (
        "solve", "accumulate", "symmetric", "formulas", "newton_schulz", "matrix_roots", "blockwise", "sinkhorn",
        "krylov", "polynomials",
    ),
    "core": (
        "declared", "facts", "rates", "costs", "geometry", "monoids", "algorithms", "memory", "parts", "legality",
        "execution",
        "state_update", "reference", "derived", "chain",
    ),
    "routes": (
        "choice", "given", "counts", "packed", "parameters", "precision", "scaled", "serial", "one_state", "by_rows",
        "scan", "states", "each", "passes", "spans", "finite", "cells", "matrix_cells", "substitution", "gram",
        "cascade", "solves", "attention", "levels", "recomputed", "opaque", "recurrent",
        "kernel_terms", "levels_kernel", "substitution_kernel", "network_kernel", "token_threads", "token", "early",
        "several", "turned", "select", "dispatch", "frame",
    ),
    "testing": ("strategies", "examples", "declarations", "gauges", "mutations", "checks", "suite"),
    "optim": ("engine", "rules", "tools"),
}  # fmt: skip
# Beyond the declared dependencies: what comes with torch on a GPU or with an extra, and who may import it.
OPTIONAL = {
    "triton": {"kernels"},
    "hypothesis": {"testing.strategies"},
    "transformers": {"integrations.transformers"},
    "tokenizers": {"integrations.transformers", "tasks.tokens"},
    "datasets": {"tasks.tokens"},
    "wandb": {"tasks.trackers"},
}


def place(dotted: str) -> tuple[str, str]:
    """(room, module within it) of a dotted name without the leading `axes.`."""
    room, _, inner = dotted.partition(".")
    return room, inner.partition(".")[0]


def may_import(importer: str, imported: str) -> bool:
    (above, module), (below, target) = place(importer), place(imported)
    if above != below:
        depth = {name: row for row, names in enumerate(LAYERS) for name in names}
        return depth[below] < depth[above]
    order = ROOMS.get(above, ())
    if module == target or module not in order or target not in order:
        return above not in ROOMS or module == target or above == "optim"
    return order.index(target) < order.index(module)


def declared_dependencies() -> set[str]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].replace("-", "_") for requirement in declared}


def sources() -> Iterator[tuple[Path, str]]:
    """Every file of the package once, with its dotted name below `axes`; `axes` for the root itself."""
    families = ("optim", "sequence", "depth")
    for top in ("axes", *families):
        for path in sorted((ROOT / top).rglob("*.py")):
            inside = path.relative_to(ROOT / "axes" if top == "axes" else ROOT)
            if top == "axes" and inside.parts[0] in families:
                continue  # links: read below, under their real path
            yield path, ".".join(part for part in inside.with_suffix("").parts if part != "__init__") or "axes"


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import statement, wherever it stands: lazy and type-only ones count."""
    known = {name for row in LAYERS for name in row}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module == "axes":
                # `from axes import optim` names a room, `from axes import StateUpdate` needs the root itself
                for alias in node.names:
                    yield node.lineno, f"axes.{alias.name}" if alias.name in known else "axes"
            elif (node.module or "").removeprefix("axes.") in ROOMS:
                for alias in node.names:  # `from axes.core import reference` names a module of the room
                    yield node.lineno, f"{node.module}.{alias.name}"
            else:
                yield node.lineno, node.module or ""


def violations(importer: str, source: str) -> list[str]:
    """What a module of the table must not import, in words."""
    known = {name for row in LAYERS for name in row}
    room, module = place(importer)
    if room not in known or module and room in ROOMS and room != "optim" and module not in ROOMS[room]:
        return [f"{importer} has no place among the layers: put it in LAYERS or ROOMS, below what imports it"]
    found = []
    for line, dotted in imported_modules(ast.parse(source)):
        head, _, target = dotted.partition(".")
        target = target or "axes"
        if dotted.startswith("."):
            found.append(f"line {line}: relative import; write `from axes.... import ...`")
        elif head == "axes":
            if place(target)[0] not in known:
                found.append(f"line {line}: axes.{target} has no place among the layers: put it in LAYERS")
            elif target == importer == "axes":
                found.append(f"line {line}: the root imports itself")
            elif not may_import(importer, target):
                found.append(f"line {line}: {importer} may not import {dotted}: imports point downwards only")
        elif head in OPTIONAL:
            if not any(importer == name or importer.startswith(f"{name}.") for name in OPTIONAL[head]):
                found.append(f"line {line}: only {', '.join(OPTIONAL[head])} may import {head}")
        elif head not in sys.stdlib_module_names and head not in declared_dependencies():
            found.append(f"line {line}: {head} is not a dependency declared in pyproject.toml")
    return found


FILES = [(path.relative_to(ROOT).as_posix(), importer) for path, importer in sources()]


@pytest.mark.parametrize(("path", "importer"), FILES, ids=[path for path, _ in FILES])
def test_imports_point_downwards(path: str, importer: str) -> None:
    found = violations(importer, (ROOT / path).read_text())
    assert not found, f"{path}:\n  " + "\n  ".join(found)


def imports_between_rooms() -> set[tuple[str, str]]:
    modules = (
        (place(importer)[0], place(dotted.removeprefix("axes.") if dotted != "axes" else dotted)[0])
        for path, importer in FILES
        for _, dotted in imported_modules(ast.parse((ROOT / path).read_text()))
        if dotted.partition(".")[0] == "axes"
    )
    return {(above, below) for above, below in modules if above != below}


def test_the_architecture_page_shows_every_room_and_true_arrows() -> None:
    page, picture = ((ROOT / "docs" / name).read_text() for name in ("architecture.md", "architecture.svg"))
    assert "(architecture.svg)" in page
    for row in LAYERS:
        for name in row - {"__main__"}:
            door = (ROOT / "axes" / f"{name}.py").exists() and f"`axes.{name}`" in page
            assert door or f"`{name}`" in page and re.search(rf"[> ]{name}[<:]", picture), name
    arrows = set(re.findall(r'data-from="(\w+)" data-to="(\w+)"', picture))
    assert len(arrows) > 15 and arrows <= imports_between_rooms(), arrows - imports_between_rooms()


def test_every_name_has_one_place() -> None:
    names = [name for row in LAYERS for name in row]
    assert len(names) == len(set(names))
    for room, modules in ROOMS.items():
        folder = ROOT / room if room == "optim" else ROOT / "axes" / room
        found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert len(set(modules)) == len(modules) and set(modules) <= found, room


@pytest.mark.parametrize(
    ("importer", "statement", "complaint"),
    [
        ("core.costs", "from axes.core.state_update import StateUpdate", "downwards"),
        ("core.costs", "def f():\n    import axes.core.geometry", "downwards"),
        ("core.algorithms", "from axes.core.state_update import StateUpdate", "downwards"),
        ("core.algorithms", "if TYPE_CHECKING:\n    from axes.routes.dispatch import select", "downwards"),
        ("core.algorithms", "if TYPE_CHECKING:\n    from axes.core.state_update import StateUpdate", "downwards"),
        ("core.reference", "from axes.routes.scan import scan", "downwards"),
        ("core.reference", "from axes.routes import dispatch", "downwards"),
        ("core.state_update", "from axes.core.chain import chain", "downwards"),
        ("core.reference", "from axes import costs", "downwards"),
        ("core.geometry.norms", "from axes.core import monoids", "downwards"),
        ("linalg.solve", "from axes.linalg import symmetric", "downwards"),
        ("optim.rules.soap", "from axes.sequence.base import Layer", "downwards"),
        ("optim.engine.base", "from axes.optim.rules.soap import SOAP", "downwards"),
        ("depth.base", "from axes import optim", "downwards"),
        ("sequence.base", "from axes import StateUpdate", "downwards"),
        ("routes.dispatch", "import axes", "downwards"),
        ("axes", "from axes.cli import main", "downwards"),
        ("axes", "import axes", "itself"),
        ("catalogue", "from axes.models import lm", "downwards"),
        ("core.costs", "from .rates import Per", "relative"),
        ("core.costs", "from axes.newcomer import x", "no place"),
        ("newcomer", "", "no place"),
        ("core.newcomer", "", "no place"),
        ("sequence.base", "import einops", "not a dependency"),
        ("routes.scan", "import triton.language as tl", "only kernels"),
    ],
)
def test_a_planted_violation_is_found(importer: str, statement: str, complaint: str) -> None:
    found = violations(importer, statement)
    assert len(found) == 1 and complaint in found[0], found


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("core.geometry.norms", "import math\nimport torch\nfrom axes.core.rates import Per"),
        ("core.geometry.norms", "from axes.core.geometry.bregman import Geometry\nfrom axes.core.costs import Cost"),
        ("core.monoids", "from axes.core.geometry import Geometry"),
        ("optim.rules.soap", "from axes.optim.engine.base import Optimizer\nfrom axes.core import costs"),
        ("core.algorithms", "from axes.core.declared import Recurrence"),
        ("kernels.scalar.chain", "import triton"),
        ("catalogue", "from axes import depth, optim, sequence"),
        ("cli", "import typer\nfrom rich.table import Table\nimport axes"),
    ],
)
def test_legal_imports_pass(importer: str, statement: str) -> None:
    assert violations(importer, statement) == []
