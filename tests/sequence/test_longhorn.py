"""Longhorn: the exact layer against an independent least-squares solve, the diagonal one against algorithm 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes.core.chain import chain
from axes.routes import dispatch
from axes.sequence import DeltaNet, Longhorn, LonghornDiagonal, SequenceLayer

B, T, D, H = 2, 9, 16, 2
TOLERANCE = 1e-10


def make(cls: type[SequenceLayer], dtype: torch.dtype = torch.float64) -> SequenceLayer:
    module = cls(D, heads=H, dtype=dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return module


def tokens() -> Tensor:
    return torch.randn(B, T, D, dtype=torch.float64)


def solve(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """argmin_S |S - state|^2 + sum_i beta_i (S_i . k - v_i)^2, every row by its own normal equations."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    matrix = eye + beta[..., None, None] * (k[..., None, :, None] * k[..., None, None, :])
    right = state + (beta * v)[..., None] * k[..., None, :]
    return torch.linalg.solve(matrix, right[..., None])[..., 0]


def algorithm_1(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    eps = beta / (1 + beta * (k * k).sum(-1, keepdim=True))
    return (1 - eps[..., None] * (k * k)[..., None, :]) * state + (eps * v)[..., None] * k[..., None, :]


def block(m: SequenceLayer, x: Tensor, rule: Callable[..., Tensor]) -> Tensor:
    """The released block, one channel per row: in-projection, convolution, low-rank beta, D skip, SiLU gate."""
    p, inner = m.around, 2 * D
    xr, z = (x @ p.in_proj.weight.T).chunk(2, -1)
    padded = F.pad(xr, (0, 0, 3, 0))
    v = F.silu(sum(p.conv.weight[:, 0, j] * padded[:, j : j + T] for j in range(4)) + p.conv.bias)
    k, q = (v @ p.kq_proj.weight.T).chunk(2, -1)
    chart = p.charts["beta"]
    assert chart.down.weight.shape == (1, inner) and k.shape[-1] == 16  # r = ceil(D / 16), d_k = 16
    beta = torch.sigmoid(v @ chart.down.weight.T @ chart.up.weight.T + chart.up.bias)
    state, out = torch.zeros(B, inner, 16, dtype=torch.float64), []
    for t in range(T):
        state = rule(state, k[:, t], v[:, t], beta[:, t])
        out.append((state @ q[:, t, :, None])[..., 0])
    return ((torch.stack(out, 1) + p.skip * v) * F.silu(z)) @ p.out_proj.weight.T


@pytest.mark.parametrize(
    ("cls", "rule"), [(Longhorn, solve), (LonghornDiagonal, algorithm_1)], ids=["exact", "diagonal"]
)
def test_longhorn(cls: type[SequenceLayer], rule: Callable[..., Tensor]) -> None:
    m, x = make(cls), tokens()
    assert (m(x)[0] - block(m, x, rule)).abs().max() < TOLERANCE


def test_heads_only_split_the_inner_width() -> None:
    one, two = Longhorn(D, heads=1, dtype=torch.float64), Longhorn(D, heads=2, dtype=torch.float64)
    two.load_state_dict(one.state_dict())
    x = tokens()
    assert (one(x)[0] - two(x)[0]).abs().max() < TOLERANCE


def signal(keys: Tensor, beta: float = 0.7, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    shape = (*keys.shape[:-1], 3)
    found = {
        "q": keys,
        "k": keys,
        "v": torch.randn(shape, dtype=torch.float64),
        "beta": torch.full(shape, beta, dtype=torch.float64),
    }
    return {name: x.to(dtype) for name, x in found.items()}


def test_one_hot_keys_and_first_tokens_make_both_rules_one() -> None:
    hot = torch.eye(4, dtype=torch.float64)[torch.randint(4, (B, T, H))] * torch.rand(B, T, H, 1, dtype=torch.float64)
    dense = torch.randn(B, 2, H, 4, dtype=torch.float64)
    for s in (signal(hot), {n: x[:, :1] for n, x in signal(dense).items()}):
        exact, _ = dispatch.run(Longhorn.update, s, time=1)
        diagonal, _ = dispatch.run(LonghornDiagonal.update, s, time=1)
        assert (exact - diagonal).abs().max() < TOLERANCE
    s = signal(dense)
    gap = dispatch.run(Longhorn.update, s, time=1)[0] - dispatch.run(LonghornDiagonal.update, s, time=1)[0]
    assert gap.abs().max() > 1e-3, "cross-talk tells them apart"


def test_longhorn_is_the_delta_rule_with_a_derived_step() -> None:
    keys = torch.randn(B, T, H, 4, dtype=torch.float64)
    s = signal(keys)
    step = 0.7 / (1 + 0.7 * keys.square().sum(-1))
    expected, _ = dispatch.run(DeltaNet.update, {**s, "beta": step}, time=1)
    assert (dispatch.run(Longhorn.update, s, time=1)[0] - expected).abs().max() < TOLERANCE


def test_a_repeated_pair_has_two_fixed_points() -> None:
    """Longhorn recalls v; the diagonal rule recalls nnz(k) v."""
    keys = torch.tensor([1.0, -2.0, 0.0, 1.5], dtype=torch.float64).expand(1, 400, 1, 4)
    s = signal(keys)
    s["v"] = s["v"][:, :1].expand_as(s["v"])
    for cls, times in ((Longhorn, 1), (LonghornDiagonal, 3)):
        out, _ = dispatch.run(cls.update, s, time=1)
        assert (out[:, -1] - times * s["v"][:, -1]).abs().max() < 1e-9


def test_large_keys_neither_overshoot_nor_explode() -> None:
    """beta |k|^2 far above 2, where the explicit delta rule diverges: the transition stays a contraction."""
    keys = 40 * torch.randn(B, 60, H, 4, dtype=torch.float64)
    s = signal(keys, beta=0.9)
    assert dispatch.run(Longhorn.update, s, time=1)[0].abs().max() < 1e2
    explicit, _ = dispatch.run(DeltaNet.update, {**s, "beta": s["beta"][..., 0]}, time=1)
    assert not explicit.abs().max() < 1e50


@pytest.mark.parametrize("size", [1.0, 40.0, 1000.0])
def test_diagonal_gates_stay_above_zero_up_to_rounding(size: float) -> None:
    """1 - eps k_j^2 in float32 with one-hot keys, where it cancels; in half precision it would be -8e-3."""
    hot = size * torch.eye(4, dtype=torch.float64)[torch.arange(8) % 4].reshape(1, 8, 1, 4)
    s = signal(hot, 0.9, torch.float32)
    moved = {n: x.movedim(1, 2) for n, x in s.items()}
    gates = chain(LonghornDiagonal.update, moved).block
    assert gates is not None and gates.min() > -2e-7 and gates.max() <= 1
    rough, _ = dispatch.run(LonghornDiagonal.update, s, time=1)
    exact, _ = dispatch.run(LonghornDiagonal.update, {n: x.double() for n, x in s.items()}, time=1)
    assert (rough - exact).abs().max() < 1e-5 * exact.abs().max()


def test_autocast_keeps_gates_in_float32() -> None:
    m = make(LonghornDiagonal, torch.float32)
    x = tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        found, _, _ = m.around.enter(x, m.around.tails(B, x))
        _, state = m(x)
    assert found["beta"].dtype == torch.float32 and state.memory.theta[0].dtype == torch.float32
