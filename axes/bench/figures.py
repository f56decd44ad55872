"""Results as people read them, whatever was compared: a table on the terminal or in a page, and bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Lines = Iterable[tuple[bool, Sequence[str]]]  # whether a group begins; cells
_WIDE = 10_000  # columns, on which any table has room


def machine(where: Mapping[str, Any]) -> str:
    """What was measured on, of a results file."""
    device, threads = where["device"], where.get("threads")
    of = [f"{threads} thread{'s' * (threads != 1)}"] if threads and "NVIDIA" not in device else []
    return " · ".join((device, *of, f"torch {where['torch']}"))


def table(title: str, header: Sequence[str], words: Sequence[str], lines: Lines) -> Table:
    """words: the columns that stand at the left. Columns without a cell are left out."""
    header, lines = _filled(header, lines)
    out = Table(title=title)
    for name in header:
        out.add_column(name, justify="left" if name in words else "right")
    for first, cells in lines:
        if first and out.row_count:
            out.add_section()
        out.add_row(*cells)
    return out


def show(table: Table, console: Console) -> None:
    """A table; where the console has no room for its columns a paragraph for each of its lines, so that no figure is
    cut."""
    wide = console.options.update(width=_WIDE)
    if Measurement.get(console, wide, table).maximum <= console.width:
        console.print(table)
        return
    console.print(Text(str(table.title)))
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        named = [f"{column.header} {cell}" for column, cell in zip(table.columns, cells, strict=True) if cell]
        console.print(Padding(Text(" · ".join(named)), (1, 0, 0, 2)))
    if table.caption:
        console.print(Text(str(table.caption)))


def markdown(title: str, header: Sequence[str], words: Sequence[str], lines: Lines) -> str:
    """The same for a page."""
    header, lines = _filled(header, lines)
    out = [title, "", "| " + " | ".join(header) + " |"]
    out.append("| " + " | ".join("---" if name in words else "---:" for name in header) + " |")
    out += ["| " + " | ".join(cells) + " |" for _, cells in lines]
    return "\n".join(out) + "\n"


def _filled(header: Sequence[str], lines: Lines) -> tuple[list[str], list[tuple[bool, list[str]]]]:
    every = list(lines)
    kept = [i for i in range(len(header)) if not every or any(cells[i] for _, cells in every)]
    return [header[i] for i in kept], [(first, [cells[i] for i in kept]) for first, cells in every]


@final
@dataclass(frozen=True)
class Bar:
    """Milliseconds of a contender; floor: where the black line stands."""

    who: str
    value: float
    floor: float | None = None
    note: str = ""


def bars(groups: Iterable[tuple[str, Sequence[Bar]]], path: Path, says: str, logarithmic: bool = True) -> None:
    """One bar a contender, a group for whatever they compute; a colour for each name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(groups)
    names = sorted({bar.who for _, members in groups for bar in members})
    lines = sum(len(members) for _, members in groups)
    figure = Figure(figsize=(9.0, 1.5 + 0.3 * lines + 0.2 * len(groups)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    at, ticks, labels = 0.0, [], []
    for label, members in groups:
        ticks.append(at + (len(members) - 1) / 2)
        labels.append(label)
        for bar in members:
            plot.barh(at, bar.value, color=f"C{names.index(bar.who) % 10}", height=0.8)
            plot.text(bar.value, at, f" {bar.who}{bar.note} {bar.value:.3g}", va="center", fontsize=7)
            if bar.floor is not None:
                plot.plot([bar.floor] * 2, [at - 0.4, at + 0.4], color="black", linewidth=1.2)
            at += 1.0
        at += 0.6
    plot.set_yticks(ticks, labels, fontsize=8)
    plot.invert_yaxis()
    if logarithmic and lines:
        plot.set_xscale("log")
    plot.margins(x=0.25 if logarithmic else 0.15, y=0.01)
    if not logarithmic:
        plot.set_xlim(left=0)
    plot.set_xlabel(says)
    plot.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
