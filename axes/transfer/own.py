"""An experiment of one's own: a tuple of one's own module beside a system of the catalogue."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from axes import catalogue
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, UnknownName
from axes.moves import Axis, differences, retarget
from axes.transfer.experiments import TASKS, Experiment


def own(
    update: StateUpdate, axis: Axis, against: str | StateUpdate, tasks: tuple[str, ...] = (), name: str = "own",
    margin: float = 0.02,
) -> Experiment:  # fmt: skip
    """A tuple tried on an axis beside another one.

    Args:
        update: the arm; `retarget` gives it a meaning on the axis.
        axis: "data", "sequence" or "depth".
        against: the control: a name of the catalogue, or a tuple. Of a name the arm also takes the layer's block.
        tasks: what both are trained on; by default the axis's first.

    Raises:
        AxesError: the tuple has no meaning on the axis (with the reason), the two are equal, an unknown name.

    >>> from axes.optim import SGD
    >>> experiment = own(SGD.declare(momentum=0.9), "sequence", "gated-delta-net-prev")
    >>> [difference.path for difference in experiment.moved]
    ['algorithm.via']
    """
    arm = retarget(update, axis)
    block = None
    if isinstance(against, str):
        entry = catalogue.get(against)
        block = getattr(entry.cls, "block", None) if entry.axis == axis == "sequence" else None
        against = entry.update
    control = retarget(against, axis)
    without = tuple((d.path, d.second) for d in differences(arm, control))
    if not without:
        raise AxesError(f"{name}: the tuple is that of its control, so nothing moved: give another --against")
    for task in tasks:
        if task not in TASKS[axis]:
            raise UnknownName(f"task of {axis}", task, TASKS[axis])
    return Experiment(
        name, f"does {name} help on the axis {axis}?", name, axis, arm, without, tasks or TASKS[axis][:1], margin, block
    )


def tuple_of(spec: str) -> StateUpdate:
    """The tuple at module:name, the working directory first. Raises AxesError with what is there instead."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise AxesError(f"--update takes module:tuple, as mine:UPDATE of a mine.py here, got {spec!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise AxesError(f"--update {spec}: cannot import {module}: {error}") from None
    except Exception as error:  # of somebody's own module, whose line it is that counts
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({last.filename}, line {last.lineno})" * (not isinstance(error, SyntaxError))  # which says its own
        raise AxesError(f"--update {spec}: importing {module} raises {type(error).__name__}: {error}{where}") from error
    if not hasattr(found, name):
        tuples = [n for n, value in vars(found).items() if isinstance(value, StateUpdate)]
        raise UnknownName(f"tuple of {module}", name, tuples)
    value = getattr(found, name)
    if not isinstance(value, StateUpdate):
        raise AxesError(f"--update {spec}: {name} is a {type(value).__name__}, not a StateUpdate")
    return value
