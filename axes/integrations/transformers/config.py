"""An `Architecture` by the names that transformers has for its numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from axes.integrations.transformers.library import transformers
from axes.models import Architecture


class AxesConfig(transformers.PreTrainedConfig):  # its dataclass is made by transformers, which passes names
    """What a model is made of.

    Args:
        sequence: a sequence layer of the catalogue (`axes list --axis sequence`) for all layers, or a list with one
            for each.
        depth: the depth mixer (`axes list --axis depth`).
        num_hidden_layers, hidden_size, num_attention_heads, vocab_size, streams, recompute: of the `Architecture`,
            where they are layers, width, heads and vocabulary.
        tie_word_embeddings: the head is the embedding.
        use_cache: return the states after the last token when not training.

    Raises: AxesError for names and numbers that `Architecture` refuses.
    """

    model_type = "axes"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    sequence: str | list[str] = "gated-delta-net"
    depth: str = "mhc"
    num_hidden_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    streams: int = 4
    vocab_size: int = 256
    recompute: int = 0
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.sequence, str):
            self.sequence = list(self.sequence)  # as JSON has it
        super().__post_init__(**kwargs)
        self.architecture()

    def architecture(self) -> Architecture:
        """What `axes.models` builds."""
        return Architecture(
            self.sequence if isinstance(self.sequence, str) else tuple(self.sequence),
            self.depth,
            self.num_hidden_layers,
            self.hidden_size,
            self.num_attention_heads,
            self.streams,
            self.vocab_size,
            self.recompute,
        )

    @classmethod
    def of(cls, architecture: Architecture, **others: Any) -> AxesConfig:
        """The configuration of what `axes.models` built."""
        a = architecture
        return cls(
            sequence=a.sequence if isinstance(a.sequence, str) else list(a.sequence),
            depth=a.depth,
            num_hidden_layers=a.layers,
            hidden_size=a.width,
            num_attention_heads=a.heads,
            streams=a.streams,
            vocab_size=a.vocabulary,
            recompute=a.recompute,
            **others,
        )
