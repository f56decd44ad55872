"""The kernels of residual streams on a GPU against float64, alone and through mixers.

`python tests/gpu/test_streams.py` prints every case's errors; with `time` milliseconds, memory and launches of kernels
and whole mixers. Settings are compared by `tune_streams.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch.library import opcheck  # noqa: E402

from axes import catalogue  # noqa: E402
from axes.core.geometry import Birkhoff, Cayley  # noqa: E402
from axes.depth import RELEASED_EPS  # noqa: E402
from axes.kernels.streams import cayley, follow, look, mix, sinkhorn  # noqa: E402
from tests.streams import (  # noqa: E402
    CALLS,
    check_followed,
    check_mixer,
    draw,
    draw_follow,
    draw_look,
    errors,
    follow_errors,
    gradients,
    look_errors,
)  # fmt: skip

BF, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FULL: 3e-6, HALF: 2e-3, BF: 1.2e-2}  # relative errors of a whole tensor


@dataclass(frozen=True)
class Case:
    """One call. each: coefficients of every token."""

    name: str
    n: int = 4
    d: int = 2048
    tokens: int = 300
    each: bool = True
    dtype: torch.dtype = BF

    def __str__(self) -> str:
        return " ".join(f"{n}={x}".replace("torch.", "") for n, x in vars(self).items())


CASES = [Case(name, n, each=each, dtype=dtype) for name in CALLS for n in (1, 2, 3, 4) for each in (True, False)
         for dtype in (BF, HALF, FULL)]  # fmt: skip
CASES += [Case(name, n, 512, 70, dtype=dtype) for name in CALLS for n in (5, 8, 9, 16) for dtype in (BF, FULL)]
CASES += [Case(name, 4, d, t) for name in CALLS for d in (1, 7, 100, 129, 1000, 5120) for t in (1, 2, 3, 67)]
CASES += [Case("write", tokens=40_000), Case("both", tokens=40_000), Case("read", tokens=40_000)]
CASES += [Case("write", 16, 4096, 33_000), Case("read", 16, 4096, 33_000)]  # more than 2^31 numbers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case) -> None:
    found = measure(case)
    assert max(found) < BOUNDS[case.dtype], found


def measure(case: Case) -> list[float]:
    torch.manual_seed(0)
    if case.n * case.d * case.tokens > 2**31:
        return far(case)
    return errors(case.name, draw(case.name, case.n, case.d, (case.tokens,), case.each, case.dtype, "cuda"))


def far(case: Case) -> list[float]:
    """The last tokens of many, which float64 has room for."""
    given = draw(case.name, case.n, case.d, (case.tokens,), case.each, case.dtype, "cuda")
    kernel, meaning, _ = CALLS[case.name]
    with torch.no_grad():
        got = kernel(**given)[-50:]
        want = meaning(**{name: x[-50:].double() for name, x in given.items()})
    return [((got - want).norm() / want.norm()).item()]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("each", (True, False))
def test_the_same_bits_again(name: str, each: bool) -> None:
    torch.manual_seed(0)
    given = draw(name, 4, 2048, (20_000,), each, BF, "cuda")
    kernel = CALLS[name][0]
    with torch.no_grad():
        outs = kernel(**given)
    directions = [torch.randn_like(o) for o in (outs if isinstance(outs, tuple) else (outs,))]
    first = gradients(kernel, list(given.values()), directions)
    for _ in range(5):
        again = gradients(kernel, list(given.values()), directions)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_write_with_the_next_read_is_one_after_the_other() -> None:
    torch.manual_seed(0)
    given = draw("both", 4, 2048, (1000,), True, BF, "cuda")
    after, seen = mix.mix_write_read(**given)
    r = given.pop("r")
    for a, b in ((after, mix.mix_write(**given)), (seen, mix.mix_read(after, r))):
        # to the last bit but where a compiler contracts products and sums in another way
        assert (a != b).double().mean() < 1e-2 and torch.allclose(a, b, rtol=2**-7, atol=1e-6)


# ---- predicted coefficients ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """One call: streams (tokens, n, d), rows of so many entries."""

    chart: str = "sigmoid"
    n: int = 4
    d: int = 2048
    tokens: int = 300
    entries: int = 24
    dtype: torch.dtype = BF
    tanh: bool = False
    centred: bool = False
    writes: bool = False
    scales: int | None = None

    def options(self) -> dict[str, bool]:
        return {"tanh": self.tanh, "centred": self.centred, "writes": self.writes}

    def __str__(self) -> str:
        return " ".join(f"{n}={x}".replace("torch.", "") for n, x in vars(self).items())


FORMS = (
    {}, {"writes": True, "scales": 3},
    {"chart": "softmax", "entries": 48, "centred": True, "writes": True, "scales": 1},
    {"chart": "first", "entries": 6, "tanh": True},
)  # fmt: skip
LOOKS = [Look(dtype=dtype, tokens=t, **form) for form in FORMS for dtype in (BF, HALF, FULL) for t in (300, 5000)]  # type: ignore[arg-type]
LOOKS += [Look(d=d, tokens=t, **form) for form in FORMS for d in (1, 7, 100, 129, 5120) for t in (1, 2, 67)]  # type: ignore[arg-type]
LOOKS += [Look(n=n, d=512, entries=e, dtype=dtype) for n, e in ((2, 8), (3, 15), (4, 4), (8, 80), (10, 120), (16, 16))
          for dtype in (BF, HALF, FULL)]  # fmt: skip
LOOKS += [Look("softmax", 3, 512, entries=27, centred=True), Look("first", 16, 512, entries=18), Look(tokens=33_000)]


@pytest.mark.parametrize("case", LOOKS, ids=str)
def test_projected_coefficients(case: Look) -> None:
    found = measure_look(case)
    # x_in, x and the gradient of x are of its dtype
    rounded, exact = (found[0], found[4], found[5]), (*found[1:4], *found[6:])
    assert max(rounded) < BOUNDS[case.dtype] and max(exact) < {FULL: 1e-5, HALF: 5e-5, BF: 1e-4}[case.dtype], found


def measure_look(case: Look) -> list[float]:
    torch.manual_seed(0)
    given = draw_look(case.n, case.d, (case.tokens,), case.entries, case.chart, case.dtype, "cuda", case.scales)
    return look_errors(given, case.chart, **case.options())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_projected_coefficients_are_the_same_bits_again(form: dict[str, object]) -> None:
    torch.manual_seed(0)
    case = Look(tokens=20_000, **form)  # type: ignore[arg-type]
    given = draw_look(4, 2048, (case.tokens,), case.entries, case.chart, BF, "cuda", case.scales)

    def run() -> tuple[torch.Tensor, ...]:
        def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return look.look(*given, case.chart, **case.options())

        with torch.no_grad():
            directions = [torch.sin(o.float()).to(o.dtype) for o in call(*given)]
        return gradients(call, given, directions)

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


# ---- a write, and what the next sublayer predicts ------------------------------------------------------------------


@pytest.mark.parametrize("case", LOOKS, ids=str)
@pytest.mark.parametrize("mixes", (True, False))
def test_a_write_and_what_the_next_sublayer_predicts(case: Look, mixes: bool) -> None:
    torch.manual_seed(0)
    drawn = case.n, case.d, (case.tokens,), case.entries, case.chart, case.dtype, "cuda"
    found = follow_errors(draw_follow(*drawn, mixes=mixes, scales=case.scales), case.chart, **case.options())
    parameters = found[2:5] + found[-3:]  # with pre, k and entries: float32, from streams that round where they differ
    exact = {FULL: 1e-5, HALF: 2e-4, BF: 5e-4}[case.dtype]
    assert max(found) < BOUNDS[case.dtype] and max(parameters) < exact, found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_write_and_what_it_predicts_are_the_same_bits_again(form: dict[str, object]) -> None:
    torch.manual_seed(0)
    case = Look(tokens=20_000, **form)  # type: ignore[arg-type]
    given = draw_follow(4, 2048, (case.tokens,), case.entries, case.chart, BF, "cuda", scales=case.scales)

    def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return follow.write_look(*given, case.chart, **case.options())  # type: ignore[arg-type]

    with torch.no_grad():
        directions = [torch.sin(o.float()).to(o.dtype) for o in call(*given)]
    first = gradients(call, given, directions)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(call, given, directions), strict=True))


# ---- Sinkhorn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 8, 16))
@pytest.mark.parametrize("scale", (1.0, 8.0, 60.0))
@pytest.mark.parametrize("tokens", (1, 77, 5000))
def test_sinkhorn(n: int, scale: float, tokens: int) -> None:
    torch.manual_seed(0)
    logits = scale * torch.randn(tokens, n, n, device="cuda")
    for eps in (0.0, 1e-6, 1e-2):
        check_links(logits, eps)


@pytest.mark.parametrize("high", (50.0, 88.0, 100.0, 200.0, -200.0, 1e4))
def test_sinkhorn_of_extreme_logits(high: float) -> None:
    logits = torch.randn(300, 4, 4, device="cuda")
    logits[::3, 1, 2] = high
    check_links(logits)
    check_links(-8.0 * (1 - torch.eye(4, device="cuda")) + 0.1 * logits.clamp(-5, 5))


def check_links(logits: torch.Tensor, eps: float = 0.0) -> None:
    direction, link = [torch.randn_like(logits)], Birkhoff(20, eps)
    got = gradients(lambda z: sinkhorn.sinkhorn(z, 20, eps), [logits], direction)
    want = gradients(link.primal, [logits.double()], direction)
    plain = gradients(link.primal, [logits], direction)
    again = gradients(lambda z: sinkhorn.sinkhorn(z, 20, eps), [logits], direction)
    for x, w, p, y in zip(got, want, plain, again, strict=True):
        assert torch.isfinite(x).all() and torch.equal(x, y)
        assert (x - w).norm() <= 2e-6 * w.numel() ** 0.5 + 2 * (p - w).norm()


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 8, 16))
@pytest.mark.parametrize("scale", (1.0, 10.0, 100.0))
@pytest.mark.parametrize("tokens", (1, 77, 5000))
def test_rotations(n: int, scale: float, tokens: int) -> None:
    torch.manual_seed(0)
    logits = scale * torch.randn(tokens, n, n, device="cuda")
    direction = [torch.randn_like(logits)]
    for kind in ("full", "mean-preserving") if n > 1 else ("full",):
        link = Cayley(1.0, kind)  # type: ignore[arg-type]

        def call(z: torch.Tensor, link: Cayley = link) -> torch.Tensor:
            return cayley.cayley(z, *link.rotation)

        got, again = (gradients(call, [logits], direction) for _ in range(2))
        want = gradients(link.primal, [logits.double()], direction)
        plain = gradients(link.primal, [logits], direction)
        for x, w, p, y in zip(got, want, plain, again, strict=True):
            assert torch.isfinite(x).all() and torch.equal(x, y)
            # I + A is as far from singular as its entries are large, and the kernel does not pivot
            least = 1e-6 * w.numel() ** 0.5 * max(1.0, w.abs().max().item(), 0.05 * scale)
            assert (x - w).norm() <= least + 4 * (p - w).norm()


# ---- operators and mixers --------------------------------------------------------------------------------------------


def test_operators() -> None:
    def a(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", requires_grad=True)

    opcheck(mix._reads.operator, (a(6, 4, 40), a(6, 4), True))
    opcheck(mix._writes.operator, (a(6, 4, 40), a(6, 4, 4), a(6, 40), a(4), True))
    opcheck(mix._writes.operator, (a(6, 4, 40), None, a(6, 40), a(6, 4), True))
    opcheck(mix._writes_and_reads.operator, (a(6, 4, 40), a(4, 4), a(6, 40), a(6, 4), a(4), True))
    together = a(24, 160), a(3), a(1, 24), "sigmoid", True, False, False
    alone = a(6, 40), a(6), a(4, 6), "first", False, True, True
    for given in (together, alone):
        opcheck(look._looks.operator, (a(6, 4, 40), *given, 1e-6, 0.0, True))
        opcheck(follow._follows.operator, (a(6, 4, 40), a(6, 4, 4), a(6, 40), a(6, 4), *given, 1e-6, 0.0, True))
    opcheck(sinkhorn._sinkhorn.operator, (a(6, 4, 4), 20, 0.0, True))
    opcheck(sinkhorn._sinkhorn.operator, (a(6, 4, 4), 20, 1e-6, True))
    opcheck(cayley._cayley.operator, (a(6, 4, 4), 0.1, True, True))


MIXERS = (
    "mhc", "mhc-lite", "ihc", "hyper-connections", "dynamic-hyper-connections", "jpmhc", "jpmhc-mean-preserving",
    "denseformer", "block-attention-residuals",
)  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", (FULL, HALF, BF), ids=str)
def test_mixers(name: str, dtype: torch.dtype) -> None:
    bound = {FULL: 2e-5, HALF: 4e-3, BF: 3e-2}[dtype]
    for n in (3, 4):
        check_mixer(name, n, 256, (2, 50), dtype, "cuda", bound)


@pytest.mark.parametrize("after", ("hyper-connections", "denseformer", "mhc"))
def test_a_write_with_the_next_mixers_read(after: str) -> None:
    check_followed("hyper-connections" if after != "denseformer" else after, after, 4, 256, (2, 50), "cuda")


@pytest.mark.parametrize("name", ("mhc", "ihc", "jpmhc", "dynamic-hyper-connections"))
def test_a_write_with_the_next_read_of_the_same_kind(name: str) -> None:
    check_followed(name, name, 4, 256, (2, 50), "cuda")


@pytest.mark.parametrize("dtype", (FULL, BF), ids=str)
def test_released_coefficients_and_an_exit_per_token(dtype: torch.dtype) -> None:
    bound = {FULL: 2e-5, BF: 3e-2}[dtype]
    check_mixer("mhc", 4, 256, (2, 50), dtype, "cuda", bound, eps=RELEASED_EPS, learned_reduce="per-token")


def test_a_sublayer_compiles_without_graph_breaks() -> None:
    torch.manual_seed(0)
    mixer = catalogue.get("mhc").cls(64, 1, streams=4, device="cuda")
    x = torch.randn(2, 9, 4, 64, device="cuda", requires_grad=True)

    def sublayer(x: torch.Tensor) -> torch.Tensor:
        seen, coefficients = mixer.read(x)
        made: torch.Tensor = mixer.write(x, torch.tanh(seen), coefficients)
        return made

    want = sublayer(x)
    got = torch.compile(sublayer, fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (got, want))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# ---- by hand ---------------------------------------------------------------------------------------------------------


SIZE = (4, 2048, (32_768,))  # n, d, tokens of the figures
ONE = ("residual", "pre-norm", "post-norm")
MEASURED = (*ONE, "hyper-connections", "ihc", "mhc", "mhc-lite", "jpmhc", "dynamic-hyper-connections")


def report(name: str, kernel: Callable[..., Any], given: Sequence[torch.Tensor]) -> None:
    """Milliseconds forward / with backward, and MB at the peak of the latter beyond inputs, outputs and gradients."""
    from triton.testing import do_bench

    wanted = [x.detach().requires_grad_() for x in given]

    def whole() -> list[torch.Tensor]:
        outs = kernel(*wanted)
        outs = outs if isinstance(outs, tuple) else (outs,)
        found = torch.autograd.grad(outs, wanted, [o.detach() for o in outs], allow_unused=True)
        return [*outs, *(g for g in found if g is not None)]

    with torch.no_grad():
        forward = do_bench(lambda: kernel(*given))
    backward = do_bench(whole)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = whole()
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in made)
    print(f"{name:<28} {forward:.3f} / {backward:.3f} ms {beyond / 1e6:8.0f} MB", flush=True)


def launches(name: str, run: Callable[[], object]) -> None:
    """Microseconds of every launch of a call."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    took = [(row.key[:44], row.self_device_time_total / 5, row.count // 5) for row in rows]
    told = [f"{key} {time:.0f}" + (f" ({n})" if n > 1 else "") for key, time, n in took if time]
    print(f"{name}:", ", ".join(told), flush=True)


