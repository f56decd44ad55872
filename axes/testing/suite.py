"""The common suite for a tuple of your own: what every update owes its reader, and a formula that it should equal.

>>> from axes import Per, StateUpdate, Step
>>> from axes.costs import SquaredError
>>> from axes.testing.suite import agrees, check
>>> delta = StateUpdate(SquaredError(), algorithm=Step(Per("beta")))
>>> check(delta)

With pytest each check is a test of its own:

>>> class TestDelta(Suite):
...     update = delta
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from axes.core import reference
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.testing.checks import CHECKS, Check, checks
from axes.testing.examples import error, example, leaves

Formula = Callable[..., Tensor]


def check(instance: object) -> None:
    """Run every check that applies to a tuple, or to anything with an `update`.

    instance: its `known_failures`, pairs (name of a check, reason), are expected to fail.

    Raises:
        AssertionError: names every check that failed, and every excuse that was not needed.
        AxesError: there is no tuple, or an excuse for no check.
    """
    update, found = _update(instance), []
    for one, excuse in checks(instance):
        failed = _failure(one, update)
        if failed is not None and excuse is None:
            found.append(f"{one.__name__}: {failed}")
        elif failed is None and excuse is not None:
            found.append(f"{one.__name__}: passes, where a failure was expected ({excuse}): take the excuse away")
    if found:
        raise AssertionError(f"{update!r} fails\n  " + "\n  ".join(found))


def agrees(
    instance: object, formula: Formula, tolerance: float = 1e-10, *, d_k: int = 4, d_v: int = 6, length: int = 17
) -> None:
    """The interpreter gives what a formula of your own gives, in float64 on random sequences of several seeds.

    Args:
        instance: a tuple with keys, or anything with such an `update`.
        formula: is called with what the tuple asks for by name, one sequence at a time: keyword arguments q, k
            (length, d_k), v (length, d_v) and every rate (length, ...), gates as factors in (0, 1), not as logs. It
            returns the outputs (length, d_v). A plain loop of the paper's equation is best: nothing of this package.
        tolerance: of the largest difference, relative to the largest output (at least 1).

    Raises:
        AssertionError: they differ; says by how much and from which token on.
        AxesError: the tuple has no keys (step its optimizer beside the formula instead), or the formula does not take
            what the tuple asks for, or gives no tensor.
    """
    update = _update(instance)
    if not update.parts().memory.keyed:
        raise AxesError(
            "agrees: a tuple that is driven by given gradients has no sequence to run on; step "
            "axes.optim.optimizer(update) beside your formula in float64 and compare the weights"
        )
    unit = {per.name for per in update.demands() if per.domain == "unit"}
    for seed in range(3):
        signal = example(update, batch=(), length=length, d_k=d_k, d_v=d_v, seed=seed)
        found, _ = reference.run(update, signal, time=0)
        given = {name: torch.exp(x) if name in unit else x for name, x in _tensors(signal).items()}
        arguments = {name: x.clone() for name, x in given.items()}
        try:
            inspect.signature(formula).bind(**arguments)
        except TypeError as misfit:
            raise AxesError(f"agrees: the formula must take {', '.join(sorted(arguments))}: {misfit}") from misfit
        expected = formula(**arguments)
        if not isinstance(expected, Tensor):
            raise AxesError(f"agrees: the formula must return outputs {tuple(found.shape)}, got {expected!r}")
        if expected.shape != found.shape:
            raise AssertionError(f"the formula returns {tuple(expected.shape)}, the tuple {tuple(found.shape)}")
        gap = error(found, expected)
        if not gap <= tolerance:
            apart = [t for t in range(length) if not error(found[t], expected[t]) <= tolerance]
            raise AssertionError(
                f"{update!r} is {gap:.1e} away from the formula (allowed {tolerance:.0e}), first at token {apart[0]} "
                f"of {length} (seed {seed})"
            )


def learns(module: nn.Module, *inputs: Any) -> None:
    """A gradient reaches every parameter of a module that trains: a layer, a mixer, a model.

    inputs: what it is called with. Of several outputs the first is looked at: a state may know more than is ever read.

    Raises:
        AssertionError: names the parameters that get none, zeros, or what is not finite.
    """
    y = leaves(module(*inputs))[0]
    if not y.requires_grad:
        raise AssertionError(f"{type(module).__name__}: the output depends on no parameter")
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))  # no symmetry hides a parameter
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad((y * weights.to(y)).sum(), list(named.values()), allow_unused=True)
    faults = {}
    for (name, _), g in zip(named.items(), gradients, strict=True):
        if g is None or not g.any():
            faults[name] = "no gradient"
        elif not g.isfinite().all():
            faults[name] = "a gradient that is not finite"
    if faults:
        told = ", ".join(f"{name} ({fault})" for name, fault in faults.items())
        raise AssertionError(f"{type(module).__name__} does not learn {told}")


class Suite:
    """The checks as a class of pytest: `class TestMine(Suite): update = mine`. See `check`."""

    update: StateUpdate
    known_failures: tuple[tuple[str, str], ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for one in CHECKS:
            name = one.__name__.replace("check_", "test_", 1)
            if name not in vars(cls):
                setattr(cls, name, _test(one))


def _test(one: Check) -> Callable[[Suite], None]:
    def test(self: Suite) -> None:
        for applies, excuse in checks(self):
            if applies is one:
                _hold(one, _update(self), excuse)

    test.__name__, test.__doc__ = one.__name__.replace("check_", "test_", 1), one.__doc__
    return test


def _hold(one: Check, update: StateUpdate, excuse: str | None) -> None:
    if excuse is None:
        one(update)
    elif _failure(one, update) is None:
        raise AssertionError(f"passes, where a failure was expected ({excuse}): take the excuse away")


def _failure(one: Check, update: StateUpdate) -> str | None:
    """What a check has to say, or None if it holds. An error on its way, of whoever, is a failure too."""
    try:
        one(update)
    except Exception as failed:
        kind = "" if isinstance(failed, AssertionError) else f"{type(failed).__name__}: "
        return kind + str(failed)
    return None


def _update(instance: object) -> StateUpdate:
    update = instance if isinstance(instance, StateUpdate) else getattr(instance, "update", None)
    if not isinstance(update, StateUpdate):
        raise AxesError(f"{instance!r} is neither a StateUpdate nor something with an `update`")
    return update


def _tensors(signal: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    return {name: x for name, x in signal.items() if isinstance(x, Tensor)}


__all__ = ["Formula", "Suite", "agrees", "check", "learns"]
