"""The main job: train a language model into a run folder, from the start or from its checkpoint."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, final

import torch

from axes import __version__
from axes.errors import AxesError
from axes.files import write_json
from axes.tasks import shards
from axes.tasks.configuration import Configuration, configuration_from_dict
from axes.tasks.corpus import Corpus, unigram_cross_entropy, unigram_entropy
from axes.tasks.curve import Curve, draw_curves
from axes.tasks.processes import Processes, agreed
from axes.tasks.rehearsal import rehearse
from axes.tasks.run_folder import Record, RunFolder
from axes.tasks.summary import Summary
from axes.tasks.training import Training


class Observer(Protocol):
    """Who watches a run: a progress bar, or nobody."""

    def began(self, training: Training, folder: RunFolder) -> None:
        """Before the first step, or after a checkpoint was loaded."""

    def prepares(self, what: str) -> None:
        """Before the first step, where something takes long."""

    def stepped(self, record: Record) -> None:
        """After each step."""

    def evaluated(self, record: Record) -> None:
        """After each evaluation."""


@final
class Unobserved:
    """An observer that does nothing."""

    def began(self, training: Training, folder: RunFolder) -> None: ...

    def prepares(self, what: str) -> None: ...

    def stepped(self, record: Record) -> None: ...

    def evaluated(self, record: Record) -> None: ...


def never() -> bool:
    return False


def start(
    configuration: Configuration, folder: RunFolder, overwrite: bool = False, processes: Processes | None = None
) -> Training:
    """A new run: the folder with its configuration and the checkpoint of step 0, held until `run` ends.

    The text is read and the model built before the folder is touched, so a refused setting leaves nothing behind; a run
    that is overwritten stands until all of the new one is on the disk.
    """
    corpus = configuration.corpus() if processes is None else _corpus(configuration)
    training = Training(configuration, corpus, processes)
    training.rehearsal = rehearse(training)  # kernels are compiled while the folder is written

    def begin() -> None:
        new = until_whole.enter_context(folder.beginning(overwrite))
        new.write_config(_said(training))
        write_json(new.tuples, training.tuples())

    def first_does(what: Callable[[], None]) -> None:
        what() if processes is None else processes.first_does(what)

    with ExitStack() as until_whole:
        first_does(begin)
        _write(training, folder.next)
        first_does(until_whole.close)
    return training


def _said(training: Training) -> Record:
    """What `config.json` holds."""
    configuration, corpus = training.configuration, training.corpus
    return {
        "configuration": configuration.as_dict(),
        "learning_rate": configuration.learning_rate(),
        "device": str(training.device),
        "processes": 1 if training.processes is None else training.processes.size,
        "parameters": training.parameters,
        "flops_per_token": training.flops_per_token,
        "corpus": {
            **asdict(corpus.provenance),
            "unigram_entropy": _unigram_bits(corpus),
            "unigram_cross_entropy": unigram_cross_entropy(corpus.train, corpus.validation, corpus.vocabulary)
            / corpus.bytes_per_token,
        },
        "versions": {"axes": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }


def _unigram_bits(corpus: Corpus) -> float:
    """Per byte, of what is validated on."""
    return unigram_entropy(corpus.validation, corpus.vocabulary) / corpus.bytes_per_token


def resume(folder: RunFolder, steps: int | None = None, processes: Processes | None = None) -> Training:
    """A run as its checkpoint left it, the folder held until `run` ends.

    Args:
        steps: where it ends now, a finished run too; rates are those of the schedule over so many steps from here on.

    Raises:
        AxesError: no such run, a damaged or foreign file, a text that has changed, another process that writes there,
            fewer steps than were taken; a checkpoint of several processes for one alone, or the other way round.
    """
    configuration = read_configuration(folder)  # nothing is put into a folder that is no run's
    if processes is not None:
        return _resume_together(folder, configuration, steps, processes)
    if not folder.checkpoint.is_file() and shards.latest(folder.path) is not None:
        raise AxesError(
            f"{folder} was saved by processes of torchrun: continue it under torchrun, with any number of processes "
            f"(torchrun --nproc-per-node 1 -m axes train --resume {folder})"
        )
    folder.hold()
    try:
        configuration = read_configuration(folder)
        state = folder.read_checkpoint()
        if not _is_of(state, configuration):
            raise AxesError(f"{folder.checkpoint} belongs to another configuration than {folder.config}")
        training = Training(configuration, configuration.corpus())
        training.load_state_dict(state)
        if steps is not None and steps != configuration.steps:
            training.end_after(steps)
            with folder.changing() as new:
                new.write_config({**folder.read_config(), "configuration": training.configuration.as_dict()})
                new.write_checkpoint(training.state_dict())
        folder.rewind_metrics(training.position)
    except BaseException:
        folder.release()
        raise
    return training


def _resume_together(
    folder: RunFolder, configuration: Configuration, steps: int | None, processes: Processes
) -> Training:
    processes.first_does(folder.hold)
    try:
        place = agreed(lambda: _place(folder), lambda place: {"checkpoint": str(place)})
        numbers = shards.numbers_of(place, processes.rank)
        if not _is_of({"configuration": {**numbers["configuration"], "steps": configuration.steps}}, configuration):
            raise AxesError(f"{place} belongs to another configuration than {folder.config}")
        training = Training(configuration, _corpus(configuration), processes)
        sharded = training.sharded()
        shards.read(place, sharded)
        training.load_sharded(sharded, numbers)
        if steps is not None and steps != configuration.steps:
            training.end_after(steps)
            _write(training, folder)
            config = {**folder.read_config(), "configuration": training.configuration.as_dict()}
            processes.first_does(lambda: folder.write_config(config))
        processes.first_does(lambda: folder.rewind_metrics(training.position))
    except BaseException:
        folder.release()
        raise
    return training


def _place(folder: RunFolder) -> Path:
    place = shards.latest(folder.path)
    if place is None and folder.checkpoint.is_file():
        raise AxesError(f"{folder} was saved by one process: continue it without torchrun")
    if place is None:
        raise AxesError(f"{folder} has no checkpoint: begin it again with --overwrite")
    return place


def _corpus(configuration: Configuration) -> Corpus:
    """The same on all processes."""
    return agreed(configuration.corpus, lambda corpus: {"text": str(corpus.provenance)})


def _is_of(state: Record, configuration: Configuration) -> bool:
    """Whether a checkpoint is of a configuration; one of an earlier version lacks settings that there are since."""
    settings = state.get("configuration")
    try:
        return isinstance(settings, dict) and configuration_from_dict(settings) == configuration
    except AxesError:
        return False


def read_configuration(folder: RunFolder) -> Configuration:
    settings = folder.read_config().get("configuration")
    if not isinstance(settings, dict):
        raise AxesError(f"{folder.config} holds no configuration")
    try:
        return configuration_from_dict(settings)
    except AxesError as error:
        raise AxesError(f"{folder.config}: {error}") from None


def run(
    training: Training,
    folder: RunFolder,
    observer: Observer | None = None,
    stop: Callable[[], bool] = never,
) -> Summary:
    """Train to the last step or until `stop`, and leave a checkpoint, the log and the curve either way.

    An observer that cannot go on (a pipe that nobody reads, a terminal that is gone) ends the run as `stop` does, and
    its exception is raised when all is saved.
    """
    if training.leads:
        folder.hold()
    training.saved = training.position
    try:
        try:
            _steps(training, folder, observer if observer is not None else Unobserved(), stop)
        except (OSError, SystemExit):
            _finish(training, folder)
            raise
        _finish(training, folder)
        return summarise(training, folder)
    finally:
        folder.release()


def _steps(training: Training, folder: RunFolder, observer: Observer, stop: Callable[[], bool]) -> None:
    settings = training.configuration
    observer = observer if training.leads else Unobserved()
    observer.began(training, folder)
    _prepare(training, observer)
    while not training.finished and not _asked(stop, training):
        begun = time.perf_counter()
        measured = training.step()
        seconds = time.perf_counter() - begun
        record = {"step": training.position, **measured, "seconds": seconds, **training.throughput(seconds)}
        _append(training, folder, record)
        observer.stepped(record)
        if training.finished or _due(training.position, settings.eval_every):
            evaluation = {
                "step": training.position,
                "validation_bits_per_byte": training.validation_bits_per_byte(),
            }
            _append(training, folder, evaluation)
            observer.evaluated(evaluation)
        if training.finished or _due(training.position, settings.save_every):
            _save(training, folder)


def _prepare(training: Training, observer: Observer) -> None:
    """Until the kernels of a step are compiled."""
    rehearsal = training.rehearsal or rehearse(training)
    training.rehearsal = None
    if training.finished:
        return
    if rehearsal is not None:
        observer.prepares(str(rehearsal))
        observer.prepares(rehearsal.wait())
    if training.configuration.compile:
        observer.prepares("torch.compile: the first step compiles the model, which may take minutes")


def _finish(training: Training, folder: RunFolder) -> None:
    if training.saved != training.position:
        _save(training, folder)
    if training.processes is None:
        draw(folder)
    else:
        training.processes.first_does(lambda: draw(folder))


def _asked(stop: Callable[[], bool], training: Training) -> bool:
    """Whether any process is asked to stop: all save then, at the same step."""
    return stop() if training.processes is None else training.processes.any(stop())


def _append(training: Training, folder: RunFolder, record: Record) -> None:
    if training.leads:
        folder.append(record)


def _due(position: int, every: int) -> bool:
    return every > 0 and position % every == 0


def _save(training: Training, folder: RunFolder) -> None:
    training.require_finite_parameters()
    _write(training, folder)
    training.saved = training.position


def _write(training: Training, folder: RunFolder) -> None:
    if training.processes is None:
        folder.write_checkpoint(training.state_dict())
    else:
        shards.write(
            folder.path, training.processes, training.sharded(), training.numbers(), training.generators()
        )  # fmt: skip


def summarise(training: Training, folder: RunFolder) -> Summary:
    """The numbers of a run, from its log and its model."""
    settings = training.configuration
    records = folder.read_metrics()
    seconds = [record["seconds"] for record in records if record.get("seconds", 0) > 0]
    evaluations = [record["validation_bits_per_byte"] for record in records if "validation_bits_per_byte" in record]
    per_step = settings.batch * settings.context
    return Summary(
        name=settings.name,
        finished=training.finished,
        steps=training.position,
        tokens=training.position * per_step,
        validation_bits_per_byte=evaluations[-1] if evaluations else None,
        unigram_bits_per_byte=_unigram_bits(training.corpus),
        tokens_per_second=per_step / statistics.median(seconds) if seconds else 0.0,
        seconds=sum(seconds),
        parameters=training.parameters,
        state_bytes=training.state_bytes(),
    )


def draw(folder: RunFolder) -> None:
    """`curve.png` from the log."""
    curve = curve_of(folder)

    def figure(path: Path) -> None:
        draw_curves([curve], path)

    folder.draw(figure)


def curve_of(folder: RunFolder) -> Curve:
    config = folder.read_config()
    settings = configuration_from_dict(config["configuration"])
    records = folder.read_metrics()
    return Curve(
        name=settings.name,
        steps=tuple(record["step"] for record in records if "bits_per_byte" in record),
        training=tuple(record["bits_per_byte"] for record in records if "bits_per_byte" in record),
        evaluated=tuple(record["step"] for record in records if "validation_bits_per_byte" in record),
        validation=tuple(
            record["validation_bits_per_byte"] for record in records if "validation_bits_per_byte" in record
        ),
        unigram=_unigram(folder, config),
    )


def _unigram(folder: RunFolder, config: Mapping[str, Any]) -> float:
    try:
        return float(config["corpus"]["unigram_entropy"])
    except (KeyError, TypeError, ValueError):
        raise AxesError(f"{folder.config} is damaged: it does not say the unigram entropy of its corpus") from None
