"""Mixers whose coefficients are parameters: pre, post, and whatever the tuple demands. Any legal tuple becomes one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes.core.geometry import Birkhoff, Bounded, Cayley, Entropic, Geometry, SoftThreshold
from axes.core.monoids import DPLR, Decay, GeneralLinear, Householder, Monoid, Product, Rotation
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth.base import Coefficients, DepthMixer, normalises, require_streams
from axes.depth.initial import OFF_DIAGONAL, near_identity, one_hot
from axes.errors import AxesError, IllegalUpdate, ShapeError

Start = Literal["one", "none"]

# raw parameters at the start. unit: the gate is sigmoid(raw); positive: exp(raw); real: raw itself
RAW = {
    ("one", "unit"): -OFF_DIAGONAL,
    ("one", "positive"): 0.0,
    ("one", "real"): 1.0,
    ("none", "unit"): OFF_DIAGONAL,
    ("none", "positive"): OFF_DIAGONAL,
    ("none", "real"): 0.0,
}


class StaticMixer(DepthMixer):
    """pre (n), post (n) and every rate of the tuple as parameters, the same for all tokens.

    pre starts at e_{l mod n}, post at 1; what keeps the old streams starts at keeping them, what takes away from them
    starts at (almost) nothing, step sizes start at 1. With the alignment cost and Euclidean h the network then equals
    pre-norm, exactly unless a unit gate or a doubly stochastic matrix only comes close to one.
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
        self.post.fill_(1.0)
        starts, logits, zeros = _starts(self.update)
        for rate in self.demands:
            target = self.rates[rate.name]
            if rate.name in logits:
                target.copy_(_identity_logits(logits[rate.name], like))
            else:
                target.fill_(RAW[starts.get(rate.name, "one"), rate.domain])
        for name in self.vectors:
            self.rates[name].copy_(like if name in zeros else one_hot(self.layer_index, like))

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


def _starts(update: StateUpdate) -> tuple[dict[str, Start], dict[str, Geometry], set[str]]:
    """By name: rates that do not start at one, links of mixing logits, and vectors that start at zero."""
    starts: dict[str, Start] = {}
    logits: dict[str, Geometry] = {}
    zeros: set[str] = set()

    def none(rate: Any) -> None:
        if isinstance(rate, Per):
            starts[rate.name] = "none"

    def retain(monoid: Monoid) -> None:
        for part in _flat(monoid):
            if isinstance(part, Householder):
                none(part.beta)
            elif isinstance(part, Decay):
                none(part.weight)
            elif isinstance(part, Rotation):
                none(part.angle)
            elif isinstance(part, DPLR):
                zeros.add(part.left)
            elif isinstance(part, GeneralLinear):
                logits[part.logits.name] = part.link

    cost, h, monoid, _, _ = update.parts()
    retain(monoid)
    none(cost.ridge)
    if isinstance(h, SoftThreshold):
        none(h.threshold)
    for inner in update.filters():  # a filter starts as a pass-through: it forgets
        for rate in inner.parts().monoid.rates():
            none(rate)
    return starts, logits, zeros


def _value(raw: Tensor, rate: Per) -> Tensor:
    """A rate from its free parameter: unit gates as logs, positive rates, real ones."""
    if rate.domain == "unit":
        return F.logsigmoid(raw)
    return raw.exp() if rate.domain == "positive" else raw


def _flat(monoid: Monoid) -> Iterator[Monoid]:
    if isinstance(monoid, Product):
        for part in monoid.parts:
            yield from _flat(part)
    else:
        yield monoid


def _identity_logits(link: Geometry, like: Tensor) -> Tensor:
    """Logits (n, n) at which the link gives the identity, or comes close without losing the gradient."""
    eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    if isinstance(link, Birkhoff | Entropic):
        return near_identity(like)
    if isinstance(link, Bounded):
        return OFF_DIAGONAL * (1 - 2 * eye)
    return 0 * eye if isinstance(link, Cayley) else eye
