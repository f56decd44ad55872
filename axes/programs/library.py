"""Programs that torch has as one operation for CPUs, in one pass over memory: SGD, with momentum or not, Adam, AdamW.

What a program computes is recognised, not what its tuple is called: every rule whose program is Adam's steps this way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from axes.programs.program import PARAMETER, Program, Value

# steps after which torch's own correction for few steps is 1: the program has its numbers for that
_FOREVER = torch.tensor(1e30, dtype=torch.float32, device="cpu")

# Patterns: (operation, operands), sums and products in any order; "@x" an input with entries, the same one wherever it
# stands; "#x" a number; "=x" before a pattern keeps the value that matches.
_DRIVES: tuple[tuple[Any, bool, bool], ...] = (  # the drive; whether it is -g; whether the parameter is added to it
    (("neg", "@g"), True, False),
    (("neg", ("neg", "@g")), False, False),
    (("sub", ("neg", "@g"), ("mul", "#decay", "@p")), True, True),
    (("sub", ("neg", ("neg", "@g")), ("mul", "#decay", "@p")), False, True),
)


def _adam_step(drive: Any) -> Any:
    """rate (m / correction) / ((sqrt(v) + eps) / root)."""
    m = ("=m", ("add", ("mul", "@m", "#beta1"), ("mul", drive, "#weight1")))
    v = ("=v", ("add", ("mul", "@v", "#beta2"), ("mul", ("mul", drive, drive), "#weight2")))
    return ("mul", "#rate", ("div", ("div", m, "#correction"), ("div", ("add", ("pow", v, 0.5), "#eps"), "#root")))


def _heavy_ball_step(drive: Any) -> Any:
    """rate m."""
    return ("mul", "#rate", ("=m", ("add", ("mul", "@m", "#momentum"), drive)))


def _plain_step(drive: Any) -> Any:
    """rate u."""
    return ("mul", "#rate", drive)


_STEPS = (("pgmv", _adam_step), ("pgm", _heavy_ball_step), ("pg", _plain_step))  # with the tensors of each


@final
@dataclass(frozen=True)
class LibraryStep:
    """torch's operation in the place of a program. places: of p, g, m, v among its tensors; numbers: by name.

    negative: the drive is -g. coupled: the decay is part of it.
    """

    places: tuple[int, ...]
    numbers: Mapping[str, Value]
    negative: bool
    coupled: bool

    def run(self, lists: Sequence[list[Tensor]], values: Sequence[float | Tensor]) -> bool:
        """Step over lists of tensors, as `Schedule.run` does; False where that is for others, and nothing was done."""
        if torch.compiler.is_compiling():
            return False
        known = {n: values[x] if isinstance(x, int) else x for n, x in self.numbers.items()}
        if any(isinstance(x, Tensor) for x in known.values()):
            return False
        n: dict[str, float] = known  # type: ignore[assignment]
        tensors = [lists[place] for place in self.places]
        # torch takes the step away, and m here is the average, or the sum, of -g or of what is maximised
        return self._adam(n, *tensors) if len(tensors) == 4 else self._sgd(n, *tensors)

    def _adam(self, n: dict[str, float], p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> bool:
        if not all(math.isclose(n[f"beta{i}"] + n[f"weight{i}"], 1.0, rel_tol=1e-12) for i in (1, 2)):
            return False
        rate = n["rate"] * n["root"] / n["correction"]
        if not self.coupled and rate == 0.0:
            return False
        decay = -n["decay"] if self.coupled else (n["keep"] - 1.0) / rate
        step = torch._fused_adam_ if self.coupled else torch._fused_adamw_
        step(
            p, g, m, v, [], [_FOREVER] * len(p), lr=-rate, beta1=n["beta1"], beta2=n["beta2"],
            weight_decay=decay, eps=n["eps"], amsgrad=False, maximize=self.negative,
        )  # fmt: skip
        return True

    def _sgd(self, n: dict[str, float], p: list[Tensor], g: list[Tensor], *m: list[Tensor]) -> bool:
        if m and n["momentum"] == 0.0:
            return False
        # a drive of -g is torch's gradient with another sign: damped by 2 it is subtracted from m. maximize=True, which
        # does so too, takes a fifth longer
        decay, sign = n.get("decay", 0.0), 1.0 if self.negative else -1.0
        rate = sign * n["rate"] if not m else -n["rate"]
        torch._fused_sgd_(
            p, g, m[0] if m else [], weight_decay=sign * decay, momentum=n.get("momentum", 0.0), lr=rate,
            dampening=2.0 if m and self.negative else 0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        return True


def recognised(program: Program) -> LibraryStep | None:
    """The operation that computes a program, or None."""
    if PARAMETER not in program.outputs:
        return None
    for drive, negative, coupled in _DRIVES:
        for letters, made in _STEPS:
            step, adam = made(drive), letters == "pgmv"
            patterns = [("add", "@p", step), *([("add", ("mul", "@p", "#keep"), step)] if adam and not coupled else [])]
            for pattern in patterns:
                found: dict[str, Value] = {}
                if _matches(program, program.outputs[PARAMETER], pattern, found):
                    places = _places(program, found, letters)
                    numbers = {"keep": 1.0, **{n[1:]: x for n, x in found.items() if n[0] == "#"}}
                    return None if places is None else LibraryStep(places, numbers, negative, coupled)
    return None


def _places(program: Program, found: Mapping[str, Value], letters: str) -> tuple[int, ...] | None:
    """Where the tensors of a match stand among those of the program, if it has no others and moves these alone."""
    names = [program.names[i] for i, op in enumerate(program.operations) if op.name == "input" and op.shaped]
    named = [program.names[_index(found[f"@{x}"])] for x in letters]
    states = {n: x for n, x in program.outputs.items() if n in names and n != PARAMETER}
    moved = dict(zip(named[2:], (found[f"={x}"] for x in letters[2:]), strict=True))
    if sorted(named) != sorted(names) or named[0] != PARAMETER or states != moved:
        return None
    return tuple(names.index(n) for n in named)


def _index(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _matches(program: Program, value: Value, pattern: Any, found: dict[str, Value]) -> bool:
    """Whether a value is what a pattern says; what its names stand for is added to `found`."""
    if isinstance(pattern, float):
        return value == pattern and isinstance(value, float)
    if isinstance(pattern, str):
        entries = program.shaped(value)
        fits = entries and value in program.names if pattern[0] == "@" else not entries
        return fits and found.setdefault(pattern, value) == value
    name, *operands = pattern
    if name[0] == "=":
        return _matches(program, value, operands[0], found) and found.setdefault(name, value) == value
    if not isinstance(value, int):
        return False
    op = program.operations[value]
    if op.name != name:
        return False
    orders = [operands, operands[::-1]] if name in ("add", "mul") else [operands]
    for order in orders:
        trial = dict(found)
        if all(_matches(program, x, p, trial) for x, p in zip(op.inputs, order, strict=True)):
            found.update(trial)
            return True
    return False


__all__ = ["LibraryStep", "recognised"]
