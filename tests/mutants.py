"""Faults planted one at a time in a copy of the tree, and whether the tests that run the line see them.

    python -m tests.mutants optim/rules sequence --sample 4 --seed 0 --minutes 30 --report docs/mutants

A fault is another comparison, constant, sign or operator, a condition turned round, a statement left out, or two
arguments exchanged. A process collects the tests of a part of the tree once; which lines they run is found by a trace
of its files, one case of every test before a second one of any, until its budget is spent. For a fault that process is
forked, the functions that changed get their new code, what they have kept is forgotten, and the quickest tests that run
the line are run: a fault costs its tests alone. What these miss is shown to all that run the line, and then to tests
near the file that the trace had no time for; what is not in a function, to a process that imports the changed file.
Files that the report has are passed over; --merge puts samples of other seeds beside it. mutmut and cosmic-ray
were looked at: the one leaves decorated functions and dataclasses alone, which most of this package is, and the other
runs all tests for every fault.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from tests.alive import everything
from tests.planted import ROOT, First, Raised, copied, forked, tests_of

_FEW, _SECONDS = 25, 8.0  # tests that a fault is shown to first, and what they take together
_MANY, _LONG = 150, 60.0  # before it has survived
_VARIANTS = 3  # of one test among the few
_NEAR = 60.0  # seconds of tests that are near a file, whose lines the trace had no time for
# Tests of a part of the tree, by the beginning of a file's path: the longest that fits.
_CALLS = "axes/test_survivors*.py axes/test_doors.py axes/test_bad_input.py"
_CORE = "axes/test_[a-eghm-z]*.py axes/test_f[air]*.py axes/test_leg*.py axes/test_lift*.py axes/test_kernel_*.py"
TESTS: dict[str, str] = {
    "axes/core": f"{_CORE} sequence/test_[adglmrt]*.py optim/test_[ns]*.py",
    "axes/routes": f"{_CORE} sequence/test_[adglmrt]*.py",
    "axes/kernels": "axes/test_kernels_*.py axes/test_kernel_*.py axes/test_host.py axes/test_operators.py",
    "axes/kernels/common": (
        "axes/test_la*.py axes/test_line*.py axes/test_tritons.py axes/test_versions.py axes/test_ahead.py "
        "axes/test_kernel_doors.py axes/test_kernels_[bns]*.py"
    ),
    "optim": f"{_CALLS} optim/test_*.py",
    "depth": f"{_CALLS} depth/test_*.py axes/test_lines_depth.py",
    "sequence": f"{_CALLS} sequence/test_*.py axes/test_elementwise.py",
}
_NOT = (
    "claims", "cli", "bench", "demo", "docs", "packaging", "readme", "training", "run_folder", "train_together",
    "mutants", "kernels_", "tasks", "compiled", "suite", "language_model", "corpus", "small", "sharded", "what_runs",
)  # fmt: skip
# Faults that change nothing anybody can tell, by file and what stood there: the reason. Where a constant stands in many
# lines, (part of its line, reason).
_SMALLEST = "Fused(smallest, {PARAMETER: [one]}, {}, {}, counts).step([torch.zeros_like(one)], {})"
EQUIVALENT: dict[tuple[str, str], str | tuple[str, str]] = {
    ("optim/engine/interpreted.py", "state is not None and out is not None"): "both are there or neither is",
    ("optim/engine/statistics.py", "len(states) > 1"): "one tensor joined with none is itself",
    ("optim/engine/states.py", 'how(group) == "host"'): "on a CPU a parameter is where counts are; a GPU tells",
    ("optim/engine/finite.py", "len({(x.device, x.dtype) for x in numbers}) > 1"): (
        "numbers of one device in float32 are what they are moved to; a second GPU tells"
    ),
    ("optim/engine/generated.py", _SMALLEST): "without a GPU the kernel is refused before; a GPU tells",
    (
        "optim/engine/lists.py",
        "COUNT not in found.inputs and all(fits_kernels(x) for xs in tensors.values() for x in xs)",
    ): "without a GPU there is no kernel that it could fit; a GPU tells",
    ("axes/routes/one_state.py", "800.0"): "exp of either is zero",
    ("axes/routes/passes.py", "isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)"): (
        "an assertion for type checkers: same bits, and the door refuses q, k or v that is no tensor (tried)"
    ),
    ("axes/routes/attention/softmax.py", "length > _BLOCK and torch.is_grad_enabled()"): (
        "what is computed again in the backward pass, or kept: same bits of outputs and gradients (63 tensors compared)"
    ),
    ("axes/routes/attention/softmax.py", "-2"): (
        "pairs = keys.shape[:-2]",
        "whether pairs of a group of queries are copied for each: same bits (63 tensors compared)",
    ),
    ("axes/routes/attention/transported.py", "-1"): (
        "2 * size < q.shape[-1]",
        "which of two products comes first where keys are carried on: same bits (16 tensors compared)",
    ),
    ("axes/routes/one_state.py", "False"): (
        "def between(self, before: bool = False)",
        "without gates the products before a token and up to it are both one",
    ),
    ("axes/routes/token.py", "pytree.tree_unflatten(before, spec)"): "torch takes the two in either order",
    ("axes/core/execution.py", "x.ndim == 0 or x.shape == y.shape"): (
        "a drive that is the whole state is handed on instead of added to zero: the same to a rounding (tried)"
    ),
    ("axes/routes/packed.py", "len(offsets) - 1"): "a list that is longer than what is read of it",
    ("axes/routes/counts.py", "0"): (
        "return [0] * sequences",
        "sequences that stand alike, whatever the number is called",
    ),
    ("axes/core/legality.py", 'gates(p.monoid) <= {"identity", "zero", "scalar"}'): "no monoid has all three gates",
    ("axes/core/geometry/spectral.py", "floor > 0"): "a root is not below zero, and clamped there it is itself",
    ("axes/core/geometry/spectral.py", "self.power < 0"): "a power of zero is refused where the part is made",
    ("optim/rules/soap.py", "1.0"): (
        "debias=True",
        "a debiased average does not know the scale of its weights: same bits (tried)",
    ),
    ("optim/rules/ekfac.py", "1.0"): (
        "at=Held(refresh)",
        "eigenvectors of a factor do not know its scale: same bits (tried)",
    ),
    ("optim/rules/exponentiated.py", "True"): (
        '"simplex": True',
        "every group says itself which side of the simplex it is on (tried)",
    ),
    ("axes/kernels/common/launch.py", "x is None or type(x) is int"): "what is neither reaches the same end as itself",
    ("axes/kernels/blocks/enter.py", "16"): (
        "while length > 16",
        "of powers of two those above 16 are those above 17",
    ),
    ("axes/kernels/substitution/chain.py", "0"): (
        "k.new_empty(units if",
        "a room that nobody reads",
    ),
    ("optim/engine/generated.py", "1"): (
        "torch.zeros(1, device=device)",
        "a kernel on two entries runs where one on one does; without a GPU neither",
    ),
    ("axes/kernels/streams/cayley.py", "_ENTRIES // side**2"): "how many matrices a program takes: the same numbers",
    ("axes/kernels/streams/cayley.py", "2"): (
        "_ENTRIES // side**2",
        "how many matrices a program takes: the same numbers",
    ),
    ("axes/kernels/streams/mix.py", "1"): (
        "_PROGRAMS // max(1, others)",
        "how programs share tiles: the same numbers",
    ),
    ("axes/kernels/streams/look.py", "64 if x.dtype == torch.bfloat16 else 32"): "stages of a pipeline: a GPU's speed",
    ("axes/routes/dispatch.py", "1"): (
        "implementation or chosen(), 1)",
        "where time stands says whether a kernel takes a call; a GPU tells",
    ),
    ("axes/kernels/rows/mass.py", "1"): ("max(1, _NUMBERS // wide)", "how many rows a program takes: the same numbers"),
    ("axes/kernels/block/chain.py", "q.new_empty(cut.slots, hv, c, c)"): (
        "as many numbers, found by their place and not by the shape"
    ),
    ("axes/kernels/blocks/leave.py", "-2"): (
        "y.shape[-2] * y.shape[-1]",
        "of four dimensions the third is the last but one",
    ),
    ("axes/kernels/blocks/plan.py", "0"): (
        "for key in parts if key[0]",
        "which streams a program takes: the same numbers",
    ),
    ("axes/kernels/blocks/plan.py", "0.0"): ("plain = [s._replace(", "a key that is compared with keys made alike"),
    ("axes/kernels/scalar/sizes.py", "2"): ("stages = min(stages, 2)", "stages of a launch: a GPU's room and speed"),
    ("axes/kernels/scalar/sizes.py", "64"): (
        'form != "pieces" or keys < 64',
        "blocks, warps and stages of a launch: a GPU's speed",
    ),
    ("axes/kernels/diagonal/chain.py", "beta is None"): (
        "plain = plain and beta is None",
        "without a GPU no kernel is Hopper's; a GPU tells (tests/gpu/test_diagonal.py)",
    ),
    ("axes/kernels/scalar/hopper_write.py", "0"): (
        "0 in q.shape",
        "empty tensors never come here, and one of size 1 takes the portable kernel: a GPU's speed",
    ),
    (
        "axes/kernels/blocks/enter.py",
        "torch.is_grad_enabled() and any(x.requires_grad for x in (p, *parameters, *tails))",
    ): "what a backward would read is kept though nobody asks for one: the same numbers",
    ("axes/core/chain.py", "isinstance(k, Tensor) and isinstance(v, Tensor)"): "an assertion for type checkers",
    ("axes/core/geometry/norms.py", "1.0"): (
        "inverse = torch.where(total > 0, total, 1.0)",
        "the powers of a zero leaf are zero, whatever they are multiplied with",
    ),
    ("axes/core/geometry/spectral.py", "1.0"): (
        "top = torch.where(s[..., :1] > 0",
        "of a zero matrix nothing is kept, whatever it is divided by",
    ),
    ("axes/routes/by_rows.py", "1"): (
        "size = 1 << max",
        "how many tokens a chunk has: the same numbers to a rounding",
    ),
    ("axes/routes/one_state.py", "1"): (
        "size = _CHUNK if c.gate is None",
        "how many tokens a chunk has: the same numbers to a rounding",
    ),
    ("axes/routes/levels.py", "c.gate.shape[-1] > 1"): "how many tokens a chunk has: the same numbers to a rounding",
    ("axes/routes/cascade.py", "_keeps(update, state, parts, q) > KEPT and live(signal, state, q)"): (
        "what is computed again in the backward pass, or kept: the same numbers"
    ),
    ("axes/routes/choice.py", "(device.index or 0) < torch.cuda.device_count()"): "nobody asks it without a GPU",
    ("axes/routes/kernel_terms.py",
     "held.shape[2 - x.ndim :] == x.shape[2:] and held.numel() == x[0, 0].numel()"): (
        "what was expanded along two dimensions and has as many numbers has the shape but for ones"
    ),
    ("axes/routes/serial.py", "0"): ("beta=0, alpha=-1", "zero is added, times nothing or once"),
    ("axes/routes/states.py", "now.addcmul_(a, before)"): "a product does not know an order",
    ("axes/routes/substitution_kernel.py", "no_substitution(update) is None"): "without a GPU nothing is made ahead",
    ("depth/products.py", "1"): ("size = max(1, _NUMBERS", "how many rows a piece has: the same numbers"),
    ("optim/engine/capabilities.py", 'gates(monoid) <= {"identity", "zero", "scalar", "hadamard"}'): (
        "no monoid has all four gates"
    ),
    ("optim/rules/natural_gradient.py", "today or self._today(group)"): (
        "all but shards are stepped with the day's numbers, and it refuses shards"
    ),
    ("optim/rules/shampoo.py", "0"): (
        "if betas[0] > 0.0",
        "an average that keeps nothing has the normal form of none",
    ),
    ("optim/tools/convert.py", "1"): ("torch.zeros(1, 1, requires_grad", "defaults do not know a shape"),
    ("axes/kernels/blocks/products.py", "_FEW * x.shape[-1]"): (
        "whether few tokens meet the weights apart or together: the same numbers to a rounding"
    ),
    ("axes/kernels/blocks/enter.py", "torch.compiler.is_compiling() or type(p) is not Tensor"): (
        "which of two doors to one function: the same numbers; a compiler on a GPU tells (tests/gpu/test_blocks.py)"
    ),
    ("axes/kernels/common/line.py", "2"): (
        "lines[0][2:] =",
        "the stream is asked for twice: the same launches",
    ),
    ("axes/kernels/common/versions.py", "0"): (
        "_line(version) > _LINES[0]",
        "between two neighbouring versions there is none",
    ),
    ("axes/kernels/network/chain.py", "0"): ("w1.new_empty(0)", "a tensor that nobody reads"),
    ("axes/kernels/scalar/hopper.py", "b * segments"): (
        "_prepare[(b * segments",
        "Gluon has no interpreter; a GPU tells (tests/gpu/test_hopper_forward.py)",
    ),
    ("axes/kernels/scalar/hopper.py", "64"): (
        "rows = 64 * q.shape[1]",
        "Gluon has no interpreter; a GPU tells (tests/gpu/test_hopper_two.py)",
    ),
    ("axes/kernels/scalar/hopper.py", "start is not None"): (
        "STARTED=start is not None, RECORD=record, TWO=two",
        "Gluon has no interpreter; a GPU tells (tests/gpu/test_hopper_forward.py)",
    ),
    ("axes/kernels/scalar/launches.py", "8"): ("num_warps=8 if matrix and whole", "warps of a launch: a GPU's speed"),
    ("axes/kernels/streams/look.py", '"project, widest" if shape.side > 64'): (
        "tiles and stages of a launch: a GPU's speed"
    ),
    ("sequence/by_hand.py", "torch.mul(d, own, out=dx[:, first:end])"): "a product does not know an order",
}


# Faults that nobody saw once; tests/axes/test_survivors.py has a test for each.
NAMED: tuple[tuple[str, str, str], ...] = (
    ("axes/core/derived.py", 'if memory.kind != "slots":', 'if memory.kind == "list":'),
    ("axes/core/geometry/spectral.py", "root = root + eps if eps > 0 else root", "root = root"),
    ("axes/core/geometry/spectral.py", "** power, 0.0) + eps", "** power, 0.0)"),
    ("axes/core/geometry/wrappers.py", "return (*self.base.rates(), self.rate)", "return self.base.rates()"),
    ("optim/engine/checkpoints.py", "missing = sorted(set(group) - set(saved)", "missing = sorted(set() - set(saved)"),
    ("axes/state_dicts.py", "* bool(unknown) + [f\"no {', '.join(missing)}\"] * bool(missing)", "* bool(unknown)"),
    ("depth/static.py", "self.per_token,\n            learned_reduce=learned_reduce", "self.per_token"),
    ("sequence/base.py", "(d_k is None or d_v is None)", "(d_k is None and d_v is None)"),
    ("depth/hyper_connections.py", "self.scale.fill_(0.01)", "self.scale.fill_(0.1)"),
    ("sequence/blocks.py", "bound = self.width**-0.5", "bound = 1.0 / self.width"),
)


_HEAD = """# Planted faults

