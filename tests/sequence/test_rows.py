"""Systems against their papers' formulas in plain loops over tokens: outputs, states, gradients.

What an oracle is: `tests.oracles`. More rows: `test_rows_lists.py`, `test_rows_states.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes import sequence
from axes.core import reference
from axes.core.algorithms import Anchor, Read, Step
from axes.core.costs import Alignment, Given, SquaredError
from axes.core.geometry import Entropic
from axes.core.memory import List
from axes.core.monoids import DPLR, Product, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import mixer
from axes.errors import IllegalUpdate, ShapeError
from axes.routes import dispatch, several
from axes.sequence import SequenceLayer, layer
from axes.sequence.blocks import Standard
from axes.testing.examples import example
from tests.oracles import (
    B,
    D,
    Found,
    H,
    Oracle,
    T,
    check_formula,
    convolutions,
    convolved,
    heads,
    loop,
    mamba_gate,
    projected,
    relative,
    rms,
    root,
    through,
    unit,
)

# ---- oracles: (module, x) -> outputs of the heads, state


def gated_retention(m: SequenceLayer, x: Tensor) -> Found:
    """Sun et al. 2024 (YOCO): gamma = sigmoid(X W)^(1/16); q e^(i n theta), k e^(i m theta) as complex numbers."""
    p = m.around
    q, k, v = projected(p, x)
    half = q.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.exp(1j * torch.arange(T)[:, None, None] * theta)
    turned = [torch.complex(z[..., :half], -z[..., half:]) * turn for z in (q, k)]  # ours turns the other way
    gamma = torch.sigmoid(through(p.charts["decay"], x)) ** (1 / 16)
    out, state = [], torch.zeros(B, H, v.shape[-1], half, dtype=torch.complex128)
    for t in range(T):
        write = torch.einsum("bhv,bhk->bhvk", v[:, t].to(torch.complex128), turned[1][:, t].conj())
        state = gamma[:, t, :, None, None] * state + write
        out.append(torch.einsum("bhvk,bhk->bhv", state, turned[0][:, t]).real / root(q))
    last = state * torch.exp(1j * (T - 1) * theta)  # keys as they stand after the last token
    y = rms(torch.stack(out, 1), p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T))
    return y, torch.cat((last.real, last.imag), -1)


def lightning(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    q, k, v = projected(p, x)
    kept = torch.exp(-torch.tensor([2.0 ** (-8 * h / H) for h in range(1, H + 1)], dtype=torch.float64))
    out, state = loop(F.silu(q), F.silu(k), v, lambda s, t: kept[:, None, None] * s)
    return rms(out, p.norm.weight) * torch.sigmoid(heads(x @ p.g_proj.weight.T)), state


def hgrn2(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    f = heads(torch.sigmoid(through(p.charts["decay"], x)))
    q, v = F.silu(heads(x @ p.q_proj.weight.T)), heads(x @ p.v_proj.weight.T)
    out, state = loop(q, 1 - f, v, lambda s, t: f[:, t, :, None, :] * s)
    return rms(out, p.norm.weight), state


def iplr(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    q, k, v = convolutions(p, x)
    w = unit(heads(x @ p.vectors["b"].weight.T))
    a, b = -w, torch.sigmoid(heads(x @ p.vectors["a"].weight.T)) * w
    maps = torch.eye(q.shape[-1], dtype=x.dtype) + a[..., :, None] * b[..., None, :]
    out, state = loop(q / root(q), k, v, lambda s, t: s @ maps[:, t])
    return rms(out, p.norm.weight), state


def mlstm(m: SequenceLayer, x: Tensor) -> Found:
    """Beck et al. 2024 as released: everything times e^-m, m_t = max(log f + m_{t-1}, log i)."""
    p = m.around
    q, k, v = projected(p, x)
    log_f = F.logsigmoid(through(p.charts["forget"], x))
    log_i = 15 * torch.tanh(through(p.charts["input"], x) / 15)
    c, n = torch.zeros(B, H, v.shape[-1], k.shape[-1], dtype=x.dtype), torch.zeros(B, H, k.shape[-1], dtype=x.dtype)
    top, out = torch.zeros(B, H, dtype=x.dtype), []
    for t in range(T):
        new = torch.maximum(log_f[:, t] + top, log_i[:, t])
        f, i, top = torch.exp(log_f[:, t] + top - new), torch.exp(log_i[:, t] - new), new
        c = f[..., None, None] * c + i[..., None, None] * v[:, t, ..., None] * k[:, t, :, None, :]
        n = f[..., None] * n + i[..., None] * k[:, t]
        asked = q[:, t] / root(q)
        over = torch.maximum((n * asked).sum(-1).abs(), torch.exp(-top))
        out.append((c @ asked[..., None])[..., 0] / over[..., None])
    y = rms(torch.stack(out, 1), p.norm.weight) * torch.sigmoid(heads(x @ p.g_proj.weight.T))
    return y, c * torch.exp(top)[..., None, None]


def mamba(m: SequenceLayer, x: Tensor) -> Found:
    """Gu and Dao 2023: h = exp(dt A) h + dt B x for every channel alone, y = C h + D x, inside the Mamba block."""
    p, inner = m.around, 2 * D
    xs, z = (x @ p.in_proj.weight.T).split(inner, -1)
    xs = convolved(xs, p.conv)
    b, c = (xs @ p.kq_proj.weight.T).chunk(2, -1)
    dt = F.softplus(through(p.charts["dt"], xs))
    a = -torch.exp(p.charts["A"].log_rate).flatten(0, 1)  # (inner, 16)
    state, out = torch.zeros(B, inner, b.shape[-1], dtype=x.dtype), []
    for t in range(T):
        step = dt[:, t, :, None]
        state = torch.exp(step * a) * state + step * b[:, t, None, :] * xs[:, t, :, None]
        out.append((state * c[:, t, None, :]).sum(-1) + p.skip * xs[:, t])
    return heads(torch.stack(out, 1) * F.silu(z)), heads(state.mT).movedim(1, -1)


def hgrn(m: SequenceLayer, x: Tensor) -> Found:
    p = m.around
    f, i = torch.sigmoid(through(p.charts["decay"].chart, x)), F.silu(x @ p.v_proj.weight.T)
    h, out = torch.zeros(B, D, dtype=x.dtype), []
    for t in range(T):
        h = f[:, t] * h + (1 - f[:, t]) * i[:, t]
        out.append(heads(h))
    return rms(torch.stack(out, 1), p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T)), heads(h)[..., None]


def griffin(m: SequenceLayer, x: Tensor) -> Found:
    """De et al. 2024: log a = -8 softplus(-Lambda) r with the decay's own rate as a parameter."""
    p = m.around
    xs, z = (x @ p.in_proj.weight.T).split(D, -1)
    padded = F.pad(xs, (0, 0, 3, 0))
    xs = sum(p.conv.weight[:, 0, j] * padded[:, j : j + T] for j in range(4)) + p.conv.bias
    chart = p.charts["decay"]
    r, i = torch.sigmoid(through(chart, xs)), torch.sigmoid(xs @ chart.input.weight.T + chart.input.bias)
    a = torch.exp(-8 * torch.exp(chart.log_rate.flatten()) * r)
    h, out = torch.zeros(B, D, dtype=x.dtype), []
    for t in range(T):
        h = a[:, t] * h + torch.sqrt(1 - a[:, t] ** 2) * (i * xs)[:, t]
        out.append(h)
    return heads(torch.stack(out, 1) * F.gelu(z)), heads(h)[..., None]


