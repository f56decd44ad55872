"""A tuple's step as a straight-line program: numbers computed once a step, and operations on every entry.

The step is traced, not written again: whatever `StateUpdate.step` does with tensors of one shape becomes a list of
operations in static single assignment. A tuple that mixes entries (norms, products, sorts) is refused with the
operation that does it. Guards that can never act are dropped by a sign analysis that assumes nothing but that every
state starts at zero: `sqrt(v) + eps` needs no test for zero once v is a sum of squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, final

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from axes.errors import AxesError
from axes.programs.arithmetic import EVALUATE
from axes.programs.numbers import Number

_SIGNS = {"mul": "*", "add": "+", "sub": "-"}
Value = int | float  # the number of an operation, or a constant
Sign = Literal["positive", "nonnegative", "any"]
_SHAPE = (3, 5)  # what is traced: any two sizes that no number in a rule equals

# aten operation -> (name here, arity); what is not listed mixes entries or is not needed by any rule
_OPERATIONS = {
    "mul": "mul", "add": "add", "sub": "sub", "rsub": "rsub", "div": "div", "neg": "neg", "pow": "pow",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal", "abs": "abs", "sign": "sign", "sgn": "sign",
    "exp": "exp", "log": "log", "log1p": "log1p", "expm1": "expm1", "sinh": "sinh", "asinh": "asinh", "tanh": "tanh",
    "maximum": "maximum", "minimum": "minimum", "clamp_min": "maximum", "clamp_max": "minimum", "clamp": "clamp",
    "where": "where", "gt": "gt", "ge": "ge", "lt": "lt", "le": "le", "eq": "eq", "ne": "ne",
    "logical_and": "and", "bitwise_and": "and", "logical_or": "or", "bitwise_or": "or",
    "logical_not": "not", "bitwise_not": "not",
}  # fmt: skip
_SAME = {"clone", "detach", "alias", "_to_copy", "expand", "view", "_unsafe_view", "lift_fresh_copy", "contiguous"}


# torch's functions that take a number as they take a tensor of one entry; elsewhere it chooses the operation's form
_LIFTS = frozenset({"add", "sub", "mul", "div", "truediv", "maximum", "minimum", "where"})
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max"})  # the same where all their bounds are such numbers


class NotElementwise(AxesError):
    """A tuple whose step mixes entries of the parameter."""


class ForgottenNumber(AxesError):
    """A tuple whose numbers cannot be followed through its step."""


PARAMETER = "parameter"  # the name of what a step is about, among inputs and outputs
COUNT = "count"  # of the number of data before the step, among the inputs of programs that read it


@final
@dataclass(frozen=True)
class Operation:
    """One operation on earlier values. shaped: its result has one entry for every entry of the parameter."""

    name: str
    inputs: tuple[Value, ...]
    shaped: bool


@final
@dataclass
class Program:
    """Operations in order; `input` operations come first and are named by `names`."""

    operations: list[Operation] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    nonnegative: frozenset[str] = frozenset()  # states that never become negative
    positive: frozenset[str] = frozenset()  # numbers that are, while their origin holds
    _numbers: Any = field(default=None, compare=False, repr=False)

    def add(self, name: str, inputs: tuple[Value, ...], shaped: bool) -> int:
        self.operations.append(Operation(name, inputs, shaped))
        return len(self.operations) - 1

    def shaped(self, value: Value) -> TypeGuard[int]:
        """Whether a value has one entry for every entry of the parameter."""
        return isinstance(value, int) and self.operations[value].shaped

    @property
    def inputs(self) -> dict[str, int]:
        return {name: index for index, name in self.names.items()}

    def numbers(self, given: Mapping[str, float]) -> list[float]:
        """All numbers of a step, by their place in the program (0 where a shaped value is)."""
        if self._numbers is None:
            self._numbers = self._compiled()
        return self._numbers(given)

    def _compiled(self) -> Callable[[Mapping[str, float]], list[float]]:
        """The arithmetic of numbers as a function: it runs in every step."""
        lines = ["def numbers(given):"]
        for i, op in enumerate(self.operations):
            if op.shaped:
                continue
            if op.name == "input":
                lines.append(f"    n{i} = float(given[{self.names[i]!r}])")
                continue
            inputs = [f"n{x}" if isinstance(x, int) else f"float({str(x)!r})" for x in op.inputs]
            sign = _SIGNS.get(op.name)
            value = f" {sign} ".join(inputs) if sign else f"float(EVALUATE[{op.name!r}]({', '.join(inputs)}))"
            lines.append(f"    n{i} = {value}")
        values = ("0.0" if op.shaped else f"n{i}" for i, op in enumerate(self.operations))
        lines.append(f"    return [{', '.join(values)}]")
        space: dict[str, Any] = {"EVALUATE": EVALUATE}
        exec("\n".join(lines), space)
        return space["numbers"]

    def tensors(self, given: Mapping[str, Tensor]) -> list[Tensor | float]:
        """The same as 0-d float64 tensors where `given` has tensors: nothing waits for the device that holds them."""
        values: list[Tensor | float] = []
        for i, op in enumerate(self.operations):
            if op.shaped:
                values.append(0.0)
            elif op.name == "input":
                values.append(given[self.names[i]])
            else:
                inputs = [values[x] if isinstance(x, int) else x for x in op.inputs]
                tensors = [x for x in inputs if isinstance(x, Tensor)]
                if not tensors:
                    values.append(float(EVALUATE[op.name](*inputs)))
                    continue
                like = tensors[0]
                inputs = [x if isinstance(x, Tensor) else like.new_full((), x, dtype=torch.float64) for x in inputs]
                values.append(_TENSORS[op.name](*inputs))
        return values

    def __str__(self) -> str:
        """The program as text, numbers of a step first."""
        lines = []
        for i, op in enumerate(self.operations):
            args = ", ".join(f"%{x}" if isinstance(x, int) else f"{x:g}" for x in op.inputs)
            what = self.names[i] if op.name == "input" else f"{op.name}({args})"
            lines.append(f"%{i}{'' if op.shaped else ' number'} = {what}")
        return "\n".join([*lines, *(f"{n} <- {f'%{v}' if isinstance(v, int) else v}" for n, v in self.outputs.items())])


def trace(
    step: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], shaped: tuple[str, ...], numbers: tuple[str, ...]
) -> Program:
    """The program of a pure function from named tensors to named tensors.

    shaped: names of inputs with one entry for every entry of the parameter; numbers: names of 0-d inputs. A `Number`
    that meets a tensor is one more of these, under the text of its formula.
    Raises NotElementwise with the first operation that is not entry by entry.
    """
    entries = torch.linspace(0.5, 1.5, math.prod(_SHAPE)).reshape(_SHAPE)  # no random numbers: theirs is the caller's
    given = {n: entries.clone() for n in shaped} | {n: torch.tensor(0.5) for n in numbers}
    met = _Numbers()
    with met:
        step(given)
    given |= {n: torch.tensor(x.value) for n, x in met.found.items()}
    order: list[str] = []

    def run(values: list[Tensor]) -> list[Tensor]:
        named = dict(zip(given, values, strict=True))
        with _Numbers(named):
            out = step(named)
        order.extend(out)
        return list(out.values())

    try:
        graph = make_fx(run)(list(given.values())).graph
    except RuntimeError as error:
        if "tracing tensor" not in str(error):
            raise
        raise NotElementwise("the step branches on a number") from None
    program = Program(positive=frozenset(n for n, x in met.found.items() if x > 0))
    values: dict[Any, Value] = {}
    names = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            name = next(names)
            index = values[node] = program.add("input", (), name in shaped)
            program.names[index] = name
        elif node.op == "get_attr":
            continue  # a constant tensor, a count say: refused if an output depends on it
        elif node.op == "call_function" and all(x in values for x in node.all_input_nodes):
            values[node] = _translate(node, values, program)
        elif node.op == "output":
            results = node.args[0]
            for name, result in zip(order, results, strict=True):
                if result not in values:
                    raise NotElementwise(f"{name} reads a tensor that is neither an entry nor a number of the step")
                program.outputs[name] = values[result]
    if any(isinstance(x, float) and math.isnan(x) for op in program.operations for x in op.inputs):
        raise ForgottenNumber("a hyperparameter is used in a way that hides how it was computed")
    return _clean(program)


class _Numbers(TorchFunctionMode):
    """Gives torch 0-d tensors for the numbers that it meets. given: the tensors; without, any are made and found."""

    def __init__(self, given: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.given = given
        self.found: dict[str, Number] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, named = function.__name__.strip("_"), kwargs or {}
        lifts = kind in _LIFTS or kind[1:] in _LIFTS
        if kind in _BOUNDS:
            lifts = all(type(x) is not float for x in (*args, *named.values()))
        given = [self._shown(x, lifts) if isinstance(x, Number) else x for x in args]
        named = {n: self._shown(x, kind in _BOUNDS and lifts) if isinstance(x, Number) else x for n, x in named.items()}
        return function(*given, **named)

    def _shown(self, number: Number, lifts: bool) -> Any:
        if not lifts or number == 0.0 or number == 1.0:  # a constant: what it is chooses the operation
            return number.fixed()
        if self.given is not None:
            return self.given[number.text]
        self.found.setdefault(number.text, number)
        number.origin.used[number.text] = None
        return torch.tensor(number.value)


def _translate(node: Any, values: dict[Any, Value], program: Program) -> Value:
    name = node.target.__name__.split(".")[0]
    meta = node.meta["val"]
    shape = tuple(meta.shape)
    if name == "scalar_tensor":
        return float(node.args[0])
    if name in ("full", "ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "zeros", "ones"):
        fill = {"ones_like": 1.0, "ones": 1.0, "new_ones": 1.0}.get(name)
        return fill if fill is not None else float(node.args[1]) if name.startswith("full") else 0.0
    if shape != _SHAPE and math.prod(shape) != 1:
        raise NotElementwise(f"{name} gives a tensor of another shape: entries are mixed")
    inputs = tuple(values[x] if isinstance(x, torch.fx.Node) else x for x in node.args)
    if name in _SAME:
        return inputs[0]
    if name not in _OPERATIONS:
        raise NotElementwise(f"{name} is not an operation on every entry")
    if not all(isinstance(x, int | float | bool) for x in inputs):
        raise NotElementwise(f"{name} takes something else than numbers and entries")
    inputs = tuple(float(x) if not isinstance(y, torch.fx.Node) else x for x, y in zip(inputs, node.args, strict=True))
    alpha = node.kwargs.get("alpha", 1)
    operation = _OPERATIONS[name]
    if operation == "rsub":
        operation, inputs = "sub", (inputs[1], inputs[0])
    if alpha != 1:
        inputs = (inputs[0], program.add("mul", (inputs[1], float(alpha)), program.shaped(inputs[1])))
    return program.add(operation, inputs, shape == _SHAPE)


# ---- simplification --------------------------------------------------------------------------------------------------


def _clean(program: Program) -> Program:
    """Constants folded, guards that cannot act and repeated or unused operations dropped."""
    held = tuple(n for n in program.outputs if n in program.inputs)
    nonnegative = set(held)
    while True:  # the largest set of states that stay nonnegative if they are, and zero is where they start
        signs = _signs(program, nonnegative)
        kept = {n for n in nonnegative if _sign(program.outputs[n], signs) != "any"}
        if kept == nonnegative:
            break
        nonnegative = kept
    out = Program(positive=program.positive)
    where: dict[int, Value] = {}
    seen: dict[Any, int] = {}
    signs_out: dict[int, Sign] = {}

    def emit(name: str, inputs: tuple[Value, ...], sign: Sign) -> Value:
        shaped = any(out.shaped(x) for x in inputs)
        key = (name, tuple((type(x), x) for x in inputs))  # 1 and 1.0 are equal, and not the same
        if key not in seen:
            seen[key] = out.add(name, inputs, shaped)
        signs_out[seen[key]] = sign
        return seen[key]

    for i, op in enumerate(program.operations):
        if op.name == "input":
            index = where[i] = out.add("input", (), op.shaped)
            out.names[index] = program.names[i]
            signs_out[index] = signs[i]
            continue
        inputs = tuple(where[x] if isinstance(x, int) else x for x in op.inputs)
        folded = _fold(op.name, inputs, signs_out, out)
        where[i] = emit(op.name, inputs, _sign_of(op.name, inputs, signs_out)) if folded is None else folded
    out.outputs = {n: where[v] if isinstance(v, int) else v for n, v in program.outputs.items()}
    out.nonnegative = frozenset(nonnegative)
    return _used(_scaled_roots(_used(out)))


def _scaled_roots(program: Program) -> Program:
    """sqrt(x / n) + c as (sqrt(x) + c sqrt(n)) / sqrt(n) for a number n > 0: one operation on entries less."""
    signs = _signs(program, set(program.nonnegative))
    out = Program(nonnegative=program.nonnegative, positive=program.positive)
    where: dict[int, Value] = {}
    positive: set[Value] = set()
    scaled: set[Value] = set()

    def divisor(value: Value, known: set[Value]) -> tuple[Value, int] | None:
        """(x, n) of a value x / n."""
        op = out.operations[value] if isinstance(value, int) else None
        if op is None or op.name != "div" or not isinstance(op.inputs[1], int) or value not in known:
            return None
        return op.inputs[0], op.inputs[1]

    for i, op in enumerate(program.operations):
        inputs = tuple(where[x] if isinstance(x, int) else x for x in op.inputs)
        quotient = divisor(inputs[0], positive) if op.name == "pow" and op.shaped and inputs[1] == 0.5 else None
        added = divisor(inputs[0], scaled) if op.name == "add" and not out.shaped(inputs[1]) else None
        if quotient is not None:
            n = out.add("pow", (quotient[1], 0.5), False)
            where[i] = out.add("div", (out.add("pow", (quotient[0], 0.5), True), n), True)
            scaled.add(where[i])
        elif added is not None:
            c = out.add("mul", (inputs[1], added[1]), False)
            where[i] = out.add("div", (out.add("add", (added[0], c), True), added[1]), True)
        else:
            where[i] = out.add(op.name, inputs, op.shaped)
            if op.name == "div" and op.shaped and _sign(op.inputs[1], signs) == "positive":
                positive.add(where[i])
            if i in program.names:
                out.names[where[i]] = program.names[i]  # type: ignore[index]
    out.outputs = {n: where[v] if isinstance(v, int) else v for n, v in program.outputs.items()}
    return out


def _fold(name: str, inputs: tuple[Value, ...], signs: dict[int, Sign], program: Program) -> Value | None:
    """What an operation comes to without being done, or None."""
    if all(isinstance(x, float) for x in inputs):
        return float(EVALUATE[name](*inputs))
    a, *rest = inputs
    if name == "mul" and any(_is(x, 1.0) for x in inputs):
        return inputs[1] if _is(a, 1.0) else a
    if name == "mul" and any(x == 0.0 and isinstance(x, float) for x in inputs):
        return None  # 0 * x keeps what is not a number
    if name == "div" and _is(rest[0], 1.0):
        return a
    if name in ("add", "sub") and isinstance(rest[0], float) and rest[0] == 0.0:
        return a
    if name == "add" and isinstance(a, float) and a == 0.0:
        return rest[0]
    if name == "pow" and _is(rest[0], 1.0):
        return a
    if name in ("gt", "ge", "ne", "lt", "le", "eq") and _is(rest[0], 0.0) and isinstance(a, int):
        sign = signs.get(a, "any")
        if sign == "positive":
            return 1.0 if name in ("gt", "ge", "ne") else 0.0
        if sign == "nonnegative" and name in ("ge", "lt"):
            return 1.0 if name == "ge" else 0.0
    if name == "maximum" and rest == [0.0] and isinstance(a, int) and signs.get(a, "any") != "any":
        return a
    if name == "where" and isinstance(a, float):
        return rest[0] if a else rest[1]
    if name == "where" and isinstance(a, int):
        return _unguarded(a, rest, signs, program)
    return None


def _unguarded(test: int, cases: list[Value], signs: dict[int, Sign], program: Program) -> Value | None:
    """where(x > 0, (x where x > 0, else 1)^p, 0) = x^p for x >= 0 and p > 0."""
    op = program.operations[test]
    if op.name != "gt" or not _is(op.inputs[1], 0.0) or not isinstance(op.inputs[0], int):
        return None
    x, value = op.inputs[0], cases[0]
    if signs.get(x, "any") == "any" or not isinstance(value, int) or not _is(cases[1], 0.0):
        return None
    then = program.operations[value]
    if then.name != "pow" or not _positive_part(then.inputs[0], x, program):
        return None
    power = then.inputs[1]
    if not isinstance(power, float) or power <= 0.0:
        return None
    signs[len(program.operations)] = "nonnegative"
    return program.add("pow", (x, power), program.shaped(x))


def _is(value: Value, constant: float) -> bool:
    """Whether a value is this constant, and not the operation of that number."""
    return isinstance(value, float) and value == constant


def _positive_part(value: Value, x: int, program: Program) -> bool:
    """Whether a value is x where x > 0."""
    if value == x:
        return True
    if not isinstance(value, int):
        return False
    op = program.operations[value]
    if op.name != "where" or not isinstance(op.inputs[0], int) or op.inputs[1] != x:
        return False
    test = program.operations[op.inputs[0]]
    return test.name == "gt" and test.inputs[0] == x and _is(test.inputs[1], 0.0)


def _used(program: Program) -> Program:
    """Without operations whose result nobody reads."""
    needed: set[int] = {v for v in program.outputs.values() if isinstance(v, int)}
    for i in reversed(range(len(program.operations))):
        if i in needed or program.operations[i].name == "input":
            needed.update(x for x in program.operations[i].inputs if isinstance(x, int))
    out = Program(positive=program.positive)
    where: dict[int, int] = {}
    for i, op in enumerate(program.operations):
        if i not in needed and op.name != "input":
            continue
        where[i] = out.add(op.name, tuple(where[x] if isinstance(x, int) else x for x in op.inputs), op.shaped)
        if i in program.names:
            out.names[where[i]] = program.names[i]
    out.outputs = {n: where[v] if isinstance(v, int) else v for n, v in program.outputs.items()}
    out.nonnegative = program.nonnegative
    return out


# ---- signs -----------------------------------------------------------------------------------------------------------


def _signs(program: Program, nonnegative: set[str]) -> dict[int, Sign]:
    signs: dict[int, Sign] = {}
    for i, op in enumerate(program.operations):
        if op.name == "input":
            name = program.names[i]
            signs[i] = "positive" if name in program.positive else "nonnegative" if name in nonnegative else "any"
        else:
            signs[i] = _sign_of(op.name, op.inputs, signs)
    return signs


def _sign(value: Value, signs: Mapping[int, Sign]) -> Sign:
    if isinstance(value, int):
        return signs.get(value, "any")
    return "positive" if value > 0 else "nonnegative" if value == 0 else "any"


def _sign_of(name: str, inputs: tuple[Value, ...], signs: Mapping[int, Sign]) -> Sign:
    s = [_sign(x, signs) for x in inputs]
    if name == "mul" and inputs[0] == inputs[1] and all(isinstance(x, int) for x in inputs):
        return "nonnegative"
    if name == "mul":  # a product of positives may underflow to zero
        return "any" if "any" in s else "nonnegative"
    if name == "div":
        return "any" if "any" in s else "nonnegative"
    if name == "add":
        return "any" if "any" in s else "positive" if "positive" in s else "nonnegative"
    if name in ("abs", "exp", "sqrt"):
        return "nonnegative"
    if name == "pow":
        even = isinstance(inputs[1], float) and inputs[1] % 2 == 0
        return "nonnegative" if even or s[0] != "any" else "any"
    if name == "maximum":
        return "positive" if "positive" in s else "nonnegative" if "nonnegative" in s else "any"
    if name == "where":
        return "any" if "any" in s[1:] else "positive" if s[1] == s[2] == "positive" else "nonnegative"
    return "any"


_TENSORS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in ("mul", "add", "sub", "div", "neg", "pow", "sqrt", "rsqrt", "abs")},
    **{name: getattr(torch, name) for name in ("reciprocal", "sign", "exp", "log", "log1p", "expm1", "sinh", "asinh")},
    **{name: getattr(torch, name) for name in ("tanh", "maximum", "minimum", "clamp")},
    **{name: getattr(torch, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": lambda c, a, b: torch.where(c != 0, a, b),
}  # fmt: skip
