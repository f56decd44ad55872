"""Sublayers one after another in their mixers, and their streams made again in the backward where that is asked for.

    X_l+1 = write(X_l, y_l),   y_l = f_l(x_l),   x_l = read(X_l)

Streams are n times as wide as what a sublayer sees, and every read and write keeps them for its backward. Of a group
of sublayers those that enter it are enough: with the outputs y of its sublayers, which are kept, its reads and writes
run again. Sublayers do not: what they keep is kept as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from axes.depth.base import DepthMixer, Streams
from axes.depth.lines import Before
from axes.errors import ShapeError
from axes.kernels.common.repeated import around

Sublayer = Callable[[Tensor], Tensor]  # what it reads (B, T, d) -> y (B, T, d)


def through(
    sublayers: Sequence[Sublayer], mixers: Sequence[DepthMixer], streams: Streams, recompute: int = 0,
    before: Sequence[Before] | None = None,
) -> Streams:  # fmt: skip
    """The streams behind the last of the sublayers, each in its mixer.

    Args:
        sublayers: called once each, in order.
        streams: those before the first, as `expand` or another call returned them.
        recompute: so many sublayers are a group: the backward keeps the streams that enter it, and runs its reads and
            writes again for all others. 0 keeps what every read and write wants. Gradients are the same bits. Such
            groups are not compiled, and their reads and writes follow no lines (`axes.kernels.common.line`).
        before: what stands between each mixer's read and its sublayer, a norm by kernels; without recompute.

    Raises:
        ShapeError: there are not as many mixers as sublayers, recompute is no number of sublayers, or there are both
            groups and what stands before sublayers.

    Source: mHC (Xie et al. 2025), section 4.3.2. Differs: torch's checkpoint of a group, whose sublayers hand on what
    they returned before.
    """
    if len(sublayers) != len(mixers) or not sublayers:
        raise ShapeError(f"through: give a mixer for every sublayer, got {len(mixers)} for {len(sublayers)}")
    require_recompute("through", recompute)
    if before is not None and (recompute or len(before) != len(mixers)):
        raise ShapeError("through: what stands before sublayers is given for each of them, and without recompute")
    if not recompute or not torch.is_grad_enabled():
        return _at_once(sublayers, mixers, streams, before)
    return _in_groups(sublayers, mixers, streams, recompute)


@_disable_dynamo  # a compiler decides itself what is kept: it leaves this as it is
def _in_groups(
    sublayers: Sequence[Sublayer], mixers: Sequence[DepthMixer], streams: Streams, recompute: int
) -> Streams:
    hooks = around()
    for first in range(0, len(mixers), recompute):
        group = slice(first, first + recompute)
        once = [_Once(f, hooks) for f in sublayers[group]]
        streams = checkpoint(_at_once, once, mixers[group], streams, use_reentrant=False, preserve_rng_state=False)
    return streams


def require_recompute(who: str, recompute: int) -> None:
    """ShapeError unless it is a number of sublayers, or 0."""
    if not isinstance(recompute, int) or isinstance(recompute, bool) or recompute < 0:
        raise ShapeError(
            f"{who}: recompute must be how many sublayers keep the streams that enter them alone, or 0 to keep all "
            f"streams, got {recompute!r}"
        )


def _at_once(
    sublayers: Sequence[Sublayer], mixers: Sequence[DepthMixer], streams: Streams,
    before: Sequence[Before] | None = None,
) -> Streams:  # fmt: skip
    x, coefficients = mixers[0].read(streams)
    x = x if before is None else before[0](x)
    ahead = [None] * len(mixers) if before is None else [*before[1:], None]
    for f, mixer, following, norm in zip(sublayers, mixers, _followers(mixers), ahead, strict=True):
        y = f(x)
        if following is None:
            streams = mixer.write(streams, y, coefficients)
        else:
            streams, x, coefficients = mixer.write_then_read(streams, y, coefficients, following, norm)
    return streams


def _followers(mixers: Sequence[DepthMixer]) -> Iterator[DepthMixer | None]:
    yield from mixers[1:]
    yield None


@final
class _Once:
    """A sublayer that is run once, and hands on what it returned when its group is run again.

    It keeps no graph, and no function that may hold one: the graph holds this.
    """

    def __init__(self, f: Sublayer, hooks: AbstractContextManager[Any]) -> None:
        self.f: Sublayer | None = f
        self.hooks = hooks  # of what is kept: those around the stack, since its checkpoint is for reads and writes

    def __call__(self, x: Tensor) -> Tensor:
        if self.f is not None:
            with self.hooks:
                y = self.f(x)
            self.f, self.y, self.version, self.record = None, y.detach(), y._version, y.requires_grad
            return y
        if self.y._version != self.version:
            raise RuntimeError(
                "what a sublayer returned was modified by an inplace operation after its write, and the streams of its "
                "group are to be made of it again: modify a copy, or give recompute=0"
            )
        return self.y.detach().requires_grad_(self.record)


__all__ = ["Sublayer", "require_recompute", "through"]
