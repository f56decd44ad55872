"""The mesa layer: at every token the ridge regression of all values on all keys so far, read through a solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.memory import Regression
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import Chart, Factory, LogSigmoid, Sigmoid, Sizes


@final
@dataclass(frozen=True)
class Positive(Chart):
    """The same rate for every token: least + softplus(a), a learned for every entry, `start` at first."""

    start: float = 1.0
    least: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.least < self.start:
            raise IllegalUpdate(f"Positive: start is above least, which is at least 0, got {self.start}, {self.least}")

    def build(self, per: Per, sizes: Sizes, factory: Factory) -> nn.Module:
        if per.domain != "positive":
            raise IllegalUpdate(f"Positive gives positive rates, {per.name!r} is {per.domain}")
        return _PositiveModule(self, per, sizes, factory)


@final
class _PositiveModule(nn.Module):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, chart: Positive, per: Per, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.chart, self.name = chart, per.name
        self.logit = nn.Parameter(torch.empty((sizes.heads, *sizes.of(per)), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            above = torch.full(self.logit.shape, self.chart.start - self.chart.least, dtype=torch.float64)
            self.logit.copy_(torch.log(torch.expm1(above)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logit = self.logit if self.logit.dtype == torch.float64 else self.logit.float()
        value: Any = self.chart.least + softplus(logit)
        return {self.name: value.expand(*x.shape[:2], *value.shape)}


@final
class MesaNet(SequenceLayer):
    """S_t = a S_{t-1} + b v k^T,  R_t = a R_{t-1} + b k k^T,  o_t = S_t x_t with (R_t + L) x_t = q_t.

    By thirty steps of conjugate gradients, which the tuple names; with many it is rls-net with a ridge for every key
    entry. a = sigmoid(W x + c) and b = sigmoid(W x) are numbers a head, L a learned diagonal.
    """

    name = "mesa-net"
    paper = "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training (von Oswald et al. 2025)"
    equation = "eqs. 4-8: G and H with gates, o = G linsolve(H + Lambda, q) by conjugate gradients of 30 steps"
    differs = "the solve begins at zero; RMSNorm per head and a gated output"
    bibtex = """@misc{vonoswald2025mesanet,
  title={{MesaNet}: Sequence Modeling by Locally Optimal Test-Time Training},
  author={von Oswald, Johannes and Scherrer, Nino and Kobayashi, Seijin and Versari, Luca and Yang, Songlin and
          Schlegel, Maximilian and Maile, Kaitlin and Schimpf, Yanick and Sieberling, Oliver and Meulemans, Alexander
          and Saurous, Rif A. and Lajoie, Guillaume and Frenkel, Charlotte and Pascanu, Razvan and
          Ag{\\"u}era y Arcas, Blaise and Sacramento, Jo{\\~a}o},
  year={2025},
  eprint={2506.05233},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(), Euclidean(), Scalar("decay"), Step(Per("beta")), Regression(30, Per("ridge", "key"))
    )
    block = Standard(charts=(("decay", LogSigmoid(6.0)), ("beta", Sigmoid()), ("ridge", Positive())))


__all__ = ["MesaNet", "Positive"]
