"""The text of two C functions that walk the tokens of a sequence, from a step's program on tiles and its adjoint.

They do on a CPU what the kernels of `tile_text` do on a GPU, with the same arguments: `forward` steps and reads, and
leaves the state of every `chunk`-th token and the sums that a step makes; `backward` makes the states of a chunk again
and walks back over them. A program is one head of one sequence, and its state stays in the nearest cache.

A step is cut where it sums: operations on tiles between two sums are one loop over the entries, in which what the next
sums take is added up. It is cut too where it iterates on a matrix, which is a function of its own (`c_polynomials`):
iterates of a chunk lie on tapes from when its states are made again. The order of additions is the text's and the
compiler's, whatever the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

from axes.programs.c_polynomials import RESULT, Real, Sizes
from axes.programs.tile_text import OUT, Walk, arguments
from axes.programs.tiles import BACK, FULL, GRAD, STAGE, Extent, Operation, Program, Value

_ROWS: Extent = (True, False)
_KEYS: Extent = (False, True)
_ONE: Extent = (False, False)
_PLACES = {FULL: "[v * K + k]", _ROWS: "[v]", _KEYS: "[k]", _ONE: ""}
_HEADER = """\
#include <math.h>
#include <stdlib.h>
#include <string.h>
typedef {real} real;
static inline real largest(real a, real b) {{ return (a > b) | (a != a) ? a : b; }}
static inline real least(real a, real b) {{ return (a < b) | (a != a) ? a : b; }}
"""
# what is not a number stays so, as in torch
CODE = {
    "mul": "{0} * {1}", "add": "{0} + {1}", "sub": "{0} - {1}", "neg": "-{0}", "abs": "FABS({0})",
    "reciprocal": "1 / {0}", "sqrt": "SQRT({0})", "rsqrt": "1 / SQRT({0})",
    "sign": "{0} > 0 ? 1 : {0} < 0 ? -1 : {0} * 0", "exp": "EXP({0})", "log": "LOG({0})", "log1p": "LOG1P({0})",
    "expm1": "EXPM1({0})", "tanh": "TANH({0})", "sigmoid": "1 / (1 + EXP(-{0}))", "pow": "POW({0}, {1})",
    "maximum": "largest({0}, {1})", "minimum": "least({0}, {1})", "where": "{0} != 0 ? {1} : {2}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "and": "({0} != 0) & ({1} != 0)", "or": "({0} != 0) | ({1} != 0)", "not": "{0} == 0",
}  # fmt: skip
_FUNCTIONS = ("fabs", "sqrt", "exp", "log", "log1p", "expm1", "tanh", "pow")
_NEUTRAL = {"sum": "0", "max": "-INFINITY"}


def source(walk: Walk, real: Real) -> str:
    """The text of both functions, `forward` and `backward`: each takes its tensors and its numbers as two arrays, and
    the programs that it is to run; it returns 1 where there is no memory."""
    lines = [header(real, *walk.widths)]
    programs = [p for p in (walk.step, walk.refresh) if p is not None]
    if any(p.stages(range(len(p.operations))) for p in programs):
        lines.append(Sizes(*walk.widths, real).text())
    given = arguments(walk)
    for name, body in (("forward", _forward), ("backward", _backward)):
        text = _Text(walk, real)
        body(text)
        lines += text.function(name, [n.removesuffix(": tl.constexpr") for n in given[name]])
    return "\n".join([*lines, ""])


def header(real: Real, rows: int, keys: int) -> str:
    """What stands before the functions of a walk."""
    return f"{functions(real)}\nenum {{ V = {rows}, K = {keys} }};"


def functions(real: Real) -> str:
    """What the operations are written with."""
    names = [f"#define {n.upper()} {n}{'f' if real == 'float' else ''}" for n in _FUNCTIONS]
    return "\n".join([_HEADER.format(real=real), *names])


@final
class _Text:
    """Lines of a function, and the room that it needs."""

    def __init__(self, walk: Walk, real: Real) -> None:
        self.walk, self.depth = walk, 2
        self.sizes = Sizes(*walk.widths, real)
        self.lines: list[str] = []
        self.rooms: dict[str, int] = {}
        self.places = 0

    def __call__(self, *lines: str) -> None:
        for line in lines:
            self.depth -= line.startswith("}")
            self.lines.append("    " * self.depth + line)
            self.depth += line.endswith("{")

    def function(self, name: str, given: Sequence[str]) -> list[str]:
        """The whole of it. Tensors are told from numbers by their places among the arguments."""
        at = given.index("offsets") + 1
        tensors, numbers = given[:at], given[at:]
        lines = [f"int {name}(void *const *tensors, const long *numbers, long first, long end) {{"]
        lines += [f"    real *const begin_{n} = tensors[{i}];" for i, n in enumerate(tensors[:-1])]
        lines += [f"    const long *const offsets = tensors[{at - 1}];"]
        lines += [f"    const long {n} = numbers[{i}];" for i, n in enumerate(numbers)]
        total, places = 0, []
        for room, size in self.rooms.items():
            places.append(f"    real *const restrict {room} = __builtin_assume_aligned(work + {total}, 64);")
            total += -(-size // 16) * 16  # 64 bytes
        lines += [f"    real *const work = aligned_alloc(64, {max(total, 16)} * sizeof(real));"]
        lines += ["    if (work == NULL) return 1;", *places]
        lines += ["    for (long program = first; program < end; program++) {", *self.lines, "    }"]
        return [*lines, "    free(work);", "    return 0;", "}", ""]

    def size(self, extent: Extent) -> int:
        return self.walk.size(extent)

    def room(self, name: str, extent: Extent) -> str:
        """An array of the program's own; of one number, its first entry."""
        return self.space(name, self.size(extent))

    def space(self, name: str, size: int) -> str:
        assert self.rooms.setdefault(name, size) == size
        return name

    def copy(self, to: str, given: str, extent: Extent) -> None:
        self(f"memcpy({to}, {given}, {self.size(extent)} * sizeof(real));")

    def clear(self, name: str, extent: Extent) -> None:
        self(f"memset({name}, 0, {self.size(extent)} * sizeof(real));")

    # ---- operations --------------------------------------------------------------------------------------------------

    def operations(
        self,
        program: Program,
        order: Iterable[int],
        there: Mapping[int, str],
        written: Sequence[tuple[str, Extent, str, Value]],
        own: str,
        tapes: Mapping[int, str] | None = None,
    ) -> dict[int, str]:
        """The loops of some operations, and where the values are. there: arrays that are given; written: what they come
        to, as (array, extent, "=" or "+=", value); own: of names; tapes: of stages, to be written, or there already."""
        return _Loops(self, program, [i for i in order if i not in there], there, own, tapes or {}).run(written)


