"""Masses and modes, scans without a matrix for a state, on a GPU against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.entries.modes import modes_chain  # noqa: E402
from axes.kernels.rows.mass import over_mass  # noqa: E402
from axes.kernels.scalar.chain import scalar_chain  # noqa: E402
from axes.kernels.scalar.mass import mass_chain  # noqa: E402

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a whole tensor; angles have 1.1e-5
ENDS = torch.tensor([0, 0, 1, 64, 264, 264, 328])


def walk(token, first: Tensor | None, zero: Tensor, length: int, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token, packed sequences each from its own state."""
    ends, outs, lasts = [0, length] if cu is None else cu.tolist(), [], []
    for u, (a, z) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        state = zero if first is None else first if cu is None else first[u : u + 1]
        for t in range(a, z):
            state, out = token(state, t)
            outs.append(out)
        lasts.append(state)
    return torch.stack(outs, 1), torch.cat(lasts)


def masses(q, k, v, beta=None, g=None, start=None, cu_seqlens=None):
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))

    def token(n, t):
        n = n if g is None else g[:, t, :, None].clamp(min=-100).exp() * n
        n = n + (k[:, t] if beta is None else beta[:, t, :, None] * k[:, t])
        return n, (q[:, t] * n).sum(-1)

    return walk(token, start, torch.zeros_like(k[:, 0]), q.shape[1], cu_seqlens)


def modes(q, k, v, gate, angle, start=None, cu_seqlens=None):
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    factor = torch.exp(torch.complex(gate, angle)).expand(*v.shape[:-1], v.shape[-1] // 2)
    values = torch.complex(*v.chunk(2, -1))

    def rows(z):
        return torch.cat((z.real, z.imag), -1)

    def token(z, t):
        z = torch.complex(*z[..., 0].chunk(2, -1))
        z = factor[:, t] * z + k[:, t] * values[:, t]
        return rows(z)[..., None], q[:, t] * rows(z)

    return walk(token, start, torch.zeros_like(v[:, 0, ..., None]), v.shape[1], cu_seqlens)


def turned(start=None, **given):
    return modes_chain(**given, initial_state=start)


def compare(kernel, recurrence, given: dict[str, Tensor], bound: float, **more) -> None:
    def results(rule, given, hears):
        leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
        out = rule(**leaves, **more)[:2]
        grads = torch.autograd.grad(
            out, list(leaves.values()), [d.to(o.dtype) for d, o in zip(hears, out, strict=True)], allow_unused=True
        )
        return dict(zip(("o", "last", *given), (*out, *grads), strict=True))

    wide = {n: x.double() for n, x in given.items()}
    hears = [torch.randn_like(x) for x in recurrence(**wide, **more)]
    hears[0] = hears[0].to(given["v"].dtype).double()
    want, found = results(recurrence, wide, hears), results(kernel, given, hears)
    for name, w in want.items():
        if w is None:
            continue
        error = (found[name].double() - w).norm() / max(w.norm(), 1e-3 * w.numel() ** 0.5)
        assert error < bound, (name, f"{error:.1e}")


def draw_masses(length, d, dtype, b=2, h=2, hv=2, units=None, bare=False) -> dict[str, Tensor]:
    q, k = (normalize(torch.randn(b, length, h, d, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    given = dict(q=q, k=k, v=torch.zeros(b, length, hv, 8, device="cuda", dtype=dtype))
    if not bare:
        given |= dict(beta=torch.rand(b, length, hv, device="cuda"), g=-torch.rand(b, length, hv, device="cuda") / 8)
        given |= dict(start=torch.randn(units or b, hv, d, device="cuda"))
    return given


def test_what_passes_through_has_the_gradients_of_what_goes_around() -> None:
    """Of reads over their mass, as mLSTM has them; times are printed (-s)."""
    q, k, v = (normalize(torch.randn(8, 4096, 16, 128, device="cuda"), dim=-1).bfloat16() for _ in range(3))
    beta, g = torch.rand(8, 4096, 16, device="cuda"), -torch.rand(8, 4096, 16, device="cuda") / 8
    heard, found = torch.randn_like(v), []
    for through in (False, True):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, beta, g)]

        def call(leaves=leaves, through=through):
            mass, _, *again = mass_chain(*leaves)
            out = scalar_chain(*(again if through else leaves[:2]), *leaves[2:], rule="write")[0]
            return torch.autograd.grad(over_mass(out, mass.unsqueeze(-1), 1.0), leaves, heard)

        found.append(call())
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(10):
            begun.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended))
        print(f"keys and queries pass through {through}: {min(times):.3f} ms")
    for a, b in zip(*found, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_masses(dtype: torch.dtype) -> None:
    for length, d, hv, bare in ((1, 64, 2, False), (200, 128, 2, False), (333, 100, 4, False), (130, 256, 2, True)):
        compare(mass_chain, masses, draw_masses(length, d, dtype, hv=hv, bare=bare), BOUNDS[dtype])
    given = draw_masses(328, 64, dtype, b=1, units=6)
    compare(mass_chain, masses, given, BOUNDS[dtype], cu_seqlens=ENDS.cuda())


def draw_modes(length, d, dtype, shared=False, b=2, h=2, hv=2, units=None) -> dict[str, Tensor]:
    lead = () if shared else (b, length)
    q, k = (torch.randn(b, length, h, 1, device="cuda").to(dtype) for _ in range(2))
    given = dict(q=q, k=k, v=torch.randn(b, length, hv, d, device="cuda").to(dtype))
    given |= dict(gate=-torch.rand(*lead, hv, d // 2, device="cuda") / 8)
    given |= dict(angle=9 * torch.randn(*lead, hv, d // 2, device="cuda"))
    return given | dict(start=torch.randn(units or b, hv, d, 1, device="cuda"))


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_modes(dtype: torch.dtype, shared: bool) -> None:
    for length, d, hv in ((1, 64, 2), (200, 128, 2), (333, 6, 4), (130, 200, 2)):
        compare(turned, modes, draw_modes(length, d, dtype, shared, hv=hv), BOUNDS[dtype])
    given = draw_modes(328, 64, dtype, shared, b=1, units=6)
    compare(turned, modes, given, BOUNDS[dtype], cu_seqlens=ENDS.cuda())


@pytest.mark.parametrize("angle", (0.0, 1e-3, 40.0, 1e4))
def test_angles_lose_whole_turns_alone(angle: float) -> None:
    """Of a float32 angle the distance to the nearest turn is what counts, however many turns it has."""
    given = draw_modes(64, 64, torch.float32)
    given["angle"] = angle + torch.rand_like(given["angle"])
    compare(turned, modes, given, 1e-5 if angle < 1e3 else 1e-3)


def test_repeat_bit_for_bit_on_a_full_chip() -> None:
    for kernel, given in (
        (mass_chain, draw_masses(1500, 128, torch.bfloat16, b=8, h=16, hv=16)),
        (modes_chain, draw_modes(1500, 128, torch.bfloat16, b=8, h=16, hv=16)),
    ):
        first = None
        for _ in range(3):
            leaves = [x.detach().requires_grad_() for x in given.values()]
            out = kernel(*leaves)
            found = [out[0], *torch.autograd.grad(out[0].sum(), leaves, allow_unused=True, materialize_grads=True)]
            assert first is None or all(torch.equal(x, y) for x, y in zip(first, found, strict=True))
            first = found
