"""What every optimizer must do as a `torch.optim.Optimizer`: one table of instances drives every case."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from axes import optim
from axes.errors import NotFiniteError


@dataclass(frozen=True)
class Instance:
    """An optimizer under test, and configurations that reach its branches."""

    cls: type[optim.Optimizer]
    configurations: tuple[dict[str, Any], ...] = field(default=({},))
    matrices: bool = False  # it routes, and takes bare parameters only in groups that name their rule
    layers: bool = False  # it needs the model
    momentum: str = ""
    lr: float = 1e-2  # for a small network and few steps
    lowers: float = 0.8  # to which part of its first value the loss falls in these steps
    transcendental: bool = False  # its link rounds differently in vectorised and scalar loops, in the last bit

    def __str__(self) -> str:
        return self.cls.name


INSTANCES = (
    # no error, so no descent: what falls is what AdamW does to the biases
    Instance(optim.Hebbian, ({}, {"weight_decay": 0.1}), matrices=True, layers=True, lr=1e-5, lowers=0.98),
    Instance(optim.NLMS, ({}, {"eps": 1.0, "weight_decay": 0.1}), matrices=True, layers=True, lr=0.1),
    Instance(optim.LpRegression, ({}, {"p": 3.0, "weight_decay": 0.1}), matrices=True, layers=True, lr=0.01),
    Instance(optim.HuberRegression, ({}, {"delta": 0.01}), matrices=True, layers=True, lr=0.03),
    Instance(optim.RecursiveLeastSquares, ({}, {"forget": 0.9, "eps": 0.1}), matrices=True, layers=True, lr=1.0),
    Instance(
        optim.SGD,
        (
            {"momentum": 0.0},
            {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "decoupled": True},
        ),
        momentum="momentum",
        lr=0.1,
    ),
    Instance(optim.RotationalMomentum, ({}, {"weight_decay": 0.1}), matrices=True, momentum="momentum", lr=0.1),
    Instance(optim.ReflectiveMomentum, ({}, {"weight_decay": 0.1}), matrices=True, momentum="momentum", lr=0.1),
    Instance(optim.SignedEG, ({}, {"scale": 0.5, "weight_decay": 0.1}), lr=0.05, transcendental=True),
    Instance(optim.ExponentiatedGradient, ({}, {"scale": 0.5, "weight_decay": 0.1}), lr=0.05, transcendental=True),
    Instance(optim.Adam, ({}, {"weight_decay": 0.1, "eps": 1e-3}), momentum="betas"),
    Instance(optim.AdamW, ({}, {"betas": (0.0, 0.9)}), momentum="betas"),
    Instance(optim.NAdam, ({}, {"betas": (0.8, 0.95), "weight_decay": 0.1}, {"betas": (0.0, 0.9)}), momentum="betas"),
    Instance(optim.SignSGD, ({}, {"momentum": 0.9, "weight_decay": 0.1}), momentum="momentum", lr=3e-3),
    Instance(optim.Lion, ({}, {"betas": (0.9, 0.9), "weight_decay": 0.1}), momentum="betas", lr=3e-3),
    Instance(
        optim.FrankWolfe,
        ({}, {"norm": "rows", "betas": (0.9, 0.99)}, {"norm": "frobenius", "betas": (0.0, 0.0), "radius": 5.0}),
        matrices=True,
        momentum="betas",
    ),
    Instance(
        optim.Muon,
        (
            {"precision": "input"},
            {"momentum": 0.0, "nesterov": False, "scale": "original", "precision": "input"},
            {"method": "polar-express", "precision": "input"},
        ),
        matrices=True,
        momentum="momentum",
        lr=3e-2,
    ),
    Instance(
        optim.NorMuon,
        ({"precision": "input"}, {"nesterov": False, "beta2": 0.8, "scale": "original", "precision": "input"}),
        matrices=True,
        momentum="momentum",
        lr=3e-2,
    ),
    Instance(
        optim.SOAP,  # a gradient of low rank leaves rounding over eps in the other directions
        ({"eps": 1e-3}, {"eps": 1e-3, "betas": (0.0, 0.9), "shampoo_beta": 0.5}),
        matrices=True,
        momentum="betas",
        lr=3e-2,
    ),
    Instance(
        optim.Shampoo,
        ({}, {"betas": (0.0, 0.9), "exponent": 0.5}, {"graft": "adagrad"}),
        matrices=True,
        momentum="betas",
        lr=0.1,
    ),
    Instance(
        optim.NaturalGradient, ({}, {"beta": 0.0, "momentum": 0.0}), matrices=True, layers=True, momentum="momentum"
    ),
)
CONFIGURED = [pytest.param(i, c, id=f"{i}-{n}") for i in INSTANCES for n, c in enumerate(i.configurations)]


class Net(nn.Module):
    """Parameters of 0 to 4 dimensions, an empty one, one without gradient, two of the same shape, tied tables."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv2d(1, 2, 2, bias=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.strided = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.first(x)) + self.gain * self.second(x)
        y = self.conv(x[:, None]).square().mean() + self.empty.sum() + self.strided.sin().sum() * 0.1
        return self.head(self.norm(x)).square().mean() + y


