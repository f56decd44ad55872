"""The default where generated kernels run: the kernel's arithmetic, and in everything else what it is elsewhere.

Kernels run in Triton's interpreter, in processes of their own, with `_generated` set to say that they do. It rounds to
bfloat16 by truncation, and lacks transcendental functions but for powers of positive numbers.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from axes import optim
from axes.errors import AxesError
from axes.optim.engine import generated
from axes.optim.engine.batch import Batch
from axes.programs import fused
from tests.interpreter import interpret
from tests.optim.table import ENTRYWISE, net, same, train, values

BOUND = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1.6e-2}
STORED: tuple[dict[str, Any], ...] = (
    {},
    {"moments": "8bit"},
    {"master": "32bit"},
    {"master": "24bit", "moments": "8bit", "rounding": "stochastic", "seed": 5},
)


def in_kernels(*checks: Callable[[], None]) -> None:
    """Run checks where the default steps by kernels."""
    calls = "; ".join(f"t.{check.__name__}()" for check in checks)
    interpret(f"from tests.optim import test_generated as t; t.generated.no_kernels = lambda device: None; {calls}")


def batches(optimizer: Any) -> list[Batch]:
    return [b for *_, made in optimizer._batches.made.values() for b in made if b.entries is not None]


def by_kernel(optimizer: Any) -> bool:
    """Whether every batch is a kernel with its counts on the host."""
    found = batches(optimizer)
    return bool(found) and all(b.how == "fused" and b.hosted for b in found)


def both(make: Callable[..., Any], models: list[nn.Module]) -> tuple[Any, Any]:
    """An optimizer by default, and one that interprets."""
    return make(models[0]), make(models[1], foreach=False)


def alike(a: nn.Module, b: nn.Module, one: Any, other: Any, bound: float) -> None:
    """Parameters, numbers and counts are equal, and in the same places."""
    same(values(a), values(b), bound)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        kept, expected = one.state[p], other.state[q]
        assert kept.keys() == expected.keys()
        for name, x in kept.items():
            assert x.dtype == expected[name].dtype and x.shape == expected[name].shape, name
            if name.endswith("count"):
                assert x.device.type == "cpu" and torch.equal(x, expected[name])
            elif x.dtype.is_floating_point:
                torch.testing.assert_close(x, expected[name], rtol=bound, atol=bound)


def random_gradients(model: nn.Module, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def walk(model: nn.Module, optimizer: Any, steps: range) -> None:
    for t in steps:
        random_gradients(model, t)
        optimizer.step()


# ---- checks with kernels ---------------------------------------------------------------------------------------------


def rules_and_dtypes() -> None:
    dtypes = itertools.cycle((torch.float64, torch.float32, torch.bfloat16))
    for instance in [i for i in ENTRYWISE if not i.transcendental]:
        for options in instance.configurations:
            dtype = next(dtypes)
            models = [net(dtype), net(dtype)]
            one, other = both(lambda m, i=instance, o=options, **way: i.cls(m, lr=0.01, **o, **way), models)  # type: ignore[misc]
            for model, optimizer in zip(models, (one, other), strict=True):
                walk(model, optimizer, range(2))
            assert by_kernel(one) and not batches(other), instance
            alike(*models, one, other, BOUND[dtype])
    models = [net(torch.float32), net(torch.float32)]
    one, other = both(lambda m, **way: optim.AdamW(m, lr=0.01, foreach=way.get("foreach", True), maximize=True), models)
    for model, optimizer in zip(models, (one, other), strict=True):
        walk(model, optimizer, range(2))
    assert by_kernel(one)  # said in so many words, too
    alike(*models, one, other, BOUND[torch.float32])


def stored_forms() -> None:
    """The first step lands on the same codes but for rounding at their borders."""
    for options in STORED[1:]:
        models = [net(torch.bfloat16), net(torch.bfloat16)]
        one, other = both(lambda m, o=options, **way: optim.AdamW(m, lr=0.01, **o, **way), models)  # type: ignore[misc]
        for model, optimizer in zip(models, (one, other), strict=True):
            walk(model, optimizer, range(2))
        assert by_kernel(one)
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            if "master" in options:  # what is shown is part of the code, and not rounded by the interpreter
                torch.testing.assert_close(p, q, rtol=2**-7, atol=2**-9)
            for name, x in one.state[p].items():
                expected = other.state[q][name]
                assert x.dtype == expected.dtype and x.device == expected.device
                if x.dtype in (torch.int8, torch.uint8) and not name.endswith(".low"):
                    assert int((x.int() - expected.int()).abs().max()) <= 1
                elif name.endswith("count"):
                    assert int(x) == int(expected) == 2


def layouts() -> None:
    """Strided, unaligned and complex parameters; only those that no kernel can write are copied."""
    base = torch.randn(100, generator=torch.Generator().manual_seed(0))

    def parameters() -> list[nn.Parameter]:
        strided, complexes = base.clone()[:60].view(6, 10).T, torch.complex(base[:50].clone(), base[50:].clone())
        unaligned = base.clone()[1:78]
        assert unaligned.data_ptr() % 16
        return [nn.Parameter(x) for x in (base.clone(), strided, complexes, unaligned, base[3].clone())]

    found = []
    for way in ({}, {"foreach": False}):
        ps = parameters()
        optimizer = optim.AdamW(ps, lr=0.01, **way)
        for t in range(3):
            generator = torch.Generator().manual_seed(t)
            for p in ps:
                g = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                p.grad = g.T.contiguous().T if g.ndim == 2 else g
            optimizer.step()
        if not way:
            assert by_kernel(optimizer)
            shown = {x.data_ptr() for b in batches(optimizer) for x in b.entries.shown}
            assert shown == {ps[1].data_ptr(), ps[3].data_ptr()}
        found.append([p.detach() for p in ps])
    same(*found, 3e-6)


def rates() -> None:
    """Numbers, tensors, several groups, schedules of the learning rate and of what is part of the tuple."""
    cycle: Callable[[Any], Any] = lambda o: lr_scheduler.OneCycleLR(o, 0.01, 10)  # noqa: E731
    cases: dict[str, tuple[Any, Callable[[Any], Any] | None]] = {
        "tensor": (lambda m, **way: optim.AdamW(m, lr=torch.tensor(0.01), **way), None),
        "scale": (lambda m, **way: optim.SGD([{"params": m, "lr_scale": 0.5}], lr=torch.tensor([0.1]), **way), None),
        "scheduled": (lambda m, **way: optim.Lion(m, **way), lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1))),
        "momentum": (lambda m, **way: optim.SGD(m, lr=0.01, momentum=0.9, **way), cycle),
        "betas": (lambda m, **way: optim.AdamW(m, lr=0.01, **way), cycle),
    }
    for name, (make, schedule) in cases.items():
        models = [net(torch.float32), net(torch.float32)]
        for model, way in zip(models, ({}, {"foreach": False}), strict=True):
            optimizer = make(model, **way)
            scheduler = None if schedule is None else schedule(optimizer)
            for t in range(4):
                walk(model, optimizer, range(t, t + 1))
                if t == 0:
                    texts = set(fused._COMPILED)
                if scheduler is not None:
                    scheduler.step()
            assert way or by_kernel(optimizer)
            assert fused._COMPILED.keys() == texts, name  # no later step compiles a kernel
        same(*map(values, models), 3e-6)
    model, twin = net(torch.float32), net(torch.float32)
    groups = [
        [{"params": [p], "lr": 0.01 * (i + 1), "betas": (0.1 * (i % 3), 0.9)} for i, p in enumerate(m.parameters())]
        for m in (model, twin)
    ]
    walk(model, optim.AdamW(groups[0]), range(3))
    walk(twin, optim.AdamW(groups[1], foreach=False), range(3))
    same(values(model), values(twin), 3e-6)


def resuming() -> None:
    """Six steps are three, a copy of any kind, and three more, bit for bit."""
    for options in STORED:
        for kind in ("file",) if options else ("file", "pickle", "deepcopy"):
            dtype = torch.bfloat16 if options else torch.float32
            whole, part = net(dtype), net(dtype)
            walk(whole, optim.AdamW(whole, lr=0.01, **options), range(6))
            first: Any = optim.AdamW(part, lr=0.01, **options)
            walk(part, first, range(3))
            if kind == "file":
                file = io.BytesIO()
                torch.save({"model": part.state_dict(), "optimizer": first.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                counts = [x for s in saved["optimizer"]["state"].values() for n, x in s.items() if n.endswith("count")]
                assert counts and all(x.device.type == "cpu" and int(x) == 3 for x in counts)
                part = net(dtype)
                part.load_state_dict(saved["model"])
                first = optim.AdamW(part, lr=0.5)
                first.load_state_dict(saved["optimizer"])
            elif kind == "pickle":
                part, first = pickle.loads(pickle.dumps((part, first)))
            else:
                part, first = copy.deepcopy((part, first))
            walk(part, first, range(3, 6))
            assert by_kernel(first)
            same(values(whole), values(part))
    # loading into an optimizer that has stepped
    model, twin = net(torch.float32), net(torch.float32)
    one, other = optim.AdamW(model, lr=0.01), optim.AdamW(twin, lr=0.01)
    walk(model, one, range(2))
    saved, weights = copy.deepcopy(one.state_dict()), copy.deepcopy(model.state_dict())
    walk(twin, other, range(10, 15))
    other.load_state_dict(saved)
    twin.load_state_dict(weights)
    walk(model, one, range(2, 4))
    walk(twin, other, range(2, 4))
    same(values(model), values(twin))
    assert all(torch.equal(x, other.state[q][n]) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
               for n, x in one.state[p].items())  # fmt: skip


def changes_from_outside() -> None:
    """New state tensors, new memory of a parameter, gradients that come and go, ways that take turns."""
    models = [net(torch.float32), net(torch.float32)]
    ways: list[Any] = list(both(lambda m, **way: optim.AdamW(m, lr=0.01, **way), models))
    for model, optimizer in zip(models, ways, strict=True):
        walk(model, optimizer, range(2))
        first = model.first.weight
        optimizer.state[first]["via.0.norm"] = torch.full_like(optimizer.state[first]["via.0.norm"], 0.5)
        walk(model, optimizer, range(2, 4))
        for p in model.parameters():
            p.data = p.detach() * 0.5
        walk(model, optimizer, range(4, 6))
        for t in range(6, 9):
            random_gradients(model, t)
            for i, p in enumerate(model.parameters()):
                p.grad = None if (i + t) % 3 == 0 else p.grad
            optimizer.step()
        optimizer.param_groups[0]["foreach"] = not optimizer.param_groups[0]["foreach"]
        walk(model, optimizer, range(9, 10))
        optimizer.param_groups[0]["foreach"] = not optimizer.param_groups[0]["foreach"]
        walk(model, optimizer, range(10, 12))
    assert by_kernel(ways[0])
    alike(*models, *ways, 1e-5)


def steps_that_are_called_off() -> None:
    """By the host, and by a flag beside a group that is fused: nothing changes, counts and numbers included."""
    for check in ("raise", "skip"):
        models = [net(torch.float32), net(torch.float32)]
        found = []
        for model, bad in zip(models, (True, False), strict=True):
            ps = list(model.parameters())
            mixed = [{"params": ps[:4], "fused": check == "skip"}, {"params": ps[4:]}]
            optimizer = optim.AdamW(mixed, lr=0.01, check_finite=check)
            walk(model, optimizer, range(3))
            if bad:
                random_gradients(model, 99)
                assert ps[-1].grad is not None
                ps[-1].grad[0, 0] = float("nan")
                before = copy.deepcopy(optimizer.state_dict()["state"])
                if check == "raise":
                    with pytest.raises(AxesError, match="is not finite; no parameter was changed"):
                        optimizer.step()
                else:
                    optimizer.step()
                    assert optimizer.skipped == 1
                for index, kept in optimizer.state_dict()["state"].items():
                    assert all(torch.equal(x, before[index][n]) for n, x in kept.items())
            walk(model, optimizer, range(3, 6))
            found.append(values(model))
        same(*found)


def a_first_datum_of_its_own() -> None:
    """What the interpreter leaves of it are views of a stack, which a kernel could not read 16 bytes at a time."""
    found = []
    for way in ({}, {"foreach": False}):
        ps = [nn.Parameter(torch.arange(5.0) + i) for i in range(4)]
        optimizer = optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.2, **way)
        for t in range(3):
            for i, p in enumerate(ps):
                p.grad = torch.cos(torch.arange(5.0) + t + i)
            optimizer.step()
        if not way:
            assert by_kernel(optimizer)
            assert all(s["via.0.theta"].data_ptr() % 16 == 0 for s in optimizer.state.values())
        found.append([p.detach() for p in ps])
    same(*found, 3e-6)


def the_smallest_kernel_runs() -> None:
    assert generated.unable(torch.device("cpu")) is None


def tensors_with_arithmetic_of_their_own() -> None:
    class Own(Tensor):
        pass

    p = nn.Parameter(torch.ones(4).as_subclass(Own))
    p.grad = torch.ones(4)
    optimizer = optim.AdamW([p, nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.step()
    (batch,) = batches(optimizer)
    assert batch.how == "host" and not torch.equal(p.detach(), torch.ones(4))


def numbers_that_move() -> None:
    """One copy brings all of them, and one alone is filled in; numbers that the state keeps stay where they are."""

    class Written(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64 and args[0].ndim < 2:
                self.names += [n for n in ("fill_", "copy_") if func.__name__.startswith(n)]
            return func(*args, **(kwargs or {}))

    for cls, options in ((optim.AdamW, {}), (optim.Lion, {}), (optim.NAdam, {})):
        models = [net(torch.float32), net(torch.float32)]
        one, other = both(lambda m, **k: cls(m, lr=0.01, weight_decay=0.1, **options, **k), models)  # noqa: B023
        for t in range(6):
            for group in (*one.param_groups, *other.param_groups):
                group["lr"] = 0.01 - 0.001 * t
                if t < 4:
                    group["betas"], group["weight_decay"] = (0.9 - 0.01 * t, 0.99 - 0.001 * t), 0.1 + 0.01 * t
            random_gradients(models[1], t), random_gradients(models[0], t)
            with Written() as seen:
                one.step()
            other.step()
            assert t == 0 or cls is optim.NAdam or seen.names == (["copy_"] if t < 4 else ["fill_"]), (t, seen.names)
        assert by_kernel(one)
        alike(*models, one, other, 3e-6)


CHECKS = (
    (rules_and_dtypes,),
    (stored_forms, layouts),
    (rates, numbers_that_move),
    (resuming,),
    (changes_from_outside, steps_that_are_called_off),
    (a_first_datum_of_its_own, the_smallest_kernel_runs, tensors_with_arithmetic_of_their_own),
)


@pytest.mark.parametrize("checks", CHECKS, ids=lambda checks: checks[0].__name__)
def test_with_kernels(checks: tuple[Callable[[], None], ...]) -> None:
    in_kernels(*checks)


# ---- without kernels -------------------------------------------------------------------------------------------------


def test_a_parameter_may_be_given_other_memory() -> None:
    """By `p.data = ...`, as averages of weights are swapped in; both are followed."""
    found = []
    for foreach in (True, False):
        p = nn.Parameter(torch.ones(5))
        optimizer = optim.AdamW([p], lr=0.1, foreach=foreach)
        for t in range(4):
            p.grad = torch.cos(torch.arange(5.0) + t)
            optimizer.step()
            if t % 2:
                p.data = p.detach() * 0.5
        found.append([p.detach()])
    same(*found, 1e-6)


def test_a_step_that_a_flag_calls_off_changes_no_number() -> None:
    """The flag is of another group, whose step must not wait for the device."""
    found = []
    for bad in (True, False):
        model = net(torch.float32)
        ps = list(model.parameters())
        groups = [{"params": ps[:4], "capturable": True}, {"params": ps[4:]}]
        optimizer = optim.AdamW(groups, lr=0.01, check_finite="skip")
        walk(model, optimizer, range(3))
        if bad:
            random_gradients(model, 99)
            assert ps[-1].grad is not None
            ps[-1].grad[0, 0] = float("nan")
            optimizer.step()
        walk(model, optimizer, range(3, 6))
        assert optimizer.skipped == bad
        found.append(values(model))
    same(*found)


def test_on_a_cpu_torch_steps() -> None:
    model = net(torch.float32)
    optimizer = optim.AdamW(model)
    train(model, optimizer, 1)
    assert all(b.how == "host" and b.hosted for b in batches(optimizer))


def test_where_no_kernel_can_be_made_torch_steps() -> None:
    with pytest.warns(UserWarning, match="no kernels for cpu, torch's operations step instead"):
        assert generated.unable.__wrapped__(torch.device("cpu"))
