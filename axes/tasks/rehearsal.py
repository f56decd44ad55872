"""The kernels of a training step, compiled side by side before the first one.

A twin of the model takes a step in which no kernel runs (`axes.kernels.common.ahead`): what it asks for is what the
first step will ask for. Parameters, optimizer states and generators of the run are not touched, and the twin is gone
before the first step; it needs the memory of one more set of parameters.
"""

from __future__ import annotations

import torch

from axes.errors import AxesError
from axes.kernels.common import versions
from axes.kernels.common.ahead import Ahead, Rehearsal
from axes.models.language_model import Logits
from axes.tasks.batches import training_batch
from axes.tasks.training import Training, make_optimizer


def rehearse(training: Training) -> Rehearsal | None:
    """None where a step has no kernels to compile: on a CPU, without Triton, and where nobody rehearses, in processes
    that share a model."""
    if training.processes is not None or training.device.type != "cuda" or versions.UNUSABLE is not None:
        return None
    return compile_ahead(training, Ahead(training.device))


def compile_ahead(training: Training, ahead: Ahead) -> Rehearsal:
    settings, device = training.configuration, training.device
    rehearsal = Rehearsal(ahead)
    windows = training_batch(training.corpus.train, settings.seed, 0, settings.batch, settings.context)
    part = windows.chunk(settings.accumulate)[0].to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            twin = settings.model(device)
            optimizer = make_optimizer(settings, Logits(twin))
            with ahead:
                training.loss_of(twin, part).backward()
                optimizer.step()
        except torch.OutOfMemoryError:
            rehearsal.missed = "the memory holds no second copy of the model"
        except (RuntimeError, ArithmeticError, AxesError) as error:  # of numbers that mean nothing
            rehearsal.missed = (str(error).splitlines() or [type(error).__name__])[0]
    return rehearsal
