"""Mixers whose coefficients are parameters: pre, post, and whatever the tuple demands. Any legal tuple becomes one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes.core.geometry import Geometry
from axes.core.rates import Domain, Per, extent
from axes.core.state_update import StateUpdate
from axes.depth import kernels
from axes.depth.base import Coefficients, DepthMixer
from axes.depth.choice import plans
from axes.depth.initial import OFF_DIAGONAL, one_hot
from axes.depth.meaning import corrects, require_streams
from axes.errors import AxesError, IllegalUpdate, ShapeError, wrong_type
from axes.routes.choice import Implementation, Plan, Target

EPS = 1e-6


class StaticMixer(DepthMixer):
    """pre (n), post (n) and every rate of the tuple as parameters, the same for all tokens or moved by each.

    per_token: names of rates, "pre" or "post" that every token moves, before the chart of their domain, by a projection
    of all its streams (of a list, by one of what was written last) that starts at zero.

    pre starts at e_{l mod n}, post at 1; what keeps the old streams starts at keeping them, what takes away from them
    starts at (almost) nothing, step sizes start at 1. With the alignment cost and Euclidean h the network then equals
    pre-norm, exactly unless a unit gate or a doubly stochastic matrix only comes close to one.

    A cost that corrects what is stored under its key multiplies that by 1 - rate |k|^2 at every sublayer (the delta
    rule). Its key starts at length 1, post = 1 / sqrt(n), and its rate at 1/2: half of what was there stays. No such
    network equals pre-norm.
    """

    dynamic_names: ClassVar[frozenset[str]] = frozenset({"projections"})

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        fractions: int = 1,
        per_token: tuple[str, ...] = (),
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            layer_index,
            streams,
            fractions=fractions,
            learned_reduce=learned_reduce,
            device=device,
            dtype=dtype,
        )
        self.sees = bool(per_token)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = streams * fractions
        each = (rows,) if fractions == 1 else (fractions, rows)
        self.pre = nn.Parameter(torch.empty(each, **factory))
        self.post = nn.Parameter(torch.empty(each, **factory))
        self.demands = self.update.demands()
        self.vectors = sorted(self.update.signals() - {"k", "v"})
        shapes: dict[str, tuple[int, ...]] = {rate.name: self._shape(rate) for rate in self.demands}
        shapes |= {name: (rows,) for name in self.vectors}
        self.rates = nn.ParameterDict({name: nn.Parameter(torch.empty(s, **factory)) for name, s in shapes.items()})
        every = {"pre": each, "post": each, **shapes}
        if unknown := set(per_token) - set(every):
            raise ShapeError(f"{type(self).__name__}: per_token {sorted(unknown)} is not among {sorted(every)}")
        width = d_model if self._lists else streams * d_model
        self.projections = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(math.prod(every[name]), width, **factory)) for name in per_token}
        )
        self.reset_parameters()

    def _shape(self, rate: Per) -> tuple[int, ...]:
        n, d = self.streams * self.fractions, self.d_model // self.fractions
        if rate.shape == "pair" and n % 2:
            raise ShapeError(f"{type(self).__name__}: {rate.name!r} rotates pairs of streams: n must be even, got {n}")
        if rate.shape == "row-pair" and d % 2:
            raise ShapeError(f"{type(self).__name__}: {rate.name!r} rotates pairs of channels: d must be even, got {d}")
        return extent(rate, n, d)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        like = torch.zeros(self.streams * self.fractions, dtype=torch.float64, device=self.pre.device)
        eye = torch.eye(self.fractions, dtype=like.dtype, device=like.device)
        every = torch.ones(self.streams, dtype=like.dtype, device=like.device)
        self.pre.copy_(torch.kron(one_hot(self.layer_index, every), eye).view_as(self.pre))
        self.post.copy_(torch.kron(every, eye).view_as(self.post))
        if corrects(self.update):
            self.post.mul_(self.streams**-0.5)
        for projection in self.projections.values():
            projection.zero_()
        starts = _starts(self.update)
        for rate in self.demands:
            start = starts.get(rate.name, 1.0)
            if isinstance(start, Geometry):
                self.rates[rate.name].copy_(start.identity_logits(like, OFF_DIAGONAL))
            else:
                self.rates[rate.name].fill_(raw(start, rate.domain))
        for name in self.vectors:
            self.rates[name].copy_(like if starts.get(name) == 0.0 else one_hot(self.layer_index, like))

    def coefficients(self, streams: Tensor) -> Coefficients:
        moved = self._moved(streams) if len(self.projections) else {}

        def raw(name: str, parameter: Tensor) -> Tensor:
            constant = parameter.to(streams.dtype)
            if name not in moved:
                return constant
            return constant + moved[name].reshape(*streams.shape[:-2], *constant.shape)

        signal: dict[str, Tensor] = {"k": raw("post", self.post)}
        for rate in self.demands:
            signal[rate.name] = _value(raw(rate.name, self.rates[rate.name]), rate)
        for name in self.vectors:
            signal[name] = raw(name, self.rates[name])
        return Coefficients(raw("pre", self.pre), signal)

    def _moved(self, streams: Tensor) -> dict[str, Tensor]:
        """By how much this token moves the free parameters: projections of RMSNorm(vec X), of a list its last value."""
        flat = streams[..., -1, :] if self._lists else streams.flatten(-2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        return {name: F.linear(flat, projection.to(flat.dtype)) for name, projection in self.projections.items()}


@final
class TupleMixer(StaticMixer):
    """The mixer of a tuple of your own; `mixer(update)` makes a factory of it."""

    def __init__(
        self,
        update: StateUpdate,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        prenorm: bool | None = None,
        entry: Literal["copies", "first"] = "copies",
        fractions: int = 1,
        per_token: tuple[str, ...] = (),
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(update, StateUpdate):
            raise wrong_type("TupleMixer", "update", "a StateUpdate, of which `mixer(update)` makes a class", update)
        require_streams(update)
        self.update, self.entry = update, entry
        super().__init__(
            d_model,
            layer_index,
            streams,
            fractions=fractions,
            per_token=per_token,
            learned_reduce=learned_reduce,
            device=device,
            dtype=dtype,
        )
        self.prenorm = self.prenorm if prenorm is None else prenorm

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, update={self.update}"


@final
@dataclass(frozen=True)
class MixerFactory:
    """Builds mixers of one tuple: called like every mixer class, (d_model, layer_index, streams, ...)."""

    update: StateUpdate
    prenorm: bool
    entry: Literal["copies", "first"] = "copies"
    fractions: int = 1
    per_token: tuple[str, ...] = ()

    def __call__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> TupleMixer:
        return TupleMixer(
            self.update,
            d_model,
            layer_index,
            streams,
            prenorm=self.prenorm,
            entry=self.entry,
            fractions=self.fractions,
            per_token=self.per_token,
            learned_reduce=learned_reduce,
            device=device,
            dtype=dtype,
        )

    def plans(
        self, target: Target | None, dtype: torch.dtype | None, implementation: Implementation | None
    ) -> tuple[Plan, ...]:
        """What runs for one sublayer, by default on a CPU in float32."""
        target, dtype = target or Target.of("cpu"), dtype or torch.float32
        return plans(self.update, target, dtype, implementation, own=DepthMixer._own(self.fractions))


def mixer(
    update: StateUpdate,
    *,
    prenorm: bool | None = None,
    entry: Literal["copies", "first"] = "copies",
    fractions: int = 1,
    per_token: tuple[str, ...] = (),
) -> MixerFactory:
    """A mixer class of any legal tuple that has a meaning on streams; its demands become parameters.

    Args:
        update: the tuple. Its cost sees k = post and v = y.
        prenorm: whether sublayers should normalise their input; by default unless the tuple's h normalises the streams.
        entry: whether what enters stands in every stream ("copies") or in the first one ("first").
        fractions: rows that a stream is made of, each read and written by itself.
        per_token: names of the rates, of "pre" and of "post" that every token moves; the others are constants.

    Raises:
        IllegalUpdate: the tuple takes its gradient from outside, the adapter has no streams of its memory, it asks for
            something that depth does not have, or nothing that a sublayer writes can be learned through it.

    >>> from axes.core.algorithms import Step
    >>> from axes.core.costs import SquaredError
    >>> from axes.core.rates import Per
    >>> delta = mixer(StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta"))))
    >>> sorted(name for name, _ in delta(d_model=8, layer_index=0, streams=2).named_parameters())
    ['post', 'pre', 'rates.beta']
    """
    require_streams(update)
    normed = not kernels.normalises(update) if prenorm is None else prenorm
    factory = MixerFactory(update, normed, entry, fractions, per_token)
    try:
        reason = _blind(factory)
    except AxesError as error:
        raise IllegalUpdate(f"this tuple has no meaning along depth: {error}") from error
    if reason:
        raise IllegalUpdate(f"this tuple has no meaning along depth: {reason}")
    return factory


def _blind(factory: MixerFactory) -> str | None:
    """Why nothing can be learned through two sublayers of two streams, or None; what cannot run raises."""
    width, lead = 4 * factory.fractions, (2, 3)  # batch and tokens: a rate of one must not be taken for the other
    draw = torch.Generator().manual_seed(0)
    h, *ys = (torch.randn(*lead, width, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3))
    with torch.enable_grad():
        mixers = [factory(width, index, 2, dtype=torch.float64) for index in range(2)]
        streams = mixers[0].expand(h)
        for m, y in zip(mixers, ys, strict=True):
            x, coefficients = m.read(streams)
            streams = m.write(streams, y, coefficients)
        out = mixers[1].reduce(streams)
        for what, found, y in (("what a sublayer reads", x, ys[0]), ("its output", out, ys[1])):
            if found.shape != h.shape:
                return f"{what} has the shape {tuple(found.shape)} where {tuple(h.shape)} entered"
            weight = torch.randn(h.shape, generator=draw, dtype=torch.float64)
            moved = found.requires_grad and _gradient((found * weight).sum(), y)
            if isinstance(moved, Tensor) and not torch.isfinite(moved).all():
                return f"the gradient of {what} is not finite"
            if not isinstance(moved, Tensor) or moved.abs().amax() < 1e-9:
                return f"{what} does not move with what was written just before: it is constant, or its gradient is 0"
    return None


def _gradient(value: Tensor, x: Tensor) -> Tensor | None:
    return torch.autograd.grad(value, x, retain_graph=True, allow_unused=True)[0]


def _starts(update: StateUpdate) -> dict[str, float | Geometry]:
    """Rates and vectors by name where a sublayer only adds: what does not start at one, and the links of logits.

    A filter starts as a pass-through: it forgets.
    """
    cost, h, monoid, step, _ = update.parts()
    away = [cost.ridge, *(rate for inner in update.filters() for rate in inner.parts().monoid.rates())]
    halves = [step.rate] if corrects(update) else []
    starts = [(rate, 0.0) for rate in away] + [(rate, 0.5) for rate in halves]
    return {**monoid.neutral(), **h.neutral(), **{rate.name: at for rate, at in starts if isinstance(rate, Per)}}


def raw(value: float, domain: Domain) -> float:
    """The free parameter of a rate's value, or of one nearby: no gradient is lost at the ends of a domain."""
    if domain == "real":
        return value
    with_end = math.log(value) if value > 0 else -math.inf
    if domain == "unit":
        with_end = with_end - math.log1p(-value) if value < 1 else math.inf
    return max(OFF_DIAGONAL, min(-OFF_DIAGONAL, with_end))


def _value(raw: Tensor, rate: Per) -> Tensor:
    """A rate from its free parameter: unit gates as logs, positive rates, real ones."""
    if rate.domain == "unit":
        return F.logsigmoid(raw)
    return raw.exp() if rate.domain == "positive" else raw
