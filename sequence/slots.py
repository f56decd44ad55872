"""Attention over slots: as many pairs as there are slots, between two linear passes."""

from __future__ import annotations

from typing import final

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Entropic
from axes.core.memory import BoundedList
from axes.core.monoids import Diagonal, Identity
from axes.core.rates import Complement, Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import Exponential, LogSigmoid

_SLOTS = 64
_DECAY, _WRITE = Per("decay", "own", "unit", size=_SLOTS), Per("write", "own", size=_SLOTS)


@final
class GSA(SequenceLayer):
    """K_t = a * K_{t-1} + (1 - a) k_t^T,  V_t = a * V_{t-1} + (1 - a) v_t^T,  o_t = V_t^T softmax(K_t q_t): 64 slots.

    a = sigmoid(W x)^(1/8) for every slot: what it forgets is what it takes of the token.
    """

    name = "gsa"
    paper = "Gated Slot Attention for Efficient Linear-Time Sequence Modeling (Zhang et al. 2024)"
    equation = "section 3.1: gated K~ and V~ of m slots, o = V~^T softmax(K~ q), as two passes of GLA"
    differs = "RMSNorm per head instead of over all channels; 64 slots a head whatever its width (`BoundedList(slots)`)"
    bibtex = """@inproceedings{zhang2024gated,
  title={Gated Slot Attention for Efficient Linear-Time Sequence Modeling},
  author={Zhang, Yu and Yang, Songlin and Zhu, Ruijie and Zhang, Yue and Cui, Leyang and Wang, Yiqiao and
          Wang, Bolun and Shi, Freda and Wang, Bailin and Bi, Wei and Zhou, Peng and Fu, Guohong},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024},
  eprint={2409.07146},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(),
        Entropic(),
        Diagonal(_DECAY, "slot"),
        Step(Complement(_DECAY)),
        BoundedList(_SLOTS),
    )
    block = Standard(
        conv=0,
        activation=None,
        feature_map="silu",
        key_norm=False,
        value_map="silu",
        read_map="silu",
        output_gate=None,
        charts=(("decay", LogSigmoid(bias=None, temperature=8.0)),),
    )


@final
class ABC(SequenceLayer):
    """K_t = sum_i w_i k_i^T / sum_i w_i,  V_t alike,  o_t = V_t^T softmax(K_t q_t / sqrt(d_k)), w = exp(W x): 64 slots.

    A slot is a mean of all keys, and of all values, by a softmax over the tokens so far: bias correction of a state.
    """

    name = "abc"
    paper = "ABC: Attention with Bounded-Memory Control (Peng et al. 2022)"
    equation = "section 4 (ABC_MLP): K~ = sum_i phi_i k_i^T with phi_i = exp(W x_i) / sum_j exp(W x_j), causal"
    differs = "logits of slots are capped at 15 by a hyperbolic tangent, there clamped at 32; one linear map"
    bibtex = """@inproceedings{peng2022abc,
  title={{ABC}: Attention with Bounded-Memory Control},
  author={Peng, Hao and Kasai, Jungo and Pappas, Nikolaos and Yogatama, Dani and Wu, Zhaofeng and Kong, Lingpeng and
          Schwartz, Roy and Smith, Noah A.},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2022},
  eprint={2110.02488},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(), Entropic(), Identity(), Step(_WRITE, debias=True), BoundedList(_SLOTS, scale=None)
    )
    block = Standard(
        conv=0,
        activation=None,
        key_norm=False,
        output_norm=False,
        output_gate=None,
        charts=(("write", Exponential(bias=None)),),
    )


__all__ = ["ABC", "GSA"]
