"""A memory that is read through a solve: conjugate gradients in plain loops, and how near many steps come to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Entropic
from axes.core.memory import Regression, conjugate_gradients
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.routes import dispatch
from axes.sequence import MesaNet, RLSNet, SequenceLayer
from axes.sequence.mesa import Positive
from tests.oracles import Found, check_formula, convolutions, heads, rms, through

BETA, RIDGE = Per("beta"), Per("ridge", "key")


def mesa(m: SequenceLayer, x: Tensor) -> Found:
    """von Oswald et al. 2025: H and G with gates; the textbook's conjugate gradients, query by query."""
    p, steps = m.around, m.update.parts().memory.steps  # type: ignore[attr-defined]
    q, k, v = convolutions(p, x)
    gamma, beta = (torch.sigmoid(through(p.charts[n], x)) for n in ("decay", "beta"))
    ridge = torch.diag_embed(0.25 + F.softplus(p.charts["ridge"].logit))
    d_k, d_v, out = q.shape[-1], v.shape[-1], []
    big_h = x.new_zeros(x.shape[0], q.shape[2], d_k, d_k)
    big_g = x.new_zeros(x.shape[0], q.shape[2], d_v, d_k)
    for t in range(x.shape[1]):
        kept, b = gamma[:, t, :, None, None], beta[:, t, :, None, None]
        big_h = kept * big_h + b * k[:, t, :, :, None] * k[:, t, :, None, :]
        big_g = kept * big_g + b * v[:, t, :, :, None] * k[:, t, :, None, :]
        a, y = big_h + ridge, torch.zeros_like(q[:, t])
        residual = direction = q[:, t]
        for _ in range(steps):
            step = (residual**2).sum(-1) / torch.einsum("bhi,bhij,bhj->bh", direction, a, direction)
            y = y + step[..., None] * direction
            after = residual - step[..., None] * torch.einsum("bhij,bhj->bhi", a, direction)
            ratio = (after**2).sum(-1) / (residual**2).sum(-1)
            residual, direction = after, after + ratio[..., None] * direction
        out.append(torch.einsum("bhvk,bhk->bhv", big_g, y))
    y = rms(torch.stack(out, 1), p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T))
    return y, (big_g, big_h)


@pytest.mark.parametrize("steps", (1, 3, 5))
@pytest.mark.parametrize("who", (None, "reference"))
def test_the_layer_is_its_formula(steps: int, who: str | None) -> None:
    """Of fewer steps than a key has entries: beyond them rounding alone is left, which a plain loop divides by."""
    update = replace(MesaNet.update, memory=Regression(steps, Per("ridge", "key")))
    check_formula(MesaNet, mesa, update=update, implementation=who)


def test_many_steps_are_the_exact_solve() -> None:
    """The layer of thirty steps, and rls-net, whose inverse is exact, with the same ridge."""
    torch.manual_seed(0)
    b, t, h, d = 2, 12, 2, 6
    signal: dict[str, Any] = {n: torch.randn(b, t, h, d, dtype=torch.float64) for n in "qkv"}
    signal |= {"decay": -0.1 * torch.rand(b, t, h).double(), "beta": torch.rand(b, t, h).double()}
    exact, _ = dispatch.run(RLSNet.update, signal)
    errors = []
    for steps in (1, 2, 4, 6, 30):
        memory = Regression(steps, 0.1)
        update = StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA), memory=memory)
        out, _ = dispatch.run(update, signal)
        errors.append(((out - exact).norm() / exact.norm()).item())
    assert errors[0] > 0.05 and sorted(errors, reverse=True)[:4] == errors[:4] and errors[-1] < 1e-9, errors


def test_what_is_left_of_nothing_is_nothing() -> None:
    """Queries of zero, and more steps than there are eigenvalues: no division by what rounding left."""
    matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    b = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    x = conjugate_gradients(lambda p: p @ matrix, b, 40)
    torch.testing.assert_close(x, b.detach() @ torch.linalg.inv(matrix), rtol=1e-12, atol=1e-14)
    (grad,) = torch.autograd.grad(x.sum(), b)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize(
    ("call", "says"),
    (
        (lambda: Regression(0), "at least one step"),
        (lambda: Regression(3, 0.0), "ridge is a positive number"),
        (lambda: Regression(3, Per("ridge")), "Per of shape key"),
        (lambda: StateUpdate(SquaredError(), memory=Regression(3)), r"the cost is Alignment\(\)"),
        (lambda: StateUpdate(Alignment(), Entropic(), memory=Regression(3)), r"h is Euclidean\(\)"),
        (lambda: StateUpdate(Alignment(), monoid=Diagonal("decay"), memory=Regression(3)), "scalars"),
        (lambda: StateUpdate(Alignment(), algorithm=Step(RIDGE), memory=Regression(3)), "scalars"),
        (lambda: StateUpdate(Alignment(), algorithm=Step(debias=True), memory=Regression(3)), "normaliser"),
        (lambda: StateUpdate(Alignment(), algorithm=Momentum(0.9, kind="ema"), memory=Regression(3)), "no filters"),
        (lambda: Positive(0.1), "start is above least"),
    ),
)
def test_what_means_nothing_is_refused(call: Any, says: str) -> None:
    with pytest.raises(IllegalUpdate, match=says):
        call()
