"""What is prepared once for parameters that step together, and used while they are as they were."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from axes.optim.engine.forms import Today
State = dict[str, Tensor]


class Kept:
    """Parameters at their places, with the tensors of their states; the numbers of the tuple may move."""

    parameters: list[Tensor]
    today: Today | None = None

    def keep(self, parameters: list[Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
        """What `matches` compares with: when all that a preparation moves has been moved."""
        self.parameters = parameters
        self._places = list(map(Tensor.data_ptr, parameters))
        self._own = [x for state in states for x in state.values()]
        self._all: list[State] = []  # every state of the optimizer when these were last looked up
        self._theirs: list[State] = []  # those of these parameters

    def matches(self, parameters: Sequence[Tensor], state: Mapping[Tensor, State]) -> bool:
        """Whether these are still the same parameters, where they were, with the same state tensors."""
        if len(parameters) != len(self.parameters) or not all(map(operator.is_, parameters, self.parameters)):
            return False
        return self.stay(state)

    def stay(self, state: Mapping[Tensor, State]) -> bool:
        """Whether the parameters are where they were, with the same state tensors."""
        if list(map(Tensor.data_ptr, self.parameters)) != self._places:
            return False
        now = list(itertools.chain.from_iterable(map(dict.values, self._states(self.parameters, state))))
        return len(now) == len(self._own) and all(map(operator.is_, now, self._own))

    def _states(self, parameters: Sequence[Tensor], state: Mapping[Tensor, State]) -> list[State]:
        """The states of the parameters. While all of the optimizer are the same ones in the same order, so are these: a
        tensor's hash is a function of Python, and a thousand of them cost as much as SGD's arithmetic."""
        if len(state) == len(self._all) and all(map(operator.is_, state.values(), self._all)):
            return self._theirs
        self._theirs = [state[p] for p in parameters]
        few = len(state) <= 4 * len(parameters)  # else looking at all takes longer
        self._all = list(state.values()) if few else []
        return self._theirs

    def take(self, today: Today) -> None:
        """Other numbers in the tuple: those of programs are given to every step."""
        self.today = today


def number_on(device: torch.device, x: float | Tensor) -> Tensor:
    """A number in float64 on a device, without a copy from the host, which would wait."""
    if isinstance(x, Tensor):
        return x.to(device, torch.float64).reshape(())
    return torch.full((), x, dtype=torch.float64, device=device)
