"""What generation keeps between tokens: the state of every sequence layer, and how many positions were seen."""

from __future__ import annotations

from copy import copy
from typing import Any, final

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.integrations.transformers.library import Cache
from axes.models import LayerStates
from axes.routes.packed import select


@final
class AxesCache(Cache):
    """States of B sequences; what the model returns as `past_key_values` and takes again.

    Positions are counted as an attention mask counts them, padding among them. A state is replaced and never written
    to, so that a copy, deep or not, is a cache of its own and copies no tensor.
    """

    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: LayerStates | None = None
        self.length = 0
        self.sequences = -1

    def keep(self, states: LayerStates, batch: int, length: int) -> None:
        """The states after `length` more positions of `batch` sequences."""
        self.states, self.sequences, self.length = states, batch, self.length + length

    def __deepcopy__(self, memo: dict[int, Any]) -> AxesCache:
        return copy(self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.states is not None

    @property
    def batch_size(self) -> int:
        return self.sequences

    def reset(self) -> None:
        self.states, self.length, self.sequences = None, 0, -1

    # ---- which sequences -----------------------------------------------------------------------------------------

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.states is not None:
            self.states = tuple(_rows(state, indices, self.sequences) for state in self.states)
            self.sequences = len(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(max(self.sequences, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        raise AxesError(
            "AxesCache: a recurrent state does not hold the tokens that made it, so none can be taken out again: begin "
            "from a copy of an earlier cache"
        )

    def __len__(self) -> int:
        return len(self.states or ())

    def __repr__(self) -> str:
        return f"AxesCache({len(self)} layers, {self.length} positions of {max(self.sequences, 0)} sequences)"


def _rows(state: Any, rows: Tensor, batch: int) -> Any:
    """Some sequences of a state, on whatever device it is."""
    if isinstance(state, Tensor):
        return select(state, rows.to(state.device), batch)
    parts = [_rows(part, rows, batch) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
