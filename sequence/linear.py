"""Linear attention and its gated relatives: the alignment cost, so the write does not look at the state."""

from __future__ import annotations

from typing import final

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal, Identity, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.blocks_mamba import SSD
from axes.sequence.charts import SSM, Constant, LogSigmoid


@final
class LinearAttention(SequenceLayer):
    """S_t = S_{t-1} + v phi(k)^T,  z_t = z_{t-1} + phi(k),  o_t = S_t phi(q) / (z_t . phi(q)),  phi = elu + 1.

    The normaliser z is the state's own response to unit values: bias correction on the sequence axis.
    """

    name = "linear-attention"
    paper = "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention (Katharopoulos et al. 2020)"
    equation = "eqs. 18-20"
    differs = "no epsilon in the denominator, which is positive: phi > 0"
    bibtex = """@inproceedings{katharopoulos2020transformers,
  title={Transformers are {RNN}s: Fast Autoregressive Transformers with Linear Attention},
  author={Katharopoulos, Angelos and Vyas, Apoorv and Pappas, Nikolaos and Fleuret, Fran{\\c{c}}ois},
  booktitle={International Conference on Machine Learning},
  year={2020},
  eprint={2006.16236},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Identity(), Step(debias=True))
    block = Standard(conv=0, activation=None, feature_map="elu+1", key_norm=False, output_norm=False, output_gate=None)


@final
class UnnormalisedLinearAttention(SequenceLayer):
    """S_t = S_{t-1} + v k^T,  o_t = norm(S_t q): no feature map, no normaliser; a norm on the output instead."""

    name = "linear-attention-unnormalised"
    paper = "The Devil in Linear Transformer (Qin et al. 2022)"
    equation = "NormAttention: O = Norm(Q (K^T V))"
    differs = "identity feature map, as in the linear attention of Yang et al. 2023 (GLA), section 2.1"
    bibtex = """@inproceedings{qin2022devil,
  title={The Devil in Linear Transformer},
  author={Qin, Zhen and Han, Xiaodong and Sun, Weixuan and Li, Dongxu and Kong, Lingpeng and Barnes, Nick and
          Zhong, Yiran},
  booktitle={Conference on Empirical Methods in Natural Language Processing},
  year={2022},
  eprint={2210.10340},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Identity(), Step())
    block = Standard(conv=0, activation=None, key_norm=False, scale=True, output_gate=None)


@final
class RetNet(SequenceLayer):
    """S_t = gamma S_{t-1} R(theta) + v k^T: every head forgets at its own constant rate while old keys turn.

    gamma_h = 1 - 2^(-5 - h). R(theta) is the rotation of RetNet's complex transition gamma e^(i theta) and of xPos.
    """

    name = "retnet"
    paper = "Retentive Network: A Successor to Transformer for Large Language Models (Sun et al. 2023)"
    equation = "eqs. 5, 6 and 8"
    differs = (
        "the rotation turns the other way and pairs j with j + d_k/2 (a sign change and permutation of rows of W_q and "
        "W_k); RMSNorm per head with gain instead of GroupNorm; the released code also rescales scores, which that "
        "norm undoes"
    )
    bibtex = """@misc{sun2023retentive,
  title={Retentive Network: A Successor to Transformer for Large Language Models},
  author={Sun, Yutao and Dong, Li and Huang, Shaohan and Ma, Shuming and Xia, Yuqing and Xue, Jilong and
          Wang, Jianyong and Wei, Furu},
  year={2023},
  eprint={2307.08621},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Product((Scalar("decay"), Rotation())), Step())
    block = Standard(
        conv=0,
        activation=None,
        key_norm=False,
        scale=True,
        charts=(("decay", Constant(learned=False, spacing="retention")),),
    )

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """Values twice as wide as keys."""
        return d_model // heads, 2 * d_model // heads


@final
class Mamba2(SequenceLayer):
    """S_t = exp(A dt) S_{t-1} + dt v k^T,  o_t = S_t q + D v: gate and write share one step size dt per head.

    k = B, q = C and v = x in the paper's letters; all heads share k and q. The block is Mamba-2's own, see `SSD`.
    """

    name = "mamba2"
    paper = "Transformers are SSMs: ... Structured State Space Duality (Dao and Gu 2024)"
    equation = "h_t = A_t h_{t-1} + B_t x_t, y_t = C_t^T h_t with scalar A_t (SSD); block of section 7.1"
    differs = (
        "one group (B and C shared by all heads), as released, SSD(groups=...) for more; dt has its own projection "
        "instead of rows of one"
    )
    bibtex = """@inproceedings{dao2024transformers,
  title={Transformers are {SSM}s: Generalized Models and Efficient Algorithms Through Structured State Space Duality},
  author={Dao, Tri and Gu, Albert},
  booktitle={International Conference on Machine Learning},
  year={2024},
  eprint={2405.21060},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Scalar("decay"), Step(Per("dt")))
    block = SSD(charts=(("decay", SSM()),))

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """State size 128, inner width twice the model's."""
        return 128, 2 * d_model // heads


@final
class GLA(SequenceLayer):
    """S_t = S_{t-1} Diag(a) + v k^T: a forget gate for every key channel.

    a = sigmoid(W_2 W_1 x + b)^(1/16), W_1 of rank 16.
    """

    name = "gla"
    paper = "Gated Linear Attention Transformers with Hardware-Efficient Training (Yang et al. 2023)"
    equation = "section 4.1 (recurrence) and section 4.4 (layer): S_t = Diag(a_t) S_{t-1} + k_t^T v_t, transposed"
    differs = (
        "RMSNorm per head instead of LayerNorm, no bias in the output gate, q scaled by d_k^(-1/2), all as released"
    )
    bibtex = """@inproceedings{yang2024gated,
  title={Gated Linear Attention Transformers with Hardware-Efficient Training},
  author={Yang, Songlin and Wang, Bailin and Shen, Yikang and Panda, Rameswar and Kim, Yoon},
  booktitle={International Conference on Machine Learning},
  year={2024},
  eprint={2312.06635},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Diagonal("decay"), Step())
    block = Standard(
        conv=0,
        activation=None,
        key_norm=False,
        scale=True,
        charts=(("decay", LogSigmoid(bias=0.0, temperature=16.0, rank=16)),),
    )

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """Keys half as wide as values."""
        return d_model // (2 * heads), d_model // heads
