"""Text as bytes, split into training and validation: the embedded default corpus, or the user's own files.

The embedded corpus needs no download: it is the source code of the Python standard library (without its tests) and
Python's documentation topics, as they lie in the running interpreter. Its contents follow the Python version, so
every corpus carries a `Provenance` with counts and a digest, and a resumed run checks it.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor

from axes.errors import AxesError

VOCABULARY = 256
END_OF_DOCUMENT = b"\0"  # text holds no NUL byte (files that do are refused), so the separator is unambiguous

# Tests are left out by definition. The code pages are generated tables, each nearly a copy of the next: on both sides
# of the split they would flatter the validation loss. The topics file is read as text instead of as Python.
_LEFT_OUT_FOLDERS = frozenset({"test", "tests", "idle_test", "encodings", "__pycache__", "site-packages"})
_LEFT_OUT_FILES = frozenset({"pydoc_data/topics.py"})
_VALIDATION_TENTH = 10
_COUNTED = 1 << 26  # tokens that frequencies are counted of

Document = tuple[str, bytes]


@final
@dataclass(frozen=True)
class Provenance:
    """Where a corpus came from, exactly enough to tell whether another one is the same."""

    source: str
    documents: int
    train_bytes: int
    validation_bytes: int
    split: Literal["by document", "by position"]
    skipped: int
    sha256: str
    unit: Literal["bytes", "tokens"] = "bytes"  # of the two lengths

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.documents} documents, {self.train_bytes:,} {self.unit} to train on and "
            f"{self.validation_bytes:,} to validate on (split {self.split}), sha256 {self.sha256[:12]}"
        )


@final
@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation tokens, each a tensor (N,): bytes as uint8, or numbers below `vocabulary`, as signed
    integers of the width of the unsigned ones that they stand for."""

    train: Tensor
    validation: Tensor
    provenance: Provenance
    vocabulary: int = VOCABULARY
    bytes_per_token: float = 1.0

    def require(self, context: int) -> None:
        """Refuse a corpus whose splits do not hold a single window of `context` tokens and its successor."""
        for name, split in (("training", self.train), ("validation", self.validation)):
            if len(split) <= context:
                raise AxesError(
                    f"the text is too short: its {name} part has {len(split)} {self.provenance.unit} and a context of "
                    f"{context} needs "
                    f"{context + 1}; give more text or a smaller context"
                )

    def known(self, windows: Tensor) -> Tensor:
        """Windows of it as they are. Raises AxesError if they hold a token that its vocabulary does not."""
        most = int(windows.max()) if windows.numel() else 0
        if most >= self.vocabulary:
            raise AxesError(
                f"{self.provenance.source} holds the token {most} and is said to have a vocabulary of "
                f"{self.vocabulary}: its tokens are of another tokenizer or another dtype than its tokens.json says"
            )
        return windows


def embedded(limit: int | None = None) -> Corpus:
    """The default corpus: the standard library's sources and Python's documentation topics.

    Args:
        limit: take whole documents, in an order fixed by their names, until about this many bytes are reached.
    """
    documents = [*_standard_library(), *_documentation_topics()]
    if not documents:
        raise AxesError("this Python carries no readable standard library to train on: give your own text with --text")
    version = platform.python_version()
    return _corpus(documents, source=f"standard library and topics of Python {version}", limit=limit)


