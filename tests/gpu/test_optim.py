"""Optimizers on a GPU: the generated kernel against the interpreter and torch's own, graphs, scalers, skipped steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes import optim  # noqa: E402
from axes.core.geometry import Spectral  # noqa: E402
from axes.errors import AxesError  # noqa: E402
from axes.optim.engine import generated  # noqa: E402
from axes.optim.engine.replayed import Replayed  # noqa: E402
from axes.programs import fused as kernels  # noqa: E402
from tests.optim.table import ENTRYWISE, Instance, net, same  # noqa: E402

SHAPES = ((), (7,), (64, 64), (0, 3), (130, 33), (2, 3, 4), (2, 3, 2, 2), (5000,), (1,))
CONFIGURED = [pytest.param(i, c, id=f"{i}-{n}") for i in ENTRYWISE for n, c in enumerate(i.configurations)]
WAYS = {"fused": {"fused": True}, "default": {}}  # that run a generated kernel
STORED = (
    {"master": "32bit"},
    {"master": "24bit"},
    {"rounding": "stochastic", "seed": 3},
    {"moments": "8bit"},
    {"master": "24bit", "moments": "8bit"},
    {"master": "24bit", "moments": "8bit", "rounding": "stochastic", "seed": 2**40 + 1},
)


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to("cuda", dtype)) for s in SHAPES]


def gradients(ps: list[nn.Parameter], t: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in ps:
        g = torch.randn(p.shape, generator=generator) * 0.1 * scale
        p.grad = g.to("cuda", dtype or p.dtype)


def run(ps: list[nn.Parameter], optimizer: Any, steps: int = 4, start: int = 0) -> None:
    for t in range(start, start + steps):
        gradients(ps, t)
        optimizer.step()


def by_kernel(optimizer: Any) -> bool:
    """Whether every batch of parameters is one kernel."""
    batches = [batch for *_, made in optimizer._batches.made.values() for batch in made]
    return bool(batches) and all(batch.how == "fused" for batch in batches)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("instance", "options"), CONFIGURED)
def test_the_kernel_is_the_interpreter(
    instance: Instance, options: dict[str, Any], dtype: torch.dtype, way: str
) -> None:
    results = []
    for chosen in (WAYS[way], {"foreach": False}):
        ps = parameters(dtype)
        optimizer = instance.cls(ps, lr=0.01, **chosen, **options)
        run(ps, optimizer)
        assert by_kernel(optimizer) == (chosen == WAYS[way])
        places = {x.device.type for kept in optimizer.state.values() for n, x in kept.items() if n.endswith("count")}
        assert places == {"cuda" if "fused" in chosen else "cpu"}
        results.append([p.detach() for p in ps])
    bound = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    same(*results, bound * (10 if instance.transcendental and dtype == torch.float32 else 1))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_the_kernel_is_torch_fused(name: str, maximize: bool) -> None:
    """torch's own kernel is the oracle; 20 steps."""
    options = {"lr": 0.01, "weight_decay": 0.1, "maximize": maximize, **({"momentum": 0.9} if name == "SGD" else {})}
    ours, theirs = parameters(), parameters()
    run(ours, getattr(optim, name)(ours, fused=True, **options), 20)
    run(theirs, getattr(torch.optim, name)(theirs, fused=True, **options), 20)
    same(ours, theirs, 2e-5 if name != "SGD" else 2e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.Lion, optim.SGD])
