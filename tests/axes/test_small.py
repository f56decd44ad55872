"""Small tensors stepped as one: where they lie, what is copied, and that it changes no step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axes import optim
from axes.programs.small import Guest, Rooms, behind_one_another, flat

SHAPES = (*[(3, 4)] * 5, (2,), *[(5, 5)] * 4, (70, 70))


def test_parts_of_one_tensor_are_found_and_others_are_not() -> None:
    whole = torch.arange(12.0)
    a, b = whole.view(2, 6).unbind()
    found = flat([a, b])
    assert found is not None and found.data_ptr() == whole.data_ptr() and torch.equal(found, whole)
    assert flat([b, a]) is None and flat([a, b.clone()]) is None and flat([a[::2], b]) is None
    xs = behind_one_another([torch.ones(2, 3), torch.zeros(4)])
    assert [x.shape for x in xs] == [(2, 3), (4,)] and flat(xs) is not None


def test_rooms_carry_there_and_back() -> None:
    outside = [torch.ones(3), torch.ones(2, 2).mT]
    rooms = Rooms()
    room = rooms.of(outside)
    outside[0].fill_(5.0)
    rooms.enter()
    assert room.tolist() == [5.0] * 3 + [1.0] * 4
    room.mul_(2)
    rooms.leave()
    assert outside[0].tolist() == [10.0] * 3 and outside[1].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_guest_is_copied_in_the_dtype_that_it_comes_in() -> None:
    guest = Guest()
    for dtype in (torch.float64, torch.float32):
        x = guest.of([torch.full((3,), 0.1, dtype=dtype), torch.ones(2, dtype=dtype)])
        assert x.dtype == dtype and x[0].item() == torch.tensor(0.1, dtype=dtype).item()


@pytest.mark.parametrize("cls", (optim.Lion, optim.NAdam, optim.SignSGD, optim.SGD, optim.AdamW, optim.Muon))
def test_many_small_parameters_step_as_each_alone(cls: Any) -> None:
    """Swapped memory, changed weights, replaced states and gradients that are views of one tensor included."""
    results = []
    for foreach in (True, False):
        generator = torch.Generator().manual_seed(0)
        ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]
        matrix = cls is optim.Muon
        groups: Any = [{"params": [p for p in ps if p.ndim > 1], "rule": "muon"}] if matrix else ps
        options: dict[str, Any] = {"precision": "input"} if matrix else {}
        optimizer = cls(groups, lr=0.01, foreach=foreach, **options)
        for t in range(6):
            grads = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
            for p, g in zip(ps, behind_one_another(grads) if t % 2 else grads, strict=True):
                p.grad = g
            if t == 2:
                ps[1].data = ps[1].data.clone()
                ps[2].data.mul_(0.5)
            if t == 4:
                for state in optimizer.state.values():
                    for name, x in state.items():
                        if x.is_floating_point() and x.numel() > 1:
                            state[name] = x.clone()
            optimizer.step()
        results.append([p.detach().clone() for p in ps])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
