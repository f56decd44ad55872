"""The command line: train, tokenize, sample, export, list, explain, verify, cite, bench, transfer, demo."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from axes import answers, catalogue
from axes.bench.command import app as bench
from axes.errors import AxesError, UnknownName
from axes.tasks import corpus, demonstration, language_modelling
from axes.tasks import tokens as token_files
from axes.tasks.configuration import DTYPES, TRACKERS, Configuration
from axes.tasks.interruption import stop_requested
from axes.tasks.processes import Processes, agreed, joined, launched, leaving
from axes.tasks.progress import ProgressBar
from axes.tasks.run_folder import RunFolder
from axes.tasks.sample import generate, load_model
from axes.tasks.schedules import SCHEDULES
from axes.tasks.summary import summary_table
from axes.tasks.trackers import Several, tracker
from axes.transfer.command import app as transfer

INTERRUPTED = 130
_AXES = get_args(catalogue.Axis)
_DEFAULTS = Configuration.__dataclass_fields__
_FORMATS = ("transformers",)
_COMPUTED = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

app = typer.Typer(
    name="axes",
    help="Optimizers, sequence layers and depth mixers as one algorithm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)
app.add_typer(transfer)


class _TrainCommand(TyperCommand):
    """Lets `--text` take several paths at once: `--text a b` means `--text a --text b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _repeat_option("--text", args))


def _repeat_option(option: str, arguments: Sequence[str]) -> list[str]:
    repeated: list[str] = []
    within = 0  # values since the option was named
    for argument in arguments:
        if argument.startswith("-"):
            within = 1 if argument == option else 0
        elif within:
            if within > 1:
                repeated.append(option)
            within += 1
        repeated.append(argument)
    return repeated


def _default(name: str) -> Any:
    return _DEFAULTS[name].default


@app.command(cls=_TrainCommand)
def train(
    context_: typer.Context,
    sequence: Annotated[str, typer.Option(help="Sequence layer, a name of `axes list --axis sequence`.")] = _default(
        "sequence"
    ),
    optimizer: Annotated[str, typer.Option(help="Optimizer, a name of `axes list --axis data`.")] = _default(
        "optimizer"
    ),
    depth: Annotated[str, typer.Option(help="Depth mixer, a name of `axes list --axis depth`.")] = _default("depth"),
    layers: Annotated[int, typer.Option(help="Blocks of a sequence layer and a network.")] = _default("layers"),
    width: Annotated[int, typer.Option(help="Width of the model.")] = _default("width"),
    heads: Annotated[int, typer.Option(help="Heads of a sequence layer; must divide the width.")] = _default("heads"),
    streams: Annotated[int, typer.Option(help="Residual streams of a depth mixer that has several.")] = _default(
        "streams"
    ),
    recompute: Annotated[
        int, typer.Option(help="Sublayers that keep the streams which enter them alone, 0 to keep all streams.")
    ] = _default("recompute"),
    context: Annotated[int, typer.Option(help="Tokens per window; bytes of text.")] = _default("context"),
    batch: Annotated[int, typer.Option(help="Windows per step, of all processes.")] = _default("batch"),
    accumulate: Annotated[
        int, typer.Option(help="Parts of a batch whose gradients are found one after another.")
    ] = _default("accumulate"),
    steps: Annotated[int, typer.Option(help="Steps to train.")] = _default("steps"),
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; the optimizer's own default if left out.")] = (
        _default("lr")
    ),
    schedule: Annotated[str, typer.Option(help=f"After the warm-up: {', '.join(SCHEDULES)}.")] = _default("schedule"),
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = _default("warmup"),
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay; the optimizer's own default if left out.")
    ] = _default("weight_decay"),
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient, 0 for no clipping.")] = _default("clip"),
    seed: Annotated[int, typer.Option(help="Of the parameters and of the order of the text.")] = _default("seed"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = _default("device"),
    threads: Annotated[int, typer.Option(help="Threads of the CPU, 0 for what torch finds.")] = _default("threads"),
    dtype: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(DTYPES)}; bfloat16 computes under autocast with float32 parameters, bfloat16-streams "
            "keeps the residual streams in it too, bfloat16-pure parameters as well."
        ),
    ] = _default("dtype"),
    text: Annotated[
        list[Path] | None, typer.Option(metavar="PATH...", help="Files or folders of text; else the embedded corpus.")
    ] = None,
    text_limit: Annotated[int, typer.Option(help="Take about this many bytes of the text, 0 for all.")] = _default(
        "text_limit"
    ),
    tokens: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="What `axes tokenize` wrote, instead of text.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Of the model, at least that of the tokens, which it is if left out.")
    ] = None,
    validation_windows: Annotated[int, typer.Option(help="Windows per evaluation.")] = _default("validation_windows"),
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations, 0 for only at the end.")] = _default(
        "eval_every"
    ),
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints, 0 for only at the end.")] = _default(
        "save_every"
    ),
    compile: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    sequence_parallel: Annotated[
        int, typer.Option(help="Processes of torchrun that share the tokens of a window.")
    ] = _default("sequence_parallel"),
    peak: Annotated[
        float, typer.Option(help="TFLOP/s of one device, which MFU is a share of; 0 for what is known of it.")
    ] = _default("peak"),
    track: Annotated[str, typer.Option(help=f"Pass numbers on as well: {', '.join(TRACKERS)}.")] = _default("track"),
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder; runs/SEQUENCE-OPTIMIZER-DEPTH if left out.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue this run; every setting but --steps comes from the run itself."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in the folder.")] = False,
) -> None:
    """Train a language model of bytes or tokens; Ctrl-C saves and `--resume RUN` continues bit for bit.

    Under torchrun (`torchrun --nproc-per-node 2 -m axes train ...`) all processes train one model.
    """
    with stop_requested() as stop, joined() as leads:
        more: list[language_modelling.Observer] = []
        if resume is not None:
            _refuse_beside_resume(context_)
            folder = RunFolder(resume)
            given = getattr(context_.get_parameter_source("steps"), "name", "") == "COMMANDLINE"
            found = agreed(lambda: language_modelling.read_configuration(folder), _same)
            together = _processes(found)
            training = language_modelling.resume(folder, steps if given else None, together)
        else:

            def configured() -> Configuration:
                return Configuration(
                    sequence=sequence,
                    optimizer=optimizer,
                    depth=depth,
                    layers=layers,
                    width=width,
                    heads=heads,
                    streams=streams,
                    recompute=recompute,
                    context=context,
                    batch=batch,
                    steps=steps,
                    lr=lr,
                    schedule=schedule,
                    warmup=warmup,
                    weight_decay=weight_decay,
                    clip=clip,
                    seed=seed,
                    device=device,
                    threads=threads,
                    dtype=dtype,
                    text=tuple(str(path) for path in text or ()),
                    text_limit=text_limit,
                    validation_windows=validation_windows,
                    eval_every=eval_every,
                    save_every=save_every,
                    compile=compile,
                    accumulate=accumulate,
                    tokens="" if tokens is None else str(tokens),
                    sequence_parallel=sequence_parallel,
                    peak=peak,
                    track=track,
                    vocabulary=_vocabulary(vocabulary, tokens),
                )

            configuration = agreed(configured, _same)
            folder = RunFolder(out if out is not None else Path("runs") / f"{sequence}-{optimizer}-{depth}")
            more = _trackers(track, leads)  # what is missing is said before anything is done
            training = language_modelling.start(configuration, folder, overwrite, _processes(configuration))
        console = _console() if leads else Console(quiet=True)
        if resume is not None:
            more = _trackers(training.configuration.track, leads)
        with ProgressBar(console) as bar:
            summary = language_modelling.run(training, folder, Several([bar, *more]), stop)
    if not leads:
        raise typer.Exit(0 if summary.finished else INTERRUPTED)
    if not summary.finished:
        _say(f"stopped at step {summary.steps}, saved; continue with: axes train --resume {folder}")
        raise typer.Exit(INTERRUPTED)
    console.print(summary_table([summary]))
    _say(f"run folder: {folder}; try: axes sample {folder} --prompt 'def '")


@app.command(cls=_TrainCommand)
def tokenize(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the token files go.")],
    text: Annotated[list[Path] | None, typer.Option(metavar="PATH...", help="Files or folders of text.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A dataset of Hugging Face's `datasets`, by name or saved in a folder.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of the dataset.")] = "train",
    field: Annotated[str, typer.Option(help="Of the dataset's rows, that holds text.")] = "text",
    tokenizer: Annotated[str, typer.Option(help="bytes, or the tokenizer.json of Hugging Face's `tokenizers`.")] = (
        "bytes"
    ),
    held_out: Annotated[float, typer.Option(help="Share of the documents to validate on.")] = 0.01,
) -> None:
    """Write token files that may be larger than memory, for `axes train --tokens FOLDER`."""
    if (text is None) == (dataset is None):
        raise AxesError("give --text or --dataset")
    documents = token_files.dataset(dataset, split, field) if dataset else corpus.documents_of(text or ())
    written = token_files.write(out, documents, token_files.tokenizer(tokenizer), held_out)
    _say(f"{written.provenance}; vocabulary {written.vocabulary:,}, {written.bytes_per_token:.2f} bytes per token")
    _say(f"try: axes train --tokens {out}")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to generate, bytes of a run on text.")] = 300,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest each time.")] = 0.8,
    greedy: Annotated[bool, typer.Option("--greedy", help="The same as --temperature 0.")] = False,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    device: Annotated[str | None, typer.Option(help="Instead of the device of the run.")] = None,
) -> None:
    """Write text with a trained run, by the recurrent form of its layers."""
    chosen = Configuration(device=device).torch_device() if device is not None else None
    folder, heat = RunFolder(run), 0.0 if greedy else temperature
    model, trained_on = load_model(folder, device=chosen), language_modelling.read_configuration(folder).tokens
    if trained_on:
        _write_tokens(model, token_files.tokenizer_of(trained_on), prompt, tokens, heat, seed)
    else:
        _write_sample(model, prompt, tokens, heat, seed)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    to: Annotated[str, typer.Option(help=f"For whom: {', '.join(_FORMATS)}.")] = _FORMATS[0],
) -> None:
    """Write a trained run as another library loads it."""
    if to not in _FORMATS:
        raise UnknownName("format", to, _FORMATS)
    from axes.integrations import transformers  # an extra, and slow to import

    text = transformers.export(RunFolder(run), folder)
    _say(f"written: {folder}; after `import axes.integrations.transformers`, load it with")
    loads = [f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"]
    _say(f"    {', '.join([*loads, *[f'AutoTokenizer.from_pretrained({str(folder)!r})'] * text])}")
    if not text:
        _say("without a tokenizer, since tokens.json does not say by which its tokens were made")


@app.command("list")
def list_(
    axis: Annotated[str | None, typer.Option(help=f"Only this axis: {', '.join(_AXES)}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List what the catalogue holds."""
    entries = catalogue.entries(cast(catalogue.Axis | None, axis))  # refuses any other word
    if as_json:
        rows = [
            {
                "name": entry.name,
                "axis": entry.axis,
                "paper": str(entry.paper),
                "equation": entry.equation,
                "differs": entry.differs,
                "operator": entry.operator,
                "update": repr(entry.update),
            }
            for entry in entries
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "axis", "paper")
    for entry in entries:
        table.add_row(entry.name, entry.axis, str(entry.paper))
    _console().print(table)


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="A name of `axes list`, or a claim as A01.")],
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, ..., or a GPU by its capability, here or not: cuda:sm_80. Default: cpu."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(_COMPUTED)}. Default: float32.")] = None,
    axis: Annotated[
        str | None, typer.Option(help="data, sequence or depth: the tuple there, beside its own, what moved marked.")
    ] = None,
) -> None:
    """Print the tuple of a system, what follows from it, and what would execute it; or a claim with its numbers."""
    if dtype is not None and dtype not in _COMPUTED:
        raise UnknownName("dtype", dtype, _COMPUTED)
    if re.fullmatch("[A-Ka-k][0-9]{2}", name):
        from axes.claims.command import explanation  # the register is large: only its own commands load it

        if (device, dtype, axis) != (None, None, None):
            raise AxesError(f"a claim runs nowhere: leave out --device, --dtype and --axis for {name}")
        typer.echo(explanation(name))
        return
    onto = cast(catalogue.Axis | None, axis)  # refused where it is no axis
    typer.echo(answers.explain(name, device, None if dtype is None else _COMPUTED[dtype], onto))


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[GROUP|ID]...", help="As A or J07; all if none.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws per claim instead of each claim's own number.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Findings, for programs.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="One self-contained page.")] = None,
    docs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only render the register, as docs/claims.md; checks nothing.")
    ] = None,
) -> None:
    """Check the literature's claims against this package; exit status 1 if a verdict no longer holds."""
    from axes.claims import command as claims

    if docs is not None:
        if names or seeds is not None or json_file is not None or html_file is not None:
            raise AxesError("--docs renders the whole register and checks nothing: give it alone")
        claims.write_docs(docs)
        _say(f"written: {docs}")
        return
    try:
        hold = claims.run(names or (), _console(), seeds, workers, json_file, html_file)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not hold:
        raise typer.Exit(1)


@app.command()
def cite(name: Annotated[str, typer.Argument(help="A name of `axes list`.")]) -> None:
    """Print the BibTeX entry of a system."""
    typer.echo(catalogue.get(name).bibtex.strip())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the runs go.")] = Path("runs/demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin again.")] = False,
) -> None:
    """Train gated-delta-net x muon x mhc and its control on the same tokens, and compare them."""
    configurations = demonstration.configurations()
    console = _console()
    with stop_requested() as stop, ProgressBar(console) as bar:
        summaries = demonstration.demonstrate(configurations, out, bar, stop, overwrite)
    if len(summaries) < len(configurations) or not all(summary.finished for summary in summaries):
        _say("stopped and saved; continue with: axes demo" + ("" if out == Path("runs/demo") else f" --out {out}"))
        raise typer.Exit(INTERRUPTED)
    console.print()
    console.print(summary_table(summaries, title="validation on held-out files, same tokens"))
    for configuration, summary in zip(configurations, summaries, strict=True):
        _say(f"\n--- {summary.name} writes:")
        model = load_model(demonstration.folder_of(configuration, out))
        _write_sample(model, demonstration.PROMPT, tokens=200, temperature=0.7, seed=0)
    _say(f"\ncurves: {out / 'comparison.png'}; numbers: {out / 'comparison.json'}")


@leaving()
def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: what is wrong is said in one sentence on stderr, with a non-zero exit status."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="axes")
    except (AxesError, OSError, torch.OutOfMemoryError) as error:
        message = " ".join(str(error).split())
        typer.echo(f"error: {message}", err=True)
        sys.exit(1)
    except RuntimeError as error:
        # a missing C++ compiler, say; everything else is a defect of ours and keeps its traceback
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = str(error).strip().splitlines()[0]
        typer.echo(f"error: torch.compile failed: {reason}; leave out --compile", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("stopped; what was saved last is kept", err=True)
        sys.exit(INTERRUPTED)


def _processes(configuration: Configuration) -> Processes | None:
    return Processes(configuration.torch_device(), configuration.sequence_parallel) if launched() else None


def _trackers(name: str, leads: bool) -> list[language_modelling.Observer]:
    return agreed(lambda: [tracker(name)] if name and leads else [], lambda made: {})


def _same(configuration: Configuration) -> dict[str, Any]:
    """What all processes of a run have in common."""
    return {n.replace("_", "-"): x for n, x in configuration.as_dict().items() if n not in ("device", "threads")}


def _vocabulary(given: int | None, folder: Path | None) -> int:
    if given is not None:
        return given
    return int(_default("vocabulary") if folder is None else token_files.header(folder)["vocabulary"])


def _refuse_beside_resume(context: typer.Context) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in ("resume", "steps") and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise AxesError(f"--resume takes every setting but --steps from the run: leave out {', '.join(given)}")


def _write_tokens(
    model: Any, by: token_files.Tokenizer, prompt: str, count: int, temperature: float, seed: int
) -> None:
    """As `_write_sample`, of a run on tokens: text is written as far as it can no longer change."""
    given = by.encode([prompt.encode("utf-8", "surrogateescape")])[0] if prompt else []
    made: list[int] = []
    said = ""
    with _a_text() as write:
        write(prompt)
        for token in generate(model, given or [by.separator], count, temperature, seed):
            made.append(token)
            text = by.decode(made)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                write(text[len(said) :])
                said = text
        write(by.decode(made)[len(said) :])


def _write_sample(model: Any, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with _a_text() as write:
        write(prompt)
        for byte in generate(model, prompt.encode("utf-8", "surrogateescape"), tokens, temperature, seed):
            known = byte < corpus.VOCABULARY  # a model may have more tokens than there are bytes
            write((decoder.decode(bytes([byte])) if known else "") if byte else "\n")
        write(decoder.decode(b"", final=True))


@contextmanager
def _a_text() -> Iterator[Callable[[str], None]]:
    """Writes piece by piece; its last line ends whatever happens, so that an error does not stand behind a prompt."""
    last = ""

    def write(piece: str) -> None:
        nonlocal last
        last = piece or last
        typer.echo(piece, nl=False)

    try:
        yield write
    except BaseException:
        if last and not last.endswith("\n"):
            typer.echo()
        raise
    typer.echo()


def _console() -> Console:
    console = Console()
    # without a terminal there is no width to respect but the reader's, whose may be as narrow as terminals begin
    return console if console.is_terminal else Console(width=80)


def _say(line: str) -> None:
    typer.echo(line)
