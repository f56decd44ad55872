"""Diagonal state spaces that share one state: a complex number for every mode, written by all channels, read by all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal, Product, Rotation
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block, BlockModule
from axes.sequence.charts import Factory, Sizes

_DECAY, _ANGLE = Per("decay", "row-pair", "unit"), Per("angle", "row-pair", "real")
_UPDATE = StateUpdate(Alignment(), Euclidean(), Product((Diagonal(_DECAY, "row-pair"), Rotation(_ANGLE))), Step())


@final
@dataclass(frozen=True)
class Modes(Block):
    """y = W_out gelu(c Re(C h) + D x): complex modes h, of which a row holds the real or the imaginary part.

    The value of a token is B x, as long for every mode as the discretisation makes it, key and query are the number
    one, and C is behind the read; rates are parameters, of no token. A complex matrix has its real rows first.

    spectrum: "hippo", A = -exp(a) + i b with a step dt of every mode, e^(dt A) and (e^(dt A) - 1) / A by zero-order
    hold, c = 2, at first the eigenvalues of HiPPO-N for every head, whose eigenvectors B and C are given in; or "ring",
    e^(-exp(a) + i exp(b)) and exp(g), c = 1, at first uniform on a ring, g = log sqrt(1 - |.|^2).
    dt_min, dt_max: dt is log-uniform between them at first.  r_min, r_max: of the ring.
    """

    spectrum: Literal["hippo", "ring"] = "hippo"
    dt_min: float = 1e-3
    dt_max: float = 0.1
    r_min: float = 0.9
    r_max: float = 0.999

    def __post_init__(self) -> None:
        if self.spectrum not in ("hippo", "ring"):
            raise IllegalUpdate(f"Modes: spectrum {self.spectrum!r} is not hippo or ring")
        if not 0 < self.dt_min <= self.dt_max or not 0 <= self.r_min < self.r_max < 1:
            raise IllegalUpdate(f"Modes: 0 < dt_min <= dt_max and 0 <= r_min < r_max < 1, got {self}")

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        if vectors - {"k", "v", "q"} or set(demands) != {_DECAY, _ANGLE} or sizes.d_k != 1:
            raise IllegalUpdate(
                "Modes supplies values, keys of one entry, unit gates 'decay' and angles 'angle' of pairs of rows alone"
            )
        return _ModesModule(self, sizes, factory)


@final
class _ModesModule(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, block: Modes, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.block, self.sizes = block, sizes
        modes, width = (sizes.heads, sizes.d_v // 2), sizes.heads * sizes.d_v
        self.log_rate = nn.Parameter(torch.empty(modes, **factory))
        self.frequency = nn.Parameter(torch.empty(modes, **factory))
        self.log_size = nn.Parameter(torch.empty(modes, **factory))  # of a step, or of what is written
        self.write = nn.Parameter(torch.empty(width, sizes.d_model, **factory))
        self.read = nn.Parameter(torch.empty(sizes.d_model, width, **factory))
        self.skip = nn.Parameter(torch.empty(sizes.d_model, **factory))
        self.o_proj = nn.Linear(sizes.d_model, sizes.d_model, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        s, block = self.sizes, self.block
        self.skip.normal_()
        if block.spectrum == "ring":
            square = torch.empty_like(self.log_rate, dtype=torch.float64).uniform_(block.r_min**2, block.r_max**2)
            self.log_rate.copy_(torch.log(-0.5 * square.log()))
            self.frequency.copy_(torch.empty_like(square).uniform_(1e-3, 1.0).mul_(2 * math.pi).log())
            self.log_size.copy_(0.5 * torch.log1p(-square))
            self.write.normal_(std=(2 * s.d_model) ** -0.5)
            self.read.normal_(std=(s.heads * s.d_v // 2) ** -0.5)
            return
        self.log_size.uniform_(math.log(block.dt_min), math.log(block.dt_max))
        turn, vectors = _hippo(s.d_v)
        self.log_rate.fill_(math.log(0.5))
        self.frequency.copy_(turn.expand_as(self.frequency))
        real = torch.randn(s.heads, s.d_v, s.d_model, dtype=torch.float64) * s.d_model**-0.5
        self.write.copy_(_rows(vectors.mH @ real.to(vectors.dtype)).flatten(0, 1))
        out = torch.randn(s.heads, s.d_v, s.d_model, dtype=torch.float64) * (s.heads * s.d_v) ** -0.5
        self.read.copy_(_rows(vectors.mT @ out.to(vectors.dtype)).flatten(0, 1).T)

    def _spectrum(self, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log decays and angles of the modes, and by which complex number what they are given is multiplied."""
        rate, turn, size = torch.exp(self.log_rate.to(wide)), self.frequency.to(wide), torch.exp(self.log_size.to(wide))
        if self.block.spectrum == "ring":
            return -rate, torch.exp(turn), size, torch.zeros_like(size)
        decay, angle = -size * rate, size * turn
        # e^(dt A) - 1 without the digits that small steps would lose, over A = -rate + i turn
        a = torch.expm1(decay) * torch.cos(angle) - 2 * torch.sin(angle / 2) ** 2
        b = torch.exp(decay) * torch.sin(angle)
        square = rate * rate + turn * turn
        return decay, angle, (b * turn - a * rate) / square, -(b * rate + a * turn) / square

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        s, wide = self.sizes, torch.promote_types(x.dtype, torch.float32)
        decay, angle, real, imaginary = self._spectrum(wide)
        given = linear(x, self.write.to(x.dtype)).unflatten(-1, (s.heads, s.d_v)).to(wide)
        u, w = given.chunk(2, -1)
        v = torch.cat((real * u - imaginary * w, imaginary * u + real * w), -1).to(x.dtype)
        one = x.new_ones(1).expand(*x.shape[:2], s.heads, 1)
        lead = (*x.shape[:2], *decay.shape)
        return {"q": one, "k": one, "v": v, "decay": decay.expand(lead), "angle": angle.expand(lead)}, (), x

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        """Re(C h) of a mode u + i w is C_r u - C_i w."""
        s = self.sizes
        u, w = y.chunk(2, -1)
        factor = 2.0 if self.block.spectrum == "hippo" else 1.0
        read = linear(torch.cat((u, -w), -1).flatten(-2) * factor, self.read.to(y.dtype))
        assert read.shape[-1] == s.d_model
        out: Tensor = self.o_proj(gelu(read + self.skip.to(kept.dtype) * kept))
        return out


