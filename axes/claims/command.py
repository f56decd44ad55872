"""`axes verify`: run the checks, show what they measured, write the reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from axes.claims.base import Claim, Result
from axes.claims.register import ALL, find
from axes.claims.report import as_json, counts_table, markdown, page, summary, write_atomically
from axes.claims.verify import verify, verify_one
from axes.errors import AxesError


def run(
    names: Sequence[str],
    console: Console,
    seeds: int | None = None,
    workers: int = 2,
    json_file: Path | None = None,
    html_file: Path | None = None,
    docs: Path | None = None,
) -> bool:
    """Verify claims and report; False if a verdict no longer holds.

    Raises AxesError for unknown names, impossible numbers or files that cannot be written.
    """
    claims = find(names)
    if seeds is not None and seeds < 1:
        raise AxesError(f"--seeds must be at least 1, got {seeds}")
    if docs is not None and len(claims) != len(ALL):
        raise AxesError("--docs renders the whole register: give no groups or ids with it")
    for target in (json_file, html_file, docs):
        if target is not None and not target.parent.is_dir():
            raise AxesError(f"cannot write {target}: the folder {target.parent} does not exist")
    results = _with_progress(claims, console, seeds, workers)
    console.print(_table(results))
    if len(claims) > 1:
        console.print(_counts(results))
    if json_file is not None:
        write_atomically(json_file, as_json(results))
    if docs is not None:
        write_atomically(docs, markdown(results))
    if html_file is not None:
        write_atomically(html_file, page(results))
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
        table.add_row(r.claim.id, r.claim.statement, str(r.claim.verdict), measured, bound, mark)
    return table


def _counts(results: Sequence[Result]) -> Table:
    head, *rows = counts_table(results)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    return table


def explanation(name: str) -> str:
    """Derivation, conditions, sources and fresh numbers of one claim, as text."""
    (claim,) = find([name])
    lines = [f"{claim.id}  {claim.statement}", f"verdict      {claim.verdict}"]
    for title, text in (
        ("conditions", claim.conditions),
        ("instead", claim.correction),
        ("why", claim.derivation),
        ("untestable", claim.reason),
        ("source", str(claim.source)),
        ("through", claim.instance),
    ):
        if text:
            lines.append(f"{title:<12} {text}")
    result = verify_one(claim)
    for f in result.findings:
        lines.append(f"{'holds' if f.ok else 'FAILS':<12} {f}")
    if result.error:
        lines.append(result.error)
    return "\n".join(lines)


def is_claim(name: str) -> bool:
    """Whether a name has the form of a claim's id, as A01."""
    return len(name) == 3 and name[0].upper() in "ABCDEFGHIJK" and name[1:].isdigit()
