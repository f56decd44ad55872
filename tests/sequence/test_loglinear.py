"""Log-linear attention against its paper's formula: every pair by the level that a greedy partition gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Entropic
from axes.core.memory import Fenwick, Matrix
from axes.core.monoids import Diagonal, Scalar, Zero
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import mixer
from axes.errors import AxesError, IllegalUpdate
from axes.moves import retarget
from axes.routes import dispatch, levels
from axes.routes.select import routes, select
from axes.sequence import GatedDeltaNet, LogLinearGatedDeltaNet, LogLinearMamba2, SequenceLayer
from axes.testing.checks import error
from axes.testing.examples import example
from tests.oracles import (
    B,
    Found,
    H,
    T,
    check_formula,
    convolutions,
    convolved,
    heads,
    mamba_gate,
    relative,
    rms,
    root,
    through,
)


def stretches(t: int) -> list[tuple[int, range]]:
    """Levels and tokens of the partition for token t: itself, then of [0, t) the largest powers of two that fit."""
    found, start = [(0, range(t, t + 1))], 0
    for level in range(t.bit_length(), 0, -1):
        if t - start >= 2 ** (level - 1):
            found.append((level, range(start, start + 2 ** (level - 1))))
            start += 2 ** (level - 1)
    assert start == t
    return found


def weighed(q: Tensor, k: Tensor, v: Tensor, maps: Tensor, w: Tensor) -> Found:
    """o_t = sum_s w_t[level of s] v_s k_s^T A_s+1 .. A_t q_t, pair by pair; the levels after the last token."""
    out, last = [], torch.zeros(B, H, w.shape[-1], v.shape[-1], k.shape[-1], dtype=v.dtype)
    for t in range(T):
        o = torch.zeros(B, H, v.shape[-1], dtype=v.dtype)
        for level, tokens in stretches(t):
            for s in tokens:
                carried = k[:, s]
                for i in range(s + 1, t + 1):
                    carried = (carried[..., None, :] @ maps[:, i])[..., 0, :]
                o = o + w[:, t, :, level, None] * v[:, s] * (carried * q[:, t]).sum(-1, keepdim=True)
                if t == T - 1:
                    last[:, :, level] += v[:, s, :, :, None] * carried[..., None, :]
        out.append(o)
    return torch.stack(out, 1), last


def level_weights(m: SequenceLayer, x: Tensor) -> Tensor:
    return F.softplus(through(m.around.charts["level"], x)).unflatten(-1, (H, -1))


def mamba2(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    z, mixed = (x @ p.in_proj.weight.T).split((p.inner, sum(p.widths)), -1)
    v, k, q = convolved(mixed, p.conv).split(p.widths, -1)
    dt = F.softplus(through(p.charts["decay"], x))
    gate = mamba_gate(p.charts["decay"], x)
    q, k = (y[:, :, None].expand(-1, -1, H, -1) for y in (q, k))
    maps = gate[..., None, None] * torch.eye(k.shape[-1], dtype=x.dtype)
    out, state = weighed(q, k, dt[..., None] * heads(v), maps, level_weights(m, x))
    y = (out + p.skip * heads(v)).flatten(2) * F.silu(z)
    return heads(rms(y, p.norm.weight)), state


def gated_delta_net(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    q, k, v = convolutions(p, x)
    beta, gate = torch.sigmoid(through(p.charts["beta"], x))[..., None], mamba_gate(p.charts["decay"], x)
    eye = torch.eye(k.shape[-1], dtype=x.dtype)
    maps = gate[..., None, None] * (eye - beta[..., None] * k[..., :, None] * k[..., None, :])
    out, state = weighed(q / root(q), k, beta * v, maps, level_weights(m, x))
    return rms(out, p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T)), state


@pytest.mark.parametrize(
    ("cls", "oracle"),
    [(LogLinearMamba2, mamba2), (LogLinearGatedDeltaNet, gated_delta_net)],
    ids=["mamba2", "gated-delta-net"],
)
def test_a_system_is_its_papers_formula(cls: type[SequenceLayer], oracle: Callable[..., Found]) -> None:
    check_formula(cls, oracle)


# ---- laws of the part


def test_levels_are_the_bits_of_what_tells_two_tokens_apart() -> None:
    """What the routes use, for every pair of 200 tokens, against the greedy partition."""
    for t in range(200):
        for level, tokens in stretches(t):
            assert all((t ^ s).bit_length() == level for s in tokens)
    table = levels._table(64, torch.device("cpu"))
    assert table[37, :38].tolist() == [(37 ^ s).bit_length() for s in range(38)]


def test_read_alike_the_levels_are_the_matrix_that_they_are_a_sum_of() -> None:
    """Of any rule: without weights, or with weights of one, the log-linear layer is the linear one."""
    update = LogLinearGatedDeltaNet.update
    signal = example(update, length=150, batch=(2, 2))
    signal = {n: x.movedim(2, 1) if isinstance(x, Tensor) else x for n, x in signal.items()}
    linear = dispatch.run(GatedDeltaNet.update, {n: x for n, x in signal.items() if n != "level"})
    ones = {**signal, "level": torch.ones_like(signal["level"])}  # type: ignore[arg-type]
    for given in (ones, {n: x for n, x in signal.items() if n != "level"}):
        out, state = dispatch.run(update, given)
        assert relative(out, linear[0]) < 1e-12 and relative(state.theta[0].sum(-3), linear[1].theta[0]) < 1e-12


@pytest.mark.parametrize("most", [2, 3, 5, 12])
def test_a_sequence_may_be_cut_anywhere(most: int) -> None:
    """The highest level takes what the others have no room for, at every place of a chunk and of the period."""
    update = StateUpdate(Alignment(), monoid=Scalar("decay"), memory=Fenwick(most))
    signal = {n: x for n, x in example(update, length=210).items() if isinstance(x, Tensor)}
    whole, state, at = reference.run(update, signal, time=1), None, 0
    outs = []
    for end in (1, 3, 64, 65, 130, 192, 200, 210):
        out, state = dispatch.run(update, {n: x[:, at:end] for n, x in signal.items()}, state)
        outs.append(out)
        at = end
    assert error((torch.cat(outs, 1), state), whole) < 1e-12


def test_sequences_at_unequal_places_share_a_batch() -> None:
    """States of packed sequences of unequal length go on together, each where it stands."""
    torch.manual_seed(0)
    m = LogLinearMamba2(16, heads=2, d_k=8, dtype=torch.float64)
    x, more = torch.randn(1, 90, 16, dtype=torch.float64), torch.randn(3, 70, 16, dtype=torch.float64)
    _, state = m(x, cu_seqlens=torch.tensor([0, 5, 70, 90]))
    assert state is not None and state.memory.theta[1][:, 0, 0, 0].tolist() == [5, 65, 20]
    y, after = m(more, state)
    for i, (a, b) in enumerate([(0, 5), (5, 70), (70, 90)]):
        alone, end = m(torch.cat((x[:, a:b], more[i : i + 1]), 1))
        assert relative(y[i], alone[0, b - a :]) < 1e-12
        assert relative(after.memory.theta[0][i], end.memory.theta[0][0]) < 1e-12


def test_the_state_is_of_one_size() -> None:
    m = LogLinearGatedDeltaNet(16, heads=2)
    _, state = m(torch.randn(1, 100, 16))
    _, later = m(torch.randn(1, 300, 16), state)
    assert state.memory.theta[0].shape == later.memory.theta[0].shape == (1, 2, 16, 8, 8)
    held = later.memory.theta[0].abs().amax((0, 1, 3, 4)) > 0
    assert held.tolist() == [i == 0 or bool(399 >> (i - 1) & 1) for i in range(16)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StateUpdate(SquaredError(), memory=Fenwick()), "erase along the key in every level"),
        (lambda: StateUpdate(Alignment(), Entropic(), memory=Fenwick()), "h is Euclidean"),
        (lambda: StateUpdate(Alignment(), algorithm=Momentum(0.9, "ema"), memory=Fenwick()), "no filters, read point"),
        (lambda: StateUpdate(Alignment(), algorithm=Step(writes=2), memory=Fenwick()), "one pair a datum"),
        (lambda: StateUpdate(Alignment(), monoid=Zero(), memory=Fenwick()), r"hold level 0 alone: use Matrix\(\)"),
        (lambda: StateUpdate(Alignment(), memory=Fenwick(1)), "2 to 24 levels, got 1"),
        (lambda: Fenwick(4, Per("w", "own", size=5)), "size 4, one for every level"),
        (lambda: Fenwick(4, Per("w", "row")), "one for every level"),
        (lambda: StateUpdate(Alignment(), algorithm=Step(Per("w", "own", size=4)), memory=Fenwick(4)), "BoundedList"),
    ],
    ids=["error", "h", "filter", "writes", "zero", "one level", "size", "shape", "rate"],
)
def test_what_levels_cannot_be_says_why(make: Callable[[], object], said: str) -> None:
    with pytest.raises(IllegalUpdate, match=said):
        make()


def test_levels_begin_empty_and_learn_no_first_memory() -> None:
    """It was a parameter that nothing read."""
    block = replace(LogLinearGatedDeltaNet.block, initial=0.5)
    with pytest.raises(IllegalUpdate, match=r"LogLinearGatedDeltaNet: .*initial=0\.5.* levels begin with none"):
        LogLinearGatedDeltaNet(16, heads=2, block=block)


def test_other_axes_say_why_not() -> None:
    """Levels are weighed by a query's reads: a training step reads its weights whole, a sublayer its streams."""
    update = replace(LogLinearMamba2.update, monoid=Scalar("decay"))
    for axis in ("data", "depth"):
        with pytest.raises(AxesError):
            retarget(update, axis)  # type: ignore[arg-type]
    with pytest.raises(AxesError):
        mixer(update)(8, 2)


def test_maps_without_a_chunked_form_are_interpreted() -> None:
    rows = StateUpdate(Alignment(), monoid=Diagonal("g", "row"), memory=Fenwick(4))
    assert select(rows).route == "interpreter" and "stand on keys" in str(routes(rows)["levels"])
    assert "no levels" in str(routes(StateUpdate(Alignment(), memory=Matrix()))["levels"])
