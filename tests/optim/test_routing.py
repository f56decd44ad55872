"""Which parameters are matrices, and the report that names every parameter's rule."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from axes import optim
from axes.errors import AxesError, ShapeError, UnknownName


class Gate(nn.Module):
    """A module whose parameter is not a linear map of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.eye(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.position_embed = nn.Parameter(torch.zeros(5, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.depthwise = nn.Conv1d(8, 8, 3, groups=8)
        self.score = nn.Linear(8, 1)
        self.norm = nn.RMSNorm(8)
        self.gate = Gate()
        self.scale = nn.Parameter(torch.ones(()))
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.tied = nn.Linear(8, 11, bias=False)
        self.tied.weight = self.tokens.weight


EXPECTED = {
    "position_embed": ("adamw", "embedding by name (position_embed)"),
    "scale": ("adamw", "scalar"),
    "tokens.weight": ("adamw", "embedding"),
    "attention.in_proj_weight": ("muon", "hidden matrix of MultiheadAttention"),
    "attention.in_proj_bias": ("adamw", "vector"),
    "attention.out_proj.weight": ("muon", "hidden matrix of NonDynamicallyQuantizableLinear"),
    "attention.out_proj.bias": ("adamw", "vector"),
    "up.weight": ("muon", "hidden matrix of Linear"),
    "up.bias": ("adamw", "vector"),
    "down.weight": ("muon", "hidden matrix of Linear"),
    "down.bias": ("adamw", "vector"),
    "conv.weight": ("muon", "hidden matrix of Conv1d"),
    "conv.bias": ("adamw", "vector"),
    "depthwise.weight": ("adamw", "grouped convolution"),
    "depthwise.bias": ("adamw", "vector"),
    "score.weight": ("adamw", "one row or column"),
    "score.bias": ("adamw", "vector"),
    "norm.weight": ("adamw", "vector"),
    "gate.mixing": ("adamw", "of Gate, which is no linear map that is known here"),
    "lm_head.weight": ("adamw", "output head by name (lm_head)"),
}


SAID = {"gate.mixing": "adamw"}


def test_every_parameter_is_reported_with_its_rule_and_reason() -> None:
    model = Model()
    with pytest.warns(UserWarning, match="'gate.mixing' .of Gate"):
        optimizer = optim.Muon(model, lr=0.02, aux_lr_scale=0.1, weight_decay=0.1)
    rows = optim.report(model, optimizer).rows
    assert {row.name: (row.rule, row.reason) for row in rows} == EXPECTED
    assert [row.name for row in rows] == [name for name, _ in model.named_parameters()]
    for row in rows:
        assert row.lr == pytest.approx(0.02 if row.rule == "muon" else 0.002)
        assert row.weight_decay == (0.1 if row.rule == "muon" else 0.0)
    table = str(optimizer.report())
    assert all(name in table for name in EXPECTED) and "effective" not in table
    assert table.splitlines()[0].split() == ["parameter", "shape", "rule", "reason", "lr", "decay", "state"]


def test_schedulers_move_the_reported_lr_of_both_rules() -> None:
    optimizer = optim.Muon(Model(), rules=SAID, lr=0.02, aux_lr_scale=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert {(row.rule, round(row.lr or 0, 6)) for row in optimizer.report().rows} == {("muon", 0.01), ("adamw", 0.001)}
    assert scheduler.get_last_lr() == [0.01, 0.01]


def test_an_auxiliary_parameter_steps_as_adamw_with_its_share_of_lr() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    b.load_state_dict(a.state_dict())
    ours = optim.Muon(a, lr=0.02, aux_lr_scale=0.1, aux_weight_decay=0.3)
    theirs = torch.optim.AdamW([b.bias], lr=0.002, betas=(0.9, 0.95), weight_decay=0.3)
    for _ in range(30):
        for model, optimizer in ((a, ours), (b, theirs)):
            for p in model.parameters():
                p.grad = torch.sin(7 * p.detach()) if p.ndim == 1 else torch.ones_like(p)
            optimizer.step()
    torch.testing.assert_close(a.bias, b.bias, rtol=0, atol=1e-13)


def test_natural_gradient_takes_hidden_linear_weights_only() -> None:
    model = Model()
    rows = {row.name: row for row in optim.NaturalGradient(model, rules=SAID).report().rows}
    assert rows["up.weight"].rule == "natural-gradient"
    assert (rows["conv.weight"].rule, rows["conv.weight"].reason) == (
        "adamw",
        "of Conv1d: inputs are collected from nn.Linear and Conv1D only",
    )
    assert rows["attention.in_proj_weight"].rule == "adamw"


def test_names_alone_route_by_shape_and_name() -> None:
    model = Model()
    rows = {row.name: row.rule for row in optim.Shampoo(model.named_parameters(), rules=SAID).report().rows}
    assert rows["up.weight"] == rows["conv.weight"] == rows["attention.in_proj_weight"] == "shampoo"
    assert rows["lm_head.weight"] == rows["position_embed"] == rows["norm.weight"] == rows["gate.mixing"] == "adamw"


@pytest.mark.parametrize("cls", [optim.Muon, optim.Shampoo])
def test_bare_parameters_need_a_rule(cls: Any) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(AxesError, match="pass the model or its named_parameters"):
        cls(model.parameters())
    optimizer = cls([{"params": [model.weight], "rule": cls.name}, {"params": [model.bias], "rule": "adamw"}])
    assert [row.reason for row in optimizer.report().rows] == ["named by its group"] * 2
    with pytest.raises(UnknownName, match="did you mean adamw"):
        cls([{"params": [model.weight], "rule": "adam"}])
    with pytest.raises(ShapeError, match="is for matrices"):
        cls([{"params": [model.bias], "rule": cls.name}])


def test_a_group_without_a_rule_is_split() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": model[0].named_parameters(), "lr": 0.1}, {"params": model[1].named_parameters()}]
    optimizer = optim.Muon(groups, lr=0.01)
    assert [(g["rule"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        ("muon", 0.1, 1),
        ("adamw", 0.1, 1),
        ("muon", 0.01, 1),
        ("adamw", 0.01, 1),
    ]
    later = nn.Linear(2, 2)
    optimizer.add_param_group({"params": later.named_parameters(), "weight_decay": 0.5})
    assert [g["weight_decay"] for g in optimizer.param_groups[-2:]] == [0.5, 0.5]


def test_groups_hold_only_what_their_rule_reads() -> None:
    optimizer = optim.Muon(nn.Linear(3, 4))
    main, auxiliary = optimizer.param_groups
    assert "momentum" in main and "betas" not in main
    assert "betas" in auxiliary and "momentum" not in auxiliary


@pytest.mark.parametrize("cls", optim.ALL, ids=lambda cls: cls.name)
def test_state_bytes_are_those_of_the_tensors_that_are_kept(cls: Any) -> None:
    """Told before the first step and after it, and as large as the tensors in the state dict."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = cls(model)
    before = optim.report(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.rand(5, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    after = optim.report(model, optimizer)
    assert [row.state_bytes for row in before.rows] == [row.state_bytes for row in after.rows]
    kept = [x for state in optimizer.state_dict()["state"].values() for x in state.values()]
    assert after.state_bytes == sum(x.nbytes for x in kept) > 0


def test_a_report_adds_up_and_is_json() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6, bias=False))
    report = optim.report(model, optim.Muon(model, lr=0.02))
    muon, adamw = report.totals
    assert [(t.rule, t.parameters, t.numbers) for t in (muon, adamw)] == [("muon", 2, 24 + 36), ("adamw", 1, 6)]
    assert report.state_bytes == muon.state_bytes + adamw.state_bytes
    assert muon.bytes_per_number == pytest.approx(4, rel=0.2) and adamw.bytes_per_number >= 8
    found = json.loads(json.dumps(report.as_dict()))
    assert [p["name"] for p in found["parameters"]] == ["0.weight", "0.bias", "1.weight"]
    assert found["rules"][0]["state_bytes"] == muon.state_bytes and found["notes"] == []
    assert report.table().row_count == 5
    told = dataclasses.replace(report, notes=("a step was skipped",))
    assert str(told).splitlines()[-1] == "a step was skipped" == told.table().caption


def test_state_that_is_not_there_yet_is_foretold() -> None:
    """Parameters without storage, and without entries."""
    model = nn.Linear(8, 4, device="meta")
    assert optim.AdamW(model).report().state_bytes >= 2 * 4 * 36
    assert optim.AdamW([nn.Parameter(torch.zeros(0, 3))]).report().state_bytes == 0
