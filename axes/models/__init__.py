"""Models assembled from the catalogue."""

from axes.models.language_model import Architecture, LanguageModel, state_bytes

__all__ = ["Architecture", "LanguageModel", "state_bytes"]
