"""One token in one launch, on a GPU, against float64: every structure, every width, in place, in a CUDA graph."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.step import block_step, chain_step  # noqa: E402

# one rounding of o; the state is float32 whatever the tokens are
BOUNDS = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
STATE = 2e-6
CHAINS = ("write", "delta", "early", "erase", "early erase", "dplr")
GATES = (None, "head", "channel")
WIDTHS = (1, 2, 3, 16, 33, 64, 100, 128, 200, 256)


def exact(state, q, k, v, *, beta=None, g=None, erase=None, a=None, b=None, turn=None, rule="write", early=False):
    """The step in float64: o and the new state."""
    state, q, k, v, beta, g, erase, a, b = (
        None if x is None else x.double() for x in (state, q, k, v, beta, g, erase, a, b)
    )
    group = v.shape[1] // k.shape[1]
    q, k, erase, a, b = (None if x is None else x.repeat_interleave(group, 1) for x in (q, k, erase, a, b))
    if turn is not None:
        one, two = state.chunk(2, -1)
        turn = turn.double() if turn.ndim == 1 else turn.double()[..., None, :]
        cos, sin = turn.cos(), turn.sin()
        state = torch.cat((one * cos - two * sin, one * sin + two * cos), -1)
    kept = state
    if g is not None:
        gate = g.clamp_min(-100).exp()
        kept = state * (gate[..., None, None] if g.ndim == 2 else gate[..., None, :])
    if rule == "average":
        k = -torch.expm1(g) * k
    if rule == "dplr":
        kept = kept + (state @ a[..., None]) * b[..., None, :]
    if rule == "delta":
        v = v - ((state if early else kept) @ (k if erase is None else erase)[..., None])[..., 0]
    if beta is not None:
        v = beta[..., None] * v
    state = kept + v[..., :, None] * k[..., None, :]
    return (state @ q[..., None])[..., 0], state


def exact_block(state, q, k, v, block, write, erase=None):
    state, q, k, v, block, write = (x.double() for x in (state, q, k, v, block, write))
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    if erase is not None:
        v = v - torch.einsum("bhvik,bhi,bhk->bhv", state, erase.double(), k)
    state = torch.einsum("bhvik,bhij->bhvjk", state, block) + torch.einsum("bhv,bhj,bhk->bhvjk", v, write, k)
    return torch.einsum("bhvk,bhk->bhv", state[..., 0, :], q), state


def draw(chain, gate, d_k, d_v, dtype, *, batch=3, heads=2, group=2, beta=True) -> tuple[Tensor, dict[str, Any]]:
    """A state and the arguments of one token."""

    def randn(*shape):
        return torch.randn(*shape, device="cuda")

    keys, values = (batch, heads), (batch, heads * group)
    token: dict[str, Any] = {"rule": chain if chain in ("write", "dplr") else "delta"}
    token |= {n: (randn(*keys, d_k) / d_k**0.5).to(dtype) for n in "qk"} | {"v": randn(*values, d_v).to(dtype)}
    if beta:
        token["beta"] = 2 * torch.rand(values, device="cuda")
    if gate is not None:
        token["g"] = -(torch.rand(*values, *((d_k,) if gate == "channel" else ()), device="cuda") ** 4)
    if "erase" in chain:
        token["erase"] = (randn(*keys, d_k) / d_k**0.5).to(dtype)
    if "early" in chain:
        token["early"] = True
    if chain == "dplr":
        token |= {"a": (-randn(*keys, d_k) / d_k**0.5).to(dtype), "b": (randn(*keys, d_k) / d_k**0.5).to(dtype)}
    return randn(*values, d_v, d_k), token


def draw_block(d_k, d_v, dtype, *, batch=3, heads=2, group=2, erase=True) -> tuple[Tensor, dict[str, Any]]:
    state, token = draw("write", None, d_k, d_v, dtype, batch=batch, heads=heads, group=group, beta=False)
    del token["rule"]
    shape = (batch, heads * group)
    token |= {"block": torch.randn(*shape, 2, 2, device="cuda"), "write": torch.rand(*shape, 2, device="cuda")}
    if erase:
        token["erase"] = torch.randn(*shape, 2, device="cuda")
    return torch.randn(*state.shape[:3], 2, d_k, device="cuda"), token


def error(got: Tensor, want: Tensor) -> float:
    assert torch.isfinite(got).all()
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-3 * want.numel() ** 0.5)).item()


def check(step, meaning, state, token) -> None:
    want, after = meaning(state, **token)
    o = step(state, **token)
    assert o.dtype == token["v"].dtype
    assert error(o, want) < BOUNDS[o.dtype], ("o", error(o, want))
    assert error(state, after) < STATE, ("state", error(state, after))


@pytest.mark.parametrize(("chain", "gate"), tuple(product(CHAINS, GATES)))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_chain(chain: str, gate: str | None, dtype: torch.dtype) -> None:
    for beta, group in product((True, False), (1, 3)):
        check(chain_step, exact, *draw(chain, gate, 64, 40, dtype, group=group, beta=beta))


@pytest.mark.parametrize("d_k", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_widths(d_k: int, dtype: torch.dtype) -> None:
    for d_v in {d_k, WIDTHS[-1 - WIDTHS.index(d_k)], 40, 128}:
        check(chain_step, exact, *draw("delta", "channel", d_k, d_v, dtype))
        check(chain_step, exact, *draw("dplr", "head", d_k, d_v, dtype))
        state, token = draw("write", "channel", d_k, d_v, dtype)
        check(chain_step, exact, state, token | {"rule": "average"})
        check(block_step, exact_block, *draw_block(d_k, d_v, dtype))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_states_that_turn(gate: str | None, dtype: torch.dtype) -> None:
    for d_k, d_v, group in ((64, 40, 3), (128, 256, 1), (2, 16, 1), (34, 128, 2), (256, 64, 1)):
        state, token = draw("write", gate, d_k, d_v, dtype, group=group, beta=group > 1)
        for shape in ((d_k // 2,), (*token["v"].shape[:2], d_k // 2)):
            check(chain_step, exact, state.clone(), token | {"turn": 4 * torch.randn(shape, device="cuda")})


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_blocks(dtype: torch.dtype) -> None:
    for erase, group in product((True, False), (1, 3)):
        check(block_step, exact_block, *draw_block(64, 40, dtype, group=group, erase=erase))


def test_hard_numbers() -> None:
    """Integers and ones are exact; closed gates keep nothing; zero keys write nothing."""
    state, token = draw("delta", "head", 128, 128, torch.bfloat16)
    ones = {n: torch.ones_like(x) if isinstance(x, Tensor) else x for n, x in token.items()}
    state = torch.randint(-3, 4, state.shape, device="cuda").float()
    ones["g"] = torch.zeros_like(ones["g"])
    want, after = exact(state, **ones)
    o = chain_step(state, **ones)
    assert torch.equal(state.double(), after) and torch.equal(o.double(), want.to(o.dtype).double())
    closed = token | {"g": torch.full_like(token["g"], -torch.inf), "rule": "write"}
    state, fresh = torch.randn_like(state), torch.zeros_like(state)
    chain_step(state, **closed)
    chain_step(fresh, **closed)
    assert torch.equal(state, fresh)
    check(chain_step, exact, torch.randn_like(state), token | {"k": torch.zeros_like(token["k"])})


@pytest.mark.parametrize("held", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_state_held_in_16_bits(held: torch.dtype, dtype: torch.dtype) -> None:
    """The numbers of the wide state's step, whose sums have another order, rounded as they are written; in place and
    elsewhere the same bits."""
    for step, (state, token) in (
        (chain_step, draw("delta", "channel", 128, 100, dtype)),
        (chain_step, draw("dplr", "head", 33, 64, dtype)),
        (block_step, draw_block(64, 40, dtype)),
    ):
        short, into = state.to(held), torch.empty_like(state, dtype=held)
        wide = short.float()
        want = step(wide, **token)
        got = step(short, **token, into=into)
        for x, w in ((got, want), (into, wide.to(held))):
            torch.testing.assert_close(x, w, rtol=2 * max(torch.finfo(x.dtype).eps, 1e-6), atol=1e-5)
        assert torch.equal(step(short, **token), got) and torch.equal(short, into)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_graph_decodes_like_the_loop(chain: str, dtype: torch.dtype) -> None:
    """20 tokens by replay of one captured step: the bits of eager calls, and float64 from first token to last."""
    sequence = [draw(chain, "channel", 128, 128, dtype, batch=2, heads=4, group=2) for _ in range(20)]
    start = sequence[0][0] / 8
    static = {n: x.clone() if isinstance(x, Tensor) else x for n, x in sequence[0][1].items()}
    graphed, out = start.clone(), torch.empty_like(static["v"])
    chain_step(graphed, **static, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain_step(graphed, **static, out=out)
    graphed.copy_(start)
    eager, truth = start.clone(), start.double()
    for t, (_, token) in enumerate(sequence):
        for n, x in token.items():
            if isinstance(x, Tensor):
                static[n].copy_(x)
        graph.replay()
        o = chain_step(eager, **token)
        want, truth = exact(truth, **token)
        assert torch.equal(o, out) and torch.equal(eager, graphed), t
        assert error(o, want) < 2 * BOUNDS[dtype], (t, error(o, want))
        assert error(eager, truth) < 2e-5, (t, error(eager, truth))


def test_views_and_out() -> None:
    """Slices of one fused projection, a layer's slice of a pool of states, a given output: the same bits, in place."""
    state, token = draw("delta", "head", 64, 64, torch.bfloat16, heads=4, group=1)
    q, k, v = (token[n] for n in "qkv")
    fused = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    split = [x.unflatten(1, (4, 64)) for x in fused.split(256, 1)]
    assert not split[0].is_contiguous()
    pool = torch.randn(3, 5, *state.shape[1:], device="cuda")
    pool[:, 2] = state
    before, out = pool.clone(), torch.empty_like(v)
    want = chain_step(state, **token)
    got = chain_step(pool[:, 2], **token | dict(zip("qkv", split, strict=True)), out=out)
    assert got is out and torch.equal(got, want) and torch.equal(pool[:, 2], state)
    pool[:, 2] = before[:, 2]
    assert torch.equal(pool, before)
    moved = {n: x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim == 3 else x for n, x in token.items()}
    again = before[:, 2].contiguous()
    assert torch.equal(chain_step(again, **moved), want) and torch.equal(again, state)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_pool(dtype: torch.dtype) -> None:
    """index addresses rows of a pool; a negative one is padding; every other row stays as it was."""
    index = torch.tensor([7, -1, 0, 3], device="cuda", dtype=dtype)
    live = index >= 0
    for step, (state, token) in (
        (chain_step, draw("delta", "channel", 48, 80, torch.bfloat16, batch=4)),
        (block_step, draw_block(48, 80, torch.bfloat16, batch=4)),
    ):
        pool = torch.randn(9, *state.shape[1:], device="cuda")
        before = pool.clone()
        pool[index[live]] = state[live]
        o = step(pool, **token, index=index)
        want = step(state, **token)
        assert torch.equal(o[live], want[live]) and not o[~live].any()
        assert torch.equal(pool[index[live]], state[live])
        pool[index[live]] = before[index[live]]
        assert torch.equal(pool, before)