def rwkv6(m: SequenceLayer, x: Tensor) -> Found:
    """Peng et al. 2024: wkv = diag(u) k^T v + S, then S = diag(w) S + k^T v with S (d_k, d_v)."""
    p = m.around
    delta = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1) - x
    seen, hidden = {}, torch.tanh((x + delta * p.shift) @ p.mix_down.weight.T).chunk(5, -1)
    for i, name in enumerate(("r", "w", "k", "v", "g")):
        seen[name] = x + delta * (p.mix[name] + hidden[i] @ p.mix_up[i].T)
    q, k, v = (heads(seen[n] @ getattr(p, f"{n}_proj").weight.T) for n in "rkv")
    d = p.decay_bias + torch.tanh(seen["w"] @ p.decay_down.weight.T) @ p.decay_up.weight.T
    w = heads(torch.exp(-torch.exp(d)))
    state, out = torch.zeros(B, H, k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(T):
        pair = k[:, t, ..., None] * v[:, t, :, None, :]
        out.append((q[:, t, :, None] @ (p.bonus[..., None] * pair + state))[..., 0, :])
        state = w[:, t, ..., None] * state + pair
    y = torch.stack(out, 1)
    centred = y - y.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + v.shape[-1] * 1e-5).sqrt()
    y = normed * heads(p.norm_weight) + heads(p.norm_bias)
    return y * heads(F.silu(seen["g"] @ p.g_proj.weight.T)), state.mT


