"""What is trained: a tuple on an axis, with what stands around it there."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import nn

from axes import catalogue, depth, sequence
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.moves import Axis
from axes.optim import AdamW
from axes.optim.rules.general import optimizer
from axes.sequence.blocks import Block, Standard
from axes.tasks.schedules import Schedule


@final
@dataclass(frozen=True)
class System:
    """A tuple as a sequence layer, a depth mixer or an optimizer.

    block: around a sequence layer, less what it charts and the tuple does not ask for.  schedule: of the learning rate.
    forget: decoupled decay that leaves exp(-forget) of the first weights at the end of a run.  shared: layers have one
    set of weights.  draw: of the initial parameters; another one is the same system again.  named: the catalogue's
    layer, with its own widths, in the place of one of the tuple and the block.
    """

    axis: Axis
    update: StateUpdate
    block: Block | None = None
    schedule: str = "cosine"
    forget: float = 0.0
    shared: bool = False
    draw: int = 0
    named: str = field(default="", repr=False)

    @cached_property
    def key(self) -> str:
        """Ten digits of everything that this is: the name of its runs."""
        return hashlib.sha256((repr(self) + self.named).encode()).hexdigest()[:10]

    def layer(self) -> Callable[..., nn.Module] | None:
        """What makes sequence layers of it, if they are what is compared."""
        if self.axis != "sequence":
            return None
        if self.named:
            made: Callable[..., nn.Module] = catalogue.get(self.named, "sequence").cls
            return made
        return sequence.layer(self.update, "Compared", charted(self.block, self.update))

    def mixer(self) -> Callable[..., nn.Module] | None:
        """What makes depth mixers of it, if they are what is compared."""
        return depth.mixer(self.update) if self.axis == "depth" else None

    def optimizer(
        self, model: nn.Module, lr: float | torch.Tensor, steps: int, **options: Any
    ) -> torch.optim.Optimizer:
        """What trains a model: the tuple on the axis of training steps, on the others AdamW without decay."""
        if self.axis != "data":
            return AdamW(model, lr=lr, weight_decay=0.0, **options)
        rates = {per.name for per in self.update.demands()}
        if self.forget and "weight_decay" not in rates:
            raise AxesError(f"forget={self.forget} is a decay, and {self.update!r} asks for no weight_decay")
        decay = {"weight_decay": self.forget / (steps * float(lr))} if self.forget else {}
        return optimizer(self.update)(model, lr=lr, **decay, **options)

    def factor(self, steps: int) -> Schedule:
        """Of the learning rate at a step: a linear warm-up over a tenth of the steps, then the schedule."""
        return Schedule(self.schedule, max(1, steps // 10), steps)


def charted(block: Block | None, update: StateUpdate) -> Block | None:
    """The block with charts of those rates alone that the tuple asks for: a control may lack what moved."""
    if not isinstance(block, Standard):
        return block
    asked = {per.name for per in update.demands()}
    return dataclasses.replace(block, charts=tuple(chart for chart in block.charts if chart[0] in asked))