def from_files(paths: Sequence[str | Path], limit: int | None = None) -> Corpus:
    """The user's own text: files as they are, and every text file below the folders.

    A file named here must be text; below a folder, files that are binary, empty or hidden are skipped and counted.

    Raises:
        AxesError: a path that is missing, binary or empty, or a folder without text.
    """
    if not paths:
        raise AxesError("no text was given: name at least one file or folder")
    skipped: list[str] = []
    documents = list(documents_of(paths, skipped))
    source = ", ".join(str(path) for path in paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return _corpus(documents, source=source, limit=limit, skipped=len(skipped))


def documents_of(paths: Sequence[str | Path], skipped: list[str] | None = None) -> Iterator[Document]:
    """Name and text of every file, one at a time, as `from_files` takes them; names of those left out in `skipped`."""
    skipped = [] if skipped is None else skipped
    seen: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            found = 0
            for file in _files_below(path):
                content = file.read_bytes()
                if not content.strip() or END_OF_DOCUMENT in content:
                    skipped.append(file.as_posix())
                elif file.resolve() not in seen:
                    seen.add(file.resolve())
                    yield file.as_posix(), content
                    found += 1
            if not found:
                raise AxesError(f"{path} holds no text file (binary, empty and hidden files are not read)")
        elif path.is_file():
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path.as_posix(), _text(path)
        else:
            raise AxesError(f"{path} does not exist" if not path.exists() else f"{path} is neither a file nor a folder")


def unigram_entropy(text: Tensor, vocabulary: int = VOCABULARY) -> float:
    """Entropy of the token frequencies of a text (N,), in bits per token: what the best order-0 code of it costs."""
    frequency = _counts(text, vocabulary) / min(len(text), _COUNTED)
    return float(-torch.special.xlogy(frequency, frequency).sum() / torch.log(torch.tensor(2.0, dtype=torch.float64)))


def unigram_cross_entropy(train: Tensor, validation: Tensor, vocabulary: int = VOCABULARY) -> float:
    """Bits per token of `validation` under the token frequencies of `train` (one added to every count)."""
    counts = _counts(train, vocabulary) + 1.0
    frequency = _counts(validation, vocabulary) / min(len(validation), _COUNTED)
    return float(-(frequency * torch.log2(counts / counts.sum())).sum())


def as_tokens(stored: Tensor) -> Tensor:
    """int64 of what a corpus holds."""
    wide = stored.long()
    return wide if stored.dtype == torch.uint8 else wide & ((1 << 8 * stored.element_size()) - 1)


def _counts(text: Tensor, vocabulary: int) -> Tensor:
    return torch.bincount(as_tokens(text[:_COUNTED]), minlength=vocabulary).double()


def _standard_library() -> Iterable[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        relative = file.relative_to(root)
        # names outside the library proper are put there by distributions and by the build
        known = relative.parts[0].removesuffix(".py") in sys.stdlib_module_names or relative.parts[0] == "pydoc_data"
        if not known or file.is_symlink() or _LEFT_OUT_FOLDERS.intersection(relative.parts):
            continue
        if relative.as_posix() in _LEFT_OUT_FILES:
            continue
        content = file.read_bytes()
        if content.strip() and END_OF_DOCUMENT not in content:
            yield relative.as_posix(), content


def _documentation_topics() -> Iterable[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return
    for name, text in sorted(topics.items()):
        yield f"topics/{name}", text.encode()


def _files_below(folder: Path) -> list[Path]:
    def hidden(file: Path) -> bool:
        return any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)

    return sorted(file for file in folder.rglob("*") if file.is_file() and not hidden(file))


def _text(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.strip():
        raise AxesError(f"{path} is empty: there is nothing to train on")
    if END_OF_DOCUMENT in content:
        raise AxesError(
            f"{path} looks binary (a NUL byte at offset {content.index(END_OF_DOCUMENT)}); text in UTF-8 is needed"
        )
    return content


def _corpus(documents: list[Document], source: str, limit: int | None, skipped: int = 0) -> Corpus:
    if limit is not None:
        documents = _limited(documents, limit)
    train = [content for name, content in documents if _digest(name) % _VALIDATION_TENTH != 0]
    validation = [content for name, content in documents if _digest(name) % _VALIDATION_TENTH == 0]
    split: Literal["by document", "by position"] = "by document"
    held_out, total = sum(map(len, validation)), sum(len(content) for _, content in documents)
    if not total / 50 <= held_out <= total / 3:
        # too few documents for a fair draw: the last tenth of each is held out instead
        split = "by position"
        cuts = [(content, len(content) - max(1, len(content) // _VALIDATION_TENTH)) for _, content in documents]
        train = [content[:cut] for content, cut in cuts]
        validation = [content[cut:] for content, cut in cuts]
    parts = END_OF_DOCUMENT.join(train), END_OF_DOCUMENT.join(validation)
    digest = hashlib.sha256(END_OF_DOCUMENT.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    provenance = Provenance(
        source=source,
        documents=len(documents),
        train_bytes=len(parts[0]),
        validation_bytes=len(parts[1]),
        split=split,
        skipped=skipped,
        sha256=digest,
    )
    return Corpus(_as_tensor(parts[0]), _as_tensor(parts[1]), provenance)


def _limited(documents: list[Document], limit: int) -> list[Document]:
    if limit <= 0:
        raise AxesError(f"the size limit of the text must be positive, got {limit} bytes")
    chosen: set[str] = set()
    total = 0
    for name, content in sorted(documents, key=lambda document: _digest(document[0])):
        if not chosen or total + len(content) <= limit:
            chosen.add(name)
            total += len(content)
    return [document for document in documents if document[0] in chosen]


def _digest(name: str) -> int:
    return digest(name.encode("utf-8", "surrogateescape"))


def digest(text: bytes) -> int:
    """A number below 2**64 from a text, the same on every machine (Python's own hash is not)."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
