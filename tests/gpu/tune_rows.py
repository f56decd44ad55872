"""Sizes of the kernels of rows that a training step is full of, timed alone.

    python -m tests.gpu.tune_rows > rows.txt        # about a minute

Cross-entropy of 50,304 classes, add and norm backward of a stream of 768, the gated half of 2,048 columns, `enter` of
six heads of 128: milliseconds and what they are of a copy's bandwidth.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch

from axes.kernels.blocks import enter as blocks
from axes.kernels.blocks.plan import Numbers, Plan, Stream
from axes.kernels.rows import cross_entropy, gated, norm

HALF = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def said(what: str, call: Callable[[], object], gigabytes: float) -> None:
    taken = []
    for _ in range(12):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        call()
        ended.record()
        taken.append((begun, ended))
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in taken[4:])
    print(f"{what:<60} {ms:8.3f} ms  {gigabytes / ms:6.2f} TB/s", flush=True)


def main() -> None:
    x = draw(1 << 28)
    said("a copy", lambda: x.clone(), 4 * x.numel() / 1e9)
    tokens, classes = 16384, 50304
    logits, targets = draw(tokens, classes), torch.randint(classes, (tokens,), device="cuda")
    for block, warps in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16, 32)):
        if 2 <= block // (32 * warps) <= 32:
            with patch.multiple(cross_entropy, _BLOCK=block, _WARPS=warps):
                said(
                    f"cross-entropy, {block} entries, {warps} warps",
                    lambda: cross_entropy.cross_entropy(logits, targets, True, -100),
                    4 * logits.numel() / 1e9,
                )
    h, y, w = draw(131072, 768, dtype=torch.float32), draw(131072, 768), draw(768, dtype=torch.float32)
    h, y, w = (t.requires_grad_() for t in (h, y, w))
    after, out = norm.add_norm(h, y, w, 1e-6, HALF)
    given = torch.randn_like(after), torch.randn_like(out)
    for programs in (528, 792, 1024, 1584, 2112, 4224, 8448, 16896):
        with patch.object(norm, "_PROGRAMS", programs):
            said(
                f"add and norm backward, {programs} programs",
                lambda: torch.autograd.grad((after, out), (h, y, w), given, retain_graph=True),
                16 * h.numel() / 1e9,
            )
    z, du = draw(131072, 4096), draw(131072, 2048)
    for groups, warps in itertools.product((64, 128, 256), (4, 8)):
        with patch.multiple(gated, _GROUPS=groups, _WARPS=warps):
            said(f"gated, {groups} groups, {warps} warps", lambda: gated._forward(z, True), 6 * du.numel() / 1e9)
            said("  backward", lambda: gated._backward(z, [], du), 10 * du.numel() / 1e9)
    q = Stream(6, 128, 4, False, "silu", "none", "unit", 1e-12, 128**-0.5)
    streams = (q, q._replace(scale=1.0), q._replace(norm="none", scale=1.0))
    numbers = (Numbers(6, "ssm", biased=True), Numbers(6, "sigmoid"))
    plan = Plan(streams, numbers, 2320)
    p, parameters = draw(64, 2048, plan.width), [draw(n) for n in plan.parameters()]
    results = blocks._forward(p, parameters, [], None, plan.text)[: plan.results()]
    size = 2 * p.numel() / 1e9
    said(f"enter, {plan.warps} warps", lambda: blocks._forward(p, parameters, [], None, plan.text), 2 * size)
    said("  backward", lambda: blocks._backward(p, parameters, [], None, results, [], plan.text), 3 * size)


if __name__ == "__main__":
    main()
