"""The models of `axes bench training`, one size for all: ours, fla's own layers in a block, and torch's attention.

Each reads windows (B, T + 1) and returns its loss, as someone who picks the library for the whole model would write it:
with that library's layer, norm, gated network and cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes import catalogue
from axes.bench.peers import AttentionLayer, fla
from axes.models import Architecture, LanguageModel
from axes.models.language_model import RMSNorm, SwiGLU
from axes.optim import AdamW
from axes.tasks.configuration import DTYPES


@final
@dataclass(frozen=True)
class Size:
    """The model and what it reads in a step. streams: of mixers along depth that have several; dtype: as `axes train`
    names it, of those that compute under autocast."""

    layers: int = 12
    width: int = 768
    heads: int = 6
    vocabulary: int = 32000
    batch: int = 8
    tokens: int = 4096
    steps: int = 20
    streams: int = 4
    dtype: str = "bfloat16"

    @property
    def kept(self) -> torch.dtype:
        """Of the residual streams."""
        return DTYPES[self.dtype].streams


@final
class Ours(nn.Module):
    """`LanguageModel`, with a residual stream unless another mixer is named."""

    def __init__(self, size: Size, sequence: str, depth: str = "residual") -> None:
        super().__init__()
        given = Architecture(sequence, depth, size.layers, size.width, size.heads, size.streams, size.vocabulary)
        self.model = LanguageModel(given, stream_dtype=size.kept)

    def forward(self, windows: Tensor) -> Tensor:
        return self.model.loss(windows)


@final
class Torch(nn.Module):
    """Pre-norm blocks of flash SDPA and SwiGLU, and torch's cross-entropy of all logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding, self.kept = nn.Embedding(size.vocabulary, size.width), size.kept
        parts: list[nn.Module] = []
        for _ in range(size.layers):
            parts += [AttentionLayer(size.width, size.heads), SwiGLU(size.width)]
        self.parts = nn.ModuleList(parts)
        self.norms = nn.ModuleList(RMSNorm(size.width) for _ in parts)
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embedding(windows[:, :-1]).to(self.kept)
        for part, norm in zip(self.parts, self.norms, strict=True):
            x = x + part(norm(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), windows[:, 1:].flatten())


@final
class Fla(nn.Module):
    """flash-linear-attention's GatedDeltaNet, GatedMLP, RMSNorm (fused with the sums) and fused cross-entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        modules, layer = fla("fla.modules"), fla("fla.layers").GatedDeltaNet
        fused = fla("fla.modules.fused_linear_cross_entropy")
        width, head = size.width, size.width // size.heads
        self.embedding, self.kept = nn.Embedding(size.vocabulary, width), size.kept
        parts: list[nn.Module] = []
        for index in range(size.layers):
            mixing = layer(hidden_size=width, head_dim=head, num_heads=size.heads, expand_v=1.0, layer_idx=index)
            parts += [mixing, modules.GatedMLP(hidden_size=width, intermediate_size=SwiGLU(width).out.in_features)]
        self.parts = nn.ModuleList(parts)
        self.norms = nn.ModuleList(modules.RMSNorm(width) for _ in range(len(parts) + 1))
        self.head = nn.Linear(width, size.vocabulary, bias=False)
        self.criterion = fused.FusedLinearCrossEntropyLoss()

    def forward(self, windows: Tensor) -> Tensor:
        y, x = self.embedding(windows[:, :-1]).to(self.kept), None
        for part, norm in zip(self.parts, self.norms, strict=False):
            y, x = (norm(y), y) if x is None else norm(y, residual=x, prenorm=True)
            y = part(y)
            y = y[0] if isinstance(y, tuple) else y
        hidden = self.norms[-1](y, residual=x, prenorm=False)
        loss: Tensor = self.criterion(hidden, windows[:, 1:].contiguous(), self.head.weight)
        return loss


def _torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)


def _our_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)


KINDS = tuple(name for name, precision in DTYPES.items() if precision.autocast)
Made = tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]
CONTENDERS: dict[str, Callable[[Size], Made]] = {
    "axes": lambda size: (Ours(size, "gated-delta-net"), _our_adamw),
    "axes, softmax attention": lambda size: (Ours(size, "softmax-attention"), _our_adamw),
    "fla": lambda size: (Fla(size), _torch_adamw),
    "torch, flash SDPA": lambda size: (Torch(size), _torch_adamw),
}


def with_depth(names: tuple[str, ...]) -> dict[str, Callable[[Size], Made]]:
    """Our first model with these mixers in the place of its residual stream."""

    def made(name: str) -> Callable[[Size], Made]:
        return lambda size: (Ours(size, "gated-delta-net", name), _our_adamw)

    return {f"axes, {(found := catalogue.get(name, 'depth').name)}": made(found) for name in names}


def products(model: nn.Module, size: Size) -> float:
    """Floating point operations of a step in products with matrices of weights, forward and backward: 6 for each
    weight and token. What a token does with earlier ones is not counted."""
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embedding" not in n)
    return 6.0 * weights * size.batch * size.tokens
