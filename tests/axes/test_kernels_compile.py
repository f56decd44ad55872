"""Every kernel compiled for sm_90 without a GPU, as the entries launch it, by every Triton that is supported.

Registers, spills, shared memory and use of wgmma are held to a table, tests/kernels_compiled.json, a column a version.
Spills cost bandwidth, not correctness; a number there may sink, and grows only on purpose: `python -m tests.compiler`
writes it anew. What is wrong in any version (operands overwritten, barriers that do not end) is looked for in each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from axes.kernels.common.versions import SHARED, TRITONS
from tests.barriers import not_ended
from tests.compiler import compiler, row, table
from tests.tritons import NEWEST, OWN

TABLE = table()
assert OWN is not None, "on Linux the absence of Triton is an error, not a reason to skip"


def versions(function: Callable[..., None]) -> Callable[..., None]:
    """The environment's own Triton and the newest in `make test`, the others in `make test-all`."""
    every = [OWN, *(version for version in TRITONS if version != OWN)]
    marks = [() if version in (OWN, NEWEST) else pytest.mark.slow for version in every]
    named = [pytest.param(version, marks=mark) for version, mark in zip(every, marks, strict=True)]
    return pytest.mark.parametrize("version", named)(function)


BY_THE_NEWEST = ("hopper 64", "hopper write 64", "hopper diagonal 64", "hopper block 64")  # seconds each


def widest(case: str) -> bool:
    """Whether no other case is this one at a larger width."""

    def width(name: str) -> int:
        return sum(map(int, re.findall(r"\d+", name)))

    alike = [other for other in TABLE if re.sub(r"\d+", "", other) == re.sub(r"\d+", "", case)]
    return width(case) == max(map(width, alike))


def cases(function: Callable[..., None]) -> Callable[..., None]:
    """Every kernel at its widest by the environment's own Triton, some of Hopper's own instructions, where versions
    differ most, by the newest; everything by every version, ten minutes of compiling, in `make test-all`."""
    assert OWN is not None
    every = [OWN, *(version for version in TRITONS if version != OWN)]
    named = [
        pytest.param(version, case, marks=() if quick else pytest.mark.slow)
        for version in every
        for case in TABLE
        for quick in [version == OWN and widest(case) or version == NEWEST and case in BY_THE_NEWEST]
    ]
    return pytest.mark.parametrize(("version", "case"), named)(function)


def test_the_table_has_every_case() -> None:
    from tests import kernel_cases

    assert list(TABLE) == list(kernel_cases.CASES)


@cases
def test_registers_spills_and_wgmma(version: str, case: str) -> None:
    launches = compiler(version).launches(case)
    assert [x.kernel for x in launches] == [x["kernel"] for x in TABLE[case]]
    for launch, pinned in zip(launches, TABLE[case], strict=True):
        assert launch.shared <= SHARED, launch
        assert launch.registers <= 255
        assert not launch.overwritten and not launch.barriers, launch
        if "network " in case:  # of these shapes ptxas 12.9 breaks products of warpgroups
            assert launch.mma or launch.kernel in ("read_back", "late")
            assert not launch.wgmma, launch
        if version not in TRITONS:  # a patch of one
            continue
        registers, spills, shared, wgmma = row(launch)
        registers_then, spills_then, shared_then, wgmma_then = pinned[version]
        assert registers <= registers_then + 8 and spills <= spills_then, (launch, pinned)
        assert shared <= shared_then and wgmma >= wgmma_then, (launch, pinned)


@versions
def test_hopper_kernels_are_one_binary_for_all_sizes(version: str) -> None:
    """Not one for each number of heads: ptxas mixes up registers of copies and products in ways that differ by binary,
    so that only what ran on a full chip is known to be right."""
    binaries: dict[str, set[str]] = {}
    for launches in compiler(version).runs("sizes of delta"):
        for launch in launches:
            binaries.setdefault(launch.kernel, set()).add(launch.binary)
    assert len(binaries["_chain"]) == len(binaries["_gradients"]) == 1
    assert len(binaries["_prepare"]) == 2  # with and without what segments need


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        pytest.param(version, rule, marks=() if quick else pytest.mark.slow)
        for version in (OWN, *(version for version in TRITONS if version != OWN))
        for rule in ("write", "diagonal")
        for quick in [version == OWN or (version, rule) == (NEWEST, "write")]  # the other is 45 seconds of compiling
    ],
)
def test_sizes_share_binaries(version: str, rule: str) -> None:
    """Of two batches, lengths and numbers of heads."""
    serial = ("_mix", "_numbers", "_chain", "_merge")
    first, second = (
        [x.binary for x in launches if x.kernel in serial] for launches in compiler(version).runs(f"sizes of {rule}")
    )
    assert first and first == second


@versions
def test_what_compilers_break_is_seen(version: str) -> None:
    """Two faults made on purpose: the recognisers read what this version writes."""
    found = {x.kernel for x in compiler(version).launches("an operand overwritten") if x.overwritten}
    assert found == {"gradients"}
    (launch,) = compiler(version).launches("a barrier forgotten")
    assert launch.barriers == ["bar"]


def test_a_barrier_that_is_never_invalidated_is_found() -> None:
    text = """
    %filled = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
    %done = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    %0 = ttg.memdesc_index %filled[%c0_i32] : !ttg.memdesc<2x1xi64, #shared3, #smem, mutable>
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    ttng.init_barrier %done, 1 : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    ttng.inval_barrier %done : !ttg.memdesc<1xi64, #shared3, #smem, mutable>
    """
    assert not_ended(text) == ["filled"]
