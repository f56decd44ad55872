"""Stored forms of parameters and states: exactness, bounds, random bits, and what optimizers make of them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError
from axes.optim.engine import stored
from axes.programs.storage import FORMS, QUANTUM, philox, stochastic_bfloat16
from tests.interpreter import interpret
from tests.optim.table import ENTRYWISE, Instance, net, same, values

BITS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)
# rules whose weights are the parameter, not a dual of it or an average beside it
EXACT = [i for i in ENTRYWISE if not i.transcendental and i.cls not in (optim.ScheduleFree, optim.ASGD)]
STORED: tuple[dict[str, Any], ...] = (
    {"master": "32bit"},
    {"master": "24bit"},
    {"rounding": "stochastic", "seed": 3},
    {"moments": "8bit"},
    {"master": "24bit", "moments": "8bit", "rounding": "stochastic"},
)


def numbers(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


@given(BITS)
def test_32_bits_come_back_exactly_and_the_parameter_is_the_nearest_bfloat16(bits: list[int]) -> None:
    x = numbers(bits)
    high, low = FORMS["split-16"].encode(x, None)
    back = FORMS["split-16"].decode(high, low)
    real = x == x
    assert torch.equal(back[real], x[real]) and bool(back[~real].isnan().all()) and bool(high[~real].isnan().all())
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[real & ~tie], x.bfloat16()[real & ~tie])


@given(BITS)
def test_24_bits_are_the_nearest(bits: list[int]) -> None:
    x = numbers(bits)
    x = x[x.abs() < 1e38]
    high, low = FORMS["split-8"].encode(x, None)
    back = FORMS["split-8"].decode(high, low)
    below = (x.view(torch.int32) & -0x100).view(torch.float32)
    above = ((x.view(torch.int32) & -0x100) + 0x100).view(torch.float32)
    best = torch.minimum((x - below).abs(), (x - above).abs())
    assert torch.equal((back - x).abs(), best)
    again = FORMS["split-8"].decode(*FORMS["split-8"].encode(back, None))
    assert torch.equal(again, back)


@pytest.mark.parametrize("form", ["split-16", "split-8"])
def test_what_is_not_finite_stays_visible(form: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.0])
    quiet = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # a GPU's own
    for y in (x, quiet):
        high, low = FORMS[form].encode(y, None)
        for z in (high.float(), FORMS[form].decode(high, low)):
            torch.testing.assert_close(z, y, equal_nan=True)


@given(st.integers(0, 10**6), st.integers(1, 700), st.floats(-30, 30))
def test_8_bit_codes_keep_roots_to_half_a_level(seed: int, size: int, scale: float) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 10.0**scale
    x[::7] = 0.0
    for form, levels, power, y in (("signed-8", 127, 0.5, x), ("root-8", 255, 0.25, x * x)):
        y = y.clamp(max=1e37)
        code, unit = FORMS[form].encode(y, None)
        back = FORMS[form].decode(code, unit)
        assert code.shape == y.shape and unit.shape == (-(-size // QUANTUM),)
        assert bool(((back == 0) == (y == 0)).all() if form == "root-8" else (back * y >= 0).all())
        top = torch.nn.functional.pad(y.abs().double(), (0, -size % QUANTUM)).view(-1, QUANTUM).amax(1)
        top = top.clamp_min(7.6e-37 * levels ** (1 / power)).repeat_interleave(QUANTUM)[:size] ** power
        error = (back.abs().double() ** power - y.abs().double() ** power).abs() / top
        bound = torch.where((code == 1) & (form == "root-8"), 1.0, 0.5) / levels
        assert bool((error <= bound * 1.001).all())
        again = FORMS[form].encode(back, None)
        assert torch.equal(again[0], code)


def test_an_8_bit_denominator_never_vanishes() -> None:
    x = torch.tensor([1.0, 1e-20, 0.0, 1e-37])
    back = FORMS["root-8"].decode(*FORMS["root-8"].encode(x, None))
    assert bool((back[[1, 3]] > 0).all()) and back[2] == 0


def test_an_8_bit_block_hides_nothing() -> None:
    for bad in (float("nan"), float("inf")):
        for form in ("signed-8", "root-8"):
            x = torch.rand(300)
            x[5] = bad
            back = FORMS[form].decode(*FORMS[form].encode(x, None))
            assert not bool(back[5].isfinite()) and bool(back[QUANTUM:].isfinite().all())


def test_the_random_words_are_philox() -> None:
    """Known answers of Philox4x32 with 7 rounds, from the authors' library."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for (c0, c1, c2, c3, k0, k1), word in (
        ((0,) * 6, 0x5F6FB709),
        ((0xFFFFFFFF,) * 6, 0x5207DDC2),
        (pi, 0x4DFCCABA),
    ):
        place = torch.tensor([c0 + (c1 << 32) - (1 << 64 if c1 >> 31 else 0)])
        assert int(philox(place, c2, c3, k0 + (k1 << 32))) == word


