"""The cross-entropy of a linear head: against torch's of all logits, in parts, compiled, by the kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from axes.errors import AxesError, ShapeError
from axes.models import Architecture, LanguageModel, linear_cross_entropy, loss
from tests.interpreter import interpret

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def problem(n: int, d: int, v: int, dtype: torch.dtype, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + d + v)
    x, w = (torch.randn(*size, generator=generator).to(dtype).requires_grad_() for size in ((n, d), (v, d)))
    y = torch.randint(v, (n,), generator=generator)
    y[:ignored] = -100
    return x, w, y


def exact(x: Tensor, w: Tensor, y: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    x, w = (z.detach().double().requires_grad_() for z in (x, w))
    made = F.cross_entropy(x @ w.mT, y)
    return made.detach(), *torch.autograd.grad(scale * made, (x, w))


@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 40), st.integers(0, 4), st.integers(1, 200),
    st.sampled_from(list(TOLERANCE)),
)  # fmt: skip
def test_equals_torch_in_parts_too(n: int, d: int, v: int, ignored: int, entries: int, dtype: torch.dtype) -> None:
    x, w, y = problem(n, d, v, dtype, min(ignored, n - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_ENTRIES", entries)
        made = linear_cross_entropy(x, w, y)
        grads = torch.autograd.grad(3.0 * made, (x, w))
    for got, wanted in zip((made, *grads), exact(x, w, y, 3.0), strict=True):
        assert torch.allclose(got.double(), wanted, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])
    assert all(g.dtype == dtype for g in grads)


def test_a_batch_without_classes_loses_nothing() -> None:
    x, w, y = problem(3, 4, 5, torch.float64, ignored=3)
    made = linear_cross_entropy(x, w, y)
    assert made.item() == 0 and not torch.autograd.grad(made, x)[0].any()


def test_only_what_is_asked_for_is_differentiated() -> None:
    x, w, y = problem(6, 4, 5, torch.float64)
    made = linear_cross_entropy(x, w.detach(), y)
    assert torch.allclose(torch.autograd.grad(made, x)[0], exact(x, w, y)[1])
    with torch.no_grad():
        assert linear_cross_entropy(x, w, y) == made and not linear_cross_entropy(x, w, y).requires_grad


def test_under_autocast_products_are_bfloat16_and_gradients_as_wide_as_the_weights() -> None:
    x, w, y = problem(64, 16, 40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = linear_cross_entropy(x.view(4, 16, 16), w, y.view(4, 16))
    assert made.dtype == torch.float32
    grads = torch.autograd.grad(made, (x, w))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]
    for got, wanted in zip((made, *grads), exact(x, w, y), strict=True):
        assert torch.allclose(got.double(), wanted, rtol=3e-2, atol=2e-3)


def test_a_scaled_loss_in_half_precision_keeps_small_gradients() -> None:
    """Of classes that never come: a probability divided by the number of tokens is below the smallest half."""
    x, w, y = problem(64, 8, 65536, torch.float16)
    y, scale = y % 10, 2.0**13  # as a gradient scaler has it
    with torch.no_grad():
        w.mul_(8**-0.5)
    got = torch.autograd.grad(linear_cross_entropy(x, w, y) * scale, w)[0][10:].double() / scale
    wanted = exact(x, w, y)[2][10:]
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiles_whole_and_for_every_length(backend: str) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True, backend=counter)
    for n in (6, 11, 9):
        x, w, y = problem(n, 4, 5, torch.float64)
        made = compiled(x, w, y)
        grads = torch.autograd.grad(made, (x, w))
        for got, wanted in zip((made, *grads), exact(x, w, y), strict=True):
            assert torch.allclose(got, wanted)
    assert counter.frame_count == 1


def test_the_models_loss_is_that_of_its_logits() -> None:
    torch.manual_seed(0)
    model = LanguageModel(Architecture(layers=1, width=16, heads=2, depth="residual"), dtype=torch.float64)
    windows = torch.randint(256, (2, 9))
    wanted = F.cross_entropy(model(windows[:, :-1])[0].flatten(0, 1), windows[:, 1:].flatten())
    made = model.loss(windows)
    assert torch.allclose(made, wanted)
    parameters = list(model.parameters())
    for got, want in zip(torch.autograd.grad(made, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        assert torch.allclose(got, want)
    with pytest.raises(ShapeError, match=r"\(B, T \+ 1\)"):
        model.loss(windows[:, :1])


def test_bad_input_is_explained() -> None:
    x, w, y = problem(3, 4, 5, torch.float32)
    with pytest.raises(ShapeError, match=r"\(3, 4\), \(5, 4\) and \(2,\)"):
        linear_cross_entropy(x, w, y[:2])
    with pytest.raises(ShapeError, match="integers"):
        linear_cross_entropy(x, w, y.float())
    with pytest.raises(AxesError, match="None, 'triton' or 'torch'"):
        linear_cross_entropy(x, w, y, implementation="cuda")
    with pytest.raises(AxesError, match="cannot run: "):
        linear_cross_entropy(x, w, y, implementation="triton")


KERNEL = """
import torch
import torch.nn.functional as F
from axes.kernels.rows.cross_entropy import cross_entropy
torch.manual_seed(0)
for v in (1, 5, 33, 5000, 16384, 20000):
    for dtype, close in ((torch.float32, 2e-6), (torch.float16, 3e-4)):
        z = torch.randn(6, v).mul(8).to(dtype)
        y = torch.randint(v, (6,))
        y[2] = -100
        wide = z.double().requires_grad_()
        losses = F.cross_entropy(wide, y, reduction="none")
        losses.sum().backward()
        made = z.clone()
        got = cross_entropy(made, y, True, -100)
        assert (got - losses).abs().max() <= 2e-6 * (1 + losses.abs().max()), (v, dtype)
        assert (made - wide.grad).abs().max() <= close, (v, dtype)
        assert torch.equal(cross_entropy(z.clone(), y, False, -100), got)
        y[1], y[4] = v, -1  # no classes: their losses are no numbers, and other rows are as they were
        made, again = z.clone(), torch.tensor([0, 2, 3, 5])
        assert torch.equal(cross_entropy(made, y, True, -100)[again], got[again])
        assert cross_entropy(z.clone(), y, True, -100)[[1, 4]].isnan().all()
        assert (made - wide.grad)[again].abs().max() <= close, (v, dtype)
"""


def test_the_kernel_in_the_interpreter() -> None:
    interpret(KERNEL)
