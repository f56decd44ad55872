"""The kernels of residual streams on a GPU against float64, alone and through mixers.

`python tests/gpu/test_streams.py` prints every case's errors, `python tests/gpu/test_streams.py time` milliseconds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch.library import opcheck  # noqa: E402

from axes import catalogue  # noqa: E402
from axes.core.geometry import Birkhoff  # noqa: E402
from axes.kernels.streams import mix, sinkhorn  # noqa: E402
from tests.streams import CALLS, check_mixer, draw, errors, gradients  # noqa: E402

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


# ---- Sinkhorn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 8, 16))
@pytest.mark.parametrize("scale", (1.0, 8.0, 60.0))
@pytest.mark.parametrize("tokens", (1, 77, 5000))
def test_sinkhorn(n: int, scale: float, tokens: int) -> None:
    torch.manual_seed(0)
    logits = scale * torch.randn(tokens, n, n, device="cuda")
    check_links(logits)


@pytest.mark.parametrize("high", (50.0, 88.0, 100.0, 200.0, -200.0, 1e4))
def test_sinkhorn_of_extreme_logits(high: float) -> None:
    logits = torch.randn(300, 4, 4, device="cuda")
    logits[::3, 1, 2] = high
    check_links(logits)
    check_links(-8.0 * (1 - torch.eye(4, device="cuda")) + 0.1 * logits.clamp(-5, 5))


def check_links(logits: torch.Tensor) -> None:
    direction = [torch.randn_like(logits)]
    got = gradients(lambda z: sinkhorn.sinkhorn(z, 20), [logits], direction)
    want = gradients(Birkhoff(20).primal, [logits.double()], direction)
    plain = gradients(Birkhoff(20).primal, [logits], direction)
    again = gradients(lambda z: sinkhorn.sinkhorn(z, 20), [logits], direction)
    for x, w, p, y in zip(got, want, plain, again, strict=True):
        assert torch.isfinite(x).all() and torch.equal(x, y)
        assert (x - w).norm() <= 2e-6 * w.numel() ** 0.5 + 2 * (p - w).norm()


# ---- operators and mixers --------------------------------------------------------------------------------------------


def test_operators() -> None:
    def a(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", requires_grad=True)

    opcheck(mix._reads.operator, (a(6, 4, 40), a(6, 4), True))
    opcheck(mix._writes.operator, (a(6, 4, 40), a(6, 4, 4), a(6, 40), a(4), True))
    opcheck(mix._writes.operator, (a(6, 4, 40), None, a(6, 40), a(6, 4), True))
    opcheck(mix._writes_and_reads.operator, (a(6, 4, 40), a(4, 4), a(6, 40), a(6, 4), a(4), True))
    opcheck(sinkhorn._sinkhorn.operator, (a(6, 4, 4), 20, True))


MIXERS = (
    "mhc", "ihc", "hyper-connections", "dynamic-hyper-connections", "jpmhc", "jpmhc-mean-preserving", "denseformer",
    "block-attention-residuals",
)  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", (FULL, HALF, BF), ids=str)
def test_mixers(name: str, dtype: torch.dtype) -> None:
    bound = {FULL: 2e-5, HALF: 4e-3, BF: 3e-2}[dtype]
    for n in (3, 4):
        check_mixer(name, n, 256, (2, 50), dtype, "cuda", bound)


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


def times() -> None:
    """Milliseconds at N = 32,768, d = 2,048, n = 4, bfloat16, forward / with backward."""
    from triton.testing import do_bench

    cases = {name: (CALLS[name][0], draw(name, 4, 2048, (32_768,), True, BF, "cuda")) for name in CALLS}
    links = {"z": torch.randn(32_768, 4, 4, device="cuda")}
    cases["sinkhorn"] = (lambda z: sinkhorn.sinkhorn(z, 20), links)
    for name, (kernel, given) in cases.items():
        wanted = [x.requires_grad_() for x in given.values()]

        def whole(kernel=kernel, given=given, wanted=wanted) -> None:  # type: ignore[no-untyped-def]
            outs = kernel(**given)
            outs = outs if isinstance(outs, tuple) else (outs,)
            torch.autograd.grad(outs, wanted, [o.detach() for o in outs])

        with torch.no_grad():
            forward = do_bench(lambda kernel=kernel, given=given: kernel(**given))
        print(f"{name:<16} {forward:.3f} / {do_bench(whole):.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["time"]:
        times()
    else:
        for case in CASES:
            print(case, " ".join(f"{x:.1e}" for x in measure(case)))
