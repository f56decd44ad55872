"""The attention kernels under Triton's interpreter against scores written out in float64; and their refusals.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
bfloat16 products are left to tests/gpu: the interpreter multiplies their bit patterns.
"""

from __future__ import annotations

import sys

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from tests.interpreter import interpret

PROGRAM = r"""
import torch
from axes.kernels.attention.attend import attend

torch.manual_seed(0)
torch.set_num_threads(1)

def written_out(q, k, v, mass, scale, lengths, old):
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    outs, at = [], 0
    for n, length in enumerate(lengths or (q.shape[1],)):
        seen = slice(at + n * old, at + n * old + old + length)
        s = scale * torch.einsum("bthd,bshd->bhts", q[:, at : at + length], k[:, seen])
        if mass is not None:
            own = mass[:, seen].repeat_interleave(group, 2)
            s = s + (own[:, None] - own[:, old:, None]).permute(0, 3, 1, 2)
        future = torch.ones(length, old + length, dtype=torch.bool).triu(old + 1)
        p = s.masked_fill(future, -torch.inf).softmax(-1)
        outs.append(torch.einsum("bhts,bshd->bthd", p, v[:, seen]))
        at += length
    return torch.cat(outs, 1)

def check(T, K, V, dtype=torch.float32, B=1, G=1, group=1, old=0, lengths=(), mass="gates", step=1.0, shared=False,
          bound=1e-5):
    case = {n: x for n, x in locals().items()}
    b, t, s = (1, sum(lengths), sum(lengths) + len(lengths) * old) if lengths else (B, T, T + old)
    q, k, v = torch.randn(b, t, G * group, K), torch.randn(b, s, 1 if shared else G, K), torch.randn(b, s, G, V)
    m = -(-step * torch.rand(b, s, G, dtype=torch.float64)).cumsum(1)
    if mass == "closed":
        m = -torch.where(torch.rand(b, s, G) < 0.5, -200.0, -0.1 * torch.rand(b, s, G)).double().cumsum(1)
    if old:
        at = 0
        for n, length in enumerate(lengths or (t,)):
            m[:, at + n * old : at + n * old + old] = torch.randn(old, G).double() - 3
            m[:, at + n * old : at + n * old + old // 2] = -torch.inf
            at += length
    m = None if mass is None else m
    do = torch.randn(b, t, G * group, V)
    cu = torch.tensor((0, *lengths)).cumsum(0).int() if lengths else None

    def run(function, cast):
        leaves = [None if x is None else x.to(dtype).to(cast).requires_grad_() for x in (q, k, v)]
        leaves.append(None if m is None else m.clone().requires_grad_())
        given = [leaves[0], leaves[1].expand(-1, -1, G, -1), *leaves[2:]]
        o = function(*given)
        used = [x for x in leaves if x is not None]
        return [o, *torch.autograd.grad(o, used, do.to(o.dtype))]

    got = run(lambda *x: attend(*x, scale=K**-0.5, cu_seqlens=cu), dtype)
    want = run(lambda *x: written_out(*x, K**-0.5, lengths, old), torch.float64)
    for n, (x, w) in enumerate(zip(got, want)):
        error = ((x - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        assert error < bound, (case, n, error)
"""

