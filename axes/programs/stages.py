"""Programs with functions of whole tensors among their operations, as programs around these functions.

An operation is done in the stage that first reads it, a state is written once nobody reads the old one any more. What
one stage leaves to a later one, and what a function takes and gives, are tensors with names of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from axes.programs.program import FULL, PARAMETER, Program, Value, called, function_of, observes, reduced

Moment = tuple[int, int]  # a stage: its program, then its calls


@final
@dataclass(frozen=True)
class Call:
    """A function of whole tensors, or a statistic. which: as its tracer names them. inputs, output: by name."""

    which: str
    inputs: tuple[str, ...]
    output: str
    observes: bool = False


@final
@dataclass
class Stage:
    """A program, and the functions behind it.

    rooms: its inputs and outputs that are of no state, by what the program calls them, with their own names. What a
    function gave is the program's gradient if that is free, what the next one takes its parameter.
    """

    program: Program
    rooms: Mapping[str, str]
    calls: tuple[Call, ...]

    @property
    def entrywise(self) -> bool:
        """Whether every entry is for itself, so that the shape does not matter."""
        return not self.program.extents and not any(reduced(op.name) for op in self.program.operations)


def stages(program: Program, gradient: str) -> tuple[Stage, ...]:
    """A program in stages, one if it has no functions. gradient: the name of an input that is read only."""
    return tuple(_Cut(program, gradient).stages())


class _Cut:
    def __init__(self, program: Program, gradient: str) -> None:
        self.program, self.gradient = program, gradient
        self.extents = program.extent_of()
        self.users: dict[int, list[int]] = {i: [] for i in range(len(program.operations))}
        self.level: list[int] = []  # the first stage that can have a value
        for i, op in enumerate(program.operations):
            for x in op.inputs:
                if isinstance(x, int):
                    self.users[x].append(i)
            behind = [self.level[x] for x in op.inputs if isinstance(x, int)]
            if called(op.name) is not None:  # behind a stage, and behind the statistics of that stage
                behind = [self.level[x] + (not self._observed(x)) for x in op.inputs if isinstance(x, int)]
            self.level.append(max(behind, default=0))
        self.count = 1 + max(self.level, default=0)
        outputs = {x for x in program.outputs.values() if isinstance(x, int)}
        self.stage = list(self.level)  # the one that makes it
        for i in reversed(range(len(self.stage))):
            if self.users[i] and i not in outputs and not self._known(i):
                self.stage[i] = min(self._read(user) for user in self.users[i])
        self.written = {n: self._written(n, x) for n, x in program.outputs.items() if program.shaped(x)}

    def _known(self, i: int) -> bool:
        """Whether no program makes a value: an input, or what a function gives."""
        op = self.program.operations[i]
        return op.name == "input" or called(op.name) is not None

    def _observed(self, i: int) -> bool:
        """Whether a value is a statistic's, which no program reads."""
        return observes(self.program.operations[i].name)

    def _read(self, user: int) -> int:
        """When an operation reads: a function does behind the stage before its own."""
        return self.stage[user] - (called(self.program.operations[user].name) is not None)

    def _written(self, name: str, value: int) -> int:
        """The stage that may write a state."""
        old = self.program.inputs.get(name)
        return max([self.stage[value], *(self._read(user) for user in (self.users[old] if old is not None else ()))])

    def stages(self) -> Iterator[Stage]:
        operations = self.program.operations
        for k in range(self.count):
            calls = []
            for i, op in enumerate(operations):
                which = called(op.name)
                if which is not None and self.level[i] == k + 1:
                    names = tuple(_name(x) for x in op.inputs)
                    calls.append(Call(which, names, _name(i), self._observed(i)))
            left = [i for i, op in enumerate(operations) if op.shaped and not self._observed(i) and self._left(i, k)]
            yield self._stage(k, left, tuple(calls))

    def _left(self, i: int, k: int) -> bool:
        """Whether a value is put where others than stage k find it: functions always, later stages if k makes it."""
        for user in self.users[i]:
            if called(self.program.operations[user].name) is not None and self.level[user] == k + 1:
                return True
        made = not self._known(i) and self.stage[i] == k
        late = (self.written[n] for n, x in self.program.outputs.items() if x == i and n in self.written)
        return made and any(x > k for x in (*(self._read(user) for user in self.users[i]), *late))

    def _stage(self, k: int, left: list[int], calls: tuple[Call, ...]) -> Stage:
        program, operations = self.program, self.program.operations
        wanted: dict[str, Value] = {n: x for n, x in program.outputs.items() if self.written.get(n) == k}
        wanted |= {_name(i): i for i in left}
        inputs: dict[int, str] = {}
        needed: set[int] = set()

        def need(value: Value) -> None:
            if not isinstance(value, int) or value in needed:
                return
            needed.add(value)
            if operations[value].name == "input":
                inputs[value] = program.names[value]
            elif program.shaped(value) and (self._known(value) or self.stage[value] != k):
                inputs[value] = _name(value)
            else:
                for x in operations[value].inputs:
                    need(x)

        for value in wanted.values():
            need(value)
        names = {n: n for n in (*inputs.values(), *wanted)}
        given = next((n for i, n in inputs.items() if called(operations[i].name) is not None), None)
        if self.gradient not in names and given is not None:
            names[given] = self.gradient
        whole = next((i for i in left if self.extents[i] == FULL), None)
        if PARAMETER not in names and whole is not None:
            names[_name(whole)] = PARAMETER
        read = frozenset(inputs.values())
        out = Program(nonnegative=program.nonnegative & read, positive=program.positive & read)
        where: dict[int, int] = {}
        extents = {}
        for i, name in sorted(inputs.items()):
            where[i] = out.add("input", (), operations[i].shaped)
            out.names[where[i]] = names[name]
            if operations[i].shaped and self.extents[i] != FULL:
                extents[names[name]] = self.extents[i]
        for name, value in wanted.items():  # where a result goes
            if names[name] not in out.inputs:
                out.names[out.add("input", (), True)] = names[name]
                if isinstance(value, int) and self.extents[value] != FULL:
                    extents[names[name]] = self.extents[value]
        for i in sorted(needed - inputs.keys()):
            op = operations[i]
            where[i] = out.add(op.name, tuple(where[x] if isinstance(x, int) else x for x in op.inputs), op.shaped)
        out.outputs = {names[n]: where[x] if isinstance(x, int) else x for n, x in wanted.items()}
        out.extents = extents
        own = {PARAMETER, self.gradient, *program.inputs}
        return Stage(out, {b: a for a, b in names.items() if a not in own}, calls)


