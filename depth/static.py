"""Mixers whose coefficients are parameters: pre, post, and whatever the tuple demands. Any legal tuple becomes one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes.core.geometry import Geometry
from axes.core.rates import Domain, Per
from axes.core.state_update import StateUpdate
from axes.depth.base import Coefficients, DepthMixer, corrects, normalises, plans, require_streams
from axes.depth.initial import OFF_DIAGONAL, one_hot
from axes.errors import AxesError, IllegalUpdate, ShapeError
from axes.routes.choice import Implementation, Plan, Target


class StaticMixer(DepthMixer):
    """pre (n), post (n) and every rate of the tuple as parameters, the same for all tokens.

    pre starts at e_{l mod n}, post at 1; what keeps the old streams starts at keeping them, what takes away from them
    starts at (almost) nothing, step sizes start at 1. With the alignment cost and Euclidean h the network then equals
    pre-norm, exactly unless a unit gate or a doubly stochastic matrix only comes close to one.

    A cost that corrects what is stored under its key multiplies that by 1 - rate |k|^2 at every sublayer (the delta
    rule). Its key starts at length 1, post = 1 / sqrt(n), and its rate at 1/2: half of what was there stays. No such
    network equals pre-norm.
    """

    def __init__(
        self,
        d_model: int,
        layer_index: int = 0,
        streams: int = 4,
        *,
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, layer_index, streams, learned_reduce=learned_reduce, device=device, dtype=dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pre = nn.Parameter(torch.empty(streams, **factory))
        self.post = nn.Parameter(torch.empty(streams, **factory))
        self.demands = self.update.demands()
        self.vectors = sorted(self.update.signals() - {"k", "v"})
        shapes: dict[str, tuple[int, ...]] = {rate.name: self._shape(rate) for rate in self.demands}
        shapes |= {name: (streams,) for name in self.vectors}
        self.rates = nn.ParameterDict({name: nn.Parameter(torch.empty(s, **factory)) for name, s in shapes.items()})
        self.reset_parameters()

    def _shape(self, rate: Per) -> tuple[int, ...]:
        n, d = self.streams, self.d_model
        if rate.shape == "pair" and n % 2:
            raise ShapeError(f"{type(self).__name__}: {rate.name!r} rotates pairs of streams: n must be even, got {n}")
        shapes = {"scalar": (), "key": (n,), "row": (d,), "square": (d, n), "pair": (n // 2,), "mix": (n, n)}
        return shapes[rate.shape]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        like = torch.zeros(self.streams, dtype=torch.float64, device=self.pre.device)
        self.pre.copy_(one_hot(self.layer_index, like))
        self.post.fill_(self.streams**-0.5 if corrects(self.update) else 1.0)
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
        signal: dict[str, Tensor] = {"k": self.post.to(streams.dtype)}
        for rate in self.demands:
            signal[rate.name] = _value(self.rates[rate.name].to(streams.dtype), rate)
        for name in self.vectors:
            signal[name] = self.rates[name].to(streams.dtype)
        return Coefficients(self.pre.to(streams.dtype), signal)


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
        learned_reduce: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_streams(update)
        self.update = update
        super().__init__(d_model, layer_index, streams, learned_reduce=learned_reduce, device=device, dtype=dtype)
        self.prenorm = self.prenorm if prenorm is None else prenorm

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, update={self.update}"


@final
@dataclass(frozen=True)
class MixerFactory:
    """Builds mixers of one tuple: called like every mixer class, (d_model, layer_index, streams, ...)."""

    update: StateUpdate
    prenorm: bool

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
            learned_reduce=learned_reduce,
            device=device,
            dtype=dtype,
        )

    def plans(
        self, target: Target | None, dtype: torch.dtype | None, implementation: Implementation | None
    ) -> tuple[Plan, ...]:
        """What runs for one sublayer, by default on a CPU in float32."""
        return plans(self.update, target or Target.of("cpu"), dtype or torch.float32, implementation)


def mixer(update: StateUpdate, *, prenorm: bool | None = None) -> MixerFactory:
    """A mixer class of any legal tuple that has a meaning on streams; its demands become parameters.

    Args:
        update: the tuple. Its cost sees k = post and v = y.
        prenorm: whether sublayers should normalise their input; by default unless the tuple's h normalises the streams.

    Raises:
        IllegalUpdate: the tuple takes its gradient from outside, its memory is not a matrix of streams, or it asks for
            something that depth does not have.

    >>> from axes.core.algorithms import Step
    >>> from axes.core.costs import SquaredError
    >>> from axes.core.rates import Per
    >>> delta = mixer(StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta"))))
    >>> sorted(name for name, _ in delta(d_model=8, layer_index=0, streams=2).named_parameters())
    ['post', 'pre', 'rates.beta']
    """
    require_streams(update)
    factory = MixerFactory(update, not normalises(update) if prenorm is None else prenorm)
    try:  # one sublayer of two streams: what cannot run should fail here, not in the middle of a network
        trial = factory(4, 0, 2, dtype=torch.float64)
        streams = trial.expand(torch.ones(1, 4, dtype=torch.float64))
        x, coefficients = trial.read(streams)
        trial.reduce(trial.write(streams, x, coefficients))
    except AxesError as error:
        raise IllegalUpdate(f"this tuple has no meaning along depth: {error}") from error
    return factory


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
