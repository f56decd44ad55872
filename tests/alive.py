"""What lives, that too which `gc` no longer looks at: what was imported and collected before the first test
(conftest.py)."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

T = TypeVar("T")


def everything() -> list[Any]:
    """All objects that gc knows, those that are frozen included."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    found = gc.get_objects()
    if frozen:
        gc.freeze()
    return found


def alive(kind: type[T]) -> list[T]:
    """Every object of a type, and of no other."""
    return [x for x in everything() if type(x) is kind]
