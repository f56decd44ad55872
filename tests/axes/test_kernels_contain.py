"""Chunks that a NaN or an infinity spoilt, made again token by token, under Triton's interpreter against a plain loop.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from tests.interpreter import interpret

PROGRAM = r"""
import math
import torch
from axes.kernels import contain
from axes.kernels.diagonal.chain import diagonal_chain
from axes.kernels.scalar.chain import scalar_chain

torch.manual_seed(0)
D_K, D_V = 5, 3

def loop(q, k, v, beta=None, g=None, erase=None, a=None, b=None, initial_state=None, rule="write", early=False, **_):
    # the recurrence in float64, (T, HV, ...) of one sequence
    heads = v.shape[1]
    q, k, erase, a, b = (
        None if x is None else x.double().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, erase, a, b)
    )
    state = torch.zeros(heads, D_V, D_K).double() if initial_state is None else initial_state.double()
    outputs = []
    for t in range(len(v)):
        kept = state
        if g is not None:
            gate = g[t].double().clamp_min(-100).exp()
            kept = state * (gate[:, None, None] if gate.ndim == 1 else gate[:, None, :])
        value, key = v[t].double(), k[t]
        if rule == "average":
            key = key * (1 - gate)
        if rule == "delta":
            value = value - ((state if early else kept) @ (k if erase is None else erase)[t][..., None])[..., 0]
        if rule == "dplr":
            kept = kept + (state @ a[t][..., None]) * b[t][:, None, :]
        if beta is not None:
            value = value * beta[t].double()[:, None]
        state = kept + value[..., None] * key[:, None, :]
        outputs.append((state @ q[t][..., None])[..., 0])
    return torch.stack(outputs) if outputs else v.double(), state

def same(got, want, what):
    assert torch.equal(got.isfinite(), want.isfinite()), (what, got.isfinite(), want.isfinite())
    torch.testing.assert_close(got.double().nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0), rtol=1e-4, atol=1e-5)

def tokens(batch, length, channels, *names):
    made = {n: 0.5 * torch.randn(batch, length, 1, D_K) for n in ("q", "k", *names)}
    made |= {"v": torch.randn(batch, length, 2, D_V), "beta": torch.rand(batch, length, 2)}
    made["initial_state"] = torch.randn(batch, 2, D_V, D_K)
    return made | {"g": -0.05 * torch.rand(batch, length, 2, *[D_K] * channels)}

def spoilt(given, at):
    # every sequence but the first by another input, at one token of the last head; which and by what
    named = [(n, math.inf if n == "v" else math.nan) for n in given if n != "initial_state"] + [("k", math.inf)]
    given = {n: x.repeat_interleave(len(named) + 1, 0) for n, x in given.items()}
    for i, (n, x) in enumerate(named):
        given[n][i + 1, at, -1].view(-1)[-1] = x
    return given, [("nothing", 0), *named]

def check(chain, given, options, at):
    given, named = spoilt(given, at)
    before = []
    true = contain.contain
    contain.contain = lambda o, *rest, **more: (before.append(o.clone()), true(o, *rest, **more))
    out, last = chain(**given, **options)
    (before,) = before
    for i, what in enumerate(named):
        want, state = loop(**{n: x[i] for n, x in given.items()}, **options)
        assert want[:at].isfinite().all()
        same(out[i], want, what), same(last[i], state, what)
    assert torch.equal(before[0], out[0])  # what is finite is as it was, bit for bit
    assert not before[named.index(("v", math.inf)), at - 3 : at].isfinite().all()  # this test could fail

LENGTH, AT = 38, 35  # in the second chunk
"""


@pytest.mark.parametrize(
    ("chain", "rule", "early", "names"),
    [
        ("scalar", "write", False, ""),
        ("scalar", "delta", True, "erase"),
        ("diagonal", "write", False, ""),
        ("diagonal", "average", False, ""),
        ("diagonal", "delta", False, ""),
        ("diagonal", "dplr", False, "a b"),
    ],
)
def test_earlier_tokens_are_as_they_were_and_later_ones_as_the_recurrence_says(
    chain: str, rule: str, early: bool, names: str
) -> None:
    interpret(
        PROGRAM
        + f"""
