"""Sinkhorn's k pairs of normalisations of small matrices, one launch each way, whatever k.

    z <- z - lse_i z,  z <- z - lse_j z   (columns, then rows)  k times,  W = e^z       z = logits (..., n, n) at first

What a normalisation takes away is kept apart from z, so that no exponent is positive. The gradient is that of the
truncated map: through z' = z - lse z it is dz = dz' - e^z' sum dz', and e^z' is what the normalisation left. So the
backward goes through the pairs again, writes down what each took away, 2 n numbers a pair, and puts it back one by one.

With eps > 0 it is what released models compute, where no sum vanishes and there are no logs:

    w <- softmax_i z + eps,  w <- w / (eps + sum_j w),  then k - 1 times columns and rows,  w <- w / (eps + sum w)

whose gradient, through w' = w / t with t = eps + sum w, is dw = (dw' - sum dw' w') / t; what is written down is t.

Of up to four streams a thread has a matrix, each of its entries by itself, so that no sum waits for another thread; and
where the logits of all matrices of a program are within `_NEAR` of each other, entries leave no range of float32: there
it is divisions without eps too. In logits these have the gradient above, with e^z' what the division left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axes.errors import ShapeError
from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.streams import LARGEST
from axes.kernels.streams.small import FEW, _entries, _kept, _less, _place, _sums, _times, launch

_ENTRIES = 1024  # of a program
_WARPS = 4
_NEAR = tl.constexpr(40.0)


# ---- a tile of matrices ----------------------------------------------------------------------------------------------


@triton.jit
def _logsumexp(z, inside, AXIS: tl.constexpr):
    """Of rows or columns with entries, 0 of the others."""
    top = tl.where(inside, tl.max(z, AXIS, keep_dims=True), 0.0)
    return top, tl.log(tl.where(inside, tl.sum(tl.exp(z - top), AXIS, keep_dims=True), 1.0))


@triton.jit
def _places(matrices, n, ROWS: tl.constexpr, N: tl.constexpr):
    """Of a program: its matrices and their entries, and which of these, of columns and of rows there are."""
    matrix = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
    there = matrix < matrices
    return matrix, i, j, there & (i < n) & (j < n), there & (j < n), there & (i < n)


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _forward(logits, out, matrices, pairs, n, ROWS: tl.constexpr, N: tl.constexpr):
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    at = matrix * n * n + i * n + j
    z = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    for _ in range(pairs):
        top, rest = _logsumexp(z, columns, 1)
        z = (z - top) - rest
        top, rest = _logsumexp(z, rows, 2)
        z = (z - top) - rest
    tl.store(out + at, tl.exp(z), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _backward(logits, dout, dlogits, taken, matrices, pairs, n, ROWS: tl.constexpr, N: tl.constexpr):
    """taken: (2 pairs, matrices, n), written and read by this program alone."""
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    at = matrix * n * n + i * n + j
    z = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    step = matrices.to(tl.int64) * n
    place = taken + matrix * n
    for _ in range(pairs):
        top, rest = _logsumexp(z, columns, 1)
        z = (z - top) - rest
        tl.store(place + j, top + rest, mask=columns)
        top, rest = _logsumexp(z, rows, 2)
        z = (z - top) - rest
        tl.store(place + step + i, top + rest, mask=rows)
        place += 2 * step
    tl.debug_barrier()  # what one thread has written another one reads
    w = tl.exp(z)
    dz = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32) * w
    for _ in range(pairs):
        place -= 2 * step
        dz -= tl.exp(z) * tl.sum(dz, 2, keep_dims=True)
        z += tl.load(place + step + i, mask=rows, other=0.0)
        dz -= tl.exp(z) * tl.sum(dz, 1, keep_dims=True)
        z += tl.load(place + j, mask=columns, other=0.0)
    tl.store(dlogits + at, dz.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def _first(logits, at, inside, columns):
    """softmax_i z, 0 where there are no entries."""
    z = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    top, rest = _logsumexp(z, columns, 1)
    return tl.where(inside, tl.exp((z - top) - rest), 0.0)


@triton.jit
def _shared(w, eps, AXIS: tl.constexpr):
    """w over its sums and eps, and these."""
    taken = tl.sum(w, AXIS, keep_dims=True) + eps
    return w / taken, taken


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _floored(logits, out, matrices, pairs, eps, n, ROWS: tl.constexpr, N: tl.constexpr):
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    at = matrix * n * n + i * n + j
    w = tl.where(inside, _first(logits, at, inside, columns) + eps, 0.0)
    w, last = _shared(w, eps, 2)
    for _ in range(pairs - 1):
        w, last = _shared(w, eps, 1)
        w, last = _shared(w, eps, 2)
    tl.store(out + at, w, mask=inside)


@triton.jit
def _unshared(w, dw, place, mask, AXIS: tl.constexpr):
    """Back through a division by what was written down."""
    taken = tl.load(place, mask=mask, other=1.0)
    return w * taken, (dw - tl.sum(dw * w, AXIS, keep_dims=True)) / taken


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _floored_backward(logits, dout, dlogits, taken, matrices, pairs, eps, n, ROWS: tl.constexpr, N: tl.constexpr):
    """taken: (2 pairs - 1, matrices, n), written and read by this program alone."""
    matrix, i, j, inside, columns, rows = _places(matrices, n, ROWS, N)
    at = matrix * n * n + i * n + j
    first = _first(logits, at, inside, columns)
    step = matrices.to(tl.int64) * n
    place = taken + matrix * n
    w, last = _shared(tl.where(inside, first + eps, 0.0), eps, 2)
    tl.store(place + i, last, mask=rows)
    for _ in range(pairs - 1):
        w, last = _shared(w, eps, 1)
        tl.store(place + step + j, last, mask=columns)
        w, last = _shared(w, eps, 2)
        tl.store(place + 2 * step + i, last, mask=rows)
        place += 2 * step
    tl.debug_barrier()  # what one thread has written another one reads
    dw = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    for _ in range(pairs - 1):
        w, dw = _unshared(w, dw, place + i, rows, 2)
        w, dw = _unshared(w, dw, place - step + j, columns, 1)
        place -= 2 * step
    w, dw = _unshared(w, dw, place + i, rows, 2)
    dz = first * (dw - tl.sum(tl.where(inside, dw * first, 0.0), 1, keep_dims=True))
    tl.store(dlogits + at, dz.to(dlogits.dtype.element_ty), mask=inside)


# ---- a matrix a thread -----------------------------------------------------------------------------------------------


@triton.jit
def _tops(z, N: tl.constexpr, AXIS: tl.constexpr):
    """The largest of every column or row."""
    found = ()
    for k in tl.static_range(N):
        top = z[k if AXIS == 0 else k * N]
        for i in tl.static_range(1, N):
            top = tl.maximum(top, z[i * N + k if AXIS == 0 else k * N + i])
        found = found + (top,)  # type: ignore[assignment]
    return found


@triton.jit
def _product(a, b, N: tl.constexpr):
    """Entry by entry."""
    made = ()
    for e in tl.static_range(N * N):
        made = made + (a[e] * b[e],)  # type: ignore[assignment]
    return made


@triton.jit
def _plus(w, eps, COUNT: tl.constexpr):
    made = ()
    for e in tl.static_range(COUNT):
        made = made + (w[e] + eps,)  # type: ignore[assignment]
    return made


@triton.jit
def _parts(w, eps, N: tl.constexpr):
    """Shares of w in w + eps."""
    made = ()
    for e in tl.static_range(N * N):
        made = made + (w[e] / (w[e] + eps),)  # type: ignore[assignment]
    return made


@triton.jit
def _exps(z, COUNT: tl.constexpr):
    made = ()
    for e in tl.static_range(COUNT):
        made = made + (tl.exp(z[e]),)  # type: ignore[assignment]
    return made


@triton.jit
def _normal(z, N: tl.constexpr, AXIS: tl.constexpr):
    """z less the logs of the sums of e^z, and what was taken away in two numbers."""
    tops = _tops(z, N, AXIS)
    z = _less(z, tops, N, AXIS)
    rests = ()
    sums = _sums(_exps(z, N * N), N, AXIS)
    for k in tl.static_range(N):
        rests = rests + (tl.log(sums[k]),)  # type: ignore[assignment]
    return _less(z, rests, N, AXIS), tops, rests


@triton.jit
def _near(z, N: tl.constexpr):
    """Whether all logits of each matrix are near to each other."""
    top, low = z[0], z[0]
    for e in tl.static_range(1, N * N):
        top, low = tl.maximum(top, z[e]), tl.minimum(low, z[e])
    return tl.max(top - low, 0) < _NEAR


@triton.jit
def _few_shared(w, eps, N: tl.constexpr, AXIS: tl.constexpr):
    """w over its sums and eps, and these."""
    taken = _plus(_sums(w, N, AXIS), eps, N)
    shares = ()
    for k in tl.static_range(N):
        shares = shares + (1.0 / taken[k],)  # type: ignore[assignment]
    return _times(w, shares, N, AXIS), taken


@triton.jit
def _few_first(z, N: tl.constexpr):
    """softmax_i z."""
    z, tops, rests = _normal(z, N, 0)
    return _exps(z, N * N)


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _few_forward(logits, out, matrices, pairs, eps, N: tl.constexpr, ROWS: tl.constexpr, FLOORED: tl.constexpr):
    matrix, there = _place(matrices, ROWS)
    z = _entries(logits, matrix, there, N)
    if FLOORED or _near(z, N):
        w, taken = _few_shared(_plus(_few_first(z, N), eps, N * N), eps, N, 1)
        for _ in range(pairs - 1):
            w, taken = _few_shared(w, eps, N, 0)
            w, taken = _few_shared(w, eps, N, 1)
        _kept(out, w, matrix, there, N)
    else:
        for _ in range(pairs):
            z, tops, rests = _normal(z, N, 0)
            z, tops, rests = _normal(z, N, 1)
        _kept(out, _exps(z, N * N), matrix, there, N)


@triton.jit
def _noted(place, taken, matrix, there, matrices, N: tl.constexpr):
    for k in tl.static_range(N):
        tl.store(place + k * matrices + matrix, taken[k], mask=there)


@triton.jit
def _asked(place, matrix, there, matrices, N: tl.constexpr):
    """What was written down."""
    found = ()
    for k in tl.static_range(N):
        found = found + (tl.load(place + k * matrices + matrix, mask=there, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def _told(place, tops, rests, matrix, there, matrices, N: tl.constexpr):
    taken = ()
    for k in tl.static_range(N):
        taken = taken + (tops[k] + rests[k],)  # type: ignore[assignment]
    _noted(place, taken, matrix, there, matrices, N)


@triton.jit
def _heard(w, dz, N: tl.constexpr, AXIS: tl.constexpr):
    """Through a normalisation, in logits: dz less what it has made times its sums."""
    shares, grads = _times(w, _sums(dz, N, AXIS), N, AXIS), ()
    for e in tl.static_range(N * N):
        grads = grads + (dz[e] - shares[e],)  # type: ignore[assignment]
    return grads


@triton.jit
def _back(z, dz, place, matrix, there, matrices, N: tl.constexpr, AXIS: tl.constexpr):
    """Through a normalisation of logs, and z with what was taken away."""
    again, c = (), _asked(place, matrix, there, matrices, N)
    for e in tl.static_range(N * N):
        again = again + (z[e] + c[e % N if AXIS == 0 else e // N],)  # type: ignore[assignment]
    return again, _heard(_exps(z, N * N), dz, N, AXIS)


@triton.jit
def _few_unshared(w, dz, place, matrix, there, matrices, N: tl.constexpr, AXIS: tl.constexpr):
    """The same of a division, and w times what it was divided by."""
    return _times(w, _asked(place, matrix, there, matrices, N), N, AXIS), _heard(w, dz, N, AXIS)


@Kernel
@triton.jit(do_not_specialize=["matrices", "pairs"])
def _few_backward(logits, dout, dlogits, taken, matrices, pairs, eps, N: tl.constexpr, ROWS: tl.constexpr,
                  FLOORED: tl.constexpr):  # fmt: skip
    """taken: (2 pairs, n, matrices); a thread reads what it has written."""
    matrix, there = _place(matrices, ROWS)
    z = _entries(logits, matrix, there, N)
    step = matrices.to(tl.int64) * N
    if FLOORED or _near(z, N):
        first = _few_first(z, N)
        w, last = _few_shared(_plus(first, eps, N * N), eps, N, 1)
        _noted(taken, last, matrix, there, matrices, N)
        for _ in range(pairs - 1):
            w, last = _few_shared(w, eps, N, 0)
            _noted(taken + step, last, matrix, there, matrices, N)
            w, last = _few_shared(w, eps, N, 1)
            _noted(taken + 2 * step, last, matrix, there, matrices, N)
            taken += 2 * step
        dz = _product(_entries(dout, matrix, there, N), w, N)
        for _ in range(pairs - 1):
            w, dz = _few_unshared(w, dz, taken, matrix, there, matrices, N, 1)
            w, dz = _few_unshared(w, dz, taken - step, matrix, there, matrices, N, 0)
            taken -= 2 * step
        w, dz = _few_unshared(w, dz, taken, matrix, there, matrices, N, 1)
        if FLOORED:  # of logs of what eps was added to
            dz = _product(dz, _parts(first, eps, N), N)
        _kept(dlogits, _heard(first, dz, N, 0), matrix, there, N)
    else:
        for _ in range(pairs):
            z, tops, rests = _normal(z, N, 0)
            _told(taken, tops, rests, matrix, there, matrices, N)
            z, tops, rests = _normal(z, N, 1)
            _told(taken + step, tops, rests, matrix, there, matrices, N)
            taken += 2 * step
        dz = _product(_entries(dout, matrix, there, N), _exps(z, N * N), N)
        for _ in range(pairs):
            taken -= 2 * step
            z, dz = _back(z, dz, taken + step, matrix, there, matrices, N, 1)
            z, dz = _back(z, dz, taken, matrix, there, matrices, N, 0)
        _kept(dlogits, dz, matrix, there, N)


# ---- launches --------------------------------------------------------------------------------------------------------


def _launch(few: Kernel, any_: Kernel, logits: Tensor, *given: Tensor, pairs: int, eps: float) -> None:
    """few: of few rows."""
    matrices, n = logits.shape[:2]
    if not matrices:
        return
    with layout.on_device(logits):
        if n <= FEW:
            launch(few, matrices, logits, *given, pairs=pairs, eps=eps, N=n, FLOORED=eps > 0)
            return
        side, more = power_of_2(n), (eps,) if eps else ()
        rows = min(_ENTRIES // side**2, power_of_2(matrices))
        any_[(cdiv(matrices, rows),)](
            logits, *given, matrices, pairs, *more, n, ROWS=rows, N=side, num_warps=_WARPS
        )  # fmt: skip


def _run(logits: Tensor, pairs: int, eps: float, record: bool) -> tuple[Tensor, list[Tensor]]:
    out = torch.empty_like(logits)
    _launch(_few_forward, _floored if eps else _forward, logits, out, pairs=pairs, eps=eps)
    return out, []


def _differentiate(logits: Tensor, pairs: int, eps: float, kept: list[Tensor], dout: Tensor) -> list[Tensor]:
    dlogits, taken = torch.empty_like(logits), logits.new_empty(2 * pairs, *logits.shape[:2])
    every = _floored_backward if eps else _backward
    _launch(_few_backward, every, logits, dout, dlogits, taken, pairs=pairs, eps=eps)
    return [dlogits]


_sinkhorn = Differentiable(
    "sinkhorn", _run, _differentiate, lambda logits, pairs, eps, record: (torch.empty_like(logits), []), gradients=1
)


def sinkhorn(logits: Tensor, pairs: int, eps: float = 0.0) -> Tensor:
    """Matrices (..., n, n) in float32, row sums one, column sums nearly so: e^logits after `pairs` of normalisations.

    eps: added to what is divided by, and to the entries after the first columns; row sums are then one less a little.
    Raises ShapeError for other shapes, n above 16, and devices that no kernel runs on.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not 1 <= logits.shape[-1] <= LARGEST:
        raise ShapeError(f"sinkhorn: logits are (..., n, n) with n from 1 to {LARGEST}, not {tuple(logits.shape)}")
    if not logits.is_floating_point() or logits.dtype == torch.float64 or pairs < 1:
        raise ShapeError(f"sinkhorn: logits of up to 32 bits and pairs from 1 on, not {logits.dtype} and {pairs}")
    if logits.device.type != "cuda" and not layout.interpreted():
        raise ShapeError(f"sinkhorn: the Triton kernel needs a CUDA device, not {logits.device}")
    (out,) = _sinkhorn(logits.to(torch.float32).reshape(-1, *logits.shape[-2:]).contiguous(), pairs, float(eps))
    made: Tensor = out.view(logits.shape)
    return made
