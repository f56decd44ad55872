"""Directions that are mixtures: of the gradient and its average, or of two averages.

QHM        theta = theta + lr ((1 - nu) u + nu EMA(u))
QHAdam     the same over the root of the same mixture of u^2 and EMA(u^2)
AdEMAMix   theta = (1 - lr wd) theta + lr (EMA(u) + alpha slow EMA(u)) / (sqrt(EMA(u^2)) + eps)
MARS       AdamW on  u + gamma beta1 / (1 - beta1) (u - the last u),  of norm 1 at most
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Read, Step, Sum
from axes.core.costs import Linear
from axes.core.geometry import Ball, Whiten
from axes.core.monoids import Scalar, Zero
from axes.core.rates import Rate, log, minimum
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, T, adam_filter, average, decaying, memoryless, positive, unit


def share(who: str, **values: float) -> None:
    """AxesError unless each value lies in [0, 1]."""
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise AxesError(f"{who}: {name} must lie in [0, 1], got {value}")


@final
class QHM(Optimizer):
    """Quasi-hyperbolic momentum:  W = W - lr ((1 - nu) g + nu m),  m = momentum m + (1 - momentum) g.

    nu = 1 is momentum, nu = 0 gradient descent, nu = momentum Nesterov's.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, momentum, nu: as in the paper.
        weight_decay, decoupled: added to the gradient as weight_decay * W, or W multiplied by 1 - lr weight_decay.

    Source: Ma and Yarats 2019, eq. 3-4. Differs: nothing.
    """

    name: ClassVar[str] = "qhm"
    paper: ClassVar[str] = "Ma and Yarats 2019"
    equation: ClassVar[str] = "eq. 3-4"
    differs: ClassVar[str] = "nothing; the average starts at zero and is not corrected for it, as in the authors' code"
    bibtex: ClassVar[str] = """@inproceedings{ma2019quasi,
  title = {Quasi-hyperbolic momentum and {Adam} for deep learning},
  author = {Ma, Jerry and Yarats, Denis},
  booktitle = {International Conference on Learning Representations},
  year = {2019}
}"""
    default_lr: ClassVar[float] = 1.0

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.999,
        nu: float = 0.7,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "nu": nu, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, {"qhm": QHM.declare}, {"qhm": own}, **options)

    @staticmethod
    def declare(momentum: float = 0.999, nu: float = 0.7, decoupled: bool = False) -> StateUpdate:
        """The tuple: an average that is read ahead of itself."""
        unit("QHM", momentum=momentum)
        share("QHM", nu=nu)
        if momentum == 0.0 or nu == 0.0:
            return decaying(Step(LR), decoupled)
        read = Read(nu * momentum, 1.0 - nu * momentum) if nu < 1.0 else None
        mixed = StateUpdate(**average(momentum, debias=False, read=read))
        return decaying(Step(LR, via=(mixed,)), decoupled)

    update = declare()


def mixed_with_newest(of: StateUpdate, nu: float) -> Sum | StateUpdate:
    """(1 - nu) u + nu times the average of u."""
    return of if nu == 1.0 else Sum((memoryless(), of), (1.0 - nu, nu))


@final
class QHAdam(Optimizer):
    """Quasi-hyperbolic Adam:  W = W - lr ((1 - nu1) g + nu1 m) / (sqrt((1 - nu2) g^2 + nu2 v) + eps).

    m and v are Adam's averages, bias-corrected; nus = (1, 1) is Adam.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, nus, eps: the defaults are those of the paper's experiments, section 4.
        weight_decay, decoupled: added to the gradient as weight_decay * W, or W multiplied by 1 - lr weight_decay.

    Source: Ma and Yarats 2019, eq. 19 (section 4). Differs: nothing.
    """

    name: ClassVar[str] = "qhadam"
    paper: ClassVar[str] = "Ma and Yarats 2019"
    equation: ClassVar[str] = "section 4, QHAdam"
    differs: ClassVar[str] = "nothing"
    bibtex: ClassVar[str] = QHM.bibtex
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.995, 0.999),
        nus: tuple[float, float] = (0.7, 1.0),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "nus": nus, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, {"qhadam": QHAdam.declare}, {"qhadam": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.995, 0.999),
        nus: tuple[float, float] = (0.7, 1.0),
        eps: float = 1e-8,
        decoupled: bool = False,
    ) -> StateUpdate:
        """The tuple."""
        unit("QHAdam", beta1=betas[0], beta2=betas[1])
        share("QHAdam", nu1=nus[0], nu2=nus[1])
        positive("QHAdam", eps=eps)
        first = mixed_with_newest(StateUpdate(**average(betas[0])), nus[0])
        second = mixed_with_newest(StateUpdate(**average(betas[1])), nus[1])
        squares = StateUpdate(Linear("square", raw=True), monoid=Zero(), algorithm=Step(via=(second,)))
        direction = memoryless(Whiten((squares,), eps=eps), via=(first,))
        return decaying(Step(LR, via=(direction,)), decoupled)

    update = declare()


def slow_mixture(betas: tuple[float, float, float], alpha: float, warmup: float | None) -> tuple[Rate, Rate]:
    """The retention of the slow average and its weight, which grow over `warmup` steps: half-lives linearly."""
    if warmup is None:
        return betas[2], alpha
    done, ratio = minimum(1.0, T / warmup), log(betas[0]) / log(betas[2])
    return betas[2] ** (ratio / (1.0 - done + ratio * done)), alpha * done


@final
class AdEMAMix(Optimizer):
    """AdEMAMix:  W = (1 - lr weight_decay) W - lr (m1 + alpha m2) / (sqrt(v) + eps).

    m1 and v are Adam's averages, bias-corrected; m2 = beta3 m2 + (1 - beta3) g is slow, and is not corrected.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, eps: of Adam.
        betas: of m1, v and m2.
        alpha: the weight of m2.
        weight_decay: decoupled.
        warmup: steps in which alpha grows from 0 and the half-life of m2 from that of m1; None for constants.

    Source: Pagliardini, Ablin and Grangier 2024, algorithm 1. Differs: nothing.
    """

    name: ClassVar[str] = "ademamix"
    paper: ClassVar[str] = "Pagliardini, Ablin and Grangier 2024"
    equation: ClassVar[str] = "algorithm 1, with the schedules of section 3"
    differs: ClassVar[str] = "nothing; both schedules have one length"
    bibtex: ClassVar[str] = """@inproceedings{pagliardini2025ademamix,
  title = {The {AdEMAMix} Optimizer: Better, Faster, Older},
  author = {Pagliardini, Matteo and Ablin, Pierre and Grangier, David},
  booktitle = {International Conference on Learning Representations},
  year = {2025}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "warmup": warmup}
        super().__init__(params, {"ademamix": AdEMAMix.declare}, {"ademamix": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        warmup: float | None = None,
    ) -> StateUpdate:
        """The tuple: two averages side by side, over one second moment."""
        unit("AdEMAMix", beta1=betas[0], beta2=betas[1], beta3=betas[2])
        positive("AdEMAMix", alpha=alpha, eps=eps)
        if warmup is not None and not (warmup > 0.0 and betas[0] > 0.0 and betas[2] > 0.0):
            raise AxesError(f"AdEMAMix: warmup takes steps > 0 and beta1, beta3 > 0, got {warmup} with betas {betas}")
        retention, weight = slow_mixture(betas, alpha, warmup)
        slow = StateUpdate(Linear(), monoid=Scalar(retention), algorithm=Step(1.0 - retention))
        squares = StateUpdate(**average(betas[1], Linear("square", raw=True)))
        both = Sum((StateUpdate(**average(betas[0])), slow), (1.0, weight))
        return decaying(Step(LR, via=(memoryless(Whiten((squares,), eps=eps), via=(both,)),)), decoupled=True)

    update = declare()


@final
class MARS(Optimizer):
    """MARS-AdamW:  AdamW on  c = g + gamma beta1 / (1 - beta1) (g - g_last),  scaled down to norm 1.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps: of AdamW.
        gamma: how much of the change of the gradient is added.
        weight_decay: decoupled.

    Source: Yuan et al. 2024, algorithm 2 with the approximation of section 3.3, g_last on the last batch. Differs:
    every parameter takes it, as with optimize_1d=True in the authors' code, whose default gives vectors to AdamW: make
    that a group of another optimizer. The norm is of one parameter.
    """

    name: ClassVar[str] = "mars"
    paper: ClassVar[str] = "Yuan et al. 2024"
    equation: ClassVar[str] = "algorithm 2, approximate"
    differs: ClassVar[str] = "all parameters take it (optimize_1d=True); the gradient before is that of the last batch"
    bibtex: ClassVar[str] = """@misc{yuan2024mars,
  title = {{MARS}: Unleashing the Power of Variance Reduction for Training Large Models},
  author = {Yuan, Huizhuo and Liu, Yifeng and Wu, Shuang and Zhou, Xun and Gu, Quanquan},
  eprint = {2411.10438},
  archivePrefix = {arXiv},
  year = {2024}
}"""
    default_lr: ClassVar[float] = 3e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.95, 0.99),
        gamma: float = 0.025,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"mars": MARS.declare}, {"mars": own}, **options)

    @staticmethod
    def declare(betas: tuple[float, float] = (0.95, 0.99), gamma: float = 0.025, eps: float = 1e-8) -> StateUpdate:
        """The tuple: a filter whose state is the last drive, a ball, and Adam's filter."""
        unit("MARS", beta1=betas[0], beta2=betas[1])
        positive("MARS", gamma=gamma)
        change = gamma * betas[0] / (1.0 - betas[0])
        ahead = memoryless(read=Read(-change, 1.0 + change))
        whitened = adam_filter(betas, eps, who="MARS")
        return decaying(Step(LR, via=(ahead, memoryless(Ball(1.0)), whitened)), decoupled=True)

    update = declare()
