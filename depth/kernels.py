"""A sublayer's read and write as products with a coefficient for every stream, by Triton's kernels or by torch's.

    read    x_in = sum_j r_j X_j                    axes.kernels.streams.mix
    write   X_i <- sum_j M_ij X_j + w_i y           the same; w = rate k, M the transpose of what the monoid acts with
    both    the coefficients too, if projected     axes.kernels.streams.look, follow
    M       from logits, by Sinkhorn's or Cayley's  axes.kernels.streams.sinkhorn, cayley

An h that puts every stream on a sphere is torch's RMSNorm, of what is read or, where the step is not lazy, of what has
been written.

Triton is imported by the first call that needs it. Torch's products take and return what is computed in.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from axes.core.derived import no_chain
from axes.core.facts import fact
from axes.core.geometry import Euclidean
from axes.core.geometry.bregman import TINY
from axes.core.legality import gates
from axes.core.monoids import GeneralLinear, Identity
from axes.core.rates import Rate, Signal, rate_shape, resolve
from axes.core.state_update import StateUpdate
from axes.depth import products
from axes.errors import IllegalUpdate
from axes.kernels.common import versions
from axes.kernels.streams import ENTRIES, LARGEST

if TYPE_CHECKING:
    from axes.depth.projection import Projection


@fact
def no_form(update: StateUpdate) -> str | None:
    """Why a write of the tuple is not X <- M X + w y with M and w that need not know X, or None if it is."""
    p = update.parts()
    if p.drive_sees_state or p.cost.drives != "target":
        return "what is written depends on what the streams hold"
    if p.step.via or p.step.debias or p.counts or not isinstance(p.step.at, str):
        return "the state is more than the streams"
    if p.memory.kind != "matrix":
        return f"{type(p.memory).__name__} memory has no streams that could be mixed"
    if gates(p.monoid) & {"row", "hadamard", "turn"} or rate_shape(p.step.rate) == "row":
        return "entries of one stream are kept or written at different rates"
    if normalises(update):
        update = dataclasses.replace(update, h=Euclidean(), algorithm=dataclasses.replace(p.step, lazy=True))
    return no_chain(update)


@fact
def adds(update: StateUpdate) -> bool:
    """Whether a write with weights of one is X + y, before the norm that an h may stand for."""
    p = update.parts()
    return no_form(update) is None and isinstance(p.monoid, Identity) and p.step.rate == 1.0


def no_kernel(update: StateUpdate, streams: int = 1) -> str | None:
    """Why no Triton kernel reads and writes so many streams of this tuple, whatever the device, or None if one does."""
    if (reason := no_form(update)) is not None:
        return reason
    return f"the kernels take up to {LARGEST} streams, not {streams}" if streams > LARGEST else None


def normalises(update: StateUpdate) -> bool:
    """Whether what the tuple hands out is normalised per stream: its h puts every column of S on a sphere."""
    sphere = update.parts().h.sphere
    return sphere is not None and sphere[0] == "columns"


def on_sphere(update: StateUpdate, streams: Tensor, written: bool) -> Tensor:
    """What is read of streams, or what a write of them leaves."""
    p = update.parts()
    if not normalises(update) or p.step.lazy == written:
        return streams
    assert p.h.sphere is not None
    radius, d = p.h.sphere[1], streams.shape[-1]
    unit = torch.nn.functional.rms_norm(streams, (d,), eps=TINY / d)
    return unit if radius is None else unit * (radius / math.sqrt(d))


def read(update: StateUpdate, streams: Tensor, weights: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    """x_in (..., d) of streams (..., n, d), in their dtype, and the streams once more, for a write of them.

    weights: whatever broadcasts to (..., n).
    """
    seen = on_sphere(update, streams, written=False)
    if not triton:
        x, again = products.read(seen, weights)
    else:
        from axes.kernels.streams.mix import mix_read, mix_read_on

        weights = _coefficients(weights, streams, 1)
        x, again = mix_read_on(seen, weights) if seen is streams else (mix_read(seen, weights), streams)
    return x, again if seen is streams else streams


def projects(bias: Tensor) -> bool:
    """Whether a kernel makes as many entries as a `Projection` has."""
    return bias.shape[-1] <= ENTRIES


def look(streams: Tensor, projection: Projection) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_in (..., d), pre (..., n), k (..., n) or without it (..., 0), the rest of the entries (..., g, c), and the
    streams (..., n, d) once more."""
    from axes.kernels.streams.look import look as by_kernel

    return by_kernel(streams, *_looked(projection), **_options(projection))