def _hippo(n: int) -> tuple[Tensor, Tensor]:
    """The imaginary parts of those eigenvalues of HiPPO-N (n x n), -1/2 + i b, with b > 0, and their eigenvectors."""
    p = (torch.arange(n, dtype=torch.float64) + 0.5).sqrt()
    skew = p[:, None] * p
    skew = skew.triu(1) - skew.tril(-1)
    values, vectors = torch.linalg.eigh(-1j * skew.to(torch.complex128))
    return values[n - n // 2 :], vectors[:, n - n // 2 :]


def _rows(z: Tensor) -> Tensor:
    """The real rows of a complex matrix, then its imaginary ones."""
    return torch.cat((z.real, z.imag), -2)


@final
class S5(SequenceLayer):
    """h_t = e^(dt A) h_{t-1} + (e^(dt A) - 1) A^-1 B x_t,  y_t = 2 Re(C h_t) + D x_t: one state for all channels.

    A mode is a pair of rows that turns, under one gate for both; A starts as the eigenvalues of HiPPO-N, one block for
    every head, so that B and C are a head's share of the state's.
    """

    name = "s5"
    paper = "Simplified State Space Layers for Sequence Modeling (Smith, Warrington and Linderman 2023)"
    equation = "eqs. 3, 5 and 6 (diagonal, zero-order hold), conjugate symmetry; HiPPO-N blocks of section 4.3"
    differs = "a linear map behind the activation, there a gated one; a state as wide as the model"
    bibtex = """@inproceedings{smith2023simplified,
  title={Simplified State Space Layers for Sequence Modeling},
  author={Smith, Jimmy T. H. and Warrington, Andrew and Linderman, Scott W.},
  booktitle={International Conference on Learning Representations},
  year={2023},
  eprint={2208.04933},
  archivePrefix={arXiv}
}"""
    update = _UPDATE
    block = Modes()

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """Half as many complex modes as the model is wide."""
        return 1, 2 * max(1, d_model // heads // 2)


@final
class LRU(SequenceLayer):
    """h_t = e^(-exp(a) + i exp(b)) h_{t-1} + exp(g) B x_t,  y_t = Re(C h_t) + D x_t: as many complex modes as channels.

    The same tuple as S5 with other parameters: modes on a ring, and a size of what is written that is learned.
    """

    name = "lru"
    paper = "Resurrecting Recurrent Neural Networks for Long Sequences (Orvieto et al. 2023)"
    equation = "eqs. 5 to 8: lambda = exp(-exp(nu) + i exp(theta)) (stable exponential), normalised by gamma"
    differs = "ring 0.9 to 0.999 (the paper's depends on the task), all phases; a linear map behind the activation"
    bibtex = """@inproceedings{orvieto2023resurrecting,
  title={Resurrecting Recurrent Neural Networks for Long Sequences},
  author={Orvieto, Antonio and Smith, Samuel L. and Gu, Albert and Fernando, Anushan and Gulcehre, Caglar and
          Pascanu, Razvan and De, Soham},
  booktitle={International Conference on Machine Learning},
  year={2023},
  eprint={2303.06349},
  archivePrefix={arXiv}
}"""
    update = _UPDATE
    block = Modes(spectrum="ring")

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """As many complex modes as the model is wide."""
        return 1, 2 * (d_model // heads)


__all__ = ["LRU", "S5", "Modes"]
