"""Chains with one decay a channel under Triton's interpreter against a float64 token loop; and what is refused.

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
from torch.nn.functional import normalize
from axes.kernels.diagonal.chain import diagonal_chain

torch.manual_seed(0)

def token_loop(q, k, v, g, beta=None, start=None, bonus=None, cu_seqlens=None, average=False):
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    k = k * (1 - g.exp()) if average else k
    written = v if beta is None else v * beta[..., None]
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outs, last = [], []
    for u, (first, end) in enumerate(zip(ends, ends[1:])):
        packed = cu_seqlens is not None
        state = q.new_zeros(q.shape[0], v.shape[2], v.shape[3], q.shape[3])
        if start is not None:
            state = start[u : u + 1] if packed else start
        for t in range(first, end):
            before, wrote = state, written[:, t, ..., None] * k[:, t, :, None]
            state = state * g[:, t, :, None].clamp(min=-100).exp() + wrote
            read = state if bonus is None else before + wrote * bonus[:, None]
            outs.append((read @ q[:, t, ..., None])[..., 0])
        last.append(state)
    return torch.stack(outs, 1), torch.cat(last)

def draw(length, d_k, d_v, dtype, kind, b=2, h=1, hv=2, units=None, bonus=False):
    q, k = (normalize(torch.randn(b, length, h, d_k), dim=-1) for _ in range(2))
    v = torch.randn(b, length, hv, d_v)
    g = -torch.exp(torch.linspace(-6, 0, d_k)) * torch.rand(b, length, hv, d_k) / (20 if kind == "mild" else 1)
    if kind == "open":  # what they forget is little, and keys are long
        g, k = -1e-5 * torch.rand_like(g), 1e5 * k
    if kind == "closed":
        g = torch.where(torch.rand_like(g) < 0.2, -1e3, 10 * g)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out = dict(q=q, k=k, v=v, g=g)
    if kind != "bare":
        out |= dict(beta=torch.rand(b, length, hv), start=torch.randn(units or b, hv, d_v, d_k))
    if bonus:
        out |= dict(bonus=torch.randn(hv, d_k))
    return out

def run(rule, inputs, do, dfinal, **more):
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    o, final = rule(**leaves, **more)
    grads = torch.autograd.grad((o, final), list(leaves.values()), (do.to(o.dtype), dfinal.to(final.dtype)))
    return dict(o=o, final=final) | {f"d{n}": x for n, x in zip(leaves, grads)}

def rule(start=None, average=False, **given):
    return diagonal_chain(**given, initial_state=start, rule="average" if average else "write")

def check(length, d_k, d_v, dtype, kind, bound, units=None, bonus=False, **more):
    inputs = draw(length, d_k, d_v, dtype, kind, units=units, bonus=bonus, **(dict(b=1) if units else {}))
    do, dfinal = torch.randn_like(inputs["v"]), torch.randn(units or 2, 2, d_v, d_k)
    got = run(rule, inputs, do, dfinal, **more)
    want = run(token_loop, {n: x.double() for n, x in inputs.items()}, do.double(), dfinal.double(), **more)
    for name, w in want.items():
        error = ((got[name] - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        print(length, d_k, d_v, dtype, kind, name, f"{error:.1e}")
        assert error < bound, (length, d_k, d_v, dtype, kind, name, error)
"""

ROWS = r"""
from axes.kernels.diagonal.rows import rows_chain

def rows_loop(q, k, v, g, start=None, cu_seqlens=None, average=False):
    v = v * (1 - g.exp()) if average else v
    outs, states = [], []
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    for u, (first, end) in enumerate(zip(ends, ends[1:])):
        state = q.new_zeros(q.shape[0], q.shape[2], v.shape[3], q.shape[3]) if start is None else start
        state = state[u : u + 1] if cu_seqlens is not None and start is not None else state
        for t in range(first, end):
            state = state * g[:, t, ..., None].clamp(min=-100).exp() + v[:, t, ..., None] * k[:, t, :, None]
            outs.append((state @ q[:, t, ..., None])[..., 0])
        states.append(state)
    return torch.stack(outs, 1), torch.cat(states)

def rows(length, d_k, d_v, dtype, kind, bound, units=None, **more):
    given = draw(length, d_v, d_k, dtype, kind, b=1 if units else 2, h=2, units=units)
    given = dict(q=given["v"], k=torch.randn_like(given["v"]), v=given["k"], g=given["g"])
    given |= dict(start=torch.randn(units or 2, 2, d_v, d_k)) if kind != "bare" else {}
    do, dfinal = torch.randn_like(given["v"]), torch.randn(units or 2, 2, d_v, d_k)
    got = run(lambda start=None, **x: rows_chain(**x, initial_state=start), given, do, dfinal, **more)
    want = run(rows_loop, {n: x.double() for n, x in given.items()}, do.double(), dfinal.double(), **more)
    for name, w in want.items():
        error = ((got[name] - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        assert error < bound, (length, d_k, d_v, dtype, kind, name, error)
"""

