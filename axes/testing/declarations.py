"""What parts declare of themselves, tried on tensors: routes and adapters believe it without asking."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from axes.core.costs import Cost, Linear
from axes.core.geometry import Context, Geometry
from axes.core.legality import factors
from axes.core.monoids import Monoid
from axes.core.rates import SEEN, Per, Rate, Signal, resolve
from axes.core.state_update import StateUpdate

_SIZE = 4  # of square matrices and of vectors
_SHAPES = {"scalar": (), "key": (_SIZE,), "row": (_SIZE,), "square": (_SIZE, _SIZE), "pair": (_SIZE // 2,)}
_SHAPES["row-pair"] = _SHAPES["pair"]
_LOW = -40.0  # where logits are cut that would be infinite


def check_declarations(update: StateUpdate) -> None:
    """Entry by entry, on a sphere, neutral, of a strength, driven by the error: every part is what it says."""
    for cost, h, monoid in _parts(update):
        if h.entrywise:
            _acts_entry_by_entry(h)
        if h.sphere is not None:
            _lies_on_its_sphere(h)
        if all(f.rates() and all(isinstance(r, Per) for r in f.rates()) for f in factors(monoid)):
            _is_neutral(monoid)
        for f in factors(monoid):
            if f.strength is not None:
                _is_so_strong(f, f.strength)
        if not isinstance(cost, Linear) and cost.drives is not None:
            _is_driven_so(cost)


def _parts(update: StateUpdate) -> Iterator[tuple[Cost, Geometry, Monoid]]:
    cost, h, monoid, _, _ = update.parts()
    yield cost, h, monoid
    for inner in (*update.filters(), *h.stats):
        yield from _parts(inner)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _supplied(rates: tuple[Rate, ...]) -> dict[str, Tensor | float]:
    named = sorted((r for r in rates if isinstance(r, Per)), key=lambda r: r.name)
    return {SEEN: 2, **{r.name: _random(i, *_SHAPES[r.shape]).sigmoid() for i, r in enumerate(named)}}


def _acts_entry_by_entry(h: Geometry) -> None:
    """What the other entries are makes no difference, nor where an entry stands."""
    theta, stats = _random(0, _SIZE, _SIZE), [_random(i, _SIZE, _SIZE).square() for i, _ in enumerate(h.stats, 1)]
    signal, kept = _supplied(h.rates()), _random(90, _SIZE, _SIZE) > 0
    first = h.primal(theta, Context(stats=tuple(stats), signal=signal))
    others = [torch.where(kept, x, 3 * x.flip(0) + 1) for x in (theta, *stats)]
    second = h.primal(others[0], Context(stats=tuple(others[1:]), signal=signal))
    assert torch.equal(first[kept], second[kept]), f"{h!r} says that it acts entry by entry, and mixes them"


def _lies_on_its_sphere(h: Geometry) -> None:
    assert h.sphere is not None
    axis, radius = h.sphere
    theta = _random(0, _SIZE, _SIZE)
    dims = {"rows": (-1,), "columns": (-2,), "whole": (-2, -1)}[axis]
    length = _SIZE ** (len(dims) / 2) if radius is None else radius
    expected = theta * (length / theta.square().sum(dims, keepdim=True).sqrt())
    torch.testing.assert_close(h.primal(theta), expected, msg=f"{h!r} is not the projection that it says")


def _is_neutral(monoid: Monoid) -> None:
    """At its neutral rates, and at open gates, the state is kept."""
    at, signal = monoid.neutral(), {name: _random(i, _SIZE) for i, name in enumerate(sorted(monoid.signals()))}
    given: dict[str, Tensor | float] = {**signal}
    slots = next((r.size for r in monoid.rates() if isinstance(r, Per) and r.size is not None), _SIZE)
    state = _random(50, slots, _SIZE)
    for name, value in at.items():
        given[name] = value.identity_logits(state[0], _LOW) if isinstance(value, Geometry) else state[0] * 0 + value
    for rate in monoid.rates():
        if isinstance(rate, Per) and (rate.shape in _SHAPES or rate.size is not None):
            value = at.get(rate.name, 1.0)
            assert not isinstance(value, Geometry), f"{monoid!r}: {rate.name!r} has no logits"
            level = float(torch.tensor(value).log()) if rate.domain == "unit" else value
            given[rate.name] = state.new_full(_SHAPES.get(rate.shape, (slots,)), level)
    kept = monoid.element(given, 1.0, state).act(state)
    torch.testing.assert_close(kept, state, rtol=1e-6, atol=1e-6, msg=f"{monoid!r} is not the identity at {at}")


def _is_so_strong(monoid: Monoid, strength: Rate) -> None:
    """The map is I + a b^T with b the vector that it names and a that vector times its strength, negated."""
    assert monoid.along is not None, f"{monoid!r} names a strength and no vector that it is of"
    vectors = {name: _random(i, _SIZE) for i, name in enumerate(sorted(monoid.signals()))}
    given = {**_supplied(monoid.rates()), **vectors}
    found, along = monoid.element(given, 1.0, _random(50, _SIZE, _SIZE)), vectors[monoid.along]
    assert found.left is not None and found.right is not None
    for vector, expected in ((found.right, along), (found.left, -(along * resolve(strength, given)))):
        torch.testing.assert_close(vector[:, 0], expected, msg=f"{monoid!r} has not the strength that it says")


def _is_driven_so(cost: Cost) -> None:
    prediction, target, c = _random(0, 3, _SIZE), _random(1, 3, _SIZE), 0.7
    signal: Signal = _supplied(cost.rates())
    for shrunk in (0.0, c):
        found = -cost.residual(prediction, target, shrunk, signal)
        expected = target if cost.drives == "target" else (target - prediction) / (1 + shrunk)
        torch.testing.assert_close(found, expected, msg=f"{cost!r} is not driven by the {cost.drives}")
