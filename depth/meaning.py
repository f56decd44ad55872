"""Which tuples have a meaning on residual streams, and what a write of one does to them."""

from __future__ import annotations

from axes.core.costs import Linear
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate


def corrects(update: StateUpdate) -> bool:
    """Whether a write takes away what is stored under its key, by the factor rate |k|^2 where the cost is a square."""
    cost = update.parts().cost
    return cost.curvature != "none" and not cost.encode


def require_streams(update: StateUpdate) -> None:
    """IllegalUpdate unless the tuple has a meaning on residual streams: a read before the write, k = post, v = y."""
    cost, h, _, step, memory = update.parts()
    reason = None
    if "g" in cost.needs or isinstance(cost, Linear):
        reason = f"{type(cost).__name__} takes its gradient from outside; depth gives k = post, v = y: use Alignment"
    elif memory.kind not in ("matrix", "slots", "entries", "list"):
        reason = (
            f"the adapter has no streams of a {type(memory).__name__} memory: what enters would have to become its "
            "weights; use Matrix, Slots, Entries or List"
        )
    elif step.writes > 1:
        reason = "a sublayer has one output to write: several writes of its parts are fractions=r of the mixer"
    elif step.reads > 1:
        reason = "a sublayer reads by the mixer's own reads: several of its parts are fractions=r of the mixer"
    elif step.read is not None:
        reason = "a read point has no effect: depth reads the state before it writes"
    elif step.start != "zero":
        reason = "start='first' would replace what entered the network by the first sublayer's output"
    elif cost.superlinear and step.at != "new" and h.sphere is None:
        reason = (
            f"the gradient of {cost!r} grows faster than the error, so that no explicit step is stable on streams of "
            "any size: use Step(at='new')"
        )
    if reason is not None:
        raise IllegalUpdate(f"this tuple has no meaning along depth: {reason}")


__all__ = ["corrects", "require_streams"]
