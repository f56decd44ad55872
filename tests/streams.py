"""Reads and writes of residual streams as sums of products, with gradients: what the kernels are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axes import catalogue
from axes.kernels.streams.follow import write_look
from axes.kernels.streams.look import look
from axes.kernels.streams.mix import mix_read, mix_read_on, mix_write, mix_write_read


def read(x: Tensor, r: Tensor) -> Tensor:
    return torch.einsum("...j,...jd->...d", r.expand(*x.shape[:-1]), x)


def write(x: Tensor, y: Tensor, w: Tensor, m: Tensor | None = None) -> Tensor:
    kept = x if m is None else torch.einsum("...ij,...jd->...id", m.expand(*x.shape[:-1], m.shape[-1]), x)
    return kept + w[..., None] * y[..., None, :]


def both(x: Tensor, y: Tensor, w: Tensor, r: Tensor, m: Tensor | None = None) -> tuple[Tensor, Tensor]:
    made = write(x, y, w, m)
    return made, read(made, r)


def read_on(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return read(x, r), x


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {  # kernel, meaning, what they take
    "read": (mix_read, read, "xr"),
    "read on": (mix_read_on, read_on, "xr"),
    "write": (mix_write, write, "xywm"),
    "write unmixed": (mix_write, write, "xyw"),
    "both": (mix_write_read, both, "xywrm"),
    "both unmixed": (mix_write_read, both, "xywr"),
}


def draw(
    name: str, n: int, d: int, lead: tuple[int, ...], each: bool, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Tensors of a call. each: coefficients of every token, float32 whatever the dtype."""
    tokens = lead if each else ()
    shapes = {"x": (*lead, n, d), "y": (*lead, d), "w": (*tokens, n), "r": (*tokens, n), "m": (*tokens, n, n)}
    kinds = {"x": dtype, "y": dtype}
    return {i: torch.randn(shapes[i], device=device).to(kinds.get(i, torch.float32)) for i in CALLS[name][2]}


