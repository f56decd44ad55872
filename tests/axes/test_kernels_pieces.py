"""Products of float32 in three pieces of bfloat16: their error beside IEEE's, and which chains are given them.

Triton's interpreter knows no pieces, so that here they are made in torch: products of two pieces are exact in float32.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.kernels.common import layout
from axes.kernels.common.launch import Kernel
from axes.kernels.diagonal.chain import diagonal_chain
from axes.kernels.diagonal.channels import exponents
from axes.kernels.diagonal.rows import rows_chain
from axes.kernels.scalar import sizes
from axes.kernels.scalar.chain import scalar_chain
from tests.interpreter import interpret

# ---- the error -------------------------------------------------------------------------------------------------------


def pieces(x: Tensor) -> list[Tensor]:
    made: list[Tensor] = []
    for _ in range(3):
        made.append(x.bfloat16().float())
        x = x - made[-1]
    return made


def in_pieces(a: Tensor, b: Tensor, kept: int = 2) -> Tensor:
    """a b of the products whose pieces' numbers add up to at most `kept`, six of nine, the least first."""
    out = torch.zeros(a.shape[0], b.shape[1])
    pairs = sorted(product(enumerate(pieces(a)), enumerate(pieces(b))), key=lambda x: -x[0][0] - x[1][0])
    for (i, x), (j, y) in pairs:
        if i + j <= kept:
            out = out + x @ y
    return out


def error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest, relative to the sum of the terms' sizes."""
    most = a.double().abs() @ b.double().abs()
    return ((found - a.double() @ b.double()).abs() / most).nan_to_num().max().item()


def draw(kind: str) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(16, 128), torch.randn(128, 32)
    if kind == "rows of every size":
        a, b = a * 10.0 ** torch.linspace(-12, 12, 16)[:, None], b * 10.0 ** torch.linspace(12, -12, 32)
    if kind == "entries of every size":
        a, b = (x * torch.exp(20 * torch.randn_like(x).clamp(-2, 2) / 2) for x in (a, b))
    if kind == "terms that cancel":
        a[:, 64:], b[64:] = a[:, :64], -b[:64]
        b = b * (1 + 1e-3 * torch.randn_like(b))
    if kind == "gates between a block's ends":  # e^X and e^-X of both sides
        x = torch.linspace(-20, 20, 128)
        a, b = a * x.exp(), b * (-x).exp()[:, None]
    return a, b


KINDS = ("random", "rows of every size", "entries of every size", "terms that cancel", "gates between a block's ends")


@pytest.mark.parametrize("kind", KINDS)
def test_six_products_of_pieces_have_the_error_of_ieee(kind: str) -> None:
    a, b = draw(kind)
    exact = error(a @ b, a, b)
    assert error(in_pieces(a, b), a, b) < 2 * exact < 1e-6
    assert error(in_pieces(a, b, kept=1), a, b) > 4 * exact  # three products: this test could fail


def test_pieces_are_every_bit_down_to_where_bfloat16_ends() -> None:
    bits = torch.randint(2**23, (4096,), dtype=torch.int32)
    for exponent in (-109, -60, 0, 60, 126):
        x = torch.ldexp(1 + bits.double() / 2**23, torch.tensor(exponent)).float()
        assert torch.equal(sum(y.double() for y in pieces(x)), x.double()), exponent
    assert not torch.equal(sum(y.double() for y in pieces(x * 2.0**-244)), x.double() * 2.0**-244)


def test_exponents_leave_the_pieces_their_digits() -> None:
    """What meets its inverse is at least e^-BOUND of a number: there are no fewer digits of numbers of 1e-15."""
    q = torch.empty(1, 1, 1, 128, device="meta")
    bound = exponents(q, q)["BOUND"]
    x = 1e-15 * math.exp(-2 * bound) * (1 + torch.rand(4096))  # from one side of a block, as the delta rule takes them
    assert torch.equal(sum(y.double() for y in pieces(x)), x.double())
    wide = exponents(torch.empty(1, 1, 1, 129, device="meta"), q)["BOUND"]
    x = math.exp(-2 * wide) * (1 + torch.rand(4096))  # numbers of 1 as they are taken with more keys, by IEEE
    assert not torch.equal(sum(y.double() for y in pieces(x)), x.double())


