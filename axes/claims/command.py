"""`axes verify`: run the checks, show what they measured, write the reports."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from axes.claims.base import Claim, Result
from axes.claims.register import find
from axes.claims.report import as_json, counts_table, facts, markdown, page, summary
from axes.claims.verify import verify, verify_one
from axes.errors import AxesError
from axes.files import write_text

_MOST_SEEDS = 100_000  # hours of a claim


def run(
    names: Sequence[str],
    console: Console,
    seeds: int | None = None,
    workers: int = 2,
    json_file: Path | None = None,
    html_file: Path | None = None,
) -> bool:
    """Verify claims and report; False if a verdict no longer holds.

    Raises AxesError for unknown names, impossible numbers or files that cannot be written, before any check runs.
    """
    claims = find(names)
    if seeds is not None and not 1 <= seeds <= _MOST_SEEDS:
        raise AxesError(f"--seeds must be from 1 to {_MOST_SEEDS:,}, got {seeds}")
    for target in (json_file, html_file):
        _refuse_impossible(target)
    results = _with_progress(claims, console, seeds, workers)
    console.print(_table(results))
    if len(claims) > 1:
        console.print(_counts(claims))
    if json_file is not None:
        write_text(json_file, as_json(results))
    if html_file is not None:
        write_text(html_file, page(results))
    failing = [r for r in results if not r.ok]
    for r in failing:
        console.print(f"[red]{r.claim.id} does not hold its verdict ({r.claim.verdict})[/red]")
        for f in r.findings:
            console.print(f"   {'ok ' if f.ok else 'NOT'} {f}", markup=False)
        if r.error:
            console.print(r.error, markup=False)
    checked = sum(r.claim.check is not None for r in results)
    console.print(f"{checked - len(failing)} of {checked} testable claims hold their verdict")
    return not failing


def write_docs(target: Path) -> None:
    """Render the register as Markdown; no check runs, since no number of a run is in it."""
    _refuse_impossible(target)
    write_text(target, markdown(find()))


def _refuse_impossible(target: Path | None) -> None:
    if target is None:
        return
    if not target.parent.is_dir():
        raise AxesError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise AxesError(f"cannot write {target}: it is a folder")


def _with_progress(claims: Sequence[Claim], console: Console, seeds: int | None, workers: int) -> list[Result]:
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(claims))
        return verify(claims, seeds, workers, lambda _: bar.advance(task))


def _table(results: Sequence[Result]) -> Table:
    table = Table("id", "statement", "verdict", "measured", "tolerance", "")
    for r in results:
        measured, bound = summary(r.worst)
        mark = "–" if r.claim.check is None else "[green]holds[/green]" if r.ok else "[red]fails[/red]"
        table.add_row(r.claim.id, escape(r.claim.statement), str(r.claim.verdict), measured, bound, mark)
    return table


def _counts(claims: Sequence[Claim]) -> Table:
    head, *rows = counts_table(claims)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    return table


def explanation(name: str) -> str:
    """Derivation, conditions, sources and fresh numbers of one claim, as text."""
    (claim,) = find([name])
    result = verify_one(claim)
    rows = [(claim.id, claim.statement), ("verdict", str(claim.verdict)), *facts(claim)]
    rows += [("holds" if f.ok else "FAILS", str(f)) for f in result.findings]
    lines = [
        textwrap.fill(text, 100, initial_indent=f"{title:<{_TITLE}}", subsequent_indent=" " * _TITLE)
        for title, text in rows
    ]
    return "\n".join([*lines, result.error]).rstrip()


_TITLE = 17  # columns before the text
