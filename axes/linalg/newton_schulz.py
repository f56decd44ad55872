"""Newton-Schulz iterations: odd polynomials x <- a x + b x x^T x + c (x x^T)^2 x that bring singular values to 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from axes.kernels.common import versions
from axes.kernels.products import LARGEST_SIDE, MOST_POLYNOMIALS
from axes.linalg import symmetric
from axes.linalg.formulas import by_formula, iterates_by

Triple = tuple[float, float, float]
Form = Literal["direct", "gram"]

# Optimal odd quintics for singular values in [1e-3, 1], composed in this order (Amsel et al. 2025, algorithm 1);
# the last one repeats for ever.
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Each polynomial but the last is evaluated at x / SAFETY, so that rounding cannot push a value out of its interval.
SAFETY = 1.01
_SHORT = (torch.bfloat16, torch.float16)


def polar_express_schedule(steps: int) -> tuple[Triple, ...]:
    """The first `steps` polynomials, safety factor included."""
    safe = tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]) + POLAR_EXPRESS[-1:]
    return safe[:steps] + safe[-1:] * (steps - len(safe))


def leaf_norm(x: Tensor) -> Tensor:
    """Frobenius norm (..., 1, 1), with gradient 0 at a zero matrix."""
    if not _differentiated(x):
        norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        return norm
    zero = is_zero(x)
    return torch.where(zero, 0.0, torch.linalg.vector_norm(torch.where(zero, 1.0, x), dim=(-2, -1), keepdim=True))


def _differentiated(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def is_zero(x: Tensor) -> Tensor:
    """Whether a matrix is zero: (..., 1, 1)."""
    return (x == 0).all(-1, keepdim=True).all(-2, keepdim=True)


# Entries of a stack that a CPU takes at a time: three times as many numbers are then in use, which stay in cache and in
# memory that is used again. Measured in bfloat16: a step of 512 x 512 matrices takes 5 % less time by fours than by
# eights, while 64 x 64 matrices, one by one, take more than three times as long as a stack.
_AT_A_TIME = 1 << 20


def _instructions() -> dict[torch.dtype, bool]:
    """By a 16-bit type, whether this processor multiplies it by instructions of its own."""
    if not torch.backends.mkldnn.is_available():
        return {}
    known = torch.ops.mkldnn
    return {torch.bfloat16: known._is_mkldnn_bf16_supported(), torch.float16: known._is_mkldnn_fp16_supported()}


_INSTRUCTIONS = _instructions()


def _lent(x: Tensor) -> torch.dtype:
    """The type whose instructions multiply x: float32's where a CPU has none for 16 bits.

    torch adds products of 16 bits up in float32 and rounds once, in a loop of its own there that takes 50 to 250 times
    as long: products of rounded factors in float32, rounded again, are the same but for the order of sums.
    """
    return x.dtype if x.device.type != "cpu" or _INSTRUCTIONS.get(x.dtype, True) else torch.float32


def direct(x: Tensor, schedule: Sequence[Triple], lent: torch.dtype | None = None) -> Tensor:
    """x <- a x + (b x x^T + c (x x^T)^2) x for every (a, b, c), x (..., m, n) with m <= n.

    lent: products are of this type, and rounded to that of x.
    """
    if x.ndim == 2:
        return _iterated(x, schedule, lent or x.dtype)
    stack = x.flatten(0, -3)
    count = _AT_A_TIME // max(1, stack.shape[-2:].numel()) if x.device.type == "cpu" else stack.shape[0]
    parts = [_iterated(part, schedule, lent or x.dtype) for part in stack.split(max(1, count))]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(x.shape)


def _iterated(x: Tensor, schedule: Sequence[Triple], lent: torch.dtype) -> Tensor:
    # addmm rounds once, as the reference does; only a batch needs the three-dimensional form.
    if x.ndim == 3 and x.shape[0] == 1:
        return _iterated(x[0], schedule, lent)[None]
    fused = torch.addmm if x.ndim == 2 else torch.baddbmm
    rounded, x = x.dtype, x.to(lent)
    for a, b, c in schedule:
        gram = _rounded(x @ x.mT, rounded)
        x = _rounded(fused(x, _rounded(fused(gram, gram, gram, beta=b, alpha=c), rounded), x, beta=a), rounded)
    return x.to(rounded)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype).to(x.dtype)


# ---- in the space of Gram matrices -----------------------------------------------------------------------------------
# Every factor a I + b G + c G^2 with G = x x^T is a polynomial in the first G: the factors commute, and so
#     x_k = P x_0,  P = q_{k-1}(G_{k-1}) .. q_0(G_0),  G_{j+1} = q_j(G_j) G_j q_j(G_j)
# needs nothing but symmetric (m, m) matrices. With r = n / m, in units of 2 m^3 operations, k steps cost k (2 r + 1)
# plainly, k (3 r + 1) / 2 if symmetric products are computed by halves, and (3 r + 4 k - 3) / 2 in this form.
# Rounding: an error in G_0 that points below zero grows by a^2 in each step, so G is recomputed from x after RESTART
# steps; and a I is added last, since what is rounded beside a^k I loses the rest of it. Normalised matrices are within
# the range of float16, which has three more bits than bfloat16 at the same cost: the kernel works in float16, and then
# this form is nearer to exact arithmetic than bfloat16 products in a row are.

RESTART = 3
RECTANGLE = 1.5  # n / m from which full products cost less in this form


def multiplications(m: int, n: int, steps: int, form: Form) -> int:
    """Of one matrix (m, n), m <= n, about, where symmetric products of the Gram form are computed by halves."""
    if form == "direct":
        return steps * m * m * (2 * n + m)
    return (3 * -(-steps // RESTART) * m * m * n + (4 * steps - 3) * m**3) // 2


def in_gram_form(
    stacks: Sequence[Tensor],
    schedule: Sequence[Triple],
    sizes: Sequence[float],
    restart: int = RESTART,
    whole: int | None = None,
) -> list[Tensor]:
    """The iteration of `direct` on several stacks (N_i, m, n_i) of one m, dtype and device, |x|_F <= 1, times sizes.

    Gram matrices of all stacks are one batch. They are recomputed from x after at most `restart` polynomials. whole:
    the number of matrices that products are chosen for, by default those given.
    """
    x, counts = list(stacks), [s.shape[0] for s in stacks]
    parts = _parts(schedule, restart)
    whole = sum(counts) if whole is None else whole
    for place, part in enumerate(parts):
        factors = _composed(_grams(x, counts, whole), part, whole).split(counts)
        last = sizes if place == len(parts) - 1 else [1.0] * len(x)
        x = [_applied(f, s, size) for f, s, size in zip(factors, x, last, strict=True)]
    return x


def _parts(schedule: Sequence[Triple], longest: int) -> list[Sequence[Triple]]:
    """The schedule in as few parts as possible, as even as possible, longer ones first."""
    count = -(-len(schedule) // longest)
    short, extra = divmod(len(schedule), count)
    ends = [short * i + min(i, extra) for i in range(count + 1)]
    return [schedule[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def _lengths(steps: int) -> list[int]:
    """Of the parts of so many polynomials."""
    return [len(part) for part in _parts([(0.0, 0.0, 0.0)] * steps, RESTART)]


def _grams(stacks: Sequence[Tensor], counts: Sequence[int], whole: int) -> Tensor:
    if len(stacks) == 1:
        return symmetric.product(stacks[0], count=whole)
    m = stacks[0].shape[-2]
    out = stacks[0].new_empty(sum(counts), m, m)
    for x, part in zip(stacks, out.split(list(counts)), strict=True):
        symmetric.product(x, out=part, count=whole)
    return out


def _composed(gram: Tensor, part: Sequence[Triple], whole: int) -> Tensor:
    """The product of the polynomials of a part, as a function of the Gram matrix."""
    product = functools.partial(symmetric.product, count=whole)
    shift, factor = 1.0, gram  # what is composed so far is shift I + factor
    for i, (a, b, c) in enumerate(part):
        last = i == len(part) - 1
        if i == 0:  # q(G) = a I + Q
            factor = q = product(gram, alpha=c, terms=((b, gram),), diagonal=a if last else 0.0)
        else:  # (a I + Q) (s I + P) = a s I + a P + s Q + Q P
            q = product(gram, alpha=c, terms=((b, gram),))
            terms = ((a, factor), (shift, q))
            factor = product(q, factor, terms=terms, diagonal=a * shift if last else 0.0)
        shift *= a
        if not last:  # G <- q G q
            half = product(q, gram, terms=((a, gram),))
            gram = product(half, q, terms=((a, half),))
    return factor


def _applied(factor: Tensor, x: Tensor, size: float) -> Tensor:
    """size P x, stored by rows or columns as x is."""
    unread = x.new_empty(1, 1, 1)
    if x.stride(-1) == 1:
        return torch.baddbmm(unread, factor, x, beta=0.0, alpha=size)
    return torch.baddbmm(unread, x.mT, factor, beta=0.0, alpha=size).mT


class Start(NamedTuple):
    """What x is divided by before the iteration: max(factor |x|_F + shift, floor).

    A zero matrix, which stays zero, has derivative zero like its norm: at a floor of 1e-7 a token of a state that is
    projected would multiply what is asked of it by more than 1e9, and five of them leave float32.
    """

    factor: float
    shift: float
    floor: float | Tensor

    def divisor(self, x: Tensor) -> Tensor:
        found = (leaf_norm(x) * self.factor + self.shift).clamp(min=self.floor)
        return torch.where(is_zero(x), torch.inf, found) if _differentiated(x) else found


# ---- in one launch ---------------------------------------------------------------------------------------------------
# A step of small matrices is three products that a GPU is through with before the host has asked for the next. Along a
# sequence whose state itself is made orthogonal that is every token's: 33 launches of eight steps, each differentiated.


def no_kernel(x: Tensor, start: Start, schedule: Sequence[Triple] | Moving) -> str | None:
    """Why no kernel takes all steps of a stack (..., m, n) at once, or None if one does."""
    reason = versions.refusal(x.device)
    if reason is not None:
        return reason
    if x.dtype != torch.float32:
        return f"the kernel iterates in float32, not {x.dtype}"
    if max(x.shape[-2:]) > LARGEST_SIDE:
        return f"sides are at most {LARGEST_SIDE}, not {tuple(x.shape[-2:])}"
    if isinstance(schedule, Moving) or isinstance(start.floor, Tensor):
        return "the kernel takes numbers of the host"
    if len(_changing(schedule)) > MOST_POLYNOMIALS:
        return f"the kernel takes up to {MOST_POLYNOMIALS} different polynomials"
    if not (torch.compiler.is_compiling() or by_formula(x)):
        return "transformations of torch.func, forward mode and subclasses of tensors follow torch's products"
    return None


def in_one_launch(x: Tensor, start: Start, schedule: Sequence[Triple], size: float) -> Tensor:
    """The iteration of a stack that `no_kernel` has nothing against, x normalised by `start`, times size."""
    from axes.kernels.products.iterated import newton_schulz  # triton is imported on first use

    return newton_schulz(x, tuple(_changing(schedule)), len(schedule), *start, size)  # type: ignore[arg-type]


def _changing(schedule: Sequence[Triple]) -> Sequence[Triple]:
    """Without those at the end that are the last one again."""
    last = next((i for i in reversed(range(len(schedule))) if schedule[i] != schedule[-1]), -1)
    return schedule[: last + 2]


class Moving(NamedTuple):
    """`steps` times one polynomial whose (a, b, c) are numbers of a device, which may be others at every replay.

    Products take numbers of the host, but for a factor of A B^T and one of the first term. So a polynomial is divided
    by a: q(G) / a = I + (b / a) G + (c / a) G^2, whose products have terms of weight 1, and G <- q G q is made with a^2
    as both factors. a^k comes back at the end of a part. What of this is numbers alone the host computes (`told`): on a
    device each would be a launch.
    """

    numbers: Tensor
    steps: int

    @staticmethod
    def told(coefficients: Triple, steps: int) -> tuple[float, ...]:
        """`numbers`: a, b, c; the factors of the square and of what G becomes; a^k of every part."""
        a, b, c = coefficients
        over = [x / a if a else math.nan for x in (c, b)]
        return a, b, c, *over, a * a, a * a, *(a**k for k in _lengths(steps))

    def direct(self, x: Tensor, lent: torch.dtype | None = None) -> Tensor:
        """`direct`; sums are float32, for a number of a device is rounded to the dtype of a tensor beside it."""
        high, rounded = torch.promote_types(x.dtype, torch.float32), x.dtype
        a, b, c = self.numbers[:3].to(high).unbind()
        x = x.to(lent or rounded)
        for _ in range(self.steps):
            gram = _rounded(x @ x.mT, rounded)
            q = (b * gram.to(high) + c * _rounded(gram @ gram, rounded).to(high)).to(rounded).to(x.dtype)
            x = (a * x.to(high) + _rounded(q @ x, rounded).to(high)).to(rounded).to(x.dtype)
        return x.to(rounded)

    def in_gram_form(self, stacks: Sequence[Tensor], sizes: Sequence[float], whole: int) -> list[Tensor]:
        """`in_gram_form`."""
        x, counts = list(stacks), [s.shape[0] for s in stacks]
        high = torch.promote_types(x[0].dtype, torch.float32)
        numbers, lengths = self.numbers.to(high), _lengths(self.steps)
        both = numbers[3:7].view(2, 1, 2).expand(-1, sum(counts), -1).contiguous()
        for place, length in enumerate(lengths):
            factors = self._composed(_grams(x, counts, whole), both, length, whole).mul_(numbers[7 + place])
            last = sizes if place == len(lengths) - 1 else [1.0] * len(x)
            x = [_applied(f, s, size) for f, s, size in zip(factors.split(counts), x, last, strict=True)]
        return x

    @staticmethod
    def _composed(gram: Tensor, both: Tensor, length: int, whole: int) -> Tensor:
        """The product of the polynomials of a part, each divided by a. both: factors of the square and of q G q."""
        product = functools.partial(symmetric.product, count=whole)
        factor = gram
        for j in range(length):
            end = 1.0 if j == length - 1 else 0.0
            q = product(gram, terms=((1.0, gram),), diagonal=end if j == 0 else 0.0, factors=both[0])
            factor = product(q, factor, terms=((1.0, factor), (1.0, q)), diagonal=end) if j else q
            if not end:
                half = product(q, gram, terms=((1.0, gram),))
                gram = product(half, q, terms=((1.0, half),), factors=both[1])
        return factor


def iterate(
    stacks: Sequence[Tensor],
    start: Start,
    schedule: Sequence[Triple] | Moving,
    form: Form,
    sizes: Sequence[float],
    dtype: torch.dtype,
    squares: Sequence[Tensor] | None = None,
    spend: bool = False,
    whole: Mapping[int, int] | None = None,
) -> list[Tensor]:
    """The iteration on stacks (..., m_i, n_i), m_i <= n_i, of any sizes, normalised by `start`, times sizes.

    What `no_kernel` has nothing against, small float32 matrices on a GPU, is one launch a stack in either form. Else
    "direct" is one product after the other, as they are written, and the result in `dtype` before it is scaled.
    "gram" takes the Gram form where that is cheaper and as accurate: for rectangles in float32 and float64, and for
    16-bit matrices on a GPU, where results are float16, for rectangles and whatever the kernel of
    `axes.linalg.symmetric` takes. Everything else is direct, 16 bits on a CPU that has no instructions for them by
    products in float32 that are rounded.
    squares: of each stack (matrices, any number), sums of squares of parts of its matrices, where they are known.
    spend: the stacks may be overwritten.
    whole: by m, how many matrices products are chosen for, where others are multiplied elsewhere; by default the given
    ones. A matrix's result is then the same to the bit, whichever others are beside it, as far as torch's products are.
    schedule: `Moving` where its numbers are on the device.
    """
    moving, operator = schedule if isinstance(schedule, Moving) else None, iterates_by()
    out = list(stacks)
    pools: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for i, x in enumerate(stacks):
        if operator is not None and moving is None and x.dtype not in _SHORT:
            out[i] = operator(x, start, schedule, sizes[i]).to(dtype)
        elif no_kernel(x, start, schedule) is None:
            out[i] = in_one_launch(x, start, schedule, sizes[i]).to(dtype)  # type: ignore[arg-type]
        else:
            pools.setdefault((x.shape[-2], x.dtype, x.device), []).append(i)
    for (m, _, _), members in pools.items():
        count = sum(stacks[i].shape[:-2].numel() for i in members) if whole is None else whole[m]
        chosen = _gains(stacks, members, count) if form == "gram" else []
        for i in members:
            if i not in chosen:
                divisor = start.divisor(stacks[i])
                begun = stacks[i].div_(divisor) if spend else stacks[i] / divisor
                lent = _lent(begun) if form == "gram" else None  # the direct form has torch's bits
                x = direct(begun, schedule, lent) if moving is None else moving.direct(begun, lent)  # type: ignore[arg-type]
                x = x.to(dtype)
                out[i] = x if sizes[i] == 1.0 else x * sizes[i]
        if chosen:
            started = [_started(stacks[i], start, None if squares is None else squares[i]) for i in chosen]
            some = [sizes[i] for i in chosen]
            if moving is None:
                directions = in_gram_form(started, schedule, some, whole=count)  # type: ignore[arg-type]
            else:
                directions = moving.in_gram_form(started, some, count)
            for i, x in zip(chosen, directions, strict=True):
                out[i] = x.reshape(stacks[i].shape)
    return out


def _gains(stacks: Sequence[Tensor], members: list[int], count: int) -> list[int]:
    """Those of one m, dtype and device for which the Gram form is better, each by its own shape and the count."""
    x = stacks[members[0]]
    wide = [i for i in members if stacks[i].shape[-1] >= RECTANGLE * stacks[i].shape[-2]]
    if x.dtype not in _SHORT:
        return wide
    if x.device.type != "cuda" or any(stacks[i].requires_grad for i in members):
        return []
    flat = {i: stacks[i].reshape(-1, *stacks[i].shape[-2:]) for i in members}
    return [i for i in members if i in wide or symmetric.no_kernel(flat[i], count) is None]


def _started(x: Tensor, start: Start, squares: Tensor | None) -> Tensor:
    """x normalised, (N, m, n), in float16 if it has 16 bits."""
    flat = x.reshape(-1, *x.shape[-2:])
    if x.dtype not in _SHORT:
        return flat / start.divisor(flat)
    if versions.UNUSABLE is None and (flat.is_contiguous() or flat.mT.is_contiguous()):
        from axes.kernels.products.normalise import normalised  # triton is imported on first use

        return normalised(flat, *start, squares)
    return (flat / start.divisor(flat)).half()
