"""A module's parameters, looked at once a call."""

from __future__ import annotations

from torch import Tensor, nn


def some_parameter(module: nn.Module) -> Tensor | None:
    """One for all, None if there is none: the search of `parameters` costs as much as a launch."""
    modules = module._modules
    for m in (module, *modules.values()):
        for parameter in () if m is None else m._parameters.values():
            if parameter is not None:
                return parameter
    return next(module.parameters(), None) if modules else None
