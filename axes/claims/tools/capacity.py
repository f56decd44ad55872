"""How much a memory holds: recall error and signal to noise measured through the sequence tuples, and their theory.

Conventions: K (..., N, d) and V (..., N, d_v) hold one pair a row. Error is |read - v|^2 / |v|^2. The signal to noise
ratio of a read is the power of the target's share of the output over the power of everything else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from axes.claims.base import Draw
from axes.claims.tools.tuples import LINEAR, SOFTMAX, layer_tuple, supplied
from axes.core.memory import List
from axes.core.state_update import Output, StateUpdate
from axes.routes import dispatch
from axes.tasks.capacity import recall_error


def written(update: StateUpdate, keys: Tensor, values: Tensor, start: Tensor | None = None, beta: float = 1) -> Tensor:
    """The matrix (B, d_v, d) after one pass over the pairs (B, N, .), by whatever route `dispatch` picks."""
    given = {"k": keys, "v": values, "q": keys, "beta": torch.full_like(keys[..., 0], beta)}
    signal = supplied(update, given)
    return dispatch.run(update, signal, time=1, weights=None if start is None else (start,))[1].theta[0]


def growing(update: StateUpdate, keys: Tensor, values: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """The matrices when so many pairs, in rising numbers, have been written."""
    state, done = None, 0
    for n in counts:
        if n > done:
            state, done = written(update, keys[:, done:n], values[:, done:n], state), n
        assert state is not None
        yield state


@cache
def attention_tuple(temperature: float) -> StateUpdate:
    """Softmax attention with logits q . k / temperature."""
    return dataclasses.replace(layer_tuple(SOFTMAX), memory=List(scale=1.0 / temperature))


def read_list(update: StateUpdate, keys: Tensor, values: Tensor, q: Tensor) -> Tensor:
    """What a list that holds the pairs (..., N, .) returns for q (..., d): (..., d_v)."""
    return update.read(Output((keys, values, torch.zeros_like(keys[..., 0]))), q, {"q": q})


def attended(keys: Tensor, values: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
    """What softmax attention over the pairs returns."""
    return read_list(attention_tuple(temperature), keys, values, q)


# ---- recall --------------------------------------------------------------------------------------------------------


def matrix_curve(name: str, keys: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """Mean error (len(counts)) over a batch of reading everything back when so many pairs have been written."""
    states = growing(layer_tuple(name), keys, values, counts)
    errors = (recall_error(keys[:, :n] @ s.mT, values[:, :n]) for n, s in zip(counts, states, strict=True))
    return torch.stack([error.mean() for error in errors])


def list_curve(temperature: float, keys: Tensor, values: Tensor, counts: Sequence[int], queries: int = 4) -> Tensor:
    """The same for softmax attention, over the first pairs only: all pairs are alike to a list."""
    update, errors = attention_tuple(temperature), []
    for n in counts:
        first = range(min(queries, n))
        reads = [read_list(update, keys[:, :n], values[:, :n], keys[:, i]) for i in first]
        errors.append(recall_error(torch.stack(reads, 1), values[:, : len(first)]).mean())
    return torch.stack(errors)


def capacity_at(name: str, draw: Draw, d: int, batch: int, error: float = 0.5) -> float:
    """N at which the mean error of random unit keys reaches `error`, interpolated between loads 0.35 and 1.05."""
    counts = [round(d * a) for a in (0.35, 0.45, 0.55, 0.7, 0.85, 1.05)]
    keys, values = draw.unit(batch, counts[-1], d), draw.normal(batch, counts[-1], 4)
    return float(np.interp(error, matrix_curve(name, keys, values, counts).numpy(), counts))


# ---- signal to noise -------------------------------------------------------------------------------------------------


def linear_snr(draw: Draw, d: int, n: int, d_v: int, trials: int, unit: bool = True) -> float:
    """Mean signal power over mean noise power of reading the first of n pairs from an additive matrix memory.

    unit: keys of length one, or Gaussian ones; values are random directions of length one.
    """
    keys = draw.unit(trials, n, d) if unit else draw.normal(trials, n, d)
    values = draw.unit(trials, n, d_v)
    q, v = keys[:, 0], values[:, 0]
    read = (written(layer_tuple(LINEAR), keys, values) @ q[..., None])[..., 0]
    signal = (q * q).sum(-1, keepdim=True) * v
    return float(signal.square().sum() / (read - signal).square().sum())


def sphere(draw: Draw, *shape: int) -> Tensor:
    """Keys of length sqrt(d)."""
    return draw.unit(*shape) * math.sqrt(shape[-1])


def softmax_snr(keys: Tensor, temperature: float) -> Tensor:
    """Signal to noise of reading the first key from a list, for values that are random and independent: (...).

    w_*^2 over the sum of the others' w_j^2 is the odds of the target's weight at half the temperature, so that one
    read with the value 1 on the target and 0 elsewhere measures it.
    """
    values = torch.zeros_like(keys[..., :1])
    values[..., 0, :] = 1.0
    weight = read_list(attention_tuple(temperature / 2), keys, values, keys[..., 0, :])[..., 0]
    return weight / (1 - weight)


def first_passage(logits: Tensor, target: float, temperature: float) -> float:
    """How many pairs a list holds before the signal to noise ratio falls to one, to 2 %.

    logits (M): q . k_j of competitors in the order of writing; target: q . k_*. Infinity if M were not enough. The
    ratio falls with every further pair, so that bisection over reads finds the count.
    """
    keys = torch.cat((logits.new_full((1,), target), logits))[:, None]
    values = torch.zeros_like(keys)
    values[0] = 1.0
    update, one = attention_tuple(temperature / 2), torch.ones_like(keys[0])

    def drowned(n: int) -> bool:
        return float(read_list(update, keys[:n], values[:n], one)) <= 0.5

    low, high, last = 1, 2, keys.shape[0]
    while not drowned(min(high, last)):
        if high >= last:
            return math.inf
        low, high = high, 2 * high
    high = min(high, last)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if drowned(middle) else (middle, high)
    return float(high)


def sphere_capacity(draw: Draw, d: int, temperature: float, trials: int) -> float:
    """Median number of pairs at signal to noise one, for keys on the sphere of radius sqrt(d).

    q . k_j is drawn from its exact law d (2 Beta - 1): a list is read through these numbers alone.
    """
    random = np.random.default_rng([draw.seed, d])
    half, most = (d - 1) / 2, int(6 * math.exp(softmax_capacity_law(d, temperature))) + 50
    logits = (d * (2 * torch.from_numpy(random.beta(half, half, size=most)) - 1) for _ in range(trials))
    return float(np.median([first_passage(x, float(d), temperature) for x in logits]))


def gaussian_capacity(draw: Draw, d: int, temperature: float, trials: int, most: int) -> float:
    """The same for Gaussian keys: given k_*, q . k_j is normal of deviation |k_*|.

    |k_*|^2 takes the quantiles of its chi-square law instead of random values: these spread N over orders of magnitude
    and would dominate the error of the median. A trial that exceeds `most` pairs counts as larger than the median.
    """
    squares = stats.chi2.ppf((np.arange(trials) + 0.5) / trials, d)
    passages = [first_passage(math.sqrt(x) * draw.normal(most), float(x), temperature) for x in squares]
    return float(np.median(passages))


def log_moment(d: int, slope: float) -> float:
    """log E exp(slope (x - d)) for x = q . k of two independent points of the sphere of radius sqrt(d).

    Gamma(d/2) (2/c)^{d/2 - 1} I_{d/2 - 1}(c) with c = slope d: the moment generating function of a coordinate.
    """
    order, c = d / 2 - 1, slope * d
    scaled = special.ive(order, c)  # e^{-c} I(c)
    return float(special.gammaln(d / 2) + order * math.log(2 / c) + np.log(scaled))


def softmax_capacity_law(d: int, temperature: float) -> float:
    """log of the N at which N exp(-2 gap / temperature) averages to one, for keys on the sphere."""
    return -log_moment(d, 2.0 / temperature)


def softmax_snr_law(n: np.ndarray, d: int, temperature: np.ndarray) -> np.ndarray:
    """Typical signal to noise of n keys on the sphere: the median of the largest competitor, the mean of the others.

    The full mean would be carried by keys that are not there if n is small or the temperature low.
    """
    n, temperature = np.broadcast_arrays(np.asarray(n, float), np.asarray(temperature, float))
    out = np.empty(n.shape)
    cosines = np.linspace(-1, 1, 20001)[1:-1]
    log_density = (d - 3) / 2 * np.log1p(-(cosines**2))
    density = np.exp(log_density - log_density.max())
    tail = np.cumsum(density[::-1])[::-1] / density.sum()
    for i in np.ndindex(n.shape):
        others = n[i] - 1
        kept = tail * others >= math.log(2)
        each = np.exp(2 * d * (cosines - 1) / temperature[i])[kept]
        out[i] = 1 / (others * (density[kept] * each).sum() / density.sum() + each[-1])
    return out


def softmax_recall_law(n: np.ndarray, d: int, temperature: float) -> np.ndarray:
    """((N - 1)^2 a^2 + (N - 1) b) / (1 + (N - 1) a)^2 with a, b the means of exp(-gap / T) and exp(-2 gap / T).

    The target's weight falls short of one by the others' total weight (first term) long before they drown it (second).
    """
    a, b = math.exp(log_moment(d, 1 / temperature)), math.exp(log_moment(d, 2 / temperature))
    others = n - 1
    return ((others * a) ** 2 + others * b) / (1 + others * a) ** 2
