"""The text of two Triton kernels that walk the tokens of a sequence, from a step's program on tiles and its adjoint.

One GPU program holds the state of a head, or some rows of it where rows do not meet, in registers. `forward` steps and
reads, and leaves the state of every `chunk`-th token and the sums that a step makes. `backward` goes from the last
chunk to the first: it makes the states of a chunk again, of which the sums are there, so that this is entry by entry,
and walks back over them. No atomics; what programs of one head add up lies side by side and is added in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

from axes.programs.code import FUNCTIONS, ON_TILES, constant
from axes.programs.tiles import GRAD, Axis, Extent, Program, Value

Language = Literal["triton", "c"]  # of the kernels' texts: `c_text` writes the other
_LINES = ("[:, None]", "[None, :]")
OUT = "o"  # what is read, among outputs
_DECORATOR = "@triton.jit(do_not_specialize=['length', 'total', 'heads', 'phase'])"
_HEADER = (
    "import triton",
    "import triton.language as tl",
    FUNCTIONS,
    "",
    "",
)


@final
@dataclass(frozen=True, eq=False)
class Walk:
    """What kernels are written from.

    step: a token's program, with derivatives; refresh: of values that are held, before every `every`-th token.
    inputs: of a token, by name; states: what is carried; steady: of these, what no gradient is asked of. widths: of
    rows and keys; rows, keys: of a program, powers of two; chunk: tokens between kept states. ahead: 1 if a token's
    vectors are loaded a token ahead, 2 if its states are too. across: the axis that lies across warps, where sums are
    dearer; grouped: sums that can be made together are.
    """

    step: Program
    refresh: Program | None
    every: int
    inputs: Mapping[str, Extent]
    states: Mapping[str, Extent]
    steady: frozenset[str]
    widths: tuple[int, int]
    rows: int
    keys: int
    chunk: int
    warps: int
    ahead: int = 1
    across: Axis = "v"
    grouped: bool = True

    @property
    def parts(self) -> int:
        """Programs of a head."""
        return -(-self.widths[0] // self.rows)

    @cached_property
    def kept(self) -> list[int]:
        """The sums of a step that the way back reads."""
        program = self.step
        made = program.reductions(program.needed([OUT, *self.states]))
        read = {*program.needed(self.remade, made), *program.needed(self.grads, made)}
        return [i for i in made if i in read]

    @cached_property
    def changing(self) -> list[str]:
        """States that a step changes."""
        inputs = {n: i for i, n in self.step.names.items()}
        return [n for n in self.states if self.step.outputs[n] != inputs[n]]

    @cached_property
    def read(self) -> dict[str, Extent]:
        """States that a token reads; others are only written (a filter that keeps nothing)."""
        programs = [(self.step, [OUT, *self.states, *self.grads])]
        programs += [] if self.refresh is None else [(self.refresh, list(self.refresh.outputs))]
        names = {p.names.get(i) for p, outputs in programs for i in p.needed(outputs)}
        return {n: e for n, e in self.states.items() if n in names}

    @cached_property
    def remade(self) -> list[str]:
        """States that a chunk's are made again of."""
        return [n for n in self.changing if n in self.read]

    @cached_property
    def moving(self) -> dict[str, Extent]:
        """States with gradients."""
        return {n: e for n, e in self.states.items() if n not in self.steady}

    @cached_property
    def grads(self) -> list[str]:
        return [n for n in self.step.outputs if n.startswith(GRAD)]

    def alone(self, extent: Extent) -> bool:
        """Whether every program of a head has a value of its own."""
        return extent[0] or self.parts == 1

    def size(self, extent: Extent) -> int:
        """Entries of a value."""
        return (self.widths[0] if extent[0] else 1) * (self.widths[1] if extent[1] else 1)


