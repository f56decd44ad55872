"""Averages of the weights beside the weights.

ASGD   z = (1 - eta lambd) z + eta u,  theta = (1 - mu) theta + mu z,  the parameters show z
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Mix, Step
from axes.core.costs import Given, Linear
from axes.core.monoids import Decay
from axes.core.rates import maximum
from axes.core.state_update import StateUpdate
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, T, positive


@final
class ASGD(Optimizer):
    """Averaged gradient descent:  W = (1 - eta lambd) W - eta g,  eta = lr / (1 + lambd lr (t - 1))^alpha.

    The average of W over the steps after t0 is `theta` in a parameter's state; before, it is W.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, lambd, alpha, t0, weight_decay: as in torch.optim.ASGD.

    Source: Polyak and Juditsky 1992, eq. 3, with the step sizes of Bottou 2012, section 5. Differs: the step size is
    that of the lr in force, where torch takes the lr of the step before; weight_decay is added to lambd, which is the
    same as adding weight_decay * W to the gradient.
    """

    name: ClassVar[str] = "asgd"
    paper: ClassVar[str] = "Polyak and Juditsky 1992; Bottou 2012"
    equation: ClassVar[str] = "Polyak and Juditsky eq. 3; Bottou section 5"
    differs: ClassVar[str] = "as in torch, but the step size follows the lr in force and not that of the step before"
    bibtex: ClassVar[str] = """@article{polyak1992acceleration,
  title = {Acceleration of Stochastic Approximation by Averaging},
  author = {Polyak, Boris T. and Juditsky, Anatoli B.},
  journal = {SIAM Journal on Control and Optimization},
  volume = {30},
  number = {4},
  pages = {838--855},
  year = {1992}
}"""
    default_lr: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay}
        super().__init__(params, {"asgd": ASGD.declare}, {"asgd": own}, **options)

    @staticmethod
    def declare(lambd: float = 1e-4, alpha: float = 0.75, t0: float = 1e6) -> StateUpdate:
        """The tuple: an average of a filter that starts at the weights, which is what is shown."""
        positive("ASGD", lambd=lambd, alpha=alpha, t0=t0)
        rate = LR / (1.0 + lambd * LR * (T - 1.0)) ** alpha
        weights = StateUpdate(Linear(), monoid=Decay(lambd + WEIGHT_DECAY), algorithm=Step(rate, start="W0"))
        share = 1.0 / maximum(1.0, T - 1.0 - t0)
        return StateUpdate(Given(), monoid=Decay(1.0), algorithm=Step(share, at="read", via=(weights,), read=Mix(0.0)))

    update = declare()
