"""Layers under the transforms of torch.func: what `grad`, `vmap`, both and `jvp` say is what autograd says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

from axes.sequence import ALL, PREDICTED
from axes.sequence.base import SequenceLayer

SYSTEMS = {cls.name: cls for cls in (*ALL, *PREDICTED)}
D = 4
# one of each route with derivatives by hand in `make test`, the others in `make test-all`
QUICK = (
    "gated-delta-net", "mamba", "titans", "moneta-matrix", "lattice-dec", "lattice-sim", "lattice-osr", "gru",
    "m2rnn", "rls-net", "shampoo-net", "frank-wolfe-delta", "path", "log-linear-mamba2", "softmax-attention",
)  # fmt: skip


def _close(got: Tensor, want: Tensor) -> None:
    assert_close(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SYSTEMS])
def test_transforms_equal_autograd(name: str) -> None:
    torch.manual_seed(0)
    layer: SequenceLayer = SYSTEMS[name](D, heads=2, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    x, along = torch.randn(2, 2, 7, D, dtype=torch.float64)

    def read(x: Tensor) -> Tensor:
        return layer(x)[0]

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = functional_call(layer, parameters, (x,))[0]
        return y.square().sum()

    live = x.clone().requires_grad_()
    y = read(live)
    by_x, *want = torch.autograd.grad(y.square().sum(), [live, *parameters.values()])
    whole: Any = grad(loss)(parameters, x)
    each: Any = vmap(grad(loss), (None, 0))(parameters, x[:, None])
    for n, found in zip(parameters, want, strict=True):
        _close(whole[n], found), _close(each[n].sum(0), found)
    _close(vmap(read)(x[:, None])[:, 0], y)
    out, tangent = jvp(read, (x,), (along,))
    _close(out, y), _close((2 * y * tangent).sum(), (by_x * along).sum())


@pytest.mark.parametrize("name", ["mamba", "fox"])
def test_of_long_sequences_nothing_is_computed_twice(name: str) -> None:
    """Checkpoints hang on hooks of what is saved, which these transforms refuse."""
    torch.manual_seed(0)
    layer = SYSTEMS[name](D, heads=2, dtype=torch.float64)
    x = torch.randn(1, 260, D, dtype=torch.float64)
    live = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(layer(live)[0].square().sum(), live)
    _close(grad(lambda x: layer(x)[0].square().sum())(x), want)


def test_levels_of_a_state_that_a_vmap_cuts() -> None:
    """It says where each sequence stands."""
    torch.manual_seed(0)
    layer = SYSTEMS["log-linear-mamba2"](D, heads=2, dtype=torch.float64)
    x = torch.randn(2, 12, D, dtype=torch.float64)
    states = [layer(x[i : i + 1, :end])[1] for i, end in enumerate((3, 6))]
    want = torch.cat([layer(x[i : i + 1, 6:], state)[0] for i, state in enumerate(states)])
    both = torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *states)
    _close(vmap(lambda x, state: layer(x[None], state)[0][0])(x[:, 6:], both), want)
