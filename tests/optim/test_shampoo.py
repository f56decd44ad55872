"""Shampoo's roots: held between refreshes, by Newton iterations or a decomposition, and kept where none can be had."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import pytorch_optimizer
import scipy.linalg
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError, IllegalUpdate

MATRICES = ((4, 6), (6, 4), (5, 5), (5, 5), (8, 3))
STEPS = 14


def start(shapes: tuple[tuple[int, int], ...] = MATRICES, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def stream(ps: list[nn.Parameter], steps: int = STEPS, seed: int = 3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda p: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)  # noqa: E731
    return [[draw(p) for p in ps] for _ in range(steps)]


def feed(optimizer: torch.optim.Optimizer, ps: list[nn.Parameter], gradients: list[list[Tensor]]) -> list[Tensor]:
    for some in gradients:
        for p, g in zip(ps, some, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach().clone() for p in ps]


def shampoo(ps: list[nn.Parameter], **options: Any) -> optim.Shampoo:
    given = {"lr": 0.05, "weight_decay": 0.0, "damping": 0.0, **options}
    return optim.Shampoo([{"params": ps, "rule": "shampoo"}], **given)


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


class Explicit:
    """A^{-p} m B^{-p} with the roots of every few steps by scipy, written out."""

    def __init__(
        self, ps: list[nn.Parameter], betas: tuple[float, float], exponent: float, damping: float, refresh: int
    ):
        self.ps, self.betas, self.exponent, self.damping = ps, betas, exponent, damping
        self.refresh, self.t = refresh, 0
        self.sums = [[torch.zeros(n, n, dtype=p.dtype) for n in p.shape] for p in ps]
        self.roots = copy.deepcopy(self.sums)
        self.m = [torch.zeros_like(p) for p in ps]

    def root(self, a: Tensor) -> Tensor:
        size = float((torch.linalg.eigvalsh(a) ** 8).sum() ** 0.125)
        damped = a + self.damping * size * torch.eye(len(a), dtype=a.dtype)
        return torch.from_numpy(scipy.linalg.fractional_matrix_power(damped.numpy(), -self.exponent).real)

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        b1, b2 = self.betas
        for i, p in enumerate(self.ps):
            g = p.grad
            assert g is not None
            keep, write, bias = (1.0, 1.0, 1.0) if b2 == 1.0 else (b2, 1 - b2, 1 - b2**self.t)
            for side, x in enumerate((g @ g.T, g.T @ g)):
                self.sums[i][side] = keep * self.sums[i][side] + write * x
                if (self.t - 1) % self.refresh == 0:
                    self.roots[i][side] = self.root(self.sums[i][side] / bias)
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            p.sub_(0.05 * self.roots[i][0] @ (self.m[i] / (1 - b1**self.t)) @ self.roots[i][1])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("method", ["newton", "eigh"])
@pytest.mark.parametrize(
    ("exponent", "refresh", "betas"), [(0.25, 1, (0.9, 1.0)), (0.5, 4, (0.0, 0.9)), (0.25, 5, (0.9, 0.9))]
)
def test_held_roots_against_explicit_ones(
    exponent: float, refresh: int, betas: tuple[float, float], method: Any, foreach: bool
) -> None:
    options: dict[str, Any] = {"betas": betas, "exponent": exponent, "damping": 1e-3, "refresh": refresh}
    ps, qs = start(), start()
    ours = feed(shampoo(ps, eps=0.0, method=method, foreach=foreach, **options), ps, stream(ps))
    explicit: Any = Explicit(qs, **options)
    assert gap(ours, feed(explicit, qs, stream(qs))) < 1e-8


@pytest.mark.parametrize("refresh", [2, 3])
def test_refreshes_against_pytorch_optimizer(refresh: int) -> None:
    """Theirs come at steps that are multiples of `refresh`: gradients of zero bring it to the first that counts."""
    ps, qs = start(((4, 6), (5, 5))), start(((4, 6), (5, 5)))
    ours = feed(shampoo(ps, betas=(0.0, 1.0), eps=1e-6, refresh=refresh), ps, stream(ps))
    theirs = pytorch_optimizer.Shampoo(qs, lr=0.05, matrix_eps=1e-6, preconditioning_compute_steps=refresh)
    idle = [[torch.zeros_like(q) for q in qs]] * (refresh - 1)
    assert gap(ours, feed(theirs, qs, idle + stream(qs))) < 1e-8


def test_a_run_that_is_saved_between_refreshes_goes_on_bit_for_bit() -> None:
    newton = {"refresh": 4, "method": "newton", "damping": 1e-4}
    for cls, options in ((optim.Shampoo, newton), (optim.SOAP, {"refresh": 4})):
        ps = start(dtype=torch.float32)
        optimizer: Any = cls([{"params": ps, "rule": cls.name}], lr=0.01, **options)
        gradients = stream(ps, 11)
        feed(optimizer, ps, gradients[:6])
        qs = [nn.Parameter(p.detach().clone()) for p in ps]
        again: Any = cls([{"params": qs, "rule": cls.name}], lr=0.01, **options)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert gap(feed(optimizer, ps, gradients[6:]), feed(again, qs, gradients[6:])) == 0.0


def test_between_refreshes_nothing_is_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a root or basis is held, a step is products alone."""
    for cls in (optim.Shampoo, optim.SOAP):
        ps = start()
        optimizer: Any = cls([{"params": ps, "rule": cls.name}], lr=0.01, refresh=20)
        feed(optimizer, ps, stream(ps, 3))
        with monkeypatch.context() as patch:
            for name in ("eigh", "qr", "cholesky_ex", "svd"):
                patch.setattr(torch.linalg, name, None)
            feed(optimizer, ps, stream(ps, 3))


