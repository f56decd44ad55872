"""Blocks: what surrounds the recurrence. From tokens to the signal, and from what was read to the layer's output.

A block is a frozen value; `build` makes its module, which offers `enter` (tokens and convolution tails -> signal) and
`leave` (reads -> output). Legend: B batch, T tokens, D model width, H heads, d_k, d_v head widths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, gelu, relu, rms_norm, silu

from axes.core.rates import Per
from axes.errors import IllegalUpdate
from axes.kernels.blocks.plan import Stream
from axes.routes.cells import Cell
from axes.routes.frame import Frame
from axes.routes.packed import Packing
from axes.sequence.by_hand import convolved, normalised
from axes.sequence.charts import Chart, Factory, Sizes, default_chart
from axes.sequence.features import FeatureMap
from axes.sequence.fused import Declaration, Exit, Fused, Kernels, Matrix, Rate, Vector

Activation = Literal["silu", "gelu", "relu", "elu+1", "sigmoid"]


def _positive_elu(x: Tensor) -> Tensor:
    return elu(x) + 1


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "relu": relu,
    "elu+1": _positive_elu,
    "sigmoid": torch.sigmoid,
}


class Block(ABC):
    """A declaration of everything around the recurrence.

    grouped: None if it makes queries and keys for `Sizes.key_heads`, else what it does instead, as a sentence.
    several: whether it makes `Sizes.writes` pairs of key and value for every token.
    cell: of signals that depend on the last read, see `axes.routes.cells`.
    asks_several: whether it makes `Sizes.reads` queries for every token, and takes as many outputs.
    """

    grouped: ClassVar[str | None] = "has a query and a key for every head"
    several: ClassVar[bool] = False
    cell: ClassVar[Cell | None] = None
    asks_several: ClassVar[bool] = False

    @abstractmethod
    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        """The module for a tuple that demands these rates and named key-side vectors."""


class BlockModule(nn.Module):
    """The two halves of a block.

    What a module declares, kernels compute where there are some (`axes.sequence.fused`); `enter` and `leave` are its
    meaning, and what runs everywhere else.
    """

    fused: Kernels | None = None
    cell: Cell | None = None

    def matrices(self) -> tuple[Tensor, ...]:
        """Of a cell: what the last read is multiplied by, see `axes.routes.recurrent.run`."""
        raise NotImplementedError

    def carried(self, tails: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Tails of the block, and what its cell carries, the last of them."""
        kept = len(tails) - (0 if self.cell is None else self.cell.carried)
        return tails[:kept], tails[kept:]

    def declaration(self, path: str = "") -> Declaration | None:
        """What kernels may do in the place of `enter` and `leave`; None: nothing. path: of this module in a block's."""
        return None

    def kernels(self, frame: Frame | None) -> Kernels | None:
        """What runs in the place of `enter` and `leave` where there are kernels. frame: of a state that turns."""
        declared = self.declaration()
        return None if declared is None else Fused(declared, frame)

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """Empty convolution tails."""
        return ()

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        """packing: x (1, T, D) holds sequences one after another, with a tail each."""
        raise NotImplementedError

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        raise NotImplementedError


SMALL = 1e-6  # beside the length of a vector


def l2_normalise(x: Tensor, eps: float = SMALL) -> Tensor:
    """Unit length in the last dimension, in float32 at least; zero stays zero."""
    return normalised(x, 1.0, eps * eps)


def behind(x: Tensor, tail: Tensor, packing: Packing | None) -> Tensor:
    """Tokens (B, T, C), every sequence behind its tail (w, C)."""
    return torch.cat((tail.to(x.dtype), x), 1) if packing is None else packing.behind(x, tail)


def last(full: Tensor, width: int, packing: Packing | None) -> Tensor:
    """The last `width` tokens of every sequence: tails for what follows."""
    return full[:, full.shape[1] - width :] if packing is None else packing.new_tails(full, width)


def queries_of(block: Block, heads: int) -> int:
    """How many heads of queries read one list of pairs."""
    queries: int | str = getattr(block, "queries", 1)
    return heads if isinstance(queries, str) else queries


def in_groups(x: Tensor, name: str, queries: int) -> Tensor:
    """q (B, T, H, ...) as (B, T, lists, queries, ...), of a list (B, T, lists, 1, ...); of one, as it is."""
    if queries == 1:
        return x
    return x.unflatten(2, (-1, queries)) if name == "q" else x.unsqueeze(3)


