"""A function of a row of numbers, and its derivatives, as text for kernels: traced once, whatever its operations are.

u = f(x, inputs) for every token: x and u have an entry for every value, an input has one too (a row) or is one number.
Sums over a row are operations like others. Derivatives are what autograd does with f, traced likewise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from axes.programs.code import CODE

Kind = Literal["row", "number"]
Function = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
SLOTS, LONGEST = 8, 400  # inputs that the kernels have arguments for; operations of a program that is still compiled
_TOKENS = 7, 11  # tokens of a trace: a number that is not the width
_NAMES = {
    "rsub": "sub", "sgn": "sign", "square": "square", "logical_and": "and", "bitwise_and": "and", "logical_or": "or",
    "bitwise_or": "or", "logical_not": "not", "bitwise_not": "not", "clamp_min": "maximum", "clamp_max": "minimum",
    "sigmoid": "sigmoid",
}  # fmt: skip
_MORE = {"square": "{0} * {0}", "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))", "not": "({0}) == 0", "erf": "tl.erf({0})"}
_SAME = frozenset((
    "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "clone", "alias", "detach", "_to_copy", "lift_fresh_copy",
    "reshape", "select", "select_backward", "copy", "as_strided",
))  # fmt: skip
_FILLS = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0, "zeros": 0.0, "ones": 1.0}
_REDUCTIONS = {"sum": "tl.sum", "mean": "tl.sum", "amax": "tl.max", "amin": "tl.min"}


class NoProgram(Exception):
    """A function is no straight-line program over rows; says why."""


@final
class Operation(NamedTuple):
    """A line: the text with its operands' places, and what it makes."""

    text: str
    inputs: tuple[Any, ...]  # int: the value of a line; float
    kind: Kind


@final
class Rows(NamedTuple):
    """Lines whose first ones are the inputs. outputs: values; None where a derivative is zero."""

    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Any, ...]

    @property
    def mixes(self) -> bool:
        """Whether entries of a row meet."""
        return any(op.text.startswith("reduce") for op in self.operations)

    def is_row(self, output: int) -> bool:
        """Whether an output is made by a line that makes a row."""
        place = self.outputs[output]
        return isinstance(place, int) and place >= len(self.inputs) and (
            self.operations[place - len(self.inputs)].kind == "row"
        )

    def text(self, wide: bool) -> tuple[list[str], list[str]]:
        """Lines of code, and the text of every output. wide: of tiles (tokens, entries), where a number is (tokens, 1);
        otherwise of one token."""
        lines, names = [], list(self.inputs)
        for op in self.operations:
            given = [names[x] if isinstance(x, int) else _constant(x) for x in op.inputs]
            code = op.text.format(*given)
            if op.text.startswith("reduce"):
                _, how, of = code.split(" ", 2)
                empty = {"tl.sum": "0.0", "tl.max": "float('-inf')", "tl.min": "float('inf')"}[how]
                code = f"{how}(tl.where(inside, {of}, {empty}), {1 if wide else 0})" + ("[:, None]" if wide else "")
            names.append(f"t{len(names)}")
            lines.append(f"{names[-1]} = {code}")
        return lines, ["0.0" if x is None else names[x] if isinstance(x, int) else _constant(x) for x in self.outputs]


