"""Processes that share a GPU give back what a test has taken: torch keeps it for them otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

_KEPT = 1 << 30  # bytes that a process may hold on to


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > _KEPT:
        torch.cuda.empty_cache()
