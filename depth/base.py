"""The depth adapter: a state update along layers.

    x_in = S pre              read: what the sublayer sees
    y    = f(x_in)
    S   <- update.step(S)     write: k = post, v = y, and the rates that the tuple asks for

The state S (B, T, d, n) is the transposed view of n residual streams X (B, T, n, d). With the alignment cost the write
is S A + y post^T, that is X <- R X + post y with A = R^T, and the tuple's monoid says which R. A mixer supplies
coefficients and nothing else: every number of the new streams comes out of the tuple.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from axes.core.monoids import Identity
from axes.core.rates import Signal
from axes.core.state_update import State, StateUpdate
from axes.depth import kernels
from axes.depth.choice import choose, plans
from axes.depth.given import require, require_own, require_written
from axes.depth.lines import (
    WRITES,
    Before,
    by_line,
    read_by_kernels,
    write_by_kernels,
    write_then_read_before,
    write_then_read_by_kernels,
)
from axes.depth.meaning import require_streams
from axes.errors import ShapeError, wrong_type
from axes.kernels.common.repeated import Same
from axes.routes.choice import Implementation, Plan, Target
from axes.routes.parameters import are_plain, some_parameter
from axes.routes.precision import own_precision

Streams = Tensor | State


class Coefficients(NamedTuple):
    """What a mixer supplies for one sublayer: pre (..., n), and the signal without v (k = post, and the rates).

    With streams in r fractions, pre and k are (..., r, n): one read and one write for each fraction of the sublayer.
    read: where products read, the streams and the same once more, as they are computed with. A write of the former is
        one of the latter: the pass that makes the read's gradient then adds the write's.
    """

    pre: Tensor
    signal: Signal
    read: tuple[Tensor, Tensor] | None = None


class DepthMixer(nn.Module, ABC):
    """Base of every mixer along depth; one instance belongs to one sublayer.

    Args:
        d_model: width d.
        layer_index: position l of the sublayer (attention and MLP both count); chooses the stream that is read first.
        streams: n.
        fractions: r, how many rows of width d / r a stream is made of; each is read and written with weights of its
            own, so that the state has n r rows and a sublayer r reads and r writes. What the monoid keeps is decided by
            the first of them.
        learned_reduce: leave the streams by sum_i sigmoid(b)_i X_i with b a parameter, 1/n each at the start, instead
            of by their mean. Only the mixer whose `reduce` is called needs it.
        device, dtype: of the parameters. Streams keep the dtype that `expand` is given.

    Attributes:
        update: the tuple that reads and writes.
        entry: what enters stands in every stream ("copies"), or in the first one and zeros in the others ("first").
        implementation: who reads and writes, by name reference, torch or triton; None, unless set, for what `choose`
            picks.
        adds: why torch's addition is all that there is for a kernel of streams to do, where the tuple's write adds.
        counts: whether the depth itself is told: streams are a State then.
        sees: whether coefficients depend on what the streams hold; if not, they may be shown streams of no width.
        prenorm: whether the sublayer should normalise its input itself; False where the tuple hands out normalised
            streams already (an h that is a sphere), true of `PreNorm` and `PostNorm` alike.

    The streams are a tensor (B, T, n, d), in any leading shape; for a tuple that remembers more than its streams
    (filters, statistics, an anchor, a list) they are the `State`, to be handed on as it is; a list has one pair for
    what entered and one for each write, and `coefficients` is shown its values (..., pairs, d). Coefficients, the step
    and the mixing matrix stay in float32 (float64 if the streams or the parameters are), under autocast too; only the
    result is cast to the dtype of the streams.

    A mixer has four calls and no forward. Inside a unit of FSDP2 (`Mixed`, a block) that does not matter; a mixer that
    is a unit of its own needs `torch.distributed.fsdp.register_fsdp_forward_method(mixer, call)` for each of
    `DepthMixer.calls`, or they meet sharded parameters.
    """

    calls: ClassVar[tuple[str, ...]] = ("expand", "read", "write", "reduce")
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    update: StateUpdate
    entry: Literal["copies", "first"] = "copies"
    implementation: Implementation | None = None
    fractions: int = 1
    counts: ClassVar[bool] = False
    adds: ClassVar[str | None] = None
    sees: bool = True
    name: ClassVar[str] = "mixer"
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    differs: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""

    # parameters, or dictionaries of them, that multiply activations; all others are static and take no weight decay
    dynamic_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 1,
        *,
        fractions: int = 1,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        sizes = (("d_model", d_model, 1), ("layer_index", layer_index, 0), ("streams", streams, 1))
        for label, value, least in (*sizes, ("fractions", fractions, 1)):
            if not isinstance(value, int) or value < least:
                raise ShapeError(f"{who}: {label} must be an integer >= {least}, got {value!r}")
        if d_model % fractions:
            raise ShapeError(f"{who}: d_model={d_model} is not a multiple of fractions={fractions}")
        if learned_reduce and streams == 1:
            raise ShapeError(f"{who}: learned_reduce has no effect on one stream")
        if dtype is not None and not dtype.is_floating_point:
            raise ShapeError(f"{who}: dtype must be floating point, got {dtype}")
        require_streams(self.update)
        kernels.adds(self.update)  # a compiler that follows the first call finds this and what it asks there
        self.d_model, self.layer_index, self.streams, self.fractions = d_model, layer_index, streams, fractions
        self.prenorm = not kernels.normalises(self.update)
        _, h, _, step, memory = self.update.parts()
        self._lists, counts = memory.kind == "list", self.update.parts().counts
        recalls = step.via or h.stats or step.debias or counts
        self._remembers = bool(recalls or self._lists or _anchored(self.update) or self.counts)
        self._further = dataclasses.replace(self.update, monoid=Identity()) if fractions > 1 else self.update
        self.exit = nn.Parameter(torch.empty(streams, device=device, dtype=dtype)) if learned_reduce else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's tuple has none of its facts yet."""
        super().__setstate__(state)
        kernels.adds(self.update)

    # ---- what runs -------------------------------------------------------------------------------------------

    @classmethod
    def default_plans(
        cls, target: Target | None, dtype: torch.dtype | None, implementation: Implementation | None
    ) -> tuple[Plan, ...]:
        """What runs for the tuple that the class declares, by default on a CPU in float32."""
        target, dtype = target or Target.of("cpu"), dtype or torch.float32
        return plans(cls.update, target, dtype, implementation, own=cls._own(cls.fractions), adds=cls.adds)

    def plans(
        self,
        target: Target | None = None,
        dtype: torch.dtype | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Plan, ...]:
        """What runs for one sublayer, by default where the mixer is and in its dtype."""
        parameter = next(self.parameters(), torch.empty(0))
        named, target = implementation or self.implementation, target or Target.of(parameter.device)
        own = self._own(self.fractions)
        return plans(self.update, target, dtype or parameter.dtype, named, self.streams, own, self.adds)

    # ---- what a mixer declares -------------------------------------------------------------------------------

    @abstractmethod
    def coefficients(self, streams: Tensor) -> Coefficients:
        """pre, post and rates for streams (..., n, d), in the dtype of the computation."""

    def written(self, y: Tensor, coefficients: Coefficients) -> Signal:
        """The signal of a write of y (..., d): a mixer whose keys or rates depend on what is written says so here."""
        return {**coefficients.signal, "v": y}

    def leave(self, streams: Tensor) -> Tensor:
        """The weights (..., n) that `reduce` reads with: 1/n, or learned ones."""
        if self.exit is not None:
            return torch.sigmoid(self.exit.to(streams.dtype))
        return streams.new_full((self.streams,), 1.0 / self.streams)

    def reset_parameters(self) -> None:
        """Back to the initial values, at which the network equals one with plain pre-normed residual connections."""
        if self.exit is not None:
            nn.init.constant_(self.exit, -math.log(self.streams - 1))

    @property
    def added(self) -> bool:
        """Whether a write is one addition to one stream and a read that stream, by whom nobody asked."""
        return False

    # ---- the four calls --------------------------------------------------------------------------------------

    def expand(self, hidden: Tensor) -> Streams:
        """Enter: n copies of hidden (B, T, d) -> (B, T, n, d), or hidden and zeros, or a list of one pair."""
        require(self, hidden, (self.d_model,), "expand", "hidden", "(B, T, d)")
        one = hidden.unflatten(-1, (1, self.fractions, -1))
        if self._lists:
            return self._listed(hidden)
        if self.entry == "first":
            streams = torch.cat((one, one.new_zeros(1).expand(*one.shape[:-3], self.streams - 1, *one.shape[-2:])), -3)
        else:
            streams = one.expand(*one.shape[:-3], self.streams, *one.shape[-2:])
        streams = streams.flatten(-3, -2).contiguous()
        if not self._remembers:
            return streams
        with own_precision(hidden):
            theta = self._wide(streams)
            signal = {**self.coefficients(theta).signal, "v": theta[..., 0, :]}
            state = self.update.init(signal, weights=(theta.mT,))
        # what enters is the first write, with weight one: a normaliser counts it
        return state.but(norm=tuple(torch.ones_like(n) for n in state.norm))

    def read(self, streams: Streams) -> tuple[Tensor, Coefficients]:
        """Before the sublayer: x_in = S pre (B, T, d), and the coefficients that `write` will need."""
        if self._by_kernels(streams):
            x, pre, signal, again = by_line(self, read_by_kernels, (streams,))
            return x, Coefficients(pre, signal, None if again is None else (streams, again))
        kept = self._matrix(streams, "read")
        with own_precision(kept):
            if (who := self._chosen(kept)) != "reference":
                return self._seen(kept, who)
            theta = self._wide(kept)
            coefficients = self.coefficients(theta)
            x = self._look(streams, theta, coefficients.pre, coefficients.signal)
        return x.to(kept.dtype), coefficients

    def write(self, streams: Streams, y: Tensor, coefficients: Coefficients) -> Streams:
        """After the sublayer: one step of the tuple with k = post and v = y (B, T, d)."""
        if self._by_kernels(streams):
            self._require_written(self._matrix(streams, "write"), y, coefficients)
            names, values = zip(*self._signal(y, coefficients).items(), strict=True)
            given = (_read(streams, coefficients), *values)
            after: Tensor = by_line(WRITES, write_by_kernels, given, names, Same(self.update))
            return after
        kept = self._matrix(streams, "write")
        self._require_written(kept, y, coefficients)
        with own_precision(kept):
            if (who := self._chosen(kept)) != "reference":
                return self._made(kept, y, coefficients, who)
            theta = self._wide(kept)
            signal = self._signal(y.to(theta.dtype), coefficients)
            state = self._state(streams, theta)
            for update, each in zip(self._updates(), self._each(signal), strict=True):
                state, _ = update.step(state, each)
        return state if isinstance(streams, State) else state.theta[0].mT.to(kept.dtype)

    def write_then_read(
        self, streams: Streams, y: Tensor, coefficients: Coefficients, following: DepthMixer,
        before: Before | None = None,
    ) -> tuple[Streams, Tensor, Coefficients]:  # fmt: skip
        """`write`, and the next sublayer's `read`: one pass, where kernels do both and it reads by constants.

        What is read are the streams as they were written, rounded to their dtype; with `before` what that makes of it.
        """
        kept = self._matrix(streams, "write")
        if not self._joins(following, kept):
            after = self.write(streams, y, coefficients)
            x, told = following.read(after)
            return after, x if before is None else before(x), told
        self._require_written(kept, y, coefficients)
        following._matrix(kept, "read")
        names, values = zip(*self._signal(y, coefficients).items(), strict=True)
        given, writer = (_read(kept, coefficients), *values), Same(self.update)
        if before is None:
            made = by_line(following, write_then_read_by_kernels, given, names, writer)
        else:
            made = by_line(before, write_then_read_before, given, names, writer, before.facts(before.module))
        after, x, pre, signal, again = made
        return after, x, Coefficients(pre, signal, None if again is None else (after, again))

    def reduce(self, streams: Streams) -> Tensor:
        """Leave: the tuple's read with weights 1/n, the mean of the streams (or with learned weights): (B, T, d)."""
        kept = self._matrix(streams, "reduce")
        with own_precision(kept):
            if (who := self._chosen(kept)) != "reference":
                return self._left(kept, who)
            theta = self._wide(kept)
            weights = self.leave(theta)
            if self.fractions > 1:  # of every copy the same fraction
                eye = torch.eye(self.fractions, dtype=theta.dtype, device=theta.device)
                weights = (weights[..., None, :, None] * eye[:, None, :]).flatten(-2)
            plain = self.update.parts().h.is_identity and not self._remembers
            signal = {} if plain else self.coefficients(theta).signal
            return self._look(streams, theta, weights, signal).to(kept.dtype)

    # ---- for optimizers --------------------------------------------------------------------------------------

    def static_parameters(self) -> Iterator[nn.Parameter]:
        """Biases, scales and constant weights: zero is not where they should drift, so they take no weight decay."""
        return (p for name, p in self.named_parameters() if name.split(".")[0] not in self.dynamic_names)

    def dynamic_parameters(self) -> Iterator[nn.Parameter]:
        """Projections of the streams to coefficients: they take weight decay."""
        return (p for name, p in self.named_parameters() if name.split(".")[0] in self.dynamic_names)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, layer_index={self.layer_index}, streams={self.streams}"

    # ---- pieces ----------------------------------------------------------------------------------------------

    def _chosen(self, kept: Tensor) -> Implementation:
        """Who reads and writes these streams; NoImplementation if the one that is asked for does not."""
        dtype = torch.float64 if self._computed(kept) == torch.float64 else kept.dtype
        own = self._own(self.fractions)
        return choose(self.update, kept.device, dtype, self.implementation, self.streams, own, self.adds).implementation

    @classmethod
    def _own(cls, fractions: int) -> str | None:
        """Why products with the streams are not what this mixer does, whatever its tuple says."""
        if fractions > 1:
            return "a sublayer reads and writes several rows of the state"
        return "the state counts sublayers" if cls.counts else None

    def _by_kernels(self, streams: Streams) -> TypeGuard[Tensor]:
        return isinstance(streams, Tensor) and not self._remembers and self._chosen(streams) == "triton"

    def _seen(self, kept: Tensor, who: Implementation) -> tuple[Tensor, Coefficients]:
        """A read by products; a kernel takes streams as they are, and a wide copy is made for those that look at it."""
        if who == "torch":
            theta = self._wide(kept)
            pre, signal, _ = self.coefficients(theta)
            x, again = kernels.read(self.update, theta, pre, triton=False)
            return x.to(kept.dtype), Coefficients(pre, signal, (kept, again))
        pre, signal, _ = self.coefficients(self._wide(kept if self.sees else kept[..., :0]))
        x, again = kernels.read(self.update, kept, pre, triton=True)
        return x, Coefficients(pre, signal, (kept, again))

    def _made(self, kept: Tensor, y: Tensor, coefficients: Coefficients, who: Implementation) -> Tensor:
        """A write by products."""
        if who == "torch":
            theta = self._wide(_read(kept, coefficients))
            signal = self._signal(y.to(theta.dtype), coefficients)
            return kernels.write(self.update, theta, signal, triton=False).to(kept.dtype)
        return kernels.write(self.update, _read(kept, coefficients), self._signal(y, coefficients), triton=True)

    def _joins(self, following: DepthMixer, kept: Tensor) -> bool:
        """Whether both run by kernels, with their parameters here: a unit of FSDP has them within its calls only."""
        return are_plain(self) and are_plain(following) and self._by_kernels(kept) and following._by_kernels(kept)

    def _follow(
        self, writer: StateUpdate, streams: Tensor, signal: Signal
    ) -> tuple[Tensor, Tensor, Tensor, Signal, Tensor | None]:
        """What another tuple writes by kernels, and what `read_by_kernels` returns of it."""
        if self.sees:
            after = kernels.write(writer, streams, signal, triton=True)
            return (after, *read_by_kernels(self, after))
        pre, told, _ = self.coefficients(self._wide(streams[..., :0]))
        after, x = kernels.write_then_read(writer, streams, signal, pre)
        return after, x, pre, told, None

    def _left(self, kept: Tensor, who: Implementation) -> Tensor:
        """A read by products with the weights at the exit."""
        if who == "torch":
            theta = self._wide(kept)
            return kernels.read(self.update, theta, self.leave(theta), triton=False)[0].to(kept.dtype)
        weights = self.leave(self._wide(kept if self.sees else kept[..., :0]))
        return kernels.read(self.update, kept, weights, triton=True)[0]

    def _look(self, streams: Streams, theta: Tensor, weights: Tensor, signal: Signal) -> Tensor:
        output = self.update.output(self._state(streams, theta), signal)
        if self.fractions == 1:
            return self.update.read(output, weights, signal)
        return torch.cat([self.update.read(output, q, signal) for q in weights.unbind(-2)], -1)

    def _updates(self) -> tuple[StateUpdate, ...]:
        """The tuple of each write of a sublayer: what is kept is decided once."""
        return (self.update, *[self._further] * (self.fractions - 1))

    def _signal(self, y: Tensor, coefficients: Coefficients) -> dict[str, Any]:
        signal = dict(self.written(y, coefficients))
        k = signal["k"]
        if self._lists and isinstance(k, Tensor):  # pairs are stored one by one: no key stands for several tokens
            signal["k"] = k.expand(*y.shape[:-1], k.shape[-1])
        return signal

    def _each(self, signal: dict[str, Any]) -> list[dict[str, Any]]:
        """The signal of each write: a fraction of y under the key of that fraction."""
        if self.fractions == 1:
            return [signal]
        pairs = zip(signal["k"].unbind(-2), signal["v"].unflatten(-1, (self.fractions, -1)).unbind(-2), strict=True)
        return [{**signal, "k": k, "v": v} for k, v in pairs]

    def _listed(self, hidden: Tensor) -> State:
        """A list whose first pair is what entered."""
        with own_precision(hidden):
            wide = self._wide(hidden)
            signal = self._signal(wide, self.coefficients(wide[..., None, :]))
            return self.update.step(self.update.init(signal), signal)[0]

    def _state(self, streams: Streams, theta: Tensor) -> State:
        """The core's state: streams alone are one leaf, transposed."""
        if isinstance(streams, State):
            return streams
        return State((theta.mT,), (), (), (), (), torch.zeros((), dtype=torch.int64))

    def _matrix(self, streams: Streams, call: str) -> Tensor:
        """The streams as (..., n, d), checked."""
        if isinstance(streams, State) != self._remembers:
            wanted = "the State that expand returned" if self._remembers else "a tensor (B, T, n, d)"
            raise wrong_type(f"{type(self).__name__}.{call}", "streams", wanted, streams)
        if isinstance(streams, State):
            require_own(self, streams, call)
        kept = streams if not isinstance(streams, State) else streams.theta[1] if self._lists else streams.theta[0].mT
        rows = kept.shape[-2] if self._lists else self.streams * self.fractions
        require(self, kept, (rows, self.d_model // self.fractions), call, "streams", "(B, T, n, d)")
        return kept

    def _require_written(self, kept: Tensor, y: Tensor, coefficients: Coefficients) -> None:
        if not isinstance(coefficients, Coefficients):
            raise wrong_type(f"{type(self).__name__}.write", "coefficients", "those that read returned", coefficients)
        require_written(self, kept, y)

    def _wide(self, x: Tensor) -> Tensor:
        """x in the dtype of the computation: float32, or float64 where the streams or the parameters are."""
        return x.to(self._computed(x))

    def _computed(self, x: Tensor) -> torch.dtype:
        weight = some_parameter(self)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return dtype if weight is None else torch.promote_types(dtype, weight.dtype)


class Mixed(nn.Module):
    """A sublayer in its mixer: X -> write(X, f(read(X))). Further arguments and outputs of f pass through untouched.

    f normalises its own input if `mixer.prenorm` is true. Several in a row, with streams that are made again in the
    backward if that is asked for: `axes.depth.through`.
    """

    def __init__(self, f: nn.Module, mixer: DepthMixer) -> None:
        super().__init__()
        self.f, self.mixer = f, mixer

    def forward(self, streams: Streams, *args: Any, **kwargs: Any) -> Any:
        """The new streams; with what f returns besides its first output, if it returns a tuple."""
        x, coefficients = self.mixer.read(streams)
        y = self.f(x, *args, **kwargs)
        if isinstance(y, tuple):
            return (self.mixer.write(streams, y[0], coefficients), *y[1:])
        return self.mixer.write(streams, y, coefficients)


def _read(kept: Tensor, coefficients: Coefficients) -> Tensor:
    """The streams as their read hands them on."""
    read = coefficients.read
    return read[1] if read is not None and read[0] is kept else kept


def _anchored(update: StateUpdate) -> bool:
    return not isinstance(update.parts().step.at, str)


__all__ = ["Coefficients", "DepthMixer", "Mixed", "Streams"]
