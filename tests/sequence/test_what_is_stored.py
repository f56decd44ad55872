"""What nonlinear memories keep of the pairs they are given, by the reference path in float64: what lets them learn
recall, and what keeps them from it (docs/learning.md)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.core import reference
from axes.core.state_update import StateUpdate
from axes.sequence import Longhorn, MemoraMatrix, MonetaMatrix, MuonNetState, YaadMatrix
from axes.sequence.blocks import Standard

OPEN = 0.0  # the log of a gate that keeps everything


def units(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def read(update: StateUpdate, k: Tensor, v: Tensor, q: Tensor, rates: dict[str, float], first: Tensor | None) -> Tensor:
    """What queries read behind all pairs: k, v (n, d), q (m, d), the rates those of rows; queries write nothing."""
    n, m = len(k), len(q)
    signal: dict[str, Any] = {"k": torch.cat((k, q)), "v": torch.cat((v, torch.zeros(m, v.shape[1])))}
    signal["q"] = torch.cat((torch.zeros_like(k), q))
    for name, rate in rates.items():
        kept = torch.full((n, v.shape[1]), rate, dtype=torch.float64)
        still = rate if name in ("decay", "delta") else 0.0
        signal[name] = torch.cat((kept, torch.full((m, v.shape[1]), still, dtype=torch.float64)))
    return reference.run(update, signal, weights=None if first is None else (first,))[0][n:]


def channels(y: Tensor) -> float:
    """How many channels of the last dimension carry what stands there: all of equal ones, one of a single one."""
    square = y.square()
    return float((square.sum(-1).square() / square.square().sum(-1)).mean())


@pytest.mark.parametrize("eta", [0.004, 0.05])
def test_moneta_over_a_matrix_stores_the_sixth_power_of_a_value(eta: float) -> None:
    """The slope of |e|^3 is 3 v |v| at an empty memory, the link cubes that: W k = 3 eta v^6 |k|_4^2 / |v^2|_4^2."""
    k, v = units(1, 8), units(1, 8, seed=1)
    found = read(MonetaMatrix.update, k, v, k, {"decay": OPEN, "eta": eta}, None)[0]
    fourth = (k.pow(4).sum().sqrt()) / v.pow(8).sum().sqrt()
    torch.testing.assert_close(found, 3 * eta * v[0].sign() * v[0].pow(6) * fourth)


def test_moneta_over_a_matrix_reads_few_channels_of_a_value() -> None:
    """Of 64 random ones, pairs of random keys: a third of them is what Gaussian numbers have, v |v| an eleventh."""
    k, v = units(16, 64), units(16, 64, seed=1)
    cubic = read(MonetaMatrix.update, k, v, k, {"decay": OPEN, "eta": 0.05}, None)
    clipped = read(YaadMatrix.update, k, v, k, {"decay": OPEN, "eta": 0.06, "delta": 1.0}, None)
    assert channels(cubic) < 64 / 8
    assert channels(clipped) > 64 / 4


def written(cls: type[Any], rates: dict[str, float], first: float) -> float:
    """The share of what keys of 32 pairs read that the pairs wrote, beside a first memory of this deviation."""
    centred = cls is MemoraMatrix
    k, v = units(32, 64), units(32, 64, seed=1)
    k = k - k.mean(-1, keepdim=True) if centred else k
    begun = first * torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = read(cls.update, k, v, k, rates, begun)
    nothing = {name: 0.0 if name == "eta" else rate for name, rate in rates.items()}
    return float((y - read(cls.update, k, v, k, nothing, begun)).norm() / y.norm())


MATRICES = {
    MonetaMatrix: {"decay": OPEN, "eta": 0.004},
    YaadMatrix: {"decay": OPEN, "eta": 0.06, "delta": 1.0},
    MemoraMatrix: {"decay": OPEN, "eta": 0.03},
}


@pytest.mark.parametrize("cls", MATRICES)
def test_pairs_are_read_beside_the_empty_memory_and_not_beside_a_learned_one(cls: type[Any]) -> None:
    """100 steps of AdamW at 3e-3 carry an entry of a learned first memory up to 0.3 from where it began."""
    assert written(cls, MATRICES[cls], 1e-9) > 0.99
    assert written(cls, MATRICES[cls], 0.3) < 0.5


def test_memora_over_a_matrix_begins_empty() -> None:
    """And what is read of it, under the layer's own rates at first, is more than what its norm is floored by."""
    torch.manual_seed(0)
    layer = MemoraMatrix(32, heads=1, dtype=torch.float64)
    assert layer.initial is None
    assert isinstance(layer.around.block, Standard)
    x = torch.randn(1, 32, 32, dtype=torch.float64)
    signal, _, _ = layer.around.enter(x, layer.around.tails(1, x))
    heads = {name: z[0, :, 0] for name, z in signal.items()}
    y = reference.run(layer.update, heads)[0]
    assert y[8:].square().mean(-1).median() > 2 * layer.around.block.norm_eps


