"""SGD, Adam, AdamW and Lion: rules that act entry by entry, side by side.

    SGD     theta = (1 - lr wd) theta + lr * EMA or sum of u
    Adam    the same on  EMA(u) / (sqrt(EMA(u^2)) + eps), both divided by their response to a unit drive
    Lion    the same on  sign of an EMA that is read before its slow retention

u = -g throughout, so a buffer holds the negative of what torch.optim stores.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Momentum, Read, Step
from axes.core.costs import Given, Linear, Ridge
from axes.core.geometry import Euclidean, Geometry, SignBall, Whiten
from axes.core.monoids import Decay, Scalar, Zero
from axes.core.rates import Count, Per, Rate
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params

T = Count()
LR = Per("lr")
WEIGHT_DECAY = Per("weight_decay")


def average(
    beta: float,
    of: Any = "drive",
    debias: bool = True,
    read: Read | None = None,
    start: Literal["zero", "second"] = "zero",
) -> Any:
    """The parts of an exponential moving average, as keywords of StateUpdate. of: a cost, or what it is linear in."""
    return {
        "cost": of if isinstance(of, Linear) else Linear(of),
        "monoid": Scalar(beta),
        "algorithm": Step(1.0 - beta, debias=debias and beta > 0.0, read=read, start=start),
    }


def memoryless(h: Geometry = Euclidean(), rate: Rate = 1.0, **step: Any) -> StateUpdate:
    """A filter that keeps nothing: h of the newest drive."""
    return StateUpdate(Linear(), h, Zero(), Step(rate, **step))


def decaying(step: Step, decoupled: bool, weight: Rate = WEIGHT_DECAY) -> StateUpdate:
    """A rule for parameters: the weights decay with the step size (decoupled), or the loss does."""
    if decoupled:
        return StateUpdate(Given(), monoid=Decay(weight), algorithm=step)
    return StateUpdate(Ridge(Given(), weight), algorithm=step)


def unit(who: str, **values: float) -> None:
    """AxesError unless each value lies in [0, 1)."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise AxesError(f"{who}: {name} must lie in [0, 1), got {value}")


@final
class SGD(Optimizer):
    """Gradient descent with momentum:  b = momentum b + (1 - dampening) g,  W = W - lr b.

    nesterov steps along  g + momentum b.  weight_decay adds weight_decay * W to the gradient, or with `decoupled`
    multiplies W by 1 - lr * weight_decay.  As in torch, the buffer begins at the first gradient, undamped.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD, defaults too: no momentum.
        decoupled: decay the weights instead of the loss.

    Source: Polyak 1964, eq. 9; Nesterov 1983 in the form of Sutskever et al. 2013, eq. 3-4.
    Differs: decoupled decay (Loshchilov and Hutter 2019, algorithm 1) is an option.
    """

    name: ClassVar[str] = "sgd"
    paper: ClassVar[str] = "Polyak 1964; Sutskever et al. 2013"
    equation: ClassVar[str] = "Polyak eq. 9; Sutskever et al. eq. 3-4"
    differs: ClassVar[str] = "the buffer starts at the first gradient, as in torch; decoupled decay is an option"
    bibtex: ClassVar[str] = """@inproceedings{sutskever2013importance,
  title = {On the importance of initialization and momentum in deep learning},
  author = {Sutskever, Ilya and Martens, James and Dahl, George and Hinton, Geoffrey},
  booktitle = {International Conference on Machine Learning},
  year = {2013}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "decoupled": decoupled,
        }
        super().__init__(params, {"sgd": SGD.declare}, {"sgd": own}, **options)

    @staticmethod
    def declare(
        momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, decoupled: bool = False
    ) -> StateUpdate:
        """The tuple."""
        unit("SGD", momentum=momentum)
        if nesterov and (momentum == 0.0 or dampening != 0.0):
            raise AxesError("SGD: nesterov needs momentum > 0 and dampening = 0")
        if momentum == 0.0:
            via: tuple[Any, ...] = ()
        elif dampening == 0.0:
            via = (Momentum(momentum, "sum", nesterov=nesterov),)
        else:
            via = (StateUpdate(Linear(), monoid=Scalar(momentum), algorithm=Step(1.0 - dampening, start="first")),)
        if decoupled:
            return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=via))
        return StateUpdate(Ridge(Given(), WEIGHT_DECAY), algorithm=Step(LR, via=via))

    update = declare(0.9)  # with the momentum that its papers are about


def positive(who: str, **values: float) -> None:
    """AxesError unless each value is at least 0."""
    for name, value in values.items():
        if not value >= 0.0:
            raise AxesError(f"{who}: {name} must be >= 0, got {value}")


def largest_average(beta: float) -> StateUpdate:
    """The largest average of squares so far, divided by the response of the newest: AMSGrad's second moment."""
    response = StateUpdate(**average(beta, "unit", debias=False))
    largest = StateUpdate(Linear(), algorithm=Step(write="max"))
    step = Step(via=(StateUpdate(**average(beta, debias=False)), largest))
    return StateUpdate(Linear("square"), Whiten((response,), power=1.0, eps=0.0), Zero(), step)


