"""Programs that torch has as one operation for CPUs: Adam and AdamW, in one pass over memory.

What a program computes is recognised, not what its tuple is called: every rule whose program is Adam's steps this way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from axes.elementwise.program import Program, Value

PARAMETER = "parameter"
_FOREVER = 1e30  # steps after which torch's own correction for few steps is 1: the program has its numbers for that

# Patterns: (operation, operands), sums and products in any order; "@x" an input with entries, the same one wherever it
# stands; "#x" a number; "=x" before a pattern keeps the value that matches.
_DRIVES: tuple[tuple[Any, bool, bool], ...] = (  # the drive; whether it is -g; whether the parameter is added to it
    (("neg", "@g"), True, False),
    (("neg", ("neg", "@g")), False, False),
    (("sub", ("neg", "@g"), ("mul", "#decay", "@p")), True, True),
    (("sub", ("neg", ("neg", "@g")), ("mul", "#decay", "@p")), False, True),
)


def _adam(drive: Any) -> Any:
    """p + rate (m / correction) / ((sqrt(v) + eps) / root), p times a number or not."""
    m = ("=m", ("add", ("mul", "@m", "#beta1"), ("mul", drive, "#weight1")))
    v = ("=v", ("add", ("mul", "@v", "#beta2"), ("mul", ("mul", drive, drive), "#weight2")))
    return ("mul", "#rate", ("div", ("div", m, "#correction"), ("div", ("add", ("pow", v, 0.5), "#eps"), "#root")))


@final
@dataclass(frozen=True)
class Adam:
    """torch's operation in the place of a program. places: of p, g, m, v among its tensors; numbers: by name."""

    places: tuple[int, int, int, int]
    numbers: Mapping[str, Value]
    negative: bool
    coupled: bool

    def run(self, lists: Sequence[list[Tensor]], values: Sequence[float | Tensor]) -> bool:
        """Step over lists of tensors, as `Schedule.run` does; False where that is for others, and nothing was done."""
        if torch.compiler.is_compiling() or not all(x.is_cpu and x.is_contiguous() for some in lists for x in some):
            return False
        known = {n: values[x] if isinstance(x, int) else x for n, x in self.numbers.items()}
        if any(isinstance(x, Tensor) for x in known.values()):
            return False
        n: dict[str, float] = known  # type: ignore[assignment]
        if not all(math.isclose(n[f"beta{i}"] + n[f"weight{i}"], 1.0, rel_tol=1e-12) for i in (1, 2)):
            return False
        rate = n["rate"] * n["root"] / n["correction"]
        if not self.coupled and rate == 0.0:
            return False
        # torch takes the step away, and m here is the average of -g or of what is maximised
        decay = -n["decay"] if self.coupled else (n["keep"] - 1.0) / rate
        step = torch._fused_adam_ if self.coupled else torch._fused_adamw_
        p, g, m, v = (lists[place] for place in self.places)
        step(
            p, g, m, v, [], [torch.tensor(_FOREVER)] * len(p), lr=-rate, beta1=n["beta1"], beta2=n["beta2"],
            weight_decay=decay, eps=n["eps"], amsgrad=False, maximize=self.negative,
        )  # fmt: skip
        return True


def recognised(program: Program) -> Adam | None:
    """The operation that computes a program, or None."""
    names = [program.names[i] for i, op in enumerate(program.operations) if op.name == "input" and op.shaped]
    if PARAMETER not in program.outputs or len(names) != 4:
        return None
    for drive, negative, coupled in _DRIVES:
        step = _adam(drive)
        for pattern in (("add", "@p", step), ("add", ("mul", "@p", "#keep"), step)):
            found: dict[str, Value] = {}
            if not _matches(program, program.outputs[PARAMETER], pattern, found):
                continue
            by_letter = [program.names.get(_index(found[f"@{x}"]), "") for x in "pgmv"]
            states = {n: x for n, x in program.outputs.items() if n in names and n != PARAMETER}
            moved = dict(zip(by_letter[2:], (found["=m"], found["=v"]), strict=True))
            if sorted(by_letter) != sorted(names) or by_letter[0] != PARAMETER or states != moved:
                return None
            places = tuple(names.index(n) for n in by_letter)
            numbers = {"keep": 1.0, **{n[1:]: x for n, x in found.items() if n[0] == "#"}}
            assert len(places) == 4
            return Adam(places, numbers, negative, coupled)
    return None


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


__all__ = ["Adam", "recognised"]
