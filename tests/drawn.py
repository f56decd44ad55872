"""Of cases that are much alike, those that `make test` runs; `make test-all` runs them all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

_Param = type(pytest.param(0))


def drawn(cases: Iterable[Any], one_in: int) -> list[Any]:
    """One case of every `one_in` neighbours, each time at the next place among them; the others are slow."""
    made = []
    for i, case in enumerate(cases):
        given = case if isinstance(case, tuple) else (case,)
        whole = case if isinstance(case, _Param) else pytest.param(*given)
        slow = () if i % one_in == i // one_in % one_in else (pytest.mark.slow,)
        made.append(pytest.param(*whole.values, id=whole.id, marks=(*whole.marks, *slow)))
    return made


def crossed(cases: Iterable[Any], *ways: Iterable[Any]) -> list[Any]:
    """Every case (a pytest.param with an id) in all ways, of which one is drawn for each: the next one every time."""
    every = list(product(*ways))
    made = []
    for case in cases:
        for way in every:
            said = "-".join(str(x).removeprefix("torch.") for x in way)
            made.append(pytest.param(*case.values, *way, id=f"{case.id}-{said}", marks=case.marks))
    return drawn(made, len(every))
