"""What is interpreted is executed once for all parameters of a shape, and is what it is for each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axes import optim
from axes.core.state_update import StateUpdate
from axes.optim.rules import wrappers

SHAPES = ((4, 3), (4, 3), (2, 5), (4, 3))
CLIPPED = optim.optimizer(wrappers.clipped(optim.AdamW.declare(), 0.5))
RULES: dict[str, Any] = {
    "clipped": lambda ps, **options: CLIPPED(ps, lr=0.1, **options),
    "PSGD": lambda ps, **options: optim.PSGDKron([{"params": ps, "rule": "psgd-kron"}], lr=0.1, **options),
}


def pair(rule: str) -> list[tuple[list[nn.Parameter], Any]]:
    """Parameters under the batches and under the interpreter, one after another."""
    out = []
    for foreach in (True, False):
        generator = torch.Generator().manual_seed(0)
        ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]
        out.append((ps, RULES[rule](ps, foreach=foreach)))
    return out


def step(ps: list[nn.Parameter], optimizer: Any, t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    optimizer.step()


def same(one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rule", RULES)
def test_what_others_change_between_steps_is_seen(rule: str) -> None:
    (ps, one), (qs, other) = pair(rule)
    for t in range(6):
        step(ps, one, t), step(qs, other, t)
        if t == 2:  # weights that are clipped, or loaded
            for p in (*ps, *qs):
                p.data.clamp_(-1, 1)
        if t == 3:  # a state that another has made
            for some, optimizer in ((ps, one), (qs, other)):
                state = optimizer.state[some[1]]
                name = next(n for n, x in state.items() if x.is_floating_point() and x.ndim)
                state[name] = state[name] * 0.5
        if t == 4:  # parameters that a step leaves out
            ps[2].grad = qs[2].grad = None
            one.step(), other.step()
    same(ps, qs)


@pytest.mark.parametrize(("rule", "times"), [("clipped", 0), ("PSGD", 2)])
def test_a_step_is_a_program_or_executes_the_tuple_once_for_each_shape(
    rule: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ps, one), _ = pair(rule)
    for t in range(2):
        step(ps, one, t)
    seen, execute = [], StateUpdate.step

    def counted(self: StateUpdate, *given: Any, **named: Any) -> Any:
        seen.append(self)
        return execute(self, *given, **named)

    monkeypatch.setattr(StateUpdate, "step", counted)
    step(ps, one, 2)
    assert len(seen) == times


@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_that_joins_late_counts_for_itself(rule: str) -> None:
    (ps, one), (qs, other) = pair(rule)
    for t in range(4):
        for some, optimizer in ((ps, one), (qs, other)):
            generator = torch.Generator().manual_seed(t)
            for i, p in enumerate(some):
                g = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.grad = None if i == 1 and t < 2 else g
            optimizer.step()
    same(ps, qs)
    assert [int(one.state[p]["count"]) for p in ps] == [4, 2, 4, 4]
