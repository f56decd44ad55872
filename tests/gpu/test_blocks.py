"""The kernels of a block's two halves on a GPU against float64, every launch configuration; whole layers by them.

`python tests/gpu/test_blocks.py` prints every case's errors, `python tests/gpu/test_blocks.py time` milliseconds.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import sequence  # noqa: E402
from axes.kernels.blocks import enter as entering  # noqa: E402
from axes.kernels.blocks.enter import enter  # noqa: E402
from axes.kernels.blocks.leave import leave  # noqa: E402
from axes.kernels.blocks.plan import ACTIVATIONS, CHARTS, Numbers, Plan, Stream  # noqa: E402
from axes.sequence import fused  # noqa: E402
from tests import block_halves  # noqa: E402

BF, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FULL: 5e-6, HALF: 2e-3, BF: 1.2e-2}  # relative errors of a whole tensor
UNIT = ("unit", 1e-12)


def standard(heads: int, d_k: int, d_v: int, conv: int = 4, biased: bool = False) -> tuple[Stream, ...]:
    """q, k, v of the gated delta rule's block."""
    q = Stream(heads, d_k, conv, biased and conv > 0, "silu", "none", *UNIT, d_k**-0.5)
    return q, q._replace(scale=1.0), Stream(heads, d_v, conv, biased and conv > 0, "silu")


@dataclass(frozen=True)
class Case:
    """One call of `enter`. lengths: of packed sequences; length: tokens of a program, else as the sizes ask for."""

    streams: tuple[Stream, ...] = ()
    numbers: tuple[Numbers, ...] = ()
    T: int = 100
    B: int = 2
    lengths: tuple[int, ...] = ()
    started: bool = True
    dtype: torch.dtype = BF
    length: int | None = None

    def __str__(self) -> str:
        return " ".join(f"{n}={x}".replace("torch.", "") for n, x in vars(self).items())


RATES = (Numbers(3, "ssm", biased=True, step=True), Numbers(3, "sigmoid", 2.0))
CASES = [Case(standard(3, d, d), RATES, dtype=dtype) for d in (16, 32, 64, 96, 128, 256) for dtype in (BF, HALF, FULL)]
CASES += [Case(standard(16, 128, 128, w, biased), dtype=dtype) for w in (0, 1, 2, 3, 4) for biased in (False, True)
          for dtype in (BF, FULL)]  # fmt: skip
CASES += [Case(standard(h, 64, 128), RATES, T=t) for h in (1, 2, 3, 5) for t in (1, 2, 3, 5, 63, 64, 65, 129, 1000)]
CASES += [Case(standard(2, 128, 64), RATES, length=n, T=300, dtype=FULL) for n in (16, 32, 64, 128)]
CASES += [Case(standard(2, 64, 64, biased=True), RATES, lengths=lengths, started=s, dtype=dtype, length=n)
          for lengths in ((0, 1, 130, 0, 2, 64), (3,), (0, 0, 500)) for s in (True, False) for dtype in (BF, FULL)
          for n in (None, 16)]  # fmt: skip
CASES += [
    Case((Stream(2, 64, 3, True, a), Stream(2, 20, 0, False, "none", a, "rms", 1e-5)), dtype=FULL) for a in ACTIVATIONS
]
CASES += [
    Case(numbers=(Numbers(300, c, 0.3, True), Numbers(7, c)), dtype=dtype) for c in CHARTS[:4] for dtype in (BF, FULL)
]
TURNED = tuple(s._replace(turn=10000.0) for s in standard(3, 128, 64)[:2])
CASES += [Case(TURNED, T=t, lengths=lengths, dtype=dtype, length=n) for dtype in (BF, FULL) for n in (None, 16)
          for t, lengths in ((1000, ()), (0, (0, 1, 130, 700)))]  # fmt: skip
CASES += [Case((Stream(4, d, scale=0.5, turn=100.0), Stream(4, d, turn=100.0)), T=70) for d in (16, 96, 128, 256)]
CASES += [Case(standard(16, 128, 128), (Numbers(16, "ssm", biased=True), Numbers(16, "sigmoid")), T=4096, B=4)]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    found = []
    for x, w in zip(got, want, strict=True):
        assert x.shape == w.shape
        found.append(((x - w).norm() / w.norm().clamp(min=1e-3 * max(w.numel(), 1) ** 0.5)).item())
    return found


