"""Parameter groups: which parameters are meant, and the rates that a step reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from axes.core.state_update import StateUpdate
from axes.errors import AxesError, ShapeError, WrongType, wrong_type
from axes.optim.engine.capabilities import vectors
from axes.optim.engine.forms import Today
from axes.optim.engine.options import Group, how, plain
from axes.optim.engine.router import Named, Router
from axes.optim.engine.together import uncompiled


def require_params(who: str, params: object) -> None:
    """WrongType unless these may be parameters: a module, or several of what `named` takes one by one."""
    if isinstance(params, str) or not isinstance(params, nn.Module | Iterable):
        raise wrong_type(who, "params", "a module, or an iterable of tensors, of (name, tensor) or of groups", params)


def named(who: str, params: Any, router: Router) -> Named:
    """(name or None, parameter) for whatever was given, every parameter once. router: meets a module."""
    if params is None:
        raise AxesError(f"{who}: a parameter group needs 'params'")
    if isinstance(params, nn.Module):
        router.meet(params)
        params = params.named_parameters()
    elif isinstance(params, Tensor):
        params = [params]
    elif isinstance(params, set):
        raise WrongType(f"{who}: params need to be organized in ordered collections, not sets: give a list")
    seen: dict[Tensor, str | None] = {}
    for entry in params:
        if isinstance(entry, tuple) and len(entry) != 2:
            raise ShapeError(f"{who}: a tuple in params is (name, tensor), got one of {len(entry)}")
        name, parameter = entry if isinstance(entry, tuple) else (None, entry)
        if not isinstance(parameter, Tensor):
            got = type(parameter).__name__
            raise WrongType(f"{who} can only optimize tensors, got {got} in params: give a module or its parameters()")
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise AxesError(
                f"{who}: parameter {name or len(seen)} of params has dtype {parameter.dtype}; only "
                "floating-point and complex parameters can be optimized"
            )
        seen.setdefault(parameter, name)
    return [(name, parameter) for parameter, name in seen.items()]


def by_sides(who: str, members: Named, limit: int, router: Router) -> dict[str, Named]:
    """Matrices by the sides that are at most `limit` long: both, rows (there are so many of them), columns, neither."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise AxesError(f"{who}: max_side must be an integer >= 1, or None for no limit, got {limit!r}")
    names = {(True, True): "both", (True, False): "rows", (False, True): "columns", (False, False): "neither"}
    found: dict[str, Named] = {name: [] for name in names.values()}
    for name, parameter in members:
        rows, columns = router.layout(parameter).shape(parameter)[-2:]
        found[names[rows <= limit, columns <= limit]].append((name, parameter))
    return {name: some for name, some in found.items() if some}


def both_too_long(who: str, rule: str, members: Named, limit: int, router: Router) -> AxesError:
    """What to say of matrices that a group gives to a rule for which both of their sides are too long."""
    name, parameter = members[0]
    rows, columns = router.layout(parameter).shape(parameter)[-2:]
    return AxesError(
        f"{who}: {name or 'a parameter'}, a matrix of {rows} x {columns}, is longer than max_side={limit} in both "
        f"sides, and rule {rule!r} would have no statistic of it: give it to a group of another rule, or set max_side "
        "(None: no limit)"
    )


def rates(group: Group, update: StateUpdate, like: Tensor) -> dict[str, Tensor | float]:
    """The named rates of a tuple, from the group: numbers, or tensors in the dtype of the arithmetic."""
    signal = {per.name: beside(rate(group, per.name), like) for per in update.demands()}
    return signal | {name: beside(plain(group[name]), like) for name in vectors(update)}


@uncompiled()
def rates_of(group: Group, asked: Iterable[str], today: Today) -> dict[str, Any]:
    """The numbers of a step: rates by their names, and what programs read of the hyperparameters."""
    found: dict[str, Any] = dict(today.numbers)
    for name in asked:
        value = group[name]
        found[name] = value if type(value) is float and name != "lr" else rate(group, name)
    return found


@uncompiled()
def rate(group: Group, name: str) -> Any:
    """The value of a named rate. A tensor of one element on the host is a number as any other: the same arithmetic."""
    value = group[name]
    if type(value) is not float:
        value = plain(value)
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_cpu and how(group) == "host":
        value = value.item()
    return value * group["lr_scale"] if name == "lr" and group["lr_scale"] != 1.0 else value


def beside(value: Tensor | float, like: Tensor) -> Tensor | float:
    """A rate as it meets tensors like this one."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(like.dtype)
    return value.reshape(()) if value.numel() == 1 else value.to(like.device)
