"""Reads and writes of residual streams as sums of products, with gradients: what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axes.kernels.streams.mix import mix_read, mix_write, mix_write_read


def read(x: Tensor, r: Tensor) -> Tensor:
    return torch.einsum("...j,...jd->...d", r.expand(*x.shape[:-1]), x)


def write(x: Tensor, y: Tensor, w: Tensor, m: Tensor | None = None) -> Tensor:
    kept = x if m is None else torch.einsum("...ij,...jd->...id", m.expand(*x.shape[:-1], m.shape[-1]), x)
    return kept + w[..., None] * y[..., None, :]


def both(x: Tensor, y: Tensor, w: Tensor, r: Tensor, m: Tensor | None = None) -> tuple[Tensor, Tensor]:
    made = write(x, y, w, m)
    return made, read(made, r)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {  # kernel, meaning, what they take
    "read": (mix_read, read, "xr"),
    "write": (mix_write, write, "xywm"),
    "write unmixed": (mix_write, write, "xyw"),
    "both": (mix_write_read, both, "xywrm"),
    "both unmixed": (mix_write_read, both, "xywr"),
}


def draw(
    name: str, n: int, d: int, lead: tuple[int, ...], each: bool, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Tensors of a call. each: coefficients of every token, float32 whatever the dtype."""
    tokens = lead if each else ()
    shapes = {"x": (*lead, n, d), "y": (*lead, d), "w": (*tokens, n), "r": (*tokens, n), "m": (*tokens, n, n)}
    kinds = {"x": dtype, "y": dtype}
    return {i: torch.randn(shapes[i], device=device).to(kinds.get(i, torch.float32)) for i in CALLS[name][2]}


def gradients(
    function: Callable[..., Any], given: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Outputs and gradients."""
    given = [x.detach().requires_grad_() for x in given]
    outs = function(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    pushes = [d.to(o.dtype) for d, o in zip(directions, outs, strict=True)]
    return *(o.detach() for o in outs), *torch.autograd.grad(outs, given, pushes)


def errors(name: str, given: dict[str, Tensor]) -> list[float]:
    """Of outputs and gradients of a kernel against float64, relative to whole tensors."""
    kernel, meaning, _ = CALLS[name]
    x = given["x"]
    shapes = [x[..., 0, :].shape] if name == "read" else [x.shape, x[..., 0, :].shape][: 1 + ("both" in name)]
    directions = [torch.randn(s, device=x.device).to(x.dtype) for s in shapes]
    got = gradients(kernel, list(given.values()), directions)
    want = gradients(meaning, [v.double() for v in given.values()], directions)
    found = []
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        found.append(((a - b).norm() / b.norm().clamp(min=0.3 * max(b.numel(), 1) ** 0.5)).item())
    return found


def compare(name: str, given: dict[str, Tensor], bound: float) -> None:
    found = errors(name, given)
    assert max(found) < bound, (name, {n: tuple(x.shape) for n, x in given.items()}, found)
