"""State dicts of flash-linear-attention's layers (fla 0.6.0) as ours, and back: `from_fla`, `to_fla`.

A map is a table. A row is a parameter of fla's layer, its shape, and ours: one name, or several whose rows stand one
after another there. Where a shape of ours is not given it is fla's. Symbols of a shape are the same number in all rows.
What fla's layer can hold beyond a table (biases of convolutions, another gate) has no counterpart and is refused by
name, as is what is missing. Both functions return views where they can, and change nothing.

The Mamba-2 table is also that of mamba_ssm's Mamba2 and transformers' Mamba2Mixer, which give the same names to the
same rows; transformers' norm is over all heads however many groups there are, so that only one group is the same
function. Names are those of a layer: the prefix of a model ("model.layers.0.attn.") is the caller's to take away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from axes.errors import AxesError, ShapeError, UnknownName
from axes.sequence.charts import Constant
from axes.state_dicts import Shape, require_names, require_shape


class Row(NamedTuple):
    """theirs: a parameter of fla's layer of this shape.  ours: names, stacked, with shapes that differ from it.

    turned: the second half of every head's rows changes its sign.
    """

    theirs: str
    shape: Shape
    ours: tuple[tuple[str, Shape], ...]
    turned: bool = False


class Table(NamedTuple):
    """All that a layer has.  decays: a buffer of RetNet's constant rates, which fla does not keep.

    without: names of fla's that have no counterpart, for a sentence of their own.
    """

    rows: tuple[Row, ...]
    decays: str | None = None
    without: tuple[tuple[str, str], ...] = ()


def _row(theirs: str, shape: Shape, ours: str, here: Shape | None = None, turned: bool = False) -> Row:
    return Row(theirs, shape, ((ours, shape if here is None else here),), turned)


def _projections(turned: bool = False, inside: str = "") -> tuple[Row, ...]:
    return (
        _row("q_proj.weight", ("queries", "model"), f"{inside}q_proj.weight", turned=turned),
        _row("k_proj.weight", ("queries", "model"), f"{inside}k_proj.weight", turned=turned),
        _row("v_proj.weight", ("values", "model"), f"{inside}v_proj.weight"),
        _row("o_proj.weight", ("model", "values"), f"{inside}o_proj.weight"),
    )


def _low_rank(theirs: str, out: str, ours: str) -> tuple[Row, Row]:
    rank = f"rank of {theirs}"
    down = _row(f"{theirs}.lora.0.weight", (rank, "model"), f"{ours}.down")
    return down, _row(f"{theirs}.lora.2.weight", (out, rank), f"{ours}.up")


_CONVOLUTIONS = (
    _row("q_conv1d.weight", ("queries", 1, "width"), "q_conv.weight"),
    _row("k_conv1d.weight", ("queries", 1, "width"), "k_conv.weight"),
    _row("v_conv1d.weight", ("values", 1, "width"), "v_conv.weight"),
)
_BETA = _row("b_proj.weight", ("heads", "model"), "charts.beta.up.weight")
_GATE = _row("g_proj.weight", ("values", "model"), "g_proj.weight")
_NORM = _row("o_norm.weight", ("d_v",), "norm.weight")
_GATED_NORM = _NORM._replace(theirs="g_norm_swish_gate.weight")

_DELTA = (*_projections(), *_CONVOLUTIONS, _BETA, _NORM)
_GATED_DELTA = (
    *_DELTA,
    _GATE,
    _row("a_proj.weight", ("heads", "model"), "charts.decay.up.weight"),
    _row("dt_bias", ("heads",), "charts.decay.up.bias"),
    _row("A_log", ("heads",), "charts.decay.log_rate"),
)
_MIXED = ("r", "w", "k", "v", "a", "g")

TABLES: dict[str, Table] = {
    "delta-net": Table(_DELTA, without=(("g_proj.weight", "the layer has no output gate (use_gate)"),)),
    "delta-net-reflective": Table(_DELTA, without=(("g_proj.weight", "the layer has no output gate (use_gate)"),)),
    "gated-delta-net": Table(_GATED_DELTA),
    "kda": Table(
        (
            *_DELTA,
            _row("f_proj.0.weight", ("rank", "model"), "charts.decay.down.weight"),
            _row("f_proj.1.weight", ("gates", "rank"), "charts.decay.up.weight"),
            _row("dt_bias", ("gates",), "charts.decay.up.bias"),
            _row("A_log", ("heads",), "charts.decay.log_rate", ("heads", 1)),
        ),
        without=tuple(
            (name, "fla's output gate is two projections with a bias, ours (g_proj.weight) one without")
            for name in ("g_proj.0.weight", "g_proj.1.weight", "g_proj.1.bias")
        ),
    ),
    "gla": Table((
        *_projections(),
        _GATE,
        _GATED_NORM,
        _row("gk_proj.0.weight", ("rank", "model"), "charts.decay.down.weight"),
        _row("gk_proj.1.weight", ("queries", "rank"), "charts.decay.up.weight"),
        _row("gk_proj.1.bias", ("queries",), "charts.decay.up.bias"),
    )),
    "retnet": Table((*_projections(turned=True), _GATE, _GATED_NORM), decays="charts.decay.value"),
    "mamba2": Table((
        _row("A_log", ("heads",), "charts.decay.log_rate"),
        Row(
            "in_proj.weight", ("all", "model"),
            (("in_proj.weight", ("rest", "model")), ("charts.decay.up.weight", ("heads", "model"))),
        ),
        _row("dt_bias", ("heads",), "charts.decay.up.bias"),
        _row("D", ("heads",), "skip", ("heads", 1)),
        _row("conv1d.weight", ("channels", 1, "width"), "conv.weight"),
        _row("conv1d.bias", ("channels",), "conv.bias"),
        _row("norm.weight", ("values",), "norm.weight"),
        _row("out_proj.weight", ("model", "values"), "out_proj.weight"),
    )),
    "rwkv7": Table(
        (
            *(_row(f"x_{name}", (1, 1, "model"), f"mix.{name}", ("model",)) for name in _MIXED),
            _row("r_proj.weight", ("queries", "model"), "r_proj.weight"),
            *_projections()[1:],
            *_low_rank("w_lora", "queries", "decay"),
            _row("w_lora.lora.2.bias", ("queries",), "decay.bias"),
            *_low_rank("a_lora", "queries", "rate"),
            _row("a_lora.lora.2.bias", ("queries",), "rate.bias"),
            *_low_rank("g_lora", "values", "gate"),
            _row("k_k", ("queries",), "removal"),
            _row("k_a", ("queries",), "replacement"),
            _row("r_k", ("heads", "d_k"), "bonus"),
            _row("g_norm.weight", ("values",), "norm_weight"),
            _row("g_norm.bias", ("values",), "norm_bias"),
        ),
        without=tuple(
            (f"v_lora.lora.{name}", "values of the first layer enter all later ones there, and none here")
            for name in ("0.weight", "2.weight", "2.bias")
        ),
    ),
    "rope": Table(_projections(turned=True)),
    "fox": Table((
        *_projections(),
        _row("f_proj.weight", ("heads", "model"), "charts.forget.up.weight"),
        _row("f_proj.bias", ("heads",), "charts.forget.up.bias"),
    )),
    "path": Table((
        *_projections(inside="plain."),
        _row("w_proj.0.weight", ("rank", "model"), "w_down.weight"),
        _row("w_proj.1.weight", ("queries", "rank"), "w_up.weight"),
        _row("w_conv1d.weight", ("queries", 1, "width"), "w_conv.weight"),
        _row("bt_proj.weight", ("heads", "model"), "plain.charts.beta.up.weight"),
        _row("bt_proj.bias", ("heads",), "plain.charts.beta.up.bias"),
    )),
}  # fmt: skip
_AROUND = "around."


def from_fla(layer: str, state: Mapping[str, Tensor], heads: int | None = None) -> dict[str, Tensor]:
    """The state dict of our layer `layer` ("gated-delta-net") from that of fla's layer.

    heads: only "rope" asks for their number, which nothing in its state dict tells.
    Raises AxesError for keys that are missing or have no counterpart, ShapeError for shapes that do not go together.
    """
    table = _table(layer)
    require_names(layer, state, [row.theirs for row in table.rows], table.without)
    sizes: dict[str, int] = {}
    for row in table.rows:
        require_shape(layer, row.theirs, state[row.theirs], row.shape, sizes)
    made: dict[str, Tensor] = {}
    for row in table.rows:
        x = state[row.theirs]
        if row.turned:
            x = _turned(layer, x, sizes, heads)
        if len(row.ours) == 1:
            ((name, shape),) = row.ours
            made[_AROUND + name] = x.reshape([n if isinstance(n, int) else sizes[n] for n in shape])
            continue
        (first, _), (second, shape) = row.ours
        rest = x.shape[0] - sizes[str(shape[0])]
        made[_AROUND + first], made[_AROUND + second] = x[:rest], x[rest:]
    if table.decays is not None:
        made[_AROUND + table.decays] = _decays(layer, sizes, state["q_proj.weight"])
    return made


def to_fla(layer: str, state: Mapping[str, Tensor], heads: int | None = None) -> dict[str, Tensor]:
    """The state dict of fla's layer from that of our layer `layer`; arguments and errors as for `from_fla`."""
    table = _table(layer)
    names = [_AROUND + name for row in table.rows for name, _ in row.ours]
    require_names(layer, state, [*names, *[_AROUND + x for x in (table.decays,) if x is not None]])
    sizes: dict[str, int] = {}
    for row in table.rows:
        for name, shape in row.ours:
            require_shape(layer, _AROUND + name, state[_AROUND + name], shape, sizes)
    made: dict[str, Tensor] = {}
    for row in table.rows:
        parts = [state[_AROUND + name] for name, _ in row.ours]
        x = torch.cat(parts) if len(parts) > 1 else parts[0]
        if len(parts) == 1:
            x = x.reshape([n if isinstance(n, int) else sizes[n] for n in row.shape])
        made[row.theirs] = _turned(layer, x, sizes, heads) if row.turned else x
    if table.decays is not None:
        name = _AROUND + table.decays
        held = state[name]
        if not torch.allclose(held, _decays(layer, sizes, held), rtol=2 * torch.finfo(held.dtype).eps):
            raise AxesError(f"{layer}: {name} is {held.tolist()}; fla's are log(1 - 2^(-5 - h)), fixed")
    return made


