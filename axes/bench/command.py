"""`axes bench ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from axes.bench import decode as decode_
from axes.bench import depth as depth_
from axes.bench import (
    depth_contenders,
    depth_report,
    depth_training_report,
    layers_report,
    optim_report,
    optim_training_report,
    report,
    training_models,
    training_report,
)
from axes.bench import depth_training as depth_training_
from axes.bench import layers as layers_
from axes.bench import nonlinear as nonlinear_
from axes.bench import optim as optim_
from axes.bench import optim_training as optim_training_
from axes.bench import sequence as sequence_
from axes.bench import training as training_
from axes.bench import turns as turns_
from axes.bench.figures import show
from axes.bench.optim_contenders import SUITES
from axes.bench.optim_tasks import UNITS
from axes.bench.results import Apart
from axes.bench.rules import Shape
from axes.bench.several import launch
from axes.bench.watching import watching
from axes.errors import AxesError
from axes.files import write_text

app = typer.Typer(name="bench", help="Side by side with the best peers, on this machine.", no_args_is_help=True)

_APART = Annotated[
    int,
    typer.Option(metavar="N", help="Rows in processes of their own, N of which compile side by side; 0: one process."),
]
_PATIENCE = Annotated[float, typer.Option(help="Seconds that --apart lets processes compile, and a row be measured.")]
_CONFIGURATIONS = Annotated[
    int, typer.Option(help="Of a kernel of fla's that its tuner may try; 0: all, which takes minutes a layer.")
]
_GPU_SHAPES = ("8,4096,16,128",)
_CPU_SHAPES = ("1,4096,4,64",)


@app.command()
def sequence(
    rules: Annotated[list[str] | None, typer.Option("--rule", help="A rule; all by default. May be repeated.")] = None,
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="B,T,H,D. May be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; on a CPU float32.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; what there is by default.")] = "",
    who: Annotated[list[str] | None, typer.Option(help="Contenders; all by default. May be repeated.")] = None,
    first_calls: Annotated[bool, typer.Option(help="Time the first call with a cold kernel cache, too.")] = False,
    lift_guard: Annotated[bool, typer.Option(help="Run fla's gated backward where it refuses to; checked.")] = False,
    configurations: _CONFIGURATIONS = 0,
    apart: _APART = 0,
    patience: _PATIENCE = 600.0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
    fresh: Annotated[bool, typer.Option(help="Measure rows again that the folder holds.")] = False,
) -> None:
    """Sequence layers' recurrences: kernels, chunked torch, flash-linear-attention and flash attention.

    A row whose outputs or gradients are wrong is refused. Stopped runs continue with the rows that are missing.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    plan = sequence_.Plan(
        rules=tuple(rules or ()),
        shapes=tuple(shapes or (_GPU_SHAPES if device.startswith("cuda") else _CPU_SHAPES)),
        dtype=dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
        device=device,
        who=tuple(who or ()),
        first_calls=first_calls,
        lift_guard=lift_guard,
        configurations=configurations,
        apart=_apart(apart, patience),
    )
    console = _console()
    with watching(console) as watch:
        results = sequence_.measure(plan, out, watch, fresh)
    show(report.table(results), console)
    report.draw(results, out / "sequence.png")
    typer.echo(f"{out / sequence_.FILE} and {out / 'sequence.png'}")


@app.command()
def nonlinear(
    rules: Annotated[list[str] | None, typer.Option("--rule", help="A rule; all by default. May be repeated.")] = None,
    shape: Annotated[str, typer.Option(help="B,T,H,D.")] = "1,1024,4,32",
    share: Annotated[int, typer.Option(help="The interpreter is run on this part of the tokens, times as many.")] = 8,
    turns: Annotated[int, typer.Option(help="Of each; the median counts.")] = 3,
) -> None:
    """Nonlinear memories on a CPU: their routes beside the interpreter, processor time forward with backward."""
    typer.echo(nonlinear_.HEAD)
    with watching(_console()) as watch:
        for row in nonlinear_.measure(tuple(rules or ()), Shape.parse(shape), share, turns, watch):
            typer.echo(row.text())


