"""RWKV-7: a diagonal plus low-rank transition whose removal key, replacement key and rate are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import DPLR
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block, BlockModule, behind, l2_normalise, last
from axes.sequence.charts import Factory, Sizes

_SUPPLIED = frozenset({"k", "v", "q", "a", "b"})
_MIXED = ("r", "w", "k", "v", "a", "g")
# exponents of the first layer's mixing coefficients 1 - (channel / width)^e in the released code
_MIXING = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


@final
class LowRank(nn.Module):
    """W_2 f(W_1 x) + b with W_1 = 0 and W_2 orthogonal (gain 0.1) at first, so that it starts at its bias."""

    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, width: int, rank: int, out: int, activation: str | None, bias: bool, factory: Factory) -> None:
        super().__init__()
        self.activation = activation
        self.down = nn.Parameter(torch.empty(rank, width, **factory))
        self.up = nn.Parameter(torch.empty(out, rank, **factory))
        self.bias = nn.Parameter(torch.empty(out, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.down)
        with torch.no_grad():  # half precision has no QR factorisation
            self.up.copy_(nn.init.orthogonal_(torch.empty_like(self.up, dtype=torch.float32), gain=0.1))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.linear(x, self.down)
        if self.activation is not None:
            hidden = torch.tanh(hidden) if self.activation == "tanh" else torch.sigmoid(hidden)
        return torch.nn.functional.linear(hidden, self.up, self.bias)


@final
@dataclass(frozen=True)
class RWKV7Block(Block):
    """RWKV-7's time mixing: token shift, five low-rank gates, per-head group norm, current-token bonus, output gate.

    With x_c = x_t + mu_c (x_{t-1} - x_t) for every channel group c of r, w, k, v, a, g:
        q = W_r x_r,  log decay = -e^(-1/2) sigmoid(w(x_w)),  rate = sigmoid(a(x_a)),
        kappa = xi * W_k x_k normalised,  k = W_k x_k * (1 + alpha (rate - 1)),  v = W_v x_v,
        a = -kappa,  b = rate * kappa,
        y = W_o ((groupnorm(S q) + (q . rho k) v) * g(x_g)).
    """

    norm_eps: float = 1e-5

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        if vectors - _SUPPLIED or {(p.name, p.shape, p.domain) for p in demands} != {("decay", "key", "unit")}:
            raise IllegalUpdate("RWKV7Block supplies k, v, q, a, b and a key-side unit gate 'decay', nothing else")
        return _RWKV7Module(self, sizes, factory)


@final
class _RWKV7Module(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, block: RWKV7Block, sizes: Sizes, factory: Factory) -> None:
        super().__init__()
        width, keys, values = sizes.d_model, sizes.heads * sizes.d_k, sizes.heads * sizes.d_v
        self.block, self.sizes = block, sizes
        self.mix = nn.ParameterDict({name: nn.Parameter(torch.empty(width, **factory)) for name in _MIXED})
        self.r_proj = nn.Linear(width, keys, bias=False, **factory)
        self.k_proj = nn.Linear(width, keys, bias=False, **factory)
        self.v_proj = nn.Linear(width, values, bias=False, **factory)
        self.o_proj = nn.Linear(values, width, bias=False, **factory)
        self.decay = LowRank(width, _rank(2.5, width), keys, "tanh", True, factory)
        self.rate = LowRank(width, _rank(2.5, width), keys, None, True, factory)
        self.gate = LowRank(width, _rank(5.0, width), values, "sigmoid", False, factory)
        self.removal = nn.Parameter(torch.empty(keys, **factory))  # xi
        self.replacement = nn.Parameter(torch.empty(keys, **factory))  # alpha
        self.bonus = nn.Parameter(torch.empty(sizes.heads, sizes.d_k, **factory))  # rho
        self.norm_weight = nn.Parameter(torch.empty(values, **factory))
        self.norm_bias = nn.Parameter(torch.empty(values, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            channel = torch.arange(self.sizes.d_model, dtype=torch.float64) / self.sizes.d_model
            for name, mu in self.mix.items():
                mu.copy_(1 - channel ** _MIXING[name])
            assert self.decay.bias is not None
            keys = torch.linspace(0, 1, self.decay.bias.shape[0], dtype=torch.float64)
            self.decay.bias.copy_(-6.5 + 5 * keys**0.85)  # slow channels first
            self.removal.fill_(0.85)
            self.replacement.fill_(1.0)
            self.bonus.zero_()
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
        seen = {name: x + change * mu.to(x.dtype) for name, mu in self.mix.items()}
        q = self.r_proj(seen["r"])
        k = self.k_proj(seen["k"])
        v = self.v_proj(seen["v"])
        wide = torch.promote_types(k.dtype, torch.float32)  # gates are cumulated over time
        decay = -math.exp(-0.5) * torch.sigmoid(self.decay(seen["w"]).to(wide))
        rate = torch.sigmoid(self.rate(seen["a"]).to(wide))
        kappa = l2_normalise((k.to(wide) * self.removal).unflatten(-1, (s.heads, s.d_k)))
        k = k.to(wide) * (1 + self.replacement * (rate - 1))
        q, k, rate, decay = (z.unflatten(-1, (s.heads, s.d_k)) for z in (q, k, rate, decay))
        v = v.unflatten(-1, (s.heads, s.d_v))
        signal = {"q": q, "k": k, "v": v, "decay": decay, "a": -kappa, "b": rate * kappa}
        return signal, (last(full, 1, packing),), (self.gate(seen["g"]), (q * k * self.bonus).sum(-1, keepdim=True) * v)

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        gate, bonus = kept
        s, wide = self.sizes, self.norm_weight.dtype
        flat = y.to(wide).flatten(0, 1).flatten(-2)  # (B T, H d_v)
        normed = group_norm(flat, s.heads, self.norm_weight, self.norm_bias, s.d_v * self.block.norm_eps)
        read = normed.unflatten(0, y.shape[:2]) + bonus.to(wide).flatten(-2)
        out: Tensor = self.o_proj(read * gate)
        return out


def _rank(factor: float, width: int) -> int:
    """factor sqrt(width), a multiple of 32, as released."""
    return max(32, round(factor * math.sqrt(width) / 32) * 32)


@final
class RWKV7(SequenceLayer):
    """S_t = S_{t-1} (Diag(w) - kappa (a * kappa)^T) + v k^T: vector-valued decay and in-context learning rates.

    kappa is the unit removal key, a in (0, 1) the rate of every key channel, k the replacement key.
    """

    name = "rwkv7"
    paper = "RWKV-7 Goose with Expressive Dynamic State Evolution (Peng et al. 2025)"
    equation = "section 4: wkv_t = wkv_{t-1} (diag(w_t) - kappa_t^T (a_t * kappa_t)) + v_t^T k_t"
    differs = (
        "no value residual from the first layer (it crosses layers); mixing, decay and gates start as in the released "
        "code's first layer, projections as torch's Linear"
    )
    bibtex = """@misc{peng2025rwkv7,
  title={{RWKV}-7 "Goose" with Expressive Dynamic State Evolution},
  author={Peng, Bo and Zhang, Ruichong and Goldstein, Daniel and Alcaide, Eric and Du, Xingjian and Hou, Haowen and
          Lin, Jiaju and Liu, Jiaxing and Lu, Janna and Merrill, William and Song, Guangyu and Tan, Kaifeng and
          Utpala, Saiteja and Wilce, Nathan and Wind, Johan S. and Wu, Tianyi and Wuttke, Daniel and
          Zhou-Zheng, Christian},
  year={2025},
  eprint={2503.14456},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Euclidean(), DPLR("decay"), Step())
    block = RWKV7Block()