Written by `python -m tests.mutants FILES --report docs/mutants`, which plants one fault at a time in a copy of the tree
and shows it to tests that run its line; a file's faults are drawn by a seed. A line that no test of the part runs
within the budget is left out of the counts; an open one was shown to those of its tests that a trace had time for, and
to tests near its file: those that saw other faults of it, and those that say its names. Samples of several seeds stand
beside each other (`--merge`), as of today's tree.
Nine in what launches kernels were planted by hand and shown to tests that start Triton's interpreter in a process of
its own, which sees nothing of a fault in the process of its test. Faults of GPU kernels stand in `tests/gpu/faults.py`,
for a machine that has a GPU.

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
        called = ast.unparse(node.func)
        other = other and called not in ("isinstance", "getattr", *_SYMMETRIC)
        if other and ast.dump(first) != ast.dump(second):
            yield "arguments", ast.Call(node.func, [second, first, *rest], node.keywords)


# of two arguments that may be exchanged
_SYMMETRIC = ("torch.mul", "torch.add", "torch.equal", "torch.maximum", "torch.minimum", "max", "min",
              "torch.logaddexp", "torch.promote_types", "torch.broadcast_shapes", "torch.allclose")  # fmt: skip


def _names_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _elsewhere(node: ast.FunctionDef) -> bool:
    """Nobody calls it, or a GPU does (tests/gpu/faults.py)."""
    names = [ast.unparse(x) for x in node.decorator_list]
    return "overload" in names or any("triton.jit" in n or "gluon.jit" in n for n in names)


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
        if _passive(node) or isinstance(node, ast.FunctionDef) and _elsewhere(node):
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


