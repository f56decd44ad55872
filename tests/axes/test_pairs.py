"""Pairs of a chunk whose key entries have gates of their own, by borders of halves: the formula, both derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axes.routes import one_state
from axes.routes.one_state import decays


def draw(size: int, *more: int) -> Tensor:
    generator = torch.Generator().manual_seed(size + sum(more))
    return torch.randn(2, size, 3, dtype=torch.float64, generator=generator)


def formula(gate: Tensor, readers: Tensor, writers: Tensor, before: bool) -> Tensor:
    """sum_d x_td w_sd times the gates behind s up to t, or up to t - 1, multiplied one by one."""
    size, rows = gate.shape[1], []
    for t in range(size):
        row = [torch.zeros_like(gate[:, 0, 0])] * size
        for s in range(t + int(not before)):
            left = torch.ones_like(gate[:, 0])
            for r in range(s + 1, t + int(not before)):
                left = left * gate[:, r].exp()
            row[s] = (readers[:, t] * left * writers[:, s]).sum(-1)
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_pairs_are_those_of_the_formula(size: int, before: bool) -> None:
    gate = (-2 * draw(size).abs()).requires_grad_()
    given = gate, draw(size, 1).requires_grad_(), draw(size, 2).requires_grad_()

    def run(gate: Tensor, readers: Tensor, writers: Tensor) -> Tensor:
        return decays(gate, gate).scores(readers, writers, before)

    got, want = run(*given), formula(*given, before)
    assert type(got.grad_fn).__name__ == "ViewBackward0" and "_Pairs" in str(got.grad_fn.next_functions)  # type: ignore[union-attr]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    if size < 4:  # there may be no gate between two tokens
        return
    upstream = draw(size, 3)[:, :, :1] * draw(size, 4)[:, :, 0][:, None]
    found, expected = (torch.autograd.grad(y, given, upstream) for y in (got, want))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


def test_a_gate_that_closes_costs_the_pairs_beside_it_no_digits() -> None:
    gate = -draw(8).float().abs()
    gate[:, 3] = one_state.floor(gate.dtype)
    readers, writers = draw(8, 1).float(), draw(8, 2).float()
    got = decays(gate, gate).scores(readers, writers)
    want = formula(*(x.double() for x in (gate, readers, writers)), False)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert not got[:, 3:, :3].any()