def test_random_rounding_takes_a_neighbour_and_is_right_on_average() -> None:
    x = torch.linspace(1.0, 1.015, 50)[:, None].expand(50, 4000).contiguous()
    word = philox(torch.arange(x.numel()).view_as(x), 1, 0, 0)
    y = stochastic_bfloat16(x, word).float()
    assert bool(((y - x).abs() < 2**-7).all())
    assert float((y.mean(1) - x[:, 0]).abs().max()) < 4 * 2**-7 / 2 / 4000**0.5
    z = FORMS["split-8"].decode(*FORMS["split-8"].encode(x, word))
    assert float((z.mean(1) - x[:, 0]).abs().max()) < 1e-6


def drive(model: nn.Module, optimizer: Any, steps: int = 5, start: int = 0) -> None:
    """Steps with gradients that do not depend on the parameters."""
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(t)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("instance", EXACT, ids=str)
def test_a_32_bit_master_is_a_float32_run(instance: Instance, foreach: bool) -> None:
    low, high = net(torch.bfloat16), net(torch.float32)
    high.load_state_dict(low.state_dict())
    exact = instance.cls(high, lr=0.01, foreach=foreach)
    kept = instance.cls(low, lr=0.01, foreach=foreach, master="32bit")
    for t in range(4):
        drive(low, kept, 1, t)
        for p, q in zip(low.parameters(), high.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        exact.step()
    for p, q in zip(low.parameters(), high.parameters(), strict=True):
        if p.numel():
            assert torch.equal(stored.weights(p, kept.state[p]).float(), q)
            torch.testing.assert_close(p.float(), q.detach(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("options", STORED, ids=str)
@pytest.mark.parametrize("instance", [i for i in EXACT if i.cls in (optim.AdamW, optim.SGD, optim.Lion)], ids=str)
def test_batched_and_interpreted_store_the_same(instance: Instance, options: dict[str, Any]) -> None:
    """Codes may differ where a number lies on the border of two."""
    found = []
    for foreach in (False, True):
        model = net(torch.bfloat16)
        optimizer = instance.cls(model, lr=0.01, foreach=foreach, **options)
        drive(model, optimizer, 3)
        found.append((list(model.parameters()), [optimizer.state[p] for p in model.parameters()]))
    for p, q, a, b in zip(found[0][0], found[1][0], found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=2**-9)
        assert a.keys() == b.keys()
        for name, x in a.items():
            assert x.dtype == b[name].dtype
            if x.dtype in (torch.int8, torch.uint8) and not name.endswith(".low"):
                assert int((x.int() - b[name].int()).abs().max()) <= 1


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", STORED, ids=str)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.Lion])
def test_resuming_is_exact_and_nothing_is_cast(cls: Any, options: dict[str, Any], foreach: bool) -> None:
    whole, part, resumed = (net(torch.bfloat16) for _ in range(3))
    drive(whole, cls(whole, lr=0.01, foreach=foreach, **options), 6)
    first = cls(part, lr=0.01, foreach=foreach, **options)
    drive(part, first, 3)
    file = io.BytesIO()
    torch.save({"model": part.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    second = cls(resumed, lr=0.5, foreach=foreach)  # how a state is stored is in the file
    second.load_state_dict(saved["optimizer"])
    for p, q in zip(part.parameters(), resumed.parameters(), strict=True):
        assert first.state[p].keys() == second.state[q].keys()
        for name, value in first.state[p].items():
            assert second.state[q][name].dtype == value.dtype and torch.equal(second.state[q][name], value)
    drive(resumed, second, 3, start=3)
    same(values(whole), values(resumed))
    twin, model = copy.deepcopy((second, resumed))
    drive(model, twin, 1, 6)
    drive(resumed, second, 1, 6)
    same(values(model), values(resumed))


def test_bytes_of_a_parameter() -> None:
    p = nn.Parameter(torch.zeros(64, 256, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], master="24bit", moments="8bit")
    shaped = sum(x.numel() * x.element_size() for x in optimizer.state[p].values() if x.numel() > 1)
    assert shaped == p.numel() * 3 + 2 * 64 * 4  # 8 bits each for master and two moments, two units a row


def test_small_steps_are_not_lost() -> None:
    """An update below half a unit of bfloat16 vanishes when rounded to nearest."""
    moved = {}
    for name, options in {"nearest": {}, "random": {"rounding": "stochastic"}, "master": {"master": "24bit"}}.items():
        p = nn.Parameter(torch.ones(400, dtype=torch.bfloat16))
        optimizer = optim.SGD([p], lr=1e-4, momentum=0.0, **options)
        for _ in range(200):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[name] = 1.0 - p.detach().double().mean().item()
    assert moved["nearest"] == 0.0
    assert abs(moved["random"] - 0.02) < 0.001 and abs(moved["master"] - 0.02) < 0.004


@pytest.mark.parametrize("cls", [optim.AdamW, optim.Lion, optim.SGD])
def test_8_bit_moments_train_as_well(cls: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    y = torch.tanh(x @ torch.randn(16, 4))
    losses = {}
    for moments in (None, "8bit"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        lr = {optim.AdamW: 3e-3, optim.Lion: 1e-3, optim.SGD: 0.05}[cls]
        optimizer = cls(model, lr=lr, moments=moments)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        losses[moments] = loss.item()
    assert losses["8bit"] < 1.15 * losses[None] + 1e-3, losses


KERNEL = """
import torch
from axes import optim
from axes.programs.storage import FORMS
from axes.errors import AxesError
from axes.optim.engine import stored
from tests.optim.table import ENTRYWISE, net, same, train, values
from tests.optim.test_precision import STORED, drive

for instance in [i for i in ENTRYWISE if not i.transcendental]:  # the interpreter lacks their functions
    for options in instance.configurations[:1]:
        results = []
        for fused in (True, False):
            model = net(torch.float32)
            train(model, instance.cls(model, lr=0.01, fused=fused, foreach=None if fused else False, **options), 2)
            results.append(values(model))
        same(*results, 3e-6)
for options in (STORED[1], STORED[4]):
    found = []
    for fused in (True, False):
        model = net(torch.bfloat16)
        optimizer = optim.AdamW(model, lr=0.01, fused=fused, **options)
        drive(model, optimizer, 2)
        assert all(int(kept["count"]) == 2 for p, kept in optimizer.state.items())
        found.append((list(model.parameters()), [optimizer.state[p] for p in model.parameters()]))
    for p, q, a, b in zip(found[0][0], found[1][0], found[0][1], found[1][1], strict=True):
        if "master" in options or "rounding" in options:  # the interpreter truncates to bfloat16
            torch.testing.assert_close(p, q, rtol=2**-7, atol=2**-9)
        assert a.keys() == b.keys()
        for name, x in a.items():
            if x.dtype in (torch.int8, torch.uint8) and not name.endswith(".low"):
                assert int((x.int() - b[name].int()).abs().max()) <= 1
model = net(torch.float32)
optimizer = optim.AdamW(model, fused=True, check_finite="skip")
train(model, optimizer, 2)
before, count = values(model), {p: int(s["count"]) for p, s in optimizer.state.items()}
model.first.bias.grad[0] = float("nan")
optimizer.step()
same(before, values(model))
assert optimizer.skipped == 1 and count == {p: int(s["count"]) for p, s in optimizer.state.items()}
optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
twin = net(torch.float32)
reference = optim.AdamW(twin)
train(twin, reference, 2)
for p, q in zip(model.parameters(), twin.parameters(), strict=True):
    if p.grad is not None:
        p.grad = torch.ones_like(p) * 4.0
        q.grad = torch.ones_like(q)
optimizer.step()
reference.step()
same(values(model), values(twin), 1e-5)
"""


def test_the_kernel_in_the_interpreter() -> None:
    interpret(KERNEL)


def test_a_state_must_have_the_forms_that_its_group_names() -> None:
    model = net(torch.bfloat16)
    optimizer = optim.AdamW(model, master="24bit", moments="8bit")
    drive(model, optimizer, 1)
    saved = optimizer.state_dict()
    for change, message in (
        (lambda kept, group: kept.pop("via.0.theta.unit"), r"no via\.0\.theta\.unit"),
        (lambda kept, group: group.update(moments=None), r"has via.*\.unit, which its group's master and moments"),
        (lambda kept, group: kept.update({"via.0.theta": kept["via.0.theta"].float()}), "has dtype torch.float32"),
        (lambda kept, group: group.update(master="32bit", moments=None), r"\.unit"),
    ):
        wrong = copy.deepcopy(saved)
        change(wrong["state"][0], wrong["param_groups"][0])  # type: ignore[no-untyped-call]
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(AxesError, match=message):
            optimizer.load_state_dict(wrong)
        for index, kept in optimizer.state_dict()["state"].items():
            assert all(torch.equal(x, before["state"][index][name]) for name, x in kept.items())
