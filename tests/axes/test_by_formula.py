"""Derivatives by a formula, of links and of matrices times vectors, are those of autograd's own operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from axes.core.geometry import Entropic, Geometry, Lq, Spectral, spectral
from axes.routes.each import Each, times

LINKS = {
    "fourth power": Lq(4.0),
    "third power": Lq(3.0),
    "rows": Entropic("row", None),
    "rows of one": Entropic("row"),
    "columns": Entropic("column"),
    "whole": Entropic("whole"),
}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _derivatives(f: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The value, what it asks of x, and what that asks of x and of what was asked."""
    x = x.clone().requires_grad_()
    asked = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view_as(x).requires_grad_()
    value = f(x)
    (first,) = torch.autograd.grad(value, x, asked, create_graph=True)
    return [value, first, *torch.autograd.grad((first * asked.sin()).sum(), (x, asked))]


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30])
def test_a_link_by_formula_is_the_link(name: str, size: float) -> None:
    h: Geometry = LINKS[name]
    x = size * _drawn(2, 3, 5, 4)
    x[0, 0, 0] = 0.0
    plain, by_formula = _derivatives(h.primal, x), _derivatives(h.primal_by_formula, x)
    for a, b in zip(plain, by_formula, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12 * float(a.detach().abs().max()))
    (once,) = torch.autograd.grad(h.primal_by_formula(y := x.requires_grad_()).sin().sum(), y)
    (want,) = torch.autograd.grad(h.primal(y).sin().sum(), y)
    torch.testing.assert_close(once, want, rtol=1e-12, atol=1e-12)


def test_a_formula_that_errs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared above is not compared with itself: a wrong length of the step along W is another gradient."""
    x = _drawn(3, 5, 4).requires_grad_()
    (want,) = torch.autograd.grad(Lq(4.0).primal(x).sin().sum(), x)
    plain = torch.addcmul
    monkeypatch.setattr(torch, "addcmul", lambda x, a, b, value=1: plain(x, a, b, value=1.01 * value))
    (wrong,) = torch.autograd.grad(Lq(4.0).primal_by_formula(x).sin().sum(), x)
    assert (wrong - want).norm() > 1e-4 * want.norm()


@pytest.mark.parametrize("shared", [False, True])
def test_matrices_times_vectors(shared: bool) -> None:
    w = _drawn(2, 1 if shared else 3, 5, 4).requires_grad_()
    x = _drawn(1 if shared else 2, 3, 4).requires_grad_()
    torch.testing.assert_close(times(w, x), (w @ x[..., None])[..., 0], rtol=0, atol=1e-14)
    torch.testing.assert_close((Each(w).mT @ times(w, x)[..., None])[..., 0], times(w.mT, times(w, x)))
    assert torch.autograd.gradcheck(times, (w, x)) and torch.autograd.gradgradcheck(times, (w, x))


def _by_root(x: Tensor, matrix: Tensor) -> Tensor:
    return (spectral.inverse_power(matrix, 0.5, 0.1) @ x[..., None])[..., 0]


def _by_formula(x: Tensor, matrix: Tensor) -> Tensor:
    return spectral.root_times(x, matrix, 0.1)


def _roots_apart(rank: int) -> float:
    """The two apart, in values, derivatives and derivatives of these."""
    factor = _drawn(3, 5, 5)[..., :rank]
    found = []
    for f in (_by_root, _by_formula):
        x, matrix = _drawn(2, 3, 5).requires_grad_(), (factor @ factor.mT).requires_grad_()
        asked = _drawn(2, 3, 5).cos().requires_grad_()
        once = torch.autograd.grad(f(x, matrix), (x, matrix), asked)
        value = f(x, matrix)
        first = torch.autograd.grad(value, (x, matrix), asked, create_graph=True)
        loss = sum(g.sin().sum() for g in first)
        found.append([value, *once, *first, *torch.autograd.grad(loss, (x, matrix, asked))])  # type: ignore[arg-type]
    return max(float((a - b).detach().norm() / (1 + a.detach().norm())) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("rank", [0, 2, 5])
def test_a_root_times_a_vector(rank: int) -> None:
    """As the root's own derivatives, where eigenvalues coincide and vanish too."""
    assert _roots_apart(rank) < 1e-12


def test_a_root_whose_differences_err_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Tensor.__itruediv__
    monkeypatch.setattr(Tensor, "__itruediv__", lambda x, y: plain(x, 1.01 * y))
    assert _roots_apart(5) > 1e-4


def test_a_root_of_what_is_not_finite_is_not_a_number() -> None:
    matrix = torch.eye(3).repeat(2, 1, 1)
    matrix[1, 0, 0] = torch.inf
    out = spectral.root_times(torch.ones(2, 3), matrix, 0.5)
    assert out[0].isfinite().all() and out[1].isnan().all()


POLYNOMIALS = {
    "polar express": Spectral("polar-express"),
    "scaled": Spectral("polar-express", steps=3, scale="match_rms_adamw"),
    "newton-schulz": Spectral("newton-schulz"),
}


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (3, 4, 6), (5, 3)])
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials_by_formula(name: str, shape: tuple[int, ...]) -> None:
    h, x = POLYNOMIALS[name], _drawn(*shape)
    if len(shape) > 2:
        x[0] = 0.0
    plain, by_formula = _derivatives(h.primal, x), _derivatives(h.primal_by_formula, x)
    for a, b in zip(plain, by_formula, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-11 * float(a.detach().abs().max()))
    for scale in (1.0, 1e-9):  # above and below the floor of the norm
        y = (scale * x).requires_grad_()
        asked = x.cos()
        (want,) = torch.autograd.grad(h.primal(y), y, asked)
        (once,) = torch.autograd.grad(h.primal_by_formula(y), y, asked)
        torch.testing.assert_close(once, want, rtol=1e-10, atol=1e-10 * float(want.abs().max()))


def test_a_polynomial_whose_adjoint_errs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _drawn(3, 4, 4).requires_grad_()
    (want,) = torch.autograd.grad(Spectral("polar-express").primal(x), x, x.detach().cos())
    value = Spectral("polar-express").primal_by_formula(x)
    plain = Tensor.baddbmm_
    monkeypatch.setattr(Tensor, "baddbmm_", lambda x, a, b: plain(x, a, b, alpha=1.01))
    (wrong,) = torch.autograd.grad(value, x, x.detach().cos())
    assert (wrong - want).norm() > 1e-4 * want.norm()
