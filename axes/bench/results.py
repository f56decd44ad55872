"""Result files: one JSON a comparison, rows appended as they are measured, continued on the same machine only."""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch

from axes.bench.apart import Steps, finished, in_turn
from axes.errors import AxesError
from axes.files import read_json, write_json

Watch = Callable[[str, int, int], None]  # what is measured now, how many rows are done, of how many


class Measured(Protocol):
    """A row: a frozen dataclass whose key says what it is about."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> tuple[Any, ...]: ...


Row = TypeVar("Row", bound=Measured)


def unwatched(what: str, done: int, of: int) -> None:
    """For measurements that nobody waits for."""


def begin(path: Path, row: type, device: torch.device, seed: int, fresh: bool) -> dict[str, Any]:
    """What the file holds, or an empty result: where it was measured, ceilings, rows.

    Raises:
        AxesError: the file is broken, or holds figures of another machine or version.
    """
    where = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": seed,
    }
    if path.exists() and not fresh:
        results = load(path, row)
        if results["where"] != where:
            raise AxesError(
                f"{path} holds figures of another machine or version ({results['where']}); "
                "choose another --out, or --fresh to measure all again"
            )
        return results
    return {"where": where, "ceilings": None, "rows": []}


def load(path: Path, row: type) -> dict[str, Any]:
    """The contents of a results file whose rows are of this type."""
    try:
        results: dict[str, Any] = read_json(path)
        for found in results["rows"]:
            row(**found)
        return results
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AxesError(f"{path} is not a results file of `axes bench`: {error}; measure again with --fresh") from None


class Apart(NamedTuple):
    """How rows are measured in processes of their own: see `axes.bench.apart.in_turn`."""

    at_once: int
    patience: float


def fill(
    path: Path, results: dict[str, Any], work: Sequence[tuple[Row, Callable[[Row], Row | Steps[Row]]]], watch: Watch,
    apart: Apart | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure what the results do not hold yet, each from its empty row; the file is written after each.

    apart: in processes of their own, each from a function of a module whose steps pause when everything is compiled.
    """
    done = {tuple(type(work[0][0])(**found).key) for found in results["rows"]} if work else set()
    missing = [(i, row, measured) for i, (row, measured) in enumerate(work) if tuple(row.key) not in done]

    def begun(at: int) -> None:
        watch(" · ".join(map(str, missing[at][1].key)), missing[at][0], len(work))

    def written(row: Row) -> None:
        results["rows"].append(asdict(row))
        write(path, results)

    if apart is not None:
        pieces: Any = [(row, measured) for _, row, measured in missing]
        for row, found in in_turn(pieces, apart.at_once, apart.patience, begun):
            written(replace(row, refused=found) if isinstance(found, str) else found)
    else:
        for at, (_, row, measured) in enumerate(missing):
            begun(at)
            found = measured(row)
            written(finished(found) if isinstance(found, Generator) else found)
    watch("done", len(work), len(work))
    return results


def said(error: Exception) -> str:
    """An exception as the note of a row: its kind and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def write(path: Path, results: dict[str, Any]) -> None:
    """Replace the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)
