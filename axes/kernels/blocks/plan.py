"""What `enter` does with the columns of a product: streams and numbers side by side, and the kernels' view of them.

Nothing here needs Triton.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, final

from torch import Tensor

from axes.kernels.common.sizes import power_of_2

# kernels are given places in these lists: constants of a Triton kernel may be tuples of numbers
ACTIVATIONS = ("none", "silu", "gelu", "relu", "elu+1", "sigmoid")
CHARTS = ("linear", "sigmoid", "logsigmoid", "softplus", "ssm", "nothing")
NORMS = ("none", "unit", "rms")
WIDEST = 4  # convolution
LARGEST = 256  # width of a head
LONGEST = 8192  # of all heads together, where a norm or a skip is over all of them
WARPS = 4  # of a program; half of them where heads are then shared out with fewer idle rows
_ENTRIES = 4  # of a row in a thread: 8 bytes of a 16-bit number, which half as many registers hold as 16
_TILE = 1024  # numbers at once


class Stream(NamedTuple):
    """Columns (heads, width) that become a vector of every head: a convolution, functions, a norm, a scale, in turn.

    conv: width of the causal convolution, 0 for none, with a bias if `biased`.  norm: of a head, "unit" length or
    "rms"; eps is added under the root.  turn: pairs (j, j + width / 2) of the n-th token of a call or sequence, counted
    from 1, turn back by n turn^(-2j / width), with `uniform` by n turn; 0 for not at all.
    """

    heads: int
    width: int
    conv: int = 0
    biased: bool = False
    activation: str = "none"
    feature_map: str = "none"
    norm: str = "none"
    eps: float = 0.0
    scale: float = 1.0
    turn: float = 0.0
    uniform: bool = False

    @property
    def linear(self) -> bool:
        """Whether its backward need not know the product."""
        return not self.conv and self.activation == self.feature_map == self.norm == "none"


class Numbers(NamedTuple):
    """Columns that become factor * chart(x + bias) entry by entry, in float32 or, if `narrow`, in the product's dtype.

    "ssm" is two results of one column: -e^r softplus(x + bias), r a parameter of the column, and the softplus alone if
    it is a `step` too.
    """

    columns: int
    chart: str = "linear"
    factor: float = 1.0
    biased: bool = False
    narrow: bool = False
    step: bool = False


@final
class Plan:
    """Streams, then numbers, side by side in a product `width` wide, whose columns past the last are padding.

    parts are the kernels' view: streams that differ in norm and scale alone are members of one. Flat lists of tensors
    hold what exists, in the order of the declaration, and are spread over the parts.  text: the declaration, which
    operators carry.
    """

    def __init__(self, streams: Sequence[Stream], numbers: Sequence[Numbers], width: int) -> None:
        self.streams, self.numbers, self.width = tuple(streams), tuple(numbers), width
        self.text = json.dumps([streams, numbers, width])
        used = sum(s.heads * s.width for s in streams) + sum(n.columns for n in numbers)
        self.padding = (Numbers(width - used, "nothing"),) if width > used else ()
        self.members = self._members()
        self.warps = min((WARPS, WARPS // 2), key=lambda warps: sum(self._rows(s, warps)[1] for s in self.streams))
        firsts, starts, self.sums = self._places()
        parts: list[tuple[Any, ...]] = []
        block = 0
        for members in self.members:
            s = max((streams[m] for m in members), key=lambda s: s.norm != "none")
            side = power_of_2(s.width)
            together, taken = self._rows(s, self.warps)
            each = taken // together
            codes = ACTIVATIONS.index(s.activation), ACTIVATIONS.index(s.feature_map), NORMS.index(s.norm), s.eps
            whole = each * len(members)
            parts.append((
                0, block, whole, each, s.heads, s.width, side, together, s.conv, *codes, s.turn, s.uniform,
                len(members), *[firsts[m] for m in members], *[streams[m].scale for m in members],
                *[int(streams[m].norm != "none") for m in members], *[starts[m] for m in members],
            ))  # fmt: skip
            block += whole
        rest = slice(len(streams), None)
        for n, first, start in zip((*self.numbers, *self.padding), firsts[rest], starts[rest], strict=True):
            side = min(128, power_of_2(n.columns))
            blocks = -(-n.columns // side)
            code = CHARTS.index(n.chart)
            parts.append((1, block, blocks, first, n.columns, side, _TILE // side, code, n.factor, start))
            block += blocks
        self.parts, self.blocks = tuple(parts), block
        self._no_tails = self._over_parts([None] * len(streams), [None] * len(numbers))
        self._results = len(streams) + len(numbers) + sum(n.step for n in numbers)
        self._parameters = self._sizes()

    @staticmethod
    def _rows(stream: Stream, warps: int) -> tuple[int, int]:
        """Heads that a program of so many warps takes at once, and that all programs take, those that are none too."""
        together = max(1, min(32 * warps * _ENTRIES // power_of_2(stream.width), power_of_2(stream.heads)))
        return together, -(-stream.heads // together) * together

    def _members(self) -> list[list[int]]:
        parts: dict[Any, list[int]] = {}
        plain = [s._replace(norm="none", eps=0.0, scale=1.0) for s in self.streams]
        for i, s in enumerate(self.streams):
            if s.norm != "none":
                parts.setdefault((plain[i], s.norm, s.eps), []).append(i)
        for i, s in enumerate(self.streams):
            if s.norm == "none":
                alike = next((key for key in parts if key[0] == plain[i]), (plain[i], "none", 0.0))
                parts.setdefault(alike, []).append(i)
        return list(parts.values())

    def _places(self) -> tuple[list[int], list[int], int]:
        """First columns in the product and first places among the sums, and how many sums there are."""
        firsts, starts, first, start = [], [], 0, 0
        for s in self.streams:
            firsts.append(first)
            starts.append(start)
            first, start = first + s.heads * s.width, start + s.heads * s.width * (s.conv + s.biased)
        for n in (*self.numbers, *self.padding):
            firsts.append(first)
            starts.append(start)
            first, start = first + n.columns, start + n.columns * (n.biased + (n.chart == "ssm"))
        return firsts, starts, start

    @cached_property
    def linear(self) -> bool:
        """Whether the backward need not know the product, only its gradient's dtype, which a result has."""
        charts = all(n.chart == "linear" and not n.biased for n in self.numbers)
        return charts and all(s.linear for s in self.streams) and any(not wide for _, wide in self.shapes(1, 1))

    def results(self) -> int:
        """How many there are, tails apart."""
        return self._results

    def shapes(self, b: int, t: int) -> list[tuple[tuple[int, ...], bool]]:
        """Of every result and whether it is float32."""
        made: list[tuple[tuple[int, ...], bool]] = [((b, t, s.heads, s.width), False) for s in self.streams]
        for n in self.numbers:
            made += [((b, t, n.columns), not n.narrow)] * (1 + n.step)
        return made

    def tails(self, units: int) -> list[tuple[int, int, int]]:
        return [(units, s.conv - 1, s.heads * s.width) for s in self.streams if s.conv]

    def parameters(self) -> list[int]:
        """Sizes of the parameters in the order of the sums and of the list."""
        return self._parameters

    def _sizes(self) -> list[int]:
        made: list[int] = []
        for s in self.streams:
            made += [s.heads * s.width * s.conv] * (s.conv > 0) + [s.heads * s.width] * s.biased
        for n in self.numbers:
            made += [n.columns] * ((n.chart == "ssm") + n.biased)
        return made

    def _over_parts(self, streams: Sequence[Tensor | None], numbers: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Of a part of streams what its members have, or None if they have nothing."""
        made = [tuple(streams[m] for m in members) for members in self.members]
        return (*[None if x[0] is None else x for x in made], *numbers, *[None] * len(self.padding))

    def over_parameters(self, given: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Weights and biases."""
        rest = iter(given)
        pairs = [(next(rest) if s.conv else None, next(rest) if s.biased else None) for s in self.streams]
        pairs += [(next(rest) if n.chart == "ssm" else None, next(rest) if n.biased else None) for n in self.numbers]
        n = len(self.streams)
        return tuple(self._over_parts([x[i] for x in pairs[:n]], [x[i] for x in pairs[n:]]) for i in (0, 1))  # type: ignore[return-value]

    def over_tails(self, given: Sequence[Tensor]) -> tuple[Any, ...]:
        if not given:
            return self._no_tails
        rest = iter(given)
        tails = [next(rest) if s.conv else None for s in self.streams]
        return self._over_parts(tails, [None] * len(self.numbers))

    def over_results(self, results: Sequence[Tensor], tails: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
        """First results, and new tails or step sizes."""
        rest = iter(results)
        streams = [next(rest) for _ in self.streams]
        pairs = [(next(rest), next(rest) if n.step else None) for n in self.numbers]
        others, steps = self.over_tails(tails), [y for _, y in pairs]
        n = len(self.members)
        return self._over_parts(streams, [x for x, _ in pairs]), (*others[:n], *steps, *others[n + len(steps) :])


@lru_cache(maxsize=1024)
def read(text: str) -> Plan:
    """The plan of a declaration's text."""
    streams, numbers, width = json.loads(text)
    return Plan([Stream(*s) for s in streams], [Numbers(*n) for n in numbers], width)


def no_stream(stream: Stream) -> str | None:
    """Why the kernels do not make a stream, or None."""
    if not 1 <= stream.width <= LARGEST:
        return f"heads are from 1 to {LARGEST} wide, not {stream.width}"
    if stream.conv > WIDEST:
        return f"convolutions are up to {WIDEST} wide, not {stream.conv}"
    if stream.turn and stream.width % 2:
        return f"pairs turn: their heads are even, not {stream.width} wide"
    return None


def no_leave(heads: int, width: int, whole: bool) -> str | None:
    """Why the kernels do not take what was read, or None. whole: a norm or a skip is over all heads together."""
    if not 1 <= width <= LARGEST:
        return f"reads are from 1 to {LARGEST} wide, not {width}"
    if whole and heads * width > LONGEST:
        return f"all heads together are up to {LONGEST} wide, not {heads * width}"
    return None
