"""A sublayer's read and write by kernels: from what a tuple says to a coefficient for every stream.

    read    x_in = sum_j r_j X_j                    axes.kernels.streams.mix
    write   X_i <- sum_j M_ij X_j + w_i y           the same; w = rate k, M the transpose of what the monoid acts with
    both    the coefficients too, if projected     axes.kernels.streams.look
    M       from logits, if they are Sinkhorn's     axes.kernels.streams.sinkhorn

Triton is imported by the first call that needs it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.derived import no_chain
from axes.core.facts import fact
from axes.core.geometry import Euclidean, Sphere
from axes.core.legality import gates
from axes.core.monoids import GeneralLinear, Identity
from axes.core.rates import Rate, Signal, rate_shape, resolve
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate
from axes.kernels.common import versions
from axes.kernels.streams import ENTRIES, LARGEST

if TYPE_CHECKING:
    from axes.depth.projection import Projection


@fact
def no_form(update: StateUpdate) -> str | None:
    """Why a write of the tuple is not X <- M X + w y with M and w that need not know X, or None if it is."""
    p = update.parts()
    if (reason := no_chain(update)) is not None:
        return reason
    if p.drive_sees_state or p.cost.drives != "target":
        return "what is written depends on what the streams hold"
    if p.step.via or p.step.debias or not isinstance(p.step.at, str):
        return "the state is more than the streams"
    if p.memory.kind != "matrix":
        return f"{type(p.memory).__name__} memory has no streams that could be mixed"
    if gates(p.monoid) & {"row", "hadamard"} or rate_shape(p.step.rate) == "row":
        return "entries of one stream are kept or written at different rates"
    return None


@fact
def addition(update: StateUpdate) -> Literal["plain", "read", "write"] | None:
    """Where the norm stands of a tuple whose write is an addition to one stream, if any does; None of other tuples."""
    p, plain = update.parts(), StateUpdate(Alignment(), Euclidean(), Identity(), Step()).parts()
    if p._replace(h=plain.h, step=dataclasses.replace(p.step, lazy=True)) != plain:
        return None
    if p.h == plain.h:
        return "plain"
    return None if p.h != Sphere("columns", radius=None) else "read" if p.step.lazy else "write"


def no_kernel(
    update: StateUpdate, device: torch.device, dtype: torch.dtype, streams: int = 1, fractions: int = 1
) -> str | None:
    """Why no Triton kernel reads and writes so many streams, or None if one does. dtype: what they are computed in, if
    that is float64; else their own."""
    if (reason := versions.no_kernel(device, dtype) or no_form(update)) is not None:
        return reason
    if fractions > 1:
        return "a sublayer reads and writes several rows of the state"
    return f"the kernels take up to {LARGEST} streams, not {streams}" if streams > LARGEST else None


def read(streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """x_in (..., d) of streams (..., n, d), in their dtype, and the streams once more, for a write of them.

    weights: whatever broadcasts to (..., n).
    """
    from axes.kernels.streams.mix import mix_read_on

    return mix_read_on(streams, _coefficients(weights, streams, 1))


def projects(bias: Tensor) -> bool:
    """Whether a kernel makes as many entries as a `Projection` has."""
    return bias.shape[-1] <= ENTRIES


def look(streams: Tensor, projection: Projection) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_in (..., d), pre (..., n), the entries (..., g, C), and the streams (..., n, d) once more."""
    from axes.kernels.streams.look import look as by_kernel

    phi, scale, bias, chart, tanh, centred, floor = projection
    if centred:  # of a centred row the product is that with a centred phi
        phi = phi - phi.mean(-1, keepdim=True)
    return by_kernel(streams, phi, scale, bias, chart, tanh=tanh, centred=centred, floor=floor)


def write(update: StateUpdate, streams: Tensor, signal: Signal) -> Tensor:
    """The streams after one step of a tuple that `no_form` has nothing against, in their dtype."""
    from axes.kernels.streams.mix import mix_write

    return mix_write(*_given(update, streams, signal))


def write_then_read(
    update: StateUpdate, streams: Tensor, signal: Signal, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, and x_in (..., d) of what was written."""
    from axes.kernels.streams.mix import mix_write_read

    x, v, written, mixing = _given(update, streams, signal)
    return mix_write_read(x, v, written, _coefficients(weights, streams, 1), mixing)


def _given(update: StateUpdate, streams: Tensor, signal: Signal) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Streams, what is written, its coefficients and those of mixing."""
    p, k, v = update.parts(), signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    rate = resolve(p.step.rate, signal)
    mixing = _mixing(update, streams, signal, rate)
    if isinstance(rate, Tensor) and rate_shape(p.step.rate) == "scalar":
        rate = rate[..., None]
    mixing = None if mixing is None else _coefficients(mixing, streams, 2)
    v = v if v.dtype in versions.DTYPES else v.float()
    return streams, v, _coefficients(rate * k, streams, 1), mixing


def _mixing(update: StateUpdate, streams: Tensor, signal: Signal, rate: Tensor | float) -> Tensor | None:
    """M (..., n, n), or None for the identity."""
    monoid, n = update.parts().monoid, streams.shape[-2]
    if isinstance(monoid, GeneralLinear) and monoid.link.sinkhorn is not None:
        from axes.kernels.streams.sinkhorn import sinkhorn

        return sinkhorn(_logits(monoid.logits, signal), *monoid.link.sinkhorn)
    if isinstance(monoid, Identity):
        return None
    like = streams.new_empty((1, n), dtype=torch.float32)
    element = monoid.element(signal, rate, like)
    return None if element.trivial else element.to_dense(n, like).mT


def _logits(rate: Rate, signal: Signal) -> Tensor:
    logits = resolve(rate, signal)
    if not isinstance(logits, Tensor):
        raise IllegalUpdate(f"GeneralLinear: {rate!r} must be a matrix, got the number {logits}")
    return logits


def _coefficients(c: Tensor, streams: Tensor, dimensions: int) -> Tensor:
    """One for all tokens, or of every token."""
    return c if c.ndim == dimensions else c.expand(*streams.shape[:-2], *c.shape[-dimensions:])