CASES = {
    "plain": """
for t in (1, 32, 70): check(t, 16, 16, mass=None)
check(40, 5, 40, B=2, G=3, mass=None)
check(40, 20, 3, group=2, G=2, mass=None)
check(40, 16, 16, G=2, mass=None, shared=True)
check(20, 140, 130, mass=None)
""",
    "masses": """
for t in (1, 33, 70): check(t, 16, 16)
check(40, 5, 40, B=2, G=3)
check(70, 20, 3, group=2, G=2)
""",
    "large masses": """
check(70, 16, 16, step=60.0)
check(70, 16, 16, mass="closed", bound=2e-5)
""",
    "earlier pairs": """
for old in (1, 31, 32, 45): check(33, 16, 16, old=old)
check(40, 16, 8, old=7, B=2, G=2, group=2)
check(1, 16, 16, old=40)
check(33, 16, 16, old=50, mass=None)
""",
    "packed": """
check(0, 16, 16, lengths=(0, 1, 40, 0, 32))
check(0, 16, 16, lengths=(5, 33, 64), mass=None, G=2, group=2)
check(0, 16, 16, lengths=(1, 33, 0, 30), old=9)
check(0, 16, 16, lengths=(3, 40), old=33, mass=None, group=2)
""",
    "one query": """
from axes.kernels.attention.decode import attend_one
for S, G, group, K, V, masses in ((1, 1, 1, 16, 16, True), (300, 2, 3, 20, 8, True), (513, 1, 17, 16, 40, False),
                                  (129, 3, 1, 130, 16, True)):
    q, k, v = torch.randn(2, 1, G * group, K), torch.randn(2, S, G, K), torch.randn(2, G, S, V).transpose(1, 2)
    m = -(-torch.rand(2, S, G, dtype=torch.float64)).cumsum(1)
    m = m - m[:, -1:]
    m[:, : S // 3] = -torch.inf
    m = m if masses else None
    got = attend_one(q, k, v, None if m is None else m.transpose(1, 2), 0.3)
    want = written_out(q.double(), k.double(), v.double(), m, 0.3, (), S - 1)
    assert (got - want).norm() < 1e-6 * want.norm(), (S, G, group, K, V)
""",
    "reach": """
from axes.kernels.attention.reach import reach
for T, old, G, group, gate, far in ((700, 0, 2, 1, 1.0, True), (300, 500, 1, 2, 2.0, True), (1, 900, 2, 1, 0.5, True),
                                    (385, 0, 1, 1, 0.1, False)):
    q, k = 2 * torch.randn(2, T, G * group, 16), torch.randn(2, T + old, G, 16)
    m = (gate * torch.rand(2, T + old, G)).cumsum(1)
    m[:, 300:310] += 200.0 * far
    m[:, : old // 2] = -torch.inf
    first, last = reach(q, k, m, 0.3)
    whole = k.repeat_interleave(group, 2).double()
    p = 0.3 * torch.einsum("bthd,bshd->bths", q.double(), whole) + m.repeat_interleave(group, 2).mT[:, None].double()
    future = torch.ones(T, T + old, dtype=torch.bool).triu(old + 1)
    p = p.masked_fill(future[:, None], -torch.inf).softmax(-1).unflatten(2, (G, group))
    left_out = 0
    for b in range(2):
        for g in range(G):
            for c, n in enumerate(first[b, g].tolist()):
                assert (p[b, 128 * c : 128 * c + 128, g, :, : 64 * n] < 2.0**-149).all()
                left_out += n
            for c, n in enumerate(last[b, g].tolist()):
                assert (p[b, 64 * n :, g, :, 128 * c : 128 * c + 128] < 2.0**-149).all()
                left_out += -(-T // 64) - n
    assert (left_out > 0) == far, left_out
k[0, 3] = torch.nan
assert not reach(q, k, 1000 * m, 0.3)[0][0].any()
""",
    "half": """
check(70, 32, 16, dtype=torch.float16, bound=3e-3)
check(150, 64, 64, dtype=torch.float16, G=2, old=20, bound=3e-3)
check(0, 16, 16, dtype=torch.float16, lengths=(1, 90, 20), mass=None, bound=3e-3)
""",
}

