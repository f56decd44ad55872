"""A planted fault changes the core: no program that was traced before it may run, and none that saw it may stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from axes.claims.register import find
from axes.claims.verify import verify_one
from axes.optim.engine import together


@pytest.fixture(autouse=True)
def traced_anew() -> Iterator[None]:
    for cached in (together.program, together.schedule):
        cached.cache_clear()
    yield
    for cached in (together.program, together.schedule):
        cached.cache_clear()


@pytest.fixture
def red() -> Callable[..., bool]:
    """Whether all these claims are found to fail, by their findings and not by an exception."""

    def found(*ids: str) -> bool:
        return not any(r.ok or r.error for r in (verify_one(c, 1) for c in find(ids)))

    return found
