"""A stream that is added to and read through RMSNorm: by the kernel, in a model, and where torch does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axes.errors import ShapeError
from axes.kernels.rows.norm import add_norm
from axes.models import Architecture, LanguageModel
from tests.host import no_launches
from tests.interpreter import interpret

KERNEL = """
import torch
from axes.kernels.rows import norm
from axes.kernels.rows.norm import add_norm
torch.manual_seed(0)
norm._PROGRAMS = 3  # each takes several blocks of rows
F, B, H = torch.float32, torch.bfloat16, torch.float16
for shape, stream, said, out, close in (
    ((2, 5, 7), F, F, F, 2e-6), ((9, 1000), F, B, B, 8e-3), ((1, 3, 64), B, B, B, 1.6e-2), ((2100, 3), F, H, H, 1e-3),
    ((4, 30), B, F, F, 8e-3),
):
    for passed, added in ((True, True), (False, True), (True, False), (False, False)):
        d = shape[-1]
        h, y = torch.randn(shape).to(stream), torch.randn(shape).to(said)
        w = torch.rand(d) + 0.5
        h, y, w = (t.requires_grad_() for t in (h, y, w))
        after, x = add_norm(h, y if added else None, w, 1e-6, out)
        assert after.dtype == stream and x.dtype == out
        wide = [t.detach().double().requires_grad_() for t in (h, y, w)]
        total = wide[0] + wide[1] if added else wide[0] * 1.0
        wanted = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide[2]
        p, q = torch.randn(shape), torch.randn(shape).to(out)
        loss = (x * q).sum().float() + ((after * p).sum().float() if passed else 0)
        exact = (wanted * q.double()).sum() + ((total * p.double()).sum() if passed else 0)
        for got, want in zip((after, x), (total, wanted)):
            assert (got - want).abs().max() <= close * want.abs().max(), (shape, out)
        grads = torch.autograd.grad(loss, (h, y, w), allow_unused=not added)
        exacts = torch.autograd.grad(exact, wide, allow_unused=not added)
        assert (grads[1] is None) == (not added)
        for name, got, want in zip("hyw", grads, exacts):
            if want is not None:
                assert (got - want).norm() <= 2 * close * want.norm(), (name, shape, out, passed, added)
"""


def test_the_kernel_equals_float64() -> None:
    interpret(KERNEL)


MODEL = """
import torch
from unittest.mock import patch
from axes.models import Architecture, LanguageModel
from axes.models import language_model
from axes.kernels.rows import norm
calls = []
add = norm.add_norm
norm.add_norm = lambda *a: calls.append(1) or add(*a)
torch.manual_seed(0)
model = LanguageModel(Architecture("softmax-attention", DEPTH, layers=2, width=16, heads=1, vocabulary=11))
windows = torch.randint(11, (2, 6))
made = model.loss(windows)
got = torch.autograd.grad(made, list(model.parameters()))
assert len(calls) == 5
with patch.object(language_model, "no_norm_by_kernel", lambda *_: "asked not to"):
    wanted = model.loss(windows)
    grads = torch.autograd.grad(wanted, list(model.parameters()))
assert len(calls) == 5
torch.testing.assert_close(made, wanted)
for a, b in zip(got, grads):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.parametrize("depth", ["residual", "mhc"])
def test_a_model_is_the_same_by_either(depth: str) -> None:
    interpret(f"DEPTH = {depth!r}" + MODEL)


def model(depth: str = "residual", dtype: torch.dtype = torch.float32, **more: Any) -> LanguageModel:
    return LanguageModel(Architecture("gated-delta-net", depth, layers=1, width=16, heads=1), dtype=dtype, **more)


def test_what_a_kernel_does_not_take_is_left_to_torch() -> None:
    x = torch.zeros(1, 4, 16)
    made = model()
    assert "not a GPU" in str(made.no_norms_by_kernel(x))
    with no_launches():
        assert made.no_norms_by_kernel(x) is None
        assert made.no_norms_by_kernel(x[:, :0]) is not None
        made.norms[1].register_forward_hook(lambda *_: None)
        assert "plain RMSNorm" in str(made.no_norms_by_kernel(x))
        last = model()
        last.norm.register_forward_hook(lambda *_: None)
        assert "plain RMSNorm" in str(last.no_norms_by_kernel(x))
        other = model()
        other.norms[0] = nn.LayerNorm(16)
        assert "plain RMSNorm" in str(other.no_norms_by_kernel(x))
        assert "neither of the streams" in str(model(dtype=torch.bfloat16).no_norms_by_kernel(x))
        assert "neither of the streams" in str(model(dtype=torch.float64).no_norms_by_kernel(x))
        mixed = model()
        mixed.norms[0].bfloat16()
        assert "neither of the streams" in str(mixed.no_norms_by_kernel(x))
        assert "more than a sum" in str(model("mhc").no_norms_by_kernel(x))
        assert "more than a sum" in str(model("post-norm").no_norms_by_kernel(x))


