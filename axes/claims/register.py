"""The register: the rows of `statements/`, one file a group, each with its check from `checks/`, read when asked for.

A row is a table under the claim's id with fields of `Claim`; `source` names a work of `index.toml` and `place` where in
it the claim stands. The check is the function of that name, marked `@check`, in a module `checks/<group>_<subject>.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from axes.claims import checks
from axes.claims.base import CHECKS, Check, Claim, Source, Verdict
from axes.errors import AxesError, UnknownName

_STATEMENTS = resources.files("axes.claims") / "statements"
_REQUIRED = ("statement", "verdict", "source", "place")
_TEXTS = (*_REQUIRED, "conditions", "kind", "correction", "derivation", "reason", "instance", "figure")


def find(names: Sequence[str] = ()) -> tuple[Claim, ...]:
    """Claims by id (A01) or group (A), in the register's order; all without names. Raises UnknownName."""
    wanted = {n.upper() for n in names} or set(groups())
    letters = {n[:1] for n in wanted}
    loaded = [c for g in groups() if g in letters for c in group(g)]
    ids = [c.id for c in loaded]
    for name in sorted(wanted - set(ids) - set(groups())):
        # a group's own ids are the nearest; without the group there is nothing near, only the groups
        raise UnknownName("claim", name, [i for i in ids if i[0] == name[:1]] or groups())
    return tuple(c for c in loaded if c.id in wanted or c.group in wanted)


def counts(claims: Sequence[Claim]) -> dict[str, dict[Verdict, int]]:
    """How many claims of each verdict a group has."""
    tally = Counter((c.group, c.verdict) for c in claims)
    return {g: {v: tally[g, v] for v in Verdict} for g in groups()}


@cache
def groups() -> dict[str, str]:
    """Letter and title of every group, in order."""
    return dict(_index()["groups"])


@cache
def group(letter: str) -> tuple[Claim, ...]:
    """The claims of one group: its file is read and its checks are imported at the first call."""
    return paired(_STATEMENTS / f"{letter}.toml", _index()["works"], _checks(letter))


@cache
def _index() -> dict[str, Any]:
    return _read(_STATEMENTS / "index.toml")


def _checks(letter: str) -> dict[str, Check]:
    """The checks in the modules of a group, by id."""
    prefix = f"{checks.__name__}.{letter.lower()}_"
    for module in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        if module.name.startswith(prefix):
            importlib.import_module(module.name)
    return {id: f for id, f in CHECKS.items() if f.__module__.startswith(prefix)}


def paired(file: Traversable, works: Mapping[str, Mapping[str, str]], found: Mapping[str, Check]) -> tuple[Claim, ...]:
    """The claims of a file of statements with their checks. Raises AxesError, naming file and id, for a wrong row."""
    rows = _read(file)
    for id in found:
        if id not in rows:
            raise AxesError(f"{file.name}: claim {id} has a check and no row: write [{id}], or rename its function")
    claims = []
    for id, fields in rows.items():
        try:
            claims.append(_claim(file.name.removesuffix(".toml"), id, fields, works, found.get(id)))
        except AxesError as error:
            said = str(error).removeprefix(f"claim {id}: ")
            raise AxesError(f"{file.name}: claim {id}: {said}") from None
    return tuple(claims)


def _read(file: Traversable) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:  # an id that stands twice is among the latter
        raise AxesError(f"{file.name} cannot be read: {error}") from None


def _claim(letter: str, id: str, fields: object, works: Mapping[str, Mapping[str, str]], check: Check | None) -> Claim:
    if not (id[:1] == letter and len(id) == 3 and id[1:].isdigit()):
        raise AxesError(f"an id of this file is {letter} and two digits")
    if not isinstance(fields, dict):
        raise AxesError(f"a row is a table, [{id}] and its fields below it")
    _refuse_unknown("field", fields, (*_TEXTS, "seeds"))
    for name in _REQUIRED:
        if name not in fields:
            raise AxesError(f"the field {name!r} is missing")
    for name, value in fields.items():
        if not (isinstance(value, str) and value.strip() if name in _TEXTS else type(value) is int and value > 0):
            raise AxesError(f"{name} is {'a text' if name in _TEXTS else 'a whole number above 0'}, got {value!r}")
    texts = {name: " ".join(value.split()) for name, value in fields.items() if name in _TEXTS}
    _refuse_unknown("verdict", [texts["verdict"]], list(Verdict))
    _refuse_unknown("source", [texts["source"]], works)
    verdict, work = Verdict(texts.pop("verdict")), works[texts.pop("source")]
    if verdict is Verdict.UNTESTABLE:
        texts.setdefault("instance", f"none: {texts.get('reason', '')}")
    elif "instance" not in texts:
        raise AxesError("the field 'instance' is missing")
    source = Source(work["author"], work["title"], texts.pop("place"))
    return Claim(id, verdict=verdict, source=source, check=check, seeds=fields.get("seeds", 3), **texts)


def _refuse_unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in set(known):
            raise UnknownName(kind, name, known)
