"""The common suite: what every update owes its reader.

`checks(instance)` yields each check that applies with the reason why it is expected to fail, or None. A check takes
the update and raises AssertionError.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from axes.core import algorithms, costs, geometry, memory, monoids, rates, reference, state_update
from axes.core.declared import Declared
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.routes import dispatch
from axes.testing.declarations import check_declarations
from axes.testing.examples import error, example, gradients, identical, leaves, narrowed, time_of, trajectory
from axes.testing.gauges import GAUGES, Gauge
from axes.testing.mutations import mutation_law, mutations

Check = Callable[[StateUpdate], None]

# Measured over all systems of the tests in float64: routes differ from the interpreter by up to 3e-12 in a value (a
# normaliser close to zero) and 1e-11 in a gradient. They are relative to the largest entry.
TOLERANCE = 1e-9


def check_pickle(update: StateUpdate) -> None:
    """A pickled and a deep-copied tuple equal the original, and hash alike."""
    for again in (pickle.loads(pickle.dumps(update)), copy.deepcopy(update)):
        assert again == update and hash(again) == hash(update), f"{again!r} differs from {update!r}"


def check_repr(update: StateUpdate) -> None:
    """The repr is the declaration: evaluated among the parts, those of others too, it gives an equal tuple."""
    again = eval(repr(update), {**NAMES, **{cls.__name__: cls for cls in _classes(update)}})
    assert again == update, f"{again!r} is not {update!r}"
    assert repr(again) == repr(update)


def check_normal_form(update: StateUpdate) -> None:
    """The normal form is its own normal form, equals the tuple, and computes the same numbers bit for bit."""
    normal = update.normal()
    assert normal.normal() is normal and normal == update and hash(normal) == hash(update)
    signal = example(update)
    assert identical(trajectory(update, signal), trajectory(normal, signal)), "sugar changes the numbers"


def check_deterministic(update: StateUpdate) -> None:
    """The same data give the same bits, and they are finite."""
    signal = example(update)
    first, second = trajectory(update, signal), trajectory(update, signal)
    assert identical(first, second), "two runs differ"
    assert all(bool(x.isfinite().all()) for x in leaves(first) if x.is_floating_point()), "not finite"


def check_state_round_trip(update: StateUpdate) -> None:
    """A state survives torch.save and a weights-only load, and continues bit for bit."""
    signal = example(update)
    time = time_of(update, signal)
    _, state = trajectory(update, narrowed(signal, time, 0, 4))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=True)
    rest = narrowed(signal, time, 4, 7)
    assert identical(trajectory(update, rest, state), trajectory(update, rest, again)), "a loaded state differs"


def check_split(update: StateUpdate) -> None:
    """A run in two parts is the whole run."""
    signal = example(update)
    time = time_of(update, signal)
    whole, final = trajectory(update, signal)
    head, state = trajectory(update, narrowed(signal, time, 0, 3))
    if update.parts().step.at == "read":
        return  # the point of the next gradient is an output, which a state does not hold
    tail, last = trajectory(update, narrowed(signal, time, 3, 7), state)
    assert identical((whole, final), (torch.cat((head, tail), time), last)), "a split run differs"


def check_routes(update: StateUpdate) -> None:
    """The selected route equals the interpreter: outputs, final state, and the gradients of all inputs."""
    signal = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in example(update, length=19).items()}
    time = time_of(update, signal)
    expected = reference.run(update, signal, time=time)
    found = dispatch.run(update, signal, time=time)
    gap = error(found, expected)
    assert gap < TOLERANCE, f"outputs or state off by {gap:.1e}"
    gap = error(gradients(found, signal), gradients(expected, signal))
    assert gap < TOLERANCE, f"gradients off by {gap:.1e}"


def check_gradients(update: StateUpdate) -> None:
    """Every input that the outputs depend on gets a finite gradient."""
    signal = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in example(update).items()}
    for name, gradient in zip(signal, gradients(trajectory(update, signal), signal), strict=True):
        assert bool(gradient.isfinite().all()), f"the gradient of {name!r} is not finite"


def check_mutation_law(update: StateUpdate) -> None:
    """See `mutation_law`."""
    mutation_law(update)


CHECKS: tuple[Check, ...] = (
    check_pickle,
    check_repr,
    check_normal_form,
    check_deterministic,
    check_state_round_trip,
    check_split,
    check_routes,
    check_gradients,
    check_declarations,
    check_mutation_law,
)


def checks(instance: object) -> Iterator[tuple[Check, str | None]]:
    """Each check that applies, with the reason why it is expected to fail, or None.

    instance: a StateUpdate, or anything with an `update`; its `known_failures`, pairs (check name, reason), are the
    excuses. Naming an unknown check is an error: an excuse must not outlive what it excuses.
    """
    update = instance if isinstance(instance, StateUpdate) else getattr(instance, "update", None)
    if not isinstance(update, StateUpdate):
        raise AxesError(f"checks: {instance!r} is neither a StateUpdate nor something with an `update`")
    excuses: dict[str, str] = dict(getattr(instance, "known_failures", ()))
    unknown = set(excuses) - {check.__name__ for check in CHECKS}
    if unknown:
        raise AxesError(f"checks: known_failures names {', '.join(sorted(unknown))}, which no check is called")
    for check in CHECKS:
        if check is check_routes and not update.parts().memory.keyed:
            continue
        yield check, excuses.get(check.__name__)


def _classes(part: object) -> Iterator[type]:
    """The classes of a part and of all that is in it."""
    if isinstance(part, Declared):
        yield type(part)
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            yield from _classes(getattr(part, field.name))
    for inner in part if isinstance(part, tuple) else ():
        yield from _classes(inner)


def _names(modules: Iterable[types.ModuleType]) -> Mapping[str, object]:
    """The classes that a repr may name."""
    found: dict[str, object] = {}
    for name, value in (item for module in modules for item in vars(module).items()):
        if isinstance(value, type) and issubclass(value, Declared):
            assert found.setdefault(name, value) is value, f"two parts are called {name}: a repr would name either"
    return found


NAMES = {
    **_names((rates, costs, geometry, monoids, algorithms, memory, state_update)),
    **{function.__name__: function for function in (rates.minimum, rates.maximum, rates.where, rates.log)},
}

__all__ = [
    "CHECKS",
    "GAUGES",
    "Check",
    "Gauge",
    "checks",
    "error",
    "example",
    "leaves",
    "mutation_law",
    "mutations",
    "trajectory",
]
