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
    held: str = "float32"  # the dtype of the state


Advance = Callable[[Signal], Tensor]  # one token's output (B, 1, H, V); the state is kept inside


def measure(
    rules: tuple[str, ...], shapes: tuple[str, ...], dtype: torch.dtype, device: torch.device, folder: Path,
    watch: Watch = unwatched, held: tuple[torch.dtype, ...] = (torch.float32,),
) -> list[DecodeStep]:  # fmt: skip
    """Check every contender over some tokens against float64, then time one token; the file is written after each.

    held: dtypes of our kernel's states; another's is float32.
    """
    found: list[DecodeStep] = []
    on_gpu = [(OURS, kind) for kind in held] + [(INTERPRETER, torch.float32), (FLA, torch.float32)]
    whos = on_gpu if device.type == "cuda" else [(INTERPRETER, kind) for kind in held]
    work = [(r, Shape.parse(s), who, kind) for r in find(rules) for s in shapes for who, kind in whos]
    for index, (rule, shape, who, kind) in enumerate(work):
        if shape.tokens != 1:
            shape = Shape(shape.batch, 1, shape.heads, shape.width)
        watch(f"{rule.name} · {who} · {shape}", index, len(work))
        if who == FLA and (rule.fla is None or importlib.util.find_spec("fla") is None):
            continue
        found.append(_row(rule, shape, dtype, device, who, kind))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, [asdict(s) for s in found])
    watch("done", len(work), len(work))
    return found


@torch.no_grad()
def _row(
    rule: SequenceRule, shape: Shape, dtype: torch.dtype, device: torch.device, who: str, held: torch.dtype
) -> DecodeStep:
    name, kept = (str(x).removeprefix("torch.") for x in (dtype, held))
    row = DecodeStep(rule.name, str(shape), name, who, held=kept)
    try:
        error = _error(rule, shape, dtype, device, who, held)
        if not error <= BOUNDS[min(dtype, held, key=lambda x: torch.finfo(x).bits)]:
            return replace(row, error=error, refused=f"off by {error:.1e}")
        signal = rule.given(rule.signal(shape, dtype, device))
        advance = _advance(rule, who, signal, held)
        timing = median(lambda: (advance(signal),), device)
    except Exception as failure:
        return replace(row, refused=said(failure))
    state = 2 * held.itemsize * shape.batch * shape.heads * shape.width * (rule.key_width or shape.width)
    return replace(row, graph=timing.graph, eager=timing.eager, error=error, megabytes=state / 1e6)


def _error(
    rule: SequenceRule, shape: Shape, dtype: torch.dtype, device: torch.device, who: str, held: torch.dtype
) -> float:
    """Relative error of some tokens' outputs, two heads of the last sequence."""
    tokens = Shape(shape.batch, _CHECKED, shape.heads, shape.width)
    signal = rule.given(rule.signal(tokens, dtype, device, seed=1))
    advance = _advance(rule, who, _token(signal, 0), held)
    got = torch.cat([advance(_token(signal, t)) for t in range(_CHECKED)], 1)[-1:, :, -_HEADS:]
    exact = {n: x[-1:, :, -_HEADS:].double() for n, x in signal.items()}
    want, _ = reference.run(rule.update, exact, time=1, weights=rule.weights(exact))
    return float((got.double() - want).norm() / want.norm())


def _advance(rule: SequenceRule, who: str, first: Signal, kind: torch.dtype) -> Advance:
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
    held = [rule.update.init(wide, rule.weights(first)).to(kind)]

    def ours(signal: Signal) -> Tensor:
        name: dispatch.Implementation = "reference" if who == INTERPRETER else "triton"
        out, held[0] = dispatch.step(rule.update, signal, held[0], implementation=name, in_place=True)
        return out

    return ours


def _token(signal: Signal, t: int) -> Signal:
    return {n: x[:, t : t + 1].contiguous() for n, x in signal.items()}