def test_into() -> None:
    """The new state elsewhere: the same bits, and the old one stays."""
    for step, (state, token) in (
        (chain_step, draw("dplr", "channel", 48, 80, torch.bfloat16)),
        (block_step, draw_block(48, 80, torch.bfloat16)),
    ):
        before, new = state.clone(), torch.full_like(state, torch.nan)
        o = step(state, **token, into=new)
        assert torch.equal(state, before)
        assert torch.equal(step(state, **token), o) and torch.equal(state, new)


def test_offsets_beyond_two_to_the_31() -> None:
    state, token = draw("delta", "head", 128, 128, torch.bfloat16, batch=1, heads=1, group=1)
    pool = torch.empty(135_000, 1, 128, 128, device="cuda")
    pool[-1] = state[0]
    o = chain_step(pool, **token, index=torch.tensor([134_999], device="cuda"))
    assert torch.equal(o, chain_step(state, **token)) and torch.equal(pool[-1], state[0])


def test_empty_batch() -> None:
    state, token = draw("delta", "head", 16, 16, torch.bfloat16, batch=0)
    assert chain_step(state, **token).shape == (0, 4, 16)


def test_compiles_as_one_graph() -> None:
    for step, (state, token) in (
        (chain_step, draw("delta", "head", 64, 64, torch.bfloat16)),
        (block_step, draw_block(64, 64, torch.bfloat16)),
    ):
        eager = state.clone()
        want = step(eager, **token)
        got = torch.compile(step, fullgraph=True)(state, **token)
        assert torch.equal(got, want) and torch.equal(state, eager)


