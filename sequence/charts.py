"""Charts: how a layer turns tokens into the rates that a tuple demands. One frozen value per parameterisation.

`chart.build(...)` makes the module: tokens x (B, T, D) -> {name: (B, T, H, ...)}. Unit gates leave as logs, computed in
float32 at least, because they are cumulated over time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from axes.core.rates import Per, extent
from axes.errors import IllegalUpdate
from axes.sequence.fused import Matrix, Rate

Factory = dict[str, Any]  # device and dtype of parameters


@final
@dataclass(frozen=True)
class Sizes:
    """Widths of a layer: model D, heads H, key d_k, value d_v. Neighbouring heads, `group` of them, share q and k.

    loose: the pairs of vectors a, b of a transition I + a b^T that nothing bounds but what makes them.
    writes: pairs of key and value a token, and what is `repeated` for each of them: rates by name.
    reads: queries a token, each with an output.
    """

    d_model: int
    heads: int
    d_k: int
    d_v: int
    group: int = 1
    loose: tuple[str, ...] = ()
    writes: int = 1
    repeated: frozenset[str] = frozenset()
    reads: int = 1

    @property
    def key_heads(self) -> int:
        return self.heads // self.group

    def of(self, per: Per) -> tuple[int, ...]:
        """The shape of a rate for one token and head."""
        own = extent(per, self.d_k, self.d_v)
        return (self.writes, *own) if per.name in self.repeated else own


class Chart(ABC):
    """A parameterisation of one or more rates."""

    @abstractmethod
    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        """The module x (B, T, D) -> {name: rate}."""

    def also(self) -> tuple[str, ...]:
        """Names of further rates that the same module supplies."""
        return ()


class ChartModule(nn.Module):
    """A projection of the token (optionally through a low rank) followed by the chart's function."""

    def __init__(self, per: Per, sizes: Sizes, rank: int | None, bias: float | None, factory: Factory) -> None:
        super().__init__()
        self.per, self.shape, self.start = per, (sizes.heads, *sizes.of(per)), bias
        width = math.prod(self.shape)
        self.down = nn.Linear(sizes.d_model, rank, bias=False, **factory) if rank else None
        self.up = nn.Linear(rank or sizes.d_model, width, bias=bias is not None, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.start is not None:
            nn.init.constant_(self.up.bias, self.start)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, H, ...) in float32 at least."""
        y = self.up(x if self.down is None else self.down(x))
        return (y if y.dtype == torch.float64 else y.float()).unflatten(-1, self.shape)


@final
class _Squashed(ChartModule):
    def __init__(
        self, chart: Sigmoid | LogSigmoid | Softplus | Linear, per: Per, sizes: Sizes, factory: Factory
    ) -> None:
        super().__init__(per, sizes, chart.rank, chart.bias, factory)
        self.chart = chart

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {self.per.name: self.chart.apply(self.logits(x))}

    def declared(self, path: str) -> Rate:
        """For kernels: what this module at `path` of a block computes."""
        function, factor = self.chart.function()
        down = None if self.down is None else Matrix(f"{path}.down", self.down.weight.shape[0])
        bias = None if self.up.bias is None else f"{path}.up.bias"
        up = Matrix(f"{path}.up", self.up.weight.shape[0])
        return Rate(self.per.name, self.shape, up, function, factor, bias, down=down)


def _unit(per: Per, chart: str) -> None:
    if per.domain != "unit":
        raise IllegalUpdate(f"{chart} charts unit gates as logs; {per.name!r} is {per.domain}: use Sigmoid or Softplus")


def _not_unit(per: Per, chart: str) -> None:
    if per.domain == "unit":
        raise IllegalUpdate(f"{chart} charts step sizes; {per.name!r} is a unit gate, a log: use LogSigmoid")


@final
@dataclass(frozen=True)
class Sigmoid(Chart):
    """rate = scale * sigmoid(W x + b), in (0, scale)."""

    scale: float = 1.0
    bias: float | None = None
    rank: int | None = None

    def apply(self, z: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(z)

    def function(self) -> tuple[str, float]:
        """`apply` as kernels know it: a function of their list and a factor."""
        return "sigmoid", self.scale

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _not_unit(per, "Sigmoid")
        return _Squashed(self, per, sizes, factory)


@final
@dataclass(frozen=True)
class LogSigmoid(Chart):
    """log gate = logsigmoid(W x + b) / temperature: the gate is sigmoid^(1 / temperature)."""

    bias: float | None = 4.0
    temperature: float = 1.0
    rank: int | None = None

    def apply(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z) / self.temperature

    def function(self) -> tuple[str, float]:
        """`apply` as kernels know it: a function of their list and a factor."""
        return "logsigmoid", 1 / self.temperature

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _unit(per, "LogSigmoid")
        return _Squashed(self, per, sizes, factory)


@final
@dataclass(frozen=True)
class Softplus(Chart):
    """rate = softplus(W x + b), positive."""

    bias: float | None = 0.0
    rank: int | None = None

    def apply(self, z: Tensor) -> Tensor:
        return torch.nn.functional.softplus(z)

    def function(self) -> tuple[str, float]:
        """`apply` as kernels know it: a function of their list and a factor."""
        return "softplus", 1.0

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _not_unit(per, "Softplus")
        return _Squashed(self, per, sizes, factory)


@final
@dataclass(frozen=True)
class Exponential(Chart):
    """rate = exp(cap tanh((W x + b) / cap)), positive, between exp(-cap) and exp(cap)."""

    bias: float | None = 0.0
    cap: float = 15.0
    rank: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.cap <= 80:
            raise IllegalUpdate(f"Exponential: the cap must lie in (0, 80], so that float32 holds it, got {self.cap}")

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _not_unit(per, "Exponential")
        return _ExponentialModule(self, per, sizes, factory)


@final
class _ExponentialModule(ChartModule):
    def __init__(self, chart: Exponential, per: Per, sizes: Sizes, factory: Factory) -> None:
        super().__init__(per, sizes, chart.rank, chart.bias, factory)
        self.cap = chart.cap

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {self.per.name: torch.exp(self.cap * torch.tanh(self.logits(x) / self.cap))}


@final
@dataclass(frozen=True)
class Linear(Chart):
    """rate = W x + b, for real rates (angles, mixing matrices)."""

    bias: float | None = 0.0
    rank: int | None = None

    def apply(self, z: Tensor) -> Tensor:
        return z

    def function(self) -> tuple[str, float]:
        """`apply` as kernels know it: a function of their list and a factor."""
        return "linear", 1.0

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        if per.domain != "real":
            raise IllegalUpdate(f"Linear charts real rates; {per.name!r} is {per.domain}")
        return _Squashed(self, per, sizes, factory)


@final
@dataclass(frozen=True)
class Constant(Chart):
    """The same rate for every token: learned from `start`, or fixed. Unit gates are given and stored as logs.

    spacing: None gives every head `start`; "retention" gives log(1 - 2^(-5 - h)); "alibi" gives -2^(-8 (h + 1) / H).
    """

    start: float = 0.0
    learned: bool = True
    spacing: str | None = None

    _SPACINGS: ClassVar[tuple[str, ...]] = ("retention", "alibi")

    def __post_init__(self) -> None:
        if self.spacing is not None and self.spacing not in self._SPACINGS:
            raise IllegalUpdate(f"Constant: spacing {self.spacing!r} is not one of {', '.join(self._SPACINGS)}")

    def initial(self, shape: tuple[int, ...]) -> Tensor:
        if self.spacing is None:
            return torch.full(shape, self.start, dtype=torch.float64)
        head = torch.arange(shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
        retention = self.spacing == "retention"
        values = torch.log1p(-(2.0 ** (-5 - head))) if retention else -(2.0 ** (-8 * (head + 1) / shape[0]))
        return values.expand(shape).clone()

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        return _ConstantModule(self, per, sizes, factory)


@final
class _ConstantModule(nn.Module):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, chart: Constant, per: Per, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.chart, self.name = chart, per.name
        value = torch.empty((sizes.heads, *sizes.of(per)), **factory)
        if chart.learned:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.value.copy_(self.chart.initial(tuple(self.value.shape)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        value = self.value if self.value.dtype == torch.float64 else self.value.float()
        return {self.name: value.expand(*x.shape[:2], *value.shape)}


@final
@dataclass(frozen=True)
class SSM(Chart):
    """Mamba-2's tied pair: dt = softplus(W x + b), log gate = -exp(A_log) dt, and dt also scales the write.

    A is one number a head, uniform in [slowest, fastest], and softplus(b) log-uniform in [dt_min, dt_max]; step names
    the write rate, or None (the gate alone, as in Gated DeltaNet).
    """

    step: str | None = "dt"
    dt_min: float = 1e-3
    dt_max: float = 0.1
    rank: int | None = None
    slowest: float = 1.0
    fastest: float = 16.0

    def __post_init__(self) -> None:
        if not (0 < self.slowest <= self.fastest and 0 < self.dt_min <= self.dt_max):
            raise IllegalUpdate(
                f"SSM: A and dt start between two positive numbers, slowest={self.slowest} to fastest={self.fastest}, "
                f"dt_min={self.dt_min} to dt_max={self.dt_max}"
            )

    def also(self) -> tuple[str, ...]:
        return () if self.step is None else (self.step,)

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _unit(per, "SSM")
        return _SSMModule(self, per, sizes, factory)


@final
class _SSMModule(nn.Module):
    def __init__(self, chart: SSM, per: Per, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.chart, self.per, self.shape = chart, per, (sizes.heads, *sizes.of(per))
        self.down = nn.Linear(sizes.d_model, chart.rank, bias=False, **factory) if chart.rank else None
        self.up = nn.Linear(chart.rank or sizes.d_model, math.prod(self.shape), **factory)
        self.log_rate = nn.Parameter(torch.empty((sizes.heads, *[1] * len(sizes.of(per))), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.log_rate.copy_(torch.empty_like(self.log_rate).uniform_(self.chart.slowest, self.chart.fastest).log())
        steps_at_first(self.up.bias, self.chart.dt_min, self.chart.dt_max)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.up(x if self.down is None else self.down(x))
        dt = torch.nn.functional.softplus((z if z.dtype == torch.float64 else z.float()).unflatten(-1, self.shape))
        rates = {self.per.name: -torch.exp(self.log_rate.to(dt.dtype)) * dt}
        return rates if self.chart.step is None else {**rates, self.chart.step: dt}

    def declared(self, path: str) -> Rate:
        """For kernels: what this module at `path` of a block computes."""
        down = None if self.down is None else Matrix(f"{path}.down", self.down.weight.shape[0])
        up = Matrix(f"{path}.up", self.up.weight.shape[0])
        rate, step = f"{path}.log_rate", self.chart.step
        return Rate(self.per.name, self.shape, up, "ssm", bias=f"{path}.up.bias", log_rate=rate, step=step, down=down)


@final
@dataclass(frozen=True)
class Spectrum(Chart):
    """The same decays for every token: log gate = -exp(a), a learned for every entry, exp(a) = 1 .. d_k at first.

    S4D's real initialisation, Mamba's A.
    """

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _unit(per, "Spectrum")
        return _SpectrumModule(per, sizes, factory)


@final
class _SpectrumModule(nn.Module):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, per: Per, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.name = per.name
        self.log_rate = nn.Parameter(torch.empty((sizes.heads, *sizes.of(per)), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            rates = torch.arange(1, self.log_rate.shape[-1] + 1, dtype=torch.float64)
            self.log_rate.copy_(rates.log().expand(self.log_rate.shape))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        value = self.log_rate if self.log_rate.dtype == torch.float64 else self.log_rate.float()
        return {self.name: (-torch.exp(value)).expand(*x.shape[:2], *value.shape)}


@final
@dataclass(frozen=True)
class TimeStep(Chart):
    """rate = softplus(W x + b), softplus(b) log-uniform in [dt_min, dt_max] at first.

    rank: of W; in a block of the Mamba line None is that block's bottleneck.
    """

    dt_min: float = 1e-3
    dt_max: float = 0.1
    rank: int | None = None

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _not_unit(per, "TimeStep")
        return _TimeStepModule(self, per, sizes, factory)


@final
class _TimeStepModule(ChartModule):
    def __init__(self, chart: TimeStep, per: Per, sizes: Sizes, factory: Factory) -> None:
        self.chart = chart
        super().__init__(per, sizes, chart.rank, 0.0, factory)

    def reset_parameters(self) -> None:
        steps_at_first(self.up.bias, self.chart.dt_min, self.chart.dt_max)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {self.per.name: torch.nn.functional.softplus(self.logits(x))}


@final
@dataclass(frozen=True)
class RGLRU(Chart):
    """Griffin's gates: a = s^(8 r) with r = sigmoid(W_r x + b) and s learned, and the step size i sqrt(1 - a^2).

    i = sigmoid(W_i x + b); name: of the step size. s^8 is uniform in [0.9, 0.999] at first.
    """

    name: str = "write"

    def also(self) -> tuple[str, ...]:
        return (self.name,)

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        _unit(per, "RGLRU")
        return _RGLRUModule(self, per, sizes, factory)


@final
class _RGLRUModule(ChartModule):
    def __init__(self, chart: RGLRU, per: Per, sizes: Sizes, factory: Factory) -> None:
        super().__init__(per, sizes, None, 0.0, factory)
        self.step = chart.name
        self.input = nn.Linear(sizes.d_model, math.prod(self.shape), **factory)
        self.log_rate = nn.Parameter(torch.empty(self.shape, **factory))
        self.begin()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "log_rate"):
            self.begin()

    def begin(self) -> None:
        with torch.no_grad():
            kept = torch.empty_like(self.log_rate, dtype=torch.float64).uniform_(0.9, 0.999)  # s^8
            self.log_rate.copy_(torch.log(-kept.log() / 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        r = torch.sigmoid(self.logits(x))
        gate = -8 * torch.exp(self.log_rate.to(r.dtype)) * r
        i = torch.sigmoid(self.input(x).to(r.dtype).unflatten(-1, self.shape))
        return {self.per.name: gate, self.step: i * energy(gate)}


def energy(gate: Tensor) -> Tensor:
    """sqrt(1 - a^2) of a log gate, without a derivative where the gate is open."""
    return (-torch.expm1(2 * gate)).clamp_min(torch.finfo(gate.dtype).tiny).sqrt()


def steps_at_first(bias: Tensor, low: float, high: float) -> None:
    """A bias whose softplus is log-uniform between two numbers."""
    with torch.no_grad():
        dt = torch.empty_like(bias).uniform_(math.log(low), math.log(high)).exp()
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus^-1


@final
@dataclass(frozen=True)
class Capped(Chart):
    """rate = scale * sigmoid(W x + b) with the bias chosen so that the rate starts at `start`."""

    start: float
    scale: float = 1.0
    rank: int | None = None

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        odds = self.start / (self.scale - self.start)
        return Sigmoid(self.scale, math.log(odds), self.rank).build(per, sizes, factory)


@final
@dataclass(frozen=True)
class Tied(Chart):
    """Two rates of one projection: what `chart` gives, and the rate `name`, which follows from it.

    by: "complement", 1 - a of a gate a: old and new are averaged (HGRN); "energy", sqrt(1 - a^2) (RG-LRU);
    "share", sigmoid(b) r of a step size r, b learned for every head, 1 at first (Comba).
    """

    chart: Chart
    name: str
    by: Literal["complement", "energy", "share"] = "complement"

    def __post_init__(self) -> None:
        if self.by not in ("complement", "energy", "share"):
            raise IllegalUpdate(f"Tied: by={self.by!r} is not one of complement, energy, share")

    def also(self) -> tuple[str, ...]:
        return (self.name, *self.chart.also())

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        (_not_unit if self.by == "share" else _unit)(per, f"Tied(by={self.by!r})")
        return _TiedModule(self, per, sizes, factory)


@final
class _TiedModule(nn.Module):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, tied: Tied, per: Per, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.tied, self.per = tied, per
        self.chart = tied.chart.build(per, sizes, factory)
        shape = (sizes.heads, *[1] * len(sizes.of(per)))
        self.share = nn.Parameter(torch.empty(shape, **factory)) if tied.by == "share" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.share is not None:
            nn.init.ones_(self.share)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rates: dict[str, Tensor] = self.chart(x)
        rate = rates[self.per.name]
        if self.share is not None:
            return {**rates, self.tied.name: torch.sigmoid(self.share.to(rate.dtype)) * rate}
        if self.tied.by == "complement":
            return {**rates, self.tied.name: -torch.expm1(rate)}
        return {**rates, self.tied.name: energy(rate)}


def default_chart(per: Per) -> Chart:
    """What a tuple without a named parameterisation gets: gates near one, moderate steps, zero angles."""
    if per.name == "ln_gain":
        return Constant(1.0)
    if per.name == "ln_bias":
        return Constant(0.0)
    if per.domain == "unit":
        return LogSigmoid()
    return Sigmoid() if per.domain == "positive" else Linear()
