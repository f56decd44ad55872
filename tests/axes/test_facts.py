"""Facts of a tuple are worked out once, and nobody else notices."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import threading
from typing import Any

import pytest
import torch

import axes
from axes import catalogue
from axes.core.facts import fact
from axes.core.state_update import StateUpdate
from axes.routes import dispatch

NAMES = ("gated-delta-net", "gla", "titans", "lattice-enc", "softmax-attention")


def fresh(name: str) -> StateUpdate:
    """A tuple of which nothing is known yet."""
    return dataclasses.replace(catalogue.get(name).update)


def test_a_fact_is_worked_out_once_for_each_argument() -> None:
    asked = []

    @fact
    def found(update: StateUpdate, number: int = 0) -> list[int]:
        asked.append(number)
        return [number]

    update = fresh("gla")
    assert found(update) is found(update) and found(update, 1) is found(update, 1) and found(update, number=1) == [1]
    assert asked == [0, 1, 1] and found(fresh("gla")) is not found(update)


def test_what_is_known_leaves_no_trace() -> None:
    """In equality, hash, pickles and copies."""
    update, other = fresh("gated-delta-net"), fresh("gated-delta-net")
    before = pickle.dumps(update)
    axes.explain(update, "cuda", torch.bfloat16)
    assert len(vars(update)) > len(vars(other)) and update == other and hash(update) == hash(other)
    assert pickle.dumps(update) == before and repr(update) == repr(other)
    fields = {f.name for f in dataclasses.fields(StateUpdate)}
    for again in (pickle.loads(before), copy.copy(update), copy.deepcopy(update)):
        assert set(vars(again)) == fields and again == update and axes.select(again) == axes.select(update)


def test_threads_may_ask_at_once() -> None:
    update = fresh("titans-matrix")
    found: list[Any] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        found.append(dict(dispatch.routes(update)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and all(x == found[0] for x in found)


@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_asks_the_tuple_nothing_again(name: str, device: str) -> None:
    """Calls of functions, since times are the machine's: 28 to 73 us were some hundred."""
    update, place, shapes = fresh(name), torch.device(device), {"k": (1, 8, 2, 64), "v": (1, 8, 2, 64)}

    def calls() -> int:
        count = 0

        def seen(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(seen)
        try:
            dispatch.select(update, place, torch.bfloat16, shapes)
        finally:
            sys.setprofile(None)
        return count

    cold, warm = calls(), calls()
    assert warm <= 25 < cold, (cold, warm)