@app.command()
def decode(
    rules: Annotated[list[str] | None, typer.Option("--rule", help="A rule; all by default. May be repeated.")] = None,
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="B,1,H,D. May be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; on a CPU float32.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; what there is by default.")] = "",
    states: Annotated[
        list[str] | None, typer.Option("--state", help="dtype that our states are held in: float32. May be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
) -> None:
    """One more token with the state kept: the fused step, the interpreter and flash-linear-attention."""
    chosen = sequence_.device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = sequence_.dtype_of(dtype or ("bfloat16" if chosen.type == "cuda" else "float32"))
    console = _console()
    with watching(console) as watch:
        given = tuple(shapes or ("1,1,16,128", "64,1,16,128"))
        held = tuple(map(sequence_.dtype_of, states or ("float32",)))
        found = decode_.measure(tuple(rules or ()), given, kind, chosen, out, watch, held)
    table = Table(title="one token")
    for name in ("rule", "B,1,H,D", "who", "state", "graph us", "eager us", "rel. error", "state MB r+w", "note"):
        table.add_column(name, justify="left" if name in ("rule", "who", "state", "note") else "right")
    for s in found:
        numbers = (f"{1e3 * x:.1f}" if x is not None else "" for x in (s.graph, s.eager))
        error = "" if s.error is None else f"{s.error:.1e}"
        size = "" if s.megabytes is None else f"{s.megabytes:.2f}"
        table.add_row(s.rule, f"{s.shape} {s.dtype}", s.who, s.held, *numbers, error, size, s.refused)
    show(table, console)
    typer.echo(str(out / decode_.FILE))


@app.command()
def layers(
    names: Annotated[list[str] | None, typer.Option("--layer", help="A layer's name. May be repeated.")] = None,
    size: Annotated[str, typer.Option(help="B,T,D,H: batch, tokens, width, heads.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; on a CPU float32.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; what there is by default.")] = "",
    who: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(layers_.WHO)}; the first {len(layers_.DEFAULT_WHO)} by default. Repeatable."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="LAYER:WHO", help="These rows, in this order, instead of --layer by --who."),
    ] = None,
    configurations: _CONFIGURATIONS = 0,
    apart: _APART = 0,
    patience: _PATIENCE = 600.0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
    fresh: Annotated[bool, typer.Option(help="Measure rows again that the folder holds.")] = False,
) -> None:
    """Whole layers: time, memory, what is kept for the backward, host time; products alone, fla's and torch's beside.

    A layer of ours whose output or gradients are wrong is refused. Stopped runs continue with what is missing.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.startswith("cuda")
    plan = layers_.Plan(
        layers=tuple(names or ()),
        size=layers_.Size.parse(size) if size else layers_.Size() if gpu else layers_.Size(1, 2048, 256, 4),
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        device=device,
        who=tuple(who or layers_.DEFAULT_WHO),
        rows=tuple(map(_pair, rows or ())),
        configurations=configurations,
        apart=_apart(apart, patience),
    )
    console = _console()
    with watching(console) as watch:
        results = layers_.measure(plan, out, watch, fresh)
    show(layers_report.table(results), console)
    layers_report.draw(results, out / "layers.png")
    typer.echo(f"{out / layers_.FILE} and {out / 'layers.png'}")


@app.command()
def depth(
    names: Annotated[
        list[str] | None, typer.Option("--mixer", help="A mixer's name; all by default. May be repeated.")
    ] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--size", help="N,D,n: tokens, width, streams. May be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the streams: bfloat16, float16 or float32; on a CPU float32.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; what there is by default.")] = "",
    who: Annotated[
        list[str] | None,
        typer.Option(help=f"{'; '.join(depth_contenders.WHO)}. All but the last two by default. May be repeated."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
    fresh: Annotated[bool, typer.Option(help="Measure rows again that the folder holds.")] = False,
) -> None:
    """Depth mixers: read and write of one sublayer, beside h + y, plain torch forms and the kernels of others.

    A row whose output or gradients are wrong is refused. Stopped runs continue with what is missing.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.startswith("cuda")
    plan = depth_.Plan(
        mixers=tuple(names or ()),
        sizes=tuple(map(depth_.Size.parse, sizes or ())) or (depth_.Size() if gpu else depth_.ON_CPU,),
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        device=device,
        who=tuple(who or depth_contenders.DEFAULT_WHO),
    )
    console = _console()
    with watching(console) as watch:
        results = depth_.measure(plan, out, watch, fresh)
    show(depth_report.table(results), console)
    depth_report.draw(results, out / "depth.png")
    write_text(out / "depth.md", depth_report.markdown(results))
    typer.echo(f"{out / depth_.FILE}, {out / 'depth.md'} and {out / 'depth.png'}")


