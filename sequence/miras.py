"""Miras: Moneta, Yaad and Memora, the step of one recursion under three costs and three generating functions.

    theta_t = alpha_t theta_{t-1} - eta_t grad l(W_anchor; k_t, v_t),    W_t = grad h*(theta_t),    y_t = M(W_t; q_t)

            cost                 h                               W = grad h*(theta)
    Moneta  |e|_3^3              |W|_{4/3}^2 / 2                 sign(theta) |theta|^3 / |theta|_4^2
    Yaad    Huber, delta_t       |W|_F^2 / 2                     theta
    Memora  |e|^2 / 2            sum W log W on simplices        c softmax(theta)

e = M(W; k) - v over an MLP memory M(x) = x + LN(W1 gelu(W2 x)) (the paper's), or a matrix. All take their gradients at
the last multiple of 16 tokens, the paper's chunk form. That is a tuple of its own: the recurrence as the paper states
it, with the gradient at the previous state, is the same update with `at="prev"`, given to any of the layers as
`update=`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from axes.core.algorithms import Anchor, Step
from axes.core.costs import Huber, HuberSwitch, Lp, SquaredError
from axes.core.geometry import Entropic, Euclidean, Lq, LqLiteral
from axes.core.memory import MLP
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import Capped, Chart, Constant, LogSigmoid, Sizes, Softplus
from axes.sequence.features import Centred
from axes.sequence.fused import Rate

_PAPER = (
    "It's All Connected: A Journey Through Test-Time Memorization, Attentional Bias, Retention, and Online Optimization"
    " (Behrouz, Razaviyayn, Zhong and Mirrokni 2025)"
)
_BIBTEX = """@article{behrouz2025its,
  title={It's All Connected: A Journey Through Test-Time Memorization, Attentional Bias, Retention, and Online
         Optimization},
  author={Behrouz, Ali and Razaviyayn, Meisam and Zhong, Peilin and Mirrokni, Vahab},
  journal={arXiv preprint arXiv:2504.13173},
  year={2025}
}"""
_BLOCK = (
    "No official code. Gradients at the start of a chunk of 16 (update= takes the at='prev' tuple); the read uses the"
    " dual"
    " state of its own token, exactly. What the paper leaves open: alpha = sigmoid and eta = max * sigmoid of a rank-32"
    " map, SiLU after the convolutions, an RMSNorm per head before the gate (sigmoid of MLPs but memora-literal's, else"
    " SiLU)"
)
_LEARNED = ", a learned initial memory per head"
# A learned one is moved by an optimizer's rate a step in every entry, 3e-3 of AdamW's, and no norm takes it away from
# what is read: pairs of Memora's write 5e-4 an entry, and are not seen beside it.
_EMPTY = ", the empty memory first"
_MLP_GATES = _LEARNED + "; channel-wise rates act on the rows of W1, their mean on W2, whose rows are hidden units"
_CALMLY = "; alpha is a 4,096th root of that sigmoid, LN has a gain of 0.2 and no bias, neither learned"

_ROWS = Diagonal("decay", side="row")
_ROW_STEP = Step(Per("eta", "row"), at=Anchor(16))
_DECAY = ("decay", LogSigmoid(bias=4.0, rank=32))
# Over a matrix 16 gradients are taken at one state, which they multiply by I - sum_s r_s k_s k_s^T where the cost has a
# slope of one: with unit keys, however alike, that shrinks for rates up to 2 / 16. Rates up to 1 learn pairs of random
# keys, and on text, whose keys are alike, outer gradients of 1e3 to 1e5 and next to nothing.
_MATRIX_ETA = ("eta", Capped(0.06, scale=2 / 16, rank=32))
_DELTA = ("delta", Softplus(bias=0.5413, rank=32))  # starts at 1
# Behind LN only the direction of W1 counts, and decay makes every step a larger turn: with alpha near 0.98 and a gain
# of one, 256 random tokens amplify an outer gradient by 1e4 and more. A longer memory and a smaller gain start calm.
_SLOW = ("decay", LogSigmoid(bias=6.0, rank=32))
_GAIN = ("ln_gain", Constant(0.2))
# In balance a token turns W1 by about sqrt(2 (1 - alpha)), however small the rate, and 16 of them are one step: a
# 4,096th root stays above 0.998 where its sigmoid is above e^-8, wherever training takes it. A gain that grows, and a
# bias, which is an error that all tokens share, lengthen the steps: LN learns neither.
_CALM = (
    ("decay", LogSigmoid(bias=4.0, temperature=4096.0, rank=32)),
    ("ln_gain", Constant(0.2, learned=False)),
    ("ln_bias", Constant(0.0, learned=False)),
)
# With a deviation of 0.02 16 gradients write 25 times what the first weights are, and LN reads the last block alone.
# With 1/4 they write a sixth of it, where Yaad is slow to recall; with 0.15 half, less than Titans does.
_FIRST = 0.25
_ETA = ("eta", Capped(0.05, scale=0.5, rank=32))


@final
@dataclass(frozen=True)
class NormThreshold(Chart):
    """delta = sqrt(d_v) softplus(W x + b): a threshold on |e|, which grows like sqrt(d_v) for errors of unit RMS."""

    bias: float = 2.0
    rank: int | None = 32

    def build(self, per: Per, sizes: Sizes, factory: dict[str, Any]) -> nn.Module:
        return _Scaled(Softplus(self.bias, self.rank).build(per, sizes, factory), math.sqrt(sizes.d_v))


@final
class _Scaled(nn.Module):
    def __init__(self, chart: nn.Module, factor: float) -> None:
        super().__init__()
        self.chart, self.factor = chart, factor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.factor * rate for name, rate in self.chart(x).items()}

    def declared(self, path: str) -> Rate:
        rate: Rate = self.chart.declared(f"{path}.chart")  # type: ignore[operator]
        return rate._replace(factor=rate.factor * self.factor)


# ---- Moneta ------------------------------------------------------------------------------------------------------

_MONETA = (
    "The printed link lost the factor |theta|^2 of its own derivation (section 4.2.4): this is the gradient of h*, the"
    " printed one is moneta-literal. The paper's q = 4 is the exponent of the dual norm. The gate is defined in the"
    " dual"
    " space, which the printed hybrid of l_q and l_2 does not produce. "
)


@final
class Moneta(SequenceLayer):
    """theta = alpha theta - eta grad |M(W; k) - v|_3^3; W = sign(theta) |theta|^3 / |theta|_4^2, M an MLP.

    Source: Miras, eqs. 24-25 with p = 3, q = 4, and the exact link of the l_{4/3} norm.
    """

    name = "moneta"
    paper = _PAPER
    equation = "eqs. 24-25 with p = 3, q = 4; link of section 4.2.4 with its lost factor restored"
    differs = (
        _MONETA
        + "Values have unit RMS, the scale of LN's output. The exact link shortens a step by about sqrt(n / 5) for n"
        " entries of a weight: the initial memory is larger than elsewhere. " + _BLOCK + _MLP_GATES + _CALMLY
    )
    bibtex = _BIBTEX
    update = StateUpdate(Lp(3.0), Lq(4.0), _ROWS, _ROW_STEP, memory=MLP())
    block = Standard(value_norm="rms", output_gate="sigmoid", initial=5.0, charts=(*_CALM, _ETA))


@final
class MonetaMatrix(SequenceLayer):
    """theta = alpha theta - eta grad |W k - v|_3^3; W = sign(theta) |theta|^3 / |theta|_4^2, over a matrix.

    Source: Miras, eqs. 24-25 and 28-29 (its chunk form is derived for this memory), with the exact link.
    """

    name = "moneta-matrix"
    paper = _PAPER
    equation = "eqs. 24-25, 28-29 with p = 3, q = 4 over a matrix memory; exact link"
    differs = (
        _MONETA
        + "Without LN nothing bounds the error of a cubic cost, which diverges beyond 2 / (3 eta |k|^2): values have"
        " unit length and eta stays below 0.008: finite on text, where 0.08 was not a number after 50 steps. " + _BLOCK
    )
    bibtex = _BIBTEX
    update = StateUpdate(Lp(3.0), Lq(4.0), _ROWS, _ROW_STEP)
    block = Standard(value_norm="unit", initial=0.1, charts=(_DECAY, ("eta", Capped(0.004, scale=0.008, rank=32))))


@final
class MonetaLiteral(SequenceLayer):
    """theta = alpha theta - eta grad |M(W; k) - v|_3^3; W = theta / |theta|_4^2, M an MLP: the link as printed.

    Source: Miras, eq. 24 to the letter.
    """

    name = "moneta-literal"
    paper = _PAPER
    equation = "eq. 24 as printed: W = A / |A|_q^(q-2) with p = 3, q = 4"
    differs = (
        "Nothing in the recurrence but a floor of 1e-6 under the norm. Values have unit RMS. LN hides the reversed"
        " radial"
        " direction of W1; over a matrix memory this link does not recall. " + _BLOCK + _MLP_GATES + _CALMLY
    )
    bibtex = _BIBTEX
    named_operator: ClassVar[str] = (
        "W = theta / |theta|_4^2 is the gradient of no h*: its Jacobian is not symmetric, and it is homogeneous of"
        " degree -1,"
        " so the laws of h do not apply"
    )
    update = StateUpdate(Lp(3.0), LqLiteral(4.0), _ROWS, _ROW_STEP, memory=MLP())
    block = Standard(value_norm="rms", output_gate="sigmoid", initial=0.02, charts=(*_CALM, _ETA))


# ---- Yaad --------------------------------------------------------------------------------------------------------

_YAAD = (
    "The coordinate form of Huber's cost (eq. 14), a true gradient that takes a threshold per channel; the printed"
    " recurrence"
    " uses the switch of eq. 16 (yaad-switch). delta = softplus of a rank-32 map, 1 at first. "
)


@final
class Yaad(SequenceLayer):
    """W = alpha W - eta grad sum_j H(e_j; delta_j), e = M(W; k) - v, M an MLP.

    Source: Miras, eq. 26 with the cost of eqs. 13-14.
    """

    name = "yaad"
    paper = _PAPER
    equation = "eq. 26 with the coordinate-wise Huber cost of eqs. 13-14"
    differs = _YAAD + _BLOCK + _MLP_GATES + _CALMLY
    bibtex = _BIBTEX
    update = StateUpdate(Huber(Per("delta", "row")), Euclidean(), _ROWS, _ROW_STEP, memory=MLP())
    block = Standard(value_norm="rms", output_gate="sigmoid", initial=0.15, charts=(*_CALM, _ETA, _DELTA))


@final
class YaadMatrix(SequenceLayer):
    """W = alpha W - eta clip(W k - v, -delta, delta) k^T, over a matrix.

    Source: Miras, eq. 26 with the cost of eqs. 13-14 (its ablation's linear memory).
    """

    name = "yaad-matrix"
    paper = _PAPER
    equation = "eq. 26 with eqs. 13-14 over a matrix memory (table 4, linear memory)"
    differs = _YAAD + _BLOCK + _LEARNED
    bibtex = _BIBTEX
    update = StateUpdate(Huber(Per("delta", "row")), Euclidean(), _ROWS, _ROW_STEP)
    block = Standard(initial=0.02, charts=(_DECAY, _MATRIX_ETA, _DELTA))


@final
class YaadSwitch(SequenceLayer):
    """W = alpha W - eta J^T r with r = e if |e| <= delta, else delta sign(e); e = M(W; k) - v, M an MLP.

    Source: Miras, eqs. 16 and 26 to the letter.
    """

    name = "yaad-switch"
    paper = _PAPER
    equation = "eqs. 16, 26 as printed"
    differs = (
        "One half in the l_2 branch; the norm is Euclidean and delta one number per head, about 2 sqrt(d) at first. "
        + _BLOCK
        + _MLP_GATES
        + _CALMLY
    )
    bibtex = _BIBTEX
    named_operator: ClassVar[str] = (
        "the switch is the gradient of no cost: it jumps by a factor sqrt(d) at |e| = delta and its loop work is not 0,"
        " so the laws of costs do not apply"
    )
    update = StateUpdate(HuberSwitch(Per("delta")), Euclidean(), _ROWS, _ROW_STEP, memory=MLP())
    block = Standard(
        value_norm="rms",
        output_gate="sigmoid",
        initial=_FIRST,
        charts=(*_CALM, _ETA, ("delta", NormThreshold())),
    )


# ---- Memora ------------------------------------------------------------------------------------------------------

_MEMORA = (
    "Each row is a simplex of mass sqrt(n_in), so that row gates keep the argmin and LN sees a signal (memora-literal"
    " has one"
    " simplex of mass 1). The state is the log-weight, linear inside a chunk: the paper's lag-token scheme, which can"
    " leave the"
    " simplex, is not needed. The text's 'elastic net' is a slip for the KL of its equations. "
)


@final
class Memora(SequenceLayer):
    """W = c softmax over rows of (alpha log W - eta grad |M(W; k) - v|^2 / 2), c = sqrt(n_in), M an MLP.

    Source: Miras, eqs. 20-21 and 27, as the linear recursion theta = alpha theta - eta grad of log W.
    """

    name = "memora"
    paper = _PAPER
    equation = "eqs. 20-21, 27 with a softmax per row of mass sqrt(n_in)"
    differs = _MEMORA + _BLOCK + _MLP_GATES + _CALMLY
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(), Entropic("row", None), _ROWS, _ROW_STEP, memory=MLP())
    block = Standard(value_norm="rms", output_gate="sigmoid", initial=1.0, charts=(*_CALM, _ETA))


@final
class MemoraMatrix(SequenceLayer):
    """W = c softmax over rows of (alpha log W - eta (W k - v) k^T), c = sqrt(d_k), over a matrix.

    Every entry is positive: the read lies between c min q and c max q in each channel.
    Source: Miras, eqs. 20-21 and 27 over a matrix memory.
    """

    name = "memora-matrix"
    paper = _PAPER
    equation = "eqs. 20-21, 27 over a matrix memory, a softmax per row of mass sqrt(d_k)"
    differs = (
        _MEMORA
        + _BLOCK
        + _EMPTY
        + ". A row of one sum sees no more of a key than key less mean, and reads c mean(q) beside it: keys and queries"
        " are less their mean"
    )
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(), Entropic("row", None), _ROWS, _ROW_STEP)
    # An even softmax shortens a step by sqrt(d_k): what is read lies far below an RMSNorm's usual eps at first.
    block = Standard(
        feature_map=Centred(), norm_eps=1e-12, charts=(_DECAY, ("eta", Capped(0.03, scale=2 / 16, rank=32)))
    )


@final
class MemoraLiteral(SequenceLayer):
    """W = softmax over all entries of (alpha log W - eta grad |M(W; k) - v|^2 / 2), M an MLP.

    Source: Miras, eqs. 20-21 and 27 to the letter.
    """

    name = "memora-literal"
    paper = _PAPER
    equation = "eq. 27 as printed: one softmax over the whole matrix, c = 1"
    differs = (
        "alpha and eta are one number per head: channel-wise ones would leave the simplex's geometry. The pre-norm"
        " output has"
        " a variance near 1e-15 at width 64, which LN's eps of 1e-6 silences, as published: the layer learns around its"
        " memory; with an eps below that variance the memory collapses onto single entries instead. " + _BLOCK
    )
    bibtex = _BIBTEX
    update = StateUpdate(
        SquaredError(), Entropic("whole"), Scalar("decay"), Step(Per("eta"), at=Anchor(16)), memory=MLP()
    )
    block = Standard(value_norm="rms", initial=1.0, charts=(_SLOW, _GAIN, _ETA))


MIRAS = (
    Moneta,
    MonetaMatrix,
    MonetaLiteral,
    Yaad,
    YaadMatrix,
    YaadSwitch,
    Memora,
    MemoraMatrix,
    MemoraLiteral,
)