def traced(function: Function, inputs: Mapping[str, Kind], width: int, derivatives: bool) -> Rows:
    """The program of u = function(x, k2, inputs), with names x, k2 and those of inputs; with derivatives of

    x, k2, g and inputs to (u, d x, d k2, d inputs) of <u, g>. Raises NoProgram.
    """
    from torch._decomp import get_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    tokens = _TOKENS[width == _TOKENS[0]]
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=drawn, dtype=torch.float32, device="cpu") + 0.5

    given = [draw(tokens, width) if kind == "row" else draw(tokens) for kind in inputs.values()]
    start = [draw(tokens, width), draw(tokens, 1), *([draw(tokens, width)] if derivatives else []), *given]
    names = ["x", "k2", *(["g"] if derivatives else []), *(f"i{n}" for n in range(len(inputs)))]

    def forward(x: Tensor, k2: Tensor, *rest: Tensor) -> Any:
        return function(x, k2, dict(zip(inputs, rest, strict=True)))

    def both(x: Tensor, k2: Tensor, g: Tensor, *rest: Tensor) -> Any:
        live = [y.detach().requires_grad_() for y in (x, k2, *rest)]
        u = forward(*live)
        return u.detach(), *torch.autograd.grad(u, live, g, allow_unused=True)

    aten = torch.ops.aten
    table = get_decompositions([
        aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data,
        aten.threshold_backward, aten.sigmoid_backward, aten.tanh_backward, aten.linalg_vector_norm, aten.var_mean,
        aten.var, aten.masked_fill, aten.addcmul, aten.addcdiv, aten.lerp, aten.logsumexp, aten.relu, aten.where,
        aten.silu_backward, aten.softplus, aten.softplus_backward, aten.gelu, aten.gelu_backward, aten.logaddexp,
    ])  # fmt: skip
    try:
        with torch.autocast("cpu", enabled=False), torch.set_grad_enabled(derivatives):
            graph = make_fx(both if derivatives else forward, decomposition_table=table)(*start)  # type: ignore[arg-type]
    except NoProgram:
        raise
    except Exception as reason:  # whatever stops a trace: values that are looked at, transforms of their own
        raise NoProgram(f"its trace stops: {type(reason).__name__}: {str(reason).splitlines()[0][:120]}") from reason
    graph.graph.eliminate_dead_code()
    kinds: list[Kind] = ["row", "number", *(["row"] if derivatives else []), *inputs.values()]  # type: ignore[list-item]
    wanted: list[Kind] = ["row", "row", "number", *inputs.values()] if derivatives else ["row"]
    return _Reader(graph, names, kinds, tokens, width).read(wanted)


