"""Inverse roots, orthonormal columns and the rules built of them on a GPU, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import optim  # noqa: E402
from axes.kernels.products import halves  # noqa: E402
from axes.linalg.matrix_roots import (  # noqa: E402
    LEAST_DAMPING,
    PRECISIONS,
    Precision,
    inverse_cholesky,
    newton_inverse_root,
    orthonormal,
    power_step,
    product,
    symmetric_product,
)

UNIT: dict[Precision, float] = {"input": 2.0**-20, "bfloat16x3": 2.0**-14, "tf32": 2.0**-9}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def rotation(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(draw(n, n, seed=seed).double()).Q


def spectrum(values: Tensor, seed: int = 0) -> Tensor:
    q = rotation(len(values), seed)
    return (q * values.cuda()) @ q.mT


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def departure(q: Tensor) -> float:
    """Largest entry of Q^T Q - I."""
    q = q.double()
    return float((q.mT @ q - torch.eye(q.shape[-1], device="cuda", dtype=q.dtype)).abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(64, 96, 40), (3, 512, 768, 320), (2, 2, 264, 1032, 520), (3, 300, 301, 302)])
def test_products(precision: Precision, shape: tuple[int, ...]) -> None:
    *batch, m, k, n = shape
    a, b = draw(*batch, m, k), draw(*batch, k, n, seed=1)
    assert gap(product(a, b, precision), a.double() @ b.double()) < UNIT[precision]
    assert gap(product(a, b.mT.contiguous().mT, precision), a.double() @ b.double()) < UNIT[precision]
    for x in (a, a.mT):
        assert gap(symmetric_product(x, None, precision), x.double() @ x.double().mT) < UNIT[precision]
    s = a @ a.mT / k
    t = s @ s
    assert gap(symmetric_product(s, (t + t.mT) / 2, precision), s.double() @ t.double()) < UNIT[precision]


@pytest.mark.parametrize(("dim", "order"), [(-1, (0, 0, 1)), (-2, (0, 1, 0)), (-1, (0, 1, 0))])
def test_halves(dim: int, order: tuple[int, int, int]) -> None:
    for x in (draw(3, 70, 130), draw(2, 200, 64).mT, draw(4, 4, 5)[::2, 1:]):
        high = x.bfloat16()
        parts = (high, (x - high).bfloat16())
        assert torch.equal(halves.thirds(x, dim, order), torch.cat([parts[i] for i in order], dim))


def test_tf32_leaves_torchs_setting_alone() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    a = draw(256, 256)
    first = a @ a
    product(a, a, "tf32")
    assert torch.backends.cuda.matmul.allow_tf32 == before and torch.equal(a @ a, first)


@pytest.mark.parametrize("n", [100, 512, 1000, 2048])
def test_inverse_cholesky(n: int) -> None:
    a = spectrum(torch.logspace(0, -3, n)).float().expand(2, n, n)
    k = inverse_cholesky(a).double()
    assert departure(torch.linalg.cholesky(a.double()).mT @ k.mT) < 1e-2
    assert gap(k, torch.linalg.inv(torch.linalg.cholesky(a.double()))) < 1e-4
    assert torch.equal(k, inverse_cholesky(a).double())  # the same bits


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("n", [96, 1024])
def test_newton_roots(precision: Precision, order: int, n: int) -> None:
    damping = max(LEAST_DAMPING[precision], 1e-6)
    for values in (torch.logspace(0, -9, n), torch.cat((torch.ones(n // 4), torch.zeros(n - n // 4)))):
        values = values.double()
        a = spectrum(values).float().expand(2, n, n)
        roots = newton_inverse_root(a, order, damping, precision=precision)
        assert torch.equal(roots, newton_inverse_root(a, order, damping, precision=precision))
        shifted = (values + damping * float((values**8).sum() ** 0.125)).cuda()
        q = rotation(n)
        between = (shifted[:, None] * shifted[None, :]) ** (1 / (2 * order))
        inside = q.mT @ roots[1].double() @ q * between
        error = float((inside - torch.eye(n, device="cuda")).norm()) / math.sqrt(n)
        assert error < 0.05, error


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("n", [200, 1024, 3072])
def test_bases(precision: Precision, n: int) -> None:
    reach = {"input": 4.0, "bfloat16x3": 3.0, "tf32": 1.0}[precision]
    a = spectrum(torch.logspace(0, -reach, n).double()).float().expand(2, n, n)
    q = power_step(a, rotation(n, 5).float().expand(2, n, n), "cholesky", precision)
    assert departure(q[1]) < 20 * UNIT[precision]
    x = a @ rotation(n, 6).float()
    assert departure(orthonormal(x, "cholesky", precision)[0]) < 20 * UNIT[precision]


RULES: dict[str, Any] = {
    "soap": (optim.SOAP, {"eps": 1e-3}),
    "soap, x3": (optim.SOAP, {"eps": 1e-3, "precision": "bfloat16x3", "refresh_precision": "bfloat16x3"}),
    "soap, householder": (optim.SOAP, {"eps": 1e-3, "qr": "householder"}),
    "soap, eigh": (optim.SOAP, {"eps": 1e-3, "basis": "eigh"}),
    "shampoo, newton": (optim.Shampoo, {"method": "newton", "damping": 1e-2, "refresh": 3}),
    "shampoo, x3": (
        optim.Shampoo,
        {
            "method": "newton",
            "damping": 1e-2,
            "refresh": 3,
            "precision": "bfloat16x3",
            "refresh_precision": "bfloat16x3",
        },
    ),
    "shampoo, eigh": (optim.Shampoo, {"method": "eigh", "damping": 1e-2, "refresh": 3}),
}


@pytest.mark.parametrize("name", RULES)
def test_steps_on_the_gpu_are_those_of_float64_on_the_cpu(name: str) -> None:
    cls, options = RULES[name]
    shapes = ((320, 264), (264, 320), (320, 264), (272, 272))
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator) for s in shapes]
    ours = [nn.Parameter(x.cuda()) for x in start]
    exact = [nn.Parameter(x.double()) for x in start]
    plain = {k: v for k, v in options.items() if "precision" not in k}
    rule = cls.name
    first = cls([{"params": ours, "rule": rule}], lr=0.01, **options)
    second = cls([{"params": exact, "rule": rule}], lr=0.01, **plain)
    for _ in range(13):
        for p, q, s in zip(ours, exact, shapes, strict=True):
            # twice as many directions as a side: statistics of full rank, whose eigenvalues differ
            g = torch.randn(s, generator=generator) * torch.logspace(0, -1, s[1])
            p.grad, q.grad = g.cuda(), g.double()
        first.step()
        second.step()
    moved = [p.detach().cpu().double() - x for p, x in zip(ours, start, strict=True)]
    wanted = [q.detach() - x for q, x in zip(exact, start, strict=True)]
    worst = max(gap(a, b) for a, b in zip(moved, wanted, strict=True))
    # a basis turns freely where eigenvalues are close: its step is a step of SOAP, but not the same one
    assert worst < (0.3 if rule == "soap" else 2e-2), worst


@pytest.mark.parametrize("cls", [optim.SOAP, optim.Shampoo])
def test_zero_and_rank_one_gradients(cls: Any) -> None:
    options = {} if cls is optim.SOAP else {"method": "newton", "damping": 1e-6, "refresh": 2}
    ps = [nn.Parameter(draw(300, 280)) for _ in range(2)]
    before = ps[1].detach().clone()
    optimizer = cls([{"params": ps, "rule": cls.name}], lr=0.01, weight_decay=0.0, **options)
    for i in range(12):
        ps[0].grad = draw(300, 1, seed=2) @ draw(1, 280, seed=3) * (1 + i)
        ps[1].grad = torch.zeros_like(ps[1])
        optimizer.step()
    assert bool(ps[0].isfinite().all()) and torch.equal(ps[1].detach(), before)