STREAMS = """
import torch
from unittest.mock import patch
from axes.models import Architecture, LanguageModel
from axes.models import language_model
from axes.kernels.rows import norm
seen = []
add = norm.add_norm
def watched(h, y, w, eps, dtype):
    after, x = add(h, y, w, eps, dtype)
    seen.append((h.dtype, None if y is None else y.dtype, w.dtype, after.dtype, x.dtype))
    return after, x
norm.add_norm = watched
half, full = torch.bfloat16, torch.float32
size = Architecture("softmax-attention", DEPTH, layers=2, width=16, heads=1, vocabulary=11)
torch.manual_seed(0)
model = LanguageModel(size, stream_dtype=half)
for p in model.parameters():  # a projection of zeros gives its factors no gradient
    if not p.any():
        torch.nn.init.normal_(p, std=0.02)
windows = torch.randint(11, (2, 6))
with torch.autocast("cpu", half):
    made = model.loss(windows)
    got = torch.autograd.grad(made, list(model.parameters()))
    added = half if DEPTH == "residual" else None  # what is beside the stream that a norm reads
    assert seen == [(half, None, full, half, half)] + 4 * [(half, added, full, half, half)], seen
    with patch.object(language_model, "no_norm_by_kernel", lambda *_: "asked not to"):
        wanted = model.loss(windows)
        grads = torch.autograd.grad(wanted, list(model.parameters()))
assert len(seen) == 5
assert made.dtype == full and all(g.dtype == full for g in got)
torch.testing.assert_close(made, wanted, rtol=2e-3, atol=0)
model.stream_dtype = None
model.double()
exact = model.loss(windows)
exacts = torch.autograd.grad(exact, list(model.parameters()))
torch.testing.assert_close(made.double(), exact, rtol=2e-2, atol=0)
for a, b, c in zip(got, grads, exacts):
    apart = [float((x.double() - c).norm() / c.norm()) for x in (a, b)]
    assert apart[0] <= max(2 * apart[1], 0.05), apart
"""


@pytest.mark.parametrize("depth", ["residual", "mhc"])
def test_streams_of_16_bits_beside_norms_in_float32(depth: str) -> None:
    """Kernel and torch agree as well with float64 as one another."""
    interpret(f"DEPTH = {depth!r}" + STREAMS)


@pytest.mark.parametrize("depth", ["residual", "mhc", "post-norm"])
def test_streams_have_the_dtype_that_was_asked_for(depth: str) -> None:
    made, seen = model(depth, stream_dtype=torch.bfloat16), []
    for mixer in made.mixers:
        own = mixer.read
        mixer.read = lambda streams, own=own: seen.append(streams.dtype) or own(streams)  # type: ignore[func-returns-value]
    assert made.loss(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.float32  # logits are of the products' dtype
    assert seen and set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("depth", ["residual", "mhc"])
def test_a_model_launches_one_kernel_for_a_norm_and_an_addition_before_it(depth: str) -> None:
    made, x = model(depth), torch.zeros(1, 4, dtype=torch.int64)
    with no_launches() as launches:
        made.loss(x).backward()
        assert launches.count("_add_norm") == launches.count("_add_norm_backward") == 3


def test_what_a_head_reads_has_the_dtype_of_products_by_either_route() -> None:
    made, x = model(), torch.randn(1, 4, 16)
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            assert made.hidden(x)[0].dtype == dtype
            with no_launches() as launches:
                assert made.hidden(x)[0].dtype == dtype
            assert launches.count("_add_norm") == 3


def test_bad_input_is_explained() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"\(2, 3\), \(2, 3\) and \(2,\)"):
        add_norm(x, x, torch.ones(2), 1e-6, x.dtype)
    with pytest.raises(ShapeError, match="CUDA"):
        add_norm(x, x, torch.ones(3), 1e-6, x.dtype)
