"""Attention on a GPU against float64: kernels and routes, shapes, dtypes, packed sequences, gradients, bits, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.core import reference  # noqa: E402
from axes.core.memory import List  # noqa: E402
from axes.core.state_update import State, StateUpdate  # noqa: E402
from axes.kernels.attention.attend import attend  # noqa: E402
from axes.kernels.attention.transport import transport  # noqa: E402
from axes.kernels.attention.turn import turn  # noqa: E402
from axes.kernels.common import versions  # noqa: E402
from axes.routes import dispatch  # noqa: E402
from axes.routes.attention import transported  # noqa: E402
from axes.sequence import ALiBi, FoX, PaTH, RoPE, SequenceLayer, SoftmaxAttention  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUND = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LAYERS = (SoftmaxAttention, RoPE, ALiBi, FoX, PaTH)


def error(got: Tensor, want: Tensor) -> float:
    """Relative, or to numbers of 0.02: the gradient of a query that sees one pair is rounding alone."""
    assert torch.isfinite(got).all() and got.shape == want.shape
    return ((got.double() - want).norm() / want.norm().clamp_min(0.02 * want.numel() ** 0.5)).item()


def written_out(q, k, v, mass, scale, lengths, old) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    outs, at = [], 0
    for n, length in enumerate(lengths or (q.shape[1],)):
        seen = slice(at + n * old, at + n * old + old + length)
        s = scale * torch.einsum("bthd,bshd->bhts", q[:, at : at + length], k[:, seen])
        if mass is not None:
            own = mass[:, seen].repeat_interleave(group, 2)
            s = s + (own[:, None] - own[:, old:, None]).permute(0, 3, 1, 2)
        future = torch.ones(length, old + length, dtype=torch.bool, device=q.device).triu(old + 1)
        p = s.masked_fill(future, -torch.inf).softmax(-1)
        outs.append(torch.einsum("bhts,bshd->bthd", p, v[:, seen]))
        at += length
    return torch.cat(outs, 1)


def draw(b, t, s, heads, shared, d_k, d_v, dtype, mass) -> list[Tensor | None]:
    shapes = ((b, t, heads, d_k), (b, s, shared, d_k), (b, s, shared, d_v))
    given: list[Tensor | None] = [torch.randn(x, device="cuda").to(dtype).requires_grad_() for x in shapes]
    gates = torch.rand(b, s, shared, device="cuda", dtype=torch.float64)
    given.append(gates.cumsum(1).requires_grad_() if mass else None)
    return given


def check(
    t: int, d_k: int, d_v: int, dtype: torch.dtype, b: int = 2, heads: int = 2, group: int = 1, old: int = 0,
    lengths: tuple[int, ...] = (), mass: bool = True,
) -> None:  # fmt: skip
    b, t = (1, sum(lengths)) if lengths else (b, t)
    s = t + old * max(1, len(lengths))
    given = draw(b, t, s, heads * group, heads, d_k, d_v, dtype, mass)
    cu = torch.tensor((0, *lengths), device="cuda").cumsum(0).int() if lengths else None
    do = torch.randn(b, t, heads * group, d_v, device="cuda").to(dtype)
    found = attend(*given, scale=d_k**-0.5, cu_seqlens=cu)  # type: ignore[arg-type]
    used = [x for x in given if x is not None]
    grads = torch.autograd.grad(found, used, do)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in given]
    want = written_out(*exact, d_k**-0.5, lengths, old)
    expected = torch.autograd.grad(want, [x for x in exact if x is not None], do.double())
    for n, (x, w) in enumerate(zip((found, *grads), (want, *expected), strict=True)):
        e = error(x, w.detach())
        assert e < BOUND[dtype], (t, d_k, d_v, dtype, old, lengths, mass, n, e)


@pytest.mark.parametrize("mass", (True, False), ids=("masses", "plain"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", (64, 128))
def test_lengths(d: int, dtype: torch.dtype, mass: bool) -> None:
    """And earlier pairs: kernels that are compiled once for all of them."""
    for t in (1, 2, 63, 64, 65, 127, 128, 129, 1000):
        check(t, d, d, dtype, mass=mass)
    for old in (1, 63, 64, 100, 300):
        check(130, d, d, dtype, old=old, mass=mass)
    check(1, d, d, dtype, old=1000, mass=mass)


# one of every kind: padded or not on either side, and the three classes of tiles, by the wider one
WIDTHS = ((1, 1), (7, 5), (16, 64), (33, 48), (64, 256), (96, 96), (128, 64), (130, 20), (256, 192), (256, 256))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
def test_widths(d_k: int, d_v: int, dtype: torch.dtype) -> None:
    check(200, d_k, d_v, dtype)


@pytest.mark.parametrize("mass", (True, False), ids=("masses", "plain"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_and_packed_sequences(dtype: torch.dtype, mass: bool) -> None:
    check(300, 128, 64, dtype, heads=2, group=4, mass=mass)
    check(0, 64, 64, dtype, lengths=(0, 1, 300, 0, 64, 129), mass=mass)
    check(0, 128, 128, dtype, lengths=(5, 700, 64), group=2, old=70, mass=mass)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views(dtype: torch.dtype) -> None:
    """Heads side by side in one product, heads before time, one key head for all."""
    whole = torch.randn(2, 200, 3 * 4 * 64, device="cuda").to(dtype)
    q, k, v = (x.unflatten(-1, (4, 64)) for x in whole.chunk(3, -1))
    for views in (
        (q, k, v),
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        (q, k[:, :, :1].expand_as(q), v),
    ):
        found = attend(*views, scale=0.125)
        want = written_out(*(x.double() for x in views), None, 0.125, (), 0)
        assert error(found, want) < BOUND[dtype]


def test_bits_repeat() -> None:
    given = draw(4, 2000, 2000, 8, 4, 128, 128, torch.bfloat16, True)
    do = torch.randn(4, 2000, 8, 128, device="cuda").bfloat16()
    first: list[Tensor] = []
    for _ in range(5):
        out = attend(*given, scale=0.1)  # type: ignore[arg-type]
        bits = [out, *torch.autograd.grad(out, given, do)]  # type: ignore[arg-type]
        first = first or bits
        assert all(torch.equal(a, b) for a, b in zip(first, bits, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turn(dtype: torch.dtype) -> None:
    for d in (2, 6, 64, 128, 256):
        for shape in ((77, d // 2), (2, 77, d // 2)):
            q, k = (torch.randn(2, 77, h, d, device="cuda").to(dtype).requires_grad_() for h in (4, 2))
            angle = 100 * torch.rand(shape, device="cuda")
            found = turn(q, k, angle)
            phase = torch.exp(1j * angle.double())[..., None, :]
            for x, y in zip((q, k), found, strict=True):
                z = torch.complex(*x.detach().double().chunk(2, -1)) * phase
                assert error(y, torch.cat((z.real, z.imag), -1)) < BOUND[dtype]
            back = torch.autograd.grad(found, (q, k), found)
            assert all(error(g, x.detach().double()) < 2 * BOUND[dtype] for g, x in zip(back, (q, k), strict=True))


def test_pairs_without_mass() -> None:
    """Whole tiles of them, and single ones."""
    for d in (64, 128):
        given = draw(2, 700, 700, 4, 4, d, d, torch.bfloat16, True)
        given[3].detach()[:, :300] = -torch.inf  # type: ignore[union-attr]
        given[3].detach()[:, 300:600:7] = -torch.inf  # type: ignore[union-attr]
        q, k, v, mass = given
        found = attend(q, k, v, mass, scale=0.1)[:, 601:]  # type: ignore[arg-type]
        exact = [x.detach().double() for x in given]  # type: ignore[union-attr]
        assert error(found, written_out(*exact, 0.1, (), 0)[:, 601:]) < BOUND[torch.bfloat16]


POISONED = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is not a number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@POISONED
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("masses", (True, False), ids=("masses", "plain"))
@pytest.mark.parametrize("d", (64, 128))
def test_every_number_is_written(d: int, masses: bool) -> None:
    for t, old, group in ((1, 0, 1), (127, 0, 3), (129, 0, 1), (385, 0, 2), (200, 57, 1), (3, 600, 2)):
        check(t, d, d, torch.bfloat16, heads=3, group=group, old=old, mass=masses)


@POISONED
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", (64, 128))
def test_gates_that_close_and_pairs_without_mass(d: int, dtype: torch.dtype) -> None:
    """Gates at their floor, one in twenty tokens and twice in a row, and nothing in whole tiles of earlier pairs."""
    old, t = 300, 520
    given = draw(2, t, old + t, 2, 2, d, d, dtype, True)
    q, k, v, mass = given
    closed = torch.rand(2, t, 2, device="cuda") < 0.05
    closed[:, 127:130] = True
    assert mass is not None
    mass.detach()[:, old:] += 100.0 * closed.cumsum(1)
    mass.detach()[:, :280] = -torch.inf
    mass.detach()[:, 290] = -torch.inf
    do = torch.randn(2, t, 2, d, device="cuda").to(dtype)
    found = attend(*given, scale=d**-0.5)  # type: ignore[arg-type]
    grads = torch.autograd.grad(found, given, do)  # type: ignore[arg-type]
    exact = [x.detach().double().requires_grad_() for x in given]  # type: ignore[union-attr]
    want = written_out(*exact, d**-0.5, (), old)
    expected = torch.autograd.grad(want, exact, do.double())
    for n, (x, w) in enumerate(zip((found, *grads), (want, *expected), strict=True)):
        assert error(x, w.detach()) < BOUND[dtype], (d, dtype, n, error(x, w.detach()))
    assert not any(grad[:, :280].any() for grad in grads[1:])


@pytest.mark.skipif(versions.hopper_refusal(torch.device("cuda")) is not None, reason="the kernels for Hopper")
@pytest.mark.parametrize("d", (64, 128))
def test_bits_are_those_of_all_tiles(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that close: most tiles are left out, and nothing differs."""
    from axes.kernels.attention import hopper, hopper_backward
    from axes.kernels.attention.reach import reach

    def everything(q: Tensor, k: Tensor, high: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        first, last = reach(q, k, high, scale)
        left_out.append(bool(first.any()))
        return torch.zeros_like(first), torch.full_like(last, 2**20)

    for old, group, steep in ((0, 1, 1.0), (300, 2, 2.0), (0, 1, 0.3)):
        left_out: list[bool] = []
        given = draw(2, 1500, 1500 + old, 2 * group, 2, d, d, torch.bfloat16, True)
        given[3].detach().mul_(steep)  # type: ignore[union-attr]
        do = torch.randn(2, 1500, 2 * group, d, device="cuda").bfloat16()
        bits = []
        for form in (reach, everything):
            for module in (hopper, hopper_backward):
                monkeypatch.setattr(module, "reach", form)
            out = attend(*given, scale=d**-0.5)  # type: ignore[arg-type]
            bits.append([out, *torch.autograd.grad(out, given, do)])  # type: ignore[arg-type]
        assert all(left_out) and all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


# ---- carried keys ---------------------------------------------------------------------------------------------------


def transports(b: int, t: int, h: int, d_k: int, d_v: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, and a, b of generalised reflections."""
    q, k, w = torch.randn(3, b, t, h, d_k, device="cuda").unbind()
    w = torch.nn.functional.normalize(w, dim=-1)
    a = -2 * torch.rand(b, t, h, 1, device="cuda") * w
    return [x.to(dtype).requires_grad_() for x in (q, k, torch.randn(b, t, h, d_v, device="cuda"), a, w)]


@pytest.mark.parametrize("masses", (True, False), ids=("masses", "plain"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", (64, 128))
def test_carried_keys(d: int, dtype: torch.dtype, masses: bool) -> None:
    """Against the form by blocks of torch's operations in float64, which is held to the interpreter."""
    for t in (1, 64, 65, 129, 1000) if dtype != torch.float32 else (1, 33, 150):
        given = transports(2, t, 2, d, d, dtype)
        mass = torch.rand(2, t, 2, device="cuda", dtype=torch.float64).cumsum(1) if masses else None
        ends = [torch.randn(2, t, 2, d, device="cuda") for _ in range(2)]
        found = transport(*given, mass, scale=d**-0.5)  # type: ignore[arg-type]
        grads = torch.autograd.grad(found, given, [e.to(x.dtype) for e, x in zip(ends, found, strict=True)])
        exact = [x.detach().double().requires_grad_() for x in given]
        moved = [x.transpose(1, 2) for x in exact]
        want = transported.attend(*moved, d**-0.5, None if mass is None else mass.transpose(1, 2))  # type: ignore[arg-type]
        want = tuple(x.transpose(1, 2) for x in want)
        expected = torch.autograd.grad(want, exact, [e.double() for e in ends])
        for n, (x, w) in enumerate(zip((*found, *grads), (*want, *expected), strict=True)):
            assert error(x, w.detach()) < 2 * BOUND[dtype], (t, d, dtype, masses, n, error(x, w.detach()))


@pytest.mark.parametrize(("d_k", "d_v"), ((1, 5), (20, 96), (96, 33), (128, 64), (64, 128)))
def test_widths_of_carried_keys(d_k: int, d_v: int) -> None:
    given = transports(2, 200, 2, d_k, d_v, torch.bfloat16)
    found = transport(*given, scale=d_k**-0.5)  # type: ignore[call-arg]
    moved = [x.detach().double().transpose(1, 2) for x in given]
    want = transported.attend(*moved, d_k**-0.5, None)  # type: ignore[arg-type]
    for x, w in zip(found, want, strict=True):
        assert error(x, w.transpose(1, 2)) < 2 * BOUND[torch.bfloat16]
    found[0].float().square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in given)  # type: ignore[arg-type]


def test_bits_of_carried_keys_repeat() -> None:
    given = transports(2, 2000, 8, 128, 128, torch.bfloat16)
    do = torch.randn(2, 2000, 8, 128, device="cuda").bfloat16()
    first: list[Tensor] = []
    for _ in range(5):
        out, last = transport(*given, scale=0.1)  # type: ignore[call-arg]
        bits = [out, last, *torch.autograd.grad(out, given, do)]
        first = first or bits
        assert all(torch.equal(a, b) for a, b in zip(first, bits, strict=True))


# ---- the route ------------------------------------------------------------------------------------------------------


def example(update: StateUpdate, b: int, t: int, h: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    signal = {n: made(b, t, h, d).to(dtype) for n in ("q", "k", "v")}
    rates = {"decay": -torch.rand(b, t, h, device="cuda"), "forget": -torch.rand(b, t, h, device="cuda")}
    more = {
        "w": torch.nn.functional.normalize(made(b, t, h, d), dim=-1),
        "beta": 2 * torch.rand(b, t, h, device="cuda"),
    }
    names = {p.name for p in update.demands()} | update.signals()
    return {**signal, **{n: x for n, x in {**rates, **more}.items() if n in names}}


def gradients(run: Any, update: StateUpdate, signal: dict[str, Tensor], state: State) -> list[Tensor]:
    live = {n: x.detach().requires_grad_() for n, x in signal.items()}
    out, last = run(update, live, state, time=1)
    weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((weight * out.double()).sum(), list(live.values()))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_layers_tuples_are_the_interpreter(cls: type[SequenceLayer], dtype: torch.dtype) -> None:
    update, earlier = cls.update, 9
    signal = example(update, 2, 150, 2, 64, dtype)
    exact = {n: x.double() for n, x in signal.items()}
    first = update.init({n: x[:, 0] for n, x in exact.items()})
    for start in (0, earlier):
        state, wide = update.init({n: x[:, 0].float() for n, x in signal.items()}), first
        if start:
            wide = reference.run(update, {n: x[:, :start] for n, x in exact.items()}, first, time=1)[1]
            state = dispatch.run(update, {n: x[:, :start] for n, x in signal.items()})[1]
        found = gradients(dispatch.run, update, {n: x[:, start:] for n, x in signal.items()}, state)
        want = gradients(reference.run, update, {n: x[:, start:] for n, x in exact.items()}, wide)
        for n, (x, w) in enumerate(zip(found, want, strict=True)):
            assert error(x, w.detach()) < 2 * BOUND[dtype], (cls.name, start, n, error(x, w.detach()))


@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_packed_layers(cls: type[SequenceLayer]) -> None:
    """Outputs, states and gradients are those of every sequence alone."""
    module = cls(256, heads=4, device="cuda", dtype=torch.float32)
    x = torch.randn(1, 300, 256, device="cuda", requires_grad=True)
    ends = [0, 1, 130, 130, 300]
    y, state = module(x, cu_seqlens=torch.tensor(ends, dtype=torch.int32, device="cuda"))
    (packed,) = torch.autograd.grad(y.square().sum(), x)
    alone = [module(x[:, a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    expected = torch.cat([out for out, _ in alone], 1)
    assert error(y, expected.double()) < 1e-4
    assert error(packed, torch.autograd.grad(expected.square().sum(), x)[0].double()) < 1e-4
    more = torch.randn(4, 5, 256, device="cuda")
    for n, (_, end) in enumerate(alone):
        assert error(module(more, state)[0][n], module(more[n : n + 1], end)[0][0].double()) < 1e-4


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_decoding_is_the_forward(cls: type[SequenceLayer], dtype: torch.dtype) -> None:
    module = cls(256, heads=4, device="cuda", dtype=dtype)
    x = torch.randn(2, 150, 256, device="cuda", dtype=dtype)
    with torch.no_grad():
        whole, _ = module(x)
        _, state = module(x[:, :70])
        outputs = []
        for t in range(70, 150):
            y, state = module.step(x[:, t], state)
            outputs.append(y)
    assert error(torch.stack(outputs, 1), whole[:, 70:].double()) < 4 * BOUND[dtype]


@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_memory_is_linear_in_time(cls: type[SequenceLayer]) -> None:
    def peak(length: int) -> int:
        module = cls(256, heads=4, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(1, length, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(512)
    few, many = peak(4096), peak(16384)
    assert many < 5 * few, (few, many)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_compiles_whole(cls: type[SequenceLayer]) -> None:
    module = cls(256, heads=4, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(module, fullgraph=True)
    for length in (128, 200, 333):
        x = torch.randn(2, length, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        a, b = compiled(x)[0], module(x)[0]
        assert error(a, b.detach().double()) < 2e-2
        (da,), (db,) = (torch.autograd.grad(y.float().square().sum(), x) for y in (a, b))
        assert error(da, db.double()) < 3e-2


@pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.name)
def test_groups_and_windows_of_layers(cls: type[SequenceLayer]) -> None:
    """Against the interpreter in float64: a sequence, and one token after it."""
    block, windowed = replace(cls.block, queries=2), replace(cls.update, memory=List(window=70))  # type: ignore[type-var]
    for options in ({"block": block}, {"update": windowed}, {"block": block, "update": windowed}):
        module = cls(256, heads=4, device="cuda", dtype=torch.bfloat16, **options)  # type: ignore[arg-type]
        exact = cls(256, heads=4, device="cuda", dtype=torch.float64, implementation="reference", **options)  # type: ignore[arg-type]
        exact.load_state_dict(module.state_dict())
        x = torch.randn(2, 150, 256, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            y, state = module(x)
            want, last = exact(x.double())
            one, expected = module.step(x[:, 0], state)[0], exact.step(x[:, 0].double(), last)[0]
        assert error(y, want) < 4 * BOUND[torch.bfloat16], (cls.name, options)
        assert error(one, expected) < 4 * BOUND[torch.bfloat16], (cls.name, options)


def test_who_computes_is_said() -> None:
    for cls, who in (
        (SoftmaxAttention, "torch"),
        (RoPE, "triton"),
        (ALiBi, "triton"),
        (FoX, "triton"),
        (PaTH, "triton"),
    ):
        choice = dispatch.select(cls.update, "cuda", torch.bfloat16)
        assert choice[:2] == ("attention", who), (cls.name, choice)