def test_stored_forms_are_those_of_torch_operations(
    cls: Any, stored: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step lands on the same codes but for rounding at their borders; the next ones stay close."""
    found = []
    for options in (WAYS[way], {}):
        if found:  # without kernels
            monkeypatch.setattr(generated, "no_kernels", lambda device: "not in this test")
        ps = parameters(torch.bfloat16)
        optimizer = cls(ps, lr=0.01, **options, **stored)
        run(ps, optimizer, 1)
        assert by_kernel(optimizer) == (not found)
        first = [(p.detach().clone(), {n: x.cpu().clone() for n, x in optimizer.state[p].items()}) for p in ps]
        run(ps, optimizer, 3, start=1)
        found.append((first, [p.detach() for p in ps]))
    for (p, a), (q, b) in zip(found[0][0], found[1][0], strict=True):
        assert a.keys() == b.keys()
        if p.numel():
            torch.testing.assert_close(p, q, rtol=2**-8, atol=1e-6)
            assert (p != q).float().mean().item() <= (0.02 if p.numel() > 100 else 1.0)
        for name, x in a.items():
            y = b[name]
            assert x.dtype == y.dtype
            if x.dtype in (torch.int8, torch.uint8) and not name.endswith(".low"):
                assert int((x.int() - y.int()).abs().max()) <= 1
                assert (x != y).float().mean().item() <= (1e-2 if x.numel() > 100 else 1.0)
            elif x.dtype.is_floating_point:
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-9)
    for p, q in zip(found[0][1], found[1][1], strict=True):
        if p.numel():
            assert (p.float() - q.float()).abs().mean().item() <= 2e-3
            torch.testing.assert_close(p, q, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [{}, *STORED], ids=str)
def test_resuming_is_exact(stored: dict[str, Any], way: str) -> None:
    dtype = torch.bfloat16 if stored else torch.float32
    whole, part, resumed = parameters(dtype), parameters(dtype), parameters(dtype)
    run(whole, optim.AdamW(whole, lr=0.01, **WAYS[way], **stored), 6)
    first = optim.AdamW(part, lr=0.01, **WAYS[way], **stored)
    run(part, first, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p, q in zip(part, resumed, strict=True):
            q.copy_(p)
    second = optim.AdamW(resumed, lr=0.5, **WAYS[way])
    second.load_state_dict(torch.load(file, weights_only=True))
    run(resumed, second, 3, start=3)
    same(whole, resumed)


def test_a_state_moves_between_implementations() -> None:
    ps = parameters()
    fused = optim.AdamW(ps, lr=0.01, fused=True)
    run(ps, fused, 3)
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    batched = optim.AdamW(qs, lr=0.01)
    batched.load_state_dict(fused.state_dict())
    run(ps, fused, 3, start=3)
    run(qs, batched, 3, start=3)
    same(ps, qs, 1e-5)
    assert all(kept["count"].device.type == "cpu" for kept in batched.state.values())


@pytest.mark.parametrize("way", WAYS)
def test_views_strides_complex_numbers_and_other_gradients(way: str) -> None:
    base = torch.randn(1000, device="cuda")
    kinds: dict[str, Callable[[], Tensor]] = {
        "unaligned": lambda: base.clone()[1:778],
        "strided": lambda: base.clone()[:600].view(20, 30).T,
        "complex": lambda: torch.complex(base[:500].clone(), base[500:].clone()),
        "scalar": lambda: base[3].clone(),
    }
    for kind, make in kinds.items():
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for options in (WAYS[way], {"foreach": False}):
                p = nn.Parameter(make())
                optimizer = optim.AdamW([p], lr=0.01, **options)
                for t in range(3):
                    generator = torch.Generator("cuda").manual_seed(t)
                    g = torch.randn(p.shape, generator=generator, device="cuda", dtype=p.dtype)
                    # a gradient of another dtype needs grad_dtype in newer versions of torch
                    p.grad = g.T.contiguous().T if g.ndim == 2 else g
                    optimizer.step()
                results.append(p.detach())
            torch.testing.assert_close(*results, rtol=3e-6, atol=3e-6, msg=f"{kind} {dtype}")


# ---- the default -----------------------------------------------------------------------------------------------------


def launched(call: Callable[[], Any]) -> list[str]:
    """The names of the kernels that a call starts, in the order of the alphabet."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        torch.cuda.synchronize()
    events = [e for e in found.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(e.name for e in events if not e.name.startswith(("Memcpy", "Memset", "Optimizer.")))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"moments": "8bit"}], ids=str)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.Lion])
def test_the_default_is_two_launches_and_the_look_at_the_gradients(cls: Any, options: dict[str, Any]) -> None:
    ps = parameters()
    optimizer = cls(ps, lr=0.01, check_finite=False, **options)
    run(ps, optimizer, 2)  # gradients of the last step stay
    optimizer.step()
    names = launched(optimizer.step)
    assert len(names) == 2 and names[0].startswith("advance") and names[1].startswith("step"), names
    looking = cls(ps, lr=0.01, **options)
    run(ps, looking, 2)
    looking.step()
    names = launched(looking.step)
    assert sum(n.startswith(("advance", "step")) for n in names) == 2, names
    assert all(int(x) == 4 for kept in looking.state.values() for n, x in kept.items() if n.endswith("count"))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("where", ["host", "cpu", "cuda"])
