"""Rules that act entry by entry: one program over the tensors of all parameters, where they are and as they are kept.

A generated kernel where those run, else torch's multi-tensor operations (`lists`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine import stored, trees
from axes.optim.engine.generated import GRADIENT, How
from axes.optim.engine.gradients import Gradients
from axes.optim.engine.lists import Lists
from axes.optim.engine.routing import real
from axes.optim.engine.together import Numbers, copied, fits_kernels, schedule, schedule_without, uncompiled
from axes.programs.batched import Schedule
from axes.programs.program import PARAMETER
from axes.programs.storage import FORMS, LOW, UNIT


@final
class Entries:
    """Parameters of one dtype and device, with their states, and a program of one step on every entry."""

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        how: How,
        counted_on_host: bool,
        streams: Sequence[int] | None,
        seed: int,
    ) -> None:
        """how: "fused" is one kernel, which computes the numbers of a step as well. streams: of random bits, if
        parameters are rounded at random."""
        self.schedule = schedule(update, maximize)
        self.reduced = functools.partial(schedule_without, update, maximize)
        self.parameters, self.states, self.how, self.hosted = parameters, states, how, counted_on_host
        self.streams, self.seed = streams, seed
        self.numbers = Numbers(self.schedule.program, states, how)
        self.forms = stored.forms_of(states[0])
        self.coded = {n: f for n, f in self.forms.items() if n != PARAMETER}
        self.shown = [real(p).detach() for p in parameters]
        self.wide = torch.promote_types(self.shown[0].dtype, torch.float32)
        if how == "fused":
            self.kernel = self._kernel()
            return
        # a parameter of 16 bits, or without one run of memory, is stepped as a float32 or contiguous copy
        self.whole = all(p.is_contiguous() for p in parameters) and {x.dtype for x in self.shown} == {self.wide}
        tensors = {PARAMETER: self.shown} if self.whole else {}
        names = [n for n in self.schedule.names if n not in (PARAMETER, GRADIENT, *self.coded)]
        joins = self.whole and not self.coded
        self.lists = Lists(self.schedule, self.shown, tensors, states, names, joins, alike=True)

    @uncompiled(recursive=False)
    def step(
        self,
        rates: Mapping[str, float | Tensor],
        found: Tensor | None,
        scale: Tensor | None,
        gradients: Gradients | None = None,
    ) -> None:
        """One datum for every parameter. found, scale: of a gradient scaler, for a kernel. gradients: what the
        parameters have, where somebody has looked at them."""
        if self.how == "fused":
            self._launch(rates, found, scale)
        elif self.how == "device":
            self._run(self.schedule, rates, gradients)
        else:
            self._on_host({n: float(x) for n, x in rates.items()}, gradients)

    @uncompiled()
    def _on_host(self, rates: Mapping[str, float], gradients: Gradients | None) -> None:
        self._run(self.scheduled(rates), rates, gradients)

    def scheduled(self, rates: Mapping[str, float]) -> Schedule:
        """What is executed where these are the numbers of a step."""
        zero = frozenset(n for n, x in rates.items() if x == 0.0)
        return self.reduced(zero) if zero else self.schedule

    def _run(self, schedule: Schedule, rates: Mapping[str, float | Tensor], gradients: Gradients | None) -> None:
        values = self.numbers.of(schedule.program, self.numbers.given(rates))
        self._step(schedule, values, gradients)
        self.numbers.take(schedule.program, values)

    def _step(self, schedule: Schedule, values: Sequence[float | Tensor], given: Gradients | None) -> None:
        """The program over all blocks, given its numbers."""
        gradients = Gradients(p.grad for p in self.parameters) if given is None else given  # type: ignore[misc]
        if gradients.dtypes != {self.wide}:
            gradients = Gradients(real(g).to(self.wide) for g in gradients)
        copies: list[Tensor] = []
        if not self.whole:
            copies = [self._copy(p, s) for p, s in zip(self.parameters, self.states, strict=True)]
        decoded = {n: [stored.opened(s)[n].contiguous() for s in self.states] for n in self.coded}
        self.lists.run(gradients, values, schedule, {**decoded, PARAMETER: copies} if copies else decoded)
        self.numbers.counts.add_(1)
        for i, copy in enumerate(copies):
            parameter, state = self.parameters[i], self.states[i]
            random = None if self.streams is None else (state[trees.COUNT], self.streams[i], self.seed)
            stored.write(real(parameter), copy, state, random)
        for name, tensors in decoded.items():
            for state, x in zip(self.states, tensors, strict=True):
                code, unit = FORMS[self.coded[name]].encode(x.reshape(-1), None)
                state[name].copy_(code.view(x.shape))
                state[name + UNIT].copy_(unit)

    def _copy(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        if PARAMETER in self.forms:
            return stored.weights(parameter, state)
        return copied(real(parameter), self.wide)

    # ---- one kernel ----------------------------------------------------------------------------------------------

    def _kernel(self) -> Any:
        from axes.programs.fused import Fused, columns  # triton is imported on first use

        program = self.schedule.program
        own = [n + suffix for n, suffix in columns(program, self.forms) if n not in (PARAMETER, GRADIENT)]
        tensors = {n: [s[n] for s in self.states] for n in own}
        if PARAMETER in self.forms:
            tensors[PARAMETER + LOW] = [s[PARAMETER + LOW] for s in self.states]
        shown = self.shown
        tensors[PARAMETER] = [x if fits_kernels(x) else copied(x, x.dtype) for x in shown]
        pairs = [(x, y) for x, y in zip(shown, tensors[PARAMETER], strict=True) if x is not y]
        self.shown, self.inside = [x for x, _ in pairs], [y for _, y in pairs]  # what is stepped as a copy
        counts = self.numbers.counts.view(-1)
        counts = counts.to(shown[0].device, copy=True) if self.hosted else counts
        return Fused(program, tensors, self.forms, self.numbers.copies, counts, self.streams, self.seed)

    @uncompiled()
    def _launch(self, rates: Mapping[str, float | Tensor], found: Tensor | None, scale: Tensor | None) -> None:
        gradients = [real(g) for p in self.parameters if (g := p.grad) is not None]
        if any(g.dtype != gradients[0].dtype for g in gradients):
            gradients = [g.to(self.wide) for g in gradients]
        gradients = [g if fits_kernels(g) else copied(g, g.dtype) for g in gradients]
        if self.inside:
            torch._foreach_copy_(self.inside, self.shown)
        numbers = {n: float(x) if isinstance(x, Tensor) and x.device.type == "cpu" else x for n, x in rates.items()}
        self.kernel.step(gradients, numbers, found, scale)
        if self.inside:
            torch._foreach_copy_(self.shown, self.inside)
        if self.hosted:
            self.numbers.counts.add_(1)


__all__ = ["Entries"]
