"""Systems that keep pairs, or slots for them, against their papers' formulas in plain loops (`tests.oracles`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes import sequence
from axes.core import reference
from axes.core.algorithms import Momentum, Step
from axes.core.costs import Alignment, SquaredError
from axes.core.geometry import Entropic
from axes.core.memory import BoundedList, List
from axes.core.monoids import Diagonal
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError
from axes.moves import retarget
from axes.routes import dispatch
from axes.sequence import GSA, MLA, Persistent, SequenceLayer, SlidingWindow
from axes.sequence.latent import Latent
from axes.testing.examples import example
from tests.oracles import B, D, Found, H, Oracle, T, check_formula, heads, make, relative, rms, root, through

CLASSES = {cls.name: cls for cls in sequence.ALL}


def turned(x: Tensor, base: float = 10000.0) -> Tensor:
    """(B, T, ..., d) as complex numbers x_j + i x_{j + d/2}, turned backwards by the position of the token."""
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * theta
    angle = angle.view(x.shape[1], *[1] * (x.ndim - 3), half)
    return torch.complex(x[..., :half], x[..., half:]) * torch.exp(-1j * angle)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, stay: int = 0) -> Tensor:
    """Softmax of Re(q conj(k)) (or of real products) over the pairs so far, query by query and head by head."""
    out = []
    for t in range(q.shape[1]):
        seen = [i for i in range(t + 1) if window is None or i > t - window or i < stay]
        scores = [(q[:, t] * k[:, i].conj()).sum(-1).real * scale for i in seen]
        weights = torch.stack(scores, -1).softmax(-1)
        out.append(torch.einsum("bhi,bihd->bhd", weights, v[:, seen]))
    return torch.stack(out, 1)


def shared_heads(m: SequenceLayer, x: Tensor) -> Found:
    """Ainslie et al. 2023, Shazeer 2019: the one key head and value head of all queries here (two heads, one group)."""
    p = m.around
    q, k, v = heads(x @ p.q_proj.weight.T), x @ p.k_proj.weight.T, x @ p.v_proj.weight.T
    k, v = (z[:, :, None].expand(B, T, H, D // H) for z in (k, v))
    return attended(turned(q), turned(k), v, 1 / root(q)), None


def sliding_window(m: SequenceLayer, x: Tensor) -> Found:
    p, memory = m.around, m.update.parts().memory
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))
    return attended(turned(q), turned(k), v, 1 / root(q), memory.window, memory.first), None


def mla(m: SequenceLayer, x: Tensor) -> Found:
    """DeepSeek-AI 2024, eqs. 9-19, as printed: keys and values of every head made from the latent."""
    p, width = m.around, D // H

    def normed(z: Tensor, weight: Tensor) -> Tensor:
        return weight * z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    low = x if p.q_down is None else normed(x @ p.q_down.weight.T, p.q_norm.weight)
    q = heads(low @ p.q_proj.weight.T)
    latent = normed(x @ p.latent_proj.weight.T, p.latent_norm.weight)
    k, v = heads(latent @ p.key_up.weight.T), heads(latent @ p.value_up.weight.T)
    shared = turned((x @ p.r_proj.weight.T)[:, :, None]).expand(B, T, H, -1)
    q = torch.cat((q[..., :width].to(torch.complex128), turned(q[..., width:])), -1)
    k = torch.cat((k.to(torch.complex128), shared), -1)
    return attended(q, k, v, (width + p.turning) ** -0.5), None


def slots(keys: Tensor, values: Tensor, q: Tensor, kept: Tensor, taken: Tensor) -> Found:
    """Slots (B, H, m, d) token by token: S = kept * S + taken x^T of keys and values, then a softmax over slots."""
    ks, vs = (torch.zeros(B, H, kept.shape[-1], z.shape[-1], dtype=z.dtype) for z in (keys, values))
    out = []
    for t in range(T):
        ks = kept[:, t, ..., None] * ks + taken[:, t, ..., None] * keys[:, t, :, None]
        vs = kept[:, t, ..., None] * vs + taken[:, t, ..., None] * values[:, t, :, None]
        weights = (ks @ q[:, t, ..., None])[..., 0].softmax(-1)
        out.append((vs * weights[..., None]).sum(-2))
    return torch.stack(out, 1), (ks, vs)


def gsa(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    q, k, v = (F.silu(heads(x @ w.weight.T)) for w in (p.q_proj, p.k_proj, p.v_proj))
    a = heads(torch.sigmoid(through(p.charts["decay"], x)) ** (1 / 8))
    out, state = slots(k, v, q, a, 1 - a)
    return rms(F.silu(out), p.norm.weight), state


def abc(m: SequenceLayer, x: Tensor) -> Found:
    """Peng et al. 2022: the weights of a slot are a softmax over the tokens so far."""
    p = m.around
    q, k, v = (heads(x @ w.weight.T) for w in (p.q_proj, p.k_proj, p.v_proj))
    logits, out = heads(15 * torch.tanh(through(p.charts["write"], x) / 15)), []
    for t in range(T):
        phi = logits[:, : t + 1].softmax(1)
        ks, vs = (torch.einsum("bthm,bthd->bhmd", phi, z[:, : t + 1]) for z in (k, v))
        weights = (torch.einsum("bhmd,bhd->bhm", ks, q[:, t]) / root(q)).softmax(-1)
        out.append(torch.einsum("bhm,bhmd->bhd", weights, vs))
    return torch.stack(out, 1), None


ORACLES: dict[str, Oracle] = {
    "gsa": gsa,
    "abc": abc,
    "gqa": shared_heads,
    "mqa": shared_heads,
    "sliding-window": sliding_window,
    "mla": mla,
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_system_is_its_papers_formula(name: str) -> None:
    check_formula(CLASSES[name], ORACLES[name])


# ---- facts of the parts


def test_a_window_that_is_full() -> None:
    check_formula(SlidingWindow, sliding_window, update=replace(SlidingWindow.update, memory=List(window=4)))


@pytest.mark.parametrize(("window", "first"), ((3, 2), (1, 4), (4, 6)))
def test_a_window_beside_the_first_pairs(window: int, first: int) -> None:
    update = replace(SlidingWindow.update, memory=List(window=window, first=first))
    check_formula(SlidingWindow, sliding_window, update=update)
    m, x = make(SlidingWindow, update=update), torch.randn(B, 2 * T, D, dtype=torch.float64)
    whole, end = m(x)
    assert end.memory.theta[0].shape[-2] == min(first + window, 2 * T)
    begun, state = m(x[:, :T])
    rest = [begun]
    for t in range(T, 2 * T):
        out, state = m.step(x[:, t], state)
        rest.append(out[:, None])
    assert relative(torch.cat(rest, 1), whole) < 1e-12


def test_first_pairs_of_sequences_of_unequal_length() -> None:
    """Massless pairs that fill a shorter list stand behind those that stay; too short a list is refused."""
    m = make(SlidingWindow, update=replace(SlidingWindow.update, memory=List(window=3, first=2)))
    x, more = torch.randn(1, 11, D, dtype=torch.float64), torch.randn(2, 6, D, dtype=torch.float64)
    _, state = m(x, cu_seqlens=torch.tensor([0, 3, 11]))
    y, _ = m(more, state)
    for i, part in enumerate((x[:, :3], x[:, 3:])):
        alone, _ = m(torch.cat((part, more[i : i + 1]), 1))
        assert relative(y[i], alone[0, -6:]) < 1e-12
    with pytest.raises(ShapeError, match="the first 2 pairs of a list stay"):
        m(x, cu_seqlens=torch.tensor([0, 1, 11]))


def test_learned_tokens_stay_beside_a_window() -> None:
    """Titans' persistent tokens ahead of a sliding window: every token sees them, and no other that has left."""
    layer = make(SlidingWindow, update=replace(SlidingWindow.update, memory=List(window=2, first=3)))
    whole, x = Persistent(layer, 3), torch.randn(1, 9, D, dtype=torch.float64, requires_grad=True)
    y, _ = whole(x)
    tokens, before = torch.autograd.grad(y[0, -1].square().sum(), (whole.tokens, x))
    assert (tokens.abs().amax(1) > 0).all() and (before[0].abs().amax(1) > 0).tolist() == [False] * 7 + [True] * 2


