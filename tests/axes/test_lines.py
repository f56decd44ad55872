"""A call that is followed as a line gives what Python gives: the same bits, errors and refusals."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from tests.interpreter import interpret

PROGRAM = r"""
import copy, gc, pickle, weakref
import torch
from torch import nn
import axes.sequence as sequence
from axes.kernels.common import line as lines
from axes.kernels.common.repeated import _known

torch.manual_seed(0)
torch.set_num_threads(1)
followed = []
follow = lines.Line.follow
lines.Line.follow = lambda self, *a: followed.append(self) or follow(self, *a)

def tokens(T=2, B=1, width=16, **kind):
    return torch.randn(B, T, width, requires_grad=True, **kind)

def make(name="LinearAttention", **options):
    return getattr(sequence, name)(16, heads=1, **options)

def python(layer, x):
    return layer._run(x, None, None)

def leaves(made):
    return list(lines._tensors(made))

def loss(made, every=False):
    torch.manual_seed(1)
    outs = [o for o in leaves(made) if o.requires_grad]
    return sum((o * torch.randn(o.shape)).sum() for o in (outs if every else outs[:1]))

def gradients(layer, made, x, every=False):
    wanted = [x, *[p for p in layer.parameters() if p.requires_grad]]
    return torch.autograd.grad(loss(made, every), wanted, allow_unused=True)

def same(a, b):
    a, b = list(a), list(b)
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b)):
        assert (x is None) == (y is None) and (x is None or x.dtype == y.dtype and torch.equal(x, y)), i

def seen(layer, x, **how):
    for _ in range(2):
        gradients(layer, layer(x, **how), x)
    followed.clear()

def once(layer, x, every=False):
    '''Followed, and what Python makes of it.'''
    before = len(followed)
    made = layer(x)
    assert len(followed) == before + 1
    mine = leaves(made), gradients(layer, made, x, every)
    made = python(layer, x)
    theirs = leaves(made), gradients(layer, made, x, every)
    same(mine[0], theirs[0])
    same(mine[1], theirs[1])
"""

RECURRENCES = """
from axes.kernels.common import versions
versions._ask = lambda device: versions._Reasons(None, "no Hopper")  # by portable kernels, and not the blocks alone
"""
QUICK, SLOW = ("RWKV7", "SoftmaxAttention", "ALiBi"), ("GatedDeltaNet", "GLA", "Mamba2", "RetNet", "TitansMatrix")


@pytest.mark.parametrize("name", [*QUICK, *[pytest.param(name, marks=pytest.mark.slow) for name in SLOW]])
def test_the_same_bits(name: str) -> None:
    interpret(
        PROGRAM
        + RECURRENCES
        + f"""
layer = make({name!r})
seen(layer, tokens())
with torch.no_grad():
    for p in layer.parameters():
        p.add_(torch.randn(p.shape) * 0.01)  # trained
once(layer, tokens())
"""
    )


def test_what_a_look_is() -> None:
    interpret(
        PROGRAM
        + r"""
layer = make()
seen(layer, tokens())

def by_python(call):
    before = len(followed)
    call()
    assert len(followed) == before

x = tokens()
by_python(lambda: layer(tokens(T=6)))
by_python(lambda: layer(tokens(B=3)))
once(layer, x, every=True)  # with gradients of the state, which were not written down
layer.load_state_dict(make().state_dict())
once(layer, x)
assert _known[layer].again is not None  # from now on looks are compared by torch's guard
by_python(lambda: layer(x.detach()))
with torch.no_grad():
    by_python(lambda: layer(x))
by_python(lambda: layer(torch.randn(1, 16, 2, requires_grad=True).mT))
weight = layer.around.q_proj.weight
held, weight.data = weight.data, weight.data.mT.contiguous().mT
by_python(lambda: layer(x))
weight.data = torch.cat((held.new_zeros(1), held.flatten()))[1:].view_as(held)  # where a bulk copy may not begin
by_python(lambda: layer(x))
weight.data = held
once(layer, x)
layer.around.q_proj.weight.requires_grad_(False)
by_python(lambda: layer(x))
layer.around.q_proj.weight.requires_grad_(True)
once(layer, x)
layer.implementation = "torch"
by_python(lambda: layer(x))
layer.implementation = None
seen(layer, x)
once(layer, x)
layer.eval()
by_python(lambda: layer(x))
layer.train()
once(layer, x)

