"""Checkpoints of torch.optim's own optimizers, both ways.

    from_torch(torch.load("adamw.pt"), optimizer)      continue a run of torch.optim with an optimizer of this package
    to_torch(optimizer)                                what torch.optim's load_state_dict continues from

    torch.optim       here                        state there -> here (u = -g is what filters are driven by)
    AdamW, Adam       AdamW, Adam, AMSGrad        exp_avg -> -theta of the filter, exp_avg_sq -> theta of its statistic,
                                                  step -> counts and 1 - beta^step, the averages' responses to a unit
    RAdam, Adamax     RAdam, Adamax               the same
    NAdam             NAdam                       the same; mu_product -> 1 minus the response of the scheduled average
    RMSprop           RMSprop                     square_avg, grad_avg -> statistics, momentum_buffer -> -theta
    Adagrad, Adadelta Adagrad, Adadelta           sum, square_avg, acc_delta -> statistics
    ASGD              ASGD                        ax -> theta; eta and mu follow from step
    SGD               SGD (coupled decay)         momentum_buffer -> -theta
    Muon              Muon (Newton-Schulz)        momentum_buffer -> -theta; adjust_lr_fn -> scale

Others have no counterpart here that is the same rule, so they are refused. Hyperparameters come along with the state,
as in load_state_dict; how a step is computed (foreach, fused, capturable) stays with the optimizer. Nothing is dropped
or rounded without being asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.errors import AxesError, ShapeError
from axes.optim.engine import stored
from axes.optim.engine.base import Group, Optimizer
from axes.optim.engine.precision import DEFAULTS
from axes.optim.engine.trees import counts
from axes.optim.rules.adaptive import Adamax, AMSGrad, NAdam, RAdam
from axes.optim.rules.averaged import ASGD
from axes.optim.rules.first_order import SGD, Adam, AdamW
from axes.optim.rules.matrix import Muon
from axes.optim.rules.root_mean_square import Adadelta, Adagrad, RMSprop
from axes.optim.sharding.dtensors import as_matrix, from_matrix, spread
from axes.programs.program import PARAMETER

_WAYS = {"foreach", "fused", "capturable", "differentiable"}  # how torch computes a step
_YOUNG = {*_WAYS, "maximize", "decoupled_weight_decay"}  # keys that checkpoints of an older torch need not have
_OWN = {"rule", "lr_scale", "decoupled", "scale", "method", "precision", "form", *DEFAULTS}


class _Kind(NamedTuple):
    """One optimizer of torch.optim and the rule here that it is."""

    peer: Callable[..., torch.optim.Optimizer]
    state: Callable[[Group], Mapping[str, str]]  # tensors of a group there, and what they are here: "-" where the sign
    # changes, "1 -" and several names where it is one minus each
    shared: tuple[str, ...]  # keys of a group with the same meaning on both sides
    come: Callable[[Group], Group] = lambda group: {}  # the other keys here, of a group there
    go: Callable[[Group], Group] = lambda group: {}  # the other keys there, of a group here
    norms: Mapping[str, int] = {}  # responses to a unit, and which of the betas is their retention
    numbers: Mapping[str, Callable[[Group, int], float]] = {}  # there: what follows from the group and the steps
    steps: bool = True  # whether torch counts them
    begins: bool = False  # whether torch has its state before the first step


def _adam(group: Group) -> Group:
    return {"decoupled_weight_decay": group.get("decoupled_weight_decay", False)}


def _adamw(group: Group) -> Group:
    coupled = not group.get("decoupled_weight_decay", True)
    _refuse(coupled and group["weight_decay"] != 0, "its weight decay is that of Adam (coupled decay): take that rule")
    return {}


def _sgd_there(group: Group) -> Group:
    _refuse(group["decoupled"] and group["weight_decay"] != 0, "torch.optim.SGD has no decoupled weight decay")
    return {}


def _muon_here(group: Group) -> Group:
    scale = group["adjust_lr_fn"] or "original"
    return {"scale": scale, "method": "newton-schulz", "precision": "bfloat16"}


def _muon_there(group: Group) -> Group:
    scales = ("original", "match_rms_adamw")
    _refuse(group["scale"] not in scales, f"torch.optim.Muon has no scale {group['scale']!r}, only {scales}")
    _refuse(group["method"] != "newton-schulz", f"torch.optim.Muon has no method {group['method']!r}")
    _refuse(group["precision"] != "bfloat16", "torch.optim.Muon's products are in bfloat16 only")
    _refuse(bool(group["maximize"]), "torch.optim.Muon cannot maximize")
    return {"adjust_lr_fn": group["scale"]}


def _amsgrad_here(group: Group) -> Group:
    _refuse(not group["amsgrad"], "AMSGrad is torch.optim.Adam with amsgrad=True: take Adam")
    decoupled = group.get("decoupled_weight_decay", False)
    _refuse(decoupled and group["weight_decay"] != 0, "its weight decay is decoupled: take Adam")
    return {}


def _nadam_there(group: Group) -> Group:
    _refuse(group["momentum_decay"] is None, "torch.optim.NAdam has a momentum_decay: None is another rule")
    return {}


def _moments(group: Group) -> Mapping[str, str]:
    if not group.get("amsgrad", True):  # AMSGrad's own groups have no such key
        return {"exp_avg": "-via.0.theta", "exp_avg_sq": "via.0.stats.0.theta"}
    second = "via.0.stats.0.via"
    return {"exp_avg": "-via.0.theta", "exp_avg_sq": f"{second}.0.theta", "max_exp_avg_sq": f"{second}.1.theta"}


def _nadam(group: Group) -> Mapping[str, str]:
    ahead = "via.0.via.0"
    products = f"1 - {ahead}.0.stats.0.theta {ahead}.1.stats.0.via.0.theta"
    return {"mu_product": products, "exp_avg": f"-{ahead}.1.theta", "exp_avg_sq": "via.0.stats.0.theta"}


def _radam(group: Group) -> Mapping[str, str]:
    rectifies = 2.0 / (1.0 - group["betas"][1]) - 1.0 > 5.0
    return {"exp_avg": "-via.0.via.0.theta" if rectifies else "-via.0.theta", "exp_avg_sq": "via.0.stats.0.theta"}


def _rmsprop(group: Group) -> Mapping[str, str]:
    buffer = {"momentum_buffer": "-via.1.theta"} if group["momentum"] > 0 else {}
    mean = {"grad_avg": "-via.0.stats.1.theta"} if group["centered"] else {}
    return {"square_avg": "via.0.stats.0.theta", **buffer, **mean}


def _step_size(group: Group, step: int) -> float:
    return float(group["lr"] / (1.0 + group["lambd"] * group["lr"] * step) ** group["alpha"])


_BUFFER = {"momentum_buffer": "-via.0.theta"}
_ADAM = ("lr", "betas", "eps", "weight_decay", "maximize")
_NORMS = {"via.0.norm": 0, "via.0.stats.0.norm": 1, "via.0.stats.0.stats.0.theta": 1}
_KINDS: dict[Callable[..., Any], _Kind] = {
    AdamW.declare: _Kind(
        torch.optim.AdamW, _moments, (*_ADAM, "amsgrad"), _adamw, norms=_NORMS
    ),
    Adam.declare: _Kind(
        torch.optim.Adam,
        _moments,
        (*_ADAM, "amsgrad"),
        _adam,
        lambda group: {"decoupled_weight_decay": group["decoupled_weight_decay"]},
        norms=_NORMS,
    ),
    AMSGrad.declare: _Kind(
        torch.optim.Adam, _moments, _ADAM, _amsgrad_here, lambda group: {"amsgrad": True}, norms=_NORMS
    ),
    Adamax.declare: _Kind(
        torch.optim.Adamax,
        lambda group: {"exp_avg": "-via.0.theta", "exp_inf": "via.0.stats.0.theta"},
        _ADAM,
        norms=_NORMS,
    ),
    NAdam.declare: _Kind(
        torch.optim.NAdam,
        _nadam,
        (*_ADAM, "momentum_decay", "decoupled_weight_decay"),
        go=_nadam_there,
        norms=_NORMS,
    ),
    RAdam.declare: _Kind(
        torch.optim.RAdam,
        _radam,
        (*_ADAM, "decoupled_weight_decay"),
        norms={"via.0.norm": 0, "via.0.via.0.norm": 0},
    ),
    RMSprop.declare: _Kind(
        torch.optim.RMSprop,
        _rmsprop,
        ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    ),
    Adagrad.declare: _Kind(
        torch.optim.Adagrad,
        lambda group: {"sum": "via.0.stats.0.theta"},
        ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"),
        begins=True,
    ),
    Adadelta.declare: _Kind(
        torch.optim.Adadelta,
        lambda group: {"square_avg": "via.0.stats.0.theta", "acc_delta": "via.1.stats.0.theta"},
        ("lr", "rho", "eps", "weight_decay", "maximize"),
    ),
    ASGD.declare: _Kind(
        torch.optim.ASGD,
        lambda group: {"ax": "theta"},
        ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"),
        numbers={"eta": _step_size, "mu": lambda group, step: 1.0 / max(1.0, step - group["t0"])},
    ),
    SGD.declare: _Kind(
        torch.optim.SGD,
        lambda group: _BUFFER,
        ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        lambda group: {"decoupled": False},
        _sgd_there,
        steps=False,
    ),
    Muon.declare: _Kind(
        torch.optim.Muon,
        lambda group: _BUFFER,
        ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"),
        _muon_here,
        _muon_there,
        steps=False,
    ),
}


def _refuse(wrong: bool, reason: str) -> None:
    if wrong:
        raise AxesError(f"conversion: {reason}")


def _kind(optimizer: Optimizer, rule: str | None) -> tuple[str, _Kind]:
    """The rule that is converted, and its counterpart."""
    who, rules = type(optimizer).__name__, optimizer._rules
    used = [name for name in rules if any(g["rule"] == name for g in optimizer.param_groups)]
    if rule is None:
        if len(used) != 1:
            raise AxesError(f"{who} has groups of the rules {', '.join(map(repr, used))}: convert one by one, rule=")
        rule = used[0]
    if rule not in used:
        raise AxesError(f"{who} has no group of rule {rule!r}, only of {', '.join(map(repr, used))}")
    kind = _KINDS.get(rules[rule])
    if kind is None:
        peers = ", ".join(map(_name, _KINDS.values()))
        raise AxesError(f"{who}: rule {rule!r} is none of torch.optim's that can be converted: {peers}")
    for group in optimizer.param_groups:
        if group["rule"] == rule and "matrices" in group:
            own = next(text for text in group["matrices"] if text)
            raise AxesError(
                f"conversion: {who} takes a parameter as matrices {own!r}, and torch.optim.{_name(kind)} every one as "
                "one matrix as it stands: construct it with groups that name their rule, without the model"
            )
    return rule, kind


# ---- from torch ------------------------------------------------------------------------------------------------------


def from_torch(state_dict: Mapping[str, Any], optimizer: Optimizer, rule: str | None = None) -> None:
    """Continue a run of torch.optim: load a state_dict of one of its optimizers that the module lists.

    state_dict: as torch returned it; its groups and parameters are those of `optimizer`, in order. Parameters that it
    has no state of begin anew. optimizer: of the same rule and the same parameters. rule: which groups of an optimizer
    with several rules it is about ("muon" or "adamw"); the others stay as they are.

    Raises:
        AxesError: it is a checkpoint of another rule, of other parameters, or has what the rule here has not; the
            message says which key, and what was expected. Nothing was changed.
    """
    rule, kind = _kind(optimizer, rule)
    if not {"state", "param_groups"} <= set(state_dict):
        raise AxesError(f"conversion: a state_dict has 'state' and 'param_groups', got {sorted(state_dict)}")
    groups = [g for g in optimizer.param_groups if g["rule"] == rule]
    given = state_dict["param_groups"]
    if [len(g["params"]) for g in given] != [len(g["params"]) for g in groups]:
        raise AxesError(
            f"conversion: the checkpoint has groups of {[len(g['params']) for g in given]} parameters, and the groups "
            f"of rule {rule!r} have {[len(g['params']) for g in groups]}"
        )
    out = optimizer.state_dict()
    packed = [g for g in out["param_groups"] if g["rule"] == rule]
    for there, here, target in zip(given, groups, packed, strict=True):
        _same_names(there, here)
        new = _group_here(there, target, kind)
        update = optimizer.update_for({**new, "params": []})
        for index, place, parameter in zip(there["params"], target["params"], here["params"], strict=True):
            name = f"parameter {index}"
            held = {n: x for n, x in state_dict["state"].get(index, {}).items() if x is not None}
            expected = optimizer.expected_state(update, parameter)
            state = _state_here(held, expected, new, parameter, kind, name, update)
            out["state"].pop(place, None)
            if state is not None:
                out["state"][place] = state
        target.clear()
        target.update(new)
    unknown = sorted(set(state_dict["state"]) - {i for g in given for i in g["params"]}, key=str)
    if unknown:
        raise AxesError(f"conversion: the checkpoint has state of {unknown}, which are in none of its groups")
    optimizer.load_state_dict(out)


def _same_names(there: Group, here: Group) -> None:
    for a, b in zip(there.get("param_names", ()), here.get("param_names", ()), strict=False):
        if a != b:
            raise AxesError(f"conversion: the checkpoint has parameter {a!r} where the optimizer has {b!r}")


def _group_here(there: Group, target: Group, kind: _Kind) -> Group:
    """A group of the optimizer with the hyperparameters of one of torch."""
    wanted = sorted(set(_defaults(kind)) - _YOUNG)
    missing = [key for key in wanted if key not in there]
    if missing:
        raise AxesError(
            f"conversion: a group of torch.optim.{_name(kind)} has {', '.join(map(repr, wanted))}; this one has "
            f"no {', '.join(map(repr, missing))}: it is of another optimizer"
        )
    known = set(_defaults(kind)) | {"params", "param_names"}
    foreign = sorted((set(there) - known) & _keys_of_torch())
    if foreign:
        raise AxesError(
            f"conversion: the checkpoint has {', '.join(map(repr, foreign))}, which torch.optim.{_name(kind)} "
            "has not: it is of another optimizer"
        )
    complete = {**_defaults(kind), **there}
    new = {**target, **{key: complete[key] for key in kind.shared if key in complete}, **kind.come(complete)}
    new["lr_scale"] = 1.0  # the step size there is this group's own
    new |= {key: value for key, value in there.items() if key not in known}  # of schedulers and users
    return new


def _state_here(
    held: dict[str, Any],
    expected: Mapping[str, Tensor],
    group: Group,
    parameter: Tensor,
    kind: _Kind,
    name: str,
    update: StateUpdate,
) -> dict[str, Tensor] | None:
    """The state of a parameter, or None if it begins anew."""
    tensors = kind.state(group)
    allowed = {*tensors, *kind.numbers, *(["step"] if kind.steps else [])}
    unknown = sorted(set(held) - allowed)
    if unknown:
        raise AxesError(
            f"conversion: the state of {name} has {', '.join(map(repr, unknown))}; expected {sorted(allowed)}"
        )
    if not held:
        return None
    if group["moments"] is not None:
        raise AxesError("conversion: moments='8bit' would round the checkpoint: construct the optimizer without it")
    missing = sorted(allowed - set(held))
    if missing:
        raise AxesError(f"conversion: the state of {name} has no {', '.join(map(repr, missing))}")
    for key, names in tensors.items():
        shape = () if names.startswith("1 - ") else tuple(parameter.shape)
        if tuple(held[key].shape) != shape:
            raise ShapeError(
                f"conversion: {key!r} of {name} has shape {tuple(held[key].shape)}, the parameter has {shape}"
            )
    count = _whole_number(held["step"], name) if kind.steps else 1
    places = {ours: there for there, names in tensors.items() for ours in _ours(names)}
    out = {}
    for key, like in expected.items():
        if counts(key):
            out[key] = torch.tensor(count)
        elif key in places:
            there = places[key]
            one_minus, negated = tensors[there].startswith("1 - "), tensors[there].startswith("-")
            value = held[there].reshape(like.shape) if one_minus else as_matrix(held[there], parameter)
            if torch.promote_types(value.dtype, like.dtype) != like.dtype:
                raise AxesError(
                    f"conversion: {there!r} of {name} is {value.dtype} and would be rounded to {like.dtype}, which is "
                    f"what a {parameter.dtype} parameter has here"
                )
            value = value.to(like.dtype)
            out[key] = 1.0 - value if one_minus else value * -1 if negated else value * 1
        elif _weights_itself(update, key):
            out[key] = as_matrix(parameter.detach(), parameter).to(like.dtype, copy=True)
        elif key in kind.norms:
            beta = group["betas"][kind.norms[key]]
            out[key] = torch.full(like.shape, 1.0 - beta**count, dtype=like.dtype)
        else:
            raise AxesError(f"conversion: nothing in the checkpoint is {key!r} of {name}")
    if group["master"] is not None and parameter.dtype == torch.bfloat16:
        dtype = torch.int16 if group["master"] == "32bit" else torch.int8
        out[PARAMETER + stored.LOW] = torch.zeros_like(parameter.detach(), dtype=dtype)
    return out


def _ours(names: str) -> list[str]:
    """The names of ours that a tensor of torch is."""
    return names.removeprefix("1 - ").removeprefix("-").split()


def _weights_itself(update: StateUpdate, key: str) -> bool:
    """Whether a tensor of a state is the weights: of a filter that starts at them."""
    via = update.filters()
    return any(key == f"via.{i}.theta" and f.parts().step.start == "W0" for i, f in enumerate(via))


def _whole_number(step: Any, name: str) -> int:
    value = float(step)
    if value < 0 or value != int(value):
        raise AxesError(f"conversion: 'step' of {name} is {value}, not a count")
    return int(value)


# ---- to torch --------------------------------------------------------------------------------------------------------


def to_torch(optimizer: Optimizer, rule: str | None = None, rounded: bool = False) -> dict[str, Any]:
    """What the load_state_dict of the optimizer of torch.optim continues from that is the same rule.

    rule: which groups of an optimizer with several rules ("muon" or "adamw"); their parameters are numbered from 0.
    rounded: torch.optim keeps state in the dtype of the parameters and rounds what it loads; True agrees to that for
    16-bit parameters, whose state here is float32.

    Raises:
        AxesError: the rule, or a setting of it, is not one of torch.optim.
    """
    rule, kind = _kind(optimizer, rule)
    saved = optimizer.state_dict()
    out: dict[str, Any] = {"state": {}, "param_groups": []}
    for packed, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        if group["rule"] != rule:
            continue
        first = sum(len(g["params"]) for g in out["param_groups"])
        new = {**_defaults(kind), **{key: group[key] for key in kind.shared}, **kind.go(group)}
        new |= {k: v for k, v in group.items() if k not in {*new, *_OWN, *_WAYS, "params", "maximize"}}
        if group["lr_scale"] != 1.0:
            new |= {key: group[key] * group["lr_scale"] for key in ("lr", "initial_lr") if key in group}
        out["param_groups"].append({**new, "params": list(range(first, first + len(group["params"])))})
        for index, place, parameter in zip(
            out["param_groups"][-1]["params"], packed["params"], group["params"], strict=True
        ):
            held = saved["state"].get(place)
            if held:
                state = _state_there(held, parameter, kind, group, rounded, f"parameter {index}")
                if state:
                    out["state"][index] = state
    return out


def _state_there(
    held: dict[str, Tensor], parameter: Tensor, kind: _Kind, group: Group, rounded: bool, name: str
) -> dict[str, Tensor]:
    count = int(held["count"])
    if count == 0 and not kind.begins:  # nothing has happened yet
        return {}
    if not rounded and parameter.dtype in (torch.bfloat16, torch.float16):
        raise AxesError(
            f"conversion: {name} is {parameter.dtype} and its state float32, which torch.optim rounds to the "
            "parameter's dtype when it loads: rounded=True agrees to that"
        )
    if any(x.dtype in (torch.int8, torch.uint8) for n, x in held.items() if spread(x)):
        raise AxesError(f"conversion: {name} is sharded and its state has 8 bits, which torch.optim does not have")
    if PARAMETER + stored.LOW in held and not rounded:
        raise AxesError(f"conversion: torch.optim does not have the further bits of {name}: rounded=True drops them")
    opened = stored.opened(held)
    out: dict[str, Tensor] = {}
    if kind.steps:
        out["step"] = torch.tensor(float(count))
    for there, number in kind.numbers.items():
        out[there] = torch.tensor(number({**group, "lr": group["lr"] * group["lr_scale"]}, count))
    for there, names in kind.state(group).items():
        value = opened.get(_ours(names)[0])
        if names.startswith("1 - "):
            out[there] = torch.zeros(()) if value is None else 1.0 - value.reshape(())
        elif value is None:  # a filter without memory: torch keeps the last gradient, and never reads it
            if there == "momentum_buffer":
                continue
            out[there] = torch.zeros_like(parameter.detach())
        else:
            out[there] = from_matrix(-value if names[0] == "-" else value.clone(), parameter)
    return out


def _name(kind: _Kind) -> str:
    return str(getattr(kind.peer, "__name__", kind.peer))


def _defaults(kind: _Kind) -> Group:
    """Every key of a group of a torch optimizer, with its default."""
    group = dict(kind.peer([torch.zeros(1, 1, requires_grad=True)]).param_groups[0])
    del group["params"]
    return group


@functools.cache
def _keys_of_torch() -> frozenset[str]:
    """Keys that tell torch's optimizers apart."""
    found: set[str] = set()
    for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon, torch.optim.NAdam, torch.optim.RMSprop,
                torch.optim.Adagrad, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Rprop,
                torch.optim.ASGD, torch.optim.Adafactor):  # fmt: skip
        found |= set(cls([torch.zeros(1, 1, requires_grad=True)]).param_groups[0])
    return frozenset(found - {"params"})


__all__ = ["from_torch", "to_torch"]
