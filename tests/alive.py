"""What lives, that too which `gc` no longer looks at: what was imported and collected before the first test
(conftest.py)."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

T = TypeVar("T")
_MANY = 200_000  # objects that are not frozen, from which looking through them takes longer than a small test
_frozen: dict[type, list[Any]] = {}  # those of a type that were there when all was last looked through


def everything() -> list[Any]:
    """All objects that gc knows, those that are frozen included."""
    _frozen.clear()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    found = gc.get_objects()
    if frozen:
        gc.freeze()
    return found


def alive(kind: type[T]) -> list[T]:
    """Every object of a type, and of no other: one that lives for long, since what is found may be kept."""
    young = gc.get_objects()
    if kind in _frozen and len(young) < _MANY:
        return [*_frozen[kind], *(x for x in young if type(x) is kind)]
    found = [x for x in everything() if type(x) is kind]
    if gc.get_freeze_count():
        _frozen[kind] = found
    return found
