"""The gated delta rule of plain shapes by the Hopper kernels, forward and backward for `scalar`.

Plain: 16 bit, dense, uncut, K = V in {64, 128}, as many value heads as key heads, keys erased where they are written,
after the gate. These kernels keep W = (I + L diag(beta))^-1, strengths on the columns, where the portable ones keep M.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from axes.kernels import hopper, hopper_backward

if TYPE_CHECKING:
    from axes.kernels.scalar import Chain


def fits(x: Chain) -> bool:
    """Whether these kernels compute a chain: a function of shapes, dtype and the device's capability."""
    plain = x.erase is None and not x.early and x.scale_q is None and x.beta is not None
    whole = x.cut.offsets is None and x.cut.S == 1
    return plain and whole and hopper.fits(x.q, x.v) and hopper_backward.fits(x.q, x.v)


def forward(x: Chain, start: Tensor | None) -> tuple[Tensor | None, ...]:
    """o, final, W and P (chunks by heads), and what only segments have."""
    assert x.beta is not None
    o, final, w, p = hopper.forward(x.q, x.k, x.v, x.beta, x.g, start)
    shape = (x.cut.slots, x.v.shape[2], *w.shape[3:])
    return o, final, w.view(shape), p.view(shape), start, None


def backward(
    x: Chain, w: Tensor, p: Tensor, start: Tensor | None, maps: Tensor | None, do: Tensor, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dq, dk, da (none), dv, dbeta, dg and the gradient of the first states."""
    assert x.beta is not None and maps is None
    shape = (x.cut.units, x.v.shape[2], x.cut.N, *w.shape[2:])
    dfinal = x.state().zero_() if dfinal is None else dfinal
    dq, dk, dv, dbeta, dg, dstart = hopper_backward.backward(
        x.q, x.k, x.v, x.beta, x.g, start, w.view(shape), p.view(shape), do, dfinal
    )
    return dq, dk, None, dv, dbeta, None if x.g is None else dg, dstart
