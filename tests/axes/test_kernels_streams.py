"""Reads, writes and links of residual streams in Triton's interpreter, against float64; what the entries refuse.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from axes.kernels.streams.cayley import cayley
from axes.kernels.streams.follow import write_look
from axes.kernels.streams.look import look
from axes.kernels.streams.mix import mix_read, mix_write, mix_write_read
from axes.kernels.streams.sinkhorn import sinkhorn
from tests.interpreter import interpret

MIXES = r"""
from tests.streams import CALLS, compare, draw
import torch

torch.manual_seed(0)
for n, d, lead in ((2, 21, (2, 3)), (3, 140, (5,)), (4, 37, (9,))):
    for each in (True, False):
        for name in {2: ("both unmixed",), 3: ("read on", "write unmixed", "both")}.get(n, ("read", "write")):
            compare(name, draw(name, n, d, lead, each, torch.float32), 3e-6)
compare("both", draw("both", 16, 7, (2,), True, torch.float32), 3e-6)
compare("read", draw("read", 16, 7, (2,), False, torch.float32), 3e-6)
compare("write", draw("write", 4, 300, (3,), True, torch.float16), 2e-3)
compare("both", draw("both", 4, 24, (3,), True, torch.float16), 2e-3)
compare("write", draw("write", 1, 8, (), True, torch.float32), 3e-6)
compare("write", draw("write", 2, 8, (0, 3), False, torch.float32), 3e-6)
mixed = draw("write", 4, 24, (3,), True, torch.float16)
mixed["y"] = mixed["y"].float()  # a sublayer in another dtype
mixed["w"] = mixed["w"][0]  # one for all beside some of every token
compare("write", mixed, 2e-3)

from axes.kernels.streams import mix
for n, each in ((3, True), (4, False)):  # several programs go through several tiles each
    mix._PROGRAMS = 2
    compare("both", draw("both", n, 700, (5,), each, torch.float32), 3e-6)
for name in ("write", "write unmixed", "both unmixed"):  # more streams, by tiles
    compare(name, draw(name, 5, 140, (3,), True, torch.float32), 3e-6)
whole, names = mix._of_lanes, mix._walk_backward.kernel.fn.__globals__
names["_of_lanes"] = lambda product, *sizes: 0.9 * whole.fn(product, *sizes)  # an error is found
try:
    compare("write", draw("write", 4, 140, (4,), True, torch.float32), 3e-6)
except AssertionError:
    names["_of_lanes"] = whole
else:
    raise AssertionError("a planted error was not found")

# an error is found: a part of a sum is left out
mix._total = lambda sums, like, kind: sums[-1].view(like.shape)
try:
    compare("read", draw("read", 3, 140, (4,), True, torch.float32), 3e-6)
except AssertionError:
    pass
else:
    raise AssertionError("a planted error was not found")
"""

LINKS = r"""
import torch
from axes.core.geometry import Birkhoff
from axes.kernels.streams import sinkhorn as module
from axes.kernels.streams.sinkhorn import sinkhorn
from tests.streams import gradients

torch.manual_seed(0)

def check(logits, pairs=20, bound=1e-6, eps=0.0):
    direction = [torch.randn(logits.shape)]
    link = Birkhoff(pairs, eps)
    got = gradients(lambda z: sinkhorn(z, *link.sinkhorn), [logits], direction)
    want = gradients(link.primal, [logits.double()], direction)
    plain = gradients(link.primal, [logits], direction)
    for x, w, p in zip(got, want, plain):
        assert torch.isfinite(x).all() and x.dtype == torch.float32
        assert (x - w).norm() <= bound * w.numel() ** 0.5 + 2 * (p - w).norm(), (logits.shape, pairs, (x - w).norm())
    assert ((got[0].sum(-1) - 1).abs() < 1e-5).all() or eps

for n in (1, 2, 3, 4, 5, 16):
    check(torch.randn(2, 3, n, n), 20 if n == 4 else 3)
    check((60 if n == 3 else 1) * torch.randn(2, 3, n, n), 20 if n == 4 else n % 4 + 1, eps=1e-2 if n == 2 else 1e-6)
    check((60 if n == 3 else 8) * torch.randn(3, n, n), 4, bound=1e-5)
for far in (39.9, 40.1):  # by divisions, by logs
    check(far * torch.rand(70, 4, 4).round(), 20, bound=1e-5)
near = -8.0 * (1 - torch.eye(4))
check(near + 0.1 * torch.randn(70, 4, 4))
check(near, 5)  # one for all tokens
for high in (88.0, 200.0, -200.0):
    one = torch.zeros(1, 4, 4)
    one[0, 1, 2] = high
    check(one, 10, bound=1e-5)

