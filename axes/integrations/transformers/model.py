"""`axes.models`' language model with the calls that transformers makes: masks, caches, labels, checkpoints of files.

Two things go wrong with a recurrent memory and are refused or done here: a token that is padding must not be written
(no sequence layer is shown it), and a token that was written must not be written again (an attention mask counts what
the cache has seen).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from axes.depth.base import Streams
from axes.errors import AxesError, ShapeError
from axes.integrations.transformers.cache import AxesCache
from axes.integrations.transformers.config import AxesConfig
from axes.integrations.transformers.library import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    initialization,
    transformers,
)
from axes.models import Trunk
from axes.models.language_model import Block

_TABLES = ("lm_head.weight", "trunk.embedding.weight")


class AxesPreTrainedModel(transformers.PreTrainedModel):
    """Loading, saving and initialising of either model."""

    config_class = AxesConfig
    config: AxesConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["AxesModel"]  # mixers have calls that no hook of accelerate sees
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _is_stateful = True  # transformers then refuses what takes tokens back (assisted generation)

    def initialize_weights(self) -> None:
        """Construction initialises layers and mixers; a file that lacks their weights is of another model.

        Raises: AxesError for such a file; a head may be missing, and is drawn.
        """
        numbers = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        missing = [name for name, x in numbers.items() if not getattr(x, "_is_hf_initialized", False)]
        lacking = [name for name in missing if not name.endswith(_TABLES)]
        if lacking and len(missing) < len(numbers):
            raise AxesError(
                f"{type(self).__name__}: the file lacks {len(lacking)} of {len(numbers)} weights, {lacking[0]} among "
                f"them: it is of another model than {self.config.architecture()}"
            )
        super().initialize_weights()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            tied = self.config.tie_word_embeddings  # logits of unit variance, from rows that streams begin with
            initialization.normal_(module.weight, std=1 / math.sqrt(self.config.hidden_size) if tied else 1.0)
        elif module is getattr(self, "lm_head", None):
            initialization.normal_(module.weight, std=1 / self.config.hidden_size)


@final
class AxesModel(AxesPreTrainedModel):
    """What a head reads: `axes.models.Trunk`."""

    def __init__(self, config: AxesConfig) -> None:
        super().__init__(config)
        self.trunk = Trunk(config.architecture())
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.trunk.embedding = value
        self.trunk.architecture = replace(self.trunk.architecture, vocabulary=value.weight.shape[0])

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AxesCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The last hidden states.

        Args:
            input_ids: (B, T), or inputs_embeds (B, T, width) instead.
            attention_mask: (B, P + T), 1 at real tokens, where the cache has seen P positions.
            position_ids: with B = 1, no mask and no cache, another sequence begins wherever they do not go on by one;
                else they are not needed, and not read.
            past_key_values: an `AxesCache`, which is moved on; made if there is none and use_cache is true.
            output_hidden_states: also the embedding and what the streams reduce to behind every layer, the last one
                normalised.
            cu_seq_lens_q: boundaries of sequences packed into B = 1.

        Raises: AxesError or ShapeError for a cache of another kind, and for a mask that does not count what the
            cache has seen.
        """
        if kwargs.get("output_attentions"):
            raise AxesError("AxesModel: output_attentions: sequence layers make no matrix of attention weights")
        if (input_ids is None) == (inputs_embeds is None):
            raise AxesError("AxesModel: give input_ids or inputs_embeds, and not both")
        x = self.trunk.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        batch, time = x.shape[:2]
        cache = self._cache(past_key_values, use_cache, batch)
        mask = self._mask(attention_mask, batch, time, cache)
        if cu_seq_lens_q is None and mask is None and attention_mask is None and cache is None:
            cu_seq_lens_q = _boundaries(position_ids, batch, time)
        if cu_seq_lens_q is not None and cache is not None:
            raise AxesError("AxesModel: packed sequences are for training: give use_cache=False with them")
        seen: list[Tensor] = [x]
        watching = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        before = None if cache is None else cache.states
        hidden, states = self.trunk.hidden(
            x,
            before,
            mask,
            cu_seq_lens_q,
            recurrent=time == 1 and before is not None and mask is None,
            around=self._around(seen if watching else None),
        )
        if cache is not None:
            cache.keep(states, batch, time)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*seen[:-1], hidden) if watching else None,
        )
        dictionary = self.config.return_dict if return_dict is None else return_dict
        return output if dictionary else output.to_tuple()

    def _cache(self, given: Any, use_cache: bool | None, batch: int) -> AxesCache | None:
        use = use_cache if use_cache is not None else given is not None or self.config.use_cache and not self.training
        if not use or (self.gradient_checkpointing and self.training):
            if given is not None and given.get_seq_length():
                raise AxesError(
                    "AxesModel: past_key_values holds tokens; with use_cache=False nothing goes on from them"
                )
            return None
        cache = AxesCache() if given is None else given
        if not isinstance(cache, AxesCache):
            raise AxesError(
                f"AxesModel: past_key_values is an AxesCache, as an earlier call returned it, not a "
                f"{type(cache).__name__}: leave it out to begin one"
            )
        if cache.states is not None and cache.sequences != batch:
            raise ShapeError(f"AxesModel: past_key_values holds {cache.sequences} sequences, the input {batch}")
        return cache

    def _mask(self, given: Tensor | None, batch: int, time: int, cache: AxesCache | None) -> Tensor | None:
        """(B, T) if a sequence layer must be told of padding, None if not."""
        if given is None:
            return None
        seen = 0 if cache is None else cache.length
        if given.shape != (batch, seen + time):
            raise ShapeError(
                f"AxesModel: attention_mask must be {(batch, seen + time)}, for the {seen} positions that "
                f"past_key_values has seen and {time} new ones, got {tuple(given.shape)}: give new tokens alone, each "
                "once, and a mask of all"
            )
        mask = given[:, seen:].bool()
        behind = cache is None and bool((mask[:, 1:] <= mask[:, :-1]).all())  # nothing real comes after padding
        return None if behind or bool(mask.all()) else mask

    def _around(self, seen: list[Tensor] | None) -> Callable[[Block, Streams], Streams] | None:
        again = self.gradient_checkpointing and self.training
        recomputed: Any = getattr(self, "_gradient_checkpointing_func", None)
        if seen is None and not again:
            return None

        def run(block: Block, streams: Streams) -> Streams:
            # a mixer's streams may be a nested state, whose gradients a reentrant checkpoint would lose
            streams = recomputed(block, streams, use_reentrant=False) if again else block(streams)
            if seen is not None:
                last: Any = self.trunk.mixers[-1]
                seen.append(last.reduce(streams))
            return streams

        return run


