"""Errors a reader can act on: who, what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AxesError(ValueError):
    """Base of every error the package raises on purpose; its text is meant for people."""


class IllegalUpdate(AxesError):
    """A tuple whose parts cannot act together, or that asks for a setting without effect."""


class ShapeError(AxesError):
    """A tensor of the wrong shape, dtype or device at a public entry."""


class NotFiniteError(AxesError):
    """A NaN or infinity where numbers are required; names the tensor."""


def plain(name: str) -> str:
    """A name as it is compared: letters and digits, in lower case."""
    return "".join(filter(str.isalnum, name)).lower()


class UnknownName(AxesError):
    """A name that is not in a registry; carries the nearest matches. said: instead of them, where it is known.

    A class's name, or another case or other dashes, is the name that it means and none that is like it.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], said: str | None = None) -> None:
        known = sorted(known)
        spelt = {plain(one): one for one in reversed(known)}
        if said:
            near = []
        elif plain(name) in spelt:
            near = [spelt[plain(name)]]
        else:
            near = [spelt[one] for one in difflib.get_close_matches(plain(name), spelt, n=3, cutoff=0.4)]
        hint = said or (f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}")
        super().__init__(f"unknown {kind} {name!r}: {hint}")
        self.name, self.nearest = name, tuple(near)


class WrongType(ShapeError, TypeError):
    """What has no shape at all where a tensor, a state or a mapping is required; a TypeError too."""


def wrong_type(who: str, name: str, wanted: str, given: object) -> WrongType:
    """Says what was given in the place of what is wanted, and what makes a tensor of it."""
    kind = type(given)
    named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    got = "None" if given is None else f"{'an' if named[0] in 'aeiou' else 'a'} {named}"
    hint = {"numpy": "torch.from_numpy", "builtins": "torch.tensor"}.get(kind.__module__.partition(".")[0])
    arrays = kind.__name__ in ("ndarray", "list", "tuple", "float", "int", "bool") and "tensor" in wanted
    return WrongType(f"{who}: {name} must be {wanted}, got {got}{f': {hint} makes a tensor of it' * arrays}")


def unexpected(who: str, name: str, own: Iterable[str], common: Iterable[str] = ()) -> WrongType:
    """A keyword that nothing here is called, as Python says it, and what there is. common: of all of its kind."""
    others = f", and like all of its kind {', '.join(common)}" if common else ""
    return WrongType(f"{who} got an unexpected keyword argument {name!r}: it takes {', '.join(own)}{others}")
