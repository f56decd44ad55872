"""What users watch while they train: how noisy gradients are, and how far a step turns the weights.

Both are objects that a training loop opts into. Nothing is computed before they are made or after `remove()`, nothing
waits for the device before `read()`, and neither changes a gradient or a parameter.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from axes.errors import AxesError
from axes.optim.engine.routing import real

if TYPE_CHECKING:
    from rich.table import Table


@final
@dataclass(frozen=True)
class NoiseEstimate:
    """Averages over the last steps. squared_gradient: of |G|^2; trace: of tr Sigma, the covariance of one example's
    gradient. Both are unbiased, so that either may be negative while noise hides it."""

    squared_gradient: float
    trace: float
    steps: int

    @property
    def noise_scale(self) -> float:
        """B_simple = tr Sigma / |G|^2, in examples; infinite while no gradient shows above the noise."""
        if self.squared_gradient <= 0.0:
            return math.inf
        return max(self.trace, 0.0) / self.squared_gradient

    @property
    def critical_batch_size(self) -> float:
        """The batch that takes twice the fewest steps and twice the fewest examples: the noise scale, where curvature
        is the same in all directions (McCandlish et al. 2018, eq. 2.8 is the general form)."""
        return self.noise_scale

    def steps_over_fewest(self, batch: float) -> float:
        """S / S_min = 1 + B_crit / B."""
        return 1.0 + self.critical_batch_size / batch

    def examples_over_fewest(self, batch: float) -> float:
        """E / E_min = 1 + B / B_crit."""
        return 1.0 + batch / self.critical_batch_size if self.critical_batch_size > 0.0 else math.inf


@final
class NoiseScale:
    """Gradient noise scale from the micro-batches of a step and their mean.

        |G|^2    = (B |g_B|^2 - b |g_b|^2) / (B - b)
        tr Sigma = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

    g_B is the gradient of the whole batch of B examples, |g_b|^2 the mean of the squared norms of its micro-batches'
    gradients, b = B / number of micro-batches. Averages are kept of the two numbers, never of their ratio, which would
    be biased. Several micro-batches come from gradient accumulation, from the processes of DistributedDataParallel, or
    from both::

        noise = NoiseScale(model)
        for batch in data:
            parts = batch.chunk(4)
            for part in parts:
                (loss(part) / 4).backward()
                noise.micro_batch(len(part))
            noise.step()                        # after gradients are unscaled, before they are clipped
            optimizer.step()
            optimizer.zero_grad()
        print(noise.read().critical_batch_size)

    Args:
        parameters: a model, or the parameters whose gradients are measured. Of a DistributedDataParallel model the
            processes' micro-batches count too; they must see equally many examples in a step.
        retention: of the averages, in [0, 1).

    A micro-batch's norms are taken when its gradients arrive, before accumulation and before processes average: a
    reduction a parameter and no memory.

    Raises:
        AxesError: sharded parameters, whose micro-batch gradients never are in one place; a forgotten `micro_batch()`;
            a step of a single micro-batch.

    Source: McCandlish et al. 2018, eq. 2.9 (noise scale), appendix A.1, eq. A.1-A.2 (estimators), eq. 2.11 (steps and
    examples). Differs: micro-batches may differ in size; each then weighs what it does in the mean.
    """

    def __init__(self, parameters: nn.Module | Iterable[Tensor], retention: float = 0.95) -> None:
        if not 0.0 <= retention < 1.0:
            raise AxesError(f"NoiseScale: retention must lie in [0, 1), got {retention}")
        self.retention = retention
        self._processes: Any = None
        if isinstance(parameters, DistributedDataParallel):
            self._processes = parameters.process_group
        given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        self._parameters = [p for p in dict.fromkeys(given) if p.requires_grad]
        if not self._parameters:
            raise AxesError("NoiseScale: no parameter requires a gradient")
        if any(_sharded(p) for p in self._parameters):
            raise AxesError(
                "NoiseScale: parameters are sharded (DTensor), and a micro-batch's gradient is never whole before it "
                "is averaged: measure a DistributedDataParallel or a single-process model"
            )
        self._handles = [
            p.register_hook(functools.partial(self._arrived, i)) for i, p in enumerate(self._parameters)
        ]
        self._arrivals: dict[int, Tensor] = {}
        self._micro: list[tuple[int, Tensor]] = []
        self._average: Tensor | None = None  # |G|^2 and tr Sigma, weighted by 1 - retention^steps
        self._steps = 0

    def micro_batch(self, examples: int, loss_scale: float = 1.0) -> None:
        """Say that a backward pass is complete: over how many examples its loss was the mean.

        loss_scale: what the loss was multiplied by beyond the micro-batch's share (GradScaler.get_scale()).
        """
        if examples < 1:
            raise AxesError(f"NoiseScale.micro_batch: examples must be at least 1, got {examples}")
        if not self._arrivals:
            raise AxesError("NoiseScale.micro_batch: no gradient has arrived since the last call: run backward() first")
        device = next(iter(self._arrivals.values())).device
        norms = torch.stack([x.to(device) for x in self._arrivals.values()])
        self._micro.append((examples, (norms.to(_wide(device)) / loss_scale).square().sum()))
        self._arrivals.clear()

    @torch.no_grad()
    def step(self) -> None:
        """Take the micro-batches since the last call as one batch, whose mean gradient the parameters hold now."""
        if self._arrivals:
            raise AxesError("NoiseScale.step: call micro_batch(examples) after every backward(), the last one included")
        count, world = len(self._micro), 1 if self._processes is None else self._processes.size()
        if count * world < 2:
            raise AxesError(
                f"NoiseScale.step: {count} micro-batch on {world} process: the noise shows between at least two; split "
                "the batch and accumulate"
            )
        total = sum(examples for examples, _ in self._micro)
        # the loss of a micro-batch carries its share w of the batch: w |g / w|^2
        small = torch.stack([square * (total / examples) for examples, square in self._micro]).sum()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            raise AxesError("NoiseScale.step: the parameters hold no gradient: call it before zero_grad()")
        whole = torch.stack([_norm(g).to(small.device) for g in gradients]).to(small.dtype).square().sum()
        sums = torch.stack([small, small.new_tensor(float(count)), small.new_tensor(float(total))])
        if self._processes is not None:
            dist.all_reduce(sums, group=self._processes)
        small, batch, part = sums[0] / world, sums[2], sums[2] / sums[1]
        found = torch.stack(
            [(batch * whole - part * small) / (batch - part), (small - whole) / (1.0 / part - 1.0 / batch)]
        )
        past = torch.zeros_like(found) if self._average is None else self._average.to(found)
        self._average = torch.lerp(found, past, self.retention)
        self._steps += 1
        self._micro.clear()

    def read(self) -> NoiseEstimate:
        """The estimates so far; waits for the device."""
        if self._average is None:
            raise AxesError("NoiseScale.read: no step was measured yet")
        squared, trace = (self._average / (1.0 - self.retention**self._steps)).tolist()
        return NoiseEstimate(squared, trace, self._steps)

    def state_dict(self) -> dict[str, Any]:
        return {"retention": self.retention, "average": self._average, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["retention"] != self.retention:
            raise AxesError(f"NoiseScale: the state was averaged with retention {state['retention']}")
        self._average, self._steps = state["average"], int(state["steps"])

    def remove(self) -> None:
        """Take the hooks off the parameters; what was measured can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def _arrived(self, index: int, gradient: Tensor) -> None:
        if index in self._arrivals:
            raise AxesError("NoiseScale: a second gradient arrived: call micro_batch(examples) after every backward()")
        self._arrivals[index] = _norm(gradient)


