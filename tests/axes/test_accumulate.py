"""The sum of outer products against its definition, its gradients, its dtypes, and who computes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axes.linalg.accumulate import no_kernel, outer_sum


def loop(u: Tensor, k: Tensor, weight: Tensor, start: Tensor, decay: Tensor) -> Tensor:
    s = decay[..., None, None] * start
    for t in range(u.shape[-2]):
        s = s + weight[..., t, None, None] * u[..., t, :, None] * k[..., t, None, :]
    return s


def draw(*batch: int, length: int = 7) -> tuple[Tensor, ...]:
    shapes = ((length, 3), (length, 5), (length,), (3, 5), ())
    return tuple(torch.randn((*batch, *shape), dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("batch", ((), (2,), (2, 3)))
@pytest.mark.parametrize("length", (0, 1, 7))
def test_equals_the_loop(batch: tuple[int, ...], length: int) -> None:
    u, k, weight, start, decay = draw(*batch, length=length)
    torch.testing.assert_close(outer_sum(u, k, weight, start, decay), loop(u, k, weight, start, decay))
    one, nothing = torch.ones_like(weight), torch.zeros_like(start)
    torch.testing.assert_close(outer_sum(u, k), loop(u, k, one, nothing, decay))
    torch.testing.assert_close(outer_sum(u, k, start=start), loop(u, k, one, start, torch.ones_like(decay)))
    square = outer_sum(u)
    torch.testing.assert_close(square, loop(u, u, one, torch.zeros_like(square), decay))


def test_derivatives() -> None:
    inputs = [x.requires_grad_() for x in draw(2)]
    assert torch.autograd.gradcheck(outer_sum, inputs)
    assert torch.autograd.gradgradcheck(outer_sum, inputs)


def test_dtypes() -> None:
    """16-bit numbers are widened before they are multiplied, under autocast too."""
    u = torch.randn(50, 4).bfloat16()
    want = u.double().mT @ u.double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = outer_sum(u)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)
    assert outer_sum(u.double()).dtype == outer_sum(u, u.double()).dtype == torch.float64


def test_statistics_are_this_sum() -> None:
    """Linear("left") and Linear("right") of a gradient, and the mean of k k^T over examples."""
    from axes.core.costs import Linear

    g = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(outer_sum(g.mT), Linear("left").drive(g))
    torch.testing.assert_close(outer_sum(g), Linear("right").drive(g))
    rows = torch.stack([Linear("key").drive(g, {"k": row}) for row in g])
    torch.testing.assert_close(outer_sum(g), rows.sum(0))


def test_who_computes_it() -> None:
    for x in (torch.empty(100, 32), torch.empty(10_000, 1024, device="meta", dtype=torch.bfloat16)):
        assert "not a GPU" in str(no_kernel(x))
