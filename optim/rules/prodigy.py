"""A step size that is found while training: an estimate of the distance to a solution, times Adam's direction.

Prodigy    theta = (1 - lr d wd) theta + lr d m / (sqrt(v) + d eps),   m and v the averages of d u and (d u)^2
           d     = max(d, r / |s|_1),   s = beta3 s + lr d^2 u,   r = beta3 r + lr d^2 <u, theta - theta_0>
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Read, Step
from axes.core.costs import Linear
from axes.core.geometry import DISTANCE, Distance, Whiten
from axes.core.monoids import Identity, Scalar, Zero
from axes.core.rates import Rate
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, T, average, decaying, memoryless, positive, unit


@final
class Prodigy(Optimizer):
    """Prodigy:  W = (1 - lr d weight_decay) W - lr d m / (sqrt(v) + d eps),  d = max(d, d_coef r / |s|_1).

    m and v are Adam's averages of d g and (d g)^2,  s = beta3 s + lr d^2 g,  r = beta3 r + lr d^2 <g, W_0 - W>.

    d is one number of all parameters of the optimizer, in all of its groups: sums in r and |s|_1 run over these, each
    with the lr of its group. d_0, d_coef and growth_rate are those of all groups. `group["distance"]` is d of the last
    step, `group["largest_distance"]` the largest estimate. A parameter's W_0 are the weights at its first step.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: a factor of the step size that is found: 1, or a schedule that ends below.
        betas, eps: as in Adam.
        beta3: of s and r, None for the root of betas[1].
        weight_decay, decoupled: added to the gradient as weight_decay * W, or W multiplied by 1 - lr d weight_decay.
        bias_correction: the step size times sqrt(1 - beta2^t) / (1 - beta1^t).
        safeguard_warmup: s is summed without lr, so that a warm-up does not make d too large.
        d0: d before the first step, below any distance there is.
        d_coef: a factor of the estimate.
        growth_rate: the most that d grows by in a step, inf for no limit.

    Source: Mishchenko and Defazio 2024, section 5, the Adam version; d_coef, growth_rate, safeguard_warmup and
    bias_correction are of their code. Differs: a step has d eps for the d that it is made with, as in the text, where
    the code takes the next one; a group has its own lr in r and s, where the code wants one lr of all groups.

    Raises:
        AxesError: hyperparameters that make no sense, groups that differ in d0, d_coef or growth_rate, or a parameter
            that is sharded.
    """

    name: ClassVar[str] = "prodigy"
    paper: ClassVar[str] = "Mishchenko and Defazio 2024"
    equation: ClassVar[str] = "section 5, the Adam version"
    differs: ClassVar[str] = (
        "eps is multiplied by the d of the step, as in the text, and not by the next one; groups may have an lr each"
    )
    bibtex: ClassVar[str] = """@inproceedings{mishchenko2024prodigy,
  title = {Prodigy: An Expeditiously Adaptive Parameter-Free Learner},
  author = {Mishchenko, Konstantin and Defazio, Aaron},
  booktitle = {International Conference on Machine Learning},
  year = {2024}
}"""
    default_lr: ClassVar[float] = 1.0

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "beta3": beta3,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "bias_correction": bias_correction,
            "safeguard_warmup": safeguard_warmup,
            "d0": d0,
            "d_coef": d_coef,
            "growth_rate": growth_rate,
        }
        super().__init__(params, {"prodigy": Prodigy.declare}, {"prodigy": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        decoupled: bool = True,
        bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
    ) -> StateUpdate:
        """The tuple: a filter that holds the first weights and tells of the way from there, then Adam in units of d."""
        kept = betas[1] ** 0.5 if beta3 is None else beta3
        unit("Prodigy", beta1=betas[0], beta2=betas[1], beta3=kept)
        positive("Prodigy", eps=eps)
        if not (0.0 < d0 < math.inf and 0.0 < d_coef < math.inf and growth_rate >= 1.0):
            raise AxesError(
                "Prodigy: d0 and d_coef must be positive and finite and growth_rate at least 1 (inf for no limit), got "
                f"{d0}, {d_coef} and {growth_rate}"
            )
        rate: Rate = LR * DISTANCE
        if bias_correction:
            rate = rate * (1.0 - betas[1] ** T) ** 0.5 / (1.0 - betas[0] ** T)
        weight = DISTANCE / d0  # only ratios of s and r count: this one keeps them within the range of float32
        steady: Rate = DISTANCE if safeguard_warmup else rate
        path = StateUpdate(Linear(), monoid=Scalar(kept), algorithm=Step(weight * steady))
        travel = StateUpdate(Linear("travel"), monoid=Scalar(kept), algorithm=Step(weight * rate))
        away = Distance((path, travel), d0, d_coef, growth_rate)
        ahead = StateUpdate(Linear(), away, Identity(), Step(0.0, start="W0", read=Read(0.0, DISTANCE)))
        first = StateUpdate(**average(betas[0], debias=False))
        second = StateUpdate(**average(betas[1], debias=False))
        squares = StateUpdate(Linear("square", raw=True), monoid=Zero(), algorithm=Step(DISTANCE**-2.0, via=(second,)))
        adam = memoryless(Whiten((squares,), eps=eps), 1.0 / DISTANCE, via=(first,))
        return decaying(Step(rate, via=(ahead, adam)), decoupled)

    update = declare()
