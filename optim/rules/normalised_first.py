"""Gradients are divided by their second moment first, and averaged then.

LaProp   theta = (1 - lr wd) theta + lr EMA(u / (sqrt(EMA(u^2)) + eps))
ADOPT    theta = (1 - lr wd) theta + lr EMA(clip(u / max(sqrt(v), eps))),  v = EMA(u^2) of the data before
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Read, Step
from axes.core.costs import Linear
from axes.core.geometry import Ball, Whiten
from axes.core.monoids import Scalar
from axes.core.rates import where
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, T, average, decaying, memoryless, positive, unit


@final
class LaProp(Optimizer):
    """LaProp:  W = (1 - lr weight_decay) W - lr m,  m an average of g / (sqrt(v) + eps), v of g^2, bias-corrected.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps: as in the authors' code.
        weight_decay: decoupled.

    Source: Ziyin, Wang and Ueda 2020, algorithm 1. Differs: lr multiplies the average and not what is averaged, which
    is the same while lr is constant; the decay comes before the step, as in AdamW, and not after it.
    """

    name: ClassVar[str] = "laprop"
    paper: ClassVar[str] = "Ziyin, Wang and Ueda 2020"
    equation: ClassVar[str] = "algorithm 1"
    differs: ClassVar[str] = "lr is outside of the average; the decoupled decay comes before the step"
    bibtex: ClassVar[str] = """@misc{ziyin2020laprop,
  title = {{LaProp}: Separating Momentum and Adaptivity in {Adam}},
  author = {Ziyin, Liu and Wang, Zhikang T. and Ueda, Masahito},
  eprint = {2002.04839},
  archivePrefix = {arXiv},
  year = {2020}
}"""
    default_lr: ClassVar[float] = 4e-4

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-15,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"laprop": LaProp.declare}, {"laprop": own}, **options)

    @staticmethod
    def declare(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-15) -> StateUpdate:
        """The tuple."""
        unit("LaProp", beta1=betas[0], beta2=betas[1])
        positive("LaProp", eps=eps)
        whitened = memoryless(Whiten((StateUpdate(**average(betas[1], "square")),), eps=eps))
        return decaying(Step(LR, via=(whitened, StateUpdate(**average(betas[0])))), decoupled=True)

    update = declare()


@final
class ADOPT(Optimizer):
    """ADOPT:  W = W - lr m,  m an average of  clip(g / max(sqrt(v), eps), c),  then  v = beta2 v + (1 - beta2) g^2.

    v is of the gradients before, and begins at the square of the first one, whose step moves nothing. The clip grows
    with the steps that have been taken, c = (t - 1)^clip_exponent at step t.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, betas, eps: as in the paper.
        weight_decay, decoupled: added to the gradient as weight_decay * W, or W multiplied by 1 - lr weight_decay.
        clip_exponent: None clips nothing, which is the paper's algorithm 1.

    Source: Taniguchi et al. 2024, algorithm 2 and the authors' code. Differs: nothing.
    """

    name: ClassVar[str] = "adopt"
    paper: ClassVar[str] = "Taniguchi et al. 2024"
    equation: ClassVar[str] = "algorithm 2 (clipped); algorithm 1 without the clip"
    differs: ClassVar[str] = "nothing; the first gradient fills v and moves nothing, as in the authors' code"
    bibtex: ClassVar[str] = """@inproceedings{taniguchi2024adopt,
  title = {{ADOPT}: Modified {Adam} Can Converge with Any $\\beta_2$ with the Optimal Rate},
  author = {Taniguchi, Shohei and Harada, Keno and Minegishi, Gouki and Oshima, Yuta and Jeong, Seong Cheol and
            Nagahara, Go and Iiyama, Tomoshi and Suzuki, Masahiro and Iwasawa, Yusuke and Matsuo, Yutaka},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        clip_exponent: float | None = 0.25,
        **options: Unpack[Options],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "clip_exponent": clip_exponent,
        }
        super().__init__(params, {"adopt": ADOPT.declare}, {"adopt": own}, **options)

    @staticmethod
    def declare(
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        decoupled: bool = False,
        clip_exponent: float | None = 0.25,
    ) -> StateUpdate:
        """The tuple: everything but v waits for the second datum."""
        unit("ADOPT", beta1=betas[0], beta2=betas[1])
        if betas[1] == 0.0:
            raise AxesError("ADOPT: beta2 must be positive: without a memory of squares every entry is its own root")
        if not eps > 0.0:
            raise AxesError(f"ADOPT: eps is the smallest denominator and must be > 0, got {eps}")
        if clip_exponent is not None and not clip_exponent > 0.0:
            raise AxesError(f"ADOPT: clip_exponent must be > 0, or None for no clip, got {clip_exponent}")
        begun, averaged = T > 1.0, StateUpdate(**average(betas[0], debias=False))
        step = Step(1.0 - betas[1], start="first", read=Read(1.0, 0.0))
        before = Whiten((StateUpdate(Linear("square"), monoid=Scalar(betas[1]), algorithm=step),), eps=0.0, floor=eps)
        if clip_exponent is None:
            via: tuple[StateUpdate, ...] = (memoryless(before, where(begun, 1.0, 0.0)), averaged)
        else:
            via = (memoryless(before), memoryless(Ball((T - 1.0) ** clip_exponent, "max")), averaged)
        weight = where(begun, WEIGHT_DECAY, 0.0) if decoupled else WEIGHT_DECAY
        return decaying(Step(LR, via=via), decoupled, weight)

    update = declare()
