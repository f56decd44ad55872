"""`axes bench training` as people read it: a table of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from axes.bench.training import Throughput
from axes.bench.training_models import Size

_HEADER = ("model", "tokens/s", "step ms", "used", "peak GB", "first s", "loss")
_NAME = 17  # columns; longer names go on in the next line


def table(size: Size, rows: Iterable[Throughput]) -> Table:
    """A line a model, `used` of the rate of products that was measured; below, why a model has no figures."""
    rows = list(rows)
    model = f"{size.layers} layers, width {size.width}, {size.heads} heads"
    out = Table(
        title=f"{model}, {size.batch} x {size.tokens} tokens, {size.dtype}",
        caption="\n".join(f"{row.who}: {row.refused}" for row in rows if row.refused) or None,
        caption_justify="left",
    )
    for name in _HEADER:
        if name == "model":
            out.add_column(name, overflow="fold", max_width=_NAME)
        else:
            out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(
            row.who, _number(row.tokens_per_second, ",.0f"), _number(row.step_ms, ".1f"), _number(row.used, ".0%"),
            _number(None if row.peak_bytes is None else row.peak_bytes / 1e9, ".1f"), _number(row.first, ".1f"),
            _number(row.loss, ".4f"),
        )  # fmt: skip
    return out


def _number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)
