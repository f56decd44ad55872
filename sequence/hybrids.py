"""Several sequence layers as one: side by side on the same tokens, or each on what the one before gave.

A window beside a memory in one layer, or behind it (Titans' memory as a gate and as a layer, Based, Samba): the layers
stay what they are, with a state each, and what holds them has their calls.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from axes.errors import ShapeError, wrong_type
from axes.sequence.base import LayerState, SequenceLayer

States = tuple[LayerState | None, ...]
Read = tuple[Tensor, tuple[Any, ...]]  # an output and the states after it


class _Several(nn.Module):
    """Layers of one width, and a state for each."""

    def __init__(self, *layers: SequenceLayer) -> None:
        super().__init__()
        who = type(self).__name__
        for i, layer in enumerate(layers):
            if not isinstance(layer, SequenceLayer | _Several):
                raise wrong_type(who, f"layer {i}", "a sequence layer", layer)
        if len(layers) < 2:
            raise ShapeError(f"{who}: give at least two layers, got {len(layers)}")
        widths = {_width(layer) for layer in layers}
        if len(widths) != 1:
            raise ShapeError(f"{who}: layers have one width, got d_model={sorted(widths)}")
        self.layers = nn.ModuleList(layers)

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]

    def init_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        """The states before the first token of `batch` sequences."""
        return tuple(layer.init_state(batch, device, dtype) for layer in self.layers)  # type: ignore[operator]

    def step(self, x: Tensor, state: States | None = None) -> Read:
        """One token (B, D): the output and the states after it."""
        return self._over(x, "step", state, {})

    def forward(
        self,
        x: Tensor,
        state: States | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Read:
        """(B, T, D) to (B, T, D), and the states after the last token; arguments as of a layer."""
        return self._over(x, "forward", state, {"mask": mask, "cu_seqlens": cu_seqlens})

    def _states(self, state: States | None) -> States:
        if state is None:
            return (None,) * len(self.layers)
        if not isinstance(state, tuple) or isinstance(state, LayerState) or len(state) != len(self.layers):
            wanted = f"a tuple of {len(self.layers)} layers' states, as init_state or an earlier call gave it"
            raise wrong_type(type(self).__name__, "state", wanted, state)
        return state

    def _over(self, x: Tensor, call: str, state: States | None, given: dict[str, Any]) -> Read:
        raise NotImplementedError


class Beside(_Several):
    """y_t = sum_i g_i f_i(x)_t: layers on the same tokens, added, or with gate weighed by g_t = softmax(W x_t).

    Args:
        layers: of one d_model; a sliding window beside a memory, say.
        gate: weigh the layers token by token; W is zero at first, so that all count alike.

    Raises: ShapeError for fewer than two layers or layers of other widths.
    """

    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: W is no hidden matrix, its rows are layers

    def __init__(self, *layers: SequenceLayer, gate: bool = False) -> None:
        super().__init__(*layers)
        parameter = next(layers[0].parameters())
        self.weigh: nn.Linear | None = None
        if gate:
            factory = {"device": parameter.device, "dtype": parameter.dtype}
            self.weigh = nn.Linear(_width(layers[0]), len(layers), bias=False, **factory)
            nn.init.zeros_(self.weigh.weight)

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        super().reset_parameters()
        if self.weigh is not None:
            nn.init.zeros_(self.weigh.weight)

    def _over(self, x: Tensor, call: str, state: States | None, given: dict[str, Any]) -> Read:
        made = [getattr(f, call)(x, s, **given) for f, s in zip(self.layers, self._states(state), strict=True)]
        y = torch.stack([out for out, _ in made], -1)
        if self.weigh is not None:
            y = y * torch.softmax(self.weigh(x), -1)[..., None, :]
        return y.sum(-1), tuple(after for _, after in made)


class Behind(_Several):
    """y = f_n(... f_1(x)): each layer reads what the one before gave (Titans' memory as a layer ahead of a window).

    Args:
        layers: of one d_model, the first on the tokens.

    Raises: ShapeError for fewer than two layers or layers of other widths.
    """

    def _over(self, x: Tensor, call: str, state: States | None, given: dict[str, Any]) -> Read:
        states = []
        for f, s in zip(self.layers, self._states(state), strict=True):
            x, after = getattr(f, call)(x, s, **given)
            states.append(after)
        return x, tuple(states)


def _width(layer: Any) -> int:
    width: int = layer.sizes.d_model if isinstance(layer, SequenceLayer) else _width(layer.layers[0])
    return width


__all__ = ["Behind", "Beside"]
