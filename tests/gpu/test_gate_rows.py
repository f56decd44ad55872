"""Chains with gates on rows, by products, on a GPU: written rows and averages against a float64 loop over tokens, with
the same bits again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.diagonal.rows import rows_chain  # noqa: E402

BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, start: Tensor, average: bool) -> tuple[Tensor, Tensor]:
    """The recurrence."""
    v, state, outs = -torch.expm1(g) * v if average else v, start, []
    kept = g.clamp(min=-100).exp()
    for t in range(v.shape[1]):
        state = state * kept[:, t, ..., None] + v[:, t, ..., None] * k[:, t, :, None]
        outs.append((state @ q[:, t, ..., None])[..., 0])
    return torch.stack(outs, 1), state


def draw(length: int, d_k: int, d_v: int, dtype: torch.dtype, kind: str, b: int = 2, h: int = 3) -> list[Tensor]:
    """q, k, v, g, start."""
    torch.manual_seed(length + d_k)
    q, k = (torch.nn.functional.normalize(torch.randn(b, length, h, d_k, device="cuda"), dim=-1) for _ in range(2))
    v, z = (torch.randn(b, length, h, d_v, device="cuda") for _ in range(2))
    g = torch.nn.functional.logsigmoid(z) / 16
    if kind == "mixed":  # chunks of both kinds side by side
        g = torch.where((torch.arange(length, device="cuda") // 64 % 2 == 0)[:, None, None], g, 40 * g)
    if kind == "closed":
        g = torch.where(torch.rand_like(z) < 0.2, -1e3, -20 * torch.rand_like(z))
    return [*(x.to(dtype) for x in (q, k, v)), g, torch.randn(b, h, d_v, d_k, device="cuda") / d_k**0.5]


def results(given: list[Tensor], wide: bool, average: bool) -> list[Tensor]:
    """o, the last state and all gradients."""
    leaves = [(x.double() if wide else x).detach().clone().requires_grad_() for x in given]
    o, last = loop(*leaves, average) if wide else rows_chain(*leaves, average=average)
    torch.manual_seed(1)
    along = [torch.randn(x.shape, device="cuda").to(x.dtype) for x in (o.to(given[0].dtype), last.float())]
    grads = torch.autograd.grad((o, last), leaves, [x.to(y.dtype) for x, y in zip(along, (o, last), strict=True)])
    return [o.detach(), last.detach(), *grads]


@pytest.mark.parametrize("average", (False, True), ids=("written", "averaged"))
@pytest.mark.parametrize("kind", ("mild", "mixed", "closed"))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_equals_the_recurrence(dtype: torch.dtype, kind: str, average: bool) -> None:
    for length, d_k, d_v in ((1, 64, 64), (150, 128, 64), (200, 64, 128), (130, 128, 128)):
        given = draw(length, d_k, d_v, dtype, kind)
        for name, got, want in zip(
            ("o", "final", "dq", "dk", "dv", "dg", "dstart"),
            results(given, False, average), results(given, True, average), strict=True,
        ):  # fmt: skip
            error = ((got.double() - want).norm() / max(want.norm().item(), 1e-3 * want.numel() ** 0.5)).item()
            print(f"{name} {error:.1e}", end="  ")
            assert error < 2 * BOUNDS[dtype], (length, d_k, d_v, name, error)


def test_a_full_chip_repeats_and_writes_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw(1500, 128, 64, torch.bfloat16, "mixed", b=8, h=16)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `empty` returns with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        with torch.no_grad():
            first, last = rows_chain(*given, average=True)
            assert first.isfinite().all() and last.isfinite().all()
            for _ in range(4):
                again, end = rows_chain(*given, average=True)
                assert torch.equal(first, again) and torch.equal(last, end)
    finally:
        torch.use_deterministic_algorithms(False)
