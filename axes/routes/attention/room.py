"""Lists that grow without a copy: a buffer with room behind the rows in use, twice as large when it is full.

A list is a view of its buffer's first rows, so it means what any tensor of that shape means: it can be saved, selected
and joined. Rows that a list shows are never written again. Of two lists that grow from the same one, the second finds
the room taken and moves to a buffer of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 64  # rows of a buffer
_TAKEN = "_rows_taken"  # how many rows of a buffer some list shows: an attribute of the tensor that owns the memory


def append(rows: Tensor, new: Tensor) -> Tensor:
    """rows (..., n, d) and new (..., m, d) behind them, for lists that no gradient is asked of."""
    n, end = rows.shape[-2], rows.shape[-2] + new.shape[-2]
    buffer = rows._base
    if buffer is None or not _begins(buffer, rows) or getattr(buffer, _TAKEN, None) != n or end > buffer.shape[-2]:
        with torch.inference_mode(False):  # a tensor of inference mode does not know that views are its own
            buffer = torch.empty(
                *rows.shape[:-2], max(2 * n, end, _LEAST), rows.shape[-1], dtype=rows.dtype, device=rows.device
            )
        buffer[..., :n, :] = rows
    buffer[..., n:end, :] = new
    setattr(buffer, _TAKEN, end)
    return buffer[..., :end, :]


def may_append(rows: Tensor, new: Tensor) -> bool:
    """Whether rows may be kept in a buffer: nobody records or compiles, and the rows' dtype holds the new ones."""
    if torch.compiler.is_compiling() or type(rows) is not Tensor:
        return False
    if torch.promote_types(rows.dtype, new.dtype) != rows.dtype:
        return False
    return not (torch.is_grad_enabled() and (rows.requires_grad or new.requires_grad))


def _begins(buffer: Tensor, rows: Tensor) -> bool:
    """Whether rows are exactly the first ones of a buffer."""
    whole = (buffer.data_ptr(), buffer.stride(), buffer.shape[:-2], buffer.shape[-1])
    return (rows.data_ptr(), rows.stride(), rows.shape[:-2], rows.shape[-1]) == whole
