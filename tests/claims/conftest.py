"""A planted fault changes the core: no program that was traced before it may run, and none that saw it may stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from axes.optim.engine import together


@pytest.fixture(autouse=True)
def traced_anew() -> Iterator[None]:
    for cached in (together.program, together.schedule):
        cached.cache_clear()
    yield
    for cached in (together.program, together.schedule):
        cached.cache_clear()
