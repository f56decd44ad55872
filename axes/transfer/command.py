"""`axes transfer`: the experiments as pairs of tuples, their runs, and what these say."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from axes import catalogue
from axes.errors import AxesError, UnknownName
from axes.files import write_text
from axes.moves import Axis, pair
from axes.tasks.capacity import curve
from axes.transfer import experiments, named, own, page, pictures, report, words
from axes.transfer.folder import ResultsFolder, put_together
from axes.transfer.plan import QUICK, Plan, planned
from axes.transfer.results import compile_folder
from axes.transfer.running import RunsFailed
from axes.transfer.running import run as run_plan
from axes.transfer.trials import trial

app = typer.Typer(name="transfer", help="A method known on one axis, tried on another.", no_args_is_help=True)
_INTERRUPTED = 130


@app.command(name="list")
def list_(
    names: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="As S1; all if none.")] = None,
) -> None:
    """Every experiment: what is asked, and the tuples of control and arm as one, what moved marked."""
    table = Table("id", "on", Column("question", max_width=36), "from", "control -> arm", show_lines=True)
    for e in named.find(tuple(names or ())) if names else (*experiments.EXPERIMENTS, *named.NAMED):
        around = [f"* {d}" for d in e.moved if d.path.startswith("block.")]
        said = "\n".join([pair(e.control, e.arm), *around])
        table.add_row(e.id, e.axis, e.question, e.source, escape(said))
    _console(160).print(table)


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="As S1; all if none.")] = None,
    seeds: Annotated[int | None, typer.Option(help="That are compared: 6, with --quick 3.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go, and go on. Default: runs/transfer[-quick].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Small sizes: {', '.join(QUICK)} in minutes on 2 CPUs, without verdicts.")
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="Sizes of which a part fits minutes of one GPU; with verdicts.")
    ] = False,
    limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Give up then what is not done; the same command goes on.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes: the CPUs, at most 8; on a GPU 4 share it.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Only these tasks, in the place of an experiment's own.")
    ] = None,
    update: Annotated[
        str | None, typer.Option(metavar="MODULE:TUPLE", help="A tuple of your own, as mine:UPDATE of ./mine.py.")
    ] = None,
    axis: Annotated[str, typer.Option(help="Of --update: data, sequence or depth.")] = "sequence",
    against: Annotated[str | None, typer.Option(help="Control of --update, a name of `axes list`.")] = None,
    capture: Annotated[
        str, typer.Option(help="none; graph: a training step as one CUDA graph, up to three runs a worker in turn.")
    ] = "none",
) -> None:
    """Train arms and controls on the same batches and compare them; a run that was stopped or killed goes on."""
    begun, mine = time.monotonic(), None
    if quick and small:
        raise AxesError("--quick and --small are two sizes of the same: choose one")
    if limit is not None and not limit > 0:
        raise AxesError(f"--limit is a number of seconds above 0, got {limit:g}")
    if update is not None:
        if against is None:
            raise AxesError("--update needs what it is compared with: --against NAME, a name of `axes list`")
        name = update.partition(":")[2]
        mine = own.own(own.tuple_of(update), cast(Axis, axis), against, tuple(task or ()), name)
    elif against is not None:
        raise AxesError("--against is the control of --update: give both, or experiments by id")
    form = "quick" if quick else "small" if small else "whole"
    for each in task or ():
        trial(each, form)
    where, step = str(_device(device)), cast(Any, capture)
    plan = planned(tuple(names or ()), mine, form, seeds, where, step, tuple(task or ()))
    folder = out if out is not None else Path("runs") / ("transfer" if form == "whole" else f"transfer-{form}")
    count = workers if workers is not None else 4 if device.startswith("cuda") else min(8, os.cpu_count() or 1)
    command = shlex.join(["axes", *sys.argv[1:]])
    console = _console(130)
    try:
        results = _with_progress(plan, folder, count, command, console, None if limit is None else begun + limit)
    except RunsFailed as error:
        _written(error.results, ResultsFolder(folder), console)
        for said in error.failed[1:]:
            console.print(said, markup=False, soft_wrap=True)
        raise
    except KeyboardInterrupt:
        typer.echo(f"stopped; finished runs are kept, the same command goes on: {folder}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    _written(results, ResultsFolder(folder), console)
    if missing := sum(c.get("missing", 0) for c in words.compared(results)):
        said = f"stopped at its limit; at least {words.left(missing)}: the same command goes on"
        console.print(said, markup=False)


@app.command(name="report")
def report_(
    folder: Annotated[Path, typer.Argument(help="Of `axes transfer run`.")],
    docs: Annotated[Path | None, typer.Option(metavar="FILE", help="Also as a page, as docs/transfer.md.")] = None,
) -> None:
    """Say again what the runs of a folder say: transfer.json, a table, pictures and a page."""
    if docs is not None and not docs.parent.is_dir():
        raise AxesError(f"cannot write {docs}: the folder {docs.parent} does not exist")
    found = ResultsFolder(folder)
    found.plan()
    with found.held():
        results = compile_folder(found)
    _written(results, found, _console(130))
    if docs is not None:
        write_text(docs, report.markdown(results))


@app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Of `axes transfer run`.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="A new one, for what all of them hold.")],
) -> None:
    """Put folders together that several GPUs have filled, and say what their runs say."""
    found = ResultsFolder(out)
    put_together([ResultsFolder(path) for path in folders], found)
    _written(compile_folder(found), found, _console(130))


@app.command()
def capacity(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Of `axes list`, or module:tuple of your own.")
    ] = None,
    width: Annotated[list[int] | None, typer.Option(help="Of keys and values; 16, 32 and 64 if none.")] = None,
) -> None:
    """How many random pairs a memory holds before anything is trained, beside what theory says of it."""
    table = Table("memory", "width", "pairs", "pairs / width", "error", "its law", "signal / noise", "right")
    for name in names or ("linear-attention-unnormalised", "delta-net", "rls-net", "softmax-attention"):
        update = own.tuple_of(name) if ":" in name else catalogue.get(name).update
        for s in curve(update, tuple(width or (16, 32, 64))):
            law = "–" if s.law is None else f"{s.law:.3f}"
            row = (name, s.width, s.pairs, f"{s.pairs / s.width:g}", f"{s.error:.3f}", law, f"{s.snr:.2f}")
            table.add_row(*map(str, row), f"{s.right:.3f}")
    _console(120).print(table)


def _written(results: dict[str, Any], folder: ResultsFolder, console: Console) -> None:
    """Tables on the terminal, and files beside transfer.json."""
    for table in report.tables(results):
        console.print(table)
    if results["verdicts"]:
        console.print(results["verdicts"], markup=False)
    for said in words.notes(results):
        console.print(said, markup=False, soft_wrap=True)
    write_text(folder.path / "transfer.html", page.page(results))
    pictures.save(pictures.heat_map(results), folder.path / "heat-map.png")
    pictures.save(pictures.curves(results), folder.path / "curves.png")
    console.print(f"page: {folder.path / 'transfer.html'}; numbers: {folder.results}", markup=False, soft_wrap=True)


def _with_progress(
    plan: Plan, folder: Path, workers: int, command: str, console: Console, until: float | None
) -> dict[str, Any]:
    columns = (
        TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=plan.runs_in_all())

        def watch(what: str, done: int, of: int) -> None:
            bar.update(task, completed=done, total=of, description=what)

        return run_plan(plan, folder, workers, watch, command, until)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UnknownName("device", name, ("cpu", "cuda", "cuda:0")) from None
    if device.type not in ("cpu", "cuda"):
        raise AxesError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise AxesError(f"device {name!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def _console(width: int) -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=width)