# hooks, swapped modules, adapters
seen_by = []
handle = layer.around.o_proj.register_forward_hook(lambda *a: seen_by.append(1))
by_python(lambda: layer(x))
assert seen_by
handle.remove()
once(layer, x)
class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)
plain = layer.around.o_proj
layer.around.o_proj = Twice(plain.in_features, 16, bias=False)
for _ in range(4):
    by_python(lambda: layer(x))
layer.around.o_proj = nn.Linear(plain.in_features, 16, bias=False)
seen(layer, x)
once(layer, x)

# who watches operations gets to see them
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    by_python(lambda: layer(x))
assert counter.get_total_flops() > 0
kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(1) or x, lambda x: x):
    by_python(lambda: layer(x))
assert kept
other = {n: p.detach() * 2 for n, p in layer.named_parameters()}
a, b = torch.func.functional_call(layer, other, (x,))[0], layer(x)[0]
assert not torch.equal(a, b)

# copies have lines of their own
twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
by_python(lambda: twin(x))
gone = weakref.ref(twin)
seen(twin, x)
del twin
gc.collect()
assert gone() is None
"""
    )


def test_without_gradients_and_in_other_dtypes() -> None:
    interpret(
        PROGRAM
        + r"""
layer = make()
for mode in (torch.no_grad, torch.inference_mode):
    with mode():
        for _ in range(2):
            layer(tokens())
        followed.clear()
        x = tokens()
        same(leaves(layer(x)), leaves(python(layer, x)))
        assert len(followed) == 1
with torch.autocast("cpu", torch.bfloat16):
    for _ in range(2):
        x = tokens()
        made = layer(x)
        mine = gradients(layer, made, x)
    followed.clear()
    made = layer(x)
    assert made[0].dtype == torch.bfloat16 and len(followed) == 1
    same(leaves(made), leaves(python(layer, x)))
    mine = gradients(layer, made, x)
    same(mine, gradients(layer, python(layer, x), x))
same(gradients(layer, layer(x), x), gradients(layer, python(layer, x), x))
layer.bfloat16()
x = tokens(dtype=torch.bfloat16)
seen(layer, x)
once(layer, x)
"""
    )


def test_what_no_line_says_stays_with_python() -> None:
    interpret(
        PROGRAM
        + r"""
from unittest.mock import patch
real = sequence.base._run_alone

def refused(run, words):
    layer, x = make(), tokens()
    with patch.object(sequence.base, "_run_alone", run):
        for _ in range(3):
            made = layer(x)
            assert len(leaves(made)) > 3
            same(leaves(made), leaves(python(layer, x)))
            same(gradients(layer, made, x), gradients(layer, python(layer, x), x))
            with torch.no_grad():
                same(leaves(layer(x)), leaves(python(layer, x)))
    assert not followed
    lines = [l for l in _known[layer].lines.values()]
    assert lines and all(words in l.refused for l in lines), [l.refused for l in lines]

def run(layer, x, *facts):
    assert x.sum() != 0  # reads a value
    return real(layer, x, *facts)
refused(run, "depends on values")

ones = torch.ones(16)
refused(lambda layer, x, *facts: real(layer, x * ones, *facts), "from elsewhere")
def run(layer, x, *facts):
    layer.around.q_proj.weight.detach().mul_(1.0)
    return real(layer, x, *facts)
refused(run, "writes to")
"""
    )


FIXED = r"""
from unittest.mock import patch
real = sequence.base._run_alone

def held(layer):
    return [x for line in _known[layer].lines.values() for x in line._held if x.shape == (16,)]

def with_run(run, layer, x, seed=2):
    with patch.object(sequence.base, "_run_alone", run):
        for _ in range(2):
            gradients(layer, layer(x), x)
        torch.manual_seed(seed)
        return layer(x)
"""


def test_what_is_made_of_numbers_alone_is_made_once() -> None:
    interpret(
        PROGRAM
        + FIXED
        + r"""
table = lambda x: torch.arange(16, dtype=torch.float32, device=x.device).mul(0.3).cos()
def run(layer, x, *facts):
    y, state = real(layer, x * table(x), *facts)
    return y + torch.rand(16), state, table(x).view(4, 4)
