"""What a tuple asks of the data axis, read from its parts."""

from __future__ import annotations

from collections.abc import Iterator

from axes.core.algorithms import Held
from axes.core.costs import Linear
from axes.core.facts import fact
from axes.core.legality import gates
from axes.core.monoids import Monoid
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate

LAYER_SIGNALS = frozenset({"k", "v", "e"})  # layer input, target of the layer's output, gradient of that output


def parts_of(update: StateUpdate) -> Iterator[StateUpdate]:
    """The update, its filters and statistics, at every depth."""
    yield update
    h = update.parts().h
    for inner in (*update.filters(), *h.stats):
        yield from parts_of(inner)


def keyed(update: StateUpdate) -> bool:
    """Whether the update computes its own gradient from layer inputs and targets, example by example."""
    return "g" not in update.cost.needs


def needs_layers(update: StateUpdate) -> bool:
    """Whether it reads inputs or output gradients of layers, which only a model's hooks can supply."""
    return not update.signals().isdisjoint(LAYER_SIGNALS)


def holds(update: StateUpdate) -> bool:
    """Whether a statistic's value is computed in some steps and kept in others."""
    return any(isinstance(part.parts().step.at, Held) for part in parts_of(update))


def needs_examples(update: StateUpdate) -> bool:
    """Whether it reads the inputs and output gradients of every example, not sums of their products."""
    costs = (part.parts().cost for part in parts_of(update))
    return any(isinstance(cost, Linear) and cost.of == "eigen-fisher" for cost in costs)


def vectors(update: StateUpdate) -> tuple[str, ...]:
    """Vectors that its monoids read by name: constants of a parameter group."""
    return tuple(sorted(update.signals() - LAYER_SIGNALS - {"g"}))


def needs_matrices(update: StateUpdate) -> bool:
    """Whether some part of it has a meaning for matrices only."""
    for part in parts_of(update):
        cost, h, _, _, _ = part.parts()
        any_leaf = ("each-row", "each-column", "number")  # of a vector, its one row
        if h.matrix or isinstance(cost, Linear) and not (cost.by_entry or cost.side in any_leaf):
            return True
    return keyed(update)


def elementwise(update: StateUpdate) -> bool:
    """Whether every entry of a parameter is updated on its own: then a complex number is a pair of real ones."""
    return mixes(update) is None


@fact
def mixes(update: StateUpdate) -> str | None:
    """The first part of a tuple that mixes the entries of a parameter, or has a meaning for matrices only; or None."""
    for part in parts_of(update):
        cost, h, monoid, _, _ = part.parts()
        if not h.entrywise or h.matrix:
            return type(h).__name__
        if _turns(monoid):
            return type(monoid).__name__
        if isinstance(cost, Linear) and not cost.by_entry:
            return f"a statistic of {cost.of}"
    return "a cost of keys and values" if keyed(update) else None


def turns(update: StateUpdate) -> str | None:
    """The first monoid of a tuple that is more than numbers times entries, or None."""
    return next((type(m).__name__ for part in parts_of(update) if _turns(m := part.parts().monoid)), None)


def _turns(monoid: Monoid) -> bool:
    return not gates(monoid) <= {"identity", "zero", "scalar", "hadamard"}


def require_parameter(update: StateUpdate) -> None:
    """IllegalUpdate unless one parameter can be the whole state of the update."""
    cost, _, _, step, memory = update.parts()
    if isinstance(cost, Linear):
        raise IllegalUpdate(
            "a tuple with cost Linear() is a filter or a statistic: to optimize with it, put it into "
            "StateUpdate(Given(), algorithm=Step(Per('lr'), via=(it,)))"
        )
    if memory.kind not in ("parameter", "matrix", "entries", "slots"):
        raise IllegalUpdate(
            f"an optimizer's state is one parameter, and {type(memory).__name__} memory is not one tensor of its "
            "shape: use Parameter() with Given(), or Matrix() with a cost of keys and values"
        )
    if step.debias:
        raise IllegalUpdate("debias divides an output by its response; on the parameter itself it has no meaning here")


def moves_before_closure(update: StateUpdate) -> bool:
    """Whether the gradient is wanted at a point that is not what the parameter shows, so that a closure is needed.

    The parameter shows the output. Without a read point that is W, the point of at="prev"; with one it is the point of
    at="read". A gated evaluation is always elsewhere.
    """
    step = update.parts().step
    if keyed(update):
        return False
    return step.at == "gated" or (step.at == "prev" and step.read is not None)