@pytest.mark.parametrize(
    ("given", "said"), (({"first": 2}, "give a window, or 0"), ({"window": 2, "first": -1}, "got -1"))
)
def test_first_pairs_without_a_window_are_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(IllegalUpdate, match=said):
        List(**given)


def test_latents_of_queries() -> None:
    check_formula(MLA, mla, block=Latent(query_rank=6))


def test_one_latent_a_token_is_kept_for_all_heads() -> None:
    """What decoding reads: a latent, beside what turns, whatever the number of heads."""
    m = make(MLA)
    _, state = m(torch.randn(B, T, D, dtype=torch.float64))
    assert state is not None
    assert [leaf.shape for leaf in state.memory.theta[:2]] == [(B, 1, 1, T, 4 * 8 + 4), (B, 1, 1, T, 4 * 8)]
    one, other = make(MLA, d_k=20, d_v=16), torch.randn(B, T, D, dtype=torch.float64)
    assert relative(one(other)[0], one(other)[0]) == 0.0


def test_one_head_of_latents() -> None:
    """The first of two heads, where the other one gives nothing."""
    two, x = make(MLA), torch.randn(B, T, D, dtype=torch.float64)
    two.around.value_up.weight.data[D // 2 :] = 0.0
    sizes = {"d_k": two.sizes.d_k, "d_v": two.sizes.d_v}
    one = MLA(D, heads=1, block=replace(MLA.block, width=D // 2), **sizes, dtype=torch.float64)
    first = {n: w[:, : D // 2] if n == "around.o_proj.weight" else w for n, w in two.state_dict().items()}
    one.load_state_dict({n: first[n][: w.shape[0]] for n, w in one.state_dict().items()})
    assert relative(one(x)[0], two(x)[0]) < 1e-14


def test_what_no_latent_can_be_is_named() -> None:
    for widths in ({"d_k": 16, "d_v": 16}, {"d_k": 19, "d_v": 16}, {"d_k": 19, "d_v": 17}):
        with pytest.raises(ShapeError, match="d_k - d_v must be even and at least 2"):
            MLA(D, heads=H, **widths)
    with pytest.raises(IllegalUpdate, match="Latent supplies k, v, q, the angles"):
        MLA(D, heads=H, update=sequence.RoPE.update)


def test_slots_without_softmax_are_two_linear_passes() -> None:
    gate = Diagonal(Per("decay", "own", "unit", size=5), "slot")
    update = StateUpdate(Alignment(), monoid=gate, algorithm=Step(0.5), memory=BoundedList(5))
    s = example(update, length=40)
    assert dispatch.select(update).route == "passes"
    (a, x), (b, y) = dispatch.run(update, s), reference.run(update, s, time=1)
    assert relative(a, b) < 1e-13 and all(relative(m, n) < 1e-13 for m, n in zip(x.theta, y.theta, strict=True))


@pytest.mark.parametrize(
    ("make_it", "match"),
    [
        (lambda: Per("decay", "own", "unit"), "a rate of shape own has a size of its own"),
        (lambda: Per("decay", "key", "unit", 3), "a rate of shape own has a size of its own"),
        (lambda: Diagonal("decay", "slot"), "the gate must be a Per of shape own"),
        (lambda: StateUpdate(Alignment(), monoid=GSA.update.monoid), "Matrix memory has no slots"),
        (lambda: replace(GSA.update, memory=BoundedList(32)), r"BoundedList\(slots=32\): a rate of every slot"),
        (lambda: replace(GSA.update, cost=SquaredError()), r"the cost is Alignment\(\), not SquaredError\(\)"),
        (lambda: StateUpdate(Alignment(), Entropic(), memory=BoundedList(4)), "slots that are kept and written alike"),
        (lambda: replace(GSA.update, algorithm=Momentum(0.9, "ema")), "slots are written by factored pairs"),
        (lambda: retarget(GSA.update, "data"), "BoundedList is a memory of its own"),
    ],
)
def test_what_slots_are_not_is_named(make_it: Callable[[], object], match: str) -> None:
    with pytest.raises(IllegalUpdate, match=match):
        make_it()
