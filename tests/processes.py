"""Several processes of a test on this machine, which meet over gloo.

A process ends without Python's finalisation. Where DDP, DTensor or FSDP used a group, torch keeps its threads alive
behind `destroy_process_group`, and one that still frees a tensor while Python finalises aborts the process: seen once
in a thousand green runs, on a loaded machine.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # for the whole of a test's processes


def run(file: str, folder: Path, world: int, *more: str) -> None:
    """`python FILE RANK WORLD FOLDER *MORE` for every rank; raises with what the processes that failed wrote."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    given = str(world), str(folder), *more
    command = [sys.executable, "-W", "ignore", file]
    running = [subprocess.Popen([*command, str(rank), *given], env=env) for rank in range(world)]
    try:
        codes = [process.wait(SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    failed = [path.read_text() for path in sorted(folder.glob("failed-*"))]
    assert not failed and not any(codes), "\n".join(failed) or f"exit codes {codes}"


@contextmanager
def joined() -> Iterator[tuple[Path, list[str]]]:
    """The processes that `run` started, on gloo, with its folder and words; each ends behind the body."""
    rank, world, folder, more = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        yield folder, more
    except BaseException:
        (folder / f"failed-{rank}").write_text(f"process {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # the others wait in some collective: they fail too
    store.set(f"{rank} is done", "")  # a connection that closes early can cost its peer's last message
    store.wait([f"{other} is done" for other in range(world)])
    os._exit(0)
