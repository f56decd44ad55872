"""Softmax attention and its positional encodings: a list memory whose scores an entropic h turns into weights.

With G_t the cumulated log-gate and R the product of the matrix gates since a pair was stored,
o_t = sum_i p_i v_i with p = softmax_i(q_t . R k_i / sqrt(d_k) + G_t - G_i).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Entropic
from axes.core.memory import Kernel, List
from axes.core.monoids import Householder, Identity, Product, Rotation, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import SMALL, Block, BlockModule, ShortConvolution, Standard, in_groups, l2_normalise
from axes.sequence.charts import Chart, Constant, Factory, LogSigmoid, Sigmoid, Sizes
from axes.sequence.fused import Declaration, Matrix, Vector

# projections alone, as in Vaswani et al. 2017
_PLAIN = Standard(conv=0, activation=None, key_norm=False, output_norm=False, output_gate=None)


@final
class SoftmaxAttention(SequenceLayer):
    """o_t = sum_{i<=t} softmax_i(q_t . k_i / sqrt(d_k)) v_i, without positional encoding (NoPE)."""

    name = "softmax-attention"
    paper = "Attention Is All You Need (Vaswani et al. 2017)"
    equation = "eq. 1, causal"
    differs = "no positional encoding (Kazemnejad et al. 2023 call this NoPE), no biases, no dropout"
    bibtex = """@inproceedings{vaswani2017attention,
  title={Attention Is All You Need},
  author={Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and
          Gomez, Aidan N. and Kaiser, Lukasz and Polosukhin, Illia},
  booktitle={Advances in Neural Information Processing Systems},
  year={2017},
  eprint={1706.03762},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Entropic(), Identity(), Step(), List())
    block = _PLAIN


@final
class ALiBi(SequenceLayer):
    """p = softmax_i(q_t . k_i / sqrt(d_k) - m_h (t - i)): a constant gate exp(-m_h) on the mass of every stored pair.

    m_h = 2^(-8 h / H) for heads h = 1 .. H, a geometric sequence.
    """

    name = "alibi"
    paper = "Train Short, Test Long: Attention with Linear Biases ... (Press, Smith and Lewis 2021)"
    equation = "section 3"
    differs = "the slopes of the formula for every H, where the released code interpolates unless H is a power of two"
    bibtex = """@inproceedings{press2022train,
  title={Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation},
  author={Press, Ofir and Smith, Noah A. and Lewis, Mike},
  booktitle={International Conference on Learning Representations},
  year={2022},
  eprint={2108.12409},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Entropic(), Scalar("decay"), Step(), List())
    block = replace(_PLAIN, charts=(("decay", Constant(learned=False, spacing="alibi")),))


@final
class RoPE(SequenceLayer):
    """p = softmax_i(q_t . R(theta)^(t-i) k_i / sqrt(d_k)): stored keys turn by theta_j = 10000^(-2j/d_k) a token."""

    name = "rope"
    paper = "RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al. 2021)"
    equation = "eqs. 14-16"
    differs = (
        "keys turn where the paper turns both by absolute position, in the other direction, and pair j goes with "
        "j + d_k/2: the same function after a sign change and permutation of rows of W_q and W_k"
    )
    bibtex = """@article{su2024roformer,
  title={{RoFormer}: Enhanced Transformer with Rotary Position Embedding},
  author={Su, Jianlin and Ahmed, Murtadha and Lu, Yu and Pan, Shengfeng and Bo, Wen and Liu, Yunfeng},
  journal={Neurocomputing},
  volume={568},
  year={2024},
  eprint={2104.09864},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Entropic(), Rotation(), Step(), List())
    block = _PLAIN


@final
class GQA(SequenceLayer):
    """p = softmax_i(q_t . R^(t-i) k_i / sqrt(d_k)), rotated attention whose heads of queries read one list two by two.

    A list's keys and values are projected, rotated, stored and written once for all heads of its group.
    """

    name = "gqa"
    paper = "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints (Ainslie et al. 2023)"
    equation = "section 2.2: query heads in groups, each with a single key head and value head"
    differs = "rotated keys as in Llama 2 and 3, there T5's biases; groups of two (`replace(block, queries=n)`: of n)"
    bibtex = """@inproceedings{ainslie2023gqa,
  title={{GQA}: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints},
  author={Ainslie, Joshua and Lee-Thorp, James and de Jong, Michiel and Zemlyanskiy, Yury and Lebr{\\'o}n, Federico and
          Sanghai, Sumit},
  booktitle={Conference on Empirical Methods in Natural Language Processing},
  year={2023},
  eprint={2305.13245},
  archivePrefix={arXiv}
}"""
    update = RoPE.update
    block = replace(_PLAIN, queries=2)


