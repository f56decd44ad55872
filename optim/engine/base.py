"""The adapter of the data axis: a `StateUpdate` executed once per training step on every parameter.

The signal of a step is the gradient g, and every rate that the tuple names: `Per("lr")` and `Per("weight_decay")` are
keys of the parameter group, so schedulers drive them. Everything else about a rule is in its tuple, which is built
from the group's hyperparameters by a pure function. A parameter is a matrix to its rule (see `routing`); state and
arithmetic are float32 for 16-bit parameters, which are rounded once.

    arguments, options, groups, requirements: what an optimizer is given, and whether it makes sense
    routing, layouts, router        what a parameter is, how it is matrices, and which rule takes it
    facts, choice, batches          what is decided once: how a tuple is stepped, and which parameters together
    together, staged, apart         a step as one program, or as several around what is none
    batch                           parameters that step together, by programs or, over stacks, by the tuple
    entries, lists                  a program of entries, over all tensors
    loops, straight                 that program as a loop of C, and a step that goes the way of the last one
    around, blocks, statistics      programs around what is none, over stacks; sums over rows and columns
    interpreted                     the tuple, a parameter at a time
    states, stored, precision       a parameter's state: as its tuple sees it, and as it is kept
    gradients, finite               what is asked of gradients once, those that are not finite
    sharded, layers                 DTensors, rules that read the inputs of layers
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn

from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError, UnknownName, wrong_type
from axes.optim.engine import across, states, trees
from axes.optim.engine.arguments import arguments_of, require_arguments
from axes.optim.engine.batch import Batch
from axes.optim.engine.batches import Batches
from axes.optim.engine.capabilities import keyed, needs_examples, needs_layers
from axes.optim.engine.checkpoints import Kept, require_saved, wrap_state
from axes.optim.engine.choice import plan, route
from axes.optim.engine.facts import facts, followed
from axes.optim.engine.finite import Before, Finite
from axes.optim.engine.forms import Forms, Rule, Today
from axes.optim.engine.generated import is_plain
from axes.optim.engine.gradients import Gradients
from axes.optim.engine.groups import Named, both_too_long, by_sides, named, rates_of, require_params
from axes.optim.engine.interpreted import Member, interpret, replay
from axes.optim.engine.layers import Examples, Layers, Products, Reduction, Rows, no_hooks
from axes.optim.engine.options import (
    Group,
    Options,
    Params,
    check_of,
    how,
    of_groups,
    plain_group,
    require_known,
)
from axes.optim.engine.places import Places
from axes.optim.engine.reports import Report, describe
from axes.optim.engine.requirements import on_host, require
from axes.optim.engine.router import Router
from axes.optim.engine.routing import Role
from axes.optim.engine.staged import fits
from axes.optim.engine.straight import Straight
from axes.optim.engine.together import uncompiled
from axes.optim.sharding.dtensors import local_shard, spread
from axes.optim.sharding.sharded import Shards, Work, at_owner
from axes.routes.choice import Implementation, Plan, Target

_GRAD = operator.attrgetter("grad")


class Optimizer(torch.optim.Optimizer):
    """Base of all optimizers: `torch.optim.Optimizer` in full, stepping a `StateUpdate`.

    Args:
        params: a model, named parameters, parameters, or parameter groups.
        declared: tuple builders by name, the first for the parameters the optimizer is about. A second one is
            auxiliary: it takes what the first, being for matrices, cannot.
        defaults: group defaults by rule name, with `lr` and `weight_decay`.

    Raises:
        AxesError: hyperparameters, parameters or groups that make no sense; a matrix rule without any matrix, or with
            parameters of which neither a model nor a name says what they are.

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

    def __new__(cls, *given: Any, **named: Any) -> Self:
        require_arguments(cls, given, named)
        return super().__new__(cls)

    def __init__(
        self,
        params: Params,
        declared: Mapping[str, Rule],
        defaults: Mapping[str, Group],
        **options: Unpack[Options],
    ) -> None:
        require_known(self._who, options, arguments_of(type(self)))
        require_params(self._who, params)
        self._rules = dict(declared)
        self._rule_defaults: dict[str, Group] = {
            rule: plain_group({"lr_scale": 1.0, **defaults[rule], **of_groups(options), "rule": rule})
            for rule in declared
        }
        own = self._rule_defaults[self._main]
        if own.get("lr", 0.0) is None:
            for group in self._rule_defaults.values():
                group["lr"] = self.default_lr
        self._forms = Forms(self._who, self._rules, followed)
        self._batches = Batches()
        self._straight: Straight | None = None  # after a step by loops of C
        self._fresh: set[Tensor] = set()  # parameters whose state has not seen a datum
        self._ticks: dict[Tensor, dict[str, int]] = {}  # counts, where those of the state are on a device
        self._finite = Finite(check_of(self._who, options))
        self._reduction: Reduction = "mean"
        self._layers: Layers | None = None
        self._shards: Shards | None = None  # where parameters are DTensors
        self.update = self.update_for(own)
        reads_layers = self.watches_layers and needs_layers(self.update)
        self._router = Router(self._who, list(self._rules), reads_layers, options)
        model = params if isinstance(params, nn.Module) else options.get("model")
        if model is not None:
            self._router.meet(model)
        elif reads_layers:
            raise AxesError(
                f"{self._who}: the tuple reads inputs and output gradients of layers: pass the model itself, "
                "or model= beside the parameters"
            )
        if isinstance(params, nn.Module):
            params = list(params.named_parameters())
        elif isinstance(params, dict):
            params = list(params.items())
        super().__init__(params, dict(own))
        self._router.settle()
        if reads_layers:
            assert model is not None
            weights = [p for group in self.param_groups if group["rule"] == self._main for p in group["params"]]
            record = Examples if keyed(self.update) else Rows if needs_examples(self.update) else Products
            self._layers = Layers(model, weights, record)

    @property
    def _who(self) -> str:
        """What messages call the optimizer."""
        return type(self).__name__

    @property
    def _main(self) -> str:
        """The rule that the optimizer is about."""
        return next(iter(self._rules))

    # ---- tuples and groups -----------------------------------------------------------------------------------

    def update_for(self, group: Group) -> StateUpdate:
        """The tuple that a parameter group executes, in normal form."""
        return self._today(group).update

    def form_for(self, group: Group) -> StateUpdate:
        """The same with the group's hyperparameters as numbers of a step: the same one while a scheduler moves them."""
        return self._today(group).form.update

    @uncompiled()
    def _today(self, group: Group) -> Today:
        return self._forms.today(group)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with their own options; a group without a rule is split by the role of its parameters."""
        if not isinstance(param_group, dict):
            raise wrong_type(self._who, "param_group", "a dict", param_group)
        options = {key: value for key, value in param_group.items() if key not in ("params", "matrices")}
        members, matrices = self._named(param_group.get("params")), param_group.get("matrices")
        if matrices is not None and not (self._router.routes and options.get("rule") == self._main):
            raise AxesError(
                f"{self._who}: matrices={matrices!r} is for groups that name a rule for matrices"
                + (f", 'rule': {self._main!r}" if self._router.routes else ", and it has none")
            )
        if "rule" in options:
            if options["rule"] not in self._rules:
                raise UnknownName(f"rule of {self._who}", str(options["rule"]), self._rules)
            self._router.named_by_group(options["rule"], members, matrices)
            self._add_by_sides(options, members)
        elif len(self._rules) == 1 or not members:
            self._add_by_sides({**options, "rule": self._main}, members)
        else:
            for rule, theirs in self._router.by_rule(members).items():
                if theirs:
                    self._add_by_sides({**options, "rule": rule}, theirs, list(self._rules)[1])
        if self._router.settled:
            self._router.warn()

    def _add_by_sides(self, options: Group, members: Named, auxiliary: str | None = None) -> None:
        """Matrices longer than a rule's max_side in groups of their own; those longer in both sides to another rule."""
        limit = {**self._rule_defaults[options["rule"]], **options}.get("max_side")
        if limit is None or "sides" in options or not members:
            self._add(options, members)
            return
        for sides, theirs in by_sides(self._who, members, limit, self._router).items():
            if sides != "neither":
                self._add({**options, "sides": sides}, theirs)
            elif auxiliary is None:
                raise both_too_long(self._who, options["rule"], theirs, limit, self._router)
            else:
                other = Role(False, f"both sides are longer than max_side={limit}")
                self._router.roles.update((p, other) for _, p in theirs)
                self._add({**options, "rule": auxiliary}, theirs)

    def _named(self, params: Any) -> Named:
        """(name or None, parameter) for whatever was given, every parameter once."""
        return named(self._who, params, self._router)

    def _add(self, options: Group, members: Named) -> None:
        main = options["rule"] == self._main
        defaults = self._rule_defaults[options["rule"]]
        group = plain_group({**defaults, **options})
        layouts = [self._router.layout(p).text for _, p in members]
        if main and any(layouts):
            group["matrices"] = layouts
        update = self.form_for(group)
        shared = across.begun(self._who, self.update_for(group), [p for _, p in members], self.param_groups)
        group |= shared
        require(self._who, group, update, members, matrices=main and len(self._rules) > 1)
        if group["fused"] and on_host(members):
            group.update(fused=False, foreach=True)
        if self._shards is None and any(spread(p) for _, p in members):
            self._shards = Shards()
        super().add_param_group({**group, "params": [p if name is None else (name, p) for name, p in members]})
        added = self.param_groups[-1]
        for key in self.defaults:  # super() fills in the main rule's hyperparameters
            if key not in group:
                added.pop(key, None)
        if main and self._layers is not None:
            self._layers.weights.update(added["params"])
        for parameter in added["params"]:
            if parameter.requires_grad and parameter.numel() and not parameter.is_meta and not spread(parameter):
                self._begin(added, update, parameter, checked=False)
        if self._shards is not None:
            self._shards.begin(self, added, update)

    @property
    def _places(self) -> Places:
        return Places(self._who, self.param_groups, self._shards, self._router)

    def _label(self, parameter: Tensor) -> str:
        return self._places.label(parameter)

    def report(self) -> Report:
        """Every parameter with its rule, the reason for it, step size and decay in force, and the size of its state."""

        def expected(group: Group, parameter: Tensor) -> dict[str, Tensor]:
            return self.expected_state(self.form_for(group), parameter)

        return describe(self.param_groups, self._router, self.state, expected, self.skipped)

    # ---- what runs -------------------------------------------------------------------------------------------

    @classmethod
    def default_plans(
        cls, target: Target | None, dtype: torch.dtype | None, implementation: Implementation | None
    ) -> tuple[Plan, ...]:
        """What steps the parameters that the rule is about, with its defaults; by default on a CPU in float32."""
        return (plan("runs", cls.update, target or Target.of("cpu"), dtype or torch.float32, implementation),)

    @uncompiled()
    def plans(
        self,
        target: Target | None = None,
        dtype: torch.dtype | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Plan, ...]:
        """What steps each group, by default where its parameters are and in their dtypes."""
        found: dict[Any, Plan] = {}
        for i, group in enumerate(self.param_groups):
            update, name = self.update_for(group), f"group {i} ({group['rule']})"
            for parameter in [p for p in group["params"] if p.requires_grad and p.numel()]:
                stands = local_shard(parameter) if spread(parameter) else parameter
                stepped, where = (update, name) if stands is parameter else at_owner(update, parameter, name)
                device, kind, plain = target or Target.of(stands.device), dtype or stands.dtype, is_plain(stands)
                if (where, device, kind, plain) not in found:
                    seen = self._moved(group, stands.dtype)
                    planned = plan(where, stepped, device, kind, implementation, group, plain, seen)
                    found[where, device, kind, plain] = planned
        return tuple(found.values())

    def _moved(self, group: Group, dtype: torch.dtype) -> int:
        """How many entries of a dtype the steps of a group have moved."""
        own = [(p, self.state.get(p)) for p in group["params"] if p.dtype == dtype]
        begun = [(p, int(count)) for p, state in own if state and (count := state.get(trees.COUNT)) is not None
                 and count.numel()]  # of a matrix that another process steps there is none
        return sum(p.numel() for p, _ in begun) * max((count for _, count in begun), default=0)

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
        if closure is None and self._steps_straight():
            return None
        self._straight = None
        loss = None
        todays = self._todays()
        shown = self._move(closure is not None, todays)
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        finally:
            for parameter, value in shown:
                parameter.copy_(value)
        if closure is not None:  # which may have done anything
            todays = self._todays()
        work, gradients = self._work()
        before = self._before(work) if self._finite.flags else []
        self._across(work, todays)
        if self._shards is None:
            for (group, parameters), theirs in zip(work, gradients, strict=True):
                today = todays[id(group)]
                self._advance(group, today.form.update, parameters, today, theirs)
        else:
            self._advance_shards(self._shards, work)
        if before:
            self._finite.put_back(before, self.state)
        if self._layers is not None:
            self._layers.clear()
        self._straight = self._after(todays)
        return loss

    @uncompiled()
    def _steps_straight(self) -> bool:
        """A step that goes the way of the last one; False where nothing has moved, and the general way decides."""
        if self._straight is None or getattr(self, "found_inf", None) is not None:
            return False
        looks = self._finite.check is not None
        return self._straight.step(self.param_groups, self._forms.today, self.state, looks)

    @uncompiled()
    def _after(self, todays: Mapping[int, Today]) -> Straight | None:
        """How the next step may go, after one in the general way."""
        if self._shards is not None or self._layers is not None or self._finite.flags:
            return None
        updates = [today.form.update for today in todays.values()]
        if any(facts(update, False).moves or across.made(update) for update in updates):
            return None
        return Straight.after(self.param_groups, todays, self._batches)

    @property
    def skipped(self) -> int:
        """Steps that were left out because a gradient was not finite."""
        return self._finite.skipped

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

    def remove_hooks(self) -> None:
        """Take the hooks of a rule that reads layers off the model, which they leave with the optimizer anyway."""
        if self._layers is not None:
            self._layers.remove()
            self._layers = None

    @uncompiled()
    def _todays(self) -> dict[int, Today]:
        """What the groups come to, looked up once a step."""
        return {id(group): self._forms.today(group) for group in self.param_groups}

    @uncompiled()
    def _move(self, closure: bool, todays: Mapping[int, Today]) -> list[tuple[Tensor, Tensor]]:
        """Put parameters where their tuple wants the gradient; returns what they showed."""
        shown = []
        for group in self.param_groups:
            if not facts(todays[id(group)].form.update, False).moves:
                continue
            update = self.update_for(group)
            if not closure:
                step = update.parts().step
                raise AxesError(
                    f"{self._who}: the tuple evaluates the gradient at {step.at!r}, which is not where the "
                    "parameter is: call step(closure)"
                )
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.numel():
                    with self._standing_in(parameter) as plain:
                        shown.append((plain, plain.clone()))
                        state = self.state.get(plain) or {}
                        theta, seen = state.get("theta"), int(state.get(trees.COUNT, 0))
                        if theta is None:
                            states.require_inside(self._places, update, plain)
                            theta = states.theta_0(update, plain, self._places.layout(plain))
                        point = states.evaluation_point(group, update, theta, seen)
                        states.show(plain, point, self._places.layout(plain))
        return shown

    def _standing_in(self, parameter: Tensor) -> AbstractContextManager[Tensor]:
        """The parameter, or what stands for it where it is a DTensor."""
        return nullcontext(parameter) if self._shards is None else self._shards.standing_in(self, parameter)

    @uncompiled()
    def _work(self) -> tuple[Work, list[Gradients]]:
        """Groups and those of their parameters that step, and their gradients, after every one was looked at."""
        work: Work = []
        given: list[Gradients] = []
        for group in self.param_groups:
            parameters: list[Tensor] = group["params"]
            theirs = Gradients(map(_GRAD, parameters))
            if all(map(operator.is_not, theirs, itertools.repeat(None))) and all(theirs.sizes):
                parameters = list(parameters)
            else:
                parameters = [p for p, g in zip(parameters, theirs, strict=True) if g is not None and p.numel()]
                theirs = Gradients(map(_GRAD, parameters))
            if parameters:
                work.append((group, parameters))
                given.append(theirs)
        gradients = given[0] if len(given) == 1 else Gradients(itertools.chain.from_iterable(given))
        shards = self._shards

        def name(k: int) -> str:
            return self._label(list(itertools.chain.from_iterable(parameters for _, parameters in work))[k])

        if not gradients.strided:
            k = next(k for k, g in enumerate(gradients) if g.layout != torch.strided)
            raise AxesError(
                f"{self._who} does not support sparse gradients ({name(k)}): use nn.Embedding(..., sparse=False)"
            )
        if shards is not None:
            gradients = Gradients(local_shard(g) for g in gradients)
        called_off = True
        try:
            called_off = self._finite.calls_off(
                self._who,
                gradients,
                name=name,
                given=getattr(self, "found_inf", None),  # of a gradient scaler
                there=any(group["fused"] or group["capturable"] for group in self.param_groups),
                agree=None if shards is None else lambda bad: shards.agree(self, bad, work),
            )
        finally:
            if called_off and shards is not None:
                shards.turn_back()
        return ([], []) if called_off else (work, given)

    @uncompiled()
    def _before(self, work: Work) -> list[Before]:
        """Parameters that a flag on a device may have to put back: all but those whose kernel reads the flag."""
        moved = [(group, p) for group, parameters in work if not group["fused"] for p in parameters]
        for group, parameter in moved:
            if not self.state.get(parameter):
                self._begin(group, self.form_for(group), parameter)
        return [Before(p, self.state[p]) for _, p in moved]

    @uncompiled()
    def _across(self, work: Work, todays: Mapping[int, Today]) -> None:
        """Numbers that all parameters share, into the groups that read them."""
        if not any(across.made(today.form.update) for today in todays.values()):
            return
        across.supply_norm(work, self.form_for, getattr(self, "grad_scale", None))
        telling = across.telling(self.param_groups, self.update_for) if work else []
        if telling:
            across.supply_told(self._who, telling, self._states_of, next(iter(self._finite.flags.values()), None))

    def _states_of(self, group: Group, update: StateUpdate) -> Iterator[State]:
        """The states of a group that have begun, as its tuple sees them: the form does, which stays."""
        form, places = self.form_for(group), self._places
        for parameter in group["params"]:
            if self.state.get(parameter):
                self._complete(group, form, parameter)
                yield states.read(form, parameter, self.state[parameter], places.layout(parameter))

    @uncompiled()
    def _advance_shards(self, shards: Shards, work: Work) -> None:
        """Step what stands for the parameters where some are DTensors."""
        for group, update, parameters in shards.stepped(self, work):
            self._advance(group, update, parameters)

    @uncompiled(recursive=False)
    def _advance(
        self,
        group: Group,
        update: StateUpdate,
        parameters: list[Tensor],
        today: Today | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """Step the parameters of one group, together where the tuple and the group allow it. today: of the group.
        gradients: those of the parameters, where they have been read."""
        known = self._batches.known(group, update, parameters, self.state)
        if known is not None:
            self._advance_together(group, update, known, today, gradients)
            return
        late = [p for p in parameters if p in self._fresh or not self.state.get(p)]
        for parameter in late:
            self._begin(group, update, parameter)
        self._fresh.difference_update(late)
        interpreted = route(update, group) == "interpreter"
        if not interpreted or fits(update, group):
            alone = set(late) if not interpreted and facts(update, group["maximize"]).special else set()
            together = [p for p in parameters if p not in alone]
            if together:
                own = self.form_for(group) is update  # what stands for shards is stepped by the form of its parameter
                batches = self._batched(group, update, together)
                if own and (form := self.form_for(group)) is not update:
                    self._fresh.update(late)  # the programs asked what is not so of this group's numbers
                    return self._advance(group, form, parameters)
                self._advance_together(group, update, batches)
            parameters = late if alone else []
        if parameters:
            self._interpret(group, update, parameters)

    @uncompiled(recursive=False)
    def _advance_together(
        self,
        group: Group,
        update: StateUpdate,
        batches: list[Batch],
        today: Today | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """Step a rule that acts entry by entry, or does so around products, over all parameters at once."""
        today = today or self._today(group)
        rates = rates_of(group, facts(update, group["maximize"]).rates, today)
        gradients = gradients if len(batches) == 1 else None  # else some are of another batch
        for batch in batches:
            if batch.today is not today:
                batch.take(today)
            device = batch.parameters[0].device
            scale: Tensor | None = getattr(self, "grad_scale", None) if batch.how == "fused" else None
            found = self._finite.flag(device) if batch.how == "fused" else None
            batch.step(rates, found, None if scale is None else scale.to(device), gradients)

    @uncompiled()
    def _batched(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> list[Batch]:
        """The batches of a group, made anew if they are not what they were."""
        known = self._batches.known(group, update, parameters, self.state)
        if known is not None:
            return known
        for parameter in parameters:
            self._complete(group, update, parameter)
        return self._batches.make(group, update, parameters, self.state, self._places)

    @uncompiled()
    def _interpret(self, group: Group, update: StateUpdate, parameters: list[Tensor]) -> None:
        """Step by executing the tuple."""
        update = self._forms.today(group).of(update)
        sign = -1.0 if group["maximize"] else 1.0
        places, hosted = self._places, how(group) == "host"

        def member(parameter: Tensor) -> Member:
            ticks = None if hosted else self._ticks.setdefault(parameter, {})
            return Member(places, group, update, parameter, self.state[parameter], ticks)

        def datum(parameter: Tensor) -> dict[str, Tensor]:
            assert parameter.grad is not None
            g = states.canonical(parameter.grad, places.layout(parameter))
            return {"g": -g if group["maximize"] else g, **self._layer_signal(update, parameter, sign)}

        if keyed(update):
            for parameter in parameters:
                replay(group, update, member(parameter), self._layer_signal(update, parameter, sign))
        else:
            interpret(group, update, ((member(parameter), datum(parameter)) for parameter in parameters))

    def _layer_signal(self, update: StateUpdate, parameter: Tensor, sign: float) -> dict[str, Tensor]:
        if not needs_layers(update):
            return {}
        if self._layers is None:
            raise no_hooks(self._who)
        if parameter not in self._layers.found:
            raise AxesError(
                f"no layer inputs were collected for {self._label(parameter)}: its nn.Linear must be called, and its "
                "output differentiated, between two steps (and after the optimizer was constructed)"
            )
        return self._layers.found[parameter].signal(sign, self._reduction)

    # ---- states ----------------------------------------------------------------------------------------------

    def init_state(self) -> None:
        """Begin the states that are missing: of parameters that had no storage when the optimizer was constructed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state.get(parameter) and parameter.numel() and not (parameter.is_meta or spread(parameter)):
                    self._begin(group, self.form_for(group), parameter)
            if self._shards is not None:
                self._shards.begin(self, group, self.form_for(group))

    @uncompiled()
    def _begin(self, group: Group, update: StateUpdate, parameter: Tensor, checked: bool = True) -> None:
        """The state before the first datum. checked: the parameter must be where it can be."""
        if checked:
            states.require_inside(self._places, update, parameter)
        rule, layout = self._today(group).of(update), self._places.layout(parameter)
        self.state[parameter] = states.begin(self._who, group, rule, parameter, layout)
        self._ticks.pop(parameter, None)
        self._fresh.add(parameter)

    def _complete(self, group: Group, update: StateUpdate, parameter: Tensor) -> None:
        """Begin those parts of a state that a scheduled hyperparameter has turned on."""
        flat = self.state[parameter]
        if not self.expected_state(update, parameter).keys() <= flat.keys():
            self._begin(group, update, parameter)
            self._fresh.discard(parameter)
            self.state[parameter].update(flat)

    def expected_state(self, update: StateUpdate, parameter: Tensor, group: Group | None = None) -> dict[str, Tensor]:
        """The state of a parameter, without storage: names, shapes and, in the stored forms of a group, dtypes."""
        return states.expected(self._who, group, update, parameter, self._places.layout(parameter))

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
        require_saved(self._who, state_dict)
        # last of the hooks, so that it sees what the user's hooks made of the state
        handle = self.register_load_state_dict_pre_hook(wrap_state)
        ways = [{way: group[way] for way in ("foreach", "fused", "capturable")} for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, way in zip(self.param_groups, ways, strict=True):
            group.update(way)  # how a step is computed is no part of what was saved
            for parameter in group["params"] if how(group) != "host" else ():  # counts are there already
                if self.state.get(parameter):
                    self.state[parameter] = states.at_home(group, parameter, self.state[parameter])

    def __getstate__(self) -> dict[str, Any]:
        kept = ("update", "_rules", "_rule_defaults", "_reduction", "_router", "_fresh")
        own = {key: getattr(self, key) for key in kept}
        own |= {"_check_finite": self._finite.check, "_skipped": self.skipped, "_shards": self._shards and Shards()}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        copied = "_rules" in state  # else it is what load_state_dict has made of a file
        if copied:
            self._finite = Finite(state.pop("_check_finite"), state.pop("_skipped"))
            self._forms, self._layers = Forms(type(self).__name__, state["_rules"], followed), None
        super().__setstate__(state)
        self._batches, self._straight, self._ticks = Batches(), None, {}
        for parameter, kept in self.state.items():
            if isinstance(kept, Kept):
                self.state[parameter] = kept.beside(parameter)
        if "state" in state and not copied:
            self._fresh = {p for p, kept in self.state.items() if trees.COUNT in kept and int(kept[trees.COUNT]) == 0}
        if self._shards is not None:
            self._shards.take(self)


__all__ = ["Group", "Optimizer", "Options", "Params", "Rule"]
