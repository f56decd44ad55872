"""Models assembled from the catalogue."""

from axes.models.language_model import Architecture, LanguageModel, Logits, state_bytes

__all__ = ["Architecture", "LanguageModel", "Logits", "state_bytes"]
