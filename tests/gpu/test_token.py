"""Kernels generated from a token's step on a GPU against the float64 interpreter: outputs, states, all gradients.

A failing test names every tensor that is wrong and by how much. Kernels take long to compile: what shares them stands
in one test, in shapes that are alike to a compiler.
"""

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
from tests.gpu.told import apart, unequal, unwritten  # noqa: E402

UPDATES = {
    "moneta": sequence.MonetaMatrix.update,
    "memora": sequence.MemoraMatrix.update,
    "adam": sequence.AdamNet.update,
    "lattice-dec": sequence.LatticeDec.update,
    "lattice-osr": sequence.LatticeOSR.update,
    "longhorn": sequence.Longhorn.update,
}
HALF, SMALL, FULL = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FULL: 1e-4, SMALL: 4e-3, HALF: 2e-2}
USUAL, ODD, WIDE, LEAST = (2, 70, 3, 64, 64), (1, 33, 2, 40, 56), (1, 33, 2, 64, 128), (1, 1, 1, 5, 7)
CASES = (
    *((name, USUAL, dtype) for name in UPDATES for dtype in (HALF, FULL)),
    *((name, ODD, SMALL) for name in UPDATES),
    *((name, WIDE, HALF) for name in ("moneta", "lattice-dec", "longhorn")),
    *((name, LEAST, FULL) for name in ("adam", "lattice-osr")),
)
Named = dict[str, Tensor | None]


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


def walked(update: StateUpdate, signal: Any, state: State, time: int) -> tuple[Tensor, State]:
    """The route itself: what `select` prefers to it is another test's."""
    return token.run(update, signal, state, None)


def results(run: Any, update: StateUpdate, signal: dict[str, Tensor], state: State, pulls: list[Tensor]) -> Named:
    """What comes out, and gradients, by name. pulls: cotangents, drawn where there are none."""
    live = {n: x.detach().requires_grad_() for n, x in signal.items()}
    leaves, form = pytree.tree_flatten(state)
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in leaves]
    out, last = run(update, live, pytree.tree_unflatten(leaves, form), time=1)
    ends = {"o": out} | {f"last {i}": x for i, x in enumerate(pytree.tree_leaves(last)) if x.is_floating_point()}
    if not pulls:
        pulls += [torch.randn(x.shape, dtype=torch.float64) for x in ends.values()]
    pairs = [(x, g.to(x)) for x, g in zip(ends.values(), pulls, strict=True) if x.requires_grad]
    inputs = live | {f"first {i}": x for i, x in enumerate(leaves) if x.is_floating_point()}
    made = torch.autograd.grad([x for x, _ in pairs], list(inputs.values()), [g for _, g in pairs], allow_unused=True)
    return {**ends, **{f"d {n}": g for n, g in zip(inputs, made, strict=True)}}


def exact(update: StateUpdate, signal: dict[str, Tensor], state: State, pulls: list[Tensor]) -> Named:
    """Of the interpreter, in float64 on the CPU."""
    wide = {n: x.double().cpu() for n, x in signal.items()}
    first = pytree.tree_map(lambda x: x.double().cpu() if x.is_floating_point() else x, state)
    return results(reference.run, update, wide, first, pulls)


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES, ids=str)
def test_equals_the_interpreter_in_the_same_bits_again(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    update = UPDATES[name]
    signal = draw(update, shape, dtype)
    state, pulls = start(update, signal, count=7), []  # type: ignore[var-annotated]
    want = exact(update, signal, state, pulls)
    got = results(walked, update, signal, state, pulls)
    wrong = apart(got, want, BOUNDS[dtype], least=1e-9)
    with unwritten():
        again = results(walked, update, signal, state, pulls)
    wrong += unequal(got, again, "again, over NaN,")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [n for n in UPDATES if n != "longhorn"])
def test_what_nothing_else_takes_is_walked(name: str) -> None:
    shapes = {n: (2, 70, 3, 64) for n in "qkv"}
    assert dispatch.select(UPDATES[name], "cuda", HALF, shapes)[:2] == ("token", "triton")


FORMS = ({"across": "k"}, {"across": "v"}, {"ahead": 0}, {"ahead": 2}, {"grouped": False})


@pytest.mark.parametrize("change", FORMS, ids=str)
def test_every_form_of_the_kernels(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    update = UPDATES["lattice-dec"]
    signal = draw(update, (1, 50, 2, 64, 64), FULL)
    state, pulls = start(update, signal), []  # type: ignore[var-annotated]
    want = exact(update, signal, state, pulls)
    usual, kept = token.walk, {}  # type: ignore[var-annotated]

    def changed(*given: Any) -> Any:
        if given not in kept:
            kept[given] = dataclasses.replace(usual(*given), told=None, **change)
        return kept[given]

    monkeypatch.setattr(token, "walk", changed)
    wrong = apart(results(walked, update, signal, state, pulls), want, BOUNDS[FULL], least=1e-9)
    assert not wrong, "\n".join(wrong)


def test_packed_sequences_from_states_of_their_own() -> None:
    torch.manual_seed(0)
    update = UPDATES["lattice-osr"]
    signal = draw(update, (1, 90, 2, 64, 64), FULL)
    bounds = torch.tensor([0, 30, 30, 31, 90], device="cuda")
    state = start(update, {n: x[:, :1].expand(4, *x.shape[1:]) for n, x in signal.items()})
    out, last = dispatch.run_packed(update, signal, state, bounds)
    assert last is not None
    wrong = []
    for n, (a, b) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        own = state._replace(theta=(state.theta[0][n : n + 1],))
        got, want = {"last": last.theta[0][n : n + 1]}, {}
        if b > a:
            alone = {m: x[:, a:b].double().cpu() for m, x in signal.items()}
            y, own = reference.run(update, alone, _wide(own), time=1)
            got["o"], want["o"] = out[:, a:b], y
        want["last"] = own.theta[0]
        wrong += apart(got, want, BOUNDS[FULL], f"sequence {n}", least=1e-9)
    assert not wrong, "\n".join(wrong)


def _wide(state: State) -> State:
    return pytree.tree_map(lambda x: x.double().cpu() if x.is_floating_point() else x, state)  # type: ignore[no-any-return]


def test_a_layer_is_one_graph() -> None:
    torch.manual_seed(0)
    layer = sequence.LatticeDec(128, heads=2).cuda()
    x = torch.randn(2, 50, 128, device="cuda", requires_grad=True)
    want, _ = layer(x)
    got, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    made = {n: (y, torch.autograd.grad(y.square().sum(), x)[0]) for n, y in (("got", got), ("want", want))}
    both = ({"y": y, "dx": dx} for y, dx in made.values())
    wrong = apart(*both, 1e-3)
    assert not wrong, "\n".join(wrong)


def test_a_million_tokens_are_finite() -> None:
    update = UPDATES["lattice-osr"]
    signal = draw(update, (1, 1 << 20, 1, 16, 16), HALF)
    with torch.no_grad():
        out, last = dispatch.run(update, signal)
    assert torch.isfinite(out).all() and torch.isfinite(last.theta[0]).all()
