"""Learning-rate schedules as factors of the peak rate, for `torch.optim.lr_scheduler.LambdaLR`.

A factor is a function of the step alone, so a resumed schedule continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import final


def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: Mapping[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


@final
class Schedule:
    """Linear warm-up over `warmup` steps, then the named decay over the rest; no step has the factor 0."""

    def __init__(self, name: str, warmup: int, steps: int) -> None:
        self.name, self.warmup, self.steps = name, min(warmup, steps), steps

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        # the scheduler also asks for the step after the last
        return SCHEDULES[self.name](min(progress, 1.0))
