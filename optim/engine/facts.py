"""What a tuple asks of a step, worked out once: what decides how a group is stepped."""

from __future__ import annotations

import dataclasses
from typing import final

from axes.core.state_update import StateUpdate
from axes.optim.engine.capabilities import moves_before_closure
from axes.optim.engine.factored import factors
from axes.optim.engine.stacked import cut
from axes.optim.engine.together import first_is_special, program


@final
@dataclasses.dataclass(frozen=True)
class Facts:
    """What a tuple asks of a step."""

    moves: bool  # its gradient is wanted where the parameter is not
    special: bool  # the first datum is
    entrywise: bool  # it is a program over lists of tensors
    stacked: bool  # it is programs around products of stacks
    rates: tuple[str, ...]


_FACTS: dict[tuple[int, bool], tuple[StateUpdate, Facts]] = {}


def facts(update: StateUpdate, maximize: bool) -> Facts:
    """By identity: to hash a tuple takes as long as to step a parameter."""
    held = _FACTS.get((id(update), maximize))
    if held is None or held[0] is not update:
        if len(_FACTS) > 512:
            _FACTS.clear()
        traced = program(update, maximize) is not None
        found = Facts(
            moves_before_closure(update),
            first_is_special(update),
            traced,
            not traced and (cut(update, maximize) or factors(update, maximize)) is not None,
            tuple(per.name for per in update.demands()),
        )
        held = _FACTS[(id(update), maximize)] = (update, found)
    return held[1]
