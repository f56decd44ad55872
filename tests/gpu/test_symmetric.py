"""Symmetric products, the Gram form and stacked Muon on a GPU, against float64 and against torch.optim.Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import optim  # noqa: E402
from axes.core.geometry import Spectral  # noqa: E402
from axes.kernels.products.normalise import normalised  # noqa: E402
from axes.kernels.products.symmetric import symmetric_product  # noqa: E402
from axes.linalg import symmetric  # noqa: E402

if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs Hopper", allow_module_level=True)

SIDES = ((8, 8), (16, 1024), (120, 264), (128, 64), (136, 72), (256, 256), (520, 1032), (1024, 128))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def mirrored(x: Tensor) -> Tensor:
    return ((x.float() + x.mT.float()) / 2).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "k"), SIDES)
@pytest.mark.parametrize("columns", [False, True])
def test_gram_matrices_with_terms_equal_float64_at_any_size(dtype: torch.dtype, m: int, k: int, columns: bool) -> None:
    a = draw(3, m, k, dtype=dtype)
    a = a.mT.contiguous().mT if columns else a
    d, e = mirrored(draw(3, m, m, dtype=dtype)), mirrored(draw(3, m, m))
    got = symmetric_product(a, alpha=0.5, terms=((2.0, d), (-1.5, e)), diagonal=3.0, dtype=torch.float32)
    want = 0.5 * a.double() @ a.double().mT + 2 * d.double() - 1.5 * e.double()
    want += 3.0 * torch.eye(m, device="cuda", dtype=torch.float64)
    assert torch.equal(got, got.mT)
    assert (got - want).norm() <= 5e-6 * want.norm()  # the matrix unit's float32 sums are cut, not rounded
    again = symmetric_product(a, alpha=0.5, terms=((2.0, d), (-1.5, e)), diagonal=3.0, dtype=torch.float32)
    assert torch.equal(got, again)


@pytest.mark.parametrize("m", [136, 512])
def test_products_of_commuting_matrices_go_into_the_tensor_they_are_given(m: int) -> None:
    g = mirrored(draw(5, m, m)) / m**0.5
    a, b = (0.3 * g + g @ g).half(), (g - 0.2 * g @ g).half()
    out = torch.empty(5, m, m, device="cuda", dtype=torch.float16)
    assert symmetric_product(a, b, out=out) is out
    assert torch.equal(out, out.mT)
    want = a.double() @ b.double()
    assert (out - want).norm() <= 2e-3 * want.norm()
    # a term may be overwritten: no other tile reads it
    term = b.clone()
    symmetric_product(a, b, terms=((0.5, term),), out=term)
    assert (term - want - 0.5 * b.double()).norm() <= 2e-3 * want.norm()


SPECTRA: dict[str, Any] = {
    "gaussian": None,
    "six decades": lambda k: torch.logspace(0, -6, k),
    "power law": lambda k: torch.arange(1, k + 1) ** -1.0,
    "low rank": lambda k: (torch.arange(k) < 8).double(),
}


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
@pytest.mark.parametrize("shape", [(512, 512), (512, 2048), (1536, 512)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_gram_form_is_no_further_from_float64_than_bfloat16_products(
    method: Any, shape: tuple[int, int], spectrum: str
) -> None:
    m, n = shape
    k = min(shape)
    x = torch.randn(m, n, device="cuda", dtype=torch.float64)
    if SPECTRA[spectrum] is not None:
        s = SPECTRA[spectrum](k).to("cuda", torch.float64)
        left, right = (torch.linalg.qr(torch.randn(side, k, device="cuda", dtype=torch.float64))[0] for side in shape)
        x = (left * s) @ right.mT
    stack = x.float().expand(40, m, n).contiguous()
    assert symmetric.no_kernel(stack.half() if m <= n else stack.half().mT) is None
    want = Spectral(method).primal(x)
    errors = {}
    for form in ("direct", "gram"):
        got = Spectral(method, precision="bfloat16", form=form).primal(stack)  # type: ignore[arg-type]
        assert torch.equal(got[0], got[-1])
        errors[form] = torch.linalg.matrix_norm(got[0].double() - want, 2).item()
    assert errors["gram"] <= max(1.1 * errors["direct"], 0.1)


def walk(make: Any, steps: int = 4, dtype: torch.dtype = torch.float32, aligned: bool = True) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((512, 768), (768, 512), (512, 512), (512, 768)) if aligned else ((515, 770), (770, 515))
    parameters = [torch.nn.Parameter(draw(*s, dtype=dtype)) for s in shapes for _ in range(16)]
    optimizer = make(parameters)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return [p.detach() for p in parameters]


def group(parameters: list[Any]) -> Any:
    return [{"params": parameters, "rule": "muon"}]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_steps_as_torch_does_to_the_rounding_of_16_bit_products(dtype: torch.dtype, aligned: bool) -> None:
    options: Any = {"lr": 2.0, "weight_decay": 0.1}  # steps that 16-bit parameters notice
    start = walk(lambda ps: torch.optim.SGD(ps, lr=0.0), 1, dtype, aligned)
    theirs = walk(lambda ps: torch.optim.Muon(ps, adjust_lr_fn="original", **options), 4, dtype, aligned)
    bound = 0.02 if dtype == torch.float32 else 0.05  # torch's momentum of bfloat16 parameters is bfloat16
    for extra in ({}, {"form": "direct"}, {"foreach": False}, {"capturable": True}):
        ours = walk(lambda ps: optim.Muon(group(ps), scale="original", **options, **extra), 4, dtype, aligned)  # noqa: B023
        for a, b, s in zip(ours, theirs, start, strict=True):
            assert (a.float() - b.float()).norm() <= bound * (b.float() - s.float()).norm(), extra


def test_stacks_are_normalised_in_float16() -> None:
    for x in (draw(3, 264, 520, dtype=torch.bfloat16), draw(3, 520, 264, dtype=torch.bfloat16).mT):
        x[0] = 0.0
        y = normalised(x, 1.0, 0.0, 1e-7)
        want = x.double() / x.double().flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-7)
        assert y.dtype == torch.float16 and y.stride() == x.stride()
        assert (y - want).abs().max() <= 1e-3 * want.abs().max()
        assert torch.equal(y, normalised(x, 1.0, 0.0, 1e-7))


def test_steps_repeat_bit_for_bit_and_a_recorded_step_equals_a_launched_one() -> None:
    make = lambda ps: optim.Muon(group(ps), lr=0.02)  # noqa: E731
    first, second = walk(make, 5), walk(make, 5)
    assert all(map(torch.equal, first, second))
    launched = walk(lambda ps: optim.Muon(group(ps), lr=torch.tensor(0.02, device="cuda"), capturable=True), 5)
    for a, b in zip(first, launched, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_the_norms_of_stacks_come_from_the_kernel_that_writes_them(rule: str, monkeypatch: Any) -> None:
    from axes.kernels.products import normalise
    from axes.programs import fused

    size, _ = fused._PLAIN  # entries of a chunk
    shapes = ((512, 768), (768, 512), (520, 784), (512, 768))  # rectangles; the last chunk of the third is a part
    make: Any = {"muon": optim.Muon, "normuon": optim.NorMuon}[rule]

    def steps() -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        start = [draw(*shape) for shape in shapes for _ in range(4)]
        parameters = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = make([{"params": parameters, "rule": rule}], lr=0.1)
        for _ in range(4):  # launched, recorded, replayed
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        (batch,) = [b for *_, made in optimizer._batches.made.values() for b in made]
        return [p.detach() - x for p, x in zip(parameters, start, strict=True)], batch

    read = Counted(normalise._squares)
    monkeypatch.setattr(normalise, "_squares", read)
    ours, batch = steps()
    again, _ = steps()
    assert not read.launches and all(map(torch.equal, ours, again))
    (product,) = (product for *_, products in batch.around.steps for product in products)
    assert product.squares is not None
    for sums, x in zip(product.squares, product.stacks, strict=True):
        assert sums.shape == (len(x), -(-x[0].numel() // size))
        entries = torch.nn.functional.pad(x.double().flatten(1), (0, -x[0].numel() % size))
        torch.testing.assert_close(sums.double(), entries.unflatten(1, (-1, size)).square().sum(2), rtol=1e-6, atol=0)
    known = Spectral.primals

    def without(self: Spectral, stacks: Any, contexts: Any, dtype: Any, squares: Any, *more: Any, **given: Any) -> Any:
        return known(self, stacks, contexts, dtype, None, *more, **given)

    monkeypatch.setattr(Spectral, "primals", without)
    theirs, _ = steps()
    assert read.launches
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm()
