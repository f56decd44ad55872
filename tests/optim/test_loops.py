"""Steps on a CPU by loops of C: beside the interpreter in float64, and in everything else what they are without."""

from __future__ import annotations

import copy
import functools
import io
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import axes
from axes import optim
from axes.errors import AxesError, NotFiniteError
from axes.optim.engine import loops
from axes.optim.engine.finite import Look
from axes.programs import batched, c_entries, c_library
from axes.programs.c_text import functions
from axes.routes.choice import NoImplementation
from tests.drawn import one_of_each
from tests.optim.table import ENTRYWISE, Instance

pytestmark = pytest.mark.skipif(c_library.no_compiler() is not None, reason="no C compiler")
SHAPES = ((), (5,), (4, 6), (3, 2, 2, 2), (70, 130), (1, 1))
BOUND = {torch.float64: 1e-12, torch.float32: 3e-6}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on."""
    monkeypatch.setattr(loops, "WORTH", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[c_entries.Loop]]:
    """The loops that have run, looks among them."""
    seen: list[c_entries.Loop] = []
    call = c_entries.Loop.__call__
    monkeypatch.setattr(c_entries.Loop, "__call__", lambda self, *given: seen.append(self) or call(self, *given))
    yield seen


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def give(ps: list[nn.Parameter], t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def walk(optimizer: Any, ps: list[nn.Parameter], steps: Any = range(6)) -> list[Tensor]:
    """Parameters and states after steps, in float64."""
    for t in steps:
        give(ps, t)
        optimizer.step()
    every = [p.detach() for p in ps] + [x for p in ps for x in optimizer.state[p].values()]
    return [x.to(torch.float64) for x in every]


def stepped(optimizer: Any) -> list[bool]:
    """Of every program over lists, whether it is a loop."""
    found = []
    for batch in (b for *_, made in optimizer._batches.made.values() for b in made):
        if batch.entries is not None:
            found += [made is not None for made in batch.entries.lists.loops.made.values()]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instance", "options", "dtype"),
    one_of_each(
        [pytest.param(i, options, dtype, id=f"{i}-{n}-{dtype}") for dtype in BOUND]
        for i in ENTRYWISE
        for n, options in enumerate(i.configurations)
    ),
)
def test_a_rule_by_loops_is_the_interpreter(instance: Instance, options: dict[str, Any], dtype: torch.dtype) -> None:
    ps, qs = parameters(dtype), parameters(dtype)
    for q in qs:
        q.data = q.data.to(torch.float64)
    ours = instance.cls(ps, lr=instance.lr, **options)
    exact = instance.cls(qs, lr=instance.lr, foreach=False, **options)
    for t in range(6):
        give(ps, t)
        for p, q in zip(ps, qs, strict=True):
            q.grad = p.grad.to(torch.float64)  # type: ignore[union-attr]
        ours.step()
        exact.step()
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p.detach().to(torch.float64), q.detach(), rtol=BOUND[dtype], atol=BOUND[dtype])
    slow = instance.transcendental
    assert stepped(ours) and all(done is not slow for done in stepped(ours))


@pytest.mark.parametrize("cls", [optim.Muon, optim.NorMuon, optim.SOAP, optim.Shampoo])
def test_stages_around_products_are_loops(cls: Any, calls: list[c_entries.Loop], monkeypatch: Any) -> None:
    shapes = ((6, 4), (4, 6), (6, 4), (5, 5))
    made = [parameters(torch.float64, shapes) for _ in range(2)]
    rule = cls.__name__.lower()
    a, b = (cls([{"params": ps, "rule": rule}], lr=0.05, check_finite=False) for ps in made)
    one = walk(a, made[0])
    assert len(calls) >= 6
    monkeypatch.setattr(loops, "WORTH", 1 << 60)
    for x, y in zip(one, walk(b, made[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", sorted({*c_entries._CODE, "maximum", "minimum", "where", "abs", "sqrt"}))
def test_what_schedules_do_is_what_torch_does(name: str) -> None:
    """Entry by entry, with what is no number among them."""
    points = torch.tensor([-1.5, -0.25, 0.0, 0.3, 2.0, float("inf"), float("nan")], dtype=torch.float64)
    x, y = points.repeat_interleave(7).repeat(7), points.repeat(49)
    z = points.repeat_interleave(49)
    want = {
        "scale": lambda: x * y, "mix": lambda: x * z + y * 0.5, "add": lambda: x + y * z, "plus": lambda: x + y * z,
        "add number": lambda: x + y, "addcmul": lambda: x + 0.5 * y * z, "addcdiv": lambda: x + 0.5 * y / z,
        "copy": lambda: y, "times": lambda: x * y, "over": lambda: x / y, "div": lambda: x / y,
        "clamp": lambda: torch.minimum(torch.maximum(x, y), z), "sign": lambda: torch.sign(x), "truth": lambda: x,
        "maximum": lambda: torch.maximum(x, y), "minimum": lambda: torch.minimum(x, y), "abs": lambda: x.abs(),
        "where": lambda: torch.where(x != 0, y, z), "sqrt": lambda: x.sqrt(),
    }[name]()  # fmt: skip
    code = (c_entries._CODE.get(name) or c_entries.CODE[name]).format("x[i]", "y[i]", "z[i]", "0.5")
    lines = [functions("double"), "void f(const double *x, const double *y, const double *z, double *out, long n) {",
             f"for (long i = 0; i < n; i++) out[i] = {code};", "}"]  # fmt: skip
    out = torch.empty_like(x)
    f = c_library.library("\n".join(lines), *c_entries.OPTIONS)["f"]
    f.argtypes = [c_entries.ctypes.c_void_p] * 4 + [c_entries.ctypes.c_long]
    f(x.data_ptr(), y.data_ptr(), z.data_ptr(), out.data_ptr(), x.numel())
    torch.testing.assert_close(out, want, rtol=1e-14, atol=0, equal_nan=True)


def test_every_operation_of_schedules_is_known_or_refused() -> None:
    """What `batched` does with entries is text here, is torch's for many entries, or takes entries together."""
    program = {"scale", "mix", "add", "plus", "add number", "addcmul", "addcdiv", "copy", "times", "over"}
    assert program <= set(c_entries._CODE)
    assert {n for n in batched._OPERATIONS if " " not in n} <= program | {"inner"}  # of several words others are made


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_entries, "_SHARE", 64)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            ps = parameters()
            found.append(walk(optim.AdamW(ps), ps))
        finally:
            torch.set_num_threads(before)
    assert same(*found)


