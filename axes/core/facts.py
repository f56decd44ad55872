"""Facts that follow from a tuple, worked out once for it: what is found is kept on the tuple itself.

A tuple is a value that never changes, so a fact stays true; and it leaves with its tuple. Equality, hash, pickles and
copies know nothing of what is kept (`StateUpdate.__getstate__`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

U = TypeVar("U")
P = ParamSpec("P")
R = TypeVar("R")


def fact(function: Callable[Concatenate[U, P], R]) -> Callable[Concatenate[U, P], R]:
    """A pure function of a tuple, and of further arguments, that is called once for each.

    Threads that ask at the same time may each call it: what is kept is the same.
    """
    name = f"_{function.__module__}_{function.__qualname__}".replace(".", "_")  # a compiler wants a plain name

    @functools.wraps(function)
    def known(update: U, *given: P.args, **named: P.kwargs) -> R:
        kept: dict[Any, R] | None = getattr(update, name, None)
        if kept is None:
            kept = {}
            object.__setattr__(update, name, kept)  # tuples are frozen
        key = (given, *sorted(named.items())) if named else given
        if key not in kept:
            kept[key] = function(update, *given, **named)
        return kept[key]

    return known
