"""Facts that follow from a tuple, by algebra: feedback, the structure of a transition, legal routes.

Nothing here is declared by an instance. Autograd's Jacobian of the interpreter is the law that tests check it with.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from axes.core.algorithms import Anchor, Held, Read, Step
from axes.core.costs import Linear
from axes.core.facts import fact
from axes.core.legality import factors, gates
from axes.core.memory import List, Matrix, RankOne
from axes.core.monoids import Diagonal
from axes.core.rates import Complement, Per, rate_shape
from axes.core.state_update import StateUpdate

Feedback = Literal["none", "affine", "nonlinear"]
Structure = Literal["identity", "scalar", "diagonal", "dplr", "dense"]


@fact
def feedback(update: StateUpdate) -> Feedback:
    """How the drive of a datum depends on state that the same chunk of data wrote: this decides the route."""
    cost, h, _, step, memory = update.parts()
    if isinstance(cost, Linear) or isinstance(step.at, Anchor):
        return "none"
    if "g" in cost.needs:
        return "nonlinear"
    if not update.drive_sees_state:
        return "none"
    linear = step.write == "sum" and memory.linear and memory.kind != "list" and h.is_identity
    affine = linear and cost.curvature != "nonlinear"
    return "affine" if affine else "nonlinear"


def block_size(update: StateUpdate) -> int:
    """Slots of the chain [theta | buffers]."""
    return 1 + len(update.filters())


@fact
def structure(update: StateUpdate) -> Structure:
    """The structure of one slot's effective transition, retention and curvature together."""
    _, _, monoid, step, memory = update.parts()
    kinds = gates(monoid)
    curved = feedback(update) == "affine" and update.parts().predicts
    if "dense" in kinds or "rotation" in kinds and (curved or kinds - {"rotation", "scalar", "pair"}):
        return "dense"
    if "low rank" in kinds or (curved and memory.kind != "entries"):
        return "dplr"
    if kinds & {"diagonal", "pair", "row", "slot", "hadamard", "rotation", "turn"} or curved:
        return "diagonal"
    return "identity" if kinds <= {"identity"} and block_size(update) == 1 else "scalar"


@fact
def scales_values(update: StateUpdate) -> bool:
    """Whether rates by rows scale what is written and nothing else: the value, before it meets the key."""
    p = update.parts()
    plain = not p.drive_sees_state and not p.step.via and not p.step.debias
    return plain and rate_shape(p.step.rate) == "row" and p.memory.kind == "matrix" and p.h.is_identity


@fact
def refills(update: StateUpdate) -> bool:
    """Whether no map acts but one gate of entries, and what is written is as much as that gate forgets, undebiased."""
    p = update.parts()
    (gate, *others), rate = factors(p.monoid), p.step.rate
    known = not others and isinstance(gate, Diagonal) and isinstance(rate, Complement) and rate.of == gate.gate
    return known and not p.step.debias


@fact
def averages(update: StateUpdate) -> bool:
    """Whether every entry of the key, or every row, takes what its gate forgets: S Diag(a) + v (k (1 - a))^T."""
    p = update.parts()
    gate = factors(p.monoid)[0]
    entries = isinstance(gate, Diagonal) and gate.side in ("key", "row") and p.memory.kind == "matrix"
    return refills(update) and entries and not p.drive_sees_state and not p.step.via and p.cost.drives == "target"


@fact
def erases_along_key(update: StateUpdate) -> bool:
    """Whether gates are followed by one map that erases along the written key: a delta rule whose erase has a strength
    of its own, S = S A (I - (beta * k) k^T) + rate v k^T."""
    p = update.parts()
    *before, last = factors(p.monoid)
    gated = all(f.kind in ("identity", "scalar", "diagonal", "pair") for f in before)
    writes = p.cost.drives == "target" and not p.drive_sees_state and rate_shape(p.step.rate) in ("scalar", "row")
    return gated and last.rank_one and last.along == "k" and writes and not p.step.via and not p.step.debias


