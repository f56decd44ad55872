"""Division by a mass, and vectors times numbers, against float64 of torch, and twice the same bits."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core.memory import normalised  # noqa: E402
from axes.kernels.rows.mass import over_mass  # noqa: E402
from axes.routes.scaled import scaled  # noqa: E402

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("floor", (0.0, 0.5))
@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 100, 3, 77), (8, 1024, 16, 128), (1, 333, 2, 256)))
def test_equals_float64_and_repeats(dtype: torch.dtype, floor: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator("cuda").manual_seed(shape[-1])
    y, along = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(2))
    mass = torch.rand(*shape[:-1], 1, generator=generator, device="cuda").add(0.1).to(dtype)
    mass[:, ::7] *= -1
    mass[:, :1] = 0
    wide = [x.double().requires_grad_() for x in (y, mass)]
    wanted = normalised(*wide, floor)
    exact = (wanted.detach(), *torch.autograd.grad(wanted, wide, along.double()))
    leaves = [x.requires_grad_() for x in (y, mass)]
    made = []
    for _ in range(2):
        got = over_mass(*leaves, floor)
        made.append((got.detach(), *torch.autograd.grad(got, leaves, along)))
    for one, other, reference in zip(*made, exact, strict=True):
        assert torch.equal(one, other)
        assert (one - reference).norm() <= CLOSE[dtype] * reference.norm().clamp_min(1e-6)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("of", ((3, 100, 5, 1), (3, 100, 5, 96), (5, 1), (5, 96), (1, 1, 1, 96)), ids=str)
@pytest.mark.parametrize("turned", (False, True))
def test_scaled_vectors_equal_float64_and_repeat(dtype: torch.dtype, of: tuple[int, ...], turned: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(len(of))
    x, dy = (torch.randn(3, 100, 5, 96, generator=generator, device="cuda").to(dtype) for _ in range(2))
    by = torch.randn(of, generator=generator, device="cuda")
    if turned:
        x, dy = (z.transpose(1, 3).contiguous().transpose(1, 3) for z in (x, dy))
    wide = [z.double().requires_grad_() for z in (x, by)]
    exact = (wide[0] * wide[1], *torch.autograd.grad(wide[0] * wide[1], wide, dy.double()))
    leaves = [z.requires_grad_() for z in (x, by)]
    made = []
    for _ in range(2):
        y = scaled(*leaves)
        made.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
    for one, other, reference, like in zip(*made, exact, (x, *leaves), strict=True):
        assert torch.equal(one, other) and one.dtype == like.dtype and one.shape == like.shape
        assert (one - reference).norm() <= CLOSE[dtype] * reference.norm()
    y = scaled(*leaves)  # a second derivative is torch's
    (dx,) = torch.autograd.grad(y, leaves[0], dy, create_graph=True)
    (again,) = torch.autograd.grad(dx, leaves[1], dy)
    want = torch.autograd.grad(
        torch.autograd.grad(wide[0] * wide[1], wide[0], dy.double(), create_graph=True)[0], wide[1], dy.double()
    )[0]
    assert (again - want).norm() <= CLOSE[dtype] * want.norm()
