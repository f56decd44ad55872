"""Chains of entries by their kernel on a GPU against a float64 token loop: values, every gradient, hard inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import catalogue  # noqa: E402
from axes.kernels.diagonal.rows import rows_chain  # noqa: E402
from axes.kernels.entries.chain import entries_chain  # noqa: E402
from tests import chains  # noqa: E402

BOUNDS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
PARTS = {
    "rows": (1, ("gate", "beta"), {}),
    "a gate": (1, ("gate",), {}),
    "mamba": (16, ("times", "spectrum"), {"tied": True}),
    "every part": (5, ("times", "spectrum", "gate", "beta"), {}),
    "varies": (4, ("times", "spectrum"), {"varies": True}),
    "before the gate": (16, ("gate", "beta"), {"erase": "prev"}),
    "behind the gate": (16, ("gate", "beta"), {"erase": "gated"}),
}


def draw(
    length: int, d_k: int, d_v: int, dtype: torch.dtype, parts: tuple[str, ...], b: int = 2, h: int = 1, hv: int = 2,
    units: int | None = None, varies: bool = False, closed: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    torch.manual_seed(0)
    cuda: dict[str, Any] = {"device": "cuda"}
    q = torch.randn(b, length, h, d_k, **cuda)
    given = {"q": q, "k": torch.randn(q.shape, **cuda) / d_k**0.5, "v": torch.randn(b, length, hv, d_v, **cuda)}
    given = {n: x.to(dtype) for n, x in given.items()}
    row = (b, length, hv, d_v)
    rows = {
        "gate": -torch.rand(row, **cuda) * (1e3 if closed else 1.0),
        "times": torch.rand(row, **cuda),
        "beta": torch.rand(row, **cuda),
        "spectrum": -3 * torch.rand(*((b, length) if varies else ()), hv, d_v, d_k, **cuda),
        "start": torch.randn(units or b, hv, d_v, d_k, **cuda),
    }
    return given | {n: rows[n] for n in (*parts, "start")}


def results(rule: Any, given: dict[str, Tensor], wide: bool, **more: Any) -> dict[str, Tensor]:
    leaves = {n: (x.double() if wide else x).detach().requires_grad_() for n, x in given.items()}
    rest = {n: x for n, x in leaves.items() if n != "start"}
    o, final = rule(**rest, initial_state=leaves["start"], **more)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, device="cuda", dtype=torch.float64).to(x.dtype) for x in (o, final)]
    grads = torch.autograd.grad((o, final), list(leaves.values()), weights)
    return {"o": o, "final": final, **{f"d{n}": x for n, x in zip(leaves, grads, strict=True)}}


def check(length: int, d_k: int, d_v: int, dtype: torch.dtype, parts: tuple[str, ...], **options: Any) -> None:
    more = {n: options.pop(n) for n in ("tied", "erase", "cu_seqlens") if n in options}
    given = draw(length, d_k, d_v, dtype, parts, **options)
    got = results(entries_chain, given, False, **more)
    want = results(chains.entries_chain, given, True, **more)
    for name, w in want.items():
        assert torch.isfinite(got[name]).all(), name
        error = ((got[name].double() - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        print(f"{name} {error:.1e}", end="  ")
        assert error < BOUNDS[dtype], (name, error)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_equals_the_token_loop(name: str, dtype: torch.dtype) -> None:
    d_k, parts, options = PARTS[name]
    check(150, d_k, 100, dtype, parts, **options)


@pytest.mark.parametrize("length", (1, 15, 16, 17, 33))
@pytest.mark.parametrize("name", ("rows", "mamba"))
def test_lengths(name: str, length: int) -> None:
    d_k, parts, options = PARTS[name]
    check(length, d_k, 64, torch.bfloat16, parts, **options)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("d_k", "d_v", "closed", "cuts"),
    ((128, 64, False, None), (64, 64, True, None), (20, 33, False, None), (128, 64, False, [0, 70, 70, 71, 150])),
)
def test_rows_by_products(dtype: torch.dtype, d_k: int, d_v: int, closed: bool, cuts: list[int] | None) -> None:
    """The chain of a gated slot's scores: rows with gates, by tensor cores; the bits of two runs are the same."""
    packed = {} if cuts is None else {"cu_seqlens": torch.tensor(cuts, device="cuda")}
    batch = {"b": 1, "units": 4} if cuts else {}
    given = draw(150, d_k, d_v, dtype, ("gate",), h=2, hv=2, closed=closed, **batch)

    def rows(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return rows_chain(q, k, v, gate, **more)

    got, again = (results(rows, given, False, **packed) for _ in range(2))
    want = results(chains.entries_chain, given, True, **packed)
    for name, w in want.items():
        assert torch.isfinite(got[name]).all() and torch.equal(got[name], again[name]), name
        error = ((got[name].double() - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        print(f"{name} {error:.1e}", end="  ")
        assert error < 2 * BOUNDS[dtype], (name, error)


@pytest.mark.parametrize(("d_v", "h", "hv"), ((1, 1, 1), (33, 2, 4), (257, 1, 1)))
def test_sides(d_v: int, h: int, hv: int) -> None:
    check(40, 3, d_v, torch.float16, ("times", "spectrum"), tied=True, h=h, hv=hv)


def test_gates_that_close() -> None:
    check(50, 1, 64, torch.float32, ("gate", "beta"), closed=True)


@pytest.mark.parametrize("name", ("rows", "mamba"))
def test_packed(name: str) -> None:
    d_k, parts, options = PARTS[name]
    cuts = torch.tensor([0, 70, 70, 71, 150], device="cuda")
    check(150, d_k, 64, torch.bfloat16, parts, b=1, units=4, cu_seqlens=cuts, **options)


@pytest.mark.parametrize("name", ("rows", "mamba", "behind the gate"))
def test_a_full_chip_repeats_and_writes_every_element(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    d_k, parts, options = PARTS[name]
    given = draw(777, d_k, 500, torch.bfloat16, parts, b=8, hv=4)
    first = results(entries_chain, given, False, **options)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `empty` returns with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        second = results(entries_chain, given, False, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    for n, x in first.items():
        assert torch.equal(x, second[n]), n


@pytest.mark.parametrize("name", ("mamba", "hgrn", "rg-lru", "longhorn-diagonal"))
def test_layers(name: str) -> None:
    """By the kernel and by torch, with gradients; the memory that a step of training takes is no state a token."""
    cls: Any = catalogue.get(name, axis="sequence").cls
    torch.manual_seed(0)
    plain = cls(256, heads=4, implementation="torch", device="cuda")
    fast = cls(256, heads=4, implementation="triton", device="cuda")
    fast.load_state_dict(plain.state_dict())
    x, shown = torch.randn(2, 600, 256, device="cuda"), []
    for layer in (plain, fast):
        z = x.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, state = layer(z)
        (y.square().sum() + state.memory.theta[0].square().sum()).backward()
        print(name, f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.0f} MB")
        shown.append([y, state.memory.theta[0], z.grad, *[p.grad for p in layer.parameters()]])
        with torch.no_grad():
            one, held = layer.step(x[:, 0], state)
        shown[-1] += [one, held.memory.theta[0]]
    for a, b in zip(*shown, strict=True):
        assert (a - b).norm() <= 1e-4 * max(a.norm().item(), 1.0)
