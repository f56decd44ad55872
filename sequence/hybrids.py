"""Several sequence layers as one: side by side on the same tokens, each on what the one before gave, or one as the
context of another; and tokens that are learned, ahead of every sequence.

A window beside a memory in one layer, or behind it, or a memory that attention reads with the tokens (Titans' memory as
a gate, as a layer and as context, Based, Samba): the layers stay what they are, with a state each, and what holds them
has their calls.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

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
        gate: weigh the layers token by token; W is zero at first, so that all count alike. Or "product", entry by entry
            of what the layers give (Titans' memory as a gate).

    Raises: ShapeError for fewer than two layers or layers of other widths.
    """

    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: W is no hidden matrix, its rows are layers

    def __init__(self, *layers: SequenceLayer, gate: bool | Literal["product"] = False) -> None:
        super().__init__(*layers)
        if not isinstance(gate, bool) and gate != "product":
            raise wrong_type("Beside", "gate", "a bool, or 'product'", gate)
        self.multiplies, gate = gate == "product", gate is True
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
        return y.prod(-1) if self.multiplies else y.sum(-1), tuple(after for _, after in made)


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


class Persistent(nn.Module):
    """A layer whose sequences begin behind tokens that are learned: y = f([p_1, .., p_n, x]), x's outputs (Titans).

    The tokens' place is the state before the first token, so that nothing is read or written twice.

    Args:
        layer: a sequence layer, or several as one.
        tokens: n.

    Raises: ShapeError for fewer than one token.
    """

    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: tokens are rows of a table

    def __init__(self, layer: SequenceLayer | _Several, tokens: int) -> None:
        super().__init__()
        if not isinstance(layer, SequenceLayer | _Several):
            raise wrong_type("Persistent", "layer", "a sequence layer, or several as one", layer)
        if not isinstance(tokens, int) or tokens < 1:
            raise ShapeError(f"Persistent: tokens must be at least 1, got {tokens}")
        self.layer = layer
        parameter = next(layer.parameters())
        made = torch.empty(tokens, _width(layer), device=parameter.device, dtype=parameter.dtype)
        self.tokens = nn.Parameter(made)
        nn.init.normal_(self.tokens)

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        self.layer.reset_parameters()
        nn.init.normal_(self.tokens)

    def init_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The state behind the learned tokens, of `batch` sequences."""
        tokens = self.tokens.to(device=device, dtype=dtype)
        return self.layer(tokens.expand(batch, *tokens.shape))[1]

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """One token (B, D): the output and the state after it."""
        return self.layer.step(x, self.init_state(x.shape[0], x.device, x.dtype) if state is None else state)

    def forward(
        self, x: Tensor, state: Any = None, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """(B, T, D) to (B, T, D), and the state after the last token; arguments as of a layer."""
        if state is None:
            count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            state = self.init_state(count, x.device, x.dtype)
        made: tuple[Tensor, Any] = self.layer(x, state, mask=mask, cu_seqlens=cu_seqlens)
        return made


class ContextState(NamedTuple):
    """memory: now; recalled: where the segment began, behind the tokens so far; attention: of the segment; place: how
    many tokens the segment has so far."""

    memory: LayerState
    recalled: LayerState
    attention: Any
    place: Tensor


torch.serialization.add_safe_globals([ContextState])  # a saved state loads with weights_only=True


class Context(nn.Module):
    """y = f([p, h_1, x_1, h_2, x_2, ..]) at the x of every segment,  o = y * M(y): Titans' memory as context.

    A segment's tokens are attended to with what they recall, h_i = M(x_i) of the memory as the segment found it, behind
    learned tokens p; what attention gives is written to the memory, and weighed entry by entry by what that reads.

    Args:
        memory: M, a sequence layer; its own queries recall.
        attention: f, a sequence layer over one segment, such as softmax attention.
        segment: tokens of a segment.
        tokens: how many are learned.

    Differs from Titans, section 4.1: what a token recalls stands ahead of that token and no earlier, and the memory is
    read after each of the segment's writes, so that no output depends on a later token.

    Raises: ShapeError for layers of other widths, or fewer than one token.
    """

    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: tokens are rows of a table

    def __init__(self, memory: SequenceLayer, attention: SequenceLayer, segment: int = 64, tokens: int = 4) -> None:
        super().__init__()
        for name, layer in (("memory", memory), ("attention", attention)):
            if not isinstance(layer, SequenceLayer):
                raise wrong_type("Context", name, "a sequence layer", layer)
        if not isinstance(segment, int) or segment < 1:
            raise ShapeError(f"Context: a segment has at least one token, got segment={segment}")
        if _width(memory) != _width(attention):
            raise ShapeError(f"Context: layers have one width, got {_width(memory)} and {_width(attention)}")
        self.memory, self.attention, self.segment = memory, Persistent(attention, tokens), segment

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        self.memory.reset_parameters()
        self.attention.reset_parameters()

    def init_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ContextState:
        """The state before the first token of `batch` sequences."""
        memory, place = self.memory.init_state(batch, device, dtype), torch.zeros((), dtype=torch.int64)
        return ContextState(memory, memory, self.attention.init_state(batch, device, dtype), place)

    def step(self, x: Tensor, state: ContextState | None = None) -> tuple[Tensor, ContextState]:
        """One token (B, D): the output and the state after it."""
        y, after = self(x[:, None], state)
        return y[:, 0], after

    def forward(
        self,
        x: Tensor,
        state: ContextState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ContextState | None]:
        """(B, T, D) to (B, T, D), and the state after the last token; None where sequences of unequal length end in
        segments of unequal length. mask, cu_seqlens: as of a layer, of sequences that begin here."""
        if mask is not None or cu_seqlens is not None:
            return self._each(x, state, mask, cu_seqlens)
        if state is None:
            state = self.init_state(x.shape[0], x.device, x.dtype)
        if not isinstance(state, ContextState):
            raise wrong_type("Context", "state", "a ContextState, as init_state or an earlier call gave it", state)
        outputs, first = [x[:, :0]], 0
        while first < x.shape[1]:
            if int(state.place) == self.segment:  # the next one begins
                fresh = self.attention.init_state(x.shape[0], x.device, x.dtype)
                begun = LayerState(state.recalled.tails, state.memory.memory)
                state = ContextState(state.memory, begun, fresh, torch.zeros_like(state.place))
            part = x[:, first : first + self.segment - int(state.place)]
            found, recalled = self.memory.recall(part, state.recalled)
            attended, after = self.attention(torch.stack((found, part), 2).flatten(1, 2), state.attention)
            y = attended[:, 1::2]
            read, memory = self.memory(y, state.memory)
            outputs.append(y * read)
            state = ContextState(memory, recalled, after, state.place + part.shape[1])
            first += part.shape[1]
        return torch.cat(outputs, 1), state

    def _each(
        self, x: Tensor, state: ContextState | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, None]:
        """Sequence by sequence."""
        if state is not None or mask is not None and cu_seqlens is not None:
            raise ShapeError("Context: sequences of unequal length begin here: give mask or cu_seqlens, and no state")
        out = torch.zeros_like(x)
        if mask is not None:
            for i, real in enumerate(mask.bool()):
                out = out.index_put((torch.tensor(i, device=x.device), real), self(x[i : i + 1, real])[0][0])
            return out, None
        assert cu_seqlens is not None
        ends = cu_seqlens.tolist()
        parts = [self(x[:, a:b])[0] for a, b in zip(ends, ends[1:], strict=False)]
        return torch.cat(parts, 1), None


def _width(layer: Any) -> int:
    width: int = layer.sizes.d_model if isinstance(layer, SequenceLayer) else _width(layer.layers[0])
    return width


__all__ = ["Behind", "Beside", "Context", "ContextState", "Persistent"]
