"""The blocks of the Mamba line: the value is the convolved input itself, heads share keys and queries.

`SSD` is Mamba-2's (gates from the block's input, norm after the output gate); `Mamba` is the first Mamba's with its
selective state space left open, as Longhorn uses it (keys, queries and gates from the convolved input).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from axes.core.rates import Per
from axes.errors import IllegalUpdate, ShapeError
from axes.routes.packed import Packing
from axes.sequence.blocks import (
    ACTIVATIONS,
    Activation,
    Block,
    BlockModule,
    ShortConvolution,
    build_charts,
    declared_charts,
)
from axes.sequence.by_hand import in_parts, normalised
from axes.sequence.charts import Chart, Factory, Sigmoid, Sizes, TimeStep
from axes.sequence.fused import Declaration, Exit, Matrix, Vector

_OWN = frozenset({"k", "v", "q"})


def _no_vectors(vectors: frozenset[str], block: str) -> None:
    if vectors - _OWN:
        raise IllegalUpdate(f"{block} projects no vectors {sorted(vectors - _OWN)}: use Standard")


def _shared(x: Tensor, heads: int) -> Tensor:
    """(B, T, d) -> (B, T, H, d), the same for every head."""
    return x[..., None, :].expand(*x.shape[:-1], heads, x.shape[-1])


@final
@dataclass(frozen=True)
class SSD(Block):
    """Mamba-2's block: [z, x, k, q] = W x with one convolution over x, k, q; y = norm((o + D x) silu(z)), then W_out.

    conv: width of the convolution.  charts: (rate name, chart) pairs, fed with the block's input.
    groups: of neighbouring heads, each with one k and q; the norm is over a group's heads.
    """

    grouped: ClassVar[str | None] = "has a query and a key for each of its `groups`: give SSD(groups=...)"

    conv: int = 4
    charts: tuple[tuple[str, Chart], ...] = ()
    norm_eps: float = 1e-5
    groups: int = 1

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        _no_vectors(vectors, "SSD")
        if self.groups < 1 or sizes.heads % self.groups:
            raise ShapeError(f"SSD: heads={sizes.heads} do not form groups={self.groups} of equal size")
        return _SSDModule(self, sizes, demands, factory)


@final
class _SSDModule(BlockModule):
    def __init__(self, block: SSD, sizes: Sizes, demands: tuple[Per, ...], factory: Factory) -> None:
        super().__init__()
        self.sizes, self.inner, self.groups = sizes, sizes.heads * sizes.d_v, block.groups
        self.widths = (self.inner, block.groups * sizes.d_k, block.groups * sizes.d_k)
        self.in_proj = nn.Linear(sizes.d_model, self.inner + sum(self.widths), bias=False, **factory)
        self.conv = ShortConvolution(sum(self.widths), block.conv, "silu", factory, bias=True)
        self.charts = nn.ModuleDict(build_charts(dict(block.charts), demands, sizes, factory))
        self.skip = nn.Parameter(torch.ones(sizes.heads, 1, **factory))
        self.norm = nn.RMSNorm(self.inner, eps=block.norm_eps, **factory)
        self.out_proj = nn.Linear(self.inner, sizes.d_model, bias=False, **factory)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.skip)

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        return (self.conv.tail(batch, like),)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        s = self.sizes
        z, mixed = in_parts(self.in_proj, x, (self.inner, sum(self.widths)))
        mixed, tail = self.conv(mixed, tails[0], packing)
        v, k, q = mixed.split(self.widths, -1)
        q, k = (z.unflatten(-1, (self.groups, s.d_k)) for z in (q, k))
        signal = {"q": q, "k": k, "v": v.unflatten(-1, (s.heads, s.d_v))}
        for chart in self.charts.values():
            signal.update(chart(x))
        return signal, (tail,), (z, signal["v"])

    def declaration(self, path: str = "") -> Declaration:
        s, first, vectors = self.sizes, self.inner, []
        for name, heads, width in (("v", s.heads, s.d_v), ("k", self.groups, s.d_k), ("q", self.groups, s.d_k)):
            matrix = Matrix(f"{path}in_proj", heads * width, first)
            vectors.append(Vector(name, matrix, self.conv.stream(heads, width), f"{path}conv"))
            first += heads * width
        rates, others = declared_charts(self.charts, path)
        gate = Matrix(f"{path}in_proj", self.inner)
        eps = self.norm.eps or 0.0
        end = Exit(f"{path}out_proj", gate, "silu", f"{path}norm", eps, True, f"{path}skip", self.groups)
        return Declaration(tuple(vectors), rates, others, end)

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        z, v = kept
        weight, eps = self.norm.weight, self.norm.eps or 0.0
        y = ((y + self.skip * v).flatten(-2) * silu(z)).to(weight.dtype).unflatten(-1, (self.groups, -1))
        out: Tensor = self.out_proj(normalised(y, 1.0 / y.shape[-1], eps).flatten(-2) * weight)
        return out


@final
@dataclass(frozen=True)
class Mamba(Block):
    """Mamba's block: [x, z] = W_in x; k, q, gates from the convolved x, the value; y = W_out ((o + D x) silu(z)).

    conv: width of the convolution.  rank: gates go through a bottleneck of ceil(d_model / rank) channels.
    charts: (rate name, chart) pairs, fed with the convolved input; by default sigmoids through the bottleneck.
    Griffin's recurrent block is this without keys and queries, which are ones then (keys), without an activation behind
    the convolution (activation), with gelu(z) for the gate and without D (skip).
    """

    grouped: ClassVar[str | None] = "has one query and key for all heads"

    conv: int = 4
    rank: int = 16
    charts: tuple[tuple[str, Chart], ...] = ()
    keys: bool = True
    activation: Activation | None = "silu"
    gate: Activation = "silu"
    skip: bool = True

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        _no_vectors(vectors, "Mamba")
        return _MambaModule(self, sizes, demands, factory)


@final
class _MambaModule(BlockModule):
    def __init__(self, block: Mamba, sizes: Sizes, demands: tuple[Per, ...], factory: Factory) -> None:
        super().__init__()
        self.block, self.sizes, self.inner = block, sizes, sizes.heads * sizes.d_v
        self.in_proj = nn.Linear(sizes.d_model, 2 * self.inner, bias=False, **factory)
        self.conv = ShortConvolution(self.inner, block.conv, block.activation, factory, bias=True)
        self.kq_proj = nn.Linear(self.inner, 2 * sizes.d_k, bias=False, **factory) if block.keys else None
        rank = -(-sizes.d_model // block.rank)
        own = {n: replace(c, rank=rank) if isinstance(c, TimeStep) and not c.rank else c for n, c in block.charts}
        extra = {name for chart in own.values() for name in chart.also()}
        narrow = Sigmoid(bias=0.0, rank=rank)
        charts = {p.name: narrow for p in demands if p.domain == "positive" and p.name not in extra} | own
        self.charts = nn.ModuleDict(build_charts(charts, demands, replace(sizes, d_model=self.inner), factory))
        self.skip = nn.Parameter(torch.ones(self.inner, **factory)) if block.skip else None
        self.out_proj = nn.Linear(self.inner, sizes.d_model, bias=False, **factory)

    def reset_parameters(self) -> None:
        if self.skip is not None:
            nn.init.ones_(self.skip)

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        return (self.conv.tail(batch, like),)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        s = self.sizes
        inner, z = self.in_proj(x).chunk(2, -1)
        inner, tail = self.conv(inner, tails[0], packing)
        both = inner.new_ones(1).expand(*inner.shape[:-1], 2 * s.d_k) if self.kq_proj is None else self.kq_proj(inner)
        k, q = both.chunk(2, -1)
        signal = {"q": _shared(q, s.heads), "k": _shared(k, s.heads), "v": inner.unflatten(-1, (s.heads, s.d_v))}
        for chart in self.charts.values():
            signal.update(chart(inner))
        return signal, (tail,), (inner, z)

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        inner, z = kept
        y = y.flatten(-2) if self.skip is None else y.flatten(-2) + self.skip * inner
        out: Tensor = self.out_proj(y * ACTIVATIONS[self.block.gate](z))
        return out


__all__ = ["SSD", "Mamba"]
