"""Programs over lists of tensors: one kernel on CUDA devices, else torch's multi-tensor operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.optim.engine import generated
from axes.optim.engine.generated import GRADIENT
from axes.optim.engine.kept import number_on
from axes.optim.engine.together import copied, fits_kernels
from axes.programs.batched import BLOCK, Schedule, blocks
from axes.programs.program import COUNT, PARAMETER, Program
from axes.programs.small import Joined, small


@final
class ListProgram:
    """A program over lists of contiguous tensors: one kernel on CUDA devices, else torch's multi-tensor operations."""

    def __init__(self, found: Program, tensors: Mapping[str, list[Tensor]], squares: bool = False) -> None:
        """tensors: by name, all inputs but the gradients.

        squares: the kernel keeps sums of squares of the parameters that it writes, for `squares_of`.
        """
        self.program = found
        like = tensors[PARAMETER]
        self.kernel: Any = None
        fits = COUNT not in found.inputs and all(fits_kernels(x) for xs in tensors.values() for x in xs)
        if generated.no_kernels(like[0].device) is None and fits:
            from axes.programs.fused import Fused  # triton is imported on first use

            unread = torch.zeros(1, dtype=torch.int64, device=like[0].device)
            self.kernel = Fused(found, tensors, {}, {}, unread, squares=squares)
            return
        self.schedule = Schedule(found, keep=(GRADIENT,))
        size = BLOCK if like[0].is_cpu else 1 << 62
        self.blocks = list(blocks([x.numel() for x in like], size))
        self.views = {n: self._cut(xs) for n, xs in tensors.items()}  # contiguous, as gradients are when they come
        self.fits = like[0].is_cpu
        together = []
        if self.fits and self.schedule.library is None:
            uncut = (all(end - a == like[i].numel() for i, a, end in group) for group in self.blocks)
            together = [b for b, whole in enumerate(uncut) if whole and small([x[2] for x in self.blocks[b]])]
        self.joined = Joined(self.views, together)

    def step(self, gradients: Sequence[Tensor], rates: Mapping[str, float | Tensor]) -> None:
        if self.kernel is not None:
            self.kernel.step([g if fits_kernels(g) else copied(g, g.dtype) for g in gradients], rates)
            return
        lists = {**self.views, GRADIENT: self._cut(gradients)}
        self.joined.enter(lists[GRADIENT])
        values = values_of(self.program, rates, gradients[0].device)
        self.schedule.over(zip(*(lists[n] for n in self.schedule.names), strict=True), values, self.fits)
        self.joined.leave()

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


__all__ = ["ListProgram", "readable", "values_of", "writable"]
