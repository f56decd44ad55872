"""Faults planted one at a time in a copy of the tree, and whether the tests that run the line see them.

    python -m tests.mutants axes/core/derived.py axes/routes/scan.py --sample 20 --seed 0 --report docs/mutants

A fault is another comparison, constant, sign or operator, a condition turned round, a statement left out, or two
arguments exchanged. Which tests run a line is found by running the candidates of a file once, under a trace of that
file alone; a fault is then shown to those that run its line, the quickest first, until one fails. Everything happens in
processes forked from one that has imported torch. mutmut and cosmic-ray were looked at: the one leaves decorated
functions and dataclasses alone, which most of this package is, and the other runs all tests for every fault.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.planted import First, copied, forked, tests_of

MOST_TESTS = 40  # of those that run a line
# Which tests are tried for a file, by the beginning of its path: the longest that fits. Doctests of the file go first.
CANDIDATES: dict[str, str] = {
    "axes/core/algorithms.py": "axes/test_legality.py axes/test_state_update.py",
    "axes/core/chain.py": "axes/test_scan.py axes/test_derived.py sequence/test_delta.py",
    "axes/core/costs.py": "axes/test_costs.py",
    "axes/core/derived.py": "axes/test_derived.py axes/test_survivors.py axes/test_frame.py axes/test_substitution.py",
    "axes/core/execution.py": "axes/test_reference.py axes/test_state_update.py axes/test_maximum.py axes/test_held.py",
    "axes/core/facts.py": "axes/test_facts.py",
    "axes/core/geometry/norms.py": "axes/test_geometry.py",
    "axes/core/legality.py": "axes/test_legality.py",
    "axes/core/memory.py": "axes/test_memory.py axes/test_reference.py",
    "axes/core/monoids.py": "axes/test_monoids.py axes/test_survivors.py",
    "axes/core/rates.py": "axes/test_rates.py",
    "axes/core/reference.py": "axes/test_reference.py axes/test_state_update.py",
    "axes/routes/attention": "axes/test_attention.py sequence/test_attention.py",
    "axes/routes/finite.py": "axes/test_finite.py",
    "axes/routes/frame.py": "axes/test_frame.py sequence/test_linear.py",
    "axes/routes/gram.py": "sequence/test_lattice.py",
    "axes/routes/one_state.py": "axes/test_scan.py sequence/test_delta.py sequence/test_linear.py",
    "axes/routes/packed.py": "sequence/test_groups.py sequence/test_linear.py",
    "axes/routes/scan.py": "axes/test_scan.py sequence/test_titans.py sequence/test_longhorn.py",
    "axes/routes/select.py": "axes/test_what_runs.py axes/test_answers.py",
    "axes/routes/spans.py": "axes/test_substitution.py sequence/test_ttt.py sequence/test_lattice.py",
    "axes/routes/substitution.py": "axes/test_substitution.py",
    "axes/kernels/common/layout.py": "axes/test_kernels_scalar.py axes/test_launch.py",
    "axes/kernels/common/launch.py": "axes/test_launch.py axes/test_tritons.py",
    "axes/kernels/common/line.py": "axes/test_lines.py",
    "axes/kernels/common/repeated.py": "axes/test_lines.py axes/test_lines_depth.py",
    "axes/kernels/common/versions.py": "axes/test_versions.py axes/test_tritons.py",
    "optim/engine/arguments.py": "optim/test_bad_optimizer_input.py",
    "optim/engine/checkpoints.py": "optim/test_bad_optimizer_input.py optim/test_contract.py",
    "optim/engine/finite.py": "optim/test_finite.py",
    "optim/engine/forms.py": "optim/test_numbers.py",
    "optim/engine/layouts.py": "optim/test_routing.py",
    "optim/engine/requirements.py": "optim/test_bad_optimizer_input.py",
    "optim/rules/adaptive.py": "optim/test_adaptive.py optim/test_torchs_signatures.py",
    "optim/rules/shampoo.py": "optim/test_shampoo.py",
    "optim/rules/sign.py": "optim/test_sign.py",
    "depth/hyper_connections.py": "depth/test_equations.py depth/test_formulas.py axes/test_survivors.py",
    "depth/mhc.py": "depth/test_equations.py depth/test_formulas.py",
    "depth/products.py": "depth/test_products.py",
    "depth/deep_delta.py": "depth/test_equations.py depth/test_formulas.py",
    "depth/base.py": "depth/test_equations.py depth/test_modules.py",
    "depth/attention.py": "depth/test_equations.py depth/test_formulas.py depth/test_rows.py",
    "sequence/base.py": "axes/test_survivors.py sequence/test_groups.py sequence/test_delta.py",
    "sequence/blocks.py": "sequence/test_linear.py sequence/test_delta.py axes/test_survivors.py",
    "sequence/charts.py": "sequence/test_linear.py sequence/test_delta.py sequence/test_miras.py",
    "sequence/lattice.py": "sequence/test_lattice.py",
    "sequence/rwkv7.py": "sequence/test_rwkv7.py",
    "sequence/titans.py": "sequence/test_titans.py",
}
# Faults that change nothing anybody can tell, by file and what stood there: the reason.
EQUIVALENT: dict[tuple[str, str], str] = {}


_HEAD = """# Planted faults

