"""Sums of outer products on a GPU against float64: shapes, dtypes, views, parts, gradients, and the core's choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.products.outer import outer_sum  # noqa: E402
from axes.linalg import accumulate  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUND = 2e-6  # 16-bit products are exact: the sum is as good as float32's
# rounded to 16 bits on the way: weighted keys, and D in the backward products
ROUNDED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def exact(u, k=None, weight=None, start=None, decay=None):
    u, k, weight, start, decay = (None if x is None else x.double() for x in (u, k, weight, start, decay))
    k = u if k is None else k
    total = u.mT @ (k if weight is None else weight[..., None] * k)
    if start is None:
        return total
    return total + (start if decay is None else decay[:, None, None] * start)


def draw(n, length, value, key, dtype, names=("k", "weight", "start", "decay")) -> dict[str, Tensor]:
    shapes = {"u": (n, length, value), "k": (n, length, key), "weight": (n, length), "decay": (n,)}
    shapes |= {"start": (n, value, key if "k" in names else value)}
    inputs = {name: torch.randn(shapes[name], device="cuda") for name in ("u", *names)}
    return {name: x.to(dtype) if name in "uk" else x for name, x in inputs.items()}


def error(got: Tensor, want: Tensor) -> float:
    assert torch.isfinite(got).all() and got.shape == want.shape
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-3 * want.numel() ** 0.5)).item()


def check(inputs: dict[str, Tensor]) -> None:
    got, want = outer_sum(**inputs), exact(**inputs)
    assert got.dtype == torch.float32
    bound = ROUNDED[inputs["u"].dtype] if "weight" in inputs else BOUND
    assert error(got, want) < bound, ({n: tuple(x.shape) for n, x in inputs.items()}, error(got, want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", (1, 2, 63, 64, 65, 1000, 5000))
def test_lengths(length: int, dtype: torch.dtype) -> None:
    for names in ((), ("k",), ("start",), ("k", "weight"), ("k", "start", "decay"), ("k", "weight", "start", "decay")):
        check(draw(3, length, 72, 40, dtype, names))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", (1, 3, 16, 64, 65, 130, 300))
def test_widths(value: int, dtype: torch.dtype) -> None:
    for key in (1, 17, 64, 128, 200):
        check(draw(2, 100, value, key, dtype, ("k", "start", "decay")))
    check(draw(2, 100, value, value, dtype, ("start", "decay")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts(dtype: torch.dtype) -> None:
    """Many tokens and few matrices are cut into parts; many matrices are not."""
    for n, length, side in ((1, 8192, 1024), (1, 20_000, 100), (2, 3000, 128), (600, 100, 48)):
        check(draw(n, length, side, side, dtype, ("k", "start", "decay")))
        check(draw(n, length, side, side, dtype, ("start",)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_symmetric_views_and_bits(dtype: torch.dtype) -> None:
    """u u^T is symmetric to the bit; transposed and sliced views are read in place; repeats have the same bits."""
    g = torch.randn(2, 200, 700, device="cuda").to(dtype)
    for x in (g, g.mT, g[:, 3:150], g[:, :, 5:150], g[:, ::2, :], g[:, :, ::2], g[:1].expand(2, -1, -1)):
        check({"u": x})
        got = outer_sum(x)
        assert torch.equal(got, got.mT)
        for _ in range(3):
            assert torch.equal(outer_sum(x), got)
    check({"u": g.mT, "k": g[:, :1].mT.expand(-1, -1, 30)})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_and_ones(dtype: torch.dtype) -> None:
    """Exact in every setting that is picked: widths on both sides of its tiles, rows and transposed views."""
    for side in (32, 128, 300):
        for rows in (True, False):
            u = torch.randint(-3, 4, (2, 1500, side), device="cuda").to(dtype)
            u = u if rows else u.mT.contiguous().mT
            ones = torch.ones_like(u)
            assert torch.equal(outer_sum(u).double(), exact(u))
            assert torch.equal(outer_sum(ones, u).double(), exact(ones, u))
            assert torch.equal(outer_sum(ones).double(), exact(ones))


def test_pieces_hold_every_bit() -> None:
    """bf16x6 on transposed views: the errors of float32 products, over the range of float32."""
    for scale in (1e-12, 1.0, 1e12):
        u = (torch.randn(1, 80, 4000, device="cuda") * scale).mT
        k = (torch.randn(1, 100, 4000, device="cuda") / scale).mT
        want = u.double().mT @ k.double()
        assert error(outer_sum(u, k), want) < 3e-7
        assert error(outer_sum(u, k), want) < 1.5 * error(u.mT @ k, want)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the first product of autograd's thread
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", ((), ("k", "weight", "start", "decay")), ids=("square", "all"))
def test_gradients(names: tuple[str, ...], dtype: torch.dtype) -> None:
    inputs = {n: x.requires_grad_() for n, x in draw(2, 700, 100, 60, dtype, names).items()}
    got = outer_sum(**inputs)
    d = torch.randn_like(got)
    found = torch.autograd.grad(got, list(inputs.values()), d)
    wide = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    wanted = torch.autograd.grad(exact(**wide), list(wide.values()), d.double())
    for name, a, w in zip(inputs, found, wanted, strict=True):
        assert a.dtype == inputs[name].dtype
        assert error(a, w) < ROUNDED[dtype], (name, error(a, w))


def test_nothing_to_sum() -> None:
    start, decay = torch.randn(2, 8, 4, device="cuda"), torch.rand(2, device="cuda")
    u, k = torch.empty(2, 0, 8, device="cuda"), torch.empty(2, 0, 4, device="cuda")
    assert torch.equal(outer_sum(u, k, None, start, decay), decay[:, None, None] * start)
    assert outer_sum(u[:0], k[:0]).shape == (0, 8, 4)
    assert outer_sum(torch.empty(2, 5, 0, device="cuda")).shape == (2, 0, 0)


def test_compiles_and_captures() -> None:
    u = torch.randn(1, 3000, 256, device="cuda").bfloat16()
    want = outer_sum(u)
    assert torch.equal(torch.compile(outer_sum, fullgraph=True)(u), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = outer_sum(u)
    graph.replay()
    assert torch.equal(got, want)


def test_the_core_chooses() -> None:
    """Large 16-bit sums and large symmetric float32 ones go to the kernel, the rest to torch; the numbers agree."""
    u = torch.randn(2, 3, 4096, 128, device="cuda")
    assert accumulate.no_kernel(u.bfloat16()) is None and accumulate.no_kernel(u.half(), u.half()) is None
    for x, k in ((u.double(), None), (u, None), (u[:1, :1].half(), None), (u.half(), u)):
        assert accumulate.no_kernel(x, k) is not None
    large = torch.randn(1200, 1024, device="cuda")
    assert accumulate.no_kernel(large) is None and accumulate.no_kernel(large, large) is not None
    assert error(accumulate.outer_sum(large), large.double().mT @ large.double()) < BOUND
    weight, start = torch.rand(4096, device="cuda"), torch.randn(128, 128, device="cuda")
    for dtype in (torch.float64, *DTYPES):
        x = u.to(dtype)
        assert error(accumulate.outer_sum(x), x.double().mT @ x.double()) < BOUND
        want = x.double().mT @ (weight[:, None].double() * x.double()) + start.double()
        assert error(accumulate.outer_sum(x, None, weight, start), want) < BOUND


def time_it() -> None:
    """`python tests/gpu/test_outer.py`: microseconds of the sums that the axes form, in a CUDA graph and eager."""
    from triton.testing import do_bench

    def line(what: str, **ways: Any) -> None:
        found = {}
        for name, f in ways.items():
            f()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                f()
            found[name] = [do_bench(g, return_mode="median") * 1e3 for g in (graph.replay, f)]
        print(f"{what:40s}", *(f"{name} {g:.1f} / {e:.1f}" for name, (g, e) in found.items()), "us")

    def square(what: str, u: Tensor) -> None:
        ways = {"torch": lambda: u.float().mT @ u.float(), "kernel": lambda: outer_sum(u)}
        if u.dtype != torch.float32:
            ways["torch, truncating"] = lambda: torch.bmm(u.mT, u, out_dtype=torch.float32)
        line(f"{what}, {str(u.dtype)[6:]}", **ways)

    x, g = torch.randn(1, 8192, 1024, device="cuda"), torch.randn(1, 1024, 4096, device="cuda")
    square("K-FAC, 8192 examples of 1024", x.bfloat16())
    square("K-FAC, 8192 examples of 1024", x)
    square("K-FAC, 4096 examples of 256", x[:, :4096, :256].bfloat16())
    square("K-FAC, 1024 examples of 1024", x[:, :1024])
    square("G G^T, 1024 x 4096", g.mT)
    square("G^T G, 1024 x 4096", g)
    square("24 of G G^T, 768 x 768", torch.randn(24, 768, 768, device="cuda").mT)
    square("24 of G^T G, 768 x 768", torch.randn(24, 768, 768, device="cuda"))
    streams, post = torch.randn(8192, 768, 4, device="cuda"), torch.randn(8192, 1, 4, device="cuda")
    y = torch.randn(8192, 1, 768, device="cuda")
    line(
        "4 streams of 768, 8192 tokens",
        sum=lambda: streams + y.mT * post,
        addcmul=lambda: accumulate.outer_sum(y, post, start=streams),
        kernel=lambda: outer_sum(y, post, start=streams),
    )


if __name__ == "__main__":
    time_it()