given = tokens(1, LENGTH, {chain == "diagonal"}, *"{names}".split())
options = dict(rule="{rule}", early={early})
check({chain}_chain, given, options, AT)
"""
    )


def test_packed_sequences_segments_and_no_gates() -> None:
    interpret(
        PROGRAM
        + """
cu = torch.tensor([0, 10, 10, 50, 57], dtype=torch.int32)
given = {n: x for n, x in tokens(1, 57, False).items() if n not in ("g", "initial_state")}
given["v"][0, 44, 1, 0] = math.nan
out, last = scalar_chain(**given, rule="delta", cu_seqlens=cu)
for i, (first, end) in enumerate(zip(cu[:-1], cu[1:])):
    want, state = loop(**{n: x[0, first:end] for n, x in given.items()}, rule="delta")
    same(out[0, first:end], want, i), same(last[i], state, i)

given = tokens(1, 70, False)
del given["beta"]
given["k"][0, 40] = math.inf
out, last = scalar_chain(**given, rule="write", segments=2)
want, state = loop(**{n: x[0] for n, x in given.items()}, rule="write")
same(out[0], want, "segments"), same(last[0], state, "segments")
"""
    )


def test_gates_of_rows_a_share_of_the_own_token_and_two_slots() -> None:
    interpret(
        PROGRAM
        + """
from axes.kernels.block.chain import block_chain
from axes.kernels.diagonal.rows import rows_chain

LENGTH, AT = 14, 11

def no_more_than_it_says(run, given, meant):
    given, named = spoilt(given, AT)
    some = [i for i, (n, x) in enumerate(named) if n in ("nothing", "v", "g", "block")]
    given, named = {n: x[some] for n, x in given.items()}, [named[i] for i in some]
    out, last = run(**given)
    contain.PICKED = False
    without, _ = run(**given)
    contain.PICKED = True
    assert torch.equal(out[0], without[0])
    assert not without[:, :AT].isfinite().all()  # this test could fail
    for i, what in enumerate(named):
        want, state = meant(**{n: x[i].double() for n, x in given.items()})
        assert want[:AT].isfinite().all()
        same(out[i], want, what), same(last[i], state, what)

def rows(q, k, v, g, initial_state):
    state, outputs = initial_state, []
    for t in range(len(v)):
        state = state * g[t].exp()[..., None] + v[t][..., None] * k[t][:, None, :]
        outputs.append((state @ q[t][..., None])[..., 0])
    return torch.stack(outputs), state

given = tokens(1, LENGTH, False)
del given["beta"]
for n in "qk":
    given[n] = 0.5 * torch.randn(1, LENGTH, 2, D_K)
given["g"] = -0.05 * torch.rand(1, LENGTH, 2, D_V)
no_more_than_it_says(rows_chain, given, rows)

bonus = torch.rand(2, D_K)

def ahead(q, k, v, g, initial_state):
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    state, outputs = initial_state, []
    for t in range(len(v)):
        own = (bonus * k[t] * q[t]).sum(-1)
        outputs.append((state @ q[t][..., None])[..., 0] + own[:, None] * v[t])
        state = state * g[t].exp()[:, None, :] + v[t][..., None] * k[t][:, None, :]
    return torch.stack(outputs), state

given = tokens(1, LENGTH, True)
del given["beta"]
no_more_than_it_says(lambda **x: diagonal_chain(**x, rule="write", bonus=bonus), given, ahead)

def two(q, k, v, block, write, erase, initial_state):
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    state, outputs = initial_state, []  # (HV, V, 2, K)
    for t in range(len(v)):
        seen = torch.einsum("hvsk,hs,hk->hv", state, erase[t], k[t])
        drive = (v[t] - seen)[..., None] * k[t][:, None, :]
        moved = torch.einsum("hvsk,hsr->hvrk", state, block[t])
        state = moved + write[t][:, None, :, None] * drive[:, :, None, :]
        outputs.append((state[:, :, 0] @ q[t][..., None])[..., 0])
    return torch.stack(outputs), state

given = {n: x for n, x in tokens(1, LENGTH, False).items() if n not in ("beta", "g")}
given |= {"block": 0.4 * torch.rand(1, LENGTH, 2, 2, 2), "write": torch.rand(1, LENGTH, 2, 2)}
given |= {"erase": 0.3 * torch.rand(1, LENGTH, 2, 2), "initial_state": torch.randn(1, 2, D_V, 2, D_K)}
no_more_than_it_says(block_chain, given, two)
"""
    )


def test_the_mass_of_writes_reaches_no_earlier_chunk() -> None:
    """Chunks are carried over by a product of matrices, and those of a chunk are added by one."""
    interpret(
        PROGRAM
        + """
