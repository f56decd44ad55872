"""Memories, by the name that user code imports."""

from axes.core.memory import *  # noqa: F403
from axes.core.memory import __all__ as __all__
