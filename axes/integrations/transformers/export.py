"""Runs of `axes train` as folders that transformers loads: config.json, model.safetensors and their tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from axes.errors import AxesError
from axes.files import explained, sync
from axes.integrations.transformers.config import AxesConfig
from axes.integrations.transformers.library import transformers
from axes.integrations.transformers.model import AxesForCausalLM
from axes.models import LanguageModel
from axes.tasks import tokens
from axes.tasks.corpus import END_OF_DOCUMENT
from axes.tasks.language_modelling import read_configuration
from axes.tasks.run_folder import RunFolder
from axes.tasks.sample import load_model

_HEAD = "head."


def from_language_model(model: LanguageModel, **others: Any) -> AxesForCausalLM:
    """The same weights, copied: logits are the same bits. others: of the configuration."""
    dtype = model.head.weight.dtype
    made = AxesForCausalLM(AxesConfig.of(model.architecture, **others)).to(dtype)
    made.config.dtype = dtype
    weights = model.state_dict()
    made.lm_head.load_state_dict({n.removeprefix(_HEAD): x for n, x in weights.items() if n.startswith(_HEAD)})
    made.model.trunk.load_state_dict({n: x for n, x in weights.items() if not n.startswith(_HEAD)})
    return made.eval()


def byte_tokenizer() -> Any:
    """A tokenizer whose ids are the bytes of UTF-8, as `axes train` reads text; byte 0 ends a document, and pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = END_OF_DOCUMENT.decode()
    letters = _letters()
    letters[end] = letters.pop(next(c for c, byte in letters.items() if byte == 0))  # found in the text as it is
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _letters() -> dict[str, int]:
    """The character that byte-level tokenizers write for every byte: itself if it is seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {**{chr(byte): byte for byte in seen}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


def tokenizer_of(run: RunFolder) -> tuple[Any, int | None]:
    """What a run's tokens were made by, as transformers has it, and the token that ends a document; None where nobody
    said by what.

    Raises: AxesError where the folder of tokens, or a tokenizer in it, is not there.
    """
    folder = read_configuration(run).tokens
    named = tokens.header(folder)["tokenizer"] if folder else "bytes"
    if named is None:
        return None, None
    if named == "bytes":
        return byte_tokenizer(), END_OF_DOCUMENT[0]
    theirs = tokens.Trained(Path(folder) / named)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(theirs.file), padding_side="left", clean_up_tokenization_spaces=False
    )
    made.backend_tokenizer.no_truncation()  # what a file asks for is for another model's input
    end = made.convert_ids_to_tokens(theirs.separator) if theirs.separator < len(made) else None
    if end is not None:
        made.eos_token = made.pad_token = end
    return made, theirs.separator


def export(run: RunFolder, folder: Path) -> bool:
    """The model of a run as its checkpoint holds it, in a new folder; whether a tokenizer stands beside it.

    Raises: AxesError where there is no such run, its tokenizer is gone, or the folder holds something or cannot be
        written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AxesError(f"{folder} is not an empty folder: choose another one, or remove it first")
    tokenizer, end = tokenizer_of(run)
    model = from_language_model(load_model(run, device="cpu"), bos_token_id=end, eos_token_id=end, pad_token_id=end)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        with explained(folder):
            model.save_pretrained(beside)
            if tokenizer is not None:
                tokenizer.save_pretrained(beside)
            os.replace(beside, folder)
            sync(folder.parent)
        return tokenizer is not None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
