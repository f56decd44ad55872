"""Parameters of one shape as one batch of the interpreter, their states kept as the batch from step to step.

What has no program, or is none around products, is executed as it is written: on all parameters of a shape at once, so
that a step costs one execution a shape and not one a parameter. States are the interpreter's, name by name: views of
the batch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine import trees
from axes.optim.engine.capabilities import needs_layers, vectors
from axes.optim.engine.forms import Group, Today
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.groups import beside
from axes.optim.engine.layouts import Layout
from axes.optim.engine.options import how
from axes.optim.engine.precision import Precision
from axes.optim.engine.states import canonical
from axes.optim.engine.together import unchanged


def fits(update: StateUpdate, group: Group) -> bool:
    """Whether a group's tuple reads nothing but a gradient and numbers, and its state is what the tuple leaves."""
    plain = group["foreach"] and how(group) == "host" and Precision.of(group).plain
    return plain and not needs_layers(update) and not vectors(update)


@final
class OneShape:
    """Parameters of one shape, layout, dtype and device that have seen equally many data."""

    how = "host"

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        layouts: list[Layout],
    ) -> None:
        """states: flat, with tensors of their own; they are replaced by views of stacks."""
        self.form, self.maximize, self.parameters, self.layout = update, maximize, parameters, layouts[0]
        self.today: Today | None = None
        self.update = update
        self.rates = tuple(per.name for per in update.demands())
        self.kept: dict[str, Tensor] = {}
        for name in [n for n in states[0] if not trees.counts(n)]:
            self.kept[name] = trees.stacked([s[name] for s in states])
            for s, x in zip(states, self.kept[name].unbind(), strict=True):
                s[name] = x
        self.counts = [x for s in states for n, x in s.items() if trees.counts(n)]
        self.seen = {n: x for n, x in states[0].items() if trees.counts(n)}
        self.shown = [self.layout.seen(p.detach()) for p in parameters]
        self.own = [x for s in states for x in s.values()]
        self.places = list(map(Tensor.data_ptr, parameters))

    def take(self, today: Today) -> None:
        """Other numbers in the tuple."""
        self.today, self.update = today, today.of(self.form)

    def matches(self, parameters: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Whether these are still the same parameters, where they were, with the same state tensors."""
        return unchanged(self.parameters, self.places, self.own, parameters, state)

    def step(
        self, rates: Mapping[str, float | Tensor], found: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """One datum for every parameter; found and scale are of fused steps, which these are not."""
        g = trees.stacked([canonical(p.grad, self.layout) for p in self.parameters if p.grad is not None])
        weights = trees.stacked([canonical(x, self.layout) for x in self.parameters])
        given = {name: beside(rates[name], g) for name in self.rates}
        state = trees.unflatten(self.update, {**self.kept, **self.seen}, weights)
        state, out = self.update.step(state, {GRADIENT: -g if self.maximize else g, **given})
        after = trees.flatten(self.update, state)
        if self.kept:
            torch._foreach_copy_(list(self.kept.values()), [after[n] for n in self.kept])
        torch._foreach_add_(self.counts, 1)
        torch._foreach_copy_(self.shown, [w.reshape(x.shape) for w, x in zip(out.weights[0], self.shown, strict=True)])


__all__ = ["OneShape", "fits"]
