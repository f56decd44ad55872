"""Long inputs: a million tokens in one sequence, and tensors of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.block.chain import block_chain  # noqa: E402
from axes.kernels.diagonal.chain import diagonal_chain  # noqa: E402
from axes.kernels.scalar.chain import scalar_chain  # noqa: E402

MILLION = 1 << 20


def draw(length: int, heads: int, width: int) -> dict[str, Tensor]:
    def token(*size: int) -> Tensor:
        return torch.randn(1, length, heads, *size, device="cuda", dtype=torch.bfloat16)

    return {
        "q": normalize(token(width), dim=-1), "k": normalize(token(width), dim=-1), "v": token(width),
        "beta": torch.rand(1, length, heads, device="cuda"),
        "g": logsigmoid(4 + torch.randn(1, length, heads, device="cuda")),
    }  # fmt: skip


def scalar(rule: str):
    def run(x: dict[str, Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        return scalar_chain(x["q"], x["k"], x["v"], x["beta"], x["g"], initial_state=start, rule=rule)

    return run


def diagonal(rule: str):
    def run(x: dict[str, Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        g = x["g"][..., None].expand(*x["g"].shape, x["q"].shape[-1])
        if rule == "dplr":
            vectors = {"a": x["k"], "b": -0.5 * x["k"]}
            return diagonal_chain(x["q"], x["k"], x["v"], g, initial_state=start, rule=rule, **vectors)
        return diagonal_chain(x["q"], x["k"], x["v"], g, x["beta"], initial_state=start, rule=rule)

    return run


def block(x: dict[str, Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
    gate, momentum = torch.exp(x["g"]), 0.9 * torch.ones_like(x["g"])
    rows = torch.stack((torch.stack((gate, torch.zeros_like(gate)), -1), torch.stack((momentum, momentum), -1)), -2)
    write = torch.stack((x["beta"], x["beta"]), -1) * 0.1
    erase = torch.tensor([1.0, 0.0], device="cuda").expand_as(write)
    return block_chain(x["q"], x["k"], x["v"], rows, write, erase, start)


FAMILIES = {
    "linear": scalar("write"), "gated delta": scalar("delta"), "diagonal": diagonal("write"),
    "diagonal delta": diagonal("delta"), "dplr": diagonal("dplr"), "block": block,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_million_tokens_equal_the_run_split_in_two(name: str) -> None:
    run, x = FAMILIES[name], draw(MILLION, 1, 64)
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    out, final = run(leaves, None)
    grads = torch.autograd.grad(out.float().square().mean() + final.square().mean(), leaves.values(), allow_unused=True)
    assert all(torch.isfinite(t).all() for t in (out, final, *grads) if t is not None)
    with torch.no_grad():
        half = MILLION // 2 + 64 * 3
        first, state = run({n: t[:, :half] for n, t in x.items()}, None)
        second, state = run({n: t[:, half:] for n, t in x.items()}, state)
    split = torch.cat((first, second), 1)
    assert (split - out).float().norm() < 1e-2 * out.float().norm()
    assert (state - final).norm() < 1e-2 * final.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_more_elements_than_a_32_bit_number_counts(name: str) -> None:
    """The last head's last tokens, where offsets pass 2^31, equal the same head alone."""
    run, (length, heads, width) = FAMILIES[name], (MILLION + 100, 32, 64)
    assert length * heads * width > 2**31
    x = draw(length, heads, width)
    with torch.no_grad():
        out, final = run(x, None)
        alone, last = run({n: t[:, :, -1:].contiguous() for n, t in x.items()}, None)
    assert (out[:, :, -1:] - alone).float().norm() < 1e-2 * alone.float().norm()
    assert (final[:, -1:] - last).norm() < 1e-2 * last.norm()
    del out, final, alone, last
    leaves = {n: t[:, -(length // 2) :].requires_grad_() for n, t in x.items()}
    grads = torch.autograd.grad(run(leaves, None)[0].float().square().mean(), leaves.values(), allow_unused=True)
    assert all(torch.isfinite(g).all() for g in grads if g is not None)
