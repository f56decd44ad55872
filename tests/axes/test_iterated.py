"""Newton-Schulz iterations in one launch, in Triton's interpreter, against float64 and autograd; and who takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from axes.core.geometry import Spectral
from axes.linalg import newton_schulz
from axes.linalg.newton_schulz import Moving, Start, no_kernel, polar_express_schedule
from tests.interpreter import interpret

KERNEL = r"""
import itertools
import torch
from axes.errors import ShapeError
from axes.kernels.products.iterated import newton_schulz

torch.manual_seed(0)
MUON = ((3.4445, -4.7750, 2.0315),)
SEVERAL = ((2.0, -1.5, 0.5), (1.9, -1.3, 0.4), (1.5, -0.5, 0.0))


def exact(x, polynomials, steps, factor=1.0, shift=0.0, floor=0.0, size=1.0):
    '''By autograd, one matrix after the other, in float64; of tall matrices x^T x acts from the right.'''
    def one(x):
        x = x / (factor * x.norm() + shift).clamp(min=floor) if x.any() else 0.0 * x
        for k in range(steps):
            a, b, c = polynomials[min(k, len(polynomials) - 1)]
            if len(x) <= len(x.T):
                g = x @ x.T
                x = a * x + b * g @ x + c * g @ g @ x
            else:
                g = x.T @ x
                x = a * x + b * x @ g + c * x @ g @ g
        return size * x
    flat = x.reshape(-1, *x.shape[-2:])
    return torch.stack([one(y) for y in flat]).reshape(x.shape)


def check(x, *given, tight=1e-5):
    ours, theirs = x.detach().requires_grad_(), x.double().detach().requires_grad_()
    got, want = newton_schulz(ours, *given), exact(theirs, *given)
    direction = torch.randn_like(want)
    (dgot,) = torch.autograd.grad(got, ours, direction.float())
    (dwant,) = torch.autograd.grad(want, theirs, direction)
    for a, b in ((got, want), (dgot, dwant)):
        assert a.dtype == torch.float32 and a.shape == b.shape and a.isfinite().all()
        least = direction.norm() / x.norm()  # what is along x is taken away, all of it where a matrix is one number
        off = float((a - b).detach().norm() / torch.maximum(b.detach().norm(), least))
        assert off <= tight, (tuple(x.shape), given, off)
    assert torch.equal(got, newton_schulz(x, *given))  # the same bits, and without a gradient


for m, n in itertools.product((1, 5, 17, 32), repeat=2):
    check(torch.randn(3, m, n), MUON, 5)
for shape in ((7, 12), (12, 7), (31, 16)):
    check(torch.randn(2, 2, *shape), SEVERAL, 5, 1.01, 1e-3, 0.0, -0.7)  # two dimensions of a stack; a size
    check(torch.randn(*shape), SEVERAL, 2)  # fewer steps than polynomials; one matrix
    check(0.01 * torch.randn(3, *shape), SEVERAL, 3, 2.0, 0.1, 0.5)  # the floor, which stands still
    check(torch.randn(3, *shape[::-1]).mT, MUON, 3)  # by columns
    check(torch.randn(6, *shape)[::2], MUON, 3)  # other matrices between
    check(torch.randn(shape[0], 2, shape[1]).transpose(0, 1), MUON, 3)  # neither by rows nor by columns

# a matrix that stands alone has the bits that it has among others
x = torch.randn(4, 5, 9)
assert torch.equal(newton_schulz(x, MUON, 5)[2], newton_schulz(x[2], MUON, 5))

# zero stays zero, and so does its gradient
x[1] = 0.0
check(x, MUON, 5, 1.0, 0.0, 1e-1)
check(x, SEVERAL, 3, 1.01, 1e-2)

# a matrix that is no number is no other's
x[1, 2, 3] = torch.nan
y = newton_schulz(x.requires_grad_(), MUON, 5)
assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()
(dx,) = torch.autograd.grad(y.sum(), x)
assert dx[[0, 2, 3]].isfinite().all() and dx[1].isnan().all()

for shape in ((0, 4, 4), (3, 0, 4), (3, 4, 0), (2, 0, 5, 6)):
    x = torch.zeros(shape, requires_grad=True)
    y = newton_schulz(x, MUON, 5)
    y.sum().backward()
    assert y.shape == shape == x.grad.shape


def refused(text, *given):
    try:
        newton_schulz(*given)
    except ShapeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)


