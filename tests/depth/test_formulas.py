"""Products with streams whose derivatives are formulas: those of the operations, further derivatives and transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from axes.depth import products

N, D, LEAD = 3, 5, (2, 4)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Any]]]:
    torch.manual_seed(0)
    x, v, w, m = drawn(*LEAD, N, D), drawn(*LEAD, D), drawn(*LEAD, N), drawn(*LEAD, N, N)
    one = products.plain_write
    return {
        "project": (products.project, products.plain_project, [x, drawn(6, N * D), 1e-6]),
        "project each": (products.project, products.plain_project, [x, drawn(6, D), 1e-6]),
        "project centred": (products.project, products.plain_project, [x, drawn(6, N * D), 1e-6, True]),
        "read": (products.read, products.plain_read, [x, w]),
        "read, constant": (products.read, products.plain_read, [x, drawn(N)]),
        "write": (products.write, one, [x, v, w, m]),
        "write unmixed": (products.write, one, [x, v, w, None]),
        "write, constant": (products.write, one, [x, v, drawn(N), drawn(N, N)]),
        "write to strided streams": (products.write, one, [drawn(*LEAD, D, N).mT, v, w, m]),
    }


def gradients(outs: Any, given: list[Any], which: int, **how: Any) -> tuple[Tensor | None, ...]:
    """which: bits of the outputs from which gradients come."""
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(1)
    pushes = [torch.randn(o.shape, dtype=o.dtype) for o in outs]
    chosen = [(o, p) for i, (o, p) in enumerate(zip(outs, pushes, strict=True)) if which >> i & 1]
    wanted = [x for x in given if isinstance(x, Tensor)]
    made, came = zip(*chosen, strict=True)
    return torch.autograd.grad(made, wanted, came, allow_unused=True, **how)


def close(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        x, y = (torch.zeros(()) if t is None else t for t in (x, y))
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("name", cases())
def test_gradients_are_those_of_the_operations(name: str) -> None:
    call, plain, given = cases()[name]
    got, want = call(*given), plain(*given)
    outs = len(got) if isinstance(got, tuple) else 1
    close(got if outs > 1 else (got,), want if outs > 1 else (want,))
    for which in range(1, 2**outs):
        close(gradients(call(*given), given, which), gradients(plain(*given), given, which))
    for i in [i for i, x in enumerate(given) if isinstance(x, Tensor)]:  # one of them alone
        some = [x if j == i or not isinstance(x, Tensor) else x.detach() for j, x in enumerate(given)]
        close(gradients(call(*some), [some[i]], 1), gradients(plain(*some), [some[i]], 1))


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("project")])
def test_rows_that_are_taken_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_NUMBERS", 3 * N * D)  # the last piece is a smaller one
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    test_gradients_are_those_of_the_operations(name)


@pytest.mark.parametrize("graph", [False, True])
def test_weights_that_are_made_of_the_streams(graph: bool) -> None:
    """With a graph of the gradients too, what comes through the weights is counted once."""
    x = drawn(*LEAD, N, D)
    found = []
    for read in (products.read, products.plain_read):
        y, _ = read(x, x.mean(-1).sin())
        found.append(torch.autograd.grad(y.sin().sum(), x, create_graph=graph))
    close(*found)


@pytest.mark.parametrize("name", cases())
def test_further_derivatives_and_transforms(name: str) -> None:
    call, plain, given = cases()[name]
    every = 3 if isinstance(plain(*given), tuple) else 1

    def twice(f: Callable[..., Any]) -> tuple[Tensor | None, ...]:
        first = gradients(f(*given), given, every, create_graph=True)
        total = sum(g.square().sum() for g in first if g is not None)
        return torch.autograd.grad(total, [x for x in given if isinstance(x, Tensor)], allow_unused=True)  # type: ignore[arg-type]

    close(twice(call), twice(plain))
    stacked = [torch.stack([x, 2 * x]) if isinstance(x, Tensor) else x for x in given]
    batched = torch.func.vmap(call, in_dims=tuple(0 if isinstance(x, Tensor) else None for x in given))(*stacked)
    want = call(*[2 * x if isinstance(x, Tensor) else x for x in given])
    close([b[1] for b in batched] if every == 3 else [batched[1]], want if every == 3 else [want])


def test_a_planted_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call, plain, given = cases()["project"]
    want = gradients(plain(*given), given, 3)
    monkeypatch.setattr(torch.Tensor, "addcmul_", lambda x, *more, **options: x)
    with pytest.raises(AssertionError):
        close(gradients(call(*given), given, 3), want)
