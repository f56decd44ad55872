"""Rules that torch has take torch's arguments, in its order and with its defaults; what differs stands here."""

from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from axes import optim
from axes.errors import AxesError
from axes.optim.engine.options import Options

SHARED = [cls for cls in optim.ALL if hasattr(torch.optim, cls.__name__)]
# What our rule has another default for, and why its docstring says so.
DELIBERATE = {
    ("Muon", "adjust_lr_fn"),  # one lr is that of AdamW beside it
}


def arguments(cls: Any) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(cls.__init__).parameters.items())[2:])  # but self and params


def test_rules_of_torch_are_found() -> None:
    assert {"SGD", "Adam", "AdamW", "NAdam", "Muon"} <= {cls.__name__ for cls in SHARED}


@pytest.mark.parametrize("cls", SHARED, ids=lambda cls: cls.__name__)
def test_defaults_are_torchs(cls: Any) -> None:
    own = arguments(cls)
    for name, theirs in arguments(getattr(torch.optim, cls.__name__)).items():
        if name in Options.__annotations__:
            continue
        assert name in own, f"{cls.__name__} does not take torch's {name}"
        default = cls.default_lr if name == "lr" else own[name].default
        if (cls.__name__, name) in DELIBERATE:
            assert default != theirs.default and name in cls.__doc__
        else:
            assert default == theirs.default, name


@pytest.mark.parametrize("cls", SHARED, ids=lambda cls: cls.__name__)
def test_positions_are_torchs(cls: Any) -> None:
    """As far as torch takes arguments by position and names are the same."""
    theirs = [n for n, p in arguments(getattr(torch.optim, cls.__name__)).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    own = [n for n, p in arguments(cls).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    same = [n for n in theirs if n in own]
    assert own[: len(same)] == same and theirs[: len(same)] == same


def test_a_plain_call_is_torchs_rule() -> None:
    """Nothing but parameters is given: the same steps."""
    for name in ("SGD", "Adam", "AdamW"):
        p, q = (nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)) for _ in range(2))
        ours, theirs = getattr(optim, name)([p]), getattr(torch.optim, name)([q])
        for t in range(5):
            p.grad = q.grad = torch.tensor([1.0, -2.0, 0.1 * t], dtype=torch.float64)
            ours.step()
            theirs.step()
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


def test_words_of_torch_mean_the_same() -> None:
    p = [nn.Parameter(torch.ones(2, 2))]
    assert optim.AMSGrad.declare() == optim.Adam.declare(amsgrad=True) == optim.Adam(p, amsgrad=True).update
    assert optim.Adam.declare(decoupled_weight_decay=True) == optim.AdamW.declare()
    model = nn.Sequential(nn.Linear(2, 2))
    for given, scale in (("original", "original"), (None, "original"), ("match_rms_adamw", "match_rms_adamw")):
        assert optim.Muon(model, adjust_lr_fn=given).param_groups[0]["scale"] == scale
    with pytest.raises(AxesError, match="adjust_lr_fn"):
        optim.Muon(model, adjust_lr_fn="spectral")  # type: ignore[arg-type]


# ---- values that are numbers -----------------------------------------------------------------------------------------

TENTH: dict[str, Any] = {
    "numpy": numpy.float32(0.125),
    "numpy in double": numpy.float64(0.125),
    "fraction": Fraction(1, 8),
    "tensor": torch.tensor(0.125),
}


def walked(optimizer: Any, p: nn.Parameter, lr: Any = None) -> torch.Tensor:
    for t in range(4):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr
        p.grad = torch.linspace(-1, 1, p.numel()).reshape(p.shape) + t
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("value", TENTH.values(), ids=TENTH)
@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW, optim.Muon], ids=lambda cls: cls.__name__)
def test_any_real_number_is_a_rate(cls: Any, value: Any, foreach: bool) -> None:
    """Given at the construction, and by a scheduler later."""

    def run(given: Any, later: Any) -> torch.Tensor:
        p = nn.Parameter(torch.ones(3, 4))
        groups: Any = [{"params": [p], **({"rule": "muon"} if cls is optim.Muon else {})}]
        options: dict[str, Any] = {"precision": "input"} if cls is optim.Muon else {}
        return walked(cls(groups, lr=given, weight_decay=given, foreach=foreach, **options), p, later)

    expected = run(0.125, None)
    torch.testing.assert_close(run(value, None), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(run(0.125, value), expected, rtol=0, atol=1e-6)


def test_any_real_number_is_a_hyperparameter() -> None:
    p = [nn.Parameter(torch.ones(2))]
    betas = (numpy.float64(0.5), Fraction(3, 4))
    group = optim.Adam(p, betas=betas, eps=numpy.float32(0.125)).param_groups[0]  # type: ignore[arg-type]
    assert group["betas"] == (0.5, 0.75) and group["eps"] == 0.125
    assert [type(x) for x in (*group["betas"], group["eps"])] == [float] * 3
    assert type(optim.Muon(nn.Linear(2, 2), ns_steps=numpy.int64(3)).param_groups[0]["ns_steps"]) is int
    for value in ("fast", 1j, None, [0.1]):
        with pytest.raises((AxesError, TypeError), match="weight_decay must be a "):
            optim.AdamW(p, weight_decay=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW], ids=lambda cls: cls.__name__)
def test_fused_on_a_cpu_is_the_batched_form(cls: Any) -> None:
    """As torch takes it there; bit for bit what foreach runs."""
    p, q = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    fused, batched = cls([p], lr=0.1, fused=True), cls([q], lr=0.1)
    assert torch.equal(walked(fused, p), walked(batched, q))
    assert [str(plan.choice) for plan in fused.plans()] == [str(plan.choice) for plan in batched.plans()]
    fused.add_param_group({"params": [nn.Parameter(torch.ones(2))], "fused": True})
    assert not any(group["fused"] for group in fused.param_groups)
    with pytest.raises(AxesError, match="on CUDA devices or all on the CPU"):
        cls([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))], fused=True)
