"""Result files: one JSON a comparison, rows appended as they are measured, continued on the same machine only."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from axes.errors import AxesError
from axes.tasks.run_folder import write_json


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
        results: dict[str, Any] = json.loads(path.read_text())
        for found in results["rows"]:
            row(**found)
        return results
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AxesError(f"{path} is not a results file of `axes bench`: {error}; measure again with --fresh") from None


def write(path: Path, results: dict[str, Any]) -> None:
    """Replace the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)
