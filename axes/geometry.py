"""Generating functions h, by the name that user code imports."""

from axes.core.geometry import *  # noqa: F403
from axes.core.geometry import __all__ as __all__
