"""Changes that apply to any rule: pure functions from one tuple to another.

    decay       decoupled (1 - lr wd), coupled (in the cost), independent (1 - wd), per_parameter (entry by entry)
    direction   cautious, trust_ratio, grafting, rotational: an h around the h of the last filter
    drive       clipped: a memoryless filter ahead of all others
    reading     nesterov, schedule_free

`optimizer(wrapped)` makes an optimizer of the result: `optimizer(cautious(AdamW.declare()))(model, lr=1e-3)`. A change
that cannot act, or would be undone by one that is already there, is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from axes.core.algorithms import Mix, Momentum, Read, Step, Sum
from axes.core.costs import Linear, Ridge
from axes.core.declared import Recurrence
from axes.core.geometry import Ball, Cautious, ConstantNorm, Decayed, Euclidean, Geometry, Graft, TrustRatio
from axes.core.legality import factors
from axes.core.monoids import Decay, Hadamard, Identity, Monoid, Product, Scalar, Zero
from axes.core.rates import Per, Rate
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.rules.first_order import WEIGHT_DECAY

AVERAGE = Per("average")  # the share of the newest weights in their average

# ---- weight decay --------------------------------------------------------------------------------------------------


def decoupled(update: StateUpdate, weight: Rate = WEIGHT_DECAY) -> StateUpdate:
    """W = (1 - lr weight) W + ...: the weights decay with the step size (AdamW)."""
    return _retaining(update, Decay(weight))


def independent(update: StateUpdate, weight: Rate = WEIGHT_DECAY) -> StateUpdate:
    """W = (1 - weight) W + ...: the weights decay whatever the step size is."""
    return _retaining(update, Decay(weight, independent=True))


def per_parameter(update: StateUpdate, retention: str = "retention") -> StateUpdate:
    """W = a * W + ... entry by entry; log a is the tensor `retention` of the parameter group, broadcast to matrices.

    With log a = log(1 - lr weight_ij) it is decoupled decay with a weight for every parameter.
    """
    return _retaining(update, Hadamard(retention))


def coupled(update: StateUpdate, weight: Rate = WEIGHT_DECAY) -> StateUpdate:
    """g + weight W instead of g: the loss decays, and every filter sees it (Adam)."""
    update = update.normal()
    _decays_once(update)
    return dataclasses.replace(update, cost=Ridge(update.cost, weight))


def undecayed(update: StateUpdate) -> StateUpdate:
    """The rule without the weight decays of this module."""
    update = update.normal()
    cost = update.cost.cost if isinstance(update.cost, Ridge) else update.cost
    kept = tuple(f for f in factors(update.monoid) if not isinstance(f, Decay | Hadamard))
    return dataclasses.replace(update, cost=cost, monoid=_product(kept))


def _decays_once(update: StateUpdate) -> None:
    if isinstance(update.cost, Ridge) or any(isinstance(f, Decay | Hadamard) for f in factors(update.monoid)):
        raise AxesError("the rule already decays its weights: two decays would add up; wrap undecayed(rule) instead")


def _retaining(update: StateUpdate, decay: Monoid) -> StateUpdate:
    update = update.normal()
    _decays_once(update)
    last = _last(update)
    if last is not None and isinstance(last.h, ConstantNorm):
        raise AxesError("a rotational update keeps the norm of the weights: a decay would undo it")
    kept = tuple(f for f in factors(update.monoid) if not isinstance(f, Identity))
    return dataclasses.replace(update, monoid=_product((decay, *kept)))


def _product(parts: tuple[Monoid, ...]) -> Monoid:
    return Product(parts) if len(parts) > 1 else parts[0] if parts else Identity()


# ---- the direction ---------------------------------------------------------------------------------------------------


def cautious(update: StateUpdate, variant: Literal["count", "mean"] = "count") -> StateUpdate:
    """Entries of the direction that disagree in sign with what the last filter was given are left out.

    variant: how the others are rescaled, see `axes.geometry.Cautious`. A rule with several filters compares with the
    output of the one before the last.
    """
    return _around(update, lambda h: Cautious(h, variant))


def trust_ratio(update: StateUpdate) -> StateUpdate:
    """The direction is rescaled to the norm of the weights, parameter by parameter (LARS, LAMB without decay)."""
    return _around(update, TrustRatio)


def grafting(update: StateUpdate, magnitude: StateUpdate) -> StateUpdate:
    """The direction of `update` with the norm of the direction of `magnitude`, parameter by parameter.

    magnitude: a rule for the same parameters, of which the filters count: its step size and decay do not. The two may
    differ in their last filter only.

    Raises:
        AxesError: earlier filters differ, or the last one of `magnitude` has a read point, which a statistic cannot.
    """
    update, magnitude = update.normal(), magnitude.normal()
    mine, theirs = _via(update), _via(magnitude)
    if mine[:-1] != theirs[:-1]:
        raise AxesError("grafting: the two rules must have the same filters before the last one")
    norm = _last(magnitude) or StateUpdate(Linear(), Euclidean(), Zero())
    if norm.parts().step.read is not None:
        raise AxesError("grafting: the norm comes from a statistic, which has no read point: take the rule without it")
    return _around(update, lambda h: Graft(h, norm))


def rotational(update: StateUpdate, axis: Literal["whole", "rows"] = "whole") -> StateUpdate:
    """Every step keeps the norm of a parameter, or of each of its rows, and turns it by about lr radians.

    Decays, which have no effect on a direction, are taken away.
    """
    update = undecayed(update)
    p = update.parts()
    if not (p.h.is_identity and isinstance(p.monoid, Identity)):
        raise AxesError("a rotational update turns the weights themselves: they must be kept and have Euclidean h")
    last = _last(update)
    if last is not None and isinstance(last.h, ConstantNorm):
        raise AxesError("the update is rotational already")
    return _around(update, lambda base: ConstantNorm(base, p.step.rate, axis))


def _via(update: StateUpdate) -> tuple[StateUpdate | Sum, ...]:
    return update.parts().step.via  # type: ignore[return-value]


def _last(update: StateUpdate) -> StateUpdate | None:
    via = _via(update)
    if via and isinstance(via[-1], Sum):
        raise AxesError("filters side by side have no common direction: wrap each of them")
    return via[-1] if via else None  # type: ignore[return-value]


def _around(update: StateUpdate, wrap: Callable[[Geometry], Geometry]) -> StateUpdate:
    """`wrap` around the h of the last filter, inside of a rotational one; a memoryless filter if there is none."""
    update = update.normal()
    step = update.parts().step
    last = _last(update)
    if last is None:
        return _with_last(update, (), StateUpdate(Linear(), wrap(Euclidean()), Zero()))
    h, inner = last.parts().h, last.parts().step
    if inner.start == "W0":
        raise AxesError("the last filter gives weights and no direction: wrap the rule, then schedule_free(rule)")
    h = dataclasses.replace(h, base=wrap(h.base)) if isinstance(h, ConstantNorm) else wrap(h)
    if h.scale_free and inner.debias:  # nothing is left to correct
        inner = dataclasses.replace(inner, debias=False)
    return _with_last(update, step.via[:-1], dataclasses.replace(last, h=h, algorithm=inner))


def _with_last(update: StateUpdate, before: tuple[Recurrence | Sum | Momentum, ...], last: StateUpdate) -> StateUpdate:
    step = update.parts().step
    return dataclasses.replace(update, algorithm=dataclasses.replace(step, via=(*before, last)))


# ---- the drive -------------------------------------------------------------------------------------------------------


def clipped(update: StateUpdate, radius: float = 1.0, norm: Literal["euclidean", "max"] = "euclidean") -> StateUpdate:
    """The gradient, with a coupled decay if there is one, is projected onto a ball before anything sees it.

    norm: "euclidean" clips the norm of every parameter's gradient, "max" its entries. The norm over all parameters
    together is torch.nn.utils.clip_grad_norm_, between backward and step.
    """
    update = update.normal()
    step = update.parts().step
    clip = StateUpdate(Linear(), Ball(radius, norm), Zero())
    return dataclasses.replace(update, algorithm=dataclasses.replace(step, via=(clip, *step.via)))


# ---- reading ---------------------------------------------------------------------------------------------------------


def nesterov(update: StateUpdate) -> StateUpdate:
    """The last filter is read one step ahead:  w u + beta m  instead of  m = beta m + w u.

    SGD becomes its nesterov form, and AdamW NAdam.
    """
    update = update.normal()
    last = _last(update)
    if last is None:
        raise AxesError("nesterov reads a momentum buffer ahead: the rule has none")
    monoid, inner = last.parts().monoid, last.parts().step
    if not isinstance(monoid, Scalar) or isinstance(monoid.gate, Per | str) or isinstance(inner.rate, Per):
        raise AxesError(f"nesterov needs a last filter with a constant retention and rate, not {monoid!r}")
    if inner.read is not None:
        raise AxesError("the last filter is read elsewhere already")
    beta, weight = monoid.gate, inner.rate
    inner = dataclasses.replace(inner, read=Read(beta * beta, weight + beta * weight))
    return _with_last(update, _via(update)[:-1], dataclasses.replace(last, algorithm=inner))


def schedule_free(
    update: StateUpdate, beta: float = 0.9, average: Rate = AVERAGE, decay_at: Literal["y", "z"] = "y"
) -> StateUpdate:
    """The rule moves z; the gradient is taken at  y = beta x + (1 - beta) z,  x = (1 - average) x + average z.

    The parameter shows y while it trains; x, the weights to use, is `theta` in its state.  average: by default a rate
    of the parameter group, which `axes.optim.ScheduleFree` sets so that x is a uniform or weighted average; a number
    makes it an exponential one.

    decay_at: whether a decoupled decay of the rule moves z by lr weight "y", where the gradient is, or by lr weight
    "z". A coupled one is of the gradient's point; one that does not scale with lr, or is given by entries, is of z.

    Source: Defazio et al. 2024, eq. 3-5; the decay at y is their code's, its default.
    """
    update = update.normal()
    p = update.parts()
    if not (0.0 < beta < 1.0 and (isinstance(average, Per) or 0.0 < average < 1.0)):
        raise AxesError(f"schedule_free: beta and average must lie in (0, 1), got {beta} and {average}")
    if not p.h.is_identity or p.step.read is not None or p.step.at != "prev":
        raise AxesError("schedule_free averages the weights of a rule that keeps and shows them")
    if decay_at not in ("y", "z"):
        raise AxesError(f"schedule_free: decay_at {decay_at!r} is not y or z")
    if decay_at == "y":
        update = _decaying_inside(update)
        p = update.parts()
    fast = StateUpdate(Linear(), Euclidean(), p.monoid, Step(p.step.rate, via=p.step.via, start="W0"))
    return StateUpdate(p.cost, Euclidean(), Decay(1.0), Step(average, at="read", via=(fast,), read=Mix(beta)))


def _decaying_inside(update: StateUpdate) -> StateUpdate:
    """The rule with a decay that scales with its step size moved from the weights into the direction."""
    inside = [f for f in factors(update.monoid) if isinstance(f, Decay) and not f.independent]
    kept = tuple(f for f in factors(update.monoid) if f not in inside)
    update = dataclasses.replace(update, monoid=_product(kept))
    for decay in inside:
        update = _around(update, lambda base, weight=decay.weight: Decayed(base, weight))  # type: ignore[misc]
    return update


__all__ = [
    "cautious",
    "clipped",
    "coupled",
    "decoupled",
    "grafting",
    "independent",
    "nesterov",
    "per_parameter",
    "rotational",
    "schedule_free",
    "trust_ratio",
    "undecayed",
]
