"""Newton-Schulz in the space of Gram matrices against polynomials of singular values; symmetric products.

Triton's interpreter is chosen when Triton is imported, so the kernel runs in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from axes.core.geometry import Spectral
from axes.core.geometry.bregman import NO_CONTEXT
from axes.errors import IllegalUpdate
from axes.linalg import newton_schulz, symmetric
from axes.linalg.newton_schulz import (
    Moving,
    Start,
    Triple,
    direct,
    in_gram_form,
    iterate,
    leaf_norm,
    polar_express_schedule,
)
from axes.optim import Muon, NorMuon
from tests.interpreter import interpret

MUON = (3.4445, -4.7750, 2.0315)
SEEDS = st.integers(0, 2**20)


def normalised(*shape: int) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    return x / leaf_norm(x)


def by_singular_values(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    for a, b, c in schedule:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ vh


@given(seed=SEEDS, m=st.integers(1, 6), wider=st.integers(0, 7), steps=st.integers(1, 7), restart=st.integers(1, 3))
def test_the_gram_form_is_the_same_polynomial_of_every_singular_value(
    seed: int, m: int, wider: int, steps: int, restart: int
) -> None:
    torch.manual_seed(seed)
    wide, tall, square = normalised(2, m, m + wider), normalised(3, m + wider, m).mT, normalised(1, m, m)
    sizes = (1.0, 2.5, -0.5)
    for schedule in ((MUON,) * steps, polar_express_schedule(steps)):
        out = in_gram_form((wide, tall, square), schedule, sizes, restart)
        for x, y, size in zip((wide, tall, square), out, sizes, strict=True):
            torch.testing.assert_close(y, size * by_singular_values(x, schedule), rtol=0, atol=1e-10)
            torch.testing.assert_close(direct(x, schedule), by_singular_values(x, schedule), rtol=0, atol=1e-11)
        assert out[1].mT.is_contiguous() or min(out[1].shape) == 1  # stored by columns, as it came


@given(seed=SEEDS, m=st.integers(1, 6), wider=st.integers(0, 7), steps=st.integers(1, 7))
def test_coefficients_may_be_numbers_of_the_device(seed: int, m: int, wider: int, steps: int) -> None:
    torch.manual_seed(seed)
    wide, tall = normalised(2, m, m + wider), normalised(3, m + wider, m).mT
    coefficients = torch.tensor(MUON, dtype=torch.float64) * (1 - 0.1 * torch.rand(3, dtype=torch.float64))
    schedule: Any = (tuple(coefficients.tolist()),) * steps
    moving = Moving(torch.tensor(Moving.told(schedule[0], steps), dtype=torch.float64), steps)
    for x, y, size in zip((wide, tall), moving.in_gram_form((wide, tall), (1.0, 2.5), 5), (1.0, 2.5), strict=True):
        torch.testing.assert_close(y, size * by_singular_values(x, schedule), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(moving.direct(x), by_singular_values(x, schedule), rtol=1e-9, atol=1e-10)


def test_numbers_of_the_device_round_as_those_of_the_host() -> None:
    """In float16, in which the kernel works: both as far from exact arithmetic."""
    torch.manual_seed(0)
    x = normalised(2, 64, 256)
    exact = by_singular_values(x, (MUON,) * 5)
    (host,) = in_gram_form([x.half()], (MUON,) * 5, [1.0])
    numbers = torch.tensor(Moving.told(MUON, 5), dtype=torch.float64)
    (there,) = Moving(numbers, 5).in_gram_form([x.half()], [1.0], 2)
    off = [float((y.double() - exact).norm() / exact.norm()) for y in (host, there)]
    assert there.dtype == torch.float16 and max(off) < 5e-3 and off[1] < 1.3 * off[0]


@pytest.mark.parametrize("form", ["gram", "direct"])
def test_spectral_reads_its_numbers_from_a_tensor(form: Any) -> None:
    torch.manual_seed(0)
    h = Spectral(coefficients=(3.3, -4.6, 2.0), eps=0.3, scale="original", form=form)
    stacks = [torch.randn(3, 4, 9, dtype=torch.float64), 0.01 * torch.randn(2, 9, 4, dtype=torch.float64)]
    numbers = torch.tensor(h.moving(), dtype=torch.float64)
    want = h.primals([x.clone() for x in stacks], [NO_CONTEXT] * 2, torch.float64)
    for numbers_too in (h, Spectral(scale="original", form=form)):  # whatever its own are
        found = numbers_too.primals([x.clone() for x in stacks], [NO_CONTEXT] * 2, torch.float64, numbers=numbers)
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert not Spectral("polar").moving() and not Spectral("polar-express").moving()


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
@pytest.mark.parametrize("shape", [(3, 9), (9, 3), (2, 4, 4), (2, 2, 3, 7)])
@pytest.mark.parametrize("precision", ["input", "bfloat16"])
def test_forms_agree_in_float64_and_are_one_where_nothing_is_gained(
    method: Any, shape: tuple[int, ...], precision: Any
) -> None:
    theta = torch.randn(shape, dtype=torch.float64)
    theta[..., 0] = 0.0  # of lower rank
    one, other = (Spectral(method, scale="spectral", precision=precision, form=f) for f in ("direct", "gram"))  # type: ignore[arg-type]
    got, want = other.primal(theta), one.primal(theta)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    if precision == "bfloat16":  # no kernel on this device: the operations are the same
        assert torch.equal(got, want)
    assert torch.equal(other.primal(torch.zeros(shape)), torch.zeros(shape))


def test_the_gram_form_is_differentiated_as_the_direct_one_is() -> None:
    theta = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 7, dtype=torch.float64)
    first, second = (
        torch.autograd.grad((Spectral("polar-express", form=f).primal(theta) * weight).sum(), theta)[0]  # type: ignore[arg-type]
        for f in ("direct", "gram")
    )
    torch.testing.assert_close(first, second, rtol=0, atol=1e-11)


def test_results_are_scaled_and_stacks_of_any_sizes_go_together() -> None:
    xs = [torch.randn(2, 3, 8), torch.randn(4, 5, 5), torch.randn(8, 3).mT]
    for form in ("direct", "gram"):
        out = iterate(xs, Start(2.0, 0.0, 1e-7), (MUON,) * 5, form, (2.0, 3.0, 4.0), torch.float64)  # type: ignore[arg-type]
        for x, y, size in zip(xs, out, (2.0, 3.0, 4.0), strict=True):
            want = size * by_singular_values(x.double() / (2 * leaf_norm(x.double())), (MUON,) * 5)
            torch.testing.assert_close(y.double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("terms", [0, 1, 2])
def test_a_symmetric_product_without_a_kernel_is_torchs(terms: int) -> None:
    a, b = (torch.randn(2, 4, 4, dtype=torch.float64) for _ in range(2))
    a = a + a.mT
    b = a @ a - 0.3 * a  # they commute
    given_terms = ((0.5, a), (-2.0, b))[:terms]
    want = 3.0 * a @ b.mT + sum((x * d for x, d in given_terms), torch.zeros_like(a))
    want = want + 7.0 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(symmetric.product(a, b, alpha=3.0, terms=given_terms, diagonal=7.0), want)
    out = torch.empty(2, 4, 4)
    assert symmetric.product(a, b, alpha=3.0, terms=given_terms, diagonal=7.0, out=out) is out
    torch.testing.assert_close(out, want.float())
    assert symmetric.product(a, dtype=torch.float32).dtype == torch.float32
    reason = symmetric.no_kernel(a)
    assert reason is not None and "not a GPU" in reason


def test_forms_are_checked_and_reach_the_tuple() -> None:
    with pytest.raises(IllegalUpdate, match="form 'fast' is not direct or gram"):
        Spectral(form="fast")  # type: ignore[arg-type]
    with pytest.raises(IllegalUpdate, match="form has no effect with method 'polar'"):
        Spectral("polar", form="gram")
    for declare in (Muon.declare, NorMuon.declare):
        filters = declare(form="direct").filters()
        assert Spectral(scale="match_rms_adamw", precision="bfloat16") in [f.parts().h for f in filters]
        assert Spectral(scale="match_rms_adamw", precision="bfloat16", form="gram") in [
            f.parts().h for f in declare().filters()
        ]


KERNEL = r"""
import torch
from axes.errors import ShapeError
from axes.kernels.products.normalise import normalised
from axes.kernels.products.symmetric import symmetric_product

