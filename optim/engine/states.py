"""The state of a parameter: how it begins, and as its tuple sees it.

It is kept as a flat dict (`trees`) in stored forms (`stored`); to its tuple a parameter is a matrix, at least in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from axes.core.facts import fact
from axes.core.geometry import Context
from axes.core.rates import SEEN, resolve
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.optim.engine import stored, trees
from axes.optim.engine.groups import rates
from axes.optim.engine.layouts import PLAIN, Layout
from axes.optim.engine.options import Group, how
from axes.optim.engine.places import Places
from axes.optim.engine.precision import Precision
from axes.optim.engine.together import start

Flat = dict[str, Tensor]


# ---- a parameter is a matrix, or a batch of matrices -----------------------------------------------------------------


def canonical(tensor: Tensor, layout: Layout = PLAIN) -> Tensor:
    """A parameter or gradient as a matrix or a batch of them, at least in float32."""
    x = layout.matrices(tensor.detach())
    return x.to(torch.promote_types(x.dtype, torch.float32))


def show(parameter: Tensor, weights: Tensor, layout: Layout = PLAIN) -> None:
    """Matrices into their parameter."""
    target = layout.seen(parameter)
    target.copy_(weights.reshape(target.shape))


def _datum(parameter: Tensor, layout: Layout) -> Flat:
    """What a parameter's datum looks like, without storage."""
    return _datum_of(layout.shape(parameter), _arithmetic(parameter))


def _arithmetic(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter is stepped."""
    return torch.promote_types(parameter.real.dtype if parameter.is_complex() else parameter.dtype, torch.float32)


def _datum_of(shape: tuple[int, ...], dtype: torch.dtype) -> Flat:
    m, n = shape[-2:]
    shapes = {"g": shape, "k": (n,), "v": (m,), "e": (m,)}
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


# ---- theta -----------------------------------------------------------------------------------------------------------


def theta_0(update: StateUpdate, parameter: Tensor, layout: Layout = PLAIN) -> Tensor:
    """The dual of the parameter where a mirror map is carried, else the parameter."""
    p = update.parts()
    w = canonical(parameter, layout)
    return w if p.h.is_identity or not p.step.lazy else p.h.subgradient(w)


def require_inside(places: Places, update: StateUpdate, parameter: Tensor) -> None:
    """AxesError unless the parameter is where a mirror map that is carried has a dual for it."""
    h = update.parts().h
    if h.is_identity or not update.parts().step.lazy:
        return
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(parameter.dtype, 2e-2)
    if not bool(h.contains(canonical(parameter, places.layout(parameter)), tolerance).all()):
        raise AxesError(
            f"{places.who}: {places.label(parameter)} is not in the set of {h!r}: initialise it there, for example "
            "with h.primal"
        )


def evaluation_point(group: Group, update: StateUpdate, theta: Tensor, seen: Tensor | int = 0) -> Tensor:
    """The weights at which a tuple wants its gradient after `seen` data, where it is not what the parameter shows."""
    p = update.parts()
    signal = {**rates(group, update, theta), SEEN: seen}
    if p.step.at == "gated":
        element = p.monoid.element(signal, resolve(p.step.rate, signal), theta)
        (theta,) = p.memory.act(element, (theta,))
    return theta if p.h.is_identity or not p.step.lazy else p.h.primal(theta, Context(signal=signal))


# ---- states ----------------------------------------------------------------------------------------------------------


def first(update: StateUpdate, parameter: Tensor, datum: Mapping[str, Any], layout: Layout = PLAIN) -> Flat:
    """The state before a first datum."""
    return trees.flatten(update, update.init(datum, (theta_0(update, parameter, layout),)))


def begin(who: str, group: Group, update: StateUpdate, parameter: Tensor, layout: Layout = PLAIN) -> Flat:
    """The state before any datum, as it is kept."""
    zeros = {n: parameter.new_zeros((), dtype=x.dtype).expand(x.shape) for n, x in _datum(parameter, layout).items()}
    forms = Precision.of(group).forms(who, update, parameter)
    flat = start(first(update, parameter, zeros, layout), parameter)
    return at_home(group, parameter, stored.begin(flat, forms, parameter))


def expected(
    who: str, group: Group | None, update: StateUpdate, parameter: Tensor, layout: Layout = PLAIN
) -> Flat:
    """The same without storage: names, shapes and, in the stored forms of a group, dtypes."""
    flat = dict(_without_storage(update, layout.shape(parameter), _arithmetic(parameter)))
    return flat if group is None else stored.begin(flat, Precision.of(group).forms(who, update, parameter), parameter)


@fact
def _without_storage(update: StateUpdate, shape: tuple[int, ...], dtype: torch.dtype) -> Flat:
    """The first state of a matrix of this shape, worked out once for all of them."""
    datum = _datum_of(shape, dtype)
    return trees.flatten(update, update.init(datum, (datum["g"],)))


def at_home(group: Group, parameter: Tensor, flat: Flat) -> Flat:
    """A state whose tensors are where they belong: counts on the host, unless nothing may wait for the device."""
    hosted = how(group) == "host"
    return {
        n: x.to("cpu" if trees.counts(n) and hosted else parameter.device, copy=trees.counts(n))
        for n, x in flat.items()
    }


def read(update: StateUpdate, parameter: Tensor, flat: Flat, layout: Layout = PLAIN) -> State:
    """A kept state as its tuple sees it; KeyError where a part is missing."""
    return trees.unflatten(update, stored.opened(flat), canonical(stored.weights(parameter, flat), layout))


def counts(flat: Flat) -> dict[str, int]:
    """The counts of a state."""
    return {n: int(x) for n, x in flat.items() if trees.counts(n)}
