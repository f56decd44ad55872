"""Conjugate gradients of a fixed number, and inverse roots by shifted systems that share one Krylov space.

A^{-1/2} is a sum of resolvents, sum_j c_j (A + s_j)^{-1}, whose shifts and weights elliptic functions give for all
eigenvalues in an interval. Conjugate gradients of A + s_j move in the space of those of A, by multiples that three
numbers of a step tell: one product with A a step, whatever the number of shifts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor


@functools.lru_cache
def inverse_root_shifts(count: int, low: float, high: float) -> tuple[tuple[float, float], ...]:
    """(s_j, c_j): x^{-1/2} = sum_j c_j / (x + s_j) on [low, high], relative error about 3 exp(-2 pi^2 n / (log k + 3)).

    k = high / low. Source: Hale, Higham and Trefethen 2008 (Computing A^alpha, log(A) and related matrix functions by
    contour integrals), method 3: s_j = low sc^2(u_j), c_j = 2 K' sqrt(low) dc nc(u_j) / (pi n) at the midpoints u_j of
    n parts of [0, K'], functions of parameter 1 - low / high.
    """
    quarter, found = _quarter(low / high), []
    for j in range(count):
        sine, cosine, delta = _elliptic((j + 0.5) * quarter / count, low / high)
        weight = 2 * quarter * math.sqrt(low) * delta / (math.pi * count * cosine**2)
        found.append((low * (sine / cosine) ** 2, weight))
    return tuple(found)


def _means(complement: float) -> list[tuple[float, float]]:
    """Arithmetic means and half differences down to rounding, for the parameter 1 - complement."""
    a, b, c = 1.0, math.sqrt(complement), math.sqrt(1 - complement)
    steps = [(a, c)]
    while abs(c) > 1e-15 * a and len(steps) < 60:
        a, b, c = (a + b) / 2, math.sqrt(a * b), (a - b) / 2
        steps.append((a, c))
    return steps


def _quarter(complement: float) -> float:
    """The quarter period K(m), m = 1 - complement."""
    return math.pi / (2 * _means(complement)[-1][0])


def _elliptic(u: float, complement: float) -> tuple[float, float, float]:
    """Jacobi's sn, cn and dn of u for the parameter m = 1 - complement, by descending means."""
    steps = _means(complement)
    phi = 2.0 ** (len(steps) - 1) * steps[-1][0] * u
    for a, c in reversed(steps[1:]):
        phi = (phi + math.asin(c * math.sin(phi) / a)) / 2
    sine, cosine = math.sin(phi), math.cos(phi)
    return sine, cosine, math.sqrt(cosine**2 + complement * sine**2)


def conjugate_gradients(apply: Callable[[Tensor], Tensor], b: Tensor, steps: int) -> Tensor:
    """x of so many steps from zero towards A x = b, for every row b (..., n): A is symmetric and positive definite.

    Where nothing is left, or left by rounding alone, a row stays as it is.
    """
    x, r, p = torch.zeros_like(b), b, b
    rest = first = (r * r).sum(-1, keepdim=True)
    for i in range(steps):
        moved = apply(p)
        done = rest <= first * torch.finfo(b.dtype).eps ** 2
        one = torch.ones_like(rest)
        size = torch.where(done, 0.0, rest / torch.where(done, one, (p * moved).sum(-1, keepdim=True)))
        x = x + size * p
        if i + 1 == steps:
            break
        r = r - size * moved
        left = (r * r).sum(-1, keepdim=True)
        p = r + torch.where(done, 0.0, left / torch.where(done, one, rest)) * p
        rest = left
    return x


def shifted_gradients(
    apply: Callable[[Tensor], Tensor], b: Tensor, shifts: tuple[tuple[float, float], ...], steps: int
) -> Tensor:
    """sum_j c_j x_j, x_j of so many steps of conjugate gradients from zero towards (A + s_j) x = b, rows b (..., n).

    shifts: (s_j, c_j), s_j >= 0; A is symmetric and positive definite. Where nothing is left, or left by rounding
    alone, a row stays as it is.

    Source: Jegerlehner 1996 (Krylov space solvers for shifted linear systems), residuals zeta_j r.
    """
    shift, weight = (torch.tensor(xs, dtype=b.dtype, device=b.device)[:, None] for xs in zip(*shifts, strict=True))
    one = torch.ones_like(b[..., :1])
    out, r, p = torch.zeros_like(b), b, b
    along, share, ratio = b[..., None, :], one[..., None], one[..., None]
    rest = first = (r * r).sum(-1, keepdim=True)
    before, grown = one, torch.zeros_like(one)  # the last step's size and growth
    for i in range(steps):
        moved = apply(p)
        done = rest <= first * torch.finfo(b.dtype).eps ** 2
        size = torch.where(done, 0.0, rest / torch.where(done, one, (p * moved).sum(-1, keepdim=True)))
        held = (size * grown / before)[..., None]
        ratio = 1 / (1 + shift * size[..., None] + held * (1 - ratio))
        out = out + (weight * (size[..., None] * ratio) * along).sum(-2)
        if i + 1 == steps:
            break
        r = r - size * moved
        left = (r * r).sum(-1, keepdim=True)
        grown = torch.where(done, 0.0, left / torch.where(done, one, rest))
        p, share = r + grown * p, share * ratio
        along = share * r[..., None, :] + grown[..., None] * ratio**2 * along
        rest, before = left, torch.where(done, before, size)
    return out


__all__ = ["conjugate_gradients", "inverse_root_shifts", "shifted_gradients"]
