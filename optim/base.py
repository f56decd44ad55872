"""The adapter of the data axis: a `StateUpdate` executed once per training step on every parameter.

The signal of a step is the gradient g, and every rate that the tuple names: `Per("lr")` and `Per("weight_decay")` are
keys of the parameter group, so schedulers drive them. Everything else about a rule is in its tuple, which is built
from the group's hyperparameters by a pure function. A parameter is a matrix to its rule (see `routing`); state and
arithmetic are float32 for 16-bit parameters, which are rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn

from axes.errors import AxesError, NotFiniteError, ShapeError, UnknownName
from axes.geometry import Context
from axes.optim import trees
from axes.optim.capabilities import (
    elementwise,
    keyed,
    moves_before_closure,
    needs_layers,
    require_parameter,
    vectors,
)
from axes.optim.checkpoints import Kept, wrap_state
from axes.optim.layers import Examples, Layers, Products, Reduction
from axes.optim.routing import Report, Roles, Row, canonical_shape, named_role, roles
from axes.optim.together import Batch, first_is_special, program, start
from axes.rates import resolve
from axes.state_update import Output, State, StateUpdate

Group = dict[str, Any]
Rule = Callable[..., StateUpdate]
Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]


class Options(TypedDict, total=False):
    """Keywords that every optimizer takes.

    maximize: ascend. foreach: None or True batches parameters of one shape, False interprets the tuple parameter by
    parameter. check_finite: look at all gradients before anything changes (one device synchronisation per step).
    model: where the parameters live, if `params` is not the model itself.
    fused, differentiable, capturable: refused unless False.
    """

    maximize: bool
    foreach: bool | None
    check_finite: bool
    model: nn.Module | None
    fused: bool | None
    differentiable: bool
    capturable: bool


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

    State is created at a parameter's first step and is a flat dict of tensors; its names mirror the tuple.
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
        for refused, advice in (
            ("fused", "there is no fused kernel for this rule yet: leave it out, foreach=True is the batched form"),
            ("differentiable", "differentiate through axes.reference.run(update, ...) instead: it is plain autograd"),
            ("capturable", "the step is not captured in CUDA graphs yet: leave it out"),
        ):
            if options.get(refused):
                raise AxesError(f"{type(self).__name__}: {refused}=True is not available; {advice}")
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {unknown[0]!r}")
        self._rules = dict(rules)
        self._check_finite = options.get("check_finite", True)
        self._reduction: Reduction = "mean"
        shared = {"maximize": options.get("maximize", False), "foreach": options.get("foreach") is not False}
        self._rule_defaults: dict[str, Group] = {
            rule: {"lr_scale": 1.0, **defaults[rule], **shared, "rule": rule} for rule in rules
        }
        main = next(iter(rules))
        if self._rule_defaults[main].get("lr", 0.0) is None:
            for group in self._rule_defaults.values():
                group["lr"] = self.default_lr
        self._roles: Roles = {}
        self._layers: Layers | None = None
        self._batches: dict[StateUpdate, list[Batch]] = {}
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
            record = Examples if keyed(self.update) else Products
            self._layers = Layers(model, weights, record)

    # ---- tuples and groups -----------------------------------------------------------------------------------

    def update_for(self, group: Group) -> StateUpdate:
        """The tuple that a parameter group executes, in normal form."""
        return self._update(group)

    def _update(self, group: Group) -> StateUpdate:
        rule = self._rules[group["rule"]]
        values = []
        for name in _hyperparameters(rule):
            value = group[name]
            if isinstance(value, Tensor):
                raise AxesError(f"{type(self).__name__}: {name} is part of the tuple: a number, not a tensor")
            values.append((name, tuple(value) if isinstance(value, list) else value))
        return _build(rule, tuple(values))

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
        entries = [(name, p) if name is not None else p for name, p in named]
        super().add_param_group({**group, "params": entries})
        added = self.param_groups[-1]
        if rule == next(iter(self._rules)) and self._layers is not None:
            self._layers.weights.update(added["params"])
        for key in self.defaults:  # super() fills in the main rule's hyperparameters
            if key not in defaults and key not in options:
                added.pop(key, None)

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
        """Every parameter with its rule, the reason for it, and the step size and decay in force."""
        rows = []
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
                    )
                )
        return Report(tuple(rows))

    # ---- one step --------------------------------------------------------------------------------------------

    @torch.no_grad()
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
        for group, parameters in work:
            self._advance(group, self._update(group), parameters)
        if self._layers is not None:
            self._layers.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what was collected of layers with them."""
        super().zero_grad(set_to_none)
        layers = getattr(self, "_layers", None)
        if layers is not None:
            layers.clear()

    def _move(self, closure: bool) -> list[tuple[Tensor, Tensor]]:
        """Put parameters where their tuple wants the gradient; returns what they showed."""
        shown = []
        for group in self.param_groups:
            update = self._update(group)
            if not moves_before_closure(update):
                continue
            if not closure:
                _, _, _, step, _ = update.parts()
                raise AxesError(
                    f"{type(self).__name__}: the tuple evaluates the gradient at {step.at!r}, which is not where the "
                    "parameter is: call step(closure)"
                )
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.numel():
                    shown.append((parameter, parameter.clone()))
                    self._show(parameter, self._evaluation_point(group, update, parameter))
        return shown

    def _evaluation_point(self, group: Group, update: StateUpdate, parameter: Tensor) -> Tensor:
        _, h, monoid, step, memory = update.parts()
        flat = self.state.get(parameter) or {}
        theta = flat["theta"] if "theta" in flat else self._start(update, parameter)
        signal = self._rates(group, update, theta)
        if step.at == "gated":
            element = monoid.element(signal, resolve(step.rate, signal), theta)
            (theta,) = memory.act(element, (theta,))
        return theta if h.is_identity or not step.lazy else h.primal(theta, Context(signal=signal))

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
                gradients.append((i, j, g))
            if parameters:
                work.append((group, parameters))
        if self._check_finite and gradients:
            self._require_finite(gradients)
        return work

    def _require_finite(self, gradients: list[tuple[int, int, Tensor]]) -> None:
        norms = torch._foreach_norm([g for _, _, g in gradients])
        device = norms[0].device
        total = torch.stack([norm.to(device, torch.float32) for norm in norms])
        if bool(torch.isfinite(total).all()):
            return
        # a norm may overflow where no gradient does
        for i, j, g in gradients:
            if not bool(torch.isfinite(g).all()):
                raise NotFiniteError(
                    f"{type(self).__name__}: the gradient of {self._name(i, j)} is not finite; no parameter was changed"
                )

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

    def _advance(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> None:
        """Step the parameters of one group, those of one shape together unless foreach is off."""
        sign = -1.0 if group["maximize"] else 1.0
        if keyed(update):
            for parameter in parameters:
                self._replay(group, update, parameter, sign)
            return
        if group["foreach"] and program(update, group["maximize"]) is not None:
            begun = all(p in self.state for p in parameters)
            if begun or not first_is_special(update):
                self._advance_together(group, update, parameters)
                return
        batches: dict[Any, list[tuple[Tensor, State, dict[str, Tensor]]]] = {}
        for index, parameter in enumerate(parameters):
            assert parameter.grad is not None
            g = _canonical(parameter.grad)
            datum = {"g": -g if group["maximize"] else g, **self._layer_signal(update, parameter, sign)}
            state = self._state(update, parameter, datum)
            key = (g.shape, g.dtype, g.device, int(state.count)) if group["foreach"] else index
            batches.setdefault(key, []).append((parameter, state, datum))
        for batch in batches.values():
            rates = self._rates(group, update, batch[0][2]["g"])
            if len(batch) == 1:
                parameter, state, datum = batch[0]
                self._store(update, parameter, *update.step(state, {**datum, **rates}))
                continue
            stacked = {name: torch.stack([datum[name] for _, _, datum in batch]) for name in batch[0][2]}
            state, out = update.step(trees.stack([state for _, state, _ in batch]), {**stacked, **rates})
            for i, (parameter, _, _) in enumerate(batch):
                self._store(update, parameter, trees.unstack(state, i), Output((out.weights[0][i],)))

    def _advance_together(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> None:
        """Step an entry-by-entry rule as one program over all parameters."""
        batches = self._batches.get(update, [])
        known = [p for batch in batches for p in batch.parameters]
        if len(known) != len(parameters) or not all(
            batch.matches(part, self.state) for batch, part in zip(batches, _split(parameters, batches), strict=True)
        ):
            batches = self._batches[update] = self._batch(group, update, parameters)
        for batch in batches:
            rates = self._rates(group, update, _canonical(batch.parameters[0].grad))  # type: ignore[arg-type]
            batch.step({name: float(value) for name, value in rates.items()})

    def _batch(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> list[Batch]:
        """Batches of one dtype, device and step; states that do not exist yet are made."""
        members: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            state = trees.flatten(update, self._state(update, parameter, {"g": _canonical(parameter.grad)}))
            self.state[parameter].update(start(state, parameter))
            numbers = tuple((n, float(x)) for n, x in state.items() if x.numel() == 1 and n != "theta")
            members.setdefault((parameter.dtype, parameter.device, numbers), []).append(parameter)
        return [Batch(update, group["maximize"], m, [self.state[p] for p in m]) for m in members.values()]

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
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p is parameter:
                    return self._name(i, j)
        return "a parameter"

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
            self._store(update, parameter, state, out)

    def _start(self, update: StateUpdate, parameter: Tensor) -> Tensor:
        """theta_0: the dual of the parameter where a mirror map is carried, else the parameter."""
        _, h, _, step, _ = update.parts()
        w = _canonical(parameter)
        if h.is_identity or not step.lazy:
            return w
        theta = h.subgradient(w)
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(parameter.dtype, 2e-2)
        if not bool(h.contains(w, tolerance).all()):
            raise AxesError(
                f"{type(self).__name__}: {self._label(parameter)} is not in the set of {h!r}: initialise it there, for "
                "example with h.primal"
            )
        return theta

    def _state(self, update: StateUpdate, parameter: Tensor, datum: Mapping[str, Any]) -> State:
        flat = self.state.get(parameter)
        if flat:
            try:
                return trees.unflatten(update, flat, _canonical(parameter))
            except KeyError:  # a scheduled hyperparameter has turned a part of the tuple on
                fresh = trees.flatten(update, update.init(datum, (self._start(update, parameter),)))
                return trees.unflatten(update, {**fresh, **flat}, _canonical(parameter))
        return update.init(datum, (self._start(update, parameter),))

    def _store(self, update: StateUpdate, parameter: Tensor, state: State, out: Output) -> None:
        self.state[parameter].update(trees.flatten(update, state))
        self._show(parameter, out.weights[0])

    def _show(self, parameter: Tensor, weights: Tensor) -> None:
        target = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        target.copy_(weights.reshape(target.shape))

    # ---- saving and loading ----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, bit for bit: state keeps its own dtype.

        Raises:
            AxesError: the state is of another rule, or of parameters of another shape; nothing was changed.
        """
        # last of the hooks, so that it sees what the user's hooks made of the state
        handle = self.register_load_state_dict_pre_hook(wrap_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("update", "_rules", "_rule_defaults", "_check_finite", "_reduction", "_roles")
        own = {key: getattr(self, key) for key in kept}
        return {**super().__getstate__(), **own, "_layers": None, "_batches": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter, kept in self.state.items():
            if isinstance(kept, Kept):
                self.state[parameter] = {
                    name: value.to(parameter.device if value.is_floating_point() else "cpu", copy=True)
                    for name, value in kept.tensors.items()
                }

    def expected_state(self, update: StateUpdate, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, without storage: names and shapes."""
        m, n = canonical_shape(parameter)
        dtype = torch.promote_types(parameter.real.dtype if parameter.is_complex() else parameter.dtype, torch.float32)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        signal = {"g": empty(m, n), "k": empty(n), "v": empty(m), "e": empty(m)}
        return trees.flatten(update, update.init(signal, (empty(m, n),)))


def _split(parameters: list[Tensor], batches: list[Batch]) -> list[list[Tensor]]:
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
    rows = optimizer.report().rows
    order = {parameter: i for i, parameter in enumerate(names)}
    pairs = sorted(zip(parameters, rows, strict=True), key=lambda pair: order.get(pair[0], len(order)))
    return Report(tuple(dataclasses.replace(row, name=names.get(p, row.name)) for p, row in pairs))
