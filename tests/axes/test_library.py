"""Programs that torch has as one operation: recognised by what they compute, and the same as operation by operation."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from axes import optim
from axes.optim.engine.together import program
from axes.programs.batched import Schedule
from axes.programs.library import LibraryStep

RULES: dict[str, Any] = {
    "adam": optim.Adam.declare,
    "adamw": optim.AdamW.declare,
    "sgd": partial(optim.SGD.declare, momentum=0.9),
    "plain sgd": partial(optim.SGD.declare, momentum=0.0),
}
NORMS = {"via.0.norm": 0.3, "via.0.stats.0.norm": 0.05}


def scheduled(rule: str, maximize: bool = False, **options: Any) -> tuple[Schedule, Schedule]:
    """The schedule of a rule, and the same operation by operation."""
    found = program(RULES[rule](**options), maximize)
    assert found is not None
    whole, parts = Schedule(found), Schedule(found)
    parts.library = None
    assert isinstance(whole.library, LibraryStep)
    return whole, parts


def lists(dtype: torch.dtype = torch.float64, count: int = 4) -> list[list[Tensor]]:
    """Parameters, gradients, first and second moments, the first so many, of three shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5), (7,), (2, 2, 3))
    drawn = [[torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes] for _ in range(4)]
    return [*drawn[:3], [x.square() for x in drawn[3]]][:count]


def values(schedule: Schedule, **given: float) -> list[float | Tensor]:
    names = {n for n, i in schedule.program.inputs.items() if not schedule.program.shaped(i)}
    known = {**NORMS, "lr": 0.01, "weight_decay": 0.1, **given}
    assert names <= known.keys()
    return list(schedule.program.numbers(known))


@given(
    rule=st.sampled_from(sorted(RULES)),
    maximize=st.booleans(),
    betas=st.tuples(st.floats(0.01, 0.999), st.floats(0.01, 0.9999)),
    eps=st.floats(1e-12, 1e-2),
    lr=st.floats(1e-6, 10.0),
    decay=st.sampled_from([0.0, 0.1, 3.0]),
    norms=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
)
@settings(max_examples=60, deadline=None)
def test_torchs_operation_is_the_program(
    rule: str, maximize: bool, betas: Any, eps: float, lr: float, decay: float, norms: Any
) -> None:
    options: dict[str, Any] = {"betas": betas, "eps": eps} if rule.startswith("adam") else {}
    options |= {"momentum": betas[0]} if rule == "sgd" else {}
    whole, parts = scheduled(rule, maximize, **options)
    given = {"lr": lr, "weight_decay": decay, **dict(zip(NORMS, norms, strict=True))}
    drawn = [lists(count=len(whole.names)) for _ in range(3)]
    one, other, first = drawn
    assert whole.library is not None and whole.library.run(one, values(whole, **given))
    parts.run(other, values(parts, **given))
    for name, xs, ys, before in zip(whole.names, one, other, first, strict=True):
        for x, y, start in zip(xs, ys, before, strict=True):
            scale = (y - start).abs().max()
            torch.testing.assert_close(x, y, rtol=1e-12, atol=float(1e-11 * scale), msg=name)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_stay_as_they_are(rule: str) -> None:
    whole, _ = scheduled(rule)
    one = lists(torch.float32, len(whole.names))
    whole.run(one, values(whole))
    assert all(map(torch.equal, one[whole.names.index("g")], lists(torch.float32)[1]))
    assert not any(map(torch.equal, one[0], lists(torch.float32)[0]))


def test_what_is_not_torchs_is_left_to_others() -> None:
    whole, parts = scheduled("adamw")
    assert whole.library is not None
    run = whole.library.run
    tensors = [torch.tensor(x) for x in values(whole)]
    for some, numbers in ((lists(), tensors), (lists(), values(whole, lr=0.0))):
        before = [[x.clone() for x in xs] for xs in some]
        assert not run(some, numbers)
        assert all(torch.equal(x, y) for xs, ys in zip(some, before, strict=True) for x, y in zip(xs, ys, strict=True))
    # an average whose weights do not add up to 1 is no Adam
    uneven = {**whole.library.numbers, "weight1": 0.5}
    assert not dataclasses.replace(whole.library, numbers=uneven).run(lists(), values(whole))
    one, other = lists(), lists()
    whole.run(one, values(whole, lr=0.0))
    parts.run(other, values(parts, lr=0.0))
    assert all(torch.equal(x, y) for xs, ys in zip(one, other, strict=True) for x, y in zip(xs, ys, strict=True))


OTHERS = [
    optim.NAdam.declare(),
    optim.Lion.declare(),
    optim.SGD.declare(0.9, nesterov=True),
    optim.SGD.declare(0.9, dampening=0.5),
    optim.SGD.declare(0.9, decoupled=True),
]


@pytest.mark.parametrize("update", OTHERS, ids=str)
def test_other_programs_are_not_taken_for_it(update: Any) -> None:
    found = program(update)
    assert found is not None and Schedule(found).library is None


def test_states_under_other_names_are_found_and_swapped_ones_are_not() -> None:
    found = program(optim.AdamW.declare())
    assert found is not None
    m, v = "via.0.theta", "via.0.stats.0.theta"
    swapped = dataclasses.replace(found, outputs={**found.outputs, m: found.outputs[v], v: found.outputs[m]})
    assert Schedule(swapped).library is None
    halved = dataclasses.replace(found, operations=list(found.operations))
    place = next(i for i, op in enumerate(halved.operations) if op.name == "pow" and op.shaped)
    halved.operations[place] = dataclasses.replace(
        halved.operations[place], inputs=(found.operations[place].inputs[0], 0.25)
    )
    assert Schedule(halved).library is None
