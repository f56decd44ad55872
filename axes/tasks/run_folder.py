"""The folder of a run: `config.json`, `metrics.jsonl`, `checkpoint.pt`, `curve.png`, `tuples.json`.

Every file but the log is replaced whole: written beside its place, flushed to the disk, then moved over the old one.
A full disk or a kill leaves the previous file as it was. The log is only appended to; lines of steps that a resumed
run will repeat are cut off first.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

import torch

from axes.errors import AxesError

FORMAT = "axes-run"
VERSION = 1

Record = dict[str, Any]


@final
class RunFolder:
    """Reading and writing of one run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.curve = self.path / "curve.png"
        self.tuples = self.path / "tuples.json"

    def __str__(self) -> str:
        return str(self.path)

    def create(self, overwrite: bool = False) -> None:
        """Make an empty run folder.

        Raises:
            AxesError: the folder holds something, and `overwrite` is not given or what it holds is not a run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise AxesError(f"{self.path} is a file: a run needs a folder")
        if self.path.is_dir() and any(self.path.iterdir()):
            if not overwrite:
                raise AxesError(
                    f"{self.path} is not empty: continue it with --resume {self.path}, replace it with --overwrite, "
                    "or choose another folder with --out"
                )
            if not self.config.exists():
                raise AxesError(f"{self.path} is not empty and not a run folder: it will not be overwritten")
            for file in (self.checkpoint, self.metrics, self.curve, self.tuples, self.config):
                file.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)

    def write_config(self, config: Mapping[str, Any]) -> None:
        write_json(self.config, {"format": FORMAT, "version": VERSION, **config})

    def read_config(self) -> Record:
        if not self.path.is_dir():
            raise AxesError(f"there is no run folder {self.path}")
        if not self.config.is_file():
            raise AxesError(f"{self.path} is not a run folder: it has no config.json")
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise AxesError(f"{self.config} is damaged: {error}") from None
        _require_ours(config, self.config)
        return dict(config)

    def write_checkpoint(self, state: Mapping[str, Any]) -> None:
        payload = {"format": FORMAT, "version": VERSION, **state}
        with replacing(self.checkpoint) as temporary, open_for_writing(temporary) as file:
            torch.save(payload, file)

    def read_checkpoint(self, device: torch.device | str = "cpu") -> Record:
        """What `write_checkpoint` was given; nothing in the file is executed (`weights_only=True`).

        Raises:
            AxesError: no checkpoint, a damaged one, or one of another program.
        """
        if not self.checkpoint.is_file():
            raise AxesError(f"{self.path} has no checkpoint.pt")
        try:
            # torch does not compare the checksums that it writes
            with zipfile.ZipFile(self.checkpoint) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise AxesError(f"{self.checkpoint} is damaged: the checksum of its part {broken} is wrong")
            state = torch.load(self.checkpoint, map_location=device, weights_only=True)
        except pickle.UnpicklingError:
            raise AxesError(
                f"{self.checkpoint} is damaged or not a checkpoint of this program: it does not hold plain tensors"
            ) from None
        except AxesError:
            raise
        except (
            zipfile.BadZipFile,
            RuntimeError,
            EOFError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            TypeError,
        ) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise AxesError(f"{self.checkpoint} is damaged: {reason}") from None
        _require_ours(state, self.checkpoint)
        return dict(state)

    def append(self, record: Mapping[str, Any]) -> None:
        with _explained(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[Record]:
        """All complete lines of the log; a kill can leave half a line at the end."""
        records: list[Record] = []
        if self.metrics.is_file():
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return records

    def rewind_metrics(self, step: int) -> None:
        """Forget what was logged after `step` steps: a resumed run logs it again."""
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def draw(self, figure: Callable[[Path], None]) -> None:
        """Let `figure` write `curve.png` through a temporary name."""
        with replacing(self.curve) as temporary:
            figure(temporary)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path`, with the same ending, that takes its place when the block ends well.

    Raises:
        AxesError: the disk is full or cannot be written; what stood at `path` is untouched.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with _explained(path):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_for_writing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that has reached the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary, open_for_writing(temporary) as file:
        file.write(text.encode())


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AxesError(_could_not_write(path, error.strerror or str(error))) from error
    except RuntimeError as error:
        # torch's archive writer turns a failed write into a RuntimeError
        cause = error.__context__
        if not isinstance(cause, OSError) and "PytorchStreamWriter" not in str(error):
            raise
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(error).splitlines()[0]
        raise AxesError(_could_not_write(path, reason)) from error


def _could_not_write(path: Path, reason: str) -> str:
    kept = "; the previous one is intact" if path.exists() else ""
    return f"could not write {path}: {reason}{kept}"


def _require_ours(value: object, path: Path) -> None:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise AxesError(f"{path} was not written by this program")
    if value.get("version") != VERSION:
        raise AxesError(f"{path} has format version {value.get('version')!r}; this program reads version {VERSION}")
