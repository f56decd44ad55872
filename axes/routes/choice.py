"""The words in which every axis says what runs: how (route), who (implementation), why, and on which device.

`axes.select` and `axes.explain` ask an object for its `plans`, and a class, which has no parameters yet, for its
`default_plans`: each adapter answers for itself, with the decision that its own steps obey.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, get_args

import torch

from axes.core.state_update import StateUpdate
from axes.errors import AxesError

Implementation = Literal["reference", "torch", "triton", "c"]
Route = Literal[
    "interpreter", "chain", "substitution", "cascade", "gram", "attention", "passes", "levels", "solve", "recurrent",
    "token", "entrywise", "stacks",
]  # fmt: skip
_IMPLEMENTATIONS = get_args(Implementation)
HOPPER = (9, 0)  # the capability that is assumed of a GPU that is not here


class NoImplementation(AxesError):
    """A named implementation cannot compute this update; says why."""


class Choice(NamedTuple):
    """How an update will be computed, by whom, and why not by something faster."""

    route: Route
    implementation: Implementation
    reason: str


class Target(NamedTuple):
    """A device to answer for. capability: of a GPU, read from the one that is here, or named, or assumed."""

    device: torch.device
    capability: tuple[int, int] | None = None
    known: Literal["here", "named", "assumed"] = "here"

    @classmethod
    def of(cls, device: str | torch.device | Target) -> Target:
        """A device by any of its names; "cuda:sm_80" is a GPU of that capability, wherever it may be."""
        return device if isinstance(device, Target) else _target(device)

    def __str__(self) -> str:
        if self.capability is None:
            return str(self.device)
        major, minor = self.capability
        return f"{self.device} (sm_{major}{minor}{', assumed' if self.known == 'assumed' else ''})"


@functools.lru_cache
def _target(name: str | torch.device) -> Target:
    named = re.fullmatch(r"cuda:sm_(\d+)(\d)", name) if isinstance(name, str) else None
    if named:
        return Target(torch.device("cuda"), (int(named[1]), int(named[2])), "named")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise AxesError(
            f"torch knows no device {name!r}: give cpu, cuda, cuda:0, ..., or for a GPU that need not be here "
            "cuda:sm_80 (its compute capability without the dot)"
        ) from None
    if device.type != "cuda":
        return Target(device)
    if torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count():
        return Target(device, torch.cuda.get_device_capability(device))
    return Target(device, HOPPER, "assumed")


class Plan(NamedTuple):
    """What runs for one tuple of an object. routes: all that there are on its axis, with why they are not legal."""

    name: str
    update: StateUpdate
    choice: Choice
    target: Target
    dtype: torch.dtype
    routes: Mapping[Route, str | None]


class Planned(Protocol):
    """What has tuples and knows how they run; what is not given is the object's own."""

    def plans(
        self, target: Target | None, dtype: torch.dtype | None, implementation: Implementation | None
    ) -> tuple[Plan, ...]: ...


def require_implementation(name: str | None) -> None:
    """NoImplementation unless it is one, or None."""
    if name is not None and name not in _IMPLEMENTATIONS:
        raise NoImplementation(f"implementation {name!r} is not one of {', '.join(_IMPLEMENTATIONS)}")


def require_named(choice: Choice, name: Implementation | None, update: StateUpdate) -> Choice:
    """The choice of an axis where nobody can be asked for by name; NoImplementation if somebody else was."""
    require_implementation(name)
    if name is not None and name != choice.implementation:
        raise NoImplementation(
            f"no {name} form of {update!r}: it runs as {choice.route} by {choice.implementation}, {choice.reason}"
        )
    return choice
