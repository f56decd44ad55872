"""Which parameters are matrices to an optimizer, and the report that says so.

A matrix rule (Muon, Shampoo, natural gradient) is for hidden matrices: maps from activations to activations. A
parameter is routed to the auxiliary rule when

- it has fewer than two dimensions, or one row or column (norms, biases, gains);
- it belongs to an `nn.Embedding`, or is tied to one;
- its own name or its module's (indices left out) ends in `head`, `embed`, `embedding` or `embeddings`, `wte` or `wpe`;
- it is the weight of a grouped convolution, whose filters do not share inputs;
- with a model at hand: it belongs to a module that is not a linear map of torch.nn (linear, convolution, attention,
  recurrent). From names alone every other parameter with two or more dimensions counts as a matrix.

Parameters with more than two dimensions are matrices (first dimension, all others).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

if TYPE_CHECKING:
    from rich.table import Table

Roles = dict[Tensor, "Role"]

_EMBEDDING = re.compile(r"(embed|embedding|embeddings|wte|wpe)$")
_HEAD = re.compile(r"head$")
_LINEAR = (nn.Linear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


class Role(NamedTuple):
    """What a parameter is: whether a matrix rule applies, and why."""

    matrix: bool
    reason: str


def canonical_shape(parameter: Tensor) -> tuple[int, int]:
    """The matrix that a parameter is: (1, 1), (1, n), (m, n) or (m, all others); complex numbers are pairs."""
    shape = tuple(parameter.shape) + ((2,) if parameter.is_complex() else ())
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def roles(module: nn.Module, linear_only: bool = False) -> Roles:
    """The role of every parameter of a module; one that plays several roles is a matrix only if it is one in all.

    linear_only: accept the weights of nn.Linear alone (rules that read layer inputs).
    """
    found: Roles = {}
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(path, recurse=False):
            role = _role(name, parameter, owner, linear_only)
            if parameter not in found or not role.matrix:
                found[parameter] = role
    return found


def named_role(name: str, parameter: Tensor) -> Role:
    """The role of a parameter of which only name and shape are known."""
    return _role(name, parameter, None, False)


def _role(name: str, parameter: Tensor, owner: nn.Module | None, linear_only: bool) -> Role:
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return Role(False, "embedding")
    if parameter.ndim < 2:
        return Role(False, "scalar" if parameter.ndim == 0 else "vector")
    if min(canonical_shape(parameter)) == 1:
        return Role(False, "one row or column")
    words = [word for word in name.lower().split(".") if not word.isdigit()]
    for word in words[-2:]:
        if _EMBEDDING.search(word):
            return Role(False, f"embedding by name ({word})")
        if _HEAD.search(word):
            return Role(False, f"output head by name ({word})")
    if owner is None:
        return Role(True, "matrix")
    if not isinstance(owner, _LINEAR):
        return Role(False, f"of {type(owner).__name__}, which is not a linear map of torch.nn")
    if isinstance(owner, _ConvNd) and owner.groups > 1:
        return Role(False, "grouped convolution")
    if linear_only and not (isinstance(owner, nn.Linear) and parameter is owner.weight):
        return Role(False, f"of {type(owner).__name__}: inputs are collected from nn.Linear only")
    return Role(True, f"hidden matrix of {type(owner).__name__}")


@final
@dataclass(frozen=True)
class Row:
    """One parameter in a report. state_bytes: what the optimizer keeps of it on this process, once it has stepped."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    lr: float | None
    weight_decay: float | None
    state_bytes: int = 0


@final
@dataclass(frozen=True)
class Total:
    """All parameters of one rule."""

    rule: str
    parameters: int
    numbers: int
    state_bytes: int

    @property
    def bytes_per_number(self) -> float:
        """State bytes a number of a parameter: 8 for AdamW in float32."""
        return self.state_bytes / self.numbers if self.numbers else 0.0


@final
@dataclass(frozen=True)
class Report:
    """Every parameter with its rule, why it has it, the step size and decay in force, and its state; a table in print.

    notes: what else the optimizer has to say, a sentence each.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[Total, ...]:
        """One line a rule, in order of appearance."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.rule, []).append(row)
        return tuple(
            Total(rule, len(rows), sum(math.prod(r.shape) for r in rows), sum(r.state_bytes for r in rows))
            for rule, rows in found.items()
        )

    @property
    def state_bytes(self) -> int:
        """Of all parameters."""
        return sum(row.state_bytes for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For programs and JSON."""
        return {
            "parameters": [{**asdict(row), "shape": list(row.shape)} for row in self.rows],
            "rules": [{**asdict(total), "bytes_per_number": total.bytes_per_number} for total in self.totals],
            "state_bytes": self.state_bytes,
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """For a terminal."""
        from rich.table import Table

        table = Table()
        for name in _HEADER:
            table.add_column(name, justify="right" if name in ("lr", "decay", "state") else "left")
        for row in self.rows:
            table.add_row(*_cells(row))
        table.add_section()
        for total in self.totals:
            table.add_row(*_total_cells(total))
        if self.notes:
            table.caption = "\n".join(self.notes)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        lines = [_HEADER, *map(_cells, self.rows), *map(_total_cells, self.totals)]
        return "\n".join([_aligned(lines), *self.notes])


_HEADER = ("parameter", "shape", "rule", "reason", "lr", "decay", "state")


def bytes_of(state: Iterable[Tensor]) -> int:
    """Bytes of the tensors of a state on this process: of a sharded one, its shard."""
    local = (x.to_local() if hasattr(x, "to_local") else x for x in state)
    return sum(x.numel() * x.element_size() for x in local)


def _cells(row: Row) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    state = _size(row.state_bytes)
    return row.name, shape, row.rule, row.reason, _number(row.lr), _number(row.weight_decay), state


def _total_cells(total: Total) -> tuple[str, ...]:
    each = f"{total.bytes_per_number:.3g} bytes of state a number"
    return f"{total.parameters} in all", f"{total.numbers:,}", total.rule, each, "", "", _size(total.state_bytes)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def _aligned(lines: Iterable[tuple[str, ...]]) -> str:
    lines = list(lines)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
