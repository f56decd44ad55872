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
        value = v[t].double()
        if rule == "delta":
            value = value - ((state if early else kept) @ (k if erase is None else erase)[t][..., None])[..., 0]
        if rule == "dplr":
            kept = kept + (state @ a[t][..., None]) * b[t][:, None, :]
        if beta is not None:
            value = value * beta[t].double()[:, None]
        state = kept + value[..., None] * k[t][:, None, :]
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


def test_two_strengths() -> None:
    interpret(
        PROGRAM
        + """
given = tokens(1, 38, False)
k, v, beta, g, start = (given[n] for n in ("k", "v", "beta", "g", "initial_state"))
write = torch.rand(beta.shape)
v[0, 35, 1, 0] = math.nan
# the same values by one strength: those of erases, and values as large as their writes are to them
want, state = loop(given["q"][0], k[0], v[0] * (write / beta)[0, ..., None], beta[0], g[0], rule="delta",
                   initial_state=start[0])
o = want[None].float()
final = torch.zeros_like(start)
o[:, 32:, 1, 0] = math.nan  # the second chunk of 32, from its first token on
contain.contain(o, final, given["q"], k, v, beta, g, start, None, 32, "two", b=write)
same(o[0], want, "outputs"), same(final[0, 1], state[1], "the last state")
assert not final[0, 0].any()  # of a head that was not spoilt nothing is made again
"""
    )
