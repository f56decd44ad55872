"""Which parameters are matrices, and the report that names every parameter's rule."""

import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axes import optim
from axes.errors import AxesError, NotFiniteError, ShapeError, UnknownName
from tests.optim.standins import GPT2, Adapted, LoRALinear, Mixture
from tests.optim.table import INSTANCES


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


def test_what_is_frozen_has_no_state_until_it_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False).requires_grad_(False), nn.Linear(4, 4, bias=False))
    optimizer = optim.Muon(model)
    first, second = optimizer.report().rows
    assert first.state_bytes == 0 < second.state_bytes
    assert "frozen" in first.reason and "frozen" not in second.reason
    model.requires_grad_(True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.report().rows[0].state_bytes > 0 and "frozen" not in optimizer.report().rows[0].reason


# ---- nothing silently something else ---------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Linear maps by hand, which no type of module tells."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(count))
        self.mix, self.gain = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.ones(4))


ROUTING = [i.cls for i in INSTANCES if i.matrices]


@pytest.mark.parametrize("cls", ROUTING, ids=lambda cls: cls.name)
def test_a_matrix_rule_without_a_matrix_raises(cls: Any) -> None:
    main, auxiliary = (group["rule"] for group in cls(nn.Sequential(nn.Linear(4, 3)), lr=0.1).param_groups)
    found = f"found no matrix for rule '{main}' among 3 parameters, so that all would take '{auxiliary}'"
    with pytest.raises(AxesError, match=f"{found}.*'mix', 'w.0' .of Mixer.*'gain' .vector.*rules=") as raised:
        cls(Mixer(), lr=0.1)
    assert cls.__name__ in str(raised.value)
    with pytest.raises(AxesError, match="found no matrix"):
        cls(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4)))
    named = cls([{"params": [nn.Parameter(torch.ones(3))], "rule": auxiliary}], model=nn.Linear(4, 3))
    assert [row.rule for row in named.report().rows] == [auxiliary]  # whoever names the rule has said it


def test_a_tuple_for_matrices_without_a_matrix_raises() -> None:
    with pytest.raises(AxesError, match="found no matrix for rule 'matrix' .* all would take 'auxiliary'"):
        optim.optimizer(optim.Muon.declare())(Mixer(), lr=0.1)


def test_a_tuple_of_ones_own_is_told_its_matrices() -> None:
    make = optim.optimizer(optim.Muon.declare())
    optimizer = make(Mixer(), lr=0.1, rules={"w.*": "matrix", "mix": "auxiliary"})
    assert {row.name: row.rule for row in optimizer.report().rows} == {
        "w.0": "matrix",
        "mix": "auxiliary",
        "gain": "auxiliary",
    }