normalise = module._logsumexp.fn  # an error is found: columns first, and never rows
module._logsumexp = lambda z, inside, AXIS: (0.0, 0.0) if AXIS == 2 else normalise(z, inside, AXIS)
module._forward.kernel.fn.__globals__["_logsumexp"] = module._logsumexp
try:
    check(torch.randn(3, 5, 5), 3)
except AssertionError:
    pass
else:
    raise AssertionError("a planted error was not found")

taken = module._asked.fn  # an error is found: what a normalisation took away is not put back
module._few_backward.kernel.fn.__globals__["_asked"] = lambda *given: [0 * c for c in taken(*given)]
far = torch.randn(3, 4, 4)
far[1, 2, 3] = 50.0
for logits in (torch.randn(3, 4, 4), far):  # by divisions and by logs
    try:
        check(logits, 3)
    except AssertionError:
        pass
    else:
        raise AssertionError("a planted error was not found")
"""

ROTATIONS = r"""
import torch
from axes.core.geometry import Cayley
from axes.kernels.streams import cayley as module
from axes.kernels.streams.cayley import cayley
from tests.streams import gradients

torch.manual_seed(0)

def check(logits, scale=0.5, kind="full", bound=1e-6):
    direction, link = [torch.randn(logits.shape)], Cayley(scale, kind)
    got = gradients(lambda z: cayley(z, *link.rotation), [logits], direction)
    want = gradients(link.primal, [logits.double()], direction)
    plain = gradients(Cayley(scale, kind).primal, [logits], direction)  # by torch's solve
    for x, w, p in zip(got, want, plain):
        assert torch.isfinite(x).all() and x.dtype == torch.float32
        least = bound * w.numel() ** 0.5 * max(1, w.abs().max())
        assert (x - w).norm() <= least + 4 * (p - w).norm(), (logits.shape, kind, (x - w).norm(), (p - w).norm())

for n in (1, 2, 3, 4, 5, 16):
    for kind in ("full", "mean-preserving"):
        if n > 1 or kind == "full":
            check(torch.randn(2, 3, n, n), kind=kind)
            check(100 * torch.randn(70 if n == 4 else 2, n, n), 1.0, kind, 1e-5)
check(torch.zeros(4, 4))  # one for all tokens

centre = module._centre.fn  # an error is found: columns are not centred
names = module._rotate.kernel.fn.__globals__
names["_centre"] = lambda a, inside, n, CENTRED: centre(a, inside, n, False)
try:
    check(torch.randn(2, 5, 5), kind="mean-preserving")
except AssertionError:
    pass
else:
    raise AssertionError("a planted error was not found")
names["_inverse"] = lambda s, N: s  # and one of small matrices
try:
    check(torch.randn(2, 4, 4))
except AssertionError:
    pass
else:
    raise AssertionError("a planted error was not found")
"""


LOOKS = r"""
import torch
from tests.streams import draw_look, look_errors
from axes.kernels.streams import look as module, mix, predict

torch.manual_seed(0)

def check(n, d, lead, entries, chart, dtype=torch.float32, bound=1e-6, scales=None, **options):
    found = look_errors(draw_look(n, d, lead, entries, chart, dtype, scales=scales), chart, **options)
    assert max(found) < bound, (n, d, lead, entries, chart, dtype, found)

check(4, 24, (2, 3), 24, "sigmoid")
check(2, 70, (67,), 5, "sigmoid", floor=1e-3, eps=0.5)
check(3, 20, (5,), 27, "softmax", centred=True)
check(2, 80, (3,), 11, "softmax", tanh=True)
check(3, 24, (35,), 5, "first", tanh=True)
check(16, 7, (2,), 40, "sigmoid")
check(4, 24, (35,), 24, "sigmoid", scales=3, writes=True)
check(3, 20, (5,), 6, "sigmoid", scales=2, writes=True)
check(3, 20, (35,), 27, "softmax", centred=True, scales=1, writes=True)
check(3, 20, (5,), 20, "softmax", tanh=True, scales=4, writes=True)
check(2, 9, (0,), 6, "sigmoid", writes=True)
check(1, 8, (), 1, "first", centred=True)
check(4, 40, (9,), 32, "sigmoid", torch.float16, 1e-3)

# beside streams of bfloat16 entries and gradients of parameters come from phi in two terms
def check_terms(n, d, lead, entries, chart, **options):
    found = look_errors(draw_look(n, d, lead, entries, chart, torch.bfloat16), chart, **options)
    seen, pre, k, told, again, dx, *parameters = found
    assert max(seen, again, dx) < 1e-2 and max(pre, k, told, *parameters) < 1e-4, (n, d, lead, entries, chart, found)

check_terms(4, 40, (9,), 24, "sigmoid")
check_terms(4, 70, (35,), 48, "softmax", centred=True, writes=True)
check_terms(3, 24, (35,), 5, "first", tanh=True)
check_terms(4, 8, (2,), 70, "sigmoid")

