"""Reads and writes of streams that are followed as lines give what Python gives: the same bits, and one pass a sublayer
where kernels do both."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tests.interpreter import interpret

PROGRAM = r"""
from contextlib import nullcontext
from unittest.mock import patch
import torch
from axes import catalogue
from axes.depth.hyper_connections import relinked
from axes.depth.lines import WRITES
from axes.errors import ShapeError
from axes.kernels.common import line as lines, repeated
from axes.kernels.common.repeated import _known

torch.manual_seed(0)
torch.set_num_threads(1)
followed = []
follow = lines.Line.follow
lines.Line.follow = lambda self, *a: followed.append(self) or follow(self, *a)

def network(*names, d=4, n=2):
    mixers = [catalogue.get(name, axis="depth").cls(d, i, streams=n) for i, name in enumerate(names)]
    for name, mixer in zip(names, mixers):
        mixer.implementation = "triton"
        if name == "mhc":
            mixer.update = relinked(mixer.update, iterations=2)  # the interpreter's time is that of Sinkhorn's pairs
        for p in mixer.parameters():
            p.data.add_(0.3 * torch.randn(p.shape))
    return mixers

def tokens(T=2, d=4, **kind):
    return torch.randn(1, T, d, requires_grad=True, **kind)

def through(mixers, h, joined=True, sublayer=torch.tanh):
    '''What every sublayer reads and what leaves.'''
    streams = mixers[0].expand(h)
    x, c = mixers[0].read(streams)
    seen = [x]
    for mixer, following in zip(mixers, mixers[1:]):
        y = sublayer(x)
        if joined:
            streams, x, c = mixer.write_then_read(streams, y, c, following)
        else:
            streams = mixer.write(streams, y, c)
            x, c = following.read(streams)
        seen.append(x)
    return [*seen, mixers[-1].write(streams, sublayer(x), c)]

def results(mixers, h, **how):
    made = through(mixers, h, **how)
    wanted = [h, *[p for m in mixers for p in m.parameters() if p.requires_grad]]
    torch.manual_seed(1)
    total = sum((o * torch.randn(o.shape)).sum() for o in made)
    return [*made, *torch.autograd.grad(total, wanted, allow_unused=True)]

def by_python(call):
    with patch.object(repeated, "_watched", lambda: True):
        return call()

def same(a, b):
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b)):
        assert (x is None) == (y is None) and (x is None or x.dtype == y.dtype and torch.equal(x, y)), i

def check(mixers, make, calls, **how):
    '''Calls of a network, of which the last are followed, and Python's.'''
    for _ in range(2):
        results(mixers, make(), **how)
    followed.clear()
    h = make()
    mine = results(mixers, h, **how)
    refused = {l.refused for m in (*mixers, WRITES) for l in (_known[m].lines.values() if m in _known else ())}
    assert len(followed) == calls and refused <= {None}, (len(followed), refused)
    same(mine, by_python(lambda: results(mixers, h, **how)))
"""
QUICK = ("dynamic-hyper-connections", "jpmhc")
SLOW = ("hyper-connections", "mhc", "mhc-lite", "ihc", "jpmhc-mean-preserving")


@pytest.mark.parametrize("name", [*QUICK, *[pytest.param(name, marks=pytest.mark.slow) for name in SLOW]])
def test_the_same_bits(name: str) -> None:
    streams = 3 if name == "jpmhc-mean-preserving" else 2
    interpret(
        PROGRAM
        + f"""
mixers = network({name!r}, {name!r}, n={streams})
check(mixers, tokens, 3)  # a read, a write with the next read, a write
with torch.no_grad():
    for m in mixers:
        for p in m.parameters():
            p.add_(torch.randn(p.shape) * 0.01)  # trained
h = tokens()
same(results(mixers, h), by_python(lambda: results(mixers, h)))
"""
    )


def test_neighbours_of_another_kind() -> None:
    interpret(
        PROGRAM
        + """
mixers = network("mhc", "hyper-connections", "mhc")
check(mixers, tokens, 4)
check(mixers, tokens, 6, joined=False)
"""
    )


def test_what_a_look_is() -> None:
    interpret(
        PROGRAM
        + r"""
mixers = network("hyper-connections", "mhc")
check(mixers, tokens, 3)
h = tokens()

def python(call):
    before = len(followed)
    made = call()
    assert len(followed) == before
    return made

python(lambda: results(mixers, tokens(T=4)))
check(mixers, lambda: tokens(dtype=torch.bfloat16), 3)
mixers[0].post.requires_grad_(False)
check(mixers, tokens, 3)
mixers[0].post.requires_grad_(True)
with torch.no_grad():
    for _ in range(2):
        through(mixers, tokens())
    followed.clear()
    mine = through(mixers, h)
    assert len(followed) == 3
    same(mine, by_python(lambda: through(mixers, h)))
