"""How much the host does for layers that run by kernels: operations of torch and launches, forward and backward.

Counts do not flicker as times do. They may sink; one that grows is a launch or an allocation that somebody pays for at
every step: `python -m tests.host` says which, and how long all of them take.
"""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tests.host import BY_KERNELS, work

# operations and launches of a forward, and of its backward
COUNTS = {
}


def test_the_table_has_every_layer() -> None:
    assert tuple(COUNTS) == BY_KERNELS


@pytest.mark.parametrize("name", COUNTS)
def test_operations_and_launches(name: str) -> None:
    for one, (operations, launches) in zip(work(name), COUNTS[name], strict=True):
        assert len(one.operations) <= operations, one.operations
        assert len(one.launches) == launches, one.launches