@final
class _Text:
    """Lines of a kernel."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.depth = walk, 1
        self.lines: list[str] = []
        self.masked = walk.widths[0] % walk.rows != 0, walk.widths[1] != walk.keys

    def __call__(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def dim(self, axis: str) -> int:
        """The dimension of a tile that is along an axis."""
        return 0 if axis == self.walk.across else 1

    # ---- places ------------------------------------------------------------------------------------------------------

    def at(self, extent: Extent, own: bool = False) -> str:
        """Where an entry is in a value. own: as programs lay it out for themselves, what a thread holds in a row."""
        if own and self.walk.across == "k" and extent == (True, True):
            return f"keys * {self.walk.widths[0]} + rows"
        return {(True, True): f"rows * {self.walk.widths[1]} + keys", (True, False): "rows", (False, True): "keys",
                (False, False): "0"}[extent]  # fmt: skip

    def mask(self, extent: Extent, once: bool = False) -> str:
        """Of entries that are there. once: written by one of several programs."""
        found = [n for n, e, m in zip(("in_rows", "in_keys"), extent, self.masked, strict=True) if e and m]
        if once and self.walk.parts > 1 and not extent[0]:
            found.append("(part == 0)")
        return " & ".join(found)

    def load(self, place: str, extent: Extent, own: bool = False) -> str:
        mask = self.mask(extent)
        return f"tl.load({place} + {self.at(extent, own)}{f', mask={mask}, other=0.0' if mask else ''}).to(tl.float32)"

    def store(self, place: str, extent: Extent, value: str, once: bool = False, own: bool = False) -> None:
        mask = self.mask(extent, once)
        if mask and extent == (False, False):
            self("if part == 0:", f"    tl.store({place}, {value})")
            return
        self(f"tl.store({place} + {self.at(extent, own)}, {value}{f', mask={mask}' if mask else ''})")

    def tile(self, extent: Extent) -> str:
        sizes = [self.walk.rows if extent[0] else 1, self.walk.keys if extent[1] else 1]
        return str(sizes if self.walk.across == "v" else sizes[::-1])

    def like(self, value: str, old: Extent, new: Extent) -> str:
        """A value in the shape of another."""
        if old == new:
            return value
        return f"{value} + tl.zeros({self.tile(new)}, tl.float32)"

    # ---- operations --------------------------------------------------------------------------------------------------

    def operations(self, program: Program, order: Iterable[int], there: Mapping[int, str]) -> dict[int, str]:
        """The lines of some operations, and what the values are called. there: what has a name already."""
        names, own = dict(there), "x" if program is self.walk.step else "y"

        def text(x: Value) -> str:
            return names[x] if isinstance(x, int) else constant(x)

        for group in _grouped(program, [i for i in order if i not in names], self.walk.grouped):
            names |= {i: f"{own}{i}" for i in group}
            kind, _, axis = program.operations[group[0]].name.partition(" ")
            if not axis:
                (i,) = group
                self(f"{names[i]} = {ON_TILES[kind].format(*map(text, program.operations[i].inputs))}")
                continue
            taken = [program.operations[i].inputs[0] for i in group]
            shown = [self.masked_out(kind, axis, text(x)) for x in taken]
            extent = program.extent(taken[0])
            if len(group) == 1:
                self(f"{names[group[0]]} = {self.reduction(kind, axis, shown[0], extent)}")
                continue
            made = ", ".join(names[i] for i in group)
            call = f"functions.sum_{len(group)}"
            self(f"{made} = tl.reduce(({', '.join(shown)}), {self.dim(axis)}, {call}, keep_dims=True)")
        return names

    def masked_out(self, kind: str, axis: str, x: str) -> str:
        """A value without what is padding along an axis."""
        if not self.masked["vk".index(axis)]:
            return x
        empty = constant(0.0 if kind == "sum" else -math.inf)
        return f"tl.where({'in_rows' if axis == 'v' else 'in_keys'}, {x}, {empty})"

    def reduction(self, kind: str, axis: str, x: str, extent: Extent) -> str:
        if extent[1 - "vk".index(axis)]:
            return f"tl.{kind}({x}, {self.dim(axis)}, keep_dims=True)"
        return f"tl.{kind}(tl.{kind}({x}, {self.dim(axis)}), 0)"

    def output(self, program: Program, names: Mapping[int, str], name: str, extent: Extent) -> str:
        value = program.outputs.get(name, 0.0)
        text = names[value] if isinstance(value, int) else constant(value)
        if extent == (False, False) and not isinstance(value, int):
            return f"tl.full((), {text}, tl.float32)"
        return self.like(text, program.extent(value), extent)


_TOGETHER = 3  # sums that are made at once: each holds a tile until it is


def _grouped(program: Program, order: Sequence[int], together: bool) -> list[list[int]]:
    """Operations in an order in which they can be done: sums over one axis of tiles side by side where they may be, and
    everything else as late as it can be, since what waits for a sum holds registers."""
    if not together:
        return [[i] for i in order]
    level: dict[int, int] = {}
    for i in order:
        op = program.operations[i]
        level[i] = max((level.get(x, 0) for x in op.inputs if isinstance(x, int)), default=0) + (" " in op.name)
    groups: list[list[int]] = []
    done: set[int] = set()

    def make(wanted: Sequence[int]) -> None:
        """What some operations need, and then they, at once."""
        needed = set(wanted)
        for i in reversed(order):
            if i in needed:
                needed.update(x for x in program.operations[i].inputs if isinstance(x, int) and x not in done)
        groups.extend([i] for i in order if i in needed and i not in done and i not in wanted)
        groups.append(list(wanted))
        done.update(needed)

    for n in range(1, max(level.values(), default=0) + 1):
        waiting: dict[str, list[int]] = {}
        for i in (i for i in order if level[i] == n and " " in program.operations[i].name):
            op = program.operations[i]
            tiles = program.extent(op.inputs[0]) == (True, True) and op.name.startswith("sum")
            waiting.setdefault(op.name if tiles else str(i), []).append(i)
        for sums in waiting.values():
            for first in range(0, len(sums), _TOGETHER):
                make(sums[first : first + _TOGETHER])
    return [*groups, *([i] for i in order if i not in done)]


def _given(program: Program, names: Mapping[str, str]) -> dict[int, str]:
    return {i: names[n] for i, n in program.names.items() if n in names}


def arguments(walk: Walk) -> dict[str, list[str]]:
    """Names of what the kernels are given, in order."""
    inputs, states, kept = list(walk.inputs), list(walk.states), walk.kept
    strides = [f"{n}_{d}" for n in inputs for d in "bth"]
    common = [*(f"p_{n}" for n in inputs), *(f"first_{n}" for n in states)]
    ends = ["offsets", "length", "total", "heads", "phase", *strides]
    saved = [*(f"states_{n}" for n in walk.read), *(f"kept_{i}" for i in kept)]
    return {
        "forward": [*common, "out", *(f"last_{n}" for n in states), *saved, *ends, "KEEP: tl.constexpr",
                    "PACKED: tl.constexpr"],
        "backward": [*(f"p_{n}" for n in inputs), *saved, *(f"room_{n}" for n in walk.read), "grad_out",
                     *(f"d_last_{n}" for n in walk.moving), *(f"d_{n}" for n in inputs),
                     *(f"d_first_{n}" for n in walk.moving),
                     *ends, "PACKED: tl.constexpr"],
    }  # fmt: skip


def source(walk: Walk) -> str:
    """The text of both kernels."""
    given = arguments(walk)
    lines = list(_HEADER)
    for name, body in (("forward", _forward), ("backward", _backward)):
        lines += [_DECORATOR, f"def {name}({', '.join(given[name])}):"]
        text = _Text(walk)
        _start(text)
        body(text)
        lines += [*text.lines, "", ""]
    return "\n".join(lines)


def _start(text: _Text) -> None:
    walk = text.walk
    text(
        "head = (tl.program_id(0) % heads).to(tl.int64)",
        "unit = (tl.program_id(0) // heads).to(tl.int64)",
        "part = tl.program_id(1)",
        f"rows = part * {walk.rows} + tl.arange(0, {walk.rows}){_LINES[text.dim('v')]}",
        f"keys = tl.arange(0, {walk.keys}){_LINES[text.dim('k')]}",
        f"in_rows = rows < {walk.widths[0]}",
        f"in_keys = keys < {walk.widths[1]}",
        "if PACKED:",
        "    batch = unit * 0",
        "    begin = tl.load(offsets + unit).to(tl.int64)",
        "    count = (tl.load(offsets + unit + 1) - begin).to(tl.int32)",
        f"    slot = begin // {walk.chunk} + unit",
        "else:",
        "    batch = unit",
        "    begin = unit * 0",
        "    count = length",
        f"    slot = unit * ((length + {walk.chunk - 1}) // {walk.chunk})",
        f"chunks = (count + {walk.chunk - 1}) // {walk.chunk}",
        "own = unit * heads + head",
        "token = batch * length + begin",  # of all: times heads, plus head
    )
    text("from_ = tl.minimum(begin, length - 1)")  # of an empty sequence, whose numbers nobody uses
    for name in walk.inputs:
        text(f"p_{name} += batch * {name}_b + from_ * {name}_t + head * {name}_h")


def _fetch(text: _Text, token: str, prefix: str = "n_") -> None:
    for name, extent in text.walk.inputs.items():
        text(f"{prefix}{name} = {text.load(f'p_{name} + {token} * {name}_t', extent)}")


def _refreshed(text: _Text) -> None:
    """The values that are held, before a token that renews them."""
    walk = text.walk
    if walk.refresh is None:
        return
    text(f"if (phase + t) % {walk.every} == 0:")
    text.depth += 1
    program = walk.refresh
    values = [n for n in program.outputs if not n.startswith(GRAD)]
    names = _given(program, {**{n: n for n in walk.states}, **{n: f"i_{n}" for n in walk.inputs}})
    names = text.operations(program, program.needed(values), names)
    for n in values:
        text(f"{n} = {text.output(program, names, n, walk.states[n])}")
    text.depth -= 1


def _forward(text: _Text) -> None:
    walk, program = text.walk, text.walk.step
    for n, extent in walk.states.items():
        text(f"{n} = {text.load(f'first_{n} + own * {walk.size(extent)}', extent)}")
    _fetch(text, "0")
    text("for c in range(0, chunks):")
    text.depth += 1
    text("if KEEP:")
    text.depth += 1
    for n, extent in walk.read.items():
        text.store(f"states_{n} + ((slot + c) * heads + head) * {walk.size(extent)}", extent, n, once=True, own=True)
    text.depth -= 1
    text(f"for t in range(c * {walk.chunk}, tl.minimum((c + 1) * {walk.chunk}, count)):")
    text.depth += 1
    text(*(f"i_{n} = n_{n}" for n in walk.inputs))
    text("after = tl.minimum(t + 1, count - 1).to(tl.int64)")
    _fetch(text, "after")
    _refreshed(text)
    names = _given(program, {**{n: n for n in walk.states}, **{n: f"i_{n}" for n in walk.inputs}})
    names = text.operations(program, program.needed([OUT, *walk.states]), names)
    text("at = (token + t) * heads + head")
    rows = (True, False)
    text.store(f"out + at * {walk.widths[0]}", rows, text.output(program, names, OUT, rows))
    text("if KEEP:")
    text.depth += 1
    for i in walk.kept:
        extent = program.operations[i].extent
        text.store(f"kept_{i} + at * {walk.size(extent)}", extent, names[i], once=True)
    text("pass")
    text.depth -= 1
    _move(text, names, walk.changing)
    text.depth -= 2
    for n, extent in walk.states.items():
        text.store(f"last_{n} + own * {walk.size(extent)}", extent, n, once=True)


def _move(text: _Text, names: Mapping[int, str], moved: Sequence[str]) -> None:
    """The states behind a token."""
    walk = text.walk
    for n in moved:
        text(f"new_{n} = {text.output(walk.step, names, n, walk.states[n])}")
    text(*(f"{n} = new_{n}" for n in moved))


def _backward(text: _Text) -> None:
    walk, program = text.walk, text.walk.step
    entries = {n: (walk.rows if e[0] else 1) * (walk.keys if e[1] else 1) for n, e in walk.read.items()}
    inside = {n: _inside(walk, e) for n, e in walk.states.items()}
    for n, extent in walk.moving.items():
        text(f"g_{n} = {text.load(f'd_last_{n} + own * {walk.size(extent)}', extent)}")
        if not walk.alone(extent):
            text(f"g_{n} = tl.where(part == 0, g_{n}, 0.0)")
    for n in walk.read:
        text(f"room_{n} += (own * {walk.parts} + part) * {walk.chunk} * {entries[n]}")
    again, order = program.needed(walk.remade, walk.kept), program.needed(walk.grads, walk.kept)
    known = {i: f"x{i}" for i in walk.kept} | _given(program, {**{n: n for n in walk.states}, **_tokens(walk)})
    text("for back in range(0, chunks):")
    text.depth += 1
    text("c = chunks - 1 - back", f"start = c * {walk.chunk}", f"end = tl.minimum(start + {walk.chunk}, count)")
    # the states of the chunk
    for n, extent in walk.read.items():
        text(f"{n} = {text.load(f'states_{n} + ((slot + c) * heads + head) * {walk.size(extent)}', extent, True)}")
    read = _of_a_token(text, again)
    _bring(text, read, "start")
    text("for t in range(start, end):")
    text.depth += 1
    _brought(text, read, "tl.minimum(t + 1, end - 1)")
    _refreshed(text)
    for n in walk.read:
        text(f"tl.store(room_{n} + (t - start) * {entries[n]} + {inside[n]}, {n})")
    names = text.operations(program, again, known)
    _move(text, names, walk.remade)
    text.depth -= 1
    text("tl.debug_barrier()")
    # back over them
    read = _of_a_token(text, order) | {"g_out": ("grad_out + at", walk.widths[0], (True, False))}
    states = {n: (f"room_{n} + (t - start)", entries[n]) for n in walk.read}
    _bring(text, read, "end - 1")
    if walk.ahead > 1:
        text("t = end - 1", *(f"n_{n} = tl.load({x} * {size} + {inside[n]})" for n, (x, size) in states.items()))
    text("for step in range(0, end - start):")
    text.depth += 1
    if walk.ahead > 1:
        text(*(f"{n} = n_{n}" for n in states), "t = tl.maximum(end - 2 - step, start)")
        text(*(f"n_{n} = tl.load({x} * {size} + {inside[n]})" for n, (x, size) in states.items()))
    text("t = end - 1 - step")
    if walk.ahead < 2:
        text(*(f"{n} = tl.load({x} * {size} + {inside[n]})" for n, (x, size) in states.items()))
    _brought(text, read, "tl.maximum(t - 1, start)")
    text("at = (token + t) * heads + head")
    cotangents = {GRAD + n: f"g_{n}" for n in walk.moving} | {GRAD + OUT: "g_out"}
    names = text.operations(program, order, known | _given(program, cotangents))
    for n, extent in walk.inputs.items():
        text(f"d{n} = {text.output(program, names, GRAD + n, extent)}")
    for n, extent in walk.moving.items():
        text(f"new_{n} = {text.output(program, names, GRAD + n, extent)}")
    text(*(f"g_{n} = new_{n}" for n in walk.moving))
    if walk.refresh is not None:
        _refreshed_back(text, walk.refresh)
    for n, extent in walk.inputs.items():
        place = "at" if walk.alone(extent) else "(part.to(tl.int64) * total + at)"  # side by side, to be added
        text.store(f"d_{n} + {place} * {walk.size(extent)}", extent, f"d{n}")
    text.depth -= 1
    text("tl.debug_barrier()")
    text.depth -= 1
    for n, extent in walk.moving.items():
        place = "own" if walk.alone(extent) else "(part * tl.num_programs(0) + own)"
        text.store(f"d_first_{n} + {place} * {walk.size(extent)}", extent, f"g_{n}")


def _tokens(walk: Walk) -> dict[str, str]:
    return {n: f"i_{n}" for n in walk.inputs}


Loads = dict[str, tuple[str, int | str, Extent]]  # by name: where, and how many entries a token has there


def _of_a_token(text: _Text, order: Sequence[int]) -> Loads:
    """What the forward has kept of a token and the token itself, as far as some operations read it."""
    walk, program = text.walk, text.walk.step
    wanted = {program.names.get(i) for i in order}
    found: Loads = {}
    for n, extent in walk.inputs.items():
        if n in wanted or walk.refresh is not None:
            found[f"i_{n}"] = (f"p_{n} + here", f"{n}_t", extent)
    for i in walk.kept:
        if i in order:
            extent = program.operations[i].extent
            found[f"x{i}"] = (f"kept_{i} + at", walk.size(extent), extent)
    return found


def _bring(text: _Text, read: Loads, first: str) -> None:
    """Ahead of a loop: what its first token reads."""
    if text.walk.ahead:
        text(f"here = begin * 0 + {first}", "at = (token + here) * heads + head")
        text(*(f"n_{n} = {text.load(f'{place} * {size}', e)}" for n, (place, size, e) in read.items()))


def _brought(text: _Text, read: Loads, following: str) -> None:
    """What a token reads, and the loads of the token behind it."""
    if text.walk.ahead:
        text(*(f"{n} = n_{n}" for n in read), f"here = begin * 0 + {following}")
    else:
        text("here = begin * 0 + t")
    text("at = (token + here) * heads + head")
    ahead = "n_" if text.walk.ahead else ""
    text(*(f"{ahead}{n} = {text.load(f'{place} * {size}', e)}" for n, (place, size, e) in read.items()))


def _inside(walk: Walk, extent: Extent) -> str:
    """Where an entry is in a program's own room, padding included."""
    rows, keys = f"(rows - part * {walk.rows})", "keys"
    both = f"{rows} * {walk.keys} + keys" if walk.across == "v" else f"keys * {walk.rows} + {rows}"
    return {(True, True): both, (True, False): rows, (False, True): keys,
            (False, False): "0"}[extent]  # fmt: skip


def _refreshed_back(text: _Text, program: Program) -> None:
    """What came through held values goes to what they were made of."""
    walk = text.walk
    made = [n for n in program.outputs if not n.startswith(GRAD)]
    text(f"if (phase + t) % {walk.every} == 0:")
    text.depth += 1
    given = {**{n: n for n in walk.states}, **{n: f"i_{n}" for n in walk.inputs}}
    names = _given(program, given | {GRAD + n: f"g_{n}" for n in made})
    grads = [n for n in program.outputs if n.startswith(GRAD)]
    names = text.operations(program, program.needed(grads), names)
    for n in grads:
        name = n.removeprefix(GRAD)
        if name in walk.moving and name not in made:
            text(f"g_{name} += {text.output(program, names, n, walk.states[name])}")
        elif name in walk.inputs:
            text(f"d{name} += {text.output(program, names, n, walk.inputs[name])}")
    for n in made:
        text(f"g_{n} = tl.zeros({text.tile(walk.states[n])}, tl.float32)")
    text.depth -= 1
