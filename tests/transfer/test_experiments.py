"""Every experiment is a pair of tuples that differ in what moved, both with a meaning on their axis."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from axes import catalogue
from axes.cli import app
from axes.core.geometry import Euclidean
from axes.errors import AxesError, UnknownName
from axes.moves import retarget
from axes.sequence import FrankWolfeDelta, GatedDeltaNetPrev
from axes.transfer.experiments import EXPERIMENTS, TASKS, Experiment, find
from axes.transfer.named import NAMED, found


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.id)
def test_a_pair(experiment: Experiment) -> None:
    for update in (experiment.arm, experiment.control):
        assert retarget(update, experiment.axis) == update  # has a meaning there as it is
    paths = {d.path.partition(".")[0] for d in experiment.moved}
    assert paths <= {path.partition(".")[0] for path, _ in experiment.without} and experiment.moved
    assert catalogue.get(experiment.source).axis != experiment.axis
    assert experiment.tasks and experiment.margin > 0


def test_the_table() -> None:
    ids = [e.id for e in EXPERIMENTS]
    assert len(set(ids)) == len(ids) and {x[0] for x in ids} == set("SDL")
    assert [e.id for e in find(("L1", "S1", "L1"))] == ["L1", "S1"] and find() == found() == EXPERIMENTS
    for known in (find, found):
        with pytest.raises(UnknownName, match="unknown experiment"):
            known(("S99",))


@pytest.mark.parametrize("experiment", NAMED, ids=lambda e: e.id)
def test_what_papers_say(experiment: Experiment) -> None:
    """Layers of the catalogue beside each other, as they are there; of one layer alone its block differs."""
    assert experiment.said and experiment.moved and catalogue.get(experiment.source).axis == "sequence"
    names, systems = experiment.layers, experiment.systems
    if any(names):
        assert [s.layer() for s in systems] == [catalogue.get(n, "sequence").cls for n in names]
        assert systems[0].key != systems[1].key
    else:
        assert experiment.arm == experiment.control and all(d.path.startswith("block.") for d in experiment.moved)
    assert found((experiment.id,)) == (experiment,) and set(experiment.tasks) <= set(TASKS["sequence"])


def test_controls_that_are_known_systems() -> None:
    assert find(("S5",))[0].control == GatedDeltaNetPrev.update
    assert find(("L1",))[0].control == catalogue.get("residual").update


def test_a_control_differs() -> None:
    same = (("h", Euclidean()),)
    with pytest.raises(AxesError, match="the control is the arm"):
        Experiment("X", "?", "adam", "sequence", GatedDeltaNetPrev.update, same, ("text",))
    assert Experiment("X", "?", "adam", "sequence", FrankWolfeDelta.update, (("algorithm.via", ()),), ("text",)).moved


def test_the_list() -> None:
    said = CliRunner().invoke(app, ["transfer", "list", "S1", "D1"])
    assert said.exit_code == 0 and "Whiten" in said.output and "Rotation" in said.output and "S2" not in said.output
