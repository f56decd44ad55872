"""Rows of the literature against their formulas, written out over python lists: outputs and gradients in float64."""

import math

import pytest
import torch
from torch import Tensor

from axes.depth import (
    AttentionResiduals,
    BlockAttentionResiduals,
    DeepDelta,
    DenseFormer,
    DepthMixer,
    DynamicDense,
    FracConnections,
    Residual,
    ResidualMatrix,
    UniversalTransformer,
)
from axes.errors import ShapeError

D, LAYERS = 6, 5


def f(x: Tensor) -> Tensor:
    return torch.tanh(torch.roll(x, 1, -1) * torch.rsqrt(x.square().mean(-1, keepdim=True)))


def run(mixers: list[DepthMixer], h: Tensor) -> Tensor:
    x = mixers[0].expand(h)
    for m in mixers:
        seen, coefficients = m.read(x)
        x = m.write(x, f(seen), coefficients)
    return mixers[-1].reduce(x)


def attend(query: Tensor, sources: list[Tensor]) -> Tensor:
    keys = [v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() for v in sources]
    weights = torch.stack([k @ query for k in keys]).exp()
    return (weights[..., None] * torch.stack(sources)).sum(0) / weights.sum(0)[..., None]


def full(mixers: list, h: Tensor) -> Tensor:
    values = [h]
    for m in mixers:
        values.append(f(attend(m.query, values)))
    return attend(mixers[-1].exit, values)


def block(mixers: list, h: Tensor) -> Tensor:
    """As printed: finished blocks and, inside of one, its partial sum."""
    blocks, partial = [h], None
    for l, m in enumerate(mixers):
        y = f(attend(m.query, blocks if partial is None else [*blocks, partial]))
        partial = y if partial is None else partial + y
        if (l + 1) % m.size == 0:
            blocks, partial = [*blocks, partial], None
    return attend(mixers[-1].exit, blocks if partial is None else [*blocks, partial])


def dense(mixers: list, h: Tensor) -> Tensor:
    z = [h]
    for m in mixers:
        z.append(f(sum(a * x for a, x in zip(m.pre, z, strict=True))))
    return sum(a * x for a, x in zip(mixers[-1].exit, z, strict=True))


