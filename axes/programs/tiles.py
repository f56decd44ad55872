"""A token's step as a straight-line program on tiles, with its adjoint: what one GPU program does with a state in
registers.

A value has an entry for every row of the state, for every key, for both (a tile), or is a number. Products of a state
with vectors, outer products, norms and normalisations are operations entry by entry and sums over rows or keys, so the
program has no others. Step and adjoint are followed together, as torch executes them: reverse mode is torch's own.
What mixes entries in another way (products of two matrices, sorts, branches on values) is refused, and named, but for
stages: iterations that torch has an operator of ours for (`axes.linalg.polynomials`), of a whole tile, for languages
that have functions for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.linalg import polynomials
from axes.linalg.formulas import iterating_by

Axis = Literal["v", "k"]
Shape = tuple[Axis | None, ...]  # of each dimension: rows, keys, or one entry
Value = int | float  # the number of an operation, or a constant
Extent = tuple[bool, bool]  # whether a value has an entry for every row, and for every key
FULL: Extent = (True, True)
GRAD = "d "  # prefix of what is a derivative, in the names of inputs and outputs
NEXT = "next "  # and of what a sum of states is at the token behind, with the number of its operation
STAGE, BACK = "stage ", "back "  # prefixes of operations: a stage of a tile and numbers; of a stage and a derivative
NEWTON_SCHULZ = f"{STAGE}newton_schulz"
LARGEST = 600  # operations of a program: what a compiler makes of more is not looked at


class NotTiles(AxesError):
    """A step that is no program on tiles."""


@final
@dataclass(frozen=True)
class Operation:
    """One operation on earlier values; "input" is named in the program, "sum v" is over rows, "max k" over keys.

    Those of two words are no operations entry by entry.
    """

    name: str
    inputs: tuple[Value, ...]
    extent: Extent
    truth: bool = False


@final
@dataclass(eq=False)
class Program:
    """Operations in order, each once; outputs by name."""

    operations: list[Operation] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    _seen: dict[Any, int] = field(default_factory=dict, repr=False, compare=False)

    def input(self, name: str, extent: Extent) -> int:
        self.operations.append(Operation("input", (), extent))
        self.names[len(self.operations) - 1] = name
        return len(self.operations) - 1

    def extent(self, x: Value) -> Extent:
        return self.operations[x].extent if isinstance(x, int) else (False, False)

    def add(self, name: str, *inputs: Value) -> Value:
        """An operation entry by entry, or what it comes to."""
        folded = self._folded(name, inputs)
        if folded is not None:
            return folded
        extents = [self.extent(x) for x in inputs]
        extent = (any(e[0] for e in extents), any(e[1] for e in extents))
        return self._once(name, inputs, extent)

    def reduce(self, kind: Literal["sum", "max"], x: Value, axis: Axis, width: int) -> Value:
        """Over rows or keys. width: how many there are; a value without them is as if it were repeated."""
        if not self._along(x, axis):
            return x if kind == "max" else self.add("mul", x, float(width))
        outside: list[Value] = []
        if kind == "sum":  # what does not vary along the axis stays outside, where it is fewer products
            known = self._made_of(x, axis)
            if known is not None:
                return known
            x, outside = self.split(x, axis)
        assert isinstance(x, int)
        old = self.extent(x)
        made: Value = self._once(f"{kind} {axis}", (x,), (old[0] and axis != "v", old[1] and axis != "k"))
        for factor in outside:
            made = self.add("mul", made, factor)
        return made

    def stage(self, name: str, x: Value, numbers: Sequence[float]) -> int:
        """An iteration of a tile as a whole, which `name` and numbers say."""
        return self._once(name, (self._tile(x), *map(float, numbers)), FULL)

    def back(self, stage: int, dy: Value) -> Value:
        """The derivative by a stage's tile from that by what it comes to."""
        if dy == 0.0 and isinstance(dy, float):
            return 0.0
        return self._once(self.operations[stage].name.replace(STAGE, BACK), (stage, self._tile(dy)), FULL)

    def stages(self, within: Iterable[int]) -> list[int]:
        return [i for i in within if self.operations[i].name.startswith(STAGE)]

    def _tile(self, x: Value) -> Value:
        if self.extent(x) != FULL:
            raise NotTiles("it iterates on a matrix of which no entry is told from others")
        return x

    def split(self, x: Value, axis: Axis) -> tuple[Value, list[Value]]:
        """A product as what varies along an axis, and factors that do not."""
        if not self._along(x, axis):
            return 1.0, [x]
        assert isinstance(x, int)
        op = self.operations[x]
        if op.name == "neg":
            inside, outside = self.split(op.inputs[0], axis)
            return inside, [-1.0, *outside]
        if op.name != "mul":
            return x, []
        (a, left), (b, right) = (self.split(y, axis) for y in op.inputs)
        return (self.add("mul", a, b), [*left, *right]) if left or right else (x, [])

    def _made_of(self, x: Value, axis: Axis, depth: int = 3) -> Value | None:
        """A sum from sums that are there: of the same, or of every term of it."""
        inside, outside = self.split(x, axis)
        if not isinstance(inside, int):
            return None
        key = (f"sum {axis}", ((int, repr(inside)),))
        made: Value | None = self._seen.get(key)
        op = self.operations[inside]
        if made is None and depth and op.name in ("add", "sub"):
            made = self._each_made(op.name, op.inputs, axis, depth)
        if made is None and depth and op.name == "mul":
            for f, g in (op.inputs, op.inputs[::-1]):
                term = self.operations[f] if isinstance(f, int) else None
                if made is None and term is not None and term.name in ("add", "sub"):
                    made = self._each_made(term.name, [self.add("mul", y, g) for y in term.inputs], axis, depth)
        for factor in outside if made is not None else ():
            assert made is not None
            made = self.add("mul", made, factor)
        return made

    def _each_made(self, name: str, terms: Sequence[Value], axis: Axis, depth: int) -> Value | None:
        sums: list[Value] = []
        for x in terms:
            one = self._made_of(x, axis, depth - 1) if self._along(x, axis) else None
            if one is None:
                return None
            sums.append(one)
        return self.add(name, *sums)

    def _along(self, x: Value, axis: Axis) -> bool:
        return self.extent(x)["vk".index(axis)]

    def _once(self, name: str, inputs: tuple[Value, ...], extent: Extent) -> int:
        if name in _COMMUTES:
            inputs = tuple(sorted(inputs, key=lambda x: (isinstance(x, float), x)))
        key = (name, tuple((type(x), repr(x)) for x in inputs))
        if key not in self._seen:
            if len(self.operations) >= LARGEST:
                raise NotTiles(f"its step takes more than {LARGEST} operations")
            self.operations.append(Operation(name, inputs, extent, name in _TESTS))
            self._seen[key] = len(self.operations) - 1
        return self._seen[key]

    def _folded(self, name: str, x: tuple[Value, ...]) -> Value | None:
        """What an operation comes to without being done, or None. Derivatives of what is not there are zeros: a
        product with one is zero, as in every reverse mode."""
        if all(isinstance(a, float) for a in x):
            return float(_NUMBERS[name](*x))
        if name == "mul":
            for a, b in (x, x[::-1]):
                if isinstance(a, float) and a in (0.0, 1.0, -1.0):
                    return 0.0 if a == 0.0 else b if a == 1.0 else self.add("neg", b)
            for a, b in (x, x[::-1]):
                if (regrouped := self._regrouped(a, b)) is not None:
                    return regrouped
        if name in ("add", "sub") and isinstance(x[1], float) and x[1] == 0.0:
            return x[0]
        if name == "add" and isinstance(x[0], float) and x[0] == 0.0:
            return x[1]
        if name == "sub" and isinstance(x[0], float) and x[0] == 0.0:
            return self.add("neg", x[1])
        if name == "sub" and self._term(x[1]) is not None:
            return self.add("add", x[0], self.add("neg", x[1]))
        if name == "add":
            for a, b in (x, x[::-1]):
                if (gathered := self._gathered(a, b, 3)) is not None:
                    return gathered
        if name == "div":
            if isinstance(x[1], float):
                return self.add("mul", x[0], 1.0 / x[1] if x[1] else float("inf"))
            if isinstance(x[0], float) and x[0] == 0.0:
                return 0.0
            return self.add("mul", x[0], self.add("reciprocal", x[1]))
        if name == "neg" and isinstance(x[0], int) and self.operations[x[0]].name == "neg":
            return self.operations[x[0]].inputs[0]
        if name == "neg" and (term := self._term(x[0])) is not None:
            return self.add("mul", term[0], self.add("neg", term[1]))
        if name == "pow" and isinstance(x[1], float):
            return self._power(x[0], x[1])
        if name == "gt" and isinstance(x[1], float) and x[1] == 0.0 and self._positive(x[0]):
            return 1.0
        if name == "where":
            if isinstance(x[0], float):
                return x[1] if x[0] else x[2]
            if type(x[1]) is type(x[2]) and x[1] == x[2]:
                return x[1]
            return self._chosen(*x)
        return None

    def _positive(self, x: Value, zero: bool = False) -> bool:
        """Whether a value is a number above zero whatever it is made of (zero: or zero)."""
        if isinstance(x, float):
            return x > 0.0 or zero and x == 0.0
        op = self.operations[x]
        if op.name == "sqrt":
            return self._positive(op.inputs[0], zero)
        if op.name == "add":
            a, b = op.inputs
            return self._positive(a) and self._positive(b, True) or self._positive(a, True) and self._positive(b)
        if op.name != "where":
            return False
        test, a, b = op.inputs
        tested = self.operations[test] if isinstance(test, int) else None
        if isinstance(a, int) and self.operations[a].name == "sqrt":  # above zero where what it is of is
            a = self.operations[a].inputs[0]
        above = tested is not None and tested.name == "gt" and tested.inputs[0] == a and _not_below(tested.inputs[1])
        return (above or self._positive(op.inputs[1], zero)) and self._positive(b, zero)

    def _regrouped(self, tile: Value, small: Value) -> Value | None:
        """(t s) x as t (s x), where that is one product of tiles for two."""
        if self.extent(tile) != FULL or self.extent(small) == FULL:
            return None
        term = self._term(tile)
        if term is None:
            return None
        t, s = term
        both = tuple(a or b for a, b in zip(self.extent(s), self.extent(small), strict=True))
        return None if both == FULL else self.add("mul", t, self.add("mul", s, small))

    def _term(self, x: Value) -> tuple[Value, Value] | None:
        """(t, s) of t s, a tile times what is none."""
        op = self.operations[x] if isinstance(x, int) and self.extent(x) == FULL else None
        if op is None or op.name not in ("mul", "neg"):
            return None
        for t, s in ((op.inputs[0], -1.0),) if op.name == "neg" else (op.inputs, op.inputs[::-1]):
            if self.extent(t) == FULL and self.extent(s) != FULL:
                return t, s
        return None

    def _gathered(self, x: Value, total: Value, depth: int) -> Value | None:
        """A sum with one more term t s, where it has one of t already, or with one more derivative through a stage."""
        back = self._through(x)
        if back is not None and (other := self._through(total)) is not None and back[0] == other[0]:
            return self.back(back[0], self.add("add", back[1], other[1]))
        own, there = self._term(x), self._term(total)
        if own is None and back is None:
            return None
        if own is not None and there is not None and own[0] == there[0]:
            both = self.add("add", own[1], there[1])
            return None if self.extent(both) == FULL else self.add("mul", own[0], both)
        op = self.operations[total] if isinstance(total, int) else None
        if op is None or op.name != "add" or not depth:
            return None
        for a, b in (op.inputs, op.inputs[::-1]):
            if (found := self._gathered(x, a, depth - 1)) is not None:
                return self._once("add", (found, b), FULL) if isinstance(found, int) else None
        return None

    def _through(self, x: Value) -> tuple[int, Value] | None:
        """The stage of a derivative through one, and what came to it."""
        op = self.operations[x] if isinstance(x, int) else None
        if op is None or not op.name.startswith(BACK):
            return None
        stage, dy = op.inputs
        assert isinstance(stage, int)
        return stage, dy

    def _chosen(self, test: Value, a: Value, b: Value) -> Value | None:
        """A choice within a choice by the same test is made once."""
        inner = self._under(test, a, 1), self._under(test, b, 2)
        return None if inner == (a, b) else self.add("where", test, *inner)

    def _under(self, test: Value, x: Value, place: int) -> Value:
        """What x is where the test has this outcome."""
        op = self.operations[x] if isinstance(x, int) else None
        if op is None:
            return x
        if op.name == "where" and op.inputs[0] == test:
            return op.inputs[place]
        if op.name in _CHOSEN_WITHIN:
            inputs = [self._under(test, y, place) for y in op.inputs]
            return x if inputs == list(op.inputs) else self.add(op.name, *inputs)
        return x

    def _power(self, x: Value, exponent: float) -> Value | None:
        if exponent < 0:
            return self.add("rsqrt", x) if exponent == -0.5 else self.add("reciprocal", self.add("pow", x, -exponent))
        if exponent in (0.0, 0.5, 1.0):
            return 1.0 if exponent == 0.0 else x if exponent == 1.0 else self.add("sqrt", x)
        if exponent in (2.0, 3.0, 4.0):
            square = self.add("mul", x, x)
            return square if exponent == 2.0 else self.add("mul", square, x if exponent == 3.0 else square)
        return None

    # ---- parts of it -------------------------------------------------------------------------------------------------

    def needed(self, outputs: Iterable[str], given: Iterable[int] = ()) -> list[int]:
        """The operations that some outputs need, in order, where the values of `given` are there."""
        there = frozenset(given)
        wanted = {v for n in outputs if isinstance(v := self.outputs[n], int)}
        for i in range(len(self.operations) - 1, -1, -1):
            if i in wanted and i not in there:
                wanted.update(x for x in self.operations[i].inputs if isinstance(x, int))
        return sorted(wanted)

    def reductions(self, within: Iterable[int], axis: Axis | None = None) -> list[int]:
        """The sums and maxima among some operations: of tiles, or all over an axis."""
        found = [i for i in within if self.operations[i].name.startswith(("sum ", "max "))]
        return [i for i in found if axis is None or self.operations[i].name.endswith(axis)]

    def same(self, other: Program) -> bool:
        """Whether another computes the same in the same way, in whatever order."""
        return self._meaning() == other._meaning()

    def _meaning(self) -> dict[str, Any]:
        made: list[int] = []
        for i, op in enumerate(self.operations):
            inputs = [made[x] if isinstance(x, int) else repr(x) for x in op.inputs]
            if op.name in _COMMUTES:
                inputs.sort(key=str)
            made.append(hash((op.name, self.names.get(i), op.extent, *inputs)))
        return {n: made[v] if isinstance(v, int) else repr(v) for n, v in self.outputs.items()}

    def __str__(self) -> str:
        lines = []
        for i, op in enumerate(self.operations):
            args = ", ".join(f"%{x}" if isinstance(x, int) else f"{x:g}" for x in op.inputs)
            kind = {(True, True): "tile", (True, False): "rows", (False, True): "keys", (False, False): "number"}
            lines.append(f"%{i} {kind[op.extent]} = {self.names.get(i, f'{op.name}({args})')}")
        return "\n".join([*lines, *(f"{n} <- {f'%{v}' if isinstance(v, int) else v}" for n, v in self.outputs.items())])


