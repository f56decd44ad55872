"""Heads that share queries and keys, against layers in which these are written out for every head, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import axes
from axes.errors import ShapeError
from axes.sequence import (
    GLA,
    KDA,
    RWKV7,
    DeltaNet,
    DeltaNetReflective,
    GatedDeltaNet,
    GatedDeltaNetPrev,
    Longhorn,
    Mamba2,
    RetNet,
    SequenceLayer,
    SoftmaxAttention,
)

D, H, HV, K, V = 12, 2, 6, 4, 5
KEYS = ("q_proj", "k_proj", "q_conv", "k_conv")
SHARING = (DeltaNet, DeltaNetReflective, GatedDeltaNet, GatedDeltaNetPrev, KDA, GLA, RetNet)

sharing = pytest.mark.parametrize("cls", SHARING, ids=lambda c: c.name)


def spread(x: Tensor, groups: int = H) -> Tensor:
    """Rows of every key head for each of its value heads."""
    return x.unflatten(0, (groups, -1)).repeat_interleave(HV // groups, 0).flatten(0, 1)


def pair(cls: type[SequenceLayer]) -> tuple[SequenceLayer, SequenceLayer]:
    """A layer whose heads share keys, and one of as many key heads as value heads that computes the same."""
    few = cls(D, heads=H, d_k=K, d_v=V, num_v_heads=HV, dtype=torch.float64)
    many = cls(D, heads=HV, d_k=K, d_v=V, dtype=torch.float64)
    with torch.no_grad():
        for p in few.parameters():
            p.add_(0.1 * torch.randn_like(p))
    held = few.state_dict()
    many.load_state_dict({n: spread(x) if n.split(".")[1] in KEYS else x for n, x in held.items()})
    return few, many


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@sharing
def test_sequences_states_and_gradients(cls: type[SequenceLayer]) -> None:
    few, many = pair(cls)
    assert few.state_dict()["around.q_proj.weight"].shape == (H * K, D)
    x = torch.randn(2, 70, D, dtype=torch.float64, requires_grad=True)
    results = []
    for m in (few, many):
        y, state = m(x)
        assert state is not None and state.memory.theta[0].shape == (2, HV, V, K)
        y, state = m(x[:, :3] * 2, state)  # also after a state
        loss = y.square().sum() + state.memory.theta[0].sin().sum()
        results.append((y, state.memory.theta[0], torch.autograd.grad(loss, [x, *m.parameters()])))
    (y, s, grads), (wide_y, wide_s, wide) = results
    close(y, wide_y)
    close(s, wide_s)
    close(grads[0], wide[0])
    for (name, _), g, w in zip(few.named_parameters(), grads[1:], wide[1:], strict=True):
        if name.split(".")[1] in KEYS:  # what was written out comes together again
            w = w.unflatten(0, (H, HV // H, K)).sum(1).flatten(0, 1)
        close(g, w)


@sharing
def test_token_by_token_and_packed(cls: type[SequenceLayer]) -> None:
    few, many = pair(cls)
    x = torch.randn(1, 9, D, dtype=torch.float64)
    cu = torch.tensor([0, 4, 4, 9])
    with torch.no_grad():
        (y, state), (want, wide) = few(x, cu_seqlens=cu), many(x, cu_seqlens=cu)
        assert state is not None and wide is not None
        close(y, want)
        for a, b in ((state, wide),):
            more = torch.randn(3, D, dtype=torch.float64)
            close(few.step(more, a)[0], many.step(more, b)[0])
        whole, last = few(x)
        state = None
        for t in range(9):
            y_t, state = few.step(x[:, t], state)
            close(y_t, whole[:, t])
        close(state.memory.theta[0], last.memory.theta[0])


def test_groups_of_mamba2() -> None:
    """k, q of a group for each of its heads, and a norm over the group's heads alone."""
    made = {g: Mamba2(D, heads=HV, d_k=K, d_v=V, block=replace(Mamba2.block, groups=g), dtype=torch.float64)
            for g in (H, HV)}  # fmt: skip
    few, many = made[H], made[HV]
    cuts = [HV * V, HV * V, H * K, H * K]  # z, x, B, C
    held = few.state_dict()
    for name in ("in_proj.weight", "conv.weight", "conv.bias"):
        parts = list(held[f"around.{name}"].split(cuts if name.startswith("in") else cuts[1:]))
        parts[-2:] = [spread(x) for x in parts[-2:]]
        held[f"around.{name}"] = torch.cat(parts)
    many.load_state_dict(held)
    x = torch.randn(2, 9, D, dtype=torch.float64)
    with torch.no_grad():
        (signal, _, (z, v)), (wide, _, _) = (m.around.enter(x, m.around.tails(2, x)) for m in (few, many))
        for n in "kq":
            close(signal[n].repeat_interleave(HV // H, 2), wide[n])
        (reads, _), (wide_reads, _) = (m._recur(s, m._init_memory(2, x)) for m, s in ((few, signal), (many, wide)))
        close(reads, wide_reads)
        gated = (reads + few.around.skip * v) * torch.nn.functional.silu(z).unflatten(-1, (HV, V))
        groups = gated.unflatten(2, (H, HV // H))
        normed = groups / (groups.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()
        want = (normed.flatten(2) * few.around.norm.weight) @ few.around.out_proj.weight.mT
        close(few(x)[0], want)


def test_what_runs_is_told() -> None:
    """The forms for Hopper of a delta rule take a key for every value."""
    few, many = (GatedDeltaNet(256, heads=2, num_v_heads=n) for n in (4, 2))
    assert "portable kernels: heads share keys" in axes.explain(few, "cuda:sm_90", torch.bfloat16)
    assert "portable" not in axes.explain(many, "cuda:sm_90", torch.bfloat16)
    assert "heads=2, num_v_heads=4, d_k=128, d_v=128" in repr(few)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GatedDeltaNet(16, heads=2, num_v_heads=3), "num_v_heads=3 is not a multiple of heads=2"),
        (lambda: GatedDeltaNet(16, heads=2, num_v_heads=1), "num_v_heads=1 is not a multiple of heads=2"),
        (lambda: GatedDeltaNet(16, heads=2, num_v_heads=0), "num_v_heads must be at least 1, got 0"),
        (lambda: Mamba2(16, heads=2, num_v_heads=4), "its block SSD .* give SSD.groups=...."),
        (lambda: Longhorn(16, heads=2, num_v_heads=4), "its block Mamba has one query and key for all heads"),
        (lambda: RWKV7(16, heads=2, num_v_heads=4), "its block RWKV7Block has a query and a key for every head"),
        (lambda: SoftmaxAttention(16, heads=2, num_v_heads=4), "a list stores them in pairs"),
        (
            lambda: Mamba2(16, heads=4, block=replace(Mamba2.block, groups=3)),
            "heads=4 do not form groups=3 of equal size",
        ),
        (
            lambda: axes.dispatch.run(
                GatedDeltaNet.update,
                {"q": torch.ones(1, 2, 2, 4), "k": torch.ones(1, 2, 2, 4), "v": torch.ones(1, 2, 3, 4),
                 "decay": torch.zeros(1, 2, 3), "beta": torch.zeros(1, 2, 3)},
            ),
            "q has 2 heads and v 3, which is not a multiple",
        ),
    ],
)  # fmt: skip
def test_refusals(make: object, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        make()  # type: ignore[operator]
