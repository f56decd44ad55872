"""A block by its kernels: from what a block module declares to one in-projection and a launch at either end.

    x -> [P | vectors that need no more | gate]  one function, a product for each      axes.kernels.blocks.products
    P -> vectors and rates                       one launch                            axes.kernels.blocks.enter
    low-rank rates: their first factor is columns of P, the second a product and a launch of their own
    reads, gate -> input of the out-projection   one launch                            axes.kernels.blocks.leave

A declaration names modules; their parameters are looked up at every call, so that what is trained, loaded or swapped
in is what runs. What a block does not declare (a chart of a user's own, say) runs in its torch form beside the kernels,
and a block that declares nothing runs in its torch form altogether: `no_block_kernel` says why. Triton is imported by
the first call that needs it.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from axes.kernels.blocks.plan import Numbers, Plan, Stream, no_stream
from axes.routes import dispatch
from axes.routes.packed import Packing

if TYPE_CHECKING:
    from axes.sequence.blocks import BlockModule

_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("0", "")  # compilers cannot ask Triton
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNED = 8  # columns: rows of the product begin at multiples of 16 bytes


class Vector(NamedTuple):
    """A vector of every head: a projection, then a convolution with its activation, a map, a norm, a scale, in turn.

    projection: an nn.Linear's name without bias; conv: a ShortConvolution's name.  norm: "unit" or "rms", eps under the
    root.  Fields are those of `axes.kernels.blocks.enter.Stream`.
    """

    name: str
    projection: str
    heads: int
    width: int
    conv: str | None = None
    conv_width: int = 0
    biased: bool = False
    activation: str = "none"
    feature_map: str = "none"
    norm: str = "none"
    eps: float = 0.0
    scale: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether the projection is all there is."""
        return self[4:] == Vector("", "", 1, 1)[4:]


class Rate(NamedTuple):
    """A rate factor * chart(up(down(x)) + bias) of every head, (heads, *shape) numbers; down None: up(x).

    up, down: names of nn.Linear; rate: of the parameter of chart "ssm", whose softplus is the rate `step`.
    Fields are those of `axes.kernels.blocks.enter.Numbers`.
    """

    name: str
    shape: tuple[int, ...]
    up: str
    down: str | None = None
    rank: int = 0
    chart: str = "linear"
    factor: float = 1.0
    biased: bool = False
    rate: str | None = None
    step: str | None = None

    @property
    def columns(self) -> int:
        return math.prod(self.shape)


@final
@dataclass(frozen=True)
class Declaration:
    """What a block does, as far as kernels can. others: names of modules x -> rates that run as they are.

    gate: name of the projection of the output gate, with its activation; norm: name of an nn.RMSNorm over every head's
    reads; out: name of the out-projection.
    """

    vectors: tuple[Vector, ...]
    rates: tuple[Rate, ...]
    others: tuple[str, ...]
    gate: str | None
    activation: str
    norm: str | None
    eps: float
    out: str


class Gate(NamedTuple):
    """What `leave` keeps of a block that entered by its kernels."""

    gate: Tensor | None


@final
class Fused:
    """A declaration as the calls that it takes: made once, without parameters."""

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared
        self.plain = [v for v in declared.vectors if v.plain]
        self.streams = [v for v in declared.vectors if not v.plain]
        self.direct = [r for r in declared.rates if r.down is None]
        self.ranked = [r for r in declared.rates if r.down is not None]
        stacked = [v.projection for v in self.streams] + [r.up for r in self.direct]
        stacked += [r.down for r in self.ranked if r.down]
        own = [v.projection for v in self.plain] + ([declared.gate] if declared.gate else [])
        self.groups = ([stacked] if stacked else []) + [[name] for name in own]
        self.linears = [*stacked, *own, *[r.up for r in self.ranked]]
        used = sum(v.heads * v.width for v in self.streams) + sum(r.columns for r in self.direct)
        self.width = _aligned(used + sum(r.rank for r in self.ranked))
        self.rows = [self.width] * bool(stacked) + [v.heads * v.width for v in self.plain] + [0] * bool(declared.gate)
        streams = [Stream(v.heads, v.width, v.conv_width, *v[6:]) for v in self.streams]
        numbers = [Numbers(r.columns, r.chart, r.factor, r.biased, False, r.step is not None) for r in self.direct]
        numbers += [Numbers(r.rank, narrow=True) for r in self.ranked]
        refused = [f"{v.name}: {why}" for v, s in zip(self.streams, streams, strict=True) if (why := no_stream(s))]
        self.refusal = refused[0] if refused else None
        self.plan = Plan(streams, numbers, self.width)
        each = [Numbers(r.columns, r.chart, r.factor, r.biased) for r in self.ranked]
        self.ranked_plans = [Plan((), (n,), n.columns) for n in each]


