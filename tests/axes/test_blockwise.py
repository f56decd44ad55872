"""Symmetric sums in strips: the same sums, exactly symmetric where asked, with what does not count left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.linalg import blockwise
from axes.linalg.blockwise import outer_mean, symmetric_sum
from axes.linalg.matrix_roots import PRECISIONS

TOLERANCE = {"input": 1e-12, "bfloat16x3": 1e-4, "tf32": 1e-2}


def draw(n: int, seed: int = 0) -> Tensor:
    x = torch.randn(3, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x + x.mT) / 2


@pytest.fixture(params=[1, 2, 4])
def strips(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut everything into so many strips."""
    monkeypatch.setattr(blockwise, "_strips", lambda count, n: request.param)
    return int(request.param)


@pytest.mark.parametrize("n", [4, 9, 16])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_every_cut_gives_the_sum(n: int, precision: Any, exact: bool, wide: bool, strips: int) -> None:
    c, a = draw(n), draw(n, 1)
    start, factor = (c, a) if wide else (c.float(), a.float())
    before = start.clone()
    total = symmetric_sum(start, factor, rate=-0.3, precision=precision, exact=exact)
    assert total.dtype == start.dtype and torch.equal(start, before)
    tolerance = max(TOLERANCE[precision], 1e-12 if wide else 1e-5)
    torch.testing.assert_close(total.double(), c - 0.3 * a @ a, rtol=0, atol=tolerance)
    if exact:
        assert torch.equal(total, total.mT)


@pytest.mark.parametrize("exact", [True, False])
def test_two_factors_whose_product_completes_a_symmetric_sum(exact: bool, strips: int) -> None:
    """C - C A with C = P - A P is (I - A) P (I - A), though neither part is symmetric."""
    p, a = draw(8), draw(8, 1)
    c = p - a @ p
    total = symmetric_sum(c, c, a, rate=-1.0, exact=exact)
    move = torch.eye(8, dtype=torch.float64) - a
    torch.testing.assert_close(total, move @ p @ move, rtol=0, atol=1e-12)


def test_every_matrix_has_its_numbers_and_what_does_not_count_is_not_read(strips: int) -> None:
    c, a, b = draw(8), draw(8, 1), draw(8, 1) * 3
    spoiled = c.clone()
    spoiled[1] = math.nan
    spoiled[2, 3, 4] = math.inf
    keep, rate = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in ([0.5, 0.0, 0.0], [2.0, -1.0, 0.0]))
    want = torch.where(keep == 0, 0.0, keep * c) + rate * a @ b
    torch.testing.assert_close(symmetric_sum(spoiled, a, b, keep, rate), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(symmetric_sum(c, a, b, 0.5, rate), 0.5 * c + rate * a @ b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_the_sum_may_go_where_it_begins_or_elsewhere(exact: bool, strips: int) -> None:
    c, a = draw(9), draw(9, 1)
    want = symmetric_sum(c, a, keep=0.5, rate=0.3, exact=exact)
    for start, out in ((c, torch.full_like(c, math.nan)), (own := c.clone(), own)):
        assert symmetric_sum(start, a, keep=0.5, rate=0.3, exact=exact, out=out) is out
        assert torch.equal(out, want)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_means_of_outer_products(precision: Any, dtype: torch.dtype, strips: int) -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    for y in (x, x.mT, x[0, 0]):
        mean, exact = outer_mean(y, precision), y.double().mT @ y.double() / y.shape[-2]
        assert mean.dtype == dtype
        tolerance = max(TOLERANCE[precision], 2e-2 if dtype == torch.bfloat16 else 1e-6)
        torch.testing.assert_close(mean.double(), exact, rtol=tolerance, atol=tolerance)


def test_it_has_a_derivative(strips: int) -> None:
    c, a = draw(4).requires_grad_(), draw(4, 1).requires_grad_()
    keep = torch.tensor([True, True, False])[:, None, None]
    for exact in (True, False):
        assert torch.autograd.gradcheck(lambda c, a: symmetric_sum(c, a, a, keep, 0.5, exact=exact), (c, a))  # noqa: B023


def test_large_matrices_are_cut() -> None:
    """Only where a strip is large enough, over the whole batch."""
    cuts = {(4, 1024): 1, (4, 2048): 2, (4, 3072): 4, (4, 4096): 4, (1, 4096): 2, (32, 1024): 4, (1, 1024): 1}
    for (count, n), strips in cuts.items():
        assert blockwise._strips(count, n) == strips
