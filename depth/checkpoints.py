"""State dicts of DeepSeek-V4's hyper-connections as ours, and back: `from_deepseek`, `to_deepseek`.

    there, one of a sublayer         here, MHC(d, l, n, eps=RELEASED_EPS)
    fn (2 n + n^2, n d)              phi
    scale (3)                        alpha
    base (2 n + n^2)                 bias

    there, the one of the model      here besides, with learned_reduce="per-token", where the model calls `reduce`
    hc_fn (n, n d)                   exit_phi
    hc_scale (1)                     exit_alpha
    hc_base (n)                      exit

Rows of fn and base are those for pre, for post and for the mixing matrix, whose first index is the source there and the
destination here: these rows are transposed, the rest is taken as it is. Names are those of transformers' modules
(`attn_hc`, `ffn_hc`, `hc_head`); their prefix is the caller's to take away. A sublayer's state dict may hold the head's
names besides its own, and then ours holds the exit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from axes.errors import ShapeError
from axes.state_dicts import Shape, require_names, require_shape


class Row(NamedTuple):
    """theirs: a parameter of this shape.  ours: its name here.  mixes: its last rows are those of a matrix."""

    theirs: str
    shape: Shape
    ours: str
    mixes: bool = False


SUBLAYER = (
    Row("fn", ("coefficients", "all"), "phi", mixes=True),
    Row("base", ("coefficients",), "bias", mixes=True),
    Row("scale", (3,), "alpha"),
)
HEAD = (
    Row("hc_fn", ("streams", "all"), "exit_phi"),
    Row("hc_base", ("streams",), "exit"),
    Row("hc_scale", (1,), "exit_alpha"),
)


def from_deepseek(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of an `MHC` from that of a hyper-connection, with the head's parameters or without them.

    Raises AxesError for names that are missing or have no counterpart, ShapeError for shapes that do not go together.
    """
    rows = _rows(state, [row.theirs for row in HEAD])
    return _turned(state, {row.theirs: row.ours for row in rows}, {row.theirs: row for row in rows})


def to_deepseek(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a hyper-connection from that of an `MHC`, with the head's if ours has an exit; errors alike."""
    rows = _rows(state, [row.ours for row in HEAD])
    return _turned(state, {row.ours: row.theirs for row in rows}, {row.ours: row for row in rows})


def _rows(state: Mapping[str, Tensor], head: list[str]) -> tuple[Row, ...]:
    return (*SUBLAYER, *HEAD) if any(name in state for name in head) else SUBLAYER


def _turned(state: Mapping[str, Tensor], renamed: dict[str, str], rows: dict[str, Row]) -> dict[str, Tensor]:
    """Under the other names, with matrices transposed: the same either way."""
    require_names("mhc", state, rows)
    sizes: dict[str, int] = {}
    for name, row in rows.items():
        require_shape("mhc", name, state[name], row.shape, sizes)
        sizes["streams"] = _streams(name, sizes)
    n = sizes["streams"]
    return {renamed[name]: _transposed(state[name], n) if row.mixes else state[name] for name, row in rows.items()}


def _transposed(x: Tensor, n: int) -> Tensor:
    return torch.cat((x[: 2 * n], x[2 * n :].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)))


def _streams(name: str, sizes: dict[str, int]) -> int:
    count, width = sizes["coefficients"], sizes["all"]
    n = math.isqrt(count + 1) - 1
    if n < 2 or n * (n + 2) != count:
        raise ShapeError(f"mhc: {name} must have n (n + 2) rows for n >= 2 streams, got {count}")
    if width % n:
        raise ShapeError(f"mhc: {name} must have n d columns for n = {n} streams, got {width}")
    return n


__all__ = ["HEAD", "SUBLAYER", "from_deepseek", "to_deepseek"]
