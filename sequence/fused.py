"""A block by its kernels: from what a block module declares to one in-projection and a launch at either end.

    x -> [P | vectors that need no more | gate]    one function, a product for each     axes.kernels.blocks.products
    P -> vectors and rates                         one launch                           axes.kernels.blocks.enter
    vectors and rates through a bottleneck: its columns are part of P; the second product has a launch of its own
    reads, gate -> input of the out-projection     one launch                           axes.kernels.blocks.leave

A block of other parts brings its own `Kernels` (`BlockModule.kernels`), which are asked for in the same way.
Where the state turns at a constant rate, keys and queries leave turned back already, and the recurrence is that of the
frame that turns along (`axes.routes.frame`).

A declaration names modules; their parameters are looked up at every call, so that what is trained, loaded or swapped
in is what runs. What a block does not declare (a chart of a user's own, say) runs in its torch form beside the kernels,
and a block that declares nothing runs in its torch form altogether: `no_block_kernel` says why. Triton is imported by
the first call that needs it.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from axes.core.monoids import Rotation
from axes.kernels.blocks.plan import Numbers, Plan, Stream, no_leave, no_stream
from axes.kernels.blocks.products import is_plain
from axes.kernels.common import versions
from axes.routes import dispatch
from axes.routes.frame import Frame
from axes.routes.packed import Packing
from axes.routes.precision import taken_in

if TYPE_CHECKING:
    from axes.sequence.blocks import BlockModule

# A product (B, T, W), places in it as (last tokens, first column, columns) and what stands there before all tokens, if
# anything does -> the product, and what the tokens before have at every place
Columns = Callable[[Tensor, Sequence[tuple[int, int, int]], Sequence[Tensor]], tuple[Tensor, list[Tensor]]]
_ALIGNED = 8  # columns: rows of the product begin at multiples of 16 bytes


# ---- declarations ----------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """Rows of the weight of an nn.Linear, from the first one on."""

    name: str
    rows: int
    first: int = 0


class Vector(NamedTuple):
    """A vector of every head: projection(s), then what a `Stream` says, in turn. One head's is shared by all.

    down: the first of two projections.  conv: name of a ShortConvolution; vectors side by side may share one, which has
    their channels one after another.  writes: so many a token, one after another: heads of the stream, and behind the
    heads in the signal.
    """

    name: str
    projection: Matrix
    stream: Stream
    conv: str | None = None
    down: Matrix | None = None
    writes: int = 1

    @property
    def plain(self) -> bool:
        """Whether a product is all there is."""
        return self.down is None and self.stream == Stream(self.stream.heads, self.stream.width)

    @property
    def plan(self) -> Plan:
        """Of a product that is this vector's alone."""
        return Plan((self.stream,), (), self.projection.rows)


class Rate(NamedTuple):
    """A rate factor * chart(projection(s) + bias) of every head, (heads, *shape) numbers.

    down: the first of two projections.  bias, log_rate: names of parameters; the softplus of chart "ssm" is the rate
    `step`.
    """

    name: str
    shape: tuple[int, ...]
    projection: Matrix
    chart: str = "linear"
    factor: float = 1.0
    bias: str | None = None
    log_rate: str | None = None
    step: str | None = None
    down: Matrix | None = None

    @property
    def numbers(self) -> Numbers:
        biased, step = self.bias is not None, self.step is not None
        return Numbers(math.prod(self.shape), self.chart, self.factor, biased, False, step)

    @property
    def plan(self) -> Plan:
        """Of a product that is this rate's alone."""
        return Plan((), (self.numbers,), self.projection.rows)


@final
@dataclass(frozen=True)
class Exit:
    """From reads to the output: skip, norm and gate as in `axes.kernels.blocks.leave`, then the module `out`.

    norm: name of an nn.RMSNorm, behind the gate and over all heads with `after`, or over the heads of each of `groups`.
    skip: name of a parameter that broadcasts to (heads, width) and multiplies the vector v.
    """

    out: str
    gate: Matrix | None = None
    activation: str = "none"
    norm: str | None = None
    eps: float = 0.0
    after: bool = False
    skip: str | None = None
    groups: int = 1


@final
@dataclass(frozen=True)
class Declaration:
    """What a block does, as far as kernels can. others: names of modules x -> rates that run as they are."""

    vectors: tuple[Vector, ...]
    rates: tuple[Rate, ...]
    others: tuple[str, ...]
    exit: Exit