@final
class AxesForCausalLM(AxesPreTrainedModel, transformers.GenerationMixin):
    """`AxesModel` and a linear head: next-token logits, losses and `generate`."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.trunk.embedding.weight"}

    def __init__(self, config: AxesConfig) -> None:
        super().__init__(config)
        self.model = AxesModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AxesCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits (B, T, vocabulary), and the loss if there are labels; what else is as in `AxesModel.forward`.

        Args:
            labels: (B, T), the tokens themselves (they are shifted here); -100 is not counted.
            logits_to_keep: of so many last positions, or of these; 0 for all.
        """
        output = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            True,
            cu_seq_lens_q,
            output_attentions=kwargs.pop("output_attentions", None),
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        made = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )
        dictionary = self.config.return_dict if return_dict is None else return_dict
        return made if dictionary else made.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any, **more: Any
    ) -> None:
        """`generate` gives a cache of ours instead of keys and values."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise AxesError(
                f"AxesForCausalLM: cache_implementation={generation_config.cache_implementation!r} stores keys and "
                "values: leave it out, a state is of one size already"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = AxesCache()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Refuses what `generate` would give the cache a second time: it takes a length of 0 for all tokens."""
        if next_sequence_length is not None and next_sequence_length < 1:
            seen, length = past_key_values.get_seq_length(), input_ids.shape[1]
            raise ShapeError(
                f"generate: past_key_values has seen {seen} positions and input_ids has {length}: give all tokens, of "
                "which the last are new, or the new ones alone with an attention_mask of all"
            )
        made: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, past_key_values=past_key_values, **kwargs
        )
        return made


def _boundaries(position_ids: Tensor | None, batch: int, time: int) -> Tensor | None:
    """Where sequences that were packed into one begin, and the end; None for one alone."""
    if position_ids is None or batch != 1 or time < 2 or position_ids.ndim != 2 or position_ids.shape[1] != time:
        return None
    starts = (position_ids[0, 1:] != position_ids[0, :-1] + 1).nonzero()[:, 0] + 1
    if not len(starts):
        return None
    return torch.cat((starts.new_zeros(1), starts, starts.new_full((1,), time)))


def register() -> None:
    """With AutoConfig, AutoModel and AutoModelForCausalLM, under the model type "axes"."""
    transformers.AutoConfig.register(AxesConfig.model_type, AxesConfig, exist_ok=True)
    transformers.AutoModel.register(AxesConfig, AxesModel, exist_ok=True)
    transformers.AutoModelForCausalLM.register(AxesConfig, AxesForCausalLM, exist_ok=True)