def adam_filter(betas: tuple[float, float], eps: float, amsgrad: bool = False, who: str = "Adam") -> StateUpdate:
    """EMA(u) / (sqrt(EMA(u^2)) + eps): an averaging filter whitened by a diagonal statistic, or its largest value."""
    unit(who, beta1=betas[0], beta2=betas[1])
    positive(who, eps=eps)
    second_moment = largest_average(betas[1]) if amsgrad else StateUpdate(**average(betas[1], "square"))
    return StateUpdate(h=Whiten((second_moment,), "diagonal", power=0.5, eps=eps), **average(betas[0]))


@final
class Adam(Optimizer):
    """Adam:  W = W - lr m / (sqrt(v) + eps),  m and v bias-corrected averages of g and g^2.

    weight_decay is coupled: it adds weight_decay * W to the gradient, before both averages. With decoupled_weight_decay
    it is AdamW.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps, weight_decay, decoupled_weight_decay: as in torch.optim.Adam, defaults too.
        amsgrad: divide by the largest v so far.

    Source: Kingma and Ba 2015, algorithm 1. Differs: the bias correction is the average's response to a unit gradient,
    which is 1 - beta^t for constant betas and stays exact when a schedule changes them (torch takes the current beta).
    """

    name: ClassVar[str] = "adam"
    paper: ClassVar[str] = "Kingma and Ba 2015"
    equation: ClassVar[str] = "algorithm 1"
    differs: ClassVar[str] = (
        "weight decay, which the paper does not have, is coupled as in torch.optim.Adam; the bias correction stays "
        "exact when betas are scheduled"
    )
    bibtex: ClassVar[str] = """@inproceedings{kingma2015adam,
  title = {Adam: A Method for Stochastic Optimization},
  author = {Kingma, Diederik P. and Ba, Jimmy},
  booktitle = {International Conference on Learning Representations},
  year = {2015}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, {"adam": Adam.declare}, {"adam": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> StateUpdate:
        """The tuple."""
        return decaying(Step(LR, via=(adam_filter(betas, eps, amsgrad),)), decoupled_weight_decay)

    update = declare()


@final
class AdamW(Optimizer):
    """AdamW:  W = (1 - lr weight_decay) W - lr m / (sqrt(v) + eps),  m and v as in Adam.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW, defaults too.
        amsgrad: divide by the largest v so far.

    Source: Loshchilov and Hutter 2019, algorithm 2. Differs: the decay is multiplied by lr and not only by the
    schedule's factor (the convention of torch).
    """

    name: ClassVar[str] = "adamw"
    paper: ClassVar[str] = "Loshchilov and Hutter 2019"
    equation: ClassVar[str] = "algorithm 2"
    differs: ClassVar[str] = "the decay is scaled by lr, as in torch.optim.AdamW, not by the schedule alone"
    bibtex: ClassVar[str] = """@inproceedings{loshchilov2019decoupled,
  title = {Decoupled Weight Decay Regularization},
  author = {Loshchilov, Ilya and Hutter, Frank},
  booktitle = {International Conference on Learning Representations},
  year = {2019}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, {"adamw": AdamW.declare}, {"adamw": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, amsgrad: bool = False
    ) -> StateUpdate:
        """The tuple."""
        return decaying(Step(LR, via=(adam_filter(betas, eps, amsgrad, "AdamW"),)), decoupled=True)

    update = declare()


@final
class Lion(Optimizer):
    """Lion:  W = (1 - lr weight_decay) W - lr sign(beta1 m + (1 - beta1) g),  then  m = beta2 m + (1 - beta2) g.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: about a third to a tenth of AdamW's.
        betas, weight_decay: as in the paper.

    Source: Chen et al. 2023, algorithm 2. Differs: nothing; sign(0) = 0.
    """

    name: ClassVar[str] = "lion"
    paper: ClassVar[str] = "Chen et al. 2023"
    equation: ClassVar[str] = "algorithm 2"
    differs: ClassVar[str] = "nothing; the decay is scaled by lr, as in the paper"
    bibtex: ClassVar[str] = """@inproceedings{chen2023symbolic,
  title = {Symbolic Discovery of Optimization Algorithms},
  author = {Chen, Xiangning and Liang, Chen and Huang, Da and Real, Esteban and Wang, Kaiyuan and Liu, Yao and
            Pham, Hieu and Dong, Xuanyi and Luong, Thang and Hsieh, Cho-Jui and Lu, Yifeng and Le, Quoc V.},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2023}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {"lion": Lion.declare}, {"lion": own}, **options)

    @staticmethod
    def declare(betas: tuple[float, float] = (0.9, 0.99)) -> StateUpdate:
        """The tuple."""
        unit("Lion", beta1=betas[0], beta2=betas[1])
        read = None if betas[0] == betas[1] else Read(betas[0], 1.0 - betas[0])
        sign_of_average = StateUpdate(h=SignBall(), **average(betas[1], debias=False, read=read))
        return StateUpdate(Given(), Euclidean(), Decay(WEIGHT_DECAY), Step(LR, via=(sign_of_average,)))

    update = declare()
