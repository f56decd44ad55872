"""Attention over a stored list against torch's SDPA with an explicit bias, and against written-out transports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes.core.memory import List
from axes.core.monoids import Rotation
from axes.errors import IllegalUpdate, ShapeError
from axes.routes import dispatch
from axes.sequence import ALiBi, DeltaNet, FoX, PaTH, RoPE, SequenceLayer, SoftmaxAttention

B, T, D, H = 2, 11, 16, 2
TOLERANCE = 1e-10


def make(cls: type[SequenceLayer], **options: Any) -> SequenceLayer:
    module = cls(D, **{"heads": H, **options}, dtype=torch.float64)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def tokens() -> Tensor:
    return torch.randn(B, T, D, dtype=torch.float64)


def projected(m: SequenceLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (B, H, T, d)."""
    p = getattr(m.around, "plain", m.around)
    n = m.sizes.heads
    q, k, v = ((x @ w.weight.T).unflatten(-1, (n, -1)).transpose(1, 2) for w in (p.q_proj, p.k_proj, p.v_proj))
    return q, k, v


def check(m: SequenceLayer, x: Tensor, out: Tensor) -> None:
    """out (B, H, T, d_v), before the output projection."""
    p = getattr(m.around, "plain", m.around)
    assert (m(x)[0] - out.transpose(1, 2).flatten(-2) @ p.o_proj.weight.T).abs().max() < TOLERANCE


def test_softmax_attention() -> None:
    m, x = make(SoftmaxAttention), tokens()
    check(m, x, F.scaled_dot_product_attention(*projected(m, x), is_causal=True))


def test_alibi() -> None:
    m, x = make(ALiBi, heads=4), tokens()
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8], dtype=torch.float64)  # the paper's for four heads
    distance = torch.arange(T)[:, None] - torch.arange(T)
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)
    check(m, x, F.scaled_dot_product_attention(*projected(m, x), attn_mask=bias))


def test_fox() -> None:
    m, x = make(FoX), tokens()
    chart = m.around.charts["forget"]
    f = torch.sigmoid(x @ chart.up.weight.T + chart.up.bias)  # (B, T, H)
    bias = torch.full((B, H, T, T), -math.inf, dtype=torch.float64)
    for t in range(T):
        for i in range(t + 1):
            bias[:, :, t, i] = f[:, i + 1 : t + 1].log().sum(1)
    check(m, x, F.scaled_dot_product_attention(*projected(m, x), attn_mask=bias))


def turned(z: Tensor, position: Tensor) -> Tensor:
    """RoFormer's rotation by absolute position, as complex numbers on the pairs (j, j + d/2), in our direction."""
    half = z.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(z[..., :half], z[..., half:]) * torch.exp(-1j * position[:, None] * theta)
    return torch.cat((pairs.real, pairs.imag), -1)


def test_rope() -> None:
    m, x = make(RoPE), tokens()
    q, k, v = projected(m, x)
    position = torch.arange(T, dtype=torch.float64)
    check(m, x, F.scaled_dot_product_attention(turned(q, position), turned(k, position), v, is_causal=True))


