"""What a token writes, u = f(x, |k|^2, inputs), as text of functions that kernels of substitution call.

f is followed with its derivatives (`tiles`): u and x have an entry for every value, so have inputs that are rows, other
inputs are one number; no value has entries of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, final

from torch import Tensor

from axes.programs.code import FUNCTIONS, ON_TILES, constant
from axes.programs.radial import radial
from axes.programs.tiles import GRAD, NotTiles, Program, Shape, trace

Kind = Literal["row", "number"]
Function = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
SLOTS = 8  # inputs that the kernels have arguments for
_X, _K2, _U = "x", "k2", "u"
_EACH = "of entries"  # what entries of a row give to the derivative in |k|^2
_EMPTY = {"sum": "0.0", "max": "float('-inf')"}  # what padding is to a reduction


@final
class Source(NamedTuple):
    """Text of a response. inputs: those that it reads, in order; mixes: whether entries of a row meet; length: whether
    it reads |k|^2; radial: whether it is a number times an error, by its length; beside: whether derivatives in its
    inputs, and what entries give to that in |k|^2, are made entry by entry."""

    text: str
    inputs: tuple[str, ...]
    mixes: bool
    length: bool
    radial: bool
    beside: bool


def source(function: Function, inputs: Mapping[str, Kind], width: int) -> Source:
    """The functions that the kernels of substitution call; `axes.kernels.substitution.response` shows them.

    function: of x (1, width), |k|^2 (1, 1) and inputs (1, width) or (1,), by name, to u (1, width). Raises NotTiles.
    """
    shapes: dict[Kind, Shape] = {"row": (None, "v"), "number": (None,)}
    program = trace(
        lambda given: {_U: function(given[_X], given[_K2], {n: given[n] for n in inputs})},
        {_X: shapes["row"], _K2: (None, None), **{n: shapes[kind] for n, kind in inputs.items()}},
        (width, 3 if width == 2 else 2),
        wanted=(_X, _K2, *inputs),
    )
    read = {program.names.get(i) for i in program.needed([_U])}
    kinds = {n: kind for n, kind in inputs.items() if n in read}
    if not 0 < len(kinds) <= SLOTS:
        raise NotTiles(f"it has {len(kinds)} inputs, and kernels take up to {SLOTS}")
    one, tile = (_Text(program, list(kinds), wide) for wide in (False, True))
    slots = ", ".join(f"i{n}" for n in range(SLOTS))
    pointers, grads = (", ".join(f"{c}{n}" for n in range(SLOTS)) for c in "pd")
    lines = [FUNCTIONS, "", "", "@triton.jit", f"def inputs({pointers}, at, v, V, there, inside):", "    return ("]
    for n, kind in enumerate(kinds.values()):
        where, mask = ("at * V + v", "inside & there") if kind == "row" else ("at", "there")
        lines.append(f"        tl.load(p{n} + {where}, mask={mask}, other=0.0).to(tl.float32),")
    lines += ["    )", ""]
    for name, given, made in (("respond", "x, k2", _U), ("turned", "x, k2, g", GRAD + _X)):
        lines += ["@triton.jit", f"def {name}({given}, {slots}, inside):", *one.lines([made])]
        lines += [f"    return {one.value(made, 'x')}", ""]
    lines += ["@triton.jit"]
    lines += [f"def pull(x, k2, g, {pointers}, {grads}, at, v, V: tl.constexpr, there, inside):"]
    for n, kind in enumerate(kinds.values()):
        where, mask, end = "at", "there", "[:, None]"
        if kind == "row":
            where, mask, end = "at[:, None] * V + v[None, :]", "inside & there[:, None]", ""
        lines.append(f"    i{n} = tl.load(p{n} + {where}, mask={mask}, other=0.0).to(tl.float32){end}")
    lines += tile.lines([_U, *(GRAD + n for n in (_X, _K2, *kinds))])
    for n, (name, kind) in enumerate(kinds.items()):
        to, mask, like = f"d{n} + at[:, None]", "there[:, None]", "k2"
        if kind == "row":
            to, mask, like = f"d{n} + at[:, None] * V + v[None, :]", "inside & there[:, None]", "x"
        lines.append(f"    tl.store({to}, ({tile.value(GRAD + name, like)}).to(d{n}.dtype.element_ty), mask={mask})")
    lines += [f"    return {', '.join(tile.value(n, x) for n, x in ((_U, 'x'), (GRAD + _X, 'x'), (GRAD + _K2, 'k2')))}"]
    mixes = bool(program.reductions(program.needed([_U])))
    length = program.outputs.get(GRAD + _K2, 0.0)
    added = program.operations[length] if isinstance(length, int) else None
    whole = not mixes and set(kinds.values()) == {"row"} and (added is None or added.name == "sum v")
    if whole:
        program.outputs[_EACH] = length if added is None else added.inputs[0]
        alone = _Text(program, list(kinds), True)
        named = [_U, *(GRAD + n for n in (_X, *kinds)), _EACH]
        lines += ["", "@triton.jit", f"def beside(x, k2, g, {slots}):", *alone.lines(named)]
        lines += [f"    return {', '.join(alone.value(n, 'x') for n in named)}"]
    rows, by_length = [n for n, kind in kinds.items() if kind == "row"], None
    if mixes and len(rows) == 1:
        numbers = [GRAD + n for n in (_K2, *kinds) if n != rows[0]]
        by_length = radial(program, one.given, rows[0], (_U, GRAD + _X), numbers, slots)
    return Source("\n".join([*lines, by_length or ""]), tuple(kinds), mixes, _K2 in read, by_length is not None, whole)


class _Text:
    """Lines of one program, of one token (x has a dimension, numbers none) or, wide, of tiles (tokens, entries), where
    a number is (tokens, 1)."""

    def __init__(self, program: Program, inputs: list[str], wide: bool) -> None:
        self.program, self.wide = program, wide
        given = {_X: "x", _K2: "k2", GRAD + _U: "g", **{n: f"i{k}" for k, n in enumerate(inputs)}}
        self.given = {i: given.get(n, "0.0") for i, n in program.names.items()}
        self.names = dict(self.given)

    def lines(self, outputs: Iterable[str]) -> list[str]:
        """What makes these outputs."""
        found = []
        for i in self.program.needed([n for n in outputs if n in self.program.outputs]):
            op = self.program.operations[i]
            if op.name == "input":
                continue
            kind, _, axis = op.name.partition(" ")
            taken = [self._text(x) for x in op.inputs]
            code = self._reduction(kind, taken[0]) if axis else ON_TILES[kind].format(*taken)
            self.names[i] = f"t{i}"
            found.append(f"    t{i} = {code}")
        return found

    def value(self, output: str, like: str) -> str:
        """An output in the shape of x or k2."""
        value = self.program.outputs.get(output, 0.0)
        whole = like == "x" and self.program.extent(value)[0] or like == "k2" and isinstance(value, int)
        return self._text(value) if whole else f"{like} * 0.0 + {self._text(value)}"

    def _reduction(self, kind: str, x: str) -> str:
        shown = f"tl.where(inside, {x}, {_EMPTY[kind]})"
        return f"tl.{kind}({shown}, 1)[:, None]" if self.wide else f"tl.{kind}({shown}, 0)"

    def _text(self, x: int | float) -> str:
        return self.names[x] if isinstance(x, int) else constant(x)


__all__ = ["Function", "Kind", "Source", "source"]
