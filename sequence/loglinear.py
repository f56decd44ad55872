"""Log-linear attention: a recurrence whose state is kept for ever longer stretches of the past, which a read weighs."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.memory import Fenwick
from axes.core.monoids import Householder, Product, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks_mamba import SSD
from axes.sequence.charts import Softplus
from axes.sequence.delta import GatedDeltaNet
from axes.sequence.linear import Mamba2

_BIBTEX = """@article{guo2025log,
  title={Log-Linear Attention},
  author={Guo, Han and Yang, Songlin and Goel, Tarushii and Xing, Eric P. and Dao, Tri and Kim, Yoon},
  journal={arXiv preprint arXiv:2506.04761},
  year={2025}
}"""
_PAPER = "Log-Linear Attention (Guo et al. 2025)"
_LEVELS = ("level", Softplus(bias=0.5413248546129181))  # weights of one at first, where it is the linear model


@final
class LogLinearMamba2(SequenceLayer):
    """o_t = sum_l w_{t,l} S_t^(l) q_t: Mamba-2 whose state is kept for stretches of 1, 1, 2, 4, ... tokens before t.

    Every level is gated alike; level l is what stands in that node of a Fenwick tree, w = softplus(W x + b) for every
    level and head. 16 levels are exact over 32,768 tokens; older ones share the last level.
    """

    name = "log-linear-mamba2"
    paper = _PAPER
    equation = "eqs. 4 to 7 and table 1: O = (Q K^T * M^S * M^H) V, M^H_ts = w_t[level of s for t]; block of Mamba-2"
    differs = (
        "the released weights are softplus(c (W x + b)) with a learned c for every level, which a row of W and b hold "
        "here; no bias in other projections; 16 levels, there as many as 16,384 tokens have (15)"
    )
    bibtex = _BIBTEX
    update = replace(Mamba2.update, memory=Fenwick(16))
    block = replace(SSD(), charts=(*Mamba2.block.charts, _LEVELS))
    widths = Mamba2.widths


@final
class LogLinearGatedDeltaNet(SequenceLayer):
    """o_t = sum_l w_{t,l} S_t^(l) q_t,  S_t^(l) = a S_{t-1}^(l) (I - beta k k^T), beta v k^T in level 0.

    The gated delta rule erases along its key in every level alike, a map of the monoid: the levels' sum is the state of
    Gated DeltaNet, and so is the output where all w are one.
    """

    name = "log-linear-gated-delta-net"
    paper = _PAPER
    equation = "table 1, log-linear Gated DeltaNet: M^S of the gated delta rule, times M^H"
    differs = (
        "the released weights are softplus(c (W x + b)) with a learned c for every level, which a row of W and b hold "
        "here; 16 levels; values as wide as keys by default"
    )
    bibtex = _BIBTEX
    update = StateUpdate(
        Alignment(),
        Euclidean(),
        Product((Scalar("decay"), Householder(Per("beta"), "k"))),
        Step(Per("beta")),
        Fenwick(16),
    )
    block = replace(GatedDeltaNet.block, charts=(*GatedDeltaNet.block.charts, _LEVELS))


__all__ = ["LogLinearGatedDeltaNet", "LogLinearMamba2"]