@pytest.mark.parametrize("stored", [{}, *STORED], ids=str)
def test_the_default_waits_for_nothing_but_the_look_at_the_gradients(stored: dict[str, Any], where: str) -> None:
    ps = parameters(torch.bfloat16 if stored else torch.float32)
    rate: Any = 0.01 if where == "host" else torch.tensor(0.01, device=where)
    optimizer = optim.AdamW(ps, lr=rate, check_finite=False, **stored)
    run(ps, optimizer, 3)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for t in range(3):
            optimizer.param_groups[0]["lr"] = rate * (0.9 - 0.1 * t)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gradient_that_is_not_finite_raises_before_the_kernel_runs() -> None:
    ps = parameters()
    optimizer = optim.AdamW(ps, lr=0.01)
    run(ps, optimizer, 2)
    before, state = [p.detach().clone() for p in ps], copy.deepcopy(optimizer.state_dict()["state"])
    gradients(ps, 9)
    assert ps[4].grad is not None
    ps[4].grad[3, 3] = float("nan")
    with pytest.raises(AxesError, match="is not finite; no parameter was changed"):
        optimizer.step()
    same([p.detach() for p in ps], before)
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(x, state[index][name]) for name, x in kept.items())


@pytest.mark.parametrize("name", ["OneCycleLR", "LambdaLR"])
@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD])
def test_schedules_drive_the_default_and_compile_nothing(cls: Any, name: str) -> None:
    """Of the learning rate, and of momentum or betas, which are constants of a program."""
    schedules = torch.optim.lr_scheduler
    results = []
    for options in ({}, {"foreach": False}):
        ps = parameters()
        optimizer = cls(ps, lr=0.01, **options)
        one = name == "OneCycleLR"
        scheduler = (
            schedules.OneCycleLR(optimizer, 0.01, 10) if one else schedules.LambdaLR(optimizer, lambda t: 0.9**t)
        )
        for t in range(5):
            run(ps, optimizer, 1, start=t)
            scheduler.step()
            if t == 0:
                texts = set(kernels._COMPILED)
        assert kernels._COMPILED.keys() == texts
        results.append([p.detach() for p in ps])
    same(*results, 3e-6)


def test_parameters_may_be_given_other_memory_and_gradients_may_come_and_go() -> None:
    results = []
    for options in ({}, {"foreach": False}):
        ps = parameters()
        optimizer = optim.AdamW(ps, lr=0.01, **options)
        for t in range(6):
            gradients(ps, t)
            for i, p in enumerate(ps):
                p.grad = None if t > 3 and (i + t) % 3 == 0 else p.grad
            optimizer.step()
            if t == 2:
                for p in ps:
                    p.data = p.detach() * 0.5
        results.append([p.detach() for p in ps])
    same(*results, 3e-6)


def test_a_first_datum_of_its_own_leaves_what_the_kernel_can_read() -> None:
    """The interpreter's states of several parameters are views of a stack, at places that are not aligned."""
    results = []
    for options in ({}, {"fused": True}, {"foreach": False}):
        ps = [nn.Parameter(torch.linspace(-1, 1, 4099, device="cuda") + i) for i in range(4)]
        optimizer = optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.2, **options)
        run(ps, optimizer, 3)
        results.append([p.detach() for p in ps])
    same(results[0], results[2], 3e-6)
    same(results[1], results[2], 3e-6)


