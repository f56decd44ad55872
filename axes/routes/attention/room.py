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
        buffer = _made(rows, max(2 * n, end, _LEAST))
        buffer[..., :n, :] = rows
    buffer[..., n:end, :] = new
    setattr(buffer, _TAKEN, end)
    return buffer[..., :end, :]


def beside(rows: Tensor, more: int) -> Tensor:
    """Unwritten memory for rows (..., n, d) and `more` behind them, where rows stay as they are: as large as their own
    buffer while that has room, so that a list that moves at every token moves between two."""
    n, end = rows.shape[-2], rows.shape[-2] + more
    buffer = rows._base
    held = 0 if buffer is None or not _begins(buffer, rows) else buffer.shape[-2]
    made = _made(rows, held if held >= end else max(2 * n, end, _LEAST))
    setattr(made, _TAKEN, end)
    return made[..., :end, :]


def _made(rows: Tensor, length: int) -> Tensor:
    with torch.inference_mode(False):  # a tensor of inference mode does not know that views are its own
        return torch.empty(*rows.shape[:-2], length, rows.shape[-1], dtype=rows.dtype, device=rows.device)


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
