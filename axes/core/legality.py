"""Which tuples make sense: each rule names the parts, why they cannot act together, and what to use instead.

Rules read what the parts declare (`needs`, `curvature`, `kind`, `scale_free`, `sides`, ...), so that a part written
elsewhere is judged like those of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from axes.core.algorithms import Anchor, Held, Mix, Read
from axes.core.costs import Linear
from axes.core.declared import Recurrence
from axes.core.geometry import Entropic
from axes.core.memory import BoundedList
from axes.core.monoids import Decay, Diagonal, Identity, Monoid, Product, Scalar, Zero
from axes.core.parts import Parts
from axes.core.rates import SEEN, Per, counted, named, rate_shape, resolve
from axes.errors import IllegalUpdate


def check(p: Parts) -> None:
    """Raise IllegalUpdate with the first reason why a normal form is not legal."""
    for reason in reasons(p):
        raise IllegalUpdate(f"StateUpdate({type(p.cost).__name__}, {type(p.h).__name__}, ...): {reason}")


def reasons(p: Parts) -> Iterator[str]:
    """Every reason why a normal form is not legal."""
    for rule in _RULES:
        yield from rule(p)


def factors(monoid: Monoid) -> tuple[Monoid, ...]:
    """The parts of a product, in order; any other monoid alone."""
    return tuple(f for p in monoid.parts for f in factors(p)) if isinstance(monoid, Product) else (monoid,)


def gates(monoid: Monoid) -> set[str]:
    """The kinds of gate in a monoid: identity, zero, scalar, diagonal, row, hadamard, rotation, low rank, dense."""
    if isinstance(monoid, Product):
        return set().union(*(gates(p) for p in monoid.parts))
    return {monoid.kind}


_PLAIN = "no filters, read point, anchor, agile or repeated steps"


def _given(p: Parts) -> str:
    """Which fields of the step are not those of a plain one, by name."""
    step = p.step
    given = {
        "via=": step.via, "read=": step.read, "debias=True": step.debias, "lazy=False": not step.lazy,
        "at=Anchor(...)": isinstance(step.at, Anchor), f"steps={step.steps}": step.steps > 1,
        f"h={type(p.h).__name__}": p.h.stats,
    }  # fmt: skip
    return f" (given: {', '.join(name for name, there in given.items() if there)})"


# ---- cost and memory ---------------------------------------------------------------------------------------------


def _prediction(p: Parts) -> Iterator[str]:
    """What a cost is a function of is what the memory gives."""
    cost, memory = p.cost, type(p.memory).__name__
    if (p.oracle or p.driven) and p.memory.keyed:
        yield f"{memory} memory predicts from keys; this gradient comes from outside: use Parameter()"
    if not (p.oracle or p.driven) and not p.memory.keyed:
        yield f"{memory}() memory predicts nothing, {type(cost).__name__} needs a prediction: use Matrix() or Given()"
    if cost.encode and p.memory.kind in ("entries", "network", "list", "bounded", "regression", "levels"):
        yield f"the encoding cost predicts keys from values; {memory} cannot"
    if p.memory.kind == "entries":
        if any(isinstance(rate, Per) for rate in cost.rates() if rate != cost.ridge):
            yield f"entry-wise memory has d_v x d_k errors: {type(cost).__name__} takes constant parameters there"
        if cost.curvature == "none":
            yield f"entry-wise memory has no effect: {type(cost).__name__} makes no prediction, use Matrix()"


def _shapes(p: Parts) -> Iterator[str]:
    """Gates, rates, filters and statistics fit on the leaves of the memory."""
    memory = type(p.memory).__name__
    of_memory = {per for rate in p.memory.rates() for per in named(rate)}
    own = [per for rate in p.rates() for per in named(rate) if per.shape == "own" and per not in of_memory]
    if p.memory.kind != "bounded" and (own or "slot" in gates(p.monoid)):
        yield f"{memory} memory has no slots: rates of a size of their own are for BoundedList(slots)"
    for h in p.h.links():
        if h.logits != "mix":
            yield f"{h!r} makes a matrix of {h.logits} logits: it is a link of GeneralLinear, no h of a state"
    if not p.memory.matrix_gates and not gates(p.monoid) <= {"identity", "scalar", "row", "zero"}:
        yield f"{memory} memory has no common key side: gate it with Scalar or Diagonal(side='row')"
    if p.memory.kind == "network":
        if rate_shape(p.step.rate) not in ("scalar", "row"):
            yield f"{memory} memory takes scalar or row rates"
        if not p.memory.one_leaf and rate_shape(p.cost.ridge) != "scalar":
            yield f"the leaves of {memory} memory have different shapes: its ridge is a scalar"
        look = p.step.read
        shapes = {rate_shape(look.gate), rate_shape(look.rate)} if isinstance(look, Read) else {"scalar"}
        if not p.memory.one_leaf and shapes != {"scalar"}:
            yield f"the leaves of {memory} memory have different shapes: the rates of its read point are scalars"
        if not p.memory.one_leaf and any(rate_shape(rate) != "scalar" for rate in p.h.rates()):
            yield f"the leaves of {memory} memory have different shapes: rates of {type(p.h).__name__} are scalars"
        for f in p.filters():
            if rate_shape(f.step.rate) != "scalar" or not gates(f.monoid) <= {"identity", "zero", "scalar"}:
                yield f"filters over {memory} memory take scalar gates and rates: its leaves need not have one shape"
    if not p.memory.filterable and p.h.stats:
        yield "statistics need a drive with the shape of the state"


def _bounded(p: Parts) -> Iterator[str]:
    """A bounded memory writes every pair to its slots, and h acts on their scores."""
    if not isinstance(p.memory, BoundedList):
        return
    step, h, slots = p.step, p.h, p.memory.slots
    if p.cost.drives != "target":
        yield f"slots take keys and values as they are: the cost is Alignment(), not {p.cost!r}"
    if p.ridged:
        yield "a ridge pulls on every slot: gate a bounded memory instead"
    if step.start == "first":
        yield "start='first' replaces the state by a drive: slots have shares of it"
    if step.via or step.read or isinstance(step.at, Anchor) or not step.lazy or step.steps > 1 or h.stats:
        yield f"slots are written by factored pairs: {_PLAIN}, statistics{_given(p)}"
    if not gates(p.monoid) <= {"identity", "scalar", "slot"} or rate_shape(step.rate) not in ("scalar", "own"):
        yield "a bounded memory takes gates and rates that are scalars or one for every slot"
    if any(per.size != slots for rate in p.rates() for per in named(rate) if per.shape == "own"):
        yield f"BoundedList(slots={slots}): a rate of every slot has size={slots}"
    if not h.is_identity and not isinstance(h, Entropic):
        yield f"scores of slots take Euclidean or entropic h, not {type(h).__name__}"
    elif isinstance(h, Entropic) and h.axis != "row":
        yield "a bounded memory has one row of scores: take Entropic(axis='row')"
    if rate_shape(step.rate) == "scalar" and gates(p.monoid) <= {"identity", "scalar"}:
        yield "slots that are kept and written alike stay alike: one of gate and rate is Per(name, 'own', size=slots)"


def _regression(p: Parts) -> Iterator[str]:
    """A regression keeps sums of values and keys, and of keys and keys."""
    if p.memory.kind != "regression":
        return
    step = p.step
    if p.cost.drives != "target":
        yield f"a regression sums values and keys as they are: the cost is Alignment(), not {p.cost!r}"
    if p.ridged:
        yield "a regression has a ridge of its own: Regression(ridge=...)"
    if not p.h.is_identity:
        yield "a regression is read through its solve: h is Euclidean()"
    if step.via or step.read or isinstance(step.at, Anchor) or not step.lazy or step.steps > 1 or step.debias:
        yield f"a regression is written by pairs: {_PLAIN}, normaliser{_given(p)}"
    if step.start == "first":
        yield "start='first' replaces the state by a drive: a regression sums"
    if not gates(p.monoid) <= {"identity", "scalar"} or rate_shape(step.rate) != "scalar":
        yield "both sums of a regression are kept and written alike: gates and rates are scalars"


def _levels(p: Parts) -> Iterator[str]:
    """Levels hold what was written, under one monoid."""
    if p.memory.kind != "levels":
        return
    step = p.step
    if p.cost.drives != "target":
        yield (
            f"levels take values as they are, not {p.cost!r}: an error would be written anew in level 0; erase along "
            "the key in every level, with Alignment() and Householder(beta, 'k')"
        )
    if not p.h.is_identity or p.ridged:
        yield "levels are read as they are: h is Euclidean, without a ridge"
    if step.via or step.read or isinstance(step.at, Anchor) or not step.lazy or step.steps > 1 or step.debias:
        yield f"levels have {_PLAIN}, normaliser{_given(p)}"
    if step.start != "zero" or step.write != "sum" or step.writes > 1:
        yield "levels begin at zero and take one pair a datum, added: no start, write='max' or several writes"
    if "zero" in gates(p.monoid):
        yield "levels under a gate that keeps nothing hold level 0 alone: use Matrix()"


def _list(p: Parts) -> Iterator[str]:
    """A list keeps pairs, and h acts on its scores."""
    if p.memory.kind != "list":
        return
    step, h = p.step, p.h
    if p.ridged:
        yield "a ridge pulls on every stored pair: gate a list memory instead"
    if step.start == "first":
        yield "start='first' replaces the state by a drive: a list memory has nothing to replace"
    if step.via or step.debias or step.read or isinstance(step.at, Anchor) or not step.lazy or step.steps > 1:
        yield f"a list memory keeps factored pairs: {_PLAIN}, debias{_given(p)}"
    if rate_shape(step.rate) != "scalar" or not gates(p.monoid).isdisjoint({"row", "hadamard", "turn", "zero"}):
        yield "a list memory takes scalar rates and gates on the key side"
    kernel = getattr(p.memory, "errors", None)
    if kernel is not None and not p.drive_sees_state:
        yield f"errors={kernel!r} has no effect: {type(p.cost).__name__} stores values, whatever the list gives"
    if h.is_identity:
        return
    if not isinstance(h, Entropic):
        yield f"a list memory's scores take Euclidean or entropic h, not {type(h).__name__}"
    elif h.axis != "row":
        yield "a list memory has one row of scores: take Entropic(axis='row')"
    if p.cost.drives is None:
        yield "a list that softmax reads stores values, or errors of its reads: the cost is Alignment or SquaredError"
    if step.at == "gated" and gates(p.monoid) <= {"scalar"} and kernel is None:
        yield "at='gated' has no effect: softmax drops the factor of a scalar gate, so it is at='prev'"
    if isinstance(p.monoid, Diagonal):
        yield "a diagonal gate on stored keys is not a bias of softmax attention: use Scalar"


def _turning(p: Parts) -> Iterator[str]:
    """Rows turn in pairs, of a matrix, beside gates that do not tell the two apart."""
    kinds = gates(p.monoid)
    if "turn" not in kinds:
        return
    if p.memory.kind not in ("matrix", "parameter"):
        yield f"{type(p.memory).__name__} memory has no rows that turn: rotations of shape row-pair are for matrices"
    alone = [f for f in factors(p.monoid) if f.kind == "row" and getattr(f, "side", None) != "row-pair"]
    if alone or "hadamard" in kinds:
        yield (
            "rows that turn in pairs have one gate for both of a pair: Diagonal(Per(name, 'row-pair', 'unit'), "
            "'row-pair')"
        )
    if "zero" in kinds:
        yield "a rotation after a gate that keeps nothing turns nothing"


# ---- the step ----------------------------------------------------------------------------------------------------


def _evaluation(p: Parts) -> Iterator[str]:
    """Where the gradient is taken makes a difference, and can be known."""
    at, h = p.step.at, p.h
    if at == "gated":
        if isinstance(p.monoid, Identity):
            yield "at='gated' needs a gate: with the identity monoid it is at='prev'"
        if isinstance(p.monoid, Zero):
            yield "at='gated' after a gate that keeps nothing evaluates at the empty memory, whatever the state was"
        if h.scale_free and gates(p.monoid) == {"scalar"}:
            yield f"at='gated' has no effect: {type(h).__name__} drops the factor of a scalar gate, so it is at='prev'"
    if isinstance(at, Held):
        if not p.driven:
            yield "at=Held(...) is for statistics: the gradient is taken at prev, gated, read, new or an Anchor"
        if h.is_identity:
            yield "at=Held(...) keeps what h makes of a statistic, and Euclidean h makes nothing of it"
    elif p.driven and at != "prev":
        yield f"at={at!r} has no effect on a cost that is linear in the drive"
    if not p.oracle and not p.driven and not p.drive_sees_state and at != "prev":
        yield f"at={at!r} has no effect: the gradient of {type(p.cost).__name__} does not depend on the state"
    if p.oracle and (isinstance(at, Anchor) or at == "new"):
        yield f"at={at!r} needs the cost itself; the given gradient is one number at one point"
    if at == "read" and not p.oracle:
        yield "at='read' is for oracles (Given): a keyed cost is evaluated at prev, gated, new or an Anchor"
    if at == "read" and p.step.read is None:
        yield "at='read' needs a read point: set read=Read(gate, rate)"


def _implicit(p: Parts) -> Iterator[str]:
    """An implicit step solves for the new state."""
    cost, memory = p.cost, p.memory
    if p.step.at != "new":
        return
    if isinstance(p.monoid, Zero):
        yield "an implicit step after a gate that keeps nothing begins at the empty memory, whatever the state was"
    if p.step.via:
        yield "an implicit step cannot be filtered: the drive depends on the new state"
    if not memory.linear or memory.scored:
        yield f"an implicit step needs a memory whose prediction is linear, not {type(memory).__name__}"
    if not cost.is_gradient:
        yield f"{type(cost).__name__} is the gradient of nothing and has no implicit step: use an explicit one"
    if rate_shape(p.step.rate) not in ("scalar", "row"):
        yield f"an implicit step takes scalar or row rates, not {rate_shape(p.step.rate)}"
    if cost.encode:
        yield "an implicit step on the encoding cost is not defined here: use an explicit one"
    if p.ridged:
        yield "an implicit step has no explicit ridge: gate the state instead"
    if memory.kind == "entries" and not p.h.is_identity:
        yield "entry-wise memory takes the implicit step only with Euclidean h"


def _effect(p: Parts) -> Iterator[str]:
    """Rate, repetition, laziness and decay change what is computed."""
    step, h = p.step, p.h
    if step.rate == 0.0 and not _holds_the_start(p):
        yield "a step size of zero learns nothing"
    elsewhere = step.at == "new" or isinstance(step.at, Anchor)
    if step.rate == 0.0 and any(isinstance(f, Decay) and not f.independent for f in factors(p.monoid)):
        yield "a decay that is multiplied by a step size of zero has no effect: leave it out, or make it independent"
    if step.steps > 1 and (p.oracle or p.driven or not p.drive_sees_state or step.via or elsewhere):
        yield "steps > 1 needs a gradient that depends on the state, taken here, unfiltered: scale the rate instead"
    if not step.lazy and (h.is_identity or h.invertible or h.stats):
        yield f"lazy=False is a no-op for {type(h).__name__}: it only differs where h projects or proximates"
    if not step.lazy and gates(p.monoid) == {"zero"} and step.read is None:
        yield "lazy=False has no effect: the zero monoid keeps nothing of either state"
    if step.rate == 1.0 and any(isinstance(f, Decay) and f.independent for f in factors(p.monoid)):
        yield "Decay(independent=True) has no effect at rate 1: leave it out"
    if isinstance(step.read, Mix) and p.driven and not step.via:
        yield "read=Mix(...) of a filter lies between what its own filters make of their drive and that drive"
    if isinstance(step.read, Mix) and not p.driven:
        last = step.via[-1].parts() if step.via and isinstance(step.via[-1], Recurrence) else None  # not side by side
        weights = last is not None and last.step.start == "W0" and not last.h.reads
        if not (p.oracle and h.is_identity and weights):
            yield "read=Mix(...) lies between a parameter with Euclidean h and the weights of its last filter: it " + (
                "needs Given() and a filter with start='W0' whose h reads nothing else"
            )


def _holds_the_start(p: Parts) -> bool:
    """Whether a filter passes its drive on beside the weights that it began with, which something reads."""
    look = p.step.read
    if p.step.start != "W0" or not isinstance(look, Read) or look.rate == 0.0:
        return False
    return look.gate != 0.0 or any(getattr(s.cost, "of", None) in ("state", "travel") for s in p.statistics())


def _maximum(p: Parts) -> Iterator[str]:
    """The larger of what is kept and what is written, entry by entry."""
    step = p.step
    if step.write == "sum":
        return
    if step.at == "new":
        yield "an implicit step solves for a sum: write='max' is explicit"
    if step.debias:
        yield "the response of a maximum to a unit drive is the largest rate: debias what it is the maximum of"
    if gates(p.monoid) == {"zero"}:
        yield "write='max' compares with what is kept, and the zero monoid keeps nothing"
    if isinstance(step.read, Read):
        yield "a read point is a sum: with write='max' it is read at the new state"
    if p.memory.scored:
        yield "pairs have no larger one: write='max' is for tensors"


def _writes(p: Parts) -> Iterator[str]:
    """Several pairs of a datum are written one after another."""
    step = p.step
    if step.writes == 1:
        return
    if not p.memory.keyed:
        yield "several writes are several pairs of a key and a value; a gradient from outside is one: writes=1"
    if p.memory.kind == "list":
        yield "a list keeps pairs, one a datum: several of them are several heads, or data"
    if step.via or p.h.stats or isinstance(step.at, Anchor):
        yield "filters, statistics and anchors count data, not the writes of one: writes=1"
    if step.steps > 1 or step.read is not None or step.debias or step.start != "zero":
        yield "several writes take one step each and are read after the last: no read, debias, start or repeated steps"
    own = {per.name for rate in (step.rate, *p.cost.rates()) for per in named(rate)}
    rates = (*p.monoid.rates(), *p.h.rates(), *p.memory.rates())
    others = {per.name for rate in rates for per in named(rate)}
    if shared := sorted(own & others):
        yield f"{shared} is a rate of every write and of the datum: give them two names"
    if not p.monoid.signals().isdisjoint({"k", "v"}):
        yield "the monoid acts once a datum, which has several keys: give its vector a name of its own"


def _reads(p: Parts) -> Iterator[str]:
    """Several queries of a datum read what it leaves."""
    if p.step.reads == 1:
        return
    if not p.memory.keyed:
        yield "several reads are several queries; what is shown of a parameter is the whole of it: reads=1"
    if p.memory.kind == "list":
        yield "several queries of a list are heads of a group that reads it: Standard(queries=n) of the layer"


def _feedback(p: Parts) -> Iterator[str]:
    """Error feedback keeps what h did not show."""
    step, name = p.step, type(p.h).__name__
    if step.feedback == 0.0:
        return
    if not p.driven or p.cost.of != "drive":  # type: ignore[attr-defined]
        yield "feedback is for filters: they hold what a step did not use"
    if not p.h.approximates:
        yield f"feedback needs an h that shows a part of what it is given, such as LowRank or Ball, not {name}"
    if isinstance(p.monoid, Zero):
        yield "feedback has no effect: the zero monoid keeps nothing of what is left"
    if step.read is not None or step.debias or not step.lazy:
        yield "feedback takes from the buffer what was shown of it: no read point, no debias, no lazy=False"


def _start(p: Parts) -> Iterator[str]:
    """A first value that is not the empty memory."""
    step, memory = p.step, p.memory
    if isinstance(step.start, float):
        if not p.driven:
            yield "a number to start at is for filters and statistics: an update itself starts at the weights"
        if gates(p.monoid) == {"zero"}:
            yield f"start={step.start} under a gate that keeps nothing is forgotten at once"
        if step.debias:
            yield f"the response to a unit drive starts at zero: start={step.start} has no bias to correct"
    if step.start == "W0":
        if not p.driven:
            yield "start='W0' is for filters: an update itself starts at the weights it is given"
        if gates(p.monoid) == {"zero"}:
            yield "start='W0' under a gate that keeps nothing is forgotten at once"
        if step.debias:
            yield "a filter that starts at the weights has no bias to correct"
    if p.driven and any(f.step.start == "W0" for f in p.filters()):
        yield "start='W0' is for filters of the weights' own update: inside of a filter there are no weights"
    if step.start == "second" and memory.keyed:
        yield "start='second' leaves the first gradient to statistics: a keyed memory writes at every key"
    waiting = step.via and all(f.step.start == "second" for f in p.filters()) and isinstance(p.monoid, Identity)
    if step.start == "second" and waiting:
        yield "start='second' has no effect: its filters put out nothing of the first datum anyway"
    if memory.keyed and any(f.step.start == "W0" for f in p.filters()):
        yield "a filter starts at the weights of the data axis; an empty memory is zero, where start='W0' has no effect"
    if step.start == "first":
        if step.rate == 1.0 and (p.driven or memory.starts_at_zero):
            yield "start='first' has no effect: at rate 1 an empty memory starts at its first drive anyway"
        if step.debias:
            yield "start='first' already has no bias to correct"
        if _is_whole(p):
            yield "start='first' has no effect: the first weight is 1, so the average starts at its first drive anyway"


def _is_whole(p: Parts) -> bool:
    """Whether p is an average by the number of the datum with weights 1 - r_t and r_t, r_1 = 1."""
    gate, rate = p.monoid.gate if isinstance(p.monoid, Scalar) else 0.0, p.step.rate
    if isinstance(gate, str) or not counted(gate) or any(True for x in (gate, rate) for _ in named(x)):
        return False
    values = [(float(resolve(gate, {SEEN: n})), float(resolve(rate, {SEEN: n}))) for n in range(4)]
    return values[0] == (0.0, 1.0) and all(abs(a + b - 1.0) < 1e-12 for a, b in values)


def _normaliser(p: Parts) -> Iterator[str]:
    """Debiasing divides by the response to a unit drive."""
    h, memory, kinds = p.h, p.memory, gates(p.monoid)
    if p.step.floor and not (p.step.debias and memory.keyed):
        yield "a floor is one of the normaliser that reads of a keyed memory are divided by: set debias=True there"
    if not p.step.debias:
        return
    if isinstance(p.monoid, Identity) and not memory.keyed:
        yield "debias without forgetting divides by the number of data: use a decaying monoid"
    if h.scale_free and not memory.keyed and kinds <= {"scalar", "zero"}:
        yield f"debias has no effect: {type(h).__name__} drops the factor it divides by"
    if _is_whole(p):
        yield "debias has no effect: the weights sum to 1 from the first datum on"
    if memory.keyed and (p.drive_sees_state or not (h.is_identity or memory.scored) or not p.step.lazy):
        yield "a normaliser needs a linear, Euclidean memory whose writes do not depend on the state"
    if not kinds <= {"identity", "scalar", "diagonal", "pair", "row", "slot", "hadamard"}:
        yield "a normaliser needs scalar or diagonal gates"


# ---- h, filters and statistics -----------------------------------------------------------------------------------


def _slices(p: Parts) -> Iterator[str]:
    """Where h normalises slices, a gate that varies along one leaves its geometry."""
    axis, kinds = p.h.slice_axis, gates(p.monoid)
    if axis is None or not p.memory.keyed or p.memory.scored:
        return
    allowed = {"identity", "scalar", "row", "zero"} if axis == "row" else {"identity", "scalar", "zero"}
    shapes = ("scalar", "row") if axis == "row" else ("scalar",)
    if not kinds <= allowed or rate_shape(p.step.rate) not in shapes:
        yield f"{p.h!r} needs gates and rates that are constant on each slice ({axis}), or W leaves its own geometry"


def _factor(p: Parts) -> Iterator[str]:
    """An h that makes a root, a basis or factors of a statistic is that statistic's own."""
    h, cost, name = p.h, p.cost, type(p.h).__name__
    if h.makes is None:
        return
    if h.makes == "factors":
        if not isinstance(cost, Linear) or cost.side != "entries":
            yield f"{name} is the h of a statistic with an entry for every entry, such as Linear('state')"
    elif not isinstance(cost, Linear) or cost.side not in ("rows", "columns"):
        yield f"{name} is the h of a statistic of rows or columns, such as Linear('left')"
    if not p.step.lazy:
        yield f"lazy=False would accumulate onto the {name}, not onto the statistic"
    if h.continues and not isinstance(p.step.at, Held):
        yield f"{h!r} continues from the last {h.makes}: set at=Held(every), or take one that is computed anew"
    if isinstance(cost, Linear) and not cost.by_entry and cost.whitened != h.fitted:
        yield f"{name} of {cost!r}: a FittedFactor is fitted to whitened drives, roots and bases are of raw ones"


