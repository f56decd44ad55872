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
    """What is projected, and which entries are pre and k.

    phi (C, n d), scale (C) and bias (1, C); where every stream is projected by itself phi (C, d) and bias (n, C). Of
    fewer scales each is one of n entries, and the last of all others.
    chart: how entries make pre. "sigmoid": of the first n, plus floor; "softmax": the first n^2 are a matrix, pre is
        the mean over rows of its softmax along them; "first": every stream's first entry.
    writes: whether as many entries behind those of pre make k: "sigmoid": twice that of them; "softmax": the sum over
        columns of a softmax along them.
    tanh: f.  centred: N subtracts the mean first.
    """

    phi: Tensor
    scale: Tensor
    bias: Tensor
    chart: Literal["sigmoid", "softmax", "first"] = "sigmoid"
    writes: bool = False
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
        scale = self._scales(streams.shape[-2]).to(dtype)
        return scale * (torch.tanh(made) if self.tanh else made) + self.bias.to(dtype), again

    def _scales(self, n: int) -> Tensor:
        """Of every entry."""
        scales, entries = self.scale, self.bias.shape[-1]
        if len(scales) == entries:
            return scales
        last = entries - n * (len(scales) - 1)
        each = zip(scales.unbind(), [n] * (len(scales) - 1) + [last], strict=True)
        return torch.cat([scale.expand(size) for scale, size in each])

    def pre(self, entries: Tensor, n: int) -> Tensor:
        """(..., n) of entries (..., g, C)."""
        if self.chart == "first":
            return entries[..., 0]
        if self.chart == "softmax":
            return entries[..., 0, : n * n].unflatten(-1, (n, n)).softmax(-1).mean(-2)
        shares = torch.sigmoid(entries[..., 0, :n])
        return shares + self.floor if self.floor else shares

    def rest(self, entries: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """k (..., n), or without it (..., 0), and the entries (..., g, c) behind those that it is made of."""
        if not self.writes:
            return entries[..., 0, :0], entries
        size = n if self.chart == "sigmoid" else n * n
        own = entries[..., 0, size : 2 * size]
        k = 2 * torch.sigmoid(own) if self.chart == "sigmoid" else own.unflatten(-1, (n, n)).softmax(-2).sum(-1)
        return k, entries[..., 2 * size :]


class Projected(DepthMixer):
    """A mixer whose coefficients are a `Projection`, and a signal made of its entries; `look` reads by it on a GPU.

    exit_projection: of the weights at the exit, its chart the weights themselves; None for weights of another kind.
    """

    @abstractmethod
    def projection(self) -> Projection: ...

    @abstractmethod
    def signal(self, k: Tensor, rest: Tensor) -> Signal:
        """Of what a projection says is k, and of the entries behind it."""

    def exit_projection(self) -> Projection | None:
        return None

    def coefficients(self, streams: Tensor) -> Coefficients:
        projection = self.projection()
        return self._told(projection, projection.entries(streams))

    def leave(self, streams: Tensor) -> Tensor:
        projection = self.exit_projection()
        if projection is None:
            return super().leave(streams)
        return projection.pre(projection.entries(streams), self.streams)

    def _told(self, projection: Projection, entries: Tensor) -> Coefficients:
        n = self.streams
        return Coefficients(projection.pre(entries, n), self.signal(*projection.rest(entries, n)))

    def _seen(self, kept: Tensor, who: Implementation) -> tuple[Tensor, Coefficients]:
        projection = self.projection()
        if who == "torch":
            entries, theta = projection.entries_on(self._wide(kept))
            told = self._told(projection, entries)
            x, again = kernels.read(self.update, theta, told.pre, triton=False)
            return x.to(kept.dtype), told._replace(read=(kept, again))
        if not kernels.projects(projection.bias):
            return super()._seen(kept, who)
        x, pre, k, rest, again = kernels.look(kept, projection)
        return x, Coefficients(pre, self.signal(k, rest), (kept, again))

    def _follow(
        self, writer: StateUpdate, streams: Tensor, signal: Signal
    ) -> tuple[Tensor, Tensor, Tensor, Signal, Tensor | None]:
        projection = self.projection()
        if not kernels.projects(projection.bias):
            return super()._follow(writer, streams, signal)
        after, x, pre, k, rest = kernels.write_then_look(writer, streams, signal, projection)
        return after, x, pre, whole(self.signal(k, rest)), None

    def _left(self, kept: Tensor, who: Implementation) -> Tensor:
        projection = self.exit_projection()
        if who == "torch":
            return super()._left(kept, who)
        if projection is None:
            return kernels.read(self.update, kept, self.leave(self._wide(kept[..., :0])), triton=True)[0]
        return kernels.look(kept, projection)[0]


__all__ = ["EPS", "Projected", "Projection"]
