"""The Hopper kernel of rule "write" on its own shapes: against float64, the portable kernels, itself on a full chip."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from axes.kernels.scalar import hopper_write  # noqa: E402
from tests.gpu.test_scalar import BF, BOUNDS, HALF, Case, chain, cotangents, errors, inputs, run  # noqa: E402

BASE = Case(rule="write", T=300)
CASES = [replace(BASE, K=k, V=v, weighted=w) for k in (64, 128) for v in (64, 128) for w in (False, True)]
CASES += [replace(BASE, K=64, V=128, gated=False), replace(BASE, K=128, V=64, gated=False, weighted=False)]
CASES += [replace(BASE, K=k, V=256, group=n, weighted=n > 1, segments=n) for k, n in ((64, 1), (128, 2))]  # in halves
CASES += [replace(BASE, K=128, V=64, group=3, dtype=HALF), replace(BASE, K=64, V=128, group=2, T=500, segments=3)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_runs_and_equals_the_token_loop_no_worse_than_the_portable_kernels(case: Case) -> None:
    with patch.object(hopper_write, "mix", wraps=hopper_write.mix) as launched:
        found = errors(case)
    assert [x.args[0] for x in launched.call_args_list] == ["o", "dq", "dv", "dk"]
    with patch.object(hopper_write, "fits", lambda *_: False):
        portable = errors(case)
    assert max(found.values()) < BOUNDS[case.dtype], found
    # gradients of keys that halves of values share are rounded for each half, and their sum is
    worse = 1.5 if case.V > hopper_write.WIDEST else 1.2
    assert all(found[n] < worse * portable[n] + 1e-6 for n in found), (found, portable)


@pytest.mark.parametrize(("k", "v"), ((64, 64), (64, 128)))
@pytest.mark.parametrize("dtype", (BF, HALF), ids=str)
def test_a_full_chip_repeats_and_equals_its_parts(k: int, v: int, dtype: torch.dtype) -> None:
    case = Case(T=1500, K=k, V=v, dtype=dtype, rule="write", B=16, H=16, segments=1)
    given = inputs(case)
    do, dfinal = cotangents(given, case.B)
    first = run(chain, given, do, dfinal, segments=1, **case.options)
    for _ in range(4):
        again = run(chain, given, do, dfinal, segments=1, **case.options)
        assert all(torch.equal(first[n], again[n]) for n in first)
    alone = {n: None if x is None else x[5:6] for n, x in given.items()}
    part = run(chain, alone, do[5:6], dfinal[5:6], segments=1, **case.options)
    assert all(torch.equal(first[n][5:6], part[n]) for n in first)


@pytest.mark.parametrize("at", (0, 63, 64, 100))
def test_nothing_passes_a_gate_that_closes(at: int) -> None:
    """Its gradient is the difference of equal sums: what is left is the rounding of float32, not of 16 bit."""
    given = inputs(Case(rule="write", T=200, K=128, V=128, weighted=False))
    given["g"][:, at] = -60.0
    do, dfinal = cotangents(given, 2)
    out = run(chain, given, do, dfinal, rule="write", early=False)
    others = out["dg"].abs().mean()
    assert out["dg"][:, at].abs().max() < 1e-4 * others, (out["dg"][:, at].abs().max(), others)
