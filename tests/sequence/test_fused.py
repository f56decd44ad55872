"""Blocks by their kernels in whole layers, under Triton's interpreter, against the same layers' torch form in float64;
what is declared and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.routes.dispatch import NoImplementation
from axes.sequence import ALL, GatedDeltaNet, Mamba2, PaTH
from axes.sequence.blocks import BlockModule
from axes.sequence.fused import Fused, no_block_kernel
from tests.interpreter import interpret

PROGRAM = r"""
import copy
import torch
from unittest.mock import patch
import axes.sequence as sequence
from axes.sequence import fused

torch.manual_seed(0)
torch.set_num_threads(1)

def outputs(layer, x, state, cu, by_kernels):
    entered = []
    kernels = type(layer.around.fused)
    plain = kernels.enter
    with patch.object(kernels, "enter", lambda *a: entered.append(1) or plain(*a)):
        y, after = layer(x, state, cu_seqlens=cu)
    assert bool(entered) == by_kernels
    memory = () if after is None else after.memory.theta
    return [y, *([] if after is None else after.tails), *[x for x in memory if x.isfinite().all()]]  # masses of a list

def everything(layer, x, tails, cu, by_kernels):
    x = x.detach().clone().requires_grad_()
    state = None
    if tails is not None:
        state = layer.init_state(len(tails[0]) if tails else x.shape[0], dtype=x.dtype)
        tails = [t.to(x.dtype).requires_grad_() for t in tails]
        state = state._replace(tails=tuple(tails))
    outs = outputs(layer, x, state, cu, by_kernels)
    torch.manual_seed(1)
    loss = sum((o * torch.randn(o.shape).to(o.dtype)).sum() for o in outs)
    leaves = [x, *(tails or ()), *layer.parameters()]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return outs, [torch.zeros_like(p) if g is None else g for g, p in zip(grads, leaves)]

