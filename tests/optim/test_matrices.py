"""Parameters that are matrices in their own way: stored (in, out), several in one, stacks of experts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError, ShapeError
from axes.optim.rules import wrappers
from axes.optim.tools.convert import to_torch
from tests.optim.standins import GPT2, Conv1D, Mixture
from tests.optim.table import INSTANCES

GRADIENT_RULES = (optim.Muon, optim.NorMuon, optim.Shampoo, optim.SOAP, optim.PSGDKron)
ODD = {  # options under which the orientation of a matrix, and which matrices are apart, make a difference
    optim.Muon: {"scale": "spectral", "precision": "input"},
    optim.NorMuon: {"scale": "original", "precision": "input"},
    optim.Shampoo: {"graft": "adagrad", "refresh": 2, "eps": 1e-6},
    optim.SOAP: {"refresh": 2, "eps": 1e-3},
    optim.PSGDKron: {},
}


def filled(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(optimizer: Any, pairs: list[tuple[Tensor, Any]], steps: int = 5) -> None:
    """pairs: parameters and what makes their gradient at a step."""
    for t in range(steps):
        for p, gradient in pairs:
            p.grad = gradient(t)
        optimizer.step()


# by layout: the shape of a parameter of matrices (4, n), and these as views of a tensor of that shape
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "in out": (lambda n: (n, 4), lambda x: [x.mT]),
    "experts out in": (lambda n: (3, 4, n), lambda x: list(x)),
    "experts in out": (lambda n: (3, n, 4), lambda x: list(x.mT)),
    "(3 out) in": (lambda n: (12, n), lambda x: list(x.split(4))),
    "in (3 out)": (lambda n: (n, 12), lambda x: list(x.mT.split(4))),
    "out experts in": (lambda n: (4, 3, n), lambda x: [x[:, i] for i in range(3)]),
    "experts (2 out) in": (lambda n: (3, 8, n), lambda x: [half for one in x for half in one.split(4)]),
    "(2 3 out) in": (lambda n: (24, n), lambda x: list(x.split(4))),
}


@pytest.mark.parametrize("foreach", [None, False], ids=["together", "interpreted"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cls", GRADIENT_RULES, ids=lambda cls: cls.name)
def test_a_batch_is_stepped_as_its_matrices_would_be_alone(cls: Any, layout: str, foreach: bool | None) -> None:
    n = 4 if cls in (optim.Shampoo, optim.SOAP) else 5  # with others, bases of null spaces are rounding
    form, parts = LAYOUTS[layout]
    shape = form(n)
    whole, beside = nn.Parameter(filled(*shape)), nn.Parameter(filled(4, n, seed=9))
    alone = [nn.Parameter(part.clone()) for part in parts(whole.detach())]
    others = [nn.Parameter(beside.detach().clone())]

    def gradients(t: int) -> Tensor:
        return filled(*shape, seed=10 + t)

    own = {"rule": cls.name, "matrices": layout}
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "foreach": foreach, **ODD[cls]}
    ours = cls([{"params": [whole], **own}, {"params": [beside], "rule": cls.name}], **settings)
    theirs = cls([{"params": [*alone, *others], "rule": cls.name}], **settings)
    train(ours, [(whole, gradients), (beside, lambda t: filled(4, n, seed=t))])
    train(
        theirs,
        [(p, lambda t, i=i: parts(gradients(t))[i].contiguous()) for i, p in enumerate(alone)]
        + [(others[0], lambda t: filled(4, n, seed=t))],
    )
    for part, p in zip(parts(whole.detach()), alone, strict=True):
        torch.testing.assert_close(part, p.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(beside.detach(), others[0].detach(), rtol=0, atol=1e-9)


MUON = optim.Muon.declare(precision="input", scale="spectral")
TUPLES = {
    "trust ratio": wrappers.trust_ratio(MUON),
    "cautious": wrappers.cautious(MUON),
    "clipped": wrappers.clipped(MUON, 0.5),
    "grafting": wrappers.grafting(MUON, optim.SGD.declare(0.95)),
    "rotational": wrappers.rotational(MUON),
    "coupled": wrappers.coupled(wrappers.undecayed(MUON)),
    "frank-wolfe": optim.FrankWolfe.declare("spectral"),
}


@pytest.mark.parametrize("foreach", [None, False], ids=["together", "interpreted"])
@pytest.mark.parametrize("name", TUPLES)
def test_a_batch_under_any_tuple_for_matrices(name: str, foreach: bool | None) -> None:
    """Norms and ratios are those of each matrix."""
    layout, make = "experts in out", optim.optimizer(TUPLES[name])
    whole = nn.Parameter(filled(3, 5, 4))
    alone = [nn.Parameter(x.clone()) for x in whole.detach().mT]
    settings: dict[str, Any] = {"lr": 0.05, "foreach": foreach}
    if "weight_decay" in {per.name for per in TUPLES[name].demands()}:
        settings["weight_decay"] = 0.1
    ours = make([{"params": [whole], "rule": "matrix", "matrices": layout}], **settings)
    theirs = make([{"params": alone, "rule": "matrix"}], **settings)
    train(ours, [(whole, lambda t: filled(3, 5, 4, seed=t) * t)])
    train(theirs, [(p, lambda t, i=i: (filled(3, 5, 4, seed=t) * t)[i].mT.contiguous()) for i, p in enumerate(alone)])
    torch.testing.assert_close(whole.detach().mT, torch.stack(alone).detach(), rtol=0, atol=1e-9)


# ---- stored (in, out) ------------------------------------------------------------------------------------------------

EXACT_ENOUGH: dict[type[optim.Optimizer], dict[str, Any]] = {  # rounding decides what bases of null spaces are
    optim.Shampoo: {"eps": 1e-3},
    optim.SOAP: {"eps": 1e-2},
    optim.EKFAC: {"refresh": 1},
    optim.Muon: {"scale": "spectral", "precision": "input"},
    optim.NorMuon: {"scale": "original", "precision": "input"},
}
SMALL: dict[type[optim.Optimizer], float] = {optim.Hebbian: 1e-5, optim.RecursiveLeastSquares: 0.1}


def twins() -> tuple[nn.Module, nn.Module]:
    """The same GPT-2 with Conv1D and with nn.Linear."""
    torch.manual_seed(0)
    conv, linear = GPT2(conv=True).double(), GPT2(conv=False).double()
    turned = {n: x.mT if n in CONVOLVED else x for n, x in conv.state_dict().items()}
    linear.load_state_dict(turned)
    for model in (conv, linear):
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith("c_attn.bias"))  # a key's bias has no gradient but rounding
    return conv, linear


CONVOLVED = {f"{n}.weight" for n, m in GPT2().named_modules() if isinstance(m, Conv1D)}


def descend(model: nn.Module, optimizer: Any, steps: int = 4) -> None:
    for t in range(steps):
        tokens = torch.arange(10).view(2, 5).add(3 * t).remainder(11)

        def closure(tokens: Tensor = tokens) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("cls", [i.cls for i in INSTANCES if i.matrices], ids=lambda cls: cls.name)
def test_a_weight_stored_in_out_is_stepped_as_the_linear_layer_that_it_is(cls: Any) -> None:
    conv, linear = twins()
    settings = {"lr": SMALL.get(cls, 0.01), **EXACT_ENOUGH.get(cls, {})}
    ours, theirs = cls(conv, **settings), cls(linear, **settings)
    steps = 1 if cls is optim.SOAP else 4
    descend(conv, ours, steps)
    descend(linear, theirs, steps)
    expected = linear.state_dict()
    for name, x in conv.state_dict().items():
        torch.testing.assert_close(x.mT if name in CONVOLVED else x, expected[name], rtol=1e-7, atol=1e-9, msg=name)
    rows = {row.name: row for row in optim.report(conv, ours).rows}
    assert {rows[n].rule for n in CONVOLVED} == {next(iter(ours._rules))}
    assert rows["transformer.h.0.attn.c_attn.weight"].seen == (24, 8)
    before = twins()[0].state_dict()
    assert all(
        float((x - before[name]).abs().max()) > 1e-7 for name, x in conv.state_dict().items() if name in CONVOLVED
    )


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says", [True, False], ids=["said", "inferred"])
@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_are_a_batch_whichever_way_they_are_stored(turned: bool, says: bool) -> None:
    model = Mixture(turned, says)
    rows = {row.name: row for row in optim.Muon(model).report().rows}
    up, down = rows["mlp.experts.gate_up_proj"], rows["mlp.experts.down_proj"]
    assert (up.rule, up.seen, down.seen) == ("muon", (3, 12, 8), (3, 8, 6))
    assert ("in, out" in up.reason) == turned
    assert (rows["mlp.gate.weight"].rule, rows["mlp.experts.gate_up_proj_bias"].rule) == ("muon", "adamw")
    assert "as 3 x (12, 8)" in str(optim.Muon(model).report())
    named = {row.name: row.seen for row in optim.Muon(model.named_parameters()).report().rows}
    assert named == {name: row.seen for name, row in rows.items()}


@pytest.mark.parametrize("cls", GRADIENT_RULES, ids=lambda cls: cls.name)
def test_both_ways_of_storing_experts_descend_alike(cls: Any) -> None:
    torch.manual_seed(0)
    one, other = Mixture(False).double(), Mixture(True).double()
    stacks = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    other.load_state_dict({n: x.mT.contiguous() if n in stacks else x for n, x in one.state_dict().items()})
    for model in (one, other):
        descend(model, cls(model, lr=0.01, **{**EXACT_ENOUGH, optim.SOAP: {"eps": 1.0}}.get(cls, {})), 3)
    expected = other.state_dict()
    for name, x in one.state_dict().items():
        y = expected[name].mT if name in stacks else expected[name]
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7, msg=name)


def test_a_stack_is_not_flattened() -> None:
    """What a batch of one matrix per expert does is not what one matrix (experts, in * out) would."""
    stacked, flat = (nn.Parameter(filled(3, 4, 5)) for _ in range(2))
    ours = optim.Muon([{"params": [stacked], "rule": "muon", "matrices": "experts out in"}], lr=0.1, precision="input")
    theirs = optim.Muon([{"params": [flat], "rule": "muon"}], lr=0.1, precision="input")
    train(ours, [(stacked, lambda t: filled(3, 4, 5, seed=t))], 1)
    train(theirs, [(flat, lambda t: filled(3, 4, 5, seed=t))], 1)
    assert float((stacked - flat).detach().abs().max()) > 0.01
    assert theirs.report().rows[0].seen == (3, 20)


# ---- fused projections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize(("qkv", "count"), [("split", 3), ("heads", 6)])
def test_a_fused_projection_may_be_several_matrices(qkv: Any, count: int, conv: bool) -> None:
    model = GPT2(conv).double()
    rows = {row.name: row for row in optim.SOAP(model, qkv=qkv).report().rows}
    assert rows["transformer.h.1.attn.c_attn.weight"].seen == (count, 24 // count, 8)
    assert rows["transformer.h.1.attn.c_proj.weight"].seen == (8, 8)
    descend(model, optim.Muon(model, qkv=qkv))


def test_attention_of_torch_is_divided_by_its_heads() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2)

    for qkv, seen in (("whole", (24, 8)), ("split", (3, 8, 8)), ("heads", (6, 4, 8))):
        rows = {row.name: row for row in optim.Muon(Layer(), qkv=qkv).report().rows}
        assert rows["attn.in_proj_weight"].seen == seen


class Grouped(nn.Module):
    """Fewer keys and values than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"qkv_proj": nn.Linear(8, 16)})


