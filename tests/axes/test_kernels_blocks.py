"""The kernels of a block's two halves under Triton's interpreter against float64, and what they refuse.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import sys

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from axes.kernels.blocks.enter import enter
from axes.kernels.blocks.leave import leave
from axes.kernels.blocks.plan import Numbers, Plan, Stream, no_stream
from tests.interpreter import interpret

PROGRAM = r"""
import torch
from axes.kernels.blocks.enter import enter
from axes.kernels.blocks.leave import leave
from axes.kernels.blocks.plan import Numbers, Plan, Stream
from tests import block_halves

torch.manual_seed(0)
torch.set_num_threads(1)
BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

def compare(case, got, want, dtype):
    for n, (x, w) in enumerate(zip(got, want, strict=True)):
        assert x.shape == w.shape, (case, n, x.shape, w.shape)
        error = ((x - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item() if w.numel() else 0.0
        assert error < BOUNDS[dtype], (case, n, error)

def check_enter(streams, numbers=(), T=9, B=2, lengths=(), started=True, ends=True, dtype=torch.float32, pad=0):
    case = {n: x for n, x in locals().items()}
    b, t = (1, sum(lengths)) if lengths else (B, T)
    units = len(lengths) or b
    cu = torch.tensor((0, *lengths)).cumsum(0).int() if lengths else None
    used = sum(s.heads * s.width for s in streams) + sum(n.columns for n in numbers)
    p = torch.randn(b, t, used + pad).to(dtype)
    made = Plan(streams, numbers, used + pad)
    parameters = [torch.randn(n).to(dtype) for n in made.parameters()]
    tails = [torch.randn(shape).to(dtype) for shape in made.tails(units)] if started else []
    n, given = len(parameters), [p, *parameters, *tails]

    def kernel(p, *rest):
        outs, new = enter(p, made, rest[:n], rest[n:], cu)
        return [*outs, *new]

    def wanted(p, *rest):
        outs, new = block_halves.enter(p, streams, numbers, rest[:n], rest[n:], cu)
        return [*outs, *new]

    shapes = [x.shape for x in kernel(*given)]
    directions = [torch.randn(s) for s in shapes]
    if not ends:
        directions[len(made.shapes(b, t)):] = [None] * len(made.tails(units))
    got = block_halves.gradients(kernel, given, directions)
    want = block_halves.gradients(wanted, [x.double() for x in given], directions)
    compare(case, got, want, dtype)
    if pad:
        assert not got[len(shapes)][..., used:].any()

def check_leave(T=5, H=2, D=16, gated=True, normed=True, skips=False, activation="silu", dtype=torch.float32, **more):
    case = {n: x for n, x in locals().items()}
    more = {"activation": activation, "eps": 1e-5, **more}
    heads = (2, T, H, D)
    width = H * D if more.get("after") else D
    given = {"y": heads, **({"gate": (2, T, H * D)} if gated else {}), **({"weight": (width,)} if normed else {})}
    given |= {"skip": (H * D,), "v": heads} if skips else {}
    tensors = [torch.randn(s).to(dtype) for s in given.values()]
    kernel = lambda *x: [leave(**dict(zip(given, x)), **more)]
    wanted = lambda *x: [block_halves.leave(**dict(zip(given, x)), **more)]
    direction = torch.randn(2, T, H * D)
    got = block_halves.gradients(kernel, tensors, [direction])
    want = block_halves.gradients(wanted, [x.double() for x in tensors], [direction])
    compare(case, got, want, dtype)
"""

CASES = {
    "gated delta": """
def streams(h, d, w, v=None):
    v = v or d
    return (Stream(h, d, w, False, "silu", "none", "unit", 1e-12, d ** -0.5),
            Stream(h, d, w, False, "silu", "none", "unit", 1e-12), Stream(h, v, w, False, "silu"))
rates = lambda h: (Numbers(h, "ssm", biased=True), Numbers(h, "sigmoid", 2.0))
check_enter(streams(2, 16, 4), rates(2), T=20)
check_enter(streams(3, 32, 3, 20), rates(3), T=19, pad=2)
check_enter(streams(1, 64, 2), rates(1), T=3, B=1, started=False, ends=False, pad=6)
""",
    "wide heads": """
check_enter((Stream(2, 128, 4, True, "silu", "none", "rms", 1e-5), Stream(2, 96, 4, False, "gelu")), T=6)
""",
    "long": """
import axes.kernels.blocks.enter as host
streams = (Stream(2, 16, 4, True, "silu", "none", "unit", 1e-12), Stream(2, 16, 4, True, "silu"))
for length in (4, 64):  # several chunks, the last one not full, and one that is longer than the sequence
    host._length = lambda *_: length
    check_enter(streams, (Numbers(5, "softplus", 0.5, True),), T=19)
    check_enter(streams, lengths=(17, 0, 1, 3, 16))
""",
    "turning": """
import axes.kernels.blocks.enter as host
turned = Stream(2, 16, 4, False, "silu", "elu+1", "unit", 1e-12, 0.25, 10000.0)
check_enter((turned, turned._replace(scale=1.0), Stream(2, 8, turn=0.7, uniform=True), Stream(3, 12, turn=100.0)), T=11)
check_enter((Stream(2, 12, 3, norm="rms", eps=1e-5, turn=50.0),), lengths=(0, 1, 9, 0, 2))
check_enter((Stream(2, 8, turn=50.0), Stream(1, 8, scale=2.0)), (Numbers(3, narrow=True),), T=5, pad=5)  # linear
host._length = lambda *_: 4
check_enter((Stream(1, 8, 2, turn=10000.0),), T=23)
""",
    "functions": """
for name in ("none", "silu", "gelu", "relu", "elu+1", "sigmoid"):
    check_enter((Stream(2, 5, 2, True, name), Stream(1, 8, 0, False, "none", name, "unit", 1e-12)), B=1)
    check_leave(activation=name)
charts = ("linear", "sigmoid", "logsigmoid", "softplus")
check_enter((), [Numbers(7, name, 0.7, i % 2 == 0) for i, name in enumerate(charts)], B=1, pad=4)
check_enter((), [Numbers(300, "logsigmoid", 1 / 16, True), Numbers(6, "ssm", biased=True, step=True)], B=1)
""",
    "packed": """
streams = (Stream(2, 16, 4, True, "silu", "none", "unit", 1e-12), Stream(1, 16, 3), Stream(2, 8, 1), Stream(1, 8))
for lengths in ((0, 1, 9, 0, 2), (3,), (0, 0, 5)):
    for started in (True, False):
        check_enter(streams, (Numbers(2, "sigmoid"),), lengths=lengths, started=started)
""",
    "short": """
streams = (Stream(2, 16, 4, True, "silu"), Stream(1, 16, 3))
for t in (1, 2, 3, 4, 5):
    check_enter(streams, T=t)
    check_enter(streams, T=t, ends=False)
""",
    "half": """
for dtype in (torch.float16, torch.bfloat16):
    check_enter((Stream(2, 16, 4, True, "silu", "none", "unit", 1e-12), Stream(2, 16, 4, True, "silu")),
                (Numbers(2, "ssm", biased=True, step=True), Numbers(16, narrow=True)), T=21, dtype=dtype)
    check_leave(dtype=dtype, T=21)
""",
    "leave": """
for d, h in ((16, 3), (20, 1), (64, 2), (128, 1)):
    check_leave(T=3, H=h, D=d)
check_leave(T=41, gated=False)
check_leave(T=41, normed=False, activation="gelu")
for d, h in ((16, 3), (20, 1), (64, 2)):
    check_leave(T=3, H=h, D=d, skips=True, after=True)
check_leave(T=41, skips=True, normed=False)
check_leave(T=41, skips=True, normed=False, gated=False)
check_leave(T=41, after=True, activation="sigmoid")
check_leave(T=2, H=16, D=256, skips=True, after=True)
import axes.kernels.blocks.leave as host
host._PROGRAMS = 3  # each takes rows more than once
check_leave(T=301, H=3, D=16)
check_leave(T=41, H=3, D=16, skips=True, after=True)
""",
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_in_the_interpreter(name: str) -> None:
    interpret(PROGRAM + CASES[name])


@pytest.mark.parametrize(("heads", "width", "warps"), [(16, 128, 4), (8, 64, 4), (6, 128, 2), (12, 64, 2), (3, 32, 4)])
def test_programs_take_whole_heads_where_half_the_warps_do(heads: int, width: int, warps: int) -> None:
    """Six heads of 128 in fours would be eight."""
    plan = Plan((Stream(heads, width, 4),) * 3, (), 3 * heads * width)
    assert plan.warps == warps
    ((_, first, blocks, each, *_, together, _, _, _, _, _, _, _, members), *_) = [p[:16] for p in plan.parts]
    assert (first, blocks, members) == (0, 3 * each, 3) and (each - 1) * together < heads <= each * together


def test_refusals() -> None:
    declared = Plan((Stream(2, 8, 3),), (Numbers(2),), 24)
    p, w = torch.randn(2, 4, 24), torch.randn(16, 1, 3)
    for bad, message in (
        ((p[0], declared, [w]), r"the product is \(B, T, 24\) and not empty, not \(4, 24\)"),
        ((p[:, :0], declared, [w]), "not empty"),
        ((p, declared, []), r"parameters have \[48\] numbers, not \[\]"),
        ((p, declared, [w], [torch.zeros(2, 3, 16)]), r"tails are \[\(2, 2, 16\)\], not \[\(2, 3, 16\)\]"),
        ((p, declared, [w], [], torch.tensor([0, 4])), "batch size 1"),
    ):
        with pytest.raises(ShapeError, match=message):
            enter(*bad)  # type: ignore[arg-type]
    y = torch.randn(2, 4, 2, 8)
    for given, message in (
        ((y[0],), r"y is \(B, T, H, D\)"),
        ((y, y), r"the gate is torch.float32 \(2, 4, 16\), not torch.float32 \(2, 4, 2, 8\)"),
        ((y, None, torch.ones(4)), r"weights are \(8,\), not \(4,\)"),
        ((y, None, None, torch.ones(16)), r"a skip is \(16,\) numbers and v, not one of them"),
        ((y, None, None, torch.ones(8), y), r"a skip is \(16,\) numbers and v, not \(8,\)"),
        ((y, None, None, torch.ones(16), y[:1]), r"v is torch.float32 \(2, 4, 2, 8\)"),
    ):
        with pytest.raises(ShapeError, match=message):
            leave(*given)
    assert "up to 4 wide, not 5" in (no_stream(Stream(1, 8, 5)) or "")
    assert "from 1 to 256 wide, not 512" in (no_stream(Stream(1, 512)) or "")
    assert no_stream(Stream(1, 256, 4)) is None