@final
class _Loops:
    """A program's operations as loops, cut where it sums."""

    def __init__(
        self, text: _Text, program: Program, order: list[int], there: Mapping[int, str], own: str,
        tapes: Mapping[int, str],
    ) -> None:  # fmt: skip
        self.text, self.program, self.order, self.own = text, program, order, own
        self.names, self.tapes = dict(there), dict(tapes)
        self.rows: dict[int, str] = {}  # of a loop over tiles: the entries of its row
        self.level: dict[int, int] = {}
        for i in order:
            op = program.operations[i]
            before = max((self.level.get(x, 0) for x in op.inputs if isinstance(x, int)), default=0)
            self.level[i] = before + (" " in op.name)
        self.last = max(self.level.values(), default=0)

    def run(self, written: Sequence[tuple[str, Extent, str, Value]]) -> dict[int, str]:
        tiles = self._late([x for _, extent, _, x in written if extent == FULL])
        sums: dict[tuple[int, Extent], list[int]] = {}
        stages = self._where(lambda i: self.program.operations[i].name.startswith((STAGE, BACK)))
        for i in self.program.reductions(self.order):
            source = self.program.operations[i].inputs[0]
            sums.setdefault((self.level[i] - 1, self.program.extent(source)), []).append(i)
        for level in range(self.last + 1):
            for extent in (_ONE, _ROWS, _KEYS):
                own = [i for i in self._plain(extent) if self.level[i] == level]
                self._loop(extent, own, sums.get((level, extent), []), ())
            own = [i for i in self._plain(FULL) if tiles[i] == level]
            outputs = [x for x in written if x[1] == FULL] if level == self.last else ()
            self._loop(FULL, own, sums.get((level, FULL), []), outputs)
            for i in (i for i in stages if self.level[i] == level + 1):
                self._stage(i)
        for extent in (_ROWS, _KEYS, _ONE):
            self._loop(extent, [], [], [x for x in written if x[1] == extent])
        return self.names

    def _where(self, test: Callable[[int], bool]) -> list[int]:
        return [i for i in self.order if test(i)]

    def _plain(self, extent: Extent) -> list[int]:
        operations = self.program.operations
        return self._where(lambda i: " " not in operations[i].name and operations[i].extent == extent)

    def _late(self, ends: Sequence[Value]) -> dict[int, int]:
        """The loop in which a tile is made: the latest, so that few are kept from one loop to the next."""
        found = {x: self.last for x in ends if isinstance(x, int)}
        for i in reversed(self.order):
            op = self.program.operations[i]
            when = self.level[i] - 1 if " " in op.name else found.get(i, self.last)
            for x in op.inputs:
                if isinstance(x, int) and self.program.extent(x) == FULL:
                    found[x] = min(found.get(x, self.last), when)
        self.kept = {i for i in self.order if self.program.extent(i) == FULL and self._asked_later(i, found, ends)}
        return found

    def _asked_later(self, i: int, found: Mapping[int, int], ends: Sequence[Value]) -> bool:
        when = [found[i]] + [self.last] * (i in ends)
        for j in self.order:
            op = self.program.operations[j]
            if i in [x for x in op.inputs if isinstance(x, int)]:
                if op.name.startswith((STAGE, BACK)):
                    return True
                when.append(self.level[j] - 1 if " " in op.name else found[j])
        return max(when) > found[i]

    def _stage(self, i: int) -> None:
        """An iteration, or the way back through one."""
        text, op = self.text, self.program.operations[i]
        x, last = op.inputs[0], op.inputs[-1]
        assert isinstance(x, int)
        stage = i if op.name.startswith(STAGE) else x
        name, numbers = self.program.operations[stage].name.removeprefix(STAGE), _numbers(self.program, stage)
        steps = (len(numbers) - 4) // 3
        text("{", f"static const real numbers[] = {{{', '.join(map(constant, numbers))}}};")
        if stage == i:
            keep = i in self.tapes or any(op.inputs[:1] == (i,) for op in self._ways_back())
            if i not in self.tapes:
                self.tapes[i] = text.space(f"{self.own}{i}_tape", text.sizes.tape(steps if keep else 2))
            self.names[i] = f"({self.tapes[i]} + {RESULT})"
            text(f"{name}({self.names[x]}, {self.tapes[i]}, numbers, {steps}, {int(keep)});")
        else:
            assert isinstance(last, int)
            self.names[i] = text.room(f"{self.own}{i}", FULL)
            room = text.space("beside", text.sizes.room())
            text(f"{name}_back({self.tapes[x]}, {self.names[last]}, {self.names[i]}, {room}, numbers, {steps});")
        text("}")

    def _ways_back(self) -> list[Operation]:
        return [op for i in self.order if (op := self.program.operations[i]).name.startswith(BACK)]

    # ---- one loop ----------------------------------------------------------------------------------------------------

    def _loop(
        self, extent: Extent, made: list[int], sums: list[int], written: Sequence[tuple[str, Extent, str, Value]]
    ) -> None:
        """Operations entry by entry, what is added up of them, and what is written."""
        if not (made or sums or written):
            return
        text, operations = self.text, self.program.operations
        taken = [x for i in (*made, *sums) for x in operations[i].inputs] + [x for *_, x in written]
        rows = {x for x in taken if isinstance(x, int) and self.program.extent(x) == _ROWS}
        self.rows = {x: f"row{x}_" for x in sorted(rows)} if extent == FULL else {}
        known: dict[int, str] = {}
        lines, ends, after = [], [], []
        for i in made:
            op = operations[i]
            known[i] = f"{self.own}{i}_"
            lines.append(f"const real {known[i]} = {self._code(op.name, op.inputs, known)};")
            if extent == _ONE:
                self.names[i] = text.room(f"{self.own}{i}", _ONE)
                ends.append(f"{self.names[i]}[0] = {known[i]};")
            elif extent != FULL or i in self.kept:
                self.names[i] = text.room(f"{self.own}{i}", extent)
                ends.append(f"{self.names[i]}{_PLACES[extent]} = {known[i]};")
        inner: dict[str, list[str]] = {"sum": [], "max": []}
        begin = []
        for i in sums:
            kind, _, axis = operations[i].name.partition(" ")
            self.names[i] = name = text.room(f"{self.own}{i}", operations[i].extent)
            x = self._value(operations[i].inputs[0], known)
            if extent == FULL and axis == "v":  # side by side, row after row
                place = f"{name}[k]"
                begin.append(f"for (long k = 0; k < K; k++) {place} = {_NEUTRAL[kind]};")
            else:
                place = f"{self.own}{i}_sum"
                inner[kind].append(place)
                after.append(f"{name}{'[v]' if extent == FULL else '[0]'} = {place};")
            ends.append(f"{place} += {x};" if kind == "sum" else f"{place} = largest({place}, {x});")
        for n, (_, _, _, value) in enumerate(written):
            lines.append(f"const real out{n}_ = {self._value(value, known)};")
        ends += [f"{to}{_PLACES[extent] or '[0]'} {sign} out{n}_;" for n, (to, _, sign, _) in enumerate(written)]
        starts = [f"real {name} = {_NEUTRAL[kind]};" for kind, names in inner.items() for name in names]
        pragma = "".join(
            f" reduction({sign}: {', '.join(inner[kind])})" for kind, sign in (("sum", "+"),) if inner[kind]
        )
        simd = [] if inner["max"] else [f"#pragma omp simd{pragma}"]
        entry = [*lines, *ends]
        text("{", *begin)
        if extent == FULL:
            text("for (long v = 0; v < V; v++) {")
            text(*(f"const real {name} = {self.names[x]}[v];" for x, name in self.rows.items()))
            text(*starts, *simd, "for (long k = 0; k < K; k++) {", *entry, "}", *after, "}")
        elif extent == _ONE:
            text(*entry)
        else:
            axis, width = ("v", "V") if extent == _ROWS else ("k", "K")
            text(*starts, *simd, f"for (long {axis} = 0; {axis} < {width}; {axis}++) {{", *entry, "}", *after)
        text("}")

    def _value(self, x: Value, known: Mapping[int, str]) -> str:
        """A value in a loop: what the loop has made, or an entry of an array."""
        if not isinstance(x, int):
            return constant(x)
        if x in known or x in self.rows:
            return known[x] if x in known else self.rows[x]
        return f"{self.names[x]}{_PLACES[self.program.extent(x)] or '[0]'}"

    def _code(self, name: str, inputs: Sequence[Value], known: Mapping[int, str]) -> str:
        return CODE[name].format(*(self._value(x, known) for x in inputs))


