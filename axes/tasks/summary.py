"""What a run came to, and the table in which runs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from rich.box import SIMPLE_HEAD
from rich.table import Table


@final
@dataclass(frozen=True)
class Summary:
    """The result of a run.

    validation_bits_per_byte: at the last evaluation; unigram_bits_per_byte: entropy of the validation text's byte
    frequencies; tokens_per_second: of the median step; seconds: of all steps; state_bytes: what the sequence layers
    remember after one context, per sequence.
    """

    name: str
    finished: bool
    steps: int
    tokens: int
    validation_bits_per_byte: float | None
    unigram_bits_per_byte: float
    tokens_per_second: float
    seconds: float
    parameters: int
    state_bytes: int


def summary_table(summaries: Sequence[Summary], title: str | None = None) -> Table:
    """One row per run; names are folded where 80 columns are all there is, numbers never."""
    table = Table("sequence x optimizer x depth", title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in ("bits/\nbyte", "unigram\nentropy", "tokens/s", "parameters", "state\nbytes", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        validation = summary.validation_bits_per_byte
        table.add_row(
            summary.name,
            "-" if validation is None else f"{validation:.3f}",
            f"{summary.unigram_bits_per_byte:.3f}",
            f"{summary.tokens_per_second:,.0f}",
            f"{summary.parameters:,}",
            f"{summary.state_bytes:,}",
            f"{summary.seconds:.0f}",
        )
    return table
