"""Chains of entries under Triton's interpreter against a float64 token loop; and what is refused.

The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
"""

from __future__ import annotations

import sys

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from tests.interpreter import interpret

PROGRAM = r"""
import torch
from axes.kernels.entries import chain
from axes.kernels.entries.chain import entries_chain
from tests import chains

chain._CHUNK, chain._ROWS = 4, 8  # what is masked costs as much as what is there

torch.manual_seed(0)

def run(rule, inputs, do, dfinal, **more):
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    o, final = rule(**leaves, **more)
    grads = torch.autograd.grad((o, final), list(leaves.values()), (do.to(o.dtype), dfinal.to(final.dtype)))
    return dict(o=o, final=final) | {f"d{n}": x for n, x in zip(leaves, grads)}

def rule(start=None, **given):
    return entries_chain(**given, initial_state=start)

def token_loop(start=None, **given):
    return chains.entries_chain(**given, initial_state=start)

def check(length, d_k, d_v, dtype, bound, parts, units=None, b=2, h=1, hv=2, varies=False, **more):
    b = 1 if units else b
    inputs = dict(q=torch.randn(b, length, h, d_k), k=torch.randn(b, length, h, d_k) / d_k**0.5)
    inputs["v"] = torch.randn(b, length, hv, d_v)
    inputs = {n: x.to(dtype) for n, x in inputs.items()}
    rows = dict(gate=-torch.rand(b, length, hv, d_v), times=torch.rand(b, length, hv, d_v),
                beta=torch.rand(b, length, hv, d_v), start=torch.randn(units or b, hv, d_v, d_k),
                spectrum=-3 * torch.rand(*((b, length) if varies else ()), hv, d_v, d_k))
    inputs |= {n: rows[n] for n in parts}
    do, dfinal = torch.randn_like(inputs["v"]), torch.randn(units or b, hv, d_v, d_k)
    got = run(rule, inputs, do, dfinal, **more)
    want = run(token_loop, {n: x.double() for n, x in inputs.items()}, do.double(), dfinal.double(), **more)
    for name, w in want.items():
        error = ((got[name] - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)).item()
        print(length, d_k, d_v, dtype, parts, name, f"{error:.1e}")
        assert error < bound, (length, d_k, d_v, dtype, parts, name, error)
"""

FULL = "torch.float32, 3e-6"
CASES = {
    "rows": f"""
check(9, 1, 10, {FULL}, ("gate", "beta", "start"))
check(5, 1, 3, {FULL}, ("gate",), h=2)
check(5, 1, 9, torch.bfloat16, 8e-3, ("gate", "beta"))
""",
    "mamba": f"""
check(6, 4, 10, {FULL}, ("times", "spectrum", "start"), tied=True)
check(4, 3, 5, {FULL}, ("times", "spectrum", "gate", "beta"), b=1)
check(5, 5, 5, {FULL}, ("times", "spectrum", "start"), varies=True, b=1)
check(3, 2, 5, {FULL}, ("spectrum", "beta"), varies=True, b=1)
""",
    "spectra that no step multiplies": f"""
check(5, 3, 5, {FULL}, ("spectrum", "start"), b=1)
check(5, 1, 5, {FULL}, ("spectrum", "start"), b=1)
""",
    "all entries of a row": f"""
check(6, 16, 37, {FULL}, ("times", "spectrum", "start"), tied=True, b=1, hv=1)
check(5, 6, 5, torch.bfloat16, 8e-3, ("times", "spectrum"), tied=True, b=1)
check(5, 6, 5, torch.float16, 1e-3, ("times", "spectrum"), tied=True, b=1)
""",
    "one entry after another": f"""
check(6, 17, 10, {FULL}, ("times", "spectrum", "start"), tied=True, b=1, hv=1)
check(5, 17, 3, {FULL}, ("beta", "start", "gate"), erase="prev", b=1, hv=1)
check(5, 17, 3, {FULL}, ("beta", "start", "gate"), erase="gated", b=1, hv=1)
""",
    "erase": f"""
check(6, 3, 5, {FULL}, ("beta", "start", "gate"), erase="prev", b=1)
check(6, 2, 5, {FULL}, ("beta", "start", "gate"), erase="gated", b=1)
check(3, 2, 5, {FULL}, ("beta",), erase="gated", b=1, h=2)
""",
    "implicit": f"""
check(6, 3, 5, {FULL}, ("beta", "start", "gate"), erase="new", b=1)
check(5, 16, 19, {FULL}, ("beta", "start"), erase="new", b=1, hv=1)
check(3, 2, 5, {FULL}, ("gate",), erase="new", b=1)
check(4, 2, 5, {FULL}, ("times", "spectrum"), tied=True, erase="new", b=1)
check(3, 17, 3, {FULL}, ("beta", "start"), erase="new", b=1, hv=1)
check(3, 1, 9, {FULL}, ("beta", "start"), erase="new", b=1)
check(5, 6, 5, torch.bfloat16, 8e-3, ("beta",), erase="new", b=1)
""",
    "packed": f"""
cuts = torch.tensor([0, 0, 1, 10, 13])
check(13, 2, 5, {FULL}, ("times", "spectrum", "start"), units=4, tied=True, cu_seqlens=cuts)
check(13, 1, 5, {FULL}, ("gate", "beta", "start"), units=4, cu_seqlens=cuts)
""",
    "no keys": """
q = torch.ones(1, 5, 1, 1)
v, gate = torch.randn(1, 5, 1, 4), -torch.rand(1, 5, 1, 4)
gate.requires_grad_()
a, b = (r(q=q, k=q, v=v, gate=gate)[0] for r in (rule, token_loop))
assert torch.allclose(a, b, atol=1e-6)
assert torch.allclose(*(torch.autograd.grad(x.square().sum(), gate)[0] for x in (a, b)), atol=1e-5)
""",
}


