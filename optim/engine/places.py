"""Where the parameters of an optimizer are among all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from torch import Tensor

from axes.optim.engine.layouts import Layout
from axes.optim.engine.options import Group
from axes.optim.engine.router import Router
from axes.optim.sharding.sharded import Shards


@final
class Places:
    """The parameters of an optimizer by their places: what messages call them, and which random bits are theirs."""

    def __init__(self, who: str, groups: list[Group], shards: Shards | None, router: Router) -> None:
        """who: what messages call the optimizer."""
        self.who, self._groups, self._shards, self._router = who, groups, shards, router

    def name(self, group: int, index: int) -> str:
        """What messages call a parameter."""
        names = self._groups[group].get("param_names")
        known = names[index] if names else self._router.names.get(self._groups[group]["params"][index])
        return f"parameter {index} of group {group}" if known is None else repr(known)

    def label(self, parameter: Tensor) -> str:
        """The name of a parameter, or of the one that it stands for."""
        parameter = self._own(parameter)
        for i, group in enumerate(self._groups):
            for j, p in enumerate(group["params"]):
                if p is parameter:
                    return self.name(i, j)
        return "a parameter"

    def layout(self, parameter: Tensor) -> Layout:
        """How a parameter, or the one that it stands for, is matrices to its rule."""
        return self._router.layout(self._own(parameter))

    def alike(self, parameter: Tensor) -> Iterator[tuple[int, ...]]:
        """What the rule of a parameter sees of each in its group that has its dtype and device, on all processes."""
        parameter = self._own(parameter)
        group = next(group for group in self._groups if any(p is parameter for p in group["params"]))
        for p in group["params"]:
            if p.numel() and (p.dtype, p.device) == (parameter.dtype, parameter.device):
                yield self._router.layout(p).shape(p)

    def stream(self, parameter: Tensor) -> int:
        """The random bits of a parameter are its own: its place among all."""
        parameter = self._own(parameter)
        places = (p is parameter for group in self._groups for p in group["params"])
        return next(i for i, here in enumerate(places) if here)

    def _own(self, parameter: Tensor) -> Tensor:
        return parameter if self._shards is None else self._shards.parameter(parameter)
