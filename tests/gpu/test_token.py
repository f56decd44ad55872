"""Kernels generated from a token's step on a GPU against the float64 interpreter: outputs, states, all gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import sequence  # noqa: E402
from axes.core import reference  # noqa: E402
from axes.core.state_update import State, StateUpdate  # noqa: E402
from axes.routes import dispatch, token  # noqa: E402


@pytest.fixture(autouse=True)
def picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "PICKED", True)


UPDATES = {
    "moneta": sequence.MonetaMatrix.update,
    "memora": sequence.MemoraMatrix.update,
    "adam": sequence.AdamNet.update,
    "lattice-dec": sequence.LatticeDec.update,
    "lattice-osr": sequence.LatticeOSR.update,
    "longhorn": sequence.Longhorn.update,
}
BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SHAPES = ((2, 40, 3, 64, 64), (1, 70, 2, 40, 56), (1, 1, 1, 5, 7), (1, 33, 2, 64, 128))


def draw(update: StateUpdate, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cuda") -> dict[str, Tensor]:
    batch, length, heads, d_v, d_k = shape
    made: dict[str, Tensor] = {}
    for name, axes in token._form(update).signal.items():
        x = torch.randn(batch, length, heads, *({"v": d_v, "k": d_k}[a] for a in axes if a))
        if name in ("q", "k", "v"):
            made[name] = torch.nn.functional.normalize(x, dim=-1).to(device, dtype)
        else:
            made[name] = (-0.05 * x.abs() if name == "decay" else 0.02 + 0.03 * x.abs()).to(device)
    return made


def start(update: StateUpdate, signal: dict[str, Tensor], count: int = 0) -> State:
    leaves, form = pytree.tree_flatten(update.init({n: x[:, 0].float() for n, x in signal.items()}))
    leaves = [x + 0.1 * torch.rand_like(x) if x.is_floating_point() else x + count for x in leaves]
    return pytree.tree_unflatten(leaves, form)  # type: ignore[no-any-return]


def results(run: Any, update: StateUpdate, signal: dict[str, Tensor], state: State, pulls: list[Tensor]) -> list[Any]:
    live = {n: x.detach().requires_grad_() for n, x in signal.items()}
    leaves, form = pytree.tree_flatten(state)
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in leaves]
    out, last = run(update, live, pytree.tree_unflatten(leaves, form), time=1)
    ends = [out, *(x for x in pytree.tree_leaves(last) if x.is_floating_point())]
    if not pulls:
        pulls += [torch.randn(x.shape, dtype=torch.float64) for x in ends]
    pairs = [(x, g.to(x)) for x, g in zip(ends, pulls, strict=True) if x.requires_grad]
    inputs = [*live.values(), *(x for x in leaves if x.is_floating_point())]
    grads = torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    return [*ends, *grads]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_equals_the_interpreter(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    update = UPDATES[name]
    signal = draw(update, shape, dtype)
    state = start(update, signal, count=7)
    shapes = {n: tuple(x.shape) for n, x in signal.items()}
    assert dispatch.select(update, "cuda", dtype, shapes)[:2] == ("token", "triton")
    pulls: list[Tensor] = []
    exact = {n: x.double().cpu() for n, x in signal.items()}
    first = pytree.tree_map(lambda x: x.double().cpu() if x.is_floating_point() else x, state)
    want = results(reference.run, update, exact, first, pulls)
    got = results(dispatch.run, update, signal, state, pulls)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if b is not None:
            assert a is not None and a.shape == b.shape and torch.isfinite(a).all(), i
            assert (a.double().cpu() - b).norm() <= BOUNDS[dtype] * b.norm() + 1e-9, (i, a.norm(), b.norm())


@pytest.mark.parametrize("name", UPDATES)
def test_bits_do_not_depend_on_the_run(name: str) -> None:
    torch.manual_seed(0)
    update = UPDATES[name]
    signal = draw(update, (2, 100, 4, 64, 64), torch.bfloat16)
    state, pulls = start(update, signal), []  # type: ignore[var-annotated]
    first, again = (results(dispatch.run, update, signal, state, pulls) for _ in range(2))
    assert all(a is None or torch.equal(a, b) for a, b in zip(first, again, strict=True))


FORMS = ({"across": "k"}, {"across": "v"}, {"ahead": 0}, {"ahead": 2}, {"grouped": False})


@pytest.mark.parametrize("change", FORMS, ids=str)
def test_every_form_of_the_kernels(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    update = UPDATES["lattice-dec"]
    signal = draw(update, (1, 50, 2, 64, 64), torch.float32)
    state, pulls = start(update, signal), []  # type: ignore[var-annotated]
    want = results(dispatch.run, update, signal, state, pulls)
    usual, kept = token.walk, {}  # type: ignore[var-annotated]

    def changed(*given: Any) -> Any:
        if given not in kept:
            kept[given] = dataclasses.replace(usual(*given), **change)
        return kept[given]

    monkeypatch.setattr(token, "walk", changed)
    for a, b in zip(results(dispatch.run, update, signal, state, pulls), want, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_packed_sequences_from_states_of_their_own() -> None:
    torch.manual_seed(0)
    update = UPDATES["lattice-osr"]
    signal = draw(update, (1, 90, 2, 64, 64), torch.float32)
    bounds = torch.tensor([0, 30, 30, 31, 90], device="cuda")
    state = start(update, {n: x[:, :1].expand(4, *x.shape[1:]) for n, x in signal.items()})
    out, last = dispatch.run_packed(update, signal, state, bounds)
    assert last is not None
    for n, (a, b) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        own = state._replace(theta=(state.theta[0][n : n + 1],))
        if b > a:
            y, own = dispatch.run(update, {m: x[:, a:b] for m, x in signal.items()}, own)
            torch.testing.assert_close(out[:, a:b], y)
        torch.testing.assert_close(last.theta[0][n : n + 1], own.theta[0])


def test_what_is_not_written_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    update = UPDATES["adam"]
    signal = draw(update, (2, 70, 2, 48, 64), torch.bfloat16)
    state, pulls = start(update, signal), []  # type: ignore[var-annotated]
    want = results(dispatch.run, update, signal, state, pulls)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    for a, b in zip(results(dispatch.run, update, signal, state, pulls), want, strict=True):
        assert a is None or torch.equal(a, b)


def test_a_layer_is_one_graph() -> None:
    torch.manual_seed(0)
    layer = sequence.LatticeDec(128, heads=2).cuda()
    x = torch.randn(2, 50, 128, device="cuda", requires_grad=True)
    want, _ = layer(x)
    got, _ = torch.compile(layer, fullgraph=True)(x)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    a, b = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_a_million_tokens_are_finite() -> None:
    update = UPDATES["lattice-osr"]
    signal = draw(update, (1, 1 << 20, 1, 16, 16), torch.bfloat16)
    with torch.no_grad():
        out, last = dispatch.run(update, signal)
    assert torch.isfinite(out).all() and torch.isfinite(last.theta[0]).all()
