"""Adafactor beside torch's, beside pytorch_optimizer's, and the memory that it is about."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError

SHAPES = ((4, 6), (4, 6), (5,), (), (7, 2))


def walk(make: Any, dtype: torch.dtype = torch.float64, steps: int = 120, shapes: Any = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]
    optimizer = make(ps)
    for t in range(steps):
        for p in ps:
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64) * (1 + 5 * (t % 7 == 0))
            p.grad = g.to(dtype)
        optimizer.step()
    return [p.detach() for p in ps]


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float(((x - y).abs() / y.abs().clamp_min(1e-2)).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("mine", "torchs"),
    [
        ({}, {}),
        ({"lr": 0.3, "weight_decay": 0.1}, {"lr": 0.3, "weight_decay": 0.1}),
        ({"beta2_decay": -0.5, "eps": (1e-2, 0.5), "d": 1.5}, {"beta2_decay": -0.5, "eps": (1e-2, 0.5), "d": 1.5}),
        ({"maximize": True}, {"maximize": True}),
    ],
    ids=str,
)
def test_against_torch(mine: dict[str, Any], torchs: dict[str, Any], foreach: bool) -> None:
    """The scheduled rate min(lr, 1/sqrt(t)) is below lr = 0.3 from the 12th step on."""
    theirs = walk(lambda ps: torch.optim.Adafactor(ps, **torchs))
    assert gap(walk(lambda ps: optim.Adafactor(ps, foreach=foreach, **mine)), theirs) < 1e-11


def test_against_torch_in_float32() -> None:
    theirs = walk(lambda ps: torch.optim.Adafactor(ps, 0.1), torch.float32)
    assert gap(walk(lambda ps: optim.Adafactor(ps, 0.1), torch.float32), theirs) < 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("schedule", [False, True])
def test_against_pytorch_optimizer(schedule: bool, momentum: float) -> None:
    """The paper's eps; its scheduled rate is min(0.01, 1/sqrt(t))."""
    given = {"schedule": schedule, "momentum": momentum, "guard": "added", "eps": (1e-30, 1e-3)}
    ours = walk(lambda ps: optim.Adafactor(ps, 0.01, **given))
    peer: dict[str, Any] = {"momentum_dtype": torch.float64, "relative_step": schedule}
    theirs = walk(lambda ps: pytorch_optimizer.AdaFactor(ps, 0.01, betas=(momentum or None, 1.0 - 1e-9), **peer))
    assert gap(ours, theirs) < 1e-11


def test_the_state_is_a_number_a_row_and_a_number_a_column() -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 10))
    optimizer = optim.Adafactor(model)
    report = optimizer.report()
    expected = (200 + 300) + (1 + 200) + (10 + 200) + (1 + 10)  # of a vector: its own numbers and their mean
    held = sum(x.numel() for state in optimizer.state.values() for name, x in state.items() if "count" not in name)
    assert held == expected
    assert report.state_bytes < 0.02 * optim.AdamW(model).report().state_bytes
    shapes = {tuple(x.shape) for x in optimizer.state[model[0].weight].values() if x.ndim}
    assert shapes == {(200, 1), (1, 300)}


def test_steps_are_relative_unless_asked() -> None:
    for relative, expected in ((True, 0.1 * 4.0), (False, 0.1)):
        p = nn.Parameter(torch.full((3, 2), 4.0))
        p.grad = torch.ones(3, 2)
        optim.Adafactor([p], 0.1, relative=relative).step()
        torch.testing.assert_close(4.0 - p.detach(), torch.full((3, 2), expected))


def test_options_that_make_no_sense_are_refused() -> None:
    p = [nn.Parameter(torch.ones(2, 2))]
    for given, message in (
        ({"beta2_decay": 0.8}, "exponent below 0"),
        ({"d": 0.0}, "radius must be positive"),
        ({"eps": (0.0, 1e-3)}, "eps must be positive"),
        ({"eps": (None, 0.0)}, r"eps\[1\], the least size of a relative step, must be positive"),
        ({"guard": "none"}, "guard 'none'"),
        ({"momentum": 1.0}, "momentum must lie"),
    ):
        with pytest.raises(AxesError, match=message):
            optim.Adafactor(p, **given)  # type: ignore[arg-type]
