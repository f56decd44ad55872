"""Token files that may be larger than memory: written from a stream of documents, read by mapping them.

A folder holds `train.bin` and `validation.bin`, tokens one after another as little-endian uint16 or uint32 without any
header (`numpy.memmap` reads them, and what others write as such, nanoGPT's files for instance, needs the next file
alone), and `tokens.json`, which is written last:

    {"format": "axes-tokens", "version": 1, "dtype": "uint16", "vocabulary": 50257,
     "tokenizer": "tokenizer.json", "bytes": 1048576, "documents": 12,
     "train": {"tokens": 240000, "sha256": "..."}, "validation": {"tokens": 26000, "sha256": "..."}}

tokenizer is "bytes", the name of a file in the folder in the format of Hugging Face's tokenizers, or null; bytes, of
the text in UTF-8, is what bits per byte are counted by, null if it is not known. A run is resumed on the same digests.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor

from axes.errors import AxesError
from axes.files import read_json, replacing, write_json
from axes.tasks.corpus import VOCABULARY, Corpus, Document, Provenance, as_tokens, digest

FORMAT, VERSION = "axes-tokens", 1
_HEADER = "tokens.json"
_PARTS = ("train", "validation")
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_LOOKED = 1 << 20  # tokens at which a folder is seen to be what it says
_TOGETHER = 1 << 22  # bytes of text that are tokenized at a time


class Tokenizer(Protocol):
    """Text to numbers below `vocabulary`; `separator` stands behind every document."""

    name: str
    vocabulary: int
    separator: int

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@final
class Bytes:
    """Every byte is a token."""

    name, vocabulary, separator = "bytes", VOCABULARY, 0

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]:
        return [list(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < self.vocabulary).replace(b"\0", b"\n").decode("utf-8", "replace")


@final
class Trained:
    """A tokenizer of Hugging Face's library `tokenizers`, from its file."""

    name = "tokenizer.json"

    def __init__(self, file: str | Path) -> None:
        try:
            from tokenizers import Tokenizer as Theirs
        except ImportError:
            raise AxesError(
                "a tokenizer file needs the library tokenizers: pip install 'axes-state-update[tokens]'"
            ) from None
        if not Path(file).is_file():
            raise AxesError(f"there is no tokenizer {file}: name a tokenizer.json, or bytes")
        self.file = Path(file)
        try:
            self._theirs: Any = Theirs.from_file(str(file))
        except Exception as error:  # whatever their parser raises
            raise AxesError(f"{file} is no tokenizer of the library tokenizers: {error}") from None
        self._theirs.no_truncation()  # a file may ask for both, which are for a model's input:
        self._theirs.no_padding()  # here every token of a document counts, and no other
        numbers = self._theirs.get_vocab().values()
        if not numbers:
            raise AxesError(f"{file} is a tokenizer without one token")
        self.vocabulary = self._known = max(numbers) + 1  # some have fewer tokens than numbers
        known = (self._theirs.token_to_id(x) for x in ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"))
        found = [x for x in known if x is not None]
        if not found:
            self.vocabulary += 1  # a token of ours, behind all of theirs
        self.separator = found[0] if found else self.vocabulary - 1

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]:
        decoded = [text.decode("utf-8", "replace") for text in texts]
        try:
            return [x.ids for x in self._theirs.encode_batch(decoded, add_special_tokens=False)]
        except Exception as error:  # of a tokenizer without a token for what it does not know
            raise AxesError(f"the tokenizer {self.file} does not take this text: {error}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        kept = [t for t in tokens if t < self._known]
        return str(self._theirs.decode(kept, skip_special_tokens=True))


def tokenizer(name: str) -> Tokenizer:
    """bytes, or a tokenizer.json by its path."""
    return Bytes() if name == "bytes" else Trained(name)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(folder: str | Path, documents: Iterable[Document], by: Tokenizer, held_out: float = 0.01) -> Corpus:
    """Tokenize a stream of (name, text) into a folder; nothing but a few megabytes is in memory at a time.

    held_out: the share of documents that is for validation, chosen by a digest of their text. A document that comes
    twice is then on one side. Raises AxesError if one side would be empty, or the folder has tokens already.
    """
    folder = Path(folder)
    if (folder / _HEADER).exists():
        raise AxesError(f"{folder} holds tokens already: choose another folder, or remove it")
    if not 0 < held_out < 1:
        raise AxesError(f"held-out is a share between 0 and 1, got {held_out}")
    folder.mkdir(parents=True, exist_ok=True)
    dtype = "uint16" if by.vocabulary <= 1 << 16 else "uint32"
    hashes = {part: hashlib.sha256() for part in _PARTS}
    counts = dict.fromkeys(_PARTS, 0)
    size = number = 0
    places: list[float] = []  # the first and the last document in the order of digests
    with (
        replacing(folder / "train.bin") as train,
        replacing(folder / "validation.bin") as validation,
        train.open("wb") as first,
        validation.open("wb") as second,
    ):
        files = {"train": first, "validation": second}
        for some in _together(documents):
            number, size = number + len(some), size + sum(len(text) for _, text in some)
            for (_, text), tokens in zip(some, by.encode([text for _, text in some]), strict=True):
                place = digest(text) / 2.0**64
                part = "validation" if place < held_out else "train"
                places = [min([place, *places]), max([place, *places])]
                raw = np.asarray([*tokens, by.separator], dtype=_DTYPES[dtype]).tobytes()
                files[part].write(raw)
                hashes[part].update(raw)
                counts[part] += len(tokens) + 1
        empty = [part for part in _PARTS if not counts[part]]
        if empty:
            raise AxesError(_empty(number, empty[0], places))
    if isinstance(by, Trained):
        shutil.copyfile(by.file, folder / by.name)
    said: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "vocabulary": by.vocabulary,
        "tokenizer": by.name,
        "bytes": size,
        "documents": number,
    }
    said |= {part: {"tokens": counts[part], "sha256": hashes[part].hexdigest()} for part in _PARTS}
    write_json(folder / _HEADER, said)
    return read(folder)


