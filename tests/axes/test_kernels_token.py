"""Kernels generated from a token's step, in Triton's interpreter: outputs, last states and all gradients against the
float64 interpreter of tuples. The interpreter is chosen when Triton is imported, so each runs in a process of its own.
"""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from tests.interpreter import interpret

PROGRAM = r"""
import dataclasses
import torch
from torch.utils import _pytree as pytree
from axes import sequence
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Huber
from axes.core.geometry import Entropic
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.kernels.common import versions
from axes.programs.forms import _Rewriting
from axes.programs.tile_text import Threads
from axes.routes import dispatch, token

torch.manual_seed(0)
versions.refusal = lambda device: None  # as on a GPU
OWN = StateUpdate(Huber(1.0, "norm"), Entropic("column"), Scalar("decay"),
                  Step(Per("beta"), via=(Momentum(0.9, "ema", debias=True),)))

def draw(update, batch, length, heads, d_v, d_k):
    form = token._form(update)
    sizes = {"v": d_v, "k": d_k}
    made = {n: torch.rand(batch, length, heads, *[sizes[a] for a in s if a]) for n, s in form.signal.items()}
    return {n: -0.3 * x if "decay" in n else 0.05 + 0.2 * x if n in ("eta", "beta", "gamma") else x - 0.5
            for n, x in made.items()}

def small(walk, **change):  # several chunks of a short sequence, several programs of a head
    return walk if isinstance(walk, token.NoWalk) else dataclasses.replace(walk, **change)

def gradients(outputs, inputs, pulls):
    pairs = [(x, g.to(x)) for x, g in zip(outputs, pulls) if x.requires_grad]
    return torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)

def both(update, signal, state, run, bound):
    sides = []
    pulls = None
    for one, dtype in ((run, None), (reference.run, torch.float64)):
        live = {n: (x if dtype is None else x.to(dtype)).clone().requires_grad_() for n, x in signal.items()}
        leaves, form = pytree.tree_flatten(state)
        leaves = [(x.clone() if dtype is None else x.to(dtype)).requires_grad_() if x.is_floating_point() else x
                  for x in leaves]
        out, last = one(update, live, pytree.tree_unflatten(leaves, form), time=1)
        ends = pytree.tree_leaves(last)
        outputs = [out, *(x for x in ends if x.is_floating_point())]
        sides.append((outputs, [x for x in ends if not x.is_floating_point()], live, leaves))
    shapes = [x.shape for x in sides[1][0]]
    assert [x.shape for x in sides[0][0]] == shapes, ([x.shape for x in sides[0][0]], shapes)
    assert sides[0][1] == sides[1][1]
    pulls = [torch.randn(s) for s in shapes]
    found = []
    for outputs, _, live, leaves in sides:
        inputs = [*live.values(), *(x for x in leaves if x.is_floating_point())]
        found.append([*outputs, *gradients(outputs, inputs, pulls)])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        if b is not None:
            assert a is not None and torch.isfinite(a).all(), i
            assert (a.double() - b).norm() <= bound * b.norm() + 1e-12, (update, i, (a.double() - b).norm() / b.norm())

def check(update, batch, length, heads, d_v, d_k, count=0, half=False, **change):
    walks = token.walk
    if change:
        token.walk = lambda *given: KEPT.setdefault((*given, *change.items()), small(walks(*given), **change))
    signal = draw(update, batch, length, heads, d_v, d_k)
    if half:
        signal = {n: x.bfloat16() if half is True or n in half else x for n, x in signal.items()}
    state = update.init({n: x[:, 0].float() for n, x in signal.items()})
    shapes = {n: tuple(x.shape) for n, x in signal.items()}
    assert dispatch.select(update, "cpu", signal["v"].dtype, shapes)[:2] == ("token", "triton")
    leaves, form = pytree.tree_flatten(state)
    leaves = [x + 0.2 * torch.rand(x.shape) if x.is_floating_point() else x + count for x in leaves]
    both(update, signal, pytree.tree_unflatten(leaves, form), dispatch.run, 2e-2 if half else 2e-5)
    token.walk = walks

def in_forms(update, d_v, d_k):  # everything that may be a form is one
    walk = token.walk(update, d_v, d_k)
    return _Rewriting(walk.step, walk.widths, frozenset(range(len(walk.step.operations)))).run()

KEPT = {}
THREADS = Threads((4, 8), (1, 1))  # the interpreter has none
"""
CASES = {
    "keys in float32 beside values of 16 bits": (
        'check(sequence.MemoraMatrix.update, 1, 9, 2, 5, 6, half="v", count=9, chunk=4)'
    ),
    "anchors renewed within chunks": "check(sequence.MonetaMatrix.update, 1, 12, 2, 5, 6, count=9, chunk=4)",
    "rows of their own programs": "check(sequence.AdamNet.update, 2, 7, 2, 20, 5, rows=8, chunk=4)",
    "two tokens at a time between anchors": (
        "check(sequence.MonetaMatrix.update, 1, 27, 1, 5, 6, count=9, chunk=14, inner=5, early=2,"
        " threads=Threads((4, 8), (4, 1)), unroll=2)"
    ),
    "three tokens at a time": (
        "check(sequence.LatticeOSR.update, 2, 11, 1, 6, 7, chunk=8, inner=4, threads=THREADS, unroll=3)"
    ),
    "two tokens at a time, the compiler's": (
        "check(sequence.AdamNet.update, 1, 11, 1, 20, 6, count=9, chunk=8, rows=8, unroll=2)"
    ),
    "segments of what programs of a head add up": """
from axes.programs import tile_kernels
tile_kernels._SEGMENT = 8
launched = []
usual = tile_kernels._launch
tile_kernels._launch = lambda walk, name, *given, **more: launched.append(name) or usual(walk, name, *given, **more)
check(sequence.AdamNet.update, 2, 19, 2, 20, 5, count=9, rows=8, chunk=4)
assert launched == ["forward", *["backward"] * 3], launched
""",
    "keys across warps": 'check(sequence.AdamNet.update, 1, 7, 2, 20, 5, rows=8, chunk=4, across="k")',
    "spans of a chunk, vectors of one dimension": (
        "check(sequence.MonetaMatrix.update, 1, 12, 2, 5, 6, count=9, chunk=6, inner=2, early=2, threads=THREADS)"
    ),
    "a span as long as several anchors": (
        "check(sequence.AdamNet.update, 1, 40, 1, 20, 6, count=9, chunk=32, inner=20, early=3, rows=8, threads=THREADS)"
    ),
    "rows across warps, in spans": (
        'check(sequence.LatticeDec.update, 1, 9, 2, 8, 6, chunk=6, inner=4, threads=THREADS, across="k")'
    ),
    "forms, and a sum that is carried": """
update = sequence.LatticeOSR.update
step = in_forms(update, 6, 7)
assert any(n.startswith("next ") for n in step.outputs)
check(update, 2, 9, 1, 6, 7, chunk=4, step=step)
""",
    "columns that meet": "check(sequence.LatticeDec.update, 2, 9, 1, 6, 7, chunk=4)",
    "bfloat16": "check(sequence.LatticeOSR.update, 1, 6, 2, 8, 4, half=True, chunk=4)",
    "a user's": "check(OWN, 1, 7, 1, 5, 4, chunk=4)",
    "packed": """
update = sequence.LatticeOSR.update
signal = draw(update, 1, 12, 2, 5, 6)
first = {n: x[:, 0].expand(3, *x.shape[2:]) for n, x in signal.items()}
start = tuple(x + torch.rand(3, *x.shape[1:]) for x in update.init(first).theta)
bounds = torch.tensor([0, 5, 5, 12])
assert dispatch.select(update, "cpu", torch.float32, {"v": (1, 12, 2, 5), "k": (1, 12, 2, 6),
                                                      "cu_seqlens": (4,)})[:2] == ("token", "triton")
live = {n: x.requires_grad_() for n, x in signal.items()}
out, last = dispatch.run_packed(update, live, update.init(first, start), bounds)
pull = torch.randn_like(out)
got = torch.autograd.grad((out * pull).sum() + last.theta[0].sum(), list(live.values()))
pieces, ends = [], []
for i, (a, b) in enumerate(((0, 5), (5, 5), (5, 12))):
    own = {n: x[:, a:b] for n, x in live.items()}
    s = update.init(first, start)
    s = s._replace(theta=(start[0][i : i + 1],))
    if b > a:
        y, s = reference.run(update, own, s, time=1)
        pieces.append(y)
    ends.append(s.theta[0])
want, end = torch.cat(pieces, 1), torch.cat(ends)
exact = torch.autograd.grad((want * pull).sum() + end.sum(), list(live.values()))
for a, b in zip((out, last.theta[0], *got), (want, end, *exact), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
""",
    "packed, each with anchors of its own": """
update = sequence.AdamNet.update
signal = draw(update, 1, 24, 1, 5, 6)
cuts = [0, 4, 4, 24]
first = {n: x[:, 0].expand(3, *x.shape[2:]) for n, x in signal.items()}
state = update.init(first)._replace(count=torch.tensor(14))
state = state._replace(theta=tuple(torch.rand_like(x) for x in state.theta),
                       anchor=tuple(torch.rand_like(x) for x in state.anchor))
out, last = dispatch.run_packed(update, signal, state, torch.tensor(cuts))
assert last.count.tolist() == [18, 14, 34]
for n, (a, b) in enumerate(zip(cuts, cuts[1:])):
    own = state._replace(theta=(state.theta[0][n : n + 1],), anchor=(state.anchor[0][n : n + 1],))
    one = pytree.tree_map(lambda x: x[:1] if x.ndim and x.shape[0] == 3 else x, own)
    if b > a:
        y, one = reference.run(update, {m: x[:, a:b] for m, x in signal.items()}, one, time=1)
        torch.testing.assert_close(out[:, a:b], y, rtol=1e-4, atol=1e-5)
    for got, want in zip(pytree.tree_leaves(last), pytree.tree_leaves(one), strict=True):
        if got.is_floating_point():
            torch.testing.assert_close(got[n : n + 1], want.expand_as(got[n : n + 1]), rtol=1e-4, atol=1e-5)
""",
    "one token after a state": """
update = sequence.LatticeDec.update
signal = draw(update, 2, 1, 2, 6, 7)
state = update.init({n: x[:, 0] for n, x in signal.items()})
assert dispatch.select_token(update, "cpu", torch.float32, {n: x.shape for n, x in signal.items()}).route == "token"
out, after = dispatch.step(update, signal, state)
want, end = reference.run(update, signal, state, time=1)
torch.testing.assert_close(out, want)
torch.testing.assert_close(after.theta[0], end.theta[0])
""",
    "a layer, and as one graph": """
layer = sequence.LatticeDec(8, heads=2, implementation="triton")
exact = sequence.LatticeDec(8, heads=2, implementation="reference")
exact.load_state_dict(layer.state_dict())
x = torch.randn(2, 5, 8, requires_grad=True)
want, _ = exact(x)
grads = torch.autograd.grad(want.square().sum(), [x, *exact.parameters()])
for module in (layer, layer, layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):  # the third by a line
    got, _ = module(x)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.square().sum(), [x, *layer.parameters()]), grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
""",
    "numbers and signals of one head": """
update = sequence.LatticeDec.update
signal = draw(update, 2, 5, 3, 6, 7)
signal["gamma"] = 0.2
signal["k"] = signal["k"][:, :, :1].requires_grad_()
whole = {**signal, "gamma": torch.full((2, 5, 3), 0.2), "k": signal["k"].expand(2, 5, 3, 7)}
out, _ = dispatch.run(update, whole)
want, _ = reference.run(update, whole, time=1)
torch.testing.assert_close(out, want)
torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), signal["k"])[0] for x in (out, want)),
                           rtol=1e-4, atol=1e-5)
""",
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_interpreter_of_tuples(case: str) -> None:
    interpret(PROGRAM + CASES[case])
