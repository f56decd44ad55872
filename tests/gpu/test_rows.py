"""Division by a mass, against float64 of torch, and twice the same bits."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core.memory import normalised  # noqa: E402
from axes.kernels.rows.mass import over_mass  # noqa: E402

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
