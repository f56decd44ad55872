"""What is to be run: experiments and calibrations, their trials, rates and seeds; and what of it is still to be done.

The learning rate of a system on a trial is the best on a logarithmic grid at one seed, 0, that is not measured again;
in the whole form the grid grows where its best point is an end. What is compared are seeds from 1 on. So what is to be
done next is a function of what has been done.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from axes.errors import AxesError, UnknownName
from axes.transfer.capture import Capture
from axes.transfer.experiments import CALIBRATIONS, FLIPPED, TASKS, Calibration, Experiment
from axes.transfer.named import find
from axes.transfer.statistics import FEWEST
from axes.transfer.systems import System
from axes.transfer.training import Job, Run
from axes.transfer.trials import Trial, trial, trials

SWEEP = 0  # the seed of the sweep
SEEDS = {"quick": 3, "small": 6, "whole": 6}
QUICK = ("S4", "S5", "D1", "D2", "D3", "L1", "L2", "L5")  # experiments of the quick form, if none is named
_CALIBRATIONS = {"quick": ("parity", "null")}  # of forms that have not all
_FACTOR, _RATES = 10.0**0.5, 3  # between rates; points of the first grid
_MORE = {"quick": 0, "small": 1, "whole": 3}  # further points at most
_TOGETHER = 3  # runs at most whose graphs are replayed in turn: three small ones fill a GPU's gaps, and fit together
_MOST_SEEDS = 1000


Group = tuple[Job, ...]  # runs of one system on one trial that one process takes


class Pair(NamedTuple):
    """An arm and its control on one trial. of: the experiment or calibration."""

    of: str
    task: str
    arm: System
    control: System


@final
@dataclass(frozen=True)
class Plan:
    """What is run. seeds: that are measured, beside that of the sweep. tasks: only these, if any."""

    experiments: tuple[Experiment, ...]
    form: str = "whole"
    seeds: int = 6
    device: str = "cpu"
    capture: Capture = "none"
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not FEWEST <= self.seeds <= _MOST_SEEDS:
            raise AxesError(
                f"--seeds must be from {FEWEST}, which make an interval, to {_MOST_SEEDS:,}, got {self.seeds}"
            )
        for name in self.tasks:
            trial(name, self.form)
            if not any(name in TASKS[e.axis] for e in self.experiments):
                axes = sorted({e.axis for e in self.experiments})
                known = ", ".join(sorted({t for axis in axes for t in TASKS[axis]}))
                raise AxesError(f"--task {name} is not for {', '.join(axes)}, where there are {known}")

    @property
    def calibrations(self) -> tuple[Calibration, ...]:
        chosen = _CALIBRATIONS.get(self.form)
        return tuple(c for c in CALIBRATIONS if chosen is None or c.id in chosen)

    def tasks_of(self, experiment: Experiment) -> tuple[str, ...]:
        """Its trials: those that were asked for and its axis has, or its own; of the quick form the first."""
        if self.tasks:
            return tuple(t for t in self.tasks if t in TASKS[experiment.axis])
        return experiment.tasks[:1] if self.form == "quick" else experiment.tasks

    def pairs(self) -> tuple[Pair, ...]:
        """Every comparison: those that calibrate, then first tasks in the order of experiments, then all others."""
        asked = [(e, self.tasks_of(e)) for e in self.experiments]
        return (
            *(Pair(c.id, c.task, c.arm, c.control) for c in self.calibrations),
            *(Pair(e.id, task, *e.systems) for e, tasks in asked for task in tasks[:1]),
            *(Pair(e.id, task, *e.systems) for e, tasks in asked for task in tasks[1:]),
        )

    def trained(self) -> tuple[tuple[System, str], ...]:
        """Every system with its trial, once."""
        return tuple(dict.fromkeys((s, p.task) for p in self.pairs() for s in (p.arm, p.control)))

    def whose(self, job: Job) -> str:
        """Whose a run is, for a reader: "the arm of S6", of the first comparison that has it."""
        sides = ((p, side, s) for p in self.pairs() for side, s in (("arm", p.arm), ("control", p.control)))
        asked = (job.task, replace(job.system, draw=0))
        return next((f"the {side} of {p.of}" for p, side, s in sides if (p.task, replace(s, draw=0)) == asked), "a run")

    def trials(self) -> dict[str, Trial]:
        return {p.task: trials(self.form)[p.task] for p in self.pairs()}

    def wanted(self, runs: Mapping[str, Run]) -> Iterator[Job]:
        """Jobs that can be started now: sweeps, and where they are done what is measured."""
        for system, task in self.trained():
            lr, sweeping = self.swept(system, task, runs)
            if system.draw:  # the same system again takes the same rate
                sweeping = []
            jobs = sweeping if lr is None else [self._job(system, task, lr, seed) for seed in self.measured]
            yield from (job for job in jobs if job.key not in runs)

    def groups(self, jobs: Iterable[Job], workers: int) -> list[Group]:
        """Jobs by what one process takes at once: alone, or where steps are graphs some of a system on a trial.

        What is left takes the fewest rounds of all workers that groups of at most three allow, and fills these: so runs
        are grouped only where every worker has some. What comes last in the plan is grouped last.
        """
        most = _TOGETHER if self.capture == "graph" else 1
        alike = [tuple(mine) for _, mine in itertools.groupby(jobs, lambda job: (job.system.key, job.task))]
        counts = [-(-len(mine) // most) for mine in alike]
        places = -(-sum(counts) // workers) * workers
        for _ in range(min(places, sum(map(len, alike))) - sum(counts)):
            widest = max(range(len(alike)), key=lambda i: (-(-len(alike[i]) // counts[i]), i))
            counts[widest] += 1
        return [part for mine, count in zip(alike, counts, strict=True) for part in _evenly(mine, count)]

    @property
    def measured(self) -> range:
        return range(SWEEP + 1, SWEEP + 1 + self.seeds)

    def swept(self, system: System, task: str, runs: Mapping[str, Run]) -> tuple[float | None, list[Job]]:
        """The best learning rate, or None and the jobs of the sweep that will say it."""
        one, base = trials(self.form)[task], replace(system, draw=0)
        centre = _centre(system, task)
        grid = {place: self._job(base, task, _rate(centre, place), SWEEP) for place in range(-1, _RATES - 1)}
        for more in range(1 + _MORE[self.form]):
            if missing := [job for job in grid.values() if job.key not in runs]:
                return None, missing
            sign = 1.0 if one.higher else -1.0
            # of equals the smallest rate: sums of floats are no reason to choose
            best = max(grid, key=lambda place: (sign * runs[grid[place].key].value, -place))
            further = best - 1 if best - 1 not in grid else best + 1
            if further in grid or more == _MORE[self.form]:
                break
            grid[further] = self._job(base, task, _rate(centre, further), SWEEP)
        return grid[best].lr, []

    def at_an_end(self, system: System, task: str, runs: Mapping[str, Run]) -> bool:
        """Whether the best rate is an end of the grid, beyond which nobody looked."""
        lr, _ = self.swept(system, task, runs)
        base = replace(system, draw=0)
        tried = [r.lr for r in runs.values() if (r.system, r.task, r.seed) == (base.key, task, SWEEP)]
        return lr in (min(tried), max(tried))

    def runs_in_all(self) -> int:
        """How many runs there will be, as far as can be said before sweeps are done."""
        return sum((0 if s.draw else _RATES) + self.seeds for s, _ in self.trained())

    def _job(self, system: System, task: str, lr: float, seed: int) -> Job:
        return Job(system, task, self.form, lr, seed, self.device, self.capture)

    def require_equal_sizes(self) -> None:
        """AxesError unless arm and control have parameters within 1 %, and data is here."""
        for one in self.trials().values():
            one.prepare()
        apart = {e.id: e.apart for e in self.experiments}
        for pair in self.pairs():
            one, most = trials(self.form)[pair.task], apart.get(pair.of, 0.01)
            a, c = (_parameters(one, s) for s in (pair.arm, pair.control))
            if abs(a - c) > most * c:
                raise AxesError(
                    f"{pair.of} on {pair.task}: the arm has {a:,} parameters and its control {c:,}, more than "
                    f"{100 * most:g} % apart: what it finds would not be what moved; choose another --task, or a wider "
                    "model"
                )


def _evenly(jobs: Group, count: int) -> Iterator[Group]:
    """So many parts, longer ones first."""
    short, extra = divmod(len(jobs), count)
    ends = [short * i + min(i, extra) for i in range(count + 1)]
    return (jobs[a:b] for a, b in itertools.pairwise(ends))


@functools.lru_cache(maxsize=256)
def _parameters(one: Trial, system: System) -> int:
    with torch.random.fork_rng(devices=()):
        return sum(p.numel() for p in one.model(system).parameters())


def _centre(system: System, task: str) -> float:
    """The middle of the first grid of learning rates."""
    if task == FLIPPED:
        return 1e-2
    return 0.3 if system.axis == "data" else 3e-3


def _rate(centre: float, place: int) -> float:
    return float(f"{centre * _FACTOR**place:.3g}")


def planned(
    names: tuple[str, ...] = (), own: Experiment | None = None, form: str = "whole", seeds: int | None = None,
    device: str = "cpu", capture: Capture = "none", tasks: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """A plan of experiments by id, or of one's own; the form's own experiments without either.

    Raises AxesError: an unknown experiment or task (with the nearest names), too few seeds.
    """
    if form not in SEEDS:
        raise UnknownName("form", form, SEEDS)
    found = find(names or (QUICK if form == "quick" else ())) if names or own is None else ()
    mine = () if own is None else (own,)
    return Plan((*found, *mine), form, SEEDS[form] if seeds is None else seeds, device, capture, tasks)


__all__ = ["QUICK", "SEEDS", "SWEEP", "Pair", "Plan", "planned"]
