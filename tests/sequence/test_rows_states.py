"""Systems with a state of fixed size against their papers' formulas in plain loops (`tests.oracles`)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes import sequence
from axes.core.monoids import Diagonal, Product, Rotation
from axes.core.rates import Per
from axes.errors import IllegalUpdate, ShapeError
from axes.sequence import S4D, Based, Mamba3, ReBased, SequenceLayer
from axes.sequence.features import Quadratic, Taylor
from tests.oracles import B, D, Found, H, Oracle, T, check_formula, heads, relative, rms

CLASSES = {cls.name: cls for cls in sequence.ALL}


def by_kernel(q: Tensor, k: Tensor, v: Tensor, kernel: object) -> Tensor:
    """o_t = sum_i kappa(q_t, k_i) v_i / sum_i kappa(q_t, k_i), without any feature."""
    out = []
    for t in range(T):
        weights = torch.stack([kernel((q[:, t] * k[:, i]).sum(-1)) for i in range(t + 1)], -1)  # type: ignore[operator]
        weights = weights / weights.sum(-1, keepdim=True)
        out.append(torch.einsum("bhi,bihd->bhd", weights, v[:, : t + 1]))
    return torch.stack(out, 1)


def based(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))
    assert q.shape[-1] == 16
    return by_kernel(q, k, v, lambda s: 1 + s / 4 + (s / 4) ** 2 / 2), None


def rebased(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))

    def normed(z: Tensor) -> Tensor:
        centred = z - z.mean(-1, keepdim=True)
        unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return p.features.norm.weight * unit + p.features.norm.bias

    return by_kernel(normed(q), normed(k), v, lambda s: s**2 / 16), None


def mamba3(m: SequenceLayer, x: Tensor) -> Found:
    """The released reference: B and C turned by cumulated angles, h = alpha h + beta (B x)_{t-1} + gamma B x."""
    p, half = m.around, 64
    inner = 2 * D
    z, xs = (x @ p.zx_proj.weight.T).split(inner, -1)
    raw_b, raw_c = (x @ p.kq_proj.weight.T).chunk(2, -1)
    b = rms(raw_b, p.k_norm.weight)[:, :, None] + p.k_bias
    c = rms(raw_c, p.q_norm.weight)[:, :, None] + p.q_bias
    step, rate, trap = (x @ p.rates_proj.weight.T).chunk(3, -1)
    dt = F.softplus(step + p.dt_bias)
    alpha = torch.exp(-F.softplus(rate).clamp_min(1e-4) * dt)
    share = torch.sigmoid(trap)
    beta, gamma = (1 - share) * dt * alpha, share * dt
    angles = torch.zeros(B, T, H, half, dtype=x.dtype)
    angles[..., :32] = torch.tanh(x @ p.angle_proj.weight.T)[:, :, None] * dt[..., None] * math.pi
    turn = torch.exp(1j * angles.cumsum(1))
    b, c = (torch.complex(w[..., :half], w[..., half:]) * turn for w in (b, c))
    u = heads(xs)
    h, before, out = torch.zeros(B, H, inner // H, half, dtype=torch.complex128), 0.0, []
    for t in range(T):
        now = u[:, t, ..., None] * b[:, t, :, None]
        h = alpha[:, t, :, None, None] * h + beta[:, t, :, None, None] * before + gamma[:, t, :, None, None] * now
        before = now
        out.append((h * c[:, t, :, None].conj()).sum(-1).real)
    last = h * turn[:, -1, :, None].conj()  # keys in the frame of the last token
    y = (torch.stack(out, 1) + p.skip * u) * heads(F.silu(z))
    return y, torch.cat((last.real, last.imag), -1)


def s4d(m: SequenceLayer, x: Tensor) -> Found:
    """Gu et al. 2022: complex modes, zero-order hold, y = 2 Re(C h) + D u for every channel."""
    p = m.around
    a = torch.complex(-torch.exp(p.log_rate), p.frequency)
    kept = torch.exp(a * torch.exp(p.log_dt))
    b, c = (kept - 1) / a, torch.complex(*p.read.chunk(2, -1))
    u = heads(x)
    h, out = torch.zeros(B, H, D // H, a.shape[-1], dtype=torch.complex128), []
    for t in range(T):
        h = kept[:, None] * h + b[:, None] * u[:, t, ..., None]
        out.append(2 * (c[:, None] * h).sum(-1).real)
    return heads(F.gelu(torch.stack(out, 1).flatten(2) + p.skip * x)), torch.cat((h.real, h.imag), -1)


ORACLES: dict[str, Oracle] = {
    "s4d": s4d,
    "based": based,
    "rebased": rebased,
    "mamba3": mamba3,
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_system_is_its_papers_formula(name: str) -> None:
    check_formula(CLASSES[name], ORACLES[name])


# ---- facts of the parts


@pytest.mark.parametrize("made", [Taylor(), Quadratic()], ids=repr)
def test_features_have_the_kernels_products(made: Taylor | Quadratic) -> None:
    features = made.build(made.features(5), {"dtype": torch.float64})
    assert features.width == 5 and made.width(made.features(5)) == 5
    q, k = torch.randn(2, 7, 5, dtype=torch.float64)
    if isinstance(made, Taylor):
        s = (q * k).sum(-1) / math.sqrt(5)
        expected = 1 + s + s**2 / 2
    else:
        expected = (features.norm(q) * features.norm(k)).sum(-1) ** 2 / 5  # type: ignore[operator]
    assert relative((features(q) * features(k)).sum(-1), expected) < 1e-14


def test_widths_that_no_vector_has_are_named() -> None:
    with pytest.raises(ShapeError, match=r"Taylor: no vector has d_k=154 features: take 15 \(of 4\)"):
        Based(D, heads=H, d_k=154)
    with pytest.raises(ShapeError, match="Quadratic: no vector has d_k=5 features"):
        ReBased(D, heads=H, d_k=5)


def test_a_token_brings_the_last_pair_turned_along() -> None:
    """Mamba-3 whose share is 1 is a chain of one write: the last token's pair has the rate zero."""
    m = Mamba3(D, heads=H, dtype=torch.float64)
    x = torch.randn(B, T, D, dtype=torch.float64)
    signal, _, _ = m.around.enter(x, m.init_state(B).tails)
    dt = signal["write"].sum(-1)  # alpha (1 - s) dt + s dt
    assert (signal["write"] > 0).all() and (dt < 1).all()
    assert relative(signal["k"][:, 1:, :, 0].norm(dim=-1), signal["k"][:, :-1, :, 1].norm(dim=-1)) < 1e-14  # turned