def _forked(steps: list[Any], out: Any) -> None:
    out.put([x.tolist() for x in walk(*steps)])


def test_a_process_that_was_forked_steps_by_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lost those of torch, for which it would wait for ever."""
    monkeypatch.setattr(c_entries, "_SHARE", 64)
    before, contexts = torch.get_num_threads(), multiprocessing.get_context("fork")
    torch.set_num_threads(2)
    try:
        made = [parameters() for _ in range(2)]
        a, b = (optim.AdamW(ps) for ps in made)
        walk(a, made[0], range(2))  # torch's threads are there now
        walk(b, made[1], range(2))
        out = contexts.Queue()
        child = contexts.Process(target=_forked, args=((b, made[1], range(2, 4)), out), daemon=True)
        child.start()
        try:
            found = out.get(timeout=30)
        finally:
            child.kill()
            child.join()
        assert found == [x.tolist() for x in walk(a, made[0], range(2, 4))]
    finally:
        torch.set_num_threads(before)


def test_schedules_compile_nothing() -> None:
    ps = parameters()
    optimizer = optim.AdamW(ps, lr=0.1, weight_decay=0.1)
    walk(optimizer, ps, range(2))
    compiled = c_library.library.cache_info().misses
    for t in range(2, 6):
        optimizer.param_groups[0].update(lr=0.1 / t, betas=(0.9 - 0.1 * t, 0.99), eps=1e-8 * t, weight_decay=0.1 * t)
        walk(optimizer, ps, range(t, t + 1))
    other = optim.AdamW(parameters(), lr=0.5, betas=(0.3, 0.4), weight_decay=0.2)
    walk(other, other.param_groups[0]["params"], range(2))
    assert c_library.library.cache_info().misses == compiled and stepped(optimizer) == stepped(other) == [True]


# ---- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_look_finds_every_place(dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max
    sizes, look = (1, 63, 64, 257, 1030), Look()
    gradients = [torch.full((n,), big, dtype=dtype) for n in sizes]  # whose sums are not finite
    gradients[1][:] = -5e-324
    assert look.doubtful(gradients) is False
    for bad in (float("nan"), float("inf"), float("-inf"), -float("nan")):
        for g in gradients:
            for i in range(len(g)):
                old, g[i] = g[i].item(), bad
                assert look.doubtful(gradients) is True
                g[i] = old
    assert look.doubtful(gradients) is False


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nothing_moves_where_a_gradient_is_not_finite(bad: float, calls: list[c_entries.Loop]) -> None:
    ps = parameters()
    for check in ("raise", "skip"):
        optimizer = optim.SGD(ps, lr=0.1, momentum=0.9, check_finite=check)
        before = walk(optimizer, ps, range(2))
        give(ps, 9)
        ps[4].grad[69, 129] = bad  # type: ignore[index]
        calls.clear()
        if check == "raise":
            with pytest.raises(NotFiniteError, match="parameter 4|params.*4"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.skipped == 1
        assert len(calls) == 2  # the look ahead of a step, and the one that says whose gradient it is
        every = [p.detach() for p in ps] + [x for p in ps for x in optimizer.state[p].values()]
        assert same(before, [x.to(torch.float64) for x in every])
        walk(optimizer, ps, range(2, 3))  # and it goes on


# ---- who steps -------------------------------------------------------------------------------------------------------


def test_it_is_said_who_steps(calls: list[c_entries.Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    ps = parameters()
    optimizer = optim.AdamW(ps)
    monkeypatch.setattr(loops, "WORTH", 3 * sum(p.numel() for p in ps))
    for t in range(5):
        plan = axes.select(optimizer)
        calls.clear()
        walk(optimizer, ps, range(t, t + 1))
        assert bool(calls) is (t >= 3) is (plan.implementation == "c"), t
    assert "one loop of C over all parameters" in axes.explain(optimizer)
    with pytest.raises(NoImplementation, match="no loop of C: it is compiled once"):
        axes.select(optim.AdamW(parameters()), implementation="c")
    assert axes.select(optimizer, implementation="c").route == "entrywise"


@pytest.mark.parametrize(
    ("options", "dtype", "says"),
    [
        ({"capturable": True}, torch.float32, "beside the tensors"),
        ({"moments": "8bit"}, torch.float32, "other forms"),
        ({}, torch.bfloat16, "not for torch.bfloat16"),
    ],
)
def test_others_keep_torchs_operations(
    options: dict[str, Any], dtype: torch.dtype, says: str, calls: list[c_entries.Loop], monkeypatch: Any
) -> None:
    shapes = ((64, 64), (8,))
    made = [parameters(dtype, shapes) for _ in range(2)]
    a, b = (optim.AdamW(ps, check_finite=False, **options) for ps in made)
    one = walk(a, made[0])
    assert says in axes.explain(a) and axes.select(a).implementation == "torch" and not calls
    monkeypatch.setattr(loops, "WORTH", 1 << 60)
    assert same(one, walk(b, made[1]))


def test_without_a_compiler_it_is_torchs_step(monkeypatch: pytest.MonkeyPatch, calls: list[c_entries.Loop]) -> None:
    monkeypatch.setattr(c_library, "no_compiler", lambda: "there is no C compiler")
    made = [parameters() for _ in range(2)]
    a, b = (optim.AdamW(ps) for ps in made)
    one = walk(a, made[0])
    assert "no loop of C: there is no C compiler" in axes.explain(a) and not calls
    monkeypatch.setattr(loops, "WORTH", 1 << 60)
    assert same(one, walk(b, made[1]))


def test_a_compiler_that_fails_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(text: str, *options: str) -> Any:
        raise AxesError("no space left")

    monkeypatch.setattr(loops, "unable", functools.cache(loops.unable.__wrapped__))
    monkeypatch.setattr(c_library, "library", failing)
    made = [parameters() for _ in range(2)]
    a, b = (optim.AdamW(ps, check_finite=False) for ps in made)
    with pytest.warns(UserWarning, match="no loop of C, torch's operations step instead: no space left") as said:
        one = walk(a, made[0])
    assert len(said) == 1
    monkeypatch.setattr(loops, "WORTH", 1 << 60)
    assert same(one, walk(b, made[1]))


class Following(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_who_follows_torch_sees_torchs_operations(calls: list[c_entries.Loop]) -> None:
    ps = parameters()
    with Following():
        walk(optim.SGD(ps, momentum=0.9), ps)
    assert not calls


# ---- what else a step is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_resumed_run_goes_on_bit_for_bit(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it was stopped: before loops, at the step where they begin, or after."""
    total = sum(p.numel() for p in parameters())
    monkeypatch.setattr(loops, "WORTH", 3 * total)
    ps = parameters()
    whole = walk(optim.AdamW(ps, lr=0.1), ps, range(8))
    qs = parameters()
    first = optim.AdamW(qs, lr=0.1)
    walk(first, qs, range(at))
    file = io.BytesIO()
    torch.save([first.state_dict(), [q.detach() for q in qs]], file)
    file.seek(0)
    saved, weights = torch.load(file)
    rs = [nn.Parameter(x) for x in weights]
    second = optim.AdamW(rs, lr=0.1)
    second.load_state_dict(saved)
    assert same(whole, walk(second, rs, range(at, 8))) and stepped(second) == [True]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_go_on_and_share_nothing(copied: Any) -> None:
    ps = parameters()
    optimizer = optim.AdamW(ps, lr=0.1)
    walk(optimizer, ps, range(2))
    other = copied(optimizer)
    qs = other.param_groups[0]["params"]
    one = walk(optimizer, ps, range(2, 5))
    assert same(one, walk(other, qs, range(2, 5)))


