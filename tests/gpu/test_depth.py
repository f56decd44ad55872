"""Every depth mixer on a GPU against float64: sizes, dtypes, extremes, poisoned memory, bits, autocast, one graph."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.depth_cases import CHECKS, COMPILED, NAMES  # noqa: E402

CASES = [(name, check) for name in NAMES for check in CHECKS if check != "compiles_as_one_graph" or name in COMPILED]


@pytest.mark.parametrize(("name", "check"), CASES, ids=str)
def test_a_mixer(name: str, check: str) -> None:
    CHECKS[check](name, torch.device("cuda"))
