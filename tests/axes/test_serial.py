"""States from chunk to chunk: a plain loop of the formula, derivatives against differences and autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axes.routes import serial

M, N, C, D_V, D_K = 2, 4, 5, 2, 3


def draw(*size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, dtype=torch.float64, generator=generator).requires_grad_()


def inputs(kept: int | None, erases: bool) -> list[Tensor | None]:
    """kept: how many numbers of a chunk, None: it keeps all."""
    chunks = (draw(M, N, C, D_V), draw(M, N, C, D_K), draw(M, N, 1 + C, D_K)[:, :, 1:])
    whole = None if kept is None else draw(M, N, 1, kept)
    return [draw(M, D_V, D_K), *([chunks[0], whole, *chunks[1:]] if erases else [draw(M, N, D_V, D_K), whole])]


def loop(x: Tensor, f: Tensor, kept: Tensor | None, r: Tensor | None = None, e: Tensor | None = None) -> list[Tensor]:
    states, writes = [], []
    for n in range(N):
        states.append(x)
        x = x if kept is None else x * kept[:, n]
        if r is None or e is None:
            x = x + f[:, n]
        else:
            writes.append(f[:, n] - r[:, n] @ states[-1].mT)
            x = x + writes[-1].mT @ e[:, n]
    return [torch.stack(states, 1), x, *([torch.stack(writes, 1)] if writes else [])]


@pytest.mark.parametrize("erases", [False, True])
@pytest.mark.parametrize("kept", [None, 1, D_K])
def test_states_and_writes_are_those_of_a_loop_with_both_derivatives(kept: int | None, erases: bool) -> None:
    given, run = inputs(kept, erases), serial.writes if erases else serial.states
    got, want = run(*given), loop(*given)  # type: ignore[operator, arg-type]
    assert type(got[0].grad_fn).__name__ == "_SerialBackward"
    upstream, wanted = [draw(*y.shape).detach() for y in want], [x for x in given if x is not None]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    found, expected = (torch.autograd.grad(y, wanted, upstream) for y in (got, want))
    torch.testing.assert_close(found, expected)

    def of(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        made: tuple[Tensor, ...] = run(*[None if x is None else next(rest) for x in given])  # type: ignore[operator]
        return made

    assert torch.autograd.gradgradcheck(of, wanted, fast_mode=True)


def test_transforms_take_torchs_operations() -> None:
    given = [x.detach() for x in inputs(1, True) if x is not None]
    each = torch.func.vmap(serial.writes)(*[torch.stack((x, 2 * x)) for x in given])
    for twice, one, other in zip(each, serial.writes(*given), serial.writes(*[2 * x for x in given]), strict=True):
        torch.testing.assert_close(twice, torch.stack((one, other)))
    rates = torch.func.jacfwd(lambda x: serial.writes(x, *given[1:])[1])(given[0])
    torch.testing.assert_close(rates, torch.autograd.functional.jacobian(lambda x: loop(x, *given[1:])[1], given[0]))
