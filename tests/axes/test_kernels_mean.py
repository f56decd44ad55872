"""Reads over a mass by Hopper's kernel of rule "write", its warps threads of plain torch, against the recurrence in
float64; numbers of tokens, which a kernel of Triton makes, are made here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes import kernels
from axes.kernels import contain
from axes.kernels.common import layout
from axes.kernels.scalar import hopper_write, mean
from tests import warps

HALF = torch.bfloat16
NAMES = ("q", "k", "v", "beta", "g", "start", "norm")


def reciprocal(mass: Tensor, floor: float) -> Tensor:
    c = mass.abs().clamp(min=floor) if floor > 0 else mass
    return torch.where(c == 0, 0.0, 1.0 / torch.where(c == 0, 1.0, c))


def parted(strength: Tensor) -> tuple[Tensor, Tensor]:
    digits, power = torch.frexp(strength)
    return torch.where(strength == 0, 1.0, 2 * digits), torch.where(strength == 0, 0.0, torch.exp2(power.float() - 1))


def put(lines: list[Tensor | None], chunks: int) -> Tensor:
    """Numbers of tokens (B, T, HV) as rows of chunks (B, HV, chunks, rows, 64), zeros behind the last token."""
    (some,) = {x.shape for x in lines if x is not None}
    made = torch.zeros(some[0], some[2], len(lines), 64 * chunks)
    for row, line in enumerate(lines):
        if line is not None:
            made[:, :, row, : some[1]] = line.mT
    return made.unflatten(-1, (chunks, 64)).movedim(-2, 2).contiguous()


def numbers(beta: Tensor | None, g: Tensor | None, like: Tensor, s: int, length: int, n: int) -> Tensor:
    log = torch.zeros(like.shape[:3]) if g is None else g
    made = put([log, torch.zeros_like(log), torch.zeros_like(log), beta], n)
    run, total = made[:, :, :, 0].cumsum(-1), made[:, :, :, 0].sum(-1, keepdim=True)
    made[:, :, :, 0], made[:, :, :, 1], made[:, :, :, 2] = run.exp(), (total - run).exp(), run / 0.6931471805599453
    return made


class _NumbersBack:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(beta, g, mass, o, do, made, t, n, hv, *, FLOOR, GATED, WEIGHTED, **_):  # type: ignore[no-untyped-def]
            by = reciprocal(mass, FLOOR)
            change = -(do.float() * o.float()).sum(-1) * by
            if FLOOR > 0:
                change = torch.where(mass.abs() < FLOOR, 0.0, change * mass.sign())
            digits, power = parted(beta) if WEIGHTED else (None, None)
            first = numbers(beta if WEIGHTED else None, g if GATED else None, do, 1, t, n)
            made.copy_(torch.cat((first, put([by, change, digits, power], n)), 3))

        return run


class _Mix:
    def __init__(self) -> None:
        root = Path(kernels.__file__).parent
        files = [root / name for name in ("common/warpgroup.py", "scalar/hopper_norm.py", "scalar/hopper_write.py")]
        self.kernel = warps.module(*files, reciprocal=reciprocal, parted=parted)._mix

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **options: warps.launch(self.kernel, grid, *given, **options)


@contextmanager
def in_torch() -> Iterator[None]:
    with (
        patch.object(hopper_write, "_mix", _Mix()), patch.object(hopper_write, "numbers", numbers),
        patch.object(mean, "_numbers_back", _NumbersBack()), patch.object(mean, "on_device", lambda _: nullcontext()),
        patch.object(layout, "interpreted", lambda: True), patch.object(contain, "PICKED", False),
    ):  # fmt: skip
        yield


def loop(q, k, v, beta, g, start, norm, floor):  # type: ignore[no-untyped-def]
    """The recurrence, token by token."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, n, outs = start, norm, []
    for t in range(v.shape[1]):
        kept = torch.ones_like(v[:, t, :, :1]) if g is None else g[:, t, :, None].exp()
        strength = torch.ones_like(kept) if beta is None else beta[:, t, :, None]
        n = kept * n + strength * k[:, t]
        state = kept[..., None] * state + (strength * v[:, t])[..., None] * k[:, t, :, None, :]
        mass = (n * q[:, t]).sum(-1, keepdim=True)
        outs.append((state * q[:, t, :, None, :]).sum(-1) / (mass.abs().clamp(min=floor) if floor > 0 else mass))
    return torch.stack(outs, 1), state, n


