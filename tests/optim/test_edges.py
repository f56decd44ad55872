"""Where an optimizer's parts end: blocks of a large tensor, states that were replaced, flags that nobody has set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from axes import optim
from axes.core.algorithms import Read
from axes.core.monoids import Scalar, Zero
from axes.errors import AxesError
from axes.optim.engine.choice import plan
from axes.optim.engine.finite import Finite
from axes.optim.engine.forms import _moves
from axes.optim.engine.kept import Kept
from axes.optim.engine.staged import schedule_over
from axes.optim.engine.together import first_is_special
from axes.optim.rules.exponentiated import _on_simplex
from axes.optim.rules.mixtures import QHM
from axes.programs.batched import BLOCK
from axes.routes.choice import Target


@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK, 3 * BLOCK + 1])
def test_a_tensor_of_several_blocks_steps_as_pieces_of_one_block_each(length: int) -> None:
    """The one in the middle begins where it ends less its length, and is no whole tensor for that."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, generator=generator)
    whole, pieces = [nn.Parameter(x.clone())], [nn.Parameter(y.clone()) for y in x.split(BLOCK)]
    optimizers = [optim.NAdam(whole, lr=0.1), optim.NAdam(pieces, lr=0.1)]
    for _ in range(2):
        g = torch.randn(length, generator=generator)
        whole[0].grad = g.clone()
        for p, y in zip(pieces, g.split(BLOCK), strict=True):
            p.grad = y.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole[0], torch.cat(list(pieces)))


class _Asked(TorchDispatchMode):
    """How many operations were called."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_decay_of_zero_takes_no_pass_over_the_entries() -> None:
    passes = []
    for decay in (0.0, 0.1):
        p = nn.Parameter(torch.ones(50, 50))
        optimizer = optim.NAdam([p], lr=0.01, weight_decay=decay)
        for _ in range(3):
            p.grad = torch.ones(50, 50)
            with _Asked() as asked:
                optimizer.step()
        passes.append(asked.count)
    assert 0 < passes[0] < passes[1]


def test_what_is_kept_is_of_these_tensors_and_of_no_equal_ones() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    state = {p: {"m": torch.zeros_like(p)} for p in parameters}
    kept = Kept()
    kept.keep(parameters, list(state.values()))
    for _ in range(3):
        assert kept.matches(parameters, state)
    assert not kept.matches(parameters[:1], state) and not kept.matches(parameters[::-1], state)
    old = state[parameters[1]]
    state[parameters[1]] = {"m": old["m"].clone()}
    assert not kept.matches(parameters, state)
    state[parameters[1]] = old
    assert kept.matches(parameters, state)
    parameters[0].data = parameters[0].data.clone()  # at another place
    assert not kept.matches(parameters, state)


def test_a_step_that_nobody_doubts_has_no_flag() -> None:
    finite, cpu = Finite("skip"), torch.device("cpu")
    assert finite.flag(cpu) is None
    finite.flags = {cpu: torch.ones(())}
    assert finite.flag(cpu) is finite.flags[cpu]


def test_rules_whose_first_datum_is_another_say_so() -> None:
    """A buffer that begins at the first gradient, as torch's, and not one that begins at zero."""
    assert first_is_special(optim.SGD.declare(momentum=0.9, dampening=0.5).normal())
    assert not first_is_special(optim.SGD.declare().normal()) and not first_is_special(optim.AdamW.declare().normal())


@pytest.mark.parametrize("rule", [optim.LAMB, optim.LARS, optim.Adafactor])
def test_values_of_one_matrix_alone_are_numbers_of_the_host(rule: Any) -> None:
    given = (rule.declare().normal(), False, (6, 4), torch.float32)
    assert schedule_over(*given, True).alone and not schedule_over(*given, False).alone


def test_a_step_that_takes_all_entries_of_a_matrix_together_is_no_kernel_over_entries() -> None:
    hopper = Target(torch.device("cuda"), (9, 0), "assumed")
    made = {rule: plan("step", rule.declare(), hopper, torch.float32).choice for rule in (optim.LAMB, optim.AdamW)}
    assert (made[optim.LAMB].route, made[optim.LAMB].implementation) == ("stacks", "torch")
    assert "it takes entries of a matrix together" in made[optim.LAMB].reason
    assert (made[optim.AdamW].route, made[optim.AdamW].implementation) == ("entrywise", "triton")


def test_a_schedule_moves_floats_and_nothing_else() -> None:
    flag = True
    assert _moves(flag, flag) and _moves("a", "a") and _moves(0.1, 0.2) and _moves((0.9, flag), (0.8, flag))
    for old, new in ((True, False), (1, 2), (0.1, None), ((0.9,), (0.9, 0.9)), ((0.9, True), (0.9, False))):
        assert not _moves(old, new), (old, new)


def test_quasi_hyperbolic_momentum_is_momentum_at_one_and_descent_at_zero() -> None:
    assert not QHM.declare(0.9, 0.0).normal().filters() and not QHM.declare(0.0, 0.5).normal().filters()
    (mean,) = QHM.declare(0.9, 1.0).normal().filters()
    assert mean.parts().step.read is None
    (mixed,) = QHM.declare(0.9, 0.25).normal().filters()
    assert mixed.parts().step.read == Read(0.25 * 0.9, 1.0 - 0.25 * 0.9)


def test_a_root_may_stand_without_a_floor() -> None:
    assert optim.LAMB.declare(eps=0.0) != optim.LAMB.declare(eps=1e-6)
    with pytest.raises(AxesError, match="LAMB: eps must be >= 0, got -1"):
        optim.LAMB.declare(eps=-1.0)


def test_the_edge_of_the_simplex_is_on_it() -> None:
    assert _on_simplex(torch.tensor([0.5, 0.5, 0.0])) and _on_simplex(torch.tensor([[1.0, 0.0], [0.25, 0.75]]))
    for off in ([0.5, 0.75, -0.25], [0.5, 0.25, 0.0], [[1.0, 0.0], [0.5, 0.75]]):
        assert not _on_simplex(torch.tensor(off)), off


def test_shampoo_averages_gradients_where_its_first_share_is_above_zero() -> None:
    for beta, kept in ((0.5, Scalar(0.5)), (0.0, Zero())):
        (direction,) = optim.Shampoo.declare(betas=(beta, 0.9)).normal().filters()
        assert direction.parts().monoid == kept


def test_the_report_of_one_rule_sees_no_matrices_and_has_nothing_to_add() -> None:
    model = nn.Linear(3, 2)
    report = optim.AdamW(model).report()
    assert not report.notes and [row.seen for row in report.rows] == [(), ()]
    rows = optim.Muon(nn.Sequential(model, nn.Linear(2, 2))).report().rows
    assert {row.rule for row in rows} == {"muon", "adamw"}
    assert all((row.rule == "muon") == bool(row.seen) for row in rows)
