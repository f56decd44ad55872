"""Schedule-free training: the average is the weighted mean of all iterates, whatever the rule inside is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError
from axes.optim.engine.capabilities import needs_matrices
from axes.optim.rules import wrappers

STEPS = 12


def start() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients() -> Tensor:
    return torch.randn(STEPS, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def at(y: Tensor, t: int) -> Tensor:
    """A gradient that depends on where it is taken."""
    return gradients()[t] + 0.3 * y


def run(optimizer: Any, p: Tensor, lrs: list[float] | None = None) -> None:
    for t in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lrs[t] if lrs else group["lr"]
        p.grad = at(p.detach(), t)
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("power", [0.0, 2.0])
def test_x_is_the_weighted_mean_of_the_start_and_all_z(power: float, foreach: bool) -> None:
    """In closed form: x_T = sum w_t z_t / sum w_t with w_0 = w_1, for SGD inside and a warm-up."""
    lrs = [0.1 * min(1.0, (t + 1) / 5) for t in range(STEPS)]
    p = nn.Parameter(start())
    inside = optim.SGD.declare(0.0)
    optimizer = optim.ScheduleFree([p], 0.1, beta=0.8, rule=inside, lr_power=power, foreach=foreach)
    z, seen, weights, y = start(), [start()], [lrs[0] ** power], start()
    for t, lr in enumerate(lrs):
        z = z - lr * at(y, t)
        seen.append(z)
        weights.append(lr**power)
        w = torch.tensor(weights, dtype=torch.float64)
        x = torch.einsum("t,tij->ij", w / w.sum(), torch.stack(seen))
        y = 0.8 * x + 0.2 * z
    run(optimizer, p, lrs)
    torch.testing.assert_close(p.detach(), y, rtol=0, atol=1e-13)
    optimizer.eval()
    torch.testing.assert_close(p.detach(), x, rtol=0, atol=1e-13)
    optimizer.train()
    torch.testing.assert_close(p.detach(), y, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "inside",
    [None, optim.Lion.declare(), wrappers.cautious(optim.AdamW.declare()), optim.Muon.declare(precision="input")],
    ids=["adamw", "lion", "cautious adamw", "muon"],
)
def test_any_rule_goes_inside(inside: Any) -> None:
    """With its decay at z, z moves as the rule alone would on the same gradients."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    optimizer = optim.ScheduleFree(model, lr=0.01, weight_decay=0.1, rule=inside, decay_at="z")
    weight = model[1].weight
    alone = nn.Parameter(weight.detach().clone())
    rule = optim.AdamW.declare((0.0, 0.999)) if inside is None else inside
    groups: Any = [{"params": [alone], **({"rule": "matrix"} if needs_matrices(rule) else {})}]
    plain = optim.optimizer(rule)(groups, lr=0.01, weight_decay=0.1)
    torch.manual_seed(0)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 3, dtype=torch.float64)).square().mean().backward()
        assert weight.grad is not None
        alone.grad = weight.grad.clone()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(optimizer.state[weight]["via.0.theta"], alone.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("inside", ["adamw", "lion", "heavy ball", "plain"])
def test_decay_is_of_the_point_where_the_gradient_is(inside: str, foreach: bool) -> None:
    """z = (rule without decay on z) - lr wd y."""
    rule = {
        "adamw": optim.AdamW.declare((0.0, 0.999)),
        "lion": optim.Lion.declare(),
        "heavy ball": optim.SGD.declare(0.9, decoupled=True),
        "plain": optim.SGD.declare(0.0, decoupled=True),
    }[inside]
    lr, decay, beta = 0.05, 0.3, 0.8
    p, z = nn.Parameter(start()), nn.Parameter(start())
    optimizer = optim.ScheduleFree([p], lr, beta=beta, weight_decay=decay, rule=rule, foreach=foreach)
    alone = optim.optimizer(rule)([z], lr=lr, weight_decay=0.0)
    x = y = start()
    for t in range(STEPS):
        p.grad = at(p.detach(), t)
        z.grad = at(y, t)
        optimizer.step()
        alone.step()
        with torch.no_grad():
            z -= lr * decay * y
        x = x + (z.detach() - x) / (t + 2)
        y = beta * x + (1 - beta) * z.detach()
        torch.testing.assert_close(p.detach(), y, rtol=0, atol=1e-13)


def test_a_coupled_decay_is_of_that_point_too() -> None:
    p, q = nn.Parameter(start()), nn.Parameter(start())
    decayed = optim.ScheduleFree([p], 0.05, rule=optim.SGD.declare(0.9), weight_decay=0.3)
    plain = optim.ScheduleFree([q], 0.05, rule=optim.SGD.declare(0.9))
    for t in range(STEPS):
        p.grad, q.grad = at(p.detach(), t), at(q.detach(), t) + 0.3 * q.detach()
        decayed.step()
        plain.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-13)


def test_the_authors_form_as_published_in_pytorch_optimizer() -> None:
    """Where the start counts as in theirs: not at all."""
    p, q = nn.Parameter(start()), nn.Parameter(start())
    theirs = pytorch_optimizer.ScheduleFreeAdamW([q], 0.05, (0.9, 0.99), weight_decay=0.3)
    theirs.train()
    rule = wrappers.schedule_free(optim.AdamW.declare((0.0, 0.99)), 0.9)
    ours = optim.optimizer(rule)([p], lr=0.05, weight_decay=0.3, average=1.0)
    for t in range(STEPS):
        ours.param_groups[0]["average"] = 1 / (t + 1)
        p.grad, q.grad = at(p.detach(), t), at(q.detach(), t)
        ours.step()
        theirs.step()
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-13)


def test_an_average_is_not_stepped() -> None:
    p = nn.Parameter(start())
    optimizer = optim.ScheduleFree([p], lr=0.1)
    optimizer.eval()
    optimizer.train()
    run(optimizer, p)
    optimizer.eval()
    shown = p.detach().clone()
    with pytest.raises(AxesError, match=r"call optimizer\.train\(\)"):
        optimizer.step()
    assert torch.equal(p, shown)
    optimizer.eval()
    assert torch.equal(p, shown)


def test_a_step_that_fails_weighs_nothing() -> None:
    p = nn.Parameter(start())
    optimizer = optim.ScheduleFree([p], lr=0.1)
    run(optimizer, p)
    before = copy.deepcopy(optimizer.state_dict())
    p.grad = torch.full_like(p, torch.nan)
    with pytest.raises(AxesError, match="not finite"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_sum"] == before["param_groups"][0]["weight_sum"]


def test_a_run_continues_from_its_state() -> None:
    p, q = nn.Parameter(start()), nn.Parameter(start())
    optimizer = optim.ScheduleFree([p], lr=0.1)
    run(optimizer, p)
    with torch.no_grad():
        q.copy_(p)
    other = optim.ScheduleFree([q], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, p)
    run(other, q)
    assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.0}, r"\(0, 1\)"),
        ({"lr_power": -1.0}, "lr_power"),
        ({"decay_at": "x"}, "decay_at 'x': known: y, z"),
        ({"rule": optim.SignedEG.declare()}, "keeps and shows"),
        ({"rule": wrappers.schedule_free(optim.AdamW.declare())}, "keeps and shows"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AxesError, match=message):
        optim.ScheduleFree([nn.Parameter(start())], **options)
