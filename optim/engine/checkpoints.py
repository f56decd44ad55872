"""Loading an optimizer's state: checked before anything changes, and never cast to the parameter's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from axes.errors import AxesError, wrong_type
from axes.optim.engine import trees
from axes.optim.engine.precision import DEFAULTS
from axes.optim.sharding.dtensors import spread, whole
from axes.programs.storage import LOW, UNIT


class Kept:
    """Tensors that torch's loader passes on as they are, instead of casting them to the parameter's dtype."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def beside(self, parameter: Tensor) -> dict[str, Tensor]:
        """Copies where the parameter is, counts on the host; put together unless the parameter is sharded itself."""
        tensors = self.tensors if spread(parameter) else {name: whole(x) for name, x in self.tensors.items()}
        return {name: x.to("cpu" if trees.counts(name) else parameter.device, copy=True) for name, x in tensors.items()}


# Options that rules did not always have, at the value that means what they did without: a saved group that lacks one of
# them is older than it. Anything else that is missing is refused, and so are missing tensors of a state.
_YOUNG: Mapping[str, Any] = {
    **DEFAULTS,
    "lr_scale": 1.0,
    "amsgrad": False,
    "momentum_decay": None,
    "decoupled_weight_decay": True,
    "max_norm": None,
    "max_side": None,
    "sides": "both",
}


def require_saved(who: str, state_dict: object) -> None:
    """AxesError unless this has the form of an optimizer's state dict, whatever it holds."""
    if not isinstance(state_dict, Mapping):
        raise wrong_type(who, "state_dict", "a dict, as state_dict() returned it", state_dict)
    if not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict))
        raise AxesError(f"{who}: an optimizer's state has 'state' and 'param_groups', and this state_dict {got}")
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        raise wrong_type(who, "state_dict['state']", "a dict of dicts", state)
    for index, kept in state.items():
        if not isinstance(kept, Mapping):
            raise wrong_type(who, f"the state of parameter {index}", "a dict of tensors", kept)
    if not isinstance(groups, list | tuple):
        raise wrong_type(who, "state_dict['param_groups']", "a list of dicts", groups)
    for group in groups:
        if not isinstance(group, Mapping):
            raise wrong_type(who, "every group of state_dict['param_groups']", "a dict", group)


def wrap_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check a state against the optimizer and protect its tensors."""
    who = type(optimizer).__name__
    require_saved(who, state_dict)
    state = dict(state_dict["state"])
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    if len(saved_groups) == len(groups):  # torch explains it otherwise
        saved_groups = [{**_before(saved, group), **saved} for saved, group in zip(saved_groups, groups, strict=True)]
        for saved, group in zip(saved_groups, groups, strict=True):
            if saved.get("rule") != group["rule"]:
                raise AxesError(
                    f"{who}: the saved group has rule {saved.get('rule')!r} where this optimizer has {group['rule']!r}"
                )
            missing = sorted(set(group) - set(saved) - {"param_names", "matrices"})
            if missing:
                raise AxesError(f"{who}: the saved group has no {', '.join(missing)}: it is of another optimizer")
            if _layouts(saved) != _layouts(group):
                raise AxesError(_other_matrices(who, saved, group))
            update = optimizer.update_for({**saved, "params": []})
            for index, parameter in zip(saved["params"], group["params"], strict=False):
                if state.get(index):
                    _require_fit(who, index, state[index], optimizer.expected_state(update, parameter, saved))
    kept_apart = {index: Kept(dict(kept)) for index, kept in state.items()}
    return {**state_dict, "state": kept_apart, "param_groups": saved_groups}


def _before(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a saved group that rules did not have when it was saved, as they were then."""
    return {key: value for key, value in _YOUNG.items() if key in group and key not in saved}


def _layouts(group: Mapping[str, Any]) -> list[str]:
    """How the parameters of a group are matrices; where it does not say so, (out, in)."""
    return list(group.get("matrices") or [""] * len(group["params"]))


def _other_matrices(who: str, saved: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """What to say of parameters that were other matrices when they were saved."""
    then, now = _layouts(saved), _layouts(group)
    i = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), 0)
    name = repr(group["param_names"][i]) if "param_names" in group else f"parameter {i} of its group"
    before, after = (repr(x[i] or "out ...") if i < len(x) else "nothing" for x in (then, now))
    return (
        f"{who}: {name} is matrices {after} to this optimizer, and was {before} when it was saved: construct it as "
        "then (from the model or from names, with the same rules=, matrices= and qkv=)"
    )


def _require_fit(who: str, index: int, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = sorted(set(expected) - set(saved))
    if missing:
        raise AxesError(f"{who}: the saved state of parameter {index} is of another rule: no {', '.join(missing)}")
    forms = sorted(n for n in saved if n.endswith((LOW, UNIT)) and n not in expected)
    if forms:
        raise AxesError(
            f"{who}: the saved state of parameter {index} has {', '.join(forms)}, which its group's master and moments "
            "do not ask for"
        )
    for name, value in expected.items():
        if not isinstance(saved[name], Tensor):
            raise wrong_type(who, f"the saved {name!r} of parameter {index}", "a tensor", saved[name])
        if tuple(saved[name].shape) != tuple(value.shape):
            raise AxesError(
                f"{who}: the saved {name!r} of parameter {index} has shape {tuple(saved[name].shape)}, this parameter "
                f"needs {tuple(value.shape)}"
            )
        if saved[name].dtype != value.dtype and not (saved[name].is_floating_point() and value.is_floating_point()):
            raise AxesError(
                f"{who}: the saved {name!r} of parameter {index} has dtype {saved[name].dtype}, this group needs "
                f"{value.dtype}"
            )