TRANSPORT = r"""
import torch
from axes.kernels.attention import transport as module
from axes.kernels.attention.transport import transport

torch.manual_seed(0)
torch.set_num_threads(1)

def token_by_token(q, k, v, a, b, mass, scale):
    outs, keys = [], k[:, :0].transpose(1, 2)
    for t in range(q.shape[1]):
        keys = keys + torch.einsum("bhid,bhd->bhi", keys, a[:, t])[..., None] * b[:, t, :, None]
        keys = torch.cat((keys, k[:, t, :, None]), 2)
        s = scale * torch.einsum("bhd,bhid->bhi", q[:, t], keys)
        s = s if mass is None else s + mass[:, : t + 1].transpose(1, 2)
        outs.append(torch.einsum("bhi,bihd->bhd", s.softmax(-1), v[:, : t + 1]))
    return torch.stack(outs, 1), keys.transpose(1, 2)

def check(T, K, V, B=1, H=1, dtype=torch.float32, mass=False, last=True, bound=2e-5):
    q, k, w, later = torch.randn(4, B, T, H, K).unbind()
    w = torch.nn.functional.normalize(w, dim=-1)
    v, do = torch.randn(2, B, T, H, V).unbind()
    given = [q, k, v, -2 * torch.rand(B, T, H, 1) * w, w]
    m = torch.rand(B, T, H, dtype=torch.float64).cumsum(1)

    def run(function, cast):
        leaves = [x.to(dtype).to(cast).requires_grad_() for x in given]
        leaves += [m.clone().requires_grad_()] if mass else []
        out, keys = function(*leaves, *([] if mass else [None]), K**-0.5)
        total = (out * do.to(out.dtype)).sum() + ((keys * later.to(keys.dtype)).sum() if last else 0)
        return [out, keys, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]

    got = run(lambda *x: transport(*x[:-1], scale=x[-1]), dtype)
    want = run(token_by_token, torch.float64)
    for n, (x, y) in enumerate(zip(got, want)):
        error = ((x.double() - y).norm() / max(y.norm(), 0.02 * y.numel() ** 0.5)).item()
        assert error < bound, (T, K, V, B, H, dtype, mass, last, n, error)
"""

IN_TILES = r"""
own = module._cut
def cut(q):
    found, blocks = own(q), -(-q.shape[1] // 32) * 2
    return found._replace(c=16, r=2, n=blocks, levels=(blocks - 1).bit_length())
module._cut = cut
"""

CARRIED = {
    "blocks": "for T in (1, 100): check(T, 16, 16)",
    "widths and masses": "check(70, 20, 5, B=2, H=2, mass=True); check(40, 5, 40, mass=True, last=False)",
    "blocks in tiles": IN_TILES + "for T in (48, 100): check(T, 16, 16)",
    "masses in tiles": IN_TILES + "check(110, 20, 8, H=2, mass=True)",
    "half": "check(150, 32, 16, dtype=torch.float16, mass=True, bound=3e-3)",
}

