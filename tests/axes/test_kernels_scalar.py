"""The scalar chain's Triton kernels under Triton's interpreter, against a float64 token loop; and its refusals.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
bfloat16 products are left to tests/gpu: the interpreter multiplies their bit patterns.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from tests.interpreter import interpret

PROGRAM = r"""
import torch
from torch.nn.functional import normalize
from axes.kernels.scalar.chain import scalar_chain

torch.manual_seed(0)
torch.set_num_threads(1)

def token_loop(q, k, v, beta, g, erase, state, rule, early, lengths):
    q, k, erase = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k, k if erase is None else erase))
    outs, finals, at = [], [], 0
    for n, length in enumerate(lengths or (q.shape[1],)):
        s = state[n : n + 1] if lengths else state
        for t in range(at, at + length):
            before, s = s, s if g is None else s * torch.exp(g[:, t].clamp(min=-100))[..., None, None]
            u = v[:, t]
            if rule == "delta":
                u = u - torch.einsum("bhvk,bhk->bhv", before if early else s, erase[:, t])
            u = u if beta is None else u * beta[:, t, :, None]
            s = s + u[..., None] * k[:, t, :, None, :]
            outs.append(torch.einsum("bhvk,bhk->bhv", s, q[:, t]))
        at += length
        finals.append(s)
    return torch.stack(outs, 1), torch.cat(finals) if lengths else finals[0]

def chain(q, k, v, beta, g, erase, state, rule, early, lengths, segments=None):
    cu = torch.tensor((0, *lengths)).cumsum(0) if lengths else None
    return scalar_chain(q, k, v, beta, g, erase, state, rule=rule, early=early, cu_seqlens=cu,
                        segments=segments)

def run(function, given, do, dfinal, *options):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    o, final = function(*leaves, *options)
    used = [x for x in leaves if x is not None]
    return [o, final, *torch.autograd.grad((o, final), used, (do.to(o.dtype), dfinal.to(final.dtype)))]