split = module.split  # an error is found: a second term that is another row's
module.split = lambda x, phi: torch.stack((split(x, phi)[:, 0], split(x, phi)[:, 1].roll(1, 0)), 1)
try:
    check_terms(4, 40, (9,), 24, "sigmoid")
except AssertionError:
    module.split = split
else:
    raise AssertionError("a planted error was not found")
back = module._back  # and a gradient without the norm's part
class Without:
    def __getitem__(self, grid):
        def launch(*given, **options):
            back[grid](*given, **options)
            given[10].zero_()
        return launch
module._back = Without()
try:
    check(4, 24, (6,), 24, "sigmoid")
except AssertionError:
    module._back = back
else:
    raise AssertionError("a planted error was not found")
taught, names = module._taught, module._give.kernel.fn.__globals__  # and that of phi without earlier tiles
names["_taught"] = lambda total, *given: taught.fn(0.0 * total, *given)
programs, mix._PROGRAMS = mix._PROGRAMS, 1
try:
    check(4, 24, (70,), 24, "sigmoid")
except AssertionError:
    names["_taught"] = taught
else:
    raise AssertionError("a planted error was not found")
check(4, 24, (70,), 24, "sigmoid")
check(3, 24, (70,), 5, "first", tanh=True)
mix._PROGRAMS = programs
for lines in (1, 128, 8192):  # numbers in parts of the gradients of a and b that are added at a time
    predict._LINES = lines
    check(4, 24, (150,), 24, "sigmoid", scales=3, writes=True)
    check(3, 24, (150,), 5, "first", tanh=True)
names = predict._chart.kernel.fn.__globals__  # and a scale of another entry's, and parts that are left out
added = names["_added"]
for name, wrong, given in (
    ("_scale", lambda c, N, C, SCALES: (c + 1) // N, (4, 24, (9,), 12, "sigmoid")),
    ("_added", lambda x, at, inside, count, step: added.fn(x, at, inside, 1, step), (4, 24, (700,), 12, "sigmoid")),
):
    kept, names[name] = names[name], wrong
    try:
        check(*given, scales=3)
    except AssertionError:
        names[name] = kept
    else:
        raise AssertionError("a planted error was not found")
"""

FOLLOWED = r"""
import torch
from tests.streams import draw_follow, follow_errors
from axes.kernels.streams import follow, look, mix

torch.manual_seed(0)

def check(n, d, lead, entries, chart, dtype=torch.float32, bound=1e-6, mixes=True, each=True, scales=None, **options):
    given = draw_follow(n, d, lead, entries, chart, dtype, mixes=mixes, each=each, scales=scales)
    found = follow_errors(given, chart, **options)
    assert max(found) < bound, (n, d, lead, entries, chart, dtype, found)

check(4, 24, (2, 3), 24, "sigmoid")
check(4, 24, (2, 3), 24, "sigmoid", scales=3, writes=True)
check(2, 70, (67,), 5, "sigmoid", floor=1e-3, eps=0.5, mixes=False)
check(3, 20, (5,), 27, "softmax", centred=True, scales=1, writes=True)
check(3, 24, (5,), 5, "first", tanh=True, each=False)
programs, mix._PROGRAMS = mix._PROGRAMS, 2  # several programs go through several tiles each
check(4, 80, (40,), 24, "sigmoid")
mix._PROGRAMS = programs
check(4, 40, (9,), 32, "sigmoid", torch.float16, 1e-3)
for _ in range(4):  # of streams of one number gradients cancel, and what was rounded before is left
    check(4, 1, (1,), 6, "first", torch.float16, 2e-3, tanh=True)
    check(4, 1, (2,), 48, "softmax", torch.float16, 2e-3, centred=True)
check(5, 40, (9,), 32, "sigmoid")
check(2, 8, (0,), 8, "sigmoid")

# an error is found: what is looked at is not what was written
forward = look._forward
look._forward = lambda x, *given: forward(1.01 * x, *given)
try:
    check(4, 24, (6,), 24, "sigmoid")
except AssertionError:
    look._forward = forward
else:
    raise AssertionError("a planted error was not found")
given = follow._backward  # and a gradient that does not go on to what was written
follow._follows.backward = lambda *g: given(*g[:14], None, *g[15:])
try:
    check(4, 24, (6,), 24, "sigmoid")
except AssertionError:
    pass
else:
    raise AssertionError("a planted error was not found")
"""

MIXERS = r"""
from axes import catalogue
from axes.routes.choice import NoImplementation
from tests.streams import check_followed, check_mixer

for name in ("mhc", "dynamic-hyper-connections", "hyper-connections", "jpmhc"):
    check_mixer(name, 2)
check_mixer("ihc", 3, learned_reduce="per-token")
check_mixer("mhc", 2, eps=1e-6, learned_reduce=True)
for after in ("hyper-connections", "denseformer", "mhc"):
    check_followed("hyper-connections" if after != "denseformer" else after, after, 3)
for first, after in (("mhc", "ihc"), ("ihc", "dynamic-hyper-connections"), ("jpmhc", "jpmhc")):
    check_followed(first, after)
try:
    catalogue.get("universal-transformer").cls(8).plans(implementation="triton")
except NoImplementation as refused:
    assert "the state counts sublayers" in str(refused), refused
else:
    raise AssertionError("a count is more than streams")
"""


def test_mixers() -> None:
    interpret(MIXERS)


def test_reads_and_writes() -> None:
    interpret(MIXES)


def test_projected_coefficients() -> None:
    interpret(LOOKS)


def test_a_write_and_what_the_next_sublayer_predicts() -> None:
    interpret(FOLLOWED)


def test_two_terms_of_bfloat16_are_sixteen_bits() -> None:
    """What `look` takes phi in beside streams of bfloat16, which Triton's interpreter does not multiply."""
    torch.manual_seed(0)
    x, phi = torch.randn(50, 8192).bfloat16().double(), torch.randn(24, 8192) * 8192**-0.5
    want, got, left = x @ phi.double().T, torch.zeros(50, 24, dtype=torch.float64), phi.clone()
    for bound in (3e-3, 5e-6, 3e-8):
        term = left.bfloat16()
        got, left = got + x @ term.double().T, left - term.float()
        assert (got - want).norm() < bound * want.norm()


def test_sinkhorn() -> None:
    interpret(LINKS)


def test_rotations() -> None:
    interpret(ROTATIONS)


X, Y, W, M = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 8), torch.zeros(4), torch.zeros(4, 4)
PHI, A, B = torch.zeros(6, 32), torch.zeros(6), torch.zeros(1, 6)


