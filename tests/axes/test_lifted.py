"""Constants as numbers of the step: the same bits, and one program for all values of a hyperparameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axes import optim
from axes.core.state_update import StateUpdate
from axes.optim.engine.together import program
from axes.programs.batched import Schedule
from axes.programs.lifted import lifted
from axes.programs.program import Program
from tests.optim.table import ENTRYWISE


def traced(cls: Any, options: dict[str, Any]) -> Program:
    optimizer = cls([torch.nn.Parameter(torch.ones(3))], lr=0.01, **options)
    found = program(optimizer.update_for(optimizer.param_groups[0]))
    assert found is not None
    return found


PROGRAMS = {f"{i}-{n}": traced(i.cls, options) for i in ENTRYWISE for n, options in enumerate(i.configurations)}


def step(found: Program, constants: dict[str, float]) -> dict[str, torch.Tensor]:
    """What one step makes of entries and numbers."""
    generator = torch.Generator().manual_seed(0)
    shaped = {n: torch.rand(50, generator=generator) for n, i in found.inputs.items() if found.shaped(i)}
    numbers = [n for n, i in found.inputs.items() if not found.shaped(i) and n not in constants]
    schedule = Schedule(found)
    values = found.numbers({**{n: 0.3 + 0.1 * k for k, n in enumerate(numbers)}, **constants})
    schedule.run([[shaped[n]] for n in schedule.names], values)
    after = {n: v for n, v in found.outputs.items() if not found.shaped(v)}
    return {**shaped, **{n: torch.tensor(values[v] if isinstance(v, int) else v) for n, v in after.items()}}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_are_the_same(name: str) -> None:
    found = PROGRAMS[name]
    other, constants = lifted(found)
    assert [op.name for op in other.operations if op.name != "input"] == [
        op.name for op in found.operations if op.name != "input"
    ]
    kinds = [op.name == "input" for op in other.operations]
    assert kinds == sorted(kinds, reverse=True)  # inputs come first
    assert {n for n, i in other.inputs.items() if not other.shaped(i)} >= constants.keys()
    expected, given = step(found, {}), step(other, constants)
    assert expected.keys() == given.keys()
    assert all(torch.equal(x, given[n]) for n, x in expected.items())


@pytest.mark.parametrize(
    ("one", "other"),
    (
        (optim.AdamW.declare((0.9, 0.999)), optim.AdamW.declare((0.85, 0.99), eps=1e-6)),
        (optim.SGD.declare(0.9, dampening=0.1), optim.SGD.declare(0.5, dampening=0.3)),
        (optim.NAdam.declare((0.9, 0.99), 1e-8, None), optim.NAdam.declare((0.5, 0.9), 1e-8, None)),
        (optim.Lion.declare((0.9, 0.99)), optim.Lion.declare((0.8, 0.95))),
    ),
    ids=("AdamW", "SGD", "NAdam", "Lion"),
)
def test_a_hyperparameter_is_no_other_program(one: StateUpdate, other: StateUpdate) -> None:
    found: list[Any] = [program(update.normal()) for update in (one, other)]
    assert found[0].operations != found[1].operations
    (a, constants), (b, others) = map(lifted, found)
    assert a == b and constants.keys() == others.keys() and constants != others


def test_what_chooses_the_form_of_an_operation_stays() -> None:
    found, constants = lifted(PROGRAMS["adamw-0"])
    assert [op.inputs[1] for op in found.operations if op.name == "pow"] == [0.5, 0.5]
    assert sorted(constants.values()) == pytest.approx([1e-8, 0.001, 0.001, 0.1, 0.1, 0.9, 0.9, 0.999, 0.999])