def _filters(p: Parts) -> Iterator[str]:
    """Filters pass every drive on."""
    if "weights" in p.h.reads and not p.driven:
        yield f"{type(p.h).__name__} compares a direction with the weights: put it on a filter, not on a state"
    for f in p.filters():
        if not isinstance(f.cost, Linear):
            yield f"a filter's cost must be Linear(), got {f.cost!r}"
        elif isinstance(f.step.at, Held):
            yield "a filter passes every datum on: at=Held(...) is for statistics"
        elif f.cost.of != "drive":
            yield f"a filter passes the drive on; {f.cost!r} is a statistic: put it in h.stats"
        elif f.cost.raw:
            yield "a filter is driven by what is ahead of it: raw is for statistics"


def _told(p: Parts) -> Iterator[str]:
    """What an h tells the axis comes back as a rate."""
    telling = [f.h for f in p.filters() if f.h.tells is not None]
    if len(telling) > 1:
        yield f"{' and '.join(type(h).__name__ for h in telling)} both tell the axis something: one of them at most"
    read = {per.name for rate in p.rates() for per in named(rate)} if telling else set()
    for h in telling:
        if h.tells is not None and h.tells.name not in read:
            yield f"{type(h).__name__} tells the axis what makes {h.tells!r}, and no rate of the tuple reads it"
        if any(s.step.read is not None for s in (x.parts() for x in h.stats)):
            yield f"{type(h).__name__} tells what its statistics hold: a read point of theirs has no effect"
    if p.driven and telling:
        yield f"{type(telling[0]).__name__} tells the axis of a whole update: put it on a filter of that, not deeper"


