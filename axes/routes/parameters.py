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


def are_plain(module: nn.Module) -> bool:
    """Whether all of them are here, and not in parts on several devices."""
    own = all(p is None or type(p) in (nn.Parameter, Tensor) for p in module._parameters.values())
    return own and all(m is None or are_plain(m) for m in module._modules.values())
