"""What layers and mixers begin with: every parameter is set, and sizes and first values are those of the papers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from axes import depth
from axes.core.rates import Per
from axes.errors import ShapeError
from axes.sequence import ALL, LRU, RWKV6, S4D, S5, LonghornDiagonal, Mamba1, Mamba3, MesaNet
from axes.sequence.charts import Softplus
from axes.sequence.miras import _Scaled
from axes.sequence.rwkv7 import LowRank


@pytest.fixture
def empty_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What nobody has set is not a number, as torch has it for whoever looks for that."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


def test_every_parameter_is_set(empty_is_nan: None) -> None:
    assert torch.empty(3).isnan().all()
    made = [cls(16, heads=2) for cls in ALL]
    mixers = [cls(16, layer_index=1) for cls in depth.ALL]
    for module in (*made, *mixers):
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            assert not x.is_floating_point() or not x.isnan().any(), (type(module).__name__, name)


@pytest.mark.parametrize(
    ("cls", "state", "inner"),
    [(Mamba1, 16, 2), (LonghornDiagonal, 16, 2), (Mamba3, 128, 2), (LRU, 1, 2), (S5, 1, 1)],  # of the last, numbers
    ids=str,
)
def test_states_and_inner_widths_are_those_of_the_papers(cls: type, state: int, inner: int) -> None:
    sizes = cls(64, heads=4).sizes
    assert (sizes.d_k, 4 * sizes.d_v) == (state, inner * 64)


def test_real_parts_of_s4d_begin_at_one_half() -> None:
    """S4D-Lin: A_n = -1/2 + i pi n (Gu et al. 2022, Parameterization, equation 9)."""
    module = S4D(16, heads=16).around
    modes = torch.arange(module.frequency.shape[-1])
    torch.testing.assert_close(module.log_rate.exp(), torch.full_like(module.log_rate, 0.5))
    torch.testing.assert_close(module.frequency, (torch.pi * modes).expand_as(module.frequency))


def test_the_bonus_of_rwkv6_falls_and_zigzags() -> None:
    """u_n = 1 - n / (N - 1) + ((n + 1) mod 3 - 1) / 10, as the released code begins."""
    bonus = RWKV6(32, heads=2).around.bonus.flatten()
    for n, u in enumerate(bonus.tolist()):
        assert abs(u - (1 - n / (len(bonus) - 1) + ((n + 1) % 3 - 1) / 10)) < 1e-6


def test_values_of_rwkv6_may_be_of_another_width_than_the_model() -> None:
    layer = RWKV6(16, heads=2, d_k=4, d_v=6)
    around = layer.around
    assert around.v_proj.weight.shape == around.g_proj.weight.shape == (12, 16)
    assert around.o_proj.weight.shape == (16, 12)
    assert layer(torch.randn(1, 3, 16))[0].shape == (1, 3, 16)


def test_maps_of_low_rank_begin_at_their_bias() -> None:
    """W_1 = 0, and W_2 has orthogonal columns of length 0.1."""
    torch.manual_seed(0)
    module = LowRank(8, 4, 16, None, True, {})
    torch.testing.assert_close(torch.linalg.svdvals(module.up.double()), torch.full((4,), 0.1).double())
    assert torch.equal(module(torch.randn(3, 8)), torch.zeros(3, 16))


def test_the_same_rate_for_every_token_begins_where_it_is_said_to() -> None:
    layer = MesaNet(16, heads=2)
    (chart,) = [m for m in layer.modules() if type(m).__name__ == "_PositiveModule"]
    ((_, rate),) = chart(torch.randn(1, 3, 16)).items()
    torch.testing.assert_close(rate.double(), torch.full_like(rate, chart.chart.start).double())


def test_factors_of_charts_multiply() -> None:
    from axes.sequence.blocks import Sizes

    sizes = Sizes(16, 2, 8, 8)
    base = Softplus(0.0).build(Per("eta", "scalar", "positive"), sizes, {})
    twice = _Scaled(_Scaled(base, 2.0), 3.0)
    x = torch.randn(1, 3, 16)
    torch.testing.assert_close(twice(x)["eta"], 6.0 * base(x)["eta"])
    assert twice.declared("").factor == 6.0 * base.declared("").factor


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_a_block_of_outputs_has_at_least_one(size: object) -> None:
    with pytest.raises(ShapeError, match="size must be an integer >= 1"):
        depth.BlockAttentionResiduals(16, size=size)  # type: ignore[arg-type]
