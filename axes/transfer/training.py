"""One run: a system trained on a trial at one learning rate from one seed, and what was measured of it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from axes.depth.base import DepthMixer
from axes.errors import AxesError
from axes.models import LanguageModel, state_bytes
from axes.tasks.batches import mixed
from axes.tasks.machine import require_memory
from axes.transfer.capture import Capture, Captured
from axes.transfer.systems import System
from axes.transfer.trials import By, Trial, trial

_CLIP = 1.0
_POINTS = 10  # of a curve


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
    stopped being finite; the value is then that of who knows nothing.  times: seconds in all, milliseconds a step.
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
    what = trial(job.task, job.form)
    device = torch.device(job.device)
    torch.manual_seed(mixed(job.seed, job.system.draw))
    begun = time.perf_counter()
    model = made(job)
    require_memory(least_bytes(model, what), device, f"{job.key}: weights, gradients and activations")
    try:
        return _trained(job, what, model.to(device), device, begun)
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated(device) / 1e9
        raise AxesError(
            f"{job.key} needs more memory than {device} has: {peak:.1f} GB were taken when it asked for more "
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


def _trained(job: Job, what: Trial, model: nn.Module, device: torch.device, begun: float) -> Run:
    graph = job.capture == "graph"
    lr = torch.tensor(job.lr, device=device) if graph else job.lr
    options = {"capturable": True} if graph else {"check_finite": False}
    optimizer = job.system.optimizer(model, lr, what.steps, **options)
    factor = job.system.factor(what.steps)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=not graph)
        loss = what.loss(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        return loss.detach()

    take = Captured(step) if graph else step
    at = {max(1, round(what.steps * (i + 1) / _POINTS)) for i in range(_POINTS)}
    curve: list[tuple[int, float]] = []
    total, since, broke, seconds = torch.zeros((), device=device), 0, None, 0.0
    model.train()
    for i in range(what.steps):
        batch = [x.to(device) for x in what.batch_of(job.seed, i)]
        now = time.perf_counter()
        _set_rates(optimizer, job.lr * factor(i))
        total += take(*batch)
        since += 1
        if i + 1 in at:
            loss = float(total) / since  # waits for the device
            if not math.isfinite(loss):
                broke = i + 1
                break
            curve.append((i + 1, loss))
            total, since = torch.zeros((), device=device), 0
        seconds += time.perf_counter() - now
    model.eval()
    held = what.held_out(model, device) if broke is None else None
    if held is not None and not math.isfinite(held.value):
        broke, held = what.steps, None
    flops, state = counted(job, what, optimizer)
    times = {"seconds": time.perf_counter() - begun, "step_ms": 1e3 * seconds / (broke or what.steps)}
    return Run(
        job.task, job.system.key, job.lr, job.seed, held.value if held else what.nothing, held.by if held else {},
        tuple(curve), sum(p.numel() for p in model.parameters()), what.seen * what.steps, flops, state, broke,
        times,
    )  # fmt: skip


def _set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of a step; where a graph reads it, in its place."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"].fill_(lr)
        elif "lr" in group:
            group["lr"] = lr


def counted(job: Job, what: Trial, optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """Floating point operations of products a token in a step of a window, counted on the CPU; bytes of state."""
    plain, one = made(job), what.one()
    with FlopCounterMode(display=False) as counter:
        what.loss(plain, *one).backward()
    flops = counter.get_total_flops() / (what.seen / what.batch)
    if job.system.axis == "data":
        return flops, sum(state_bytes(list(s.values())) for s in optimizer.state.values())
    if job.system.axis == "sequence":
        assert isinstance(plain, LanguageModel)
        with torch.no_grad():
            return flops, state_bytes(plain(one[0])[1])
    mixer = next(m for m in plain.modules() if isinstance(m, DepthMixer))
    with torch.no_grad():
        return flops, _bytes(mixer.expand(torch.zeros(1, 1, mixer.d_model)))


def _bytes(streams: Any) -> int:
    return state_bytes(streams if isinstance(streams, Tensor) else list(streams))
