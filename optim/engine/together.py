"""Entry-by-entry rules over all parameters of a group at once: the tuple's program, state in its own tensors.

What the interpreter does parameter by parameter is traced once (`axes.programs`) and run over lists of tensors: as a
generated kernel where those run, else by torch's multi-tensor operations. The state dict is the interpreter's, name by
name, so that all of them can take turns.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, final

import numpy
import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo

from axes.core.facts import fact
from axes.core.rates import SEEN
from axes.core.state_update import StateUpdate
from axes.optim.engine import generated, stored, trees
from axes.optim.engine.capabilities import keyed, mixes, parts_of, vectors
from axes.optim.engine.generated import GRADIENT, How, is_plain
from axes.optim.engine.kept import Kept, number_on
from axes.optim.engine.routing import real
from axes.programs.batched import BLOCK, Schedule, blocks
from axes.programs.program import COUNT, PARAMETER, NotElementwise, Program, Unrecorded, trace
from axes.programs.small import SMALL, Joined, behind_one_another, small
from axes.programs.storage import FORMS, LOW, UNIT

P = ParamSpec("P")
R = TypeVar("R")
_compiling, _follower = torch.compiler.is_compiling, eval_frame.get_eval_frame_callback
_DTYPE = operator.attrgetter("dtype")
_SHAPE = (3, 5)  # of the tensors that are traced: see axes.programs.program


def _passing() -> Callable[[Any], None] | None:
    """What lets a compiler pass over a function to those that it calls, without importing the compiler; None where this
    torch has no such thing."""
    try:
        passed = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        give = eval_frame.set_code_exec_strategy
    except AttributeError:
        return None
    return lambda code: give(code, passed)


_PASSED = _passing()


def uncompiled(recursive: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`torch.compiler.disable` that costs nothing where no compiler follows, and imports it only where one does.

    Under torch.compile only the arithmetic of a step is compiled, what decides about it runs as it is. recursive: what
    the function calls is not compiled either.
    """

    def apart(function: Callable[P, R]) -> Callable[P, R]:
        kept = _disable_dynamo(function, recursive)
        if _PASSED is None:
            return kept

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if _compiling() or _follower() is not None:
                return kept(*args, **kwargs)
            return function(*args, **kwargs)

        _PASSED(called.__code__)  # type: ignore[attr-defined]
        return called

    return apart


def program(update: StateUpdate, maximize: bool = False) -> Program | None:
    """The program of one step on a parameter, or None if the tuple mixes entries or reads more than a gradient."""
    found = _program(update, maximize)
    return found if isinstance(found, Program) else None


def no_program(update: StateUpdate, maximize: bool = False) -> str | None:
    """Why the step on a parameter is no program, or None if it is one."""
    found = _program(update, maximize)
    return found if isinstance(found, str) else None


@fact
@uncompiled()
def _program(update: StateUpdate, maximize: bool) -> Program | str:
    """The program of one step on a parameter, or why there is none."""
    if (reason := reads_more(update)) is not None:
        return reason
    if (what := mixes(update)) is not None:
        return f"mixes entries: {what}"
    return traced(update, maximize, torch.ones(_SHAPE))


def reads_more(update: StateUpdate) -> str | None:
    """What a step reads besides the gradient and numbers, or None."""
    if keyed(update):
        return "reads the inputs of layers"
    if vectors(update) or any(per.shape != "scalar" for per in update.demands()):
        return "reads rates or gates that are no single number"
    return None