_COMMUTES = frozenset({"mul", "add", "maximum", "minimum", "eq", "ne", "and", "or"})
_CHOSEN_WITHIN = frozenset({"mul", "neg", "sqrt", "rsqrt", "reciprocal"})  # what a choice between inputs passes through
_TESTS = frozenset({"gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not"})


def _not_below(x: Value) -> bool:
    return isinstance(x, float) and x >= 0.0


def _wide(x: float) -> Tensor:
    """Numbers of a program are rounded where it runs, once."""
    return torch.tensor(float(x), dtype=torch.float64)


_NUMBERS: dict[str, Callable[..., Any]] = {
    "mul": operator.mul, "add": operator.add, "sub": operator.sub, "neg": operator.neg, "abs": abs,
    "div": lambda a, b: float(_wide(a) / _wide(b)), "maximum": max, "minimum": min,
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "and": lambda a, b: bool(a) and bool(b), "or": lambda a, b: bool(a) or bool(b), "not": operator.not_,
    "where": lambda c, a, b: a if c else b, "pow": lambda a, b: float(_wide(a) ** b),
    **{n: (lambda f: lambda a: float(f(_wide(a))))(getattr(torch, n))
       for n in ("sqrt", "rsqrt", "reciprocal", "exp", "log", "log1p", "expm1", "tanh", "sigmoid", "sign")},
}  # fmt: skip


