"""Rules whose rates depend on the number of the step: one program, whoever computes its numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.core.algorithms import Step, Sum
from axes.core.costs import Given, Linear
from axes.core.geometry import Spectral
from axes.core.monoids import Decay, Scalar, Zero
from axes.core.rates import Count, Per, maximum, minimum, where
from axes.core.state_update import StateUpdate
from axes.optim.engine.together import program
from tests.interpreter import interpret
from tests.optim.test_generated import batches, by_kernel

T, LR = Count(), Per("lr")
PLAIN = StateUpdate(Linear(), monoid=Zero())
RULE = StateUpdate(  # a decay that begins late, a step that shrinks, a retention that grows, a mix that changes
    Given(),
    monoid=Decay(where(T > 2, 0.3, 0.0)),
    algorithm=Step(
        LR / (1.0 + 0.2 * (T - 1.0)),
        via=(
            StateUpdate(Linear(), monoid=Scalar(1.0 - T**-0.8), algorithm=Step(T**-0.8)),
            Sum((PLAIN, StateUpdate(Linear(), monoid=Scalar(0.5))), (1.0, maximum(0.3, 1.0 / T))),
        ),
    ),
)


def gradients(t: int, parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(t)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def fresh(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [
        nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in ((3, 4), (5,), ())
    ]


def walk(steps: range, parameters: list[nn.Parameter], optimizer: Any) -> list[Tensor]:
    for t in steps:
        gradients(t, parameters)
        optimizer.step()
    return [p.detach() for p in parameters]


def by_hand(steps: int) -> list[Tensor]:
    """The recurrence, written out."""
    parameters = fresh()
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    with torch.no_grad():
        for t in range(1, steps + 1):
            gradients(t - 1, parameters)
            for i, p in enumerate(parameters):
                assert p.grad is not None
                first[i] = (1 - t**-0.8) * first[i] + t**-0.8 * p.grad
                second[i] = 0.5 * second[i] + first[i]
                step = first[i] + max(0.3, 1 / t) * second[i]
                p.mul_(1 - 0.1 / (1 + 0.2 * (t - 1)) * (0.3 if t > 2 else 0.0)).sub_(0.1 / (1 + 0.2 * (t - 1)) * step)
    return [p.detach() for p in parameters]


def close(a: list[Tensor], b: list[Tensor], bound: float) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound)


@pytest.mark.parametrize("way", [{"foreach": False}, {}, {"capturable": True}], ids=str)
def test_against_the_recurrence(way: dict[str, bool]) -> None:
    parameters = fresh()
    optimizer = optim.optimizer(RULE)(parameters, lr=0.1, **way)
    close(walk(range(8), parameters, optimizer), by_hand(8), 1e-13)
    found = program(RULE.normal())
    assert found is not None and "count" in found.inputs
    assert bool(batches(optimizer)) == (way != {"foreach": False})


def test_parameters_step_by_their_own_counts() -> None:
    """One that has no gradient in some steps is that many data behind, and in another batch."""
    ways = []
    for way in ({"foreach": False}, {}, {"capturable": True}):
        parameters = fresh()
        optimizer = optim.optimizer(RULE)(parameters, lr=0.1, **way)
        for t in range(6):
            gradients(t, parameters)
            if t in (1, 2):
                parameters[1].grad = None
            optimizer.step()
        assert [int(optimizer.state[p]["count"]) for p in parameters] == [6, 4, 6]
        ways.append([p.detach() for p in parameters])
    close(ways[1], ways[0], 1e-14)
    close(ways[2], ways[0], 1e-14)


def test_it_resumes_bit_for_bit() -> None:
    parameters = fresh(torch.float32)
    optimizer = optim.optimizer(RULE)(parameters, lr=0.1)
    walk(range(3), parameters, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = optim.optimizer(RULE)(again, lr=0.1)
    other.load_state_dict(saved)
    for x, y in zip(walk(range(3, 6), parameters, optimizer), walk(range(3, 6), again, other), strict=True):
        assert torch.equal(x, y)


def test_a_rule_that_mixes_entries_is_interpreted() -> None:
    """Programs between products do not know the number; the tuple does."""
    turned = StateUpdate(Linear(), Spectral("polar"), Scalar(0.5))
    mixing = StateUpdate(Given(), algorithm=Step(LR / T, via=(turned,)))
    ways = []
    for way in ({"foreach": False}, {}):
        p = [nn.Parameter(fresh()[0].detach().clone())]
        optimizer = optim.optimizer(mixing)([{"params": p, "rule": "matrix"}], lr=0.1, **way)
        ways.append(walk(range(4), p, optimizer))
        assert not batches(optimizer)
    close(ways[1], ways[0], 1e-13)


# ---- in kernels ------------------------------------------------------------------------------------------------------


RATIONAL = StateUpdate(  # Triton's interpreter has no powers
    Given(),
    monoid=Decay(where(T > 2, 0.3, 0.0)),
    algorithm=Step(
        LR / (1.0 + 0.2 * (T - 1.0)),
        via=(StateUpdate(Linear(), monoid=Scalar(minimum(0.9, 1.0 - 1.0 / T)), algorithm=Step(1.0 / T)),),
    ),
)


def kernels() -> None:
    """With the count on the host, and on the device."""
    interpreted = fresh()
    walk(range(5), interpreted, optim.optimizer(RATIONAL)(interpreted, lr=0.1, foreach=False))
    for way in ({}, {"fused": True}):
        parameters = fresh()
        optimizer = optim.optimizer(RATIONAL)(parameters, lr=0.1, **way)
        close(walk(range(5), parameters, optimizer), [p.detach() for p in interpreted], 1e-12)
        assert by_kernel(optimizer) != bool(way)
        counts = batches(optimizer)[0].entries.kernel.counts
        assert counts.tolist() == [5] * len(counts)


def test_in_kernels() -> None:
    setup = (
        "from tests.optim import test_counted as t, test_generated as g; g.generated.no_kernels = lambda device: None"
    )
    interpret(f"{setup}; t.kernels()")
