"""The delta rule by Hopper's kernels with strengths of writes and erases apart (Comba), and with one read of several
writes (DeltaProduct): values and every gradient against float64 loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from axes import catalogue, dispatch  # noqa: E402
from axes.core import reference  # noqa: E402
from axes.errors import ShapeError  # noqa: E402
from axes.kernels.scalar.chain import reads_last, scalar_chain, takes_two  # noqa: E402
from axes.testing.examples import example  # noqa: E402

BF = torch.bfloat16
CLOSE = 1e-2  # of a whole tensor, in bfloat16
NAMES = ("o", "final", "q", "k", "v", "beta", "g", "write", "state")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def draw(t: int, d: int, kind: str = "random", b: int = 2, h: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(t + d)
    q, k = (normalize(randn(b, t, h, d), dim=-1).to(BF) for _ in range(2))
    beta, write = torch.rand(2, b, t, h, device="cuda")
    if kind == "small":  # erases from nothing at all to what bfloat16 would lose beside the writes
        least = torch.tensor([0.0, 1e-30, 1e-8, 1e-5, 1e-3], device="cuda")
        beta = beta * least[torch.randint(len(least), beta.shape, device="cuda")]
    if kind == "none":
        beta, write = (x * (torch.rand_like(x) > 0.3) for x in (beta, write))
    if kind == "both signs":
        beta, write = 2 * beta - 1, 2 * write - 1
    g = -(torch.rand(b, t, h, device="cuda") ** 4)
    return dict(q=q, k=k, v=randn(b, t, h, d).to(BF), beta=beta, g=g, write=write, state=randn(b, h, d, d) / d**0.5)


def loop(q, k, v, beta, g, write, state) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        known = torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        given = write[:, t, :, None] * v[:, t] - beta[:, t, :, None] * known
        state = state + given[..., None] * k[:, t, :, None, :]
        outs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def chain(q, k, v, beta, g, write, state, segments: int | None = 1) -> tuple[Tensor, Tensor]:
    return scalar_chain(q, k, v, beta, g, initial_state=state, write=write, segments=segments)


def results(function, given: dict[str, Tensor], do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given.values()]
    o, final = function(*leaves)
    grads = torch.autograd.grad((o, final), leaves, (do.to(o.dtype), dfinal.to(final.dtype)))
    return dict(zip(NAMES, (o.detach(), final.detach(), *grads), strict=True))


def check(given: dict[str, Tensor], function=chain) -> None:
    do, dfinal = randn(*given["q"].shape), randn(*given["state"].shape)
    got = results(function, given, do, dfinal)
    want = results(loop, {n: x.double() for n, x in given.items()}, do.to(BF).double(), dfinal.double())
    far = {n: distance(got[n], w) for n, w in want.items()}
    assert all(e < CLOSE for e in far.values()), far


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-3 * want.numel() ** 0.5)).item()


@pytest.mark.parametrize("t", (1, 63, 64, 65, 300))
@pytest.mark.parametrize("d", (64, 128))
def test_two_strengths_at_every_length(t: int, d: int) -> None:
    check(draw(t, d))


@pytest.mark.parametrize("kind", ("small", "none", "both signs"))
@pytest.mark.parametrize("d", (64, 128))
def test_two_strengths_of_any_size(kind: str, d: int) -> None:
    given = draw(200, d, kind)
    assert takes_two(given["q"], given["v"], None)
    check(given)


def test_two_strengths_in_segments() -> None:
    check(draw(400, 128, "none"), lambda *x: chain(*x, segments=3))


def test_what_no_kernel_takes_is_refused() -> None:
    given = draw(64, 128)
    half = {n: x.half() if n in "qkv" else x for n, x in given.items()}
    with pytest.raises(ShapeError, match="write has a strength of its own"):
        chain(**half)


@pytest.mark.parametrize(("n", "t", "d"), ((2, 1, 64), (2, 75, 128), (4, 33, 64), (4, 33, 128), (2, 300, 64)))
def test_queries_of_the_last_of_several_tokens(n: int, t: int, d: int) -> None:
    """40 heads, so that one segment fills the processors."""
    given = draw(n * t, d, b=2, h=40)
    given["q"] = given["q"][:, n - 1 :: n].contiguous()
    assert reads_last(given["q"], given["v"], None)

    def last(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        o, final = loop(q.repeat_interleave(n, 1), *rest)
        return o[:, n - 1 :: n], final

    def one_strength(q, k, v, beta, g, write, state) -> tuple[Tensor, Tensor]:
        return scalar_chain(q, k, v, beta, g, initial_state=state)

    do, dfinal = randn(*given["q"].shape), randn(*given["state"].shape)
    given["write"] = given["beta"]
    leaves = [x.detach().requires_grad_() for name, x in given.items() if name != "write"]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got = one_strength(*leaves[:5], None, leaves[5])
    want = last(*wide[:5], wide[3], wide[5])
    got += torch.autograd.grad(got, leaves, (do.to(BF), dfinal))
    want += torch.autograd.grad(want, wide, (do.to(BF).double(), dfinal.double()))
    names = [x for x in NAMES if x != "write"]
    far = {name: distance(a, b) for name, a, b in zip(names, got, want, strict=True)}
    assert all(e < CLOSE for e in far.values()), far


@pytest.mark.parametrize("name", ("comba", "delta-product", "gated-delta-product"))
def test_the_instances_are_their_tuples(name: str) -> None:
    """What the catalogue's tuples run as on this GPU, from a state on, against the interpreter in float64."""
    update = catalogue.get(name, axis="sequence").update
    made = example(update, batch=(2, 70), length=130, d_k=64, d_v=64, dtype=torch.float32)
    given = {n: x.movedim(2, 1).cuda() for n, x in made.items() if isinstance(x, Tensor)}
    given |= {n: given[n].to(BF) for n in "qkv"}
    want, last = reference.run(update, {n: x.double() for n, x in given.items()}, time=1)
    first, state = dispatch.run(update, {n: x[:, :70] for n, x in given.items()})
    second, state = dispatch.run(update, {n: x[:, 70:] for n, x in given.items()}, state)
    assert distance(torch.cat((first, second), 1), want) < CLOSE
    assert distance(state.theta[0], last.theta[0]) < CLOSE


@pytest.mark.parametrize("name", ("comba", "delta-product"))
def test_a_nan_stays_behind_its_token(name: str) -> None:
    update = catalogue.get(name, axis="sequence").update
    made = example(update, batch=(1, 140), length=100, d_k=64, d_v=64, dtype=torch.float32)
    given = {n: x.movedim(2, 1).cuda() for n, x in made.items() if isinstance(x, Tensor)}
    given |= {n: given[n].to(BF) for n in "qkv"}
    plain, _ = dispatch.run(update, given)
    given["v"] = given["v"].clone()
    given["v"][:, 50, 0] = float("nan")
    got, state = dispatch.run(update, given)
    assert (
        distance(got[:, :50], plain[:, :50].double()) < CLOSE
        and distance(got[:, :, 1:], plain[:, :, 1:].double()) < CLOSE
    )
    assert got[:, 50:, 0].isnan().all() and state.theta[0][:, 0].isnan().all()
