"""Products of one input with several matrices on a GPU: gradients of float32 matrices are not rounded to 16 bits."""

from __future__ import annotations

import pytest
import torch

from axes.kernels.blocks.products import products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_float32_matrices_are_sums_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 200, 96, device="cuda").to(dtype).requires_grad_()
    weights = [torch.randn(n, 96, device="cuda").requires_grad_() for n in (64, 40, 8)]
    groups = (((0, 0, 64), (2, 0, 8)), ((1, 0, 40),))
    made = products(x, weights, groups, (80, 40))
    given = [torch.randn_like(y) for y in made]
    dx, *found = torch.autograd.grad(made, [x, *weights], given)
    first, second = (g.double().flatten(0, 1) for g in given)
    tokens = x.detach().double().flatten(0, 1)
    wanted = [first[:, :64].mT @ tokens, second.mT @ tokens, first[:, 64:72].mT @ tokens]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 1e-5 * want.norm()
    whole = [w.detach().to(dtype).double() for w in weights]
    back = first[:, :64] @ whole[0] + first[:, 64:72] @ whole[2] + second @ whole[1]
    assert (dx.flatten(0, 1) - back).norm() <= 2e-2 * back.norm()