def test_gates_of_pairs_commute_with_rotations() -> None:
    """In either order, and one element stays an element: no matrix is made of it."""
    gate = Diagonal(Per("decay", "pair", "unit"), "pair")
    turn, state = Rotation(Per("angle", "pair", "real")), torch.randn(3, 6, dtype=torch.float64)
    signal = {"decay": -torch.rand(3, dtype=torch.float64), "angle": torch.randn(3, dtype=torch.float64)}
    one, other = (Product(parts).element(signal, 1.0, state) for parts in ((gate, turn), (turn, gate)))
    assert one.dense is None and other.dense is None and one.paired and other.paired
    by_hand = torch.complex(*state.chunk(2, -1)) * torch.exp(torch.complex(signal["decay"], signal["angle"]))
    twice = by_hand * torch.exp(torch.complex(signal["decay"], signal["angle"]))
    for element, expected in ((one, by_hand), (other, by_hand), (one.then(other), twice)):
        acted = torch.complex(*element.act(state).chunk(2, -1))
        assert relative(torch.view_as_real(acted), torch.view_as_real(expected)) < 1e-13


def test_a_block_says_which_tuple_it_is_for() -> None:
    with pytest.raises(IllegalUpdate, match="Trapezoid supplies two pairs a token"):
        sequence.layer(sequence.Mamba2.update, block=Mamba3.block)(16)
    with pytest.raises(IllegalUpdate, match="Diagonalised supplies k, v, q, unit gates 'decay' and angles"):
        sequence.layer(sequence.Mamba2.update, block=S4D.block)(16)
    with pytest.raises(ShapeError, match="d_k even and heads \\* d_v = d_model, got d_k=5"):
        S4D(D, heads=H, d_k=5)
