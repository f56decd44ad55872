"""What results say, for people: tables on a terminal, and docs/transfer.md.

All of it is a function of transfer.json alone; the HTML page is in `axes.transfer.page`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from axes.transfer import words


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Calibrations, then comparisons with what they cost."""
    table = Table("calibration", "task", "effect", "95 %", "as it must be", title="must come out as known")
    for c in results["calibrations"]:
        table.add_row(c["id"], c["task"], *words.effect(c), words.outcome(c))
    yield table
    head = ("", "task", "arm", "control", "effect", "95 %", "Holm p", "verdict", "FLOPs", "state", "ms")
    table = Table(title="arm less control, positive where the arm is better; costs are arm over control")
    for name in head:
        table.add_column(name, overflow="fold")  # a name that is longer than its column goes on below, and is not cut
    for e in results["experiments"]:
        for c in e["compared"]:
            row = (
                e["id"],
                c["task"],
                words.mean(c, "arm"),
                words.mean(c, "control"),
                *words.effect(c),
                words.holm(c),
                words.verdict(c),
                *words.costs(c),
            )
            table.add_row(*map(escape, row))
    yield table


def markdown(results: Mapping[str, Any]) -> str:
    """docs/transfer.md: a function of a results file, so that it changes only with it."""
    lines = ["# A method of one axis, tried on another", ""]
    lines += ["Rendered from [transfer.json](transfer.json) by `axes.transfer.report.markdown`; do not edit.", ""]
    if results["form"] == "quick":
        lines += [
            "**This is a quick run: small models, few steps, few seeds. It shows that the experiments run, and says "
            "nothing about whether a method helps; so there are no verdicts.** A whole run is "
            "`axes transfer run --device cuda --capture graph --out FOLDER`, one that fits minutes of a GPU has "
            "`--small`; of it `axes transfer report FOLDER --docs FILE` writes this page.", "",
        ]  # fmt: skip
    elif results["verdicts"]:
        lines += [f"**There are {results['verdicts']}.**", ""]
    if results["form"] == "small":
        lines += [
            f"Sizes are small: what is said here is said of {_sizes(results)} that were trained for seconds to minutes "
            "each.", "",
        ]  # fmt: skip
    for name, (text, *more) in words.how(results):
        lines += [f"- {name}:", *(f"  - {_code(t)}" for t in (text, *more))] if more else [f"- {name}: {_code(text)}"]
    lines += ["", words.method(results), ""]
    lines += ["## Calibrations", "", "What is known must come out; else no verdict is printed.", ""]
    lines += _rows(words.CALIBRATION, [words.calibration(c) for c in results["calibrations"]])
    if said := words.summary(results):
        lines += ["## In plain words", "", *(f"- {line}" for line in said), ""]
    if rows := words.published(results):
        lines += ["## What is published, and what was measured", "", words.PUBLISHED, ""]
        lines += _rows(words.CLAIMS, [(_link(e), *texts, *words.effect(c), words.verdict(c)) for e, c, texts in rows])
    lines += ["## Comparisons", "", "Costs are the arm's over the control's.", ""]
    head = ("", "task", "metric", "arm", "control", "effect", "95 %", "p, Holm", "verdict", "FLOPs", "state", "ms")
    lines += _rows(head, [
        (_link(e), c["task"], words.UNIT[c["metric"]], words.mean(c, "arm"), words.mean(c, "control"),
         *words.effect(c), words.holm(c), words.verdict(c), *words.costs(c))
        for e in results["experiments"] for c in e["compared"]
    ])  # fmt: skip
    for e in results["experiments"]:
        lines += [*_section(e, results), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(e: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    """An experiment: its pair of tuples, what moved, what came of it."""
    yield from (f"## {e['id']}: {e['question']}", "", f"From `{e['source']}`, onto the axis {e['axis']}.", "")
    yield from ("| field | arm | control |", "| --- | --- | --- |")
    for field, (arm, control) in words.fields(e):
        mark = "**" if arm != control else ""
        yield f"| {mark}{field}{mark} | {_cell(arm)} | {_cell(control)} |"
    yield ""
    yield from (f"- moved: `{path}`, {_code(c)} → {_code(a)}" for path, c, a in e["moved"])
    yield from (f"- {text}" for text in words.beside(e))
    for c in e["compared"]:
        yield f"- {c['task']}: {words.said(c, results)} {words.counted(c)}."
        for what, values in words.by(c):
            yield f"  - {what}, arm / control: {words.listed(values)}"


def _link(e: Mapping[str, Any]) -> str:
    return f"[{e['id']}](#{_anchor(e)})"


def _anchor(e: Mapping[str, Any]) -> str:
    text = f"{e['id']}: {e['question']}".lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return _code(text.replace("|", "\\|"))


def _sizes(results: Mapping[str, Any]) -> str:
    found = [run["parameters"] for run in results["runs"]]
    return f"models of {min(found):,} to {max(found):,} parameters" if found else "models"


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]