def test_one_warning_names_what_nobody_knows() -> None:
    model = nn.ModuleDict({"known": nn.Linear(4, 4), "own": Mixer(5)})
    with pytest.warns(UserWarning) as said:
        optimizer = optim.Muon(model)
    (warning,) = said
    text = str(warning.message)
    assert text.startswith(
        "Muon: 6 matrix-shaped parameters will take 'adamw': 'own.mix', 'own.w.0', 'own.w.1' and 3 more"
    )
    assert "(of Mixer, which is no linear map" in text and "rules={'own.mix': 'muon'}" in text
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match="1 matrix-shaped parameter will take 'adamw': 'late.mix'"):
        optimizer.add_param_group({"params": [("late.mix", nn.Parameter(torch.randn(3, 3)))]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.Muon(model, rules={Mixer: "adamw"})
        for p in model["own"].parameters():
            p.requires_grad_(False)
        optim.Muon(model)  # what does not train is nobody's concern
        optim.AdamW(Mixer())


# ---- what a user says ------------------------------------------------------------------------------------------------


def test_rules_are_said_by_name_by_pattern_or_by_type() -> None:
    model = nn.ModuleDict({"own": Mixer(3), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    def rules(**said: Any) -> dict[str, str]:
        rows = optim.Muon(model, rules=said.pop("types", {}) | said).report().rows
        return {row.name: row.rule for row in rows if row.rule == "muon"} | {
            row.name: row.reason for row in rows if row.rule == "adamw" and len(row.shape) > 1
        }

    own = {"own.w.0": "muon", "own.w.1": "muon", "own.w.2": "muon", "own.mix": "muon"}
    layers = {"up.weight": "muon", "down.weight": "muon"}
    assert rules(types={Mixer: "muon"}) == own | layers
    assert rules(**{"own.*": "muon"}) == own | layers
    told = rules(types={Mixer: "muon", nn.Linear: "adamw"}, **{"*.w.*": "adamw", "own.w.1": "muon", "d*": "muon"})
    assert told == {
        "own.w.1": "muon",  # a name before a pattern
        "down.weight": "muon",  # a pattern before a type
        "own.w.0": "said by rules ('*.w.*')",
        "own.w.2": "said by rules ('*.w.*')",
        "up.weight": "said by rules (Linear)",
        "own.mix": "muon",
    }
    first = rules(types={Mixer: "adamw"}, **{"u*": "adamw", "*.weight": "muon"})
    assert first["up.weight"] == "said by rules ('u*')" and first["down.weight"] == "muon"  # the first of two patterns


def test_the_closer_of_two_options_counts() -> None:
    model = nn.ModuleDict({"own": Mixer(), "up": nn.Linear(4, 4)})
    rows = optim.Muon(model, rules={Mixer: "adamw"}, matrices={"own.mix": "in out"}).report().rows
    assert {row.name: row.seen for row in rows if row.rule == "muon"} == {"own.mix": (6, 4), "up.weight": (4, 4)}
    rows = optim.Muon(model, rules={"own.w*": "adamw"}, matrices={Mixer: "in out"}).report().rows
    assert {row.name: row.seen for row in rows if row.rule == "muon"} == {"own.mix": (6, 4), "up.weight": (4, 4)}


def test_the_page_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "optimizer_options.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(code, "docs/optimizer_options.md", "exec"), {"__name__": "page"})


def test_the_nearest_module_counts() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Bilinear(2, 3, 4)), nn.Linear(4, 4))
    rules = {nn.Sequential: "adamw", nn.Linear: "muon", nn.Module: "adamw"}
    assert [
        (r.name, r.rule) for r in optim.report(model, optim.Muon(model, rules=rules)).rows if "weight" in r.name
    ] == [
        ("0.0.weight", "muon"),
        ("0.1.weight", "adamw"),
        ("1.weight", "muon"),
    ]


def test_wrappers_do_not_hide_names() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), backend="eager")
    rows = optim.Muon(model, rules={"1.weight": "adamw"}).report().rows
    assert {row.name: row.rule for row in rows}["_orig_mod.1.weight"] == "adamw"


NOTHING: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no such name": (
        Model,
        {"rules": {"*.upp.weight": "adamw"}},
        r"Muon: rules=\{'\*.upp.weight': ...\} matches no param",
    ),
    "only vectors": (Model, {"rules": {"*.bias": "muon"}}, "matches no matrix"),
    "no such type": (Model, {"rules": {nn.Bilinear: "adamw"}}, "rules={Bilinear: ...} matches nothing"),
    "the name of a type": (
        lambda: nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Bilinear(3, 4, 5)}),
        {"rules": {"Bilinear": "adamw"}},
        "'Bilinear': ...} is the name of a type of modules: write the type itself, rules={Bilinear: ...}",
    ),
    "a vector": (Model, {"rules": {"up.bias": "muon"}}, r"'up.bias' has shape \(16,\), and 'muon' is for matrices"),
    "no such rule": (Model, {"rules": {"up.weight": "adam"}}, "unknown rule of Muon 'adam': did you mean adamw"),
    "a number": (Model, {"rules": {"up.weight": 1}}, "rules maps 'up.weight' to 1, which is no text"),
    "a module": (Model, {"rules": {1: "muon"}}, "a key of rules is a pattern of names or a type of modules, got 1"),
    "no mapping": (Model, {"rules": ["up.weight"]}, "rules maps names, patterns of names or types"),
    "both": (Model, {"rules": {"up.*": "adamw"}, "matrices": {"*p.weight": "out in"}}, "gives it 'adamw'"),
    "matrices of nothing": (Model, {"matrices": {"nowhere": "out in"}}, "matrices={'nowhere': ...} matches no matrix"),
    "three dimensions": (
        lambda: nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Bilinear(3, 4, 5)}),
        {"rules": {"b.weight": "muon"}},
        r"'b.weight' has shape \(5, 3, 4\): say which dimensions are a matrix, .*'experts out in'",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_what_is_said_wrongly_raises(case: str) -> None:
    make, options, error = NOTHING[case]
    with pytest.raises(AxesError, match=error):
        optim.Muon(make(), **options)