def matrix(mixers: list, h: Tensor) -> Tensor:
    n, r = mixers[0].streams, mixers[0].fractions

    def norm(m: Tensor) -> Tensor:
        return m / m.square().mean((-2, -1), keepdim=True).sqrt()

    state = h.unflatten(-1, (r, D // r)).repeat(*[1] * (h.ndim - 1), n, 1)
    for m in mixers:
        y = f(torch.einsum("rk,...kv->...rv", m.pre, norm(state)).flatten(-2))
        state = state + torch.einsum("rk,...rv->...kv", m.post, y.unflatten(-1, (r, D // r)))
    shares = torch.sigmoid(mixers[-1].exit)
    return torch.einsum("n,...nrv->...rv", shares, norm(state).unflatten(-2, (n, r))).flatten(-2)


def fractions(mixers: list, h: Tensor) -> Tensor:
    state = h.unflatten(-1, (mixers[0].fractions, -1))
    for m in mixers:
        y = f((m.read_weights.T @ state).flatten(-2)).unflatten(-1, state.shape[-2:])
        state = torch.diag(m.post) @ y + m.mix.T @ state
    return state.flatten(-2)


def delta(mixers: list, h: Tensor) -> Tensor:
    """S (d, n) entry by entry: S_aj <- S_aj + beta u_a (w_j - sum_b u_b S_bj)."""
    n = mixers[0].streams
    s = [[h[..., a]] * n for a in range(D)]
    for m in mixers:
        x = torch.stack([sum(s[a][j] * m.pre[j] for j in range(n)) for a in range(D)], -1)
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        beta = 2 / (1 + torch.exp(-((normed * m.gate).sum(-1) + m.gate_bias)))
        w = [4 / (1 + torch.exp(-((x * m.target[j]).sum(-1) + m.target_bias[j]))) for j in range(n)]
        y = f(x)
        u = (y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()).unbind(-1)
        found = [sum(u[b] * s[b][j] for b in range(D)) for j in range(n)]
        s = [[s[a][j] + beta * u[a] * (w[j] - found[j]) for j in range(n)] for a in range(D)]
    shares = torch.full((n,), 1 / n, dtype=h.dtype) if mixers[-1].exit is None else torch.sigmoid(mixers[-1].exit)
    return torch.stack([sum(s[a][j] * shares[j] for j in range(n)) for a in range(D)], -1)


def predicted(mixers: list, h: Tensor) -> Tensor:
    def weights(last: Tensor, down: Tensor, up: Tensor, constant: Tensor) -> Tensor:
        hidden = last / (last.square().mean(-1, keepdim=True) + 1e-6).sqrt() @ down.T
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        return hidden @ up.T + constant

    def read(a: Tensor, z: list[Tensor]) -> Tensor:
        return sum(a[..., i, None] * x for i, x in enumerate(z))

    z = [h]
    for m in mixers:
        z.append(f(read(weights(z[-1], m.down, m.up, m.pre), z)))
    return read(weights(z[-1], mixers[-1].exit_down, mixers[-1].exit_up, mixers[-1].exit), z)


LEARNED = {"learned_reduce": True}
ROWS = {
    "full": (AttentionResiduals, LEARNED, full),
    "block of one": (BlockAttentionResiduals, {"streams": LAYERS + 1, "size": 1, **LEARNED}, block),
    "block of two": (BlockAttentionResiduals, {"streams": 4, "size": 2, **LEARNED}, block),
    "one block": (BlockAttentionResiduals, {"streams": 3, "size": LAYERS, **LEARNED}, block),
    "dense": (DenseFormer, {"streams": LAYERS + 1, **LEARNED}, dense),
    "matrix": (ResidualMatrix, {"streams": 4, "fractions": 2, **LEARNED}, matrix),
    "matrix of three": (ResidualMatrix, {"streams": 2, "fractions": 3, **LEARNED}, matrix),
    "fractions": (FracConnections, {"fractions": 3}, fractions),
    "delta": (DeepDelta, {"streams": 3, **LEARNED}, delta),
    "delta of one stream": (DeepDelta, {"streams": 1}, delta),
    "predicted": (DynamicDense, {"streams": LAYERS + 1, **LEARNED}, predicted),
}


def row(name: str) -> list[DepthMixer]:
    cls, options, _ = ROWS[name]
    return [cls(D, l, dtype=torch.float64, **options) for l in range(LAYERS)]


@pytest.mark.parametrize("name", ROWS)
def test_the_row_is_its_formula(name: str) -> None:
    mixers = row(name)
    for p in (p for m in mixers for p in m.parameters()):
        torch.nn.init.normal_(p)
    h = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    ours, theirs = run(mixers, h), ROWS[name][2](mixers, h)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream, inputs = torch.randn_like(ours), [h, *(p for m in mixers for p in m.parameters())]
    found = torch.autograd.grad(ours, inputs, upstream, allow_unused=True)
    for a, b in zip(found, torch.autograd.grad(theirs, inputs, upstream, allow_unused=True), strict=True):
        if a is None or b is None:  # the reads at the exit of all sublayers but the last
            assert a is None and b is None
        else:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("delta")])  # which replaces
def test_the_row_starts_at_pre_norm(name: str) -> None:
    """Up to the scale that a final norm takes out; blocks of DenseFormer hold their own residuals, here none."""
    h = torch.randn(2, 3, D, dtype=torch.float64)
    plain = h
    for _ in range(LAYERS):
        plain = f(plain) if name in ("dense", "predicted") else plain + f(plain)

    def unit(x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    torch.testing.assert_close(unit(run(row(name), h)), unit(plain), rtol=0, atol=1e-12)


def test_blocks_of_one_are_the_full_form() -> None:
    listed, streams = row("full"), row("block of one")
    for a, b in zip(listed, streams, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.nn.init.normal_(p)
            q.data.copy_(p)
    h = torch.randn(2, 3, D, dtype=torch.float64)
    torch.testing.assert_close(run(listed, h), run(streams, h), rtol=0, atol=1e-12)


def test_a_sublayer_without_a_stream_to_write_to_is_refused() -> None:
    with pytest.raises(ShapeError, match="sublayer 4 writes to stream 3 of 3: streams must be at least 4"):
        BlockAttentionResiduals(D, 4, 3, size=2)
    with pytest.raises(ShapeError, match="sublayer 5 writes to stream 6 of 6"):
        DenseFormer(D, 5, 6)


def test_one_shared_sublayer_and_mixer_are_a_universal_transformer() -> None:
    """h_{t+1} = h_t + f(h_t + p_t): one f and one mixer for every step, positions of depth added to what is read."""
    positions, shared = torch.randn(LAYERS, D, dtype=torch.float64), Residual(D)
    h = torch.randn(2, 3, D, dtype=torch.float64)
    x, plain = shared.expand(h), h
    for p in positions:
        seen, coefficients = shared.read(x)
        x, plain = shared.write(x, f(seen + p), coefficients), plain + f(plain + p)
    torch.testing.assert_close(shared.reduce(x), plain, rtol=0, atol=0)


def test_deep_delta_replaces_what_stood_along_its_direction() -> None:
    """beta = 1: u^T S is the target afterwards, and the rest of S is as it was; beta = 0 keeps everything."""
    m = DeepDelta(D, 1, 3, dtype=torch.float64)
    torch.nn.init.normal_(m.target)
    x, y = torch.randn(4, 3, D, dtype=torch.float64), torch.randn(4, D, dtype=torch.float64)
    coefficients = m.read(x)[1]
    new, u = m.write(x, y, coefficients), y / y.norm(dim=-1, keepdim=True)
    torch.testing.assert_close((new @ u[..., None])[..., 0], coefficients.signal["k"], rtol=0, atol=1e-8)
    across = torch.eye(D, dtype=torch.float64) - u[..., :, None] * u[..., None, :]
    torch.testing.assert_close(new @ across, x @ across, rtol=0, atol=1e-12)
    m.gate_bias.data.fill_(-50.0)  # beta = 0
    torch.testing.assert_close(m.write(x, y, m.read(x)[1]), x, rtol=0, atol=1e-12)


def test_streams_of_deep_delta_part() -> None:
    """The read is asymmetric at the start, so that targets of equal streams have different gradients."""
    mixers = [DeepDelta(D, l, 3, dtype=torch.float64) for l in range(3)]
    h, upstream = torch.randn(2, 3, D, dtype=torch.float64), torch.randn(2, 3, D, dtype=torch.float64)
    (run(mixers, h) * upstream).sum().backward()
    for p in (mixers[0].target, mixers[0].target_bias):
        assert p.grad is not None and (p.grad[0] - p.grad[1]).abs().amax() > 1e-6


def universal(h: Tensor, steps: int) -> Tensor:
    """As printed: A = Norm(H + P + Attention(H + P)), H = Norm(A + Transition(A)); P_t by loops over its entries."""

    def norm(x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    for t in range(1, steps + 1):
        p = [(math.sin if i % 2 == 0 else math.cos)(t / 10000 ** (2 * (i // 2) / D)) for i in range(D)]
        h = h + torch.tensor(p, dtype=h.dtype)
        h = norm(h + f(h))
        h = norm(h + g(h))
    return h


def g(x: Tensor) -> Tensor:
    return torch.sin(torch.roll(x, 2, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_block_of_the_universal_transformer_serves_every_step(dtype: torch.dtype) -> None:
    """Two mixers and two sublayers, the same objects at every step: the state's count says which step it is."""
    block = [(f, UniversalTransformer(D, 0, dtype=dtype)), (g, UniversalTransformer(D, 1, dtype=dtype))]
    h = torch.randn(2, 3, D, dtype=dtype, requires_grad=True)
    x = block[0][1].expand(h)
    for _ in range(4):
        for sublayer, m in block:
            seen, coefficients = m.read(x)
            x = m.write(x, sublayer(seen), coefficients)
    ours, wide = block[0][1].reduce(x), h.double()
    theirs = universal(wide, 4)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=exact)
    upstream = torch.randn_like(theirs)
    found, wanted = (torch.autograd.grad(out, h, upstream.to(out.dtype))[0] for out in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=0, atol=100 * exact)
    odd = UniversalTransformer(5, 0, dtype=dtype)
    assert odd.position(torch.tensor(3), torch.zeros(5, dtype=dtype)).shape == (5,)
    with pytest.raises(ShapeError, match="sublayers must be an integer >= 1, got 0"):
        UniversalTransformer(D, sublayers=0)
