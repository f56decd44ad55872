"""Relatives of Adam that differ in where the average is read.

NAdam   theta = (1 - lr wd) theta + lr * (one step ahead of EMA(u)) / (sqrt(EMA(u^2)) + eps)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Read
from axes.core.geometry import Whiten
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import average, decaying, unit


@final
class NAdam(Optimizer):
    """Nesterov in Adam:  W = W - lr n / (sqrt(v) + eps),  n = beta1 m + (1 - beta1) g,  m and v as in Adam, m after g.

    weight_decay adds weight_decay * W to the gradient, or with decoupled_weight_decay multiplies W by 1 - lr
    weight_decay. n and v are divided by their response to a unit gradient, 1 - beta1^(t+1) and 1 - beta2^t.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps, weight_decay, decoupled_weight_decay: as in torch.optim.NAdam, defaults too.
        momentum_decay: infinite, and None says so too: beta1 is constant. torch's default is 0.004.

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
        "part of, by 1 - beta1^(t+1) where paper and torch take 1 - beta1^t; decoupled decay is an option"
    )
    bibtex: ClassVar[str] = """@inproceedings{dozat2016incorporating,
  title = {Incorporating {Nesterov} Momentum into {Adam}},
  author = {Dozat, Timothy},
  booktitle = {International Conference on Learning Representations, Workshop},
  year = {2016}
}"""
    default_lr: ClassVar[float] = 2e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if momentum_decay not in (None, math.inf):
            raise AxesError(
                "NAdam: beta1 is constant here, the limit of a large momentum_decay: leave it out or None, got "
                f"{momentum_decay}"
            )
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own["decoupled_weight_decay"] = decoupled_weight_decay
        super().__init__(params, {"nadam": NAdam.declare}, {"nadam": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decoupled_weight_decay: bool = False
    ) -> StateUpdate:
        """The tuple."""
        unit("NAdam", beta1=betas[0], beta2=betas[1])
        if not eps >= 0.0:
            raise AxesError(f"NAdam: eps must be >= 0, got {eps}")
        b = betas[0]
        read = Read(b * b, (1.0 - b) * (1.0 + b)) if b > 0.0 else None
        second_moment = StateUpdate(**average(betas[1], "square"))
        whitened = Whiten((second_moment,), "diagonal", power=0.5, eps=eps)
        direction = StateUpdate(h=whitened, **average(b, read=read))
        return decaying(direction, decoupled_weight_decay)

    update = declare()
