"""Who does not ask for a claim imports no module of the register and reads none of its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import axes

PATH = os.pathsep.join([str(Path(axes.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
WATCHED = """
import json, os, sys
from axes.cli import main

opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
statements = os.path.join("claims", "statements", "")
for code in {codes}:
    try:
        exec(code)
    except SystemExit:
        pass
    modules = sorted(name for name in sys.modules if name.startswith("axes.claims"))
    print("\\n" + json.dumps([modules, sorted(os.path.basename(path) for path in opened if statements in path)]))
"""


def loaded(*codes: str) -> list[tuple[list[str], list[str]]]:
    """Modules of the register that a fresh process has imported behind every piece of code, and the files of statements
    that it has read."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(codes=codes)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(said) == len(codes), done.stdout
    return [(modules, files) for modules, files in said]


def command(*arguments: str) -> str:
    return f"main({list(arguments)!r})"


NOTHING = (
    "import axes, axes.optim, axes.sequence, axes.depth, axes.catalogue, axes.routes.dispatch, axes.testing.checks",
    "import axes.models, axes.tasks, axes.bench, axes.cli",
    command("list"),
    command("explain", "muon"),
    command("explain", "neither a system nor a claim"),
    command("cite", "gla"),
    command("--help"),
    command("verify", "--help"),
)


def test_nothing_of_the_register_is_loaded_but_for_a_claim_and_of_it_the_claims_group() -> None:
    *nothing, (modules, files), (more, read) = loaded(*NOTHING, command("explain", "K01"), command("explain", "e08"))
    assert dict(zip(NOTHING, nothing, strict=True)) == dict.fromkeys(NOTHING, ([], []))
    assert "axes.claims.register" in modules and not [m for m in modules if m.startswith("axes.claims.checks.")]
    assert files == ["K.toml", "index.toml"]
    assert [m for m in more if m.startswith("axes.claims.checks.")] == ["axes.claims.checks.e_capacity"]
    assert read == ["E.toml", *files]
