"""Changes that apply to any rule: pure functions from one tuple to another.

    decay       decoupled (1 - lr wd), coupled (in the cost), independent (1 - wd), per_parameter (entry by entry)
    direction   cautious, trust_ratio, grafting, rotational: an h around the h of the last filter
    drive       clipped, grokfast: a filter ahead of all others
    reading     nesterov, schedule_free
    the weights query_key_clip: rows scaled after the step

`optimizer(wrapped)` makes an optimizer of the result: `optimizer(cautious(AdamW.declare()))(model, lr=1e-3)`. A change
that cannot act, or would be undone by one that is already there, is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from axes.core.algorithms import Mix, Momentum, Read, Step, Sum
from axes.core.costs import Linear, Ridge
from axes.core.declared import Recurrence
from axes.core.geometry import Ball, Cautious, ConstantNorm, Decayed, Euclidean, Geometry, Graft, Shrink, TrustRatio
from axes.core.legality import factors
from axes.core.monoids import Decay, Hadamard, Identity, Monoid, Product, Scalar, Zero
from axes.core.rates import Count, Per, Rate, Variable, maximum, where
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine.across import GRADIENT_NORM
from axes.optim.rules.first_order import WEIGHT_DECAY, memoryless

AVERAGE = Per("average")  # the share of the newest weights in their average
KEPT = Per("kept", "row")  # what is left of a row after the step

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
    _decays_outside(update)
    cost = update.cost.cost if isinstance(update.cost, Ridge) else update.cost
    kept = tuple(f for f in factors(update.monoid) if not isinstance(f, Decay | Hadamard))
    return dataclasses.replace(update, cost=cost, monoid=_product(kept))


def _decays_outside(update: StateUpdate) -> None:
    links = (link for f in update.filters() for link in f.parts().h.links())
    if any(isinstance(link, TrustRatio) and not link.drops_factors for link in links):
        raise AxesError("the rule decays inside its trust ratio, where no other decay can stand: set its weight_decay")


def _decays_once(update: StateUpdate) -> None:
    _decays_outside(update)
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


def clipped(
    update: StateUpdate, radius: float = 1.0, norm: Literal["euclidean", "rms", "max", "all"] = "euclidean"
) -> StateUpdate:
    """The gradient, with a coupled decay if there is one, is projected onto a ball before anything sees it.

    norm: "euclidean" clips the norm of every parameter's gradient, "rms" its root mean square, "max" its entries. "all"
    clips the norm over all parameters of the optimizer together, as torch.nn.utils.clip_grad_norm_ does between
    backward and step; without a coupled decay, and not for sharded parameters.
    """
    if norm != "all":
        return _ahead(update, StateUpdate(Linear(), Ball(radius, norm), Zero()))
    if isinstance(update.normal().cost, Ridge):
        raise AxesError("clipped: the norm of all gradients has no coupled decay in it: wrap undecayed(rule)")
    return _ahead(update, all_clip(radius))


def grokfast(update: StateUpdate, alpha: float = 0.98, lamb: float = 2.0) -> StateUpdate:
    """The gradient, with a coupled decay if there is one, and `lamb` times its average before anything sees it.

    alpha: the retention of the average, which begins at the first gradient.

    Source: Lee et al. 2024, algorithm 1 (Grokfast-EMA). Differs: a coupled decay is part of what is averaged.
    """
    if not (0.0 < alpha < 1.0 and lamb > 0.0):
        raise AxesError(f"grokfast: alpha must lie in (0, 1) and lamb be > 0, got {alpha} and {lamb}")
    begun = Count() > 1.0
    keep, write = where(begun, alpha, 0.0), where(begun, 1.0 - alpha, 1.0)
    read = Read(lamb * keep, 1.0 + lamb * write)
    return _ahead(update, StateUpdate(Linear(), Euclidean(), Scalar(keep), Step(write, read=read)))


def grokfast_window(update: StateUpdate, window: int = 100, lamb: float = 5.0) -> StateUpdate:
    """The gradient and `lamb` times the mean of the last `window` ones, once there are so many.

    Its state is one gradient less, of sums of gradients: each a filter that shows what it was given one datum before.

    Source: Lee et al. 2024, algorithm 2 (Grokfast-MA). Differs: a coupled decay is part of what is averaged.
    """
    if window < 2 or not lamb > 0.0:
        raise AxesError(f"grokfast_window: window must be at least 2 and lamb > 0, got {window} and {lamb}")
    weight = where(Count() > window - 1.0, lamb / window, 0.0)
    return _ahead(update, Sum((memoryless(), memoryless(via=_sum_of_last(window))), (1.0, weight)))


def _sum_of_last(n: int) -> tuple[StateUpdate | Sum, ...]:
    """Filters in a row whose output is the sum of the last n drives: twice half of them, the older half delayed.

    Never a difference of running sums, whose rounding would stay; and no deeper than the logarithm of n.
    """
    if n == 1:
        return ()
    before = memoryless(read=Read(1.0, 0.0))
    if n % 2:
        return (Sum((memoryless(), memoryless(via=(before, *_sum_of_last(n - 1)))), (1.0, 1.0)),)
    return (*_sum_of_last(n // 2), Sum((memoryless(), memoryless(via=(before,) * (n // 2))), (1.0, 1.0)))


def _ahead(update: StateUpdate, first: StateUpdate | Sum) -> StateUpdate:
    update = update.normal()
    step = update.parts().step
    return dataclasses.replace(update, algorithm=dataclasses.replace(step, via=(first, *step.via)))


def all_clip(radius: float) -> StateUpdate:
    """The filter that scales every parameter's drive by min(1, radius / norm of all gradients)."""
    if not radius > 0.0:
        raise AxesError(f"clipped: the radius of the ball of all gradients must be positive, got {radius}")
    return StateUpdate(Linear(), Euclidean(), Zero(), Step(radius / maximum(GRADIENT_NORM, radius)))


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
    if not isinstance(monoid, Scalar) or isinstance(monoid.gate, Variable | str) or isinstance(inner.rate, Variable):
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
    if not (0.0 < beta < 1.0 and (isinstance(average, Variable) or 0.0 < average < 1.0)):
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