_faults = functools.lru_cache(maxsize=4)(faults)


# ---- tests -----------------------------------------------------------------------------------------------------------


def tests_for(file: str) -> tuple[str, ...]:
    """The test files of the part of the tree that a file is in."""
    globs = TESTS[max((p for p in TESTS if file.startswith(p)), key=len)].split()
    found = sorted({p for g in globs for p in (ROOT / "tests").glob(g)})
    left = tuple(n for n in _NOT if not any(f"test_{n}" in g for g in globs))
    return tuple(str(p.relative_to(ROOT)) for p in found if not p.stem.removeprefix("test_").startswith(left))


Lines = dict[str, dict[int, set[str]]]  # by file and line, the tests that run it


class _Probes(ast.NodeTransformer):
    """A call before every statement of functions, with its lines, or those of its head if it has a body."""

    def __init__(self) -> None:
        self.lines: list[range] = []
        self._inside = 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.FunctionDef) and _elsewhere(node):
            return node
        outside = self._inside
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self._inside = isinstance(node, ast.FunctionDef)
        self.generic_visit(node)
        if self._inside:
            for name in ("body", "orelse", "finalbody"):
                some = getattr(node, name, None)
                if isinstance(some, list):
                    setattr(node, name, [y for x in some for y in (self._probe(x), x)])
        self._inside = outside
        return node

    def _probe(self, x: ast.stmt) -> ast.stmt:
        heads = [y.lineno for n in ("body", "cases") for y in getattr(x, n, ())[:1] if hasattr(y, "lineno")]
        end = min([(x.end_lineno or x.lineno) + 1, *(max(h, x.lineno + 1) for h in heads)])
        self.lines.append(range(x.lineno, end))
        called = ast.Call(ast.Name("_hit_", ast.Load()), [ast.Constant(len(self.lines) - 1)], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(called), x))


