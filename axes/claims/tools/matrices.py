"""Linear algebra of checks, by routines of torch.linalg and scipy: a route apart from the parts of the tuple."""

from __future__ import annotations

import math

import torch
from scipy import linalg
from torch import Tensor

from axes.claims.tools.float64 import eye, zeros
from axes.errors import AxesError


def column(s: Tensor) -> Tensor:
    """vec: the columns of a matrix one below the other."""
    return s.mT.flatten()


def unit_rows(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def rank(x: Tensor) -> int:
    """The number of singular values above rounding, from which the others must be far."""
    values = torch.linalg.svdvals(x.detach())
    counted, rounding = values > 1e-9 * values[0], values <= 1e-12 * values[0]
    if not (counted | rounding).all():
        raise AxesError(f"a rank that rounding could decide: singular values {values.tolist()}")
    return int(counted.sum())


def polar(x: Tensor) -> Tensor:
    """U V^T of a matrix of full rank."""
    return torch.from_numpy(linalg.polar(x.numpy())[0])


def nuclear(x: Tensor) -> Tensor:
    """The sum of the singular values."""
    return torch.linalg.svdvals(x).sum(-1)


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).detach().norm() / b.detach().norm())


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def spread(x: Tensor) -> Tensor:
    """The largest entry less the smallest."""
    return x.max() - x.min()


def centred(x: Tensor, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Less the mean over some dimensions: zero where a slope is normal to a set of fixed sums."""
    return x - x.mean(dims, keepdim=True)


def beyond(x: Tensor | float, bound: Tensor | float = 0.0) -> float:
    """How far the largest entry exceeds a bound; 0 if none does."""
    return max(float(x.detach().max() if isinstance(x, Tensor) else x) - float(bound), 0.0)


def symmetric_power(a: Tensor, power: float) -> Tensor:
    """a^power of a symmetric matrix without negative eigenvalues."""
    values, basis = torch.linalg.eigh(a)
    return (basis * values.clamp_min(0) ** power) @ basis.mT


def least_squares(k: Tensor, v: Tensor, ridge: float = 0.0) -> Tensor:
    """argmin of sum |v_i - S k_i|^2 + ridge |S|^2, pairs as rows: the ridge as rows of its own."""
    if ridge:
        k = torch.cat((k, math.sqrt(ridge) * eye(k.shape[1])))
        v = torch.cat((v, zeros(k.shape[1], v.shape[1])))
    return torch.linalg.lstsq(k, v).solution.mT
