"""Relatives of Adam: where its averages are read, by what they are divided, and how they begin.

NAdam    theta = theta + lr * (one step ahead of EMA(u)) / (sqrt(EMA(u^2)) + eps)
RAdam    theta = theta + lr * EMA(u) r / (sqrt(EMA(u^2)) + eps),  or lr * EMA(u) while EMA(u^2) knows too little
Adamax   theta = theta + lr * EMA(u) / largest |u|, older ones counting less
AMSGrad  theta = theta + lr * EMA(u) / (sqrt(largest EMA(u^2)) + eps)
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Mix, Read, Step, Sum
from axes.core.costs import Linear
from axes.core.geometry import Whiten
from axes.core.monoids import Scalar, Zero
from axes.core.rates import maximum, where
from axes.core.state_update import StateUpdate
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, Adam, T, average, decaying, memoryless, positive, unit


def nesterov_mixture(beta: float, momentum_decay: float) -> Sum:
    """(1 - mu_t) g / (1 - p_t) + mu_{t+1} m / (1 - p_{t+1}),  p_t the product of mu_1 to mu_t.

    1 - p is the response of an average with the retention mu: a statistic of the unit.
    """
    now, ahead = (beta * (1.0 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (T, T + 1.0))
    response = StateUpdate(Linear("unit"), monoid=Scalar(now), algorithm=Step(1.0 - now))
    look = StateUpdate(
        Linear(), monoid=Scalar(now), algorithm=Step(1.0 - now, read=Read(now * ahead, 1.0 - now * ahead))
    )
    response_ahead = StateUpdate(Linear("unit"), monoid=Zero(), algorithm=Step(via=(look,)))
    newest = memoryless(Whiten((response,), power=1.0, eps=0.0))
    averaged = StateUpdate(h=Whiten((response_ahead,), power=1.0, eps=0.0), **average(beta, debias=False))
    return Sum((newest, averaged), (1.0 - now, ahead))


@final
class NAdam(Optimizer):
    """Nesterov in Adam:  W = W - lr n / (sqrt(v) + eps),  n the average m of g, read one step ahead.

    The weight of m grows with the steps, mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2), and
    n = mu_{t+1} m / (1 - mu_1 ... mu_{t+1}) + (1 - mu_t) g / (1 - mu_1 ... mu_t).

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay: as in torch.optim.NAdam. With
            momentum_decay=None the weight is beta1 from the first step on, n = beta1 m + (1 - beta1) g, m after g, and
            n is divided by its own response to a unit gradient, 1 - beta1^(t+1).

    Source: Dozat 2016, algorithm 8 and its momentum schedule. Differs: with momentum_decay=None the fresh gradient has
    the bias correction of the average it is part of: the paper divides it by 1 - beta1^t instead of 1 - beta1^(t+1), so
    that on a constant gradient its first steps are up to 1 + beta1 / (1 + beta1) times lr.
    """

    name: ClassVar[str] = "nadam"
    paper: ClassVar[str] = "Dozat 2016"
    equation: ClassVar[str] = "algorithm 8"
    differs: ClassVar[str] = (
        "nothing from torch; with momentum_decay=None beta1 is constant and the fresh gradient is corrected for bias "
        "with the average it is part of, by 1 - beta1^(t+1)"
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
        momentum_decay: float | None = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, {"nadam": NAdam.declare}, {"nadam": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum_decay: float | None = 4e-3,
        decoupled_weight_decay: bool = False,
    ) -> StateUpdate:
        """The tuple."""
        unit("NAdam", beta1=betas[0], beta2=betas[1])
        positive("NAdam", eps=eps)
        b = betas[0]
        if momentum_decay is None or b == 0.0:
            second_moment = StateUpdate(**average(betas[1], "square"))
            read = Read(b * b, (1.0 - b) * (1.0 + b)) if b > 0.0 else None
            direction = StateUpdate(h=Whiten((second_moment,), eps=eps), **average(b, read=read))
        else:
            positive("NAdam", momentum_decay=momentum_decay)
            second_moment = StateUpdate(**average(betas[1], Linear("square", raw=True)))
            direction = memoryless(Whiten((second_moment,), eps=eps), via=(nesterov_mixture(b, momentum_decay),))
        return decaying(Step(LR, via=(direction,)), decoupled_weight_decay)

    update = declare()


@final
class RAdam(Optimizer):
    """Rectified Adam:  W = W - lr r m / (sqrt(v) + eps),  r as the variance of 1 / sqrt(v) asks; W - lr m at first.

    m and v are Adam's; with rho = 2 / (1 - beta2) - 1 and rho_t = rho - 2 t beta2^t / (1 - beta2^t), v is used once
    rho_t > 5, and r^2 = (rho_t - 4) (rho_t - 2) rho / ((rho - 4) (rho - 2) rho_t).

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps, weight_decay, decoupled_weight_decay: as in torch.optim.RAdam.

    Source: Liu et al. 2020, algorithm 2. Differs: v is used from rho_t > 5 on, as in torch and the authors' code, where
    the paper has 4; eps is added before v is corrected for bias.
    """

    name: ClassVar[str] = "radam"
    paper: ClassVar[str] = "Liu et al. 2020"
    equation: ClassVar[str] = "algorithm 2"
    differs: ClassVar[str] = "as in torch: rectified from rho_t > 5 (paper: 4); eps is added before the bias correction"
    bibtex: ClassVar[str] = """@inproceedings{liu2020variance,
  title = {On the Variance of the Adaptive Learning Rate and Beyond},
  author = {Liu, Liyuan and Jiang, Haoming and He, Pengcheng and Chen, Weizhu and Liu, Xiaodong and Gao, Jianfeng and
            Han, Jiawei},
  booktitle = {International Conference on Learning Representations},
  year = {2020}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, {"radam": RAdam.declare}, {"radam": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decoupled_weight_decay: bool = False
    ) -> StateUpdate:
        """The tuple: between the average and what the second moment makes of it, one of the two."""
        unit("RAdam", beta1=betas[0], beta2=betas[1])
        positive("RAdam", eps=eps)
        averaged = StateUpdate(**average(betas[0]))
        longest = 2.0 / (1.0 - betas[1]) - 1.0
        if not longest > 5.0:  # the second moment never knows enough
            return decaying(Step(LR, via=(averaged,)), decoupled_weight_decay)
        forgotten = betas[1] ** T
        length = longest - 2.0 * T * forgotten / (1.0 - forgotten)
        squared = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        rectified = (maximum(0.0, squared) * (1.0 - forgotten)) ** 0.5
        second_moment = StateUpdate(**average(betas[1], Linear("square", raw=True), debias=False))
        known = Mix(where(length > 5.0, 1.0, 0.0))
        direction = memoryless(Whiten((second_moment,), eps=eps), rectified, via=(averaged,), read=known)
        return decaying(Step(LR, via=(direction,)), decoupled_weight_decay)

    update = declare()


@final
class Adamax(Optimizer):
    """Adamax:  W = W - lr m / v,  v = max(beta2 v, |g| + eps),  m Adam's average, bias-corrected.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps, weight_decay: as in torch.optim.Adamax.

    Source: Kingma and Ba 2015, algorithm 2. Differs: eps, which the paper does not have, as in torch.
    """

    name: ClassVar[str] = "adamax"
    paper: ClassVar[str] = "Kingma and Ba 2015"
    equation: ClassVar[str] = "algorithm 2"
    differs: ClassVar[str] = "eps is added to the gradients' sizes, as in torch; weight decay is coupled"
    bibtex: ClassVar[str] = Adam.bibtex
    default_lr: ClassVar[float] = 2e-3

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
        super().__init__(params, {"adamax": Adamax.declare}, {"adamax": own}, **options)

    @staticmethod
    def declare(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> StateUpdate:
        """The tuple."""
        unit("Adamax", beta1=betas[0], beta2=betas[1])
        positive("Adamax", eps=eps)
        sizes = Linear("magnitude", offset=eps)
        largest = StateUpdate(sizes, monoid=Scalar(betas[1]), algorithm=Step(write="max" if betas[1] > 0.0 else "sum"))
        direction = StateUpdate(h=Whiten((largest,), power=1.0, eps=0.0), **average(betas[0]))
        return decaying(Step(LR, via=(direction,)), decoupled=False)

    update = declare()


@final
class AMSGrad(Optimizer):
    """AMSGrad:  W = W - lr m / (sqrt(vmax) + eps),  vmax = max(vmax, v),  m and v Adam's averages.

    Adam with amsgrad=True, which AdamW takes as well: m and vmax are divided by 1 - beta^t.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps, weight_decay: as in torch.optim.Adam.

    Source: Reddi, Kale and Kumar 2018, algorithm 2. Differs: bias corrections and eps, as in torch.
    """

    name: ClassVar[str] = "amsgrad"
    paper: ClassVar[str] = "Reddi, Kale and Kumar 2018"
    equation: ClassVar[str] = "algorithm 2"
    differs: ClassVar[str] = (
        "bias corrections and eps, which the paper does not have, as in torch; coupled weight decay"
    )
    bibtex: ClassVar[str] = """@inproceedings{reddi2018convergence,
  title = {On the Convergence of {Adam} and Beyond},
  author = {Reddi, Sashank J. and Kale, Satyen and Kumar, Sanjiv},
  booktitle = {International Conference on Learning Representations},
  year = {2018}
}"""
    default_lr: ClassVar[float] = 1e-3

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
        super().__init__(params, {"amsgrad": AMSGrad.declare}, {"amsgrad": own}, **options)

    @staticmethod
    def declare(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> StateUpdate:
        """The tuple."""
        return Adam.declare(betas, eps, amsgrad=True)

    update = declare()
