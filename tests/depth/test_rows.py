"""Rows of the literature against their formulas, written out over python lists: outputs and gradients in float64."""

import pytest
import torch
from torch import Tensor

from axes.depth import (
    AttentionResiduals,
    BlockAttentionResiduals,
    DenseFormer,
    DepthMixer,
    FracConnections,
    Residual,
    ResidualMatrix,
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


@pytest.mark.parametrize("name", ROWS)
def test_the_row_starts_at_pre_norm(name: str) -> None:
    """Up to the scale that a final norm takes out; blocks of DenseFormer hold their own residuals, here none."""
    h = torch.randn(2, 3, D, dtype=torch.float64)
    plain = h
    for _ in range(LAYERS):
        plain = f(plain) if name == "dense" else plain + f(plain)

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
