"""Where a program over lists of tensors is a loop of C, and why it is not elsewhere.

Nobody asks for a loop, so nobody waits for a compiler where a few steps are all there are: it is made once what steps
together has moved WORTH entries. That is a function of the state, not of the process, so that a run that is resumed
goes on as it would have.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.optim.engine import trees
from axes.optim.engine.generated import GRADIENT, is_plain
from axes.optim.engine.gradients import Gradients
from axes.programs import c_entries, c_library
from axes.programs.batched import Schedule
from axes.programs.c_entries import REALS, SHORT, Loop
from axes.programs.program import PARAMETER

WORTH = 1 << 24  # entries moved, by all data, from which on a loop is compiled: it takes 0.2 to 1 s
_DTYPE = operator.attrgetter("dtype")


def no_loops(device: torch.device, dtype: torch.dtype, seen: int) -> str | None:
    """Why no program is a loop, or None. seen: entries that have moved so far."""
    if device.type != "cpu":
        return f"loops of C run on a CPU, not on {device}"
    if dtype not in REALS:
        return f"loops of C are for float32 and float64, not for {dtype}"
    if seen < WORTH:
        return f"it is compiled once what steps together has moved {WORTH:,} entries"
    return c_library.no_compiler()


@functools.cache
def unable(text: str) -> str | None:
    """Why a text makes no function, said once, or None: torch's operations do the same then."""
    try:
        c_library.library(text, *c_entries.OPTIONS)
    except (AxesError, OSError) as error:  # a folder for what is temporary that is full, say
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"no loop of C, torch's operations step instead: {reason}", stacklevel=2)
        return reason
    return None


def loop(text: str, sizes: Sequence[int], rows: int, numbers: int = 0) -> Loop | None:
    """A loop over so many lists of these sizes, given numbers, or None where none is made."""
    return Loop(text, sizes, rows, numbers) if unable(text) is None else None


@final
class Loops:
    """Lists of contiguous tensors on a CPU, with a loop of C for every schedule over them."""

    @staticmethod
    def over(tensors: Mapping[str, Sequence[Tensor]], states: Sequence[Mapping[str, Tensor]]) -> Loops | None:
        """tensors: by name, those of every step, all but the gradients. None where a loop cannot be given them."""
        like = tensors.get(PARAMETER, ())
        if not (like and states) or not all(
            x.is_cpu and x.is_contiguous() and is_plain(x) for xs in tensors.values() for x in xs
        ):
            return None
        kinds = [set(map(_DTYPE, xs)) for xs in tensors.values()]
        real = next((x for x in REALS if {x} in kinds), None)
        if real is None or not all(kind in ({real}, {SHORT}) for kind in kinds):
            return None
        sizes = [x.numel() for x in like]
        if any([x.numel() for x in xs] != sizes for xs in tensors.values()):
            return None
        return Loops(tensors, real, sizes, max(int(s[trees.COUNT]) for s in states))

    def __init__(
        self, tensors: Mapping[str, Sequence[Tensor]], real: torch.dtype, sizes: list[int], data: int
    ) -> None:
        """real: in which entries are computed. data: that they have seen."""
        self.tensors, self.real, self.sizes, self.total = tensors, real, sizes, sum(sizes)
        self.parameters = list(tensors[PARAMETER])
        self.short = [name for name, xs in tensors.items() if xs[0].dtype == SHORT]
        self.device = self.parameters[0].device
        self.seen = data * self.total
        self.single = [i for i, size in enumerate(sizes) if size == 1]
        self.made: dict[tuple[Schedule, bool], Loop | None] = {}  # and whether gradients are short

    def step(self, schedule: Schedule, gradients: Sequence[Tensor], values: Sequence[Any]) -> bool:
        """One datum by a loop; False where there is none, and nothing was done. gradients: of one dtype."""
        self.seen += self.total
        if self.seen - self.total < WORTH or c_library.followed():
            return False
        given = Gradients.of(gradients)
        if not given.readable:
            if set(map(type, given)) != {Tensor}:
                return False
            given = Gradients(g.contiguous() for g in given)
        short = given[0].dtype == SHORT
        if given[0].dtype not in (self.real, SHORT):
            return False
        if (schedule, short) not in self.made:
            self.made[schedule, short] = self._made(schedule, [*self.short, *[GRADIENT] * short])
        found = self.made[schedule, short]
        numbers = self.numbers(schedule, values) if found else []
        if found is None or len(numbers) != found.numbers:  # the others are beside tensors
            return False
        if any(given[i].is_neg() for i in self.single):  # an imaginary part, to be read with another sign
            given = Gradients(g.resolve_neg() for g in given)
        if GRADIENT in schedule.names:
            found.put(schedule.names.index(GRADIENT), given.places)
        found.give(numbers)
        found()
        self.has_moved()
        return True

    def takes(self, gradients: Gradients) -> bool:
        """Whether a loop may read gradients where they are. Some may be None."""
        if not (gradients.readable and gradients.on_cpu and gradients.dtypes == {self.real}):
            return False
        return gradients.sizes == self.sizes and not any(gradients[i].is_neg() for i in self.single)

    @staticmethod
    def numbers(schedule: Schedule, values: Sequence[Any]) -> list[float]:
        """What a loop is given besides tensors: of a step's numbers those that are not beside tensors."""
        return [x for some in schedule.numbers(values) for x in some if isinstance(x, float)]

    def has_moved(self) -> None:
        """Graphs that have kept the parameters must know."""
        torch.autograd.graph.increment_version(self.parameters)

    def _made(self, schedule: Schedule, short: list[str]) -> Loop | None:
        if no_loops(self.device, self.real, self.seen) is not None or c_entries.no_loop(schedule) is not None:
            return None
        if not set(schedule.names) <= {GRADIENT, *self.tensors}:
            return None
        numbers = sum(len(step.numbers) for step in schedule.steps)
        looked = GRADIENT if GRADIENT in schedule.names and GRADIENT not in short else None
        text = c_entries.source(schedule, REALS[self.real], short, looked)
        made = loop(text, self.sizes, len(schedule.names), numbers)
        for row, name in enumerate(schedule.names):
            if made is not None and name != GRADIENT:
                made.put(row, list(map(Tensor.data_ptr, self.tensors[name])))
        return made


__all__ = ["WORTH", "Loops", "loop", "no_loops"]
