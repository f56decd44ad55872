"""Numbers that are zero today take their operations out of a step on a CPU; signs take no pass too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.optim.engine.together import program
from axes.programs.batched import Schedule
from axes.programs.program import trace

PASSES = {"SGD": 1, "SignSGD": 2, "Lion": 4, "NAdam": 8}  # operations over the entries, without decay


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in ((4, 3), (5,), (300, 300))]


def both(name: str, **options: Any) -> tuple[Any, Any]:
    cls = getattr(optim, name)
    return cls(parameters(), lr=0.01, **options), cls(parameters(), lr=0.01, foreach=False, **options)


@pytest.mark.parametrize("name", [*PASSES, "AdamW", "AdEMAMix"])
def test_numbers_that_come_and_go_mean_what_they_say(name: str) -> None:
    a, b = both(name)
    for t in range(6):
        for optimizer in (a, b):
            generator = torch.Generator().manual_seed(t)
            (group,) = optimizer.param_groups
            group["weight_decay"] = 0.1 * (t % 3 == 1)
            group["lr"] = 0.01 * (t != 4)
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)
        for n, x in a.state[p].items():
            torch.testing.assert_close(x, b.state[q][n], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", PASSES)
def test_a_step_takes_as_few_passes_as_it_can(name: str) -> None:
    (optimizer, _) = both(name)
    found = program(optimizer.form_for(optimizer.param_groups[0]))
    assert found is not None
    assert len(Schedule(found.without(frozenset({"weight_decay"}))).steps) == PASSES[name] <= len(Schedule(found).steps)


def run(step: Any, values: dict[str, Tensor], numbers: tuple[str, ...] = (), **given: float) -> dict[str, Tensor]:
    """A function by its schedule."""
    schedule = Schedule(trace(step, tuple(values), numbers))
    held = {n: [x.clone()] for n, x in values.items()}
    schedule.run([held[n] for n in schedule.names], schedule.program.numbers(given))
    return {n: xs[0] for n, xs in held.items()}


@pytest.mark.parametrize("factor", [3.0, -3.0])
def test_signs_of_multiples_are_signs(factor: float) -> None:
    """Planted where it would hide: a factor that is negative, and one that nobody knows to be positive."""
    x = {"parameter": torch.randn(3, 5), "g": torch.randn(3, 5), "m": torch.randn(3, 5)}

    def step(v: dict[str, Tensor]) -> dict[str, Tensor]:
        mixed = factor * v["m"] + 0.5 * v["g"]
        unknown = torch.sign(v["c"] * v["g"]) if "c" in v else torch.sign(-v["g"])
        return {"parameter": torch.sign(mixed) + 2.0 * unknown, "m": v["m"] * 0.5}

    for name, value in x.items():
        value[0, 0] = 0.0 if name == "g" else value[0, 0]
    for c in (None, 2.0, -2.0):
        numbers = () if c is None else ("c",)
        extra = {} if c is None else {"c": torch.tensor(c)}
        wanted = step({**x, **extra})
        made = run(step, x, numbers, **({} if c is None else {"c": c}))
        assert torch.equal(made["parameter"], wanted["parameter"]) and torch.equal(made["m"], wanted["m"])


def test_a_guard_that_is_a_number_gives_zero_where_it_fails() -> None:
    g = {"parameter": torch.randn(3, 5), "g": torch.randn(3, 5)}

    def step(v: dict[str, Tensor]) -> dict[str, Tensor]:
        safe = torch.where(v["n"] != 0, v["n"], 1.0)
        return {"parameter": v["parameter"] + torch.where(v["n"] != 0, v["g"] / safe, 0.0)}

    for n in (0.0, 4.0):
        made = run(step, g, ("n",), n=n)
        torch.testing.assert_close(made["parameter"], step({**g, "n": torch.tensor(n)})["parameter"])
