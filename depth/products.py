"""What a sublayer does to streams by torch's products, with gradients in few passes over them.

    project  u = X^ phi^T / rms(X^)          X^: all streams of a token in one row, or each by itself, or less its mean
    read     x = sum_j r_j X_j
    write    X_i <- sum_j M_ij X_j + w_i v

The first two return the streams once more: what is made of those gives its gradient to the pass that writes their own.
Each derivative is one formula; where somebody else than autograd looks, it is that of the operations (`plain_...`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from axes.linalg.formulas import by_autograd, by_formula

_NUMBERS = 2**17  # half a megabyte of float32, that a processor's own cache holds


def project(streams: Tensor, phi: Tensor, eps: float, centred: bool = False) -> tuple[Tensor, Tensor]:
    """(..., g, C) of streams (..., n, d) and phi (C, n d / g), and the streams once more."""
    if not by_formula(streams, phi):
        return plain_project(streams, phi, eps, centred)
    made: tuple[Tensor, Tensor] = _Project.apply(streams, phi, eps, centred)
    return made


def plain_project(streams: Tensor, phi: Tensor, eps: float, centred: bool = False) -> tuple[Tensor, Tensor]:
    rows = _rows(streams, phi, centred)
    unit = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows @ phi.mT) * unit, streams  # the norm after the product, which is smaller


def _rows(streams: Tensor, phi: Tensor, centred: bool) -> Tensor:
    *lead, n, d = streams.shape
    width = phi.shape[-1]
    return _centred(streams.reshape(*lead, n * d // width, width), centred)


def _centred(x: Tensor, centred: bool) -> Tensor:
    return x - x.mean(-1, keepdim=True) if centred else x


@final
class _Project(torch.autograd.Function):
    """du = s du', dX^ = du phi - s^2 <u', du'> X^ / W with u' what is returned and s the unit of a row. That has mean
    zero if rows of phi have, so that it is dX of centred rows."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, phi: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        rows = streams.reshape(-1, phi.shape[-1])
        made, norm = rows.new_empty(len(rows), len(phi)), rows.new_empty(len(rows), 1)
        for x, u, size in _in_cache(rows, made, norm):
            x = _centred(x, centred)
            torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=size)
            torch.mm(x, phi.mT, out=u)
        unit = torch.rsqrt(norm.square() / phi.shape[-1] + eps)
        made *= unit
        ctx.save_for_backward(streams, phi, made, unit)
        ctx.options = eps, centred
        ctx.set_materialize_grads(False)
        *lead, n, d = streams.shape
        return made.view(*lead, n * d // phi.shape[-1], len(phi)), streams

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        streams, phi, made, unit = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(plain_project, (streams, phi, *ctx.options), grads)
        dmade, more = grads
        if dmade is None:
            return more, None, None, None
        dmade, centred = dmade.reshape(made.shape), ctx.options[1]
        du, slope = dmade * unit, (dmade * made).sum(-1, keepdim=True) * unit.square() / -phi.shape[-1]
        rows = streams.reshape(-1, phi.shape[-1])
        back = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        dphi = torch.zeros_like(phi) if ctx.needs_input_grad[1] else None
        along = _centred(phi, centred)
        more = None if more is None else more.reshape(rows.shape)
        for x, u, steep, to, told in _in_cache(rows, du, slope, back, more):
            x = _centred(x, centred)
            if to is not None:
                torch.mm(u, along, out=to) if told is None else torch.addmm(told, u, along, out=to)
                to.addcmul_(x, steep)
            if dphi is not None:
                dphi.addmm_(u.mT, x)
        return None if back is None else back.view(streams.shape), dphi, None, None


def _in_cache(rows: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Rows, and those of others, in pieces: on a CPU of so many that what one operation has read the next one finds in
    cache, elsewhere of all."""
    size = max(1, _NUMBERS * torch.get_num_threads() // rows.shape[-1] if rows.device.type == "cpu" else len(rows))
    first = rows.split(size)
    return zip(first, *([None] * len(first) if x is None else x.split(size) for x in others), strict=True)


def read(streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., d) of streams (..., n, d) and weights that broadcast to (..., n), and the streams once more."""
    if not by_formula(streams, weights) or weights.ndim >= streams.ndim:
        return plain_read(streams, weights)
    made: tuple[Tensor, Tensor] = _Read.apply(streams, weights.expand(streams.shape[:-1]))
    return made


def plain_read(streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return (weights[..., None, :] @ streams).squeeze(-2), streams


@final
class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(streams, weights)
        ctx.set_materialize_grads(False)
        return plain_read(streams, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        streams, weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(plain_read, (streams, weights), grads)
        dx, more = grads
        if dx is None:
            return more, None
        dstreams = dweights = None
        if ctx.needs_input_grad[0]:
            w, d = weights[..., None], dx[..., None, :]
            dstreams = w * d if more is None else torch.addcmul(more, w, d)
        if ctx.needs_input_grad[1]:
            dweights = (dx[..., None, :] @ streams.mT).squeeze(-2)  # half the time of a product with a column
        return dstreams, dweights


def write(streams: Tensor, v: Tensor, weights: Tensor, mixing: Tensor | None) -> Tensor:
    """The new streams (..., n, d); v (..., d), weights (..., n), mixing (..., n, n), without it the identity."""
    lead = streams.shape[:-2]
    weights = weights.expand(*lead, weights.shape[-1])
    mixing = None if mixing is None else mixing.expand(*lead, *mixing.shape[-2:])
    if not by_formula(streams, v, weights, mixing):
        return plain_write(streams, v, weights, mixing)
    made: Tensor = _Write.apply(streams, v, weights, mixing)
    return made


def plain_write(streams: Tensor, v: Tensor, weights: Tensor, mixing: Tensor | None) -> Tensor:
    if mixing is None:
        return torch.addcmul(streams, weights[..., None], v[..., None, :])
    return torch.addcmul(mixing @ streams, weights[..., None], v[..., None, :])


@final
class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, v: Tensor, weights: Tensor, mixing: Tensor | None) -> Tensor:
        ctx.save_for_backward(streams, v, weights, mixing)
        if mixing is None:
            return plain_write(streams, v, weights, None)
        return (mixing @ streams).addcmul_(weights[..., None], v[..., None, :])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        streams, v, weights, mixing = given = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_autograd(plain_write, given, grads)
        (dout,) = grads
        needs = ctx.needs_input_grad
        dstreams = (dout if mixing is None else mixing.mT @ dout) if needs[0] else None
        dv = (weights[..., None, :] @ dout).squeeze(-2) if needs[1] else None
        dweights = (v[..., None, :] @ dout.mT).squeeze(-2) if needs[2] else None
        dmixing = dout @ streams.mT if needs[3] else None
        return dstreams, dv, dweights, dmixing


__all__ = ["plain_project", "plain_read", "plain_write", "project", "read", "write"]
