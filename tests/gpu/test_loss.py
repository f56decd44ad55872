"""The cross-entropy of a linear head by its kernel, against float64, at the sizes of vocabularies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.models import linear_cross_entropy, loss  # noqa: E402

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("n", "d", "v"), ((1, 16, 1), (129, 64, 255), (1000, 96, 4097), (2048, 128, 32000)))
@pytest.mark.parametrize("parts", (1, 3))
def test_equals_float64_and_repeats(
    dtype: torch.dtype, n: int, d: int, v: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(loss, "_ENTRIES", max(v, n * v // parts))
    generator = torch.Generator("cuda").manual_seed(n)
    x, w = (torch.randn(*s, generator=generator, device="cuda").to(dtype) for s in ((n, d), (v, d)))
    w = w / d**0.5
    y = torch.randint(v, (n,), generator=generator, device="cuda")
    y[n // 2 :: 7] = -100
    y[0] = 0
    wide = [z.double().requires_grad_() for z in (x, w)]
    wanted = F.cross_entropy(wide[0] @ wide[1].mT, y)
    exact = (wanted.detach(), *torch.autograd.grad(wanted, wide))
    x, w = (z.detach().requires_grad_() for z in (x, w))
    made = []
    for _ in range(2):
        got = linear_cross_entropy(x, w, y, implementation="triton")
        made.append((got.detach(), *torch.autograd.grad(got, (x, w))))
    for one, other, reference in zip(*made, exact, strict=True):
        assert torch.equal(one, other)
        assert (one - reference).norm() <= CLOSE[dtype] * reference.norm().clamp_min(1e-6)


def test_no_more_than_a_part_of_the_logits_is_in_memory() -> None:
    n, d, v = 32768, 256, 32000
    x, w = (torch.randn(*s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in ((n, d), (v, d)))
    y = torch.randint(v, (n,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, y).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.5 * 2 * n * v  # half of all logits in bfloat16
