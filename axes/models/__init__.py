"""Models assembled from the catalogue."""

from axes.models.deep_narrow import DeepNarrow
from axes.models.language_model import Architecture, LanguageModel, LayerStates, Logits, Trunk, state_bytes
from axes.models.loss import linear_cross_entropy

__all__ = [
    "Architecture", "DeepNarrow", "LanguageModel", "LayerStates", "Logits", "Trunk", "linear_cross_entropy",
    "state_bytes",
]  # fmt: skip
