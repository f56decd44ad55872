"""Reads and writes by kernels: nothing is read on the host, so that a call like one before does the same again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from axes.core.rates import Signal
from axes.depth import kernels
from axes.kernels.common.repeated import repeated
from axes.routes.precision import own_precision

if TYPE_CHECKING:
    from axes.depth.base import DepthMixer

Facts = Callable[[nn.Module], tuple[Hashable, ...]]


@final
class Before(nn.Module):
    """What stands between a mixer's read and its sublayer, `run(module, x, *facts(module))`, done in the read's line.

    run: by kernels, as the read; facts: what it depends on beside the looks of x and of the module.
    """

    def __init__(self, mixer: nn.Module, module: nn.Module, run: Callable[..., Tensor], facts: Facts) -> None:
        super().__init__()
        self.mixer, self.module, self.run, self.facts = mixer, module, run, facts

    def forward(self, x: Tensor) -> Tensor:
        """Behind a read that was not its line."""
        made: Tensor = by_line(self.module, self.run, (x,), *self.facts(self.module))
        return made


WRITES = nn.Module()  # the lines of a write are those of every sublayer: it takes no parameters


def by_line(mixer: nn.Module, run: Callable[..., Any], given: tuple[Tensor, ...], *facts: Hashable) -> Any:
    """run(mixer, *given, *facts), as a line where that can be."""
    follows = not torch.compiler.is_compiling() and given[0].numel()
    return repeated(mixer, run, given, *facts) if follows else run(mixer, *given, *facts)


def read_by_kernels(mixer: DepthMixer, streams: Tensor) -> tuple[Tensor, Tensor, Signal, Tensor | None]:
    """x_in, pre, the signal without v, and the streams once more if the read hands them on."""
    kept = mixer._matrix(streams, "read")
    with own_precision(kept):
        x, (pre, signal, read) = mixer._seen(kept, "triton")
    return x, pre, whole(signal), None if read is None else read[1]


def whole(signal: Signal) -> Signal:
    """As a write takes it: no two of its tensors are of one memory."""
    return {name: c.contiguous() if isinstance(c, Tensor) else c for name, c in signal.items()}


def write_by_kernels(_: nn.Module, streams: Tensor, *rest: Any) -> Tensor:
    """The new streams; rest: a signal's values, its names, and the tuple."""
    *values, names, update = rest
    with own_precision(streams):
        return kernels.write(update.it, streams, dict(zip(names, values, strict=True)), triton=True)


def write_then_read_by_kernels(following: DepthMixer, streams: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The streams that another tuple wrote, and a read of them; rest: a signal's values, its names, and the tuple."""
    *values, names, update = rest
    signal, writer = dict(zip(names, values, strict=True)), update.it
    with own_precision(streams):
        if kernels.normalises(writer) or kernels.normalises(following.update):
            after = kernels.write(writer, streams, signal, triton=True)
            return (after, *read_by_kernels(following, after))
        return following._follow(writer, streams, signal)


def write_then_read_before(before: Before, streams: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The same, and what stands before the sublayer done to what is read; rest: facts behind the others."""
    *given, facts = rest
    after, x, *told = write_then_read_by_kernels(before.mixer, streams, *given)  # type: ignore[arg-type]
    return (after, before.run(before.module, x, *facts), *told)


__all__ = [
    "WRITES",
    "Before",
    "by_line",
    "read_by_kernels",
    "whole",
    "write_by_kernels",
    "write_then_read_before",
    "write_then_read_by_kernels",
]
