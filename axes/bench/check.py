"""Whether what is timed is right: outputs and gradients at the timed inputs against the recurrence in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from axes.bench.results import said
from axes.bench.rules import Run, SequenceRule, Signal, read

# relative error of a whole tensor; measured: float32 1e-6 to 4e-5, float16 1e-3, bfloat16 4e-3 to 1e-2
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 2.5e-2}
_TOKENS, _HEADS = 1000, 2


@final
@dataclass(frozen=True)
class Comparison:
    """Worst relative error of output and gradients, which tensor it is, and whether it is within the dtype's bound."""

    error: float
    worst: str
    right: bool
    reason: str = ""


def check(rule: SequenceRule, run: Run, signal: Signal, backward: bool) -> Comparison:
    """Compare at the timed inputs: the last sequence, its first tokens, two heads. What a causal rule gives there
    depends on nothing else, and the gradient of a loss that reads only there is zero elsewhere."""
    tokens = min(_TOKENS, signal["q"].shape[1])
    place = (slice(-1, None), slice(tokens), slice(-_HEADS, None))
    exact = {n: x[place].double() for n, x in signal.items()}
    bound = BOUNDS[signal["v"].dtype]
    weight = torch.randn(read(exact), device=exact["v"].device, dtype=torch.float64)
    try:
        got = _outputs(run, signal, place, weight, backward)
    except Exception as error:
        return Comparison(float("nan"), "all", False, said(error))
    want = _outputs(rule.ours(None), exact, (slice(None),) * 3, weight, backward)
    return compare(got, want, bound)


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor], bound: float) -> Comparison:
    """The worst of tensors by name."""
    errors = {n: _relative(got[n], want[n]) for n in want}
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    right = errors[worst] <= bound  # false for NaN
    reason = "" if right else f"{worst} is off by {errors[worst]:.1e} > {bound:.1e}"
    return Comparison(errors[worst], worst, right, reason)


def _outputs(run: Run, signal: Signal, place: tuple[slice, ...], weight: Tensor, backward: bool) -> dict[str, Tensor]:
    if not backward:
        with torch.no_grad():
            return {"o": run(signal)[0][place]}
    leaves = {n: x.detach().requires_grad_() for n, x in signal.items()}
    out, _ = run(leaves)
    do = torch.zeros_like(out)
    do[place] = weight.to(out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), do)
    found = {f"d{n}": g[place] for n, g in zip(leaves, gradients, strict=True)}
    return {"o": out.detach()[place], **found}


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-3 * b.numel() ** 0.5))
