"""Labels of synthetic tasks, found again by reading the windows token by token."""

from __future__ import annotations

import itertools

import pytest
import torch

from axes.errors import AxesError
from axes.tasks.recall import FuzzyRecall, LatestRecall, Memorisation, MultiQueryRecall, NoisyRecall, SelectiveCopy
from axes.tasks.synthetic import IGNORED, Task
from axes.tasks.tracking import GroupWord, ModularSum

TASKS: tuple[Task, ...] = (
    MultiQueryRecall(), MultiQueryRecall(4, 40, 20), SelectiveCopy(), SelectiveCopy(3, 9, 5), NoisyRecall(),
    NoisyRecall(share=0.0, length=31), FuzzyRecall(), FuzzyRecall(40, 8, 3, 1), Memorisation(), ModularSum(),
    ModularSum(30, 5), GroupWord(), GroupWord(20, 5), LatestRecall(), LatestRecall(23, 3, 4, 0.2),
)  # fmt: skip


def answers(task: Task, window: list[int]) -> list[int]:
    """What a reader with a notebook writes below every token."""
    out = [IGNORED] * len(window)
    if isinstance(task, MultiQueryRecall):
        n, notes = task.pairs, dict(zip(window[0 : 2 * task.pairs : 2], window[1 : 2 * task.pairs : 2], strict=True))
        assert len(notes) == n and all(1 <= k < task.tokens // 2 <= v for k, v in notes.items())
        return [notes.get(x, IGNORED) if t >= 2 * n and t % 2 == 0 else IGNORED for t, x in enumerate(window)]
    if isinstance(task, SelectiveCopy):
        content = [x for x in window if x > 1]
        assert len(content) == task.copied and window[-task.copied :] == [1] * task.copied
        return out[: -task.copied] + content
    if isinstance(task, NoisyRecall):
        notes = {}
        for t in range(0, len(window) - 1, 2):
            key, value = window[t], window[t + 1]
            if key >= task.tokens:
                assert value >= task.tokens
                continue
            assert notes.get(key, value) == value
            out[t] = notes.get(key, IGNORED)
            notes[key] = value
        return out
    if isinstance(task, LatestRecall):
        notes = {}
        for t in range(0, len(window) - 1, 2):
            first, second = window[t : t + 2]
            if first == 0:
                assert 1 <= second <= task.keys
                out[t + 1] = notes.get(second, IGNORED)
            else:
                assert first <= task.keys < second < task.vocabulary
                notes[first] = second
        return out
    if isinstance(task, FuzzyRecall):
        half, t, notes = task.tokens // 2, 0, {}
        runs = [(low, list(g)) for low, g in itertools.groupby(window, key=lambda x: (x >= half) + (x != 0))]
        for (low, key), (_, value) in zip(runs[::2], runs[1::2], strict=False):
            if low == 0:
                break
            if notes.get(key[0]) is not None:
                assert notes[key[0]] == (key, value)
                out[t + len(key) - 1 : t + len(key) - 1 + len(value)] = value
            notes[key[0]] = (key, value)
            t += len(key) + len(value)
        return out
    if isinstance(task, Memorisation):
        return [int(task.values[window[t - 1]]) if t % 2 else IGNORED for t in range(len(window))]
    if isinstance(task, ModularSum):
        return [sum(window[: t + 1]) % task.modulus for t in range(len(window))]
    assert isinstance(task, GroupWord)
    words = list(itertools.permutations(range(task.letters)))
    things = list(range(task.letters))  # thing x has been carried to things[x]
    for t, g in enumerate(window):
        things = [words[g][x] for x in things]
        out[t] = words.index(tuple(things))
    return out


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_labels_by_a_reader(task: Task) -> None:
    tokens, targets = task.draw(8, seed=3)
    assert tokens.shape == targets.shape and tokens.min() >= 0 and tokens.max() < task.vocabulary
    for window, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        found = answers(task, window)
        if isinstance(task, MultiQueryRecall):  # keys that chance put among the others are not asked for
            asked = [x for x, y in zip(window, wanted, strict=True) if y != IGNORED]
            assert sorted(asked) == sorted(window[0 : 2 * task.pairs : 2])
            found = [x if y != IGNORED else y for x, y in zip(found, wanted, strict=True)]
        assert found == wanted
    assert ((targets != IGNORED).sum(1) >= 1).all() or isinstance(task, FuzzyRecall | NoisyRecall)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_a_seed_is_its_windows(task: Task) -> None:
    a, b, c = task.draw(4, 0), task.draw(4, 0), task.draw(4, 1)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) and not torch.equal(a.tokens, c.tokens)
    assert type(task).published().vocabulary > 1 and task.name and task.source


def test_longer_windows() -> None:
    for task in (ModularSum(), GroupWord(), SelectiveCopy(3, 9, 5)):
        tokens, targets = task.draw(2, 0, length=100)
        assert tokens.shape == (2, 100)
        assert [answers(task, w) for w in tokens.tolist()] == targets.tolist()


def test_distances_fall_with_a_power() -> None:
    """Near places are asked more often: of 64 places p(n) ~ n^-0.99 gives the first eighth 0.57 of one query."""
    _, targets = MultiQueryRecall(1, 130, 64).draw(4000, 0)
    places = (targets != IGNORED).int().argmax(1)
    shares = torch.arange(1, 65.0) ** -0.99
    wanted = (shares[:8].sum() / shares.sum()).item()
    assert abs((places < 2 + 16).float().mean().item() - wanted) < 0.03


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MultiQueryRecall(16, 60).draw(1, 0), "16 pairs need 64 tokens"),
        (lambda: MultiQueryRecall(16, 128, 20).draw(1, 0), "17 keys"),
        (lambda: SelectiveCopy(8, 10).draw(1, 0), "need a window of 16"),
        (lambda: NoisyRecall(share=1.0), "must lie in"),
        (lambda: ModularSum(modulus=1).draw(1, 0), "at least 2"),
        (lambda: GroupWord(letters=9).draw(1, 0), "2 to 5"),
        (lambda: ModularSum(length=0), "at least 1"),
        (lambda: ModularSum().draw(0, 0), "batch must be at least 1"),
        (lambda: FuzzyRecall(tokens=4).draw(1, 0), "different tokens"),
    ],
)
def test_what_does_not_fit(make, said: str) -> None:
    with pytest.raises(AxesError, match=said):
        make()