def test_projections_of_unequal_sides_are_no_row_of_matrices() -> None:
    with pytest.raises(AxesError, match="'self_attn.qkv_proj.weight' is 16 x 8, and no head_dim"):
        optim.Muon(Grouped(), qkv="heads")
    model = nn.Sequential(Grouped())
    model[0].self_attn["qkv_proj"] = nn.Linear(8, 20)
    with pytest.raises(AxesError, match="not two or three times its columns.*qkv='heads'"):
        optim.Muon(model, qkv="split")
    seen = optim.Muon(model, matrices={"*qkv_proj.weight": "(5 out) in"}).report().rows[0].seen
    assert seen == (5, 4, 8)
    with pytest.raises(AxesError, match="found no fused projection"):
        optim.Muon(nn.Linear(4, 4), qkv="split")
    with pytest.raises(AxesError, match="'whole', 'split' or 'heads', got 'three'"):
        optim.Muon(model, qkv="three")  # type: ignore[arg-type]


# ---- what a user says ------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A user's own stack, which says how it is one."""

    hidden_matrices = {"up": "experts in out", "lists.0": "in out"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.table = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(5, 6))
        self.lists = nn.ParameterList([nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3, 5))])


def test_a_module_may_say_its_own_matrices() -> None:
    rows = {row.name: row for row in optim.Muon(nn.ModuleDict({"own": Own()})).report().rows}
    assert {name: (row.rule, row.seen) for name, row in rows.items()} == {
        "own.up": ("muon", (2, 4, 3)),
        "own.table": ("adamw", ()),
        "own.lists.0": ("muon", (5, 3)),
        "own.lists.1": ("adamw", ()),
    }
    assert rows["own.table"].reason == "no hidden matrix, by Own.hidden_matrices"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("out", "is no layout of matrices"),
        ("out in in", "is no layout of matrices"),
        ("(out in)", "is no layout of matrices"),
        ("out in)", "is no layout of matrices"),
        ("(0 out) in", "is no layout of matrices"),
        ("", "is no layout of matrices"),
        ("experts out in", "'0.weight' has shape .6, 4., and 'experts out in' names 3 dimensions"),
        ("(4 out) in", "divides 6 into 4"),
    ],
)
def test_layouts_that_cannot_be(text: str, error: str) -> None:
    with pytest.raises(AxesError, match=error):
        optim.Muon(nn.Sequential(nn.Linear(4, 6)), matrices={"0.weight": text})


