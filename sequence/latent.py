"""Latent attention: all heads read one list of narrow latents, which their keys and values are linear in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.geometry import Entropic
from axes.core.memory import List
from axes.core.monoids import Rotation
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError
from axes.routes.packed import Packing
from axes.sequence.base import SequenceLayer
from axes.sequence.blocks import Block, BlockModule, build_charts, in_groups
from axes.sequence.by_hand import normalised
from axes.sequence.charts import Chart, Factory, Sizes

_ANGLE = Per("angle", "pair", "real")


@final
@dataclass(frozen=True)
class Latent(Block):
    """One list for all heads: values are latents c_t = rms(W_c x) of width d_v, keys are c_t beside d_k - d_v entries
    that turn, r_t = W_r x. Heads of width w have keys U_h c and values V_h c, which nobody writes down:

        q_t . k_i = (U_h^T q_ht) . c_i + (R^t q'_ht) . (R^i r_i),    o_ht = V_h sum_i p_i c_i.

    width: w of a head; None: d_model / heads.  query_rank: of queries, normalised in the middle; None: one projection.
    base: of the angles of what turns.  charts: (rate name, chart) pairs for gates of pairs.
    """

    queries: ClassVar[Literal["all"]] = "all"

    width: int | None = None
    query_rank: int | None = None
    base: float = 10000.0
    charts: tuple[tuple[str, Chart], ...] = ()
    norm_eps: float = 1e-6

    def build(self, sizes: Sizes, demands: tuple[Per, ...], vectors: frozenset[str], factory: Factory) -> BlockModule:
        if vectors - {"k", "v", "q"} or _ANGLE not in demands:
            raise IllegalUpdate("Latent supplies k, v, q, the angles Rotation(Per('angle', 'pair', 'real')) and gates")
        turning = sizes.d_k - sizes.d_v
        if turning < 2 or turning % 2 or sizes.d_v % 2:
            raise ShapeError(
                "Latent: a key is a latent, d_v entries, and pairs that turn: d_k - d_v must be even and at least 2, "
                f"and d_v even, got d_k={sizes.d_k} and d_v={sizes.d_v}"
            )
        return _LatentModule(self, sizes, tuple(p for p in demands if p != _ANGLE), factory)


@final
class _LatentModule(BlockModule):
    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix

    def __init__(self, block: Latent, sizes: Sizes, demands: tuple[Per, ...], factory: Factory) -> None:
        super().__init__()
        self.block, self.sizes, self.turning = block, sizes, sizes.d_k - sizes.d_v
        heads, latent = sizes.heads, sizes.d_v
        self.width = block.width or sizes.d_model // heads

        def linear(width: int, out: int) -> nn.Linear:
            return nn.Linear(width, out, bias=False, **factory)

        rank, self.q_down, self.q_norm = sizes.d_model, None, None
        if block.query_rank is not None:
            rank = block.query_rank
            self.q_down, self.q_norm = linear(sizes.d_model, rank), nn.RMSNorm(rank, eps=block.norm_eps, **factory)
        self.q_proj = linear(rank, heads * (self.width + self.turning))
        self.latent_proj = linear(sizes.d_model, latent)
        self.latent_norm = nn.RMSNorm(latent, eps=block.norm_eps, **factory)
        self.r_proj = linear(sizes.d_model, self.turning)
        self.key_up, self.value_up = linear(latent, heads * self.width), linear(latent, heads * self.width)
        self.charts = nn.ModuleDict(build_charts(dict(block.charts), demands, _one(sizes), factory))
        self.o_proj = linear(heads * self.width, sizes.d_model)

    def _rms(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        wide = x.to(norm.weight.dtype)
        return (normalised(wide, 1.0 / x.shape[-1], self.block.norm_eps) * norm.weight).to(x.dtype)

    def _paired(self, turning: Tensor, still: Tensor) -> Tensor:
        """Entries that turn and entries that stay, as pairs (j, j + d_k / 2) of which the first ones turn."""
        parts = (*turning.chunk(2, -1), *still.chunk(2, -1))
        return torch.cat((parts[0], parts[2], parts[1], parts[3]), -1)

    def enter(
        self, x: Tensor, tails: tuple[Tensor, ...], packing: Packing | None = None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Any]:
        s = self.sizes
        low = x if self.q_down is None or self.q_norm is None else self._rms(self.q_down(x), self.q_norm)
        own, turning = self.q_proj(low).unflatten(-1, (s.heads, -1)).split((self.width, self.turning), -1)
        up = self.key_up.weight.to(own.dtype).unflatten(0, (s.heads, self.width))
        seen = torch.einsum("bthw,hwr->bthr", own, up)
        latent = self._rms(self.latent_proj(x), self.latent_norm)[..., None, :]
        q = self._paired(turning, seen) * (s.d_k / (self.width + self.turning)) ** 0.5  # a list divides by sqrt(d_k)
        signal = {"q": q, "k": self._paired(self.r_proj(x)[..., None, :], latent), "v": latent}
        for chart in self.charts.values():
            signal.update(chart(x))
        signal = {name: in_groups(z, name, s.heads) for name, z in signal.items()}
        exponent = torch.arange(0, self.turning, 2, dtype=torch.float64, device=x.device) / self.turning
        still = exponent.new_zeros(s.d_v // 2)
        wide = torch.promote_types(x.dtype, torch.float32)
        signal["angle"] = torch.cat((self.block.base**-exponent, still)).to(wide)  # the same for all tokens
        return signal, (), None

    def leave(self, y: Tensor, kept: Any) -> Tensor:
        up = self.value_up.weight.to(y.dtype).unflatten(0, (self.sizes.heads, self.width))
        values = torch.einsum("bthr,hwr->bthw", y if self.sizes.heads == 1 else y.flatten(2, 3), up)
        out: Tensor = self.o_proj(values.flatten(-2))
        return out


def _one(sizes: Sizes) -> Sizes:
    """Of the one list: gates act on its pairs."""
    return Sizes(sizes.d_model, 1, sizes.d_k, sizes.d_v)


@final
class MLA(SequenceLayer):
    """o_h = V_h sum_i softmax_i((U_h^T q_h . c_i + q'_h . R^(t-i) r_i) / sqrt(w + w')) c_i: one list of latents c.

    c_i = rms(W_c x_i) has 4 times a head's width, r_i, which turns, half of it: what decoding reads of a token.
    """

    name = "mla"
    paper = "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model (DeepSeek-AI 2024)"
    equation = "eqs. 9-11 and 14-19, with W^UK absorbed into queries and W^UV into outputs (section 2.1.2)"
    differs = (
        "queries of one projection, as in the Lite model (`query_rank` compresses them, eqs. 12 and 13); latents stand "
        "in the list as keys and as values; what turns does so as in `rope`"
    )
    bibtex = """@misc{deepseek2024v2,
  title={{DeepSeek-V2}: A Strong, Economical, and Efficient Mixture-of-Experts Language Model},
  author={{DeepSeek-AI}},
  year={2024},
  eprint={2405.04434},
  archivePrefix={arXiv}
}"""
    update = StateUpdate(Alignment(), Entropic(), Rotation(_ANGLE), Step(), List())
    block = Latent()

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """Latents of 4 times a head's width, and half of it that turns."""
        width = d_model // heads
        return 4 * width + max(2, width // 4 * 2), 4 * width


__all__ = ["MLA", "Latent"]
