"""Titans: squared error with momentum as a filter of the gradient, over a matrix or an MLP memory.

    S_t = eta_t S_{t-1} - theta_t grad l(W_{t-1}; k_t, v_t)      the filter: a sum with data-dependent retention
    W_t = a_t W_{t-1} + S_t                                      a = 1 - alpha, decoupled from the momentum

theta enters where a gradient joins S. The other convention multiplies on the way out of the buffer,
W = a W - eta S with S = b S + (1 - b) grad; the two agree for constant rates with theta = eta (1 - b), and differ as
soon as a rate varies. It is `Step(Per("theta"), via=(Momentum(b, "ema"),))` here.
"""

from __future__ import annotations

from typing import final

from axes.core.algorithms import Anchor, Step
from axes.core.costs import Linear, SquaredError
from axes.core.geometry import Euclidean
from axes.core.memory import MLP
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import Capped, Constant, LogSigmoid

_PAPER = "Titans: Learning to Memorize at Test Time (Behrouz, Zhong and Mirrokni 2025)"
_BIBTEX = """@article{behrouz2024titans,
  title={Titans: Learning to Memorize at Test Time},
  author={Behrouz, Ali and Zhong, Peilin and Mirrokni, Vahab},
  journal={arXiv preprint arXiv:2501.00663},
  year={2024}
}"""
_SURPRISE = StateUpdate(Linear(), Euclidean(), Scalar("momentum"), Step(Per("theta")))


@final
class TitansMatrix(SequenceLayer):
    """S = eta S - theta (W k - v) k^T; W = a W + S, evaluated at the previous W: affine in [W | S], so a chunked chain.

    Source: Titans, eqs. 13-14 with the linear memory W (its section 3.1); the loss 12 has no half, which theta absorbs.
    """

    name = "titans-matrix"
    paper = _PAPER
    equation = "eqs. 12-14, linear: M_t = (1 - alpha_t) M_{t-1} + S_t, S_t = eta_t S_{t-1} - theta_t grad l(M_{t-1})"
    differs = (
        "no official code. One half in the loss. The paper anchors the gradient to chunks; with a linear memory the"
        " recurrence at the previous state is a block 2 x 2 chain, computed exactly. Table 1 of the Miras paper prints"
        " W = a W - S, which ascends. Persistent memory tokens and the attention branch (MAC, MAG, MAL) are left to the"
        " model around the layer"
    )
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(via=(_SURPRISE,)))
    block = Standard(charts=(("decay", LogSigmoid()), ("momentum", LogSigmoid(bias=2.0)), ("theta", Capped(0.05))))


@final
class Titans(SequenceLayer):
    """S = eta S - theta grad l(W_anchor); W = a W + S over M(x) = x + LN(W1 gelu(W2 x)), the anchor 16 tokens apart.

    Source: Titans, eqs. 12-14 and the chunk form 16; the read y = M(W_t; q) is eq. 15.
    """

    name = "titans"
    paper = _PAPER
    equation = "eqs. 12-14 with a two-layer MLP memory, gradients at the start of a chunk (eq. 16)"
    differs = (
        "no official code. The MLP has the residual and layer norm of its successors (Miras), four times the width and"
        " no biases; one half in the loss; chunk of 16 and scalar rates per head. Tokens read the memory that includes"
        " themselves. alpha is a 4,096th root of a sigmoid, LN has a gain of 0.2 and no bias, neither learned."
        " Persistent memory tokens and the attention branch are left to the model around the layer"
    )
    bibtex = _BIBTEX
    update = StateUpdate(
        SquaredError(), Euclidean(), Scalar("decay"), Step(at=Anchor(16), via=(_SURPRISE,)), memory=MLP()
    )
    block = Standard(
        value_norm="rms",
        output_gate="sigmoid",
        charts=(
            # as in Miras: decay, and errors that all tokens share, turn what is behind a layer norm
            ("decay", LogSigmoid(bias=4.0, temperature=4096.0)),
            ("ln_gain", Constant(0.2, learned=False)),
            ("ln_bias", Constant(0.0, learned=False)),
            ("momentum", LogSigmoid(bias=1.0)),
            ("theta", Capped(0.03, scale=0.125)),
        ),
        initial=0.25,
    )


TITANS = (TitansMatrix, Titans)
