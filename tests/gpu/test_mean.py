"""Reads over a mass by Hopper's kernel of rule "write", against the recurrence, and no worse than by a mass apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from axes.kernels.rows.mass import over_mass  # noqa: E402
from axes.kernels.scalar.chain import scalar_chain  # noqa: E402
from axes.kernels.scalar.mass import mass_chain  # noqa: E402
from axes.kernels.scalar.mean import fits, mean_chain  # noqa: E402
from tests.axes.test_kernels_mean import NAMES, loop  # noqa: E402

BF, HALF = torch.bfloat16, torch.float16
BOUNDS = {BF: 8e-3, HALF: 1e-3}


def draw(
    d_k, d_v, length, heads=2, shares=1, gated=True, strong=True, floor=1.0, dtype=BF, batch=2
) -> dict[str, Tensor]:
    torch.manual_seed(0)

    def rows(*sizes: int) -> Tensor:
        x = torch.randn(*sizes, device="cuda")
        return x if floor > 0 else x.abs()  # masses away from zero

    q, k = (rows(batch, length, heads // shares, d_k).div(d_k**0.5).to(dtype) for _ in range(2))
    wide = (batch, length, heads)
    beta = torch.rand(wide, device="cuda") * (torch.rand(wide, device="cuda") > 0.1)
    g = torch.where(torch.rand(wide, device="cuda") < 0.02, -60.0, -torch.rand(wide, device="cuda") / 8)
    v, start = torch.randn(*wide, d_v, device="cuda").to(dtype), torch.randn(batch, heads, d_v, d_k, device="cuda")
    given = (q, k, v, beta if strong else None, g if gated else None, start, rows(batch, heads, d_k))
    return dict(zip(NAMES, given, strict=True))


def results(rule, given, hears, floor, double=False) -> dict[str, Tensor]:
    leaves = {n: x if x is None else (x.double() if double else x).detach().requires_grad_() for n, x in given.items()}
    there = {n: x for n, x in leaves.items() if x is not None}
    out = rule(*leaves.values(), floor)
    grads = torch.autograd.grad(out, list(there.values()), [h.to(o.dtype) for h, o in zip(hears, out, strict=True)])
    return dict(zip(("o", "state", "n", *(f"d{n}" for n in there)), (*out, *grads), strict=True))


def apart(q, k, v, beta, g, start, norm, floor):
    """The mass by a scan of its own."""
    mass, n, q, k = mass_chain(q, k, v, beta, g, norm)
    out, state = scalar_chain(q, k, v, beta, g, initial_state=start, rule="write")
    return over_mass(out, mass.unsqueeze(-1), floor), state, n


CASES = [dict(d_k=k, d_v=v, length=300) for k in (64, 128) for v in (64, 128)]
CASES += [dict(d_k=128, d_v=128, length=130, floor=0.0), dict(d_k=64, d_v=64, length=1, floor=0.0, dtype=HALF)]
CASES += [dict(d_k=128, d_v=64, length=70, strong=False, dtype=HALF), dict(d_k=64, d_v=128, length=200, gated=False)]
CASES += [dict(d_k=128, d_v=128, length=130, heads=4, shares=2, gated=False, strong=False, floor=0.0)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_recurrence_no_worse_than_a_mass_apart(case) -> None:
    given, floor = draw(**case), case.get("floor", 1.0)
    assert fits(given["q"], given["v"], None)
    v, start, norm = (given[n] for n in ("v", "start", "norm"))
    hears = [torch.randn_like(x) for x in (v, start, norm)]
    want = results(loop, given, hears, floor, double=True)
    found, other = results(mean_chain, given, hears, floor), results(apart, given, hears, floor)
    for name, w in want.items():
        error, theirs = ((x[name].double() - w).norm() / w.norm() for x in (found, other))
        bound = BOUNDS[v.dtype]  # an eighth of it is what operands in another order leave of a sum that cancels
        assert error < bound and error < 1.5 * theirs + bound / 8, (name, error, theirs)


def test_a_full_chip_repeats() -> None:
    given = draw(128, 128, 1500, heads=16, batch=8)
    hears = [torch.randn_like(given[n]) for n in ("v", "start", "norm")]
    first = results(mean_chain, given, hears, 1.0)
    for _ in range(3):
        again = results(mean_chain, given, hears, 1.0)
        assert all(torch.equal(x, again[n]) for n, x in first.items())


@pytest.mark.parametrize("at", (0, 70, 199))
def test_what_is_not_finite_stays_behind_its_token(at: int) -> None:
    given = draw(64, 64, 200)
    whole = mean_chain(*given.values(), 1.0)[0]
    given["k"][:, at] = float("nan")
    out = mean_chain(*given.values(), 1.0)[0]
    assert torch.allclose(out[:, :at], whole[:, :at], rtol=1e-2, atol=1e-2) and out[:, at:].isnan().all()
