"""What a tuple asks of a step, worked out once: what decides how a group is stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.optim.engine.capabilities import moves_before_closure
from axes.optim.engine.factored import no_factors
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
    staged: bool  # as stacks it is one program, or programs around geometries
    routes: Mapping[Route, str | None]
    rates: tuple[str, ...]


@fact
def facts(update: StateUpdate, maximize: bool) -> Facts:
    """Of a tuple that ascends or descends."""
    entrywise = no_program(update, maximize)
    as_stacks, staged = _no_stacks(update, maximize, entrywise)
    return Facts(
        moves_before_closure(update),
        first_is_special(update),
        staged,
        {"entrywise": entrywise, "stacks": as_stacks, "interpreter": None},
        tuple(per.name for per in update.demands()),
    )


def followed(update: StateUpdate) -> bool:
    """Whether hyperparameters can be followed through a step, so that they are numbers of it."""
    try:
        facts(update, False)
    except ForgottenNumber:
        return False
    return True


def _no_stacks(update: StateUpdate, maximize: bool, entrywise: str | None) -> tuple[str | None, bool]:
    """Why a step over stacks is neither programs around products nor in stages, or None, and whether it is the last.

    What is programs around products is not looked at further: to trace numbers may be to ask what they are.
    """
    if entrywise is None:
        return "the whole step is one program", False
    around = no_factors(update, maximize)
    if update.parts().counts:
        around = "programs around products do not know the number of the datum, which a rate depends on"
    if around is None:
        return None, False
    in_stages = no_stages(update, maximize)
    if in_stages is None:
        return None, True
    return ", and ".join(dict.fromkeys((in_stages, around))), False
