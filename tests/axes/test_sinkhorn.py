"""Sinkhorn by sums of entries and by logs of sums: the same map, and the same derivatives."""

import pytest
import torch
from torch import Tensor

from axes.linalg import sinkhorn as module
from axes.linalg.sinkhorn import by_logs, sinkhorn


def by_hand(z: Tensor) -> bool:
    return type(sinkhorn(z.requires_grad_(), 2).grad_fn).__name__ != "ExpBackward0"


@pytest.mark.parametrize("shape", [(4, 4), (3, 2, 1, 1), (2, 5, 5), (5, 2, 2)], ids=str)
@pytest.mark.parametrize("pairs", [1, 2, 20])
def test_sums_and_logs_agree(shape: tuple[int, ...], pairs: int) -> None:
    for size in (0.1, 8.0):
        z = (size * torch.randn(shape, dtype=torch.float64)).requires_grad_()
        upstream = torch.randn(shape, dtype=torch.float64)
        got, want = sinkhorn(z, pairs), by_logs(z, pairs)
        assert by_hand(z) and got.shape == z.shape
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
        (mine,), (theirs,) = (torch.autograd.grad(w, z, upstream) for w in (got, want))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_strided_logits_and_upstreams() -> None:
    z = torch.randn(3, 4, 4, 2, dtype=torch.float64).movedim(-1, 0).mT.requires_grad_()
    upstream = torch.randn(3, dtype=torch.float64).expand(2, 4, 4, 3).movedim(-1, 1)
    (mine,), (theirs,) = (torch.autograd.grad(f(z, 3), z, upstream) for f in (sinkhorn, by_logs))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_derivatives_of_both_orders() -> None:
    z = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 20), z)
    assert torch.autograd.gradgradcheck(lambda x: sinkhorn(x, 3), z)


def test_errors_of_both_are_of_one_size() -> None:
    z = 3 * torch.randn(200, 4, 4)
    exact = by_logs(z.double(), 20)
    sums, logs = ((f(z, 20) - exact).abs().max() for f in (sinkhorn, by_logs))
    assert sums < 2 * logs < 1e-5


@pytest.mark.parametrize("far", [200.0, 1e6, torch.inf, torch.nan])
def test_logits_far_apart_are_taken_by_logs(far: float) -> None:
    z = torch.randn(2, 4, 4)
    z[1, 2, 3] = far
    torch.testing.assert_close(sinkhorn(z, 20), by_logs(z, 20), rtol=0, atol=0, equal_nan=True)
    assert not by_hand(z)


def test_transformations_see_logs() -> None:
    z = torch.randn(3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(lambda x: sinkhorn(x, 5))(z), by_logs(z, 5), rtol=0, atol=1e-15)
    one = z[0]
    forward, reverse = (f(lambda x: sinkhorn(x, 5))(one) for f in (torch.func.jacfwd, torch.func.jacrev))
    torch.testing.assert_close(forward, reverse)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(one, torch.ones_like(one))
        assert torch.autograd.forward_ad.unpack_dual(sinkhorn(dual, 5)).tangent.abs().max() < 1e-14


def test_the_range_of_sums_is_that_of_their_dtype() -> None:
    for dtype, spread in module._SPREAD.items():
        z = torch.zeros(4, 4, dtype=dtype)
        z[0, 0], z[1, 1], z[0, 1] = 0.49 * spread, 0.49 * spread, -0.49 * spread
        exact = by_logs(z.double(), 20)
        assert by_hand(z) and sinkhorn(z, 20).min() > 0
        torch.testing.assert_close(sinkhorn(z, 20).double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1.0, 60.0])
def test_compilers_see_one_operator(size: float) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    z = (size * torch.randn(2, 5, 3, 3, dtype=torch.float64)).mT.requires_grad_()
    upstream = torch.randn(2, 5, 3, 3, dtype=torch.float64)
    got, want = torch.compile(lambda x: sinkhorn(x, 20), backend=backend, fullgraph=True)(z), by_logs(z, 20)
    (graph,) = graphs
    assert len([node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]) < 6
    (mine,), (theirs,) = (torch.autograd.grad(w, z, upstream) for w in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_the_operator() -> None:
    torch.library.opcheck(module._operator.operator, (torch.randn(5, 3, 3, requires_grad=True), 4, True))
