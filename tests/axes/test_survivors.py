"""What faults that were planted one by one changed, and no other test saw."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from axes import depth, dispatch, sequence
from axes.core.algorithms import Read, Step
from axes.core.costs import Alignment, Linear, SquaredError
from axes.core.geometry import ConstantNorm, Euclidean, Sphere, Whiten
from axes.core.geometry.bregman import Context
from axes.core.monoids import Diagonal, Householder, Product, Rotation
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import DynamicHyperConnections, mixer
from axes.errors import AxesError, ShapeError
from axes.optim import QHM, Adam
from axes.sequence import MLSTM, RWKV6, FrankWolfeDelta, GatedDeltaNet
from axes.sequence.blocks import ShortConvolution
from axes.sequence.charts import TimeStep
from axes.sequence.checkpoints import to_fla
from axes.sequence.miras import NormThreshold
from axes.state_dicts import require_names
from axes.testing.examples import example

_BONUS = Step(read=Read(1.0, Per("bonus", "key", "real")))  # RWKV-6's


@pytest.mark.parametrize("cost", [Alignment(), SquaredError()])
def test_a_matrix_whose_columns_have_unit_length_is_no_memory_of_slots(cost: Alignment) -> None:
    """The Gram route turns slots by inner products; a matrix on the same sphere is written to by outer products."""
    update = StateUpdate(cost, Sphere("columns"), algorithm=Step(Per("beta"), lazy=False))
    assert dispatch.routes(update)["gram"] is not None
    signal = example(update, batch=(2,), length=9)
    torch.testing.assert_close(
        dispatch.run(update, signal, time=1), dispatch.run(update, signal, time=1, implementation="reference")
    )


@pytest.mark.parametrize("live", [False, True])
def test_whitening_adds_eps_to_the_root(live: bool) -> None:
    """theta / (v^power + eps), with and without derivatives of v."""
    v = torch.tensor([0.0, 4.0], requires_grad=live)
    w = Whiten(("v",), "diagonal", 0.5, 1.0)
    out = w.primal(torch.tensor([3.0, 3.0]), Context(stats=(v,)))
    torch.testing.assert_close(out.detach(), torch.tensor([3.0, 1.0]))


def test_a_constant_norm_asks_for_its_rate() -> None:
    h = ConstantNorm(Euclidean(), Per("step"))
    assert Per("step") in h.rates()
    update = StateUpdate(SquaredError(), Euclidean(), algorithm=Step(Per("step"), via=(StateUpdate(Linear(), h),)))
    assert {p.name for p in update.demands()} == {"step"}
    theta, w = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    for rate in (0.1, 0.5):  # W + rate d keeps the norm of W
        d = h.primal(theta, Context(weights=w, signal={"step": rate}))
        assert torch.linalg.vector_norm(w + rate * d).item() == pytest.approx(5.0, rel=1e-5)


def test_a_saved_group_without_a_hyperparameter_is_refused() -> None:
    optimizer = Adam(nn.Linear(2, 2))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["betas"]
    with pytest.raises(AxesError, match="the saved group has no betas"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(("nu", "expected"), [(0.0, 0.7), (0.5, 0.8305), (1.0, 0.961)])
def test_quasi_hyperbolic_momentum_by_hand(nu: float, expected: float) -> None:
    """b = 0.9 b + 0.1 g, w = w - 0.1 (nu b + (1 - nu) g) for g = 1, 2: Ma & Yarats 2019, eq. 3."""
    w = nn.Parameter(torch.ones(2))
    optimizer = QHM([w], lr=0.1, momentum=0.9, nu=nu)
    for g in (1.0, 2.0):
        w.grad = torch.full((2,), g)
        optimizer.step()
    assert w.tolist() == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_a_number_of_a_step_is_a_tensor_of_one_element_at_most(shape: tuple[int, ...]) -> None:
    optimizer = Adam(nn.Linear(2, 2))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["eps"] = torch.full(shape, 1e-8)
    if shape == (2,):
        with pytest.raises(AxesError, match="a tensor of one element"):
            optimizer.step()
    else:
        optimizer.step()


def test_names_that_a_state_dict_lacks_are_told_though_it_has_no_others() -> None:
    with pytest.raises(AxesError, match="Layer: no b, c. A state dict has a, b, c"):
        require_names("Layer", {"a": torch.zeros(1)}, ("a", "b", "c"))


def test_a_mixer_by_name_hands_on_how_streams_are_left() -> None:
    plain = mixer(StateUpdate(Alignment()))(8, streams=2)
    learned = mixer(StateUpdate(Alignment()))(8, streams=2, learned_reduce=True)
    assert plain.exit is None and isinstance(learned.exit, nn.Parameter) and learned.exit.shape == (2,)


@pytest.mark.parametrize(("given", "legal"), [({}, False), ({"d_k": 4}, False), ({"d_v": 4}, False),
                                              ({"d_k": 4, "d_v": 4}, True)])  # fmt: skip
def test_a_width_that_heads_do_not_divide_needs_both_of_theirs(given: dict[str, int], legal: bool) -> None:
    if legal:
        y, _ = GatedDeltaNet(10, heads=3, **given)(torch.randn(1, 4, 10))
        assert y.shape == (1, 4, 10)
    else:
        with pytest.raises(ShapeError, match="give d_k and d_v"):
            GatedDeltaNet(10, heads=3, **given)


def test_keys_of_an_mlstm_are_half_as_wide_as_values() -> None:
    """Beck et al. 2024, as released: qk_dim_factor 0.5."""
    sizes = MLSTM(16, heads=2).sizes
    assert (sizes.d_k, sizes.d_v) == (4, 8)


def test_a_threshold_of_norms_grows_with_the_root_of_the_width() -> None:
    """sqrt(d_v) softplus(bias): 9 entries of unit size have a norm of 3."""
    sizes, per = replace(MLSTM(16, heads=2).sizes, d_v=9), Per("delta", domain="positive")
    chart = NormThreshold(bias=2.0).build(per, sizes, {})
    for p in chart.parameters():
        if p.ndim > 1:
            nn.init.zeros_(p)
    (found,) = chart(torch.randn(1, 2, 16)).values()
    torch.testing.assert_close(found, torch.full_like(found, 3 * math.log1p(math.exp(2.0))))


@pytest.mark.parametrize(
    "update",
    [
        StateUpdate(Alignment(), monoid=Diagonal("decay")),  # no bonus
        StateUpdate(Alignment(), monoid=Product((Householder(1.0, "w"), Diagonal("decay"))), algorithm=_BONUS),  # and w
    ],
)
def test_the_block_of_rwkv6_takes_its_own_rates_and_vectors_alone(update: StateUpdate) -> None:
    with pytest.raises(AxesError, match="RWKV6Block supplies k, v, q"):
        RWKV6(16, heads=2, update=update)


def test_a_tensor_of_another_shape_is_named_after_its_layer() -> None:
    ours = GatedDeltaNet(16, heads=2).state_dict()
    name = next(n for n, x in ours.items() if x.ndim == 2)
    with pytest.raises(AxesError, match=f"^gated-delta-net: {name}"):
        to_fla("gated-delta-net", {**ours, name: ours[name][None]})
    with pytest.raises(TypeError, match="^GatedDeltaNet: x must be a tensor"):
        GatedDeltaNet(16, heads=2)([1.0])


def test_time_steps_begin_log_uniform_between_their_bounds() -> None:
    """Gu & Dao 2023, section 3.6: dt from exp(U(log 0.001, log 0.1))."""
    torch.manual_seed(0)
    made = TimeStep().build(Per("dt", domain="positive"), replace(MLSTM(16, heads=2).sizes, heads=4000), {})
    logs = nn.functional.softplus(made.up.bias.detach()).log()
    low, high = math.log(1e-3), math.log(0.1)
    assert low - 1e-4 < logs.min() and logs.max() < high + 1e-4
    assert logs.mean().item() == pytest.approx((low + high) / 2, abs=0.1)
    assert logs.std().item() == pytest.approx((high - low) / 12**0.5, rel=0.05)


def test_frank_wolfe_begins_with_small_gates() -> None:
    chart = next(m for m in FrankWolfeDelta(8, heads=2).modules() if type(m).__name__ == "_FrankWolfeModule")
    assert torch.equal(chart.up.bias, torch.full((2,), -4.0))  # type: ignore[arg-type, union-attr]


def test_dynamic_hyper_connections_begin_a_hundredth_from_static_ones() -> None:
    made = DynamicHyperConnections(8, streams=4)
    assert torch.equal(made.scale.detach(), torch.full((2,), 0.01))


def test_convolutions_begin_within_the_root_of_their_taps() -> None:
    """Uniform in +-1/sqrt(width), as torch's own: variance 1 / (3 width)."""
    torch.manual_seed(0)
    weight = ShortConvolution(4000, 4, None, {}, bias=True).weight.detach()
    assert weight.abs().max() <= 0.5 and weight.abs().max() > 0.49
    assert weight.var().item() == pytest.approx(1 / 12, rel=0.05)
    assert math.isclose(weight.mean().item(), 0, abs_tol=0.01)