class _Reader:
    """Reads a graph of torch's operations."""

    def __init__(self, graph: Any, names: Sequence[str], kinds: Sequence[Kind], tokens: int, width: int) -> None:
        self.graph, self.names, self.tokens, self.width = graph, tuple(names), tokens, width
        self.kinds: list[Kind] = list(kinds)
        self.operations: list[Operation] = []
        self.known: dict[Any, Any] = {}  # of a node of the graph its value: a line or a number

    def add(self, text: str, inputs: Sequence[Any], kind: Kind) -> int:
        self.operations.append(Operation(text, tuple(inputs), kind))
        self.kinds.append(kind)
        if len(self.operations) > LONGEST:
            raise NoProgram(f"it has more than {LONGEST} operations")
        return len(self.kinds) - 1

    def kind(self, *values: Any) -> Kind:
        return "row" if any(isinstance(x, int) and self.kinds[x] == "row" for x in values) else "number"

    def read(self, wanted: Sequence[Kind]) -> Rows:
        places = iter(range(len(self.names)))
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.known[node] = next(places)
            elif node.op == "get_attr":
                held = getattr(self.graph, node.target)
                if not isinstance(held, Tensor) or held.numel() != 1:
                    raise NoProgram("it reads a tensor of its own")
                self.known[node] = float(held)
            elif node.op == "call_function":
                self.known[node] = self.value(node)
            else:
                (found,) = node.args
        found = found if isinstance(found, list | tuple) else (found,)
        outputs = tuple(
            None if x is None else self.shaped(self.known[x], kind) for x, kind in zip(found, wanted, strict=True)
        )
        return Rows(self.names, tuple(self.operations), outputs)

    def shaped(self, value: Any, kind: Kind) -> Any:
        """A value as a number of the token where that is asked for: rows of one entry are both."""
        if kind == "number" and self.kind(value) == "row":
            return self.add("reduce tl.sum {0}", (value,), "number")
        return value

    def value(self, node: Any) -> Any:
        if node.target is operator.getitem:
            raise NoProgram("an operation has several results")
        name = node.target.__name__.split(".")[0]
        args = [self.known[x] if isinstance(x, torch.fx.Node) else x for x in node.args]
        if name in _SAME:
            return self.same(name, node, args[0])
        if name in _FILLS:
            return _FILLS[name]
        if name in ("full", "full_like", "new_full"):
            return float(node.args[2 if name == "new_full" else 1])
        if name == "scalar_tensor":
            return float(node.args[0])
        if name in _REDUCTIONS:
            return self.reduced(name, node, args[0])
        return self.entrywise(name, node, args)

    def same(self, name: str, node: Any, value: Any) -> Any:
        shape, made = node.args[0].meta["val"].shape, node.meta["val"].shape
        entries = self.kind(value) == "row" and self.width > 1
        if entries and (made.count(self.width) != shape.count(self.width) or made.numel() != shape.numel()):
            raise NoProgram(f"{name} moves entries")
        return value

    def reduced(self, name: str, node: Any, value: Any) -> Any:
        seen = node.args[0].meta["val"].shape
        dims = node.args[1] if len(node.args) > 1 else None
        if not dims:
            raise NoProgram(f"{name} is over all tokens")
        sizes = [seen[d] for d in ([dims] if isinstance(dims, int) else dims)]
        if self.tokens in sizes or any(n not in (1, self.width) for n in sizes):
            raise NoProgram(f"{name} mixes tokens")
        if self.width not in sizes or self.width == 1:
            return value
        if self.kind(value) == "number":  # repeated entries
            return self.add("{0} * {1}", (value, float(self.width)), "number") if name == "sum" else value
        made = self.add(f"reduce {_REDUCTIONS[name]} {{0}}", (value,), "number")
        return self.add("{0} * {1}", (made, 1.0 / self.width), "number") if name == "mean" else made

    def entrywise(self, name: str, node: Any, args: list[Any]) -> Any:
        if name == "rsub":
            args[0], args[1] = args[1], args[0]
        alpha = node.kwargs.get("alpha", 1)
        args = [float(x) if isinstance(x, int) and not isinstance(a, torch.fx.Node) else x
                for x, a in zip(args, node.args, strict=True)]  # fmt: skip
        if alpha != 1:
            args[1] = self.add("{0} * {1}", (args[1], float(alpha)), self.kind(args[1]))
        if name == "clamp":
            low, high = (*args[1:], None, None)[:2]
            value = args[0]
            for bound, text in ((low, "tl.maximum({0}, {1})"), (high, "tl.minimum({0}, {1})")):
                value = value if bound is None else self.add(text, (value, bound), self.kind(value, bound))
            return value
        name = _NAMES.get(name, name)
        if name == "pow" and isinstance(args[1], float) and args[1] in (2.0, 3.0, 0.5, -0.5, -1.0, 1.0):
            return self.add(_POWERS[args[1]], args[:1], self.kind(args[0]))
        text = _MORE.get(name, CODE.get(name, ""))
        if not text:
            raise NoProgram(f"{name} is not an operation on entries or sums of a row")
        if not all(isinstance(x, int | float) for x in args):
            raise NoProgram(f"{name} takes something else than numbers and entries")
        if all(isinstance(x, float) for x in args):
            return _folded(name, args)
        if name in _NEUTRAL and args[1] == _NEUTRAL[name] and isinstance(args[1], float):
            return args[0]
        if name in ("add", "mul") and args[0] == _NEUTRAL[name] and isinstance(args[0], float):
            return args[1]
        return self.add(text, args, self.kind(*args))


_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}
_POWERS = {
    2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "tl.sqrt({0})", -0.5: "1.0 / tl.sqrt({0})", -1.0: "1.0 / {0}",
    1.0: "{0}",
}  # fmt: skip


def _folded(name: str, args: Sequence[float]) -> float:
    from axes.programs.arithmetic import evaluated

    return evaluated(name, args)


def _constant(x: float) -> str:
    return repr(float(x)) if math.isfinite(x) else f"float('{x}')"


# ---- the text of a response ------------------------------------------------------------------------------------------


@final
class Source(NamedTuple):
    """Text of a response. inputs: those that it reads, in order; mixes: whether entries of a row meet."""

    text: str
    inputs: tuple[str, ...]
    mixes: bool


