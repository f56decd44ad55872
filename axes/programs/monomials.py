"""A program on tiles whose products are gathered: tiles first, vectors and numbers with each other.

A product of products is carried along as its tiles, and what it has of a row, of a key and of neither, and is made
where it is read otherwise: `((a s) b) (t k)` is two products of tiles, with a tile for each entry of s t and of k, for
four. What a sum does not vary along stays outside of it, and what a choice lets through or not is chosen without it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, final

from axes.programs.tiles import FULL, NEXT, Axis, Program, Value

_SMALLER = 1.0  # a factor that is not there


class _Product(NamedTuple):
    """tiles * row * key * number."""

    tiles: tuple[int, ...]
    row: Value = _SMALLER
    key: Value = _SMALLER
    number: Value = _SMALLER


def gathered(program: Program, widths: tuple[int, int]) -> Program:
    """The same outputs by products that are gathered; of a program that carries sums from token to token, itself."""
    if any(n.startswith(NEXT) for n in program.outputs):
        return program
    return _Gathering(program, widths).run()


@final
class _Gathering:
    def __init__(self, old: Program, widths: tuple[int, int]) -> None:
        self.old, self.widths, self.new = old, widths, Program()
        self.there: dict[tuple[int, ...], Value] = {}  # products of tiles

    def run(self) -> Program:
        known: list[_Product] = []
        needed = frozenset(self.old.needed(self.old.outputs))
        for i, op in enumerate(self.old.operations):
            if op.name == "input":
                known.append(self.single(self.new.input(self.old.names[i], op.extent)))
                continue
            if i not in needed:
                known.append(_Product(()))
                continue
            known.append(self.product(op.name, [self.of(x, known) for x in op.inputs]))
        self.new.outputs = {n: self.made(self.of(x, known)) for n, x in self.old.outputs.items()}
        return self.new

    def of(self, x: Value, known: list[_Product]) -> _Product:
        return known[x] if isinstance(x, int) else _Product((), number=x)

    def single(self, x: Value) -> _Product:
        if not isinstance(x, int):
            return _Product((), number=x)
        extent = self.new.extent(x)
        if extent == FULL:
            return _Product((x,))
        return _Product((), **{"row" if extent[0] else "key" if extent[1] else "number": x})

    def product(self, name: str, inputs: list[_Product]) -> _Product:
        if name == "mul":
            a, b = inputs
            mul = self.new.add
            return _Product(
                tuple(sorted((*a.tiles, *b.tiles))), mul("mul", a.row, b.row), mul("mul", a.key, b.key),
                mul("mul", a.number, b.number),
            )  # fmt: skip
        if name == "neg":
            return inputs[0]._replace(number=self.new.add("mul", inputs[0].number, -1.0))
        kind, _, axis = name.partition(" ")
        if kind == "sum":
            return self.summed(inputs[0], "v" if axis == "v" else "k")
        if axis:
            return self.single(self.reduced("max", self.made(inputs[0]), "v" if axis == "v" else "k"))
        if name == "where" and inputs[1].tiles and self.made(inputs[2]) == 0.0:
            chosen = self.new.add("where", self.made(inputs[0]), self.tile(inputs[1].tiles), 0.0)
            return self.times(inputs[1]._replace(tiles=()), self.root(chosen))
        return self.single(self.new.add(name, *map(self.made, inputs)))

    def root(self, chosen: Value) -> Value:
        """A root where what it is of is above zero, else zero, is the root of the larger of both."""
        new, at = self.new, self.new.operations
        if isinstance(chosen, int) and at[chosen].name == "where":
            test, root = at[chosen].inputs[:2]
            if isinstance(test, int) and isinstance(root, int) and at[root].name == "sqrt":
                x = at[root].inputs[0]
                if at[test].name == "gt" and at[test].inputs == (x, 0.0):
                    return new.add("sqrt", new.add("maximum", x, 0.0))
        return chosen

    def summed(self, x: _Product, axis: Axis) -> _Product:
        along = x.row if axis == "v" else x.key
        inside = self.new.add("mul", self.tile(x.tiles), along)
        outside = x._replace(tiles=(), row=_SMALLER) if axis == "v" else x._replace(tiles=(), key=_SMALLER)
        return self.times(outside, self.reduced("sum", inside, axis))

    def reduced(self, kind: Literal["sum", "max"], x: Value, axis: Axis) -> Value:
        return self.new.reduce(kind, x, axis, self.widths["vk".index(axis)])

    def times(self, x: _Product, y: Value) -> _Product:
        return self.product("mul", [x, self.single(y)])

    def tile(self, tiles: tuple[int, ...]) -> Value:
        """A product of tiles, from the largest one of some of them that is there."""
        if len(tiles) < 2:
            return tiles[0] if tiles else _SMALLER
        if tiles not in self.there:
            best = max((t for t in self.there if _within(t, tiles)), key=len, default=tiles[:1])
            rest = list(tiles)
            for t in best:
                rest.remove(t)
            made: Value = self.tile(best)
            for t in rest:
                made = self.new.add("mul", made, t)
            self.there[tiles] = made
        return self.there[tiles]

    def made(self, x: _Product) -> Value:
        mul, number = self.new.add, x.number
        value = self.tile(x.tiles)
        for vector in (x.row, x.key):
            if vector != _SMALLER or isinstance(vector, int):
                value, number = mul("mul", value, mul("mul", vector, number)), _SMALLER
        return mul("mul", value, number)


def _within(few: tuple[int, ...], many: tuple[int, ...]) -> bool:
    return len(few) < len(many) and all(few.count(t) <= many.count(t) for t in few)