CASES = {
    "gates and strengths, a floor": dict(d_k=64, d_v=64, length=150),
    "heads that share keys, no floor": dict(d_k=64, d_v=64, length=70, heads=2, floor=0.0),
    "wide": dict(d_k=128, d_v=128, length=66),
    "strengths alone": dict(d_k=64, d_v=128, length=70, gated=False),
    "gates alone": dict(d_k=64, d_v=64, length=70, strong=False, dtype=torch.float16),
    "neither": dict(d_k=64, d_v=64, length=1, gated=False, strong=False, floor=0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_recurrence(case: str) -> None:
    given: dict[str, Any] = dict(heads=1, gated=True, strong=True, floor=1.0, dtype=HALF) | CASES[case]
    d_k, d_v, length, heads, floor = (given[n] for n in ("d_k", "d_v", "length", "heads", "floor"))
    torch.manual_seed(0)
    lead, wide = (1, length, 1), (1, length, heads)
    q, k, norm = torch.randn(*lead, d_k) / d_k**0.5, torch.randn(*lead, d_k) / d_k**0.5, torch.randn(1, heads, d_k)
    if floor == 0.0:  # masses away from zero
        q, k, norm = (x.abs() for x in (q, k, norm))
    beta = torch.rand(wide) * (torch.rand(wide) > 0.1) if given["strong"] else None
    g = torch.where(torch.rand(wide) < 0.05, -60.0, -torch.rand(wide) / 8) if given["gated"] else None
    halves = [x.to(given["dtype"]) for x in (q, k, torch.randn(*wide, d_v))]
    tensors = dict(zip(NAMES, (*halves, beta, g, torch.randn(1, heads, d_v, d_k), norm), strict=True))
    hears = torch.randn(*wide, d_v).to(given["dtype"]), torch.randn(1, heads, d_v, d_k), torch.randn(1, heads, d_k)

    def all_of(rule: Callable[..., Any], double: bool) -> dict[str, Tensor]:
        leaves = {n: None if x is None else x.to(torch.float64 if double else x.dtype) for n, x in tensors.items()}
        leaves = {n: None if x is None else x.detach().requires_grad_() for n, x in leaves.items()}
        there = {n: x for n, x in leaves.items() if x is not None}
        out = rule(*leaves.values(), floor)
        grads = torch.autograd.grad(out, list(there.values()), [h.to(o.dtype) for h, o in zip(hears, out, strict=True)])
        return dict(zip(("o", "state", "n", *(f"d{n}" for n in there)), (*out, *grads), strict=True))

    with in_torch():
        found = all_of(mean.mean_chain, False)
    bound = 8e-3 if given["dtype"] == HALF else 1e-3
    for name, want in all_of(loop, True).items():
        error = (found[name].double() - want).norm() / max(want.norm(), 1e-2 * want.numel() ** 0.5)
        assert found[name].shape == want.shape and error < bound, (name, error)
        assert name != "n" or error < 3e-5  # what masses are made of is carried in float32


def test_it_is_for_dense_tokens_of_a_hopper_gpu() -> None:
    q = torch.randn(1, 8, 1, 64, dtype=HALF)
    assert not mean.fits(q, q, None)
    with patch.object(hopper_write, "fits", lambda *_: True):
        assert mean.fits(q, q, None) and not mean.fits(q, q, torch.tensor([0, 8]))
        many = q[:, :1].expand(1, 10**6, 1, 64)
        assert not mean.fits(many, many, None)  # cut into segments
