"""Entry-by-entry rules over all parameters of a group at once: the tuple's program, state in its own tensors.

What the interpreter does parameter by parameter is traced once (`axes.elementwise`) and run over lists of tensors. The
state dict is the interpreter's, name by name, so the two can take turns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.elementwise.batched import Schedule, blocks
from axes.elementwise.program import NotElementwise, Program, trace
from axes.optim import trees
from axes.optim.capabilities import elementwise, keyed, parts_of, vectors
from axes.state_update import StateUpdate

PARAMETER, GRADIENT = "parameter", "g"
_SHAPE = (3, 5)  # of the tensors that are traced: see axes.elementwise.program


@functools.lru_cache(maxsize=512)
def program(update: StateUpdate, maximize: bool = False) -> Program | None:
    """The program of one step on a parameter, or None if the tuple mixes entries or reads more than a gradient."""
    scalar = all(per.shape == "scalar" for per in update.demands())
    if keyed(update) or vectors(update) or not scalar or not elementwise(update):
        return None
    rates = tuple(per.name for per in update.demands())
    with torch.no_grad():
        datum = {GRADIENT: torch.ones(_SHAPE), **{name: torch.tensor(0.5) for name in rates}}
        flat = trees.flatten(update, update.init(datum, (torch.ones(_SHAPE),)))
        shaped = tuple(n for n, x in flat.items() if x.numel() > 1)
        numbers = tuple(n for n, x in flat.items() if x.numel() == 1 and not _counts(n))
        counts = {n: torch.ones_like(x) for n, x in flat.items() if _counts(n)}  # only the first datum is special

        def step(values: dict[str, Tensor]) -> Mapping[str, Tensor]:
            kept = {n: values[n].reshape(flat[n].shape) for n in (*shaped, *numbers)}
            state = trees.unflatten(update, {**kept, **counts}, values[PARAMETER])
            g = -values[GRADIENT] if maximize else values[GRADIENT]
            state, out = update.step(state, {GRADIENT: g, **{name: values[name] for name in rates}})
            after = trees.flatten(update, state)
            return {
                PARAMETER: out.weights[0],
                **{n: after[n] for n in shaped},
                **{n: after[n].reshape(()) for n in numbers},
            }

        try:
            return trace(step, (PARAMETER, GRADIENT, *shaped), (*numbers, *rates))
        except NotElementwise:
            return None


def first_is_special(update: StateUpdate) -> bool:
    """Whether the first datum is treated unlike the others, which the program is about."""
    return any(part.parts()[3].start == "first" for part in parts_of(update))


@functools.lru_cache(maxsize=512)
def schedule(update: StateUpdate, maximize: bool) -> Schedule:
    """The multi-tensor form of a program."""
    found = program(update, maximize)
    assert found is not None
    return Schedule(found, keep=(GRADIENT,))


@final
class Batch:
    """Parameters that step together: one dtype, one device, the same numbers in their states."""

    def __init__(self, update: StateUpdate, maximize: bool, parameters: list[Tensor], states: list[dict[str, Tensor]]):
        self.schedule = schedule(update, maximize)
        self.parameters, self.states = parameters, states
        names = self.schedule.names
        self.numbers = [n for n in self.schedule.program.outputs if n not in names]
        self.held = {n: float(states[0][n]) for n in self.numbers}
        self.counts = [s[n] for s in states for n in s if _counts(n)]
        self.own = [x for s in states for x in s.values()]
        # a parameter of 16 bits, or without one run of memory, is stepped as a float32 or contiguous copy
        self.inside = [p.dtype in (torch.float32, torch.float64) and p.is_contiguous() for p in map(_real, parameters)]
        self.cut = list(blocks([p.numel() for p in map(_real, parameters)], _block(parameters[0])))
        whole = all(self.inside)
        self.views = {
            n: self._blocks([s[n] for s in states]) if n not in (PARAMETER, GRADIENT) else None for n in names
        }
        if whole:
            self.views[PARAMETER] = self._blocks([_real(p).detach() for p in parameters])

    def matches(self, parameters: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Whether these are still the same parameters with the same state tensors."""
        if len(parameters) != len(self.parameters):
            return False
        if any(p is not q for p, q in zip(parameters, self.parameters, strict=True)):
            return False
        now = [x for p in parameters for x in state[p].values()]
        return len(now) == len(self.own) and all(a is b for a, b in zip(now, self.own, strict=True))

    def step(self, rates: Mapping[str, float]) -> None:
        """One datum for every parameter."""
        wide = torch.promote_types(_real(self.parameters[0]).dtype, torch.float32)
        gradients = [_real(p.grad).to(wide).contiguous() for p in self.parameters if p.grad is not None]
        lists = {**self.views, GRADIENT: self._blocks(gradients)}
        copies: list[Tensor] = []
        if lists.get(PARAMETER) is None:
            copies = [
                _real(p).detach().to(wide, memory_format=torch.contiguous_format, copy=True) for p in self.parameters
            ]
            lists[PARAMETER] = self._blocks(copies)
        values = self.schedule.program.numbers({**self.held, **rates})
        for group in zip(*(lists[n] for n in self.schedule.names), strict=True):
            self.schedule.run(group, values)
        for parameter, copy in zip(self.parameters, copies, strict=bool(copies)):
            _real(parameter).copy_(copy)
        torch._foreach_add_(self.counts, 1)
        for name in self.numbers:
            value = self.schedule.program.outputs[name]
            tensors = [s[name] for s in self.states]
            exact = values[value] if isinstance(value, int) else value
            self.held[name] = torch.tensor(exact, dtype=tensors[0].dtype).item()  # as a resumed run will read it
            torch._foreach_zero_(tensors)
            torch._foreach_add_(tensors, self.held[name])

    def _blocks(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        flat = [x.reshape(-1) for x in tensors]
        return [[flat[i] if b - a == flat[i].numel() else flat[i][a:b] for i, a, b in group] for group in self.cut]


def start(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """A first state whose tensors are its own: none shares memory with the parameter or another."""
    seen = {parameter.untyped_storage().data_ptr()}
    out = {}
    for name, x in state.items():
        place = x.untyped_storage().data_ptr()
        shared = place in seen or not x.is_contiguous()
        out[name] = x.clone(memory_format=torch.contiguous_format) if shared else x
        seen.add(place)
    return out


def _counts(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == trees.COUNT


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _block(like: Tensor) -> Any:
    """On a CPU what fits in cache, elsewhere everything in one call."""
    return 1 << 18 if like.device.type == "cpu" else 1 << 62
