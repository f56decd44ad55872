"""Parameters that are spread over processes: DTensors, as fully_shard and tensor parallelism make them.

A step knows ordinary tensors only, so a DTensor is stepped through a stand-in:

    a rule that acts entry by entry   the stand-in is the process's own shard; state is sharded like the parameter
    every other rule                  the stand-in is the whole parameter, at one process, its owner: gradients are
                                      gathered there, what the rule makes of them is scattered back

Owners share the work of a mesh, replicas included, and each keeps the state of its parameters, whole: together as much
as sharded state, and never sent. Only `state_dict` (of all processes together) shards it, by rows. Every process sends
and receives about the size of its own shards each way, whatever the number of processes. Beside the state an owner
keeps a buffer of the size of its parameters, and during a step their gradients.

What is scattered is the direction, which every process applies to its shard, unless the rule reads or maps the weights
themselves (a coupled decay, a trust ratio, a mirror map, keys and values): then the weights travel as well.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Given
from axes.core.geometry import Composite, ConstantNorm, Euclidean, Geometry, TrustRatio
from axes.core.legality import gates
from axes.core.monoids import Identity
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.capabilities import elementwise, keyed, needs_layers, parts_of, vectors
from axes.optim.engine.groups import rates
from axes.optim.engine.layers import Examples, Products, Rows
from axes.optim.engine.options import Group
from axes.optim.engine.routing import canonical_shape
from axes.optim.sharding.dtensors import (
    Exchange,
    Part,
    Region,
    local_shard,
    matrix_placements,
    own_region,
    row_placements,
    spread,
    whole,
    wrapped,
)
from axes.programs.storage import LOW, QUANTUM, UNIT

BUCKETS = 4  # parts of a group that travel while others are stepped
Work = list[tuple[Group, list[Tensor]]]


# ---- which part of a rule a process can do on its own --------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def shardable(update: StateUpdate) -> bool:
    """Whether a shard of a parameter can be stepped without the rest of it."""
    scalar = all(per.shape == "scalar" for per in update.demands())
    return scalar and elementwise(update) and not vectors(update) and not keyed(update)


@functools.lru_cache(maxsize=512)
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
        if part.parts().step.start == "W0" or _reads_weights(part.parts().h):
            return None
    move = StateUpdate(cost, Euclidean(), monoid, dataclasses.replace(step, via=()))
    if not shardable(move.normal()):
        return None
    direction = StateUpdate(cost, Euclidean(), Identity(), Step(1.0, via=step.via))
    return direction.normal(), move.normal()


def _reads_weights(h: Geometry) -> bool:
    if isinstance(h, TrustRatio | ConstantNorm):
        return True
    inner = (h.outer, h.inner) if isinstance(h, Composite) else (getattr(h, "base", None),)
    return any(_reads_weights(x) for x in inner if isinstance(x, Geometry))


# ---- one parameter -------------------------------------------------------------------------------------------------


@final
class Member:
    """A parameter, its stand-in, and the stand-in's state."""

    def __init__(self, parameter: Any, update: StateUpdate, local: bool, entries: frozenset[str]) -> None:
        self.parameter, self.update, self.local = parameter, update, local
        self.entries = entries  # names of state with an entry for every entry of the parameter
        self.mesh = parameter.device_mesh
        self.shape = canonical_shape(parameter)
        self.placements = matrix_placements(parameter)
        self.shard = local_shard(parameter).detach()
        self.stand_in = self.shard if local else self.shard.new_empty(0)
        self.state: dict[str, Tensor] = {}  # of the stand-in
        self.shown: dict[str, Tensor] = {}  # the same as the optimizer shows it
        self._seen: dict[str, Tensor] = {}  # what of it was shown
        self.part: Part | None = None
        self.exchange: Exchange | None = None

    @property
    def owned(self) -> bool:
        return self.part is not None and self.exchange is not None and self.part.owner == self.exchange.rank

    def stand(self, dtype: torch.dtype) -> None:
        """Make the stand-in of a whole parameter. It stays where it is: kernels note its address."""
        assert self.part is not None
        if self.stand_in.dtype != dtype or tuple(self.stand_in.shape) != self.part.shape:
            self.stand_in = torch.empty(self.part.shape, dtype=dtype, device=self.shard.device)

    def current(self) -> bool:
        """Whether the parameter still has the memory that was looked at."""
        now = local_shard(self.parameter)
        return now.data_ptr() == self.shard.data_ptr() and now.shape == self.shard.shape

    def show(self) -> dict[str, Tensor]:
        """The state as DTensors where it is one of shards."""
        if not self.local:
            return self.state
        assert self.placements is not None
        for name, x in self.state.items():
            if self._seen.get(name) is not x:
                layout = self._layout(name)
                self.shown[name] = x if layout is None else wrapped(x, self.mesh, *layout)
                self._seen[name] = x
        return self.shown

    def _layout(self, name: str) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
        """Placements and shape of a state of shards; None for a number, which is the same everywhere."""
        assert self.placements is not None
        if name in self.entries:
            return self.placements, self.shape
        if name.endswith(LOW):
            return tuple(self.parameter.placements), tuple(self.parameter.shape)
        if name.endswith(UNIT):
            return row_placements(self.parameter), (math.prod(self.shape) // QUANTUM,)
        return None

    @property
    def blocks_fit(self) -> bool:
        """Whether blocks of entries of the shards are blocks of the whole."""
        assert self.placements is not None
        shards = math.prod(n for n, p in zip(self.mesh.shape, self.placements, strict=True) if not p.is_replicate())
        by_rows = self.placements == row_placements(self.parameter)
        even = self.shape[0] % shards == 0 and math.prod(self.shape) % (shards * QUANTUM) == 0
        return shards == 1 or by_rows and even

    def own(self, name: str, x: Any) -> Tensor:
        """What the optimizer shows of a loaded tensor: a DTensor of the parameter's placements, or a number."""
        layout = self._layout(name)
        if layout is None:
            return whole(x)
        placements, shape = layout
        if spread(x) and x.device_mesh == self.mesh and tuple(x.placements) == placements:
            return x
        return wrapped(own_region(shape, self.mesh, placements).of(whole(x)).clone(), self.mesh, placements, shape)

    def hide(self, shown: dict[str, Tensor]) -> None:
        """Take over a state that was put into the optimizer."""
        self.shown = shown
        self.state = {name: local_shard(x) for name, x in shown.items()} if self.local else shown
        self._seen = dict(self.state)


# ---- all of them ---------------------------------------------------------------------------------------------------


class Owner(Protocol):
    """What of an optimizer is used here."""

    state: Any
    param_groups: list[Group]
    _fresh: set[Tensor]

    def update_for(self, group: Group) -> StateUpdate: ...
    def expected_state(self, update: StateUpdate, parameter: Tensor) -> dict[str, Tensor]: ...
    def _begin(self, group: Group, update: StateUpdate, parameter: Tensor) -> None: ...
    def _label(self, parameter: Tensor) -> str: ...


@final
class Shards:
    """The DTensors among the parameters of one optimizer."""

    def __init__(self) -> None:
        self._held: dict[Tensor, Member] = {}
        self._exchanges: dict[Any, Exchange] = {}
        self._of: dict[Tensor, Tensor] = {}  # parameters by stand-in
        self._groups: dict[tuple[int, int], Group] = {}
        self._meshes: dict[Any, None] = {}

    def parameter(self, tensor: Tensor) -> Tensor:
        """The parameter that a stand-in stands for, other tensors themselves."""
        return self._of.get(tensor, tensor)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._held

    # ---- finding out -----------------------------------------------------------------------------------------

    def meet(self, optimizer: Owner) -> bool:
        """Look at the parameters of an optimizer; whether any is a DTensor. All processes of a mesh take part."""
        new: dict[Any, list[Member]] = {}
        for group in optimizer.param_groups:
            update = optimizer.update_for(group)
            for p in group["params"]:
                held = self._held.get(p)
                if held is not None and held.update is update and held.current():
                    continue
                if not spread(p) or not p.numel() or p.is_meta:
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
                self._meshes[made.mesh] = None
                if local:
                    self._of[made.stand_in] = p
                elif made.part is None:
                    new.setdefault(made.mesh, []).append(made)
        for mesh, members in new.items():
            exchange = self._exchange(mesh)
            regions = [own_region(h.parameter.shape, mesh, h.parameter.placements) for h in members]
            said = exchange.share(regions)
            for i, h in enumerate(members):
                rows, columns = h.shape
                owner = exchange.choose(rows * columns * min(rows, columns))
                h.exchange, h.part = exchange, Part(tuple(h.parameter.shape), [r[i] for r in said], owner)
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
        for members in _alike([h for h in new if not h.local], gradients=False):
            job = _Job(group, update, members)
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
        self.meet(optimizer)
        jobs = []
        entered: list[Member] = []
        try:
            plain = []
            for group, parameters in work:
                update = optimizer.update_for(group)
                members, gathered = [], []
                for p in parameters:
                    held = self._held.get(p)
                    if held is None:
                        members.append(p)
                    elif held.local:
                        held.stand_in.grad = local_shard(p.grad, held.parameter.placements)
                        members.append(held.stand_in)
                        entered.append(held)
                    else:
                        gathered.append(held)
                plain.append((group, update, members))
                buckets = [bucket for same in _alike(gathered) for bucket in _buckets(same)]
                jobs += [_Job(self._same(group, i), update, bucket) for i, bucket in enumerate(buckets)]
            for held in entered:
                self._enter(optimizer, held)
            for job in jobs:
                job.gather()
            yield from (piece for piece in plain if piece[2])
            for job in jobs:
                job.arrive(optimizer)
                owned = [h for h in job.members if h.owned]
                for held in owned:
                    self._of[held.stand_in] = held.parameter
                    self._enter(optimizer, held)
                    entered.append(held)
                if owned:
                    yield job.group, job.rule, [h.stand_in for h in owned]
                job.scatter()
            for job in jobs:
                job.finish(optimizer)
        finally:
            for held in entered:
                self._leave(optimizer, held)
            for job in jobs:
                job.release(optimizer)

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

    def agree(self, optimizer: Owner, bad: bool, gradients: int) -> bool:
        """Whether any process of the meshes says bad; all must have as many gradients.

        Raises:
            AxesError: some processes have gradients that others have not.
        """
        import torch.distributed as dist

        self.meet(optimizer)
        for mesh in self._meshes:
            said = torch.tensor([float(bad), gradients, -gradients], dtype=torch.float64, device=mesh.device_type)
            for dim in range(mesh.ndim):
                dist.all_reduce(said, dist.ReduceOp.MAX, group=mesh.get_group(dim))
            found, most, least = said.tolist()
            if most != -least:
                raise AxesError(
                    f"between {int(-least)} and {int(most)} parameters have a gradient, depending on the process: all "
                    "processes of a mesh must step the same parameters"
                )
            bad = bool(found)
        return bad

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
            for held, shown in zip(members, _sharded_states(optimizer, exchange, members), strict=True):
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


def _alike(members: Iterable[Member], gradients: bool = True) -> list[list[Member]]:
    """Members that can travel together."""
    found: dict[Any, list[Member]] = {}
    for held in members:
        sent = held.parameter.grad.dtype if gradients else None
        found.setdefault((held.exchange, held.parameter.dtype, sent), []).append(held)
    return list(found.values())


def _buckets(members: list[Member]) -> Iterator[list[Member]]:
    """Members in up to `BUCKETS` parts, those of one shape together: while one is stepped, others travel."""
    shapes: dict[tuple[int, int], list[Member]] = {}
    for held in members:
        shapes.setdefault(held.shape, []).append(held)
    total = sum(math.prod(shape) * len(some) for shape, some in shapes.items())
    bucket: list[Member] = []
    size = 0
    for shape, some in shapes.items():
        bucket, size = bucket + some, size + math.prod(shape) * len(some)
        if size * BUCKETS >= total:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@final
class _Job:
    """Whole parameters of one group, mesh and dtype on their way to their owners and back."""

    def __init__(self, group: Group, update: StateUpdate, members: list[Member]) -> None:
        self.group, self.members = group, members
        self.rule: StateUpdate = update
        self.move: StateUpdate | None = None
        if (split := direction_and_move(update)) is not None:
            self.rule, self.move = split
        exchange = members[0].exchange
        assert exchange is not None
        self.exchange = exchange
        self.parts = [h.part for h in members if h.part is not None]
        self.owned = [h for h in members if h.owned]
        dtype = members[0].shard.dtype
        self.dtype = torch.promote_types(dtype, torch.float32) if self.move is not None else dtype
        self._like = members[0].shard.new_empty(0, dtype=self.dtype)
        self._gradients: Callable[[], list[Tensor]] | None = None
        self._weights: Callable[[], list[Tensor]] | None = None
        self._results: Callable[[], list[Tensor]] | None = None

    def gather(self, gradients: bool = True) -> None:
        """Start to send gradients, and weights if the rule sees them, to their owners."""
        if gradients:
            shards = [local_shard(h.parameter.grad, h.parameter.placements) for h in self.members]
            self._gradients = self.exchange.gather(shards, self.parts)
        if self.move is None:
            self._weights = self.exchange.gather([h.shard for h in self.members], self.parts)

    def arrive(self, optimizer: Owner) -> None:
        """Lay what has arrived into the stand-ins; where the rule does not see the weights they are zero."""
        weights = None if self._weights is None else self._weights()
        gradients = None if self._gradients is None else self._gradients()
        for held in self.owned:
            held.stand(self.dtype)
        stand_ins = [held.stand_in for held in self.owned]
        if stand_ins and weights is None:
            torch._foreach_zero_(stand_ins)
        elif stand_ins and weights is not None:
            torch._foreach_copy_(stand_ins, weights)
        if gradients is not None:
            for stand_in, gradient in zip(stand_ins, gradients, strict=True):
                stand_in.grad = gradient.to(self.dtype)
        if gradients is not None and needs_layers(self.rule):
            for held in self.members:
                merge_layers(optimizer, self.exchange, held)

    def scatter(self) -> None:
        self._results = self.exchange.scatter([h.stand_in for h in self.owned], self.parts, self._like)

    def finish(self, optimizer: Owner) -> None:
        assert self._results is not None
        results = self._results()
        self.name_states(optimizer)
        shards = [h.shard for h in self.members]
        if self.move is None:
            torch._foreach_copy_(shards, results)
            return
        keep, rate = self._factors(optimizer)
        inside = shards if shards[0].dtype == self.dtype else [x.to(self.dtype) for x in shards]
        torch._foreach_mul_(inside, keep)
        if isinstance(rate, float):
            torch._foreach_add_(inside, results, alpha=rate)
        else:
            torch._foreach_mul_(results, rate)
            torch._foreach_add_(inside, results)
        if inside is not shards:
            torch._foreach_copy_(shards, inside)

    def name_states(self, optimizer: Owner) -> None:
        """Others than the owner know the names of a state."""
        for held in self.members:
            if not held.owned and not optimizer.state.get(held.parameter):
                names = optimizer.expected_state(optimizer.update_for(self.group), held.parameter)
                held.hide({name: self._like.new_empty(0) for name in names})
                optimizer.state[held.parameter] = held.shown

    def _factors(self, optimizer: Owner) -> tuple[float | Tensor, float | Tensor]:
        """a and r of the move W = a W + r u: what the rule makes of the pairs (1, 0) and (0, 1)."""
        assert self.move is not None
        like = torch.zeros((), dtype=torch.float64)
        given = rates(self.group, self.move, like)
        devices = [x.device for x in given.values() if isinstance(x, Tensor)]
        probe = torch.eye(2, dtype=torch.float64, device=devices[0] if devices else "cpu")
        w, u = probe[:1], probe[1:]
        signal = {"g": -u, **given}
        _, out = self.move.step(self.move.init(signal, (w,)), signal)
        keep, rate = out.weights[0][0].unbind()
        if keep.device.type == "cpu":
            return float(keep), float(rate)
        return keep.to(self.dtype), rate.to(self.dtype)

    def release(self, optimizer: Owner) -> None:
        for held in self.owned:
            held.stand_in.grad = None
        layers = getattr(optimizer, "_layers", None)
        if layers is not None:
            for held in self.owned:
                layers.found.pop(held.stand_in, None)


# ---- what layers saw -------------------------------------------------------------------------------------------------


def merge_layers(optimizer: Any, exchange: Exchange, held: Member) -> None:
    """Bring what the processes collected of one layer, each from its own examples, to the layer's owner.

    The losses of the processes are averaged, so that a mean over one process's examples counts as that over all.
    """
    import torch.distributed as dist

    if optimizer._layers is None:
        raise AxesError(f"{type(optimizer).__name__}: a copy has no hooks on the model: construct it from the model")
    found = optimizer._layers.found.get(held.parameter)
    said = exchange.share(None if found is None else found.counts())
    if any(counts is None for counts in said):
        raise AxesError(
            f"no layer inputs were collected for {optimizer._label(held.parameter)} on some process: its nn.Linear "
            "must be called, and its output differentiated, between two steps"
        )
    assert held.part is not None
    share = 1.0 / exchange.size if optimizer._reduction == "mean" else 1.0
    merged = type(found)()
    if isinstance(found, Examples):
        columns = [x * scale for x, scale in zip(found.columns(), (1.0, 1.0, share), strict=True)]
        gathered = _rows_of_all(exchange, held, columns, [counts[False] for counts in said])
        if held.owned:
            merged.rows.extend(gathered)
    else:
        assert isinstance(found, Products)
        for observing in sorted({key for counts in said for key in counts}):
            if not all(observing in counts for counts in said):
                raise AxesError("passes that only observe must be run on every process, or on none")
            kk, ee, _ = found.sums[observing]
            kk, ee = kk.clone(), ee * (1.0 if observing else share**2)
            dist.all_reduce(kk, group=exchange.group)
            dist.all_reduce(ee, group=exchange.group)
            numbers = [counts[observing] for counts in said]
            merged.sums[observing] = (kk, ee, sum(numbers))
            if isinstance(found, Rows):
                x, gradient = (torch.cat(column) for column in zip(*found.rows[observing], strict=True))
                columns = [x, gradient * (1.0 if observing else share)]
                merged.rows[observing] = _rows_of_all(exchange, held, columns, numbers)
    if held.owned:
        optimizer._layers.found[held.stand_in] = merged


def _rows_of_all(exchange: Exchange, held: Member, columns: list[Tensor], numbers: list[int]) -> list[tuple[Tensor, ...]]:
    """Columns of examples, one a row, brought to the owner: process after process; nothing elsewhere."""
    assert held.part is not None
    found = []
    for x in columns:
        sent: list[list[Tensor]] = [[] for _ in range(exchange.size)]
        sent[held.part.owner] = [x]
        expected = [[Region((0, 0), (n, x.shape[1]))] if held.owned else [] for n in numbers]
        found.append([piece for pieces in exchange.all_to_all(sent, expected, x)() for piece in pieces])
    return list(zip(*found, strict=True))


def _sharded_states(optimizer: Owner, exchange: Exchange, members: list[Member]) -> list[dict[str, Tensor]]:
    """The state of every member as DTensors of rows; numbers are the owner's, on every process."""
    notes: dict[int, dict[str, Any]] = {}
    for i, held in enumerate(members):
        if held.owned:
            state = optimizer.state.get(held.parameter, {})
            notes[i] = {n: x.cpu() if x.numel() == 1 else (tuple(x.shape), x.dtype) for n, x in state.items()}
    said = exchange.share(notes)
    named = [said[held.part.owner][i] for i, held in enumerate(members) if held.part is not None]
    placements = [row_placements(held.parameter) for held in members]
    mine = [
        {n: own_region(x[0], h.mesh, places) for n, x in note.items() if not isinstance(x, Tensor)}
        for h, places, note in zip(members, placements, named, strict=True)
    ]
    regions = exchange.share(mine)
    out = []
    for i, (held, places, note) in enumerate(zip(members, placements, named, strict=True)):
        assert held.part is not None
        shown: dict[str, Tensor] = {}
        for name, x in note.items():
            if isinstance(x, Tensor):
                shown[name] = x.to(held.shard.device) if x.is_floating_point() else x
                continue
            shape, dtype = x
            part = Part(shape, [r[i][name] for r in regions], held.part.owner)
            own = [optimizer.state[held.parameter][name]] if held.owned else []
            (shard,) = exchange.scatter(own, [part], held.shard.new_empty(0, dtype=dtype))()
            shown[name] = wrapped(shard, held.mesh, places, shape)
        out.append(shown)
    return out
