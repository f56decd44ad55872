"""A planted fault changes the core: no program that was traced before it may run, and none that saw it may stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from axes.claims.register import find
from axes.claims.verify import verify_one
from axes.core.state_update import StateUpdate
from tests.alive import alive


@pytest.fixture(autouse=True)
def traced_anew(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around tests that plant: a look through everything that lives costs a quarter of a second beside all tests."""
    plants = "monkeypatch" in request.fixturenames
    if plants:
        _forget()
    yield
    if plants:
        _forget()


def _forget() -> None:
    """Take off every tuple what was worked out for it: programs and other facts are kept on the tuples themselves."""
    for update in alive(StateUpdate):
        for name in [n for n in vars(update) if n.startswith("_axes_")]:
            object.__delattr__(update, name)


@pytest.fixture
def red() -> Callable[..., bool]:
    """Whether all these claims are found to fail, by their findings and not by an exception."""

    def found(*ids: str) -> bool:
        return not any(r.ok or r.error for r in (verify_one(c, 1) for c in find(ids)))

    return found
