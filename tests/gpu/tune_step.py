"""How one token's kernels take their sizes: microseconds by rows of a program, warps and pairs at a time.

python -m tests.gpu.tune_step     B=64, 16 heads of 128, medians of captured launches; about 80 s, most of it compiling
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import torch

from axes.kernels import step
from axes.kernels.attention import decode, decode_carried

B, H, D = 64, 16, 128


def _microseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench_cudagraph

    return 1e3 * float(do_bench_cudagraph(call, rep=20, return_mode="median"))


def _state(dtype: torch.dtype, width: int, turn: bool) -> Callable[[], object]:
    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    state = torch.zeros(B, H, width, D, device="cuda", dtype=dtype)
    q, k, v = draw(B, H, D), draw(B, H, D) / D**0.5, draw(B, H, width)
    beta, g = torch.rand(B, H, device="cuda"), -torch.rand(B, H, device="cuda")
    if turn:
        angle = torch.rand(D // 2, device="cuda")
        return lambda: step.chain_step(state, q, k, v, g=g, turn=angle)
    return lambda: step.chain_step(state, q, k, v, beta=beta, g=g, rule="delta")


def _carried(pairs: int) -> Callable[[], object]:
    one = torch.randn(B, H, 1, D, device="cuda", dtype=torch.bfloat16) / D**0.5
    keys, into = (torch.randn(B, H, n, D, device="cuda") for n in (pairs - 1, pairs))
    values = torch.randn(B, H, pairs, D, device="cuda", dtype=torch.bfloat16)
    return lambda: decode_carried.carry_one(one, keys, one, values, one, one, None, scale=0.1, into=into)


def main() -> None:
    cases = [("delta", torch.float32, D, False), ("delta", torch.bfloat16, D, False)]
    cases += [("turn", torch.float32, 2 * D, True), ("turn", torch.bfloat16, 2 * D, True)]
    with torch.no_grad():
        for name, dtype, width, turn in cases:
            call = _state(dtype, width, turn)
            floor = 2 * B * H * width * D * dtype.itemsize / 4.3e6
            print(f"{name}, state {dtype}: bytes take {floor:.1f}; as it is {_microseconds(call):.1f}", flush=True)
            for rows in (4, 8, 16):
                for warps in (1, 2, 4):
                    sizes = {"BK": D, "BV": rows, "num_warps": warps, "num_stages": 1}
                    with patch.object(step, "settings", lambda *_, sizes=sizes: dict(sizes)):
                        print(f"  rows {rows:2d} warps {warps} {_microseconds(call):7.1f}", flush=True)
        call = _carried(1000)
        floor = B * H * 1000 * D * 10 / 4.3e6
        print(f"carried keys: bytes take {floor:.1f}; as it is {_microseconds(call):.1f}", flush=True)
        for side, warps, stages in product((16, 32, 64), (2, 4, 8), (1, 3)):
            sizes = {"_SIDE": side, "_WARPS": warps, "_STAGES": stages}
            with patch.multiple(decode_carried, **sizes):
                for programs in (264, 4096):
                    with patch.object(decode, "_PROGRAMS", programs):
                        said = f"  pairs {side:2d} warps {warps} stages {stages} programs {programs:4d}"
                        print(f"{said} {_microseconds(call):7.1f}", flush=True)


if __name__ == "__main__":
    main()
