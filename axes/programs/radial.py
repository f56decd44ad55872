"""Responses that are a number times an error, u = c e with e = x - v, where c hears of x but |e|^2.

Then numbers say what a token writes: of inner products of errors, c of every token of a block is found without any
row of a state, and so is what x is asked for, J^T g = a g + b (e . g) e. `radial` finds such a response by what its
program does with rows: multiples of e and of g, and sums over rows of products of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from axes.programs.code import ON_TILES, constant
from axes.programs.tiles import Operation, Program

_Form = dict[tuple[str, ...], str]  # multiples of e and g, and of products of two of these, by text of numbers
_SUMS: _Form = {("e", "e"): "n2", ("e", "g"): "z"}


class _Other(Exception):
    """A program that does more with rows."""


class _Numbers:
    """Lines that make the numbers of a program, and what its rows are multiples of."""

    def __init__(self, program: Program, names: dict[int, str], row: str) -> None:
        self.program, self.row, self.lines = program, row, list[str]()
        self.names, self.forms = dict(names), dict[int, _Form]()

    def follow(self, outputs: list[str]) -> None:
        for i in self.program.needed([n for n in outputs if n in self.program.outputs]):
            op = self.program.operations[i]
            if op.name != "input" and not op.extent[0]:
                self.names[i] = self.line(f"t{i}", self.number(op))
            elif op.name != "input":
                made = self.row_of(op)
                self.forms[i] = {of: self.line(f"t{i}_{''.join(of)}", text) for of, text in made.items()}

    def line(self, name: str, text: str) -> str:
        self.lines.append(f"    {name} = {text}")
        return name

    def number(self, op: Operation) -> str:
        if op.name != "sum v":
            return ON_TILES[op.name].format(*map(self.text, op.inputs))
        form = self.form(op.inputs[0])
        if not set(form) <= set(_SUMS):
            raise _Other
        return " + ".join(f"{text} * {_SUMS[of]}" for of, text in form.items())

    def row_of(self, op: Operation) -> _Form:
        named = [self.program.names.get(x) if isinstance(x, int) else None for x in op.inputs]
        if op.name == "sub" and set(named) == {"x", self.row}:
            return {("e",): "1.0" if named[0] == "x" else "-1.0"}
        along = [self.along(x) for x in op.inputs]
        if op.name == "neg":
            return {of: f"-{text}" for of, text in self.form(op.inputs[0]).items()}
        if op.name == "mul" and all(along):
            a, b = (self.form(x) for x in op.inputs)
            if len(a) != 1 or len(b) != 1:
                raise _Other
            return {tuple(sorted((*p, *q))): f"{s} * {t}" for p, s in a.items() for q, t in b.items()}
        if op.name in ("mul", "div") and sum(along) == 1 and (along[0] or op.name == "mul"):
            form, by = (op.inputs if along[0] else op.inputs[::-1])
            sign = "*" if op.name == "mul" else "/"
            return {of: f"{text} {sign} {self.text(by)}" for of, text in self.form(form).items()}
        if op.name in ("add", "sub"):
            return self.each(op, "{0} + {1}" if op.name == "add" else "{0} - {1}", op.inputs[0], op.inputs[1])
        if op.name == "where" and not along[0]:
            test = self.text(op.inputs[0])
            return self.each(op, f"tl.where({test}, {{0}}, {{1}})", op.inputs[1], op.inputs[2])
        raise _Other

    def each(self, op: Operation, text: str, *two: int | float) -> _Form:
        a, b = (self.form(x) for x in two)
        return {of: text.format(a.get(of, "0.0"), b.get(of, "0.0")) for of in sorted({*a, *b})}

    def along(self, x: int | float) -> bool:
        return self.program.extent(x)[0]

    def form(self, x: int | float) -> _Form:
        if isinstance(x, float) and x == 0.0:
            return {}
        if isinstance(x, int) and self.names.get(x) == "g":
            return {("g",): "1.0"}
        if x not in self.forms:
            raise _Other
        return self.forms[int(x)]

    def text(self, x: int | float) -> str:
        return self.names[x] if isinstance(x, int) else constant(x)


def radial(
    program: Program, names: dict[int, str], row: str, outputs: tuple[str, str], numbers: list[str], slots: str
) -> str | None:
    """Text of functions of the response with these outputs, u and the derivative in x, None where it is no such one:
    `stride`, c; `bends`, (a, b); `tolls`, derivatives in numbers, of which `numbers` names those by name of output.

    names: of inputs in the text; row: the one input that is a row. The derivative in it is the opposite of that in x.
    """
    whole = "n2 * 0.0 + "
    try:
        stride = _made(program, names, row, outputs[:1])
        bends = _made(program, names, row, outputs[1:])
        tolls = _Numbers(program, names, row)
        tolls.follow(numbers)
        shown = [f"{whole}{tolls.text(program.outputs.get(n, 0.0))}" for n in numbers]
    except (_Other, KeyError):
        return None
    if not set(stride[1]) <= {("e",)} or not set(bends[1]) <= {("e",), ("g",)}:
        return None
    a, b = (bends[1].get((of,), "0.0") for of in "ge")
    unit = "    z = n2 * 0.0 + 1.0"
    lines = ["", "@triton.jit", f"def stride(n2, k2, {slots}):", *stride[0]]
    lines += [f"    return {whole}{stride[1].get(('e',), '0.0')}"]
    lines += ["", "@triton.jit", f"def bends(n2, k2, {slots}):", unit, *bends[0]]
    lines += [f"    return {whole}{a}, {whole}{b}"]
    lines += ["", "@triton.jit", f"def tolls(n2, z, k2, {slots}):", *tolls.lines, f"    return {', '.join(shown)}"]
    return "\n".join(lines) + "\n"


def _made(program: Program, names: dict[int, str], row: str, outputs: Sequence[str]) -> tuple[list[str], _Form]:
    made = _Numbers(program, names, row)
    made.follow(list(outputs))
    return made.lines, made.form(program.outputs.get(outputs[0], 0.0))


__all__ = ["radial"]
