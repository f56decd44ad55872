"""A program over many tensors by torch's multi-tensor operations, in place, block by block in cache.

A shaped value is kept as a term  c x,  c x y  or  c x / y  with a number c for as long as possible, so that sums become
add, addcmul and addcdiv with a factor. An operand that nobody reads any more is overwritten; a state ends in its own
tensor. Values of rows, columns and leaves are broadcast, and hold no entries. On a CPU all operations run over a block
of entries before the next block is touched: one pass over memory.
A program that torch has as one operation there is that operation (`library`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, final

import torch
from torch import Tensor

from axes.programs.arithmetic import evaluated
from axes.programs.library import recognised
from axes.programs.program import FULL, PARAMETER, Extent, Operation, Program, Value, reduced

_LEAF = "sum -2 -1"
_DOT = 1 << 14  # entries from which an inner product is faster than products and their sum (measured, CPUs),
_EXACT = 1 << 18  # and up to which it is as exact as that in float32
BLOCK = 1 << 18  # entries of a block: a handful of float32 arrays of this size stay in cache (measured)
Real = float | Tensor  # a number of a step, 0-d where it is on the device
Kind = Literal["plain", "product", "quotient"]
Lists = list[Tensor]
_TESTS = frozenset({"gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not", "where", "truth"})  # truth values: come, go


@final
@dataclass(frozen=True)
class _Term:
    """number * x, number * x * y or number * x / y."""

    number: tuple[Value, ...]  # factors
    over: tuple[Value, ...]  # divisors
    negative: bool
    kind: Kind
    x: int
    y: int = -1


@final
@dataclass(frozen=True)
class _Step:
    """One multi-tensor operation: target (a register) from sources, with numbers; target == sources[0] is in place."""

    name: str
    target: int
    sources: tuple[int, ...]
    numbers: tuple[tuple[tuple[Value, ...], tuple[Value, ...], bool], ...] = ()
    number: int = -1  # the value, a number, that it makes of them


@final
class Schedule:
    """Steps over registers: registers below `inputs` are the input tensors in the order of `names`."""

    def __init__(self, program: Program, keep: Sequence[str] = ("g",), alone: bool = False) -> None:
        """keep: inputs that must not be written. alone: for one matrix on a CPU, of which the values of a leaf are
        numbers like any others."""
        self.program, self.alone = program, alone
        self.library = recognised(program)  # torch's own operation, where it has one
        shaped = [i for i, op in enumerate(program.operations) if op.name == "input" and op.shaped]
        self.names = [program.names[i] for i in shaped]
        self.steps: list[_Step] = []
        self.released: list[tuple[int, ...]] = []
        _Selection(self, program, shaped, frozenset(keep)).run()
        self.registers = 1 + max([len(shaped) - 1, *(s.target for s in self.steps)])
        self._plan = [  # what a step needs, looked up once
            (_OPERATIONS[s.name], s.target, s.target in s.sources[:1], s.sources, s.numbers, s.number, released)
            for s, released in zip(self.steps, self.released, strict=True)
        ]

    def run(self, lists: Sequence[Lists], values: Sequence[Real], fits: bool = False) -> None:
        """Execute over one block: lists of tensors for each name, overwritten with the outputs.

        values: of the program's numbers; 0-d tensors on the tensors' device are never waited for. fits: all tensors
        are contiguous ones on a CPU, which torch's own operation for a whole program asks for.
        """
        self.over((lists,), values, fits)

    def over(self, blocks: Iterable[Sequence[Lists]], values: Sequence[Real], fits: bool = False) -> None:
        """The same over one block after another."""
        whole = self.library if fits else None
        known: list[list[Real]] | None = None  # what every step multiplies and adds: once for all blocks
        for lists in blocks:
            if whole is not None and whole.run(lists, values):
                continue
            if known is None and not self.alone:
                known = self.numbers(values)
            self._execute(lists, values, known)

    def numbers(self, values: Sequence[Real]) -> list[list[Real]]:
        """What every step multiplies and adds, given the program's numbers."""
        return [[_value(n, values) for n in numbers] for *_, numbers, _, _ in self._plan]

    def _execute(self, lists: Sequence[Lists], values: Sequence[Real], known: list[list[Real]] | None) -> None:
        registers: list[Any] = [*lists, *[None] * (self.registers - len(lists))]
        values = list(values) if known is None else values
        for i, (operation, target, here, sources, numbers, number, released) in enumerate(self._plan):
            given = [registers[s] for s in sources]
            made = operation(here, given, [_value(n, values) for n in numbers] if known is None else known[i])
            if number < 0:
                registers[target] = made
            else:
                values[number] = made  # type: ignore[index]
            for r in released:
                registers[r] = None


