"""Sinkhorn's alternating normalisations of exp(z): columns, then rows, so many pairs of them."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from axes.kernels.common.operators import Differentiable
from axes.linalg.formulas import by_formula

_SPREAD = {torch.float32: 40.0, torch.float64: 300.0}  # of logits, up to which no entry leaves the range of the dtype


def sinkhorn(z: Tensor, pairs: int) -> Tensor:
    """exp(z) (..., n, n) with columns, then rows, divided by their sums, `pairs` times over.

    On a CPU, for logits that are no further apart than the dtype can hold (40 in float32), the sums are those of the
    entries themselves, of all matrices side by side, and the derivative is one formula; else all is done on logs. To a
    compiler the same is one operator: 2 `pairs` normalisations with their gradients took inductor most of two minutes.
    """
    if torch.compiler.is_compiling() and z.device.type == "cpu" and z.dtype in _SPREAD:
        (made,) = _operator(z.contiguous(), pairs)
        whole: Tensor = made
        return whole
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
    return by_formula(z) and z.device.type == "cpu" and z.dtype in _SPREAD and bool(z.numel()) and _in_range(z)


def _in_range(z: Tensor) -> bool:
    low, high = z.detach().aminmax()
    return bool(high - low < _SPREAD[z.dtype])  # not where one is not a number


def _sums(z: Tensor, pairs: int) -> Tensor:
    """What every normalisation has made, (2 pairs, n, n, N): matrices side by side, so that sums add rows of memory."""
    n = z.shape[-1]
    x = z.reshape(-1, n, n).permute(1, 2, 0).contiguous()
    made = x.new_empty(2 * pairs, *x.shape)
    last = torch.sub(x, x.amax(0, keepdim=True)).exp_()
    for k, p in enumerate(made.unbind()):
        last = torch.div(last, last.sum(k % 2, keepdim=True), out=p)
    return made


def _logs(z: Tensor, pairs: int) -> Tensor:
    """The same by logs of sums."""
    n = z.shape[-1]
    x = z.reshape(-1, n, n).permute(1, 2, 0).contiguous()
    made = x.new_empty(2 * pairs, *x.shape)
    for k, p in enumerate(made.unbind()):
        x = x - x.logsumexp(k % 2, keepdim=True)
        torch.exp(x, out=p)
    return made


def _back(made: Tensor, dw: Tensor) -> Tensor:
    """In logs a normalisation is y = z - log sum exp z, and dz = dy - exp(y) sum dy, with exp(y) what it has made."""
    dy = dw.reshape(-1, *made.shape[1:3]).permute(1, 2, 0).contiguous() * made[-1]
    for k in reversed(range(len(made))):
        dy.addcmul_(made[k], dy.sum(k % 2, keepdim=True), value=-1.0)
    return dy.permute(2, 0, 1).contiguous().view(dw.shape)


def _last(made: Tensor, z: Tensor) -> Tensor:
    """Products of matrices want them one by one."""
    return made[-1].permute(2, 0, 1).contiguous().view(z.shape)


@final
class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, pairs: int) -> Tensor:
        made = _sums(z, pairs)
        ctx.save_for_backward(z, made)
        ctx.pairs = pairs
        return _last(made, z)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None]:
        z, made = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return torch.autograd.grad(by_logs(z, ctx.pairs), z, dw, create_graph=True)[0], None
        return _back(made, dw), None


def _forward(z: Tensor, pairs: int, record: bool) -> tuple[Tensor, list[Tensor]]:
    made = (_sums if z.numel() and _in_range(z) else _logs)(z, pairs)
    return _last(made, z), [made] if record else []


def _shapes(z: Tensor, pairs: int, record: bool) -> tuple[Tensor, list[Tensor]]:
    n, matrices = z.shape[-1], z.numel() // z.shape[-1] ** 2
    return torch.empty_like(z), [z.new_empty(2 * pairs, n, n, matrices)] if record else []


def _backward(z: Tensor, pairs: int, kept: list[Tensor], dw: Tensor) -> list[Tensor]:
    return [_back(kept[0], dw)]


_operator = Differentiable("sinkhorn_on_host", _forward, _backward, _shapes, gradients=1)


__all__ = ["by_logs", "sinkhorn"]
