"""What steps of parameters that step together are made of: the program of a tuple's step, and the numbers it is given.

What the interpreter does parameter by parameter is traced once (`axes.programs`). The state dict is the interpreter's,
name by name, so that all of them can take turns.
"""

from __future__ import annotations

import functools
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
from axes.optim.engine import trees
from axes.optim.engine.capabilities import keyed, mixes, parts_of, vectors
from axes.optim.engine.generated import GRADIENT, How
from axes.optim.engine.kept import number_on
from axes.programs.batched import Schedule
from axes.programs.program import COUNT, PARAMETER, NotElementwise, Program, Unrecorded, trace

P = ParamSpec("P")
R = TypeVar("R")
_compiling, _follower = torch.compiler.is_compiling, eval_frame.get_eval_frame_callback
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
def schedule_without(update: StateUpdate, maximize: bool, zero: frozenset[str]) -> Schedule:
    """The same where these numbers are 0, as far as it still makes every state."""
    whole = schedule(update, maximize)
    found = whole.program.without(zero)
    made = all(isinstance(found.outputs[n], int) for n in whole.names if n in found.outputs)
    return Schedule(found, keep=(GRADIENT,)) if made else whole


# ---- numbers ---------------------------------------------------------------------------------------------------------


@final
class Numbers:
    """What the states of parameters that step together have besides their shaped tensors: counts, and equal numbers.

    Members' own are views of one tensor each, so that one operation moves them all. how: on the "host", where they are
    also kept as floats, or beside the tensors, so that nothing waits for a device.
    """

    def __init__(self, program: Program, states: list[dict[str, Tensor]], how: How) -> None:
        self.names = [n for n, i in program.inputs.items() if n in program.outputs and not program.shaped(i)]
        self.counted = COUNT in program.inputs
        self.counts = together(states, [n for n in states[0] if trees.counts(n)])  # the parameter's own is the first
        self.copies = {n: together(states, [n]) for n in self.names}
        self.hosted = how == "host"
        self.held, self.versions = self._read() if self.hosted else ({}, [])

    def _read(self) -> tuple[dict[str, float], list[int]]:
        """The numbers of the state, on the host, and which versions of them these are."""
        return {n: float(x[0]) for n, x in self.copies.items()}, list(map(_version, self.copies.values()))

    def given(self, rates: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers that a program is given; on the host with rates as they are."""
        if not self.hosted:
            return self._beside(rates)
        if list(map(_version, self.copies.values())) != self.versions:  # a step that a flag called off was put back
            self.held, self.versions = self._read()
        own = {COUNT: self.counts[0].item()} if self.counted else {}
        return {**self.held, **rates, **own}

    def _beside(self, rates: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        like = self.counts
        given = {n: x[0].to(torch.float64) for n, x in self.copies.items()}
        for n, x in rates.items():
            given[n] = number_on(like.device, x)
        if self.counted:
            given[COUNT] = self.counts[0].to(torch.float64)
        return given

    def of(self, program: Program, given: Mapping[str, Any]) -> Sequence[Any]:
        """All numbers of a program that is given these."""
        return program.numbers(given) if self.hosted else program.tensors(given)

    def take(self, program: Program, values: Sequence[float | Tensor]) -> None:
        """The numbers that it leaves."""
        for name in self.names:
            value = program.outputs[name]
            exact = values[value] if isinstance(value, int) else value
            if isinstance(exact, Tensor):
                self.copies[name].copy_(exact)
                continue
            self.copies[name].fill_(exact)
            if self.hosted:
                self.held[name] = rounded(exact, self.copies[name].dtype)  # as a resumed run will read it
        if self.hosted:
            self.versions = list(map(_version, self.copies.values()))


def together(states: list[dict[str, Tensor]], names: list[str]) -> Tensor:
    """Tensors of one entry as one tensor, and the states' own as views of it, name by name."""
    whole = torch.stack([s[n].reshape(()) for n in names for s in states])
    views = iter(whole.unbind())
    for n in names:
        for s in states:
            s[n] = next(views).view(s[n].shape)
    return whole


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
