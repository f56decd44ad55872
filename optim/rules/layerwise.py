"""Rules whose step is in proportion to the weights, layer by layer: LARS on the gradient, LAMB on Adam's direction.

    LARS    m = momentum m + r (g + wd W),          r = coefficient |W| / (|g| + wd |W|),  W = W - lr m
    LAMB    d = m / (sqrt(v) + eps) + wd W,         r = phi(|W|) / |d|,                    W = W - lr r d

Both decay inside of what is rescaled. r is 1 where a norm is 0, so that a zero parameter moves.
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear, Ridge
from axes.core.geometry import Decayed, Euclidean, TrustRatio, Whiten
from axes.core.monoids import Decay, Zero
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, unit
from axes.optim.rules.wrappers import all_clip


@final
class LARS(Optimizer):
    """LARS:  m = momentum m + r (g + weight_decay W),  r = coefficient |W| / (|g| + weight_decay |W|),  W = W - lr m.

    Norms are of one parameter. A group with adapt=False takes SGD with the same momentum and decay; biases and the
    gains of norms are mostly given one, without decay: {"params": ..., "adapt": False, "weight_decay": 0.0}.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: of all parameters; what a step moves a layer by is about lr * coefficient of its norm.
        momentum, nesterov: as in SGD.
        weight_decay: inside the direction.
        coefficient: the trust coefficient.
        adapt: False for groups that take SGD.

    Source: You, Gitman and Ginsburg 2017, eq. 6 and algorithm 1. Differs: lr multiplies the buffer when it is read, as
    in timm and pytorch_optimizer, where the paper has it in what is added: the same while lr is constant.
    """

    name: ClassVar[str] = "lars"
    paper: ClassVar[str] = "You, Gitman and Ginsburg 2017"
    equation: ClassVar[str] = "eq. 6, algorithm 1"
    differs: ClassVar[str] = (
        "lr multiplies the momentum buffer when it is read, as in timm and pytorch_optimizer, and not what is added to "
        "it; vectors are adapted as well unless a group says adapt=False"
    )
    bibtex: ClassVar[str] = """@misc{you2017large,
  title = {Large Batch Training of Convolutional Networks},
  author = {You, Yang and Gitman, Igor and Ginsburg, Boris},
  year = {2017},
  eprint = {1708.03888},
  archiveprefix = {arXiv}
}"""
    default_lr: ClassVar[float] = 1.0

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        coefficient: float = 1e-3,
        nesterov: bool = False,
        adapt: bool = True,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "coefficient": coefficient,
            "nesterov": nesterov,
            "adapt": adapt,
        }
        super().__init__(params, {"lars": LARS.declare}, {"lars": own}, **options)

    @staticmethod
    def declare(
        momentum: float = 0.9, coefficient: float = 1e-3, nesterov: bool = False, adapt: bool = True
    ) -> StateUpdate:
        """The tuple."""
        unit("LARS", momentum=momentum)
        if nesterov and momentum == 0.0:
            raise AxesError("LARS: nesterov needs momentum > 0")
        kept = (Momentum(momentum, "sum", nesterov=nesterov),) if momentum > 0.0 else ()
        if not adapt:
            return StateUpdate(Ridge(Given(), WEIGHT_DECAY), algorithm=Step(LR, via=kept))
        ratio = TrustRatio(Decayed(Euclidean(), WEIGHT_DECAY), coefficient, "parts")
        return StateUpdate(Given(), algorithm=Step(LR, via=(StateUpdate(Linear(), ratio, Zero()), *kept)))

    update = declare()


@final
class LAMB(Optimizer):
    """LAMB:  d = m / (sqrt(v) + eps) + weight_decay W,  W = W - lr phi(|W|) d / |d|,  m and v as in Adam.

    Norms are of one parameter. phi(x) is x, or x between `bounds`. A group with adapt=False takes d as it is, which is
    AdamW. apex and timm clip the gradients of all parameters together to norm 1 before: max_norm=1.0.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: the part of a layer's norm that a step is long.
        betas, eps: as in Adam.
        weight_decay: inside the direction.
        bounds: (least, most) of |W| in phi, None for none.
        bias_correction: of m and v; without it the first steps have m / sqrt(v) too large, and only decay sees it.
        max_norm: of the gradients of all parameters together, None for any.
        adapt: False for groups that take AdamW.

    Source: You et al. 2020, algorithm 2. Differs: nothing; phi is the identity by default, as in apex and timm.
    """

    name: ClassVar[str] = "lamb"
    paper: ClassVar[str] = "You et al. 2020"
    equation: ClassVar[str] = "algorithm 2"
    differs: ClassVar[str] = (
        "phi is the identity unless bounds are given; gradients are clipped by their norm over all parameters, as apex "
        "and timm do by default, only where max_norm says so"
    )
    bibtex: ClassVar[str] = """@inproceedings{you2020large,
  title = {Large Batch Optimization for Deep Learning: Training {BERT} in 76 minutes},
  author = {You, Yang and Li, Jing and Reddi, Sashank and Hseu, Jonathan and Kumar, Sanjiv and Bhojanapalli, Srinadh and
            Song, Xiaodan and Demmel, James and Keutzer, Kurt and Hsieh, Cho-Jui},
  booktitle = {International Conference on Learning Representations},
  year = {2020}
}"""
    default_lr: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        bounds: tuple[float, float] | None = None,
        bias_correction: bool = True,
        max_norm: float | None = None,
        adapt: bool = True,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bounds": bounds,
            "bias_correction": bias_correction,
            "max_norm": max_norm,
            "adapt": adapt,
        }
        super().__init__(params, {"lamb": LAMB.declare}, {"lamb": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        bounds: tuple[float, float] | None = None,
        bias_correction: bool = True,
        max_norm: float | None = None,
        adapt: bool = True,
    ) -> StateUpdate:
        """The tuple."""
        unit("LAMB", beta1=betas[0], beta2=betas[1])
        if not eps >= 0.0:
            raise AxesError(f"LAMB: eps must be >= 0, got {eps}")
        second_moment = StateUpdate(**average(betas[1], "square", debias=bias_correction))
        adam, mean = Whiten((second_moment,), eps=eps), average(betas[0], debias=bias_correction)
        clip = () if max_norm is None else (all_clip(max_norm),)
        if not adapt:
            via = (*clip, StateUpdate(h=adam, **mean))
            return StateUpdate(Given(), monoid=Decay(WEIGHT_DECAY), algorithm=Step(LR, via=via))
        via = (*clip, StateUpdate(h=TrustRatio(Decayed(adam, WEIGHT_DECAY), bounds=bounds), **mean))
        return StateUpdate(Given(), algorithm=Step(LR, via=via))

    update = declare()
