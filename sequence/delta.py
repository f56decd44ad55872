"""The delta rule and its gated relatives: squared error, one step per token."""

from __future__ import annotations

from typing import final

from axes.core.algorithms import Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal, Householder, Identity, Product, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import SSM, Sigmoid, Tied


@final
class DeltaNet(SequenceLayer):
    """S_t = S_{t-1} (I - beta k k^T) + beta v k^T with beta in (0, 1): the token's error is written back along its key.

    One explicit gradient step on the squared error. As |k| = 1, the transition has eigenvalues 1 and 1 - beta > 0.
    """

    name = "delta-net"
    paper = "Parallelizing Linear Transformers with the Delta Rule over Sequence Length (Yang et al. 2024)"
    equation = "section 2.2: S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T"
    differs = "keys are divided by their length (the paper's final choice; Schlag et al. 2021 divide by the sum)"
    bibtex = """@inproceedings{yang2024parallelizing,
  title={Parallelizing Linear Transformers with the Delta Rule over Sequence Length},
  author={Yang, Songlin and Wang, Bailin and Zhang, Yu and Shen, Yikang and Kim, Yoon},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024},
  eprint={2406.06484},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(SquaredError(), Euclidean(), Identity(), Step(Per("beta")))
    block = Standard(charts=(("beta", Sigmoid()),), output_gate=None, scale=True)


@final
class DeltaNetReflective(SequenceLayer):
    """S_t = S_{t-1} (I - beta k k^T) + beta v k^T with beta in (0, 2): a step past the projection reflects.

    The same tuple as `DeltaNet`; the chart's range lets the eigenvalue along the key become negative, in (-1, 1), so
    that a state can count modulo two.
    """

    name = "delta-net-reflective"
    paper = "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues (Grazzi et al. 2024)"
    equation = "S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T with beta_t in (0, 2): eigenvalue range [-1, 1]"
    differs = "nothing beyond DeltaNet: beta = 2 sigmoid(W x)"
    bibtex = """@inproceedings{grazzi2025unlocking,
  title={Unlocking State-Tracking in Linear {RNN}s Through Negative Eigenvalues},
  author={Grazzi, Riccardo and Siems, Julien and Zela, Arber and Franke, J{\\"o}rg K.H. and Hutter, Frank and
          Pontil, Massimiliano},
  booktitle={International Conference on Learning Representations},
  year={2025},
  eprint={2411.12537},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(SquaredError(), Euclidean(), Identity(), Step(Per("beta")))
    block = Standard(charts=(("beta", Sigmoid(scale=2.0)),), output_gate=None, scale=True)


_GATED_BLOCK = Standard(charts=(("decay", SSM(step=None)), ("beta", Sigmoid())), scale=True)


@final
class GatedDeltaNet(SequenceLayer):
    """S_t = a S_{t-1} (I - beta k k^T) + beta v k^T: the gate first, the gradient at the gated state.

    a = exp(-exp(A_log) softplus(W x + b)) as in Mamba-2.
    """

    name = "gated-delta-net"
    paper = "Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz and Hatamizadeh 2024)"
    equation = "eq. 10: S_t = S_{t-1} (a_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T"
    differs = (
        "values as wide as keys by default, where the released model has d_v = 2 d_k (pass d_v); A starts in [1, 16] "
        "as in Mamba-2, there in (0, 16]"
    )
    bibtex = """@inproceedings{yang2025gated,
  title={Gated Delta Networks: Improving {Mamba2} with Delta Rule},
  author={Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali},
  booktitle={International Conference on Learning Representations},
  year={2025},
  eprint={2412.06464},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(Per("beta"), at="gated"))
    block = _GATED_BLOCK


@final
class GatedDeltaNetPrev(SequenceLayer):
    """S_t = S_{t-1} (a I - beta k k^T) + beta v k^T: the gradient at the old state, the gate beside it.

    The order of decoupled weight decay, W - eta lambda W - eta g(W): the erase strength is beta instead of a beta.
    """

    name = "gated-delta-net-prev"
    paper = "Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz and Hatamizadeh 2024)"
    equation = "the other order of eq. 10: S_t = a_t S_{t-1} - beta_t (S_{t-1} k_t - v_t) k_t^T"
    differs = "not in the paper, which takes the gradient after the gate; the block is GatedDeltaNet's"
    bibtex = GatedDeltaNet.bibtex
    update = StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(Per("beta")))
    block = _GATED_BLOCK


@final
class KDA(SequenceLayer):
    """S_t = S_{t-1} Diag(a) (I - beta k k^T) + beta v k^T: Gated DeltaNet with a forget gate for every key channel.

    a = exp(-exp(A_log) softplus(W_2 W_1 x + b)), A_log a number a head, W_1 of rank 128, the width of a released head.
    """

    name = "kda"
    paper = "Kimi Linear: An Expressive, Efficient Attention Architecture (Kimi Team 2025)"
    equation = "eq. 1: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T, transposed"
    differs = "the output gate's projection has full rank and no bias, there the rank of a head's width"
    bibtex = """@misc{kimi2025linear,
  title={Kimi Linear: An Expressive, Efficient Attention Architecture},
  author={{Kimi Team}},
  year={2025},
  eprint={2510.26692},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(SquaredError(), Euclidean(), Diagonal("decay"), Step(Per("beta"), at="gated"))
    block = Standard(
        charts=(("decay", SSM(step=None, rank=128)), ("beta", Sigmoid())), scale=True, output_gate="sigmoid"
    )


_BIBTEX_PRODUCT = """@inproceedings{siems2025deltaproduct,
  title={{DeltaProduct}: Improving State-Tracking in Linear {RNN}s via Householder Products},
  author={Siems, Julien and Carstensen, Timur and Zela, Arber and Hutter, Frank and Pontil, Massimiliano and
          Grazzi, Riccardo},
  booktitle={Advances in Neural Information Processing Systems},
  year={2025},
  eprint={2502.10297},
  archivePrefix={arXiv}
}"""
_PAPER_PRODUCT = "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products (Siems et al. 2025)"
_STRENGTHS = "the strengths of a token stand head by head in their projection, there write by write"


@final
class DeltaProduct(SequenceLayer):
    """Two delta rules a token: S <- S (I - beta_j k_j k_j^T) + beta_j v_j k_j^T for j = 1, 2, then o_t = S_t q_t.

    beta in (0, 2): the token's transition is a product of generalised Householder maps, which two reflections make a
    rotation. `Step(writes=n)` is n of them.
    """

    name = "delta-product"
    paper = _PAPER_PRODUCT
    equation = "eqs. 6 and 7: H_{i,j} = (I - beta_{i,j} k_{i,j} k_{i,j}^T) H_{i,j-1} + beta_{i,j} k_{i,j} v_{i,j}^T"
    differs = _STRENGTHS
    bibtex = _BIBTEX_PRODUCT
    update = StateUpdate(SquaredError(), Euclidean(), Identity(), Step(Per("beta"), writes=2))
    block = Standard(charts=(("beta", Sigmoid(scale=2.0)),), scale=True)


@final
class GatedDeltaProduct(SequenceLayer):
    """S <- a S, then two delta rules: DeltaProduct whose state forgets once a token, ahead of its first write."""

    name = "gated-delta-product"
    paper = _PAPER_PRODUCT
    equation = "section 3, gated DeltaProduct: A(x_i) = g_i prod_j (I - beta_{i,j} k_{i,j} k_{i,j}^T)"
    differs = f"{_STRENGTHS}; A starts in [1, 16] as in Mamba-2, there in (0, 16]"
    bibtex = _BIBTEX_PRODUCT
    update = StateUpdate(SquaredError(), Euclidean(), Scalar("decay"), Step(Per("beta"), at="gated", writes=2))
    block = Standard(charts=(("decay", SSM(step=None)), ("beta", Sigmoid(scale=2.0))), scale=True)


@final
class Comba(SequenceLayer):
    """S_t = a S_{t-1} (I - c beta k k^T) + beta v k^T,  o_t = S_t (q - d k): Gated DeltaNet that erases less.

    c (in (0, 1)) and d are numbers of a head: the state's loop closed, and the output's. An erase and a write with
    strengths of their own are no gradient of an error: the tuple is a write, and a map that erases along its key.
    """

    name = "comba"
    paper = "Comba: Improving Bilinear RNNs with Closed-loop Control (Hu et al. 2025)"
    equation = "S_t = S_{t-1} (alpha_t - beta~_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t (q_t - d k_t)"
    differs = (
        "the gate acts before the erase, as in the released code, where the paper prints it beside; q is corrected "
        "behind its norm, there ahead of it; d starts at 0.02, one of two recommended values; A starts in [1, 16]"
    )
    bibtex = """@article{hu2025comba,
  title={Comba: Improving Bilinear {RNN}s with Closed-loop Control},
  author={Hu, Jiaxi and Pan, Yongqi and Du, Jusen and Lan, Disen and Tang, Xiaqiang and Wen, Qingsong and
          Liang, Yuxuan and Sun, Weigao},
  journal={arXiv preprint arXiv:2506.02475},
  year={2025}
}"""
    update = StateUpdate(
        Alignment(), Euclidean(), Product((Scalar("decay"), Householder(Per("erase"), "k"))), Step(Per("beta"))
    )
    block = Standard(
        charts=(("decay", SSM(step=None)), ("beta", Tied(Sigmoid(), "erase", "share"))),
        scale=True,
        correction=0.02,
        output_gate="sigmoid",
    )


@final
class GatedDeltaNet2(SequenceLayer):
    """S_t = S_{t-1} Diag(a) (I - (b * k) k^T) + (w * v) k^T: KDA whose erase has a strength for every key channel.

    b in (0, 1)^{d_k} and w in (0, 1)^{d_v}: what is erased and what is written are chosen apart. b = w = beta is KDA.
    """

    name = "gdn2"
    paper = "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention (NVlabs 2026)"
    equation = "S_t = (I - k_t (b_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T, transposed"
    differs = "as in KDA: the output gate's projection has full rank and no bias, there the rank of a head's width"
    bibtex = """@misc{nvlabs2026gdn2,
  title={Gated {DeltaNet}-2: Decoupling Erase and Write in Linear Attention},
  author={{NVlabs}},
  year={2026},
  howpublished={https://github.com/NVlabs/GatedDeltaNet-2}
}"""
    update = StateUpdate(
        Alignment(),
        Euclidean(),
        Product((Diagonal("decay"), Householder(Per("erase", "key"), "k"))),
        Step(Per("write", "row")),
    )
    block = Standard(
        charts=(("decay", SSM(step=None, rank=128)), ("erase", Sigmoid()), ("write", Sigmoid())),
        scale=True,
        output_gate="sigmoid",
    )