@pytest.mark.parametrize(
    ("betas", "exponent", "close", "before"), [((0.9, 1.0), 0.25, 1e-4, 5e-3), ((0.0, 0.95), 0.5, 5e-2, 0.3)]
)
@pytest.mark.parametrize("shape", [(8, 8), (64, 64), (64, 32)])
def test_rounding_is_not_whitened_where_gradients_have_low_rank(
    shape: tuple[int, int], betas: tuple[float, float], exponent: float, close: float, before: float
) -> None:
    """float32 beside float64 at rank 1: with the damping relative to what rounding is relative to, and with none."""
    generator = torch.Generator().manual_seed(0)
    m, n = shape
    gradients = [torch.randn(m, 1, generator=generator) @ torch.randn(1, n, generator=generator) for _ in range(4)]

    def moves(dtype: torch.dtype, **options: Any) -> list[Tensor]:
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = optim.Shampoo([{"params": [p], "rule": "shampoo"}], 1.0, betas, exponent, **options)
        seen = [p.detach().clone()]
        for g in gradients:
            p.grad = g.to(dtype)
            optimizer.step()
            seen.append(p.detach().clone())
        return [(b - a).double() for a, b in itertools.pairwise(seen)]

    def apart(**options: Any) -> float:
        pairs = zip(moves(torch.float32, **options), moves(torch.float64, **options), strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    assert apart() < close < before < apart(eps=1e-12, damping=0.0)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["newton", "eigh", "soap"])