def _probed(path: Path, hit: Callable[[int], None]) -> list[range] | None:
    """Let the functions of an imported file say which of their statements run; the lines of every statement."""
    probes, source = _Probes(), path.read_text(encoding="utf-8")
    if not patch(Changed(str(path), source, probes.visit(ast.parse(source)))):
        return None
    for module in _modules(path):
        vars(module)["_hit_"] = hit
    return probes.lines


def _modules(path: str | Path) -> list[ModuleType]:
    """Those that have been imported from a file."""
    files = [(module, getattr(module, "__file__", None)) for module in list(sys.modules.values())]
    return [module for module, file in files if file and os.path.realpath(file) == os.path.realpath(path)]


class _Traced:
    """A pytest plugin: which lines of some files every test runs, and how long it takes. The files' functions say so
    themselves, so that nothing else is slower than without; those of kernels in Triton's interpreter, which has a
    process of its own, write it down (`told`)."""

    def __init__(self, tree: Path, files: Sequence[str]) -> None:
        self.lines: Lines = {f: defaultdict(set) for f in files}
        self.seconds: dict[str, float] = {}
        self._hits: list[tuple[str, list[range], set[int]]] = []
        for file in files:
            hits = set[int]()
            if (lines := _probed(tree / file, hits.add)) is not None:
                self._hits.append((file, lines, hits))
        kernels = [f for f in files if f.startswith("axes/kernels")]
        self._told = tree / "told.txt"
        if kernels:
            os.environ["INTERPRETER_FIRST"] = (
                f"from tests.mutants import told; told({str(tree)!r}, {kernels!r}, {str(self._told)!r})"
            )

    def begin(self) -> None:
        self._told.write_text("")
        for _, _, hits in self._hits:
            hits.clear()

    def end(self, test: str) -> None:
        for file, lines, hits in self._hits:
            for n in hits:
                for line in lines[n]:
                    self.lines[file][line].add(test)
        for row in self._told.read_text().splitlines():
            file, begin, end = row.split()
            for line in range(int(begin), int(end)):
                self.lines[file][line].add(test)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration


