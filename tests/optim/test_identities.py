"""Relations between rules that hold without any other package."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Given, Linear
from axes.core.geometry import Cautious, Entropic, SignBall, Spectral, Whiten
from axes.core.monoids import Decay, Zero
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from tests.drawn import drawn

LR, DECAY = Per("lr"), Per("weight_decay")
POLAR = Spectral(method="polar")


def walk(make: Any, shape: tuple[int, ...] = (4, 6), steps: int = 30, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    optimizer = make(p)
    for _ in range(steps):
        p.grad = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return p.detach()


def on_matrix(update: StateUpdate, **rates: Any) -> Any:
    return lambda p: optim.optimizer(update)([{"params": [p], "rule": "matrix"}], **rates)


def everywhere(update: StateUpdate, **rates: Any) -> Any:
    return lambda p: optim.optimizer(update)([p], **rates)


def muon(momentum: Momentum | None) -> StateUpdate:
    return StateUpdate(Given(), OnUpdate(POLAR), Decay(DECAY), Step(LR, via=(momentum,) if momentum else ()))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_exact_muon_does_not_see_the_scale_of_its_buffer() -> None:
    """EMA and sum momentum differ by the factor 1 - beta, which the polar factor forgets."""
    ema = walk(on_matrix(muon(Momentum(0.95, "ema")), lr=0.1, weight_decay=0.1))
    close(ema, walk(on_matrix(muon(Momentum(0.95, "sum")), lr=0.1, weight_decay=0.1)))
    close(ema, walk(on_matrix(muon(Momentum(0.95, "ema")), lr=0.1, weight_decay=0.1), scale=1e-3))


def test_muon_without_momentum_is_shampoo_on_one_batch_is_one_sided_whitening() -> None:
    polar = walk(on_matrix(muon(None), lr=0.1))
    fresh = (StateUpdate(Linear("left"), monoid=Zero()), StateUpdate(Linear("right"), monoid=Zero()))

    def whitened(h: Whiten) -> Tensor:
        step = Step(LR, via=(StateUpdate(Linear(), h, Zero()),))
        return walk(on_matrix(StateUpdate(Given(), monoid=Decay(DECAY), algorithm=step), lr=0.1))

    close(polar, whitened(Whiten(fresh, "kronecker", 0.25, eps=0.0)), 1e-10)
    close(polar, whitened(Whiten(fresh[1:], "right", 0.5, eps=0.0)), 1e-10)


def test_exponentiated_gradient_is_softmax_of_accumulated_gradients() -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(3, 5, generator=generator, dtype=torch.float64).softmax(-1)
    p = nn.Parameter(start.clone())
    update = StateUpdate(Given(), Entropic("last"), algorithm=Step(LR))
    optimizer = optim.optimizer(update)([p], lr=0.1)
    expected = start
    for _ in range(30):
        p.grad = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        expected = expected * torch.exp(-0.1 * p.grad)
        expected = expected / expected.sum(-1, keepdim=True)
        optimizer.step()
    close(p.detach(), expected, 1e-15)


def test_adam_without_memory_is_signed_descent() -> None:
    signed = walk(everywhere(StateUpdate(Given(), OnUpdate(SignBall()), algorithm=Step(LR)), lr=0.1))
    close(walk(lambda p: optim.Adam([p], lr=0.1, betas=(0.0, 0.0), eps=0.0)), signed, 1e-14)
    close(walk(lambda p: optim.Lion([p], lr=0.1, betas=(0.0, 0.0))), signed, 0.0)


def test_cautious_with_agreeing_signs_is_the_base_rule() -> None:
    """Without memory the direction always agrees with the drive: the count form rescales by n / (n + 1) only."""
    n = 24
    base = walk(everywhere(StateUpdate(Given(), OnUpdate(SignBall()), algorithm=Step(LR)), lr=0.1))
    mean = StateUpdate(Given(), OnUpdate(Cautious(SignBall(), "mean")), algorithm=Step(LR))
    count = StateUpdate(Given(), OnUpdate(Cautious(SignBall(), "count")), algorithm=Step(LR))
    close(walk(everywhere(mean, lr=0.1)), base)
    close(walk(everywhere(count, lr=0.1 * (n + 1) / n)), base)


def test_adam_is_torch_adam_as_a_given_tuple() -> None:
    theirs = walk(lambda p: torch.optim.AdamW([p], 0.1, weight_decay=0.1))
    close(walk(everywhere(optim.AdamW.update, lr=0.1, weight_decay=0.1)), theirs)


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW, optim.Lion])
def test_a_complex_parameter_is_a_pair_of_real_ones(cls: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    draws = [torch.randn(3, 4, 2, generator=generator, dtype=torch.float64) for _ in range(31)]
    z, r = nn.Parameter(torch.view_as_complex(draws[0].clone())), nn.Parameter(draws[0].clone())
    for p in (z, r):
        optimizer = cls([p], lr=0.01, weight_decay=0.1)
        for g in draws[1:]:
            p.grad = torch.view_as_complex(g) if p is z else g
            optimizer.step()
    assert torch.equal(torch.view_as_real(z.detach()), r.detach())


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW, optim.Lion])
def test_maximizing_is_minimizing_the_negative(cls: Any) -> None:
    up = walk(lambda p: cls([p], lr=0.01, maximize=True))
    assert torch.equal(up, walk(lambda p: cls([p], lr=0.01), scale=-1.0))


@pytest.mark.parametrize("cls", drawn(optim.ALL, 2))
def test_a_tensor_lr_is_a_number(cls: Any) -> None:
    """Bit for bit that of the tensor, which in float32 is not 0.01: gradients of low rank make that 1e-3 of SOAP."""

    def train(lr: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to(dtype)
        optimizer = cls(net, lr=lr, **options)
        for group in optimizer.param_groups:
            group["lr_scale"] = 0.3
        x = torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4)
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for dtype in (torch.float32, torch.float64):
        lr = torch.tensor(0.01, dtype=torch.float32)
        for options in ({}, {"foreach": False}):
            for a, b in zip(train(lr.item(), dtype, **options), train(lr, dtype, **options), strict=True):
                assert torch.equal(a, b)


def test_order_of_groups_does_not_matter() -> None:
    torch.manual_seed(0)
    start = [torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)]

    def train(swap: bool) -> list[Tensor]:
        ps = [nn.Parameter(s.clone()) for s in start]
        groups = [{"params": [ps[0]], "lr": 0.1}, {"params": [ps[1]], "lr": 0.01}]
        optimizer = optim.AdamW(groups[::-1] if swap else groups)
        for _ in range(5):
            for p in ps:
                p.grad = p.detach().sin()
            optimizer.step()
        return [p.detach() for p in ps]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
