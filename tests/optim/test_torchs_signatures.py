"""Rules that torch has take torch's arguments, in its order and with its defaults; what differs stands here."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from axes import optim
from axes.errors import AxesError
from axes.optim.engine.options import Options

SHARED = [cls for cls in optim.ALL if hasattr(torch.optim, cls.__name__)]
# What our rule has another default for, and why its docstring says so.
DELIBERATE = {
    ("NAdam", "momentum_decay"),  # beta1 is constant
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


def test_what_torch_has_and_this_rule_has_not_is_taken_if_it_says_nothing() -> None:
    p = [nn.Parameter(torch.ones(2, 2))]
    for cls in (optim.Adam, optim.AdamW):
        cls(p, amsgrad=False)
        with pytest.raises(AxesError, match="the rule AMSGrad"):
            cls(p, amsgrad=True)
    optim.NAdam(p, momentum_decay=math.inf)
    with pytest.raises(AxesError, match="beta1 is constant here"):
        optim.NAdam(p, momentum_decay=4e-3)
    assert optim.Adam.declare(decoupled_weight_decay=True) == optim.AdamW.declare()
    model = nn.Sequential(nn.Linear(2, 2))
    for given, scale in (("original", "original"), (None, "original"), ("match_rms_adamw", "match_rms_adamw")):
        assert optim.Muon(model, adjust_lr_fn=given).param_groups[0]["scale"] == scale
    with pytest.raises(AxesError, match="adjust_lr_fn"):
        optim.Muon(model, adjust_lr_fn="spectral")  # type: ignore[arg-type]