from axes.kernels.scalar.mass import mass_chain

given = {n: x for n, x in tokens(1, 100, False).items() if n != "initial_state"}
given, named = spoilt(given, 70)
mass, last, *_ = mass_chain(**given)
for i, (n, _) in enumerate(named[1:], 1):
    assert torch.equal(mass[i, :64], mass[0, :64]), n
    assert torch.equal(mass[i, :70], mass[0, :70]) and torch.equal(mass[i, :, 0], mass[0, :, 0]) or n in "qk", n
    assert mass[i, :70].isfinite().all(), n
    if n in ("k", "beta", "g"):
        assert not mass[i, 70:, 1].isfinite().any() and not last[i, 1].isfinite().all(), n
"""
    )


def test_attention_reads_again_what_later_values_spoilt() -> None:
    """With masses, pairs of before, shared heads; packed; by torch's own attention."""
    interpret(
        PROGRAM
        + """
from axes.kernels.attention.attend import attend
from axes.routes.attention import softmax

def plain(q, k, v, mass, old):
    (t, h, _), (s, g, _) = q.shape, k.shape
    k, v, mass = (x.double().repeat_interleave(h // g, 1) for x in (k, v, mass))
    outputs = []
    for i in range(t):
        n = old + i + 1
        scores = 0.3 * torch.einsum("hd,shd->sh", q[i].double(), k[:n]) + mass[:n]
        outputs.append(torch.einsum("sh,shd->hd", torch.softmax(scores, 0), v[:n]))
    return torch.stack(outputs)

LENGTH, OLD, AT = 70, 5, 50
q = torch.randn(6, LENGTH, 2, 16)
k, v = (torch.randn(6, OLD + LENGTH, 1, d) for d in (16, 12))
mass = -torch.rand(6, OLD + LENGTH, 1).cumsum(1)
v[1, OLD + AT, 0, 3] = v[5, OLD + AT, 0, 0] = math.nan
v[2, OLD + AT, 0, 2] = v[5, 3, 0, 1] = math.inf
k[3, OLD + AT, 0, 0] = q[4, AT, 1, 0] = math.nan
out = attend(q, k, v, mass, scale=0.3)
contain.PICKED = False
without = attend(q, k, v, mass, scale=0.3)
contain.PICKED = True
kept = without.isfinite()
assert torch.equal(out[kept], without[kept]) and not torch.equal(out.isfinite(), kept)
for i in range(6):
    same(out[i], plain(q[i], k[i], v[i], mass[i], OLD), i)

cu = torch.tensor([0, 20, 20, LENGTH], dtype=torch.int32)
packed = [x[:1, OLD:] for x in (k, v.clone())]
packed[1][0, 60, 0, 2] = math.nan
out = attend(q[:1], *packed, scale=0.3, cu_seqlens=cu)[0]
for first, end in ((0, 20), (20, LENGTH)):
    part = slice(first, end)
    same(out[part], plain(q[0, part], packed[0][0, part], packed[1][0, part], torch.zeros(end - first, 1), 0), first)

large = [x[:1, OLD:].clone() for x in (k, v)]  # scores that overflow, of finite keys: nobody ahead of them hears it
asked, (key, value) = 100 * q[:1], large
whole = attend(asked, key, value, scale=0.3)
key[0, AT, 0] = 3e38 * asked[0, AT + 1, 0].sign()
out = attend(asked, key, value, scale=0.3)
assert torch.equal(out[:, :AT], whole[:, :AT]) and not out[:, AT + 1, 0].isfinite().any()

softmax.may_mend = lambda x: True
q, k, v = (x.transpose(1, 2) for x in (q, k[:, OLD:].expand(-1, -1, 2, -1), v[:, OLD:].expand(-1, -1, 2, -1)))
out = softmax.attend(q, k, v, 0.3)
for i in range(6):
    want = plain(*(x[i].transpose(0, 1) for x in (q, k, v)), torch.zeros(LENGTH, 2), 0)
    same(out[i].transpose(0, 1), want, i)

out = softmax.attend(q, k, v, 0.3, window=20, stay=3)  # nor do values behind the window reach anybody
for t in range(LENGTH):
    some = torch.tensor([j for j in range(t + 1) if j > t - 20 or j < 3])
    scores = 0.3 * torch.einsum("bhd,bhsd->bhs", q[:, :, t].double(), k[:, :, some].double())
    want = torch.einsum("bhs,bhsd->bhd", torch.softmax(scores, -1), v[:, :, some].double())
    same(out[:, :, t], want, t)
"""
    )


