"""Settings of the slowest passes of residual streams, timed side by side: `python tests/gpu/tune_streams.py [TABLE]`.

Each is first held to float64 on a few tokens, then timed at 32,768 tokens of four streams of 2,048 in bfloat16, and of
768 in float32 (as under autocast): microseconds of the kernels by the profiler, mean of ten calls. They are compiled in
processes side by side, so that all of it takes less than a minute. The first line of a table is what runs; settings are
`mix._WALK` (warps, stages), `mix._FEW`, `mix._PROGRAMS` and `look._LAUNCH` (tokens and columns of a tile, warps,
stages). The last table has every launch of a sublayer of mHC behind another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from axes import catalogue
from axes.kernels.streams import look, mix
from tests.streams import draw, draw_look, errors, look_errors

BF, FULL = torch.bfloat16, torch.float32
SIZES = {BF: (4, 2048, (32_768,)), FULL: (4, 768, (32_768,))}
FEW = 700  # tokens that float64 has time for
BOUNDS = {BF: (1.2e-2, 1e-4), FULL: (3e-6, 1e-5)}  # of tensors of the streams' dtype, and of float32


class Setting(NamedTuple):
    """What a candidate changes in the modules; by their names, or a key of look's launches."""

    few: int = mix._FEW
    walk: tuple[int, int] = mix._WALK
    programs: int = mix._PROGRAMS
    give: tuple[int, int, int, int] | None = None
    project: tuple[int, int, int, int] | None = None

    def __str__(self) -> str:
        usual = Setting()
        changed = [f"{n} {getattr(self, n)}" for n in self._fields if getattr(self, n) != getattr(usual, n)]
        return ", ".join(changed) or "what runs"

    @contextmanager
    def used(self, dtype: torch.dtype) -> Iterator[None]:
        launch = dict(look._LAUNCH)
        if self.give is not None:
            launch["give" if dtype == BF else "give, tf32"] = self.give
        if self.project is not None:
            launch["project"] = self.project
        given = {"_FEW": self.few, "_WALK": self.walk, "_PROGRAMS": self.programs}
        with patch.multiple(mix, **given), patch.object(look, "_LAUNCH", launch):
            yield


ALL = 1 << 30  # programs: one tile each
WALKS = [Setting(), Setting(few=0)] + [
    Setting(walk=walk, programs=programs)
    for walk in ((4, 2), (4, 1), (4, 3), (1, 2), (1, 1), (2, 2), (8, 2))
    for programs in (mix._PROGRAMS, ALL)
    if (walk, programs) != (mix._WALK, mix._PROGRAMS) and (programs != ALL or walk in ((4, 1), (1, 1), (4, 2)))
]
GIVES = [Setting()] + [
    Setting(give=given, programs=programs)
    for given in ((32, 128, 8, 3), (32, 128, 8, 2), (32, 128, 4, 2), (32, 64, 4, 3), (32, 64, 4, 2), (16, 128, 4, 3),
                  (16, 128, 4, 4), (16, 256, 8, 3), (16, 256, 8, 2), (32, 256, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2))
    for programs in (256, 512, 1024)
]  # fmt: skip
WIDE = [Setting()] + [
    Setting(give=given, programs=programs)
    for given in ((32, 64, 4, 3), (16, 64, 4, 2), (16, 64, 4, 3), (16, 128, 8, 2), (16, 128, 8, 3), (32, 64, 8, 2),
                  (32, 128, 8, 2))
    for programs in (512, 1024)
]  # fmt: skip
PROJECTS = [Setting()] + [
    Setting(project=given)
    for given in ((128, 64, 8, 4), (128, 64, 4, 3), (64, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 3),
                  (128, 128, 8, 2))
]  # fmt: skip
TABLES: dict[str, tuple[str, torch.dtype, str, list[Setting]]] = {  # title: what is called, dtype, kernels, settings
    "write, backward": ("write", BF, "_write_backward _walk_backward", WALKS),
    "write with a read, backward": ("both", BF, "_write_backward _walk_backward", WALKS),
    "write, backward, float32": ("write", FULL, "_write_backward _walk_backward", WALKS[:8]),
    "look, dX": ("look", BF, "_give", GIVES),
    "products": ("look forward", BF, "_project _split", PROJECTS),
    "look, dX, float32": ("look", FULL, "_give", WIDE),
}


def checked(what: str, dtype: torch.dtype) -> float:
    """The largest error as a share of its bound; compiles as well."""
    torch.manual_seed(0)
    n, d, _ = SIZES[dtype]
    if what.startswith("look"):
        found = look_errors(draw_look(n, d, (FEW,), 24, "sigmoid", dtype, "cuda", 3), "sigmoid", writes=True)
        wide = {0, 5}  # x_in and the gradient of x
    else:
        found = errors(what, draw(what, n, d, (FEW,), True, dtype, "cuda"))
        wide = set(range(len(found)))
    return max(error / BOUNDS[dtype][i not in wide] for i, error in enumerate(found))


