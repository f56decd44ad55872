"""Reading rules under a gate per channel (KDA, RWKV-7) in Triton on a GPU against a float64 token loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.diagonal_delta import chain as diagonal_delta  # noqa: E402

NAMES = ("o", "final", "dq", "dk", "dv", "dg", "dx", "dy", "dstart")
# relative errors of a whole tensor
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
RULES = ("delta", "erase", "early", "dplr")


@pytest.fixture(autouse=True)
def passes_for_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few heads a test has; those for few are what `erase` runs, and what is asked for by name."""
    monkeypatch.setattr(diagonal_delta, "_FEWEST", 1)


@pytest.fixture(autouse=True, params=(False, True), ids=("", "portable"))
def kernels_of_dplr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are picked on Hopper, and those for other chips and grouped heads."""
    if request.param and "dplr" not in request.node.callspec.params.values():
        pytest.skip("another rule")
    if request.param:
        monkeypatch.setattr(diagonal_delta, "_by_pairs", lambda *_: False)


@dataclass(frozen=True)
class Case:
    """Inputs of a rule: x is the erase key or a (None where the key is), y is beta or b."""

    rule: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    x: Tensor | None
    y: Tensor
    start: Tensor | None
    lengths: tuple[int, ...] | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.q, self.k, self.v, self.g, self.x, self.y, self.start]

    def with_tensors(self, tensors: list[Tensor | None]) -> Case:
        return replace(self, **dict(zip(("q", "k", "v", "g", "x", "y", "start"), tensors, strict=True)))


def draw(rule, length, d_k, d_v, dtype, kind="random", b=2, h=2, hv=None, lengths=None, fresh=False, device="cuda"):
    torch.manual_seed(length + d_k + d_v)
    hv = h if hv is None else hv
    if lengths is not None:
        b, length = 1, sum(lengths)

    def randn(*size):
        return torch.randn(*size, device=device)

    q, k, e = (normalize(randn(b, length, h, d_k), dim=-1) for _ in range(3))
    v = randn(b, length, hv, d_v)
    strength = torch.rand(b, length, h if rule == "dplr" else hv, device=device) * (1 if rule == "dplr" else 2)
    g = -(torch.rand(b, length, hv, d_k, device=device) ** 4)
    if kind == "parallel":
        k, e = (normalize(randn(b, 1, h, d_k) + 0.1 * x, dim=-1) for x in (k, e))
        strength, g = torch.rand_like(strength), 0.01 * g
    if kind == "strong":
        strength = torch.full_like(strength, 2.0)
        k = normalize(k + 0.5 * randn(b, 1, h, d_k) / d_k**0.5, dim=-1)
    if kind == "open":
        g = -1e-6 * torch.rand_like(g)
    if kind == "closed":
        g = torch.where(torch.rand_like(g) < 0.2, -1e3, -20 * torch.rand_like(g))
    if kind == "mixed":  # channels from open to closed, and some that close now and then
        g = -torch.rand_like(g) * 10 ** torch.linspace(-5, 1.5, d_k, device=device)
        g = torch.where(torch.rand_like(g) < 0.01, -80.0, g)
    if kind == "kda":  # what models learn: mild gates
        g = -torch.nn.functional.softplus(randn(b, length, hv, d_k))
    if kind == "integer":
        q, k, e, v = (torch.randint_like(x, -1, 2) for x in (q, k, e, v))
        k, e = (x * (torch.arange(d_k, device=device) < 4) / 4 for x in (k, e))
        g = torch.where(torch.rand_like(g) < 0.5, -0.6931471805599453, 0.0)
        strength = torch.ones_like(strength)
    if kind == "ones":
        q, k, e, v = (torch.ones_like(x) for x in (q, k, e, v))
        k[..., 1:] = 0
        e[..., 1:] = 0
        strength, g = torch.ones_like(strength), torch.zeros_like(g)
    if rule == "dplr":
        x, y = -e, (e * strength[..., None]).to(dtype)
    else:
        # an erase key apart from the key makes no contraction: keep it near
        x, y = (normalize(k + 0.3 * e, dim=-1) if rule == "erase" else None), strength
    if rule == "early" and kind in ("random", "strong"):
        y = 0.5 * y  # the read is not faded: contraction asks for less
    start = None if fresh else randn(b if lengths is None else len(lengths), hv, d_v, d_k) / d_k**0.5
    q, k, v = (t.to(dtype) for t in (q, k, v))
    return Case(rule, q, k, v, g, None if x is None else x.to(dtype), y, start, lengths)


def kernels(case: Case) -> tuple[Tensor, Tensor]:
    packing = None
    if case.lengths is not None:
        packing = torch.tensor([0, *case.lengths], device=case.q.device).cumsum(0)
    if case.rule == "dplr":
        return diagonal_delta.dplr(case.q, case.k, case.v, case.g, case.x, case.y, case.start, packing)
    early = case.rule == "early"
    return diagonal_delta.delta(case.q, case.k, case.v, case.g, case.y, case.x, early, case.start, packing)


def token_loop(case: Case) -> tuple[Tensor, Tensor]:
    """The recurrence, one token after another."""
    q, k, v, g, x, y, start = case.tensors
    x = k if x is None else x
    if case.lengths is not None:
        cuts = [t.split(case.lengths, 1) for t in (q, k, v, g, x, y)]
        starts = [None] * len(case.lengths) if start is None else start.split(1)
        if case.rule != "dplr" and case.x is None:
            cuts[4] = [None] * len(case.lengths)
        done = [token_loop(Case(case.rule, *(cut[n] for cut in cuts), starts[n])) for n in range(len(case.lengths))]
        return torch.cat([o for o, _ in done], 1), torch.cat([s for _, s in done])
    group = v.shape[2] // q.shape[2]
    q, k, x = (t.repeat_interleave(group, 2) for t in (q, k, x))
    if case.rule == "dplr":
        y = y.repeat_interleave(group, 2)
    state = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], q.shape[3]) if start is None else start
    fade = torch.exp(g.clamp(min=-100))[..., None, :]
    outs = []
    for t in range(q.shape[1]):
        faded = state * fade[:, t]
        read = ((state if case.rule in ("early", "dplr") else faded) @ x[:, t, ..., None]).squeeze(-1)
        if case.rule == "dplr":
            write = torch.stack((read, v[:, t]), -1) @ torch.stack((y[:, t], k[:, t]), -2)
        else:
            write = (y[:, t, :, None] * (v[:, t] - read))[..., None] * k[:, t, :, None, :]
        state = faded + write
        outs.append((state @ q[:, t, ..., None]).squeeze(-1))
    o = torch.stack(outs, 1) if outs else torch.empty_like(v)
    return o, state


def run(rule, case: Case, do: Tensor, dfinal: Tensor) -> list[Tensor | None]:
    inputs = [None if t is None else t.detach().clone().requires_grad_() for t in case.tensors]
    o, final = rule(case.with_tensors(inputs))
    used = [t for t in inputs if t is not None]
    grads = iter(torch.autograd.grad((o, final), used, (do.to(o.dtype), dfinal.to(final.dtype)), allow_unused=True))
    return [o, final, *(None if t is None else next(grads) for t in inputs)]


def errors(case: Case) -> dict[str, float]:
    v = case.v
    units = v.shape[0] if case.lengths is None else len(case.lengths)
    do, dfinal = torch.randn_like(v), torch.randn(units, v.shape[2], v.shape[3], case.q.shape[3], device=v.device)
    got = run(kernels, case, do, dfinal)
    exact = case.with_tensors([None if t is None else t.double() for t in case.tensors])
    want = run(token_loop, exact, do.double(), dfinal.double())
    out = {}
    for name, a, w in zip(NAMES, got, want, strict=True):
        if w is None or a is None:
            continue
        assert a.shape == w.shape, (name, a.shape, w.shape)
        scale = max(w.norm().item(), 1e-3 * w.numel() ** 0.5)
        found = (a.double() - w).norm().item() / scale
        out[name] = found if torch.isfinite(a).all() else float("nan")
    return out


def check(case: Case, loose: float = 1.0) -> None:
    found = errors(case)
    print({n: f"{e:.1e}" for n, e in found.items()})
    bound = BOUNDS[case.q.dtype] * loose
    assert all(e < bound for e in found.values()), {n: f"{e:.1e}" for n, e in found.items() if not e < bound}


# every rule in bfloat16, and those that share least of the code in the others: a pair costs seconds of compilation
PAIRS = [(rule, torch.bfloat16) for rule in RULES]
PAIRS += [("delta", torch.float16), ("dplr", torch.float16), ("early", torch.float32), ("dplr", torch.float32)]


@pytest.mark.parametrize(("rule", "dtype"), PAIRS, ids=str)
def test_lengths(rule: str, dtype: torch.dtype) -> None:
    for length in (1, 2, 63, 64, 65, 1000):
        check(draw(rule, length, 64, 64, dtype))


@pytest.mark.parametrize(("rule", "dtype"), PAIRS, ids=str)
def test_hard_inputs(rule: str, dtype: torch.dtype) -> None:
    for kind in ("parallel", "strong", "open", "closed", "mixed", "kda", "integer", "ones"):
        # what cancels grows with close keys; among equal ones a write is a difference of equal numbers, and of 200
        # gradients of strengths all but the first are sums that cancel
        loose = {"parallel": 4 if dtype == torch.float32 else 2, "strong": 2, "ones": 6}.get(kind, 1)
        check(draw(rule, 200, 64, 64, dtype, kind), loose)


@pytest.mark.parametrize("rule", ("delta", "dplr"))
def test_a_long_sequence(rule: str) -> None:
    check(draw(rule, 4096, 128, 128, torch.bfloat16, b=1, h=1))


@pytest.mark.parametrize(
    ("rule", "d_k", "d_v", "dtype"),
    (
        ("delta", 1, 3, torch.bfloat16), ("dplr", 16, 100, torch.bfloat16), ("early", 100, 16, torch.bfloat16),
        ("erase", 192, 64, torch.bfloat16), ("dplr", 256, 256, torch.bfloat16), ("delta", 20, 128, torch.float32),
        ("dplr", 256, 200, torch.float32),
    ),
    ids=str,
)  # fmt: skip
def test_sides(rule: str, d_k: int, d_v: int, dtype: torch.dtype) -> None:
    check(draw(rule, 100, d_k, d_v, dtype), 6 if d_k == 1 else 1)  # keys of one channel are all parallel


@pytest.mark.parametrize("rule", ("delta", "dplr"))
def test_grouped_heads_and_packed_sequences(rule: str) -> None:
    check(draw(rule, 130, 64, 64, torch.bfloat16, h=2, hv=6))
    for fresh in (False, True):
        check(draw(rule, 0, 64, 64, torch.bfloat16, hv=4, lengths=(0, 1, 63, 200, 0, 64, 65, 0), fresh=fresh))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    ("rule", "d"), (("delta", 64), ("delta", 128), ("early", 128), ("erase", 64), ("dplr", 64), ("dplr", 128))
)
def test_hopper_is_as_near_as_the_portable_kernels(
    rule: str, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [draw(rule, length, d, d, dtype) for length in (1, 63, 64, 200)]
    cases += [draw(rule, 200, d, d, dtype, kind) for kind in ("open", "parallel", "mixed", "kda")]
    cases += [draw(rule, 130, d, d, dtype, hv=6), draw(rule, 700, d, d, dtype, "open", fresh=True)]
    assert diagonal_delta.hopper.fits(cases[0].q, cases[0].v) or torch.cuda.get_device_capability() != (9, 0)
    torch.manual_seed(0)
    fast = [errors(case) for case in cases]
    monkeypatch.setattr(diagonal_delta.hopper, "fits", lambda *_: False)
    torch.manual_seed(0)
    for case, found in zip(cases, fast, strict=True):
        portable = errors(case)
        print({n: f"{e:.1e} {portable[n]:.1e}" for n, e in found.items()})
        assert all(e <= 1.25 * portable[n] + 1e-4 for n, e in found.items())


def test_few_heads_are_as_near_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for d, kind in ((64, "mixed"), (128, "kda")):
        case = draw("delta", 200, d, d, torch.bfloat16, kind)
        torch.manual_seed(0)
        many = errors(case)
        monkeypatch.setattr(diagonal_delta, "_FEWEST", 1000)
        torch.manual_seed(0)
        few = errors(case)
        monkeypatch.setattr(diagonal_delta, "_FEWEST", 1)
        assert all(e <= 1.25 * few[n] + 1e-4 for n, e in many.items()), (many, few)
        assert all(e <= 1.25 * many[n] + 1e-4 for n, e in few.items()), (many, few)


@pytest.mark.parametrize("rule", ("delta", "dplr"))
def test_no_tokens(rule: str) -> None:
    case = draw(rule, 0, 64, 64, torch.bfloat16)
    o, final, *grads = run(kernels, case, torch.empty_like(case.v), torch.ones_like(case.start))
    assert o.shape == case.v.shape and torch.equal(final, case.start) and torch.equal(grads[-1], torch.ones_like(final))


@pytest.mark.parametrize("rule", ("delta", "dplr"))
def test_repeats_bit_for_bit_and_writes_every_element(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(rule, 0, 64, 64, torch.bfloat16, lengths=(0, 3, 500, 64), hv=4)
    do, dfinal = torch.randn_like(case.v), torch.randn_like(case.start)
    first = run(kernels, case, do, dfinal)
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert torch.empty(4, device="cuda").isnan().all()
        second = run(kernels, case, do, dfinal)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(
    ("rule", "dtype", "d"),
    (
        ("delta", torch.bfloat16, 128), ("dplr", torch.bfloat16, 128), ("delta", torch.float16, 128),
        ("early", torch.bfloat16, 64), ("erase", torch.bfloat16, 64), ("dplr", torch.float16, 64),
    ),
)  # fmt: skip
@pytest.mark.parametrize("kind", ("mixed", "kda"))
def test_a_full_chip_repeats_and_equals_its_parts(rule: str, dtype: torch.dtype, d: int, kind: str) -> None:
    """Faults of a compiler show under load: the same bits again and again, and alone."""
    case = draw(rule, 1000, d, d, dtype, kind, b=8, h=16)
    do, dfinal = torch.randn_like(case.v), torch.randn_like(case.start)
    first = run(kernels, case, do, dfinal)
    for _ in range(10):
        for a, b in zip(first, run(kernels, case, do, dfinal), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    part = case.with_tensors([None if t is None else t[3:4] for t in case.tensors])
    for a, b in zip(first, run(kernels, part, do[3:4], dfinal[3:4]), strict=True):
        assert (a is None and b is None) or torch.equal(a[3:4], b)


@pytest.mark.parametrize("rule", ("erase", "dplr"))
def test_compiles_as_one_graph(rule: str) -> None:
    case = draw(rule, 100, 64, 64, torch.bfloat16)
    do, dfinal = torch.randn_like(case.v), torch.randn_like(case.start)
    eager = run(kernels, case, do, dfinal)

    def compiled(one: Case) -> tuple[Tensor, Tensor]:
        q, k, v, g, x, y, start = one.tensors
        if rule == "dplr":
            return torch.compile(diagonal_delta.dplr, fullgraph=True)(q, k, v, g, x, y, start)
        return torch.compile(diagonal_delta.delta, fullgraph=True)(q, k, v, g, y, x, False, start)

    for a, b in zip(eager, run(compiled, case, do, dfinal), strict=True):
        assert torch.equal(a, b)


def time_it() -> None:
    """`python tests/gpu/test_diagonal_delta.py`: milliseconds at B 8, T 4096, H 16, D 128, and of each kernel."""
    from triton.testing import do_bench

    for rule in ("delta", "dplr"):
        case = draw(rule, 4096, 128, 128, torch.bfloat16, "kda", b=8, h=16, fresh=True)
        inputs = [None if t is None else t.requires_grad_() for t in case.tensors]
        case = case.with_tensors(inputs)
        used = [t for t in inputs if t is not None]
        do = torch.randn_like(case.v)
        with torch.no_grad():
            forward = do_bench(lambda case=case: kernels(case), return_mode="median")
        both = do_bench(
            lambda case=case, used=used, do=do: torch.autograd.grad(kernels(case)[0], used, do), return_mode="median"
        )
        print(f"{rule}: forward {forward:.3f} ms, forward and backward {both:.3f} ms", flush=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(kernels(case)[0], used, do)
        for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:8]:
            print(f"    {event.key[:60]:60s} {event.count:3d} x {event.device_time_total / event.count / 1e3:.3f} ms")


if __name__ == "__main__":
    time_it()