def _numbers(program: Program, stage: int) -> list[float]:
    """Of a stage: factor, shift, floor, size, and a, b, c of every step."""
    return [x for x in program.operations[stage].inputs[1:] if isinstance(x, float)]


def constant(x: float) -> str:
    """A number as text of C."""
    if x != x:
        return "((real)NAN)"
    return f"((real){float(x)!r})" if abs(x) != math.inf else f"({'-' if x < 0 else ''}(real)INFINITY)"


# ---- walks -----------------------------------------------------------------------------------------------------------


def _start(text: _Text) -> None:
    walk = text.walk
    text(
        "const long head = program % heads, unit = program / heads;",
        "const long batch = PACKED ? 0 : unit, begin = PACKED ? offsets[unit] : 0;",
        "const long count = PACKED ? offsets[unit + 1] - begin : length;",
        f"const long whole = (length + {walk.chunk - 1}) / {walk.chunk};",
        f"const long slot = PACKED ? begin / {walk.chunk} + unit : unit * whole;",
        f"const long chunks = (count + {walk.chunk - 1}) / {walk.chunk};",
        "const long token = batch * length + begin;",  # of all: times heads, plus head
    )
    for n in walk.inputs:
        text(f"const real *const p_{n} = begin_p_{n} + batch * {n}_b + begin * {n}_t + head * {n}_h;")


