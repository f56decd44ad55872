"""A stream that is added to and read through RMSNorm, on a GPU: against float64, and the same bits at every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axes.kernels.rows.norm import add_norm
from axes.models import Architecture, LanguageModel, language_model

F, B = torch.float32, torch.bfloat16
CLOSE = {F: 2e-6, B: 8e-3}


def problem(shape: tuple[int, ...], stream: torch.dtype, out: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    h, y = torch.randn(shape, device="cuda").to(stream), torch.randn(shape, device="cuda").to(out)
    return tuple(x.requires_grad_() for x in (h, y, torch.rand(shape[-1], device="cuda") + 0.5))


@pytest.mark.parametrize("shape", [(4, 4096, 768), (33, 2048), (7, 5), (3, 8192)])
@pytest.mark.parametrize(("stream", "out"), [(F, F), (F, B), (B, B)])
@pytest.mark.parametrize("added", [True, False])
def test_equals_float64_and_repeats_its_bits(
    shape: tuple[int, ...], stream: torch.dtype, out: torch.dtype, added: bool
) -> None:
    h, y, w = problem(shape, stream, out)
    given = (h, y, w) if added else (h, w)
    p, q = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda").to(out)
    wide = [x.detach().double().requires_grad_() for x in given]
    total = wide[0] + wide[1] if added else wide[0] * 1.0
    if stream == B:
        total = total + (total.detach().to(B).double() - total.detach())  # as it is rounded
    wanted = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide[-1]
    exact = torch.autograd.grad((wanted * q.double()).sum() + (total * p.double()).sum(), wide)
    runs = []
    for _ in range(2):
        after, x = add_norm(h, y if added else None, w, 1e-6, out)
        grads = torch.autograd.grad([after, x], given, [p.to(stream), q])
        runs.append([after, x, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for got, want in zip(runs[0], (total, wanted, *exact), strict=True):
        assert (got - want).norm() <= 2 * CLOSE[B if B in (stream, out) else F] * want.norm()


@pytest.mark.parametrize("depth", ["residual", "mhc"])
@pytest.mark.parametrize("dtype", ["autocast", "bfloat16"])
def test_a_model_is_the_same_by_torch(dtype: str, depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    own = F if dtype == "autocast" else B
    model = LanguageModel(Architecture(layers=2, width=256, heads=2, depth=depth), device="cuda", dtype=own)
    windows = torch.randint(256, (2, 129), device="cuda")
    found = []
    for by_torch in (False, True):
        if by_torch:
            monkeypatch.setattr(language_model, "no_norm_by_kernel", lambda *_: "asked not to")
        with torch.autocast("cuda", B, enabled=dtype == "autocast"):
            loss = model.loss(windows)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for got, want in zip(*found, strict=True):
        assert (got - want).float().norm() <= 3e-2 * want.float().norm()
