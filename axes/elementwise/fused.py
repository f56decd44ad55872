"""A program as one Triton kernel over many tensors: every tensor is read once and written once, in one launch.

The kernel is written from the program, one line an operation, and is the same for every list of tensors: pointers and
sizes come in tables. Arithmetic is float32 (float64 for float64 tensors) whatever the tensors' dtypes are.
Numbers of a step are computed on the host and passed as arguments, or with `capturable` by a second, tiny kernel from
tensors on the device, so that a CUDA graph replays a step with the learning rate of the day.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.elementwise.program import Program, Value
from axes.kernels.layout import on_device

_BLOCK = 4096  # entries of a program
_WARPS = 8
_TYPES = {
    torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
}  # fmt: skip
_CODE = {
    "mul": "{0} * {1}", "add": "{0} + {1}", "sub": "{0} - {1}", "div": "{0} / {1}", "neg": "-{0}",
    "sqrt": "tl.sqrt_rn({0})", "rsqrt": "1.0 / tl.sqrt_rn({0})", "reciprocal": "1.0 / {0}", "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0.0))",
    "exp": "tl.exp({0})", "log": "tl.log({0})", "log1p": "libdevice.log1p({0})", "expm1": "libdevice.expm1({0})",
    "sinh": "libdevice.sinh({0})", "asinh": "libdevice.asinh({0})", "tanh": "libdevice.tanh({0})",
    "pow": "libdevice.pow({0}, {1})", "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})",
    "clamp": "tl.minimum(tl.maximum({0}, {1}), {2})", "where": "tl.where({0}, {1}, {2})",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "and": "{0} & {1}", "or": "{0} | {1}", "not": "not {0}",
}  # fmt: skip


def source(program: Program, types: Mapping[str, torch.dtype]) -> str:
    """The kernel's text. types: of every shaped input; states and parameter are written in their own."""
    names = [program.names[i] for i, op in enumerate(program.operations) if op.name == "input" and op.shaped]
    wide = "float64" if any(t == torch.float64 for t in types.values()) else "float32"
    numbers = _numbers(program)
    arguments = "".join(f"n{i}, " for i in numbers)
    lines = [
        "import triton",
        "import triton.language as tl",
        "from triton.language.extra import libdevice",
        "",
        "",
        "@triton.jit",
        f"def step(pointers, chunks, numbers, {arguments}BLOCK: tl.constexpr, DEVICE: tl.constexpr):",
        "    chunk = tl.program_id(0).to(tl.int64) * 3",
        f"    row = pointers + tl.load(chunks + chunk) * {len(names)}",
        "    first = tl.load(chunks + chunk + 1)",
        "    end = tl.load(chunks + chunk + 2)",
        "    at = tl.multiple_of(first, BLOCK) + tl.arange(0, BLOCK)",
        "    inside = at < end",
    ]
    if numbers:
        lines.append("    if DEVICE:")
        lines += [f"        n{i} = tl.load(numbers + {place})" for place, i in enumerate(numbers)]
    for place, name in enumerate(names):
        kind = _TYPES[types[name]]
        lines.append(f"    p{place} = tl.multiple_of(tl.load(row + {place}).to(tl.pointer_type(tl.{kind})), 16)")
    whole = _body(program, names, wide, "")
    part = _body(program, names, wide, ", mask=inside")
    lines += ["    if first + BLOCK <= end:", *whole, "    else:", *part, ""]
    return "\n".join(lines)


def _numbers(program: Program) -> list[int]:
    """Numbers that shaped operations read, as values of the program."""
    read = {x for op in program.operations if op.shaped for x in op.inputs if isinstance(x, int)}
    return sorted(i for i in read if not program.operations[i].shaped)


def _body(program: Program, names: list[str], wide: str, mask: str) -> list[str]:
    other = mask and f"{mask}, other=0.0"
    lines, place = [], {name: i for i, name in enumerate(names)}

    def text(x: Value) -> str:
        if isinstance(x, int):
            return f"v{x}" if program.operations[x].shaped else f"n{x}"
        return repr(float(x)) if abs(x) != float("inf") else f"float('{x}')"

    for i, op in enumerate(program.operations):
        if not op.shaped:
            continue
        if op.name == "input":
            lines.append(f"        v{i} = tl.load(p{place[program.names[i]]} + at{other}).to(tl.{wide})")
        elif op.name == "pow" and op.inputs[1] == 0.5:
            lines.append(f"        v{i} = tl.sqrt_rn({text(op.inputs[0])})")
        else:
            lines.append(f"        v{i} = {_CODE[op.name].format(*map(text, op.inputs))}")
    for name, value in program.outputs.items():
        if name in place and value != program.inputs[name]:
            p = f"p{place[name]}"
            shown = text(value) if isinstance(value, int) else f"tl.full([BLOCK], {value}, tl.{wide})"
            lines.append(f"        tl.store({p} + at, ({shown}).to({p}.dtype.element_ty){mask})")
    return lines


def compile_text(text: str) -> Any:
    """The kernel of a source text; Triton reads the text again, so it is kept where `inspect` looks."""
    name = f"<axes kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "axes.elementwise.generated"}
    exec(compile(text, name, "exec"), space)
    return space["step"]


@final
class Fused:
    """One launch for a list of parameters with their gradients and states."""

    def __init__(self, program: Program, names: Sequence[str], tensors: Mapping[str, list[Tensor]]) -> None:
        """tensors: for every name but the gradient's, contiguous, in one order; all of a name in one dtype."""
        self.program, self.names = program, list(names)
        self.types = {n: xs[0].dtype for n, xs in tensors.items()}
        self.kernel: Any = None
        self.read = _numbers(program)
        like = tensors["parameter"]
        self.device = like[0].device
        chunks = [(i, first, x.numel()) for i, x in enumerate(like) for first in range(0, x.numel(), _BLOCK)]
        self.chunks = torch.tensor(chunks, dtype=torch.int64, device=self.device).reshape(-1, 3)
        self.fixed = {n: [x.data_ptr() for x in xs] for n, xs in tensors.items() if n != "g"}
        self.gradients: list[int] = []
        self.pointers = torch.empty(len(like), len(self.names), dtype=torch.int64, device=self.device)

    def step(self, gradients: list[Tensor], values: Sequence[float], numbers: Tensor | None = None) -> None:
        """One step. values: all numbers of the program, or `numbers`: those that `self.read` lists, on the device."""
        now = [g.data_ptr() for g in gradients]
        if now != self.gradients or self.kernel is None:
            self._point(gradients, now)
        arguments = [1.0 if numbers is not None else float(values[i]) for i in self.read]
        held = self.pointers if numbers is None else numbers
        with on_device(gradients[0]):
            self.kernel[(self.chunks.shape[0],)](
                self.pointers, self.chunks, held, *arguments, BLOCK=_BLOCK, DEVICE=numbers is not None, num_warps=_WARPS
            )

    def _point(self, gradients: list[Tensor], now: list[int]) -> None:
        types = {**self.types, "g": gradients[0].dtype}
        if self.kernel is None or types != self.types:
            self.kernel, self.types = compile_text(source(self.program, types)), types
        columns = [now if n == "g" else self.fixed[n] for n in self.names]
        table = torch.tensor(list(zip(*columns, strict=True)), dtype=torch.int64)
        if self.device.type == "cuda":
            table = table.pin_memory()
        self.pointers.copy_(table, non_blocking=True)
        self.gradients = now


__all__ = ["Fused", "compile_text", "source"]