@fact
def by_entry(update: StateUpdate) -> bool:
    """Whether a chain's scan has a state for every token of a span: gates by row and key, entries that predict."""
    p = update.parts()
    return p.memory.kind == "entries" or "hadamard" in gates(p.monoid)


@fact
def idle(update: StateUpdate) -> frozenset[str]:
    """Rates and vectors of the monoid that are zero where a token is to keep the state as it is: logs of open gates,
    angles, strengths. Of several vectors of a map one is enough."""
    names: set[str] = set()
    for f in factors(update.parts().monoid):
        names |= {r.name for r in f.rates() if isinstance(r, Per)} | f.signals()
    return frozenset(names)


@fact
def no_several(update: StateUpdate) -> str | None:
    """Why several writes or reads a token are not so many tokens of one, or None if they are."""
    if update.parts().step.reads > 1 and (reason := _no_more_reads(update)) is not None:
        return reason
    for f in factors(update.parts().monoid):
        neutral, rates = f.neutral(), f.rates()
        gates_open = all(isinstance(r, Per) and (r.domain == "unit" or neutral.get(r.name) == 0.0) for r in rates)
        vanishes = any(neutral.get(name) == 0.0 for name in f.signals())
        constant = all(not isinstance(r, Per) and r == 1.0 or isinstance(r, Per) and r.domain == "unit" for r in rates)
        if f.kind != "identity" and not (rates and gates_open or vanishes and constant):
            return f"{f!r} acts at every token, and has no value for the later writes of one: name its rate"
    return None


def _no_more_reads(update: StateUpdate) -> str | None:
    """Why a token that writes nothing, and reads, leaves everything as it is, or None if it does."""
    p = update.parts()
    if p.step.via or p.h.stats or isinstance(p.step.at, Anchor):
        return "filters, statistics and anchors count the tokens that only read"
    if p.ridged or p.step.read is not None or p.step.start != "zero" or not p.step.lazy:
        return "a ridge, a read point, a first-drive start or an agile state goes on at tokens that only read"
    if p.memory.kind == "levels":
        return "tokens that only read would be places of levels"
    return None


@fact
def _computed(update: StateUpdate) -> str | None:
    """Why no route along a sequence has the numbers of every datum or writes in this way, or None if all do."""
    if update.parts().step.writes > 1 or update.parts().step.reads > 1:
        return no_several(update) or "several writes or reads a token are more tokens of one: `axes.routes.several`"
    if update.parts().computes_rates:
        return "rates that are formulas, of the number of a datum say, are worked out datum by datum"
    if any(p.step.write == "max" for p in update.parts().every()):
        return "the scans add what is written, and this one keeps the larger"
    return None


@fact
def no_chain(update: StateUpdate) -> str | None:
    """Why the update is not an affine chain that the scans take, or None if it is."""
    if (reason := _computed(update)) is not None:
        return reason
    cost, h, monoid, step, memory = update.parts()
    kinds = gates(monoid)
    if memory.kind not in ("matrix", "entries"):
        return f"{type(memory).__name__} memory is not one matrix"
    if isinstance(step.at, Anchor):
        return "an anchored gradient is constant inside its chunk: the cascade is its exact form"
    if feedback(update) == "nonlinear":
        return f"{type(cost).__name__} with {type(h).__name__} is not affine in the state"
    if cost.drives is None:
        return f"{cost!r} is driven by more or less than the value or the error"
    if cost.encode:
        return "the encoding cost feeds back on the value side: its transition acts from the left"
    if not h.is_identity or not step.lazy:
        return f"h = {type(h).__name__} acts on the state"
    if step.steps > 1:
        return "several steps on one datum"
    if step.start != "zero":
        return "a first-drive start is not carried by the chain"
    if step.read is not None and (reason := _no_early(update)) is not None:
        return reason
    if "turn" in kinds and (reason := _no_turning(update)) is not None:
        return reason
    if rate_shape(step.rate) not in ("scalar", "key", "row"):
        return "an element-wise step size has no rank-one write"
    elementwise = {"identity", "scalar", "diagonal", "pair", "row", "hadamard"}
    if memory.kind == "entries" and (step.via or not kinds <= elementwise):
        return "entry-wise memory chains with element-wise gates only"
    if "hadamard" in kinds and (
        kinds & {"low rank", "dense", "rotation"} or update.parts().predicts and memory.kind == "matrix"
    ):
        return "a Hadamard gate does not compose with a matrix transition"
    for f in update.filters():
        _, fh, fm, fs, _ = f.parts()
        if not fh.is_identity or fs.debias or fs.start != "zero" or fs.via or not fs.lazy:
            return "a filter with geometry, bias correction or filters of its own is not linear with known coefficients"
        kept = gates(fm) <= {"identity", "scalar", "diagonal", "pair", "zero"}
        if not kept or rate_shape(fs.rate) not in ("scalar", "key"):
            return "filters of a chain take scalar or key-side gates"
    if step.via and kinds & {"rotation", "dense"}:
        return "buffers next to a rotated or dense state are not carried by the chain"
    if isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        if kinds & {"rotation", "dense"} or "low rank" in kinds and step.at == "gated":
            return "a ridge next to a rotated or mixed state is not carried by the chain"
        if rate_shape(cost.ridge) == "square":
            return "an element-wise ridge has no transition on the key side"
    if step.via and step.debias:
        return "a normaliser behind filters is not carried by the chain"
    return None