def told(tree: str, files: Sequence[str], said: str) -> None:
    """Let a process and its forks write down which lines of files they run."""
    to = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for file in files:
        try:
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
        except Exception:  # Gluon has no interpreter
            continue
        known: set[int] = set()
        lines: list[range] = []

        def hit(n: int, file: str = file, known: set[int] = known, lines: list[range] = lines) -> None:
            if n not in known and lines:
                known.add(n)
                os.write(to, f"{file} {lines[n].start} {lines[n].stop}\n".encode())

        lines += _probed(Path(tree) / file, hit) or []


class Changed(NamedTuple):
    """A file before and after a fault, in a tree."""

    path: str
    before: str
    after: str | ast.Module


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield old, new
    mine, other = ([c for c in x.co_consts if isinstance(c, CodeType)] for x in (old, new))
    if len(mine) == len(other):
        for a, b in zip(mine, other, strict=True):
            yield from _pairs(a, b)


def _itself(code: CodeType) -> tuple[Any, ...]:
    """What a code object is without those inside it."""
    constants = tuple((type(c), c) for c in code.co_consts if not isinstance(c, CodeType))
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, repr(constants)


_Cached = type(functools.cache(len))
_OPTIMIZED = 1  # the flag of a function's code, which modules and bodies of classes have not


def patch(changed: Changed) -> bool:
    """Give the functions of an imported file the code that a fault makes of them, and forget what has been kept; False
    where something else than functions changed."""
    old, new = (compile(x, changed.path, "exec", dont_inherit=True) for x in (changed.before, changed.after))
    pairs = list(_pairs(old, new))
    moved = [(a, b) for a, b in pairs if _itself(a) != _itself(b)]
    if not moved or any(not a.co_flags & _OPTIMIZED or len(a.co_freevars) != len(b.co_freevars) for a, b in moved):
        return False
    codes = {(a.co_qualname, a.co_firstlineno): b for a, b in pairs if a.co_flags & _OPTIMIZED}
    found, path = 0, os.path.realpath(changed.path)
    same: dict[str, bool] = {}
    updates = getattr(sys.modules.get("axes.core.state_update"), "StateUpdate", ())
    for x in everything():
        kind = type(x)
        if kind is FunctionType:
            name = x.__code__.co_filename
            if name not in same:
                same[name] = os.path.realpath(name) == path
            if same[name] and (x.__code__.co_qualname, x.__code__.co_firstlineno) in codes:
                x.__code__ = codes[x.__code__.co_qualname, x.__code__.co_firstlineno]
                found += 1
        elif kind is _Cached:
            if str(x.__module__).startswith("axes"):
                x.cache_clear()
        elif updates and issubclass(kind, updates):
            for name in [n for n in vars(x) if n.startswith("_axes_")]:
                object.__delattr__(x, name)
    return found > 0


class _Served:
    """A pytest plugin that, in the place of running the tests, answers what is asked through a pipe."""

    def __init__(self, asked: Connection) -> None:
        self.asked, self.first = asked, First()

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        session.config.pluginmanager.register(self.first)
        self.asked.send(list(self.items))
        while (question := self.asked.recv()) is not None:
            what, seconds, *given = question
            self.asked.send(forked(lambda: getattr(self, what)(session, *given), seconds))  # noqa: B023 (called at once)
        return True

    def lines(self, session: Any, tree: Path, files: Sequence[str], budget: float) -> tuple[Lines, dict[str, float]]:
        turns: dict[str, list[Any]] = defaultdict(list)
        for item in self.items.values():
            turns[item.nodeid.partition("[")[0]].append(item)
        plugin, rounds = _Traced(tree, files), max(map(len, turns.values()), default=0)
        session.config.pluginmanager.register(plugin)
        tests = list(turns.values())
        random.Random(0).shuffle(tests)
        begun = time.monotonic()
        order = [some[n] for n in range(rounds) for some in tests if n < len(some)]
        for item in order:
            if time.monotonic() - begun > budget:
                break
            plugin.begin()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            plugin.end(item.nodeid)
        return {f: dict(lines) for f, lines in plugin.lines.items()}, plugin.seconds

    def show(
        self, session: Any, changed: Changed, tests: Sequence[str], seconds: float, patience: float
    ) -> str | None:
        """The first of the tests that fails; "*" where the change is in no function of what is imported already. What
        nobody has imported yet, tests and the processes that they start import as it stands there. No further test is
        begun after `patience`."""
        if not patch(changed) and _modules(changed.path):
            return "*"
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        items, end = [self.items[t] for t in tests], time.monotonic() + patience
        for item, following in zip_longest(items, items[1:]):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.first.name or time.monotonic() > end:
                break
        return self.first.name


class _Server:
    """A process that has collected tests; it starts as a fork of one that has imported torch and nothing of ours."""

    def __init__(self, tree: Path, tests: Sequence[str]) -> None:
        self._mine, theirs = multiprocessing.Pipe()
        self._child = os.fork()
        if self._child == 0:
            said = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os._exit(tests_of(tree, tests, _Served(theirs), "-m", "not slow"))
        theirs.close()
        self.tests: list[str] = self._mine.recv()

    def show(
        self, tree: Path, fault: Fault, source: str, tests: Sequence[str], seconds: float, patience: float = 1e9
    ) -> Any:
        """What `_Served.show` says of a fault, which stands in the file too, for processes that tests start."""
        path = tree / fault.file
        before = path.read_text(encoding="utf-8")
        path.write_text(source, encoding="utf-8")
        try:
            return self.ask("show", 10 * seconds, Changed(str(path), before, source), tests, seconds, patience)
        finally:
            path.write_text(before, encoding="utf-8")

    def ask(self, what: str, seconds: float, *given: Any) -> Any:
        self._mine.send((what, seconds, *given))
        return self._mine.recv()

    def close(self) -> None:
        self._mine.send(None)
        os.waitpid(self._child, 0)


