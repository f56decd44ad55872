"""Sequences that are alike, all but the first spoilt by what is not finite, each in another input, at one token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from axes import dispatch
from axes.core.state_update import StateUpdate
from axes.routes import attention
from axes.routes.choice import Choice
from axes.testing.examples import example

Signal = dict[str, Tensor]
Named = list[tuple[str, float]]


def spoilt(update: StateUpdate, length: int, at: int, width: int, dtype: torch.dtype) -> tuple[Signal, Named]:
    """A signal (B, T, H, ...) on the CPU, of two heads, of which the first is spoilt; and by what, of every one."""
    made = example(update, batch=(1, 2), length=length, d_k=width, d_v=width, dtype=torch.float32)
    signal = {n: x.movedim(2, 1) for n, x in made.items() if isinstance(x, Tensor)}
    named: Named = [("nothing", 0.0), *((n, math.nan) for n in signal), ("k", math.inf), ("v", math.inf)]
    given = {n: x.repeat_interleave(len(named), 0).contiguous() for n, x in signal.items()}
    for i, (n, value) in enumerate(named[1:], 1):
        given[n][i, at, 0].view(-1)[0] = value
    return given | {n: given[n].to(dtype) for n in "qkv"}, named


def chosen(update: StateUpdate, given: Signal, device: str) -> Choice:
    shapes = {n: tuple(x.shape) for n, x in given.items()}
    return dispatch.select(update, device, given["v"].dtype, shapes)


def contained(update: StateUpdate, choice: Choice) -> bool:
    """Whether a token that is not finite reaches no earlier one of its chunk: a kernel makes that again, or zeros stand
    in for it."""
    if choice.route == "attention" and choice.implementation != "triton":
        return attention.asked(update)[0] is None or update.parts().memory.window is not None
    return choice.implementation == "triton"


def check(out: Tensor, at: int, named: Named, reach: int, loose: float) -> None:
    """Nothing of it in other heads, nor in tokens before the last `reach` ahead of it, bit for bit; nor among these, up
    to rounding, for they are another kernel's, if it is `contained`; and it is not swallowed."""
    out = out.float().flatten(3)
    clean = out[0]
    for got, what in zip(out[1:], named[1:], strict=True):
        assert torch.equal(got[:, 1].nan_to_num(7), clean[:, 1].nan_to_num(7)), (what, "another head")
        ahead = at - reach
        assert torch.equal(got[:ahead, 0].nan_to_num(7), clean[:ahead, 0].nan_to_num(7)), (what, "an earlier chunk")
        if loose:
            assert torch.equal(got[:at, 0].isfinite(), clean[:at, 0].isfinite()), (what, "an earlier token")
            largest = float(clean[:at, 0].nan_to_num(0, 0, 0).abs().max())
            if largest < 1e9:  # else a state grows without end, and with it what rounding makes of it
                torch.testing.assert_close(got[:at, 0], clean[:at, 0], rtol=0, atol=loose * largest, equal_nan=True)
        if math.isnan(what[1]):  # a read of the state before a token's gate has it from the next token on
            assert not got[at : at + 2, 0].isfinite().all(), (what, "swallowed")
