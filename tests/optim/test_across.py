"""Numbers across parameters: the norm of all gradients as a rate of the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from axes import optim
from axes.errors import AxesError
from axes.optim import wrappers
from axes.optim.engine.across import GRADIENT_NORM
from tests.optim.table import TOKENS, net, same, train, values

CLIPPED = wrappers.clipped(optim.AdamW.declare(), 0.3, "all")


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_torchs_clipping_between_backward_and_step(dtype: torch.dtype, foreach: bool, capturable: bool) -> None:
    model, twin = net(dtype), net(dtype)
    ours = optim.optimizer(CLIPPED)(model, lr=0.01, foreach=foreach, capturable=capturable)
    theirs = optim.AdamW(twin, lr=0.01, weight_decay=0.0)
    for t in range(5):
        norms = []
        for m, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            (m((TOKENS + t) % 7) * (0.1 if t == 3 else 10.0)).backward()
            if m is twin:
                norm = float(torch.nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None]))
                norms.append(norm)
                for p in m.parameters():  # clip_grad_norm_, which adds 1e-6 to the norm, without
                    if p.grad is not None:
                        p.grad.mul_(0.3 / max(norm, 0.3))
            optimizer.step()
        norms.append(float(ours.param_groups[0][GRADIENT_NORM.name]))
        assert norms[1] == pytest.approx(norms[0], rel=1e-5 if dtype == torch.float32 else 1e-11)
    same(values(model), values(twin), 1e-4 if dtype == torch.float32 else 1e-11)


def test_the_number_is_of_all_groups_and_of_those_that_have_a_gradient() -> None:
    a, b, c = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
    optimizer = optim.LAMB([{"params": [a]}, {"params": [b], "max_norm": None}, {"params": [c]}], max_norm=1.0)
    a.grad, b.grad = torch.tensor([3.0, 0.0]).double(), torch.tensor([0.0, 4.0]).double()
    optimizer.step()
    first, second, third = optimizer.param_groups
    assert first["gradient_norm"] == 5.0 and "gradient_norm" not in second and third["gradient_norm"] == 1.0


def test_a_resumed_and_a_skipped_step() -> None:
    model, twin = net(), net()
    make = lambda m: optim.LAMB(m, lr=0.01, max_norm=0.3, check_finite="skip")  # noqa: E731
    first = make(model)
    train(model, first, 2)
    saved, before = copy.deepcopy(first.state_dict()), values(model)
    model(TOKENS).backward()
    assert model.second.bias.grad is not None
    model.second.bias.grad[0] = float("inf")
    first.step()
    same(values(model), before)
    twin.load_state_dict(model.state_dict())
    second = make(twin)
    second.load_state_dict(saved)
    train(model, first, 2, start=2)
    train(twin, second, 2, start=2)
    same(values(model), values(twin))


def test_16_bit_gradients_are_summed_in_float32() -> None:
    p = nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
    optimizer = optim.optimizer(CLIPPED)([p])
    p.grad = torch.full_like(p, 0.01)
    optimizer.step()
    value = float(torch.tensor(0.01, dtype=torch.bfloat16)) * 100_000**0.5
    assert optimizer.param_groups[0]["gradient_norm"] == pytest.approx(value, rel=1e-6)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(AxesError, match="no coupled decay"):
        wrappers.clipped(optim.SGD.declare(), 1.0, "all")
    with pytest.raises(AxesError, match="must be positive"):
        wrappers.clipped(optim.AdamW.declare(), 0.0, "all")


def test_a_sharded_parameter_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("axes.optim.engine.across.spread", lambda p: True)
    with pytest.raises(AxesError, match="gradient_norm is a number of all parameters, which no process has"):
        optim.LAMB(net(), max_norm=1.0)
    optim.LAMB(net())
