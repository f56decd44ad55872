"""A tuple's step as a straight-line program: numbers computed once a step, and operations on every entry.

The step is traced, not written again: whatever `StateUpdate.step` does with tensors of one shape becomes a list of
operations in static single assignment. Where it may be run over stacks, reductions over rows, columns and leaves are
operations like others (`trace(..., stack=...)`); any other that mixes entries (products, sorts, and reductions
elsewhere) is refused, and named. What a tracer sets apart is one operation, whatever it does: a function (`apart`), a
statistic that keeps other tensors than leaves have entries (`observed`), and what is linear in a leaf given such values
(`whole`); `axes.programs.stages` makes programs of what is around them. Guards that can never act are dropped by a sign
analysis that assumes nothing but that every state starts at zero: `sqrt(v) + eps` needs no test for zero once v is a
sum of squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from axes.errors import AxesError
from axes.programs.arithmetic import EVALUATE
from axes.programs.numbers import Number

_SIGNS = {"mul": "*", "add": "+", "sub": "-"}
Value = int | float  # the number of an operation, or a constant
Sign = Literal["positive", "nonnegative", "any"]
Extent = tuple[bool, bool]  # whether a value is as long as the parameter along its columns, and along its rows
FULL: Extent = (True, True)
_SHAPE = (3, 5)  # what is traced: any two sizes that no number in a rule equals
_APART, _OBSERVED, _WHOLE = "apart", "observed", "whole"  # operations of whole tensors
_WHOLES: dict[str, Callable[..., Tensor]] = {}  # by their names in programs
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin"})  # over the last two dimensions or one of them, which are kept

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
_CONSTANTS: Mapping[str, float | None] = {  # operations that make constants, None where they are told what
    "ones_like": 1.0, "ones": 1.0, "new_ones": 1.0, "zeros_like": 0.0, "zeros": 0.0, "new_zeros": 0.0,
    "full": None, "full_like": None, "new_full": None, "scalar_tensor": None,
}  # fmt: skip
_TESTS = frozenset({"gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not"})  # their results are truth values
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
    """One operation on earlier values. shaped: its result has one entry for every entry of the parameter.

    In a program for stacks, one for every entry, row, column or leaf: `Program.extent_of`.
    """

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
    extents: Mapping[str, Extent] = field(default_factory=dict)  # of inputs that have not an entry for every entry
    _numbers: Any = field(default=None, compare=False, repr=False)

    def add(self, name: str, inputs: tuple[Value, ...], shaped: bool) -> int:
        self.operations.append(Operation(name, inputs, shaped))
        return len(self.operations) - 1

    def shaped(self, value: Value) -> TypeGuard[int]:
        """Whether a value has one entry for every entry of the parameter."""
        return isinstance(value, int) and self.operations[value].shaped

    def extent_of(self) -> list[Extent]:
        """Of every value; of a number as if it were one of each leaf."""
        found: list[Extent] = []
        for i, op in enumerate(self.operations):
            if op.name == "input":
                found.append(self.extents.get(self.names[i], FULL) if op.shaped else (False, False))
                continue
            inputs = [found[x] for x in op.inputs if isinstance(x, int)]
            own = (any(x[0] for x in inputs), any(x[1] for x in inputs))
            gone = reduced(op.name)
            found.append((own[0] and -2 not in gone, own[1] and -1 not in gone))
        return found

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
                made = _TENSORS[op.name](*inputs)
                values.append(made.to(torch.float64) if made.dtype == torch.bool else made)  # a test may be a factor
        return values

    def without(self, names: frozenset[str]) -> Program:
        """The program for a step in which these numbers are 0, and what they multiply is nothing: a decay, say."""
        zero: set[Value] = {i for i, name in self.names.items() if name in names}
        where: dict[int, Value] = {i: 0.0 for i in zero if isinstance(i, int)}
        out = Program(positive=self.positive, extents=self.extents)
        for i, op in enumerate(self.operations):
            if i in where:
                continue
            inputs = tuple(where[x] if isinstance(x, int) else x for x in op.inputs)
            if op.name == "mul" and any(_is(x, 0.0) for x in inputs):
                where[i] = 0.0
                continue
            where[i] = index = out.add(op.name, inputs, op.shaped)
            if i in self.names:
                out.names[index] = self.names[i]
        out.outputs = {n: where[v] if isinstance(v, int) else v for n, v in self.outputs.items()}
        return _clean(out)

    def __str__(self) -> str:
        """The program as text, numbers of a step first."""
        lines = []
        for i, op in enumerate(self.operations):
            args = ", ".join(f"%{x}" if isinstance(x, int) else f"{x:g}" for x in op.inputs)
            what = self.names[i] if op.name == "input" else f"{op.name}({args})"
            lines.append(f"%{i}{'' if op.shaped else ' number'} = {what}")
        return "\n".join([*lines, *(f"{n} <- {f'%{v}' if isinstance(v, int) else v}" for n, v in self.outputs.items())])


def reduced(name: str) -> tuple[int, ...]:
    """The dimensions that an operation of this name takes together."""
    kind, *dims = name.split(" ")
    return tuple(map(int, dims)) if kind in _REDUCTIONS else ()


def trace(
    step: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    shaped: tuple[str, ...],
    numbers: tuple[str, ...],
    stack: Mapping[str, Tensor] | None = None,
) -> Program:
    """The program of a pure function from named tensors to named tensors.

    shaped: names of inputs with one entry for every entry of the parameter; numbers: names of 0-d inputs. A `Number`
    that meets a tensor is one more of these, under the text of its formula.
    stack: what the shaped inputs are like, if the program is for stacks of matrices of this one shape, the parameter's,
    and dtype: they need no storage. Others have an entry for every entry of it, row, column or leaf.
    Raises NotElementwise with the first operation that is not entry by entry.
    """
    if stack is None:
        entries = torch.linspace(0.5, 1.5, math.prod(_SHAPE)).reshape(_SHAPE)  # random numbers are the caller's
        given, device, full = {n: entries.clone() for n in shaped}, None, _SHAPE
    else:
        given, device = {n: torch.empty_like(stack[n]) for n in shaped}, stack[PARAMETER].device
        full = (stack[PARAMETER].shape[-2], stack[PARAMETER].shape[-1])
    given |= {n: torch.tensor(0.5, device=device) for n in numbers}
    met = _Numbers(device)
    with Unrecorded(), met:
        step(given)
    given |= {n: torch.tensor(x.value, device=device) for n, x in met.found.items()}
    long = {} if stack is None else {n: extent for n in shaped if (extent := _extent(given[n].shape, full)) != FULL}
    program = Program(positive=frozenset(n for n, x in met.found.items() if x > 0), extents=long)
    for name in given:
        program.names[program.add("input", (), name in shaped)] = name
    recorded = _Recorded(program, list(given.values()), full, stack is not None)
    with recorded, _Numbers(device, given):
        out = step(given)
    for name, result in out.items():
        value = recorded.value(result)
        if value is None:
            raise NotElementwise(f"{name} reads a tensor that is neither an entry nor a number of the step")
        program.outputs[name] = value
    if any(isinstance(x, float) and math.isnan(x) for op in program.operations for x in op.inputs):
        raise ForgottenNumber("a hyperparameter is used in a way that hides how it was computed")
    return _clean(program)


def apart(which: int, function: Callable[[], Tensor] | None, value: Tensor, *others: Tensor) -> Tensor:
    """What a function makes of some values of a step, as large as the first of them: one operation of a program.

    which: of the functions that the tracer knows. function: it itself where it is to be followed if it can be. It is
    not called where nobody records what it does.
    """
    record = getattr(_get_current_dispatch_mode(), "apart", None)
    return torch.ones_like(value) if record is None else record(which, function, value, others)


def observed(which: int, drive: Tensor) -> Tensor:
    """The value of a statistic that keeps other tensors than a leaf has entries, for `whole` and `apart` alone.

    which: of those that the tracer knows.
    """
    mode: Any = _get_current_dispatch_mode()
    value: Tensor = mode.observed(which, drive)
    return value


def whole(function: Callable[..., Tensor], x: Tensor, *values: Tensor) -> Tensor:
    """function(x, *values), linear in x and as large: one operation of a program where the values are `observed`.

    The repr of a function says all about it.
    """
    if torch.compiler.is_compiling():
        return function(x, *values)
    record = getattr(_get_current_dispatch_mode(), "whole", None)
    made = None if record is None else record(function, x, values)
    return function(x, *values) if made is None else made


def called(name: str) -> str | None:
    """Which function or statistic an operation of this name is, or None."""
    kind, _, which = name.partition(" ")
    return which if kind in (_APART, _OBSERVED, _WHOLE) else None


def observes(name: str) -> bool:
    """Whether an operation of this name is a statistic, whose value other functions alone read."""
    return name.startswith(_OBSERVED)


def function_of(which: str) -> Callable[..., Tensor] | None:
    """The function that `whole` was given, if it is one."""
    return _WHOLES.get(which)


@final
class Unrecorded(TorchDispatchMode):
    """What a step does without a record of it, but for what is set apart. shapes: every `whole` is for its shape."""

    def __init__(self, shapes: bool = False) -> None:
        super().__init__()
        self.shapes = shapes
        self.values: list[Tensor] = []

    def observed(self, which: int, drive: Tensor) -> Tensor:
        self.values.append(torch.ones_like(drive))
        return self.values[-1]

    def whole(self, function: Callable[..., Tensor], x: Tensor, values: Sequence[Tensor]) -> Tensor | None:
        known = self.shapes or any(a is b for a in values for b in self.values)
        return torch.ones_like(x) if known else None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Numbers(TorchFunctionMode):
    """Gives torch 0-d tensors for the numbers that it meets. given: the tensors; without, any are made and found."""

    def __init__(self, device: torch.device | None, given: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.device, self.given = device, given
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
        return torch.tensor(number.value, device=self.device)


def _extent(shape: Sequence[int], full: tuple[int, int]) -> Extent:
    """NotElementwise unless it is that of an entry, a row, a column or a leaf."""
    if len(shape) != 2 or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
        raise NotElementwise(f"a tensor of shape {tuple(shape)} beside a parameter of shape {full}: entries are mixed")
    return shape[0] == full[0], shape[1] == full[1]


@final
class _Recorded(TorchDispatchMode):
    """What torch does with some tensors, added to a program. What depends on others is not recorded."""

    def __init__(self, program: Program, inputs: Sequence[Tensor], full: tuple[int, int], stacked: bool) -> None:
        super().__init__()
        self.program, self.full, self.stacked = program, full, stacked
        self.known: dict[int, tuple[Tensor, Value]] = {id(x): (x, i) for i, x in enumerate(inputs)}

    def value(self, x: Any) -> Value | None:
        """What a tensor is in the program."""
        found = self.known.get(id(x))
        return None if found is None else found[1]

    def apart(
        self, which: int, function: Callable[[], Tensor] | None, value: Tensor, others: Sequence[Tensor]
    ) -> Tensor:
        """See `apart`."""
        length, known = len(self.program.operations), dict(self.known)
        try:
            if function is not None:
                return function()
        except (AxesError, NotImplementedError, RuntimeError):  # what reads its data has none
            del self.program.operations[length:]
            self.known = known
        return self._made(f"{_APART} {which}", value, [self.value(x) for x in (value, *others)])

    def observed(self, which: int, drive: Tensor) -> Tensor:
        """See `observed`."""
        return self._made(f"{_OBSERVED} {which}", drive, (self.value(drive),))

    def whole(self, function: Callable[..., Tensor], x: Tensor, values: Sequence[Tensor]) -> Tensor | None:
        """See `whole`; numbers that x is multiplied or divided by are those of what is made."""
        inputs = [self.value(value) for value in values]
        if not any(map(self._observed, inputs)):
            return None
        value, numbers = self.value(x), list[tuple[str, Value]]()
        while isinstance(value, int) and (op := self.program.operations[value]).name in ("mul", "div"):
            a, b = op.inputs if self.program.shaped(op.inputs[0]) or op.name == "div" else op.inputs[::-1]
            if not self.program.shaped(a) or self.program.shaped(b):
                break
            value, numbers = a, [*numbers, (op.name, b)]
        _WHOLES[repr(function)] = function
        out = self._made(f"{_WHOLE} {function!r}", x, (value, *inputs))
        made = self.known[id(out)][1]
        for name, number in reversed(numbers):
            made = self.program.add(name, (made, number), True)
        self.known[id(out)] = (out, made)
        return out

    def _observed(self, value: Value | None) -> bool:
        return isinstance(value, int) and observes(self.program.operations[value].name)

    def _made(self, name: str, like: Tensor, inputs: Sequence[Value | None]) -> Tensor:
        values = tuple(x for x in inputs if x is not None)
        whole = len(values) == len(inputs) and all(map(self.program.shaped, values))
        if not (whole and self.stacked and _extent(like.shape, self.full) == FULL):
            raise NotElementwise("entries are mixed of what is no tensor of a leaf")
        out = torch.ones_like(like)
        self.known[id(out)] = (out, self.program.add(name, values, True))
        return out

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.__name__.split(".")[0], kwargs or {}
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        follows = all(id(x) in self.known for x in tensors)
        if any(self._observed(self.value(x)) for x in tensors):
            raise NotElementwise(f"{name} reads a statistic that has no entry for every entry")
        if follows and tensors and name == "_local_scalar_dense":
            raise NotElementwise("the step branches on a number")
        out = function(*args, **kwargs)
        if follows and (tensors or name in _CONSTANTS):
            self.known[id(out)] = (out, self._translated(name, out, args, kwargs))
        return out

    def _translated(self, name: str, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        if name == "scalar_tensor":
            return float(args[0])
        if name in _CONSTANTS:
            fill = _CONSTANTS[name]
            return float(args[1]) if fill is None else fill
        inputs = tuple(found if isinstance(x, Tensor) and (found := self.value(x)) is not None else x for x in args)
        if self.stacked and name in _REDUCTIONS:
            return self._reduced(name, inputs[0], args, kwargs)
        if not isinstance(out, Tensor):
            raise NotElementwise(f"{name} is not an operation on every entry")
        if not self.stacked and out.shape != self.full and out.numel() != 1:
            raise NotElementwise(f"{name} gives a tensor of another shape: entries are mixed")
        values = [i for x, i in zip(args, inputs, strict=True) if isinstance(x, Tensor)]
        if self.stacked and any(map(self.program.shaped, values)):
            _extent(out.shape, self.full)
            if name == "_to_copy" and args[0].dtype == torch.bool != out.dtype:
                return self._number(inputs[0])
            if name in ("view", "_unsafe_view") and args[0].shape != out.shape:
                raise NotElementwise(f"{name} moves entries")
        if name in _SAME:
            return inputs[0]
        if name not in _OPERATIONS:
            raise NotElementwise(f"{name} is not an operation on every entry")
        if not all(isinstance(x, int | float | bool) for x in inputs):
            raise NotElementwise(f"{name} takes something else than numbers and entries")
        inputs = tuple(x if isinstance(y, Tensor) else float(x) for x, y in zip(inputs, args, strict=True))
        alpha = kwargs.get("alpha", 1)
        operation = _OPERATIONS[name]
        if operation == "rsub":
            operation, inputs = "sub", (inputs[1], inputs[0])
        if alpha != 1:
            inputs = (inputs[0], self.program.add("mul", (inputs[1], float(alpha)), self.program.shaped(inputs[1])))
        shaped = any(map(self.program.shaped, inputs)) if self.stacked else out.shape == self.full
        return self.program.add(operation, inputs, shaped)

    def _number(self, test: Value) -> Value:
        """0 or 1 for a truth value, in the dtype of what was compared."""
        compared = test
        while isinstance(compared, int) and (op := self.program.operations[compared]).name in _TESTS:
            compared = next(x for x in op.inputs if self.program.shaped(x))
        return self.program.add("truth", (test, compared), True)

    def _reduced(self, name: str, x: Value, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        """A reduction that keeps its dimensions, of a value that has them."""
        seen = args[0]
        dims, kept = (*args[1:], *kwargs.values(), (), False)[:2]
        dims = sorted(d - seen.ndim if d >= 0 else d for d in ([dims] if isinstance(dims, int) else dims or ()))
        if kept is not True or not dims or not self.program.shaped(x):
            raise NotElementwise(f"{name} leaves dimensions out")
        extents = zip(_extent(seen.shape, self.full), self.program.extent_of()[x], self.full, strict=True)
        if any(long and not there and size > 1 for long, there, size in extents):
            raise NotElementwise(f"{name} is of entries that were repeated")
        if seen.dtype == torch.bool:
            x = self._number(x)
        if name == "mean" and dims == [-2, -1]:
            whole = self.program.add("sum -2 -1", (x,), True)
            return self.program.add("div", (whole, float(math.prod(self.full))), True)
        return self.program.add(" ".join([name, *map(str, dims)]), (x,), True)


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
    out = Program(positive=program.positive, extents=program.extents)
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
    return _used(_scaled_roots(_used(_numbers_outside(out))))


def _numbers_outside(program: Program) -> Program:
    """Numbers and signs taken out of squares and sums: the norm of c x is that of x, which others may need as well."""
    if not any(reduced(op.name) for op in program.operations):
        return program
    out = Program(nonnegative=program.nonnegative, positive=program.positive, extents=program.extents)
    where: dict[int, int] = {}
    seen: dict[Any, int] = {}

    def add(name: str, *inputs: Value) -> int:
        key = (name, tuple((type(x), x) for x in inputs))
        if key not in seen:
            seen[key] = out.add(name, inputs, any(map(out.shaped, inputs)))
        return seen[key]

    def outside(x: Value) -> tuple[Value, Value]:
        """(c, y) of x = c y."""
        op = out.operations[x] if out.shaped(x) else None
        if op is not None and op.name == "neg":
            return -1.0, op.inputs[0]
        numbers = [i for i in op.inputs if not out.shaped(i)] if op is not None and op.name == "mul" else []
        return (numbers[0], next(filter(out.shaped, op.inputs))) if op is not None and numbers else (1.0, x)

    for i, op in enumerate(program.operations):
        inputs = tuple(where[x] if isinstance(x, int) else x for x in op.inputs)
        if op.name == "input":
            where[i] = out.add("input", (), op.shaped)
            out.names[where[i]] = program.names[i]
            continue
        square = op.name == "mul" and op.shaped and inputs[0] == inputs[1]
        if square or (op.name == "pow" and op.shaped and _is(inputs[1], 2.0)):
            c, y = outside(inputs[0])
            product = add("mul", y, y)
            plain = not isinstance(c, int) and abs(c) == 1.0
            where[i] = product if plain else add("mul", add("mul", c, c), product)
        elif op.name.startswith(("sum", "mean")):
            c, y = outside(inputs[0])
            where[i] = add(op.name, y) if _is(c, 1.0) else add("mul", c, add(op.name, y))
        else:
            where[i] = add(op.name, *inputs)
    out.outputs = {n: where[v] if isinstance(v, int) else v for n, v in program.outputs.items()}
    return out


def _scaled_roots(program: Program) -> Program:
    """sqrt(x / n) + c as (sqrt(x) + c sqrt(n)) / sqrt(n) for a number n > 0: one operation on entries less."""
    signs = _signs(program, set(program.nonnegative))
    out = Program(nonnegative=program.nonnegative, positive=program.positive, extents=program.extents)
    where: dict[int, Value] = {}
    positive: set[Value] = set()
    scaled: set[Value] = set()

    def divisor(value: Value, known: set[Value]) -> tuple[Value, int] | None:
        """(x, n) of a value x / n."""
        op = out.operations[value] if isinstance(value, int) else None
        if op is None or op.name != "div" or not isinstance(op.inputs[1], int) or value not in known:
            return None
        if out.shaped(op.inputs[1]):
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
    if called(name) is not None:
        return None
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
    """where(x > 0, (x where x > 0, else 1)^p, 0) = x^p for x >= 0 and p > 0; the same of sqrt."""
    op = program.operations[test]
    if op.name != "gt" or not _is(op.inputs[1], 0.0) or not isinstance(op.inputs[0], int):
        return None
    x, value = op.inputs[0], cases[0]
    if signs.get(x, "any") == "any" or not isinstance(value, int) or not _is(cases[1], 0.0):
        return None
    then = program.operations[value]
    if then.name not in ("pow", "sqrt") or not _positive_part(then.inputs[0], x, program):
        return None
    if then.name == "sqrt":
        signs[len(program.operations)] = "nonnegative"
        return program.add("sqrt", (x,), program.shaped(x))
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
    out = Program(positive=program.positive, extents=program.extents)
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
    if name in ("abs", "exp", "sqrt", "truth"):
        return "nonnegative"
    if reduced(name):
        return s[0]
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
