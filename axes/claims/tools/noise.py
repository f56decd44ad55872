"""Gradients of a linear regression with unequal curvatures, and their signal to noise."""

from __future__ import annotations

import torch
from torch import Tensor

from axes.claims.base import Draw


def inputs(draw: Draw, n: int, d: int) -> Tensor:
    """Gaussian inputs (n, d) whose covariance has the eigenvalues 1, 1/2, ..., 1/d."""
    return draw.normal(n, d) * torch.arange(1, d + 1, dtype=torch.float64) ** -0.5


def gradients(x: Tensor, error: Tensor, noise: Tensor) -> Tensor:
    """Gradients (n, d) of one example each of (x.w - y)^2 / 2 with y = x.w* + noise, at w = w* + error."""
    return (x @ error - noise)[:, None] * x


def snr(g: Tensor) -> Tensor:
    """Signal to noise of one example: |mean|^2 / tr(covariance). Its inverse is the critical batch size."""
    mean = g.mean(0)
    return mean.square().sum() / (g - mean).square().sum(-1).mean()


def descended(x: Tensor, error: Tensor, steps: int) -> Tensor:
    """The error after full-batch gradient descent with step size one over the largest curvature, without noise."""
    curvature = x.T @ x / len(x)
    values, basis = torch.linalg.eigh(curvature)
    return basis @ ((1 - values / values[-1]) ** steps * (basis.T @ error))