ROUTE = r"""
import torch
from torch.utils import _pytree as pytree
from axes import Per, StateUpdate, Step
from axes.core import reference
from axes.core.costs import Alignment
from axes.core.geometry import Entropic
from axes.core.memory import List
from axes.core.monoids import Householder, Product, Rotation, Scalar
from axes.routes import attention
from axes.routes.packed import join, select

torch.manual_seed(0)
torch.set_num_threads(1)
H, K, V = 2, 8, 6
ANGLE = Per("angle", "pair", "real")
TUPLES = {
    "plain": StateUpdate(Alignment(), Entropic(), memory=List()),
    "all mass n": StateUpdate(Alignment(), Entropic(mass=None), memory=List()),
    "alibi": StateUpdate(Alignment(), Entropic(mass=2.0), Scalar(0.9), memory=List()),
    "fox": StateUpdate(Alignment(), Entropic(), Scalar("decay"), Step(Per("beta")), List(0.7)),
    "rope": StateUpdate(Alignment(), Entropic(), Rotation(), memory=List()),
    "rope, fox": StateUpdate(Alignment(), Entropic(), Product((Rotation(), Scalar("decay"))), memory=List()),
    "path": StateUpdate(Alignment(), Entropic(), Householder(Per("beta")), memory=List()),
    "path, fox": StateUpdate(Alignment(), Entropic(), Product((Scalar("decay"), Householder(1.5))), memory=List()),
    "named angles": StateUpdate(Alignment(), Entropic(), Product((Rotation(ANGLE), Scalar(0.8))), memory=List()),
}

def tokens(batch, length):
    widths = {"q": K, "k": K, "v": V, "angle": K // 2, "w": K}
    signal = {n: torch.randn(batch, length, H, d) for n, d in widths.items()}
    signal["w"] = torch.nn.functional.normalize(signal["w"], dim=-1)
    return {**signal, "decay": -torch.rand(batch, length, H), "beta": torch.rand(batch, length, H)}

def gradients(out, state, live):
    ends = [x for x in state.theta if x.requires_grad]
    total = out.double().sin().sum() + sum(torch.where(x.isfinite(), x, 0).double().cos().sum() for x in ends)
    return torch.autograd.grad(total, live, allow_unused=True, materialize_grads=True)

def route(update, signal, state, cu=None):
    moved = {n: x.transpose(1, 2) for n, x in signal.items()}
    out, state = attention.run(update, moved, state, True, cu)
    return out.transpose(1, 2), state

def interpreted(update, signal, state, lengths=None):
    if not lengths:
        return reference.run(update, signal, state, time=1)
    outs, ends, at = [], [], 0
    for n, length in enumerate(lengths):
        own = select(state, torch.tensor([n]), len(lengths))
        if length:
            out, own = reference.run(update, {x: y[:, at : at + length] for x, y in signal.items()}, own, time=1)
            outs.append(out)
        ends.append(own)
        at += length
    return torch.cat(outs, 1), join(ends, 0)

def check(name, batch, length, old, lengths=None, bound=2e-5, half=()):
    update = TUPLES[name]
    b = len(lengths) if lengths else batch
    first = {n: x[:, 0] for n, x in tokens(b, 1).items()}
    start = update.init(first)
    if old:
        start = reference.run(update, tokens(b, old), time=1)[1]
    signal = tokens(1 if lengths else batch, sum(lengths) if lengths else length)
    signal = {n: x.half() if n in half else x for n, x in signal.items()}
    cu = torch.tensor((0, *lengths)).cumsum(0).int() if lengths else None
    found = []
    for run, cast, more in ((route, torch.float32, cu), (interpreted, torch.float64, lengths)):
        live = {n: (x if n in half and cast == torch.float32 else x.to(cast)).detach().requires_grad_()
                for n, x in signal.items()}
        theta = tuple(x.detach().to(cast).requires_grad_() for x in start.theta)
        out, state = run(update, live, start._replace(theta=theta), more)
        found.append([out, *state.theta, *gradients(out, state, [*live.values(), *theta])])
    for n, (x, w) in enumerate(zip(*found)):
        assert x.shape == w.shape, (name, old, lengths, n, x.shape, w.shape)
        if not w.numel():
            continue
        both = torch.where(w.isfinite(), x.double() - w, torch.where(x == w, 0, torch.inf))
        error = (both.norm() / max(torch.where(w.isfinite(), w, 0).norm(), 1e-2 * w.numel() ** 0.5)).item()
        assert error < bound, (name, old, lengths, n, error)
"""

ROUTED = {
    "side by side": """
for name in TUPLES:
    if name != "plain": check(name, 2, 37, 0)
""",
    "carried vectors in half precision": """
check("path", 1, 20, 0, bound=3e-3, half="qkvw")
""",
    "behind a state": """
for name in TUPLES:
    if "path" not in name: check(name, 2, 9, 30), check(name, 2, 1, 30)
""",
    "a token that carries stored keys": """
for old in (1, 140): check("path", 1, 1, old)
check("path, fox", 1, 1, 40)
from axes.routes.attention import room
room._LEAST = 4
for name in ("path", "path, fox"):  # token after token, in buffers; lists that were left behind stay as they were
    update = TUPLES[name]
    signal = {n: x.half() if n in "qkv" else x for n, x in tokens(2, 9).items()}
    with torch.no_grad():
        state = reference.run(update, {n: x[:, :3].float() for n, x in signal.items()}, time=1)[1]
        state = state._replace(theta=(state.theta[0], state.theta[1].half(), *state.theta[2:]))
        want = state._replace(theta=tuple(x.double() for x in state.theta))
        rooms, before = set(), []
        for t in range(3, 9):
            token = {n: x[:, t : t + 1] for n, x in signal.items()}
            before.append((state.theta[0], state.theta[0].clone()))
            out, state = route(update, token, state)
            exact, want = reference.run(update, {n: x.double() for n, x in token.items()}, want, time=1)
            assert state.theta[0].dtype == torch.float32 and out.dtype == torch.float16
            assert (out - exact).norm() < 2e-3 * exact.norm(), (name, t)
            assert (state.theta[0] - want.theta[0]).norm() < 1e-5 * want.theta[0].norm(), (name, t)
            rooms.add(state.theta[0]._base.shape[-2])
            before = before[-3:]
            assert all(torch.equal(*pair) for pair in before)
        assert rooms == {6, 12}, rooms
""",
    "packed": """
for name in TUPLES:
    if "path" not in name: check(name, 1, 0, 0, (4, 0, 33, 1))
""",
    "packed behind states": """
for name in TUPLES:
    if name in ("alibi", "rope, fox", "named angles"): check(name, 1, 0, 5, (4, 0, 33, 1))
""",
}