def _empty(number: int, part: str, places: Sequence[float]) -> str:
    if not number:
        return "there is not one document to tokenize"
    if places[0] == places[-1]:
        return f"{number} documents of one text are not shared out to train and to validate: cut it into several files"
    share = 0.5 if part == "train" else math.ceil(100 * places[0]) / 100
    if not places[0] < share <= places[-1]:
        share = (places[0] + places[-1]) / 2
    return f"of {number} documents none is for {part}: give more documents, or another share, as --held-out {share:.3g}"


def _together(documents: Iterable[Document]) -> Iterator[list[Document]]:
    some: list[Document] = []
    size = 0
    for document in documents:
        some.append(document)
        size += len(document[1])
        if size >= _TOGETHER:
            yield some
            some, size = [], 0
    if some:
        yield some


def dataset(name: str, split: str = "train", field: str = "text") -> Iterator[Document]:
    """The documents of a dataset of Hugging Face's library `datasets`, streamed; a folder saved by it, or a name."""
    try:
        import datasets
    except ImportError:
        raise AxesError("a dataset needs the library datasets: pip install 'axes-state-update[datasets]'") from None
    try:
        rows = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name, streaming=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise AxesError(f"the dataset {name!r} (split {split!r}) cannot be read: {error}") from None
    if hasattr(rows, "keys"):
        if split not in rows:
            raise AxesError(f"the dataset {name!r} has no split {split!r}, but {', '.join(map(str, rows))}")
        rows = rows[split]
    for n, row in enumerate(rows):
        if field not in row:
            raise AxesError(f"the dataset {name!r} has no field {field!r}, but {', '.join(row)}")
        text = row[field]
        if text is None:  # a row without text
            continue
        if not isinstance(text, str):
            raise AxesError(f"the dataset {name!r} has no text in its field {field!r}, but {type(text).__name__}s")
        yield f"{name}/{n}", text.encode("utf-8", "replace")


