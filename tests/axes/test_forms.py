"""A step's program in forms: the same numbers in float64 by fewer operations on tiles, whatever stays a form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from axes import sequence
from axes.core.state_update import StateUpdate
from axes.programs import forms
from axes.programs.forms import Prices, simplified
from axes.programs.monomials import gathered
from axes.programs.tile_text import OUT, Walk
from axes.programs.tiles import FULL, NEXT, Program, trace
from axes.routes import token
from tests.axes.test_tiles import UPDATES, evaluated

WIDTHS = 5, 7
ALL: Mapping[str, StateUpdate] = {
    **UPDATES, "memora": sequence.MemoraMatrix.update, "lattice-osr": sequence.LatticeOSR.update
}  # fmt: skip
PRICES = Prices(row=0.5, key=0.1, over_rows=1.5, over_keys=5.0)


def walk(name: str) -> Walk:
    found = token.walk(ALL[name], *WIDTHS)
    assert isinstance(found, Walk)
    return found


def numbers(program: Program) -> dict[str, Tensor]:
    torch.manual_seed(0)
    given = {}
    for i, name in sorted(program.names.items(), key=lambda x: x[1]):
        there = program.operations[i].extent
        x = torch.randn([n if e else 1 for n, e in zip(WIDTHS, there, strict=True)], dtype=torch.float64)
        given[name] = x if name.startswith("d ") else -x.abs() if name == "decay" else x.abs() + 0.1
    return given


def tiles(program: Program) -> int:
    order = program.needed(n for n in program.outputs if not n.startswith(NEXT))
    return sum(program.operations[i].extent == FULL and program.operations[i].name != "input" for i in order)


@pytest.mark.parametrize("loose", ("nothing", "everything", "half"))
@pytest.mark.parametrize("name", ALL)
def test_any_choice_of_forms_is_the_same_program(name: str, loose: str) -> None:
    program = walk(name).step
    each = {"nothing": 0, "everything": 1, "half": 2}[loose]
    chosen = frozenset(range(0, len(program.operations), each) if each else ())
    made = forms._Rewriting(program, WIDTHS, chosen).run()
    given = numbers(program)
    want, got = evaluated(program, given, WIDTHS), evaluated(made, given, WIDTHS)
    for n, x in want.items():
        torch.testing.assert_close(got[n], x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_gathered_products_are_the_same_program(name: str) -> None:
    program = walk(name).step
    made = gathered(program, WIDTHS)
    given = numbers(program)
    want, got = evaluated(program, given, WIDTHS), evaluated(made, given, WIDTHS)
    for n, x in want.items():
        torch.testing.assert_close(got[n], x, rtol=1e-9, atol=1e-12)


def test_gathering_makes_fewer_tiles() -> None:
    given = {"x": (None, "v", "k"), "y": (None, "v", "k"), "r": (None, "v"), "a": (None,), "k": (None, "k")}

    def step(g: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"z": ((g["x"] * g["a"]) * (g["y"] * g["r"].unsqueeze(-1))) * 2.0 + g["r"].unsqueeze(-1) * g["k"]}

    program = trace(step, given, WIDTHS)  # type: ignore[arg-type]
    assert tiles(program) == 6 and tiles(gathered(program, WIDTHS)) == 4


def test_a_linear_step_has_a_fraction_of_its_operations_on_tiles() -> None:
    program = walk("lattice-dec").step
    made = simplified(program, WIDTHS, lambda p: float(tiles(p)))
    assert tiles(made) < 0.7 * tiles(program)


def test_what_saves_nothing_is_left_as_it_is() -> None:
    program = trace(lambda g: {"y": (g["x"].exp() * g["k"]).sum(-1)}, {"x": (None, "v", "k"), "k": (None, "k")}, WIDTHS)
    assert simplified(program, WIDTHS, lambda p: PRICES.of(p, p.needed(p.outputs))) is program


@pytest.mark.parametrize("name", ("lattice-dec", "lattice-osr"))
def test_a_sum_that_is_carried_is_that_of_the_next_state(name: str) -> None:
    step = walk(name).step
    program = forms._Rewriting(step, WIDTHS, frozenset(range(len(step.operations)))).run()
    (carried,) = replace(walk(name), step=program).carried
    given = numbers(program)
    found = evaluated(program, given, WIDTHS)
    made = Program(program.operations, program.names, {"sum": carried})
    after = evaluated(made, {**given, "s0": found["s0"]}, WIDTHS)
    torch.testing.assert_close(found[f"{NEXT}{carried}"], after["sum"], rtol=1e-9, atol=1e-12)
    assert OUT in found


def test_a_test_of_what_is_above_zero_is_none() -> None:
    def step(x: Tensor) -> Tensor:
        root = torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0) + 1e-4
        return torch.where(root > 0, x / root, 0.0)

    def tests(step: object) -> int:
        program = trace(lambda g: {"y": step(g["x"])}, {"x": (None, "v", "k")}, WIDTHS)  # type: ignore[operator]
        return sum(program.operations[i].name == "gt" for i in program.needed(["y"]))

    assert tests(step) == 1
    assert tests(lambda x: torch.where(x.sqrt() + 1e-4 > 0, x, 0.0)) == 1  # no number where x is below zero
