"""The checks of tests/gpu/test_depth.py on a CPU, a few mixers, and that they find what is wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor

from axes.bench.depth import Size
from axes.core.geometry import Birkhoff
from axes.depth import DepthMixer
from tests.depth_cases import CHECKS, case, failures, in_every_size_and_dtype, result, same

CPU = torch.device("cpu")
QUICK = [check for check in CHECKS if check != "compiles_as_one_graph"]


@pytest.mark.parametrize("check", QUICK)
@pytest.mark.parametrize("name", ("pre-norm", "mhc", "attention-residuals"))
def test_on_a_cpu(name: str, check: str) -> None:
    CHECKS[check](name, CPU)


def test_a_rounded_matrix_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Birkhoff.primal

    def rounded(self: Birkhoff, theta: Tensor, *context: object) -> Tensor:
        found = exact(self, theta)
        return found if theta.dtype is torch.float64 else found.bfloat16().float()

    monkeypatch.setattr(Birkhoff, "primal", rounded)
    with pytest.raises(AssertionError, match="is off by"):
        in_every_size_and_dtype("mhc", CPU)


def test_a_gradient_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = DepthMixer.write

    def lost(self: DepthMixer, x: Any, y: Tensor, coefficients: Any) -> Any:
        return write(self, x, y if y.dtype is torch.float64 else y.detach(), coefficients)

    monkeypatch.setattr(DepthMixer, "write", lost)
    found = next(failures(CPU, ("residual",)))
    assert "in_every_size_and_dtype" in found and "dy" in found


def test_other_bits_are_found() -> None:
    one = case("ihc", Size(5, 8, 3), torch.float32, CPU)
    two = case("ihc", Size(5, 8, 3), torch.float32, CPU)
    same(result(*one), result(*two))
    with pytest.raises(AssertionError, match="differs"):
        same(result(*one), result(two[0], two[1] * (1 + 1e-6), *two[2:]))
