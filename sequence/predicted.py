"""Optimizers of the data axis carried to tokens: systems that the taxonomy predicts, with definitions.

Each is a tuple whose parts already serve an optimizer: the quadratic metrics of RLS and Shampoo as geometries of the
state, Muon's and Adam's filters between gradient and state, Frank-Wolfe's direction as a memoryless filter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Anchor, Momentum, Step
from axes.core.costs import Alignment, Linear, SquaredError
from axes.core.geometry import Euclidean, Spectral, Sphere, Whiten
from axes.core.monoids import Identity, Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import Capped, Chart, LogSigmoid, Sigmoid, Sizes

_ARTICLE = """
@misc{axes-state-update,
  title = {axes: optimizers, sequence layers and depth mixers as one state update},
  author = {{The axes authors}},
  year = {2026}
}
"""
_PAPER = "Predicted by the taxonomy; defined in this package"

_GATE, _BETA = Scalar("decay"), Per("beta")


@final
class RLSNet(SequenceLayer):
    """W = (sum_i a_{t:i} beta_i v_i k_i^T) (delta I + sum_i a_{t:i} beta_i k_i k_i^T)^{-1}: recursive least squares.

    theta = a theta + beta v k^T, R = a R + beta k k^T, W = theta (R + delta I)^{-1}: the exact minimiser of the
    discounted, weighted squared error with ridge delta. Its statistic R is a linear attention on k k^T.
    """

    name = "rls-net"
    paper = _PAPER
    equation = "closed form of the recursion S + beta (v - S k) g^T, g = P k / (a + k^T P k)"
    differs = "the ridge delta is constant; the textbook recursion forgets its P_0 = I / delta with the gates"
    bibtex = _ARTICLE
    update = StateUpdate(
        Alignment(),
        Whiten((StateUpdate(Linear("key"), Euclidean(), _GATE, Step(_BETA)),), kind="right", power=1.0, eps=0.1),
        _GATE,
        Step(_BETA),
    )
    block = Standard(charts=(("decay", LogSigmoid(6.0)), ("beta", Sigmoid())))


@final
class ShampooNet(SequenceLayer):
    """W = (L + eps I)^{-1/2} theta (R + eps I)^{-1/2}, theta = a theta + beta v k^T: a whitened state.

    L = a L + beta v v^T and R = a R + beta k k^T. With both powers 1/2 the state holds canonical correlations.
    """

    name = "shampoo-net"
    paper = _PAPER
    equation = "L^{-p} C R^{-q} with p = q = 1/2"
    differs = "statistics of values, where the optimizer has statistics of errors; no power pair gives the delta rule"
    bibtex = _ARTICLE
    update = StateUpdate(
        Alignment(),
        Whiten(
            (
                StateUpdate(Linear("value"), Euclidean(), _GATE, Step(_BETA)),
                StateUpdate(Linear("key"), Euclidean(), _GATE, Step(_BETA)),
            ),
            kind="kronecker",
            power=0.5,
            eps=0.1,
        ),
        _GATE,
        Step(_BETA),
    )
    block = Standard(charts=(("decay", LogSigmoid(6.0)), ("beta", Sigmoid())))


@final
class MuonNet(SequenceLayer):
    """W = a W + beta polar(m), m = mu m - (1 - mu) grad 1/2 |W k - v|^2, the gradient anchored every 16 tokens."""

    name = "muon-net"
    paper = _PAPER
    equation = "m = mu m + (1 - mu) e k^T, S = (1 - lambda eta) S + eta polar(m)"
    differs = "five Polar Express steps for the polar factor, and an anchored gradient, so that a chunk is a cascade"
    bibtex = _ARTICLE
    update = StateUpdate(
        SquaredError(),
        OnUpdate(Spectral("polar-express")),
        _GATE,
        Step(_BETA, at=Anchor(16), via=(Momentum(0.9, "ema"),)),
    )
    # a step is as long where the error is small, as Adam's: larger ones overshoot what keys of length one ask for
    block = Standard(output_gate="sigmoid", charts=(("decay", LogSigmoid(4.0)), ("beta", Capped(0.005, scale=0.05))))


@final
class MuonNetState(SequenceLayer):
    """W = polar(W + beta v k^T): the state itself is projected on the isometries at every token."""

    name = "muon-net-state"
    paper = _PAPER
    equation = "S = polar(S + beta v k^T)"
    differs = "a convergent iteration for the polar factor; keeps directions and no magnitudes, which Muon does not do"
    bibtex = _ARTICLE
    # the state is fed back through the map, so the map must contract: the slow iteration, not a fast expanding one
    update = StateUpdate(
        Alignment(),
        Spectral("newton-schulz", steps=8, coefficients=(1.875, -1.25, 0.375)),
        Identity(),
        Step(_BETA, lazy=False),
    )
    block = Standard(charts=(("beta", Sigmoid()),), initial=0.1)


@final
class AdamNet(SequenceLayer):
    """W = a W + beta m^ / (sqrt(v^) + eps): Titans' momentum and a second moment, both bias corrected.

    m = b1 m - (1 - b1) grad, v = b2 v + (1 - b2) grad^2, grad of 1/2 |W k - v|^2 anchored every 16 tokens.
    """

    name = "adam-net"
    paper = _PAPER
    equation = "Adam's recursion on g = (S k - v) k^T"
    differs = "constant moment decays and an anchored gradient, so that a chunk is a cascade"
    bibtex = _ARTICLE
    update = StateUpdate(
        SquaredError(),
        Euclidean(),
        _GATE,
        Step(
            _BETA,
            at=Anchor(16),
            via=(
                StateUpdate(
                    Linear(),
                    Whiten(
                        (StateUpdate(Linear("square"), Euclidean(), Scalar(0.95), Step(1 - 0.95, debias=True)),),
                        eps=1e-4,
                    ),
                    Scalar(0.9),
                    Step(1 - 0.9, debias=True),
                ),
            ),
        ),
    )
    block = Standard(output_gate="sigmoid", charts=(("decay", LogSigmoid(4.0)), ("beta", Capped(0.005, scale=0.05))))


@final
@dataclass(frozen=True)
class FrankWolfe(Chart):
    """gamma = sigmoid(W x + b), charted as the tied pair: log gate log(1 - gamma) and step radius * gamma.

    Values of length one lie outside a ball of radius R < 1, so that |v - W k| >= 1 - R whatever the keys are. A token
    multiplies what the state is off by 1 - gamma, and across the error by 1 - gamma - gamma R / |e|: with R = 1/2 both
    lie in (-1, 1) for every gamma. In a ball that holds its values errors come near zero, and divide by it.
    """

    step: str
    radius: float = 0.5
    bias: float = -4.0

    def also(self) -> tuple[str, ...]:
        return (self.step,)

    def build(self, per: Per, sizes: Sizes, factory: dict[str, Any]) -> nn.Module:
        return _FrankWolfeModule(self, per, sizes, factory)


@final
class _FrankWolfeModule(nn.Module):
    def __init__(self, chart: FrankWolfe, per: Per, sizes: Sizes, factory: dict[str, Any]) -> None:
        super().__init__()
        self.chart, self.per, self.shape = chart, per, (sizes.heads, *sizes.of(per))
        self.up = nn.Linear(sizes.d_model, math.prod(self.shape), **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.up.bias, self.chart.bias)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.up(x)
        z = (z if z.dtype == torch.float64 else z.float()).unflatten(-1, self.shape)
        # log(1 - sigmoid z) = logsigmoid(-z): the gate never needs 1 - gamma
        return {self.per.name: nn.functional.logsigmoid(-z), self.chart.step: self.chart.radius * torch.sigmoid(z)}


@final
class FrankWolfeDelta(SequenceLayer):
    """W = (1 - gamma) W + gamma R e^ k^^T: the delta rule's direction, normalised, on a ball of radius R.

    e = v - W k, e^ = e / |e|, k^ = k / |k|; no write where e = 0. The gradient is rank one, so its direction in the
    nuclear ball is the gradient over its Frobenius norm: Sphere("whole") on a memoryless filter.
    """

    name = "frank-wolfe-delta"
    paper = _PAPER
    equation = "S = (1 - gamma) S + gamma R e^ k^^T"
    differs = (
        "the gradient is taken at the undecayed state, as Frank-Wolfe does; values have unit length and R = 1/2, so"
        " that no error is short and no token multiplies a perturbation by more than one"
    )
    bibtex = _ARTICLE
    update = StateUpdate(SquaredError(), OnUpdate(Sphere("whole")), _GATE, Step(_BETA))
    block = Standard(value_norm="unit", output_gate="sigmoid", charts=(("decay", FrankWolfe("beta")),))


PREDICTED = (RLSNet, ShampooNet, MuonNet, MuonNetState, AdamNet, FrankWolfeDelta)