def mixed(name: str, n: int, d: int, lead: tuple[int, ...]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The read and the write of a mixer, as of its streams, what is written, and its parameters."""
    mixer = catalogue.get(name).cls(d, 1, **({} if name in ONE else {"streams": n}), device="cuda")
    parameters = dict(mixer.named_parameters())

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen, coefficients = mixer.read(x)
            return seen, mixer.write(x, y, coefficients)

    both = Both()

    def call(x: torch.Tensor, y: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = {f"mixer.{key}": value for key, value in zip(parameters, values, strict=True)}
        made: tuple[torch.Tensor, torch.Tensor] = torch.func.functional_call(both, named, (x, y))
        return made

    streams = 1 if name in ONE else n
    given = [torch.randn(*lead, streams, d, device="cuda", dtype=BF), torch.randn(*lead, d, device="cuda", dtype=BF)]
    return call, [*given, *(p.detach() for p in parameters.values())]


def whole(call: Callable[..., Any], given: Sequence[torch.Tensor]) -> None:
    wanted = [x.detach().requires_grad_() for x in given]
    outs = call(*wanted)
    torch.autograd.grad(outs, wanted, [o.detach() for o in outs], allow_unused=True)


def times() -> None:
    """Everything at N = 32,768, d = 2,048, n = 4, bfloat16."""
    for name in CALLS:
        report(name, lambda *x, name=name: CALLS[name][0](*x), list(draw(name, *SIZE, True, BF, "cuda").values()))
    for eps in (0.0, 1e-6):
        call = lambda z, eps=eps: sinkhorn.sinkhorn(z, 20, eps)  # noqa: E731
        report(f"sinkhorn, eps {eps}", call, [torch.randn(32_768, 4, 4, device="cuda")])
    report("cayley", lambda z: cayley.cayley(z, 0.1), [torch.randn(32_768, 4, 4, device="cuda")])
    for form in FORMS:
        case = Look(**form)  # type: ignore[arg-type]
        given = draw_look(*SIZE, case.entries, case.chart, BF, "cuda", case.scales)

        def call(*x: torch.Tensor, case: Look = case) -> tuple[torch.Tensor, ...]:
            return look.look(*x, case.chart, **case.options())

        report(f"look {case.chart}", call, given)
        launches(f"look {case.chart}", lambda call=call, given=given: whole(call, given))
    h, y = (torch.randn(32_768, 2048, device="cuda", dtype=BF) for _ in range(2))
    report("h + y", lambda h, y: h + y, [h, y])
    for name in MEASURED:
        call, given = mixed(name, *SIZE)
        report(name, call, given)
        launches(name, lambda call=call, given=given: whole(call, given))


if __name__ == "__main__":
    if sys.argv[1:] == ["time"]:
        times()
    else:
        for case in CASES:
            print(case, " ".join(f"{x:.1e}" for x in measure(case)))
        for one in LOOKS:
            print(one, " ".join(f"{x:.1e}" for x in measure_look(one)))