def delta_product(m: SequenceLayer, x: Tensor) -> Found:
    """Every write with its own transition, multiplied out; a gate ahead of the first, a read after the last."""
    p = m.around
    q = unit(heads(convolved(x @ p.q_proj.weight.T, p.q_conv)))
    k, v = (convolved(x @ getattr(p, f"{n}_proj").weight.T, getattr(p, f"{n}_conv")) for n in "kv")
    k, v = (z.unflatten(-1, (2, H, -1)).transpose(2, 3) for z in (k, v))
    k = unit(k)
    beta = 2 * torch.sigmoid(through(p.charts["beta"], x)).unflatten(-1, (H, 2))
    gate = mamba_gate(p.charts["decay"], x) if "decay" in p.charts else torch.ones(B, T, H, dtype=x.dtype)
    state, out = torch.zeros(B, H, k.shape[-1], v.shape[-1], dtype=x.dtype), []
    eye = torch.eye(k.shape[-1], dtype=x.dtype)
    for t in range(T):
        state = gate[:, t, :, None, None] * state
        for j in range(2):
            column, strength = k[:, t, :, j, :, None], beta[:, t, :, j, None, None]
            state = (eye - strength * column @ column.mT) @ state + strength * column @ v[:, t, :, j, None, :]
        out.append((state.mT @ q[:, t, ..., None])[..., 0] / root(q))
    return rms(torch.stack(out, 1), p.norm.weight) * F.silu(heads(x @ p.g_proj.weight.T)), state.mT


def comba(m: SequenceLayer, x: Tensor) -> Found:
    """fla's recurrent form: h decays, loses what p = c k reads of it, and gains beta (v - h p) k^T."""
    p = m.around
    q, k, v = convolutions(p, x)
    beta = torch.sigmoid(through(p.charts["beta"].chart, x))[..., None]
    closed = torch.sigmoid(p.charts["beta"].share)[:, None] * k
    gate = mamba_gate(p.charts["decay"], x)
    state, out = torch.zeros(B, H, v.shape[-1], k.shape[-1], dtype=x.dtype), []
    for t in range(T):
        state = state * gate[:, t, :, None, None]
        missing = beta[:, t] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", state, closed[:, t]))
        state = state + torch.einsum("bhv,bhk->bhvk", missing, k[:, t])
        out.append(torch.einsum("bhvk,bhk->bhv", state, (q - p.correction * k)[:, t]) / root(q))
    return rms(torch.stack(out, 1), p.norm.weight) * torch.sigmoid(heads(x @ p.g_proj.weight.T)), state


