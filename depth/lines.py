"""Reads and writes by kernels: nothing is read on the host, so that a call like one before does the same again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from axes.core.rates import Signal
from axes.depth import kernels
from axes.kernels.common.repeated import repeated
from axes.routes.precision import own_precision

if TYPE_CHECKING:
    from axes.depth.base import DepthMixer

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


__all__ = ["WRITES", "by_line", "read_by_kernels", "whole", "write_by_kernels", "write_then_read_by_kernels"]
