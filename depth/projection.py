"""Coefficients that are one projection of the streams of a token: declared by a mixer, computed here or by a kernel.

    entries = scale * f(N(X^) phi^T) + bias         pre = chart(entries)

N divides by the root mean square, f is the identity or tanh, X^ all streams of a token in one row or each by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from axes.core.rates import Signal
from axes.core.state_update import StateUpdate
from axes.depth import kernels
from axes.depth.base import Coefficients, DepthMixer
from axes.depth.lines import whole
from axes.depth.products import project
from axes.routes.choice import Implementation

EPS = 1e-6


class Projection(NamedTuple):
    """What is projected, and which entries are pre.

    phi (C, n d), scale (C) and bias (1, C); where every stream is projected by itself phi (C, d) and bias (n, C).
    chart: how entries make pre. "sigmoid": of the first n, plus floor; "softmax": the first n^2 are a matrix, pre is
        the mean over rows of its softmax along them; "first": every stream's first entry.
    tanh: f.  centred: N subtracts the mean first.
    """

    phi: Tensor
    scale: Tensor
    bias: Tensor
    chart: Literal["sigmoid", "softmax", "first"] = "sigmoid"
    tanh: bool = False
    centred: bool = False
    floor: float = 0.0

    def entries(self, streams: Tensor) -> Tensor:
        """(..., g, C) of streams (..., n, d), in their dtype: g rows of entries a token, those of bias."""
        return self.entries_on(streams)[0]

    def entries_on(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """`entries`, and the streams once more (`axes.depth.products`)."""
        dtype = streams.dtype
        made, again = project(streams, self.phi.to(dtype), EPS, self.centred)
        return self.scale.to(dtype) * (torch.tanh(made) if self.tanh else made) + self.bias.to(dtype), again

    def pre(self, entries: Tensor, n: int) -> Tensor:
        """(..., n) of entries (..., g, C)."""
        if self.chart == "first":
            return entries[..., 0]
        if self.chart == "softmax":
            return entries[..., 0, : n * n].unflatten(-1, (n, n)).softmax(-1).mean(-2)
        shares = torch.sigmoid(entries[..., 0, :n])
        return shares + self.floor if self.floor else shares


class Projected(DepthMixer):
    """A mixer whose coefficients are a `Projection`, and a signal made of its entries; `look` reads by it on a GPU.

    exit_projection: of the weights at the exit, its chart the weights themselves; None for weights of another kind.
    """

    @abstractmethod
    def projection(self) -> Projection: ...

    @abstractmethod
    def signal(self, entries: Tensor) -> Signal: ...

    def signal_by_kernels(self, entries: Tensor) -> Signal:
        """`signal`, of entries on a GPU."""
        return self.signal(entries)

    def exit_projection(self) -> Projection | None:
        return None

    def coefficients(self, streams: Tensor) -> Coefficients:
        projection = self.projection()
        entries = projection.entries(streams)
        return Coefficients(projection.pre(entries, self.streams), self.signal(entries))

    def leave(self, streams: Tensor) -> Tensor:
        projection = self.exit_projection()
        if projection is None:
            return super().leave(streams)
        return projection.pre(projection.entries(streams), self.streams)

    def _seen(self, kept: Tensor, who: Implementation) -> tuple[Tensor, Coefficients]:
        projection = self.projection()
        if who == "torch":
            entries, theta = projection.entries_on(self._wide(kept))
            pre = projection.pre(entries, self.streams)
            x, again = kernels.read(self.update, theta, pre, triton=False)
            return x.to(kept.dtype), Coefficients(pre, self.signal(entries), (kept, again))
        if not kernels.projects(projection.bias):
            return super()._seen(kept, who)
        x, pre, entries, again = kernels.look(kept, projection)
        return x, Coefficients(pre, self.signal_by_kernels(entries), (kept, again))

    def _follow(
        self, writer: StateUpdate, streams: Tensor, signal: Signal
    ) -> tuple[Tensor, Tensor, Tensor, Signal, Tensor | None]:
        projection = self.projection()
        if not kernels.projects(projection.bias):
            return super()._follow(writer, streams, signal)
        after, x, pre, entries = kernels.write_then_look(writer, streams, signal, projection)
        return after, x, pre, whole(self.signal_by_kernels(entries)), None

    def _left(self, kept: Tensor, who: Implementation) -> Tensor:
        projection = self.exit_projection()
        if who == "torch":
            return super()._left(kept, who)
        if projection is None:
            return kernels.read(self.update, kept, self.leave(self._wide(kept[..., :0])), triton=True)[0]
        return kernels.look(kept, projection)[0]


__all__ = ["EPS", "Projected", "Projection"]