def _statistics(p: Parts) -> Iterator[str]:
    """Statistics hold what they are driven by."""
    fitted = p.h.takes == "root" and all(s.h.fitted for s in p.statistics())
    for s in p.statistics():
        look = s.step.read
        if not isinstance(s.cost, Linear):
            yield f"a statistic's cost must be Linear(of=...), got {s.cost!r}"
        elif s.cost.side in ("rows", "columns") and not _scalar(s):
            yield f"a statistic {s.cost!r} is a square matrix of its own size: it takes scalar gates and rates"
        elif s.cost.side in ("each-row", "each-column") and not _scalar(s):
            yield f"a statistic {s.cost!r} has one number for a row or column: it takes scalar gates and rates"
        elif s.cost.of in ("unit", "travel") and not all(map(_number, s.every())):
            yield f"a statistic of the {s.cost.of} is one number: it takes scalar gates and rates, and Euclidean h"
        elif s.cost.of == "travel" and not p.driven:
            yield "a statistic of travel reads the weights around a filter: put it on one, not on a state"
        elif s.cost.of == "travel" and s.step.start in ("first", "second"):
            yield f"start={s.step.start!r} has no effect on a statistic of travel, which is 0 at the first datum"
        elif s.cost.of == "white-square" and not (p.h.entrywise and p.driven):
            yield f"{s.cost!r} is of what an entry-wise h makes on a filter, not {type(p.h).__name__}"
        elif s.cost.whitened and not s.cost.by_entry and not fitted:
            yield f"{s.cost!r} is of what Kronecker makes with two FittedFactors, and only stands there, unwrapped"
        elif s.cost.raw and not p.step.via:
            yield f"{s.cost!r}: raw has no effect where no filter is ahead of the statistic"
        if look is not None and not p.driven:
            yield "weights are a function of the state, so are their statistics: a read point is for those of filters"
        if look is not None and isinstance(s.step.at, Held):
            yield "what is held is shown until the next refresh: a read point is for statistics that are not held"
        if isinstance(look, Mix):
            yield "a statistic is what its state holds or held: read=Read(1.0, 0.0) is its value before the datum"
        if s.step.start == "W0":
            yield "a statistic holds products of drives: it cannot start at the weights"


