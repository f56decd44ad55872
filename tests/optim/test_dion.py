"""Dion beside its recurrence, the limits that it has, and error feedback in general."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.core.algorithms import Held, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Ball, LowRank, PowerFactors, SignBall, SoftThreshold
from axes.core.monoids import Identity, Zero
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate

SHAPES = ((8, 6), (6, 8), (8, 6), (4, 4))


def walk(make: Any, dtype: torch.dtype = torch.float64, steps: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]
    optimizer = make(ps)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.step()
    return [p.detach() for p in ps]


def routed(ps: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": ps, "rule": "dion"}]


class Written(torch.optim.Optimizer):
    """The paper's recurrence, from the same first Q."""

    def __init__(self, ps: Any, lr: float, mu: float, decay: float, divisor: int) -> None:
        super().__init__(ps, {"lr": lr})
        self.mu, self.decay, self.divisor = mu, decay, divisor

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            (rows, columns), lr, state = p.shape, self.param_groups[0]["lr"], self.state[p]
            if not state:
                rank = max(1, min(rows, columns) // self.divisor)
                i, j = (torch.arange(n, dtype=torch.float64) for n in (columns, rank))
                q = torch.cos(torch.pi / columns * (i[:, None] + 0.5) * ((j + 1) % columns)).to(p)
                state["m"], state["q"] = torch.zeros_like(p), q / q.norm(dim=0)
            b = state["m"] + p.grad
            left, _ = torch.linalg.qr(b @ state["q"])
            right = b.T @ left
            state["m"] = b - (1 - self.mu) * left @ right.T
            state["q"] = right / right.norm(dim=0)
            p.data = (1 - lr * self.decay) * p - lr * (rows / columns) ** 0.5 * left @ state["q"].T


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("divisor", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_its_recurrence(dtype: torch.dtype, divisor: int, foreach: bool) -> None:
    given = (0.02, 0.9, 0.1, divisor)
    ours = walk(lambda ps: optim.Dion(routed(ps), *given, foreach=foreach), dtype)
    theirs = walk(lambda ps: Written(ps, *given), dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_a_constant_gradient_of_low_rank_is_orthogonalised() -> None:
    """The factors converge to its singular vectors, and the step to the polar factor; nothing is left over."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 2, generator=generator, dtype=torch.float64)).Q for n in (8, 6))
    p = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
    optimizer = optim.Dion(routed([p]), 1.0, 0.5, 0.0, divisor=2, scale=None)
    for _ in range(60):
        p.grad = u @ torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64)) @ v.T
        before = p.detach().clone()
        optimizer.step()
    torch.testing.assert_close(before - p.detach(), u @ v.T, rtol=0, atol=1e-9)


def test_what_a_step_left_out_comes_later() -> None:
    """With feedback 1 clipping sends everything in the end: sums of what was shown and of what is left are the sums."""
    for h in (Ball(0.5), Ball(0.1, "max"), SoftThreshold(0.3)):
        clipped = StateUpdate(Linear(), h, Identity(), Step(feedback=1.0))
        state = clipped.init({}, (torch.zeros(3, 4, dtype=torch.float64),))
        shown, given = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        for t in range(20):
            u = torch.randn(3, 4, generator=generator, dtype=torch.float64) if t < 5 else torch.zeros_like(given)
            state, out = clipped.step(state, {}, drive=(u,))
            shown, given = shown + out.weights[0], given + u
            torch.testing.assert_close(shown + state.theta[0], given)
        assert float(state.theta[0].norm()) < 0.5 * float(given.norm())


def test_low_rank_noise_is_no_direction() -> None:
    """A gradient of rank one in float32: the other columns are rounding, and stay out of the step."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(64, 48))
    p.grad = torch.outer(torch.randn(64), torch.randn(48))
    optim.Dion(routed([p]), 1.0, divisor=2, weight_decay=0.0, scale=None).step()
    torch.testing.assert_close(torch.linalg.svdvals(p.detach())[:2], torch.tensor([1.0, 0.0]), rtol=0, atol=1e-4)


def test_what_cannot_act_is_refused() -> None:
    factors = StateUpdate(Linear("state"), PowerFactors(), Zero(), Step(at=Held(1)))
    for make, message in (
        (lambda: StateUpdate(Linear(), SignBall(), algorithm=Step(feedback=0.5)), "shows a part of what it is given"),
        (lambda: StateUpdate(Given(), Ball(), algorithm=Step(feedback=0.5)), "feedback is for filters"),
        (lambda: StateUpdate(Linear(), Ball(), Zero(), Step(feedback=0.5)), "the zero monoid keeps nothing"),
        (lambda: StateUpdate(Linear(), Ball(), algorithm=Step(feedback=0.5, debias=True)), "no debias"),
        (lambda: Step(feedback=1.5), "share in"),
        (lambda: StateUpdate(Linear("state"), PowerFactors(), Zero()), "set at=Held"),
        (lambda: StateUpdate(Linear("left"), PowerFactors(), Zero(), Step(at=Held(1))), "an entry for every entry"),
        (lambda: StateUpdate(Linear(), LowRank((StateUpdate(Linear("state")),))), "h=PowerFactors"),
        (lambda: LowRank((factors, factors)), "one statistic"),
        (lambda: LowRank((factors,), "rms"), "scale 'rms'"),  # type: ignore[arg-type]
        (lambda: optim.Dion.declare(divisor=0), "divisor must be an integer"),
    ):
        with pytest.raises(IllegalUpdate, match=message):
            make()