def test_where_no_kernel_can_be_made_torch_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C compiler, an old GPU: a warning, and the same results."""

    def fail(*args: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    ps, qs = parameters(), parameters()
    optimizer = optim.AdamW(ps, lr=0.01)
    generated.unable.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "compile_text", fail)
            with pytest.warns(UserWarning, match="no kernels for cuda:0, .*: Failed to find C compiler"):
                run(ps, optimizer)
    finally:
        generated.unable.cache_clear()
    assert not by_kernel(optimizer)
    run(qs, optim.AdamW(qs, lr=0.01, foreach=False))
    same([p.detach() for p in ps], [p.detach() for p in qs], 3e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_on_several_devices_step_by_kernels_of_their_own() -> None:
    results = []
    for options in ({}, {"foreach": False}):
        ps = [nn.Parameter(p.detach().to(f"cuda:{i % 2}")) for i, p in enumerate(parameters())]
        optimizer = optim.AdamW(ps, lr=torch.tensor(0.01), **options)
        for t in range(3):
            for i, p in enumerate(ps):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i)).to(p.device)
            optimizer.step()
        assert by_kernel(optimizer) == (not options)
        results.append([p.detach() for p in ps])
    same(*results, 3e-6)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


CAPTURED = {
    "adamw fused": (optim.AdamW, {"fused": True}),
    "adamw batched": (optim.AdamW, {}),
    "adamw interpreted": (optim.AdamW, {"foreach": False}),
    "adamw 8 bit": (optim.AdamW, {"fused": True, "master": "24bit", "moments": "8bit", "rounding": "stochastic"}),
    "sgd fused": (optim.SGD, {"fused": True, "dampening": 0.1}),
    "lion batched": (optim.Lion, {}),
    "muon": (optim.Muon, {"precision": "input"}),
    "normuon": (optim.NorMuon, {"precision": "input"}),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_replays_steps_with_the_rate_of_the_day(name: str) -> None:
    """Three warm-up steps, then replays with new gradients and rates equal the same steps one by one."""
    cls, options = CAPTURED[name]
    if name == "shampoo":
        pytest.skip("its roots wait for the device")
    dtype = torch.bfloat16 if "8 bit" in name else torch.float32
    results = []
    for graphed in (True, False):
        generator = torch.Generator().manual_seed(1)
        model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48), nn.Linear(48, 32)).to("cuda", dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        ps = list(model.parameters())
        rate = torch.tensor(0.01, device="cuda")
        optimizer = cls(model, lr=rate, capturable=True, **options)
        for p in ps:
            p.grad = torch.zeros_like(p)

        def fill(t: int, ps: list[nn.Parameter] = ps) -> None:
            generator = torch.Generator().manual_seed(t)
            for p in ps:
                assert p.grad is not None
                p.grad.copy_(torch.randn(p.shape, generator=generator))

        fill(0)
        replay: Callable[[], Any] = optimizer.step
        if graphed:
            replay = capture(optimizer.step).replay  # capturing itself changes nothing
        else:
            for _ in range(3):
                optimizer.step()
        for t in range(4):
            fill(t + 1)
            rate.fill_(0.01 / (t + 1))
            replay()
        counts = [int(kept["count"]) for kept in optimizer.state.values()]
        assert set(counts) == {7}
        results.append([p.detach() for p in ps])
    same(*results, 0.0 if "muon" not in name else 1e-5)


@pytest.mark.parametrize("cls", (optim.Muon, optim.NorMuon))
def test_stacks_of_many_shapes_equal_matrices_one_by_one(cls: Any) -> None:
    """Shapes whose products have several forms and dtypes, in eager steps and in recorded ones, on a busy device."""
    shapes = ((96, 64), (96, 64), (64, 96), (33, 40), (1, 64), (256, 64))
    busy = torch.randn(4096, 4096, device="cuda")
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        both = []
        for options in ({}, {"foreach": False}):
            ps = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
            rule = cls.__name__.lower()
            both.append((ps, cls([{"params": ps, "rule": rule}], lr=0.1, weight_decay=0.0, **options)))
        for _ in range(4):
            for pair in zip(*(ps for ps, _ in both), strict=True):
                g = torch.randn(pair[0].shape, generator=generator).cuda()
                for p in pair:
                    p.grad = g.clone()
            if seed % 2:
                busy @ busy
            for _, optimizer in both:
                optimizer.step()
            for p, q in zip(*(ps for ps, _ in both), strict=True):
                assert (p - q).norm() <= 2e-2 * q.norm(), tuple(p.shape)


def test_a_graph_that_makes_its_own_gradients() -> None:
    """Forward, backward and step in one graph, and eager steps with other gradients in between."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, device="cuda")
    twin = copy.deepcopy(model)
    optimizer = optim.AdamW(model, lr=0.01, fused=True, capturable=True)
    other = optim.AdamW(twin, lr=0.01, fused=True)
    x = torch.randn(8, 64, device="cuda")

    def step(m: nn.Module = model, o: Any = optimizer) -> None:
        o.zero_grad()
        m(x).square().mean().backward()
        o.step()

    graph = capture(step)
    for _ in range(3):
        step(twin, other)
    for t in range(3):
        x.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(t)))
        graph.replay()
        step(twin, other)
    step()
    step(twin, other)
    x.mul_(2.0)
    graph.replay()
    step(twin, other)
    same(list(model.parameters()), list(twin.parameters()), 1e-6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("check", [False, "skip"])
@pytest.mark.parametrize("name", [n for n in CAPTURED if n != "shampoo"])
def test_nothing_waits_for_the_device(name: str, check: Any) -> None:
    cls, options = CAPTURED[name]
    dtype = torch.bfloat16 if "8 bit" in name else torch.float32
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48), nn.Linear(48, 32)).to("cuda", dtype)
    rate = torch.tensor(0.01, device="cuda")
    optimizer = cls(model, lr=rate, capturable=True, check_finite=check, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}], ids=str)