def test_groups_without_names_say_their_matrices_themselves() -> None:
    w = nn.Parameter(torch.randn(3, 4, 5))
    optimizer = optim.Muon([{"params": [w], "rule": "muon", "matrices": "experts in out"}])
    assert optimizer.report().rows[0].seen == (3, 5, 4)
    again = optim.Muon([{k: v for k, v in optimizer.param_groups[0].items()}])  # a group as it came back
    assert again.report().rows[0].seen == (3, 5, 4)
    with pytest.raises(ShapeError, match="a parameter of shape .3, 4, 5. has shape"):
        optim.Muon([{"params": [w], "rule": "muon", "matrices": "out in"}])
    for group in ({}, {"rule": "adamw"}):
        with pytest.raises(AxesError, match="is for groups that name a rule for matrices, 'rule': 'muon'"):
            optim.Muon([{"params": [("w", w)], "matrices": "experts in out", **group}])
    with pytest.raises(AxesError, match="is for groups that name a rule for matrices, and it has none"):
        optim.AdamW([{"params": [w], "rule": "adamw", "matrices": "experts in out"}])


def test_rules_of_layers_take_whole_weights_only() -> None:
    for options in ({"qkv": "split"}, {"matrices": {"*c_attn.weight": "in (3 out)"}}):
        with pytest.raises(AxesError, match="reads the inputs of layers, whose weights are one matrix: leave out"):
            optim.NaturalGradient(GPT2(), **options)  # type: ignore[arg-type]
    with pytest.raises(AxesError, match="'mlp.gate.weight' cannot take 'ekfac', which reads the inputs of nn.Linear"):
        optim.EKFAC(Mixture(), rules={"mlp.gate.weight": "ekfac"})


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", GRADIENT_RULES, ids=lambda cls: cls.name)
def test_a_run_goes_on_bit_for_bit(cls: Any) -> None:
    torch.manual_seed(0)
    model = GPT2().double()
    optimizer = cls(model, qkv="split", lr=0.01)
    foretold = optimizer.report().state_bytes
    descend(model, optimizer, 3)
    assert optimizer.report().state_bytes == foretold
    place = next(
        i for i, n in enumerate(optimizer.param_groups[0]["param_names"]) if n.endswith("h.0.attn.c_attn.weight")
    )
    assert optimizer.param_groups[0]["matrices"][place] == "in (3 out)"
    kept = optimizer.state_dict()["state"][place]
    assert {tuple(x.shape) for n, x in kept.items() if n.endswith("via.0.theta")} <= {(3, 8, 8)}
    resumed, loaded = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    copied_model, copied = copy.deepcopy((model, optimizer))
    later = cls(resumed, qkv="split", lr=0.01)
    later.load_state_dict(loaded)
    for m, o in ((model, optimizer), (resumed, later), (copied_model, copied)):
        descend(m, o, 3)
    for p, q, r in zip(model.parameters(), resumed.parameters(), copied_model.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p, r)


