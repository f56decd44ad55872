"""Layers whose calls follow a line, on a GPU: the bits of the calls by Python, whatever the tensors hold."""

from __future__ import annotations

import copy

import pytest
import torch

pytestmark = [  # torch says of its own products that they are the first thing that a thread of autograd runs
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch import Tensor, nn  # noqa: E402

import axes.sequence as sequence  # noqa: E402
from axes import catalogue  # noqa: E402
from axes.depth import through  # noqa: E402
from axes.kernels.common import line  # noqa: E402
from axes.models.language_model import SwiGLU  # noqa: E402

NAMES = (
    "GatedDeltaNet", "KDA", "DeltaNet", "LinearAttention", "RetNet", "GLA", "Mamba2", "RWKV7", "TitansMatrix",
    "SoftmaxAttention", "RoPE", "ALiBi", "FoX", "PaTH",
)  # fmt: skip


def results(module: nn.Module, x: Tensor, direction: Tensor) -> list[Tensor | None]:
    x = x.detach().requires_grad_()
    made = module(x)
    y = made[0] if isinstance(made, tuple) else made
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], direction, allow_unused=True)]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("name", (*NAMES, "SwiGLU"))
def test_the_bits_of_python(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    followed: list[line.Line] = []
    follow = line.Line.follow
    monkeypatch.setattr(line.Line, "follow", lambda self, *given: followed.append(self) or follow(self, *given))
    made = (
        SwiGLU(256, "cuda", dtype)
        if name == "SwiGLU"
        else getattr(sequence, name)(256, heads=2, device="cuda", dtype=dtype)
    )
    twin = copy.deepcopy(made)
    data = [torch.randn(2, 300, 256, device="cuda", dtype=dtype) for _ in range(5)]
    direction = torch.randn(2, 300, 256, device="cuda", dtype=dtype)

    def calls(module: nn.Module) -> list[list[Tensor | None]]:
        """Of all data, then of the first again with other weights."""
        found = [results(module, x, direction) for x in data]
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.01)
        return [*found, results(module, data[0], direction)]

    mine = calls(made)
    assert len(followed) >= 4, "no line was followed"
    monkeypatch.setattr("axes.kernels.common.repeated._watched", lambda: True)
    theirs = calls(twin)
    repeats = dtype != torch.float32 or name not in ("SoftmaxAttention", "RoPE")  # torch's own attention does not there
    for call, (found, meant) in enumerate(zip(mine, theirs, strict=True)):
        for i, (a, b) in enumerate(zip(found, meant, strict=True)):
            assert (a is None) == (b is None), (call, i)
            close = a is None or torch.equal(a, b) or not repeats and torch.allclose(a, b, rtol=1e-3, atol=1e-5)
            assert close, (call, i)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("name", ("hyper-connections", "dynamic-hyper-connections", "mhc", "jpmhc", "mhc-lite", "ihc"))
def test_the_bits_of_python_of_streams(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sublayers in their mixers, and the same with streams that are made again."""
    torch.manual_seed(0)
    followed: list[line.Line] = []
    follow = line.Line.follow
    monkeypatch.setattr(line.Line, "follow", lambda self, *given: followed.append(self) or follow(self, *given))
    mixers = [catalogue.get(name, "depth").cls(256, i, streams=4, device="cuda") for i in range(4)]
    for p in (p for mixer in mixers for p in mixer.parameters()):
        p.data.add_(0.1 * torch.randn_like(p))
    sublayers = [nn.Linear(256, 256, device="cuda", dtype=dtype) for _ in mixers]
    h, direction = torch.randn(2, 2, 300, 256, device="cuda", dtype=dtype).unbind()

    def run(recompute: int = 0) -> list[Tensor | None]:
        x = h.detach().requires_grad_()
        out = mixers[-1].reduce(through(sublayers, mixers, mixers[0].expand(x), recompute))
        wanted = [x, *[p for m in (*mixers, *sublayers) for p in m.parameters()]]
        return [out.detach(), *torch.autograd.grad(out, wanted, direction, allow_unused=True)]

    for _ in range(3):
        followed.clear()
        found = run()
    assert len(followed) == 5, "a read, three writes with the next read and a write follow lines"
    monkeypatch.setattr("axes.kernels.common.repeated._watched", lambda: True)
    joined = [run()] if name == "hyper-connections" else [run(), run(2)]  # whose write and read are one pass inside
    for meant in joined:
        for i, (a, b) in enumerate(zip(found, meant, strict=True)):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), i


@pytest.mark.parametrize("name", ("GatedDeltaNet", "SoftmaxAttention"))
def test_memory_and_streams(name: str) -> None:
    """A call on another stream, and no more memory than Python takes."""
    layer = getattr(sequence, name)(256, heads=2, device="cuda", dtype=torch.bfloat16)
    x, direction = torch.randn(2, 2, 2048, 256, device="cuda", dtype=torch.bfloat16).unbind()
    peaks = []
    for _ in range(6):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found = results(layer, x, direction)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[-1] <= 1.05 * peaks[0], peaks
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        again = results(layer, x, direction)
    torch.cuda.current_stream().wait_stream(other)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True) if a is not None)


def test_a_captured_step() -> None:
    layer = sequence.GatedDeltaNet(256, heads=2, device="cuda", dtype=torch.bfloat16)
    x, direction = torch.randn(2, 2, 256, 256, device="cuda", dtype=torch.bfloat16).unbind()
    for _ in range(4):
        want = results(layer, x, direction)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(layer, x, direction)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True) if a is not None)
