"""Sinkhorn's alternating normalisations of exp(z): columns, then rows, so many pairs of them."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from axes.linalg.formulas import by_formula

_SPREAD = {torch.float32: 40.0, torch.float64: 300.0}  # of logits, up to which no entry leaves the range of the dtype


def sinkhorn(z: Tensor, pairs: int) -> Tensor:
    """exp(z) (..., n, n) with columns, then rows, divided by their sums, `pairs` times over.

    On a CPU, for logits that are no further apart than the dtype can hold (40 in float32), the sums are those of the
    entries themselves, of all matrices side by side, and the derivative is one formula; else all is done on logs.
    """
    w: Tensor = _Sums.apply(z, pairs) if _plain_numbers(z) else by_logs(z, pairs)
    return w


def by_logs(z: Tensor, pairs: int) -> Tensor:
    """The same by logs of sums, for logits of any size, and as any transformation may follow it."""
    for _ in range(pairs):
        z = z - z.logsumexp(-2, keepdim=True)
        z = z - z.logsumexp(-1, keepdim=True)
    return z.exp()


def _plain_numbers(z: Tensor) -> bool:
    """Whether the host may look at the logits, and their exponentials and the products of these are in range."""
    if not by_formula(z) or z.device.type != "cpu" or z.dtype not in _SPREAD or not z.numel():
        return False
    low, high = z.detach().aminmax()
    return bool(high - low < _SPREAD[z.dtype])  # not where one is not a number


@final
class _Sums(torch.autograd.Function):
    """In logs a normalisation is y = z - log sum exp z, and dz = dy - exp(y) sum dy, with exp(y) what it has made."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, pairs: int) -> Tensor:
        n = z.shape[-1]
        x = z.reshape(-1, n, n).permute(1, 2, 0).contiguous()  # matrices side by side: sums add rows of memory
        made = x.new_empty(2 * pairs, *x.shape)
        last = torch.sub(x, x.amax(0, keepdim=True)).exp_()
        for k, p in enumerate(made.unbind()):
            last = torch.div(last, last.sum(k % 2, keepdim=True), out=p)
        ctx.save_for_backward(z, made)
        ctx.pairs = pairs
        return last.permute(2, 0, 1).contiguous().view(z.shape)  # products of matrices want them one by one

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None]:
        z, made = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return torch.autograd.grad(by_logs(z, ctx.pairs), z, dw, create_graph=True)[0], None
        n = z.shape[-1]
        dy = dw.reshape(-1, n, n).permute(1, 2, 0).contiguous() * made[-1]
        for k in reversed(range(len(made))):
            dy.addcmul_(made[k], dy.sum(k % 2, keepdim=True), value=-1.0)
        return dy.permute(2, 0, 1).contiguous().view(z.shape), None


__all__ = ["by_logs", "sinkhorn"]
