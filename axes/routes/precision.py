"""What autocast asks for where a tensor is, and how the recurrence stays in its own precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def autocast(x: Tensor) -> bool:
    """Whether autocast is on where x is; tensors without data (meta) know none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def taken_in(x: Tensor) -> torch.dtype:
    """The dtype in which products take x: its own, or autocast's."""
    return torch.get_autocast_dtype(x.device.type) if autocast(x) else x.dtype


def own_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Within the block operations take the dtypes that they are given."""
    return torch.autocast(x.device.type, enabled=False) if autocast(x) else nullcontext()


def own_precision_back(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An adjoint by hand whose operations do so too: people call backward within autocast."""

    @wraps(backward)
    def within(ctx: Any, *given: Tensor) -> Any:
        with own_precision(given[0]):
            return backward(ctx, *given)

    return within
