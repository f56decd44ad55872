"""A state between powers of its statistics, o_t = L_t^-p (S_t (R_t^-p q_t)), found by vectors: no W_t is formed.

What R_t makes of a query is a solve (or a root) for one vector, S_t times that is read by the chain of S, and L_t has
the last word. R_t and L_t, sums of k k^T and of v v^T, are formed for every token of a chunk (`states`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axes.core.algorithms import Step
from axes.core.costs import Alignment
from axes.core.facts import fact
from axes.core.geometry import Euclidean
from axes.core.rates import Signal
from axes.core.state_update import State, StateUpdate
from axes.linalg.formulas import again
from axes.routes import cascade
from axes.routes.spans import sizes
from axes.routes.states import numbers, states

Compute = Callable[[StateUpdate, Signal, State, int], tuple[Tensor, State]]
_CHUNK = 32  # tokens whose matrices fit in cache, and whose operations are long
_MADE = 4  # matrices of a token that a backward pass keeps, about: sums, bases and what they make


@fact
def chain_of(update: StateUpdate) -> StateUpdate:
    """The chain of the state alone."""
    p = update.parts()
    return StateUpdate(Alignment(), Euclidean(), p.monoid, Step(p.step.rate))


def run(update: StateUpdate, signal: Signal, state: State, batch: int, compute: Compute) -> tuple[Tensor, State]:
    """Outputs (..., T, d_v) and the last state. signal: `batch` batch dimensions, then T, then features.

    compute: what takes chains, of a tuple, a signal, a state and the number of batch dimensions.
    """
    h, chain = update.parts().h, chain_of(update)
    q, k, v = (signal[n] for n in "qkv")
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    size, found = q.shape[batch], {}

    def across(side: str, x: Tensor) -> Tensor:
        """What the matrix of a side makes of vectors (..., T, n)."""
        if side not in h.sides:
            return x
        i, key = h.sides.index(side), k if side == "columns" else v
        begun, lengths = state.stats[i], sizes(size, _CHUNK, None, 0)
        ((gate, rate),) = numbers(update.statistics()[i].parts(), signal, (key,), size)

        def some(part: Sequence[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
            kept, added, n, asked = part
            sums = states(kept, added * n, n, start)
            return h.across(asked, sums), sums[..., -1, :, :]

        made = _MADE * x.element_size() * x.numel() * x.shape[-1]
        twice = made > cascade.KEPT and cascade.live(signal, state, q)
        outputs, matrix = [], begun.theta[0]
        for part in zip(*(y.split(lengths, -2) for y in (gate, rate, key, x)), strict=True):
            out, matrix = again(some, part, matrix) if twice else some(part, matrix)
            outputs.append(out)
        found[i] = begun.but(theta=(matrix,), count=begun.count + size)
        return torch.cat(outputs, -2)

    own = {"q": across("columns", q), "k": k, "v": v, **{per.name: signal[per.name] for per in chain.demands()}}
    out, end = compute(chain, own, State(state.theta, (), (), (), (), state.count), batch)
    out = across("rows", out)
    stats = tuple(found[i] for i in range(len(h.sides)))
    return out, state.but(theta=end.theta, stats=stats, count=state.count + size)


__all__ = ["chain_of", "run"]
