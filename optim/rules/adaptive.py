"""Relatives of Adam that differ in where the average is read.

NAdam   theta = (1 - lr wd) theta + lr * (one step ahead of EMA(u)) / (sqrt(EMA(u^2)) + eps)
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Read, Step
from axes.core.costs import Given
from axes.core.geometry import Whiten
from axes.core.monoids import Decay
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, unit


@final
class NAdam(Optimizer):
    """Nesterov in Adam:  W = (1 - lr weight_decay) W - lr n / (sqrt(v) + eps),  n = beta1 m + (1 - beta1) g, m after g.

    n and v are divided by their response to a unit gradient, 1 - beta1^(t+1) and 1 - beta2^t.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps: as in torch.optim.NAdam.
        weight_decay: decoupled, as in torch with decoupled_weight_decay=True.

    Source: Dozat 2016, algorithm 8. Differs: beta1 is constant, which in torch.optim.NAdam is the limit of a large
    momentum_decay, and the fresh gradient has the bias correction of the average it is part of: the paper and torch
    divide it by 1 - beta1^t instead of 1 - beta1^(t+1), so that on a constant gradient their first steps are up to
    1 + beta1 / (1 + beta1) times lr. The two agree to rounding once beta1^t is below it.
    """

    name: ClassVar[str] = "nadam"
    paper: ClassVar[str] = "Dozat 2016"
    equation: ClassVar[str] = "algorithm 8"
    differs: ClassVar[str] = (
        "beta1 is constant (no momentum schedule); the fresh gradient is corrected for bias with the average it is "
        "part of, by 1 - beta1^(t+1) where paper and torch take 1 - beta1^t; decoupled decay"
    )
    bibtex: ClassVar[str] = """@inproceedings{dozat2016incorporating,
  title = {Incorporating {Nesterov} Momentum into {Adam}},
  author = {Dozat, Timothy},
  booktitle = {International Conference on Learning Representations, Workshop},
  year = {2016}
}"""
    default_lr: ClassVar[float] = 5e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"nadam": NAdam.declare}, {"nadam": own}, **options)

    @staticmethod
    def declare(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> StateUpdate:
        """The tuple."""
        unit("NAdam", beta1=betas[0], beta2=betas[1])
        if not eps >= 0.0:
            raise AxesError(f"NAdam: eps must be >= 0, got {eps}")
        b = betas[0]
        read = Read(b * b, (1.0 - b) * (1.0 + b)) if b > 0.0 else None
        second_moment = StateUpdate(**average(betas[1], "square"))
        whitened = Whiten((second_moment,), "diagonal", power=0.5, eps=eps)
        direction = StateUpdate(h=whitened, **average(b, read=read))
        return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=(direction,)))

    update = declare()
