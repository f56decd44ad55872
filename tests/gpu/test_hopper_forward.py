"""The Hopper forward of the gated delta rule against float64: values, saved tensors, hard inputs, bits under load."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from axes.kernels.scalar.hopper import chain, fits, prepare  # noqa: E402

C = 64
DTYPES = (torch.bfloat16, torch.float16)
NAMES = ("o", "final", "w", "p")
KINDS = ("random", "ungated", "unstarted", "parallel", "strong", "open", "closed", "ones", "integers")


def forward(q, k, v, beta, g, start, record: bool = True) -> tuple[Tensor, ...]:
    w, numbers = prepare(k, beta, g)
    o, final, p = chain(q, k, v, w, numbers, start, record=record)
    return o, final, w, p


def draw(b: int, t: int, h: int, d: int, dtype: torch.dtype, kind: str = "random"):
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    q, k = (normalize(randn(b, t, h, d), dim=-1) for _ in range(2))
    v = randn(b, t, h, d)
    beta = 2 * torch.rand(b, t, h, device="cuda")
    g = -(torch.rand(b, t, h, device="cuda") ** 4)
    start = randn(b, h, d, d) / d**0.5
    if kind == "parallel":
        k = normalize(randn(b, 1, h, d) + 0.1 * k, dim=-1)
        beta, g = torch.rand_like(beta), 0.01 * g
    if kind == "strong":
        beta = torch.full_like(beta, 2.0)
        k = normalize(k + 0.5 * randn(b, 1, h, d) / d**0.5, dim=-1)
    if kind == "open":
        g = -1e-6 * torch.rand_like(g)
    if kind == "closed":
        g = torch.where(torch.rand_like(g) < 0.2, -1e3, -20 * torch.rand_like(g))
    if kind == "ones":
        q, k, v = (torch.ones_like(x) for x in (q, k, v))
        k[..., 1:] = 0
        beta, g = torch.ones_like(beta), torch.zeros_like(g)
    if kind == "integers":  # small whole numbers: keys along axes, so that every product is exact in any order
        k = torch.eye(d, device="cuda")[torch.randint(d, (b, t, h), device="cuda")]
        q, v = (torch.randint(-2, 3, (b, t, h, d), device="cuda").float() for _ in range(2))
        beta, g, start = torch.ones_like(beta), torch.zeros_like(g), torch.round(start)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return q, k, v, beta, None if kind == "ungated" else g, None if kind == "unstarted" else start


def chunked(q, k, v, beta, g, start, dtype: torch.dtype | None = None):
    """The same algorithm in torch: float64, or with operands of products rounded to `dtype` and float32 sums."""
    wide = torch.float64 if dtype is None else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x if dtype is None else x.to(dtype).to(wide)

    def tiles(x: Tensor) -> Tensor:
        x = x.to(wide).reshape(*x.shape[:3], -1)
        return pad(x, (0, 0, 0, 0, 0, -t % C)).unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)

    b, t, h, d = q.shape
    state = torch.zeros(b, h, d, d, device=q.device) if start is None else start
    state = state.to(wide)
    q, k, v = tiles(q), tiles(k), tiles(v)
    run = torch.zeros_like(q[..., 0]) if g is None else tiles(g.clamp(min=-100))[..., 0].cumsum(-1)
    beta = tiles(beta)
    keep = torch.ones(C, C, device=q.device).tril().bool()
    decay = torch.exp(torch.where(keep, run[..., :, None] - run[..., None, :], -torch.inf))
    p = rounded(q @ k.mT * decay)
    eye = torch.eye(C, device=q.device, dtype=wide)
    w = rounded(torch.linalg.inv(eye + (k @ k.mT * decay).tril(-1) * beta.mT))
    outs = []
    for n in range(q.shape[2]):
        reach, total = run[:, :, n, :, None].exp(), run[:, :, n, -1, None, None]
        old = rounded(state.mT)
        u = beta[:, :, n] * (w[:, :, n] @ rounded(v[:, :, n] - reach * (k[:, :, n] @ old)))
        outs.append(reach * (q[:, :, n] @ old) + p[:, :, n] @ rounded(u))
        kept = rounded((total - run[:, :, n, :, None]).exp() * u)
        state = total.exp() * state + kept.mT @ k[:, :, n]
    return torch.stack(outs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :t], state, w, p


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm().clamp(min=1e-6)).item()


def check(inputs) -> None:
    q, v = inputs[0], inputs[2]
    assert fits(q, v)
    found, exact, usual = forward(*inputs), chunked(*inputs), chunked(*inputs, dtype=q.dtype)
    for name, a, w, u in zip(NAMES, found, exact, usual, strict=True):
        assert a.isfinite().all(), name
        mine, theirs = error(a, w), error(u.to(a.dtype) if name == "o" else u, w)
        print(f"{name} {mine:.1e} {theirs:.1e}", end=" ")
        assert mine <= 1.5 * theirs + 1e-6, (name, mine, theirs)
    print()


@pytest.mark.parametrize("t", (1, 2, 63, 64, 65, 1000, 4096))
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(t: int, d: int, dtype: torch.dtype) -> None:
    check(draw(2, t, 3, d, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hard_inputs(kind: str, d: int, dtype: torch.dtype) -> None:
    check(draw(2, 500, 3, d, dtype, kind))


@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_full_chip_repeats_and_equals_its_parts(d: int, dtype: torch.dtype) -> None:
    inputs = draw(8, 1500, 16, d, dtype)
    first = forward(*inputs)
    for _ in range(10):
        for a, b in zip(first, forward(*inputs), strict=True):
            assert torch.equal(a, b)
    alone = forward(*(x[3:4].contiguous() for x in inputs))
    for a, b in zip(first, alone, strict=True):
        assert torch.equal(a[3:4], b)


@pytest.mark.parametrize("d", (64, 128))
def test_any_number_of_heads(d: int) -> None:
    """One kernel for all: the first heads of many are those heads alone."""
    inputs = draw(2, 200, 40, d, torch.bfloat16)
    o, final, w, p = forward(*inputs)
    for h in (1, 2, 3, 5, 8, 17, 33):
        part = [x[:, :, :h].contiguous() for x in inputs[:5]]
        found = forward(*part, inputs[5][:, :h].contiguous())
        for a, b in zip(found, (o[:, :, :h], final[:, :h], w[:, :h], p[:, :h]), strict=True):
            assert torch.equal(a, b), h


def test_segments_are_units() -> None:
    """Runs of tokens with their own starts, as batch entries of a view: no copies."""
    inputs = draw(2, 512, 4, 128, torch.bfloat16, "unstarted")
    view = [x.view(8, 128, *x.shape[2:]) for x in inputs[:5]]
    found, exact = forward(*view, None), chunked(*view, None)
    assert error(found[0], exact[0]) < 1e-2
    o, state = [], None
    for n in range(4):
        part, state, *_ = forward(*(x.view(2, 4, 128, *x.shape[2:])[:, n].contiguous() for x in inputs[:5]), state)
        o.append(part)
    whole, final, *_ = forward(*inputs)
    assert torch.equal(torch.cat(o, 1), whole) and torch.equal(state, final)


def test_without_a_record() -> None:
    inputs = draw(2, 500, 3, 128, torch.bfloat16)
    o, final, _, p = forward(*inputs, record=False)
    whole = forward(*inputs)
    assert p.numel() == 0
    assert torch.equal(o, whole[0]) and torch.equal(final, whole[1])


def test_inputs_that_the_copy_engine_cannot_read() -> None:
    """Contiguous views at odd addresses."""
    inputs = draw(1, 130, 2, 64, torch.bfloat16)
    odd = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x) for x in inputs]
    for a, b in zip(forward(*odd), forward(*inputs), strict=True):
        assert torch.equal(a, b)


def test_fits() -> None:
    x = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device="cuda")
    assert fits(x, x) and fits(x[..., :64], x[..., :64])
    assert not fits(x, x[..., :64]) and not fits(x.float(), x.float()) and not fits(x[..., :100], x[..., :100])
    assert not fits(x.cpu(), x.cpu()) and not fits(x, x.half()) and not fits(x[:, :0], x[:, :0])