layers, x = [make(), make()], tokens()
y, _, out = [with_run(run, layer, x) for layer in layers][0]
mine, theirs = held(layers[0]), held(layers[1])
almost = torch.arange(16, dtype=torch.float32).mul(0.3)  # of which the other table's cosine is
same(mine, [table(x), almost])
assert mine[0] is theirs[0]  # all layers share it
out.zero_()  # handed out: a call's own, and neither what is drawn nor what is written to is held
again, _, out = with_run(run, layers[0], x, seed=3)
assert not torch.equal(y, again) and torch.equal(out, table(x).view(4, 4))
same(held(layers[0]), [table(x), almost])
gone = weakref.ref(mine[0])
followed.clear()
del layers, mine, theirs, y, again, out, _
gc.collect()
assert gone() is None

def run(layer, x, *facts):
    room = torch.zeros(16) + torch.arange(16.0)
    room.add_(x.new_tensor(1.0).shape.numel())
    return real(layer, x * room, *facts)
layer = make()
for _ in range(3):
    y = with_run(run, layer, x)[0]
assert not any(torch.equal(x, torch.arange(16.0) + 1) for x in held(layer))
assert torch.equal(y, python(layer, x * (torch.arange(16.0) + 1))[0])
"""
    )


def test_what_a_graph_reads_stays() -> None:
    interpret(
        PROGRAM
        + FIXED
        + r"""
def run(layer, x, *facts):
    return real(layer, x * torch.arange(16.0).cos(), *facts)
x = tokens()
captures = patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
device = type("Device", (), {"type": "cuda"})
ones = torch.ones(16)
recorder = lines.Recorder([ones])
with recorder:
    ones * torch.arange(16.0).cos()
assert lines._fixed(recorder, (), torch.device("cpu"))
with captures:
    assert lines._fixed(recorder, (), device) == {}  # not there before the graph has run
def dropped(reads):
    layer = make()
    with_run(run, layer, x)
    followed.clear()
    (line,) = _known[layer].lines.values()
    line.device = torch.device("cuda", 0)
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: reads):
        with patch.object(torch.cuda, "current_device", lambda: 0):
            line._run(lambda tensors: None, [])
    return weakref.ref(held(layer)[0])
gone = dropped(False)
gc.collect()
assert gone() is None
stays = dropped(True)
gc.collect()
assert stays() is not None
"""
    )


def test_graphs_are_as_before() -> None:
    interpret(
        PROGRAM
        + r"""
layer = make()

# a forward without a backward leaves the look open
layer(tokens()), layer(tokens()), layer(tokens())
seen(layer, tokens())
x = tokens()
once(layer, x)

def raises(call, words):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

y = layer(x)[0]
first = torch.autograd.grad(y.sum(), x, retain_graph=True)
same(first, torch.autograd.grad(y.sum(), x))
raises(lambda: torch.autograd.grad(y.sum(), x), "a second time")

for run in (python, lambda layer, x: layer(x)):
    (dx,) = torch.autograd.grad(run(layer, x)[0].square().sum(), x, create_graph=True)
    raises(lambda: dx.sum().backward(), "once_differentiable")
    out = layer.around.o_proj.weight  # whose gradient is a product of torch's
    (dw,) = torch.autograd.grad(run(layer, x)[0].square().sum(), out, create_graph=True)
    followed.append(torch.autograd.grad(dw.sum(), [x, layer.around.q_proj.weight]))
for a, b in zip(*[f for f in followed if type(f) is tuple]):
    torch.testing.assert_close(a, b)

y = layer(x)[0]
with torch.no_grad():
    layer.around.q_proj.weight.mul_(1.0)
raises(lambda: y.sum().backward(), "inplace operation")

y = layer(x)[0]
y += 1  # a residual added in place
y.sum().backward()

# two calls in one graph, gradients that add up, hooks of parameters once a backward
calls = []
layer.around.q_proj.weight.register_hook(lambda g: calls.append(1))
layer.zero_grad()
(layer(x)[0].sum() + layer(2 * x)[0].sum()).backward()
mine = [p.grad for p in layer.parameters()]
layer.zero_grad()
(python(layer, x)[0].sum() + python(layer, 2 * x)[0].sum()).backward()
same(mine, [p.grad for p in layer.parameters()])
assert len(calls) == 2

# recomputed in the backward
again = make(checkpoint=True)
again.load_state_dict(layer.state_dict())
for _ in range(4):
    made = again(x)
    same(gradients(again, made, x), gradients(layer, python(layer, x), x))

# what is kept for the backward goes with it
y = layer(x)[0]
y.sum().backward()
raises(lambda: y.grad_fn.saved_tensors, "freed")
"""
    )