Written by `python -m tests.mutants FILES --report docs/mutants`, which plants one fault at a time in a copy of the tree
and shows it to the tests that run its line; a file's faults are drawn by a seed. A line that no candidate test runs is
left out of the counts. Faults of GPU kernels stand in `tests/gpu/faults.py`, for a machine that has a GPU.

"""


class Fault(NamedTuple):
    file: str
    line: int
    kind: str
    was: str  # the source of the smallest part that changed
    now: str


class Found(NamedTuple):
    fault: Fault
    outcome: str  # seen, survived, slow (seen by the clock), not run
    by: str
    seconds: float


# ---- faults ----------------------------------------------------------------------------------------------------------

_COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every fault of one node, as what takes its place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        new = _COMPARED[type(node.ops[0])]()
        yield "comparison", ast.Compare(node.left, [new, *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "operator", ast.BoolOp(other, node.values)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield "operator", ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield "sign", node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", ast.Constant(node.value + 1 if node.value != 1 else 2)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", ast.Constant(not node.value)
    if isinstance(node, ast.IfExp):
        yield "condition", ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.If) and not _names_types(node.test):
        yield "condition", ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.Raise | ast.AugAssign) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped", ast.Pass()
    if isinstance(node, ast.Call) and len(node.args) > 1:
        first, second, *rest = node.args
        other = not isinstance(first, ast.Starred | ast.Constant) and not isinstance(second, ast.Starred)
        if other and ast.dump(first) != ast.dump(second) and ast.unparse(node.func) not in ("isinstance", "getattr"):
            yield "arguments", ast.Call(node.func, [second, first, *rest], node.keywords)


def _names_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _passive(node: ast.AST) -> bool:
    """What nobody executes, or only to make a sentence: annotations, docstrings, messages; and strict=True, which only
    raises where a call of this package is wrong already."""
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.arg | ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def faults(file: str, source: str) -> list[tuple[Fault, str]]:
    """Every fault of a file with the source that has it."""
    found: list[tuple[Fault, str]] = []
    lines = source.splitlines(keepends=True)
    starts = [0]
    for text in lines:
        starts.append(starts[-1] + len(text.encode()))
    data = source.encode()

    def visit(node: ast.AST) -> None:
        if _passive(node) or isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list):
            return
        if hasattr(node, "lineno"):
            assert isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.keyword)
            begin, end = (starts[a - 1] + b for a, b in (
                (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            ))  # fmt: skip
            for kind, other in _changed(node):
                was = data[begin:end].decode()
                now = ast.unparse(ast.fix_missing_locations(other))
                if isinstance(node, ast.If):  # the condition alone: bodies stay where they are
                    test = node.test
                    begin = starts[test.lineno - 1] + test.col_offset
                    end = starts[(test.end_lineno or 0) - 1] + (test.end_col_offset or 0)
                    was, now = data[begin:end].decode(), f"not ({data[begin:end].decode()})"
                elif isinstance(node, ast.expr):
                    now = f"({now})"
                fault = Fault(file, node.lineno, kind, " ".join(was.split())[:90], " ".join(now.split())[:90])
                found.append((fault, (data[:begin] + now.encode() + data[end:]).decode()))
        annotations = [getattr(node, n, None) for n in ("returns", "annotation")]
        for child in ast.iter_child_nodes(node):
            if not any(child is a for a in annotations):
                visit(child)

    visit(ast.parse(source))
    return found


# ---- tests -----------------------------------------------------------------------------------------------------------


class _Traced:
    """A pytest plugin: which lines of one file every test runs, and how long it takes."""

    def __init__(self, file: Path) -> None:
        self.file, self.lines, self.seconds = str(file.resolve()), defaultdict(set), {}
        self.now = ""
        self._known: dict[str, bool] = {}

    def _is_it(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = os.path.realpath(name) == self.file
        return self._known[name]

    def _call(self, frame: Any, event: str, argument: Any) -> Callable[..., Any] | None:
        if not self._is_it(frame.f_code.co_filename):
            return None
        self.lines[frame.f_lineno].add(self.now)
        return self._line

    def _line(self, frame: Any, event: str, argument: Any) -> Callable[..., Any]:
        self.lines[frame.f_lineno].add(self.now)
        return self._line

    def pytest_sessionstart(self) -> None:
        sys.settrace(self._call)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.now = nodeid
        sys.settrace(self._call)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed and "::" not in report.nodeid.partition("[")[2]:
            self.seconds[report.nodeid] = report.duration  # a name with colons cannot be asked for again

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)


def covering(tree: Path, file: str, seconds: float) -> tuple[dict[int, set[str]], dict[str, float]]:
    """By line, the tests that run it; and by test, how long it takes. Lines that run at import are run by all."""
    candidates = CANDIDATES[max((p for p in CANDIDATES if file.startswith(p)), key=len)].split()

    def work() -> Any:
        plugin = _Traced(tree / file)
        tests_of(tree, [f"tests/{c}" for c in candidates], plugin, "-m", "not slow")
        return dict(plugin.lines), plugin.seconds

    made = forked(work, seconds)
    if not isinstance(made, tuple):
        raise SystemExit(f"the tests of {file} took longer than {seconds:.0f} s, or ended their process: {candidates}")
    lines, times = made
    return {n: set(times) if "" in tests else tests & set(times) for n, tests in lines.items()}, times


def shown(tree: Path, fault: Fault, source: str, tests: list[str], seconds: float) -> Found:
    """A fault, and the first of these tests that sees it."""
    path, begun = tree / fault.file, time.monotonic()
    before = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")

    def work() -> str:
        plugin = First()
        status = tests_of(tree, tests, plugin, "-x", "-m", "not slow")
        return plugin.name or ("" if status in (0, 1) else f"pytest ended with {status}")

    try:
        by = forked(work, seconds)
    finally:
        path.write_text(before, encoding="utf-8")
    took = time.monotonic() - begun
    if by in ("pytest ended with 4", "pytest ended with 5"):
        raise SystemExit(f"{by}, it finds none or not all of {tests}")
    if by is None:
        return Found(fault, "slow", f"longer than {seconds:.0f} s", took)
    return Found(fault, "seen" if by else "survived", by, took)


# ---- a run -----------------------------------------------------------------------------------------------------------


def run(files: list[str], sample: int, seed: int, seconds: float) -> list[Found]:
    """`sample` faults of every file, drawn by a seed, whose lines tests run; and those between, whose lines none do."""
    found: list[Found] = []
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import scipy.linalg  # noqa: F401
    import torch._dynamo  # noqa: F401

    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        for file in files:
            lines, times = covering(tree, file, 10 * seconds)
            every = faults(file, (tree / file).read_text(encoding="utf-8"))
            random.Random(f"{seed} {file}").shuffle(every)
            taken = 0
            for fault, source in every:
                if taken == sample:
                    break
                tests = sorted(lines.get(fault.line, ()), key=times.__getitem__)[:MOST_TESTS]
                if tests:
                    found.append(shown(tree, fault, source, tests, seconds + 3 * sum(times[t] for t in tests)))
                    taken += 1
                else:
                    found.append(Found(fault, "not run", "", 0.0))
                print(f"{file}:{fault.line} {found[-1].outcome}: {fault.was} -> {fault.now}", flush=True)
    return found


def report(found: list[Found]) -> str:
    """Markdown: counts by file, then every fault that nobody saw, with the reason where there is one."""
    shown_ = [f for f in found if f.outcome != "not run"]
    reasons = {f: EQUIVALENT.get((f.fault.file, f.fault.was)) for f in shown_ if f.outcome == "survived"}
    same = sum(reason is not None for reason in reasons.values())
    seen = sum(f.outcome in ("seen", "slow") for f in shown_)
    out = ["| file | shown | seen | equivalent | survived |", "| --- | --- | --- | --- | --- |"]
    for file in dict.fromkeys(f.fault.file for f in shown_):
        rows = [f for f in shown_ if f.fault.file == file]
        lost = [f for f in rows if f.outcome == "survived"]
        alike = sum(reasons[f] is not None for f in lost)
        out.append(f"| `{file}` | {len(rows)} | {len(rows) - len(lost)} | {alike} | {len(lost) - alike} |")
    rate = seen / max(1, len(shown_) - same)
    out.append(f"| all | {len(shown_)} | {seen} | {same} | {len(reasons) - same} |")
    out.append(f"\n{rate:.1%} of the faults that change anything were seen.\n")
    if reasons:
        out += ["| survived | was | became | why |", "| --- | --- | --- | --- |"]
    for f, reason in reasons.items():
        was, now = (x.replace("|", "\\|") for x in (f.fault.was, f.fault.now))
        out.append(f"| `{f.fault.file}:{f.fault.line}` {f.fault.kind} | `{was}` | `{now}` | {reason or '**open**'} |")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--sample", type=int, default=10, help="faults of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30, help="beyond three times what the tests take")
    parser.add_argument("--report", type=Path, help="NAME.json and NAME.md, which keep what other files had")
    given = parser.parse_args()
    found = run(given.files, given.sample, given.seed, given.seconds)
    if given.report:
        kept = given.report.with_suffix(".json")
        before = json.loads(kept.read_text()) if kept.exists() else []
        rows = [row for row in before if row["file"] not in given.files]
        rows += [{**f.fault._asdict(), "outcome": f.outcome, "by": f.by, "seconds": round(f.seconds, 1)} for f in found]
        kept.write_text(json.dumps(rows, indent=1) + "\n")
        found = [Found(Fault(*(r[n] for n in Fault._fields)), r["outcome"], r["by"], r["seconds"]) for r in rows]
        given.report.with_suffix(".md").write_text(_HEAD + report(found))
    print(report(found))


if __name__ == "__main__":
    main()
