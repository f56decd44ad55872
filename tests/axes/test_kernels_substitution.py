"""Substitution by kernels: identities of its chunk form in float64, the text of responses, what is picked, and the
kernels under Triton's interpreter against the recurrence.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own; bfloat16 products are
left to tests/gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Step
from axes.core.costs import Huber
from axes.core.memory import MLP
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.programs import rows
from axes.programs.tiles import NotTiles
from axes.routes import dispatch, substitution_kernel
from axes.routes.choice import Target
from axes.sequence.longhorn import Longhorn
from axes.sequence.miras import YaadMatrix
from axes.sequence.ttt import TTTLinear
from tests.interpreter import interpret

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

PROGRAM = r"""
import dataclasses
import torch
from axes.core import reference
from axes.core.algorithms import Anchor, Step
from axes.core.costs import Huber, SquaredError
from axes.core.geometry import Sphere
from axes.core.memory import LayerNormMatrix
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import OnUpdate, StateUpdate
from axes.routes import substitution_kernel
from axes.testing import checks

BETA, ROW_BETA = Per("beta"), Per("row_beta", "row")
ROWS, GATED = Diagonal("row_decay", side="row"), Scalar("decay")

def example(update, length, d_k, d_v, gates=1.0):
    torch.manual_seed(0)
    signal = checks.example(update, length=length, d_k=d_k, d_v=d_v)
    signal = {n: x[:1].float().unsqueeze(2) if isinstance(x, torch.Tensor) else x for n, x in signal.items()}
    return {n: 0.3 * x if "beta" in n else gates * x if "decay" in n else x for n, x in signal.items()}

def results(run, signal, start, dtype):
    live = {n: x.to(dtype).requires_grad_() for n, x in signal.items()}
    first = start.to(dtype).requires_grad_()
    out, state = run(live, first)
    torch.manual_seed(1)
    shown = [out, *state.theta, *state.anchor, *[x for s in state.via for x in s.theta]]
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in shown)
    return [*shown, *torch.autograd.grad(loss, [*live.values(), first], allow_unused=True)]

