"""Networks of mixers: equal to pre-norm at the start, then different; causal; blind to the names of the streams."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from axes.depth import (
    ALL,
    MHC,
    DepthMixer,
    DynamicHyperConnections,
    HyperConnections,
    IdentityMixing,
    JPmHC,
    JPmHCMeanPreserving,
    MHCLite,
    Mixed,
    PostNorm,
    PreNorm,
    Residual,
)

D, N, LAYERS = 16, 4, 6
MANY = (HyperConnections, DynamicHyperConnections, MHC, MHCLite, IdentityMixing, JPmHC, JPmHCMeanPreserving)


class Sublayer(nn.Module):
    """Causal mean over tokens at even layers, an MLP at odd ones; with its own norm if the mixer leaves that to it."""

    def __init__(self, index: int, prenorm: bool, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.index, self.prenorm, self.eps = index, prenorm, eps
        self.inner = nn.Linear(D, 2 * D, dtype=dtype)
        self.out = nn.Linear(2 * D, D, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.prenorm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if self.index % 2 == 0:
            count = torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)[:, None]
            x = x.cumsum(-2) / count
        return self.out(torch.tanh(self.inner(x)))


class Network(nn.Module):
    def __init__(
        self,
        make: Callable[..., DepthMixer],
        layers: int = LAYERS,
        eps: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        mixers = [make(D, layer_index=l, dtype=dtype) for l in range(layers)]
        self.blocks = nn.ModuleList(Mixed(Sublayer(l, m.prenorm, eps, dtype), m) for l, m in enumerate(mixers))
        torch.manual_seed(2)
        for block in self.blocks:
            for p in block.f.parameters():
                nn.init.normal_(p, std=0.4)

    def streams(self, h: Tensor) -> list[Tensor]:
        kept = [self.blocks[0].mixer.expand(h)]
        for block in self.blocks:
            kept.append(block(kept[-1]))
        return kept

    def forward(self, h: Tensor) -> Tensor:
        out = self.blocks[-1].mixer.reduce(self.streams(h)[-1])
        return out * torch.rsqrt(out.square().mean(-1, keepdim=True)) if self.blocks[-1].mixer.prenorm else out

    def sublayer_gradients(self, h: Tensor, upstream: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(self(h), [p for b in self.blocks for p in b.f.parameters()], upstream))


def plain_prenorm(network: Network, h: Tensor) -> Tensor:
    """h <- h + F(RMSNorm(h)), final norm: no mixer involved."""
    for block in network.blocks:
        x = h * torch.rsqrt(h.square().mean(-1, keepdim=True))
        f = block.f
        if f.index % 2 == 0:
            x = x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)[:, None]
        h = h + f.out(torch.tanh(f.inner(x)))
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True))


@pytest.mark.parametrize("cls", [Residual, PreNorm, *MANY], ids=lambda c: c.name)
def test_every_default_start_is_pre_norm(cls: type[DepthMixer]) -> None:
    network = Network(cls)
    h, upstream = torch.randn(2, 5, D, dtype=torch.float64), torch.randn(2, 5, D, dtype=torch.float64)
    expected = plain_prenorm(network, h)
    torch.testing.assert_close(network(h), expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(expected, [p for b in network.blocks for p in b.f.parameters()], upstream)
    for found, want in zip(network.sublayer_gradients(h, upstream), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", MANY, ids=lambda c: c.name)
def test_the_start_is_pre_norm_in_float32(cls: type[DepthMixer]) -> None:
    network = Network(cls, eps=1e-8, dtype=torch.float32)
    h = torch.randn(2, 5, D)
    torch.testing.assert_close(network(h), plain_prenorm(network, h), rtol=0, atol=1e-5)


def train(network: Network, steps: int, lr: float = 3e-3) -> None:
    torch.manual_seed(3)
    h, target = torch.randn(4, 5, D, dtype=torch.float64), torch.randn(4, 5, D, dtype=torch.float64)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (network(h) - target).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("cls", MANY, ids=lambda c: c.name)
def test_streams_part_within_fifty_steps(cls: type[DepthMixer]) -> None:
    network = Network(cls)
    h = torch.randn(4, 5, D, dtype=torch.float64)

    def apart() -> Tensor:
        x = network.streams(h)[-1]
        return (x - x.mean(-2, keepdim=True)).norm() / x.norm()

    assert apart() < 1e-12
    train(network, 50)
    assert apart() > 1e-3


@pytest.mark.parametrize("cls", MANY, ids=lambda c: c.name)
def test_every_parameter_learns_after_the_first_steps(cls: type[DepthMixer]) -> None:
    """In the interior; at the two ends part of a mixer has nothing to act on, and that is tested too."""
    network = Network(cls)
    train(network, 3)
    h = torch.randn(4, 5, D, dtype=torch.float64)
    network.zero_grad()
    (network(h) * torch.randn(4, 5, D, dtype=torch.float64)).sum().backward()
    for block in network.blocks[1:-1]:
        for name, p in block.mixer.named_parameters():
            assert p.grad is not None and p.grad.abs().amax() > 0, f"layer {block.mixer.layer_index}: {name}"
            if name in ("phi", "bias") and cls is not JPmHCMeanPreserving:  # row by row, as far as there is no gauge
                assert (p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None]).abs().amax(-1).gt(0).float().mean() > 0.7


def test_at_the_ends_mean_preserving_mixing_has_no_effect() -> None:
    """R is irrelevant on equal streams and before a mean; truncated columns leak a little into the latter."""
    for cls in (MHC, MHCLite, JPmHCMeanPreserving):
        network = Network(cls)
        train(network, 3)
        network.zero_grad()
        upstream = torch.randn(4, 5, D, dtype=torch.float64)
        (network(torch.randn(4, 5, D, dtype=torch.float64)) * upstream).sum().backward()
        first, *inside, last = (block.mixer.bias.grad[-N * N :].abs().amax() for block in network.blocks)
        assert first < 1e-12
        assert last < (1e-4 if cls is MHC else 1e-12)
        assert min(inside) > 1e-6


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.name)
def test_no_mixer_looks_ahead(cls: type[DepthMixer]) -> None:
    network = Network(cls)
    with torch.no_grad():
        for block in network.blocks:
            for p in block.mixer.parameters():
                p.add_(0.3 * torch.randn_like(p))
    h = torch.randn(2, 7, D, dtype=torch.float64)
    changed = h.clone()
    changed[:, 4] += 1.0
    before, after = network(h), network(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().amax() > 1e-3


def relabelled(m: DepthMixer, order: Tensor) -> dict[str, Tensor]:
    """The parameters of the same mixer with its streams renamed: new stream i is old stream order[i]."""
    found = {}
    pairs = (order[:, None] * N + order).flatten()
    words, o = list(permutations(range(N))), order.tolist()
    # P'[i, j] = P[o_i, o_j]: where the new word takes i to w(i), the old one takes o_i to o_w(i)
    orders = torch.tensor([words.index(tuple(o[word[o.index(i)]] for i in range(N))) for word in words])
    for name, p in m.state_dict().items():
        if name in ("pre", "post"):
            p = p[order]
        elif name in ("mix", "rates.mix"):
            p = p[order][:, order]
        elif name == "phi" and isinstance(m, DynamicHyperConnections):
            p = torch.cat((p[:2], p[2:][order]))
        elif name in ("phi", "bias"):
            blocks = {24: (N, N, N * N), 8: (N, N), 48: (N * N,) * 3, 32: (N, N, 24)}[p.shape[0]]
            new = {N: order, N * N: pairs, 24: orders}
            parts = [x[new[len(x)]] for x in p.split(blocks)]
            p = torch.cat(parts)
            if name == "phi":
                p = p.unflatten(-1, (N, D))[:, order].flatten(1)
        found[name] = p
    return found


@pytest.mark.parametrize("cls", MANY, ids=lambda c: c.name)
def test_renaming_the_streams_renames_the_result(cls: type[DepthMixer]) -> None:
    m, other = cls(D, 1, N, dtype=torch.float64), cls(D, 1, N, dtype=torch.float64)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(0.7 * torch.randn_like(p))
    order = torch.tensor([2, 0, 3, 1])
    other.load_state_dict(relabelled(m, order))
    x, y = torch.randn(3, N, D, dtype=torch.float64), torch.randn(3, D, dtype=torch.float64)
    (seen, c), (seen_too, c_too) = m.read(x), other.read(x[:, order])
    torch.testing.assert_close(seen, seen_too, rtol=0, atol=1e-12)
    torch.testing.assert_close(m.write(x, y, c)[:, order], other.write(x[:, order], y, c_too), rtol=0, atol=1e-12)


def test_post_norm_trains() -> None:
    network = Network(PostNorm)
    h, target = torch.randn(4, 5, D, dtype=torch.float64), torch.randn(4, 5, D, dtype=torch.float64)
    torch.testing.assert_close(network(h).square().mean(-1), torch.ones(4, 5, dtype=torch.float64), rtol=0, atol=1e-12)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (network(h) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