def test_refuses_gradients() -> None:
    state, token = draw("delta", "head", 16, 16, torch.bfloat16)
    token["k"].requires_grad_()
    with pytest.raises(ValueError, match="no gradient"):
        chain_step(state, **token)
    with torch.no_grad():
        chain_step(state, **token)


def time_it() -> None:
    """`python tests/gpu/test_step.py`: microseconds a step at H 16, D 128, in a CUDA graph and eager.

    24 layers with a state each, one after another as in decoding, so that no state is still in the cache.
    """
    from triton.testing import do_bench

    size: dict[str, Any] = {"heads": 16, "group": 1}
    for batch in (1, 8, 64, 256):
        for chain, gate in (
            ("write", "head"),
            ("delta", "head"),
            ("delta", "channel"),
            ("dplr", "channel"),
            ("block", ""),
        ):
            if chain == "block":
                step, (state, token) = block_step, draw_block(128, 128, torch.bfloat16, batch=batch, **size)
            else:
                step, (state, token) = chain_step, draw(chain, gate, 128, 128, torch.bfloat16, batch=batch, **size)
            for held in (torch.float32, torch.bfloat16):
                states = [state.to(held, copy=True) for _ in range(24)]

                def layers() -> None:
                    for s in states:  # noqa: B023
                        step(s, **token)  # noqa: B023

                layers()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    layers()
                graphed, eager = (do_bench(f, return_mode="median") / 24e-3 for f in (graph.replay, layers))
                floor = 2 * state.numel() * held.itemsize / 4.27e12 * 1e6
                print(
                    f"B {batch:3d} {chain:6s} {gate:8s} {str(held)[6:]:8s} graph {graphed:7.2f} eager {eager:7.2f} "
                    f"floor {floor:6.2f} us", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    time_it()