def test_gradients_come_and_go_in_any_layout(calls: list[c_entries.Loop]) -> None:
    """None, frozen, strided, with a sign to be read, and of a parameter that is no one run of memory."""
    made = [parameters(torch.float64) for _ in range(2)]
    a, b = optim.AdamW(made[0], lr=0.1), optim.AdamW(made[1], lr=0.1, foreach=False)
    for t in range(8):
        for ps, optimizer in zip(made, (a, b), strict=True):
            give(ps, t)
            ps[1].requires_grad_(t != 2)
            if t in (2, 5):
                ps[1].grad = None
            if t == 3:
                ps[4].grad = ps[4].grad.t().contiguous().t()  # type: ignore[union-attr]
            if t == 4:
                ps[5].grad = torch.complex(ps[5].grad, ps[5].grad).conj().imag  # type: ignore[arg-type]
                assert ps[5].grad.is_neg() and ps[5].grad.is_contiguous()
            if t == 6:
                ps[2].data = ps[2].data.t().contiguous().t()
            optimizer.step()
    for p, q in zip(*made, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    assert calls


def test_sparse_gradients_are_refused() -> None:
    ps = parameters()
    optimizer = optim.SGD(ps, lr=0.1, momentum=0.9)
    walk(optimizer, ps, range(2))
    ps[2].grad = ps[2].grad.to_sparse()  # type: ignore[union-attr]
    with pytest.raises(AxesError, match="sparse"):
        optimizer.step()


def test_a_tensor_as_rate_and_a_closure() -> None:
    made = [parameters() for _ in range(2)]
    rate = torch.tensor(0.1, dtype=torch.float64)
    a, b = optim.SGD(made[0], lr=rate, momentum=0.9), optim.SGD(made[1], lr=0.1, momentum=0.9)
    for t in range(4):
        for ps, optimizer in zip(made, (a, b), strict=True):
            assert optimizer.step(lambda ps=ps, t=t: give(ps, t) or 7.0) == 7.0
        rate.mul_(0.5)
        b.param_groups[0]["lr"] *= 0.5
    assert all(torch.equal(p, q) for p, q in zip(*made, strict=True)) and stepped(a) == [True]


def test_a_graph_that_has_kept_a_parameter_is_told() -> None:
    ps = parameters()
    optimizer = optim.SGD(ps, lr=0.1, momentum=0.9)
    walk(optimizer, ps, range(2))
    loss = (ps[2] ** 2).sum()
    walk(optimizer, ps, range(2, 3))
    assert stepped(optimizer) == [True]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