refused("m and n up to 32", torch.zeros(2, 33, 4), MUON, 5)
refused("m and n up to 32", torch.zeros(4), MUON, 5)
refused("is float32, not torch.bfloat16", torch.zeros(2, 4, 4).bfloat16(), MUON, 5)
refused("not 5 of 9", torch.zeros(2, 4, 4), MUON * 9, 5)
refused("not 0 of 1", torch.zeros(2, 4, 4), MUON, 0)
"""


def test_the_kernels_are_the_iteration_and_its_derivative() -> None:
    interpret(KERNEL)


TWICE = r"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from axes.kernels.products import iterated
from axes.linalg.newton_schulz import Start, direct

torch.manual_seed(0)
MUON = (3.4445, -4.7750, 2.0315)


def by_torch(x):
    return direct(x / Start(1.0, 0.0, 1e-7).divisor(x), (MUON,) * 3)


def ours(x):
    return iterated.newton_schulz(x, (MUON,), 3, 1.0, 0.0, 1e-7)


x, direction, again = torch.randn(3, 2, 4, 6)
x[1] = 0.0
found = []
for call, kind in ((ours, torch.float32), (by_torch, torch.float64)):
    at = x.to(kind).requires_grad_()
    along = direction.to(kind).requires_grad_()
    (dx,) = torch.autograd.grad(call(at), at, along, create_graph=True)
    second = torch.autograd.grad(dx, (at, along), again.to(kind), create_graph=True)
    third = torch.autograd.grad(second[0].square().sum(), along)
    (bent,) = torch.autograd.grad(call(at).pow(3).sum(), at, create_graph=True)  # what comes back is made of x
    found.append((dx, *second, *third, *torch.autograd.grad(bent, at, again.to(kind))))
for a, b in zip(*found, strict=True):
    assert (a[0] - b[0]).norm() <= 1e-4 * b[0].norm(), float((a[0] - b[0]).norm() / b[0].norm())
    assert a[1].isfinite().all()
    assert (a[1] - b[1]).norm() <= 1e-4 * b[1].norm(), (a[1], b[1])

# what compilers and transformations see
given = x[:1].clone().requires_grad_()
torch.library.opcheck(
    iterated._newton_schulz.operator, (given, list(MUON), 3, [1.0, 0.0, 1e-7, 1.0], True),
    test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    atol=1e-4, rtol=1e-4,
)
torch.library.opcheck(
    iterated._gradient.operator, (x[:1].clone(), direction[:1].clone(), list(MUON), 3, [1.0, 0.0, 1e-7, 1.0], False),
    test_utils=("test_schema", "test_faketensor"),
)
with FakeTensorMode() as mode:
    y = torch.empty(2, 3, 4, 7).mT
    assert ours(y).shape == y.shape and ours(y).stride() == y.stride()
"""


def test_second_derivatives_are_torchs_and_the_operators_are_whole() -> None:
    interpret(TWICE)


def test_who_takes_small_matrices(monkeypatch: Any) -> None:
    x, start, muon = torch.zeros(2, 32, 32), Start(1.0, 0.0, 1e-7), ((3.0, -4.0, 2.0),) * 5
    said = no_kernel(x, start, muon)
    assert said is not None and "not a GPU" in said
    monkeypatch.setattr(newton_schulz.versions, "refusal", lambda device: None)
    moving = Moving(torch.zeros(10), 5)
    seen: list[str | None] = []
    several = tuple((float(i), 0.0, 0.0) for i in range(9))
    for reason, given in (
        ("float32, not torch.bfloat16", (x.bfloat16(), start, muon)),
        ("float32, not torch.float64", (x.double(), start, muon)),
        (r"at most 32, not \(32, 33\)", (torch.zeros(32, 33), start, muon)),
        ("numbers of the host", (x, start, moving)),
        ("numbers of the host", (x, Start(1.0, 0.0, torch.ones(())), muon)),
        ("up to 8 different", (x, start, several)),
    ):
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(no_kernel(*given))  # type: ignore[arg-type]
    torch.func.vmap(lambda y: seen.append(no_kernel(y, start, muon)) or y)(x)  # type: ignore[func-returns-value]
    assert seen[0] is not None and "torch.func" in seen[0]
    for fits in (muon, several[:8], several[:7] + several[7:8] * 20, polar_express_schedule(20)):
        assert no_kernel(x, start, fits) is None


CHOSEN = r"""
import torch
from axes.core.geometry import Spectral
from axes.kernels.products import iterated
from axes.linalg import newton_schulz

torch.manual_seed(0)
SHAPES = ((3, 5, 9), (4, 9, 5), (2, 2, 8, 8), (6, 40), (2, 33, 4))
launches = []
run = iterated._run
iterated._newton_schulz.forward = lambda *given: launches.append(given[0].shape) or run(*given)
for method in ("newton-schulz", "polar-express"):
    for form in ("direct", "gram"):
        for scale in (None, "spectral"):
            h = Spectral(method, scale=scale, form=form, steps=4)
            thetas = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
            newton_schulz.versions.refusal = lambda device: "no"
            want = [h.primal(theta) for theta in thetas]
            dwant = torch.autograd.grad([y.square().sum() for y in want], thetas)
            newton_schulz.versions.refusal = lambda device: None
            launches.clear()
            got = [h.primal(theta) for theta in thetas]
            assert launches == [(3, 5, 9), (4, 9, 5), (4, 8, 8)], launches  # as they are stored
            dgot = torch.autograd.grad([y.square().sum() for y in got], thetas)
            for a, b in zip((*got, *dgot), (*want, *dwant), strict=True):
                assert a.shape == b.shape and (a - b).norm() <= 1e-4 * b.norm()
"""


def test_spectral_takes_one_launch_and_says_the_same() -> None:
    interpret(CHOSEN)


def test_numbers_on_the_device_keep_their_way() -> None:
    """Coefficients that a schedule moves on the device are torch's products, whatever the size."""
    h = Spectral(coefficients=(3.3, -4.6, 2.0))
    stack = torch.randn(2, 4, 6)
    want = h.primal(stack)
    (got,) = h.primals([stack.clone()], [], torch.float32, numbers=torch.tensor(h.moving()))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
