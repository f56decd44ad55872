"""Inverse roots against scipy and closed forms, orthonormal columns against Householder's, products of halves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from axes.core.geometry.bregman import is_finite
from axes.errors import AxesError
from axes.linalg import matrix_roots
from axes.linalg.matrix_roots import (
    LEAST_DAMPING,
    PRECISIONS,
    Precision,
    add_product,
    inverse_cholesky,
    largest,
    largest_entry,
    newton_inverse_root,
    newton_schedule,
    orthonormal,
    power_step,
    product,
    symmetric_product,
)

SEEDS = st.integers(0, 2**20)
# rounding of one entry of a product, relative to the product of the norms of its row and column
UNIT: dict[Precision, float] = {"input": 2.0**-22, "bfloat16x3": 2.0**-15, "tf32": 2.0**-10}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rotation(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=generator(seed), dtype=torch.float64)).Q


def spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    q = rotation(len(values), seed)
    return (q * values) @ q.mT


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=SEEDS, m=st.integers(1, 9), k=st.integers(1, 40), n=st.integers(1, 9), batch=st.integers(0, 2))
def test_a_product_keeps_the_bits_that_it_says(
    precision: Precision, dtype: torch.dtype, seed: int, m: int, k: int, n: int, batch: int
) -> None:
    lead = (2,) * batch
    a, b = (torch.randn(*lead, *s, generator=generator(seed), dtype=dtype) for s in ((m, k), (k, n)))
    got = product(a, b, precision)
    assert got.dtype == dtype and got.shape == (*lead, m, n)
    scale = a.double().norm(dim=-1)[..., None] * b.double().norm(dim=-2)[..., None, :]
    assert bool(((got.double() - a.double() @ b.double()).abs() <= UNIT[precision] * scale).all())


@given(seed=SEEDS, bits=st.integers(2, 16))
def test_products_of_short_numbers_are_exact(seed: int, bits: int) -> None:
    """Integers of 16 bits have two bfloat16 halves of 8, and tf32 holds 11; products of halves fit float32 here."""
    top = 2**bits - 1
    a = torch.randint(-top, top + 1, (5, 1), generator=generator(seed)).float()
    b = torch.randint(-3, 4, (1, 5), generator=generator(seed + 1)).float()
    assert torch.equal(product(a, b, "bfloat16x3"), a @ b)
    if bits <= 11:
        assert torch.equal(product(a, b, "tf32"), a @ b)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_symmetric_products(precision: Precision) -> None:
    x = torch.randn(2, 5, 7, generator=generator(0))
    assert gap(symmetric_product(x, None, precision), x.double() @ x.double().mT) < UNIT[precision]
    a = spectrum(torch.linspace(1, 2, 6)).float()
    b = torch.linalg.matrix_power(a, 3)
    assert gap(symmetric_product(a, b, precision), a.double() @ b.double()) < UNIT[precision]


@given(seed=SEEDS, n=st.integers(1, 12), scale=st.floats(-12, 12))
def test_the_size_of_a_matrix_is_a_bound_of_its_eigenvalues(seed: int, n: int, scale: float) -> None:
    values = torch.rand(n, generator=generator(seed), dtype=torch.float64) * 10**scale
    got = float(largest(spectrum(values, seed)))
    assert got == pytest.approx(float((values**8).sum() ** 0.125), rel=1e-6)
    assert float(values.max()) * (1 - 1e-9) <= got <= n**0.125 * float(values.max()) * (1 + 1e-9)
    assert float(largest(torch.zeros(n, n))) == 0


# ---- inverse roots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("low", [1e-7, 1e-4, 1e-2, 0.3])
def test_the_schedule_brings_every_eigenvalue_to_its_root(order: int, low: float) -> None:
    """On the scalars of the interval, in exact arithmetic; and few iterations are needed."""
    schedule = newton_schedule(order, low, 1e-6)
    m = np.geomspace(low, 1, 4001)
    x = np.ones_like(m)
    for a, b in schedule.steps:
        t = a - b * m
        assert t.min() > 0
        x, m = x * t, m * t**order
    error = np.abs(x * np.geomspace(low, 1, 4001) ** (1 / order) - 1).max()
    assert error <= schedule.error + 1e-12 and schedule.error <= 1e-6
    # s = x^{1/order} grows by (a/b)^... at least 1.4 times an iteration, then squares its error
    assert len(schedule.steps) <= 6 + math.log(1 / low) / order / math.log(1.4)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@given(seed=SEEDS, n=st.integers(1, 10), decades=st.floats(0, 5))
def test_newton_roots_against_scipy(order: int, seed: int, n: int, decades: float) -> None:
    a = spectrum(torch.logspace(0, -decades, n, dtype=torch.float64), seed) * 10 ** (seed % 7 - 3)
    shift = 1e-6 * largest(a)
    damped = a + shift * torch.eye(n, dtype=torch.float64)
    expected = scipy.linalg.fractional_matrix_power(damped.numpy(), -1 / order).real
    got = newton_inverse_root(a, order, 1e-6)
    assert gap(got, torch.from_numpy(expected)) < 1e-8
    torch.testing.assert_close(got, got.mT, rtol=0, atol=1e-9 * float(got.norm()))


def test_newton_roots_of_a_batch_are_those_of_its_members() -> None:
    a = torch.stack([spectrum(torch.logspace(0, -i, 6, dtype=torch.float64), i) for i in range(6)]).reshape(2, 3, 6, 6)
    together = newton_inverse_root(a, 4, 1e-4, eps=1e-3)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(together[i, j], newton_inverse_root(a[i, j], 4, 1e-4, eps=1e-3), rtol=1e-9, atol=0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("values", ["rank 1", "steps", "decades", "equal"])
def test_float32_roots_survive_the_smallest_damping(precision: Precision, order: int, values: str) -> None:
    """Eigenvalues below the damping are lost in rounding, and the iteration still converges to the damped root."""
    n = 96
    exact = {
        "rank 1": torch.cat((torch.ones(1), torch.zeros(n - 1))),
        "steps": torch.cat((torch.linspace(1, 0.5, n // 4), torch.zeros(n - n // 4))),
        "decades": torch.logspace(0, -9, n),
        "equal": torch.ones(n),
    }[values].double()
    a = spectrum(exact)
    damping = max(LEAST_DAMPING[precision], 1e-6)
    got = newton_inverse_root(a.float(), order, damping, precision=precision)
    shifted = exact + damping * float((exact**8).sum() ** 0.125)
    # in units of the two roots that an entry of the eigenbasis lies between
    q = rotation(n)
    between = (shifted[:, None] * shifted[None, :]) ** (1 / (2 * order))
    error = (q.mT @ got.double() @ q * between - torch.eye(n, dtype=torch.float64)).norm() / math.sqrt(n)
    assert error < 0.05, error


def test_what_has_no_root_is_not_a_number() -> None:
    good = spectrum(torch.linspace(1, 2, 5, dtype=torch.float64))
    for bad in (good * torch.nan, good * torch.inf, -good, good - 1.5 * torch.eye(5)):
        roots = newton_inverse_root(torch.stack((good, bad)), 4, 1e-6)
        assert bool(roots[0].isfinite().all()) and bool(roots[1].isnan().all())


def test_the_root_of_nothing_is_nothing_and_of_eps_is_eps() -> None:
    empty = torch.zeros(3, 3, dtype=torch.float64)
    assert torch.equal(newton_inverse_root(empty, 4, 1e-6), empty)
    torch.testing.assert_close(newton_inverse_root(empty, 4, 1e-6, eps=16.0), 0.5 * torch.eye(3).double())


def test_roots_that_rounding_cannot_give_are_refused() -> None:
    with pytest.raises(AxesError, match=r"'tf32' damping must be at least 0\.01"):
        newton_inverse_root(torch.eye(3), 4, 1e-4, precision="tf32")
    with pytest.raises(AxesError, match="order must be at least 1"):
        newton_inverse_root(torch.eye(3), 0, 1e-4)


# ---- orthonormal columns ---------------------------------------------------------------------------------------------


@given(seed=SEEDS, n=st.integers(1, 300), decades=st.floats(0, 4))
def test_inverse_cholesky(seed: int, n: int, decades: float) -> None:
    a = spectrum(torch.logspace(0, -decades, n, dtype=torch.float64), seed)
    k = inverse_cholesky(a)
    assert torch.equal(k, k.tril())
    expected = scipy.linalg.solve_triangular(np.linalg.cholesky(a.numpy()), np.eye(n), lower=True)
    assert gap(k, torch.from_numpy(expected)) < 1e-9


def test_inverse_cholesky_of_an_indefinite_matrix_is_not_a_number() -> None:
    a = torch.stack((torch.eye(200), torch.diag(torch.linspace(1, -1, 200))))
    k = inverse_cholesky(a)
    assert torch.equal(k[0], torch.eye(200)) and bool(k[1].isnan().any())


@pytest.mark.parametrize("n", [5, 200, 700])
def test_inverse_cholesky_reads_one_triangle(n: int) -> None:
    a = spectrum(torch.logspace(0, -2, n, dtype=torch.float64))
    upper = a.triu() + torch.full_like(a, torch.nan).tril(-1)
    assert torch.equal(inverse_cholesky(upper), inverse_cholesky(a))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@given(seed=SEEDS, n=st.integers(1, 12), more=st.integers(0, 5), decades=st.floats(0, 5))
def test_orthonormal_columns_against_householder(
    batch: tuple[int, ...], seed: int, n: int, more: int, decades: float
) -> None:
    x = torch.randn(*batch, n + more, n, generator=generator(seed), dtype=torch.float64)
    x = x @ spectrum(torch.logspace(0, -decades, n, dtype=torch.float64), seed)
    q = orthonormal(x)
    torch.testing.assert_close(q.mT @ q, torch.eye(n, dtype=x.dtype).expand(*batch, n, n), rtol=0, atol=1e-12)
    r = q.mT @ x
    assert float(r.tril(-1).norm()) < 1e-11 * float(x.norm())
    assert bool((r.diagonal(dim1=-2, dim2=-1) > 0).all())
    torch.testing.assert_close(q, orthonormal(x, "householder"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_float32_columns_are_orthonormal_to_their_precision(precision: Precision) -> None:
    n, reach = 160, {"input": 4.0, "bfloat16x3": 3.0, "tf32": 1.0}[precision]
    x = rotation(n, 1) @ spectrum(torch.logspace(0, -reach, n, dtype=torch.float64)) * torch.logspace(0, -6, n)
    q = orthonormal(x.float(), "cholesky", precision).double()
    assert float((q.mT @ q - torch.eye(n)).abs().max()) < 8 * UNIT[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("n", [9, 14, 31])
def test_triangles_in_blocks_give_the_same_columns(
    monkeypatch: pytest.MonkeyPatch, n: int, precision: Precision
) -> None:
    """Products with triangles leave out what is zero, or what symmetry tells."""
    x = torch.randn(2, n + 3, n, generator=generator(n)) @ spectrum(torch.linspace(0.5, 1, n)).float()
    whole = orthonormal(x, "cholesky", precision)
    monkeypatch.setattr(matrix_roots, "_WHOLE", 8)
    torch.testing.assert_close(orthonormal(x, "cholesky", precision), whole, rtol=0, atol=8 * UNIT[precision])
    if precision != "tf32":
        assert float((whole.mT @ whole - torch.eye(n)).abs().max()) < 8 * UNIT[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_added_in_place(precision: Precision, dtype: torch.dtype) -> None:
    a, b = (torch.randn(2, *s, generator=generator(0), dtype=dtype) for s in ((5, 7), (7, 3)))
    exact = a.double() @ b.double()
    for keep, rate in ((0.0, 1.0), (0.0, -2.0), (1.0, -1.0), (0.9, 0.1)):
        room = torch.full((2, 6, 4), torch.nan if keep == 0 else 2.0, dtype=dtype)
        total = room[:, 1:, :3]
        assert add_product(total, a, b, keep, rate, precision) is total
        assert gap(total, (2 * keep if keep else 0) + rate * exact) < UNIT[precision]
        assert bool((room[:, 0].isnan() if keep == 0 else room[:, 0] == 2.0).all())


def test_what_is_not_finite_leaves_its_neighbours_alone() -> None:
    x = torch.randn(2, 6, 4, generator=generator(0))
    bad = x.clone()
    bad[1, 2, 3] = torch.nan
    q = orthonormal(bad)
    assert torch.equal(q[0], orthonormal(x)[0]) and bool(q[1].isnan().all())
    a = torch.stack([spectrum(torch.linspace(1, 2, 4), i).float() for i in range(3)])
    a[1, 0, 2], a[2, 1, 1] = torch.nan, torch.inf
    basis = torch.eye(4).expand(3, 4, 4)
    moved = power_step(a, basis)
    assert torch.equal(moved[:1], power_step(a[:1], basis[:1])) and bool(moved[1:].isnan().all())


def test_dependent_columns_have_no_basis() -> None:
    x = torch.randn(2, 6, 4, generator=generator(0))
    x[1, :, 3] = x[1, :, 2]
    x[1, :, 1] = 0
    q = orthonormal(x)
    assert bool(q[0].isfinite().all()) and bool(q[1].isnan().all())


# ---- orthogonal iteration --------------------------------------------------------------------------------------------


@given(seed=SEEDS, n=st.integers(2, 8))
def test_power_steps_converge_to_the_eigenvectors(seed: int, n: int) -> None:
    a = spectrum(2.0 ** torch.arange(n, dtype=torch.float64), seed)
    basis = rotation(n, seed + 1)
    for _ in range(80):
        basis = power_step(a, basis)
    inside = basis.mT @ a @ basis
    torch.testing.assert_close(inside, torch.diag(inside.diagonal()), rtol=0, atol=1e-8 * 2.0**n)


def test_columns_keep_their_places() -> None:
    """A permuted eigenbasis stays permuted, where plain orthogonal iteration would sort it."""
    values = torch.tensor([1.0, 8.0, 2.0, 4.0], dtype=torch.float64)
    q = rotation(4)
    moved = power_step((q * values) @ q.mT, q)
    torch.testing.assert_close(moved, q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_singular_statistic_has_a_basis(precision: Precision) -> None:
    x = torch.randn(24, 3, generator=generator(0))
    basis = rotation(24).float()
    q = power_step(x @ x.mT, basis, "cholesky", precision)
    assert float((q.mT @ q - torch.eye(24)).abs().max()) < 20 * UNIT[precision]


def test_the_basis_of_nothing_stays() -> None:
    q = rotation(5)
    torch.testing.assert_close(power_step(torch.zeros(5, 5, dtype=torch.float64), q), q, rtol=0, atol=1e-14)


def test_products_of_halves_have_derivatives() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    product(a, b, "bfloat16x3").sum().backward()
    assert a.grad is not None and gap(a.grad, b.sum(1).expand(3, 4)) < 1e-2


def test_the_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root of the wrong order, and an iteration cut short, fail what the tests above ask for."""
    a = spectrum(torch.logspace(0, -3, 6, dtype=torch.float64))
    right = newton_inverse_root(a, 4, 1e-6)
    short = newton_schedule(4, 1e-6, 1e-12)
    monkeypatch.setattr(matrix_roots, "newton_schedule", lambda *_: short._replace(steps=short.steps[:-3]))
    cut = newton_inverse_root(a, 4, 1e-6)
    assert bool(cut.isnan().all()) or gap(cut, right) > 1e-4


