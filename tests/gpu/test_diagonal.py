"""Gated linear attention (one decay a channel) on a GPU against a float64 token loop: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from axes.kernels.diagonal import hopper as hopper_diagonal  # noqa: E402
from axes.kernels.diagonal.chain import diagonal_chain  # noqa: E402

INPUTS = ("q", "k", "v", "g", "beta", "start", "bonus")
NAMES = ("o", "final", *(f"d{n}" for n in INPUTS))
# relative errors of a whole tensor
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# what a token reads of its own write cancels in dg, and under fast decay it is most of what is read
LOOSE = {"steep": 2}
Inputs = dict[str, Tensor]


def chain(q, k, v, g, beta=None, start=None, bonus=None, cu_seqlens=None, rule="write"):
    return diagonal_chain(q, k, v, g, beta, initial_state=start, bonus=bonus, cu_seqlens=cu_seqlens, rule=rule)


def token_loop(q, k, v, g, beta=None, start=None, bonus=None, cu_seqlens=None, rule="write"):
    """The recurrence, token by token, in the inputs' precision."""
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    k = -torch.expm1(g) * k if rule == "average" else k
    if cu_seqlens is not None:
        cuts = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
        cut = [
            token_loop(
                *(x[:, a:z] for x in (q, k, v, g)),
                None if beta is None else beta[:, a:z],
                None if start is None else start[u : u + 1],
                bonus,
            )
            for u, (a, z) in enumerate(cuts)
        ]
        return torch.cat([o for o, _ in cut], 1), torch.cat([s for _, s in cut])
    state = q.new_zeros(q.shape[0], v.shape[2], v.shape[3], q.shape[3]) if start is None else start
    written = v if beta is None else v * beta[..., None]
    decay = g.clamp(min=-100).exp()
    outs = [torch.zeros_like(v[:, 0:0])]
    for t in range(q.shape[1]):
        before, wrote = state, written[:, t, :, :, None] * k[:, t, :, None, :]
        state = state * decay[:, t, :, None, :] + wrote
        read = state if bonus is None else before + wrote * bonus[:, None]
        outs.append((read @ q[:, t, :, :, None])[:, None, ..., 0])
    return torch.cat(outs, 1), state


class Rounded(torch.autograd.Function):
    """Products of operands rounded to a dtype, forwards and backwards; sums in float32."""

    @staticmethod
    def forward(ctx, a, b, dtype):
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a.to(dtype).float() @ b.to(dtype).float()

    @staticmethod
    def backward(ctx, dout):
        a, b, dout = (x.to(ctx.dtype).float() for x in (*ctx.saved_tensors, dout))
        return dout @ b.mT, a.mT @ dout, None


def eager_chunks(q, k, v, g, beta, start, dtype, chunk=64):
    """The same chunk algorithm in PyTorch for mild gates."""
    outs, state, dot = [], start, lambda a, b: Rounded.apply(a, b, dtype)
    for x in zip(*(x.transpose(1, 2).float().split(chunk, 2) for x in (q, k, beta[..., None] * v, g)), strict=True):
        queries, keys, values, log = x
        run = log.cumsum(2)
        total = run[:, :, -1:]
        scores = dot(queries * run.exp(), (keys * (-run).exp()).mT).tril()
        outs.append(dot(queries * run.exp(), state.mT) + dot(scores, values))
        state = state * total.exp() + dot(values.mT, keys * (total - run).exp())
    return torch.cat(outs, 2).transpose(1, 2).to(dtype), state


def draw(length, d_k, d_v, dtype, kind="mixed", b=2, h=2, hv=None, logs=torch.float32, units=None) -> Inputs:
    hv = hv or h
    q, k = (normalize(torch.randn(b, length, h, d_k, device="cuda"), dim=-1) for _ in range(2))
    v = torch.randn(b, length, hv, d_v, device="cuda")
    z = torch.randn(b, length, hv, d_k, device="cuda")
    g = logsigmoid(z) / 16
    beta = 2 * torch.rand(b, length, hv, device="cuda")
    start = torch.randn(units or b, hv, d_v, d_k, device="cuda") / d_k**0.5
    if kind == "mixed":  # channels from open to fast, some tokens nearly closed
        g = -torch.exp(torch.linspace(-8, 1, d_k, device="cuda")) * torch.rand_like(z)
        g = torch.where(torch.rand_like(z) < 0.01, -15.0, g)
    if kind == "open":
        g = -1e-6 * torch.rand_like(z)
    if kind == "steep":  # the most that counts as mild
        g = -0.9 + 0.05 * torch.rand_like(z)
    if kind == "closed":
        g = torch.where(torch.rand_like(z) < 0.2, -1e3, -20 * torch.rand_like(z))
    if kind == "shut channels":
        g[..., ::3] = -1e3
    if kind == "integers":
        q, k, v = (torch.randint(-3, 4, x.shape, device="cuda").float() for x in (q, k, v))
        g, beta, start = torch.where(z < -2, -1e3, 0.0), torch.ones_like(beta), torch.randint_like(start, -3, 4)
    if kind == "ones":
        q, k, v, beta, start = (torch.ones_like(x) for x in (q, k, v, beta, start))
        g = torch.zeros_like(g)
    q, k, v, g = (x.to(d) for x, d in zip((q, k, v, g), (dtype, dtype, dtype, logs), strict=True))
    out = dict(q=q, k=k, v=v, g=g, beta=beta, start=start)
    return {n: x for n, x in out.items() if not (kind == "bare" and n in ("beta", "start"))}