def compiled(title: str, setting: Setting) -> float:
    what, dtype, _, _ = TABLES[title]
    try:
        with setting.used(dtype):
            return checked(what, dtype)
    except Exception as error:  # too much shared memory, say
        print(f"{title}, {setting}: {type(error).__name__} {str(error)[:90]}", flush=True)
        return float("inf")


def called(what: str, dtype: torch.dtype) -> Callable[[], object]:
    """A forward, or a backward with what its forward keeps; a read gets the gradient of a write too."""
    n, d, lead = SIZES[dtype]
    options = "sigmoid", True, False, False, 1e-6, 0.0
    if what == "look forward":
        x, *rest = draw_look(n, d, lead, 24, "sigmoid", dtype, "cuda", 3)
        return lambda: look._forward(x, *rest, *options, True)
    if what == "look":
        x, *rest = draw_look(n, d, lead, 24, "sigmoid", dtype, "cuda", 3)
        pre, k, others, seen, kept = look._forward(x, *rest, *options, True)
        given = [torch.randn_like(t) for t in (k, others, seen, x)]
        return lambda: look._backward(x, *rest, *options, [pre, *kept], None, *given)
    drawn = draw(what, n, d, lead, True, dtype, "cuda")
    x, y, w, m, r = (drawn.get(name) for name in "xywmr")
    assert x is not None and y is not None and w is not None
    dout, dseen = torch.randn_like(x), torch.randn_like(y)
    return lambda: mix._differentiate(x, m, y, w, r, dout, None if r is None else dseen)


def microseconds(run: Callable[[], object], kernels: str) -> float:
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
    rows = [row for row in seen.key_averages() if row.key in kernels.split()]
    assert rows
    return float(sum(row.self_device_time_total / row.count for row in rows))


def sublayer(dtype: torch.dtype, backward: bool) -> Callable[[], object]:
    """A write of mHC and the next sublayer's read, and with `backward` what gradients take."""
    torch.manual_seed(0)
    n, d, lead = SIZES[dtype]
    first, second = (catalogue.get("mhc").cls(d, i, streams=n, device="cuda") for i in range(2))
    x, y = (torch.randn(*lead, *s, device="cuda", dtype=dtype) for s in ((n, d), (d,)))
    wanted = [x.requires_grad_(), y.requires_grad_(), *second.parameters()]
    with torch.no_grad():
        _, told = first.read(x)
    told = told._replace(read=None, signal={k: v.requires_grad_() for k, v in told.signal.items()})
    wanted += list(told.signal.values())

    def run() -> object:
        after, seen, more = first.write_then_read(x, y, told, second)
        outs = [after, seen, *more.signal.values()]
        return outs if not backward else torch.autograd.grad(outs, wanted, [o.detach() for o in outs])

    return run


def launches(title: str, run: Callable[[], object], backward: bool) -> None:
    """Microseconds of every launch of a call, and of a call in a graph."""
    from torch.profiler import ProfilerActivity, profile
    from triton.testing import do_bench_cudagraph

    with torch.set_grad_enabled(backward):
        for _ in range(3):
            run()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                run()
            torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            whole = do_bench_cudagraph(run)
    print(f"\n{title}: {1e3 * whole:.0f} us")
    for row in sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total):
        if row.self_device_time_total >= 10:
            print(f"{row.self_device_time_total / 10:7.1f} us  {row.count / 10:3.0f}  {row.key[:60]}")
    sys.stdout.flush()


def main(titles: list[str]) -> None:
    tables: dict[str, Any] = {t: TABLES[t] for t in TABLES if not titles or t in titles}
    work = [(title, setting) for title, (*_, settings) in tables.items() for setting in settings]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        shares = dict(zip(work, pool.map(compiled, *zip(*work, strict=True)), strict=True))
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for title, (what, dtype, kernels, settings) in tables.items():
        run, rows = called(what, dtype), []
        for setting in settings:
            if shares[title, setting] < float("inf"):
                with setting.used(dtype):
                    rows.append((microseconds(run, kernels), setting))
        best = min(rows)[0] if rows else 0.0
        print(f"\n{title}")
        for took, setting in rows:
            wrong = "" if (share := shares[title, setting]) < 1 else f"  WRONG by {share:.1f}"
            print(f"{took:7.0f} us{' *' if took == best else '  '} {setting}{wrong}")
        del run
        torch.cuda.empty_cache()
        sys.stdout.flush()
    for dtype in (BF, FULL) if not titles or "sublayer" in titles else ():
        for way in (False, True):
            title = f"mHC, a write and the next read, {'with backward' if way else 'forward'}, {dtype}"
            launches(title, sublayer(dtype, way), way)


if __name__ == "__main__":
    main(sys.argv[1:])
