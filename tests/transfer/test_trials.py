"""What a trial trains on is what it says."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.testing import assert_close

from axes.tasks.recall import MultiQueryRecall
from axes.transfer.plan import planned
from axes.transfer.trials import Asked, Tokens, trial


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
