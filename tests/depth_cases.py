"""What every depth mixer of the catalogue keeps on every device: checks by name, for tests/gpu and for a call by hand.

    python -m tests.depth_cases [DEVICE] [MIXER ...]

Read and write of one sublayer against the same mixer in float64, by the interpreter.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from axes import catalogue
from axes.bench.depth import Size, drawn, inputs
from axes.bench.depth_contenders import ours, tensors
from axes.depth.base import DepthMixer
from axes.errors import ShapeError

NAMES = tuple(entry.name for entry in catalogue.entries("depth"))
COMPILED = ("residual", "pre-norm", "hyper-connections", "mhc", "ihc", "jpmhc", "block-attention-residuals")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# relative, of whole tensors; 16 bits: the rounding of what is handed on, coefficients are float32
BOUNDS = {torch.float32: 3e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SIZES = (
    Size(1, 8, 2), Size(17, 7, 3), Size(50, 36, 4), Size(33, 130, 4), Size(65, 45, 5), Size(40, 66, 3),
    Size(129, 520, 4), Size(9, 64, 8), Size(5, 1000, 2), Size(300, 24, 6),
)  # fmt: skip
GPU_SIZES = (*SIZES, Size(4097, 2048, 4), Size(1000, 1031, 4), Size(260, 4096, 2), Size(70_001, 64, 4))
Found = dict[str, Tensor]
ALONE = nullcontext()


def fits(name: str, size: Size) -> bool:
    """Whether the mixer takes this width and these streams at all."""
    try:
        drawn(name, size, torch.device("cpu"), 0)
    except ShapeError:
        return False
    return True


def sizes(name: str, device: torch.device) -> Iterator[Size]:
    return (size for size in (GPU_SIZES if device.type == "cuda" else SIZES) if fits(name, size))


def usual(name: str) -> Size:
    """An odd width where the mixer takes one."""
    return next(size for size in (Size(50, 37, 4), Size(50, 36, 4)) if fits(name, size))


def result(
    mixer: DepthMixer, values: Tensor, y: Tensor, along: list[Tensor], around: AbstractContextManager[object] = ALONE
) -> Found:
    """x, new streams and every gradient; around: a context of the forward."""
    form = ours(mixer, values.dtype)
    given = {"streams": values.detach().clone().requires_grad_(), "y": y.detach().clone().requires_grad_()}
    with around:
        x, new = form.run(form.enter(given["streams"]), given["y"])
    out, leaves = (x, form.leave(new)), {**given, **form.parameters}
    towards = [a.to(o.dtype) for o, a in zip(out, along, strict=True)]
    found = torch.autograd.grad(out, list(leaves.values()), towards, allow_unused=True)
    grads = {f"d{n}": torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), found, strict=True)}
    return {"x": out[0].detach(), "new streams": out[1].detach(), **grads}


def directions(mixer: DepthMixer, values: Tensor, y: Tensor) -> list[Tensor]:
    form = ours(mixer, values.dtype)
    with torch.no_grad():
        x, new = form.run(form.enter(values), y)
    numbers = torch.Generator(y.device).manual_seed(2)
    return [torch.randn(o.shape, generator=numbers, device=o.device).to(y.dtype) for o in (x, form.leave(new))]


def case(
    name: str, size: Size, dtype: torch.dtype, device: torch.device, scale: float = 1.0
) -> tuple[DepthMixer, Tensor, Tensor, list[Tensor]]:
    """A mixer with drawn parameters, times `scale`, and its inputs."""
    mixer = drawn(name, size, device, 0)
    with torch.no_grad():
        for p in mixer.parameters():
            p.mul_(scale)
    values, y = inputs(mixer, size, dtype, device, 0)
    return mixer, values, y, directions(mixer, values, y)


def agrees(mixer: DepthMixer, values: Tensor, y: Tensor, along: list[Tensor], factor: float = 1.0) -> None:
    got = result(mixer, values, y, along)
    exact = copy.deepcopy(mixer).double()
    exact.implementation = "reference"
    want = result(exact, values.double(), y.double(), [a.double() for a in along])
    bound = factor * BOUNDS[values.dtype]
    for name, w in want.items():
        held = w.abs() < 0.5 * torch.finfo(got[name].dtype).max  # weights without a bound take float16 beyond its range
        found, w = got[name].double()[held], w[held]
        assert torch.isfinite(found).all(), f"{name} is not finite"
        error = float((found - w).norm() / w.norm().clamp_min(1e-3 * max(w.numel(), 1) ** 0.5))
        assert error <= bound, f"{name} is off by {error:.1e} > {bound:.1e}"


def same(first: Found, second: Found) -> None:
    for name, x in first.items():
        assert torch.equal(x, second[name]), f"{name} differs by {(x.double() - second[name].double()).abs().max():.1e}"


# ---- checks ----------------------------------------------------------------------------------------------------------


def in_every_size_and_dtype(name: str, device: torch.device) -> None:
    for size in sizes(name, device):
        for dtype in DTYPES:
            try:
                agrees(*case(name, size, dtype, device))
            except AssertionError as error:
                raise AssertionError(f"{name} at {size} in {dtype}: {error}") from None


def at_extreme_logits(name: str, device: torch.device) -> None:
    """Thirty times as large: gates and softmaxes saturate. Gradients lose digits, by the size of the logits."""
    for scale in (-30.0, 30.0):
        for dtype in DTYPES:
            agrees(*case(name, usual(name), dtype, device, scale), factor=30.0)


def at_extreme_streams(name: str, device: torch.device) -> None:
    """Tokens of zeros, of tiny and of large numbers side by side: norms neither divide by zero nor overflow.

    The slope of what normalises without an eps of its own is up to 1e12 sqrt(d) at zero, more than float16 holds:
    there zeros are left out.
    """
    for dtype in DTYPES:
        mixer, values, y, along = case(name, usual(name), dtype, device)
        half = dtype is torch.float16
        factors = torch.tensor([1e-3, 1e-2, 1.0, 100.0] if half else [0.0, 1e-4, 1.0, 1e4], device=device)
        times = factors[torch.arange(values.shape[1], device=device) % 4].to(dtype)
        got = result(mixer, values * times[:, None, None], y * times[:, None], along)
        for what, g in got.items():
            assert torch.isfinite(g).all(), f"{what} is not finite in {dtype}"
        for place in range(4):  # a group by itself: the large ones would hide the small ones
            part = slice(place, None, 4)
            few = values[:, part] * times[place], y[:, part] * times[place]
            alone = result(mixer, *few, [a[:, part] for a in along])
            for what in ("x", "new streams", "dstreams", "dy"):
                off = (got[what][:, part].double() - alone[what].double()).norm() / alone[what].double().norm()
                assert not off > BOUNDS[dtype], f"{what} differs by {off:.1e} among tokens of other sizes in {dtype}"
            if factors[place] >= 1:
                agrees(mixer, *few, [a[:, part] for a in along], factor=3.0)


def bits_repeat_and_every_element_is_written(name: str, device: torch.device) -> None:
    for dtype in DTYPES:
        given = case(name, usual(name), dtype, device)
        first = result(*given)
        with poisoned():
            second = result(*given)
        same(first, second)


def leading_shapes_and_views(name: str, device: torch.device) -> None:
    """(B, T), one token, none, and streams in other orders of memory give the same numbers."""
    mixer, values, y, along = case(name, usual(name), torch.float32, device)
    whole = result(mixer, values, y, along)

    def shaped(x: Tensor) -> Tensor:
        return x.unflatten(1, (10, 5)).transpose(0, 2).squeeze(2)  # (5, 10), not contiguous

    other = result(mixer, shaped(values), shaped(y), [shaped(a) for a in along])
    for what in ("x", "new streams", "dstreams", "dy"):
        torch.testing.assert_close(other[what], shaped(whole[what]), rtol=1e-4, atol=1e-5)
    for what in set(whole) - {"x", "new streams", "dstreams", "dy"}:
        assert float((other[what] - whole[what]).norm()) <= 1e-4 * float(whole[what].norm()) + 1e-5, what
    turned = values.mT.contiguous().mT
    agrees(mixer, turned, y, along)
    none = result(mixer, values[:, :0], y[:, :0], [a[:, :0] for a in along])
    assert none["x"].shape == (1, 0, y.shape[-1])
    assert all(not g.any() for what, g in none.items() if what.startswith("d"))


def autocast_changes_nothing(name: str, device: torch.device) -> None:
    for low in (torch.bfloat16, torch.float16):
        given = case(name, usual(name), torch.float32, device)
        first = result(*given)
        same(first, result(*given, around=torch.autocast(device.type, dtype=low)))
        mixer, values, y, _ = given
        form = ours(mixer, torch.float32)
        with torch.autocast(device.type, dtype=low):  # what a sublayer gives is 16 bits wide then
            x, new = form.run(form.enter(values), y.to(low))
        assert x.dtype == form.leave(new).dtype == torch.float32


def compiles_as_one_graph(name: str, device: torch.device) -> None:
    if name not in COMPILED:
        return
    mixer, values, y, along = case(name, usual(name), torch.float32, device)

    def run(values: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, coefficients = mixer.read(values)
        new = mixer.write(values, y, coefficients)
        assert isinstance(new, Tensor)
        return x, new

    torch._dynamo.reset()
    found = []
    with warnings.catch_warnings():
        for said in ("TensorFloat32 tensor cores", "\nOnline softmax is disabled"):  # inductor's advice
            warnings.filterwarnings("ignore", message=said)
        for call in (run, torch.compile(run, fullgraph=True)):
            leaves = [t.detach().clone().requires_grad_() for t in (values, y)]
            out = call(*leaves)
            found.append((*out, *torch.autograd.grad(out, [*leaves, *mixer.parameters()], along)))
    for eager, compiled in zip(*found, strict=True):
        error = (eager - compiled).norm() / eager.norm()
        assert error <= BOUNDS[torch.float32], f"the compiled form is off by {error:.1e}"


def gradients_of_a_part(name: str, device: torch.device) -> None:
    """A loss that reads x only, or the new streams only, and leaves without gradients."""
    mixer, values, y, along = case(name, usual(name), torch.float32, device)
    whole = result(mixer, values, y, along)
    zero = [torch.zeros_like(a) for a in along]
    parts = [result(mixer, values, y, [along[0], zero[1]]), result(mixer, values, y, [zero[0], along[1]])]
    for what in (w for w in whole if w.startswith("d")):
        both = parts[0][what] + parts[1][what]
        assert float((both - whole[what]).norm()) <= 1e-4 * float(whole[what].norm()) + 1e-5, what
    form = ours(mixer.requires_grad_(False), torch.float32)
    leaf = y.clone().requires_grad_()
    _, new = form.run(form.enter(values), leaf)
    (dy,) = torch.autograd.grad([t for t in tensors(new) if t.requires_grad][-1].sum(), leaf)
    assert torch.isfinite(dy).all()


Check = Callable[[str, torch.device], None]
CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        in_every_size_and_dtype,
        at_extreme_logits,
        at_extreme_streams,
        bits_repeat_and_every_element_is_written,
        leading_shapes_and_views,
        gradients_of_a_part,
        autocast_changes_nothing,
        compiles_as_one_graph,
    )
}


@contextmanager
def poisoned() -> Iterator[None]:
    """What `empty` returns is NaN within the block; operators stay the ones that they are."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(4).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def failures(device: torch.device | str, names: tuple[str, ...] = NAMES) -> Iterator[str]:
    """Every check of every mixer on a device; what fails, and how."""
    for name in names:
        for check in CHECKS.values():
            try:
                check(name, torch.device(device))
            except Exception as error:
                yield f"{name}, {check.__name__}: {type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    failed = list(failures(sys.argv[1] if len(sys.argv) > 1 else "cpu", tuple(sys.argv[2:]) or NAMES))
    print("\n".join(failed) or "all checks pass")
    sys.exit(bool(failed))
