"""A write of streams, and what the next sublayer predicts and reads of what was written, in one operator.

    X'_i = sum_j M_ij X_j + w_i y           axes.kernels.streams.mix
    pre, k, the rest of entries, x of X'    axes.kernels.streams.look

The gradient is that of the look, which writes dX' once with what the following write gives, and then that of the write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.kernels.common.operators import Differentiable
from axes.kernels.streams import look, mix


def _forward(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, phi: Tensor, a: Tensor, b: Tensor,
    chart: str, writes: bool, tanh: bool, centres: bool, eps: float, floor: float, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    out = mix._run(x, m, y, w, None)[0]
    return out, *look._forward(out, phi, a, b, chart, writes, tanh, centres, eps, floor, record)


def _empty(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, phi: Tensor, a: Tensor, b: Tensor,
    chart: str, writes: bool, tanh: bool, centres: bool, eps: float, floor: float, record: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    return torch.empty_like(x), *look._empty(x, phi, a, b, chart, writes, tanh, centres, eps, floor, record)


def _backward(
    x: Tensor, m: Tensor | None, y: Tensor, w: Tensor, phi: Tensor, a: Tensor, b: Tensor,
    chart: str, writes: bool, tanh: bool, centres: bool, eps: float, floor: float, kept: list[Tensor],
    dout: Tensor | None, dpre: Tensor | None, dk: Tensor | None, drest: Tensor | None, dseen: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    out, *rest = kept
    options = chart, writes, tanh, centres, eps, floor
    dx, *others = look._backward(out, phi, a, b, *options, rest, dpre, dk, drest, dseen, dout)
    return [*mix._differentiate(x, m, y, w, None, dx, None), *others]


_follows = Differentiable("mix_write_look", _forward, _backward, _empty, gradients=7, reads=2, missing=True)


def write_look(
    x: Tensor, y: Tensor, w: Tensor, m: Tensor | None, phi: Tensor, a: Tensor, b: Tensor, chart: str,
    *, writes: bool = False, tanh: bool = False, centred: bool = False, eps: float = 1e-6, floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(X', x_in, pre, k, rest): `mix_write` of streams x (..., n, d), and `look` at what it wrote.

    Raises ShapeError as these do.
    """
    mix._check("write_look", x, y, m=m, w=w)
    look._require("write_look", x, phi, a, b, chart, writes)
    lead = x.shape[:-2]
    parameters = (t.to(torch.float32).contiguous() for t in (phi, a, b))
    options = chart, writes, tanh, centred, float(eps), float(floor)
    made, pre, k, rest, seen = _follows(*mix._given(x, y, w, m), *parameters, *options)
    return made.view(x.shape), *(t.view(*lead, *t.shape[1:]) for t in (seen, pre, k, rest))