def run(rule, inputs: Inputs, do: Tensor, dfinal: Tensor, /, **more) -> dict[str, Tensor]:
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    o, final = rule(**leaves, **more)
    grads = torch.autograd.grad((o, final), list(leaves.values()), (do.to(o.dtype), dfinal.to(final.dtype)))
    return {"o": o, "final": final, **{f"d{n}": x for n, x in zip(leaves, grads, strict=True)}}


def gradients_of(inputs: Inputs, units: int | None = None) -> tuple[Tensor, Tensor]:
    q, v = inputs["q"], inputs["v"]
    do = torch.randn_like(v)
    return do, torch.randn(units or q.shape[0], v.shape[2], v.shape[3], q.shape[3], device="cuda")


def errors(inputs: Inputs, units: int | None = None, rules=(chain,), **more) -> list[dict[str, float]]:
    """Relative errors of every tensor, one dictionary a rule."""
    given = gradients_of(inputs, units)
    want = run(token_loop, {n: x.double() for n, x in inputs.items()}, *(x.double() for x in given), **more)
    out = []
    for rule in rules:
        got = run(rule, inputs, *given, **more)
        for name, w in want.items():
            assert got[name].shape == w.shape and torch.isfinite(got[name]).all(), name
        scales = {n: max(w.norm().item(), 1e-3 * w.numel() ** 0.5) for n, w in want.items()}
        out.append({n: (got[n].double() - w).norm().item() / scales[n] for n, w in want.items()})
    return out


def check(inputs: Inputs, bound: float, units: int | None = None, **more) -> None:
    (found,) = errors(inputs, units, **more)
    print({n: f"{e:.1e}" for n, e in found.items()})
    assert max(found.values()) < bound, {n: f"{e:.1e}" for n, e in found.items() if e >= bound}


def with_bonus(inputs: Inputs) -> Inputs:
    """Read before the token's own gate and write, which counts by itself (RWKV-6)."""
    g = inputs["g"]
    return inputs | {"bonus": torch.randn(g.shape[2:], device="cuda")}


def without_strengths(inputs: Inputs) -> Inputs:
    """Other kernels compute these on a Hopper GPU."""
    return {n: x for n, x in inputs.items() if n != "beta"}


@pytest.mark.parametrize("length", (1, 2, 63, 64, 65, 1000))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    check(draw(length, 64, 64, dtype), BOUNDS[dtype])
    check(without_strengths(draw(length, 64, 128, dtype)), BOUNDS[dtype])


