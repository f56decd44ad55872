"""The text of two Triton kernels that walk the tokens of a sequence, from a step's program on tiles and its adjoint.

One GPU program holds the state of a head, or some rows of it where rows do not meet, in registers. `forward` steps and
reads, and leaves the state of every `chunk`-th token and the sums that a step makes. `backward` goes from the last
chunk to the first: it makes the states of a chunk again, of which the sums are there, so that this is entry by entry,
and walks back over them. No atomics; what programs of one head add up lies side by side and is added in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple, final

from axes.programs.code import FUNCTIONS, ON_TILES, constant
from axes.programs.tiles import GRAD, NEXT, Axis, Extent, Program, Value

Language = Literal["triton", "c"]  # of the kernels' texts: `c_text` writes the other
_LINES = ("[:, None]", "[None, :]")
OUT = "o"  # what is read, among outputs
_OPEN = "do_not_specialize=['length', 'total', 'heads', 'phase', 'low', 'high', 'window']"
_DECORATOR = f"@triton.jit({_OPEN})"
_HEADER = (
    "import triton",
    "import triton.language as tl",
    FUNCTIONS,
    "",
    "",
)
_GLUON_DECORATOR = f"@gluon.jit({_OPEN})"
_GLUON_HEADER = (
    "from axes.kernels.common.gluon import barrier, gl as tl, gluon",
    "from axes.kernels.token import gluon_functions as functions",
    "",
    "",
)

# what a processor has a unit for, of vectors and tiles
_BY_UNIT = {n: f"functions.{n}({{0}})" for n in ("reciprocal", "rsqrt", "sqrt", "exp")}

# vectors of four numbers, turned from every other row to the next, so that lanes whose rows are apart meet in no bank
_TURNED = "tl.SwizzledSharedLayout(4, 2, 8, [1, 0])"


class Threads(NamedTuple):
    """How a tile of rows and keys lies over the threads of a program: lanes of a warp and warps along each; of what is
    left a thread has neighbours."""

    lanes: tuple[int, int]
    warps: tuple[int, int]


@final
@dataclass(frozen=True, eq=False)
class Walk:
    """What kernels are written from.

    step: a token's program, with derivatives; refresh: of values that are held, before every `every`-th token.
    inputs: of a token, by name; states: what is carried; steady: of these, what no gradient is asked of. widths: of
    rows and keys; rows, keys: of a program, powers of two; chunk: tokens between kept states. ahead: 1 if a token's
    vectors are loaded a token ahead, 2 if its states are too. across: the axis that lies across warps, where sums are
    dearer; grouped: sums that can be made together are. threads: how a tile lies over them, where the compiler is told
    (Gluon). inner: tokens of a chunk whose states are there at once on the way back, in shared memory where threads
    are given; 0 for all of a chunk. early: tokens ahead of which vectors are loaded. unroll: tokens that a
    turn of a loop goes through, between renewals of held values, which then read no token. reread: behind each exchange
    between warps of the way back states in shared memory are read again. told: of a walk, what Hopper GPUs walk
    instead.
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
    threads: Threads | None = None
    inner: int = 0
    early: int = 1
    unroll: int = 1
    reread: bool = False
    told: Callable[[Walk], tuple[Walk, Walk] | None] | None = None

    @cached_property
    def hopper(self) -> tuple[Walk, Walk] | None:
        """What these GPUs walk instead, forward and back: found when it is asked for, which takes a second or two."""
        return None if self.told is None else self.told(self)

    @property
    def span(self) -> int:
        """Tokens whose states are there at once on the way back."""
        return self.inner or self.chunk

    @property
    def marks(self) -> int:
        """Spans of a chunk whose first states are kept: none where it is one."""
        return -(-self.chunk // self.inner) if self.inner and self.inner < self.chunk else 0

    def room(self, name: str, gluon: bool) -> int:
        """Entries of a program's own room in memory: of a state that tokens change marks, and a span's that are not in
        shared memory; of a held one what it is in a chunk."""
        extent = self.read[name]
        entries = (self.rows if extent[0] else 1) * (self.keys if extent[1] else 1)
        if name not in self.changing:
            return entries * self.renewals
        return entries * (self.marks + (0 if self.near(name, gluon) else self.span))

    def near(self, name: str, gluon: bool) -> bool:
        """Whether a span's states are in shared memory: of those that are another at every token."""
        return gluon and self.inner > 0 and self.states[name] == (True, True) and name in self.changing

    @property
    def renewals(self) -> int:
        """How often a held value may be another within a chunk, its beginning included."""
        return (self.chunk - 1) // self.every + 2 if self.every else 1

    @property
    def parts(self) -> int:
        """Programs of a head."""
        return -(-self.widths[0] // self.rows)

    @cached_property
    def kept(self) -> list[int]:
        """The sums of a step that the way back reads."""
        program = self.step
        made = program.reductions(program.needed([OUT, *self.states, *(f"{NEXT}{i}" for i in self.carried)]))
        read = {*program.needed(self.remade, made), *program.needed(self.grads, made)}
        return [i for i in made if i in read]

    @cached_property
    def late(self) -> list[int]:
        """Operations of a step behind sums that warps exchange, of vectors over what lies across them, which no other
        token waits for: of several tokens they are made at once."""
        if self.unroll == 1 or self.threads is None:
            return []
        program = self.step
        first = frozenset(program.needed([*self.states, *(f"{NEXT}{i}" for i in self.carried)], self.carried))
        found: list[int] = []
        for i in program.needed([OUT], self.carried):
            op = program.operations[i]
            sums = op.name.endswith(" v") and self.threads.warps[0] > 1 and program.extent(op.inputs[0]) != (True, True)
            if i not in first and (sums or set(found) & set(op.inputs)):
                found.append(i)
        return found

    @cached_property
    def carried(self) -> list[int]:
        """Sums of states that a token finds for the one behind it."""
        return [int(n.removeprefix(NEXT)) for n in self.step.outputs if n.startswith(NEXT)]

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

    def __init__(self, walk: Walk, gluon: bool = False) -> None:
        self.walk, self.depth, self.gluon = walk, 1, gluon
        self.lines: list[str] = []
        # where threads are told, vectors are of one dimension: as parts of a tile they would be there once for each of
        # the entries that a thread has along the other axis
        self.flat = walk.threads is not None
        self.exchanged: Callable[[], None] = lambda: None  # what is done behind an exchange between warps
        self.masked = walk.widths[0] % walk.rows != 0, walk.widths[1] != walk.keys

    def __call__(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def dim(self, axis: str) -> int:
        """The dimension of a tile that is along an axis."""
        return 0 if axis == self.walk.across else 1

    def shown(self, value: str, old: Extent, new: Extent) -> str:
        """A value beside those of another extent."""
        if not self.flat or new != (True, True) or old[0] == old[1]:
            return value
        return f"{value}{_LINES[self.dim('v' if old[0] else 'k')]}"

    # ---- places ------------------------------------------------------------------------------------------------------

    def at(self, extent: Extent, own: bool = False) -> str:
        """Where an entry is in a value. own: as programs lay it out for themselves, what a thread holds in a row."""
        rows, keys = self.shown("rows", (True, False), extent), self.shown("keys", (False, True), extent)
        if own and self.walk.across == "k" and extent == (True, True):
            return f"{keys} * {self.walk.widths[0]} + {rows}"
        return {(True, True): f"{rows} * {self.walk.widths[1]} + {keys}", (True, False): "rows", (False, True): "keys",
                (False, False): "0"}[extent]  # fmt: skip

    def mask(self, extent: Extent, once: bool = False) -> str:
        """Of entries that are there. once: written by one of several programs."""
        both = (("in_rows", (True, False)), ("in_keys", (False, True)))
        found = [self.shown(*n, extent) for n, e, m in zip(both, extent, self.masked, strict=True) if e and m]
        if once and self.walk.parts > 1 and not extent[0]:
            found.append("(part == 0)")
        return " & ".join(found)

    def load(self, place: str, extent: Extent, own: bool = False) -> str:
        return f"{self.load_as_it_is(place, extent, own)}.to(tl.float32)"

    def load_as_it_is(self, place: str, extent: Extent, own: bool = False) -> str:
        mask = self.mask(extent)
        return f"tl.load({place} + {self.at(extent, own)}{f', mask={mask}, other=0.0' if mask else ''})"

    def store(self, place: str, extent: Extent, value: str, once: bool = False, own: bool = False) -> None:
        mask = self.mask(extent, once)
        if mask and extent == (False, False):
            self("if part == 0:", f"    tl.store({place}, {value})")
            return
        self(f"tl.store({place} + {self.at(extent, own)}, {value}{f', mask={mask}' if mask else ''})")

    def tile(self, extent: Extent) -> str:
        if self.flat and extent[0] != extent[1]:
            return str([self.walk.rows if extent[0] else self.walk.keys])
        sizes = [self.walk.rows if extent[0] else 1, self.walk.keys if extent[1] else 1]
        return str(sizes if self.walk.across == "v" else sizes[::-1])

    def like(self, value: str, old: Extent, new: Extent) -> str:
        """A value in the shape of another."""
        if old == new:
            return value
        return f"{self.shown(value, old, new)} + {self.zeros(new)}"

    def zeros(self, extent: Extent) -> str:
        layout = self.sliced("v" if extent[0] else "k") if extent[0] != extent[1] else "LAYOUT"
        return f"tl.zeros({self.tile(extent)}, tl.float32{f', {layout}' if self.gluon else ''})"

    def sliced(self, axis: str) -> str:
        """The layout of a vector along an axis."""
        return f"tl.SliceLayout({1 - self.dim(axis)}, LAYOUT)"

    def range(self, axis: str, size: int) -> str:
        """The numbers along an axis."""
        if self.flat:
            return f"tl.arange(0, {size}{f', {self.sliced(axis)}' if self.gluon else ''})"
        return f"tl.arange(0, {size}){_LINES[self.dim(axis)]}"

    def layout(self, parts_of: str = "") -> str:
        """Of all tiles: what is left to a thread are neighbours along both axes. parts_of: of a tile of what every warp
        along an axis has, each thread with all that its rows or keys have."""
        walk = self.walk
        assert walk.threads is not None
        lanes, warps = walk.threads
        sizes = [max(1, n // (a * b)) for n, a, b in zip((walk.rows, walk.keys), lanes, warps, strict=True)]
        if parts_of:
            sizes["vk".index(parts_of)] = warps["vk".index(parts_of)]
        parts = [list(x) if walk.across == "v" else list(x)[::-1] for x in (sizes, lanes, warps)]
        return f"tl.BlockedLayout({parts[0]}, {parts[1]}, {parts[2]}, [1, 0])"

    def wait(self) -> None:
        """For what other threads have written."""
        self("barrier()" if self.gluon else "tl.debug_barrier()")

    # ---- operations --------------------------------------------------------------------------------------------------

    def operations(
        self, program: Program, order: Iterable[int], there: Mapping[int, str], mark: str = ""
    ) -> dict[int, str]:
        """The lines of some operations, and what the values are called. there: what has a name already; mark: of new
        names."""
        names, own = dict(there), ("x" if program is self.walk.step else "y") + mark

        def text(x: Value) -> str:
            return names[x] if isinstance(x, int) else constant(x)

        grouped = self.walk.grouped and not self.gluon  # there sums hardly wait for others
        for group in _grouped(program, [i for i in order if i not in names], grouped):
            names |= {i: f"{own}{i}" for i in group}
            kind, _, axis = program.operations[group[0]].name.partition(" ")
            if not axis:
                (i,) = group
                op = program.operations[i]
                form = _BY_UNIT.get(kind) if self.gluon and any(op.extent) else None
                inputs = op.inputs
                of = program.operations[inputs[0]] if form and isinstance(inputs[0], int) else None
                if of is not None and (kind, of.name, of.extent) == ("exp", "add", (True, True)):
                    form, inputs = "functions.exp_of_sum({0}, {1})", of.inputs  # turned to base 2 as it is added
                beside = [self.shown(text(x), program.extent(x), op.extent) for x in inputs]
                self(f"{names[i]} = {(form or ON_TILES[kind]).format(*beside)}")
                continue
            taken = [program.operations[i].inputs[0] for i in group]
            extent = program.extent(taken[0])
            shown = [self.masked_out(kind, axis, text(x), extent) for x in taken]
            if len(group) == 1:
                self(f"{names[group[0]]} = {self.reduction(kind, axis, shown[0], extent)}")
                if self.across(axis) > 1 and extent == (True, True):
                    self.exchanged()
                continue
            made = ", ".join(names[i] for i in group)
            call = f"functions.sum_{len(group)}"
            kept = "" if self.flat else ", keep_dims=True"
            self(f"{made} = tl.reduce(({', '.join(shown)}), {self.dim(axis)}, {call}{kept})")
        return names

    def together(self, program: Program, order: Iterable[int], tokens: Sequence[dict[int, str]]) -> None:
        """Some operations of several tokens, into their names: of sums of vectors that warps exchange, one exchange."""
        count = len(tokens)
        for i in order:
            op = program.operations[i]
            kind, _, axis = op.name.partition(" ")
            if not axis or count == 1 or program.extent(op.inputs[0]) == (True, True):
                for j, names in enumerate(tokens):
                    names |= self.operations(program, [i], names, f"{j}_")
                continue
            extent = program.extent(op.inputs[0])
            taken = [self.masked_out(kind, axis, names[op.inputs[0]], extent) for names in tokens]  # type: ignore[index]
            made = [f"x{j}_{i}" for j in range(count)]
            self(f"{', '.join(made)} = tl.reduce(({', '.join(taken)}), 0, functions.{kind}_{count})")
            for names, one in zip(tokens, made, strict=True):
                names[i] = one

    def masked_out(self, kind: str, axis: str, x: str, extent: Extent) -> str:
        """A value without what is padding along an axis."""
        if not self.masked["vk".index(axis)]:
            return x
        empty = constant(0.0 if kind == "sum" else -math.inf)
        name, own = ("in_rows", (True, False)) if axis == "v" else ("in_keys", (False, True))
        return f"tl.where({self.shown(name, own, extent)}, {x}, {empty})"

    def across(self, axis: str) -> int:
        """Warps that an axis is told to lie across."""
        threads = self.walk.threads if self.gluon else None
        return 1 if threads is None else threads.warps["vk".index(axis)]

    def reduction(self, kind: str, axis: str, x: str, extent: Extent) -> str:
        if self.flat:
            tile, warps = extent == (True, True), self.across(axis)
            if tile and warps > 1:
                return f"functions.{kind}_across({x}, {self.dim(axis)}, {warps}, {self.layout(axis)}, LAYOUT)"
            return f"tl.{kind}({x}, {self.dim(axis) if tile else 0})"
        if extent[1 - "vk".index(axis)]:
            return f"tl.{kind}({x}, {self.dim(axis)}, keep_dims=True)"
        return f"tl.{kind}(tl.{kind}({x}, {self.dim(axis)}), 0)"

    def output(self, program: Program, names: Mapping[int, str], name: str, extent: Extent) -> str:
        value = program.outputs.get(name, 0.0)
        text = names[value] if isinstance(value, int) else constant(value)
        if extent == (False, False) and not isinstance(value, int):
            return f"tl.to_tensor({text})" if self.gluon else f"tl.full((), {text}, tl.float32)"
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


def arguments(walk: Walk, segments: bool = False) -> dict[str, list[str]]:
    """Names of what the kernels are given, in order. segments: the way back is told its chunks, from low up to high,
    and tokens of a sequence that what programs of one head add up has room for."""
    inputs, states, kept = list(walk.inputs), list(walk.states), walk.kept
    strides = [f"{n}_{d}" for n in inputs for d in "bth"]
    common = [*(f"p_{n}" for n in inputs), *(f"first_{n}" for n in states)]
    ends = ["offsets", "length", "total", "heads", "phase", *strides]
    within = ["low", "high", "window"] if segments else []
    saved = [*(f"states_{n}" for n in walk.read), *(f"kept_{i}" for i in kept)]
    return {
        "forward": [*common, "out", *(f"last_{n}" for n in states), *saved, *ends, "KEEP: tl.constexpr",
                    "PACKED: tl.constexpr"],
        "backward": [*(f"p_{n}" for n in inputs), *saved, *(f"room_{n}" for n in walk.read), "grad_out",
                     *(f"d_last_{n}" for n in walk.moving), *(f"d_{n}" for n in inputs),
                     *(f"d_first_{n}" for n in walk.moving),
                     *ends, *within, "PACKED: tl.constexpr"],
    }  # fmt: skip


def source(walk: Walk, gluon: bool = False) -> str:
    """The text of both kernels, in Triton's language or in Gluon."""
    given = arguments(walk, segments=True)
    lines = list(_GLUON_HEADER if gluon else _HEADER)
    for name, body in (("forward", _forward), ("backward", _backward)):
        lines += [_GLUON_DECORATOR if gluon else _DECORATOR, f"def {name}({', '.join(given[name])}):"]
        text = _Text(walk, gluon)
        _start(text)
        body(text)
        lines += [*text.lines, "", ""]
    return "\n".join(lines)


def _start(text: _Text) -> None:
    walk = text.walk
    if text.gluon:
        text(f"LAYOUT: tl.constexpr = {text.layout()}")
    text(
        "head = (tl.program_id(0) % heads).to(tl.int64)",
        "unit = (tl.program_id(0) // heads).to(tl.int64)",
        "part = tl.program_id(1)",
        f"rows = part * {walk.rows} + {text.range('v', walk.rows)}",
        f"keys = {text.range('k', walk.keys)}",
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


def _refreshed(text: _Text, then: Callable[[], None] = lambda: None) -> None:
    """The values that are held, before a token that renews them, and what is done with them."""
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
    then()
    text.depth -= 1


def _forward(text: _Text) -> None:
    walk, program = text.walk, text.walk.step
    for n, extent in walk.states.items():
        text(f"{n} = {text.load(f'first_{n} + own * {walk.size(extent)}', extent)}")
    carried = {i: f"carried_{i}" for i in walk.carried}
    wanted = [OUT, *walk.states, *(f"{NEXT}{i}" for i in carried)]
    read: Loads = {f"i_{n}": (f"p_{n} + here", f"{n}_t", e) for n, e in walk.inputs.items()}
    _bring(text, read, lambda j: f"tl.maximum(tl.minimum({j}, count - 1), 0)" if j else "0")
    text("for c in range(0, chunks):")
    text.depth += 1
    text("if KEEP:")
    text.depth += 1
    for n, extent in walk.read.items():
        text.store(f"states_{n} + ((slot + c) * heads + head) * {walk.size(extent)}", extent, n, once=True, own=True)
    text.depth -= 1
    held = _given(program, {n: n for n in walk.states})
    for i, name in carried.items():  # sums anew at every chunk, so that roundings do not add up
        made = text.operations(program, [*(x for x in program.operations[i].inputs if isinstance(x, int)), i], held)
        text(f"{name} = {made[i]}")

    late = walk.late
    order = [i for i in program.needed(wanted, carried) if i not in late]
    tokens: list[dict[int, str]] = []

    def keep(i: int, names: Mapping[int, str]) -> None:
        extent = program.operations[i].extent
        text.store(f"kept_{i} + at * {walk.size(extent)}", extent, names[i], once=True)

    def show(names: Mapping[int, str]) -> None:
        text.store(f"out + at * {walk.widths[0]}", (True, False), text.output(program, names, OUT, (True, False)))

    def token() -> None:
        mark = f"{len(tokens)}_" if late else ""
        names = _given(program, {**{n: n for n in walk.states}, **{n: f"i_{n}" for n in walk.inputs}})
        names = text.operations(program, order, names | carried, mark)
        text("at = (token + t) * heads + head")
        if not late:
            show(names)
        text("if KEEP:")
        text.depth += 1
        for i in walk.kept:
            if i not in late:
                keep(i, names)
        text("pass")
        text.depth -= 1
        _move(text, names, walk.changing)
        for i, name in carried.items():
            text(f"{name} = {names[program.outputs[f'{NEXT}{i}']]}")  # type: ignore[index]
        if late:
            text(f"at{mark} = at")
            tokens.append(names)

    def behind() -> None:
        """What no token waits for, of several."""
        text.together(program, late, tokens)
        for j, names in enumerate(tokens):
            text(f"at = at{j}_")
            show(names)
            text("if KEEP:")
            text.depth += 1
            for i in walk.kept:
                if i in late:
                    keep(i, names)
            text("pass")
            text.depth -= 1
        tokens.clear()

    text(f"start = c * {walk.chunk}", f"end = tl.minimum(start + {walk.chunk}, count)")
    brought = partial(_brought, text, read, f"tl.minimum(t + {walk.early}, count - 1)")
    _each(text, "start", "end", brought, partial(_refreshed, text), token, behind if late else None)
    text.depth -= 1
    for n, extent in walk.states.items():
        text.store(f"last_{n} + own * {walk.size(extent)}", extent, n, once=True)


def _each(
    text: _Text, first: str, end: str, brought: Callable[[], None], renewed: Callable[[], None],
    token: Callable[[], None], behind: Callable[[], None] | None = None, back: bool = False,
) -> None:  # fmt: skip
    """Tokens from first up to end, or back from the last one: what a token brings, held values renewed ahead of it,
    the token itself, and what is behind those of one turn. Back, renewals come behind it."""
    walk, many = text.walk, text.walk.unroll
    if many == 1:
        text(f"for step in range(0, {end} - {first}):" if back else f"for t in range({first}, {end}):")
        text.depth += 1
        text(*([f"t = {end} - 1 - step"] if back else []))
        brought()
        _in_order([renewed, token], back)
        text.depth -= 1
        return
    if walk.every:  # runs of tokens between renewals
        text(f"turns = (phase + {first}) // {walk.every}", f"ending = (phase + {end} - 1) // {walk.every} + 1")
        text("for turning in range(turns, ending):")
        text.depth += 1
        text("turn = turns + ending - 1 - turning" if back else "turn = turning")
        text(f"begins = tl.maximum({first}, turn * {walk.every} - phase)")
        text(f"ends = tl.minimum({end}, (turn + 1) * {walk.every} - phase)")
    else:
        text(f"begins = {first}", f"ends = {end}")

    def run() -> None:
        text(f"whole = (ends - begins) // {many} * {many}")
        for loop, count in ((f"0, whole, {many}", many), ("whole, ends - begins", 1)):
            text(f"for step in range({loop}):")
            text.depth += 1
            for j in range(count):
                text(f"t = ends - 1 - step - {j}" if back else f"t = begins + step + {j}")
                brought()
                token()
            if behind is not None:
                behind()
            text.depth -= 1

    def renewal() -> None:
        text("t = begins")
        renewed()

    _in_order([renewal, run], back)
    text.depth -= bool(walk.every)


def _in_order(parts: list[Callable[[], None]], back: bool) -> None:
    for part in parts[::-1] if back else parts:
        part()


def _move(text: _Text, names: Mapping[int, str], moved: Sequence[str]) -> None:
    """The states behind a token."""
    walk = text.walk
    for n in moved:
        text(f"new_{n} = {text.output(walk.step, names, n, walk.states[n])}")
    text(*(f"{n} = new_{n}" for n in moved))


def _backward(text: _Text) -> None:
    walk, program = text.walk, text.walk.step
    for n, extent in walk.moving.items():
        text(f"g_{n} = {text.load(f'd_last_{n} + own * {walk.size(extent)}', extent)}")
        if not walk.alone(extent):
            text(f"g_{n} = tl.where(part == 0, g_{n}, 0.0)")
    room = _Room(text)
    again, order = program.needed(walk.remade, walk.kept), program.needed(walk.grads, walk.kept)
    known = {i: f"x{i}" for i in walk.kept} | _given(program, {**{n: n for n in walk.states}, **_tokens(walk)})
    text("high = tl.minimum(high, chunks)", "for back in range(low, high):")
    text.depth += 1
    text("c = high - 1 - (back - low)", f"start = c * {walk.chunk}", f"end = tl.minimum(start + {walk.chunk}, count)")
    # the states of the chunk
    for n, extent in walk.read.items():
        text(f"{n} = {text.load(f'states_{n} + ((slot + c) * heads + head) * {walk.size(extent)}', extent, True)}")
    read = _of_a_token(text, again)

    def walked(first: str, end: str, last: str, renewed: Callable[[], None], kept: Callable[[], None]) -> None:
        """Tokens again, entry by entry; those behind them are there up to a last one."""
        brought = partial(_brought, text, read, f"tl.minimum(t + {walk.early}, {last} - 1)")

        def token() -> None:
            kept()
            names = text.operations(program, again, known)
            _move(text, names, walk.remade)

        _each(text, first, end, brought, renewed, token)

    def bring(last: str) -> None:
        _bring(text, read, lambda j: f"tl.maximum(tl.minimum(start + {j}, {last} - 1), start)" if j else "start")

    room.begin()
    if walk.marks:
        begin = f"start + (end - 1 - start) // {walk.span} * {walk.span}"  # of the last span
        text(f"begun = {begin}")
        bring("begun")
        text(f"for span in range(0, (begun - start) // {walk.span}):")
        text.depth += 1
        room.mark("span")
        text(f"opens = start + span * {walk.span}")
        walked("opens", f"(opens + {walk.span})", "begun", partial(_refreshed, text, room.renewed), lambda: None)
        text.depth -= 1
        room.mark(f"(begun - start) // {walk.span}")
        text.wait()
        text("ended = end")
        text(f"for span in range(0, (end - start + {walk.span - 1}) // {walk.span}):")
        text.depth += 1
        text(f"start = begun - span * {walk.span}", f"end = tl.minimum(start + {walk.span}, ended)")
        room.marked(f"(start - c * {walk.chunk}) // {walk.span}")
    bring("end")
    walked("start", "end", "end", partial(_refreshed, text, room.renewed), room.token)
    text.wait()
    # back over them
    read_back = _of_a_token(text, order) | {"g_out": ("grad_out + at", walk.widths[0], (True, False))}
    _bring(text, read_back, lambda j: f"tl.maximum(end - {1 + j}, start)" if j else "end - 1")
    room.end()

    def brought() -> None:
        room.back()
        _brought(text, read_back, f"tl.maximum(t - {walk.early}, start)")

    def token() -> None:
        text("at = (token + t) * heads + head")
        cotangents = {GRAD + n: f"g_{n}" for n in walk.moving} | {GRAD + OUT: "g_out"}
        if walk.reread:
            text.exchanged = room.reread
        names = text.operations(program, order, known | _given(program, cotangents))
        text.exchanged = lambda: None
        for n, extent in walk.inputs.items():
            text(f"d{n} = {text.output(program, names, GRAD + n, extent)}")
        for n, extent in walk.moving.items():
            text(f"new_{n} = {text.output(program, names, GRAD + n, extent)}")
        text(*(f"g_{n} = new_{n}" for n in walk.moving))
        if walk.unroll == 1:
            gone_back()
        if not all(map(walk.alone, walk.inputs.values())):  # of a segment, side by side, to be added
            text(f"beside = (batch * window + begin + t - low * {walk.chunk}) * heads + head")
            text("beside += part.to(tl.int64) * total")
        for n, extent in walk.inputs.items():
            place = "at" if walk.alone(extent) else "beside"
            text.store(f"d_{n} + {place} * {walk.size(extent)}", extent, f"d{n}")

    def gone_back() -> None:
        if walk.refresh is not None:
            _refreshed_back(text, walk.refresh, room)

    _each(text, "start", "end", brought, (lambda: None) if walk.unroll == 1 else gone_back, token, back=True)
    text.wait()
    text.depth -= 2 if walk.marks else 1
    for n, extent in walk.moving.items():
        place = "own" if walk.alone(extent) else "(part * tl.num_programs(0) + own)"
        text.store(f"d_first_{n} + {place} * {walk.size(extent)}", extent, f"g_{n}")


@final
class _Room:
    """Where the states of a span of tokens wait on the way back, one place a token.

    In memory of the program's own, behind the marks that a chunk's spans begin with; where threads are given, states of
    both axes in shared memory. Held ones have a place in memory for each that they are in a chunk.
    """

    def __init__(self, text: _Text) -> None:
        self.text, walk = text, text.walk
        self.entries = {n: (walk.rows if e[0] else 1) * (walk.keys if e[1] else 1) for n, e in walk.read.items()}
        self.inside = {n: _inside(walk, e) for n, e in walk.read.items()}
        self.shared = [n for n in walk.read if walk.near(n, text.gluon)]
        for n in walk.read:
            text(f"room_{n} += (own * {walk.parts} + part) * {walk.room(n, text.gluon)}")
        for n in self.shared:
            shape = [walk.span, *((walk.rows, walk.keys) if walk.across == "v" else (walk.keys, walk.rows))]
            text(f"near_{n} = tl.allocate_shared_memory(tl.float32, {shape}, {_TURNED})")

    def _held(self, name: str) -> bool:
        return name not in self.text.walk.changing

    def _place(self, name: str, index: str) -> str:
        return f"room_{name} + ({index}) * {self.entries[name]} + {self.inside[name]}"

    def _store(self, name: str, index: str) -> None:
        if name in self.shared:
            self.text(f"near_{name}.index({index}).store({name})")
        else:
            self.text(f"tl.store({self._place(name, f'{self.text.walk.marks} + {index}')}, {name})")

    def _load(self, name: str, index: str) -> str:
        if name in self.shared:
            return f"near_{name}.index({index}).load(LAYOUT)"
        return f"tl.load({self._place(name, f'{self.text.walk.marks} + {index}')})"

    def _turn(self, token: str) -> str:
        """How often held values were renewed in a chunk up to a token."""
        every, first = self.text.walk.every, f"c * {self.text.walk.chunk}"
        return f"(phase + {token}) // {every} - (phase + {first} + {every - 1}) // {every} + 1" if every else "0"

    def begin(self) -> None:
        """Ahead of a chunk."""
        for n in filter(self._held, self.text.walk.read):
            self.text(f"tl.store({self._place(n, '0')}, {n})")

    def mark(self, index: str) -> None:
        """Ahead of a span."""
        for n in self.text.walk.remade:
            self.text(f"tl.store({self._place(n, index)}, {n})")

    def marked(self, index: str) -> None:
        """Back at the first token of a span."""
        every = self.text.walk.every
        for n in self.text.walk.read:
            if self._held(n):
                before = f"{self._turn('start')} - ((phase + start) % {every} == 0).to(tl.int32)" if every else "0"
                self.text(f"{n} = tl.load({self._place(n, before)})")
            else:
                self.text(f"{n} = tl.load({self._place(n, index)})")

    def renewed(self) -> None:
        """Behind a renewal of held values."""
        for n in filter(self._held, self.text.walk.read):
            self.text(f"tl.store({self._place(n, self._turn('t'))}, {n})")

    def token(self) -> None:
        for n in self.text.walk.remade:
            self._store(n, "t - start")

    def _ahead(self, name: str) -> bool:
        """Whether a token's state is loaded while the one behind it is gone through: from where that takes long."""
        return self.text.walk.ahead > 1 or self.text.gluon and name not in self.shared

    def end(self) -> None:
        """Ahead of the way back, from the last token."""
        for n in filter(self._ahead, self.text.walk.remade):
            self.text(f"n_{n} = {self._load(n, 'end - 1 - start')}")

    def back(self) -> None:
        """A token's states."""
        for n in self.text.walk.remade:
            if self._ahead(n):
                self.text(f"{n} = n_{n}", f"n_{n} = {self._load(n, 'tl.maximum(t - 1 - start, 0)')}")
            else:
                self.text(f"{n} = {self._load(n, 't - start')}")

    def reread(self) -> None:
        """A token's states that are near, so that nobody holds them up to here."""
        for n in self.shared:
            self.text(f"{n} = {self._load(n, 't - start')}")

    def again(self) -> None:
        """A token's states, when the one behind it may have been asked for."""
        for n in self.text.walk.remade:
            self.text(f"{n} = {self._load(n, 't - start')}")

    def returned(self) -> None:
        """Behind a token that renewed held values: what they were before."""
        before = f"{self._turn('t')} - 1"
        for n in filter(self._held, self.text.walk.read):
            self.text(f"{n} = tl.load({self._place(n, before)})")


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


def _bring(text: _Text, read: Loads, token: Callable[[int], str]) -> None:
    """Ahead of a loop: what its first tokens read. token: the number of one, of how many are ahead of it."""
    if not text.walk.ahead:
        return
    for j in range(text.walk.early):
        text(f"here = begin * 0 + {token(j)}", "at = (token + here) * heads + head")
        text(*(f"n{j}_{n} = {text.load_as_it_is(f'{place} * {size}', e)}" for n, (place, size, e) in read.items()))


def _brought(text: _Text, read: Loads, following: str) -> None:
    """What a token reads, and the loads of a token behind it, whose numbers nobody waits for before that."""
    early = text.walk.early if text.walk.ahead else 0
    if early:
        text(*(f"{n} = n0_{n}.to(tl.float32)" for n in read))
        text(*(f"n{j}_{n} = n{j + 1}_{n}" for j in range(early - 1) for n in read))
        text(f"here = begin * 0 + {following}")
    else:
        text("here = begin * 0 + t")
    text("at = (token + here) * heads + head")
    for n, (place, size, e) in read.items():
        into = f"n{early - 1}_{n} = {{}}" if early else f"{n} = {{}}.to(tl.float32)"
        text(into.format(text.load_as_it_is(f"{place} * {size}", e)))


def _inside(walk: Walk, extent: Extent) -> str:
    """Where an entry is in a program's own room, padding included."""
    lines = [_LINES[n] if walk.threads is not None and extent == (True, True) else "" for n in (0, 1)]
    rows, keys = f"(rows - part * {walk.rows})", "keys"
    rows, keys = (x + line for x, line in zip((rows, keys), lines if walk.across == "v" else lines[::-1], strict=True))
    both = f"{rows} * {walk.keys} + {keys}" if walk.across == "v" else f"{keys} * {walk.rows} + {rows}"
    return {(True, True): both, (True, False): rows, (False, True): keys,
            (False, False): "0"}[extent]  # fmt: skip


def _refreshed_back(text: _Text, program: Program, room: _Room) -> None:
    """What came through held values goes to what they were made of."""
    walk = text.walk
    made = [n for n in program.outputs if not n.startswith(GRAD)]
    text(f"if (phase + t) % {walk.every} == 0:")
    text.depth += 1
    given = {**{n: n for n in walk.states}, **{n: f"i_{n}" for n in walk.inputs}}
    names = _given(program, given | {GRAD + n: f"g_{n}" for n in made})
    if walk.unroll > 1:  # behind a loop, which leaves nothing
        room.again()
    grads = [n for n in program.outputs if n.startswith(GRAD)]
    names = text.operations(program, program.needed(grads), names)
    for n in grads:
        name = n.removeprefix(GRAD)
        if name in walk.moving and name not in made:
            text(f"g_{name} += {text.output(program, names, n, walk.states[name])}")
        elif name in walk.inputs:
            text(f"d{name} += {text.output(program, names, n, walk.inputs[name])}")
    for n in made:
        text(f"g_{n} = {text.zeros(walk.states[n])}")
    room.returned()
    text.depth -= 1