def check(name, width=32, heads=2, lengths=(), started=False, T=11, B=2, bound=2e-5, **options):
    layer = getattr(sequence, name)(width, heads=heads, **options)
    with torch.no_grad():  # what begins at zero says nothing of what multiplies it
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape)) if not p.any() else None
    wide = copy.deepcopy(layer).double()
    units = len(lengths) or B
    x = torch.randn(1 if lengths else B, sum(lengths) or T, width)
    cu = torch.tensor((0, *lengths)).cumsum(0).int() if lengths else None
    tails = [torch.randn(t.shape) for t in layer.around.tails(units, x)] if started else None
    got, want = everything(layer, x, tails, cu, True), everything(wide, x.double(), tails, cu, False)
    for kind, a, b in zip(("output", "gradient"), got, want):
        for n, (y, w) in enumerate(zip(a, b, strict=True)):
            error = ((y - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
            assert error < bound, (name, kind, n, error)

def check_compiled(name):
    counts = torch._dynamo.utils.counters
    around = getattr(sequence, name)(32, heads=2).around
    def halves(x, start, packing=None):
        signal, tails, kept = fused.enter(around, x, start, packing, "triton")
        rates = sum(r.sum() for n, r in signal.items() if n not in "qk v")
        return fused.leave(around, signal["v"], kept), (signal["q"] * signal["k"]).sum(-1), rates
    compiled = torch.compile(halves, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.reset()
    counts.clear()
    for T in (9, 12, 23):
        x = torch.randn(2, T, 32, requires_grad=True)
        start = tuple(torch.randn(t.shape) for t in around.tails(2, x))
        leaves = [x, *(p for p in around.parameters() if p is not around.o_proj.weight)]
        got, want = compiled(x, start), halves(x, start)
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()
        grads = [torch.autograd.grad(sum(y.sum() for y in ys), leaves) for ys in (got, want)]
        for a, b in zip(*grads, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6
    assert counts["stats"]["unique_graphs"] == 1, counts["stats"]
"""

CASES = {
    "several writes": """
check("DeltaProduct", started=True)
check("GatedDeltaProduct", heads=3, d_k=20, d_v=12, lengths=(2, 6), started=True)
""",
    "gated delta": """
check("GatedDeltaNet", started=True)
check("KDA", lengths=(3, 6))
check("GatedDeltaNet", lengths=(4, 0, 1, 7))
check("GatedDeltaNet", heads=3, d_k=20, d_v=12, lengths=(2, 6), started=True)
""",
    "shared keys": """
check("GatedDeltaNet", heads=2, num_v_heads=4, d_k=8, d_v=12, started=True)
check("GatedDeltaNet", heads=1, num_v_heads=3, d_k=8, d_v=8, lengths=(4, 0, 1, 7))
check("KDA", heads=2, num_v_heads=4, d_k=8, d_v=8, lengths=(3, 6))
check("RetNet", heads=2, num_v_heads=6, d_k=8, d_v=8, started=True)
""",
    "relatives": """
for name in ("DeltaNet", "LinearAttention", "RetNet", "GLA", "UnnormalisedLinearAttention", "TitansMatrix"):
    check(name, started=True)
""",
    "turning": """
check("RetNet", started=True, T=21)
check("RetNet", lengths=(4, 0, 1, 7), d_k=12, d_v=20)
check("RetNet", update=sequence.linear.StateUpdate(sequence.linear.Alignment(), sequence.linear.Euclidean(),
      sequence.linear.Product((sequence.linear.Rotation(0.3, uniform=True), sequence.linear.Scalar("decay"))),
      sequence.linear.Step()), T=9)
""",
    "mamba": """
check("Mamba2", started=True)
check("Mamba2", lengths=(4, 0, 1, 7), d_k=8, d_v=20, started=True)
""",
    "time mixing": """
check("RWKV7", started=True)
check("RWKV7", lengths=(4, 0, 1, 7), started=True)
check("RWKV7", lengths=(4, 0, 1, 7), width=24, heads=2)
check("RWKV7", d_k=8, d_v=20, T=40)
""",
    "transported": """
check("PaTH", started=True)
check("PaTH", lengths=(4, 0, 1, 7))
""",
    "charts": """
for name in ("YaadMatrix", "MonetaMatrix", "LatticeDec", "FoX", "SoftmaxAttention"):
    check(name, T=5, B=1)
""",
    "a chart of one's own": """
from torch import nn
from dataclasses import dataclass, replace
from axes.sequence.charts import Chart, Sigmoid

@dataclass(frozen=True)
class Squared(Chart):
    def build(self, per, sizes, factory):
        return Module(Sigmoid().build(per, sizes, factory))

class Module(nn.Module):
    def __init__(self, chart):
        super().__init__()
        self.chart = chart
    def forward(self, x):
        return {n: r * r for n, r in self.chart(x).items()}

check("DeltaNet", block=replace(sequence.DeltaNet.block, charts=(("beta", Squared()),)))
""",
    "one token and autocast": """
layer = sequence.GatedDeltaNet(32, heads=2)
x = torch.randn(2, 5, 32)
with torch.no_grad():
    whole, end = layer(x)
    state = None
    for t in range(5):
        y, state = layer.step(x[:, t], state)
        assert (y - whole[:, t]).norm() < 1e-5 * whole[:, t].norm()
    assert all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(state.tails, end.tails))
with torch.autocast("cpu", torch.bfloat16):
    y, _ = layer(x)
    assert y.dtype == torch.bfloat16 and layer.around.q_proj.weight.dtype == torch.float32
    y.float().square().sum().backward()
assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
assert (y - whole).norm() < 3e-2 * whole.norm()
""",
    "compiled": """
check_compiled("GatedDeltaNet")
""",
    "time mixing compiled": """
check_compiled("RWKV7")
""",
    "saved": """
# bytes a token of what the two halves keep, beside what is predicted
for name in ("GatedDeltaNet", "DeltaNet", "GLA", "RetNet", "Mamba2", "PaTH", "SoftmaxAttention", "RWKV7"):
    around = getattr(sequence, name)(32, heads=2).around
    x, kept = torch.randn(1, 53, 32, requires_grad=True), {}
    def keep(y):
        if y.numel() % 53 == 0:
            kept[y.untyped_storage().data_ptr()] = y.numel() * y.element_size() // 53
        return y
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        signal, _, gate = fused.enter(around, x, None, None, "triton")
        y = torch.randn(signal["v"].shape, requires_grad=True)  # what a recurrence reads
        fused.leave(around, y, gate)
    predicted = fused.saved(around, torch.float32)
    extra = {"Mamba2": 1, "RWKV7": 3}.get(name, 0) * signal["v"].numel() * 4 // 53  # which the recurrence keeps too
    assert sum(kept.values()) == sum(predicted.values()) + extra, (name, sorted(kept.values()), predicted)
""",
    "operators": """
from axes.kernels.blocks import enter as entering, leave as leaving
from axes.kernels.blocks.plan import Numbers, Plan, Stream
declared = Plan((Stream(2, 8, 3, True, "silu"),), (Numbers(2, "ssm", step=True),), 24)
p, w, b, r = torch.randn(2, 5, 24), torch.randn(16, 1, 3), torch.randn(16), torch.randn(2)
given = [x.requires_grad_() for x in (p, w, b, r)]
tail = torch.randn(2, 2, 16, requires_grad=True)
torch.library.opcheck(entering._operator, (p, given[1:], [tail], None, declared.text))
torch.library.opcheck(entering._operator, (p[:1], given[1:], [], torch.tensor([0, 2, 2, 5]).int(), declared.text))
y, g, n = (torch.randn(s, requires_grad=True) for s in ((2, 5, 3, 8), (2, 5, 24), (8,)))
c, v, whole = (torch.randn(s, requires_grad=True) for s in ((24,), (2, 5, 3, 8), (24,)))
torch.library.opcheck(leaving._leaving.operator, (y, g, whole, c, v, "silu", 1e-5, True, True))
for gate, weight in ((g, n), (g, None), (None, n)):
    torch.library.opcheck(leaving._leaving.operator, (y, gate, weight, None, None, "silu", 1e-5, False, True))
from axes.kernels.blocks import bonus, removal, shift
k, z, *rest = (torch.randn(s, requires_grad=True) for s in ((2, 5, 3, 8), (2, 5, 24), (24,), (24,), (24,)))
torch.library.opcheck(removal._removed.operator, (k, z, *rest, 1e-6, True))
q, k, rho = (torch.randn(s, requires_grad=True) for s in ((2, 5, 3, 4), (2, 5, 3, 4), (3, 4)))
torch.library.opcheck(bonus._leaving.operator, (y, q, k, v, g, rho, c, whole, 1e-5, True))
x, mix, tail = torch.randn(2, 5, 6), torch.randn(3, 6), torch.randn(2, 1, 6)
torch.library.opcheck(shift._shifted, (x, mix, tail, None))
torch.library.opcheck(shift._shifted_backward, (x, mix, tail, None, torch.randn(3, 2, 5, 6)))
""",
    "half": """
for dtype in (torch.bfloat16, torch.float16):
    layer = sequence.GatedDeltaNet(64, heads=2, dtype=dtype)
    x = torch.randn(2, 17, 64).to(dtype)
    y, _ = layer(x)
    want, _ = copy.deepcopy(layer).double()(x.double())
    assert (y - want).norm() < 2e-2 * want.norm(), (y - want).norm() / want.norm()
""",
}


# Following what fused blocks do takes longer than any kernel of theirs; a block's own parts run above, eagerly.
SLOW = ("time mixing compiled",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_whole_layers_in_the_interpreter(name: str) -> None:
    interpret(PROGRAM + CASES[name])


def test_why_no_kernel_runs() -> None:
    around, cuda = GatedDeltaNet(32, heads=2).around, torch.device("cuda")
    assert no_block_kernel(around, cuda, torch.bfloat16) is None
    assert "device cpu is not a GPU" in (no_block_kernel(around, torch.device("cpu"), torch.float32) or "")
    assert "float64" in (no_block_kernel(around, cuda, torch.float64) or "")
    assert "declares nothing" in (no_block_kernel(BlockModule(), cuda, torch.float32) or "")
    wide = GatedDeltaNet(32, heads=1, d_k=16, d_v=300).around
    assert no_block_kernel(wide, cuda, torch.float32) == "v: heads are from 1 to 256 wide, not 300"
    groups = Mamba2(32, heads=4, block=replace(Mamba2.block, groups=2)).around
    assert "the norm is over groups of heads" in (no_block_kernel(groups, cuda, torch.float32) or "")
    around.k_proj = nn.Sequential(around.k_proj)
    assert "k_proj is not a plain nn.Linear" in (no_block_kernel(around, cuda, torch.float32) or "")
    with pytest.raises(NoImplementation, match="no Triton kernel for this block: device cpu is not a GPU"):
        GatedDeltaNet(32, heads=2, implementation="triton")(torch.randn(1, 3, 32))


def test_declarations_name_what_there_is() -> None:
    """Every parameter of a block that declares something is of a module that is named."""
    for kind in ALL:
        layer = kind(32, heads=2)
        declared = layer.around.declaration()
        if declared is None:
            continue
        end, parts = declared.exit, (*declared.vectors, *declared.rates)
        named = {m.name for x in parts for m in (x.projection, x.down) if m} | {v.conv for v in declared.vectors}
        named |= {name for r in declared.rates for name in (r.bias, r.log_rate)} | {end.out, *declared.others}
        named |= {end.gate and end.gate.name, end.norm, end.skip}
        for name, _ in layer.around.named_parameters():
            assert any(name == n or name.startswith(f"{n}.") for n in named), (kind, name)


def test_pieces_of_matrices_that_are_named_are_all_of_their_rows() -> None:
    for kind in ALL:
        around = kind(64, heads=2).around  # wider than any rank
        declared = around.declaration()
        if declared is None:
            continue
        ends: dict[str, int] = {}
        gate = [declared.exit.gate] if declared.exit.gate is not None else []
        for m in (*(m for x in (*declared.vectors, *declared.rates) for m in (x.projection, x.down) if m), *gate):
            ends[m.name] = max(ends.get(m.name, 0), m.first + m.rows)
        assert ends == {name: around.get_submodule(name).weight.shape[0] for name in ends}, kind


def test_a_stream_that_is_convolved_between_two_maps_is_not_asked_for_its_tail() -> None:
    for kind, asks in ((GatedDeltaNet, True), (PaTH, False)):
        declared = kind(32, heads=2).around.declaration()
        assert declared is not None and Fused(declared).asks is asks
