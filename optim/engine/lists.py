"""Programs over lists of tensors: one kernel on CUDA devices, else torch's multi-tensor operations, block by block.

On a CPU they are one loop of C once these have moved many entries (`loops`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from axes.optim.engine import generated
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.kept import number_on
from axes.optim.engine.loops import Loops
from axes.optim.engine.together import copied, fits_kernels
from axes.programs.batched import BLOCK, Schedule, blocks
from axes.programs.program import COUNT, PARAMETER, Program
from axes.programs.small import SMALL, Joined, behind_one_another, flat, small

NOTHING: Mapping[str, Sequence[Tensor]] = MappingProxyType({})


@final
class Lists:
    """Lists of tensors that a program steps block by block: pieces of large tensors, and many small ones as one."""

    def __init__(
        self,
        schedule: Schedule,
        like: Sequence[Tensor],
        fixed: Mapping[str, Sequence[Tensor]],
        states: Sequence[dict[str, Tensor]] = (),
        names: Collection[str] = (),
        joins: bool = True,
        alike: bool = False,
    ) -> None:
        """like: what has the shapes of the parameters. fixed: tensors by name, the same ones for every step; so are
        those that the states have under these names, which may be laid out anew. joins: small ones may be stepped as
        one. alike: gradients have these shapes, else as many entries.
        """
        self.schedule = schedule
        self.shapes = [x.shape for x in like]
        sizes, once = [x.numel() for x in like], schedule.library is not None or not like[0].is_cpu
        # small ones first, where they stand together; all in one call where memory is passed once anyway
        order = sorted(range(len(sizes)), key=lambda i: sizes[i] > SMALL)
        cut = blocks([sizes[i] for i in order], 1 << 62 if once else BLOCK)
        self.cut = [[(order[i], first, end) for i, first, end in group] for group in cut]
        self.uncut = [all(b - a == sizes[i] for i, a, b in group) for group in self.cut]
        joined = [b for b in range(len(self.cut)) if joins and not once and self._small(b)]
        for b in joined if names else ():
            _join([states[i] for i, _, _ in self.cut[b]], names)
        self.loops = Loops.over({**fixed, **{n: [s[n] for s in states] for n in names}}, states)
        self.views = {n: self.of(xs) for n, xs in fixed.items()}
        self.views |= {n: self.of([s[n] for s in states]) for n in names}
        self.joined = Joined(self.views, joined)
        # of whose gradients no view is needed: one of a thousand tensors takes as long as the arithmetic of all
        self.bare = [whole and (alike or b in joined) for b, whole in enumerate(self.uncut)]
        # whether torch's own operation for the whole program can have what is kept
        kept = (x for view in self.views.values() for xs in view for x in xs)
        self.fits = like[0].is_cpu and all(x.is_contiguous() for x in kept)

    def of(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Tensors with as many entries as the parameters, in blocks."""
        return [[self._entries(tensors[i], i, a, b) for i, a, b in group] for group in self.cut]

    def run(
        self,
        gradients: Sequence[Tensor],
        values: Sequence[float | Tensor],
        schedule: Schedule | None = None,
        others: Mapping[str, Sequence[Tensor]] = NOTHING,
    ) -> None:
        """One step, given the numbers of a program: of its own by default, or of another on the same tensors.

        others: what is there for this step only.
        """
        schedule = schedule or self.schedule
        if self.loops is not None and not others and self.loops.step(schedule, gradients, values):
            return
        lists: dict[str, list[list[Tensor]]] = {**self.views, GRADIENT: self._pieces(gradients)}
        self.joined.enter(lists[GRADIENT])
        for name, tensors in others.items():
            lists[name] = self.of(tensors)
        fits = schedule.library is not None and self.fits and all(map(Tensor.is_contiguous, gradients))
        schedule.over(zip(*(lists[n] for n in schedule.names), strict=True), values, fits)
        self.joined.leave()

    def _small(self, block: int) -> bool:
        return self.uncut[block] and small([size for _, _, size in self.cut[block]])

    def _pieces(self, gradients: Sequence[Tensor]) -> list[list[Tensor]]:
        return [
            [gradients[i] if bare else self._entries(gradients[i], i, a, b) for i, a, b in group]
            for group, bare in zip(self.cut, self.bare, strict=True)
        ]

    def _entries(self, x: Tensor, index: int, first: int, end: int) -> Tensor:
        """A tensor in the shape of its parameter, or a piece of it."""
        shape = self.shapes[index]
        if end - first < shape.numel():
            return x.reshape(-1)[first:end]
        return x if x.shape == shape else x.view(shape)


@final
class ListProgram:
    """A program over lists of contiguous tensors: one kernel on CUDA devices, else torch's multi-tensor operations."""

    def __init__(
        self,
        found: Program,
        fixed: Mapping[str, list[Tensor]],
        states: Sequence[dict[str, Tensor]] = (),
        names: Collection[str] = (),
        squares: bool = False,
    ) -> None:
        """fixed: by name, all inputs but the gradients, and but those that the states have under these names.

        squares: the kernel keeps sums of squares of the parameters that it writes, for `squares_of`.
        """
        self.program = found
        like, tensors = fixed[PARAMETER], {**fixed, **{n: [s[n] for s in states] for n in names}}
        self.kernel: Any = None
        fits = COUNT not in found.inputs and all(fits_kernels(x) for xs in tensors.values() for x in xs)
        if generated.no_kernels(like[0].device) is None and fits:
            from axes.programs.fused import Fused  # triton is imported on first use

            unread = torch.zeros(1, dtype=torch.int64, device=like[0].device)
            self.kernel = Fused(found, tensors, {}, {}, unread, squares=squares)
            return
        self.lists = Lists(Schedule(found, keep=(GRADIENT,)), like, fixed, states, names)

    def step(self, gradients: Sequence[Tensor], rates: Mapping[str, float | Tensor]) -> None:
        if self.kernel is not None:
            self.kernel.step([g if fits_kernels(g) else copied(g, g.dtype) for g in gradients], rates)
            return
        self.lists.run(gradients, values_of(self.program, rates, gradients[0].device))

    def squares_of(self, stacks: Sequence[Tensor]) -> list[Tensor] | None:
        """Where the kernel keeps sums of squares of its parameters, the members of these stacks in their order.

        (members, chunks of one) for each stack; None where nobody asked for them or no kernel runs.
        """
        if self.kernel is None or self.kernel.squares is None:
            return None
        sizes = [(len(x), -(-x[0].numel() // self.kernel.block)) for x in stacks]
        parts = self.kernel.squares.split([members * chunks for members, chunks in sizes])
        return [x.view(size) for x, size in zip(parts, sizes, strict=True)]


def _join(states: Sequence[dict[str, Tensor]], names: Collection[str]) -> None:
    """Lay the tensors of each name out one behind the other, unless another program of the step has done so."""
    for name in names:
        tensors = [s[name] for s in states]
        if flat(tensors) is None:
            for s, x in zip(states, behind_one_another(tensors), strict=True):
                s[name] = x


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


__all__ = ["ListProgram", "Lists", "readable", "values_of", "writable"]