@final
@dataclass(frozen=True)
class Motion:
    """How far one step moved a parameter, or a group of them as one vector.

    weight: |W| before the step. ratio: |dW| / |W|. angle: between W before and after, in radians.
    """

    name: str
    group: int
    rule: str
    weight: float
    ratio: float
    angle: float


@final
@dataclass(frozen=True)
class Motions:
    """One measured step: every parameter that stepped, and every parameter group; prints as a table."""

    step: int
    parameters: tuple[Motion, ...]
    groups: tuple[Motion, ...]

    def as_dict(self) -> dict[str, Any]:
        """For programs: plain numbers and names."""
        return asdict(self)

    def table(self) -> Table:
        """For a terminal."""
        from rich.table import Table

        table = Table(title=f"step {self.step}")
        for name in ("name", "rule", "|W|", "|dW| / |W|", "angle"):
            table.add_column(name, justify="left" if name in ("name", "rule") else "right")
        for row in (*self.parameters, *self.groups):
            if row is next(iter(self.groups), None):
                table.add_section()
            table.add_row(row.name, row.rule, f"{row.weight:.4g}", f"{row.ratio:.2e}", f"{row.angle:.2e}")
        return table

    def __rich__(self) -> Table:
        return self.table()


@final
class UpdateRatios:
    """Update-to-weight ratio |dW| / |W| and the angle that a step turns W by, a parameter and a group.

        angle = atan2(|p|, (1 + c) |W|),   d = W_t - W_{t-1},  c = W.d / |W|^2,  p = d - c W

    which keeps its digits where the cosine rounds to 1. Hooks before and after `optimizer.step()` take a copy of the
    parameters and three reductions each, in every `every`-th step only; `remove()` takes them off.

        watch = UpdateRatios(optimizer, every=10)
        ...
        print(watch.read().groups)

    Args:
        optimizer: any torch.optim.Optimizer; its parameters may be sharded (the reductions then are collectives).
        every: measure each such step, beginning with the next one.
        keep: how many measured steps `history()` goes back.

    Source: the angular update of Kosson et al. 2024. Differs: of whole parameters and groups, not of single neurons.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 1, keep: int = 1000) -> None:
        if every < 1 or keep < 1:
            raise AxesError(f"UpdateRatios: every and keep must be at least 1, got {every} and {keep}")
        self.every = every
        self._steps = 0
        self._copies: list[tuple[int, int, Tensor, Tensor]] = []  # group, index, parameter, what it was
        self._kept: deque[tuple[int, list[tuple[str, int, str]], Tensor]] = deque(maxlen=keep)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def read(self) -> Motions:
        """The last measured step; waits for the device."""
        if not self._kept:
            raise AxesError("UpdateRatios.read: no step was measured yet")
        return _motions(*self._kept[-1])

    def history(self) -> list[Motions]:
        """All measured steps that are kept, oldest first; waits for the device."""
        return [_motions(*measured) for measured in self._kept]

    def remove(self) -> None:
        """Take the hooks off the optimizer; what was measured can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._copies.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        self._copies.clear()
        if (self._steps - 1) % self.every:
            return
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and p.numel():
                    self._copies.append((i, j, p, real(p).detach().clone()))

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._copies:
            return
        labels, numbers = [], []
        for i, j, p, past in self._copies:
            group = optimizer.param_groups[i]
            names = group.get("param_names")
            labels.append((names[j] if names else f"group {i}, parameter {j}", i, str(group.get("rule", ""))))
            w = past.to(torch.promote_types(past.dtype, torch.float32))
            d = real(p).detach().to(w.dtype) - w
            norm = _norm(w)
            along = torch.where(norm == 0, 0, (w * d).sum() / norm.square())
            numbers.append([_whole(x).to(_wide(w.device)) for x in (norm, along, _norm(d - along * w))])
        device = numbers[0][0].device
        table = torch.stack([torch.stack([x.to(device) for x in row]) for row in numbers])
        self._kept.append((self._steps, labels, table))
        self._copies.clear()


