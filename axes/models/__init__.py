"""Models assembled from the catalogue."""

from axes.models.deep_narrow import DeepNarrow
from axes.models.language_model import Architecture, LanguageModel, Logits, state_bytes
from axes.models.loss import linear_cross_entropy

__all__ = ["Architecture", "DeepNarrow", "LanguageModel", "Logits", "linear_cross_entropy", "state_bytes"]
