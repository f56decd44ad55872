"""Files that are replaced whole: written beside their place, flushed to the disk, then moved over the old one.

A full disk or a kill leaves the previous file as it was.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axes.errors import AxesError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path`, with the same ending, that takes its place when the block ends well.

    Where `path` is a link, what it leads to is replaced; a device or a pipe is written to as it is.

    Raises:
        AxesError: the disk is full or cannot be written; what stood at `path` is untouched.
    """
    # what /dev/stdout leads to may be a pipe, which has no name of its own
    if path.exists() and not path.is_file() and not path.is_dir():
        with explained(path):
            yield path
        return
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = place.with_name(f".{place.stem}.{os.getpid()}{place.suffix}")
    try:
        with explained(path):
            if place.is_symlink():  # it leads to itself
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            yield temporary
            with temporary.open("rb+") as file:  # what it holds reaches the disk before its name
                os.fsync(file.fileno())
            os.replace(temporary, place)
            sync(place.parent)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(name: str, path: Path) -> bool:
    """Whether a file of this name was written to take the place of `path`, by whatever process."""
    begin, number = f".{path.stem}.", name.removesuffix(path.suffix)
    return name.startswith(begin) and number.removeprefix(begin).isdigit()


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """What a file of JSON holds.

    Raises:
        ValueError: it is none, or one that Python does not read; the message is a reason, without the file's name.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("one of its numbers has thousands of digits") from None


def sync(folder: Path) -> None:
    """The names in a folder reach the disk, where a system has a way to say so."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What keeps `path` from being written, as an AxesError."""
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
    kept = "; the previous one is intact" if path.is_file() else ""  # a device has none
    return f"could not write {path}: {reason}{kept}"
