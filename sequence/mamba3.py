"""Mamba-3: a state that turns by angles of the token, written to by both ends of an interval (the trapezoidal rule)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import Product, Rotation, Scalar, rotate
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block, BlockModule, behind, last
from axes.sequence.by_hand import normalised
from axes.sequence.charts import Factory, Sizes, steps_at_first

_DEMANDS = {("decay", "scalar", "unit"), ("angle", "pair", "real"), ("write", "scalar", "positive")}


@final
@dataclass(frozen=True)
class Trapezoid(Block):
    """Mamba-3's block: [z, x, B, C] = W x, no convolution; B and C normed, with biases; y = W_out ((o + D x) silu(z)).

    With dt = softplus(W x + b), A = min(-softplus(W x), -floor) and s = sigmoid(W x), of every head:
        log decay = dt A,  angle = -pi dt tanh(W x),  write = ((1 - s) dt e^(dt A), s dt)
    of two pairs a token: the last token's, turned along, and its own. A tuple of 2 R writes and R reads has R keys and
    queries a token, each with a bias, and every channel of x, z and y factors for each of them (MIMO):
        values x * e_r,  y = sum_r ((o_r + D x * e_r) silu(z * f_r)) * g_r.
    turning: the share of the pairs of a key that turn.  floor: of -A.  dt_min, dt_max: of dt at first.
    """

    several: ClassVar[bool] = True
    asks_several: ClassVar[bool] = True

    turning: float = 0.5
    floor: float = 1e-4
    dt_min: float = 1e-3
    dt_max: float = 0.1
    norm_eps: float = 1e-5

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        known = {(p.name, p.shape, p.domain) for p in demands} == _DEMANDS and not vectors - {"k", "v", "q"}
        if not known or sizes.writes != 2 * sizes.reads:
            raise IllegalUpdate(
                "Trapezoid supplies two pairs a token for every read, a unit gate 'decay', angles 'angle' of pairs and "
                "rates 'write'"
            )
        if sizes.d_k % 2 or not 0 < self.turning <= 1:
            raise ShapeError(f"Trapezoid: a share in (0, 1] of the pairs of an even d_k turns, got {sizes.d_k}")
        return _TrapezoidModule(self, sizes, factory)


@final
class _TrapezoidModule(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, block: Trapezoid, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        self.block, self.sizes, self.inner = block, sizes, sizes.heads * sizes.d_v
        self.pairs = max(1, int(block.turning * sizes.d_k) // 2)

        def linear(out: int) -> nn.Linear:
            return nn.Linear(sizes.d_model, out, bias=False, **factory)

        rank = self.rank = sizes.reads
        each = (sizes.heads, sizes.d_k) if rank == 1 else (sizes.heads, rank, sizes.d_k)
        self.zx_proj, self.kq_proj = linear(2 * self.inner), linear(2 * rank * sizes.d_k)
        self.rates_proj, self.angle_proj = linear(3 * sizes.heads), linear(self.pairs)
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads, **factory))
        self.k_norm = nn.RMSNorm(sizes.d_k, eps=block.norm_eps, **factory)
        self.q_norm = nn.RMSNorm(sizes.d_k, eps=block.norm_eps, **factory)
        self.k_bias = nn.Parameter(torch.empty(each, **factory))
        self.q_bias = nn.Parameter(torch.empty(each, **factory))
        factors = (sizes.heads, rank, sizes.d_v)
        self.v_factor, self.z_factor, self.o_factor = (
            nn.Parameter(torch.empty(factors, **factory)) if rank > 1 else None for _ in range(3)
        )
        self.skip = nn.Parameter(torch.empty(sizes.heads, 1, **factory))
        self.out_proj = nn.Linear(self.inner, sizes.d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        steps_at_first(self.dt_bias, self.block.dt_min, self.block.dt_max)
        for ones in (self.k_bias, self.q_bias, self.skip):
            nn.init.ones_(ones)
        for factor, start in ((self.v_factor, 1 / self.rank), (self.z_factor, 1.0), (self.o_factor, 1 / self.rank)):
            if factor is not None:
                nn.init.constant_(factor, start)

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        keys = self.sizes.heads * self.rank * self.sizes.d_k
        return like.new_zeros(batch, 1, keys), like.new_zeros(batch, 1, self.inner)

    def _vector(self, x: Tensor, norm: nn.RMSNorm, bias: Tensor) -> Tensor:
        """(B, T, [R] d_k) -> (B, T, H, [R,] d_k): normalised, the same for every head but for its bias."""
        x = x if self.rank == 1 else x.unflatten(-1, (self.rank, -1))
        wide = normalised(x.to(norm.weight.dtype), 1.0 / x.shape[-1], self.block.norm_eps) * norm.weight
        return (wide.unsqueeze(2) + bias).to(x.dtype)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        s, block = self.sizes, self.block
        z, inner = self.zx_proj(x).chunk(2, -1)
        raw_k, raw_q = self.kq_proj(x).chunk(2, -1)
        k, q = self._vector(raw_k, self.k_norm, self.k_bias), self._vector(raw_q, self.q_norm, self.q_bias)
        wide = torch.promote_types(x.dtype, torch.float32)  # gates and angles are cumulated over time
        step, rate, share = self.rates_proj(x).to(wide).chunk(3, -1)
        dt = softplus(step + self.dt_bias)
        decay = -softplus(rate).clamp_min(block.floor) * dt
        share = torch.sigmoid(share)
        turn = -math.pi * dt[..., None] * torch.tanh(self.angle_proj(x).to(wide))[..., None, :]
        angle = torch.nn.functional.pad(turn, (0, s.d_k // 2 - self.pairs))
        before_k, k_tail = self._before(k.flatten(2), tails[0], packing)
        before_v, v_tail = self._before(inner, tails[1], packing)
        each = (s.heads, self.rank, s.d_k)
        before_k = rotate(before_k.unflatten(-1, each).to(wide), angle[..., None, :]).to(k.dtype)
        v, earlier = (self._values(y) for y in (inner, before_v))
        rates = torch.stack(((1 - share) * dt * torch.exp(decay), share * dt), -1)
        signal = {
            "q": q,
            "k": torch.cat((before_k, k.unsqueeze(-2) if self.rank == 1 else k), -2),
            "v": torch.cat((earlier, v), -2),
            "decay": decay,
            "angle": angle,
            "write": rates.repeat_interleave(self.rank, -1),
        }
        return signal, (k_tail, v_tail), (v, z)

    def _values(self, x: Tensor) -> Tensor:
        """(B, T, H d_v) -> (B, T, H, R, d_v)."""
        v = x.unflatten(-1, (self.sizes.heads, 1, self.sizes.d_v))
        return v if self.v_factor is None else v * self.v_factor.to(v.dtype)

    def _before(self, x: Tensor, tail: Tensor, packing: Packing | None) -> tuple[Tensor, Tensor]:
        """What the token before had, and the new tail."""
        full = behind(x, tail, packing)
        shifted = full[:, :-1] if packing is None else full[:, packing.places(1) - 1]
        return shifted, last(full, 1, packing)

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        v, z = kept
        if self.o_factor is None or self.z_factor is None:
            y = (y + self.skip.to(v.dtype) * v.squeeze(-2)).flatten(-2) * silu(z)
        else:
            gate = silu(z.unflatten(-1, (self.sizes.heads, 1, -1)) * self.z_factor.to(z.dtype))
            read = (y + self.skip.to(v.dtype)[..., None] * v) * gate * self.o_factor.to(y.dtype)
            y = read.sum(-2).flatten(-2)
        out: Tensor = self.out_proj(y)
        return out


@final
class Mamba3(SequenceLayer):
    """S_t = a S_{t-1} R(angle) + (1 - s) dt a v_{t-1} (k_{t-1} R)^T + s dt v_t k_t^T,  o_t = S_t q_t, a = e^(dt A).

    The integral over an interval by both of its ends, weighted by s, where Mamba-2 takes the last one; the complex part
    of A as angles of the token; keys of 128 entries with a norm and a bias in the place of a convolution.
    """

    name = "mamba3"
    paper = "Mamba-3: Improved Sequence Modeling using State Space Principles (Lahoti et al. 2026)"
    equation = "generalised trapezoidal rule, h_t = alpha h_{t-1} + beta B_{t-1} x_{t-1} + gamma B_t x_t, turned"
    differs = (
        "one input and one output (SISO); the entries of a pair stand half a key apart, which permutes rows of W; the "
        "last pair waits in the layer's state and is written with its own rate as a second write of the token"
    )
    bibtex = """@inproceedings{lahoti2026mamba3,
  title={{Mamba}-3: Improved Sequence Modeling using State Space Principles},
  author={Lahoti, Aakash and Li, Kevin Y. and Chen, Berlin and Wang, Caitlin and Bick, Aviv and Kolter, J. Zico and
          Dao, Tri and Gu, Albert},
  booktitle={International Conference on Learning Representations},
  year={2026}
}"""
    update = StateUpdate(
        Alignment(),
        Euclidean(),
        Product((Scalar("decay"), Rotation(Per("angle", "pair", "real")))),
        Step(Per("write"), writes=2),
    )
    block = Trapezoid()

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """State size 128, inner width twice the model's."""
        return 128, 2 * d_model // heads


@final
class Mamba3MIMO(SequenceLayer):
    """S_t = a S_{t-1} R(angle) + sum_r of Mamba-3's two writes at (k_r, v_r),  o_tr = S_t q_tr,  r = 1 .. 4.

    Four keys, values and queries of a token share one state: as many outputs for the same bytes of it. Values are the
    token's own times factors of every channel, and so are gates and what is added up of the outputs.
    """

    name = "mamba3-mimo"
    paper = Mamba3.paper
    equation = "multi-input, multi-output: H_t = a H_{t-1} + sum of B_t X_t^T by the trapezoidal rule, Y_t = H_t C_t"
    differs = (
        "rank 4 as released (`Step(writes=2 * n, reads=n)` for others); the last token's pairs wait in the layer's "
        "state and are written as further writes of the token; no output norm"
    )
    bibtex = Mamba3.bibtex
    update = StateUpdate(
        Alignment(),
        Euclidean(),
        Product((Scalar("decay"), Rotation(Per("angle", "pair", "real")))),
        Step(Per("write"), writes=8, reads=4),
    )
    block = Trapezoid()
    widths = Mamba3.widths


__all__ = ["Mamba3", "Mamba3MIMO", "Trapezoid"]