def test_compilers_follow_the_launch_behind_fused_attention() -> None:
    """With the gradients of what is finite; where transforms of torch.func follow, no kernel looks."""
    interpret(
        """
import math
import torch
from axes.kernels import contain
from axes.routes.attention import softmax
from torch.testing import assert_close

torch.manual_seed(0)
asked = []

def may_mend(x):
    asked.append(1)
    return not softmax._transformed()

softmax.may_mend = may_mend
q, k, v = (torch.randn(2, 2, 40, 8) for _ in range(3))
v[1, 0, 30, 2] = math.nan

def read(q, k, v):
    return softmax.attend(q, k, v, 0.3)

whole = read(q, k, v)
assert whole[:, :, :30].isfinite().all() and whole[1, 0, 30:, 2].isnan().all() and asked
contain.PICKED = False
assert not read(q, k, v)[:, :, :30].isfinite().all()  # this test could fail
contain.PICKED = True
compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(q, k, v).nan_to_num(7), whole.nan_to_num(7))
given = [x.clone().requires_grad_() for x in (q, k, v)]
along = torch.randn(whole[0].shape)
found = [torch.autograd.grad((run(*given)[0] * along).sum(), given) for run in (read, compiled)]
for want, got in zip(*found, strict=True):
    assert_close(got[0], want[0])
    assert got[0].abs().max() > 0
each = torch.compile(lambda *x: torch.func.vmap(read)(*x), backend="aot_eager", fullgraph=True)
assert_close(each(q, k, v)[0], whole[0])
"""
    )


def test_attention_with_carried_keys_walks_back_from_spoilt_blocks() -> None:
    interpret(
        PROGRAM
        + """
from axes.kernels.attention.transport import transport

LENGTH, AT, D_K, D_V = 45, 41, 16, 12
widths = dict(q=D_K, k=D_K, v=D_V, a=D_K, b=D_K)
given = {n: (0.2 if n in "ab" else 1) * torch.randn(1, LENGTH, 2, d) for n, d in widths.items()}
given |= {"mass": -torch.rand(1, LENGTH, 2).cumsum(1)}
given, named = spoilt(given, AT)
given, named = {n: x[:-1] for n, x in given.items()}, named[:-1]
given["mass"][-1] = given["mass"][0]  # a list of sums, which a NaN never leaves
given["v"][-1, AT, 0, 1] = math.nan  # columns decide for themselves
out, _ = transport(**given, scale=0.3)
contain.PICKED = False
without, _ = transport(**given, scale=0.3)
kept = without.isfinite()
assert torch.equal(out[kept], without[kept]) and not kept[:, :AT].all()  # this test could fail
for n, what in enumerate(named):
    q, k, v, a, b, mass = (x[n].double() for x in given.values())
    for head in range(2):
        keys, outputs = k[:0, head], []
        for t in range(LENGTH):
            keys = torch.cat((keys + (keys @ a[t, head])[:, None] * b[t, head] if t else keys, k[t : t + 1, head]))
            weights = torch.softmax(0.3 * keys @ q[t, head] + mass[: t + 1, head], 0)
            outputs.append(weights @ v[: t + 1, head])
        same(out[n, :, head], torch.stack(outputs), (what, head))
"""
    )