def _motions(step: int, labels: list[tuple[str, int, str]], table: Tensor) -> Motions:
    numbers = [(w, along, across) for w, along, across in table.tolist()]
    parameters = [_motion(*label, *row) for label, row in zip(labels, numbers, strict=True)]
    groups = []
    for index in sorted({group for _, group, _ in labels}):
        members = [i for i, (_, group, _) in enumerate(labels) if group == index]
        groups.append(_motion(f"group {index}", index, labels[members[0]][2], *_joined([numbers[i] for i in members])))
    return Motions(step, tuple(parameters), tuple(groups))


def _joined(parts: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Of several vectors as one: what is across it is across its parts, or along them by other amounts."""
    ww = math.fsum(w * w for w, _, _ in parts)
    along = math.fsum(w * w * c for w, c, _ in parts) / ww if ww else 0.0
    across = math.fsum(p * p + (w * (c - along)) ** 2 for w, c, p in parts)
    return math.sqrt(ww), along, math.sqrt(across)


def _motion(name: str, group: int, rule: str, w: float, along: float, across: float) -> Motion:
    """From |W|, the multiple of W that a step adds, and the norm of what it adds at right angles to W."""
    if w == 0.0:
        return Motion(name, group, rule, w, math.inf if across else 0.0, 0.0)
    return Motion(name, group, rule, w, math.hypot(along, across / w), math.atan2(across, (1.0 + along) * w))


def _norm(x: Tensor) -> Tensor:
    """|x|, at least in float32."""
    return torch.linalg.vector_norm(real(x.detach()), dtype=torch.promote_types(real(x).dtype, torch.float32))


def _sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def _whole(x: Tensor) -> Tensor:
    """A number of a sharded tensor, from all its shards."""
    if not _sharded(x):
        return x
    found: Tensor = x.full_tensor()  # type: ignore[attr-defined]
    return found


def _wide(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
