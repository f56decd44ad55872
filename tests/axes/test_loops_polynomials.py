"""Newton-Schulz in loops of C: the functions alone against autograd in float64, and whole sequences against the float64
interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axes import sequence
from axes.core.algorithms import Anchor, Momentum, Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Spectral
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.linalg import polynomials
from axes.linalg.formulas import iterating_by
from axes.linalg.newton_schulz import Start, Triple, direct, iterate, polar_express_schedule
from axes.programs import c_library, c_text
from axes.programs.c_polynomials import RESULT, Real, Sizes
from axes.programs.tiles import BACK
from axes.routes import token
from axes.routes.select import select
from tests.axes.test_loops import (
    agree,
    asked,
    begun,
    by_c,
    by_sequences,
    draw,
    interpreted,
    require_no_bit_of_threads,
    require_spoilt_behind,
    results,
)  # fmt: skip

pytestmark = pytest.mark.skipif(c_library.no_compiler() is not None, reason="no C compiler")

SLOW: Triple = (1.875, -1.25, 0.375)
UPDATES = {
    "a state that is projected": sequence.MuonNetState.update,
    "a filter that is projected": sequence.MuonNet.update,
    "somebody's, read alone": StateUpdate(
        SquaredError(),
        Spectral(steps=3, coefficients=SLOW, scale="original"),
        Scalar("decay"),
        Step(Per("beta")),
    ),
    "somebody's, held weights": StateUpdate(
        SquaredError(),
        Spectral(steps=2, coefficients=SLOW, scale="spectral", eps=1.0),  # which some states are longer than
        Scalar("decay"),
        Step(Per("beta"), at=Anchor(4), via=(Momentum(0.9, "ema"),)),
    ),
}


# ---- the functions alone ---------------------------------------------------------------------------------------------


def by_functions(
    x: Tensor, dy: Tensor, start: Start, schedule: tuple[Triple, ...], size: float, real: Real
) -> tuple[Tensor, Tensor, Tensor]:
    """Y without a tape of all steps, Y with one, and dX, of matrices (matrices, rows, keys)."""
    dtype, steps = torch.float64 if real == "double" else torch.float32, len(schedule)
    sizes, each = Sizes(x.shape[1], x.shape[2], real), x.shape[1] * x.shape[2]
    numbers = ", ".join(map(c_text.constant, (*start[:2], float(start.floor), size, *sum(schedule, ()))))
    text = f"""{c_text.header(real, *x.shape[1:])}
{sizes.text()}
int f(void *const *t, const long *n, long first, long end) {{
    static const real numbers[] = {{{numbers}}};
    real *tape = aligned_alloc(64, {sizes.tape(max(steps, 2)) + sizes.room()} * sizeof(real));
    real *room = tape + {sizes.tape(max(steps, 2))};
    for (long i = first * {each}; i < end * {each}; i += {each}) {{
        newton_schulz((real *)t[0] + i, tape, numbers, {steps}, 0);
        memcpy((real *)t[2] + i, tape + {RESULT}, {each} * sizeof(real));
        newton_schulz((real *)t[0] + i, tape, numbers, {steps}, 1);
        memcpy((real *)t[3] + i, tape + {RESULT}, {each} * sizeof(real));
        newton_schulz_back(tape, (real *)t[1] + i, (real *)t[4] + i, room, numbers, {steps});
    }}
    free(tape);
    return 0;
}}"""
    x, dy = x.to(dtype), dy.to(dtype)
    y, again, dx = (torch.empty_like(x) for _ in range(3))
    c_library.Kernel(text, "f")[(len(x),)](x, dy, y, again, dx)
    return y, again, dx


CASES: dict[str, tuple[tuple[int, int], Start, tuple[Triple, ...], float]] = {
    "one step, a vector beside another": ((2, 7), Start(1.0, 0.0, 1e-7), (SLOW,), 1.0),
    "wide": ((5, 12), Start(1.0, 0.0, 1e-7), (SLOW,) * 8, 0.5),
    "tall": ((13, 6), Start(1.01, 1e-7, 0.0), polar_express_schedule(5), 2.0),
    "whole vectors": ((32, 32), Start(1.01, 1e-7, 0.0), polar_express_schedule(4), 1.0),
    "an odd number of vectors": ((40, 24), Start(1.0, 0.0, 4.0), (SLOW,) * 3, 1.0),
    "large": ((64, 64), Start(1.0, 0.0, 1e-7), (SLOW,) * 2, 1.0),
}


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("name", CASES)
def test_the_functions_are_the_polynomials_with_their_derivative(name: str, real: Real) -> None:
    """Matrices of several lengths, one on the floor, one of zeros."""
    shape, start, schedule, size = CASES[name]
    torch.manual_seed(0)
    x, dy = (torch.randn(4, *shape, dtype=torch.float64) for _ in range(2))
    x *= torch.tensor([1.0, 1e-9, 0.0, 30.0], dtype=torch.float64)[:, None, None]
    y, again, dx = by_functions(x, dy, start, schedule, size, real)
    leaf = x.clone().requires_grad_()
    flat = leaf.mT if shape[0] > shape[1] else leaf
    exact = size * direct(flat / start.divisor(flat), schedule)
    exact = exact.mT if shape[0] > shape[1] else exact
    (slope,) = torch.autograd.grad(exact, leaf, dy)
    exact = exact.detach()
    assert torch.equal(y, again) and not y[2].any() and not dx[2].any() and not slope[2].any()
    assert (slope[0].norm() > 0) and (slope[1].norm() > 0)
    bound = 1e-12 if real == "double" else 1e-4  # as torch has in float32
    for a, b in zip((*y, *dx), (*exact, *slope), strict=True):
        assert float((a.double() - b).norm()) <= bound * float(b.norm())


def test_who_follows_a_step_sees_one_operation_and_its_adjoint() -> None:
    """The same numbers as the interpreter's, of 32 bits and more; of 16 each product as it is."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    start, schedule = Start(1.0, 0.0, 1e-7), (SLOW,) * 3

    def made(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        return iterate([x], start, schedule, "direct", [0.5], dtype)[0]

    with iterating_by(polynomials.operator):
        whole, short = made(x), made(x.detach().bfloat16(), torch.bfloat16)
    assert "newton_schulz_whole" in str(whole.grad_fn) and "newton_schulz_whole" not in str(made(x).grad_fn)
    torch.testing.assert_close(whole, made(x), rtol=1e-12, atol=0)
    assert torch.equal(short, made(x.detach().bfloat16(), torch.bfloat16))
    slopes = [torch.autograd.grad(y.square().sum(), x)[0] for y in (whole, made(x))]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-12)