# ---- from torch ------------------------------------------------------------------------------------------------------

_ENTRYWISE = {
    "mul": "mul", "add": "add", "sub": "sub", "div": "div", "neg": "neg", "pow": "pow", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "reciprocal": "reciprocal", "abs": "abs", "sign": "sign", "sgn": "sign", "exp": "exp",
    "log": "log", "log1p": "log1p", "expm1": "expm1", "tanh": "tanh", "sigmoid": "sigmoid", "maximum": "maximum",
    "minimum": "minimum", "clamp_min": "maximum", "clamp_max": "minimum", "where": "where", "gt": "gt", "ge": "ge",
    "lt": "lt", "le": "le", "eq": "eq", "ne": "ne", "logical_and": "and", "bitwise_and": "and", "logical_or": "or",
    "bitwise_or": "or", "logical_not": "not", "bitwise_not": "not",
}  # fmt: skip
_SAME = frozenset({
    "alias", "clone", "detach", "expand", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute",
    "transpose", "t", "lift_fresh_copy", "contiguous", "select", "slice",
})  # fmt: skip
_CONSTANTS = {"ones_like": 1.0, "ones": 1.0, "new_ones": 1.0, "zeros_like": 0.0, "zeros": 0.0, "new_zeros": 0.0}
_FILLED = frozenset({"full", "full_like", "new_full"})
_STAGES = {"newton_schulz_whole": NEWTON_SCHULZ}  # and with _adjoint: operators of ours


