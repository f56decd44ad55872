"""Text from a trained run, byte by byte through the recurrent form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from axes.errors import AxesError, NotFiniteError
from axes.models.language_model import LanguageModel
from axes.tasks.corpus import END_OF_DOCUMENT
from axes.tasks.language_modelling import read_configuration
from axes.tasks.run_folder import RunFolder


def load_model(
    folder: RunFolder, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> LanguageModel:
    """The model of a run as its checkpoint holds it, ready to generate."""
    configuration = read_configuration(folder)
    state = folder.read_checkpoint()
    kept, least = state.get("model"), configuration.least_weights()
    if isinstance(kept, dict) and (there := sum(x.numel() for x in kept.values() if isinstance(x, Tensor))) < least:
        said = f"it holds {there:,} numbers, and a model of these sizes has at least {least:,}"
        raise AxesError(f"{folder.checkpoint} does not fit {folder.config}: {said}")
    model = LanguageModel(
        configuration.architecture(),
        device=device if device is not None else configuration.torch_device(),
        dtype=dtype if dtype is not None else configuration.torch_dtype(),
    )
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise AxesError(f"{folder.checkpoint} does not fit {folder.config}: {reason[:300]}") from None
    return model.eval()


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Sequence[int], tokens: int, temperature: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Tokens that continue the prompt, bytes of a run on text, each drawn as soon as the one before is known.

    The prompt goes through `step` as well: memory does not grow with length unless the layer's memory is a list.

    Args:
        prompt: what the text begins with; empty means the beginning of a document.
        temperature: 0 takes the likeliest byte each time.
        seed: of the draws; the same seed gives the same text.

    Raises:
        NotFiniteError: the model's outputs are not numbers.
    """
    if tokens < 0:
        raise AxesError(f"tokens must be 0 or more, got {tokens}")
    if not 0 <= temperature < float("inf"):
        raise AxesError(f"temperature must be 0 (greedy) or a positive number, got {temperature}")
    if abs(seed) >= 2**63:
        raise AxesError(f"seed must be less than 2**63, got {seed:.3g}")
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    state = None
    for byte in prompt or END_OF_DOCUMENT:
        logits, state = model.step(torch.tensor([byte], device=device), state)
    for remaining in range(tokens, 0, -1):
        logits = logits.double().cpu()
        if not logits.isfinite().all():
            raise NotFiniteError(
                "the model's outputs are not finite: its weights are no numbers, or too large; sample an earlier "
                "checkpoint, or train again with a lower --lr"
            )
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            probabilities = torch.softmax(logits / temperature, -1)
            token = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        yield int(token)
        if remaining > 1:
            logits, state = model.step(token.to(device), state)
