"""Kernels of rows, forward and backward, against float64 of torch: division by a mass, a gated half, scaled vectors."""

from __future__ import annotations

import pytest
import torch

from axes.errors import ShapeError
from axes.kernels.rows.gated import gated
from axes.kernels.rows.mass import over_mass
from tests.interpreter import interpret

KERNEL = """
import torch
from axes.core.memory import normalised
from axes.kernels.rows.mass import over_mass
torch.manual_seed(0)
close = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
for shape in ((1, 1, 1, 1), (2, 3, 2, 5), (1, 70, 2, 64), (1, 3, 1, 200)):
    for dtype, bound in close.items():
        for floor in (0.0, 1.0):
            y = torch.randn(shape).to(dtype)
            mass = torch.randn(*shape[:-1], 1).to(dtype)
            mass[:, 0] = 0  # nothing was written yet
            if shape[1] > 2:
                mass[:, 1] = -3.0
            along = torch.randn(shape).to(dtype)
            leaves = [x.requires_grad_() for x in (y, mass)]
            wide = [x.detach().double().requires_grad_() for x in leaves]
            made, wanted = over_mass(*leaves, floor), normalised(*wide, floor)
            got = made, *torch.autograd.grad(made, leaves, along)
            want = wanted, *torch.autograd.grad(wanted, wide, along.double())
            for a, b, like in zip(got, want, (y, y, mass)):
                assert a.dtype == like.dtype and a.shape == like.shape
                assert torch.isfinite(b).all()
                error = (a - b).abs().max() / b.abs().max().clamp_min(1e-3)
                assert error <= bound, (shape, dtype, floor, error)
# nothing is swallowed, and an empty memory is zero whatever was read
y, mass = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3.0, 4.0]]), torch.tensor([[0.0], [2.0], [float("nan")]])
for floor in (0.0, 1.0):
    torch.testing.assert_close(over_mass(y, mass, floor), normalised(y, mass, floor), equal_nan=True)
assert over_mass(torch.zeros(0, 4), torch.zeros(0, 1)).shape == (0, 4)
"""


SCALED = """
import torch
from axes.kernels.rows.scaled import fits, scale, scale_backward, whole
torch.manual_seed(0)
close = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
shapes = ((2, 5, 3, 8), (2, 5, 3, 1)), ((2, 5, 3, 8), (2, 5, 3, 8)), ((2, 5, 3, 8), (3, 1)), ((2, 5, 3, 8), (3, 8)), \
    ((2, 5, 3, 8), (2, 1, 1, 8)), ((70, 100), (70, 1)), ((3, 5, 100), (3, 5, 1)), ((7,), (1,)), ((2, 3, 1), (2, 3, 1))

def turned(x):  # the same numbers in the other order of memory
    return x.permute(*range(x.ndim - 1, -1, -1)).contiguous().permute(*range(x.ndim - 1, -1, -1))

for shape, of in shapes:
    for dtype, bound in close.items():
        for laid in (lambda x: x, turned, lambda x: x[:1].expand(x.shape)):
            x, dy, by = laid(torch.randn(shape).to(dtype)), laid(torch.randn(shape).to(dtype)), laid(torch.randn(of))
            made, want = scale(x, by), x.double() * by
            assert made.dtype == dtype and made.shape == x.shape and made.is_contiguous()
            assert (made - want).abs().max() <= bound * want.abs().max(), (shape, of, dtype)
            assert whole(x, by) == (of in (shape, (*shape[:-1], 1)))
            if not whole(x, by):
                continue
            dx, dby = scale_backward(dy, x, by, True, True)
            assert dx.dtype == dtype and dx.shape == x.shape and dby.dtype == by.dtype and dby.shape == by.shape
            want, exact = dy.double() * by, (dy.double() * x.double()).sum_to_size(by.shape)
            assert (dx - want).abs().max() <= bound * want.abs().max()
            assert (dby - exact).abs().max() <= 1e-5 * exact.abs().max()  # of 16 bits too: nothing is rounded before
            assert scale_backward(dy, x, by, False, True)[0] is None
            assert torch.equal(scale_backward(dy, x, by, True, False)[0], dx)
assert not fits(x, by)  # on a CPU torch multiplies
"""


GATED = """
import torch
from axes.kernels.rows.gated import gated
torch.manual_seed(0)
close = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
for shape in ((1, 32), (3, 5, 96), (50, 128)):  # the last is more than a program's
    for dtype, bound in close.items():
        z = torch.randn(shape).to(dtype).requires_grad_()
        wide = z.detach().double().requires_grad_()
        g, h = wide.chunk(2, -1)
        made, wanted = gated(z), torch.nn.functional.silu(g) * h
        along = torch.randn(wanted.shape).to(dtype)
        (dz,), (exact,) = torch.autograd.grad(made, z, along), torch.autograd.grad(wanted, wide, along.double())
        for got, want in ((made, wanted), (dz, exact)):
            assert got.dtype == dtype and (got - want).abs().max() <= bound * want.abs().max(), (shape, dtype)
"""


ASIDE = """
import math, torch
from axes.kernels.rows.aside import fits, set_aside
torch.manual_seed(0)
inf = math.inf
layouts = (lambda x: x, lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2),
           lambda x: torch.stack([x, x], -2)[..., 1, :], lambda x: x[:1].expand(x.shape))
for i, shape in enumerate(((2, 3, 50, 8), (1, 1, 1, 1), (2, 3, 7, 100), (5, 1), (3, 5, 64), (2, 2, 1500, 1))):
    for j, laid in enumerate(layouts):
        dtype, gate = (torch.float32, torch.float16, torch.bfloat16)[(i + j) % 3], (i + j) % 2 == 1
        x = torch.randn(shape).to(dtype)
        for value in (math.nan, inf, -inf):
            x.view(-1)[torch.randint(x.numel(), (max(x.numel() // 40, 1),))] = value
        x = laid(x).requires_grad_()
        made, bad = set_aside(x, gate)
        fine = x.isfinite() | (gate & (x == -inf))
        assert torch.equal(made, torch.where(fine, x, 0.0)) and made.dtype == dtype
        assert torch.equal(bad, ~fine.all(-1)) and bad.dtype == torch.bool and not bad.requires_grad
        along = torch.randn(shape).to(dtype)
        assert torch.equal(torch.autograd.grad(made, x, along)[0], along)
        orders = sorted(range(x.ndim - 1), key=x.stride), sorted(range(x.ndim - 1), key=made.stride)
        assert 0 in x.stride() or 1 in shape or orders[0] == orders[1]  # no kernel behind it copies anew
assert not fits(x)  # on a CPU torch does it
"""


def test_what_is_not_finite_is_set_aside_and_known() -> None:
    interpret(ASIDE)


def test_scaled_vectors_and_both_gradients_equal_float64() -> None:
    interpret(SCALED)


def test_the_gated_half_equals_float64() -> None:
    interpret(GATED)


def test_a_gated_half_has_groups_of_columns() -> None:
    for shape in ((3, 40), (0, 32)):
        with pytest.raises(ShapeError, match="H a multiple of 16"):
            gated(torch.zeros(shape))


def test_the_kernel_equals_torch_in_float64() -> None:
    interpret(KERNEL)


def test_bad_shapes_are_explained() -> None:
    for y, mass in ((torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 300), torch.zeros(2, 1))):
        with pytest.raises(ShapeError, match=r"D up to 256, and mass \(\.\.\., 1\)"):
            over_mass(y, mass)