def _number(p: Parts) -> bool:
    """Whether what is kept of a number is one: single gates and rates, no h."""
    return _scalar(p) and p.h.is_identity


def _scalar(p: Parts) -> bool:
    """Whether gates and rates are single numbers."""
    return rate_shape(p.step.rate) == "scalar" and gates(p.monoid) <= {"identity", "zero", "scalar"}


def _whitenings(p: Parts) -> Iterator[str]:
    """Each whitening in h has statistics of the sides that it divides by."""
    for h in p.h.links():
        kind = getattr(h, "kind", None)
        named = type(h).__name__ + (f"(kind={kind!r})" if kind else "")
        for s, side in zip(h.stats, h.sides, strict=False):
            if isinstance(s.cost, Linear) and s.cost.side != side:
                yield f"{named} takes a statistic of the {side} here, not {s.cost!r}"
        for s, side in zip(h.stats, h.sides, strict=False):
            if h.takes and not side.startswith("eigen-") and s.parts().h.makes != h.takes:
                yield f"{named} takes statistics with h={_MAKERS[h.takes]} here, not {s.parts().h!r}"


_MAKERS = {"root": "InverseRoot or FittedFactor", "basis": "Eigenbasis", "factors": "PowerFactors"}

_RULES: tuple[Callable[[Parts], Iterator[str]], ...] = (
    _prediction,
    _effect,
    _maximum,
    _writes,
    _reads,
    _evaluation,
    _implicit,
    _feedback,
    _factor,
    _list,
    _bounded,
    _regression,
    _levels,
    _shapes,
    _turning,
    _normaliser,
    _start,
    _slices,
    _filters,
    _told,
    _statistics,
    _whitenings,
)