def shown(tree: Path, fault: Fault, source: str, tests: Sequence[str], seconds: float) -> Found:
    """A fault, and the first of these tests that sees it, in a process that imports the changed file."""
    path, begun = tree / fault.file, time.monotonic()
    before = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")

    def work() -> str:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        plugin = First()
        status = tests_of(tree, tests, plugin, "-x", "-m", "not slow")
        return plugin.name or ("" if status in (0, 1) else f"pytest ended with {status}")

    try:
        by = forked(work, 10 * seconds)
    finally:
        path.write_text(before, encoding="utf-8")
    if by in ("pytest ended with 4", "pytest ended with 5"):
        raise SystemExit(f"{by}, it finds none or not all of {tests}")
    return _found(fault, by, begun)


def _found(fault: Fault, by: Any, begun: float) -> Found:
    took = time.monotonic() - begun
    if isinstance(by, Raised):
        raise SystemExit(f"{fault}: {by.text}")
    if by is None or by == "ended":
        return Found(fault, "slow", "ended, or out of time", took)
    return Found(fault, "seen" if by else "survived", by, took)


# ---- a run -----------------------------------------------------------------------------------------------------------


def _chosen(tests: set[str], times: dict[str, float], most: int, seconds: float, variants: int) -> list[str]:
    """The quickest, of each test no more than so many cases."""
    chosen: list[str] = []
    counts: dict[str, int] = defaultdict(int)
    for t in sorted(tests & times.keys(), key=lambda t: (times[t], t)):
        name = t.partition("[")[0]
        if counts[name] < variants and len(chosen) < most and (seconds > times[t] or not chosen):
            counts[name] += 1
            seconds -= times[t]
            chosen.append(t)
    return chosen