def _looked(projection: Projection) -> tuple[Tensor, Tensor, Tensor, str]:
    return projection.phi, projection.scale, projection.bias, projection.chart


def _options(projection: Projection) -> dict[str, Any]:
    return {
        "writes": projection.writes, "tanh": projection.tanh, "centred": projection.centred, "floor": projection.floor,
    }  # fmt: skip


def write_then_look(
    update: StateUpdate, streams: Tensor, signal: Signal, projection: Projection
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The streams after a step by kernels, and x_in (..., d), pre, k and the rest of the entries of a look at them; of
    no sphere."""
    from axes.kernels.streams.follow import write_look

    x, v, written, mixing = _given(update, streams, signal, triton=True)
    return write_look(x, v, written, mixing, *_looked(projection), **_options(projection))


def write(update: StateUpdate, streams: Tensor, signal: Signal, triton: bool) -> Tensor:
    """The streams after one step of a tuple that `no_form` has nothing against, in their dtype."""
    if not triton:
        return on_sphere(update, products.write(*_given(update, streams, signal, triton)), written=True)
    from axes.kernels.streams.mix import mix_write

    return on_sphere(update, mix_write(*_given(update, streams, signal, triton)), written=True)


def write_then_read(update: StateUpdate, streams: Tensor, signal: Signal, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same by kernels, and x_in (..., d) of what was written; of tuples whose h is no sphere."""
    from axes.kernels.streams.mix import mix_write_read

    x, v, written, mixing = _given(update, streams, signal, triton=True)
    return mix_write_read(x, v, written, _coefficients(weights, streams, 1), mixing)


def _given(
    update: StateUpdate, streams: Tensor, signal: Signal, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Streams, what is written, its coefficients and those of mixing."""
    p, k, v = update.parts(), signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    rate = resolve(p.step.rate, signal)
    mixing = _mixing(update, streams, signal, rate, triton)
    if isinstance(rate, Tensor) and rate_shape(p.step.rate) == "scalar":
        rate = rate[..., None]
    mixing = None if mixing is None else _coefficients(mixing, streams, 2)
    v = v if not triton or v.dtype in versions.DTYPES else v.float()
    weights = k if isinstance(rate, float) and rate == 1.0 else rate * k
    return streams, v, _coefficients(weights, streams, 1), mixing


def _mixing(update: StateUpdate, streams: Tensor, signal: Signal, rate: Tensor | float, triton: bool) -> Tensor | None:
    """M (..., n, n), or None for the identity."""
    monoid, n = update.parts().monoid, streams.shape[-2]
    if triton and isinstance(monoid, GeneralLinear) and (linked := _linked(monoid, signal)) is not None:
        return linked
    if isinstance(monoid, Identity):
        return None
    like = streams.new_empty((1, n), dtype=torch.float32 if triton else streams.dtype)
    element = monoid.element(signal, rate, like)
    return None if element.trivial else element.to_dense(n, like).mT


def _linked(monoid: GeneralLinear, signal: Signal) -> Tensor | None:
    """The same by a kernel of its link, if one has it."""
    link = monoid.link
    if link.sinkhorn is not None:
        from axes.kernels.streams.sinkhorn import sinkhorn

        return sinkhorn(_logits(monoid.logits, signal), *link.sinkhorn)
    if link.rotation is not None:
        from axes.kernels.streams.cayley import cayley

        return cayley(_logits(monoid.logits, signal), *link.rotation)
    return None


def _logits(rate: Rate, signal: Signal) -> Tensor:
    logits = resolve(rate, signal)
    if not isinstance(logits, Tensor):
        raise IllegalUpdate(f"GeneralLinear: {rate!r} must be a matrix, got the number {logits}")
    return logits


def _coefficients(c: Tensor, streams: Tensor, dimensions: int) -> Tensor:
    """One for all tokens, or of every token."""
    return c if c.ndim == dimensions else c.expand(*streams.shape[:-2], *c.shape[-dimensions:])