def traced(update: StateUpdate, maximize: bool, like: Tensor, stack: bool = False) -> Program | str:
    """The program of a step on a parameter like this one, or why there is none. stack: for stacks of such matrices."""
    rates = tuple(per.name for per in update.demands())
    counted = (COUNT,) if update.parts().counts else ()
    with torch.no_grad():
        datum = {GRADIENT: like, **{name: torch.tensor(0.5, device=like.device) for name in rates}}
        with Unrecorded(shapes=True):
            flat = trees.flatten(update, update.init(datum, (like,)))
        numbers = tuple(n for n, x in flat.items() if (trees.responds(n) if stack else is_number(n, x)))
        shaped = tuple(n for n in flat if n not in numbers and not trees.counts(n))
        counts = {n: torch.ones_like(x) for n, x in flat.items() if trees.counts(n)}  # only the first datum is special

        def step(values: dict[str, Tensor]) -> Mapping[str, Tensor]:
            kept = {n: values[n].reshape(flat[n].shape) for n in (*shaped, *numbers)}
            state = trees.unflatten(update, {**kept, **counts}, values[PARAMETER])
            g = -values[GRADIENT] if maximize else values[GRADIENT]
            signal = {GRADIENT: g, **{name: values[name] for name in rates}}
            state, out = update.step(state, {**signal, SEEN: values[COUNT]} if counted else signal)
            after = trees.flatten(update, state)
            return {
                PARAMETER: out.weights[0],
                **{n: after[n] for n in shaped},
                **{n: after[n].reshape(()) for n in numbers},
            }

        examples = {PARAMETER: like, GRADIENT: like, **{n: flat[n] for n in shaped}} if stack else None
        try:
            return trace(step, (PARAMETER, GRADIENT, *shaped), (*numbers, *rates, *counted), examples)
        except NotElementwise as error:
            return f"is no program: {error}"


def is_number(name: str, x: Tensor) -> bool:
    """Whether what a state has under this name is one number that is no count."""
    return x.numel() == 1 and not trees.counts(name)


def first_is_special(update: StateUpdate) -> bool:
    """Whether the first datum is treated unlike the others, which the program is about."""
    return any(part.parts().step.start in ("first", "second") for part in parts_of(update))


@fact
def schedule(update: StateUpdate, maximize: bool) -> Schedule:
    """The multi-tensor form of a program."""
    found = program(update, maximize)
    assert found is not None
    return Schedule(found, keep=(GRADIENT,))


@fact
def _without(update: StateUpdate, maximize: bool, zero: frozenset[str]) -> Schedule:
    """The same where these numbers are 0, as far as it still makes every state."""
    whole = schedule(update, maximize)
    found = whole.program.without(zero)
    made = all(isinstance(found.outputs[n], int) for n in whole.names if n in found.outputs)
    return Schedule(found, keep=(GRADIENT,)) if made else whole


# ---- batches ---------------------------------------------------------------------------------------------------------