def test_a_state_of_other_matrices_is_refused() -> None:
    """c_proj is square: its momentum would be loaded the wrong way round."""
    model = GPT2()
    from_model, from_groups = optim.Muon(model), optim.Muon(model, qkv="heads")
    descend(model, from_model, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(AxesError, match=r"attn.c_attn.weight' is matrices 'in \(6 out\)' .* and was 'in out' when"):
        from_groups.load_state_dict(from_model.state_dict())
    saved = from_model.state_dict()
    saved["param_groups"][0].pop("matrices")  # as another version, or one that took names for nn.Linear, saved it
    with pytest.raises(AxesError, match="is matrices 'in out' to this optimizer, and was 'out ...' when it was saved"):
        from_model.load_state_dict(saved)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_distributed_checkpoint_keeps_the_matrices() -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.manual_seed(0)
    model = GPT2()
    optimizer = optim.Muon(model, qkv="split")
    descend(model, optimizer, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    resumed = copy.deepcopy(model)
    later = optim.Muon(resumed, qkv="split")
    set_optimizer_state_dict(resumed, later, saved, options=options)
    for m, o in ((model, optimizer), (resumed, later)):
        descend(m, o, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


def test_torch_has_no_such_matrices() -> None:
    with pytest.raises(AxesError, match="conversion: Muon takes a parameter as matrices 'in out'"):
        to_torch(optim.Muon(GPT2()), rule="muon")
