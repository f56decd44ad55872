"""How much the host does for layers that run by kernels: operations of torch and launches, forward and backward.

Counts do not flicker as times do. They may sink; one that grows is a launch or an allocation that somebody pays for at
every step: `python -m tests.host` says which, and how long all of them take.
"""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tests.host import BY_KERNELS, MIXERS, line, mixed, one_token, work

# operations and launches of a forward, and of its backward; a chain ends with the look for what is not finite
COUNTS = {
    "GatedDeltaNet": ((39, 5), (70, 4)),
    "KDA": ((48, 8), (90, 8)),
    "DeltaNet": ((31, 5), (56, 4)),
    "LinearAttention": ((43, 3), (40, 5)),
    "RetNet": ((64, 5), (53, 6)),
    "GLA": ((42, 6), (80, 7)),
    "Mamba2": ((46, 5), (79, 6)),
    "RWKV7": ((86, 9), (172, 10)),
    "TitansMatrix": ((103, 7), (112, 8)),
}

# operations and launches of one token after others
TOKENS = {
    "GatedDeltaNet": (47, 3),
    "RetNet": (50, 3),
    "Mamba2": (62, 3),
    "SoftmaxAttention": (78, 2),
    "RoPE": (105, 3),
    "FoX": (110, 3),
    "PaTH": (95, 4),
}

# of a write of streams and the next read of them
MIXED = {
    "hyper-connections": ((17, 1), (26, 1)),
    "dynamic-hyper-connections": ((43, 4), (63, 5)),
    "mhc": ((35, 5), (43, 6)),
    "jpmhc": ((39, 6), (43, 7)),
}


def test_the_table_has_every_layer() -> None:
    assert tuple(COUNTS) == BY_KERNELS
    assert tuple(MIXED) == MIXERS


@pytest.mark.parametrize("name", MIXED)
def test_operations_and_launches_of_mixers(name: str) -> None:
    for one, (operations, launches) in zip(mixed(name), MIXED[name], strict=True):
        assert len(one.operations) <= operations, one.operations
        assert len(one.launches) == launches, one.launches


@pytest.mark.parametrize("name", COUNTS)
def test_operations_and_launches(name: str) -> None:
    for one, (operations, launches) in zip(work(name), COUNTS[name], strict=True):
        assert len(one.operations) <= operations, one.operations
        assert len(one.launches) == launches, one.launches


@pytest.mark.parametrize("name", TOKENS)
def test_operations_and_launches_of_one_token(name: str) -> None:
    found, (operations, launches) = one_token(name), TOKENS[name]
    assert len(found.operations) <= operations, found.operations
    assert len(found.launches) == launches, found.launches
    assert not any("cumsum" in x for x in found.operations)  # torch's scan of rows of one took 0.4 ms


@pytest.mark.parametrize("name", COUNTS)
def test_a_call_that_was_seen_follows_a_line(name: str) -> None:
    found, *launches = line(name)
    assert found.ready, found.refused
    for one, (_, expected) in zip(launches, COUNTS[name], strict=True):
        assert len(one) == expected, one
