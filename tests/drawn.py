"""Of cases that are much alike, those that `make test` runs; `make test-all` runs them all.

What is drawn follows from the order of the cases alone, so that it is the same in every run and process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

_Param = type(pytest.param(0))


def one_of_each(groups: Iterable[Sequence[Any]]) -> list[Any]:
    """One case of every group, each time at the next place among them; the others are slow."""
    made = []
    for n, group in enumerate(groups):
        for place, case in enumerate(map(_param, group)):
            slow = () if place == n % len(group) else (pytest.mark.slow,)
            made.append(pytest.param(*case.values, id=case.id, marks=(*case.marks, *slow)))
    return made


def drawn(cases: Iterable[Any], one_in: int) -> list[Any]:
    """One case of every `one_in` neighbours, of the last ones too where they are fewer. Those that are slow anyway
    are nobody's neighbours."""
    every = [_param(case) for case in cases]
    quick = [case for case in every if not _slow(case)]
    groups = [quick[i : i + one_in] for i in range(0, len(quick), one_in)]
    return [*one_of_each(groups), *filter(_slow, every)]


def crossed(cases: Iterable[Any], *ways: Iterable[Any]) -> list[Any]:
    """Every case (a pytest.param with an id) in all ways, of which one is drawn for each: the next one every time."""
    every = [(way, "-".join(str(x).removeprefix("torch.") for x in way)) for way in product(*ways)]
    return one_of_each(
        [pytest.param(*case.values, *way, id=f"{case.id}-{said}", marks=case.marks) for way, said in every]
        for case in cases
    )


def _param(case: Any) -> Any:
    return case if isinstance(case, _Param) else pytest.param(*(case if isinstance(case, tuple) else (case,)))


def _slow(case: Any) -> bool:
    return any(mark.name == "slow" for mark in case.marks)
