"""Adafactor: a second moment of one number a row and one a column, and steps relative to the weights.

    W = (1 - lr wd) W - max(eps2, rms(W)) rho_t U / max(1, rms(U) / d),   U = g / sqrt(r c / mean(r)),  rho_t <= lr

r and c are averages of the squares of g in rows and columns, whose retention 1 - t^decay grows with the step t.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Ball, Composite, Geometry, RankOneWhiten, RelativeStep
from axes.core.monoids import Decay, Scalar, Zero
from axes.core.rates import Count, minimum
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, unit


@final
class Adafactor(Optimizer):
    """Adafactor:  r = b r + (1 - b) row means of g^2,  c the same of columns,  U = g / sqrt(r c / mean(r)).

    b = 1 - t^beta2_decay,
    W = (1 - lr weight_decay) W - max(eps[1], rms(W)) min(lr, 1 / sqrt(t)) U / max(1, rms(U) / d).
    A matrix of m rows and n columns has a state of m + n numbers, a vector one of its own size and a number.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: the most that rho_t is; all of it without `schedule`.
        beta2_decay: exponent of t in the retention of r and c.
        eps: (of the second moment, None for the rounding unit; the least rms of W that a step is relative to).
        d: the most that rms(U) is.
        weight_decay: by lr, as in torch.
        momentum: of the average of steps, 0 for none, which keeps a number an entry again.
        schedule: rho_t = min(lr, 1 / sqrt(t)), or lr.
        relative: whether steps are relative to rms(W).
        guard: eps[0] as a "floor" under the second moment and its mean, as in torch, or "added" to every square, as in
            the paper and in transformers, with eps (1e-30, 1e-3).

    Source: Shazeer and Stern 2018, algorithms 4 to 6; defaults and guard of torch.optim.Adafactor. Differs: tensors of
    more than two dimensions are matrices (first dimension, all others), where torch factors the last two; the rounding
    unit is float32's for 16-bit parameters; transformers' decay is relative to rms(W) as well.
    """

    name: ClassVar[str] = "adafactor"
    paper: ClassVar[str] = "Shazeer and Stern 2018"
    equation: ClassVar[str] = "algorithms 4 to 6, section 8"
    differs: ClassVar[str] = (
        "tensors of more than two dimensions are matrices (first dimension, all others); the decay is by lr, as in "
        "torch; eps is torch's floor unless guard says that it is added, as in the paper"
    )
    bibtex: ClassVar[str] = """@inproceedings{shazeer2018adafactor,
  title = {Adafactor: Adaptive Learning Rates with Sublinear Memory Cost},
  author = {Shazeer, Noam and Stern, Mitchell},
  booktitle = {International Conference on Machine Learning},
  year = {2018}
}"""
    default_lr: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        schedule: bool = True,
        relative: bool = True,
        guard: Literal["floor", "added"] = "floor",
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "schedule": schedule,
            "relative": relative,
            "guard": guard,
        }
        super().__init__(params, {"adafactor": Adafactor.declare}, {"adafactor": own}, **options)

    @staticmethod
    def declare(
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        momentum: float = 0.0,
        schedule: bool = True,
        relative: bool = True,
        guard: Literal["floor", "added"] = "floor",
    ) -> StateUpdate:
        """The tuple."""
        unit("Adafactor", momentum=momentum)
        if not beta2_decay < 0.0:
            raise AxesError(f"Adafactor: beta2_decay is an exponent below 0, got {beta2_decay}")
        if relative and not eps[1] > 0.0:
            raise AxesError(f"Adafactor: eps[1], the least size of a relative step, must be positive, got {eps[1]}")
        new = Count() ** beta2_decay
        rows, columns = (
            StateUpdate(Linear(of), monoid=Scalar(1.0 - new), algorithm=Step(new))
            for of in ("row-square", "column-square")
        )
        h: Geometry = Composite(Ball(d, "rms"), RankOneWhiten((rows, columns), eps[0], guard))
        if relative:
            h = RelativeStep(h, eps[1])
        direction = StateUpdate(Linear(), h, Zero())
        via = (direction, Momentum(momentum, "ema")) if momentum > 0.0 else (direction,)
        if not schedule:
            return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=via))
        kept = Decay(LR * WEIGHT_DECAY, independent=True)
        return StateUpdate(Given(), monoid=kept, algorithm=Step(minimum(LR, Count() ** -0.5), via=via))

    update = declare()