LAYERS = """
import torch
from axes import catalogue
from axes.kernels.entries import chain
from tests.axes import test_what_runs

chain._CHUNK, chain._ROWS = 4, 8

test_what_runs.as_on_a_gpu()
for name in ("mamba", "hgrn", "rg-lru", "longhorn-diagonal"):
    cls = catalogue.get(name, axis="sequence").cls
    torch.manual_seed(0)
    plain, fast = cls(8, heads=2), cls(8, heads=2, implementation="triton")
    fast.load_state_dict(plain.state_dict())
    x, shown = torch.randn(2, 7, 8), []
    for layer in (plain, fast):
        z = x.clone().requires_grad_()
        y, state = layer(z[:, :4])
        more, state = layer(z[:, 4:], state)
        (y.square().sum() + more.square().sum() + state.memory.theta[0].square().sum()).backward()
        shown.append([y, more, state.memory.theta[0], z.grad, *[p.grad for p in layer.parameters()]])
        with torch.no_grad():
            one, held = layer.step(x[:, -1], state)
            shown[-1] += [one, held.memory.theta[0]]
    for a, b in zip(*shown, strict=True):
        assert (a - b).norm() <= 1e-5 * max(a.norm(), 1), (name, a, b)
"""


def test_layers_by_the_kernel_are_those_of_torch() -> None:
    """Shared keys, shared spectra, strengths of implicit steps; a sequence in parts, and one token."""
    interpret(LAYERS)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_token_loop(case: str) -> None:
    interpret(PROGRAM + CASES[case])


def arguments() -> dict[str, torch.Tensor | None]:
    row = torch.zeros(2, 3, 4, 5)
    return {
        "q": torch.zeros(2, 3, 2, 8), "k": torch.zeros(2, 3, 2, 8), "v": row, "gate": row, "times": row,
        "spectrum": torch.zeros(4, 5, 8), "beta": row, "initial_state": torch.zeros(2, 4, 5, 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    (
        ({"gate": torch.zeros(2, 3, 4)}, r"gate is floating point of shape \(2, 3, 4, 5\)"),
        ({"spectrum": torch.zeros(4, 8, 5)}, r"spectrum is floating point of shape \(4, 5, 8\)"),
        ({"spectrum": torch.zeros(2, 3, 4, 5, 7)}, r"\(2, 3, 4, 5, 8\)"),
        ({"spectrum": None}, "times multiply a spectrum"),
        ({"tied": True}, "give times and no beta"),
        ({"erase": "old"}, "none, prev, gated, new"),
        ({"q": torch.zeros(2, 3, 2, 300), "k": torch.zeros(2, 3, 2, 300)}, "K from 1 to 256"),
        ({"initial_state": torch.zeros(1, 4, 5, 8)}, "initial_state"),
    ),
)
def test_wrong_shapes_are_refused(change: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.common import layout
    from axes.kernels.entries.chain import entries_chain

    monkeypatch.setattr(layout, "interpreted", lambda: True)
    given = arguments() | change
    with pytest.raises(ShapeError, match=says):
        entries_chain(given.pop("q"), given.pop("k"), given.pop("v"), **given)  # type: ignore[arg-type]