@app.command()
def optim(
    rules: Annotated[list[str] | None, typer.Option("--rule", help="A rule; all by default. May be repeated.")] = None,
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", help=f"Parameters: {', '.join(s.name for s in SUITES)}. May be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cuda or cpu; what there is by default.")] = "",
    who: Annotated[list[str] | None, typer.Option(help="Contenders; all by default. May be repeated.")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
    fresh: Annotated[bool, typer.Option(help="Measure rows again that the folder holds.")] = False,
) -> None:
    """One step of every optimizer: ours, torch's loop, foreach and fused, pytorch_optimizer and lion-pytorch.

    A row whose steps are wrong is refused. Stopped runs continue with the rows that are missing.
    """
    plan = optim_.Plan(
        rules=tuple(rules or ()),
        suites=tuple(suites or ()),
        who=tuple(who or ()),
        dtype=dtype,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    console = _console()
    with watching(console) as watch:
        results = optim_.measure(plan, out, watch, fresh)
    show(optim_report.table(results), console)
    optim_report.draw(results, out / "optim.png")
    write_text(out / "optim.md", optim_report.markdown(results))
    typer.echo(f"{out / optim_.FILE}, {out / 'optim.md'} and {out / 'optim.png'}")


@app.command()
def turns(
    rules: Annotated[
        list[str] | None, typer.Option("--rule", help="A rule; those of the suite by default. May be repeated.")
    ] = None,
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", help=f"Parameters: {', '.join(s.name for s in SUITES)}. May be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cuda or cpu; what there is by default.")] = "",
    who: Annotated[list[str] | None, typer.Option(help="Contenders; all by default. May be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="Of a rule on a set of parameters, shared by its contenders.")] = 4.0,
) -> None:
    """A step of every optimizer by turns in one process: the least time of the processor, and on the wall, of many."""
    plan = optim_.Plan(
        rules=tuple(rules or ()),
        suites=tuple(suites or ()),
        who=tuple(who or ()),
        dtype=dtype,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    with watching(_console()) as watch:
        for beside in turns_.measure(plan, seconds, watch):
            typer.echo(beside.text())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sharded(
    context: typer.Context,
    processes: Annotated[int, typer.Option(help="On this machine; with a GPU each if there are enough.")] = 2,
) -> None:
    """A step on several processes beside the same step on one: time, difference, messages and what they carry.

    --rule, --suite, --dtype, --parts, --unchecked and --traces: see `python -m axes.bench.sharded --help`.
    """
    launch("axes.bench.sharded", processes, context.args)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def segments(
    context: typer.Context,
    processes: Annotated[int, typer.Option(help="On this machine; with a GPU each if there are enough.")] = 2,
) -> None:
    """A training step of a long sequence split over processes beside the same step on one: tokens/s and losses.

    --layer, --length, --depth, --width, --heads and --vocabulary: see `python -m axes.bench.segments --help`.
    """
    launch("axes.bench.segments", processes, context.args)


@app.command("optim-training")
def optim_training(
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", help=f"{', '.join(UNITS)}; those whose data is here by default. May be repeated."),
    ] = None,
    who: Annotated[list[str] | None, typer.Option(help="Optimizers; all by default. May be repeated.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = optim_training_.Plan.steps,
    rates: Annotated[int, typer.Option(help="Learning rates of the first grid, half a decade apart.")] = (
        optim_training_.Plan.rates
    ),
    seeds: Annotated[int, typer.Option(help="Seeds at the best rate.")] = optim_training_.Plan.seeds,
    points: Annotated[int, typer.Option(help="Looks at the held-out loss.")] = optim_training_.Plan.points,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = optim_training_.Plan.device,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
    fresh: Annotated[bool, typer.Option(help="Train again what the folder holds.")] = False,
) -> None:
    """Train a small language model and a network on scikit-learn's digits with each optimizer at its best rate.

    Stopped runs continue with what is missing.
    """
    plan = optim_training_.Plan(tuple(tasks or ()), tuple(who or ()), steps, rates, seeds, points, device)
    console = _console()
    with watching(console) as watch:
        results = optim_training_.measure(plan, out, watch, fresh)
    show(optim_training_report.table(results), console)
    optim_training_report.draw(results, out / "optim-training.png")
    write_text(out / "optim-training.md", optim_training_report.markdown(results))
    files = (out / name for name in (optim_training_.FILE, "optim-training.md", "optim-training.png"))
    typer.echo(" ".join(map(str, files)))


@app.command("depth-training")
def depth_training(
    names: Annotated[
        list[str] | None, typer.Option("--mixer", help="A mixer's name; all by default. May be repeated.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Blocks.")] = depth_training_.Size.layers,
    width: Annotated[int, typer.Option(help="Width of the model.")] = depth_training_.Size.width,
    heads: Annotated[int, typer.Option(help="Heads of attention.")] = depth_training_.Size.heads,
    streams: Annotated[int, typer.Option(help="Of mixers that have several, at least.")] = depth_training_.Size.streams,
    batch: Annotated[int, typer.Option(help="Windows a step.")] = depth_training_.Size.batch,
    context: Annotated[int, typer.Option(help="Bytes of a window.")] = depth_training_.Size.context,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 400,
    rates: Annotated[int, typer.Option(help="Learning rates of a mixer's first grid; 0: all at one rate.")] = 3,
    seeds: Annotated[int, typer.Option(help="Seeds at that rate.")] = 3,
    points: Annotated[int, typer.Option(help="Looks at the held-out loss.")] = 5,
    workers: Annotated[int, typer.Option(help="Processes, of one thread each, that train mixers side by side.")] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
    fresh: Annotated[bool, typer.Option(help="Train again what the folder holds.")] = False,
) -> None:
    """Train the same small language model under every mixer along depth; what differs from pre-norm, seed by seed.

    Stopped runs continue with what is missing.
    """
    size = depth_training_.Size("rope", layers, width, heads, streams, batch, context)
    plan = optim_training_.Plan(steps=steps, rates=rates, seeds=seeds, points=points, device=device)
    console = _console()
    with watching(console) as watch:
        results = depth_training_.measure(tuple(names or ()), size, plan, out, watch, fresh, workers)
    show(depth_training_report.table(results), console)
    depth_training_report.draw(results, out / "depth-training.png")
    write_text(out / "depth-training.md", depth_training_report.markdown(results))
    files = (out / name for name in (depth_training_.FILE, "depth-training.md", "depth-training.png"))
    typer.echo(" ".join(map(str, files)))


@app.command()
def training(
    layers: Annotated[int, typer.Option(help="Blocks.")] = training_models.Size.layers,
    width: Annotated[int, typer.Option(help="Width of the model.")] = training_models.Size.width,
    heads: Annotated[int, typer.Option(help="Heads of a sequence layer.")] = training_models.Size.heads,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; 8, on a CPU 1.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a sequence; 4096, on a CPU 256.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps, after a warm-up.")] = training_models.Size.steps,
    device: Annotated[str, typer.Option(help="cuda or cpu; what there is by default.")] = "",
    vocabulary: Annotated[int, typer.Option(help="Tokens there are.")] = training_models.Size.vocabulary,
    depths: Annotated[
        list[str] | None, typer.Option("--depth", help="Our model with this depth mixer too. May be repeated.")
    ] = None,
    streams: Annotated[int, typer.Option(help="Streams of such mixers.")] = training_models.Size.streams,
    dtype: Annotated[
        str, typer.Option(help="bfloat16: autocast beside float32 streams; bfloat16-streams: they are in it too.")
    ] = training_models.Size.dtype,
    compiled: Annotated[bool, typer.Option(help="Compile every model too, in rows of their own.")] = False,
    who: Annotated[list[str] | None, typer.Option(help="Contenders; all by default. May be repeated.")] = None,
    configurations: _CONFIGURATIONS = 0,
    apart: _APART = 0,
    patience: _PATIENCE = 600.0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("runs/bench"),
) -> None:
    """Training throughput of whole language models: ours, one of fla's own layers, one of torch's flash attention."""
    chosen = sequence_.device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = (training_models.Size.batch, training_models.Size.tokens) if chosen.type == "cuda" else (1, 256)
    batch, tokens = (u if given is None else given for u, given in zip(usual, (batch, tokens), strict=True))
    size = training_models.Size(layers, width, heads, vocabulary, batch, tokens, steps, streams, dtype)
    console = _console()
    with watching(console) as watch:
        found = training_.measure(
            size,
            out,
            chosen,
            tuple(who or training_.WHO),
            compiled,
            tuple(depths or ()),
            watch,
            configurations,
            _apart(apart, patience),
        )
    show(training_report.table(size, found), console)
    typer.echo(str(out / training_.FILE))


def _pair(text: str) -> tuple[str, str]:
    layer, colon, who = text.partition(":")
    if not colon:
        raise AxesError(f"--row is a layer and a contender, such as gla:fla, not {text!r}")
    return layer, who


def _apart(at_once: int, patience: float) -> Apart | None:
    if at_once < 0 or patience <= 0:
        raise AxesError(f"--apart is 0 or more and --patience more than 0, not {at_once} and {patience:g}")
    return Apart(at_once, patience) if at_once else None


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)
