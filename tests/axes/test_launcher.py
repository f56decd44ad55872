"""Launches written into a function give Triton's C function what Triton's own launcher does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from axes.kernels.common import line
from axes.kernels.common.bulk import batch_tiles, head_tiles
from axes.kernels.common.launcher import BELOW_TRITON, Launch
from tests.hopper import NoDevice

pytestmark = pytest.mark.skipif(not BELOW_TRITON, reason="this Triton launches its kernels itself")
GRID, STREAM = (5, 3, 1), 77
META = {"swizzle": 3, "elem_size": 2, "elem_type": 7, "block_size": [1, 64, 64], "fp4_padded": False}


class _Driver(NoDevice):
    """Describes tiles by the arguments that it is given, each time anew."""

    def __init__(self) -> None:
        self.described = 0
        self.utils = SimpleNamespace(fill_tma_descriptor=self._fill, fill_tma_descriptor_tiled=self._fill)

    def _fill(self, *given: Any) -> tuple[Any, ...]:
        self.described += 1
        return "tiles", *[tuple(x) if isinstance(x, list) else x for x in given]

    def get_current_stream(self, device: int) -> int:
        return STREAM


def compiled(signature: dict[int, Any], metas: list[dict[str, Any]], calls: list[Any], scratch: int = 0) -> Any:
    """A kernel as Triton leaves it, but for the C function, which notes what it is given."""
    run = object.__new__(nvidia.CudaLauncher)
    run.__dict__.update(
        num_ctas=1, global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True, gsan_enabled=False,
        launch=nvidia.wrap_handle_tensordesc(lambda *given: calls.append(given), signature, metas),
    )  # fmt: skip
    if not hasattr(nvidia, "make_launcher"):  # from Triton 3.7 on
        run.__dict__.update(arg_annotations=["annotations"], kernel_signature=b"signature")
    made = object.__new__(CompiledKernel)
    made.__dict__.update(
        _run=run, module=1, function=1234, packed_metadata=(4, 1, 96), metadata=SimpleNamespace(tensordesc_meta=metas),
        src=None, name="kernel",
    )  # fmt: skip
    return made


def addresses(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.data_ptr()
    return tuple(map(addresses, x)) if isinstance(x, tuple | list) else x


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    found = _Driver()
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return found


def values(a: Tensor, b: Tensor) -> list[Any]:
    later = b[1]  # which does not begin where its memory does
    return [a, (b, None, (a, later)), head_tiles(a, 64), 7, None, later, 0.5, batch_tiles(b, 64, 64), True, "name", b]


SIGNATURE = dict(
    enumerate([
        "*bf16", ("*bf16", "constexpr", ("*bf16", "*bf16")), "tensordesc<bf16[1, 1, 64, 64],x>", "i32", "constexpr",
        "*bf16", "fp32", "tensordesc<bf16[1, 64, 64],x>", "constexpr", "constexpr", "*bf16",
    ])
)  # fmt: skip


def tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 4, 64, dtype=torch.bfloat16), torch.randn(2, 64, 64, dtype=torch.bfloat16)


def followed(kernel: Any, args: Any = values) -> Any:
    given = tensors()
    recorder = line.Recorder(given)
    recorder.launch(Launch(kernel, GRID[:2]), args(*given), {})
    assert recorder.refused is None
    return line._function(range(2), recorder.steps, (), recorder.roots, torch.device("cpu"), {})


def require_same(found: Any, meant: Any) -> None:
    """What Triton gives, but for hooks that nobody has set."""
    told = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert len(found) == len(meant) and sum(any(x is hook for hook in told) for x in meant) == 2
    for x, y in zip(addresses(found), addresses(meant), strict=True):
        hooked = any(y is hook for hook in told) or type(y).__name__ == "LazyDict"
        assert x is None if hooked else x == y


def test_the_c_function_is_given_the_same(machine: _Driver) -> None:
    calls: list[Any] = []
    kernel = compiled(SIGNATURE, [META, {**META, "swizzle": 2}], calls)
    follow = followed(kernel)
    for given in [tensors() for _ in range(3)]:  # at addresses of their own
        kernel[GRID](*values(*given))
        before = machine.described
        for _ in range(4):
            follow(list(given))
        assert machine.described == before + 2, "the driver describes tiles of an address once"
        meant, *every = calls
        calls.clear()
        for found in every:
            require_same(found, meant)


def test_a_kernel_without_tiles(machine: _Driver) -> None:
    calls: list[Any] = []
    kernel, given = compiled({0: "*bf16", 1: "i32"}, [], calls), tensors()
    kernel[GRID](given[1], 9)
    followed(kernel, lambda a, b: [b, 9])(list(given))
    meant, found = calls
    require_same(found, meant)


def test_hooks_are_told(machine: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    kernel, given = compiled(SIGNATURE, [META, META], calls), tensors()
    follow = followed(kernel)
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
    kernel[GRID](*values(*given))
    follow(list(given))
    found, meant = [[x.get() if type(x).__name__ == "LazyDict" else addresses(x) for x in call] for call in calls]
    assert found == meant
    assert {"name": "kernel", "function": 1234, "stream": STREAM} in found


def test_what_needs_more_is_left_to_triton(machine: _Driver) -> None:
    """Memory of its own, which Triton allocates; descriptors that the driver does not make."""
    calls: list[Any] = []
    for kernel in (compiled(SIGNATURE, [META, META], calls, scratch=16), compiled(SIGNATURE, [], calls)):
        launch = Launch(kernel, GRID[:2])
        recorder = line.Recorder(given := tensors())
        recorder.launch(launch, values(*given), {})
        args = recorder.steps[0].args
        assert launch.text(args, repr, repr) is None