def _name(value: Value) -> str:
    return f"value {value}"


# ---- where what stages leave is kept ---------------------------------------------------------------------------------


def states_left(stage: Stage) -> dict[str, str]:
    """What a stage leaves that is also what it makes of a state: the states, by these names."""
    made = {x: n for n, x in stage.program.outputs.items() if n not in stage.rooms}
    left = {own: made.get(stage.program.outputs[n]) for n, own in stage.rooms.items() if n in stage.program.outputs}
    return {own: state for own, state in left.items() if state is not None and state != PARAMETER}


def without(stage: Stage, names: Collection[str]) -> Stage:
    """A stage that does not write these of its rooms, which it does not read."""
    old, inside = stage.program, {n for n, own in stage.rooms.items() if own in names}
    program, where = replace(old, operations=[], names={}, outputs={}, _numbers=None), dict[int, int]()
    for i, op in enumerate(old.operations):
        if old.names.get(i) not in inside:
            inputs = tuple(where[x] if isinstance(x, int) else x for x in op.inputs)
            where[i] = program.add(op.name, inputs, op.shaped)
            if i in old.names:
                program.names[where[i]] = old.names[i]
    program.outputs = {n: where[x] if isinstance(x, int) else x for n, x in old.outputs.items() if n not in inside}
    return Stage(program, {n: own for n, own in stage.rooms.items() if n not in inside}, stage.calls)


def shared(stages: Sequence[Stage], kinds: Mapping[str, Any]) -> dict[str, str]:
    """For what stages and calls leave, by name, whose place in memory it can have: its own, or that of what nobody
    reads any more. kinds: of all that needs a place, what fits the same ones."""
    lives: dict[str, list[Moment]] = {}
    for k, stage in enumerate(stages):
        for own in stage.rooms.values():
            lives.setdefault(own, []).append((k, 0))
        for i, call in enumerate(stage.calls):
            for name in (*call.inputs, call.output):
                lives.setdefault(name, []).append((k, 1 + i))
    for call in (call for stage in reversed(stages) for call in stage.calls):
        if function_of(call.which) is None and not call.observes:  # it may give what it was given
            lives[call.inputs[0]].append(max(lives[call.output]))
    until: dict[str, Moment] = {}
    places: dict[str, str] = {}
    for name in sorted(kinds, key=lambda name: (min(lives[name]), name)):
        free = (n for n, last in until.items() if last < min(lives[name]) and kinds[n] == kinds[name])
        places[name] = next(free, name)
        until[places[name]] = max(lives[name])
    return places


__all__ = ["Call", "Stage", "shared", "stages", "states_left", "without"]