CASES = {
    "rows": ROWS + """
rows(40, 16, 20, torch.float32, "random", 3e-6)
rows(33, 20, 5, torch.float32, "closed", 3e-6)
rows(1, 16, 3, torch.float32, "random", 3e-6)
rows(20, 16, 3, torch.float32, "bare", 3e-6)
rows(40, 17, 40, torch.float32, "random", 3e-6, units=3, cu_seqlens=torch.tensor([0, 3, 33, 40]))
rows(70, 16, 20, torch.float16, "mild", 4e-3)
rows(33, 20, 5, torch.float32, "closed", 3e-6, average=True)
rows(41, 17, 20, torch.float32, "random", 3e-6, units=3, average=True, cu_seqlens=torch.tensor([0, 3, 33, 41]))
""",
    "full": """
check(40, 16, 16, torch.float32, "random", 3e-6)
check(33, 5, 20, torch.float32, "closed", 3e-6)
check(1, 16, 3, torch.float32, "bare", 3e-6)
""",
    "half": """
check(70, 16, 20, torch.float16, "mild", 3e-3)
check(65, 20, 16, torch.float16, "closed", 3e-3)
""",
    "hopper": """
from axes.kernels.diagonal import chain as diagonal, hopper as hopper_diagonal
from axes.kernels.scalar import hopper_write

def forward(q, k, v, g, beta, start, mild, keep, bonus, average):  # the Hopper pass: leaves P of chunks not mild
    (b, t, h, d_k), (hv, d_v) = q.shape, v.shape[2:]
    cut, state = diagonal.layout(b, t, 64), start
    k = k.repeat_interleave(hv // h, 2) * (1 - g.exp()) if average else k
    o, totals = torch.empty_like(v), g.new_empty(cut.slots, hv, d_k)
    scores = q.new_zeros(cut.slots, hv, 64, 64)
    for n, at in enumerate(range(0, t, 64)):
        cq, ck = (x[:, at : at + 64].float().repeat_interleave(hv // x.shape[2], 2).transpose(1, 2) for x in (q, k))
        u, log = ((x.transpose(1, 2))[:, :, at : at + 64] for x in (v * beta[..., None], g.clamp(min=-100)))
        run = log.cumsum(2)
        total, read = run[:, :, -1:], run if bonus is None else run - log
        p = ((cq * read.exp()) @ (ck * (-run).clamp(max=mild).exp()).mT).tril()
        if bonus is not None:
            p = p.tril(-1) + torch.diag_embed((cq * ck * bonus[:, None]).sum(-1))
        p = torch.where((total.amin((2, 3)) >= -mild)[..., None, None], p, 0.0)
        o[:, at : at + 64] = ((cq * read.exp()) @ state.mT + p @ u).transpose(1, 2).to(o.dtype)
        scores.view(b, cut.chunks, hv, 64, 64)[:, n, :, : p.shape[2], : p.shape[2]] = p
        totals.view(b, cut.chunks, hv, d_k)[:, n] = total[:, :, 0]
        state = state * total.exp() + u.mT @ (ck * (total - run).exp())
    return o, state, scores, totals

def states(q, k, v, g, beta, start, average):
    cut = diagonal.layout(*k.shape[:2], 64)
    return diagonal._pass_over(k, v, beta, g, start, cut, reverse=False, average=average)

hopper_write.fits, hopper_diagonal.forward, hopper_diagonal.states = lambda q, v: True, forward, states
check(70, 16, 20, torch.float16, "mild", 3e-3)
check(130, 20, 16, torch.float16, "closed", 3e-3)
check(130, 20, 16, torch.float16, "closed", 3e-3, bonus=True)
check(130, 20, 16, torch.float16, "closed", 3e-3, average=True)

b, n, s, l, hv, d_k, d_v = 2, 7, 3, 3, 2, 16, 32  # the last segment is short
constants, totals, edge = torch.randn(b, s, hv, d_v, d_k), -torch.rand(b, n, hv, d_k), torch.randn(b, hv, d_v, d_k)
for reverse in (False, True):
    starts = torch.full_like(constants, torch.nan)
    order, state = range(s)[:: -1 if reverse else 1], edge
    starts[:, order[0]] = edge
    hopper_diagonal._merge[(b * hv * 2,)](
        constants, totals, starts, n, s, l, hv, K=d_k, V=d_v, BV=16, ROWS=16, REVERSE=reverse
    )
    for unit in order:
        assert torch.allclose(starts[:, unit], state, atol=1e-5), (reverse, unit)
        fall = totals[:, unit * l : unit * l + l].sum(1).exp()[:, :, None]
        state = state * fall + constants[:, unit]
""",
    "bonus": """
check(40, 16, 16, torch.float32, "random", 3e-6, bonus=True)
check(33, 5, 20, torch.float32, "closed", 3e-6, bonus=True)
check(1, 16, 3, torch.float32, "bare", 3e-6, bonus=True)
check(70, 16, 20, torch.float16, "mild", 3e-3, bonus=True)
check(41, 16, 16, torch.float32, "random", 3e-6, units=4, bonus=True, cu_seqlens=torch.tensor([0, 0, 1, 34, 41]))
""",
    "average": """
check(40, 16, 16, torch.float32, "random", 3e-6, average=True)
check(33, 5, 20, torch.float32, "closed", 3e-6, average=True)
check(1, 16, 3, torch.float32, "bare", 3e-6, average=True)
check(40, 16, 16, torch.float32, "open", 3e-6, average=True)
check(70, 16, 20, torch.float16, "mild", 4e-3, average=True)
check(65, 20, 16, torch.float16, "closed", 3e-3, average=True)
check(41, 16, 16, torch.float32, "random", 3e-6, units=4, average=True, cu_seqlens=torch.tensor([0, 0, 1, 34, 41]))
""",
    "packed": """
check(41, 16, 16, torch.float32, "random", 3e-6, units=4, cu_seqlens=torch.tensor([0, 0, 1, 34, 41]))
""",
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_token_loop(case: str) -> None:
    interpret(PROGRAM + CASES[case])


def arguments() -> dict[str, torch.Tensor | None]:
    token = torch.zeros(2, 3, 4)
    return {
        "q": torch.zeros(2, 3, 2, 8), "k": torch.zeros(2, 3, 2, 8), "v": torch.zeros(2, 3, 4, 5),
        "g": torch.zeros(2, 3, 4, 8), "beta": token, "initial_state": torch.zeros(2, 4, 5, 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"q": torch.zeros(2, 3, 8)}, r"\(B, T, H, D\)"),
        ({"g": torch.zeros(2, 3, 4)}, "g is floating point of shape"),
        ({"g": torch.zeros(2, 3, 2, 8)}, "g is floating point of shape"),
        ({"beta": torch.zeros(2, 3, 2)}, "beta is floating point of shape"),
        ({"initial_state": torch.zeros(2, 4, 8, 5)}, "initial_state is floating point of shape"),
        ({"erase": torch.zeros(2, 3, 2, 8)}, 'erase belongs to rule "delta"'),
        ({"rule": "dplr"}, 'a and b to rule "dplr"'),
        ({"rule": "other"}, 'rule is "write", "average", "delta" or "dplr"'),
        ({"cu_seqlens": torch.tensor([0, 3])}, "batch size 1"),
    ),
)
def test_refuses(change: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.common import layout
    from axes.kernels.diagonal import chain as diagonal

    monkeypatch.setattr(layout, "interpreted", lambda: True)  # no GPU is needed to be refused
    with pytest.raises(ShapeError, match=says):
        diagonal.diagonal_chain(**{**arguments(), **change})  # type: ignore[arg-type]


def test_refuses_the_cpu() -> None:
    from axes.kernels.diagonal.chain import diagonal_chain

    with pytest.raises(ShapeError, match="need a CUDA device"):
        diagonal_chain(**arguments())  # type: ignore[arg-type]
