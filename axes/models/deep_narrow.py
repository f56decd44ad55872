"""Deep narrow networks: many small sublayers in their mixers, where what layers remember is what is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from axes.depth.stack import through
from axes.errors import AxesError
from axes.models.options import accepted_options


@final
class DeepNarrow(nn.Module):
    """logits = W_out norm(reduce(X_L)), X_0 = expand(W_in x), X <- write(X, tanh(W_l norm(read X) + b_l)).

    Args:
        features, width, layers, outputs: sizes.
        mixer: what makes the mixer of a sublayer.
        streams: of mixers that have several.
        shared: one sublayer with its norm and mixer serves every layer.
    """

    def __init__(
        self, features: int, width: int, layers: int, outputs: int, mixer: Callable[..., Any], streams: int = 4,
        shared: bool = False, *, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, size in (("features", features), ("width", width), ("layers", layers), ("outputs", outputs)):
            if size < 1:
                raise AxesError(f"DeepNarrow: {name} must be at least 1, got {size}")
        self.enter = nn.Linear(features, width, device=device)
        options = accepted_options(mixer, streams=streams)
        made = range(1 if shared else layers)
        self.mixers = nn.ModuleList(mixer(width, layer_index=i, **options, device=device) for i in made)
        self.sublayers = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(width, device=device) if getattr(mixed, "prenorm", True) else nn.Identity(),
                nn.Linear(width, width, device=device),
                nn.Tanh(),
            )
            for mixed in self.mixers
        )
        self.layers = layers
        self.norm = nn.RMSNorm(width, device=device)
        self.leave = nn.Linear(width, outputs, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, features) -> logits (B, outputs)."""
        mixers: list[Any] = [self.mixers[i % len(self.mixers)] for i in range(self.layers)]
        sublayers = [self.sublayers[i % len(self.mixers)] for i in range(self.layers)]
        streams = through(sublayers, mixers, mixers[0].expand(self.enter(x)[:, None]))
        logits: Tensor = self.leave(self.norm(mixers[-1].reduce(streams)[:, 0]))
        return logits
