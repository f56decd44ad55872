"""A program on tiles with as few operations on tiles as its sums allow.

Much of a step is linear in tiles: a value is `sum_i b_i r_i k_i`, of tiles b (or ones) with an entry of a row, r, and
of a key, k. Such forms are carried along as their vectors, so that a tile is made of the others once, where it is read
otherwise; and a sum of a form, or of a product of two, is one of sums of single tiles or pairs of them, many of which
are there: `sum_v (a b + r k) c = a' sum_v b c + k sum_v r c`. Which values stay forms, and which sums are taken apart,
is searched for by what the whole program costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

from axes.programs.tiles import FULL, GRAD, NEXT, Axis, NotTiles, Operation, Program, Value

_PAIRS = 24  # terms of a product that is taken apart
_ONES = -1  # the tile of ones, among tiles


class _Term(NamedTuple):
    """tile * row * key."""

    tile: int
    row: Value
    key: Value


Form = tuple[_Term, ...]


@final
@dataclass(frozen=True)
class _Product:
    a: Form
    b: Form


class _Pair(NamedTuple):
    """Two tiles * row * key."""

    a: int
    b: int
    row: Value
    key: Value


@final
@dataclass(frozen=True)
class _Sums:
    """Sums over an axis, not yet made, of pairs of tiles times what varies along it; and what is added to them."""

    axis: Axis
    terms: dict[tuple[int, int], Value]
    rest: Value


def simplified(program: Program, widths: tuple[int, int], cost: Callable[[Program], float]) -> Program:
    """The same outputs for less by a twentieth, or the program itself. cost: what a program costs."""
    asked: set[int] = set()

    def made(loose: Iterable[int]) -> tuple[Program, float]:
        rewriting = _Rewriting(program, widths, frozenset(loose))
        try:
            found = rewriting.run()
        except NotTiles:  # more operations than a program may have
            return program, float("inf")
        asked.update(rewriting.asked)
        return found, cost(found)

    best, least = program, cost(program) * (1.0 - _WORTH)
    ends = [made(()), made(range(len(program.operations)))]
    choices = sorted(asked)
    for start, (found, now) in zip((frozenset[int](), frozenset(choices)), ends, strict=True):
        kept, better = start, True
        while better:
            better = False
            for i in choices:
                other, price = made(kept ^ {i})
                if price < now:
                    kept, found, now, better = kept ^ {i}, other, price, True
        if now < least:
            best, least = found, now
    return best


_WORTH = 0.05  # prices are no closer than that


@final
@dataclass(frozen=True)
class Prices:
    """What operations cost, one on a tile of which others take the place of being 1.

    row, key: an operation on a value with an entry for each of them; over_rows, over_keys: a sum, and what waits;
    level: each sum in a row of those that wait for another.
    """

    row: float
    key: float
    over_rows: float
    over_keys: float
    level: float = 5.0

    def of(self, program: Program, order: Sequence[int]) -> float:
        """Of some operations: a product that is only added is none, and each level of sums is waited for."""
        users: dict[int, list[int]] = {}
        for i in order:
            for x in program.operations[i].inputs:
                if isinstance(x, int):
                    users.setdefault(x, []).append(i)
        total, level = 0.0, dict.fromkeys(order, 0)
        for i in order:
            op = program.operations[i]
            level[i] = max((level.get(x, 0) for x in op.inputs if isinstance(x, int)), default=0) + (" " in op.name)
            if op.name == "input":
                continue
            if " " in op.name:
                total += self.over_rows if op.name.endswith("v") else self.over_keys
            elif op.extent != FULL:
                total += self.row if op.extent[0] else self.key if op.extent[1] else _NUMBER
            elif op.name in _DEAR:
                total += 4.0
            else:
                by = users.get(i, [])
                added = len(by) == 1 and program.operations[by[0]].name in ("add", "sub", "sum v", "sum k")
                total += 0.0 if op.name == "mul" and added else 1.0
        return total + self.level * max(level.values(), default=0)


_NUMBER = 0.06
_DEAR = frozenset({"exp", "log", "pow", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal", "log1p", "expm1"})


@final
class _Rewriting:
    """One program from another. loose: values that stay forms, and sums that are taken apart."""

    def __init__(self, old: Program, widths: tuple[int, int], loose: frozenset[int]) -> None:
        self.old, self.widths, self.loose, self.new = old, widths, loose, Program()
        self.values: dict[int, Value | Form | _Product | _Sums] = {}
        self.asked: set[int] = set()  # what is another program by being loose
        self.order = old.needed(old.outputs)
        self.users = Counter(x for i in self.order for x in set(old.operations[i].inputs) if isinstance(x, int))
        self.users.update({v: 2 for v in old.outputs.values() if isinstance(v, int)})

    def run(self) -> Program:
        # derivatives that nothing asks for are not made
        for i in self.order:
            self.values[i] = self._operation(i, self.old.operations[i])
        for i, name in self.old.names.items():
            if i not in self.values:
                self.new.input(name, self.old.operations[i].extent)
        forms = {n: self._form(v) for n, v in self.old.outputs.items() if self.old.extent(v) == FULL}
        self.new.outputs = {n: self._plain(v) for n, v in self.old.outputs.items()}
        self._carry(forms)
        return self.new

    def _carry(self, forms: dict[str, Form]) -> None:
        """Sums of products of states that the next token has from sums that this one makes."""
        new = self.new
        for i in new.needed([n for n in self.old.outputs if not n.startswith(GRAD)]):
            op = new.operations[i]
            kind, _, axis = op.name.partition(" ")
            product = new.operations[op.inputs[0]] if kind == "sum" and isinstance(op.inputs[0], int) else None
            if product is None or product.name != "mul" or axis not in ("v", "k"):
                continue
            names = [new.names.get(x) if isinstance(x, int) else None for x in product.inputs]
            if any(n not in forms for n in names):
                continue
            a, b = (forms[n] for n in names if n is not None)
            if len(a) * len(b) > _PAIRS:
                continue
            before = len(new.operations)
            made = self._summed(self._apart(self._pairs(a, b), "v" if axis == "v" else "k"))
            if any(x.name.startswith("sum") and new.extent(x.inputs[0]) == FULL for x in new.operations[before:]):
                continue
            new.outputs[f"{NEXT}{i}"] = made

    def _operation(self, i: int, op: Operation) -> Value | Form | _Product | _Sums:
        new = self.new
        if op.name == "input":
            made = new.input(self.old.names[i], op.extent)
            new.names[made] = self.old.names[i]
            return (_Term(made, 1.0, 1.0),) if op.extent == FULL else made
        kind, _, axis = op.name.partition(" ")
        if kind == "sum":
            return self._sum(i, op.inputs[0], "v" if axis == "v" else "k")
        if axis:
            return self._reduce("max", self._plain(op.inputs[0]), "v" if axis == "v" else "k")
        if op.extent != FULL:
            sums = self._sums(op)
            if sums is not None:
                return sums if self.users[i] == 1 else self._summed(sums)
            return new.add(op.name, *(self._plain(x) for x in op.inputs))
        made_form = self._linear(op)
        if made_form is None:
            return self._form_of_vector(new.add(op.name, *(self._plain(x) for x in op.inputs)))
        if isinstance(made_form, _Product) or _simple(made_form):
            return made_form
        self.asked.add(i)
        if i in self.loose:
            return made_form
        return self._form_of_vector(self._made(made_form))

    def _linear(self, op: Operation) -> Form | _Product | None:
        if op.name == "neg":
            return self._scaled(self._form(op.inputs[0]), -1.0)
        if op.name in ("add", "sub"):
            a, b = (self._form(x) for x in op.inputs)
            return self._added([*a, *(b if op.name == "add" else self._scaled(b, -1.0))])
        if op.name != "mul":
            return None
        small, whole = sorted(op.inputs, key=lambda x: self.old.extent(x) == FULL)
        if self.old.extent(small) != FULL:
            return self._scaled(self._form(whole), self._plain(small))
        one, other = self._form(small), self._form(whole)
        for x, y in ((one, other), (other, one)):
            if len(x) == 1 and x[0].tile == _ONES:
                return self._scaled(self._scaled(y, x[0].row), x[0].key)
        return _Product(one, other)

    # ---- forms -------------------------------------------------------------------------------------------------------

    def _form_of_vector(self, x: Value) -> Form:
        extent = self.new.extent(x)
        if extent == FULL:
            assert isinstance(x, int)
            return (_Term(x, 1.0, 1.0),)
        return (_Term(_ONES, x, 1.0),) if extent[0] else (_Term(_ONES, 1.0, x),)

    def _form(self, x: Value) -> Form:
        """Of a value of the old program."""
        known = self.values[x] if isinstance(x, int) else x
        if isinstance(known, tuple):
            return known
        return self._form_of_vector(self._plain(x))

    def _plain(self, x: Value) -> Value:
        """A value of the old program as one of the new."""
        known = self.values[x] if isinstance(x, int) else x
        if isinstance(known, int | float):
            return known
        made = self._summed(known) if isinstance(known, _Sums) else self._whole(known)
        assert isinstance(x, int)
        self.values[x] = self._form_of_vector(made) if isinstance(known, tuple | _Product) else made
        return made

    def _scaled(self, form: Form, by: Value) -> Form:
        """A form times a vector or a number."""
        extent, found = self.new.extent(by), []
        for t in form:
            row = extent[0] or not extent[1] and self._along(t.row, 0) and not self._along(t.key, 1)
            product = self.new.add("mul", t.row if row else t.key, by)
            found.append(t._replace(row=product) if row else t._replace(key=product))
        return self._added(found)

    def _along(self, x: Value, axis: int) -> bool:
        return self.new.extent(x)[axis]

    def _added(self, terms: Sequence[_Term]) -> Form:
        found: list[_Term] = []
        for t in terms:
            if 0.0 in (t.row, t.key) and (_zero(t.row) or _zero(t.key)):
                continue
            for n, other in enumerate(found):
                if other.tile != t.tile:
                    continue
                both = self._merged(other, t)
                if both is not None:
                    found[n] = both
                    break
            else:
                found.append(t)
        return tuple(found)

    def _merged(self, a: _Term, b: _Term) -> _Term | None:
        """The sum of two terms of one tile, where it is one."""
        if _same(a.row, b.row):
            return a._replace(key=self.new.add("add", a.key, b.key))
        if _same(a.key, b.key):
            return a._replace(row=self.new.add("add", a.row, b.row))
        for x, y in ((a, b), (b, a)):  # a number beside rows
            if _same(x.row, 1.0) and not any(self.new.extent(x.key)) and _same(y.key, 1.0):
                return y._replace(row=self.new.add("add", y.row, x.key))
        return None

    def _made(self, form: Form) -> Value:
        """A form as one tile (or less, of ones)."""
        total: Value = 0.0
        for tile in dict.fromkeys(t.tile for t in form):
            factor: Value = 0.0
            for t in sorted((t for t in form if t.tile == tile), key=self._both):
                factor = self.new.add("add", factor, self.new.add("mul", t.row, t.key))
            part = factor if tile == _ONES else self.new.add("mul", tile, factor)
            total = self.new.add("add", total, part)
        return total

    def _both(self, t: _Term) -> bool:
        return self._along(t.row, 0) and self._along(t.key, 1)

    # ---- sums --------------------------------------------------------------------------------------------------------

    def _reduce(self, kind: Literal["sum", "max"], x: Value, axis: Axis) -> Value:
        return self.new.reduce(kind, x, axis, self.widths["vk".index(axis)])

    def _sum(self, i: int, x: Value, axis: Axis) -> Value | _Sums:
        known = self.values[x] if isinstance(x, int) else x
        if isinstance(known, _Product):
            terms = self._pairs(known.a, known.b) if len(known.a) * len(known.b) <= _PAIRS else []
        elif isinstance(known, tuple):
            terms = [_Pair(t.tile, _ONES, t.row, t.key) for t in known]
        else:
            return self._reduce("sum", self._plain(x), axis)
        self.asked.update([i] if terms else [])
        if i not in self.loose or not terms:
            return self._reduce("sum", self._whole(known), axis)
        sums = self._apart(terms, axis)
        return sums if self.users[i] == 1 else self._summed(sums)

    def _pairs(self, a: Form, b: Form) -> list[_Pair]:
        add = self.new.add
        return [_Pair(s.tile, t.tile, add("mul", s.row, t.row), add("mul", s.key, t.key)) for s in a for t in b]

    def _apart(self, terms: Sequence[_Pair], axis: Axis) -> _Sums:
        rest: Value = 0.0
        lazy: dict[tuple[int, int], Value] = {}
        for pair in terms:
            inside, outside = (pair.row, pair.key) if axis == "v" else (pair.key, pair.row)
            tiles = min(pair.a, pair.b), max(pair.a, pair.b)
            if tiles[1] == _ONES or any(self.new.extent(outside)):
                made = self._reduce("sum", self._tile(tiles, inside), axis)
                rest = self.new.add("add", rest, self.new.add("mul", made, outside))
            else:
                lazy[tiles] = self.new.add("add", lazy.get(tiles, 0.0), self.new.add("mul", inside, outside))
        return _Sums(axis, lazy, rest)

    def _sums(self, op: Operation) -> _Sums | None:
        """Sums and what is added to them, or a number of times them."""
        known = [self.values[x] if isinstance(x, int) else x for x in op.inputs]
        lazy = [x for x in known if isinstance(x, _Sums)]
        if not lazy or op.name not in ("add", "sub", "neg", "mul"):
            return None
        if op.name == "neg":
            return self._times(lazy[0], -1.0)
        if op.name == "mul":
            by = self._plain(op.inputs[0] if isinstance(known[1], _Sums) else op.inputs[1])
            return None if len(lazy) == 2 or any(self.new.extent(by)) else self._times(lazy[0], by)
        a, b = known
        if op.name == "sub":
            b = self._times(b, -1.0) if isinstance(b, _Sums) else self.new.add("neg", self._plain(op.inputs[1]))
        if isinstance(a, _Sums) and isinstance(b, _Sums):
            if a.axis != b.axis:
                return None
            terms = {t: self.new.add("add", a.terms.get(t, 0.0), b.terms.get(t, 0.0)) for t in {**a.terms, **b.terms}}
            return _Sums(a.axis, terms, self.new.add("add", a.rest, b.rest))
        if isinstance(a, _Sums):
            return replace(a, rest=self.new.add("add", a.rest, b))  # type: ignore[arg-type]
        assert isinstance(b, _Sums)
        return replace(b, rest=self.new.add("add", a, b.rest))  # type: ignore[arg-type]

    def _times(self, sums: _Sums, by: Value) -> _Sums:
        add = self.new.add
        return _Sums(sums.axis, {t: add("mul", x, by) for t, x in sums.terms.items()}, add("mul", sums.rest, by))

    def _summed(self, sums: _Sums) -> Value:
        """One sum of all terms, but for those that are there."""
        inside: Value = 0.0
        for tiles, x in sums.terms.items():
            inside = self.new.add("add", inside, self._tile(tiles, x))
        return self.new.add("add", self._reduce("sum", inside, sums.axis), sums.rest)

    def _whole(self, known: Form | _Product) -> Value:
        if isinstance(known, _Product):
            return self.new.add("mul", self._made(known.a), self._made(known.b))
        return self._made(known)

    def _tile(self, tiles: tuple[int, int], x: Value) -> Value:
        """Tiles times what varies along an axis."""
        there = [t for t in tiles if t != _ONES]
        if len(there) == 2:
            return self.new.add("mul", self.new.add("mul", *there), x)
        return self.new.add("mul", there[0], x) if there else x


def _same(a: Value, b: Value) -> bool:
    return type(a) is type(b) and a == b


def _zero(x: Value) -> bool:
    return isinstance(x, float) and x == 0.0


def _simple(form: Form) -> bool:
    """Whether a form is a tile by a vector, which is as cheap made again."""
    if len(form) != 1:
        return not form
    return form[0].tile != _ONES and (_same(form[0].row, 1.0) or _same(form[0].key, 1.0))
