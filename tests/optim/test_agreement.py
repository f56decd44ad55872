"""Thirty steps beside published optimizers and explicit formulas, on the same gradients."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from torch import Tensor

from axes import optim

STEPS = 30
SHAPES = ((), (5,), (4, 6), (6, 4), (4, 6), (3, 2, 2, 2))


def walk(make: Callable[[list[Tensor]], Any], shapes: Sequence[tuple[int, ...]] = SHAPES, **kind: Any) -> list[Tensor]:
    """Parameters after STEPS steps on gradients that depend on the parameters and on the step alone."""
    dtype = kind.get("dtype", torch.float64)
    generator = torch.Generator().manual_seed(7)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    parameters = [torch.torch.nn.Parameter(draw(s)) for s in shapes]
    optimizer = make(parameters)
    for _ in range(STEPS):
        for p in parameters:
            p.grad = draw(tuple(p.shape)) + 0.3 * p.detach()
        optimizer.step()
    return [p.detach() for p in parameters]


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


SGD_OPTIONS = [
    {"momentum": m, "dampening": d, "nesterov": n, "weight_decay": w, "maximize": x}
    for m, d, n, w, x in product((0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1), (False, True))
    if not (n and (m == 0.0 or d != 0.0)) and not (m == 0.0 and d != 0.0)
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd(options: dict[str, Any], foreach: bool) -> None:
    ours = walk(lambda ps: optim.SGD(ps, lr=0.05, foreach=foreach, **options))
    assert gap(ours, walk(lambda ps: torch.optim.SGD(ps, lr=0.05, foreach=False, **options))) < 1e-13


def test_sgd_with_decoupled_decay() -> None:
    def by_hand(parameters: list[Tensor]) -> Any:
        plain = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        plain.register_step_pre_hook(lambda *_: [p.data.mul_(1 - 0.05 * 0.2) for p in parameters] and None)
        return plain

    ours = walk(lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.2, decoupled=True))
    assert gap(ours, walk(by_hand)) < 1e-13


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("options", [{}, {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam(name: str, options: dict[str, Any], maximize: bool, foreach: bool) -> None:
    ours = walk(lambda ps: getattr(optim, name)(ps, lr=0.05, maximize=maximize, foreach=foreach, **options))
    theirs = walk(lambda ps: getattr(torch.optim, name)(ps, lr=0.05, maximize=maximize, foreach=False, **options))
    assert gap(ours, theirs) < 1e-12


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_in_float32_to_rounding(name: str) -> None:
    extra = {"momentum": 0.9} if name == "SGD" else {}
    ours = walk(lambda ps: getattr(optim, name)(ps, lr=0.05, **extra), dtype=torch.float32)
    assert gap(ours, walk(lambda ps: getattr(torch.optim, name)(ps, lr=0.05, **extra), dtype=torch.float32)) < 2e-6


MATRICES = ((4, 6), (6, 4), (5, 5), (8, 3))
MUON_SCALES = {"original": "original", "match_rms_adamw": "match_rms_adamw"}


def muon_group(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": parameters, "rule": "muon"}]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scale", MUON_SCALES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon(nesterov: bool, scale: Any, weight_decay: float) -> None:
    """Newton-Schulz runs in bfloat16 in both; in float64 its inputs round alike and nothing else differs."""
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "nesterov": nesterov, "weight_decay": weight_decay}
    ours = walk(lambda ps: optim.Muon(muon_group(ps), scale=scale, form="direct", foreach=False, **options), MATRICES)
    theirs = walk(lambda ps: torch.optim.Muon(ps, adjust_lr_fn=MUON_SCALES[scale], **options), MATRICES)
    assert gap(ours, theirs) < 1e-13


def test_muon_takes_a_convolution_as_a_matrix() -> None:
    conv = walk(lambda ps: optim.Muon(muon_group(ps), lr=0.02, foreach=False), [(4, 3, 2, 2)])
    flat = walk(lambda ps: optim.Muon(muon_group(ps), lr=0.02, foreach=False), [(4, 12)])
    assert torch.equal(conv[0].flatten(1), flat[0])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion(weight_decay: float, foreach: bool) -> None:
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": weight_decay}
    ours = walk(lambda ps: optim.Lion(ps, foreach=foreach, **options))
    assert gap(ours, walk(lambda ps: lion_pytorch.Lion(ps, **options))) < 1e-13


@pytest.mark.parametrize(("dtype", "step", "path"), [(torch.float64, 1e-15, 1e-14), (torch.float32, 5e-4, 2e-3)])
def test_beside_torchs_muon_to_rounding(dtype: torch.dtype, step: float, path: float) -> None:
    """In float32 an average that is one rounding away may be another number in the iteration's bfloat16."""

    def apart(steps: int) -> float:
        shapes = ((64, 64), (128, 32))
        generator = torch.Generator().manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]
        qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
        ours = optim.Muon(muon_group(ps), 0.02, scale="original", form="direct", foreach=False)
        theirs = torch.optim.Muon(qs, 0.02)
        for _ in range(steps):
            for p, q in zip(ps, qs, strict=True):
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
                q.grad = p.grad.clone()
            ours.step()
            theirs.step()
        return gap([p.detach() for p in ps], [q.detach() for q in qs])

    assert apart(1) < step and apart(30) < path


