"""What a trial trains on is what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from axes.models import Architecture
from axes.tasks.batches import mixed
from axes.tasks.recall import MultiQueryRecall
from axes.tasks.synthetic import IGNORED
from axes.tasks.tracking import ModularSum
from axes.transfer.plan import planned
from axes.transfer.trials import HELD_OUT, Asked, Tokens, trial


def test_a_head_that_says_answers_alone() -> None:
    """The loss, and every gradient, of a head that speaks at every place, where most places count for nothing."""
    wide = trial("recall-of-many", "small")
    assert isinstance(wide, Asked)
    one = replace(wide, task=MultiQueryRecall(4, 32, 64), batch=3, products=None)
    whole = Tokens(one.name, one.steps, one.batch, one.task, one.architecture)
    _, control = planned(("R1",), form="small").experiments[0].systems
    torch.manual_seed(0)
    model = one.model(control).double()
    assert 0.017 < float(model.embedding.weight.detach().std()) < 0.023  # type: ignore[union-attr, operator]
    batch = one.batch_of(1, 0)
    found = []
    for each in (one, whole):
        model.zero_grad()
        loss = each.loss(model, *batch)
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (mine, gradients), (other, others) = found
    assert_close(mine, other, rtol=1e-6, atol=0.0)  # logits of the whole form are rounded to float32
    for g, h in zip(gradients, others, strict=True):
        assert_close(g, h, rtol=1e-4, atol=1e-7)


def test_products_of_half_precision() -> None:
    """Within bfloat16's rounding of the same in float32, and no weight is kept in it: another step sees new weights."""
    one = trial("recall-of-many", "small")
    assert isinstance(one, Asked)
    one = replace(one, task=MultiQueryRecall(4, 32, 64), batch=3)
    _, control = planned(("R1",), form="small").experiments[0].systems
    torch.manual_seed(0)
    model, batch = one.model(control), one.batch_of(1, 0)
    for _ in range(2):
        rounded, plain = one.loss(model, *batch), replace(one, products=None).loss(model, *batch)
        assert rounded.dtype == torch.float32 and rounded != plain
        assert_close(rounded, plain, rtol=1e-2, atol=0.0)
        with torch.no_grad():
            model.head.weight.mul_(30.0)  # type: ignore[union-attr, operator]


class _Guess(nn.Module):
    """Says of every token that the answer is the next letter, with odds that fall along the window."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        odds = torch.linspace(3.0, 0.0, tokens.shape[1])[None, :, None]
        return odds * torch.nn.functional.one_hot((tokens + 1) % 5, 5), None


def test_right_answers_and_losses_by_position_and_length() -> None:
    """Against a count by hand, a place at a time."""
    task = ModularSum(16, 5)
    one = Tokens("sum", 1, 3, task, Architecture("delta-net"), longer=(24,), tested=6)
    held = one.held_out(_Guess(), torch.device("cpu"))
    for length in (16, 24):
        right, nats, asked = ([0.0] * length for _ in range(3))
        for part in range(2):
            tokens, targets = task.draw(3, mixed(HELD_OUT, part), length)
            for window, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
                for t, (x, y) in enumerate(zip(window, answers, strict=True)):
                    if y != IGNORED:
                        odds = [3.0 * (1 - t / (length - 1)) * (z == (x + 1) % 5) for z in range(5)]
                        asked[t] += 1
                        right[t] += odds[y] == max(odds) and (max(odds) > 0 or y == 0)
                        nats[t] += math.log(sum(map(math.exp, odds))) - odds[y]
        assert held.by["length"][str(length)] == pytest.approx(sum(right) / sum(asked))
        assert held.by["loss by length"][str(length)] == pytest.approx(sum(nats) / sum(asked), rel=1e-5)
        if length == 16:
            ends = [int(end) for end in held.by["position"]]
            for a, b in zip([0, *ends], ends, strict=False):
                count = sum(asked[a:b])
                assert held.by["position"][str(b)] == pytest.approx(sum(right[a:b]) / count)
                assert held.by["loss by position"][str(b)] == pytest.approx(sum(nats[a:b]) / count, rel=1e-5)
            assert held.value == pytest.approx(sum(right) / sum(asked))
