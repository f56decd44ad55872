"""How much memory torch moves around the kernels of a rule: what `docs/kernels.md` says of it, counted on fake tensors.

The unit is the tensor of values. An operation that is no view counts what it reads and writes; what is expanded counts
once. Kernels are operators that fake tensors do not run.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.bench.rules import Shape, find, read
from axes.kernels.common import versions
from axes.linalg import formulas

SHAPE = Shape(8, 4096, 16, 128)
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
ROW = re.compile(r"^\| ([a-z0-9 ]+) \| (\d+\.\d) / (\d+\.\d) \|", re.M)
TABLE = PAGE.read_text().partition("**What torch moves around kernels.**")[2].partition("\n## ")[0]
SAID = {found[1]: (float(found[2]), float(found[3])) for found in ROW.finditer(TABLE)}
FREE = {"detach", "empty", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view"}
FREE |= {"zeros"}  # of what an operator keeps for its backward, which an eager call does not hear of
FILLS = {"zeros_like", "new_zeros", "new_ones", "ones_like"}


def moved(tensors: Any) -> int:
    """Bytes of tensors, without what repeats itself."""
    of = [x for x in pytree.tree_leaves(tensors) if isinstance(x, Tensor)]
    return sum(x.element_size() * math.prod(n for n, s in zip(x.shape, x.stride(), strict=True) if s) for x in of)


class Moved(TorchDispatchMode):
    """Bytes that operations of torch read and write."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        out = function(*args, **given)
        given.pop("out", None)
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        name = function._schema.name.removeprefix("aten::")
        if "::" not in name and not view and name not in FREE:
            self.total += moved(out) + (0 if name in FILLS else moved((args, given)))
        return out


@pytest.mark.parametrize("name", SAID)
def test_a_page_says_what_is_moved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "refusal", lambda device: None)
    monkeypatch.setattr("axes.kernels.common.layout.interpreted", lambda: True)  # fake tensors are on no device
    monkeypatch.setattr(formulas, "_PLAIN", (*formulas._PLAIN, FakeTensor))
    for kernels in ("hopper", "hopper_write"):
        monkeypatch.setattr(f"axes.kernels.scalar.{kernels}.hopper_refusal", lambda device: None)
    (rule,) = find((name,))
    run = rule.ours("triton")
    with FakeTensorMode(allow_non_fake_inputs=True):
        signal = rule.signal(SHAPE, torch.bfloat16, torch.device("cpu"))
        unit = signal["v"].select(3, 0) if signal["v"].ndim > 4 else signal["v"]
        with torch.no_grad(), Moved() as forward:
            run(signal)
        leaves = {n: x.detach().requires_grad_() for n, x in signal.items()}
        do = torch.empty(read(signal), dtype=torch.bfloat16)
        with Moved() as both:
            out, _ = run(leaves)
            torch.autograd.grad(out, list(leaves.values()), do)
    passes = tuple(seen.total / (unit.numel() * unit.element_size()) for seen in (forward, both))
    assert passes == pytest.approx(SAID[name], abs=0.06), passes


def test_the_page_names_them() -> None:
    assert {"delta product", "comba", "rwkv6", "hgrn2", "mlstm", "mamba", "s5", "gated delta"} <= set(SAID)
