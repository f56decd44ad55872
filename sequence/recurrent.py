"""Recurrent networks as tuples: the signals of a token depend on what was read last, so that tokens are walked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.routes.cells import GRU as GRUCell
from axes.routes.cells import SLSTM as SLSTMCell
from axes.routes.cells import VectorCell
from axes.routes.matrix_cells import M2RNN as M2RNNCell
from axes.routes.matrix_cells import MatrixCell
from axes.routes.packed import Packing
from axes.routes.recurrent import known
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block, BlockModule, Standard
from axes.sequence.by_hand import normalised
from axes.sequence.charts import SSM, Factory, Sizes
from axes.sequence.linear import MLSTM

_AVERAGE = StateUpdate(Alignment(), Euclidean(), Diagonal("decay", side="row"), Step(Per("write", "row")))


@final
@dataclass(frozen=True)
class Recurrent(Block):
    """x = W x + b for every pre-activation of a cell, heads with a matrix of the last read each, y = W_out h.

    norm: RMS over the channels of a head before W_out.  forget: bias of this pre-activation's share of x at first.
    """

    grouped: ClassVar[str | None] = "has neither queries nor keys"

    cell: VectorCell  # type: ignore[misc]
    norm: bool = False
    forget: tuple[int, float] | None = None
    norm_eps: float = 1e-5

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        if sizes.d_k != 1 or {p.name for p in demands} != {"decay", "write"}:
            raise IllegalUpdate("Recurrent: a cell gives v, decay and write to rows of one entry: keep tuple and d_k")
        return _RecurrentModule(self, sizes, factory)


@final
class _RecurrentModule(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: the matrices of heads are none of the usual layout

    cell: VectorCell

    def __init__(self, block: Recurrent, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.block, self.sizes, self.cell = block, sizes, block.cell
        known(block.cell)
        shape = (sizes.heads, block.cell.gates, sizes.d_v)
        self.in_proj = nn.Linear(sizes.d_model, sizes.heads * block.cell.gates * sizes.d_v, **factory)
        self.weight = nn.Parameter(torch.empty(sizes.heads, sizes.d_v, block.cell.gates, sizes.d_v, **factory))
        self.bias = nn.Parameter(torch.empty(shape, **factory))
        self.norm = nn.RMSNorm(sizes.d_v, eps=block.norm_eps, **factory) if block.norm else None
        self.o_proj = nn.Linear(sizes.heads * sizes.d_v, sizes.d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.sizes.d_v**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)
        if self.block.forget is not None:
            gate, start = self.block.forget
            with torch.no_grad():
                self.bias[:, gate] = start

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """What the cell carries."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return self.cell.empty(like.new_zeros(batch, self.sizes.heads, self.sizes.d_v, dtype=wide))

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        shape = (self.sizes.heads, self.cell.gates, self.sizes.d_v)
        return {"inputs": self.in_proj(x).unflatten(-1, shape)}, tails, None

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        if self.norm is not None:
            y = normalised(y.to(self.norm.weight.dtype), 1.0 / self.sizes.d_v, self.block.norm_eps) * self.norm.weight
        out: Tensor = self.o_proj(y.to(self.o_proj.weight.dtype).flatten(-2))
        return out


class _Walked(SequenceLayer):
    """Keys and queries are the number one: a state is a row for every channel, of one entry."""

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        return 1, d_model // heads


@final
class GRU(_Walked):
    """h_t = z h_{t-1} + (1 - z) n,  n = tanh(W x + r (U h_{t-1})): an average whose rates and value hear the last read.

    r, z = sigmoid(W x + U h_{t-1}); heads have matrices U of their own, one head is torch.nn.GRU.
    """

    name = "gru"
    paper = "Learning Phrase Representations using RNN Encoder-Decoder for ... Machine Translation (Cho et al. 2014)"
    equation = "eqs. 5-8, with the reset behind U h as cuDNN and torch.nn.GRU have it"
    differs = "reset behind the matrix, with a bias of its own; z keeps what the paper's 1 - z keeps; W_out behind"
    bibtex = """@inproceedings{cho2014learning,
  title={Learning Phrase Representations using {RNN} Encoder-Decoder for Statistical Machine Translation},
  author={Cho, Kyunghyun and van Merri{\\"e}nboer, Bart and Gulcehre, Caglar and Bahdanau, Dzmitry and
          Bougares, Fethi and Schwenk, Holger and Bengio, Yoshua},
  booktitle={Empirical Methods in Natural Language Processing},
  year={2014},
  eprint={1406.1078},
  archivePrefix={arXiv}
}"""
    update = _AVERAGE
    block = Recurrent(GRUCell())


