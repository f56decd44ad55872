"""Gradients that are not finite are found in every dtype and layout, and finite ones are never taken for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import NotFiniteError
from axes.optim.engine import gradients as asked
from axes.optim.engine.finite import Look

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
LAYOUTS = ["contiguous", "transposed", "strided", "expanded"]


def gradient(layout: str, dtype: torch.dtype, value: float) -> Tensor:
    """A gradient (24, 40) of one value."""
    if layout == "transposed":
        return torch.full((40, 24), value, dtype=dtype).mT
    if layout == "strided":
        return torch.full((24, 80), value, dtype=dtype)[:, ::2]
    if layout == "expanded":
        return torch.full((24, 1), value, dtype=dtype).expand(24, 40)
    return torch.full((24, 40), value, dtype=dtype)


def stepped(gradients: list[Tensor]) -> list[nn.Parameter]:
    ps = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in gradients]
    for p, g in zip(ps, gradients, strict=True):
        p.grad = g
    optim.SGD(ps, lr=1e-3).step()
    return ps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_squares_that_overflow_are_no_infinities(dtype: torch.dtype, layout: str) -> None:
    for value in (0.5 * torch.finfo(dtype).max, -0.5 * torch.finfo(dtype).max):
        g = gradient(layout, dtype, value)
        assert not bool(torch.isfinite(g.sum()))
        (p,) = stepped([g])
        assert bool(torch.isfinite(p).all()) and bool((p != 0).all())


@pytest.mark.parametrize("bad", [[float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_entry_is_found(dtype: torch.dtype, layout: str, bad: list[Any]) -> None:
    last = gradient(layout, dtype, 1.0)
    for i, x in enumerate(bad):
        last[20, i] = x if not dtype.is_complex else complex(1.0, x)
    with pytest.raises(NotFiniteError, match="not finite"):
        stepped([torch.ones(3, dtype=dtype), last])


def test_gradients_of_several_dtypes_are_looked_at_together() -> None:
    several = [torch.ones(5, dtype=dtype) for dtype in DTYPES]
    assert all(bool((p != 0).all()) for p in stepped(several))
    for g in several:
        g[2] = float("nan")
        with pytest.raises(NotFiniteError, match="not finite"):
            stepped(several)
        g[2] = 1.0


def test_infinities_of_several_gradients_do_not_cancel() -> None:
    with pytest.raises(NotFiniteError, match="not finite"):
        stepped([torch.full((4,), float("inf")), torch.full((4,), -float("inf"))])


def test_norms_tell_what_sums_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in all dtypes of gradients: none missed, and no doubt where norms alone are large for the dtype."""
    monkeypatch.setattr(asked, "_ON_CPU", lambda x: False)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        gradients = [torch.full((5, 3), 4e3, dtype=dtype) for _ in range(8)]  # whose norms add up to 124,000
        assert not Look().doubtful(gradients)
        for bad in (torch.nan, torch.inf, -torch.inf):
            gradients[6][4, 1] = bad
            assert Look().doubtful(gradients), (dtype, bad)
            assert Look().doubtful([*gradients, torch.full((2,), torch.inf), torch.full((2,), -torch.inf)])
        assert Look().doubtful([torch.ones(3), gradients[6]])  # of several dtypes


def test_which_gradients_are_added_up_together_follows_their_shapes() -> None:
    look, shapes = Look(), [(4, 6), (8, 3), (4, 6), (24,), (8, 3), (100, 100), ()]
    others = [(8, 3), (4, 6), (24,), (2, 12), (2, 12), (100, 100), ()]  # as many entries each
    for these in (shapes, others, shapes, shapes[:3]):
        gradients = [torch.ones(s) for s in these]
        assert not look.doubtful(gradients)
        for g in gradients:
            g.view(-1)[-1] = float("nan")
            assert look.doubtful(gradients)
            g.view(-1)[-1] = 1.0
