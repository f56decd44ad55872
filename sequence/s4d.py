"""Diagonal state spaces with complex eigenvalues that are the same for all tokens: gates of pairs beside rotations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal, Product, Rotation
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block, BlockModule
from axes.sequence.charts import Factory, Sizes

_DEMANDS = {("decay", "pair", "unit"), ("angle", "pair", "real")}


@final
@dataclass(frozen=True)
class Diagonalised(Block):
    """S4D's layer: y = W_out gelu(o + D x), the value is x itself; keys and queries are parameters, of no token.

    For the modes of a head, A = -exp(a) + i b and its step dt: log decay = -dt exp(a), angle = dt b,
    key = (e^(dt A) - 1) / A (zero-order hold, B = 1), query = 2 conj(C), as pairs (real part, imaginary part).
    A = -1/2 + i pi n at first (S4D-Lin).  dt_min, dt_max: dt is log-uniform between them at first.
    """

    dt_min: float = 1e-3
    dt_max: float = 0.1

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        if vectors - {"k", "v", "q"} or {(p.name, p.shape, p.domain) for p in demands} != _DEMANDS:
            raise IllegalUpdate("Diagonalised supplies k, v, q, unit gates 'decay' and angles 'angle' of pairs alone")
        if sizes.d_k % 2 or sizes.heads * sizes.d_v != sizes.d_model:
            raise ShapeError(
                "Diagonalised: modes are pairs, values channels of the input: d_k even and heads * d_v = d_model, got "
                f"d_k={sizes.d_k}, heads={sizes.heads}, d_v={sizes.d_v}, d_model={sizes.d_model}"
            )
        return _DiagonalisedModule(self, sizes, factory)


@final
class _DiagonalisedModule(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, block: Diagonalised, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.block, self.sizes = block, sizes
        modes = (sizes.heads, sizes.d_k // 2)
        self.log_dt = nn.Parameter(torch.empty(sizes.heads, 1, **factory))
        self.log_rate = nn.Parameter(torch.empty(modes, **factory))
        self.frequency = nn.Parameter(torch.empty(modes, **factory))
        self.read = nn.Parameter(torch.empty(sizes.heads, sizes.d_k, **factory))
        self.skip = nn.Parameter(torch.empty(sizes.d_model, **factory))
        self.o_proj = nn.Linear(sizes.d_model, sizes.d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.log_dt.uniform_(math.log(self.block.dt_min), math.log(self.block.dt_max))
            self.log_rate.fill_(math.log(0.5))
            modes = torch.arange(self.frequency.shape[-1], dtype=torch.float64)
            self.frequency.copy_((math.pi * modes).expand_as(self.frequency))
            self.read.normal_(std=math.sqrt(0.5))
            self.skip.normal_()

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        s, wide = self.sizes, torch.promote_types(x.dtype, torch.float32)
        dt, rate, turn = torch.exp(self.log_dt.to(wide)), torch.exp(self.log_rate.to(wide)), self.frequency.to(wide)
        decay, angle = -dt * rate, dt * turn
        # e^(dt A) - 1 without the digits that small steps would lose, over A = -rate + i turn
        a = torch.expm1(decay) * torch.cos(angle) - 2 * torch.sin(angle / 2) ** 2
        b = torch.exp(decay) * torch.sin(angle)
        size = rate * rate + turn * turn
        key = torch.cat(((b * turn - a * rate) / size, -(b * rate + a * turn) / size), -1)
        real, imaginary = (2 * self.read.to(wide)).chunk(2, -1)
        query = torch.cat((real, -imaginary), -1)
        given = {"k": key.to(x.dtype), "q": query.to(x.dtype), "decay": decay, "angle": angle}
        signal = {name: z.expand(*x.shape[:2], *z.shape) for name, z in given.items()}
        return {**signal, "v": x.unflatten(-1, (s.heads, s.d_v))}, (), x

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        out: Tensor = self.o_proj(gelu(y.flatten(-2) + self.skip.to(kept.dtype) * kept))
        return out


@final
class S4D(SequenceLayer):
    """S_t = S_{t-1} Diag(e^(dt A)) + x_t B^T,  y_t = 2 Re(C S_t^T) + D x_t: complex A, B, C that no token changes.

    A complex number is a gate of a pair and its angle. 32 modes a head; channels of a head share A, dt and C, so that
    heads=d_model has one system for every channel.
    """

    name = "s4d"
    paper = "On the Parameterization and Initialization of Diagonal State Space Models (Gu, Gupta, Goel and Re 2022)"
    equation = "eqs. 2, 4 and 7: x' = A x + B u, y = C x with diagonal A, zero-order hold; S4D-Lin of section 4"
    differs = (
        "channels of a head share a system (heads=d_model for one each, as in the paper); a linear map behind the "
        "activation, there a gated one"
    )
    bibtex = """@inproceedings{gu2022parameterization,
  title={On the Parameterization and Initialization of Diagonal State Space Models},
  author={Gu, Albert and Gupta, Ankit and Goel, Karan and R{\\'e}, Christopher},
  booktitle={Advances in Neural Information Processing Systems},
  year={2022},
  eprint={2206.11893},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(),
        Euclidean(),
        Product((Diagonal(Per("decay", "pair", "unit"), "pair"), Rotation(Per("angle", "pair", "real")))),
        Step(),
    )
    block = Diagonalised()

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """32 complex modes."""
        return 64, d_model // heads


__all__ = ["Diagonalised", "S4D"]