def test_four_thousand_tokens() -> None:
    check(draw(4096, 128, 128, torch.bfloat16, "bare", b=1, h=1), BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_rounds_no_more_than_the_same_algorithm_in_pytorch(dtype: torch.dtype) -> None:
    def eager(**given):
        return eager_chunks(**given, dtype=dtype)

    found, bar = errors(draw(500, 128, 128, dtype, "mild"), rules=(chain, eager))
    print({n: f"{found[n]:.1e} of {bar[n]:.1e}" for n in bar})
    assert all(found[n] <= 1.5 * bar[n] + 1e-6 for n in bar), (found, bar)


SIDES = ((1, 1), (16, 128), (128, 16), (100, 100), (64, 256), (256, 64), (256, 256))


@pytest.mark.parametrize(("d_k", "d_v"), SIDES)
def test_sides(d_k: int, d_v: int) -> None:
    for kind in ("mixed", "steep"):
        check(draw(130, d_k, d_v, torch.bfloat16, kind), BOUNDS[torch.bfloat16] * LOOSE.get(kind, 1))


@pytest.mark.parametrize(("d_k", "d_v"), ((16, 100), (256, 256)))
def test_sides_in_full_precision(d_k: int, d_v: int) -> None:
    check(draw(70, d_k, d_v, torch.float32), BOUNDS[torch.float32])


@pytest.mark.parametrize("kind", ("bare", "mild", "steep", "open", "closed", "shut channels", "integers", "ones"))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_kinds_of_input(kind: str, dtype: torch.dtype) -> None:
    for inputs in (draw(200, 128, 128, dtype, kind), without_strengths(draw(200, 128, 128, dtype, kind))):
        check(inputs, BOUNDS[dtype] * LOOSE.get(kind, 1))


@pytest.mark.parametrize("kind", ("bare", "mild", "steep", "open", "closed", "shut channels", "ones"))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_reads_before_the_token(kind: str, dtype: torch.dtype) -> None:
    for inputs in (draw(200, 128, 128, dtype, kind), without_strengths(draw(200, 128, 64, dtype, kind))):
        check(with_bonus(inputs), BOUNDS[dtype] * LOOSE.get(kind, 1))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_reads_before_the_token_of_other_shapes(dtype: torch.dtype) -> None:
    for length, d_k, d_v in ((1, 64, 64), (65, 16, 100), (130, 256, 256)):
        check(with_bonus(draw(length, d_k, d_v, dtype)), BOUNDS[dtype])
    check(with_bonus(without_strengths(draw(100, 64, 64, dtype, h=2, hv=4))), BOUNDS[dtype])
    ends = torch.tensor([0, 0, 1, 64, 264, 264, 328], device="cuda", dtype=torch.int64)
    check(with_bonus(draw(328, 64, 64, dtype, b=1, h=2, hv=4, units=6)), BOUNDS[dtype], units=6, cu_seqlens=ends)


@pytest.mark.parametrize("kind", ("bare", "mild", "mixed", "steep", "open", "closed", "shut channels", "ones"))
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_averages(kind: str, dtype: torch.dtype) -> None:
    """An entry takes what its gate forgets, which is little of open ones: their keys are long here.

    Ones that average ones ask their gates for nothing, whatever is rounded: they begin with twos.
    """
    for inputs in (draw(200, 128, 128, dtype, kind), without_strengths(draw(200, 128, 64, dtype, kind))):
        if kind == "open":
            inputs["k"] = inputs["k"] * 2**14
        if kind == "ones":
            inputs["start"] = 2 * inputs["start"]
        check(inputs, BOUNDS[dtype] * LOOSE.get(kind, 1), rule="average")


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_averages_of_other_shapes(dtype: torch.dtype) -> None:
    for length, d_k, d_v in ((1, 64, 64), (65, 16, 100), (130, 256, 256)):
        check(draw(length, d_k, d_v, dtype), BOUNDS[dtype], rule="average")
    check(without_strengths(draw(100, 64, 64, dtype, h=2, hv=4)), BOUNDS[dtype], rule="average")
    ends = torch.tensor([0, 0, 1, 64, 264, 264, 328], device="cuda", dtype=torch.int64)
    given = draw(328, 64, 64, dtype, b=1, h=2, hv=4, units=6)
    check(given, BOUNDS[dtype], units=6, cu_seqlens=ends, rule="average")


def test_averages_repeat_bit_for_bit_on_a_full_chip() -> None:
    inputs = draw(1500, 128, 128, torch.bfloat16, "bare", b=8, h=16)
    do, dfinal = gradients_of(inputs)
    first = run(chain, inputs, do, dfinal, rule="average")
    for _ in range(4):
        for name, x in run(chain, inputs, do, dfinal, rule="average").items():
            assert torch.equal(first[name], x), name


@pytest.mark.parametrize("logs", (torch.bfloat16, torch.float16))
def test_logs_in_sixteen_bits(logs: torch.dtype) -> None:
    check(draw(200, 128, 128, torch.bfloat16, logs=logs), BOUNDS[torch.bfloat16])
    check(without_strengths(draw(200, 128, 64, torch.bfloat16, "mild", logs=logs)), BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("h", "hv"), ((1, 3), (2, 4)))
def test_value_heads_share_keys(dtype: torch.dtype, h: int, hv: int) -> None:
    check(draw(100, 64, 64, dtype, h=h, hv=hv), BOUNDS[dtype])
    check(without_strengths(draw(100, 64, 64, dtype, h=h, hv=hv)), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_packed_sequences(dtype: torch.dtype) -> None:
    ends = torch.tensor([0, 0, 1, 64, 264, 264, 328], device="cuda", dtype=torch.int64)
    check(draw(328, 64, 64, dtype, b=1, h=2, hv=4, units=6), BOUNDS[dtype], units=6, cu_seqlens=ends)


def test_nothing_to_do() -> None:
    inputs = draw(0, 64, 64, torch.bfloat16)
    o, final = chain(**inputs)
    assert o.shape == (2, 0, 2, 64) and torch.equal(final, inputs["start"])
    o, final = chain(**draw(5, 64, 64, torch.bfloat16, b=0, units=0))
    assert o.shape == (0, 5, 2, 64) and final.shape == (0, 2, 64, 64)


def test_repeats_bit_for_bit_and_writes_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(777, 128, 100, torch.bfloat16)
    given = gradients_of(inputs)
    first = run(chain, inputs, *given)
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert torch.empty(4, device="cuda").isnan().all()
        second = run(chain, inputs, *given)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name
    with torch.no_grad():  # nothing is kept for gradients
        o, final = chain(**inputs)
    assert torch.equal(o, first["o"]) and torch.equal(final, first["final"])


@pytest.mark.parametrize(("d_k", "d_v"), ((64, 64), (128, 128)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("kind", ("mixed", "bare", "bonus"))
def test_a_full_chip_repeats_and_equals_its_parts(
    d_k: int, d_v: int, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults of a compiler show under load: the same bits five times over, and alone."""
    monkeypatch.setattr(hopper_diagonal, "segments_of", lambda *_: 1)  # fewer heads are cut, and then round otherwise
    inputs = draw(1500, d_k, d_v, dtype, "bare" if kind == "bonus" else kind, b=8, h=16)
    inputs = with_bonus(inputs) if kind == "bonus" else inputs
    do, dfinal = gradients_of(inputs)
    first = run(chain, inputs, do, dfinal)
    for _ in range(4):
        for name, x in run(chain, inputs, do, dfinal).items():
            assert torch.equal(first[name], x), name
    alone = run(chain, {n: x if n == "bonus" else x[3:4] for n, x in inputs.items()}, do[3:4], dfinal[3:4])
    for name, x in alone.items():
        assert name == "dbonus" or torch.equal(first[name][3:4], x), name  # which is a sum over all sequences


def test_segments_hand_over_the_state() -> None:
    inputs = draw(300, 64, 64, torch.bfloat16, b=3, h=5)
    o, final = chain(**inputs)
    start, outs = inputs.pop("start"), []
    for part in (slice(0, 128), slice(128, 300)):
        out, start = chain(**{n: x[:, part] for n, x in inputs.items()}, start=start)
        outs.append(out)
    assert (torch.cat(outs, 1) - o).abs().max() < 1e-2 * o.abs().max()
    assert (start - final).norm() < 1e-3 * final.norm()


@pytest.mark.parametrize("segments", (2, 3, 5, 100))
@pytest.mark.parametrize("kind", ("mild", "mixed", "closed"))
def test_segments_side_by_side(segments: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = without_strengths(draw(700, 128, 64, torch.bfloat16, kind, h=1, hv=3))
    given = gradients_of(inputs)
    whole = run(chain, inputs, *given)
    monkeypatch.setattr(hopper_diagonal, "segments_of", lambda *_: segments)
    for name, x in run(chain, inputs, *given).items():
        scale = max(whole[name].norm().item(), 1e-3 * x.numel() ** 0.5)
        assert (x - whole[name]).norm() < 4e-3 * scale, name
    check(inputs, BOUNDS[torch.bfloat16])
    check(with_bonus(inputs), BOUNDS[torch.bfloat16])
    inputs.pop("start")
    check(inputs, BOUNDS[torch.bfloat16])


def test_compiles_as_one_graph() -> None:
    inputs = draw(100, 64, 64, torch.bfloat16)
    given = gradients_of(inputs)
    eager = run(chain, inputs, *given)
    compiled = run(torch.compile(chain, fullgraph=True), inputs, *given)
    for name, x in eager.items():
        assert torch.equal(x, compiled[name]), name


def time_it() -> None:
    """`python tests/gpu/test_diagonal.py`: milliseconds at B 8, T 4096, H 16, D 128."""
    for logs in (torch.float32, torch.bfloat16):
        for kind in ("bare", "mixed"):
            inputs = draw(4096, 128, 128, torch.bfloat16, kind, b=8, h=16, logs=logs)
            forward, both = time({n: x.requires_grad_() for n, x in inputs.items() if n in "qkvg"})
            print(f"{logs} logs, {kind}: forward {forward:.3f} ms, forward and backward {both:.3f} ms")


def time(inputs: Inputs) -> tuple[float, float]:
    from triton.testing import do_bench

    do = torch.randn_like(inputs["v"])
    leaves = list(inputs.values())
    with torch.no_grad():
        forward = do_bench(lambda: chain(**inputs), return_mode="median")
    return forward, do_bench(lambda: torch.autograd.grad(chain(**inputs)[0], leaves, do), return_mode="median")


if __name__ == "__main__":
    time_it()