def test_the_last_good_root_is_kept_and_counted(rule: str) -> None:
    """A statistic that is no longer finite has no root: the step goes on with the last one, and the report says so."""
    ps = start(((4, 4), (4, 4)))
    if rule == "soap":
        optimizer: Any = optim.SOAP([{"params": ps, "rule": "soap"}], lr=0.05, refresh=1, check_finite=False)
    else:
        optimizer = shampoo(ps, method=rule, damping=1e-4, refresh=1, check_finite=False)
    feed(optimizer, ps, stream(ps, 3))
    held = [k for k in optimizer.state[ps[0]] if k.endswith("held")]
    before = {k: optimizer.state[ps[0]][k].clone() for k in held}
    assert len(held) == 2 and not optimizer.report().notes
    for name in ("via.0.stats.0.theta", "via.0.stats.1.theta"):  # what an overflow leaves behind
        optimizer.state[ps[0]][name].fill_(torch.inf)
    feed(optimizer, ps, stream(ps, 2))
    assert all(torch.equal(optimizer.state[ps[0]][k], x) for k, x in before.items())
    assert all(not torch.equal(optimizer.state[ps[1]][k], x) for k, x in before.items())
    assert bool(ps[0].isfinite().all()) and bool(ps[1].isfinite().all())
    (note,) = optimizer.report().notes
    assert "parameter 0" in note and "4 refreshes" in note


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["newton", "eigh", "soap"])
@pytest.mark.parametrize("kind", ["zero", "rank one", "huge", "tiny", "zero then one"])
def test_poor_gradients(kind: str, rule: str, dtype: torch.dtype) -> None:
    """Zero gradients move nothing, others move by finite steps, and no root or basis is missed for them."""
    ps = [nn.Parameter(torch.zeros(s, dtype=dtype)) for s in ((6, 4), (4, 6))]
    if rule == "soap":
        optimizer: Any = optim.SOAP([{"params": ps, "rule": "soap"}], lr=0.05, refresh=2, weight_decay=0.0)
    else:
        optimizer = shampoo(ps, method=rule, damping=1e-6, refresh=2)
    gradients = stream(ps, 8)
    for i, some in enumerate(gradients):
        for g in some:
            if kind == "zero" or (kind == "zero then one" and i < 3):
                g.zero_()
            elif kind == "rank one":
                g.copy_(g[:, :1] @ g[:1])
            else:
                g.mul_({"huge": 1e15, "tiny": 1e-15}.get(kind, 1.0))
    before = [p.detach().clone() for p in ps]
    after = feed(optimizer, ps, gradients)
    assert all(bool(x.isfinite().all()) for x in after)
    assert (gap(before, after) == 0) == (kind == "zero")
    assert not optimizer.report().notes


def test_ill_conditioned_statistics_keep_float32_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    for rule, options in (("shampoo", {"method": "newton", "damping": 1e-6}), ("soap", {})):
        p = nn.Parameter(torch.zeros(40, 30))
        cls: Any = optim.Shampoo if rule == "shampoo" else optim.SOAP
        optimizer = cls([{"params": [p], "rule": rule}], lr=0.1, refresh=2, **options)
        for _ in range(9):
            p.grad = torch.logspace(0, -9, 40)[:, None] * torch.randn(40, 30, generator=generator)
            optimizer.step()
        assert bool(p.isfinite().all()) and float(p.detach().abs().max()) < 100 and not optimizer.report().notes


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_options_that_make_no_sense_are_refused() -> None:
    refused: dict[str, dict[str, Any]] = {
        "every must be at least 1": {"refresh": 0},
        "needs damping >= 1e-07": {"method": "newton", "damping": 1e-8},
        "needs damping >= 0.01": {"method": "newton", "damping": 1e-4, "refresh_precision": "tf32"},
        r"takes powers 1, 1/2, 1/3": {"method": "newton", "damping": 1e-4, "exponent": 0.3},
        "is not one of eigh, newton": {"method": "svd"},
        "leave it at 'input' with method 'eigh'": {"refresh_precision": "tf32"},
        "is not one of": {"precision": "bfloat16"},
        r"damping must lie in \[0, 1\)": {"damping": 1.0},
    }
    for message, options in refused.items():
        with pytest.raises(IllegalUpdate, match=message):
            optim.Shampoo.declare(**options)
    for message, options in {
        "every must be at least 1": {"refresh": 0},
        "is not one of eigh, power-qr": {"basis": "jacobi"},
        "is not one of cholesky, householder": {"qr": "gram-schmidt"},
        "qr has no effect with method 'eigh'": {"basis": "eigh", "qr": "householder"},
        "precision has no effect with method 'eigh'": {"basis": "eigh", "refresh_precision": "tf32"},
        "is not one of input": {"precision": "half"},
    }.items():
        with pytest.raises(AxesError, match=message):
            optim.SOAP.declare(**options)