def test_memora_over_a_matrix_sees_a_key_less_its_mean() -> None:
    """Rows of one sum: two memories differ in what they read of q by what they do of q less its mean."""
    theta = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = MemoraMatrix.update.h.primal(theta)
    q = units(7, seed=1)
    torch.testing.assert_close((one - other) @ q, (one - other) @ (q - q.mean()))
    even = MemoraMatrix.update.h.primal(torch.zeros(5, 7, dtype=torch.float64))
    assert (even @ (q - q.mean())).abs().max() < 1e-15 < (even @ q).abs().min()


def test_a_softmax_that_is_even_shortens_a_step_by_the_root_of_its_width() -> None:
    """dW = c/n (I - 11^T/n) dtheta with c = sqrt(n): rates up to sqrt(n) 2/16 are to it what 2/16 is to a matrix."""
    n = 16
    theta = torch.zeros(1, n, dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(MemoraMatrix.update.h.primal, theta).reshape(n, n)
    torch.testing.assert_close(slope, (torch.eye(n, dtype=torch.float64) - 1 / n) / math.sqrt(n))
    peaked = torch.autograd.functional.jacobian(MemoraMatrix.update.h.primal, 8 * units(1, n)).reshape(n, n)
    assert torch.linalg.eigvalsh(peaked)[-1] > 2 / math.sqrt(n)


def answered(width: int, beta: float, pairs: int = 40, asked: int = 16) -> float:
    """How often a key's own value has the largest share of what Longhorn reads at it: keys of length one."""
    right = []
    for seed in range(20):
        k = units(pairs, width, seed=seed)
        shares = read(Longhorn.update, k, torch.eye(pairs, dtype=torch.float64), k[:asked], {"beta": beta}, None)
        right.append((shares.argmax(-1) == torch.arange(asked)).double().mean())
    return float(torch.stack(right).mean())


def test_sixteen_channels_of_a_key_hold_forty_pairs_only_if_they_are_written_little() -> None:
    """The overlap of N keys in d channels is sqrt((N - d) / (d (N - 1))) at least (Welch), and heads share keys, so
    that a share is that of every channel. beta / (1 + beta) is how much of an error is written."""
    assert answered(16, 1.0) < 0.6  # a half of every error
    assert answered(16, 1 / 9) > 0.97  # a tenth of it
    assert answered(64, 1.0) > 0.99
    k = units(40, 16)
    overlap = (k @ k.mT - torch.eye(40, dtype=torch.float64)).square().sum() / (40 * 39)
    assert overlap.sqrt() > math.sqrt((40 - 16) / (16 * 39))


@pytest.mark.parametrize("length", [0.5, 1.0, 4.0])
def test_a_write_turns_an_isometry_by_half_of_its_length(length: float) -> None:
    """polar(I + s u k^T) with u across k turns k towards u by an angle of tangent s / 2: 14 degrees at s = 1/2, which
    is where beta |v| starts with values of length one. Exactly towards u for no s."""
    k, u = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0].T
    signal: dict[str, Any] = {"k": k[None], "v": u[None], "q": k[None], "beta": torch.tensor([length])}
    exact = dataclasses.replace(MuonNetState.update.h, steps=20)
    update = dataclasses.replace(MuonNetState.update, h=exact)
    y = reference.run(update, signal, weights=(torch.eye(6, dtype=torch.float64),))[0][0]
    torch.testing.assert_close(y @ u / (y @ k), torch.tensor(length / 2, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(y.norm(), torch.tensor(1.0, dtype=torch.float64), atol=1e-6, rtol=1e-6)
