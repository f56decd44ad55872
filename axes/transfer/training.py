"""One run: a system trained on a trial at one learning rate from one seed, and what was measured of it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from axes.depth.base import DepthMixer
from axes.errors import AxesError
from axes.models import LanguageModel, state_bytes
from axes.tasks.batches import mixed
from axes.tasks.machine import require_memory
from axes.transfer.capture import Again, Capture, Captured, CudaGraph, Recorder
from axes.transfer.systems import System
from axes.transfer.trials import By, Held, Trial, trial

_CLIP = 1.0
_POINTS = 10  # of a curve
_SPAN = 128  # steps whose batches a graph finds in its tables
_LOOK = 50  # steps between two looks at whether a run has broken down
Made = TypeVar("Made")


class Crowded(AxesError):
    """A run found too little memory, which may be for what others hold of it."""


@final
@dataclass(frozen=True)
class Job:
    """What is to be trained. form, task: name the trial."""

    system: System
    task: str
    form: str
    lr: float
    seed: int
    device: str = "cpu"
    capture: Capture = "none"

    @property
    def key(self) -> str:
        """The name of its run in a folder of one form and device."""
        return f"{self.task}-{self.system.key}-lr{self.lr:g}-seed{self.seed}"


@final
@dataclass(frozen=True)
class Run:
    """What came of a job.

    value: the trial's metric on held-out data; by: accuracy by position, length, pairs.  curve: (step, training loss).
    seen: tokens, or examples, in all.  flops: of products, a token or example of a training step.  state: bytes that a
    sequence layer remembers, that a token's streams take, or that an optimizer keeps.  broke: at which step numbers
    stopped being finite; the value is then that of who knows nothing.  times: seconds in all, milliseconds a
    step, runs side by side that shared them, whether its step was one graph.  note: what went otherwise than asked for.
    """

    task: str
    system: str
    lr: float
    seed: int
    value: float
    by: By
    curve: tuple[tuple[int, float], ...]
    parameters: int
    seen: int
    flops: float
    state: int
    broke: int | None
    times: dict[str, float]
    note: str = ""

    @property
    def key(self) -> str:
        return f"{self.task}-{self.system}-lr{self.lr:g}-seed{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "curve": [list(point) for point in self.curve]}


def run_of(row: dict[str, Any]) -> Run:
    """The inverse of `Run.as_dict`."""
    return Run(**{**row, "curve": tuple((int(step), float(loss)) for step, loss in row["curve"])})


def train(job: Job) -> Run:
    """The run of a job, deterministic on a CPU. Raises AxesError if the device has too little memory for it."""
    return train_together((job,))[0]


def train_together(jobs: Sequence[Job]) -> list[Run]:
    """The runs of jobs of one trial: one after another, or side by side where their steps are graphs.

    A run whose step cannot be one graph takes its steps as they are, and says so.
    Raises Crowded if the device has too little memory left for one of them, AxesError if it never has enough.
    """
    graphs = [job for job in jobs if job.capture == "graph"]
    found = _replayed(graphs) if graphs else {}
    return [found[job.key] if job.key in found else _alone(job) for job in jobs]


def _alone(job: Job, note: str = "") -> Run:
    return _said(job, lambda: _Learner(job).trained(note))


def _replayed(jobs: Sequence[Job]) -> dict[str, Run]:
    """Runs whose steps are graphs, replayed in turn."""
    begun, steps = time.perf_counter(), trial(jobs[0].task, jobs[0].form).steps
    together = [_said(job, partial(_Learner, job)) for job in jobs]
    lost: dict[str, str] = {}
    for first in range(0, steps, _SPAN):
        count = min(_SPAN, steps - first)
        for learner in together:
            learner.load(first, count)
        for _ in range(count):
            for learner in tuple(together):
                try:
                    _said(learner.job, learner.take)
                except RuntimeError as error:  # what a graph cannot hold is found out when it is recorded
                    together.remove(learner)
                    said = "" if isinstance(error, torch.linalg.LinAlgError) else str(error).splitlines()[0]
                    lost[learner.job.key] = said and f"its step is no graph: {said}"
    beside = max(1, len(together))
    found = {x.job.key: _said(x.job, partial(x.finished, begun, beside)) for x in together}
    for job in jobs:
        if job.key in lost:
            found[job.key] = _alone(replace(job, capture="none"), lost[job.key])
    return found


def _said(job: Job, do: Callable[[], Made]) -> Made:
    """What `do` gives; an AxesError in a sentence where it lacked memory."""
    try:
        return do()
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated(torch.device(job.device)) / 1e9
        raise Crowded(
            f"{job.key} needs more memory than {job.device} has: {peak:.1f} GB were taken when it asked for more "
            f"({str(error).splitlines()[0]}); use fewer --workers, or --quick"
        ) from None


def made(job: Job) -> nn.Module:
    """The model, on the CPU, so that it is the same wherever it is trained."""
    return trial(job.task, job.form).model(job.system)


def least_bytes(model: nn.Module, what: Trial) -> int:
    """What no run does without: weights with gradients and two statistics, eight activations of the width a layer."""
    width = max((p.shape[-1] for p in model.parameters() if p.ndim > 1), default=1)
    layers = sum(1 for m in model.modules() if isinstance(m, nn.Linear))
    return 16 * sum(p.numel() for p in model.parameters()) + 4 * what.seen * width * layers


@final
class _Learner:
    """A model on its way through the steps of a job."""

    def __init__(self, job: Job, recorder: Recorder | None = None) -> None:
        self.job, self.what, self.device = job, trial(job.task, job.form), torch.device(job.device)
        self.begun = time.perf_counter()
        torch.manual_seed(mixed(job.seed, job.system.draw))
        model = made(job)
        require_memory(least_bytes(model, self.what), self.device, f"{job.key}: weights, gradients and activations")
        graph = job.capture == "graph"
        self.recorder = recorder or (CudaGraph(self.device) if graph else Again())
        with self.recorder.here():
            self.model = model.to(self.device).train()
            self.factor = job.system.factor(self.what.steps)
            self.lr = torch.tensor(job.lr, device=self.device) if graph else None
            options = {"capturable": True} if graph else {"check_finite": False}
            given = job.lr if self.lr is None else self.lr
            self.optimizer = job.system.optimizer(self.model, given, self.what.steps, **options)
            self.captured: Captured | None = None
            if self.lr is not None:
                rates = torch.tensor([job.lr * self.factor(i) for i in range(self.what.steps)], device=self.device)
                self.captured = Captured(self.step, self.lr, rates, self.recorder)

    def step(self, *batch: Tensor) -> Tensor:
        # gradients that are read by a graph stay where they are
        self.optimizer.zero_grad(set_to_none=self.captured is None)
        loss = self.what.loss(self.model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        return loss.detach()

    def load(self, first: int, count: int) -> None:
        """The batches of the next steps, for the graph."""
        assert self.captured is not None
        with self.recorder.here():
            self.captured.load(_batches(self.what, self.job.seed, first, count))

    def take(self) -> None:
        """One step of the graph."""
        assert self.captured is not None
        with self.recorder.here():
            self.captured.take()

    def trained(self, note: str = "") -> Run:
        """Every step as it is, then the run."""
        with self.recorder.here():
            losses = torch.zeros(self.what.steps, device=self.device)
            seconds = 0.0
            for i in range(self.what.steps):
                batch = [x.to(self.device) for x in self.what.batch_of(self.job.seed, i)]
                now = time.perf_counter()
                for group in self.optimizer.param_groups:
                    if "lr" in group:
                        group["lr"] = self.job.lr * self.factor(i)
                try:
                    losses[i] = self.step(*batch)
                except torch.linalg.LinAlgError as error:  # what a decomposition cannot be taken of
                    losses[i] = torch.nan
                    note = _broken(error)
                    break
                if (i + 1) % _LOOK == 0 and not math.isfinite(losses[i].item()):  # waits for the device
                    break
                seconds += time.perf_counter() - now
            return self._run(losses.cpu(), seconds, self.begun, 1, note)

    def finished(self, begun: float, beside: int) -> Run:
        """The run of a graph that has taken every step. begun: when `beside` of them, side by side, did."""
        assert self.captured is not None
        with self.recorder.here():
            losses = self.captured.losses.cpu()  # waits for the device
            return self._run(losses, time.perf_counter() - begun, begun, beside)

    def _run(self, losses: Tensor, seconds: float, begun: float, beside: int, note: str = "") -> Run:
        job, what = self.job, self.what
        lost = (~losses.isfinite()).nonzero()
        broke = int(lost[0]) + 1 if len(lost) else None
        ends = sorted({max(1, round(what.steps * (i + 1) / _POINTS)) for i in range(_POINTS)})
        curve = tuple(
            (end, float(losses[start:end].mean()))
            for start, end in zip([0, *ends], ends, strict=False)
            if broke is None or end < broke
        )
        held: Held | None = None
        if broke is None:
            self.model.eval()
            try:
                held = what.held_out(self.model, self.device)
            except torch.linalg.LinAlgError as error:
                note = _broken(error)
            if held is None or not math.isfinite(held.value):
                broke, held = what.steps, None
        flops, state = counted(job, what, self.optimizer)
        times = {
            "seconds": (time.perf_counter() - begun) / beside,
            "step_ms": 1e3 * seconds / what.steps / beside,
            "beside": beside,
            "graph": float(self.captured is not None),
        }
        return Run(
            job.task, job.system.key, job.lr, job.seed, held.value if held else what.nothing, held.by if held else {},
            curve, sum(p.numel() for p in self.model.parameters()), what.seen * what.steps, flops, state, broke, times,
            note,
        )  # fmt: skip


def _broken(error: torch.linalg.LinAlgError) -> str:
    """What a decomposition says that cannot be taken of what a model has come to."""
    return f"it broke down: {str(error).splitlines()[0]}"


@functools.lru_cache(maxsize=8)
def _batches(what: Trial, seed: int, first: int, count: int) -> tuple[Tensor, ...]:
    """Batches of steps in a row, stacked."""
    drawn = zip(*(what.batch_of(seed, first + i) for i in range(count)), strict=True)
    return tuple(torch.stack(parts) for parts in drawn)


def counted(job: Job, what: Trial, optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """Floating point operations of products a token in a step of a window, counted on the CPU; bytes of state."""
    flops, state = _counted(job.system, what)
    if job.system.axis == "data":
        state = sum(state_bytes(list(s.values())) for s in optimizer.state.values())
    return flops, state


@functools.lru_cache(maxsize=256)
def _counted(system: System, what: Trial) -> tuple[float, int]:
    with torch.random.fork_rng(devices=()):
        plain, one = what.model(system), what.one()
    with FlopCounterMode(display=False) as counter:
        what.loss(plain, *one).backward()
    flops = counter.get_total_flops() / (what.seen / what.batch)
    if system.axis == "data":
        return flops, 0
    if system.axis == "sequence":
        assert isinstance(plain, LanguageModel)
        with torch.no_grad():
            return flops, state_bytes(plain(one[0])[1])
    mixer = next(m for m in plain.modules() if isinstance(m, DepthMixer))
    with torch.no_grad():
        return flops, _bytes(mixer.expand(torch.zeros(1, 1, mixer.d_model)))


def _bytes(streams: Any) -> int:
    return state_bytes(streams if isinstance(streams, Tensor) else list(streams))
