"""Systems with a state of fixed size against their papers' formulas in plain loops (`tests.oracles`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes import sequence
from axes.core.algorithms import Read, Step
from axes.core.costs import Alignment, Given, SquaredError
from axes.core.geometry import Entropic
from axes.core.memory import List
from axes.core.monoids import Diagonal, Hadamard, Monoid, Product, Rotation, Scalar, Zero
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import mixer
from axes.errors import IllegalUpdate, ShapeError
from axes.routes.select import routes
from axes.sequence import LRU, S4D, S5, Based, Mamba1, Mamba3, ReBased, SequenceLayer
from axes.sequence.features import Quadratic, Taylor
from tests.oracles import B, D, Found, H, Oracle, T, check_formula, convolved, heads, relative, rms, through, unit

_TURNS = Rotation(Per("turn", "row-pair", "real"))
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


def mamba3_mimo(m: SequenceLayer, x: Tensor) -> Found:
    """The released reference of four inputs and outputs a token: keys and values of the last token wait, turned."""
    p, half, inner, rank = m.around, 64, 2 * D, 4
    z, xs = (x @ p.zx_proj.weight.T).split(inner, -1)
    raw_b, raw_c = (y.unflatten(-1, (rank, 128)) for y in (x @ p.kq_proj.weight.T).chunk(2, -1))
    b = rms(raw_b, p.k_norm.weight)[:, :, None] + p.k_bias
    c = rms(raw_c, p.q_norm.weight)[:, :, None] + p.q_bias
    step, rate, trap = (x @ p.rates_proj.weight.T).chunk(3, -1)
    dt, share = F.softplus(step + p.dt_bias), torch.sigmoid(trap)
    alpha = torch.exp(-F.softplus(rate).clamp_min(1e-4) * dt)
    angles = torch.zeros(B, T, H, half, dtype=x.dtype)
    angles[..., :32] = torch.tanh(x @ p.angle_proj.weight.T)[:, :, None] * dt[..., None] * math.pi
    turn = torch.exp(1j * angles.cumsum(1))[:, :, :, None]
    b, c = (torch.complex(w[..., :half], w[..., half:]) * turn for w in (b, c))
    v, gate = (torch.einsum("bthp,hrp->bthrp", heads(y), w) for y, w in ((xs, p.v_factor), (z, p.z_factor)))
    h, before, out = torch.zeros(B, H, inner // H, half, dtype=torch.complex128), 0.0, []
    for t in range(T):
        now = torch.einsum("bhrp,bhrn->bhpn", v[:, t].to(b.dtype), b[:, t])
        a, s, d = (y[:, t, :, None, None] for y in (alpha, share, dt))
        h, before = a * h + (1 - s) * d * a * before + s * d * now, now
        y = torch.einsum("bhpn,bhrn->bhrp", h, c[:, t].conj()).real + p.skip[..., None] * v[:, t]
        out.append(torch.einsum("bhrp,hrp->bhp", y * F.silu(gate[:, t]), p.o_factor))
    last = h * turn[:, -1].conj()
    return torch.stack(out, 1), torch.cat((last.real, last.imag), -1)


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


def modes(m: SequenceLayer, x: Tensor, kept: Tensor, size: Tensor, factor: float) -> Found:
    """x_t = A x_{t-1} + size B u_t, y = factor Re(C x) + D u, with complex A, B and C of one state for all channels."""
    p, half = m.around, m.sizes.d_v // 2
    b = p.write.unflatten(0, (H, 2, half))
    c = p.read.unflatten(-1, (H, 2, half))
    b, c = torch.complex(b[:, 0], b[:, 1]), torch.complex(c[:, :, 0], c[:, :, 1])
    h, out = torch.zeros(B, H, half, dtype=torch.complex128), []
    for t in range(T):
        h = kept * h + size * torch.einsum("hnd,bd->bhn", b, x[:, t].to(b.dtype))
        out.append(factor * torch.einsum("dhn,bhn->bd", c, h).real + p.skip * x[:, t])
    return heads(F.gelu(torch.stack(out, 1))), torch.cat((h.real, h.imag), -1)[..., None]


def s5(m: SequenceLayer, x: Tensor) -> Found:
    """Smith et al. 2023: zero-order hold of every mode, conjugates left out."""
    p = m.around
    a = torch.complex(-torch.exp(p.log_rate), p.frequency)
    kept = torch.exp(a * torch.exp(p.log_size))
    return modes(m, x, kept, (kept - 1) / a, 2.0)


def lru(m: SequenceLayer, x: Tensor) -> Found:
    """Orvieto et al. 2023, eqs. 5 to 8."""
    p = m.around
    kept = torch.exp(torch.complex(-torch.exp(p.log_rate), torch.exp(p.frequency)))
    return modes(m, x, kept, torch.exp(p.log_size), 1.0)


ORACLES: dict[str, Oracle] = {
    "s4d": s4d,
    "s5": s5,
    "lru": lru,
    "based": based,
    "rebased": rebased,
    "mamba3": mamba3,
    "mamba3-mimo": mamba3_mimo,
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_system_is_its_papers_formula(name: str) -> None:
    check_formula(CLASSES[name], ORACLES[name])


def read_twice(m: SequenceLayer, x: Tensor) -> Found:
    """A gated delta rule whose heads have two queries each, normed and gated like two heads."""
    p = m.around
    q, k, v = (convolved(x @ getattr(p, f"{n}_proj").weight.T, getattr(p, f"{n}_conv")) for n in "qkv")
    q, k, v = unit(q.unflatten(-1, (H, 2, -1))), unit(heads(k)), heads(v)
    beta, gate = (torch.sigmoid(through(p.charts[n], x))[..., None, None] for n in ("beta", "decay"))
    state, out = torch.zeros(B, H, v.shape[-1], k.shape[-1], dtype=x.dtype), []
    for t in range(T):
        state = gate[:, t] * state
        error = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + beta[:, t] * torch.einsum("bhv,bhk->bhvk", error, k[:, t])
        out.append(torch.einsum("bhvk,bhrk->bhrv", state, q[:, t]).flatten(1, 2))
    return rms(torch.stack(out, 1), p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T, 2 * H)), state


def test_several_queries_of_a_head_read_one_state() -> None:
    """Of any tuple: `Step(reads=2)` in the usual block."""
    step = Step(Per("beta"), at="gated", reads=2)
    check_formula(sequence.layer(StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=step)), read_twice)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StateUpdate(Alignment(), Entropic(), algorithm=Step(reads=2), memory=List()), "heads of a group"),
        (lambda: StateUpdate(Given(), algorithm=Step(0.1, reads=2)), "what is shown of a parameter is the whole of it"),
        (lambda: Step(reads=0), "reads must be at least 1"),
        (lambda: sequence.layer(StateUpdate(Alignment(), algorithm=Step(reads=2)), block=Mamba1.block)(8), "one query"),
        (lambda: mixer(StateUpdate(Alignment(), algorithm=Step(reads=2)))(8, 2), "by the mixer's own reads"),
    ],
    ids=["list", "parameter", "none", "block", "depth"],
)
def test_who_has_no_several_reads_says_so(make: Callable[[], object], said: str) -> None:
    with pytest.raises(IllegalUpdate, match=said):
        make()


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


@pytest.mark.parametrize("keyed", [False, True])
def test_rows_that_turn_are_complex_numbers(keyed: bool) -> None:
    """In either order beside their gate, beside maps of keys, and twice: one element that acts as the product does."""
    gate, turn = Diagonal(Per("decay", "row-pair", "unit"), "row-pair"), Rotation(Per("turn", "row-pair", "real"))
    state = torch.randn(6, 5 + keyed, dtype=torch.float64)
    signal = {"decay": -torch.rand(3, dtype=torch.float64), "turn": torch.randn(3, dtype=torch.float64)}
    signal |= {"g": -torch.rand(6, dtype=torch.float64)}
    more = (Diagonal("g"), Rotation(30.0)) if keyed else ()
    one, other = (Product((*more, *p)).element(signal, 1.0, state) for p in ((gate, turn), (turn, gate)))
    by_keys = Product(more).element(signal, 1.0, state).act(state) if keyed else state
    z = torch.complex(*by_keys.chunk(2, -2)) * torch.exp(torch.complex(signal["decay"], signal["turn"]))[:, None]
    for element in (one, other):
        assert relative(element.act(state), torch.cat((z.real, z.imag))) < 1e-13
    assert relative(one.then(other).act(state), other.act(one.act(state))) < 1e-13


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Product((Diagonal("g", "row"), _TURNS)), "one gate for both of a pair"),
        (lambda: Product((Hadamard("g"), _TURNS)), "one gate for both of a pair"),
        (lambda: Product((_TURNS, Zero())), "keeps nothing turns nothing"),
    ],
    ids=["rows", "entries", "zero"],
)
def test_rows_turn_beside_gates_of_pairs_alone(make: Callable[[], Monoid], said: str) -> None:
    with pytest.raises(IllegalUpdate, match=said):
        StateUpdate(Alignment(), monoid=make())


def test_what_cannot_turn_says_so() -> None:
    with pytest.raises(IllegalUpdate, match="gates on the key side"):
        StateUpdate(Alignment(), Entropic(), _TURNS, memory=List())
    with pytest.raises(IllegalUpdate, match="a normaliser needs scalar or diagonal gates"):
        StateUpdate(Alignment(), monoid=_TURNS, algorithm=Step(debias=True))
    with pytest.raises(ShapeError, match="values must be of even width, got 5"):
        S5(D, heads=H, d_v=5)
    early = StateUpdate(Alignment(), monoid=_TURNS, algorithm=Step(read=Read(1.0, 0.5)))
    assert "read in two frames" in str(routes(early)["chain"])


@pytest.mark.parametrize("cls", [S5, LRU])
def test_modes_begin_inside_the_unit_disc(cls: type[SequenceLayer]) -> None:
    """HiPPO-N's eigenvalues have the real part -1/2, and B and C given in its eigenvectors are real matrices there."""
    m = cls(32, heads=2, dtype=torch.float64)
    decay, angle, _, _ = m.around._spectrum(torch.float64)  # type: ignore[operator]
    assert (decay < 0).all() and (decay > -0.11).all() and (angle > 0).all()
    if cls is S5:
        n = m.sizes.d_v
        p = (torch.arange(n, dtype=torch.float64) + 0.5).sqrt()
        hippo = -(p[:, None] * p).tril(-1) + (p[:, None] * p).triu(1)
        found = torch.linalg.eigvals(hippo).imag.sort().values[n // 2 :]
        assert relative(m.around.frequency[0], found) < 1e-9  # type: ignore[index]


def test_a_block_says_which_tuple_it_is_for() -> None:
    with pytest.raises(IllegalUpdate, match="Trapezoid supplies two pairs a token"):
        sequence.layer(sequence.Mamba2.update, block=Mamba3.block)(16)
    with pytest.raises(IllegalUpdate, match="Diagonalised supplies k, v, q, unit gates 'decay' and angles"):
        sequence.layer(sequence.Mamba2.update, block=S4D.block)(16)
    with pytest.raises(ShapeError, match="d_k even and heads \\* d_v = d_model, got d_k=5"):
        S4D(D, heads=H, d_k=5)