torch.manual_seed(0)
for shape in ((3, 8, 8), (2, 90, 100)):
    for x in (torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16().mT.contiguous().mT):
        x[0] = 0.0
        y = normalised(x, 1.01, 1e-3, 0.5)
        assert torch.equal(y, normalised(x, 1.01, 1e-3, 0.5))
        for kind in (torch.float64, torch.float32):  # a floor that is there already
            assert torch.equal(y, normalised(x, 1.01, 1e-3, torch.tensor([9.0, 0.5], dtype=kind)[1]))
        norm = x.double().flatten(1).norm(dim=1)[:, None, None]
        want = x.double() / (1.01 * norm + 1e-3).clamp(min=0.5)
        assert y.dtype == torch.float16 and y.stride() == x.stride()
        assert (y - want).abs().max() < 1e-3 * want.abs().max()
        for parts in (1, 5, 5000):  # sums over any parts of a matrix, here by shares
            share = torch.rand(len(x), parts, dtype=torch.float64)
            squares = (norm[:, 0].square() * share / share.sum(1, keepdim=True)).float()
            given = normalised(x, 1.01, 1e-3, 0.5, squares)
            assert given.stride() == x.stride() and torch.equal(given, normalised(x, 1.01, 1e-3, 0.5, squares))
            assert (given.float() - y.float()).abs().max() <= 2**-10 * y.abs().max()
