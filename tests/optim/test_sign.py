"""signSGD beside pytorch_optimizer and its formula."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from axes import optim
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given
from axes.core.geometry import Spectral
from axes.core.monoids import Decay
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.errors import AxesError

SHAPES = ((4, 6), (5,), ())


def walk(make: Any, shapes: tuple[tuple[int, ...], ...] = SHAPES, steps: int = 30) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
    optimizer = make(ps)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.3 * p.detach()
        optimizer.step()
    return [p.detach() for p in ps]


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sign_sgd_against_pytorch_optimizer(momentum: float, weight_decay: float, foreach: bool) -> None:
    options: dict[str, Any] = {"lr": 0.01, "momentum": momentum, "weight_decay": weight_decay}
    ours = walk(lambda ps: optim.SignSGD(ps, foreach=foreach, **options))
    theirs = walk(lambda ps: pytorch_optimizer.SignSGD(ps, weight_decouple=True, **options))
    assert gap(ours, theirs) < 1e-13


def test_sign_sgd_is_lion_without_memory_and_signum_is_lion_with_equal_betas() -> None:
    assert gap(walk(lambda ps: optim.SignSGD(ps, lr=0.01)), walk(lambda ps: optim.Lion(ps, 0.01, (0.0, 0.0)))) == 0.0
    assert optim.SignSGD.declare(0.9) == optim.Lion.declare((0.9, 0.9))


# ---- Frank-Wolfe -----------------------------------------------------------------------------------------------------

NORMS: dict[str, Any] = {
    "max": lambda w: w.abs().max(),
    "spectral": lambda w: torch.linalg.matrix_norm(w, 2),
    "frobenius": lambda w: w.norm(),
    "rows": lambda w: w.norm(dim=-1).max(),
}


def vertex(norm: str, g: Tensor) -> Tensor:
    """argmax <g, V> over the unit ball, by definition."""
    if norm == "max":
        return g.sign()
    if norm == "frobenius":
        return g / g.norm()
    if norm == "rows":
        return g / g.norm(dim=-1, keepdim=True)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    return u @ vh


def matrix(make: Any) -> list[Tensor]:
    return walk(lambda ps: make([{"params": ps, "rule": "frank-wolfe"}]), ((4, 6), (6, 4), (5, 5)))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_frank_wolfe_is_a_convex_combination_with_a_vertex(norm: Any, foreach: bool) -> None:
    radius, lr = 3.0, 0.6
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(4, 6, generator=generator, dtype=torch.float64))
    p.data /= NORMS[norm](p.data)
    w = p.detach().clone()
    groups = [{"params": [p], "rule": "frank-wolfe"}]
    optimizer = optim.FrankWolfe(groups, lr=lr, radius=radius, norm=norm, betas=(0.0, 0.0), foreach=foreach)
    for _ in range(30):
        p.grad = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        gamma = lr / radius
        w = (1 - gamma) * w + gamma * radius * vertex(norm, -p.grad)
        optimizer.step()
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-13)
        assert NORMS[norm](p.detach()) <= radius * (1 + 1e-12)


def test_the_vertex_is_the_linear_minimum() -> None:
    """<g, V> is the dual norm of g, which no point of the ball exceeds."""
    g = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    duals = {
        "max": g.abs().sum(),
        "spectral": torch.linalg.matrix_norm(g, "nuc"),
        "frobenius": g.norm(),
        "rows": g.norm(dim=-1).sum(),
    }
    for norm, dual in duals.items():
        (f,) = optim.FrankWolfe.declare(norm, (0.0, 0.0)).filters()  # type: ignore[arg-type]
        v = f.parts().h.primal(g)
        torch.testing.assert_close((g * v).sum(), dual, rtol=1e-13, atol=0)
        assert bool(f.parts().h.contains(v, 1e-12).all())


def test_lion_is_frank_wolfe_on_a_box() -> None:
    assert optim.FrankWolfe.declare("max", (0.9, 0.99)) == optim.Lion.declare((0.9, 0.99))
    radius = 4.0
    box = walk(lambda ps: optim.FrankWolfe([{"params": ps, "rule": "box"}], 0.02, aux_radius=radius, aux_lr_scale=1.0))
    lion = walk(lambda ps: optim.Lion(ps, lr=0.02, betas=(0.9, 0.9), weight_decay=1 / radius))
    assert gap(box, lion) < 1e-14


def test_muon_is_frank_wolfe_on_the_spectral_ball() -> None:
    """With weight decay 1 / radius, to the accuracy of the polar factor; Nesterov's form has betas (b^2, b)."""
    lr, decay = Per("lr"), Decay(Per("weight_decay"))
    for nesterov, betas in ((False, (0.9, 0.9)), (True, (0.81, 0.9))):
        via = (Momentum(0.9, "ema", nesterov=nesterov),)
        exact = StateUpdate(Given(), OnUpdate(Spectral("polar")), decay, Step(lr, via=via))
        muon = matrix(
            lambda gs, u=exact: optim.optimizer(u)([{**g, "rule": "matrix"} for g in gs], lr=0.1, weight_decay=0.2)
        )
        ball = matrix(lambda gs, b=betas: optim.FrankWolfe(gs, lr=0.1, radius=5.0, betas=b))
        assert gap(muon, ball) < 1e-12
        if not nesterov:
            assert exact == optim.FrankWolfe.declare("spectral", betas)
    # Muon itself is the same tuple with an iteration in place of the factor
    muon_h = optim.Muon.declare(0.9, nesterov=False).filters()[0].parts().h
    assert isinstance(muon_h, Spectral) and muon_h.method == "newton-schulz"


def test_frank_wolfe_converges_to_the_constrained_minimum() -> None:
    """gamma_t = 2 / (t + 2) on a quadratic: the gap falls as 1 / t (Jaggi 2013, theorem 1)."""
    target = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = 2.0 * target / torch.linalg.matrix_norm(target, "nuc")  # outside the unit ball in no direction but one
    p = nn.Parameter(torch.zeros_like(target))
    optimizer = optim.FrankWolfe([{"params": [p], "rule": "frank-wolfe"}], lr=1.0, radius=1.0, betas=(0.0, 0.0))
    u, s, vh = torch.linalg.svd(target, full_matrices=False)
    best = (u * s.clamp(max=1.0)) @ vh
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 2 / (t + 2))
    for _ in range(200):
        p.grad = p.detach() - target
        optimizer.step()
        schedule.step()
    excess = float((p.detach() - target).square().sum() - (best - target).square().sum()) / 2
    assert 0.0 <= excess + 1e-12 <= 2 * 4 * 3 / 202  # 2 L diameter^2 / (t + 2)


def test_a_ball_needs_a_norm_and_a_radius() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(AxesError, match="radius must be positive"):
        optim.FrankWolfe([("w", p)], radius=0.0)
    with pytest.raises(AxesError, match="spectral"):
        optim.FrankWolfe.declare("spectra")  # type: ignore[arg-type]
