"""What an optimizer says of its parameters: their rules and why, what is in force, and what it keeps of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from axes.optim.engine import trees
from axes.optim.engine.layouts import words
from axes.optim.engine.options import Group
from axes.optim.engine.router import Router

if TYPE_CHECKING:
    from rich.table import Table

    from axes.optim.engine.base import Optimizer


@final
@dataclass(frozen=True)
class Row:
    """One parameter in a report.

    seen: (*batch, out, in), where its rule is one for matrices; nothing where it is not.
    state_bytes: what the optimizer keeps of it on this process, once it has stepped.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    lr: float | None
    weight_decay: float | None
    state_bytes: int = 0
    seen: tuple[int, ...] = ()


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
            "parameters": [{**asdict(row), "shape": list(row.shape), "seen": list(row.seen)} for row in self.rows],
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


# ---- of an optimizer -------------------------------------------------------------------------------------------------


def describe(
    groups: list[Group],
    router: Router,
    states: Mapping[Tensor, Mapping[str, Tensor]],
    expected: Callable[[Group, Tensor], Mapping[str, Tensor]],
    skipped: int,
) -> Report:
    """Every parameter, in the order of the groups.

    router: why parameters have their rule. expected: the state of one that has none yet.
    """
    rows, notes = [], []
    for i, group in enumerate(groups):
        unnamed = [router.names.get(p, f"group {i}, parameter {j}") for j, p in enumerate(group["params"])]
        names, matrices = group.get("param_names", unnamed), router.routes and group["rule"] == router.rules[0]
        lr, decay = group.get("lr"), group.get("weight_decay")
        for name, parameter in zip(names, group["params"], strict=True):
            state = states.get(parameter) or {}
            steps = bool(parameter.numel()) and parameter.requires_grad  # a state begins where these come true
            held = state or (expected(group, parameter) if steps else {})
            rows.append(
                Row(
                    name,
                    tuple(parameter.shape),
                    group["rule"],
                    _reason(parameter, router) + _sides(group, parameter) + ("" if state or steps else _IDLE),
                    None if lr is None else float(lr) * group["lr_scale"],
                    None if decay is None else float(decay),
                    _bytes_of(held.values()),
                    router.layout(parameter).shape(parameter) if matrices else (),
                )
            )
            if missed := trees.missed(state):
                notes.append(f"{name}: the last good root or basis was kept at {missed} refreshes that gave none")
    if router.assumed:
        notes.append("no model was given: names and shapes say what parameters are; model= says it for certain")
    if skipped:
        notes.append(f"{skipped} steps were skipped: a gradient was not finite")
    return Report(tuple(rows), tuple(notes))


def _reason(parameter: Tensor, router: Router) -> str:
    return router.roles[parameter].reason if router.routes else "the only rule"


def _sides(group: Group, parameter: Tensor) -> str:
    """What a limit on the sides of matrices means for one that is longer."""
    kept = group.get("sides", "both")
    if kept == "both":
        return ""
    long = "columns" if kept == "rows" else "rows"
    return f"; no statistic of its {long}, of which it has more than max_side={group.get('max_side')}"


def report(model: nn.Module, optimizer: Optimizer) -> Report:
    """`optimizer.report()` with the names and the order that the parameters have in the model."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.report()
    order = {parameter: i for i, parameter in enumerate(names)}
    pairs = sorted(zip(parameters, found.rows, strict=True), key=lambda pair: order.get(pair[0], len(order)))
    rows = tuple(dataclasses.replace(row, name=names.get(p, row.name)) for p, row in pairs)
    return dataclasses.replace(found, rows=rows)


def _bytes_of(state: Iterable[Tensor]) -> int:
    """Bytes of the tensors of a state on this process: of a sharded one, its shard."""
    local = (x.to_local() if hasattr(x, "to_local") else x for x in state)
    return sum(x.numel() * x.element_size() for x in local)


# ---- in print --------------------------------------------------------------------------------------------------------

_IDLE = "; frozen or empty, so that it has no state"
_HEADER = ("parameter", "shape", "rule", "reason", "lr", "decay", "state")


def _cells(row: Row) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    if row.seen and (row.seen != row.shape or len(row.seen) > 2):
        shape += f" as {words(row.seen)}"
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
