"""Rows of `statements/` and functions of `checks/` belong together, and a wrong row is refused with file and id."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest

from axes.claims import checks
from axes.claims.base import CHECKS, Check, Draw, Findings, Verdict, check, holds
from axes.claims.register import find, groups, paired
from axes.errors import AxesError

WORKS = {"book": {"author": "An author", "title": "A title"}}
ROW = """
[A01]
statement = "One is one."
verdict = "exact"
instance = "none: logic"
source = "book"
place = "page 1"
"""


def passing(draw: Draw) -> Findings:
    yield holds("one", 0.0)


def read(tmp_path: Path, text: str, *ids: str) -> tuple[object, ...]:
    file = tmp_path / "A.toml"
    file.write_text(text)
    found: dict[str, Check] = dict.fromkeys(ids, passing)
    return paired(file, WORKS, found)


def test_every_row_has_its_check_or_says_why_it_needs_none() -> None:
    for c in find():
        assert (c.check is None) == (c.verdict is Verdict.UNTESTABLE) == bool(c.reason), c.id
        assert c.check is None or (c.check.__name__, CHECKS[c.id]) == (c.id, c.check)  # type: ignore[attr-defined]


def test_every_check_has_its_row() -> None:
    assert set(CHECKS) == {c.id for c in find() if c.check is not None}


def test_every_module_of_checks_belongs_to_a_group() -> None:
    modules = [module.name for module in pkgutil.iter_modules(checks.__path__)]
    assert modules and {name.partition("_")[0].upper() for name in modules} <= set(groups())


def test_a_row_and_its_check_make_a_claim(tmp_path: Path) -> None:
    wrapped = ROW.replace('"One is one."', '"""\nOne\nis   one."""')
    (c,) = read(tmp_path, wrapped + 'derivation = "Look at it."\nseeds = 5', "A01")
    assert (c.id, c.statement, c.seeds, c.check) == ("A01", "One is one.", 5, passing)  # type: ignore[attr-defined]
    assert str(c.source) == "An author, “A title”, page 1"  # type: ignore[attr-defined]


def without(field: str) -> str:
    return "\n".join(line for line in ROW.splitlines() if not line.startswith(f"{field} ="))


@pytest.mark.parametrize(
    ("text", "ids", "words"),
    [
        (ROW, (), "A.toml: claim A01: a testable claim needs a check, a function A01 under @check in checks/a_"),
        (ROW, ("A01", "A02"), r"A.toml: claim A02 has a check and no row: write \[A02\]"),
        (ROW + ROW, ("A01",), "A.toml cannot be read: .*A01"),
        (ROW.replace("A01", "B01"), ("B01",), "A.toml: claim B01: an id of this file is A and two digits"),
        (ROW.replace("A01", "A1"), ("A1",), "A.toml: claim A1: an id of this file is A and two digits"),
        ('A01 = "exact"', ("A01",), r"A.toml: claim A01: a row is a table, \[A01\]"),
        (ROW.replace("exact", "exactly"), ("A01",), "A.toml: claim A01: unknown verdict 'exactly': did you mean exact"),
        (ROW.replace('"book"', '"books"'), ("A01",), "A.toml: claim A01: unknown source 'books': did you mean book"),
        (ROW + 'plase = "x"', ("A01",), "A.toml: claim A01: unknown field 'plase': did you mean place"),
        (ROW + 'conditions = " "', ("A01",), "A.toml: claim A01: conditions is a text, got ' '"),
        (ROW + "conditions = 3", ("A01",), "A.toml: claim A01: conditions is a text, got 3"),
        (ROW + 'seeds = "3"', ("A01",), "A.toml: claim A01: seeds is a whole number above 0, got '3'"),
        (ROW + "seeds = 0", ("A01",), "A.toml: claim A01: seeds is a whole number above 0, got 0"),
        (ROW + 'reason = "no"', ("A01",), "A.toml: claim A01: only an untestable claim has a reason"),
        (ROW.replace("exact", "not testable"), (), "A.toml: claim A01: an untestable claim has a reason and no check"),
        (ROW.replace("exact", "false as stated"), ("A01",), "A.toml: claim A01: a refuted claim says its kind"),
        (ROW.replace("exact", "exact under conditions"), ("A01",), "A.toml: claim A01: say the conditions"),
        *(
            (without(field), ("A01",), f"A.toml: claim A01: the field '{field}' is missing")
            for field in ("statement", "verdict", "instance", "source", "place")
        ),
        ("[A01", ("A01",), "A.toml cannot be read: "),
    ],
)
def test_a_wrong_row_is_refused(tmp_path: Path, text: str, ids: tuple[str, ...], words: str) -> None:
    with pytest.raises(AxesError, match=words):
        read(tmp_path, text, *ids)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AxesError, match="B.toml cannot be read: "):
        paired(tmp_path / "B.toml", WORKS, {})


def test_two_checks_of_one_claim_are_refused() -> None:
    find(["A01"])

    def elsewhere(name: str) -> Callable[[Draw], Findings]:
        function: Callable[[Draw], Findings] = lambda draw: passing(draw)  # noqa: E731
        function.__name__, function.__module__ = name, "somewhere.else"
        return function

    with pytest.raises(AxesError, match="claim A01 has two checks: in axes.claims.checks.a_updates and in somewhere"):
        check(elsewhere("A01"))