with torch.autocast("cpu", torch.bfloat16):
    check(mixers, tokens, 3, sublayer=lambda x: x @ torch.eye(4))  # y in bfloat16 beside streams of float32

# gradients that did not come before: of the coefficients, of the streams alone
x, c = mixers[1].read(mixers[1].expand(h))
mine = torch.autograd.grad(c.signal["mix"].sum() + c.pre.square().sum(), [mixers[1].phi, h])
with patch.object(repeated, "_watched", lambda: True):
    x, c = mixers[1].read(mixers[1].expand(h))
    same(mine, torch.autograd.grad(c.signal["mix"].sum() + c.pre.square().sum(), [mixers[1].phi, h]))

# by name; errors; streams that are modified between a read and its write
mixers[1].implementation = "torch"
python(lambda: mixers[1].read(mixers[1].expand(h)))
mixers[1].implementation = "triton"
streams = mixers[0].expand(h)
x, c = mixers[0].read(streams)
for wrong, words in ((lambda: mixers[0].write(streams, x[:, :1], c), "do not fit|does not fit"),
                     (lambda: mixers[0].read(streams[..., :3]), "enter with expand")):
    try:
        wrong()
    except ShapeError as error:
        assert any(w in str(error) for w in words.split("|")), error
    else:
        raise AssertionError(words)
x, c = mixers[1].read(streams)
with torch.no_grad():
    streams.mul_(2.0)
try:
    x.sum().backward()
except RuntimeError as error:
    assert "inplace operation" in str(error)
else:
    raise AssertionError("a value that is gone was used")
"""
    )


def test_a_planted_error_is_found() -> None:
    interpret(
        PROGRAM
        + r"""
mixers = network("mhc", "mhc")
run = lines.Line._run
for _ in range(2):
    results(mixers, tokens())
h = tokens()
lines.Line._run = lambda self, function, tensors: run(self, function, [tensors[0] * 1.0001, *tensors[1:]])
mine = results(mixers, h)
lines.Line._run = run
try:
    same(mine, by_python(lambda: results(mixers, h)))
except AssertionError:
    pass
else:
    raise AssertionError("a planted error was not found")
"""
    )


def test_sublayers_follow_lines_where_their_streams_are_made_again() -> None:
    interpret(
        PROGRAM
        + r"""
from axes.depth import through
from axes.sequence import LinearAttention
mixers, layers = network("hyper-connections", "hyper-connections"), [LinearAttention(4, heads=1) for _ in range(2)]
h = tokens()

def gradients(recompute):
    out = through([lambda x, f=f: f(x)[0] for f in layers], mixers, mixers[0].expand(h), recompute)
    parameters = [p for m in (*mixers, *layers) for p in m.parameters()]
    return [out, *torch.autograd.grad(out.square().sum(), [h, *parameters])]

for _ in range(3):
    followed.clear()
    mine = gradients(2)
assert len(followed) == 2, len(followed)
same(mine, by_python(lambda: gradients(0)))
"""
    )


def test_a_norm_before_a_sublayer_is_in_the_line_of_its_read() -> None:
    interpret(
        PROGRAM
        + r"""
from axes.depth import through
from axes.depth.lines import Before
from axes.models.language_model import RMSNorm, _norm_by_kernel, _norm_facts
mixers, norms = network("mhc", "mhc"), [RMSNorm(4) for _ in range(2)]
for norm in norms:
    norm.weight.data.add_(0.3 * torch.randn(4))
before = [Before(mixer, norm, _norm_by_kernel, _norm_facts) for mixer, norm in zip(mixers, norms)]
wanted = [p for module in before for p in module.parameters()]
h = tokens()

def gradients(joined):
    sublayers = [torch.tanh if joined else lambda x, b=b: torch.tanh(b(x)) for b in before]
    out = through(sublayers, mixers, mixers[0].expand(h), before=before if joined else None)
    return [out, *torch.autograd.grad(out.square().sum(), [h, *wanted], allow_unused=True)]

counts = {}
for joined in (True, False):
    for _ in range(2):
        gradients(joined)
    followed.clear()
    mine = gradients(joined)
    counts[joined] = len(followed)
    same(mine, by_python(lambda: gradients(joined)))
    if joined:
        first = mine
assert counts == {True: 4, False: 5}, counts  # the first norm is beside its read
same(first, mine)
mixers[1].implementation = "torch"  # what is read by torch's products is normed after all
a, b = gradients(True), gradients(False)
same(a, b)
assert not torch.equal(norms[1].weight, torch.ones(4)) and a[-1].norm() > 0
for wrong in ({"recompute": 1, "before": before}, {"before": before[:1]}):
    try:
        through([torch.tanh] * 2, mixers, mixers[0].expand(h), **wrong)
    except ShapeError as error:
        assert "without recompute" in str(error), error
    else:
        raise AssertionError(wrong)
"""
    )
