"""The gated delta rule in Triton on a GPU against a float64 token loop: values, every gradient, hard inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.delta import gated_delta_rule  # noqa: E402

NAMES = ("o", "final", "dq", "dk", "dv", "dbeta", "dg", "dstate")
# relative errors of a whole tensor
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def token_loop(q, k, v, beta, g, start):
    state, outs = start, []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * torch.exp(g[:, t])[..., None, None]
        error = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * error, k[:, t])
        outs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def draw(length, d_k, d_v, dtype, kind="random", b=2, h=2):
    q, k = (normalize(torch.randn(b, length, h, d_k, device="cuda"), dim=-1) for _ in range(2))
    v = torch.randn(b, length, h, d_v, device="cuda")
    beta = 2 * torch.rand(b, length, h, device="cuda")
    g = -(torch.rand(b, length, h, device="cuda") ** 4)
    start = torch.randn(b, h, d_v, d_k, device="cuda") / d_k**0.5
    if kind == "parallel":
        k = normalize(torch.randn(b, 1, h, d_k, device="cuda") + 0.1 * k, dim=-1)
        beta = torch.rand_like(beta)
        g = g * 0.01
    if kind == "strong":
        beta = torch.full_like(beta, 2.0)
        k = normalize(k + 0.5 * torch.randn(b, 1, h, d_k, device="cuda") / d_k**0.5, dim=-1)
    if kind == "open":
        g = -1e-6 * torch.rand_like(g)
    if kind == "closed":
        g = torch.where(torch.rand_like(g) < 0.2, -1e3, -20 * torch.rand_like(g))
    if kind == "ones":
        q, k, v = (torch.ones_like(x) for x in (q, k, v))
        k[..., 1:] = 0
        beta = torch.ones_like(beta)
        g = torch.zeros_like(g)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return q, k, v, beta, None if kind == "ungated" else g, start


def run(rule, inputs, do, dfinal):
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    o, final = rule(*inputs)
    used = [x for x in inputs if x is not None]
    grads = iter(torch.autograd.grad((o, final), used, (do.to(o.dtype), dfinal.to(final.dtype))))
    return [o, final, *(None if x is None else next(grads) for x in inputs)]


def errors(inputs) -> dict[str, float]:
    q, v = inputs[0], inputs[2]
    do, dfinal = torch.randn_like(v), torch.randn(q.shape[0], q.shape[2], v.shape[3], q.shape[3], device="cuda")
    got = run(gated_delta_rule, inputs, do, dfinal)
    # on the CPU the loop of small products is as fast and takes no device time
    exact = [None if x is None else x.double().cpu() for x in inputs]
    want = run(token_loop, exact, do.double().cpu(), dfinal.double().cpu())
    out = {}
    for name, a, w in zip(NAMES, got, want, strict=True):
        if w is None:
            continue
        assert torch.isfinite(a).all(), name
        scale = max(w.norm().item(), 1e-3 * w.numel() ** 0.5)
        out[name] = (a.double().cpu() - w).norm().item() / scale
    return out


def check(inputs, bound: float) -> None:
    found = errors(inputs)
    print({n: f"{e:.1e}" for n, e in found.items()})
    assert max(found.values()) < bound, {n: f"{e:.1e}" for n, e in found.items() if e >= bound}


@pytest.mark.parametrize("length", (1, 2, 63, 64, 65, 1000))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    check(draw(length, 64, 64, dtype), BOUNDS[dtype])


@pytest.mark.parametrize("d_k", (16, 64, 100, 128))
@pytest.mark.parametrize("d_v", (16, 64, 100, 128))
def test_sides(d_k: int, d_v: int) -> None:
    check(draw(130, d_k, d_v, torch.bfloat16), BOUNDS[torch.bfloat16])


@pytest.mark.parametrize(("d_k", "d_v"), ((16, 100), (100, 16)))
def test_sides_in_full_precision(d_k: int, d_v: int) -> None:
    check(draw(70, d_k, d_v, torch.float32), BOUNDS[torch.float32])


@pytest.mark.parametrize("kind", ("ungated", "parallel", "strong", "open", "closed", "ones"))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_hard_inputs(kind: str, dtype: torch.dtype) -> None:
    # what cancels grows with close keys; a closed gate leaves few digits of a cumulative log
    loose = {"parallel": 4, "strong": 4, "closed": 10}.get(kind, 1)
    check(draw(200, 128, 128, dtype, kind), BOUNDS[dtype] * loose if dtype == torch.float32 else BOUNDS[dtype])


def test_repeats_bit_for_bit_and_writes_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(777, 128, 100, torch.bfloat16)
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(2, 2, 100, 128, device="cuda")
    first = run(gated_delta_rule, inputs, do, dfinal)
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert torch.empty(4, device="cuda").isnan().all()
        second = run(gated_delta_rule, inputs, do, dfinal)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("d_k", (64, 128))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_full_chip_repeats_and_equals_its_parts(d_k: int, dtype: torch.dtype) -> None:
    """Faults of a compiler show under load: the same bits five times over, and alone."""
    inputs = draw(1500, d_k, 128, dtype, b=8, h=16)
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(8, 16, 128, d_k, device="cuda")
    first = run(gated_delta_rule, inputs, do, dfinal)
    for _ in range(4):
        for a, b in zip(first, run(gated_delta_rule, inputs, do, dfinal), strict=True):
            assert torch.equal(a, b)
    alone = run(gated_delta_rule, [x[3:4] for x in inputs], do[3:4], dfinal[3:4])
    for a, b in zip(first, alone, strict=True):
        assert torch.equal(a[3:4], b)


def test_heads_and_segments() -> None:
    """Many heads, and the state handed from one call to the next."""
    inputs = draw(300, 64, 64, torch.bfloat16, b=3, h=5)
    o, final = gated_delta_rule(*inputs)
    cut = [[x[:, s] for x in inputs[:5]] for s in (slice(0, 128), slice(128, 300))]
    first, state = gated_delta_rule(*cut[0], inputs[5])
    second, state = gated_delta_rule(*cut[1], state)
    assert (torch.cat((first, second), 1) - o).abs().max() < 1e-2 * o.abs().max()
    assert (state - final).norm() < 1e-3 * final.norm()


def test_compiles_as_one_graph() -> None:
    inputs = draw(100, 64, 64, torch.bfloat16)
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(2, 2, 64, 64, device="cuda")
    eager = run(gated_delta_rule, inputs, do, dfinal)
    compiled = run(torch.compile(gated_delta_rule, fullgraph=True), inputs, do, dfinal)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)


def time_it() -> Tensor:
    """`python tests/gpu/test_delta.py`: milliseconds at B 8, T 4096, H 16, D 128."""
    from triton.testing import do_bench

    inputs = draw(4096, 128, 128, torch.bfloat16, b=8, h=16)
    inputs = [x.requires_grad_() for x in inputs]
    do = torch.randn_like(inputs[2])
    with torch.no_grad():
        forward = do_bench(lambda: gated_delta_rule(*inputs), return_mode="median")

    def both():
        torch.autograd.grad(gated_delta_rule(*inputs)[0], inputs, do)

    print(f"forward {forward:.3f} ms, forward and backward {do_bench(both, return_mode='median'):.3f} ms")


if __name__ == "__main__":
    time_it()
