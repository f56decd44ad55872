"""`axes bench nonlinear`: memories that no chain of products computes, by their route on a CPU beside the interpreter.

Processor seconds of one thread, forward with backward, by turns, so that other work on the machine is in neither more
than in the other; the median of the turns. The interpreter takes the same time for every token: it is run on fewer of
them, and its time multiplied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import final

import torch

from axes.bench.results import Watch, unwatched
from axes.bench.rules import RULES, Run, SequenceRule, Shape, Signal, find, read
from axes.errors import AxesError
from axes.routes import dispatch

_ROUTES = ("substitution", "gram", "cascade", "solve", "interpreter")  # of short sequences
_KINDS = ("regression", "entries")  # which passes and an entry scan compute


@final
@dataclass(frozen=True)
class Row:
    """Seconds of a rule's route and of the interpreter at all tokens."""

    rule: str
    route: str
    seconds: float
    interpreter: float

    def text(self) -> str:
        """A row of a Markdown table."""
        ours, theirs = 1e3 * self.seconds, 1e3 * self.interpreter
        return f"| {self.rule} | {self.route} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f} |"


HEAD = "| rule | route | ms | interpreter | factor |\n|---|---|---|---|---|"


def nonlinear() -> tuple[SequenceRule, ...]:
    """The rules whose route is no chain, no attention and no levels."""

    def asked(rule: SequenceRule) -> bool:
        return dispatch.select(rule.update).route in _ROUTES or rule.update.parts().memory.kind in _KINDS

    return tuple(rule for rule in RULES if asked(rule) and rule.key_width is None)


def measure(
    names: tuple[str, ...] = (), shape: Shape = Shape(1, 1024, 4, 32), share: int = 8, turns: int = 3,
    watch: Watch = unwatched,
) -> Iterator[Row]:  # fmt: skip
    """share: the interpreter is run on this part of the tokens."""
    if share < 1 or turns < 1 or shape.tokens % share:
        raise AxesError(f"--share divides the {shape.tokens} tokens and --turns is at least 1, not {share} and {turns}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rules = find(names) if names else nonlinear()
        for done, rule in enumerate(rules):
            watch(rule.name, done, len(rules))
            whole = rule.signal(shape, torch.float32, torch.device("cpu"))
            part = {n: x[:, : shape.tokens // share] if x.shape[1] == shape.tokens else x for n, x in whole.items()}
            ours, theirs = _call(rule.ours(None), whole), _call(rule.token_loop(), part)
            ours(), theirs()
            taken = [(ours(), share * theirs()) for _ in range(turns)]
            shapes = {n: tuple(x.shape) for n, x in whole.items() if isinstance(x, torch.Tensor)}
            route = dispatch.select(rule.update, "cpu", torch.float32, shapes).route
            yield Row(rule.name, route, *(median(xs) for xs in zip(*taken, strict=True)))
        watch("done", len(rules), len(rules))
    finally:
        torch.set_num_threads(threads)


def _call(run: Run, signal: Signal) -> Callable[[], float]:
    leaves = {n: x.detach().clone().requires_grad_() for n, x in signal.items()}
    do = torch.randn(read(signal))

    def call() -> float:
        begun = time.process_time()
        out, _ = run(leaves)
        torch.autograd.grad(out, list(leaves.values()), do, allow_unused=True)
        return time.process_time() - begun

    return call
