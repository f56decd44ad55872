"""Gradient noise scale and update ratios against exact enumeration, known covariances and plain float64 geometry."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError
from axes.optim.tools.diagnostics import NoiseEstimate, NoiseScale, UpdateRatios
from tests.processes import joined, run

Measured = tuple[float, float]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_page_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "docs/optimizers.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out


def measure(noise: NoiseScale, w: Tensor, parts: list[Tensor]) -> None:
    """One step on examples whose gradients are their rows: the loss of x at w is w . x."""
    total = sum(len(part) for part in parts)
    for part in parts:
        ((part @ w).mean() * (len(part) / total)).backward()
        noise.micro_batch(len(part))
    noise.step()
    w.grad = None


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (1, 2), (2, 1, 1)])
def test_both_estimates_are_unbiased(sizes: tuple[int, ...]) -> None:
    """Their mean over every batch that can be drawn from a small population is exact."""
    examples = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, 1.0]], dtype=torch.float64)
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    noise = NoiseScale([w], retention=0.0)
    found = []
    for drawn in product(range(3), repeat=sum(sizes)):
        measure(noise, w, list(examples[list(drawn)].split(sizes)))
        estimate = noise.read()
        found.append([estimate.squared_gradient, estimate.trace])
    mean = examples.mean(0)
    exact = [float(mean @ mean), float((examples - mean).square().sum() / 3)]
    assert torch.tensor(found, dtype=torch.float64).mean(0).tolist() == pytest.approx(exact, rel=1e-12)


def test_a_quadratic_with_known_covariance() -> None:
    """l(w; z) = (w - z)^T H (w - z) / 2 with z of covariance C: G = H w and Sigma = H C H."""
    torch.manual_seed(0)
    hessian = torch.diag(torch.tensor([3.0, 1.0, 0.3, 0.1], dtype=torch.float64))
    spread = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)  # standard deviations of z
    w = torch.tensor([0.4, -0.3, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    noise = NoiseScale([w], retention=0.999)
    for _ in range(500):
        for part in (torch.randn(64, 4, dtype=torch.float64) * spread).split(8):
            errors = w - part
            (0.5 * ((errors @ hessian) * errors).sum(-1).mean() / 8).backward()
            noise.micro_batch(8)
        noise.step()
        w.grad = None
    exact = float((hessian.diag() * spread).square().sum() / (hessian @ w.detach()).square().sum())
    estimate = noise.read()
    assert estimate.noise_scale == pytest.approx(exact, rel=0.05)
    assert estimate.steps == 500


def test_averages_are_of_numerator_and_denominator() -> None:
    torch.manual_seed(1)
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    noise, each = NoiseScale([w], retention=0.5), NoiseScale([w], retention=0.0)
    single: list[Measured] = []
    for _ in range(4):
        parts = list(torch.randn(4, 3, dtype=torch.float64).split(2))
        for part in parts:
            ((part @ w).mean() / 2).backward()
            noise.micro_batch(2)
            each.micro_batch(2)
        noise.step()
        each.step()
        w.grad = None
        single.append((each.read().squared_gradient, each.read().trace))
    weights = torch.tensor([0.125, 0.25, 0.5, 1.0], dtype=torch.float64)
    expected = (weights / weights.sum()) @ torch.tensor(single, dtype=torch.float64)
    assert [noise.read().squared_gradient, noise.read().trace] == pytest.approx(expected.tolist(), rel=1e-12)
    again = NoiseScale([w], retention=0.5)
    again.load_state_dict(noise.state_dict())
    assert again.read() == noise.read()
    with pytest.raises(AxesError, match="retention 0.5"):
        each.load_state_dict(noise.state_dict())


def test_gradients_in_16_bits_and_a_loss_scale() -> None:
    torch.manual_seed(2)
    examples = torch.randn(4, 8).half().double()
    exact, half = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float16)
    estimates = []
    for w, scale in ((exact, 1.0), (half, 64.0)):
        w.requires_grad_()
        noise = NoiseScale([w], retention=0.0)
        for part in examples.to(w.dtype).split(2):
            ((part @ w).mean() / 2 * scale).backward()
            noise.micro_batch(2, loss_scale=scale)
        assert w.grad is not None
        w.grad /= scale
        noise.step()
        estimates.append(noise.read())
    assert estimates[0].trace == pytest.approx(estimates[1].trace, rel=5e-3)
    assert estimates[0].squared_gradient == pytest.approx(estimates[1].squared_gradient, rel=5e-2)


def test_steps_and_examples_against_batch_size() -> None:
    estimate = NoiseEstimate(squared_gradient=0.5, trace=50.0, steps=1)
    assert estimate.critical_batch_size == 100.0
    assert (estimate.steps_over_fewest(100), estimate.examples_over_fewest(100)) == (2.0, 2.0)
    for batch in (1.0, 30.0, 1e4):  # eq. 2.11
        product_ = (estimate.steps_over_fewest(batch) - 1) * (estimate.examples_over_fewest(batch) - 1)
        assert product_ == pytest.approx(1.0)
    assert NoiseEstimate(-0.1, 50.0, 1).noise_scale == math.inf
    assert NoiseEstimate(0.1, -1e-9, 1).noise_scale == 0.0


def test_what_is_forgotten_is_told() -> None:
    w = torch.zeros(2, requires_grad=True)
    noise = NoiseScale([w])
    with pytest.raises(AxesError, match="no step was measured"):
        noise.read()
    with pytest.raises(AxesError, match="run backward"):
        noise.micro_batch(1)
    w.sum().backward()
    with pytest.raises(AxesError, match="last one included"):
        noise.step()
    with pytest.raises(AxesError, match="second gradient"):
        w.sum().backward()
    with pytest.raises(AxesError, match="at least 1"):
        noise.micro_batch(0)
    noise.micro_batch(1)
    with pytest.raises(AxesError, match="at least two"):
        noise.step()
    w.sum().backward()
    noise.micro_batch(1)
    w.grad = None
    with pytest.raises(AxesError, match="before zero_grad"):
        noise.step()
    with pytest.raises(AxesError, match="requires a gradient"):
        NoiseScale([torch.zeros(2)])
    with pytest.raises(AxesError, match=r"\[0, 1\)"):
        NoiseScale([w], retention=1.0)


def test_removed_hooks_leave_nothing_behind() -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model)
    with NoiseScale(model), UpdateRatios(optimizer):
        assert optimizer._optimizer_step_pre_hooks and model.weight._backward_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not model.weight._backward_hooks and not model.bias._backward_hooks


def descend(watch: Callable[[torch.optim.Optimizer], Any]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = optim.Muon(model, lr=0.05)
    watching = watch(optimizer)
    x = torch.randn(7, 4)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], watching


def test_watching_changes_nothing_and_measures_each_nth_step() -> None:
    alone, _ = descend(lambda optimizer: None)
    watched, ratios = descend(lambda optimizer: UpdateRatios(optimizer, every=2, keep=2))
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert [motions.step for motions in ratios.history()] == [3, 5]
    last = ratios.read()
    assert [(row.name, row.rule) for row in last.groups] == [("group 0", "muon"), ("group 1", "adamw")]
    assert {row.name for row in last.parameters} == {"0.weight", "2.weight", "0.bias", "2.bias"}
    assert json.loads(json.dumps(last.as_dict()))["step"] == 5
    assert last.table().row_count == 6


@given(st.integers(0, 10**6), st.sampled_from((1e-5, 1e-3, 0.3, 3.0)), st.sampled_from(("float64", "complex64")))
def test_ratio_and_angle(seed: int, size: float, dtype: str) -> None:
    """Against norms and arc cosines of the flattened weights in float64."""
    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    shapes = ((3, 4), (5,), ())
    old = [torch.randn(s, generator=generator, dtype=kind) for s in shapes]
    parameters = [nn.Parameter(x.clone()) for x in old]
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 2 * size}], lr=size)
    watch = UpdateRatios(optimizer)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=kind)
    optimizer.step()
    measured = watch.read()

    def flat(tensors: Any) -> Tensor:
        return torch.cat([torch.view_as_real(x.detach().to(torch.complex128)).flatten() for x in tensors])

    def expected(before: list[Tensor], after: list[Any]) -> Measured:
        a, b = flat(before), flat(after)
        distance = a / a.norm() - b / b.norm()
        return float((b - a).norm() / a.norm()), 2 * math.asin(min(1.0, float(distance.norm()) / 2))

    pairs = list(zip(measured.parameters, zip(old, parameters, strict=True), strict=True))
    near: Any = lambda x: pytest.approx(x, rel=1e-3 if kind.is_complex else 1e-7, abs=1e-9)  # noqa: E731
    for row, (before, after) in pairs:
        assert (row.ratio, row.angle) == near(expected([before], [after]))
    assert (measured.groups[0].ratio, measured.groups[0].angle) == near(expected(old[:2], parameters[:2]))


def test_a_tiny_turn_in_float32_keeps_its_digits() -> None:
    """A cosine in float32 would round to 1."""
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([w], lr=1.0)
    watch = UpdateRatios(optimizer)
    w.grad = torch.tensor([-4.0, 3.0]) * 2**-16
    optimizer.step()
    row = watch.read().parameters[0]
    assert (row.weight, row.ratio) == (5.0, 2**-16)
    assert row.angle == pytest.approx(math.atan(2**-16), rel=1e-6)
    frozen = nn.Parameter(torch.zeros(2))
    still = torch.optim.SGD([frozen], lr=1.0)
    watch = UpdateRatios(still)
    still.step()
    assert (watch.read().parameters[0].ratio, watch.read().parameters[0].angle) == (0.0, 0.0)
    frozen.grad = torch.ones(2)
    still.step()
    assert watch.read().parameters[0].ratio == math.inf
    with pytest.raises(AxesError, match="at least 1"):
        UpdateRatios(still, every=0)
    with pytest.raises(AxesError, match="no step"):
        UpdateRatios(still).read()


def _measured() -> list[float]:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    rank = dist.get_rank()
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
        model.bias.zero_()
    parallel = nn.parallel.DistributedDataParallel(model)
    noise = NoiseScale(parallel, retention=0.0)
    for part in _examples()[rank].split(2):
        (parallel(part).square().sum(-1).mean() / 2).backward()
        noise.micro_batch(len(part))
    noise.step()
    estimate = noise.read()

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    shards = nn.Parameter(distribute_tensor(_weights(), mesh, [Shard(0)]))
    with pytest.raises(AxesError, match="sharded"):
        NoiseScale([shards])
    optimizer = torch.optim.SGD([shards], lr=0.1)
    watch = UpdateRatios(optimizer)
    shards.grad = distribute_tensor(_weights().cos(), mesh, [Shard(0)])
    assert isinstance(shards.grad, DTensor)
    optimizer.step()
    row = watch.read().parameters[0]
    return [estimate.squared_gradient, estimate.trace, row.weight, row.ratio, row.angle]


def _examples() -> Tensor:
    return torch.sin(torch.arange(24.0, dtype=torch.float64)).reshape(2, 4, 3)


def _weights() -> Tensor:
    return torch.arange(1.0, 16.0, dtype=torch.float64).reshape(5, 3)


def test_two_processes_measure_what_one_does(tmp_path: Path) -> None:
    """DistributedDataParallel with accumulation, and a sharded parameter of unequal shards."""
    run(__file__, tmp_path, 2)
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
        model.bias.zero_()
    noise = NoiseScale(model, retention=0.0)
    for part in _examples().flatten(0, 1).split(2):
        (model(part).square().sum(-1).mean() / 4).backward()
        noise.micro_batch(len(part))
    noise.step()
    w = nn.Parameter(_weights())
    optimizer = torch.optim.SGD([w], lr=0.1)
    watch = UpdateRatios(optimizer)
    w.grad = _weights().cos()
    optimizer.step()
    row = watch.read().parameters[0]
    expected = [noise.read().squared_gradient, noise.read().trace, row.weight, row.ratio, row.angle]
    for rank in "01":
        assert json.loads((tmp_path / rank).read_text()) == pytest.approx(expected, rel=1e-12)


if __name__ == "__main__":
    with joined() as (folder, _):
        (folder / sys.argv[1]).write_text(json.dumps(_measured()))