def test_a_step_that_is_skipped_on_the_device_changes_nothing(options: dict[str, Any]) -> None:
    ps = parameters()
    optimizer = optim.AdamW(ps, lr=0.01, check_finite="skip", **options)
    run(ps, optimizer, 3)
    before = [p.detach().clone() for p in ps]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    gradients(ps, 9)
    assert ps[4].grad is not None
    ps[4].grad[3, 3] = float("inf")
    optimizer.step()
    same([p.detach() for p in ps], before)
    for index, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(x, state[index][name]) for name, x in kept.items())
    assert optimizer.skipped == 1
    run(ps, optimizer, 1)
    assert optimizer.skipped == 1 and not torch.equal(ps[4], before[4])


def test_a_gradient_scaler_leaves_scale_and_flag_to_the_kernel() -> None:
    results = []
    for make in (
        lambda ps: optim.AdamW(ps, lr=0.01, weight_decay=0.01, fused=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.01, fused=True),
    ):
        ps = parameters()
        optimizer = make(ps)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        for t in range(6):
            scaler.scale(torch.ones((), device="cuda"))
            gradients(ps, t, scale=scaler.get_scale())
            if t == 2:
                ps[2].grad[0, 0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in ps])
        if isinstance(optimizer, optim.AdamW):
            assert optimizer.skipped == 1
            assert int(optimizer.state[ps[2]]["count"]) == 5
    same(*results, 1e-5)


def test_matrices_need_their_own_kernel() -> None:
    with pytest.raises(AxesError, match="mixes entries"):
        optim.Muon(net(torch.float32, "cuda"), fused=True)
    with pytest.raises(AxesError, match="must be beside the parameters"):
        optim.AdamW(parameters(), lr=torch.tensor(0.1), capturable=True)


def test_the_auxiliary_rule_of_a_matrix_rule_can_be_fused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).cuda()
    named = dict(model.named_parameters())
    matrices = {"params": [(n, p) for n, p in named.items() if n in ("0.weight", "2.weight")], "rule": "muon"}
    rest = {"params": [(n, p) for n, p in named.items() if n not in ("0.weight", "2.weight")], "rule": "adamw"}
    optimizer = optim.Muon([matrices, {**rest, "fused": True}], lr=0.01)
    before = [p.detach().clone() for p in named.values()]
    model(torch.randn(4, 8, device="cuda")).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, named.values(), strict=True))


def test_products_whose_numbers_move_are_recorded_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon with every number scheduled: two records in all, and the steps that are launched without any."""
    records: list[int] = []
    record = Replayed._record

    def counted(self: Replayed) -> None:
        records.append(1)
        record(self)

    monkeypatch.setattr(Replayed, "_record", counted)
    moved = []
    for recorded in (True, False):
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(s, device="cuda")) for s in [(512, 1024), (1024, 512), (512, 512)] * 4]
        before = [p.detach().clone() for p in ps]
        optimizer = optim.Muon([{"params": ps, "rule": "muon"}], lr=0.02, weight_decay=0.0)
        if not recorded:
            monkeypatch.setattr(Replayed, "__call__", lambda self: self.function())
            monkeypatch.setattr(Spectral, "moving", lambda self: ())
        for t in range(8):
            c = 1.0 - 0.004 * t if t > 2 else 1.0
            optimizer.param_groups[0].update(ns_coefficients=(3.4445 * c, -4.775 * c, 2.0315 * c), eps=1e-7 * c)
            optimizer.param_groups[0]["momentum"] = 0.95 * c
            for p in ps:
                p.grad = torch.randn_like(p)
            optimizer.step()
        moved.append([p.detach() - x for p, x in zip(ps, before, strict=True)])
    assert len(records) == 2
    for x, y in zip(*moved, strict=True):
        assert float((x - y).norm() / y.norm()) < 2e-2
