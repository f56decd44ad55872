"""Exponentiated gradient: multiplicative steps on the simplex, next to the signed form of `axes.optim.rules.predicted`.

simplex   W = W exp(lr u) / sum        theta = (1 - lr wd) theta + lr u,  W = softmax(theta) along the last axis
signed    W = scale sinh(theta)        the same theta
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, final

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Given
from axes.core.geometry import Entropic
from axes.core.monoids import Decay
from axes.core.state_update import StateUpdate
from axes.optim.engine.base import Group, Optimizer, Options, Params
from axes.optim.rules.first_order import LR, WEIGHT_DECAY
from axes.optim.rules.predicted import SignedEG
from axes.optim.sharding.dtensors import whole


@final
class ExponentiatedGradient(Optimizer):
    """Exponentiated gradient:  W = W exp(-lr g) / sum,  for probability vectors and matrices with such rows.

    A vector, or a matrix of rows, with two or more entries that are >= 0 and sum to 1 when it is added keeps that
    property: mixture weights, transition matrices, portfolios. All others take the signed form, SignedEG. A group that
    says simplex=True or False is not looked at. The state is log W, so entries may come near 0 and recover.

    Args:
        params: a model, named parameters, parameters or groups.
        lr: step in log W.
        scale: of the signed form.
        weight_decay: on theta: forgetting towards the uniform vector, and towards zero weights in the signed form.

    Source: Kivinen and Warmuth 1997, section 3 (EG). Differs: a decay on theta.
    """

    name: ClassVar[str] = "exponentiated-gradient"
    paper: ClassVar[str] = "Kivinen and Warmuth 1997"
    equation: ClassVar[str] = "EG, section 3"
    differs: ClassVar[str] = (
        "a decoupled decay acts on theta; parameters that are not on the simplex take the signed form"
    )
    bibtex: ClassVar[str] = """@article{kivinen1997exponentiated,
  title = {Exponentiated Gradient versus Gradient Descent for Linear Predictors},
  author = {Kivinen, Jyrki and Warmuth, Manfred K.},
  journal = {Information and Computation},
  volume = {132},
  number = {1},
  year = {1997}
}"""
    default_lr: ClassVar[float] = 0.3

    def __init__(
        self, params: Params, lr: Any = None, scale: float = 1.0, weight_decay: float = 0.0, **options: Unpack[Options]
    ) -> None:
        own = {"lr": lr, "simplex": True, "scale": scale, "weight_decay": weight_decay}
        super().__init__(params, {"eg": ExponentiatedGradient.declare}, {"eg": own}, **options)

    @staticmethod
    def declare(simplex: bool = True, scale: float = 1.0) -> StateUpdate:
        """The tuple, on the simplex or off it."""
        if not simplex:
            return SignedEG.declare(scale)
        return StateUpdate(Given(), Entropic("last"), Decay(WEIGHT_DECAY), Step(LR))

    update = declare()

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with their own options; those on the simplex become a group of their own."""
        if not isinstance(param_group, dict) or "simplex" in param_group:
            super().add_param_group(param_group)
            return
        options = {key: value for key, value in param_group.items() if key != "params"}
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in self._named(param_group.get("params")):
            parts[_on_simplex(parameter)].append(parameter if name is None else (name, parameter))
        for simplex, members in parts.items():
            if members or (not simplex and not parts[True]):
                super().add_param_group({**options, "params": members, "simplex": simplex})


def _on_simplex(parameter: Tensor) -> bool:
    """Whether a vector, or every row of a matrix, has entries >= 0 that sum to 1."""
    if parameter.is_complex() or parameter.ndim not in (1, 2) or parameter.shape[-1] < 2 or not parameter.numel():
        return False
    w = whole(parameter.detach()).to(torch.promote_types(parameter.dtype, torch.float32))
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(parameter.dtype, 2e-2)
    return bool((w >= 0).all()) and bool(((w.sum(-1) - 1).abs() <= tolerance).all())
