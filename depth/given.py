"""What a call of a mixer is given, against what the mixer is made for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from axes.core.state_update import State
from axes.errors import ShapeError, wrong_type
from axes.routes.given import Place, asked, look, require_state
from axes.routes.parameters import some_parameter

if TYPE_CHECKING:
    from axes.depth.base import DepthMixer


def require_own(mixer: DepthMixer, streams: State, call: str) -> None:
    """ShapeError unless a state has the parts of this mixer's own, of one batch."""
    if torch.compiler.is_compiling():
        return
    theta, known, found = streams.theta, asked(mixer.update), list[Hashable]()
    first = theta[0] if isinstance(theta, tuple) and theta else None
    who, least = f"{type(mixer).__name__}.{call}", 1 if mixer._lists else 2
    if not isinstance(first, Tensor) or first.ndim < least:
        raise ShapeError(f"{who}: streams must be the State that expand returned, and its theta is another's")
    width = mixer.d_model // mixer.fractions
    d_k = first.shape[-1] if mixer._lists else mixer.streams * mixer.fractions
    # statistics of keys, which may be constants
    place = Place(first.shape[:-2], d_k, width, mixer._computed(first), first.device, shared=True)
    found.append(place)
    seen = look(streams, found)
    if seen and (found == known.last or known.seen(found)):
        return
    if first.dtype != place.dtype:
        raise ShapeError(f"{who}: streams are a State of {first.dtype}, which is kept in {place.dtype}: convert")
    require_state(who, mixer.update, streams, place, "streams")
    if seen:
        known.keep(found)


def require(mixer: DepthMixer, x: Any, last: tuple[int, ...], call: str, label: str, form: str) -> None:
    """The error that says which shape, dtype or device a tensor of a call should have, unless it has."""
    weight = some_parameter(mixer)
    right = isinstance(x, Tensor) and x.shape[-len(last) :] == last and x.is_floating_point()
    if right and (weight is None or weight.device == x.device):
        return
    who = f"{type(mixer).__name__}.{call}"
    sizes = f"n = {last[0]}, d = {last[1]}" if len(last) == 2 else f"d = {last[0]}"
    if not isinstance(x, Tensor):
        raise wrong_type(who, label, f"a tensor {form} with {sizes}", x)
    if tuple(x.shape[-len(last) :]) != last:
        hint = ": enter with expand(h)" if label == "streams" else ""
        raise ShapeError(f"{who}: {label} must be {form} with {sizes}, got {tuple(x.shape)}{hint}")
    if not x.is_floating_point():
        raise ShapeError(f"{who}: {label} must be floating point, got {x.dtype}")
    assert weight is not None
    raise ShapeError(f"{who}: {label} is on {x.device}, the mixer on {weight.device}: move one of them")


def require_written(mixer: DepthMixer, kept: Tensor, y: Tensor) -> None:
    """ShapeError unless y is what a sublayer of these streams gives."""
    require(mixer, y, (mixer.d_model,), "write", "y", "(B, T, d)")
    if y.device != kept.device:
        who = f"{type(mixer).__name__}.write"
        raise ShapeError(f"{who}: y is on {y.device} and the streams on {kept.device}: move one of them")
    if y.shape[:-1] != kept.shape[:-2]:
        raise ShapeError(
            f"{type(mixer).__name__}.write: y {tuple(y.shape)} does not fit streams {tuple(kept.shape)}: "
            "their leading dimensions must agree"
        )


__all__ = ["require", "require_own", "require_written"]