x = torch.ones(2, 8, 8, dtype=torch.bfloat16)
for squares in (torch.ones(3, 4), torch.ones(2), torch.ones(4, 2).mT):
    try:
        normalised(x, 1.0, 0.0, 0.5, squares)
    except ShapeError as error:
        assert "squares are (N, any number)" in str(error)
    else:
        raise AssertionError(squares.shape)

for m, k in ((136, 72), (256, 64), (8, 200)):
    rows = torch.randn(2, m, k)
    d = torch.randn(2, m, m)
    d = d + d.mT
    for a in (rows, rows.mT.contiguous().mT):
        c = symmetric_product(a, alpha=0.5, terms=((0.3, d), (-2.0, d)), diagonal=3.0)
        want = 0.5 * a.double() @ a.double().mT - 1.7 * d + 3.0 * torch.eye(m)
        assert torch.equal(c, c.mT)
        assert (c - want).abs().max() < 1e-4, (m, k)
        spoiled = d.clone()  # its number is 0 in the second matrix
        spoiled[1] = torch.nan
        factors = torch.tensor([[0.5, 3.0], [-1.0, 0.0]])
        c = symmetric_product(a, alpha=2.0, terms=((0.5, spoiled),), factors=factors)
        want = torch.tensor([1.0, -2.0])[:, None, None] * a.double() @ a.double().mT
        want[0] += 1.5 * d[0]
        assert torch.equal(c, c.mT)
        assert (c - want).abs().max() < 1e-4, (m, k)
g = d @ d
out = d.clone()
symmetric_product(g, d, terms=((2.0, out),), out=out)  # a term may be overwritten
assert (out - (g.double() @ d.double() + 2.0 * d)).abs().max() < 1e-3 * g.abs().max()
assert symmetric_product(rows[:0]).shape == (0, 8, 8)

def refused(text, *args, **kwargs):
    try:
        symmetric_product(*args, **kwargs)
    except ShapeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

refused("multiples of 8", torch.zeros(1, 9, 16))
refused("alike", torch.zeros(1, 8, 16), torch.zeros(1, 16, 16))
refused("at most two terms", g, terms=((1.0, d),) * 3)
refused("term 0 is contiguous", g, terms=((1.0, d[:1]),))
refused("out must not be an input", g, out=g)
refused("stored by rows or by columns", rows, rows.mT.contiguous().mT)
"""


def test_the_kernel_under_the_interpreter() -> None:
    if sys.platform != "linux":
        pytest.importorskip("triton")
    interpret(KERNEL)


STEP = r"""
import torch
from axes.linalg import newton_schulz
from axes import optim
from axes.kernels.products import normalise
from axes.optim.engine import around, generated

# The path of a GPU on a CPU: generated kernels, and float16 in the Gram form.
generated.no_kernels = lambda device: None
around._HOST_BOUND = -1
newton_schulz._gains = lambda stacks, members, count: members
launched = []


class Counted:
    def __init__(self, name):
        self.name, self.kernel = name, getattr(normalise, name)

    def __getitem__(self, grid):
        launched.append(self.name)
        return self.kernel[grid]


for name in ("_squares", "_divisors", "_quotients"):
    setattr(normalise, name, Counted(name))

# of whole chunks, with a part of one, tall, of less than one; a stack of three, and weights of a convolution
SHAPES = ((16, 128), (24, 72), (24, 72), (96, 40), (16, 24), (24, 72), (12, 10, 4, 4))