TOKENS = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]])


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net(dtype)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, start: int = 0) -> list[float]:
    losses = []
    for t in range(start, start + steps):
        optimizer.zero_grad()
        loss = model((TOKENS + t) % 7)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a: list[Tensor], b: list[Tensor], tolerance: float = 0.0) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("instance", "options"), CONFIGURED)
def test_every_parameter_with_a_gradient_moves(instance: Instance, options: dict[str, Any], foreach: bool) -> None:
    model = net()
    before = dict(zip((n for n, _ in model.named_parameters()), values(model), strict=True))
    train(model, instance.cls(model, lr=0.01, foreach=foreach, **options))
    for name, p in model.named_parameters():
        moved = not torch.equal(p.detach(), before[name])
        assert moved == (name not in ("empty", "unused")), name
        assert bool(torch.isfinite(p).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("instance", "options"), CONFIGURED)
def test_batched_equals_one_by_one(instance: Instance, options: dict[str, Any], dtype: torch.dtype) -> None:
    """To the rounding of the dtype; a sum with a factor is one operation in the batched form."""
    results = []
    for foreach in (False, True):
        model = net(dtype)
        train(model, instance.cls(model, lr=0.01, foreach=foreach, **options))
        results.append(values(model))
    if instance.matrices:
        tolerance = {torch.float64: 1e-11, torch.float32: 1e-3, torch.bfloat16: 2e-2}[dtype]
    else:
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    same(*results, tolerance)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("instance", "options"), CONFIGURED)
def test_resuming_is_exact(instance: Instance, options: dict[str, Any], dtype: torch.dtype, foreach: bool) -> None:
    """Six steps are three, a file, and three more, bit for bit."""
    whole, part, resumed = net(dtype), net(dtype), net(dtype)
    make: Callable[[nn.Module], Any] = lambda m: instance.cls(m, lr=0.01, foreach=foreach, **options)  # noqa: E731
    train(whole, make(whole), 6)
    first = make(part)
    train(part, first, 3)
    file = io.BytesIO()
    torch.save({"model": part.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    second = instance.cls(resumed, lr=0.5, foreach=foreach)  # the options are in the file
    second.load_state_dict(saved["optimizer"])
    for p, q in zip(part.parameters(), resumed.parameters(), strict=True):
        for name, value in first.state[p].items():
            assert second.state[q][name].dtype == value.dtype
            assert torch.equal(second.state[q][name], value)
    train(resumed, second, 3, start=3)
    same(values(whole), values(resumed))


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_16_bit_parameters_have_float32_state_and_round_once(instance: Instance) -> None:
    low, high = net(torch.bfloat16), net(torch.float32)
    with torch.no_grad():
        for p, q in zip(low.parameters(), high.parameters(), strict=True):
            q.copy_(p)
    optimizers = [instance.cls(m, lr=0.01) for m in (low, high)]
    low(TOKENS).backward()
    high(TOKENS).backward()  # layers see float32 activations here: compare the rules that read gradients only
    for p, q in zip(low.parameters(), high.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(low.parameters(), high.parameters(), strict=True):
        for value in optimizers[0].state[p].values():
            assert value.dtype in (torch.float32, torch.int64)
        if not instance.layers:
            assert torch.equal(p.detach(), q.detach().bfloat16())


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_training_lowers_the_loss(instance: Instance) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(64, 8)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:].sum(-1).sin()], -1)
    optimizer = instance.cls(model, lr=instance.lr)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < instance.lowers * losses[0], losses[::10]


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_forms_of_params(instance: Instance) -> None:
    results = []
    forms: list[Callable[[nn.Module], Any]] = [lambda m: m, lambda m: m.named_parameters()]
    if not instance.matrices:
        forms += [
            lambda m: m.parameters(),
            lambda m: [{"params": [p]} for p in m.parameters()],
            lambda m: dict(m.named_parameters()),
        ]
    for form in forms:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
        model.add_module("head", nn.Linear(2, 3).double())
        if form is forms[1] and instance.matrices:  # a name must say what the module's class says otherwise
            model = nn.Sequential()
            torch.manual_seed(0)
            for name, module in (("embed", nn.Embedding(7, 4)), ("1", nn.Linear(4, 4)), ("2", nn.Linear(4, 2))):
                model.add_module(name, module.double())
            model.add_module("head", nn.Linear(2, 3).double())
        extra = {"model": model} if instance.layers else {}
        optimizer = instance.cls(form(model), lr=0.01, **extra)
        for _ in range(3):
            optimizer.zero_grad()
            model(TOKENS).square().mean().backward()
            optimizer.step()
        results.append(values(model))
    for other in results[1:]:
        same(results[0], other)


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_closure_gives_the_loss_back(instance: Instance) -> None:
    a, b = net(), net()
    first, second = instance.cls(a, lr=0.01), instance.cls(b, lr=0.01)
    losses = []
    for t in range(3):

        def closure(t: int = t) -> Tensor:
            first.zero_grad()
            assert torch.is_grad_enabled()
            loss: Tensor = a((TOKENS + t) % 7)
            loss.backward()
            return loss

        losses.append(first.step(closure).item())
    assert losses == train(b, second)
    same(values(a), values(b))


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_hooks_run_around_the_step(instance: Instance) -> None:
    model, order = net(), []
    optimizer = instance.cls(model)
    optimizer.register_step_pre_hook(lambda *_: order.append("before"))
    optimizer.register_step_post_hook(lambda *_: order.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, d: {**d, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, d: {k: v for k, v in d.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda o: order.append(type(next(iter(o.state.values()))).__name__))
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert order == ["before", "after", "dict"]


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_a_loaded_state_shares_no_memory(instance: Instance) -> None:
    model = net()
    optimizer = instance.cls(model)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        for name, value in optimizer.state.get(p, {}).items():
            assert value.data_ptr() != saved["state"][index][name].data_ptr()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("instance", [i for i in INSTANCES if not i.layers], ids=str)
def test_copies_step_alike(instance: Instance, duplicate: Any) -> None:
    model = net()
    optimizer = instance.cls(model, lr=0.01)
    train(model, optimizer, 2)
    other_model, other = duplicate((model, optimizer))
    assert str(other.report()) == str(optimizer.report())
    train(model, optimizer, 2)
    train(other_model, other, 2)
    same(values(model), values(other_model))


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_groups_have_their_own_lr_and_decay(instance: Instance) -> None:
    model = net()
    before = values(model)
    frozen = {"params": [("first.weight", model.first.weight)], "lr": 0.0}
    rest = {"params": [(n, p) for n, p in model.named_parameters() if n != "first.weight"]}
    extra = {"model": model} if instance.layers else {}
    optimizer = instance.cls([frozen, rest], lr=0.01, **extra)
    train(model, optimizer)
    names = [n for n, _ in model.named_parameters()]
    i = names.index("first.weight")
    torch.testing.assert_close(
        model.first.weight.detach(), before[i], rtol=0, atol=1e-15 if instance.transcendental else 0.0
    )
    assert not torch.equal(model.second.weight.detach(), before[names.index("second.weight")])


@pytest.mark.parametrize("instance", [i for i in INSTANCES if not i.layers], ids=str)
def test_parameters_can_be_added_later(instance: Instance) -> None:
    model, extra = net(), nn.Linear(6, 6).double()
    optimizer = instance.cls(model, lr=0.01)
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": [(f"extra.{n}", p) for n, p in extra.named_parameters()], "lr": 0.1})
    assert optimizer.param_groups[-1]["lr"] == 0.1
    before = values(extra)
    extra(torch.ones(1, 6, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, values(extra), strict=True))


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_tied_parameters_are_updated_once(instance: Instance) -> None:
    results = []
    for repeated in (False, True):
        model = net()
        named = list(model.named_parameters(remove_duplicate=not repeated))
        extra = {"model": model} if instance.layers else {}
        optimizer = instance.cls(named, lr=0.01, **extra)
        ids = [id(p) for g in optimizer.param_groups for p in g["params"]]
        assert len(ids) == len(set(ids))
        train(model, optimizer)
        results.append(values(model))
    same(*results)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(instance: Instance, bad: float) -> None:
    model = net()
    optimizer = instance.cls(model, lr=0.01)
    train(model, optimizer, 2)
    before, state = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    model(TOKENS).backward()
    assert model.second.bias.grad is not None
    model.second.bias.grad[1] = bad
    with pytest.raises(NotFiniteError, match=r"'second\.bias' is not finite"):
        optimizer.step()
    same(before, values(model))
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[name], state[index][name]) for name in kept)


