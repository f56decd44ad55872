"""Which parameters of a group step together, made once and kept while nothing changes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, final

from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.optim.engine import stored, trees
from axes.optim.engine.apart import squares
from axes.optim.engine.around import Whole
from axes.optim.engine.batch import Batch
from axes.optim.engine.choice import route
from axes.optim.engine.generated import How
from axes.optim.engine.options import Group, how
from axes.optim.engine.places import Places
from axes.optim.engine.precision import Precision
from axes.optim.engine.staged import staged, traced_for
from axes.optim.engine.together import program, start, uncompiled

States = MutableMapping[Tensor, dict[str, Tensor]]


@final
class Batches:
    """The batches of an optimizer's groups, with what each was made for: a tuple, and a way to step."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[StateUpdate, tuple[bool, bool, How], list[Batch]]] = {}

    @uncompiled()
    def known(
        self, group: Group, update: StateUpdate, parameters: list[Tensor], states: Mapping[Tensor, dict[str, Tensor]]
    ) -> list[Batch] | None:
        """The batches of the group's last step if they are those of this one."""
        last, made_for, batches = self.made.get(id(group), (None, None, []))
        if last is not update or made_for != way(group):
            return None
        if sum(len(batch.parameters) for batch in batches) != len(parameters):
            return None
        parts = zip(batches, _split(parameters, batches), strict=True)
        return batches if all(batch.matches(part, states) for batch, part in parts) else None

    def make(
        self,
        group: Group,
        update: StateUpdate,
        parameters: list[Tensor],
        states: States,
        places: Places,
    ) -> list[Batch]:
        """Batches of one dtype, device and step."""
        maximize, by_how = group["maximize"], how(group)
        chosen = route(update, group)
        precision = Precision.of(group)
        batches: list[Batch] = []
        for some in _alike(group, update, parameters, states, places):
            theirs = [states[p] for p in some]
            layouts = [places.layout(p) for p in some]
            by = chosen
            if by == "stacks" and traced_for(update, maximize, some[0], layouts[0])[2] is None:
                by = "interpreter"  # of this shape it is no program
            whole = None if by == "entrywise" else Whole.of(places.alike(some[0]))
            streams = [places.stream(p) for p in some] if precision.draws(some[0]) else None
            batches.append(Batch(update, maximize, some, theirs, by_how, by, layouts, whole, streams, precision.seed))
        self.made[id(group)] = (update, way(group), batches)
        return batches


def way(group: Group) -> tuple[bool, bool, How]:
    """What a group's batches are made for, besides its tuple."""
    return group["maximize"], group["foreach"], how(group)


def _alike(
    group: Group, update: StateUpdate, parameters: list[Tensor], states: States, places: Places
) -> list[list[Tensor]]:
    """Parameters that can step together; their states get tensors of their own, on the device if the group's are."""
    chosen, maximize = route(update, group), group["maximize"]
    as_one, held = chosen == "stacks", bool(squares(update))
    around = staged(update, maximize) if as_one else None
    traced = program(update, maximize) if chosen == "entrywise" else None if around is None else around.program
    precision = Precision.of(group)
    numbers: list[str] = []
    if traced is not None:
        numbers = [n for n in traced.outputs if n in traced.inputs and not traced.shaped(traced.inputs[n])]
    members: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        state = states[parameter] = start(states[parameter], parameter)
        for name in state:
            if trees.counts(name):  # which parameters that were interpreted together share
                state[name] = state[name].to("cpu" if how(group) == "host" else parameter.device, copy=True)
        same: list[Any] = [float(state[n]) for n in numbers]
        by_count = chosen == "interpreter"
        if as_one:  # a part may do with a single row, say, what is no operation of a program
            own = traced_for(update, maximize, parameter, places.layout(parameter))[2]
            same.append(None if own is None else own.signature)
            by_count = own is None or held  # what is held is refreshed at some data
        if traced is not None and trees.COUNT in traced.inputs:
            same.append(int(state[trees.COUNT]))
        if by_count or precision.draws(parameter):
            same.append(int(state[trees.COUNT]))
        forms = tuple(sorted(stored.forms_of(state).items()))
        members.setdefault((parameter.dtype, parameter.device, tuple(same), forms), []).append(parameter)
    return list(members.values())


def _split(parameters: list[Tensor], batches: Sequence[Batch]) -> list[list[Tensor]]:
    """The parameters in the order of the batches that hold them."""
    if len(batches) == 1:
        return [parameters]
    place = {p: i for i, batch in enumerate(batches) for p in batch.parameters}
    parts: list[list[Tensor]] = [[] for _ in batches]
    for p in parameters:
        if p in place:
            parts[place[p]].append(p)
    return parts
