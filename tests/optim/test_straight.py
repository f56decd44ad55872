"""A step that goes the way of the last one is the step of the general way, whatever a user has changed since."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import NotFiniteError
from axes.optim.engine import loops
from axes.optim.engine.straight import Straight
from axes.programs import c_library

pytestmark = pytest.mark.skipif(c_library.no_compiler() is not None, reason="no C compiler")
SHAPES = ((), (7,), (4, 6), (3, 2, 2, 2), (1, 1), (30, 50))
Change = Callable[[Any, list[nn.Parameter]], object]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops from the first step on."""
    monkeypatch.setattr(loops, "WORTH", 0)


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of every step that tried, whether it went straight."""
    went: list[bool] = []
    step = Straight.step
    monkeypatch.setattr(Straight, "step", lambda self, *given: (went.append(done := step(self, *given)), done)[1])
    yield went


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def give(ps: list[nn.Parameter], t: int) -> None:
    generator = torch.Generator().manual_seed(50 + t)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def every(optimizer: Any) -> list[Tensor]:
    ps = [p for group in optimizer.param_groups for p in group["params"]]
    return [x.detach().clone() for p in ps for x in (p, *optimizer.state[p].values())]


def generally(optimizer: Any) -> None:
    """One step in the general way."""
    optimizer._straight = None
    optimizer.step()


RULES: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: optim.AdamW(ps, lr=0.1),
    "nadam": lambda ps: optim.NAdam(ps, lr=0.1),
    "lion": lambda ps: optim.Lion(ps, lr=0.1),
    "maximized": lambda ps: optim.AMSGrad(ps, lr=0.1, maximize=True),
    "unchecked": lambda ps: optim.RMSprop(ps, lr=0.1, check_finite=False),
    "groups": lambda ps: optim.AdamW([{"params": ps[:2], "weight_decay": 0.0}, {"params": ps[2:], "lr": 0.02}], lr=0.1),
    "tensor": lambda ps: optim.SGD(ps, lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.9),
}


@pytest.mark.parametrize(
    ("rule", "dtype"), [("adamw", torch.float32), *[(rule, torch.float64) for rule in RULES]], ids=str
)
def test_it_is_the_general_step_bit_for_bit(rule: str, dtype: torch.dtype, straight: list[bool]) -> None:
    made = [parameters(dtype) for _ in range(2)]
    a, b = (RULES[rule](ps) for ps in made)
    for t in range(8):
        give(made[0], t)
        give(made[1], t)
        for optimizer in (a, b):
            for group in optimizer.param_groups if t in (2, 3, 6) else ():  # a scheduler's work
                group["lr"] = group["lr"] * 0.9
        a.step()
        kept, straight[:] = list(straight), []
        generally(b)
        straight[:] = kept
    assert straight and all(straight) and len(straight) >= 6
    assert all(map(torch.equal, every(a), every(b)))


def _grow(optimizer: Any, ps: list[nn.Parameter]) -> None:
    late = nn.Parameter(torch.ones(3, 3, dtype=ps[0].dtype))
    late.grad = torch.ones_like(late)
    optimizer.add_param_group({"params": [late], "lr": 0.3})


def _elsewhere(optimizer: Any, ps: list[nn.Parameter]) -> None:
    ps[2].data = ps[2].data.clone()


def _other_state(optimizer: Any, ps: list[nn.Parameter]) -> None:
    name = next(n for n, x in optimizer.state[ps[2]].items() if x.shape == ps[2].shape)
    optimizer.state[ps[2]][name] = optimizer.state[ps[2]][name] * 0.5


def _other_momentum(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.7)


def _no_decay(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0


def _loaded(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _ascends(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["maximize"] = True


def _interpreted(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["foreach"] = False


def _scaled(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr_scale"] = 0.25


def _taken_out(optimizer: Any, ps: list[nn.Parameter]) -> None:
    del optimizer.param_groups[0]["params"][1]


def _no_gradient(optimizer: Any, ps: list[nn.Parameter]) -> None:
    ps[3].grad = None


def _strided(optimizer: Any, ps: list[nn.Parameter]) -> None:
    ps[2].grad = ps[2].grad.t().contiguous().t()  # type: ignore[union-attr]


def _negated(optimizer: Any, ps: list[nn.Parameter]) -> None:
    ps[0].grad = torch.complex(ps[0].grad, ps[0].grad).conj().imag  # type: ignore[arg-type]


def _in_place(optimizer: Any, ps: list[nn.Parameter]) -> None:
    with torch.no_grad():
        ps[2].mul_(0.5)
        ps[2].grad.mul_(0.5)  # type: ignore[union-attr]
        next(x for x in optimizer.state[ps[2]].values() if x.shape == ps[2].shape).mul_(0.5)


CHANGES: dict[Change, bool] = {  # with whether the step after it goes straight
    _grow: False, _elsewhere: False, _other_state: False, _other_momentum: True, _no_decay: False, _loaded: False,
    _ascends: False, _interpreted: False, _scaled: True, _taken_out: False, _no_gradient: False, _strided: False,
    _negated: False, _in_place: True,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_what_a_user_changes_is_seen(change: Change, straight: list[bool]) -> None:
    made = [parameters() for _ in range(2)]
    a, b = (optim.AdamW(ps, lr=0.1, weight_decay=0.1) for ps in made)
    for t in range(6):
        for ps, optimizer in zip(made, (a, b), strict=True):
            give(ps, t)
            if t == 3:
                change(optimizer, ps)
        a.step()
        if t == 3:
            assert straight == [True, True, CHANGES[change]] or change is _loaded and straight == [True, True]
        kept = list(straight)
        generally(b)
        straight[:] = kept
    for x, y in zip(every(a), every(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("check", ["raise", "skip"])
@pytest.mark.parametrize("rule", ["one", "several"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nothing_moves_where_a_gradient_is_not_finite(bad: float, rule: str, check: Any, straight: list[bool]) -> None:
    ps = parameters()
    groups: Any = ps if rule == "one" else [{"params": ps[:2]}, {"params": ps[2:], "lr": 0.2}]
    optimizer = optim.AdamW(groups, lr=0.1, check_finite=check)
    for t in range(3):
        give(ps, t)
        optimizer.step()
    for i, p in enumerate(ps):
        give(ps, 9)
        before, versions = every(optimizer), [x._version for x in ps]
        p.grad.view(-1)[-1] = bad  # type: ignore[union-attr]
        if check == "raise":
            with pytest.raises(NotFiniteError):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.skipped == i + 1
        assert all(map(torch.equal, before, every(optimizer))) and versions == [x._version for x in ps]
        give(ps, 10 + i)
        optimizer.step()
        give(ps, 20 + i)
        optimizer.step()
    assert straight.count(True) >= len(ps) and straight.count(False) >= len(ps)


def test_hooks_closures_and_graphs_are_as_ever(straight: list[bool]) -> None:
    ps = parameters()
    optimizer = optim.SGD(ps, lr=0.1, momentum=0.9)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for t in range(3):
        give(ps, t)
        assert optimizer.step() is None
    assert straight == [True, True] and seen == ["before", "after"] * 3
    assert optimizer.step(lambda: give(ps, 3) or 7.0) == 7.0 and len(straight) == 2
    loss = (ps[2] ** 2).sum()
    give(ps, 4)
    optimizer.step()
    assert straight == [True] * 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_idle_parameters_stay_idle_until_they_are_not(straight: list[bool]) -> None:
    """One that never has a gradient does not keep the others from going straight, and is stepped once it has one."""
    made = [parameters() for _ in range(2)]
    a, b = (optim.AdamW(ps, lr=0.1) for ps in made)
    for t in range(6):
        for ps, optimizer in zip(made, (a, b), strict=True):
            give(ps, t)
            if t < 4:
                ps[2].grad = None
            if optimizer is a:
                a.step()
            else:
                kept = list(straight)
                generally(b)
                straight[:] = kept
    assert straight[:4] == [True, True, True, False]
    assert all(map(torch.equal, every(a), every(b)))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_run_with_everything_in_it_is_torchs(name: str) -> None:
    """Two groups and a late one, a cycle of the momentum, dtypes side by side, parameters that are no run of memory,
    empty or without a gradient in some steps, gradients that are summed up in place, a state that is loaded."""
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9} if name == "SGD" else {"lr": 0.02}
    made, optimizers, schedulers = [], [], []
    for package in (optim, torch.optim):
        ps = [*parameters(), nn.Parameter(torch.ones(6, 4, dtype=torch.float64).t()), nn.Parameter(torch.ones(0, 3))]
        ps.append(nn.Parameter(torch.ones(9, 8, dtype=torch.float64)[:, ::2]))
        ps.append(nn.Parameter(torch.linspace(-1, 1, 12)))
        groups = [{"params": ps[:3], "weight_decay": 0.0}, {"params": ps[3:], "weight_decay": 0.1}]
        optimizer = getattr(package, name)(groups, **options)
        cycles = name == "SGD"  # a beta that moves has another bias correction in torch
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.04], total_steps=20, cycle_momentum=cycles)
        made, optimizers, schedulers = [*made, ps], [*optimizers, optimizer], [*schedulers, rates]
    for t in range(12):
        for ps, optimizer, rates in zip(made, optimizers, schedulers, strict=True):
            generator = torch.Generator().manual_seed(t)
            optimizer.zero_grad(set_to_none=t % 3 > 0)
            for i, p in enumerate(ps):
                for _ in range(2):
                    g = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
                    if (i + t) % 7:  # else nothing arrives: no gradient, or one of zeros
                        p.grad = g if p.grad is None else p.grad.add_(g)
            optimizer.step()
            if t < 7:
                rates.step()
            if t == 7:  # torch's schedulers know the groups that there were
                ps.append(nn.Parameter(torch.ones(5, 3, dtype=torch.float64)))
                optimizer.add_param_group({"params": ps[-1:], "lr": 0.1, "weight_decay": 0.0})
            if t == 9:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, q in zip(*made, strict=True):
            close = 1e-12 if p.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(p, q, rtol=close, atol=close)
