"""Test-time training: squared error of f(x) = x + LN(memory(x)), gradients at the last multiple of 16 tokens.

    W_t = W_{t-1} - eta_t grad |f(W_anchor; k_t) - v_t|^2 / 2,   y_t = f(W_t; q_t),   eta_t = base sigmoid(w . x_t) / d
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import nn

from axes.core.algorithms import Anchor, Step
from axes.core.costs import SquaredError
from axes.core.memory import MLP, LayerNormMatrix
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import Chart, Sigmoid, Sizes


@final
@dataclass(frozen=True)
class InnerRate(Chart):
    """rate = base * sigmoid(W x + b) / d_k, b = 0 at first: the learned inner step size of TTT (its section 2.7)."""

    base: float = 1.0

    def build(self, per: Per, sizes: Sizes, factory: dict[str, Any]) -> nn.Module:
        return Sigmoid(self.base / sizes.d_k, bias=0.0).build(per, sizes, factory)


_PAPER = "Learning to (Learn at Test Time): RNNs with Expressive Hidden States (Sun et al. 2024)"
_BIBTEX = """@article{sun2024learning,
  title={Learning to (Learn at Test Time): RNNs with Expressive Hidden States},
  author={Sun, Yu and Li, Xinhao and Dalal, Karan and Xu, Jiarui and Vikram, Arjun and Zhang, Genghan and Dubois, Yann
          and Chen, Xinlei and Wang, Xiaolong and Koyejo, Sanmi and Hashimoto, Tatsunori and Guestrin, Carlos},
  journal={arXiv preprint arXiv:2407.04620},
  year={2024}
}"""
_LEFT_OUT = (
    "one half in the loss, as in the official code. That code also adds a bias to each inner layer, rotates q and k by"
    " their position inside the mini-batch (RoPE), divides the accumulated gradient of the i-th token of a mini-batch"
    " by i"
    " plus a learned offset, and normalises the output over all heads with a LayerNorm; none of this is in the paper's"
    " equations and none of it is here: an RMSNorm per head stands for the last. A convolution of 4 on q, k and v, as"
    " in the paper's Mamba backbone, without which one layer does not see which key a value came with"
)


@final
class TTTLinear(SequenceLayer):
    """W = W - eta LN'(W_0 k)^T(e) k^T, e = k + LN(W_0 k) - v, W_0 the state 16 tokens apart; y = q + LN(W q).

    Source: TTT, eqs. 1-6 with f(x) = x + LN(W x) (section 2.7). With an anchor at every token and without LN and
    residual it is the delta rule.
    """

    name = "ttt-linear"
    paper = _PAPER
    equation = "eqs. 1-6, f(x) = x + LN(W x), mini-batch 16, eta = sigmoid(w x) / d (sections 2.4 and 2.7)"
    differs = _LEFT_OUT + "; the GELU gate of that backbone"
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(), algorithm=Step(Per("eta"), at=Anchor(16)), memory=LayerNormMatrix())
    block = Standard(key_norm=False, output_gate="gelu", initial=0.02, charts=(("eta", InnerRate(1.0)),))


@final
class TTTMLP(SequenceLayer):
    """W = W - eta grad l(W_0) over f(x) = x + LN(W1 gelu(W2 x)), W_0 the state 16 tokens apart; y = f(W; q).

    Source: TTT, eqs. 1-6 with the two-layer memory of section 2.7 (hidden width 4 d).
    """

    name = "ttt-mlp"
    paper = _PAPER
    equation = "eqs. 1-6, f(x) = x + LN(W1 gelu(W2 x)), mini-batch 16, eta = 0.1 sigmoid(w x) / d (sections 2.4, 2.7)"
    differs = _LEFT_OUT + "; no output gate; the exact gelu (the code approximates it by tanh); keys of unit length"
    bibtex = _BIBTEX
    update = StateUpdate(SquaredError(), algorithm=Step(Per("eta"), at=Anchor(16)), memory=MLP())
    block = Standard(output_gate=None, initial=0.02, charts=(("eta", InnerRate(0.1)),))


TTT = (TTTLinear, TTTMLP)
