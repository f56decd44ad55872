"""transformers, or one sentence that says how to install it."""

from axes.integrations.extras import require_extra

require_extra("axes.integrations.transformers", "transformers", "transformers")

import transformers  # noqa: E402
from transformers import initialization  # noqa: E402  # no attribute of `transformers` once a model has been looked up
from transformers.cache_utils import Cache  # noqa: E402
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast  # noqa: E402

__all__ = ["BaseModelOutputWithPast", "Cache", "CausalLMOutputWithPast", "initialization", "transformers"]