def _value(factors: tuple[tuple[Value, ...], tuple[Value, ...], bool], values: Sequence[Real]) -> Real:
    number, over, negative = factors
    out: Real = -1.0 if negative else 1.0
    for f in number:
        out *= values[f] if isinstance(f, int) else f
    for f in over:
        out /= values[f] if isinstance(f, int) else f
    return out


class _Selection:
    """Chooses operations for a program, output by output."""

    def __init__(self, schedule: Schedule, program: Program, shaped: list[int], keep: frozenset[str]) -> None:
        self.schedule, self.program, self.keep = schedule, program, keep
        self.terms: dict[int, _Term] = {}
        self.register: dict[int, int] = {}  # of a value that is materialised
        self.next = len(shaped)
        for r, i in enumerate(shaped):
            self.register[i] = r
            self.terms[i] = _Term((), (), False, "plain", i)
        self.own = {r: program.names[i] for i, r in self.register.items()}
        self.extent = program.extent_of()
        self.order = self._order()

    def _order(self) -> list[int]:
        """Values in the order of need: the parameter's first, so that states are overwritten last."""
        done: dict[int, None] = {}

        def visit(value: Value) -> None:
            if isinstance(value, int) and self.program.operations[value].shaped and value not in done:
                for x in self.program.operations[value].inputs:
                    visit(x)
                done[value] = None

        first = sorted(self.program.outputs, key=lambda n: n != PARAMETER)
        for name in first:
            visit(self.program.outputs[name])
        return list(done)

    def run(self) -> None:
        for place, value in enumerate(self.order):
            self.place = place
            op = self.program.operations[value]
            if op.name == "input":
                continue
            if not self._shaped(value):
                self._number(value, op)
                continue
            self.terms[value] = self._term(value, op.name, op.inputs)
            t = self.terms[value]
            free = t.kind == "plain" and not t.number and not t.over  # a change of sign costs nothing later
            if self._left(value):
                self._materialise(value)
            elif self._uses(value) != 1 and not free:
                self._plain(value, self._compute(_flip(t, t.negative)))
                self.terms[value] = _Term((), (), t.negative, "plain", value)  # a sign is left to whoever reads it
        self.place = len(self.order)
        targets = {n: self.schedule.names.index(n) for n in self.program.outputs if n in self.schedule.names}
        moves = []
        for name, target in targets.items():
            output = self.program.outputs[name]
            assert isinstance(output, int)
            source = self._materialise(output)
            if source != target:
                moves.append((target, source))
        self._move(dict(moves))
        self._release()

    def _move(self, moves: dict[int, int]) -> None:
        """Copies target <- source as if all were made at once: none is written before it has been read."""
        while moves:
            target = next((t for t in moves if t not in moves.values()), None)
            if target is None:  # they go around: one of them waits elsewhere
                kept, waits = self._new(), next(iter(moves))
                self._emit("scale", kept, (waits,), (((), (), False),))
                moves = {t: kept if s == waits else s for t, s in moves.items()}
            else:
                self._emit("copy", target, (target, moves.pop(target)))

    # ---- terms -------------------------------------------------------------------------------------------------

    def _term(self, value: int, name: str, inputs: tuple[Value, ...]) -> _Term:
        shaped = [x for x in inputs if self._shaped(x)]
        if name == "neg":
            t = self.terms[shaped[0]]
            return _Term(t.number, t.over, not t.negative, t.kind, t.x, t.y)
        if name == "mul" and len(shaped) == 1:
            (number,) = [x for x in inputs if not self._shaped(x)]
            t = self.terms[shaped[0]]
            return _Term((*t.number, number), t.over, t.negative, t.kind, t.x, t.y)
        if name == "div" and self._shaped(inputs[0]) and len(shaped) == 1:
            t = self.terms[inputs[0]]
            return _Term(t.number, (*t.over, inputs[1]), t.negative, t.kind, t.x, t.y)
        if name == "pow" and inputs[1] == 2.0 and isinstance(inputs[1], float) and shaped:
            a = self._factor(inputs[0])
            return _Term((*a.number, *a.number), (*a.over, *a.over), False, "product", a.x, a.x)
        if name == "where" and shaped == [inputs[1]] and self._guards(inputs[0], self.terms[shaped[0]], inputs[2]):
            t = self.terms[shaped[0]]
            return _Term((*t.number, inputs[0]), t.over, t.negative, t.kind, t.x, t.y)
        if name == "sign":
            return self._signs(value, inputs)
        if name == _LEAF:
            return self._summed(value, inputs[0])
        if name in ("mul", "div") and len(shaped) == 2:
            a, b = self._factor(inputs[0]), self._factor(inputs[1])
            if name == "mul" and self.extent[a.x] != self.extent[value]:
                a, b = b, a  # what is as long as the product can be overwritten by it
            negative = a.negative != b.negative
            if name == "mul":
                return _Term((*a.number, *b.number), (*a.over, *b.over), negative, "product", a.x, b.x)
            return _Term((*a.number, *b.over), (*a.over, *b.number), negative, "quotient", a.x, b.x)
        if name in ("add", "sub"):
            return self._sum(value, name, inputs)
        return self._apply(value, name, inputs)

    def _factor(self, value: Value) -> _Term:
        """The term of an operand, its product or quotient computed."""
        assert isinstance(value, int)
        t = self.terms[value]
        if t.kind != "plain":
            self._materialise(value)
            t = self.terms[value]
        return t

    def _guards(self, test: Value, t: _Term, otherwise: Value) -> bool:
        """Whether a test that is one number makes a factor: where it fails, nothing divides and the result is 0."""

        def guarded(x: Value) -> bool:
            op = self.program.operations[x] if isinstance(x, int) else None
            return op is not None and op.name == "where" and op.inputs[0] == test and op.inputs[2] == 1.0

        return isinstance(otherwise, float) and otherwise == 0.0 and t.kind == "plain" and all(map(guarded, t.over))

    def _signs(self, value: int, inputs: tuple[Value, ...]) -> _Term:
        """Signs, which positive factors do not change and a negative one takes along."""
        assert isinstance(inputs[0], int)
        t = self.terms[inputs[0]]
        if t.kind != "plain" or not all(map(self._positive, (*t.number, *t.over))):
            return self._apply(value, "sign", inputs)
        source = self._register(t.x)
        target = source if self._dead(t.x) and self._writable(source) else self._new()
        self._emit("sign x", target, (source,))
        self._plain(value, target)
        return _Term((), (), t.negative, "plain", value)

    def _positive(self, number: Value) -> bool:
        """Whether a number is known to be positive whatever the day's hyperparameters are."""
        if isinstance(number, int):
            return self.program.names.get(number) in self.program.positive
        return number > 0.0

    def _sum(self, value: int, name: str, inputs: tuple[Value, ...]) -> _Term:
        terms: list[_Term | Value] = [self.terms[x] if self._shaped(x) else x for x in inputs]
        signs = [False, name == "sub"]
        parts = [(t, s) for t, s in zip(terms, signs, strict=True) if isinstance(t, _Term)]
        if len(parts) == 1:  # a number beside the entries
            ((added, taken),) = [(t, s) for t, s in zip(terms, signs, strict=True) if not isinstance(t, _Term)]
            t, s = parts[0]
            register = self._compute(_flip(t, s))
            self._emit("add number", register, (register,), (((added,), (), taken),))
            return self._plain(value, register)
        # begin with the term that can be overwritten, or at least is no product
        parts.sort(key=lambda p: (not self._fills(p[0], value), p[0].kind != "plain", not self._dead(p[0].x)))
        if not self._fills(parts[0][0], value):
            return self._apply(value, name, inputs)
        (first, s1), (second, s2) = parts
        if (both := self._beside(value, _flip(first, s1), _flip(second, s2))) is not None:
            return both
        register = self._compute(_flip(first, s1), busy=(second.x, second.y))
        t = _flip(second, s2)
        number = (t.number, t.over, t.negative)
        x = self._register(t.x)
        if t.kind == "plain":
            steps = self.schedule.steps
            last = steps[-1] if steps else None
            scaled = last is not None and (last.name, last.target, last.sources) == ("scale", register, (register,))
            if scaled and self._fills(t, value):
                self._emit("mix", register, (register, x), (*steps.pop().numbers, number))
            else:
                self._emit("add", register, (register, x), (number,))
        else:
            name = "addcmul" if t.kind == "product" else "addcdiv"
            self._emit(name, register, (register, x, self._register(t.y)), (number,))
        return self._plain(value, register)

    def _beside(self, value: int, t: _Term, other: _Term) -> _Term | None:
        """A sum of values that both stay: in one pass, and its negative where that costs nothing later."""
        x, plain = self._register(t.x), t.kind == other.kind == "plain"
        if not plain or not all(map(self._positive, (*t.number, *t.over))):
            return None
        if self._dead(t.x) and self._writable(x) and t.x != other.x:
            return None
        if (t.negative or t.number or t.over) and self._left(value):
            return None
        number = ((*other.number, *t.over), (*other.over, *t.number), other.negative != t.negative)
        self._emit("plus", target := self._new(), (x, self._register(other.x)), (number,))
        self._plain(value, target)
        return _Term(t.number, t.over, t.negative, "plain", value)

    def _apply(self, value: int, name: str, inputs: tuple[Value, ...]) -> _Term:
        """Any other operation: operands materialised, the result in the first that may be overwritten."""
        sources, numbers, pattern = [], [], []
        for x in inputs:
            if self._shaped(x):
                sources.append(self._materialise(x))
                pattern.append("x")
            else:
                numbers.append(((x,), (), False))
                pattern.append("n")
        own = name not in _TESTS and not reduced(name) and pattern[0] == "x" and self._free(sources[0], inputs)
        own = own and self._as_long(inputs[0], value)
        target = sources[0] if own else self._new()
        self._emit(f"{name} {''.join(pattern)}", target, tuple(sources), tuple(numbers))
        return self._plain(value, target)

    def _inner(self, t: _Term) -> bool:
        """Whether a term is a product of entries."""
        return t.kind == "product" and self.extent[t.x] == self.extent[t.y] == FULL

    def _summed(self, value: int, summed: Value) -> _Term:
        """The sum of a leaf; that of a product in one pass."""
        assert isinstance(summed, int)
        t = self.terms[summed]
        if summed in self.register or not self._inner(t):
            return self._apply(value, _LEAF, (summed,))
        self._emit("inner", target := self._new(), (self._register(t.x), self._register(t.y)))
        self._plain(value, target)
        return _Term(t.number, t.over, t.negative, "plain", value)

    def _number(self, value: int, op: Operation) -> None:
        """A value of a leaf that is alone: what its entries come to, or arithmetic on such numbers."""
        summed = next((x for x in op.inputs if self._shaped(x)), None)
        if not isinstance(summed, int):
            self._emit(f"number {op.name}", -1, (), [((x,), (), False) for x in op.inputs], value)
            return
        t = self.terms[summed]
        if op.name == _LEAF and summed not in self.register and self._inner(t):
            sources, factor = (self._register(t.x), self._register(t.y)), (t.number, t.over, t.negative)
            self._emit("number of inner", -1, sources, (factor,), value)
        else:
            self._emit(f"number of {op.name}", -1, (self._materialise(summed),), (((), (), False),), value)

    # ---- registers ---------------------------------------------------------------------------------------------

    def _compute(self, t: _Term, busy: tuple[int, ...] = ()) -> int:
        """A register that holds the term and may be overwritten. busy: values that are read once more."""
        number = (t.number, t.over, t.negative)
        x = self._register(t.x)
        plain = not t.number and not t.over and not t.negative
        if t.kind == "plain":
            target = x if self._dead(t.x) and self._writable(x) and t.x not in busy else self._new()
            if target != x or not plain:
                self._emit("scale", target, (x,), (number,))
            return target
        y = self._register(t.y)
        free = self._dead(t.x) and self._writable(x) and t.x != t.y and t.x not in busy
        free = free and self.extent[t.x] == self._extent(t)
        target = x if free else self._new()
        self._emit("times" if t.kind == "product" else "over", target, (x, y))
        if not plain:
            self._emit("scale", target, (target,), (number,))
        return target

    def _extent(self, t: _Term) -> Extent:
        a, b = self.extent[t.x], self.extent[t.x if t.y < 0 else t.y]
        return a[0] or b[0], a[1] or b[1]

    def _fills(self, t: _Term, value: int) -> bool:
        """Whether a term is as long as a value that it is a part of."""
        return self._extent(t) == self.extent[value]

    def _as_long(self, part: Value, value: int) -> bool:
        return isinstance(part, int) and self.extent[part] == self.extent[value]

    def _materialise(self, value: int) -> int:
        """The register of a value, computed now if it is still a term."""
        t = self.terms[value]
        if value in self.register and t == _Term((), (), False, "plain", value):
            return self.register[value]
        register = self._compute(t)
        self._plain(value, register)
        self.terms[value] = _Term((), (), False, "plain", value)
        return register

    def _plain(self, value: int, register: int) -> _Term:
        self.register[value] = register
        return _Term((), (), False, "plain", value)

    def _register(self, value: int) -> int:
        return self.register[value]

    def _new(self) -> int:
        self.next += 1
        return self.next - 1

    def _writable(self, register: int) -> bool:
        return self.own.get(register) not in self.keep

    def _free(self, register: int, inputs: tuple[Value, ...]) -> bool:
        held = [v for v, r in self.register.items() if r == register]
        return self._writable(register) and all(self._dead(v) for v in held)

    def _uses(self, value: int) -> int:
        return sum(sum(_is(x, value) for x in op.inputs) for op in self.program.operations)

    def _dead(self, value: int) -> bool:
        """Whether nothing after the present place reads this value, as itself or inside a pending term."""
        if self._left(value):
            return False
        waiting = self.order[self.place + 1 :] if self.place < len(self.order) else []
        if self._read(value, waiting):
            return False
        now = self.order[self.place] if self.place < len(self.order) else None
        for other, t in self.terms.items():
            if other in (value, now) or value not in (t.x, t.y):
                continue
            if self._read(other, waiting) or self._left(other):
                return False
        return True

    def _left(self, value: int) -> bool:
        return any(_is(x, value) for x in self.program.outputs.values())

    def _read(self, value: int, by: Sequence[int]) -> bool:
        return any(_is(x, value) for v in by for x in self.program.operations[v].inputs)

    def _shaped(self, value: Value) -> TypeGuard[int]:
        """Whether a value is none of the numbers."""
        leaf = self.schedule.alone and isinstance(value, int) and self.extent[value] == (False, False)
        return self.program.shaped(value) and not leaf

    def _emit(self, name: str, target: int, sources: tuple[int, ...], numbers: Any = (), number: int = -1) -> None:
        self.schedule.steps.append(_Step(name, target, sources, tuple(numbers), number))

    def _release(self) -> None:
        """Temporaries are let go after their last use."""
        last: dict[int, int] = {}
        for i, s in enumerate(self.schedule.steps):
            for r in (s.target, *s.sources):
                if r >= 0:
                    last[r] = i
        inputs = len(self.schedule.names)
        self.schedule.released = [
            tuple(r for r, at in last.items() if at == i and r >= inputs) for i in range(len(self.schedule.steps))
        ]


