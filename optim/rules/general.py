"""Any legal tuple as an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, final

import torch

from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Optimizer, Options, Params, Rule
from axes.optim.engine.capabilities import needs_matrices, require_parameter, vectors
from axes.optim.engine.choice import plan
from axes.optim.rules.first_order import AdamW
from axes.routes.choice import Implementation, Plan, Target


@final
@dataclass(frozen=True)
class Fixed:
    """A rule without hyperparameters: always the same tuple."""

    update: StateUpdate

    def __call__(self) -> StateUpdate:
        return self.update


@final
class Interpreted(Optimizer):
    """The optimizer of a tuple that was given; construct it through `optimizer(update)`."""

    name = "interpreted"

    def __init__(
        self, params: Params, rules: Mapping[str, StateUpdate], rates: Mapping[str, Any], options: Options
    ) -> None:
        shared = dict(rates)
        scale = shared.pop("aux_lr_scale", 1.0)
        defaults: dict[str, dict[str, Any]] = {}
        for rule, update in rules.items():
            names = {per.name for per in update.demands()} | set(vectors(update))
            defaults[rule] = {name: shared.get(name, _DEFAULTS.get(name)) for name in sorted(names)}
        if "auxiliary" in defaults:
            defaults["auxiliary"]["lr_scale"] = scale
        fixed: dict[str, Rule] = {rule: Fixed(update) for rule, update in rules.items()}
        super().__init__(params, fixed, defaults, **options)


_DEFAULTS = {"lr": 1e-3, "weight_decay": 0.0}


@final
@dataclass(frozen=True)
class Factory:
    """Constructs optimizers of one tuple: `factory(params, lr=..., **rates)`.

    update: for all parameters, or for hidden matrices if it has a meaning for matrices only. auxiliary: for the others.
    """

    update: StateUpdate
    auxiliary: StateUpdate

    def plans(
        self, target: Target | None, dtype: torch.dtype | None, implementation: Implementation | None
    ) -> tuple[Plan, ...]:
        """What steps hidden matrices, or all parameters, and what the others; by default on a CPU in float32."""
        rules = {"matrix": self.update, "auxiliary": self.auxiliary} if self._matrix else {"runs": self.update}
        device, kind = target or Target.of("cpu"), dtype or torch.float32
        return tuple(plan(name, update, device, kind, implementation) for name, update in rules.items())

    @property
    def _matrix(self) -> bool:
        return needs_matrices(self.update)

    def __call__(self, params: Params, **keywords: Any) -> Interpreted:
        """An optimizer of a model, named parameters, parameters or groups.

        Keywords are the named rates of the tuple (unit gates as logs, lr 1e-3 and weight_decay 0 if left out), the
        vectors it reads, `aux_lr_scale`, and the options of every optimizer.

        Raises:
            AxesError: a rate is missing, or one is given that the tuple does not ask for.
        """
        rules = {"matrix": self.update, "auxiliary": self.auxiliary} if self._matrix else {"update": self.update}
        known = {"aux_lr_scale"} if self._matrix else set()
        for update in rules.values():
            known |= {per.name for per in update.demands()} | set(vectors(update))
        options = {key: value for key, value in keywords.items() if key in Options.__annotations__}
        rates = {key: value for key, value in keywords.items() if key not in options}
        for name in rates:
            if name not in known:
                raise AxesError(
                    f"the tuple does not ask for {name!r}, so it would have no effect; it asks for "
                    f"{', '.join(sorted(known)) or 'nothing'} (name a rate with Per({name!r}))"
                )
        return Interpreted(params, rules, rates, cast(Options, options))


def optimizer(update: StateUpdate, auxiliary: StateUpdate | None = None) -> Factory:
    """The optimizer of a tuple: `optimizer(update)(model, lr=0.1)`.

    A tuple with cost Given() is driven by the gradients. A tuple with a cost of keys and values computes its own: it
    is fed the examples of every nn.Linear one after another, k the layer's input and v = W k - (gradient of the layer's
    output), the target for which the squared error has that gradient. Differentiate the sum over examples of losses
    that carry one half, and v is the label of a linear model. Such tuples need the model.

    auxiliary: the tuple for parameters that are not hidden matrices (embeddings, head, biases, ...), needed only if
    `update` is for matrices; AdamW if left out.

    Raises:
        IllegalUpdate: the tuple is a filter, or its memory is not one parameter.
    """
    require_parameter(update)
    auxiliary = AdamW.declare() if auxiliary is None else auxiliary
    require_parameter(auxiliary)
    if needs_matrices(auxiliary):
        raise AxesError("the auxiliary tuple takes parameters of any shape: it cannot be one for matrices")
    return Factory(update, auxiliary)
