"""`axes bench optim-training`: optimizers that train the same models on the same data, each at its best learning rate.

The rate is swept on one seed, on a logarithmic grid that grows while its best point is an end of it. What is compared
are other seeds at that rate, so that the choice does not flatter what it chose. Every run sees the same batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from axes import optim
from axes.bench.optim_contenders import REFRESH, package, state_bytes
from axes.bench.optim_tasks import Task, find_tasks
from axes.bench.results import Watch, begin, unwatched, write
from axes.bench.sequence import device_of
from axes.errors import AxesError
from axes.optim.engine.routing import roles
from axes.tasks.schedules import Schedule

FILE = "optim-training.json"
_MOST = 10_000  # of what is multiplied to a number of runs
_FACTOR = 10.0**0.5  # between neighbouring learning rates
_EXTENSIONS = 4  # further points, at most, where the best one is an end of the grid
_CLIP = 1.0
Optimizers = list[torch.optim.Optimizer]  # one, or one for the matrices and one for the rest


@final
@dataclass(frozen=True)
class Trainer:
    """An optimizer under comparison. centre: the middle of the first grid of learning rates."""

    name: str
    make: Callable[[nn.Module, float], Optimizers]
    centre: float


@final
@dataclass(frozen=True)
class Run:
    """One model trained once. curve: (step, held-out loss, seconds of training so far, of the CPU, steps so far).

    loss: held out, at the end; infinite where training broke down.
    """

    task: str
    who: str
    lr: float
    seed: int
    loss: float
    accuracy: float | None
    curve: tuple[tuple[int, float, float, float], ...]
    state: float  # bytes a number of the parameters

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.task, self.who, self.lr, self.seed


@final
@dataclass(frozen=True)
class Plan:
    """What is compared. rates: points of the first grid, or 0 for its middle; seeds: of the comparison, the sweep has
    its own."""

    tasks: tuple[str, ...] = ()
    who: tuple[str, ...] = ()
    steps: int = 200
    rates: int = 5
    seeds: int = 3
    points: int = 20
    device: str = "cpu"

    def require(self, swept: bool = True) -> None:
        """AxesError unless there is so much to train; `swept`: whether rates have to be."""
        for name, least in (("steps", 2), ("rates", int(swept)), ("seeds", 2), ("points", 1)):
            given = getattr(self, name)
            if given < least:
                raise AxesError(f"--{name} must be at least {least}, got {given}")
            if name != "steps" and given > _MOST:
                raise AxesError(f"--{name} must be at most {_MOST:,}, each of which is a run, got {given}")


def trainers(names: tuple[str, ...] = ()) -> list[Trainer]:
    """The optimizers by name, without weight decay; packages that are not installed are left out."""
    found = list(_trainers())
    known = {t.name: t for t in found}
    if unknown := set(names) - set(known):
        raise AxesError(f"unknown optimizer {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return [known[name] for name in names] if names else found


def measure(
    plan: Plan,
    folder: Path,
    watch: Watch = unwatched,
    fresh: bool = False,
) -> dict[str, Any]:
    """Train every run that the folder does not hold yet; the file is written after each. Returns its contents."""
    plan.require()
    pairs = [(task, who) for task in find_tasks(plan.tasks) for who in trainers(plan.who)]
    return fill(pairs, plan, folder / FILE, watch, fresh)


def fill(
    pairs: list[tuple[Task, Trainer]], plan: Plan, path: Path, watch: Watch = unwatched, fresh: bool = False
) -> dict[str, Any]:
    """Train each task with its trainer: a sweep of the rate, then the seeds at its best point."""
    device = device_of(plan.device)
    results = begin(path, Run, device, 0, fresh)
    size, described = {"steps": plan.steps, "points": plan.points}, results.setdefault("tasks", {})
    same = all(described.get(t.name, t.description) == t.description for t, _ in pairs)
    if results.setdefault("size", size) != size or not same:
        raise AxesError(f"{path} holds runs of another length or task; choose another --out, or --fresh to begin again")
    described.update({t.name: t.description for t, _ in pairs})
    runs = {run.key: run for run in map(_run_of, results["rows"])}
    total, done = len(pairs) * (plan.rates + plan.seeds), 0

    def ensure(task: Task, who: Trainer, lr: float, seed: int) -> Run:
        nonlocal done
        key = (task.name, who.name, lr, seed)
        watch(f"{task.name} · {who.name} · lr {lr:g} · seed {seed}", min(done, total), total)
        if key not in runs:
            runs[key] = train(task, who, lr, seed, plan, device)
            results["rows"].append(asdict(runs[key]))
            write(path, results)
        done += 1
        return runs[key]

    for task, who in pairs:

        def loss(rate: float, task: Task = task, who: Trainer = who) -> float:
            return ensure(task, who, rate, 0).loss

        lr = sweep(loss, who.centre, plan.rates) if plan.rates else who.centre
        for seed in range(1, 1 + plan.seeds):
            ensure(task, who, lr, seed)
    watch("done", total, total)
    return results


def sweep(loss: Callable[[float], float], centre: float, count: int) -> float:
    """The rate of the smallest loss on a logarithmic grid around `centre` that grows at the end where that is."""

    def rate(place: int) -> float:
        return float(f"{centre * _FACTOR**place:.3g}")

    found = {place: loss(rate(place)) for place in range(-((count - 1) // 2), count // 2 + 1)}
    for _ in range(_EXTENSIONS):
        best = min(found, key=lambda place: found[place])
        further = best - 1 if best - 1 not in found else best + 1
        if further in found:
            break
        found[further] = loss(rate(further))
    return rate(min(found, key=lambda place: found[place]))


def train(task: Task, who: Trainer, lr: float, seed: int, plan: Plan, device: torch.device) -> Run:
    """One run: linear warm-up over a tenth of the steps, then a cosine; gradients clipped to norm 1."""
    torch.manual_seed(seed)
    model = task.model().to(device)
    optimizers = who.make(model, lr)
    schedule = Schedule("cosine", max(1, plan.steps // 10), plan.steps)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in optimizers]
    curve: list[tuple[int, float, float, float]] = [(0, task.held_out(model, device)[0], 0.0, 0.0)]
    seconds = cpu = 0.0
    accuracy: float | None = None
    at = {max(1, round(plan.steps * (i + 1) / plan.points)) for i in range(plan.points)} | {plan.steps}
    for step in range(plan.steps):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        model.train()
        loss = task.loss(model, seed, step, device)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        if not bool(norm.isfinite()):
            break
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds, cpu = seconds + time.perf_counter() - begun, cpu + time.process_time() - begun_cpu
        if step + 1 in at:
            held, accuracy = task.held_out(model, device)
            if not math.isfinite(held):
                break
            curve.append((step + 1, held, seconds, cpu))
    broke = curve[-1][0] < plan.steps
    numbers = sum(p.numel() for p in model.parameters())
    state = sum(map(state_bytes, optimizers)) / numbers
    final = math.inf if broke else curve[-1][1]
    return Run(task.name, who.name, lr, seed, final, None if broke else accuracy, tuple(curve), state)


def runs_of(results: dict[str, Any]) -> list[Run]:
    return [_run_of(row) for row in results["rows"]]


def _run_of(row: dict[str, Any]) -> Run:
    points = tuple((int(step), loss, wall, cpu) for step, loss, wall, cpu in row["curve"])
    return Run(**{**row, "curve": points})


# ---- who trains --------------------------------------------------------------------------------------------------


def _trainers() -> Iterator[Trainer]:
    for cls, centre, options in (
        (optim.SGD, 0.3, {"momentum": 0.9}),
        (optim.AdamW, 5e-3, {"weight_decay": 0.0}),
        (optim.Lion, 1e-3, {"weight_decay": 0.0}),
        (optim.Muon, 2e-2, {"weight_decay": 0.0}),
        (optim.NorMuon, 2e-2, {"weight_decay": 0.0}),
        (optim.Shampoo, 3e-2, {"betas": (0.9, 0.95), "graft": "adam", "refresh": REFRESH}),
        (optim.SOAP, 5e-3, {"weight_decay": 0.0, "refresh": REFRESH}),
    ):
        cls_: Any = cls

        def ours(model: nn.Module, lr: float, cls: Any = cls_, options: Any = options) -> Optimizers:
            return [cls(model, lr=lr, **options)]

        yield Trainer(f"axes {cls_.name}", ours, centre)
    yield Trainer("torch adamw", lambda m, lr: [torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.0)], 5e-3)
    yield Trainer("torch muon + adamw", _torch_muon, 2e-2)
    if (library := package("pytorch_optimizer")) is not None:

        def soap(model: nn.Module, lr: float) -> Optimizers:
            options = {"betas": (0.95, 0.95), "weight_decay": 0.0, "precondition_frequency": REFRESH}
            return [library.SOAP(model.parameters(), lr=lr, **options)]

        yield Trainer("pytorch_optimizer soap", soap, 5e-3)


def _torch_muon(model: nn.Module, lr: float) -> Optimizers:
    """torch's Muon for what ours takes as hidden matrices, torch's AdamW for the rest, both at one rate."""
    role = roles(model)
    matrices = [p for p in model.parameters() if role[p].matrix]
    rest = [p for p in model.parameters() if not role[p].matrix]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
