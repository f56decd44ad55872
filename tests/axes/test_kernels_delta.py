"""The gated delta rule's Triton kernels under Triton's interpreter, against a float64 token loop; and its refusals.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
bfloat16 products are left to tests/gpu: the interpreter multiplies their bit patterns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from axes.errors import ShapeError

PROGRAM = r"""
import sys
import torch
from torch.nn.functional import normalize
from triton.runtime import interpreter

plain = interpreter._patch_lang_tensor

def patched(tensor, scope):  # numpy >= 2.5 makes no int of an array of one entry
    plain(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

interpreter._patch_lang_tensor = patched
from axes.kernels.delta import gated_delta_rule

NAMES = ("o", "final", "dq", "dk", "dv", "dbeta", "dg", "dstate")

def token_loop(q, k, v, beta, g, start):
    state, outs = q.new_zeros(q.shape[0], q.shape[2], v.shape[3], q.shape[3]) if start is None else start, []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * torch.exp(g[:, t])[..., None, None]
        error = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * error, k[:, t])
        outs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state

def draw(length, d_k, d_v, dtype, kind, b=2, h=2):
    q, k = (normalize(torch.randn(b, length, h, d_k), dim=-1) for _ in range(2))
    v = torch.randn(b, length, h, d_v)
    beta = 2 * torch.rand(b, length, h)
    g = -torch.rand(b, length, h) ** 2
    start = torch.randn(b, h, d_v, d_k)
    if kind == "parallel":
        k = normalize(torch.randn(b, 1, h, d_k) + 0.05 * k, dim=-1)
        beta, g = torch.full_like(beta, 2.0), 0.01 * g
    if kind == "closed":
        g = torch.where(torch.rand_like(g) < 0.2, -torch.inf, -20 * torch.rand_like(g))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return q, k, v, beta, None if kind == "ungated" else g, None if kind == "fresh" else start

def run(rule, inputs, do, dfinal):
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    o, final = rule(*inputs)
    assert o.dtype == inputs[2].dtype and final.dtype in (torch.float32, torch.float64)
    used = [x for x in inputs if x is not None]
    grads = iter(torch.autograd.grad((o, final), used, (do.to(o.dtype), dfinal.to(final.dtype))))
    return [o, final, *(None if x is None else next(grads) for x in inputs)]

def check(length, d_k, d_v, dtype, kind, bound):
    inputs = draw(length, d_k, d_v, dtype, kind)
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(2, 2, d_v, d_k)
    got = run(gated_delta_rule, inputs, do, dfinal)
    exact = [None if x is None else x.double() for x in inputs]
    want = run(token_loop, exact, do.double(), dfinal.double())
    for name, a, w in zip(NAMES, got, want):
        if w is not None:
            error = ((a - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
            print(length, d_k, d_v, dtype, kind, name, f"{error:.1e}")
            assert error < bound, (length, d_k, d_v, dtype, kind, name, error)

torch.manual_seed(0)
"""

CASES = {
    "full": """
for t in (1, 2, 31, 32, 33, 70): check(t, 16, 16, torch.float32, "random", 3e-6)
for k, v in ((5, 16), (16, 40), (20, 3)): check(40, k, v, torch.float32, "random", 3e-6)
for kind in ("ungated", "fresh"): check(70, 16, 16, torch.float32, kind, 3e-6)
""",
    # float32 loses digits where reflections cancel, and in a cumulative log after closed gates
    "hard": """
check(70, 16, 16, torch.float32, "parallel", 1e-4)
check(70, 16, 16, torch.float32, "closed", 2e-4)
""",
    "half": """
for kind in ("random", "ungated"): check(130, 20, 70, torch.float16, kind, 3e-3)
check(70, 70, 16, torch.float16, "random", 3e-3)
""",
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_token_loop(case: str) -> None:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + CASES[case]],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def arguments() -> dict[str, torch.Tensor | None]:
    token = torch.zeros(2, 3, 4)
    return {
        "q": torch.zeros(2, 3, 4, 8), "k": torch.zeros(2, 3, 4, 8), "v": torch.zeros(2, 3, 4, 5),
        "beta": token, "g": token, "initial_state": torch.zeros(2, 4, 5, 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"q": torch.zeros(2, 3, 8)}, r"\(B, T, H, D\)"),
        ({"k": torch.zeros(2, 3, 4, 7)}, "k has the shape of q"),
        ({"v": torch.zeros(2, 4, 4, 5)}, r"v agrees with q in \(B, T, H\)"),
        ({"v": torch.zeros(2, 3, 4, 129)}, "at most 128"),
        ({"v": torch.zeros(2, 3, 4, 5, dtype=torch.float64)}, "share one of bf16, fp16, fp32"),
        ({"beta": torch.zeros(2, 3, 1)}, "beta is floating point of shape"),
        ({"g": torch.zeros(2, 3, 4, 8)}, "g is floating point of shape"),
        ({"initial_state": torch.zeros(2, 4, 8, 5)}, r"initial_state is \(B, H, V, K\)"),
        ({"beta": torch.zeros(2, 3, 4, device="meta")}, "beta is on meta"),
        ({}, "need a CUDA device"),
    ),
)
def test_refuses(change: dict[str, torch.Tensor], says: str) -> None:
    from axes.kernels.delta import gated_delta_rule

    with pytest.raises(ShapeError, match=says):
        gated_delta_rule(**{**arguments(), **change})  # type: ignore[arg-type]
