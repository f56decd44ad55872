"""The block chain in Triton on a GPU against a float64 token loop: values, every gradient, hard inputs.

The bar is the same chunk form in eager torch whose matrix products round their operands as the kernels do: no tensor
may be further from float64 than one and a half times that.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.block import chain  # noqa: E402
from axes.kernels.block.chain import block_chain  # noqa: E402
from tests.block_form import KINDS, Rounded, by_sequence, chunk_form, draw, run  # noqa: E402
from tests.chains import block_chain as token_loop  # noqa: E402

NAMES = ("o", "final", "dq", "dk", "dv", "dblock", "dwrite", "derase", "dstate")
HALF, FULL = (torch.bfloat16, torch.float16), torch.float32
DTYPES = (*HALF, FULL)
# relative errors of a whole tensor that are never too large
FREE = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def distance(a: Tensor, want: Tensor) -> float:
    return (a.double().cpu() - want).norm().item() / max(want.norm().item(), 1e-3 * want.numel() ** 0.5)


def check(length: int, d_k: int, d_v: int, dtype: torch.dtype, kind: str = "titans", offsets=None, **options) -> None:
    torch.manual_seed(0)
    units = None if offsets is None else len(offsets) - 1
    inputs = draw(length, d_k, d_v, dtype, kind, device="cuda", units=units, **options)
    v = inputs[2]
    do = torch.randn_like(v)
    dfinal = torch.randn(units or v.shape[0], v.shape[2], d_v, 2, d_k, device="cuda")
    packing = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, device="cuda")}
    got = run(block_chain, inputs, do, dfinal, **packing)

    def chunked(*x):
        return chunk_form(*x, size=32 if dtype == FULL else 64, products=Rounded(dtype))

    def spread(rule):
        return rule if offsets is None else by_sequence(rule, offsets)

    # on the CPU the loop of small products is as fast and takes no device time
    exact = [None if x is None else x.double().cpu() for x in inputs]
    want = run(spread(token_loop), exact, do.double().cpu(), dfinal.double().cpu())
    near = run(spread(chunked), [None if x is None else x.float() for x in inputs], do.float(), dfinal)
    wrong = {}
    for name, a, w, n in zip(NAMES, got, want, near, strict=True):
        if w is None:
            continue
        assert torch.isfinite(a).all(), name
        error, bar = distance(a, w), distance(n.to(a.dtype), w)
        print(f"{name} {error:.1e} of {bar:.1e}", end="  ")
        if error > max(1.5 * bar, FREE[dtype]):
            wrong[name] = f"{error:.1e} > 1.5 * {bar:.1e}"
    assert not wrong, wrong


@pytest.mark.parametrize("length", (1, 2, 63, 64, 65, 1000))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    check(length, 64, 64, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds(kind: str, dtype: torch.dtype) -> None:
    check(200, 64, 64, dtype, kind)


@pytest.mark.parametrize(("d_k", "d_v"), ((16, 16), (128, 20), (100, 100), (128, 128), (256, 160)))
def test_sides(d_k: int, d_v: int) -> None:
    check(130, d_k, d_v, torch.bfloat16, "general")


def test_sides_in_full_precision() -> None:
    check(70, 100, 16, FULL, "general")


@pytest.mark.parametrize("kind", ("titans", "singular", "ones"))
def test_nothing_is_erased(kind: str) -> None:
    check(150, 64, 64, torch.bfloat16, kind, erased=False)


def test_starts_from_zero() -> None:
    check(150, 64, 64, torch.bfloat16, started=False)


def test_value_heads_share_keys() -> None:
    check(150, 64, 64, torch.bfloat16, "general", h=2, hv=6)


@pytest.mark.parametrize("erased", (True, False))
def test_packed_sequences(erased: bool) -> None:
    check(300, 64, 64, torch.bfloat16, b=1, offsets=[0, 1, 1, 65, 193, 300, 300], erased=erased)


def test_packed_equals_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_GLUON", False)  # sequences alone have kernels of their own, packed ones have not
    q, k, v, block, write, erase, start = draw(300, 64, 64, torch.bfloat16, b=1, units=3, device="cuda")
    cuts = (0, 70, 70, 300)
    o, final = block_chain(
        q, k, v, block, write, erase, start, cu_seqlens=torch.tensor(cuts, dtype=torch.int32, device="cuda")
    )
    for u, (left, right) in enumerate(zip(cuts, cuts[1:], strict=False)):
        part = [x[:, left:right] for x in (q, k, v, block, write, erase)]
        alone, last = block_chain(*part, start[u : u + 1])
        assert torch.equal(alone, o[:, left:right])
        assert torch.equal(last, final[u : u + 1])


def test_repeats_bit_for_bit_and_writes_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(777, 100, 100, torch.bfloat16, device="cuda")
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(2, 2, 100, 2, 100, device="cuda")
    first = run(block_chain, inputs, do, dfinal)
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert torch.empty(4, device="cuda").isnan().all()
        second = run(block_chain, inputs, do, dfinal)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("d", "dtype"), ((64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)), ids=str)
def test_a_full_chip_repeats_and_equals_its_parts(d: int, dtype: torch.dtype) -> None:
    """Faults of a compiler show under load: the same bits five times over, and alone."""
    inputs = draw(1500, d, d, dtype, b=64, device="cuda")
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(64, 2, d, 2, d, device="cuda")
    first = run(block_chain, inputs, do, dfinal)
    for _ in range(4):
        for a, b in zip(first, run(block_chain, inputs, do, dfinal), strict=True):
            assert torch.equal(a, b)
    alone = run(block_chain, [x[3:4] for x in inputs], do[3:4], dfinal[3:4])
    for a, b in zip(first, alone, strict=True):
        assert torch.equal(a[3:4], b)


def test_compiles_as_one_graph() -> None:
    inputs = draw(100, 64, 64, torch.bfloat16, device="cuda")
    do, dfinal = torch.randn_like(inputs[2]), torch.randn(2, 2, 64, 2, 64, device="cuda")
    eager = run(block_chain, inputs, do, dfinal)
    compiled = run(torch.compile(block_chain, fullgraph=True), inputs, do, dfinal)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)


def time_it() -> None:
    """`python -m tests.gpu.test_block`: milliseconds at B 8, T 4096, H 16, D 128."""
    from triton.testing import do_bench

    inputs = draw(4096, 128, 128, torch.bfloat16, b=8, h=16, hv=16, started=False, device="cuda")
    inputs = [None if x is None else x.requires_grad_() for x in inputs]
    used, do = [x for x in inputs if x is not None], torch.randn_like(inputs[2])
    with torch.no_grad():
        forward = do_bench(lambda: block_chain(*inputs), return_mode="median")

    def both():
        torch.autograd.grad(block_chain(*inputs)[0], used, do)

    print(f"forward {forward:.3f} ms, forward and backward {do_bench(both, return_mode='median'):.3f} ms")


if __name__ == "__main__":
    time_it()
