"""RWKV-6 (Finch): gated linear attention whose current token is read with a weight of its own, the bonus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, silu

from axes.core.algorithms import Read, Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import Diagonal
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block, BlockModule, behind, last
from axes.sequence.charts import Factory, Sizes

_MIXED = ("r", "w", "k", "v", "g")
_DEMANDS = {("decay", "key", "unit"), ("bonus", "key", "real")}


@final
@dataclass(frozen=True)
class RWKV6Block(Block):
    """RWKV-6's time mixing: data-dependent token shift, low-rank decay, constant bonus, per-head group norm, gate.

    With d = x_{t-1} - x_t and s = x + d * mu, for every c of r, w, k, v, g:
        x_c = x + d * (mu_c + tanh(s A_c) B_c),
        q = W_r x_r,  k = W_k x_k,  v = W_v x_v,  log decay = -exp(lambda + tanh(x_w A) B),  bonus = u,
        y = W_o (groupnorm(reads) * silu(W_g x_g)).
    rank: of the shifts' maps.  decay_rank: of the decay's.
    """

    rank: int = 32
    decay_rank: int = 64
    norm_eps: float = 1e-5

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        if vectors - {"k", "v", "q"} or {(p.name, p.shape, p.domain) for p in demands} != _DEMANDS:
            raise IllegalUpdate(
                "RWKV6Block supplies k, v, q, a key-side unit gate 'decay' and a real key rate 'bonus', nothing else"
            )
        return _RWKV6Module(self, sizes, factory)


@final
class _RWKV6Module(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, block: RWKV6Block, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        width, keys, values = sizes.d_model, sizes.heads * sizes.d_k, sizes.heads * sizes.d_v
        self.block, self.sizes = block, sizes

        def linear(width: int, out: int) -> nn.Linear:
            return nn.Linear(width, out, bias=False, **factory)

        self.shift = nn.Parameter(torch.empty(width, **factory))
        self.mix = nn.ParameterDict({name: nn.Parameter(torch.empty(width, **factory)) for name in _MIXED})
        self.mix_down = linear(width, len(_MIXED) * block.rank)
        self.mix_up = nn.Parameter(torch.empty(len(_MIXED), width, block.rank, **factory))
        self.r_proj, self.k_proj = linear(width, keys), linear(width, keys)
        self.v_proj, self.g_proj, self.o_proj = linear(width, values), linear(width, values), linear(values, width)
        self.decay_down, self.decay_up = linear(width, block.decay_rank), linear(block.decay_rank, keys)
        self.decay_bias = nn.Parameter(torch.empty(keys, **factory))
        self.bonus = nn.Parameter(torch.empty(sizes.heads, sizes.d_k, **factory))
        self.norm_weight = nn.Parameter(torch.empty(values, **factory))
        self.norm_bias = nn.Parameter(torch.empty(values, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            channel = torch.arange(self.sizes.d_model, dtype=torch.float64) / self.sizes.d_model
            for mu in (self.shift, *self.mix.values()):
                mu.copy_(1 - channel)
            keys = torch.linspace(0, 1, self.decay_bias.shape[0], dtype=torch.float64)
            self.decay_bias.copy_(-6 + 5 * keys**0.7)  # slow channels first
            zigzag = (torch.arange(keys.shape[0], device=keys.device) + 1) % 3 - 1
            self.bonus.copy_((1 - keys + 0.1 * zigzag).view_as(self.bonus))
            self.mix_up.uniform_(-0.01, 0.01)
            for down in (self.mix_down, self.decay_down):
                nn.init.normal_(down.weight, std=1e-2)
            self.decay_up.weight.uniform_(-0.01, 0.01)
            self.norm_weight.fill_(1.0)
            self.norm_bias.zero_()

    def tails(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        return (like.new_zeros(batch, 1, self.sizes.d_model),)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        s = self.sizes
        full = behind(x, tails[0], packing)
        change = (full[:, :-1] if packing is None else full[:, packing.places(1) - 1]) - x
        hidden = torch.tanh(self.mix_down(x + change * self.shift.to(x.dtype))).unflatten(-1, (len(_MIXED), -1))
        moved = torch.einsum("btnr,ncr->nbtc", hidden, self.mix_up.to(hidden.dtype))
        mu = (self.mix[name].to(x.dtype) for name in _MIXED)
        r, w, k, v, g = (x + change * (m + part) for m, part in zip(mu, moved, strict=True))
        lower = self.decay_up(torch.tanh(self.decay_down(w)))
        wide = torch.promote_types(lower.dtype, torch.float32)  # gates are cumulated over time
        decay = -torch.exp(lower.to(wide) + self.decay_bias)
        q, k, decay = (z.unflatten(-1, (s.heads, s.d_k)) for z in (self.r_proj(r), self.k_proj(k), decay))
        bonus = self.bonus.to(wide).expand(*x.shape[:2], s.heads, s.d_k)
        signal = {"q": q, "k": k, "v": self.v_proj(v).unflatten(-1, (s.heads, s.d_v)), "decay": decay, "bonus": bonus}
        return signal, (last(full, 1, packing),), self.g_proj(g)

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        s, wide = self.sizes, self.norm_weight.dtype
        flat = y.to(wide).flatten(0, 1).flatten(-2)  # (B T, H d_v)
        normed = group_norm(flat, s.heads, self.norm_weight, self.norm_bias, s.d_v * self.block.norm_eps)
        out: Tensor = self.o_proj(normed.unflatten(0, y.shape[:2]) * silu(kept))
        return out


@final
class RWKV6(SequenceLayer):
    """S_t = S_{t-1} Diag(w) + v k^T,  o_t = (S_{t-1} + v (u * k)^T) q: the state before the token, and the token by u.

    w = exp(-exp(d)) with d a low-rank map of the token, u a number for every key channel. The read point is the tuple's
    own field, as in Nesterov's momentum.
    """

    name = "rwkv6"
    paper = "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence (Peng et al. 2024)"
    equation = "section 4.2: wkv_t = diag(u) k_t^T v_t + S_{t-1}, S_t = diag(w_t) S_{t-1} + k_t^T v_t, transposed"
    differs = (
        "GroupNorm's eps is d_v 1e-5, as in RWKV-7 here (64e-5 in the released code at d_v = 64); shifts, decay and "
        "bonus start as in the released code's first layer, projections as torch's Linear"
    )
    bibtex = """@inproceedings{peng2024eagle,
  title={Eagle and Finch: {RWKV} with Matrix-Valued States and Dynamic Recurrence},
  author={Peng, Bo and Goldstein, Daniel and Anthony, Quentin and Albalak, Alon and Alcaide, Eric and
          Biderman, Stella and Cheah, Eugene and Du, Xingjian and Ferdinan, Teddy and Hou, Haowen and others},
  booktitle={Conference on Language Modeling},
  year={2024},
  eprint={2404.05892},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(
        Alignment(), Euclidean(), Diagonal("decay"), Step(read=Read(1.0, Per("bonus", "key", "real")))
    )
    block = RWKV6Block()
