"""What `make test` draws: one of each that are alike, whatever is left over or slow anyway, and no case is lost."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.drawn import crossed, drawn, one_of_each


def values(cases: list[Any], slow: bool | None = None) -> list[Any]:
    """Of all cases, or of those that are slow or not."""
    kept = [case for case in cases if slow in (None, any(mark.name == "slow" for mark in case.marks))]
    return [case.values if len(case.values) > 1 else case.values[0] for case in kept]


@pytest.mark.parametrize("count", range(12))
@pytest.mark.parametrize("one_in", [1, 2, 3, 5])
def test_one_of_every_few_neighbours(count: int, one_in: int) -> None:
    made = drawn(range(count), one_in)
    assert values(made) == list(range(count))
    assert [x // one_in for x in values(made, slow=False)] == list(range(-(-count // one_in)))


def test_each_time_at_the_next_place() -> None:
    assert values(drawn(range(12), 3), slow=False) == [0, 4, 8, 9]


def test_what_is_slow_anyway_stands_for_nobody() -> None:
    other = pytest.mark.skipif("False")
    given = [pytest.param(x, id=f"{x}!", marks=(pytest.mark.slow, other) if x in "adf" else other) for x in "abcdefg"]
    made = drawn(given, 2)
    assert values(made, slow=False) == ["b", "g"] and sorted(values(made)) == list("abcdefg")
    assert all(case.id == f"{case.values[0]}!" and other.mark in [mark.mark for mark in case.marks] for case in made)


def test_every_case_in_one_way_and_every_way() -> None:
    given = [pytest.param(x, id=x) for x in "abcdef"]
    made = crossed(given, [1, 2], [False, True])
    assert values(made) == list(product("abcdef", [1, 2], [False, True]))
    quick = values(made, slow=False)
    assert [case for case, *_ in quick] == list("abcdef") and {tuple(way) for _, *way in quick} == set(
        product([1, 2], [False, True])
    )
    assert made[0].id == "a-1-False"


def test_groups_of_any_length() -> None:
    made = one_of_each(["ab", "cde", "f", "gh"])
    assert values(made) == list("abcdefgh") and values(made, slow=False) == ["a", "d", "f", "h"]