def _table(layer: str) -> Table:
    if layer == "softmax-attention":
        raise AxesError("softmax-attention: fla's Attention turns queries and keys, which 'rope' does: give that name")
    if layer not in TABLES:
        raise UnknownName("layer with a map between fla and", layer, TABLES)
    return TABLES[layer]


def _heads(layer: str, sizes: dict[str, int], heads: int | None) -> int:
    if "d_v" in sizes:
        return sizes["values"] // sizes["d_v"]
    if heads is None:
        raise ShapeError(f"{layer}: a state dict does not tell the number of heads: give heads=...")
    return heads


def _turned(layer: str, x: Tensor, sizes: dict[str, int], heads: int | None) -> Tensor:
    """fla turns queries and keys forward by their places, we turn keys by their age: each the other's mirror image."""
    count = _heads(layer, sizes, heads)
    if x.shape[0] % (2 * count):
        raise ShapeError(f"{layer}: {x.shape[0]} rows are not heads={count} of even width")
    first, second = x.unflatten(0, (count, 2, -1)).unbind(1)
    return torch.stack((first, -second), 1).reshape(x.shape)


def _decays(layer: str, sizes: dict[str, int], like: Tensor) -> Tensor:
    return Constant(spacing="retention").initial((_heads(layer, sizes, None),)).to(like.device, like.dtype)


__all__ = ["TABLES", "from_fla", "to_fla"]
