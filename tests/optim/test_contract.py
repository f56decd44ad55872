"""What every optimizer must do as a `torch.optim.Optimizer`: one table of instances drives every case."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from axes import optim
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, NotFiniteError
from axes.optim.engine.capabilities import holds
from tests.drawn import crossed, drawn
from tests.optim.table import ENTRYWISE, INSTANCES, TOKENS, Instance, net, same, train, values

CONFIGURED = [pytest.param(i, c, id=f"{i}-{n}") for i in INSTANCES for n, c in enumerate(i.configurations)]


@pytest.mark.parametrize(("instance", "options", "foreach"), crossed(CONFIGURED, [False, True]))
def test_every_parameter_with_a_gradient_moves(instance: Instance, options: dict[str, Any], foreach: bool) -> None:
    model = net()
    before = dict(zip((n for n, _ in model.named_parameters()), values(model), strict=True))
    train(model, instance.cls(model, lr=0.01, foreach=foreach, **options))
    for name, p in model.named_parameters():
        moved = not torch.equal(p.detach(), before[name])
        assert moved == (name not in ("empty", "unused_bias")), name
        assert bool(torch.isfinite(p).all())


@pytest.mark.parametrize(
    ("instance", "options", "dtype"), crossed(CONFIGURED, [torch.float64, torch.float32, torch.bfloat16])
)
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


@pytest.mark.parametrize(
    ("instance", "options", "dtype", "foreach"), crossed(CONFIGURED, [torch.float64, torch.bfloat16], [False, True])
)
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


@pytest.mark.parametrize("instance", drawn((pytest.param(i, id=str(i)) for i in INSTANCES), 4))
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
        same(results[0], other, 1e-15 if instance.transcendental else 0.0)


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
    for _ in range(1 + instance.waits):
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


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_a_step_can_be_skipped_and_is_counted(instance: Instance) -> None:
    model = net()
    optimizer = instance.cls(model, lr=0.01, check_finite="skip")
    train(model, optimizer, 1)
    before, state = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    model(TOKENS).backward()
    assert model.second.bias.grad is not None
    model.second.bias.grad[1] = float("nan")
    optimizer.step()
    assert optimizer.skipped == 1
    assert any("1 steps were skipped" in note for note in optimizer.report().notes)
    same(before, values(model))
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[name], state[index][name]) for name in kept)
    train(model, optimizer, 1)
    assert optimizer.skipped == 1
    assert pickle.loads(pickle.dumps(optimizer)).skipped == 1 if not instance.layers else True


CAPTURABLE = [pytest.param(i, c, id=f"{i}-{n}") for i in ENTRYWISE for n, c in enumerate(i.configurations)]


class NoWaiting(TorchDispatchMode):
    """Fails where a number is read from a tensor, which waits for the device that holds it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("instance", "options"), CAPTURABLE)
def test_capturable_waits_for_nothing_and_changes_nothing(
    instance: Instance, options: dict[str, Any], dtype: torch.dtype
) -> None:
    results = []
    for capturable in (False, True):
        model = net(dtype)
        rate: Any = torch.tensor(0.01, dtype=torch.float64) if capturable else 0.01
        optimizer = instance.cls(model, lr=rate, capturable=capturable, **options)
        for group in optimizer.param_groups:
            decay = group["weight_decay"]
            group["weight_decay"] = torch.tensor(decay, dtype=torch.float64) if capturable else decay
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        for t in range(4):
            optimizer.zero_grad()
            model((TOKENS + t) % 7).backward()
            with NoWaiting() if capturable and t > 1 else nullcontext():  # batches are made in the first steps
                optimizer.step()
            scheduler.step()
        results.append(values(model))
        assert all(int(kept["count"]) == (4 if p.grad is not None else 0) for p, kept in optimizer.state.items())
    same(*results, {torch.float64: 1e-14, torch.float32: 1e-6}[dtype])


@pytest.mark.parametrize("instance", [i for i in INSTANCES if holds(i.cls.update)], ids=str)
def test_what_refreshes_in_some_steps_is_no_graph(instance: Instance) -> None:
    with pytest.raises(AxesError, match="capturable=True records one step"):
        instance.cls(net(), lr=0.01, capturable=True)


