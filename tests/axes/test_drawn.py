"""What `make test` draws: one of each that are alike, whatever is left over or slow anyway, and no case is lost."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.drawn import FEW, SHARES, crossed, drawn, left_out, one_of_each, seers

ROOT = Path(__file__).resolve().parents[2]


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


# ---- while a file is collected ---------------------------------------------------------------------------------------


def items(function: str, names: list[str], cases: Iterable[Any], marks: tuple[str, ...] = ()) -> list[Any]:
    """A function's cases as pytest collects them. One string of names is parametrised at once."""
    made = [pytest.mark.parametrize(said, ()).mark for said in names] + [getattr(pytest.mark, x).mark for x in marks]

    def iter_markers(name: str = "") -> list[pytest.Mark]:
        return [mark for mark in made if name in ("", mark.name)]

    every = [name for said in names for name in said.split(",")]
    return [
        SimpleNamespace(
            nodeid=f"tests/test_it.py::{function}[{case}]", iter_markers=iter_markers,
            callspec=SimpleNamespace(params=dict(zip(every, case, strict=True))),
        )
        for case in cases
    ]  # fmt: skip


def kept(given: list[Any], shares: dict[str, int] | None = None, seed: int = 0) -> list[tuple[Any, ...]]:
    left = left_out(given, seed, shares or {})
    return [tuple(item.callspec.params.values()) for item in given if item not in left]


CROSSED = list(product("abcd", range(5), [None, 1.0, True, 1, (1, 2), int]))


@pytest.mark.parametrize("names", [["x", "y", "z"], ["x", "y,z"], ["x,y,z"]])
def test_of_what_is_crossed_every_value_and_most_pairs(names: list[str]) -> None:
    found = kept(items("f", names, CROSSED))
    pairs = [{pair for row in rows for pair in combinations(enumerate(map(repr, row)), 2)} for rows in (CROSSED, found)]
    for every, drawn_ones in zip(zip(*CROSSED, strict=True), zip(*found, strict=True), strict=True):
        assert set(map(repr, every)) == set(map(repr, drawn_ones))
    assert len(found) == len(CROSSED) // 4 and len(pairs[1]) > 0.9 * len(pairs[0])


def test_of_two_every_value_and_no_more() -> None:
    given = list(product(range(12), "ab"))
    found = kept(items("f", ["x", "y"], given))
    assert [x for x, _ in found] == list(range(12)) and {y for _, y in found} == {"a", "b"}
    assert found == kept(items("f", ["x", "y"], given)) != kept(items("f", ["x", "y"], given), seed=1)
    assert found != kept(items("g", ["x", "y"], given))


@pytest.mark.parametrize(
    ("names", "cases"),
    [
        (["x"], [(n,) for n in range(40)]),
        (["x,y,z"], [(n % 4, n % 5, n % 7) for n in range(20)]),  # a table: few of its combinations
        (["x", "y"], list(product([0, 1], [0, 1]))),  # few
    ],
    ids=["one", "table", "few"],
)
def test_what_has_no_double_is_kept(names: list[str], cases: list[tuple[Any, ...]]) -> None:
    assert kept(items("f", names, cases)) == cases


@pytest.mark.parametrize("mark", ["slow", "gpu"], ids="of {}".format)
def test_what_is_slow_or_for_a_gpu_is_not_drawn_from(mark: str) -> None:
    others = items("f", ["x", "y"], product(range(9), "ab"), (mark,))
    assert left_out(others, 0, {"tests/test_it.py": 2}) == []
    assert {x for x, _ in kept(items("f", ["x", "y"], product(range(9), "cd")) + others)} == set(range(9))


def test_functions_of_a_file_share_out_their_rows() -> None:
    rows, options = list(range(30)), ["a", {"b": 1}]
    given = {
        "f": items("f", ["x"], [(n,) for n in rows]),
        "g": items("g", ["x", "y"], product(rows, options)),
        "h": items("h", ["x,y"], [(n, {"of": str(n % 3)}) for n in rows] + [(99, {})]),
        "few": items("few", ["x"], [(n,) for n in rows[:FEW]]),
    }
    every = [item for some in given.values() for item in some]
    left = left_out(every, 0, {"tests/test_it.py": 3})
    taken = {name: [i.callspec.params["x"] for i in some if i not in left] for name, some in given.items()}
    assert taken["few"] == rows[:FEW]
    assert sorted(taken["f"] + taken["g"] + taken["h"]) == [*rows, 99]  # each once, and what one has alone
    assert all(9 <= len(taken[name]) <= 11 for name in "fgh")
    asked = [item.callspec.params["y"] for item in given["g"] if item not in left]
    assert all(option in asked for option in options)


def test_a_function_that_is_named_shares_with_nobody() -> None:
    both = items("f", ["x"], [(n,) for n in range(12)]) + items("g", ["x"], [(n,) for n in range(12)])
    shares = {"tests/test_it.py": 2, "tests/test_it.py::f": 1, "tests/test_it.py::g": 4}
    assert len(kept(both, shares)) == 12 + 3
    assert len(kept(items("few", ["x"], [(1,), (2,)]), {"tests/test_it.py::few": 2})) == 1


def test_what_occurs_beside_rows_of_others_alone_is_kept() -> None:
    cases = [*product(range(9), "ab"), (0, "c"), (1, "d"), (2, "e")]
    found = kept(items("f", ["x", "y"], cases), {"tests/test_it.py::f": 3})
    assert {y for _, y in found} == set("abcde") and len({x for x, y in found if y in "ab"}) == 3


def test_what_saw_a_planted_fault_is_kept() -> None:
    given = items("f", ["x", "y"], product(range(9), "ab"))
    left = left_out(given, 0, {})
    assert len(left) == 9 and left_out(given, 0, {}, {left[3].nodeid}) == left[:3] + left[4:]
    assert len(seers()) > 500 and all(x.startswith("tests/") for x in seers() if "::" in x)


def test_shares_are_of_functions_that_are_there() -> None:
    for said in SHARES:
        file, _, function = said.partition("::")
        names = {x.name for x in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(x, ast.FunctionDef)}
        assert not function or function in names, said


def test_what_is_collected_is_drawn_from(request: pytest.FixtureRequest) -> None:
    """Whichever tests are asked for: a file is drawn from as a whole."""
    module = request.node.getparent(pytest.Module)
    report = module.ihook.pytest_make_collect_report(collector=module)
    cases = [x for x in report.result if getattr(x, "originalname", "") == test_one_of_every_few_neighbours.__name__]
    assert len(cases) == 48 and sum("slow" not in x.keywords for x in cases) == 12