def compare(got, want):
    for a, w in zip(got, want, strict=True):
        if w is not None:
            error = ((a - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
            print(tuple(w.shape), f"{error:.1e}")
            assert error < 3e-6, (tuple(w.shape), error)  # a gate's derivative, a sum of differences, 2.5e-6

def check(update, length, d_k=5, d_v=3, gates=1.0):
    signal = example(update, length, d_k, d_v, gates)
    start = torch.randn(1, 1, d_v, d_k)
    kernel = results(lambda s, w: substitution_kernel.run(update, s, None, (w,)), signal, start, torch.float32)
    exact = results(lambda s, w: reference.run(update, s, time=1, weights=(w,)), signal, start, torch.float64)
    compare(kernel, exact)
"""
PACKED = r"""
def packed_one_by_one(update, cuts, d=0):
    d_k, d_v = d or 5, d or 3
    signal, start = example(update, cuts[-1], d_k, d_v), torch.randn(3, 1, d_v, d_k)

    def packed(s, w):
        state = update.init({n: x[:, 0].expand(3, *x.shape[2:]) for n, x in s.items()}, (w,))
        out, last = substitution_kernel.run(update, s, state, None, torch.tensor(cuts))
        if isinstance(update.parts().step.at, Anchor):
            assert last.count.tolist() == [b - a for a, b in zip(cuts, cuts[1:])]
        return out, last._replace(anchor=())

    def alone(s, w):
        outs, ends = [], []
        for n, (a, b) in enumerate(zip(cuts, cuts[1:])):
            if a == b:
                ends.append(w[n : n + 1])
                continue
            out, state = reference.run(update, {m: x[:, a:b] for m, x in s.items()}, time=1, weights=(w[n : n + 1],))
            outs.append(out)
            ends.append(state.theta[0])
        return torch.cat(outs, 1), state._replace(theta=(torch.cat(ends),), anchor=())

    compare(results(packed, signal, start, torch.float32), results(alone, signal, start, torch.float64))
"""
CASES = {
    "rows, before": "check(StateUpdate(Huber(ROW_BETA), monoid=ROWS, algorithm=Step(ROW_BETA)), 18)",
    "rows, gated, rows meet": (
        'check(StateUpdate(Huber(0.5, "norm"), monoid=ROWS, algorithm=Step(ROW_BETA, at="gated")), 20)'
    ),
    "rows, before, gates that close": (
        "check(StateUpdate(Huber(ROW_BETA), monoid=ROWS, algorithm=Step(ROW_BETA)), 36, gates=8.0)"
    ),
    "rows, gated, gates that close": (
        'check(StateUpdate(Huber(0.5), monoid=ROWS, algorithm=Step(ROW_BETA, at="gated")), 36, gates=8.0)'
    ),
    "anchored, rows, gates that close": (
        "check(StateUpdate(Huber(0.5), monoid=ROWS, algorithm=Step(ROW_BETA, at=Anchor(16))), 36, gates=8.0)"
    ),
    "anchored, rows": "check(StateUpdate(Huber(0.5), monoid=ROWS, algorithm=Step(ROW_BETA, at=Anchor(16))), 58, 5, 40)",
    "anchored, a gate": (
        "check(StateUpdate(Huber(0.5), monoid=GATED, algorithm=Step(ROW_BETA, at=Anchor(16))), 50)"
    ),
    "a gate first": 'check(StateUpdate(Huber(0.5), monoid=GATED, algorithm=Step(ROW_BETA, at="gated")), 36)',
    "anchored, a norm": (
        "check(StateUpdate(SquaredError(), algorithm=Step(BETA, at=Anchor(16)), memory=LayerNormMatrix()), 17, 4, 4)"
    ),
    "filter along the key": (
        'check(StateUpdate(SquaredError(), OnUpdate(Sphere("whole")), Scalar("decay"), Step(BETA)), 18)'
    ),
    "packed": PACKED
    + r"""
update = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(ROW_BETA, at="new"))
packed_one_by_one(update, [0, 2, 2, 21])
""",
    "packed, each with anchors of its own": PACKED
    + r"""
update = StateUpdate(Huber(0.5), monoid=Scalar("decay"), algorithm=Step(ROW_BETA, at=Anchor(16)))
packed_one_by_one(update, [0, 3, 3, 22])
""",
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_recurrence(case: str) -> None:
    interpret(PROGRAM + CASES[case])


AT_ONCE = r"""
from axes.kernels.substitution import chain, chunks

chain._SIXTEEN = (torch.float32,)
chain.AT_ONCE = {(gate, reads) for gate in range(2) for reads in range(3)}
chain.AT_ONCE_PART, chain.AT_ONCE_COLUMNS = 32, 32
"""


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_chunk_at_once_equal_the_recurrence(case: str) -> None:
    """Those of 16 bits, which the interpreter takes float32 for."""
    interpret(PROGRAM + AT_ONCE + CASES[case])


HOPPER = r"""
import inspect
from unittest.mock import patch
from axes.kernels.common import versions
from axes.kernels.substitution import chain, hopper
from tests.gluon import plain

chain._SIXTEEN, versions.hopper_refusal = (torch.float32,), lambda device: None
launched, source, made = [], inspect.getsource, chain.made

def in_gluon(of, text, name):
    with patch.object(inspect, "getsource", lambda x: plain(source(x)) if x is hopper else source(x)):
        launched.extend([name] * (of is hopper))
        return made(of, text, name)

chain.made, chain.RADIAL = in_gluon, False
"""
WIDE = {
    "rates by rows, implicit": 'check(StateUpdate(SquaredError(), algorithm=Step(ROW_BETA, at="new")), 34, 64, 64)',
    "a gate first, rows meet": (
        'check(StateUpdate(Huber(0.5, "norm"), monoid=GATED, algorithm=Step(ROW_BETA, at="gated")), 20, 64, 64)'
    ),
    "a gate, of more keys than rows": (
        "check(StateUpdate(Huber(0.5), monoid=GATED, algorithm=Step(BETA)), 66, 128, 64)"
    ),
    "a filter along the key": (
        'check(StateUpdate(SquaredError(), OnUpdate(Sphere("whole")), GATED, Step(BETA)), 18, 64, 64)'
    ),
    "packed": "packed_one_by_one(StateUpdate(Huber(0.5), monoid=GATED, algorithm=Step(BETA)), [0, 17, 17, 36], 64)",
}


@pytest.mark.parametrize("case", WIDE)
def test_serial_passes_in_gluon_equal_the_recurrence(case: str) -> None:
    """Those of 16 bits, which the interpreter takes float32 for."""
    interpret(f"{PROGRAM}{PACKED}{HOPPER}{WIDE[case]}\nassert launched")


ANCHORED = r"""
import inspect
import linecache
from unittest.mock import patch
from axes.kernels.common import versions
from axes.kernels.substitution import chain
from tests.gluon import stand_in

stand_in("axes.kernels.substitution.hopper")
anchored = stand_in("axes.kernels.substitution.anchored")
chain._ANCHORED, versions.hopper_refusal = (torch.float32,), lambda device: None
chain.ANCHORED, chain.ANCHORED_BACK = (32, 3), (64, 2)  # of one part, and of two
harsh, source, made, rooms = [], inspect.getsource, chain.made, chain._rooms

def in_gluon(of, text, name):
    def read(x):
        return "".join(linecache.cache[x.__file__][2]) if x is anchored else source(x)
    with patch.object(inspect, "getsource", read):
        return made(of, text, name)

def kept(*given):
    found = rooms(*given)
    harsh.append(found[-1][-1])
    return found

chain.made, chain._rooms = in_gluon, kept
UPDATE = StateUpdate(Huber(Per("delta", "row")), monoid=ROWS, algorithm=Step(ROW_BETA, at=Anchor(16)))
"""
OWNED = {
    "of two chunks, the last block not whole": "check(UPDATE, 58, 64, 64, 0.3)\nassert not harsh[0].any()",
    "more keys than rows, a last chunk of one block": (
        "check(UPDATE, 69, 128, 64, 0.3)\nassert harsh[0].numel() and not harsh[0].any()"
    ),
    "of more blocks than a ring holds": "check(UPDATE, 150, 64, 64, 0.3)\nassert not harsh[0].any()",
    "of three tokens": "check(UPDATE, 3, 64, 64, 0.3)\nassert not harsh[0].any()",
    "gates that close, which others make again": "check(UPDATE, 80, 64, 64, 8.0)\nassert harsh[0].any()",
    "packed": "packed_one_by_one(UPDATE, [0, 17, 17, 90], 64)",
}


@pytest.mark.parametrize("case", OWNED)
def test_passes_that_own_rows_equal_the_recurrence(case: str) -> None:
    """Those of bfloat16, which the interpreter takes float32 for."""
    interpret(f"{PROGRAM}{PACKED}{ANCHORED}{OWNED[case]}\nassert harsh[0].numel()")


RADIAL = r"""
import inspect
import linecache
from unittest.mock import patch
from axes.kernels.common import versions
from axes.kernels.substitution import chain
from tests.gluon import stand_in

stand_in("axes.kernels.substitution.hopper")
radial = stand_in("axes.kernels.substitution.radial")
chain._SIXTEEN, versions.hopper_refusal = (torch.float32,), lambda device: None
launched, source, made = [], inspect.getsource, chain.made

def in_gluon(of, text, name):
    def read(x):
        return "".join(linecache.cache[x.__file__][2]) if x is radial else source(x)
    with patch.object(inspect, "getsource", read):
        launched.extend([name] * (of is radial))
        return made(of, text, name)

chain.made = in_gluon
UPDATE = StateUpdate(SquaredError(), OnUpdate(Sphere("whole")), GATED, Step(BETA))
"""
BY_LENGTH = {
    "a filter along the key": "check(UPDATE, 34, 64, 64)",
    "of more keys than rows": "check(UPDATE, 66, 128, 64)",
    "of one token": "check(UPDATE, 1, 64, 128)",
    "without a gate, clipped by length": (
        'check(StateUpdate(Huber(Per("delta"), "norm"), algorithm=Step(BETA)), 37, 64, 64)'
    ),
    "a gate first, clipped by length": (
        'check(StateUpdate(Huber(0.5, "norm"), monoid=GATED, algorithm=Step(BETA, at="gated")), 20, 64, 64)'
    ),
    "gates that close": "check(UPDATE, 34, 64, 64, 3.0)",
    "packed": (
        'packed_one_by_one(StateUpdate(Huber(0.5, "norm"), monoid=GATED, algorithm=Step(BETA)), [0, 17, 17, 90], 64)'
    ),
}


@pytest.mark.parametrize("case", BY_LENGTH)
def test_passes_by_lengths_of_errors_equal_the_recurrence(case: str) -> None:
    """Those of 16 bits, which the interpreter takes float32 for."""
    interpret(f"{PROGRAM}{PACKED}{RADIAL}{BY_LENGTH[case]}\nassert launched")


# ---- what is picked --------------------------------------------------------------------------------------------------


def test_select_names_the_kernels_and_says_why_not() -> None:
    gpu = Target.of("cuda:sm_90")
    assert dispatch.select(Longhorn.update, gpu, torch.bfloat16)[:2] == ("substitution", "triton")
    assert dispatch.select(YaadMatrix.update, gpu, torch.bfloat16)[:2] == ("substitution", "triton")
    assert dispatch.select(YaadMatrix.update, "cpu")[:2] == ("substitution", "torch")

    def reason(update: StateUpdate, **shapes: tuple[int, ...]) -> str:
        choice = dispatch.select(update, gpu, torch.bfloat16, shapes)  # a token at a time
        assert choice[:2] == ("token", "triton") and "(no chunks by a kernel: " in choice.reason
        return choice.reason

    assert "widths up to 128" in reason(Longhorn.update, k=(1, 4, 2, 16), v=(1, 4, 2, 256))
    assert "anchor for 16 tokens" in reason(StateUpdate(Huber(1.0), algorithm=Step(Per("beta"), at=Anchor(4))))


def test_what_queries_read_is_followed_too() -> None:
    names = tuple(per.name for per in TTTLinear.update.demands())
    made = substitution_kernel.reading_of(TTTLinear.update, 64, 64, names)
    assert isinstance(made, substitution_kernel.Made) and "q" in made.inputs
    uneven = substitution_kernel.reading_of(TTTLinear.update, 64, 32, names)
    assert isinstance(uneven, substitution_kernel.NotMade) and "one width" in uneven.reason


def test_an_mlp_is_no_matter_of_these_kernels() -> None:
    update = StateUpdate(Huber(1.0), algorithm=Step(Per("beta"), at=Anchor(16)), memory=MLP(2))
    assert "not one matrix" in str(substitution_kernel.no_kernel(update, torch.device("cuda"), torch.bfloat16, {}, 1))


# ---- the text of a response ------------------------------------------------------------------------------------------


def made(function: rows.Function, width: int = 3) -> rows.Source:
    return rows.source(function, {"v": "row", "b": "number"}, width)


def test_what_is_not_read_is_no_input() -> None:
    source = made(lambda x, k2, given: given["v"] - x)
    assert source.inputs == ("v",) and not source.mixes


def test_sums_of_a_row_are_operations() -> None:
    def unit(x: Tensor, k2: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        e = given["v"] - x
        return e / (e * e).sum(-1, keepdim=True).sqrt()

    source = made(unit)
    assert source.mixes and "tl.sum(tl.where(inside, " in source.text


@pytest.mark.parametrize(("function", "found"), [
    (lambda x, k2, given: (given["v"] - x) * (x - given["v"]).square().sum(-1, keepdim=True).sqrt(), True),
    (lambda x, k2, given: given["b"] * (x - given["v"]) / (1.0 + (x - given["v"]).square().sum(-1, True)), True),
    (lambda x, k2, given: given["v"] - x, False),  # rows do not meet
    (lambda x, k2, given: (given["v"] - x) * (x - given["v"]).sum(-1, keepdim=True), False),
    (lambda x, k2, given: (given["v"] - x) * x.square().sum(-1, keepdim=True), False),
    (lambda x, k2, given: (x - given["v"]).tanh() * (x - given["v"]).square().sum(-1, keepdim=True), False),
    (lambda x, k2, given: x * (x - given["v"]).square().sum(-1, keepdim=True), False),
])  # fmt: skip
def test_a_number_times_an_error_by_its_length_is_found(function: rows.Function, found: bool) -> None:
    source = made(function)
    assert source.radial == found == ("def stride(" in source.text)


def test_derivatives_entry_by_entry_are_those_of_rows_alone() -> None:
    from axes.kernels.substitution.chain import known_response

    update = Longhorn.update
    found = substitution_kernel.response_of(update, 64, 64, substitution_kernel.names_of(update, {}))
    assert isinstance(found, substitution_kernel.Made) and known_response(found.name)[0].beside
    assert not made(lambda x, k2, given: given["b"] * (given["v"] - x)).beside


@pytest.mark.parametrize("function", [
    lambda x, k2, given: x.flip(-1), lambda x, k2, given: x.sort(-1).values, lambda x, k2, given: x[:, :1] - x,
    lambda x, k2, given: x if x.sum() > 0 else -x, lambda x, k2, given: x.cumsum(-1),
])  # fmt: skip
def test_what_is_no_program_says_why(function: rows.Function) -> None:
    with pytest.raises(NotTiles):
        made(function)


@pytest.mark.parametrize("reads", ["before", "gated", "anchored"])
def test_identities_of_the_chunk_form(reads: str) -> None:
    """Autograd through the recurrence against sums over pairs of tokens, with gates by rows."""
    torch.manual_seed(0)
    length, d_v, d_k = 20, 3, 4
    q, k = (torch.randn(length, d_k, dtype=torch.float64, requires_grad=True) for _ in range(2))
    g = (-torch.rand(length, d_v, dtype=torch.float64)).requires_grad_()
    start = torch.randn(d_v, d_k, dtype=torch.float64)
    state, outs, xs, us, read = start, [], [], [], start
    for t in range(length):
        read = state if reads == "before" else g[t].exp()[:, None] * state if reads == "gated" else (
            state if t % 16 == 0 else read
        )  # fmt: skip
        xs.append(read @ k[t])
        us.append(0.1 * torch.tanh(xs[-1]))
        state = g[t].exp()[:, None] * state + torch.outer(us[-1], k[t])
        outs.append(state @ q[t])
    out, x, u = (torch.stack(y) for y in (outs, xs, us))
    do = torch.randn_like(out)
    loss = (out * do).sum()
    dq, dk, dg, *rest = torch.autograd.grad(loss, (q, k, g, *xs, *us))
    w, asked = torch.stack(rest[:length]), torch.stack(rest[length:])
    late, soon = torch.arange(length)[:, None], torch.arange(length)
    run = g.cumsum(0)
    passed = {
        "before": run - g, "gated": run, "anchored": torch.cat((g.new_zeros(1, d_v), run))[late[:, 0] // 16 * 16]
    }[reads]  # fmt: skip
    sees = late > soon if reads != "anchored" else late // 16 > soon // 16
    decay = torch.where((late >= soon)[..., None], (run[:, None] - run).exp(), 0.0)
    sight = torch.where(sees[..., None], (passed[:, None] - run).clamp_max(0).exp(), 0.0)
    by_out = torch.einsum("tv,tsv,sv->ts", do, decay, u)
    by_read = torch.einsum("tv,tsv,sv->ts", w, sight, u)
    found = (
        by_out @ k + (run.exp() * do) @ start,
        by_out.mT @ q + (by_read + by_read.mT) @ k + (passed.exp() * w) @ start,
    )
    for a, b in zip(found, (dq, dk), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    change, through = do * out - u * asked, w * x
    later = late <= soon if reads == "gated" else late < soon if reads == "before" else late // 16 < soon // 16
    total = change.flip(0).cumsum(0).flip(0) + later.double() @ through
    torch.testing.assert_close(total, dg, rtol=1e-10, atol=1e-10)
