"""Derivatives by hand against torch's own operations, and against differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, normalize, rms_norm, silu

from axes.sequence import by_hand
from axes.sequence.by_hand import convolved, in_parts, normalised


def draw(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size))).requires_grad_()


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("width", "length"), [(1, 3), (2, 1), (4, 2), (4, 9)])
def test_a_convolution_of_a_cpu_is_torchs(
    width: int, length: int, biased: bool, activated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that are shorter than the convolution, or of several tokens; differentiated once and twice."""
    x, tail, weight = draw(2, length, 3), draw(2, width - 1, 3), draw(3, 1, width)
    bias = draw(3) if biased else None
    inputs = tuple(t for t in (x, tail, weight, bias) if t is not None)

    def run(*given: Tensor) -> Tensor:
        return convolved(*given[:3], given[3] if biased else None, activated)

    want = conv1d(torch.cat((tail, x), 1).mT, weight, bias, groups=3).mT
    want = silu(want) if activated else want
    expected = torch.autograd.grad((want * want).sum(), inputs)
    for rows in (1, 2, 4, 128):
        monkeypatch.setattr(by_hand, "_ROWS", rows)
        got = run(*inputs)
        torch.testing.assert_close(got, want)
        assert got.is_contiguous()
        torch.testing.assert_close(torch.autograd.grad((got * got).sum(), inputs), expected)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_norm_of_a_cpu_is_torchs(share: float) -> None:
    x = draw(2, 3, 5)
    want = normalize(x, dim=-1, eps=0.0) if share == 1.0 else rms_norm(x, (5,), eps=1e-3)
    torch.testing.assert_close(normalised(x, share, 0.0 if share == 1.0 else 1e-3), want)
    assert torch.autograd.gradcheck(lambda x: normalised(x, share, 1e-3), (x,))
    assert torch.autograd.gradgradcheck(lambda x: normalised(x, share, 1e-3), (x,))
    assert not normalised(torch.zeros(2, 3), 1.0, 1e-12).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_norm_of_16_bits_is_that_of_float32_rounded(dtype: torch.dtype) -> None:
    """What is short, as a first read is, has derivatives of eps^(-3/2), which float16 does not hold."""
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    x[0] *= 1e-4
    x[1, 0] = 0
    wide = x.to(dtype).float().requires_grad_()
    narrow = wide.detach().to(dtype).requires_grad_()
    for leaf in (wide, narrow):
        normalised(leaf, 0.2, 1e-5).float().sum().backward()
    assert narrow.grad is not None and wide.grad is not None
    assert torch.equal(narrow.grad, wide.grad.to(dtype))
    assert torch.equal(normalised(narrow, 0.2, 1e-5), normalised(wide, 0.2, 1e-5).to(dtype))


def test_second_derivatives_know_that_inputs_may_be_made_of_each_other() -> None:
    x = draw(1, 6, 3)

    def run(x: Tensor, function: object = convolved) -> Tensor:
        out: Tensor = function(x, x[:, :3], x[0, :4].mT[:, None], None, True)  # type: ignore[operator]
        return out

    first, second = (
        torch.autograd.grad(torch.autograd.grad(run(x, f).square().sum(), x, create_graph=True)[0].square().sum(), x)
        for f in (convolved, by_hand._convolved)
    )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transforms_and_half_precision_take_torchs_operations(dtype: torch.dtype) -> None:
    x, tail, weight = torch.randn(3, 2, 7, 4).to(dtype), torch.zeros(2, 3, 4).to(dtype), torch.randn(4, 1, 4).to(dtype)
    each = torch.func.vmap(lambda x: normalised(convolved(x, tail, weight, None, True), 1.0, 1e-6))(x)
    alone = torch.stack([normalised(convolved(y, tail, weight, None, True), 1.0, 1e-6) for y in x])
    torch.testing.assert_close(each, alone)
    forward = torch.func.jvp(lambda x: convolved(x, tail, weight, None), (x[0],), (x[1],))[1]
    torch.testing.assert_close(forward, convolved(x[1], tail, weight, None))


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["plain", "bias", "hook", "replaced"])
def test_parts_of_a_projection_are_what_the_module_makes(kind: str) -> None:
    """With its bias, its hooks, and a forward of its own, as adapters have."""
    projection = (_Doubled if kind == "replaced" else nn.Linear)(4, 6, bias=kind == "bias").double()
    if kind == "hook":
        projection.register_forward_hook(lambda module, given, made: made + 1)
    x = draw(2, 3, 4)
    made = in_parts(projection, x, (1, 3, 2))
    assert [part.shape[-1] for part in made] == [1, 3, 2]
    torch.testing.assert_close(torch.cat(tuple(made), -1), projection(x))
    given = (x, *projection.parameters())
    for got, want in zip(
        torch.autograd.grad(sum((part * part).sum() for part in made), given),  # type: ignore[arg-type]
        torch.autograd.grad(projection(x).square().sum(), given), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, want)