@final
class SLSTM(_Walked):
    """c_t = f c_{t-1} + i z,  n_t = f n_{t-1} + i,  h_t = o c_t / n_t: gates and z hear h_{t-1}, i is an exponential.

    As an average: y = c / n moves by i / n_t towards z, and the log of n is carried beside the state.
    """

    name = "slstm"
    paper = MLSTM.paper
    equation = "eqs. 8-18: heads with matrices of their own, f a sigmoid, stabilised"
    differs = (
        "the state is c / n and log n, the paper's c and n times e^-m with m the largest log-weight: the same outputs; "
        "forget biases are all 3 at first; RMSNorm per head for its group norm; no convolution, no feed-forward part"
    )
    bibtex = MLSTM.bibtex
    update = _AVERAGE
    block = Recurrent(SLSTMCell(), norm=True, forget=(1, 3.0))


@final
@dataclass(frozen=True)
class MatrixRecurrent(Block):
    """q, k, v, a gate and what is behind the read are those of `around`; every head has a matrix of its last state."""

    grouped: ClassVar[str | None] = "has a matrix and a key for every head"

    cell: MatrixCell  # type: ignore[misc]
    around: Standard = Standard()

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        named = {(p.name, p.shape) for p in demands}
        if named != {("decay", "scalar"), ("write", "scalar")} or sizes.writes > 1 or sizes.reads > 1:
            raise IllegalUpdate(
                "MatrixRecurrent: a cell writes every column of the state by decay and write, one number a head each: "
                "keep the tuple"
            )
        given = tuple(p for p in demands if p.name == "decay")  # what is not kept is written
        return _MatrixRecurrentModule(self, sizes, self.around.build(sizes, given, vectors, factory), factory)


@final
class _MatrixRecurrentModule(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}

    cell: MatrixCell

    def __init__(self, block: MatrixRecurrent, sizes: Sizes, around: BlockModule, factory: Factory) -> None:
        super().__init__()
        self.sizes, self.cell, self.around = sizes, block.cell, around
        known(block.cell)
        self.weight = nn.Parameter(torch.empty(sizes.heads, sizes.d_v, sizes.d_v, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.sizes.d_v**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def matrices(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        return self.around.tails(batch, like)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        return self.around.enter(x, tails, packing)

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        return self.around.leave(y, kept)


@final
class M2RNN(SequenceLayer):
    """S_t = f S_{t-1} + (1 - f) tanh(W^T S_{t-1} + v k^T),  o_t = S_t q_t: every column of a matrix hears itself.

    As a tuple a gated average that is written to at d_k unit keys e_i a token, with values tanh(W^T S e_i + v k_i):
    GRU's candidate for as many states as there are key entries, which share W and the gate f = exp(-e^A softplus(W x)).
    """

    name = "m2rnn"
    paper = "M2RNN: Non-Linear RNNs with Matrix-Valued States for Scalable Language Modeling (Mishra et al. 2026)"
    equation = "Z_t = tanh(H_{t-1} W + k v^T), H_t = f H_{t-1} + (1 - f) Z_t, y = H_t^T q; H is S^T here"
    differs = (
        "keys as wide as values and heads of one kind, there values are narrower and heads of k and f shared; no skip "
        "D v beside the read and no clipping of the state's gradient; W is uniform at first; RMSNorm per head"
    )
    bibtex = """@misc{mishra2026m2rnn,
  title={{M2RNN}: Non-Linear {RNNs} with Matrix-Valued States for Scalable Language Modeling},
  author={Mishra, Mayank and Tan, Shawn and Stoica, Ion and Gonzalez, Joseph and Dao, Tri},
  year={2026},
  eprint={2603.14360},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), Scalar("decay"), Step(Per("write")))
    block = MatrixRecurrent(M2RNNCell(), Standard(key_norm=False, charts=(("decay", SSM(step=None)),)))


__all__ = ["GRU", "M2RNN", "SLSTM", "MatrixRecurrent", "Recurrent"]