def trace(
    step: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    given: Mapping[str, Shape],
    widths: tuple[int, int],
    wanted: Sequence[str] = (),
    staged: bool = False,
) -> Program:
    """The program of a pure function from named tensors to named tensors, with derivatives.

    given: shapes of the inputs by name; widths: of rows and of keys, at least 2. wanted: inputs whose derivatives are
    outputs too ("d NAME"), from those of all outputs ("d NAME", inputs). A derivative that is nowhere is not there.
    staged: iterations are stages.
    Raises NotTiles with the first operation that is none.
    """
    if min(widths) < 2:
        raise NotTiles(f"widths {widths}: a width of 1 makes rows of numbers")
    # which dimension is which is seen by lengths, so rows and keys have different ones: what the numbers are at the
    # widths themselves is followed a second time where these are equal
    apart = (widths[0], widths[1] + 2) if widths[0] == widths[1] else widths
    with iterating_by(polynomials.operator) if staged else nullcontext():
        shapes = _followed(step, given, apart, wanted)
        numbers = shapes if apart == widths else _followed(step, given, widths, wanted)
    return _Translation(given, widths, apart).run(shapes, numbers)


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """torch's operations as those of its core: a table that takes it a third of a second to write down."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())


class _Followed(NamedTuple):
    """What torch executes: the names of its inputs and outputs, and the shapes of inputs that are derivatives."""

    graph: torch.fx.GraphModule
    inputs: list[str]
    outputs: list[str]
    shapes: dict[str, tuple[int, ...]]


def _followed(
    step: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    given: Mapping[str, Shape],
    widths: tuple[int, int],
    wanted: Sequence[str],
) -> _Followed:
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def size(shape: Shape) -> tuple[int, ...]:
        return tuple(1 if a is None else widths["vk".index(a)] for a in shape)

    def both(inputs: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()} if wanted else inputs
        with torch.set_grad_enabled(bool(wanted)):
            out = dict(step(leaves))
            made = {n: x for n, x in out.items() if wanted and x.requires_grad}
            found: Any = ()
            if made:
                found = torch.autograd.grad(
                    list(made.values()), [leaves[n] for n in wanted], [grads[GRAD + n] for n in made], allow_unused=True
                )
        result = {**out, **{GRAD + n: g for n, g in zip(wanted, found, strict=False) if g is not None}}
        called[:] = result
        return result

    def entries(shape: Sequence[int]) -> Tensor:  # random numbers are the caller's
        count = 1
        for n in shape:
            count *= n
        return torch.linspace(-0.9, -0.1, count, dtype=torch.float64).reshape(tuple(shape))

    called: list[str] = []
    inputs = {n: entries(size(shape)) for n, shape in given.items()}
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        try:
            outputs = {n: x.shape for n, x in step(dict(inputs)).items()} if wanted else {}
            grads = {GRAD + n: entries(shape) for n, shape in outputs.items()}
            with tracing(TracingContext(FakeTensorMode())):  # else make_fx makes such a mode for every value
                graph = make_fx(both, decomposition_table=_decompositions())(inputs, grads)
        except (RuntimeError, NotImplementedError, AxesError) as error:
            said = str(error).partition("\n")[0]
            if "_local_scalar_dense" in said:
                said = "it branches on a value"
            raise NotTiles(f"its step cannot be followed: {said}") from None
    graph.graph.eliminate_dead_code()
    return _Followed(graph, [*inputs, *grads], called, {GRAD + n: tuple(s) for n, s in outputs.items()})


@final
class _Translation:
    """From a graph of torch's operations to a program."""

    def __init__(self, given: Mapping[str, Shape], widths: tuple[int, int], apart: tuple[int, int]) -> None:
        self.given, self.widths, self.apart = given, widths, apart
        self.program = Program()
        self.known: dict[Any, Value] = {}

    def run(self, shapes: _Followed, numbers: _Followed) -> Program:
        ours, theirs = list(shapes.graph.graph.nodes), list(numbers.graph.graph.nodes)
        if [str(n.target) for n in ours if n.op == "call_function"] != [
            str(n.target) for n in theirs if n.op == "call_function"
        ]:
            raise NotTiles("its step is another where values are as wide as keys")
        names = iter(shapes.inputs)
        for node, same in zip(ours, theirs, strict=True):
            if node.op == "placeholder":
                name = next(names)
                shape = self.given[name] if name in self.given else self.axes(shapes.shapes[name])
                self.known[node] = self.program.input(name, ("v" in shape, "k" in shape))
            elif node.op == "get_attr":
                self.known[node] = self.constant(getattr(numbers.graph, same.target))
            elif node.op == "call_function":
                self.known[node] = self.operation(node, same)
            elif node.op == "output":
                self.program.outputs = {n: self.known[x] for n, x in zip(shapes.outputs, node.args[0], strict=True)}
        return self.program

    def axes(self, shape: Sequence[int]) -> Shape:
        """Of each dimension, what it is along."""
        found: list[Axis | None] = []
        for n in shape:
            if n != 1 and n not in self.apart:
                raise NotTiles(f"a tensor of shape {tuple(shape)} is along neither rows nor keys")
            found.append(None if n == 1 else "v" if n == self.apart[0] else "k")
        if len(set(found) - {None}) < len([a for a in found if a is not None]):
            raise NotTiles("it multiplies matrices: a tensor with rows or keys in two dimensions")
        return tuple(found)

    def constant(self, x: Tensor) -> float:
        if x.numel() != 1:
            raise NotTiles("it reads a constant tensor")
        return float(x.reshape(()))

    def shape(self, node: Any) -> Shape:
        return self.axes(node.meta["val"].shape)

    def operation(self, node: Any, same: Any) -> Value:
        name = node.target.__name__.split(".")[0] if hasattr(node.target, "__name__") else str(node.target)
        if name == "getitem":
            raise NotTiles("it takes tensors apart")
        if not isinstance(node.meta.get("val"), Tensor):
            raise NotTiles(f"{name} is no operation on tiles")
        args = [self.value(x) if isinstance(x, torch.fx.Node) else x for x in _both(node, same)]
        program = self.program
        if name in _CONSTANTS or name in _FILLED or name == "scalar_tensor":
            self.shape(node)
            return _CONSTANTS[name] if name in _CONSTANTS else float(args[0 if name == "scalar_tensor" else 1])
        if name == "arange":
            if node.meta["val"].numel() == 1:
                return float(args[0]) if len(args) > 1 else 0.0
            raise NotTiles("it counts entries")
        out = self.shape(node)
        if getattr(node.target, "namespace", None) == "axes" and name.removesuffix("_adjoint") in _STAGES:
            stage = program.stage(_STAGES[name.removesuffix("_adjoint")], _number(args[0]), args[-1])
            return program.back(stage, _number(args[1])) if name.endswith("_adjoint") else stage
        if name in _SAME:
            before = self.shape(node.args[0])
            kept = [a for a in before if a is not None], [a for a in out if a is not None]
            if name == "select" and len(kept[0]) != len(kept[1]) or name == "slice" and before != out:
                raise NotTiles("it takes single entries")
            if set(kept[0]) - set(kept[1]):
                raise NotTiles(f"{name} moves entries")
            return _number(args[0])
        if name == "_to_copy":
            x = node.args[0].meta["val"]
            copied = _number(args[0])
            return program.add("where", copied, 1.0, 0.0) if x.dtype == torch.bool else copied
        if name in ("mm", "bmm"):
            a = self.shape(node.args[0])
            product = program.add("mul", _number(args[0]), _number(args[1]))
            return product if a[-1] is None else self.reduce("sum", product, a[-1])
        if name == "_softmax":
            return self.softmax(_number(args[0]), self.shape(node.args[0])[args[1]])
        if name in ("sum", "mean", "amax"):
            return self.reduced(name, node, args)
        if name in ("logical_and", "bitwise_and", "logical_or", "bitwise_or", "logical_not", "bitwise_not") and any(
            isinstance(x, torch.fx.Node) and x.meta["val"].dtype != torch.bool for x in node.args
        ):
            raise NotTiles(f"{name} of numbers")
        if name == "clamp":
            low, high = [*args[1:], None, None][:2]
            x = _number(args[0])
            x = x if low is None else program.add("maximum", x, _number(low))
            return x if high is None else program.add("minimum", x, _number(high))
        if name == "rsub":
            name, args = "sub", [args[1], args[0], *args[2:]]
        if name not in _ENTRYWISE:
            raise NotTiles(f"{name} is no operation on tiles")
        values = [_number(x) for x in args]
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            values[1] = program.add("mul", values[1], float(alpha))
        return program.add(_ENTRYWISE[name], *values)

    def value(self, node: Any) -> Any:
        known = self.known[node]
        return _Place(known) if isinstance(known, int) else known

    def reduce(self, kind: Literal["sum", "max"], x: Value, axis: Axis) -> Value:
        return self.program.reduce(kind, x, axis, self.widths["vk".index(axis)])

    def reduced(self, name: str, node: Any, args: Sequence[Any]) -> Value:
        x, before = _number(args[0]), self.shape(node.args[0])
        if node.args[0].meta["val"].dtype == torch.bool:
            x = self.program.add("where", x, 1.0, 0.0)
        dims = args[1] if len(args) > 1 and args[1] is not None else range(len(before))
        axes = [a for d in ([dims] if isinstance(dims, int) else dims or range(len(before))) if (a := before[d])]
        for axis in sorted(axes, key=lambda a: (-self.outside(x, a), a)):  # keys first: they lie near each other
            x = self.reduce("max" if name == "amax" else "sum", x, axis)
            if name == "mean":
                x = self.program.add("mul", x, 1.0 / self.widths["vk".index(axis)])
        return x

    def outside(self, x: Value, axis: Axis) -> int:
        """How many factors of a product stay outside of a sum over an axis."""
        return sum(isinstance(y, int) for y in self.program.split(x, axis)[1])

    def softmax(self, x: Value, axis: Axis | None) -> Value:
        if axis is None:
            return 1.0
        weights = self.program.add("exp", self.program.add("sub", x, self.reduce("max", x, axis)))
        return self.program.add("div", weights, self.reduce("sum", weights, axis))


def _both(node: Any, same: Any) -> list[Any]:
    """Tensors of one graph, numbers of the other."""
    return [x if isinstance(x, torch.fx.Node) else y for x, y in zip(node.args, same.args, strict=True)]


@final
class _Place(int):
    """The number of an operation, among arguments that may be numbers of torch's."""


def _number(x: Any) -> Value:
    if isinstance(x, _Place):
        return int(x)
    if isinstance(x, bool | int | float):
        return float(x)
    raise NotTiles(f"an operation takes {x!r}")