@pytest.mark.parametrize("name", ROUTED)
def test_the_route_by_kernels_is_the_interpreter(name: str) -> None:
    """Outputs, lists and every gradient, in float32 against the token loop in float64."""
    interpret(ROUTE + ROUTED[name])


@pytest.mark.parametrize("name", CASES)
def test_against_scores_written_out(name: str) -> None:
    interpret(PROGRAM + CASES[name])


@pytest.mark.parametrize("name", CARRIED)
def test_carried_keys_against_the_recurrence(name: str) -> None:
    """In float64, token by token: outputs, all keys at the end, every gradient."""
    interpret(TRANSPORT + CARRIED[name])


def test_a_planted_error_in_a_map_is_found() -> None:
    """The second level alone, and backwards alone."""
    plant = """
from axes.kernels.attention import tree
back, calls = tree.back, []
class Wrong:
    def __getitem__(self, grid):
        def launch(carried, dcarried, maps, *rest, **given):
            calls.append(1)
            back[grid](carried, dcarried, maps.flip(-1) if len(calls) == 1 else maps, *rest, **given)
        return launch
tree.back = Wrong()
"""
    with pytest.raises(AssertionError, match="AssertionError"):
        interpret(TRANSPORT + plant + "check(100, 16, 16)")


def test_a_planted_error_is_found() -> None:
    """Masses of the wrong pairs in the gradients alone."""
    plant = """
from axes.kernels.attention import attend as module
split, calls = module.split, []
def wrong(mass, like):
    calls.append(1)
    high, low = split(mass, like)
    return (high, low) if len(calls) == 1 else (high.roll(1, 1), low)
module.split = wrong
"""
    with pytest.raises(AssertionError, match="AssertionError"):
        interpret(PROGRAM + plant + "check(40, 16, 16)")


def test_masses_in_two_parts_have_the_strides_of_the_whole_where_it_leaves_no_gaps() -> None:
    interpret("""
import torch
from axes.kernels.attention.masses import split
whole = torch.randn(2, 6, 4, dtype=torch.float64)
for mass in (whole, whole.mT, whole[:, ::2], whole[:1].expand(2, 6, 4)):
    high, low = split(mass, whole)
    assert (high.double() + low.double() - mass).abs().max() < 1e-13
assert split(whole.mT, whole)[0].stride() == whole.mT.stride()
""")


def test_a_mass_of_another_shape_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.attention.attend import attend
    from axes.kernels.common import layout

    monkeypatch.setattr(layout, "interpreted", lambda: True)
    given = {n: torch.zeros(1, 4, 2, 8) for n in "qkv"}
    with pytest.raises(ShapeError, match=r"attend: mass is floating point of shape \(1, 4, 2\)"):
        attend(**given, mass=torch.zeros(1, 5, 2), scale=1.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"q": torch.zeros(1, 4, 2)}, r"\(B, T, H, D\), not \(1, 4, 2\)"),
        ({"v": torch.zeros(1, 5, 2, 8)}, r"= \(1, 4, 2, 8\), not \(1, 4, 2, 8\) and \(1, 5, 2, 8\)"),
        ({"q": torch.zeros(1, 4, 3, 8)}, "multiple of the pairs' heads, not 3 of 2"),
        ({n: torch.zeros(1, 4, 2, 300) for n in "qk"}, "from 1 to 256, not 300 and 8"),
        ({"q": torch.zeros(1, 4, 2, 8).double()}, "share one of bf16, fp16, fp32, not torch.float64"),
        ({}, "need a CUDA device, not cpu"),
    ],
)
def test_refusals(change: dict[str, torch.Tensor], complaint: str) -> None:
    from axes.kernels.attention.attend import attend

    given = {n: torch.zeros(1, 4, 2, 8) for n in "qkv"}
    with pytest.raises(ShapeError, match=complaint):
        attend(**{**given, **change}, scale=1.0)
