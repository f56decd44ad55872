"""Any legal tuple runs on any axis where it has a meaning: a layer on a sequence, an optimizer on least squares."""

from __future__ import annotations

import io

import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from axes import optim, sequence
from axes.core import reference
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.routes import dispatch
from axes.testing import checks, strategies
from axes.testing.mutations import solves

SETTINGS = settings(max_examples=30, suppress_health_check=list(HealthCheck))


@given(update=strategies.updates())
@SETTINGS
def test_as_a_layer(update: StateUpdate) -> None:
    """Finite and deterministic; split and stepped runs agree; the state survives a weights-only load."""
    if solves(update):
        return
    torch.manual_seed(0)
    layer = sequence.layer(update)(8, heads=2, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y, state = layer(x)
        again, _ = layer(x)
        assert y.shape == x.shape and bool(y.isfinite().all()) and torch.equal(y, again)
        head, middle = layer(x[:, :4])
        buffer = io.BytesIO()
        torch.save(middle, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        tail, last = layer(x[:, 4:], loaded)
        assert checks.error(torch.cat((head, tail), 1), y) < 1e-8
        assert checks.error(checks.leaves(last)[-1], checks.leaves(state)[-1]) < 1e-8
        one, _ = layer.step(x[:, 4], middle)
        assert checks.error(one, y[:, 4]) < 1e-8


@given(update=strategies.updates())
@SETTINGS
def test_every_legal_route_is_the_interpreter(update: StateUpdate) -> None:
    if solves(update) or dispatch.select(update).route == "interpreter":
        return
    signal = checks.example(update, length=9)
    signal["v"] = 0.3 * signal["v"]  # type: ignore[operator]
    assert checks.error(dispatch.run(update, signal), reference.run(update, signal, time=1)) < checks.TOLERANCE


@given(update=strategies.updates("data"))
@SETTINGS
def test_as_an_optimizer(update: StateUpdate) -> None:
    """20 steps on least squares: finite, deterministic, and a checkpoint at step 10 continues bit for bit."""
    data = torch.Generator().manual_seed(2)
    inputs = torch.randn(16, 4, dtype=torch.float64, generator=data)
    targets = inputs @ torch.randn(4, 3, dtype=torch.float64, generator=data)
    named = {rate.name for rate in update.demands() if isinstance(rate, Per)}
    hyper = {name: value for name, value in (("lr", 0.05), ("weight_decay", 0.01)) if name in named}

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)).double()
        for weight in model.parameters():  # descent on a set starts in the set
            weight.data = update.parts().h.primal(weight.data)
        return model, optim.optimizer(update)(model, **hyper)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            losses.append(float(optimizer.step(closure).detach()))  # type: ignore[arg-type, union-attr]
        return losses

    model, optimizer = fresh()
    first = train(model, optimizer, 10)
    weights = {n: p.clone() for n, p in model.state_dict().items()}
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    rest = train(model, optimizer, 10)
    assert all(torch.isfinite(torch.tensor(first + rest))), update

    other, again = fresh()
    assert train(other, again, 10) == first
    third, resumed = fresh()
    third.load_state_dict(weights)
    saved.seek(0)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert train(third, resumed, 10) == rest
