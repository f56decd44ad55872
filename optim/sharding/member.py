"""One parameter that is spread over processes, and what stands for it in a step."""

from __future__ import annotations

import math
from typing import Any, Protocol, final

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine.forms import Today
from axes.optim.engine.layouts import Layout
from axes.optim.engine.options import Group
from axes.optim.engine.routing import canonical_shape
from axes.optim.sharding.dtensors import (
    local_shard,
    matrix_placements,
    own_region,
    row_placements,
    spread,
    whole,
    wrapped,
)
from axes.optim.sharding.exchange import Exchange, Part
from axes.programs.storage import LOW, QUANTUM, UNIT


class Placed(Protocol):
    """Where parameters are among all."""

    def layout(self, parameter: Tensor) -> Layout: ...


class Owner(Protocol):
    """What of an optimizer is used here."""

    state: Any
    param_groups: list[Group]
    _fresh: set[Tensor]

    @property
    def _places(self) -> Placed: ...

    def form_for(self, group: Group) -> StateUpdate: ...
    def _today(self, group: Group) -> Today: ...
    def expected_state(self, update: StateUpdate, parameter: Tensor) -> dict[str, Tensor]: ...
    def _begin(self, group: Group, update: StateUpdate, parameter: Tensor) -> None: ...
    def _label(self, parameter: Tensor) -> str: ...


@final
class Member:
    """A parameter, its stand-in, and the stand-in's state."""

    def __init__(self, parameter: Any, update: StateUpdate, local: bool, entries: frozenset[str]) -> None:
        self.parameter, self.update, self.local = parameter, update, local
        self.entries = entries  # names of state with an entry for every entry of the parameter
        self.mesh = parameter.device_mesh
        self.shape = canonical_shape(parameter)
        self.placements = matrix_placements(parameter)
        self.shard = local_shard(parameter).detach()
        self.stand_in = self.shard if local else self.shard.new_empty(0)
        self.state: dict[str, Tensor] = {}  # of the stand-in
        self.shown: dict[str, Tensor] = {}  # the same as the optimizer shows it
        self._seen: dict[str, Tensor] = {}  # what of it was shown
        self.part: Part | None = None
        self.exchange: Exchange | None = None

    @property
    def owned(self) -> bool:
        return self.part is not None and self.exchange is not None and self.part.owner == self.exchange.rank

    def stand(self, memory: Tensor) -> None:
        """Let the stand-in be this memory; it stays the same tensor, by which others know it, if it was one like it."""
        if self.stand_in.dtype == memory.dtype and self.stand_in.shape == memory.shape:
            self.stand_in.data = memory
        else:
            self.stand_in = memory

    def stand_by(self, dtype: torch.dtype) -> None:
        """The same, in memory of its own. It stays where it is: kernels note its address."""
        assert self.part is not None
        if self.stand_in.dtype != dtype or tuple(self.stand_in.shape) != self.part.shape:
            self.stand(torch.empty(self.part.shape, dtype=dtype, device=self.shard.device))

    def current(self) -> bool:
        """Whether the parameter still has the memory that was looked at."""
        now = local_shard(self.parameter)
        return now.data_ptr() == self.shard.data_ptr() and now.shape == self.shard.shape

    def show(self) -> dict[str, Tensor]:
        """The state as DTensors where it is one of shards."""
        if not self.local:
            return self.state
        assert self.placements is not None
        for name, x in self.state.items():
            if self._seen.get(name) is not x:
                layout = self._layout(name)
                self.shown[name] = x if layout is None else wrapped(x, self.mesh, *layout)
                self._seen[name] = x
        return self.shown

    def _layout(self, name: str) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
        """Placements and shape of a state of shards; None for a number, which is the same everywhere."""
        assert self.placements is not None
        if name in self.entries:
            return self.placements, self.shape
        if name.endswith(LOW):
            return tuple(self.parameter.placements), tuple(self.parameter.shape)
        if name.endswith(UNIT):
            return row_placements(self.parameter), (math.prod(self.shape) // QUANTUM,)
        return None

    @property
    def blocks_fit(self) -> bool:
        """Whether blocks of entries of the shards are blocks of the whole."""
        assert self.placements is not None
        shards = math.prod(n for n, p in zip(self.mesh.shape, self.placements, strict=True) if not p.is_replicate())
        by_rows = self.placements == row_placements(self.parameter)
        even = self.shape[0] % shards == 0 and math.prod(self.shape) % (shards * QUANTUM) == 0
        return shards == 1 or by_rows and even

    def own(self, name: str, x: Any) -> Tensor:
        """What the optimizer shows of a loaded tensor: a DTensor of the parameter's placements, or a number."""
        layout = self._layout(name)
        if layout is None:
            return whole(x)
        placements, shape = layout
        if spread(x) and x.device_mesh == self.mesh and tuple(x.placements) == placements:
            return x
        return wrapped(own_region(shape, self.mesh, placements).of(whole(x)).clone(), self.mesh, placements, shape)

    def hide(self, shown: dict[str, Tensor]) -> None:
        """Take over a state that was put into the optimizer."""
        self.shown = shown
        self.state = {name: local_shard(x) for name, x in shown.items()} if self.local else shown
        self._seen = dict(self.state)
