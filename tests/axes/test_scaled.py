"""Products that are rounded by themselves, against a product and a cast: values, gradients, what is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from axes.routes.scaled import behind, inner, scaled

HALVES = (torch.bfloat16, torch.float16)
SHAPE = (2, 5, 3, 8)
SHAPES = (SHAPE, (2, 5, 3, 1), (3, 8), (1, 1, 3, 8), (2, 5, 1, 1))


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_()


class Widened(TorchDispatchMode):
    """Whether a float32 tensor of many numbers is made."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        wide = [x.numel() for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.dtype == torch.float32]
        self.most = max(self.most, *wide, 0)
        return out


def both(run: Callable[..., Tensor], given: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    out = run(*given)
    return out.detach(), *torch.autograd.grad(out, given, dy)


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], bound: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scaled_is_a_product_and_a_cast(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, by, dy = draw(SHAPE, dtype, 0), draw(shape, torch.float32, 1), draw(SHAPE, dtype, 2).detach()
    got = both(scaled, [x, by], dy)
    want = both(lambda x, by: (x * by).to(dtype), [x, by], dy)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    close(got, want, 5e-3 if dtype == torch.bfloat16 else 1e-6)  # whose products are rounded before they are added up
    with torch.no_grad():
        assert torch.equal(scaled(x, by), want[0])


def test_numbers_that_need_no_other_dtype_are_torchs() -> None:
    x, y = draw(SHAPE, torch.float32, 0), draw(SHAPE, torch.bfloat16, 1)
    for made in (scaled(x, x), scaled(y, 0.3), scaled(y, torch.tensor(0.3))):
        assert type(made.grad_fn).__name__ == "MulBackward0"
    assert torch.equal(scaled(y, 0.3), y * 0.3)


def test_float16_gradients_below_its_range_are_kept() -> None:
    x, by = torch.full((2, 4), 1e-3, dtype=torch.float16), torch.ones(2, 1, requires_grad=True)
    (found,) = torch.autograd.grad(scaled(x, by), by, torch.full_like(x, 1e-5))
    assert (found - 4e-8).abs().max() < 1e-9


def test_no_copy_of_vectors_is_wide() -> None:
    x, y = draw((2, 5, 3, 64), torch.bfloat16, 0), draw((2, 5, 3, 64), torch.bfloat16, 1)
    by, first = draw((2, 5, 3, 1), torch.float32, 2), draw((2, 1, 3, 64), torch.bfloat16, 3)
    with Widened() as seen:
        for out in (scaled(x, by), inner(x, y), behind(first, x, y, by, 1)):
            torch.autograd.grad(out, [t for t in (x, y, by) if t is not None], torch.ones_like(out), allow_unused=True)
    assert seen.most == by.numel()
    with Widened() as seen:
        _ = x * by
    assert seen.most == x.numel()


def test_inner_products_are_in_float32() -> None:
    x, y, dm = draw(SHAPE, torch.bfloat16, 0), draw(SHAPE, torch.bfloat16, 1), draw((*SHAPE[:-1], 1), torch.float32, 2)
    want = both(lambda x, y: (x.float() * y).sum(-1, keepdim=True), [x, y], dm.detach())
    close(both(inner, [x, y], dm.detach()), want, 5e-3)
    wide = [x.double().detach().requires_grad_(), y.double().detach().requires_grad_()]
    exact = both(lambda x, y: (x * y).sum(-1, keepdim=True), wide, dm.detach().double())
    close(both(inner, wide, dm.detach().double()), exact, 0.0)


@pytest.mark.parametrize("time", (1, 2))
@pytest.mark.parametrize("length", (1, 2, 5))
@pytest.mark.parametrize("dtype", (*HALVES, torch.float64), ids=str)
def test_behind_is_the_output_of_the_token_before(dtype: torch.dtype, length: int, time: int) -> None:
    shape = (2, length, 3, 8) if time == 1 else (2, 3, length, 8)
    one, numbers = list(shape), (*shape[:-1], 1)
    one[time] = 1
    wide = torch.promote_types(dtype, torch.float32)
    given = [draw(tuple(one), dtype, 0), draw(shape, dtype, 1), draw(shape, dtype, 2), draw(numbers, wide, 3)]
    dy = draw(shape, dtype, 4).detach()

    def by_tokens(first: Tensor, out: Tensor, x: Tensor, by: Tensor) -> Tensor:
        made, before = [], first.select(time, 0)
        for t in range(length):
            made.append(before.to(wide) + x.select(time, t).to(wide) * by.select(time, t))
            before = out.select(time, t)
        return torch.stack(made, time) + 0.0 * out.sum()  # which nobody hears of one token

    want = both(by_tokens, given, dy.to(wide))
    got = both(lambda *given: behind(*given, time), given, dy)
    close(got, (want[0].to(dtype), *want[1:]), 1e-12 if dtype == torch.float64 else 6e-3)
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


def test_second_derivatives_are_torchs() -> None:
    x, by = draw(SHAPE, torch.bfloat16, 0), draw((3, 8), torch.float32, 1)
    firsts, out = draw((2, 1, 3, 8), torch.bfloat16, 2), draw(SHAPE, torch.bfloat16, 3)

    def twice(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        made = torch.autograd.grad(run().float().square().sum(), (x, by), create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in made), (x, by))

    close(twice(lambda: scaled(x, by)), twice(lambda: (x * by).to(x.dtype)), 1e-2)
    before = torch.cat((firsts, out), 1).narrow(1, 0, 5)
    want = twice(lambda: before + (x * by).to(x.dtype))
    close(twice(lambda: behind(firsts, out, x, by.expand(SHAPE), 1)), want, 1e-2)


def test_transforms_see_two_operations() -> None:
    x, by = draw(SHAPE, torch.bfloat16, 0).detach(), draw((2, 5, 3, 1), torch.float32, 1).detach()
    assert torch.equal(torch.vmap(scaled)(x, by), (x * by).to(x.dtype))
    assert torch.equal(torch.func.grad(lambda b: scaled(x, b).float().sum())(by).sign(), x.float().sum(-1, True).sign())


@pytest.mark.parametrize("dtype", HALVES)
def test_tangents_go_through_torchs_operations(dtype: torch.dtype) -> None:
    x, tangent, by = (
        draw(SHAPE, dtype, 0).detach(),
        draw(SHAPE, dtype, 1).detach(),
        draw(SHAPES[1], torch.float32, 2).detach(),
    )
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(scaled(forward_ad.make_dual(x, tangent), by)).tangent
    torch.testing.assert_close(found, (tangent * by).to(dtype))