@final
class MQA(SequenceLayer):
    """p = softmax_i(q_t . R^(t-i) k_i / sqrt(d_k)), rotated attention in which all heads of queries read one list."""

    name = "mqa"
    paper = "Fast Transformer Decoding: One Write-Head is All You Need (Shazeer 2019)"
    equation = "section 3: keys and values without the heads' dimension"
    differs = "rotated keys as in PaLM, there the positions of the first Transformer"
    bibtex = """@misc{shazeer2019fast,
  title={Fast Transformer Decoding: One Write-Head is All You Need},
  author={Shazeer, Noam},
  year={2019},
  eprint={1911.02150},
  archivePrefix={arXiv}
}"""
    update = RoPE.update
    block = replace(_PLAIN, queries="all")


@final
class SlidingWindow(SequenceLayer):
    """p = softmax over the last 512 pairs of q_t . R^(t-i) k_i / sqrt(d_k): older pairs leave the list.

    `List(window=...)` is the width; the state stops growing there..
    """

    name = "sliding-window"
    paper = "Longformer: The Long-Document Transformer (Beltagy, Peters and Cohan 2020)"
    equation = "section 3.1, sliding window of width w, to the left alone"
    differs = "causal, rotated keys as in Mistral 7B (Jiang et al. 2023), no dilation and no global tokens"
    bibtex = """@misc{beltagy2020longformer,
  title={{Longformer}: The Long-Document Transformer},
  author={Beltagy, Iz and Peters, Matthew E. and Cohan, Arman},
  year={2020},
  eprint={2004.05150},
  archivePrefix={arXiv}
}"""
    update = replace(RoPE.update, memory=List(window=512))
    block = _PLAIN


@final
class FoX(SequenceLayer):
    """p = softmax_i(q_t . k_i / sqrt(d_k) + sum_{i<s<=t} log f_s): a forget gate on the mass of every stored pair.

    f = sigmoid(w . x + b) per head, b = 0 at first.
    """

    name = "fox"
    paper = "Forgetting Transformer: Softmax Attention with a Forget Gate (Lin et al. 2025)"
    equation = "section 3 (forgetting attention)"
    differs = "the plain block, not the Pro block (output gate and norm, normalised q and k, shifted k and v)"
    bibtex = """@inproceedings{lin2025forgetting,
  title={Forgetting Transformer: Softmax Attention with a Forget Gate},
  author={Lin, Zhixuan and Nikishin, Evgenii and He, Xu Owen and Courville, Aaron},
  booktitle={International Conference on Learning Representations},
  year={2025},
  eprint={2503.02130},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Entropic(), Scalar("forget"), Step(), List())
    block = replace(_PLAIN, charts=(("forget", LogSigmoid(bias=0.0)),))


@final
@dataclass(frozen=True)
class Transported(Block):
    """Plain attention projections and the unit vector of a reflection for every token: w = l2(conv(W_2 W_1 x)).

    rank: of W_1.  conv: width of the convolution, followed by SiLU.  queries: heads of queries that read one list, as
    in `Standard`.  charts: (rate name, chart) pairs.
    """

    rank: int = 32
    conv: int = 3
    queries: int = 1
    charts: tuple[tuple[str, Chart], ...] = ()

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        if "w" not in vectors:
            raise IllegalUpdate(f"Transported supplies the vector 'w'; the tuple reads {sorted(vectors)}: use Standard")
        return _TransportedModule(self, sizes, demands, vectors - {"w"}, factory)


@final
class _TransportedModule(BlockModule):
    def __init__(
        self, block: Transported, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory
    ) -> None:
        super().__init__()
        lists = sizes.heads // block.queries
        self.queries, self.heads, width = block.queries, (lists, sizes.d_k), lists * sizes.d_k
        self.plain = replace(_PLAIN, charts=block.charts, queries=block.queries).build(sizes, demands, vectors, factory)
        self.w_down = nn.Linear(sizes.d_model, block.rank, bias=False, **factory)
        self.w_up = nn.Linear(block.rank, width, bias=False, **factory)
        self.w_conv = ShortConvolution(width, block.conv, "silu", factory)

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        return (self.w_conv.tail(batch, like),)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        signal, _, kept = self.plain.enter(x, ())
        w, tail = self.w_conv(self.w_up(self.w_down(x)), tails[0], packing)
        w = l2_normalise(w.unflatten(-1, self.heads))
        signal["w"] = in_groups(w, "w", self.queries)
        return signal, (tail,), kept

    def declaration(self, path: str = "") -> Declaration | None:
        plain = self.plain.declaration(f"{path}plain.")
        if plain is None:
            return None
        stream = self.w_conv.stream(*self.heads, norm="unit", eps=SMALL**2)
        up = Matrix(f"{path}w_up", self.w_up.weight.shape[0])
        down = Matrix(f"{path}w_down", self.w_down.weight.shape[0])
        return replace(plain, vectors=(*plain.vectors, Vector("w", up, stream, f"{path}w_conv", down)))

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        return self.plain.leave(y, kept)


@final
class PaTH(SequenceLayer):
    """p = softmax_i(k_i A_{i+1} ... A_t q_t / sqrt(d_k)),  A_s = I - beta_s w_s w_s^T: reflections carry stored keys.

    beta = 2 sigmoid(W x + b) in (0, 2), |w| = 1: from the identity through the projection to the reflection.
    """

    name = "path"
    paper = "PaTH Attention: Position Encoding via Accumulating Householder Transformations (Yang et al. 2025)"
    equation = "A_ij ~ exp(k_j^T (prod_{s=j+1}^{i} H_s) q_i), H_s = I - beta_s w_s w_s^T"
    differs = "no forget gate (PaTH-FoX is another tuple), SiLU after the convolution of w as in the released layer"
    bibtex = """@inproceedings{yang2025path,
  title={{PaTH} Attention: Position Encoding via Accumulating Householder Transformations},
  author={Yang, Songlin and Shen, Yikang and Wen, Kaiyue and Tan, Shawn and Mishra, Mayank and Ren, Liliang and
          Panda, Rameswar and Kim, Yoon},
  booktitle={Advances in Neural Information Processing Systems},
  year={2025},
  eprint={2505.16381},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Entropic(), Householder(Per("beta")), Step(), List())
    block = Transported(charts=(("beta", Sigmoid(scale=2.0, bias=0.0)),))


