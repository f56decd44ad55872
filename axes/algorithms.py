"""Algorithms, by the name that user code imports."""

from axes.core.algorithms import *  # noqa: F403
from axes.core.algorithms import __all__ as __all__
