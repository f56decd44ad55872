"""Recurrences entry by entry and row by row: gates that differ along the value, so that nothing is a matrix product."""

from __future__ import annotations

from typing import final

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal, Hadamard
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.blocks_mamba import Mamba
from axes.sequence.charts import RGLRU, LogSigmoid, Spectrum, Tied, TimeStep


@final
class Mamba1(SequenceLayer):
    """S_t = exp(dt A) * S_{t-1} + (dt * v) k^T,  o_t = S_t q + D v: a step size for every channel, A for every entry.

    k = B, q = C and v = x in the paper's letters, dt = softplus of a low-rank map; keys of 16 entries that all channels
    share. A is the same for all tokens and never written down for each; heads only split the channels.
    """

    name = "mamba"
    paper = "Mamba: Linear-Time Sequence Modeling with Selective State Spaces (Gu and Dao 2023)"
    equation = "eqs. 2a and 4 with algorithm 2 (S6), B discretised as dt B as released; block of section 3.4"
    differs = "nothing in the recurrence; dt's first map stands apart from that of B and C"
    bibtex = """@inproceedings{gu2024mamba,
  title={{Mamba}: Linear-Time Sequence Modeling with Selective State Spaces},
  author={Gu, Albert and Dao, Tri},
  booktitle={Conference on Language Modeling},
  year={2024},
  eprint={2312.00752},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(), Euclidean(), Hadamard("A", times=Per("dt", "row")), Step(Per("dt", "row"))
    )
    block = Mamba(charts=(("A", Spectrum()), ("dt", TimeStep())))

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """State size 16, inner width twice the model's."""
        return 16, 2 * d_model // heads


class _Rows(SequenceLayer):
    """Keys and queries are the number one: a state is a row for every channel, of one entry."""

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        return 1, d_model // heads


@final
class HGRN(_Rows):
    """h_t = f_t * h_{t-1} + (1 - f_t) * silu(W x),  o_t = norm(h_t) * silu(W x): a gated average for every channel."""

    name = "hgrn"
    paper = "Hierarchically Gated Recurrent Neural Network for Sequence Modeling (Qin, Yang and Zhong 2023)"
    equation = "eqs. 1-4 with a real state, as the authors' code and HGRN2 have it"
    differs = (
        "no complex angle; the lower bound of f comes from all layers: this is the first one's, 0; RMSNorm per head "
        "instead of over all channels"
    )
    bibtex = """@inproceedings{qin2023hierarchically,
  title={Hierarchically Gated Recurrent Neural Network for Sequence Modeling},
  author={Qin, Zhen and Yang, Songlin and Zhong, Yiran},
  booktitle={Advances in Neural Information Processing Systems},
  year={2023},
  eprint={2311.04823},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Diagonal("decay", side="row"), Step(Per("write", "row")))
    block = Standard(
        conv=0,
        activation=None,
        keys=False,
        asks=False,
        value_map="silu",
        key_norm=False,
        charts=(("decay", Tied(LogSigmoid(bias=None), "write")),),
    )


@final
class Griffin(_Rows):
    """h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t): the real-gated linear recurrent unit in Griffin's block.

    a = s^(8 r): r = sigmoid(W x + b) is how much of a channel's own decay s a token takes; i = sigmoid(W x + b).
    """

    name = "rg-lru"
    paper = "Griffin: Mixing Gated Linear Recurrences with Local Attention for ... Language Models (De et al. 2024)"
    equation = "eqs. 1-4 (RG-LRU); recurrent block of section 2.3 and figure 2"
    differs = "full maps for the gates where the released code has one block a head; as wide as the model"
    bibtex = """@misc{de2024griffin,
  title={{Griffin}: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models},
  author={De, Soham and Smith, Samuel L. and Fernando, Anushan and Botev, Aleksandar and Cristian-Muraru, George and
          Gu, Albert and Haroun, Ruba and Berrada, Leonard and Chen, Yutian and Srinivasan, Srivatsan and others},
  year={2024},
  eprint={2402.19427},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Diagonal("decay", side="row"), Step(Per("write", "row")))
    block = Mamba(charts=(("decay", RGLRU()),), keys=False, activation=None, gate="gelu", skip=False)