def test_logs_in_three_summands_are_whole() -> None:
    interpret(r"""
import torch, triton
import triton.language as tl
from axes.kernels.diagonal.channels import split

@triton.jit
def back(x):
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)

@triton.jit
def through(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    high, middle, low = split(tl.load(x + i), 3)
    tl.store(out + i, back(high))
    tl.store(out + N + i, back(middle))
    tl.store(out + 2 * N + i, back(low))

torch.manual_seed(0)
x = torch.cat((-100 * torch.rand(500), torch.randn(500) * torch.logspace(-12, 12, 500), -torch.rand(24).exp()))
out = torch.empty(3, 1024)
through[(1,)](x, out, 1024)
assert torch.equal(out.double().sum(0), x.double())
assert not torch.equal(out[:2].double().sum(0), x.double())  # two are not
""")


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_pieces_are_what_float32_of_few_keys_is_multiplied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    half, full = torch.bfloat16, torch.float32
    assert [sizes.form(full, d) for d in (1, 128, 129, 256)] == ["pieces", "pieces", "ieee", "ieee"]
    assert [sizes.form(half, d) for d in (1, 256)] == ["halves", "halves"]
    assert [sizes.products(full, d) for d in (128, 129)] == ["bf16x6", "ieee"] and sizes.products(half, 64) == "tf32"
    assert [sizes.chunk_length(full, d) for d in (128, 129)] == [16, 32] and sizes.chunk_length(half, 64) == 64
    monkeypatch.setattr(layout, "interpreted", lambda: True)
    assert sizes.products(full, 128) == "ieee"


def launched(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The constants of every launch; nothing is computed."""
    found: list[dict[str, Any]] = []
    note = patch.object(Kernel, "__getitem__", lambda self, grid: lambda *given, **named: found.append(named))
    shown = patch.object(layout, "interpreted", lambda: True), patch.object(layout, "pieces", lambda: "bf16x6")
    with note, shown[0], shown[1]:
        run()
    return found


def chains(d_k: int) -> dict[str, Callable[[], Any]]:
    q = torch.randn(2, 300, 2, d_k, requires_grad=True)
    v, beta = torch.randn(2, 300, 2, 16, requires_grad=True), torch.rand(2, 300, 2, requires_grad=True)
    log = (-torch.rand(2, 300, 2)).requires_grad_()
    channels = (-torch.rand(2, 300, 2, d_k)).requires_grad_()
    return {
        "write": lambda: scalar_chain(q, q, v, beta, log, rule="write"),
        "delta": lambda: scalar_chain(q, q, v, beta, log, q, segments=2),
        "diagonal": lambda: diagonal_chain(q, q, v, channels, beta),
        "diagonal + delta": lambda: diagonal_chain(q, q, v, channels, beta, rule="delta"),
        "dplr": lambda: diagonal_chain(q, q, v, channels, a=q, b=q, rule="dplr"),
        "rows": lambda: rows_chain(v, v, q, channels),
    }


@pytest.mark.parametrize("name", chains(1))
def test_every_product_of_a_chain_is_of_one_form(name: str) -> None:
    """Forward and backward, logs too; with more than 128 keys as they were before there were pieces."""
    many = 16 if " delta" in name or name == "dplr" else 32
    for d_k, dot, parts, chunk in ((128, "bf16x6", 3, 16), (130, "ieee", 0, many)):

        def run(d_k: int = d_k) -> None:
            o, final = chains(d_k)[name]()
            (o.sum() + final.sum()).backward()

        found = launched(run)
        assert len(found) > 2
        assert {x["PRECISION"] for x in found if "PRECISION" in x} == {dot}
        assert {x["C"] for x in found if "PRECISION" in x and "C" in x} <= {chunk}
        if name not in ("write", "delta"):
            assert {x["PARTS"] for x in found if "PARTS" in x} == {parts}