# ---- reading ---------------------------------------------------------------------------------------------------------


def header(folder: str | Path) -> dict[str, Any]:
    """What `tokens.json` says. Raises AxesError if it is missing, damaged or of another version."""
    file = Path(folder) / _HEADER
    if not file.is_file():
        if (Path(folder) / "train.bin").is_file():
            raise AxesError(
                f"{folder} has a train.bin and no {_HEADER}, which says what its tokens are: write one as under Data "
                "in docs/train.md, beside a validation.bin, or tokenize the text with `axes tokenize`"
            )
        raise AxesError(f"{folder} holds no tokens (no {_HEADER}): write them with `axes tokenize`")
    try:
        said = read_json(file)
        if said["format"] != FORMAT or said["version"] != VERSION:
            raise AxesError(f"{file} is of another program or version: this one reads {FORMAT} {VERSION}")
        if said["dtype"] not in _DTYPES or int(said["vocabulary"]) < 2:
            raise AxesError(f"{file}: dtype is uint16 or uint32, and there are two tokens at least")
        if int(said["vocabulary"]) > 1 << 8 * np.dtype(_DTYPES[said["dtype"]]).itemsize:
            raise AxesError(f"{file}: {said['dtype']} holds no number of a vocabulary of {said['vocabulary']}")
        for part in _PARTS:
            int(said[part]["tokens"]), str(said[part]["sha256"])
        float(said.get("bytes") or 0), int(said.get("documents") or 0)
    except (ValueError, KeyError, TypeError) as error:
        raise AxesError(f"{file} is damaged: {error!r}") from None
    return dict(said)


def read(folder: str | Path) -> Corpus:
    """The tokens of a folder, mapped and not read. Raises AxesError for files that are not as long as was said."""
    said, folder = header(folder), Path(folder)
    kind = _DTYPES[said["dtype"]]
    parts: dict[str, Tensor] = {}
    for part in _PARTS:
        file, count = folder / f"{part}.bin", int(said[part]["tokens"])
        length = file.stat().st_size if file.is_file() else 0
        if length != count * np.dtype(kind).itemsize or not count:
            raise AxesError(f"{file} has {length} bytes, and {_HEADER} says {count} tokens of {said['dtype']}")
        mapped = np.memmap(file, dtype=kind, mode="c")  # nobody writes; torch wants memory that could be written
        parts[part] = torch.from_numpy(mapped.view(kind.replace("u", "i")))
    total, size = sum(int(said[p]["tokens"]) for p in _PARTS), said.get("bytes")
    together = hashlib.sha256("".join(str(said[p]["sha256"]) for p in _PARTS).encode()).hexdigest()
    provenance = Provenance(
        source=str(folder),
        documents=int(said.get("documents") or 0),
        train_bytes=int(said["train"]["tokens"]),
        validation_bytes=int(said["validation"]["tokens"]),
        split="by document",
        skipped=0,
        sha256=together,
        unit="tokens",
    )
    per_token = float(size) / total if size else 1.0
    corpus = Corpus(parts["train"], parts["validation"], provenance, int(said["vocabulary"]), per_token)
    for tokens in parts.values():
        corpus.known(as_tokens(tokens[:_LOOKED]))  # each window is looked at too, when it is drawn
    return corpus


def tokenizer_of(folder: str | Path) -> Tokenizer:
    """The tokenizer that wrote a folder. Raises AxesError if nobody said which."""
    name = header(folder).get("tokenizer")
    if name is None:
        raise AxesError(f"{folder} does not say by which tokenizer its tokens were made")
    return tokenizer("bytes" if name == "bytes" else str(Path(folder) / name))