def near(tests: Sequence[str], file: str, text: str, seen: Sequence[str]) -> list[str]:
    """Tests that are about a file, the nearest first, one case of each before a second one of any: those that have seen
    other faults of it (`seen`), those of what it declares, and those in files where some have seen a fault.

    A trace is cut where its budget is spent, so that most tests of a large part are not in it."""
    words = [w for pair in re.findall(r'^class (\w+)|^ +name = "([^"]+)"', text, re.M) for w in pair if w]
    words = [Path(file).stem, *words]
    named = re.compile("|".join(rf"(?<![a-z]){re.escape(w)}(?![a-z])" for w in words), re.I)
    by, places = ({t.partition(mark)[0] for t in seen} for mark in ("[", "::"))
    turns: dict[tuple[int, int], list[str]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    shuffled = sorted(tests)
    random.Random(0).shuffle(shuffled)
    for t in shuffled:
        name, place = t.partition("[")[0], t.partition("::")[0]
        rank = 0 if name in by else 1 if named.search(t) else 2 if place in places else 3
        if rank < 3:
            turns[counts[name], rank].append(t)
            counts[name] += 1
    return [t for turn in sorted(turns) for t in turns[turn]]


def one(
    server: _Server, tree: Path, fault: Fault, source: str, tests: set[str], times: dict[str, float],
    others: Sequence[str] = (),
) -> Found:  # fmt: skip
    """A fault shown to few tests, then to many, and to others that are near but not traced; or, where it is in no
    function, to few in a process that imports it."""
    begun = time.monotonic()
    few = _chosen(tests, times, _FEW, _SECONDS, _VARIANTS)
    many = _chosen(tests, times, _MANY, _LONG, _MANY)
    for some in (few, many):
        by = server.show(tree, fault, source, some, 20 + 5 * sum(times[t] for t in some))
        if by != "":
            break
    if by == "" and (rest := [t for t in others if t not in times][: 2 * _MANY]):
        by = server.show(tree, fault, source, rest, 20 + 5 * _NEAR, _NEAR)
    if by != "*":
        return _found(fault, by, begun)
    nearest = sorted({t.partition("::")[0] for t in few}, key=lambda f: -sum(t.startswith(f) for t in few))[:3]
    asked = [t for t in few if t.startswith(tuple(nearest)) and "::" not in t.partition("[")[2]]  # no colons in names
    return shown(tree, fault, source, asked, 60 + 5 * sum(times[t] for t in asked))


def run(
    files: Sequence[str], sample: int, seed: int, budget: float, minutes: float, known: Callable[[list[Found]], None],
    seen: Mapping[str, Sequence[str]],
) -> None:  # fmt: skip
    """`sample` faults of every file, drawn by a seed, whose lines tests run; and those between, whose lines none do.
    known is called with a file's faults. seen: by file, tests that have seen others of its faults."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import scipy.linalg  # noqa: F401
    import torch._dynamo  # noqa: F401

    end = time.monotonic() + 60 * minutes
    parts: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file in files:
        parts[tests_for(file)].append(file)
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        for tests, some in parts.items():
            begun = time.monotonic()
            server = _Server(tree, tests)
            made = server.ask("lines", 20 * budget, tree, some, budget)
            if not isinstance(made, tuple):
                raise SystemExit(f"the trace of {some} came to no end: {made}")
            lines, times = made
            print(f"{len(server.tests)} tests, {len(times)} traced in {time.monotonic() - begun:.0f} s", flush=True)
            random.Random(seed).shuffle(some)
            for file in some:
                if time.monotonic() > end:
                    return
                others = near(server.tests, file, (tree / file).read_text(encoding="utf-8"), seen.get(file, ()))
                known(_of_a_file(server, tree, file, lines[file], times, sample, seed, others))
            server.close()


def named() -> list[Found]:
    """The faults of `NAMED`, shown to the tests of survivors."""
    import torch._dynamo  # noqa: F401

    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        server = _Server(tree, ["tests/axes/test_survivors.py"])
        asked = [t for t in server.tests if "set_by_its_reset" not in t]
        for file, was, now in NAMED:
            text, begun = (tree / file).read_text(encoding="utf-8"), time.monotonic()
            fault = Fault(file, text[: text.index(was)].count("\n") + 1, "named", was, now)
            by = server.show(tree, fault, text.replace(was, now), asked, 60)
            if by == "*":
                raise SystemExit(f"{file} has {was!r} in no function")
            found.append(_found(fault, by, begun))
            print(f"{file}:{fault.line} {found[-1].outcome} by {by}: {was} -> {now}", flush=True)
        server.close()
    return found


def _today(row: Mapping[str, Any], text: str, known: bool = False) -> tuple[Fault, str] | None:
    """A row's fault as it can be planted today, and the source that has it: of those alike, on the nearest line; or,
    of one that is known to have survived for a reason, on the line that the reason is about."""
    alike = [x for x in _faults(row["file"], text) if x[0][2:] == (row["kind"], row["was"], row["now"])]
    if known and row["outcome"] == "survived":
        alike = [x for x in alike if reason(x[0].file, x[0].line, x[0].was)] or alike
    return min(alike, key=lambda x: abs(x[0].line - row["line"])) if alike else None


def merged(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a report and those of other samples that were shown to tests, each fault once, of those that can be
    planted today; a fault that both have is the first one's, but where only the second one was seen."""
    texts = functools.cache(lambda file: (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else "")
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    both = [(row, True) for row in rows] + [(row, False) for row in others if row["outcome"] != "not run"]
    for row, first in both:
        if row["kind"] == "named":
            kept[row["file"], "named", row["was"]] = row
        elif (here := _today(row, texts(row["file"]), first)) is not None:
            known = kept.setdefault(here[0], {**row, "line": here[0].line})
            if known["outcome"] in ("survived", "not run") and row["outcome"] not in ("survived", "not run"):
                known.update(row, line=here[0].line)
    return list(kept.values())


def survivors(
    rows: Sequence[dict[str, Any]], also: Sequence[str], budget: float, seconds: float, known: Callable[[Found], None],
    seen: Mapping[str, Sequence[str]], of: Sequence[str] = (),
) -> None:  # fmt: skip
    """Faults that have survived, shown to tests with a word of `also` (FILE=WORD: faults of such files alone), to more
    of those that run them (none, if budget is zero), and then to some that are near the file. known is called with
    each; seen: as `run`; of: the tests that there are, in place of those of the file's part."""
    import torch._dynamo  # noqa: F401

    parts: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        parts[tuple(of) or tests_for(row["file"])].append(row)
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        for tests, some in parts.items():
            server = _Server(tree, tests)
            files = sorted({r["file"] for r in some})
            made = server.ask("lines", 20 * budget, tree, files, budget) if budget else ({}, {})
            if not isinstance(made, tuple):
                raise SystemExit(f"the trace came to no end: {made}")
            lines, times = made
            print(f"{len(server.tests)} tests, {len(times)} traced", flush=True)
            for row in some:
                text, begun = (tree / row["file"]).read_text(encoding="utf-8"), time.monotonic()
                if (here := _today(row, text)) is None:
                    continue
                fault, source = here
                more = near(server.tests, row["file"], text, seen.get(row["file"], ()))
                ran = lines.get(fault.file, {}).get(fault.line, set())
                run_it = _chosen(ran, times, _MANY, _LONG / 3, 2 * _VARIANTS)
                pairs = [w.rpartition("=") for w in also]
                mine = [w for of, _, w in pairs if of in fault.file]
                asked = [t for t in server.tests if any(w in t for w in mine)]
                asked = list(dict.fromkeys(asked + run_it + ([] if run_it else more)))
                by = server.show(tree, fault, source, asked[:_MANY], seconds, seconds / 2)
                if by == "*":
                    quick = [t for t in asked if "::" not in t.partition("[")[2]][:_FEW]
                    found = shown(tree, fault, source, quick, seconds)
                else:
                    found = _found(fault, by, begun)
                known(found)
                last = f"{found.outcome}, {len(asked)} tests"
                print(f"{fault.file}:{fault.line} {last}: {fault.was} -> {fault.now}", flush=True)
            server.close()


def _of_a_file(
    server: _Server, tree: Path, file: str, lines: dict[int, set[str]], times: dict[str, float], sample: int, seed: int,
    others: Sequence[str],
) -> list[Found]:  # fmt: skip
    every, found, taken = faults(file, (tree / file).read_text(encoding="utf-8")), list[Found](), 0
    random.Random(f"{seed} {file}").shuffle(every)
    for fault, source in every:
        if taken == sample:
            break
        tests = lines.get(fault.line, set()) & times.keys()
        if tests:
            found.append(one(server, tree, fault, source, tests, times, others))
            taken += 1
            last = found[-1]
            print(f"{file}:{fault.line} {last.outcome} {last.seconds:.1f} s: {fault.was} -> {fault.now}", flush=True)
        else:
            found.append(Found(fault, "not run", "", 0.0))
    return found


def reason(file: str, line: int, was: str) -> str | None:
    """Why nobody can tell a fault, or None."""
    found = EQUIVALENT.get((file, was))
    if not isinstance(found, tuple):
        return found
    part, why = found
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return why if line <= len(lines) and part in lines[line - 1] else None


def report(found: list[Found]) -> str:
    """Markdown: counts by file, then every fault that nobody saw, with the reason where there is one."""
    shown_ = [f for f in found if f.outcome != "not run"]
    reasons = {f: reason(f.fault.file, f.fault.line, f.fault.was) for f in shown_ if f.outcome == "survived"}
    same = sum(why is not None for why in reasons.values())
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
    for f, why in reasons.items():
        was, now = (x.replace("|", "\\|") for x in (f.fault.was, f.fault.now))
        out.append(f"| `{f.fault.file}:{f.fault.line}` {f.fault.kind} | `{was}` | `{now}` | {why or '**open**'} |")
    return "\n".join(out) + "\n"


def _files(given: Sequence[str]) -> list[str]:
    """Files, and those of folders, of Python."""
    found: list[str] = []
    for name in given:
        path = ROOT / name
        some = [path] if path.is_file() else sorted(path.rglob("*.py"))
        found += [str(p.relative_to(ROOT)) for p in some if p.name != "__init__.py" or path.is_file()]
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="or folders; none: write the page from the report alone")
    parser.add_argument("--sample", type=int, default=4, help="faults of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=90, help="seconds of the trace of a part")
    parser.add_argument("--minutes", type=float, default=1e9, help="no further file is begun after them")
    parser.add_argument("--survivors", nargs="*", metavar="[FILE=]WORD",
                        help="those of the report alone, to more tests")  # fmt: skip
    parser.add_argument("--named", action="store_true", help="the faults that nobody saw once, and nothing else")
    parser.add_argument("--tests", nargs="*", default=(), help="for --survivors, in place of those of a file's part")
    parser.add_argument("--merge", nargs="*", type=Path, help="reports of other samples, to stand beside this one")
    parser.add_argument("--again", action="store_true", help="files that the report has, too")
    parser.add_argument("--report", type=Path, default=Path("docs/mutants"), help="NAME.json and NAME.md")
    given = parser.parse_args()
    kept = given.report.with_suffix(".json")

    def rows() -> list[dict[str, Any]]:
        return json.loads(kept.read_text()) if kept.exists() else []

    def put(kept_rows: list[dict[str, Any]], found: list[Found]) -> None:
        more = [{**f.fault._asdict(), "outcome": f.outcome, "by": f.by, "seconds": round(f.seconds, 1)} for f in found]
        kept.write_text(json.dumps(kept_rows + more, indent=1) + "\n")

    def known(found: list[Found]) -> None:
        files = {f.fault.file for f in found}
        put([r for r in rows() if r["file"] not in files or r["kind"] == "named"], found)

    def seen() -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for r in rows():
            if r["outcome"] == "seen":
                found[r["file"]].append(r["by"])
        return found

    if given.merge is not None:
        others = [r for path in given.merge for r in json.loads(path.read_text())]
        put(merged(rows(), others), [])
        given.files = []
    if given.survivors is not None:
        lost = [r for r in rows() if r["outcome"] == "survived" and not reason(r["file"], r["line"], r["was"])]
        lost = [r for r in lost if not given.files or r["file"] in _files(given.files)]

        def again(found: Found) -> None:
            after, of = rows(), found.fault
            for r in after:
                if (r["file"], r["kind"], r["was"], r["now"], r["outcome"]) == (*of[:1], *of[2:], "survived"):
                    r.update(outcome=found.outcome, by=found.by, line=of.line)
            kept.write_text(json.dumps(after, indent=1) + "\n")

        survivors(lost, given.survivors, given.budget, 150, again, seen(), given.tests)
        given.files = []
    if given.named:
        put([r for r in rows() if r["kind"] != "named"], named())
        given.files = []
    there = set() if given.again else {r["file"] for r in rows() if r["kind"] != "named"}
    files = [f for f in _files(given.files) if f not in there]
    run(files, given.sample, given.seed, given.budget, given.minutes, known, seen())
    found = [Found(Fault(*(r[n] for n in Fault._fields)), r["outcome"], r["by"], r["seconds"]) for r in rows()]
    given.report.with_suffix(".md").write_text(_HEAD + report(found))
    print(report(found))


if __name__ == "__main__":
    main()
