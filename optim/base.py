"""The adapter of the data axis: a `StateUpdate` executed once per training step on every parameter.

The signal of a step is the gradient g, and every rate that the tuple names: `Per("lr")` and `Per("weight_decay")` are
keys of the parameter group, so schedulers drive them. Everything else about a rule is in its tuple, which is built
from the group's hyperparameters by a pure function. A parameter is a matrix to its rule (see `routing`); state and
arithmetic are float32 for 16-bit parameters, which are rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from axes.errors import AxesError, NotFiniteError, ShapeError, UnknownName
from axes.geometry import Context
from axes.optim import stored, trees
from axes.optim.capabilities import (
    elementwise,
    holds,
    keyed,
    moves_before_closure,
    needs_examples,
    needs_layers,
    require_parameter,
    vectors,
)
from axes.optim.checkpoints import Kept, wrap_state
from axes.optim.dtensors import local_shard, spread, whole
from axes.optim.layers import Examples, Layers, Products, Reduction, Rows
from axes.optim.precision import DEFAULTS, Master, Moments, Precision, Rounding
from axes.optim.routing import Report, Roles, Row, bytes_of, canonical_shape, named_role, roles
from axes.optim.sharded import Shards
from axes.optim.stacked import Stacks, cut
from axes.optim.together import Batch, How, first_is_special, program, start, uncompiled, unfusable
from axes.rates import resolve
from axes.state_update import Output, State, StateUpdate

Group = dict[str, Any]
Rule = Callable[..., StateUpdate]
Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]


class Options(TypedDict, total=False):
    """Keywords that every optimizer takes.

    maximize: ascend.
    foreach: None or True batches parameters, False interprets the tuple parameter by parameter.
    fused: True steps a rule that acts entry by entry as one generated kernel over all parameters, on CUDA devices.
        A key of every group, like the next four: a group of another rule can have it for itself.
    capturable: nothing in a step waits for the device, so that a CUDA graph can hold it; a learning rate that changes
        is then a tensor on the device.
    master, moments, rounding, seed: how 16-bit parameters and states are stored, see `axes.optim.precision`.
    check_finite: look at all gradients before anything changes: "raise" or True, "skip" to leave everything as it is
        and count the step in `skipped`, or False. Left out it is "raise", and False with fused or capturable: it reads
        every gradient once more, and "raise" waits for the device.
    model: where the parameters live, if `params` is not the model itself.
    differentiable: refused unless False.
    """

    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    master: Master | None
    moments: Moments | None
    rounding: Rounding
    seed: int
    check_finite: bool | Literal["raise", "skip"] | None
    model: nn.Module | None
    differentiable: bool


@functools.lru_cache(maxsize=512)
def _build(rule: Rule, values: tuple[tuple[str, Any], ...]) -> StateUpdate:
    update = rule(**dict(values)).normal()
    require_parameter(update)
    return update


@functools.cache
def _hyperparameters(rule: Rule) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


class Optimizer(torch.optim.Optimizer):
    """Base of all optimizers: `torch.optim.Optimizer` in full, stepping a `StateUpdate`.

    Args:
        params: a model, named parameters, parameters, or parameter groups.
        rules: tuple builders by name, the first for the parameters the optimizer is about. A second one is auxiliary:
            it takes what the first, being for matrices, cannot.
        defaults: group defaults by rule name, with `lr` and `weight_decay`.

    Raises:
        AxesError: hyperparameters, parameters or groups that make no sense, or bare parameters for a matrix rule.

    State is a flat dict of tensors; its names mirror the tuple. It is there from the construction on, except of meta
    parameters, and is made again at a parameter's first step, from the weights that it has then.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    differs: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""
    default_lr: ClassVar[float] = 1e-3
    watches_layers: ClassVar[bool] = True  # hooks on nn.Linear supply k, v and e
    update: StateUpdate  # of the main rule: with its defaults on a class, as constructed on an object

    def __init__(
        self,
        params: Params,
        rules: Mapping[str, Rule],
        defaults: Mapping[str, Group],
        **options: Unpack[Options],
    ) -> None:
        who = type(self).__name__
        if options.get("differentiable"):
            raise AxesError(
                f"{who}: differentiable=True is not available; differentiate through axes.reference.run(update, ...) "
                "instead: it is plain autograd"
            )
        if options.get("fused") and options.get("foreach"):
            raise AxesError(f"{who}: fused=True and foreach=True are two ways to do the same: choose one")
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            raise TypeError(f"{who} got an unexpected keyword argument {unknown[0]!r}")
        self._rules = dict(rules)
        self._built: dict[int, tuple[Rule, tuple[Any, ...], StateUpdate]] = {}  # by group
        self._fresh: set[Tensor] = set()  # parameters whose state has not seen a datum
        self._ticks: dict[Tensor, dict[str, int]] = {}  # counts, where those of the state are on a device
        self._skipped = 0
        self._found: dict[torch.device, Tensor] = {}  # flags of the step that is under way
        self._skipped_there: dict[torch.device, Tensor] = {}
        self._check_finite = _check(who, options)
        self._reduction: Reduction = "mean"
        shared = {
            "maximize": options.get("maximize", False),
            "foreach": options.get("foreach") is not False,
            "fused": bool(options.get("fused")),
            "capturable": bool(options.get("capturable")),
            **{name: options.get(name, default) for name, default in DEFAULTS.items()},
        }
        self._rule_defaults: dict[str, Group] = {
            rule: {"lr_scale": 1.0, **defaults[rule], **shared, "rule": rule} for rule in rules
        }
        main = next(iter(rules))
        if self._rule_defaults[main].get("lr", 0.0) is None:
            for group in self._rule_defaults.values():
                group["lr"] = self.default_lr
        self._roles: Roles = {}
        self._layers: Layers | None = None
        self._shards: Shards | None = None  # where parameters are DTensors
        self._batches: dict[int, tuple[StateUpdate, tuple[bool, How], list[Batch | Stacks]]] = {}  # by group
        model = params if isinstance(params, nn.Module) else options.get("model")
        self.update = self._update(self._rule_defaults[main])
        reads_layers = self.watches_layers and needs_layers(self.update)
        if model is not None:
            self._roles = roles(model, linear_only=reads_layers)
        elif reads_layers:
            raise AxesError(
                f"{type(self).__name__}: the tuple reads inputs and output gradients of layers: pass the model itself, "
                "or model= beside the parameters"
            )
        if isinstance(params, nn.Module):
            params = list(params.named_parameters())
        elif isinstance(params, dict):
            params = list(params.items())
        super().__init__(params, dict(self._rule_defaults[main]))
        if reads_layers:
            assert model is not None
            weights = [p for g in self.param_groups if g["rule"] == main for p in g["params"]]
            record = Examples if keyed(self.update) else Rows if needs_examples(self.update) else Products
            self._layers = Layers(model, weights, record)

    # ---- tuples and groups -----------------------------------------------------------------------------------

    def update_for(self, group: Group) -> StateUpdate:
        """The tuple that a parameter group executes, in normal form."""
        return self._update(group)

    @uncompiled()
    def _update(self, group: Group) -> StateUpdate:
        rule = self._rules[group["rule"]]
        names = _hyperparameters(rule)
        values = tuple([tuple(x) if isinstance(x := group[name], list) else x for name in names])
        for name, value in zip(names, values, strict=True):
            if isinstance(value, Tensor):
                raise AxesError(f"{type(self).__name__}: {name} is part of the tuple: a number, not a tensor")
        last = self._built.get(id(group))
        if last is None or last[:2] != (rule, values):  # a tuple takes longer to look up than to compare
            last = self._built[id(group)] = (rule, values, _build(rule, tuple(zip(names, values, strict=True))))
        return last[2]

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with their own options; a group without a rule is split by the role of its parameters."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        options = {key: value for key, value in param_group.items() if key != "params"}
        named = self._named(param_group.get("params"))
        main = next(iter(self._rules))
        if "rule" in options:
            if options["rule"] not in self._rules:
                raise UnknownName(f"rule of {type(self).__name__}", str(options["rule"]), self._rules)
            self._add(options, named)
            return
        if len(self._rules) == 1 or not named:
            self._add({**options, "rule": main}, named)
            return
        routed: dict[str, list[tuple[str | None, Tensor]]] = {rule: [] for rule in self._rules}
        auxiliary = list(self._rules)[1]
        for name, parameter in named:
            role = self._roles.get(parameter)
            if role is None:
                if name is None:
                    raise AxesError(
                        f"{type(self).__name__} treats hidden matrices and other parameters differently and cannot "
                        "tell them apart by shape: pass the model or its named_parameters(), or groups that name "
                        f"their rule, such as {{'params': ..., 'rule': {main!r}}} and rule {auxiliary!r}"
                    )
                role = self._roles[parameter] = named_role(name, parameter)
            routed[main if role.matrix else auxiliary].append((name, parameter))
        for rule, members in routed.items():
            if members:
                self._add({**options, "rule": rule}, members)

    def _named(self, params: Any) -> list[tuple[str | None, Tensor]]:
        """(name or None, parameter) for whatever was given, every parameter once."""
        if params is None:
            raise AxesError(f"{type(self).__name__}: a parameter group needs 'params'")
        if isinstance(params, nn.Module):
            self._roles.update(roles(params))
            params = params.named_parameters()
        elif isinstance(params, Tensor):
            params = [params]
        elif isinstance(params, set):
            raise TypeError("optimizer parameters need to be organized in ordered collections, not sets")
        seen: dict[Tensor, str | None] = {}
        for entry in params:
            name, parameter = entry if isinstance(entry, tuple) else (None, entry)
            if not isinstance(parameter, Tensor):
                raise TypeError(f"{type(self).__name__} can only optimize tensors, got {type(parameter).__name__}")
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise AxesError(
                    f"{type(self).__name__}: parameter {name or len(seen)} has dtype {parameter.dtype}; only "
                    "floating-point and complex parameters can be optimized"
                )
            seen.setdefault(parameter, name)
        return [(name, parameter) for parameter, name in seen.items()]

    def _add(self, options: Group, named: Sequence[tuple[str | None, Tensor]]) -> None:
        rule = options["rule"]
        defaults = self._rule_defaults[rule]
        group = {**defaults, **options}
        update = self._update(group)
        self._validate(group, update)
        if len(self._rules) > 1 and rule == next(iter(self._rules)):
            for name, parameter in named:
                if parameter.ndim < 2:
                    raise ShapeError(
                        f"{type(self).__name__}: rule {rule!r} is for matrices, and {name or 'a parameter'} has shape "
                        f"{tuple(parameter.shape)}"
                    )
        if not elementwise(update):
            for name, parameter in named:
                if parameter.is_complex():
                    raise AxesError(
                        f"{type(self).__name__}: {name or 'a parameter'} is complex, and only rules that act entry by "
                        "entry take complex parameters (as pairs of real numbers)"
                    )
        self._require_storage(group, update, named)
        if self._shards is None and any(spread(p) for _, p in named):
            self._shards = Shards()
        entries = [(name, p) if name is not None else p for name, p in named]
        super().add_param_group({**group, "params": entries})
        added = self.param_groups[-1]
        if rule == next(iter(self._rules)) and self._layers is not None:
            self._layers.weights.update(added["params"])
        for key in self.defaults:  # super() fills in the main rule's hyperparameters
            if key not in defaults and key not in options:
                added.pop(key, None)
        for parameter in added["params"]:
            if parameter.requires_grad and parameter.numel() and not parameter.is_meta and not spread(parameter):
                self._begin(added, update, parameter, checked=False)
        if self._shards is not None:
            self._shards.begin(self, added, update)

    def _require_storage(self, group: Group, update: StateUpdate, named: Sequence[tuple[str | None, Tensor]]) -> None:
        """AxesError unless the group's way of stepping and storing is possible for its rule and parameters."""
        who = type(self).__name__
        precision = Precision.of(group)
        precision.require(who, update)
        if group["capturable"] and holds(update):
            raise AxesError(
                f"{who}: capturable=True records one step, and rule {group['rule']!r} refreshes what it holds in some "
                "steps only: leave it out"
            )
        if group["fused"]:
            reason = unfusable(update)
            if reason is not None:
                raise AxesError(
                    f"{who}: fused=True is for rules that act entry by entry, and rule {group['rule']!r} {reason}: "
                    "leave it out (foreach=True is the batched form), or give it to the groups of another rule"
                )
            if importlib.util.find_spec("triton") is None:
                raise AxesError(f"{who}: fused=True needs Triton, which is not installed")
        for name, parameter in named:
            precision.forms(who, update, parameter)
            place = parameter.device.type
            if group["fused"] and place not in ("cuda", "meta") and not _interpreted():
                raise AxesError(
                    f"{who}: fused=True needs parameters on a CUDA device, and {name or 'a parameter'} is on "
                    f"{parameter.device}: leave it out, foreach=True is the batched form"
                )
            for rate in ("lr", "weight_decay"):
                value = group.get(rate)
                if isinstance(value, Tensor) and group["capturable"] and value.device.type != place and place == "cuda":
                    raise AxesError(
                        f"{who}: with capturable=True a tensor {rate} must be beside the parameters, on "
                        f"{parameter.device}; it is on {value.device}"
                    )

    def _validate(self, group: Group, update: StateUpdate) -> None:
        who = type(self).__name__
        for key in ("lr", "weight_decay"):
            value = group.get(key, 0.0)
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise AxesError(f"{who}: a tensor {key} must have one element, got shape {tuple(value.shape)}")
            elif not (isinstance(value, int | float) and value >= 0 and math.isfinite(value)):
                raise AxesError(f"{who}: {key} must be a finite number >= 0, got {value!r}")
        for vector in vectors(update):
            if not isinstance(group.get(vector), Tensor):
                raise AxesError(f"{who}: the tuple reads the vector {vector!r}: pass {vector}=, a tensor")
        for per in update.demands():
            if group.get(per.name) is None:
                raise AxesError(
                    f"{who}: the tuple asks for {per.name!r} ({per.shape}, {per.domain}): pass {per.name}=..."
                    + (", the log of the gate" if per.domain == "unit" else "")
                )
            value = group[per.name]
            if per.domain == "unit" and not isinstance(value, Tensor) and value > 0:
                raise AxesError(f"{who}: {per.name!r} is a gate in [0, 1] given by its log, so at most 0; got {value}")

    def report(self) -> Report:
        """Every parameter with its rule, the reason for it, step size and decay in force, and the size of its state."""
        rows, notes = [], []
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names", [f"group {i}, parameter {j}" for j in range(len(group["params"]))])
            only = len(self._rules) == 1
            lr, decay = group.get("lr"), group.get("weight_decay")
            scale = group["lr_scale"]
            for name, parameter in zip(names, group["params"], strict=True):
                role = self._roles.get(parameter)
                reason = "the only rule" if only else role.reason if role is not None else "named by its group"
                rows.append(
                    Row(
                        name,
                        tuple(parameter.shape),
                        group["rule"],
                        reason,
                        None if lr is None else float(lr) * scale,
                        None if decay is None else float(decay),
                        self._state_bytes(group, parameter),
                    )
                )
                if missed := trees.missed(self.state.get(parameter) or {}):
                    notes.append(f"{name}: the last good root or basis was kept at {missed} refreshes that gave none")
        if self.skipped:
            notes.append(f"{self.skipped} steps were skipped: a gradient was not finite")
        return Report(tuple(rows), tuple(notes))

    def _state_bytes(self, group: Group, parameter: Tensor) -> int:
        """Of what a parameter's state holds, or will hold after its first step."""
        if not parameter.numel():  # never steps
            return 0
        held = self.state.get(parameter) or self.expected_state(self._update(group), parameter)
        return bytes_of(held.values())

    # ---- one step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    @uncompiled(recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One datum for every parameter that has a gradient.

        closure: clears the gradients, recomputes the loss, differentiates and returns it. Needed where the tuple wants
        the gradient at another point than the parameter.

        Raises:
            NotFiniteError: a gradient has a NaN or an infinity; nothing was changed.
        """
        loss = None
        shown = self._move(closure is not None)
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        finally:
            for parameter, value in shown:
                parameter.copy_(value)
        work = self._work()
        undo = self._remember(work)
        if self._shards is None:
            for group, parameters in work:
                self._advance(group, self._update(group), parameters)
        else:
            self._advance_shards(self._shards, work)
        self._restore(undo)
        if self._layers is not None:
            self._layers.clear()
        return loss

    @uncompiled()
    def _advance_shards(self, shards: Shards, work: list[tuple[Group, list[Tensor]]]) -> None:
        """Step what stands for the parameters where some are DTensors."""
        for group, update, parameters in shards.stepped(self, work):
            self._advance(group, update, parameters)

    @property
    def skipped(self) -> int:
        """Steps that were left out because a gradient was not finite."""
        return self._skipped + sum(int(x) for x in self._skipped_there.values())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves the scale of gradients, and what is not finite, to the step."""
        return all(group["fused"] for group in self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what was collected of layers with them."""
        super().zero_grad(set_to_none)
        layers = getattr(self, "_layers", None)
        if layers is not None:
            layers.clear()

    @uncompiled()
    def _move(self, closure: bool) -> list[tuple[Tensor, Tensor]]:
        """Put parameters where their tuple wants the gradient; returns what they showed."""
        shown = []
        for group in self.param_groups:
            update = self._update(group)
            if not _facts(update, False).moves:
                continue
            if not closure:
                _, _, _, step, _ = update.parts()
                raise AxesError(
                    f"{type(self).__name__}: the tuple evaluates the gradient at {step.at!r}, which is not where the "
                    "parameter is: call step(closure)"
                )
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.numel():
                    with self._standing_in(parameter) as plain:
                        shown.append((plain, plain.clone()))
                        self._show(plain, self._evaluation_point(group, update, plain))
        return shown

    def _standing_in(self, parameter: Tensor) -> AbstractContextManager[Tensor]:
        """The parameter, or what stands for it where it is a DTensor."""
        return nullcontext(parameter) if self._shards is None else self._shards.standing_in(self, parameter)

    def _evaluation_point(self, group: Group, update: StateUpdate, parameter: Tensor) -> Tensor:
        _, h, monoid, step, memory = update.parts()
        flat = self.state.get(parameter) or {}
        theta = flat["theta"] if "theta" in flat else self._start(update, parameter)
        signal = self._rates(group, update, theta)
        if step.at == "gated":
            element = monoid.element(signal, resolve(step.rate, signal), theta)
            (theta,) = memory.act(element, (theta,))
        return theta if h.is_identity or not step.lazy else h.primal(theta, Context(signal=signal))

    @uncompiled()
    def _work(self) -> list[tuple[Group, list[Tensor]]]:
        """Groups and those of their parameters that step, after every gradient was looked at."""
        work, gradients = [], []
        for i, group in enumerate(self.param_groups):
            parameters = []
            for j, parameter in enumerate(group["params"]):
                g = parameter.grad
                if g is None or not parameter.numel():
                    continue
                if g.layout != torch.strided:
                    raise AxesError(
                        f"{type(self).__name__} does not support sparse gradients ({self._name(i, j)}): use "
                        "nn.Embedding(..., sparse=False)"
                    )
                parameters.append(parameter)
                gradients.append((i, j, g if self._shards is None else local_shard(g)))
            if parameters:
                work.append((group, parameters))
        self._found = {} if not gradients or self._shards is not None else self._found_there(gradients)
        if self._shards is not None and self._shards.called_off(self, len(gradients)):
            self._skipped += 1
            return []
        if not self._check_finite or not (gradients or self._shards is not None) or self._found:
            return work
        if not self._require_finite(gradients):
            self._skipped += 1
            return []
        return work

    def _found_there(self, gradients: list[tuple[int, int, Tensor]]) -> dict[torch.device, Tensor]:
        """Flags on the devices of gradients, 1 where this step must not happen; none where the host looks itself."""
        given: Tensor | None = getattr(self, "found_inf", None)  # of a gradient scaler
        found = {} if given is None else {given.device: given}
        there = any(group["fused"] or group["capturable"] for group in self.param_groups)
        if self._check_finite == "skip" and there and self._shards is None:
            norms = torch._foreach_norm([g for _, _, g in gradients], torch.inf)
            total = _together(norms)
            own = 1.0 - torch.isfinite(total).all().to(torch.float32)
            found = {own.device: own if given is None else torch.maximum(own, given.to(own.device))}
        for flag in found.values():
            held = self._skipped_there.setdefault(flag.device, torch.zeros((), dtype=torch.int64, device=flag.device))
            held.add_(flag != 0)
        return found

    def _flag(self, device: torch.device) -> Tensor | None:
        """The flag of this step, on a device."""
        if self._found and device not in self._found:
            self._found[device] = next(iter(self._found.values())).to(device)
        return self._found.get(device)

    @uncompiled()
    def _remember(self, work: list[tuple[Group, list[Tensor]]]) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Parameters and states of a step that a flag on the device may call off, unless a kernel looks at the flag."""
        if not self._found:
            return []
        undo = []
        for group, parameters in work:
            if group["fused"]:
                continue
            for parameter in parameters:
                if not self.state.get(parameter):
                    self._begin(group, self._update(group), parameter)
                undo.append((parameter, parameter.clone(), {n: x.clone() for n, x in self.state[parameter].items()}))
        return undo

    @uncompiled()
    def _restore(self, undo: list[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> None:
        for parameter, value, state in undo:
            flag = self._flag(parameter.device)
            assert flag is not None
            parameter.copy_(torch.where(flag != 0, value, parameter))
            for name, old in state.items():
                now = self.state[parameter][name]
                now.copy_(torch.where(flag.to(now.device) != 0, old.to(now.device), now))

    def _require_finite(self, gradients: list[tuple[int, int, Tensor]]) -> bool:
        """Whether all gradients are finite, or the error that says which is not."""
        norms = torch._foreach_norm([g for _, _, g in gradients]) if gradients else [torch.zeros(())]
        total = _together(norms)
        finite = bool(torch.isfinite(total).all())
        if self._shards is not None:
            finite = not self._shards.agree(self, not finite, len(gradients))
        if finite:
            return True
        # a norm may overflow where no gradient does
        bad = next((self._name(i, j) for i, j, g in gradients if not bool(torch.isfinite(g).all())), None)
        if self._shards is not None and self._shards.agree(self, bad is not None, len(gradients)):
            bad = bad or "a parameter, on another process,"
        if bad is not None and self._check_finite != "skip":
            raise NotFiniteError(
                f"{type(self).__name__}: the gradient of {bad} is not finite; no parameter was changed"
            )
        return bad is None

    def _name(self, group: int, index: int) -> str:
        names = self.param_groups[group].get("param_names")
        return repr(names[index]) if names else f"parameter {index} of group {group}"

    def _rates(self, group: Group, update: StateUpdate, like: Tensor) -> dict[str, Tensor | float]:
        """The named rates of a tuple, from the group: numbers, or tensors in the dtype of the arithmetic."""
        signal: dict[str, Tensor | float] = {}
        for name in (*(per.name for per in update.demands()), *vectors(update)):
            value = group[name]
            if isinstance(value, Tensor):
                value = value.to(like.dtype)
                value = value.reshape(()) if value.numel() == 1 else value.to(like.device)
            if name == "lr" and group["lr_scale"] != 1.0:
                value = value * group["lr_scale"]
            signal[name] = value
        return signal

    @uncompiled(recursive=False)
    def _advance(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> None:
        """Step the parameters of one group, those of one shape together unless foreach is off."""
        sign = -1.0 if group["maximize"] else 1.0
        self._in_place = group["capturable"] or group["fused"]
        facts = _facts(update, group["maximize"])
        if self._same(group, update, parameters):
            self._advance_together(group, update, self._batches[id(group)][2])
            return
        late = [p for p in parameters if p in self._fresh or not self.state.get(p)]
        for parameter in late:
            self._begin(group, update, parameter)
        self._fresh.difference_update(late)
        if facts.keyed:
            for parameter in parameters:
                self._replay(group, update, parameter, sign)
            return
        if (facts.entrywise and (group["foreach"] or group["fused"])) or (facts.stacked and group["foreach"]):
            alone = set(late) if facts.special else set()
            together = [p for p in parameters if p not in alone] if alone else parameters
            if together:
                self._advance_together(group, update, self._batched(group, update, together))
            if not alone:
                return
            parameters = late
        self._interpret(group, update, parameters, sign)

    @uncompiled()
    def _interpret(self, group: Group, update: StateUpdate, parameters: list[Tensor], sign: float) -> None:
        """Step by executing the tuple, for parameters of one shape at a time."""
        batches: dict[Any, list[tuple[Tensor, State, dict[str, Tensor]]]] = {}
        for index, parameter in enumerate(parameters):
            assert parameter.grad is not None
            g = _canonical(parameter.grad)
            datum = {"g": -g if group["maximize"] else g, **self._layer_signal(update, parameter, sign)}
            state = self._state(update, parameter, datum)
            shapes = tuple(x.shape for x in datum.values())
            alike = (shapes, g.dtype, g.device, int(state.count)) if group["foreach"] else index
            key = (alike, tuple(sorted(stored.forms_of(self.state[parameter]).items())))
            batches.setdefault(key, []).append((parameter, state, datum))
        for batch in batches.values():
            rates = self._rates(group, update, batch[0][2]["g"])
            if len(batch) == 1:
                parameter, state, datum = batch[0]
                self._store(update, parameter, *update.step(state, {**datum, **rates}), group)
                continue
            stacked = {name: torch.stack([datum[name] for _, _, datum in batch]) for name in batch[0][2]}
            state, out = update.step(trees.stack([state for _, state, _ in batch]), {**stacked, **rates})
            for i, (parameter, _, _) in enumerate(batch):
                self._store(update, parameter, trees.unstack(state, i), Output((out.weights[0][i],)), group)

    @uncompiled(recursive=False)
    def _advance_together(self, group: Group, update: StateUpdate, batches: list[Batch | Stacks]) -> None:
        """Step a rule that acts entry by entry, or does so around products, over all parameters at once."""
        rates = {name: group[name] for name in _facts(update, group["maximize"]).rates}
        if "lr" in rates and group["lr_scale"] != 1.0:
            rates["lr"] = rates["lr"] * group["lr_scale"]
        for batch in batches:
            device = batch.parameters[0].device
            scale: Tensor | None = getattr(self, "grad_scale", None) if batch.how == "fused" else None
            found = self._flag(device) if batch.how == "fused" else None
            batch.step(rates, found, None if scale is None else scale.to(device))

    @uncompiled()
    def _batched(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> list[Batch | Stacks]:
        """The batches of a group, made anew if they are not what they were."""
        if not self._same(group, update, parameters):
            way = (group["maximize"], _how(group))
            self._batches[id(group)] = (update, way, self._batch(group, update, parameters))
        return self._batches[id(group)][2]

    @uncompiled()
    def _same(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> bool:
        """Whether the batches of the last step are those of this one."""
        known, way, batches = self._batches.get(id(group), (None, None, []))
        if known is not update or way != (group["maximize"], _how(group)):
            return False
        if sum(len(batch.parameters) for batch in batches) != len(parameters):
            return False
        parts = zip(batches, _split(parameters, batches), strict=True)
        return all(batch.matches(part, self.state) for batch, part in parts)

    @uncompiled()
    def _batch(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> list[Batch | Stacks]:
        """Batches of one dtype, device and step."""
        how = _how(group)
        traced = program(update, group["maximize"])
        precision = Precision.of(group)
        outputs = () if traced is None else traced.outputs
        numbers = [n for n in outputs if n in traced.inputs and not traced.shaped(traced.inputs[n])]  # type: ignore[union-attr]
        members: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            self._complete(group, update, parameter)
            state = self.state[parameter] = start(self.state[parameter], parameter)
            for name in state:
                if trees.counts(name) and how != "host":
                    state[name] = state[name].to(parameter.device)
            same = [float(state[n]) for n in numbers]
            if precision.draws(parameter):
                same.append(int(state[trees.COUNT]))
            forms = tuple(sorted(stored.forms_of(state).items()))
            members.setdefault((parameter.dtype, parameter.device, tuple(same), forms), []).append(parameter)
        batches: list[Batch | Stacks] = []
        for some in members.values():
            states = [self.state[p] for p in some]
            if traced is None:
                batches.append(Stacks(update, group["maximize"], some, states))
                continue
            streams = [self._stream(p) for p in some] if precision.draws(some[0]) else None
            batches.append(Batch(update, group["maximize"], some, states, how, streams, precision.seed))
        return batches

    def _stream(self, parameter: Tensor) -> int:
        """The random bits of a parameter are its own: its place in the optimizer."""
        parameter = parameter if self._shards is None else self._shards.parameter(parameter)
        places = (p is parameter for group in self.param_groups for p in group["params"])
        return next(i for i, here in enumerate(places) if here)

    def _layer_signal(self, update: StateUpdate, parameter: Tensor, sign: float) -> dict[str, Tensor]:
        if not needs_layers(update):
            return {}
        if self._layers is None:
            raise AxesError(f"{type(self).__name__}: a copy has no hooks on the model: construct it from the model")
        if parameter not in self._layers.found:
            raise AxesError(
                f"no layer inputs were collected for {self._label(parameter)}: its nn.Linear must be called, and its "
                "output differentiated, between two steps (and after the optimizer was constructed)"
            )
        return self._layers.found[parameter].signal(sign, self._reduction)

    def _label(self, parameter: Tensor) -> str:
        if self._shards is not None:
            parameter = self._shards.parameter(parameter)
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p is parameter:
                    return self._name(i, j)
        return "a parameter"

    @uncompiled()
    def _replay(self, group: Group, update: StateUpdate, parameter: Tensor, sign: float) -> None:
        """Feed the examples of a layer one after another."""
        examples = self._layer_signal(update, parameter, sign)
        rates = self._rates(group, update, examples["k"])
        state: State | None = None
        out: Output | None = None
        for k, v in zip(examples["k"], examples["v"], strict=True):
            datum = {**rates, "k": k, "v": v}
            state = self._state(update, parameter, datum) if state is None else state
            state, out = update.step(state, datum)
        if state is not None and out is not None:
            self._store(update, parameter, state, out, group)

    @uncompiled()
    def _begin(self, group: Group, update: StateUpdate, parameter: Tensor, checked: bool = True) -> None:
        """The state before the first datum, in its stored forms. checked: the parameter must be where it can be."""
        signal = {n: parameter.new_zeros((), dtype=x.dtype).expand(x.shape) for n, x in _signal(parameter).items()}
        theta = self._start(update, parameter, checked)
        begun = start(trees.flatten(update, update.init(signal, (theta,))), parameter)
        forms = Precision.of(group).forms(type(self).__name__, update, parameter)
        self.state[parameter] = self._at_home(group, parameter, stored.begin(begun, forms, parameter))
        self._ticks.pop(parameter, None)
        self._fresh.add(parameter)

    def _complete(self, group: Group, update: StateUpdate, parameter: Tensor) -> None:
        """Begin those parts of a state that a scheduled hyperparameter has turned on."""
        flat = self.state[parameter]
        expected = self.expected_state(update, parameter)
        if not expected.keys() <= flat.keys():
            self._begin(group, update, parameter)
            self._fresh.discard(parameter)
            self.state[parameter].update(flat)

    def _at_home(self, group: Group, parameter: Tensor, flat: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state whose tensors are where they belong: counts on the host, unless nothing may wait for the device."""
        there = group["capturable"] or group["fused"]
        return {
            n: x.to("cpu" if trees.counts(n) and not there else parameter.device, copy=trees.counts(n))
            for n, x in flat.items()
        }

    def init_state(self) -> None:
        """Begin the states that are missing: of parameters that had no storage when the optimizer was constructed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state.get(parameter) and parameter.numel() and not (parameter.is_meta or spread(parameter)):
                    self._begin(group, self._update(group), parameter)
            if self._shards is not None:
                self._shards.begin(self, group, self._update(group))

    def _start(self, update: StateUpdate, parameter: Tensor, checked: bool = True) -> Tensor:
        """theta_0: the dual of the parameter where a mirror map is carried, else the parameter."""
        _, h, _, step, _ = update.parts()
        w = _canonical(parameter)
        if h.is_identity or not step.lazy:
            return w
        theta = h.subgradient(w)
        if not checked:
            return theta
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(parameter.dtype, 2e-2)
        if not bool(h.contains(w, tolerance).all()):
            raise AxesError(
                f"{type(self).__name__}: {self._label(parameter)} is not in the set of {h!r}: initialise it there, for "
                "example with h.primal"
            )
        return theta

    def _state(self, update: StateUpdate, parameter: Tensor, datum: Mapping[str, Any]) -> State:
        flat = self.state[parameter]
        if self._in_place:  # a count on a device is not waited for
            if parameter not in self._ticks:
                self._ticks[parameter] = {n: int(x) for n, x in flat.items() if trees.counts(n)}
            flat = {**flat, **{n: torch.tensor(x) for n, x in self._ticks[parameter].items()}}
        theta = _canonical(stored.weights(parameter, flat))
        seen = stored.opened(flat)
        try:
            return trees.unflatten(update, seen, theta)
        except KeyError:  # a scheduled hyperparameter has turned a part of the tuple on
            fresh = trees.flatten(update, update.init(datum, (self._start(update, parameter),)))
            return trees.unflatten(update, {**fresh, **seen}, theta)

    def _store(self, update: StateUpdate, parameter: Tensor, state: State, out: Output, group: Group) -> None:
        kept = self.state[parameter]
        flat = stored.closed(trees.flatten(update, state), kept)
        precision = Precision.of(group)
        if not self._in_place:
            kept.update(flat)
        else:
            self._ticks[parameter] = {n: int(x) for n, x in flat.items() if trees.counts(n)}
            for name, x in flat.items():  # where a captured step will look for it again
                if name not in kept:
                    kept[name] = x.to(parameter.device)
                elif trees.counts(name):
                    kept[name].add_(1)
                else:
                    kept[name].copy_(x)
        if precision.plain:
            self._show(parameter, out.weights[0])
            return
        draws = precision.draws(parameter)
        random = (kept[trees.COUNT], self._stream(parameter), precision.seed) if draws else None
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        stored.write(real, out.weights[0].reshape(real.shape), kept, random)

    def _show(self, parameter: Tensor, weights: Tensor) -> None:
        target = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        target.copy_(weights.reshape(target.shape))

    # ---- saving and loading ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's; where parameters are DTensors, all processes must call it together."""
        if self._shards is None:
            return super().state_dict()
        with self._shards.saved(self):
            saved = super().state_dict()
        return {**saved, "state": dict(sorted(saved["state"].items()))}  # in one order on all processes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, bit for bit: state keeps its own dtype.

        Raises:
            AxesError: the state is of another rule, or of parameters of another shape; nothing was changed.
        """
        # last of the hooks, so that it sees what the user's hooks made of the state
        handle = self.register_load_state_dict_pre_hook(wrap_state)
        ways = [{way: group[way] for way in ("foreach", "fused", "capturable")} for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, way in zip(self.param_groups, ways, strict=True):
            group.update(way)  # how a step is computed is no part of what was saved
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self.state[parameter] = self._at_home(group, parameter, self.state[parameter])

    def __getstate__(self) -> dict[str, Any]:
        kept = ("update", "_rules", "_rule_defaults", "_check_finite", "_reduction", "_roles", "_fresh")
        own = {key: getattr(self, key) for key in kept}
        own |= {"_built": {}, "_skipped": self.skipped, "_skipped_there": {}, "_found": {}, "_ticks": {}}
        return {**super().__getstate__(), **own, "_layers": None, "_batches": {}, "_shards": self._shards and Shards()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter, kept in self.state.items():
            if isinstance(kept, Kept):
                tensors = kept.tensors
                if not spread(parameter):  # saved of a sharded parameter
                    tensors = {name: whole(value) for name, value in tensors.items()}
                self.state[parameter] = {
                    name: value.to("cpu" if trees.counts(name) else parameter.device, copy=True)
                    for name, value in tensors.items()
                }
        self._batches, self._ticks = {}, {}
        if "state" in state and "_fresh" not in state:
            self._fresh = {p for p, kept in self.state.items() if trees.COUNT in kept and int(kept[trees.COUNT]) == 0}
        if self._shards is not None:
            self._shards.take(self)

    def expected_state(
        self, update: StateUpdate, parameter: Tensor, group: Group | None = None
    ) -> dict[str, Tensor]:
        """The state of a parameter, without storage: names, shapes and, in the stored forms of a group, dtypes."""
        signal = {n: x.to("meta") for n, x in _signal(parameter).items()}
        flat = trees.flatten(update, update.init(signal, (signal["g"],)))
        if group is None:
            return flat
        return stored.begin(flat, Precision.of(group).forms(type(self).__name__, update, parameter), parameter)


def _signal(parameter: Tensor) -> dict[str, Tensor]:
    """What a parameter's datum looks like, without storage."""
    m, n = canonical_shape(parameter)
    dtype = torch.promote_types(parameter.real.dtype if parameter.is_complex() else parameter.dtype, torch.float32)
    shapes = {"g": (m, n), "k": (n,), "v": (m,), "e": (m,)}
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def _check(who: str, options: Options) -> Literal["raise", "skip"] | None:
    """What to do about gradients that are not finite."""
    given = options.get("check_finite")
    there = bool(options.get("fused") or options.get("capturable"))
    if given is None:
        return None if there else "raise"
    if given not in (True, False, "raise", "skip"):
        raise AxesError(f"{who}: check_finite must be 'raise' (or True), 'skip', False or None, got {given!r}")
    if given and given != "skip" and options.get("capturable"):
        raise AxesError(f"{who}: raising waits for the device, which capturable=True rules out: check_finite='skip'")
    return "skip" if given == "skip" else "raise" if given else None


def _interpreted() -> bool:
    """Whether kernels run without a device, in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    from axes.kernels.layout import interpreted  # triton is imported on first use

    return interpreted()


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What a tuple asks of a step."""

    keyed: bool
    moves: bool
    special: bool  # the first datum is
    entrywise: bool
    stacked: bool
    rates: tuple[str, ...]


_FACTS: dict[tuple[int, bool], tuple[StateUpdate, _Facts]] = {}


def _facts(update: StateUpdate, maximize: bool) -> _Facts:
    """By identity: to hash a tuple takes as long as to step a parameter."""
    held = _FACTS.get((id(update), maximize))
    if held is None or held[0] is not update:
        if len(_FACTS) > 512:
            _FACTS.clear()
        traced = program(update, maximize) is not None
        found = _Facts(
            keyed(update),
            moves_before_closure(update),
            first_is_special(update),
            traced,
            not traced and cut(update, maximize) is not None,
            tuple(per.name for per in update.demands()),
        )
        held = _FACTS[(id(update), maximize)] = (update, found)
    return held[1]


def _together(numbers: Sequence[Tensor]) -> Tensor:
    """0-d tensors as one, wherever and in whatever dtype they are."""
    if len({(x.device, x.dtype) for x in numbers}) > 1:
        numbers = [x.to(numbers[0].device, torch.float32) for x in numbers]
    return torch.stack(list(numbers))


def _how(group: Group) -> How:
    return "fused" if group["fused"] else "device" if group["capturable"] else "host"


def _split(parameters: list[Tensor], batches: Sequence[Batch | Stacks]) -> list[list[Tensor]]:
    """The parameters in the order of the batches that hold them."""
    if len(batches) == 1:
        return [parameters]
    place = {p: i for i, batch in enumerate(batches) for p in batch.parameters}
    parts: list[list[Tensor]] = [[] for _ in batches]
    for p in parameters:
        if p in place:
            parts[place[p]].append(p)
    return parts


def _canonical(tensor: Tensor) -> Tensor:
    """A parameter or gradient as a matrix, at least in float32."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().reshape(canonical_shape(tensor)).to(torch.promote_types(real.dtype, torch.float32))


def report(model: nn.Module, optimizer: Optimizer) -> Report:
    """`optimizer.report()` with the names and the order that the parameters have in the model."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.report()
    order = {parameter: i for i, parameter in enumerate(names)}
    pairs = sorted(zip(parameters, found.rows, strict=True), key=lambda pair: order.get(pair[0], len(order)))
    rows = tuple(dataclasses.replace(row, name=names.get(p, row.name)) for p, row in pairs)
    return dataclasses.replace(found, rows=rows)
