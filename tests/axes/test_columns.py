"""Products of matrices that are stored by columns: the same numbers, stored alike."""

import pytest
import torch

from axes.linalg.columns import by_columns, outer, product, product_of_vector


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_results_are_stored_as_the_matrix_is(batch: tuple[int, ...]) -> None:
    streams, mix, v = (torch.randn(*batch, *shape, dtype=torch.float64) for shape in ((4, 64), (4, 4), (4,)))
    x, y = streams.mT, torch.randn(*batch, 64, dtype=torch.float64)
    assert by_columns(x) and not by_columns(streams) and not by_columns(x.contiguous())
    rows = x.contiguous()
    for got, want in (
        (product(x, mix), rows @ mix),
        (product_of_vector(x, v), (rows @ v[..., None])[..., 0]),
        (outer(y, v), y[..., :, None] * v[..., None, :]),
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    assert product(x, mix).mT.is_contiguous() and outer(y, v).mT.is_contiguous()
    assert product(rows, mix).is_contiguous() and outer(v, v).is_contiguous()
    assert torch.equal(outer(y, v), y[..., :, None] * v[..., None, :])


def test_what_is_broadcast() -> None:
    x, v, mix = torch.randn(2, 3, 4, 64).mT, torch.randn(4), torch.randn(4, 4)
    torch.testing.assert_close(product(x, mix), x.contiguous() @ mix)
    torch.testing.assert_close(product_of_vector(x, v), x.contiguous() @ v)
    assert outer(torch.randn(64).expand(2, 64), v).shape == (2, 64, 4)


def test_derivatives() -> None:
    streams, mix, v = (torch.randn(2, *s, dtype=torch.float64, requires_grad=True) for s in ((2, 9), (2, 2), (2,)))
    assert torch.autograd.gradcheck(lambda x, b: product(x.mT, b), (streams, mix))
    assert torch.autograd.gradcheck(lambda x, b: product_of_vector(x.mT, b), (streams, v))
    assert torch.autograd.gradgradcheck(lambda x, b: outer(x[:, 0], b), (streams, v))