@final
class PaTHFoX(SequenceLayer):
    """p = softmax_i(k_i A_{i+1} ... A_t q_t / sqrt(d_k) + sum_{i<s<=t} log f_s): PaTH with FoX's forget gate."""

    name = "path-fox"
    paper = PaTH.paper
    equation = "section 3, PaTH-FoX: PaTH's logits plus the cumulated log forget gates of FoX"
    differs = "SiLU after the convolution of w as in the released layer; f's bias is 0 at first, as in FoX"
    bibtex = PaTH.bibtex
    update = StateUpdate(
        Alignment(), Entropic(), Product((Scalar("forget"), Householder(Per("beta")))), Step(), List()
    )
    block = Transported(charts=(("beta", Sigmoid(scale=2.0, bias=0.0)), ("forget", LogSigmoid(bias=0.0))))


@final
class DeltaFormer(SequenceLayer):
    """u_t = v_t - sum_{i<t} softmax_i(k_t . k_i / sqrt(d_k)) u_i,  o_t = sum_i softmax_i(q_t . k_i / sqrt(d_k)) u_i.

    What is stored is the error of what the list already gives for the key: the delta rule on softmax attention.
    """

    name = "deltaformer"
    paper = "Understanding Transformer from the Perspective of Associative Memory (Zhong et al. 2025)"
    equation = "DeltaFormer: u_t = v_t - sum_i kappa_1(w_t, k_i) u_i, o_t = sum_i kappa_2(q_t, k_i) u_i, both softmax"
    differs = "what asks for the error is the key itself (w = k, no projection of its own), of strength 1; no rotation"
    bibtex = """@misc{zhong2025understanding,
  title={Understanding Transformer from the Perspective of Associative Memory},
  author={Zhong, Shu and Xu, Mingyu and Ao, Tenglong and Shi, Guang},
  year={2025},
  eprint={2505.19488},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(SquaredError(), Entropic(), Identity(), Step(), List())
    block = _PLAIN


@final
class LUCID(SequenceLayer):
    """u_t = v_t - sum_{i<t} exp(sqrt(d_k) (cos(k_t, k_i) - 1)) u_i,  o_t = sum_i softmax_i(q_t . k_i / sqrt(d_k)) u_i.

    What is stored is the error of what the list gives for the key by an exponential kernel, under which a key has the
    product 1 with itself: values are solved for against the keys' own Gram matrix, and softmax reads them.
    """

    name = "lucid"
    paper = "LUCID: Attention with Preconditioned Representations (Duvvuri et al. 2026)"
    equation = "O = softmax(Q K^T / sqrt(d)) (M * exp(K~ K~^T / sqrt(d) - sqrt(d)))^-1 V, K~ keys of unit RMS, M causal"
    differs = "no positions, where models have rotated keys (`replace(update, monoid=Rotation())`); no gain in K~"
    bibtex = """@misc{duvvuri2026lucid,
  title={{LUCID}: Attention with Preconditioned Representations},
  author={Duvvuri, Sai Surya and Patel, Nirmal and Gupta, Nilesh and Dhillon, Inderjit S.},
  year={2026},
  eprint={2602.10410},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(SquaredError(), Entropic(), Identity(), Step(), List(errors=Kernel()))
    block = _PLAIN