# ---- sequences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UPDATES)
def test_a_loop_is_the_interpreter(name: str) -> None:
    """Several chunks, the last one short, from a state between two anchors."""
    update = UPDATES[name]
    torch.manual_seed(0)
    signal = draw(update, 2, 21, 2, torch.float64)
    state = begun(update, signal, count=9)
    exact = results(update, signal, state, torch.float64, interpreted)
    agree(results(update, signal, state, torch.float64, by_c), exact, 1e-11)
    agree(results(update, signal, state, torch.float32, by_c), exact, 1e-3)


@pytest.mark.parametrize("name", ["a state that is projected", "a filter that is projected"])
def test_zero_states(name: str) -> None:
    """A matrix that is still zero stays so, with derivative zero."""
    update = UPDATES[name]
    torch.manual_seed(0)
    signal = draw(update, 1, 4, 1, torch.float64)  # few: what rounding leaves of a rank grows 150 times a token
    signal["k"][:, :2] = 0.0
    state = update.init({n: x[:, 0] for n, x in signal.items()})
    exact = results(update, signal, state, torch.float64, interpreted)
    assert not exact[0][0][:, :2].any() and exact[0][0][:, 2:].any()
    agree(results(update, signal, state, torch.float64, by_c), exact, 1e-9)


def test_packed_sequences() -> None:
    """Of unequal length, one of them empty, each with an anchor of its own; a token of them writes nothing."""
    update = UPDATES["a filter that is projected"]
    torch.manual_seed(0)
    signal = draw(update, 1, 21, 2, torch.float64)
    signal["k"][:, 9] = 0.0
    first = {n: x[:, :3].transpose(0, 1).expand(3, 1, *x.shape[2:]) for n, x in signal.items()}
    state = begun(update, first, count=14)

    packed, alone = by_sequences([0, 4, 4, 21])
    exact = results(update, signal, state, torch.float64, alone)
    agree(results(update, signal, state, torch.float64, packed), exact, 1e-11)


def test_threads_change_no_bit_and_what_is_no_number_stays_behind_its_token() -> None:
    update = UPDATES["a state that is projected"]
    torch.manual_seed(0)
    signal = draw(update, 2, 21, 2, torch.float32)
    require_no_bit_of_threads(update, signal)
    require_spoilt_behind(update, signal, 9)


# ---- when ------------------------------------------------------------------------------------------------------------


def test_long_sequences_are_walked_on_a_cpu_alone() -> None:
    update = UPDATES["a state that is projected"]
    assert select(update, "cpu", shapes=asked(token.WORTH))[:2] == ("token", "c")
    assert select(update, "cpu", shapes=asked(token.WORTH - 1))[:2] == ("interpreter", "reference")
    found = token.walk(update, 5, 6)
    assert isinstance(found, token.NoWalk) and "multiplies matrices" in found.reason
    short = StateUpdate(Alignment(), Spectral(precision="bfloat16"))
    assert isinstance(token.walk(short, 5, 6, True, "c"), token.NoWalk)


def test_derivatives_go_back_through_a_stage_once() -> None:
    """Those of what is read and of the state are added up before."""
    found = token.walk(UPDATES["a state that is projected"], 5, 6, True, "c")
    assert not isinstance(found, token.NoWalk)
    needed = [found.step.operations[i] for i in found.step.needed(found.grads)]
    assert len([op for op in needed if op.name.startswith(BACK)]) == 1
