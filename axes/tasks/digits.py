"""scikit-learn's 1,797 handwritten digits, the optional extra `digits`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from axes.errors import AxesError


class Digits(NamedTuple):
    """Images (N, 64) in [0, 1] and their labels (N,), then those held out: every fifth."""

    images: Tensor
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor


def has_digits() -> bool:
    """Whether scikit-learn, which brings the digits, is installed."""
    return importlib.util.find_spec("sklearn") is not None


@functools.cache
def digits() -> Digits:
    """The digits. Raises AxesError without scikit-learn."""
    if not has_digits():
        raise AxesError("the digits need scikit-learn: pip install scikit-learn, or the extra `digits` of this package")
    found = importlib.import_module("sklearn.datasets").load_digits()
    images, labels = torch.from_numpy(found.data).float() / 16.0, torch.from_numpy(found.target).long()
    held = torch.arange(len(labels)) % 5 == 4
    return Digits(images[~held], labels[~held], images[held], labels[held])
