"""The scalar chain in Triton on a GPU against a float64 token loop: values, every gradient, hard inputs.

`python tests/gpu/test_scalar.py` prints every case's errors, `python tests/gpu/test_scalar.py time` milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.errors import ShapeError  # noqa: E402
from axes.kernels.scalar.chain import gated_delta_rule, linear_attention, scalar_chain  # noqa: E402

NAMES = ("q", "k", "v", "beta", "g", "erase", "state")
BF, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FULL: 1e-5, HALF: 4e-3, BF: 2.5e-2}  # relative errors of a whole tensor


@pytest.fixture(scope="module", autouse=True)
def count(request: pytest.FixtureRequest):
    """How many ran, in the summary."""
    failed = request.session.testsfailed
    yield
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        ran = sum(item.path == request.path for item in request.session.items)
        wrong = request.session.testsfailed - failed
        reporter.write_line(f"\nscalar chain on {torch.cuda.get_device_name()}: {ran} ran, {wrong} failed")


@dataclass(frozen=True)
class Case:
    """One call. lengths: of packed sequences. loose: how many times the dtype's bound."""

    T: int = 130
    K: int = 64
    V: int = 64
    dtype: torch.dtype = BF
    kind: str = "random"
    rule: str = "delta"
    B: int = 2
    H: int = 2
    group: int = 1
    gated: bool = True
    weighted: bool = True
    erase: bool = False
    early: bool = False
    started: bool = True
    lengths: tuple[int, ...] = ()
    segments: int | None = None
    loose: float = 1.0

    def __str__(self) -> str:
        plain = Case()
        return " ".join(
            f"{n}={x}".replace("torch.", "") for n, x in vars(self).items() if x != getattr(plain, n)
        ) or "plain"  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        return dict(rule=self.rule, early=self.early)