def _token(text: _Text) -> None:
    text("const long at = (token + t) * heads + head;")
    for n in text.walk.inputs:
        text(f"const real *const restrict i_{n} = p_{n} + t * {n}_t;")


def _given(program: Program, names: Mapping[str, str]) -> dict[int, str]:
    return {i: names[n] for i, n in program.names.items() if n in names}


def _inputs(walk: Walk) -> dict[str, str]:
    return {n: f"i_{n}" for n in walk.inputs}


def _states(walk: Walk) -> dict[str, str]:
    return {n: f"w_{n}" for n in walk.states}


def _value(program: Program, name: str) -> Value:
    return program.outputs.get(name, 0.0)


def _refreshed(text: _Text) -> None:
    """The values that are held, before a token that renews them."""
    walk = text.walk
    if walk.refresh is None:
        return
    program = walk.refresh
    made = [n for n in program.outputs if not n.startswith(GRAD)]
    names = _given(program, _states(walk) | _inputs(walk))
    text(f"if ((phase + t) % {walk.every} == 0) {{")
    written = [(f"w_{n}", walk.states[n], "=", _value(program, n)) for n in made]
    text.operations(program, program.needed(made), names, written, "r")
    text("}")


def _forward(text: _Text) -> None:
    walk, program = text.walk, text.walk.step
    _start(text)
    for n, extent in walk.states.items():
        text.copy(text.room(f"w_{n}", extent), f"begin_first_{n} + program * {text.size(extent)}", extent)
    text("for (long c = 0; c < chunks; c++) {", "if (KEEP) {")
    for n, extent in walk.read.items():
        text.copy(f"begin_states_{n} + ((slot + c) * heads + head) * {text.size(extent)}", f"w_{n}", extent)
    text("}")
    text(f"for (long t = c * {walk.chunk}; t < count && t < (c + 1) * {walk.chunk}; t++) {{")
    _token(text)
    _refreshed(text)
    text(f"real *const restrict out = begin_out + at * {walk.widths[0]};")
    written = [("out", _ROWS, "=", _value(program, OUT))]
    written += [(f"w_{n}", walk.states[n], "=", program.outputs[n]) for n in walk.changing]
    given = _given(program, _states(walk) | _inputs(walk))
    names = text.operations(program, program.needed([OUT, *walk.states]), given, written, "x")
    text("if (KEEP) {")
    for i in walk.kept:
        extent = program.operations[i].extent
        text.copy(f"begin_kept_{i} + at * {text.size(extent)}", names[i], extent)
    text("}", "}", "}")
    for n, extent in walk.states.items():
        text.copy(f"begin_last_{n} + program * {text.size(extent)}", f"w_{n}", extent)


