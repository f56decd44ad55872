"""RWKV-7: a diagonal plus low-rank transition whose removal key, replacement key and rate are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, linear

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Euclidean
from axes.core.monoids import DPLR
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.kernels.blocks.plan import Numbers, Plan, no_leave
from axes.routes.frame import Frame
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import SMALL, Block, BlockModule, behind, l2_normalise, last
from axes.sequence.charts import Factory, Sizes
from axes.sequence.fused import Columns, Kernels, module, parameter

_SUPPLIED = frozenset({"k", "v", "q", "a", "b"})
_MIXED = ("r", "w", "k", "v", "a", "g")
_SLOWEST = -math.exp(-0.5)  # of log decays
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
        return linear(self.bent(linear(x, self.down)), self.up, self.bias)

    def bent(self, hidden: Tensor) -> Tensor:
        """f(hidden)."""
        if self.activation is None:
            return hidden
        return torch.tanh(hidden) if self.activation == "tanh" else torch.sigmoid(hidden)


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

    def kernels(self, frame: Frame | None) -> Kernels:
        return _TimeMixing(self.block, self.sizes)

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
        decay = _SLOWEST * torch.sigmoid(self.decay(seen["w"]).to(wide))
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


@final
class _TimeMixing(Kernels):
    """The block by its kernels: mixtures and their products, the charts of decay and of keys, the way out."""

    def __init__(self, block: RWKV7Block, sizes: Sizes) -> None:
        self.block, self.sizes = block, sizes
        self.refusal = no_leave(sizes.heads, max(sizes.d_k, sizes.d_v), whole=False)
        ends = dict.fromkeys(("r_proj", "k_proj", "v_proj"), nn.Linear)
        self.taken = {**ends, **dict.fromkeys(("decay", "rate", "gate"), LowRank)}
        keys = sizes.heads * sizes.d_k
        self.plan = Plan((), (Numbers(keys, "sigmoid", _SLOWEST, biased=True),), keys)

    def enter(
        self,
        around: BlockModule,
        x: Tensor,
        tails: tuple[Tensor, ...],
        packing: Packing | None,
        columns: Columns | None = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        from axes.kernels.blocks.enter import enter
        from axes.kernels.blocks.removal import removal
        from axes.kernels.blocks.shift import mixed_products

        at, s = partial(parameter, around), self.sizes
        cu, tail = None if packing is None else packing.offsets, tails[0] if tails else None
        sources = ("r_proj.weight", "decay.down", "k_proj.weight", "v_proj.weight", "rate.down", "gate.down")
        mix = torch.stack([at(f"mix.{name}") for name in _MIXED])
        q, decay, k, v, rate, gate = mixed_products(x, mix, [at(name) for name in sources], tail, cu)
        risen = {}
        for name, hidden in (("decay", decay), ("rate", rate), ("gate", gate)):
            risen[name] = linear(module(around, name).bent(hidden), at(f"{name}.up").to(x.dtype))
        (decay,), _ = enter(risen["decay"], self.plan, [at("decay.bias")])
        q, k, v, decay = (
            z.unflatten(-1, (s.heads, n)) for z, n in ((q, s.d_k), (k, s.d_k), (v, s.d_v), (decay, s.d_k))
        )
        k, a, b = removal(k, risen["rate"], at("removal"), at("replacement"), at("rate.bias"), eps=SMALL)
        signal = {"q": q, "k": k, "v": v, "decay": decay, "a": a, "b": b}
        return signal, (_ends(x, tail, packing),), (q, k, v, risen["gate"])

    def leave(self, around: BlockModule, y: Tensor, kept: Any) -> Tensor:
        from axes.kernels.blocks.bonus import leave_bonus

        own = [parameter(around, name) for name in ("bonus", "norm_weight", "norm_bias")]
        u = leave_bonus(y.to(kept[0].dtype), *kept, *own, eps=self.sizes.d_v * self.block.norm_eps)
        out: Tensor = module(around, "o_proj")(u)
        return out

    def saved(self, around: BlockModule) -> dict[str, int]:
        s = self.sizes
        keys, values = s.heads * s.d_k, s.heads * s.d_v
        ranks = {f"bottleneck of {name}": module(around, name).down.shape[0] for name in ("decay", "rate", "gate")}
        return {
            "input": s.d_model, **ranks, "keys before removal": keys, "logits of decay": keys,
            "logits of the rate": keys, "gate": values, "reads": values, "input of the out-projection": values,
        }  # fmt: skip


def _ends(x: Tensor, tail: Tensor | None, packing: Packing | None) -> Tensor:
    """The last token of every sequence (N, 1, D); where there is none, the one before."""
    if packing is None:
        return x[:, -1:].clone()
    ends = packing.offsets[1:]
    found = x[0, (ends - 1).clamp_min(0)][:, None]
    before = torch.zeros_like(found) if tail is None else tail.to(x.dtype)
    return torch.where((ends > packing.offsets[:-1])[:, None, None], found, before)


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
