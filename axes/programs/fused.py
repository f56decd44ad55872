"""A program as Triton kernels over many tensors: every tensor is read once and written once, in one launch.

The kernels are written from the program, one line an operation, and are the same for every list of tensors: pointers
and sizes come in tables. Arithmetic is float32 (float64 for float64 tensors) whatever form the tensors are stored in;
stored forms are read and written in registers (`axes.kernels.common.codes`). The numbers of a step are computed on the
device by a second, tiny kernel, in float64, from numbers on the device: nothing waits for the host, a CUDA graph
replays a step with the learning rate of the day, and a step that a gradient scaler calls off changes nothing.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.errors import AxesError
from axes.kernels.common.layout import on_device
from axes.programs.code import CODE
from axes.programs.lifted import lifted
from axes.programs.program import COUNT, PARAMETER, Operation, Program, Value
from axes.programs.sent import Sent
from axes.programs.storage import FORMS, LOW, QUANTUM, UNIT

# (entries, warps) of a program, measured on an H200: without and with forms of 8 bits
_PLAIN, _CODED = (1024, 4), (512, 2)
_TYPES = {
    torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
    torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
}  # fmt: skip
_HEADER = (
    "import triton",
    "import triton.language as tl",
    "from triton.language.extra import libdevice",
    "from axes.kernels.common import codes",
    "",
    "",
)


def columns(program: Program, forms: Mapping[str, str]) -> list[tuple[str, str]]:
    """(input, suffix) of every stored tensor, in the order of the pointer table."""
    names = [program.names[i] for i, op in enumerate(program.operations) if op.name == "input" and op.shaped]
    return [(n, suffix) for n in names for suffix, _ in FORMS[forms.get(n, "plain")].parts]


def source(
    program: Program,
    types: Mapping[str, torch.dtype],
    forms: Mapping[str, str],
    random: bool = False,
    squares: bool = False,
) -> str:
    """The text of `step`. types: of every stored tensor by name and suffix; forms: of inputs that are not plain.

    random: the parameter is rounded at random, with a stream and the number of steps. squares: every chunk also leaves
    the sum of squares of what it has written to the parameter, a plain one.
    """
    table = columns(program, forms)
    wide = "float64" if torch.float64 in types.values() else "float32"
    flat = not any(suffix == UNIT for _, suffix in table)
    width = len(table) + 1
    lines = [
        *_HEADER,
        "@triton.jit",
        f"def step(pointers, chunks, numbers, found, scale, counts, seed, {'squares, ' if squares else ''}"
        "BLOCK: tl.constexpr, FOUND: tl.constexpr, SCALE: tl.constexpr):",
        "    if FOUND:",
        "        if tl.load(found) != 0:",
        "            return",
        "    chunk = tl.program_id(0).to(tl.int64) * 3",
        f"    row = pointers + tl.load(chunks + chunk) * {width}",
        "    first = tl.multiple_of(tl.load(chunks + chunk + 1), BLOCK)",
        "    end = tl.load(chunks + chunk + 2)",
    ]
    if flat:
        lines += ["    at = first + tl.arange(0, BLOCK)"]
    else:
        lines += [
            f"    inside_block = tl.arange(0, BLOCK // {QUANTUM})",
            f"    at = first + inside_block[:, None] * {QUANTUM} + tl.arange(0, {QUANTUM})[None, :]",
            f"    block = first // {QUANTUM} + inside_block",
            f"    held = block * {QUANTUM} < end",
        ]
    lines += ["    inside = at < end"]
    lines += [f"    {kind}{i} = tl.load(numbers + {place})" for place, (kind, i) in enumerate(read(program))]
    for place, (name, suffix) in enumerate(table):
        kind = _TYPES[types[name + suffix]]
        lines.append(f"    p{place} = tl.multiple_of(tl.load(row + {place}).to(tl.pointer_type(tl.{kind})), 16)")
    if random:
        lines.append(f"    word = codes.words(tl.load(seed), at, tl.load(counts), tl.load(row + {width - 1}))")
    lines.append("    if first + BLOCK <= end:")
    lines += _body(program, table, forms, wide, "", "", random, squares)
    lines.append("    else:")
    lines += _body(program, table, forms, wide, ", mask=inside", ", mask=held", random, squares)
    return "\n".join([*lines, ""])


def numbers_source(program: Program, kept: Mapping[str, torch.dtype]) -> str:
    """The text of `advance`: the numbers of a step that entries need, and the numbers of the state after it.

    inputs: float64, the program's 0-d inputs as `numbers_given` has them, but for the count, which is the first of
    `counts`; kept: numbers of the state, stored in their own dtype with one copy for every parameter.
    """
    inputs = numbers_given(program, kept)
    arguments = "".join(f"to{place}, " for place in range(len(kept)))
    lines = [
        *_HEADER,
        "@triton.jit",
        f"def advance(inputs, numbers, found, counts, total, {arguments}size, FOUND: tl.constexpr, "
        "BLOCK: tl.constexpr):",
        "    if FOUND:",
        "        if tl.load(found) != 0:",
        "            return",
    ]
    names = [program.names[i] for i in inputs]
    for place, (i, name) in enumerate(zip(inputs, names, strict=True)):
        lines.append(f"    n{i} = tl.load({'counts).to(tl.float64' if name == COUNT else f'inputs + {place}'})")
    if COUNT in names:
        lines.append("    tl.debug_barrier()  # it is read before it moves")
    for i, op in enumerate(program.operations):
        if not op.shaped and op.name != "input":
            lines.append(f"    n{i} = {_code(op, 'float64').format(*(_wide(program, x) for x in op.inputs))}")
    for place, (kind, i) in enumerate(read(program)):
        lines.append(f"    tl.store(numbers + {place}, {'1.0 / ' if kind == 'r' else ''}n{i})")
    lines += ["    for first in range(0, total, BLOCK):", "        at = first + tl.arange(0, BLOCK)"]
    lines += ["        tl.store(counts + at, tl.load(counts + at, mask=at < total, other=0) + 1, mask=at < total)"]
    lines += ["    for first in range(0, size, BLOCK):", "        at = first + tl.arange(0, BLOCK)"] if kept else []
    for place, name in enumerate(kept):
        value = _text(program, program.outputs[name])
        kind = _TYPES[kept[name]]
        lines.append(f"        tl.store(to{place} + at, tl.full([BLOCK], {value}, tl.{kind}), mask=at < size)")
    for name, dtype in kept.items():
        value = _text(program, program.outputs[name])
        lines.append(f"    rounded = tl.full([1], {value}, tl.float64).to(tl.{_TYPES[dtype]}).to(tl.float64)")
        lines.append(f"    tl.store(inputs + {names.index(name)} + tl.arange(0, 1), rounded)")
    return "\n".join([*lines, ""])


def numbers_given(program: Program, kept: Collection[str]) -> list[int]:
    """The 0-d inputs of a program: those that are given for every step, then those that the state keeps."""
    inputs = [i for i, op in enumerate(program.operations) if op.name == "input" and not op.shaped]
    return sorted(inputs, key=lambda i: program.names[i] in kept)


def read(program: Program) -> list[tuple[str, int]]:
    """Numbers that entries need: ("n", value of the program), or ("r", value) for its reciprocal."""
    found = set()
    for op in program.operations:
        if op.shaped:
            inputs = [(place, x) for place, x in enumerate(op.inputs) if isinstance(x, int)]
            found |= {(_divides(op.name, place), x) for place, x in inputs if not program.operations[x].shaped}
    for x in program.outputs.values():
        if isinstance(x, int) and not program.operations[x].shaped:
            found.add(("n", x))
    return sorted(found)


def _divides(name: str, place: int) -> str:
    return "r" if name == "div" and place == 1 else "n"


def _code(op: Operation, kind: str) -> str:
    """The text of an operation. kind: float64, whose root has one form; float32; coded, where its last bit is free."""
    code = CODE["sqrt"] if op.name == "pow" and op.inputs[1] == 0.5 else CODE[op.name]
    return code if kind == "float32" else code.replace("tl.sqrt_rn", "tl.sqrt")


def _text(program: Program, x: Value) -> str:
    if isinstance(x, int):
        return f"v{x}" if program.operations[x].shaped else f"n{x}"
    return repr(float(x)) if abs(x) != float("inf") else f"float('{x}')"


def _wide(program: Program, x: Value) -> str:
    """The same for numbers, where a bare constant beside a condition would be float32."""
    return _text(program, x) if isinstance(x, int) else f"tl.full((), {_text(program, x)}, tl.float64)"


def _body(
    program: Program,
    table: list[tuple[str, str]],
    forms: Mapping[str, str],
    wide: str,
    mask: str,
    held: str,
    random: bool,
    squares: bool,
) -> list[str]:
    coded = any(suffix == UNIT for _, suffix in table)
    shape = f"[BLOCK // {QUANTUM}, {QUANTUM}]" if coded else "[BLOCK]"
    other = mask and f"{mask}, other=0"
    place = {name + suffix: i for i, (name, suffix) in enumerate(table)}
    lines = []
    for i, op in enumerate(program.operations):
        if not op.shaped:
            continue
        if op.name == "input":
            lines += _load(i, program.names[i], forms, place, wide, other, held and f"{held}, other=0")
        elif op.name == "div" and isinstance(op.inputs[1], int) and not program.operations[op.inputs[1]].shaped:
            lines.append(f"v{i} = {_text(program, op.inputs[0])} * r{op.inputs[1]}")
        elif op.name == "div" and coded:
            lines.append(f"v{i} = codes.quotient({', '.join(_text(program, x) for x in op.inputs)})")
        else:
            kind = "coded" if coded else wide
            inputs = [_text(program, x) for x in op.inputs]
            if op.name == "where" and not program.shaped(op.inputs[0]):  # a condition among the numbers is 0 or 1
                inputs[0] += " != 0"
            lines.append(f"v{i} = {_code(op, kind).format(*inputs)}")
    # what is squared comes last: warps wait for each other to add
    outputs = sorted(program.outputs.items(), key=lambda output: squares and output[0] == PARAMETER)
    for name, value in outputs:
        if name in place and value != program.inputs[name]:
            x = _text(program, value)
            x = x if program.shaped(value) else f"tl.full({shape}, {x}, tl.{wide})"
            if squares and name == PARAMETER:
                lines += _store_squared(x, f"p{place[name]}", mask, random)
            else:
                lines += _store(x, name, forms, place, mask, held, random)
    return ["        " + line for line in lines]


def _load(
    i: int, name: str, forms: Mapping[str, str], place: Mapping[str, int], wide: str, other: str, held: str
) -> list[str]:
    form = forms.get(name, "plain")
    first = f"tl.load(p{place[name]} + at{other})"
    if form == "plain":
        lines = [f"v{i} = {first}.to(tl.{wide})"]
    elif form.startswith("split"):
        lines = [f"v{i} = codes.join_{form[6:]}({first}, tl.load(p{place[name + LOW]} + at{other}))"]
    else:
        unit = f"tl.load(p{place[name + UNIT]} + block{held})"
        lines = [f"v{i} = codes.decode_{form[:-2]}({first}, {unit})"]
    if name == "g":
        lines += ["if SCALE:", f"    v{i} = v{i} / tl.load(scale)"]
    return lines


def _store(
    x: str, name: str, forms: Mapping[str, str], place: Mapping[str, int], mask: str, held: str, random: bool
) -> list[str]:
    form, p = forms.get(name, "plain"), f"p{place[name]}"
    if form == "plain":
        return [f"tl.store({p} + at, {_rounded(x, name, p, random)}{mask})"]
    if form == "split-16":
        call = f"codes.cut_16({x})"
    elif form == "split-8":
        call = f"codes.cut_8({x}, {'(word & 0xFF).to(tl.int32)' if random else '0x80'})"
    else:
        call = f"codes.encode_{form[:-2]}({x})"
    lines = [f"first_part, second_part = {call}", f"tl.store({p} + at, first_part{mask})"]
    if form.startswith("split"):
        return [*lines, f"tl.store(p{place[name + LOW]} + at, second_part{mask})"]
    return [*lines, f"tl.store(p{place[name + UNIT]} + block, second_part{held})"]


def _rounded(x: str, name: str, p: str, random: bool) -> str:
    """What a plain tensor keeps of x."""
    if random and name == PARAMETER:
        return f"codes.bfloat16_at_random({x}, word)"
    return f"({x}).to({p}.dtype.element_ty)"


def _store_squared(x: str, p: str, mask: str, random: bool) -> list[str]:
    """A plain parameter and the sum of squares of what is kept of it, without what the program makes of padding."""
    return [
        f"kept = {_rounded(x, PARAMETER, p, random)}",
        f"tl.store({p} + at, kept{mask})",
        f"root = {'tl.where(inside, kept.to(tl.float32), 0.0)' if mask else 'kept.to(tl.float32)'}",
        "tl.store(squares + tl.program_id(0), tl.sum(root * root))",
    ]


def compile_text(text: str, kernel: str = "step") -> Any:
    """A kernel of a source text; Triton reads the text again, so it is kept where `inspect` looks."""
    name = f"<axes kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    if name not in _COMPILED:
        from axes.kernels.common.launch import Kernel  # triton is imported by the first kernel

        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": "axes.programs.generated"}
        exec(compile(text, name, "exec"), space)
        _COMPILED[name] = Kernel(space[kernel])
    return _COMPILED[name]


_COMPILED: dict[str, Any] = {}


def _chunks(sizes: Sequence[int], block: int) -> Tensor:
    """(tensor, first entry, end of the tensor) of every chunk."""
    ends = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (ends + block - 1) // block
    index = torch.arange(len(ends), device="cpu").repeat_interleave(counts)
    first = torch.arange(len(index), device="cpu") - (counts.cumsum(0) - counts)[index]
    return torch.stack((index, first * block, ends[index]), 1)


@final
class Fused:
    """Two launches for a list of parameters with their gradients and states."""

    def __init__(
        self,
        program: Program,
        stored: Mapping[str, Sequence[Tensor]],
        forms: Mapping[str, str],
        kept: Mapping[str, Tensor],
        counts: Tensor,
        streams: Sequence[int] | None = None,
        seed: int = 0,
        squares: bool = False,
    ) -> None:
        """A step over contiguous tensors on one device.

        stored: by name and suffix, every input but the gradient, one tensor a parameter, all of a name in one dtype;
        forms: of inputs that are not plain; kept: numbers of the state, one copy a parameter; counts: int64, of data
        seen, one a parameter; streams: of random bits, one a parameter, if the parameter is rounded at random.
        squares: `squares` holds, after a step, the float32 sum of squares of what every chunk of `block` entries has
        written to a plain parameter, tensor by tensor; a last chunk of a tensor may be shorter.
        """
        if squares and forms.get(PARAMETER, "plain") != "plain":
            raise AxesError(f"Fused: sums of squares are those of a plain parameter, not of {forms[PARAMETER]}")
        program, self.constants = lifted(program)
        self.program, self.forms, self.counts = program, dict(forms), counts
        self.random = streams is not None
        self.types = {name: xs[0].dtype for name, xs in stored.items()}
        like = stored[PARAMETER]
        self.device = like[0].device
        self.seed = torch.tensor([seed], dtype=torch.int64, device=self.device)
        self.table = columns(program, forms)
        self.block, self.warps = _CODED if any(suffix == UNIT for _, suffix in self.table) else _PLAIN
        self.chunks = _chunks([x.numel() for x in like], self.block).to(self.device)
        # zeros: a step that is called off writes no sums
        self.squares = torch.zeros(len(self.chunks), dtype=torch.float32, device=self.device) if squares else None
        own = [n + suffix for n, suffix in self.table]
        self.fixed = {n: [x.data_ptr() for x in stored[n]] for n in own if n != "g"}
        self.streams = list(streams or [0] * len(like))
        self.pointers = torch.empty(len(like), len(own) + 1, dtype=torch.int64, device=self.device)
        self.gradients: list[int] = []
        self.captured: list[Tensor] = []  # tables that graphs copy when they are replayed
        self.kernel: Any = None
        inputs = numbers_given(program, kept)
        self.names = [program.names[i] for i in inputs]
        self.kept = dict(kept)
        wide = torch.float64 if torch.float64 in self.types.values() else torch.float32
        self.numbers = torch.zeros(max(1, len(read(program))), dtype=wide, device=self.device)
        self.inputs = torch.zeros(max(1, len(inputs)), dtype=torch.float64, device=self.device)
        self.given = self.inputs[: len(inputs) - len(kept)]
        self.sent: Sent | None = None  # once several numbers move
        self.shown: dict[str, float] = {}  # numbers of the host that `given` has
        for name, x in self.kept.items():
            self.inputs[self.names.index(name)].copy_(x[0])
        self.advance = compile_text(numbers_source(program, {n: x.dtype for n, x in kept.items()}), "advance")

    def step(
        self,
        gradients: Sequence[Tensor],
        rates: Mapping[str, float | Tensor],
        found: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """One step. rates: numbers or 0-d tensors; found: nothing happens if it is not 0; scale: divides gradients."""
        now = [g.data_ptr() for g in gradients]
        pointers = self._point(gradients, now)
        self._give({**self.constants, **rates})
        with on_device(self.pointers):
            self.advance[(1,)](
                self.inputs, self.numbers, self.inputs if found is None else found, self.counts, self.counts.numel(),
                *self.kept.values(), len(gradients), FOUND=found is not None, BLOCK=1024, num_warps=4,
            )  # fmt: skip
            self.kernel[(self.chunks.shape[0],)](
                pointers, self.chunks, self.numbers, self.inputs if found is None else found,
                self.inputs if scale is None else scale, self.counts, self.seed,
                *([] if self.squares is None else [self.squares]), BLOCK=self.block,
                FOUND=found is not None, SCALE=scale is not None, num_warps=self.warps,
            )  # fmt: skip

    def _give(self, numbers: Mapping[str, float | Tensor]) -> None:
        """Put numbers where the device finds them; those that have not changed are there already."""
        named = {n: numbers[n] for n in self.names if n in numbers}
        moved = {n: x for n, x in named.items() if isinstance(x, Tensor) or self.shown.get(n) != x}
        if len(moved) > 1 and not self._capturing and not any(isinstance(x, Tensor) for x in moved.values()):
            self.shown |= {n: float(x) for n, x in moved.items()}
            row = [self.shown.get(n, 0.0) for n in self.names[: len(self.given)]]
            self.sent = self.sent or Sent(self.given)
            self.sent.send(row)
            return
        for name, value in moved.items():
            place = self.inputs[self.names.index(name)]
            if isinstance(value, Tensor):
                place.copy_(value.reshape(()), non_blocking=True)
                self.shown.pop(name, None)
            else:
                place.fill_(value)
                self.shown[name] = value

    @property
    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _point(self, gradients: Sequence[Tensor], now: list[int]) -> Tensor:
        """The table of pointers; a graph gets one of its own, since the next step may have other gradients."""
        types = {**self.types, "g": gradients[0].dtype}
        if self.kernel is None or types != self.types:
            text = source(self.program, types, self.forms, self.random, self.squares is not None)
            self.kernel, self.types = compile_text(text), types
        capturing = self._capturing
        if now == self.gradients and not capturing:
            return self.pointers
        rows = [now if n == "g" else self.fixed[n + suffix] for n, suffix in self.table]
        table = torch.tensor(list(zip(*rows, self.streams, strict=True)), dtype=torch.int64, device="cpu")
        if self.device.type == "cuda":
            table = table.pin_memory()
        if capturing:
            self.captured.append(table)
            return torch.empty_like(self.pointers).copy_(table, non_blocking=True)
        self.pointers.copy_(table, non_blocking=True)
        self.gradients = now
        return self.pointers


__all__ = ["Fused", "columns", "compile_text", "numbers_source", "source"]
