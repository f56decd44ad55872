"""Products side by side of a few tokens, which copy no large matrix, are those of many."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from axes.kernels.blocks.products import products
from tests.host import _Operations


@pytest.mark.parametrize(
    ("groups", "rows", "copied"),
    (
        ((((0, 0, 600), (1, 0, 512), (2, 0, 3), (3, 0, 5)), ((4, 0, 40),)), (1120, 40), 2),
        ((((2, 0, 3), (0, 0, 600), (3, 1, 4), (1, 0, 512)), ((3, 0, 1),)), (1120, 1), 0),
        ((((0, 0, 600), (1, 0, 512)), ((4, 0, 40),)), (1112, 40), 0),
        ((((0, 0, 600),),), (608,), 0),
    ),
)
@pytest.mark.parametrize("lead", ((), (3, 1)))
def test_few_tokens(
    lead: tuple[int, ...], groups: tuple[tuple[tuple[int, int, int], ...], ...], rows: tuple[int, ...], copied: int
) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(*lead, 16), [torch.randn(n, 16) for n in (600, 512, 3, 5, 40)]
    want = products(x, weights, groups, rows)
    with torch.no_grad(), _Operations() as asked:
        got = products(x, weights, groups, rows)
    torch.testing.assert_close(got, want)
    largest = [n for n in asked.names if "foreach_copy" in n]
    assert len(largest) == bool(copied)
    many = x.expand(300, *lead, 16)
    with torch.no_grad():
        torch.testing.assert_close(products(many, weights, groups, rows)[0], want[0].expand(300, *want[0].shape))


def test_gradients_go_to_what_asks_for_them_and_from_what_was_used() -> None:
    """Of the input alone, of the matrices alone; of a result that nobody used, zeros for its matrix."""
    torch.manual_seed(0)
    groups, rows = (((0, 0, 3), (1, 0, 5)), ((2, 0, 4),)), (8, 4)
    weights = [torch.randn(n, 6) for n in (3, 5, 4)]
    x, given = torch.randn(7, 6), torch.randn(7, 8)
    alone = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(products(alone, weights, groups, rows)[0], alone, given)
    torch.testing.assert_close(dx, given @ torch.cat(weights[:2]))
    live = [w.clone().requires_grad_() for w in weights]
    made = products(x, live, groups, rows)[0]
    dweights = torch.autograd.grad(made, live, given)
    torch.testing.assert_close(torch.cat(dweights[:2]), given.mT @ x)
    assert dweights[2].shape == (4, 6) and not dweights[2].any()