def both(case: Case) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    """Outputs and gradients by the kernel and in float64."""
    torch.manual_seed(0)
    b, t = (1, sum(case.lengths)) if case.lengths else (case.B, case.T)
    units = len(case.lengths) or b
    cu = torch.tensor((0, *case.lengths)).cumsum(0).int().cuda() if case.lengths else None
    used = sum(s.heads * s.width for s in case.streams) + sum(n.columns for n in case.numbers)
    plan = Plan(case.streams, case.numbers, -(-used // 8) * 8)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(case.dtype)

    parameters = [random(n) for n in plan.parameters()]
    tails = [random(*shape) for shape in plan.tails(units)] if case.started else []
    n, given = len(parameters), [random(b, t, plan.width), *parameters, *tails]
    shapes = [shape for shape, _ in plan.shapes(b, t)] + list(plan.tails(units))
    directions = [random(*shape) for shape in shapes]

    def kernel(p, *rest):
        outs, ends = enter(p, plan, rest[:n], rest[n:], cu)
        return [*outs, *ends]

    def wanted(p, *rest):
        outs, ends = block_halves.enter(p, case.streams, case.numbers, rest[:n], rest[n:], cu)
        return [*outs, *ends]

    def run() -> list[Tensor]:
        asked = entering._length if case.length is None else lambda *_: case.length
        with patch.object(entering, "_length", asked):
            return block_halves.gradients(kernel, given, directions)

    wide = [x.double() for x in given]
    return run, lambda: block_halves.gradients(wanted, wide, [d.double() for d in directions])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_enter_in_float64(case: Case) -> None:
    run, want = both(case)
    got = run()
    assert max(errors(got, want())) < BOUNDS[case.dtype]
    for x, y in zip(got, run(), strict=True):
        assert torch.equal(x, y), "the same inputs give the same bits"


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("gated,normed", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("heads,d", [(1, 16), (3, 20), (2, 64), (16, 128), (2, 256)])
def test_leave_in_float64(dtype: torch.dtype, gated: bool, normed: bool, heads: int, d: int) -> None:
    for activation, t in (("silu", 1), ("gelu", 1000), ("sigmoid", 37)):
        y = torch.randn(2, t, heads, d, device="cuda").to(dtype)
        gate, direction = (torch.randn(2, t, heads * d, device="cuda").to(dtype) for _ in range(2))
        more = [gate] * gated + [torch.rand(d, device="cuda").to(dtype)] * normed

        def spread(function, gated=gated, normed=normed):
            def run(reads, *rest):
                left = list(rest)
                return [function(reads, left.pop(0) if gated else None, left.pop(0) if normed else None)]

            return run

        kernel = spread(lambda y, g, w, a=activation: leave(y, g, w, activation=a, eps=1e-5))
        wanted = spread(lambda y, g, w, a=activation: block_halves.leave(y, g, w, activation=a, eps=1e-5))
        got = block_halves.gradients(kernel, [y, *more], [direction])
        want = block_halves.gradients(wanted, [x.double() for x in (y, *more)], [direction.double()])
        assert max(errors(got, want)) < BOUNDS[dtype]
        for a, b in zip(got, block_halves.gradients(kernel, [y, *more], [direction]), strict=True):
            assert torch.equal(a, b)


# ---- whole layers ----------------------------------------------------------------------------------------------------

LAYERS = (
    "GatedDeltaNet", "DeltaNet", "LinearAttention", "RetNet", "GLA", "Mamba2", "TitansMatrix", "YaadMatrix",
    "LatticeDec", "FoX", "RWKV7",
)  # fmt: skip


def layer_outputs(layer: torch.nn.Module, x: Tensor, cu: Tensor | None, fused_: bool) -> list[Tensor]:
    """Output, new tails, gradients of the input and every parameter; by the block's kernels or not at all."""
    entered = []
    kernels = fused.Fused if layer.around.fused is None else type(layer.around.fused)
    plain = kernels.enter
    with patch.object(kernels, "enter", lambda *a: entered.append(1) or plain(*a)):
        x = x.detach().clone().requires_grad_()
        y, after = layer(x, cu_seqlens=cu)
    assert bool(entered) == fused_
    direction = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    leaves = [x, *layer.parameters()]
    grads = torch.autograd.grad((y * direction.to(y.dtype)).sum(), leaves, allow_unused=True)
    tails = [] if after is None else [t.detach() for t in after.tails]
    return [y.detach(), *tails, *[torch.zeros_like(p) if g is None else g for g, p in zip(grads, leaves, strict=True)]]


@pytest.mark.parametrize("lengths", [(), (100, 0, 1, 299)], ids=["dense", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_float64(name: str, lengths: tuple[int, ...]) -> None:
    """float32 layers closely; bfloat16 ones as well as their torch form: twice its error and what rounding leaves."""
    torch.manual_seed(0)
    cu = torch.tensor((0, *lengths)).cumsum(0).int().cuda() if lengths else None
    x = torch.randn(1 if lengths else 2, sum(lengths) or 200, 128, device="cuda")
    layer = getattr(sequence, name)(128, heads=2, device="cuda")
    with torch.no_grad():  # what begins at zero says nothing of what multiplies it
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p)) if not p.any() else None
    wide = copy.deepcopy(layer).double()
    want = layer_outputs(wide, x.double(), cu, False)
    assert max(errors(layer_outputs(layer, x, cu, True), want)) < 2e-3  # products of a recurrence may be tf32
    half, torch_form = (copy.deepcopy(layer).to(BF) for _ in range(2))
    around = torch_form.around
    around.fused = None
    want = layer_outputs(copy.deepcopy(half).double(), x.to(BF).double(), cu, False)
    got, plain = (errors(layer_outputs(m, x.to(BF), cu, m is half), want) for m in (half, torch_form))
    for n, (a, b) in enumerate(zip(got, plain, strict=True)):
        few = 2 if want[n].numel() <= 2 else 1  # two sums that cancel: one draw of rounding
        assert a < 2 * few * b + 1e-2, (name, n, a, b)


@pytest.mark.filterwarnings("ignore::UserWarning")  # compilers advise TF32 and the like
@pytest.mark.parametrize("name", ("GatedDeltaNet", "GLA"))
def test_autocast_one_token_and_compile(name: str) -> None:
    torch.manual_seed(0)
    layer = getattr(sequence, name)(256, heads=2, device="cuda")
    x = torch.randn(2, 130, 256, device="cuda")
    with torch.no_grad():
        whole, end = layer(x)
        state = None
        for t in range(20):
            y, state = layer.step(x[:, t], state)
            assert errors([y], [whole[:, t]])[0] < 2e-3
    with torch.autocast("cuda", BF):
        y, _ = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == BF and errors([y], [whole])[0] < 3e-2
    assert all(p.grad is not None and p.grad.dtype == FULL for p in layer.parameters())
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for t in (130, 70):
        leaf = x[:, :t].clone().requires_grad_()
        got, want = compiled(leaf)[0], layer(leaf)[0]
        grads = [torch.autograd.grad(z.square().sum(), [leaf, *layer.parameters()]) for z in (got, want)]
        assert errors([got], [want])[0] < 1e-3 and max(errors(*map(list, grads))) < 5e-3


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[10]


def time() -> None:
    """At B=8 T=4096 H=16 D=128 in bfloat16, beside what the bytes take at 4.27 TB/s."""
    b, t, h, d = 8, 4096, 16, 128
    streams = standard(h, d, d)
    plan = Plan(streams, (Numbers(h, "ssm", biased=True), Numbers(h, "sigmoid")), 3 * h * d + 2 * h)
    p = torch.randn(b, t, plan.width, device="cuda", dtype=BF)
    parameters = [torch.randn(n, device="cuda", dtype=BF) for n in plan.parameters()]
    unit = 2 * b * t * h * d / 4.27e9  # ms to read or write one tensor
    for length in (16, 32, 64, 128, 256, 512):
        with patch.object(entering, "_length", lambda *_, length=length: length):
            results = entering._forward(p, parameters, [], None, plan.text)
            grads = [torch.randn_like(x) for x in results[: plan.results()]]
            forward = milliseconds(lambda: entering._forward(p, parameters, [], None, plan.text))
            backward = milliseconds(lambda g=grads: entering._backward(p, parameters, [], None, g, [], plan.text))
        print(f"enter, {length} tokens a program: {forward:.3f} of {6 * unit:.3f}", end=", ")
        print(f"back {backward:.3f} of {9 * unit:.3f}")
    from axes.kernels.blocks import leave as leaving

    y, gate, du = (torch.randn(b, t, h, d, device="cuda", dtype=BF) for _ in range(3))
    gate, du, w = gate.flatten(-2), du.flatten(-2), torch.rand(d, device="cuda", dtype=BF)
    forward = milliseconds(lambda: leaving._forward(y, gate, w, None, None, "silu", 1e-5, False))
    backward = milliseconds(lambda: leaving._backward(y, gate, w, None, None, du, "silu", 1e-5, False))
    print(f"leave: {forward:.3f} of {3 * unit:.3f}, back {backward:.3f} of {5 * unit:.3f}")
    layer = sequence.GatedDeltaNet(h * d, heads=h, device="cuda", dtype=BF)
    x = torch.randn(b, t, h * d, device="cuda", dtype=BF, requires_grad=True)
    direction = torch.randn_like(x)
    for name, form in (("by kernels", layer.around.fused), ("torch form", None)):
        layer.around.fused = form
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            forward = milliseconds(lambda: layer(x)[0])
        whole = milliseconds(lambda: torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], direction))
        peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        print(f"GatedDeltaNet {name}: {forward:.2f} / {whole:.2f} ms, peak {peak:.0f} MB beyond inputs and parameters")


if __name__ == "__main__":
    if sys.argv[1:] == ["time"]:
        time()
    else:
        for case in CASES:
            run, want = both(case)
            print(f"{max(errors(run(), want())):.1e}  {case}")
