"""A token's step as a program on tiles: what it computes and its derivatives are the interpreter's, in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from axes import sequence
from axes.core.algorithms import Anchor, Momentum, Step
from axes.core.costs import Alignment, Huber, SquaredError
from axes.core.geometry import Context, Entropic, Geometry, Sphere
from axes.core.geometry.bregman import NO_CONTEXT
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.programs.tile_text import OUT
from axes.programs.tiles import GRAD, NotTiles, Program, trace
from axes.routes import token
from axes.routes.choice import Target
from axes.routes.select import plans, select

ROWS, KEYS = 5, 7


@final
@dataclass(frozen=True, repr=False)
class Squash(Geometry):
    """theta tanh |theta|_F / |theta|_F, which somebody wrote."""

    def primal(self, theta: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        norm = (theta * theta).sum((-2, -1), keepdim=True).sqrt()
        return theta * torch.tanh(norm) / norm


UPDATES = {
    "moneta": sequence.MonetaMatrix.update,
    "adam": sequence.AdamNet.update,
    "lattice-dec": sequence.LatticeDec.update,
    "longhorn": sequence.Longhorn.update,
    "a user's": StateUpdate(SquaredError(), Squash(), Scalar("decay"), Step(Per("beta"))),
    "norm and momentum": StateUpdate(
        Huber(1.0, "norm"),
        Entropic("column"),
        Scalar("decay"),
        Step(Per("beta"), via=(Momentum(0.9, "ema", debias=True),)),
    ),
}


def evaluated(program: Program, given: Mapping[str, Tensor], widths: tuple[int, int]) -> dict[str, Tensor]:
    """What a program comes to: values are (rows or 1, keys or 1)."""
    made: list[Tensor] = []
    plain = {
        "neg": torch.neg, "where": lambda c, a, b: torch.where(c != 0, a, b), "and": torch.logical_and,
        "or": torch.logical_or, "not": torch.logical_not,
    }  # fmt: skip
    for i, op in enumerate(program.operations):
        x = [made[a] if isinstance(a, int) else torch.tensor(a, dtype=torch.float64) for a in op.inputs]
        kind, _, axis = op.name.partition(" ")
        if kind == "input":
            made.append(given[program.names[i]])
        elif axis:
            reduce = getattr(torch, "amax" if kind == "max" else kind)
            made.append(reduce(x[0], -2 if axis == "v" else -1, keepdim=True))
        else:
            made.append(plain.get(kind, getattr(torch, kind, None))(*x))  # type: ignore[misc]
        there = tuple(n if e else 1 for n, e in zip(widths, op.extent, strict=True))
        assert made[-1].shape == there, (op, made[-1].shape)
    return {n: made[v] if isinstance(v, int) else torch.tensor(v) for n, v in program.outputs.items()}


@pytest.mark.parametrize("name", UPDATES)
def test_step_and_adjoint_are_those_of_the_interpreter(name: str) -> None:
    update = UPDATES[name]
    walk = token.walk(update, ROWS, KEYS)
    assert not isinstance(walk, token.NoWalk), walk.reason
    form, sizes = token._form(update), {"v": ROWS, "k": KEYS}
    shapes = {n: [sizes.get(a, 1) for a in shape] for n, shape in (form.signal | form.states).items()}  # type: ignore[arg-type]
    live = {n: 0.1 + torch.rand(s, dtype=torch.float64) for n, s in shapes.items()}
    live = {n: (-x if "decay" in n else x).requires_grad_() for n, x in live.items()}
    state = token._state(form, live, 1)
    after, shown = update.step(state, {n: live[n] for n in form.signal})
    leaves = pytree.tree_leaves(after)
    wanted = {OUT: update.read(shown, live["q"], live)} | {n: leaves[int(n[1:])] for n in form.states}
    moved = {n: x for n, x in wanted.items() if x.requires_grad}
    pulls = {n: torch.randn_like(x) for n, x in moved.items()}
    inputs = [n for n in live if n not in walk.steady]
    grads = torch.autograd.grad(
        list(moved.values()), [live[n] for n in inputs], list(pulls.values()), allow_unused=True
    )

    def tile(name: str, x: Tensor) -> Tensor:
        shape = form.signal.get(name) or form.states.get(name) or (None, "v")
        return x.detach().reshape(ROWS if "v" in shape else 1, KEYS if "k" in shape else 1)

    given = {n: tile(n, x) for n, x in live.items()} | {GRAD + n: tile(n, x) for n, x in pulls.items()}
    found = evaluated(walk.step, given, (ROWS, KEYS))
    for n, x in wanted.items():
        torch.testing.assert_close(found[n].expand(tile(n, x).shape).double(), tile(n, x), rtol=1e-6, atol=1e-7)
    for n, g in zip(inputs, grads, strict=True):
        if g is not None:
            mine = found.get(GRAD + n, torch.zeros(())).double().expand(tile(n, g).shape)
            torch.testing.assert_close(mine, tile(n, g), rtol=1e-5, atol=1e-6)


def followed(step: Any, **shapes: Any) -> Program:
    return trace(lambda given: {"y": step(**given)}, shapes, (6, 8))


@pytest.mark.parametrize(
    ("step", "says"),
    (
        (lambda x: x @ x.mT @ x, "multiplies matrices"),
        (lambda x: x.sort(-1).values, "takes tensors apart|sort"),
        (lambda x: x if float(x.sum()) > 0 else -x, "branches on a value"),
        (lambda x: x.flip(-1), "flip"),
        (lambda x: x.cumsum(-1), "cumsum"),
        (lambda x: x[..., :3], "single entries|neither rows nor keys"),
    ),
)
def test_what_is_no_program_on_tiles_says_why(step: Any, says: str) -> None:
    with pytest.raises(NotTiles, match=says):
        followed(step, x=(None, "v", "k"))


def test_a_sum_of_products_leaves_outside_what_does_not_vary() -> None:
    program = followed(lambda x, v: (x * v[..., None]).sum(-1), x=(None, "v", "k"), v=(None, "v"))
    last = program.operations[program.outputs["y"]]  # type: ignore[index]
    assert last.name == "mul" and last.extent == (True, False)


def test_widths_are_told_apart_where_they_are_equal() -> None:
    program = trace(lambda g: {"y": g["x"].mean(-1)}, {"x": (None, "v", "k")}, (8, 8))
    assert program.operations[program.outputs["y"]].extent == (True, False)  # type: ignore[index]
    assert any(1 / 8 in op.inputs for op in program.operations)


@pytest.mark.parametrize(
    ("update", "says"),
    (
        (sequence.MuonNet.update, "no operation on tiles|multiplies"),
        (sequence.RLSNet.update, "keeps a tensor of shape|branches"),
        (sequence.TTTLinear.update, "must match the size|followed"),
        (StateUpdate(Alignment(), Sphere("columns"), algorithm=Step(Per("b"), start="first", lazy=False)), "the first"),
    ),
    ids=str,
)
def test_tuples_without_a_walk_say_why(update: StateUpdate, says: str) -> None:
    found = token.walk(update, ROWS, KEYS)
    assert isinstance(found, token.NoWalk)
    assert re.search(says, found.reason), found.reason


def test_a_gpu_walks_what_nothing_else_takes() -> None:
    update = sequence.LatticeDec.update
    (runs, *_) = plans(update, Target.of("cuda:sm_90"), torch.bfloat16)
    assert runs.choice[:2] == ("token", "triton") and "generated from the step" in runs.choice.reason
    assert select(update, Target.of("cuda:sm_90"), torch.bfloat16, implementation="torch")[:2] == ("gram", "torch")


def test_an_anchor_of_one_token_is_none() -> None:
    walk = token.walk(StateUpdate(SquaredError(), Squash(), algorithm=Step(0.1, at=Anchor(1))), ROWS, KEYS)
    assert isinstance(walk, token.Walk) and walk.refresh is None


def test_a_state_that_does_not_fit_says_how_large_it_is() -> None:
    found = token.walk(sequence.LatticeDec.update, 256, 256)
    assert isinstance(found, token.NoWalk) and "256 x 256" in found.reason and "registers of 65536" in found.reason
