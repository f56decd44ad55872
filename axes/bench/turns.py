"""`axes bench turns`: a step of a rule by everyone who has it, by turns in one process.

Clocks move, and other work comes and goes: what takes turns meets the same machine, and the least time of many turns is
that of the quietest. Each has parameters, gradients and states of its own, so that a turn begins with memory that the
others have left, and goes on with its own; of a few steps in a row the least one counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch

from axes.bench.optim import Plan, Problem
from axes.bench.optim_contenders import OURS, Contender, Place, contenders, find_rules, find_suites
from axes.bench.results import Watch, unwatched
from axes.bench.sequence import device_of, dtype_of
from axes.bench.timing import wait
from axes.optim.engine.loops import WORTH

_SECONDS = 4.0  # of a rule on a set of parameters
_IN_A_ROW, _SLOW = 3, 0.3  # periods of a turn, and seconds from which one is enough
_FEWEST = 2


@final
@dataclass(frozen=True)
class Row:
    """The least milliseconds of a step: of the process, and of the clock on the wall with the device waited for."""

    suite: str
    rule: str
    who: str
    processor: float = float("inf")
    wall: float = float("inf")


@final
@dataclass(frozen=True)
class Beside:
    """Ours over the fastest peer, and with every number scheduled over ours as constructed; None without such a row."""

    suite: str
    rule: str
    peer: str
    rows: tuple[Row, ...]

    def over(self, who: str, other: str, wall: bool = False) -> float | None:
        found = {row.who: row.wall if wall else row.processor for row in self.rows}
        return found[who] / found[other] if who in found and other in found else None

    def text(self) -> str:
        """One line a contender."""
        lines = []
        for row in self.rows:
            words = [f"{self.suite:<8} {self.rule:<10} {row.who:<24} {row.processor:9.3f} ms  wall {row.wall:9.3f} ms"]
            for other in dict.fromkeys((self.peer, OURS)):
                ratio = self.over(row.who, other) if row.who.startswith(OURS) and row.who != other else None
                if ratio is not None:
                    on_wall = self.over(row.who, other, wall=True)
                    words.append(f"{ratio:.2f} (wall {on_wall:.2f}) of {other}")
            lines.append("  ".join(words))
        return "\n".join(lines)


@torch.no_grad()
def measure(plan: Plan, seconds: float = _SECONDS, watch: Watch = unwatched) -> Iterator[Beside]:
    """A group of rows for every rule on every set of parameters."""
    device = device_of(plan.device)
    place = Place(device, dtype_of(plan.dtype))
    suites = find_suites(plan.suites, device)
    every = [(suite, rule) for suite in suites for rule in find_rules(plan.rules or suite.rules)]
    for done, (suite, rule) in enumerate(every):
        watch(f"{suite.name} · {rule.name}", done, len(every))
        some = contenders(rule, place, plan.who)
        steps = [_ready(c, Problem(suite.for_rule(rule), place.dtype, device, plan.seed), seconds) for c in some]
        found = [Row(suite.name, rule.name, contender.name) for contender in some]
        begun, turns = time.perf_counter(), 0
        while turns < _FEWEST or time.perf_counter() - begun < seconds:
            for i, contender in enumerate(some):
                found[i] = _turn(found[i], steps[i], contender.period, device)
            turns += 1
        peers = [row for row in found if not row.who.startswith(OURS)]
        peer = min(peers, key=lambda row: row.processor).who if peers else OURS
        yield Beside(suite.name, rule.name, peer, tuple(found))
    watch("done", len(every), len(every))


def _ready(contender: Contender, problem: Problem, seconds: float) -> Callable[[], object]:
    """A contender's step, once what it compiles after some steps is there, if that takes no longer than the turns."""
    optimizer = contender.make(problem.parameters)
    problem.age(optimizer)
    if contender.name.startswith(OURS) and problem.parameters[0].is_cpu:
        begun, left = time.perf_counter(), WORTH // sum(p.numel() for p in problem.parameters)
        while left > 0 and time.perf_counter() - begun < seconds:
            optimizer.step()
            left -= 1
    return optimizer.step


def _turn(row: Row, step: Callable[[], object], period: int, device: torch.device) -> Row:
    """A few periods in a row."""
    for _ in range(_IN_A_ROW):
        wait(device)
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(period):
            step()
        wait(device)
        processor, wall = time.process_time() - processor, time.perf_counter() - wall
        row = replace(
            row,
            processor=min(row.processor, 1e3 * processor / period),
            wall=min(row.wall, 1e3 * wall / period),
        )
        if wall > _SLOW:
            break
    return row


__all__ = ["Beside", "Row", "measure"]