def inputs(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    b, t, hv = (1, sum(case.lengths), case.H * case.group) if case.lengths else (case.B, case.T, case.H * case.group)
    units = len(case.lengths) or b

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda")

    q, k, a = (normalize(randn(b, t, case.H, case.K), dim=-1) for _ in range(3))
    a = normalize(k + 0.5 * a, dim=-1)
    v = randn(b, t, hv, case.V)
    beta = torch.rand(b, t, hv, device="cuda") * (2 if case.rule == "delta" and not case.erase else 1)
    g = -(torch.rand(b, t, hv, device="cuda") ** 4)
    start = randn(units, hv, case.V, case.K) / case.K**0.5
    if case.kind == "parallel":
        k = normalize(randn(b, 1, case.H, case.K) + 0.1 * k, dim=-1)
        beta, g = torch.rand_like(beta), g * 0.01
    if case.kind == "strong":
        beta = torch.full_like(beta, 2.0)
        k = normalize(k + 0.5 * randn(b, 1, case.H, case.K) / case.K**0.5, dim=-1)
    if case.kind == "open":
        g = -1e-6 * torch.rand_like(g)
    if case.kind == "closed":
        g = torch.where(torch.rand_like(g) < 0.2, -1e3, -20 * torch.rand_like(g))
    if case.kind == "ones":
        q, k, v = (torch.ones_like(x) for x in (q, k, v))
        k[..., 1:] = 0
        a, beta, g = k, torch.ones_like(beta), torch.zeros_like(g)
    if case.kind == "integer":  # keys are unit vectors of the standard basis: exact but for o in 16 bit
        k = torch.nn.functional.one_hot(torch.randint(0, case.K, k.shape[:-1], device="cuda"), case.K).float()
        q, v = (torch.randint(-2, 3, x.shape, device="cuda").float() for x in (q, v))
        a, beta, g = k, torch.randint(0, 2, beta.shape, device="cuda").float(), torch.zeros_like(g)
    q, k, v, a = (x.to(case.dtype) for x in (q, k, v, a))
    return {
        "q": q, "k": k, "v": v, "beta": beta if case.weighted else None, "g": g if case.gated else None,
        "erase": a if case.erase else None, "state": start if case.started else None,
    }  # fmt: skip


def token_loop(q, k, v, beta, g, erase, state, *, rule, early, lengths=()):
    """The recurrence, token by token, in the dtype of its inputs."""
    group = v.shape[2] // q.shape[2]
    erase = k if erase is None else erase
    q, k, erase = (x.repeat_interleave(group, 2) for x in (q, k, erase))
    spans, at = [], 0
    for length in lengths or (q.shape[1],):
        spans.append(slice(at, at + length))
        at += length
    outs, finals = [], []
    for n, span in enumerate(spans):
        if state is None:
            s = q.new_zeros(q.shape[0], v.shape[2], v.shape[3], q.shape[3])
        else:
            s = state[n : n + 1] if lengths else state
        for t in range(span.start, span.stop):
            before = s
            if g is not None:
                s = s * torch.exp(g[:, t].clamp(min=-100))[..., None, None]
            u = v[:, t]
            if rule == "delta":
                u = u - torch.einsum("bhvk,bhk->bhv", before if early else s, erase[:, t])
            if beta is not None:
                u = u * beta[:, t, :, None]
            s = s + u[..., None] * k[:, t, :, None, :]
            outs.append(torch.einsum("bhvk,bhk->bhv", s, q[:, t]))
        finals.append(s)
    return torch.stack(outs, 1) if outs else torch.empty_like(v), torch.cat(finals) if lengths else finals[0]


class Rounded(torch.autograd.Function):
    """x @ y with operands rounded to a dtype, forwards and backwards, and float32 sums."""

    @staticmethod
    def forward(ctx, x, y, dtype):
        x, y = x.to(dtype).float(), y.to(dtype).float()
        ctx.save_for_backward(x, y)
        ctx.dtype = dtype
        return x @ y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        grad = grad.to(ctx.dtype).float()
        return grad @ y.mT, x.mT @ grad, None


def eager_chunks(q, k, v, beta, g, erase, state, *, rule, early):
    """The kernels' algorithm in plain PyTorch: chunks of 64 tokens, operands of products in the dtype of q."""
    dtype, group = q.dtype, v.shape[2] // q.shape[2]

    def mul(x, y):
        return Rounded.apply(x, y, dtype)

    q, k, v, erase = (None if x is None else x.float() for x in (q, k, v, erase))
    erase = k if erase is None else erase
    q, k, erase = (x.repeat_interleave(group, 2) for x in (q, k, erase))
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    g = torch.zeros_like(beta) if g is None else g.clamp(min=-100)
    q, k, v, erase = (x.transpose(1, 2) for x in (q, k, v, erase))
    beta, g = beta.transpose(1, 2), g.transpose(1, 2)
    x = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if state is None else state.mT
    outs = []
    for at in range(0, q.shape[2], 64):
        cq, ck, cv, ca, cb, cg = (y[:, :, at : at + 64] for y in (q, k, v, erase, beta, g))
        run = cg.cumsum(-1)
        seen, total = (run - cg if early else run), run[..., -1:]
        ahead = (run[..., :, None] - run[..., None, :]).tril().exp().tril()
        u = cb[..., None] * cv
        if rule == "delta":
            behind = (seen[..., :, None] - run[..., None, :]).tril(-1).exp().tril(-1)
            lower = cb[..., None] * mul(ca, ck.mT) * behind
            solve = torch.linalg.inv(torch.eye(lower.shape[-1], device=q.device) + lower)
            u = mul(solve, cb[..., None] * (cv - seen.exp()[..., None] * mul(ca, x)))
        outs.append(run.exp()[..., None] * mul(cq, x) + mul(mul(cq, ck.mT) * ahead, u))
        x = total.exp()[..., None] * x + mul(ck.mT, (total - run).exp()[..., None] * u)
    return torch.cat(outs, 2).transpose(1, 2).to(dtype), x.mT


def chain(q, k, v, beta, g, erase, state, *, lengths=(), segments=None, **options):
    """`scalar_chain` under the names of this file."""
    cu = torch.tensor((0, *lengths), device=q.device).cumsum(0) if lengths else None
    return scalar_chain(q, k, v, beta, g, erase, state, cu_seqlens=cu, segments=segments, **options)


def run(function, given: dict[str, Any], do: Tensor, dfinal: Tensor, **options) -> dict[str, Tensor]:
    """o, final and every gradient."""
    leaves = {n: None if x is None else x.detach().clone().requires_grad_() for n, x in given.items()}
    o, final = function(*leaves.values(), **options)
    used = {n: x for n, x in leaves.items() if x is not None}
    grads = torch.autograd.grad((o, final), list(used.values()), (do.to(o.dtype), dfinal.to(final.dtype)))
    return {"o": o, "final": final} | {"d" + n: x for n, x in zip(used, grads, strict=True)}


def cotangents(given: dict[str, Any], units: int) -> tuple[Tensor, Tensor]:
    q, v = given["q"], given["v"]
    return torch.randn_like(v), torch.randn(units, v.shape[2], v.shape[3], q.shape[3], device="cuda")


def error(got: Tensor, want: Tensor) -> float:
    if not torch.isfinite(got).all():
        return float("nan")
    scale = max(want.norm().item(), 1e-3 * want.numel() ** 0.5)
    return (got.double() - want).norm().item() / scale


def errors(case: Case) -> dict[str, float]:
    given = inputs(case)
    do, dfinal = cotangents(given, len(case.lengths) or case.B)
    got = run(chain, given, do, dfinal, lengths=case.lengths, segments=case.segments, **case.options)
    exact = {n: None if x is None else x.double() for n, x in given.items()}
    want = run(token_loop, exact, do.double(), dfinal.double(), lengths=case.lengths, **case.options)
    return {n: error(got[n], want[n]) for n in want}


def ratios(case: Case) -> dict[str, float]:
    """Errors of the kernels over those of the same algorithm in plain PyTorch."""
    given = inputs(case)
    do, dfinal = cotangents(given, case.B)
    got = run(chain, given, do, dfinal, segments=case.segments, **case.options)
    eager = run(eager_chunks, given, do, dfinal, **case.options)
    exact = {n: None if x is None else x.double() for n, x in given.items()}
    want = run(token_loop, exact, do.double(), dfinal.double(), **case.options)
    return {n: error(got[n], want[n]) / max(error(eager[n], want[n]), 1e-9) for n in want}


# Compiling takes nearly all the time of this file: sizes that are no constants of kernels vary freely, others little.
PACKED = (0, 1, 63, 200, 0, 64)
CASES: list[Case] = []
for rule in ("delta", "write"):
    base = Case(rule=rule)
    CASES += [replace(base, T=t, dtype=d) for d in BOUNDS for t in (1, 2, 63, 64, 65, 300)]
    CASES += [replace(base, T=t, gated=False, weighted=rule == "delta") for t in (1, 63, 64, 130, 1000)]
    CASES += [replace(base, T=t, K=128, V=128, B=1, H=1) for t in (1000, 4096)]
    sides = ((16, 100), (100, 16), (256, 64), (64, 256), (256, 256))
    CASES += [replace(base, K=k, V=v) for k, v in sides]
    CASES += [replace(base, K=k, V=v, dtype=FULL, T=70, loose=2) for k, v in ((1, 100), (256, 256))]
    CASES += [replace(base, dtype=d, group=3) for d in BOUNDS]
    CASES += [replace(base, dtype=d, lengths=PACKED, group=2) for d in (BF, FULL)]
    CASES += [replace(base, lengths=PACKED, group=2, started=False)]
    CASES += [replace(base, weighted=False, started=False, dtype=d) for d in (BF, FULL)]
    CASES += [replace(base, T=400, dtype=d, segments=s) for d in (BF, FULL) for s in (2, 3, 50)]
    for kind in ("parallel", "closed", "open"):
        CASES += [replace(base, T=400, K=d, V=d, kind=kind, segments=3) for d in (64, 128)]
    CASES += [replace(base, T=3000, K=128, V=128, B=1, segments=s, started=s == 2) for s in (2, 3)]
    CASES += [replace(base, T=400, K=128, V=100, dtype=HALF, segments=3, group=2, started=False)]
    CASES += [replace(base, T=300, K=256, V=128, segments=2)]
    CASES += [replace(base, T=300, gated=False, weighted=rule == "delta", segments=2)]
    CASES += [replace(base, K=256, V=200, group=2)]
    for dtype in BOUNDS:
        # what cancels grows with close keys; a closed gate leaves few digits of a cumulative log
        for kind, loose in (("parallel", 4), ("strong", 4), ("open", 1), ("closed", 10), ("ones", 2), ("integer", 1)):
            by = loose if dtype == FULL or kind == "ones" else 1
            CASES += [replace(base, T=200, K=128, V=128, dtype=dtype, kind=kind, loose=by)]
CASES += [Case(early=True, K=128, V=128)]
CASES += [Case(early=e, erase=True, dtype=d, K=128, V=128, group=2) for d in (BF, FULL) for e in (False, True)]
CASES += [Case(early=True, erase=True, lengths=PACKED, K=100)]
CASES += [Case(early=True, erase=True, T=400, segments=3), Case(erase=True, K=256, V=256)]
CASES = list(dict.fromkeys(CASES))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Kernels compiled by several processes, into Triton's cache, before one process runs the tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        workers = min(12, os.cpu_count() or 1)
        command = [sys.executable, __file__, "compile"]
        parts = [subprocess.Popen([*command, str(n), str(workers)], stdout=subprocess.DEVNULL) for n in range(workers)]
        for part in parts:
            part.wait()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_token_loop(case: Case) -> None:
    found, bound = errors(case), BOUNDS[case.dtype] * case.loose
    assert all(e < bound for e in found.values()), {n: f"{e:.1e}" for n, e in found.items() if not e < bound}


# The gradient of a gate is made of products with pair matrices that the kernels round and plain PyTorch does not.
WORSE = {"dg": 2.5}
EAGER = [Case(T=256, K=128, V=128, rule=rule, dtype=d) for rule in ("delta", "write") for d in BOUNDS]
EAGER += [Case(T=256, K=128, V=128, dtype=BF, kind=kind) for kind in ("parallel", "strong", "open", "closed", "ones")]
EAGER += [Case(T=256, K=128, V=128, dtype=HALF, rule="write", kind=kind) for kind in ("parallel", "open", "closed")]
EAGER += [Case(T=256, group=2), Case(T=256, erase=True, early=True), Case(T=256, segments=2)]


@pytest.mark.parametrize("case", EAGER, ids=str)
def test_is_as_exact_as_its_algorithm_in_plain_pytorch(case: Case) -> None:
    found = ratios(case)
    assert all(r <= WORSE.get(n, 1.5) for n, r in found.items()), found


@pytest.mark.parametrize("rule", ("delta", "write"))
def test_repeats_bit_for_bit_and_writes_every_element(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(T=777, K=128, V=100, rule=rule, group=2, segments=2)
    given = inputs(case)
    do, dfinal = cotangents(given, case.B)
    first = run(chain, given, do, dfinal, segments=2, **case.options)
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert torch.empty(4, device="cuda").isnan().all()
        second = run(chain, given, do, dfinal, segments=2, **case.options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("rule", ("delta", "write"))
@pytest.mark.parametrize("plain", (False, True))
@pytest.mark.parametrize("dtype", (BF, HALF), ids=str)
def test_a_full_chip_repeats_and_equals_its_parts(rule: str, plain: bool, dtype: torch.dtype) -> None:
    """Faults of a compiler show under load: the same bits five times over, and alone."""
    weighted = rule == "delta" or not plain
    case = Case(T=1500, K=128, V=128, dtype=dtype, rule=rule, B=8, H=16, gated=not plain, weighted=weighted, segments=1)
    given = inputs(case)
    do, dfinal = cotangents(given, case.B)
    first = run(chain, given, do, dfinal, segments=1, **case.options)
    for _ in range(4):
        again = run(chain, given, do, dfinal, segments=1, **case.options)
        assert all(torch.equal(first[n], again[n]) for n in first)
    alone = {n: None if x is None else x[3:4] for n, x in given.items()}
    part = run(chain, alone, do[3:4], dfinal[3:4], segments=1, **case.options)
    assert all(torch.equal(first[n][3:4], part[n]) for n in first)


@pytest.mark.parametrize("rule", ("delta", "write"))
def test_packed_sequences_equal_each_alone(rule: str) -> None:
    case = Case(K=64, V=64, rule=rule, lengths=PACKED, B=1)
    given = inputs(case)
    o, final = chain(*given.values(), lengths=PACKED, rule=rule)
    at = 0
    for n, length in enumerate(PACKED):
        alone = {m: None if x is None else x[:, at : at + length] for m, x in given.items()}
        alone["state"] = given["state"][n : n + 1]
        part, end = chain(*alone.values(), rule=rule, segments=1)
        if length:
            assert (o[:, at : at + length] - part).norm() <= 1e-2 * part.norm()
        assert (final[n : n + 1] - end).norm() <= 5e-3 * end.norm()  # plain shapes alone have kernels of their own
        at += length


@pytest.mark.parametrize("rule", ("delta", "write"))
def test_a_state_is_handed_on_and_segments_agree(rule: str) -> None:
    given = inputs(Case(T=300, B=3, H=5, rule=rule))
    o, final = chain(*given.values(), rule=rule, segments=1)
    pieces, state = [], given["state"]
    for span in (slice(0, 128), slice(128, 300)):
        cut = [None if x is None else x[:, span] for n, x in given.items() if n != "state"]
        piece, state = chain(*[*cut, state], rule=rule)
        pieces.append(piece)
    assert (torch.cat(pieces, 1) - o).abs().max() < 1e-2 * o.abs().max()
    assert (state - final).norm() < 1e-3 * final.norm()
    other, end = chain(*given.values(), rule=rule, segments=3)
    assert (other - o).norm() < 1e-2 * o.norm() and (end - final).norm() < 1e-2 * final.norm()


def test_gradients_of_segments_are_those_of_the_whole() -> None:
    """Segments find what reaches their ends by the columns of a state that nothing was written to."""
    made = []
    for segments in (1, 3):
        given = [None if x is None else x.detach().requires_grad_() for x in inputs(Case(T=300, B=1, H=2)).values()]
        o, final = chain(*given, rule="delta", segments=segments)
        floats = [x for x in given if x is not None]
        made.append(torch.autograd.grad((o * o).sum() + final.sum(), floats))
    for one, other in zip(*made, strict=True):
        assert (one - other).float().norm() < 2e-2 * one.float().norm()


@pytest.mark.parametrize("case", (Case(T=100), Case(T=100, rule="write"), Case(T=2100, B=1, H=1)), ids=str)
def test_compiles_as_one_graph(case: Case) -> None:
    given = inputs(case)
    do, dfinal = cotangents(given, case.B)
    eager = run(scalar_chain, given, do, dfinal, **case.options)
    compiled = run(torch.compile(scalar_chain, fullgraph=True), given, do, dfinal, **case.options)
    assert all(torch.equal(eager[n], compiled[n]) for n in eager)


def test_packed_compiles_as_one_graph_and_passes_opcheck() -> None:
    case = Case(lengths=PACKED, B=1)
    given = inputs(case)
    cu = torch.tensor((0, *PACKED), device="cuda").cumsum(0)
    do, dfinal = cotangents(given, len(PACKED))
    eager = run(scalar_chain, given, do, dfinal, cu_seqlens=cu)
    compiled = run(torch.compile(scalar_chain, fullgraph=True), given, do, dfinal, cu_seqlens=cu)
    assert all(torch.equal(eager[n], compiled[n]) for n in eager)
    tensors = tuple(given.values())
    for delta, segments, packed in ((True, 2, None), (False, 2, None), (True, 1, cu)):
        state = None if packed is None else tensors[6]
        torch.library.opcheck(
            torch.ops.axes.scalar_chain, (*tensors[:6], None, state, packed, delta, False, segments, True),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


@pytest.mark.parametrize("rule", ("delta", "write"))
def test_takes_inputs_that_are_not_contiguous_nor_aligned(rule: str) -> None:
    case = Case(T=100, K=40, V=72, rule=rule)
    given = inputs(case)
    do, dfinal = cotangents(given, case.B)
    strided = {n: None if x is None else x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in given.items()}
    offset: dict[str, Any] = {}
    for n, x in given.items():
        offset[n] = None
        if x is not None:
            room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
            offset[n] = room[1:].view(x.shape).copy_(x)
    want = run(chain, given, do, dfinal, **case.options)
    got = run(chain, strided, do, dfinal, **case.options)
    assert all(torch.equal(got[n], want[n]) for n in want)
    with torch.no_grad():  # gradients are taken of copies, which are aligned
        o, final = chain(*offset.values(), rule=rule)
    assert (o - want["o"]).norm() <= 1e-2 * o.norm() and (final - want["final"]).norm() <= 1e-3 * final.norm()


@pytest.mark.parametrize("rule", ("delta", "write"))
def test_empty_inputs(rule: str) -> None:
    given = inputs(Case(T=0, rule=rule))
    got = run(chain, given, *cotangents(given, 2), **Case(rule=rule).options)
    assert got["o"].shape == (2, 0, 2, 64) and torch.equal(got["final"], given["state"])
    given = inputs(Case(B=0, rule=rule))
    assert run(chain, given, *cotangents(given, 0), **Case(rule=rule).options)["dk"].shape == (0, 130, 2, 64)
    given = inputs(Case(lengths=(0, 0), rule=rule))
    assert torch.equal(chain(*given.values(), lengths=(0, 0), rule=rule)[1], given["state"])


def test_more_than_2_31_elements() -> None:
    """The last of two packed sequences lies past every 32-bit offset."""
    d_k, heads, tail = 256, 8, 100
    length = 2**31 // (d_k * heads) + 64
    q = torch.zeros(1, length + tail, heads, d_k, dtype=BF, device="cuda")
    k, v = torch.zeros_like(q), torch.zeros(1, length + tail, heads, 16, dtype=BF, device="cuda")
    for x in (q, k, v):
        x[:, -tail:] = torch.randn(1, tail, *x.shape[2:], device="cuda") / d_k**0.25
    cu = torch.tensor((0, length, length + tail), device="cuda")
    for rule in ("delta", "write"):
        o, final = scalar_chain(q, k, v, rule=rule, cu_seqlens=cu)
        part, end = scalar_chain(*(x[:, -tail:] for x in (q, k, v)), rule=rule, segments=1)
        assert (o[:, -tail:] - part).norm() <= 1e-2 * part.norm() and (final[1:] - end).norm() <= 1e-3 * end.norm()
        del o, final
        leaves = [x.requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(scalar_chain(*leaves, rule=rule, cu_seqlens=cu)[0][:, -tail:].sum(), leaves)
        alone = [x.detach()[:, -tail:].clone().requires_grad_() for x in leaves]
        wanted = torch.autograd.grad(scalar_chain(*alone, rule=rule, segments=1)[0].sum(), alone)
        assert all((a[:, -tail:] - b).norm() <= 2e-2 * b.norm() for a, b in zip(grads, wanted, strict=True))
        del grads


def test_conveniences_and_errors() -> None:
    q, k, v, beta, g, _, state = inputs(Case()).values()
    for got, want in (
        (gated_delta_rule(q, k, v, beta, g, state), chain(q, k, v, beta, g, None, state, rule="delta")),
        (linear_attention(q, k, v, g, state), chain(q, k, v, None, g, None, state, rule="write")),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ShapeError, match="rule is"):
        scalar_chain(q, k, v, rule="add")
    with pytest.raises(ShapeError, match="segments is at least 1"):
        scalar_chain(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 130], device="cuda"), segments=2)
    with pytest.raises(ShapeError, match="beta is on cpu"):
        scalar_chain(q, k, v, beta.cpu())


def table(cases: list[Case]) -> int:
    """Print the errors of cases; how many are out of bounds."""
    wrong = 0
    for case in cases:
        try:
            found = errors(case)
            bad = not all(e < BOUNDS[case.dtype] * case.loose for e in found.values())
            line = " ".join(f"{n} {e:.0e}" for n, e in found.items())
        except Exception as fault:  # one case's failure must not hide the others
            bad, line = True, f"{type(fault).__name__} {str(fault)[:300]}"
        wrong += bad
        print("WRONG" if bad else "ok   ", f"{case}: {line}", flush=True)
        if bad and "illegal" in line:
            break
    return wrong


def compile_part(part: int, of: int) -> None:
    """Run one case of each set of kernels, every `of`-th set."""
    sets: dict[tuple, Case] = {}
    for case in CASES + EAGER:
        sizes = {"T", "B", "H", "group", "kind", "loose", "lengths", "segments"}
        kernels = tuple(x for n, x in vars(case).items() if n not in sizes)
        sets.setdefault((*kernels, bool(case.lengths), case.segments), replace(case, T=min(case.T, 400)))
    for case in list(sets.values())[part::of]:
        given = inputs(case)
        do, dfinal = cotangents(given, len(case.lengths) or case.B)
        run(chain, given, do, dfinal, lengths=case.lengths, segments=case.segments, **case.options)


def milliseconds(case: Case) -> tuple[float, ...]:
    """Forward, forward and backward; then both in a CUDA graph, without the host."""
    from triton.testing import do_bench, do_bench_cudagraph

    given = {n: None if x is None else x.requires_grad_() for n, x in inputs(case).items()}
    do = cotangents(given, case.B)[0]
    options = dict(segments=case.segments, **case.options)
    used = [x for x in given.values() if x is not None]

    def forward() -> None:
        with torch.no_grad():
            chain(*given.values(), **options)

    def both() -> None:
        torch.autograd.grad(chain(*given.values(), **options)[0], used, do)

    times = [do_bench(f, warmup=5, rep=25, return_mode="median") for f in (forward, both)]
    return *times, *(do_bench_cudagraph(f, rep=15, return_mode="median") for f in (forward, both))


def timing() -> None:
    wide = Case(T=4096, K=128, V=128, B=8, H=16, started=False)
    for case in (
        wide,
        replace(wide, gated=False),
        replace(wide, rule="write", weighted=False, gated=False),
        replace(wide, rule="write", weighted=False),
        replace(wide, B=1, T=32768),
        replace(wide, B=1, T=8192, H=4),
        replace(wide, rule="write", weighted=False, B=1, T=32768),
        replace(wide, rule="write", weighted=False, B=1, T=8192, H=4),
    ):
        try:
            times = " ".join(f"{x:.3f}" for x in milliseconds(case))
            print(f"{case}: forward, with backward; both in a CUDA graph: {times} ms", flush=True)
        except Exception as fault:
            print(f"{case}: {type(fault).__name__} {str(fault)[:300]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["time"]:
        timing()
    elif sys.argv[1:2] == ["compile"]:
        compile_part(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["ratios"]:
        for each in EAGER:
            print(each, {n: round(r, 2) for n, r in ratios(each).items()}, flush=True)
    else:
        part, of = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 1)
        sys.exit(bool(table(CASES[part::of])))
