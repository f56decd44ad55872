"""Several processes of a test on this machine, which meet over gloo: forks of one that has imported torch and axes.

A process ends without Python's finalisation. Where DDP, DTensor or FSDP used a group, torch keeps its threads alive
behind `destroy_process_group`, and one that still frees a tensor while Python finalises aborts the process: seen once
in a thousand green runs, on a loaded machine.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from tests import interpreter
from tests.forked import Server, serve

_PROGRAM = """
import os, runpy, sys, warnings
warnings.simplefilter("ignore")
sys.argv = {}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@cache
def _server() -> Server:
    """One for every test process."""
    return Server("tests.processes", {})


def run(file: str, folder: Path, world: int, *more: str, interpreted: bool = False) -> None:
    """`python FILE RANK WORLD FOLDER *MORE` for every rank, with kernels interpreted or none; raises with what the
    processes that failed wrote."""
    given = str(world), str(folder), *more
    server = interpreter.server() if interpreted else _server()
    ended = server.run(*(_PROGRAM.format([file, str(rank), *given]) for rank in range(world)))
    failed = [path.read_text() for path in sorted(folder.glob("failed-*"))]
    assert not failed and not any(code for code, _ in ended), "\n".join([*failed, *(said for _, said in ended)])


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


def _prepare() -> None:
    from torch.distributed import fsdp, tensor  # noqa: F401

    import axes.depth
    import axes.optim
    import axes.sequence  # noqa: F401


if __name__ == "__main__":
    serve(_prepare)