def test_names_cannot_tell_types_and_one_rule_needs_no_saying() -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(AxesError, match="rules={Linear: ...} is a type of modules: pass the model, model="):
        optim.Muon(model.named_parameters(), rules={nn.Linear: "muon"})
    with pytest.raises(AxesError, match="is a name, and no parameter has one: pass the model"):
        optim.Muon([{"params": [model.weight], "rule": "muon"}], rules={"weight": "muon"})
    for options in ({"rules": {"weight": "adamw"}}, {"matrices": {"weight": "in out"}}, {"qkv": "split"}):
        with pytest.raises(AxesError, match="AdamW has one rule, for parameters of any shape: leave out"):
            optim.AdamW(model, **options)  # type: ignore[arg-type]


# ---- names alone, and the model --------------------------------------------------------------------------------------


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(11, 8), "norm": nn.RMSNorm(8)})
        self.model["layers"] = nn.ModuleList([nn.ModuleDict({n: nn.Linear(8, 8, bias=False) for n in names})])
        self.lm_head = nn.Linear(8, 11, bias=False)


class Encoder(nn.Module):
    """BERT's heads, T5's embeddings, a state-space layer's convolution, weights of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 8)
        self.block = nn.ModuleDict({"relative_attention_bias": nn.Embedding(6, 4), "rnn": nn.LSTM(8, 8)})
        self.mixer = nn.ModuleDict({"conv1d": nn.Conv1d(8, 8, 4, groups=8), "in_proj": nn.Linear(8, 16)})
        self.cls = nn.ModuleDict({"predictions": nn.ModuleDict({"decoder": nn.Linear(8, 11)})})
        self.classifier = nn.Linear(8, 3)
        self.output = nn.Linear(8, 11)
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3))


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Adapted(8, 2), LoRALinear(8, 2)


@pytest.mark.parametrize("make", [GPT2, lambda: GPT2(conv=False), Llama, Mixture, Low, Encoder, Model])
def test_names_agree_with_the_model(make: Any) -> None:
    model = make()
    said = {} if make is not Model else {"rules": SAID}
    by_model = {r.name: (r.rule, r.seen) for r in optim.Muon(model, **said).report().rows}
    names = optim.Muon(model.named_parameters(), **said).report()
    differ = {r.name for r in names.rows if by_model[r.name] != (r.rule, r.seen)}
    assert not differ
    assert names.notes == ("no model was given: names and shapes say what parameters are; model= says it for certain",)
    assert all(r.reason.startswith("assumed") for r in names.rows if r.rule == "muon" and "lora" not in r.name)
    assert optim.Muon(model, **said).report().notes == ()


def test_adapters_are_hidden_matrices_and_magnitudes_are_not() -> None:
    rows = {row.name: row for row in optim.Muon(Low()).report().rows}
    muon = {name for name, row in rows.items() if row.rule == "muon"}
    assert muon == {
        "a.base_layer.weight",
        "a.lora_A.default.weight",
        "a.lora_B.default.weight",
        "b.lora_A",
        "b.lora_B",
    }
    assert rows["b.lora_A"].reason == "factor of a low-rank adapter, by name"
    assert rows["a.lora_embedding_A.default"].reason == "embedding by name (lora_embedding_a)"


def test_embeddings_and_heads_of_a_model() -> None:
    class Scaled(nn.Embedding):
        pass

    class VocabParallelEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(11, 8))

    class Whole(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.tok, self.bag, self.par = Scaled(11, 8), nn.EmbeddingBag(5, 8), VocabParallelEmbedding()
            self.body, self.unembedding = nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
            self.last = nn.Linear(8, 11, bias=False)
            if tied:
                self.last.weight = self.tok.weight

        def get_output_embeddings(self) -> nn.Module:
            return self.last

    rows = {row.name: (row.rule, row.reason) for row in optim.Muon(Whole(False)).report().rows}
    assert {name for name, (rule, _) in rows.items() if rule == "muon"} == {"body.weight"}
    assert rows["last.weight"] == ("adamw", "output head of the model")
    tied = {row.name: row.reason for row in optim.Muon(Whole(True)).report().rows}
    assert tied["tok.weight"] == "embedding" and "last.weight" not in tied


# ---- trainers of other libraries -------------------------------------------------------------------------------------


def trainer_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As transformers' Trainer builds them: bare parameters, in groups that decay and that do not."""
    decays = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": decays, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def test_bare_groups_take_their_roles_from_the_model() -> None:
    model = GPT2()
    with pytest.raises(AxesError, match=r"optimizer_cls_and_kwargs=\(Muon, {'model': model, ...}\)"):
        optim.Muon(trainer_groups(model))
    optimizer = optim.Muon(trainer_groups(model), model=model, rules={"*.mlp.c_fc.weight": "adamw"})
    assert [(g["rule"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("muon", 0.1),
        ("adamw", 0.1),
        ("adamw", 0.0),
    ]
    rows = {row.name: row for row in optimizer.report().rows}
    assert set(rows) == {name for name, _ in model.named_parameters()}
    assert rows["transformer.h.0.attn.c_attn.weight"].rule == "muon"
    assert rows["transformer.h.0.mlp.c_fc.weight"].reason == "said by rules ('*.mlp.c_fc.weight')"
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, torch.nan)
    with pytest.raises(NotFiniteError, match=r"transformer\.wte\.weight"):
        optimizer.step()
    with pytest.raises(AxesError, match=r"a parameter of shape \(2, 2\) is not in the model that was given"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert len(optimizer.param_groups) == 3


def test_a_group_that_names_its_rule_says_so_in_the_report() -> None:
    model = nn.Linear(3, 4)
    optimizer = optim.Muon([{"params": [model.weight], "rule": "adamw"}], model=model)
    assert [(row.rule, row.reason) for row in optimizer.report().rows] == [("adamw", "named by its group")]


def _gpt2_of_transformers(transformers: Any) -> Any:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 31, "n_positions": 12}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = _gpt2_of_transformers(transformers)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=31, num_local_experts=4)
    mixtral = transformers.MixtralForCausalLM(config)
    for model in (gpt2, mixtral):
        by_model = {r.name: (r.rule, r.seen) for r in optim.Muon(model).report().rows}
        assert by_model == {r.name: (r.rule, r.seen) for r in optim.Muon(model.named_parameters()).report().rows}
    rows = {r.name: r for r in optim.Muon(mixtral).report().rows}
    assert rows["model.layers.0.mlp.experts.gate_up_proj"].seen == (4, 48, 16)
    muon = optim.NaturalGradient(gpt2)
    assert sum(r.rule == "natural-gradient" for r in muon.report().rows) == 8


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = _gpt2_of_transformers(transformers)
    tokens = torch.arange(64 * 8).view(64, 8).remainder(31)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    way = {"report_to": [], "use_cpu": True, "save_strategy": "no", "per_device_train_batch_size": 8, "max_steps": 8}
    arguments = transformers.TrainingArguments(str(tmp_path), **way)
    given = (optim.Muon, {"model": model, "lr": 0.02, "weight_decay": 0.1})
    trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=given)
    before = model(input_ids=tokens[:8], labels=tokens[:8]).loss.item()
    trainer.train()
    rules = [row.rule for row in trainer.optimizer.optimizer.report().rows]
    assert (rules.count("muon"), rules.count("adamw")) == (8, 20)
    assert model(input_ids=tokens[:8], labels=tokens[:8]).loss.item() < 0.9 * before
