"""`axes bench depth`: the read and write of one sublayer, every mixer by everyone who computes it.

    x, c = read(X),   X <- write(X, y, c)

y is given, as a sublayer between the two would give it, and gradients come from x and from the new streams. Parameters
are float32 and drawn, so that every one of them moves the result; streams and y have the dtype of the row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from axes import catalogue
from axes.bench.check import BOUNDS, Comparison, compare
from axes.bench.depth_contenders import DEFAULT_WHO, WHO, Form, Make, contenders, ours, tensors
from axes.bench.depth_floors import account
from axes.bench.floors import copy_rate
from axes.bench.results import Watch, begin, fill, said, unwatched
from axes.bench.sequence import device_of, dtype_of
from axes.bench.timing import kept_for_backward, launches, median, peak_extra
from axes.depth.base import DepthMixer
from axes.errors import AxesError, ShapeError
from axes.models.options import accepted_options

FILE = "depth.json"
_CHECKED = 1000  # tokens compared with float64: the last ones


class Size(NamedTuple):
    """Tokens, width, streams; of mixers along fractions or earlier outputs, as many of those."""

    tokens: int = 32768
    width: int = 2048
    streams: int = 4

    @classmethod
    def parse(cls, text: str) -> Size:
        try:
            tokens, width, streams = map(int, text.split(","))
        except ValueError:
            raise AxesError(f"--size is N,D,n, three numbers, as 32768,2048,4, not {text!r}") from None
        size = cls(tokens, width, streams)
        if min(size) < 1 or streams < 2:
            raise AxesError(f"--size is N,D,n, positive, n at least 2, not {text!r}")
        return size

    def __str__(self) -> str:
        return ",".join(map(str, self))


ON_CPU = Size(1024, 512, 4)


@final
@dataclass(frozen=True)
class Row:
    """One contender at one mixer and size. Milliseconds; bytes; None where it was not measured.

    peak: beyond inputs, results and gradients.  kept: bytes a token for the backward, parameters apart.  launches:
    kernels of a forward and backward on a GPU, operators of torch on a CPU.  Floors by bytes.
    """

    mixer: str
    size: str
    dtype: str
    who: str
    forward: float | None = None
    both: float | None = None
    forward_eager: float | None = None
    both_eager: float | None = None
    forward_floor: float | None = None
    both_floor: float | None = None
    peak: int | None = None
    kept: int | None = None
    launches: float | None = None
    error: float | None = None
    worst: str = ""
    refused: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.mixer, self.size, self.dtype, self.who


@final
@dataclass(frozen=True)
class Plan:
    """What is compared."""

    mixers: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = (Size(),)
    dtype: str = "bfloat16"
    device: str = "cuda"
    who: tuple[str, ...] = DEFAULT_WHO
    seed: int = 0


def measure(plan: Plan, folder: Path, watch: Watch = unwatched, fresh: bool = False) -> dict[str, Any]:
    """Measure every row that the folder does not hold yet; the file is written after each. Returns its contents."""
    device, dtype = device_of(plan.device), dtype_of(plan.dtype)
    if unknown := set(plan.who) - set(WHO):
        raise AxesError(f"unknown contender {', '.join(sorted(unknown))}; known: {', '.join(WHO)}")
    names = [catalogue.get(name, "depth").name for name in plan.mixers] or [e.name for e in catalogue.entries("depth")]
    results = begin(folder / FILE, Row, device, plan.seed, fresh)
    rates: dict[str, float] = results["ceilings"] or {}
    results["ceilings"] = rates

    def work(size: Size, name: str, who: str, make: Make) -> tuple[Row, Callable[[Row], Row]]:
        def measured(row: Row) -> Row:
            if row.size not in rates:
                rates[row.size] = copy_rate(size.tokens * size.width * size.streams, device)
            return _row(row, size, make, dtype, device, plan.seed, rates[row.size])

        return Row(name, str(size), plan.dtype, who), measured

    every = [
        work(size, name, who, make)
        for size in plan.sizes
        for name in names
        for who, make in contenders(name, plan.who).items()
    ]
    return fill(folder / FILE, results, every, watch)


def rows(results: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in results["rows"]]


def _row(row: Row, size: Size, make: Make, dtype: torch.dtype, device: torch.device, seed: int, rate: float) -> Row:
    try:
        mixer = drawn(row.mixer, size, device, seed)
        form = make(mixer, dtype)
        values, y = inputs(mixer, size, dtype, device, seed)
        verdict = check(form, mixer, values, y)
        row = replace(row, error=verdict.error, worst=verdict.worst)
        if not verdict.right:
            return replace(row, refused=verdict.reason)
        moved = account(mixer, ours(mixer, dtype).enter(values[:, :3]))
        unit = 1e3 * size.tokens * dtype.itemsize / rate
        row = replace(row, forward_floor=moved.forward * unit, both_floor=moved.both * unit)
        return _timed(row, form, values, y, device)
    except torch.OutOfMemoryError:
        return replace(row, refused="out of memory")
    except AxesError as error:
        return replace(row, refused=str(error))
    except Exception as error:  # a peer may raise anything
        return replace(row, refused=said(error))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _timed(row: Row, form: Form, values: Tensor, y: Tensor, device: torch.device) -> Row:
    with torch.no_grad():
        streams = form.enter(values)
        entered = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, streams)
        x, new = form.run(streams, y)
    along = [torch.randn_like(out) for out in (x, *tensors(new))]
    leaves = [leaf.requires_grad_() for leaf in (*tensors(entered), y.detach(), *form.parameters.values())]
    given = leaves[len(tensors(entered))]
    there = {tensor.untyped_storage().data_ptr() for tensor in (*leaves, *along)}
    del x, new

    def forward() -> list[Tensor]:
        x, new = form.run(streams, y)
        return [x, *tensors(new)]

    def graph() -> list[Tensor]:
        x, new = form.run(entered, given)
        return [x, *tensors(new)]

    def both() -> list[Tensor]:
        out = graph()
        moving = [(o, a) for o, a in zip(out, along, strict=True) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in moving], leaves, [a for _, a in moving], allow_unused=True)
        made = (*out, *(g for g in grads if g is not None))
        return [r for r in made if r.untyped_storage().data_ptr() not in there]  # h itself is no result of h + y

    with torch.no_grad():
        first = median(forward, device)
    whole = median(both, device)
    return replace(
        row,
        forward=first.best,
        both=whole.best,
        forward_eager=first.eager,
        both_eager=whole.eager,
        kept=round(kept_for_backward(graph, form.parameters.values()) / (y.shape[0] * y.shape[1])),
        launches=launches(both, device),
        peak=peak_extra(both) if device.type == "cuda" else None,
    )


# ---- what is computed ------------------------------------------------------------------------------------------------


def drawn(name: str, size: Size, device: torch.device, seed: int) -> DepthMixer:
    """The mixer of the last sublayer that so many streams, or places for outputs, have room for; drawn parameters."""
    cls = catalogue.get(name, "depth").cls
    options = accepted_options(cls, streams=size.streams) or accepted_options(cls, fractions=size.streams)
    for index in reversed(range(2 * size.streams)):
        try:
            mixer: DepthMixer = cls(size.width, index, device=device, dtype=torch.float32, **options)
        except ShapeError:
            if index == 0:
                raise
            continue
        break
    draw_parameters(mixer, seed)
    return mixer


@torch.no_grad()
def draw_parameters(mixer: nn.Module, seed: int) -> None:
    """Projections that give logits of size one; all else between 1/4 and 1, of one sign: no sum of them cancels."""
    numbers = torch.Generator("cpu").manual_seed(seed)
    for p in mixer.parameters():
        new = torch.empty(p.shape)
        if p.ndim == 2 and p.shape[1] > 64 or p.ndim == 1 and p.shape[0] > 64:
            new.normal_(0, p.shape[-1] ** -0.5, generator=numbers)
        else:
            new.uniform_(0.25, 1, generator=numbers)
        p.copy_(new)


def inputs(mixer: DepthMixer, size: Size, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Streams (1, N, rows, width) and what a sublayer gives (1, N, d)."""
    numbers = torch.Generator(device).manual_seed(seed + 1)  # of their own: parameters must not be tokens
    lists = mixer.update.parts().memory.kind == "list"
    rows = size.streams if lists else mixer.streams * mixer.fractions
    shape = (1, size.tokens, rows, size.width // mixer.fractions)
    values = torch.randn(shape, generator=numbers, device=device)
    y = torch.randn(1, size.tokens, size.width, generator=numbers, device=device)
    return values.to(dtype), y.to(dtype)


def check(form: Form, mixer: DepthMixer, values: Tensor, y: Tensor) -> Comparison:
    """x, the new streams and every gradient against the mixer in float64: at the timed inputs, the last tokens.

    A mixer mixes no tokens, so the gradient of a loss that reads only these is zero elsewhere.
    """
    tokens = min(_CHECKED, y.shape[1])
    last = (slice(None), slice(-tokens, None))
    exact = (form.exact or ours)(copy.deepcopy(mixer).double(), torch.float64)
    wide, wide_y = values[last].double(), y[last].double()
    with torch.no_grad():
        shapes = [tuple(out.shape) for out in _outputs(exact, wide, wide_y)]
    numbers = torch.Generator(y.device).manual_seed(2)
    along = [torch.randn(s, generator=numbers, device=y.device, dtype=torch.float64) for s in shapes]
    along = [a.to(y.dtype).double() for a in along]  # the same numbers for both
    want = _gradients(exact, wide, wide_y, along, (slice(None),))
    return compare(_gradients(form, values, y, along, last), want, BOUNDS[y.dtype])


def _outputs(form: Form, values: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, new = form.run(form.enter(values), y)
    return x, form.leave(new)


def _gradients(
    form: Form, values: Tensor, y: Tensor, along: list[Tensor], place: tuple[slice, ...]
) -> dict[str, Tensor]:
    """x and the new streams at a place, and what a loss that weighs them by `along` gives everything that entered."""
    given = {"streams": values.detach().clone().requires_grad_(), "y": y.detach().clone().requires_grad_()}
    out = _outputs(form, given["streams"], given["y"])
    towards = [torch.zeros_like(o) for o in out]
    for toward, a in zip(towards, along, strict=True):
        toward[place] = a.to(toward.dtype)
    leaves = [*given.values(), *form.parameters.values()]
    found = torch.autograd.grad(out, leaves, towards, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
    named = form.named(dict(zip(form.parameters, grads[2:], strict=True)))
    seen = {"x": out[0].detach()[place], "new streams": out[1].detach()[place]}
    return {**seen, "dstreams": grads[0][place], "dy": grads[1][place], **{f"d{n}": g for n, g in named.items()}}