def test_levels_walk_back_from_spoilt_chunks() -> None:
    """Of a chain that erases nothing, and inside of chunks of one that does."""
    interpret(
        PROGRAM
        + """
from axes.kernels.levels.chain import levels_chain
from axes.kernels.levels.inside import levels_inside

LENGTH, AT, CHUNK, D_K, D_V = 44, 41, 32, 16, 12

def plain(q, k, v, g, w, beta=None, a=None, chunk=LENGTH):
    # by the tokens that each one sees, (T, H, ..)
    out = torch.zeros_like(v)
    for t in range(LENGTH):
        asked = q[t]
        for s in range(t, t // chunk * chunk - 1, -1):
            level = min((t ^ s).bit_length(), w.shape[-1] - 1)
            met = (asked * k[s]).sum(-1, keepdim=True)
            out[t] += w[t, :, level, None] * met * v[s] * (1 if beta is None else beta[s, :, None])
            asked = g[s, :, None].exp() * (asked if a is None else asked - met * a[s])
    return out

numbers = {n: torch.rand(1, LENGTH, 2) for n in ("beta", "g")}
given = {n: 0.5 * torch.randn(1, LENGTH, 2, d) for n, d in dict(q=D_K, k=D_K, v=D_V, a=D_K).items()}
given |= {"beta": numbers["beta"], "g": -0.1 * numbers["g"], "w": torch.rand(1, LENGTH, 2, 7)}
given, named = spoilt(given, AT)
given, named = {n: x[2:6] for n, x in given.items()}, named[2:6]  # k, v, a and beta
for run, without, chunk in (
    (lambda **x: levels_chain(**x)[0], "a", LENGTH), (lambda **x: levels_inside(**x), "beta", CHUNK)
):
    own = {n: x for n, x in given.items() if n != without}
    out = run(**own)
    contain.PICKED = False
    before = run(**own)
    contain.PICKED = True
    kept = before.isfinite()
    assert torch.equal(out[kept], before[kept]) and not kept[:, :AT].all()  # this test could fail
    for i, what in enumerate(named):
        if what[0] != without:
            same(out[i], plain(**{n: x[i].double() for n, x in own.items()}, chunk=chunk), what)
"""
    )


SUBSTITUTION = r"""
import torch
from axes import dispatch
from axes.kernels import contain
from axes.kernels.common import versions
from axes.sequence import ALL, PREDICTED
from tests.spoilt import check, spoilt

versions.refusal = lambda *given, **named: None
torch.manual_seed(0)
(update,) = {cls.update for cls in (*ALL, *PREDICTED) if cls.name == NAME}
given, named = spoilt(update, 41, 40, 16, torch.float32)
out, last = dispatch.run(update, given, implementation="triton")
contain.PICKED = False
without, _ = dispatch.run(update, given, implementation="triton")
assert torch.equal(out[0], without[0]) and not without[:, :40].isfinite().all()
check(out, 40, named, 8, 1e-5)
want, state = dispatch.run(update, {n: x.double() for n, x in given.items()}, implementation="reference")
for got, meant in ((out, want), (last.theta[0], state.theta[0])):
    assert torch.equal(got.isfinite(), meant.isfinite())
    torch.testing.assert_close(got.double().nan_to_num(0, 0, 0), meant.nan_to_num(0, 0, 0), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("name", ["longhorn", "ttt-linear", "yaad-matrix"])
def test_substitution_makes_blocks_again(name: str) -> None:
    """Rows that do not meet, and rows that do in a norm; errors of the state at hand, and of one that is held."""
    interpret(f"NAME = {name!r}\n{SUBSTITUTION}")


def test_two_strengths_and_the_last_read_of_two_writes() -> None:
    interpret(
        PROGRAM
        + """
given = tokens(1, 38, False)
k, v, beta, g, start = (given[n] for n in ("k", "v", "beta", "g", "initial_state"))
write = torch.rand(beta.shape)
v[0, 35, 1, 0] = math.nan
for every in (1, 2):
    # the same values by one strength: those of erases, and values as large as their writes are to them
    want, state = loop(given["q"][0], k[0], v[0] * (write / beta)[0, ..., None], beta[0], g[0], rule="delta",
                       initial_state=start[0])
    want = want[every - 1 :: every]
    o = want[None].float()
    final = torch.zeros_like(start)
    q = given["q"][:, every - 1 :: every].contiguous()
    o[:, 32 // every :, 1, 0] = math.nan  # the second chunk of 32, from its first token on
    contain.contain(o, final, q, k, v, beta, g, start, None, 32, "two", b=write)
    same(o[0], want, every), same(final[0, 1], state[1], "the last state")
    assert not final[0, 0].any()  # of a head that was not spoilt nothing is made again
"""
    )
