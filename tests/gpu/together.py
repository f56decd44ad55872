"""A test file run as several processes, one for each GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def together(file: str, folder: Path, processes: int) -> list[int]:
    """Exit codes of `python file RANK folder` for every rank; within five minutes, else none of them goes on."""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    command = [sys.executable, "-W", "ignore", file]
    running = [subprocess.Popen([*command, str(rank), str(folder)], env=env) for rank in range(processes)]
    try:
        return [process.wait(300) for process in running]
    finally:
        for process in running:
            process.kill()
