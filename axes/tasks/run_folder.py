"""The folder of a run: `config.json`, `metrics.jsonl`, `checkpoint.pt`, `curve.png`, `tuples.json`.

Of several processes, `checkpoint-STEP/` stands in the place of `checkpoint.pt` (`axes.tasks.shards`).

Every file but the log is replaced whole (`axes.files`). The log is only appended to; lines of steps that a resumed run
will repeat are cut off first. Several files change together by a folder `.new` beside them: once it is whole it is
called `.ready`, and whoever comes next moves its files into their places if its writer did not. One process at a time
writes; `.lock` is locked by it, and `.holder.json` says who it is.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, final

import torch
from filelock import FileLock, Timeout

from axes.errors import AxesError
from axes.files import explained, is_temporary, read_json, replacing, sync, write_json, write_text
from axes.tasks import shards

FORMAT = "axes-run"
VERSION = 1
_MOST = sys.float_info.max  # an int may be larger, of which no curve can be drawn
_NEW, _READY, _LOCK, _HOLDER = ".new", ".ready", ".lock", ".holder.json"

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
        self._lock: FileLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    # ---- one writer ------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep other processes from writing here, until `release` or the end of this one.

        Raises:
            AxesError: another one does.
        """
        if self._lock is not None and self._lock.is_locked:
            return
        lock = FileLock(self.path / _LOCK, is_singleton=True, thread_local=False)
        try:
            with explained(self.path / _LOCK), self._alone():
                lock.acquire(timeout=0)
        except NotImplementedError as error:
            raise AxesError(f"{self.path} is on a file system without locks ({error}): choose another folder") from None
        self._lock = lock
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            write_json(self.path / _HOLDER, {"process": os.getpid(), "host": platform.node(), "since": now})
            self._settle()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others write again."""
        if self._lock is not None:
            (self.path / _HOLDER).unlink(missing_ok=True)
            self._lock.release(force=True)
            self._lock = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            yield
        except Timeout:
            raise AxesError(
                f"{self.path} is being written by {self._holder()}: wait for its end, or choose another folder"
            ) from None

    def _holder(self) -> str:
        try:
            who = read_json(self.path / _HOLDER)
            return f"process {who['process']} on {who['host']} since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    # ---- several files at once -------------------------------------------------------------------------------

    @contextmanager
    def beginning(self, overwrite: bool = False) -> Iterator[RunFolder]:
        """A folder whose files are this one's when the block ends well; until then whatever stood here stands.

        Raises:
            AxesError: the folder holds something, and `overwrite` is not given or what it holds is not a run; another
                process writes there.
        """
        self._require_free(overwrite)
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self.changing() as new:
            self._require_free(overwrite)  # now that nobody else writes
            yield new
            write_text(new.metrics, "")
        self.curve.unlink(missing_ok=True)

    @property
    def next(self) -> RunFolder:
        """The folder of `beginning` and `changing`, for other processes that write there too."""
        return RunFolder(self.path / _NEW)

    @contextmanager
    def changing(self) -> Iterator[RunFolder]:
        """A folder whose files take the places of this one's together, when the block ends well; held afterwards."""
        self.hold()
        new, ready = self.next, self.path / _READY
        try:
            with explained(self.path):
                new.path.mkdir()
            yield new
            with explained(self.path):
                sync(new.path)
                os.rename(new.path, ready)
                sync(self.path)
            self._settle()
        except BaseException:
            shutil.rmtree(new.path, ignore_errors=True)
            self.release()
            raise

    def _settle(self) -> None:
        """Finish what a writer before began, and remove what it left half written."""
        ready = self.path / _READY
        if ready.is_dir():
            with explained(self.path):
                together = shards.latest(ready) is not None
                if together or (ready / self.checkpoint.name).exists():  # checkpoints of the other kind go with the old
                    shards.remove(self.path)
                if together:
                    self.checkpoint.unlink(missing_ok=True)
                for file in ready.iterdir():
                    os.replace(file, self.path / file.name)
                ready.rmdir()
                sync(self.path)
        shutil.rmtree(self.path / _NEW, ignore_errors=True)
        for file in filter(self._left_over, list(self.path.iterdir())):
            file.unlink(missing_ok=True)

    def _files(self) -> tuple[Path, ...]:
        return self.checkpoint, self.metrics, self.curve, self.tuples, self.config, self.path / _HOLDER

    def _require_free(self, overwrite: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise AxesError(f"{self.path} is a file: a run needs a folder")
        if not self.path.is_dir():
            return
        own = {_NEW, _LOCK, _HOLDER}
        left = (f for f in self.path.iterdir() if f.name not in own and not shards.unfinished(f.name))
        kept = [f for f in left if not self._left_over(f)]
        if not kept:
            return
        if not overwrite:
            raise AxesError(
                f"{self.path} is not empty: continue it with --resume {self.path}, replace it with --overwrite, "
                "or choose another folder with --out"
            )
        try:
            self.read_config()
        except AxesError as error:
            raise AxesError(
                f"{self.path} is not empty and not a run folder: it will not be overwritten ({error})"
            ) from None

    def _left_over(self, file: Path) -> bool:
        return any(is_temporary(file.name, own) for own in self._files())

    # ---- its files -------------------------------------------------------------------------------------------

    def write_config(self, config: Mapping[str, Any]) -> None:
        write_json(self.config, {"format": FORMAT, "version": VERSION, **config})

    def read_config(self) -> Record:
        if not self.path.is_dir():
            raise AxesError(f"there is no run folder {self.path}")
        self._require_settled()
        if not self.config.is_file():
            raise AxesError(f"{self.path} is not a run folder: it has no config.json{self._never_saved()}")
        try:
            config = read_json(self.config)
        except ValueError as error:
            raise AxesError(f"{self.config} is damaged: {error}") from None
        _require_ours(config, self.config)
        return dict(config)

    def _never_saved(self) -> str:
        begun = (self.path / _LOCK).exists()
        return "; the run that began here was ended before its first save: begin it again without --resume" * begun

    def write_checkpoint(self, state: Mapping[str, Any]) -> None:
        payload = {"format": FORMAT, "version": VERSION, **state}
        with replacing(self.checkpoint) as temporary, temporary.open("wb") as file:
            torch.save(payload, file)

    def read_checkpoint(self, device: torch.device | str = "cpu") -> Record:
        """What `write_checkpoint` was given; nothing in the file is executed (`weights_only=True`). Of a checkpoint of
        several processes, all but the optimizer.

        Raises:
            AxesError: no checkpoint, a damaged one, or one of another program.
        """
        self._require_settled()
        if not self.checkpoint.is_file() and (place := shards.latest(self.path)) is not None:
            return {**shards.numbers_of(place), "model": shards.whole_model(place)}
        if not self.checkpoint.is_file():
            raise AxesError(f"{self.path} has no checkpoint.pt: begin it again with --overwrite")
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
        except OSError as error:  # a wrong offset in an archive is one too
            reason = error.strerror or str(error)
            raise AxesError(f"{self.checkpoint} is damaged or cannot be read: {reason}") from None
        except (
            zipfile.BadZipFile,
            RuntimeError,  # and a way to compress that Python does not know
            EOFError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            TypeError,
            OverflowError,
            MemoryError,
            struct.error,
            zlib.error,
        ) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise AxesError(f"{self.checkpoint} is damaged: {reason}") from None
        _require_ours(state, self.checkpoint)
        return dict(state)

    def append(self, record: Mapping[str, Any]) -> None:
        with explained(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[Record]:
        """All whole lines of the log: a kill can leave half a line at the end, and a hand half a line anywhere."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").split("\n")
        return [record for line in lines if (record := _record(line)) is not None]

    def rewind_metrics(self, step: int) -> None:
        """Forget what was logged after `step` steps: a resumed run logs it again."""
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def _require_settled(self) -> None:
        if (self.path / _READY).is_dir():  # whoever wrote here was killed between two files
            self.hold()
            self.release()

    def draw(self, figure: Callable[[Path], None]) -> None:
        """Let `figure` write `curve.png` through a temporary name."""
        with replacing(self.curve) as temporary:
            figure(temporary)


def _record(line: str) -> Record | None:
    """What a line of the log says, None for what no run has logged: a step, and numbers by name."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(type(x) in (int, float) and abs(x) <= _MOST for x in found.values()):
        return None
    return found if type(found.get("step")) is int and found["step"] > 0 else None


def _require_ours(value: object, path: Path) -> None:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise AxesError(f"{path} was not written by this program")
    if value.get("version") != VERSION:
        raise AxesError(f"{path} has format version {value.get('version')!r}; this program reads version {VERSION}")
