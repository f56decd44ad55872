"""Steps divided by the root of a second moment, without an average of the gradient.

RMSprop    theta = theta + lr * sum of  u / (sqrt(EMA(u^2)) + eps)           or of the variance EMA(u^2) - EMA(u)^2
Adagrad    theta = theta + lr / (1 + lr_decay (t - 1)) * u / (sqrt(sum of u^2) + eps)
Adadelta   theta = theta + lr * d,  d = u sqrt(EMA(d^2) + eps) / sqrt(EMA(u^2) + eps),  EMA(d^2) before the step
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Momentum, Read, Step
from axes.core.costs import Linear
from axes.core.geometry import Whiten
from axes.core.monoids import Scalar
from axes.core.state_update import StateUpdate
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, T, average, decaying, memoryless, positive, unit


@final
class RMSprop(Optimizer):
    """RMSprop:  b = momentum b + g / (sqrt(v) + eps),  W = W - lr b,  v = alpha v + (1 - alpha) g^2.

    centered divides by the root of the variance, v - m^2 with the average m of g. v and m start at zero and are not
    corrected for it; weight_decay adds weight_decay * W to the gradient.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, alpha, eps, weight_decay, momentum, centered: as in torch.optim.RMSprop.

    Source: Tieleman and Hinton 2012, lecture 6.5, slide 29; centered: Graves 2013, eq. 38-41. Differs: a variance that
    rounding makes negative is zero, where torch divides by NaN.
    """

    name: ClassVar[str] = "rmsprop"
    paper: ClassVar[str] = "Tieleman and Hinton 2012; Graves 2013"
    equation: ClassVar[str] = "lecture 6.5, slide 29; centered: Graves eq. 38-41"
    differs: ClassVar[str] = "as in torch: eps outside of the root; a variance below zero by rounding is zero"
    bibtex: ClassVar[str] = """@misc{tieleman2012rmsprop,
  title = {Lecture 6.5 - {RMSprop}: Divide the gradient by a running average of its recent magnitude},
  author = {Tieleman, Tijmen and Hinton, Geoffrey},
  howpublished = {COURSERA: Neural Networks for Machine Learning},
  year = {2012}
}"""
    default_lr: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, {"rmsprop": RMSprop.declare}, {"rmsprop": own}, **options)

    @staticmethod
    def declare(alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, centered: bool = False) -> StateUpdate:
        """The tuple."""
        unit("RMSprop", alpha=alpha, momentum=momentum)
        positive("RMSprop", eps=eps)
        second = StateUpdate(**average(alpha, "square", debias=False))
        first = StateUpdate(**average(alpha, debias=False))
        whitened = memoryless(Whiten((second, first), "centered", eps=eps) if centered else Whiten((second,), eps=eps))
        via = (whitened, Momentum(momentum, "sum")) if momentum > 0.0 else (whitened,)
        return decaying(Step(LR, via=via), decoupled=False)

    update = declare()


@final
class Adagrad(Optimizer):
    """Adagrad:  W = W - lr / (1 + (t - 1) lr_decay) g / (sqrt(v) + eps),  v = v + g^2.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: as in torch.optim.Adagrad; v starts at
            initial_accumulator_value.

    Source: Duchi, Hazan and Singer 2011, figure 1 (diagonal, primal-dual update without a regulariser). Differs: the
    decay of lr is torch's.
    """

    name: ClassVar[str] = "adagrad"
    paper: ClassVar[str] = "Duchi, Hazan and Singer 2011"
    equation: ClassVar[str] = "figure 1, with a diagonal matrix"
    differs: ClassVar[str] = "a decay of lr and a start value of the sum, as in torch"
    bibtex: ClassVar[str] = """@article{duchi2011adaptive,
  title = {Adaptive Subgradient Methods for Online Learning and Stochastic Optimization},
  author = {Duchi, John and Hazan, Elad and Singer, Yoram},
  journal = {Journal of Machine Learning Research},
  volume = {12},
  pages = {2121--2159},
  year = {2011}
}"""
    default_lr: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, {"adagrad": Adagrad.declare}, {"adagrad": own}, **options)

    @staticmethod
    def declare(lr_decay: float = 0.0, initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> StateUpdate:
        """The tuple."""
        positive("Adagrad", lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value, eps=eps)
        start: Any = initial_accumulator_value if initial_accumulator_value > 0.0 else "zero"
        squares = StateUpdate(Linear("square"), algorithm=Step(start=start))
        rate = LR / (1.0 + lr_decay * (T - 1.0)) if lr_decay > 0.0 else LR
        return decaying(Step(rate, via=(memoryless(Whiten((squares,), eps=eps)),)), decoupled=False)

    update = declare()


@final
class Adadelta(Optimizer):
    """Adadelta:  W = W - lr d,  d = g sqrt(a + eps) / sqrt(v + eps),  v an average of g^2,  and then a one of d^2.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, rho, eps, weight_decay: as in torch.optim.Adadelta.

    Source: Zeiler 2012, algorithm 1. Differs: lr, which the paper does not have (1).
    """

    name: ClassVar[str] = "adadelta"
    paper: ClassVar[str] = "Zeiler 2012"
    equation: ClassVar[str] = "algorithm 1"
    differs: ClassVar[str] = "a step size, 1 by default, as in torch"
    bibtex: ClassVar[str] = """@misc{zeiler2012adadelta,
  title = {{ADADELTA}: An Adaptive Learning Rate Method},
  author = {Zeiler, Matthew D.},
  eprint = {1212.5701},
  archivePrefix = {arXiv},
  year = {2012}
}"""
    default_lr: ClassVar[float] = 1.0

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"adadelta": Adadelta.declare}, {"adadelta": own}, **options)

    @staticmethod
    def declare(rho: float = 0.9, eps: float = 1e-6) -> StateUpdate:
        """The tuple: a whitening by v, and a colouring by what it has made so far."""
        unit("Adadelta", rho=rho)
        second = StateUpdate(**average(rho, "square", debias=False))
        steps = StateUpdate(Linear("white-square"), monoid=Scalar(rho), algorithm=Step(1.0 - rho, read=Read(1.0, 0.0)))
        whitened = memoryless(Whiten((second,), eps=eps, eps_inside=True))
        coloured = memoryless(Whiten((steps,), power=-0.5, eps=eps, eps_inside=True))
        return decaying(Step(LR, via=(whitened, coloured)), decoupled=False)

    update = declare()
