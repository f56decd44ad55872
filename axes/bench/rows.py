"""The table of docs/rows.md from docs/rows.json: a system's tuple, its oracle and error, routes, times and a curve.

`python -m axes.bench.rows` writes the page's tables anew; `curves` adds a short training run of every row to the data,
`times FILE...` what `axes bench sequence` measured on a GPU, a table for every kind of GPU. A test compares the page
with its data.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from axes import catalogue
from axes.bench import sequence
from axes.bench.peers import FLA, OURS
from axes.errors import AxesError
from axes.files import write_json, write_text
from axes.routes import dispatch

BEGIN, END = "<!-- rows: begin, written by python -m axes.bench.rows -->", "<!-- rows: end -->"
# small enough that all rows train in minutes on one thread of a CPU
SIZES: dict[str, Any] = {
    "layers": 1, "width": 32, "heads": 2, "context": 64, "batch": 8, "steps": 60, "warmup": 5, "seed": 0, "threads": 1,
    "validation_windows": 8, "eval_every": 60, "save_every": 60, "device": "cpu", "optimizer": "adamw",
    "depth": "residual", "lr": 1e-2,
}  # fmt: skip
SHOWN = (1, 10, 20, 40, 60)


def train(name: str) -> list[float]:
    """Bits per byte of every step of a row's run: the package's own text, AdamW, the same windows for all."""
    from axes.tasks.configuration import Configuration
    from axes.tasks.language_modelling import run, start
    from axes.tasks.run_folder import RunFolder

    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(Path(path) / "run")
        run(start(Configuration(sequence=name, **SIZES), folder), folder)
        return [round(r["bits_per_byte"], 3) for r in folder.read_metrics() if "bits_per_byte" in r]


def tables(data: dict[str, Any]) -> str:
    """The block of the page between the markers."""
    out = [BEGIN, "", *_rows(data["rows"], data["curves"]), ""]
    for times in data["times"]:
        out += [*_times(times), ""]
    return "\n".join([*out, END])


def _rows(rows: Iterable[dict[str, Any]], curves: dict[str, list[float]]) -> list[str]:
    head = ("row", "tuple", "oracle in `test_`", "outputs", "gradients", "route", "µs a token", "interpreter")
    out = [_line((*head, "bits per byte")), _line(["---"] * (len(head) + 1))]
    for row in rows:
        update = catalogue.get(row["name"], axis="sequence").cls.update
        curve = curves.get(row["name"], [])
        shown = " ".join(f"{curve[n - 1]:.2f}" for n in SHOWN if n <= len(curve))
        said = f"`{update!r}`".replace("|", "\\|")
        cells = (f"`{row['name']}`", said, row["oracle"], row["outputs"], row["gradients"])
        route = dispatch.select(update).route if row["name"] not in RECURRENT else "recurrent"
        out.append(_line((*cells, route, row["us"], row["interpreter"], shown)))
    return out


RECURRENT = ("gru", "slstm", "m2rnn")  # their block has a cell, of which the tuple does not know


def _times(times: dict[str, Any]) -> list[str]:
    found, where = sequence.rows(times), f"On an {times['where']['device']} (torch {times['where']['torch']})"
    out = [
        f"{where}, ms forward / with backward, of `axes bench sequence`:",
        "",
        _line(("rule", "B,T,H,D", "ours", "floor", "fla", "ours / fla", "relative error")),
        _line(["---"] * 7),
    ]
    for row in (r for r in found if r.who == OURS):
        peer = next((r for r in found if r.who == FLA and r.key[:3] == row.key[:3]), None)
        ratio = " / ".join(_over(row, peer, of) for of in ("forward", "both"))
        floor = _pair(row.forward_floor, row.both_floor)
        theirs = "" if peer is None else _pair(peer.forward, peer.both) if peer.forward else peer.refused[:40]
        error = "" if row.error is None else f"{row.error:.1e} {row.worst}"
        out.append(_line((row.rule, row.shape, _pair(row.forward, row.both), floor, theirs, ratio, error)))
    return out


def _over(row: sequence.Row, peer: sequence.Row | None, of: str) -> str:
    mine, theirs = getattr(row, of), getattr(peer, of, None)
    return f"{mine / theirs:.2f}" if mine and theirs else ""


def _pair(forward: float | None, both: float | None) -> str:
    return " / ".join("" if x is None else f"{x:.2f}" for x in (forward, both))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def with_times(before: list[dict[str, Any]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs on every kind of GPU, one each: what was measured again replaces its row."""
    own = next((run for run in before if run["where"] == found["where"]), {**found, "rows": []})
    rows = {row.key: asdict(row) for run in (own, found) for row in sequence.rows(run)}
    return [*(run for run in before if run is not own), {**found, "rows": list(rows.values())}]


def with_tables(text: str, data: dict[str, Any]) -> str:
    """The page with its tables renewed. Raises AxesError if the markers are gone."""
    if BEGIN not in text or END not in text:
        raise AxesError("docs/rows.md: the markers of its tables are missing; put them back around the tables")
    before, rest = text.split(BEGIN, 1)
    return before + tables(data) + rest.split(END, 1)[1]


def main(root: Path, arguments: list[str]) -> None:
    """Add to the data what is asked for and write the page."""
    place, page = root / "docs" / "rows.json", root / "docs" / "rows.md"
    data = json.loads(place.read_text(encoding="utf-8"))
    if arguments[:1] == ["curves"]:
        for row in data["rows"]:
            if row["name"] not in data["curves"]:
                data["curves"][row["name"]] = train(row["name"])
                write_json(place, data)
    if arguments[:1] == ["times"]:
        for file in arguments[1:]:
            data["times"] = with_times(data["times"], json.loads(Path(file).read_text(encoding="utf-8")))
        write_json(place, data)
    write_text(page, with_tables(page.read_text(encoding="utf-8"), data))


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent.parent, sys.argv[1:])