def test_rope_is_the_papers_after_a_sign_change() -> None:
    """Negating the second half of queries and keys turns our direction into the paper's."""
    m, x = make(RoPE), tokens()
    q, k, v = projected(m, x)
    flip = torch.cat((torch.ones(D // H // 2), -torch.ones(D // H // 2))).double()
    position = torch.arange(T, dtype=torch.float64)
    q, k = turned(q * flip, -position), turned(k * flip, -position)
    check(m, x, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_rope_scores_depend_on_distance_only() -> None:
    """The same two tokens at distance 3 attend alike wherever they stand: shift the sequence by a prefix of no mass."""
    q, k, v = (torch.randn(1, 4, 1, 8, dtype=torch.float64) for _ in "qkv")
    alone, _ = dispatch.run(RoPE.update, {"q": q, "k": k, "v": v}, time=1)
    pad = torch.zeros(1, 7, 1, 8, dtype=torch.float64)
    shifted = {"q": torch.cat((pad, q), 1), "k": torch.cat((pad, k), 1), "v": torch.cat((pad, v), 1)}
    state = dispatch.run(RoPE.update, {n: z[:, :7] for n, z in shifted.items()}, time=1)[1]
    keys, values, mass, owed = state.theta
    silent = state._replace(theta=(keys, values, torch.full_like(mass, -math.inf), owed))
    later, _ = dispatch.run(RoPE.update, {"q": q, "k": k, "v": v}, silent, time=1)
    assert (later - alone).abs().max() < TOLERANCE


def test_path() -> None:
    """Yang et al. 2025: k_i^T H_{i+1} ... H_t q_t with H = I - beta w w^T multiplied out, w from its own projection."""
    m, x = make(PaTH), tokens()
    p, (q, k, v) = m.around, projected(m, x)
    low = x @ p.w_down.weight.T @ p.w_up.weight.T
    padded = F.pad(low, (0, 0, 2, 0))
    w = F.silu(sum(p.w_conv.weight[:, 0, j] * padded[:, j : j + T] for j in range(3)))
    w = F.normalize(w.unflatten(-1, (H, -1)), dim=-1)
    chart = p.plain.charts["beta"]
    beta = 2 * torch.sigmoid(x @ chart.up.weight.T + chart.up.bias)
    assert (beta > 1).any() and (beta < 1).any()
    eye = torch.eye(D // H, dtype=torch.float64)
    reflections = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]  # (B, T, H, d, d)
    scores = torch.full((B, H, T, T), -math.inf, dtype=torch.float64)
    for t in range(T):
        product = eye.expand(B, H, -1, -1)
        for i in range(t, -1, -1):
            scores[:, :, t, i] = torch.einsum("bhd,bhde,bhe->bh", k[:, :, i], product, q[:, :, t]) / math.sqrt(D // H)
            product = reflections[:, i] @ product
    check(m, x, scores.softmax(-1) @ v)


def test_gates_that_do_nothing_leave_plain_attention() -> None:
    q, k, v = (torch.randn(B, T, H, 4, dtype=torch.float64) for _ in "qkv")
    s = {"q": q, "k": k, "v": v}
    zero = torch.zeros(B, T, H, dtype=torch.float64)
    plain, _ = dispatch.run(SoftmaxAttention.update, s, time=1)
    fox, _ = dispatch.run(FoX.update, {**s, "forget": zero}, time=1)
    path, _ = dispatch.run(PaTH.update, {**s, "w": F.normalize(q, dim=-1), "beta": zero}, time=1)
    assert (fox - plain).abs().max() < TOLERANCE and (path - plain).abs().max() < TOLERANCE


# ---- options of layers ----------------------------------------------------------------------------------------------

LAYERS = (SoftmaxAttention, RoPE, ALiBi, FoX, PaTH)


def repeated(grouped: SequenceLayer, cls: type[SequenceLayer], queries: int) -> SequenceLayer:
    """The layer with a list for every head, those of a group alike."""
    heads = grouped.sizes.heads
    module = make(cls, heads=heads)
    lists, own = heads // queries, grouped.state_dict()
    with torch.no_grad():
        for name, p in module.named_parameters():
            x = own[name]
            if x.shape != p.shape:
                axis = next(i for i, (a, b) in enumerate(zip(x.shape, p.shape, strict=True)) if a != b)
                x = x.unflatten(axis, (lists, -1)).repeat_interleave(queries, axis).flatten(axis, axis + 1)
            p.copy_(x)
        for name, buffer in module.named_buffers():
            buffer.copy_(own[name].repeat_interleave(queries, 0))
    return module


@pytest.mark.parametrize("queries", (2, 4), ids=("grouped", "multi-query"))
@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_groups_of_queries_read_one_list(cls: type[SequenceLayer], queries: int) -> None:
    """As many lists alike would: outputs, gradients, packed sequences, token by token behind a state."""
    m = make(cls, heads=4, block=replace(cls.block, queries=queries))
    every, x = repeated(m, cls, queries), tokens().requires_grad_()
    found, expected = m(x)[0], every(x)[0]
    assert (found - expected).abs().max() < TOLERANCE
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    assert (a - b).abs().max() < TOLERANCE
    with torch.no_grad():
        one, bounds = x[:1], torch.tensor([0, 4, 4, 11])
        assert (m(one, cu_seqlens=bounds)[0] - every(one, cu_seqlens=bounds)[0]).abs().max() < TOLERANCE
        y, state = m(x[:, :6])
        assert state is not None and state.memory.theta[0].shape[1] == 4 // queries
        rest = []
        for t in range(6, T):
            y, state = m.step(x[:, t], state)
            rest.append(y)
    assert (torch.stack(rest, 1) - found[:, 6:]).abs().max() < TOLERANCE


def test_what_is_no_group_is_named() -> None:
    grouped = replace(SoftmaxAttention.block, queries=3)
    with pytest.raises(ShapeError, match="SoftmaxAttention: heads=4 are no groups of queries=3"):
        SoftmaxAttention(16, heads=4, block=grouped)
    with pytest.raises(IllegalUpdate, match="DeltaNet: several heads of queries read one list"):
        DeltaNet(16, heads=4, block=replace(DeltaNet.block, queries=2))


def test_a_sliding_window() -> None:
    """The last three pairs, and a state of no more; sequences packed and token by token."""
    m = make(SoftmaxAttention, update=replace(SoftmaxAttention.update, memory=List(window=3)))
    x = tokens()
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < 3)
    check(m, x, F.scaled_dot_product_attention(*projected(m, x), attn_mask=seen))
    with torch.no_grad():
        whole, last = m(x)
        assert last is not None and last.memory.theta[0].shape == (B, H, 3, D // H)
        packed, _ = m(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, T, B * T]))
        assert (packed[0].unflatten(0, (B, T)) - whole).abs().max() < TOLERANCE
        y, state = m(x[:, :5])
        for t in range(5, T):
            y, state = m.step(x[:, t], state)
            assert (y - whole[:, t]).abs().max() < TOLERANCE


def test_part_of_a_rotation() -> None:
    """The first pairs turn, by the angles of a narrower key; the others stay."""
    m, x = make(RoPE, d_k=8, d_v=8, update=replace(RoPE.update, monoid=Rotation(pairs=2))), tokens()
    q, k, v = projected(m, x)
    position = torch.arange(T, dtype=torch.float64)
    turning = [0, 1, 4, 5]  # pair j is (j, j + 4)

    def partly(z: Tensor) -> Tensor:
        z = z.clone()
        z[..., turning] = turned(z[..., turning], position)
        return z

    check(m, x, F.scaled_dot_product_attention(partly(q), partly(k), v, is_causal=True))


@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_decoding_does_not_copy_the_list(cls: type[SequenceLayer]) -> None:
    """Values are written into room behind the list: in 60 tokens a buffer is left behind for a larger one once."""
    m, x = make(cls), torch.randn(B, 80, D, dtype=torch.float64)
    buffers = set()
    with torch.no_grad():
        _, state = m(x[:, :10])
        for t in range(10, 80):
            _, state = m.step(x[:, t], state)
            assert state is not None
            buffers.add(state.memory.theta[1].untyped_storage().data_ptr())
        assert len(buffers) == 2
        assert (state.memory.theta[1] - m(x)[1].memory.theta[1]).abs().max() < TOLERANCE  # type: ignore[union-attr]