class ExplicitShampoo:
    """L^{-p} m R^{-p} from explicit eigendecompositions, written out."""

    def __init__(
        self, parameters: list[Tensor], lr: float, betas: tuple[float, float], exponent: float, eps: float, decay: float
    ) -> None:
        self.parameters, self.lr, self.betas, self.exponent = parameters, lr, betas, exponent
        self.eps, self.decay, self.time = eps, decay, 0
        self.left = [torch.zeros(p.shape[0], p.shape[0], dtype=p.dtype) for p in parameters]
        self.right = [torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype) for p in parameters]
        self.mean = [torch.zeros_like(p) for p in parameters]

    def root(self, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag((values.clamp(min=0) + self.eps) ** -self.exponent) @ vectors.T

    @torch.no_grad()
    def step(self) -> None:
        self.time += 1
        b1, b2 = self.betas
        for i, p in enumerate(self.parameters):
            g = p.grad
            assert g is not None
            keep, write = (1.0, 1.0) if b2 == 1.0 else (b2, 1 - b2)
            self.left[i] = keep * self.left[i] + write * g @ g.T
            self.right[i] = keep * self.right[i] + write * g.T @ g
            self.mean[i] = b1 * self.mean[i] + (1 - b1) * g
            bias = 1.0 if b2 == 1.0 else 1 - b2**self.time
            m = self.mean[i] / (1 - b1**self.time)
            direction = self.root(self.left[i] / bias) @ m @ self.root(self.right[i] / bias)
            p.mul_(1 - self.lr * self.decay).sub_(self.lr * direction)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("exponent", [0.25, 0.5])
@pytest.mark.parametrize("betas", [(0.0, 1.0), (0.9, 1.0), (0.9, 0.95)])
def test_shampoo_against_explicit_roots(betas: tuple[float, float], exponent: float, foreach: bool) -> None:
    options: dict[str, Any] = {"lr": 0.05, "betas": betas, "exponent": exponent, "eps": 1e-4}
    ours_only: dict[str, Any] = {"weight_decay": 0.1, "damping": 0.0}
    groups: Any = lambda ps: [{"params": ps, "rule": "shampoo"}]  # noqa: E731
    ours = walk(lambda ps: optim.Shampoo(groups(ps), foreach=foreach, **ours_only, **options), MATRICES)
    assert gap(ours, walk(lambda ps: ExplicitShampoo(ps, decay=0.1, **options), MATRICES)) < 1e-12


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_shampoo_against_pytorch_optimizer(weight_decay: float) -> None:
    """Conventions match for matrices without momentum: sums that start at eps I, exponent 1/4, decoupled decay.

    Its momentum averages whitened directions with the next raw gradient, and its vectors are whitened with exponent
    1/2: neither is a convention of ours.
    """
    ours = walk(
        lambda ps: optim.Shampoo(
            [{"params": ps, "rule": "shampoo"}], 0.05, (0.0, 1.0), eps=1e-6, damping=0.0, weight_decay=weight_decay
        ),
        MATRICES,
    )
    theirs = walk(
        lambda ps: pytorch_optimizer.Shampoo(
            ps, lr=0.05, matrix_eps=1e-6, weight_decay=weight_decay, weight_decouple=True
        ),
        MATRICES,
    )
    assert gap(ours, theirs) < 1e-12
