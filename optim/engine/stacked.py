"""Rules with a spectral filter over all matrices of a group: entries at once before it and after it, products by shape.

A tuple is cut at its filter with a `Spectral` geometry. What comes before is a program on entries that writes the
filter's argument into one stack for each shape, in the dtype of the products; the products take whole stacks; what
comes after is a program again (Muon: the decayed step), over stacks where it takes entries together (NorMuon: row
norms). States are the interpreter's, name by name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from axes.core.algorithms import Sum
from axes.core.costs import Given
from axes.core.facts import fact
from axes.core.geometry import Euclidean, Spectral
from axes.core.state_update import State, StateUpdate
from axes.optim.engine import generated, trees
from axes.optim.engine.capabilities import parts_of, vectors
from axes.optim.engine.forms import Today
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.kept import Kept, number_on
from axes.optim.engine.layouts import PLAIN, Layout
from axes.optim.engine.staged import BLOCK, Shape, over_stacks
from axes.optim.engine.together import (
    copied,
    first_is_special,
    fits_kernels,
    join,
    program,
    together,
    uncompiled,
)
from axes.programs.batched import Schedule, blocks
from axes.programs.program import PARAMETER, NotElementwise, Program, trace
from axes.programs.small import Joined, small

_SHAPE = (3, 5)  # of the tensors that are traced: see axes.programs.program
_HOST_BOUND = 100_000_000  # entries up to which the launches of a step take longer than the work
_BRANCHES = 4  # streams on which such a step is recorded: the products of few matrices do not fill a GPU


class Cut(NamedTuple):
    """A rule in three parts. place: of the spectral filter among the rule's filters."""

    head: Program
    spectral: Spectral
    tail: StateUpdate
    place: int


def cut(update: StateUpdate, maximize: bool = False) -> Cut | None:
    """The parts of a rule with one spectral filter that is evaluated by polynomials, or None."""
    found = _cut(update, maximize)
    return found if isinstance(found, Cut) else None


def no_cut(update: StateUpdate, maximize: bool = False) -> str | None:
    """Why a rule is not cut at a spectral filter, or None if it is."""
    found = _cut(update, maximize)
    return found if isinstance(found, str) else None


@fact
@uncompiled()
def _cut(update: StateUpdate, maximize: bool) -> Cut | str:
    step = update.parts().step
    reason = no_filters_alone(update)
    if reason is not None:
        return reason
    if any(part.parts().step.at != "prev" for part in parts_of(update)) or first_is_special(update):
        return "some of its data are special: the first, or those at which a value is refreshed"
    single = {i: _filter(f) for i, f in enumerate(step.via) if not isinstance(f, Sum)}
    places = [i for i, f in single.items() if isinstance(f.parts().h, Spectral)]
    if len(places) != 1:
        return f"it has {len(places) or 'no'} spectral filter{'s' if places else ''}"
    place = places[0]
    last = single[place]
    _, spectral, _, how, _ = last.parts()
    assert isinstance(spectral, Spectral)
    if spectral.method == "polar" or not how.lazy:
        return "its spectral filter is not evaluated by polynomials of what it holds"
    head = _head((*step.via[:place], dataclasses.replace(last, h=Euclidean())), maximize)
    tail = dataclasses.replace(update, algorithm=dataclasses.replace(step, via=step.via[place + 1 :])).normal()
    return "what comes before its spectral filter is no program" if head is None else Cut(head, spectral, tail, place)


@fact
def no_filters_alone(update: StateUpdate) -> str | None:
    """Why a step is more than what filters make of the gradient, added to a parameter that decays; or None."""
    cost, h, _, step, memory = update.parts()
    if not isinstance(cost, Given) or memory.kind != "parameter" or update.drive_sees_state:
        return "its drive is more than the gradient"
    if not h.is_identity or h.stats:
        return "the parameter has a geometry of its own"
    if step.at != "prev" or step.read is not None or step.start != "zero" or step.debias:
        return "the parameter is read, or its gradient taken, where it is not"
    if any(part.parts().step.steps != 1 for part in parts_of(update)):
        return "it takes several steps on one datum"
    if vectors(update) or any(per.shape != "scalar" for per in update.demands()):
        return "it reads rates or gates that are no single number"
    return None


def _filter(f: Any) -> StateUpdate:
    assert isinstance(f, StateUpdate)
    return f


