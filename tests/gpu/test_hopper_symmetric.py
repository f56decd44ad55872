"""The symmetric kernels on a GPU, Hopper's and Triton's, against float64: every form in which they can be launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core.geometry import FittedFactor  # noqa: E402
from axes.kernels.products import hopper_symmetric  # noqa: E402
from axes.kernels.products.symmetric import symmetric_product  # noqa: E402
from axes.linalg import blockwise, matrix_roots, symmetric  # noqa: E402

if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs Hopper", allow_module_level=True)

HALF, FULL = torch.float16, torch.float32
# shares of the norm: sums in float32 that are cut, results in 16 bits, float32 factors cut to 11 bits
BOUND = {(FULL, HALF): 5e-6, (HALF, HALF): 6e-4, (torch.bfloat16, torch.bfloat16): 5e-3, (FULL, FULL): 2e-3}
SIDES = ((8, 8), (16, 1024), (120, 264), (128, 64), (136, 72), (256, 256), (520, 1032), (1024, 128))


@pytest.fixture(params=["hopper", "triton"])
def kernel(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two kernels multiplies."""
    if request.param == "triton":
        monkeypatch.setattr(hopper_symmetric, "fits", lambda a: False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    return str(request.param)


def draw(*shape: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def mirrored(x: Tensor) -> Tensor:
    return ((x.float() + x.mT.float()) / 2).to(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "result"), [(HALF, HALF), (torch.bfloat16, torch.bfloat16), (HALF, FULL), (FULL, FULL)]
)
@pytest.mark.parametrize(("m", "k"), SIDES)
def test_every_form_equals_float64(dtype: torch.dtype, result: torch.dtype, m: int, k: int, kernel: str) -> None:
    if dtype == FULL and kernel == "triton":
        pytest.skip("16 bits only")
    factors = torch.tensor([[0.5, 2.0], [-1.0, 0.0], [1.0, 1.0]], device="cuda")
    for columns in (False, True) if dtype != FULL else (False,):
        for count in (0, 1, 2):
            for same in (True, False):
                for given in (None, factors):
                    a = draw(3, m, k, dtype=dtype)
                    b = None if same else a * 0.5
                    a, b = (x if x is None or not columns else x.mT.contiguous().mT for x in (a, b))
                    terms = [(x, mirrored(draw(3, m, m, dtype=result))) for x in (2.0, -1.5)[:count]]
                    options: Any = {"alpha": 0.5, "terms": terms, "diagonal": 3.0, "factors": given, "dtype": result}
                    got = symmetric_product(a, b, **options)
                    rates = torch.ones(3, 2, device="cuda") if given is None else given
                    want = 0.5 * rates[:, :1, None] * a.double() @ (a if b is None else b).double().mT
                    want += 3.0 * torch.eye(m, device="cuda", dtype=torch.float64)
                    for place, (x, term) in enumerate(terms):
                        want += (x * rates[:, 1:, None] if place == 0 else x) * term.double()
                    assert torch.equal(got, got.mT) and torch.equal(got, symmetric_product(a, b, **options))
                    bound = BOUND[(result, dtype)]
                    assert (got - want).norm() <= bound * want.norm(), (columns, count, same, given is None)


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_programs_go_through_many_tiles(dtype: torch.dtype) -> None:
    """More tiles than programs, and a ring that turns an odd number of times for each."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    shapes = ((40, 1024, 320, 1), (7, 2048, 264, 2), (150, 520, 72, 0), (900, 136, 64, 1), (1, 4096, 1024, 1))
    for n, m, k, count in shapes:
        a = draw(n, m, k, dtype=dtype)
        terms = [(0.5, mirrored(draw(n, m, m, dtype=dtype))) for _ in range(count)]
        got = symmetric_product(a, terms=terms)
        want = a.double() @ a.double().mT + sum(x * term.double() for x, term in terms)
        assert torch.equal(got, got.mT)
        assert (got - want).norm() <= BOUND[(dtype, dtype)] * want.norm()


def test_a_term_that_does_not_count_is_not_read(kernel: str) -> None:
    for dtype in (HALF, FULL) if kernel == "hopper" else (HALF,):
        a, term = draw(2, 264, 136, dtype=dtype), mirrored(draw(2, 264, 264, dtype=dtype))
        term[1] = torch.nan
        got = symmetric_product(a, terms=((1.0, term),), factors=torch.tensor([[1.0, 1.0], [1.0, 0.0]], device="cuda"))
        assert torch.equal(got[1], symmetric_product(a)[1])
        assert torch.equal(got[0], symmetric_product(a, terms=((1.0, term),))[0])


def test_rounded_sums_take_the_kernel_and_equal_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    c, a = mirrored(draw(4, 2048, 2048)), mirrored(draw(4, 2048, 2048)) / 2048**0.5
    assert matrix_roots.rounded_by_kernel(a, "tf32") and not matrix_roots.rounded_by_kernel(a, "input")
    keep, rate = torch.rand(2, 4, 1, 1, device="cuda").unbind()
    got = [
        blockwise.symmetric_sum(c, a, keep=keep, rate=rate, precision="tf32"),
        blockwise.symmetric_sum(c, a, a, 0.5, -2.0, "tf32", exact=True),
        blockwise.symmetric_sum(None, a[..., :1024].mT, rate=0.3, precision="tf32"),
        matrix_roots.symmetric_product(a[:, :, :512], None, "tf32"),
    ]
    own = c.clone()
    assert torch.equal(blockwise.symmetric_sum(own, a, a, 0.5, -2.0, "tf32", out=own), got[1])
    monkeypatch.setattr(symmetric, "no_kernel", lambda *_, **__: "told so")
    want = [
        blockwise.symmetric_sum(c, a, keep=keep, rate=rate, precision="tf32"),
        blockwise.symmetric_sum(c, a, a, 0.5, -2.0, "tf32", exact=True),
        blockwise.symmetric_sum(None, a[..., :1024].mT, rate=0.3, precision="tf32"),
        matrix_roots.symmetric_product(a[:, :, :512], None, "tf32"),
    ]
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, x.mT)
        assert (x - y).norm() <= BOUND[(FULL, FULL)] * y.norm()


def test_a_fitted_factor_moves_as_in_float64_and_stays_where_its_statistic_is_not_finite() -> None:
    x, p = draw(3, 2048, 1024), mirrored(draw(3, 2048, 2048)) * 1e-3 + torch.eye(2048, device="cuda")
    a = x @ x.mT / 1024
    a[1, 5, 5] = torch.inf
    got, good = FittedFactor(0.1, 1e-3, "tf32").moved(a, p)
    want, _ = FittedFactor(0.1, 1e-3).moved(a.double(), p.double())
    assert good.flatten().tolist() == [True, False, True]
    assert torch.equal(got, got.mT) and torch.equal(got[1], p[1])
    assert (got - want).norm() <= 1e-3 * want.norm()
