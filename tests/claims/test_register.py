"""Every claim of the register holds its verdict; what faults each group's checks catch is in the files beside."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axes.claims.base import Claim, Draw, Result
from axes.claims.register import find
from axes.claims.verify import verify_one

# statistics, solvers and training runs: one draw here, all of them in `axes verify`
HEAVY = {
    *("B03", "B09", "B10", "B12", "B18", "B22", "C06", "C07", "C16", "C19", "C21", "C23", "C24", "D04"),
    *("D05", "D20", "D21", "E02", "E03", "E05", "E07", "E08", "E09", "E10", "E11", "E12", "H06", "H12"),
    *("H13", "H14", "H15", "H17", "H20", "H28", "H29", "I01", "I02", "I06", "I08", "J04", "J06"),
}
TESTABLE = [c for c in find() if c.check is not None]


@pytest.mark.parametrize("claim", [c for c in TESTABLE if c.id not in HEAVY], ids=lambda c: c.id)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=2)
def test_claim_holds(claim: Claim, seed: int) -> None:
    assert claim.check is not None
    result = Result(claim, tuple(claim.check(Draw(seed))))
    assert result.ok, [str(f) for f in result.findings if not f.ok] or "a kind of finding is missing"


@pytest.mark.parametrize("claim", [c for c in TESTABLE if c.id in HEAVY], ids=lambda c: c.id)
def test_heavy_claim_holds(claim: Claim) -> None:
    result = verify_one(claim, 1)
    assert result.ok, (result.error, [str(f) for f in result.findings if not f.ok])
