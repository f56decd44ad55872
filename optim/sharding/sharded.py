"""Parameters that are spread over processes: DTensors, as fully_shard and tensor parallelism make them.

A step knows ordinary tensors only, so a DTensor is stepped through a stand-in:

    a rule that acts entry by entry   the stand-in is the process's own shard; state is sharded like the parameter
    every other rule                  the stand-in is the whole parameter, at one process, its owner: gradients are
                                      gathered there, what the rule makes of them is scattered back

Owners share the work of a mesh, replicas included, and each keeps the state of its parameters, whole: together as much
as sharded state, and never sent. Only `state_dict` (of all processes together) shards it, by rows. Every process sends
and receives about the size of its own shards each way, whatever the number of processes. Beside the state an owner
keeps two buffers of the size of its parameters: messages are sent from one and arrive in the other, and between them
its gradients stand in the first and directions in the second.

What is scattered is the direction, which every process applies to its shard, unless the rule reads or maps the weights
themselves (a coupled decay, a trust ratio, a mirror map, keys and values): then the weights travel as well.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Given
from axes.core.facts import fact
from axes.core.geometry import Euclidean
from axes.core.legality import gates
from axes.core.monoids import Identity
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.capabilities import elementwise, keyed, parts_of, vectors
from axes.optim.engine.options import Group
from axes.optim.engine.together import program
from axes.optim.sharding.costs import cost
from axes.optim.sharding.dtensors import matrix_placements, own_region, spread, whole
from axes.optim.sharding.exchange import Exchange, Part
from axes.optim.sharding.member import Member, Owner
from axes.optim.sharding.merging import sharded_states
from axes.optim.sharding.met import Met, Parts, Sorted, dtypes_of, gradients_of, in_place, same
from axes.optim.sharding.travel import Job, alike, buckets
from axes.optim.sharding.vote import Vote
from axes.programs.program import COUNT
from axes.programs.storage import QUANTUM

Work = list[tuple[Group, list[Tensor]]]


# ---- which part of a rule a process can do on its own --------------------------------------------------------------


@fact
def shardable(update: StateUpdate) -> bool:
    """Whether a shard of a parameter can be stepped without the rest of it."""
    scalar = all(per.shape == "scalar" for per in update.demands())
    return scalar and elementwise(update) and not vectors(update) and not keyed(update)


@fact
def direction_and_move(update: StateUpdate) -> tuple[StateUpdate, StateUpdate] | None:
    """A rule as what makes the direction out of the gradient and what moves the weights along it, entry by entry.

    None where the direction depends on the weights or the weights are more than moved.
    """
    cost, h, monoid, step, _ = update.parts()
    if not isinstance(cost, Given) or not h.is_identity or (step.read, step.at, step.start) != (None, "prev", "zero"):
        return None
    if step.steps != 1 or not step.via or not gates(monoid) <= {"identity", "zero", "scalar"}:
        return None
    for part in itertools.chain.from_iterable(parts_of(f) for f in update.filters()):
        if part.parts().step.start == "W0" or "weights" in part.parts().h.reads:
            return None
    move = StateUpdate(cost, Euclidean(), monoid, dataclasses.replace(step, via=()))
    moved = program(move.normal(), True)
    if not shardable(move.normal()) or moved is None or COUNT in moved.inputs:
        return None
    direction = StateUpdate(cost, Euclidean(), Identity(), Step(1.0, via=step.via))
    return direction.normal(), move.normal()


def at_owner(update: StateUpdate, parameter: Any, name: str) -> tuple[StateUpdate, str]:
    """The tuple that steps what stands for a DTensor, and where: its shards, or the whole of it at its owner."""
    if shardable(update) and matrix_placements(parameter) is not None:
        return update, f"{name}, shard by shard"
    split = direction_and_move(update)
    return (update, f"{name}, at each owner") if split is None else (split[0], f"{name}, the direction at each owner")


def _divided(update: StateUpdate) -> tuple[StateUpdate, StateUpdate | None]:
    """What the owner of a parameter does, and what every process then does to its shard, if that is not all."""
    return direction_and_move(update) or (update, None)


# ---- all of them ---------------------------------------------------------------------------------------------------


@final
class Shards:
    """The DTensors among the parameters of one optimizer."""

    def __init__(self) -> None:
        self._held: dict[Tensor, Member] = {}
        self._exchanges: dict[Any, Exchange] = {}
        self._of: dict[Tensor, Tensor] = {}  # parameters by stand-in
        self._groups: dict[tuple[int, int], Group] = {}
        self._met: Met | None = None  # what was looked at, if nothing of it waits for memory
        self._sorted: dict[int, Sorted] = {}
        self._jobs: dict[int, tuple[list[Member], list[torch.dtype], list[Job]]] = {}
        self._votes: dict[Any, Vote] = {}  # by mesh
        self._last: list[tuple[int, list[Member], list[Job]]] = []  # of the step before, alike on all processes
        self._ahead: list[Job] = []  # of this step that travel while the processes agree

    def parameter(self, tensor: Tensor) -> Tensor:
        """The parameter that a stand-in stands for, other tensors themselves."""
        return self._of.get(tensor, tensor)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._held

    # ---- finding out -----------------------------------------------------------------------------------------

    def meet(self, optimizer: Owner) -> bool:
        """Look at the parameters of an optimizer; whether any is a DTensor. All processes of a mesh take part."""
        updates = [optimizer.form_for(group) for group in optimizer.param_groups]
        if self._met is not None and self._met.holds(updates, optimizer.param_groups):
            return bool(self._held)
        self._met, waiting = None, False
        self._sorted.clear()
        new: dict[Any, list[Member]] = {}
        for group, update in zip(optimizer.param_groups, updates, strict=True):
            for p in group["params"]:
                held = self._held.get(p)
                if held is not None and held.update is update and held.current():
                    continue
                if not spread(p) or not p.numel() or p.is_meta:
                    waiting = waiting or spread(p)
                    continue
                local = shardable(update) and matrix_placements(p) is not None
                made = Member(p, update, local, _entry_names(optimizer, update, p.dtype))
                self._require(optimizer, group, made)
                if held is not None:  # the parameter got other memory, or a schedule changed its rule
                    if held.local != local:
                        raise AxesError(
                            f"{type(optimizer).__name__}: {optimizer._label(p)} is sharded, and its rule changed "
                            "between acting entry by entry and acting on the whole: its state would have to move"
                        )
                    if held.current() or not local:
                        made.stand_in = held.stand_in
                    else:
                        self._of.pop(held.stand_in, None)
                    made.part, made.exchange = held.part, held.exchange
                    made.state, made.shown, made._seen = held.state, held.shown, held._seen
                self._held[p] = made
                if made.mesh not in self._votes:
                    self._votes[made.mesh] = Vote(made.mesh)
                if local:
                    self._of[made.stand_in] = p
                elif made.part is None:
                    new.setdefault(made.mesh, []).append(made)
        for mesh, members in new.items():
            exchange = self._exchange(mesh)
            regions = [own_region(h.parameter.shape, mesh, h.parameter.placements) for h in members]
            said = exchange.share(regions)
            shapes = [optimizer._places.layout(h.parameter).shape(h.parameter) for h in members]
            owners = exchange.owners([cost(h.update, s) for h, s in zip(members, shapes, strict=True)], shapes)
            for i, (h, owner) in enumerate(zip(members, owners, strict=True)):
                h.exchange, h.part = exchange, Part(tuple(h.parameter.shape), [r[i] for r in said], owner)
        if not waiting:
            self._met = Met(updates, optimizer.param_groups, list(self._held))
        return bool(self._held)

    def _require(self, optimizer: Owner, group: Group, held: Member) -> None:
        who = f"{type(optimizer).__name__}: {optimizer._label(held.parameter)} is sharded"
        if held.parameter.is_complex() and not held.local:
            raise AxesError(f"{who} and complex, and its rule or its shards do not allow to step shard by shard")
        if not held.local and (group["master"] or group["rounding"] != "nearest" or group["moments"]):
            raise AxesError(f"{who} along an inner dimension of its matrix: leave out master, rounding and moments")
        if held.local and group["moments"] and not held.blocks_fit:
            raise AxesError(
                f"{who}, and moments='8bit' keeps blocks of {QUANTUM} entries: shards must be whole rows, equally "
                f"many, of a multiple of {QUANTUM} entries; take a group without moments= for it"
            )

    def begin(self, optimizer: Owner, group: Group, update: StateUpdate) -> None:
        """Make the states of a group's DTensors that have none. All processes of a mesh take part."""
        self.meet(optimizer)
        missing = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        new = [self._held[p] for p in missing if p in self._held]
        for held in new:
            if held.local:
                optimizer._begin(group, update, held.stand_in)
                self._leave(optimizer, held)
        for members in alike([h for h in new if not h.local], gradients=False):
            job = Job(group, *_divided(update), members)
            job.gather(gradients=False)
            job.arrive(optimizer)
            for held in job.owned:
                self._of[held.stand_in] = held.parameter
                optimizer._begin(group, job.rule, held.stand_in)
                self._leave(optimizer, held)
            job.name_states(optimizer)
            job.release(optimizer)

    def _exchange(self, mesh: Any) -> Exchange:
        if mesh not in self._exchanges:
            self._exchanges[mesh] = Exchange(mesh)
        return self._exchanges[mesh]

    # ---- a step ----------------------------------------------------------------------------------------------

    def stepped(self, optimizer: Owner, work: Work) -> Iterator[tuple[Group, StateUpdate, list[Tensor]]]:
        """Work on stand-ins in the place of work on DTensors; the caller advances each piece before the next."""
        if not self._ahead:  # they met before they agreed
            self.meet(optimizer)
        jobs: list[Job] = []
        entered: list[Member] = []
        self._last, stepped = [], []
        try:
            plain = []
            for group, parameters in work:
                update = optimizer.form_for(group)
                others, local, gathered = self._sort(group, parameters)
                for held, gradient in zip(local, gradients_of(local), strict=True):
                    held.stand_in.grad = gradient
                entered += local
                plain.append((group, update, [*others, *(held.stand_in for held in local)]))
                if gathered:
                    theirs = self._jobs_of(group, update, gathered)
                    stepped.append((id(group), gathered, theirs))
                    jobs += theirs
            for held in entered:
                self._enter(optimizer, held)
            for job in jobs:
                if job not in self._ahead:
                    job.gather()
            self._ahead = []
            yield from (piece for piece in plain if piece[2])
            for job in jobs:
                job.arrive(optimizer)
                for held in job.owned:
                    self._of[held.stand_in] = held.parameter
                    self._enter(optimizer, held)
                    entered.append(held)
                if job.owned:
                    yield job.group, job.rule, [h.stand_in for h in job.owned]
                job.scatter()
            for job in jobs:
                job.finish(optimizer)
            self._last = stepped
        finally:
            self.turn_back()
            for held in entered:
                self._leave(optimizer, held)
            for job in jobs:
                job.release(optimizer)

    def _sort(self, group: Group, parameters: list[Tensor]) -> Parts:
        """The parameters of a group that step, by the way they do; the same lists while these are the same."""
        known = self._sorted.get(id(group))
        if known is not None and same(known.parameters, parameters):
            return known.parts
        parts = Parts([], [], [])
        for p in parameters:
            held = self._held.get(p)
            if held is None:
                parts.others.append(p)
            else:
                (parts.local if held.local else parts.gathered).append(held)
        self._sorted[id(group)] = Sorted(list(parameters), parts)
        return parts

    def _jobs_of(self, group: Group, update: StateUpdate, members: list[Member]) -> list[Job]:
        """The parts in which members of a group travel, kept while they are the same."""
        known, sent, jobs = self._jobs.get(id(group), ([], [], []))
        if not same(known, members) or sent != dtypes_of(members):
            together = [bucket for some in alike(members) for bucket in buckets(some)]
            jobs = [Job(self._same(group, i), *_divided(update), bucket) for i, bucket in enumerate(together)]
            self._jobs[id(group)] = (members, dtypes_of(members), jobs)
        else:
            for i in range(len(jobs)):
                self._same(group, i)
        return jobs

    def _same(self, group: Group, bucket: int) -> Group:
        """The group again for each bucket, so that what is prepared for one is not taken for another's."""
        mine = self._groups.setdefault((id(group), bucket), {})
        mine.clear()
        mine.update(group)
        return mine

    def _enter(self, optimizer: Owner, held: Member) -> None:
        shown = optimizer.state.get(held.parameter)
        if shown is not None and shown is not held.shown:
            held.hide(shown)
        if held.state:
            optimizer.state[held.stand_in] = held.state

    def _leave(self, optimizer: Owner, held: Member) -> None:
        held.stand_in.grad = None
        held.state = optimizer.state.pop(held.stand_in, held.state)
        if held.state:
            held.shown = optimizer.state[held.parameter] = held.show()

    @contextmanager
    def standing_in(self, optimizer: Owner, parameter: Tensor) -> Iterator[Tensor]:
        """What stands for a parameter, with its state in the optimizer while it lasts."""
        self.meet(optimizer)
        held = self._held.get(parameter)
        if held is None:
            yield parameter
            return
        if not held.local:
            raise AxesError(
                f"{type(optimizer).__name__}: the tuple wants the gradient of {optimizer._label(parameter)} where the "
                "parameter is not, and does not act entry by entry: not for sharded parameters"
            )
        self._enter(optimizer, held)
        try:
            yield held.stand_in
        finally:
            self._leave(optimizer, held)

    def agree(self, optimizer: Owner, bad: bool | Tensor, work: Work) -> bool:
        """Whether any process of the meshes says bad; all must have as many gradients.

        bad: where it is on a device, the host waits for it once, with what the others say. Meanwhile gradients travel
        to their owners, if all processes step what they stepped last.

        Raises:
            AxesError: some processes have gradients that others have not.
        """
        self.meet(optimizer)
        gradients = sum(len(parameters) for _, parameters in work)
        for vote in self._votes.values():
            early = self._last if len(self._votes) == 1 and not self._ahead else []
            as_before = not early or self._as_before(work)
            told = vote.cast(bad, gradients, not as_before)
            for job in (job for _, _, jobs in early for job in jobs):  # in one order on all, whatever they have
                job.gather(blank=not as_before)
                self._ahead.append(job)
            for job in self._ahead:
                job.receive()
            found, most, least, changed = told()
            if changed:
                self.turn_back()
            if most != -least:
                raise AxesError(
                    f"between {int(-least)} and {int(most)} parameters have a gradient, depending on the process: all "
                    "processes of a mesh must step the same parameters"
                )
            bad = bool(found)
        return bool(bad)

    def turn_back(self) -> None:
        """Drop what has begun to travel for a step that is not taken, or not in this way."""
        for job in self._ahead:
            job.drop()
        self._ahead = []

    def _as_before(self, work: Work) -> bool:
        """Whether what travels whole, and in which form, is what did in the step before."""
        now = [(group, members) for group, parameters in work if (members := self._sort(group, parameters).gathered)]
        if len(now) != len(self._last):
            return False
        return all(
            id(group) == known
            and same(members, last)
            and dtypes_of(members) == self._jobs[known][1]
            and in_place(members)
            for (group, members), (known, last, _) in zip(now, self._last, strict=True)
        )

    # ---- saving and loading ----------------------------------------------------------------------------------

    @contextmanager
    def saved(self, optimizer: Owner) -> Iterator[None]:
        """While it lasts, state of whole parameters is sharded by rows. All processes of a mesh take part."""
        self.meet(optimizer)
        kept: dict[Tensor, dict[str, Tensor]] = {}
        groups: dict[Any, list[Member]] = {}
        for held in self._held.values():
            if held.exchange is not None:
                groups.setdefault(held.exchange, []).append(held)
        for exchange, members in groups.items():
            for held, shown in zip(members, sharded_states(optimizer, exchange, members), strict=True):
                if shown:
                    kept[held.parameter] = optimizer.state.get(held.parameter, {})
                    optimizer.state[held.parameter] = shown
        try:
            yield
        finally:
            optimizer.state.update(kept)

    def take(self, optimizer: Owner) -> None:
        """Bring a state that was loaded to where it is needed. All processes of a mesh take part."""
        self.meet(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                held, loaded = self._held.get(p), optimizer.state.get(p)
                if held is None:
                    continue
                if not loaded:
                    held.hide({})
                    continue
                if held.local:
                    held.hide({name: held.own(name, loaded[name]) for name in loaded})
                else:
                    wholes = {name: whole(loaded[name]) for name in sorted(loaded)}
                    held.hide({n: wholes[n] if held.owned else wholes[n].new_empty(0) for n in loaded})
                optimizer.state[p] = held.shown
                fresh = p in optimizer._fresh
                (optimizer._fresh.add if fresh else optimizer._fresh.discard)(held.stand_in)


def _entry_names(optimizer: Owner, update: StateUpdate, dtype: torch.dtype) -> frozenset[str]:
    probe = torch.empty(3, 5, dtype=dtype, device="meta")  # no statistic of a matrix has this shape
    return frozenset(name for name, x in optimizer.expected_state(update, probe).items() if tuple(x.shape) == (3, 5))