@final
class ShortConvolution(nn.Module):
    """Depthwise causal convolution over time with a carried tail: (B, T, C) -> (B, T, C)."""

    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(
        self, channels: int, width: int, activation: Activation | None, factory: Factory, bias: bool = False
    ) -> None:
        super().__init__()
        self.width, self.activation = width, activation
        self.weight = nn.Parameter(torch.empty(channels, 1, width, **factory))
        self.bias = nn.Parameter(torch.empty(channels, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def tail(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, self.width - 1, self.weight.shape[0])

    def forward(self, x: Tensor, tail: Tensor, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
        if x.shape[1] == 0:
            return x, tail
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        before, activated = self.width - 1, self.activation == "silu"
        if packing is None:
            y = convolved(x, tail, weight, bias, activated)
            long = not torch.compiler.is_compiling() and x.shape[1] >= before  # a length of a compiler is left open
            kept = last(x if long else behind(x, tail, None), before, None)
        else:
            full = packing.behind(x, tail)
            y = convolved(full[:, before:], full[:, :before], weight, bias, activated)
            y, kept = y[:, packing.places(before) - before], packing.new_tails(full, before)
        return (y if self.activation is None or activated else ACTIVATIONS[self.activation](y)), kept

    def stream(self, heads: int, width: int, **more: Any) -> Stream:
        """For kernels: columns (heads, width) that go through this convolution, or a share of it."""
        return Stream(heads, width, self.width, self.bias is not None, self.activation or "none", **more)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}, activation={self.activation!r}"


@final
@dataclass(frozen=True)
class Standard(Block):
    """Projections of q, k, v with short convolutions, key normalisation, gates, output norm and gate.

    conv: width of the convolutions on q, k, v (0: none), followed by `activation`.  values_conv: also on v.
    feature_map: on q and k; a `FeatureMap` makes keys of another width than the projections.
    key_norm: l2 per head.  scale: q times d_k^(-1/2).
    keys, asks: whether tokens have keys, and queries; else all are ones, and what is written where is said by rates
    (HGRN2), or a row is read as it is (HGRN).  value_map: on v.
    correction: queries are q - d k, d learned for every head from this number on (Comba); None: q.
    shared_projection: q and k share one projection before their convolutions (Lattice).
    value_norm: v per head of unit length or unit RMS, without a gain (for costs that grow faster than a square).
    read_map: on what is read.  output_norm: RMS over d_v per head.  output_gate: y * gate(W x).
    queries: heads of queries that read one list of pairs (grouped queries; "all" heads: multi-query). Keys, values and
    rates, which act on stored pairs, are those of a list. Of another memory a tuple says it, Step(reads=n).
    charts: (rate name, chart) pairs; unnamed rates get `default_chart`.
    Named vectors are unit projections of their own. Two that make a transition I + a b^T are tied as in RWKV-7,
    a = -w and b = sigmoid(W x) * w: with projections of their own its eigenvalues leave [0, 1], and the state diverges.
    initial: standard deviation of the learned initial memory around the empty one; None: the empty memory.
    """

    grouped: ClassVar[str | None] = None
    several: ClassVar[bool] = True
    asks_several: ClassVar[bool] = True

    conv: int = 4
    values_conv: bool = True
    activation: Activation | None = "silu"
    feature_map: Activation | FeatureMap | None = None
    key_norm: bool = True
    value_norm: Literal["unit", "rms"] | None = None
    scale: bool = False
    keys: bool = True
    asks: bool = True
    value_map: Activation | None = None
    read_map: Activation | None = None
    correction: float | None = None
    shared_projection: bool = False
    output_norm: bool = True
    output_gate: Activation | None = "silu"
    queries: int | Literal["all"] = 1
    charts: tuple[tuple[str, Chart], ...] = ()
    initial: float | None = None
    norm_eps: float = 1e-5

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        return _StandardModule(self, sizes, demands, vectors, factory)


@final
class _StandardModule(BlockModule):
    def __init__(
        self, block: Standard, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory
    ) -> None:
        super().__init__()
        self.queries = queries_of(block, sizes.heads)
        if self.queries > 1 and block.shared_projection:
            raise IllegalUpdate("Standard: queries and keys share a projection, so they have the same heads: queries=1")
        if sizes.writes > 1 and (block.shared_projection or not block.keys or block.correction is not None):
            what = "a projection of their own: shared_projection=False, keys=True, correction=None"
            raise IllegalUpdate(f"Standard: the {sizes.writes} keys of a token have {what}")
        if sizes.reads > 1 and (block.shared_projection or block.correction is not None or not block.asks):
            what = "a projection of their own: shared_projection=False, correction=None, asks=True"
            raise IllegalUpdate(f"Standard: the {sizes.reads} queries of a token have {what}")
        if not block.asks and (block.keys or block.conv or block.scale or block.feature_map):
            raise IllegalUpdate("Standard: asks=False reads a row as it is: keys=False, conv=0, scale=False, no map")
        if not block.keys and (block.shared_projection or block.key_norm or block.correction is not None):
            what = "nothing to share, to norm or to correct by: shared_projection, key_norm=False, correction=None"
            raise IllegalUpdate(f"Standard: keys=False leaves {what}")
        self.block, self.sizes = block, sizes
        self.lists = replace(sizes, heads=sizes.heads // self.queries)
        mapped = block.feature_map
        self.features = mapped.build(sizes.d_k, factory) if isinstance(mapped, FeatureMap) else None
        self.width = sizes.d_k if self.features is None else self.features.width  # of a head's query ahead of features
        queries = self.width * sizes.key_heads * sizes.reads
        keys = self.width * (sizes.key_heads // self.queries) * sizes.writes
        values = sizes.d_v * self.lists.heads * sizes.writes

        def linear(width: int) -> nn.Linear:
            return nn.Linear(sizes.d_model, width, bias=False, **factory)

        def conv(width: int, wanted: bool = True) -> ShortConvolution | None:
            return ShortConvolution(width, block.conv, block.activation, factory) if block.conv and wanted else None

        self.q_proj = linear(queries) if block.asks else None
        self.k_proj = None if block.shared_projection or not block.keys else linear(keys)
        self.v_proj = linear(values)
        self.q_conv, self.k_conv = conv(queries), conv(keys, block.keys)
        self.v_conv = conv(values, block.values_conv)
        named = sorted(vectors - {"k", "v", "q"})
        if len(set(sizes.loose) & set(named)) < len(sizes.loose):
            raise IllegalUpdate(
                f"Standard ties pairs of vectors of its own, not {sizes.loose}: to erase along the key of a token use "
                'Householder(beta, "k")'
            )
        self.vectors = nn.ModuleDict({name: linear(sizes.d_k * self.lists.heads) for name in named})
        start = block.correction
        self.correction = None if start is None else nn.Parameter(torch.full((sizes.key_heads, 1), start, **factory))
        self.charts = nn.ModuleDict(build_charts(dict(block.charts), demands, self.lists, factory))
        outputs = sizes.d_v * sizes.heads * sizes.reads
        self.g_proj = linear(outputs) if block.output_gate else None
        self.norm = nn.RMSNorm(sizes.d_v, eps=block.norm_eps, **factory) if block.output_norm else None
        self.o_proj = nn.Linear(outputs, sizes.d_model, bias=False, **factory)

    def reset_parameters(self) -> None:
        if self.correction is not None and self.block.correction is not None:
            nn.init.constant_(self.correction, self.block.correction)

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(c.tail(batch, like) for c in (self.q_conv, self.k_conv, self.v_conv) if c is not None)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        b, s = self.block, self.sizes
        q = x.new_ones(1).expand(*x.shape[:-1], s.key_heads * self.width) if self.q_proj is None else self.q_proj(x)
        k = torch.ones_like(q) if not b.keys else q if self.k_proj is None else self.k_proj(x)
        v = self.v_proj(x)
        kept: list[Tensor] = []
        if self.q_conv is not None:
            q, tail = self.q_conv(q, tails[0], packing)
            kept.append(tail)
        if self.k_conv is not None:
            k, tail = self.k_conv(k, tails[len(kept)], packing)
            kept.append(tail)
        if self.v_conv is not None:
            v, tail = self.v_conv(v, tails[len(kept)], packing)
            kept.append(tail)
        q = q.unflatten(-1, (s.key_heads, self.width) if s.reads == 1 else (s.key_heads, s.reads, self.width))
        each = () if s.writes == 1 else (s.writes,)  # write by write: as tokens of one write they are a view
        k = k.unflatten(-1, (*each, s.key_heads // self.queries, self.width))
        if self.features is not None:
            q, k = self.features(q), self.features(k)
        elif isinstance(b.feature_map, str):
            q, k = ACTIVATIONS[b.feature_map](q), ACTIVATIONS[b.feature_map](k) if b.keys else k
        if b.key_norm:
            q, k = l2_normalise(q), l2_normalise(k)
        if self.correction is not None:
            q = q - self.correction.to(q.dtype) * k
        if b.scale:
            q = q * s.d_k**-0.5
        v = v.unflatten(-1, (*each, self.lists.heads, s.d_v))
        if b.value_map is not None:
            v = ACTIVATIONS[b.value_map](v)
        if b.value_norm is not None:
            v = l2_normalise(v) if b.value_norm == "unit" else rms_norm(v, (s.d_v,), eps=b.norm_eps)
        k, v = (z.movedim(-3, -2) if each else z for z in (k, v))
        signal = {"q": q, "k": k, "v": v}
        vectors = {n: p(x).unflatten(-1, (self.lists.heads, s.d_k)) for n, p in self.vectors.items()}
        signal |= {n: l2_normalise(z) for n, z in vectors.items() if n not in s.loose[::2]}
        for left, right in zip(s.loose[::2], s.loose[1::2], strict=True):
            signal[left], signal[right] = -signal[right], torch.sigmoid(vectors[left]) * signal[right]
        for chart in self.charts.values():
            signal.update(chart(x))
        signal = {name: in_groups(z, name, self.queries) for name, z in signal.items()}
        gate = None if self.g_proj is None else self.g_proj(x).unflatten(-1, (s.heads * s.reads, s.d_v))
        return signal, tuple(kept), gate

    def declaration(self, path: str = "") -> Declaration | None:
        b, s = self.block, self.sizes
        if self.queries > 1 or self.features is not None:  # a stream's heads all stand beside each other
            return None
        # which no kernel makes
        if not b.keys or b.correction is not None or b.value_map or b.read_map or s.loose or s.reads > 1:
            return None

        def vector(
            name: str, projection: str, heads: int, width: int, conv: ShortConvolution | None, **more: Any
        ) -> Vector:
            writes = s.writes if name in ("k", "v") else 1
            heads *= writes
            matrix = Matrix(path + projection, heads * width)
            if conv is None:
                return Vector(name, matrix, Stream(heads, width, **more), writes=writes)
            return Vector(name, matrix, conv.stream(heads, width, **more), f"{path}{name}_conv", writes=writes)

        unit = {"norm": "unit", "eps": SMALL**2}
        both = {"feature_map": b.feature_map or "none", **(unit if b.key_norm else {})}
        norms = {None: {}, "unit": unit, "rms": {"norm": "rms", "eps": b.norm_eps}}
        shared = "q_proj" if self.k_proj is None else "k_proj"
        q = vector("q", "q_proj", s.key_heads, s.d_k, self.q_conv, **both, scale=s.d_k**-0.5 if b.scale else 1.0)
        k = vector("k", shared, s.key_heads, s.d_k, self.k_conv, **both)
        v = vector("v", "v_proj", s.heads, s.d_v, self.v_conv, **norms[b.value_norm])
        named = [vector(name, f"vectors.{name}", s.heads, s.d_k, None, **unit) for name in self.vectors]
        rates, others = declared_charts(self.charts, path)
        gate = Matrix(f"{path}g_proj", s.heads * s.d_v) if b.output_gate else None
        norm = f"{path}norm" if b.output_norm else None
        end = Exit(f"{path}o_proj", gate, b.output_gate or "none", norm, b.norm_eps)
        return Declaration((q, k, v, *named), rates, others, end)

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        if self.queries > 1 or self.sizes.reads > 1:
            y = y.flatten(2, 3)
        if self.block.read_map is not None:
            y = ACTIVATIONS[self.block.read_map](y)
        if self.norm is not None:
            y = normalised(y.to(self.norm.weight.dtype), 1.0 / self.sizes.d_v, self.block.norm_eps) * self.norm.weight
        if self.block.output_gate is not None:
            y = y * ACTIVATIONS[self.block.output_gate](kept)
        out: Tensor = self.o_proj(y.flatten(-2))
        return out


def build_charts(
    named: dict[str, Chart], demands: tuple[Per, ...], sizes: Sizes, factory: Factory
) -> dict[str, nn.Module]:
    """One module per demanded rate that no other chart already supplies."""
    known = {p.name for p in demands}
    unknown = set(named) - known
    if unknown:
        raise IllegalUpdate(f"charts for {sorted(unknown)}, but the tuple demands {sorted(known) or 'nothing'}")
    charts = {p.name: named.get(p.name, default_chart(p)) for p in demands}
    supplied = {extra for chart in charts.values() for extra in chart.also()}
    return {p.name: charts[p.name].build(p, sizes, factory) for p in demands if p.name not in supplied}


def declared_charts(charts: nn.ModuleDict, path: str = "") -> tuple[tuple[Rate, ...], tuple[str, ...]]:
    """What a block's `charts` declare, and the names of those that declare nothing."""
    paths = {f"{path}charts.{name}": chart for name, chart in charts.items()}
    found: dict[str, Rate] = {p: chart.declared(p) for p, chart in paths.items() if hasattr(chart, "declared")}  # type: ignore[operator]
    return tuple(found.values()), tuple(path for path in paths if path not in found)


__all__ = [
    "Activation",
    "Block",
    "BlockModule",
    "ShortConvolution",
    "Standard",
    "build_charts",
    "declared_charts",
    "l2_normalise",
]