@final
class Numbers:
    """What the states of parameters that step together have besides their shaped tensors: counts, and equal numbers.

    Members' own are views of one tensor each, so that one operation moves them all.
    """

    def __init__(self, program: Program, states: list[dict[str, Tensor]], how: How) -> None:
        self.names = [n for n, i in program.inputs.items() if n in program.outputs and not program.shaped(i)]
        self.counted = COUNT in program.inputs
        self.counts = together(states, [n for n in states[0] if trees.counts(n)])  # the parameter's own is the first
        self.copies = {n: together(states, [n]) for n in self.names}
        self.held, self.versions = self._read() if how == "host" else ({}, [])

    def _read(self) -> tuple[dict[str, float], list[int]]:
        """The numbers of the state, on the host, and which versions of them these are."""
        return {n: float(x[0]) for n, x in self.copies.items()}, list(map(_version, self.copies.values()))

    def given(self, rates: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers that a program is given, on the host, with rates as they are."""
        if list(map(_version, self.copies.values())) != self.versions:  # a step that a flag called off was put back
            self.held, self.versions = self._read()
        own = {COUNT: self.counts[0].item()} if self.counted else {}
        return {**self.held, **rates, **own}

    def take(self, program: Program, values: Sequence[float]) -> None:
        """The numbers that it leaves."""
        for name in self.names:
            value = program.outputs[name]
            exact = values[value] if isinstance(value, int) else value
            self.copies[name].fill_(exact)
            self.held[name] = rounded(exact, self.copies[name].dtype)  # as a resumed run will read it
        self.versions = list(map(_version, self.copies.values()))

    def beside(self, rates: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """The numbers that a program is given, beside the tensors: nothing waits for a device."""
        like = self.counts
        given = {n: x[0].to(torch.float64) for n, x in self.copies.items()}
        for n, x in rates.items():
            given[n] = number_on(like.device, x)
        if self.counted:
            given[COUNT] = self.counts[0].to(torch.float64)
        return given

    def put(self, program: Program, values: Sequence[float | Tensor]) -> None:
        """The numbers that it leaves there."""
        for name in self.names:
            value = program.outputs[name]
            exact = values[value] if isinstance(value, int) else value
            self.copies[name].copy_(exact) if isinstance(exact, Tensor) else self.copies[name].fill_(exact)


@final
class Batch(Kept):
    """Parameters that step together: one dtype, one device, the same numbers in their states.

    how: "host" computes the numbers of a step on the host, "device" beside the tensors, so that nothing waits for the
    device and a step can be captured, and "fused" is one generated kernel, for which the counts are on the device too.
    Where generated kernels run, "host" is that kernel as well: it has the counts from a copy, and keeps the numbers.
    """

    def __init__(
        self,
        update: StateUpdate,
        maximize: bool,
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        how: How = "host",
        streams: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        """streams: of random bits, if parameters are rounded at random."""
        self.schedule = schedule(update, maximize)
        self.reduced = functools.partial(_without, update, maximize)
        self.hosted = how == "host"  # where the counts are
        if generated.no_kernel(how, parameters[0].device, all(map(is_plain, parameters))) is None:
            how = "fused"
        self.parameters, self.states, self.how, self.streams, self.seed = parameters, states, how, streams, seed
        names = self.schedule.names
        self.numbers = Numbers(self.schedule.program, states, how)
        self.forms = stored.forms_of(states[0])
        self.coded = {n: f for n, f in self.forms.items() if n != PARAMETER}
        self.shapes = [real(p).shape for p in parameters]
        self.wide = torch.promote_types(real(parameters[0]).dtype, torch.float32)
        if how == "fused":
            self.keep(parameters, states)
            self.kernel = self._kernel()
            return
        # a parameter of 16 bits, or without one run of memory, is stepped as a float32 or contiguous copy
        self.whole = all(p.is_contiguous() and real(p).dtype == self.wide for p in parameters)
        own = self.schedule.library is not None
        sizes, once = [p.numel() for p in map(real, parameters)], own or not parameters[0].is_cpu
        # small ones first, where they stand together; all in one call where memory is passed once anyway
        order = sorted(range(len(sizes)), key=lambda i: sizes[i] > SMALL)
        cut = blocks([sizes[i] for i in order], 1 << 62 if once else BLOCK)
        self.cut = [[(order[i], first, end) for i, first, end in group] for group in cut]
        self.uncut = [all(b - a == self.shapes[i].numel() for i, a, b in group) for group in self.cut]
        kept = [n for n in names if n not in (PARAMETER, GRADIENT, *self.coded)]
        self.shown = [real(p).detach() for p in parameters]
        alone = self.coded or self.schedule.library is not None or not (self.whole and parameters[0].is_cpu)
        joined = [] if alone else [b for b in range(len(self.cut)) if self._small(b)]
        for b in joined:
            join([states[i] for i, _, _ in self.cut[b]], kept)
        self.keep(parameters, states)
        self.views: dict[str, Any] = {n: self._blocks([s[n] for s in states]) for n in kept}
        if self.whole:
            self.views[PARAMETER] = self._blocks(self.shown)
        self.joined = Joined(self.views, joined)
        # whether torch's own operation for the whole program can have what is kept
        self.fits = parameters[0].is_cpu and all(x.is_contiguous() for v in self.views.values() for xs in v for x in xs)

    @uncompiled(recursive=False)
    def step(
        self, rates: Mapping[str, float | Tensor], found: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """One datum for every parameter. found, scale: of a gradient scaler, for fused batches."""
        if self.how == "fused":
            self._launch(rates, found, scale)
        elif self.how == "device":
            self._on_device(rates)
        else:
            self._on_host({n: float(x) for n, x in rates.items()})

    @uncompiled()
    def _on_host(self, rates: Mapping[str, float]) -> None:
        zero = frozenset(n for n, x in rates.items() if x == 0.0)
        schedule = self.reduced(zero) if zero else self.schedule
        values = schedule.program.numbers(self.numbers.given(rates))
        self._run(schedule, values)
        self.numbers.take(schedule.program, values)

    def _on_device(self, rates: Mapping[str, float | Tensor]) -> None:
        values = self.schedule.program.tensors(self.numbers.beside(rates))
        self._run(self.schedule, values)
        self.numbers.put(self.schedule.program, values)

    def _run(self, schedule: Schedule, values: Sequence[float | Tensor]) -> None:
        """The program over all blocks, given its numbers."""
        gradients: list[Tensor] = [p.grad for p in self.parameters]  # type: ignore[misc]
        if set(map(_DTYPE, gradients)) != {self.wide}:
            gradients = [real(g).to(self.wide) for g in gradients]
        lists = {**self.views, GRADIENT: self._pieces(gradients)}
        self.joined.enter(lists[GRADIENT])
        fits = self.fits and all(map(Tensor.is_contiguous, gradients))
        copies: list[Tensor] = []
        if not self.whole:
            copies = [self._copy(p, s) for p, s in zip(self.parameters, self.states, strict=True)]
            lists[PARAMETER] = self._blocks(copies)
        decoded: dict[str, list[Tensor]] = {}
        for name in self.coded:
            decoded[name] = [stored.opened(s)[name].contiguous() for s in self.states]
            lists[name] = self._blocks(decoded[name])
        schedule.over(zip(*(lists[n] for n in schedule.names), strict=True), values, fits)
        self.joined.leave()
        self.numbers.counts.add_(1)
        for i, copy in enumerate(copies):
            parameter, state = self.parameters[i], self.states[i]
            random = None if self.streams is None else (state[trees.COUNT], self.streams[i], self.seed)
            stored.write(real(parameter), copy, state, random)
        for name, tensors in decoded.items():
            for state, x in zip(self.states, tensors, strict=True):
                code, unit = FORMS[self.coded[name]].encode(x.reshape(-1), None)
                state[name].copy_(code.view(x.shape))
                state[name + UNIT].copy_(unit)

    def _copy(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        if PARAMETER in self.forms:
            return stored.weights(parameter, state)
        return copied(real(parameter), self.wide)

    def _blocks(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        return [[self._entries(tensors[i], i, first, end) for i, first, end in group] for group in self.cut]

    def _small(self, block: int) -> bool:
        return self.uncut[block] and small([size for _, _, size in self.cut[block]])

    def _pieces(self, gradients: list[Tensor]) -> list[list[Tensor]]:
        """The same of gradients, which have the shapes of their parameters."""
        return [
            [gradients[i] if whole else self._entries(gradients[i], i, a, b) for i, a, b in group]
            for group, whole in zip(self.cut, self.uncut, strict=True)
        ]

    def _entries(self, x: Tensor, index: int, first: int, end: int) -> Tensor:
        """A tensor in the shape of its parameter, or a piece of it."""
        shape = self.shapes[index]
        if end - first < shape.numel():
            return x.reshape(-1)[first:end]
        return x if x.shape == shape else x.view(shape)

    # ---- one kernel ----------------------------------------------------------------------------------------------

    def _kernel(self) -> Any:
        from axes.programs.fused import Fused, columns  # triton is imported on first use

        program = self.schedule.program
        own = [n + suffix for n, suffix in columns(program, self.forms) if n not in (PARAMETER, GRADIENT)]
        tensors = {n: [s[n] for s in self.states] for n in own}
        if PARAMETER in self.forms:
            tensors[PARAMETER + LOW] = [s[PARAMETER + LOW] for s in self.states]
        shown = [real(p).detach() for p in self.parameters]
        tensors[PARAMETER] = [x if fits_kernels(x) else copied(x, x.dtype) for x in shown]
        pairs = [(x, y) for x, y in zip(shown, tensors[PARAMETER], strict=True) if x is not y]
        self.shown, self.inside = [x for x, _ in pairs], [y for _, y in pairs]  # what is stepped as a copy
        counts = self.numbers.counts.view(-1)
        counts = counts.to(shown[0].device, copy=True) if self.hosted else counts
        return Fused(program, tensors, self.forms, self.numbers.copies, counts, self.streams, self.seed)

    @uncompiled()
    def _launch(self, rates: Mapping[str, float | Tensor], found: Tensor | None, scale: Tensor | None) -> None:
        gradients = [real(g) for p in self.parameters if (g := p.grad) is not None]
        if any(g.dtype != gradients[0].dtype for g in gradients):
            gradients = [g.to(self.wide) for g in gradients]
        gradients = [g if fits_kernels(g) else copied(g, g.dtype) for g in gradients]
        if self.inside:
            torch._foreach_copy_(self.inside, self.shown)
        numbers = {n: float(x) if isinstance(x, Tensor) and x.device.type == "cpu" else x for n, x in rates.items()}
        self.kernel.step(gradients, numbers, found, scale)
        if self.inside:
            torch._foreach_copy_(self.shown, self.inside)
        if self.hosted:
            self.numbers.counts.add_(1)


def together(states: list[dict[str, Tensor]], names: list[str]) -> Tensor:
    """Tensors of one entry as one tensor, and the states' own as views of it, name by name."""
    whole = torch.stack([s[n].reshape(()) for n in names for s in states])
    views = iter(whole.unbind())
    for n in names:
        for s in states:
            s[n] = next(views).view(s[n].shape)
    return whole


def join(states: list[dict[str, Tensor]], names: list[str]) -> None:
    """Lay the tensors of each name out one behind the other."""
    for name in names:
        for s, x in zip(states, behind_one_another([s[name] for s in states]), strict=True):
            s[name] = x


def _version(x: Tensor) -> int:
    """Another number after every change."""
    return 0 if x.is_inference() else x._version


def _aligned(x: Tensor) -> bool:
    """Whether a kernel may read 16 bytes at a time."""
    return x.data_ptr() % 16 == 0


def fits_kernels(x: Tensor) -> bool:
    """Whether a generated kernel may be given a tensor as it is."""
    return x.is_contiguous() and _aligned(x)


def rounded(x: float, dtype: torch.dtype) -> float:
    """A number as a tensor of this dtype keeps it."""
    if dtype == torch.float32:  # a tensor takes ten times as long
        return float(numpy.float32(x))
    return x if dtype == torch.float64 else float(torch.tensor(x, dtype=dtype))


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that a program can be given in the place of one that it cannot."""
    return x.detach().to(dtype, memory_format=torch.contiguous_format, copy=True)


def start(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """A first state whose tensors are its own: aligned, and none shares memory with the parameter or another."""
    seen = {parameter.untyped_storage().data_ptr()}
    out = {}
    for name, x in state.items():
        place = x.untyped_storage().data_ptr()
        shared = place in seen or not x.is_contiguous() or (x.numel() > 1 and not _aligned(x))
        out[name] = x.clone(memory_format=torch.contiguous_format) if shared else x
        seen.add(place)
    return out
