"""Labels of teachers, found again number by number."""

from __future__ import annotations

import math

import pytest
import torch

from axes.errors import AxesError
from axes.tasks.teacher import DeepTeacher, FlippedLabels, Teacher, _weights


def said(task: Teacher, x: list[float]) -> list[float] | int:
    """What the teacher says of one example, in plain Python."""
    hidden = [task.hidden] * (task.layers - 1) if isinstance(task, DeepTeacher) else []
    weights = [w.tolist() for w in _weights(task.teacher, (task.features, *hidden, task.outputs))]
    for i, w in enumerate(weights):
        x = [sum(a * b for a, b in zip(row, x, strict=True)) for row in w]
        if i < len(weights) - 1:
            x = [math.tanh(2.0 * z) for z in x]
    return x if isinstance(task, FlippedLabels) else max(range(len(x)), key=lambda j: x[j])


@pytest.mark.parametrize("task", [FlippedLabels(5, 3), FlippedLabels(4, 2, teacher=7, share=0.4)], ids=str)
def test_a_share_of_the_labels_has_the_other_sign(task: FlippedLabels) -> None:
    inputs, targets = task.draw(400, seed=1)
    flipped = 0
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        true = said(task, x)
        sign = -1.0 if y[0] * true[0] < 0 else 1.0
        flipped += sign < 0
        assert y == pytest.approx([sign * z for z in true], rel=1e-4, abs=1e-5)
    assert abs(flipped / 400 - task.share) < 0.08
    assert torch.allclose(task.true(inputs).abs(), targets.abs())


@pytest.mark.parametrize("task", [DeepTeacher(), DeepTeacher(3, 4, 2, hidden=5, layers=2)], ids=str)
def test_classes_by_hand(task: DeepTeacher) -> None:
    inputs, targets = task.draw(60, seed=2)
    assert [said(task, x) for x in inputs.tolist()] == targets.tolist()
    assert len(targets.unique()) > task.outputs // 2


def test_a_seed_is_its_examples() -> None:
    for task in (FlippedLabels(), DeepTeacher()):
        a, b, c = task.draw(4, 0), task.draw(4, 0), task.draw(4, 1)
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
        assert not torch.equal(a.inputs, c.inputs)


def test_what_does_not_fit() -> None:
    for make, message in (
        (lambda: FlippedLabels(share=0.5), "must lie in"),
        (lambda: DeepTeacher(hidden=0), "hidden must be at least 1"),
        (lambda: DeepTeacher().draw(0, 0), "batch must be at least 1"),
    ):
        with pytest.raises(AxesError, match=message):
            make()
