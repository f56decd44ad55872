"""Observers that pass a run's numbers on: to TensorBoard's files, or to Weights & Biases."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from axes.errors import AxesError, UnknownName
from axes.tasks.configuration import TRACKERS
from axes.tasks.language_modelling import Observer
from axes.tasks.run_folder import Record, RunFolder
from axes.tasks.training import Training


@final
class Several:
    """Observers that all watch."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def began(self, training: Training, folder: RunFolder) -> None:
        for observer in self.observers:
            observer.began(training, folder)

    def prepares(self, what: str) -> None:
        for observer in self.observers:
            observer.prepares(what)

    def stepped(self, record: Record) -> None:
        for observer in self.observers:
            observer.stepped(record)

    def evaluated(self, record: Record) -> None:
        for observer in self.observers:
            observer.evaluated(record)


@final
class TensorBoard:
    """Event files in the run folder's `tensorboard`; steps that a resumed run repeats replace those there."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def began(self, training: Training, folder: RunFolder) -> None:
        self._writer = self._make(str(folder.path / "tensorboard"), purge_step=training.position + 1)
        atexit.register(self._writer.close)  # a run that is stopped has steps behind its last evaluation

    def prepares(self, what: str) -> None: ...

    def stepped(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def evaluated(self, record: Record) -> None:
        self.stepped(record)
        self._writer.flush()


@final
class WeightsAndBiases:
    """A run of wandb, which a resumed run continues; its project and mode are wandb's own settings."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        self._wandb: Any = wandb
        self._run: Any = None

    def began(self, training: Training, folder: RunFolder) -> None:
        known = hashlib.sha256(str(Path(folder.path).resolve()).encode()).hexdigest()[:16]
        self._run = self._wandb.init(
            id=known,
            resume="allow",
            name=folder.path.name,
            dir=str(folder.path),
            config=training.configuration.as_dict(),
        )

    def prepares(self, what: str) -> None: ...

    def stepped(self, record: Record) -> None:
        self._run.log({name: x for name, x in record.items() if name != "step"}, step=record["step"])

    def evaluated(self, record: Record) -> None:
        self.stepped(record)


def tracker(name: str) -> Observer:
    """Raises AxesError if the library is not installed."""
    if name not in TRACKERS:
        raise UnknownName("tracker", name, TRACKERS)
    return TensorBoard() if name == "tensorboard" else WeightsAndBiases()


def _missing(library: str) -> AxesError:
    return AxesError(f"--track {library} needs the library {library}: pip install 'axes-state-update[{library}]'")
