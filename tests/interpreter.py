"""Programs with kernels in Triton's interpreter. It is chosen when Triton is imported: each runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def interpret(program: str) -> None:
    """Run a program whose assertions must hold; what it says is shown where they do not."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
