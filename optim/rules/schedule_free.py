"""Schedule-free training: any rule, with the average of its weights kept beside them and no schedule to choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.base import Group, Optimizer, Options, Params, Rule
from axes.optim.engine.capabilities import needs_matrices, require_parameter
from axes.optim.engine.groups import rate
from axes.optim.engine.states import show
from axes.optim.rules.first_order import AdamW
from axes.optim.rules.wrappers import schedule_free

_NEWEST, _AVERAGE = "via.0.theta", "theta"  # z and x in a parameter's state


@final
@dataclass(frozen=True)
class _Wrapped:
    """The tuple of a parameter group from its hyperparameters."""

    rule: StateUpdate
    decay_at: Literal["y", "z"]

    def __call__(self, beta: float) -> StateUpdate:
        return schedule_free(self.rule, beta, decay_at=self.decay_at)


@final
class ScheduleFree(Optimizer):
    """Schedule-free:  z = rule(z, g at y),  x = (1 - c) x + c z,  y = beta x + (1 - beta) z.

    c = w / (sum of w so far), w = lr^lr_power, the start counted as one step: with a constant lr x is the mean of
    W_0 and of all z, and steps of a warm-up weigh less.

    The parameters show y, where gradients are wanted.  `eval()` makes them show x, the weights to use and to save for
    inference, and `train()` shows y again; a step in between is refused.  There is no closure to call and no schedule
    to choose: lr stays, after a warm-up.

    Args:
        params: a model, named parameters, parameters or groups.
        lr, weight_decay: of the rule.
        rule: any tuple that moves and shows its weights, AdamW without momentum if left out. One for matrices takes the
            hidden ones, and AdamW without momentum, schedule-free too, all other parameters.
        beta: how far y goes from z to x; the momentum of the method.
        lr_power: 2 as its authors recommend, 0 for a uniform average.
        decay_at: whether z decays by lr weight_decay "y", as in their code, or by lr weight_decay "z", as the rule
            alone would.

    Source: Defazio et al. 2024, eq. 3-5, with the weights of their section 3 (lr_power). Differs: the start counts as
    in eq. 5, where their code drops it; a rule's bias correction is its own, where their code scales lr, and with it
    the decay and the weights of the average; a rate that falls weighs less, where their code takes the largest so far.

    Raises:
        AxesError: numbers or tuples that make no sense, or a step while the parameters show the average.
    """

    name: ClassVar[str] = "schedule-free"
    paper: ClassVar[str] = "Defazio et al. 2024"
    equation: ClassVar[str] = "eq. 3-5"
    differs: ClassVar[str] = (
        "wraps any rule; the start counts as one of the averaged weights, as in the text; decay of z at y, as in the "
        "authors' code, or at z"
    )
    bibtex: ClassVar[str] = """@inproceedings{defazio2024road,
  title = {The Road Less Scheduled},
  author = {Defazio, Aaron and Yang, Xingyu Alice and Mehta, Harsh and Mishchenko, Konstantin and Khaled, Ahmed and
            Cutkosky, Ashok},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024}
}"""
    default_lr: ClassVar[float] = 2.5e-3

    def __init__(
        self,
        params: Params,
        lr: Any = None,
        beta: float = 0.9,
        weight_decay: float = 0.0,
        rule: StateUpdate | None = None,
        lr_power: float = 2.0,
        decay_at: Literal["y", "z"] = "y",
        **options: Unpack[Options],
    ) -> None:
        if not (isinstance(lr_power, int | float) and 0.0 <= lr_power < float("inf")):
            raise AxesError(f"ScheduleFree: lr_power must be a finite number >= 0, got {lr_power!r}")
        plain = AdamW.declare((0.0, 0.999))
        rule = plain if rule is None else rule
        rules = {"matrix": rule, "auxiliary": plain} if needs_matrices(rule) else {"update": rule}
        wrapped = {name: _Wrapped(update, decay_at) for name, update in rules.items()}
        for wrap in wrapped.values():
            require_parameter(wrap(beta))
        given = {"lr": lr, "weight_decay": weight_decay}
        own = {"average": 0.5, "beta": beta, "lr_power": lr_power, "weight_sum": 0.0, "averaged": False}
        defaults: dict[str, Group] = {}
        for name, wrap in wrapped.items():
            asked = {per.name for per in wrap(beta).demands()}
            if missing := asked - {*given, "average"}:
                raise AxesError(f"ScheduleFree: the rule asks for {sorted(missing)}, which it cannot be given here")
            defaults[name] = {**{n: v for n, v in given.items() if n in asked or n == "lr"}, **own}
        builders: Mapping[str, Rule] = wrapped
        super().__init__(params, builders, defaults, **options)

    @staticmethod
    def declare(beta: float = 0.9) -> StateUpdate:
        """The tuple, around AdamW without momentum."""
        return schedule_free(AdamW.declare((0.0, 0.999)), beta)

    update = declare()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the rule, and its weights into their average."""
        if any(group["averaged"] for group in self.param_groups):
            raise AxesError("ScheduleFree: the parameters show their average: call optimizer.train() before a step")
        before, skipped = [group["weight_sum"] for group in self.param_groups], self._finite.skipped_here
        for group in self.param_groups:
            weight = _number(rate(group, "lr")) ** group["lr_power"]
            group["weight_sum"] = weight + _with_start(group["weight_sum"], weight)
            group["average"] = _share(weight, group["weight_sum"])
        taken = False
        try:
            loss = super().step(closure)
            taken = self._finite.skipped_here == skipped
        finally:  # a step that was not taken weighs nothing
            flag = next(iter(self._finite.flags.values()), None) if taken else None
            for group, total in zip(self.param_groups, before, strict=True):
                if not taken:
                    group["weight_sum"] = total
                elif flag is not None:
                    group["weight_sum"] = torch.where(flag.bool(), total, group["weight_sum"])
        return loss

    @torch.no_grad()
    def eval(self) -> None:
        """Show x: the average, the weights to use. State is untouched."""
        self._show_all(True, lambda x, z, beta: x)

    @torch.no_grad()
    def train(self) -> None:
        """Show y, where the next gradients are wanted."""
        self._show_all(False, lambda x, z, beta: beta * x + (1 - beta) * z)

    def _show_all(self, averaged: bool, point: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        for group in self.param_groups:
            if group["averaged"] == averaged:
                continue
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state and _NEWEST in state:
                    show(parameter, point(state[_AVERAGE], state[_NEWEST], group["beta"]))
            group["averaged"] = averaged


def _number(lr: Any) -> Any:
    return lr.reshape(()) if isinstance(lr, Tensor) else float(lr)


def _share(weight: Any, total: Any) -> Any:
    """weight / total, and a half of nothing: x and z are equal while no step had a size."""
    if isinstance(total, Tensor):
        return torch.where(total > 0, weight / total, 0.5)
    return weight / total if total > 0 else 0.5


def _with_start(total: Any, weight: Any) -> Any:
    """The start weighs as much as the first step; a rate of zero moves nothing and weighs nothing."""
    if isinstance(total, Tensor):
        return torch.where(total == 0, weight, total)
    return weight if total == 0.0 else total
