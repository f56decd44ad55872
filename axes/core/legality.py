"""Which tuples make sense: each rule names the parts, why they cannot act together, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from axes.core.algorithms import Anchor, Held, Mix
from axes.core.costs import Alignment, Linear
from axes.core.geometry import (
    Eigenbasis,
    Entropic,
    FittedFactor,
    Geometry,
    InverseRoot,
    Kronecker,
    RotatedWhiten,
    Whiten,
)
from axes.core.memory import MLP, Entries, LayerNormMatrix, List, Matrix, Slots
from axes.core.monoids import Decay, Diagonal, Identity, Monoid, Product, Zero
from axes.core.rates import Per, rate_shape
from axes.errors import IllegalUpdate

if TYPE_CHECKING:
    from axes.core.state_update import StateUpdate


def check(update: StateUpdate) -> None:
    """Raise IllegalUpdate with the first reason why a normal form is not legal."""
    for reason in _reasons(update):
        raise IllegalUpdate(f"StateUpdate({type(update.cost).__name__}, {type(update.h).__name__}, ...): {reason}")


def _reasons(update: StateUpdate) -> Iterator[str]:
    cost, h, monoid, step, memory = update.parts()
    oracle = "g" in cost.needs
    outside = oracle or isinstance(cost, Linear)
    sees_state = update.drive_sees_state
    kinds = gates(monoid)

    if outside and memory.keyed:
        yield f"{type(memory).__name__} memory predicts from keys; this gradient comes from outside: use Parameter()"
    if not outside and not memory.keyed:
        yield f"Parameter() memory predicts nothing, {type(cost).__name__} needs a prediction: use Matrix() or Given()"
    if not isinstance(step.rate, Per) and step.rate == 0.0:
        yield "a step size of zero learns nothing"

    # settings without effect
    if step.at == "gated" and isinstance(monoid, Identity):
        yield "at='gated' needs a gate: with the identity monoid it is at='prev'"
    if step.at == "gated" and isinstance(monoid, Zero):
        yield "at='gated' after a gate that keeps nothing evaluates at the empty memory, whatever the state was"
    if step.at == "gated" and h.scale_free and kinds == {"scalar"}:
        yield f"at='gated' has no effect: {type(h).__name__} drops the factor of a scalar gate, so it is at='prev'"
    if isinstance(step.at, Held):
        if not isinstance(cost, Linear):
            yield "at=Held(...) is for statistics: the gradient is taken at prev, gated, read, new or an Anchor"
        if h.is_identity:
            yield "at=Held(...) keeps what h makes of a statistic, and Euclidean h makes nothing of it"
    elif isinstance(cost, Linear) and step.at != "prev":
        yield f"at={step.at!r} has no effect on a cost that is linear in the drive"
    if not outside and not sees_state and step.at != "prev":
        yield f"at={step.at!r} has no effect: the gradient of {type(cost).__name__} does not depend on the state"
    if step.steps > 1 and (outside or not sees_state or step.via or step.at == "new" or isinstance(step.at, Anchor)):
        yield "steps > 1 needs a gradient that depends on the state, taken here, unfiltered: scale the rate instead"
    if not step.lazy and (h.is_identity or h.invertible or h.stats):
        yield f"lazy=False is a no-op for {type(h).__name__}: it only differs where h projects or proximates"
    if step.debias and isinstance(monoid, Identity) and not memory.keyed:
        yield "debias without forgetting divides by the number of data: use a decaying monoid"

    if isinstance(h, InverseRoot | Eigenbasis | FittedFactor):
        name = type(h).__name__
        if not isinstance(cost, Linear) or _SIDE_OF.get(cost.of) not in ("rows", "columns"):
            yield f"{name} is the h of a statistic of rows or columns, such as Linear('left')"
        if not step.lazy:
            yield f"lazy=False would accumulate onto the {name}, not onto the statistic"
        if getattr(h, "method", "") == "power-qr" and not isinstance(step.at, Held):
            yield "method 'power-qr' continues from the last basis: set at=Held(every), or take 'eigh'"
        if isinstance(h, FittedFactor) and not isinstance(step.at, Held):
            yield "a FittedFactor continues from the last one: set at=Held(every)"
        if isinstance(cost, Linear) and cost.whitened != isinstance(h, FittedFactor):
            yield f"{name} of {cost!r}: a FittedFactor is fitted to whitened drives, roots and bases are of raw ones"

    # capabilities
    if oracle and (isinstance(step.at, Anchor) or step.at == "new"):
        yield f"at={step.at!r} needs the cost itself; the given gradient is one number at one point"
    if step.at == "read" and not oracle:
        yield "at='read' is for oracles (Given): a keyed cost is evaluated at prev, gated, new or an Anchor"
    if step.at == "read" and step.read is None:
        yield "at='read' needs a read point: set read=Read(gate, rate)"
    if isinstance(step.read, Mix) and not (oracle and h.is_identity and step.via):
        yield "read=Mix(...) lies between a parameter with Euclidean h and what its filters give: it needs Given(), via"
    if step.at == "new":
        if step.via:
            yield "an implicit step cannot be filtered: the drive depends on the new state"
        if not memory.linear or isinstance(memory, List):
            yield f"an implicit step needs a memory whose prediction is linear, not {type(memory).__name__}"
        if not cost.is_gradient:
            yield f"{type(cost).__name__} is the gradient of nothing and has no implicit step: use an explicit one"
        if rate_shape(step.rate) not in ("scalar", "row"):
            yield f"an implicit step takes scalar or row rates, not {rate_shape(step.rate)}"
        if cost.encode:
            yield "an implicit step on the encoding cost is not defined here: use an explicit one"
        if isinstance(cost.ridge, Per) or cost.ridge != 0.0:
            yield "an implicit step has no explicit ridge: gate the state instead"
        if isinstance(memory, Entries) and not h.is_identity:
            yield "entry-wise memory takes the implicit step only with Euclidean h"
    if cost.encode and (isinstance(memory, Entries | LayerNormMatrix | MLP | List)):
        yield f"the encoding cost predicts keys from values; {type(memory).__name__} cannot"
    if not memory.matrix_gates and not kinds <= {"identity", "scalar", "row", "zero"}:
        yield f"{type(memory).__name__} memory has no common key side: gate it with Scalar or Diagonal(side='row')"
    if isinstance(memory, LayerNormMatrix | MLP) and rate_shape(step.rate) not in ("scalar", "row"):
        yield f"{type(memory).__name__} memory takes scalar or row rates"
    if isinstance(memory, Entries) and any(isinstance(rate, Per) for rate in cost.rates() if rate != cost.ridge):
        yield f"entry-wise memory has d_v x d_k errors: {type(cost).__name__} takes constant parameters there"
    if isinstance(memory, MLP) and rate_shape(cost.ridge) != "scalar":
        yield "the leaves of MLP memory have different shapes: its ridge is a scalar"
    if isinstance(memory, List):
        if isinstance(cost.ridge, Per) or cost.ridge != 0.0:
            yield "a ridge pulls on every stored pair: gate a list memory instead"
        if step.start == "first":
            yield "start='first' replaces the state by a drive: a list memory has nothing to replace"
        if not h.is_identity and getattr(h, "axis", "row") != "row":
            yield "a list memory has one row of scores: take Entropic(axis='row')"
        if step.via or step.debias or step.read or isinstance(step.at, Anchor) or not step.lazy or step.steps > 1:
            yield "a list memory keeps factored pairs: no filters, debias, read point, anchor, agile or repeated steps"
        if not (h.is_identity or isinstance(h, Entropic)):
            yield f"a list memory's scores take Euclidean or entropic h, not {type(h).__name__}"
        if not h.is_identity and not isinstance(cost, Alignment):
            yield "softmax reads of a list are not linear: only the alignment cost writes to it"
        if rate_shape(step.rate) != "scalar" or not kinds.isdisjoint({"row", "hadamard", "zero"}):
            yield "a list memory takes scalar rates and gates on the key side"
        if not h.is_identity and isinstance(monoid, Diagonal):
            yield "a diagonal gate on stored keys is not a bias of softmax attention: use Scalar"
    if step.debias and h.scale_free and not memory.keyed and kinds <= {"scalar", "zero"}:
        yield f"debias has no effect: {type(h).__name__} drops the factor it divides by"
    unit = not isinstance(step.rate, Per) and step.rate == 1.0
    starts_empty = isinstance(cost, Linear) or isinstance(memory, Matrix | LayerNormMatrix | Entries)
    if step.start == "W0" and not isinstance(cost, Linear):
        yield "start='W0' is for filters: an update itself starts at the weights it is given"
    if step.start == "W0" and kinds == {"zero"}:
        yield "start='W0' under a gate that keeps nothing is forgotten at once"
    if memory.keyed and any(f.parts().step.start == "W0" for f in update.filters()):
        yield "a filter starts at the weights of the data axis; an empty memory is zero, where start='W0' has no effect"
    if step.start == "W0" and step.debias:
        yield "a filter that starts at the weights has no bias to correct"
    if step.start == "first" and unit and starts_empty:
        yield "start='first' has no effect: at rate 1 an empty memory starts at its first drive anyway"
    if not step.lazy and kinds == {"zero"} and step.read is None:
        yield "lazy=False has no effect: the zero monoid keeps nothing of either state"
    if sees_weights(h) and not isinstance(cost, Linear):
        yield f"{type(h).__name__} compares a direction with the weights: put it on a filter, not on a state"
    if isinstance(memory, Entries) and cost.curvature == "none":
        yield f"entry-wise memory has no effect: {type(cost).__name__} makes no prediction, use Matrix()"
    if any(isinstance(p, Decay) and p.independent for p in factors(monoid)) and unit:
        yield "Decay(independent=True) has no effect at rate 1: leave it out"
    if step.debias:
        if memory.keyed and (sees_state or not h.is_identity or isinstance(memory, Slots) or not step.lazy):
            yield "a normaliser needs a linear, Euclidean memory whose writes do not depend on the state"
        if not kinds <= {"identity", "scalar", "diagonal", "row", "hadamard"}:
            yield "a normaliser needs scalar or diagonal gates"
        if step.start == "first":
            yield "start='first' already has no bias to correct"
    axis = getattr(h, "slice_axis", None)
    if axis is not None and memory.keyed and not isinstance(memory, List):
        allowed = {"identity", "scalar", "row", "zero"} if axis == "row" else {"identity", "scalar", "zero"}
        shapes = ("scalar", "row") if axis == "row" else ("scalar",)
        if not kinds <= allowed or rate_shape(step.rate) not in shapes:
            yield f"{h!r} needs gates and rates that are constant on each slice ({axis}), or W leaves its own geometry"
    if memory.filterable is False and h.stats:
        yield "statistics need a drive with the shape of the state"
    if isinstance(memory, LayerNormMatrix | MLP):
        for f in update.filters():
            gated, rate = gates(f.parts().monoid), rate_shape(f.parts().step.rate)
            if rate != "scalar" or not gated <= {"identity", "zero", "scalar"}:
                yield f"filters over {type(memory).__name__} memory take scalar gates: its leaves have different shapes"
    for branch in update.filters():
        if not isinstance(branch.cost, Linear):
            yield f"a filter's cost must be Linear(), got {branch.cost!r}"
        elif isinstance(branch.parts().step.at, Held):
            yield "a filter passes every datum on: at=Held(...) is for statistics"
        elif branch.cost.of != "drive":
            yield f"a filter passes the drive on; {branch.cost!r} is a statistic: put it in h.stats"
    for s in h.stats:
        if not isinstance(s.cost, Linear):
            yield f"a statistic's cost must be Linear(of=...), got {s.cost!r}"
        elif _SIDE_OF.get(s.cost.of) in ("rows", "columns"):
            inner = s.parts()
            if not gates(inner[2]) <= {"identity", "zero", "scalar"} or rate_shape(inner[3].rate) != "scalar":
                yield f"a statistic {s.cost!r} is a square matrix of its own size: it takes scalar gates and rates"
        if isinstance(s.cost, Linear) and s.cost.whitened and not (
            isinstance(h, Kronecker) and all(isinstance(f.parts().h, FittedFactor) for f in h.stats)
        ):
            yield f"{s.cost!r} is of what Kronecker makes with two FittedFactors, and only stands there, unwrapped"
        if s.parts().step.read is not None:
            yield "a statistic is what its state holds: it has no read point"
        if s.parts().step.start == "W0":
            yield "a statistic holds products of drives: it cannot start at the weights"
    for part in _whitenings(h):
        named = f"Whiten(kind={part.kind!r})" if isinstance(part, Whiten) else type(part).__name__
        for s, side in zip(part.stats, _sides(part), strict=True):
            if _SIDE_OF.get(getattr(s.cost, "of", ""), side) != side:
                yield f"{named} takes a statistic of the {side} here, not {s.cost!r}"
        roots: tuple[type[Geometry], ...] = (InverseRoot, FittedFactor)
        wanted = roots if isinstance(part, Kronecker) else (Eigenbasis,)
        for s in part.stats[:2] if not isinstance(part, Whiten) else ():
            if not isinstance(s.parts().h, wanted):
                names = " or ".join(t.__name__ for t in wanted)
                yield f"{named} takes statistics with h={names} here, not {s.parts().h!r}"


# What a statistic has the shape of, and what each whitening divides by.
_SIDE_OF = {"drive": "entries", "square": "entries"} | dict.fromkeys(("left", "white-left", "value", "error"), "rows")
_SIDE_OF |= dict.fromkeys(("right", "white-right", "key"), "columns")
_SIDE_OF |= dict.fromkeys(("eigen-square", "eigen-fisher"), "eigen-entries")
_SIDES = {
    "diagonal": ("entries",),
    "kronecker": ("rows", "columns"),
    "right": ("columns",),
    "full": ("whole",),
}


def _sides(part: Whiten | Kronecker | RotatedWhiten) -> tuple[str, ...]:
    if isinstance(part, Whiten):
        return _SIDES[part.kind]
    return ("rows", "columns") if isinstance(part, Kronecker) else ("rows", "columns", "eigen-entries")


def sees_weights(h: Geometry) -> bool:
    """Whether a geometry reads the outer weights."""
    return "weights" in h.reads


def _whitenings(h: Geometry) -> Iterator[Whiten | Kronecker | RotatedWhiten]:
    """The whitenings in a geometry, wrapped ones included."""
    if isinstance(h, Whiten | Kronecker | RotatedWhiten):
        yield h
    for name in ("base", "inner", "outer"):
        if isinstance(inner := getattr(h, name, None), Geometry):
            yield from _whitenings(inner)


def factors(monoid: Monoid) -> tuple[Monoid, ...]:
    """The parts of a product, in order; any other monoid alone."""
    return tuple(f for p in monoid.parts for f in factors(p)) if isinstance(monoid, Product) else (monoid,)


def gates(monoid: Monoid) -> set[str]:
    """The kinds of gate in a monoid: identity, zero, scalar, diagonal, row, hadamard, rotation, low rank, dense."""
    if isinstance(monoid, Product):
        return set().union(*(gates(p) for p in monoid.parts))
    if isinstance(monoid, Diagonal) and monoid.side == "row":
        return {"row"}
    return {monoid.kind}