def _no_turning(update: StateUpdate) -> str | None:
    """Why a state whose rows turn does not stand still in the frame of its values."""
    p = update.parts()
    if p.step.read is not None:
        return "a read point beside rows that turn is read in two frames"
    if p.step.via or p.ridged:
        return "buffers or a ridge beside rows that turn are not carried by the chain"
    rows = [rate_shape(r) for r in (p.step.rate, *p.cost.rates())]
    if not {"row", "square"}.isdisjoint(rows):
        return "rates by rows beside rows that turn do not turn along"
    if p.predicts and p.step.at == "prev":
        return "errors of the state before its rows turned: at='gated' has them in the frame of the values"
    return None


def _no_early(update: StateUpdate) -> str | None:
    """Why a read between two states is no read of the one before with another query."""
    p = update.parts()
    if not isinstance(p.step.read, Read) or p.step.via or p.step.debias or p.ridged or p.memory.kind != "matrix":
        return "a read point behind filters, of a normaliser, beside a ridge or of single entries is no other query"
    shapes = rate_shape(p.step.read.gate), rate_shape(p.step.read.rate)
    if shapes[0] not in ("scalar", "key") or shapes[1] not in ("scalar", "key", "row"):
        return "a read point with a rate for every row or entry of the state is no other query"
    if p.predicts and ("row" in shapes or not gates(p.monoid).isdisjoint({"row", "hadamard"})):
        return "errors and a read point by rows are no read of the state before with one query"
    if p.predicts and p.step.at == "new" and rate_shape(p.step.rate) == "row":
        return "the errors of an implicit step by rows are no read of the state before with one query"
    return None


@fact
def no_substitution(update: StateUpdate) -> str | None:
    """Why what is written is not found from inner products of keys, or None if it is."""
    if (reason := _computed(update)) is not None:
        return reason
    cost, h, monoid, step, memory = update.parts()
    if not isinstance(memory, RankOne) or not memory.one_leaf:
        return f"{type(memory).__name__} memory is not one matrix that is written by outer products"
    if not update.parts().predicts:
        return "the drive does not depend on the state"
    rows = "row" in gates(monoid) or rate_shape(step.rate) == "row"
    if feedback(update) == "affine" and not step.via and not (rows and cost.by_coordinate):
        return "affine in the state without gates or rates by rows: the chain is its exact form"
    if cost.encode:
        return "the encoding cost reads the state on the value side"
    if not h.is_identity or not step.lazy:
        return f"h = {type(h).__name__} acts on the state"
    if isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        return "a ridge writes the whole state"
    if step.steps > 1 or step.read is not None or step.start != "zero" or step.debias:
        return "several steps on one datum, a read point, a first-drive start or a normaliser"
    if step.at == "new" and not memory.linear:
        return "an implicit step of a memory that is not linear is no step of its prediction"
    if not gates(monoid) <= {"identity", "scalar", "row"} or rate_shape(step.rate) not in ("scalar", "row"):
        return "gates and rates act on rows or on the whole state"
    for f in step.via:
        if not isinstance(f, StateUpdate) or not _of_one_column(f):
            return "a filter keeps no state and does not ask where keys point"
    return None