class Kernels(ABC):
    """How a block runs by its kernels: made once, without parameters, which are looked up at every call.

    refusal: why it does not, wherever it is.  taken: names of modules whose weights it takes, so that they must be what
    they say and nothing else, and what each is.  frame: in which q and k leave, if any.  asks: whether all that its
    convolutions read of tokens before are columns of one product, which `enter` can ask for.
    """

    refusal: str | None
    taken: Mapping[str, type[nn.Module]]
    frame: Frame | None = None
    asks: bool = False

    @property
    def token(self) -> Kernels:
        """The kernels for one token, whose state turns by itself."""
        return self

    @abstractmethod
    def enter(
        self,
        around: BlockModule,
        x: Tensor,
        tails: tuple[Tensor, ...],
        packing: Packing | None,
        columns: Columns | None = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        """`around.enter`; no tails stand for empty ones.

        columns: who knows the tokens before, if it `asks`; tails are then those before all tokens.
        """

    @abstractmethod
    def leave(self, around: BlockModule, y: Tensor, kept: Any) -> Tensor:
        """`around.leave`."""

    @abstractmethod
    def saved(self, around: BlockModule) -> dict[str, int]:
        """Numbers a token that are kept for the backward, by name; the recurrence's, its signal among them, are not."""


@final
class Fused(Kernels):
    """The kernels of a declaration."""

    def __init__(self, declared: Declaration, frame: Frame | None = None) -> None:
        self.declared, self.frame = declared, frame
        self._token = self if frame is None else Fused(declared)
        vectors, rates, gate = declared.vectors, declared.rates, declared.exit.gate
        if frame is not None:
            vectors = tuple(_turned(v, frame.rotation) if v.name in ("q", "k") else v for v in vectors)
        self.plain = [v for v in vectors if v.plain]
        self.streams = [v for v in vectors if not v.plain and v.down is None]
        self.several = [v for v in vectors if v.writes > 1]
        self.direct = [r for r in rates if r.down is None]
        self.narrow: list[Vector | Rate] = [v for v in vectors if v.down is not None]
        self.narrow += [r for r in rates if r.down is not None]
        downs = [x.down for x in self.narrow if x.down is not None]
        stacked = [v.projection for v in self.streams] + [r.projection for r in self.direct] + downs
        own = [v.projection for v in self.plain] + ([] if gate is None else [gate])
        groups = [stacked, *[[m] for m in own]] if stacked else [[m] for m in own]
        self.weights = list(dict.fromkeys(m.name for group in groups for m in group))
        self.groups = tuple(tuple((self.weights.index(m.name), m.first, m.rows) for m in group) for group in groups)
        self.taken = dict.fromkeys([*self.weights, *[x.projection.name for x in self.narrow]], nn.Linear)
        self.width = -(-sum(m.rows for m in stacked) // _ALIGNED) * _ALIGNED
        self.rows = tuple([self.width] * bool(stacked) + [m.rows for m in own])
        numbers = [r.numbers for r in self.direct] + [Numbers(m.rows, narrow=True) for m in downs]
        self.plan = Plan([v.stream for v in self.streams], numbers, self.width)
        self.narrow_plans = [x.plan for x in self.narrow]
        reads = next((v.stream._replace(heads=v.stream.heads // v.writes) for v in vectors if v.name == "v"), None)
        refused = [f"{v.name}: {why}" for v in vectors if not v.plain and (why := no_stream(v.stream))]
        refused += [why] if reads and (why := no_leave(reads.heads, reads.width, self._whole)) else []
        refused += ["the norm is over groups of heads, not over all of them"] if declared.exit.groups > 1 else []
        self.refusal = refused[0] if refused else None
        self.asks = all(v.conv is None or v.down is None for v in vectors)
        starts = itertools.accumulate((v.projection.rows for v in self.streams), initial=0)
        convolved = [(v, at) for v, at in zip(self.streams, starts, strict=False) if v.conv is not None]
        self.places = [(v.stream.conv - 1, at, v.projection.rows) for v, at in convolved]

    @property
    def token(self) -> Kernels:
        return self._token

    @property
    def _whole(self) -> bool:
        return self.declared.exit.after or self.declared.exit.skip is not None

    def enter(
        self,
        around: BlockModule,
        x: Tensor,
        tails: tuple[Tensor, ...],
        packing: Packing | None,
        columns: Columns | None = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        from axes.kernels.blocks.enter import enter as kernel
        from axes.kernels.blocks.products import products

        cu = None if packing is None else packing.offsets
        weights = [parameter(around, f"{name}.weight") for name in self.weights]
        made = list(products(x, weights, self.groups, self.rows))
        signal: dict[str, Tensor] = {}
        convs = _Convolutions(around, [*self.streams, *self.narrow], tails)
        if self.width:
            given = [*convs.parameters(self.streams), *_numbers(around, self.direct)]
            p, before = made.pop(0), convs.before(self.streams)
            if columns is not None and self.places:
                p, before = columns(p, self.places, before)
            results, ends = kernel(p, self.plan, given, before, cu)
            convs.leave(self.streams, ends)
            rest = iter(results)
            signal.update({v.name: next(rest) for v in self.streams})
            for r in self.direct:
                signal.update(_named(r, rest))
            for item, plan in zip(self.narrow, self.narrow_plans, strict=True):
                z = linear(next(rest), parameter(around, f"{item.projection.name}.weight").to(x.dtype))
                if isinstance(item, Vector):
                    (signal[item.name],), ends = kernel(z, plan, convs.parameters([item]), convs.before([item]), cu)
                    convs.leave([item], ends)
                else:
                    signal.update(_named(item, iter(kernel(z, plan, _numbers(around, [item]))[0])))
        lead = x.shape[:-1]
        signal.update({v.name: made.pop(0).view(*lead, v.stream.heads, v.stream.width) for v in self.plain})
        for v in self.several:
            signal[v.name] = signal[v.name].unflatten(2, (v.writes, -1)).movedim(2, 3)
        for name in self.declared.others:
            signal.update(module(around, name)(x))
        gate, skipped = made[0] if made else None, signal["v"] if self.declared.exit.skip else None
        return signal, convs.after(), (gate, skipped)

    def leave(self, around: BlockModule, y: Tensor, kept: Any) -> Tensor:
        from axes.kernels.blocks.leave import leave as kernel

        end, (gate, v) = self.declared.exit, kept
        weight = None if end.norm is None else parameter(around, f"{end.norm}.weight")
        skip = None if end.skip is None else parameter(around, end.skip)
        if skip is not None:
            skip = skip.view(y.shape[2], -1).expand(y.shape[2:]).flatten()
        u = kernel(y, gate, weight, skip, v, activation=end.activation, eps=end.eps, after=end.after)
        out: Tensor = module(around, end.out)(u)
        return out

    def saved(self, around: BlockModule) -> dict[str, int]:
        end, width = self.declared.exit, module(around, self.weights[0]).weight.shape[1]
        out = module(around, end.out).weight.shape[1]
        counts = {"input": width, "product": 0 if self.plan.linear else self.width}
        for x in self.narrow:
            counts[f"bottleneck of {x.name}"] = x.down.rows if x.down else 0
            counts[f"product of {x.name}"] = x.projection.rows
        made = end.norm is not None or end.gate is not None or end.skip is not None
        counts |= {"gate": out if end.gate else 0, "reads": out if made else 0}
        return counts | {"input of the out-projection": out}


def _turned(vector: Vector, rotation: Rotation) -> Vector:
    assert isinstance(rotation.angle, int | float)
    return vector._replace(stream=vector.stream._replace(turn=float(rotation.angle), uniform=rotation.uniform))


class Kept(NamedTuple):
    """What a block that entered by its kernels keeps for leaving. frame: in which q and k left."""

    what: Any
    frame: Frame | None


# ---- choice ----------------------------------------------------------------------------------------------------------


def no_block_kernel(around: BlockModule, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a block does not run by its kernels on this device in this dtype, or None."""
    fused = around.fused
    if fused is None:
        return f"{type(around).__name__} declares nothing that a kernel could do"
    if (reason := versions.no_kernel(device, dtype)) is not None:
        return reason
    if fused.refusal is not None:
        return fused.refusal
    for name, kind in fused.taken.items():
        if not is_plain(module(around, name), kind):
            return f"{name} is not a plain {_said(kind)}, whose weights may stand beside others in one product"
    return None


def _said(kind: type[nn.Module]) -> str:
    return "nn.Linear" if kind is nn.Linear else kind.__name__


def saved(around: BlockModule, dtype: torch.dtype) -> dict[str, int]:
    """Bytes a token that the block keeps for its backward when it runs by its kernels, by name.

    What the recurrence keeps (its signal among it) is not counted.
    """
    assert around.fused is not None
    return {name: dtype.itemsize * count for name, count in around.fused.saved(around).items() if count}


# ---- the two halves --------------------------------------------------------------------------------------------------


def enter(
    around: BlockModule,
    x: Tensor,
    tails: tuple[Tensor, ...] | None,
    packing: Packing | None,
    implementation: str | None,
    token: bool = False,
    columns: Columns | None = None,
) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
    """`around.enter` by the kernels where they take the block, or as asked for by name.

    tails: None for empty ones.  token: for `dispatch.step`; else the recurrence is that of `frame_of` what is kept,
    if there is one.  columns: as of `Kernels.enter`, where it is asked (`asks`).  Raises NoImplementation if "triton"
    is asked for and they do not take what is declared; a block that declares nothing has one form, and the name is for
    its recurrence.
    """
    kernels = _kernels(around, x, implementation or dispatch.chosen())
    if kernels is not None:
        kernels = kernels.token if token else kernels
        signal, ends, kept = kernels.enter(around, x.to(taken_in(x)), tails or (), packing, columns)
        return signal, ends, Kept(kept, kernels.frame)
    if tails is None:
        tails = around.tails(x.shape[0] if packing is None else packing.sequences, x)
    return around.enter(x, tails, packing)


def asks(around: BlockModule, x: Tensor, implementation: str | None) -> bool:
    """Whether `enter` asks for what its convolutions read of tokens before, by `columns`, and is not to be given it."""
    kernels = _kernels(around, x, implementation or dispatch.chosen())
    return kernels is not None and kernels.asks


def _kernels(around: BlockModule, x: Tensor, implementation: str | None) -> Kernels | None:
    """What enters in the place of `around.enter`, if anything does."""
    if implementation not in (None, "triton") or not x.numel():
        return None
    reason = no_block_kernel(around, x.device, taken_in(x))
    if reason is None:
        return around.fused
    if implementation == "triton" and around.fused is not None:
        raise dispatch.NoImplementation(f"no Triton kernel for this block: {reason}. Use implementation='torch'")
    return None


def leave(around: BlockModule, y: Tensor, kept: Any) -> Tensor:
    """`around.leave` as `enter` was."""
    if not isinstance(kept, Kept):
        return around.leave(y, kept)
    assert around.fused is not None
    return around.fused.leave(around, y, kept.what)


def frame_of(kept: Any) -> Frame | None:
    """The frame in which the queries and keys of an `enter` left."""
    return kept.frame if isinstance(kept, Kept) else None


def _named(rate: Rate, results: Iterable[Tensor]) -> dict[str, Tensor]:
    rest = iter(results)
    names = [rate.name] if rate.step is None else [rate.name, rate.step]
    if len(rate.shape) == 1:
        return {name: next(rest) for name in names}
    return {name: next(rest).unflatten(-1, rate.shape) for name in names}


def _numbers(around: nn.Module, rates: Sequence[Rate]) -> list[Tensor]:
    """Parameters of rates, in the order of the kernel's list."""
    made: list[Tensor] = []
    for r in rates:
        if r.log_rate is not None:  # a number a head may stand for all of the head's
            log = parameter(around, r.log_rate)
            made.append(log if log.shape == r.shape and log.ndim == 1 else log.expand(r.shape).flatten())
        if r.bias is not None:
            made.append(parameter(around, r.bias))
    return made


@final
class _Convolutions:
    """The convolutions of vectors, their parameters and tails: a module's own are cut among those that share it."""

    def __init__(self, around: nn.Module, items: Sequence[Vector | Rate], tails: tuple[Tensor, ...]) -> None:
        sharing: dict[str, list[Vector]] = {}
        for item in items:
            if isinstance(item, Vector) and item.conv is not None:
                sharing.setdefault(item.conv, []).append(item)
        self.sharing, self.cut = sharing, {}
        self.ends: dict[str, Tensor] = {}
        for i, (name, vectors) in enumerate(sharing.items()):
            sizes, stream = [v.projection.rows for v in vectors], vectors[0].stream
            held = [parameter(around, f"{name}.{x}") for x in ("weight", "bias")[: 1 + stream.biased]]
            cut = [x.split(sizes) if len(vectors) > 1 else (x,) for x in held]
            before = (tails[i].split(sizes, -1) if len(vectors) > 1 else (tails[i],)) if tails else ()
            for n, v in enumerate(vectors):
                self.cut[v.name] = [x[n] for x in cut], [x for x in before[n : n + 1]]

    def parameters(self, vectors: Sequence[Vector]) -> list[Tensor]:
        return [x for v in vectors if v.conv is not None for x in self.cut[v.name][0]]

    def before(self, vectors: Sequence[Vector]) -> list[Tensor]:
        return [x for v in vectors if v.conv is not None for x in self.cut[v.name][1]]

    def leave(self, vectors: Sequence[Vector], ends: Sequence[Tensor]) -> None:
        self.ends.update(zip([v.name for v in vectors if v.conv is not None], ends, strict=True))

    def after(self) -> tuple[Tensor, ...]:
        ends = [[self.ends[v.name] for v in vectors] for vectors in self.sharing.values()]
        return tuple(x[0] if len(x) == 1 else torch.cat(x, -1) for x in ends)


def parameter(around: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found = module(around, owner)._parameters[name]
    assert found is not None
    return found


def module(around: nn.Module, path: str) -> Any:
    for name in path.split(".") if path else ():
        around = around._modules[name]  # type: ignore[assignment]
    return around
