"""What tokens do to the gradient that goes back through them, under the defaults of layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.core import reference
from axes.sequence import FrankWolfeDelta, Memora, Moneta, MonetaLiteral, Titans, Yaad, YaadSwitch
from axes.sequence.charts import Capped, LogSigmoid
from axes.sequence.predicted import FrankWolfe

D = 6


def chart() -> FrankWolfe:
    (found,) = (c for _, c in FrankWolfeDelta.block.charts if isinstance(c, FrankWolfe))
    return found


def said_again(gamma: float, radius: float, times: int) -> float:
    """The largest gradient of what is left in a memory, by a value: one pair of length one, `times` times."""
    draw = torch.Generator().manual_seed(0)
    key, value, into = (torch.randn(D, dtype=torch.float64, generator=draw) for _ in range(3))
    values = (value / value.norm()).repeat(times, 1).requires_grad_()
    signal = {
        "k": (key / key.norm()).expand(times, D),
        "v": values,
        "q": key.expand(times, D),
        "decay": torch.full((times,), math.log1p(-gamma), dtype=torch.float64),
        "beta": torch.full((times,), radius * gamma, dtype=torch.float64),
    }
    read = reference.run(FrankWolfeDelta.update, signal)[0]
    return float(torch.autograd.grad((read[-1] * into).sum(), values)[0].norm(dim=-1).max())


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9])
def test_a_frank_wolfe_memory_hands_a_pair_said_again_and_again_back(gamma: float) -> None:
    """No token multiplies by more than one, so 60 tokens do not; in a ball that holds the value they do by 1e6."""
    assert said_again(gamma, chart().radius, 60) < 10


def test_in_a_ball_that_holds_its_values_errors_come_near_zero() -> None:
    """The control: why the radius is what it is."""
    assert said_again(0.5, 4.0, 60) > 1e6


@pytest.mark.parametrize("gamma", [0.05, 0.5, 0.99])
def test_a_token_of_frank_wolfe_shrinks_what_the_state_is_off_by(gamma: float) -> None:
    """Its derivative at states of the ball, as near to the value as they come: eigenvalues 1 - gamma to 1 - 2 gamma."""
    radius = chart().radius
    draw = torch.Generator().manual_seed(1)
    k, v = (x / x.norm() for x in torch.randn(2, D, dtype=torch.float64, generator=draw))

    def step(w: Tensor) -> Tensor:
        signal: dict[str, Any] = {"k": k, "v": v, "q": k}
        rates = {"decay": math.log1p(-gamma), "beta": radius * gamma}
        signal |= {n: torch.tensor(x, dtype=torch.float64) for n, x in rates.items()}
        return reference.run(FrankWolfeDelta.update, {n: x[None] for n, x in signal.items()}, weights=(w,))[1].theta[0]

    aside = torch.randn(D, dtype=torch.float64, generator=draw)
    aside = aside - (aside @ v) * v
    for near in (v, -v, v + 0.3 * aside / aside.norm(), aside):
        w = radius * torch.outer(near / near.norm(), k)
        jacobian = torch.autograd.functional.jacobian(step, w).reshape(D * D, D * D)
        found = torch.linalg.eigvals(jacobian)
        assert found.imag.abs().max() < 1e-9
        assert found.real.min() > 1 - 2 * gamma - 1e-9 and found.real.max() < 1 - gamma + 1e-9


def through_gates(cls: type[Any], logit: float, root: float | None = None) -> float:
    """The gradient at 256 random tokens of a memory whose rates have come near their caps, and gates to this logit."""
    torch.manual_seed(0)
    charts = dict(cls.block.charts)
    (rate,) = (n for n, c in charts.items() if isinstance(c, Capped))
    charts[rate] = replace(charts[rate], start=0.9 * charts[rate].scale)
    assert isinstance(charts["decay"], LogSigmoid)
    charts["decay"] = replace(charts["decay"], bias=logit, **({} if root is None else {"temperature": root}))
    layer = cls(32, heads=1, block=replace(cls.block, charts=tuple(charts.items())), dtype=torch.float64)
    x = torch.randn(1, 256, 32, dtype=torch.float64, requires_grad=True)
    y = layer(x)[0]
    return float(torch.autograd.grad((y * torch.randn_like(y)).sum(), x)[0].norm())


@pytest.mark.parametrize("cls", [Yaad, YaadSwitch, Titans, Memora, MonetaLiteral])
def test_gates_of_a_memory_behind_a_layer_norm_stay_where_tokens_turn_it_little(cls: type[Any]) -> None:
    """Wherever training takes them: at a logit of -8 the gradient is that of a logit of 0, within a tenth."""
    assert through_gates(cls, -8.0) < 1.1 * through_gates(cls, 0.0) < 100


def test_gates_of_a_cubic_cost_behind_a_layer_norm() -> None:
    """Whose slope grows with the error: a logit of -8 has not three times the gradient of one of 0."""
    assert through_gates(Moneta, -8.0) < 3 * through_gates(Moneta, 0.0) < 300


@pytest.mark.parametrize("cls", [Moneta, Memora])
def test_gates_without_a_root_turn_other_links_as_well(cls: type[Any]) -> None:
    """The control: what these had before."""
    assert through_gates(cls, 0.0, root=1.0) > 1000


@pytest.mark.parametrize("cls", [Yaad, YaadSwitch, Titans])
def test_a_gate_that_forgets_turns_what_is_behind_a_layer_norm(cls: type[Any]) -> None:
    """The control: the same logit below a 64th root, alpha = 0.88."""
    assert through_gates(cls, -8.0, root=64.0) > 500


@pytest.mark.parametrize("cls", [Yaad, YaadSwitch, Titans, Moneta, MonetaLiteral, Memora])
def test_what_a_memory_behind_a_layer_norm_is_scaled_and_moved_by_is_not_learned(cls: type[Any]) -> None:
    layer = cls(32, heads=1)
    assert not [name for name, _ in layer.named_parameters() if "ln_gain" in name or "ln_bias" in name]