def steps(rule, squares, **options):
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    parameters = [torch.nn.Parameter(x.clone()) for x in start]
    cls = {"muon": optim.Muon, "normuon": optim.NorMuon}[rule]
    optimizer = cls([{"params": parameters, "rule": rule}], lr=0.1, weight_decay=0.1, **options)
    for t in range(3):
        for i, p in enumerate(parameters):
            p.grad = torch.randn_like(p) * 10.0 ** (i - t)
        optimizer.step()
        (whole,) = [b for *_, made in optimizer._batches.made.values() for b in made]
        (batch,) = [product for *_, products in whole.around.steps for product in products]
        assert len(batch.stacks) == 5
        if batch.squares is not None:
            assert [len(s) for s in batch.squares] == [len(x) for x in batch.stacks]
            for sums, x in zip(batch.squares, batch.stacks, strict=True):
                want = x.double().flatten(1).square().sum(1)
                torch.testing.assert_close(sums.double().sum(1), want, rtol=1e-6, atol=0)
        if not squares:
            batch.squares = None
    return [p.detach() - x for p, x in zip(parameters, start, strict=True)], batch


for rule in ("muon", "normuon"):
    for method in ("newton-schulz", "polar-express"):
        launched.clear()
        alone, _ = steps(rule, False, method=method)
        assert launched.count("_squares") == 10  # but for the first step
        launched.clear()
        with_sums, batch = steps(rule, True, method=method)
        assert batch.squares is not None and set(launched) == {"_divisors", "_quotients"} and len(launched) == 30
        for a, b in zip(with_sums, alone, strict=True):
            assert (a - b).norm() <= 1e-3 * b.norm()
    for options in ({"form": "direct"}, {"precision": "input"}):
        _, batch = steps(rule, True, **options)
        assert batch.squares is None
"""


def test_a_step_with_kernels_reads_stacks_once() -> None:
    if sys.platform != "linux":
        pytest.importorskip("triton")
    interpret(STEP)


def test_the_kernel_compiles_to_hoppers_products_without_spills() -> None:
    pytest.importorskip("triton")
    from axes.kernels.products.symmetric import symmetric_product
    from tests.hopper import hopper

    g = torch.zeros(2, 1024, 1024, dtype=torch.float16)
    with hopper() as launches:
        symmetric_product(torch.zeros(2, 2048, 1024, dtype=torch.float16).mT)
        symmetric_product(g, g.clone(), terms=((0.5, g), (0.3, g)), diagonal=2.0)
    assert len(launches) == 2
    for launch in launches:
        assert launch.spills == 0 and launch.wgmma > 0 and launch.mma == 0
        assert launch.shared <= 113 * 1024 and launch.registers * 128 * 2 <= 65536  # two programs a processor


@pytest.mark.parametrize("limit", [1, 70, 150, 1 << 20])
def test_a_stack_is_its_matrices_however_many_are_taken_at_a_time(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axes.linalg.newton_schulz._AT_A_TIME", limit)
    torch.manual_seed(0)
    x = 0.1 * torch.randn(2, 3, 5, 7, dtype=torch.float64)
    x.requires_grad_()
    schedule = polar_express_schedule(3)
    together = direct(x, schedule)
    alone = torch.stack([direct(y, schedule) for y in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(x)
    (a,), (b,) = torch.autograd.grad((together * weights).sum(), x), torch.autograd.grad((alone * weights).sum(), x)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert direct(x.detach()[:0], schedule).shape == (0, 3, 5, 7)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((6, 9), (3, 6, 9)))
def test_a_cpu_without_instructions_for_16_bits_rounds_as_torch_does(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are exact in float32 where entries are few integers: both routes round the same three numbers a step."""
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).to(dtype) / 8
    schedule, found = ((2.0, -1.0, 0.5),), []
    for instructions in (True, False):
        monkeypatch.setattr(newton_schulz, "_INSTRUCTIONS", {dtype: instructions})
        assert newton_schulz._lent(x) == (dtype if instructions else torch.float32)
        found.append(direct(x, schedule, newton_schulz._lent(x)))
    gram = (x @ x.mT).double()
    factor = (0.5 * gram @ gram - gram).to(dtype).double()
    want = (factor @ x.double() + 2 * x).to(dtype)
    assert found[0].dtype == found[1].dtype == dtype
    assert torch.equal(found[0], want) and torch.equal(found[1], want)
    torch.manual_seed(1)
    x, start = torch.randn(shape).to(dtype), Start(1.0, 0.0, 1e-7)
    for steps in ((MUON,) * 5, Moving(torch.tensor(Moving.told(MUON, 5)), 5)):
        (lent,) = iterate([x], start, steps, "gram", [1.0], torch.float64)
        (own,) = iterate([x], start, steps, "direct", [1.0], torch.float64)
        assert (lent - own).norm() <= 4 * torch.finfo(dtype).eps * own.norm()
