"""`axes bench decode`: one more token, the state kept: our fused step, the interpreter, flash-linear-attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from axes.bench.check import BOUNDS
from axes.bench.peers import FLA, OURS, library
from axes.bench.results import Watch, said, unwatched
from axes.bench.rules import SequenceRule, Shape, Signal, find
from axes.bench.timing import median
from axes.core import reference
from axes.files import write_json
from axes.routes import dispatch

INTERPRETER = "interpreter"
FILE = "decode.json"
_CHECKED = 20  # tokens
_HEADS = 2


@final
@dataclass(frozen=True)
class DecodeStep:
    """One contender at one rule and shape. Milliseconds of one token; floor by the state's bytes, read and written."""

    rule: str
    shape: str
    dtype: str
    who: str
    graph: float | None = None
    eager: float | None = None
    error: float | None = None
    refused: str = ""
    megabytes: float | None = None


Advance = Callable[[Signal], Tensor]  # one token's output (B, 1, H, V); the state is kept inside


def measure(
    rules: tuple[str, ...], shapes: tuple[str, ...], dtype: torch.dtype, device: torch.device, folder: Path,
    watch: Watch = unwatched,
) -> list[DecodeStep]:  # fmt: skip
    """Check every contender over some tokens against float64, then time one token; the file is written after each."""
    found: list[DecodeStep] = []
    whos = (OURS, INTERPRETER, FLA) if device.type == "cuda" else (INTERPRETER,)
    work = [(r, Shape.parse(s), who) for r in find(rules) for s in shapes for who in whos]
    for index, (rule, shape, who) in enumerate(work):
        if shape.tokens != 1:
            shape = Shape(shape.batch, 1, shape.heads, shape.width)
        watch(f"{rule.name} · {who} · {shape}", index, len(work))
        if who == FLA and (rule.fla is None or importlib.util.find_spec("fla") is None):
            continue
        found.append(_row(rule, shape, dtype, device, who))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, [asdict(s) for s in found])
    watch("done", len(work), len(work))
    return found


@torch.no_grad()
def _row(rule: SequenceRule, shape: Shape, dtype: torch.dtype, device: torch.device, who: str) -> DecodeStep:
    name = str(dtype).removeprefix("torch.")
    row = DecodeStep(rule.name, str(shape), name, who)
    try:
        error = _error(rule, shape, dtype, device, who)
        if not error <= BOUNDS[dtype]:
            return replace(row, error=error, refused=f"off by {error:.1e} > {BOUNDS[dtype]:.1e}")
        signal = rule.given(rule.signal(shape, dtype, device))
        advance = _advance(rule, who, signal)
        timing = median(lambda: (advance(signal),), device)
    except Exception as failure:
        return replace(row, refused=said(failure))
    state = 2 * 4 * shape.batch * shape.heads * shape.width * (rule.key_width or shape.width)
    return replace(row, graph=timing.graph, eager=timing.eager, error=error, megabytes=state / 1e6)


def _error(rule: SequenceRule, shape: Shape, dtype: torch.dtype, device: torch.device, who: str) -> float:
    """Relative error of some tokens' outputs, two heads of the last sequence."""
    tokens = Shape(shape.batch, _CHECKED, shape.heads, shape.width)
    signal = rule.given(rule.signal(tokens, dtype, device, seed=1))
    advance = _advance(rule, who, _token(signal, 0))
    got = torch.cat([advance(_token(signal, t)) for t in range(_CHECKED)], 1)[-1:, :, -_HEADS:]
    exact = {n: x[-1:, :, -_HEADS:].double() for n, x in signal.items()}
    want, _ = reference.run(rule.update, exact, time=1)
    return float((got.double() - want).norm() / want.norm())


def _advance(rule: SequenceRule, who: str, first: Signal) -> Advance:
    held: list[Any]
    if who == FLA:
        call, module = rule.fla, library()
        assert call is not None
        held = [None]

        def peer(signal: Signal) -> Tensor:
            o = {"scale": 1.0, "output_final_state": True, "initial_state": held[0]}
            out, held[0] = call(module, "fused_recurrent", signal, **o)
            return out

        return peer
    wide = {n: x[:, 0].float() for n, x in first.items()}
    held = [rule.update.init(wide)]

    def ours(signal: Signal) -> Tensor:
        name: dispatch.Implementation = "reference" if who == INTERPRETER else "triton"
        out, held[0] = dispatch.step(rule.update, signal, held[0], implementation=name, in_place=True)
        return out

    return ours


def _token(signal: Signal, t: int) -> Signal:
    return {n: x[:, t : t + 1].contiguous() for n, x in signal.items()}
