"""The delta rule and its gated relatives: squared error, one step per token."""

from __future__ import annotations

from typing import final

from axes.core.algorithms import Step
from axes.core.costs import SquaredError
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal, Identity, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Standard
from axes.sequence.charts import SSM, Sigmoid


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