def gradients(
    function: Callable[..., Any], given: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Outputs and gradients."""
    given = [x.detach().requires_grad_() for x in given]
    outs = function(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    pushes = [d.to(o.dtype) for d, o in zip(directions, outs, strict=True)]
    return *(o.detach() for o in outs), *torch.autograd.grad(outs, given, pushes)


def errors(name: str, given: dict[str, Tensor]) -> list[float]:
    """Of outputs and gradients of a kernel against float64, relative to whole tensors, or to what sums of random
    terms are like: those of coefficients may cancel."""
    kernel, meaning, _ = CALLS[name]
    x = given["x"]
    after, seen = x.shape, x[..., 0, :].shape
    shapes = {"read": [seen], "read on": [seen, after]}.get(name, [after, seen][: 1 + ("both" in name)])
    directions = [torch.randn(s, device=x.device).to(x.dtype) for s in shapes]
    got = gradients(kernel, list(given.values()), directions)
    want = gradients(meaning, [v.double() for v in given.values()], directions)
    terms = [1] * len(shapes) + [max(1, x[..., 0, :].numel() // max(v[..., 0].numel(), 1)) for v in given.values()]
    found = []
    for a, b, n in zip(got, want, terms, strict=True):
        assert a.shape == b.shape
        least = 0.3 if n == 1 else 1.0
        found.append(((a - b).norm() / b.norm().clamp(min=least * (max(b.numel(), 1) * n) ** 0.5)).item())
    return found


def compare(name: str, given: dict[str, Tensor], bound: float) -> None:
    found = errors(name, given)
    assert max(found) < bound, (name, {n: tuple(x.shape) for n, x in given.items()}, found)


# ---- predicted coefficients ------------------------------------------------------------------------------------------


def looked(
    x: Tensor, phi: Tensor, a: Tensor, b: Tensor, chart: str,
    *, writes: bool = False, tanh: bool = False, centred: bool = False, eps: float = 1e-6, floor: float = 0.0,
    apart: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `look` means. apart: x three times, as it is measured, projected and read, for a gradient of each."""
    n = x.shape[-2]
    measured, projected, x = apart or (x, x, x)

    def rows(x: Tensor) -> Tensor:
        x = x if chart == "first" else x.flatten(-2).unsqueeze(-2)
        return x - x.mean(-1, keepdim=True) if centred else x

    r = (rows(projected) * torch.rsqrt(rows(measured).square().mean(-1, keepdim=True) + eps)) @ phi.mT
    which = torch.arange(len(phi), device=x.device)
    entries = a[which if len(a) == len(phi) else (which // n).clamp(max=len(a) - 1)] * (r.tanh() if tanh else r) + b
    first, k, rest = entries[..., 0, :], entries[..., 0, :0], entries
    if chart == "first":
        pre = entries[..., 0]
    elif chart == "softmax":
        pre = first[..., : n * n].unflatten(-1, (n, n)).softmax(-1).mean(-2)
        if writes:
            k, rest = first[..., n * n : 2 * n * n].unflatten(-1, (n, n)).softmax(-2).sum(-1), entries[..., 2 * n * n :]
    else:
        pre = first[..., :n].sigmoid() + floor
        if writes:
            k, rest = 2 * first[..., n : 2 * n].sigmoid(), entries[..., 2 * n :]
    return (pre[..., None] * x).sum(-2), pre, k, rest, x


def _told(x: Tensor, b: Tensor, chart: str, writes: bool = False, **_: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of x_in, pre, k and the rest."""
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    front = 2 * {"sigmoid": n, "softmax": n * n}.get(chart, 0) if writes else 0
    return (*lead, d), (*lead, n), (*lead, n if writes else 0), (*lead, len(b), b.shape[1] - front)


def draw_look(
    n: int, d: int, lead: tuple[int, ...], entries: int, chart: str, dtype: torch.dtype, device: str = "cpu",
    scales: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Streams and parameters of a call; streams of a mean. scales: fewer than one of every entry."""
    groups = n if chart == "first" else 1
    width = n * d // groups
    shapes = (entries, width), (scales or entries,), (groups, entries)
    phi, a, b = (torch.randn(s, device=device) for s in shapes)
    return [(torch.randn(*lead, n, d, device=device) + 0.3).to(dtype), phi * width**-0.5, a, b]


def look_errors(given: Sequence[Tensor], chart: str, **options: Any) -> list[float]:
    """Of x_in, pre, k, the rest, x and the gradients of x, phi, a, b against float64, relative to whole tensors."""
    x, _, _, b = given

    directions = [torch.randn(s, device=x.device) for s in (*_told(x, b, chart, **options), x.shape)]
    directions[0], directions[4] = directions[0].to(x.dtype), directions[4].to(x.dtype)
    got = gradients(lambda *g: look(*g, chart, **options), given, directions)
    want = gradients(lambda *g: looked(*g, chart, **options), [t.double() for t in given], directions)
    return [((p - q).norm() / q.norm().clamp(min=1e-30)).item() for p, q in zip(got, want, strict=True)]


def draw_follow(
    n: int, d: int, lead: tuple[int, ...], entries: int, chart: str, dtype: torch.dtype, device: str = "cpu",
    mixes: bool = True, each: bool = True, scales: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """What a write takes, and the parameters of a look at what it writes."""
    written = draw("write" if mixes else "write unmixed", n, d, lead, each, dtype, device)
    written["x"], *parameters = draw_look(n, d, lead, entries, chart, dtype, device, scales)
    return [*written.values(), *parameters]


def follow_errors(given: Sequence[Tensor], chart: str, **options: Any) -> list[float]:
    """Of X', x_in, pre, k, the rest and gradients of x, y, w, m if there is one, phi, a, b against float64, relative to
    whole tensors, or to what as many numbers of size one are, or to what the gradient of a write is summed of."""
    x, b = given[0], given[-1]

    def parts(g: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        (x, y, w), mixing, (phi, a, b) = g[:3], g[3:-3], g[-3:]
        return x, y, w, mixing[0] if mixing else None, phi, a, b

    def rounded(made: Tensor) -> Tensor:
        return made + (made.to(x.dtype).double() - made).detach()

    def meant(*g: Tensor) -> tuple[Tensor, ...]:
        x, y, w, m, *parameters = parts(g)
        made = write(x, y, w, m)
        # what is looked at is what was written, rounded; what it hears goes on to what it was made of
        return made, *looked(rounded(made), *parameters, chart, **options)[:4]  # type: ignore[arg-type]

    directions = [torch.randn(s, device=x.device) for s in (x.shape, *_told(x, b, chart, **options))]
    directions[:2] = [t.to(x.dtype) for t in directions[:2]]
    got = gradients(lambda *g: write_look(*parts(g), chart, **options), given, directions)
    exact = [t.double() for t in given]
    want = gradients(meant, exact, directions)
    # The gradient of X' is four sums, of which one is a product of fewer bits, and is rounded before those of the write
    # are sums of it. Where they cancel, as they do in rows of one number, what is left is as wrong as their terms were.
    count = len(given) - 3
    after = rounded(write(*exact[:count]))
    heard = gradients(
        lambda *apart: looked(after, *parts(exact)[4:], chart, **options, apart=apart)[:4], [after] * 3, directions[1:]
    )[4:]
    squares = sum((g.square() for g in heard), directions[0].double().square())
    terms = gradients(write, [t.square() for t in exact[:count]], [squares])[1:]  # a bilinear map: sums of squares
    least = [0.0] * 5 + [t.sum().sqrt().item() for t in terms] + [0.0] * 3
    return [
        ((p - q).norm() / q.norm().clamp(min=max(max(q.numel(), 1) ** 0.5, size))).item()
        for p, q, size in zip(got, want, least, strict=True)
    ]


# ---- mixers ----------------------------------------------------------------------------------------------------------


def sublayer(mixer: Any, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a sublayer sees, its streams after a write of something that depends on that, and what leaves, with the
    gradients of streams, of what is written and of every parameter."""
    parameters = list(mixer.parameters())
    x, y = (v.detach().requires_grad_() for v in given)
    seen, coefficients = mixer.read(x)
    after = mixer.write(x, y * seen, coefficients)
    outs = (seen, after, mixer.reduce(after))
    torch.manual_seed(1)
    total = sum((o * torch.randn(o.shape, dtype=torch.float64).to(o)).sum() for o in outs)
    found = torch.autograd.grad(total, [x, y, *parameters], allow_unused=True)
    return *(o.detach() for o in outs), *(torch.zeros(1) if g is None else g for g in found)


def check_mixer(
    name: str, streams: int, d: int = 12, lead: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32,
    device: str = "cpu", bound: float = 1e-5, **options: Any,
) -> None:  # fmt: skip
    """A mixer of the catalogue by kernels against the tuple in float64."""
    torch.manual_seed(0)
    cls = catalogue.get(name).cls
    mixer = cls(d, 1, **options, **({} if streams == 1 else {"streams": streams}), device=device)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.3 * torch.randn(p.shape).to(p))
    wide = copy.deepcopy(mixer).double()
    mixer.implementation, wide.implementation = "triton", "reference"
    given = [torch.randn(*lead, *s).to(device, dtype) for s in ((streams, d), (d,))]
    got, want = sublayer(mixer, given), sublayer(wide, [x.double() for x in given])
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and torch.isfinite(a).all(), (name, i)
        error = ((a - b).norm() / b.norm().clamp(min=0.1 * b.numel() ** 0.5)).item()
        assert error < bound, (name, streams, dtype, i, error)


def check_followed(
    name: str, after: str, streams: int = 2, d: int = 12, lead: tuple[int, ...] = (2, 3), device: str = "cpu"
) -> None:
    """A write and the next mixer's read in one call against one after the other."""
    torch.manual_seed(0)
    mixers = [catalogue.get(n).cls(d, i, streams=streams, device=device) for i, n in enumerate((name, after))]
    for mixer in mixers:
        mixer.implementation = "triton"
        for p in mixer.parameters():
            p.data.add_(0.3 * torch.randn(p.shape).to(p))
    first, second = mixers
    given = [torch.randn(*lead, *s, device=device).requires_grad_() for s in ((streams, d), (d,))]
    parameters = [p for mixer in mixers for p in mixer.parameters()]

    def results(joined: bool) -> list[Tensor]:
        x, y = given
        seen, coefficients = first.read(x)
        if joined:
            made, x, coefficients = first.write_then_read(x, y * seen, coefficients, second)
        else:
            made = first.write(x, y * seen, coefficients)
            x, coefficients = second.read(made)
        last = second.write(made, x.tanh(), coefficients)
        total = sum((o * torch.arange(o.numel(), device=device).view(o.shape).cos()).sum() for o in (made, x, last))
        return [made, x, last, *torch.autograd.grad(total, [*given, *parameters])]

    for i, (a, b) in enumerate(zip(results(True), results(False), strict=True)):
        assert (a - b).norm() <= 1e-5 * b.norm(), (name, after, i)