def _head(via: tuple[Any, ...], maximize: bool) -> Program | None:
    """The filters' output, under the parameter's name, and their states after it."""
    update = StateUpdate(Given(), algorithm=dataclasses.replace(StateUpdate(Given()).parts().step, via=via)).normal()
    rates = tuple(per.name for per in update.demands())
    with torch.no_grad():
        datum = {GRADIENT: torch.ones(_SHAPE), **{name: torch.tensor(0.5) for name in rates}}
        flat = trees.flatten(update, update.init(datum, (torch.zeros(_SHAPE),)))
        shaped = tuple(n for n, x in flat.items() if x.numel() > 1)
        counts = {n: torch.ones_like(x) for n, x in flat.items() if trees.counts(n)}
        if len(shaped) + len(counts) != len(flat):
            return None

        def step(values: dict[str, Tensor]) -> Mapping[str, Tensor]:
            state = trees.unflatten(update, {**{n: values[n] for n in shaped}, **counts}, torch.zeros(_SHAPE))
            g = -values[GRADIENT] if maximize else values[GRADIENT]
            state, out = update.step(state, {GRADIENT: g, **{name: values[name] for name in rates}})
            after = trees.flatten(update, state)
            return {PARAMETER: out.weights[0], **{n: after[n] for n in shaped}}

        try:
            return trace(step, (PARAMETER, GRADIENT, *shaped), rates)
        except NotElementwise:
            return None


# ---- programs over lists ---------------------------------------------------------------------------------------------