def _of_one_column(f: StateUpdate) -> bool:
    """Whether a filter makes an outer product an outer product along the same key, by its column alone."""
    _, h, monoid, step, _ = f.parts()
    memoryless = gates(monoid) == {"zero"} and step == Step(rate=step.rate) and rate_shape(step.rate) == "scalar"
    return memoryless and h.turns and not h.stats and not h.reads


@fact
def no_cascade(update: StateUpdate) -> str | None:
    """Why stages cannot run one after another inside a chunk, or None if they can."""
    if (reason := _computed(update)) is not None:
        return reason
    step, memory = update.parts().step, update.parts().memory
    if memory.scored or memory.kind == "levels":
        return f"{type(memory).__name__} memory is read through its {'scores' if memory.scored else 'levels'}"
    if feedback(update) != "none":
        return "the drive depends on the state inside a chunk"
    if not step.lazy:
        return "an agile state projects at every datum"
    for u in (update, *update.filters(), *(s for f in (update, *update.filters()) for s in f.parts().h.stats)):
        uc, uh, um, us, _ = u.parts()
        if not gates(um) <= {"identity", "zero", "scalar", "diagonal", "pair", "row", "hadamard"}:
            return "stages scan element-wise gates only"
        if "weights" in uh.reads:
            return "a filter that sees the weights feeds them back at every datum"
        if us.via and u is not update:
            return "filters of filters"
        if us.feedback != 0.0 or isinstance(uc, Linear) and uc.of == "state":
            return "what a filter holds is looked at, or taken from, at every datum"
        if any(isinstance(s.cost, Linear) and (s.cost.raw or s.cost.whitened) for s in u.statistics()):
            return "a statistic of the drive ahead of filters, or of what it has itself whitened"
        if isinstance(us.at, Held):
            return "a held value is refreshed at some data and kept at others"
        if us.start != "zero" or us.read is not None and u is update:
            return "a first-drive start or an outer read point"
    if step.debias:
        return "a keyed normaliser is the affine chain's"
    return None


@fact
def no_gram(update: StateUpdate) -> str | None:
    """Why no exact form of slots by their turns applies, or None if one does."""
    if (reason := _computed(update)) is not None:
        return reason
    cost, h, monoid, step, memory = update.parts()
    if memory.kind != "slots":
        return "only slots turn, by inner products"
    free = h.is_identity and cost.drives == "error" and not cost.encode
    if not free and (h.sphere != ("columns", 1.0) or step.lazy):
        return "slots are unit columns at every token, or of any length where they decode an error"
    if cost.drives is None or isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        return f"{cost!r} is driven by more or less than the value or the error"
    if (
        step.at != "prev"
        or step.via
        or step.read
        or step.steps > 1
        or rate_shape(step.rate) != "scalar"
        or step.start != "zero"
    ):
        return "slots take one explicit step with a scalar rate at the previous state"
    if not gates(monoid) <= {"identity", "scalar"}:
        return "only a scalar forget gate folds into the step"
    return None


