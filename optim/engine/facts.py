"""What a tuple asks of a step, worked out once: what decides how a group is stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.optim.engine.capabilities import moves_before_closure
from axes.optim.engine.staged import no_stages
from axes.optim.engine.together import first_is_special, no_program
from axes.programs.program import ForgottenNumber
from axes.routes.choice import Route


@final
@dataclass(frozen=True)
class Facts:
    """What a tuple asks of a step. routes: those there are, with why they are not legal."""

    moves: bool  # its gradient is wanted where the parameter is not
    special: bool  # the first datum is
    routes: Mapping[Route, str | None]
    rates: tuple[str, ...]


@fact
def facts(update: StateUpdate, maximize: bool) -> Facts:
    """Of a tuple that ascends or descends."""
    entrywise = no_program(update, maximize)
    return Facts(
        moves_before_closure(update),
        first_is_special(update),
        {"entrywise": entrywise, "stacks": _no_stacks(update, maximize, entrywise), "interpreter": None},
        tuple(per.name for per in update.demands()),
    )


def followed(update: StateUpdate) -> bool:
    """Whether hyperparameters can be followed through a step, so that they are numbers of it."""
    try:
        facts(update, False)
    except ForgottenNumber:
        return False
    return True


def _no_stacks(update: StateUpdate, maximize: bool, entrywise: str | None) -> str | None:
    """Why a step over stacks is neither one program nor several, or None."""
    return no_stages(update, maximize) if entrywise is not None else "the whole step is one program"