def gdn2(m: SequenceLayer, x: Tensor) -> Found:
    """S_t = (I - k (b * k)^T) Diag(a) S + k (w * v)^T with S (d_k, d_v), multiplied out."""
    p = m.around
    q, k, v = convolutions(p, x)
    b, w = (heads(torch.sigmoid(through(p.charts[n], x))) for n in ("erase", "write"))
    a, eye = mamba_gate(p.charts["decay"], x), torch.eye(q.shape[-1], dtype=x.dtype)
    state, out = torch.zeros(B, H, k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(T):
        erase = eye - k[:, t, ..., None] * (b * k)[:, t, :, None, :]
        state = erase @ torch.diag_embed(a[:, t]) @ state + k[:, t, ..., None] * (w * v)[:, t, :, None, :]
        out.append((state.mT @ q[:, t, ..., None])[..., 0] / root(q))
    return rms(torch.stack(out, 1), p.norm.weight) * torch.sigmoid(heads(x @ p.g_proj.weight.T)), state.mT


def kda(m: SequenceLayer, x: Tensor) -> Found:
    """Kimi Linear: S_t = (I - beta k k^T) Diag(a) S + beta k v^T with S (d_k, d_v), multiplied out."""
    p = m.around
    q, k, v = convolutions(p, x)
    beta = torch.sigmoid(through(p.charts["beta"], x))[..., None, None]
    a, eye = mamba_gate(p.charts["decay"], x), torch.eye(q.shape[-1], dtype=x.dtype)
    state, out = torch.zeros(B, H, k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(T):
        key = k[:, t, ..., None]
        state = (eye - beta[:, t] * key @ key.mT) @ torch.diag_embed(a[:, t]) @ state
        state = state + beta[:, t] * key @ v[:, t, :, None, :]
        out.append((state.mT @ q[:, t, ..., None])[..., 0] / root(q))
    return rms(torch.stack(out, 1), p.norm.weight) * torch.sigmoid(heads(x @ p.g_proj.weight.T)), state.mT


def path_fox(m: SequenceLayer, x: Tensor) -> Found:
    """Yang et al. 2025: k_i^T H_{i+1} ... H_t q_t plus the sum of log f between, one softmax."""
    p = m.around
    q, k, v = projected(p.plain, x)
    w = unit(heads(convolved(x @ p.w_down.weight.T @ p.w_up.weight.T, p.w_conv)))
    beta = 2 * torch.sigmoid(through(p.plain.charts["beta"], x))
    log_f = torch.log(torch.sigmoid(through(p.plain.charts["forget"], x)))
    eye, out = torch.eye(q.shape[-1], dtype=x.dtype), []
    maps = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    for t in range(T):
        product, gates, scores = eye.expand(B, H, -1, -1), torch.zeros(B, H, dtype=x.dtype), []
        for i in range(t, -1, -1):
            score = torch.einsum("bhd,bhde,bhe->bh", k[:, i], product, q[:, t]) / root(q)
            scores.append(score + gates)
            product, gates = maps[:, i] @ product, gates + log_f[:, i]
        weights = torch.stack(scores[::-1], -1).softmax(-1)
        out.append(torch.einsum("bhi,bihd->bhd", weights, v[:, : t + 1]))
    return torch.stack(out, 1), None


def deltaformer(m: SequenceLayer, x: Tensor) -> Found:
    q, k, v = projected(m.around, x)
    stored, out = [], []
    for t in range(T):
        u = v[:, t]
        if t:
            weights = (torch.einsum("bhd,bihd->bhi", k[:, t], k[:, :t]) / root(k)).softmax(-1)
            u = u - torch.einsum("bhi,bihd->bhd", weights, torch.stack(stored, 1))
        stored.append(u)
        weights = (torch.einsum("bhd,bihd->bhi", q[:, t], k[:, : t + 1]) / root(k)).softmax(-1)
        out.append(torch.einsum("bhi,bihd->bhd", weights, torch.stack(stored, 1)))
    return torch.stack(out, 1), None


def lucid(m: SequenceLayer, x: Tensor) -> Found:
    """The paper's three matrices, written out and inverted."""
    q, k, v = (y.movedim(1, 2) for y in projected(m.around, x))
    d = k.shape[-1]
    normed = k / k.square().mean(-1, keepdim=True).sqrt()
    gram = torch.exp(normed @ normed.mT / math.sqrt(d) - math.sqrt(d)).tril()
    scores = (q @ k.mT / math.sqrt(d)).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ torch.linalg.inv(gram) @ v).movedim(2, 1), None


ORACLES: dict[str, Oracle] = {
    "lucid": lucid,
    "gated-retention": gated_retention,
    "lightning-attention": lightning,
    "hgrn2": hgrn2,
    "iplr": iplr,
    "mlstm": mlstm,
    "mamba": mamba,
    "hgrn": hgrn,
    "rg-lru": griffin,
    "rwkv6": rwkv6,
    "delta-product": delta_product,
    "gated-delta-product": delta_product,
    "comba": comba,
    "kda": kda,
    "gdn2": gdn2,
    "path-fox": path_fox,
    "deltaformer": deltaformer,
}
CLASSES = {cls.name: cls for cls in sequence.ALL}


@pytest.mark.parametrize("name", ORACLES)
def test_a_system_is_its_papers_formula(name: str) -> None:
    check_formula(CLASSES[name], ORACLES[name])


# ---- facts of the parts


@pytest.mark.parametrize("monoid", [DPLR("decay"), DPLR(1.0), Product((Scalar("g"), DPLR(1.0)))], ids=repr)
def test_a_layer_of_ones_own_does_not_diverge_where_two_vectors_make_the_transition(monoid: Any) -> None:
    """With a and b projected apart the state reaches 1e4 in 500 tokens, behind an output norm that hides it."""
    m = layer(StateUpdate(Alignment(), monoid=monoid))(16, heads=2)
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(3)
        _, state = m(torch.randn(1, 1000, 16))
    assert state is not None and state.memory.theta[0].abs().max() < 1e3


def test_vectors_of_a_transition_that_are_not_the_blocks_are_refused() -> None:
    with pytest.raises(IllegalUpdate, match=r"Standard ties pairs of vectors of its own, not \('a', 'k'\)"):
        layer(StateUpdate(Alignment(), monoid=DPLR(1.0, "a", "k")))(16, heads=2)


def test_erasing_and_writing_alike_is_the_delta_rule() -> None:
    """beta and erase of one strength: the tuple that writes and erases is the gradient of the squared error."""
    lead = (2, 13, 2)
    s = {n: torch.randn(*lead, 4, dtype=torch.float64) for n in "qkv"} | {"decay": -torch.rand(*lead, 4).double()}
    beta = torch.rand(lead, dtype=torch.float64)
    kda, _ = reference.run(sequence.KDA.update, {**s, "beta": beta}, time=1)
    wide = beta[..., None].expand(*lead, 4)
    ours, _ = reference.run(sequence.GatedDeltaNet2.update, {**s, "erase": wide, "write": wide}, time=1)
    assert relative(ours, kda) < 1e-13


def test_keys_of_ones_have_nothing_to_norm() -> None:
    with pytest.raises(IllegalUpdate, match="keys=False leaves nothing to share, to norm"):
        layer(sequence.HGRN2.update, block=Standard(keys=False))(16, heads=2)


def test_several_writes_are_as_many_tokens_whose_gate_stands_ahead_of_the_first() -> None:
    """DeltaProduct of n writes is Gated DeltaNet on n T tokens, read at every n-th, also by the interpreter."""
    update, n = replace(sequence.GatedDeltaProduct.update, algorithm=Step(Per("beta"), at="gated", writes=3)), 3
    s = example(update, length=5)
    k, v, beta, decay = (s[name] for name in ("k", "v", "beta", "decay"))
    assert k.shape == (2, 5, n, 4) and beta.shape == (2, 5, n)
    gates = torch.stack((decay, *[torch.zeros_like(decay)] * (n - 1)), -1).flatten(1)
    q = s["q"].repeat_interleave(n, 1)
    flat = {"q": q, "k": k.flatten(1, 2), "v": v.flatten(1, 2), "beta": beta.flatten(1), "decay": gates}
    expected, last = reference.run(sequence.GatedDeltaNet.update, flat, time=1)
    for implementation in ("torch", "reference"):
        out, state = dispatch.run(update, s, time=1, implementation=implementation)
        assert relative(out, expected[:, n - 1 :: n]) < 1e-12 and int(state.count) == 5
        assert relative(state.theta[0], last.theta[0]) < 1e-12
    constant = replace(update, monoid=Scalar(0.9))  # a gate that has no name acts at every token: no route but one
    assert dispatch.select(constant).route == "interpreter"
    out, _ = dispatch.run(constant, {name: x for name, x in s.items() if name != "decay"}, time=1)
    named, _ = dispatch.run(update, {**s, "decay": torch.full_like(decay, math.log(0.9))}, time=1)
    assert relative(out, named) < 1e-12


def test_pairs_that_a_block_makes_are_tokens_of_one_write_without_a_copy() -> None:
    m = sequence.GatedDeltaProduct(D, heads=H)
    signal, _, _ = m.around.enter(torch.randn(B, T, D), m.around.tails(B, torch.empty(0)))
    tokens = several.tokens(m.update, signal, 1)
    for name in ("k", "v"):
        assert tokens[name].shape == (B, 2 * T, H, D // H) and tokens[name].data_ptr() == signal[name].data_ptr()


REAL = StateUpdate(Alignment(), monoid=Scalar(Per("d", "scalar", "real")))


@pytest.mark.parametrize(
    ("make_it", "error", "match"),
    [
        (lambda: Step(writes=0), IllegalUpdate, "writes must be at least 1, got 0"),
        (lambda: StateUpdate(Given(), algorithm=Step(0.1, writes=2)), IllegalUpdate, "a gradient from outside is one"),
        (lambda: StateUpdate(Alignment(), Entropic(), algorithm=Step(writes=2), memory=List()), IllegalUpdate, "list"),
        (lambda: StateUpdate(SquaredError(), algorithm=Step(writes=2, at=Anchor(4))), IllegalUpdate, "anchors count"),
        (lambda: StateUpdate(Alignment(), algorithm=Step(writes=2, debias=True)), IllegalUpdate, "no read, debias"),
        (lambda: layer(sequence.DeltaProduct.update, block=sequence.Mamba2.block)(16), IllegalUpdate, "one pair"),
        (lambda: sequence.DeltaProduct(16, heads=2, num_v_heads=4), ShapeError, "several writes or reads have some"),
        (lambda: mixer(sequence.DeltaProduct.update)(16, streams=2), IllegalUpdate, "fractions=r of the mixer"),
        (
            lambda: dispatch.run(sequence.DeltaProduct.update, {n: torch.ones(2, 5, 3) for n in ("q", "k", "v")}),
            ShapeError,
            "2 writes a token stand ahead of the width of k and v",
        ),
        (lambda: StateUpdate(Alignment(), algorithm=Step(floor=1.0)), IllegalUpdate, "set debias=True there"),
        (lambda: layer(REAL)(16), IllegalUpdate, r"gates as logs: declare \['d'\] unit"),
        (
            lambda: dispatch.run(REAL, {n: torch.ones(2, 5, *[3] * (n != "d")) for n in ("q", "k", "v", "d")}),
            IllegalUpdate,
            "gate 'd' is real, one number for all tokens",
        ),
        (lambda: Read(1.0, Per("bonus", "key", "unit")), IllegalUpdate, "Read: rate must be a scalar, key, row"),
    ],
)
def test_what_makes_no_sense_is_named(make_it: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_it()
