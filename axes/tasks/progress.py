"""A run as people watch it: a bar on a terminal, one line per evaluation everywhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from axes.tasks.run_folder import Record, RunFolder
from axes.tasks.training import Training

_SMOOTHING = 0.9


@final
class ProgressBar:
    """Shows step, loss, bits per byte, tokens per second, MFU and time left; an `Observer` and a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[bits]} bits/byte  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._steps, self._tokens_per_step = 0, 0
        self._bits: float | None = None
        self._speed: float | None = None
        self._share: float | None = None  # of the device's peak
        self._begun = time.monotonic()

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def began(self, training: Training, folder: RunFolder) -> None:
        settings = training.configuration
        self._steps, self._tokens_per_step = settings.steps, settings.batch * settings.context
        self._bits, self._speed, self._begun = None, None, time.monotonic()
        on = (
            f"{training.device}"
            if training.processes is None
            else f"{training.processes.size} x {training.device.type}"
        )
        where = f"continuing {folder} at step {training.position}" if training.position else f"in {folder}"
        self._print(f"{settings.name}: {training.parameters:,} parameters on {on}, {where}")
        self._print(str(training.corpus.provenance))
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(
            "training", total=settings.steps, completed=training.position, loss="-", bits="-", speed="-"
        )

    def prepares(self, what: str) -> None:
        self._print(what)

    def stepped(self, record: Record) -> None:
        speed = self._tokens_per_step / record["seconds"]
        self._speed = speed if self._speed is None else _SMOOTHING * self._speed + (1 - _SMOOTHING) * speed
        self._share = self._speed / speed * record["mfu"] if "mfu" in record else None
        bits = record["bits_per_byte"]
        self._bits = bits if self._bits is None else _SMOOTHING * self._bits + (1 - _SMOOTHING) * bits
        if self._task is not None:
            self._bar.update(
                self._task,
                completed=record["step"],
                loss=f"{record['loss']:.3f}",
                bits=f"{self._bits:.3f}",
                speed=self._rate(),
            )

    def evaluated(self, record: Record) -> None:
        elapsed = time.monotonic() - self._begun
        training = f"{self._bits:.3f}" if self._bits is not None else "-"
        speed = self._rate()
        self._print(
            f"step {record['step']:>{len(str(self._steps))}}/{self._steps}  training {training}  "
            f"validation {record['validation_bits_per_byte']:.3f} bits/byte  {speed}  {elapsed:.0f} s"
        )

    def _rate(self) -> str:
        speed = f"{self._speed:,.0f} tokens/s" if self._speed is not None else "- tokens/s"
        return speed if self._share is None else f"{speed}  {self._share:.1%} MFU"

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
