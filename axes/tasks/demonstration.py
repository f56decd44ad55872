"""The demonstration: the three axes at once against their control, on the same text and the same tokens.

Finished runs are kept and a stopped one is continued, so the demonstration can be interrupted and started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from axes.errors import AxesError
from axes.files import replacing, write_json
from axes.tasks.configuration import Configuration
from axes.tasks.curve import draw_curves
from axes.tasks.language_modelling import Observer, curve_of, never, read_configuration, resume, run, start
from axes.tasks.run_folder import RunFolder
from axes.tasks.summary import Summary

# the one place for the sizes of the demonstration: both runs see the same windows in the same order
_SIZES = {
    "layers": 2,
    "width": 128,
    "heads": 4,
    "context": 128,
    "batch": 8,
    "steps": 600,
    "warmup": 20,
    "seed": 0,
    "threads": 1,  # the matrices are small: a second thread gains little, and waits long on a busy machine
    "validation_windows": 128,
    "eval_every": 100,
    "save_every": 50,
}


PROMPT = "def "


def configurations() -> tuple[Configuration, Configuration]:
    """The run and its control."""
    return (
        Configuration(sequence="gated-delta-net", optimizer="muon", depth="mhc", **_SIZES),  # type: ignore[arg-type]
        # the best rate for the control among 1e-3, 2e-3, 3e-3 and 1e-2
        Configuration(sequence="softmax-attention", optimizer="adamw", depth="residual", lr=2e-3, **_SIZES),  # type: ignore[arg-type]
    )


def folder_of(configuration: Configuration, out: Path) -> RunFolder:
    return RunFolder(out / f"{configuration.sequence}-{configuration.optimizer}-{configuration.depth}")


def demonstrate(
    configurations: Sequence[Configuration],
    out: Path,
    observer: Observer | None = None,
    stop: Callable[[], bool] = never,
    overwrite: bool = False,
) -> list[Summary]:
    """Train each configuration; the last summary is unfinished if `stop` came first.

    Raises:
        AxesError: a folder below `out` holds a run with other settings.
    """
    summaries: list[Summary] = []
    for configuration in configurations:
        folder = folder_of(configuration, out)
        if folder.checkpoint.exists() and not overwrite:
            if read_configuration(folder) != configuration:
                raise AxesError(f"{folder} holds a run with other settings: replace it with --overwrite")
            training = resume(folder)
        else:
            # a folder without a checkpoint was stopped before its first step
            training = start(configuration, folder, overwrite=overwrite or folder.config.exists())
        summaries.append(run(training, folder, observer, stop))
        if not summaries[-1].finished:
            return summaries
    write_json(out / "comparison.json", [asdict(summary) for summary in summaries])
    with replacing(out / "comparison.png") as temporary:
        draw_curves([curve_of(folder_of(configuration, out)) for configuration in configurations], temporary)
    return summaries
