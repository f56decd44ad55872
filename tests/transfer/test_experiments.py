"""Every experiment is a pair of tuples that differ in what moved, both with a meaning on their axis."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from axes import catalogue, sequence
from axes.cli import app
from axes.core.geometry import Euclidean
from axes.errors import AxesError, UnknownName
from axes.moves import retarget
from axes.sequence import DeltaNet, FrankWolfeDelta, GatedDeltaNet, GatedDeltaNetPrev
from axes.sequence.blocks import ACTIVATIONS
from axes.sequence.charts import Constant, Sigmoid
from axes.transfer.experiments import EXPERIMENTS, TASKS, Experiment
from axes.transfer.named import NAMED, find


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
    assert [e.id for e in find(("L1", "S1", "L1"))] == ["L1", "S1"] and find() == EXPERIMENTS
    with pytest.raises(UnknownName, match="unknown experiment"):
        find(("S99",))


@pytest.mark.parametrize("experiment", NAMED, ids=lambda e: e.id)
def test_what_papers_say(experiment: Experiment) -> None:
    """Layers of the catalogue beside each other, as they are there; of one layer alone its block differs."""
    assert experiment.said and experiment.moved and catalogue.get(experiment.source).axis == "sequence"
    systems = experiment.systems
    if experiment.arm != experiment.control:
        for system, update in zip(systems, (experiment.arm, experiment.control), strict=True):
            known = [e for e in catalogue.entries("sequence") if e.update.normal() == update]
            made, like = system.layer(), [e.cls(64, heads=4) for e in known]
            assert made is not None
            shapes = [[tuple(p.shape) for p in x.parameters()] for x in (made(64, heads=4), *like)]
            assert shapes[0] in shapes[1:]
        assert systems[0].key != systems[1].key
    else:
        assert experiment.arm == experiment.control and all(d.path.startswith("block.") for d in experiment.moved)
    assert find((experiment.id,)) == (experiment,) and set(experiment.tasks) <= set(TASKS["sequence"])


@pytest.mark.parametrize(("id", "published", "opened"), [("G1", (1e-9, 1e-3), 0.3), ("G2", (1e-6, 1e-2), 0.5)])
def test_where_gates_start(id: str, published: tuple[float, float], opened: float) -> None:
    """What the median channel keeps over 200 tokens, before training: little as published, most of it in the arm."""
    kept = []
    for system in find((id,))[0].systems:
        torch.manual_seed(0)
        make = system.layer()
        assert make is not None
        gates = []
        for _ in range(20):
            layer = make(64, heads=4)
            with torch.no_grad():
                signal = layer.around.enter(torch.randn(1, 200, 64), layer.around.tails(1, torch.zeros(1)))[0]
            gates.append(signal["decay"].sum(1).flatten())
        kept.append(float(torch.cat(gates).median().exp()))
    assert published[0] < kept[1] < published[1] and kept[0] > opened


def test_a_gate_of_either_sign() -> None:
    """What outputs are multiplied by, before training: as released its mean is a quarter of its deviation."""
    ratios = []
    for system in find(("G7",))[0].systems:
        torch.manual_seed(0)
        make = system.layer()
        assert make is not None
        layer = make(64, heads=1)
        with torch.no_grad():
            x = torch.nn.functional.rms_norm(torch.randn(8, 64, 64), (64,))
            kept = layer.around.enter(x, layer.around.tails(8, torch.zeros(1)))[2]
        factor = ACTIVATIONS[layer.around.block.output_gate](kept)
        ratios.append(float(factor.mean() / factor.std()))
    assert ratios[0] > 3.0 and 0.15 < ratios[1] < 0.35


def test_without_its_gates_a_gated_layer_is_delta_net() -> None:
    """So nothing else is between the two: outputs and every gradient, from the same draws."""
    open_block = replace(
        GatedDeltaNet.block,
        output_gate=None,
        charts=(("decay", Constant(0.0, learned=False)), ("beta", Sigmoid())),
    )
    ungated = sequence.layer(GatedDeltaNet.update, "Ungated", open_block)
    x, results = torch.randn(2, 24, 32, dtype=torch.float64), []
    for make in (ungated, DeltaNet):
        torch.manual_seed(0)
        layer = make(32, heads=2, dtype=torch.float64)
        y, _ = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))))
    assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


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
    pairs = " ".join(line.split("│")[-2].strip() for line in said.output.splitlines() if line.count("│") > 1)
    assert "cost Alignment() * h [Euclidean() -> Whiten(" in re.sub(" +", " ", pairs)  # what moved is marked
    assert "* block.output_gate: 'silu' -> 'sigmoid'" in CliRunner().invoke(app, ["transfer", "list", "G7"]).output
