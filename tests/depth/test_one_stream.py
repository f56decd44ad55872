"""One stream by torch's own addition and norm against the tuple in float64, and who does it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.depth import DepthMixer, PostNorm, PreNorm, Residual, UniversalTransformer
from axes.errors import ShapeError
from axes.routes.choice import NoImplementation, Target

ADDED = (Residual, PreNorm, PostNorm)


def results(mix: DepthMixer, given: list[Tensor]) -> list[Tensor]:
    """What is seen, written and left, and gradients."""
    x, y = (v.detach().requires_grad_() for v in given)
    seen, coefficients = mix.read(x)
    after = mix.write(x, y * seen, coefficients)
    assert isinstance(after, Tensor)
    outs = (seen, after, mix.reduce(after))
    total = sum((o * torch.arange(o.numel()).view(o.shape).cos().to(o)).sum() for o in outs)
    return [*outs, *torch.autograd.grad(total, (x, y))]  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", ADDED)
@pytest.mark.parametrize(("dtype", "bound"), ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)))
def test_an_addition_and_a_norm_are_the_tuple(cls: type[Any], dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    mix = cls(24)
    wide = copy.deepcopy(mix).double()
    mix.implementation, wide.implementation = "torch", "reference"
    given = [torch.randn(2, 3, *s).to(dtype) for s in ((1, 24), (24,))]
    for got, want in zip(results(mix, given), results(wide, [x.double() for x in given]), strict=True):
        assert got.shape == want.shape and got.dtype == dtype
        assert (got - want).norm() < bound * want.norm()


def test_they_are_picked_on_a_gpu_and_compile() -> None:
    for cls in ADDED:
        mix = cls(8)
        assert mix.plans(Target.of("cuda:sm_90"))[0].choice[:2] == ("chain", "torch")
        assert "one addition" in mix.plans(Target.of("cpu"), torch.float64)[0].choice.reason
    mix = PostNorm(8)
    mix.implementation = "torch"
    given = [torch.randn(2, 1, 8), torch.randn(2, 8)]

    def sublayer(x: Tensor, y: Tensor) -> Any:
        seen, coefficients = mix.read(x)
        return mix.write(x, y * seen, coefficients)

    torch.testing.assert_close(torch.compile(sublayer, fullgraph=True, backend="eager")(*given), sublayer(*given))


def test_what_is_none_is_not_taken_for_one() -> None:
    other = UniversalTransformer(8)
    other.implementation = "torch"
    with pytest.raises(NoImplementation, match="no torch form"):
        other.read(other.expand(torch.zeros(1, 8)))
    mix = Residual(8)
    mix.implementation = "torch"
    with pytest.raises(ShapeError, match="must agree"):
        mix.write(torch.zeros(2, 1, 8), torch.zeros(3, 8), mix.read(torch.zeros(2, 1, 8))[1])
