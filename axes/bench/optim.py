"""`axes bench optim`: one training step of every rule, on every set of parameters, by everyone who can take it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from axes.bench.floors import copy_rate
from axes.bench.optim_contenders import (
    Contender,
    Make,
    OptimizerRule,
    Parameters,
    Place,
    Suite,
    contenders,
    find_rules,
    find_suites,
    known_names,
    state_bytes,
)
from axes.bench.results import Watch, begin, fill, said, unwatched
from axes.bench.sequence import device_of, dtype_of
from axes.bench.timing import Timing, launches, median, peak_extra, wait
from axes.errors import AxesError

FILE = "optim.json"
_CHECKED = 3  # steps
_FRESH = 4  # gradients before a figure is taken: statistics of one gradient alone have no full rank
_SLOW = 0.4  # seconds a period, from which it is timed once
_COARSE = {torch.bfloat16: 0.25, torch.float16: 0.1}  # updates of 16-bit parameters are rounded to their last place


@final
@dataclass(frozen=True)
class Row:
    """One contender on one set of parameters. Milliseconds a step, bytes; None where it was not measured."""

    suite: str
    rule: str
    dtype: str
    who: str
    eager: float | None = None
    graph: float | None = None
    state: float | None = None  # bytes a number of the parameters
    launches: float | None = None  # kernels a step on a GPU, operators of torch on a CPU
    peak: int | None = None  # bytes beyond parameters, gradients and state while stepping
    moved: int | None = None  # bytes that a step has to move: gradient in; parameter and state in and out
    share: float | None = None  # of the copy ceiling
    error: float | None = None
    refused: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.suite, self.rule, self.dtype, self.who

    @property
    def best(self) -> float | None:
        """The figure that targets are about."""
        return self.eager if self.graph is None else self.graph


@final
@dataclass(frozen=True)
class Plan:
    """What is compared."""

    rules: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    who: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "cuda"
    seed: int = 0


def measure(
    plan: Plan,
    folder: Path,
    watch: Watch = unwatched,
    fresh: bool = False,
) -> dict[str, Any]:
    """Measure every row that the folder does not hold yet; the file is written after each. Returns its contents."""
    device = device_of(plan.device)
    place = Place(device, dtype_of(plan.dtype))
    if unknown := set(plan.who) - set(known_names()):
        raise AxesError(f"unknown contender {', '.join(sorted(unknown))}; known: {', '.join(known_names())}")
    path = folder / FILE
    results = begin(path, Row, device, plan.seed, fresh)
    rates: dict[str, float] = results["ceilings"] or {}
    results["ceilings"] = rates

    def work(suite: Suite, rule: OptimizerRule, who: Contender) -> tuple[Row, Callable[[Row], Row]]:
        def measured(row: Row) -> Row:
            if suite.name not in rates:
                rates[suite.name] = copy_rate(suite.numbers, device)
            return _row(suite, rule, who, plan, device, rates[suite.name])

        return Row(suite.name, rule.name, plan.dtype, who.name), measured

    every = [
        work(suite.for_rule(rule), rule, contender)
        for suite in find_suites(plan.suites, device)
        for rule in find_rules(plan.rules)
        if plan.rules or rule.name in suite.rules
        for contender in contenders(rule, place, plan.who)
    ]
    return fill(path, results, every, watch)


def rows(results: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in results["rows"]]


def _row(suite: Suite, rule: OptimizerRule, who: Contender, plan: Plan, device: torch.device, ceiling: float) -> Row:
    row = Row(suite.name, rule.name, plan.dtype, who.name)
    try:
        with _memory(device):
            return _measured(row, suite, rule, who, plan, device, ceiling)
    except torch.OutOfMemoryError:
        return replace(row, refused="out of memory")
    except Exception as error:  # a peer may raise anything
        return replace(row, refused=said(error))


def _measured(
    row: Row, suite: Suite, rule: OptimizerRule, who: Contender, plan: Plan, device: torch.device, ceiling: float
) -> Row:
    dtype = dtype_of(plan.dtype)
    training = Problem(suite, dtype, device, plan.seed)
    optimizer = who.make(training.parameters)
    if who.exact is None:
        descended = descends(who.make, device)
        row = replace(row, note="random steps: checked to descend, no more")
        if not descended:
            return replace(row, refused="does not descend a parabola", note="")
    else:
        error = check(training, optimizer, who.exact, rule, who.period)
        row = replace(row, error=error)
        bound = max(rule.bound, _COARSE.get(dtype, 0.0))
        if not error <= bound:  # NaN as well
            return replace(row, refused=f"its steps are off by {error:.1e} > {bound:.1e}")
    training.age(optimizer)

    period = _period(optimizer, who.period)
    seconds = _seconds(period, device)
    timing = Timing(1e3 * seconds) if seconds > _SLOW else median(period, device)
    kept = state_bytes(optimizer)
    row = replace(
        row,
        eager=timing.eager / who.period,
        state=kept / suite.numbers,
        launches=launches(period, device) / who.period if seconds < 10 * _SLOW else None,
        peak=peak_extra(period) if device.type == "cuda" else None,
        moved=suite.numbers * 3 * dtype.itemsize + 2 * kept,
    )
    if who.captured is not None:
        del optimizer
        row = replace(row, graph=_graph(who.captured, who.period, training, device))
    assert row.best is not None and row.moved is not None
    return replace(row, share=row.moved / (row.best * 1e-3) / ceiling)


def _graph(make: Make, period: int, training: Problem, device: torch.device) -> float | None:
    """Milliseconds of a step in a captured period, or None where that cannot be constructed or captured."""
    try:
        optimizer = make(training.parameters)
        training.age(optimizer)
    except Exception:  # an argument that this version does not take
        return None
    graph = median(_period(optimizer, period), device).graph
    return None if graph is None else graph / period


def _period(optimizer: torch.optim.Optimizer, steps: int) -> Callable[[], tuple[Tensor, ...]]:
    """The work that repeats, as one call."""

    def call() -> tuple[Tensor, ...]:
        for _ in range(steps):
            optimizer.step()
        return ()

    return call


@final
class Problem:
    """Parameters and gradients of a suite, the same for every contender."""

    def __init__(self, suite: Suite, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self.parameters: Parameters = []
        for shape in suite.shapes:
            drawn = torch.empty(shape, device=device).normal_(0.0, 0.02, generator=self._generator)
            self.parameters.append(nn.Parameter(drawn.to(dtype)))
        for p in self.parameters:
            p.grad = torch.empty_like(p)
        self.turn()

    def turn(self, regular: bool = False) -> None:
        """The next gradient, in place. regular: square ones have singular values far from 0."""
        for p in self.parameters:
            assert p.grad is not None
            p.grad.normal_(0.0, 0.01, generator=self._generator)
            if regular and p.ndim == 2 and p.shape[0] == p.shape[1]:
                p.grad.diagonal().add_(0.02 * p.shape[0] ** 0.5)

    def age(self, optimizer: torch.optim.Optimizer) -> None:
        """Some steps on new gradients, so that what is timed is the usual step."""
        for _ in range(_FRESH):
            self.turn()
            optimizer.step()

    def sample(self, square: bool) -> list[nn.Parameter]:
        """The first parameter of every shape, or of every square one, and the last."""
        usable = [p for p in self.parameters if not square or p.ndim == 2 and p.shape[0] == p.shape[1]]
        first = {tuple(p.shape): p for p in reversed(usable)}
        return list({id(p): p for p in (*first.values(), *usable[-1:])}.values())


def check(training: Problem, optimizer: torch.optim.Optimizer, exact: Make, rule: OptimizerRule, period: int) -> float:
    """The largest relative error of what some steps added to a parameter, against the convention in float64.

    Every shape is looked at on one parameter: what a step does to one does not depend on the others. Where a step
    depends on bases or roots of Gram matrices, those are the square ones on gradients of full rank, after the first
    step: else rounding decides what the directions are in which there was no gradient yet.
    """
    chosen = training.sample(square=rule.statistics)
    twins = [nn.Parameter(p.detach().double()) for p in chosen]
    reference = exact(twins)
    begun: list[tuple[Tensor, Tensor]] = []
    for step in range(_CHECKED if period == 1 else period + 2):
        if step == rule.statistics:
            begun = [(p.detach().double(), twin.detach().clone()) for p, twin in zip(chosen, twins, strict=True)]
        training.turn(regular=rule.statistics)
        for p, twin in zip(chosen, twins, strict=True):
            assert p.grad is not None
            twin.grad = p.grad.double()
        optimizer.step()
        reference.step()
    errors = []
    for p, twin, (mine, exactly) in zip(chosen, twins, begun, strict=True):
        added, right = p.detach().double() - mine, twin.detach() - exactly
        off = (added - right).norm() / right.norm()
        errors.append(float(off) if bool(off.isfinite()) else math.nan)
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def descends(make: Make, device: torch.device) -> bool:
    """Whether fifty steps shorten the way to the minimum of a parabola."""
    torch.manual_seed(0)
    goal = torch.randn(16, 12, device=device)
    w = nn.Parameter(torch.zeros_like(goal))
    optimizer = make([w])
    for _ in range(50):
        w.grad = w.detach() - goal
        optimizer.step()
    return float((w.detach() - goal).norm()) < 0.999 * float(goal.norm())


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """One warmed-up call."""
    call()
    wait(device)
    begun = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - begun


@contextmanager
def _memory(device: torch.device) -> Iterator[None]:
    """Give back what a contender held, whether or not it ended well."""
    try:
        yield
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def ratios(found: list[Row]) -> dict[tuple[str, str, str], tuple[str, float]]:
    """For each (suite, rule, dtype) with both: the fastest other contender, and its time over our fastest."""
    groups: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in found:
        if row.best is not None:
            groups.setdefault(row.key[:3], []).append((row.best, row.who))
    out = {}
    for key, members in groups.items():
        ours = [x for x in members if x[1].startswith("axes")]
        others = [x for x in members if not x[1].startswith("axes")]
        if ours and others:
            time_, who = min(others)
            out[key] = (who, time_ / min(ours)[0])
    return out
