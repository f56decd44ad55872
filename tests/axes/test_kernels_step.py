"""One token in one launch under Triton's interpreter, against float64; and what the entries refuse.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from tests.interpreter import interpret

PROGRAM = r"""
import torch
from axes.kernels.step import block_step, chain_step

torch.manual_seed(0)

def gap(got, want):
    assert (got.double() - want).norm() < 2e-6 * want.norm(), (got, want)

def wide(x, heads):
    return None if x is None else x.double().repeat_interleave(heads // x.shape[1], 1)

def chain(state, token, index=None):
    heads = token["v"].shape[1]
    q, k, erase, a, b = (wide(token.get(n), heads) for n in ("q", "k", "erase", "a", "b"))
    old, v = state.double(), token["v"].double()
    g = token.get("g")
    kept = old
    if g is not None:
        gate = g.double().clamp_min(-100).exp()
        kept = old * (gate[..., None, None] if g.ndim == 2 else gate[..., None, :])
    if (angle := token.get("turn")) is not None:  # pairs (j, j + 3) as complex numbers, before the gate
        pairs = torch.complex(*old.chunk(2, -1)) * torch.exp(1j * angle.double())[..., None, :]
        kept = kept / old * torch.cat((pairs.real, pairs.imag), -1)
    if token["rule"] == "average":
        k = k * (1 - gate)
    if token["rule"] == "dplr":
        kept = kept + (old @ a[..., None]) * b[..., None, :]
    if token["rule"] == "delta":
        v = v - ((old if token.get("early") else kept) @ (k if erase is None else erase)[..., None])[..., 0]
    if "beta" in token:
        v = token["beta"].double()[..., None] * v
    new = kept + v[..., :, None] * k[..., None, :]
    want = (new @ q[..., None])[..., 0]
    o = chain_step(state, **token)
    gap(o, want), gap(state, new)

for rule, more in (("average", {}), ("write", {}), ("delta", {}), ("delta", {"early": True}),
                   ("delta", {"erase": torch.randn(2, 1, 5)}),
                   ("dplr", {"a": torch.randn(2, 1, 5), "b": torch.randn(2, 1, 5)})):
    for g in (None, -torch.rand(2, 2), -10 * torch.rand(2, 2, 5))[2 if rule == "average" else 0 :]:
        token = {"q": torch.randn(2, 1, 5), "k": torch.randn(2, 1, 5), "v": torch.randn(2, 2, 9), "rule": rule, **more}
        token |= {} if g is None else {"g": g, "beta": torch.rand(2, 2)}
        chain(torch.randn(2, 2, 9, 5), token)

heads = {"q": torch.randn(2, 2, 5), "k": torch.randn(2, 2, 5), "v": torch.randn(2, 4, 9)}  # two share a key
chain(torch.randn(2, 4, 9, 5), {**heads, "rule": "delta", "g": -torch.rand(2, 4), "beta": torch.rand(2, 4)})

angles = torch.randn(2, 2, 6)[..., 3:]
for angle in (torch.randn(3), angles, angles[:, :1].expand(-1, 2, -1), torch.randn(2, 2, 3, 2)[..., 0]):
    for g in (None, -torch.rand(2, 2), -10 * torch.rand(2, 2, 6)):
        turning = {"q": torch.randn(2, 1, 6), "k": torch.randn(2, 1, 6), "v": torch.randn(2, 2, 9), "rule": "write",
                   "turn": angle} | ({} if g is None else {"g": g, "beta": torch.rand(2, 2)})
        chain(torch.randn(2, 2, 9, 6), turning)

# rows of a pool, one of them padding; o in a given tensor
pool = torch.randn(4, 2, 9, 5)
before, index = pool.clone(), torch.tensor([3, -1])
alone = before[3:].clone()
want = chain_step(alone, **{n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in token.items()})
out = torch.empty_like(token["v"])
assert chain_step(pool, **token, index=index, out=out) is out
assert torch.equal(out[:1], want) and not out[1].any()
assert torch.equal(pool[3:], alone) and torch.equal(pool[:3], before[:3])

# the new state elsewhere
state, new = torch.randn(2, 2, 9, 5), torch.empty(2, 2, 9, 5)
before = state.clone()
o = chain_step(state, **token, into=new)
assert torch.equal(state, before) and torch.equal(chain_step(state, **token), o) and torch.equal(state, new)

# a state held in 16 bits: the numbers of the wide one, rounded as they are written
def rounded(step, state, *token, **more):
    for dtype in (torch.bfloat16, torch.float16):
        held = state.to(dtype)
        wide, elsewhere = held.float(), torch.empty_like(held)
        want, new = step(wide, *token, **more), step(held, *token, into=elsewhere, **more)
        near = torch.isclose(elsewhere.float(), wide, rtol=2**-7, atol=0).all()  # the interpreter cuts bfloat16 off
        assert torch.equal(want, new) and (near if dtype is torch.bfloat16 else torch.equal(elsewhere, wide.to(dtype)))
        assert torch.equal(step(held, *token, **more), want) and torch.equal(held, elsewhere)

rounded(chain_step, torch.randn(2, 2, 9, 5), **token)
rounded(chain_step, torch.randn(2, 2, 9, 6), **turning)
for erase in (None, torch.randn(2, 2, 2)):
    rounded(block_step, torch.randn(2, 2, 9, 2, 5), *(token[n] for n in "qkv"), torch.randn(2, 2, 2, 2),
            torch.rand(2, 2, 2), erase)

for erase in (None, torch.randn(2, 2, 2)):
    state, block, write = torch.randn(2, 2, 9, 2, 5), torch.randn(2, 2, 2, 2), torch.rand(2, 2, 2)
    q, k, v = token["q"], token["k"], token["v"]
    old, key = state.double(), wide(k, 2)
    seen = 0 if erase is None else torch.einsum("bhvik,bhi,bhk->bhv", old, erase.double(), key)
    new = torch.einsum("bhvik,bhij->bhvjk", old, block.double())
    new = new + torch.einsum("bhv,bhj,bhk->bhvjk", v - seen, write.double(), key)
    o = block_step(state, q, k, v, block, write, erase)
    gap(state, new), gap(o, (new[..., 0, :] @ wide(q, 2)[..., None])[..., 0])
"""


def test_equals_the_recurrence() -> None:
    interpret(PROGRAM)


def arguments() -> dict[str, Any]:
    return {
        "state": torch.zeros(2, 4, 5, 8),
        "q": torch.zeros(2, 2, 8),
        "k": torch.zeros(2, 2, 8),
        "v": torch.zeros(2, 4, 5),
    }


REFUSALS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"q": torch.zeros(2, 1, 2, 8)}, r"one token, \(B, H, D\)"),
    ({"k": torch.zeros(2, 2, 7)}, "k has the shape of q"),
    ({"v": torch.zeros(2, 3, 5)}, "value heads are a multiple"),
    ({"v": torch.zeros(2, 4, 5).double()}, "share one of bf16"),
    ({"v": torch.zeros(2, 4, 257)}, "from 1 to 256"),
    ({}, "need a CUDA device"),
)


@pytest.mark.parametrize(("change", "says"), REFUSALS)
def test_refuses_tokens(change: dict[str, Any], says: str) -> None:
    from axes.kernels.step import chain_step

    with pytest.raises(ShapeError, match=says):
        chain_step(**{**arguments(), **change})


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"state": torch.zeros(2, 4, 8, 5)}, "state is float32"),
        ({"state": torch.zeros(2, 4, 5, 8).double()}, "state is float32, or held in 16 bits"),
        ({"state": torch.zeros(1, 4, 5, 8).expand(2, -1, -1, -1)}, "contiguous and apart"),
        ({"state": torch.zeros(3, 4, 5, 8)}, "one row a batch entry"),
        ({"index": torch.zeros(2)}, "index is int32 or int64"),
        ({"rule": "deltas"}, "rule is write, average, delta or dplr"),
        ({"rule": "average"}, "the gates of a key's entries forget"),
        ({"rule": "dplr"}, "takes a and b"),
        ({"erase": torch.zeros(2, 2, 8)}, "erase belongs to the rule delta"),
        ({"beta": torch.zeros(2, 2)}, "beta is floating point of shape"),
        ({"g": torch.zeros(2, 4, 5)}, "g is floating point of shape"),
        ({"turn": torch.zeros(2, 4, 5)}, "turn is floating point of shape"),
        ({"turn": torch.zeros(4), "rule": "delta"}, "a state that turns is written to"),
        (
            {"turn": torch.zeros(3), "state": torch.zeros(2, 4, 5, 7), **{n: torch.zeros(2, 2, 7) for n in "qk"}},
            "their width is even, not 7",
        ),
        ({"out": torch.zeros(2, 4, 8)}, "out is contiguous"),
        ({"into": torch.zeros(2, 4, 8, 5)}, "into is like the state"),
        ({"into": torch.zeros(2, 4, 5, 8), "index": torch.zeros(2, dtype=torch.int64)}, "give index or into"),
        ({"v": torch.zeros(2, 4, 5, requires_grad=True)}, "no gradient"),
    ),
)
def test_refuses(change: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.common import layout
    from axes.kernels.step import chain_step

    monkeypatch.setattr(layout, "interpreted", lambda: True)  # as if the CPU would do: every refusal comes first
    with pytest.raises(ValueError, match=says):
        chain_step(**{**arguments(), **change})
