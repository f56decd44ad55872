"""Systems whose signals depend on the last read, against torch.nn.GRU and the paper's formula in a plain loop."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axes import explain
from axes.errors import AxesError, IllegalUpdate, ShapeError
from axes.parallel.group import Group
from axes.parallel.split import Split
from axes.sequence import GRU, M2RNN, SLSTM, SequenceLayer
from axes.sequence.hybrids import Beside
from tests.oracles import D, Found, check_formula, convolved, heads, make, mamba_gate, relative, rms


def gru(m: SequenceLayer, x: Tensor) -> Found:
    """Cho et al. 2014 with the reset behind the matrix, head by head."""
    p = m.around
    pre = F.linear(x, p.in_proj.weight, p.in_proj.bias).unflatten(-1, (m.sizes.heads, 3, -1))
    out, states = [], [x.new_zeros(x.shape[0], m.sizes.d_v) for _ in range(m.sizes.heads)]
    for t in range(x.shape[1]):
        for i, h in enumerate(states):
            u = [h @ p.weight[i, :, g] + p.bias[i, g] for g in range(3)]
            r, z = (1 / (1 + torch.exp(-pre[:, t, i, g] - u[g])) for g in range(2))
            states[i] = z * h + (1 - z) * torch.tanh(pre[:, t, i, 2] + r * u[2])
        out.append(torch.stack(states, 1))
    return torch.stack(out, 1), out[-1][..., None]


def slstm(m: SequenceLayer, x: Tensor) -> Found:
    """Beck et al. 2024, eqs. 8-18: c and n with the stabiliser m, the largest log-weight so far."""
    p, heads = m.around, m.sizes.heads
    pre = F.linear(x, p.in_proj.weight, p.in_proj.bias).unflatten(-1, (heads, 4, -1))
    h = c = n = x.new_zeros(x.shape[0], heads, m.sizes.d_v)
    largest, out = torch.full_like(h, -torch.inf), []
    for t in range(x.shape[1]):
        i, f, z, o = (pre[:, t] + torch.einsum("bhv,hvgw->bhgw", h, p.weight) + p.bias).unbind(2)
        before, largest = largest, torch.maximum(F.logsigmoid(f) + largest, i)
        kept, taken = torch.exp(F.logsigmoid(f) + before - largest), torch.exp(i - largest)
        c, n = kept * c + taken * torch.tanh(z), kept * n + taken
        h = torch.sigmoid(o) * c / n
        out.append(h)
    return rms(torch.stack(out, 1), p.norm.weight), (c / n)[..., None]


def m2rnn(m: SequenceLayer, x: Tensor) -> Found:
    """Mishra et al. 2026: H (keys, values), every entry by its own sum."""
    p, around = m.around, m.around.around
    q, k, v = (heads(convolved(x @ getattr(around, f"{n}_proj").weight.T, getattr(around, f"{n}_conv"))) for n in "qkv")
    f = mamba_gate(around.charts["decay"], x)
    state, out = x.new_zeros(x.shape[0], m.sizes.heads, m.sizes.d_k, m.sizes.d_v), []
    for t in range(x.shape[1]):
        after = []
        for i in range(m.sizes.d_k):
            heard = (state[:, :, i, :, None] * p.weight).sum(-2)
            z = torch.tanh(heard + k[:, t, :, i, None] * v[:, t])
            after.append(f[:, t, :, None] * state[:, :, i] + (1 - f[:, t, :, None]) * z)
        state = torch.stack(after, 2)
        out.append((q[:, t, ..., None] * state).sum(-2))
    return rms(torch.stack(out, 1), around.norm.weight) * F.silu(heads(x @ around.g_proj.weight.T)), state.mT


ROWS = ((GRU, gru), (SLSTM, slstm), (M2RNN, m2rnn))


@pytest.mark.parametrize(("cls", "oracle"), ROWS, ids=("gru", "slstm", "m2rnn"))
def test_a_row_is_its_formula(cls: type[SequenceLayer], oracle: object) -> None:
    check_formula(cls, oracle)  # type: ignore[arg-type]
    check_formula(cls, oracle, implementation="reference")  # type: ignore[arg-type]


def test_one_head_is_torchs_gru() -> None:
    m = GRU(D, heads=1, dtype=torch.float64)
    peer, x = nn.GRU(D, D, batch_first=True, dtype=torch.float64), torch.randn(3, 11, D, dtype=torch.float64)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.2 * torch.randn_like(p))
        peer.weight_ih_l0.copy_(m.around.in_proj.weight)
        peer.bias_ih_l0.copy_(m.around.in_proj.bias)
        peer.weight_hh_l0.copy_(m.around.weight[0].permute(1, 2, 0).flatten(0, 1))
        peer.bias_hh_l0.copy_(m.around.bias[0].flatten())
    with torch.no_grad():
        _, start = m(torch.randn(3, 2, D, dtype=torch.float64))
    got, state = m(x, start)
    want, last = peer(x, start.memory.theta[0][None, :, 0, :, 0])
    want = want @ m.around.o_proj.weight.T
    assert relative(got, want) < 1e-12 and relative(state.memory.theta[0][:, 0, :, 0], last[0]) < 1e-12
    weight, p = torch.randn_like(got), m.around
    ours = torch.autograd.grad((got * weight).sum(), [p.in_proj.weight, p.in_proj.bias, p.weight, p.bias])
    theirs = [peer.weight_ih_l0, peer.bias_ih_l0, peer.weight_hh_l0, peer.bias_hh_l0]
    matrix, bias = ours[2][0].permute(1, 2, 0).flatten(0, 1), ours[3].flatten()
    want_grads = torch.autograd.grad((want * weight).sum(), theirs)
    for a, b in zip((*ours[:2], matrix, bias), want_grads, strict=True):
        assert relative(a, b) < 1e-12


def test_inputs_of_any_size_leave_numbers() -> None:
    """exp(i) of 1,000 has no float; what is carried is its log."""
    m = make(SLSTM)
    x = 1e3 * torch.randn(2, 12, D, dtype=torch.float64, requires_grad=True)
    y, state = m(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.isfinite(y).all() and torch.isfinite(grad).all() and torch.isfinite(state.memory.theta[0]).all()


def test_no_slower_than_a_loop_over_torchs_cells() -> None:
    """Processor time of forward and backward, the least of some; a loop over cells takes about twice as long."""
    torch.manual_seed(0)
    m, cell, x = GRU(64, heads=1), nn.GRUCell(64, 64), torch.randn(8, 128, 64)
    out = nn.Linear(64, 64, bias=False)

    def ours() -> None:
        m(x)[0].sum().backward()

    def loop() -> None:
        h, outs = x.new_zeros(8, 64), []
        for z in x.unbind(1):
            h = cell(z, h)
            outs.append(h)
        out(torch.stack(outs, 1)).sum().backward()

    def least(call) -> float:  # type: ignore[no-untyped-def]
        times = []
        for _ in range(5):
            begun = time.process_time()
            call()
            times.append(time.process_time() - begun)
        return min(times)

    ours(), loop()
    assert least(ours) < 1.2 * least(loop)


def test_what_runs_is_said() -> None:
    assert "recurrent by torch" in explain("gru") and "signals depend on the last read" in explain("slstm")
    assert "recurrent by triton" in explain("gru", device="cuda:sm_90")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(IllegalUpdate, match="keep tuple and d_k"):
        GRU(16, heads=2, d_k=4, d_v=4)
    with pytest.raises(ShapeError, match="neither queries nor keys"):
        GRU(16, heads=2, num_v_heads=4)
    with pytest.raises(IllegalUpdate, match="decay and write, one number a head each"):
        M2RNN(16, heads=2, update=GRU.update)
    two = cast(Group, SimpleNamespace(size=2))
    for layer in (GRU, SLSTM, M2RNN):
        with pytest.raises(AxesError, match="cannot be split over 2 processes.*share out sequences"):
            Split(layer.__name__, layer(16, heads=2), two, states=False)


def test_beside_another_layer() -> None:
    m, x = Beside(GRU(16, heads=2), SLSTM(16, heads=2)), torch.randn(2, 5, 16)
    y, _ = m(x)
    assert torch.allclose(y, sum(layer(x)[0] for layer in m.layers), atol=1e-6)