@fact
def no_attention(update: StateUpdate) -> str | None:
    """Why the update is not attention over a stored list, or None if it is."""
    if (reason := _computed(update)) is not None:
        return reason
    cost, h, monoid, _, memory = update.parts()
    if memory.kind != "list":
        return f"{type(memory).__name__} memory does not keep a list"
    if cost.drives is None:
        return f"{cost!r} stores something else than the value or its error"
    if update.drive_sees_state and (h.is_identity or not gates(monoid) <= {"identity", "scalar", "rotation"}):
        return "the stored values depend on earlier reads of a matrix, or of keys that are carried"
    if update.drive_sees_state and getattr(memory, "window", None) is not None:
        return "the stored values depend on earlier reads, whose pairs leave their window"
    if h.is_identity and isinstance(memory, List) and memory.window is not None:
        return "h reads the list as the matrix that it equals, and pairs leave its window"
    turns = [p for p in factors(monoid) if p.kind not in ("identity", "scalar")]
    rotations = all(p.kind == "rotation" for p in turns)
    if not rotations and not (len(turns) == 1 and turns[0].rank_one):
        return "keys are turned by rotations or transported by one reflection a token, besides scalar gates"
    return None


@fact
def of_levels(update: StateUpdate) -> StateUpdate:
    """The chain of one matrix whose stretches are levels."""
    return dataclasses.replace(update.normal(), memory=Matrix())


@fact
def no_levels(update: StateUpdate) -> str | None:
    """Why the update is not a chain whose stretches are weighed in chunks, or None if it is."""
    if (reason := _computed(update)) is not None:
        return reason
    p = update.parts()
    if p.memory.kind != "levels":
        return f"{type(p.memory).__name__} memory has no levels"
    plain = of_levels(update)
    if (reason := no_chain(plain)) is not None:
        return reason
    kinds = gates(p.monoid)
    if "low rank" in kinds and not erases_along_key(plain):
        return "a map of low rank erases along the written key: Householder(beta, 'k') after gates"
    if not kinds <= {"identity", "scalar", "diagonal", "pair", "rotation", "low rank"}:
        return "gates of levels are scalars or stand on keys"
    if "rotation" in kinds and kinds - {"rotation", "identity", "scalar", "pair"}:
        return "a dense transition"
    if rate_shape(p.step.rate) == "row" and not scales_values(plain):
        return "every row of the state has a transition of its own"
    return None


@fact
def no_passes(update: StateUpdate) -> str | None:
    """Why the update is not two chains with h between them, or None if it is."""
    if (reason := _computed(update)) is not None:
        return reason
    memory = update.parts().memory
    if memory.kind in ("bounded", "regression"):
        return None
    return f"{type(memory).__name__} memory has no slots that softmax reads, and no sums that a solve does"


@fact
def no_solve(update: StateUpdate) -> str | None:
    """Why what is read of a state between its statistics is not found by vectors alone, or None if it is."""
    if (reason := _computed(update)) is not None:
        return reason
    cost, h, monoid, step, memory = update.parts()
    if memory.kind != "matrix" or not h.by_sides:
        return "no h between two statistics, of keys and of values, is read"
    if cost.drives != "target" or update.parts().ridged:
        return f"{cost!r} is driven by more or less than the value"
    for u, side in ((update, None), *zip(update.statistics(), h.sides, strict=True)):
        of, own, gate, s, _ = u.parts()
        if side is not None:
            if not isinstance(of, Linear) or (of.of, side) not in (("key", "columns"), ("value", "rows")):
                return f"a statistic of {side} sums more or less than keys or values"
            if not own.is_identity or of.precision != "input":
                return f"a statistic with {own!r}, or in other precision"
        plain = isinstance(s.at, str) and s.at == "prev" and s.lazy and s.steps == 1 and s.start == "zero"
        if not plain or s.via or s.read is not None or s.debias or s.feedback != 0.0 or s.write != "sum":
            return "more than sums that are kept and written: filters, anchors, normalisers or read points"
        if not gates(gate) <= {"identity", "scalar"} or rate_shape(s.rate) != "scalar":
            return "gates and rates of sums are scalars"
    return None


__all__ = [
    "Feedback",
    "averages",
    "block_size",
    "by_entry",
    "erases_along_key",
    "feedback",
    "idle",
    "no_attention",
    "no_cascade",
    "no_chain",
    "no_gram",
    "no_levels",
    "no_passes",
    "no_several",
    "no_solve",
    "no_substitution",
    "of_levels",
    "refills",
    "scales_values",
    "structure",
]