def _backward(text: _Text) -> None:
    walk, program = text.walk, text.walk.step
    _start(text)
    for n, extent in walk.moving.items():
        text.copy(text.room(f"g_{n}", extent), f"begin_d_last_{n} + program * {text.size(extent)}", extent)
    for n in walk.states:
        text.room(f"w_{n}", walk.states[n])
    for n, extent in walk.read.items():
        text(f"real *const room_{n} = begin_room_{n} + program * {walk.chunk * text.size(extent)};")
    again, order = program.needed(walk.remade, walk.kept), program.needed(walk.grads, walk.kept)
    kept = {i: f"x_kept_{i}" for i in walk.kept}
    taped = {i: len(_numbers(program, i)) // 3 - 1 for i in program.stages(again) if i in order}
    order = program.needed(walk.grads, [*walk.kept, *taped])
    tapes = {i: f"tape_{i}" for i in taped}
    for i, steps in taped.items():
        text.space(f"tapes_{i}", walk.chunk * text.sizes.tape(steps))
    text("for (long c = chunks - 1; c >= 0; c--) {")
    text(f"const long start = c * {walk.chunk};")
    text(f"const long stop = count < start + {walk.chunk} ? count : start + {walk.chunk};")
    for n, extent in walk.read.items():
        text.copy(f"w_{n}", f"begin_states_{n} + ((slot + c) * heads + head) * {text.size(extent)}", extent)
    text("for (long t = start; t < stop; t++) {")  # the states of the chunk
    _token(text)
    _refreshed(text)
    for n, extent in walk.read.items():
        text.copy(f"room_{n} + (t - start) * {text.size(extent)}", f"w_{n}", extent)
    _held(text, again)
    _taped(text, taped)
    written = [(f"w_{n}", walk.states[n], "=", program.outputs[n]) for n in walk.remade]
    text.operations(program, again, kept | _given(program, _states(walk) | _inputs(walk)), written, "y", tapes)
    text("}", "for (long t = stop - 1; t >= start; t--) {")  # back over them
    _token(text)
    for n, extent in walk.read.items():
        text(f"const real *const restrict b_{n} = room_{n} + (t - start) * {text.size(extent)};")
    for n, extent in walk.inputs.items():
        text(f"real *const restrict d_{n} = begin_d_{n} + at * {text.size(extent)};")
    text(f"const real *const restrict g_out = begin_grad_out + at * {walk.widths[0]};")
    _held(text, order)
    _taped(text, taped)
    made = kept | {i: f"({tape} + {RESULT})" for i, tape in tapes.items()}
    states = {n: f"b_{n}" for n in walk.read}
    cotangents = {GRAD + n: f"g_{n}" for n in walk.moving} | {GRAD + OUT: "g_out"}
    written = [(f"d_{n}", extent, "=", _value(program, GRAD + n)) for n, extent in walk.inputs.items()]
    written += [(f"g_{n}", extent, "=", _value(program, GRAD + n)) for n, extent in walk.moving.items()]
    text.operations(program, order, made | _given(program, states | _inputs(walk) | cotangents), written, "z", tapes)
    if walk.refresh is not None:
        _refreshed_back(text, walk.refresh)
    text("}", "}")
    for n, extent in walk.moving.items():
        text.copy(f"begin_d_first_{n} + program * {text.size(extent)}", f"g_{n}", extent)


def _held(text: _Text, order: Sequence[int]) -> None:
    """What the forward has kept of a token, as far as some operations read it."""
    program = text.walk.step
    for i in text.walk.kept:
        if i in order:
            size = text.size(program.operations[i].extent)
            text(f"const real *const restrict x_kept_{i} = begin_kept_{i} + at * {size};")


def _taped(text: _Text, taped: Mapping[int, int]) -> None:
    """Where iterates of a token are, whose states are made again for it."""
    for i, steps in taped.items():
        text(f"real *const tape_{i} = tapes_{i} + (t - start) * {text.sizes.tape(steps)};")


def _refreshed_back(text: _Text, program: Program) -> None:
    """What came through held values goes to what they were made of."""
    walk = text.walk
    made = [n for n in program.outputs if not n.startswith(GRAD)]
    grads = [n for n in program.outputs if n.startswith(GRAD)]
    given = {n: f"b_{n}" for n in walk.read} | _inputs(walk) | {GRAD + n: f"g_{n}" for n in made}
    written = []
    for n in grads:
        name = n.removeprefix(GRAD)
        if name in walk.moving and name not in made:
            written.append((f"g_{name}", walk.moving[name], "+=", program.outputs[n]))
        elif name in walk.inputs:
            written.append((f"d_{name}", walk.inputs[name], "+=", program.outputs[n]))
    text(f"if ((phase + t) % {walk.every} == 0) {{")
    text.operations(program, program.needed(grads), _given(program, given), written, "q")
    for n in made:
        text.clear(f"g_{n}", walk.states[n])
    text("}")


__all__ = ["CODE", "Real", "constant", "functions", "header", "source"]