@pytest.mark.parametrize(
    ("call", "says"),
    (
        (lambda: mix_read(torch.zeros(2, 17, 8), torch.zeros(17)), "n from 1 to 16"),
        (lambda: cayley(torch.zeros(2, 17, 17), 0.1), "n from 1 to 16"),
        (lambda: cayley(torch.zeros(2, 2, dtype=torch.float64), 0.1), "up to 32 bits"),
        (lambda: mix_read(X.double(), W), "bf16, fp16 or fp32"),
        (lambda: mix_read(X, torch.zeros(3)), r"r is \(4,\) or \(2, 3, 4\), not \(3,\)"),
        (lambda: mix_read(X, W.long()), "floating point"),
        (lambda: mix_read(X, W), "need a CUDA device"),
        (lambda: mix_write(X, Y[0], W), "y is"),
        (lambda: mix_write(X, Y, W, torch.zeros(3, 4, 4)), "m is"),
        (lambda: mix_write_read(X, Y, W, torch.zeros(2, 4), M), "r is"),
        (lambda: look(X, PHI, A, B, "relu"), "sigmoid, softmax, first"),
        (lambda: look(X, PHI, A, B[:, :3], "sigmoid"), r"b is \(1, C\) with C from 4 to 128"),
        (lambda: look(X, PHI, A, B, "first"), r"b is \(4, C\)"),
        (lambda: look(X, PHI[:, 1:], A, B, "sigmoid"), r"phi is \(6, 32\)"),
        (lambda: look(X, PHI.double(), A, B, "sigmoid"), "phi has up to 32 bits"),
        (lambda: look(X.double(), PHI, A, B, "sigmoid"), "bf16, fp16 or fp32"),
        (lambda: look(X, PHI, A, B, "sigmoid"), "need a CUDA device"),
        (lambda: write_look(X, Y[0], W, M, PHI, A, B, "sigmoid"), "write_look: y is"),
        (lambda: write_look(X, Y, W, M, PHI[:, 1:], A, B, "sigmoid"), "need a CUDA device"),
        (lambda: look(X, PHI, A, B, "sigmoid", writes=True), r"b is \(1, C\) with C from 8 to 128"),
        (lambda: look(X, PHI, A, B, "first", writes=True), "the last without writes"),
        (lambda: look(X, PHI, A[:3], B, "sigmoid"), r"a is \(6,\), or has up to 2 numbers for 4 entries each"),
        (lambda: sinkhorn(torch.zeros(3, 4), 20), r"\(\.\.\., n, n\)"),
        (lambda: sinkhorn(torch.zeros(17, 17), 20), "n from 1 to 16"),
        (lambda: sinkhorn(M, 0), "pairs from 1"),
        (lambda: sinkhorn(M.double(), 1), "32 bits"),
        (lambda: sinkhorn(M, 20), "needs a CUDA device"),
    ),
)
def test_refuses(call: Callable[[], Tensor], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        call()
