"""Language models of the catalogue as transformers knows models; importing this registers them with its Auto classes.

    AutoModelForCausalLM.from_config(AxesConfig(sequence=["gated-delta-net", "softmax-attention"], num_hidden_layers=2))

Raises MissingExtra on import where transformers is not installed.
"""

from axes.integrations.transformers.cache import AxesCache
from axes.integrations.transformers.config import AxesConfig
from axes.integrations.transformers.export import byte_tokenizer, export, from_language_model
from axes.integrations.transformers.model import AxesForCausalLM, AxesModel, AxesPreTrainedModel, register

__all__ = [
    "AxesCache",
    "AxesConfig",
    "AxesForCausalLM",
    "AxesModel",
    "AxesPreTrainedModel",
    "byte_tokenizer",
    "export",
    "from_language_model",
]

register()