def source(function: Function, inputs: Mapping[str, Kind], width: int) -> Source:
    """The functions that the kernels of substitution call; `axes.kernels.substitution.response` shows them.

    function is also called without inputs that it turned out not to read. Raises NoProgram.
    """
    every = traced(function, inputs, width, True)
    read = {x for op in every.operations for x in op.inputs} | set(every.outputs[:2])
    inputs = {name: kind for place, (name, kind) in enumerate(inputs.items()) if 3 + place in read}
    if not 0 < len(inputs) <= SLOTS:
        raise NoProgram(f"it has {len(inputs)} inputs, and kernels take up to {SLOTS}")
    one, all_ = traced(function, inputs, width, False), traced(function, inputs, width, True)
    kinds = list(inputs.values())
    slots = ", ".join(f"i{n}" for n in range(SLOTS))
    pointers, grads = (", ".join(f"{c}{n}" for n in range(SLOTS)) for c in "pd")
    lines = ["@triton.jit", f"def inputs({pointers}, at, v, V, there, inside):", "    return ("]
    for n, kind in enumerate(kinds):
        where, mask = ("at * V + v", "inside & there") if kind == "row" else ("at", "there")
        lines.append(f"        tl.load(p{n} + {where}, mask={mask}, other=0.0).to(tl.float32),")
    lines += ["    )", "", "@triton.jit", f"def respond(x, k2, {slots}, inside):"]
    body, (u,) = one.text(False)
    lines += [*(f"    {line}" for line in body), f"    return {u}", ""]
    alone = _needed(all_, (1,))
    body, (dx,) = alone.text(False)
    lines += ["@triton.jit", f"def turned(x, k2, g, {slots}, inside):", *(f"    {line}" for line in body)]
    lines += [f"    return {dx if alone.is_row(0) else f'x * 0.0 + {dx}'}", "", "@triton.jit"]
    lines += [f"def pull(x, k2, g, {pointers}, {grads}, at, v, V: tl.constexpr, there, inside):"]
    for n, kind in enumerate(kinds):
        where, mask, end = "at", "there", "[:, None]"
        if kind == "row":
            where, mask, end = "at[:, None] * V + v[None, :]", "inside & there[:, None]", ""
        lines.append(f"    i{n} = tl.load(p{n} + {where}, mask={mask}, other=0.0).to(tl.float32){end}")
    body, (u, dx, dk2, *rest) = all_.text(True)
    lines += [f"    {line}" for line in body]
    for n, (kind, grad) in enumerate(zip(kinds, rest, strict=True)):
        if kind == "row":
            to, mask = f"d{n} + at[:, None] * V + v[None, :]", "inside & there[:, None]"
            grad = grad if all_.is_row(3 + n) else f"x * 0.0 + {grad}"
        else:
            to, mask, grad = f"d{n} + at[:, None]", "there[:, None]", f"k2 * 0.0 + {grad}"
        lines.append(f"    tl.store({to}, ({grad}).to(d{n}.dtype.element_ty), mask={mask})")
    u, dx = (y if all_.is_row(n) else f"x * 0.0 + {y}" for n, y in enumerate((u, dx)))
    lines += [f"    return {u}, {dx}, k2 * 0.0 + {dk2}", ""]
    return Source("\n".join(lines), tuple(inputs), one.mixes)


def _needed(rows: Rows, outputs: Sequence[int]) -> Rows:
    """Only some outputs and what they are made of."""
    first = len(rows.inputs)
    chosen = [rows.outputs[n] for n in outputs]
    used = {x for x in chosen if isinstance(x, int)}
    for place in reversed(range(len(rows.operations))):
        if first + place in used:
            used.update(x for x in rows.operations[place].inputs if isinstance(x, int))
    moved: dict[int, int] = {n: n for n in range(first)}
    kept: list[Operation] = []
    for place, op in enumerate(rows.operations):
        if first + place in used:
            moved[first + place] = first + len(kept)
            kept.append(op._replace(inputs=tuple(moved[x] if isinstance(x, int) else x for x in op.inputs)))
    return Rows(rows.inputs, tuple(kept), tuple(moved[x] if isinstance(x, int) else x for x in chosen))


__all__ = ["NoProgram", "Rows", "Source", "source", "traced"]
