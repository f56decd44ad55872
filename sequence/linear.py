"""Linear attention and its gated relatives: the alignment cost, so the write does not look at the state."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import DPLR, Diagonal, Identity, Product, Rotation, Scalar
from axes.core.rates import Complement, Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.blocks_mamba import SSD
from axes.sequence.charts import SSM, Constant, Exponential, LogSigmoid
from axes.sequence.features import Quadratic, Taylor


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
class Based(SequenceLayer):
    """Linear attention with phi(q) . phi(k) = 1 + s + s^2 / 2, s = q . k / sqrt(16): the series of the exponential.

    Keys of 16 entries have 153 features, products of two of them..
    """

    name = "based"
    paper = "Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff (Arora et al. 2024)"
    equation = "eqs. 2-4: linear attention with the second-order Taylor map of exp, feature dimension 16"
    differs = (
        "equal products stand once (153 features for 273, the same inner products); no epsilon in the denominator, "
        "which is at least half the number of pairs; the linear layers alone, without their windows"
    )
    bibtex = """@inproceedings{arora2024simple,
  title={Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff},
  author={Arora, Simran and Eyuboglu, Sabri and Zhang, Michael and Timalsina, Aman and Alberti, Silas and
          Zinsley, Dylan and Zou, James and Rudra, Atri and R{\\'e}, Christopher},
  booktitle={International Conference on Machine Learning},
  year={2024},
  eprint={2402.18668},
  archivePrefix={arXiv}
}"""
    update = LinearAttention.update
    block = replace(LinearAttention.block, feature_map=Taylor())

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """153 features of vectors of 16 entries."""
        return Taylor().features(16), d_model // heads


@final
class ReBased(SequenceLayer):
    """Linear attention with phi(q) . phi(k) = (q' . k')^2 / 16, x' = gain * LN(x) + bias: a learned parabola."""

    name = "rebased"
    paper = "Linear Transformers with Learnable Kernel Functions are Better In-Context Models (Aksenov et al. 2024)"
    equation = "section 4: phi(x) = (gamma * norm(x) + beta)^2, all products as in the released code"
    differs = "no epsilon in the denominator; gain and bias are shared by heads, queries and keys, as released"
    bibtex = """@inproceedings{aksenov2024linear,
  title={Linear Transformers with Learnable Kernel Functions are Better In-Context Models},
  author={Aksenov, Yaroslav and Balagansky, Nikita and Lo Cicero Vaina, Sofia Maria and Shaposhnikov, Boris and
          Gorbatovski, Alexey and Gavrilov, Daniil},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2024},
  eprint={2402.10644},
  archivePrefix={arXiv}
}"""
    update = LinearAttention.update
    block = replace(LinearAttention.block, feature_map=Quadratic())

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """136 features of vectors of 16 entries."""
        return Quadratic().features(16), d_model // heads


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
class GatedRetention(SequenceLayer):
    """S_t = gamma_t S_{t-1} R(theta) + v k^T: RetNet whose heads forget at a rate that the token chooses.

    gamma = sigmoid(W x)^(1/16), one number a head.
    """

    name = "gated-retention"
    paper = "You Only Cache Once: Decoder-Decoder Architectures for Language Models (Sun et al. 2024)"
    equation = "section 3.1, gated retention: S_n = gamma_n S_{n-1} + K_n^T V_n, gamma = sigmoid(X W_gamma)^(1/tau)"
    differs = (
        "the rotation is RetNet's here, see there; a bias of W_gamma, zero at first; RMSNorm per head with gain; "
        "values as wide as keys"
    )
    bibtex = """@inproceedings{sun2024yoco,
  title={You Only Cache Once: Decoder-Decoder Architectures for Language Models},
  author={Sun, Yutao and Dong, Li and Zhu, Yi and Huang, Shaohan and Wang, Wenhui and Ma, Shuming and Zhang, Quanlu and
          Wang, Jianyong and Wei, Furu},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024},
  eprint={2405.05254},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Product((Scalar("decay"), Rotation())), Step())
    block = Standard(
        conv=0,
        activation=None,
        key_norm=False,
        scale=True,
        charts=(("decay", LogSigmoid(bias=0.0, temperature=16.0)),),
    )


@final
class LightningAttention(SequenceLayer):
    """S_t = lambda S_{t-1} + v silu(k)^T,  o_t = S_t silu(q): every head forgets at its own constant rate, no angles.

    lambda_h = exp(-2^(-8 h / H)) for heads h = 1 .. H, the slopes of ALiBi.
    """

    name = "lightning-attention"
    paper = "Various Lengths, Constant Speed: Efficient Language Modeling with Lightning Attention (Qin et al. 2024)"
    equation = "section 3.1: kv_t = lambda kv_{t-1} + k_t v_t^T, o_t^T = q_t^T kv_t; block of TransNormerLLM"
    differs = (
        "the rates and the sigmoid of the output gate are those of MiniMax-01, of its first layer (deeper ones forget "
        "slower, by a factor of the layer's place); RMSNorm per head instead of over all heads; no activation of values"
    )
    bibtex = """@inproceedings{qin2024various,
  title={Various Lengths, Constant Speed: Efficient Language Modeling with Lightning Attention},
  author={Qin, Zhen and Sun, Weigao and Li, Dong and Shen, Xuyang and Sun, Weixuan and Zhong, Yiran},
  booktitle={International Conference on Machine Learning},
  year={2024},
  eprint={2405.17381},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Scalar("decay"), Step())
    block = Standard(
        conv=0,
        activation=None,
        feature_map="silu",
        key_norm=False,
        output_gate="sigmoid",
        charts=(("decay", Constant(learned=False, spacing="alibi")),),
    )


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
class MLSTM(SequenceLayer):
    """S_t = f S_{t-1} + i v k^T,  n_t = f n_{t-1} + i k,  o_t = S_t q / max(|n_t . q|, 1): the matrix LSTM.

    f = sigmoid(W x + b) and i = exp(W x + b), capped softly at 15, one number a head. Gated linear attention whose
    normaliser, the state's own response to unit values, has a floor.
    """

    name = "mlstm"
    paper = "xLSTM: Extended Long Short-Term Memory (Beck et al. 2024)"
    equation = "eqs. 19-27; the soft cap and the block of xLSTM 7B (Beck et al. 2025)"
    differs = (
        "the released kernels keep S and n times e^-m with m the largest log-weight so far and divide by "
        "max(|n . q|, e^-m): the same numbers; RMSNorm per head; forget biases are all 3 at first, there from 3 to 6"
    )
    bibtex = """@inproceedings{beck2024xlstm,
  title={{xLSTM}: Extended Long Short-Term Memory},
  author={Beck, Maximilian and P{\\"o}ppel, Korbinian and Spanring, Markus and Auer, Andreas and
          Prudnikova, Oleksandra and Kopp, Michael and Klambauer, G{\\"u}nter and Brandstetter, Johannes and
          Hochreiter, Sepp},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024},
  eprint={2405.04517},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(), Euclidean(), Scalar("forget"), Step(Per("input"), debias=True, floor=1.0)
    )
    block = Standard(
        conv=0,
        activation=None,
        key_norm=False,
        scale=True,
        output_gate="sigmoid",
        charts=(("forget", LogSigmoid(bias=3.0)), ("input", Exponential(bias=-10.0))),
    )

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """Keys half as wide as values."""
        return d_model // (2 * heads), d_model // heads


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


@final
class HGRN2(SequenceLayer):
    """S_t = S_{t-1} Diag(a) + v (1 - a)^T,  o_t = S_t silu(q): what a channel forgets is what it takes, so it averages.

    a = sigmoid(W x). The tuple says it without a key: keys are ones, and 1 - a is the step size of every key entry.
    """

    name = "hgrn2"
    paper = "HGRN2: Gated Linear RNNs with State Expansion (Qin et al. 2024)"
    equation = "section 3.2: h_t = Diag(f_t) h_{t-1} + (1 - f_t) i_t^T, o_t = h_t^T silu(q_t)"
    differs = (
        "the lower bound of f comes from all layers: this is the first one's, 0 (LogSigmoid, or a chart of another "
        "bound); RMSNorm per head instead of over all heads"
    )
    bibtex = """@inproceedings{qin2024hgrn2,
  title={{HGRN2}: Gated Linear {RNN}s with State Expansion},
  author={Qin, Zhen and Yang, Songlin and Sun, Weixuan and Shen, Xuyang and Li, Dong and Sun, Weigao and Zhong, Yiran},
  booktitle={Conference on Language Modeling},
  year={2024},
  eprint={2404.07904},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(), Euclidean(), Diagonal("decay"), Step(Complement(Per("decay", "key", "unit")))
    )
    block = Standard(
        conv=0,
        activation=None,
        feature_map="silu",
        keys=False,
        key_norm=False,
        output_gate=None,
        charts=(("decay", LogSigmoid(bias=None)),),
    )


@final
class IPLR(SequenceLayer):
    """S_t = S_{t-1} (I + a b^T) + v k^T: identity plus low rank, an erase and a write that share nothing.

    a = -w and b = eta * w with |w| = 1 and eta = sigmoid(W x) for every channel: the transition has eigenvalues 1 and
    1 - sum eta w^2, in (0, 1).
    """

    name = "iplr"
    paper = "FLA: A Triton-Based Library for ... Linear Attention Mechanism (Yang and Zhang 2024)"
    equation = "generalised delta rule, IPLR: S_t = S_{t-1} (I + a_t b_t^T) + v_t k_t^T"
    differs = "no layer is given there: a and b are tied as in RWKV-7, which this is without its gate; DeltaNet's block"
    bibtex = """@misc{yang2024fla,
  title={{FLA}: A {Triton}-Based Library for Hardware-Efficient Implementations of Linear Attention Mechanism},
  author={Yang, Songlin and Zhang, Yu},
  year={2024},
  howpublished={https://github.com/fla-org/flash-linear-attention}
}"""
    update = StateUpdate(Alignment(), Euclidean(), DPLR(1.0), Step())
    block = Standard(scale=True, output_gate=None)
