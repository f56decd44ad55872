"""Every kernel compiled for sm_90 without a GPU, as the entries launch it, by every Triton that is supported.

Registers, spills, shared memory and use of wgmma are held to a table, tests/kernels_compiled.json, a column a version.
Spills cost bandwidth, not correctness; a number there may sink, and grows only on purpose: `python -m tests.compiler`
writes it anew. What is wrong in any version (operands overwritten, barriers that do not end) is looked for in each.
A kernel whose text, callees, types and constants are those that the table was made of is compiled in `make test-all`
alone; what the compiler is asked is read in every run, which takes a tenth of a second a case.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from axes.kernels.common.versions import SHARED, TRITONS
from tests.barriers import not_ended
from tests.compiler import compiler, row, table, unchanged
from tests.tritons import NEWEST, OWN

TABLE = table()
assert OWN is not None, "on Linux the absence of Triton is an error, not a reason to skip"
EVERY = [OWN, *(version for version in TRITONS if version != OWN)]


def versions(function: Callable[..., None]) -> Callable[..., None]:
    """The environment's own Triton and the newest in `make test`, the others in `make test-all`."""
    marks = [() if version in (OWN, NEWEST) else pytest.mark.slow for version in EVERY]
    named = [pytest.param(version, marks=mark) for version, mark in zip(EVERY, marks, strict=True)]
    return pytest.mark.parametrize("version", named)(function)


BY_THE_NEWEST = ("hopper 64", "hopper write 64", "hopper diagonal 64", "hopper block 64")  # seconds each


def widest(case: str) -> bool:
    """Whether no other case is this one at a larger width."""

    def width(name: str) -> int:
        return sum(map(int, re.findall(r"\d+", name)))

    alike = [other for other in TABLE if re.sub(r"\d+", "", other) == re.sub(r"\d+", "", case)]
    return width(case) == max(map(width, alike))


# Where they changed: every kernel at its widest by the environment's own Triton, some of Hopper's own instructions,
# where versions differ most, by the newest.
QUICK = [(OWN, case) for case in TABLE if widest(case)] + [(NEWEST, case) for case in BY_THE_NEWEST]


def test_the_table_has_every_case() -> None:
    from tests import kernel_cases

    assert list(TABLE) == list(kernel_cases.CASES)


@pytest.mark.parametrize(("version", "case"), QUICK)
def test_registers_spills_and_wgmma(version: str, case: str) -> None:
    if not unchanged(version, case, TABLE[case]):
        held(version, case)


@pytest.mark.slow
@pytest.mark.parametrize("version", EVERY)
@pytest.mark.parametrize("case", TABLE)
def test_every_kernel_by_every_version(version: str, case: str) -> None:
    """Ten minutes of compiling a version."""
    held(version, case)


def held(version: str, case: str) -> None:
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
    for requests in compiler(version).requests("sizes of delta"):
        for x in requests:
            binaries.setdefault(x.kernel, set()).add(x.digest)
    assert len(binaries["_chain"]) == len(binaries["_gradients"]) == 1
    assert len(binaries["_prepare"]) == 2  # with and without what segments need


@versions
@pytest.mark.parametrize("rule", ["write", "diagonal"])
def test_sizes_share_binaries(version: str, rule: str) -> None:
    """Of two batches, lengths and numbers of heads."""
    serial = ("_mix", "_numbers", "_chain", "_merge")
    first, second = (
        [x.digest for x in requests if x.kernel in serial]
        for requests in compiler(version).requests(f"sizes of {rule}")
    )
    assert first and first == second


_TEXT = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2.0)


@triton.jit
def _inner(x):
    return x * SCALE


@triton.jit
def outer(to, x, POWER: tl.constexpr):
    tl.store(to, _inner(tl.load(x)) * POWER)
"""


def test_what_is_asked_follows_all_that_a_binary_is_made_of_and_no_lines(tmp_path: Path) -> None:
    """What the table is believed by: a change of a callee, its constant, a type, a number or an option is another
    question; where the text stands is not."""
    from tests.hopper import asked, hopper

    def digest(
        text: str = _TEXT, dtype: torch.dtype = torch.float32, power: int = 3, made: bool = False, **options: int
    ) -> str:
        file = tmp_path / f"text{len(list(tmp_path.iterdir()))}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("text", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for way in (hopper, asked) if made else (asked,):
            with way() as found:
                module.outer[(1,)](torch.zeros(4), torch.zeros(4, dtype=dtype), POWER=power, **options)
        (launch,) = found
        assert launch.kernel == "outer"
        return launch.digest

    first = digest()
    assert digest() == digest("# further down\n\n" + _TEXT) == digest(made=True) == first
    others = [
        digest(_TEXT.replace("x * SCALE", "x + SCALE")),
        digest(_TEXT.replace("constexpr(2.0)", "constexpr(4.0)")),
        digest(dtype=torch.float16),
        digest(power=4),
        digest(num_warps=8),
    ]
    assert len({first, *others}) == 6


def test_a_number_that_was_changed_by_hand_is_not_believed() -> None:
    case = "scaled entries"
    assert OWN is not None
    if OWN not in TRITONS:
        pytest.skip(f"the table has no column of Triton {OWN}")
    assert unchanged(OWN, case, TABLE[case])
    first, *others = TABLE[case]
    registers, *rest = first[OWN]
    assert not unchanged(OWN, case, [{**first, OWN: [registers - 1, *rest]}, *others])


@pytest.mark.parametrize("version", [OWN, *(pytest.param(v, marks=pytest.mark.slow) for v in EVERY[1:])])
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
