"""What many sublayers do to streams that no sublayer writes to: the gains that each set of matrices promises."""

import pytest
import torch
from torch import Tensor

from axes.depth import MHC, DepthMixer, HyperConnections, JPmHC, JPmHCMeanPreserving, MHCLite

N, D = 4, 8


def product(mixers: list[DepthMixer], dtype: torch.dtype) -> Tensor:
    """The matrix that 64 writes of nothing apply to the streams, by sending unit streams through them.

    d = n, so that stream j of the input is e_j and stream i of the output is row i of the product.
    """
    x = torch.eye(N, dtype=dtype)
    nothing = torch.zeros(N, dtype=dtype)
    for m in mixers:
        x = m.write(x, nothing, m.read(x)[1])
    return x.double()


def stack(cls: type[DepthMixer], layers: int, spread: float) -> list[DepthMixer]:
    mixers = [cls(N, l, N) for l in range(layers)]
    with torch.no_grad():
        for m in mixers:
            m.bias[-24 if isinstance(m, MHCLite) else -N * N :].normal_(0, spread)
    return mixers


@pytest.mark.parametrize(("spread", "columns"), [(0.5, 5e-11), (1.0, 8e-4), (2.0, 4e-2)])
def test_sinkhorn_is_exact_on_rows_and_within_the_table_on_columns(spread: float, columns: float) -> None:
    link = MHC.update.monoid.link
    r = link.primal(spread * torch.randn(2000, N, N, dtype=torch.float64))
    assert (r.sum(-1) - 1).abs().amax() < 1e-15 * 4
    assert (r.sum(-2) - 1).abs().amax() <= 2 * columns
    fast = link.primal(spread * torch.randn(2000, N, N))
    assert (fast.sum(-1) - 1).abs().amax() < 2e-6


@pytest.mark.parametrize("cls", [MHC, MHCLite, JPmHC, JPmHCMeanPreserving], ids=lambda c: c.name)
def test_sixty_four_sublayers_stay_on_their_set(cls: type[DepthMixer]) -> None:
    spread = {MHC: 0.5, MHCLite: 10.0, JPmHC: 10.0, JPmHCMeanPreserving: 10.0}[cls]
    total = product(stack(cls, 64, spread), torch.float32)
    if cls is not JPmHC:
        torch.testing.assert_close(total.sum(-1), torch.ones(N, dtype=torch.float64), rtol=0, atol=1e-5)
        torch.testing.assert_close(total.sum(-2), torch.ones(N, dtype=torch.float64), rtol=0, atol=1e-5)
    if cls in (MHC, MHCLite):
        assert total.min() >= 0
    else:
        torch.testing.assert_close(total @ total.mT, torch.eye(N, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("off", "power"), [(2.0, 64), (4.0, 64), (6.0, 64), (8.0, 64), (8.0, 128)])
def test_differences_shrink_by_the_second_eigenvalue(off: float, power: int) -> None:
    mixers = [MHC(N, l, N, dtype=torch.float64) for l in range(power)]
    with torch.no_grad():
        for m in mixers:
            m.bias[2 * N :] = (-off * (1 - torch.eye(N, dtype=torch.float64))).flatten()
    diagonal = 1 / (1 + (N - 1) * torch.exp(torch.tensor(-off, dtype=torch.float64)))
    second = (N * diagonal - 1) / (N - 1)
    centre = torch.eye(N, dtype=torch.float64) - 1 / N
    gain = torch.linalg.matrix_norm(centre @ product(mixers, torch.float64) @ centre, 2)
    torch.testing.assert_close(gain, second**power, rtol=1e-6, atol=1e-15)
    if off == 8.0 and power == 128:
        assert abs(float(gain.detach()) - 0.842) < 1e-3


@pytest.mark.parametrize("cls", [MHC, JPmHCMeanPreserving], ids=lambda c: c.name)
@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16], ids=str)
def test_the_mixing_matrix_stays_in_float32(cls: type[DepthMixer], param: torch.dtype) -> None:
    """Streams in bfloat16. Rounding R near the identity biases every row sum the same way: 64 sublayers gain 6 %."""
    mixers = [cls(D, l, N, dtype=param) for l in range(64)]
    matrices = []
    for m in mixers:
        x = torch.randn(3, N, D, dtype=torch.bfloat16)
        seen, coefficients = m.read(x)
        assert seen.dtype == torch.bfloat16 and m.write(x, seen, coefficients).dtype == torch.bfloat16
        element = m.update.monoid.element(coefficients.signal, 1.0, x.float())
        assert element.dense is not None and element.dense.dtype == torch.float32
        matrices.append(element.dense[0].mT)
    sums, rounded = torch.ones(N, dtype=torch.float64), torch.ones(N, dtype=torch.float64)
    for r in matrices:
        sums, rounded = r.double() @ sums, r.bfloat16().double() @ rounded
    assert (sums - 1).abs().amax() < 1e-3
    if cls is MHC:
        assert (rounded - 1).abs().amax() > 5e-2


def test_the_write_multiplies_before_it_rounds() -> None:
    """One bfloat16 write equals the float32 formula rounded once at the end."""
    m = MHC(D, 1, N)
    torch.nn.init.normal_(m.bias)
    x, y = torch.randn(6, N, D, dtype=torch.bfloat16), torch.randn(6, D, dtype=torch.bfloat16)
    coefficients = m.read(x)[1]
    r = m.update.monoid.link.primal(coefficients.signal["mix"])
    written = torch.einsum("...i,...d->...id", coefficients.signal["k"], y.float())
    exact = torch.einsum("...ij,...jd->...id", r, x.float()) + written
    error = (m.write(x, y, coefficients).float() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + 1e-6).all())


def test_unconstrained_products_are_not_bounded() -> None:
    """The contrast: hyper-connections a little off the identity gain or lose without limit."""
    mixers = [HyperConnections(N, l, N, dtype=torch.float64) for l in range(64)]
    with torch.no_grad():
        for m in mixers:
            m.rates["mix"].add_(0.3 * torch.randn(N, N))
    assert torch.linalg.matrix_norm(product(mixers, torch.float64), 2) > 10