def test_the_check_can_be_left_out_and_is_not_fooled_by_an_overflowing_norm() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 3e38)
    optim.Lion([p]).step()
    p.grad = torch.full((3,), float("nan"))
    optim.SGD([p], check_finite=False).step()
    assert bool(p.isnan().any())


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return any(key in optimizer.defaults for key in ("momentum", "betas"))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, 2, cycle_momentum=_has_momentum(o)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.01, 10, cycle_momentum=_has_momentum(o)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: int = 6) -> None:
    scheduler = SCHEDULERS[name](optimizer)
    for t in range(steps):
        optimizer.zero_grad()
        model((TOKENS + t) % 7).backward()
        optimizer.step()
        scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))


@pytest.mark.parametrize("cls", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_ours_as_they_drive_torch(name: str, cls: str) -> None:
    """Rates and SGD's momentum alike. A scheduled beta of AdamW is another matter, see the next test."""
    if cls == "AdamW" and name in ("CyclicLR", "OneCycleLR"):
        return
    options = {"lr": 0.01, "momentum": 0.9} if cls == "SGD" else {"lr": 0.01}
    ours, theirs = net(), net()
    scheduled(ours, getattr(optim, cls)(ours, **options), name)
    scheduled(theirs, getattr(torch.optim, cls)(theirs.parameters(), **options), name)
    same(values(ours), values(theirs), 1e-12)


def test_a_scheduled_beta_keeps_the_average_an_average() -> None:
    """On a constant gradient a bias-corrected average is that gradient, whatever its betas were.

    torch corrects by the current beta to the power of the step, which is the response to a unit drive only as long as
    beta never changes.
    """
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = optim.AdamW([p], lr=0.01, weight_decay=0.0, eps=0.0)
    for t in range(8):
        before = p.detach().clone()
        optimizer.param_groups[0]["betas"] = (0.5 + 0.05 * t, 0.9)
        p.grad = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close(before - p.detach(), 0.01 * p.grad.sign(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "CyclicLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_schedulers_drive_all_rules_of_an_optimizer(instance: Instance, name: str) -> None:
    model = net()
    optimizer = instance.cls(model, lr=0.01)
    scheduled(model, optimizer, name)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    rates = {g["lr"] for g in optimizer.param_groups}
    assert len(rates) == 1 and rates != {0.01}


@pytest.mark.parametrize("instance", [i for i in INSTANCES if i.momentum], ids=str)
def test_momentum_can_be_turned_on_by_a_schedule(instance: Instance) -> None:
    """State that a new part of the tuple needs starts then; the rest continues."""
    model = net()
    off = (0.0, 0.9) if instance.momentum == "betas" else 0.0
    on = (0.8, 0.9) if instance.momentum == "betas" else 0.8
    extra = {"nesterov": False} if instance.cls in (optim.Muon, optim.NorMuon) else {}
    optimizer = instance.cls(model, lr=0.01, **{instance.momentum: off}, **extra)
    train(model, optimizer, 2)
    for group in optimizer.param_groups:
        if instance.momentum in group:
            group[instance.momentum] = on
    train(model, optimizer, 2)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_gradients_may_be_strided_and_of_another_layout(instance: Instance) -> None:
    a, b = net(), net()
    for model, strided in ((a, False), (b, True)):
        optimizer = instance.cls(model, lr=0.01)
        model(TOKENS).backward()
        for p in model.parameters():
            if p.grad is not None and p.grad.ndim == 2 and strided:
                p.grad = p.grad.T.contiguous().T
        optimizer.step()
    same(values(a), values(b))


def test_the_catalogue_fields_are_there() -> None:
    names = [cls.name for cls in (*optim.ALL, optim.ExactNaturalGradient)]
    assert len(set(names)) == len(names) == len(INSTANCES) + 1
    for cls in (*optim.ALL, optim.ExactNaturalGradient):
        assert cls.paper and cls.equation and cls.differs and cls.bibtex.startswith("@") and cls.default_lr > 0
        assert {"lr", "weight_decay"} == {per.name for per in cls.update.demands()}