def _is(x: Value, value: int) -> bool:
    """Whether an operand is this value, and not the constant of that number."""
    return isinstance(x, int) and x == value


def _flip(t: _Term, negative: bool) -> _Term:
    return _Term(t.number, t.over, t.negative != negative, t.kind, t.x, t.y)


# ---- multi-tensor operations ---------------------------------------------------------------------------------------


def _one(s: list[Any]) -> bool:
    """Whether the lists are of one tensor, on a CPU, where a list costs as much again as an operation on its tensor."""
    return len(s[0]) == 1 and s[0][0].is_cpu


def _scale(here: bool, s: list[Any], n: list[Real]) -> Lists:
    number = _like(n[0], s)
    if not here:
        return [torch.mul(s[0][0], number)] if _one(s) else list(torch._foreach_mul(s[0], number))
    if isinstance(number, Tensor) or number != 1.0:
        if _one(s):
            s[0][0].mul_(number)
        else:
            torch._foreach_mul_(s[0], number)
    return s[0]


def _mix(here: bool, s: list[Any], n: list[Real]) -> Lists:
    """n[0] x + n[1] y in the place of x: in one pass where torch's SGD, which decays so, takes that step."""
    keep, rate = n
    if isinstance(keep, float) and isinstance(rate, float):
        taken = abs(keep - 1.0)  # what is much of x, or far more than y, is exact by two operations only
        if taken <= 0.5 and taken < 1e18 * abs(rate) and _whole(s):
            torch._fused_sgd_(
                s[0], s[1], [], weight_decay=(keep - 1.0) / rate, momentum=0.0, lr=-rate, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            return s[0]
    return _add(True, [_scale(True, s[:1], n[:1]), s[1]], n[1:])


def _whole(s: list[Any]) -> bool:
    """Whether torch's operations for whole steps on CPUs take these lists."""
    if not s[0] or not s[0][0].is_cpu or torch.compiler.is_compiling():
        return False
    dtype, tensors = s[0][0].dtype, itertools.chain(*s)
    return dtype in (torch.float32, torch.float64) and all(x.dtype == dtype and x.is_contiguous() for x in tensors)


def _add(here: bool, s: list[Any], n: list[Real]) -> Lists:
    if _one(s) and not isinstance(n[0], Tensor):
        s[0][0].add_(s[1][0], alpha=n[0])
        return s[0]
    if isinstance(n[0], Tensor):
        torch._foreach_add_(s[0], torch._foreach_mul(s[1], _like(n[0], s)))
    else:
        torch._foreach_add_(s[0], s[1], alpha=n[0])
    return s[0]


def _plus(here: bool, s: list[Any], n: list[Real]) -> Lists:
    if _one(s) and not isinstance(n[0], Tensor):
        return [torch.add(s[0][0], s[1][0], alpha=n[0])]
    if isinstance(n[0], Tensor):
        return list(torch._foreach_add(s[0], torch._foreach_mul(s[1], _like(n[0], s))))
    return list(torch._foreach_add(s[0], s[1], alpha=n[0]))


def _add_number(here: bool, s: list[Any], n: list[Real]) -> Lists:
    if _one(s) and not isinstance(n[0], Tensor):
        s[0][0].add_(n[0])
        return s[0]
    if isinstance(n[0], Tensor):
        torch._foreach_add_(s[0], other=_like(n[0], s))  # without the name it would be read on the host
    else:
        torch._foreach_add_(s[0], n[0])
    return s[0]


def _addcmul(here: bool, s: list[Any], n: list[Real]) -> Lists:
    if isinstance(n[0], Tensor):
        return _add(here, [s[0], torch._foreach_mul(s[1], s[2])], n)
    if _one(s):
        s[0][0].addcmul_(s[1][0], s[2][0], value=n[0])
    else:
        torch._foreach_addcmul_(s[0], s[1], s[2], value=n[0])
    return s[0]


def _addcdiv(here: bool, s: list[Any], n: list[Real]) -> Lists:
    if isinstance(n[0], Tensor):
        return _add(here, [s[0], torch._foreach_div(s[1], s[2])], n)
    if _one(s):
        s[0][0].addcdiv_(s[1][0], s[2][0], value=n[0])
    else:
        torch._foreach_addcdiv_(s[0], s[1], s[2], value=n[0])
    return s[0]


def _like(number: Real, s: list[Any]) -> Any:
    """A number in the dtype of the tensors that it meets."""
    return number.to(s[0][0].dtype) if isinstance(number, Tensor) and s[0] else number


def _copy(here: bool, s: list[Any], n: list[Real]) -> Lists:
    torch._foreach_copy_(s[0], s[1])
    return s[0]


def _pair(name: str) -> Callable[[bool, list[Any], list[Real]], Lists]:
    plain, inside = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    single = getattr(torch, name)

    def run(here: bool, s: list[Any], n: list[Real]) -> Lists:
        if _one(s):
            return [single(s[0][0], s[1][0], out=s[0][0]) if here else single(s[0][0], s[1][0])]
        if here:
            inside(s[0], s[1])
            return s[0]
        return list(plain(s[0], s[1]))

    return run


def _unary(name: str) -> Callable[[bool, list[Any], list[Real]], Lists]:
    plain, inside = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    single = getattr(torch, name)

    def run(here: bool, s: list[Any], n: list[Real]) -> Lists:
        if _one(s):
            return [single(s[0][0], out=s[0][0]) if here else single(s[0][0])]
        if here:
            inside(s[0])
            return s[0]
        return list(plain(s[0]))

    return run


def _power(here: bool, s: list[Any], n: list[Real]) -> Lists:
    if isinstance(n[0], Tensor):
        return _each("pow", "xn")(here, s, n)
    if n[0] == 0.5:
        return _unary("sqrt")(here, s, [])
    if here:
        torch._foreach_pow_(s[0], n[0])
        return s[0]
    return list(torch._foreach_pow(s[0], n[0]))


def _bounded(low: bool, high: bool) -> Callable[[bool, list[Any], list[Real]], Lists]:
    """Entries between numbers."""
    sides = [name for name, there in (("min", low), ("max", high)) if there]
    alone = _each("clamp", "xnn") if low and high else _each("maximum" if low else "minimum", "xn")

    def run(here: bool, s: list[Any], n: list[Real]) -> Lists:
        if any(isinstance(x, Tensor) for x in n):
            return alone(here, s, n)
        out: Lists = s[0] if here else list(getattr(torch, f"_foreach_clamp_{sides[0]}")(s[0], n[0]))
        for side, bound in list(zip(sides, n, strict=True))[0 if here else 1 :]:
            getattr(torch, f"_foreach_clamp_{side}_")(out, bound)
        return out

    return run


def _where(test: Real, a: Any, b: Any) -> Tensor:
    """One of two by entries, or by a number."""
    if isinstance(test, Tensor):
        return torch.where(test if test.dtype == torch.bool else test != 0, a, b)
    chosen, other = (a, b) if test else (b, a)
    return chosen.clone() if isinstance(chosen, Tensor) else torch.full_like(other, chosen)


def _each(name: str, pattern: str) -> Callable[[bool, list[Any], list[Real]], Lists]:
    """An operation without a multi-tensor form, tensor by tensor."""
    named: dict[str, Callable[..., Tensor]] = {
        "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not, "where": _where,
        "truth": lambda test, like: test.to(like.dtype), "asinh": torch.asinh, "div": torch.div, "sub": torch.sub,
        "maximum": lambda a, b: torch.clamp_min(a, b) if isinstance(b, float) else torch.maximum(a, b),
        "minimum": lambda a, b: torch.clamp_max(a, b) if isinstance(b, float) else torch.minimum(a, b),
    }  # fmt: skip
    function = named.get(name) or getattr(torch, name)

    def run(here: bool, s: list[Any], n: list[Real]) -> Lists:
        out = []
        for tensors in zip(*s, strict=True):
            shaped, numbers = iter(tensors), iter(n)
            out.append(function(*(next(shaped) if p == "x" else next(numbers) for p in pattern)))
        if not here:
            return out
        torch._foreach_copy_(s[0], out)
        return s[0]

    return run


def _reduction(name: str) -> Callable[[bool, list[Any], list[Real]], Lists]:
    """Over dimensions that are kept."""
    function, dims = getattr(torch, name.split(" ")[0]), reduced(name)
    return lambda here, s, n: [function(x, dims, keepdim=True) for x in s[0]]


def _inner(here: bool, s: list[Any], n: list[Real]) -> Lists:
    """Inner products of leaves."""
    return [_inner_of(x, y) for x, y in zip(s[0], s[1], strict=True)]


def _inner_of(x: Tensor, y: Tensor) -> Tensor:
    size = x[0].numel()
    if size < _DOT or not (x.is_cpu and x.is_contiguous() and y.is_contiguous()):
        return torch.sum(x * y, (-2, -1), keepdim=True)
    if len(x) == 1 and size <= _EXACT:
        return torch.dot(x.view(-1), y.view(-1)).view(1, 1, 1)
    pieces = zip(x.view(len(x), -1).unbind(), y.view(len(y), -1).unbind(), strict=True)
    chunks = [torch.stack(list(map(torch.dot, a.split(_EXACT), b.split(_EXACT)))) for a, b in pieces]
    return torch.stack(chunks).sum(1).view(-1, 1, 1)


def _number(name: str) -> Callable[[bool, list[Any], list[Real]], float]:
    """An operation on numbers, or what a list of one tensor comes to, times a number."""
    if name.startswith("of "):
        whole = _inner if name == "of inner" else _reduction(name[3:])
        return lambda here, s, n: whole(here, s, [])[0].item() * float(n[0])
    return lambda here, s, n: evaluated(name, n)


class _Operations(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        if key.startswith("number "):
            self[key] = _number(key[len("number ") :])
            return self[key]
        name, pattern = key.rsplit(" ", 1)
        if reduced(name):
            self[key] = _reduction(name)
            return self[key]
        whole = name in ("sqrt", "abs", "sign", "exp", "log", "log1p", "expm1", "sinh", "tanh", "reciprocal")
        self[key] = _unary(name) if whole and pattern == "x" else _each(name, pattern)
        return self[key]


_OPERATIONS = _Operations(
    {
        "scale": _scale, "add": _add, "mix": _mix, "plus": _plus, "add number": _add_number, "addcmul": _addcmul,
        "addcdiv": _addcdiv, "inner": _inner, "copy": _copy, "times": _pair("mul"), "over": _pair("div"),
        "pow xn": _power,
        "maximum xx": _pair("maximum"), "minimum xx": _pair("minimum"), "maximum xn": _bounded(True, False),
        "minimum xn": _bounded(False, True), "clamp xnn": _bounded(True, True),
    }
)  # fmt: skip


# ---- blocks --------------------------------------------------------------------------------------------------------


def blocks(sizes: Sequence[int], block: int = BLOCK) -> Iterator[list[tuple[int, int, int]]]:
    """Groups of (tensor, first entry, end) with at most `block` entries: small tensors together, large ones cut."""
    group: list[tuple[int, int, int]] = []
    room = block
    for index, size in enumerate(sizes):
        first = 0
        while first < size:
            if size - first > room and room < block:
                yield group
                group, room = [], block
            end = min(size, first + room)
            group.append((index, first, end))
            room -= end - first
            first = end
            if room == 0:
                yield group
                group, room = [], block
    if group:
        yield group
