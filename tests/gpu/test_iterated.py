"""Newton-Schulz iterations of small matrices on a GPU, one launch each way, against float64; and who takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core.geometry import Spectral  # noqa: E402
from axes.kernels.products import iterated  # noqa: E402
from axes.linalg import newton_schulz  # noqa: E402
from axes.linalg.newton_schulz import Start, no_kernel  # noqa: E402

METHODS = ("newton-schulz", "polar-express")


def both(h: Spectral, theta: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    theta = theta.detach().requires_grad_()
    made = h.primal(theta)
    return made.detach(), torch.autograd.grad(made, theta, direction.to(made.dtype))[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 5), (16, 16), (17, 9), (32, 20), (32, 32)])
@pytest.mark.parametrize("count", [1, 77, 5000])
def test_against_float64(method: Any, shape: tuple[int, int], count: int, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    h = Spectral(method, scale="match_rms_adamw")
    theta = torch.randn(count, *shape, device="cuda")
    if count > 1:
        theta[1] = 0.0
    direction = torch.randn_like(theta)
    assert no_kernel(theta, Start(1.0, 0.0, 1e-7), ((3.4445, -4.7750, 2.0315),) * 5) is None
    got, again = both(h, theta, direction), both(h, theta, direction)
    want = both(h, theta.double(), direction)
    monkeypatch.setattr(newton_schulz, "no_kernel", lambda *_: "torch's products")
    plain = both(h, theta, direction)
    least = [want[0].norm(), torch.maximum(want[1].norm(), (direction.norm() / theta.norm()).double())]
    for x, y, w, p, size in zip(got, again, want, plain, least, strict=True):
        assert torch.isfinite(x).all() and torch.equal(x, y)
        assert (x - w).norm() <= 2e-6 * size + 4 * (p - w).norm()


def test_stacks_that_are_stored_otherwise() -> None:
    torch.manual_seed(0)
    whole = torch.randn(6, 24, 2, 17, device="cuda")
    direction = torch.randn(6, 2, 24, 17, device="cuda")
    for theta, along in (
        (whole.transpose(1, 2), direction),
        (whole[::2, :, 0], direction[::2, 0]),
        (whole[:, :, 0].mT, direction[:, 0].mT),
    ):
        for x, w in zip(both(Spectral(), theta, along), both(Spectral(), theta.double(), along), strict=True):
            assert (x - w).norm() <= 1e-5 * w.norm()


@pytest.mark.parametrize("method", METHODS)
def test_one_launch_each_way(method: Any) -> None:
    theta = torch.randn(256, 16, 16, device="cuda", requires_grad=True)
    h = Spectral(method)
    h.primal(theta).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        made = h.primal(theta)
        torch.autograd.grad(made, theta, torch.ones(256, 16, 16, device="cuda"))
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "_iterate" in event.name]
    assert names == ["_iterate", "_iterate_backward"]


def test_a_graph_replays_both_ways() -> None:
    theta = torch.randn(64, 16, 16, device="cuda", requires_grad=True)
    h = Spectral("polar-express", steps=8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(h.primal(theta).square().sum(), theta)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (grad,) = torch.autograd.grad(h.primal(theta).square().sum(), theta)
    with torch.no_grad():
        theta.copy_(torch.randn_like(theta))
    graph.replay()
    assert torch.equal(grad, torch.autograd.grad(h.primal(theta).square().sum(), theta)[0])


def test_second_derivatives_are_torchs() -> None:
    torch.manual_seed(0)
    found = []
    for kind in (torch.float32, torch.float64):
        theta = torch.linspace(-1.0, 2.0, 3 * 6 * 4, device="cuda", dtype=kind).sin().view(3, 6, 4).requires_grad_()
        (first,) = torch.autograd.grad(Spectral(steps=3).primal(theta).pow(3).sum(), theta, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), theta)[0])
    assert (found[0] - found[1]).norm() <= 1e-4 * found[1].norm()


def test_a_compiler_sees_an_operator() -> None:
    theta = torch.randn(8, 12, 20, device="cuda", requires_grad=True)
    whole = torch.compile(Spectral().primal, fullgraph=True)
    want = torch.autograd.grad(Spectral().primal(theta).square().sum(), theta)[0]
    assert torch.equal(torch.autograd.grad(whole(theta).square().sum(), theta)[0], want)


def test_wider_matrices_are_torchs() -> None:
    assert iterated.LARGEST_SIDE == 32
    theta = torch.randn(4, 33, 12, device="cuda")
    assert (Spectral().primal(theta) - Spectral().primal(theta.double())).norm() <= 1e-4
