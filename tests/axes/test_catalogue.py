"""The catalogue: complete, consistent, and helpful when a name is wrong."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import axes.depth
import axes.optim
import axes.sequence
from axes import catalogue, optim
from axes.core.state_update import StateUpdate
from axes.depth import DepthMixer
from axes.errors import AxesError, UnknownName
from axes.optim.elsewhere import ELSEWHERE, plain
from axes.optim.rules.general import Interpreted
from axes.sequence import SequenceLayer

# one trains a model of at most 5000 parameters that returns one tensor, the other is the class behind any tuple
UNLISTED = {axes.optim.ExactNaturalGradient, Interpreted}
FAMILIES = {"data": axes.optim, "sequence": axes.sequence, "depth": axes.depth}


def _declared(package: object, base: type) -> set[type]:
    """Every final subclass of an adapter that a family's modules define."""
    found: set[type] = set()
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):  # type: ignore[attr-defined]
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and value is not base
                and issubclass(value, base)
                and value.__module__ == module.__name__
                and "name" in vars(value)
            ):
                found.add(value)
    return found


@pytest.mark.parametrize(
    ("axis", "base"), [("sequence", SequenceLayer), ("depth", DepthMixer), ("data", axes.optim.Optimizer)]
)
def test_every_declared_instance_is_listed(axis: str, base: type) -> None:
    assert _declared(FAMILIES[axis], base) - UNLISTED == set(FAMILIES[axis].ALL)


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda e: e.name)
def test_entry_says_where_it_comes_from(entry: catalogue.Entry) -> None:
    assert isinstance(entry.update, StateUpdate)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name)
    assert entry.paper and entry.equation and entry.differs
    assert re.match(r"@\w+\{[\w:-]+,", entry.bibtex) and entry.bibtex.count("{") == entry.bibtex.count("}")
    assert entry.cls.__doc__ and len(entry.cls.__doc__) > 40


def test_the_table_says_which_matrices_mix() -> None:
    rows = {line.split("`")[1]: line for line in catalogue.taxonomy().splitlines() if line.startswith("| `")}
    for name, monoid in (
        ("hyper-connections", "| GeneralLinear |"),
        ("mhc", "| GeneralLinear(Birkhoff()) |"),
        ("jpmhc", "| GeneralLinear(Cayley(scale=0.1, method='closed')) |"),
        ("jpmhc-mean-preserving", "kind='mean-preserving'"),
    ):
        assert monoid in rows[name]


def test_names_are_unique() -> None:
    names = [e.name for e in catalogue.entries()]
    assert len(names) == len(set(names))


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="gated-delta-net"):
        catalogue.get("gated-deltanet", axis="sequence")
    with pytest.raises(UnknownName, match="unknown axis 'time'"):
        catalogue.entries("time")  # type: ignore[arg-type]


def test_rules_that_are_no_class_say_where_they_are() -> None:
    for name, text in {
        "MuonClip": "query_key_clip",
        "rprop": "no tuple says it",
        "Grokfast": "it wraps any rule",
    }.items():
        with pytest.raises(UnknownName, match=text):
            catalogue.get(name, axis="data")
    for name, text in ELSEWHERE.items():
        assert plain(name) not in {plain(e.name) for e in catalogue.entries()}
        assert not hasattr(optim, name)
        with pytest.raises(AttributeError, match=re.escape(text)):
            getattr(optim, name)
        for here in re.findall(r"wrappers\.(\w+)", text):
            assert hasattr(optim.wrappers, here)
    with pytest.raises(AttributeError, match="axes.optim has no Adamm$"):
        optim.Adamm  # noqa: B018


def test_cite_by_name_class_and_object() -> None:
    entry = catalogue.get("gated-delta-net")
    assert catalogue.cite("gated-delta-net") == catalogue.cite(entry.cls) == catalogue.cite(entry) == entry.bibtex
    assert catalogue.cite(entry.cls(8, heads=2)) == entry.bibtex
    with pytest.raises(AxesError, match="not in the catalogue"):
        catalogue.cite(3)


def test_markers_missing_is_an_error() -> None:
    with pytest.raises(AxesError, match="markers are missing"):
        catalogue.with_block("no table here")