# ---- the weights -----------------------------------------------------------------------------------------------------


def query_key_clip(update: StateUpdate) -> StateUpdate:
    """Rows of the weights are scaled after every step, by the group's `kept`: 1, or one number a row (`head_factors`).

    The tuple is for the projections to queries and keys; each of them is a parameter group, whose `kept` is set before
    the step from the largest logits of its heads and stays until it is set again.

    Source: Kimi Team 2025 (Kimi K2), section 2.1 and algorithm 1 (QK-Clip, with Muon: MuonClip).
    """
    update = update.normal()
    p = update.parts()
    if not (p.h.is_identity and p.step.read is None):
        raise AxesError("query_key_clip scales the weights themselves: the rule must keep and show them")
    return dataclasses.replace(update, h=Shrink(KEPT), algorithm=dataclasses.replace(p.step, lazy=False))


def head_factors(logits: Tensor, rows: int, threshold: float = 100.0, share: float = 0.5) -> Tensor:
    """`kept` of a projection with this many rows, heads one after another: min(1, threshold / logit)^share.

    logits: the largest scores before the softmax, one a head, over the batch and over all processes. share: 1/2 for
    queries and for keys, so that their products shrink by the whole; 1 for the queries of keys that heads share (the
    rotary part of latent attention, multi-query attention), whose keys stay as they are. For keys that groups of query
    heads share, logits are the largest of each group.
    """
    if logits.ndim != 1 or not logits.numel() or rows % logits.numel():
        raise AxesError(
            f"head_factors: {rows} rows are not a whole number for each of the heads in logits {tuple(logits.shape)}: "
            "pass one largest logit a head"
        )
    if not (threshold > 0.0 and 0.0 < share <= 1.0):
        raise AxesError(f"head_factors: threshold > 0 and share in (0, 1], got {threshold} and {share}")
    factors = (threshold / logits.detach().clamp_min(threshold)) ** share
    return factors.repeat_interleave(rows // logits.numel())


__all__ = [
    "cautious",
    "clipped",
    "coupled",
    "decoupled",
    "grafting",
    "grokfast",
    "grokfast_window",
    "head_factors",
    "independent",
    "nesterov",
    "per_parameter",
    "query_key_clip",
    "rotational",
    "schedule_free",
    "trust_ratio",
    "undecayed",
]