def test_the_largest_entry_of_either_sign_and_what_is_not_a_number() -> None:
    a = torch.tensor([[[1.0, -3.0], [2.0, 0.5]], [[1.0, 4.0], [-2.0, 0.0]], [[3e38, -3e38], [0.0, 1.0]]])
    assert largest_entry(a).flatten().tolist() == pytest.approx([3.0, 4.0, 3e38])
    assert is_finite(a).flatten().tolist() == [True, True, True]
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = a.clone()
        spoiled[1, 0, 1] = bad
        assert is_finite(spoiled).flatten().tolist() == [True, False, True]


def test_what_a_solver_gives_up_goes_to_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    """As solvers of batches on a GPU do with some matrices; what LAPACK gives up too is an error."""
    some = torch.randn(3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    some = some @ some.mT
    solver, fails = torch.linalg.eigh, [True, False]

    def gives_up(matrix: Tensor) -> Any:
        if fails.pop(0):
            raise torch.linalg.LinAlgError("linalg.eigh: (Batch element 1): The algorithm failed to converge")
        return solver(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    values, vectors = torch.ops.axes.decomposed(some)
    for a, found, basis in zip(some, values, vectors, strict=True):
        assert np.allclose(found, scipy.linalg.eigh(a.numpy(), eigvals_only=True), atol=1e-12)
        assert torch.allclose(basis @ torch.diag(found) @ basis.mT, a, atol=1e-12)
    fails[:] = [True, True]
    with pytest.raises(torch.linalg.LinAlgError, match="element 1"):
        torch.ops.axes.decomposed(some)


@pytest.mark.parametrize("rank", [0, 1, 4, 7])
def test_eigenvectors_of_a_null_space_do_not_depend_on_rounding(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 7, rank, generator=generator, dtype=torch.float64)
    a, noise = x @ x.mT, torch.randn(3, 7, 7, generator=generator, dtype=torch.float64)
    rounded = a + 1e-16 * a.abs().amax((-2, -1), keepdim=True) * (noise + noise.mT)
    one, other = (matrix_roots.eigenvectors(m) for m in (a, rounded))
    eye = torch.eye(7, dtype=torch.float64).expand(3, 7, 7)
    torch.testing.assert_close(one.mT @ one, eye, rtol=0, atol=1e-13)
    turned = one.mT @ a @ one
    torch.testing.assert_close(turned, torch.diag_embed(torch.linalg.eigvalsh(a)), rtol=0, atol=1e-12 * (1 + rank))
    torch.testing.assert_close((one.mT @ other).abs(), eye, rtol=0, atol=1e-9)  # up to signs
    if rank < 6:
        plain = torch.linalg.eigh(a).eigenvectors.mT @ torch.linalg.eigh(rounded).eigenvectors
        assert rank == 0 or (plain.abs() - eye).abs().max() > 1e-3


def test_small_eigenvalues_of_a_full_matrix_are_no_null_space() -> None:
    """In float32 all but the smallest one or two eigenvectors of a square Gaussian's Gram matrix are float64's."""
    g = torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = torch.linalg.eigh(g @ g.mT).eigenvectors
    found = matrix_roots.eigenvectors(g.float() @ g.float().mT).double()
    cosines = (exact * found).sum(0).abs()
    assert cosines[2:].min() > 0.999 and cosines[20:].min() > 1 - 1e-6
    low = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    basis = matrix_roots.eigenvectors(low @ low.mT)[:, :192]  # that of diag(1, ..., n) on what has no data
    inside = basis.mT @ (torch.arange(1.0, 257.0)[:, None] / 256 * basis)
    assert (inside - inside.diagonal().diag()).abs().max() < 1e-5
