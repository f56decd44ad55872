"""Retention known from sequence layers, tried on optimizers: entropic, rotational and reflective.

    signed EG     W = s sinh(theta),  theta = (1 - lr wd) theta + lr u     mirror descent, multiplicative on both signs
    rotational    m = beta m R(angle) + (1 - beta) u,  W = (1 - lr wd) W + lr m
    reflective    m = beta m (I - 2 w w^T) + (1 - beta) u,  the same W

The gate turns or reflects the momentum, not the weights: on the weights it would move the minimiser.
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

from axes.core.algorithms import Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Euclidean, Hypentropy
from axes.core.monoids import Decay, Householder, Product, Rotation, Scalar
from axes.core.state_update import StateUpdate
from axes.optim.engine.base import Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY, unit
from axes.optim.rules.matrix import beside_adamw

_ARTICLE = """@misc{axes-state-update,
  title = {axes: optimizers, sequence layers and depth mixers as one state update},
  author = {{The axes authors}},
  year = {2026}
}"""


@final
class SignedEG(Optimizer):
    """Signed exponentiated gradient:  W = scale sinh(theta),  theta = (1 - lr weight_decay) theta - lr g.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: step in theta: a relative step for weights larger than `scale`.
        scale: below it the step is that of gradient descent.
        weight_decay: on theta: forgetting towards zero weights.

    Source: Ghai, Hazan and Singer 2020, definition 1, after Kivinen and Warmuth 1997. Differs: a decay on theta.
    """

    name: ClassVar[str] = "signed-eg"
    paper: ClassVar[str] = "Ghai, Hazan and Singer 2020; Kivinen and Warmuth 1997"
    equation: ClassVar[str] = "mirror descent with the hypentropy, definition 1"
    differs: ClassVar[str] = "a decoupled decay acts on theta, the entropic form of weight decay"
    bibtex: ClassVar[str] = """@inproceedings{ghai2020exponentiated,
  title = {Exponentiated Gradient Meets Gradient Descent},
  author = {Ghai, Udaya and Hazan, Elad and Singer, Yoram},
  booktitle = {Algorithmic Learning Theory},
  year = {2020}
}"""
    default_lr: ClassVar[float] = 0.3

    def __init__(
        self, params: Params, lr: Any = None, scale: float = 1.0, weight_decay: float = 0.0, **options: Unpack[Options]
    ) -> None:
        own = {"lr": lr, "scale": scale, "weight_decay": weight_decay}
        super().__init__(params, {"eg": SignedEG.declare}, {"eg": own}, **options)

    @staticmethod
    def declare(scale: float = 1.0) -> StateUpdate:
        """The tuple."""
        return StateUpdate(Given(), Hypentropy(scale), Decay(WEIGHT_DECAY), Step(LR))

    update = declare()


def _with(momentum: float, turn: Rotation | Householder) -> StateUpdate:
    """Gradient descent through a filter whose retention turns; without momentum there is nothing to turn."""
    turned = StateUpdate(Linear(), Euclidean(), Product((Scalar(momentum), turn)), Step(1.0 - momentum))
    return StateUpdate(Given(), Euclidean(), Decay(WEIGHT_DECAY), Step(LR, via=(turned,) if momentum > 0.0 else ()))


@final
class RotationalMomentum(Optimizer):
    """Momentum that turns:  m = momentum m R(angle) + (1 - momentum) g,  W = (1 - lr weight_decay) W - lr m.

    The filter passes gradients that rotate by `angle` per step and damps constant ones: complex momentum on pairs of
    input channels. Hidden matrices take it, all other parameters AdamW. An odd input width is refused.

    Args:
        params: a model, named parameters, or groups that name their rule.
        momentum, angle: retention and turn of the buffer per step (radians).
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: of AdamW.

    Source: predicted by the taxonomy; defined here.
    """

    name: ClassVar[str] = "rotational-momentum"
    paper: ClassVar[str] = "Predicted by the taxonomy; defined in this package"
    equation: ClassVar[str] = "m = b m R + (1 - b) g, W = (1 - wd lr) W - lr m"
    differs: ClassVar[str] = "one angle for all pairs of inputs; equals complex momentum with rate b e^(i angle)"
    bibtex: ClassVar[str] = _ARTICLE
    default_lr: ClassVar[float] = 0.1

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.9,
        angle: float = 0.1,
        weight_decay: float = 0.0,
        aux_lr_scale: float = 0.05,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "angle": angle}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("rotational", RotationalMomentum.declare, own, *aux), **options)

    @staticmethod
    def declare(momentum: float = 0.9, angle: float = 0.1) -> StateUpdate:
        """The tuple."""
        unit("RotationalMomentum", momentum=momentum)
        return _with(momentum, Rotation(angle, uniform=True))

    update = declare()


@final
class ReflectiveMomentum(Optimizer):
    """Momentum that reflects:  m = momentum m (I - 2 w w^T) + (1 - momentum) g,  W = (1 - lr weight_decay) W - lr m.

    With the constant w = (1, ..., 1) / sqrt(n): momentum across the mean of the inputs, negative momentum along it.
    Hidden matrices take it, all other parameters AdamW.

    Args:
        params: a model, named parameters, or groups that name their rule.
        momentum: retention of the buffer per step.
        aux_lr_scale, aux_betas, aux_eps, aux_weight_decay: of AdamW.

    Source: predicted by the taxonomy (the optimizer analogue of PaTH); defined here.
    """

    name: ClassVar[str] = "reflective-momentum"
    paper: ClassVar[str] = "Predicted by the taxonomy; defined in this package"
    equation: ClassVar[str] = "m = b m H + (1 - b) g, W = (1 - wd lr) W - lr m"
    differs: ClassVar[str] = "a constant reflection; data-dependent ones are the tuple with Householder(2.0, key=name)"
    bibtex: ClassVar[str] = _ARTICLE
    default_lr: ClassVar[float] = 0.1

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        aux_lr_scale: float = 0.05,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        aux = (aux_lr_scale, aux_betas, aux_eps, aux_weight_decay)
        super().__init__(params, *beside_adamw("reflective", ReflectiveMomentum.declare, own, *aux), **options)

    @staticmethod
    def declare(momentum: float = 0.9) -> StateUpdate:
        """The tuple."""
        unit("ReflectiveMomentum", momentum=momentum)
        return _with(momentum, Householder(2.0, key=None))

    update = declare()