def _aligned(columns: int) -> int:
    return -(-columns // _ALIGNED) * _ALIGNED


# ---- choice ----------------------------------------------------------------------------------------------------------


def no_block_kernel(around: BlockModule, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a block does not run by its kernels on this device in this dtype, or None."""
    fused = around.fused
    if fused is None:
        return f"{type(around).__name__} declares nothing that a kernel could do"
    if device.type != "cuda" and not _INTERPRETED:
        return f"device {device} is not a GPU"
    if not _TRITON:
        return "Triton is not installed"
    if dtype not in _DTYPES:
        return f"the kernels compute in float32, the tokens are {dtype}"
    if fused.refusal is not None:
        return fused.refusal
    for name in fused.linears:
        module = _module(around, name)
        if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
            return f"{name} is not a plain nn.Linear, whose weights may stand beside others in one product"
    return None


def _computing_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# ---- the two halves --------------------------------------------------------------------------------------------------


def enter(
    around: BlockModule,
    x: Tensor,
    tails: tuple[Tensor, ...] | None,
    packing: Packing | None,
    implementation: str | None,
) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
    """`around.enter` by the kernels where they take the block, or as asked for by name.

    tails: None for empty ones.  Raises NoImplementation if "triton" is asked for and they do not take the block.
    """
    implementation = implementation or dispatch._chosen()
    if implementation in (None, "triton") and x.numel():
        dtype = _computing_dtype(x)
        reason = no_block_kernel(around, x.device, dtype)
        if reason is None:
            return _enter(around, x.to(dtype), tails or (), packing)
        if implementation == "triton":
            raise dispatch.NoImplementation(f"no Triton kernel for this block: {reason}. Use implementation='torch'")
    if tails is None:
        tails = around.tails(x.shape[0] if packing is None else packing.sequences, x)
    return around.enter(x, tails, packing)


def leave(around: BlockModule, y: Tensor, kept: Any) -> Tensor:
    """`around.leave` as `enter` was."""
    if not isinstance(kept, Gate):
        return around.leave(y, kept)
    from axes.kernels.blocks.leave import leave as kernel

    declared = around.fused.declared  # type: ignore[union-attr]
    weight = None if declared.norm is None else _parameter(around, declared.norm, "weight")
    u = kernel(y, kept.gate, weight, activation=declared.activation, eps=declared.eps)
    out: Tensor = around._modules[declared.out](u)  # type: ignore[misc]
    return out


def _enter(
    around: BlockModule, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None
) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
    from axes.kernels.blocks.enter import enter as kernel
    from axes.kernels.blocks.products import products

    fused = around.fused
    assert fused is not None
    weights = [[_parameter(around, name, "weight") for name in group] for group in fused.groups]
    made = list(products(x, weights, fused.rows))
    signal: dict[str, Tensor] = {}
    ends: list[Tensor] = []
    if fused.width:
        cu = None if packing is None else packing.offsets
        results, ends = kernel(made.pop(0), fused.plan, _parameters(around, fused.streams, fused.direct), tails, cu)
        rest = iter(results)
        for v in fused.streams:
            signal[v.name] = next(rest)
        for r in fused.direct:
            signal[r.name] = next(rest).unflatten(-1, r.shape)
            if r.step is not None:
                signal[r.step] = next(rest).unflatten(-1, r.shape)
        for r, plan in zip(fused.ranked, fused.ranked_plans, strict=True):
            z = nn.functional.linear(next(rest), _parameter(around, r.up, "weight").to(x.dtype))
            (y,), _ = kernel(z, plan, _parameters(around, (), (r,)))
            signal[r.name] = y.unflatten(-1, r.shape)
    for v in fused.plain:
        signal[v.name] = made.pop(0).unflatten(-1, (v.heads, v.width))
    for name in fused.declared.others:
        signal.update(_module(around, name)(x))
    return signal, tuple(ends), Gate(made[0] if made else None)


def _parameter(around: nn.Module, module: str, name: str) -> Tensor:
    found = _module(around, module)._parameters[name]
    assert found is not None
    return found


def _module(around: nn.Module, name: str) -> nn.Module:
    for part in name.split("."):
        around = around._modules[part]  # type: ignore[assignment]
    return around


def _parameters(around: nn.Module, vectors: Sequence[Vector], rates: Sequence[Rate]) -> list[Tensor]:
    """In the order of the kernel's list."""
    made: list[Tensor] = []
    for v in vectors:
        if v.conv is not None:
            made.append(_parameter(around, v.conv, "weight"))
            if v.biased:
                made.append(_parameter(around, v.conv, "bias"))
    for r in rates:
        if r.rate is not None:
            made.append(_parameter(around, *r.rate.rsplit(".", 1)).flatten())
        if r.biased:
            made.append(_parameter(around, r.up, "bias"))
    return made
