"""Longhorn: one token is one proximal step on the squared error, stable for any key and any plasticity beta > 0."""

from __future__ import annotations

from typing import final

from axes.core.algorithms import Step
from axes.core.costs import SquaredError
from axes.core.geometry import Euclidean
from axes.core.memory import Entries
from axes.core.monoids import Identity
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks_mamba import Mamba

_PAPER = "Longhorn: State Space Models are Amortized Online Learners (Liu et al. 2024)"
_BIBTEX = """@misc{liu2024longhorn,
  title={Longhorn: State Space Models are Amortized Online Learners},
  author={Liu, Bo and Wang, Rui and Wu, Lemeng and Feng, Yihao and Stone, Peter and Liu, Qiang},
  year={2024},
  eprint={2407.14207},
  archivePrefix={arXiv}
}"""


class _Longhorn(SequenceLayer):
    """Key width 16, inner width twice the model's; heads only split the inner width, they share keys and queries."""

    paper = _PAPER
    bibtex = _BIBTEX
    block = Mamba()

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        return 16, 2 * d_model // heads


@final
class Longhorn(_Longhorn):
    """S_t = S_{t-1} + (eps * (v - S_{t-1} k)) k^T,  eps_i = beta_i / (1 + beta_i |k|^2): the exact proximal step.

    The minimiser of |S - S_{t-1}|^2 + |S k - v|^2 weighted by beta, one weight per value channel. The transition has
    eigenvalues 1 and 1/(1 + beta_i |k|^2): it never overshoots, so keys need no normalisation and nothing else forgets.
    """

    name = "longhorn"
    equation = "eqs. 5 and 6 (theorem 3.1)"
    differs = "the paper trains the diagonal approximation (longhorn-diagonal); this is the rule that it derives"
    update = StateUpdate(SquaredError(), Euclidean(), Identity(), Step(Per("beta", "row"), at="new"))


@final
class LonghornDiagonal(_Longhorn):
    """S_t = (1 - eps k^2) * S_{t-1} + (eps * v) k^T entry by entry: the transition's diagonal, as trained and released.

    eps as in `Longhorn`, with the whole |k|^2. Each entry alone steps towards S_ij k_j = v_i: another fixed point than
    Longhorn's (longhorn differs as soon as S_{t-1} k has cross-talk). Gates are computed in float32 at least; they lie
    in [1/(1 + beta_i |k|^2), 1], and rounding may leave one below zero by 1e-7 where a large key is one-hot.
    """

    name = "longhorn-diagonal"
    equation = "eq. 7 and algorithm 1"
    differs = "bias of beta, D v and the SiLU gate are in the released code, not in algorithm 1; no kernel of its own"
    update = StateUpdate(SquaredError(), Euclidean(), Identity(), Step(Per("beta", "row"), at="new"), Entries())