@pytest.mark.parametrize("instance", [i for i in INSTANCES if not i.layers and not holds(i.cls.update)], ids=str)
def test_capturable_skips_on_the_device(instance: Instance) -> None:
    model = net()
    optimizer = instance.cls(model, lr=0.01, capturable=True, check_finite="skip")
    train(model, optimizer, 2)
    before, state = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    model(TOKENS).backward()
    assert model.second.bias.grad is not None
    model.second.bias.grad[1] = float("inf")
    optimizer.step()
    assert optimizer.skipped == 1
    same(before, values(model))
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[name], state[index][name]) for name in kept)
    train(model, optimizer, 1)
    twin = net()
    other = instance.cls(twin, lr=0.01)
    train(twin, other, 2)
    train(twin, other, 1)
    same(values(model), values(twin), 1e-9)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_compiled_step_is_compiled_once(capturable: bool) -> None:
    """Five steps and a scheduler: graphs are made in the first step only, or none where numbers stay on the host."""
    torch._dynamo.reset()
    model, twin = net(torch.float32), net(torch.float32)
    optimizer = optim.AdamW(model, lr=torch.tensor(0.01), capturable=capturable)
    reference = optim.AdamW(twin, lr=0.01)
    schedulers = [lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference)]
    counter = CompileCounter()
    step = torch.compile(optimizer.step, backend=counter)
    frames = []
    for t in range(5):
        for m, move in ((model, step), (twin, reference.step)):
            m.zero_grad()
            m((TOKENS + t) % 7).backward()
            move()
        for scheduler in schedulers:
            scheduler.step()
        for o in (optimizer, reference):
            beta = 0.8 + 0.02 * t
            o.param_groups[0]["betas"] = (torch.tensor(beta) if capturable and o is optimizer else beta, 0.99)
        frames.append(counter.frame_count)
    assert len(set(frames[1:])) == 1 and (capturable or frames[0] == frames[1]), frames
    assert (counter.op_count > 40) == capturable  # the arithmetic of AdamW was seen
    same(values(model), values(twin), 1e-6)


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_the_state_is_there_before_the_first_step(instance: Instance) -> None:
    """A file written before training holds all that one written later does, and loads."""
    model = net()
    optimizer = instance.cls(model, lr=0.01)
    saved = copy.deepcopy(optimizer.state_dict())
    shapes = {i: {n: x.shape for n, x in kept.items()} for i, kept in saved["state"].items()}
    expected = [p for g in optimizer.param_groups for p in g["params"] if p.numel()]
    assert len(shapes) == len(expected)
    train(model, optimizer, 2)
    for i, kept in optimizer.state_dict()["state"].items():
        assert shapes[i] == {n: x.shape for n, x in kept.items()}
    again = net()
    other = instance.cls(again, lr=0.5)
    other.load_state_dict(saved)
    train(again, other, 2)
    same(values(model), values(again))


@pytest.mark.parametrize("instance", [i for i in INSTANCES if not i.layers], ids=str)
def test_weights_loaded_after_the_construction_count(instance: Instance) -> None:
    """A state that depends on the weights is of those at the first step."""
    model, twin, source = net(), net(), net()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(0.5)
    optimizer = instance.cls(model, lr=0.01)
    model.load_state_dict(source.state_dict())
    twin.load_state_dict(source.state_dict())
    train(model, optimizer, 2)
    train(twin, instance.cls(twin, lr=0.01), 2)
    same(values(model), values(twin))


def test_parameters_without_storage_have_no_state_yet() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    optimizer = optim.AdamW(model)
    assert not optimizer.state
    optimizer.init_state()
    assert not optimizer.state
    model = nn.Linear(3, 2)
    model.requires_grad_(False)
    optimizer = optim.AdamW(model)
    assert not optimizer.state
    optimizer.init_state()
    assert len(optimizer.state) == 2


def test_how_a_step_is_computed_is_not_in_the_file() -> None:
    model = net()
    saved = optim.AdamW(model, foreach=False, capturable=True).state_dict()
    assert saved["param_groups"][0]["capturable"]
    optimizer = optim.AdamW(net())
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert group["foreach"] and not group["capturable"]


@pytest.mark.parametrize("instance", [i for i in INSTANCES if not i.layers], ids=str)
def test_a_gradient_scaler_skips_what_overflowed(instance: Instance) -> None:
    model, twin = net(torch.float32), net(torch.float32)
    optimizer, reference = instance.cls(model, lr=0.01), instance.cls(twin, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for t in range(3):
        optimizer.zero_grad()
        scaler.scale(model((TOKENS + t) % 7)).backward()
        if t == 1:
            assert model.second.bias.grad is not None
            model.second.bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    train(twin, reference, 1)
    train(twin, reference, 1, start=2)
    same(values(model), values(twin), 1e-4)
    assert scaler.get_scale() == 4.0


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
    extra = {"nesterov": False} if instance.cls in (optim.Muon, optim.NorMuon, optim.AdaMuon) else {}
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
        own = {optim.ScheduleFree: {"average"}, optim.Prodigy: {"distance"}}.get(cls, set())  # set by themselves
        assert {"lr", "weight_decay"} | own == {per.name for per in cls.update.demands()}


def test_a_state_is_worked_out_once_for_all_parameters_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a thousand tensors took 30 times as long as torch's: each was checked against a state of its own."""
    made = []
    init = StateUpdate.init
    monkeypatch.setattr(StateUpdate, "init", lambda *given, **named: made.append(1) or init(*given, **named))
    ps = [nn.Parameter(torch.ones(3, 2 + i % 2)) for i in range(20)]
    optimizer = optim.AdamW(ps, betas=(0.75, 0.9375))
    made.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(made) <= 2
