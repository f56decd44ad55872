"""The main job: train a byte-level language model into a run folder, from the start or from its checkpoint."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, final

import torch

from axes import __version__
from axes.errors import AxesError
from axes.files import write_json
from axes.tasks.configuration import Configuration, configuration_from_dict
from axes.tasks.corpus import unigram_cross_entropy, unigram_entropy
from axes.tasks.curve import Curve, draw_curves
from axes.tasks.run_folder import Record, RunFolder
from axes.tasks.summary import Summary
from axes.tasks.training import Training


class Observer(Protocol):
    """Who watches a run: a progress bar, or nobody."""

    def began(self, training: Training, folder: RunFolder) -> None:
        """Before the first step, or after a checkpoint was loaded."""

    def stepped(self, record: Record) -> None:
        """After each step."""

    def evaluated(self, record: Record) -> None:
        """After each evaluation."""


@final
class Unobserved:
    """An observer that does nothing."""

    def began(self, training: Training, folder: RunFolder) -> None: ...

    def stepped(self, record: Record) -> None: ...

    def evaluated(self, record: Record) -> None: ...


def never() -> bool:
    return False


def start(configuration: Configuration, folder: RunFolder, overwrite: bool = False) -> Training:
    """A new run: the folder with its configuration and the checkpoint of step 0, held until `run` ends.

    The text is read and the model built before the folder is touched, so a refused setting leaves nothing behind; a run
    that is overwritten stands until all of the new one is on the disk.
    """
    training = Training(configuration, configuration.corpus())
    with folder.beginning(overwrite) as new:
        new.write_config(
            {
                "configuration": configuration.as_dict(),
                "learning_rate": configuration.learning_rate(),
                "device": str(training.device),
                "parameters": training.parameters,
                "corpus": {
                    **asdict(training.corpus.provenance),
                    "unigram_entropy": unigram_entropy(training.corpus.validation),
                    "unigram_cross_entropy": unigram_cross_entropy(training.corpus.train, training.corpus.validation),
                },
                "versions": {"axes": __version__, "python": platform.python_version(), "torch": torch.__version__},
            }
        )
        write_json(new.tuples, training.tuples())
        new.write_checkpoint(training.state_dict())
    return training


def resume(folder: RunFolder, steps: int | None = None) -> Training:
    """A run as its checkpoint left it, the folder held until `run` ends.

    Args:
        steps: where it ends now, a finished run too; rates are those of the schedule over so many steps from here on.

    Raises:
        AxesError: no such run, a damaged or foreign file, a text that has changed, another process that writes there,
            fewer steps than were taken.
    """
    read_configuration(folder)  # nothing is put into a folder that is no run's
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
    observer.began(training, folder)
    while not training.finished and not stop():
        begun = time.perf_counter()
        measured = training.step()
        record = {"step": training.position, **measured, "seconds": time.perf_counter() - begun}
        folder.append(record)
        observer.stepped(record)
        if training.finished or _due(training.position, settings.eval_every):
            evaluation = {
                "step": training.position,
                "validation_bits_per_byte": training.validation_bits_per_byte(),
            }
            folder.append(evaluation)
            observer.evaluated(evaluation)
        if training.finished or _due(training.position, settings.save_every):
            _save(training, folder)


def _finish(training: Training, folder: RunFolder) -> None:
    if training.saved != training.position:
        _save(training, folder)
    draw(folder)


def _due(position: int, every: int) -> bool:
    return every > 0 and position % every == 0


def _save(training: Training, folder: RunFolder) -> None:
    training.require_finite_parameters()
    folder.write_checkpoint(training.state_dict())
    training.saved = training.position


def summarise(training: Training, folder: RunFolder) -> Summary:
    """The numbers of a run, from its log and its model."""
    settings = training.configuration
    records = folder.read_metrics()
    seconds = [record["seconds"] for record in records if "seconds" in record]
    evaluations = [record["validation_bits_per_byte"] for record in records if "validation_bits_per_byte" in record]
    per_step = settings.batch * settings.context
    return Summary(
        name=settings.name,
        finished=training.finished,
        steps=training.position,
        tokens=training.position * per_step,
        validation_bits_per_byte=evaluations[-1] if evaluations else None,
        unigram_bits_per_byte=unigram_entropy(training.corpus.validation),
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
