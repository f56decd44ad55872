"""Signs and linear minimisation: signSGD, and Frank-Wolfe on norm balls with Lion and Muon as special cases.

    signSGD       W = (1 - lr wd) W + lr sign(u)               or the sign of an average of u (Signum)
    Frank-Wolfe   W = (1 - gamma) W + gamma argmax <u, V>      over the ball |V| <= radius,  gamma = lr / radius

The second is the first with another ball and wd = 1 / radius: a decayed step along a unit direction stays in the ball.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack, final

from axes.core.algorithms import Read, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Euclidean, Geometry, SignBall, Spectral, Sphere
from axes.core.monoids import Decay, Zero
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, UnknownName
from axes.optim.engine.base import Optimizer, Options, Params, Rule
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, average, unit


@final
class SignSGD(Optimizer):
    """signSGD:  W = (1 - lr weight_decay) W - lr sign(m),  m = momentum m + (1 - momentum) g.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: the change of every entry per step.
        momentum: 0 is signSGD, more is Signum.
        weight_decay: decoupled.

    Source: Bernstein et al. 2018, algorithms 1 and 2 (delta = lr). Differs: nothing on one worker; sign(0) = 0; a
    decoupled decay is added.
    """

    name: ClassVar[str] = "sign-sgd"
    paper: ClassVar[str] = "Bernstein et al. 2018"
    equation: ClassVar[str] = "algorithm 1, and algorithm 2 with momentum (Signum)"
    differs: ClassVar[str] = "one worker, so no majority vote; a decoupled decay is an option"
    bibtex: ClassVar[str] = """@inproceedings{bernstein2018signsgd,
  title = {{signSGD}: Compressed Optimisation for Non-Convex Problems},
  author = {Bernstein, Jeremy and Wang, Yu-Xiang and Azizzadenesheli, Kamyar and Anandkumar, Animashree},
  booktitle = {International Conference on Machine Learning},
  year = {2018}
}"""
    default_lr: ClassVar[float] = 1e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {"sign": SignSGD.declare}, {"sign": own}, **options)

    @staticmethod
    def declare(momentum: float = 0.0) -> StateUpdate:
        """The tuple."""
        unit("SignSGD", momentum=momentum)
        if momentum > 0.0:
            direction = StateUpdate(h=SignBall(), **average(momentum, debias=False))
        else:
            direction = StateUpdate(Linear(), SignBall(), Zero())
        return StateUpdate(Given(), Euclidean(), Decay(WEIGHT_DECAY), Step(LR, via=(direction,)))

    update = declare()


Norm = Literal["max", "spectral", "frobenius", "rows"]


def _ball(norm: Norm) -> Geometry:
    """The h whose primal maximises <u, V> over the unit ball of a norm."""
    balls: dict[str, Geometry] = {
        "max": SignBall(),
        "spectral": Spectral("polar"),
        "frobenius": Sphere("whole"),
        "rows": Sphere("rows"),
    }
    if norm not in balls:
        raise UnknownName("norm of FrankWolfe", norm, balls)
    return balls[norm]


@final
class FrankWolfe(Optimizer):
    """Stochastic Frank-Wolfe:  W = (1 - gamma) W + gamma radius argmax_{|V| <= 1} <-m, V>,  gamma = lr / radius.

    m = beta1 m' + (1 - beta1) g is read before m' = beta2 m' + (1 - beta2) g, as in Lion. W stays in the ball of
    `radius` once it is there. Hidden matrices take `norm`, all other parameters the max norm with aux_radius.

    Args:
        params: a model, named parameters, or groups that name their rule ("frank-wolfe" or "box").
        lr: gamma times the radius: at most the radius. A schedule gamma_t = 2 / (t + 2) is a scheduler's.
        radius: of the ball; it is the reciprocal of the group's weight_decay.
        norm: "spectral" (largest singular value), "max" (largest entry), "frobenius", or "rows" (largest row).
        betas: see above; (0, 0) is Frank-Wolfe on the gradient itself.
        aux_lr_scale, aux_radius: of the parameters that are not hidden matrices.

    Source: Frank and Wolfe 1956; Pethick et al. 2025, algorithm 2 (constrained). With norm="max" it is Lion and with
    norm="spectral" and beta1 = beta2 Muon with an exact polar factor, both with weight decay 1 / radius. Differs: two
    betas; the maximiser of a zero gradient is 0, the centre of the ball.
    """

    name: ClassVar[str] = "frank-wolfe"
    paper: ClassVar[str] = "Frank and Wolfe 1956; Pethick et al. 2025"
    equation: ClassVar[str] = "Pethick et al., algorithm 2 with constraint"
    differs: ClassVar[str] = (
        "the two betas of Lion; the exact polar factor for the spectral norm, dropping singular values that are zero; "
        "the step size is gamma times the radius"
    )
    bibtex: ClassVar[str] = """@inproceedings{pethick2025training,
  title = {Training Deep Learning Models with Norm-Constrained {LMOs}},
  author = {Pethick, Thomas and Xie, Wanyun and Antonakopoulos, Kimon and Zhu, Zhenyu and Silveti-Falls, Antonio and
            Cevher, Volkan},
  booktitle = {International Conference on Machine Learning},
  year = {2025}
}"""
    default_lr: ClassVar[float] = 1e-2

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        radius: float = 20.0,
        norm: Norm = "spectral",
        betas: tuple[float, float] = (0.9, 0.9),
        aux_lr_scale: float = 0.5,
        aux_radius: float = 100.0,
        **options: Unpack[Options],
    ) -> None:
        for name, value in (("radius", radius), ("aux_radius", aux_radius)):
            if not 0.0 < value < math.inf:
                raise AxesError(f"FrankWolfe: {name} must be positive and finite, got {value}")
        own = {"lr": lr, "weight_decay": 1.0 / radius, "norm": norm, "betas": betas}
        other = {"lr": lr, "weight_decay": 1.0 / aux_radius, "betas": betas, "lr_scale": aux_lr_scale}
        rules: Mapping[str, Rule] = {"frank-wolfe": FrankWolfe.declare, "box": FrankWolfe.box}
        super().__init__(params, rules, {"frank-wolfe": own, "box": other}, **options)

    @staticmethod
    def declare(norm: Norm = "spectral", betas: tuple[float, float] = (0.9, 0.9)) -> StateUpdate:
        """The tuple."""
        unit("FrankWolfe", beta1=betas[0], beta2=betas[1])
        read = None if betas[0] == betas[1] else Read(betas[0], 1.0 - betas[0])
        maximiser = StateUpdate(h=_ball(norm), **average(betas[1], debias=False, read=read))
        return StateUpdate(Given(), Euclidean(), Decay(WEIGHT_DECAY), Step(LR, via=(maximiser,)))

    @staticmethod
    def box(betas: tuple[float, float] = (0.9, 0.9)) -> StateUpdate:
        """The tuple of the parameters that are not hidden matrices."""
        return FrankWolfe.declare("max", betas)

    update = declare()