@final
class ListProgram:
    """A program over lists of contiguous tensors: one kernel on CUDA devices, else torch's multi-tensor operations."""

    def __init__(
        self, found: Program, tensors: Mapping[str, list[Tensor]], counts: Tensor | None, squares: bool = False
    ) -> None:
        """tensors: by name, all inputs but the gradients. counts: on the device, moved by the kernel.

        squares: the kernel keeps sums of squares of the parameters that it writes, for `squares_of`.
        """
        self.program, self.counts = found, counts
        like = tensors[PARAMETER]
        self.kernel: Any = None
        if generated.no_kernels(like[0].device) is None and all(fits_kernels(x) for xs in tensors.values() for x in xs):
            from axes.programs.fused import Fused  # triton is imported on first use

            unread = torch.zeros(1, dtype=torch.int64, device=like[0].device)
            self.kernel = Fused(found, tensors, {}, {}, unread if counts is None else counts, squares=squares)
            return
        self.schedule = Schedule(found, keep=(GRADIENT,))
        size = 1 << 18 if like[0].device.type == "cpu" else 1 << 62
        self.blocks = list(blocks([x.numel() for x in like], size))
        self.views = {n: self._cut(xs) for n, xs in tensors.items()}  # contiguous, as gradients are when they come
        self.fits = like[0].is_cpu
        together = []
        if self.fits and self.schedule.library is None:
            uncut = (all(end - a == like[i].numel() for i, a, end in group) for group in self.blocks)
            together = [b for b, whole in enumerate(uncut) if whole and small([x[2] for x in self.blocks[b]])]
        self.joined = Joined(self.views, together)

    def step(
        self,
        gradients: Sequence[Tensor],
        rates: Mapping[str, float | Tensor],
        found: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        if self.kernel is not None:
            self.kernel.step([g if fits_kernels(g) else copied(g, g.dtype) for g in gradients], rates, found, scale)
            return
        lists = {**self.views, GRADIENT: self._cut(gradients)}
        self.joined.enter(lists[GRADIENT])
        values = values_of(self.program, rates, gradients[0].device)
        for group in zip(*(lists[n] for n in self.schedule.names), strict=True):
            self.schedule.run(group, values, self.fits)
        self.joined.leave()
        if self.counts is not None:
            self.counts.add_(1)

    def squares_of(self, stacks: Sequence[Tensor]) -> list[Tensor] | None:
        """Where the kernel keeps sums of squares of its parameters, the members of these stacks in their order.

        (members, chunks of one) for each stack; None where nobody asked for them or no kernel runs.
        """
        if self.kernel is None or self.kernel.squares is None:
            return None
        sizes = [(len(x), -(-x[0].numel() // self.kernel.block)) for x in stacks]
        parts = self.kernel.squares.split([members * chunks for members, chunks in sizes])
        return [x.view(size) for x, size in zip(parts, sizes, strict=True)]

    def _cut(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        flat = [x.reshape(-1) for x in tensors]
        return [[flat[i] if b - a == flat[i].numel() else flat[i][a:b] for i, a, b in group] for group in self.blocks]


def values_of(found: Program, rates: Mapping[str, float | Tensor], device: torch.device) -> list[Any]:
    """The numbers of a program that reads rates alone, beside the tensors if one of these is."""
    if not any(isinstance(x, Tensor) and x.device.type != "cpu" for x in rates.values()):
        return list(found.numbers({n: float(x) for n, x in rates.items()}))
    return list(found.tensors({n: number_on(device, x) for n, x in rates.items()}))


def readable(gradients: list[Tensor], wide: torch.dtype, head: ListProgram) -> list[Tensor]:
    """Gradients as a program can read them: contiguous, and in one dtype."""
    if head.kernel is None or any(g.dtype != gradients[0].dtype for g in gradients):
        gradients = [g if g.dtype == wide else g.to(wide) for g in gradients]
    return [g if fits_kernels(g) else copied(g, wide) for g in gradients]


def writable(parameter: Tensor, wide: torch.dtype) -> Tensor:
    """The parameter where a program can write it, else a copy of it."""
    known = parameter.dtype == wide or generated.no_kernels(parameter.device) is None
    return parameter.detach() if known and fits_kernels(parameter) else copied(parameter, wide)


def by_matrix(
    parameters: Sequence[Tensor], layouts: Sequence[Layout]
) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
    """The places of the parameters whose matrices have one shape, and how many matrices each parameter is."""
    places: dict[tuple[int, int], list[int]] = {}
    counts = []
    for i, (p, layout) in enumerate(zip(parameters, layouts, strict=True)):
        *batch, rows, columns = layout.shape(p)
        places.setdefault((rows, columns), []).append(i)
        counts.append(math.prod(batch))
    return places, counts


class Whole(NamedTuple):
    """What products are chosen for: all matrices of a group, whichever of them are stepped here and now.

    sides: how many have each shorter side. alone: every parameter is one matrix.
    """

    sides: Mapping[int, int]
    alone: bool

    @staticmethod
    def of(shapes: Iterable[tuple[int, ...]]) -> Whole:
        """Of parameters that are (*batch, rows, columns) to their rule."""
        sides: Counter[int] = Counter()
        alone = True
        for *batch, rows, columns in shapes:
            sides[min(rows, columns)] += math.prod(batch)
            alone = alone and math.prod(batch) == 1
        return Whole(sides, alone)


# ---- one step --------------------------------------------------------------------------------------------------------


@final
class Stacks(Kept):
    """Parameters of one dtype and device that step together under a cut rule, those of one shape as a stack."""

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        layouts: Sequence[Layout] = (),
        whole: Whole | None = None,
    ) -> None:
        """states: flat, with tensors of their own; some are replaced by views of stacks. layouts: of the parameters.

        whole: of their group, where that has others; by default they are all.
        """
        found = cut(update, maximize)
        assert found is not None
        layouts = layouts or [PLAIN] * len(parameters)
        self.cut, self.parameters, self.states, self.how, self.layouts = found, parameters, states, "host", layouts
        self.spectral: Spectral | None = None  # and what follows it, with plain numbers
        self.rest = found.tail
        self.viewed = any(layout.axes for layout in layouts)
        by_shape, self.counts = by_matrix(parameters, layouts)
        self.whole = whole or Whole.of(layout.shape(p) for p, layout in zip(parameters, layouts, strict=True))
        self.members = list(by_shape.values())
        self.order = [i for some in self.members for i in some]
        seen = [layout.seen(p.detach()) for p, layout in zip(parameters, layouts, strict=True)]
        like = parameters[0]
        self.wide = torch.promote_types(like.dtype, torch.float32)
        kind = torch.bfloat16 if found.spectral.precision == "bfloat16" else self.wide
        sizes = [sum(self.counts[i] for i in some) for some in self.members]
        self.stacks = [like.new_empty(n, *shape, dtype=kind) for n, shape in zip(sizes, by_shape, strict=True)]
        self.inside = [writable(x, self.wide) for x in seen]
        self.shown = [(x, y) for x, y in zip(seen, self.inside, strict=True) if x.data_ptr() != y.data_ptr()]
        counts = [n for n in states[0] if trees.counts(n)]
        joined = together(states, counts)
        self.hosted = joined if joined.device.type == "cpu" else None
        arguments = self._divided(self.stacks)
        inputs = [n for n, i in found.head.inputs.items() if found.head.shaped(i) and n not in (PARAMETER, GRADIENT)]
        for some in self.members:
            if like.is_cpu and small([parameters[i].numel() for i in some]):
                join([states[i] for i in some], inputs)
        tensors = {n: [states[i][n] for i in self.order] for n in inputs}
        read = kind == torch.bfloat16 and found.spectral.form == "gram"  # the norms of stacks are
        there = None if joined.device.type == "cpu" else joined
        self.head = ListProgram(found.head, {PARAMETER: arguments, **tensors}, there, read and self.whole.alone)
        self.squares = self.head.squares_of(self.stacks)
        self.tail: ListProgram | None = None
        traced = program(found.tail, True)
        if traced is not None:
            self.tail = ListProgram(traced, {PARAMETER: [self.inside[i] for i in self.order]}, None)
        else:
            self.kept = [self._stacked(some) for some in self.members]
            self.ends = [self._end(shape) for shape in by_shape]
        self.keep(parameters, states)
        bound = sum(x.numel() for x in self.stacks) <= _HOST_BOUND
        recorded = generated.no_kernels(like.device) is None and bound
        self.branches = self._branches(_BRANCHES if recorded else 1)
        self.products: Callable[[], list[Tensor]] = self._directions
        if recorded:
            self.products = _Replayed(self._directions, self._in_branches)

    def take(self, today: Today) -> None:
        super().take(today)
        spectral = today.of(self.cut.spectral)
        if isinstance(self.products, _Replayed) and self.spectral not in (None, spectral):
            self.products.forget()
        self.spectral, self.rest = spectral, today.of(self.cut.tail)

    def step(
        self, rates: Mapping[str, float | Tensor], found: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """One datum for every parameter. found, scale: of a gradient scaler, where the kernel runs."""
        gradients = [g for i in self.order if (g := self.parameters[i].grad) is not None]
        if self.viewed:
            gradients = [self.layouts[i].seen(g) for i, g in zip(self.order, gradients, strict=True)]
        self.head.step(readable(gradients, self.wide, self.head), rates, found, scale)
        directions = self.products()
        if self.shown:
            torch._foreach_copy_([x for _, x in self.shown], [p for p, _ in self.shown])
        if self.tail is not None:
            self.tail.step(self._divided(directions), rates, found, None)
        else:
            for some, kept, end, direction in zip(self.members, self.kept, self.ends, directions, strict=True):
                self._finish(some, kept, end, direction.to(self.wide), rates)
        if self.shown:
            torch._foreach_copy_([p for p, _ in self.shown], [x for _, x in self.shown])
        if self.hosted is not None:
            self.hosted.add_(1)

    def _divided(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """What of the stacks is each parameter's, in their order."""
        pairs = zip(stacks, self.members, strict=True)
        return [x for stack, some in pairs for x in stack.split([self.counts[i] for i in some])]

    def _branches(self, count: int) -> list[list[int]]:
        """Stacks in groups of about the same work."""
        branches: list[list[int]] = [[] for _ in range(min(count, len(self.stacks)))]
        for i in sorted(range(len(self.stacks)), key=lambda i: -self.stacks[i].numel()):
            min(branches, key=lambda branch: sum(self.stacks[j].numel() for j in branch)).append(i)
        return branches

    def _directions(self) -> list[Tensor]:
        """The spectral directions of all stacks, in one dtype."""
        return self._alike(self._on([None] * len(self.branches)))

    def _in_branches(self) -> list[Tensor]:
        """The same, every branch on its stream."""
        now = torch.cuda.current_stream()
        streams = [now, *(torch.cuda.Stream() for _ in self.branches[1:])]
        for stream in streams[1:]:
            stream.wait_stream(now)
        out = self._on(streams)
        for stream in streams[1:]:
            now.wait_stream(stream)
        return self._alike(out)  # reads what every branch made

    def _on(self, streams: Sequence[torch.cuda.Stream | None]) -> list[Tensor]:
        assert self.spectral is not None
        out = list(self.stacks)
        for stream, branch in zip(streams, self.branches, strict=True):
            squares = None if self.squares is None else [self.squares[i] for i in branch]
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                some = [self.stacks[i] for i in branch]
                directions = self.spectral.directions(some, self.wide, squares, True, self.whole.sides)
            for i, x in zip(branch, directions, strict=True):
                out[i] = x
        return out

    def _alike(self, out: list[Tensor]) -> list[Tensor]:
        return out if len({x.dtype for x in out}) == 1 else [x.to(self.wide) for x in out]

    # ---- a tail that mixes entries -----------------------------------------------------------------------------------

    def _stacked(self, some: list[int]) -> dict[str, Tensor]:
        """States that the tail reads, by their names there, as stacks whose members the states become."""
        kept: dict[str, Tensor] = {}
        for name in self.states[some[0]]:
            inner = self._name_in_tail(name)
            if inner is None or trees.counts(name):
                continue
            leaves, counts = [self.states[i][name] for i in some], [self.counts[i] for i in some]
            kept[inner] = trees.rows(leaves, counts)
            for i, x in zip(some, trees.divide(kept[inner], leaves, counts), strict=True):
                self.states[i][name] = x
        return kept

    def _name_in_tail(self, name: str) -> str | None:
        if not name.startswith("via."):
            return name
        _, place, rest = name.split(".", 2)
        inner = int(place) - self.cut.place - 1
        return None if inner < 0 else f"via.{inner}.{rest}"

    def _end(self, shape: Shape) -> Schedule | None:
        """The tail as a program over stacks of this shape, where it is one that reads rates alone."""
        found = over_stacks(self.cut.tail, True, shape, self.wide)
        if found is None or any(trees.responds(n) for n in found.program.inputs):
            return None
        return found

    def _finish(
        self,
        some: list[int],
        kept: dict[str, Tensor],
        end: Schedule | None,
        direction: Tensor,
        rates: Mapping[str, float | Tensor],
    ) -> None:
        """The tail over one stack."""
        shape = direction.shape[1:]
        inside = [self.inside[i].view(-1, *shape) for i in some]
        weights = (inside[0] if len(inside) == 1 else torch.cat(inside)).to(self.wide)
        if end is None:
            weights = self._interpret(kept, weights, direction, rates)
        else:
            values = values_of(end.program, rates, weights.device)
            lists = {PARAMETER: weights, GRADIENT: direction, **kept}
            size = max(1, BLOCK // shape.numel()) if weights.is_cpu else len(weights)
            for part in zip(*(lists[n].split(size) for n in end.names), strict=True):
                end.run([[x] for x in part], values)
        torch._foreach_copy_(inside, list(weights.split([self.counts[i] for i in some])))

    def _interpret(
        self, kept: dict[str, Tensor], weights: Tensor, direction: Tensor, rates: Mapping[str, float | Tensor]
    ) -> Tensor:
        tail = self.rest
        counted = {n: torch.ones((), dtype=torch.int64) for n in self._tail_counts}
        state: State = trees.unflatten(tail, {**kept, **counted}, weights)
        given = {n: x.to(self.wide) if isinstance(x, Tensor) else x for n, x in rates.items()}
        state, out = tail.step(state, {GRADIENT: -direction, **given})
        after = trees.flatten(tail, state)
        for name, x in kept.items():
            x.copy_(after[name])
        return out.weights[0]

    @functools.cached_property
    def _tail_counts(self) -> list[str]:
        like = torch.zeros(_SHAPE)
        state = self.cut.tail.init({GRADIENT: like, **{p.name: 0.5 for p in self.cut.tail.demands()}}, (like,))
        return [n for n in trees.flatten(self.cut.tail, state) if trees.counts(n)]


@final
class _Replayed:
    """A function of tensors that stay where they are, recorded as a CUDA graph at its second call.

    Dozens of launches then cost the host as much as one. Results are overwritten by the next call. recorded: a form of
    the function for the graph.
    """

    def __init__(self, function: Callable[[], list[Tensor]], recorded: Callable[[], list[Tensor]]) -> None:
        self.function, self.recorded, self.calls = function, recorded, 0
        self.forget()

    def forget(self) -> None:
        """Record anew: the function is another one now."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            return self.recorded()  # part of a larger graph
        self.calls += 1
        if self.calls == 1:  # kernels are compiled and libraries wake up
            return self.function()
        if self.graph is None:
            self._record()
        assert self.graph is not None
        self.graph.replay()
        return self.results

    def _record(self) -> None:
        graph, stream, now = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.results = self.recorded()
            finally:
                graph.capture_end()
        now.wait_stream(stream)
        self.graph = graph