def _begun_again(module: nn.Module, junk: float) -> list[torch.Tensor]:
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(junk)
        torch.manual_seed(0)
        module.reset_parameters()  # type: ignore[operator]
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("cls", depth.ALL, ids=lambda cls: cls.name)
def test_every_parameter_of_a_mixer_is_set_by_its_reset(cls: type, learned: bool) -> None:
    """What memory held before is no start: a parameter that nobody fills is often zero by chance."""
    if learned and "learned_reduce" not in inspect.signature(cls).parameters:
        pytest.skip("it has no exit of its own")
    mixer = cls(8, layer_index=1, **({"learned_reduce": True} if learned else {}))
    for a, b in zip(_begun_again(mixer, math.nan), _begun_again(mixer, 7.0), strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


@pytest.mark.parametrize("cls", (*sequence.ALL, *sequence.PREDICTED), ids=lambda cls: cls.name)
def test_every_parameter_of_a_layer_is_set_by_its_reset(cls: type) -> None:
    layer = cls(8, heads=2)
    for a, b in zip(_begun_again(layer, math.nan), _begun_again(layer, 7.0), strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


def test_pairs_turn_more_slowly_the_later_they_stand() -> None:
    """Su et al. 2021, eq. 15: angles base^(-2i / d), one for each pair."""
    angle = Rotation(10000.0).element({}, 1.0, torch.zeros(1, 6, dtype=torch.float64)).angle
    assert angle is not None and angle.tolist() == pytest.approx([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3)])