def check(T, K, V, rule="delta", dtype=torch.float32, B=1, H=1, group=1, gated=True, weighted=True, erase=False,
          early=False, lengths=(), segments=None, kind="", bound=5e-6):
    case = {n: x for n, x in locals().items()}
    b, t, hv = (1, sum(lengths), H * group) if lengths else (B, T, H * group)
    q, k = (normalize(torch.randn(b, t, H, K), dim=-1) for _ in range(2))
    if kind == "parallel":
        k = normalize(torch.randn(b, 1, H, K) + 0.05 * k, dim=-1)
    a = normalize(k + 0.5 * torch.randn_like(k) / K**0.5, dim=-1)
    v, beta, g = torch.randn(b, t, hv, V), 2 * torch.rand(b, t, hv), -torch.rand(b, t, hv) ** 2
    if kind == "closed":
        g = torch.where(torch.rand_like(g) < 0.2, -torch.inf, -20 * torch.rand_like(g))
    if kind == "rare":
        g = torch.where(torch.rand_like(g) < 0.02, -torch.inf, -0.3 * torch.rand_like(g))
    state = torch.randn(len(lengths) or b, hv, V, K)
    given = [x.to(dtype) for x in (q, k, v)] + [beta if weighted else None, g if gated else None,
             a.to(dtype) if erase else None, state]
    do, dfinal = torch.randn(b, t, hv, V), torch.randn_like(state)
    options = (rule, early, lengths)
    got = run(chain, given, do, dfinal, *options, segments)
    want = run(token_loop, [None if x is None else x.double() for x in given], do.double(), dfinal.double(), *options)
    for n, (x, w) in enumerate(zip(got, want)):
        error = ((x - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        assert error < bound, (case, n, error)
"""

CASES = {
    "delta": """
for t in (1, 33): check(t, 16, 16)
check(40, 5, 40, gated=False)
check(40, 20, 3, weighted=False, group=2)
check(70, 16, 16, kind="parallel", bound=1e-4)
check(70, 16, 16, kind="closed", bound=2e-4)
check(18, 130, 5)
""",
    "write": """
for t in (1, 33): check(t, 16, 16, "write")
check(40, 5, 40, "write", gated=False, weighted=False)
check(40, 20, 3, "write", weighted=False, group=2)
check(70, 16, 16, "write", kind="closed", bound=2e-4)
check(18, 130, 5, "write")
check(18, 5, 130, "write")
""",
    "values in halves": """
from axes.kernels.scalar import chain as module
module.in_halves = lambda q, v, rule, cu: seen.append(v.shape[-1]) or rule == "write"
seen = []
for more in ({}, {"gated": False}, {"weighted": False, "segments": 2, "B": 2}):
    check(70, 16, 32, "write", H=2, group=2, **more)
assert seen == 3 * [32]
""",
    "erase": """
check(40, 16, 16, erase=True)
check(40, 16, 16, erase=True, early=True)
check(40, 16, 16, early=True)
""",
    "packed": """
for rule in ("delta", "write"): check(0, 16, 16, rule, lengths=(0, 1, 40, 0, 32))
""",
    "segments": """
for rule in ("delta", "write"): check(100, 16, 16, rule, segments=3)
check(70, 16, 16, early=True, erase=True, segments=2)
check(100, 16, 16, dtype=torch.float16, segments=3, bound=3e-3)
check(200, 16, 16, kind="rare", segments=7, bound=2e-4)  # of some segments nothing reaches the other end
check(120, 16, 16, dtype=torch.float16, kind="rare", H=2, segments=5, bound=4e-3)
""",
    "spans": """
# how many chunks at a segment's end, and at its start, shrink every state by e^104: by the norms of the tokens' maps
from axes.kernels.scalar.chain import _forward, cut
for T, segments, low, erased in ((300, 2, 2.5, False), (300, 2, 2.5, True), (520, 3, 0.9, False), (100, 2, 0.1, True)):
    q, k, a, v = (torch.randn(1, T, 2, 8) / 2 for _ in range(4))
    beta, g = 2 * torch.rand(1, T, 2), -2 * low * torch.rand(1, T, 2)
    erase = a if erased else None
    _, _, (_, found, *_) = _forward(q, k, v, beta, g, erase, None, None, None, True, False, segments, True)
    made = cut(1, T, 16, segments, None)
    reads = a if erased else k
    maps = torch.eye(8) - beta[..., None, None] * k[..., :, None] * reads[..., None, :]
    logs = g + torch.linalg.matrix_norm(maps.double(), 2).log()
    for unit in range(made.S):
        chunks = torch.stack([c.sum((0, 1)) for c in logs[:, unit * made.L : (unit + 1) * made.L].split(16, 1)])
        for head in range(2):
            for side, order in ((0, chunks[:, head].flip(0)), (1, chunks[:, head])):
                small = (order.cumsum(0) < -104).nonzero()
                want = small[0].item() + 1 if len(small) else made.N + 1
                assert found[unit, head, side] == want, (T, unit, head, side, found[unit, head], want)
    assert len(found.unique()) > 1 or low == 0.1
""",
    "half": """
for rule in ("delta", "write"): check(70, 16, 20, rule, torch.float16, bound=3e-3)
""",
    "empty": """
x, state = torch.randn(1, 0, 2, 16), torch.randn(1, 2, 16, 16)
for cu in (None, torch.tensor([0, 0])):
    o, final = scalar_chain(x, x, x, initial_state=state, cu_seqlens=cu)
    assert o.shape == x.shape and torch.equal(final, state)
assert scalar_chain(x[:0], x[:0], x[:0])[1].shape == (0, 2, 16, 16)
""",
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_token_loop(case: str) -> None:
    interpret(PROGRAM + CASES[case])


def arguments() -> dict[str, object]:
    token = torch.zeros(2, 3, 4)
    return {
        "q": torch.zeros(2, 3, 2, 8), "k": torch.zeros(2, 3, 2, 8), "v": torch.zeros(2, 3, 4, 5),
        "beta": token, "g": token, "initial_state": torch.zeros(2, 4, 5, 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"q": torch.zeros(2, 3, 8)}, r"\(B, T, H, D\)"),
        ({"v": torch.zeros(2, 3, 4)}, r"\(B, T, H, D\)"),
        ({"k": torch.zeros(2, 3, 2, 7)}, "k has the shape of q"),
        ({"v": torch.zeros(2, 3, 3, 5)}, "multiple of key heads"),
        ({"v": torch.zeros(2, 3, 4, 257)}, "from 1 to 256"),
        ({"v": torch.zeros(2, 3, 4, 5, dtype=torch.float64)}, "share one of bf16, fp16, fp32"),
        ({"beta": torch.zeros(2, 3, 2)}, "beta is floating point of shape"),
        ({"g": torch.zeros(2, 3, 4, 8)}, "g is floating point of shape"),
        ({"initial_state": torch.zeros(2, 4, 8, 5)}, "initial_state is floating point of shape"),
        ({"erase": torch.zeros(2, 3, 4, 8)}, "erase is floating point of shape"),
        ({"erase": torch.zeros(2, 3, 2, 8).half()}, "erase has the dtype of q"),
        ({"beta": torch.zeros(2, 3, 4, device="meta")}, "beta is on meta"),
        ({"rule": "add"}, "rule is 'write' or 'delta'"),
        ({"rule": "write", "early": True}, "no erase keys and no early"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "batch size 1"),
        ({"segments": 0}, "segments is at least 1"),
    ),
)
def test_refuses(change: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.common import layout
    from axes.kernels.scalar.chain import scalar_chain

    monkeypatch.setattr(layout, "interpreted", lambda: True)  # to reach the checks after that of the device
    with pytest.raises(ShapeError, match=says):
        scalar_chain(**{**arguments(), **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"q": torch.zeros(1, 32, 1, 64)}, r"the shape of q, \(1, 32, 1, 64\)"),
        ({"k": torch.zeros(2, 64, 2, 64)}, r"the shape of q, \(2, 64, 1, 64\)"),
        ({"rule": "write"}, "32 queries of 64 tokens are read by rule 'delta' in one segment"),
        ({"early": True}, "32 queries of 64 tokens"),
        ({"segments": 2}, "32 queries of 64 tokens"),
        ({"beta": None}, "32 queries of 64 tokens"),
        ({"erase": torch.zeros(2, 32, 1, 64)}, "32 queries of 64 tokens"),
        ({"write": torch.zeros(2, 64, 1)}, "32 queries of 64 tokens"),
    ),
)
def test_refuses_queries_of_the_last_writes_alone(
    change: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernels that take them are not given: others would read past the end of the queries."""
    from axes.kernels.common import layout
    from axes.kernels.scalar import chain

    monkeypatch.setattr(layout, "interpreted", lambda: True)
    monkeypatch.setattr(chain, "GLUON", True)
    monkeypatch.setattr(chain, "hopper", SimpleNamespace(fits=lambda q, v: q.shape == v.shape), raising=False)
    token, wide = torch.zeros(2, 64, 1), torch.zeros(2, 64, 1, 64)
    given = {"q": wide[:, ::2], "k": wide, "v": wide, "beta": token, "g": token}
    assert chain.reads_last(given["q"], given["v"], None)
    monkeypatch.setattr(chain, "_chain", lambda *_: (given["q"], token))
    chain.scalar_chain(**given)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=says):
        chain.scalar_chain(**{**given, **change})  # type: ignore[arg-type]


def test_refuses_the_cpu() -> None:
    from axes.kernels.scalar.chain import scalar_chain

    with pytest.raises(ShapeError, match="need a CUDA device"):
        scalar_chain(**arguments())  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", (7, 33, 512))
def test_segments_are_counted_for_sizes_that_are_symbols(chunks: int) -> None:
    """As torch.compile asks once a length has changed: symbols have no hash."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    from axes.kernels.scalar.chain import plain_segments_of

    shapes, source = ShapeEnv(), ConstantSource("chunks")
    symbol = shapes.create_symbol(chunks, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    length = shapes.create_symintnode(symbol, hint=chunks, source=source)
    with pytest.raises(TypeError, match="unhashable"):
        hash(length)
    assert plain_segments_of(2, length) == plain_segments_of(2, chunks)
